"""One request to the page's application, without a socket."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import Iterable, Mapping
from typing import Any

from starlette.routing import Route

METHODS = ["GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "QUERY", "ANYTHING"]


def places(app: Any, **parts: Iterable[str]) -> list[str]:
    """Addresses of every route that the application itself has, so that a new one is tried without being named here.
    `parts`: what may stand for each part in braces; KeyError for a part of which that is not said."""
    found: list[str] = []
    for route in app._app.routes:
        assert isinstance(route, Route), f"say how {route} is tried"
        names = re.findall(r"{(\w+)", route.path)
        for chosen in itertools.product(*(parts[name] for name in names)):
            given = dict(zip(names, chosen, strict=True))
            found.append(re.sub(r"{(\w+)[^}]*}", lambda part, given=given: given[part[1]], route.path))  # type: ignore[misc]
    return found


def ask(
    app: Any, path: str, headers: Mapping[str, str] | None = None, *, method: str = "GET", body: bytes = b""
) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of the answer."""
    path, _, query = path.partition("?")
    given = {"host": "127.0.0.1:8642"} if headers is None else headers
    scope = {
        "type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": query.encode(),
        "headers": [(key.encode(), value.encode()) for key, value in given.items()],
        "http_version": "1.1", "scheme": "http", "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 8642),
    }  # fmt: skip
    sent: list[dict[str, Any]] = []
    told = [{"type": "http.request", "body": body, "more_body": False}, {"type": "http.disconnect"}]

    async def receive() -> dict[str, Any]:
        return told.pop(0) if len(told) > 1 else told[0]

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    asyncio.run(app(scope, receive, send))
    answer = b"".join(message.get("body", b"") for message in sent)
    return sent[0]["status"], {k.decode(): v.decode() for k, v in sent[0]["headers"]}, answer
