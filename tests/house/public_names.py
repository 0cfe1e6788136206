"""Every public name of outlast, by module, read from the source without importing it.

`make names` writes the list that the test holds the code to: a name is added or taken away on purpose, in the same
change.
"""

from __future__ import annotations

import ast
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2] / "src"


def public_modules() -> dict[str, Path]:
    """Modules without a leading underscore anywhere in their name, but `__main__`, the examples, and what rooms offer
    each other beside their doors."""
    modules: dict[str, Path] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = [part for part in path.relative_to(SOURCE).with_suffix("").parts if part != "__init__"]
        room = parts[:2] == ["outlast", "core"] and len(parts) > 3
        if parts[:2] in [["outlast", name] for name in ("checkpoint", "observe", "plan", "prove", "runtime")]:
            room = len(parts) > 2 and (parts[1] in ("checkpoint", "runtime") or path.name != "__init__.py")
        if not any(part.startswith("_") for part in parts) and "examples" not in parts and not room:
            modules[".".join(parts)] = path
    return modules


def names_of(path: Path) -> list[str]:
    """The module's `__all__`, in order of the alphabet; empty without one."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            return sorted(ast.literal_eval(node.value))
    return []


def listing() -> str:
    """One line a name: `module.name`."""
    return "".join(f"{module}.{name}\n" for module, path in public_modules().items() for name in names_of(path))


if __name__ == "__main__":
    print(listing(), end="")
