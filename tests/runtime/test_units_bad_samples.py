"""Samples that cannot be read, and workers that hang, die or leak: named, and the rest is trained with as ever."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from torch.utils.data import get_worker_info

import outlast
from outlast.core import events as ev
from outlast.core.protocol import messages as m
from outlast.core.protocol.fleet.coordinator import Coordinator
from outlast.core.protocol.fleet.roster import Settings
from outlast.errors import ConfigError, TrainingError
from outlast.observe.timeline_rows import timeline
from outlast.runtime.training._sample_reader import ReadingRow, ReadingRows, SampleReader, started_at
from outlast.runtime.training._workers import Workers, _lives, own_bytes
from outlast.runtime.training.free_memory import memory_left
from outlast.runtime.training.samples import DataNews, Samples
from outlast.runtime.training.streams import samples_of

BAD = {4, 17, 31}


class Broken:
    """Each sample draws noise, bad ones as well, before they fail. `bad`: sample -> what reading it raises."""

    def __init__(self, size: int = 40, bad: dict[int, Exception] | None = None) -> None:
        self.size, self.reads, self.failing = size, Counter[int](), 1 << 60
        self.bad = {i: ValueError(f"no picture\nin {i}") for i in BAD} if bad is None else bad

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        self.reads[index] += 1
        noise = torch.rand(())
        if index in self.bad and self.failing > 0:
            self.failing -= 1
            raise self.bad[index]
        return torch.stack([torch.tensor(float(index)), noise])


def samples(data: Any = None, **more: Any) -> Samples:
    given = {"global_batch_size": 8, "microbatches": 4, "seed": 3, "bad_samples": 5} | more
    return Samples(Broken() if data is None else data, **given)


def step_of(data: Samples, step: int, leaves: Any = range(4)) -> list[list[list[float]]]:
    return [data.fetch(step, leaf).tolist() for leaf in leaves]


def end(data: Samples, step: int) -> None:
    """As the engine does: from headers to the state."""
    data.bad.applied(data.bad.told(range(4)))


def epoch_of(data: Samples) -> None:
    for step in range(5):
        step_of(data, step)
        end(data, step)


def test_another_stands_in_and_everything_else_stays_as_it_was() -> None:
    data, sound = samples(), samples(Broken(bad={}))
    replaced = 0
    for step in range(5):
        found, want = step_of(data, step), step_of(sound, step)
        for leaf in range(4):
            wanted = sound.indices(step, leaf)
            if BAD.isdisjoint(wanted):
                assert found[leaf] == want[leaf], "random numbers too"
            else:
                assert len(found[leaf]) == len(wanted)
                kept = [(row[0], index) for row, index in zip(found[leaf], wanted, strict=True) if index not in BAD]
                assert all(row == index for row, index in kept)
                assert BAD.isdisjoint(row[0] for row in found[leaf])
                replaced += len(wanted) - len(kept)
        end(data, step)
    assert replaced == len(BAD) == len(data.bad.known)
    assert data.bad.known[17] == "ValueError: no picture in 17"


def test_who_knows_beforehand_who_finds_out_and_who_computes_an_orphan_get_the_same() -> None:
    """What a microbatch holds follows from its position and from what is bad; not from who found it, or when."""
    finds = samples()
    want = [step_of(finds, step) for step in range(5)]
    for step in range(5):
        end(finds, step)
    knows, data = samples(knowing := Broken()), samples()
    knows.bad.load_state_dict(finds.bad.state_dict())
    for step in range(5):
        assert step_of(knows, step) == want[step]
        late = samples()  # who takes over a leaf of this step alone
        late.bad.load_state_dict(data.bad.state_dict())
        assert [late.fetch(step, 2).tolist()] == want[step][2:3]
        assert step_of(data, step) == want[step]
        end(data, step)
    assert not any(knowing.reads[index] for index in BAD), "nobody tries again what is known"
    assert [data.indices(step, leaf) for step in range(5) for leaf in range(4)] == [
        knows.indices(step, leaf) for step in range(5) for leaf in range(4)
    ]


def test_a_sampler_s_own_samples_stand_in() -> None:
    chosen = [*range(20, 40)] * 2
    data = samples(sampler=chosen)
    rows = [row[0] for step in range(5) for batch in step_of(data, step) for row in batch]
    assert set(rows) == set(map(float, chosen)) - {31.0}
    assert len(rows) == 40


def test_what_an_error_says_can_be_told_whatever_it_is() -> None:
    data = samples(Broken(bad={4: OSError("cannot open '\udcff.png'"), 5: ValueError("x\n" * 500)}))
    epoch_of(data)
    assert data.bad.known[4] == "OSError: cannot open '?.png'"
    assert len(data.bad.known[5]) < 200
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(data.bad.known)) == data.bad.known


def test_one_too_many_ends_it_and_says_which_were_skipped() -> None:
    data = samples(bad_samples=2)
    with pytest.raises(TrainingError, match=r"\(ValueError: no picture in \d+\), and the 2 that") as caught:
        epoch_of(data)
    assert "bad_samples=20" in caught.value.remedy
    assert sum(str(index) in str(caught.value.message) for index in BAD) == 3


def test_storage_that_fails_is_not_taken_for_bad_samples() -> None:
    """All samples of a host whose mount is gone: another replica can read them."""
    data = samples(Broken(bad={i: OSError(errno.ESTALE, "stale file handle") for i in range(40)}), bad_samples=40)
    with pytest.raises(TrainingError, match="16 samples in a row could not be read here") as caught:
        data.fetch(0, 0)
    assert "storage of this host" in caught.value.remedy
    gone = samples(Broken(bad={i: FileNotFoundError(errno.ENOENT, "gone") for i in range(20)}), bad_samples=20)
    epoch_of(gone)
    assert set(gone.bad.known) == set(range(20)), "files that are missing are no storage that fails"
    some = samples(Broken(bad={i: OSError(errno.EIO, "broken") for i in range(0, 40, 2)}), bad_samples=40)
    for step in range(5):
        step_of(some, step)


def test_a_passing_error_leaves_no_trace_in_the_random_numbers() -> None:
    """A sample that has drawn before its file fails is read again as if nothing had been, with its microbatch."""
    sound = samples(Broken(bad={}), bad_samples=0)
    passing = Broken(bad={i: OSError("a bad moment") for i in (4, 17)})
    data = samples(passing, bad_samples=0)
    for step in range(5):
        for leaf in range(4):
            if passing.bad.keys() & set(data.indices(step, leaf)):
                passing.failing = 1
            assert torch.equal(data.fetch(step, leaf), sound.fetch(step, leaf)), (step, leaf)


def test_the_budget_is_that_of_all_replicas_together() -> None:
    """Each finds one in the same step, and one may be skipped: all end before anything is applied."""
    data = samples(bad_samples=1)
    data.bad.judge([(4, "x"), (4, "x")])
    with pytest.raises(TrainingError, match="2 more samples of the dataset cannot be read, such as sample 4") as caught:
        data.bad.judge([(17, "y"), (4, "x")])
    assert caught.value.did == "no step was taken with them"
    data.bad.applied([(4, "x")])
    data.bad.judge([(4, "x")])
    with pytest.raises(TrainingError, match="1 of the 1 that bad_samples allows"):
        data.bad.judge([(17, "y")])


def test_where_none_may_be_skipped_what_was_met_is_raised() -> None:
    with pytest.raises(ValueError, match="no picture"):
        epoch_of(samples(bad_samples=0))


@pytest.mark.parametrize(
    ("given", "reason"), [({"bad_samples": -1}, "bad_samples=-1"), ({"bad_samples": 1.5}, "bad_samples=1.5")]
)
@pytest.mark.usefixtures("training_here")
def test_what_is_no_budget_is_refused(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        train(1, **given)
    stream = torch.utils.data.ChainDataset([])
    with pytest.raises(ConfigError, match="bad_samples=3 with a stream"):
        train(1, dataset=stream)
    with pytest.raises(ConfigError, match="bad_samples= with audits"):
        train(1, audit=0.5)


# --- in a training ---------------------------------------------------------------------------------------------------
def train(until: int, **more: Any) -> Any:
    torch.manual_seed(4)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    given: dict[str, Any] = {"global_batch_size": 8, "microbatches": 4, "seed": 3, "bad_samples": 3} | more
    training = outlast.join().protect(model, optimizer, given.pop("dataset", Broken()), **given)
    for step in training.steps(until=until):
        for batch in step:
            step.backward(model(batch).pow(2).mean())
    return training


@pytest.mark.usefixtures("training_here")
@pytest.mark.parametrize("plain", [False, True])
def test_a_run_that_goes_on_from_a_checkpoint_skips_the_same(
    plain: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    if plain:
        monkeypatch.setenv("OUTLAST", "off")
    whole = train(12, checkpoint="off")
    said = capfd.readouterr().err
    assert all(f"sample {index} cannot be read (ValueError: no picture in {index})" in said for index in BAD)
    keep = outlast.Checkpoint(dir=str(tmp_path / "ckpt"), every=1)
    train(6, checkpoint=keep)
    rest = train(12, checkpoint=keep, dataset=(data := Broken()))
    assert rest.fingerprint() == whole.fingerprint()
    assert not any(data.reads[index] for index in BAD), "they were all met in the first five steps"


# --- told ------------------------------------------------------------------------------------------------------------
def test_the_coordinator_writes_once_what_all_members_say() -> None:
    c = Coordinator(Settings(num_replicas=2), epoch=1)
    skipped = m.DataNoted(
        member="r0.1", what="skipped", step=7, text="sample 4 cannot be read (ValueError: x)", samples=(4,), total=1,
        allowed=9,
    )  # fmt: skip
    hung = m.DataNoted(member="r1.1", what="hung", step=8, text="data worker 0 hangs", samples=(5,))
    said = [skipped, msgspec.structs.replace(skipped, member="r1.1"), hung]
    actions = [action for note in said for action in c.handle(1.0, note)]
    found = [a.fields for a in actions if isinstance(a, m.JournalEntry) and a.kind == "data_trouble"]
    assert [(row["what"], row["replica"], row["samples"]) for row in found] == [
        ("skipped", "", [4]),
        ("hung", "r1.1", [5]),
    ]
    rows = timeline([ev.DataTrouble(at_s=float(i), **row) for i, row in enumerate(found)])
    assert rows[0].what.endswith("(ValueError: x): skipped from here on, others stand in (1 of the 9 that may be)")
    assert rows[1].what == "step 8: data worker 0 hangs; all data workers of r1.1 were replaced"


def test_thousands_of_bad_samples_fill_no_story() -> None:
    many = [
        ev.DataTrouble(at_s=0.0, what="skipped", step=i, text=f"sample {i}", samples=[i], total=i + 1, allowed=5000)
        for i in range(2500)
    ]
    assert [int(row.what.split(":")[1].split()[1]) for row in timeline(many)] == [*range(10), 99, 999]


# --- workers ---------------------------------------------------------------------------------------------------------
class Stuck(Broken):
    """In a worker reading `at` never ends; only the first time, if there is a `mark` to leave. `leak`: bytes a sample
    that each worker keeps."""

    def __init__(self, at: int = -1, mark: Path | None = None, leak: int = 0) -> None:
        super().__init__(bad={})
        self.at, self.mark, self.leak = at, mark, leak
        self.kept: list[bytearray] = []

    def __getitem__(self, index: int) -> torch.Tensor:
        if get_worker_info() is not None:
            self.kept.append(bytearray(b"x" * self.leak))
            if index == self.at and (self.mark is None or not self.mark.exists()):
                if self.mark is not None:
                    self.mark.touch()
                threading.Event().wait()
        return super().__getitem__(index)


def working(data: Broken, **more: Any) -> tuple[Samples, list[DataNews]]:
    """One worker, watched by a clock that stands, and goes on by hours where the worker is at the sample that hangs."""
    found, news, now = samples(data, num_workers=1, **more), list[DataNews](), [0.0]

    def clock() -> float:
        now[0] += 7200.0 if any(row.sample == STUCK for row in found.workers.rows) else 0.0
        return now[0]

    found.workers.clock, found.workers.look_s, found.workers.left_bytes = clock, 0.1, lambda: 1 << 50
    found.expect(lambda step: [0, 1, 2, 3], 0)
    found.tell = news.append
    return found, news


STUCK = samples(Broken(bad={})).indices(1, 2)[1]


@pytest.mark.process
@pytest.mark.campaign
def test_a_worker_that_hangs_is_named_and_replaced(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    data, news = working(Stuck(STUCK, tmp_path / "hung"), bad_samples=0)
    sound = samples(Broken(bad={}))
    for step in range(3):
        assert step_of(data, step) == step_of(sound, step)
    assert [(n.what, n.samples) for n in news] == [("hung", (STUCK,))]
    assert f"hangs: it has read sample {STUCK} for " in capfd.readouterr().err


@pytest.mark.process
@pytest.mark.campaign
@pytest.mark.parametrize("allowed", [0, 1])
def test_a_sample_at_which_workers_hang_again_is_named_or_skipped(allowed: int) -> None:
    data, news = working(Stuck(STUCK), bad_samples=allowed)
    step_of(data, 0)
    step_of(data, 1, (0, 1))
    if not allowed:
        with pytest.raises(TrainingError, match=f"sample {STUCK} .*the worker that read it hung, 2 times") as caught:
            data.fetch(1, 2)
        assert "bad_samples=10" in caught.value.remedy
        return
    known = samples(Broken(bad={}), bad_samples=1)
    known.bad.known[STUCK] = "as it hangs"
    assert step_of(data, 1, (2, 3)) == step_of(known, 1, (2, 3))
    assert data.bad.told([2]) == ((STUCK, "the worker that read it hung, 2 times"),)
    assert [n.what for n in news] == ["hung", "hung"]


def test_who_is_slow_at_first_or_once_more_has_more_time() -> None:
    """Two workers, watched while somebody waits: which of them hangs after how long."""

    def hangs_after(*, begun: int, longest_s: float = 0.0, lost: int = 0) -> float:
        rows, now = ReadingRows(2), [0.0]
        workers = Workers(2, None, rows, lambda: iter(()))  # type: ignore[arg-type]  # none is started
        workers.clock, workers.longest_s, workers.lost_at = (lambda: now[0]), 450.0, {7: lost}
        rows.begins(0, 3)
        rows.ended(0, int(longest_s * 1e9))
        for number in range(begun):
            rows.begins(1, 7 if number == begun - 1 else 5)
        while (found := workers._hung()) is None:
            now[0] += 1.0
        assert (found.what, found.sample) == ("hung", 7)
        return now[0] - 1.0

    assert hangs_after(begun=2) == 30.0
    assert hangs_after(begun=2, longest_s=8.0) == 80.0
    assert hangs_after(begun=2, lost=1) == 120.0
    assert hangs_after(begun=2, longest_s=80.0) == hangs_after(begun=1) == 450.0


@pytest.mark.process
@pytest.mark.parametrize(("number", "named"), [(signal.SIGTERM, ()), (signal.SIGKILL, (STUCK,))])
def test_a_worker_that_an_engine_s_notice_ended_is_not_laid_to_its_sample(
    number: signal.Signals, named: tuple[int, ...], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    data, news = working(Stuck(STUCK, tmp_path / "there"), bad_samples=0)
    sound, ended = samples(Broken(bad={})), list[int]()

    def clock() -> float:  # looked at while somebody waits
        for row in data.workers.rows:
            if row.sample == STUCK and not ended and (tmp_path / "there").exists():
                subprocess.run(["kill", f"-{number}", str(row.pid)], check=True)  # torch has other ways with a parent's
                ended.append(row.pid)
        return 0.0

    data.workers.clock = clock
    for step in range(3):
        assert step_of(data, step) == step_of(sound, step)
    assert [(n.what, n.samples) for n in news] == [("died", named)]
    assert ("SIGTERM" in capfd.readouterr().err) == (not named)


def test_a_worker_s_end_may_be_told_by_torch_once_more_while_its_exit_is_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By its handler of SIGCHLD, which raises wherever this thread is; that ended the training."""
    workers = Workers(1, SampleReader([0], list, ReadingRows(1), tolerant=False), ReadingRows(1), lambda: iter(()))
    worker = SimpleNamespace(sentinel=7, pid=12, exitcode=None)
    worker.join = lambda within_s: setattr(worker, "exitcode", -int(signal.SIGTERM))
    told = [True]

    def wait(sentinels: list[int], within_s: float) -> list[int]:
        if told.pop() if told else False:
            raise RuntimeError("DataLoader worker (pid 12) is killed by signal: Terminated.")
        return sentinels

    monkeypatch.setattr("outlast.runtime.training._workers.wait", wait)
    workers._batches = SimpleNamespace(_workers=[worker])  # type: ignore[assignment]
    assert workers._died("").text == "a data worker was ended from outside (SIGTERM)"


