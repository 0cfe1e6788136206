"""A script that `torchrun` has started as several processes: one of each host becomes outlast's, the others end.

torchrun starts workers, and restarts all of them when one fails. outlast starts replicas itself, on every host, and
replaces one. So at `outlast.join()` the first worker of the first host turns into `outlast run`, the first of every
other host into `outlast agent`, with as many replicas in all as torchrun has started workers. They stay the processes
that torchrun watches, so signals and exit codes pass as before; the other workers end well at once.

On several hosts these find each other through torchrun's store, which believes everybody who reaches it. So it is told
an address and nothing else; the run's secret has to be in the environment. The port that it is told stays taken: the
listening socket is handed on to `outlast run`. So are the interpreter's options, by the variables that stand for them.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

from outlast.config import RunConfig, resolve
from outlast.errors import ConfigError, EnvironmentFault
from outlast.runtime.loop._interpreter import interpreter_options
from outlast.runtime.transport.endpoints import HANDED_ON, data_address, listen_on, shown

__all__ = ["take_over"]

_STORE_S = 600  # for the first host to say where it listens
_PREFIXES = ("TORCHELASTIC_", "ROLE_", "GROUP_")
_NAMES = frozenset({"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"})
_TOLD = """\
outlast: started by torchrun as {workers} on {hosts}. Outlast starts the replicas itself, and replaces one that
outlast: dies while the others train on. What it takes the place of: torchrun's restarts of all workers, the ranks and
outlast: the process group. Give torchrun a fixed --nnodes and --max-restarts 0; more hosts join by outlast agent."""


@dataclass(frozen=True, slots=True)
class _Place:
    """What torchrun tells a worker of itself."""

    rank: int
    local_rank: int
    host: int
    num_workers: int
    num_local: int
    num_hosts: int
    restart: str

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> _Place:
        """ConfigError for what torchrun does not say."""
        try:
            return cls(
                rank=int(environ["RANK"]),
                local_rank=int(environ["LOCAL_RANK"]),
                host=int(environ["GROUP_RANK"]),
                num_workers=int(environ["WORLD_SIZE"]),
                num_local=int(environ["LOCAL_WORLD_SIZE"]),
                num_hosts=int(environ["GROUP_WORLD_SIZE"]),
                restart=environ.get("TORCHELASTIC_RESTART_COUNT", "0"),
            )
        except (KeyError, ValueError) as error:
            raise ConfigError(
                f"torchrun's environment is not whole: {error}",
                did="nothing was trained",
                remedy="outlast run --replicas N train.py",
            ) from error


def take_over(environ: Mapping[str, str]) -> None:
    """Become what this worker of torchrun's is for: never returns then. Returns where torchrun has started one alone,
    or something else has started this process. Raises ConfigError, EnvironmentFault."""
    if not _of_torchrun(environ):
        return
    place = _Place.read(environ)
    if place.local_rank:
        sys.exit(0)
    if place.rank == 0:
        workers, hosts = f"{place.num_workers} workers", f"{place.num_hosts} host{'s' * (place.num_hosts > 1)}"
        print(_TOLD.format(workers=workers, hosts=hosts), file=sys.stderr, flush=True)
    found: list[socket.socket] = []  # open until this process is another
    words = _words(place, environ, found)
    options, lost = interpreter_options()
    if lost:
        print(f"outlast: replicas are started without python's {', '.join(lost)}", file=sys.stderr, flush=True)
    told = _cleared(environ) | options
    for sock in found:
        sock.set_inheritable(True)
        told[HANDED_ON] = str(sock.fileno())
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, "-m", "outlast", *words], told)


def _of_torchrun(environ: Mapping[str, str]) -> bool:
    """Whether torchrun started this as one of several, and nothing of outlast's did."""
    ours = "OUTLAST_MEMBER" in environ or environ.get("OUTLAST", "on").lower() == "off"
    other = any(key.startswith("ACCELERATE_") for key in environ)
    several = environ.get("WORLD_SIZE", "1") != "1"
    return "TORCHELASTIC_RUN_ID" in environ and several and not ours and not other


def _cleared(environ: Mapping[str, str]) -> dict[str, str]:
    """Without torchrun's own: a replica has no rank and no world."""
    return {key: value for key, value in environ.items() if key not in _NAMES and not key.startswith(_PREFIXES)}


