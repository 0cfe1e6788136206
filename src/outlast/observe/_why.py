"""What happened to a run, what it cost, and what to do next.

Role: causes and their remedies, in one table. Pure. Invariant: every fault in the journal appears, with a remedy; a
cause that the table does not know gets the one that always helps. It guesses at nothing that no event says.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec

from outlast.core import events as ev
from outlast.observe._accounting import Accounting, AccountingFold
from outlast.observe._clocks import Clock, clocks
from outlast.observe.checkpoint_words import PLAIN_FAILURES, lost_remedy, remedy_of
from outlast.observe.fault_sums import sums_of
from outlast.observe.rounding import format_s
from outlast.observe.run_status import status
from outlast.observe.status_records import RUNNING, Status
from outlast.observe.step_anatomy import Anatomy, anatomy_of
from outlast.observe.timeline_rows import Row, timeline

__all__ = ["Advice", "Why", "at_length", "headline_of", "remedy", "story_of", "why"]

_TOLD_OF = frozenset({
    ev.AlarmWeighed, ev.AuditMismatch, ev.CheckpointFailed, ev.DataTrouble, ev.DeviceFinding, ev.Recovery,
    ev.ReplicaExited, ev.RunFinished, ev.VerdictReached, ev.ViewFormed,
})  # fmt: skip
"""What headline, figures and advice are made of. In a long run these are few, and the others are asked what they are
once, not a dozen times."""
_WORTH_TELLING_S, _WORTH_TELLING = 1.0, 0.01  # of the wall: less of a standstill is no headline


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """One cause, how often it struck and whom, and what to do about it."""

    cause: str
    count: int
    who: list[str]
    remedy: str


class Why(msgspec.Struct, frozen=True, kw_only=True):
    """The story of a run. `num_recoveries`: faults that training outlasted; `lost_steps`: done twice or in vain,
    `gone_steps` of them in vain, as the run failed and no checkpoint holds them; `cost`: where the wall time went;
    `alarms`: what acting on alarms is expected to have saved, and what false ones cost, in a sentence; `anatomy`: where
    a step's time goes, member by member; `clocks`: how often something failed, stood still, was lost."""

    run_id: str
    state: str
    headline: str
    num_recoveries: int
    lost_steps: int
    microbatches_recomputed: int
    downtime_s: float
    cost: Accounting
    ettr: float
    advice: list[Advice]
    timeline: list[Row]
    gone_steps: int = 0
    alarms: str = ""
    anatomy: Anatomy = Anatomy()
    clocks: list[Clock] = []


class _Cause(NamedTuple):
    """`pattern`: what it looks like in an event's words; `remedy`: what helps."""

    pattern: str
    remedy: str


