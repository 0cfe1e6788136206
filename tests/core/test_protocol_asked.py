"""What people ask of a run while it trains: numbers, a host without replicas, another process for a replica."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from outlast.core.protocol import Coordinator, Settings, plan_of, rows_spoilt
from outlast.core.protocol import host_messages as hm
from outlast.core.protocol import messages as m
from outlast.core.protocol import operator_messages as om

ME = "operator:ab"


def answer(actions: list[m.Action]) -> om.Answered:
    [said] = [a.message for a in actions if isinstance(a, m.Tell) and isinstance(a.message, om.Answered)]
    return said


def started(actions: list[m.Action]) -> dict[str, str]:
    """Member -> agent, of those that are to be started."""
    spawns = [a for a in actions if isinstance(a, m.Tell) and isinstance(a.message, m.Spawn)]
    return {a.message.member: a.to[0] for a in spawns if isinstance(a.message, m.Spawn)}


def fresh(c: Coordinator, name: str) -> list[m.Action]:
    agent = c.roster.peers[name].agent
    return c.handle(0.0, m.Hello(member=name, agent=agent, epoch=0, state="fresh", facts=dict(c.facts)))


def form(c: Coordinator) -> list[m.Action]:
    """Every member of the newest view forms it."""
    view, actions = c.planned or c.view, list[m.Action]()
    assert view is not None
    for name in view.members:
        actions += c.handle(0.0, m.Formed(member=name, view=view.id, step=3))
    return actions


def caught_up(c: Coordinator, name: str) -> None:
    c.handle(0.0, m.Ready(member=name, step=3, serve=c.roster.peers[name].serve))


def fleet(replicas: int = 2, spares: int = 1, slots: int = 0, **settings: Any) -> Coordinator:
    """In a formed view; the spares are ready. Agents: the launcher's a0 on host `head`, and h1."""
    c = Coordinator(Settings(num_replicas=replicas, num_spares=spares, num_agents=2, backoff_s=0.0, **settings), 1)
    began = list[m.Action]()
    for agent, host in (("a0", "head"), ("h1:aa", "h1")):
        c.handle(0.0, hm.HostHere(agent=agent, host=host, place=host, pid=1, slots=slots))
        began += c.handle(0.0, m.AgentHello(agent=agent, pid=1))
    names = sorted(started(began))
    for name in names:
        fresh(c, name)
    form(c)
    for name in names[replicas:]:
        caught_up(c, name)
    assert len(names) == replicas + spares
    return c


def gone(c: Coordinator, name: str) -> list[m.Action]:
    return c.handle(0.0, m.Exited(member=name, cause="left", code=0))


def test_more_replicas_join_and_the_answer_comes_after_the_record() -> None:
    c = fleet(spares=0)
    actions = c.handle(1.0, om.ScaleAsked(asker=ME, replicas=4))
    assert answer(actions).accepted
    kinds = [type(a) for a in actions if isinstance(a, m.Persist | m.Tell)]
    assert kinds.index(m.Persist) < kinds.index(m.Tell)
    assert started(actions) == {"r2.1": "a0", "r3.1": "h1:aa"}
    for name in ("r2.1", "r3.1"):
        fresh(c, name)
        caught_up(c, name)
        form(c)
    assert c.view is not None
    assert sorted(c.view.members) == ["r0.1", "r1.1", "r2.1", "r3.1"]
    again = c.handle(2.0, om.ScaleAsked(asker=ME, replicas=4))
    assert (answer(again).accepted, started(again), answer(again).leaving) == (True, {}, ())


def test_fewer_go_between_two_steps_and_do_not_come_back() -> None:
    c = fleet(replicas=4, spares=1)
    actions = c.handle(1.0, om.ScaleAsked(asker=ME, replicas=2))
    assert answer(actions).leaving == ("r3.1", "r4.1", "r2.1")
    assert c.planned is not None
    assert c.planned.members == ("r0.1", "r1.1")
    form(c)
    assert [started(gone(c, name)) for name in answer(actions).leaving] == [{}, {}, {"r2.2": "a0"}]  # the spare
    assert not c.reports.faults
    assert c.settings.num_replicas == 2


