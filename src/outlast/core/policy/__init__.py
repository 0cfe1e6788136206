"""decide(belief, state) -> Decision. The same objects decide at plan time and at run time; scalars or arrays.

For: every choice that failures force. It must never read a clock, draw a number or import torch; with floats it does
not import numpy either. Read first: `_belief.py`, then `_interval.py`; at run time also `_record.py`,
`_vacancies.py`, `deadlines.py`, `evictions.py`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from outlast.core.policy._admission import Admission, AdmissionPolicy, most_rows_per_host
from outlast.core.policy._alarms import AlarmBelief, AlarmDecision, AlarmPolicy, AlarmState
from outlast.core.policy._belief import Belief, ClassPrior, LossRecord
from outlast.core.policy._device_hazard import DeviceHazard, DeviceHistory, learn_ages, learn_recency
from outlast.core.policy._hazard import Losses, next_save_s
from outlast.core.policy._interval import IntervalDecision, IntervalPolicy, IntervalState
from outlast.core.policy._prognosis import (
    ActionCosts,
    AlarmKind,
    Outlook,
    Prognosis,
    alarm_name,
    choose_action,
    prior_of,
    wilson,
)
from outlast.core.policy._record import Believed, RunPrior, RunRecord, SaveDecision
from outlast.core.policy._restart import RestartDecision, RestartPolicy
from outlast.core.policy._spares import SparesDecision, SparesPolicy, SparesState
from outlast.core.policy._vacancies import Replacements, VacancyDecision, VacancyPolicy, VacancyState
from outlast.core.policy._work import WorkDecision, WorkPolicy, WorkState, longest_s
from outlast.core.policy.audits import AuditDecision, AuditPolicy, AuditState, audit_share
from outlast.core.policy.bands import Band, BandReading
from outlast.core.policy.deadlines import DeadlineDecision, DeadlinePolicy, DeadlineState, Durations
from outlast.core.policy.evictions import EvictionBelief, EvictionDecision, EvictionPolicy, EvictionState
from outlast.core.policy.guard_records import (
    PRESETS,
    Culprit,
    GuardEvidence,
    GuardNote,
    Guards,
    GuardState,
    Ruling,
    Verdict,
    VerdictAction,
)
from outlast.core.policy.rules_catalogue import (
    PRE_STEPS,
    RULES,
    PreFact,
    RuleFact,
    check_choice,
    check_rule,
    kappa,
    largest_f,
)
from outlast.core.policy.step_decisions import (
    agree,
    decide,
    escalate,
    escalate_fleeting,
    fresh_state,
    is_nonfinite,
    is_spike,
    remember,
    unreproduced,
)

if TYPE_CHECKING:
    from outlast.core.policy._records import RunRecords

__all__ = [
    "ActionCosts", "AlarmKind", "DeviceHazard", "DeviceHistory", "Outlook", "Prognosis", "alarm_name",
    "choose_action", "learn_ages", "learn_recency", "prior_of", "wilson", "PRESETS", "PRE_STEPS", "RULES",
    "Admission", "AdmissionPolicy", "AlarmBelief", "AlarmDecision", "AlarmPolicy", "AlarmState", "AuditDecision",
    "AuditPolicy", "AuditState", "Band", "Belief", "Believed", "ClassPrior", "Culprit", "DeadlineDecision",
    "DeadlinePolicy", "DeadlineState", "Durations", "EvictionBelief", "EvictionDecision", "EvictionPolicy",
    "EvictionState", "GuardEvidence", "GuardNote", "GuardState", "Guards", "IntervalDecision", "IntervalPolicy",
    "IntervalState", "LossRecord", "Losses", "PreFact", "BandReading", "RuleFact", "Ruling", "RestartDecision",
    "RestartPolicy", "RunPrior", "RunRecord", "RunRecords", "SaveDecision", "SparesDecision", "Replacements",
    "SparesPolicy", "SparesState", "VacancyDecision", "VacancyPolicy", "VacancyState", "Verdict", "VerdictAction",
    "WorkDecision", "WorkPolicy", "WorkState", "agree", "audit_share", "check_choice", "check_rule", "decide",
    "escalate", "escalate_fleeting", "fresh_state", "is_nonfinite", "is_spike", "kappa", "largest_f", "longest_s",
    "most_rows_per_host", "next_save_s", "remember", "unreproduced",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """The form for many runs loads numpy, so only where it is asked for."""
    if name == "RunRecords":
        return importlib.import_module("outlast.core.policy._records").RunRecords
    raise AttributeError(f"module 'outlast.core.policy' has no attribute {name!r}")