_CAUSES: dict[str, _Cause] = {
    "the script never began to train": _Cause(
        r"steps\(\) of outlast\.join\(\)\.protect\(\.\.\.\) was never begun",
        "a script takes part in its run by three calls: run = outlast.join(), training = run.protect(model, optimizer, "
        "dataset, ...), for step in training.steps(until=...); it ended well without the last of them (docs: A first "
        "run). outlast convert SCRIPT says what to change in one for torchrun"),
    "the script, before it trained": _Cause(
        r"^the script ended before training started",
        "its own last words are above; mend it alone first: python SCRIPT is a fleet of one"),
    "out of memory": _Cause(
        r"out of ?memory|\boom\b|memoryerror|(cannot|can't) allocate memory",
        "use a smaller microbatch (more microbatches a step keep the result), or fewer replicas on this machine"),
    "the loop cannot be repeated": _Cause(
        r"\[LOOP\]|which has just joined",
        "no device is to blame: the message names what the loop, the model or the data change in a way that a replica "
        "which joins cannot know, and what to write instead"),
    "the loop fails on one microbatch": _Cause(
        r"poison|same microbatch|two replicas failed",
        "two replicas failed on the same samples: the bug is in the loop or its data; reproduce it with one replica"),
    "a wrong gradient": _Cause(
        r"another gradient|gradient is another|no majority|audit|reduced a slice|were not what it had fingerprinted"
        r"|not what the rows give|disagree on a reduced slice|\baccused \S+ falsely|heard other headers",
        "take the device out of service and test it; outlast why names host, device and replica"),
    "a guard stopped the run": _Cause(
        r"\[GUARD\]|guardstop", "its verdict says what was seen, whose it was and what helps"),
    "its host was put out": _Cause(
        r"^evicted evict host\b",
        "two of its devices were wrong again and again: take the host out of service and test it; the verdict has the "
        "evidence"),
    "replicas differ": _Cause(
        r"diverged|fingerprint|differs from that of",
        "look for operations that are not deterministic in the layer named, or for memory that flips bits"),
    "killed from outside": _Cause(
        r"sigkill|signal 9\b|killed|\b137\b",
        "see whether the kernel ran out of memory (dmesg | grep -i oom) or a person or scheduler sent SIGKILL"),
    "a crash in native code": _Cause(
        r"sigsegv|sigbus|sigill|sigabrt|sigfpe|signal (11|7|4|6|8)\b",
        "read the end of the replica's log in the run directory; if it strikes one host only, test its memory"),
    "asked to leave": _Cause(
        r"sigterm|sigint|signal (15|2)\b|preempt|graceful",
        "nothing to mend: a scheduler or a person asked for it; keep a spare if that happens often"),
    "a host lost": _Cause(
        r"host is not heard of",
        "its power, its network, its kernel or its agent went: see that host, and its agent's output; it joins again "
        "with outlast agent, and spares on other hosts take its replicas' places meanwhile"),
    "an agent lost": _Cause(
        r"agent",
        "its replicas died with it: look for what ended the agent's process; --agents 2 keeps half of them alive"),
    "the coordinator lost": _Cause(
        r"coordinator",
        "training went on without it and it was restarted; its log in the run directory says why it ended"),
    "put out by a guard": _Cause(
        r"^(replace|quarantine): ",
        "its numbers were wrong and its verdict says how; if it happens to this device again, test it"),
    "a broken path between members": _Cause(
        r"path|partition|connection|reset|network|unreachable",
        "check the links and firewalls between the hosts named; outlast status shows which replica was left out"),
    "too late to take part": _Cause(
        r"still starting when (training ended|the run finished)",
        "nothing is to be done: training was over before it was ready, and went on without it"),
    "silent for too long": _Cause(
        r"stop|hang|hung|silen|deadline|evict|stall|suspect|progress",
        "if it was slow rather than stuck, raise outside_s (the loop's body) or stall_floor_s (outlast's own phases); "
        "if it was stuck, the replica's log shows where"),
    "nobody left": _Cause(
        r"every replica|nobody alive|fleet lost",
        "what takes all replicas at once is usually the machine: its memory, its scheduler, its power; a spare or a "
        "second agent does not outlast that, a checkpoint does"),
    "an exception in the loop": _Cause(
        r"exception|error|traceback|^all replicas failed",
        "read its traceback in the replica's log in the run directory and mend the loop"),
    "a process ended by itself": _Cause(
        r"exit", "something in the loop ended the process (sys.exit, os._exit, a library): see the replica's log"),
    "another cause": _Cause("", "read the replica's log in the run directory around that time"),
}  # fmt: skip
_OWN_ERROR = re.compile(r"\[[A-Z_]+\] ")
_TELLING = (
    "the script never began to train", "the script, before it trained", "its host was put out",
    "a guard stopped the run", "a wrong gradient", "out of memory", "the loop cannot be repeated",
    "the loop fails on one microbatch", "replicas differ", "nobody left",
)  # fmt: skip
"""What decides wherever it stands, in the cause or in its detail."""

