"""What a witness writes beside a run, and who proves something reads: plain lines in one folder, no torch.

A witness is told of by `OUTLAST_WITNESS=FOLDER`, in each replica's environment. It owes nothing to the accounts that it
is held against: every process appends to files of its own, a line a write, so that a line is whole or absent whenever
the process dies.

`commits/NAME.PID`: `step monotonic_s loss`, one line a step that this process's loop saw committed;
`microbatches/NAME.PID`: `step microbatch digest loss`, one line a microbatch that it computed;
`starts/NAME.PID.json`, `ends/NAME.PID.json`: the state, part by part, before the first step and after the last one; of
a replica of several ranks what its lead holds, and `lane1/NAME.PID.json` and so on what the others end with.
Losses are in hexadecimal digits, so that bits are compared.
"""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import msgspec

__all__ = ["LANE", "VARIABLE", "Computed", "StateSeen", "StepWriter", "Testimony", "read_computed", "read_states"]

VARIABLE = "OUTLAST_WITNESS"
LANE = "lane"
_APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC


class StateSeen(msgspec.Struct, frozen=True, kw_only=True):
    """The training state as one process has it. `steps`: committed so far; `parts`: digest by name of each tensor and
    value that is registered; `loop`: (kind, digest) by name of what else the loop's own variables hold."""

    steps: int
    fingerprint: str
    parts: dict[str, str]
    loop: dict[str, tuple[str, str]] = {}


class Computed(msgspec.Struct, frozen=True):
    """A microbatch that was computed. `digest`: of its batch."""

    step: int
    microbatch: int
    digest: str
    loss: str
    who: str


class StepWriter:
    """A process's stopwatch."""

    def __init__(self, folder: Path, name: str) -> None:
        self._fd = os.open(folder / f"{name}.{os.getpid()}", _APPEND)

    def committed(self, step: int, loss: float) -> None:
        """Append one line."""
        _append(self._fd, f"{step} {time.monotonic()!r} {loss.hex()}\n")


class Testimony:
    """All that one process writes."""

    def __init__(self, folder: Path, name: str) -> None:
        for place in ("commits", "microbatches", "starts", "ends"):
            (folder / place).mkdir(parents=True, exist_ok=True)
        self._folder, self._file = folder, f"{name}.{os.getpid()}"
        self.steps = StepWriter(folder / "commits", name)
        self._microbatches = os.open(folder / "microbatches" / self._file, _APPEND)

    def computed(self, step: int, microbatch: int, digest: int, loss: float) -> None:
        """Append one line."""
        _append(self._microbatches, f"{step} {microbatch} {digest:016x} {loss.hex()}\n")

    def state(self, place: str, seen: StateSeen) -> None:
        """Write it whole or not at all. `place`: starts, ends or a lane."""
        (self._folder / place).mkdir(exist_ok=True)
        part = self._folder / f"{place}-{self._file}.part"
        part.write_bytes(msgspec.json.encode(seen))
        part.rename(self._folder / place / f"{self._file}.json")


def _append(fd: int, line: str) -> None:
    """OSError also where only a part of it could be written: what is not written down must not be done."""
    data = line.encode()
    if os.write(fd, data) != len(data):
        raise OSError(errno.EFBIG, "a line of the witness was cut short")


def read_computed(folder: Path) -> list[Computed]:
    """All microbatches that anybody computed."""
    found = []
    for path in sorted((folder / "microbatches").glob("*")):
        data = path.read_bytes()
        for line in data[: data.rfind(b"\n") + 1].decode().splitlines():
            step, microbatch, digest, loss = line.split()
            found.append(Computed(int(step), int(microbatch), digest, loss, path.name.rpartition(".")[0]))
    return found


def read_states(folder: Path, place: str) -> dict[str, StateSeen]:
    """By process."""
    paths = sorted((folder / place).glob("*.json"))
    return {path.stem: msgspec.json.decode(path.read_bytes(), type=StateSeen) for path in paths}
