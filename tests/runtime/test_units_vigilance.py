"""The share that outlast chooses: from what was found, the same on all, and part of the state."""

from __future__ import annotations

from typing import Any

import pytest

from outlast.core.policy import audit_share
from outlast.core.policy.audits import silent_belief
from outlast.core.protocol import Evidence, Header, ViewId
from outlast.core.protocol.disputes import AuditFinding
from outlast.core.protocol.step.audits import Audits
from outlast.errors import ConfigError
from outlast.runtime.checks._audit_share import Vigilance
from outlast.runtime.training.step_checks import AuditsObserved


def heads(step: int, *rows: tuple[float, tuple[tuple[int, str], ...]]) -> list[Header]:
    return [
        Header(member=f"r{i}.1", step=step, view=ViewId(1, 1), heard=0, audit=Evidence(step_s=s, incidents=found))
        for i, (s, found) in enumerate(rows)
    ]


def test_what_is_found_raises_the_share_up_to_the_budget_and_quiet_lowers_it() -> None:
    shares = [audit_share("auto:0.2", 512, 1.0, silent_belief(found, 0.0)) for found in (0, 1, 3, 1000)]
    assert shares == sorted(shares)
    assert shares[1] > 3 * shares[0], "the first incident of this fleet says more than another fleet's rate"
    assert audit_share("auto:0.001", 100_000, 10.0, silent_belief(9)) == 0.001
    assert audit_share("auto", 512, 1.0, silent_belief(0, 1e12)) < shares[0]
    for wrong in ("auto:0", "auto:1.5", "auto:x"):
        with pytest.raises(ConfigError, match="budget"):
            audit_share(wrong, 4)


def test_one_incident_counts_once_whoever_tells_of_it() -> None:
    one, other = Vigilance("auto", 3), Vigilance("auto", 3)
    before = one.share
    seen = one.observed(heads(4, (2.0, ()), (3.0, ((3, "r1.1"),)), (9.0, ((3, "r1.1"),))))
    assert seen == AuditsObserved(machines=3, step_s=3.0, incidents=((3, "r1.1"),))
    for each in (one, other):
        each.apply(seen)
    assert one.share == other.share > before
    assert one.news([(3, "r1.1"), (5, "r2.1"), (5, "r2.1")]) == ((5, "r2.1"),)
    again = one.observed(heads(5, (3.0, ((3, "r1.1"),))))
    assert again.incidents == ()


def test_who_joins_has_the_same_share_and_the_same_memory() -> None:
    old, new = Vigilance("auto", 8), Vigilance("auto", 8)
    old.apply(AuditsObserved(machines=5, step_s=0.5, incidents=((1, "r3.1"),)))
    values: dict[str, Any] = old.state_dict()
    new.load_state_dict(values)
    assert (new.share, new.news([(1, "r3.1")])) == (old.share, ())


def test_findings_and_differing_states_are_incidents() -> None:
    audits = Audits("r0.1")
    audits.hold(
        ViewId(1, 1),
        [AuditFinding(step=2, leaf=-1, culprit="r1.1", kind="transient", agreeing=2, asked=3, bucket=0)] * 2,
    )
    audits.noticed(2, "r1.1")
    audits.noticed(7, "r2.1")
    assert audits.incidents == [(2, "r1.1"), (7, "r2.1")]
