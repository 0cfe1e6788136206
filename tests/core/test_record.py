"""The record of a run: the same from the journal as live, and for many runs at once as for one."""

from __future__ import annotations

import gzip
import json
import math
import random
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from outlast.cli import main
from outlast.config import RunConfig
from outlast.core import events as ev
from outlast.core.policy import (
    AuditPolicy,
    IntervalPolicy,
    Losses,
    RestartPolicy,
    RunRecord,
    RunRecords,
    SparesPolicy,
)
from outlast.core.policy._hazards import LossArrays
from outlast.core.protocol.fleet.roster import Roster, Settings
from outlast.journal import Journal
from outlast.plan import FailureClass, Job, Tier, simulate
from outlast.plan._analytic import analyse
from outlast.plan._compiled import compile_job, replace_job
from outlast.plan._kernel import Kernel
from outlast.plan._planner import _spares, design_of
from outlast.runtime.coordinator._record_summary import JournalFold


def story(seed: int) -> list[ev.AnyEvent]:
    """A drawn run: deaths, losses of all, saves and progress."""
    rng, at_s, step = random.Random(seed), 1.7e9, 0
    config = {"checkpoint_min_s": 10.0}
    told: list[ev.AnyEvent] = [
        ev.RunStarted(at_s=at_s, run_id="r", command=[], num_replicas=8, num_spares=0, signature={}, config=config),
        ev.ViewInstalled(
            at_s=at_s, epoch=1, n=1, members=[f"r{i}.1" for i in range(8)], cause="", planned=False, num_microbatches=8
        ),
        ev.ViewFormed(at_s=at_s + 5, epoch=1, n=1, step=0, roll_call_s=0.1),
    ]
    for _ in range(160):
        at_s, step = at_s + rng.expovariate(1 / 900), step + 50
        if seed % 2 and rng.random() < 0.2:
            told += audits(rng, at_s, step)
        kind = rng.random()
        if kind < 0.3:
            who = f"r{rng.randrange(8)}.1"
            told.append(ev.ReplicaExited(at_s=at_s, replica=who, cause="signal", detail="", noticed_by="agent"))
        elif kind < 0.4:
            told.append(ev.FleetGone(at_s=at_s, step=step, detail=""))
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
                ev.ProgressMade(at_s=at_s, view=[1, 1], stable=step, losses=[(step, rng.gauss(2, 0.1))], step_s=0.5)
            )
    return told


def audits(rng: random.Random, at_s: float, step: int) -> list[ev.AnyEvent]:
    """Steps whose states agree, in which some microbatches were computed twice; now and then one differed."""
    found: list[ev.AnyEvent] = [ev.StateCertified(at_s=at_s, step=step, share=0.1, audited=rng.randrange(400))]
    if rng.random() < 0.2:
        found.append(
            ev.AuditMismatch(
                at_s=at_s, step=step, microbatch=1, culprit=f"r{rng.randrange(8)}.1", host="h", device="d",
                verdict="persistent", evidence="", confidence=1.0, remedy="",
            )
        )  # fmt: skip
    return found


REAL: dict[str, list[ev.AnyEvent]] = msgspec.json.decode(
    gzip.decompress(Path(__file__).with_name("real_journals.json.gz").read_bytes()), type=dict[str, list[ev.AnyEvent]]
)
"""Of real fleets that were killed, stopped and lied to at random; without their paths."""


