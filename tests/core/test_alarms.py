"""Alarms in the coordinator: work moves before the host fails, and only where that is cheaper; tests settle doubts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from outlast.core import events as ev
from outlast.core.policy import AlarmDecision, AlarmKind, AlarmPolicy
from outlast.core.protocol import Coordinator, Settings
from outlast.core.protocol import messages as m
from outlast.core.protocol.host_messages import HostHere
from outlast.plan import FailureClass, Job, simulate
from outlast.plan._analytic import analyse


def hello(name: str, agent: str, **fields: Any) -> m.Hello:
    return m.Hello(member=name, agent=agent, epoch=0, **fields)


def alarm(
    agent: str, action: str = "fatal", evidence: str = "xid.fatal: 79", source: Any = "readings"
) -> m.DeviceNoted:
    return m.DeviceNoted(member=agent, device="gpu0", source=source, evidence=evidence, action=action, remedy="")


def fleet(num_spares: int = 1, agents: tuple[str, ...] = ("a0", "a1"), **settings: Any) -> Coordinator:
    """Two replicas in a formed view and spares that are ready, dealt to agents in turn."""
    c = Coordinator(Settings(num_replicas=2, num_spares=num_spares, num_agents=len(agents), **settings), 1)
    for agent in agents:
        c.handle(0.0, m.AgentHello(agent=agent, pid=1))
    for index in range(2 + num_spares):
        c.handle(0.0, hello(f"r{index}.1", agents[index % len(agents)], state="fresh"))
    assert c.view is not None
    for name in c.view.members:
        c.handle(0.0, m.Formed(member=name, view=c.view.id, step=0))
    for index in range(2, 2 + num_spares):
        peer = c.roster.peers[f"r{index}.1"]
        c.handle(0.0, m.Ready(member=peer.name, step=0, serve=peer.serve))
    return c


def weighed(actions: list[m.Action]) -> list[dict[str, Any]]:
    return [dict(a.fields) for a in actions if isinstance(a, m.JournalEntry) and a.kind == "alarm_weighed"]


def planned(c: Coordinator) -> tuple[str, ...]:
    return c.planned.members if c.planned is not None else ()


def test_a_fatal_alarm_moves_work_to_a_spare_elsewhere_between_two_steps() -> None:
    c = fleet()
    actions = c.handle(10.0, alarm("a1"))
    (said,) = weighed(actions)
    assert (said["action"], said["replicas"], said["successors"]) == ("move", ["r1.1"], ["r2.1"])
    assert said["costs"]["move"] < said["costs"]["wait"]
    assert planned(c) == ("r0.1", "r2.1")
    assert c.change is None, "nobody is told to leave in the middle of a step"
    for name in planned(c):
        actions = c.handle(11.0, m.Formed(member=name, view=c.planned.id if c.planned else c.view.id, step=3))
    closed = [a.to for a in actions if isinstance(a, m.Tell) and a.message == m.Close(epoch=1, reason=m.DEPARTED)]
    assert closed == [("r1.1",)]
    actions = c.handle(12.0, m.Exited(member="r1.1", cause="left", code=0))
    assert not c.reports.faults
    started = [(a.to, a.message.member) for a in actions if isinstance(a, m.Tell) and isinstance(a.message, m.Spawn)]
    assert started == [(("a0",), "r1.2")], "its slot is filled on the host that is well"


def test_a_warning_is_not_worth_a_move_until_it_has_come_true_often() -> None:
    c = fleet()
    (said,) = weighed(c.handle(10.0, alarm("a1", "warning", "edac.ce rose by 200 to 300")))
    assert (said["action"], said["replicas"]) == ("wait", [])
    for number in range(40):
        c.prognosis = c.prognosis.alarm(f"x{number}", "warning edac.ce", 10.0).failed(f"x{number}", 20.0)
    c.outages.append(60.0)
    c.handle(11.0, m.Timer(name="outlook:a1"))
    assert planned(c) == ("r0.1", "r2.1")


def test_a_move_costs_what_moves_have_cost_and_the_end_of_who_was_in_no_view_costs_nothing() -> None:
    c = fleet(2, ("a0", "a1", "a2", "a3"))
    c.handle(10.0, alarm("a1"))
    assert c.planned is not None
    for name, took_s in zip(c.planned.members, (0.04, 0.06), strict=True):
        view = c.planned.id
        c.handle(11.0, m.Formed(member=name, view=view, step=3, left_at_s=50.0, formed_at_s=50.0 + took_s))
    c.journal("recovery", downtime_s=0.0)
    assert c.outages == []
    c.outages.append(0.3)
    (said,) = weighed(c.handle(20.0, alarm("a0")))
    assert said["costs"]["move"] == pytest.approx(0.06)
    assert said["costs"]["wait"] < 0.3


def test_the_only_holders_of_the_state_stay_though_another_host_has_room() -> None:
    """Nobody is started in a slot that lives, so who left would leave nobody to go on."""
    c = Coordinator(Settings(num_replicas=1, num_spares=0, num_agents=2), 1)
    for agent in ("a0", "a1"):
        c.handle(0.0, m.AgentHello(agent=agent, pid=1))
    c.handle(0.0, hello("r0.1", "a0", state="fresh"))
    assert c.view is not None
    c.handle(0.0, m.Formed(member="r0.1", view=c.view.id, step=0))
    c.outages += [600.0] * 3
    (said,) = weighed(c.handle(10.0, alarm("a0")))
    assert said["action"] != "move"
    assert not c.over
    assert not c.roster.peers["r0.1"].leaving


def test_where_there_is_no_other_host_nothing_moves_and_a_save_is_asked_for_if_there_are_checkpoints() -> None:
    for facts, action in (({}, "wait"), ({"checkpoints": "{}"}, "save")):
        c = fleet(0, ("a0",))
        c.facts = dict(facts)
        (said,) = weighed(c.handle(1000.0, alarm("a0")))
        assert said["action"] == action
        assert not planned(c)
        again = c.handle(1001.0, m.Timer(name="outlook:a0"))
        assert not weighed(again), "one save an alarm, while it is fresh"


def test_telling_does_nothing() -> None:
    c = fleet(on_alarm="tell")
    (said,) = weighed(c.handle(10.0, alarm("a1")))
    assert said["action"] == "move"
    assert said["told_only"]
    assert not planned(c)


def test_a_doubted_host_gets_replicas_again_once_it_passed_a_test_and_never_if_it_failed() -> None:
    for result, agents in (("passed", {"a0", "a1"}), ("failed", {"a0"}), ("untested", {"a0"})):
        c = fleet()
        c.handle(10.0, alarm("a1"))
        c.handle(12.0, alarm("a1", result, "tested", source="test"))
        assert c.roster.agents - c.roster.barred - c.roster.doubted == agents, result


def test_an_alarm_that_nothing_follows_ends_by_itself() -> None:
    c = fleet()
    c.handle(10.0, alarm("a1"))
    assert c.roster.doubted == {"a1"}
    c.handle(10.0 + 5 * 600 + 1, m.Timer(name="outlook:a1"))
    assert not c.roster.doubted
    assert c.prognosis.kind("fatal xid.fatal").num_false == 0, "nobody can know: its work had gone elsewhere"
    c = fleet(on_alarm="tell")
    c.handle(10.0, alarm("a1"))
    c.handle(10.0 + 5 * 600 + 1, m.Timer(name="outlook:a1"))
    assert c.prognosis.kind("fatal xid.fatal").num_false == 1


def test_what_runs_before_have_taught_is_where_a_run_begins() -> None:
    c = fleet(alarm_kinds={"fatal xid.fatal": AlarmKind(num_false=200.0)})
    (said,) = weighed(c.handle(10.0, alarm("a1")))
    assert said["action"] == "wait"


def test_deaths_of_one_host_at_once_are_one_failure_that_was_foretold() -> None:
    c = fleet(2, on_alarm="tell")
    c.handle(10.0, alarm("a1"))
    c.handle(30.0, m.AgentGone(agent="a1", cause="signal 9"))
    assert (c.prognosis.failures, c.prognosis.foretold) == (1, 1)
    assert "a1" not in c.alarms


def test_members_cannot_raise_an_alarm_of_a_host() -> None:
    c = fleet()
    c.handle(10.0, alarm("r1.1"))
    assert not c.prognosis.open
    c.handle(10.0, alarm("nobody"))
    assert not c.prognosis.open


def test_all_hosts_doubted_is_no_reason_to_stop() -> None:
    c = fleet()
    c.handle(10.0, alarm("a1"))
    c.handle(10.1, alarm("a0"))
    assert not c.over
    assert planned(c)
    assert len(weighed(c.handle(10.2, alarm("a0")))) == 1


def test_an_agent_that_is_out_of_service_gets_no_replica_unless_there_is_no_other() -> None:
    def started_on(retired: frozenset[str]) -> set[str]:
        c = Coordinator(Settings(num_replicas=2, num_agents=2, retired=retired), 1)
        actions = [a for agent in ("a0", "a1") for a in c.handle(0.0, m.AgentHello(agent=agent, pid=1))]
        return {a.to[0] for a in actions if isinstance(a, m.Tell) and isinstance(a.message, m.Spawn)}

    assert started_on(frozenset()) == {"a0", "a1"}
    assert started_on(frozenset({"a1"})) == {"a0"}
    assert started_on(frozenset({"a0", "a1"})) == {"a0", "a1"}


def test_an_agent_on_probation_computes_only_where_no_other_has_room_and_what_it_gets_is_tested() -> None:
    def dealt(slots: int, replicas: int, spares: int = 0, probation: str = "a0") -> dict[str, tuple[str, bool]]:
        settings = Settings(num_replicas=replicas, num_spares=spares, num_agents=2, probation=frozenset({probation}))
        c = Coordinator(settings, 1)
        c.roster.slots.update({"a0": slots, "a1": slots})
        actions = [a for agent in ("a0", "a1") for a in c.handle(0.0, m.AgentHello(agent=agent, pid=1))]
        spawns = [(a.to[0], a.message) for a in actions if isinstance(a, m.Tell) and isinstance(a.message, m.Spawn)]
        return {spawn.member: (agent, spawn.tested) for agent, spawn in spawns}

    assert dealt(2, 2) == {"r0.1": ("a1", False), "r1.1": ("a1", False)}
    assert dealt(2, 3)["r2.1"] == ("a0", True), "nobody else has room"
    assert dealt(4, 2, spares=1)["r2.1"] == ("a0", True), "a spare does no work yet"
    assert dealt(0, 1) == {"r0.1": ("a1", False)}
    assert dealt(0, 2)["r1.1"] == ("a0", True), "where nobody says how much room there is, it has its share"
    assert {agent for agent, tested in dealt(2, 2, probation="none").values() if not tested} == {"a0", "a1"}


def test_a_host_that_joined_is_known_by_its_name_whatever_its_process_is_called() -> None:
    def dealt(**settings: Any) -> dict[str, tuple[str, bool]]:
        c = Coordinator(Settings(num_replicas=2, num_agents=2, **settings), 1)
        c.roster.slots.update({"a0": 2, "h1:4fa0": 2})
        actions = [a for agent in ("a0", "h1:4fa0") for a in c.handle(0.0, m.AgentHello(agent=agent, pid=1))]
        spawns = [(a.to[0], a.message) for a in actions if isinstance(a, m.Tell) and isinstance(a.message, m.Spawn)]
        return {spawn.member: (agent, spawn.tested) for agent, spawn in spawns}

    assert {agent for agent, _ in dealt().values()} == {"a0", "h1:4fa0"}
    for settings in ({"probation": frozenset({"h1:"})}, {"retired": frozenset({"h1:"})}):
        assert {agent for agent, _ in dealt(**settings).values()} == {"a0"}
    assert set(dealt(probation=frozenset({"h1:", "a0"})).values()) == {("a0", True), ("h1:4fa0", True)}


@pytest.mark.parametrize(("noted", "dealt"), [("", {"a0", "h1:4fa0"}), ("probation", {"a0"}), ("retired", {"a0"})])
def test_what_a_hosts_own_diary_says_of_it_counts_as_the_runs_does(noted: Any, dealt: set[str]) -> None:
    c = Coordinator(Settings(num_replicas=2, num_agents=2), 1)
    c.roster.slots["a0"] = 2
    c.handle(0.0, HostHere(agent="h1:4fa0", host="h1", place="p", pid=1, slots=2, noted=noted))
    actions = [a for agent in ("a0", "h1:4fa0") for a in c.handle(0.0, m.AgentHello(agent=agent, pid=1))]
    assert {a.to[0] for a in actions if isinstance(a, m.Tell) and isinstance(a.message, m.Spawn)} == dealt
    assert c.roster.on_probation("h1:4fa0") == (noted == "probation")
    c.handle(1.0, HostHere(agent="h1:4fa0", host="h1", place="p", pid=1, slots=2))  # mended, and said anew
    assert not c.roster.on_probation("h1:4fa0")
    assert not c.roster.retired_agents


class Record:
    """A coordinator with its record: what is written down, as events and as the durable state."""

    APART_S = 5000.0

    def __init__(self, coordinator: Coordinator) -> None:
        self.c, self.story, self.durable = coordinator, [], m.FleetRecord()
        coordinator.persist()
        self._take(0.0, coordinator.handle(0.0, m.Resumed()))

    def handle(self, now_s: float, event: Any) -> None:
        self._take(now_s, self.c.handle(now_s, event))

    def _take(self, now_s: float, actions: list[m.Action]) -> None:
        for action in actions:
            if isinstance(action, m.Persist):
                self.durable = action.record
            elif isinstance(action, m.JournalEntry):
                told = {"kind": action.kind, "at_s": now_s + self.APART_S, **action.fields}
                self.story.append(msgspec.convert(told, ev.AnyEvent))

    def successor(self, clock_s: float) -> Coordinator:
        """Another coordinator on the same record, whose clock is ahead by `clock_s`."""
        after = Coordinator(self.c.settings, 2, self.durable)
        after.recall(self.story, self.APART_S - clock_s)
        return after


def believed(c: Coordinator, clock_s: float = 0.0) -> dict[str, Any]:
    return {
        "open": {agent: (name, at_s - clock_s) for agent, (name, at_s) in c.prognosis.open.items()},
        "kinds": dict(c.prognosis.kinds), "empty": c.prognosis.empty, "alarms": dict(c.alarms),
        "counts": (c.prognosis.failures, c.prognosis.foretold), "barred": c.roster.barred, "doubted": c.roster.doubted,
        "saved": c.saved_s - clock_s, "outages": c.outages,
    }  # fmt: skip


WARNING = ("warning", "edac.ce rose by 200 to 300")


@pytest.mark.parametrize(
    "happened",
    [
        [alarm("a1")],
        [alarm("a1"), alarm("a1", "passed", source="test")],
        [alarm("a1"), alarm("a1", "failed", source="test")],
        [alarm("a1", *WARNING), alarm("a0"), m.AgentGone(agent="a1", cause=""), alarm("a0", "passed", source="test")],
        [alarm("r1.1", source="checks"), alarm("a0", *WARNING), m.Exited(member="r0.1", cause="signal")],
    ],
)  # fmt: skip
def test_a_restarted_coordinator_knows_the_alarms_of_the_one_before_it(happened: list[Any]) -> None:
    run = Record(fleet(2))
    for name, peer in list(run.c.roster.peers.items()):
        run.handle(1.0, m.Spawned(member=name, agent=peer.agent, pid=1))
    for number, event in enumerate(happened):
        run.handle(10.0 + number, event)
        assert believed(run.successor(300.0), 300.0) == believed(run.c)


def test_a_move_that_a_dying_coordinator_had_only_told_is_made_by_the_next_one() -> None:
    run = Record(fleet())
    run.handle(10.0, alarm("a1"))
    view = run.c.view
    assert view is not None
    durable = msgspec.structs.replace(run.durable, planned=None)
    after = Coordinator(run.c.settings, 2, durable)
    after.recall(run.story, run.APART_S)
    assert not planned(after)
    timers: list[str] = []
    for agent in ("a0", "a1"):
        under = tuple(name for name, peer in run.c.roster.peers.items() if peer.agent == agent)
        actions = after.handle(20.0, m.AgentHello(agent=agent, pid=1, members=under))
        timers += [a.name for a in actions if isinstance(a, m.SetTimer) and a.name.startswith("outlook")]
    assert timers == ["outlook:a1"]
    for name, peer in run.c.roster.peers.items():
        state: Any = "member" if name in view.members else "ready"
        after.handle(20.0, hello(name, peer.agent, state=state, view=view, formed=state == "member"))
    spare = after.roster.peers["r2.1"]
    after.handle(20.5, m.Ready(member="r2.1", step=0, serve=spare.serve))
    after.handle(25.0, m.Timer(name="outlook:a1"))
    for (
        name
    ) in view.members:  # a new coordinator gives no orders in another one's view: all leave it, between two steps
        after.handle(25.1, m.Left(member=name, view=view.id))
    assert after.view is not None
    assert after.view.members == ("r0.1", "r2.1")


FORETOLD = Job(
    classes=(FailureClass(name="told", node_mtbf_h=500.0, predicted=0.8, precision=0.7, notice_s=600.0),),
    accelerators=512, days=4.0, interval="fixed", interval_s=1800.0, planned_stop_s=60.0,
)  # fmt: skip


def test_the_policy_replaced_changes_the_coordinator_and_the_simulation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether an alarm is acted upon is one object's: who waits in the run has no planned stop in the plan."""

    def moved() -> tuple[str, ...]:
        c = fleet()
        c.handle(10.0, alarm("a1"))
        return planned(c)

    def stops() -> tuple[int, int, float]:
        many, alone = simulate(FORETOLD, 8, seed=1), simulate(FORETOLD, 1, seed=1)
        return int(many.planned.sum()), int(alone.planned.sum()), analyse(FORETOLD).mtbi_h

    before = stops()
    assert moved() == ("r0.1", "r2.1")
    assert min(before) > 0
    own = AlarmPolicy.decide

    def waits(self: AlarmPolicy, belief: Any, state: Any) -> AlarmDecision:
        return replace(own(self, belief, state), acts=False)

    monkeypatch.setattr(AlarmPolicy, "decide", waits)
    assert moved() == ()
    assert stops()[:2] == (0, 0)
    assert stops()[2] > before[2], "nor one in vain"


