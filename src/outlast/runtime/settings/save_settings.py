"""Where, how often and how many checkpoints: what the script says, and what the run's configuration overrides.

No torch. The merged settings are one of the facts that all members must share, so the coordinator learns from them
where to publish.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Literal

import msgspec

from outlast.config import RunConfig, resolve
from outlast.errors import ConfigError

__all__ = ["NUM_SLOTS", "TIMEOUT_S", "Checkpoint", "SaveSettings", "beginning_of", "settings_of", "solo_config"]

NUM_SLOTS = 3
"""A replica's snapshots: the newest that was published, and two saves in flight."""

TIMEOUT_S = 600.0
"""How long a disk or a store may give no sign of life, unless the script says otherwise."""

_KEYS = (
    "checkpoint_dir", "checkpoint_every", "checkpoint_keep", "checkpoint_drain_to", "checkpoint_min_s", "resume",
    "init_from", "init_strict",
)  # fmt: skip


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Checkpoints as a training script wants them; what `outlast run` is told outranks it.

    `dir`: a directory or URL. `every`: steps between two saves, None lets outlast choose. `keep_last`: generations
    kept, and as many certified ones; `keep_every`: every so many-th is kept for good (0: none). `drain_to`: a farther
    place to copy each generation to. `num_slots`: snapshots in memory at once, each of this replica's share: the newest
    that was published and one save in flight, or (3) two. `timeout_s`: how long a disk or a store may give no sign of
    life before the save counts as failed, and how long the end of the loop waits for its save. `init_from`: weights to
    begin step 0 with, where there is nothing to resume: a checkpoint directory or URL, or safetensors; `init_strict`:
    all names must fit (how-to/checkpoints). These two work without a `dir`.

    Raises ConfigError for values that cannot work.
    """

    dir: str = ""
    every: int | None = None
    keep_last: int = 3
    keep_every: int = 0
    drain_to: str = ""
    num_slots: int = 2
    timeout_s: float = TIMEOUT_S
    init_from: str = ""
    init_strict: bool = True

    def __post_init__(self) -> None:
        for name in ("dir", "drain_to", "init_from"):
            if not isinstance(getattr(self, name), str):
                raise ConfigError(
                    f"Checkpoint({name}={getattr(self, name)!r}) is no text", remedy=f"{name}=str(…), a path or a URL"
                )
        lows = {"every": 1, "keep_last": 1, "keep_every": 0, "num_slots": 2}
        for name, low in lows.items():
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < low):
                raise ConfigError(f"Checkpoint({name}={value!r}) is no whole number", remedy=f"{name}={low} or more")
        if not 0 < self.timeout_s < math.inf:
            raise ConfigError(
                f"Checkpoint(timeout_s={self.timeout_s!r}) is no time to wait",
                remedy=f"seconds, more than 0; {TIMEOUT_S:g} if left out",
            )
        if self.num_slots > NUM_SLOTS:
            raise ConfigError(
                f"Checkpoint(num_slots={self.num_slots}) is more than two saves in flight can use",
                remedy=f"num_slots=2 or num_slots={NUM_SLOTS}",
            )


class SaveSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a run keeps to. `every`: 0 for an interval that is chosen."""

    target: str
    every: int
    keep_last: int
    keep_every: int
    drain_to: str
    num_slots: int
    min_s: float
    timeout_s: float = TIMEOUT_S


def beginning_of(given: Checkpoint | Literal["auto", "off"] | None, config: RunConfig) -> RunConfig:
    """The configuration with what the script says to begin with, where the run is not told."""
    if config.init_from or not isinstance(given, Checkpoint) or not given.init_from:
        return config
    return msgspec.structs.replace(config, init_from=_absolute(given.init_from), init_strict=given.init_strict)


def settings_of(given: Checkpoint | Literal["auto", "off"] | None, config: RunConfig) -> SaveSettings | None:
    """The settings of a run; None if it keeps no checkpoints. Raises ConfigError."""
    if given == "off" or given is None:
        return None
    if isinstance(given, str) and given != "auto":
        raise ConfigError(
            f"checkpoint={given!r} is neither 'auto' nor 'off'",
            remedy=f"checkpoint=outlast.Checkpoint(dir={given!r}) to keep them there",
        )
    if not isinstance(given, str | Checkpoint):
        raise ConfigError(
            f"checkpoint is a {type(given).__name__}", remedy="'auto', 'off', or outlast.Checkpoint(dir=…, every=…)"
        )
    mine = given if isinstance(given, Checkpoint) else Checkpoint()
    target = config.checkpoint_dir or mine.dir
    if not target and config.resume not in ("auto", "never"):
        raise ConfigError(
            f"resume = {config.resume!r}, but the run keeps no checkpoints",
            remedy="give --checkpoint-dir as well: where to save from there on",
        )
    if not target:
        return None
    return SaveSettings(
        target=_absolute(target),
        every=config.checkpoint_every or mine.every or 0,
        keep_last=mine.keep_last if config.checkpoint_keep == RunConfig().checkpoint_keep else config.checkpoint_keep,
        keep_every=mine.keep_every,
        drain_to=_absolute(config.checkpoint_drain_to or mine.drain_to),
        num_slots=mine.num_slots,
        min_s=config.checkpoint_min_s,
        timeout_s=mine.timeout_s,
    )


def _absolute(place: str) -> str:
    return place if not place or "://" in place else os.path.abspath(place)


def solo_config(environ: Mapping[str, str]) -> RunConfig:
    """The configuration of a script that was started without a launcher: only what concerns checkpoints is read, and
    whether bits must be the same."""
    names = [f"OUTLAST_{key.upper()}" for key in (*_KEYS, "bitwise")]
    return resolve(cli={}, environ={name: environ[name] for name in names if name in environ}).config
