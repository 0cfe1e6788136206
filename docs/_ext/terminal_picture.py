"""Draw a recording of a terminal as one SVG that plays: `terminal_picture.py demo.json demo.svg`.

The recording, as `record` makes it of a command's output: {"command": ..., "rows": [[seconds, text], ...]}. Lines come
as they came, pauses cut to a second and a half. Where nothing plays (a printer) all lines are there.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from html import escape
from pathlib import Path

_LONGEST_PAUSE_S, _STAY_S = 1.5, 8.0
_CHAR, _LINE, _PAD, _MOST_COLUMNS = 7.8, 18, 16, 128


def record(command: list[str]) -> dict[str, object]:
    """Run a command; what it printed, with the seconds since its start."""
    start_s = time.monotonic()
    rows: list[tuple[float, str]] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        rows += [(round(time.monotonic() - start_s, 3), line.rstrip("\n")) for line in process.stdout]
    return {"command": " ".join(command), "rows": rows}


def picture(recording: dict[str, list[tuple[float, str]]], command: str) -> str:
    """The SVG. `command`: what is shown as typed."""
    rows = [(0.0, f"$ {command}"), *recording["rows"]]
    times, now_s, last_s = [], 0.0, 0.0
    for at_s, _ in rows:
        now_s += min(_LONGEST_PAUSE_S, max(0.0, at_s - last_s))
        last_s = at_s
        times.append(now_s)
    whole_s = now_s + _STAY_S
    columns = min(_MOST_COLUMNS, max(len(text) for _, text in rows))
    width, height = round(columns * _CHAR + 2 * _PAD), len(rows) * _LINE + 2 * _PAD
    told = zip((text for _, text in rows), times, strict=True)
    lines = [_line(index, text[:columns], at_s / whole_s, whole_s) for index, (text, at_s) in enumerate(told)]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{escape(command)} in a terminal">\n'
        f'<rect width="{width}" height="{height}" rx="8" fill="#10151b"/>\n'
        '<g font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, DejaVu Sans Mono, monospace" font-size="13">\n'
        + "\n".join(lines)
        + "\n</g>\n</svg>\n"
    )


def _line(index: int, text: str, share: float, whole_s: float) -> str:
    y, told = _PAD + (index + 1) * _LINE - 5, text.replace(" ", "\N{NO-BREAK SPACE}")  # others are run together
    play = (
        f'<animate attributeName="opacity" values="0;1;1" keyTimes="0;{share:.4f};1" calcMode="discrete" '
        f'dur="{whole_s:.1f}s" repeatCount="indefinite"/>'
        if share > 0
        else ""
    )
    place = f'x="{_PAD}" y="{y}" fill="{_colour(text)}" textLength="{len(text) * _CHAR:.0f}"'
    return f"<text {place}>{play}{escape(told)}</text>"


def _colour(text: str) -> str:
    if text.startswith("$ "):
        return "#77b6f2"
    if "! " in text:
        return "#ff9838"
    return "#35b384" if "identical" in text or "steps lost              0" in text else "#e8edf3"


if __name__ == "__main__":
    if sys.argv[1] == "record":
        Path(sys.argv[2]).write_text(json.dumps(record(sys.argv[3:]), ensure_ascii=False, indent=0), encoding="utf-8")
    else:
        made = picture(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), sys.argv[3])
        Path(sys.argv[2]).write_text(made, encoding="utf-8")
