"""Whether what `status` and `why` printed agrees with what the striker did and what its stopwatch shows. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from outlast.core import events as ev
from outlast.errors import Unsaved
from outlast.observe.timeline_rows import surely_stranger
from outlast.prove._commit_log import Commit
from outlast.prove._printed_text import status_text, text_findings
from outlast.prove._strike_recoveries import LATE_S, LEAST_S, SHARE, fallen_back, recovery_findings, struck_at
from outlast.prove.strike_plan import STEPS, StruckFleet
from outlast.prove.striker import StatusSample, StrikeRecord
from outlast.runtime.transport.frames import COORDINATOR

__all__ = ["number_findings"]

_UNWRITTEN_S = 0.5  # from a commit to the strike that may have ended who made it before it wrote its line
_AT_ONCE_S = 0.005  # a step is committed, and the loop's next line writes so
_UNEXPLAINED = 0.01
_QUIET_S = 5.0  # without a step, `status` must not speak of training as if it went on
_SETTLED_S = 2.0  # a process that died so short before the end may not have been told any more
_FATAL = ("SIGKILL", "SIGSEGV")


def number_findings(
    fleet: StruckFleet,
    record: StrikeRecord,
    commits: Sequence[Commit],
    events: Sequence[ev.AnyEvent],
    microbatches: int = 0,
) -> list[tuple[str, str]]:
    """(check, what was printed beside what was so). `microbatches` of a step; 0 if that is not known."""
    found = [*_story(record, commits, events), *_deaths(record, events), *_blame(record, events)]
    found += [*recovery_findings(record, commits, events, microbatches), *_strangers(fleet, record, events)]
    for sample in record.samples:
        found += list(_sampled(sample, record, commits))
    return found


# --- at the end ------------------------------------------------------------------------------------------------------
def _story(record: StrikeRecord, commits: Sequence[Commit], events: Sequence[ev.AnyEvent]) -> Iterator[tuple[str, str]]:
    why, status = record.why, record.status
    for name, said in (("why", why), ("status", status)):
        if "error" in said:
            yield name, f"`outlast {name} --json` failed: {str(said['error'])[:300]}"
            return
    yield from text_findings(why, record.printed.get("why"), status, record.printed.get("status"))
    finished = record.exit_code in (0, Unsaved.exit_code)
    if (why["state"] == "finished") != finished:
        yield "why: state", f"{why['state']}, with exit code {record.exit_code}"
    done = max((commit.step for commit in commits), default=-1) + 1
    done = next((step for step, (_, on) in fallen_back(record, commits, events).items() if not on), done)
    shown = status["step"] or 0
    if shown != done if finished else abs(shown - done) > 1:
        yield "status: step", f"{shown} at the end, where {done} of {STEPS} had been committed"
    lost, told = _lost_steps(record, commits, events), why["lost_steps"] - why["gone_steps"]
    if told != lost:
        yield "why: lost steps", f"{told}, where {lost} were done twice"
    if not finished and not _saved(events) and abs(why["gone_steps"] - done) > 1:
        yield "why: lost steps", f"{why['gone_steps']} in vain, where {done} had been committed"
    unexplained = why["cost"]["unexplained_s"]
    if unexplained > max(LEAST_S, _UNEXPLAINED * record.ended_s):
        yield "why: unexplained", f"{unexplained:.2f} s of {record.ended_s:.2f} s"
    wall = why["cost"]["wall_s"]
    if abs(wall - record.ended_s) > max(LEAST_S, SHARE * record.ended_s):
        yield "why: wall", f"{wall:.2f} s, where {record.ended_s:.2f} s passed"


def _lost_steps(record: StrikeRecord, commits: Sequence[Commit], events: Sequence[ev.AnyEvent]) -> int:
    """Committed, and lost with all who held them: a checkpoint was loaded, or a spare went on that was behind."""
    lost, since_s, commits = 0, -math.inf, [*commits, *_unlogged(record, events)]
    for event in events:
        if isinstance(event, ev.FleetGone):
            at_s = event.at_s - record.unix_s + record.started_s
            before = max((commit.step for commit in commits if since_s < commit.at_s <= at_s), default=-1)
            again = min((commit.step for commit in commits if commit.at_s > at_s), default=before + 1)
            lost, since_s = lost + max(0, before - again + 1), at_s
    for step, (at_s, _) in fallen_back(record, commits, events).items():
        before = max((commit.step for commit in commits if commit.at_s <= at_s), default=-1)
        lost += max(0, before + 1 - step)
    return lost


def _unlogged(record: StrikeRecord, events: Sequence[ev.AnyEvent]) -> Iterator[Commit]:
    """Steps whose maker was killed as it had committed them: it could not write its line, and its block had them."""
    killed = [done.at_s for done in record.done if done.kind in _FATAL]
    for event in events:
        if isinstance(event, ev.ProgressMade) and event.committed > 0:
            at_s = event.committed_at_s - record.unix_s
            if any(0.0 <= when_s - at_s <= _AT_ONCE_S for when_s in killed):
                yield Commit(at_s + record.started_s, event.committed - 1, "", "")


def _saved(events: Sequence[ev.AnyEvent]) -> bool:
    return any(isinstance(event, ev.CheckpointSaved) for event in events)


def _deaths(record: StrikeRecord, events: Sequence[ev.AnyEvent]) -> Iterator[tuple[str, str]]:
    """Whoever was killed is told of; an agent, once the coordinator had heard of it."""
    known = {e.agent for e in events if isinstance(e, ev.AgentStarted)}
    told = {e.replica for e in events if isinstance(e, ev.ReplicaExited)}
    told |= {replica for e in events if isinstance(e, ev.AgentLost) for replica in e.replicas}
    told |= {e.agent for e in events if isinstance(e, ev.AgentLost)}
    lives = {(life.name, life.pid): life for life in record.lives}
    over_s = min([record.ended_s, *(e.at_s - record.unix_s for e in events if isinstance(e, ev.RunFinished))])
    for done in record.done:
        life = lives.get((done.name, done.pid))
        if done.kind not in _FATAL or life is None or life.last_s > over_s - _SETTLED_S:
            continue
        if done.name not in told and (done.role in ("replica", "spare", "rank") or done.name in known):
            yield "journal: deaths", f"{done.name} died by {done.kind} at {done.at_s:.2f} s, and no event tells of it"
    replaced = sum(isinstance(e, ev.Recovery) and e.cause == "coordinator" for e in events)
    ended = [life for life in record.lives if life.name == "coordinator" and life.last_s < record.ended_s - _SETTLED_S]
    struck = {done.pid for done in record.done if done.role == "coordinator"}
    settled = [life for life in ended if life.pid in struck and life.last_s - life.first_s > _SETTLED_S]
    over = any(isinstance(e, ev.RunFinished) for e in events)  # the last one left because the run was over
    if not len(settled) - over <= replaced <= len(struck):
        yield "journal: deaths", f"{replaced} coordinators were replaced, where {len(struck)} were struck"


_ORDERED = ("the run was", "when the run finished", "when training ended")  # ends that are nobody's fault


def _blame(record: StrikeRecord, events: Sequence[ev.AnyEvent]) -> Iterator[tuple[str, str]]:
    """Nobody else is said to have failed, and nobody before it was struck."""
    hit = struck_at(record, events)
    for event in events:
        if not isinstance(event, ev.ReplicaExited) or event.cause in ("finished", "left", "agent_lost"):
            continue
        if any(words in event.detail for words in _ORDERED):
            continue
        at_s, first_s = event.at_s - record.unix_s, min(hit.get(event.replica, ()), default=math.inf)
        if at_s < first_s - LATE_S:
            struck = "was not struck" if math.isinf(first_s) else f"was struck {first_s - at_s:.3f} s later"
            yield "journal: blame", f"{event.replica} {struck}: {event.cause}, {event.detail[:300]}"


def _strangers(fleet: StruckFleet, record: StrikeRecord, events: Sequence[ev.AnyEvent]) -> Iterator[tuple[str, str]]:
    """A stranger is told of where there was one, and only there; or perhaps one, after a strike."""
    told = [event for event in events if isinstance(event, ev.Refused) and event.stranger]
    first_s = min((done.at_s for done in record.done), default=math.inf)
    wrong = [event for event in told if surely_stranger(event) or event.at_s - record.unix_s < first_s]
    if wrong and not fleet.stranger:
        yield "journal: strangers", f"{wrong[0].reason}, at {wrong[0].place}, where there was no stranger"
    if record.stranger.told_secret:
        yield "strangers: secret", f"said by {', '.join(record.stranger.told_secret)}"
    proving = {name: n for name, n in record.stranger.reached.items() if name == COORDINATOR or name.startswith("r")}
    if not told and sum(proving.values()) > 100:  # the others answer everybody, and tell of nobody
        yield "journal: strangers", f"one reached {dict(record.stranger.reached)}, and no event tells of it"


# --- while it runs ---------------------------------------------------------------------------------------------------
def _sampled(sample: StatusSample, record: StrikeRecord, commits: Sequence[Commit]) -> Iterator[tuple[str, str]]:
    said: dict[str, Any] = _read(sample)
    when = f"at {sample.answered_s:.1f} s"
    if "error" in said:
        if commits and sample.asked_s > commits[0].at_s - record.started_s:
            yield "status", f"{when}: {str(said['error'])[:300]}"
        return
    shown = said["step"] or 0
    most = _steps_by(commits, record.started_s + sample.answered_s)
    if shown > most + 1:
        yield "status: step", f"{shown} {when}, where {most} had been committed"
    yield from _aged(sample, said, record, commits)
    newest = max((c.at_s for c in commits if c.at_s <= record.started_s + sample.answered_s), default=None)
    quiet = 0.0 if newest is None else record.started_s + sample.asked_s - newest
    if quiet <= _QUIET_S:
        return
    if said["state"] == "training" and not said["detail"]:
        yield "status: state", f"training {when}, where the newest step was {quiet:.1f} s old"
    if said["state"] in ("training", "stalled"):
        rows = [name for name, state in said["rows"].items() if state == "training"]
        if rows or said["step_s"]:
            pace = f"{said['step_s']} s a step, " * bool(said["step_s"])
            yield "status: state", f"{pace}{rows} in training {when}, where the newest step was {quiet:.1f} s old"


def _read(sample: StatusSample) -> dict[str, Any]:
    """The same of both forms. `made_s`: (earliest, latest) Unix time at which the newest step was committed, less the
    striker's start in the text, which says how long ago; None where it says nothing."""
    if not sample.text:
        said = sample.said
        if "error" in said:
            return said
        at_s, rows = said.get("step_at_s"), {row["replica"]: row["state"] for row in said.get("replicas", ())}
        return {"step_s": None, **said, "rows": rows, "made": None if at_s is None else (at_s, at_s)}
    told = status_text(sample.text)
    if told is None:
        return {"error": sample.text}
    said = {"state": told.state, "detail": told.detail, "step": told.step, "made": None}
    said |= {"step_s": told.step_s and told.step_s.seconds, "rows": {name: row[0] for name, row in told.rows.items()}}
    return said | {"ago": told.age}


