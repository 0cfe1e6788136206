"""Real fleets with bad data and flipped bits: what the guards do, whom they name, and that bits stay equal."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from outlast.core import events as ev
from outlast.prove._drive import Driven
from outlast.runtime._corruption import Flip
from outlast.runtime._probe import Fault

pytestmark = pytest.mark.process
SCRIPT = Path(__file__).with_name("guarded.py")
PATIENCE_S = 85.0


class Guarded:
    """One run of the guarded training to its end."""

    def __init__(
        self, base: Path, *, replicas: int = 3, flips: Sequence[Flip] = (), faults: Sequence[Fault] = (),
        restarts: int = 16, **script: Any,
    ) -> None:  # fmt: skip
        base.mkdir()
        config = base / "run.toml"
        config.write_text(f"[run]\nreplicas = {replicas}\nrestart_backoff_s = 0.0\nheartbeat_s = 0.2\n"
                          f"max_restarts = {restarts}\n")  # fmt: skip
        words = [str(SCRIPT), "--out", str(base)]
        for key, value in script.items():
            words += [f"--{key}", json.dumps(value) if isinstance(value, dict) else str(value)]
        with Driven(base / "run", ["--config", str(config)], words, faults, flips=flips) as driven:
            self.code = driven.finish(PATIENCE_S, lambda: None)
            self.events = driven.events
        self.results = {p.stem: json.loads(p.read_text()) for p in base.glob("*.json")}
        logs = sorted((base / "run" / "logs").glob("*.log"))
        self.logs = "\n".join(f"--- {p.name}\n{p.read_text(errors='replace')[-2000:]}" for p in logs)

    @property
    def verdicts(self) -> list[ev.Verdict]:
        return [e for e in self.events if isinstance(e, ev.Verdict)]

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


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """What a fleet of one gives, in a process of its own."""
    import os
    import subprocess

    def start(**script: Any) -> dict[str, Any]:
        out = tmp_path_factory.mktemp("alone")
        words = [sys.executable, str(SCRIPT), "--out", str(out)]
        for key, value in script.items():
            words += [f"--{key}", json.dumps(value) if isinstance(value, dict) else str(value)]
        environ = {k: v for k, v in os.environ.items() if not k.startswith("OUTLAST_")} | {"OMP_NUM_THREADS": "1"}
        subprocess.run(words, check=True, timeout=60, env=environ, capture_output=True)
        found: dict[str, Any] = json.loads((out / "r0.1.json").read_text())
        return found

    return start


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


def test_a_flipped_parameter_is_found_and_its_replica_replaced(
    guarded: Callable[..., Guarded], alone: Callable[..., dict[str, Any]]
) -> None:
    """Every part of the state is compared in every step, so nothing that the flip touched is ever committed."""
    flip = Flip(replica="r1.1", target="parameter", step=4, parameter="last.weight", element=7, bit=12)
    guards = {"agreement": 1}
    run = guarded(flips=[flip], guards=guards, restarts=0)
    assert run.code == 0, run.logs
    (verdict,) = run.verdicts
    assert (verdict.action, verdict.replica, verdict.step, verdict.host) == ("replace", "r1.1", 4, "a0")
    assert "last.weight" in verdict.evidence
    want = alone(guards=guards)
    for name in ("r0.1", "r2.1"):
        assert run.results[name]["hashes"] == want["hashes"]
