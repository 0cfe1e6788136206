"""The systems under test: how each is started, and what it does to its processes when one dies.

A system is a list of commands whose workers report through `_probe`. Peers need `--peers-python`, an interpreter with
the same torch, torchft 0.2.0 and nvidia-resiliency-ext 0.4.1; without it they are named as absent, never guessed.
"""

from __future__ import annotations

import dataclasses
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import _outlast
from benchmarks._fleet import Fleet

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["COMPUTING", "SYSTEMS", "System", "interpreter", "peers_missing"]

Commands = list[list[str]]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class System:
    """`commands(replicas, model, python, scratch)` starts it. `keeps`: survivors of a death go on as they are."""

    title: str
    commands: Callable[[Launch], Commands]
    keeps: bool
    needs: Sequence[str] = ()
    replaces: bool = False
    immune: int = -1
    """A rank that is not hurt, because the system says that its death ends the run."""
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def fleet(self, launch: Launch) -> Fleet:
        own = {f"OUTLAST_{key.upper()}": value for key, value in launch.settings.items()}
        return Fleet(self.title, self.commands(launch), {**self.env, **own})


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """What a fleet is started with. `python` has the peers' packages; `timeout_s` is their collectives' timeout."""

    replicas: int
    model: str
    microbatches: int
    seed: int
    python: Path
    scratch: Path
    timeout_s: float = 5.0
    settings: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """For outlast: keys of its configuration, e.g. `max_restarts`."""
    options: Sequence[str] = ()
    """For outlast: more options of its worker."""

    @property
    def run_dir(self) -> Path:
        """outlast's run directory."""
        return self.scratch / "run"

    @property
    def worker(self) -> list[str]:
        values = {"model": self.model, "microbatches": self.microbatches, "seed": self.seed}
        return [f"--{key}={value}" for key, value in values.items()] + [f"--timeout-s={self.timeout_s}"]


def _free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def _torchft(wrapper: str, heartbeat_ms: int) -> Callable[[Launch], Commands]:
    def commands(launch: Launch) -> Commands:
        where = f"127.0.0.1:{_free_port()}"
        lighthouse = [str(launch.python.with_name("torchft_lighthouse")), "--bind", where, "--min_replicas", "2"]
        worker = [str(launch.python), "-m", "benchmarks.peers.torchft_worker", *launch.worker, f"--wrapper={wrapper}"]
        worker += [f"--lighthouse=http://{where}", f"--world={launch.replicas}"]
        return [
            [*lighthouse, "--heartbeat_timeout_ms", str(heartbeat_ms)],
            *([*worker, f"--rank={rank}"] for rank in range(launch.replicas)),
        ]

    return commands


def _torchrun(launch: Launch) -> Commands:
    worker = ["-m", "benchmarks.peers.ddp", *launch.worker, f"--checkpoint={launch.scratch / 'checkpoint.pt'}"]
    elastic = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={launch.replicas}", "--max-restarts=3"]
    return [[sys.executable, *elastic, *worker]]


def _restart(launch: Launch) -> Commands:
    return [[sys.executable, "-m", "benchmarks.peers.restart", str(launch.replicas), *_checkpointed(launch)]]


def _checkpointed(launch: Launch) -> list[str]:
    return [*launch.worker, f"--checkpoint={launch.scratch / 'checkpoint.pt'}"]


def _nvrx(launch: Launch) -> Commands:
    port, inner = _free_port(), _free_port()
    worker = [str(launch.python), "-m", "benchmarks.peers.nvrx_worker", *_checkpointed(launch)]
    worker += [f"--world={launch.replicas}", f"--port={port}", f"--store-port={inner}"]
    return [[*worker, f"--rank={rank}"] for rank in range(launch.replicas)]


def _ddp(launch: Launch) -> Commands:
    plain = dataclasses.replace(launch, timeout_s=1800.0)
    return [[sys.executable, "-m", "benchmarks.peers.restart", str(launch.replicas), *plain.worker]]


