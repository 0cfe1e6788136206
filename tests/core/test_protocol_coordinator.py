"""The coordinator alone: one rule a test, and its cost in large fleets."""

import typing

import pytest

from outlast.core.phases import Phase
from outlast.core.protocol import Coordinator, Member, Settings, View, ViewId
from outlast.core.protocol import messages as m
from outlast.core.protocol.disputes import AuditFinding
from outlast.core.protocol.fleet.reports import Loss, ReportedFault
from outlast.core.protocol.fleet.roster import slot_of
from outlast.errors import ProtocolViolation


def test_every_event_has_a_rule_and_no_rule_is_for_nothing() -> None:
    assert set(Coordinator.rules) == set(typing.get_args(m.Event))


def hello(name: str, **fields: object) -> m.Hello:
    return m.Hello(member=name, agent="a", epoch=0, **fields)  # type: ignore[arg-type]


def started(num_replicas: int, num_spares: int = 0, **settings: object) -> Coordinator:
    """A coordinator whose first view has formed."""
    settings_ = Settings(num_replicas=num_replicas, num_spares=num_spares, **settings)  # type: ignore[arg-type]
    c = Coordinator(settings_, 1)
    c.handle(0.0, m.AgentHello(agent="a", pid=1))
    for index in range(num_replicas + num_spares):
        c.handle(0.0, hello(f"r{index}.1", state="fresh"))
    assert c.view is not None
    for name in c.view.members:
        c.handle(0.0, m.Formed(member=name, view=c.view.id, step=0))
    return c


def told(actions: list[m.Action], kind: type) -> list[tuple[tuple[str, ...], m.FromCoordinator]]:
    return [(a.to, a.message) for a in actions if isinstance(a, m.Tell) and isinstance(a.message, kind)]


def exited(name: str) -> m.Exited:
    return m.Exited(member=name, cause="signal")


def record_of(actions: list[m.Action]) -> m.FleetRecord:
    return [a for a in actions if isinstance(a, m.Persist)][-1].record


def left(c: Coordinator, name: str) -> list[m.Action]:
    assert c.change is not None
    return c.handle(1.0, m.Left(member=name, view=c.change.upto))


def test_a_view_is_durable_before_it_is_told() -> None:
    c = started(2)
    c.handle(1.0, exited("r0.1"))
    actions = left(c, "r1.1")
    kinds = [type(a.message).__name__ if isinstance(a, m.Tell) else type(a).__name__ for a in actions]
    assert kinds.index("Persist") < kinds.index("Amend")
    assert record_of(actions).view == c.view


def test_no_successor_without_a_member_of_the_old_view() -> None:
    c = started(2, 1)
    c.handle(1.0, m.Ready(member="r2.1", step=0, serve=c.roster.peers["r2.1"].serve))
    c.handle(1.0, exited("r0.1"))
    assert c.change is not None
    c.handle(9.0, m.Timer(name=f"ack:{c.change.upto}"))
    assert c.change is not None  # r1.1 lives, and nobody has left
    c.handle(9.0, exited("r1.1"))
    assert c.change is None
    assert c.view is not None
    assert c.view.members == ("r2.1",)


def test_a_joiner_that_alone_acknowledges_is_no_successor() -> None:
    c = started(3, 1)
    c.handle(1.0, exited("r2.1"))
    left(c, "r0.1")
    left(c, "r1.1")
    assert c.view is not None
    for name in c.view.members:
        c.handle(1.0, m.Formed(member=name, view=c.view.id, step=1))
    c.handle(1.0, m.Ready(member="r3.1", step=1, serve=c.roster.peers["r3.1"].serve))
    assert c.planned is not None
    assert "r3.1" in c.planned.members
    c.handle(2.0, m.Left(member="r3.1", view=c.planned.id))
    assert c.change is not None
    c.handle(9.0, m.Timer(name=f"ack:{c.change.upto}"))
    assert c.change is not None
    left(c, "r0.1")
    assert c.view.members == ("r0.1", "r3.1")


def test_the_stale_are_set_aside_unless_nobody_else_is_left() -> None:
    for dies in (False, True):
        c = started(2)
        assert c.view is not None
        c.handle(1.0, m.Left(member="r1.1", view=c.view.id, stale=("r1.1",)))
        if dies:
            c.handle(1.0, exited("r0.1"))
            assert c.view.members == ("r1.1",)
        else:
            actions = left(c, "r0.1")
            assert c.view.members == ("r0.1",)
            assert told(actions, m.Rejoin)[0][0] == ("r1.1",)


