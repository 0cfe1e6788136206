"""One paragraph about a run's faults, to paste into an incident channel.

Role: what failed, who noticed and how fast, what was lost, what it cost, what to do. Pure. Invariant: every figure is
one that `outlast why` prints below it; of what the journal does not say nothing is said. A fault's cost is the wall
time that accounts do not count as productive on its account (recovery, lost, degraded, stalled), on all accelerators.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from outlast.core import events as ev
from outlast.core.held_places import mean_places
from outlast.errors import ConfigError
from outlast.observe._why import Why, remedy
from outlast.observe.rounding import format_s
from outlast.observe.status_records import RUNNING

__all__ = ["Incident", "Price", "incident", "price_of"]

_WASTES = ("recovery_s", "lost_s", "degraded_s", "stalled_s")
_NUM_NAMED = 3


class Price(msgspec.Struct, frozen=True, kw_only=True):
    """What one accelerator costs for one hour; `currency` may be empty."""

    per_hour: float
    currency: str = ""


class Incident(msgspec.Struct, frozen=True, kw_only=True):
    """The paragraph and its figures. `accelerators`: as many as the run held, the mean over its time where it was
    scaled; `wasted_hours`: accelerator-hours that faults cost, of `paid_hours` in all; `money`: what the wasted ones
    cost, None without a price."""

    paragraph: str
    accelerators: float
    paid_hours: float
    wasted_hours: float
    money: float | None
    currency: str


def price_of(text: str) -> Price:
    """A price from what a person types: `2.5`, `2.50 EUR`, `$2.50`. Raises ConfigError."""
    found = re.fullmatch(r"\s*([^\d\s.,+-]{0,4})\s*(\d+(?:\.\d+)?|\.\d+)\s*([^\d\s.,+-]{0,4})\s*", text)
    if found is None or (found[1] and found[3]):
        raise ConfigError(
            f"--price {text!r} is no price", remedy="give what one accelerator costs for an hour, as 2.5 or '2.50 EUR'"
        )
    return Price(per_hour=float(found[2]), currency=found[1] or found[3])


def incident(
    story: Why, events: Sequence[ev.AnyEvent], *, price: Price | None = None, accelerators: int | None = None
) -> Incident:
    """The paragraph of a run whose story is told. `events`: as `story_of` takes them. `accelerators`: how many the
    run holds; by default one a rank of each replica that it was to have, spares included, over its time."""
    started = next((event for event in events if isinstance(event, ev.RunStarted)), None)
    many = accelerators if accelerators is not None else _held(started, events, story.cost.wall_s)
    wasted_h = sum(getattr(story.cost, name) for name in _WASTES) * many / 3600
    money = wasted_h * price.per_hour if price else None
    parts = [
        _who(story, started), _failed(story, events), _lost(story),
        _cost(wasted_h, story.cost.wall_s * many / 3600, many, money, price), _to_do(story),
    ]  # fmt: skip
    return Incident(
        paragraph=" ".join(part for part in parts if part),
        accelerators=many,
        paid_hours=story.cost.wall_s * many / 3600,
        wasted_hours=wasted_h,
        money=money,
        currency=price.currency if price else "",
    )


def _held(started: ev.RunStarted | None, events: Sequence[ev.AnyEvent], wall_s: float) -> float:
    """Accelerators, one a rank: a run that was scaled, or that chose its spares, held now more of them and now less."""
    if started is None:
        return 1
    ranks = started.config.get("ranks")
    held = max(1.0, mean_places(events, wall_s)) * (ranks if isinstance(ranks, int) else 1)
    return int(held) if held == int(held) else held


def _who(story: Why, started: ev.RunStarted | None) -> str:
    size = f" ({_many(started.num_replicas, 'replica')})" if started else ""
    first = story.headline.partition("\n")[0]
    return f"outlast run {story.run_id or '?'}{size}: {first}"


def _failed(story: Why, events: Sequence[ev.AnyEvent]) -> str:
    """Each fault by name where they are few, else by cause; then how it was noticed."""
    recoveries = [event for event in events if isinstance(event, ev.Recovery)]
    if not recoveries:
        return ""
    if len(recoveries) <= _NUM_NAMED:
        named = [
            f"{_victim(event)}, noticed by {event.noticed_by} after {format_s(event.detect_s)}" for event in recoveries
        ]
        return f"What failed: {'; '.join(named)}."
    by_cause: dict[str, list[str]] = {}
    for event in recoveries:
        by_cause.setdefault(remedy(event.cause, event.detail)[0], []).append(event.replica)
    causes = [
        f"{len(who)} x {cause} ({_few(who)})" for cause, who in sorted(by_cause.items(), key=lambda c: -len(c[1]))
    ]
    slowest = max(recoveries, key=lambda event: event.detect_s)
    times = sorted(event.detect_s for event in recoveries)
    return (
        f"What failed: {'; '.join(causes)}. They were noticed after {format_s(times[len(times) // 2])} (median), the "
        f"slowest after {format_s(slowest.detect_s)} ({slowest.replica}, by {slowest.noticed_by})."
    )


def _victim(event: ev.Recovery) -> str:
    first = event.detail.partition("\n")[0]
    words = f"{event.cause}: {first}" if first and first != event.cause else event.cause
    return f"{event.replica} ({words})" + (f" in step {event.step}" if event.step else "")


def _lost(story: Why) -> str:
    if not (story.num_recoveries or story.lost_steps or story.microbatches_recomputed):
        return ""
    again = f", {_many(story.microbatches_recomputed, 'microbatch', 'es')} computed again"
    still = "training never waited for that"
    if story.downtime_s:
        still = f"no step was committed for {format_s(story.downtime_s)}"
    return f"Lost: {_many(story.lost_steps, 'step')}{again}; {still}."


def _cost(wasted_h: float, paid_h: float, many: float, money: float | None, price: Price | None) -> str:
    share = f", {wasted_h / paid_h:.2%} of what was paid for" if paid_h > 0 else ""
    on = f"{many:,}" if many == int(many) else f"{many:,.2f} (the mean over its time)"
    said = f"Cost of it: {_hours(wasted_h)} accelerator-hours on {on}{share}"
    if money is None or price is None:
        return f"{said}."
    unit = f" {price.currency}" if price.currency else ""
    return f"{said}; {money:,.2f}{unit} at {price.per_hour:g}{unit} an hour."


def _to_do(story: Why) -> str:
    if not story.advice:
        return "To do: nothing." if story.state not in RUNNING else ""
    most = sorted(story.advice, key=lambda advice: -advice.count)[:2]
    return "To do: " + "; ".join(f"{advice.cause}: {advice.remedy}" for advice in most) + "."


def _many(count: int, noun: str, ending: str = "s") -> str:
    return f"{count:,} {noun}{'' if count == 1 else ending}"


def _few(names: Sequence[str]) -> str:
    told = list(dict.fromkeys(names))
    rest = len(told) - _NUM_NAMED
    return ", ".join(told[:_NUM_NAMED]) + (f" and {rest} more" if rest > 0 else "")


def _hours(hours: float) -> str:
    return f"{hours:,.0f}" if hours >= 100 else f"{hours:.3g}"
