"""What happened to a run, what it cost, and what to do next.

Role: causes and their remedies, in one table. Pure. Invariant: every fault in the journal appears, with a remedy; a
cause that the table does not know gets the one that always helps. It guesses at nothing that no event says.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

import msgspec

from outlast.core import events as ev
from outlast.observe._accounting import Accounting, accounting
from outlast.observe._status import Status, status
from outlast.observe._timeline import Row, timeline

__all__ = ["Advice", "Why", "remedy", "why"]


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """One cause, how often it struck and whom, and what to do about it."""

    cause: str
    count: int
    who: list[str]
    remedy: str


class Why(msgspec.Struct, frozen=True, kw_only=True):
    """The story of a run. `survived`: faults that training outlasted; `cost`: where the wall time went."""

    run_id: str
    state: str
    headline: str
    survived: int
    lost_steps: int
    microbatches_recomputed: int
    downtime_s: float
    cost: Accounting
    ettr: float
    advice: list[Advice]
    timeline: list[Row]


# (pattern, the cause's name, the remedy); of each table the first that matches holds.
_TELLING: tuple[tuple[str, str, str], ...] = (
    (r"out of memory|oom|memoryerror", "out of memory",
     "use a smaller microbatch (more microbatches a step keep the result), or fewer replicas on this machine"),
    (r"poison|same microbatch", "the loop fails on one microbatch",
     "two replicas failed on the same samples: the bug is in the loop or its data; reproduce it with one replica"),
    (r"diverged|fingerprint", "replicas differ",
     "look for operations that are not deterministic in the layer named, or for memory that flips bits on that host"),
)  # fmt: skip
"""What decides wherever it stands, in the cause or in its detail."""

_REMEDIES: tuple[tuple[str, str, str], ...] = (
    (r"sigkill|signal 9\b|killed", "killed from outside",
     "see whether the kernel ran out of memory (dmesg | grep -i oom) or a person or scheduler sent SIGKILL"),
    (r"sigsegv|sigbus|sigill|sigabrt|sigfpe|signal (11|7|4|6|8)\b", "a crash in native code",
     "read the end of the replica's log in the run directory; if it strikes one host only, test its memory"),
    (r"sigterm|sigint|signal (15|2)\b|preempt|graceful", "asked to leave",
     "nothing to mend: a scheduler or a person asked for it; keep a spare if that happens often"),
    (r"agent", "an agent lost",
     "its replicas died with it: look for what ended the agent's process; --agents 2 keeps half of them alive"),
    (r"coordinator", "the coordinator lost",
     "training went on without it and it was restarted; its log in the run directory says why it ended"),
    (r"stop|hang|hung|silen|deadline|evict|stall|suspect|progress", "silent for too long",
     "if it was slow rather than stuck, raise outside_s or call outlast.pause() around slow parts of the loop; "
     "if it was stuck, the replica's log shows where"),
    (r"path|partition|connection|reset|network|unreachable", "a broken path between members",
     "check the links and firewalls between the hosts named; outlast status shows which replica was left out"),
    (r"exception|error|traceback", "an exception in the loop",
     "read its traceback in the replica's log in the run directory and mend the loop"),
    (r"exit", "a process ended by itself",
     "something in the loop ended the process (sys.exit, os._exit, a library): see the replica's log"),
)  # fmt: skip
_DEFAULT = ("another cause", "read the replica's log in the run directory around that time")


_VAGUE = frozenset({"signal", "exit", "evicted"})
"""Causes whose detail says more than they do: which signal, which code; a hang, a slow path or a difference."""


def remedy(cause: str, detail: str = "") -> tuple[str, str]:
    """(name of the cause, what to do about it) for a cause and detail as events have them."""
    both = f"{cause} {detail}"
    for text, entries in ((both, _TELLING), (both if cause in _VAGUE else cause, _REMEDIES)):
        for pattern, name, advice in entries:
            if re.search(pattern, text, re.IGNORECASE):
                return name, advice
    return _DEFAULT


def why(
    events: Sequence[ev.AnyEvent], *, held: bool | None = None, now_s: float | None = None, everything: bool = False
) -> Why:
    """The story of a run from all its events.

    `held` as in `status`, `now_s` as in `accounting`, `everything` as in `timeline`.
    """
    state = status(events, held=held)
    running = state.state in {"starting", "forming", "training"}
    cost = accounting(events, now_s=now_s if running else None)
    recoveries = [event for event in events if isinstance(event, ev.Recovery)]
    return Why(
        run_id=state.run_id,
        state=state.state,
        headline=_headline(state, len(recoveries)),
        survived=len(recoveries),
        lost_steps=sum(event.lost_steps for event in recoveries),
        microbatches_recomputed=sum(event.microbatches_recomputed for event in recoveries),
        downtime_s=sum(event.downtime_s for event in recoveries),
        cost=cost,
        ettr=cost.ettr,
        advice=_advice(events, state),
        timeline=timeline(events, everything=everything),
    )


def _headline(state: Status, survived: int) -> str:
    faults = "nothing failed" if not survived else f"it outlasted {survived} fault{'s' if survived > 1 else ''}"
    step = f"step {state.step}" if state.step is not None else "its first step"
    match state.state:
        case "finished":
            return f"The run finished; {faults}."
        case "failed" | "stopped" | "lost":
            detail = f": {state.detail}" if state.detail else ""
            return f"The run {_ENDED[state.state]} at {step}{detail}. Before that, {faults}."
    return f"The run is {state.state}, at {step}; so far, {faults}."


_ENDED: dict[str, Literal["failed", "was stopped", "ended without a word"]] = {
    "failed": "failed", "stopped": "was stopped", "lost": "ended without a word",
}  # fmt: skip


def _advice(events: Sequence[ev.AnyEvent], state: Status) -> list[Advice]:
    found: dict[str, tuple[str, list[str]]] = {}
    for cause, detail, who in _faults(events):
        name, text = remedy(cause, detail)
        found.setdefault(name, (text, []))[1].append(who)
    if state.state == "lost":
        text = "start it again; if a scheduler ended it, give the job more time, and let it send SIGTERM first"
        found["the launcher ended without a word"] = (text, ["launcher"])
    return [
        Advice(cause=name, count=len(who), who=list(dict.fromkeys(who)), remedy=text)
        for name, (text, who) in found.items()
    ]


def _faults(events: Sequence[ev.AnyEvent]) -> list[tuple[str, str, str]]:
    """(cause, detail, who) of each fault once: an exit that led to a recovery is told by its recovery.

    The exit's own words are added to the recovery's, as they may say more (which signal, which exception).
    """
    exits = {e.replica: e for e in events if isinstance(e, ev.ReplicaExited) and e.cause not in {"finished", "left"}}
    faults: list[tuple[str, str, str]] = []
    for event in events:
        match event:
            case ev.Recovery():
                known = exits.pop(event.replica, None)
                detail = f"{event.detail} {known.cause} {known.detail}" if known else event.detail
                faults.append((event.cause, detail, event.replica))
            case ev.RunFinished() if event.outcome == "failed":
                faults.append((event.detail or "failed", "", "run"))
    faults += [(e.cause, e.detail, e.replica) for e in exits.values() if e.cause != "agent_lost"]
    return faults
