"""Does stopping and resuming a script give what never stopping gives, to the bit? Three runs of it, and a comparison.

The first runs `steps` steps without a stop and saves as it goes; the second stops after `stop_at`; the third resumes
from what the second left and runs to the end, if wanted on several replicas. Generations of the same step are compared
from the earliest on, so that the first thing that differs is named with the step in which it first does. The script
runs as it is, but ends with its loop: what follows the loop is not run.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from outlast.checkpoint import LocalStore, Reader, heads
from outlast.errors import ConfigError, ProveError

__all__ = ["ResumeVerdict", "differences", "first_value", "resume_check"]

_NEVER = 1 << 39  # steps between saves
_TAIL = 3000


class ResumeVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """`same`: to the bit. Else `first` differs after `step` steps, `how`; `others`: how many more do. `compared`: the
    steps after which both were compared. `resumed`: whether the difference came with resuming, or was there before."""

    same: bool
    compared: list[int]
    step: int = -1
    first: str = ""
    how: str = ""
    others: int = 0
    resumed: bool = True


def resume_check(
    script: Sequence[str],
    folder: Path,
    *,
    steps: int = 8,
    stop_at: int = 4,
    replicas: int = 1,
    timeout_s: float = 600.0,
    progress: Callable[[int, int], None] | None = None,
) -> ResumeVerdict:
    """Run `script` (a path or `-m MODULE`, and its arguments) three times, keeping everything under `folder`.

    `progress` is told how many of how many runs are over.
    Raises ConfigError for steps that leave nothing to compare, ProveError if the script fails or saves nothing.
    """
    if not 0 < stop_at < steps:
        raise ConfigError(f"a stop after {stop_at} of {steps} steps", remedy="0 < --stop-at < --steps")
    if replicas < 1 or not timeout_s > 0:
        raise ConfigError(f"{replicas} replicas, {timeout_s:g} s", remedy="--replicas 1 or more, --timeout above 0")
    if script[0] != "-m" and not Path(script[0]).is_file():
        raise ConfigError(f"no script {script[0]}", remedy="outlast ckpt resume-check [OPTIONS] train.py ARGS…")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is not an empty directory", remedy="give --keep a new one")
    whole, parted = folder / "never-stopped", folder / "stopped"
    plain = [sys.executable, *script]
    fleet = [sys.executable, "-m", "outlast", "run", "--json", "--replicas", str(replicas), "--run-dir",
             str(folder / "run"), *script]  # fmt: skip
    tell = progress if progress is not None else _told_to_nobody
    tell(0, 3)
    _run(plain, whole, until=steps, every=1, resume="never", timeout_s=timeout_s)
    tell(1, 3)
    _run(plain, parted, until=stop_at, every=_NEVER, resume="never", timeout_s=timeout_s)
    tell(2, 3)
    _run(plain if replicas == 1 else fleet, parted, until=steps, every=1, resume="auto", timeout_s=timeout_s)
    return _compare(LocalStore(str(whole)), LocalStore(str(parted)), stop_at)


def _told_to_nobody(_done: int, _total: int) -> None:
    pass


def _run(command: Sequence[str], place: Path, *, until: int, every: int, resume: str, timeout_s: float) -> None:
    environ = {k: v for k, v in os.environ.items() if not k.startswith("OUTLAST")} | {
        "OUTLAST_CHECKPOINT_DIR": str(place),
        "OUTLAST_CHECKPOINT_EVERY": str(every),
        "OUTLAST_RESUME": resume,
        "OUTLAST_CHECKPOINT_KEEP": "1000000",
        "OUTLAST_UNTIL": str(until),
    }
    try:
        done = subprocess.run(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ProveError(
            f"the script did not end within {timeout_s:g} s", remedy="--timeout, or fewer --steps"
        ) from error
    if done.returncode:
        text = (done.stdout + done.stderr)[-_TAIL:]
        raise ProveError(f"the script ended with {done.returncode}; the end of what it said:\n{text}")
    if not heads(LocalStore(str(place)), newest=1)[0]:
        raise ProveError(
            "the script saved nothing", remedy="it must train through outlast's protect(), and not say checkpoint='off'"
        )


def _compare(a: LocalStore, b: LocalStore, stop_at: int) -> ResumeVerdict:
    """The newest generation of each step on both sides, from the stop on."""
    ours, theirs = ({h.step: h for h in reversed(heads(store)[0])} for store in (a, b))
    common = sorted(step for step in ours.keys() & theirs.keys() if step >= stop_at)
    if not any(step > stop_at for step in common):
        raise ProveError(f"no step after {stop_at} was saved by both", remedy="more --steps")
    for index, step in enumerate(common):
        with Reader(ours[step], [a]) as left, Reader(theirs[step], [b]) as right:
            found = differences(left, right)
        if found:
            name, how = found[0]
            return ResumeVerdict(
                same=False,
                compared=common[: index + 1],
                step=step,
                first=name,
                how=how,
                others=len(found) - 1,
                resumed=step > stop_at,
            )
    return ResumeVerdict(same=True, compared=common)


def differences(a: Reader, b: Reader) -> list[tuple[str, str]]:
    """(name, how) of each tensor that differs between two generations, and of the first other value that does."""
    from outlast.checkpoint.diff import diff

    rows = [
        (d.name, f"{d.kind}: {d.detail}" + (f" ({d.num_differing} of {d.num_elements})" if d.num_elements else ""))
        for d in diff(a, b)
    ]
    value = first_value(_named(a), _named(b))
    return [*rows, *([value] if value else [])]


def _named(reader: Reader) -> Any:
    """The tree with the names of its tensors in place of their numbers, which depend on the order of saving."""

    def walk(node: Any) -> Any:
        if isinstance(node, dict) and set(node) == {"T"}:
            return {"T": reader.tensors[node["T"]].name}
        if isinstance(node, dict):
            return {tag: walk(value) for tag, value in node.items()}
        return [walk(item) for item in node] if isinstance(node, list) else node

    return walk(reader.tree)


def first_value(a: Any, b: Any, path: str = "") -> tuple[str, str] | None:
    """(place, how) of the first value beside the tensors that differs; dicts are compared whatever their order."""
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys() and len(a) == 1:
        (tag,) = a
        x, y = a[tag], b[tag]
        if tag in ("d", "od", "ct"):
            left, right = ({msgspec.json.encode(k): v for k, v in rows} for rows in (x, y))
            for key in sorted(left.keys() ^ right.keys()):
                return f"{path}.{key.decode()}".lstrip("."), "only one of the two has it"
            pairs = [(key.decode().strip('"'), left[key], right[key]) for key in left]
            return next((d for k, p, q in pairs if (d := first_value(p, q, f"{path}.{k}".lstrip(".")))), None)
        if tag in ("l", "t") and len(x) == len(y):
            rows = enumerate(zip(x, y, strict=True))
            return next((d for i, (p, q) in rows if (d := first_value(p, q, f"{path}.{i}".lstrip(".")))), None)
    return None if a == b else (path or "the state", f"{a} and {b}"[:300])
