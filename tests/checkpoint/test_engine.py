"""Saving beside training: back-pressure, the read-only window, failures that never reach the step, retention."""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import shutil
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.checkpoint import CheckpointEngine, Hold, LocalStore, MemoryStore, Retention, drain, heads, publish, verify
from outlast.checkpoint import save_events as events
from outlast.checkpoint.retention import choose
from outlast.checkpoint.snapshot import Copy, Snapshot
from outlast.core.protocol.saves.commit import SaveId
from outlast.errors import CheckpointError, ConfigError, Damage

from .crashes import CrashFs


class Gate:
    """A store whose data writes wait until they are let through."""

    def __init__(self, inner: LocalStore) -> None:
        self._inner, self.open = inner, threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def create(self, name: str, size_bytes: int) -> Any:
        assert self.open.wait(20)
        return self._inner.create(name, size_bytes)


def state(value: float, num: int = 5000) -> dict[str, Any]:
    return {"w": torch.full((num,), value), "buffers": {"mean": torch.full((3,), value)}, "step": value}


@pytest.fixture
def gated(tmp_path: pathlib.Path, log: list[Any]) -> Iterator[tuple[CheckpointEngine, Gate]]:
    gate = Gate(LocalStore(str(tmp_path / "ckpt")))
    engine = CheckpointEngine(gate, on_event=log.append, retry_s=0.01)  # type: ignore[arg-type]
    yield engine, gate
    gate.open.set()
    engine.close()


def test_a_step_that_overwrites_after_waiting_does_not_change_the_snapshot(
    gated: tuple[CheckpointEngine, Gate],
) -> None:
    engine, gate = gated
    tree = state(1.0)
    handle = engine.save(1, tree, changing=["buffers.*"])
    assert handle is not None
    tree["buffers"]["mean"].fill_(-1)  # changes inside the step: was copied at once
    handle.wait_copied()
    tree["w"].fill_(-1)
    gate.open.set()
    engine.commit(handle)
    loaded = engine.load()
    assert loaded is not None
    assert torch.equal(loaded.tree["w"], state(1.0)["w"])
    assert torch.equal(loaded.tree["buffers"]["mean"], state(1.0)["buffers"]["mean"])


def test_back_pressure_delays_the_save_and_bounds_the_memory(
    gated: tuple[CheckpointEngine, Gate], log: list[Any]
) -> None:
    engine, gate = gated
    first, second, third = (engine.save(step, state(step)) for step in (1, 2, 3))
    assert first is not None
    assert second is not None
    assert third is None
    assert [type(e) for e in log].count(events.SaveDelayed) == 1
    assert engine.host_bytes == 2 * (2 << 20), "two slots of one huge page each"
    gate.open.set()
    assert [engine.commit(h) for h in (first, second)] == [0, 1]
    assert engine.save(4, state(4.0)) is not None
    assert engine.host_bytes == 2 * (2 << 20)


def test_commits_in_the_background_keep_their_order(gated: tuple[CheckpointEngine, Gate]) -> None:
    engine, gate = gated
    handles = [engine.save(step, state(step)) for step in (1, 2)]
    done = [engine.commit_later(handle) for handle in handles if handle is not None]
    assert not any(future.done() for future in done)
    gate.open.set()
    assert [future.result(10) for future in done] == [0, 1]


def test_a_share_that_grows_is_allocated_beside_the_step(tmp_path: pathlib.Path, log: list[Any]) -> None:
    engine = CheckpointEngine(str(tmp_path), replica=0, num_replicas=4, on_event=log.append)
    engine.prepare(state(1.0, 4_000_000))
    before = engine.host_bytes
    engine.set_members(0, 1)
    assert engine.save(1, state(1.0, 4_000_000)) is None
    assert "enlarged" in log[-1].reason
    engine.slots.preparer.submit(int).result(10)
    assert engine.host_bytes > before
    handle = engine.save(2, state(2.0, 4_000_000))
    assert handle is not None
    engine.commit(handle)
    engine.close()