def test_a_planned_job_acts_on_no_alarm_that_costs_more_than_it_saves() -> None:
    def worth(**changes: Any) -> float:
        (told,) = FORETOLD.classes
        seen = msgspec.structs.replace(told, **changes)
        blind = msgspec.structs.replace(told, predicted=0.0)
        with_it, without = (msgspec.structs.replace(FORETOLD, classes=(c,)) for c in (seen, blind))
        return analyse(with_it).chain - analyse(without).chain

    assert worth() > 0.03
    assert worth(precision=0.005) == worth(notice_s=10.0) == 0.0, "mostly false, or later than a save takes"
    assert analyse(msgspec.structs.replace(FORETOLD, on_alarm="tell")).chain < analyse(FORETOLD).chain
    for share in (0.01, 0.03, 0.1, 0.3, 1.0):
        assert worth(precision=share) >= 0.0


def test_a_job_that_saves_often_stops_for_what_costs_less_than_half_its_interval() -> None:
    """What is unsaved counts also where it is less than half of the time between two weighings, here 450 s."""
    (told,) = FORETOLD.classes
    told = msgspec.structs.replace(told, detection_s=10.0, notice_s=3600.0, precision=1.0)
    tier = msgspec.structs.replace(FORETOLD.tiers[0], recovery_s=20.0, write_s=2.0)

    def planned(stop_s: float) -> float:
        job = msgspec.structs.replace(
            FORETOLD, classes=(told,), tiers=(tier,), interval="fixed", interval_s=400.0, planned_stop_s=stop_s
        )
        return float(simulate(job, 4, seed=1).planned.sum())

    assert planned(215.0) > 0, "10 s to notice it, 20 s to go back, 200 s of work"
    assert planned(245.0) == 0
