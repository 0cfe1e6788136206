"""The public names are locked, and each has a home."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

HERE = Path(__file__).parent


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


names = _load(HERE / "public_names.py")


def test_public_names_change_only_on_purpose() -> None:
    golden = (HERE / "public_names.txt").read_text(encoding="utf-8").splitlines()
    found = names.listing().splitlines()
    gone, new = sorted(set(golden) - set(found)), sorted(set(found) - set(golden))
    remedy = "make names (and a line in CHANGELOG.md)"
    assert not gone, f"gone: {gone}; if that is meant: {remedy}"
    assert not new, f"new: {new}; if that is meant: {remedy}"


@pytest.mark.parametrize("module", names.public_modules())
def test_every_public_name_is_bound_in_its_module(module: str) -> None:
    path = names.public_modules()[module]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    bound = {node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)}
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom() | ast.Import():
                bound |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
            case ast.Name(ctx=ast.Store()):
                bound.add(node.id)
    assert set(names.names_of(path)) <= bound


def test_every_room_says_what_it_is_for() -> None:
    rooms = [path for module, path in names.public_modules().items() if path.name == "__init__.py"]
    silent = [str(path) for path in rooms if not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))]
    assert not silent