def test_a_slot_that_comes_free_after_the_share_has_grown_is_enlarged_before_it_is_used(
    gated: tuple[CheckpointEngine, Gate], log: list[Any]
) -> None:
    engine, gate = gated
    engine.set_members(0, 4)
    engine.prepare(state(1.0, 4_000_000))
    first = engine.save(1, state(1.0, 4_000_000))
    engine.set_members(0, 1)
    engine.prepare(state(1.0, 4_000_000))
    assert engine.can_save, "the one that is free was enlarged"
    second = engine.save(2, state(2.0, 4_000_000))
    assert first is not None
    assert second is not None
    gate.open.set()
    first.durable.result(10)
    second.durable.result(10)
    while engine.slots.arena.num_leased:
        engine._writers.submit(int).result(10)
    assert not engine.can_save
    engine.slots.preparer.submit(int).result(10)
    assert engine.can_save
    assert events.SaveDelayed not in {type(e) for e in log}
    third = engine.save(3, state(3.0, 4_000_000))
    assert third is not None
    engine.commit(third)


def test_a_directory_that_was_removed_is_made_again(tmp_path: pathlib.Path, log: list[Any]) -> None:
    engine = CheckpointEngine(str(tmp_path / "c"), on_event=log.append, retry_s=0.001)
    for step in (1, 2):
        handle = engine.save(step, state(step))
        assert handle is not None
        assert engine.commit(handle) == 0
        if step == 1:
            shutil.rmtree(tmp_path / "c")
    assert [type(e) for e in log].count(events.SaveRetried) == 1
    engine.close()


def test_a_final_save_can_wait_for_its_slot(gated: tuple[CheckpointEngine, Gate]) -> None:
    engine, gate = gated
    assert engine.save(1, state(1.0)) is not None
    assert engine.save(2, state(2.0)) is not None
    threading.Timer(0.05, gate.open.set).start()
    last = engine.save(3, state(3.0), wait=True)
    assert last is not None
    engine.commit(last)
    loaded = engine.load()
    assert loaded is not None
    assert loaded.step == 3


def test_two_saves_in_flight_end_in_any_order(gated: tuple[CheckpointEngine, Gate]) -> None:
    engine, gate = gated
    early, late = engine.save(1, state(1.0)), engine.save(2, state(2.0))
    assert early is not None
    assert late is not None
    gate.open.set()
    assert engine.commit(late) == 0
    with pytest.raises(CheckpointError, match="not newer than generation 0"):
        engine.commit(early)
    loaded = engine.load()
    assert loaded is not None
    assert loaded.step == 2


def test_what_a_save_referred_to_goes_when_a_newer_one_made_it_needless(gated: tuple[CheckpointEngine, Gate]) -> None:
    engine, gate = gated
    gate.open.set()
    engine.retention = Retention(keep_last=1)
    first = engine.save(1, state(1.0))
    assert first is not None
    engine.commit(first)
    early, late = engine.save(2, state(2.0)), engine.save(3, state(3.0))
    assert early is not None
    assert late is not None
    engine.commit(late)
    assert engine.store.generations() == [0, 1], "the earlier one may still refer to what was there when it began"
    with pytest.raises(CheckpointError, match="not newer than generation 1"):
        engine.commit(early)
    assert engine.store.generations() == [1]


def test_the_waiter_copies_what_is_left_and_a_name_waits_only_for_itself() -> None:
    sources = [torch.randn(3 << 20), torch.randn(100)]
    area = torch.empty(sum(s.nbytes for s in sources), dtype=torch.uint8)
    copies, at = [], 0
    for k, source in enumerate(sources):
        memory = memoryview(area.numpy())  # type: ignore[arg-type]
        copies.append(Copy(f"t{k}", source, tuple(source.shape), memory, area.data_ptr() + at, at, source.nbytes))
        at += source.nbytes
    snapshot = Snapshot(copies, at)
    snapshot.wait_for({"t1"}, timeout_s=5)
    assert not snapshot.copied.is_set()
    with pytest.raises(CheckpointError, match="did not reach"):
        snapshot.ready(at, timeout_s=0.01)
    snapshot.wait_for(timeout_s=5)
    assert snapshot.copied.is_set()
    assert torch.equal(area.view(torch.float32), torch.cat(sources))
    snapshot.ready(at, timeout_s=0.01)


