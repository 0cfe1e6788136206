"""A reading, what it may be, and who takes readings without anybody waiting for them.

Invariants: `collect` returns at once, whatever a source does; each source has one thread, which may hang and hurts
nothing but its own readings then, and a source that is silent for too long is itself a reading. Intervals are of the
monotonic clock; a wall clock that jumps changes labels only.
"""

from __future__ import annotations

import contextlib
import math
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal, Protocol

import msgspec

__all__ = ["Alarm", "Reading", "Recorded", "Sampler", "ReadingSource", "alarms_of"]

_MOST_KEPT, _MOST_BATCHES = 1_000, 100  # readings of one look at a source, and looks that nobody has collected yet
_SILENT_ROUNDS = 3


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """One value of one thing. `name` is dotted, e.g. `edac.ce`, `thermal.c`, `xid`; `value` is None where there is
    none (`missing`, `implausible`), and `text` says why. `at_s`: Unix time. `recorded`: played back from a file."""

    at_s: float
    source: str
    device: str
    name: str
    value: float | None = None
    text: str = ""
    recorded: bool = False


class Alarm(msgspec.Struct, frozen=True, kw_only=True):
    """A reading, or a change of one, that says something about a device. `severity`: "fatal", it is not to be used;
    "warning", it may fail soon; "notice", the host will be taken away."""

    at_s: float
    device: str
    severity: Literal["notice", "warning", "fatal"]
    evidence: str


class ReadingSource(Protocol):
    """Reads its part of the host. `read` may block: it is called in a thread of its own."""

    @property
    def name(self) -> str: ...

    def read(self, now_s: float) -> Iterable[Reading]: ...


_PLAUSIBLE: dict[str, tuple[float, float]] = {
    "thermal.c": (-40.0, 200.0),
    "nvml.temperature.c": (-40.0, 200.0),
    "nvml.power.w": (0.0, 5000.0),
}
_COUNTERS = (0.0, 2.0**63)


def plausible(reading: Reading) -> Reading:
    """The reading, or one that says that its value cannot be."""
    if reading.value is None:
        return reading
    low, high = _PLAUSIBLE.get(reading.name, _COUNTERS)
    if math.isfinite(reading.value) and low <= reading.value <= high:
        return reading
    text = f"{reading.name} = {reading.value:g}"
    return msgspec.structs.replace(reading, name="implausible", value=None, text=text)


class Recorded:
    """A recorded twin of a source: plays back the readings of a file of JSON lines, a call a batch of one `at_s`. What
    it gives is marked as recorded, and so is each alarm that follows."""

    def __init__(self, path: Path, name: str = "recorded") -> None:
        self.name, self._path = name, path
        self._batches: Iterator[list[Reading]] | None = None
        self._file = -1  # inode: another file in its place is another recording

    def read(self, now_s: float) -> Iterable[Reading]:
        """The next batch; nothing after the last. OSError while the file cannot be read, which is a missing reading."""
        file = self._path.stat().st_ino
        if self._batches is None or file != self._file:
            self._file, data = file, self._path.read_bytes()
            if not data:  # somebody is about to write it
                return []
            self._batches = _batches(data)
        return [msgspec.structs.replace(reading, recorded=True) for reading in next(self._batches, [])]


def _batches(data: bytes) -> Iterator[list[Reading]]:
    batch: list[Reading] = []
    for line in data.splitlines():
        try:
            reading = msgspec.json.decode(line, type=Reading)
        except msgspec.DecodeError:  # a recording that was cut short
            continue
        if batch and reading.at_s != batch[0].at_s:
            yield batch
            batch = []
        batch.append(reading)
    if batch:
        yield batch


