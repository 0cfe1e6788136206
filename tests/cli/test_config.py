"""`outlast config show`: each value and its origin."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outlast.cli import main
from outlast.config import RunConfig, decoded, encoded


def test_every_setting_has_a_value_and_an_origin(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[run]\nreplicas = 4\nspares = 1\nlease_s = inf\n")
    monkeypatch.setenv("OUTLAST_SPARES", "2")
    assert main(["config", "show", "--config", str(file), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert list(document) == list(RunConfig.__struct_fields__)
    assert document["replicas"] == {"value": 4, "origin": f"file {file}"}
    assert document["spares"] == {"value": 2, "origin": "environment OUTLAST_SPARES"}
    assert document["lease_s"]["value"] == "inf"
    assert document["threads"]["origin"] == "default"
    assert main(["config", "show", "--config", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + len(document)
    assert lines[1].split() == ["replicas", "4", "file", str(file)]


@pytest.mark.parametrize(
    ("text", "reason", "remedy"),
    [
        ("[run]\nreplicsa = 4\n", "replicsa", "did you mean 'replicas'?"),
        ("[run]\nreplicas = 0\n", "out of range", "from 1 to"),
        ("[runs]\n", "unknown table", "[run]"),
        ("replicas 4", "not TOML", ""),
        ("[run]\nreplicas = 'four'\n", "replicas = 'four' (from file ", "the default is 1"),
        ("[run]\nexchange = 'smh'\n", "exchange = 'smh' (from file ", "did you mean 'shm'? one of auto, shm, c10d"),
        ("[run]\nspares = [1]\n", "spares = [1]", "a number, or auto"),
        ("[run]\nranks = [4, 2]\n", "ranks = [4, 2] (from file ", "one number for all"),
        ("run = 3\n", "is no table", "under [run]"),
        ("[[run]]\nspares = 1\n", "is no table", "under [run]"),
        ("[run]\ncheckpoint_every = -1\n", "out of range", "to 1099511627776"),
        (
            "[run]\nendpoint = '10.0.0.1:1'\nnnodes = '2'\nrecord = 'etcd://a:1'\nlease_s = 60\nrecord_lease_s = 300\n",
            "lease_s = 60 would be over before the coordinator has answered",
            "lease_s of 302 or more",
        ),
    ],
)
def test_what_is_wrong_and_what_would_be_right(
    text: str, reason: str, remedy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(text)
    assert main(["config", "show", "--config", str(file)]) == 2
    err = capsys.readouterr().err
    assert reason in err
    assert remedy in err


def test_a_misspelt_environment_key_of_ours_does_not_pass_silently(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTLAST_REPLICSA", "4")
    assert main(["config", "show"]) == 2
    err = capsys.readouterr().err
    assert "OUTLAST_REPLICSA" in err
    assert "did you mean 'OUTLAST_REPLICAS'?" in err


def test_a_missing_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", "--config", str(tmp_path / "absent.toml")]) == 2
    assert "absent.toml" in capsys.readouterr().err


def test_a_configuration_reaches_another_process_whole() -> None:
    config = RunConfig(replicas=3, lease_s=float("inf"), outside_s=float("inf"), checkpoint_dir="7", bitwise=False)
    assert decoded(encoded(config)) == config
