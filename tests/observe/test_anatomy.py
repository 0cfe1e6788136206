"""A step's anatomy as it is shown: means of a member's steps, who holds up the others, which pairs lose words."""

from __future__ import annotations

from typing import Any

from outlast.core import events as ev
from outlast.core.step_parts import PairWait
from outlast.observe import render_why, why
from outlast.observe.step_anatomy import anatomy_of


def word(replica: str, steps: int = 10, waits: dict[str, PairWait] | None = None, **seconds: float) -> ev.StepAnatomy:
    return ev.StepAnatomy(at_s=1.0, replica=replica, steps=steps, seconds=seconds, waits=waits or {})


def test_the_newest_word_of_each_member_counts_and_members_stand_in_order() -> None:
    waits = {"r1.1": PairWait(waited_s=1.0), "r2.1": PairWait(waited_s=3.0)}
    found = anatomy_of([word("r10.1"), word("r2.1", 4, compute=8.0), word("r2.1", 5, waits, compute=20.0, wait=1.0)])
    assert [(m.replica, m.steps, m.compute_s, m.wait_s, m.waits_for) for m in found.members] == [
        ("r2.1", 5, 4.0, 0.2, "r2.1"), ("r10.1", 10, 0.0, 0.0, ""),
    ]  # fmt: skip
    assert [pair.peer for pair in found.pairs] == ["r2.1", "r1.1"]


def test_a_members_share_is_told() -> None:
    told = ev.StepAnatomy(at_s=1.0, replica="r1.1", steps=8, seconds={}, batches=(21, 1.0))
    (member,) = anatomy_of([told]).members
    assert member.microbatches == 2.62


def test_who_holds_up_the_others_is_named_and_noise_is_not() -> None:
    three = [word("r0.1", compute=1.0), word("r1.1", compute=1.1), word("r2.1", compute=2.2, load=0.2)]
    assert anatomy_of(three).said == [
        "r2.1 takes 2.2 times as long as the median member for its part of a step; the others wait for it"
    ]
    assert anatomy_of(three[:2]).said == []
    assert anatomy_of([word("r0.1", compute=0.001), word("r1.1", compute=0.002)]).said == []
    assert anatomy_of([word("r0.1", 0)]).members == []


def test_pairs_that_lose_or_delay_are_named_from_enough_of_them_only() -> None:
    def said(**figures: Any) -> list[str]:
        return anatomy_of([word("r0.1", waits={"r1.1": PairWait(**figures)})]).said

    assert said(segments=200, resent=8) == ["4.0% of what r0.1 sends to r1.1 is sent again"]
    assert said(exchanges=100, late=20) == ["headers of r1.1 reach r0.1 late in 20% of steps"]
    for quiet in ({"segments": 10, "resent": 9}, {"segments": 1000, "resent": 9}, {"exchanges": 100, "late": 4}):
        assert said(**quiet) == []


def test_a_large_fleet_is_told_by_those_that_compute_longest(story: Any) -> None:
    words = [word(f"r{number}.1", compute=1.0 + number) for number in range(100)]
    told = render_why(why([*story.whole, *words]))
    assert "A step, by member (those that compute longest; 86 more)" in told
    assert "r99.1" in told
    assert "\nr3.1 " not in told


def test_who_has_died_holds_nobody_up() -> None:
    gone = ev.ReplicaExited(at_s=2.0, replica="r1.1", cause="signal", detail="", noticed_by="agent")
    slow = [word("r0.1", compute=1.0), word("r1.1", compute=9.0), word("r2.1", compute=1.0)]
    assert anatomy_of(slow).said
    found = anatomy_of([*slow, gone, word("r1.2", compute=1.0)])
    assert ([m.replica for m in found.members], found.said) == (["r0.1", "r1.2", "r2.1"], [])
