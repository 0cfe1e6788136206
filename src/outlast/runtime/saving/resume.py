"""What a replica begins with: the newest generation that is whole, read into the training state.

Role: choose the place (this run's own generations, the one that was asked for, none) and load. Every member of a first
view does it by itself before the view forms; should one find less than the others, the roll call shows it behind and
it is served like any joiner. Does not decide that a fleet starts again (that is `core/protocol`), and never goes back
in the middle of a run: what the guards go back to lies in memory (`checks/_certified_state.py`).
"""

from __future__ import annotations

import sys
from collections.abc import Collection

import torch

from outlast.checkpoint import CheckpointEngine as Archive
from outlast.checkpoint import Head, Hold, LoadedState, MemoryStore, heads
from outlast.checkpoint.patience import Patient
from outlast.checkpoint.room import tried
from outlast.checkpoint.save_events import Differs, Unwritable
from outlast.config import RunConfig
from outlast.core.protocol import View
from outlast.errors import EnvironmentFault, OutlastError
from outlast.runtime.host.environment import Environment
from outlast.runtime.saving._initial_weights import begin_with
from outlast.runtime.saving.contents import PARTS, no_checkpoint, place_and_number, weights_only
from outlast.runtime.saving.member_saves import Saves
from outlast.runtime.saving.restore import DIFFERS, KEPT, adopt, check_facts, kept_settings, nothing_left
from outlast.runtime.settings.save_settings import TIMEOUT_S
from outlast.runtime.training.engine import Engine
from outlast.runtime.transport.save_messages import SaveBase

__all__ = ["begin", "begin_at_zero", "newer", "newest_epoch", "resume", "take_up", "usable"]

_LOOK_BACK = 16


def begin(env: Environment, engine: Engine, view: View, saves: Saves | None) -> None:
    """Make a member of a first view what it is to begin as: resumed, or at step 0, with `init_from`'s weights if any.

    Raises what `resume` and `begin_with` do.
    """
    leads = view.members[0] == env.me and not env.place
    if saves is not None and resume(saves) is not None:
        if leads:
            _tell_if_over(saves)
        return
    timeout_s = saves.settings.timeout_s if saves is not None else TIMEOUT_S
    done = begin_at_zero(env.config, engine.state.model, timeout_s, engine.state.elsewhere)
    engine.take_buffers()
    if done and leads:
        print(f"outlast: {done}", file=sys.stderr, flush=True)


def _tell_if_over(saves: Saves) -> None:
    """Say that the loop will be given no step, unless this very run came so far, and has lost all its replicas."""
    until, committed, stopped = saves.member.until, saves.member.committed, saves.engine.stopped
    told = "" if until is None or saves.env.until else nothing_left(committed, until, stopped)
    if told and not _has_begun(saves):
        print(f"outlast: {told}", file=sys.stderr, flush=True)


def usable(loaded: LoadedState | None, url: str, config: RunConfig) -> LoadedState | None:
    """What was loaded, if a run can go on with it. Raises CheckpointError for weights alone, unless the run is told
    what to begin with and they only lie where it will save: then None."""
    if loaded is None or (isinstance(loaded.tree, dict) and loaded.tree.keys() >= PARTS):
        return loaded
    if config.init_from and config.resume == "auto":
        return None
    raise weights_only(loaded.generation, url)


def begin_at_zero(config: RunConfig, model: torch.nn.Module, timeout_s: float, elsewhere: Collection[str] = ()) -> str:
    """Take over the weights of `init_from`, if there is one; returns what was done. `elsewhere`: names that other ranks
    take over. Raises CheckpointError."""
    if not config.init_from:
        return ""
    return begin_with(config.init_from, model, strict=config.init_strict, timeout_s=timeout_s, elsewhere=elsewhere)


def resume(saves: Saves) -> LoadedState | None:
    """Begin where the run, or the one before it, was. None: begin at step 0.

    Raises CheckpointError if there are generations and none can be read; ConfigError if they are of another run; in a
    fleet of one EnvironmentFault if the place cannot be listed.
    """
    _check_place(saves)
    saves.archive.prepare_later(saves._tree())  # what cannot be kept is refused before anything is trained
    if saves.alone:
        saves.told(SaveBase(epoch=0, base=newest_epoch(_patient(saves))))
    loaded = _load(saves)
    if loaded is None:
        return None
    saves.member.committed = saves.member.stable = take_up(saves, loaded)
    return loaded


