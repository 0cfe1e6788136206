"""What a replica is told by its agent through the environment; without any, it is a fleet of one.

Names: OUTLAST_MEMBER, OUTLAST_AGENT, OUTLAST_RUN, OUTLAST_RUN_DIR, OUTLAST_COORDINATOR (host:port), OUTLAST_SECRET
(hex), OUTLAST_CONFIG (JSON of RunConfig), OUTLAST_PROGRESS_FD, OUTLAST_PARENT, OUTLAST_FAULTS, OUTLAST_LIES,
OUTLAST_HOLD (memory for snapshots), OUTLAST_ADDRESS (of this host, for members on others), OUTLAST_UNTIL (of `outlast
ckpt resume-check`), OUTLAST_PLACE (which rank of its replica), OUTLAST_DEVICE (the number of its device, which no
other process of the run has on its machine), OUTLAST_PROBATION (that device is tested first). Read once, by `join`; a
fleet of one reads the settings of checkpoints besides.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from outlast.config import RunConfig, decoded
from outlast.errors import ConfigError, MembershipError
from outlast.runtime.settings.fault_points import Probe
from outlast.runtime.settings.save_settings import solo_config
from outlast.runtime.transport.endpoints import read_host_port
from outlast.runtime.transport.progress_block import Progress
from outlast.runtime.transport.rank_channel import RankPipe, call_lead, meet_ranks
from outlast.runtime.transport.regions import Region
from outlast.runtime.transport.tls import Tls, tls_of

__all__ = ["Environment"]


@dataclass(slots=True)
class Environment:
    """Holds what a rank was told by its agent. `coordinator`: None for a fleet of one."""

    me: str
    agent: str
    run_id: str
    run_dir: Path | None
    coordinator: tuple[str, int] | None
    secret: bytes
    config: RunConfig
    probe: Probe
    progress: Progress
    exchange: str
    store: str = ""
    lies: str = ""
    hold: str = ""  # the launcher's memory for snapshots
    address: str = ""  # of this host, where the run spans several
    place: int = 0  # among the ranks of this replica; 0 is its lead
    tensor_parallel: int = 1  # ranks that compute each microbatch together
    stages: int = 1  # of a pipeline, of which each rank has one
    device: int = 0  # the number of its device among those of its machine
    pipes: list[RankPipe] = field(default_factory=list)  # the lead's, to the others
    lead: RankPipe | None = None  # the others', to the lead
    until: int = 0  # end every loop after so many steps, and the script with it; 0: do not
    tls: Tls | None = None  # for what goes to other hosts
    probation: bool = False  # the diary says that this device came back a short while ago

    @property
    def width(self) -> int:
        """How many ranks this replica has."""
        return self.config.ranks if self.coordinator is not None else 1

    @property
    def at_a_time(self) -> int:
        """How many microbatches this replica computes at a time."""
        return self.width // self.together

    @property
    def together(self) -> int:
        """How many ranks compute each microbatch together."""
        return self.tensor_parallel * self.stages

    def meet(self) -> None:
        """Find the other ranks of this replica. Raises MembershipError if they do not come."""
        if self.width > 1 and self.place == 0:
            self.pipes = meet_ranks(self.secret, self.run_id, self.me, self.width, self.config.start_s)
        elif self.width > 1:
            self.lead = call_lead(self.secret, self.run_id, self.me, self.place, self.config.start_s)

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> Environment:
        """From the environment that the agent made. MembershipError if the agent is already gone, ConfigError where
        something else than `outlast run` started several processes."""
        me = environ.get("OUTLAST_MEMBER")
        faults = environ.get("OUTLAST_FAULTS")
        if me is None:
            _refuse_other_launchers(environ)
            config = solo_config(environ)
            return cls(
                me="r0.1",
                agent="",
                run_id=secrets.token_hex(4),
                run_dir=None,
                coordinator=None,
                secret=secrets.token_bytes(16),
                config=config,
                probe=Probe("r0.1", faults),
                progress=Progress(Region(Progress.SIZE, alone=True)),  # no agent reads it
                exchange="shm",
                until=_until(environ),
            )
        if os.getppid() != int(environ["OUTLAST_PARENT"]):
            raise MembershipError(f"the agent of {me} died before it started", did="it exits", remedy="none needed")
        try:
            config = decoded(environ["OUTLAST_CONFIG"])
        except (msgspec.DecodeError, KeyError) as error:
            raise ConfigError("OUTLAST_CONFIG is not a configuration", remedy="start with outlast run") from error
        place = int(environ.get("OUTLAST_PLACE", "0"))
        slot, _, incarnation = me.partition(".")
        probed = f"{slot}/{place}.{incarnation}" if place else me
        return cls(
            me=me,
            place=place,
            device=int(environ.get("OUTLAST_DEVICE", "0")),
            agent=environ["OUTLAST_AGENT"],
            run_id=environ["OUTLAST_RUN"],
            run_dir=Path(environ["OUTLAST_RUN_DIR"]),
            coordinator=read_host_port(environ["OUTLAST_COORDINATOR"]),
            secret=bytes.fromhex(environ["OUTLAST_SECRET"]),
            config=config,
            probe=Probe(probed, faults),
            progress=Progress(Region(Progress.SIZE, fd=int(environ["OUTLAST_PROGRESS_FD"]))),
            exchange=_exchange(config),
            lies=environ.get("OUTLAST_LIES", ""),
            hold=environ.get("OUTLAST_HOLD", ""),
            address=environ.get("OUTLAST_ADDRESS", ""),
            until=_until(environ),
            tls=tls_of(config.tls),
            probation=bool(environ.get("OUTLAST_PROBATION")),
        )


def _exchange(config: RunConfig) -> str:
    chosen = "hosts" if config.endpoint else "shm"  # no memory is shared between hosts
    return chosen if config.exchange == "auto" else config.exchange


def _until(environ: Mapping[str, str]) -> int:
    text = environ.get("OUTLAST_UNTIL", "0")
    if not text.isdigit():
        raise ConfigError(f"OUTLAST_UNTIL={text!r} is no number of steps", remedy="a whole number")
    return int(text)


_COUNTS = {"WORLD_SIZE": "RANK", "SLURM_STEP_NUM_TASKS": "SLURM_PROCID", "OMPI_COMM_WORLD_SIZE": "OMPI_COMM_WORLD_RANK"}
"""Variables in which torchrun, srun and mpirun say how many processes they started, and which of them this one is."""


def _refuse_other_launchers(environ: Mapping[str, str]) -> None:
    """Raise ConfigError where each of several processes would take itself for the whole run: all of them would train
    the same and write the same files."""
    for count, rank in _COUNTS.items():
        number = environ.get(count, "")
        if rank in environ and number.isdigit() and int(number) > 1:
            raise ConfigError(
                f"another launcher started {number} processes ({count}={number}, {rank}={environ[rank]}), and none of "
                "them knows of the others: each would train the whole run",
                did="nothing was trained",
                remedy=f"outlast run --replicas {number} train.py",
            )
