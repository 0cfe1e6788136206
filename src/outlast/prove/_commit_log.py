"""The stopwatch beside a run: each process appends a line for each step that it has committed, and nothing else counts.

`runtime/settings/witness_files` says what the lines are; a process has a file of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from outlast.runtime.settings.witness_files import StepWriter

__all__ = ["Commit", "CommitLog", "StepWriter"]


class Commit(NamedTuple):
    """`at_s`: of the clock that all processes of a machine share."""

    at_s: float
    step: int
    loss: str
    who: str


class CommitLog:
    """The reader's end: `read` takes what is new. `commits` are in the order of time, but for what came late."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.commits: list[Commit] = []
        self._places: dict[Path, int] = {}

    def read(self) -> None:
        for path in self.folder.iterdir():
            with path.open("rb") as file:
                file.seek(self._places.get(path, 0))
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._places[path] = self._places.get(path, 0) + len(whole)
            who = path.name.rpartition(".")[0]
            for line in whole.decode().splitlines():
                step, at, loss = line.split()
                self.commits.append(Commit(float(at), int(step), loss, who))
        self.commits.sort()

    @property
    def newest_s(self) -> float | None:
        """When the newest commit was."""
        return self.commits[-1].at_s if self.commits else None

    def newest_step(self, before_s: float = float("inf")) -> int:
        """The highest step that anybody had committed by then; -1: none."""
        return max((commit.step for commit in self.commits if commit.at_s <= before_s), default=-1)
