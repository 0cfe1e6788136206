"""The page of what trains with what says what the tests show: each cell has its test, and the words it rests on."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from typing import Any

import pytest

TOP = Path(__file__).resolve().parents[2]
_spec = importlib.util.spec_from_file_location("matrix_page", TOP / "tests" / "house" / "matrix.py")
assert _spec is not None
assert _spec.loader is not None
matrix_page: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(matrix_page)
CELLS = matrix_page.cells()


@pytest.mark.parametrize(("what", "column", "cell"), CELLS, ids=[f"{what} - {column}" for what, column, _ in CELLS])
def test_a_cell_rests_on_a_test(what: str, column: str, cell: dict[str, str]) -> None:
    assert cell.keys() <= {"test", "in", "shows", "refused", "from"}
    place, _, function = cell["test"].partition("::")
    path = TOP / "tests" / place
    text = path.read_text(encoding="utf-8")
    named = {node.name: node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}
    assert function in named, f"{place} has no {function}: what shows {what!r} with {column}?"
    marks = " ".join(ast.unparse(mark) for mark in named[function].decorator_list)
    assert "mark.skip" not in marks
    assert "xfail" not in marks
    beside = text
    if "in" in cell:
        script = TOP / cell["in"]
        near = [text, *(other.read_text(encoding="utf-8") for other in path.parent.glob("*.py") if other.name in text)]
        assert any(script.stem in one for one in near), f"{place} runs no {script.name}"
        beside += script.read_text(encoding="utf-8")
    assert cell["shows"] in beside, f"neither {place} nor what it runs has {cell['shows']!r}"
    if "refused" in cell:
        assert cell["refused"] in (TOP / cell["from"]).read_text(encoding="utf-8")


def test_rows_and_columns_are_whole() -> None:
    found = matrix_page.matrix()
    keys = {column["key"] for column in found["columns"]}
    for row in found["rows"]:
        assert row.keys() <= {"what", *keys}
        assert len(row) > 1, f"{row['what']}: no cell"
    assert len({row["what"] for row in found["rows"]}) == len(found["rows"])


def test_the_page_is_what_the_cells_make() -> None:
    assert Path(matrix_page.PAGE).read_text(encoding="utf-8") == matrix_page.page(), "make names"
