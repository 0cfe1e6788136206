"""What a replica begins with: the newest generation that is whole, read into the training state.

Role: choose the place (this run's own generations, the one that was asked for, none) and load. Every member of a first
view does it by itself before the view forms; should one find less than the others, the roll call shows it behind and
it is served like any joiner. Does not decide that a fleet starts again (that is `core/protocol`), and never goes back
in the middle of a run: what the guards go back to lies in memory (`_certified.py`).
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from outlast.checkpoint import Engine as Archive
from outlast.checkpoint import Head, Hold, LoadedState, MemoryStore, heads
from outlast.checkpoint._events import Differs
from outlast.checkpoint._patience import Patient
from outlast.errors import CheckpointError
from outlast.runtime._restore import DIFFERS, adopt, check_facts
from outlast.runtime._saving import SaveBase

if TYPE_CHECKING:
    from outlast.runtime._saves import Saves

__all__ = ["resume"]

_LOOK_BACK = 16


def resume(saves: Saves) -> LoadedState | None:
    """Begin where the run, or the one before it, was. None: begin at step 0.

    Raises CheckpointError if there are generations and none can be read; ConfigError if they are of another run.
    """
    saves.archive.prepare_later(saves._tree())  # what cannot be kept is refused before anything is trained
    if saves.alone:
        saves.told(SaveBase(epoch=0, base=_newest_epoch(saves)))
    loaded = _load(saves)
    if loaded is None:
        return None
    config = saves.env.config
    warning = check_facts(loaded.tree["run"]["facts"], saves.facts, bitwise=config.bitwise)
    if warning:
        print(f"outlast: {DIFFERS} {warning}", file=sys.stderr)
        saves._on_event(Differs(step=loaded.step, detail=warning))
    step = adopt(saves.engine, loaded.tree)
    saves.member.committed = saves.member.stable = step
    return loaded


def _load(saves: Saves) -> LoadedState | None:
    wanted = saves.env.config.resume
    if wanted == "auto" or _has_begun(saves):
        return saves.archive.load()
    if wanted == "never":
        return None
    place, _, number = wanted.rpartition("@")
    if not (place and number.isdigit()):
        place, number = wanted, ""
    source = Archive(place, on_event=saves._on_event)
    try:
        loaded = source.load(generation=int(number) if number else None)
    finally:
        source.close()
    if loaded is None:
        raise CheckpointError(
            f"there is no checkpoint at {wanted}", did="nothing was trained", remedy="outlast ckpt ls shows what is"
        )
    return loaded


def _has_begun(saves: Saves) -> bool:
    """Whether this very run has saved something. What the host's memory holds tells it while the store is away."""
    hold = Hold.parse(saves.env.hold) if saves.env.hold else None
    if hold is not None and MemoryStore(hold).generations():
        return True
    return any(head.run == saves.env.run_id for head in _heads(saves))


def _newest_epoch(saves: Saves) -> int:
    """In a fleet of one: how much higher its views are to be numbered than a new run's, as the coordinator does it."""
    return max((head.view[0] for head in _heads(saves)), default=0)


def _heads(saves: Saves) -> list[Head]:
    """The newest ones. Raises OSError, also for a place that does not answer in time."""
    return heads(Patient(saves.archive.store, saves.settings.timeout_s), newest=_LOOK_BACK)[0]