def test_a_host_is_emptied_and_given_back_under_either_of_its_names() -> None:
    c = fleet()
    actions = c.handle(1.0, om.DrainAsked(asker=ME, host="h1"))
    assert answer(actions).leaving == ("r1.1",)
    assert c.planned is not None
    assert c.planned.members == ("r0.1", "r2.1")
    form(c)
    assert started(gone(c, "r1.1")) == {"r1.2": "a0"}
    refused = answer(c.handle(2.0, om.DrainAsked(asker=ME, host="a0")))
    assert (refused.accepted, "only host" in refused.text) == (False, True)
    again = answer(c.handle(2.0, om.DrainAsked(asker=ME, host="h1")))
    assert (again.accepted, again.text) == (True, "host h1 is drained already")
    c.handle(3.0, m.AgentGone(agent="h1:aa"))
    c.handle(3.0, hm.HostHere(agent="h1:bb", host="h1", place="h1", pid=2))  # it was restarted
    c.handle(3.0, m.AgentHello(agent="h1:bb", pid=2))
    assert c.roster.drained_agents == {"h1:bb"}
    assert answer(c.handle(4.0, om.DrainAsked(asker=ME, host="h1", undo=True))).accepted
    assert c.roster.drained_agents == set()
    head = answer(c.handle(4.0, om.DrainAsked(asker=ME, host="head")))
    assert (head.accepted, "nobody but r0.1" in head.text) == (False, True)


def test_a_replica_goes_gently_or_at_once_and_another_takes_its_place() -> None:
    c = fleet()
    assert answer(c.handle(1.0, om.EvictAsked(asker=ME, replica="r1"))).leaving == ("r1.1",)
    assert c.change is None, "nobody is told to leave in the middle of a step"
    form(c)
    assert set(started(gone(c, "r1.1"))) == {"r1.2"}
    actions = c.handle(2.0, om.EvictAsked(asker=ME, replica="r0.1", now=True))
    killed = [a.message.member for a in actions if isinstance(a, m.Tell) and isinstance(a.message, m.Kill)]
    assert (answer(actions).accepted, killed) == (True, ["r0.1"])


def test_who_is_asked_to_go_as_it_becomes_a_member_and_is_too_far_behind_goes_all_the_same() -> None:
    """Else it would be served and served, its place taken by somebody who is in no view again."""
    c = fleet(spares=0)
    c.handle(1.0, om.ScaleAsked(asker=ME, replicas=3))
    fresh(c, "r2.1")
    caught_up(c, "r2.1")
    assert c.planned is not None
    upto = c.planned.id
    assert answer(c.handle(1.0, om.EvictAsked(asker=ME, replica="r2"))).leaving == ("r2.1",)
    c.handle(1.0, m.Left(member="r2.1", view=upto, stale=("r2.1",)))
    actions = [action for name in ("r0.1", "r1.1") for action in c.handle(1.0, m.Left(member=name, view=upto))]
    assert c.view is not None
    assert c.view.members == ("r0.1", "r1.1")
    told = [a.message for a in actions if isinstance(a, m.Tell) and a.to == ("r2.1",)]
    assert m.Close(epoch=1, reason=m.DEPARTED) in told
    assert set(started(gone(c, "r2.1"))) == {"r2.2"}


def test_who_was_killed_holds_nothing_any_more_though_its_end_is_not_reported() -> None:
    c = fleet(spares=0)
    actions = c.handle(1.0, om.EvictAsked(asker=ME, replica="r0", now=True))
    assert answer(actions).accepted
    for asked in (
        om.EvictAsked(asker=ME, replica="r1", now=True),
        om.EvictAsked(asker=ME, replica="r1"),
        om.DrainAsked(asker=ME, host="h1"),
    ):
        refused = c.handle(1.0, asked)
        assert "nobody but r1.1 holds" in answer(refused).text
        assert not [a for a in refused if isinstance(a, m.Tell) and isinstance(a.message, m.Kill)]
    [*_, record] = [a.record for a in actions if isinstance(a, m.Persist)]
    assert record.leaving == ("r0.1",)
    c.handle(2.0, m.Exited(member="r0.1", cause="signal", code=-9))
    assert c.reports.faults, "it is a death like any other"


