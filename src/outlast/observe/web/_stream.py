"""Server-sent events: to each reader of a run the parts that changed since its last message, newest only.

Role: who is told what, and when. Invariants: a stream holds at most one message for its reader; a reader that does not
take it in time is let go; readers that were told the same are sent the same bytes, which are put together once. No
reader has a timer of its own: a beat that all share stands for them, as a hundred readers are told something a second.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from outlast.observe.web._board import Board, SentPart, Shown

__all__ = ["Ears", "ReaderStream"]

_MAX_STREAMS = 512
_BEAT_S = 15.0
_BEATS_TO_TAKE = 3  # a message that is there for so many beats was there for two of their intervals at least

_Parts = Mapping[str, SentPart]
_NOTHING: _Parts = {}


class _Ear:
    """One stream. `due`: a word is to be said also where there is no news; `beats`: since its message is not taken."""

    def __init__(self) -> None:
        self.news = asyncio.Event()
        self.due, self.sending, self.beats = True, False, 0
        self.talk: asyncio.Task[None] | None = None


class Ears:
    """The streams that wait for something new."""

    def __init__(self) -> None:
        self.waiting: set[_Ear] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._next: asyncio.TimerHandle | None = None

    def attach(self) -> None:
        """Serve on the loop that runs, and begin the beat."""
        self._loop = asyncio.get_running_loop()
        self._again()

    def detach(self) -> None:
        """End the beat."""
        if self._next is not None:
            self._next.cancel()

    def wake(self) -> None:
        """Called from the board's thread."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._wake_all)

    def beat(self) -> None:
        """Let go of who takes nothing; have a word said to the others, so that proxies and readers know that both sides
        live."""
        for ear in self.waiting:
            if not ear.sending:
                ear.due = True
                ear.news.set()
                continue
            ear.beats += 1
            if ear.beats >= _BEATS_TO_TAKE and ear.talk is not None:
                ear.talk.cancel()

    def _again(self) -> None:
        if self._loop is not None:
            self._next = self._loop.call_later(_BEAT_S, self._beat_and_again)

    def _beat_and_again(self) -> None:
        self.beat()
        self._again()

    def _wake_all(self) -> None:
        for ear in self.waiting:
            ear.news.set()


class ReaderStream:
    """The route of streams, an ASGI application."""

    def __init__(self, board: Board, ears: Ears) -> None:
        self._board, self._ears = board, ears
        self._made: dict[str, tuple[_Parts, _Parts, bytes]] = {}  # by run: between which parts the last message was

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        shown = self._board.runs.get(scope["path_params"]["run"])
        if shown is None or len(self._ears.waiting) >= _MAX_STREAMS:
            status, text = (404, "no such run\n") if shown is None else (503, "too many readers\n")
            await PlainTextResponse(text, status)(scope, receive, send)
            return
        ear = _Ear()
        self._ears.waiting.add(ear)
        ear.talk = talk = asyncio.create_task(self._talk(shown, ear, send))
        gone = asyncio.create_task(_until_gone(receive))
        try:
            await asyncio.wait({talk, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._ears.waiting.discard(ear)
            for task in (talk, gone):
                task.cancel()
            await asyncio.gather(talk, gone, return_exceptions=True)

    async def _talk(self, shown: Shown, ear: _Ear, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        told = _NOTHING
        while True:
            ear.news.clear()
            parts = shown.parts
            body = self._between(shown.name, told, parts)
            told = parts
            if body or ear.due:
                ear.due, ear.sending, ear.beats = False, True, 0
                await send({"type": "http.response.body", "body": body or b": still here\n\n", "more_body": True})
                ear.sending = False
            await ear.news.wait()

    def _between(self, name: str, told: _Parts, parts: _Parts) -> bytes:
        made = self._made.get(name)
        if made is None or made[0] is not told or made[1] is not parts:
            made = self._made[name] = (told, parts, _message(told, parts))
        return made[2]


def _message(told: _Parts, parts: _Parts) -> bytes:
    """What makes `parts` of those that a reader was told; empty for nothing. A part whose version before it was told
    costs its news, any other one the whole of it."""
    lines: list[bytes] = []
    for name, part in parts.items():
        known = told[name].version if name in told else -1
        if known != part.version:
            news = part.news if known == part.version - 1 else part.data
            lines.append(b"event: %s\ndata: %s\n\n" % (name.encode(), news))
    return b"".join(lines)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
