"""Changes of a text by place: of expressions, whole lines and their indentation; everything else stays as it is.

Places are those of `ast`: lines from 1, columns in bytes of UTF-8. Does not know Python.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from typing import Any

__all__ = ["Edits", "quoted_lines"]


class Edits:
    """Collected changes of one text; `text()` applies them."""

    def __init__(self, source: str) -> None:
        self._lines = [line.encode() for line in re.split(r"\r\n|\r|\n", source)]
        if self._lines and not self._lines[-1]:
            self._lines.pop()
        self._places: list[tuple[tuple[int, int], tuple[int, int], bytes]] = []
        self._dropped: set[int] = set()
        self._before: dict[int, list[str]] = defaultdict(list)
        self._deeper: dict[int, int] = defaultdict(int)
        self._quoted: set[int] = set()  # lines that begin inside of a string

    def segment(self, node: Any) -> str:
        """The text of a node as it was, on one line."""
        lines = self._lines[node.lineno - 1 : node.end_lineno]
        if len(lines) == 1:
            return lines[0][node.col_offset : node.end_col_offset].decode()
        return ast.unparse(node)

    def put(self, node: Any, text: str) -> None:
        """Write this in the place of an expression."""
        start, end = (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)
        self._places = [p for p in self._places if not (start <= p[0] and p[1] <= end)]  # inside of it
        if not any(p[0] <= start and end <= p[1] for p in self._places):
            self._places.append((start, end, text.encode()))

    def drop(self, statement: Any) -> None:
        """Leave a statement's lines out."""
        self.drop_lines(statement.lineno, statement.end_lineno)

    def drop_lines(self, first: int, last: int) -> None:
        """Leave lines out, both of these and those between."""
        self._dropped |= set(range(first, last + 1))

    def insert(self, line: int, text: str) -> None:
        """Put a line before this one."""
        self._before[line].append(text)

    def deepen(self, first: int, last: int, by: int) -> None:
        """Indent lines."""
        for line in set(range(first, last + 1)) - self._quoted:
            self._deeper[line] += by

    def keep_strings(self, tree: ast.AST) -> None:
        """Lines inside of strings are never indented."""
        self._quoted |= quoted_lines(tree)

    def first_of(self, statement: Any) -> int:
        """The line of a statement, or of the comments above it."""
        line = int(statement.lineno)
        while line > 1 and self._lines[line - 2].lstrip().startswith(b"#"):
            line -= 1
        return line

    def indent_of(self, statement: Any) -> str:
        return " " * int(statement.col_offset)

    def text(self) -> str:
        """The changed text."""
        lines = dict(enumerate(self._lines, 1))
        for (line, start), (last, end), text in sorted(self._places, reverse=True):
            head, tail = lines[line][:start], lines[last][end:]
            for between in range(line + 1, last + 1):
                lines.pop(between, None)
                self._dropped.add(between)
            lines[line] = head + text + tail
        made: list[str] = []
        for number in range(1, len(self._lines) + 2):
            made += self._before.get(number, [])
            if number in lines and number not in self._dropped:
                kept = lines[number].decode()
                if not kept.strip() and made[-2:] == ["", ""] and number not in self._quoted:
                    continue  # what stood between them was left out
                made.append(" " * self._deeper[number] + kept if kept.strip() else kept)
        return "\n".join(made) + "\n"


def quoted_lines(tree: ast.AST) -> set[int]:
    """Lines that begin inside of a string."""
    found: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str)):
            found |= set(range(node.lineno + 1, (node.end_lineno or 0) + 1))
    return found
