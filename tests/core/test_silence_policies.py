"""Deadlines and evictions are one object each, asked by a member, the coordinator, the adversary and the plan."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from outlast.config import RunConfig
from outlast.core.phases import Phase
from outlast.core.policy import (
    DeadlineDecision,
    DeadlinePolicy,
    DeadlineState,
    Durations,
    EvictionBelief,
    EvictionDecision,
    EvictionPolicy,
    EvictionState,
)
from outlast.core.policy.evictions import silence_s
from outlast.core.protocol import Coordinator, Settings
from outlast.core.protocol import messages as m
from outlast.plan import FailureClass, Job, simulate
from outlast.plan._compiled import compile_job
from outlast.prove.adversary import play, scenario_of
from outlast.runtime.coordinator._hosts import Hosts, _Known
from outlast.runtime.host.silence import Watch
from outlast.runtime.member._phase_clock import PhaseClock

JOB = Job(
    classes=(
        FailureClass(name="hard", node_mtbf_h=900.0, masked=0.9),
        FailureClass(name="hang", node_mtbf_h=700.0, hangs=True),
    ),
    accelerators=512, days=2.0, step_s=2.0, stall_floor_s=0.5, outside_s=900.0,
)  # fmt: skip
HUNG = scenario_of(3)
"""Its one eviction is of a member that hangs while the others wait for it."""


def published_s() -> float:
    """What a member publishes as its deadline after phases of two seconds."""
    allowed: list[float] = []

    def enter(phase: Phase, step: int, microbatch: int, bucket: int, allowed_s: float) -> int:
        allowed.append(allowed_s)
        return 2_000_000_000 * len(allowed)

    clock = PhaseClock(cast(Any, SimpleNamespace(enter=enter)), RunConfig(stall_floor_s=0.5, formation_s=1e9))
    for _ in range(5):
        clock.enter(Phase.BACKWARD, 0)
        clock.enter(Phase.BODY, 0)
    return allowed[-2]


def child_given_up_s() -> float:
    """After how much silence the launcher sees that a child is stopped, which has beaten every two seconds."""
    alive_s = 0.0
    beats = cast(Any, SimpleNamespace(read=lambda: (0, 0, 0, alive_s, 0.0)))
    watch = Watch(1, beats, 0.5, 9.0, lambda _: ("T" if alive_s == 20.0 else "S", False))
    for look in range(1, 121):
        now_s = look / 4
        alive_s = min(now_s // 2 * 2, 20.0)
        if watch.look(now_s)[0]:
            return now_s - alive_s
    return 10.0


def host_given_up_s() -> float:
    """How long a host may be silent that is waited for and has been heard of every two seconds."""
    known = _Known(said=cast(Any, None), heard_s=0.0, spoke_s=0.0, wanted_s=99.5, connected={"a0"})
    for _ in range(5):
        known.gaps.observe(2.0)
    return Hosts(2, 0.5, 60.0, "here", lambda member: "")._limit(known, 100.0)[0]


def evicted(place: int = 0) -> list[m.Kill]:
    """Whom the coordinator kills of two members of which one hangs, and why. `place`: of the rank that hangs."""
    c = Coordinator(Settings(num_replicas=2), epoch=1)
    c.handle(0.0, m.AgentHello(agent="a0", pid=1))
    for name in ("r0.1", "r1.1"):
        c.handle(0.0, m.Spawned(member=name, agent="a0", pid=2))
    for name in ("r0.1", "r1.1"):
        c.handle(0.0, m.Hello(member=name, agent="a0", epoch=0, facts={"microbatches": "8"}))
    assert c.view is not None
    for name in c.view.members:
        c.handle(0.0, m.Formed(member=name, view=c.view.id, step=0))
    found = c.handle(
        9.0,
        m.Examined(
            member="r0.1",
            state="S",
            traced=False,
            phase=Phase.BACKWARD,
            silent_s=7.0,
            cpu_advanced=False,
            allowed_s=6.0,
            place=place,
        ),
    )
    return [a.message for a in found if isinstance(a, m.Tell) and isinstance(a.message, m.Kill)]


def whom(kills: list[m.Kill]) -> list[str]:
    return [each.member for each in kills]


def test_who_is_evicted_is_told_with_the_rank_that_hangs() -> None:
    assert [each.reason.partition(":")[0] for each in (*evicted(), *evicted(place=2))] == [
        "silent for 7.00 s in backward", "rank 2",
    ]  # fmt: skip


@pytest.mark.parametrize("phase", [p for p in Phase if p.name.startswith("JOIN_")] + [Phase.IDLE])
@pytest.mark.parametrize(("kernel", "works"), [("S", False), ("R", True), ("D", False)])
def test_who_hangs_outside_the_view_is_given_up_whatever_it_is_in(phase: Phase, kernel: str, works: bool) -> None:
    """Nobody waits for a joiner. Its agent says how long it gave no sign; asleep or not, `outside_s` bounds it."""
    policy, belief = EvictionPolicy(outside_s=10.0), EvictionBelief(allowed_s=float("inf"), awaited_s=float("inf"))
    state = EvictionState(
        kernel=kernel, phase=phase, silent_s=10.5, waited_s=10.5, cpu_advanced=works, asked=False, seated=False
    )
    found = policy.decide(belief, state)
    assert (found.action, "silent for 10.5 s in" in found.reason) == ("evict", True)
    assert policy.decide(belief, replace(state, silent_s=9.5, waited_s=9.5)).action != "evict"
    assert policy.decide(belief, replace(state, traced=True)).action == "wait"


def noticed_s() -> tuple[float, float]:
    """After how long a hang is noticed in a plan, and the share of time that hangs cost in a simulation."""
    return float(compile_job(JOB).detection_s[-1]), float(np.mean(simulate(JOB, 8, seed=1).ettr().mean))


def test_a_deadline_policy_replaced_changes_the_run_the_adversary_and_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    assert published_s() == host_given_up_s() == 6.0, "three times what it takes"
    assert 6.0 < child_given_up_s() < 6.5
    assert (noticed_s()[0], compile_job(JOB).detection_s[0]) == (6.0, JOB.classes[0].detection_s)
    assert play(HUNG).kills == 1
    before = noticed_s()[1]
    own = DeadlinePolicy.decide

    def patient(self: DeadlinePolicy, belief: Durations, state: DeadlineState) -> DeadlineDecision:
        return replace(own(self, belief, state), allowed_s=40.0)

    monkeypatch.setattr(DeadlinePolicy, "decide", patient)
    assert published_s() == host_given_up_s() == noticed_s()[0] == 40.0
    assert child_given_up_s() == 10.0, "not within the looks that were made"
    assert play(HUNG).kills == 0
    assert noticed_s()[1] < before


def test_an_eviction_policy_replaced_changes_the_run_the_adversary_and_the_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert (whom(evicted()), noticed_s()[0], play(HUNG).kills) == (["r0.1"], 6.0, 1)
    before = noticed_s()[1]
    waits = EvictionDecision(action="wait", reason="")
    monkeypatch.setattr(EvictionPolicy, "decide", lambda self, belief, state: waits)
    assert (whom(evicted()), noticed_s()[0], play(HUNG).kills) == ([], 900.0, 0), "it is waited for as long as may be"
    assert noticed_s()[1] < before


def test_a_hang_is_noticed_by_its_floor_and_at_the_latest_by_outside_s() -> None:
    deadlines, evictions = DeadlinePolicy(floor_s=0.5), EvictionPolicy(outside_s=90.0)
    assert silence_s(1e-4, deadlines, evictions) == 0.5
    assert silence_s(2.0, deadlines, evictions) == 6.0
    assert silence_s(50.0, deadlines, evictions) == 90.0
