"""Members that leave the fleet hold the state: they are let go once the view that is without them has formed."""

from __future__ import annotations

from typing import Any

import pytest

from outlast.core.protocol import Coordinator, Settings, View, ViewId
from outlast.core.protocol import host_messages as hm
from outlast.core.protocol import messages as m
from outlast.core.protocol import operator_messages as om


def hello(name: str, **fields: Any) -> m.Hello:
    return m.Hello(member=name, agent=f"a{name[1]}", epoch=0, **fields)


def changing(**settings: Any) -> Coordinator:
    """Three replicas, each on a host of its own. r2.1 dies while r1.1, whose host is drained, is about to leave; both
    others have left the view, and the next one, of r0.1 alone, is told."""
    c = Coordinator(Settings(num_replicas=3, num_agents=3, **settings), 1)
    for index in range(3):
        c.handle(0.0, m.AgentHello(agent=f"a{index}", pid=1))
    for index in range(3):
        c.handle(0.0, hello(f"r{index}.1"))
    form(c)
    c.handle(1.0, om.DrainAsked(host="a1", asker="x"))
    c.handle(1.0, m.Exited(member="r2.1", cause="signal"))
    assert c.change is not None
    for name in ("r0.1", "r1.1"):
        c.handle(1.0, m.Left(member=name, view=c.change.upto))
    assert c.view is not None
    assert c.view.members == ("r0.1",)
    return c


def form(c: Coordinator, step: int = 0) -> list[m.Action]:
    assert c.view is not None
    return [a for n in c.view.members for a in c.handle(0.5, m.Formed(member=n, view=c.view.id, step=step))]


def dismissed(actions: list[m.Action]) -> list[str]:
    closes = [a for a in actions if isinstance(a, m.Tell) and isinstance(a.message, m.Close)]
    return [name for a in closes for name in a.to if a.message == m.Close(epoch=a.message.epoch, reason=m.DEPARTED)]


def members(c: Coordinator) -> tuple[str, ...]:
    assert c.view is not None
    return c.view.members


def died(c: Coordinator, name: str) -> list[m.Action]:
    return c.handle(2.0, m.Exited(member=name, cause="signal"))


def succeeded(settings: Settings) -> Coordinator:
    """Two replicas, each on a host of its own. r1.1 was to leave, and has gone on to the switch, as r0.1 has; the next
    view is of r0.1 and r2.1, both on a0, and nothing was heard of it yet."""
    c = Coordinator(settings, 1)
    for agent in ("a0", "a1"):
        c.handle(0.0, m.AgentHello(agent=agent, pid=1))
    for name, agent in (("r0.1", "a0"), ("r1.1", "a1")):
        c.handle(0.0, m.Hello(member=name, agent=agent, epoch=0))
    form(c)
    c.handle(0.6, m.Hello(member="r2.1", agent="a0", epoch=0))
    c.handle(0.7, m.Ready(member="r2.1", serve=c.roster.peers["r2.1"].serve, step=5))
    c.handle(0.8, m.Leaving(member="r1.1"))
    assert c.planned is not None
    assert c.planned.members == ("r0.1", "r2.1")
    assert {c.roster.peers[name].agent for name in c.planned.members} == {"a0"}
    return c


def record_of(c: Coordinator) -> m.FleetRecord:
    """What it keeps durably, as it writes that down when somebody asks for as many replicas as there are."""
    actions = c.handle(1.5, om.ScaleAsked(replicas=c.settings.num_replicas, asker="x"))
    return [action for action in actions if isinstance(action, m.Persist)][-1].record


def restarted(c: Coordinator, *living: str) -> Coordinator:
    again = Coordinator(c.settings, 2, record_of(c))
    for index in range(3):
        here = tuple(name for name in living if name[1] == str(index))
        again.handle(0.0, m.AgentHello(agent=f"a{index}", pid=1, members=here, epoch=1))
    return again


def test_who_leaves_is_let_go_once_the_view_without_it_has_formed() -> None:
    c = changing()
    assert record_of(c).outgoing == ("r1.1",)
    actions = form(c)
    assert dismissed(actions) == ["r1.1"]
    assert next(a.record.outgoing for a in actions if isinstance(a, m.Persist)) == ()
    kinds = [a for a in actions if isinstance(a, m.Persist) or (isinstance(a, m.Tell) and "r1.1" in a.to)]
    assert isinstance(kinds[0], m.Persist), "written down before it is told: it cannot be taken back"


@pytest.mark.parametrize("word", ["hello", "leaving", "evict"])
def test_until_then_it_is_not_let_go_whatever_is_said(word: str) -> None:
    c = changing()
    said: dict[str, m.Event] = {
        "hello": hello("r1.1", state="member", leaving=True),
        "leaving": m.Leaving(member="r1.1"),
        "evict": om.EvictAsked(replica="r1.1", now=False, asker="x"),
    }
    assert dismissed(c.handle(1.5, said[word])) == []
    assert dismissed(form(c)) == ["r1.1"]


def test_it_carries_the_state_on_if_the_view_dies_before_it_has_formed() -> None:
    """Before, it was dismissed as the view was told, and the run was called lost."""
    c = changing()
    actions = died(c, "r0.1")
    assert not c.over
    assert members(c) == ("r1.1",)
    told = [a.to for a in actions if isinstance(a, m.Tell) and isinstance(a.message, m.Install)]
    assert told == [("r1.1",)]
    form(c)
    assert not c.over


