"""When a checkpoint may be published: (state, event) -> (state, actions).

Role: two-phase commit of a generation. Every writer of a save reports its part durable; the step is known to be
stable; only then is the one `Publish` action issued, and only its success is announced. Invariants: a save is
published at most once, never without a part from each of its writers, never for a step that is not stable, never
after a save of a later step was; a report about a view that is over is refused by number. Performs no I/O, keeps no
clock: the coordinator (or a fleet of one) carries the actions out and feeds the results back as events.

A coordinator that restarts begins with an empty `CommitState`: writers repeat the reports that nobody acknowledged,
and `Publish` is idempotent at the store (a head with the same save and parts is the same generation).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

__all__ = [
    "Abandon", "Announce", "Certified", "Certify", "CommitAction", "CommitEvent", "CommitState", "DelaySave",
    "OrderSave", "PartReport", "PendingSave", "Publish", "PublishFailed", "Published", "Refuse", "WriterBegan",
    "SaveId", "SaveWanted", "StepStable", "ViewChanged", "WriterDurable", "WriterFailed", "commit_step",
]  # fmt: skip

ViewNumber = tuple[int, int]


class SaveId(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """One save: the state after `step` as the members of view (epoch, n) hold it; `attempt` counts repeats."""

    epoch: int
    n: int
    step: int
    attempt: int = 0

    @property
    def view(self) -> ViewNumber:
        return (self.epoch, self.n)

    @property
    def token(self) -> str:
        """The save's name in file names: letters, digits and dashes."""
        return f"e{self.epoch}-v{self.n}-s{self.step}-a{self.attempt}"


class PartReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a writer promises is durable: its part file by name, size and digest (`checkpoint.manifest`)."""

    writer: int
    name: str
    bytes: int
    digest: str
    schema: str  # digest of names, dtypes and shapes: equal on all writers or the state has diverged


class PendingSave(msgspec.Struct, frozen=True, kw_only=True):
    """A save in flight. `publishing`: the action was issued and its result is awaited."""

    save: SaveId
    writers: tuple[int, ...]
    base: int | None  # the generation that incremental parts refer to: not to be removed meanwhile
    reports: tuple[PartReport, ...] = ()
    publishing: bool = False

    @property
    def durable(self) -> bool:
        return len(self.reports) == len(self.writers)


class CommitState(msgspec.Struct, frozen=True, kw_only=True):
    """`stable`: the last stable step; `certified`: the last certified one; `newest`: (save, generation) published."""

    view: ViewNumber = (0, 0)
    writers: tuple[int, ...] = ()
    stable: int = -1
    certified: int = -1
    pending: tuple[PendingSave, ...] = ()
    newest: tuple[SaveId, int] | None = None
    newest_certified: bool = False
    max_in_flight: int = 2

    @property
    def protected(self) -> frozenset[int]:
        """Generations that a save in flight refers to; retention must leave them."""
        bases = {p.base for p in self.pending if p.base is not None}
        return frozenset(bases | ({self.newest[1]} if self.newest else set()))


# Events


class ViewChanged(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A view was installed. `writers`: the writer numbers of its members (0..len-1 in member order).

    `begins`: its members hold what they have loaded, not what the view before held: nothing of it is certified yet.
    """

    view: ViewNumber
    writers: tuple[int, ...]
    begins: bool = False