def test_what_lies_between_the_tensors_becomes_zero_before_it_counts_as_copied() -> None:
    area = torch.full((256,), 255, dtype=torch.uint8)
    memory, base = memoryview(area.numpy()), area.data_ptr()  # type: ignore[arg-type]
    sources = [torch.ones(40, dtype=torch.uint8), torch.ones(64, dtype=torch.uint8)]
    copies = [
        Copy("a", sources[0], (40,), memory, base, 0, 40),
        Copy("b", sources[1], (64,), memory, base + 128, 128, 64, gap=88),
    ]
    snapshot = Snapshot(copies, 192)
    snapshot.wait_for({"a"}, timeout_s=5)
    snapshot.ready(40, timeout_s=5)
    with pytest.raises(CheckpointError, match="did not reach byte 41"):
        snapshot.ready(41, timeout_s=0.01)
    snapshot.run()
    snapshot.ready(192, timeout_s=5)
    assert area.tolist() == [1] * 40 + [0] * 88 + [1] * 64 + [255] * 64


# failures


def failing(log: list[Any], fail: Any, *, num_retries: int = 1) -> tuple[CheckpointEngine, CrashFs]:
    fs = CrashFs()
    engine = CheckpointEngine(LocalStore("/ckpt", fs=fs), on_event=log.append, num_retries=num_retries, retry_s=0.001)
    first = engine.save(1, state(1.0))
    assert first is not None
    engine.commit(first)
    fs.fail = fail
    return engine, fs


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EIO])
def test_a_disk_that_fails_drops_the_save_and_keeps_the_previous(log: list[Any], code: int) -> None:
    engine, fs = failing(log, lambda call, path: OSError(code, os.strerror(code)) if call == "write" else None)
    handle = engine.save(2, state(2.0))
    assert handle is not None
    handle.wait_copied()  # the step is not held up
    with pytest.raises(CheckpointError, match=os.strerror(code)) as raised:
        handle.durable.result(10)
    assert "training goes on" in raised.value.did
    kinds = [type(e) for e in log]
    assert kinds.count(events.SaveRetried) == 1
    assert kinds.count(events.SaveFailed) == 1
    assert all("w0000" not in n or "s2" not in n for n in fs.names("/ckpt/data")), "nothing is left behind"
    loaded = engine.load()
    assert loaded is not None
    assert loaded.step == 1
    fs.fail = lambda call, path: None
    third = engine.save(3, state(3.0))
    assert third is not None
    assert engine.commit(third) == 1
    engine.close()


def calls_of_a_save(log: list[Any], bad: int) -> int:
    """How many calls it makes when the one with this number fails. Each descriptor is closed once: the disk of these
    tests raises KeyError for a second time, when a number may be another file's, a socket's or a memory's."""
    calls = 0

    def fail(call: str, path: str) -> OSError | None:
        nonlocal calls
        calls += 1
        return OSError(errno.EIO, "bad") if calls == bad else None

    engine, fs = failing(log, fail, num_retries=0)
    handle = engine.save(2, state(2.0))
    assert handle is not None
    with contextlib.suppress(OSError, CheckpointError):
        engine.commit(handle)
    engine.close()
    assert fs._fds == {}
    return calls


def test_whichever_call_fails_each_descriptor_is_closed_once(log: list[Any]) -> None:
    bad = 1
    while calls_of_a_save(log, bad) >= bad:
        bad += 1
    assert bad > 20


def test_a_full_disk_gives_up_its_spare_files_first(log: list[Any]) -> None:
    failures = iter([errno.ENOSPC])

    def fail(call: str, path: str) -> OSError | None:
        code = next(failures, None) if call == "write" and path.endswith(".bin") else None
        return OSError(code, os.strerror(code)) if code else None

    engine, fs = failing(log, fail)
    fs.mkdir("/ckpt/spare")
    os_fd = fs.open("/ckpt/spare/old.txt", "create")
    fs.close(os_fd)
    handle = engine.save(2, state(2.0))
    assert handle is not None
    assert engine.commit(handle) == 1
    assert fs.names("/ckpt/spare") == []
    engine.close()


