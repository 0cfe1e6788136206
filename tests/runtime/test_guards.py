"""Real fleets with bad data and flipped bits: what the guards do, whom they name, and that bits stay equal."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from outlast.core import events as ev
from outlast.prove._drive import Driven
from outlast.runtime.faults.flips import Flip
from outlast.runtime.settings.fault_points import Fault

pytestmark = pytest.mark.process
SCRIPT = Path(__file__).with_name("guarded.py")
PATIENCE_S = 85.0


class Guarded:
    """One run of the guarded training to its end."""

    def __init__(
        self, base: Path, *, replicas: int = 3, ranks: int = 1, flips: Sequence[Flip] = (),
        faults: Sequence[Fault] = (), restarts: int = 16, keep: Mapping[str, Any] | None = None, **script: Any,
    ) -> None:  # fmt: skip
        base.mkdir()
        config = base / "run.toml"
        settings = {"replicas": replicas, "ranks": ranks, "restart_backoff_s": 0.0, "heartbeat_s": 0.2}
        settings |= {"max_restarts": restarts, **(keep or {})}
        config.write_text("[run]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items()))
        words = [str(SCRIPT), "--out", str(base)]
        for key, value in script.items():
            words.append(f"--{key}")
            if value is not True:
                words.append(json.dumps(value) if isinstance(value, dict) else str(value))
        with Driven(base / "run", ["--config", str(config)], words, faults, flips=flips) as driven:
            self.code = driven.finish(PATIENCE_S, lambda: None)  # thousands of steps may take longer
            self.events = driven.events
        self.results = {p.stem: json.loads(p.read_text()) for p in base.glob("*.json")}
        logs = sorted((base / "run" / "logs").glob("*.log"))
        self.logs = "\n".join(f"--- {p.name}\n{p.read_text(errors='replace')[-2000:]}" for p in logs)

    @property
    def verdicts(self) -> list[ev.VerdictReached]:
        return [e for e in self.events if isinstance(e, ev.VerdictReached)]

    def agreed(self, names: set[str]) -> dict[str, Any]:
        """What all these replicas found alike; nobody else reached the end."""
        assert self.code == 0, self.logs
        assert set(self.results) == names, self.logs
        kept = [{k: v for k, v in r.items() if k not in ("hashes", "losses")} for r in self.results.values()]
        assert all(each == kept[0] for each in kept)
        return next(iter(self.results.values()))


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Callable[..., Guarded]]:
    count = [0]

    def start(**how: Any) -> Guarded:
        count[0] += 1
        return Guarded(tmp_path / str(count[0]), **how)

    return start


@pytest.fixture
def alone() -> Iterator[Callable[..., dict[str, Any]]]:
    """What a fleet of one gives, in this process."""
    import torch

    spec = importlib.util.spec_from_file_location("outlast_guarded", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    threads, hook = torch.get_num_threads(), sys.excepthook

    def start(*, bad: str = "", guards: Any = "default", steps: int = 12) -> dict[str, Any]:
        found: dict[str, Any] = module.train(steps, 4, bad, guards if isinstance(guards, str) else json.dumps(guards))[
            1
        ]
        return found

    yield start
    torch.set_num_threads(threads)
    sys.excepthook = hook


def test_a_batch_with_a_nan_is_skipped_and_its_sample_named(
    guarded: Callable[..., Guarded], alone: Callable[..., dict[str, Any]]
) -> None:
    """Also when a replica dies in that very step: the same bits as a fleet of one with the same data."""
    bad = "value@40,backward@11"
    want = alone(bad=bad)
    kill = Fault(replica="r1", phase="header", step=2, action="SIGKILL")
    run = guarded(bad=bad, faults=[kill], restarts=0)
    found = run.agreed({"r0.1", "r2.1"})
    assert found["hashes"] == want["hashes"]
    assert (found["model"], found["rates"]) == (want["model"], want["rates"])
    assert found["left_out"] == [40]
    skipped = {v.step: v for v in run.verdicts}
    assert sorted(skipped) == found["skipped"]
    for step in found["skipped"]:
        assert found["hashes"][step] == found["hashes"][step + 1]
    value = next(v for v in skipped.values() if v.samples == [40])
    assert (value.action, value.confidence) == ("skip_batch", "certain")
    root = next(v for v in skipped.values() if v.samples == [11])
    assert root.action == "skip_step"
    assert "SqrtBackward" in root.operation
    assert root.module == "roots"
    assert root.microbatch >= 0
    assert root.host == "a0"


@pytest.mark.campaign
def test_flips_of_a_parameter_and_of_a_gradient_cost_their_replicas_and_nothing_else(
    guarded: Callable[..., Guarded], alone: Callable[..., dict[str, Any]]
) -> None:
    """All of the state is compared in every step, and the gradient's norm overflows: neither is ever committed."""
    flips = [
        Flip(replica="r1.1", target="parameter", step=4, parameter="last.weight", element=7, bit=12),
        Flip(replica="r2.1", target="gradient", step=8, parameter="first.weight", element=9, bit=30),
    ]
    guards = {"agreement": 1}
    run = guarded(flips=flips, guards=guards, restarts=0)
    found = run.agreed({"r0.1"})
    assert found["hashes"] == alone(guards=guards)["hashes"]
    parameter, gradient = run.verdicts
    assert (parameter.action, parameter.replica, parameter.step, parameter.host) == ("replace", "r1.1", 4, "a0")
    assert "last.weight" in parameter.evidence
    assert parameter.confidence == "certain"
    assert (gradient.action, gradient.replica, gradient.step, gradient.device) == ("replace", "r2.1", 8, "cpu")


