"""Digits with lying replicas, as real processes: the fixed choice keeps its accuracy, the mean does not.

The whole campaign (every attack, five seeds, three kinds of data) is `benchmarks/byzantine_fleet.py`.
"""

from __future__ import annotations

import json

import pytest
from benchmarks.byzantine_fleet import main

pytestmark = [pytest.mark.process, pytest.mark.campaign]


def test_the_choice_keeps_its_accuracy_and_the_mean_does_not(tmp_path, capsys):
    out = tmp_path / "digits.jsonl"
    options = ["--data", "iid", "--seeds", "1", "--steps", "60", "--attacks", "ipm,nan,label_flip", "--out", str(out)]
    assert main([*options, "--rules", "nnm+trimmed_mean,mean"]) == 0
    cases = [json.loads(line) for line in out.read_text().splitlines()]
    assert [case["attack"] for case in cases] == ["none", "ipm", "nan", "label_flip", "none", "ipm", "nan"]
    capsys.readouterr()
    assert main([*options, "--rules", "nnm+trimmed_mean,mean"]) == 0
    assert "in one run" not in capsys.readouterr().out
