"""How long no step was committed, as the striker's stopwatch has it: from who made a step first to who made the next
one first, on a machine that may be busy."""

from __future__ import annotations

import msgspec
import pytest
from tests.prove.test_strike_numbers import COMMITTED_S, STRUCK_S, commits, found, recovered, seen, story
from tests.prove.test_strikes import hit

from outlast.core import events as ev
from outlast.prove._commit_log import Commit
from outlast.prove._strike_numbers import number_findings
from outlast.prove.strike_plan import MICROBATCHES, STEPS
from outlast.prove.striker import Life


def lost_fleet(*told: ev.AnyEvent) -> list[ev.AnyEvent]:
    """r1.1 took over when r0.1 had died, said the step that it was handed, was stopped and killed; r0.2 went on from a
    checkpoint."""
    events = story(*told)
    end = next(n for n, event in enumerate(events) if isinstance(event, ev.Recovery))
    gone = [
        ev.ReplicaExited(at_s=117.9, replica="r1.1", cause="signal", detail="SIGKILL", noticed_by="agent", step=180),
        ev.FleetGone(at_s=118.0, step=180, detail="r1.1: signal"),
        ev.ViewInstalled(at_s=118.1, epoch=1, n=3, members=["r0.2"], cause="start", planned=False),
        ev.ViewFormed(at_s=118.2, epoch=1, n=3, step=100, roll_call_s=0.0),
    ]
    return [*events[:end], *gone, *events[end:]]


@pytest.mark.parametrize("again", [100, 179])
def test_a_pause_is_from_who_made_a_step_first_to_who_made_the_next_one_first_or_any_anew(again: int) -> None:
    """What is said once more in between, by who takes over or by a slower one, is no step that was made; the first step
    that is made again is, also where it is the newest."""
    before = [*commits()[:360], Commit(1015.2, 179, "0x1p0", "r1.1")]
    after = [Commit(1018.4 + 0.02 * n, again + n, "0x1p0", "r0.2") for n in range(STEPS - again)]
    for downtime_s, right in ((1018.4 - 1014.95, True), (1018.4 - 1015.2 - 0.1, False), (4.6, False)):
        events = lost_fleet(recovered(at_s=118.4, view=[1, 3], downtime_s=downtime_s, lost_steps=180 - again))
        done = [msgspec.structs.replace(hit(name), at_s=at_s) for name, at_s in (("r0.1", STRUCK_S), ("r1.1", 17.8))]
        names = found(seen(events=events, commits=[*before, *after], done=done))
        assert ("why: downtime" not in names) == right, (downtime_s, names)


def test_what_had_begun_before_the_first_commit_is_told_at_that_commit_and_perhaps_just_before_its_line() -> None:
    first_s = 1015.0 + COMMITTED_S - 115.0
    late = [Commit(first_s + 0.02 * step, step, "0x1p0", "r1.1") for step in range(STEPS)]
    for ahead_s in (0.0, 0.001):
        told = recovered(at_s=COMMITTED_S - ahead_s, step=0, downtime_s=5.2, microbatches_recomputed=0)
        assert "why: downtime" not in found(seen(told, commits=late))


def test_where_one_step_of_twenty_takes_as_long_anyway_nothing_stood_still() -> None:
    def busy(every: int) -> list[Commit]:
        found, at_s = [], 1006.0
        for step in range(STEPS):
            at_s += 0.36 if step % every == every - 1 else 0.05
            found.append(Commit(at_s + 0.15 * (step >= 63), step, "0x1p0", "r1.1"))
        return found

    calm = recovered(downtime_s=0.0, microbatches_recomputed=0)
    for every, right in ((8, True), (64, False)):
        of = busy(every)
        struck_s = of[62].at_s - 1000.0 + 0.02
        done = [msgspec.structs.replace(hit(), at_s=struck_s)]
        assert ("why: downtime" not in found(seen(calm, commits=of, done=done))) == right


def test_a_step_that_takes_as_long_as_those_just_before_it_is_no_standstill() -> None:
    """The first steps, as other processes start. What comes after is no excuse: the strike may have slowed it, too."""

    def starting(slow_s: float) -> list[Commit]:
        takes = [slow_s, slow_s, 0.3, 0.25, 0.25, *(0.02 for _ in range(STEPS - 5))]
        return [Commit(1006.0 + sum(takes[:n]), n, "0x1p0", "r1.1") for n in range(STEPS)]

    calm = recovered(downtime_s=0.0, microbatches_recomputed=0)
    for slow_s, right in ((0.22, True), (0.05, False)):
        of = starting(slow_s)
        done = [msgspec.structs.replace(hit(), at_s=of[2].at_s - 1000.0 + 0.02)]
        assert ("why: downtime" not in found(seen(calm, commits=of, done=done))) == right


