"""`outlast prove catalogue`: the kinds of faults there are, what must follow from each, and how to inject it here."""

from __future__ import annotations

import json
from collections import Counter
from typing import Annotated

import typer

from outlast.errors import ConfigError

__all__ = ["catalogue"]


def catalogue(
    only: Annotated[str, typer.Option("--class", help="crash, omission or Byzantine; all if not said.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> int:
    """Print every kind of fault in the catalogue: its class, where it comes from, what must follow from it, the page
    that says so, and the command that injects it; or, where none can, why not."""
    from outlast.prove.catalogue import CATALOGUE

    if only and only not in ("crash", "omission", "Byzantine"):
        raise ConfigError(f"--class {only!r} is none", remedy="crash, omission or Byzantine")
    kinds = [kind for kind in CATALOGUE if only in ("", kind.kind)]
    if as_json:
        rows = [{"class" if key == "kind" else key: value for key, value in kind._asdict().items()} for kind in kinds]
        print(json.dumps({"kinds": rows, "injected": sum(bool(kind.by) for kind in kinds)}))
        return 0
    for kind in kinds:
        print(f"{kind.name} ({kind.kind}, {kind.layer})")
        print(f"  known by: {kind.truth}\n  expected: {kind.expected}\n  defence:  {kind.defence} ({kind.page})")
        print(f"  injected: {kind.by}" if kind.by else f"  not injected here: {kind.why_not}")
    counts = Counter(kind.kind for kind in kinds)
    told = ", ".join(f"{count} {name}" for name, count in counts.items())
    print(f"\n{len(kinds)} kinds: {told}; {sum(bool(kind.by) for kind in kinds)} of them can be injected here")
    return 0
