"""A host of which nothing is heard is removed whole, in one view; and no second side commits because of that."""

from typing import Any

import pytest

from outlast.core.protocol import Coordinator, Settings
from outlast.core.protocol import messages as m
from outlast.core.protocol.host_messages import HostHere, HostSilent

PLACES = {"r0.1": "h0", "r1.1": "h1", "r2.1": "h2", "r3.1": "h2", "r4.1": "h1"}


def started(spares: int = 0, checkpoints: str = "", **more: Any) -> Coordinator:
    """Four replicas on three hosts, their first view formed."""
    c = Coordinator(Settings(num_replicas=4, num_spares=spares, num_agents=3, **more), 1)
    for host in ("h0", "h1", "h2"):
        c.handle(0.0, HostHere(agent=host, host=host, place=host, pid=1, slots=2))
        c.handle(0.0, m.AgentHello(agent=host, pid=1))
    facts = {"microbatches": "8"} | ({"checkpoints": checkpoints} if checkpoints else {})
    for name, host in list(PLACES.items())[: 4 + spares]:
        c.roster.peers[name].agent = host  # wherever it was dealt to
        c.handle(0.0, m.Hello(member=name, agent=host, epoch=0, state="fresh", facts=facts))
    assert c.view is not None
    for name in c.view.members:
        c.handle(0.0, m.Formed(member=name, view=c.view.id, step=0))
    return c


def silent(c: Coordinator, host: str, at_s: float = 5.0) -> list[m.Action]:
    return c.handle(at_s, HostSilent(agent=host, for_s=0.6, why="silent for 0.60 s"))


def left(c: Coordinator, *names: str) -> None:
    for name in names:
        assert c.change is not None
        c.handle(6.0, m.Left(member=name, view=c.change.upto))


def kept(actions: list[m.Action], kind: str) -> list[dict[str, Any]]:
    return [a.fields for a in actions if isinstance(a, m.JournalEntry) and a.kind == kind]


def told(actions: list[m.Action], kind: type) -> list[tuple[str, ...]]:
    return [a.to for a in actions if isinstance(a, m.Tell) and isinstance(a.message, kind)]


def test_a_silent_host_goes_whole_and_nobody_waits_for_its_word() -> None:
    c = started()
    [lost] = kept(silent(c, "h2"), "agent_lost")
    assert lost["replicas"] == ["r2.1", "r3.1"]
    left(c, "r0.1", "r1.1")  # at once: no ack timer has to pass
    assert c.change is None
    assert c.view is not None
    assert c.view.members == ("r0.1", "r1.1")
    assert not c.roster.is_alive("r2.1")


def test_connections_that_its_end_has_broken_are_explained_by_it() -> None:
    c = started()
    assert c.view is not None
    for name in ("r0.1", "r1.1"):
        c.handle(5.0, m.Left(member=name, view=c.view.id, suspects=("r2.1", "r3.1")))
    assert c.change is not None
    silent(c, "h2")  # no timer has to pass
    assert c.change is None
    assert c.view.members == ("r0.1", "r1.1")


def test_its_loss_is_told_as_an_interruption_that_the_coordinator_noticed() -> None:
    c = started()
    silent(c, "h2")  # for 0.6 s
    left(c, "r0.1", "r1.1")
    assert c.view is not None
    actions = []
    for name in c.view.members:
        formed = m.Formed(member=name, view=c.view.id, step=3, left_at_s=5.1, formed_at_s=6.2, recomputed=4)
        actions += c.handle(6.3, formed)
    c.reports.committed(4.0, 6.5)
    told_ = kept(c.handle(6.6, m.Resumed()), "recovery")
    assert [(r["replica"], r["cause"], r["noticed_by"]) for r in told_] == [
        ("r2.1", "agent_lost", "coordinator"), ("r3.1", "agent_lost", "coordinator"),
    ]  # fmt: skip
    assert {(round(r["detect_s"], 3), r["downtime_s"], r["microbatches_recomputed"]) for r in told_} == {(0.6, 2.5, 4)}


