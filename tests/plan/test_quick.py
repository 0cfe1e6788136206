"""The small questions refuse what cannot be by the option's own name."""

from pathlib import Path

import pytest

from outlast.cli import main
from outlast.core import events as ev
from outlast.journal import Journal


@pytest.mark.parametrize(
    ("option", "value"), [("--nodes", "-5"), ("--nodes", "0"), ("--node-mtbf-hours", "0"), ("--mttr-hours", "-1")]
)
def test_a_fleet_that_cannot_be_is_refused_by_its_option(
    option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {"--nodes": "100", "--node-mtbf-hours": "50000"} | {option: value}
    assert main(["plan", "fleet", *(word for pair in given.items() for word in pair)]) == 2
    refused = capsys.readouterr().err
    assert f"{option} = {value} is out of range" in refused
    assert "num_active" not in refused


@pytest.mark.parametrize(
    ("command", "option", "value"),
    [
        ("nines", "--incidents", "-1"),
        ("nines", "--minutes", "-1"),
        ("nines", "--cost-repair", "-1"),
        ("nines", "--cost-incidents", "0"),
        ("nines", "--mtbf-hours", "-1"),
        ("interval --mtbf-hours 1 --write-seconds 1", "--recovery-seconds", "-1"),
        ("system", "--nodes", "-3"),
        ("system", "--nodes", "nan"),
        ("system", "--params", "-1"),
        ("system", "--steps", "0"),
    ],
)
def test_every_option_is_named_as_it_was_typed(
    command: str, option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *command.split(), option, value]) == 2
    assert f"{option} = {value} is out of range" in capsys.readouterr().err


def test_a_misspelt_command_is_no_job_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "flet", "--nodes", "3"]) == 2
    assert "did you mean 'fleet'?" in capsys.readouterr().err


def test_a_write_that_takes_less_than_no_time_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal = Journal.create(tmp_path / "run")
    journal.append_many(
        [
            ev.RunStarted(at_s=0.0, run_id="x", command=[], num_replicas=2, num_spares=0, signature={}, config={}),
            ev.RunFinished(at_s=9.0, outcome="finished", steps=1, detail="", exit_code=0, seconds={}),
        ]
    )
    journal.close()
    assert main(["plan", "--from-run", str(tmp_path / "run"), "--write-seconds", "-1"]) == 2
    assert "--write-seconds = -1 is out of range" in capsys.readouterr().err
