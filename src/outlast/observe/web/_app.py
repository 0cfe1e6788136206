"""The Starlette application: page, parts, rows, stream, metrics, probes.

Role: requests in, published parts out; it decides nothing and reads no journal itself. Invariants: no route changes
anything but the one of `_wishes.py`; nothing is fetched from another host. Streams are `_stream.py`'s.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from importlib import resources
from importlib.metadata import version
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from outlast.observe.web._board import Board, Shown
from outlast.observe.web._guard import Guard
from outlast.observe.web._metrics import CONTENT_TYPE, metrics_text
from outlast.observe.web._stream import Ears, ReaderStream
from outlast.observe.web._wishes import Wishes, wish_route

__all__ = ["build_app"]

_TYPES = {
    ".html": "text/html; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}  # fmt: skip
_MAX_ROWS = 500


def build_app(
    board: Board, *, allowed_hosts: Collection[str] = (), follow: bool = True, wishes: Wishes | None = None
) -> ASGIApp:
    """The application on a board. `follow`: whether it starts the board's thread; a test turns it by hand. `wishes`:
    what may be asked of runs; without it nothing."""
    ears = Ears()
    board.on_change = ears.wake

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        ears.attach()
        if follow:
            board.start()
        yield
        ears.detach()
        if follow:
            board.stop()

    app = Starlette(routes=_routes(board, ears, wishes), lifespan=lifespan)
    return Guard(app, allowed_hosts, takes_wishes=wishes is not None)


def _rows_asked(request: Request) -> tuple[str, int | None, int, float | None]:
    """Which rows of the timeline: what to show, from which one on, how many, near which moment. 400 for no numbers."""
    asked = request.query_params
    try:
        first = int(asked["first"]) if "first" in asked else None
        near_s = float(asked["near"]) if "near" in asked else None
        limit = min(_MAX_ROWS, max(1, int(asked.get("limit", "100"))))
    except ValueError as error:
        raise HTTPException(400, f"first and limit are whole numbers, near is in seconds: {error}") from error
    return asked.get("show", "story"), first, limit, near_s


def _routes(board: Board, ears: Ears, wishes: Wishes | None) -> list[Route]:
    async def page(_: Request) -> Response:
        return _asset("index.html")

    async def asset(request: Request) -> Response:
        return _asset(request.path_params["name"])

    async def runs(_: Request) -> Response:
        asks = wishes.names if wishes is not None else {}
        found = board.runs.items()
        return _json([{"name": name, "dir": str(s.reading.run_dir.resolve()), "asks": asks} for name, s in found])

    async def picture(request: Request) -> Response:
        parts = _shown(board, request).parts
        body = b",".join(msgspec.json.encode(name) + b":" + part.data for name, part in parts.items())
        return Response(b"{" + body + b"}", media_type="application/json")

    async def rows(request: Request) -> Response:
        return _json(await run_in_threadpool(_shown(board, request).rows, *_rows_asked(request)))

    async def metrics(_: Request) -> Response:
        text = await run_in_threadpool(lambda: metrics_text(board.scraped(), version("outlast")))
        return Response(text, media_type=CONTENT_TYPE)

    async def healthz(_: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def ready(_: Request) -> Response:
        if board.ready:
            return PlainTextResponse("ready\n")
        return PlainTextResponse("reading the journals; not all is known yet\n", 503)

    return [
        Route("/", page),
        Route("/page/{name}", asset),
        Route("/api/runs", runs),
        Route("/api/runs/{run}/picture", picture),
        Route("/api/runs/{run}/rows", rows),
        Route("/api/runs/{run}/stream", ReaderStream(board, ears)),
        Route("/api/runs/{run}/ask/{wish}", wish_route(board, wishes), methods=["POST"]),
        Route("/metrics", metrics),
        Route("/healthz", healthz),
        Route("/ready", ready),
    ]


def _asset(name: str) -> Response:
    place = resources.files("outlast.observe.web") / "page" / name
    ending = "." + name.rpartition(".")[2]
    if ending not in _TYPES or "/" in name or not place.is_file():
        raise HTTPException(404, "no such file")
    return Response(place.read_bytes(), media_type=_TYPES[ending])


def _shown(board: Board, request: Request) -> Shown:
    shown = board.runs.get(request.path_params["run"])
    if shown is None:
        raise HTTPException(404, "no such run; /api/runs lists them")
    return shown


def _json(content: Any) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")
