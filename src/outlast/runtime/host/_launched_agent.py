"""One agent of the launcher's: its process, its signs of life, and the blocks of its ranks.

Invariant: an agent that could not be started leaves no descriptor behind. Who is started when is the launcher's to say.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from outlast.config import RunConfig
from outlast.runtime.host._children import Child
from outlast.runtime.host._host_system import HostSystem
from outlast.runtime.host._rank_blocks import RankBlocks
from outlast.runtime.host._snapshot_memory import slots_of
from outlast.runtime.host.silence import Watch
from outlast.runtime.transport.progress_block import Progress
from outlast.runtime.transport.regions import Region

__all__ = ["LaunchedAgent", "start_agent"]


@dataclass(slots=True)
class LaunchedAgent:
    """An agent that was started. `watch`: on whether it is stopped; `blocks`: what its ranks have done."""

    name: str
    child: Child
    watch: Watch
    blocks: RankBlocks


def start_agent(
    system: HostSystem,
    config: RunConfig,
    run_dir: Path,
    name: str,
    command: Sequence[str],
    environ: Mapping[str, str],
) -> LaunchedAgent:
    """Start an agent for the replicas' `command`; its output goes to `run_dir`. OSError: it could not be."""
    region, blocks = Region(Progress.SIZE, name=f"outlast-{name}"), RankBlocks(system)
    sign = Progress(region, system.now_ns)
    sign.alive()
    mine = {"OUTLAST_SIGN_FD": str(region.fd), "OUTLAST_RANKS_FD": str(blocks.passed.fileno())}
    try:
        with blocks.passed:
            child = system.start(
                [sys.executable, "-m", "outlast.runtime.host.agent", name, *command],
                environ={**environ, **mine},
                log=run_dir / "logs" / f"agent-{name}.log",
                pass_fds=[region.fd, blocks.passed.fileno(), *slots_of(environ)],
            )
    except OSError:
        blocks.close(system.now_s(), "")
        region.close()
        raise
    return LaunchedAgent(
        name, child, Watch(child.pid, sign, config.stall_floor_s, config.formation_s, system.state), blocks
    )
