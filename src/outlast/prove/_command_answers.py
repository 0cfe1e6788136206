"""What outlast's own commands say of a run, asked in processes of their own so that they are what anybody would see."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

__all__ = ["decoded", "printed", "words"]

_ANSWER_S = 30.0  # for a command that prints what the journal says


def printed(command: list[str], environ: Mapping[str, str]) -> dict[str, Any]:
    """What one of our commands prints with `--json`; with the key `error` where it fails."""
    code, text = _answer([*command, "--json"], environ)
    return {"error": text} if code else decoded(text)


def words(command: list[str], environ: Mapping[str, str]) -> str:
    """What it prints for people, or what it says where it fails."""
    return _answer(command, environ)[1]


def _answer(command: list[str], environ: Mapping[str, str]) -> tuple[int, str]:
    """(exit code, what it printed; where that is not 0, with the end of what it complained of)."""
    try:
        process = subprocess.run(
            [sys.executable, "-m", "outlast", *command],
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_ANSWER_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return 1, f"no answer in {_ANSWER_S:g} s"
    return process.returncode, process.stdout + process.stderr[-1000:] * bool(process.returncode)


def decoded(text: str) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(text)
    except ValueError:
        return {"error": f"not JSON: {text[:200]}"}
    return found
