"""Where a process stands in its run: its name, its place among those who train, its machine and its device.

Decides nothing, and shares out no data: that is the protocol's matter. Places change with every view.
"""

from __future__ import annotations

import platform
from collections.abc import Callable

import torch

from outlast.core.protocol import View
from outlast.errors import StepMisuse
from outlast.runtime.host.environment import Environment

__all__ = ["Whereabouts"]


class Whereabouts:
    """Says where a replica is in its run: rank, size, host. `present`: the view that this replica trains in, if there
    is one."""

    def __init__(self, env: Environment, plain: bool, present: Callable[[], View | None]) -> None:
        self._env, self._plain, self._present = env, plain, present

    @property
    def name(self) -> str:
        """This replica's name, slot.incarnation, e.g. `r2.1`."""
        return self._env.me

    @property
    def rank(self) -> int:
        """This replica's place among the members of the present view, 0 … size-1: rank 0 writes. It may change with
        every view; what stays is `name`. Raises StepMisuse before a fleet's first step."""
        return self._members("rank").index(self._env.me)

    @property
    def leads(self) -> bool:
        """Whether this replica is the first of the present view: it writes, as long as training goes on. Unlike
        `is_writer` it promises nothing for the time after the loop, and waits for nobody."""
        return not self._env.place and self.rank == 0

    @property
    def size(self) -> int:
        """How many replicas train in the present view. Raises StepMisuse before a fleet's first step."""
        return len(self._members("size"))

    def _members(self, what: str) -> tuple[str, ...]:
        view = self._present()
        if view is not None and self._env.me in view.members:
            return view.members
        if self._alone:
            return (self._env.me,)
        raise StepMisuse(
            f"run.{what} is not known before the first step",
            where=f"replica {self._env.me}",
            remedy="read it in the loop or after it; data is shared out by outlast, a device is run.device, and a name "
            "that is this replica's alone is run.name",
        )

    @property
    def _alone(self) -> bool:
        config = self._env.config
        return self._plain or self._env.coordinator is None or (config.replicas, config.spares) == (1, 0)

    @property
    def host(self) -> str:
        """The name of the machine that this replica runs on."""
        return platform.node()

    @property
    def device(self) -> torch.device:
        """The device for this replica: of the GPUs that are visible here one for each that runs on this machine, round
        robin, which becomes torch's current one; else the processor."""
        if not torch.cuda.is_available():
            return torch.device("cpu")
        device = torch.device("cuda", self._env.device % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return device