def test_an_old_changes_lease_does_not_end_a_new_one() -> None:
    c = started(2)
    c.handle(1.0, exited("r0.1"))
    assert c.change is not None
    first = c.change.upto
    c.handle(6.0, m.Timer(name=f"ack:{first}"))
    left(c, "r1.1")
    assert c.view is not None
    c.handle(7.0, m.Formed(member="r1.1", view=c.view.id, step=0))
    c.handle(8.0, m.Left(member="r1.1", view=c.view.id))
    c.handle(9.0, m.Timer(name=f"lease:{first}"))
    assert c.change is None or not c.change.lease_out


def test_a_member_that_cannot_be_heard_waits_for_the_lease_and_then_a_spare_goes_on() -> None:
    c = started(1, 1)
    c.handle(1.0, m.Ready(member="r1.1", step=0, serve=c.roster.peers["r1.1"].serve))
    assert c.view is not None
    c.handle(1.0, m.Leaving(member="r0.1"))
    planned = c.planned
    assert planned is not None
    c.handle(2.0, m.Left(member="r1.1", view=planned.id))
    assert c.change is not None
    upto = c.change.upto
    (lease,) = [a for a in c.handle(7.0, m.Timer(name=f"ack:{upto}")) if isinstance(a, m.SetTimer)]
    assert lease.after_s > c.settings.lease_s
    assert c.change is not None
    actions = c.handle(700.0, m.Timer(name=lease.name))
    assert c.view.members == ("r1.1",)
    assert told(actions, m.Evict)[0][0] == ("r0.1",)


def test_a_restarted_coordinator_waits_for_every_report() -> None:
    c = started(2)
    view = c.view
    record = m.FleetRecord(
        view=view, incarnations={"r0": 1, "r1": 1}, placement={"r0.1": "a", "r1.1": "a"}, formed=True
    )
    c = Coordinator(c.settings, 2, record)
    c.handle(0.0, m.AgentHello(agent="a", pid=1, members=("r0.1", "r1.1")))
    c.handle(0.0, hello("r0.1", view=view, formed=True, state="member"))
    assert c.awaiting == {"r1.1"}
    assert c.change is None
    c.handle(0.0, hello("r1.1", view=view, formed=True, state="member"))
    assert c.change is None
    assert c.view == view
    assert not c.unformed


def test_an_order_that_only_some_had_heard_when_the_coordinator_died_ends_the_view() -> None:
    """It might wait for ever: who heard it does its part, and the others do not know of it."""
    view = started(2).view
    record = m.FleetRecord(
        view=view, incarnations={"r0": 1, "r1": 1}, placement={"r0.1": "a", "r1.1": "a"}, formed=True
    )
    for heard, over in ((0, False), (1, True)):
        c = Coordinator(Settings(num_replicas=2), 2, record)
        c.handle(0.0, m.AgentHello(agent="a", pid=1, members=("r0.1", "r1.1")))
        c.handle(0.0, hello("r0.1", view=view, formed=True, state="member", heard=heard))
        c.handle(0.0, hello("r1.1", view=view, formed=True, state="member"))
        assert (c.change is not None) is over


def test_who_was_joining_when_the_coordinator_died_is_served_anew() -> None:
    """Its donors may not have heard of it: then nobody would ever serve it."""
    view = View(id=ViewId(1, 1), members=("r0.1",))
    placed = {"r0.1": "a", "r1.1": "a"}
    record = m.FleetRecord(view=view, incarnations={"r0": 1, "r1": 1}, placement=placed, formed=True)
    c = Coordinator(Settings(num_replicas=2), 2, record)
    c.handle(0.0, m.AgentHello(agent="a", pid=1, members=("r0.1", "r1.1")))
    c.handle(0.0, hello("r0.1", view=view, formed=True, state="member"))
    actions = c.handle(0.0, hello("r1.1", state="joining", serve=(1, 3)))
    assert told(actions, m.Rejoin)[0][0] == ("r1.1",)
    assert c.change is not None, "in a view of its own a coordinator may number orders"
    actions = left(c, "r0.1")
    actions += c.handle(1.0, m.Formed(member="r0.1", view=c.latest(), step=4))
    assert told(actions, m.BeginServe)[0][0] == ("r1.1",)


