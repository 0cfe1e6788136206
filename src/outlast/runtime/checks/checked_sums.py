"""Checked sums in a replica: around each microbatch, and what they found told to the coordinator.

It checks nothing itself: `outlast.health` does. Without `protect(checks=...)` nothing here does anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from outlast.core.protocol import messages as m
from outlast.errors import DeviceFault
from outlast.health import CheckedSums, ProductChecks, SumFinding
from outlast.runtime.training.engine import Engine
from outlast.runtime.view.port import ViewPort

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["admit_device", "checked_sums", "watched"]


def checked_sums(model: nn.Module, given: Any) -> CheckedSums | None:
    """What checks the model's products, from what `protect(checks=...)` was given; None if nothing does. Raises
    ConfigError for what cannot be checked."""
    checks = ProductChecks.of(given)
    return CheckedSums(model, checks) if checks is not None else None


def _tested_if_again(port: ViewPort, engine: Engine, checked: CheckedSums, new: int) -> None:
    """The second finding, the fourth, the eighth …: is the device broken, or unlucky? DeviceFault if it is broken."""
    before, checked.num_found = checked.num_found, checked.num_found + new
    if checked.num_found < 2 or before.bit_length() == checked.num_found.bit_length():
        return
    admit_device(True, engine.device, port.env.me)
    note = m.DeviceNoted(
        member=port.env.me,
        device=port.device,
        source="test",
        step=checked.step,
        microbatch=checked.microbatch,
        evidence=f"the device was tested after {checked.num_found} products that did not add up: all answers right",
        action="passed",
        remedy="watch it; outlast health test asks it for longer",
    )
    port.tell_coordinator([note])


def admit_device(wanted: bool, device: torch.device, me: str) -> None:
    """One round of known answers, before this replica joins or when it is doubted. DeviceFault if any is wrong."""
    if not wanted:
        return
    from outlast.health import ask_device

    found = ask_device(device, size=64)
    if not found.passed:
        first = found.wrong[0]
        raise DeviceFault(
            f"{found.device} gave {found.num_wrong} wrong answers of {found.num_asked}: {first.case} ({first.kind})",
            where=f"replica {me}",
            did="it does not train in the run",
            remedy="take the device out of service; outlast health test asks it for longer",
        )


@contextmanager
def watched(port: ViewPort, engine: Engine, step: int, microbatch: int) -> Iterator[None]:
    """The loop's body computes this microbatch."""
    checked = engine.checked
    if checked is None:
        yield
        return
    found: list[SumFinding] = []
    try:
        with checked.at(step, microbatch):
            yield
    finally:
        found, checked.found = checked.found, []
        port.tell_coordinator(
            [
                m.DeviceNoted(
                    member=port.env.me,
                    device=port.device,
                    source="checks",
                    step=step,
                    microbatch=microbatch,
                    evidence=str(finding),
                    action=finding.action,
                    remedy="none needed once; a device that does this again should be tested: outlast health test",
                )
                for finding in found
            ]
        )
    if found:
        _tested_if_again(port, engine, checked, len(found))
