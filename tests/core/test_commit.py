"""The two-phase commit of a generation: by example, and by search over schedules."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.core.protocol import ViewId
from outlast.core.protocol.saves.agreement import SaveVotes
from outlast.core.protocol.saves.commit import (
    Abandon,
    Announce,
    Certified,
    Certify,
    CommitAction,
    CommitEvent,
    CommitState,
    DelaySave,
    OrderSave,
    PartReport,
    Publish,
    Published,
    PublishFailed,
    Refuse,
    SaveId,
    SaveWanted,
    StepStable,
    ViewChanged,
    WriterBegan,
    WriterDurable,
    WriterFailed,
    commit_step,
)

VIEW = (1, 1)


def report(writer: int, schema: str = "s") -> PartReport:
    return PartReport(writer=writer, name=f"w{writer}.json", bytes=10, digest="d", schema=schema)


def feed(state: CommitState, *events: CommitEvent) -> tuple[CommitState, list[CommitAction]]:
    actions: list[CommitAction] = []
    for event in events:
        state, more = commit_step(state, event)
        actions += more
    return state, actions


def fresh(num_writers: int = 2) -> CommitState:
    return feed(CommitState(), ViewChanged(view=VIEW, writers=tuple(range(num_writers))))[0]


SAVE = SaveId(epoch=1, n=1, step=5)


def durable(save: SaveId, *writers: int) -> list[WriterDurable]:
    return [WriterDurable(save=save, report=report(w)) for w in writers]


def test_published_once_when_every_writer_is_durable_and_the_step_is_stable() -> None:
    state, actions = feed(fresh(), SaveWanted(step=5))
    assert actions == [OrderSave(save=SAVE, base=None)]
    state, actions = feed(state, *durable(SAVE, 0, 1))
    assert actions == [], "the step is not stable"
    state, actions = feed(state, StepStable(step=5))
    assert actions == [Publish(save=SAVE, reports=(report(0), report(1)), certified=False)]
    state, actions = feed(state, StepStable(step=6), *durable(SAVE, 0, 1))
    assert actions == []
    state, actions = feed(state, Published(save=SAVE, generation=0))
    assert actions == [Announce(save=SAVE, generation=0)]
    assert state.protected == {0}


def test_a_missing_writer_holds_the_publication_back() -> None:
    _, actions = feed(fresh(3), SaveWanted(step=5), StepStable(step=9), *durable(SAVE, 0, 2, 0, 2))
    assert not any(isinstance(a, Publish) for a in actions)


def test_certification_before_publication_is_recorded() -> None:
    _, actions = feed(fresh(1), SaveWanted(step=5), StepStable(step=5), Certified(step=5), *durable(SAVE, 0))
    assert isinstance(actions[-1], Publish)
    assert actions[-1].certified


def test_certification_after_publication_marks_the_generation_once() -> None:
    state, _ = feed(fresh(1), SaveWanted(step=5), StepStable(step=5), *durable(SAVE, 0))
    state, actions = feed(state, Published(save=SAVE, generation=3), Certified(step=4))
    assert actions == [Announce(save=SAVE, generation=3)]
    state, actions = feed(state, Certified(step=6), Certified(step=7))
    assert actions == [Certify(generation=3)]
    # Certified while the publication was under way: its head said no.
    state, _ = feed(fresh(1), SaveWanted(step=5), StepStable(step=5), *durable(SAVE, 0), Certified(step=5))
    _, actions = feed(state, Published(save=SAVE, generation=3))
    assert actions == [Announce(save=SAVE, generation=3), Certify(generation=3)]


def test_a_view_change_drops_what_lost_a_writer_and_keeps_what_is_complete() -> None:
    later = SaveId(epoch=1, n=1, step=8)
    state, _ = feed(fresh(), SaveWanted(step=5), SaveWanted(step=8), *durable(SAVE, 0, 1), *durable(later, 0))
    state, actions = feed(state, ViewChanged(view=(1, 2), writers=(0,)))
    assert [(a.save, a.cause) for a in actions if isinstance(a, Abandon)] == [(later, "view_changed")]
    state, actions = feed(state, *durable(later, 1))
    assert isinstance(actions[0], Refuse)
    assert "(1, 1) is not the live view (1, 2)" in actions[0].reason
    state, actions = feed(state, StepStable(step=5))
    assert isinstance(actions[0], Publish)


def test_what_begins_again_is_not_certified_by_what_was_verified_before() -> None:
    state, _ = feed(fresh(1), SaveWanted(step=5), Certified(step=9), *durable(SAVE, 0))
    state, _ = feed(state, ViewChanged(view=(1, 2), writers=(0,)))
    assert state.certified == 9, "the members carried their state over"
    state, actions = feed(state, ViewChanged(view=(1, 3), writers=(0,), begins=True), StepStable(step=5))
    assert [a.save for a in actions if isinstance(a, Publish)] == [SAVE], "every writer had promised: nothing is lost"
    state, _ = feed(state, Published(save=SAVE, generation=0))
    again = SaveId(epoch=1, n=3, step=6)
    state, actions = feed(state, StepStable(step=6), *durable(again, 0))
    assert [a.certified for a in actions if isinstance(a, Publish)] == [False]


def test_a_save_that_has_begun_is_known_before_any_promise() -> None:
    """Its loss with a view, or with a writer, is told; without that nobody would ask for another."""
    began = [WriterBegan(save=SAVE, writer=w) for w in (0, 1, 1)]
    state, actions = feed(fresh(), *began)
    assert actions == []
    assert [p.save for p in state.pending] == [SAVE]
    _, actions = feed(state, ViewChanged(view=(1, 2), writers=(0,)))
    assert [(a.save, a.cause) for a in actions if isinstance(a, Abandon)] == [(SAVE, "view_changed")]
    failed, actions = feed(state, WriterFailed(save=SAVE, writer=0, reason="x"))
    assert [a.cause for a in actions if isinstance(a, Abandon)] == ["writer_failed"]
    assert failed.pending == ()
    state, actions = feed(state, StepStable(step=5), *durable(SAVE, 0, 1))
    assert [type(a) for a in actions] == [Publish]
    state, actions = feed(state, Published(save=SAVE, generation=0), began[0])
    assert [type(a) for a in actions] == [Announce, Refuse], "news that was late opens nothing"
    _, actions = feed(state, WriterBegan(save=SaveId(epoch=1, n=0, step=9), writer=0))
    assert [type(a) for a in actions] == [Refuse]


def test_old_views_are_refused_by_number() -> None:
    state, actions = feed(fresh(), ViewChanged(view=(1, 0), writers=(0, 1, 2)))
    assert state.view == VIEW
    assert actions == []
    _, actions = feed(state, *durable(SaveId(epoch=0, n=7, step=5), 0))
    assert [type(a) for a in actions] == [Refuse]


def test_a_restarted_coordinator_learns_of_saves_from_their_writers() -> None:
    state, actions = feed(fresh(), *durable(SAVE, 0, 1), StepStable(step=5))
    assert [type(a) for a in actions] == [Publish]
    # The writers were never told of the outcome, so they ask again after it is known: told, not refused.
    state, actions = feed(state, Published(save=SAVE, generation=4), *durable(SAVE, 0))
    assert actions[-1] == Announce(save=SAVE, generation=4)


def test_a_failed_writer_is_told_to_everyone_and_never_publishes() -> None:
    state, actions = feed(fresh(), SaveWanted(step=5), StepStable(step=5), *durable(SAVE, 0))
    state, actions = feed(state, WriterFailed(save=SAVE, writer=1, reason="no space left on device"))
    assert [(a.cause, a.reason) for a in actions if isinstance(a, Abandon)] == [
        ("writer_failed", "writer 1: no space left on device")
    ]
    # The late report re-opens nothing that could be completed: writer 0's part would be needed again.
    state, actions = feed(state, *durable(SAVE, 1))
    assert actions == []


def test_diverged_schemas_are_abandoned() -> None:
    _, actions = feed(
        fresh(),
        SaveWanted(step=5),
        WriterDurable(save=SAVE, report=report(0)),
        WriterDurable(save=SAVE, report=report(1, schema="other")),
    )
    assert [a.cause for a in actions if isinstance(a, Abandon)] == ["diverged"]


def test_back_pressure_delays_the_save_not_the_step() -> None:
    _, actions = feed(fresh(), SaveWanted(step=5), SaveWanted(step=6), SaveWanted(step=7))
    assert [type(a) for a in actions] == [OrderSave, OrderSave, DelaySave]


def test_a_later_save_that_is_first_supersedes_the_earlier_one() -> None:
    later = SaveId(epoch=1, n=1, step=6)
    state, _ = feed(fresh(1), SaveWanted(step=5), SaveWanted(step=6), StepStable(step=6), *durable(later, 0))
    state, actions = feed(state, Published(save=later, generation=0))
    assert [type(a) for a in actions] == [Announce, Abandon]
    _, actions = feed(state, *durable(SAVE, 0))
    assert [type(a) for a in actions] == [Refuse], "or generation 1 would hold an earlier step than generation 0"


def test_a_failed_publication_lets_the_next_one_through() -> None:
    later = SaveId(epoch=1, n=1, step=6)
    state, actions = feed(
        fresh(1), SaveWanted(step=5), SaveWanted(step=6), StepStable(step=6), *durable(SAVE, 0), *durable(later, 0)
    )
    assert [a.save for a in actions if isinstance(a, Publish)] == [SAVE]
    _, actions = feed(state, PublishFailed(save=SAVE, reason="read-only"))
    assert [type(a) for a in actions] == [Abandon, Publish]


@pytest.mark.parametrize("event", [Published(save=SAVE, generation=3), PublishFailed(save=SAVE, reason="x")])
def test_results_of_unknown_saves_change_nothing(event: CommitEvent) -> None:
    assert commit_step(fresh(), event) == (fresh(), ())


saves = st.builds(SaveId, epoch=st.integers(1, 2), n=st.integers(1, 2), step=st.integers(0, 4), attempt=st.just(0))
events = st.one_of(
    st.builds(ViewChanged, view=st.tuples(st.integers(1, 2), st.integers(1, 2)),
              writers=st.sampled_from([(0,), (0, 1), (0, 1, 2)]),
              begins=st.booleans()),
    st.builds(WriterBegan, save=saves, writer=st.integers(0, 2)),
    st.builds(SaveWanted, step=st.integers(0, 4)),
    st.builds(WriterDurable, save=saves, report=st.builds(report, writer=st.integers(0, 2))),
    st.builds(WriterFailed, save=saves, writer=st.integers(0, 2), reason=st.just("x")),
    st.builds(StepStable, step=st.integers(0, 4)),
    st.builds(Certified, step=st.integers(0, 4)),
)  # fmt: skip


@settings(max_examples=300)
@given(schedule=st.lists(events, max_size=40), outcomes=st.lists(st.booleans(), max_size=40))
def test_no_schedule_publishes_twice_torn_unstable_or_out_of_order(
    schedule: list[CommitEvent], outcomes: list[bool]
) -> None:
    state, stable, verified, generation, results = CommitState(), -1, -1, 0, iter(outcomes)
    reported: dict[SaveId, set[int]] = {}
    done: list[SaveId] = []
    queue = list(schedule)
    while queue:
        event = queue.pop(0)
        if isinstance(event, StepStable):
            stable = max(stable, event.step)
        if isinstance(event, Certified):
            verified = max(verified, event.step)
        if isinstance(event, ViewChanged) and event.view > state.view and event.begins:
            verified = -1
        state, actions = commit_step(state, event)
        if isinstance(event, WriterDurable) and not any(isinstance(a, Refuse) for a in actions):
            reported.setdefault(event.save, set()).add(event.report.writer)
        for action in actions:
            if not isinstance(action, Publish):
                continue
            assert action.save.step <= stable
            assert action.certified == (action.save.step <= verified)
            assert {r.writer for r in action.reports} == set(range(len(action.reports)))
            assert {r.writer for r in action.reports} <= reported[action.save]
            assert all((d.view, d.step) < (action.save.view, action.save.step) for d in done)
            ok = next(results, True)
            if ok:
                done.append(action.save)
                queue.insert(0, Published(save=action.save, generation=generation))
                generation += 1
            else:
                queue.insert(0, PublishFailed(save=action.save, reason="x"))
        assert len(state.pending) <= state.max_in_flight + 5
        assert sum(p.publishing for p in state.pending) <= 1


def test_state_survives_a_json_round_trip() -> None:
    state, _ = feed(fresh(), SaveWanted(step=5), *durable(SAVE, 0))
    assert msgspec.json.decode(msgspec.json.encode(state), type=CommitState) == state


def test_a_save_that_steps_follow_answers_no_stop() -> None:
    """Neither one that a member wanted by itself, nor one after the save that the run was to stop with was lost."""
    votes, view = SaveVotes(), ViewId(epoch=1, n=1)

    def answered(step: int) -> int:
        votes.decided(view, step, [votes.vote(True), 0])
        assert votes.due(view, step) is not None
        votes.taken = (view, step)
        return votes.answers(view, step)

    votes.wanted = "every 25 steps"
    assert (answered(1) % 2, votes.stops(view, 1)) == (0, False)
    votes.request(7, "the run was asked to stop")
    assert (answered(2), votes.stops(view, 2)) == (7, True)
    votes.lost(view, 2)
    votes.wanted = "every 25 steps"
    assert (answered(3), votes.stops(view, 3)) == (6, False)
