"""Killed at every system call, with any subset of what was not fsynced lost: the newest generation is whole."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator

import pytest
import torch

from outlast.checkpoint import CheckpointEngine, LocalStore, Retention, certify, drain, verify
from outlast.errors import OutlastError

from .crashes import CrashFs, Died

SEEDS = 6


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks in a few kilobytes, so that thousands of crashes fit into seconds."""
    monkeypatch.setattr("outlast.checkpoint._writer.CHUNK_BYTES", 8192)


def state_of(step: int) -> dict[str, object]:
    """Large enough for two chunks, with a part that never changes (for incremental saves)."""
    generator = torch.Generator().manual_seed(step)
    frozen = torch.arange(5_000, dtype=torch.int32)
    return {"frozen": frozen, "w": torch.randn(300, generator=generator), "step": step}


def engine_on(fs: CrashFs, path: str = "/ckpt", keep: int = 1) -> CheckpointEngine:
    counter = iter(range(id(fs) << 16, (id(fs) << 16) + 10_000))
    return CheckpointEngine(
        LocalStore(path, fs=fs, nonce=lambda: f"{next(counter):x}"),
        retention=Retention(keep_last=keep),
        num_retries=0,
        nonce=lambda: f"n{next(counter)}",
        timeout_s=20,
    )


def save(engine: CheckpointEngine, step: int, epoch: int = 1) -> None:
    handle = engine.save(step, state_of(step), view=(epoch, 1))
    assert handle is not None
    engine.commit(handle)


def history(
    fs: CrashFs, done: list[int], num_steps: int = 3, before: Callable[[int], None] = lambda step: None
) -> None:
    """Saves that overwrite recycled files, refer to unchanged chunks, and prune; `done` lists acknowledged ones."""
    engine = engine_on(fs)
    try:
        for step in range(num_steps):
            before(step)
            save(engine, step)
            if step % 2:
                certify(engine.store, step)
            done.append(step)
    finally:
        engine.close(wait=True)


def check(fs: CrashFs, at_least: int, path: str = "/ckpt") -> int:
    """What loads is right to the bit, and not older than what was acknowledged. Returns its step, -1 for nothing."""
    engine = engine_on(fs, path)
    try:
        loaded = engine.load()
    finally:
        engine.close()
    if loaded is None:
        assert at_least < 0
        return -1
    assert loaded.skipped == [], "the newest published generation must be whole, not merely survivable"
    want = state_of(loaded.step)
    assert loaded.step >= at_least
    promised = loaded.step == at_least and at_least % 2 == 1 and "far" not in path
    assert loaded.certified or not promised, "an acknowledged certification is kept"
    assert torch.equal(loaded.tree["w"], want["w"])
    assert torch.equal(loaded.tree["frozen"], want["frozen"])
    torn = [v for g in engine.store.generations() for v in verify(engine.store, g).problems]
    assert torn == [], "whatever is published is whole, the older ones too"
    assert loaded.tree["step"] == loaded.step
    return loaded.step


def outcomes(fs: CrashFs, seeds: int = SEEDS) -> Iterator[CrashFs]:
    yield fs.crashed(True)
    yield fs.crashed(False)
    for seed in range(seeds):
        yield fs.crashed(random.Random(seed))


def die_everywhere(
    work: Callable[[CrashFs, list[int]], None], after: Callable[[CrashFs, int], object], *, seeds: int = SEEDS
) -> int:
    """Run `work` on fresh disks, killed at its first call, its second, …; returns how many calls it makes."""
    for at in range(1, 100_000):
        fs, done = CrashFs(), list[int]()
        fs.die_at = at
        try:
            work(fs, done)
        except Died:
            pass
        else:
            return at
        for disk in outcomes(fs, seeds):
            after(disk, done[-1] if done else -1)
    raise AssertionError("the work never ends")


def test_killed_at_every_call_of_saves_that_overwrite_and_prune() -> None:
    count = die_everywhere(history, check)
    assert count > 60


