"""Mixed hardware: a simulated job has the shares of work that a run's coordinator would give it, by the same policy."""

from __future__ import annotations

from typing import Any

import pytest

from outlast.core.policy import WorkDecision, WorkPolicy
from outlast.core.protocol import Coordinator, Settings
from outlast.core.protocol import host_messages as hm
from outlast.core.protocol import messages as m
from outlast.errors import ConfigError
from outlast.plan import FailureClass, Hardware, Job, simulate
from outlast.plan._compiled import speed_of

MIX = (Hardware(share=0.75), Hardware(share=0.25, speed=1 / 3))


def job(microbatches: int, *, nodes: int = 4, balanced: bool = True, hardware: tuple[Hardware, ...] = MIX) -> Job:
    return Job(
        classes=(FailureClass(name="death", node_mtbf_h=1e6),), accelerators=8 * nodes, days=0.1, hardware=hardware,
        balanced=balanced, microbatches=microbatches,
    )  # fmt: skip


def told(leaf_s: tuple[float, ...], microbatches: int) -> tuple[int, ...]:
    """What a coordinator plans for members of these speeds; () for even shares."""
    names = [f"r{i}.1" for i in range(len(leaf_s))]
    c = Coordinator(Settings(num_replicas=len(names)), 1)
    c.handle(0.0, m.AgentHello(agent="a0", pid=1))
    for name in names:
        facts = {"microbatches": str(microbatches)}
        c.handle(0.0, m.Hello(member=name, agent="a0", epoch=0, state="fresh", facts=facts))
    view = c.planned or c.view
    assert view is not None
    for name in names:
        c.handle(1.0, m.Formed(member=name, view=view.id, step=3))
    c.handle(5.0, hm.SpeedsMeasured(leaf_s=dict(zip(names, leaf_s, strict=True))))
    return c.planned.work if c.planned is not None else ()


@pytest.mark.parametrize(("microbatches", "work"), [(20, (6, 6, 6, 2)), (8, (3, 2, 2, 1)), (4, ())])
def test_a_mix_is_as_fast_as_the_shares_that_the_coordinator_gives_it(microbatches: int, work: tuple[int, ...]) -> None:
    assert told((1.0, 1.0, 1.0, 3.0), microbatches) == work
    shares = work or (microbatches // 4,) * 4
    longest = max(n * leaf for n, leaf in zip(shares, (1, 1, 1, 3), strict=True))
    assert simulate(job(microbatches), 2).efficiency == pytest.approx(microbatches / 4 / longest)


def test_many_microbatches_come_near_what_the_mix_can_do_and_equal_shares_to_the_slowest() -> None:
    assert speed_of(job(0), WorkPolicy()) == pytest.approx(10 / 12)
    assert speed_of(job(4096), WorkPolicy()) == pytest.approx(10 / 12, rel=2e-3)
    assert speed_of(job(4096, balanced=False), WorkPolicy()) == pytest.approx(1 / 3)
    assert speed_of(job(0, balanced=False), WorkPolicy()) == 1 / 3
    near = (Hardware(share=0.5), Hardware(share=0.5, speed=0.95))
    moved = speed_of(job(4096, hardware=near), WorkPolicy())
    assert moved == pytest.approx(0.95), "a run moves no work for less than a tenth"


def test_what_does_not_divide_is_waited_for_in_any_mix() -> None:
    same = (Hardware(share=1.0),)
    assert speed_of(job(6, hardware=same), WorkPolicy()) == 0.75
    assert speed_of(job(2, hardware=same), WorkPolicy()) == 0.5, "two have nothing to do"
    with pytest.raises(ConfigError, match="microbatches"):
        job(-1)


def test_the_policy_replaced_changes_the_coordinator_and_the_simulation(monkeypatch: pytest.MonkeyPatch) -> None:
    before = told((1.0, 1.0, 1.0, 3.0), 20), simulate(job(20), 2).efficiency

    def all_to_the_first(self: Any, belief: Any, state: Any) -> WorkDecision:
        return WorkDecision(work=(17, 1, 1, 1))

    monkeypatch.setattr(WorkPolicy, "decide", all_to_the_first)
    after = told((1.0, 1.0, 1.0, 3.0), 20), simulate(job(20), 2).efficiency
    assert before == ((6, 6, 6, 2), pytest.approx(5 / 6))
    assert after == ((17, 1, 1, 1), pytest.approx(5 / 17))
