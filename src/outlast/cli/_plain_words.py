"""Command lines of a run and of switches alone, read without typer.

To load typer, and click with it, takes as long as everything else that `outlast status` does. So the commands that are
to answer at once have a function that needs neither, and their plainest lines are read here. Every other line, each
wrong one among them, is typer's, which can say what is wrong with it. The tests hold the two ways to one reading.
"""

from __future__ import annotations

import gc
import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["PLAIN", "Plain", "read_plainly", "run_plainly"]


class Plain(NamedTuple):
    """A command: where its function is, which argument each switch sets, and whether a line may name a run."""

    module: str
    function: str
    switches: Mapping[str, str]
    takes_run: bool = True


PLAIN = {
    "status": Plain("outlast.cli._show_status", "show_status", {"--json": "as_json"}),
    "why": Plain("outlast.cli._tell_story", "tell_story", {"--json": "as_json", "--all": "every"}),
    "doctor": Plain(
        "outlast.cli._check_host", "check_host",
        {"--quick": "quick", "--strict": "strict", "--json": "as_json"}, takes_run=False,
    ),
}  # fmt: skip


def read_plainly(args: Sequence[str]) -> dict[str, Any] | None:
    """The arguments for the function of a command; None for a line that is not of the plainest."""
    plain = PLAIN.get(args[0])
    if plain is None:
        return None
    words = [word for word in args[1:] if word not in plain.switches]
    if len(words) > plain.takes_run or any(word.startswith("-") for word in words):
        return None
    given: dict[str, Any] = {plain.switches[word]: True for word in args[1:] if word in plain.switches}
    return given if not words else {**given, "run": Path(words[0])}


def run_plainly(name: str, given: Mapping[str, Any]) -> int:
    """Call the function of a command; returns the exit code."""
    plain = PLAIN[name]
    collects = gc.isenabled()
    gc.disable()  # it would walk again and again through what is imported and read, which lasts until the answer is out
    try:
        code: int = getattr(importlib.import_module(plain.module), plain.function)(**given)
    finally:
        if collects:
            gc.enable()
    return code
