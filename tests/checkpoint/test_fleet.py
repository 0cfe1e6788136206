"""Engines and the commit machine together: view changes, evicted writers, restarted coordinators, killed processes."""

from __future__ import annotations

import os
import pathlib
import random
import signal
import subprocess
import sys
from typing import Any

import pytest
import torch

from outlast.checkpoint import CheckpointEngine, Hold, LocalStore, MemoryStore, Retention, certify, verify
from outlast.core.protocol.saves.commit import (
    Abandon,
    Announce,
    Certified,
    Certify,
    CommitEvent,
    CommitState,
    OrderSave,
    PartReport,
    Publish,
    Published,
    PublishFailed,
    Refuse,
    SaveId,
    SaveWanted,
    StepStable,
    ViewChanged,
    WriterDurable,
    WriterFailed,
    commit_step,
)
from outlast.errors import OutlastError


def state(step: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(step)
    return {"w": torch.randn(300, 40, generator=generator), "frozen": torch.arange(3000), "step": step}


class Fleet:
    """A coordinator and its writers in one process. Reports are delivered when the test says so."""

    def __init__(self, path: pathlib.Path, num: int) -> None:
        self.path, self.view, self.log = path, (1, 1), list[Any]()
        self.engines = {r: self._engine(r, num) for r in range(num)}
        self.commit = CommitState()
        self.mail: dict[tuple[SaveId, int], PartReport] = {}
        self.send(ViewChanged(view=self.view, writers=tuple(range(num))))

    def _engine(self, replica: int, num: int) -> CheckpointEngine:
        return CheckpointEngine(
            str(self.path), replica=replica, num_replicas=num, run="r", retention=Retention(keep_last=2)
        )

    def send(self, *events: CommitEvent) -> None:
        for event in events:
            self.commit, actions = commit_step(self.commit, event)
            self.log += actions
            for action in actions:
                self.carry_out(action)

    def carry_out(self, action: Any) -> None:
        if isinstance(action, OrderSave):
            for replica, engine in self.engines.items():
                handle = engine.save(action.save.step, state(action.save.step), view=action.save.view)
                assert handle is not None
                self.mail[action.save, replica] = handle.durable.result(10)
        elif isinstance(action, Publish):
            try:
                generation = self.engines[min(self.engines)].publish(
                    action.save, action.reports, certified=action.certified
                )
            except (OutlastError, OSError) as error:
                self.send(PublishFailed(save=action.save, reason=str(error)))
                return
            self.send(Published(save=action.save, generation=generation))
        elif isinstance(action, Announce | Abandon):
            generation = action.generation if isinstance(action, Announce) else None
            for engine in self.engines.values():
                engine.settle(action.save, generation)
            self.engines[min(self.engines)].prune(protected=self.commit.protected)
        elif isinstance(action, Certify):
            certify(self.engines[min(self.engines)].store, action.generation)

    def deliver(self, *writers: int) -> None:
        """Hand these writers' reports to the coordinator."""
        for (save, writer), report in list(self.mail.items()):
            if writer in writers:
                del self.mail[save, writer]
                self.send(WriterDurable(save=save, report=report))

    def change_view(self, num: int) -> None:
        self.view = (self.view[0], self.view[1] + 1)
        for replica in [r for r in self.engines if r >= num]:
            self.engines.pop(replica).close()
        for replica in range(num):
            if replica not in self.engines:
                self.engines[replica] = self._engine(replica, num)
            self.engines[replica].set_members(replica, num)
        self.send(ViewChanged(view=self.view, writers=tuple(range(num))))

    def newest(self) -> int:
        engine = CheckpointEngine(str(self.path))
        loaded = engine.load()
        engine.close()
        if loaded is None:
            return -1
        assert loaded.skipped == []
        assert torch.equal(loaded.tree["w"], state(loaded.step)["w"])
        return loaded.step

    def close(self) -> None:
        for engine in self.engines.values():
            engine.close()

    def said(self, kind: type) -> list[Any]:
        return [action for action in self.log if isinstance(action, kind)]


@pytest.fixture
def fleet(tmp_path: pathlib.Path) -> Any:
    made = Fleet(tmp_path, 3)
    yield made
    made.close()


def test_a_fleet_saves_publishes_and_prunes(fleet: Fleet) -> None:
    for step in range(5):
        fleet.send(SaveWanted(step=step), StepStable(step=step))
        fleet.deliver(0, 1)
        assert fleet.newest() == step - 1, "the third writer has not reported"
        fleet.deliver(2)
        assert fleet.newest() == step
    fleet.send(Certified(step=4))
    assert [verify(fleet.engines[0].store, g).problems for g in fleet.engines[0].store.generations()] == [[], []]


def test_a_view_change_in_the_middle_of_a_save(fleet: Fleet) -> None:
    fleet.send(SaveWanted(step=1), StepStable(step=1))
    fleet.deliver(0, 1, 2)
    fleet.send(SaveWanted(step=2), StepStable(step=2))
    fleet.deliver(0, 1)
    fleet.change_view(2)  # writer 2 is gone, its report with it
    assert [a.cause for a in fleet.said(Abandon)] == ["view_changed"]
    assert fleet.newest() == 1
    fleet.send(SaveWanted(step=3), StepStable(step=3))
    fleet.deliver(0, 1)
    assert fleet.newest() == 3


def test_the_report_of_a_replica_that_was_evicted_meanwhile_is_refused(fleet: Fleet) -> None:
    fleet.send(SaveWanted(step=1), StepStable(step=1))
    late = fleet.mail.pop((SaveId(epoch=1, n=1, step=1), 2))
    fleet.deliver(0, 1)
    fleet.change_view(2)
    fleet.send(WriterDurable(save=SaveId(epoch=1, n=1, step=1), report=late))
    assert "is not the live view" in fleet.said(Refuse)[0].reason
    # It goes on writing into the directory, in the view that it believes in. Nobody is harmed by it.
    evicted = CheckpointEngine(str(fleet.path), replica=2, num_replicas=3, run="r")
    stray = evicted.save(2, state(2), view=(1, 1))
    assert stray is not None
    fleet.send(WriterDurable(save=stray.save, report=stray.durable.result(10)))
    assert len(fleet.said(Refuse)) == 2
    evicted.close()
    fleet.send(SaveWanted(step=3), StepStable(step=3))
    fleet.deliver(0, 1)
    assert fleet.newest() == 3


def test_a_save_across_a_coordinator_restart(fleet: Fleet) -> None:
    fleet.send(SaveWanted(step=1), StepStable(step=1))
    kept = {w: r for (_, w), r in fleet.mail.items()}
    fleet.deliver(0)
    # The next coordinator knows the view and nothing else; whoever was not told of an outcome reports again.
    fleet.commit = CommitState()
    fleet.send(ViewChanged(view=fleet.view, writers=(0, 1, 2)), StepStable(step=1))
    save = SaveId(epoch=1, n=1, step=1)
    fleet.send(*(WriterDurable(save=save, report=report) for report in kept.values()))
    assert fleet.newest() == 1
    # It dies after the head was written and before anyone heard of it: publishing again is the same generation.
    fleet.commit = CommitState()
    fleet.send(ViewChanged(view=fleet.view, writers=(0, 1, 2)), StepStable(step=1))
    fleet.send(*(WriterDurable(save=save, report=report) for report in kept.values()))
    assert [a.generation for a in fleet.said(Announce)] == [0, 0]
    assert fleet.engines[0].store.generations() == [0]


def test_a_stopped_and_resumed_coordinator_cannot_publish_over_its_successor(fleet: Fleet) -> None:
    fleet.send(SaveWanted(step=1))
    reports = tuple(fleet.mail[SaveId(epoch=1, n=1, step=1), w] for w in range(3))
    fleet.mail.clear()
    fleet.change_view(3)
    fleet.send(SaveWanted(step=2), StepStable(step=2))
    fleet.deliver(0, 1, 2)
    assert fleet.newest() == 2
    with pytest.raises(OutlastError):
        fleet.engines[0].publish(SaveId(epoch=1, n=1, step=1), reports)
    assert fleet.newest() == 2


def test_two_saves_in_flight_are_published_in_the_order_of_their_steps(fleet: Fleet) -> None:
    fleet.send(SaveWanted(step=1), SaveWanted(step=2))
    fleet.deliver(2, 1, 0)
    assert fleet.newest() == -1, "no step is stable yet"
    fleet.send(StepStable(step=2))
    assert [a.save.step for a in fleet.said(Publish)] == [1, 2]
    assert fleet.newest() == 2


@pytest.mark.parametrize("keep_last", [1, 2])
def test_a_member_saves_against_an_old_base_while_news_of_the_next_generation_is_under_way(
    tmp_path: pathlib.Path, keep_last: int
) -> None:
    """What it refers to is there, or the save is refused with a word: never a generation with holes."""
    policy = Retention(keep_last=keep_last)
    engines = [CheckpointEngine(str(tmp_path), replica=r, num_replicas=2, run="r", retention=policy) for r in range(2)]

    def save(step: int, value: float) -> tuple[SaveId, list[PartReport]]:
        tree = {name: torch.full((2000,), value) for name in "abcd"}
        handles = [engine.save(step, tree, view=(1, 1)) for engine in engines]
        assert None not in handles
        return SaveId(epoch=1, n=1, step=step, attempt=0), [h.durable.result(20) for h in handles if h is not None]

    first, reports = save(1, 1.0)
    assert engines[0].publish(first, reports) == 0
    for engine in engines:
        engine.settle(first, 0)
    second, reports = save(2, 2.0)
    assert engines[0].publish(second, reports) == 1
    engines[0].settle(second, 1)  # the other has not heard of it
    third, reports = save(3, 1.0)
    assert [e.saves.handles[third].base[1] for e in engines] == [1, 0]
    assert [e.saves.handles[third].written_bytes > 0 for e in engines] == [True, False], (
        "the second refers to generation 0"
    )
    engines[0].prune(protected={1})  # all that the coordinator knows of
    engines[1].settle(second, 1)
    if keep_last == 1:
        with pytest.raises(OutlastError, match="is missing"):
            engines[0].publish(third, reports)
    else:
        assert engines[0].publish(third, reports) == 2
    number, value = (2, 2.0) if keep_last == 1 else (3, 1.0)
    for engine in engines:
        engine.settle(third, None if keep_last == 1 else 2)
    for step in (number, 4):
        loaded = CheckpointEngine(str(tmp_path)).load()
        assert loaded is not None
        assert (loaded.step, loaded.skipped) == (step, [])
        assert all(torch.equal(t, torch.full((2000,), value)) for t in loaded.tensors.values())
        if step != 4:
            fourth, reports = save(4, 1.0)
            engines[0].publish(fourth, reports)
            value = 1.0
    for engine in engines:
        engine.close()


def test_a_writer_that_fails_is_told_to_all_and_the_next_save_goes_through(fleet: Fleet) -> None:
    fleet.send(SaveWanted(step=1), StepStable(step=1))
    fleet.deliver(0, 1)
    fleet.send(WriterFailed(save=SaveId(epoch=1, n=1, step=1), writer=2, reason="disk full"))
    assert [a.reason for a in fleet.said(Abandon)] == ["writer 2: disk full"]
    fleet.mail.clear()
    fleet.send(SaveWanted(step=2), StepStable(step=2))
    fleet.deliver(0, 1, 2)
    assert fleet.newest() == 2


@pytest.mark.parametrize("seed", range(12))
def test_any_schedule_of_saves_losses_and_view_changes_leaves_a_whole_newest_generation(
    tmp_path: pathlib.Path, seed: int
) -> None:
    rng, fleet, step, published = random.Random(seed), Fleet(tmp_path, 3), 0, -1
    for _ in range(25):
        what = rng.choice(["step", "save", "deliver", "deliver", "change", "lose", "restart"])
        if what == "step":
            step += 1
            fleet.send(StepStable(step=step - 1))
        elif what == "save":
            fleet.send(SaveWanted(step=step))
        elif what == "deliver":
            fleet.deliver(*rng.sample(range(3), rng.randint(1, 3)))
        elif what == "change":
            fleet.change_view(rng.randint(1, 3))
        elif what == "lose" and fleet.mail:
            fleet.mail.pop(rng.choice(list(fleet.mail)))
        elif what == "restart":
            fleet.commit = CommitState()
            fleet.send(ViewChanged(view=fleet.view, writers=tuple(fleet.engines)), StepStable(step=step - 1))
            for engine in fleet.engines.values():  # members drop what the new coordinator does not know
                for save in list(engine.saves.handles):
                    if not any(s == save for s, _ in fleet.mail):
                        engine.settle(save, None)
        newest = fleet.newest()
        assert newest >= published
        published = newest
    fleet.close()


# Real processes, real signals

TRAINER = """
import os, sys, torch
from outlast.checkpoint import CheckpointEngine, Hold
path, text, pace = sys.argv[1], sys.argv[2], sys.argv[3]
hold = Hold.parse(text) if text else None
engine = CheckpointEngine(path, hold=hold, run="r")
loaded = engine.load()
start = 0 if loaded is None else loaded.step + 1
if loaded is not None:
    assert torch.equal(loaded.tree["w"], torch.full((200_000,), float(loaded.step))), "torn"
    print("resumed", loaded.step, loaded.tier, sorted(loaded.bytes_read), flush=True)
for step in range(start, start + 1000):
    handle = engine.save(step, {"w": torch.full((200_000,), float(step))}, view=(1, 1), wait=True)
    engine.commit(handle)
    print("saved", step, flush=True)
    if pace == "asked":
        sys.stdin.readline()
"""


def trainer(path: pathlib.Path, hold: Hold | None, pace: str = "free") -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", TRAINER, str(path), str(hold) if hold is not None else "", pace],
        stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True, env=env,
        pass_fds=hold.pass_fds if hold is not None else (),
    )  # fmt: skip