class SaveWanted(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The interval policy, a notice or the end of the run asks for a save after `step`."""

    step: int


class WriterBegan(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A member has begun to write its part, as its view's headers agreed: whoever is lost now is known to be missed."""

    save: SaveId
    writer: int


class WriterDurable(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    save: SaveId
    report: PartReport


class WriterFailed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    save: SaveId
    writer: int
    reason: str


class StepStable(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    step: int


class Certified(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The state after `step` was verified finite, agreed by fingerprint, and passed its audits."""

    step: int


class Published(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    save: SaveId
    generation: int


class PublishFailed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    save: SaveId
    reason: str


CommitEvent = (
    ViewChanged
    | SaveWanted
    | WriterBegan
    | WriterDurable
    | WriterFailed
    | StepStable
    | Certified
    | Published
    | PublishFailed
)

# Actions


class OrderSave(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Tell every member of the view to save after `save.step`, incremental against generation `base`."""

    save: SaveId
    base: int | None


class DelaySave(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Not now; training goes on. Ask again when a save has settled."""

    step: int
    reason: str


class Publish(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    save: SaveId
    reports: tuple[PartReport, ...]
    certified: bool


class Certify(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The newest generation was published before its step was certified: mark it now (`checkpoint.certify`)."""

    generation: int


class Announce(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Tell the writers (and the journal) that the save is generation `generation`: slots and bases move on."""

    save: SaveId
    generation: int


class Abandon(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Tell every member and the journal that the save will not be published."""

    save: SaveId
    reason: str
    cause: Literal["writer_failed", "view_changed", "superseded", "diverged", "publish_failed"]


class Refuse(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Tell one writer that its report is about nothing that is in flight."""

    save: SaveId
    writer: int
    reason: str


CommitAction = OrderSave | DelaySave | Publish | Certify | Announce | Abandon | Refuse
Outcome = tuple[CommitState, tuple[CommitAction, ...]]


def commit_step(state: CommitState, event: CommitEvent) -> Outcome:
    """One transition. Pure; an event that repeats an earlier one changes nothing and repeats no `Publish`."""
    match event:
        case ViewChanged():
            return _view_changed(state, event)
        case SaveWanted():
            return _wanted(state, event.step)
        case WriterBegan():
            return _began(state, event)
        case WriterDurable():
            return _durable(state, event)
        case WriterFailed():
            return _failed(state, event)
        case StepStable():
            return _issue(msgspec.structs.replace(state, stable=max(state.stable, event.step)))
        case Certified():
            return _certified(state, event.step)
        case Published():
            return _published(state, event)
        case PublishFailed():
            if _find(state, event.save) is None:
                return state, ()
            return _drop(state, event.save, event.reason, "publish_failed")


def _find(state: CommitState, save: SaveId) -> PendingSave | None:
    return next((p for p in state.pending if p.save == save), None)


def _with(state: CommitState, pending: Sequence[PendingSave]) -> CommitState:
    return msgspec.structs.replace(state, pending=tuple(sorted(pending, key=lambda p: p.save)))


def _drop(state: CommitState, save: SaveId, reason: str, cause: Literal["writer_failed", "publish_failed"]) -> Outcome:
    kept = _with(state, [p for p in state.pending if p.save != save])
    after, actions = _issue(kept)
    return after, (Abandon(save=save, reason=reason, cause=cause), *actions)


def _failed(state: CommitState, event: WriterFailed) -> Outcome:
    """A writer that had reported durable cannot fail any more: its promise was about the disk, not about itself."""
    pending = _find(state, event.save)
    if pending is None or any(r.writer == event.writer for r in pending.reports):
        return state, ()
    return _drop(state, event.save, f"writer {event.writer}: {event.reason}", "writer_failed")


def _view_changed(state: CommitState, event: ViewChanged) -> Outcome:
    """Saves of the old view whose writers have all reported are complete and stay; the others lost a writer."""
    if event.view <= state.view:
        return state, ()
    number = f"({event.view[0]}, {event.view[1]})"
    kept = [p for p in state.pending if p.durable]
    after = msgspec.structs.replace(
        _with(state, kept),
        view=event.view,
        writers=tuple(sorted(event.writers)),
        certified=-1 if event.begins else state.certified,
    )
    reason = f"view {number} was installed before all writers had reported"
    lost = [p.save for p in state.pending if not p.durable]
    return after, tuple(Abandon(save=save, reason=reason, cause="view_changed") for save in lost)


def _wanted(state: CommitState, step: int) -> Outcome:
    if not state.writers:
        return state, (DelaySave(step=step, reason="no view is installed"),)
    if len(state.pending) >= state.max_in_flight:
        return state, (DelaySave(step=step, reason=f"{len(state.pending)} saves are in flight"),)
    if any(p.save.step == step and p.save.view == state.view for p in state.pending):
        return state, (DelaySave(step=step, reason="this step is being saved"),)
    base = state.newest[1] if state.newest else None
    save = SaveId(epoch=state.view[0], n=state.view[1], step=step)
    if state.newest is not None and state.newest[0].view == state.view and state.newest[0].step >= step:
        return state, (DelaySave(step=step, reason=f"step {state.newest[0].step} is published"),)
    return _with(state, [*state.pending, PendingSave(save=save, writers=state.writers, base=base)]), (
        OrderSave(save=save, base=base),
    )


def _refusal(state: CommitState, save: SaveId, writer: int) -> str | None:
    """Why news of a save that is not in flight cannot open one."""
    if save.view != state.view:
        return f"view ({save.epoch}, {save.n}) is not the live view ({state.view[0]}, {state.view[1]})"
    if writer not in state.writers:
        return f"writer {writer} is not one of the view's {len(state.writers)} writers"
    if state.newest is not None and (state.newest[0].view, state.newest[0].step) >= (save.view, save.step):
        return f"step {state.newest[0].step} of view {state.newest[0].view} is published"
    return None


def _opened(state: CommitState, save: SaveId) -> PendingSave:
    """A coordinator that restarted learns of the save from its writers; without the base's number it protects what is
    newest, which every incremental save refers to at most."""
    return PendingSave(save=save, writers=state.writers, base=state.newest[1] if state.newest else None)


def _began(state: CommitState, event: WriterBegan) -> Outcome:
    if _find(state, event.save) is not None:
        return state, ()
    reason = _refusal(state, event.save, event.writer)
    if reason is not None:
        return state, (Refuse(save=event.save, writer=event.writer, reason=reason),)
    return _with(state, [*state.pending, _opened(state, event.save)]), ()


def _durable(state: CommitState, event: WriterDurable) -> Outcome:
    save, report = event.save, event.report
    if state.newest is not None and state.newest[0] == save:
        return state, (Announce(save=save, generation=state.newest[1]),)
    pending = _find(state, save)
    if pending is None:
        reason = _refusal(state, save, report.writer)
        if reason is not None:
            return state, (Refuse(save=save, writer=report.writer, reason=reason),)
        pending = _opened(state, save)
    if report.writer not in pending.writers:
        return state, (Refuse(save=save, writer=report.writer, reason="not a writer of this save"),)
    if any(r.writer == report.writer for r in pending.reports):
        return state, ()
    others = [p for p in state.pending if p.save != save]
    if pending.reports and pending.reports[0].schema != report.schema:
        reason = f"writers {pending.reports[0].writer} and {report.writer} hold tensors of different shapes or dtypes"
        return _with(state, others), (Abandon(save=save, reason=reason, cause="diverged"),)
    reports = tuple(sorted((*pending.reports, report), key=lambda r: r.writer))
    return _issue(_with(state, [*others, msgspec.structs.replace(pending, reports=reports)]))


def _issue(state: CommitState) -> Outcome:
    """Publish the newest save that may be; one at a time, so that generations are numbered in the order of steps."""
    if any(p.publishing for p in state.pending):
        return state, ()
    ready = [p for p in state.pending if p.durable and p.save.step <= state.stable]
    if not ready:
        return state, ()
    first = min(ready, key=lambda p: (p.save.view, p.save.step))
    others = [p for p in state.pending if p.save != first.save]
    action = Publish(save=first.save, reports=first.reports, certified=first.save.step <= state.certified)
    return _with(state, [*others, msgspec.structs.replace(first, publishing=True)]), (action,)


def _certified(state: CommitState, step: int) -> Outcome:
    after = msgspec.structs.replace(state, certified=max(state.certified, step))
    if state.newest is None or state.newest_certified or state.newest[0].step > after.certified:
        return after, ()
    return msgspec.structs.replace(after, newest_certified=True), (Certify(generation=state.newest[1]),)


def _published(state: CommitState, event: Published) -> Outcome:
    """Older saves that are still being written are dropped: a later generation must never hold an earlier step."""
    if _find(state, event.save) is None:
        return state, ()
    done = (event.save.view, event.save.step)
    older = [p for p in state.pending if p.save != event.save and (p.save.view, p.save.step) <= done]
    rest = [p for p in state.pending if p.save != event.save and (p.save.view, p.save.step) > done]
    kept = _with(state, rest)
    after = msgspec.structs.replace(kept, newest=(event.save, event.generation), newest_certified=False)
    # It may have become certified while it was being published; marking it twice does nothing.
    after, sure = _certified(after, after.certified)
    after, more = _issue(after)
    reason = f"step {event.save.step} was published first"
    dropped = tuple(Abandon(save=p.save, reason=reason, cause="superseded") for p in older)
    return after, (Announce(save=event.save, generation=event.generation), *sure, *dropped, *more)