@pytest.mark.process
@pytest.mark.campaign
def test_workers_that_leak_go_before_the_kernel_has_to_choose(capfd: pytest.CaptureFixture[str]) -> None:
    data, news = working(Stuck(leak=4 << 20))
    minutes = iter(range(1_000_000))
    data.workers.clock = lambda: 60.0 * next(minutes)  # it is looked at before each batch
    data.workers.left_bytes = lambda: 20 << 20
    sound = samples(Broken(bad={}))
    for step in range(5):
        assert step_of(data, step) == step_of(sound, step)
    assert news
    assert {n.what for n in news} == {"leaked"}
    assert "data worker 0 has grown by" in news[0].text
    assert "20 MiB of memory are left" in capfd.readouterr().err


@pytest.mark.process
@pytest.mark.campaign
def test_bad_samples_that_a_worker_meets_are_the_same() -> None:
    data, here = samples(num_workers=2), samples()
    data.expect(lambda step: [0, 1, 2, 3], 0)
    for step in range(8):
        assert step_of(data, step) == step_of(here, step)
        assert data.bad.told(range(4)) == here.bad.told(range(4))
        end(data, step), end(here, step)


def test_memory_that_is_left_is_that_of_the_groups_around(tmp_path: Path) -> None:
    """Of version 2 a group's parent may be the narrower one; of version 1 the files have other names."""
    whole = memory_left()
    assert 0 < whole < 1 << 50
    mine = tmp_path / "cgroup"
    mine.write_text("0::/slurm/job\n")
    job = tmp_path / "slurm" / "job"
    job.mkdir(parents=True)

    def limit(place: Path, most: str, names: tuple[str, str, str] = ("max", "current", "inactive_file")) -> None:
        for name, text in zip(names[:2], (most, "3000"), strict=True):
            (place / f"memory.{name}").write_text(text)
        (place / "memory.stat").write_text(f"anon 1\n{names[2]} 1000\n")

    limit(job, "max")
    assert memory_left(tmp_path, mine) > 1 << 20
    limit(job.parent, "9000")
    assert memory_left(tmp_path, mine) == 7000
    limit(job, "8000")
    assert memory_left(tmp_path, mine) == 6000
    mine.write_text("5:cpu,cpuacct:/\n4:memory:/old\n")
    (tmp_path / "memory" / "old").mkdir(parents=True)
    limit(tmp_path / "memory" / "old", "5000", ("limit_in_bytes", "usage_in_bytes", "total_inactive_file"))
    assert memory_left(tmp_path, mine) == 3000


