"""Asking a run for something through the page: who may, and how it is refused.

Role: one POST route. Nothing is asked without the key that the server printed on its terminal, whoever the request is
from; a page of another site cannot send what is wanted (a header and a type that browsers ask leave for), and is
refused for its origin besides. After a number of wrong keys nothing is taken until the server is started again. What a
wish does is not known here: the command line hands in how runs are asked.
"""

from __future__ import annotations

import hmac
import json
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from outlast.errors import ConfigError, OutlastError
from outlast.observe.web._board import Board

__all__ = ["KEY_HEADER", "Wishes", "wish_route"]

KEY_HEADER = "x-outlast-key"
_MAX_WRONG = 20
_MAX_BODY = 1024
_MAX_WHAT = 200


class Wishes:
    """What may be asked for, by name: what it is about (a replica, a host, a number), "" for the run itself.
    `ask(run_dir, name, what)` returns what to expect, or raises OutlastError."""

    def __init__(self, names: Mapping[str, str], ask: Callable[[Path, str, str], str], key: str) -> None:
        self.names, self.ask, self._key = dict(names), ask, key
        self._wrong, self._lock = 0, threading.Lock()

    def refusal(self, given: str) -> tuple[int, str] | None:
        """(status, why) unless this is the key."""
        with self._lock:
            if self._wrong >= _MAX_WRONG:
                return 429, "too many wrong keys; start outlast serve --actions again for a new one"
            if hmac.compare_digest(given.encode(), self._key.encode()):
                return None
            self._wrong += 1
        return 403, "this is not the key that outlast serve --actions printed"


def wish_route(board: Board, wishes: Wishes | None) -> Callable[[Request], object]:
    """The endpoint of POST /api/runs/{run}/ask/{wish}."""

    async def endpoint(request: Request) -> Response:
        if wishes is None:
            return _plain("this server only shows; outlast serve --actions takes wishes", 403)
        refused = _of_another_site(request) or wishes.refusal(request.headers.get(KEY_HEADER, ""))
        if refused is not None:
            return _plain(refused[1], refused[0])
        shown, wish = board.runs.get(request.path_params["run"]), request.path_params["wish"]
        if shown is None or wish not in wishes.names:
            return _plain(f"no such run, or none of {', '.join(wishes.names)}", 404)
        what = await _meant(request)
        if what is None or bool(what) != bool(wishes.names[wish]):
            of = f', "what": "{wishes.names[wish]}"' if wishes.names[wish] else ""
            return _plain(f'the body says what is meant: {{"sure": true{of}}}', 400)
        try:
            told = await run_in_threadpool(wishes.ask, shown.reading.run_dir, wish, what)
        except OutlastError as error:
            return _plain(str(error), 409 if isinstance(error, ConfigError) else 503)
        return _plain(told, 202)

    return endpoint


def _of_another_site(request: Request) -> tuple[int, str] | None:
    origin, host = request.headers.get("origin"), request.headers.get("host", "")
    if origin is not None and origin.partition("://")[2] != host:
        return 403, "another site's page may not ask"
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        return 415, "wishes are JSON"
    return None


async def _meant(request: Request) -> str | None:
    """What the wish is about, "" for the run; None unless the body is sure of it."""
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > _MAX_BODY:
            return None
    try:
        said = json.loads(body)
    except ValueError:
        return None
    if not isinstance(said, dict) or said.get("sure") is not True:
        return None
    what = said.get("what", "")
    return what.strip() if isinstance(what, str) and len(what) <= _MAX_WHAT else None


def _plain(text: str, status: int) -> Response:
    return PlainTextResponse(f"outlast: {text}\n", status)
