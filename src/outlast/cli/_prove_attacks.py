"""`outlast prove attacks`: every attack on a robust rule and on the mean, in real fleets, and the report."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from outlast.errors import ConfigError, nearest

if TYPE_CHECKING:
    from outlast.prove.attacks import Report

__all__ = ["attacks"]


def attacks(
    only: Annotated[str, typer.Option("--attacks", help="Which, with commas between; all if not said.")] = "",
    rule: Annotated[str, typer.Option(help="The robust rule; outlast rules lists them.")] = "trimmed_mean",
    pre: Annotated[str, typer.Option(help="Steps in front of it, with commas between; empty: none.")] = "nnm",
    steps: Annotated[int, typer.Option(help="Steps of training.")] = 60,
    points: Annotated[float, typer.Option(help="What an attack may cost under the rule, of 100.")] = 10.0,
    base: Annotated[str, typer.Option("--dir", help="Keep the runs here, in a new directory.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> int:
    """One replica of four lies about all its rows, in every way there is; what that costs digits under the rule and
    under the mean. And a reducer that lies: it must be named before anything is applied. Exit code 9 if an attack costs
    more than --points, or the reducer is not the one named, or a bit differs."""
    from outlast.prove.attacks import ATTACKS, Attacks

    chosen = [name.strip() for name in only.split(",")] if only else list(ATTACKS)
    for name in chosen:
        if name not in ATTACKS:
            remedy = nearest(name, ATTACKS, f"one or more of {', '.join(ATTACKS)}", both=True)
            raise ConfigError(f"--attacks {only!r}: {name!r} is none", remedy=remedy)
    if steps < 1 or not 0.0 <= points <= 100.0:
        raise ConfigError(
            f"--steps {steps} --points {points:g} cannot be", remedy="--steps 1 or more, --points from 0 to 100"
        )
    if base and Path(base).exists():
        raise ConfigError(f"{base} exists", remedy="give a new directory")
    with tempfile.TemporaryDirectory(prefix="outlast-attacks-") as scratch:
        place = Path(base or scratch)
        tried = Attacks(place, chosen, rule, [step.strip() for step in pre.split(",") if step.strip()], steps, _watch)
        place.mkdir(parents=True, exist_ok=True)
        found = tried.run()
    if as_json:
        print(json.dumps(msgspec.to_builtins(found)))
    else:
        _print(found, points)
    broken = any(not each.lost <= points for each in found.attacks)
    return 9 if broken or (found.reducer is not None and not found.reducer.right) else 0


def _watch(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def _print(found: Report, points: float) -> None:
    from outlast.observe.plain_text import table

    rule = " + ".join([*found.pre, found.rule])
    rows = [("none", f"{found.clean:.1f}", "", f"{found.clean_mean:.1f}")]
    rows += [(a.attack.replace("_", " "), f"{a.rule:.1f}", f"{a.lost:.1f}", f"{a.mean:.1f}") for a in found.attacks]
    print(table(("ATTACK", f"{rule.upper()} %", "LOST", "THE MEAN %"), rows))
    print(f"{found.f} of {found.rows} rows lie, all of one replica; accuracy after {found.steps} steps")
    if found.attacks:
        worst = max(found.attacks, key=lambda each: each.lost)
        print(f"the worst under the rule costs {worst.lost:.1f} points ({worst.attack}); {points:g} are allowed")
    if found.reducer is not None:
        named = ", ".join(f"{who} in step {step}" for who, step in found.reducer.named) or "nobody"
        print(f"{found.reducer.liar} lied as a reducer from step {found.reducer.step} on: {named} was named")
        print(f"the bits are {'those' if found.reducer.equal else 'NOT those'} of an honest run")
