"""The settings that go into each generation's head: what a reader of the checkpoint wants to know of its run. No torch.

Invariants: no key or token of the run is among them (none is in its configuration), an URL goes in without the
passwords and signatures that it may carry, and what is recorded is bounded, so that it can never cost a save.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from outlast.checkpoint.head_facts import Scalar, section
from outlast.config import RunConfig
from outlast.core.protocol import FILE
from outlast.runtime.settings.save_settings import SaveSettings

__all__ = ["recorded", "without_secrets"]

_MAX = 1000  # characters of one value: a list of critical parameters can be long
_PASSWORD = re.compile(r"(://[^/?#:]*):[^/?#]*@")
_TOKEN = re.compile(r"(?<=http://)[^/?#]*@|(?<=https://)[^/?#]*@")
_QUERY = re.compile(r"(://[^?#]*)[?#].*", re.DOTALL)
_SAVES = "checkpoints"  # the fact that carries the settings of saves: they stand in a section of their own


def recorded(config: RunConfig, settings: SaveSettings, facts: Mapping[str, str]) -> dict[str, str]:
    """For `Head.extra`. `facts`: what all members of the run share."""
    shared = {key: value for key, value in facts.items() if key != _SAVES and not key.startswith(FILE)}
    tables = {"config": msgspec.structs.asdict(config), "facts": shared, "checkpoint": msgspec.structs.asdict(settings)}
    return {name: section({k: _plain(v) for k, v in values.items()}) for name, values in tables.items()}


def _plain(value: Scalar) -> Scalar:
    if not isinstance(value, str):
        return value
    text = without_secrets(value)
    return text if len(text) <= _MAX else f"{text[:_MAX]}… ({len(text)} characters)"


def without_secrets(place: str) -> str:
    """A place as it may be told to anybody: a password, a token for a name, and what follows `?` are left out."""
    if "://" not in place:
        return place
    place = _QUERY.sub(r"\1?…", place)
    return _PASSWORD.sub(r"\1:…@", _TOKEN.sub("…@", place))