def test_a_robust_rule_keeps_the_replicas_that_it_needs() -> None:
    c = fleet(replicas=4, spares=0, slots=3)
    c.facts["aggregation"] = "* trimmed_mean f=1 on 4 rows"
    assert answer(c.handle(1.0, om.ScaleAsked(asker=ME, replicas=6))).accepted
    fewer = answer(c.handle(1.0, om.ScaleAsked(asker=ME, replicas=3)))
    assert (fewer.accepted, "needs the 4 replicas" in fewer.text, "4 or more" in fewer.remedy) == (False, True, True)
    assert answer(c.handle(1.0, om.ScaleAsked(asker=ME, replicas=4))).accepted
    drained = answer(c.handle(1.0, om.DrainAsked(asker=ME, host="h1")))
    assert (drained.accepted, "slots for 3 of the 4 replicas" in drained.text) == (False, True)
    assert not c.roster.drained
    c.facts["aggregation"] = "mean"
    assert answer(c.handle(1.0, om.ScaleAsked(asker=ME, replicas=3))).accepted


def test_a_run_whose_last_host_is_drained_waits_for_another() -> None:
    c = fleet(spares=0)
    c.facts["checkpoints"] = "{}"
    assert answer(c.handle(1.0, om.DrainAsked(asker=ME, host="head"))).accepted is True
    form(c)
    gone(c, "r0.1")
    actions = c.handle(2.0, m.AgentGone(agent="h1:aa"))
    assert not [a for a in actions if isinstance(a, m.Finish)]
    assert any("drain --undo" in str(a.fields.get("text")) for a in actions if isinstance(a, m.JournalEntry))
    actions = c.handle(3.0, om.DrainAsked(asker=ME, host="head", undo=True))
    assert set(started(actions).values()) == {"a0"}


def test_what_would_leave_nobody_with_the_state_and_what_cannot_be_is_refused_with_a_remedy() -> None:
    c = fleet(replicas=1, spares=0)
    c.facts = {"microbatches": "4"}
    asks: list[tuple[Any, str]] = [
        (om.EvictAsked(asker=ME, replica="r0.1"), "nobody but r0.1 holds the training state"),
        (om.EvictAsked(asker=ME, replica="r0.1", now=True), "nobody but r0.1"),
        (om.EvictAsked(asker=ME, replica="r7"), "no replica r7 lives"),
        (om.DrainAsked(asker=ME, host="h9"), "no host h9"),
        (om.DrainAsked(asker=ME, host="h1", undo=True), "not drained"),
        (om.DrainAsked(asker=ME, host="head"), "nobody but r0.1"),
        (om.ScaleAsked(asker=ME, replicas=0), "0 is no number"),
        (om.ScaleAsked(asker=ME, replicas=5), "cannot share the 4 microbatches"),
    ]
    for asked, text in asks:
        actions = c.handle(1.0, asked)
        said = answer(actions)
        assert (said.accepted, text in said.text, bool(said.remedy)) == (False, True, True), said
        [told] = [a.fields for a in actions if isinstance(a, m.JournalEntry)]
        assert (told["accepted"], told["text"]) == (False, said.text)
    assert "memory" in answer(fleet(most_processes=5).handle(1.0, om.ScaleAsked(asker=ME, replicas=5))).text
    scarce = answer(fleet(slots=2).handle(1.0, om.ScaleAsked(asker=ME, replicas=6)))
    assert "slots for 4 processes, and 7 processes are wanted" in scarce.text


def test_a_coordinator_that_takes_over_keeps_to_what_was_asked() -> None:
    c = fleet(replicas=3, spares=0)
    c.handle(1.0, om.DrainAsked(asker=ME, host="h1"))
    actions = c.handle(1.0, om.ScaleAsked(asker=ME, replicas=2))
    record = [a.record for a in actions if isinstance(a, m.Persist)][-1]
    after = Coordinator(Settings(num_replicas=3, num_agents=2), 2, record)
    assert (after.settings.num_replicas, after.roster.drained, after.wanted) == (2, {"h1"}, 2)
    assert {p.name for p in after.roster.peers.values() if p.leaving} == {"r1.1", "r2.1"}


