"""What may be asked of checked sums, and what they find. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal

import msgspec

from outlast.errors import ConfigError, nearest

__all__ = ["ProductChecks", "SumFinding"]


class ProductChecks(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which products are checked, and how closely.

    `modules`: patterns of module names, as `named_modules` gives them ("" is the model itself); a module's products are
    those of its own forward and of their backward, its children's are theirs. `attention`: what to do with attention
    that is one kernel and shows no product: compute it twice and compare the bits, or leave it. `deviations`: how many
    standard deviations of its rounding a sum may be off before its product is computed again. `threshold`: act only on
    errors larger than this share of the root of a block's squared outputs; 0 acts on all that can be seen.
    """

    modules: tuple[str, ...] = ("*",)
    attention: Literal["twice", "off"] = "twice"
    deviations: float = 6.0
    threshold: float = 0.0

    def __post_init__(self) -> None:
        if self.attention not in ("twice", "off"):
            raise ConfigError(f"attention={self.attention!r} is no choice", remedy="'twice' or 'off'")
        if not 4.0 <= self.deviations < float("inf"):
            raise ConfigError(
                f"deviations={self.deviations!r} would doubt products that are right",
                remedy="4 or more; 6 is the default",
            )
        if not 0.0 <= self.threshold < 1.0:
            raise ConfigError(f"threshold={self.threshold!r} is no share", remedy="0 for all errors, or below 1")

    @classmethod
    def of(cls, given: Any) -> ProductChecks | None:
        """From what `protect(checks=...)` was given: None, "off", "abft", patterns, or a `ProductChecks`."""
        if given is None or given == "off":
            return None
        if isinstance(given, cls):
            return given
        if given == "abft":
            return cls()
        if isinstance(given, str):
            raise ConfigError(
                f"checks={given!r} is no kind of check",
                remedy=nearest(given, ("abft", "off"), both=True)
                + '; patterns of modules come as a list: ["layers.*"]',
            )
        if isinstance(given, Sequence) and given and all(isinstance(pattern, str) for pattern in given):
            return cls(modules=tuple(given))
        raise ConfigError(
            f"checks={given!r} is neither a kind of check nor a list of patterns",
            remedy='checks="abft", checks=["layers.*"], or checks=outlast.ProductChecks(...)',
        )

    def covers(self, module: str) -> bool:
        """Whether a module's products are checked."""
        return any(fnmatchcase(module, pattern) for pattern in self.modules)

    def describe(self) -> str:
        """In a few words, for the run's facts."""
        return f"abft {','.join(self.modules)}"


class SumFinding(msgspec.Struct, frozen=True, kw_only=True):
    """A product that did not add up. `operation` of `module` (backward where `backward`), in `step` and `microbatch`.

    `action`: "recomputed", the product was computed again and is right now; "repaired", a parameter had changed in
    memory and its bits were put back. `num_wrong`: elements that differed; `row`, `column`, `bits`: of the first of
    them, and which of its bits were flipped. `deviations`: how far off the sum was.
    """

    step: int
    microbatch: int
    operation: str
    module: str
    backward: bool
    action: Literal["recomputed", "repaired"]
    num_wrong: int
    row: int
    column: int
    bits: tuple[int, ...]
    deviations: float

    def __str__(self) -> str:
        way = "backward" if self.backward else "forward"
        where = f"{self.operation} in the {way} of {self.module or 'the model'}"
        bits = (
            f"bit{'s' if len(self.bits) > 1 else ''} {', '.join(map(str, self.bits))} of element" if self.bits else ""
        )
        place = f"{bits} ({self.row}, {self.column})".strip()
        more = f" and {self.num_wrong - 1} more" if self.num_wrong > 1 else ""
        what = "a parameter had changed in memory, and was put back" if self.action == "repaired" else "computed again"
        return f"{where} did not add up ({self.deviations:.3g} deviations): {place}{more} wrong; {what}"
