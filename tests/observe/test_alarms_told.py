"""`why` says of each alarm what was suspected, what was done, and what all of it was worth."""

from __future__ import annotations

from typing import Any

from outlast.core import events as ev
from outlast.observe import render_why, why


def weighed(action: Any, **more: Any) -> ev.AlarmWeighed:
    given: dict[str, Any] = {
        "at_s": 2.0, "host": "a1", "alarm": "fatal xid.fatal", "evidence": "xid.fatal: 79", "chance": 0.8,
        "delay_s": 600.0, "action": action, "costs": {"wait": 4.0, "move": 0.5, "save": 5.0},
        "replicas": ["r1.1"] if action == "move" else [], "successors": ["r2.1"] if action == "move" else [],
    }  # fmt: skip
    return ev.AlarmWeighed(**given | more)


def told(*events: ev.AnyEvent) -> str:
    start = ev.RunStarted(
        at_s=1.0, run_id="run", command=[], num_replicas=2, num_spares=1, signature={}, config={}
    )  # fmt: skip
    return render_why(why([start, *events], held=True, now_s=10.0))


def test_a_move_is_told_with_its_evidence_and_what_waiting_would_have_cost() -> None:
    text = told(weighed("move"))
    assert "a1 fails with a chance of 80% within about 10 min 00 s (xid.fatal: 79)" in text
    assert "its work moves to r2.1 between two steps (out: r1.1)" in text
    assert "move 500 ms, wait 4 s, save 5 s" in text
    assert "1 alarm weighed, 1 acted on, expected to save 3.5 s of work for 100 ms in vain." in text


def test_what_was_only_told_and_what_was_left_say_so() -> None:
    text = told(weighed("move", told_only=True), weighed("wait"))
    assert "nothing is done (on_alarm is tell); else its work moves" in text
    assert "2 alarms weighed, none acted on." in text


def test_without_alarms_nothing_is_said_of_them() -> None:
    assert "Alarms" not in told()
