"""Samples that cannot be read, within a budget: which they are, and since when everybody knows.

A microbatch in which one is met is read again from its beginning with another sample in its place: its size, its weight
and its random numbers stay, so what it holds follows from its position and from which samples are bad. Who meets one
tells it in its header; from the commit of that step on it is part of the training state of all, of joiners and of
checkpoints, and nobody tries it again. Does not choose what stands in a sample's place (`samples.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from outlast.errors import TrainingError
from outlast.runtime.training._sample_reader import Unread

__all__ = ["BAD", "BadRow", "BadSamples"]

BAD = "outlast.bad_samples"
"""Registered state under this name says which samples are skipped."""
BadRow = tuple[int, str]  # (sample, why)
_WORDS = 32  # samples of a step of which a header says why
_IN_A_ROW = 16  # reads that storage refused one after the other: then it is this host's storage, and not the samples


class BadSamples:
    """Remembers which samples cannot be read, and what stands in for them. `allowed`: how many samples of the run may
    be skipped; 0 for none, which is how the reader that finds one raises what it met."""

    def __init__(self, allowed: int = 0) -> None:
        self.allowed = allowed
        self.known: dict[int, str] = {}
        self._met: dict[int, dict[int, str]] = {}  # microbatch -> met in the step under way
        self._refused = 0

    # --- part of the training state ------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        return {"samples": [[sample, text] for sample, text in sorted(self.known.items())]}

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        self.known = {int(sample): str(text) for sample, text in values["samples"]}
        self._met.clear()

    # --- in a step -----------------------------------------------------------------------------------------------
    def here(self) -> Collection[int]:
        """Those that are known, and those that were met in the step under way."""
        if not self._met:
            return self.known.keys()
        return {*self.known, *(sample for found in self._met.values() for sample in found)}

    def meet(self, leaf: int, found: Unread) -> None:
        """A sample of this microbatch cannot be read. Raises TrainingError where that is one too many, or where it
        looks like this host's storage: another replica may be able to read them."""
        self._refused = self._refused + 1 if found.storage else 0
        if self._refused >= _IN_A_ROW:
            raise TrainingError(
                f"{_IN_A_ROW} samples in a row could not be read here, the last of them sample {found.sample} "
                f"({found.text})",
                did="this replica ends, and another one reads them",
                remedy="look at the storage of this host",
            )
        if found.sample not in self.here() and len(self.here()) >= self.allowed:
            raise TrainingError(
                f"sample {found.sample} of the dataset cannot be read ({found.text})" + self._spent(),
                did="no step was taken with it",
                remedy=f"mend or drop it, or let more be skipped: protect(bad_samples={max(10, 10 * self.allowed)})",
            )
        self._met.setdefault(leaf, {})[found.sample] = found.text

    def judge(self, rows: Iterable[BadRow]) -> None:
        """All headers of a step are here, and nothing is applied. Raises TrainingError, on every replica alike, if what
        they tell is too much together."""
        new = {sample: text for sample, text in rows if sample not in self.known}
        if self.allowed and len(self.known) + len(new) > self.allowed:
            sample, text = min(new.items())
            raise TrainingError(
                f"{len(new)} more samples of the dataset cannot be read, such as sample {sample} ({text}), and "
                f"{len(self.known)} of the {self.allowed} that bad_samples allows are skipped already",
                did="no step was taken with them",
                remedy=f"mend or drop them, or let more be skipped: protect(bad_samples={10 * self.allowed})",
            )

    def _spent(self) -> str:
        few = ", ".join(map(str, sorted(self.here())[:8])) + (", …" if len(self.here()) > 8 else "")
        return f", and the {self.allowed} that bad_samples allows are skipped already: {few}" if self.allowed else ""

    def read(self) -> None:
        """A microbatch was read to its end."""
        self._refused = 0

    def told(self, leaves: Iterable[int]) -> tuple[BadRow, ...]:
        """My part of the header, of the microbatches that count as mine."""
        found = sorted({row for leaf in leaves for row in self._met.get(leaf, {}).items()})
        return tuple((sample, text if number < _WORDS else "") for number, (sample, text) in enumerate(found))

    def met(self) -> tuple[tuple[int, int, str], ...]:
        """For the lead of a replica of several ranks: (microbatch, sample, why) of the step under way."""
        return tuple((leaf, sample, text) for leaf, found in self._met.items() for sample, text in found.items())

    def heard(self, rows: Iterable[tuple[int, int, str]]) -> None:
        """What another rank of this replica met."""
        for leaf, sample, text in rows:
            self._met.setdefault(leaf, {})[sample] = text

    def applied(self, rows: Iterable[BadRow]) -> None:
        """A step was applied in which these were met, here or elsewhere."""
        self._met.clear()
        for sample, text in rows:
            self.known.setdefault(sample, text)
