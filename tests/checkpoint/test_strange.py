"""What nobody plans for: strangers' files, clocks that go back, links, and two runs in one directory."""

from __future__ import annotations

import contextlib
import os
import pathlib
import stat
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.checkpoint import CheckpointEngine, Handle, LocalStore, Retention, verify
from outlast.checkpoint import save_events as events
from outlast.checkpoint.store import generation_name, generation_number
from outlast.errors import CheckpointError


def state(value: float) -> dict[str, Any]:
    return {"w": torch.full((5000,), value)}


def saved(engine: CheckpointEngine, step: int) -> int:
    handle = engine.save(step, state(step))
    assert handle is not None
    return engine.commit(handle)


@pytest.mark.parametrize("number", [10**4, 10**10, 10**18 - 2, 2**63, 2**64, 10**30])
def test_a_stray_head_with_any_number_stops_no_publication(tmp_path: pathlib.Path, number: int) -> None:
    engine = CheckpointEngine(str(tmp_path))
    saved(engine, 1)
    (tmp_path / "manifests" / generation_name(number)).write_bytes(b"{}")
    assert saved(engine, 2) == 1
    assert saved(engine, 3) == 2
    loaded = CheckpointEngine(str(tmp_path)).load()
    assert loaded is not None
    assert loaded.step == 3
    engine.close()


def test_a_number_that_no_generation_can_have_is_refused_with_a_word(tmp_path: pathlib.Path) -> None:
    (tmp_path / "manifests").mkdir()
    (tmp_path / "manifests" / generation_name(10**18 - 1)).write_bytes(b"{}")
    engine = CheckpointEngine(str(tmp_path))
    with pytest.raises(CheckpointError, match="is no number for a generation") as caught:
        saved(engine, 1)
    assert "remove the stray file" in caught.value.remedy
    engine.close()


def test_a_damaged_newest_head_s_number_is_passed_over(tmp_path: pathlib.Path) -> None:
    engine = CheckpointEngine(str(tmp_path))
    saved(engine, 1)
    saved(engine, 2)
    for number in (1, 7):  # the first is damaged, the other perhaps cannot be read just now
        (tmp_path / "manifests" / generation_name(number)).write_bytes(b"")
    assert saved(engine, 3) == 8
    engine.close()


def test_numbers_that_are_none() -> None:
    assert generation_number("g0000000007.json") == 7
    strange = ["g7.json", "g-000000001.json", "g00000000٣.json", f"g{10**18}.json", f"g{2**63}.json", "g.json", "7"]
    assert [generation_number(name) for name in strange] == [None] * len(strange)


def test_a_clock_that_goes_back_changes_nothing(tmp_path: pathlib.Path) -> None:
    times = iter([1e9, 5.0, -3.0])
    engine = CheckpointEngine(str(tmp_path), wall=lambda: next(times), retention=Retention(keep_last=2))
    assert [saved(engine, step) for step in (1, 2, 3)] == [0, 1, 2]
    loaded = engine.load()
    assert loaded is not None
    assert loaded.step == 3
    assert engine.store.generations() == [1, 2], "the order is that of the numbers"
    engine.close()


@pytest.mark.parametrize("directory", ["manifests", "data", "spare"])
def test_directories_that_are_links(tmp_path: pathlib.Path, directory: str) -> None:
    """Somebody moved one to another place: that is theirs to do, and everything holds there too."""
    place, other = tmp_path / "c", tmp_path / "other"
    place.mkdir()
    other.mkdir()
    os.symlink(other, place / directory)
    engine = CheckpointEngine(str(place), retention=Retention(keep_last=1))
    for step in range(1, 5):
        saved(engine, step)
    assert verify(LocalStore(str(place)), engine.store.generations()[-1]).problems == []
    assert (place / directory).is_symlink()
    engine.close()


