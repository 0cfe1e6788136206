"""Whose fault a failure is: the run stops once for the user's, and goes on for the machine's."""

from __future__ import annotations

from typing import Any

import pytest

from outlast.core.protocol import Coordinator, Settings, View, ViewId
from outlast.core.protocol import messages as m


class Driver:
    """A coordinator whose replicas say what they must until the first view has formed."""

    def __init__(self, replicas: int = 3, formed: bool = True, **settings: Any) -> None:
        self.c = Coordinator(Settings(num_replicas=replicas, **settings), epoch=1)
        self.names = [f"r{i}.1" for i in range(replicas)]
        self.say(m.AgentHello(agent="a0", pid=1))
        for name in self.names:
            self.say(m.Spawned(member=name, agent="a0", pid=2))
        if formed:
            for name in self.names:
                self.say(m.Hello(member=name, agent="a0", epoch=0, facts={"microbatches": "8"}))
            self.form()

    def form(self) -> None:
        assert self.c.view is not None
        for name in self.c.view.members:
            self.say(m.Formed(member=name, view=self.c.view.id, step=0))

    def say(self, event: Any) -> list[Any]:
        return self.c.handle(0.0, event)

    def finish(self, event: Any) -> m.Finish | None:
        return next((a for a in self.say(event) if isinstance(a, m.Finish)), None)

    def exits(self, name: str, **how: Any) -> m.Finish | None:
        return self.finish(m.Exited(member=name, **({"cause": "exception", "detail": f"{name}'s log"} | how)))


def failed(name: str, microbatch: int = -1, alike: str = "", step: int = 4) -> m.Failed:
    return m.Failed(member=name, step=step, microbatch=microbatch, error=f"{name}: boom", alike=alike)


@pytest.mark.parametrize(
    ("first", "second", "stops"),
    [
        (failed("r0.1", 3, "a"), failed("r1.1", 3, "b"), True),
        (failed("r0.1", 3, "a"), failed("r1.1", 5, "a"), True),
        (failed("r0.1", -1, "a"), failed("r1.1", -1, "a"), True),
        (failed("r0.1", 3, "a"), failed("r1.1", 5, "b"), False),
        (failed("r0.1", 3, "a"), failed("r1.1", 3, "a", step=5), False),
        (failed("r0.1", -1), failed("r1.1", -1), False),
        (failed("r0.1", 3, "a"), failed("r0.2", 3, "a"), False),
    ],
)
def test_two_replicas_with_one_failure_stop_the_run(first: m.Failed, second: m.Failed, stops: bool) -> None:
    run = Driver()
    assert run.finish(first) is None
    end = run.finish(second)
    assert (end is not None) == stops
    if end is not None:
        assert (end.outcome, end.exit_code) == ("failed", 5)
        assert "r1.1: boom" in end.detail


def test_a_configuration_that_cannot_work_is_told_once() -> None:
    end = Driver(formed=False).exits("r1.1", code=2, joined=False)
    assert end is not None
    assert (end.exit_code, end.outcome) == (2, "failed")
    assert "r1.1's log" in end.detail


@pytest.mark.parametrize(("code", "told"), [(1, 5), (3, 3), (4, 4), (77, 5)])
def test_a_script_that_ends_before_training_on_two_replicas(code: int, told: int) -> None:
    run = Driver(formed=False)
    assert run.exits("r0.1", code=code, joined=False) is None
    end = run.exits("r2.1", code=code, joined=False)
    assert end is not None
    assert end.exit_code == told


def test_a_replica_refused_again_and_again_ends_a_run_that_cannot_start() -> None:
    run = Driver(formed=False)
    assert run.exits("r1.1", code=4, joined=False) is None
    end = run.exits("r1.2", code=4, joined=False)
    assert end is not None
    assert end.exit_code == 4


def test_replacements_that_cannot_start_do_not_end_a_run_that_trains() -> None:
    run = Driver()
    run.exits("r1.1", cause="signal")
    for name in ("r1.2", "r1.3", "r2.2"):
        assert run.exits(name, code=2, joined=False) is None


def everyone(run: Driver, **how: Any) -> m.Finish | None:
    """All replicas of the view end, one after the other, each after the others have left."""
    end = None
    for name in run.names:
        end = end or run.exits(name, **how)
    return end


def test_all_ended_by_exceptions_is_the_script_s_end_not_the_fleet_s() -> None:
    end = everyone(Driver(), code=1)
    assert end is not None
    assert end.exit_code == 5
    assert "log" in end.detail
    end = everyone(Driver(), cause="signal")
    assert end is not None
    assert end.exit_code == 6
    end = everyone(Driver(), cause="finished", code=0)
    assert end is not None
    assert (end.outcome, end.exit_code) == ("stopped", 5), "not all steps were done"