def test_where_one_save_fits_it_is_the_newest(log: list[Any]) -> None:
    """Two under way would take the room from one another until both are given up."""
    fs = CrashFs()
    gate = Gate(LocalStore("/ckpt", fs=fs))
    engine = CheckpointEngine(gate, on_event=log.append, num_retries=9, retry_s=0.001)  # type: ignore[arg-type]
    fs.fail = lambda call, path: OSError(errno.ENOSPC, "full") if call == "write" and "-s2-" in path else None
    older, newest = engine.save(2, state(2.0)), engine.save(3, state(3.0))
    assert older is not None
    assert newest is not None
    gate.open.set()
    with pytest.raises(CheckpointError, match="could not write step 2"):
        older.durable.result(20)
    assert engine.commit(newest) == 0
    assert not any(isinstance(event, events.SaveRetried) for event in log)
    engine.close()


def test_a_failed_publication_leaves_the_previous_generation(log: list[Any]) -> None:
    engine, _ = failing(log, lambda call, path: OSError(errno.EIO, "bad") if call == "link" else None)
    handle = engine.save(2, state(2.0))
    assert handle is not None
    with pytest.raises(OSError, match="bad"):
        engine.commit(handle)
    loaded = engine.load()
    assert loaded is not None
    assert loaded.step == 1
    engine.close()


def test_file_systems_without_links_or_direct_writes(log: list[Any]) -> None:
    def fail(call: str, path: str) -> OSError | None:
        return OSError(errno.EPERM, "no links here") if call == "link" else None

    engine, _ = failing(log, fail)
    handle = engine.save(2, state(2.0))
    assert handle is not None
    assert engine.commit(handle) == 1
    assert verify(engine.store, 1).problems == []
    engine.close()


@pytest.mark.parametrize("links", [True, False])
def test_a_head_swept_before_it_got_its_name_is_written_again(links: bool) -> None:
    """Another save's clearing away meets a head between its writing and its naming; certifying writes one as well."""
    disk, swept = CrashFs(), []
    store = LocalStore("/ckpt", fs=disk)

    def sweep(call: str, path: str) -> OSError | None:
        temporary = [n for n in disk.names("/ckpt/manifests") if n.startswith(".tmp-")] if call == wanted else []
        if temporary and len(swept) < 3:
            swept.extend(temporary)
            LocalStore("/ckpt", fs=disk).discard([])
        return None if links or call != "link" else OSError(errno.EPERM, "no links here")

    disk.fail, wanted = sweep, "link" if links else "rename"
    assert store.publish(0, b"head")
    assert len(swept) == 3
    assert store.read_head(0) == b"head"
    swept.clear()
    wanted = "rename"
    store.replace_head(0, b"certified")
    assert len(swept) == 3
    assert store.read_head(0) == b"certified"
    swept.clear()
    wanted = "unlink"
    assert store.publish(1, b"next")
    assert store.generations() == [0, 1]


def test_a_directory_that_cannot_be_written(tmp_path: pathlib.Path, log: list[Any]) -> None:
    (tmp_path / "file").write_text("in the way")
    engine = CheckpointEngine(str(tmp_path / "file" / "ckpt"), on_event=log.append, num_retries=0)
    handle = engine.save(1, state(1.0))
    assert handle is not None
    with pytest.raises(CheckpointError, match="NotADirectoryError"):
        handle.durable.result(10)
    assert engine.load() is None
    engine.close()


# publication


def test_publishing_again_is_the_same_generation_and_stale_views_are_refused(tmp_path: pathlib.Path) -> None:
    engine = CheckpointEngine(str(tmp_path), run="r")
    handle = engine.save(5, state(5.0), view=(2, 3))
    assert handle is not None
    report = handle.durable.result(10)
    assert [engine.publish(handle.save, [report]) for _ in range(3)] == [0, 0, 0]
    for view, step in (((2, 2), 9), ((1, 8), 9), ((2, 3), 4)):
        stale = engine.save(step, state(step), view=view, wait=True)
        assert stale is not None
        late = stale.durable.result(10)
        with pytest.raises(CheckpointError, match="is not newer than generation 0"):
            engine.publish(stale.save, [late])
    other = publish(engine.store, SaveId(epoch=2, n=3, step=6), [_next(engine)], created_s=0.0, run="r")
    assert other == 1
    engine.close()


