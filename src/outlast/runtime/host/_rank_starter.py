"""How an agent starts the ranks of a replica: from the process that has loaded torch, or by the script's own start."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from outlast.config import RunConfig
from outlast.runtime.host._host_system import HostSystem
from outlast.runtime.host._nursery import Preloading
from outlast.runtime.host._replica_ranks import Rank, free_number
from outlast.runtime.host._snapshot_memory import slots_of
from outlast.runtime.transport.progress_block import Progress
from outlast.runtime.transport.regions import Region

__all__ = ["RankStarter"]


class RankStarter:
    """Starts replicas for the agent `name`. `environ`: what ranks inherit; `command`: the script."""

    def __init__(
        self, name: str, environ: Mapping[str, str], command: Sequence[str], config: RunConfig, system: HostSystem
    ) -> None:
        self._name, self._environ, self._command, self._system = name, dict(environ), command, system
        self._logs = Path(environ["OUTLAST_RUN_DIR"]) / "logs"
        self._width = config.ranks
        self._nth, self._num_agents = (int(n) for n in environ.get("OUTLAST_AGENT_OF", "0/1").split("/"))
        self._hold_fds = slots_of(environ)
        self.nursery = Preloading(command, environ, self._hold_fds, config.preload, config.formation_s)

    def start(self, member: str, others: Iterable[Rank], tested: bool) -> Rank:
        """Start all ranks of a replica: its lead, with its siblings. `others`: the leads that there are; `tested`: on
        probation. OSError, and none of them was started."""
        number, started = free_number(others), list[Rank]()
        try:
            for place in range(self._width):
                started.append(self._start(member, place, number, tested))
        except OSError:
            for rank in started:
                rank.child.send(signal.SIGKILL)
                rank.child.wait()
            raise
        lead, *lead.siblings = started
        return lead

    def _start(self, member: str, place: int, number: int, tested: bool) -> Rank:
        key = f"{member}.rank{place}" if place else member
        log = self._logs / f"{key}.log"
        region = Region(Progress.SIZE, name=f"outlast-{key}")
        environ = {
            "OUTLAST_MEMBER": member,
            "OUTLAST_PLACE": str(place),
            "OUTLAST_DEVICE": str((number * self._num_agents + self._nth) * self._width + place),
            "OUTLAST_AGENT": self._name,
            "OUTLAST_PARENT": str(os.getpid()),
            "OUTLAST_PROBATION": "true" if tested else "",
            "OUTLAST_PROGRESS_FD": str(region.fd),
            "PYTHONUNBUFFERED": "1",
        }
        began_s = self._system.now_s()
        child = self.nursery.start(environ, log, region.fd) or self._system.start(
            self._command, environ=self._environ | environ, log=log, pass_fds=[region.fd, *self._hold_fds]
        )
        return Rank(member, child, Progress(region), log, key=key, number=number, place=place, began_s=began_s)
