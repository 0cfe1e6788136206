"""Whether there is a script, and whether Python can begin it: known before any process is started. No torch.

Role: what `run`, `prove` and `ckpt resume-check` are told to train, looked at. Nothing of it is imported or run, so
what is wrong with what it imports is told by each replica.
"""

from __future__ import annotations

import ast
import importlib
import os
import sys
import warnings
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path

from outlast.errors import ConfigError

__all__ = ["checked_script"]


def checked_script(script: str | None, module: str | None, args: list[str], usage: str) -> list[str]:
    """What Python is given: the script's path, or -m and a module, and its arguments. Raises ConfigError for what
    Python could not begin; `usage`: the right command."""
    if module is not None:
        _check_module(module, usage)
        return ["-m", module, *([] if script is None else [script]), *args]
    if script is None or not Path(script).is_file():
        what = "no script given" if script is None else f"no script {script}"
        if script is not None and Path(script).name.startswith("python"):
            what += ": leave out the word python"
        raise ConfigError(what, remedy=usage)
    if Path(script).suffix == ".py":  # else an archive, or what else Python runs
        _check_text(Path(script))
    return [script, *args]


def _check_text(path: Path) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # which each replica gives
            ast.parse(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", remedy="see its owner and mode") from error
    except SyntaxError as error:
        line = f", line {error.lineno}" if error.lineno else ""
        raise ConfigError(f"{path}{line}: {error.msg}", remedy="mend the script first") from error


def _check_module(name: str, usage: str) -> None:
    what, (found, sure) = f"no module {name}", _found(name)
    if found is not None and found.submodule_search_locations is not None:
        what, (found, sure) = f"{name} is a package without a __main__, which cannot be run", _found(f"{name}.__main__")
    if found is None and sure:
        hint = ": a script is given without -m" if Path(name).is_file() else ""
        raise ConfigError(what + hint, remedy=usage)
    if found is not None and found.has_location and str(found.origin).endswith(".py"):
        _check_text(Path(str(found.origin)))


def _found(name: str) -> tuple[ModuleSpec | None, bool]:
    """Where `python -m` finds a module, in the directory that it is started in first, and whether that is sure: no
    package is imported for it, and one that changes its own path as it is imported may hold more than is seen."""
    first, *rest = name.split(".")
    if not all((first, *rest)):
        return None, True
    importlib.invalidate_caches()
    found = PathFinder.find_spec(first, [os.getcwd()]) or _at_the_top(first)
    for count in range(1, len(rest) + 1):
        if found is None or found.submodule_search_locations is None:
            return None, True
        around, inner = found, ".".join((first, *rest[:count]))
        locations = list(found.submodule_search_locations)
        found = next((spec for finder in sys.meta_path if (spec := finder.find_spec(inner, locations))), None)
        if found is None:
            return None, not _changes_its_path(around)
    return found, True


def _at_the_top(name: str) -> ModuleSpec | None:
    try:
        return find_spec(name)
    except ValueError:  # something that was made without a file
        return None


def _changes_its_path(package: ModuleSpec) -> bool:
    try:
        return package.has_location and b"__path__" in Path(str(package.origin)).read_bytes()
    except OSError:
        return True
