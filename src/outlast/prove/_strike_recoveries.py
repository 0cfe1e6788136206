"""Whether each recovery that was told is one that the striker saw: how long no step was committed, how soon it was
noticed, how much was computed again. Pure."""

from __future__ import annotations

import bisect
import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from outlast.core import events as ev
from outlast.prove._commit_log import Commit
from outlast.prove.striker import StrikeRecord

__all__ = ["LATE_S", "LEAST_S", "SHARE", "fallen_back", "recovery_findings", "struck_at"]

SHARE, LEAST_S = 0.02, 0.05  # how far a duration may be off
LATE_S = 0.1  # from a commit to its line in the log, where the machine is busy
_NEAR_S = 2.5  # from what an event tells of to the event: heartbeats of the fleet, and a busy machine
_LOOKED_S = 0.3  # from a death from inside to the look that found it
_BEAT_S = 1.0  # between two signs of life of a coordinator, where the machine is busy
_STILL_S, _STILL = 0.15, 4.0  # beyond both, in steps, training stood still where somebody had been struck
_SELDOM, _BEYOND = 0.95, 1.5  # one step of twenty far from strikes, or those just before, take as long
_LONG_S, _LONG = 1.0, 10.0  # and whatever had happened


def recovery_findings(
    record: StrikeRecord, commits: Sequence[Commit], events: Sequence[ev.AnyEvent], microbatches: int
) -> list[tuple[str, str]]:
    """(check, what was told beside what was seen). `microbatches` of a step; 0 if that is not known."""
    found = [*_downtime(record, commits, events), *_untold(record, commits, events)]
    found += [*_detection(record, commits, events), *_recomputed(events, microbatches)]
    return [*found, *_sums(record.why, events)]


def struck_at(record: StrikeRecord, events: Sequence[ev.AnyEvent]) -> dict[str, list[float]]:
    """When who was struck, in seconds since the start: also whoever an agent, a nursery or a host took along."""
    found: dict[str, list[float]] = {}
    for done in record.done:
        found.setdefault(done.name, []).append(done.at_s)
    for event in events:
        if isinstance(event, ev.AgentStarted) and event.host in found:
            found.setdefault(event.agent, []).extend(found[event.host])
    known = {e.replica for e in events if isinstance(e, ev.ReplicaStarted)}
    nurseries = {done.name for done in record.done if done.role == "nursery"}
    for event in events:  # who is forked just now dies with the process that forks it, and is known as that until then
        if isinstance(event, ev.ReplicaExited) and event.replica not in known:
            found.setdefault(event.replica, []).extend(at_s for name in nurseries for at_s in found[name])
        if isinstance(event, ev.ReplicaStarted):
            for name in (event.agent, f"nursery of {event.agent}"):
                if name in found:
                    found.setdefault(event.replica, []).extend(found[name])
    return found


def fallen_back(
    record: StrikeRecord, commits: Sequence[Commit], events: Sequence[ev.AnyEvent]
) -> dict[int, tuple[float, bool]]:
    """By the step that a spare went on from which was behind all who had died: when they had, by the commits' clock;
    whether it came to commit a step itself. Only where the stopwatch saw it begin there, or hand on the step before."""
    apart_s, found = record.started_s - record.unix_s, dict[int, tuple[float, bool]]()
    gone = [e.at_s for e in events if isinstance(e, ev.FleetGone)]
    exits = {e.replica: e.at_s for e in events if isinstance(e, ev.ReplicaExited)}
    told = [e for e in events if isinstance(e, ev.Recovery) and e.lost_steps and e.replica in exits]
    for event in told:  # one view may mend several: who was still to bring the state back may have died as well
        died_s = min(exits[each.replica] for each in told if each.view == event.view)
        if not any(died_s <= at_s <= event.at_s for at_s in gone):  # else a checkpoint was loaded
            since_s = died_s + apart_s
            after = [commit.step for commit in commits if commit.at_s > since_s]
            if min(after, default=event.step) in (event.step - 1, event.step):
                found[event.step] = since_s, any(step >= event.step for step in after)
    return found


