"""A coordinator's process before it is its turn, where hosts share the record: it waits, and keeps up.

It looks at the claim several times a second, tells its host where the coordinator is, and copies the run's story into
the journal of this host, so that it can be asked there too. When the claim's sign of life has not changed for longer
than the lease, and etcd has answered all that time, it claims. Its own launcher's last coordinator is known to be dead,
and is followed at once. What it decides is whose turn it is; nothing about the run.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from outlast.config import RunConfig
from outlast.core import events
from outlast.core.protocol.record_lease import TurnWatch
from outlast.errors import EnvironmentFault
from outlast.journal import CoordinatorClaim, Journal, SharedRecord, TurnSeen, Unreachable, access_of
from outlast.runtime.coordinator._record_summary import RecordSummary
from outlast.runtime.settings.run_clock import apart_s
from outlast.runtime.transport.coordinator_place import keep_place

__all__ = ["TurnSeeker", "TurnOutcome", "MyTurn", "await_turn"]

_LOOKS = 8  # in a lease
_KEEP_UP_S = 0.5  # between two readings of the story
_ASK_S = 2.0


class TurnOutcome(NamedTuple):
    """`before`: the claim that mine has followed, if there was one; `silent_s`: for how long it had given no sign;
    `exit_code`: the run is over, and it was nobody's turn any more."""

    before: CoordinatorClaim | None
    silent_s: float
    exit_code: int | None


class TurnSeeker:
    """Waits for its turn to coordinate, then claims it. `mine`: what to claim, but for the epoch; `run`: the run's
    number; `may_begin`: this host starts the run, so there may be no claim yet; `alive`: a sign for the launcher;
    `follow`: called when the journal has grown."""

    def __init__(
        self,
        shared: SharedRecord,
        journal: Journal,
        mine: CoordinatorClaim,
        *,
        run: str,
        may_begin: bool,
        alive: Callable[[], None],
        follow: Callable[[], None] = lambda: None,
    ) -> None:
        self._follow = follow
        self._shared, self._journal, self._mine = shared, journal, mine
        self._may_begin, self._alive = may_begin and not journal.epoch, alive
        self._keeps_up = False
        self._since = 0
        self._kept_s = -_KEEP_UP_S
        self._epoch = journal.epoch
        self._run = run
        self._place = ("", 0)  # where the coordinator is, and its epoch
        self._watch = TurnWatch(shared.lease_s)
        self._named_junk = False

    def wait(self, folder: Path) -> TurnOutcome:
        """Until it is my turn, or the run is over. Raises EnvironmentFault where the record is not there any more."""
        pause, pause_s = threading.Event(), self._shared.lease_s / _LOOKS
        while True:
            self._alive()
            with contextlib.suppress(Unreachable):
                outcome = self._look(folder)
                if outcome is not None:
                    return outcome
            pause.wait(pause_s)

    def _look(self, folder: Path) -> TurnOutcome | None:
        asked_s = time.monotonic()
        seen = self._shared.look(_ASK_S)
        now_s = time.monotonic()
        if seen.claim is not None:
            self._epoch = max(self._epoch, seen.claim.epoch)
            if self._place != (seen.claim.address, seen.claim.epoch):
                self._place = (seen.claim.address, seen.claim.epoch)
                keep_place(folder, *self._place, self._run)
        if seen.end is not None:
            self._keep_up()
            return TurnOutcome(seen.claim, 0.0, seen.end)
        if self._due(seen, asked_s, now_s):
            return self._take(seen, folder, now_s)
        if now_s - self._kept_s > _KEEP_UP_S:
            self._keep_up()
        return None

    def _due(self, seen: TurnSeen, asked_s: float, now_s: float) -> bool:
        """Whether to claim."""
        claim = seen.claim
        if claim is None:
            if not self._may_begin:
                raise EnvironmentFault(
                    "the record of this run is not in etcd any more",
                    did="nothing is decided without it",
                    remedy="see what removed the keys under /outlast/; start the run anew, from its checkpoints",
                )
            return True
        if claim.seat == self._mine.seat:
            return True
        return self._watch.silent(claim.token, seen.beat, asked_s, now_s)

    def _take(self, seen: TurnSeen, folder: Path, now_s: float) -> TurnOutcome | None:
        fields = {name: getattr(self._mine, name) for name in ("seat", "host", "address")}
        mine = CoordinatorClaim(epoch=self._epoch + 1, token=secrets.token_hex(8), **fields)
        if not self._shared.take(seen, mine, _ASK_S):
            return None
        keep_place(folder, mine.address, mine.epoch, self._run)
        while True:
            with contextlib.suppress(Unreachable):
                self._keep_up()
                break
        self._journal.flush()  # what was copied last is read from the journal, as all before it
        self._journal.share(self._shared)
        own = seen.claim is None or seen.claim.seat == mine.seat
        return TurnOutcome(seen.claim, 0.0 if own else now_s - self._watch.unchanged_s, None)

    def _keep_up(self) -> None:
        """Copy what the others' coordinators told. What stands here already, of an earlier turn of this host, once."""
        told, since = self._shared.story(self._since, _ASK_S)
        if told and not self._keeps_up:
            here = {events.encode(entry.event) for entry in self._journal.each_at({event.at_s for event in told})}
            told = [event for event in told if events.encode(event) not in here]
        self._keeps_up = True
        if told:
            self._journal.append_many(told)
            if self._shared.junk and not self._named_junk:
                self._named_junk = True
                text = f"what etcd holds under {self._shared.junk!r} was not written by this run: passed over"
                self._journal.append(events.Notice(at_s=told[-1].at_s, level="warning", text=text))
            self._follow()
        self._since, self._kept_s = since, time.monotonic()


