"""The adversary finds nothing in the protocol, and something in every broken one."""

import dataclasses
import itertools
import json
from collections.abc import Mapping

import msgspec
import pytest

from outlast.cli import main
from outlast.config import RunConfig
from outlast.core.policy import Admission, AdmissionPolicy
from outlast.errors import ConfigError
from outlast.plan.fleet_costs import FleetCosts, fleet_job
from outlast.prove.adversary import BROKEN, ScheduleFault, play, replayed, scenario_of, search, shrink
from outlast.prove.adversary._kernel import EventHeap, SimulatedProcess
from outlast.prove.adversary._network import Network
from outlast.runtime.exchange.rule_settings import row_settings


def test_three_hundred_schedules_break_nothing() -> None:
    """CI plays two thousand, these among them (`adversary` in .ci/run)."""
    tally = search(300, 1)
    assert tally.violations == []
    assert tally.num_schedules == 300
    assert tally.endings["finished"] > 240


@pytest.mark.campaign
@pytest.mark.timeout(1800)
def test_many_schedules_break_nothing() -> None:
    assert search(50_000, 1_000_000, jobs=2).violations == []


CAUGHT = {
    "told-before-durable": 558, "strangers-succeed": 557, "first-report-decides": 189, "lease-ignored": 322,
    "buffers-reused": 1378, "output-claimed": 1136, "first-step-blind": 160, "stale-taken": 309,
    "accusations-ignored": 234, "accuser-believed": 265, "held-orders-at-once": 1220, "older-read": 171,
    "no-closer-look": 98, "first-state-counts": 98, "culprits-kept": 98, "writer-not-followed": 203,
    "silence-is-death": 170, "silent-lease-over": 170, "silent-hosts-used": 1656, "silent-awaited": 291,
    "hosts-not-recalled": 291, "first-serving-kept": 10341, "begun-from-nothing": 171, "gaps-skipped": 35,
    "idle-unawaited": 436, "output-reused": 335, "share-kept": 242, "shares-lost-in-differences": 220,
    "answers-by-clock": 146, "late-writes-done": 194, "held-states-unseen": 13410,
    "copies-of-fed-steps-alone": 489, "spare-as-it-is": 2094, "stop-of-its-own": 126, "stop-unawaited": 126,
    "agents-forgotten": 36, "base-unchecked": 47, "no-goodbye": 28, "sums-believed": 81, "slices-believed": 24,
    "first-waits-for-nobody": 46, "slices-unchecked": 24, "neighbours-unawaited": 28, "lanes-unawaited": 28,
    "lanes-claimed": 28, "any-save-stops": 1080,
}  # fmt: skip
"""Where the first catch was last seen, to be looked at first. Any schedule below the limit will do."""


@pytest.mark.parametrize("name", BROKEN)
def test_every_broken_protocol_is_caught(name: str) -> None:
    limit = BROKEN[name][1]
    seeds = itertools.chain([CAUGHT.get(name, 0)], range(limit))
    caught = next((seed for seed in seeds if play(scenario_of(seed), name).violation is not None), None)
    assert caught is not None, f"{name} passed {limit} schedules"


def test_the_same_seed_gives_the_same_history() -> None:
    histories = []
    for _ in range(2):
        lines: list[tuple[float, str]] = []
        play(scenario_of(17), "", lambda at_s, text, lines=lines: lines.append((at_s, text)))  # type: ignore[misc]
        histories.append(lines)
    assert histories[0] == histories[1]
    assert len(histories[0]) > 50


def test_the_number_of_jobs_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outlast.prove.adversary._search._CHUNK", 20)  # each of two has some
    one, two = search(60, 4000, jobs=1), search(60, 4000, jobs=2)
    assert (one.num_events, one.num_views, one.endings) == (two.num_events, two.num_views, two.endings)


def test_a_violation_is_shrunk_and_its_command_replays_it() -> None:
    seed = next(s for s in itertools.count() if play(scenario_of(s), "counted-twice").violation is not None)
    found = shrink(seed, "counted-twice")
    full = scenario_of(seed)
    spec = found.command.split("--replay ")[1].split()[0]
    small = replayed(spec)
    assert len(small.faults) <= len(full.faults)
    again = play(small, "counted-twice").violation
    assert again is not None
    assert again.invariant == found.violation.invariant


