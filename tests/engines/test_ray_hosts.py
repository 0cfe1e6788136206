"""What `train` does about hosts that end, driven with Ray's calls played and a clock that jumps."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.journal.etcd_members import start_members

from outlast.adapters._ray_host import HostActor
from outlast.adapters.ray import RayHosts, _Placed
from outlast.journal import CoordinatorClaim, Journal


class Lost(Exception):
    """Ray's word for an actor that is gone."""


class TaskFailed(Lost):
    cause = "no folder"


class Answer:
    """A reference: done once it has a value."""

    def __init__(self, value: Any = None) -> None:
        self.value = value


class Process:
    """What runs on a node: the words it was started with, and its answer."""

    def __init__(self, node: str, words: list[str], secret: str) -> None:
        self.node, self.words, self.secret, self.answer = node, words, secret, Answer()


class Actor:
    def __init__(self, ray: PlayedRay, node: str) -> None:
        self._ray, self.node = ray, node
        self.where, self.run = SimpleNamespace(remote=self._where), SimpleNamespace(remote=self._run)

    def _where(self) -> Answer:
        return Answer() if self.node in self._ray.busy else Answer((self.node, "h:1"))

    def _run(self, words: list[str], secret: str, _log: str) -> Answer:
        process = Process(self.node, words, secret)
        self._ray.started.append(process)
        process.answer.value = self._ray.behave(process)
        return process.answer


class PlayedRay:
    """Bundle i is on `bundles[i]`. `behave`: how a process ends at once, None if it goes on; `events`: what happens at
    which second."""

    def __init__(self, bundles: list[str], *others: str, behave: Callable[[Process], int | None]) -> None:
        self.bundles, self.there, self.behave = bundles, [*bundles, *others], behave
        self.busy: set[str] = set()
        self.started: list[Process] = []
        self.events: dict[float, Callable[[], object]] = {}
        self.now_s = 0.0
        self._private: Any = None
        self.exceptions = SimpleNamespace(RayError=Lost, RayTaskError=TaskFailed)
        strategies = SimpleNamespace(
            NodeAffinitySchedulingStrategy=lambda node, soft: lambda: node,
            PlacementGroupSchedulingStrategy=lambda _, placement_group_bundle_index: (
                lambda: self.bundles[placement_group_bundle_index]
            ),
        )
        group = SimpleNamespace(wait=lambda _: True)
        self.util = SimpleNamespace(
            scheduling_strategies=strategies, placement_group=lambda *_, **__: group, remove_placement_group=len
        )

    def remote(self, _kind: type) -> Any:
        return SimpleNamespace(
            options=lambda scheduling_strategy, **_: SimpleNamespace(remote=lambda: Actor(self, scheduling_strategy()))
        )

    def nodes(self) -> list[dict[str, Any]]:
        return [{"NodeID": node, "Alive": True, "Resources": {"CPU": 1.0}} for node in self.there]

    def wait(self, asked: list[Answer], timeout: float) -> tuple[list[Answer], list[Answer]]:
        assert asked
        assert self.now_s < 20_000, "it goes on for ever"
        done = [answer for answer in asked if answer.value is not None]
        if not done:
            self.now_s += timeout
            for at_s in [at_s for at_s in self.events if at_s <= self.now_s]:
                self.events.pop(at_s)()
        return done, []

    def get(self, answer: Answer) -> Any:
        if isinstance(answer.value, Exception):
            raise answer.value
        return answer.value

    def kill(self, _actor: Actor) -> None:
        pass

    # --- what tests do to it --------------------------------------------------------------------------------------
    def end(self, node: str, how: int | Exception) -> Callable[[], None]:
        """The newest process there ends, or is lost."""

        def happens() -> None:
            next(one for one in reversed(self.started) if one.node == node).answer.value = how

        return happens

    def on(self, node: str) -> int:
        return sum(process.node == node for process in self.started)

    def firsts(self) -> list[Process]:
        return [process for process in self.started if process.words[0] == "run"]


def placed(ray: PlayedRay, *, most: int = 2, record: str = "sqlite") -> tuple[_Placed, list[str]]:
    said: list[str] = []
    asked = RayHosts(nodes=(len(ray.bundles), max(most, len(ray.bundles))))
    return _Placed(ray, ["train.py"], asked, "runs", record, said.append, lambda: ray.now_s), said


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """What the record says of the run."""
    found: list[int | None] = [None]
    monkeypatch.setattr(_Placed, "_ends", lambda self: list(found) if self._record else [])
    return found


