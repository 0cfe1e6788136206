"""How a run begins with whoever is ready, and how it ends: nobody is left, everybody leaves, the scripts have ended."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from outlast.core.protocol import Coordinator, Settings, View, ViewId
from outlast.core.protocol import messages as m


def hello(name: str, **fields: Any) -> m.Hello:
    return m.Hello(member=name, agent="a", epoch=0, **fields)


def fleet(num_replicas: int, **settings: Any) -> Coordinator:
    c = Coordinator(Settings(num_replicas=num_replicas, **settings), 1)
    c.handle(0.0, m.AgentHello(agent="a", pid=1))
    return c


def started(num_replicas: int, **settings: Any) -> Coordinator:
    c = fleet(num_replicas, **settings)
    for index in range(num_replicas):
        c.handle(0.0, hello(f"r{index}.1"))
    formed(c)
    return c


def formed(c: Coordinator, step: int = 0) -> None:
    assert c.view is not None
    for name in c.view.members:
        c.handle(0.5, m.Formed(member=name, view=c.view.id, step=step))


def ended(num_replicas: int, **settings: Any) -> Coordinator:
    """Training has ended after nine steps."""
    c = started(num_replicas, **settings)
    assert c.view is not None
    for name in c.view.members:
        c.handle(1.0, m.Done(member=name, view=c.view.id, steps=9))
    assert c.ending is not None
    return c


def exited(name: str, cause: Any = "finished", code: int | None = None) -> m.Exited:
    return m.Exited(member=name, cause=cause, code=code)


def finish(actions: list[m.Action]) -> m.Finish:
    return next(action for action in actions if isinstance(action, m.Finish))


def said(actions: list[m.Action]) -> list[tuple[tuple[str, ...], str, bool]]:
    messages = [a for a in actions if isinstance(a, m.Tell) and isinstance(a.message, m.Ended)]
    return [(a.to, a.message.writer, a.message.settled) for a in messages]


# --- the beginning ---------------------------------------------------------------------------------------------------
def test_a_run_begins_with_whoever_is_ready() -> None:
    c = fleet(3, gather_s=2.0)
    (timer,) = [a for a in c.handle(9.0, hello("r1.1")) if isinstance(a, m.SetTimer)]
    assert (timer.name, timer.after_s) == ("gather", 9.0), "as long as the first needed"
    c.handle(10.0, hello("r2.1"))
    assert c.view is None
    actions = c.handle(18.0, m.Timer(name="gather"))
    assert c.view is not None
    assert c.view.members == ("r1.1", "r2.1")
    (notice,) = [a for a in actions if isinstance(a, m.JournalEntry) and a.kind == "notice"]
    assert "2 of 3 replicas: r0 not ready 9.0 s after r1.1 was" in str(notice.fields["text"])
    formed(c)
    actions = c.handle(19.0, hello("r0.1"))
    assert any(isinstance(a, m.Tell) and isinstance(a.message, m.BeginServe) for a in actions), "it joins"


def test_under_a_robust_rule_all_are_waited_for() -> None:
    c = fleet(2)
    actions = c.handle(1.0, hello("r0.1", facts={"aggregation": "krum"}))
    assert not [a for a in actions if isinstance(a, m.SetTimer)]
    c.handle(600.0, m.Timer(name="start"))
    assert c.view is not None
    assert c.view.members == ("r0.1",)


def test_a_spare_that_is_ready_stands_in_at_the_beginning() -> None:
    c = fleet(2, num_spares=1)
    c.handle(1.0, hello("r2.1"))
    c.handle(1.0, hello("r1.1"))
    c.handle(9.0, m.Timer(name="gather"))
    assert c.view is not None
    assert c.view.members == ("r1.1", "r2.1")


def test_the_wait_begins_again_when_the_first_is_gone() -> None:
    c = fleet(2)
    c.handle(1.0, hello("r0.1"))
    c.handle(2.0, exited("r0.1", "signal"))
    c.handle(6.0, m.Timer(name="gather"))
    actions = c.handle(7.0, hello("r1.1"))
    assert c.view is None
    assert [a.name for a in actions if isinstance(a, m.SetTimer)] == ["gather"]


# --- nobody is left --------------------------------------------------------------------------------------------------
def test_a_run_ends_when_its_restarts_are_used_up_and_says_what_the_replicas_said() -> None:
    c = fleet(1, max_restarts=3)
    for incarnation in (1, 2, 3, 4):
        name = f"r0.{incarnation}"
        c.handle(1.0, hello(name))
        assert not c.over
        c.handle(1.0, m.Failed(member=name, step=0, microbatch=-1, error="Traceback\nKeyError: 'loop/step'"))
        actions = c.handle(1.0, exited(name, "exception", 1))
    end = finish(actions)
    assert (end.outcome, end.exit_code) == ("failed", 5)
    assert "3 restarts): 4 ended with KeyError: 'loop/step'" in end.detail


def test_a_run_that_never_began_ends_as_well() -> None:
    c = fleet(2, max_restarts=0)
    c.handle(1.0, exited("r0.1", "signal"))
    end = finish(c.handle(1.0, exited("r1.1", "signal")))
    assert (end.outcome, end.exit_code) == ("failed", 3)


# --- everybody leaves ------------------------------------------------------------------------------------------------
def test_the_last_that_holds_the_state_hands_it_over_before_it_leaves() -> None:
    c = started(2)
    c.handle(1.0, exited("r0.1", "signal"))
    assert c.change is not None
    c.handle(1.0, m.Left(member="r1.1", view=c.change.upto))
    formed(c, 3)
    c.handle(2.0, m.Leaving(member="r1.1"))
    assert not c.over, "r0.2 is being started"
    c.handle(3.0, hello("r0.2"))
    assert not c.over
    c.handle(4.0, m.Ready(member="r0.2", step=5, serve=c.roster.peers["r0.2"].serve))
    assert c.planned is not None
    assert "r0.2" in c.planned.members


def test_when_everybody_leaves_the_run_has_not_ended_well() -> None:
    c = started(1)
    end = finish(c.handle(1.0, m.Leaving(member="r0.1")))
    assert (end.outcome, end.exit_code) == ("stopped", 143)


@pytest.mark.parametrize("epoch", [1, 2])
def test_when_all_leave_at_once_no_view_is_made_in_which_another_step_could_be(epoch: int) -> None:
    """Nor by a coordinator that has just taken over, which gives no orders in the view that it found."""
    c = started(2)
    assert c.view is not None
    if epoch > 1:
        view, placed = c.view, {"r0.1": "a", "r1.1": "a"}
        record = m.FleetRecord(view=view, incarnations={"r0": 1, "r1": 1}, placement=placed, formed=True)
        c = Coordinator(c.settings, epoch, record)
        c.handle(0.0, m.AgentHello(agent="a", pid=1, members=("r0.1", "r1.1")))
        for name in view.members:
            c.handle(0.0, hello(name, view=view, formed=True, state="member"))
    assert c.change is None
    actions = c.handle(1.0, m.Departing(members=("r0.1", "r1.1")))
    assert finish(actions).exit_code == 143
    assert (c.change, c.planned) == (None, None)


# --- the scripts go on -----------------------------------------------------------------------------------------------
def test_who_does_not_write_waits_for_the_writers_end() -> None:
    c = ended(2)
    assert said(c.handle(2.0, exited("r0.1"))) == [(("r1.1",), "r0.1", True)]
    end = finish(c.handle(3.0, exited("r1.1", "exception", 1)))
    assert (end.outcome, end.exit_code, end.steps) == ("finished", 0, 9)
    assert "r1.1" in end.detail


def test_a_writer_that_dies_is_followed_by_the_next_that_lives() -> None:
    c = ended(3)
    assert said(c.handle(2.0, exited("r0.1", "signal"))) == [(("r1.1", "r2.1"), "r1.1", False)]
    assert said(c.handle(3.0, exited("r1.1", "evicted"))) == [(("r2.1",), "r2.1", False)]
    end = finish(c.handle(4.0, exited("r2.1")))
    assert (end.outcome, end.exit_code) == ("finished", 0)


def test_who_has_ended_well_has_done_what_a_writer_does() -> None:
    c = ended(3)
    c.handle(2.0, exited("r2.1"))
    assert said(c.handle(3.0, exited("r0.1", "signal"))) == [(("r1.1",), "r2.1", True)]
    assert finish(c.handle(4.0, exited("r1.1"))).exit_code == 0


def with_a_spare(**settings: Any) -> Coordinator:
    """One replica, and a spare that has caught up; training has ended."""
    c = started(1, num_spares=1, **settings)
    c.handle(0.6, hello("r1.1"))
    c.handle(0.7, m.Ready(member="r1.1", serve=c.roster.peers["r1.1"].serve, step=5))
    assert c.view is not None
    actions = c.handle(1.0, m.Done(member="r0.1", view=c.view.id, steps=9))
    assert not [a for a in actions if isinstance(a, m.Tell) and isinstance(a.message, m.Close)], "it waits"
    return c


def test_a_spare_follows_a_writer_after_whom_there_is_no_other_member() -> None:
    c = with_a_spare(max_restarts=0)
    actions = c.handle(2.0, exited("r0.1", "signal"))
    assert not c.over
    assert c.view is not None
    assert (c.view.members, c.view.start) == (("r1.1",), False)
    assert [a.to for a in actions if isinstance(a, m.Tell) and isinstance(a.message, m.Install)] == [("r1.1",)]
    formed(c, 9)
    assert said(c.handle(3.0, m.Done(member="r1.1", view=c.view.id, steps=9))) == [(("r1.1",), "r1.1", False)]
    assert finish(c.handle(4.0, exited("r1.1"))).exit_code == 0


@pytest.mark.parametrize("end", [("r0.1", "exception", 1), ("r0.1", "finished", 0)])
def test_a_spare_is_let_go_where_the_writers_script_has_ended(end: tuple[str, str, int]) -> None:
    c = with_a_spare()
    actions = c.handle(2.0, exited(*end))
    assert finish(actions).exit_code == (0 if end[1] == "finished" else 5)
    assert ["r1.1"] in [list(a.to) for a in actions if isinstance(a, m.Tell) and isinstance(a.message, m.Close)]


def test_a_spare_that_dies_at_the_end_is_nobodys_loss() -> None:
    c = with_a_spare()
    c.handle(2.0, exited("r1.1", "signal"))
    assert not c.over
    assert finish(c.handle(3.0, exited("r0.1"))).exit_code == 0


@pytest.mark.parametrize("code", [1, 6])
def test_a_writers_error_is_the_runs_and_its_death_the_fleets(code: int) -> None:
    """6 is what a replica ends with that cannot write any more: as if it had died."""
    c = ended(1)
    end = finish(c.handle(2.0, exited("r0.1", "exception", code)))
    assert (end.outcome, end.exit_code, end.steps) == ("failed", 5 if code == 1 else 6, 9)


def test_one_whose_last_write_is_refused_ends_and_does_not_tell_the_end() -> None:
    """The run goes on under another, who alone may say how it ends."""
    c = ended(1)
    assert finish(c.handle(2.0, exited("r0.1"))).outcome == "finished"
    [end] = c.handle(2.0, m.Superseded())
    assert isinstance(end, m.Finish)
    assert end.detail.startswith("superseded")


def test_a_restarted_coordinator_goes_on_with_the_end() -> None:
    c = ended(2)
    record = [a for a in c.handle(2.0, exited("r1.1", "signal")) if isinstance(a, m.Persist)][-1].record
    again = Coordinator(c.settings, 2, record)
    again.handle(0.0, m.AgentHello(agent="a", pid=1, members=("r0.1",), epoch=1))
    assert not again.over
    actions = again.handle(0.1, m.Hello(member="r0.1", agent="a", epoch=1, view=c.view, formed=True, committed=9))
    assert (("r0.1",), "r0.1", False) in said(actions)
    assert finish(again.handle(1.0, exited("r0.1"))).steps == 9


def test_who_has_yet_to_greet_a_new_coordinator_when_training_ends_is_told_of_the_end_and_not_killed() -> None:
    """It may have left the view with all that it was asked for, and wait to be let go."""
    before = started(1)
    placed = {"r0.1": "a", "r1.1": "a"}
    record = m.FleetRecord(view=before.view, incarnations={"r0": 1, "r1": 1}, placement=placed, formed=True)
    c = Coordinator(before.settings, 2, record)
    actions = c.handle(0.0, m.AgentHello(agent="a", pid=1, members=("r0.1", "r1.1"), epoch=1))
    assert before.view is not None
    actions += c.handle(0.1, hello("r0.1", view=before.view, formed=True, committed=9, done=True, state="member"))
    assert c.ending is not None
    assert not [a for a in actions if isinstance(a, m.Tell) and isinstance(a.message, m.Kill)]
    told = c.handle(0.2, hello("r1.1", committed=9, state="member", leaving=True))
    assert [a.message.reason for a in told if isinstance(a, m.Tell) and isinstance(a.message, m.Close)] == ["finished"]


@pytest.mark.parametrize("last_to_greet", ["r1.1", "r2.1"])
@pytest.mark.parametrize("state", ["ready", "member"])
def test_a_new_coordinator_loses_nothing_before_everybody_has_greeted_it(state: Any, last_to_greet: str) -> None:
    """Writer and coordinator have died after the last step. One that was being let in holds all steps, and goes on; who
    holds no state is told that the run is over."""
    c = ended(1)
    record = next(a for a in c.handle(2.0, exited("r0.1", "signal")) if isinstance(a, m.Persist)).record
    placed = {"r1.1": "a", "r2.1": "a"}
    again = Coordinator(c.settings, 2, msgspec.structs.replace(record, placement=placed, outcome=""))
    again.handle(0.0, m.AgentHello(agent="a", pid=1, members=("r1.1", "r2.1"), epoch=1))
    assert not again.over
    came = m.Hello(member="r1.1", agent="a", epoch=1, view=View(id=ViewId(1, 2), members=("r0.1", "r1.1")), state=state)
    hellos = [came, hello("r2.1", state="joining")]
    actions: list[m.Action] = []
    for greeting in sorted(hellos, key=lambda greeting: greeting.member == last_to_greet):
        actions += again.handle(0.1, greeting)
    assert not again.over
    assert again.view is not None
    assert again.view.members == ("r1.1",)
    closed = [a.to for a in actions if isinstance(a, m.Tell) and isinstance(a.message, m.Close)]
    assert closed == [("r2.1",)]
    again.handle(0.2, m.Formed(member="r1.1", view=again.view.id, step=9))
    again.handle(0.3, m.Done(member="r1.1", view=again.view.id, steps=9))
    assert finish(again.handle(0.4, exited("r1.1"))).exit_code == 0


def test_a_spare_that_greets_again_after_the_end_waits_on() -> None:
    c = with_a_spare(max_restarts=0)
    told = c.handle(1.5, hello("r1.1", state="ready", committed=9, serve=c.roster.peers["r1.1"].serve))
    assert not [a for a in told if isinstance(a, m.Tell) and isinstance(a.message, m.Close)]
    c.handle(2.0, exited("r0.1", "signal"))
    assert c.view is not None
    assert c.view.members == ("r1.1",)


def test_after_the_end_a_process_that_cannot_start_is_waited_for_no_longer() -> None:
    c = ended(1)
    record = next(a for a in c.handle(2.0, exited("r0.1", "signal")) if isinstance(a, m.Persist)).record
    again = Coordinator(c.settings, 2, msgspec.structs.replace(record, placement={"r1.1": "a"}, outcome=""))
    again.handle(0.0, m.AgentHello(agent="a", pid=1, epoch=1))
    assert not again.over
    end = finish(again.handle(0.1, m.SpawnFailed(member="r1.1", error="no memory")))
    assert (end.outcome, end.exit_code) == ("failed", 6)


def test_training_that_is_lost_after_its_end_begins_again_from_a_checkpoint() -> None:
    c = Coordinator(Settings(num_replicas=1), 1)
    c.handle(0.0, m.AgentHello(agent="a", pid=1))
    c.handle(0.0, hello("r0.1", facts={"checkpoints": "/kept"}))
    formed(c)
    assert c.view is not None
    c.handle(1.0, m.Done(member="r0.1", view=c.view.id, steps=9))
    actions = c.handle(2.0, exited("r0.1", "signal"))
    assert [a.message.member for a in actions if isinstance(a, m.Tell) and isinstance(a.message, m.Spawn)] == ["r0.2"]
    assert c.ending is None


@pytest.mark.parametrize(("made", "loaded"), [(0, True), (3, True), (0, False)])
def test_a_run_of_which_no_step_was_made_begins_anew_with_whoever_is_there(made: int, loaded: bool) -> None:
    c = fleet(2)
    c.handle(0.0, hello("r0.1"))
    c.handle(9.0, m.Timer(name="gather"))
    formed(c)
    if loaded:
        c.handle(9.5, hello("r1.1"))
    actions = c.handle(9.6, msgspec.structs.replace(exited("r0.1", "signal"), committed=made))
    if made or not loaded:
        assert (finish(actions).outcome, finish(actions).exit_code) == ("failed", 6)
        return
    assert not c.over
    c.handle(10.0, m.Rejoin(member="r1.1"))
    c.handle(20.0, m.Timer(name="gather"))
    assert c.view is not None
    assert c.view.members == ("r1.1",)