class MyTurn(NamedTuple):
    """What begins: `takeovers`: the recoveries to tell of, of coordinators that were there before; `began_s`: Unix time
    less monotonic time, for all that is told; `exit_code`: nothing does, for the run is over."""

    takeovers: list[dict[str, Any]]
    began_s: float
    exit_code: int | None = None


def await_turn(environ: Mapping[str, str], journal: Journal, config: RunConfig, alive: Callable[[], None]) -> MyTurn:
    """On one host it is this process's turn. Where the record is shared: when it is."""
    told = json.loads(environ["OUTLAST_TAKEOVER"]) if "OUTLAST_TAKEOVER" in environ else []
    began_s = apart_s(environ)
    if config.record == "sqlite":
        return MyTurn(told, began_s)
    access, secret = access_of(config.record, environ), bytes.fromhex(environ["OUTLAST_SECRET"])
    run, may_begin = environ["OUTLAST_RUN"], "OUTLAST_HEIR" not in environ
    shared = journal.sharing(access, run, secret, config.record_lease_s)
    seat, host = environ["OUTLAST_SEAT"], environ.get("OUTLAST_HOST", socket.gethostname())
    mine = CoordinatorClaim(epoch=0, token="", seat=seat, host=host, address=environ["OUTLAST_COORDINATOR"])
    summary = RecordSummary(journal, journal.epoch_here, config, alive)  # so that its turn begins at once
    candidate = TurnSeeker(shared, journal, mine, run=run, may_begin=may_begin, alive=alive, follow=summary.follow)
    outcome = candidate.wait(Path(environ["OUTLAST_RUN_DIR"]))
    if outcome.exit_code is not None:
        shared.close()
        return MyTurn([], began_s, outcome.exit_code)
    newest_s = max((entry.event.at_s for entry in journal.events(since_seq=journal.last_seq - 1)), default=0.0)
    own = outcome.before is not None and outcome.before.seat == seat
    return MyTurn(told if own else takeover_of(outcome), max(began_s, newest_s - time.monotonic()))


def takeover_of(outcome: TurnOutcome) -> list[dict[str, Any]]:
    """What to tell of a coordinator on another host that this one follows; nothing if there was none."""
    before = outcome.before
    if before is None:
        return []
    return [{
        "cause": "coordinator", "replica": "coordinator", "noticed_by": f"process {os.getpid()}", "lost_steps": 0,
        "step": 0, "detect_s": outcome.silent_s, "downtime_s": 0.0, "microbatches_recomputed": 0,
        "detail": f"the one on {before.host} gave no sign for {outcome.silent_s:.2f} s; training went on without it",
    }]  # fmt: skip