def test_nobody_goes_on_without_the_word_of_a_living_member() -> None:
    """All of the view are on hosts that are not heard of: they may well train on. Only the lease ends that."""
    c = started(spares=1)
    assert c.view is not None
    for host in ("h0", "h2", "h1"):
        silent(c, host)
    assert c.change is not None
    upto = c.change.upto
    c.handle(20.0, m.Timer(name=f"ack:{upto}"))
    assert c.change is not None
    assert not c.over
    c.handle(700.0, m.Timer(name=f"lease:{upto}"))
    assert c.over  # no checkpoint, no spare that is heard of: the state is gone for good


def test_a_member_that_went_on_without_its_agent_can_fall_silent_too() -> None:
    """Its agent was stopped, it answered all the same, and then its host lost power: nobody else could ever say so."""
    c = started()
    assert c.view is not None
    first = silent(c, "h2")
    left(c, "r2.1", "r3.1", "r0.1", "r1.1")
    assert c.view.members == tuple(list(PLACES)[:4])  # they are heard of, and go on
    for name in c.view.members:
        c.handle(7.0, m.Formed(member=name, view=c.view.id, step=3))
    again = silent(c, "h2", 9.0)
    assert (len(kept(first, "agent_lost")), kept(again, "agent_lost")) == (1, [])
    left(c, "r0.1", "r1.1")
    assert c.view.members == ("r0.1", "r1.1")
    assert not c.roster.is_alive("r2.1")
    silent(c, "h2", 12.0)
    assert c.change is None, "nobody is there any more"


def test_after_the_lease_a_run_with_checkpoints_begins_again_elsewhere() -> None:
    c = started(checkpoints="there")
    for host in ("h0", "h1", "h2"):
        silent(c, host)
    assert c.change is not None
    upto = c.change.upto
    c.handle(20.0, m.Timer(name=f"ack:{upto}"))
    c.handle(700.0, m.Timer(name=f"lease:{upto}"))
    assert c.view is None
    assert not c.over
    c.handle(701.0, HostHere(agent="h9", host="h9", place="h9", pid=1, slots=2))
    actions = c.handle(701.0, m.AgentHello(agent="h9", pid=1))
    spawns = [a.message.member for a in actions if isinstance(a, m.Tell) and isinstance(a.message, m.Spawn)]
    assert spawns == ["r0.2", "r1.2"]  # as many as it has slots


def test_who_comes_back_in_time_is_heard_and_who_comes_late_is_ended() -> None:
    c = started()
    silent(c, "h2")
    assert c.change is not None
    c.handle(5.5, m.Left(member="r2.1", view=c.change.upto))  # it was only slow
    left(c, "r0.1", "r1.1")
    assert c.view is not None
    assert set(c.view.members) == {"r0.1", "r1.1", "r2.1"}
    actions = c.handle(9.0, m.AgentHello(agent="h2", pid=1, members=("r2.1", "r3.1"), number=2))
    assert [a.message.member for a in actions if isinstance(a, m.Tell) and isinstance(a.message, m.Kill)] == ["r3.1"]


def test_slots_that_are_free_elsewhere_take_the_replicas_of_a_silent_host() -> None:
    c = started()
    silent(c, "h2")
    assert c.change is not None
    upto = c.change.upto

    def spawned(actions: list[m.Action]) -> dict[str, str]:
        told = [a for a in actions if isinstance(a, m.Tell) and isinstance(a.message, m.Spawn)]
        return {a.message.member: a.to[0] for a in told if isinstance(a.message, m.Spawn)}

    assert spawned(c.handle(6.0, m.Left(member="r0.1", view=upto))) == {}  # not before they are out of the view
    actions = c.handle(6.0, m.Left(member="r1.1", view=upto))
    assert c.view is not None
    assert c.view.members == ("r0.1", "r1.1")
    assert spawned(actions) == {"r2.2": "h0", "r3.2": "h1"}


