"""Who may ask: this machine's own browsers and tools, by this machine's own names.

Role: one ASGI middleware before everything else. A page on the internet can make a browser look up its own name as
127.0.0.1 (DNS rebinding) and then read what answers there; so a request whose `Host` is not a name of loopback is
refused, and so is one that another site's page makes. Reading is all there is, unless the server takes wishes: then
POST to their one route passes on to `_wishes.py`, which asks for the key. Other methods are refused.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["LOOPBACK_NAMES", "Guard", "host_of"]

LOOPBACK_NAMES = frozenset({"127.0.0.1", "localhost", "::1"})
_WISH = re.compile(r"/api/runs/[^/]+/ask/[^/]+")
_HEADERS = (
    (b"content-security-policy",
     b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self';"
     b" base-uri 'none'; form-action 'none'; frame-ancestors 'none'"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-cache"),
)  # fmt: skip


class Guard:
    """Wraps an app. `names`: hosts that a request may be made to, besides loopback's. `takes_wishes`: whether POST to
    the route of wishes is let through."""

    def __init__(self, app: ASGIApp, names: Collection[str] = (), *, takes_wishes: bool = False) -> None:
        self._app, self._names = app, LOOPBACK_NAMES | {name.lower() for name in names}
        self._takes_wishes = takes_wishes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        refusal = self._refusal(scope) if scope["type"] == "http" else "only HTTP is served"
        if refusal is None:
            await self._app(scope, receive, _with_headers(send))
        elif scope["type"] == "http":
            status = 405 if refusal.startswith("method") else 403
            await PlainTextResponse(f"outlast: {refusal}\n", status)(scope, receive, _with_headers(send))
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _refusal(self, scope: Scope) -> str | None:
        headers = scope["headers"]
        hosts = [value.decode("latin-1") for key, value in headers if key == b"host"]
        if len(hosts) != 1 or host_of(hosts[0]) not in self._names:
            told = hosts[0] if hosts else "none"
            return f"this is not {told}; ask for 127.0.0.1, or serve with --allowed-host {host_of(told)}"
        sites = [value for key, value in headers if key == b"sec-fetch-site"]
        navigates = (b"sec-fetch-mode", b"navigate") in headers
        if sites and sites[0] in (b"cross-site", b"same-site") and not navigates:
            return "another site's page may not read this"
        if self._takes_wishes and scope["method"] == "POST" and _WISH.fullmatch(scope["path"]):
            return "another site's page may not ask" if sites and sites[0] != b"same-origin" else None
        if scope["method"] not in ("GET", "HEAD"):
            return f"method {scope['method']}: this server only shows"
        return None


def host_of(header: str) -> str:
    """The name in a `Host` header, without its port, in small letters: `[::1]:80` is `::1`."""
    if header.startswith("["):
        return header[1:].partition("]")[0].lower()
    return header.partition(":")[0].rstrip(".").lower() if header.count(":") <= 1 else header.lower()


def _with_headers(send: Send) -> Send:
    async def wrapped(message: Message) -> None:
        if message["type"] == "http.response.start":
            given = {key for key, _ in message["headers"]}
            message["headers"] = [*message["headers"], *(pair for pair in _HEADERS if pair[0] not in given)]
        await send(message)

    return wrapped
