"""A checkpoint's tree into a training state, and the newest generation into a replica.

`tree_of` is what a save holds: parameters, buffers, optimizers, schedulers, registered state, the step, and the run's
facts. There is no random state in it: samples and random numbers are functions of (seed, step, microbatch), so the
step and the seed *are* it. Invariant: after `adopt` the replica is what it was when the save was taken, to the bit.
Does not decide when to load, nor what membership makes of it.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from outlast.errors import CheckpointError, ConfigError
from outlast.runtime.training.began_with import BEGAN
from outlast.runtime.training.engine import Engine
from outlast.runtime.training.state import State

__all__ = [
    "DIFFERS", "KEPT", "RUN_FACTS", "adopt", "asked_in", "check_facts", "kept_settings", "nothing_left", "other_names",
    "restore", "stopped_in", "tree_of",
]  # fmt: skip

RUN_FACTS = (
    "microbatches", "global_batch_size", "samples", "seed", "shuffle", "order", "clip_norm", "aggregation",
    "optimizers",
)  # fmt: skip
"""What fixes data and arithmetic: with another value it would be another run."""

DIFFERS = "bits may differ from the run that saved this:"
KEPT = "the checkpoint's settings hold, not the script's, until the loop sets others:"


def tree_of(
    state: State,
    step: int,
    facts: Mapping[str, str],
    stopped: str = "",
    asked: str = "",
    *,
    spread: bool = False,
) -> dict[str, Any]:
    """The live state as a tree, with what is needed to go on from it. `stopped`: why training ended with this step;
    `asked`: why the loop wants it to end with the next one; `spread`: as of `State.tree`."""
    ended = {"stopped": stopped} if stopped else {"asked": asked} if asked else {}
    names = other_names(state.model) if state.stages is None else state.stages.names
    return state.tree(spread=spread) | {"run": {"step": step, "facts": dict(facts), **names, **ended}}


def stopped_in(tree: Mapping[str, Any]) -> str:
    """Why training had ended with the step of a tree of `tree_of`; "" if it had not."""
    return str(tree["run"].get("stopped", ""))


def asked_in(tree: Mapping[str, Any]) -> str:
    """Why the loop wanted training to end with the step after that of a tree of `tree_of`; "" if it did not."""
    return str(tree["run"].get("asked", ""))


def nothing_left(step: int, until: int, stopped: str) -> str:
    """What to tell of a state, loaded as training begins, after which no step comes; "" if one does. `stopped`: why
    training had ended with it, of `stopped_in`."""
    if stopped:
        ended = f"training ended at step {step} ({stopped}), and stays ended"
        return f"{ended}: nothing is left to train; use another directory"
    if step < until:
        return ""
    return (
        f"the checkpoint is at step {step} and until is {until}: nothing is left to train; raise until, or use another "
        "directory"
    )


def other_names(model: torch.nn.Module) -> dict[str, Any]:
    """What an export must know of the model's names besides those that its tensors are kept under."""
    if model not in _known:
        first: dict[int, str] = {}
        named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
        tied = {name: first[id(t)] for name, t in named if first.setdefault(id(t), name) != name}
        modules = model.named_modules()
        absent = [f"{at}.{name}".lstrip(".") for at, m in modules for name in sorted(m._non_persistent_buffers_set)]
        _known[model] = {"tied": tied, "transient": absent}
    return _known[model]


_known: weakref.WeakKeyDictionary[torch.nn.Module, dict[str, Any]] = weakref.WeakKeyDictionary()


def check_facts(saved: Mapping[str, str], mine: Mapping[str, str], *, bitwise: bool) -> str:
    """Raises ConfigError if going on would be another run. Returns a warning if the bits may differ, else ""."""
    saved = {"order": "listed", **saved}  # what was saved before there was another
    wrong = [key for key in RUN_FACTS if key in saved and key in mine and saved[key] != mine[key]]
    if wrong and bitwise:
        shown = "; ".join(f"{key}: {saved[key]} there, {mine[key]} here" for key in wrong)
        raise ConfigError(
            f"the checkpoint is of another run: {shown}",
            did="nothing was trained",
            remedy="the settings that it was saved with; or --resume never; or bitwise = false to go on all the same",
        )
    other = sorted(k for k in saved.keys() & mine.keys() if saved[k] != mine[k] and k != "parameters")
    return "; ".join(f"{key}: {saved[key]} when it was saved, {mine[key]} now" for key in other)


def kept_settings(state: State, tree: Mapping[str, Any]) -> str:
    """What the script gives its optimizers and schedulers now, and the checkpoint, which is not loaded yet, has
    otherwise; "" if nothing."""
    saved = tree["extra"].get(BEGAN)
    return "; ".join(state.extra[BEGAN].unlike(saved)) if saved is not None else ""


def restore(state: State, tree: Mapping[str, Any]) -> None:
    """Take over a tree of `tree_of`. Raises CheckpointError, naming all of it, if the two do not fit."""
    _check(state, tree, state.tensors())
    state.take_over(tree)


def _check(state: State, tree: Mapping[str, Any], mine: Mapping[str, Tensor]) -> None:
    wrong = [f"missing in the checkpoint: {n}" for n in sorted(mine.keys() - tree["model"].keys())]
    wrong += [f"not wanted by the model: {n}" for n in sorted(tree["model"].keys() - mine.keys() - state.elsewhere)]
    for name, value in tree["model"].items():
        if name in mine and (mine[name].shape, mine[name].dtype) != (value.shape, value.dtype):
            have, want = f"{value.dtype}{list(value.shape)}", f"{mine[name].dtype}{list(mine[name].shape)}"
            wrong.append(f"{name}: the checkpoint has {have}, the model {want}")
    counts = {"optimizers": len(state.optimizers), "schedulers": len(state.schedulers)}
    for key, count in counts.items():
        if len(tree[key]) != count:
            wrong.append(f"{key}: the checkpoint has {len(tree[key])}, the script {count}")
    theirs, ours = (sorted(k for k in keys if not k.startswith("outlast.")) for keys in (tree["extra"], state.extra))
    if theirs != ours:  # outlast's own (guards) comes and goes with its settings
        wrong.append(f"registered state: {theirs} in the checkpoint, {ours} here")
    if wrong:
        raise CheckpointError(
            "the checkpoint does not fit the training state:\n" + "\n".join(wrong[:50]),
            did="nothing was loaded",
            remedy="the model that it was saved from; or --resume never",
        )


def adopt(engine: Engine, tree: Mapping[str, Any], *, ended: bool) -> int:
    """Make a replica what the tree says, between two steps; returns the step that it is at. `ended`: a run that was
    stopped with this step, or asked to with the next, stays so."""
    restore(engine.state, tree)
    engine.took()
    engine.meta = None
    step = int(tree["run"]["step"])
    if ended:
        engine.stop_wanted = asked_in(tree)
        if stopped_in(tree):
            engine.stop_after(step, stopped_in(tree))
    return step
