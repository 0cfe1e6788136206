"""`outlast prove lost-weekend`: six hours of work lost while nobody was awake, and its mended form, on processes."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from outlast.errors import ConfigError

if TYPE_CHECKING:
    from outlast.prove.lost_weekend import Weekend

__all__ = ["lost_weekend"]


def lost_weekend(
    asleep: Annotated[float, typer.Option(help="Hours until somebody notices; told, and not waited for.")] = 8.0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> int:
    """Re-enact a lost weekend: a checkpoint every six hours, an error just before the next one, nobody awake; then the
    same error with a checkpoint every half hour and a spare. A step stands for six minutes, a SIGKILL for the error.
    Exit code 8 if the two do not end with the same bits, or the mended form did a step twice."""
    from outlast.prove.lost_weekend import LostWeekend

    if not 0.0 <= asleep <= 10_000.0:
        raise ConfigError(f"--asleep {asleep:g} cannot be", remedy="hours, from 0 to 10000")
    base = Path(tempfile.mkdtemp(prefix="outlast-weekend-"))
    shown = sys.stderr.isatty()

    def watch(what: str, step: int) -> None:
        if shown:
            print(f"\r{what}: step {step}   ", end="", file=sys.stderr, flush=True)

    found = LostWeekend(base, asleep, watch).run()
    shutil.rmtree(base, ignore_errors=True)
    if shown:
        print("\r", end="", file=sys.stderr)
    if as_json:
        print(json.dumps(msgspec.to_builtins(found) | {"lost_h": found.lost_h}))
    else:
        _print(found)
    return 0 if found.before.fingerprint == found.after.fingerprint and not found.after.twice else 8


def _print(found: Weekend) -> None:
    from outlast.prove.lost_weekend import MINUTES_A_STEP

    def hours(steps: int) -> str:
        return f"{steps} steps, {steps * MINUTES_A_STEP / 60:g} h"

    before, after = found.before, found.after
    rows = [
        ("saved every", hours(before.checkpoint_every), hours(after.checkpoint_every)),
        ("spares", str(before.spares), str(after.spares)),
        ("begun again by", f"a person, after {found.asleep_h:g} h", "itself"),
        ("done twice", hours(before.twice), hours(after.twice)),
        ("stood still", f"{found.asleep_h:g} h, and {before.still_s:.2f} s", f"{after.still_s:.2f} s"),
        ("ended with", before.fingerprint[:16], after.fingerprint[:16]),
    ]
    for name, old, new in [("", "before", "mended"), *rows]:
        print(f"{name:16}{old:28}{new}")
    same = "the same bits" if before.fingerprint == after.fingerprint else "DIFFERENT BITS"
    print(f"an error in step {found.error_at} of {found.steps}; a step stands for {MINUTES_A_STEP} minutes")
    print(f"the error cost {found.lost_h:g} h of the fleet before, and {after.still_s:.2f} s since; {same}")
