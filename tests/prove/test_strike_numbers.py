"""What a lie about a recovery, or in the words that people are told, is found by; each beside the truth that is not."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from tests.prove.test_strikes import finished, hit, watched

from outlast import observe
from outlast.core import events as ev
from outlast.prove._commit_log import Commit
from outlast.prove._printed_text import Duration, duration_of, status_text
from outlast.prove._strike_numbers import number_findings
from outlast.prove.strike_findings import Watched
from outlast.prove.strike_plan import MICROBATCHES, STEPS
from outlast.prove.striker import StatusSample, StrikeDone

FORMED_S, COMMITTED_S = 115.3, 116.0  # Unix seconds: the striker's 0 was at 100
STRUCK_S = 15.02


def recovered(**changes: Any) -> ev.Recovery:
    """r0.1 of two was killed at 15.02 s, and the next step was committed at 16 s."""
    fields: dict[str, Any] = {
        "at_s": COMMITTED_S, "cause": "signal", "replica": "r0.1", "noticed_by": "agent", "detect_s": 0.04,
        "downtime_s": 1.05, "microbatches_recomputed": 4, "lost_steps": 0, "step": 180, "view": [1, 2],
    }  # fmt: skip
    return ev.Recovery(**fields | changes)


def story(*told: ev.AnyEvent) -> list[ev.AnyEvent]:
    start = msgspec.convert(
        {
            "at_s": 100.0,
            "run_id": "calm",
            "command": ["train.py"],
            "num_replicas": 2,
            "num_spares": 0,
            "config": {},
            "signature": {},
        },
        ev.RunStarted,
    )
    return [
        start,
        ev.AgentStarted(at_s=101.0, agent="a0", pid=5),
        *(ev.ReplicaStarted(at_s=101.0, replica=f"r{n}.1", agent="a0", pid=7 + n) for n in (0, 1)),
        ev.ViewInstalled(at_s=105.0, epoch=1, n=1, members=["r0.1", "r1.1"], cause="start", planned=False),
        ev.ViewFormed(at_s=105.1, epoch=1, n=1, step=0, roll_call_s=0.1),
        ev.ReplicaExited(at_s=115.1, replica="r0.1", cause="signal", detail="SIGKILL", noticed_by="agent"),
        ev.ViewInstalled(at_s=115.2, epoch=1, n=2, members=["r1.1"], cause="r0.1 died", planned=False),
        ev.ViewFormed(at_s=FORMED_S, epoch=1, n=2, step=180, roll_call_s=0.1),
        *told,
        finished(),
    ]


def commits(still_s: float = 1.05) -> list[Commit]:
    """Both had made 180 steps of 50 ms when one of them died."""
    both = [Commit(1006.0 + 0.05 * step, step, "0x1p0", who) for step in range(180) for who in ("r0.1", "r1.1")]
    first_s = both[-1].at_s + still_s
    return [*both, *(Commit(first_s + 0.02 * n, 180 + n, "0x1p0", "r1.1") for n in range(STEPS - 180))]


def seen(*told: ev.AnyEvent, **changes: Any) -> Watched:
    events = story(*told)
    struck = msgspec.structs.replace(hit(), at_s=STRUCK_S)
    fields: dict[str, Any] = {"events": events, "commits": commits(), "done": [struck], **changes}
    return watched(**fields)


def found(of: Watched) -> set[str]:
    return {check for check, _ in number_findings(of.fleet, of.record, of.commits, of.events, MICROBATCHES)}


def test_a_recovery_that_is_told_as_it_was_is_not_accused() -> None:
    assert found(seen(recovered())) == set()


def test_a_downtime_of_nothing_is_a_lie_where_commits_stopped() -> None:
    assert found(seen(recovered(downtime_s=0.0, microbatches_recomputed=0))) == {"why: downtime"}
    short = commits(still_s=0.4)
    assert found(seen(recovered(downtime_s=0.0, microbatches_recomputed=0), commits=short)) == {"why: downtime"}
    calm = commits(still_s=0.12)
    assert found(seen(recovered(downtime_s=0.0, microbatches_recomputed=0), commits=calm)) == set()


def test_a_pause_of_the_striker_s_own_is_not_the_fault_s() -> None:
    calm, struck = recovered(downtime_s=0.0, microbatches_recomputed=0), msgspec.structs.replace(hit(), at_s=STRUCK_S)
    held = msgspec.structs.replace(hit("r1.1"), at_s=STRUCK_S + 0.05, kind="SIGSTOP, SIGCONT")
    for until_s, right in ((0.3, True), (0.07, False)):
        done = [struck, msgspec.structs.replace(held, continued_s=held.at_s + until_s)]
        assert (found(seen(calm, commits=commits(still_s=0.4), done=done)) == set()) == right


def test_a_step_as_long_as_all_others_is_no_standstill_however_many_commit_it() -> None:
    both = [Commit(1006.0 + 0.3 * step, step, "0x1p0", who) for step in range(32) for who in ("r0.1", "r1.1")]
    after_s = both[-1].at_s
    slow = [
        *both,
        *(
            Commit(after_s + 0.3 * (1 + n), 32 + n, "0x1p0", f"r{who}.1")
            for n in range(STEPS - 32) for who in (1, 2, 3)
        ),
    ]  # fmt: skip
    calm = recovered(downtime_s=0.0, microbatches_recomputed=0)
    assert found(seen(calm, commits=slow)) == set()
    late = [commit._replace(at_s=commit.at_s + 2.0 * (commit.step >= 32)) for commit in slow]
    assert "why: downtime" in found(seen(calm, commits=late))


def test_a_standstill_of_which_nothing_is_told_at_all_is_found() -> None:
    assert found(seen()) == {"why: downtime"}
    stall = ev.Stall(at_s=COMMITTED_S, step=180, seconds=1.0, usual_s=0.05, replica="r1.1", phase="body")
    assert found(seen(stall)) == set()
    short = msgspec.structs.replace(stall, seconds=0.3)
    assert found(seen(short)) == {"why: downtime"}


def test_steps_that_take_long_are_no_standstills() -> None:
    """Replicas commit a step one soon after the other: the time between two commits is none between two steps."""
    slow = [Commit(1000.0 + 1.5 * step, step, "0x1p0", who) for step in range(STEPS) for who in ("r0.1", "r1.1")]
    assert "why: downtime" not in found(seen(commits=slow))
    stood = [*slow[:20], *(late._replace(at_s=late.at_s + 20.0) for late in slow[20:])]
    assert "why: downtime" in found(seen(commits=stood))


def test_a_fault_that_stopped_nothing_may_be_told_beside_one_that_did() -> None:
    spare = recovered(replica="r2.1", downtime_s=0.0, microbatches_recomputed=0)
    struck = [msgspec.structs.replace(hit(who), at_s=STRUCK_S) for who in ("r0.1", "r2.1")]
    both = seen(recovered(), spare, done=struck)
    assert found(both) == set()


@pytest.mark.parametrize(
    ("detect_s", "right"),
    [(0.0, True), (0.3, True), (-0.01, False), (0.5, False), (30.0, False)],
)
def test_who_died_was_noticed_after_its_last_sign_of_life_and_before_the_view_without_it(
    detect_s: float, right: bool
) -> None:
    assert found(seen(recovered(detect_s=detect_s))) == (set() if right else {"why: detection"})


def test_a_coordinator_was_silent_for_no_longer_than_since_it_was_struck() -> None:
    struck = StrikeDone(at_s=20.0, kind="SIGSTOP", role="coordinator", pid=3, name="coordinator", state="S")
    done = [msgspec.structs.replace(hit(), at_s=STRUCK_S), struck]
    for detect_s, right in ((0.6, True), (9.0, False)):
        gone = recovered(
            at_s=121.0, cause="coordinator", replica="coordinator", detect_s=detect_s, downtime_s=0.0,
            microbatches_recomputed=0, step=0, view=[2, 3],
        )  # fmt: skip
        assert found(seen(recovered(), gone, done=done)) == (set() if right else {"why: detection"})


def test_who_takes_over_tells_of_all_coordinators_since_the_one_that_lived_to_tell() -> None:
    """One was stopped, and its successor killed as it started: the first was silent for longer than that one lived."""
    started = [ev.CoordinatorStarted(at_s=at_s, epoch=n, pid=n, takeover=n > 1) for n, at_s in ((1, 100.4), (3, 121.0))]
    strikes = [(20.0, 3, "SIGSTOP"), (21.2, 4, "SIGSEGV")]
    done = [msgspec.structs.replace(hit(), at_s=STRUCK_S)]
    done += [
        StrikeDone(at_s=at_s, kind=kind, role="coordinator", pid=pid, name="coordinator", state="S")
        for at_s, pid, kind in strikes
    ]
    for detect_s, right in ((1.9, True), (9.0, False)):
        gone = recovered(
            at_s=121.5, cause="coordinator", replica="coordinator", detect_s=detect_s, downtime_s=0.0,
            microbatches_recomputed=0, step=0, view=[2, 3],
        )  # fmt: skip
        told = [recovered(), *started, gone, msgspec.structs.replace(gone, detect_s=0.2)]
        assert ("why: detection" not in found(seen(*told, done=done))) == right


def test_nobody_is_told_to_have_died_before_it_was_struck() -> None:
    late = [msgspec.structs.replace(hit(), at_s=STRUCK_S + 2.0)]
    assert found(seen(recovered(), done=late)) == {"journal: blame"}


@pytest.mark.parametrize(("number", "right"), [(0, True), (4, True), (7, True), (8, False), (104, False)])
def test_no_more_was_computed_again_than_the_dead_had_under_way(number: int, right: bool) -> None:
    """Who is left had one of the eight microbatches at least."""
    assert found(seen(recovered(microbatches_recomputed=number))) == (set() if right else {"why: recomputed"})


def test_who_has_just_come_may_have_had_nothing_to_compute() -> None:
    events = story(recovered(microbatches_recomputed=8))
    at = next(n for n, event in enumerate(events) if isinstance(event, ev.ViewFormed))
    events[at] = msgspec.structs.replace(events[at], step=180)  # the step in which the other died
    assert found(seen(events=events)) == set()


def test_a_view_whose_coordinator_died_with_the_word_of_it_worked_if_steps_were_made_in_it() -> None:
    events = story(recovered())
    at = next(n for n, event in enumerate(events) if isinstance(event, ev.ViewFormed))
    for committed_s, right in ((106.2, True), (104.9, False)):
        fields: dict[str, Any] = {"view": [1, 1], "stable": 3, "losses": [], "step_s": 0.05, "committed": 4}
        events[at] = ev.ProgressMade(at_s=106.25, committed_at_s=committed_s, **fields)
        assert (found(seen(events=events)) == set()) == right


def test_nothing_is_computed_again_where_nobody_is_gone() -> None:
    struck = StrikeDone(at_s=16.5, kind="SIGKILL", role="coordinator", pid=3, name="coordinator", state="S")
    done = [msgspec.structs.replace(hit(), at_s=STRUCK_S), struck]
    for number in (0, 1):
        lost = recovered(
            at_s=117.0, cause="coordinator", replica="coordinator", view=[2, 0], downtime_s=0.0, detect_s=0.1,
            microbatches_recomputed=number,
        )  # fmt: skip
        assert found(seen(recovered(), lost, done=done)) - {"journal: deaths"} == (
            {"why: recomputed"} if number else set()
        )
    joined = ev.ViewInstalled(at_s=117.0, epoch=1, n=3, members=["r1.1", "r0.2"], cause="planned", planned=True)
    again = recovered(at_s=117.5, view=[1, 3], downtime_s=0.0, detect_s=0.0, microbatches_recomputed=1)
    assert found(seen(recovered(), joined, again)) == {"why: recomputed"}


@pytest.mark.parametrize("name", ["downtime_s", "microbatches_recomputed"])
def test_what_is_printed_of_all_faults_is_what_was_told_of_each(name: str) -> None:
    right = seen(recovered())
    check = "why: downtime" if name == "downtime_s" else "why: recomputed"
    assert found(seen(recovered(), why=right.record.why | {name: 9})) == {check}
    rows = [{**right.record.why["timeline"][0], name: 9}]
    assert found(seen(recovered(), why=right.record.why | {"timeline": rows})) == {check}


# --- in words --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "seconds", [0.0, 0.0004, 0.053, 0.9994, 1.254, 12.34, 59.94, 59.96, 123.4, 3599.7, 3901.0, 9e4]
)
def test_a_duration_is_read_as_it_was_printed(seconds: float) -> None:
    told = duration_of(observe.format_s(seconds))
    assert told is not None
    assert told.holds(seconds)
    assert not told.holds(1.05 * seconds + 0.002 + 61 * (seconds > 3600))


def test_what_is_no_duration_is_read_as_none() -> None:
    assert [duration_of(text) for text in ("", "-", "4", "soon", "3 steps")] == [None] * 5


def printed(*told: ev.AnyEvent) -> dict[str, Any]:
    """What the commands print of the run, by the names that the record has for it."""
    events = story(*told)
    why, state = observe.why(events), observe.status(events, held=False)
    words = f"{observe.incident(why, events).paragraph}\n\n{observe.render_why(why)}"
    return {
        "why": msgspec.to_builtins(why), "status": msgspec.to_builtins(state),
        "printed": {"why": f"{words}\n", "status": f"{observe.render_status(state)}\n"},
    }  # fmt: skip


def lies(command: str = "", text: str = "") -> set[str]:
    said = printed(recovered())
    said["printed"] |= {command: text} if command else {}
    return {check for check in found(seen(recovered(), **said)) if "text" in check}


def test_words_that_say_what_the_json_says_are_not_accused() -> None:
    assert lies() == set()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (r"\+16\.000 s", "+16.010 s"),
        (r" 40 ms ", " 41 ms "),
        (r"( 40 ms +)4 ", r"\g<1>5 "),
        (r" 1\.05 s( +! signal)", r" 1.15 s\1"),
        (r"0 steps lost, 4 ", "1 step lost, 4 "),
        (r", 4 microbatches computed again, ", ", 3 microbatches computed again, "),
        (r"1\.05 s of downtime", "105 ms of downtime"),
        (r"useful time [\d.]+%", "useful time 99.9%"),
        (r"\nidle +\S+ s", r"\nidle  1.00 s"),
        (r"Lost: 0 steps", "Lost: 2 steps"),
        (r"committed for 1\.05 s", "committed for 2.05 s"),
        (r"no step was committed for 1\.05 s", "training never waited for that"),
        (r"(?s).+", "Traceback"),
    ],
)
def test_a_number_in_the_words_of_why_that_is_another_one_is_found(old: str, new: str) -> None:
    text, times = re.subn(old, new, printed(recovered())["printed"]["why"].replace("r0.1: signal", "signal"), count=1)
    assert times == 1
    assert lies("why", text) == {"why: text"}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (r"calm: finished", "calm: training"),
        (r"\nstep 400", "\nstep 403"),
        (r"recoveries 1", "recoveries 2"),
        (r"(r1\.1 +\d+ +)ended", r"\g<1>training"),
        (r"(r1\.1 +\d+ +\S+ +\S+ +)\S+", r"\g<1>12"),
        (r"view", "50 ms a step, view"),
        (r"(?s).+", "Traceback"),
    ],
)
def test_a_number_in_the_words_of_status_that_is_another_one_is_found(old: str, new: str) -> None:
    text, times = re.subn(old, new, printed(recovered())["printed"]["status"], count=1)
    assert times == 1
    assert lies("status", text) == {"status: text"}


def asked(text: str | Callable[[float], str], asked_s: float = 12.0) -> set[str]:
    """What is found in words that were printed 0.2 s after they were asked for."""
    sample = StatusSample(asked_s=asked_s, answered_s=asked_s + 0.2, said={}, text=str(text))
    return found(watched(samples=[sample]))


WORDS = (
    "run calm: {}\nstep {}, {} ago, view 1.1{}, recoveries 0\n\n"
    "WHO   PID  STATE     VIEW  STEP\nr1.1  8    {}  1.1   9\n"
)


@pytest.mark.parametrize(
    ("words", "asked_s", "check"),
    [
        (("training", 119, "50 ms", ", 50 ms a step", "training"), 12.0, None),  # step 118 was committed at 11.9 s
        (("training", 119, "900 ms", ", 50 ms a step", "training"), 12.0, "status: age"),
        (("training", 300, "50 ms", ", 50 ms a step", "training"), 12.0, "status: step"),
        (("stalled (silent for 8.05 s)", STEPS, "8.05 s", "", "stalled  "), 34.0, None),
        (("stalled (silent for 8.05 s)", STEPS, "8.05 s", ", 50 ms a step", "stalled  "), 34.0, "status: state"),
        (("stalled (silent for 8.05 s)", STEPS, "8.05 s", "", "training"), 34.0, "status: state"),
        (("training", STEPS, "8.05 s", "", "stalled  "), 34.0, "status: state"),
    ],
)
def test_the_words_of_a_run_that_goes_on_are_held_against_the_stopwatch(
    words: tuple[Any, ...], asked_s: float, check: str | None
) -> None:
    accused = asked(WORDS.format(*words), asked_s)
    assert check in accused if check else not accused


def test_words_that_are_no_status_are_found() -> None:
    assert asked("Traceback (most recent call last)") == {"status"}


def test_an_age_is_of_the_moment_at_which_it_is_printed() -> None:
    for age_s, right in ((0.1, True), (0.9, False)):
        said = {"state": "training", "detail": "", "step": 119, "step_at_s": 111.95, "step_age_s": age_s}
        sample = StatusSample(asked_s=12.0, answered_s=12.2, said=said)
        assert found(watched(samples=[sample])) == (set() if right else {"status: age"})


def test_a_status_is_read_with_its_hosts_and_its_dashes() -> None:
    told = status_text(
        "run calm: starting\nstep -, view -, recoveries 0\n\n"
        "WHO   HOST  PID  STATE     VIEW  STEP\n"
        "a0    h1    4    running   -     -\nr0.1  h1    10   starting  -     -\n"
    )
    assert told is not None
    assert (told.state, told.step, told.age, told.step_s) == ("starting", None, None, None)
    assert told.rows == {"a0": ("running", None), "r0.1": ("starting", None)}
    assert duration_of("53 ms") == Duration(0.053, 0.0005)


def test_a_spare_that_was_behind_and_died_before_a_step_of_its_own_is_where_the_run_ended() -> None:
    """r0.1 had 70 steps, and r1.1, a spare that had 65, was killed as soon as it had taken over."""
    alone = [Commit(1006.0 + 0.05 * step, step, "0x1p0", "r0.1") for step in range(70)]
    handed = Commit(1015.15, 64, "0x1p0", "r1.1")
    told = recovered(lost_steps=5, step=65, downtime_s=0.02, at_s=119.0)
    why = {"state": "failed", "lost_steps": 70, "gone_steps": 65}
    of = seen(told, commits=[*alone, handed], exit_code=6)
    for shown, lost, handed_step, right in (
        (65, 70, 64, True), (70, 70, 64, False), (65, 68, 64, False), (65, 70, 60, False), (65, 70, 67, False),
    ):  # fmt: skip
        seen_by_clock = [*alone, handed._replace(step=handed_step)]
        record = msgspec.structs.replace(
            of.record,
            why={**of.record.why, **why, "lost_steps": lost},
            status={**of.record.status, "state": "failed", "step": shown},
        )
        names = {check for check, _ in number_findings(of.fleet, record, seen_by_clock, of.events, MICROBATCHES)}
        assert names.isdisjoint({"status: step", "why: lost steps", "why: downtime"}) == right, (shown, lost, names)