def test_a_restarted_coordinator_does_not_wait_for_the_dead() -> None:
    view = View(id=ViewId(1, 3), members=("r0.1", "r1.1"))
    record = m.FleetRecord(
        view=view, incarnations={"r0": 2, "r1": 1}, placement={"r0.2": "a", "r1.1": "a"}, formed=True
    )
    c = Coordinator(Settings(num_replicas=2), 2, record)
    c.handle(0.0, m.AgentHello(agent="a", pid=1, members=("r0.2", "r1.1")))
    c.handle(0.0, hello("r1.1", view=view, formed=True, state="member"))
    assert c.change is not None
    left(c, "r1.1")
    assert c.view is not None
    assert c.view.members == ("r1.1",)
    assert c.view.id > view.id


def test_steps_of_a_member_whose_end_an_earlier_coordinator_told_are_lost_with_it() -> None:
    """The fleet was said to be gone at step 0, and nothing to be lost."""
    view = View(id=ViewId(1, 3), members=("r0.1",))
    record = m.FleetRecord(
        view=view, incarnations={"r0": 2}, placement={"r0.2": "a"}, formed=True, facts={"checkpoints": "yes"}
    )
    c = Coordinator(Settings(num_replicas=1, max_restarts=5), 2, record)
    c.reports.recall([ReportedFault("signal", "r0.1", "agent", 9.0, 0.0, step=309)], None)
    actions = c.handle(10.0, m.AgentHello(agent="a", pid=1, members=("r0.2",)))
    actions += c.handle(10.0, hello("r0.2", state="fresh", facts=record.facts))
    (lost,) = [a.fields for a in actions if isinstance(a, m.JournalEntry) and a.kind == "fleet_lost"]
    assert lost["step"] == 309
    assert c.view is not None
    formed = m.Formed(member="r0.2", view=c.view.id, step=300, formed_at_s=13.0)
    c.handle(13.0, formed)
    (mended,) = [record for _, record in c.reports.mended]
    assert (mended["lost_steps"], mended["downtime_s"]) == (9, pytest.approx(4.0))


def test_what_a_view_mended_is_told_by_who_takes_over_after_it_had_formed() -> None:
    """Its members had said so to the one that died: the run went on from a checkpoint, and a loss of 7 steps was told
    as none, without a downtime. What they say of steps may come all at once."""
    view = View(id=ViewId(1, 3), members=("r0.2",), start=True)
    record = m.FleetRecord(view=view, incarnations={"r0": 2}, placement={"r0.2": "a", "r1.1": "a"}, formed=True)
    dead = ReportedFault("signal", "r0.1", "agent", 9.0, 0.0, step=132)
    spare = ReportedFault("signal", "r1.0", "agent", 13.1, 0.0, of_view=False, step=0)
    for lost in (True, False):
        c = Coordinator(Settings(num_replicas=1, max_restarts=5), 2, record)
        c.reports.recall([dead, spare], Loss(9.0, None, 7) if lost else None)
        left_at_s = 0.0 if lost else 9.1
        formed = m.Formed(member="r0.2", view=view.id, step=125, left_at_s=left_at_s, formed_at_s=13.0)
        c.handle(14.0, m.AgentHello(agent="a", pid=1, members=("r0.2", "r1.1")))
        actions = c.handle(14.0, hello("r0.2", view=view, formed=True, state="member", committed=300, told=formed))
        for step in range(300):
            c.reports.committed(13.2 + 0.01 * (step - 1) if step else 8.9, 13.2 + 0.01 * step)
        actions += c.handle(14.1, m.Resumed())
        told = [a.fields for a in actions if isinstance(a, m.JournalEntry) and a.kind == "recovery"]
        rows = {fields["replica"]: fields for fields in told}
        assert rows["r0.1"]["downtime_s"] == pytest.approx(4.3)
        assert (rows["r0.1"]["lost_steps"], rows["r0.1"]["step"]) == (7 * lost, 125)
        assert rows["r1.0"]["downtime_s"] == 0.0


def test_no_order_is_given_in_a_view_of_an_earlier_epoch() -> None:
    view = View(id=ViewId(1, 3), members=("r0.1",))
    record = m.FleetRecord(view=view, incarnations={"r0": 1}, placement={"r0.1": "a"}, formed=True)
    c = Coordinator(Settings(num_replicas=2), 2, record)
    c.handle(0.0, hello("r0.1", view=view, formed=True, state="member"))
    actions = c.handle(0.0, hello("r1.1", state="fresh"))
    assert not told(actions, m.Take)
    assert c.change is not None