def test_one_agent_does_not_end_the_run_of_the_others(ends: list[int | None]) -> None:
    """The first host's bundle moves to a node without the script, and another's agent breaks: the third trains on."""
    ray = PlayedRay(["a", "b", "c"], behave=lambda process: 3 if process.node == "d" else None)
    run, said = placed(ray, record="etcd://h:1")

    def lost() -> None:
        ray.bundles[0] = "d"
        ray.end("a", Lost())()

    ray.events = {5.0: lost, 30.0: ray.end("b", 1), 500.0: ray.end("c", 0)}
    assert run.run() == 0
    assert ray.now_s >= 500
    assert (ray.on("d"), ray.on("b"), ray.on("c")) == (5, 1, 1)
    assert [text.rpartition(" in ")[2] for text in said if "node d" in text] == ["2 s", "4 s", "8 s", "16 s", said[-1]]
    assert "node d: the host has ended with code 3, and is not started again" in said


def test_the_record_says_how_the_run_has_ended(ends: list[int | None]) -> None:
    ray = PlayedRay(["a", "b", "c"], behave=lambda _: None)
    run, _ = placed(ray, record="etcd://h:1")
    ray.events = {5.0: ray.end("a", Lost()), 30.0: lambda: (ends.__setitem__(0, 5), ray.end("b", 1)())}
    assert run.run() == 5


@pytest.mark.parametrize("code", [0, 10])
def test_an_agent_that_was_told_of_the_end_ends_the_run_also_where_the_record_does_not_say(
    ends: list[int | None], code: int
) -> None:
    """Training is done; with 10 its last steps are in no checkpoint."""
    ray = PlayedRay(["a", "b", "c"], behave=lambda _: None)
    run, said = placed(ray, record="etcd://h:1")
    ray.events = {5.0: ray.end("a", Lost()), 30.0: ray.end("b", code)}
    assert run.run() == code
    assert ray.now_s < 100
    assert not [text for text in said if "not started again" in text]


@pytest.mark.process
def test_a_record_in_etcd_is_asked_with_the_run_s_secret(tmp_path: Path) -> None:
    with start_members(tmp_path / "etcd") as members, Journal.create(tmp_path / "run") as journal:
        run, _ = placed(PlayedRay(["a"], behave=lambda _: None), record=members.record)
        assert run._ends() == []
        shared = journal.sharing(members.access, "0123abcd", bytes.fromhex(run._secret), 30.0)
        mine = CoordinatorClaim(epoch=1, token="t", seat="s", host="a", address="h:1")
        assert shared.take(shared.look(5.0), mine, 5.0)
        assert run._ends() == [None]
        assert shared.end(5, 5.0)
        assert run._ends() == [5]
        members_gone, _ = placed(PlayedRay(["a"], behave=lambda _: None), record="etcd://127.0.0.1:1")
        assert members_gone._ends() is None


def test_a_run_of_which_nobody_is_left_begins_again(ends: list[int | None]) -> None:
    """Under another secret: what the earlier try has left in the record is not the new one's."""
    ray = PlayedRay(["a", "b"], behave=lambda _: None)
    run, said = placed(ray, record="etcd://h:1")

    def both() -> None:
        ray.end("a", Lost())()
        ray.end("b", -9)()

    ray.events = {5.0: ray.end("a", Lost()), 30.0: both, 60.0: ray.end("a", 0)}
    assert run.run() == 0
    assert len({process.secret for process in ray.firsts()}) == len(ray.firsts()) == 2
    assert said[-1] == "the run's last host is lost: the run begins again, from its checkpoints"


def test_a_first_host_that_is_lost_before_it_coordinates_is_not_outlived(ends: list[int | None]) -> None:
    ray = PlayedRay(["a", "b"], behave=lambda _: None)
    run, said = placed(ray, record="etcd://h:1")
    ends.clear()
    ray.events = {5.0: ray.end("a", Lost()), 30.0: ray.end("a", 0)}
    assert run.run() == 0
    assert len(ray.firsts()) == 2
    assert said[-1] == "the first host is lost: the run begins again, from its checkpoints"


@pytest.mark.parametrize("code", [0, 1, 2, 4, 5, 6, 7, 10, 143])
def test_what_would_end_alike_is_not_started_again(code: int) -> None:
    ray = PlayedRay(["a", "b"], behave=lambda process: code if process.words[0] == "run" else None)
    run, said = placed(ray)
    assert run.run() == code
    assert len(ray.firsts()) == 1
    assert said == []


def test_a_first_host_s_failures_are_told_as_they_are_and_count_while_they_follow_each_other() -> None:
    ray = PlayedRay(["a"], behave=lambda _: 3)
    run, said = placed(ray)
    assert run.run() == 3
    assert len(ray.firsts()) == 5
    assert set(said) == {"the first host has ended with code 3: the run begins again, from its checkpoints"}

    ray = PlayedRay(["a"], behave=lambda _: None)
    run, said = placed(ray)
    ray.events = {1000.0 * turn: ray.end("a", -9) for turn in range(1, 8)} | {9000.0: ray.end("a", 0)}
    assert run.run() == 0
    assert len(ray.firsts()) == 8
    assert "was killed by signal 9: the run" in said[0]


