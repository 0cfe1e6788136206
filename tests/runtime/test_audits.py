"""One flipped bit in one gradient: seen before it is applied, its replica named, and no trace of it in the result."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from outlast.config import RunConfig
from outlast.core import events as ev
from outlast.core.phases import Phase
from outlast.errors import ConfigError
from outlast.observe import status, why
from outlast.prove._drive import Driven
from outlast.prove._process_tree import of_run
from outlast.runtime.checks.audits import chosen_audit
from outlast.runtime.faults.flips import Flip
from outlast.runtime.settings.fault_points import Fault

from .conftest import PATIENCE_S, undisturbed

pytestmark = pytest.mark.process
SCRIPT = Path(__file__).with_name("audited.py")


class Audited:
    """One run of the audited scenario."""

    def __init__(
        self, base: Path, flips: Sequence[Flip], faults: Sequence[Fault], *, replicas: int, steps: int,
        microbatches: int = 6, audit: Any = 1.0, dtype: str = "float32", guards: str = "default",
        critical: str = "",         **settings: Any,
    ) -> None:  # fmt: skip
        self.out, self.shape = base / "out", (steps, microbatches, dtype)
        self.out.mkdir(parents=True)
        settings = {"restart_backoff_s": 0.0, "heartbeat_s": 0.2, "max_restarts": 0} | settings
        config = base / "run.toml"
        config.write_text("[run]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items()))
        script = [
            str(SCRIPT),
            "--steps",
            str(steps),
            "--microbatches",
            str(microbatches),
            "--audit",
            str(audit),
            "--guards",
            guards,
        ]
        script += [
            "--critical",
            critical,
            "--dtype",
            dtype,
            "--flips",
            msgspec.json.encode(list(flips)).decode(),
            "--out",
            str(self.out),
        ]
        options = ["--config", str(config), "--replicas", str(replicas)]
        self.driven = Driven(base / "run", options, script, faults)

    def finish(self) -> int:
        return self.driven.finish(PATIENCE_S, lambda: None)

    def logs(self) -> str:
        parts = [repr(e) for e in self.driven.events if not isinstance(e, ev.ProgressMade)]
        for path in sorted((self.driven.run_dir / "logs").glob("*.log")):
            parts.append(f"--- {path.name}\n{path.read_text(errors='replace')[-2500:]}")
        return "\n".join(parts)

    def results(self) -> dict[str, dict[str, Any]]:
        return {path.stem: json.loads(path.read_text()) for path in self.out.glob("*.json")}

    def findings(self) -> list[ev.AuditMismatch]:
        return [e for e in self.driven.events if isinstance(e, ev.AuditMismatch)]

    def assert_unchanged(self, survivors: set[str]) -> None:
        code = self.finish()
        assert code == 0, self.logs()
        assert of_run(self.driven.run_dir) == []
        want, results = undisturbed(*self.shape), self.results()
        assert set(results) == survivors, self.logs()
        for name, found in results.items():
            assert {k: v for k, v in found["losses"].items() if want["losses"][k] != v} == {}, f"{name}\n{self.logs()}"
            assert found["fingerprint"] == want["fingerprint"], f"{name}\n{self.logs()}"


@pytest.fixture
def audited(tmp_path: Path) -> Iterator[Callable[..., Audited]]:
    started: list[Audited] = []

    def start(*flips: Flip, faults: Sequence[Fault] = (), **shape: Any) -> Audited:
        started.append(Audited(tmp_path / str(len(started)), flips, faults, **shape))
        return started[-1]

    yield start
    for each in started:
        each.driven.__exit__()


def test_what_is_wrong_once_is_seen_named_and_gone(audited: Callable[..., Audited]) -> None:
    """A gradient; and two steps later a reduced slice, which makes all replicas do the step again."""
    gradient = Flip(replica="r1", step=2, microbatch=2, parameter=3, element=1000, bit=3)
    reducer = Flip(target="reducer", replica="r2", step=4, parameter=-1, element=100, bit=4)
    run = audited(gradient, reducer, replicas=3, steps=6)
    run.assert_unchanged({"r0.1", "r1.1", "r2.1"})
    found, reduced = run.findings()
    assert (found.culprit, found.step, found.microbatch, found.verdict) == ("r1.1", 2, 2, "transient"), run.logs()
    assert (found.host, found.device) == ("a0", "cpu")
    assert found.confidence == 1.0
    certified = [(e.step, e.share) for e in run.driven.events if isinstance(e, ev.StateCertified)]
    # The newest is told: that of step 2 too, unless the second mismatch came before its replica's next word.
    assert certified[-1] == (4, 1.0), "the roll call after the mismatch agreed on it"
    assert set(certified) <= {(2, 1.0), (4, 1.0)}
    story = why(run.driven.events)
    assert any("r1.1 got another gradient for microbatch 2 of step 2" in row.what for row in story.timeline)
    assert sorted({name for advice in story.advice for name in advice.who}) == ["r1.1", "r2.1"]
    assert status(run.driven.events).num_audit_mismatches == 2
    assert (reduced.culprit, reduced.verdict, reduced.step) == ("r2.1", "transient", 4), run.logs()
    assert (reduced.microbatch, reduced.bucket >= 0) == (-1, True)
    assert "reduced a slice of bucket" in reduced.evidence


@pytest.mark.campaign
def test_who_repeats_a_wrong_answer_is_evicted(audited: Callable[..., Audited]) -> None:
    run = audited(Flip(replica="r2", step=1, parameter=4, element=5, bit=30, times=0), replicas=3, steps=3)
    run.assert_unchanged({"r0.1", "r1.1"})
    assert {f.culprit for f in run.findings()} == {"r2.1"}, run.logs()
    assert "persistent" in {f.verdict for f in run.findings()}
    assert "r2.1" in [e.replica for e in run.driven.events if isinstance(e, ev.Suspected) and e.decision == "evict"]


@pytest.mark.campaign
def test_two_replicas_find_the_truth_of_a_flip_and_of_a_sum_that_changed(audited: Callable[..., Audited]) -> None:
    """A wrong gradient; and a sum that changes after it was made, which is computed again."""
    gradient = Flip(replica="r0", step=1, microbatch=1, bit=0)
    total = Flip(target="sum", replica="r0", step=3, microbatch=2, element=77, bit=9)
    run = audited(gradient, total, replicas=2, steps=5)
    run.assert_unchanged({"r0.1", "r1.1"})
    found = [(f.culprit, f.verdict, f.step) for f in run.findings()]
    assert found == [("r0.1", "transient", 1), ("r0.1", "memory", 3)], run.logs()


@pytest.mark.campaign
def test_two_replicas_stop_where_there_is_no_majority(audited: Callable[..., Audited]) -> None:
    run = audited(Flip(replica="r0", step=1, microbatch=1, bit=0, times=0), replicas=2, steps=3)
    assert run.finish() == 5, run.logs()
    (found,) = run.findings()
    assert (found.verdict, found.culprit, found.microbatch) == ("undecided", "r0.1, r1.1", 1)
    assert "no majority" in next(e.detail for e in run.driven.events if isinstance(e, ev.RunFinished))
    assert not any(step >= 1 for e in run.driven.events if isinstance(e, ev.ProgressMade) for step, _ in e.losses)


@pytest.mark.campaign
def test_a_flipped_parameter_costs_its_replica_and_not_the_run(audited: Callable[..., Audited]) -> None:
    """Its gradients are disputed, and in the roll call that follows its state is not the others'."""
    flip = Flip(target="parameter", replica="r1", step=2, parameter=3, element=100, bit=20)
    run = audited(flip, replicas=3, steps=5)
    run.assert_unchanged({"r0.1", "r2.1"})
    (verdict,) = [e for e in run.driven.events if isinstance(e, ev.VerdictReached)]
    assert (verdict.action, verdict.replica, verdict.step, verdict.device) == ("replace", "r1.1", 2, "cpu"), run.logs()
    assert {f.culprit for f in run.findings()} <= {"r1.1"}, run.logs()


