"""Figures for other tools: every one of the journal's, once, in formats that others read."""

from __future__ import annotations

import json
import math
import struct
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outlast.cli import _export as export_module
from outlast.cli import main
from outlast.core import events as ev
from outlast.journal import Journal
from outlast.observe import JsonLines, MetricRow, TensorBoardFile, rows_of
from outlast.observe._export import _crc32c


def records(data: bytes) -> list[bytes]:
    """The bodies of TFRecords, each checksum held."""
    found = []
    while data:
        (size,) = struct.unpack("<Q", data[:8])
        body = data[12 : 12 + size]
        for part, crc in ((data[:8], data[8:12]), (body, data[12 + size : 16 + size])):
            plain = _crc32c(part)
            assert struct.unpack("<I", crc)[0] == ((plain >> 15 | plain << 17) + 0xA282EAD8) & 0xFFFFFFFF
        found.append(body)
        data = data[16 + size :]
    return found


def fields(data: bytes) -> dict[int, list[Any]]:
    """A protocol buffer's fields by number, undecoded."""
    found: dict[int, list[Any]] = {}

    def varint() -> int:
        nonlocal data
        value = shift = 0
        while True:
            byte, data = data[0], data[1:]
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while data:
        tag = varint()
        value: Any
        match tag & 7:
            case 0:
                value = varint()
            case 1:
                value, data = struct.unpack("<d", data[:8])[0], data[8:]
            case 2:
                size = varint()
                value, data = data[:size], data[size:]
            case _:
                value, data = struct.unpack("<f", data[:4])[0], data[4:]
        found.setdefault(tag >> 3, []).append(value)
    return found


def scalars(path: Path) -> list[tuple[int, str, float]]:
    found = []
    for body in records(path.read_bytes())[1:]:
        event = fields(body)
        for value in fields(event[5][0])[1]:
            scalar = fields(value)
            found.append((event.get(2, [0])[0], scalar[1][0].decode(), scalar[2][0]))
    return found


def test_the_checksum_is_the_published_one() -> None:
    assert _crc32c(b"123456789") == 0xE3069283
    assert _crc32c(bytes(32)) == 0x8A9136AA  # RFC 3720, B.4


def test_tensorboard_s_files_hold_every_figure(tmp_path: Path, story: Any) -> None:
    rows = [row for event in story.whole for row in rows_of(event)]
    with TensorBoardFile(tmp_path / "tb", 1000.0) as writer:
        for row in rows:
            writer.write(row)
    (path,) = (tmp_path / "tb").glob("events.out.tfevents.*")
    assert fields(records(path.read_bytes())[0])[3] == [b"brain.Event:2"]
    wanted = [(row.step, name, struct.unpack("<f", struct.pack("<f", value))[0])
              for row in rows for name, value in row.values.items()]  # fmt: skip
    assert scalars(path) == wanted
    assert (19, "loss", 4.0) in wanted


def test_tensorboard_itself_reads_them(tmp_path: Path, story: Any) -> None:
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader", reason="no tensorboard here")
    with TensorBoardFile(tmp_path / "tb", 1000.0) as writer:
        writer.write(MetricRow(at_s=1.0, step=7, values={"loss": 2.5}))
    (path,) = (tmp_path / "tb").iterdir()
    events = list(loader.LegacyEventFileLoader(str(path)).Load())
    assert [(e.step, e.summary.value[0].tag, e.summary.value[0].simple_value) for e in events[1:]] == [(7, "loss", 2.5)]


def test_figures_that_are_no_numbers(tmp_path: Path) -> None:
    row = MetricRow(at_s=1.0, step=3, values={"a": math.nan, "b": math.inf, "c": 1e300})
    with JsonLines(tmp_path / "x.jsonl") as lines, TensorBoardFile(tmp_path) as board:
        lines.write(row)
        board.write(row)
    assert json.loads((tmp_path / "x.jsonl").read_text()) == {
        "at_s": 1.0, "step": 3, "a": "nan", "b": "inf", "c": 1e300
    }  # fmt: skip
    (path,) = tmp_path.glob("events*")
    assert math.isnan(scalars(path)[0][2])
    assert [value for _, _, value in scalars(path)[1:]] == [math.inf, math.inf]