def test_it_is_not_asked_to_leave_again_nor_waited_for() -> None:
    c = changing()
    c.handle(2.0, m.Left(member="r0.1", view=c.latest()))
    assert members(c) == ("r0.1",), "of the view somebody lives: it goes on alone"
    assert dismissed(form(c)) == ["r1.1"]


def test_a_spare_goes_on_beside_it() -> None:
    """Which of them is further the roll call tells: a view that nobody is heard of may have gone on."""
    c = Coordinator(Settings(num_replicas=1, num_spares=1, num_agents=2), 1)
    for index in range(2):
        c.handle(0.0, m.AgentHello(agent=f"a{index}", pid=1))
    c.handle(0.0, hello("r0.1"))
    form(c)
    c.handle(0.6, hello("r1.1"))
    c.handle(0.7, m.Ready(member="r1.1", serve=c.roster.peers["r1.1"].serve, step=5))
    c.outgoing, c.roster.peers["r0.1"].leaving = {"r0.1"}, True
    view = View(id=c.next_id(), members=("r9.1",))
    c.roster.add("r9.1", "a9", "member")
    c.set_views(view, None)
    died(c, "r9.1")
    assert sorted(members(c)) == ["r0.1", "r1.1"]


def test_who_was_found_to_have_no_state_is_nobody_of_the_view() -> None:
    """It lives, and starts again as a joiner: that is no reason to count out who had left with the state."""
    c = changing()
    c.handle(1.5, m.Rejoin(member="r0.1", view=c.latest()))
    assert not c.over
    assert members(c) == ("r1.1",)


def test_a_successor_knows_who_may_still_be_needed() -> None:
    c = restarted(changing(), "r1.1")
    assert not c.over, "r0.1 is gone, and r1.1 has not greeted it"
    assert c.outgoing == {"r1.1"}
    old = View(id=ViewId(1, 1), members=("r0.1", "r1.1", "r2.1"))
    c.handle(0.2, hello("r1.1", state="member", view=old, left=True, committed=3))
    assert members(c) == ("r1.1",)
    assert not c.over


def test_a_successor_waits_no_longer_once_it_has_ended() -> None:
    c = restarted(changing(max_restarts=0), "r1.1")
    actions = c.handle(0.2, m.Exited(member="r1.1", cause="signal"))
    (end,) = [a for a in actions if isinstance(a, m.Finish)]
    assert (end.outcome, end.exit_code) == ("failed", 6)


def test_where_the_view_has_formed_meanwhile_it_is_let_go_as_it_greets() -> None:
    before = changing()
    c = restarted(before, "r0.1", "r1.1")
    assert before.view is not None
    c.handle(0.1, hello("r0.1", state="member", view=before.view, formed=True, committed=7))
    assert c.view == before.view
    assert dismissed(c.handle(0.2, hello("r1.1", state="member", committed=3))) == ["r1.1"]


def test_who_is_silent_for_longer_than_the_lease_is_not_waited_for_where_one_that_left_can_go_on() -> None:
    c = changing()
    c.handle(1.5, m.Timer(name=f"form:{c.latest()}"))
    assert c.change is not None
    upto = c.change.upto
    c.handle(7.0, m.Timer(name=f"ack:{upto}"))
    assert c.change is not None, "r0.1 lives, and may train on"
    c.handle(700.0, m.Timer(name=f"lease:{upto}"))
    assert members(c) == ("r1.1",)


def told_to_kill(actions: list[m.Action]) -> list[str]:
    return [a.message.member for a in actions if isinstance(a, m.Tell) and isinstance(a.message, m.Kill)]


PLANNED = Settings(num_replicas=2, num_spares=1, num_agents=2, lease_s=10.0)


def test_a_leaver_proves_nothing_of_the_view_after_it_whose_hosts_fell_silent() -> None:
    """Before, it went on at once, and both views committed the same steps."""
    c = succeeded(PLANNED)
    c.handle(2.0, hm.HostSilent(agent="a0", for_s=0.7, why="silent for 0.7 s"))
    upto = c.latest()
    c.handle(2.1, m.Left(member="r1.1", view=upto))
    actions = c.handle(3.0, m.Timer(name=f"ack:{upto}"))
    assert c.latest() == upto, "r0.1 and r2.1 may train until their lease is over"
    assert told_to_kill(actions) == [], "nobody there hears it"
    c.handle(14.0, m.Timer(name=f"lease:{upto}"))
    assert members(c) == ("r1.1",)


def test_where_their_host_is_heard_of_one_of_them_has_to_end_first() -> None:
    """Stopped, say: before, they were told to be killed, and the leaver went on before they were."""
    c = succeeded(PLANNED)
    upto = c.latest()
    c.handle(2.0, m.Left(member="r1.1", view=upto, cause="its connection ended"))
    assert told_to_kill(c.handle(3.0, m.Timer(name=f"ack:{upto}"))) == ["r0.1", "r2.1"]
    assert told_to_kill(c.handle(3.1, m.Left(member="r1.1", view=upto))) == [], "once"
    assert c.latest() == upto
    c.handle(3.2, m.Exited(member="r2.1", cause="evicted"))
    assert members(c) == ("r1.1",)


def test_nobody_is_killed_where_nobody_else_could_go_on() -> None:
    c = succeeded(PLANNED)
    c.handle(2.0, m.Exited(member="r1.1", cause="signal"))
    assert c.change is not None
    assert told_to_kill(c.handle(3.0, m.Timer(name=f"ack:{c.change.upto}"))) == []
    assert not c.over
