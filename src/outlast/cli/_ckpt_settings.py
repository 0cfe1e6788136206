"""The settings in a generation's head, for `outlast ckpt`: all of them for programs, what matters for people."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outlast.checkpoint import Head

__all__ = ["settings_lines", "settings_row"]


def settings_row(head: Head) -> dict[str, Any]:
    """`extra` without the sections, which stand decoded under `settings`."""
    from outlast.checkpoint.head_facts import SECTIONS, sections

    return {"extra": {k: v for k, v in head.extra.items() if k not in SECTIONS}, "settings": sections(head.extra)}


def settings_lines(settings: dict[str, dict[str, Any]]) -> list[str]:
    """A paragraph a section; of the configuration only what is not this version's default."""
    import msgspec

    from outlast.config import RunConfig

    defaults = msgspec.structs.asdict(RunConfig())
    lines: list[str] = []
    for name, values in settings.items():
        shown = {k: v for k, v in values.items() if v != "" and (name != "config" or defaults.get(k) != v)}
        told = ", ".join(f"{key} = {value}" for key, value in shown.items())
        rest = " (the others are the defaults)" if name == "config" and len(shown) < len(values) else ""
        text = f"{name}: {told}{rest}" if told else f"{name}: the defaults"
        lines += textwrap.wrap(text, 110, subsequent_indent="  ")
    return lines
