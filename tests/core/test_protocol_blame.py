"""Who is blamed, as the coordinator carries it out: lasting wrongs quickly, fleeting ones only beyond chance."""

from __future__ import annotations

from typing import Literal

import pytest

from outlast.core.policy import Culprit, Verdict
from outlast.core.protocol import FILE, Coordinator, Settings
from outlast.core.protocol import messages as m
from outlast.core.protocol.types import differences

Sure = Literal["certain", "possible"]


def _fleet() -> Coordinator:
    c = Coordinator(Settings(num_replicas=2, max_restarts=100), epoch=1)
    c.handle(0.0, m.AgentHello(agent="a0", pid=1))
    for slot in ("r0", "r1"):
        c.handle(0.0, m.Spawned(member=f"{slot}.1", agent="a0", pid=2))
        c.handle(0.0, m.Hello(member=f"{slot}.1", agent="a0", epoch=0, facts={"microbatches": "8"}))
    return c


def _judged(c: Coordinator, step: int, *, fleeting: bool = False, sure: Sure = "certain") -> str:
    """The action that was written down against r0's process of that time, which then ends."""
    name = f"r0.{c.roster.incarnations['r0']}"
    c.handle(0.0, m.Hello(member=name, agent="a0", epoch=0, facts={"microbatches": "8"}))
    who = Culprit(replica=name)
    verdict = Verdict(action="replace", evidence="nan", culprit=who, fleeting=fleeting, confidence=sure)
    actions = c.handle(0.0, m.Judged(member="r1.1", step=step, verdict=verdict, against=(name,)))
    c.handle(0.0, m.Exited(member=name, cause="evicted"))
    (written,) = [a for a in actions if isinstance(a, m.JournalEntry) and a.kind == "verdict"]
    return str(written.fields["action"])


@pytest.mark.parametrize(("fleeting", "most"), [(False, 1), (True, 10)])
def test_a_slot_is_quarantined_at_the_second_lasting_wrong_and_a_rare_run_of_fleeting_ones(
    fleeting: bool, most: int
) -> None:
    c = _fleet()
    assert [_judged(c, step, fleeting=fleeting) for step in range(most)] == ["replace"] * most
    assert c.roster.is_alive(f"r0.{most + 1}")
    successor = Coordinator(c.settings, 2, m.FleetRecord(offences=c.roster.offences, fleeting=c.roster.fleeting))
    assert successor.roster.fleeting == c.roster.fleeting
    assert _judged(c, most, fleeting=fleeting) == "quarantine"
    assert not c.roster.is_alive(f"r0.{most + 2}")


def test_who_differs_as_it_joins_counts_only_where_one_was_wrong_before() -> None:
    """A loop that a joiner does not repeat looks the same, and is no device's fault."""
    c = _fleet()
    assert [_judged(c, step, sure="possible") for step in range(5)] == ["replace"] * 5
    assert _judged(c, 5) == "replace"
    assert _judged(c, 6, sure="possible") == "quarantine"


def test_files_are_compared_where_both_have_them() -> None:
    run = {"seed": "0", FILE + "train.py": "ab", FILE + "lazy.py": "cd"}
    assert differences(run, {"seed": "0", FILE + "train.py": "ab", FILE + "other.py": "ef"}) == ""
    assert differences(run, run | {FILE + "train.py": "xx"}).startswith("train.py was changed since the run began")
    assert differences(run, {"seed": "1"}) == "seed: 1 here, 0 in the run"


def test_a_script_that_never_joins_is_told_once() -> None:
    c = Coordinator(Settings(num_replicas=2), epoch=1)
    c.handle(0.0, m.AgentHello(agent="a0", pid=1))
    told = [c.handle(30.0, m.Unjoined(member=name, for_s=30.0)) for name in ("r0.1", "r1.1")]
    texts = [str(a.fields["text"]) for actions in told for a in actions if isinstance(a, m.JournalEntry)]
    assert len(texts) == 1
    assert texts[0].startswith("r0.1 has run for 30 s without outlast.join()")
    assert "OutlastTrainer" in texts[0]
    assert "OutlastStrategy" in texts[0]


def test_a_slow_replica_of_a_script_that_joins_is_not_told_of() -> None:
    assert not any(isinstance(a, m.JournalEntry) for a in _fleet().handle(30.0, m.Unjoined(member="r2.1", for_s=30.0)))
