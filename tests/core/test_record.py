"""The record of a run: the same from the journal as live, and for many runs at once as for one."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import numpy as np
import pytest

from outlast.core import events as ev
from outlast.core.policy import IntervalPolicy, Losses, RunRecord
from outlast.core.policy._hazards import LossArrays
from outlast.plan._rerun import rerun_answer


def story(seed: int) -> list[ev.AnyEvent]:
    """A drawn run: deaths, losses of all, saves and progress."""
    rng, at_s, step = random.Random(seed), 1.7e9, 0
    config = {"checkpoint_min_s": 10.0}
    told: list[ev.AnyEvent] = [
        ev.RunStarted(at_s=at_s, run_id="r", command=[], num_replicas=8, num_spares=0, signature={}, config=config),
        ev.ViewInstalled(at_s=at_s, epoch=1, n=1, members=[f"r{i}.1" for i in range(8)], cause="", planned=False),
        ev.ViewFormed(at_s=at_s + 5, epoch=1, n=1, step=0, roll_call_s=0.1),
    ]
    for _ in range(60):
        at_s, step = at_s + rng.expovariate(1 / 900), step + 50
        kind = rng.random()
        if kind < 0.3:
            who = f"r{rng.randrange(8)}.1"
            told.append(ev.ReplicaExited(at_s=at_s, replica=who, cause="signal", detail="", noticed_by="agent"))
        elif kind < 0.4:
            told.append(ev.FleetLost(at_s=at_s, step=step, detail=""))
        elif kind < 0.7:
            told.append(ev.CheckpointBegan(at_s=at_s, step=step, view=[1, 1], reason=""))
            told.append(
                ev.CheckpointSaved(
                    at_s=at_s + 9,
                    step=step,
                    generation=step,
                    view=[1, 1],
                    num_writers=8,
                    state_bytes=1,
                    written_bytes=1,
                    blocked_s=rng.uniform(0.01, 3),
                    copied_s=0.1,
                    durable_s=9.0,
                    reason="",
                    url="",
                )
            )
        else:
            told.append(
                ev.Progress(at_s=at_s, view=[1, 1], stable=step, losses=[(step, rng.gauss(2, 0.1))], step_s=0.5)
            )
    return told


@pytest.mark.parametrize("seed", range(20))
def test_a_journal_believes_what_the_live_record_did(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from outlast.plan import _rerun
    from outlast.plan._journal import RunJournal

    live, events = RunRecord(), story(seed)
    for event in events:
        live.take(event)
    decided = live.saving(events[-1].at_s)
    body = msgspec.json.encode(events)
    read = msgspec.json.decode(body, type=list[ev.AnyEvent])
    monkeypatch.setattr(_rerun, "open_journal", lambda path: RunJournal(read))
    told = rerun_answer(str(tmp_path)).data
    assert (told["interval_s"], told["mtbr_s"], told["reason"]) == (
        decided.interval_s, decided.mtbr_s, decided.reason
    )  # fmt: skip


def test_a_policy_replaced_changes_the_run_and_what_is_planned_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from outlast.plan import _rerun
    from outlast.plan._journal import RunJournal

    events = story(1)
    monkeypatch.setattr(_rerun, "open_journal", lambda path: RunJournal(events))
    before = rerun_answer(str(tmp_path)).data["interval_s"]
    own = IntervalPolicy.decide

    def timid(self, belief, state):  # type: ignore[no-untyped-def]
        found = own(self, belief, state)
        return type(found)(interval_s=found.interval_s / 10, mtbr_s=found.mtbr_s)

    monkeypatch.setattr(IntervalPolicy, "decide", timid)
    live = RunRecord()
    for event in events:
        live.take(event)
    assert live.saving(events[-1].at_s).interval_s == before / 10 == rerun_answer(str(tmp_path)).data["interval_s"]


def test_many_records_at_once_are_each_alone() -> None:
    rng, prior = np.random.default_rng(4), Losses(prior_s=50_000.0)
    size = 40
    many, ones = LossArrays(prior, size), [Losses(prior_s=50_000.0) for _ in range(size)]
    for _ in range(12):
        rows = np.flatnonzero(rng.random(size) < 0.6)
        after = rng.weibull(0.7, len(rows)) * 20_000
        many.observe(rows, after)
        for row, after_s in zip(rows, after, strict=True):
            ones[row].observe(float(after_s))
    age, cost = rng.uniform(1, 60_000, size), rng.uniform(0.1, 60, size)
    left = np.where(rng.random(size) < 0.5, np.inf, 10 ** rng.uniform(2, 6, size))
    found = many.next_save_s(age_s=age, cost_s=cost, least_s=10.0, extra=1e-6, left_s=left)
    for i, one in enumerate(ones):
        alone = one.next_save_s(age_s=age[i], cost_s=cost[i], least_s=10.0, extra=1e-6, left_s=left[i])
        assert found[i] == pytest.approx(alone, rel=1e-9)
        assert many.hazard_at(age)[i] == pytest.approx(one.hazard_at(age[i]), rel=1e-9)
        assert many.one(i).next_save_s(age_s=5.0, cost_s=1.0) == pytest.approx(one.next_save_s(age_s=5.0, cost_s=1.0))