def _next(engine: CheckpointEngine) -> Any:
    handle = engine.save(6, state(6.0), view=(2, 3), wait=True)
    assert handle is not None
    return handle.durable.result(10)


def test_a_report_without_its_bytes_is_not_published(tmp_path: pathlib.Path) -> None:
    engine = CheckpointEngine(str(tmp_path))
    handle = engine.save(1, state(1.0))
    assert handle is not None
    report = handle.durable.result(10)
    (data,) = (tmp_path / "data").glob("*.bin")
    os.truncate(data, 4096)
    with pytest.raises(Damage, match="does not have"):
        engine.publish(handle.save, [report])
    assert heads(engine.store) == ([], {})
    engine.close()


def test_half_the_writers_are_not_a_generation(tmp_path: pathlib.Path) -> None:
    engines = [CheckpointEngine(str(tmp_path), replica=r, num_replicas=2) for r in range(2)]
    handles = [engine.save(1, state(1.0)) for engine in engines]
    reports = [h.durable.result(10) for h in handles if h is not None]
    with pytest.raises(Damage):
        engines[0].publish(SaveId(epoch=0, n=0, step=1), reports[:1])
    assert engines[0].publish(SaveId(epoch=0, n=0, step=1), reports) == 0
    for engine in engines:
        engine.close()


# incremental saves, retention, readers


def test_unchanged_chunks_are_referred_to_not_written(tmp_path: pathlib.Path, log: list[Any]) -> None:
    engine = CheckpointEngine(str(tmp_path), on_event=log.append)
    tree = {"frozen": torch.randn(6 << 20), "w": torch.randn(1000)}
    for step in range(6):
        tree["w"] += 1
        handle = engine.save(step, tree)
        assert handle is not None
        engine.commit(handle)
    written = [e.written_bytes for e in log if isinstance(e, events.SaveDurable)]
    assert written[0] > 24 << 20
    assert max(written[1:]) < 1 << 20
    loaded = engine.load()
    assert loaded is not None
    assert torch.equal(loaded.tree["frozen"], tree["frozen"])
    assert sum(f.stat().st_size for f in (tmp_path / "data").iterdir()) < 30 << 20
    engine.close()


def test_what_a_save_in_flight_refers_to_is_not_removed_under_it(tmp_path: pathlib.Path) -> None:
    """The second of two in flight holds what generation 0 held and the first does not: its base must stay for it."""
    engine = CheckpointEngine(str(tmp_path), retention=Retention(keep_last=1))
    first = engine.save(1, state(1.0))
    assert first is not None
    assert engine.commit(first) == 0
    flights = [engine.save(step, state(value)) for step, value in ((2, 2.0), (3, 1.0))]
    for handle in flights:
        assert handle is not None
        handle.durable.result(20)
    second, third = flights
    assert second is not None
    assert third is not None
    assert third.written_bytes < second.written_bytes, "it refers to generation 0"
    assert engine.commit(second) == 1
    assert engine.store.generations() == [0, 1], "kept for the third, which nothing may outdate"
    assert engine.commit(third) == 2
    loaded = engine.load()
    assert loaded is not None
    assert torch.equal(loaded.tree["w"], torch.full((5000,), 1.0))
    assert verify(LocalStore(str(tmp_path)), 2).problems == []
    assert engine.store.generations() == [2]
    engine.close()


def test_a_resumed_run_goes_on_incrementally(tmp_path: pathlib.Path, log: list[Any]) -> None:
    tree = {"frozen": torch.randn(2 << 20)}
    for epoch in (1, 2):
        engine = CheckpointEngine(str(tmp_path), on_event=log.append)
        engine.load()
        handle = engine.save(epoch, tree, view=(epoch, 1))
        assert handle is not None
        engine.commit(handle)
        engine.close()
    assert [e.written_bytes for e in log if isinstance(e, events.SaveDurable)][1] == 0


