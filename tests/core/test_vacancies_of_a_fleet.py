"""Replicas are lost and no spare is there: what the coordinator makes of the policy's word."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from outlast.core.policy import Replacements, VacancyDecision, VacancyPolicy
from outlast.core.protocol import Coordinator, Member, Settings
from outlast.core.protocol import messages as m
from outlast.core.protocol import operator_messages as om
from outlast.core.protocol.delta import apply, diff
from outlast.core.protocol.step.todo import Wait
from outlast.core.protocol.types import View, ViewId

NAMES = ("r0.1", "r1.1", "r2.1")


def hello(c: Coordinator, name: str, at_s: float, agent: str = "a0") -> list[m.Action]:
    facts = dict(c.facts) or {"microbatches": "6", "checkpoints": "yes"}
    return c.handle(at_s, m.Hello(member=name, agent=agent, epoch=0, state="fresh", facts=facts))


def form(c: Coordinator, at_s: float) -> list[m.Action]:
    view, actions = c.planned or c.view, list[m.Action]()
    assert view is not None
    for name in view.members:
        actions += c.handle(at_s, m.Formed(member=name, view=view.id, step=3))
    return actions


def fleet(kind: Any = "wait", *, patience_s: float = 60.0, price: float = 0.0, **settings: Any) -> Coordinator:
    policy = VacancyPolicy(kind=kind, patience_s=patience_s, price=price)
    c = Coordinator(Settings(num_replicas=3, backoff_s=0.0, vacancies=policy, **settings), 1)
    c.handle(0.0, m.AgentHello(agent="a0", pid=1))
    for name in NAMES:
        hello(c, name, 0.0)
    form(c, 0.0)
    return c


def dies(c: Coordinator, *names: str, at_s: float = 10.0) -> list[m.Action]:
    """They die, the others leave and form the view that follows."""
    assert c.view is not None
    before, actions = c.view, list[m.Action]()
    for name in names:
        actions += c.handle(at_s, m.Exited(member=name, cause="signal", code=-9))
    for name in c.roster.alive(before.members):
        actions += c.handle(at_s, m.Left(member=name, view=before.id))
    return actions + form(c, at_s)


def comes(c: Coordinator, name: str, at_s: float) -> list[m.Action]:
    """A replacement catches up."""
    hello(c, name, at_s)
    return c.handle(at_s, m.Ready(member=name, step=3, serve=c.roster.peers[name].serve))


def told(actions: list[m.Action]) -> list[dict[str, Any]]:
    return [a.fields for a in actions if isinstance(a, m.JournalEntry) and a.kind == "vacancy_decided"]


def now(c: Coordinator) -> tuple[int, bool]:
    """(members of the newest view, whether it is held)."""
    view = c.planned or c.view
    assert view is not None
    return len(view.members), view.held


def over(c: Coordinator, at_s: float) -> list[m.Action]:
    return c.handle(at_s, m.Timer(name="vacancy"))


def test_without_a_word_those_that_are_left_go_on_and_nothing_is_told() -> None:
    c = Coordinator(Settings(num_replicas=3, backoff_s=0.0), 1)
    c.handle(0.0, m.AgentHello(agent="a0", pid=1))
    for name in NAMES:
        hello(c, name, 0.0)
    form(c, 0.0)
    assert told(dies(c, "r1.1")) == []
    assert now(c) == (2, False)


def test_they_wait_until_a_replacement_is_there() -> None:
    c = fleet()
    actions = dies(c, "r1.1")
    [said] = told(actions)
    assert (said["action"], said["running"], said["wanted"], said["wait_s"]) == ("wait", 2, 3, 60.0)
    assert said["reason"] == (
        "2 of 3 replicas are left and no spare; another is expected within 30 s; it waits for up to 60 s, "
        "as on_vacancy = wait says"
    )
    assert now(c) == (2, True)
    assert any(isinstance(a, m.SetTimer) and a.name == "vacancy" for a in actions)
    assert told(comes(c, "r1.2", 20.0)) == []
    assert now(c) == (3, False)
    form(c, 21.0)
    assert told(dies(c, "r0.1", at_s=500.0))[0]["wait_s"] == 60.0, "the next wait is a new one"


def test_a_wait_that_is_over_goes_on_with_fewer_by_a_planned_view() -> None:
    c = fleet()
    dies(c, "r1.1")
    assert told(over(c, 69.0)) == []
    assert now(c) == (2, True)
    [said] = told(over(c, 70.1))
    assert (said["action"], "after 60.1 s of waiting" in said["reason"]) == ("shrink", True)
    assert now(c) == (2, False)
    form(c, 71.0)
    assert told(comes(c, "r1.2", 72.0)) == []
    assert now(c) == (3, False), "who comes later joins as ever"


def test_a_wait_goes_on_through_another_death_and_a_replacement_of_two() -> None:
    c = fleet()
    dies(c, "r1.1")
    assert told(dies(c, "r2.1", at_s=30.0)) == []
    assert now(c) == (1, True)
    comes(c, "r1.2", 40.0)
    assert now(c) == (2, True)
    form(c, 41.0)
    assert told(over(c, 70.1))[0]["action"] == "shrink", "since the first death"


def test_none_wait_where_no_other_may_come() -> None:
    c = fleet(max_restarts=0)
    assert told(dies(c, "r1.1")) == []
    assert now(c) == (2, False)


def test_fewer_than_the_least_stop_after_a_save_and_once_a_coordinator() -> None:
    c = fleet("shrink", min_replicas=2)
    dies(c, "r1.1")
    assert now(c) == (2, False)
    assert told(dies(c, "r2.1", at_s=20.0))[0]["action"] == "wait"
    actions = over(c, 80.1) + form(c, 80.2)
    [said] = told(actions)
    assert (said["action"], now(c)) == ("stop", (1, False)), "a step is made, to be saved"
    assert "fewer than the 2 that may go on" in said["reason"]
    assert told(c.handle(81.0, m.ReplacementsBelieved(expected_s=1.0, reshape_s=1.0, restart_s=1.0))) == []
    [*_, record] = [a.record for a in actions if isinstance(a, m.Persist)]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(record), type=m.FleetRecord).stopping == record.stopping
    successor = Coordinator(c.settings, 2, record)
    assert successor.shortage.stopping == said["reason"]


def test_what_costs_more_than_it_is_worth_stops_where_something_is_saved() -> None:
    c = fleet("auto", price=0.9)
    c.handle(1.0, m.ReplacementsBelieved(expected_s=3600.0, reshape_s=1.0, restart_s=60.0))
    assert told(dies(c, "r1.1"))[0]["action"] == "stop"
    c = fleet("auto", price=0.9)
    c.facts = {"microbatches": "6"}
    c.handle(1.0, m.ReplacementsBelieved(expected_s=3600.0, reshape_s=1.0, restart_s=60.0))
    assert told(dies(c, "r1.1"))[0]["action"] == "shrink"


def test_a_coordinator_that_takes_over_has_them_wait_on() -> None:
    c = fleet()
    [*_, record] = [a.record for a in dies(c, "r1.1") if isinstance(a, m.Persist)]
    after = Coordinator(c.settings, 2, record)
    after.handle(20.0, m.AgentHello(agent="a0", pid=1, members=("r0.1", "r2.1", "r1.2")))
    actions = list[m.Action]()
    assert record.view is not None
    for name in record.view.members:
        said = {"member": name, "agent": "a0", "epoch": 1, "view": record.view, "formed": True, "state": "member"}
        actions += after.handle(20.0, m.Hello(facts=dict(after.facts), **said))
    actions += after.handle(20.0, m.Hello(member="r1.2", agent="a0", epoch=0, state="fresh", facts=dict(after.facts)))
    assert now(after) == (2, True)
    assert [a.after_s for a in actions if isinstance(a, m.SetTimer) and a.name == "vacancy"][-1] == pytest.approx(
        60.001
    )


def test_a_run_begins_with_no_fewer_than_may_go_on() -> None:
    c = Coordinator(Settings(num_replicas=3, min_replicas=2), 1)
    c.handle(0.0, m.AgentHello(agent="a0", pid=1))
    hello(c, "r0.1", 0.0)
    c.handle(9.0, m.Timer(name="gather"))
    assert c.view is None
    hello(c, "r2.1", 10.0)
    assert now(c) == (2, False)
    alone = Coordinator(Settings(num_replicas=3, min_replicas=2), 1)
    alone.handle(0.0, m.AgentHello(agent="a0", pid=1))
    hello(alone, "r0.1", 0.0)
    [end] = [a for a in alone.handle(600.0, m.Timer(name="start")) if isinstance(a, m.Finish)]
    assert (end.exit_code, "min_replicas asks for 2" in end.detail) == (3, True)


def test_members_of_a_held_view_compute_nothing_and_hear_it_in_a_difference_too() -> None:
    base = View(id=ViewId(1, 1), members=("a", "b", "c"))
    view = View(id=ViewId(1, 2), members=("a", "b"), held=True)
    assert apply(base, diff(base, view)) == view
    member = Member("a", 4)
    member.state = "member"
    member.told(m.Install(epoch=1, view=view, cause=""))
    member.formed = True
    assert member.next() == Wait(why="held back")


def test_the_policy_replaced_changes_what_the_coordinator_does(monkeypatch: pytest.MonkeyPatch) -> None:
    def waits(self: Any, belief: Replacements, state: Any) -> VacancyDecision:
        return VacancyDecision(shrink=False, stop=False, wait_s=math.inf)

    monkeypatch.setattr(VacancyPolicy, "decide", waits)
    c = fleet("shrink")
    assert told(dies(c, "r1.1"))[0]["wait_s"] is None
    assert now(c) == (2, True)


def test_who_waits_makes_the_step_that_a_stop_is_saved_with() -> None:
    c = fleet()
    dies(c, "r1.1")
    assert now(c) == (2, True)
    assert told(c.handle(20.0, m.SaveAwaited(waits=True))) == []
    assert now(c) == (2, False)
    form(c, 21.0)
    assert told(dies(c, "r2.1", at_s=22.0)) == []
    assert now(c) == (1, False), "nor does anybody wait for whom it loses meanwhile"
    c.handle(23.0, m.SaveAwaited(waits=False))
    comes(c, "r1.2", 24.0)
    form(c, 24.0)
    assert told(dies(c, "r1.2", at_s=25.0))[0]["wait_s"] == 60.0, "it was a departure, and the run goes on"


def spread(kind: Any = "wait", **settings: Any) -> Coordinator:
    """A fleet of three, on as many hosts, of which an alarm has it move at once."""
    policy = VacancyPolicy(kind=kind, patience_s=60.0)
    c = Coordinator(
        Settings(num_replicas=3, num_agents=3, backoff_s=0.0, failure_s=1e4, vacancies=policy, **settings), 1
    )
    for host in range(3):
        c.handle(0.0, m.AgentHello(agent=f"h{host}:a", pid=1))
    for name in NAMES:
        hello(c, name, 0.0, agent=c.roster.peers[name].agent)
    form(c, 0.0)
    return c


def alarm(host: str) -> m.DeviceNoted:
    evidence = "xid.fatal: 79"
    return m.DeviceNoted(member=f"{host}:a", device="", source="readings", evidence=evidence, action="fatal", remedy="")


ASKED = [
    om.EvictAsked(asker="o", replica="r1.1"), om.EvictAsked(asker="o", replica="r1.1", now=True),
    om.DrainAsked(asker="o", host="h1"), alarm("h1"),
]  # fmt: skip


@pytest.mark.parametrize("kind", ["wait", "stop"])
@pytest.mark.parametrize("asked", ASKED, ids=["evict", "evict now", "drain", "alarm"])
def test_who_goes_as_it_was_asked_to_is_not_lost(kind: str, asked: Any) -> None:
    c = spread(kind)
    assert c.roster.peers["r1.1"].agent == "h1:a"
    actions = c.handle(10.0, asked)
    actions += dies(c, "r1.1") if getattr(asked, "now", False) else form(c, 10.0)
    c.handle(11.0, m.Exited(member="r1.1", cause="left"))
    assert (told(actions), now(c), c.shortage.stopping) == ([], (2, False), "")
    lost = told(dies(c, "r2.1", at_s=20.0))
    assert [said["action"] for said in lost] == [kind], "but the next one is"


def test_whose_host_is_taken_away_is_lost() -> None:
    c = spread()
    assert told(c.handle(10.0, m.Departing(members=("r1.1",))))[0]["action"] == "wait"
    assert now(c) == (2, True)


def test_who_is_asked_to_leave_while_others_are_waited_for_ends_no_wait() -> None:
    c = spread()
    dies(c, "r1.1")
    c.handle(20.0, om.EvictAsked(asker="o", replica="r2.1"))
    assert now(c) == (1, True)


def test_nobody_is_asked_to_leave_where_too_few_would_be_left() -> None:
    c = spread("shrink", min_replicas=3)
    for asked in ASKED:
        said = [a.fields["text"] for a in c.handle(10.0, asked) if isinstance(a, m.JournalEntry) and a.kind == "asked"]
        assert said == ([] if asked is ASKED[-1] else ["2 replicas would be left, and min_replicas asks for 3"])
        assert (now(c), c.leaving, c.killed) == ((3, False), False, set())
    c.handle(11.0, om.ScaleAsked(asker="o", replicas=4))
    comes(c, "r3.1", 12.0)
    form(c, 12.0)
    assert told(c.handle(13.0, om.EvictAsked(asker="o", replica="r1.1"))) == []
    assert now(c) == (3, False)


def test_a_first_view_that_is_lost_before_it_formed_leaves_nobody_waiting_for_ever() -> None:
    """The driver reminds it of the first view's time once."""
    c = Coordinator(Settings(num_replicas=2, min_replicas=2, max_restarts=1, backoff_s=0.0), 1)
    c.handle(0.0, m.AgentHello(agent="a0", pid=1))
    hello(c, "r0.1", 0.0)
    hello(c, "r1.1", 0.0)
    c.handle(600.0, m.Timer(name="start"))
    actions = list[m.Action]()
    for name in ("r0.1", "r1.1"):
        actions += c.handle(700.0, m.Exited(member=name, cause="signal", code=-9))
    assert c.view is None
    assert [a.after_s for a in actions if isinstance(a, m.SetTimer) and a.name == "start"] == [600.0]
    hello(c, "r0.2", 701.0)
    [end] = [a for a in c.handle(1300.0, m.Timer(name="start")) if isinstance(a, m.Finish)]
    assert "min_replicas asks for 2" in end.detail
