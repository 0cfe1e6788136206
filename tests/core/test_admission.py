"""Protocol rule 23: a view is admissible iff tolerated hosts x most rows on one host <= trim count."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.core.policy import AdmissionPolicy, most_rows_per_host
from outlast.errors import ConfigError

ROWS = st.dictionaries(st.text(min_size=1, max_size=3), st.integers(0, 9), min_size=1, max_size=12)


@given(
    rows=ROWS, trim=st.integers(0, 12), hosts=st.integers(0, 5), shortfall=st.sampled_from(["wait", "stop", "lower"])
)
def test_a_view_goes_on_exactly_when_the_worst_hosts_fit_the_trim_count(rows, trim, hosts, shortfall):
    verdict = AdmissionPolicy(trim_count=trim, tolerated_hosts=hosts, on_shortfall=shortfall).decide(rows)
    worst = sorted(rows.values(), reverse=True)
    if worst[0] == 0:
        assert verdict.action == "wait"
        return
    if hosts * worst[0] <= trim:
        assert (verdict.action, verdict.tolerated_hosts, verdict.lowered) == ("go", hosts, False)
    elif shortfall == "lower":
        assert verdict.action == "go"
        assert verdict.lowered
        assert verdict.tolerated_hosts < hosts
        assert f"lowered from {hosts} to {verdict.tolerated_hosts or 'none'}" in verdict.reason
    else:
        assert verdict.action == ("stop" if shortfall == "stop" else "wait")
    # whatever is promised, the rows of the fullest hosts that may lie are never more than are trimmed
    assert sum(worst[: verdict.tolerated_hosts]) <= trim
    assert (verdict.tolerated_hosts + 1) * worst[0] > trim or verdict.tolerated_hosts == hosts


@given(rows=st.integers(1, 64), trim=st.integers(0, 20), hosts=st.integers(0, 6))
def test_the_number_of_hosts_needed_is_the_least_that_suffices(rows, trim, hosts):
    needed = AdmissionPolicy(trim_count=trim, tolerated_hosts=hosts).decide({"one": rows}).hosts_needed
    enough = [n for n in range(1, rows + 1) if hosts * most_rows_per_host(rows, n) <= trim]
    assert needed == (enough[0] if enough else None)


def test_a_death_that_doubles_a_survivor_s_rows_is_noticed():
    full = {f"host{i}": 1 for i in range(15)}
    assert AdmissionPolicy(trim_count=4, tolerated_hosts=4).decide(full).action == "go"
    after = {**{f"host{i}": 1 for i in range(13)}, "host13": 2}
    verdict = AdmissionPolicy(trim_count=4, tolerated_hosts=4, on_shortfall="lower").decide(after)
    assert (verdict.action, verdict.tolerated_hosts, verdict.lowered, verdict.hosts_needed) == ("go", 2, True, 15)


def test_lower_goes_on_even_with_nobody_tolerated_and_the_others_say_what_would_help():
    after = {"r0": 2, "r1": 1, "r2": 1}

    def verdict(shortfall):
        return AdmissionPolicy(trim_count=1, tolerated_hosts=1, on_shortfall=shortfall, domain="replica").decide(after)

    lowered = verdict("lower")
    assert (lowered.action, lowered.tolerated_hosts, lowered.lowered) == ("go", 0, True)
    assert lowered.reason == "1 lying replica x 2 rows on the fullest > 1 row trimmed; lowered from 1 to none"
    waiting, stopped = verdict("wait"), verdict("stop")
    assert (waiting.action, stopped.action, waiting.lowered, stopped.lowered) == ("wait", "stop", False, False)
    assert "it takes 4 replicas; tolerated = 0, or on_shortfall = lower, would go on" in waiting.reason
    assert stopped.reason.endswith("it takes 4 replicas")


@pytest.mark.parametrize("bad", [{"trim_count": -1, "tolerated_hosts": 0}, {"trim_count": 1, "tolerated_hosts": -1}])
def test_negative_numbers_are_refused(bad):
    with pytest.raises(ConfigError):
        AdmissionPolicy(**bad).decide({"a": 1})
    with pytest.raises(ConfigError):
        most_rows_per_host(3, 0)
