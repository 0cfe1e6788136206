"""Whose fault it is when replicas raise: the machine's (they are replaced), or the user's (the run stops; rule 21)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from outlast.core.protocol import messages as m
from outlast.core.protocol.fleet.roster import slot_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outlast.core.protocol.fleet.coordinator import Coordinator

__all__ = ["Failures"]

_SAME_ON_ALL = 2  # exit code of bad options and of a configuration that cannot work
_REFUSED = 4  # exit code of a replica that differs from its run
_CANNOT_BEGIN = (_SAME_ON_ALL, 7)  # 7: a checkpoint that cannot be read or does not fit
_CODES = (_SAME_ON_ALL, 3, _REFUSED)  # what a script's end before training may pass on; else it is the script's error


@dataclass(slots=True)
class Failures:
    """What raised where. Slots are counted, not incarnations: one bad machine may fail as often as it likes."""

    calm: set[str] = field(default_factory=set)  # members that ended by themselves, with exit code 0
    words: dict[str, str] = field(default_factory=dict)  # of members that ended by an exception
    codes: dict[str, int] = field(default_factory=dict)  # the exit codes that their errors stand for
    _places: dict[tuple[int, str], set[str]] = field(default_factory=dict)
    _early: dict[str, int] = field(default_factory=dict)  # slot -> ends before training

    def raised(self, c: Coordinator, failed: m.Failed) -> None:
        """Two different replicas on the same microbatch, or with the same error at the same line in one step; one, if
        it is the only one and cannot begin with what it was told."""
        self.words[failed.member], self.codes[failed.member] = failed.error, failed.code
        if c.ending is not None:
            return  # no step's fault
        if failed.final:
            c.finish(
                "failed", failed.code, failed.step, f"{failed.member} found in step {failed.step}:\n{failed.error}"
            )
            return
        unbegun = failed.code in _CANNOT_BEGIN and not c.ever_formed
        alone = c.settings.num_replicas + c.settings.num_spares == 1
        places = {f"microbatch {failed.microbatch}": failed.microbatch >= 0, failed.alike: bool(failed.alike)}
        for place in [place for place, known in places.items() if known]:
            slots = self._places.setdefault((failed.step, place), set())
            slots.add(slot_of(failed.member))
            if len(slots) > 1 or (unbegun and alone):
                where = f"step {failed.step}" + (f", {place}" if place.startswith("microbatch") else "")
                what = "training could not begin" if unbegun else f"two replicas failed in {where}"
                c.finish("failed", failed.code, failed.step, f"{what}:\n{failed.error}")
                return

    def ended(self, c: Coordinator, exited: m.Exited, fault: bool) -> None:
        """Two replicas that end before they reach protect() are the script's fault, not the machine's; some exit codes
        say so at once. Once a view has formed, survivors train on, and only replacements are missing."""
        if exited.cause == "exception":
            self.words.setdefault(exited.member, exited.detail)
        elif exited.cause == "finished":
            self.calm.add(exited.member)
        if not fault or c.ever_formed or exited.cause not in ("exception", "exit"):
            return
        if exited.joined and exited.code != _REFUSED:
            return
        slot = slot_of(exited.member)
        self._early[slot] = self._early.get(slot, 0) + 1
        alone = c.settings.num_replicas + c.settings.num_spares == 1
        refused_again = exited.code == _REFUSED and self._early[slot] > 1
        if len(self._early) > 1 or alone or exited.code == _SAME_ON_ALL or refused_again:
            code = exited.code if exited.code in _CODES else 5
            c.finish("failed", code, 0, f"the script ended before training started:\n{exited.detail}")

    @property
    def newest_code(self) -> int:
        """The exit code that the newest error stands for; 0 if nobody raised."""
        return self.codes.get(next(reversed(self.words), ""), 5) if self.words else 0

    def said(self) -> str:
        """What the replicas ended with, each error once with how often, and the newest whole."""
        if not self.words:
            return ""
        last = Counter(_last_line(words) for words in self.words.values())
        counted = "; ".join(f"{number} ended with {line}" for line, number in last.most_common(3))
        return f": {counted}\n{next(reversed(self.words.values()))}"

    def of_all(self, members: Sequence[str]) -> str:
        """What the last of the members said if every one of them ended by an exception, else nothing."""
        return self.words[members[-1]] if all(name in self.words for name in members) else ""


def _last_line(words: str) -> str:
    lines = [line for line in words.splitlines() if line.strip()]
    return lines[-1].strip()[:200] if lines else "no word"
