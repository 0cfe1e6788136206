"""Faults until they can be reported whole: one record a fault, once a step is committed in the view after it.

Decides nothing. Training stands still from the last commit before a fault to the first one after it, so that is the
downtime that is told; when somebody noticed, and how long it took to form the view, are parts of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from outlast.core.protocol import messages as m
from outlast.core.protocol.types import ViewId

__all__ = ["AuditKey", "Loss", "ReportedFault", "Reports"]

_KEPT = 4096  # commits: their news may come before the last word of the view's forming, and many at once

AuditKey = tuple[int, int, int, str, str]
"""(step, microbatch or -1, bucket or -1, culprit, kind) of an audit's finding."""


@dataclass(slots=True)
class ReportedFault:
    """One thing that went wrong. Times are the host's monotonic clock."""

    cause: str
    member: str
    noticed_by: str
    noticed_at_s: float
    last_alive_s: float
    detail: str = ""
    of_view: bool = True  # it interrupted a view; a joiner's death does not
    step: int | None = None  # so many steps the member had committed, if that is known


@dataclass(slots=True)
class Loss:
    """Nobody held the state any more: since when, as noticed first; the last known step, until a view has formed
    again; and the steps that are known to be lost already. `behind`: so many that whoever goes on has not is no loss:
    a step that only the dead had committed is made again, as where a member of several dies."""

    since_s: float
    step: int | None
    lost_steps: int = 0
    behind: int = 0

    def again(self, step: int) -> None:
        """Lost once more. Before a view has formed, the first loss knows better what there was."""
        self.step = max(self.step or 0, step)

    def formed(self, step: int) -> None:
        """A view goes on from this step."""
        if self.step is not None:
            lost, self.step = self.step - step, None
            self.lost_steps += lost if lost > self.behind else 0


@dataclass(slots=True)
class Reports:
    """What the journal will be told; `journal(kind, **fields)` writes it."""

    journal: Callable[..., None]
    faults: list[ReportedFault] = field(default_factory=list)
    formed: dict[str, m.Formed] = field(default_factory=dict)
    audits: dict[AuditKey, ViewId] = field(default_factory=dict)  # findings that are written down, and who saw them
    _noticed: dict[str, tuple[str, float]] = field(default_factory=dict)
    mended: list[tuple[float, dict[str, object]]] = field(default_factory=list)  # (when the view had formed, record)
    held_back: ViewId | None = None  # the view whose members wait for more, until it is told that none can come
    _loss: Loss | None = None
    _worked: ViewId | None = None  # the newest view that was seen to work: what came later did not interrupt it
    _untold: set[str] = field(default_factory=set)  # whom an earlier coordinator put out, and whose end nobody has told
    _commits: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=_KEPT))

    def recall(self, faults: Sequence[ReportedFault], loss: Loss | None, untold: Collection[str] = ()) -> None:
        """What an earlier coordinator had noticed, and nobody has recovered from yet; `untold`: whom it put out, while
        their agents could not say that they had ended."""
        self.faults, self._loss, self._untold = list(faults), loss, set(untold)

    def noticed(self, victim: str, by: str, at_s: float) -> bool:
        """The first to notice is who counts: whether this is the first."""
        return self._noticed.setdefault(victim, (by, at_s)) == (by, at_s)

    def exited(self, exited: m.Exited, step: int | None, fault: bool, of_view: bool) -> None:
        if any(known.member == exited.member for known in self.faults):
            return  # an earlier coordinator wrote it down
        by, at_s = self._noticed.pop(exited.member, ("agent", exited.noticed_at_s))
        self.journal(
            "replica_exited", replica=exited.member, cause=exited.cause, detail=exited.detail, noticed_by=by, step=step
        )
        if fault:
            self.faults.append(
                ReportedFault(exited.cause, exited.member, by, at_s, exited.last_alive_s, exited.detail, of_view, step)
            )

    def repeated(self, exited: m.Exited) -> None:
        """The end of one that an earlier coordinator has dealt with. The run went on without it then."""
        if exited.member in self._untold:
            self._untold.discard(exited.member)
            self.exited(exited, exited.committed, True, False)

    @property
    def steps(self) -> int:
        """So many had been committed by those of the view that have failed, as far as is known."""
        return max((fault.step or 0 for fault in self.faults if fault.of_view), default=0)

    def fleet_lost(self, step: int, behind: int = 0) -> None:
        """Nobody holds the state any more: steps beyond the checkpoint that is loaded are lost."""
        times = [fault.noticed_at_s for fault in self.faults if fault.of_view and fault.noticed_at_s]
        if self._loss is None:
            self._loss = Loss(min(times, default=0.0), step, behind=behind)
        self._loss.again(step)

    def view_formed(self, formed: m.Formed) -> None:
        spans = [f.formed_at_s - f.left_at_s for f in self.formed.values() if f.left_at_s]
        self.journal(
            "view_formed",
            epoch=formed.view.epoch,
            n=formed.view.n,
            step=formed.step,
            roll_call_s=max(spans, default=0.0),
        )

    def recoveries(self, latest: ViewId) -> None:
        """The view after the faults works; what interrupted training is told at its first commit (`resumed`)."""
        fresh, self._worked = self._worked != latest, latest
        if not self.faults:
            return
        formed = list(self.formed.values())
        left = min((f.left_at_s for f in formed if f.left_at_s), default=0.0)
        back = max((f.formed_at_s for f in formed), default=0.0)
        step, lost_steps = max((f.step for f in formed), default=0), 0
        if self._loss is not None and formed:
            self._loss.formed(step)
            lost_steps, left, self._loss = self._loss.lost_steps, left or self._loss.since_s, None
        for fault in self.faults:
            interrupted = fresh and bool(left) and bool(formed) and fault.of_view
            noticed = min((t for t in (left if interrupted else 0.0, fault.noticed_at_s) if t), default=0.0)
            record: dict[str, object] = {
                "cause": fault.cause, "replica": fault.member, "noticed_by": fault.noticed_by,
                "detect_s": max(0.0, noticed - fault.last_alive_s) if fault.last_alive_s else 0.0,
                "downtime_s": max(0.0, back - noticed) if interrupted else 0.0,
                "microbatches_recomputed": max((f.recomputed for f in formed), default=0) if interrupted else 0,
                "lost_steps": lost_steps, "step": step if interrupted or fault.step is None else fault.step,
                "view": [latest.epoch, latest.n], "detail": fault.detail,
            }  # fmt: skip
            if interrupted:
                self.mended.append((back, record))
            else:
                self.journal("recovery", **record)
        self.faults.clear()
        self.resumed()

    def committed(self, before_s: float, at_s: float) -> bool:
        """A step was committed, and the one before it was `before_s`. Whether that is what a record waits for."""
        self._commits.append((before_s, at_s))
        return bool(self.mended)

    def resumed(self) -> None:
        """Tell what was mended before a commit that is known."""
        for back_s, record in list(self.mended):
            gap_s = next((at_s - before_s for before_s, at_s in self._commits if at_s >= back_s), None)
            if gap_s is not None:
                self.mended.remove((back_s, record))
                self.journal("recovery", **record | {"downtime_s": gap_s})

    def end(self, steps: int | None = None, failed_in: int | None = None) -> None:
        """The run is over, also for what no commit followed. `steps`: all that were to be made, if they were: nothing
        waited for who came back after them. `failed_in`: the step that it failed in, which nobody has recovered in."""
        for _, record in [row for row in self.mended if row[1]["step"] != failed_in]:
            self.journal("recovery", **(record | {"downtime_s": 0.0} if record["step"] == steps else record))
        self.mended.clear()
