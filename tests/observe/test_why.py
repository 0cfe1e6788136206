"""The story and its remedies."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from outlast.core import events as ev
from outlast.observe import _why, at_length, remedy, render_why, why


def test_a_survived_run(story: Any) -> None:
    told = why(story.whole)
    assert told.headline == "The run finished; it outlasted 2 faults."
    assert (told.num_recoveries, told.lost_steps, told.microbatches_recomputed) == (2, 0, 2)
    assert told.downtime_s == pytest.approx(0.05)
    assert {advice.cause: advice.who for advice in told.advice} == {
        "killed from outside": ["r2.0"], "the coordinator lost": ["coordinator"],
    }  # fmt: skip
    text = render_why(told)
    for word in ("What happened", "What it cost", "What to do next", "oom", "productive"):
        assert word in text


def test_a_failed_run_names_its_cause(story: Any) -> None:
    failed = ev.RunFinished(
        at_s=1_009.0, outcome="failed", steps=20, detail="poison microbatch 3 of step 21", exit_code=5, seconds={}
    )
    told = why([*story.started, *story.training, failed])
    assert told.headline.startswith("The run failed at step 20: poison")
    assert [advice.cause for advice in told.advice] == ["the loop fails on one microbatch"]


def test_a_run_that_ended_without_a_word(story: Any) -> None:
    told = why([*story.started, *story.training], held=False)
    assert told.state == "lost"
    assert "without a word" in told.headline
    assert [advice.who for advice in told.advice] == [["launcher"]]


def test_a_run_in_which_nothing_happened(story: Any) -> None:
    told = why([*story.started, *story.training, *story.finished])
    assert told.advice == []
    assert "nothing failed" in told.headline
    assert "no fault is on record" in render_why(told)


def test_an_exit_without_a_recovery_is_a_fault_too(story: Any) -> None:
    spare = ev.ReplicaExited(
        at_s=1_005.0, replica="r4.0", cause="exception", detail="ValueError: bad sample", noticed_by="agent a0"
    )
    left = ev.ReplicaExited(at_s=1_006.0, replica="r0.0", cause="left", detail="SIGTERM", noticed_by="agent a0")
    told = why([*story.started, *story.training, spare, left])
    assert [(advice.cause, advice.who) for advice in told.advice] == [("an exception in the loop", ["r4.0"])]


@pytest.mark.parametrize(
    ("words", "last"),
    [
        ("Traceback (most recent call last):\n  ...\nKeyError: 'run'\n", "KeyError: 'run'"),
        ("[CONFIG] a is not b\n  remedy: make it b\n  at: train.py, line 3: protect()\n", "[CONFIG] a is not b"),
    ],
)
def test_what_stopped_every_start_is_in_the_headline(story: Any, words: str, last: str) -> None:
    """Not only that nobody was ready in time."""
    words = f"exit code 1; the end of r0.1.log:\n{words}"
    exits = [
        ev.ReplicaExited(at_s=1_003.0, replica=f"r0.{n}", cause="exception", detail=words, noticed_by="agent")
        for n in range(1, 18)
    ]
    end = ev.RunFinished(
        at_s=1_600.0, outcome="failed", steps=0, detail="only 0 of 1 replicas were ready after 600.0 s", exit_code=3,
        seconds={},
    )  # fmt: skip
    headline = why([*story.started, *exits, end]).headline
    assert f"17 replicas ended (exception), the last words being: {last}" in headline


@pytest.mark.parametrize("told_as", ["stalled", "recovery"])
def test_time_that_stood_still_is_in_the_headline(story: Any, told_as: str) -> None:
    """Also where a view was made meanwhile, of those who were stopped and one who left: nobody recovered from it."""
    held = ev.ProgressMade(
        at_s=1_010.0, view=[1, 1], stable=21, losses=[], step_s=0.1, first=20, committed=21, committed_at_s=1_010.0,
        seconds={"productive": 0.1, told_as: 5.9},
    )  # fmt: skip
    stall = ev.Stall(at_s=1_010.0, step=20, seconds=5.9, usual_s=0.1, replica="r1.0", phase="body")
    told = why([*story.started, *story.training, held, stall, *story.finished[1:]])
    assert told.headline == "The run finished; nothing failed, but steps were held up for 5.9 s."
    (row,) = [row for row in told.timeline if row.kind == "stall"]
    assert row.what == "step 20 took 5.9 s longer than usual (100 ms): r1.0 was in the loop's own code"


def test_steps_that_nobody_holds_after_a_failure_are_lost(story: Any) -> None:
    failed = ev.RunFinished(
        at_s=1_009.0, outcome="failed", steps=20, detail="every replica that held the training state is gone",
        exit_code=6, seconds={},
    )  # fmt: skip
    told = why([*story.started, *story.training, failed])
    assert told.lost_steps == 20
    assert "20 steps are lost: no checkpoint holds them." in told.headline
    assert told.ettr == 0.0


def test_a_loop_that_is_held_up_again_and_again_is_told_by_its_longest_times(story: Any) -> None:
    stalls = [
        ev.Stall(at_s=1_004.0 + n, step=n, seconds=1.0 + n, usual_s=0.1, replica="r1.0", phase="body")
        for n in range(50)
    ]
    rows = [row for row in why([*story.started, *story.training, *stalls]).timeline if row.kind == "stall"]
    assert len(rows) == 10
    assert "step 49 took 50 s longer" in rows[-1].what


@pytest.mark.parametrize(
    ("cause", "detail", "name"),
    [
        ("signal", "SIGKILL", "killed from outside"),
        ("signal", "SIGSEGV", "a crash in native code"),
        ("exception", "torch.OutOfMemoryError: CUDA out of memory", "out of memory"),
        ("exception", "DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes", "out of memory"),
        ("exception", "ValueError: the signal path stopped", "an exception in the loop"),
        ("evicted", "no progress in BACKWARD for 0.6 s", "silent for too long"),
        ("evicted", "stopped; a peer waited 0.61 s for it", "silent for too long"),
        ("evicted", "broken path to r1.0", "a broken path between members"),
        (
            "evicted",
            "replace: the gradient's norm is nan; computed again by r1.1, the gradient is another",
            "a wrong gradient",
        ),
        ("evicted", "quarantine: table of r2.1 differs from that of 2 other replicas, which agree", "replicas differ"),
        ("evicted", "quarantine: the loss is 40.2; its band ends at 3.1", "put out by a guard"),
        ("evicted", "evict host: table of r2.1 differs from that of 2 other replicas", "its host was put out"),
        ("evicted", "its slice of bucket 1 in step 7 is not what the rows give", "a wrong gradient"),
        ("evicted", "it accused r1.1 falsely in step 7", "a wrong gradient"),
        ("evicted", "in step 7 r2.1 heard other headers than 2 of 3 members", "a wrong gradient"),
        ("r0.1 and r1.1 disagree on a reduced slice, and two cannot tell who is wrong", "", "a wrong gradient"),
        ("two replicas failed in step 7:\n[GUARD] the gradient's norm is nan", "", "a guard stopped the run"),
        ("hang", "", "silent for too long"),
        ("every replica that held the training state is gone", "", "nobody left"),
        ("two replicas failed on step 3, microbatch 1:\nValueError", "", "the loop fails on one microbatch"),
        ("exit", "died while the coordinator was away", "a process ended by itself"),
        ("agent_lost", "its agent a0 died: SIGKILL", "an agent lost"),
        ("agent_lost", "", "an agent lost"),
        ("agent_lost", "its host is not heard of: silent for 0.61 s while others wait for it", "a host lost"),
        ("exit", "exit code 3", "a process ended by itself"),
        ("broken path", "r1.0 and r2.0", "a broken path between members"),
        ("evicted", "it was still starting when training ended", "too late to take part"),
        ("evicted", "it was still starting when the run finished", "too late to take part"),
        ("gremlins", "", "another cause"),
    ],
)
def test_each_cause_has_its_remedy(cause: str, detail: str, name: str) -> None:
    found, advice = remedy(cause, detail)
    assert found == name
    assert len(advice) > 20


def test_every_cause_that_an_exit_can_have_is_known() -> None:
    causes = get_args(get_type_hints(ev.ReplicaExited)["cause"])
    unknown = [cause for cause in causes if remedy(cause)[0] == "another cause"]
    assert set(unknown) <= {"signal", "left", "finished"}  # a signal is known by its name, the others are no faults


def test_the_words_of_a_script_are_told_after_the_sentence_and_mislead_nobody(story: Any) -> None:
    """A path in a traceback is no broken path between members, and an agent in it none of ours."""
    words = 'exit code 1; the end of r0.1.log:\nTraceback\n  File "/agent/path/connection.py"\nKeyError: 3\n'
    for first, cause in (
        ("the script ended before training started", "the script, before it trained"),
        ("all replicas failed, the last one so", "an exception in the loop"),
    ):
        failed = ev.RunFinished(
            at_s=1_009.0, outcome="failed", steps=20, detail=f"{first}:\n{words}", exit_code=5, seconds={}
        )
        told = why([*story.started, *story.training, failed])
        sentence, _, rest = told.headline.partition("\n")
        assert f": {first}. Before that, nothing failed." in sentence
        assert rest.endswith("KeyError: 3")
        assert [advice.cause for advice in told.advice] == [cause]


def test_who_was_still_starting_at_the_end_needs_no_remedy(story: Any) -> None:
    late = ev.ReplicaExited(
        at_s=1_009.0, replica="r3.1", cause="evicted", detail="it was still starting when training ended",
        noticed_by="coordinator",
    )  # fmt: skip
    (advice,) = why([*story.started, *story.training, late, *story.finished]).advice
    assert (advice.who, advice.remedy.partition(":")[0]) == (["r3.1"], "nothing is to be done")


@pytest.mark.parametrize("finished", [True, False])
def test_a_script_that_never_joined_is_told_which_calls_make_it_part_of_a_run(story: Any, finished: bool) -> None:
    words = "exit code 0, and steps() of outlast.join().protect(...) was never begun; the end of r0.1.log:\nhi\n"
    exits = [
        ev.ReplicaExited(at_s=1_003.0, replica=name, cause="exit", detail=words, noticed_by="agent")
        for name in ("r0.1", "r1.1")
    ]
    end = ev.RunFinished(
        at_s=1_004.0, outcome="failed", steps=0, detail=f"the script ended before training started:\n{words}",
        exit_code=5, seconds={},
    )  # fmt: skip
    (advice,) = why([*story.started, *exits, *([end] if finished else [])], held=True).advice
    assert advice.who == (["run"] if finished else []) + ["r0.1", "r1.1"]
    for call in ("outlast.join()", "run.protect(", "training.steps(until="):
        assert call in advice.remedy


def test_a_brief_story_told_at_length_is_the_story(story: Any) -> None:
    brief, whole = why(story.whole, brief=True), why(story.whole)
    assert (brief.timeline, brief.anatomy.members) == ([], [])
    assert whole.timeline
    assert whole.anatomy.members
    assert at_length(brief, story.whole) == whole
    everything = at_length(brief, story.whole, everything=True)
    assert len(everything.timeline) > len(whole.timeline)
    assert everything == why(story.whole, everything=True)


def test_every_kind_that_a_story_asks_for_is_left_in_it() -> None:
    """From its source, so that a new one is not forgotten: its advice would be missing in silence."""
    source = Path(str(_why.__file__)).read_text(encoding="utf-8")
    asked = {name or case for name, case in re.findall(r"isinstance\(\w+, ev\.(\w+)\)|case ev\.(\w+)\(", source)}
    assert asked == {kind.__name__ for kind in _why._TOLD_OF}
