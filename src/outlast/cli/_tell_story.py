"""What `outlast why` does. Loads no typer, see `_plain_words.py`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from outlast.cli._runs import DEFAULT_RUNS, note, open_run, print_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outlast.core import events as ev
    from outlast.health import Foretold
    from outlast.journal import Journal
    from outlast.observe import Incident, UsefulTime, Why
    from outlast.plan.run_beside import RunBeside

__all__ = ["tell_story", "useful_of"]


def tell_story(
    run: Path = Path(DEFAULT_RUNS),
    *,
    as_json: bool = False,
    price: str | None = None,
    accelerators: int | None = None,
    every: bool = False,
) -> int:
    """Print what happened in a run, what it cost and what to do next."""
    from outlast import journal, observe

    costs = observe.price_of(price) if price is not None else None
    with open_run(run) as (reader, run_dir):
        history = observe.read_history(run_dir, reader, say=note)
        events = observe.read_story(reader, None if every else history)
        held = journal.is_held(run_dir)
        now_s = journal.run_now_s(run_dir) if held else None
        story = observe.why(events, held=held, now_s=now_s, accounts=history.accounts, brief=True)
        incident = observe.incident(story, events, price=costs, accelerators=accelerators)
        if not as_json:
            print(incident.paragraph, flush=True)  # what is needed at once, before what takes longer
        links, foretold = _of_health(reader, events)
    from outlast.plan.run_beside import run_beside

    story = observe.at_length(story, events, everything=every)
    beside = run_beside(events, history.accounts.useful(story.cost))
    if as_json:
        _print_json(story, run_dir, incident, beside, links, foretold)
        return 0
    print(f"\n{observe.render_why(story)}")
    if foretold is not None:
        from outlast import health

        print(f"\n{health.worth_of(foretold)}")
    if links:
        print("\nLinks\n" + "\n".join(f"- {text}" for text in links))
    _print_beside(beside)
    if history.points:
        print(f"\nLoss\n{observe.plot(history.points)}")
    return 0


def useful_of(run_dir: Path) -> UsefulTime:
    """The useful time of a run, as its story has it: of now while it goes on."""
    from outlast import journal, observe

    with journal.Journal.open_reader(run_dir) as reader:
        history = observe.read_history(run_dir, reader, say=note)
        events = observe.read_story(reader, history)
        held = journal.is_held(run_dir)
        now_s = journal.run_now_s(run_dir) if held else None
        story = observe.why(events, held=held, now_s=now_s, accounts=history.accounts, brief=True)
    return history.accounts.useful(story.cost)


def _print_beside(run: RunBeside) -> None:
    from outlast.plan.run_beside import worth_telling

    for table, said in worth_telling(run):
        print(f"\n{table.text()}\n{said}")


def _print_json(
    story: Why, run_dir: Path, incident: Incident, beside: RunBeside, links: list[str], foretold: Foretold | None
) -> None:
    from outlast.plan.run_beside import run_data

    print_json(story, run_dir=run_dir, incident=incident, **run_data(beside), links=links, foretold=foretold)


def _of_health(reader: Journal, events: Sequence[ev.AnyEvent]) -> tuple[list[str], Foretold | None]:
    """What links are said to lose, and what alarms were worth. Both need to know who ran where, which a story leaves
    out: the whole of it is read where there is anything to say."""
    from outlast import observe
    from outlast.cli._health_links import links_said
    from outlast.core import events as ev

    words = (event for event in events if isinstance(event, ev.StepAnatomy))
    lossy = any(wait.resent or wait.late for word in words for wait in word.waits.values())
    if not lossy and not any(isinstance(event, ev.AlarmWeighed) for event in events):
        return [], None
    whole = observe.read_story(reader)
    return links_said(whole), _foretold(whole)


def _foretold(events: Sequence[ev.AnyEvent]) -> Foretold | None:
    """How many of the run's failures an alarm had told before, and how many of its alarms came true, with their 95 %
    intervals; None where no alarm was weighed."""
    from outlast import health
    from outlast.core import events as ev

    if not any(isinstance(event, ev.AlarmWeighed) for event in events):
        return None
    return health.foretold_of(health.learn_run(enumerate(events, 1), "", []))
