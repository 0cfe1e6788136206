"""An agent's readings of its host: taken beside the run, kept in a file, alarms told to the coordinator. No torch.

Invariant: no call here waits for a sensor or for the disk's room; what cannot be read or kept is said once. Begun after
the first interval, so a short run never pays for it. A device that gives the same alarm at each look, or a source that
gives hundreds at one, fills no journal: the same alarm is told again after twice as long each time.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from outlast.core.policy import alarm_name
from outlast.core.protocol import messages as m
from outlast.health.sources import Alarm, Reading, ReadingSource, Sampler, alarms_of, default_sources, recorded_sources

__all__ = ["HostReadings", "sources_of"]

_MOST_BYTES = 16 << 20
_AGAIN_S, _AGAIN_AT_MOST_S = 60.0, 900.0  # between two alarms of one kind from one device
_MOST_ALARMS = 32  # of one look
_EACH_IS_NEWS = "cloud.notice"
_REMEDIES = {
    "fatal": "take the device out of service and test it: outlast health test",
    "warning": "watch it; test it when the run is over: outlast health test",
    "notice": "the host will go: have another one join, or let the run shrink",
}


def sources_of(agent: str, recorded: str) -> Callable[[], Sequence[ReadingSource]]:
    """This host's sources, or their recorded twin."""
    return (lambda: recorded_sources(Path(recorded), agent)) if recorded else default_sources


class HostReadings:
    """Reads the host's own counters now and then. `turn()` is called every `interval_s`; 0 reads nothing, ever."""

    def __init__(
        self,
        agent: str,
        folder: Path,
        interval_s: float,
        sources: Callable[[], Sequence[ReadingSource]] = default_sources,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._quiet: dict[tuple[str, str], tuple[float, float]] = {}  # (device, alarm): until when, for how long
        self.agent, self.interval_s, self._sources = agent, interval_s, sources
        self._file = folder / "readings" / f"{agent}.jsonl"
        self._sampler: Sampler | None = None
        self._before: dict[tuple[str, str, str], float] = {}
        self._last: dict[tuple[str, str, str], float | None] = {}
        self._room = _MOST_BYTES

    @property
    def wanted(self) -> bool:
        return self.interval_s > 0

    def turn(self) -> list[m.DeviceNoted]:
        """Alarms since the last turn; asks for the next readings."""
        if self._sampler is None:
            self._sampler = Sampler(self._sources(), interval_s=self.interval_s)
            self._sampler.start()
        readings = self._sampler.collect()
        self._sampler.ask()
        self._keep(readings)
        return [
            m.DeviceNoted(
                member=self.agent,
                device=alarm.device,
                source="readings",
                evidence=alarm.evidence,
                action=alarm.severity,
                remedy=_REMEDIES[alarm.severity],
            )
            for alarm in self._news(alarms_of(readings, self._before))
        ]

    def _news(self, alarms: Sequence[Alarm]) -> list[Alarm]:
        """Those that are worth telling now."""
        now_s, found = self._clock(), list[Alarm]()
        for alarm in alarms:
            key = alarm.device, alarm_name(alarm.severity, alarm.evidence)
            if key[1].endswith(_EACH_IS_NEWS):  # its source tells each once
                key = alarm.device, alarm.evidence
            until_s, pause_s = self._quiet.get(key, (now_s, _AGAIN_S / 2))
            if now_s < until_s or len(found) == _MOST_ALARMS:
                continue
            pause_s = min(2 * pause_s, _AGAIN_AT_MOST_S) if now_s - until_s < _AGAIN_AT_MOST_S else _AGAIN_S
            self._quiet[key] = now_s + pause_s, pause_s
            found.append(alarm)
        self._quiet = {key: row for key, row in self._quiet.items() if now_s - row[0] < _AGAIN_AT_MOST_S}
        return found

    def _keep(self, readings: Sequence[Reading]) -> None:
        """Only what changed, until the file is full."""
        changed = []
        for reading in readings:
            key = (reading.source, reading.device, reading.name)
            if reading.value is None or self._last.get(key, -1.0) != reading.value:
                changed.append(msgspec.json.encode(reading) + b"\n")
            self._last[key] = reading.value
        data = b"".join(changed)
        if not data or self._room <= 0:
            return
        if len(data) > self._room:
            self._give_up(f"{_MOST_BYTES >> 20} MiB are enough")
            return
        try:
            self._file.parent.mkdir(exist_ok=True)
            with self._file.open("ab") as file:
                file.write(data)
        except OSError as error:
            self._give_up(str(error))
            return
        self._room -= len(data)

    def _give_up(self, reason: str) -> None:
        self._room = 0
        print(f"outlast: readings are no longer kept: {reason}; alarms are still told", file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._sampler is not None:
            self._sampler.close()