def test_time_in_which_who_trains_is_ready_and_has_no_processor_is_no_standstill() -> None:
    """As a coordinator starts on a machine of two processors, say. It counts of who trained before and after alone: who
    joins may wait for a processor, and the others for it."""
    calm = recovered(downtime_s=0.0, microbatches_recomputed=0)
    until_s = commits()[359].at_s - 1000.0

    def told(who: str, queued_s: float) -> bool:
        of = seen(calm, commits=commits(still_s=0.3))
        looks = [(until_s - 0.025, 1.0), (until_s + 0.025, 1.0), (until_s + 0.325, 1.0 + queued_s)]
        life = Life(name=who, pid=1, first_s=1.0, last_s=19.0, queued=looks)
        record = msgspec.structs.replace(of.record, lives=[life])
        checks = number_findings(of.fleet, record, of.commits, of.events, MICROBATCHES)
        return "why: downtime" in {check for check, _ in checks}

    cases = [("r1.1", 0.0), ("r1.1", 0.05), ("r1.1", 0.28), ("r0.1", 0.28), ("r0.2", 0.28)]
    assert [told(*case) for case in cases] == [True, True, False, True, True]


@pytest.mark.parametrize(("before_s", "right"), [(0.02, True), (0.5, False)])
def test_of_a_standstill_that_lasts_to_the_end_of_the_run_nobody_is_left_to_tell(before_s: float, right: bool) -> None:
    of = seen(recovered(downtime_s=0.0, microbatches_recomputed=0), commits=commits(still_s=0.1))
    over_s = of.events[-1].at_s + 900.0
    until = [*(commit for commit in of.commits if commit.at_s < over_s - 2.0)][:-1]
    last = Commit(over_s - before_s, until[-1].step + 1, "0x1p0", "r1.1")
    done = [msgspec.structs.replace(hit(), at_s=until[-1].at_s - 1000.0 + 0.01)]
    record = msgspec.structs.replace(of.record, done=done)
    checks = number_findings(of.fleet, record, [*until, last], of.events, MICROBATCHES)
    assert ("why: downtime" not in {check for check, _ in checks}) == right


def test_who_died_before_it_had_brought_the_state_back_has_lost_no_steps_a_second_time() -> None:
    """The replacement that was to load a checkpoint is mended by the same view as the one that it stood in for."""
    before = commits()[:360]
    after = [Commit(1018.4 + 0.02 * n, 100 + n, "0x1p0", "r0.2") for n in range(STEPS - 100)]
    both = [
        recovered(replica=name, at_s=118.4, view=[1, 3], downtime_s=3.45, lost_steps=80) for name in ("r1.1", "r2.1")
    ]
    events = lost_fleet(*both)
    gone = next(n for n, event in enumerate(events) if isinstance(event, ev.FleetGone))
    died = ev.ReplicaExited(at_s=118.05, replica="r2.1", cause="signal", detail="SIGKILL", noticed_by="agent")
    events.insert(gone + 1, died)
    done = [msgspec.structs.replace(hit(name), at_s=17.8) for name in ("r1.1", "r2.1")]
    of = seen(events=events, commits=[*before, *after], done=done)
    for lost, right in ((80, True), (160, False)):
        record = msgspec.structs.replace(of.record, why=of.record.why | {"lost_steps": lost, "gone_steps": 0})
        names = {check for check, _ in number_findings(of.fleet, record, of.commits, of.events, MICROBATCHES)}
        assert ("why: lost steps" not in names) == right, (lost, names)


def test_who_was_killed_as_it_was_forked_was_struck_as_the_process_that_forks() -> None:
    """Its agent was stopped meanwhile, and it was never told as started. Who is killed as the run finishes is told by
    nobody."""
    early = ev.ReplicaExited(at_s=114.0, replica="r1.9", cause="signal", detail="SIGKILL", noticed_by="agent")
    told = recovered(replica="r1.9", downtime_s=0.0, microbatches_recomputed=0, at_s=114.0, detect_s=0.0)
    for name, right in (("nursery of a0", True), ("a0", False)):
        done = [msgspec.structs.replace(hit(name), at_s=13.9, role="nursery" if right else "agent"), hit()]
        assert ("journal: blame" not in found(seen(early, told, recovered(), done=done))) == right
