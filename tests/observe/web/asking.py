"""One request to the page's application, without a socket."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any


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
