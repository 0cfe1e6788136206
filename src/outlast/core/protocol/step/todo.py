"""What a member tells its training thread to do next."""

from __future__ import annotations

from typing import Literal

import msgspec

from outlast.core.protocol.tree import Node
from outlast.core.protocol.types import View

__all__ = ["Compute", "Exchange", "Follow", "Form", "HandOver", "Leave", "Todo", "Wait"]


class Wait(msgspec.Struct, frozen=True, kw_only=True):
    """Nothing to do until the coordinator says more. `why` is for progress reports."""

    why: Literal["no view", "left", "lease", "done", "departed", "held back"]


class HandOver(msgspec.Struct, frozen=True, kw_only=True):
    """Step `step` is decided at `donor` and not at `behind`: give, take, or (neither) go on."""

    step: int
    donor: str
    behind: tuple[str, ...]


class Follow(msgspec.Struct, frozen=True, kw_only=True):
    """A joiner or spare: receive and replay; not in any view."""


class Form(msgspec.Struct, frozen=True, kw_only=True):
    """Connect to the view's members and call the roll."""

    view: View


class Compute(msgspec.Struct, frozen=True, kw_only=True):
    """Compute one microbatch's gradient."""

    step: int
    microbatch: int
    orphan: bool


class Exchange(msgspec.Struct, frozen=True, kw_only=True):
    """All my microbatches are held: exchange. `nodes`: partial sums of each member, in view order."""

    step: int
    view: View
    nodes: tuple[tuple[Node, ...], ...]


class Leave(msgspec.Struct, frozen=True, kw_only=True):
    """All steps are done: pass the closing barrier, then say `finished`."""

    view: View


Todo = Wait | Follow | Form | HandOver | Compute | Exchange | Leave