@pytest.mark.process
@pytest.mark.campaign
def test_what_a_worker_makes_its_own_of_its_parent_s_memory_counts() -> None:
    """Copy on write: a forked process begins with next to nothing of its own, and has what it writes."""
    mine = bytearray(b"x" * (64 << 20))
    told, tell = os.pipe()
    go, let = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(go, 1)
        for place in range(0, len(mine), 4096):
            mine[place] = 1
        os.write(tell, b"x")
        os.read(go, 1)
        os._exit(0)
    assert own_bytes(child) < 32 << 20
    os.write(let, b"x")
    os.read(told, 1)
    assert own_bytes(child) >= 64 << 20
    row = ReadingRow(worker=0, pid=child, started=started_at(child), begun=1, sample=3, longest_s=0.0)
    assert row.started > 0
    assert _lives(row)
    assert not _lives(replace(row, started=1)), "another of the same number"
    os.write(let, b"x")
    os.waitpid(child, 0)
    assert own_bytes(child) == 0
    assert not _lives(row)


@pytest.mark.process
@pytest.mark.campaign
def test_what_workers_open_at_first_is_no_leak(capfd: pytest.CaptureFixture[str]) -> None:
    """A cache in each worker, larger than what is left: nothing is measured before its first batch. And a rule that
    ends workers again and again is left off."""
    data, news = working(Stuck(leak=8 << 20))
    minutes = iter(range(1_000_000))
    data.workers.clock = lambda: 60.0 * next(minutes)
    data.workers.left_bytes = lambda: 0
    sound = samples(Broken(bad={}))
    for step in range(20):
        assert step_of(data, step) == step_of(sound, step)
    assert 1 <= len(news) <= 2
    assert "they are not replaced for it any more" in capfd.readouterr().err


def test_a_stream_gives_nothing_after_what_it_failed_at() -> None:
    rows = {"global_batch_size": 8, "microbatches": 4}
    with pytest.raises(ConfigError, match="bad_samples=3 with a stream"):
        samples_of(outlast.Data(torch.utils.data.ChainDataset([]), **rows, bad_samples=3), seed=0)


def test_what_another_rank_of_the_replica_met_counts_with_the_microbatch() -> None:
    lead, other = samples(), samples()
    for leaf in range(4):
        other.fetch(1, leaf)
    met = other.bad.met()
    assert met, "the seed has a bad sample in this step"
    lead.bad.heard(met)
    for leaf in range(4):
        assert lead.bad.told([leaf]) == other.bad.told([leaf])
    assert {sample for _, sample, _ in met} == set(lead.bad.here())