def test_replacements_that_people_ask_for_are_no_restarts() -> None:
    """Not of the budget, and with no delay either: neither was anybody's fault."""
    c = fleet(replicas=2, spares=1, max_restarts=1)
    for incarnation in (1, 2, 3):
        c.handle(1.0, om.EvictAsked(asker=ME, replica=f"r2.{incarnation}", now=incarnation == 2))
        actions = c.handle(1.0, m.Exited(member=f"r2.{incarnation}", cause="left" if incarnation != 2 else "signal"))
        assert set(started(actions)) == {f"r2.{incarnation + 1}"}
        assert [a.message.after_s for a in actions if isinstance(a, m.Tell) and isinstance(a.message, m.Spawn)] == [0.0]
        fresh(c, f"r2.{incarnation + 1}")
    c.handle(2.0, om.ScaleAsked(asker=ME, replicas=1))
    form(c)
    for name in ("r1.1", "r2.4"):
        c.handle(2.0, m.Exited(member=name, cause="left"))
    assert set(started(c.handle(3.0, om.ScaleAsked(asker=ME, replicas=2)))) <= {"r1.2", "r2.5"}
    assert c.roster.restarts == 0
    [last] = [name for name in c.roster.peers if c.roster.is_alive(name) and name.startswith("r2")]
    assert set(started(c.handle(4.0, m.Exited(member=last, cause="signal", code=-9)))) == {"r2.6"}
    assert started(c.handle(4.0, m.Exited(member="r2.6", cause="signal", code=-9))) == {}, (
        "a death is one, and paid for"
    )
    assert c.roster.restarts == 1


def test_a_coordinator_that_takes_over_knows_what_was_asked_for() -> None:
    c = fleet(replicas=2, spares=0, max_restarts=0)
    c.handle(1.0, om.EvictAsked(asker=ME, replica="r1"))
    form(c)
    c.roster.agents.clear()  # nobody to start another just now
    c.handle(2.0, m.Exited(member="r1.1", cause="left"))
    actions = c.handle(2.0, om.ScaleAsked(asker=ME, replicas=2))
    record = [a.record for a in actions if isinstance(a, m.Persist)][-1]
    after = Coordinator(Settings(num_replicas=2, max_restarts=0), 2, record)
    actions = after.handle(3.0, m.AgentHello(agent="a0", pid=1, members=("r0.1",)))
    assert record.view is not None
    hello = m.Hello(member="r0.1", agent="a0", epoch=1, state="member", view=record.view, formed=True)
    actions += after.handle(3.0, hello)
    assert set(started(actions)) == {"r1.2"}


def test_who_holds_the_state_alone_stays_though_it_was_asked_to_go() -> None:
    """Its host is being emptied, and the other replica dies with its host: nobody else could go on."""
    c = fleet(replicas=2, spares=0)
    assert answer(c.handle(1.0, om.DrainAsked(asker=ME, host="h1"))).accepted
    actions = c.handle(2.0, m.AgentGone(agent="a0"))  # before anybody has entered the view without r1.1
    actions += c.handle(2.0, m.Left(member="r1.1", view=c.latest()))
    actions += form(c)
    assert not [a for a in actions if isinstance(a, m.Finish)]
    assert c.view is not None
    assert c.view.members == ("r1.1",)
    [told] = [a.fields["text"] for a in actions if isinstance(a, m.JournalEntry) and "cannot leave" in str(a.fields)]
    assert str(told).startswith("r1.1 cannot leave yet")
    began = c.handle(3.0, m.AgentHello(agent="a0", pid=9))
    assert set(started(began)) == {"r0.2"}
    fresh(c, "r0.2")
    caught_up(c, "r0.2")
    form(c)
    form(c)
    assert c.view.members == ("r0.2",), "and once another has the state, it goes"


def test_who_is_asked_to_go_by_its_own_host_ends_the_run_as_before() -> None:
    c = fleet(replicas=1, spares=0)
    actions = c.handle(1.0, m.Leaving(member="r0.1"))
    assert [a.exit_code for a in actions if isinstance(a, m.Finish)] == [143]