class Sampler:
    """Samples sources every `interval_s`, each in its own thread. `say`: for what is worth saying once."""

    def __init__(
        self,
        sources: Sequence[ReadingSource],
        *,
        interval_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self._sources, self.interval_s, self._clock, self._wall = list(sources), interval_s, clock, wall
        self._say = say if say is not None else _to_stderr
        self._found: queue.Queue[tuple[str, list[Reading]]] = queue.Queue()
        self._wake = {source.name: threading.Event() for source in self._sources}
        self._busy: dict[str, float] = {}
        self._heard: dict[str, float] = {}
        self._said: set[tuple[str, str]] = set()
        self._silent: set[str] = set()
        self._over = False
        self.cpu_s = 0.0
        self._lock = threading.Lock()

    def start(self) -> None:
        """Begin; returns at once. A source for which there is no thread is silent, and so a reading."""
        for source in self._sources:
            thread = threading.Thread(target=self._run, args=(source,), name=f"outlast-{source.name}", daemon=True)
            with contextlib.suppress(RuntimeError, MemoryError):
                thread.start()

    def close(self) -> None:
        """Let the threads end; one that hangs is left behind."""
        self._over = True
        for event in self._wake.values():
            event.set()

    def ask(self) -> None:
        """Have every source that is not still reading read now."""
        now = self._clock()
        for source in self._sources:
            if source.name not in self._busy:
                self._busy[source.name] = now
                self._wake[source.name].set()

    def _run(self, source: ReadingSource) -> None:
        event = self._wake[source.name]
        while True:
            event.wait()
            event.clear()
            if self._over:
                return
            start = time.thread_time()
            try:
                readings = [plausible(reading) for reading in source.read(self._wall())]
            except Exception as error:  # noqa: BLE001 - the boundary: a sensor's failure is a reading, never an end
                text = f"{type(error).__name__}: {error}"[:200]
                readings = [Reading(at_s=self._wall(), source=source.name, device="", name="missing", text=text)]
            with self._lock:
                self.cpu_s += time.thread_time() - start
            if self._found.qsize() < _MOST_BATCHES:  # else nobody collects, and there is nobody to tell
                self._found.put((source.name, readings[:_MOST_KEPT]))

    def collect(self) -> list[Reading]:
        """What came in since the last call, without waiting; and who has been silent for too long."""
        found: list[Reading] = []
        now = self._clock()
        while True:
            try:
                name, readings = self._found.get_nowait()
            except queue.Empty:
                break
            self._busy.pop(name, None)
            self._silent.discard(name)
            found += readings
        for name, since in self._busy.items():
            if now - since > _SILENT_ROUNDS * self.interval_s and name not in self._silent:
                self._silent.add(name)
                text = f"no answer for {now - since:.0f} s"
                found.append(Reading(at_s=self._wall(), source=name, device="", name="missing", text=text))
        self._tell(found)
        return found

    def _tell(self, readings: Iterable[Reading]) -> None:
        for reading in readings:
            if reading.name in ("missing", "implausible") and (reading.source, reading.name) not in self._said:
                self._said.add((reading.source, reading.name))
                self._say(f"readings of {reading.source}: {reading.name} ({reading.text}); training does without")


def _to_stderr(text: str) -> None:
    print(f"outlast: {text}", file=sys.stderr, flush=True)


# Counters: how much more of it since the last reading is an alarm.
_RISES: dict[str, tuple[float, Literal["warning", "fatal"]]] = {
    "edac.ue": (1.0, "fatal"),
    "edac.ce": (100.0, "warning"),
    "nvml.ecc.uncorrected": (1.0, "fatal"),
    "nvml.ecc.corrected": (100.0, "warning"),
    "nvml.remapped.uncorrectable": (1.0, "warning"),
    "nvml.remap.failed": (1.0, "fatal"),
    "nvml.pcie.replays": (1000.0, "warning"),
    "nvml.nvlink.errors": (100.0, "warning"),
    "net.errors": (1000.0, "warning"),
    "net.errors.tx": (1000.0, "warning"),
    "ib.symbol_error": (1000.0, "warning"),
    "ib.link_error_recovery": (10.0, "warning"),
    "ib.link_downed": (1.0, "warning"),
    "ib.port_rcv_errors": (1000.0, "warning"),
    "fs.errors": (1.0, "warning"),
    "md.degraded": (1.0, "warning"),
    "disk.errors": (100.0, "warning"),
    "net.carrier_changes": (2.0, "warning"),
}
_LIMITS: dict[str, float] = {"nvml.temperature.c": 95.0}
_EVENTS: dict[str, Literal["notice", "warning", "fatal"]] = {
    "xid.fatal": "fatal", "xid.warning": "warning", "mce": "warning", "oom": "warning", "nic.reset": "warning",
    "fs.error": "warning", "disk.error": "warning", "cloud.notice": "notice", "memory.uncorrected": "fatal",
}  # fmt: skip


def alarms_of(readings: Iterable[Reading], before: dict[tuple[str, str, str], float]) -> list[Alarm]:
    """What of these is an alarm. `before`: the counters' last values, which are brought up to date; one that went back
    was reset, and counts from there."""
    found: list[Alarm] = []
    for reading in readings:
        found += [
            msgspec.structs.replace(alarm, evidence=f"{alarm.evidence} (recorded)") if reading.recorded else alarm
            for alarm in _alarms_of_one(reading, before)
        ]
    return found


def _alarms_of_one(reading: Reading, before: dict[tuple[str, str, str], float]) -> list[Alarm]:
    found = []
    text = f"{reading.name}: {reading.text}" if reading.text else reading.name
    if reading.name in _EVENTS:
        found.append(Alarm(at_s=reading.at_s, device=reading.device, severity=_EVENTS[reading.name], evidence=text))
    elif reading.value is not None and reading.name in _RISES:
        key = (reading.source, reading.device, reading.name)
        last = before.get(key)
        before[key] = reading.value
        rise, severity = _RISES[reading.name]
        if last is not None and reading.value - last >= rise:
            text = f"{reading.name} rose by {reading.value - last:g} to {reading.value:g}"
            found.append(Alarm(at_s=reading.at_s, device=reading.device, severity=severity, evidence=text))
    elif reading.value is not None and reading.value > _LIMITS.get(reading.name, math.inf):
        text = f"{reading.name} is {reading.value:g}"
        found.append(Alarm(at_s=reading.at_s, device=reading.device, severity="warning", evidence=text))
    return found
