"""The journal of a run that never was: a million steps of ten thousand replicas, with faults, saves and words.

Role: what the benchmarks of reading and showing read. Pure but for the writing. One step a heartbeat, which is the most
entries that so many steps can have; each fault has all its rows, two views of every member among them.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from outlast.core import events as ev
from outlast.core.step_parts import PairWait
from outlast.journal import Journal

__all__ = ["Long", "events", "keep_history", "write"]

_START_S = 1_700_000_000.0
_BATCH = 5000
_A_HOST = 8
_STEP_S = 1.0
_IDLE, _DOWN_S = 0.03, 0.2  # of a step; what a fault holds the step after it up


class Long(NamedTuple):
    """How long, how many, how often: a fault each `fault_every` steps, a save each `save_every`, a word of each member
    each `word_every`."""

    steps: int = 1_000_000
    members: int = 10_000
    fault_every: int = 2_500
    save_every: int = 1_000
    word_every: int = 50_000


def write(run_dir: Path, run: Long) -> Path:
    """Write such a journal into `run_dir`, which is made; returns it."""
    with Journal.create(run_dir) as journal:
        batch: list[ev.AnyEvent] = []
        for event in events(run):
            batch.append(event)
            if len(batch) >= _BATCH:
                journal.append_many(batch)
                journal.flush(600.0)
                batch.clear()
        journal.append_many(batch)
        journal.flush(600.0)
    return run_dir


def keep_history(run_dir: Path) -> None:
    """Read it to its end with a process of its own, which keeps what came of it, as whoever does so."""
    command = [sys.executable, "-m", "outlast", "why", str(run_dir), "--json"]
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)


def events(run: Long) -> Iterator[ev.AnyEvent]:
    """The run's events, in order."""
    members = [f"r{slot}.0" for slot in range(run.members)]
    n, faults = 1, 0
    yield from _start(run, members)
    for step in range(run.steps):
        at_s = _START_S + 60.0 + (step + 1) * _STEP_S
        yield _progress(run, step, at_s, n)
        if step % run.save_every == run.save_every - 1:
            yield from _save(step, at_s, n)
        if step % run.word_every == run.word_every - 1:
            yield from (_word(member, step, at_s) for member in members)
        if step % run.fault_every == run.fault_every - 1:
            faults += 1
            slot = faults * 7919 % run.members
            yield from _fault(members, slot, step, at_s, n)
            n += 2
    end_s = _START_S + 60.0 + (run.steps + 1) * _STEP_S
    yield ev.RunFinished(at_s=end_s, outcome="finished", steps=run.steps, detail="", exit_code=0, seconds={})