@pytest.mark.campaign
def test_a_gradient_that_is_too_large_only_once_is_its_replicas_fault(
    guarded: Callable[..., Guarded], alone: Callable[..., dict[str, Any]]
) -> None:
    """The norm is finite, but far above its band: every replica computes its share again, and bits tell."""
    guards = {"norm_spike": "skip", "warmup": 5}
    run = guarded(replicas=2, stray="r1@9", guards=guards, restarts=0)
    (verdict,) = run.verdicts
    assert (verdict.action, verdict.replica, verdict.step) == ("replace", "r1.1", 9), run.logs
    assert verdict.parameter == "first.weight"
    assert run.agreed({"r0.1"})["hashes"] == alone(guards=guards)["hashes"]


@pytest.mark.campaign
def test_two_replicas_that_differ_go_back_together_or_stop(guarded: Callable[..., Guarded]) -> None:
    flip = Flip(replica="r1.1", target="moment", step=7, parameter="last.weight", element=3, bit=27)
    run = guarded(replicas=2, flips=[flip], guards={"agreement": 1, "certify_every": 3}, restarts=0)
    found = run.agreed({"r0.1", "r1.1"})
    (verdict,) = run.verdicts
    assert (verdict.action, verdict.step, verdict.to_step, verdict.replica) == ("rewind", 7, 6, "")
    assert "no state has a majority" in verdict.evidence
    assert "last.weight.exp_avg" in verdict.evidence
    assert found["passed"] == [[6, 8]]
    assert found["hashes"][8] == found["hashes"][6]
    for one, other in zip(*(r["hashes"] for r in run.results.values()), strict=True):
        assert one == other
    stopped = guarded(replicas=2, flips=[flip], guards={"agreement": 1}, restarts=0)
    assert stopped.code == 5
    assert stopped.verdicts[-1].action == "stop"
    assert "certify_every" in stopped.verdicts[-1].remedy


@pytest.mark.campaign
def test_going_back_and_a_lower_rate_give_the_same_bits_whoever_dies(
    guarded: Callable[..., Guarded], alone: Callable[..., dict[str, Any]]
) -> None:
    """Sample 58 makes the loss infinite (the run goes back), sample 11 makes it huge (the rate is lowered)."""
    script = {
        "bad": "log@58,huge@11", "steps": 16,
        "guards": {
            "nonfinite": "rewind", "certify_every": 2, "loss_spike": "lower_rate", "warmup": 3, "width": 5,
            "rate_steps": 3,
        },
    }  # fmt: skip
    want = alone(**script)
    faults = [
        Fault(replica="r1", phase="verdict", step=4, action="SIGKILL"),
        Fault(replica="r2", phase="header", step=8, action="SIGKILL"),
    ]
    run = guarded(faults=faults, restarts=0, **script)
    found = run.agreed({"r0.1"})
    assert found == want
    assert {v.action for v in run.verdicts} >= {"rewind", "lower_rate"}
    assert found["passed"]
    assert found["skipped"]