def test_permission_lost_and_given_back(tmp_path: pathlib.Path) -> None:
    """The store refuses for a while, at every call; what is told is the reason, and saving goes on afterwards."""
    log: list[Any] = []
    refused = False

    class Guarded(LocalStore):
        def create(self, name: str, size_bytes: int) -> Any:
            if refused:
                raise PermissionError(13, "Permission denied", name)
            return super().create(name, size_bytes)

    engine = CheckpointEngine(Guarded(str(tmp_path)), on_event=log.append, retry_s=0.001)
    saved(engine, 1)
    refused = True
    with pytest.raises(CheckpointError, match="Permission denied"):
        saved(engine, 2)
    refused = False
    assert saved(engine, 3) == 1
    assert [e.step for e in log if isinstance(e, events.SaveFailed)] == [2]
    engine.close()


@settings(max_examples=12)
@given(moves=st.lists(st.tuples(st.integers(0, 1), st.sampled_from(["save", "commit"])), max_size=14))
def test_two_runs_in_one_directory_never_leave_a_torn_generation(
    tmp_path_factory: pytest.TempPathFactory, moves: list[tuple[int, str]]
) -> None:
    """A mistake, and each may sweep what the other is writing: that save is lost with a word, and nothing else is."""
    place = tmp_path_factory.mktemp("shared")
    runs = [
        CheckpointEngine(str(place), run=name, retention=Retention(keep_last=2), retry_s=0.001) for name in ("a", "b")
    ]
    flights: list[list[Handle]] = [[], []]
    for at, (who, what) in enumerate(moves):
        if what == "save":
            handle = runs[who].save(at, state(who * 1000 + at), view=(who + 1, 1))
            flights[who] += [handle] if handle is not None else []
        elif flights[who]:
            with contextlib.suppress(CheckpointError):
                runs[who].commit(flights[who].pop(0))
        store = LocalStore(str(place))
        assert [verify(store, g).problems for g in store.generations()] == [[]] * len(store.generations())
    for run in runs:
        run.close()
    if LocalStore(str(place)).generations():
        loaded = CheckpointEngine(str(place)).load()
        assert loaded is not None
        assert torch.equal(loaded.tree["w"], state((loaded.view[0] - 1) * 1000 + loaded.step)["w"])


@pytest.mark.parametrize("kind", ["fifo", "socket", "device", "directory", "huge"])
@pytest.mark.parametrize("where", ["manifests/g0000000001.json", "data"])
def test_what_is_no_file_is_told_and_never_waited_for(tmp_path: pathlib.Path, kind: str, where: str) -> None:
    engine = CheckpointEngine(str(tmp_path), retention=Retention(keep_last=1))
    saved(engine, 1)
    place = tmp_path / where
    if where == "data":
        place = next((tmp_path / "data").glob("*.json"))
        place.unlink()
    _put(place, kind)
    ended = [_ckpt(*words) for words in (["ls", tmp_path], ["verify", tmp_path, "--all"])]
    assert ended[1].returncode == 7
    said = "holds 1099511627776 bytes" if kind == "huge" else "is no regular file"
    assert said in "".join(end.stdout for end in ended)
    if kind != "directory":  # those are not ours to remove
        saved(engine, 2)
        saved(engine, 3)
        assert verify(engine.store, engine.store.generations()[-1]).problems == []
        assert len(engine.store.generations()) <= 2
    engine.close()


def _put(place: pathlib.Path, kind: str) -> None:
    if kind == "fifo":
        os.mkfifo(place)
    elif kind == "socket":
        os.mknod(place, stat.S_IFSOCK | 0o600)  # a bound socket's path would have to be short
    elif kind == "device":
        if os.geteuid() != 0:
            pytest.skip("only root makes devices")
        os.mknod(place, stat.S_IFCHR | 0o600, os.makedev(5, 0))
    elif kind == "directory":
        place.mkdir()
    else:
        with place.open("wb") as file:
            file.truncate(1 << 40)


def _ckpt(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "outlast", "ckpt", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)
