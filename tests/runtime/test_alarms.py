"""An alarm of a host moves its work before the host fails: nothing is lost, no bit changes, and the host is asked."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.conftest import readable

from outlast.core import events as ev
from outlast.core.protocol import messages as m
from outlast.runtime.host._host_doubt import HostDoubt

ALARM = {"at_s": 1.0, "source": "kernel", "device": "0000:41:00", "name": "xid.fatal", "value": 79.0, "text": "Xid 79"}


def asked(doubt: HostDoubt, *, begun: bool = False) -> list[m.DeviceNoted]:
    """The notes of the turn in which the test's process has ended."""
    notes = [] if begun else doubt.turn(idle=True)
    child = doubt._child
    if child is not None:
        readable(child.fd, 60)
        notes += doubt.turn(idle=True)
    return notes


def doubted(tmp_path: Path, script: str, action: str = "fatal") -> HostDoubt:
    doubt = HostDoubt("a1", tmp_path, (sys.executable, "-c", script))
    doubt.alarmed(
        m.DeviceNoted(member="a1", device="d", source="readings", evidence="xid.fatal: 79", action=action, remedy="")
    )
    return doubt


def test_a_host_is_tested_once_it_has_nothing_to_do(tmp_path: Path) -> None:
    said = json.dumps({"device": "gpu", "num_wrong": 0, "num_asked": 9})
    doubt = doubted(tmp_path, f"print({said!r})")
    assert doubt.turn(idle=False) == []
    assert doubt.pid == 0
    (note,) = asked(doubt)
    assert (note.action, note.source, note.device) == ("passed", "test", "gpu")
    assert "xid.fatal: 79" in note.evidence
    assert asked(doubt) == [], "once an alarm"


@pytest.mark.parametrize(
    ("script", "action"),
    [("import sys; print('{\"device\": 1'); sys.exit(4)", "failed"), ("import os; os.abort()", "untested")],
)
def test_a_test_that_finds_something_or_dies_is_told_as_that(tmp_path: Path, script: str, action: str) -> None:
    (note,) = asked(doubted(tmp_path, script))
    assert note.action == action


def test_a_host_that_a_cloud_takes_away_is_not_asked(tmp_path: Path) -> None:
    assert asked(doubted(tmp_path, "print()", "notice")) == []


def test_the_end_of_the_run_ends_a_test_that_hangs(tmp_path: Path) -> None:
    doubt = doubted(tmp_path, "import signal; signal.pause()")
    doubt.turn(idle=True)
    assert doubt.pid
    doubt.close()
    assert doubt.pid == 0


def test_a_place_where_nothing_can_be_written_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "logs").write_text("in the way")
    assert asked(doubted(tmp_path, "print()")) == []
    assert "cannot be tested" in capsys.readouterr().err


def of_kind(run: Any, kind: type) -> list[Any]:
    return [event for event in run.driven.events if isinstance(event, kind)]


@pytest.mark.process
@pytest.mark.campaign
def test_work_moves_to_the_spare_before_the_host_fails(fleet: Callable[..., Any], tmp_path: Path) -> None:
    """The recording appears once the spare has caught up, and training waits at a gate until the alarm was weighed."""
    place = tmp_path / "readings"
    place.mkdir()
    run = fleet(
        replicas=2, spares=1, steps=9, max_restarts=0, gates=[2, 4, 7], agents=2, readings_s=0.2,
        readings_from=str(place),
    )  # fmt: skip
    run.gate(2, "the spare was served", lambda: run.served("r2.1"))
    run.until("the spare is there", lambda: run.caught_up("r2.1"))
    (tmp_path / "alarm").write_text(json.dumps(ALARM) + "\n")
    (tmp_path / "alarm").rename(place / "a1.jsonl")  # whole at once: it is read while it appears
    run.gate(4, "the alarm was weighed", lambda: bool(of_kind(run, ev.AlarmWeighed)))
    run.gate(7, "who was moved from had ended", lambda: run.exited("r1.1"))
    run.assert_unchanged(survivors={"r0.1", "r2.1"}, recoveries=0)
    (weighed,) = of_kind(run, ev.AlarmWeighed)
    assert (weighed.action, weighed.replicas, weighed.successors) == ("move", ["r1.1"], ["r2.1"])
    assert weighed.evidence.endswith("(recorded)")
    assert [e.cause for e in run.exits() if e.replica == "r1.1"] == ["left"]
    assert [e.cause for e in of_kind(run, ev.ViewInstalled)][1:] == ["planned"]
