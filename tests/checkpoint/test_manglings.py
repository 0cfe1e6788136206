"""A directory of checkpoints is mangled, in twenty ways and hundreds of places: each load gives right bits or refuses.

Two writers, three generations, another run to mix up with. Whatever is done, by a disk, a copy that went wrong or a
person: no wrong tensor is ever loaded, an older generation serves where one is whole, and `verify` names what is wrong.
"""

from __future__ import annotations

import os
import pathlib
import random
import shutil
from collections.abc import Callable

import pytest
import torch

from outlast.checkpoint import CheckpointEngine, LocalStore, Retention, verify
from outlast.core.protocol.saves.commit import SaveWanted, StepStable
from outlast.errors import CheckpointError

from .test_fleet import Fleet, state

FEW, MANY = range(1), range(24)
NEWEST = 3


class Three(Fleet):
    """Keeps three generations."""

    def _engine(self, replica: int, num: int) -> CheckpointEngine:
        return CheckpointEngine(
            str(self.path), replica=replica, num_replicas=num, run="r", retention=Retention(keep_last=3)
        )


def made(path: pathlib.Path) -> pathlib.Path:
    fleet = Three(path, 2)
    for step in range(1, NEWEST + 1):
        fleet.send(SaveWanted(step=step), StepStable(step=step))
        fleet.deliver(0, 1)
    fleet.close()
    assert len(LocalStore(str(path)).generations()) == NEWEST
    return path


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, pathlib.Path]:
    """(the run's, another run's)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("outlast.checkpoint._writer.CHUNK_BYTES", 8192)
        base = tmp_path_factory.mktemp("mangled")
        return made(base / "mine"), made(base / "other")


class Mangled:
    """A copy, and what chance chose to do to it."""

    def __init__(self, here: pathlib.Path, other: pathlib.Path, draw: random.Random) -> None:
        self.here, self.other, self.draw = here, other, draw

    def files(self, kind: str = "", place: pathlib.Path | None = None) -> list[pathlib.Path]:
        root = place or self.here
        found = {
            "head": root.glob("manifests/*.json"),
            "part": root.glob("data/*.json"),
            "data": root.glob("data/*.bin"),
        }
        return sorted(path for name, paths in found.items() if kind in ("", name) for path in paths)

    def one(self, kind: str = "", place: pathlib.Path | None = None) -> pathlib.Path:
        return self.draw.choice(self.files(kind, place))

    def change(self, path: pathlib.Path, wrong: Callable[[bytearray], None]) -> None:
        data = bytearray(path.read_bytes())
        wrong(data)
        path.write_bytes(data)

    def span(self, data: bytearray) -> slice:
        at = self.draw.randrange(len(data))
        return slice(at, min(len(data), at + self.draw.choice((1, 64, 4096))))


def flip(data: bytearray, draw: random.Random) -> None:
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)


def many_flips(m: Mangled) -> None:
    for _ in range(20):
        m.change(m.one(), lambda data: flip(data, m.draw))


def fill(m: Mangled, noise: bool) -> None:
    def wrong(data: bytearray) -> None:
        span = m.span(data)
        size = len(data[span])
        data[span] = m.draw.randbytes(size) if noise else bytes(size)

    m.change(m.one(), wrong)


def swap_pages(m: Mangled) -> None:
    def wrong(data: bytearray) -> None:
        size = max(1, min(4096, len(data) // 2))
        a, b = sorted(m.draw.sample(range(len(data) // size), 2))
        one, two = slice(a * size, (a + 1) * size), slice(b * size, (b + 1) * size)
        data[one], data[two] = data[two], data[one]

    m.change(m.one(), wrong)


def swap_files(m: Mangled, kind: str) -> None:
    a, b = m.draw.sample(m.files(kind), 2)
    one, two = a.read_bytes(), b.read_bytes()
    a.write_bytes(two)
    b.write_bytes(one)


def put(m: Mangled, kind: str, source: pathlib.Path) -> None:
    """Another file of the same kind in the place of one, as long as that was."""
    target = m.one(kind)
    data = source.read_bytes()
    target.write_bytes((data * 9)[: target.stat().st_size] if kind == "data" else data)


def instead(m: Mangled, make: Callable[[pathlib.Path], object]) -> None:
    path = m.one()
    path.unlink()
    make(path)


def link_to_another(m: Mangled) -> None:
    kind = m.draw.choice(("head", "part", "data"))
    path, target = m.draw.sample(m.files(kind), 2)
    path.unlink()
    path.symlink_to(target)


WAYS: dict[str, Callable[[Mangled], object]] = {
    "a bit": lambda m: m.change(m.one(), lambda data: flip(data, m.draw)),
    "twenty bits": many_flips,
    "a block of zeros": lambda m: fill(m, noise=False),
    "a block of noise": lambda m: fill(m, noise=True),
    "a file of zeros": lambda m: m.change(m.one(), lambda data: data.__setitem__(slice(None), bytes(len(data)))),
    "a file of noise": lambda m: m.change(m.one(), lambda d: d.__setitem__(slice(None), m.draw.randbytes(len(d)))),
    "cut": lambda m: os.truncate(path := m.one(), m.draw.randrange(path.stat().st_size)),
    "grown": lambda m: m.change(m.one(), lambda data: data.extend(m.draw.randbytes(m.draw.choice((1, 4096))))),
    "gone": lambda m: m.one().unlink(),
    "empty": lambda m: m.one().write_bytes(b""),
    "pages swapped": swap_pages,
    "files swapped": lambda m: swap_files(m, m.draw.choice(("part", "data", "head"))),
    "an older head": lambda m: shutil.copy(m.files("head")[0], m.files("head")[-1]),
    "a later head": lambda m: shutil.copy(m.one("head"), m.here / "manifests" / "g0000000007.json"),
    "another generation's part": lambda m: put(m, "part", m.one("part")),
    "another generation's data": lambda m: put(m, "data", m.one("data")),
    "another run's head": lambda m: put(m, "head", m.one("head", m.other)),
    "another run's part": lambda m: put(m, "part", m.one("part", m.other)),
    "another run's data": lambda m: put(m, "data", m.one("data", m.other)),
    "a link": link_to_another,
    "a directory": lambda m: instead(m, pathlib.Path.mkdir),
}  # fmt: skip


def right(tree: dict[str, object], step: int) -> bool:
    want = state(step)
    return tree["step"] == step and all(torch.equal(tree[k], want[k]) for k in ("w", "frozen"))  # type: ignore[arg-type]


@pytest.mark.parametrize("seeds", [FEW, pytest.param(MANY, marks=pytest.mark.campaign)], ids=["few", "many"])
@pytest.mark.parametrize("way", WAYS)
def test_a_mangled_directory_gives_right_bits_or_none(
    way: str, seeds: range, places: tuple[pathlib.Path, pathlib.Path], tmp_path: pathlib.Path
) -> None:
    older = found = 0
    for seed in seeds:
        here = tmp_path / str(seed)
        shutil.copytree(places[0], here)
        WAYS[way](Mangled(here, places[1], random.Random(f"{way} {seed}")))
        engine = CheckpointEngine(str(here))
        try:
            loaded = engine.load()
        except CheckpointError:
            loaded = None
        engine.close()
        store = LocalStore(str(here))
        problems = [problem for g in store.generations() for problem in verify(store, g).problems]
        found += bool(problems)
        if loaded is None:
            assert problems, f"seed {seed}: nothing serves, and verify sees nothing"
            continue
        assert right(loaded.tree, loaded.step), f"seed {seed}: a wrong tensor"
        older += loaded.step < NEWEST
        lost = not (here / "manifests" / "g0000000002.json").exists()  # a head that is gone was never published
        assert loaded.step == NEWEST or problems or lost, f"seed {seed}: an older one serves, and verify sees nothing"
        shutil.rmtree(here)
    assert seeds == FEW or found or way == "gone" or (way == "a link" and not older), "this way does no harm at all"