def test_the_command_writes_all_formats(
    tmp_path: Path, story: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: list[dict[str, Any]] = []
    double = SimpleNamespace(log=logged.append, finish=lambda: logged.append({"finished": True}))
    asked: dict[str, Any] = {}
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **given: asked.update(given) or double))
    with Journal.create(tmp_path / "run") as journal:
        journal.append_many(story.whole)
    args = ["--jsonl", str(tmp_path / "x.jsonl"), "--tensorboard", str(tmp_path / "tb"), "--wandb", str(tmp_path / "w")]
    assert main(["export", str(tmp_path / "run"), *args]) == 0
    lines = [json.loads(line) for line in (tmp_path / "x.jsonl").read_text().splitlines()]
    assert [(line["step"], line["loss"]) for line in lines if "loss" in line] == [
        (19, 4.0), (20, 3.0), (60, 2.0), (90, 1.0)
    ]  # fmt: skip
    assert [line["text"] for line in lines if "text" in line] == [
        "r2.0: signal SIGKILL",
        "coordinator: coordinator SIGKILL",
    ]
    assert len(logged) == len(lines) + 1
    assert (asked["mode"], asked["id"], logged[-1]) == ("offline", "run", {"finished": True})
    assert f"{len(lines)} rows written" in capsys.readouterr().err
    assert main(["export", str(tmp_path / "run")]) == 2
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert main(["export", str(tmp_path / "run"), "--wandb", str(tmp_path / "w")]) == 3


@pytest.mark.process
def test_the_real_wandb_keeps_all_rows_offline(
    tmp_path: Path, story: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the package itself, where it is installed; what it has written is read back from its own file."""
    wandb = pytest.importorskip("wandb", reason="the package wandb is not installed")
    for name, value in (("WANDB_SILENT", "true"), ("WANDB_MODE", "online"), ("WANDB_ERROR_REPORTING", "false")):
        monkeypatch.setenv(name, value)  # what is asked for by argument counts
    with Journal.create(tmp_path / "run") as journal:
        journal.append_many(story.whole)
    args = ["--wandb", str(tmp_path / "w"), "--jsonl", str(tmp_path / "x.jsonl")]
    assert main(["export", str(tmp_path / "run"), *args]) == 0
    wandb.teardown()  # what the end of the process does
    lines = [json.loads(line) for line in (tmp_path / "x.jsonl").read_text().splitlines()]
    (file,) = (tmp_path / "w").glob("wandb/offline-run-*/*.wandb")
    kept = [{name: row[name] for name in row if not name.startswith("_")} for row in logged_in(file)]
    assert kept == [{name: value for name, value in line.items() if name != "text"} for line in lines]
    capsys.readouterr()


def logged_in(file: Path) -> list[dict[str, Any]]:
    """The rows of a wandb file: after seven bytes, records in pieces (CRC, length, kind) of blocks of 32 KiB."""
    from wandb.proto import wandb_internal_pb2

    data, at, whole, found = file.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # a block's end holds no header
            at += 32768 - at % 32768
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        whole, at = whole + data[at + 7 : at + 7 + size], at + 7 + size
        if kind in (1, 4):  # whole, or the last piece
            record = wandb_internal_pb2.Record.FromString(whole)
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                found.append({i.key or ".".join(i.nested_key): json.loads(i.value_json) for i in items})
            whole = b""
    return found


def test_a_run_that_goes_on_is_followed_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each wait lets it go on; the last one lets go of the lock."""
    journal = Journal.create(tmp_path / "run")
    steps = [
        ev.ProgressMade(at_s=float(n), view=[1, 1], stable=n, losses=[(n, 1.0)], step_s=0.1) for n in range(3)
    ]  # fmt: skip

    class Stop(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            if steps:
                journal.append(steps.pop(0))
                journal.flush()
            else:
                journal.close()
            return False

    monkeypatch.setattr(export_module.threading, "Event", Stop)
    assert main(["export", str(tmp_path / "run"), "--jsonl", str(tmp_path / "x"), "--follow"]) == 0
    assert [json.loads(line)["step"] for line in (tmp_path / "x").read_text().splitlines()] == [0, 1, 2]
