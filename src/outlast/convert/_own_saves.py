"""Checkpoints of the script's own, `torch.save` and `torch.load`, told beside those that a run keeps by itself.

Both stay as they are: what is loaded before `protect` is what a new run begins with.
"""

from __future__ import annotations

from typing import Any

from outlast.convert._facts import calls_in

__all__ = ["say_own_saves"]

_LOAD = (
    "a run resumes by itself from what outlast run --checkpoint-dir DIR has saved, and then this is overwritten: leave "
    "it out with its torch.save, or keep it for the weights that a new run begins with"
)
_SAVE = (
    "outlast run --checkpoint-dir DIR saves all of the state beside training, and resumes: leave it out if it is only "
    "for going on, or keep it for other programs, where run.is_writer"
)


def say_own_saves(made: Any) -> None:
    """Say `check` for each call of a script that loads state which it saves. `made`: the rewrite."""
    facts = made.facts
    calls = [(call, facts.dotted(call.func)) for call in calls_in(facts.tree)]
    if not any(name.endswith("load_state_dict") for _, name in calls):
        return
    if not any(name == "torch.load" for _, name in calls):
        return
    for call, name in calls:
        if why := {"torch.load": _LOAD, "torch.save": _SAVE}.get(name):
            made.say(call, "check", f"{name}(…)", why)
