"""Digits with lying replicas, as real processes: the fixed choice keeps its accuracy, the mean does not.

The whole campaign (every attack, five seeds, three kinds of data) is `benchmarks/byzantine_fleet.py`.
"""

from __future__ import annotations

import json

import pytest
from benchmarks.byzantine_fleet import main

pytestmark = [pytest.mark.process, pytest.mark.campaign, pytest.mark.soak, pytest.mark.timeout(900)]


def test_the_choice_trains_under_attack_where_the_mean_does_not_and_what_is_known_is_not_run_again(tmp_path, capsys):
    out = tmp_path / "digits.jsonl"
    options = ["--data", "iid", "--seeds", "1", "--steps", "100", "--attacks", "ipm,nan,label_flip", "--out", str(out)]
    first = main([*options, "--rules", "nnm+trimmed_mean,mean"])
    cases = [json.loads(line) for line in out.read_text().splitlines()]
    assert [case["attack"] for case in cases] == ["none", "ipm", "nan", "label_flip", "none", "ipm", "nan"]
    kept, lost = [case["accuracy"] for case in cases[1:4]], [case["accuracy"] for case in cases[5:]]
    assert min(kept) > 2 * max(lost)
    capsys.readouterr()
    assert main([*options, "--rules", "nnm+trimmed_mean,mean"]) == first
    assert "in one run" not in capsys.readouterr().out
