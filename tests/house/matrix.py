"""Write docs/reference/matrix.md from matrix.toml, as `make names` writes the public names; `test_matrix.py` holds it.

python tests/house/matrix.py > docs/reference/matrix.md
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

TOP = Path(__file__).resolve().parents[2]
CELLS = TOP / "tests" / "house" / "matrix.toml"
PAGE = TOP / "docs" / "reference" / "matrix.md"

HEAD = """\
# What trains with what

<!-- from tests/house/matrix.toml: python tests/house/matrix.py > docs/reference/matrix.md -->

**bits**: a test disturbs such a training, and it ends with the bits of one that nothing happened to. **refused**: it
is refused by name, with what to write instead, and a test sees that. **·**: nobody has tried it in a test; it may work.
Tests that need Hugging Face, Lightning or torchdata are skipped where these are not installed. These tests run on
processors.

"""
FOOT = """
## The tests

"""


def matrix() -> dict[str, Any]:
    """The file of cells."""
    return tomllib.loads(CELLS.read_text(encoding="utf-8"))


def cells() -> list[tuple[str, str, dict[str, str]]]:
    """(row, column's key, cell) of each cell that there is."""
    found = matrix()
    keys = [column["key"] for column in found["columns"]]
    return [(row["what"], key, row[key]) for row in found["rows"] for key in keys if key in row]


def page() -> str:
    """The page that the cells make."""
    found, number = matrix(), dict[str, int]()
    titles = [column["title"] for column in found["columns"]]
    lines = ["| | " + " | ".join(titles) + " |", "|---" * (len(titles) + 1) + "|"]
    for row in found["rows"]:
        shown = []
        for column in found["columns"]:
            cell = row.get(column["key"])
            if cell is None:
                shown.append("·")
                continue
            place = number.setdefault(cell["test"], len(number) + 1)
            shown.append(f"{'refused' if 'refused' in cell else 'bits'} <sup>{place}</sup>")
        lines.append(f"| {row['what']} | " + " | ".join(shown) + " |")
    tests = [f"{place}. `tests/{test}`" for test, place in number.items()]
    return HEAD + "\n".join(lines) + "\n" + FOOT + "\n".join(tests) + "\n"


if __name__ == "__main__":
    print(page(), end="")