@pytest.mark.campaign
def test_states_are_compared_whole_in_the_first_step_of_a_view(
    guarded: Callable[..., Guarded], alone: Callable[..., dict[str, Any]]
) -> None:
    """A bit that changed before another replica died, in a part that no guard reads in that step: found before the step
    is committed, while survivors compute what was lost."""
    flip = Flip(replica="r1.1", target="moment", step=4, parameter="last.weight", element=7, bit=12)
    death = Fault(replica="r3", phase="reduce", step=4, action="SIGKILL")  # all have computed by then
    guards = {"agreement": 500}
    run = guarded(replicas=4, flips=[flip], faults=[death], guards=guards, restarts=0)
    (verdict,) = run.verdicts
    assert (verdict.action, verdict.replica, verdict.step) == ("replace", "r1.1", 4), run.logs
    assert "last.weight" in verdict.evidence
    assert run.agreed({"r0.1", "r2.1"})["hashes"] == alone(guards=guards)["hashes"]
    stopped = guarded(replicas=3, flips=[flip], faults=[Fault(replica="r2", phase="reduce", step=4, action="SIGKILL")],
                      guards=guards, restarts=0)  # fmt: skip
    assert stopped.code == 5, stopped.logs
    assert "replicas that must be equal differ in" in stopped.logs, "of two none has the majority"
    assert not any(step >= 4 for e in stopped.events if isinstance(e, ev.ProgressMade) for step, _ in e.losses)


@pytest.mark.campaign
@pytest.mark.timeout(300)
def test_who_waits_with_a_flipped_bit_is_found_before_it_feeds_a_replacement(
    guarded: Callable[..., Guarded], alone: Callable[..., dict[str, Any]]
) -> None:
    """As above, but the survivors wait. No replacement is in a view with the one whose bit changed."""
    flip = Flip(replica="r1.1", target="moment", step=4, parameter="last.weight", element=7, bit=12)
    death = Fault(replica="r3.1", phase="reduce", step=4, action="SIGKILL")
    guards = {"agreement": 500}
    run = guarded(replicas=4, flips=[flip], faults=[death], guards=guards, keep={"on_vacancy": "wait"})
    want = alone(guards=guards)["hashes"]
    assert (run.code, set(run.results)) == (0, {"r0.1", "r1.2", "r2.1", "r3.2"}), run.logs
    assert [run.results[name]["hashes"] for name in ("r0.1", "r2.1")] == [want, want]
    assert {found["hashes"][-1] for found in run.results.values()} == {want[-1]}
    (verdict,) = run.verdicts
    assert (verdict.action, verdict.replica, verdict.step) == ("replace", "r1.1", 4), run.logs
    assert "last.weight" in verdict.evidence
    views = [set(e.members) for e in run.events if isinstance(e, ev.ViewInstalled)]
    assert views[1] == {"r0.1", "r1.1", "r2.1"}
    assert not any("r1.1" in members for members in views[2:])


@pytest.mark.campaign
def test_a_device_that_does_it_again_is_quarantined(fleet: Callable[..., Any]) -> None:
    """The bit is stuck: the replica that is started in its place has it too, and no third one is started."""
    flip = Flip(replica="r1", target="parameter", step=3, parameter="last.weight", element=7, bit=12, persistent=True)
    script = (SCRIPT, "--guards", json.dumps({"agreement": 1}))
    run = fleet(replicas=3, steps=60, gates=(10, 20, 50), script=script, flips=[flip])
    run.gate(10, "its successor was served", lambda: run.served("r1.2"))
    run.gate(20, "it had caught up", lambda: run.caught_up("r1.2"))
    verdicts = lambda: [e for e in run.driven.events if isinstance(e, ev.VerdictReached)]  # noqa: E731
    run.gate(50, "it was found as well", lambda: len(verdicts()) == 2)
    assert run.finish() == 0, run.logs()
    assert [v.action for v in verdicts()] == ["replace", "quarantine"]
    assert [v.replica for v in verdicts()] == ["r1.1", "r1.2"]
    assert not run.started("r1.3")
    assert set(run.results()) == {"r0.1", "r2.1"}


@pytest.mark.campaign
def test_a_host_whose_devices_do_it_again_gets_no_replica_any_more(tmp_path: Path) -> None:
    """Two agents: r1 and r3 run under the second, and both have a stuck bit. The second device to be quarantined there
    is the host's fault; the replicas of the other agent go on."""
    flips = [
        Flip(replica=slot, target="parameter", step=3, parameter="last.weight", element=at, bit=12, persistent=True)
        for slot, at in (("r1", 7), ("r3", 19))
    ]
    config = tmp_path / "run.toml"
    config.write_text("[run]\nreplicas = 5\nagents = 2\nrestart_backoff_s = 0.0\nheartbeat_s = 0.2\n")
    words = [str(SCRIPT), "--out", str(tmp_path), "--steps", "100000", "--microbatches", "8"]
    words += ["--guards", json.dumps({"agreement": 1})]
    with Driven(tmp_path / "run", ["--config", str(config)], words, flips=flips) as driven:

        def put_out() -> int:
            actions = [e.action if isinstance(e, ev.VerdictReached) else "" for e in driven.events]
            return actions.index("evict_host") if "evict_host" in actions else 0

        driven.until("the host's eviction", lambda: put_out() > 0, PATIENCE_S, lambda: None)
        step = driven.step
        driven.until("twenty steps more", lambda: driven.step > step + 20, PATIENCE_S, lambda: None)
        seen = [(v.action, v.replica, v.host) for v in driven.events if isinstance(v, ev.VerdictReached)]
        assert [row for row in seen if row[0] == "replace"] == [("replace", "r1.1", "a1"), ("replace", "r3.1", "a1")]
        assert sorted(action for action, _, _ in seen) == ["evict_host", "quarantine", "replace", "replace"]
        assert {host for _, _, host in seen} == {"a1"}
        assert set(driven.members) == {"r0.1", "r2.1", "r4.1"}
        assert not [e for e in driven.events[put_out() :] if isinstance(e, ev.ReplicaStarted)]