def told(events: list[ev.AnyEvent], run: Path, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    """What `why` and `plan --from-run` say of a journal."""
    with Journal.create(run) as journal:
        journal.append_many(events)
    assert main(["why", str(run), "--json"]) == 0
    why = json.loads(capsys.readouterr().out)["believed"]
    assert main(["plan", "--from-run", str(run), "--json"]) == 0
    return [why, json.loads(capsys.readouterr().out)]


def coordinators(events: list[ev.AnyEvent]) -> RunRecord:
    """The record of a coordinator at this moment, of which the one before was lost halfway: it went on from what that
    one had folded."""
    config = RunConfig()
    first, second = JournalFold(config), JournalFold(config)
    for event in events[: len(events) // 2]:
        first.take(event)
    second.load(first.dump())
    for event in events[len(events) // 2 :]:
        second.take(event)
    return second.record


@pytest.mark.parametrize("which", [*range(20), *REAL])
def test_a_journal_believes_what_the_live_record_did(
    which: int | str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Twenty drawn records, half of them with audits, and eight of real fleets: rate, interval, spares and audit share
    of the coordinator, of `why` and of `plan --from-run`, to the last digit."""
    events = story(which) if isinstance(which, int) else REAL[which]
    now = coordinators(events).believed(events[-1].at_s)
    interval_s = None if now.interval_s == math.inf else now.interval_s
    want = (now.death_rate_s, now.mtbr_s, interval_s, now.num_spares, now.audit_share, now.reason)
    for found in told(events, tmp_path / "run", capsys):
        names = ("death_rate_s", "mtbr_s", "interval_s", "num_spares", "audit_share", "reason")
        assert tuple(found[name] for name in names) == want


def test_the_records_that_are_compared_differ_in_what_they_say() -> None:
    """Else equal figures would say little."""
    found = [coordinators(events) for events in (*map(story, range(20)), *REAL.values())]
    at_s = [events[-1].at_s for events in (*map(story, range(20)), *REAL.values())]
    said = [record.believed(t) for record, t in zip(found, at_s, strict=True)]
    for name, least in (("death_rate_s", 20), ("interval_s", 20), ("num_spares", 2), ("audit_share", 10)):
        assert len({getattr(each, name) for each in said}) >= least, name


def test_audits_and_mismatches_move_the_share() -> None:
    record, calm = RunRecord(), RunRecord()
    for event in story(2):
        record.take(event), calm.take(event)
    record.take(
        ev.ViewInstalled(at_s=1.8e9, epoch=1, n=2, members=["a", "b"], cause="", planned=False, num_microbatches=8)
    )
    record.take(
        ev.AuditMismatch(
            at_s=1.8e9, step=4, microbatch=1, culprit="r1.0", host="h", device="d", verdict="persistent", evidence="",
            confidence=1.0, remedy="",
        )
    )  # fmt: skip
    assert record.audit_share() > 2 * calm.audit_share()
    found = record.audit_share()
    record.take(ev.StateCertified(at_s=1.8e9, step=90, share=0.9, audited=10**9))
    assert record.audit_share() < found, "much was computed twice since"


JOB = Job(
    classes=(
        FailureClass(name="hard", node_mtbf_h=700.0, repair=0.5, repair_median_h=3.0, repair_mean_h=6.0),
        FailureClass(name="soft", node_mtbf_h=900.0, masked=0.9),
        FailureClass(name="wrong", node_mtbf_h=9000.0, silent=True),
        FailureClass(name="told", node_mtbf_h=9000.0, predicted=1.0),
    ),
    accelerators=512, days=2.0, interval="adaptive", min_share=0.8,
    tiers=(Tier(name="near", write_s=1.0, lag_s=8.0, recovery_s=60.0), Tier(name="far", write_s=6.0, every=4)),
)  # fmt: skip


CHOOSES = replace_job(JOB, days=6.0, interval="exact", auto_spares=True)


def worst_of(job: Job) -> dict[str, float]:
    return simulate(replace_job(job, days=0.5), 12, seed=2).breakdown()


@pytest.mark.parametrize("policy", [IntervalPolicy, SparesPolicy, AuditPolicy])
def test_a_policy_replaced_changes_the_run_and_the_plan(policy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    live = RunRecord()
    for event in story(1):
        live.take(event)
    at_s, own = live.since_s + 60, policy.decide
    before, simulated, audited = live.believed(at_s), worst_of(JOB), compile_job(JOB).audit_rate
    held, changed = _spares(JOB)[0], {"interval_s": 0.1, "rate": 4.0}
    spares = simulate(CHOOSES, 12, seed=2).spares.mean()

    def other(self: Any, belief: Any, state: Any) -> Any:
        found = own(self, belief, state)
        values = {name: getattr(found, name) for name in found.__slots__}
        new = {n: v * changed[n] if n in changed else v for n, v in values.items()}
        return type(found)(**new | ({"spares": new["spares"] + 3} if "spares" in new else {}))

    monkeypatch.setattr(policy, "decide", other)
    after = live.believed(at_s)
    if policy is IntervalPolicy:
        assert after.interval_s == before.interval_s * 0.1
        assert worst_of(JOB)["checkpoint"] > 2 * simulated["checkpoint"]
    elif policy is SparesPolicy:
        assert after.num_spares == before.num_spares + 3
        assert _spares(JOB)[0] == held + 3
        assert design_of(JOB).job.spares == held + 3, "the design holds what the run's policy would"
        assert simulate(CHOOSES, 12, seed=2).spares.mean() > spares + 2
    else:
        assert after.audit_share == 4 * before.audit_share
        assert compile_job(JOB).audit_rate == 4 * audited


@pytest.mark.parametrize("backoff_s", [0.0, 0.5, 30.0])
def test_restarts_are_decided_alike_for_one_and_for_many(backoff_s: float) -> None:
    policy, deaths, restarts = (
        RestartPolicy(most=3, backoff_s=backoff_s),
        np.arange(9),
        np.array([0, 1, 2, 3, 4, 0, 2, 3, 9]),
    )
    many = policy.decide(deaths=deaths, restarts=restarts)
    for i, (dead, done) in enumerate(zip(deaths.tolist(), restarts.tolist(), strict=True)):
        one = policy.decide(deaths=dead, restarts=done)
        assert (bool(many.start[i]), float(many.delay_s[i])) == (one.start, one.delay_s)
        assert policy.decide(deaths=dead, restarts=done, again=False).start, "a first start costs nothing"
    assert many.delay_s.max() <= 60.0


def test_a_restart_policy_replaced_changes_the_coordinator_and_the_simulation(monkeypatch: pytest.MonkeyPatch) -> None:
    def delay() -> float:
        roster = Roster(Settings(num_replicas=1, backoff_s=1.0))
        roster.agent_here("a0", 1, 1)
        ((name, _, first),) = roster.vacancies()
        roster.drop(name, 10.0)
        ((_, _, again),) = roster.vacancies()
        return again - first

    job = replace_job(JOB, days=0.5, backoff_s=1.0, interval="exact")
    before, simulated = delay(), simulate(job, 12, seed=2).breakdown()["recovery"]
    own = RestartPolicy.decide

    def slow(self: Any, **state: Any) -> Any:
        found = own(self, **state)
        return type(found)(start=found.start, delay_s=found.delay_s + 300.0)

    monkeypatch.setattr(RestartPolicy, "decide", slow)
    assert delay() == before == 1.0  # both starts are later by as much
    assert simulate(job, 12, seed=2).breakdown()["recovery"] > simulated + 0.005


def test_a_simulated_run_decides_as_one_that_is_told_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one simulated run's record is told, a live record is told too; each interval is the one that it says."""
    told: list[tuple[Any, ...]] = []
    row, own = 3, Kernel._decide
    for name in ("died", "rewound", "began", "saved"):
        before = getattr(RunRecords, name)

        def noted(self: Any, rows: Any, *args: Any, name: str = name, before: Any = before) -> None:
            before(self, rows, *args)
            if row in rows:
                told.append((name, *(float(np.broadcast_to(a, len(rows))[list(rows).index(row)]) for a in args)))

        monkeypatch.setattr(RunRecords, name, noted)

    def decided(self: Kernel, rows: Any) -> None:
        own(self, rows)
        if row in rows:
            running = float(self.machines.running[row])
            told.append(
                ("decided", float(self.now[row]), running, float(self.exposure[row]), float(self.interval[row]))
            )

    monkeypatch.setattr(Kernel, "_decide", decided)
    simulate(replace_job(JOB, days=1.0), 8, seed=6)
    record, exposed, num = RunRecord(), 0.0, 0
    record.begin(0.0)
    record.ends(86_400.0)
    for kind, *args in told:
        if kind == "decided":
            now_s, running, exposure, interval_s = args
            record._replicas, record._exposed_s = record._replicas.expose(exposure - exposed), now_s
            record._machines, exposed, num = int(running), exposure, num + 1
            wanted = min(record.saving(now_s).interval_s, 2 * 86_400.0)
            assert interval_s == pytest.approx(wanted, rel=1e-6)
        elif kind == "died":
            for _ in range(int(args[0])):
                record.died(0.0, fleet=False)
        else:
            getattr(record, kind)(*args)
    assert num > 50
    assert {kind for kind, *_ in told} == {"decided", "died", "rewound", "began", "saved"}


def test_the_spares_of_many_runs_are_those_that_each_one_would_hold() -> None:
    """Told the same deaths, returns and time, one record and many at once hold the same number."""
    rng, size, policy = np.random.default_rng(8), 5, SparesPolicy()
    many, exposed_s, now_s = RunRecords(size), np.zeros(size), 0.0
    ones, seen = [RunRecord(num_replicas=8) for _ in range(size)], set[float]()
    for one in ones:
        one.begin(0.0)
    for _ in range(120):
        now_s, exposed_s = now_s + 600.0, exposed_s + 8 * 600.0
        dead, back_s = rng.random(size) < 0.3, rng.exponential(2000.0, size)
        (rows,) = dead.nonzero()
        many.died(rows)
        many.filled(rows, 1.0, back_s[rows])
        for row in rows:
            ones[row].died(now_s, fleet=False)
            ones[row]._replaced = ones[row]._replaced.and_one(float(back_s[row]))
        held = np.array([float(one.num_spares) for one in ones])
        found = many.spares(np.arange(size), exposed_s, 8.0, held, policy).spares
        for row, one in enumerate(ones):
            assert found[row] == one.spares(now_s, policy).spares
            one.num_spares = int(found[row])
            seen.add(found[row])
    assert len(seen) > 3


def test_a_simulated_job_that_chooses_its_spares_settles_near_those_that_its_rates_ask_for() -> None:
    """It begins with none, as a run does; those that it has too many leave, to where a warier policy holds them."""
    job = replace_job(JOB, classes=JOB.classes[:1], days=40.0, interval="exact", auto_spares=True)
    wanted, (late, few, many) = _spares(job)[0], (simulate(replace_job(job, spares=n), 24, seed=5) for n in (0, 1, 40))
    assert late.spares.mean() == pytest.approx(wanted, abs=0.5 * wanted)
    assert few.spares.mean() < many.spares.mean() < few.spares.mean() + 1
    none = simulate(replace_job(job, auto_spares=False), 24, seed=5)
    assert late.breakdown()["degraded"] + late.breakdown()["idle"] < 0.25 * (
        none.breakdown()["degraded"] + none.breakdown()["idle"]
    )
    assert any("how many spares" in reason for reason in analyse(job).outside)


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
