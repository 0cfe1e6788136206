"""Replicas go where a robust rule that counts rows by host needs them, and only there are they moved."""

from __future__ import annotations

import pytest
from tests.core.test_protocol_asked import RULE, caught_up, form, fresh, gone, started

from outlast.core.protocol import Coordinator, Settings
from outlast.core.protocol import host_messages as hm
from outlast.core.protocol import messages as m


def joins(c: Coordinator, agent: str, slots: int = 2) -> list[m.Action]:
    c.handle(0.0, hm.HostHere(agent=agent, host=agent[:2], place=agent, pid=1, slots=slots))
    return c.handle(0.0, m.AgentHello(agent=agent, pid=1))


def on_one(replicas: int, spares: int, needed: str = "2", **settings: int) -> Coordinator:
    """All replicas are on h0, in a formed view; the rule needs them on so many hosts."""
    c = Coordinator(Settings(num_replicas=replicas, num_spares=spares, backoff_s=0.0, **settings), 1)
    for name in sorted(started(joins(c, "h0:a", 9))):
        fresh(c, name)
    form(c)
    for name in c.roster.having("joining"):
        caught_up(c, name)
    c.facts |= RULE | {"fault_domains": needed}
    return c


def places(c: Coordinator) -> list[str]:
    view = c.planned or c.view
    assert view is not None
    return [c.roster.peers[name].agent for name in view.members]


def notes(actions: list[m.Action]) -> list[str]:
    return [str(a.fields["text"]) for a in actions if isinstance(a, m.JournalEntry) and a.kind == "notice"]


def test_a_host_that_joins_gets_a_member_of_the_fullest_one() -> None:
    c = on_one(3, 0)
    told = joins(c, "h1:a")
    needs = "the run's robust rule needs replicas on 2 hosts, and has them on 1"
    assert notes(told) == [f"r2.1 on h0:a makes room for one on another host: {needs}"]
    assert places(c) == ["h0:a"] * 2
    form(c)
    assert started(gone(c, "r2.1")) == {"r2.2": "h1:a"}
    assert c.roster.restarts == 0
    fresh(c, "r2.2")
    assert places(c) == ["h0:a"] * 2, "once it has caught up"
    caught_up(c, "r2.2")
    assert sorted(places(c)) == ["h0:a", "h0:a", "h1:a"]
    assert notes(form(c)) == [], "and nobody moves any more"


def test_a_spare_makes_room_before_a_member_does_and_comes_in_from_elsewhere() -> None:
    c = on_one(2, 1)
    joins(c, "h1:a")
    assert places(c) == ["h0:a"] * 2
    assert started(gone(c, "r2.1")) == {"r2.2": "h1:a"}
    fresh(c, "r2.2")
    caught_up(c, "r2.2")
    assert sorted(places(c)) == ["h0:a", "h1:a"]


@pytest.mark.parametrize("needed", ["0", "1"])
def test_where_hosts_do_not_matter_nobody_moves(needed: str) -> None:
    c = on_one(3, 1, needed)
    assert notes(joins(c, "h1:a")) == []
    assert not any(peer.leaving for peer in c.roster.peers.values())


def test_the_only_member_of_a_host_stays_and_so_does_who_would_come_back_to_the_same_host() -> None:
    alone = on_one(1, 0)
    assert notes(joins(alone, "h1:a")) == []
    full = on_one(3, 0)
    full.roster.doubted.add("h1:a")
    assert notes(joins(full, "h1:a")) == []


def test_who_waits_for_a_host_that_is_not_there_is_told_once() -> None:
    c = on_one(3, 0)
    assert c.view is not None
    waits = m.Admitted(
        member="r0.1", view=c.view.id, step=3, action="wait", tolerated=0, most_rows=6, trim_count=2, lowered=False,
        reason="",
    )  # fmt: skip
    [said] = notes(c.handle(1.0, waits))
    assert "waits for other hosts: the run's robust rule needs replicas on 2 hosts, and has them on 1" in said
    assert notes(c.handle(1.0, m.Timer(name="nothing"))) == []


def test_an_alarm_does_not_empty_a_host_that_the_rule_needs() -> None:
    """All would wait for it to be found well."""
    moved = []
    for needed in ("0", "2"):
        c = on_one(3, 0, "0")
        joins(c, "h1:a")
        c.want(4)
        for name in started(c.handle(0.0, m.Timer(name="nothing"))):
            fresh(c, name)
            caught_up(c, name)
        c.facts |= {"fault_domains": needed}
        form(c)
        burns = m.DeviceNoted(
            member="h1:a", device="", source="readings", evidence="it burns", action="fatal", remedy=""
        )
        c.handle(1.0, burns)
        moved.append(any(peer.leaving for peer in c.roster.peers.values()))
    assert moved == [True, False]
