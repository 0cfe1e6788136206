"""The checkpoint engine of one process, and the places that its run saves at. Decides nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from outlast.checkpoint import CheckpointEngine as Archive
from outlast.checkpoint import Hold, Retention
from outlast.checkpoint import save_events as ce
from outlast.checkpoint.occupancy import Occupancy, occupy
from outlast.errors import ConfigError
from outlast.runtime.host.environment import Environment
from outlast.runtime.settings.fault_points import save_probe
from outlast.runtime.settings.head_settings import recorded
from outlast.runtime.settings.save_settings import SaveSettings

__all__ = ["archive_of", "occupied"]


def occupied(env: Environment, settings: SaveSettings) -> list[Occupancy]:
    """The places that this run saves at, held against other runs. Raises ConfigError if one of them is there."""
    places = [place for place in (settings.target, settings.drain_to) if place]
    return [occupy(place, env.run_id, limit_s=settings.timeout_s) for place in places]


def archive_of(
    env: Environment,
    settings: SaveSettings,
    facts: Mapping[str, str],
    *,
    on_event: Callable[[ce.CheckpointEvent], None],
) -> Archive:
    """The checkpoint engine of this process, in the launcher's memory if it gave any. Raises ConfigError."""
    hold = Hold.parse(env.hold) if env.hold else None
    place = int(env.me.partition(".")[0].removeprefix("r")) * env.width + env.place
    if hold is not None and place >= len(hold.fds):
        raise ConfigError(f"the launcher holds no memory for {env.me}", remedy="start it with outlast run")
    archive = Archive(
        settings.target,
        replica=env.place,
        num_replicas=env.width,
        writer_of=lambda rank: tuple(range(rank, archive.shares.num_replicas, env.width)),  # of a rank, in all replicas
        run=env.run_id,
        drain_to=settings.drain_to or None,
        hold=hold,
        local_replica=place,
        num_slots=settings.num_slots,
        retention=Retention(keep_last=settings.keep_last, keep_every=settings.keep_every),
        timeout_s=settings.timeout_s,
        on_event=on_event,
        probe=save_probe(env.probe),
        extra=recorded(env.config, settings, facts),
    )
    return archive
