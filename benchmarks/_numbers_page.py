"""Write the documentation's page of numbers beside peers from RESULTS.md: `python -m benchmarks._numbers_page`.

Each table is taken as it stands there, under its heading, with what was measured and on what; nothing is typed twice.
A test holds the page to this.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

__all__ = ["PAGE", "RESULTS", "page"]

RESULTS = Path(__file__).with_name("RESULTS.md")
PAGE = Path(__file__).resolve().parents[1] / "docs" / "explanation" / "numbers.md"
_HEAD = """# Numbers beside peers

Written from `benchmarks/RESULTS.md` (`make numbers`), where every bound, every run that missed one, and what disturbed
it stand too. All of it was measured on two shared cores with small models, so ratios say more than seconds.
`python -m benchmarks NAME` measures any of it again.
"""


class _Part(NamedTuple):
    """`heading`: as in RESULTS; `section`: the heading above it that says when and on what ("" if its own text does);
    `before`: words of the line that the table follows; `title`, `says`: this page's own."""

    title: str
    heading: str
    before: str
    section: str
    says: str


_PARTS: Sequence[_Part] = (
    _Part("After a SIGKILL", "### SIGKILL of one replica", "", "## recovery",
          "Seconds until the next step is committed; the peers were told to give up a collective after 5 s."),
    _Part("A step, beside plain DDP: 0.15M parameters", "### 0.15M parameters, 4 replicas, 8 microbatches", "",
          "## overhead", "Nothing fails. outlast's exchange goes through shared memory, and over Gloo as DDP's does."),
    _Part("3.2M parameters", "### 3.2M parameters, 4 replicas, 8 microbatches", "", "", ""),
    _Part("10M parameters", "### 10M parameters, 4 replicas, 8 microbatches", "", "", ""),
    _Part("A step, beside torchft", "### torchft in the same run", "", "### torchft in the same run", ""),
    _Part("A checkpoint", "## A checkpoint", "Beside its peers in one run", "",
          "A state of 1 GiB. Blocked: until it may be overwritten; durable: fsynced."),
    _Part("Bytes sent, beside a ring all-reduce", "## Bytes sent, counted at the sockets", "",
          "## Bytes sent, counted at the sockets", "A rank and step, with and without a robust rule."),
)  # fmt: skip


def page(results: str) -> str:
    """The page. ValueError where RESULTS has no such table any more."""
    parts = [_HEAD]
    for part in _PARTS:
        said = [f"## {part.title}"]
        said += [part.says] if part.says else []
        said += [_first_paragraph(_body(results, part.section))] if part.section else []
        parts.append("\n\n".join([*said, _table(_body(results, part.heading), part)]) + "\n")
    return "\n".join(parts)


def _body(results: str, heading: str) -> str:
    """What stands under a heading, to the next one."""
    found = re.search(rf"^{re.escape(heading)}\n(.*?)(?=^#|\Z)", results, re.MULTILINE | re.DOTALL)
    if found is None:
        raise ValueError(f"RESULTS.md has no heading {heading!r}; mend benchmarks/_numbers_page.py")
    return found[1]


def _first_paragraph(body: str) -> str:
    return body.strip().partition("\n\n")[0]


def _table(body: str, part: _Part) -> str:
    after = body[body.find(part.before) :] if part.before in body else ""
    found = re.search(r"(?:^\|.*\n)+", after, re.MULTILINE)
    if found is None:
        raise ValueError(f"RESULTS.md has no table under {part.heading!r}; mend benchmarks/_numbers_page.py")
    return found[0].rstrip("\n")


if __name__ == "__main__":
    PAGE.write_text(page(RESULTS.read_text(encoding="utf-8")), encoding="utf-8")
