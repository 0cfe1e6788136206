"""The rooms: no circle of imports, no import of a room's own modules from outside, no public class name twice.

What is not so yet stands in `rooms.toml`, line by line. The lists only shrink: what is new fails, and so does a line
that has become untrue.
"""

from __future__ import annotations

import ast
import functools
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

TOP = Path(__file__).resolve().parents[2]
SOURCE = TOP / "src" / "outlast"
OWED = tomllib.loads(Path(__file__).with_name("rooms.toml").read_text(encoding="utf-8"))
REMEDY = "take the line out of tests/house/rooms.toml"


@functools.cache
def modules() -> dict[str, Path]:
    """Dotted name, without `outlast.`, to file."""
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def room_of(module: str) -> str:
    """The package that a module lies in; a package is its own."""
    return module if modules()[module].name == "__init__.py" else module.rpartition(".")[0]


def imported(module: str) -> Iterator[str]:
    """Modules of ours that it imports, anywhere in the file, for types too; by their whole name or from a dot."""
    for node in ast.walk(ast.parse(modules()[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("outlast."):
                    yield alias.name.partition(".")[2]
        elif isinstance(node, ast.ImportFrom) and (base := base_of(module, node)) is not None:
            for alias in node.names:
                inner = f"{base}.{alias.name}".strip(".")
                yield inner if inner in modules() else base


def base_of(module: str, node: ast.ImportFrom) -> str | None:
    """The package or module of ours that `from ... import` takes from, without `outlast.`; None where it is none."""
    if node.level:
        room = room_of(module).split(".")
        base = room[: len(room) - node.level + 1]
        return ".".join([*filter(None, base), *([node.module] if node.module else [])])
    found = node.module or ""
    return found.partition(".")[2] if found.split(".")[0] == "outlast" else None


@functools.cache
def graph() -> dict[str, frozenset[str]]:
    return {module: frozenset(imported(module)) - {module} for module in modules()}


def circles() -> list[list[str]]:
    """Sets of modules each of which imports, in the end, every other of its set."""
    after: dict[str, set[str]] = {}

    def reach(module: str) -> set[str]:
        seen: set[str] = set()
        waiting = [*graph()[module]]
        while waiting:
            at = waiting.pop()
            if at not in seen:
                seen.add(at)
                waiting += graph()[at]
        return seen

    for module in modules():
        after[module] = reach(module)
    rounds = {module for module in modules() if module in after[module]}
    groups = {frozenset({other for other in after[module] if module in after[other]}) for module in rounds}
    return sorted(sorted(group) for group in groups)


def test_modules_import_each_other_in_one_direction() -> None:
    """What two modules need of each other is an interface of its own (docs/decisions/0096)."""
    assert circles() == []


def test_no_way_of_writing_an_import_hides_it() -> None:
    """From a dot, from two, by its whole name."""
    assert {"plan._model", "plan.answers", "plan._svg"} <= graph()["plan.plan_report"]
    assert "examples" in graph()["prove.corruption"]
    [upward] = ast.parse("from .._source import Floats").body
    assert isinstance(upward, ast.ImportFrom)
    assert base_of("plan.traces._fit", upward) == "plan._source"


def test_a_room_s_own_modules_are_imported_by_nobody_else() -> None:
    """A module whose name begins with an underscore belongs to the package that it lies in."""
    found = {
        f"{module} -> {target}"
        for module, targets in graph().items()
        for target in targets
        if target.rpartition(".")[2].startswith("_") and room_of(module) != room_of(target)
        and not target.endswith("__main__")
    }  # fmt: skip
    owed = set(OWED["private_imports"])
    assert sorted(found - owed) == [], "import from the room's door, or from a module of it without an underscore"
    assert sorted(owed - found) == [], REMEDY


def test_a_module_that_only_its_own_room_imports_is_private() -> None:
    """So what a room offers is what others take from it. In the runtime and the protocol, whose rooms are internal."""
    started = {"runtime.host.agent", "runtime.coordinator.server"}  # by name, as processes
    rooms = ("runtime.", "core.protocol.")
    taken = {target for module, targets in graph().items() for target in targets if room_of(module) != room_of(target)}
    offered = {m for m in modules() if m.startswith(rooms) and modules()[m].name != "__init__.py"}
    offered = {module for module in offered if not module.rpartition(".")[2].startswith("_")}
    inner = {module for module in offered if room_of(module) == "core.protocol"}  # what its door offers
    assert sorted(offered - taken - started - inner) == []


def test_a_public_class_has_a_name_of_its_own() -> None:
    homes = defaultdict(list)
    for module, path in modules().items():
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(module)
    assert {name: places for name, places in homes.items() if len(places) > 1} == {}


def test_the_runtime_s_layers_except_nothing() -> None:
    contracts = tomllib.loads((TOP / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]
    rooms = next(c for c in contracts if c["name"] == "the runtime's rooms import downward only")
    assert "ignore_imports" not in rooms


def test_files_that_docstrings_name_exist() -> None:
    """A file in backticks lies beside who names it, or is named from a folder above both."""
    lost = []
    for module, path in modules().items():
        text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        for name in re.findall(r"`([a-z_0-9/]+\.(?:py|c))`", text):
            places = [path.parent, *(p for p in path.parents if p == SOURCE or SOURCE in p.parents), TOP]
            if not any((place / name).exists() for place in places):
                lost.append(f"{module}: {name}")
    assert lost == []
