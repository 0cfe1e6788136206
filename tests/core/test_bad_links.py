"""Bad links in the coordinator: who is behind one reduces nothing, by a planned view; nobody is sent away for it."""

from __future__ import annotations

from typing import Any

import pytest

from outlast.core.protocol import Coordinator, Settings, View, ViewId
from outlast.core.protocol import host_messages as hm
from outlast.core.protocol import messages as m
from outlast.core.protocol.delta import apply, diff

AGENTS = ("a0", "h1:aa", "h2:bb")


def fleet(num: int = 3, spares: int = 0, **settings: Any) -> Coordinator:
    """Replicas in a formed view and spares that are ready, dealt to agents in turn."""
    c = Coordinator(Settings(num_replicas=num, num_spares=spares, num_agents=len(AGENTS), **settings), 1)
    for agent in AGENTS:
        c.handle(0.0, m.AgentHello(agent=agent, pid=1))
    for index in range(num + spares):
        agent = AGENTS[index % len(AGENTS)]
        c.handle(0.0, m.Hello(member=f"r{index}.1", agent=agent, epoch=0, state="fresh"))
    enter(c)
    for index in range(num, num + spares):
        peer = c.roster.peers[f"r{index}.1"]
        c.handle(0.0, m.Ready(member=peer.name, step=0, serve=peer.serve))
    return c


def enter(c: Coordinator) -> list[m.Action]:
    """Everybody forms the view that is next."""
    view = c.planned or c.view
    assert view is not None
    actions: list[m.Action] = []
    for name in view.members:
        actions += c.handle(1.0, m.Formed(member=name, view=view.id, step=3))
    return actions


def judged(c: Coordinator, *agents: str) -> list[str]:
    """What the journal is told."""
    actions = c.handle(2.0, hm.LinksJudged(agents=dict.fromkeys(agents, "4.0% loss")))
    return [str(a.fields["text"]) for a in actions if isinstance(a, m.JournalEntry) and a.kind == "notice"]


def test_who_is_behind_a_bad_link_reduces_nothing_from_a_planned_view_on() -> None:
    c = fleet(num=4)
    (said,) = judged(c, "h1:aa")
    assert said.startswith("the link of h1:aa is bad: 4.0% loss; its replicas reduce nothing")
    assert c.change is None
    assert c.planned is not None
    assert (c.planned.members, c.planned.relieved) == (("r0.1", "r3.1", "r1.1", "r2.1"), ("r1.1",))
    enter(c)
    assert c.view is not None
    assert (c.view.relieved, c.planned) == (("r1.1",), None)
    assert judged(c, "h1:aa") == [], "once"
    assert c.planned is None
    assert judged(c) == ["the link of h1:aa is used again as others are"]
    assert c.planned is not None
    assert c.planned.relieved == ()


@pytest.mark.parametrize(("num", "bad"), [(3, 1), (4, 2), (2, 1), (9, 3)])
def test_of_a_view_a_quarter_is_relieved_at_most_and_the_notice_says_what_is_done(num: int, bad: int) -> None:
    c = fleet(num=num)
    said = judged(c, *AGENTS[1 : 1 + min(bad, 2)])
    assert said
    assert all(text.endswith("4.0% loss; work goes elsewhere first") for text in said)
    assert c.planned is None


def test_where_alarms_are_only_told_each_link_is_told_once() -> None:
    c = fleet(on_alarm="tell")
    (said,) = judged(c, "h1:aa")
    assert said.endswith("nothing is done (on_alarm)")
    (other,) = judged(c, "h1:aa", "h2:bb")
    assert "h2:bb is bad" in other
    assert judged(c, "h2:bb") == ["the link of h1:aa is used again as others are"]
    assert c.planned is None
    assert not c.roster.badly_linked


def test_nobody_is_sent_away_and_the_spare_behind_a_good_link_takes_the_next_place() -> None:
    c = fleet(num=2, spares=2)  # r1.1 on h1, the spares r2.1 on h2 and r3.1 on a0
    judged(c, "h2:bb")
    assert c.planned is None
    assert not any(peer.leaving for peer in c.roster.peers.values())
    c.handle(3.0, m.Leaving(member="r1.1"))
    assert c.planned is not None
    assert c.planned.members == ("r0.1", "r3.1")


def test_so_it_does_after_a_death_and_a_replacement_is_started_elsewhere() -> None:
    c = fleet(num=2, spares=2)
    c.roster.slots.update(dict.fromkeys(AGENTS, 3))
    judged(c, "h2:bb")
    view = c.view
    assert view is not None
    actions = c.handle(3.0, m.Exited(member="r1.1", cause="signal", code=-9))
    actions += c.handle(3.0, m.Left(member="r0.1", view=view.id))
    assert c.view is not None
    assert set(c.view.members) == {"r0.1", "r3.1"}
    spawns = [a.to[0] for a in actions if isinstance(a, m.Tell) and isinstance(a.message, m.Spawn)]
    assert spawns
    assert "h2:bb" not in spawns


def test_a_death_keeps_what_is_known_and_another_coordinator_leaves_the_view_as_it_is() -> None:
    c = fleet(num=5)
    judged(c, "h2:bb")
    enter(c)
    view = c.view
    assert view is not None
    assert view.relieved == ("r2.1",)
    c.persist()
    (record,) = [a.record for a in c._out if isinstance(a, m.Persist)]
    c.handle(3.0, m.Exited(member="r3.1", cause="signal", code=-9))
    for name in ("r0.1", "r1.1", "r2.1", "r4.1"):
        c.handle(3.0, m.Left(member=name, view=view.id))
    assert c.view is not None
    assert (c.view.members, c.view.relieved) == (("r0.1", "r1.1", "r4.1", "r2.1"), ("r2.1",))
    other = Coordinator(Settings(num_replicas=5, num_agents=3), 2, record)
    for index, agent in enumerate(AGENTS):
        other.handle(4.0, m.AgentHello(agent=agent, pid=1, members=tuple(sorted(view.members)[index::3])))
    for index, name in enumerate(sorted(view.members)):
        other.handle(
            4.0,
            m.Hello(member=name, agent=AGENTS[index % 3], epoch=1, state="member", view=view, formed=True),
        )
    assert other.change is None
    assert other.view == view


def test_a_difference_of_views_says_who_reduces_nothing() -> None:
    base = View(id=ViewId(1, 1), members=("a", "b", "c"))
    after = View(id=ViewId(1, 2), members=("a", "b", "c"), relieved=("b",))
    assert apply(base, diff(base, after)) == after