def _aged(
    sample: StatusSample, said: dict[str, Any], record: StrikeRecord, commits: Sequence[Commit]
) -> Iterator[tuple[str, str]]:
    """The newest step was committed when it says, and is as old as it says."""
    when, shown = f"at {sample.answered_s:.1f} s", said["step"] or 0
    made, ago = said["made"], said.get("ago")
    if ago is not None:
        low_s, high_s = (at_s - ago.seconds + record.unix_s for at_s in (sample.asked_s, sample.answered_s))
        made = low_s - ago.off_s, high_s + ago.off_s
    elif made is not None and said.get("step_age_s") is not None:
        now_s = made[0] + said["step_age_s"] - record.unix_s
        if not sample.asked_s - LATE_S <= now_s <= sample.answered_s + LATE_S:
            yield "status: age", f"{said['step_age_s']:.3f} s {when}, as if it were {now_s:.3f} s"
    if made is None:
        return
    low_s, high_s = (at_s - record.unix_s for at_s in made)  # of the newest step, which may not be stable yet
    known = [c.at_s - record.started_s for c in commits if c.step in (shown - 1, shown)]
    off_s = min((max(low_s - at_s, at_s - high_s) for at_s in known), default=math.inf)
    if off_s > LATE_S and not _unwritten(record, low_s) and not _unwritten(record, high_s):
        yield "status: age", f"step {shown} {when}, committed {off_s:.3f} s from when it says"


def _unwritten(record: StrikeRecord, at_s: float) -> bool:
    """Whether the commit log may lack a step of this moment: who made it told it, and was struck right then."""
    return any(-LATE_S <= done.at_s - at_s <= _UNWRITTEN_S for done in record.done)


def _steps_by(commits: Sequence[Commit], at_s: float) -> int:
    return max((commit.step for commit in commits if commit.at_s <= at_s), default=-1) + 1
