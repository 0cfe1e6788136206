"""What replicas raised and how their scripts ended, as far as it is known. `_blame.py` says whose fault it was."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["Failures"]


@dataclass(slots=True)
class Failures:
    """What raised where. Slots are counted, not incarnations: one bad machine may fail as often as it likes."""

    calm: set[str] = field(default_factory=set)  # members that ended by themselves, with exit code 0
    words: dict[str, str] = field(default_factory=dict)  # of members that ended by an exception
    codes: dict[str, int] = field(default_factory=dict)  # the exit codes that their errors stand for
    places: dict[tuple[int, str], set[str]] = field(default_factory=dict)
    left: set[str] = field(default_factory=set)  # members that views are without since they said so
    early: dict[str, int] = field(default_factory=dict)  # slot -> ends before training

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