def test_views_tell_the_number_of_microbatches_and_joiners_who_serves_them() -> None:
    run = Driver(2, num_spares=1)
    said = run.say(m.Hello(member="r2.1", agent="a0", epoch=0, facts={"microbatches": "8"}))
    told = [a for a in said if isinstance(a, m.JournalEntry)]
    assert [(t.kind, t.fields) for t in told] == [
        ("joiner_served", {"replica": "r2.1", "step": 0, "donors": ["r0.1", "r1.1"]})
    ]
    again = Driver(2, formed=False)
    again.say(m.Hello(member="r0.1", agent="a0", epoch=0, facts={"microbatches": "8"}))
    said = again.say(m.Hello(member="r1.1", agent="a0", epoch=0, facts={"microbatches": "8"}))
    installed = [a.fields for a in said if isinstance(a, m.JournalEntry) and a.kind == "view_installed"]
    assert [fields["num_microbatches"] for fields in installed] == [8]
    assert again.c.view == View(id=ViewId(1, 1), members=("r0.1", "r1.1"), start=True)


def left(run: Driver, name: str, suspect: str = "") -> list[Any]:
    assert run.c.change is not None
    suspects = (suspect,) if suspect else ()
    return run.say(m.Left(member=name, view=run.c.change.upto, suspects=suspects))


def entries(said: list[Any], kind: str) -> list[Any]:
    return [a.fields for a in said if isinstance(a, m.JournalEntry) and a.kind == kind]


@pytest.mark.parametrize("seen_first", [False, True], ids=["it speaks first", "a peer misses it first"])
def test_nobody_waits_for_the_end_of_a_process_whose_script_raised(seen_first: bool) -> None:
    """Its connections are closed and its process lives: that is no broken path, and what it raised is the cause."""
    run, said = Driver(), list[Any]()
    if seen_first:
        said += run.say(m.Left(member="r0.1", view=ViewId(1, 1), suspects=("r1.1",)))
    said += run.say(failed("r1.1", 3, "a"))
    assert [e["cause"] for e in entries(said, "replica_exited")] == ["exception"]
    assert entries(said, "replica_exited")[0]["noticed_by"] == ("r0.1" if seen_first else "r1.1")
    for name in ("r0.1", "r2.1"):
        if run.c.change is not None:
            said += left(run, name, "r1.1")
    assert run.c.view == View(id=ViewId(1, 2), members=("r0.1", "r2.1"))
    assert not entries(said, "suspected")
    assert not [a for a in said if isinstance(a, m.Tell) and isinstance(a.message, m.Spawn)], "its slot is taken yet"
    said = run.say(m.Exited(member="r1.1", cause="exception", detail="its log", code=1))
    assert not entries(said, "replica_exited"), "told once"
    assert [a.message.member for a in said if isinstance(a, m.Tell) and isinstance(a.message, m.Spawn)] == ["r1.2"]


def test_a_process_that_does_not_end_after_its_script_raised_is_killed() -> None:
    run = Driver()
    said = run.say(failed("r1.1", 3, "a"))
    asked = [a for a in said if isinstance(a, m.SetTimer) and a.name.startswith("raised")]
    assert asked
    assert asked[0].after_s == run.c.settings.formation_s
    said = run.say(m.Timer(name=asked[0].name))
    assert [a.message.member for a in said if isinstance(a, m.Tell) and isinstance(a.message, m.Kill)] == ["r1.1"]


def test_the_last_replica_s_error_ends_the_run_only_once_its_process_has_ended() -> None:
    run = Driver(1)
    assert run.finish(failed("r0.1", 3, "a")) is None
    assert run.c.change is None, "its cleanup is its own"
    end = run.exits("r0.1", code=1)
    assert end is not None
    assert end.exit_code == 5


@pytest.mark.parametrize("works", [False, True], ids=["before the view works", "before its first commit"])
def test_two_that_raise_one_after_the_other_were_not_recovered_from(works: bool) -> None:
    """The view without the first was installed, and the second raised in the same step."""
    run, said = Driver(2), list[Any]()
    said += run.say(failed("r0.1", 3, "a"))
    said += left(run, "r1.1")
    second = ViewId(1, 2)
    assert run.c.view == View(id=second, members=("r1.1",))
    if works:
        said += run.say(m.Formed(member="r1.1", view=second, step=4, left_at_s=1.0, formed_at_s=2.0))
    said += run.say(failed("r1.1", 3, "a"))
    assert run.c.over
    assert not entries(said, "recovery")
