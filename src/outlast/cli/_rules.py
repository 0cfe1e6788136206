"""`outlast rules`: the robust rules, their conditions on n and f, and what they guarantee. Reads the catalogue only."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from outlast.core.policy.rules_catalogue import PRE_STEPS, RULES, RuleFact, check_rule, kappa, largest_f

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def rules(
    rows: Annotated[
        int | None, typer.Option("--rows", "-n", min=1, help="Rows: state the largest f for this n.")
    ] = None,
    f: Annotated[
        int | None, typer.Option("--f", "-f", min=0, help="Lying rows: list only rules that allow it.")
    ] = None,
    name: Annotated[str | None, typer.Option("--rule", help="One rule only.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of a table.")] = False,
) -> None:
    """List the robust aggregation rules, their conditions and guarantees."""
    if name is not None:
        check_rule(name, rows or 1_000, f or 0)
    facts = [fact for fact in RULES.values() if name in (None, fact.name) and _allowed(fact, rows, f)]
    described = [_describe(fact, rows, f) for fact in facts]
    steps = [_describe_step(step) for step in PRE_STEPS]
    if as_json:
        print(json.dumps({"rules": described, "pre": steps}, indent=2))
        return
    for entry in described:
        _print(entry["name"], entry)
    if not described:
        print(f"no rule tolerates f = {f} with {rows} rows: f must be below half of them")
    print("\nIn front of a rule (pre):")
    for entry in steps:
        _print(entry["name"], entry)
    print("\nn rows, at most f of them arbitrary; q = f / (n - 2 f). kappa: |result - mean of the honest|^2 <=")
    print("kappa x their variance, whoever lies. Derivations: docs/explanation/robust-aggregation.md")


def _allowed(fact: RuleFact, rows: int | None, f: int | None) -> bool:
    return rows is None or fact.largest_f(rows) >= (f or 0)


def _describe(fact: RuleFact, rows: int | None, f: int | None) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "name": fact.name, "what": fact.title, "kind": fact.family, "condition": fact.condition,
        "breakdown": fact.breakdown, "kappa": fact.kappa_text, "cost": fact.cost, "source": fact.source,
        "options": list(fact.options), "stateful": fact.stateful,
    }  # fmt: skip
    if rows is not None:
        entry["largest_f"] = largest_f(fact.name, rows)
        entry["kappa_at"] = kappa(fact.name, rows, entry["largest_f"] if f is None else f)
    return entry


def _describe_step(name: str) -> dict[str, Any]:
    step = PRE_STEPS[name]
    return {
        "name": step.name,
        "what": step.title,
        "condition": step.condition,
        "kappa": step.kappa_text,
        "cost": step.cost,
        "source": step.source,
        "options": list(step.options),
    }


def _print(name: str, entry: dict[str, Any]) -> None:
    print(f"\n{name}: {entry['what']}")
    for key in ("condition", "breakdown", "kappa", "cost", "source"):
        if key in entry:
            print(f"  {key:<10} {entry[key]}")
    if entry["options"]:
        print(f"  options    {', '.join(entry['options'])}")
    if "largest_f" in entry:
        value = entry["kappa_at"]
        print(f"  here       f <= {entry['largest_f']}, kappa {'unknown' if value is None else f'{value:.3g}'}")
