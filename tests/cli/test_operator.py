"""Asking a run for something: what is said where no answer comes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outlast.cli import _operator, main
from outlast.core.protocol import operator_messages as om
from outlast.errors import OutlastError
from outlast.journal import Journal


@pytest.mark.parametrize("broken", [ConnectionResetError("reset"), TimeoutError("too late")])
def test_who_gets_no_answer_is_told_whether_asking_twice_does_harm(
    monkeypatch: pytest.MonkeyPatch, broken: OSError
) -> None:
    def no_link(*given: Any) -> None:
        raise broken

    monkeypatch.setattr("outlast.runtime.transport.frames.Link", no_link)
    monkeypatch.setattr(_operator, "_ANSWER_S", 0.0)
    for asked, harmless in (
        (om.ScaleAsked(asker="operator:1", replicas=3), True),
        (om.DrainAsked(asker="operator:1", host="h1"), True),
        (om.EvictAsked(asker="operator:1", replica="r1"), False),
        (om.EvictAsked(asker="operator:1", replica="r1.1", now=True), False),
    ):
        with pytest.raises(OutlastError) as told:
            _operator._answer(_operator._Place(("127.0.0.1", 1), bytes(32), "", None), asked)
        assert ("does no harm" in str(told.value), "outlast status" in str(told.value)) == (harmless, not harmless)


@pytest.mark.parametrize("wish", [["save"], ["stop", "--yes"]])
def test_what_a_launcher_is_asked_is_answered_as_json_too(
    wish: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Journal.create(tmp_path / "run"):
        monkeypatch.setattr("outlast.cli._asking.ask_run", lambda run_dir, asked: f"{asked} it does")
        assert main([*wish, str(tmp_path / "run"), "--json"]) == 0
    told = {"run_dir": str(tmp_path / "run"), "accepted": True, "text": f"{wish[0]} it does"}
    assert json.loads(capsys.readouterr().out) == told