def _start(run: Long, members: list[str]) -> Iterator[ev.AnyEvent]:
    yield ev.RunStarted(
        at_s=_START_S, run_id="long-otter", command=["train.py"], num_replicas=run.members, num_spares=0,
        signature={}, config={},
    )  # fmt: skip
    yield ev.CoordinatorStarted(at_s=_START_S, epoch=1, pid=100, takeover=False)
    for host in range(-(-run.members // _A_HOST)):
        address = f"10.0.{host // 250}.{host % 250}"
        yield ev.AgentStarted(
            at_s=_START_S + 1, agent=f"h{host}:aa", pid=200, host=f"h{host}", address=address, slots=_A_HOST
        )
    for slot, name in enumerate(members):
        yield ev.ReplicaStarted(at_s=_START_S + 2, replica=name, agent=_agent(slot), pid=300 + slot)
    yield _view(members, 1, _START_S + 59.0, "start", planned=False, num_microbatches=2 * run.members)
    yield ev.ViewFormed(at_s=_START_S + 60.0, epoch=1, n=1, step=0, roll_call_s=0.1)


def _progress(run: Long, step: int, at_s: float, n: int) -> ev.ProgressMade:
    idle_s, down_s = _IDLE * _STEP_S, _DOWN_S if step and step % run.fault_every == 0 else 0.0
    return ev.ProgressMade(
        at_s=at_s, view=[1, n], stable=step, losses=[(step, 10.0 / (1.0 + step / 1000.0))], step_s=_STEP_S,
        messages=12 * step, until=run.steps, first=step, committed=step + 1, committed_at_s=at_s,
        seconds={"productive": _STEP_S - idle_s - down_s, "idle": idle_s, "recovery": down_s},
    )  # fmt: skip


def _save(step: int, at_s: float, n: int) -> Iterator[ev.AnyEvent]:
    generation, url = step // 1000, f"file:///ckpt/{step // 1000}"
    yield ev.CheckpointBegan(at_s=at_s, step=step, view=[1, n], reason="interval")
    yield ev.CheckpointSaved(
        at_s=at_s + 0.5, step=step, generation=generation, view=[1, n], num_writers=64, state_bytes=10**12,
        written_bytes=10**12, blocked_s=0.01, copied_s=0.2, durable_s=0.5, reason="interval", url=url,
    )  # fmt: skip
    yield ev.CheckpointPruned(at_s=at_s + 0.6, generations=[generation - 3], freed_bytes=10**12, note="")


def _word(member: str, step: int, at_s: float) -> ev.StepAnatomy:
    slot = int(member.partition(".")[0][1:])
    parts = {"load": 0.05, "compute": 0.7 + slot % 7 / 100, "exchange": 0.2, "wait": 0.05}
    waits = {f"r{slot ^ 1}.0": PairWait(waited_s=0.01 * step, exchanges=step)}
    return ev.StepAnatomy(
        at_s=at_s, replica=member, steps=step, seconds={name: each * step for name, each in parts.items()}, waits=waits
    )


def _fault(members: list[str], slot: int, step: int, at_s: float, n: int) -> Iterator[ev.AnyEvent]:
    """One replica dies between two steps; another process takes its place. `members` is changed."""
    dead, incarnation = members[slot], int(members[slot].partition(".")[2])
    fresh = f"r{slot}.{incarnation + 1}"
    rest = members[:slot] + members[slot + 1 :]
    members[slot] = fresh
    yield ev.ReplicaExited(
        at_s=at_s, replica=dead, cause="signal", detail="SIGKILL", noticed_by=f"agent {_agent(slot)}", step=step
    )
    yield _view(rest, n + 1, at_s, f"{dead} died", planned=False)
    yield ev.ViewFormed(at_s=at_s + 0.1, epoch=1, n=n + 1, step=step + 1, roll_call_s=0.1)
    yield ev.Recovery(
        at_s=at_s + 0.2, cause="signal", replica=dead, noticed_by=f"agent {_agent(slot)}", detect_s=0.01,
        downtime_s=_DOWN_S, microbatches_recomputed=2, lost_steps=0, step=step, view=[1, n + 1], detail="SIGKILL",
    )  # fmt: skip
    yield ev.ReplicaStarted(at_s=at_s + 0.3, replica=fresh, agent=_agent(slot), pid=step)
    yield ev.JoinerServed(at_s=at_s + 0.4, replica=fresh, step=step, donors=rest[:2])
    yield ev.JoinerCaughtUp(at_s=at_s + 0.5, replica=fresh, step=step + 1, seconds=0.1)
    yield _view(members, n + 2, at_s + 0.6, "planned", planned=True)
    yield ev.ViewFormed(at_s=at_s + 0.7, epoch=1, n=n + 2, step=step + 1, roll_call_s=0.1)


def _agent(slot: int) -> str:
    return f"h{slot // _A_HOST}:aa"


def _view(
    members: list[str], n: int, at_s: float, cause: str, *, planned: bool, num_microbatches: int = 0
) -> ev.ViewInstalled:
    return ev.ViewInstalled(
        at_s=at_s, epoch=1, n=n, members=list(members), cause=cause, planned=planned, num_microbatches=num_microbatches
    )