@pytest.mark.campaign
def test_two_replicas_go_back_if_they_can_where_there_is_no_majority(audited: Callable[..., Audited]) -> None:
    """Between them they cannot tell who is wrong; the certified state is older than the quarrel."""
    flip = Flip(replica="r0", step=3, microbatch=1, bit=0, times=0)
    run = audited(flip, replicas=2, steps=6, guards=json.dumps({"certify_every": 2, "agreement": 1}))
    assert run.finish() == 0, run.logs()
    (found,) = run.findings()
    assert (found.verdict, found.culprit, found.microbatch, found.step) == ("rewound", "r0.1, r1.1", 1, 3), run.logs()
    (verdict,) = [e for e in run.driven.events if isinstance(e, ev.VerdictReached)]
    assert (verdict.action, verdict.step, verdict.to_step, verdict.confidence) == ("rewind", 3, 2, "possible")
    assert "no majority" in verdict.evidence
    results = run.results()
    assert set(results) == {"r0.1", "r1.1"}
    assert results["r0.1"] == results["r1.1"] | {"batches": results["r0.1"]["batches"]}
    assert results["r0.1"]["fingerprint"] != undisturbed(*run.shape)["fingerprint"], "two batches were passed for good"


@pytest.mark.campaign
def test_a_death_while_it_is_settled(audited: Callable[..., Audited]) -> None:
    death = Fault(replica="r1", phase=Phase.AUDIT.name.lower(), step=2, microbatch=2, action="SIGKILL")
    flip = Flip(replica="r1", step=2, microbatch=2, bit=12)
    run = audited(flip, faults=[death], replicas=3, steps=4)
    run.assert_unchanged({"r0.1", "r2.1"})
    assert [(f.culprit, f.verdict) for f in run.findings()] == [("r1.1", "gone")], run.logs()