# --- downtimes -------------------------------------------------------------------------------------------------------
def _downtime(
    record: StrikeRecord, commits: Sequence[Commit], events: Sequence[ev.AnyEvent]
) -> Iterator[tuple[str, str]]:
    """How long no step was committed, of each fault that stopped training: some pause of the stopwatch is as long, and
    ends when training is said to go on."""
    first_s = min((commit.at_s - record.started_s for commit in commits), default=math.inf)
    pauses = [(end_s - record.started_s, long_s) for end_s, long_s in _pauses(commits)]
    ahead = [first_s, *(end_s for _, end_s in _gaps(record, commits, events))]  # who is first to make a step
    pauses += [(end_s, end_s - begin_s) for begin_s, end_s in itertools.pairwise(ahead)]
    over = {step for step, (_, went_on) in fallen_back(record, commits, events).items() if not went_on}
    for event in events:
        if not isinstance(event, ev.Recovery) or not event.downtime_s or event.step in over:
            continue
        at_s, may_s = event.at_s - record.unix_s, max(LEAST_S, SHARE * event.downtime_s)
        if at_s - event.downtime_s < first_s < at_s + LATE_S < first_s + _NEAR_S:
            continue  # it began before anything was committed: the stopwatch shows only its end
        if not any(abs(long_s - event.downtime_s) <= may_s and abs(end_s - at_s) < _NEAR_S for end_s, long_s in pauses):
            near = [f"{long_s:.3f}" for end_s, long_s in pauses if abs(end_s - at_s) < _NEAR_S and long_s > LEAST_S]
            yield "why: downtime", f"{event.downtime_s:.3f} s after {event.replica}, where pauses were {near}"


def _pauses(commits: Sequence[Commit]) -> Iterator[tuple[float, float]]:
    """(end, length) of the time from a commit to the next one of another step: of each process, of all, and from who
    had a step first to who had the next one first (who takes over tells the step that it was handed once more)."""
    for who in {commit.who for commit in commits} | {""}:
        own = [commit for commit in commits if who in ("", commit.who)]
        yield from ((b.at_s, b.at_s - a.at_s) for a, b in itertools.pairwise(own) if a.step != b.step)
    first: dict[int, float] = {}
    for commit in commits:
        first.setdefault(commit.step, commit.at_s)
    yield from ((at_s, at_s - first[step - 1]) for step, at_s in first.items() if step - 1 in first)


def _untold(
    record: StrikeRecord, commits: Sequence[Commit], events: Sequence[ev.AnyEvent]
) -> Iterator[tuple[str, str]]:
    """Time in which the stopwatch saw no commit at all is told, as a downtime or as a stall; a fault of which it is
    told that training went on stopped nothing, but for what the striker held up itself just then. Of what lasted to the
    end of the run nobody was left to tell."""
    told = [(e.at_s - record.unix_s, e.downtime_s) for e in events if isinstance(e, ev.Recovery) and e.downtime_s]
    told += [(e.at_s - record.unix_s, e.seconds) for e in events if isinstance(e, ev.Stall)]
    calm = {e.replica: e.at_s - record.unix_s for e in events if isinstance(e, ev.Recovery) and not e.downtime_s}
    hit, gaps = struck_at(record, events), list(_gaps(record, commits, events))
    held = [(each.at_s, each.continued_s) for each in record.done if each.role == "replica" and each.continued_s]
    usual_s = statistics.median([end_s - begin_s for begin_s, end_s in gaps] or [0.0])  # of a step, whoever is first
    apart = [(a, b) for a, b in gaps if not any(a - _NEAR_S < done.at_s < b for done in record.done)]
    took_s = sorted(end_s - begin_s for begin_s, end_s in apart)  # of each step that no strike was near
    seldom_s = took_s[int(_SELDOM * len(took_s))] if took_s else 0.0
    over_s = min([math.inf, *(e.at_s - record.unix_s for e in events if isinstance(e, ev.RunFinished))])
    for index, (begin_s, end_s) in enumerate(gaps):
        if abs(end_s - over_s) < LATE_S:
            continue
        long_s = end_s - begin_s
        near_s = statistics.median([end - begin for begin, end in gaps[max(0, index - 2) : index]] or [0.0])
        covered_s = sum(max(0.0, min(at_s, end_s) - max(at_s - s, begin_s)) for at_s, s in told)
        if covered_s >= long_s / 2 or any(abs(at_s - end_s) < _NEAR_S and s >= long_s / 2 for at_s, s in told):
            continue
        names = [
            name for name, at_s in calm.items()
            if any(begin_s - _LOOKED_S <= s <= min(end_s, at_s) for s in hit.get(name, ()))
        ]  # fmt: skip
        held_s = sum(max(0.0, min(until_s, end_s) - max(since_s, begin_s)) for since_s, until_s in held)
        still_s = max(_STILL_S, _STILL * usual_s + LATE_S, _BEYOND * seldom_s, _BEYOND * near_s)
        if names and long_s - held_s > still_s + _queued_s(record, commits, begin_s, end_s):
            yield "why: downtime", f"0 s after {', '.join(names)}, where nothing was committed for {long_s:.3f} s"
        elif long_s > max(_LONG_S, _LONG * usual_s):
            yield "why: downtime", f"no word of {long_s:.3f} s without a commit, until {end_s:.1f} s"


