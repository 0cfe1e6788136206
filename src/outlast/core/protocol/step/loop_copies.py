"""Copies that a member keeps of what the loops had made of their state by a step (protocol, 41): registered parts, and
parameters that the loop wrote.

A joiner is fed it with each outcome. Who may be *handed* an outcome needs it as well, and then it is too late to make
it: the loops have gone on. That is who was fed when the view ended in which the outcome was decided, and who was still
catching up as a view began: nobody feeds that one from there on, and it comes into the next view a step behind. Two
steps behind it would be stale. So of a view's first step every member keeps a copy, and of later ones whoever has fed
anybody in this view, though the stream may have ended since: who has lost it may be let in with one step missing, and
goes on with the other donors' streams where nothing of an outcome is in this one. And of a step with which the view
ends as planned: whom the next one lets in is fed no more, and may have read, from a save, all but that step.
"""

from __future__ import annotations

__all__ = ["LoopCopies"]


class LoopCopies:
    """What one member keeps. `step`: of which its copy is; None: of none."""

    def __init__(self) -> None:
        self.step: int | None = None
        self._first = self._fed = False

    def flushed(self) -> None:
        """A view begins, and who is not in it is fed no more."""
        self._first, self._fed = True, False

    def decided(self, step: int, *, feeding: bool, last: bool) -> bool:
        """Whether a copy is to be made now, before the step is applied. `feeding`: somebody is fed its outcome,
        or would be, had the stream not broken since the step before. `last`: the view ends with it as planned."""
        self._fed |= feeding
        first, self._first = self._first, False
        self.step = step if first or self._fed or last else None
        return self.step is not None