def test_a_newer_epoch_ends_an_old_coordinator() -> None:
    c = started(1)
    (finish,) = c.handle(0.0, m.Hello(member="r0.1", agent="a", epoch=2))
    assert isinstance(finish, m.Finish)
    assert finish.detail.startswith("superseded")


def test_an_exit_lost_with_the_agents_connection_is_found() -> None:
    c = started(2)
    c.handle(1.0, m.AgentHello(agent="a", pid=1, members=("r1.1",)))
    assert c.change is not None
    assert not c.roster.is_alive("r0.1")


def test_the_end_is_durable_and_repeated_by_a_successor() -> None:
    c = started(1)
    assert c.view is not None
    actions = c.handle(1.0, m.Done(member="r0.1", view=c.view.id, steps=9))
    assert record_of(actions).outcome == "", "its script goes on"
    actions = c.handle(1.0, m.Exited(member="r0.1", cause="finished", code=0))
    record = record_of(actions)
    assert record.outcome == "finished"
    successor = Coordinator(c.settings, 2, record)
    again = successor.handle(0.0, m.AgentHello(agent="a", pid=1))
    assert next(a for a in again if isinstance(a, m.Finish)).steps == 9
    hello = m.Hello(
        member="r0.1", agent="a", epoch=1, view=c.view, left=False, formed=True, heard=0, committed=9, state="member"
    )
    (late,) = successor.handle(0.5, hello)
    assert isinstance(late, m.Tell)
    assert (late.to, late.message) == (("r0.1",), m.Close(epoch=2, reason="finished"))


def test_two_replicas_failing_on_the_same_microbatch_is_the_users_fault() -> None:
    c = started(2)
    c.handle(1.0, m.Failed(member="r0.1", step=3, microbatch=1, error="boom"))
    assert not c.over
    c.handle(1.0, m.Failed(member="r0.2", step=3, microbatch=1, error="boom"))
    assert not c.over
    actions = c.handle(1.0, m.Failed(member="r1.1", step=3, microbatch=1, error="boom"))
    assert [a.exit_code for a in actions if isinstance(a, m.Finish)] == [5]


def test_a_member_without_state_does_not_act() -> None:
    member = Member("r0.1", 4)
    view = View(id=ViewId(1, 2), members=("r0.1", "r1.1"))
    assert member.told(m.Install(view=view, epoch=1)) == [m.Rejoin(member="r0.1", view=view.id)]
    assert member.view is None


def test_a_late_word_about_an_earlier_view_costs_no_member_its_state() -> None:
    c = started(3)
    assert c.view is not None
    late = m.Rejoin(member="r1.1", view=ViewId(c.view.id.epoch, c.view.id.n - 1))
    assert c.handle(1.0, late) == []
    said = c.handle(1.0, m.Rejoin(member="r1.1", view=c.view.id))
    assert any(isinstance(a, m.Tell) and isinstance(a.message, m.Rejoin) for a in said)


def test_who_is_told_to_start_again_between_verdict_and_commit_commits_nothing() -> None:
    """A schedule of the adversary: the coordinator was lost while it told the first view."""
    member = Member("r0.1", 2)
    view = View(id=ViewId(1, 1), members=("r0.1",), start=True)
    member.told(m.Install(view=view, epoch=1))
    member.next()
    member.called([member.roll(0, 0)])
    for leaf in range(2):
        member.next()
        member.computed(leaf)
    member.next()
    member.decide([member.header()])
    member.told(m.Rejoin(member="r0.1", epoch=1))
    assert member.commit() == []
    assert member.committed == 0
    with pytest.raises(ProtocolViolation, match="not decided"):
        member.commit()


def test_reports_belong_to_the_view_that_was_asked_about() -> None:
    member = Member("r0.1", 4)
    first = View(id=ViewId(1, 1), members=("r0.1", "r1.1"), start=True)
    member.told(m.Install(view=first, epoch=1))
    member.next()
    member.told(m.Install(view=View(id=ViewId(1, 2), members=("r0.1",)), epoch=1))
    assert member.lost(("r1.1",), "its connection ended", 0.0) == []
    assert not member.over(ViewId(1, 2))