def newer(saves: Saves, committed: int) -> LoadedState | None:
    """The newest generation, if it is of more steps than `committed`, which this replica holds. What cannot be read is
    told, and is no reason to give up the state that is here."""
    try:
        loaded = _load(saves)
        if loaded is None or loaded.step <= committed:
            return None
        check_facts(loaded.tree["run"]["facts"], saves.facts, bitwise=saves.env.config.bitwise)
    except (OutlastError, OSError) as error:
        print(f"outlast: this replica goes on from its own step {committed}: {error}", file=sys.stderr, flush=True)
        return None
    return loaded


def take_up(saves: Saves, loaded: LoadedState) -> int:
    """Become what was loaded, and say in what it differs from this run; returns the step that it is at. Raises
    ConfigError if it is of another run."""
    config = saves.env.config
    warning = check_facts(loaded.tree["run"]["facts"], saves.facts, bitwise=config.bitwise)
    kept = kept_settings(saves.engine.state, loaded.tree)
    for words, detail in ((DIFFERS, warning), (KEPT, kept)):
        if detail and not saves.env.place:
            print(f"outlast: {words} {detail}", file=sys.stderr)
            saves._on_event(Differs(step=loaded.step, detail=detail, kept=words == KEPT))
    return adopt(saves.engine, loaded.tree, ended=config.resume == "auto" or _has_begun(saves))


def _check_place(saves: Saves) -> None:
    """Say now what would be found out at the first save. A fleet trains all the same: a replacement must not end
    because a disk is full for a while. Raises EnvironmentFault in a fleet of one."""
    target, view = saves.settings.target, saves.member.view
    if saves.env.place or (view is not None and view.members[0] != saves.env.me):
        return
    try:
        wrong = tried(target, saves.engine.state.size_bytes(), saves.settings.timeout_s)
    except EnvironmentFault as error:
        if saves.alone:
            raise
        wrong = error.message
    if wrong:
        saves._on_event(Unwritable(reason=wrong, url=target))


def _load(saves: Saves) -> LoadedState | None:
    wanted = saves.env.config.resume
    if wanted == "auto" or _has_begun(saves):
        return usable(saves.archive.load(), saves.archive.store.url, saves.env.config)
    if wanted == "never":
        return None
    place, number = place_and_number(wanted)
    source = Archive(place, on_event=saves._on_event)
    try:
        loaded = source.load(generation=number)
    finally:
        source.close()
    if loaded is None:
        raise no_checkpoint(wanted)
    return usable(loaded, place, saves.env.config)


def _has_begun(saves: Saves) -> bool:
    """Whether this very run has saved something. What the host's memory holds tells it while the store is away."""
    hold = Hold.parse(saves.env.hold) if saves.env.hold else None
    if hold is not None and MemoryStore(hold).generations():
        return True
    return any(head.run == saves.env.run_id for head in _heads(saves))


def newest_epoch(store: Patient) -> int:
    """Without a launcher: how much higher views are to be numbered than a new run's, as the coordinator does it. Raises
    EnvironmentFault for a place that cannot be listed: nobody is there who would try it again."""
    try:
        return max((head.view[0] for head in heads(store, newest=_LOOK_BACK)[0]), default=0)
    except OSError as error:
        raise EnvironmentFault(
            f"the checkpoints at {store.url} cannot be listed: {error}", did="nothing was trained",
            remedy="mend the place (of a URL: endpoint, region and credentials in the environment), or give another",
        ) from error  # fmt: skip


def _patient(saves: Saves) -> Patient:
    return Patient(saves.archive.store, saves.settings.timeout_s)


def _heads(saves: Saves) -> list[Head]:
    """The newest ones. Raises OSError, also for a place that does not answer in time."""
    return heads(_patient(saves), newest=_LOOK_BACK)[0]