def test_an_admission_policy_replaced_changes_the_run_the_plan_and_the_schedules(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it lets go on waits, and the other way round: for members of a run, in a plan, and in virtual time."""
    config = RunConfig(replicas=4, aggregation="trimmed_mean", f=1, rows=4)
    settings = row_settings(config, ["w"], 8)
    assert settings is not None
    costs = FleetCosts(
        stall_s=0.4, empty_s=4.0, usual_empty_s=3.5, restart_s=3.0, regrow_s=0.5, write_s=0.03, lag_s=0.2, step_s=0.3,
        outlasted=90, lost=9,
    )  # fmt: skip
    schedule = msgspec.structs.replace(scenario_of(936), faults=(), num_replicas=3, num_rows=3, rows_from=3)

    def told() -> tuple[str, str, float, bool]:
        job = fleet_job(costs, {"one": 20.0}, replicas=4, wall_s=600.0, min_s=0.5, lying=1)
        one_each, one_has_two = {"r0": 1, "r1": 1, "r2": 1, "r3": 1}, {"r0": 2, "r1": 1, "r2": 1}
        actions = settings.admit(one_each).action, settings.admit(one_has_two).action
        return *actions, job.classes[0].repair, play(schedule).finish is not None

    assert told() == ("go", "wait", 0.0, True)
    own = AdmissionPolicy.decide

    def turned(self: AdmissionPolicy, rows_of_host: Mapping[str, int]) -> Admission:
        found = own(self, rows_of_host)
        return dataclasses.replace(found, action="go" if found.action == "wait" else "wait")

    monkeypatch.setattr(AdmissionPolicy, "decide", turned)
    assert told() == ("wait", "go", 1.0, False)


def test_hosts_are_struck_whole_and_silence_is_all_that_is_heard_of_it() -> None:
    """Every kind of fault is drawn; no launcher tells of an end, and a host that comes back is used again."""
    seeds = [seed for seed in range(400) if scenario_of(seed).silence_s]
    kinds = {fault.kind for seed in seeds for fault in scenario_of(seed).faults}
    assert kinds >= {"host off", "host cut", "host hang", "hosts parted"}
    power = ScheduleFault(kind="host off", who=0, lasts=0.5, at=0.6)
    scenario = msgspec.structs.replace(
        scenario_of(170), faults=(power,), num_replicas=2, num_spares=1, num_agents=2, num_steps=30
    )
    said: list[str] = []
    outcome = play(scenario, "", lambda at_s, text: said.append(text))
    assert outcome.violation is None
    assert outcome.finish is not None
    assert outcome.finish.outcome == "finished"
    assert sum("hears HostSilent(agent='a0'" in text for text in said) == 1
    assert not any("AgentGone" in text for text in said)
    assert any("hears AgentHello(agent='b" in text for text in said)


def test_states_flip_while_others_are_waited_for() -> None:
    """Of every run that waits some do, at the moment at which a member begins to."""
    waits = [scenario_of(seed) for seed in range(1500) if scenario_of(seed).on_vacancy in ("wait", "auto")]
    flipped = [full for full in waits if any(f.kind == "state flip" and f.point == "held" for f in full.faults)]
    assert len(flipped) > 10
    assert all(full.guarded for full in flipped)


def test_a_coordinator_that_lost_the_record_lives_on_and_does_no_harm() -> None:
    """Every kind of fault is drawn. One whose host stands still with its clock is followed; it wakes up, hears
    heartbeats, answers none, stores nothing and ends; the run is the next one's."""
    seeds = [seed for seed in range(600) if scenario_of(seed).record_lease_s]
    kinds = {fault.kind for seed in seeds for fault in scenario_of(seed).faults}
    assert kinds >= {
        "record asleep", "record cut", "record cut up", "record cut down", "record stopped", "record slow",
        "record clock",
    }  # fmt: skip
    asleep = ScheduleFault(kind="record asleep", lasts=1.5, at=0.6)
    scenario = msgspec.structs.replace(
        scenario_of(seeds[0]), faults=(asleep,), num_replicas=2, num_spares=1, num_agents=2, num_steps=40,
        num_seats=2, record_lease_s=0.3, lease_s=1.0, tail=0.0,
    )  # fmt: skip
    said: list[str] = []
    outcome = play(scenario, "", lambda at_s, text: said.append(text))
    assert outcome.violation is None
    assert outcome.finish is not None
    assert outcome.finish.outcome == "finished"
    assert [text for text in said if "has claimed epoch" in text] == [
        "host 0 has claimed epoch 1", "host 1 has claimed epoch 2"
    ]  # fmt: skip
    assert sum("superseded by a newer coordinator" in text and "finishes" in text for text in said) == 1
    by_clock = play(scenario, "answers-by-clock").violation
    assert by_clock is not None
    assert by_clock.invariant == "Lease"


def test_what_cannot_be_replayed_says_why() -> None:
    with pytest.raises(ConfigError, match="is not a schedule"):
        replayed("12,faults=99")
    with pytest.raises(ConfigError, match="is not a schedule"):
        replayed("twelve")


def test_without_faults_a_run_finishes_in_one_view() -> None:
    for seed in range(40):
        quiet = replayed(f"{seed},faults=")
        outcome = play(quiet)
        assert outcome.violation is None
        assert outcome.finish is not None
        assert outcome.finish.steps == quiet.num_steps
        assert outcome.kills == 0


def test_a_stopped_process_gets_everything_later_and_an_ended_one_nothing() -> None:
    kernel = EventHeap(0)
    stopped, ended = SimulatedProcess(kernel, "a"), SimulatedProcess(kernel, "b")
    heard: list[int] = []
    for second in (1, 2, 3):
        kernel.after(second, stopped, heard.append, second)
        kernel.after(second, ended, heard.append, -second)
    stopped.pause()
    ended.end()
    kernel.run(10.0, 100)
    assert heard == []
    stopped.resume()
    assert heard == [1, 2, 3]


def test_a_channel_keeps_its_order_and_a_stalled_path_delivers_when_healed() -> None:
    kernel = EventHeap(3)
    network = Network(kernel, 0.01, 0.5)
    to = SimulatedProcess(kernel, "b")
    heard: list[int] = []
    for number in range(50):
        network.send(("one",), ("a", "b"), to, heard.append, number)
    network.stall("a", "b")
    for number in range(50, 60):
        network.send(("one",), ("a", "b"), to, heard.append, number)
    kernel.run(5.0, 1000)
    assert heard == list(range(50))
    network.heal("a", "b")
    kernel.run(10.0, 1000)
    assert heard == list(range(60))


def test_the_command_reports_and_fails_on_a_violation(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prove", "protocol", "--schedules", "50", "--jobs", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["violations"] == 0
    assert main(["prove", "protocol", "--schedules", "50", "--jobs", "1", "--variant", "norm-by-slices"]) == 8
    text = capsys.readouterr().out
    assert "VIOLATED Bits" in text
    assert "outlast prove protocol --replay 0," in text
    assert main(["prove", "protocol", "--replay", "0,faults="]) == 0
    assert main(["prove", "protocol", "--variant", "nonsense"]) == 2
    assert main(["prove", "protocol", "--schedules", "0"]) == 2


def test_faults_are_plain_data() -> None:
    assert all(isinstance(fault, ScheduleFault) for fault in scenario_of(5).faults)
    assert scenario_of(5) == scenario_of(5)
    assert scenario_of(5) != scenario_of(6)


FOUND = [2519557, 2059552, 2108743, 2214159, 3005020, 4549203, 4108821, 4153658, 192483, 6569]
FOUND += [2026112700041944, 2026112700058556, 2026112700126483, 2026112700313835]
FOUND += [20042341, 20070682, 20207226, 20229222, 1642, 1000085, 30000851, 30008196, 30037642, 31001217, 1000156]
FOUND += [35010262, 35015843, 40009499, 40043518, 40110664, 40198203, 40592764]


@pytest.mark.parametrize("seed", FOUND)
def test_schedules_that_once_found_something(seed: int) -> None:
    """A late copy of an agent's greeting that called living members dead; members that were given up rightly; one that
    woke up in a view that was over; one that had been let go; a fault after the last; the only host, back after its
    lease, that was told to start nothing; a coordinator that was followed as it ended the run; a host that fell silent
    while a new coordinator awaited others; members that had left, killed before they could greet a new coordinator; two
    rows for one member, so that all waited for others, of whom none was missing; members that had left, let go before
    the view without them had formed, and its members died; one with all steps that had yet to greet a new coordinator
    as that one called the run lost; one that was handed a step without what the loops had made of their state, by one
    that came in by replaying, after its stream had broken, by one that had been handed it, and by one that had read
    the step before in a save as its view did not form; one that had gone on
    without its agent, and whose host lost power; one that had left, and went on while all of the next view were cut
    off; one that had left with the newest step, and was forgotten where of the next view only a spare answered that
    was behind; one whose state was right, sent away by a wrong one and the copy of that; one that had to leave
    its host, and was on its way as the last one died; one that was still starting when training ended, and had to go
    although all was done again; a holder of the record whose machine slept, continued in its sleep."""
    assert play(scenario_of(seed)).violation is None
