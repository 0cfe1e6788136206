"""Checked sums in training: the bits of a run without them, whatever was flipped, and who cannot be trusted goes."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import outlast
from outlast.core import events as ev
from outlast.errors import ConfigError, DeviceFault
from outlast.health import ask_device
from outlast.runtime.checks.checked_sums import admit_device
from outlast.runtime.faults.flips import Flip, flip_bit

pytestmark = pytest.mark.usefixtures("training_here")


def train(flips: list[dict[str, Any]] | None = None, monkeypatch: Any = None, **more: Any) -> tuple[str, list[Any]]:
    """(fingerprint after three steps, what was told to the coordinator) of a fleet of one."""
    if flips is not None:
        monkeypatch.setenv(
            "OUTLAST_CORRUPTION", json.dumps([{"replica": "r0", "target": "product", **f} for f in flips])
        )
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(24, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 16))
    rows = list(torch.randn(32, 24, generator=torch.Generator().manual_seed(1)))
    training = outlast.join().protect(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        rows,
        global_batch_size=32,
        microbatches=4,
        seed=2,
        **more,
    )
    said: list[Any] = []
    send = training.replica.link.send
    training.replica.link.send = lambda messages: (said.extend(kept := list(messages)), send(kept))
    for step in training.steps(until=3):
        for batch in step:
            step.backward(model(batch).square().mean())
    return training.fingerprint(), [m for m in said if type(m).__name__ == "DeviceNoted"]


def test_checked_training_has_the_bits_of_unchecked_training() -> None:
    assert train(checks="abft") == train() == (train()[0], [])


def test_flips_in_products_leave_no_trace_but_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    calm, _ = train()
    flips = [{"step": 1, "bit": 29, "parameter": product, "microbatch": product % 4} for product in range(5)]
    after, notes = train(flips, monkeypatch, checks="abft")
    assert after == calm
    assert [(n.step, n.microbatch, n.action) for n in notes] == [
        (1, 0, "recomputed"), (1, 0, "recomputed"), (1, 0, "passed"), (1, 1, "recomputed"), (1, 2, "recomputed"),
        (1, 2, "passed"), (1, 3, "recomputed"),
    ]  # fmt: skip


def test_a_device_that_is_wrong_again_is_asked_and_goes_if_it_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(device: torch.device, **more: Any) -> Any:
        return ask_device(device, strike=lambda name, out: flip_bit(out, 3, 5) if name == "sort" else None, **more)

    monkeypatch.setattr("outlast.health._device_test.ask_device", broken)
    flips = [{"step": 1, "bit": 29, "parameter": 0, "microbatch": microbatch} for microbatch in range(2)]
    train(flips[:1], monkeypatch, checks="abft")
    with pytest.raises(DeviceFault, match="sort"):
        train(flips, monkeypatch, checks="abft")


def test_a_broken_device_ends_this_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DeviceFault, match="wrong each time"):
        train([{"step": 1, "bit": 29, "parameter": -1, "times": 0, "persistent": True}], monkeypatch, checks="abft")


def test_what_cannot_be_checked_is_refused() -> None:
    with pytest.raises(ConfigError, match="no kind of check"):
        train(checks="abtf")


def test_a_device_that_answers_wrongly_does_not_join(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    before = torch.random.get_rng_state()
    admit_device(True, cpu, "r0.1")
    assert torch.equal(torch.random.get_rng_state(), before), "the script's random numbers are untouched"

    def broken(device: torch.device, **more: Any) -> Any:
        return ask_device(device, strike=lambda name, out: flip_bit(out, 3, 5) if name == "sort" else None, **more)

    monkeypatch.setattr("outlast.health._device_test.ask_device", broken)
    admit_device(False, cpu, "r0.1")
    with pytest.raises(DeviceFault, match=r"wrong answers of .*sort"):
        admit_device(True, cpu, "r0.1")


@pytest.mark.process
def test_a_broken_device_goes_and_the_fleet_has_the_bits_of_a_calm_run(
    fleet: Callable[..., Any], tmp_path: Path
) -> None:
    """One flip that is put right in r0, and a device that is wrong each time under r1; audits beside it. The process
    on the broken one takes long to end, and what it went for is known all the same."""
    flips = [
        Flip(replica="r0", target="product", step=3, bit=28, parameter=1),
        Flip(replica="r1", target="product", step=4, bit=29, parameter=-1, times=0, persistent=True),
    ]
    rule = {"checks": "abft", "audit": 0.3}
    with (tmp_path / "lingers").open("w") as lingers:
        fcntl.flock(lingers, fcntl.LOCK_EX)
        script = [Path(__file__).with_name("lingering.py"), lingers.name]
        script += ["--microbatches", "8", "--dtype", "float32", "--rule", json.dumps(rule)]
        run = fleet(replicas=3, steps=8, script=script, flips=flips, max_restarts=0, readings_s=0.2)
        run.until("the others had done all", lambda: run.driven.step == 7)
        lingers.close()
        run.assert_unchanged(survivors={"r0.1", "r2.1"}, recoveries=1)
    found = [e for e in run.driven.events if isinstance(e, ev.DeviceFinding) and e.source == "checks"]
    assert [(e.replica, e.step, e.action) for e in found] == [("r0.1", 3, "recomputed")]
    assert any("is wrong each time" in e.detail for e in run.exits()), run.logs()
    assert not any(isinstance(e, ev.AuditMismatch | ev.Suspected) for e in run.driven.events)