def _queued_s(record: StrikeRecord, commits: Sequence[Commit], begin_s: float, end_s: float) -> float:
    """How long, of that time, one of those who trained before and after it was ready to train and had no processor: on
    a machine that starts other processes meanwhile a step takes longer, and nothing stands still."""
    before, after = (
        {commit.who for commit in commits if (commit.at_s - record.started_s - at_s) * sign >= 0.0}
        for at_s, sign in ((begin_s, -1), (end_s, 1))
    )
    waits = [life.queued for life in record.lives if life.name in before & after and life.queued]
    return max([0.0, *(_between(seen, end_s) - _between(seen, begin_s) for seen in waits)])


def _between(seen: Sequence[tuple[float, float]], at_s: float) -> float:
    """What was seen to grow, at that moment: evenly from look to look."""
    index = bisect.bisect_left(seen, (at_s, 0.0))
    if index in (0, len(seen)):
        return seen[max(0, index - 1)][1]
    (since_s, low), (until_s, high) = seen[index - 1], seen[index]
    return low + (high - low) * (at_s - since_s) / (until_s - since_s)


def _gaps(
    record: StrikeRecord, commits: Sequence[Commit], events: Sequence[ev.AnyEvent]
) -> Iterator[tuple[float, float]]:
    """(begin, end) in seconds since the start of the time between two commits, whoever made them, of which the later
    one is a step further than all before, or the first of a fleet that begins anew."""
    lost = [e.at_s - record.unix_s for e in events if isinstance(e, ev.FleetGone)]
    newest = -1
    for before, commit in itertools.pairwise(commits):
        begin_s, end_s = before.at_s - record.started_s, commit.at_s - record.started_s
        newest, anew = max(newest, before.step), any(begin_s - LATE_S <= at_s <= end_s for at_s in lost)
        if commit.step > newest or anew:
            yield begin_s, end_s
        newest = commit.step if anew else newest


# --- how soon, and how much ------------------------------------------------------------------------------------------
def _detection(
    record: StrikeRecord, commits: Sequence[Commit], events: Sequence[ev.AnyEvent]
) -> Iterator[tuple[str, str]]:
    """From the victim's last sign of life to the notice: no less than nothing, and no more than from the last that was
    seen of it to the view without it."""
    views = {(e.epoch, e.n): e.at_s - record.unix_s for e in events if isinstance(e, ev.ViewInstalled)}
    signs = {life.name: life.first_s for life in record.lives}
    for commit in commits:
        signs[commit.who] = max(signs.get(commit.who, 0.0), commit.at_s - record.started_s)
    for event in events:
        if not isinstance(event, ev.Recovery):
            continue
        until_s = told_s = event.at_s - record.unix_s
        if event.downtime_s:
            until_s = min(told_s, views.get((event.view[0], event.view[1]), told_s))
        sign_s = signs.get(event.replica, 0.0)
        if event.cause == "coordinator":
            sign_s = _coordinator_s(record, events, told_s)
        most_s = until_s - sign_s + max(LATE_S, SHARE * event.detect_s)
        if not 0.0 <= event.detect_s <= most_s:
            yield "why: detection", f"{event.replica} noticed after {event.detect_s:.3f} s, where {most_s:.3f} s passed"


