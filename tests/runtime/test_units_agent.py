"""The agent, in this process: its whole loop on a host that is not there, with a coordinator that a test speaks for."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.virtual_host import Calls, Puppet, VirtualHost

from outlast.config import RunConfig, encoded
from outlast.core.phases import Phase
from outlast.core.protocol import StepTime
from outlast.core.protocol import host_messages as hm
from outlast.core.protocol import messages as m
from outlast.runtime.host._host_system import HERE
from outlast.runtime.host.agent import Agent
from outlast.runtime.transport.frames import Heartbeat, HeartbeatReply
from outlast.runtime.transport.progress_block import Progress
from outlast.runtime.transport.regions import Region


class Alone:
    """An agent whose ranks are puppets. `ranks`: those that were started; `live` is told of each as it is born;
    `answers`: the coordinator answers heartbeats; `refused`: starts that fail from this one on."""

    def __init__(self, folder: Path, live: Callable[[Alone, Puppet], Any] = lambda *_: None, **config: Any) -> None:
        self.host, self.calls, self.answers = VirtualHost(self._born), Calls(self._hear), True
        self.ranks, self.blocks, self.refused = list[Puppet](), dict[int, Progress](), 1 << 30
        self._live, hosts = live, config.pop("hosts", {})
        (folder / "logs").mkdir()
        self._environ = {
            "OUTLAST_COORDINATOR": "localhost:1", "OUTLAST_SECRET": "00", "OUTLAST_RUN_DIR": str(folder),
            "OUTLAST_CONFIG": encoded(RunConfig(preload=False, readings_s=0.0, **config)), "OUTLAST_RUN": "x", **hosts,
        }  # fmt: skip
        self.agent = Agent("a0", self._environ, ["python", "train.py"], system=self.host, dial=self.calls.dial)
        self._until = ""

    def _born(self, child: Puppet) -> None:
        if len(self.ranks) + 1 >= self.refused:
            raise OSError("no process to be had")
        self.ranks.append(child)
        self.blocks[child.pid] = Progress(
            Region(Progress.SIZE, fd=os.dup(child.passed("OUTLAST_PROGRESS_FD"))), self.host.now_ns
        )
        self._live(self, child)

    def _hear(self, message: Any) -> None:
        if isinstance(message, Heartbeat) and self.answers:
            self.host.after(0.01, lambda: self.say(HeartbeatReply(epoch=0, sent_s=message.sent_s)))

    def say(self, *messages: Any) -> None:
        for message in messages:
            self.calls.say(message)

    def at(self, delay_s: float, *messages: Any) -> None:
        self.host.after(delay_s, lambda: self.say(*messages))

    def trains(self, child: Puppet, steps: int = 3, phase: Phase = Phase.BODY) -> None:
        """It has joined, committed steps, and is in a phase now."""
        for step in range(steps):
            self.blocks[child.pid].commit(StepTime(step=step, end_s=self.host.now_s(), took_s=0.1))
        self.blocks[child.pid].enter(phase, step=steps)

    def goes(self, for_s: float, reason: str = "terminated") -> int:
        """Until the run stops, after so many seconds."""
        self.at(for_s, m.Stop(reason=reason))
        return self.agent.run()

    def exits(self) -> dict[str, tuple[str, str]]:
        return {said.member: (said.cause, said.detail.partition(";")[0]) for said in self.calls.all(m.Exited)}


def spawn(member: str = "r0.1", after_s: float = 0.0, **said: Any) -> m.Spawn:
    return m.Spawn(member=member, after_s=after_s, **said)


def test_a_rank_is_started_after_its_delay_and_once(tmp_path: Path) -> None:
    born: list[float] = []
    alone = Alone(tmp_path, lambda self, child: born.append(self.host.passed_s))
    alone.at(1.0, spawn(after_s=2.0), spawn(after_s=0.5))
    alone.at(5.0, spawn())
    assert alone.goes(6.0) == 1
    assert born == [pytest.approx(3.0)]
    [child] = alone.ranks
    assert (child.command, child.environ["OUTLAST_MEMBER"], child.environ["OUTLAST_DEVICE"]) == (
        ["python", "train.py"], "r0.1", "0",
    )  # fmt: skip
    assert alone.calls.all(m.Spawned) == [m.Spawned(member="r0.1", agent="a0", pid=child.pid)]


@pytest.mark.parametrize(
    ("how", "phase", "cause", "detail"),
    [
        ({"by": signal.SIGSEGV}, Phase.BACKWARD, "signal", "SIGSEGV"),
        ({"code": 1}, Phase.BACKWARD, "exception", "exit code 1"),
        ({"code": 0}, None, "exit", "exit code 0, and steps() of outlast.join().protect(...) was never begun"),
        ({"code": 0}, Phase.IDLE, "finished", "exit code 0"),
        ({"code": 0}, Phase.DEPART, "left", "exit code 0"),
    ],
)
def test_how_a_rank_has_ended_is_told_with_what_it_had_committed(
    tmp_path: Path, how: dict[str, int], phase: Phase | None, cause: str, detail: str
) -> None:
    def live(self: Alone, child: Puppet) -> None:
        if phase is not None:
            self.host.after(1.0, lambda: self.trains(child, 3, phase))
        self.host.after(2.0, lambda: child.end(**how))

    alone = Alone(tmp_path, live)
    alone.at(0.5, spawn())
    alone.at(3.0, spawn())  # by a coordinator that has not heard of it
    alone.goes(4.0)
    first, again = alone.calls.all(m.Exited)
    assert (first.cause, first.detail.partition(";")[0], first.joined) == (cause, detail, phase is not None)
    assert first.committed == (3 if phase is not None else 0)
    assert first.noticed_at_s == pytest.approx(alone.host.now_s() - 1.5, abs=0.1)
    assert again == first, "the same incarnation never starts twice"
    assert len(alone.ranks) == 1


def test_who_is_struck_while_its_script_is_silent_lived_until_then(tmp_path: Path) -> None:
    def live(self: Alone, child: Puppet) -> None:
        self.trains(child)
        self.host.after(30.0, lambda: child.end(by=signal.SIGKILL))

    alone = Alone(tmp_path, live)
    alone.at(0.5, spawn())
    alone.goes(32.0)
    [said] = alone.calls.all(m.Exited)
    assert 0.0 <= said.noticed_at_s - said.last_alive_s < 0.2


def test_who_is_evicted_is_killed_and_one_that_is_not_there_yet_never_comes(tmp_path: Path) -> None:
    alone = Alone(tmp_path)
    alone.at(0.5, spawn("r0.1"), spawn("r1.1", after_s=60.0))
    alone.at(1.0, m.Kill(member="r0.1", reason="it lied"), m.Kill(member="r1.1", reason="too many"))
    alone.goes(70.0)
    assert [child.sent for child in alone.ranks] == [[signal.SIGKILL]]
    assert alone.exits() == {"r0.1": ("evicted", "it lied"), "r1.1": ("evicted", "too many")}


def test_the_ranks_of_a_replica_end_together_and_the_first_says_why(tmp_path: Path) -> None:
    def live(self: Alone, child: Puppet) -> None:
        if len(self.ranks) == 2:
            self.host.after(2.0, lambda: child.end(by=signal.SIGSEGV))

    alone = Alone(tmp_path, live, ranks=3, replicas=1)
    alone.at(0.5, spawn())
    alone.goes(4.0)
    assert [child.environ["OUTLAST_PLACE"] for child in alone.ranks] == ["0", "1", "2"]
    assert [child.sent for child in alone.ranks] == [[signal.SIGKILL], [], [signal.SIGKILL]]
    assert alone.exits() == {"r0.1": ("signal", "SIGSEGV of rank 1")}


@pytest.mark.parametrize("place", [0, 1])
def test_a_rank_that_ends_well_before_it_trains_takes_its_replica(tmp_path: Path, place: int) -> None:
    """The others would wait for it until `start_s` is over."""

    def live(self: Alone, child: Puppet) -> None:
        if len(self.ranks) == place + 1:
            self.host.after(2.0, lambda: child.end(code=0))
        else:
            self.host.after(1.0, lambda: self.trains(child, 0, Phase.IDLE))

    alone = Alone(tmp_path, live, ranks=2, replicas=1)
    alone.at(0.5, spawn())
    alone.goes(4.0)
    assert [child.sent for child in alone.ranks][1 - place] == [signal.SIGKILL]
    [said] = alone.calls.all(m.Exited)
    assert (said.cause, said.code, said.joined) == ("exit", 0, False)
    assert "was never begun" in said.detail


@pytest.mark.parametrize("lead_s", [1.0, 3.0])
@pytest.mark.parametrize(
    ("phase", "told"),
    [(Phase.BODY, ("exit", "exit code 0 of rank 1 while the others trained on")),
     (Phase.IDLE, ("exception", "exit code 4"))],
)  # fmt: skip
def test_a_rank_that_ends_well_amid_its_training_is_why_the_others_end(
    tmp_path: Path, phase: Phase, told: tuple[str, str], lead_s: float
) -> None:
    """Not where its lead had told it that training is over, and then ended by itself."""

    def live(self: Alone, child: Puppet) -> None:
        self.trains(child, phase=phase)
        first = len(self.ranks) == 1
        self.host.after(lead_s if first else 2.0, lambda: child.end(code=4 if first else 0))

    alone = Alone(tmp_path, live, ranks=2, replicas=1)
    alone.at(0.5, spawn())
    alone.goes(5.0)
    assert alone.exits() == {"r0.1": told}


@pytest.mark.parametrize(("ranks", "detail"), [(1, "SIGSEGV"), (2, "SIGSEGV of rank 1")])
def test_who_crashed_before_it_was_put_out_is_told_to_have_crashed(tmp_path: Path, ranks: int, detail: str) -> None:
    """Its peers see its connections end while the kernel still writes what is left of it, and have it put out."""

    def live(self: Alone, child: Puppet) -> None:
        self.trains(child)
        child.obeys = set() if len(self.ranks) == ranks else child.obeys
        if len(self.ranks) == ranks:
            self.host.after(2.0, lambda: child.end(by=signal.SIGSEGV))

    alone = Alone(tmp_path, live, ranks=ranks, replicas=1)
    alone.at(0.5, spawn())
    alone.at(1.0, m.Kill(member="r0.1", reason="its connection to a peer ended though both live"))
    alone.goes(4.0)
    assert alone.exits() == {"r0.1": ("signal", detail)}


def test_one_whose_end_is_anothers_doing_gives_the_others_time_to_say_why(tmp_path: Path) -> None:
    gone: list[float] = []

    def live(self: Alone, child: Puppet) -> None:
        if len(self.ranks) == 1:
            self.host.after(2.0, lambda: child.end(code=4))
        else:
            self.host.after(5.0, lambda: (gone.append(self.host.passed_s), child.end(code=1)))

    alone = Alone(tmp_path, live, ranks=2, replicas=1)
    alone.at(0.5, spawn())
    alone.goes(9.0)
    assert [child.sent for child in alone.ranks] == [[], []]
    assert alone.exits() == {"r0.1": ("exception", "exit code 1")}
    assert len(gone) == 1


def test_a_replica_of_which_one_rank_cannot_be_started_has_none(tmp_path: Path) -> None:
    alone = Alone(tmp_path, ranks=3, replicas=1)
    alone.refused = 3
    alone.at(0.5, spawn())
    alone.goes(2.0)
    assert [child.sent for child in alone.ranks] == [[signal.SIGKILL]] * 2
    assert alone.calls.all(m.SpawnFailed) == [m.SpawnFailed(member="r0.1", error="no process to be had")]
    assert alone.agent.ranks == {}


# --- silence ----------------------------------------------------------------------------------------------------------
def examined(alone: Alone) -> list[tuple[str, bool, bool]]:
    return [(said.state, said.cpu_advanced, said.deaf) for said in alone.calls.all(m.Examined)]


@pytest.mark.parametrize(
    ("state", "used_s", "told"),
    [("S", 0.0, ("S", False)), ("S", 0.1, ("S", True)), ("R", 0.0, ("R", True)), ("T", 0.0, ("T", False))],
)
def test_what_is_said_of_a_suspect(tmp_path: Path, state: str, used_s: float, told: tuple[str, bool]) -> None:
    def live(self: Alone, child: Puppet) -> None:
        self.host.states[child.pid] = state
        self.host.after(1.0, lambda: self.trains(child))
        self.host.after(2.05, lambda: self.host.used_s.update({child.pid: used_s}))

    alone = Alone(tmp_path, live)
    alone.at(0.5, spawn())
    alone.at(2.5, m.Examine(member="r0.1"), m.Examine(member="r7.1"))
    alone.goes(4.0)
    [absent, said] = sorted(alone.calls.all(m.Examined)[:2], key=lambda each: each.state != "X")
    assert (absent.member, absent.state) == ("r7.1", "X")
    assert (said.state, said.cpu_advanced, Phase(said.phase)) == (*told, Phase.BODY)
    assert said.silent_s == pytest.approx(1.0 if state == "T" else 1.15, abs=0.06)


def test_a_silence_is_told_of_the_rank_that_it_is_laid_to(tmp_path: Path) -> None:
    def live(self: Alone, child: Puppet) -> None:
        self.trains(child)
        self.host.states[child.pid] = "T" if len(self.ranks) == 2 else "S"

    alone = Alone(tmp_path, live, ranks=2, replicas=1)
    alone.at(0.5, spawn())
    alone.at(1.0, m.Examine(member="r0.1"))
    alone.goes(2.0)
    assert {(said.state, said.place) for said in alone.calls.all(m.Examined)} == {("T", 1)}


def test_it_is_told_of_a_rank_that_waits_to_be_connected_and_has_no_descriptor(tmp_path: Path) -> None:
    def live(self: Alone, child: Puppet) -> None:
        self.trains(child, phase=Phase.CONNECT if len(self.ranks) == 2 else Phase.BACKWARD)
        self.host.full |= {child.pid}

    alone = Alone(tmp_path, live, ranks=2, replicas=1)
    alone.at(0.5, spawn())
    alone.at(1.0, m.Examine(member="r0.1"))
    alone.goes(2.0)
    assert {(said.full, said.place) for said in alone.calls.all(m.Examined)} == {(True, 1)}


@pytest.mark.parametrize(("joined_s", "least_s"), [(None, 20.0), (10.0, 30.0)])
def test_who_is_silent_before_protect_is_examined_unasked(
    tmp_path: Path, joined_s: float | None, least_s: float
) -> None:
    """An import that hangs, or a model that is never made: the start is the first sign of life, `join` the second."""

    def live(self: Alone, child: Puppet) -> None:
        if joined_s is not None:
            self.host.after(joined_s, self.blocks[child.pid].alive)

    alone = Alone(tmp_path, live, outside_s=20.0, heartbeat_s=1.0)
    alone.at(0.5, spawn())
    alone.goes(least_s + 4.0)
    told = alone.calls.all(m.Examined)
    assert {Phase(said.phase) for said in told} == {Phase.IDLE}
    assert [said.silent_s for said in told[:1]] == [pytest.approx(21.0, abs=1.1)]


def test_who_is_silent_in_a_view_of_one_is_examined_unasked(tmp_path: Path) -> None:
    """Nobody else would notice."""
    alone = Alone(tmp_path, lambda self, child: self.trains(child), outside_s=20.0, heartbeat_s=1.0)
    alone.at(0.5, spawn())
    alone.goes(24.0)
    assert examined(alone)
    assert min(said.silent_s for said in alone.calls.all(m.Examined)) > 20.0


def test_a_stopped_rank_is_continued_once_and_then_the_coordinator_says_what_follows(tmp_path: Path) -> None:
    def live(self: Alone, child: Puppet) -> None:
        self.trains(child, phase=Phase.IDLE)
        for delay_s in (10.0, 30.0):
            self.host.after(delay_s, lambda: self.host.states.update({child.pid: "T"}))
        for delay_s in (18.0, 40.0):
            self.host.after(delay_s, lambda: self.host.states.pop(child.pid))

    alone = Alone(tmp_path, live)
    alone.at(0.5, spawn())
    alone.at(39.5, m.Continue(member="r0.1"), m.Continue(member="r9.1"))
    alone.goes(41.0, "finished")
    alone.ranks[0].end(0)
    [said] = alone.calls.all(m.Continued)
    assert said.for_s == pytest.approx(5.0, abs=1.1)
    assert alone.ranks[0].sent[:2] == [signal.SIGCONT, signal.SIGCONT]
    assert set(examined(alone)) == {("T", False, False)}


@pytest.mark.parametrize(("used_s", "told_s"), [(3.0, 10.0), (0.5, 40.0)])
def test_who_has_not_joined_in_time_is_told_of(tmp_path: Path, used_s: float, told_s: float) -> None:
    """Sooner if it works: who has hardly had a processor may not have come so far, or wait for something for ever."""
    alone = Alone(tmp_path, formation_s=10.0)
    alone.at(0.5, spawn())
    alone.host.after(1.0, lambda: alone.host.used_s.update({child.pid: used_s for child in alone.ranks}))
    alone.host.after(told_s, lambda: seen.extend(alone.calls.all(m.Unjoined)))
    seen = list[m.Unjoined]()
    alone.goes(told_s + 2.0)
    assert seen == []
    assert alone.calls.all(m.Unjoined) == [m.Unjoined(member="r0.1", for_s=told_s)]


# --- the connection ---------------------------------------------------------------------------------------------------
def test_after_each_end_of_its_connection_the_coordinator_is_told_everything_again(tmp_path: Path) -> None:
    def live(self: Alone, child: Puppet) -> None:
        if len(self.ranks) == 1:
            self.host.after(1.0, lambda: child.end(by=signal.SIGKILL))

    alone = Alone(tmp_path, live)
    alone.at(0.5, spawn("r0.1"), spawn("r1.1"), spawn("r2.1", after_s=60.0))
    alone.host.after(3.0, alone.calls.hang_up)
    alone.goes(5.0)
    first, second = alone.calls.heard
    hello = [next(said for said in each if isinstance(said, m.AgentHello)) for each in (first, second)]
    assert [(said.members, said.number) for said in hello] == [((), 1), (("r1.1", "r2.1"), 2)]
    assert [type(said) for said in second[:3]] == [m.Exited, m.AgentHello, m.Spawned]
    assert second[0] in first


def test_a_coordinator_that_answers_no_more_is_called_again_and_later_each_time(tmp_path: Path) -> None:
    alone = Alone(tmp_path, heartbeat_s=0.5)
    tried: list[float] = []
    whole = alone.calls.dial

    def dial(*told: Any) -> Any:
        tried.append(alone.host.passed_s)
        return whole(*told)

    alone.agent.line._dial = dial
    alone.host.after(2.0, lambda: setattr(alone, "answers", False))
    alone.host.after(3.0, lambda: setattr(alone.calls, "deaf", True))
    alone.host.after(20.0, lambda: (setattr(alone.calls, "deaf", False), setattr(alone, "answers", True)))
    alone.goes(25.0)
    assert tried[:2] == pytest.approx([0.0, 7.0], abs=0.1)
    pauses = [round(after - before, 6) for before, after in itertools.pairwise(tried[1:])]
    assert pauses == sorted(pauses)
    assert pauses[-1] == pytest.approx(0.5)
    assert len(alone.calls.heard) == 2


def test_an_order_of_a_coordinator_that_was_followed_is_not_obeyed(tmp_path: Path) -> None:
    alone = Alone(tmp_path)
    alone.answers = False
    alone.at(0.5, m.Spawn(member="r0.1", after_s=0.0, epoch=3), m.Spawn(member="r1.1", after_s=0.0, epoch=2))
    alone.at(1.0, m.Stop(reason="terminated", epoch=3))
    alone.goes(60.0)
    assert [child.environ["OUTLAST_MEMBER"] for child in alone.ranks] == ["r0.1"]


# --- the end ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("obeys", [True, False])
def test_a_run_that_is_stopped_has_its_ranks_ended_in_order(tmp_path: Path, obeys: bool) -> None:
    def live(self: Alone, child: Puppet) -> None:
        self.trains(child)
        child.obeys = {signal.SIGKILL} | ({signal.SIGTERM} if obeys else set())

    alone = Alone(tmp_path, live)
    alone.at(0.5, spawn())
    assert alone.goes(5.0) == 1
    [child] = alone.ranks
    assert child.sent == [signal.SIGCONT, signal.SIGTERM, *([] if obeys else [signal.SIGKILL])]
    assert alone.host.passed_s == pytest.approx(5.0 if obeys else 8.0, abs=0.1)
    assert child.swept, "nothing of it is left"


def test_after_a_good_end_a_script_takes_its_time_and_only_who_trains_or_starts_is_ended(tmp_path: Path) -> None:
    def live(self: Alone, child: Puppet) -> None:
        member = child.environ["OUTLAST_MEMBER"]
        if member != "r2.1":
            self.trains(child, phase=Phase.IDLE if member == "r0.1" else Phase.BODY)
        if member == "r0.1":
            self.blocks[child.pid].enter(Phase.IDLE)  # it has left its training
            self.host.after(200.0, lambda: child.end(0))

    alone = Alone(tmp_path, live, formation_s=30.0)
    alone.at(0.5, spawn("r0.1"), spawn("r1.1"), spawn("r2.1"))
    assert alone.goes(5.0, "finished") == 0
    assert [child.sent for child in alone.ranks] == [[], [signal.SIGKILL], [signal.SIGKILL]]
    assert alone.exits()["r0.1"] == ("finished", "exit code 0")
    assert alone.exits()["r2.1"] == ("evicted", "it was still starting when the run finished")
    assert alone.host.passed_s == pytest.approx(200.5, abs=0.1)
    assert not alone.ranks[0].swept, "what a script leaves running after a good end is its own"


@pytest.mark.parametrize("hears", [True, False])
def test_after_a_good_end_who_was_stopped_in_its_step_is_woken_to_hear_of_it(tmp_path: Path, hears: bool) -> None:
    def live(self: Alone, child: Puppet) -> None:
        self.trains(child)
        self.host.states[child.pid] = "T"
        self.host.after(10.0, lambda: child.end(0) if hears else None)

    alone = Alone(tmp_path, live, formation_s=30.0)
    alone.at(0.5, spawn())
    assert alone.goes(5.0, "finished") == 0
    # continued once while the run goes on, as all are, and once more after its end
    assert alone.ranks[0].sent == [signal.SIGCONT] * 2 + [signal.SIGKILL] * (not hears)


def test_its_launchers_word_ends_it_though_the_coordinator_is_gone(tmp_path: Path) -> None:
    alone = Alone(tmp_path, lambda self, child: child.obeys.add(signal.SIGTERM))
    alone.at(0.5, spawn())
    alone.host.after(3.0, lambda: (setattr(alone.calls, "deaf", True), alone.calls.hang_up()))
    alone.host.after(4.0, lambda: alone.agent.ask("stopped"))
    assert alone.agent.run() == 143
    assert alone.ranks[0].sent == [signal.SIGCONT, signal.SIGTERM]


HOST = {"OUTLAST_ADDRESS": "10.0.0.2", "OUTLAST_HOST": "h1", "OUTLAST_HOST_SLOTS": "2"}


def test_a_host_without_a_word_of_the_coordinator_ends_its_replicas_with_their_lease_and_then_itself(
    tmp_path: Path,
) -> None:
    def live(self: Alone, child: Puppet) -> None:
        self.trains(child)
        self.host.after(10.0, lambda: setattr(self, "answers", False))

    alone = Alone(tmp_path, live, hosts=HOST, endpoint="10.0.0.1:1", nnodes="2", lease_s=20.0, start_s=30.0)
    alone.at(0.5, spawn())
    assert alone.agent.run() == 3
    said, *again = alone.calls.all(m.Exited)
    assert all(each == said for each in again), "in vain, on each new connection"
    assert said.cause == "evicted"
    assert said.detail.startswith("no word of the coordinator for 20 s")
    assert said.noticed_at_s == pytest.approx(alone.host.now_s() - 30.0, abs=0.6)
    assert alone.host.passed_s == pytest.approx(60.5, abs=0.6)


@pytest.mark.parametrize(("stopped_s", "within_s"), [(0.0, (59.5, 64.0)), (500.0, (502.0, 520.0))])
def test_an_agent_that_waits_for_connections_in_vain_is_no_longer_excused_than_its_lease(
    tmp_path: Path, stopped_s: float, within_s: tuple[float, float]
) -> None:
    """Each try may take as long as a pause that counts as absence. Who was stopped in one has been absent."""
    alone = Alone(tmp_path, lambda self, child: self.trains(child), hosts=HOST, endpoint="10.0.0.1:1", nnodes="2",
                  lease_s=60.0, start_s=600.0)  # fmt: skip
    tries, whole = [0], alone.calls.dial

    def dial(*told: Any) -> Any:
        tries[0] += 1
        if tries[0] > 1:
            alone.host.pass_s(2.0 + (stopped_s if tries[0] == 3 else 0.0))
            raise TimeoutError("nobody answers")
        return whole(*told)

    alone.agent.line._dial = dial
    alone.at(0.5, spawn())
    alone.host.after(10.0, lambda: (setattr(alone, "answers", False), alone.calls.hang_up()))
    began_s = alone.host.now_s()
    assert alone.agent.run() == 3
    [said] = alone.agent.exits.values()
    assert said.cause == "evicted"
    assert within_s[0] <= said.noticed_at_s - began_s - 10.0 <= within_s[1]


def test_an_agent_whose_calls_are_slow_and_succeed_is_excused_no_more_than_its_lease(tmp_path: Path) -> None:
    """Each connection takes as long as a pause that counts as absence, and ends before it is answered."""
    alone = Alone(tmp_path, lambda self, child: self.trains(child), hosts=HOST, endpoint="10.0.0.1:1", nnodes="2",
                  lease_s=20.0, start_s=600.0)  # fmt: skip
    whole = alone.calls.dial

    def dial(*told: Any) -> Any:
        if alone.ranks:
            alone.host.pass_s(1.5)
            alone.host.after(0.3, alone.calls.hang_up)
        return whole(*told)

    alone.agent.line._dial = dial
    alone.at(0.5, spawn())
    alone.host.after(10.0, lambda: (setattr(alone, "answers", False), alone.calls.hang_up()))
    began_s = alone.host.now_s()
    alone.host.after(100.0, lambda: alone.agent.ask("stopped"))
    assert alone.agent.run() == 143
    [said] = alone.agent.exits.values()
    assert said.cause == "evicted"
    assert 19.5 <= said.noticed_at_s - began_s - 10.0 <= 24.0


@pytest.mark.parametrize("code", [0, 10])
def test_an_agent_that_is_told_of_the_end_ends_with_the_run_s_code(tmp_path: Path, code: int) -> None:
    alone = Alone(tmp_path, lambda self, child: self.trains(child))
    alone.at(0.5, spawn())
    alone.at(3.0, m.Stop(reason="finished", exit_code=code))
    alone.host.after(3.5, lambda: alone.ranks[0].end(0))
    assert alone.agent.run() == code


def test_a_host_that_is_asked_to_leave_offers_nothing_any_more(tmp_path: Path) -> None:
    alone = Alone(tmp_path, hosts=HOST, endpoint="10.0.0.1:1", nnodes="2")
    alone.host.after(3.0, lambda: alone.agent.ask("asked to leave"))
    assert alone.agent.run() == 143
    assert [said.slots for said in alone.calls.all(hm.HostHere)] == [2, -1]


def test_whose_end_is_waited_for_is_no_stranger(tmp_path: Path) -> None:
    alone = Alone(tmp_path, ranks=2, replicas=1)
    alone.at(0.5, spawn())
    alone.at(2.0, m.Kill(member="r0.1", reason=""))
    alone.host.after(1.9, lambda: known.extend(sorted(alone.host.known)))
    known: list[int] = []
    alone.goes(4.0)
    assert set(known) > {child.pid for child in alone.ranks}
    assert not alone.host.known & {child.pid for child in alone.ranks}


def test_strangers_that_have_ended_are_reaped_up_to_one_that_is_waited_for() -> None:
    """In a process of its own: it has no other children."""
    inside = os.fork()
    if inside == 0:
        known, strange = os.fork() or os._exit(0), os.fork() or os._exit(0)
        for pid in (known, strange):
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        HERE.reap_strangers({known})
        both_left = _there(known) + _there(strange)
        os.waitpid(known, 0)
        HERE.reap_strangers({known})
        os._exit(10 * both_left + _there(strange))
    assert os.waitstatus_to_exitcode(os.waitpid(inside, 0)[1]) in (10, 20), "the kernel says which it shows first"


def _there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
