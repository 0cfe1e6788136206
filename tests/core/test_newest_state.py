"""What is newest goes on where nobody is left of the view that was: a spare's own state, or a checkpoint."""

from __future__ import annotations

import contextlib

from outlast.core.protocol import Coordinator, Member, Settings, View, ViewId
from outlast.core.protocol import messages as m
from outlast.core.protocol.step.effects import Act, AskAll, Seat
from outlast.core.protocol.step.forming import RollFacts, form
from outlast.core.protocol.step.verdict import StepEvidence
from outlast.errors import StateDiverged
from outlast.prove.adversary._guards import SimulatedGuards


def with_a_spare(num_spares: int = 1) -> Coordinator:
    """A coordinator whose first view, of two, has formed; the spares had caught up at step 40."""
    c = Coordinator(Settings(num_replicas=2, num_spares=num_spares), 1)
    c.handle(0.0, m.AgentHello(agent="a", pid=1))
    for index in range(2 + num_spares):
        facts = {"checkpoints": "kept"}
        c.handle(0.0, m.Hello(member=f"r{index}.1", agent="a", epoch=0, state="fresh", facts=facts))
    assert c.view is not None
    for name in c.view.members:
        c.handle(0.0, m.Formed(member=name, view=c.view.id, step=0))
    for index in range(2, 2 + num_spares):
        name = f"r{index}.1"
        c.handle(1.0, m.Ready(member=name, step=40, serve=c.roster.peers[name].serve))
    return c


def saved_at(step: int, num_spares: int = 1) -> Coordinator:
    """As `with_a_spare`; so many steps are in a checkpoint."""
    c = with_a_spare(num_spares=num_spares)
    c.handle(1.5, m.SavePublished(step=step))
    return c


def leaves(c: Coordinator, name: str) -> None:
    """Who lives of a view that is over acknowledges it."""
    assert c.change is not None
    c.handle(2.0, m.Left(member=name, view=c.change.upto))


def goes_on(c: Coordinator) -> tuple[tuple[str, ...], int]:
    """Who is in the view that was installed, and what is saved, as that says."""
    assert c.view is not None
    return c.view.members, c.view.saved


def dies(c: Coordinator, *names: str) -> list[m.Action]:
    return [action for name in names for action in c.handle(2.0, m.Exited(member=name, cause="signal"))]


def record_of(actions: list[m.Action]) -> m.FleetRecord:
    return [a for a in actions if isinstance(a, m.Persist)][-1].record


def test_a_spare_that_takes_over_is_told_what_is_saved() -> None:
    c = with_a_spare()
    told = c.handle(1.5, m.SavePublished(step=58))
    assert record_of(told).saved == 58, "the next coordinator knows it, too"
    assert c.handle(1.6, m.SavePublished(step=58)) == [], "it is no news twice"
    told = dies(c, "r0.1", "r1.1")
    assert goes_on(c) == (("r2.1",), 58)
    assert c.view is not None
    assert not c.view.start
    timers = {a.name: a.after_s for a in told if isinstance(a, m.SetTimer)}
    assert timers[f"form:{c.view.id}"] == c.settings.start_s, "it may load as long as a first view"


def test_while_anybody_lives_who_acted_nothing_is_read() -> None:
    c = saved_at(58)
    dies(c, "r0.1")
    leaves(c, "r1.1")
    members, saved = goes_on(c)
    assert (set(members), saved) == ({"r1.1", "r2.1"}, 0)


def test_who_was_to_read_and_has_not_formed_its_view_is_told_once_more() -> None:
    c = saved_at(58, num_spares=2)
    dies(c, "r0.1", "r1.1")
    assert c.view is not None
    assert set(c.view.members) == {"r2.1", "r3.1"}
    for formed, saved in ((False, 58), (True, 0)):
        if formed:
            c.handle(3.0, m.Formed(member="r3.1", view=c.view.id, step=58))
            c.handle(3.0, m.Left(member="r3.1", view=c.view.id))
        else:
            dies(c, "r2.1")
            leaves(c, "r3.1")
        assert goes_on(c) == (("r3.1",), saved)