def test_a_host_that_offers_no_more_slots_gets_no_replica() -> None:
    c = started()
    c.handle(5.0, HostHere(agent="h0", host="h0", place="h0", pid=1, slots=-1))
    actions = c.handle(5.0, m.Exited(member="r1.1", cause="signal"))
    assert c.change is not None
    actions += c.handle(5.0, m.Left(member="r0.1", view=c.change.upto))
    spawned = {a.message.member: a.to[0] for a in actions if isinstance(a, m.Tell) and isinstance(a.message, m.Spawn)}
    assert spawned == {"r1.2": "h1"}


def anew(*back: tuple[str, str]) -> Coordinator:
    """Another coordinator, to which these members have come back."""
    before = started()
    assert before.view is not None
    placement = {name: host for name, host in PLACES.items() if name in before.view.members}
    stored = m.FleetRecord(
        view=before.view, incarnations={f"r{i}": 1 for i in range(4)}, placement=placement, formed=True
    )
    c = Coordinator(Settings(num_replicas=4, num_agents=3), 2, stored)
    for name, host in back:
        c.handle(1.0, m.AgentHello(agent=host, pid=1, members=(name,)))
        c.handle(1.0, m.Hello(member=name, agent=host, epoch=1, view=before.view, formed=True, state="member"))
    return c


def test_a_coordinator_that_starts_anew_does_not_wait_for_ever_for_a_host_that_went_meanwhile() -> None:
    c = anew(("r0.1", "h0"), ("r1.1", "h1"))
    assert c.awaiting == {"r2.1", "r3.1"}
    assert c.awaited == set()  # as far as is known the view goes on
    silent(c, "h2")
    assert c.change is not None
    assert c.awaited >= {"r0.1", "r1.1"}
    left(c, "r0.1", "r1.1")
    assert c.view is not None
    assert c.view.members == ("r0.1", "r1.1")
    assert c.awaited == set()


def test_a_host_that_goes_while_a_new_coordinator_awaits_others_is_not_forgotten() -> None:
    """Its members had reported already, so nobody is waited for because of it, and those who come last are well."""
    c = anew(("r1.1", "h1"))
    silent(c, "h1")
    assert c.change is None
    view = c.view
    for host, names in {"h2": ("r2.1", "r3.1"), "h0": ("r0.1",)}.items():
        c.handle(6.0, m.AgentHello(agent=host, pid=1, members=names))
        for name in names:
            c.handle(6.0, m.Hello(member=name, agent=host, epoch=1, view=view, formed=True, state="member"))
    left(c, "r0.1", "r2.1", "r3.1")
    assert c.view is not None
    assert c.view.members == ("r0.1", "r2.1", "r3.1")


def test_a_host_that_goes_while_it_alone_is_awaited_costs_one_view() -> None:
    c = anew(("r0.1", "h0"), ("r1.1", "h1"))
    silent(c, "h2")
    left(c, "r0.1", "r1.1")
    assert c.view is not None
    for name in c.view.members:
        c.handle(6.5, m.Formed(member=name, view=c.view.id, step=0))
    assert c.change is None


def test_of_two_hosts_that_went_while_there_was_no_coordinator_the_second_holds_up_the_others() -> None:
    c = anew(("r0.1", "h0"))
    silent(c, "h2")
    assert c.change is None
    assert c.awaited == {"r1.1"}
    silent(c, "h1")
    left(c, "r0.1")
    assert c.view is not None
    assert c.view.members == ("r0.1",)


def ended() -> Coordinator:
    """After the last step: r0.1 writes."""
    c = started()
    assert c.view is not None
    for name in c.view.members:
        c.handle(8.0, m.Done(member=name, view=c.view.id, steps=5))
    assert c.ending is not None
    assert c.ending.writer == "r0.1"
    return c


def test_after_the_last_step_a_silent_writer_is_followed_once_its_lease_is_surely_over() -> None:
    c = ended()
    [timer] = [a for a in silent(c, "h0", 9.0) if isinstance(a, m.SetTimer)]
    assert timer.after_s == pytest.approx(660.0)
    assert c.ending is not None
    assert c.ending.writer == "r0.1"  # it may live, and write
    c.handle(669.0, m.Timer(name=timer.name))
    assert c.ending.writer == "r1.1"


