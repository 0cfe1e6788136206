"""`outlast ckpt` on real directories: what it prints, what it returns, what it never imports."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest
import torch

from outlast.checkpoint import CheckpointEngine, LocalStore, certify
from outlast.checkpoint.diff import _SMALL_FLOATS, _table
from outlast.cli import main


def save(path: pathlib.Path, *trees: Any) -> None:
    engine = CheckpointEngine(str(path))
    for step, tree in enumerate(trees):
        handle = engine.save(step, tree)
        assert handle is not None
        handle.wait_copied()
        engine.commit(handle)
    engine.close()


@pytest.fixture
def place(tmp_path: pathlib.Path) -> pathlib.Path:
    tree = {"w": torch.arange(2000.0), "b": torch.ones(3, dtype=torch.bfloat16), "z": torch.empty(0), "lr": 0.5}
    later = {**tree, "w": tree["w"].clone(), "b": tree["b"] * 3, "new": torch.ones(1)}
    later["w"][7] += 2
    save(tmp_path / "ckpt", tree, later)
    certify(LocalStore(str(tmp_path / "ckpt")), 0)
    return tmp_path / "ckpt"


def run(capsys: pytest.CaptureFixture[str], *args: object, code: int = 0) -> str:
    assert main(["ckpt", *map(str, args)]) == code
    return capsys.readouterr().out


def test_ls_lists_newest_first_and_says_what_cannot_be_read(
    place: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = json.loads(run(capsys, "ls", place, "--json"))
    assert [(r["generation"], r["step"], r["certified"]) for r in rows] == [(1, 1, False), (0, 0, True)]
    (place / "manifests" / "g0000000001.json").write_bytes(b"")
    text = run(capsys, "ls", f"file://{place}")
    assert "unreadable: is empty" in text
    assert "yes" in text


def test_show_names_tensors_and_filters_them(place: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = json.loads(run(capsys, "show", place, "--json", "-g", 0))
    assert {t["name"]: t["shape"] for t in shown["tensors"]} == {"w": [2000], "b": [3], "z": [0]}
    assert json.loads(run(capsys, "show", f"{place}@0", "--json")) == shown
    text = run(capsys, "show", place, "--names", "n*")
    assert "new" in text
    assert "bfloat16" not in text


def test_verify_names_the_wrong_bytes_and_their_tensors(
    place: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "right" in run(capsys, "verify", place, "--all")
    path = max((place / "data").glob("*s1-*.bin"))
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    (report,) = json.loads(run(capsys, "verify", place, "--json", code=7))
    assert report["problems"][0]["file"] == path.name
    assert "w" in report["problems"][0]["tensors"]
    text = run(capsys, "verify", place, code=7)
    assert "generation 1, step 1: 1 problem (" in text
    assert "touches: " in text
    os.mkfifo(place / "manifests" / "g0000000002.json")
    assert "generation 2: 1 problem (0 B read)\n" in run(capsys, "verify", place, code=7)


def test_diff_says_which_where_and_by_how_much(place: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(run(capsys, "diff", f"{place}@0", f"{place}@1", "--json", code=1))
    by_name = {t["name"]: t for t in found["tensors"]}
    assert (by_name["w"]["num_differing"], by_name["w"]["first"], by_name["w"]["max_abs"]) == (1, 7, 2.0)
    assert by_name["b"]["max_abs"] == 2.0
    assert by_name["new"]["kind"] == "only in b"
    assert found["other_values_differ"] is True
    assert "the same, to the bit" in run(capsys, "diff", place, f"{place}@1")
    assert "first at flat index 7" in run(capsys, "diff", f"{place}@0", place, code=1)


@pytest.mark.parametrize("name", sorted(_SMALL_FLOATS))
def test_small_floats_are_decoded_as_torch_does(name: str) -> None:
    want = torch.arange(256, dtype=torch.uint8).view(getattr(torch, name)).double()
    assert torch.equal(torch.from_numpy(_table(*_SMALL_FLOATS[name])).nan_to_num(9e9), want.nan_to_num(9e9))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_export_import_and_the_same_bits_again(
    place: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for form in ("safetensors", "dcp"):
        out, again = tmp_path / form, tmp_path / f"{form}-again"
        assert form in run(capsys, "export", place, out, "--format", form)
        assert "generation 0" in run(capsys, "import", out, again, "--step", 1)
        found = json.loads(run(capsys, "diff", place, again, "--json"))
        assert found == {"tensors": [], "other_values_differ": False, "values": [], "settings": {}}


def test_prune_says_first_and_keeps_the_certified(place: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = CheckpointEngine(str(place))
    engine.close()
    save(place.parent / "other", *({"w": torch.full((5,), float(k))} for k in range(3)))
    other = place.parent / "other"
    assert "would remove generations: 0, 1" in run(capsys, "prune", other, "--keep-last", 1, "--dry-run")
    assert LocalStore(str(other)).generations() == [0, 1, 2]
    assert "removed generations: 0, 1" in run(capsys, "prune", other, "--keep-last", 1)
    assert LocalStore(str(other)).generations() == [2]
    run(capsys, "prune", place, "--keep-last", 1)
    assert LocalStore(str(place)).generations() == [0, 1]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["ls", "/nowhere/at/all"], "is no directory"),
        (["show", "PLACE", "-g", "9"], "no generation 9"),
        (["export", "PLACE", "x", "-f", "safetensor"], "did you mean 'safetensors'"),
        (["import", "PLACE", "x"], "neither a safetensors nor a DCP"),
        (["prune", "PLACE", "--keep-last", "0"], "keep_last is 1 or more"),
        (["ls", "ftp://x/y"], "scheme 'ftp'"),
        (["import", "PLACE", "x", "--step", "-1"], "--step -1 is no step"),
        (["export", "PLACE", "PLACE"], "is not an empty directory"),
        (["export", "PLACE", "x", "--shard-gib", "-1"], "--shard-gib -1"),
        (["export", "PLACE", "x", "--names", "nothing*"], "no tensor matches 'nothing*'"),
        (["show", "PLACE", "--names", "nothing*"], "there are w, b, z, new"),
        (["verify", "PLACE/data", "--all"], "no generation"),
        (["verify", "PLACE", "--all", "-g", "0"], "--all and generation 0"),
        (["show", "PLACE@0", "-g", "1"], "one of them"),
        (["resume-check", "--stpes", "3", "x.py"], "no option --stpes"),
        (["resume-check", "--replicas", "-1", __file__], "-1 replicas"),
        (["resume-check", "absent.py"], "no script absent.py"),
    ],
)
def test_bad_input_says_what_and_what_to_do(
    place: pathlib.Path, capsys: pytest.CaptureFixture[str], args: list[str], said: str
) -> None:
    assert main(["ckpt", *[a.replace("PLACE", str(place)) for a in args]]) == 2
    assert said in capsys.readouterr().err


def test_a_place_that_cannot_be_written_is_no_traceback(
    place: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    assert main(["ckpt", "export", str(place), str(file / "out"), "--json"]) == 3
    said = capsys.readouterr()
    assert json.loads(said.out)["error"]["code"] == "ENVIRONMENT"
    assert f"Not a directory: {file}/out" in said.err


def test_hostile_names_do_not_reach_the_terminal(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path / "c", {"a\x1b[2Jb": torch.ones(2)})
    assert "\x1b" not in run(capsys, "show", tmp_path / "c")


@pytest.mark.process
def test_looking_never_imports_torch(place: pathlib.Path, tmp_path: pathlib.Path) -> None:
    code = (
        "import sys; from outlast.cli import main\n"
        f"place, out = {str(place)!r}, {str(tmp_path / 'st')!r}\n"
        "for a in (['ls', place], ['show', place], ['verify', place], ['diff', place, place + '@0'],\n"
        "          ['export', place, out], ['import', out, out + '2'], ['prune', place]):\n"
        "    main(['ckpt', *a])\n"
        "    assert 'torch' not in sys.modules, a\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    subprocess.run([sys.executable, "-c", code], check=True, env=env, capture_output=True, timeout=60)


@pytest.mark.parametrize("arguments", [["ls"], ["prune", "--dry-run"], ["prune", "--keep-last", "1"]])
def test_what_reads_many_generations_shows_how_far_it_is_on_a_terminal_only(
    place: pathlib.Path, arguments: list[str]
) -> None:
    command = [sys.executable, "-m", "outlast", "ckpt", arguments[0], str(place), *arguments[1:]]
    terminal, end = os.openpty()
    try:
        environ = {**os.environ, "TERM": "xterm"}
        shown = subprocess.run(command, stdout=subprocess.PIPE, stderr=end, env=environ, timeout=60, check=True)
        bar = os.read(terminal, 1 << 16).decode()
    finally:
        os.close(terminal)
        os.close(end)
    assert "generations" in bar
    assert "/2" in bar or "/1" in bar
    assert b"\x1b" not in shown.stdout
    again = subprocess.run(command, capture_output=True, timeout=60, check=True)
    assert again.stderr == b""


def test_the_check_of_a_resume_tells_which_run_it_is_at(tmp_path: pathlib.Path) -> None:
    from outlast.errors import ProveError
    from outlast.prove.resuming import resume_check

    script, told = tmp_path / "broken.py", list[tuple[int, int]]()
    script.write_text("raise SystemExit(3)")
    with pytest.raises(ProveError):
        resume_check([str(script)], tmp_path / "runs", progress=lambda done, total: told.append((done, total)))
    assert told == [(0, 3)]