def _alone(one: bool) -> Callable[[Launch], Commands]:
    def commands(launch: Launch) -> Commands:
        worker = [sys.executable, "-m", "benchmarks.peers.alone", *launch.worker, f"--world={launch.replicas}"]
        return [[*worker, f"--rank={rank}"] for rank in range(1 if one else launch.replicas)]

    return commands


def _own(*options: str) -> Callable[[Launch], Commands]:
    return lambda launch: _outlast.commands(
        replicas=launch.replicas, worker=[*launch.worker, *launch.options], run_dir=launch.run_dir, options=options
    )


_TORCHFT, _NVRX = ("torchft==0.2.0",), ("nvidia-resiliency-ext==0.4.1",)
SYSTEMS = {
    "outlast": System(title="outlast", commands=_own("--exchange", "shm"), keeps=True, replaces=True),
    "outlast-c10d": System(title="outlast, c10d", commands=_own("--exchange", "c10d"), keeps=True, replaces=True),
    "outlast-trimmed": System(
        title="outlast, trimmed mean f=1", commands=_own("--aggregation", "trimmed_mean", "--f", "1"), keeps=True
    ),
    "outlast-nnm": System(
        title="outlast, NNM + trimmed mean f=1",
        commands=_own("--aggregation", "trimmed_mean", "--f", "1", "--pre", "nnm"), keeps=True,
    ),
    "outlast-spare": System(title="outlast, one spare", commands=_own("--spares", "1"), keeps=True, replaces=True),
    "ddp": System(title="plain DDP", commands=_ddp, keeps=False),
    "torchft": System(
        title="torchft, manager.allreduce", commands=_torchft("allreduce", 5000), keeps=True, needs=_TORCHFT
    ),
    "torchft-1s": System(
        title="torchft, manager.allreduce, 1 s heartbeat",
        commands=_torchft("allreduce", 1000), keeps=True, needs=_TORCHFT,
    ),
    "torchft-ddp": System(title="torchft, its DDP", commands=_torchft("ddp", 5000), keeps=True, needs=_TORCHFT),
    "nvrx": System(title="nvidia-resiliency-ext, in process", commands=_nvrx, keeps=True, needs=_NVRX, immune=0),
    "torchrun": System(title="torchrun --max-restarts", commands=_torchrun, keeps=False),
    "torchrun-own-store": System(
        title="torchrun --max-restarts, store not shared",
        commands=_torchrun, keeps=False, env={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
    ),
    "restart": System(title="plain restart", commands=_restart, keeps=False),
}  # fmt: skip


COMPUTING = {
    "alone": System(title="compute alone, one process", commands=_alone(one=True), keeps=True),
    "apart": System(title="compute alone, all at once", commands=_alone(one=False), keeps=True),
}
"""The share of one replica with nothing exchanged: what no exchange can be faster than, on idle and on shared cores."""


def interpreter(text: str) -> Path:
    """An option's path or name of a Python; fleets start in folders of their own, where a relative path leads nowhere.

    Links are kept: an environment's Python is known by the place of its link.
    """
    return Path(shutil.which(Path(text).expanduser()) or text).absolute()


def peers_missing(system: System, args: argparse.Namespace) -> str:
    """Why a peer cannot run here, or an empty string."""
    if not system.needs:
        return ""
    if args.peers_python is None:
        return f"absent: give --peers-python, an environment with torch 2.13.0 and {system.needs[0]}"
    name, _, version = system.needs[0].partition("==")
    ask = [str(args.peers_python), "-c", f"import importlib.metadata as m; print(m.version({name!r}))"]
    try:
        found = subprocess.run(ask, capture_output=True, text=True, timeout=60, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return f"absent: {args.peers_python} has no {name}"
    return "" if found == version else f"absent: {args.peers_python} has {name} {found}, not {version}"