@pytest.mark.campaign
def test_the_reduction_of_a_critical_parameter_is_checked_without_audits(audited: Callable[..., Audited]) -> None:
    """The table lies in the fifth bucket, which r1 reduces: the flip would reach all replicas alike."""
    flips = [Flip(target="reducer", replica="r1", step=2, parameter=4, element=9, bit=30)]
    run = audited(*flips, replicas=3, steps=4, audit=0.0, critical="table")
    run.assert_unchanged({"r0.1", "r1.1", "r2.1"})
    assert [(f.culprit, f.verdict) for f in run.findings()] == [("r1.1", "transient")], run.logs()


@pytest.mark.campaign
def test_a_reducer_that_stays_wrong_is_evicted(audited: Callable[..., Audited]) -> None:
    flip = Flip(target="reducer", replica="r2", step=1, parameter=-1, bit=30, times=0, persistent=True)
    run = audited(flip, replicas=3, steps=3)
    run.assert_unchanged({"r0.1", "r1.1"})
    assert {(f.culprit, f.verdict) for f in run.findings()} == {("r2.1", "persistent")}, run.logs()


@pytest.mark.campaign
def test_sums_that_change_again_and_again_cost_their_replica(audited: Callable[..., Audited]) -> None:
    """Failing memory: the step would be held for ever."""
    flip = Flip(target="sum", replica="r1", step=1, parameter=-1, bit=30, times=0, persistent=True)
    run = audited(flip, replicas=3, steps=3)
    run.assert_unchanged({"r0.1", "r2.1"})
    assert [(f.culprit, f.verdict) for f in run.findings()] == [("r1.1", "memory"), ("r1.1", "persistent")], run.logs()


@pytest.mark.campaign
@pytest.mark.parametrize(("target", "kind"), [("sum", "memory"), ("reducer", "transient")])
def test_who_is_wrong_in_three_steps_in_a_row_is_evicted(
    target: Any, kind: str, audited: Callable[..., Audited]
) -> None:
    """Right when it is asked again, so each step is repaired; but every step of the run would be made twice."""
    flip = Flip(target=target, replica="r1.1", step=1, parameter=-1, bit=30, persistent=True)
    run = audited(flip, replicas=3, steps=6)
    run.assert_unchanged({"r0.1", "r2.1"})
    found = [(f.culprit, f.step, f.verdict) for f in run.findings()]
    assert found == [("r1.1", 1, kind), ("r1.1", 2, kind), ("r1.1", 3, "persistent")], run.logs()


@pytest.mark.campaign
def test_what_is_found_is_believed_by_all_where_outlast_chooses_the_share(audited: Callable[..., Audited]) -> None:
    """A flipped parameter is an incident; a replacement that joins has the same belief, or its state would differ."""
    flip = Flip(target="parameter", replica="r1.1", step=2, parameter=3, element=100, bit=20)
    run = audited(flip, replicas=3, steps=40, audit="auto", guards=json.dumps({"agreement": 1}), max_restarts=4)
    assert run.finish() == 0, run.logs()
    results = run.results()
    assert {"r0.1", "r2.1"} <= set(results), run.logs()
    assert len({found["share"] for found in results.values()}) == 1
    beliefs = [found["belief"] for found in results.values()]
    assert all(belief == beliefs[0] for belief in beliefs)
    assert beliefs[0]["known"] == [[2, "r1.1"]]
    assert beliefs[0]["found"] == 1
    assert {found["fingerprint"] for found in results.values()} == {undisturbed(*run.shape)["fingerprint"]}


BITS = {"float32": (0, 1, 12, 22, 23, 27, 30, 31), "bfloat16": (0, 3, 6, 7, 10, 14, 15)}


@pytest.mark.campaign
@pytest.mark.parametrize("dtype", BITS)
def test_every_bit_is_seen_and_nothing_else(audited: Callable[..., Audited], dtype: str) -> None:
    """One flip in every other step, each of another bit, replica and parameter; the steps between are clean."""
    bits, params = BITS[dtype], (0, 3, 4, 5, 7)
    flips = [
        Flip(
            replica=f"r{i % 3}",
            step=2 * i + 1,
            parameter=params[i % len(params)],
            element=37 * i,
            bit=bit,
        )
        for i, bit in enumerate(bits)
    ]
    run = audited(*flips, replicas=3, steps=2 * len(bits) + 2, dtype=dtype)
    run.assert_unchanged({"r0.1", "r1.1", "r2.1"})
    found = [(f.step, f.culprit, f.verdict) for f in run.findings()]
    assert found == [(flip.step, f"{flip.replica}.1", "transient") for flip in flips], run.logs()


