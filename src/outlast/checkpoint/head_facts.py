"""What a generation says of the run that saved it: settings, in its head's `extra`. No torch, no I/O.

Role: `extra` is text by text; the keys in `SECTIONS` hold one flat JSON object each, of plain values. `checked` is a
part of `parse_head`: what it lets through is bounded and flat, and is looked at without making more than its own text.
Invariant: nothing here decides how to train; a generation without sections is a generation. Knows no configuration:
what is recorded is the runtime's matter.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from outlast.config import in_json
from outlast.errors import Damage

__all__ = ["MAX_EXTRA", "SECTIONS", "Scalar", "changed", "checked", "section", "sections"]

SECTIONS = ("config", "facts", "checkpoint")
"""The run's configuration; what all replicas had to share (data, arithmetic, machine); where and how it saves."""

MAX_EXTRA = 1 << 20
"""Characters that `extra` may have in all."""

Scalar = bool | int | float | str | None
_decoder: msgspec.json.Decoder[dict[str, Scalar]] = msgspec.json.Decoder(dict[str, Scalar])


def section(values: Mapping[str, Scalar]) -> str:
    """One section's text."""
    return msgspec.json.encode({key: in_json(value) for key, value in values.items()}).decode()


def checked(extra: Mapping[str, str], *, file: str) -> None:
    """Raises `Damage` naming `file` for what no writer would say."""
    if sum(len(key) + len(text) for key, text in extra.items()) > MAX_EXTRA:
        raise Damage(f"says more than {MAX_EXTRA} characters beside its parts", file=file)
    for key in SECTIONS:
        if key in extra:
            try:
                _decoder.decode(extra[key])
            except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
                raise Damage(f"its {key!r} is no flat table of settings: {error}", file=file) from error


def sections(extra: Mapping[str, str]) -> dict[str, dict[str, Scalar]]:
    """The settings of a head that was parsed; empty for one that has none."""
    return {key: _decoder.decode(extra[key]) for key in SECTIONS if key in extra}


def changed(a: Mapping[str, str], b: Mapping[str, str]) -> dict[str, tuple[Scalar, Scalar]]:
    """Settings that both heads state, and not alike: "section.name" -> (there, here)."""
    there, here = sections(a), sections(b)
    return {
        f"{key}.{name}": (value, here[key][name])
        for key, values in there.items()
        for name, value in values.items()
        if name in here.get(key, {}) and here[key][name] != value
    }