def test_a_host_is_not_emptied_where_a_robust_rule_needs_it() -> None:
    c = fleet(replicas=4, spares=0)
    c.facts |= {"aggregation": "* trimmed_mean f=2 on 4 rows", "fault_domains": "2"}
    refused = answer(c.handle(1.0, om.DrainAsked(asker=ME, host="h1")))
    assert (refused.accepted, "needs replicas on 2 hosts, and 1 would be left" in refused.text) == (False, True)
    c.handle(2.0, hm.HostHere(agent="h2:aa", host="h2", place="h2", pid=3))
    c.handle(2.0, m.AgentHello(agent="h2:aa", pid=3))
    assert answer(c.handle(3.0, om.DrainAsked(asker=ME, host="h1"))).accepted


RULE = {"aggregation": "* trimmed_mean f=2", "fault_domains": "3"}
"""Six rows, of which one host may spoil two."""


def spread(slots: dict[str, int], spares: int = 0) -> Coordinator:
    """Six replicas in a formed view, with that rule; the spares are ready. Agent -> its slots."""
    c = Coordinator(Settings(num_replicas=6, num_spares=spares, num_agents=len(slots), backoff_s=0.0), 1)
    began = list[m.Action]()
    for agent, number in slots.items():
        c.handle(0.0, hm.HostHere(agent=agent, host=agent[:2], place=agent, pid=1, slots=number))
        began += c.handle(0.0, m.AgentHello(agent=agent, pid=1))
    names = sorted(started(began))
    for name in names:
        fresh(c, name)
    form(c)
    for name in names[6:]:
        caught_up(c, name)
    c.facts |= RULE
    return c


def on_each(c: Coordinator) -> dict[str, int]:
    """Agent -> members of the newest view."""
    view = c.planned or c.view
    assert view is not None
    where = [c.roster.peers[name].agent for name in view.members]
    return {agent: where.count(agent) for agent in where}


def test_a_host_is_emptied_where_those_left_are_enough_for_a_rule_however_many_members_each_has() -> None:
    c = spread({"a0": 4, "h1:a": 1, "h2:a": 1, "h3:a": 4})
    assert on_each(c) == {"a0": 2, "h1:a": 1, "h2:a": 1, "h3:a": 2}
    said = answer(c.handle(1.0, om.DrainAsked(asker=ME, host="h3")))
    assert (said.accepted, len(said.leaving)) == (True, 2)
    form(c)
    for name in said.leaving:
        for new in started(gone(c, name)):
            fresh(c, new)
            caught_up(c, new)
            form(c)
    assert on_each(c) == {"a0": 4, "h1:a": 1, "h2:a": 1}
    assert c.view is not None
    hosts = {name: c.roster.peers[name].agent for name in c.view.members}
    assert set(rows_spoilt(hosts, [plan_of(c.view.members, 0, 12, 6, (), hosts).leaves], 12, 6).values()) == {2}


@pytest.mark.parametrize("why", ["barred", "doubted", "retired"])
def test_a_host_that_gets_no_replica_does_not_count_where_a_rule_needs_hosts(why: str) -> None:
    c = spread({"a0": 2, "h1:a": 2, "h2:a": 2})
    c.handle(2.0, hm.HostHere(agent="h3:a", host="h3", place="h3", pid=1, slots=2))
    c.handle(2.0, m.AgentHello(agent="h3:a", pid=1))
    if why == "retired":
        c.settings = c.roster.settings = replace(c.settings, retired=frozenset({"h3:"}))
    else:
        getattr(c.roster, why).add("h3:a")
    said = answer(c.handle(3.0, om.DrainAsked(asker=ME, host="h1")))
    assert (said.accepted, "needs replicas on 3 hosts, and 2 would be left" in said.text) == (False, True)


def test_a_spare_that_waits_is_who_takes_the_place_where_a_rule_needs_hosts() -> None:
    """Where new processes could be does not matter then."""
    c = spread({"a0": 2, "h1:a": 2, "h2:a": 2, "h3:a": 2}, spares=2)
    assert [c.roster.peers[name].agent for name in c.roster.having("ready")] == ["h2:a", "h3:a"]
    assert answer(c.handle(1.0, om.DrainAsked(asker=ME, host="h1"))).accepted
    assert on_each(c) == {"a0": 2, "h2:a": 2, "h3:a": 2}, "as was foreseen"
    c = spread({"a0": 4, "h1:a": 2, "h2:a": 1, "h3:a": 1}, spares=2)
    assert [c.roster.peers[name].agent for name in c.roster.having("ready")] == ["a0", "a0"]
    c.handle(2.0, hm.HostHere(agent="h4:a", host="h4", place="h4", pid=1, slots=2))
    c.handle(2.0, m.AgentHello(agent="h4:a", pid=1))
    assert answer(c.handle(3.0, om.DrainAsked(asker=ME, host="h1"))).accepted
    assert on_each(c) == {"a0": 4, "h2:a": 1, "h3:a": 1}