_BY_CAUSE: dict[str, tuple[str, ...]] = {
    "signal": ("killed from outside", "a crash in native code", "asked to leave", "another cause"),
    "exit": ("killed from outside", "a process ended by itself"),
    "exception": ("an exception in the loop",),
    "evicted": ("too late to take part", "put out by a guard", "a broken path between members", "silent for too long"),
    "agent_lost": ("a host lost", "an agent lost"),
    "coordinator": ("the coordinator lost",),
}
"""For causes that events name: what their detail may tell apart; the last one where it tells nothing."""


@functools.lru_cache(maxsize=4096)  # a long run dies of the same few causes
def remedy(cause: str, detail: str = "") -> tuple[str, str]:
    """(name of the cause, what to do about it) for a cause and detail as events have them."""
    both = f"{cause} {detail}"
    telling = next((name for name in _TELLING if _looks_like(name, both)), None)
    if telling is None and cause in _BY_CAUSE:
        *options, default = _BY_CAUSE[cause]
        telling = next((name for name in options if _looks_like(name, detail)), default)
    name = telling or next(name for name in _CAUSES if _looks_like(name, cause))
    return name, _CAUSES[name].remedy


def _looks_like(name: str, text: str) -> bool:
    return re.search(_CAUSES[name].pattern, text, re.IGNORECASE) is not None


def why(
    events: Sequence[ev.AnyEvent],
    *,
    held: bool | None = None,
    now_s: float | None = None,
    everything: bool = False,
    accounts: AccountingFold | None = None,
    brief: bool = False,
) -> Why:
    """The story of a run from all its events.

    `held` as in `status`, `now_s` as in `accounting`, `everything` as in `timeline`. With `accounts`, which took all
    events, `events` may lack all progress but the newest. With `brief` timeline and anatomy are left to
    `at_length`.
    """
    state = status(events, held=held, now_s=now_s)
    fold = accounts or AccountingFold()
    for event in events if accounts is None else ():
        fold.take(event)
    cost = fold.accounting(now_s=now_s if state.state in RUNNING else None)
    story = story_of(state, cost, fold.gone, events, [], Anatomy())
    return story if brief else at_length(story, events, everything=everything)


def at_length(story: Why, events: Sequence[ev.AnyEvent], *, everything: bool = False) -> Why:
    """A brief story with its timeline, clocks and a step's anatomy, which nothing else needs. Arguments as in `why`."""
    rows = timeline(events, everything=everything)
    told = clocks(events, story.cost.wall_s)
    return msgspec.structs.replace(story, timeline=rows, anatomy=anatomy_of(events), clocks=told)


def story_of(
    state: Status, cost: Accounting, gone: int, events: Sequence[ev.AnyEvent], rows: Sequence[Row], anatomy: Anatomy
) -> Why:
    """The same from what is known already. `gone`: steps that no checkpoint holds; `events`: of all kinds but progress
    and views that were installed, of which nothing is told here."""
    everyone, events = events, [event for event in events if type(event) in _TOLD_OF]
    sums = sums_of(events, gone, state.last_save)
    return Why(
        run_id=state.run_id,
        state=state.state,
        headline=headline_of(state, cost, gone, events),
        num_recoveries=state.num_recoveries,
        lost_steps=sums.lost_steps,
        microbatches_recomputed=sums.microbatches_recomputed,
        downtime_s=sums.downtime_s,
        cost=cost,
        ettr=cost.ettr,
        advice=_advice(events, state) + _advice_of_loss(everyone, state, gone),
        timeline=list(rows),
        gone_steps=gone,
        alarms=_alarms(events),
        anatomy=anatomy,
    )


def headline_of(state: Status, cost: Accounting, gone: int, events: Sequence[ev.AnyEvent]) -> str:
    """The story in a sentence, of this moment. `events`: as in `story_of`; of a run that ever formed a view none are
    needed."""
    return _headline(state, _so_far(state.num_recoveries, cost), gone, _unmended(events))


