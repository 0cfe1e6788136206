"""An agent's readings: alarms are told, what changed is kept, and a full disk or a broken sensor is nobody's end."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable
from pathlib import Path

import msgspec
import pytest

from outlast.health.sources import Alarm, Reading
from outlast.runtime.host._host_readings import HostReadings


class Twin:
    """A source that gives one batch a call."""

    name = "twin"

    def __init__(self, batches: list[list[Reading]]) -> None:
        self.batches, self.done = batches, threading.Semaphore(0)

    def read(self, now_s: float) -> Iterable[Reading]:
        try:
            return self.batches.pop(0)
        finally:
            self.done.release()


def reading(value: float, name: str = "edac.ue") -> Reading:
    return Reading(at_s=1.0, source="twin", device="mc0", name=name, value=value)


def told(host: HostReadings, twin: Twin, turns: int) -> list[str]:
    """Evidence of the alarms of so many turns, each with the readings that it asked for."""
    found = []
    for _ in range(turns):
        found += [note.evidence for note in host.turn()]
        assert twin.done.acquire(timeout=10)
        while host._sampler is not None and host._sampler._found.empty():
            pass
    found += [note.evidence for note in host.turn()]
    host.close()
    return found


def test_alarms_are_told_and_what_changed_is_kept(tmp_path: Path) -> None:
    twin = Twin([[reading(1), reading(40, "thermal.c")], [reading(1), reading(41, "thermal.c")], [reading(2)], []])
    host = HostReadings("a0", tmp_path, 30.0, lambda: [twin])
    assert told(host, twin, 3) == ["edac.ue rose by 1 to 2"]
    lines = (tmp_path / "readings" / "a0.jsonl").read_bytes().splitlines()
    assert [msgspec.json.decode(line, type=Reading).value for line in lines] == [1, 40, 41, 2]


def test_an_alarm_that_comes_at_each_look_is_told_ever_more_seldom_and_a_flood_is_cut(tmp_path: Path) -> None:
    now = [0.0]
    host = HostReadings("a0", tmp_path, 30.0, list, lambda: now[0])
    hot = [Alarm(at_s=0.0, device="gpu0", severity="warning", evidence="nvml.temperature.c is 97")]
    times = []
    for look in range(2880):  # a day
        now[0] = 30.0 * look
        times += [now[0] for _ in host._news(hot)]
    assert times[:5] == [0.0, 60.0, 180.0, 420.0, 900.0]
    assert 96 <= len(times) <= 105
    assert len(host._news([msgspec.structs.replace(hot[0], device="gpu1")])) == 1, "of another device it is news"
    flood = [Alarm(at_s=0.0, device="d", severity="notice", evidence=f"cloud.notice: {n}") for n in range(1000)]
    assert len(host._news(flood)) == 32
    now[0] += 2 * 86400.0
    assert len(host._news(hot)) == 1
    assert len(host._quiet) == 1


def test_a_full_disk_is_said_once_and_alarms_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "readings").write_text("in the way")
    twin = Twin([[reading(1)], [reading(2)], [reading(3)], []])
    host = HostReadings("a0", tmp_path, 30.0, lambda: [twin], itertools.count(0.0, 1e6).__next__)
    assert told(host, twin, 3) == ["edac.ue rose by 1 to 2", "edac.ue rose by 1 to 3"]
    assert capsys.readouterr().err.count("no longer kept") == 1


def test_nothing_is_read_where_nothing_is_wanted(tmp_path: Path) -> None:
    assert not HostReadings("a0", tmp_path, 0.0).wanted
