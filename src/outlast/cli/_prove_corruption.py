"""`outlast prove corruption`: the campaign of flipped bits, and its report."""

from __future__ import annotations

import json
import math
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from outlast.errors import ConfigError, nearest

if TYPE_CHECKING:
    from outlast.prove.corruption import FlipTally

__all__ = ["campaign"]

_DTYPES = ("float32", "bfloat16")


def campaign(flips: int, seed: int, guards: str, audit: str, dtype: str, base: str, as_json: bool) -> int:
    """Exit code 9 if a flip of a parameter or moment was missed (with audit = 1: any flip), a wrong replica named, or a
    clean step accused."""
    from outlast.core.policy import Guards
    from outlast.prove.corruption import Corruptions

    share, dtypes = _share(audit), _dtypes(dtype)
    if flips < 1:
        raise ConfigError(f"--flips {flips}: there is nothing to flip", remedy="--flips 1 or more, three to a fleet")
    if seed < 0:
        raise ConfigError(f"--seed {seed} is below 0", remedy="--seed 0 or more")
    Guards.of(guards)
    if base and Path(base).exists():
        raise ConfigError(f"{base} exists", remedy="give a new directory")
    with tempfile.TemporaryDirectory(prefix="outlast-corruption-") as scratch:
        place = Path(base or scratch)
        place.mkdir(parents=True, exist_ok=True)

        def watch(done: int, of: int) -> None:
            print(f"{done} of {of} fleets", file=sys.stderr, flush=True)

        found = Corruptions(place, flips, seed, guards, dtypes, share, watch).run()
    if as_json:
        print(json.dumps(msgspec.to_builtins(found)))
    else:
        _print(found)
    promised = {"parameter", "moment"} if guards != "off" else set()
    promised |= {"gradient", "reducer", "sum"} if share == 1.0 else set()
    missed = any(not each.detected and each.target in promised for each in found.injections)
    return 9 if missed or (promised and (found.wrong_culprits or found.false_alarms)) else 0


def _share(audit: str) -> float:
    """ConfigError for what is no number from 0 to 1; "auto" is none, as a campaign tells what a known share finds."""
    try:
        share = float(audit)
    except ValueError:
        share = math.nan
    if 0.0 <= share <= 1.0:
        return share
    raise ConfigError(
        f"--audit {audit} is no share", remedy="a number from 0 (none) to 1 (every microbatch and reduction twice)"
    )


def _dtypes(dtype: str) -> list[str]:
    names = list(dict.fromkeys(name.strip() for name in dtype.split(",")))
    for name in names:
        if name not in _DTYPES:
            known = f"one of {', '.join(_DTYPES)}, or both with a comma between"
            raise ConfigError(f"--dtype {dtype!r}: {name!r} is none", remedy=nearest(name, _DTYPES, known, both=True))
    return names


def _print(found: FlipTally) -> None:
    from outlast.observe.plain_text import table

    rows = [
        (
            each.target,
            each.dtype,
            str(each.bit),
            "stuck" if each.persistent else "once",
            each.replica,
            str(each.step),
            each.action.replace("_", " ") or "not noticed",
            str(each.after_steps) if each.detected else "",
            ("yes" if each.right else "no") if each.detected else "",
        )
        for each in found.injections
    ]
    print(table(("FLIPPED", "DTYPE", "BIT", "", "IN", "STEP", "VERDICT", "AFTER STEPS", "NAMED"), rows))
    for target, row in found.recall.items():
        wait = f", after {found.after_steps[target]:.1f} steps" if target in found.after_steps else ""
        if found.latest.get(target) == 0:
            wait = ", before the step was committed"
        print(f"{target}: {row['found']} of {row['of']} found{wait}")
    named = sum(each.right for each in found.injections)
    print(f"the guilty replica was named {named} times, another {found.wrong_culprits} times")
    print(
        f"{found.false_alarms} false alarms in {found.clean_steps} clean steps"
        + ("" if found.false_alarms else f": at 95 % their rate is below {found.false_alarm_bound:.1e} a step")
    )
    print(f"{found.equal_runs} of {found.runs} runs ended with the bits of the run that nothing happened to")
    if not found.audit and any(not each.detected and each.target == "gradient" for each in found.injections):
        print("a gradient's flip that neither overflows nor leaves its band is what audits are for: --audit 1")