def test_files_are_recycled_not_allocated(tmp_path: pathlib.Path) -> None:
    engine = CheckpointEngine(str(tmp_path), retention=Retention(keep_last=1))
    inodes = set()
    for step in range(6):
        handle = engine.save(step, state(step))
        assert handle is not None
        engine.commit(handle)
        inodes |= {f.stat().st_ino for d in ("data", "spare") for f in (tmp_path / d).glob("*.bin")}
    assert len(inodes) == 2
    engine.close()


@settings(max_examples=200)
@given(certified=st.lists(st.booleans(), max_size=20), last=st.integers(1, 4), every=st.integers(0, 5), data=st.data())
def test_retention_keeps_what_it_says(certified: list[bool], last: int, every: int, data: st.DataObject) -> None:
    everything = list(enumerate(certified))
    protected = data.draw(st.sets(st.integers(0, max(0, len(certified) - 1)), max_size=3))
    gone = choose(Retention(keep_last=last, keep_every=every), everything, protected=protected)
    kept = [n for n, _ in everything if n not in gone]
    assert kept[-last:] == [n for n, _ in everything][-last:]
    sure = [n for n, c in everything if c]
    assert set(sure[-last:]) <= set(kept), "certified ones are not rotated out by uncertified ones"
    assert protected & {n for n, _ in everything} <= set(kept)
    assert not every or all(n in kept for n, _ in everything if n % every == 0)
    assert len(kept) <= 2 * last + len(protected) + (len(certified) // every + 1 if every else 0)


def test_retention_says_what_is_wrong_with_its_numbers() -> None:
    with pytest.raises(ConfigError, match="keep_last=0"):
        Retention(keep_last=0)


def test_a_generation_that_is_being_read_is_not_removed(tmp_path: pathlib.Path) -> None:
    engine = CheckpointEngine(str(tmp_path), retention=Retention(keep_last=1))
    first = engine.save(0, state(0.0))
    assert first is not None
    engine.commit(first)
    with LocalStore(str(tmp_path)).in_use(0):
        for step in (1, 2):
            handle = engine.save(step, state(step))
            assert handle is not None
            engine.commit(handle)
        assert verify(engine.store, 0).problems == []
        assert engine.store.generations() == [0, 2]
    engine.prune()
    assert engine.store.generations() == [2]
    engine.close()


def test_nothing_is_collected_while_a_kept_generation_cannot_be_read(tmp_path: pathlib.Path) -> None:
    engine = CheckpointEngine(str(tmp_path), retention=Retention(keep_last=2), incremental=False)
    for step in range(2):
        handle = engine.save(step, state(step))
        assert handle is not None
        engine.commit(handle)
    (part,) = (tmp_path / "data").glob("*s1-*.json")
    part.write_bytes(b"{")
    engine.close()
    engine = CheckpointEngine(str(tmp_path), retention=Retention(keep_last=2))
    files = set(os.listdir(tmp_path / "data"))
    handle = engine.save(2, state(2.0))
    assert handle is not None
    engine.commit(handle)
    assert {f for f in files if f.endswith(".bin")} <= set(os.listdir(tmp_path / "data"))
    engine.close()


def test_the_leavings_of_a_save_that_died_are_removed_and_one_in_flight_is_not(tmp_path: pathlib.Path) -> None:
    engine = CheckpointEngine(str(tmp_path))
    handle = engine.save(3, state(3.0), view=(1, 1))
    assert handle is not None
    engine.commit(handle)
    for token in ("e1-v1-s2-a0", "e1-v1-s9-a0"):
        (tmp_path / "data" / f"{token}-w0001-aa.bin").write_bytes(b"x")
    engine.prune()
    left = {name.split("-w")[0] for name in os.listdir(tmp_path / "data")}
    assert left == {"e1-v1-s3-a0", "e1-v1-s9-a0"}
    assert os.listdir(tmp_path / "spare") == [], "a file that a lost writer may still write to is never reused"
    engine.close()


# drain


def test_the_far_tier_is_filled_in_the_background_and_serves_when_the_near_one_is_gone(
    tmp_path: pathlib.Path, log: list[Any]
) -> None:
    near, far = tmp_path / "near", tmp_path / "far"
    engine = CheckpointEngine(str(near), drain_to=str(far), on_event=log.append)
    handle = engine.save(1, state(1.0))
    assert handle is not None
    engine.commit(handle)
    engine.close()
    assert engine.newest_drain is not None
    assert engine.newest_drain.done_bytes == engine.newest_drain.total_bytes > 0
    for path in (near / "data").iterdir():
        path.unlink()
    again = CheckpointEngine(str(near), drain_to=str(far))
    loaded = again.load()
    assert loaded is not None
    assert torch.equal(loaded.tree["w"], state(1.0)["w"])
    assert loaded.bytes_read.keys() == {"object"} or loaded.bytes_read.keys() == {"disk"}
    again.close()


def test_damage_is_not_drained(tmp_path: pathlib.Path) -> None:
    engine = CheckpointEngine(str(tmp_path / "near"))
    handle = engine.save(1, state(1.0))
    assert handle is not None
    engine.commit(handle)
    engine.close()
    (data,) = (tmp_path / "near" / "data").glob("*.bin")
    data.write_bytes(b"\1" + data.read_bytes()[1:])
    far = LocalStore(str(tmp_path / "far"))
    with pytest.raises(Damage, match="digest"):
        drain(engine.store, far, 0)
    assert far.generations() == []
    assert [n for n in far.names() if n.endswith(".bin")] == []


# memory that outlives the trainer


def test_memory_serves_after_the_trainer_is_gone_with_no_byte_from_disk(tmp_path: pathlib.Path) -> None:
    hold = Hold.create(2, 2)
    engines = [CheckpointEngine(str(tmp_path), replica=r, num_replicas=2, hold=hold) for r in range(2)]
    handles = [engine.save(1, state(1.0, 700_000), view=(1, 1)) for engine in engines]
    reports = [h.durable.result(10) for h in handles if h is not None]
    generation = engines[0].publish(SaveId(epoch=1, n=1, step=1), reports)
    for engine in engines:
        engine.settle(SaveId(epoch=1, n=1, step=1), generation)
        engine.close()
    again = CheckpointEngine(str(tmp_path), hold=Hold.parse(str(hold)))
    loaded = again.load()
    assert loaded is not None
    assert (loaded.tier, set(loaded.bytes_read)) == ("memory", {"memory"})
    assert torch.equal(loaded.tree["w"], state(1.0, 700_000)["w"])
    again.close()
    hold.close()


def test_a_torn_snapshot_in_memory_is_passed_over(tmp_path: pathlib.Path) -> None:
    hold = Hold.create(2, 2)
    engines = [CheckpointEngine(str(tmp_path), replica=r, num_replicas=2, hold=hold) for r in range(2)]
    for step in (1, 2):
        mine = engines if step == 1 else engines[:1]  # the second replica died before it began
        handles = [engine.save(step, state(step), view=(1, 1)) for engine in mine]
        for handle in handles:
            assert handle is not None
            handle.durable.result(10)
    assert MemoryStore(hold).generations() == [0]
    loaded = CheckpointEngine(str(tmp_path), hold=hold).load()
    assert loaded is not None
    assert loaded.step == 1
    for engine in engines:
        engine.close()
    hold.close()


def test_the_newest_published_snapshot_in_memory_is_not_overwritten(tmp_path: pathlib.Path) -> None:
    hold = Hold.create(1, 2)
    engine = CheckpointEngine(str(tmp_path), hold=hold)
    for step in range(5):
        handle = engine.save(step, state(step))
        assert handle is not None
        assert step == 0 or engine.save(99, state(99.0)) is None, "one slot is kept, one is in use"
        engine.commit(handle)
        store = MemoryStore(hold)
        assert store.generations()
        loaded = engine.load()
        assert loaded is not None
        assert loaded.step == step
    engine.close()
    hold.close()


def test_descriptors_that_are_none_are_refused() -> None:
    with pytest.raises(ConfigError, match="no memory slots"):
        Hold.parse("9999,1")
