"""What a campaign has found is kept, whatever ends it, and is written by one campaign at a time."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from outlast.cli._campaign_file import CampaignFile, campaign_file
from outlast.errors import ConfigError


class Found(msgspec.Struct):
    seed: int
    number: int


def numbers(file: CampaignFile[Found]) -> list[int]:
    return [result.number for result in file.found]


def test_it_goes_on_with_what_is_there_after_a_line_that_was_cut(tmp_path: Path) -> None:
    path = tmp_path / "results"
    with campaign_file(path, Found, lambda result: result.seed, 7) as file:
        file.add(Found(7, 0))
        file.add(Found(7, 1))
    path.write_bytes(path.read_bytes()[:-5])
    with campaign_file(path, Found, lambda result: result.seed, -1) as file:
        assert (file.seed, numbers(file)) == (7, [0])
        file.add(Found(7, 2))
    with campaign_file(path, Found, lambda result: result.seed, 7) as file:
        assert numbers(file) == [0, 2]


def test_two_campaigns_do_not_write_to_one_file(tmp_path: Path) -> None:
    path = tmp_path / "results"
    with campaign_file(path, Found, lambda result: result.seed, 1) as file:
        file.add(Found(1, 0))
        with (
            pytest.raises(ConfigError, match="another campaign writes to --resume"),
            campaign_file(path, Found, lambda result: result.seed, 1),
        ):
            raise AssertionError
    with campaign_file(path, Found, lambda result: result.seed, 1) as file:
        assert numbers(file) == [0]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"seed":1}\n', "no result"),
        ("somebody's one line", "no result"),
        ('{"seed":1,"number":2}\n', "of seed 1, not 5"),
    ],
)
def test_another_s_file_is_left_as_it_is(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "results"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said), campaign_file(path, Found, lambda result: result.seed, 5):
        raise AssertionError
    assert path.read_text() == text


def test_a_file_that_cannot_be_made_is_refused_in_a_sentence(tmp_path: Path) -> None:
    nowhere = campaign_file(tmp_path / "missing" / "results", Found, lambda result: result.seed, 5)
    with pytest.raises(ConfigError, match="No such file or directory"), nowhere:
        raise AssertionError


def test_without_a_file_nothing_is_kept() -> None:
    with campaign_file(None, Found, lambda result: result.seed, 3) as file:
        file.add(Found(3, 0))
        assert (file.seed, numbers(file)) == (3, [0])