def test_after_the_last_step_the_word_of_a_silent_hosts_agent_is_enough() -> None:
    c = ended()
    [timer] = [a for a in silent(c, "h0", 9.0) if isinstance(a, m.SetTimer)]
    c.handle(10.0, m.AgentHello(agent="h0", pid=1, members=("r0.1",), number=2))
    c.handle(669.0, m.Timer(name=timer.name))  # of a silence that is over
    assert c.ending is not None
    assert c.ending.writer == "r0.1"
    c.handle(670.0, m.Exited(member="r0.1", cause="signal"))
    assert c.ending.writer == "r1.1"


def test_a_completed_run_whose_hosts_are_all_silent_for_a_while_is_finished_all_the_same() -> None:
    c = ended()
    for host in ("h0", "h1", "h2"):
        silent(c, host, 9.0)
    assert not c.over
    for number, (name, host) in enumerate(list(PLACES.items())[:2], 2):
        c.handle(15.0, m.AgentHello(agent=host, pid=1, members=(name,), number=number))
    actions = c.handle(16.0, m.Exited(member="r1.1", cause="finished"))
    assert not c.over
    actions = c.handle(16.0, m.Exited(member="r0.1", cause="finished"))
    [end] = [a for a in actions if isinstance(a, m.Finish)]  # nobody waits for h2: what it would write is written
    assert (end.outcome, end.exit_code) == ("finished", 0)


def test_a_host_that_was_silent_before_the_last_step_is_waited_for_no_longer_than_its_lease() -> None:
    c = started()
    assert c.view is not None
    silent(c, "h2")
    assert c.change is not None
    c.handle(5.5, m.Left(member="r2.1", view=c.change.upto))
    left(c, "r0.1", "r1.1")
    assert c.view.members == ("r0.1", "r1.1", "r2.1")  # its agent is silent still
    for name in c.view.members:
        c.handle(7.0, m.Formed(member=name, view=c.view.id, step=1))
    actions: list[m.Action] = []
    for name in c.view.members:
        actions += c.handle(8.0, m.Done(member=name, view=c.view.id, steps=5))
    assert c.ending is not None
    actions += c.handle(8.0, m.Exited(member="r0.1", cause="signal"))
    assert c.ending.writer == "r1.1"
    assert "host:h2" in [a.name for a in actions if isinstance(a, m.SetTimer)]


def spawns(actions: list[m.Action]) -> set[str]:
    return {a.message.member for a in actions if isinstance(a, m.Tell) and isinstance(a.message, m.Spawn)}


def test_a_host_whose_agent_comes_and_goes_is_one_host() -> None:
    c = Coordinator(Settings(num_replicas=2, num_agents=3), 1)
    for number in range(4):
        agent = f"h1:{number}"
        c.handle(0.0, HostHere(agent=agent, host="h1", place="h1", pid=number, slots=2))
        assert not spawns(c.handle(0.0, m.AgentHello(agent=agent, pid=number)))
        assert not spawns(silent(c, agent, 1.0))
    assert not spawns(c.handle(2.0, m.AgentHello(agent="a0", pid=9)))
    c.handle(2.0, m.AgentGone(agent="a0", cause="signal"))
    assert not spawns(c.handle(2.0, m.AgentHello(agent="a0.2", pid=10)))
    assert not spawns(c.handle(3.0, m.AgentHello(agent="h2:0", pid=1)))
    assert spawns(c.handle(4.0, m.AgentHello(agent="h1:9", pid=1))) == {"r0.1", "r1.1"}


def test_members_of_a_host_stand_side_by_side_and_hosts_in_the_order_of_their_first() -> None:
    c = started()
    for name, agent in zip(PLACES, ("h0:aa", "h1:bb", "h0:aa", "a0", "a1"), strict=True):
        c.roster.add(name, agent, "fresh").agent = agent
    assert c.roster.by_host(list(PLACES)) == ("r0.1", "r2.1", "r1.1", "r3.1", "r4.1")  # the launcher's are on one host
    assert c.roster.by_host(["r1.1", "r0.1"]) == ("r1.1", "r0.1")
