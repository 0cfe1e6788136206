"""The paragraph for an incident channel: every figure in it is one that the journal has."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from outlast.core import events as ev
from outlast.errors import ConfigError
from outlast.observe import Price, incident, price_of, why


def of(events: list[ev.AnyEvent], **more: Any) -> Any:
    return incident(why(events), events, **more)


def test_it_says_what_failed_who_noticed_what_was_lost_what_it_cost_and_what_to_do(story: Any) -> None:
    told = of(story.whole, price=Price(per_hour=3600.0, currency="EUR"))
    cost = why(story.whole).cost
    wasted_s = 5 * (cost.recovery_s + cost.lost_s + cost.degraded_s + cost.stalled_s)
    assert told.accelerators == 5
    assert told.wasted_hours == pytest.approx(wasted_s / 3600)
    assert told.money == pytest.approx(wasted_s)
    assert told.paid_hours == pytest.approx(5 * cost.wall_s / 3600)
    for words in (
        "outlast run brave-otter (4 replicas): The run finished; it outlasted 2 faults.",
        "What failed: r2.0 (signal: SIGKILL) in step 30, noticed by agent a0 after 10 ms; coordinator (",
        "Lost: 0 steps, 2 microbatches computed again; no step was committed for 50 ms.",
        f"{wasted_s:,.2f} EUR at 3600 EUR an hour.",
        "To do: killed from outside: see whether the kernel ran out of memory",
    ):
        assert words in told.paragraph
    assert "\n" not in told.paragraph


def test_many_faults_are_told_by_cause_with_the_slowest_notice(story: Any) -> None:
    many = [
        ev.Recovery(
            at_s=1_005.0 + n, cause="signal" if n % 3 else "evicted", replica=f"r{n}.0", noticed_by=f"agent a{n}",
            detect_s=0.01 * (n + 1), downtime_s=0.1, microbatches_recomputed=1, lost_steps=0, step=n, view=[1, n],
            detail="SIGKILL" if n % 3 else "no progress in BACKWARD for 0.6 s",
        )
        for n in range(9)
    ]  # fmt: skip
    text = of([*story.started, *story.training, *many, *story.finished]).paragraph
    assert "6 x killed from outside (r1.0, r2.0, r4.0 and 3 more); 3 x silent for too long (r0.0, r3.0, r6.0)" in text
    assert "noticed after 50 ms (median), the slowest after 90 ms (r8.0, by agent a8)" in text


def test_a_run_that_failed_says_so_and_what_is_gone(story: Any) -> None:
    failed = ev.RunFinished(
        at_s=1_009.0, outcome="failed", steps=20, detail="every replica that held the training state is gone\nwords",
        exit_code=6, seconds={},
    )  # fmt: skip
    text = of([*story.started, *story.training, failed], accelerators=64).paragraph
    assert "The run failed at step 20: every replica that held the training state is gone." in text
    assert "20 steps are lost: no checkpoint holds them." in text
    assert "Lost: 20 steps" in text
    assert "accelerator-hours on 64" in text
    assert "words" not in text


@pytest.mark.parametrize(
    ("settings", "saved", "said"),
    [
        ({}, False, "no checkpoints were kept: keep them: --checkpoint-dir DIR; a run that is asked to stop"),
        ({"stop_save_s": 0}, False, "keep them: --checkpoint-dir DIR, and let a stop save first: stop_save_s is 0"),
        (
            {"stop_save_s": 20.0},
            True,
            "raise stop_save_s (it was 20 s), and what the scheduler leaves it; the slowest save took 31 s",
        ),
        ({"checkpoint_dir": "/c", "stop_save_s": 0}, False, "let a stop save first: stop_save_s is 0"),
    ],
)
def test_who_stops_with_steps_lost_is_told_what_keeps_them(
    story: Any, settings: dict[str, Any], saved: bool, said: str
) -> None:
    first, *others = story.started
    first = msgspec.structs.replace(first, config=settings)
    save = ev.CheckpointSaved(
        at_s=1_003.5, step=12, generation=1, view=[1, 1], num_writers=1, state_bytes=100, written_bytes=100,
        blocked_s=0.0, copied_s=1.0, durable_s=31.0, reason="", url="/c",
    )  # fmt: skip
    end = ev.RunFinished(at_s=1_009.0, outcome="stopped", steps=20, detail="SIGTERM", exit_code=7, seconds={})
    text = of([first, *others, *story.training, *([save] if saved else []), end]).paragraph
    assert f"{8 if saved else 20} steps are lost: no checkpoint holds them." in text
    assert said in text
    assert "To do: nothing" not in text


def scaled(at_s: float, replicas: int) -> ev.Asked:
    return ev.Asked(at_s=at_s, what="scale", about=str(replicas), accepted=True, text="", replicas=[])


def test_a_run_that_was_scaled_is_charged_for_what_it_held_when(story: Any) -> None:
    whole = story.whole
    wall_s = why(whole).cost.wall_s
    half_s = whole[0].at_s + wall_s / 2
    events = sorted([*whole, scaled(half_s, 2)], key=lambda event: event.at_s)
    told = of(events)
    assert told.accelerators == pytest.approx(4.0)  # five for one half of the time, three for the other
    assert told.paid_hours == pytest.approx(4.0 * wall_s / 3600)
    refused = msgspec.structs.replace(scaled(half_s, 2), accepted=False)
    assert of(sorted([*whole, refused], key=lambda event: event.at_s)).accelerators == 5
    quarter = of(sorted([*whole, scaled(whole[0].at_s + wall_s / 4, 2)], key=lambda event: event.at_s))
    assert "accelerator-hours on 3.50 (the mean over its time)" in quarter.paragraph


def test_spares_that_the_run_chose_count_while_they_were_held(story: Any) -> None:
    whole = story.whole
    wall_s = why(whole).cost.wall_s
    more = ev.SparesHeld(at_s=whole[0].at_s + wall_s / 2, number=3, worth=3, reason="", replicas=[])
    assert of(sorted([*whole, more], key=lambda event: event.at_s)).accelerators == pytest.approx(6.0)


def test_each_rank_of_a_replica_is_an_accelerator(story: Any) -> None:
    first, *others = story.whole
    told = of([msgspec.structs.replace(first, config={"ranks": 4}), *others])
    assert told.accelerators == 20
    assert "accelerator-hours on 20," in told.paragraph


def test_nothing_failed(story: Any) -> None:
    told = of([*story.started, *story.training, *story.finished])
    assert told.wasted_hours == told.money or told.money is None
    assert "nothing failed" in told.paragraph
    assert told.paragraph.endswith("To do: nothing.")
    assert of([]).paragraph.startswith("outlast run ?: ")


@pytest.mark.parametrize(
    ("text", "price"),
    [("2.5", (2.5, "")), ("2.50 EUR", (2.5, "EUR")), ("$3", (3.0, "$")), (" €.5 ", (0.5, "€")), ("0", (0.0, ""))],
)
def test_prices_as_people_type_them(text: str, price: tuple[float, str]) -> None:
    assert (price_of(text).per_hour, price_of(text).currency) == price


@pytest.mark.parametrize("text", ["", "EUR", "-3", "2,5", "$3 EUR", "nan", "1e9", "3 4"])
def test_what_is_no_price(text: str) -> None:
    with pytest.raises(ConfigError, match="is no price"):
        price_of(text)
