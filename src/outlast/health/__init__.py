"""Know before it breaks: sums that check themselves, tests that find bad hardware, diaries of devices, their readings.

For: everything that says how well a device is, and what it has done wrong. It must never change a result (what is
checked has the bits of what is not), hold up a step for a sensor, or end a run because something could not be read.
Only `CheckedSums` and the known-answer tests need torch; the rest never reaches it, so the facade is lazy.
Read first: `_checks.py` (what may be asked for), then `_checked.py`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outlast.health._answers import Answers
    from outlast.health._checked import CheckedSums
    from outlast.health._checks import ProductChecks, SumFinding
    from outlast.health._device_test import (
        DeviceTest,
        QuestionsInTurn,
        WrongAnswer,
        ask_device,
        device_identity,
        device_of,
    )
    from outlast.health._diary import Diary, DiaryEntry, default_diary
    from outlast.health._foretold import Foretold, KindRecord, alarm_kinds, foretold_of, worth_of
    from outlast.health._learn import learn_run, remember_run
    from outlast.health._link_probes import (
        BadLink,
        Fabric,
        LinkProbe,
        LinkReport,
        ProbedPair,
        link_report,
        load_fabric,
        read_probes,
    )
    from outlast.health._own_note import own_note
    from outlast.health._ranking import DeviceRecord, rank_devices, records_of, suspicion
    from outlast.health._run_links import RunLinks, fabric_of_run, pairs_of_run, run_links

_HOMES = {
    "Answers": "_answers",
    "CheckedSums": "_checked",
    "DeviceRecord": "_ranking",
    "DeviceTest": "_device_test",
    "Diary": "_diary",
    "DiaryEntry": "_diary",
    "default_diary": "_diary",
    "Foretold": "_foretold",
    "KindRecord": "_foretold",
    "alarm_kinds": "_foretold",
    "foretold_of": "_foretold",
    "worth_of": "_foretold",
    "suspicion": "_ranking",
    "BadLink": "_link_probes",
    "Fabric": "_link_probes",
    "LinkProbe": "_link_probes",
    "LinkReport": "_link_probes",
    "ProbedPair": "_link_probes",
    "link_report": "_link_probes",
    "load_fabric": "_link_probes",
    "read_probes": "_link_probes",
    "fabric_of_run": "_run_links",
    "pairs_of_run": "_run_links",
    "run_links": "_run_links",
    "RunLinks": "_run_links",
    "learn_run": "_learn",
    "remember_run": "_learn",
    "rank_devices": "_ranking",
    "own_note": "_own_note",
    "records_of": "_ranking",
    "ProductChecks": "_checks",
    "SumFinding": "_checks",
    "QuestionsInTurn": "_device_test",
    "WrongAnswer": "_device_test",
    "device_identity": "_device_test",
    "device_of": "_device_test",
    "ask_device": "_device_test",
}
__all__ = [
    "DeviceRecord", "Diary", "DiaryEntry", "default_diary", "learn_run", "remember_run", "rank_devices", "records_of",
    "own_note",
    "Answers", "CheckedSums", "DeviceTest", "ProductChecks", "SumFinding", "WrongAnswer", "device_identity",
    "device_of", "ask_device", "Foretold", "KindRecord", "alarm_kinds", "foretold_of",
    "BadLink", "Fabric", "LinkProbe", "LinkReport", "ProbedPair", "link_report", "load_fabric", "read_probes",
    "QuestionsInTurn", "suspicion", "worth_of", "fabric_of_run", "pairs_of_run",
    "RunLinks", "run_links",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"outlast.health.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'outlast.health' has no attribute {name!r}")