RANKS: dict[str, Any] = {"replicas": 2, "ranks": 2, "restarts": 0, "shard": True, "microbatches": 8}
ALONE: dict[str, Any] = {"replicas": 1, "shard": True, "microbatches": 8}
BOTH = {"r0.1-0", "r0.1-1", "r1.1-0", "r1.1-1"}


@pytest.mark.campaign
def test_ranks_look_for_what_is_not_finite_each_in_its_own_microbatch(guarded: Callable[..., Guarded]) -> None:
    """A rank finds the sample, or the operation, though the sum of all ranks lies in the rows of another. The bits, and
    whom the verdicts name, are those of one process, whose model is sharded over itself alone."""
    how: dict[str, Any] = {"bad": "value@40,backward@11", "guards": "full", "steps": 6}
    want, run = guarded(**ALONE, **how), guarded(**RANKS, **how)
    assert run.agreed(BOTH)["hashes"] == want.agreed({"r0.1-0"})["hashes"]
    seen = [
        [(v.step, v.action, v.samples, v.module, v.operation, v.microbatch, v.confidence) for v in each.verdicts]
        for each in (want, run)
    ]
    assert seen[0] == seen[1], run.logs
    named = {(v.action, v.module): v.samples for v in run.verdicts}
    assert named == {("skip_batch", ""): [40], ("skip_step", "roots"): [11]}


@pytest.mark.campaign
def test_flips_in_a_rank_that_is_no_lead_cost_its_replica_and_nothing_else(guarded: Callable[..., Guarded]) -> None:
    """In its rows of a parameter, and of a gradient that overflows."""
    flips = [
        Flip(replica="r1/1.1", target="parameter", step=2, parameter="last.weight", element=7, bit=12),
        Flip(replica="r2/1.1", target="gradient", step=4, parameter="first.weight", element=9, bit=30),
    ]
    how: dict[str, Any] = {"guards": {"agreement": 1}, "steps": 6}
    want, run = guarded(**ALONE, **how), guarded(**RANKS | {"replicas": 3}, flips=flips, **how)
    assert run.agreed({"r0.1-0", "r0.1-1"})["hashes"] == want.agreed({"r0.1-0"})["hashes"]
    parameter, gradient = run.verdicts
    assert (parameter.action, parameter.replica, parameter.step) == ("replace", "r1.1", 2), run.logs
    assert "last.weight" in parameter.evidence
    assert (gradient.action, gradient.replica, gradient.step) == ("replace", "r2.1", 4), run.logs


@pytest.mark.campaign
def test_a_certified_state_is_gone_back_to_at_another_width(guarded: Callable[..., Guarded], tmp_path: Path) -> None:
    """Kept by two ranks, saved with their state, and gone back to by four."""
    how: dict[str, Any] = {"bad": "log@30", "guards": {"nonfinite": "rewind", "certify_every": 2}}  # in steps 3 and 5
    want = guarded(**ALONE, **how, steps=8)
    (tmp_path / "kept").mkdir()
    keep = {"checkpoint_dir": str(tmp_path / "kept"), "checkpoint_every": 1}
    guarded(**RANKS | {"replicas": 1}, **how, steps=5, keep=keep).agreed({"r0.1-0", "r0.1-1"})
    run = guarded(**RANKS | {"replicas": 1, "ranks": 4}, **how, steps=8, keep=keep)
    found, whole = run.agreed({f"r0.1-{place}" for place in range(4)}), want.agreed({"r0.1-0"})
    assert [(v.action, v.step, v.to_step) for v in run.verdicts] == [("rewind", 5, 4)]
    assert found["hashes"][-1] == whole["hashes"][-1], run.logs