def held(actions: list[m.Action]) -> list[dict[str, Any]]:
    return [a.fields for a in actions if isinstance(a, m.JournalEntry) and a.kind == "spares_held"]


def test_spares_come_and_go_as_the_policy_says_within_the_slots() -> None:
    c = fleet(spares=0, slots=2, auto_spares=True)
    actions = c.handle(1.0, m.SparesWorth(number=7, reason="9 deaths so far"))
    assert held(actions) == [{"number": 2, "worth": 7, "reason": "9 deaths so far", "replicas": []}]
    assert started(actions) == {"r2.1": "a0", "r3.1": "h1:aa"}, "four slots, two of them taken"
    assert actions.index(next(a for a in actions if isinstance(a, m.Persist))) < len(actions) - 1
    assert held(c.handle(1.0, m.SparesWorth(number=7))) == []
    for name in ("r2.1", "r3.1"):
        fresh(c, name)
        caught_up(c, name)
    c.handle(2.0, m.Exited(member="r0.1", cause="signal", code=-9))
    assert c.view is not None
    c.handle(2.0, m.Left(member="r1.1", view=c.view.id))
    assert sorted(c.view.members) == ["r1.1", "r2.1"], "a spare takes the place of the dead"
    form(c)
    fresh(c, "r0.2")
    caught_up(c, "r0.2")
    actions = c.handle(9.0, m.SparesWorth(number=0, reason="calm"))
    [told] = held(actions)
    assert (told["number"], sorted(told["replicas"])) == (0, ["r2.1", "r3.1"]), (
        "the last slots; who trains there hands over"
    )
    assert c.planned is not None
    assert sorted(c.planned.members) == ["r0.2", "r1.1"]


def test_a_coordinator_that_takes_over_holds_as_many_spares() -> None:
    c = fleet(spares=0, auto_spares=True)
    actions = c.handle(1.0, m.SparesWorth(number=1))
    [*_, record] = [a.record for a in actions if isinstance(a, m.Persist)]
    assert record.spares == 1
    successor = Coordinator(Settings(num_replicas=2, num_agents=2, auto_spares=True), 2, record)
    assert successor.settings.num_spares == 1
    assert Coordinator(Settings(num_replicas=2, num_agents=2), 2, record).settings.num_spares == 0, "not left to it"


def test_no_number_of_spares_is_taken_where_it_was_given_or_the_run_ends() -> None:
    fixed = fleet()
    assert held(fixed.handle(1.0, m.SparesWorth(number=0))) == []
    assert fixed.settings.num_spares == 1
    c = fleet(spares=0, auto_spares=True)
    c.handle(1.0, m.Exited(member="r0.1", cause="signal", code=-9))
    assert held(c.handle(1.0, m.SparesWorth(number=2))) == [], "while a view is being made"


@pytest.mark.parametrize(("step", "lost"), [(395, 0), (394, 0), (273, 122)])
def test_a_spare_that_was_behind_and_takes_the_last_members_place_costs_the_steps_between(step: int, lost: int) -> None:
    """It had been stopped, and the member trained on: 122 steps were made again, and nothing was said to be lost."""
    c = fleet(replicas=1)
    c.handle(1.0, m.Exited(member="r0.1", cause="signal", committed=395, last_alive_s=0.9, noticed_at_s=1.0))
    assert c.view is not None
    assert c.view.members == ("r1.1",)
    c.handle(1.0, m.Formed(member="r1.1", view=c.view.id, step=step, left_at_s=1.0, formed_at_s=1.1))
    assert [record["lost_steps"] for _, record in c.reports.mended] == [lost]