def read_until(process: subprocess.Popen[str], word: str, count: int = 1) -> list[str]:
    assert process.stdout is not None
    lines = []
    while sum(line.startswith(word) for line in lines) < count:
        line = process.stdout.readline()
        assert line, f"ended with {process.wait(10)}"
        lines.append(line)
    return lines


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=10)


@pytest.mark.process
def test_a_trainer_killed_while_it_saves_resumes_from_what_it_had_published(tmp_path: pathlib.Path) -> None:
    last = -1
    for rounds in (3, 11):
        process = trainer(tmp_path / "c", None)
        lines = read_until(process, "saved", rounds)
        kill(process)
        if last >= 0:
            assert lines[0].startswith("resumed")
            assert int(lines[0].split()[1]) >= last
        last = int(lines[-1].split()[1])
    store = LocalStore(str(tmp_path / "c"))
    assert [verify(store, g).problems for g in store.generations()] == [[]] * len(store.generations())


@pytest.mark.process
def test_after_all_trainers_died_the_state_comes_from_memory_alone(tmp_path: pathlib.Path) -> None:
    hold = Hold.create(1, 2)
    process = trainer(tmp_path / "c", hold, "asked")
    read_until(process, "saved")
    kill(process)
    assert MemoryStore(hold).generations() != []
    process = trainer(tmp_path / "c", hold, "asked")
    (line, *_) = read_until(process, "resumed")
    kill(process)
    hold.close()
    assert line.split() == ["resumed", "0", "memory", "['memory']"]
