"""Asking a run for something through the page: only with the key, from this page, to this server, and meant."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("starlette", reason="the extra serve is not installed")

from tests.observe.web.asking import METHODS, ask, places

from outlast.cli._serve import WISHES, ask_for_page
from outlast.core import events as ev
from outlast.core.protocol import operator_messages as om
from outlast.errors import ConfigError, EnvironmentFault
from outlast.journal import Journal
from outlast.observe.web import Board, Wishes, build_app

KEY = "a-key-of-this-server"
HOST = "127.0.0.1:8642"
RIGHT = {"host": HOST, "content-type": "application/json", "x-outlast-key": KEY}
SURE = b'{"sure": true}'
WRONG = [
    {"x-outlast-key": ""}, {"x-outlast-key": KEY[:-1]}, {"x-outlast-key": KEY + "x"},
    {"host": "evil.example"}, {"host": "127.0.0.1.evil.example"}, {"host": "[::2]:8642"}, {"host": ""},
    {"origin": "http://evil.example"}, {"origin": "null"}, {"origin": "http://127.0.0.1:1"},
    {"sec-fetch-site": "cross-site"}, {"sec-fetch-site": "same-site"}, {"sec-fetch-site": "none"},
    {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"},
    {"content-type": "text/plain"}, {"content-type": "application/x-www-form-urlencoded"},
]  # fmt: skip


class Asked:
    def __init__(self) -> None:
        self.calls: list[tuple[Path, str]] = []
        self.error: Exception | None = None

    def __call__(self, run_dir: Path, wish: str, what: str) -> str:
        if self.error is not None:
            raise self.error
        self.calls.append((run_dir, f"{wish} {what}".strip()))
        return "it was asked"


@pytest.fixture
def asked() -> Asked:
    return Asked()


@pytest.fixture
def board(tmp_path: Path) -> Board:
    start = ev.RunStarted(at_s=1.0, run_id="r", command=[], num_replicas=1, num_spares=0, signature={}, config={})
    with Journal.create(tmp_path / "brave") as journal:
        journal.append(start)
    board = Board([tmp_path / "brave"], clock=lambda _: 2.0)
    board.turn()
    return board


@pytest.fixture
def app(board: Board, asked: Asked) -> Any:
    return build_app(board, follow=False, wishes=Wishes({"save": "", "stop": "", "drain": "host"}, asked, KEY))


@pytest.fixture
def whole(board: Board, asked: Asked) -> Any:
    """The application with all that may be asked for."""
    return build_app(board, follow=False, wishes=Wishes(WISHES, asked, KEY))


def every_place() -> list[str]:
    nobody = Wishes(WISHES, lambda *_: "", KEY)
    return places(build_app(Board([]), follow=False, wishes=nobody), run=["brave"], name=["app.js"], wish=WISHES)


def meant(path: str) -> bytes:
    """The body with which this wish would be asked."""
    about = WISHES.get(path.rpartition("/")[2])
    return json.dumps({"sure": True, "what": "8"}).encode() if about else SURE


def held(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def post(app: Any, path: str, headers: dict[str, str], body: bytes = SURE, method: str = "POST") -> tuple[int, str]:
    status, _, answer = ask(app, path, headers, method=method, body=body)
    return status, answer.decode()


def test_a_wish_with_the_key_is_asked(app: Any, asked: Asked, tmp_path: Path) -> None:
    assert post(app, "/api/runs/brave/ask/stop", RIGHT) == (202, "outlast: it was asked\n")
    own = RIGHT | {"origin": f"http://{HOST}", "sec-fetch-site": "same-origin"}
    assert post(app, "/api/runs/brave/ask/save", own)[0] == 202
    assert asked.calls == [(tmp_path / "brave", "stop"), (tmp_path / "brave", "save")]


def test_every_place_that_is_tried_is_there_and_each_wish_is_asked(whole: Any, asked: Asked) -> None:
    """So that what is refused below is refused for what is wrong with it."""
    tried = {path: post(whole, path, RIGHT, meant(path), method="GET")[0] for path in every_place()}
    assert {path for path, status in tried.items() if status != 200} == {f"/api/runs/brave/ask/{w}" for w in WISHES}
    for path in every_place():
        assert post(whole, path, RIGHT, meant(path))[0] == (202 if "/ask/" in path else 405)
    assert [call for _, call in asked.calls] == [
        f"{wish} {'8' if about else ''}".strip() for wish, about in WISHES.items()
    ]


@pytest.mark.parametrize("path", every_place())
def test_without_actions_no_route_takes_anything(board: Board, path: str) -> None:
    app = build_app(board, follow=False)
    for method in METHODS[2:]:
        assert post(app, path, RIGHT, meant(path), method)[0] == 405


@pytest.mark.parametrize("wrong", WRONG, ids=str)
@pytest.mark.parametrize("path", every_place())
def test_nothing_changes_a_run_without_key_or_from_elsewhere(
    whole: Any, asked: Asked, tmp_path: Path, path: str, wrong: dict[str, str]
) -> None:
    before = held(tmp_path)
    for method in METHODS:
        status, told = post(whole, path, RIGHT | wrong, meant(path), method)
        if method in ("GET", "HEAD") and "host" not in wrong:
            assert status in (200, 403, 405)
        else:
            assert status in (403, 405, 415)
        assert "host" not in wrong or (status == 403 and "brave" not in told)
    assert asked.calls == []
    assert held(tmp_path) == before


@pytest.mark.parametrize("path", ["/api/runs/brave/ask/stop", "/api/runs/brave/ask/save"])
def test_looking_at_a_wish_s_place_asks_nothing(app: Any, asked: Asked, path: str) -> None:
    for method in ("GET", "HEAD"):
        assert post(app, path, RIGHT, method=method)[0] == 405
    assert asked.calls == []


@pytest.mark.parametrize("body", [b"", b"{}", b'{"sure": 1}', b'{"sure": "true"}', b"[true]", b"\xff", b"x" * 4096])
def test_a_wish_must_be_meant(app: Any, asked: Asked, body: bytes) -> None:
    assert post(app, "/api/runs/brave/ask/stop", RIGHT, body)[0] == 400
    assert asked.calls == []


def test_what_cannot_be_asked(app: Any, asked: Asked) -> None:
    assert post(app, "/api/runs/brave/ask/evict", RIGHT)[0] == 404
    assert post(app, "/api/runs/other/ask/stop", RIGHT)[0] == 404
    asked.error = ConfigError("the run is over", remedy="look")
    assert post(app, "/api/runs/brave/ask/stop", RIGHT) == (409, "outlast: [CONFIG] the run is over\n  remedy: look\n")
    asked.error = EnvironmentFault("only starting")
    assert post(app, "/api/runs/brave/ask/stop", RIGHT)[0] == 503


def test_keys_cannot_be_guessed(app: Any, asked: Asked) -> None:
    for guess in range(20):
        assert post(app, "/api/runs/brave/ask/stop", RIGHT | {"x-outlast-key": str(guess)})[0] == 403
    assert post(app, "/api/runs/brave/ask/stop", RIGHT)[0] == 429
    assert asked.calls == []


def test_the_page_is_told_what_may_be_asked(app: Any, board: Board) -> None:
    assert json.loads(post(app, "/api/runs", RIGHT, method="GET")[1])[0]["asks"] == {
        "save": "", "stop": "", "drain": "host",
    }  # fmt: skip
    reader = build_app(board, follow=False)
    assert json.loads(post(reader, "/api/runs", RIGHT, method="GET")[1])[0]["asks"] == {}
    assert KEY not in post(app, "/", RIGHT, method="GET")[1]


def test_a_wish_names_what_it_is_about_and_nothing_else_does(app: Any, asked: Asked, tmp_path: Path) -> None:
    def drain(said: dict[str, Any], wish: str = "drain") -> int:
        return post(app, f"/api/runs/brave/ask/{wish}", RIGHT, json.dumps({"sure": True, **said}).encode())[0]

    assert drain({"what": " h1 "}) == 202
    for wrong in ({}, {"what": ""}, {"what": 3}, {"what": ["h1"]}, {"what": "x" * 300}):
        assert drain(wrong) == 400
    assert drain({"what": "h1"}, "stop") == 400
    assert asked.calls == [(tmp_path / "brave", "drain h1")]


def test_what_the_page_asks_is_what_the_commands_ask(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sent: list[Any] = []
    monkeypatch.setattr("outlast.cli._operator._here", lambda run: (("127.0.0.1", 1), b"", ""))
    answer = om.Answered(epoch=1, accepted=True, text="it leaves")
    monkeypatch.setattr("outlast.cli._operator._answer", lambda *given: sent.append(given[-1]) or answer)  # type: ignore[func-returns-value]
    for wish, what in (("evict", "r2.1"), ("drain", "h1"), ("undrain", "h1"), ("scale", "8")):
        assert ask_for_page(tmp_path, wish, what) == "it leaves"
    plain = [(type(message).__name__, msgspec.structs.asdict(message)) for message in sent]
    for _, fields in plain:
        fields.pop("asker")
    assert plain == [
        ("EvictAsked", {"replica": "r2.1", "now": False}), ("DrainAsked", {"host": "h1", "undo": False}),
        ("DrainAsked", {"host": "h1", "undo": True}), ("ScaleAsked", {"replicas": 8}),
    ]  # fmt: skip
    for number in ("many", "0", "-1", "100001", "1.5", "²"):
        with pytest.raises(ConfigError, match="no number of replicas"):
            ask_for_page(tmp_path, "scale", number)
    answer = om.Answered(epoch=1, accepted=False, text="no host of this name", remedy="outlast status")
    with pytest.raises(ConfigError, match="no host of this name"):
        ask_for_page(tmp_path, "drain", "h9")
