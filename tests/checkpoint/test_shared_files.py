"""Files that somebody else holds too are never written over: those of hard-linked backups, those being copied."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
from collections.abc import Callable
from typing import Any

import pytest
import torch

from outlast.checkpoint import CheckpointEngine, LocalStore, verify
from outlast.checkpoint.fs import Disk
from outlast.checkpoint.retention import Retention


def engine_at(place: pathlib.Path, fs: Disk | None = None) -> CheckpointEngine:
    store = LocalStore(str(place), fs=fs)
    return CheckpointEngine(store, retention=Retention(keep_last=2), incremental=False)


def saved(engine: CheckpointEngine, step: int) -> int:
    handle = engine.save(step, {"w": torch.full((3000,), float(step)), "b": torch.arange(step, step + 5)})
    assert handle is not None
    return engine.commit(handle)


def whole(place: pathlib.Path) -> list[int]:
    """The generations of a place, all of them right."""
    store = LocalStore(str(place))
    for generation in store.generations():
        assert verify(store, generation).problems == []
    return store.generations()


def linked(source: pathlib.Path, target: pathlib.Path, tool: str) -> None:
    if tool == "rsync" and shutil.which("rsync") is None:
        pytest.skip("no rsync here")
    links = {"cp": ["cp", "-al", str(source), str(target)],
             "rsync": ["rsync", "-a", f"--link-dest={source}", f"{source}/", str(target)]}  # fmt: skip
    subprocess.run(links[tool], check=True)


@pytest.mark.parametrize("tool", ["cp", "rsync"])
def test_a_hard_linked_backup_survives_going_on(tmp_path: pathlib.Path, tool: str) -> None:
    place, backup = tmp_path / "run", tmp_path / "backup"
    engine = engine_at(place)
    for step in range(5):  # so that there are spare files as well
        saved(engine, step)
    linked(place, backup, tool)
    for step in range(5, 30):
        saved(engine, step)
    assert whole(backup) == [3, 4]
    loaded = CheckpointEngine(str(backup)).load()
    assert loaded is not None
    assert torch.equal(loaded.tensors["w"], torch.full((3000,), 4.0))
    assert whole(place) == [28, 29]
    assert {f.stat().st_nlink for f in (place / "data").iterdir()} == {1}, "what goes on is its own again"
    engine.close()


def test_a_backup_that_is_trained_on_and_its_original_do_each_other_no_harm(tmp_path: pathlib.Path) -> None:
    places = [tmp_path / "a", tmp_path / "b"]
    engines = [engine_at(places[0])]
    for step in range(4):
        saved(engines[0], step)
    linked(places[0], places[1], "cp")
    engines.append(engine_at(places[1]))
    for step in range(4, 12):
        for engine, place in zip(engines, places, strict=True):
            saved(engine, step)
            assert len(whole(place)) == 2
    for engine in engines:
        engine.close()


class Meddler(Disk):
    """Does something right before a call, the moment at which somebody else may be as fast as this."""

    def __init__(self, moment: str, act: Callable[[str], None]) -> None:
        self.moment, self.act = moment, act

    def rename(self, source: str, target: str) -> None:
        if self.moment == "into spare" and "/spare/" in target:
            self.act(source)
        if self.moment == "out of spare" and "/spare/" in source:
            self.act(source)
        super().rename(source, target)

    def is_only_ours(self, fd: int) -> bool:
        if self.moment == "before it is asked":
            self.act(os.readlink(f"/proc/self/fd/{fd}"))
        return super().is_only_ours(fd)


@pytest.mark.parametrize("moment", ["into spare", "out of spare", "before it is asked"])
def test_a_link_that_is_made_at_the_last_moment_keeps_its_bytes(tmp_path: pathlib.Path, moment: str) -> None:
    kept: dict[pathlib.Path, bytes] = {}

    def link(path: str) -> None:
        copy = tmp_path / f"link-{len(kept)}"
        os.link(path, copy)
        kept[copy] = copy.read_bytes()

    engine = engine_at(tmp_path / "run", Meddler(moment, link))
    for step in range(12):
        saved(engine, step)
    assert len(kept) >= 3
    assert all(copy.read_bytes() == data for copy, data in kept.items())
    assert whole(tmp_path / "run") == [10, 11]
    engine.close()


def test_a_copy_that_is_being_read_goes_on_reading_what_it_began(tmp_path: pathlib.Path) -> None:
    held: list[tuple[Any, bytes]] = []

    def read(path: str) -> None:
        held.append((open(path, "rb"), pathlib.Path(path).read_bytes()))  # noqa: SIM115

    engine = engine_at(tmp_path, Meddler("into spare", read))
    for step in range(8):
        saved(engine, step)
    assert len(held) == 6
    for file, data in held:
        assert file.read() == data
        file.close()
    engine.close()


def test_where_the_kernel_does_not_tell_who_reads_nothing_is_written_over(tmp_path: pathlib.Path) -> None:
    class Untold(Disk):
        def is_only_ours(self, fd: int) -> bool:
            return False

    engine = engine_at(tmp_path, Untold())
    for step in range(6):
        saved(engine, step)
    assert whole(tmp_path) == [4, 5]
    engine.close()


@pytest.mark.parametrize("kind", ["fifo", "link"])
def test_what_is_no_file_among_the_spare_ones_is_thrown_away(tmp_path: pathlib.Path, kind: str) -> None:
    engine = engine_at(tmp_path)
    saved(engine, 0)
    odd = tmp_path / "spare" / "odd.bin"
    if kind == "fifo":
        os.mkfifo(odd)
    else:
        odd.symlink_to(tmp_path / "elsewhere")
    saved(engine, 1)
    assert whole(tmp_path) == [0, 1]
    assert not os.path.lexists(odd)
    engine.close()