def _alarms(events: Sequence[ev.AnyEvent]) -> str:
    """What was done about alarms, in seconds of the run's work as they were weighed then; "" if there was none."""
    weighed = [event for event in events if isinstance(event, ev.AlarmWeighed)]
    if not weighed:
        return ""
    acted = [event for event in weighed if event.action != "wait" and not event.told_only]
    saved_s = sum(event.costs.get("wait", 0.0) - event.costs.get(event.action, 0.0) for event in acted)
    vain_s = sum((1 - event.chance) * event.costs.get(event.action, 0.0) for event in acted)
    hosts = {event.host for event in weighed}
    tests = [event for event in events if isinstance(event, ev.DeviceFinding) and event.source == "test"]
    failed = {event.host for event in tests if event.action == "failed"} & hosts
    proved = f"; {', '.join(sorted(failed))} failed the test that followed" if failed else ""
    done = f"{len(acted)} acted on" if acted else "none acted on"
    worth = f", expected to save {format_s(saved_s)} of work for {format_s(vain_s)} in vain" if acted else ""
    return f"{len(weighed)} alarm{'s' if len(weighed) > 1 else ''} weighed, {done}{worth}{proved}"


def _so_far(survived: int, cost: Accounting) -> str:
    """What befell training: faults, and time in which it stood still without one."""
    said = f"it outlasted {survived} fault{'s' if survived > 1 else ''}" if survived else "nothing failed"
    held_s = cost.stalled_s if survived else cost.stalled_s + cost.recovery_s  # a view was made, and nobody failed
    if held_s < max(_WORTH_TELLING_S, _WORTH_TELLING * cost.wall_s):
        return said
    return f"{said}{' and' if survived else ', but'} steps were held up for {format_s(held_s)}"


def _headline(state: Status, faults: str, gone: int, unmended: Sequence[ev.ReplicaExited]) -> str:
    step = f"step {state.step}" if state.step is not None else "its first step"
    saves = _saves(state)
    match state.state:
        case "finished":
            calm = bool(saves) and faults == "nothing failed"
            return f"The run finished{saves}." if calm else f"The run finished; {faults}{saves}."
        case "failed" | "stopped" | "lost":
            first, _, words = state.detail.strip().partition("\n")
            detail = f": {first.removesuffix(':')}" if first else ""
            said = f"The run {_ENDED[state.state]} at {step}{detail}. {_before(faults, unmended)}{saves}."
            if gone:
                said += f" {gone:,} step{'s are' if gone > 1 else ' is'} lost: no checkpoint holds them."
            return f"{said}\n{words}" if words else said
    detail = f" ({state.detail})" if state.detail else ""
    return f"The run is {state.state}, at {step}{detail}; so far, {faults}{saves}."


def _saves(state: Status) -> str:
    """What a headline must not leave out: saves that failed, and how old the newest one is that did not."""
    if not state.num_failed_saves:
        return ""
    many = f"; {state.num_failed_saves} save{'s' if state.num_failed_saves > 1 else ''} failed"
    if state.last_save is None:
        return f"{many}, and there is no checkpoint"
    newest, behind = state.last_save.step, (state.step or 0) - state.last_save.step
    return f"{many}, the newest save is of step {newest}" + (
        f", and {behind:,} steps are in none" if behind > 0 else ""
    )


def _before(faults: str, unmended: Sequence[ev.ReplicaExited]) -> str:
    """What had happened before the end: also what nobody recovered from, in its own words."""
    if not unmended:
        return f"Before that, {faults}"
    last = unmended[-1]
    words = [line.strip() for line in last.detail.splitlines() if line.strip()]
    words = [line for line in words if _OWN_ERROR.match(line)] or words  # after it come its remedy and its place
    many = f"{len(unmended)} replicas ended" if len(unmended) > 1 else f"{last.replica} ended"
    return f"Before that, {many} ({last.cause})" + (f", the last words being: {words[-1]}" if words else "")