@pytest.mark.campaign
def test_beside_a_robust_rule(audited: Callable[..., Audited]) -> None:
    """The rule would only weaken a wrong row; the audit puts the right one in its place."""
    flips = [Flip(replica="r1", step=1, microbatch=2, parameter=0, element=i, bit=30) for i in range(3)]
    clean = audited(replicas=3, steps=3, aggregation="trimmed_mean", f=1)
    assert clean.finish() == 0, clean.logs()
    run = audited(*flips, replicas=3, steps=3, aggregation="trimmed_mean", f=1)
    assert run.finish() == 0, run.logs()
    assert [(f.culprit, f.verdict) for f in run.findings()] == [("r1.1", "transient")], run.logs()
    prints = {found["fingerprint"] for each in (clean, run) for found in each.results().values()}
    assert len(prints) == 1


@pytest.mark.campaign
def test_with_a_share_the_broken_device_is_found_soon(audited: Callable[..., Audited]) -> None:
    """Unaudited wrong gradients are applied meanwhile: that is what a share below one means."""
    broken = [Flip(replica="r1", step=step, parameter=0, element=step, bit=20, times=0) for step in range(1, 40)]
    run = audited(*broken, replicas=3, steps=40, audit=0.25)
    assert run.finish() == 0, run.logs()
    first = run.findings()[0]
    assert first.step < 20, "two of its microbatches in each step: missed for 20 steps in one of 10^5 runs"
    assert {f.culprit for f in run.findings()} == {"r1.1"}
    assert set(run.results()) == {"r0.1", "r2.1"}
    assert len({found["fingerprint"] for found in run.results().values()}) == 1


def test_over_torch_distributed_a_flip_and_a_lying_reducer_are_named_and_gone(
    audited: Callable[..., Audited],
) -> None:
    """The reducer's slice would reach all replicas alike: only a second reduction of the same sums can see it."""
    gradient = Flip(replica="r2", step=1, microbatch=4, parameter=0, element=10, bit=3)
    reducer = Flip(target="reducer", replica="r1", step=3, parameter=-1, element=100, bit=4)
    run = audited(gradient, reducer, replicas=3, steps=5, exchange="c10d")
    run.assert_unchanged({"r0.1", "r1.1", "r2.1"})
    flipped, lied = run.findings()
    assert (flipped.culprit, flipped.verdict, flipped.step) == ("r2.1", "transient", 1), run.logs()
    assert (lied.culprit, lied.verdict, lied.step, lied.microbatch) == ("r1.1", "transient", 3, -1), run.logs()
    assert lied.bucket >= 0


@pytest.mark.campaign
def test_a_reducer_that_goes_on_lying_over_torch_distributed_is_evicted(audited: Callable[..., Audited]) -> None:
    flip = Flip(target="reducer", replica="r2", step=1, parameter=-1, bit=30, times=0, persistent=True)
    run = audited(flip, replicas=3, steps=3, exchange="c10d")
    run.assert_unchanged({"r0.1", "r1.1"})
    assert {(f.culprit, f.verdict) for f in run.findings()} == {("r2.1", "persistent")}, run.logs()


@pytest.mark.soak
@pytest.mark.campaign
def test_a_critical_parameter_is_reduced_twice_over_torch_distributed_without_audits(
    audited: Callable[..., Audited],
) -> None:
    flips = [Flip(target="reducer", replica="r1", step=2, parameter=4, element=9, bit=30)]
    run = audited(*flips, replicas=3, steps=4, audit=0.0, critical="table", exchange="c10d")
    run.assert_unchanged({"r0.1", "r1.1", "r2.1"})
    assert [(f.culprit, f.verdict) for f in run.findings()] == [("r1.1", "transient")], run.logs()


def test_audits_of_noise_are_refused() -> None:
    with pytest.raises(ConfigError, match="only noise"):
        chosen_audit(0.1, RunConfig(bitwise=False))
    assert chosen_audit(0.0, RunConfig(bitwise=False)) == 0.0


def test_what_the_run_is_told_outranks_the_script() -> None:
    assert chosen_audit(0.1, RunConfig()) == 0.1
    assert chosen_audit(0.1, RunConfig(audit=0.5)) == 0.5
    assert chosen_audit(0.1, RunConfig(audit="0.5")) == 0.5, "as the environment gives it"
    assert chosen_audit(0.1, RunConfig(audit="auto:0.2")) == "auto:0.2"
    for wrong in ("auto:2", "auto:x", "often"):
        with pytest.raises(ConfigError, match="audit"):
            chosen_audit(wrong, RunConfig())
