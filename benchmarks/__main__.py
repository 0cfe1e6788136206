"""List the benchmarks, or run one: `python -m benchmarks recovery --samples 3`; `all` runs each with its defaults."""

from __future__ import annotations

import ast
import importlib
import signal
import sys
from pathlib import Path

__all__ = ["main"]


def available() -> dict[str, str]:
    """Each benchmark beside this file, with the first line of its docstring. Nothing is imported to find out."""
    found = {}
    for path in sorted(Path(__file__).parent.glob("[!_]*.py")):
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        found[path.stem] = docstring.partition("\n")[0]
    return found


def main(argv: list[str]) -> int:
    names = available()
    if not argv or argv[0] in {"-h", "--help"}:
        print(__doc__, *(f"  {name:<12} {line}" for name, line in names.items()), sep="\n")
        return 0
    if argv[0] == "all":
        return max(importlib.import_module(f"benchmarks.{name}").main(argv[1:]) for name in names)
    if argv[0] not in names:
        print(f"no benchmark named {argv[0]!r}; there are: {', '.join(names)}", file=sys.stderr)
        return 2
    return int(importlib.import_module(f"benchmarks.{argv[0]}").main(argv[1:]))


def _ended(*_: object) -> None:
    """SIGTERM unwinds like an exception, so that every fleet's processes are ended on the way out."""
    sys.exit(143)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _ended)
    sys.exit(main(sys.argv[1:]))
