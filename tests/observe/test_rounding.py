"""Figures are rounded for people by one rule: what the page's script writes is what the terminal writes."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
from importlib import resources

import pytest

from outlast.observe.rounding import counted, format_number, format_s, format_share, size

NODE = shutil.which("node")


def values() -> list[float]:
    """Halves of every kind, bounds, and whatever else."""
    halves = [0.0005, 0.0015, 0.0025, 0.1225, 1.125, 1.135, 12.25, 12.35, 59.5, 60.5, 61.5, 90.5, 1.0625, 0.03125]
    bounds = [0.0, 0.9994, 0.9995, 0.99951, 59.94, 59.95, 59.96, 3599.4, 3599.5, 3600.0, 7322.5, 1e-5, 0.0001, 99995.0]
    large = [999.4, 999.5, 1000.0, 1023.9, 1024.0, 1e6, 1048575.0, 123456.0, 1e9, 1.5e12, 3.7e15, 2.5e-7, 12345.5]
    chosen = random.Random(3)
    return halves + bounds + large + [chosen.uniform(1.0, 10.0) * 10.0 ** chosen.randrange(-6, 8) for _ in range(2000)]


@pytest.mark.skipif(NODE is None, reason="no node")
def test_the_page_s_script_rounds_as_the_terminal_does() -> None:
    script = str(resources.files("outlast.observe.web") / "page" / "format.js")
    ask = (
        f"import {{ seconds, number, percent, bytes }} from {json.dumps(f'file://{script}')};"
        "let text = ''; for await (const piece of process.stdin) text += piece;"
        "console.log(JSON.stringify(JSON.parse(text).map("
        "(v) => [seconds(v), number(v), number(v, 3), percent(v), bytes(v)])));"
    )
    assert NODE is not None
    command = [NODE, "--no-warnings", "--input-type=module", "-e", ask]
    done = subprocess.run(command, input=json.dumps(values()), capture_output=True, text=True, check=True)
    wrong = [
        (value, own, theirs)
        for value, theirs in zip(values(), json.loads(done.stdout), strict=True)
        if (own := [format_s(value), format_number(value), format_number(value, 3), format_share(value), size(value)])
        != theirs
    ]
    assert wrong == []


def test_a_size_has_no_exponent() -> None:
    assert [size(number) for number in (0, 1, 999, 1000, 1023, 1024, 1536, 1047552, 3 * 2**60)] == [
        "0 B", "1 B", "999 B", "1000 B", "1023 B", "1 KiB", "1.5 KiB", "1023 KiB", "3145728 TiB",
    ]  # fmt: skip


def test_a_number_of_things_agrees_with_its_noun() -> None:
    assert [counted(1, "step"), counted(2000, "step"), counted(0, "recovery", "recoveries")] == [
        "1 step", "2,000 steps", "0 recoveries",
    ]  # fmt: skip
