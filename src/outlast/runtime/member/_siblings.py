"""The other ranks of a replica, as its lead commands them.

The lead (rank 0) is the member of the run; its own lane is the mesh over which headers travel. What it does with its
tensors the others do with theirs: they are told of each leaf, each exchange and each outcome, in order. A lane that is
complete says so with what its header would say; the lead folds that into its own header, which therefore is said only
when all lanes of the replica are complete (protocol, 37). With one rank there is nobody to tell, and nothing is sent.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec

from outlast.core.policy import GuardNote
from outlast.core.protocol import View, ViewId
from outlast.errors import CheckpointError, OutlastError, StepMisuse, ViewAbandoned
from outlast.runtime.training.step_checks import Meta
from outlast.runtime.transport import rank_words as say
from outlast.runtime.transport.connections import PeersLost
from outlast.runtime.transport.mesh import Mesh
from outlast.runtime.transport.rank_channel import RankPipe
from outlast.runtime.transport.rank_check_words import LeafPrinted
from outlast.tensors import combine

__all__ = ["LOOK_S", "Siblings"]

T = TypeVar("T")
_ANSWER_S = 5.0
LOOK_S = 1.0
"""How long to wait before looking again: another wait may have taken what woke this one."""


class Siblings:
    """Leads the other ranks of a replica. `pipes`: to rank 1, 2, …; none where the replica is one rank. `wake_fd`: as
    of the lead's link, which whatever waits in a mesh is woken by. `stalled(seconds)` is told of a wait in a view that
    takes longer than `patience()`, and again each time that this has passed."""

    def __init__(
        self,
        pipes: Sequence[RankPipe],
        wake_fd: int,
        stalled: Callable[[float], None] = lambda waited_s: None,
        patience: Callable[[], float] = lambda: math.inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pipes, self._wake_fd = list(pipes), wake_fd
        self._stalled, self._patience, self._clock = stalled, patience, clock
        for pipe in self.pipes:
            pipe.wakes_too = wake_fd
        self.addresses: list[str] = []
        self.state: list[int] = []  # what the others said of theirs, in the newest exchange
        self.joined = False  # whether the one that an outcome is handed to came in by replaying
        self.can_save = True  # all of them, as they said in the newest exchange
        self.notes: list[GuardNote] = []  # to guards, as they said there
        self.reported = False  # a failure of the script, to the coordinator
        self._number = 0  # of what was asked for last: answers to anything else are old
        self._ended = False
        self._formed: View | None = None  # the newest that the others were told to form, and not yet that it is over

    @property
    def some(self) -> bool:
        return bool(self.pipes)

    def with_theirs(self, state: tuple[int, int]) -> tuple[int, int]:
        """What a header says of the state: of all ranks' parts."""
        return state[0], combine([state[1], *self.state])

    def all_there(self, but: int = 0) -> bool:
        """Whether the others answer, `but` one. If one is gone this process ends, before it says that its script
        raised: a collective of the script fails when another rank dies, and that one's end says why."""
        asked = [pipe for pipe in self.pipes if pipe.place != but and not pipe.over]
        for pipe in asked:
            pipe.ask_presence()
        until_s = self._clock() + _ANSWER_S
        return all(pipe.present(max(0.0, until_s - self._clock())) for pipe in asked)

    def raised(self) -> say.RankFailed | None:
        """What the script has raised on one of them, if it has: in a collective the lead then raises, too."""
        return next((pipe.failed for pipe in self.pipes if pipe.failed is not None), None)

    def told_as(self, error: Exception) -> Exception:
        """What is told of an exception of the lead's script: a collective of it fails where another rank has left."""
        gone = next((pipe for pipe in self.pipes if pipe.left), None)
        return error if gone is None or isinstance(error, OutlastError) else _left_alone(gone)

    def tell(self, word: Any) -> None:
        """To all of them."""
        for pipe in self.pipes:
            pipe.send(word)

    def begin_step(self, step: int) -> None:
        self.tell(say.BeginStep(step))

    def end_step(self, step: int) -> None:
        self.tell(say.EndStep(step))

    def leave(self) -> None:
        """My loop was left on purpose, and what was to be saved has begun."""
        self.tell(say.LoopLeft())

    def take_fingerprint(self) -> None:
        """My script asks for one, of what all ranks hold. Where training is over nothing is told any more."""
        if not self._ended:
            self.tell(say.TakeFingerprint())

    def compute(self, step: int, leaf: int, ahead: say.LaneTask | None = None, *, printing: bool = False) -> None:
        self.tell(say.ComputeLeaf(step, leaf, ahead, printing))

    def printed(self) -> list[int]:
        """The others' fingerprints of the leaf that all have just computed: each says it before anything else. Raises
        StepMisuse if one has left its loop."""
        return [self._next(pipe, LeafPrinted).print for pipe in self.pipes]

    def _next(self, pipe: RankPipe, kind: type[T]) -> T:
        """The next word of this kind; what was said before it is old."""
        while True:
            left, word = pipe.left, pipe.take()  # in this order: it may leave right after that word
            if isinstance(word, kind):
                return word
            if word is None:
                if left:
                    raise _left_alone(pipe)
                self.rest()

    def expect(self, word: say.ExpectLeaves) -> None:
        self.tell(word)

    def form(self, view: View, lanes: dict[str, list[str]], held: Sequence[tuple[int, int]]) -> None:
        """The view of which the roll was called, to each with the addresses of its own lane."""
        self._number += 1
        self._formed = view
        for place, pipe in enumerate(self.pipes):
            addresses = {name: told[place] for name, told in lanes.items() if place < len(told)}
            pipe.send(say.FormLane(self._number, view, addresses, tuple(held), not view.start))

    def drop(self) -> None:
        """The view is over; what was asked for is no longer waited for."""
        self._number += 1
        self.tell(say.DropLane(self._number))

    def hear_of_end(self, over: Callable[[ViewId], bool]) -> None:
        """From the thread that hears the coordinator: tell the others at once if their lanes' view is over. One of them
        may wait in it for a rank that died as its lane formed, and this rank for that one in a collective.
        """
        view = self._formed
        if view is not None and over(view.id):
            self._formed = None
            self.tell(say.ViewOver(view.id))

    def ask(self, word: Callable[[int], Any]) -> None:
        """Ask for something; `word` takes the question's number."""
        self._number += 1
        self.tell(word(self._number))

    def tell_of_question(self, word: Callable[[int], Any]) -> None:
        """To all of them, while they are at what was asked last; `word` takes that question's number."""
        self.tell(word(self._number))

    def ask_each(self, word: Callable[[int, int], Any]) -> None:
        """As `ask`, something else of each; `word` takes its place, too."""
        self._number += 1
        for pipe in self.pipes:
            pipe.send(word(self._number, pipe.place))

    def apply(self, meta: Meta, feed: say.FeedJoiners | None, *, tries: bool = False) -> None:
        """The commit point of the replica: the step is decided, and every lane is complete. `tries`: it is for this
        replica to rehearse it."""
        if self.pipes:
            self.tell(say.ApplyOutcome(msgspec.msgpack.encode(meta), feed, tries))

    def end(self, finished: bool) -> None:
        """Training is over for this replica. Once or more."""
        if not self._ended:
            self._ended = True
            for pipe in self.pipes:
                pipe.over = True
            self.tell(say.EndRun(finished))

    def gather(self, kind: type, wait: Callable[[], None] | None = None) -> list[Any]:
        """Everybody's answer of this kind to the newest question. `wait`: until something wakes; it raises when the
        view ends first. Raises ViewAbandoned when a lane of it does."""
        answers: dict[int, Any] = {}
        began_s = told_s = self._clock()
        while True:
            for pipe in self.pipes:
                self._take(pipe, kind, answers)
            if len(answers) == len(self.pipes):
                return [answers[pipe.place] for pipe in self.pipes]
            (wait or self.rest)()
            now_s = self._clock()
            if wait is not None and now_s - told_s >= self._patience():
                told_s = now_s
                self._stalled(now_s - began_s)

    def rest(self) -> None:
        """Wait for a word of anybody, for a while. In no view yet: a rank that is lost ends this process."""
        poll = select.poll()
        poll.register(self._wake_fd, select.POLLIN)
        poll.poll(LOOK_S * 1000.0)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)

    def _take(self, pipe: RankPipe, kind: type, answers: dict[int, Any]) -> None:
        while (word := pipe.take()) is not None:
            if isinstance(word, say.LaneBroken) and word.number == self._number:
                raise PeersLost(word.suspects) if word.suspects else ViewAbandoned(f"lane {pipe.place}: {word.why}")
            if isinstance(word, kind) and getattr(word, "number", self._number) == self._number:
                answers[pipe.place] = word
        if pipe.left and pipe.place not in answers:
            raise _left_alone(pipe)

    def meet(self, facts: dict[str, str]) -> None:
        """All ranks have reached `protect`. Raises StepMisuse if they were not given the same there."""
        ready: list[say.RankReady] = self.gather(say.RankReady)
        self.addresses = [told.address for told in ready]
        for pipe, told in zip(self.pipes, ready, strict=True):
            other = next((key for key in sorted({*facts, *told.facts}) if facts.get(key) != told.facts.get(key)), None)
            if other is not None:
                raise StepMisuse(
                    f"the ranks of one replica differ in {other}: {facts.get(other)} on the lead, "
                    f"{told.facts.get(other)} on rank {pipe.place}",
                    did="nothing was trained",
                    remedy="run the same script with the same arguments on every rank",
                )

    def begin_run(self, view: View) -> Callable[[int], None]:
        """The run's first view: have them begin where it begins. Returns what is to be called with the steps that this
        rank has then; it waits for the others, and raises CheckpointError if they have found another state."""
        self.ask(lambda number: say.BeginRun(number, view))

        def begun(step: int) -> None:
            for pipe, told in zip(self.pipes, self.gather(say.RunBegun), strict=True):
                if told.step != step:
                    raise CheckpointError(
                        f"rank {pipe.place} of the replica has loaded step {told.step}, and its lead step {step}",
                        did="nothing was trained",
                        remedy="--resume PLACE@N goes on from one generation; outlast ckpt ls shows what is",
                    )

        return begun

    def fingerprints(self, mesh: Mesh) -> list[int]:
        """The other ranks' fingerprints of their parts of the state, one a rank; none where there is one rank."""
        if not self.pipes:
            return []
        self.ask(say.AskFingerprint)
        return [told.value for told in self.gather(say.FingerprintSaid, lambda: mesh.rest(LOOK_S))]


def _left_alone(pipe: RankPipe) -> StepMisuse:
    return StepMisuse(
        f"rank {pipe.place} of the replica ended its loop while the lead trains on",
        remedy="decide on `break` by what is equal on all ranks, such as step.loss",
    )
