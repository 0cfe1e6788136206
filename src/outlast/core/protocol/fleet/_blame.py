"""Whose fault it is when replicas raise: the machine's (they are replaced), or the user's (the run stops; rule 21)."""

from __future__ import annotations

from outlast.core.protocol import messages as m
from outlast.core.protocol.fleet.roster import slot_of
from outlast.core.protocol.fleet.state import FleetState

__all__ = ["ended", "raised"]

_SAME_ON_ALL = 2  # exit code of bad options and of a configuration that cannot work
_REFUSED = 4  # exit code of a replica that differs from its run
_CANNOT_BEGIN = (_SAME_ON_ALL, 7)  # 7: a checkpoint that cannot be read or does not fit
_CODES = (_SAME_ON_ALL, 3, _REFUSED)  # what a script's end before training may pass on; else it is the script's error


def raised(c: FleetState, failed: m.Failed) -> None:
    """Two different replicas on the same microbatch, or with the same error at the same line in one step; one, if
    it is the only one and cannot begin with what it was told."""
    c.failures.words[failed.member], c.failures.codes[failed.member] = failed.error, failed.code
    if c.ending is not None:
        return  # no step's fault
    if failed.final:
        c.finish("failed", failed.code, failed.step, f"{failed.member} found in step {failed.step}:\n{failed.error}")
        return
    unbegun = failed.code in _CANNOT_BEGIN and not c.ever_formed
    alone = c.settings.num_replicas + c.settings.num_spares == 1
    places = {f"microbatch {failed.microbatch}": failed.microbatch >= 0, failed.alike: bool(failed.alike)}
    for place in [place for place, known in places.items() if known]:
        slots = c.failures.places.setdefault((failed.step, place), set())
        slots.add(slot_of(failed.member))
        if len(slots) > 1 or (unbegun and alone):
            where = f"step {failed.step}" + (f", {place}" if place.startswith("microbatch") else "")
            what = "training could not begin" if unbegun else f"two replicas failed in {where}"
            c.finish("failed", failed.code, failed.step, f"{what}:\n{failed.error}")
            return


def ended(c: FleetState, exited: m.Exited, fault: bool) -> None:
    """Two replicas that end before they reach protect() are the script's fault, not the machine's; some exit codes
    say so at once. Once a view has formed, survivors train on, and only replacements are missing."""
    if exited.cause == "exception":
        c.failures.words.setdefault(exited.member, exited.detail)
    elif exited.cause == "finished":
        c.failures.calm.add(exited.member)
    if not fault or c.ever_formed or exited.cause not in ("exception", "exit"):
        return
    if exited.joined and exited.code != _REFUSED:
        return
    slot = slot_of(exited.member)
    c.failures.early[slot] = c.failures.early.get(slot, 0) + 1
    alone = c.settings.num_replicas + c.settings.num_spares == 1
    refused_again = exited.code == _REFUSED and c.failures.early[slot] > 1
    if len(c.failures.early) > 1 or alone or exited.code == _SAME_ON_ALL or refused_again:
        code = exited.code if exited.code in _CODES else 5
        c.finish("failed", code, 0, f"the script ended before training started:\n{exited.detail}")
