"""Checked sums in a replica: around each microbatch, and what they found told to the coordinator.

It checks nothing itself: `outlast.health` does. Without `protect(checks=...)` nothing here does anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from outlast.core.protocol import messages as m
from outlast.health import CheckedSums, ProductChecks

if TYPE_CHECKING:
    from torch import nn

    from outlast.runtime._replica import Replica

__all__ = ["checked_sums", "watched"]


def checked_sums(model: nn.Module, given: Any) -> CheckedSums | None:
    """What checks the model's products, from what `protect(checks=...)` was given; None if nothing does. Raises
    ConfigError for what cannot be checked."""
    checks = ProductChecks.of(given)
    return CheckedSums(model, checks) if checks is not None else None


@contextmanager
def watched(replica: Replica, step: int, microbatch: int) -> Iterator[None]:
    """The loop's body computes this microbatch."""
    checked = replica.engine.checked
    if checked is None:
        yield
        return
    try:
        with checked.at(step, microbatch):
            yield
    finally:
        found, checked.found = checked.found, []
        replica.link.send([
            m.DeviceNoted(
                member=replica.env.me, device=replica.device, source="checks", step=step, microbatch=microbatch,
                evidence=str(finding), action=finding.action,
                remedy="none needed once; a device that does this again should be tested: outlast health test",
            )
            for finding in found
        ])  # fmt: skip