def test_a_spare_in_a_view_that_did_not_form_has_brought_nothing() -> None:
    c = saved_at(58)
    for name, other in (("r0.1", "r1.1"), ("r1.1", "r2.1")):
        dies(c, name)
        leaves(c, other)
    assert goes_on(c) == (("r2.1",), 58)


def test_a_coordinator_that_takes_over_knows_what_is_saved_from_the_record() -> None:
    before = with_a_spare()
    record = record_of(before.handle(1.5, m.SavePublished(step=58)))
    c = Coordinator(Settings(num_replicas=2, num_spares=1), 2, record)
    c.handle(3.0, m.AgentHello(agent="a", pid=1, members=("r2.1",)))
    facts, serve = {"checkpoints": "kept"}, before.roster.peers["r2.1"].serve
    c.handle(3.0, m.Hello(member="r2.1", agent="a", epoch=1, state="ready", serve=serve, facts=facts))
    assert goes_on(c) == (("r2.1",), 58)


def test_a_writer_after_the_last_step_is_followed_by_what_is_newest() -> None:
    c = saved_at(60)
    assert c.view is not None
    for name in c.view.members:
        c.handle(2.0, m.Done(member=name, view=c.view.id, steps=60))
    assert c.ending is not None
    dies(c, "r0.1", "r1.1")
    assert goes_on(c) == (("r2.1",), 60)


def acts_of_forming(member: Member, view: View) -> list[str]:
    """What a member does here until it calls the roll of the view."""
    seat = Seat(me=member.me, host="a", device="", member=member, lock=contextlib.nullcontext(), now_s=lambda: 0.0)
    found = StepEvidence(view=view, parts=tuple, diverged=lambda view, found: StateDiverged(found.text))
    course = form(
        seat, SimulatedGuards(False), found, lambda: RollFacts(outcome=0, state=int, late=False, joined=False)
    )
    done, effect = list[str](), next(course)
    while not isinstance(effect, AskAll):
        assert isinstance(effect, Act)
        done.append(effect.what)
        effect = course.send(None)
    return done


def installed(member: Member, view: View) -> None:
    member.told(m.Install(epoch=1, view=view, cause="", addresses={}, hosts={}, store=""))


def test_only_who_is_behind_what_is_saved_reads_it() -> None:
    for committed, reads in ((57, True), (58, False), (59, False)):
        member = Member("r2.1", 4, committed=committed)
        member.state = "ready"
        view = View(id=ViewId(1, 2), members=("r2.1",), saved=58)
        installed(member, view)
        member.next()
        assert acts_of_forming(member, view) == ["part", "drain", *(["read newer"] if reads else []), "connect"]


def test_a_first_view_that_was_over_before_it_was_entered_is_begun_in_the_next() -> None:
    """Its checkpoint would be read by nobody, and the run begin at step 0."""
    first, second, third = (View(id=ViewId(1, n), members=("r0.1", "r1.1"), start=n == 1) for n in (1, 2, 3))
    late, begun = Member("r0.1", 4), Member("r1.1", 4)
    for member in (late, begun):
        installed(member, first)
    begun.next()
    assert acts_of_forming(begun, first) == ["part", "drain", "begin", "connect"]
    for member in (late, begun):
        member.told(m.Notify(epoch=1, view=first.id, cause="r2.1 died"))
        installed(member, second)
        member.next()
    assert acts_of_forming(late, second) == ["part", "drain", "begin", "connect"]
    assert acts_of_forming(begun, second) == ["part", "drain", "connect"], "it has begun"
    installed(late, third)
    late.next()
    assert acts_of_forming(late, third) == ["part", "drain", "connect"]


def test_who_starts_again_as_a_joiner_begins_with_nothing_but_what_it_is_served() -> None:
    member = Member("r0.1", 4)
    installed(member, View(id=ViewId(1, 1), members=("r0.1", "r1.1"), start=True))
    member.told(m.BeginServe(epoch=1, donors=("r1.1",), serve=(1, 1)))
    assert not member.unbegun
