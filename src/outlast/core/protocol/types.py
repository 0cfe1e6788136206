"""Views, roll calls, headers and orders: the nouns of the protocol. Frozen records, no behaviour of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from outlast.core.policy.guard_records import GuardNote
from outlast.core.protocol.disputes import Claim, Evidence, Stand
from outlast.core.protocol.row_plans import RowsNote
from outlast.core.protocol.tree import Node

__all__ = ["FILE", "Header", "Order", "StepPlan", "RollEntry", "ServeId", "View", "ViewId"]

FILE = "file "
"""Begins the name of a fact about a file of the script. Such facts are compared only where both sides have the file."""

ServeId = tuple[int, int]
"""(epoch, running number) of one attempt to bring a joiner up to date; (0, 0): none."""


class ViewId(msgspec.Struct, frozen=True, order=True, array_like=True):
    """(epoch of the coordinator that made it, running number). Higher is newer; epochs fence, numbers order."""

    epoch: int
    n: int

    def __str__(self) -> str:
        return f"{self.epoch}.{self.n}"


class View(msgspec.Struct, frozen=True, kw_only=True):
    """One membership decision. `members` in order; `attached`: spares that its members feed; `relieved`: members that
    reduce no slice, as the links to their hosts are bad."""

    id: ViewId
    members: tuple[str, ...]
    attached: tuple[str, ...] = ()
    start: bool = False  # the first view: everybody is at step 0 with the same initial state
    relieved: tuple[str, ...] = ()
    work: tuple[int, ...] = ()  # microbatches of each member; none: as even as they go
    held: bool = False  # nothing is computed in it: its members wait for more
    saved: int = 0  # nobody brings what the view before held: who is behind so many steps reads the newest checkpoint


class RollEntry(msgspec.Struct, frozen=True, kw_only=True):
    """What a member says in the first collective of a view (rule 5)."""

    member: str
    view: ViewId
    committed: int  # steps whose outcome is applied here
    held: tuple[Node, ...]  # partial sums of step `committed` that I hold
    keeps_output: bool  # I still have the raw output, scalars and verdict of step committed-1
    fingerprint: int  # of the whole state, at `committed`
    outcome: int  # digest of step committed-1's raw output and verdict; 0 before the first
    audit: Stand = Stand()
    late: bool = False  # I hold that outcome whole and have yet to apply it: others compute my share of this step
    joined: bool = False  # I came in by replaying outcomes, and my loop has yet to go through the newest one
    copied: bool = False  # my state is a copy of another's, and I have committed nothing as a member yet


class StepPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What the members of a view do before and in its first step: a pure function of the roll (`resolve`)."""

    step: int
    donor: str | None  # hands step-1's outcome to `behind`
    behind: tuple[str, ...]
    stale: tuple[str, ...]  # more than one step behind: cannot be in this view
    leaves: dict[str, tuple[int, ...]]  # member -> microbatches it contributes
    orphans: dict[str, tuple[int, ...]]  # member -> those of them that it must compute now
    claims: tuple[Claim, ...] = ()  # on disputed microbatches of this step


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """Every member's part of the exchange beside the gradients; the same headers give the same verdict everywhere."""

    member: str
    step: int
    view: ViewId
    heard: int  # orders of this view that I know of, without a gap
    losses: tuple[tuple[int, float, float], ...] = ()  # (microbatch, mean loss, weight)
    used: bytes = b""  # bitmap of parameters that received a gradient
    norms: tuple[tuple[int, int, float], ...] = ()  # (lo, hi, sum of squares) of nodes of the tree over blocks
    output: int = 0  # fingerprint of my slices of the reduced gradient
    state: tuple[int, int] = (0, 0)  # (part, fingerprint): a rotating part of my state after the last step
    audit: Evidence = Evidence()
    rows: RowsNote = RowsNote()
    guard: GuardNote = GuardNote()
    settings: int = 0  # digest of what the optimizers see beside gradients and state
    save: int = 0  # a wish for a checkpoint after this step, or -1: not now
    metrics: tuple[tuple[int, str, float, float], ...] = ()  # (microbatch, name, value, weight), as the loop gave them
    stop: str = ""  # why training is to end after this step, where my loop has said so
    bad: tuple[tuple[int, str], ...] = ()  # (sample, why) of those that I found could not be read


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """A planned change, numbered within its view from 1. It is carried out after the step in which every header has
    `heard` it (rule 6): `switch` moves to `next`; `serve` freezes a snapshot for `joiner`."""

    view: ViewId
    number: int
    kind: Literal["switch", "serve"]
    next: View | None = None
    joiner: str = ""
    serve: ServeId = (0, 0)  # names the streams of this attempt, so that a joiner tells them from older ones


def differences(run: Mapping[str, str], here: Mapping[str, str]) -> str:
    """Return in words how a replica's facts differ from its run's, "" if they do not."""
    names = sorted(k for k in run.keys() | here.keys() if run.get(k) != here.get(k))
    edited = [k.removeprefix(FILE) for k in names if k.startswith(FILE) and k in run and k in here]
    said = [f"{k}: {here.get(k)} here, {run.get(k)} in the run" for k in names if not k.startswith(FILE)]
    if edited:
        said.append(f"{', '.join(edited)} was changed since the run began: this replica would compute something else")
    return "; ".join(said)
