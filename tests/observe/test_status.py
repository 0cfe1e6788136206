"""Who is alive, in which view, at which step."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from outlast.core import events as ev
from outlast.observe import Status, StatusFold, render_status, status


def states(state: Status) -> dict[str, str]:
    return {replica.replica: replica.state for replica in state.replicas}


def test_before_the_first_view(story: Any) -> None:
    state = status(story.started)
    assert state.state == "starting"
    assert set(states(state).values()) == {"starting"}
    assert state.coordinator is not None
    assert (state.coordinator.pid, state.coordinator.state, state.coordinator.step) == (100, "running", None)
    assert [(agent.name, agent.pid) for agent in state.agents] == [("a0", 200)]


def test_the_step_is_known_as_soon_as_a_view_has_formed(story: Any) -> None:
    formed = next(event for event in story.training if isinstance(event, ev.ViewFormed))
    before = story.training[: story.training.index(formed)]
    assert status([*story.started, *before]).step is None
    state = status([*story.started, *before, formed])
    assert state.coordinator is not None
    assert (state.step, state.coordinator.step, state.state) == (0, 0, "training")
    resumed = status([*story.started, *before, msgspec.structs.replace(formed, step=70)])
    assert [replica.step for replica in resumed.replicas if replica.state == "training"] == [70] * 4


def test_training_with_a_spare(story: Any) -> None:
    state = status([*story.started, *story.training])
    assert state.state == "training"
    assert states(state) == {**{f"r{slot}.0": "training" for slot in range(4)}, "r4.0": "spare"}
    assert state.view == (1, 1)
    assert [replica.step for replica in state.replicas] == [20, 20, 20, 20, 5]
    assert [replica.view for replica in state.replicas] == [(1, 1)] * 4 + [None]
    assert state.coordinator is not None
    assert state.coordinator.step == 20
    assert state.loss == 3.0


def test_a_view_that_has_not_formed(story: Any) -> None:
    state = status([*story.started, *story.training, *story.killed[:2]])
    assert state.state == "forming"
    assert states(state) == {"r0.0": "forming", "r1.0": "forming", "r2.0": "exited", "r3.0": "forming", "r4.0": "spare"}
    dead = state.replicas[2]
    assert (dead.view, dead.step, dead.detail) == (None, 30, "signal: SIGKILL")


def test_the_spare_takes_over_and_the_slot_s_next_incarnation_replaces_the_dead(story: Any) -> None:
    state = status([*story.started, *story.training, *story.killed])
    expected = {"r0.0": "training", "r1.0": "training", "r2.1": "starting", "r3.0": "training", "r4.0": "training"}
    assert states(state) == expected
    late = ev.ReplicaExited(at_s=2e3, replica="r2.0", cause="evicted", detail="late news", noticed_by="x")
    assert states(status([*story.started, *story.training, *story.killed, late])) == expected
    assert state.num_recoveries == 1


def test_a_planned_view_leaves_the_old_one_at_work_until_it_has_formed(story: Any) -> None:
    *before, planned, _, _ = story.killed
    assert isinstance(planned, ev.ViewInstalled)
    assert planned.planned
    state = status([*story.started, *story.training, *before, planned])
    assert (state.state, state.view) == ("training", (1, 2))
    assert states(state)["r4.0"] == "spare"
    died = ev.ViewInstalled(at_s=2e3, epoch=1, n=4, members=["r0.0", "r4.0"], cause="r1.0 died", planned=False)
    state = status([*story.started, *story.training, *before, planned, died])
    assert (state.state, state.view) == ("forming", (1, 4))


def test_all_that_live_are_shown_and_of_the_dead_the_newest() -> None:
    def born(replica: str) -> ev.AnyEvent:
        return ev.ReplicaStarted(at_s=1.0, replica=replica, agent="a0", pid=1)

    def gone(replica: str) -> ev.AnyEvent:
        return ev.ReplicaExited(at_s=2.0, replica=replica, cause="signal", detail="SIGKILL", noticed_by="a0")

    two_lives = status([born("r1.1"), gone("r1.1"), born("r1.2"), born("r1.3"), born("r0.1"), gone("r0.1")])
    assert states(two_lives) == {"r0.1": "exited", "r1.2": "starting", "r1.3": "starting"}
    assert states(status([born("r1.2"), gone("r1.2"), born("r1.10"), gone("r1.10")])) == {"r1.10": "exited"}


def test_the_coordinator_s_loss_and_takeover(story: Any) -> None:
    before = [*story.started, *story.training, *story.killed]
    lost = status([*before, story.coordinator_lost[0]]).coordinator
    assert lost is not None
    assert (lost.pid, lost.state) == (100, "lost")
    again = status([*before, *story.coordinator_lost]).coordinator
    assert again is not None
    assert (again.pid, again.state) == (101, "running")


def test_an_agent_takes_its_replicas_with_it(story: Any) -> None:
    gone = ev.AgentLost(at_s=2e3, agent="a0", cause="SIGKILL", replicas=["r0.0", "r4.0"])
    state = status([*story.started, *story.training, gone])
    assert [agent.state for agent in state.agents] == ["lost"]
    assert [name for name, s in states(state).items() if s == "exited"] == ["r0.0", "r4.0"]


def test_a_suspect_that_goes_on_is_one_no_more(story: Any) -> None:
    before = [*story.started, *story.training]
    suspected = ev.Suspected(at_s=1_004.5, replica="r1.0", evidence="processor time advances", decision="wait")
    assert states(status([*before, suspected]))["r1.0"] == "suspected"
    progress = ev.ProgressMade(at_s=1_005.0, view=[1, 1], stable=21, losses=[], step_s=0.1)
    assert states(status([*before, suspected, progress]))["r1.0"] == "training"


def test_a_run_ends_by_its_own_word_or_without_one(story: Any) -> None:
    state = status(story.whole, held=False)
    assert state.state == "finished"
    assert state.coordinator is not None
    assert state.coordinator.state == "ended"
    assert set(states(state).values()) == {"ended"}, "with the run: nothing befell them"
    assert states(status([*story.started, *story.training, story.killed[0]], held=False))["r2.0"] == "exited"
    assert status([*story.started, *story.training], held=False).state == "lost"
    assert status([*story.started, *story.training], held=True).state == "training"


def test_folding_in_pieces_is_folding_at_once(story: Any) -> None:
    fold = StatusFold()
    for index, event in enumerate(story.whole):
        fold.take(event)
        assert fold.status() == status(story.whole[: index + 1])


def test_slots_are_in_the_order_of_their_numbers() -> None:
    events = [ev.ReplicaStarted(at_s=1.0, replica=f"r{n}.0", agent="a0", pid=n) for n in (10, 2, 1)]
    assert [replica.replica for replica in status(events).replicas] == ["r1.0", "r2.0", "r10.0"]


def test_nothing_is_known_of_an_empty_journal() -> None:
    state = status([])
    assert state.state == "starting"
    assert state.coordinator is None
    assert "starting" in render_status(state)


def test_the_json_has_process_state_view_and_step_of_everyone(story: Any) -> None:
    document = msgspec.json.decode(msgspec.json.encode(status([*story.started, *story.training])))
    for entry in (document["coordinator"], *document["agents"], *document["replicas"]):
        assert {"pid", "state", "view", "step"} <= entry.keys()


def test_the_table_names_everyone(story: Any) -> None:
    text = render_status(status([*story.started, *story.training, *story.killed]), curve=[3.0, 2.0, 1.0])
    for word in ("brave-otter", "coordinator", "a0", "r2.1", "r4.0", "1.3", "step 60", "█"):
        assert word in text


def test_the_newest_commit_has_an_age(story: Any) -> None:
    """Shown with every step, so that what was true a minute ago is not taken for now."""
    events = [*story.started, *story.training]
    assert status(events).step_age_s is None  # nobody said what time it is
    fresh = status(events, now_s=story.start_s + 4.2)
    assert (fresh.step, fresh.state) == (20, "training")
    assert fresh.step_age_s == pytest.approx(0.2)
    assert "step 20, 200 ms ago, view 1.1, 100 ms a step" in render_status(fresh)


def test_those_that_wait_for_others_are_told_to_wait_from_the_first_moment(story: Any) -> None:
    decided = ev.VacancyDecided(
        at_s=story.start_s + 4.1, action="wait", running=3, wanted=4, least=1, wait_s=600.0, reason="3 of 4 are left"
    )
    events = [*story.started, *story.training, decided]
    waits = status(events, now_s=story.start_s + 4.5)
    assert (waits.state, waits.detail) == ("stalled", "those that are left wait for others, 500 ms since the last step")
    assert states(waits)["r1.0"] == "training"  # nobody is silent
    shrinks = msgspec.structs.replace(decided, at_s=story.start_s + 4.2, action="shrink")
    assert status([*events, shrinks], now_s=story.start_s + 4.5).state == "training"
    later = ev.ProgressMade(
        at_s=story.start_s + 4.4, view=[1, 1], stable=20, losses=[], step_s=0.1, first=20, committed=21,
        committed_at_s=story.start_s + 4.4,
    )  # fmt: skip
    assert status([*events, later], now_s=story.start_s + 4.5).state == "training"


def test_a_run_that_is_silent_for_too_long_is_stalled(story: Any) -> None:
    events = [*story.started, *story.training]
    silent = status(events, held=True, now_s=story.start_s + 16.0)
    assert (silent.state, silent.detail) == ("stalled", "silent for 12 s, and steps take 100 ms")
    assert "100 ms a step" not in render_status(silent)  # the pace of then is no pace of now
    assert silent.step_s is None
    assert status(events, now_s=story.start_s + 5.0).step_s == 0.1
    assert states(silent) == {**{f"r{slot}.0": "stalled" for slot in range(4)}, "r4.0": "spare"}
    row = next(line for line in render_status(silent).splitlines() if line.startswith("r1.0"))
    assert row.split(maxsplit=5)[2:] == ["stalled", "1.1", "20", "silent for 12 s"]
    assert status([*events, *story.finished], now_s=story.start_s + 1e4).state == "finished"


def test_a_step_that_is_told_before_the_time_of_those_in_front_of_it_is_as_old_as_its_news(story: Any) -> None:
    """It was shown with the time of a step of before."""
    told = ev.ProgressMade(
        at_s=story.start_s + 4.4, view=[1, 1], stable=27, losses=[(26, 3.0)], step_s=0.1, first=20, committed=21,
        committed_at_s=story.start_s + 4.1,
    )  # fmt: skip
    made_s, back_s = told.at_s - 0.01, told.at_s + 8.9
    counted = msgspec.structs.replace(told, at_s=told.at_s + 0.5, first=21, committed=27, committed_at_s=made_s)
    late = msgspec.structs.replace(counted, at_s=told.at_s + 0.3, committed=25, committed_at_s=made_s - 0.2)
    again = msgspec.structs.replace(late, stable=22, committed=22, at_s=back_s + 0.1, committed_at_s=back_s)
    seen = [*story.started, *story.training]
    for event, step_at_s in ((told, told.at_s), (late, told.at_s), (counted, made_s), (again, back_s)):
        seen.append(event)
        state = status(seen, now_s=event.at_s + 0.1)
        assert (state.step, state.step_at_s) == (27, step_at_s)


def test_a_script_that_goes_on_after_its_loop_is_not_stalled(story: Any) -> None:
    done = msgspec.structs.replace(story.training[-1], until=20)
    state = status([*story.started, *story.training[:-1], done], held=True, now_s=story.start_s + 99.0)
    assert (state.state, state.detail) == ("ending", "all steps are done; the end of the script is awaited")


def test_training_that_has_ended_is_not_said_to_train_on(story: Any) -> None:
    """Also where the loop was left early, at a step that nobody knew to be the last; until everything begins again."""
    events = [*story.started, *story.training]
    ended = ev.TrainingEnded(at_s=events[-1].at_s + 1.0, steps=21, writer="r1.0")
    state = status([*events, ended], held=True, now_s=ended.at_s + 500.0)
    assert (state.state, state.detail) == ("ending", "training is done; the script of r1.0, which writes, is not")
    assert state.step == 21
    assert states(state) == {**{f"r{slot}.0": "ending" for slot in range(4)}, "r4.0": "spare"}
    assert "a step" not in render_status(state)
    assert status([*events, ended, *story.finished]).state == "finished"
    lost = ev.FleetGone(at_s=ended.at_s + 1.0, step=7, detail="r0.1: signal")
    assert status([*events, ended, lost]).state == "starting"


def test_a_run_whose_replicas_are_all_gone_is_starting_not_training(story: Any) -> None:
    """Found from outside: for 16 s it was said to train."""
    events = [*story.started, *story.training]
    lost = ev.FleetGone(at_s=events[-1].at_s + 1.0, step=7, detail="r0.1: signal")
    said = status([*events, lost], held=True, now_s=lost.at_s + 9.0)
    assert (said.state, said.detail) == ("starting", "every replica was gone, and the run begins again")
    assert (said.step, said.step_s) == (None, None)


def test_steps_that_were_lost_are_no_steps_that_are_done(story: Any) -> None:
    """A spare that was behind took the last member's place, and `status` went on with the step that it had made."""
    recovery = next(event for event in story.killed if isinstance(event, ev.Recovery))
    before = [*story.started, *story.training]
    shown = [
        status([*before, msgspec.structs.replace(recovery, step=step, lost_steps=lost)]).step
        for step, lost in ((12, 8), (12, 40), (20, 0))
    ]
    assert shown == [12, 20, 20]  # where 52 were lost, those that are shown were made since


def test_hosts_are_told_where_there_are_several() -> None:
    there = ev.AgentStarted(
        at_s=1.0, agent="h1:5e1c", pid=9, host="h1", place="elsewhere", address="10.0.0.2", slots=2
    )  # fmt: skip
    run = [there, ev.ReplicaStarted(at_s=1.1, replica="r1.1", agent="h1:5e1c", pid=10)]
    shown = render_status(status(run))
    assert "HOST" in shown
    assert next(line.split()[:3] for line in shown.splitlines() if "r1.1" in line) == ["r1.1", "h1", "10"]
    assert "at 10.0.0.2, 2 slots" in shown
    assert "HOST" not in render_status(status([ev.AgentStarted(at_s=1.0, agent="a0", pid=9)]))