def _unmended(events: Sequence[ev.AnyEvent]) -> list[ev.ReplicaExited]:
    """Faults before the end that no recovery tells; those of the end itself are told by its reason."""
    told = {event.replica for event in events if isinstance(event, ev.Recovery)}
    formed = any(isinstance(event, ev.ViewFormed) for event in events)
    exits = [event for event in events if isinstance(event, ev.ReplicaExited) and event.replica not in told]
    return [] if formed else [event for event in exits if event.cause not in {"finished", "left", "evicted"}]


_ENDED: dict[str, Literal["failed", "was stopped", "ended without a word"]] = {
    "failed": "failed", "stopped": "was stopped", "lost": "ended without a word",
}  # fmt: skip


_OF_DATA = {
    "skipped": ("samples that cannot be read", "mend or drop these samples: others were trained with in their place"),
    "died": ("a data worker that died", "read the samples named in a process of their own, or look at the memory"),
    "hung": ("a data worker that hung", "look at the storage these samples come from, and at what decodes them"),
    "leaked": ("a data worker that leaks", "look for what the dataset keeps from sample to sample, such as a cache"),
}  # fmt: skip


def _advice(events: Sequence[ev.AnyEvent], state: Status) -> list[Advice]:
    found: dict[str, tuple[str, list[str]]] = {}
    for failed in [e for e in events if isinstance(e, ev.CheckpointFailed) and e.cause not in PLAIN_FAILURES]:
        name, text = remedy_of(failed)
        found.setdefault(name, (text, []))[1].append("checkpoints")
    for cause, detail, who in _faults(events):
        name, text = remedy(cause, detail)
        found.setdefault(name, (text, []))[1].append(who)
    for event in events:
        if isinstance(event, ev.AuditMismatch):
            found.setdefault(f"a wrong gradient ({event.verdict})", (event.remedy, []))[1].append(event.culprit)
        if isinstance(event, ev.DeviceFinding) and event.remedy:
            name = f"a device ({event.source}: {event.action})"
            found.setdefault(name, (event.remedy, []))[1].append(
                " ".join((event.replica or event.host, event.device)).strip()
            )
        if isinstance(event, ev.DataTrouble):
            name, text = _OF_DATA[event.what]
            at = [f"sample {sample}" for sample in event.samples] or [event.replica]
            found.setdefault(name, (text, []))[1].extend(at)
        if isinstance(event, ev.VerdictReached) and event.remedy:
            who = event.replica or event.module or f"step {event.step}"
            found.setdefault(f"a guard: {event.action.replace('_', ' ')}", (event.remedy, []))[1].append(who)
    if state.state == "lost":
        text = "start it again; if a scheduler ended it, give the job more time, and let it send SIGTERM first"
        found["the launcher ended without a word"] = (text, ["launcher"])
    return [
        Advice(cause=name, count=len(who), who=list(dict.fromkeys(who)), remedy=text)
        for name, (text, who) in found.items()
    ]


def _advice_of_loss(events: Sequence[ev.AnyEvent], state: Status, gone: int) -> list[Advice]:
    """What would have kept the steps that a stop took with it; a failure's own remedy comes first, and is told."""
    if not gone or state.state != "stopped":
        return []
    name, text = lost_remedy(events)
    return [Advice(cause=name, count=1, who=["run"], remedy=text)]


_SCRIPT_S_WORDS = ("all replicas failed", "the script ended before training started")  # and then what its end was


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
                first, _, words = (event.detail or "failed").partition("\n")  # a traceback may name anything
                faults.append((first, words if first.startswith(_SCRIPT_S_WORDS) else "", "run"))
    faults += [(e.cause, e.detail, e.replica) for e in exits.values() if e.cause != "agent_lost"]
    return faults
