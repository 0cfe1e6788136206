"""`outlast rules`: what it says is the catalogue's, and it never loads torch."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from outlast.cli import main
from outlast.core.policy import PRE_STEPS, RULES, kappa, largest_f


def test_json_lists_every_rule_with_its_conditions(capsys):
    assert main(["rules", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [rule["name"] for rule in listed["rules"]] == list(RULES)
    assert [step["name"] for step in listed["pre"]] == list(PRE_STEPS)
    assert all(rule["condition"] and rule["kappa"] and rule["source"] for rule in listed["rules"])


def test_rows_and_f_narrow_the_list_and_give_numbers(capsys):
    assert main(["rules", "-n", "15", "-f", "4", "--json"]) == 0
    listed = {rule["name"]: rule for rule in json.loads(capsys.readouterr().out)["rules"]}
    assert "bulyan" not in listed
    assert "mean" not in listed
    assert listed["trimmed_mean"]["largest_f"] == largest_f("trimmed_mean", 15) == 7
    assert listed["trimmed_mean"]["kappa_at"] == pytest.approx(kappa("trimmed_mean", 15, 4))
    assert listed["centered_clipping"]["kappa_at"] is None


def test_the_table_reads_the_same(capsys):
    assert main(["rules", "--rule", "krum", "-n", "9"]) == 0
    out = capsys.readouterr().out
    assert "n >= 2 f + 3" in out
    assert "f <= 3" in out


def test_a_misspelt_rule_is_suggested_and_f_beyond_the_limit_refused(capsys):
    assert main(["rules", "--rule", "krumm"]) == 2
    assert "did you mean 'krum'" in capsys.readouterr().err
    assert main(["rules", "--rule", "krum", "-n", "9", "-f", "4"]) == 2
    assert "at most f = 3" in capsys.readouterr().err


def test_the_listing_does_not_import_torch():
    code = "import sys; from outlast.cli import main; main(['rules']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0