def recycling(fs: CrashFs, done: list[int]) -> None:
    """Dies (if at all) only once there are spare files: in saves that are written over them."""
    die_at, fs.die_at = fs.die_at, None

    def mortal(step: int) -> None:
        if step == 4:
            assert fs.names("/ckpt/spare") != []
            fs.die_at = None if die_at is None else fs.calls + die_at

    history(fs, done, 6, mortal)


def dead_at(work: Callable[[CrashFs, list[int]], None], at: int) -> tuple[CrashFs, int]:
    """A disk whose process was killed at this call of `work`, and the last step that it acknowledged."""
    fs, done = CrashFs(), list[int]()
    fs.die_at = at
    with pytest.raises(Died):
        work(fs, done)
    return fs, done[-1] if done else -1


def test_killed_at_every_call_of_saves_into_recycled_files() -> None:
    renamed, fs = list[str](), CrashFs()
    fs.fail = lambda call, path: renamed.append(path) if call == "rename" else None  # type: ignore[func-returns-value]
    recycling(fs, [])
    assert sum("/spare/" in path for path in renamed) == 2, "both are written over what lay there"
    assert die_everywhere(recycling, check, seeds=2) > 60


def test_a_second_crash_after_the_first_finds_the_newest_whole() -> None:
    """The next run writes over what it finds among the spare files: nothing that is reached may lie there too."""
    for at in range(2, 60, 4):
        fs, last = dead_at(recycling, at)
        for seed in range(4):
            disk = fs.crashed(random.Random(seed))
            newest = check(disk, last)
            disk.die_at = disk.calls + 25 + 9 * seed
            engine = engine_on(disk)
            with contextlib.suppress(Died):
                for step in (7, 9):
                    save(engine, step, epoch=2)
            engine.close()
            check(disk.crashed(True), newest - newest % 2)


def test_after_a_crash_the_next_run_saves_on_and_loads() -> None:
    for at in range(5, 75, 7):
        fs, _ = dead_at(history, at)
        for disk in outcomes(fs):
            engine = engine_on(disk)
            save(engine, 7, epoch=2)
            save(engine, 9, epoch=2)
            certify(engine.store, engine.store.generations()[-1])
            engine.close()
            assert check(disk.crashed(False), 9) == 9


def test_killed_at_every_call_of_a_drain() -> None:
    def work(fs: CrashFs, done: list[int]) -> None:
        near, far = LocalStore("/near", fs=fs, nonce=lambda: "a"), LocalStore("/far", fs=fs, nonce=lambda: "b")
        before, fs.die_at = fs.die_at, None
        engine = engine_on(fs, "/near", keep=3)
        try:
            save(engine, 0)
            save(engine, 1)
        finally:
            engine.close()
        fs.die_at = None if before is None else fs.calls + before
        for generation in (0, 1):
            drain(near, far, generation)
            done.append(generation)

    die_everywhere(work, lambda disk, step: check(disk, step, "/far"))


def test_every_fsync_in_the_code_is_needed() -> None:
    """Leave out each place's syncs in turn: for each, some crash loses or tears what was published."""
    fs = CrashFs()
    history(fs, [], num_steps=4)
    places = list(dict.fromkeys(fs.syncs))
    assert len(places) >= 10, places
    assert [place for place in places if not _matters(place)] == []


def _matters(place: str) -> bool:
    """Whether some death and some loss after leaving out a place's syncs makes a check fail."""
    for at in range(1, 1000):
        fs, done = CrashFs(), list[int]()
        fs.left_out, fs.die_at = place, at
        ended = False
        try:
            history(fs, done, num_steps=4)
            ended = True
        except Died:
            pass
        if place in fs.syncs and any(_fails(disk, done[-1] if done else -1) for disk in outcomes(fs)):
            return True
        if ended:
            return False
    raise AssertionError("the history never ends")


def _fails(disk: CrashFs, at_least: int) -> bool:
    try:
        check(disk, at_least)
    except (AssertionError, OutlastError, OSError):
        return True
    return False