@pytest.mark.parametrize("num_members", [1_000, 20_000])
def test_forming_and_changing_a_large_view_is_linear(num_members: int) -> None:
    """Operations are counted, not seconds: how often the coordinator looks at a peer."""
    looked = 0

    class Counting(dict):  # type: ignore[type-arg]
        def __getitem__(self, key: str) -> object:
            nonlocal looked
            looked += 1
            return super().__getitem__(key)

        def get(self, key: str, default: object = None) -> object:
            nonlocal looked
            looked += 1
            return super().get(key, default)

        def values(self) -> object:  # type: ignore[override]
            nonlocal looked
            looked += len(self)
            return super().values()

    c = Coordinator(Settings(num_replicas=num_members), 1)
    c.roster.peers = Counting()
    messages = 0
    actions = c.handle(0.0, m.AgentHello(agent="a", pid=1))
    names = [f"r{index}.1" for index in range(num_members)]
    for name in names:
        actions = c.handle(0.0, hello(name, state="fresh"))
        messages += len(actions)
    view = c.view
    assert view is not None
    for name in names:
        messages += len(c.handle(0.0, m.Formed(member=name, view=view.id, step=0)))
    c.handle(1.0, exited("r7.1"))
    for name in names:
        if name != "r7.1":
            messages += len(c.handle(1.0, m.Left(member=name, view=view.id)))
    assert c.view is not None
    assert c.view.id.n == 2
    assert len(c.view.members) == num_members - 1
    assert messages < 4 * num_members
    assert looked < 60 * num_members
    assert slot_of(c.view.members[0]) == "r0"


def test_sums_that_are_wrong_in_several_steps_in_a_row_are_no_accident() -> None:
    """Each was repaired in its step; the device that goes on like that is put out all the same."""
    c = started(3)
    assert c.view is not None
    view = c.view.id

    def found(step: int, culprit: str = "r1.1") -> list[str]:
        finding = AuditFinding(step=step, leaf=-1, culprit=culprit, kind="memory", agreeing=1, asked=2)
        told = [c.handle(1.0, m.Audited(member=f"r{i}.1", view=view, findings=(finding,))) for i in range(3)]
        return [
            a.fields["verdict"]
            for actions in told
            for a in actions
            if isinstance(a, m.JournalEntry) and a.kind == "audit_mismatch"
        ]

    assert [found(step) for step in (3, 4, 6, 7)] == [["memory"]] * 4
    assert found(8, "r2.1") == ["memory"]
    assert c.roster.is_alive("r1.1")
    assert found(8) == ["persistent"]
    assert not c.roster.is_alive("r1.1")
    assert c.roster.is_alive("r2.1")


def probed(c: Coordinator, answers: dict[tuple[str, int], tuple[str, ...]]) -> list[str]:
    """Who is killed where r0.1 waits for r1.1, which only waits as well, and these answer to pings, by their lanes."""
    assert c.view is not None
    stall = m.Stalled(
        member="r0.1", view=c.view.id, phase=int(Phase.CONNECT), missing=("r1.1",), waited_s=9.0, deadline_s=2.0
    )
    c.handle(1.0, stall)
    seen = m.Examined(
        member="r1.1",
        state="S",
        traced=False,
        phase=int(Phase.CONNECT),
        silent_s=9.0,
        cpu_advanced=False,
        allowed_s=2.0,
    )
    asked = told(c.handle(1.1, seen), m.ProbePaths)
    assert [set(to) for to, _ in asked] == [set(c.view.members)]
    for (name, place), reached in answers.items():
        c.handle(1.2, m.Rows(member=name, view=c.view.id, reached=reached, place=place))
    actions = c.handle(9.0, m.Timer(name=f"probe:{c.view.id}"))
    return [kill.member for _, kill in told(actions, m.Kill)]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("answers", "killed"),
    [
        ({("r0.1", 0): ("r2.1",)}, ["r1.1"]),  # it does not even answer
        ({("r0.1", 0): ("r2.1",), ("r1.1", 0): ("r2.1",)}, ["r1.1"]),
        ({("r0.1", 0): ("r2.1",), ("r1.1", 0): ("r0.1", "r2.1")}, []),
        ({("r0.1", 1): ("r2.1",)}, []),  # the other rank does something else: its agent would have said so
        ({("r0.1", 1): ("r2.1",), ("r1.1", 1): ("r2.1",)}, ["r1.1"]),  # though their leads reach each other
        ({("r0.1", 1): ("r2.1",), ("r1.1", 2): ("r2.1",)}, []),  # in two lanes, each of which was busy
        ({("r0.1", 1): ("r2.1",), ("r1.1", 1): ("r0.1", "r2.1"), ("r1.1", 2): ()}, []),
    ],
)
def test_a_path_is_broken_that_both_ends_miss_in_one_lane(
    answers: dict[tuple[str, int], tuple[str, ...]], killed: list[str]
) -> None:
    assert probed(started(3), answers) == killed
