"""What a plan command answers: tables and notes for a reader, plain data for a program; one record for both.

Invariant: `data` holds every number of the tables, unrounded. It prints text; it decides nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # whoever answers without a curve loads none
    from .figures import Figure

__all__ = ["Answer", "Table"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """A titled table; cells are already text (see `significant`, `duration`, `share`)."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def text(self) -> str:
        """Fixed-width text: first column left, the others right."""
        cells = [self.columns, *self.rows]
        widths = [max(len(row[i]) for row in cells) for i in range(len(self.columns))]

        def line(row: Sequence[str]) -> str:
            return "  ".join(
                c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))
            ).rstrip()

        body = [line(self.columns), "  ".join("-" * w for w in widths), *(line(row) for row in self.rows)]
        return "\n".join(([self.title] if self.title else []) + body)


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """One answer: a title, tables, notes (what it assumes, where it stops being true), data for `--json`."""

    title: str
    tables: tuple[Table, ...]
    data: dict[str, Any]
    notes: tuple[str, ...] = field(default=())
    figures: tuple[Figure, ...] = field(default=())

    def text(self) -> str:
        """For a terminal."""
        parts = [self.title, *(table.text() for table in self.tables), *(figure.text() for figure in self.figures)]
        if self.notes:
            parts.append("\n".join(f"note: {note}" for note in self.notes))
        return "\n\n".join(parts)

    def json(self) -> str:
        """For a program: `data` with the notes; no NaN (null), infinities as null too."""
        return json.dumps(_plain({**self.data, "notes": list(self.notes)}), indent=2, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if hasattr(value, "tolist"):  # numpy, scalar or array
        return _plain(value.tolist())
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value