def _words(place: _Place, environ: Mapping[str, str], found: list[socket.socket]) -> list[str]:
    """The command of outlast's that this worker turns into. `found` takes the socket that it listens at, if any."""
    if place.num_hosts == 1:
        return ["run", *_numbers(place, environ), *_script()]
    if not environ.get("OUTLAST_SECRET"):
        raise ConfigError(
            f"torchrun has started this on {place.num_hosts} hosts, and no secret of the run is in the environment",
            did="nothing was trained",
            remedy="export OUTLAST_SECRET=…, the same on all hosts, before torchrun: openssl rand -hex 32 makes one",
        )
    slots = _slots(place, environ)
    endpoint, host = _endpoint(place, environ, found), f"{socket.gethostname()}.{place.host}"
    if place.rank:
        return ["agent", "--join", endpoint, "--host", host, "--slots", slots]
    several = ["--endpoint", endpoint, "--nnodes", str(place.num_hosts), "--slots", slots]
    return ["run", *several, "--host", host, *_numbers(place, environ), *_script()]


def _asked(environ: Mapping[str, str]) -> RunConfig:
    """How many ranks and spares the environment asks for, the rest as by default. Raises ConfigError."""
    given = {key: value for key in ("OUTLAST_RANKS", "OUTLAST_SPARES") if (value := environ.get(key))}
    return resolve(cli={}, environ=given).config


def _slots(place: _Place, environ: Mapping[str, str]) -> str:
    """How many replicas fit here, each with all its ranks."""
    ranks = _asked(environ).ranks
    if place.num_local % ranks:
        raise ConfigError(
            f"{place.num_local} workers on a host are no replicas of {ranks} ranks, which are all on one host",
            remedy=f"--nproc-per-node={-(-place.num_local // ranks) * ranks}, or another OUTLAST_RANKS",
        )
    return str(place.num_local // ranks)


def _numbers(place: _Place, environ: Mapping[str, str]) -> list[str]:
    """One process for each worker: replicas of their ranks, less the spares that were asked for."""
    if "OUTLAST_REPLICAS" in environ:
        return []
    config = _asked(environ)
    ranks, spares = config.ranks, config.num_spares
    replicas = place.num_workers // ranks - spares
    if replicas < 1 or place.num_workers % ranks:
        raise ConfigError(
            f"{place.num_workers} workers are no replicas of {ranks} ranks with {spares} spares",
            remedy="another --nproc-per-node, or OUTLAST_REPLICAS, OUTLAST_RANKS, OUTLAST_SPARES",
        )
    return ["--replicas", str(replicas)]


def _script() -> list[str]:
    """As python was given it: a file, or a module with -m."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is None:
        return [*sys.argv]
    return ["-m", spec.name.removesuffix(".__main__"), *sys.argv[1:]]


# --- finding each other ---------------------------------------------------------------------------------------------
def _endpoint(place: _Place, environ: Mapping[str, str], found: list[socket.socket]) -> str:
    """Where the first host's coordinator listens: as told, or where torchrun's workers would meet."""
    if environ.get("OUTLAST_ENDPOINT"):
        return environ["OUTLAST_ENDPOINT"]
    host, port = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
    if environ.get("TORCHELASTIC_USE_AGENT_STORE", "True") != "True":
        return shown(host, port)  # which torchrun leaves free for the first worker
    return _told(place, host, port, found)


def _told(place: _Place, host: str, port: int, found: list[socket.socket]) -> str:
    from torch.distributed import TCPStore

    key = f"outlast/endpoint/{place.restart}"
    try:
        store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=_STORE_S))
        if place.rank:
            return bytes(store.get(key)).decode()
        mine = data_address(host, (host, port), "torchrun's --master-addr")
        found.append(listen_on(mine))
        endpoint = shown(*found[0].getsockname()[:2])
        store.set(key, endpoint)
    except RuntimeError as error:  # torch's, for what its store does not answer
        raise EnvironmentFault(
            f"torchrun's store at {shown(host, port)} does not say where the first host is: {error}".splitlines()[0],
            remedy="export OUTLAST_ENDPOINT=HOST:PORT, an address of the first host, on all hosts",
        ) from error
    return endpoint