def _coordinator_s(record: StrikeRecord, events: Sequence[ev.AnyEvent], until_s: float) -> float:
    """The last sign of life that the coordinator gave which was replaced then: short before it was struck first. Who
    tells of it tells of all since the one that it knows of."""
    starts = [e.at_s for e in events if isinstance(e, ev.CoordinatorStarted) and e.at_s <= until_s + record.unix_s]
    since_s = starts[-2] - record.unix_s if len(starts) > 1 else math.inf
    hits = [done for done in record.done if done.role == "coordinator" and done.at_s <= until_s]
    pids = {done.pid for done in hits if done.at_s >= since_s} or {done.pid for done in hits[-1:]}
    return min((done.at_s for done in hits if done.pid in pids), default=_BEAT_S) - _BEAT_S


def _recomputed(events: Sequence[ev.AnyEvent], microbatches: int) -> Iterator[tuple[str, str]]:
    """At most what those who are gone had under way: all of a step but one of each who is left, unless it had only just
    come: in its first step it may get nothing to compute. A coordinator had nothing."""
    installed: dict[tuple[int, int], set[str]] = {}
    since_s: dict[tuple[int, int], float] = {}
    formed = {(e.epoch, e.n) for e in events if isinstance(e, ev.ViewFormed)}
    before: set[str] = set()
    worked: dict[tuple[int, int], set[str]] = {}  # who was in the view that worked before this one
    came: set[tuple[str, int]] = set()  # who has its first step there
    for event in events:
        if isinstance(event, ev.ViewInstalled):
            installed[event.epoch, event.n], since_s[event.epoch, event.n] = set(event.members), event.at_s
            worked[event.epoch, event.n] = before
        if isinstance(event, ev.ViewFormed):
            now = installed.get((event.epoch, event.n), set())
            came |= {(name, event.step) for name in now - before}
            before = now
        if isinstance(event, ev.ProgressMade):
            id_ = event.view[0], event.view[1]
            if id_ not in formed and event.committed_at_s > since_s.get(id_, math.inf):
                before = installed[id_]  # its coordinator died with the word that it had formed
        if not isinstance(event, ev.Recovery) or not event.microbatches_recomputed:
            continue
        view = event.view[0], event.view[1]
        if view not in installed and event.cause != "coordinator":
            continue
        there = worked.get(view, set())
        stayed = there & installed.get(view, there)
        computed = [name for name in stayed if (name, event.step) not in came]
        most = microbatches - len(computed) if stayed != there else 0
        if event.microbatches_recomputed > most and (microbatches or stayed == there):
            told = f"{event.microbatches_recomputed} after {event.replica}"
            yield "why: recomputed", f"{told}, where at most {most} of {microbatches} were under way"


def _sums(why: Mapping[str, Any], events: Sequence[ev.AnyEvent]) -> Iterator[tuple[str, str]]:
    """What is printed is what was told: row by row, and together; faults that one view mended share what they cost."""
    if "error" in why:
        return
    told = [e for e in events if isinstance(e, ev.Recovery)]
    rows = [row for row in why["timeline"] if row["kind"] == "recovery"]
    for check, name in (
        ("why: detection", "detect_s"), ("why: downtime", "downtime_s"), ("why: recomputed", "microbatches_recomputed")
    ):  # fmt: skip
        printed, known = sorted(row[name] for row in rows), sorted(getattr(event, name) for event in told)
        if len(printed) != len(known) or any(abs(a - b) > 1e-6 for a, b in zip(printed, known, strict=True)):
            yield check, f"{name} of the faults: {printed}, where {known} were told"
        if name != "detect_s":
            views: dict[tuple[int, ...], float] = {}
            for event in told:
                views[tuple(event.view)] = max(getattr(event, name), views.get(tuple(event.view), 0.0))
            if abs(why[name] - sum(views.values())) > 1e-6:
                yield check, f"{why[name]} in all, where {sum(views.values())} were told"
