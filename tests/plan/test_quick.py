"""The small questions refuse what cannot be by the option's own name."""

import pytest

from outlast.cli import main


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
