"""What `outlast run` was told, looked at before anything is started: where the run shall be, and whose an option is.

Nothing is started or written here, and nothing imported that is slow to load.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from pathlib import Path

from outlast.cli._runs import DEFAULT_RUNS
from outlast.errors import ConfigError

__all__ = ["argument_for", "check_run_dir", "tell_of_own_options"]


_OF_PROTECT = frozenset({
    "microbatches", "global_batch_size", "seed", "shuffle", "clip_norm", "num_workers", "drop_last", "scheduler",
    "scaler",
})  # fmt: skip


def argument_for(option: str) -> str:
    """The argument of `protect` that an option which `outlast run` does not have is called like; "" for none."""
    name = option.lstrip("-").replace("-", "_")
    return name if name in _OF_PROTECT else ""


def check_run_dir(run_dir: Path | None) -> None:
    """Raise ConfigError for a directory that holds runs: `status` and `why` would take the new run for all of them.
    None: a new one is made."""
    from outlast.journal import holds_run

    if run_dir is None:
        return
    try:
        among = next((entry for entry in run_dir.iterdir() if holds_run(entry)), None) if run_dir.is_dir() else None
    except OSError:  # told where the run's files are made
        among = None
    if among is not None:
        what = f"--run-dir {run_dir} holds other runs ({among.name})"
    elif run_dir.resolve() == Path(DEFAULT_RUNS).resolve():
        what = f"--run-dir {run_dir} is the folder in which runs get directories of their own"
    else:
        return
    raise ConfigError(what, remedy=f"a new directory in it: --run-dir {run_dir}/NAME, or leave --run-dir out")


def tell_of_own_options(command: Sequence[str], own: Collection[str]) -> None:
    """Say on standard error which of the script's arguments bear the names of `own`, the options of `outlast run`.

    `command`: Python, the script (or -m and a module), and its arguments. It is no error: a script may have such an
    option, and it is given it.
    """
    at = 3 if command[1] == "-m" else 2
    found = [name for word in command[at:] if (name := word.partition("=")[0]) in own]
    if not found:
        return
    script = " ".join(command[1:at])
    names = " and ".join(dict.fromkeys(found))
    print(
        f"outlast: {names} after {script} is given to the script; an option of outlast's goes before it: "
        f"outlast run {found[0]} … {script}",
        file=sys.stderr,
        flush=True,
    )
