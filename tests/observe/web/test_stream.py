"""What a stream says: each reader holds what was published, and of what grows at its end only that is sent."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the extra serve is not installed")

from tests.observe.web.asking import ask

from outlast.core import events as ev
from outlast.journal import Journal
from outlast.observe.web import Board, build_app
from outlast.observe.web._board import Shown
from outlast.observe.web._stream import Ears, ReaderStream

SCOPE = {
    "type": "http", "method": "GET", "path": "/api/runs/brave/stream", "raw_path": b"", "query_string": b"",
    "headers": [(b"host", b"localhost")], "http_version": "1.1", "scheme": "http", "path_params": {"run": "brave"},
}  # fmt: skip
PATIENCE_S = 60.0


class Reader:
    """A reader that takes one message each time that it is let, and folds the parts as the page does."""

    def __init__(self, app: Any) -> None:
        self.parts: dict[str, Any] = {}
        self.num_bytes: dict[str, int] = {}
        self.messages: list[bytes] = []
        self._may, self.gone, self._took = asyncio.Semaphore(1), asyncio.Event(), asyncio.Event()
        self.task = asyncio.create_task(app(SCOPE, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        if message["type"] != "http.response.body":
            return
        await self._may.acquire()
        self.messages.append(message["body"])
        for event in message["body"].decode().split("\n\n")[:-1]:
            if event.startswith("event: "):
                name, _, data = event.removeprefix("event: ").partition("\ndata: ")
                self.num_bytes[name] = self.num_bytes.get(name, 0) + len(data)
                self._fold(name, json.loads(data))
        self._took.set()

    def _fold(self, name: str, said: Any) -> None:
        if name == "head":
            self.parts.pop("absent", None)
        if name == "curves" and any(part["first"] for part in said.values()):
            for curve, part in said.items():
                part["rows"] = self.parts["curves"][curve]["rows"][: part["first"]] + part["rows"]
                part["first"] = 0
        self.parts[name] = said

    async def take(self) -> None:
        """Take the message that is there or comes next; the first may be taken without being let."""
        self._took.clear()
        self._may.release()
        await asyncio.wait_for(self._took.wait(), PATIENCE_S)

    async def first(self) -> None:
        await asyncio.wait_for(self._took.wait(), PATIENCE_S)

    async def go(self) -> None:
        self.gone.set()
        await asyncio.wait_for(self.task, PATIENCE_S)


def progress(start_s: float, second: int, step: int) -> ev.ProgressMade:
    at_s = start_s + 10.0 + second
    return ev.ProgressMade(
        at_s=at_s, view=[1, 3], stable=step, losses=[(s, 1.0 / (1 + s)) for s in range(step - 5, step)], step_s=0.1,
        first=step - 5, committed=step, committed_at_s=at_s, seconds={"productive": 0.9, "idle": 0.1},
    )  # fmt: skip


@pytest.fixture
def journal(tmp_path: Path, story: Any) -> Iterator[Journal]:
    with Journal.create(tmp_path / "brave") as journal:
        journal.append_many([*story.started, *story.training, *story.killed])
        assert journal.flush()
        yield journal


def board_of(tmp_path: Path) -> Board:
    """Each look is seconds later than the one before, so that each tells what is new."""
    now_s = iter(range(10_000_000))
    board = Board([tmp_path / "brave"], clock=lambda _: 5_000.0 + 5 * next(now_s))
    board.turn()
    board.turn()
    return board


def by_hand() -> Ears:
    """On the loop that runs, and beating when it is told to only."""
    ears = Ears()
    ears.attach()
    ears.detach()
    return ears


@pytest.mark.parametrize("seed", range(3))
def test_each_reader_holds_what_was_published_however_often_it_reads(
    tmp_path: Path, story: Any, journal: Journal, seed: int
) -> None:
    asyncio.run(_readers(board_of(tmp_path), journal, story.start_s, random.Random(seed)))


async def _readers(board: Board, journal: Journal, start_s: float, chance: random.Random) -> None:
    ears = by_hand()
    board.on_change = ears.wake
    stream = ReaderStream(board, ears)
    eager, late = Reader(stream), Reader(stream)
    await eager.first()
    await late.first()
    step = 70
    for second in range(80):
        step += chance.choice([5, 5, 5, 20, -10])
        journal.append(progress(start_s, second, step))
        assert await asyncio.to_thread(journal.flush)
        assert board.turn()
        board.on_change()
        published = {name: json.loads(part.data) for name, part in board.runs["brave"].parts.items()}
        await eager.take()
        assert eager.parts == published
        if chance.random() < 0.2:
            before = len(late.messages)
            while late.parts != published:
                await late.take()
            assert len(late.messages) - before <= 2, "what waited for it, which is older, and then what is newest"
        if chance.random() < 0.1:
            fresh = Reader(stream)
            await fresh.first()
            assert fresh.parts == published
            await fresh.go()
    assert eager.num_bytes["curves"] < late.num_bytes["curves"], "who skips some is told all anew, and never more often"
    assert eager.num_bytes["curves"] < 80 * len(board.runs["brave"].parts["curves"].data) / 3
    await eager.go()
    await late.go()
    assert not ears.waiting


def test_readers_that_were_told_the_same_are_sent_the_same_bytes(tmp_path: Path, story: Any, journal: Journal) -> None:
    async def crowd(board: Board) -> None:
        ears = by_hand()
        stream = ReaderStream(board, ears)
        readers = [Reader(stream) for _ in range(20)]
        for reader in readers:
            await reader.first()
        journal.append(progress(story.start_s, 1, 80))
        assert await asyncio.to_thread(journal.flush)
        board.turn()
        ears.wake()
        for reader in readers:
            await reader.take()
        for number in (0, 1):
            assert len({id(reader.messages[number]) for reader in readers}) == 1, "put together once"
        for reader in readers:
            await reader.go()

    asyncio.run(crowd(board_of(tmp_path)))


def test_who_takes_nothing_is_let_go_and_who_is_told_nothing_hears_that_it_lives(
    tmp_path: Path, journal: Journal
) -> None:
    async def quiet(board: Board) -> None:
        ears = by_hand()
        stream = ReaderStream(board, ears)
        awake, stuck = Reader(stream), Reader(stream)
        for reader in (awake, stuck):
            await reader.first()
        for _ in range(3):  # the first is the word that `stuck` does not take
            assert not stuck.task.done()
            ears.beat()
            await awake.take()
            assert awake.messages[-1] == b": still here\n\n"
        assert not stuck.task.done()
        ears.beat()
        await asyncio.wait_for(stuck.task, PATIENCE_S)
        assert len(ears.waiting) == 1
        ears.wake()  # for the news of another run: nothing is said of this one
        await awake.go()
        assert len(awake.messages) == 4

    asyncio.run(quiet(board_of(tmp_path)))


def test_beliefs_take_a_small_share_of_a_processor_and_are_told_at_the_end(
    tmp_path: Path, story: Any, journal: Journal
) -> None:
    """A fold of the whole story that takes half a second is made each 250 s, and once when the run is over."""
    told: list[int] = []
    spent_s = 0.0

    def beliefs(events: Any, useful: Any) -> list[dict[str, object]]:
        nonlocal spent_s
        spent_s += 0.5
        told.append(len(events))
        return []

    shown = Shown("brave", tmp_path / "brave", beliefs, lambda: spent_s)
    now_s = story.start_s + 20.0
    for second in range(0, 600, 10):
        journal.append(progress(story.start_s, second, 70 + 5 * second))
        assert journal.flush()
        shown.turn(now_s + second)
    assert len(told) == 3
    journal.append_many(story.finished)
    assert journal.flush()
    shown.turn(now_s + 601)
    shown.turn(now_s + 602)
    assert len(told) == 4
    shown.reading.close()


def test_the_picture_has_every_part_whole(tmp_path: Path, story: Any, journal: Journal) -> None:
    board = board_of(tmp_path)
    for second in range(3):
        journal.append(progress(story.start_s, second, 70 + 5 * second))
        assert journal.flush()
        board.turn()
    picture = json.loads(ask(build_app(board, follow=False), "/api/runs/brave/picture")[2])
    history = board.runs["brave"].reading.fold.history
    for name, curve in (("losses", history.losses), ("times", history.times)):
        assert picture["curves"][name] == {**curve.head, "first": 0, "rows": curve.rows()}
