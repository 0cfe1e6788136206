"""How long a run is followed: on a clock of the test's own, a tenth of a second a look, by what its processes are said
to do."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import pytest

from outlast.core import events as ev
from outlast.errors import ProveError
from outlast.prove import demo_hosts
from outlast.prove._drive import Driven
from outlast.prove._patience import RunWait
from outlast.prove._process_tree import Running
from outlast.prove.host_namespaces import HostNetwork

HANG_S = 40.0
ONE = Running(pid=os.getpid(), name="r0.1", born="7")


class Paced(Driven):
    """A run that has taken `steps` steps, `step_s` each, and then goes on for ever, or ends. `works`, `queues`: shares
    of a processor that its only process has, and waits for, at a time; `writes`: what it says each minute."""

    def __init__(
        self, step_s: float, steps: int, ends: bool = False, works: Callable[[float], float] = lambda now_s: 0.0,
        queues: float = 0.0, writes: ev.AnyEvent | None = None,
    ) -> None:  # fmt: skip
        self.run_dir, self.events = Path("somewhere"), []
        self.now_s, self._step_s, self._steps, self._ends = 0.0, step_s, steps, ends
        self._works, self._queues, self._writes = works, queues, writes
        self._worked_s, self._wrote_s, self._done = 0.0, 0.0, -1
        self.process = type("Ended", (), {"returncode": 0})()  # type: ignore[assignment]
        self.clock = lambda: self.now_s  # type: ignore[method-assign]
        self.read = lambda running: (self._worked_s, self._queues * self.now_s)  # type: ignore[method-assign]

    def wait(self, seconds: float) -> bool:
        self.now_s += 0.1
        self._worked_s += 0.1 * self._works(self.now_s)
        return self._ends and self.now_s > self._step_s * self._steps + 1.0

    def alive(self) -> Iterator[Running]:
        yield ONE

    def poll(self) -> list[ev.AnyEvent]:
        told: list[ev.AnyEvent] = []
        done = min(int(self.now_s / self._step_s), self._steps) - 1
        if done > self._done:
            self._done = done
            told = [ev.ProgressMade(at_s=self.now_s, view=[1, 1], stable=done, losses=[(done, 1.0)], step_s=1.0)]
        elif self.now_s % 10.0 < 0.1:
            told = [ev.Notice(at_s=self.now_s, level="info", text="nothing new")]
        elif self._writes is not None and self.now_s >= self._wrote_s + 60.0:
            self._wrote_s = self.now_s
            told = [self._writes]
        self.events += told
        return told


def nothing() -> None:
    """Nobody watches."""


def test_a_slow_run_is_followed_for_as_long_as_it_makes_steps() -> None:
    assert Paced(step_s=30.0, steps=50, ends=True).finish(HANG_S, nothing) == 0
    run = Paced(step_s=30.0, steps=50, ends=True)
    run.until("the moment", lambda: run.step >= 40, HANG_S, nothing)


@pytest.mark.parametrize(
    ("works", "queues", "longest_s"),
    [(0.06, 0.0, 4 * HANG_S), (0.0, 0.6, 16 * HANG_S), (0.06, 0.6, 64 * HANG_S)],
    ids=["works", "waits for a processor", "both"],
)
def test_a_run_that_shows_nothing_but_works_is_waited_for(works: float, queues: float, longest_s: float) -> None:
    slow = Paced(step_s=longest_s - 5.0, steps=2, ends=True, works=lambda now_s: works, queues=queues)
    assert slow.finish(HANG_S, nothing) == 0
    late = Paced(step_s=longest_s - 5.0, steps=2, works=lambda now_s: works, queues=queues)
    late.until("its first step", lambda: late.step == 0, HANG_S, nothing)
    for_ever = Paced(step_s=longest_s + 5.0, steps=2, ends=True, works=lambda now_s: works, queues=queues)
    with pytest.raises(ProveError, match=r"its processes (worked|waited)"):
        for_ever.finish(HANG_S, nothing)
    assert longest_s < for_ever.now_s < longest_s + 1.0


def test_a_run_that_hangs_is_given_up_soon_with_what_was_seen_last() -> None:
    stuck = Paced(step_s=1.0, steps=5, works=lambda now_s: float(now_s < 5.0))
    with pytest.raises(ProveError) as said:
        stuck.finish(HANG_S, nothing)
    assert 5.0 + HANG_S < stuck.now_s < 5.0 + HANG_S + 1.0
    for word in (
        "the run did not end: no step for 40 s, the newest is 4",
        "its journal's newest is progress, 40 s old",
        "its processes did nothing",
        "in the last 10 s: r0.1 gone 0.0 s",
        "logs under somewhere",
    ):
        assert word in str(said.value)
    never = Paced(step_s=1e6, steps=5)
    with pytest.raises(ProveError, match="the moment did not happen: no step for 40 s, none was made before; nothing"):
        never.until("the moment", lambda: never.step >= 0, HANG_S, nothing)


def test_what_it_did_before_the_wait_and_what_it_merely_remarks_count_for_nothing() -> None:
    idle = Paced(step_s=1e6, steps=1)
    idle._worked_s = 1000.0  # since its birth
    with pytest.raises(ProveError, match="did nothing"):
        idle.finish(15.0, nothing)
    assert idle.now_s < 16.0


def test_what_is_written_to_the_journal_counts_as_work_but_not_for_ever() -> None:
    told = ev.ReplicaStarted(at_s=0.0, replica="r0.2", agent="a0", pid=1)
    often = Paced(step_s=1e6, steps=1, writes=told)
    often._wrote_s = -25.0  # at 35 s, just before it would be given up
    with pytest.raises(ProveError, match=r"replica_started, 1[01] s old"):
        often.finish(HANG_S, nothing)
    assert 45.0 < often.now_s < 46.0
    crashing = RunWait(HANG_S, 0.0, -1, [ONE], read=lambda running: (0.0, 0.0))
    given_up = next(now_s for now_s in range(1000) if crashing.look(float(now_s), [told], [ONE]))
    assert given_up == 4 * HANG_S + 1


def test_processes_that_end_between_two_looks_had_worked() -> None:
    """As many ranks come to their end on a busy machine: who is gone is no longer there to be counted."""
    ranks = [Running(pid=2 + number, name=f"r{number}.1", born="7") for number in range(6)]
    wait = RunWait(HANG_S, 0.0, 9, ranks, read=lambda running: (0.0, 0.0))
    leaving = (wait.look(float(now_s), [], ranks[now_s // 11 :]) for now_s in range(1000))
    assert next(now_s for now_s, said in enumerate(leaving) if said) > 60, "the last one went at 66 s"


def test_a_wait_that_steps_do_not_renew_ends_however_many_there_are() -> None:
    endless = Paced(step_s=1.0, steps=100_000, works=lambda now_s: 1.0)
    with pytest.raises(ProveError, match="it was awaited for 160 s, the newest is 159"):
        endless.until("what never comes", lambda: False, HANG_S, nothing, renewed=False)
    assert endless.now_s < 4 * HANG_S + 1.0


def test_agents_that_others_started_are_seen_as_the_runs(tmp_path: Path) -> None:
    """Of a run on several hosts: the processes of an agent that the run's own launcher did not start."""
    logs = tmp_path / "logs"
    logs.mkdir()
    rank = "import sys; sys.stdin.read()"
    agent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {rank!r}], stdout=open(sys.argv[1], 'w'))"
    command = [sys.executable, "-c", agent, str(logs / "r1.1.log")]
    other = subprocess.Popen(command, stdin=subprocess.PIPE)
    run = Paced(step_s=1.0, steps=1)
    run.process, run.other_agents = subprocess.Popen(["true"]), {}
    run.process.wait()
    try:
        assert list(Driven.alive(run)) == []
        run.other_agents = {1: other}
        seen: list[str] = []
        while "r1.1" not in seen:
            assert other.poll() is None
            seen = [running.name for running in Driven.alive(run)]
    finally:
        other.communicate()


@pytest.mark.parametrize(("gone", "trains"), [((), True), (("r1.1",), False)], ids=["another trains", "it is alone"])
def test_the_demo_takes_no_host_that_alone_has_the_state(gone: tuple[str, ...], trains: bool) -> None:
    """On a busy machine the host that lost its power has no member yet when the next one is cut off."""
    run = Paced(step_s=1.0, steps=1)
    agents = [ev.AgentStarted(at_s=0.0, agent=f"a{host}", pid=1, host=f"h{host}") for host in (0, 1)]
    started = [ev.ReplicaStarted(at_s=1.0, replica=f"r{n}.1", agent=f"a{n}", pid=2 + n) for n in (0, 1)]
    view = ev.ViewInstalled(at_s=2.0, epoch=1, n=1, members=["r0.1", "r1.1"], cause="start", planned=False)
    lost = [ev.AgentLost(at_s=3.0, agent="a1", cause="silent", replicas=list(gone))] if gone else []
    run.events = [*agents, *started, view, *lost]
    struck = demo_hosts._Struck(cast(HostNetwork, None), run, {}, "", Path(), nothing)
    assert struck.others_train() is trains