@pytest.mark.parametrize("beyond", [False, True])
def test_a_node_whose_agent_fails_is_tried_after_pauses_and_then_refused(beyond: bool) -> None:
    """In the placement group, or beyond it."""
    ray = PlayedRay(["a"] if beyond else ["a", "b"], "b", behave=lambda process: 3 if process.node == "b" else None)
    run, said = placed(ray)
    ray.events = {600.0: ray.end("a", 0)}
    assert run.run() == 0
    assert (ray.on("a"), ray.on("b"), len(said)) == (1, 5, 5)
    assert said[-1].endswith("is not started again")


def test_a_node_that_other_jobs_use_keeps_no_other_from_its_host() -> None:
    """Its total has room, and Ray places nothing there: another node gets the host, and this one once it is free."""
    ray = PlayedRay(["a"], "b", behave=lambda _: None)
    run, said = placed(ray, most=2)
    ray.busy = {"b"}
    ray.events = {
        10.0: lambda: ray.there.append("c"),
        400.0: ray.end("c", 1),
        405.0: ray.busy.clear,
        900.0: ray.end("a", 0),
    }
    assert run.run() == 0
    assert (ray.on("b"), ray.on("c")) == (1, 1)
    assert [text for text in said if "no room" in text] == said[:1]


def test_a_node_that_is_known_to_be_used_up_is_not_asked_before_it_is_free() -> None:
    ray = PlayedRay(["a"], "b", "c", behave=lambda _: None)
    run, said = placed(ray, most=3)
    free = {"b": {"CPU": 0.5}, "c": {"CPU": 1.0}}
    ray._private = SimpleNamespace(state=SimpleNamespace(available_resources_per_node=lambda: free))
    ray.events = {
        10.0: lambda: begun.extend(process.node for process in ray.started),
        20.0: lambda: free.update(b={"CPU": 1.0}),
        30.0: ray.end("a", 0),
    }
    begun: list[str] = []
    assert run.run() == 0
    assert begun == ["a", "c"]
    assert [process.node for process in ray.started] == ["a", "c", "b"]
    assert said == []


def test_what_is_free_is_not_asked_in_vain_and_no_answer_ends_nothing() -> None:
    """Through Ray Client it is never answered; while there are as many hosts as may be nobody asks."""
    asked: list[float] = []

    def in_a_client() -> dict[str, dict[str, float]]:
        asked.append(ray.now_s)
        raise Lost("Ray has not been started yet")

    for most, others in ((2, []), (3, ["c"])):
        ray = PlayedRay(["a", "b"], *others, behave=lambda _: None)
        ray._private = SimpleNamespace(state=SimpleNamespace(available_resources_per_node=in_a_client))
        run, said = placed(ray, most=most)
        ray.events = {30.0: ray.end("a", 0)}
        assert run.run() == 0
        assert [process.node for process in ray.started] == ["a", "b", *others]
        assert said == []
        assert bool([at_s for at_s in asked if at_s < 30.0]) == bool(others)


def test_who_is_asked_before_its_process_is_there_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = HostActor()
    asked.ask()
    assert asked.run(["agent"], "00", str(tmp_path / "none.log")) == 143
    assert list(tmp_path.iterdir()) == []

    actor, begin = HostActor(), subprocess.Popen

    def slowly(_command: list[str], **how: Any) -> subprocess.Popen[bytes]:
        actor.ask()
        return begin([sys.executable, "-c", "import signal; signal.pause()"], **how)

    monkeypatch.setattr(subprocess, "Popen", slowly)
    assert actor.run(["run"], "00", str(tmp_path / "log")) == -signal.SIGTERM


@pytest.mark.parametrize("how", [Lost, KeyboardInterrupt])
def test_hosts_end_also_where_their_own_end_cannot_be_waited_for(how: type[BaseException]) -> None:
    ray = PlayedRay(["n0", "n1"], behave=lambda _: None)
    hosts, _ = placed(ray)
    ray.events[2.0] = ray.end("n0", 0)
    assert hosts.run() == 0
    ended = list[str]()

    def fails(*_: Any, **__: Any) -> Any:
        raise how

    ray.wait = fails  # type: ignore[method-assign]
    ray.kill = lambda actor: ended.append(actor.node)  # type: ignore[method-assign]
    ray.util.remove_placement_group = lambda _: ended.append("the group")
    with contextlib.suppress(KeyboardInterrupt):
        hosts.end()
    assert ended == ["n1", "the group"]
