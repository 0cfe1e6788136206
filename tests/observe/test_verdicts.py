"""What a guard decided reads the same in the status, the timeline and the story."""

from __future__ import annotations

from outlast.core import events as ev
from outlast.observe import render_status, render_why, status, timeline, why

SKIPPED = ev.VerdictReached(
    at_s=1_005.0, step=40, action="skip_batch", evidence="the loss of microbatch 2 is not finite",
    confidence="certain", remedy="samples 7 hold values that are not finite: mend or drop them", replica="r1.1",
    host="a0", device="cpu", module="roots", operation="aten.sqrt.default", where="train.py:12", microbatch=2,
    samples=[7],
)  # fmt: skip
STOPPED = ev.VerdictReached(
    at_s=1_006.0, step=41, action="stop", evidence="the gradient's norm is nan", confidence="possible", remedy="wait"
)


def test_a_verdict_is_told_with_all_that_is_known() -> None:
    rows = timeline([SKIPPED, STOPPED])
    assert [row.level for row in rows] == ["warning", "error"]
    for part in (
        "step 40",
        "loss of microbatch 2",
        "left out",
        "r1.1 on a0 on cpu",
        "sample 7",
        "roots",
        "train.py:12",
    ):
        assert part in rows[0].what
    assert rows[1].what == "step 41: the gradient's norm is nan: run stopped"


def test_status_counts_verdicts_and_why_gives_the_remedy() -> None:
    state = status([SKIPPED, STOPPED])
    assert (state.num_verdicts, state.last_verdict) == (2, STOPPED)
    assert "verdicts 2" in render_status(state)
    assert "run stopped" in render_status(state)
    story = why([SKIPPED, STOPPED], now_s=1_010.0)
    assert [(a.cause, a.who, a.remedy) for a in story.advice if a.cause.startswith("a guard")] == [
        ("a guard: skip batch", ["r1.1"], SKIPPED.remedy), ("a guard: stop", ["step 41"], "wait"),
    ]  # fmt: skip
    assert "mend or drop" in render_why(story)
