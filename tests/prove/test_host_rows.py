"""Schedules in which a robust rule's rows count by host, and each of which has a host's worth of liars."""

import msgspec
import pytest

from outlast.cli import main
from outlast.prove.adversary import host_rows_of, play, replayed, scenario_of, search, shrink


def test_three_hundred_schedules_break_nothing() -> None:
    tally = search(300, 0, domain="host")
    assert tally.violations == []
    assert tally.endings["finished"] > 240


FOUND = [2, 6, 35, 36, 0, 14, 41, 4482]


@pytest.mark.parametrize("seed", FOUND)
def test_schedules_that_once_found_something(seed: int) -> None:
    """Members of a host with parts of more rows than its share, though the view was on hosts enough: from the first
    step (two seeds), or after a dispute (two); a full fleet on too few hosts, while another had a spare that nobody let
    in (three), or no replica, and nobody might be missing."""
    assert play(host_rows_of(seed)).violation is None


def test_undisturbed_fleets_wait_for_nobody_wherever_members_are() -> None:
    for seed in range(60):
        still = msgspec.structs.replace(host_rows_of(seed), faults=(), stops=False)
        assert play(still).violation is None, still


def test_the_other_schedules_of_the_same_seeds_are_what_they_were() -> None:
    assert not any(scenario_of(seed).rows_by_host for seed in range(400))
    assert all(host_rows_of(seed).rows_by_host and host_rows_of(seed).num_rows > 1 for seed in range(400))


def test_a_violation_is_replayed_by_its_command() -> None:
    seed = next(s for s in range(100) if play(host_rows_of(s), "counted-twice").violation is not None)
    found = shrink(seed, "counted-twice", "host")
    words = found.command.split()
    assert words[words.index("--fault-domain") + 1] == "host"
    again = play(replayed(words[words.index("--replay") + 1], "host"), "counted-twice").violation
    assert again is not None
    assert again.invariant == found.violation.invariant


def test_the_command_plays_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prove", "protocol", "--schedules", "5", "--jobs", "1", "--fault-domain", "host"]) == 0
    assert "5 schedules (seeds 0 to 4)" in capsys.readouterr().out
    assert main(["prove", "protocol", "--fault-domain", "rack"]) != 0
