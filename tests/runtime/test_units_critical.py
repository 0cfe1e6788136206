"""Critical parameters: which they are, that each of their slices is checked, and that all of them is compared."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from outlast.core.policy.critical_choice import Candidate, choose_critical
from outlast.core.protocol.slices import checker_of
from outlast.errors import ConfigError
from outlast.runtime.checks._state_rotation import Agreement
from outlast.runtime.checks.critical_parameters import critical_of
from outlast.runtime.exchange.second_reduction import Checks
from outlast.runtime.training.state import State
from outlast.tensors import BLOCK


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.table = nn.Embedding(5, 8)
        self.router = nn.Linear(8, 2)
        self.body = nn.Linear(300, 300)
        self.large = nn.Parameter(torch.full((30,), 9.0))
        self.last = nn.Linear(8, 3)


def state() -> State:
    model = Model()
    return State(model, [torch.optim.AdamW(model.parameters())], [], {})


def test_the_choice_takes_kinds_then_norms_and_keeps_to_its_budget() -> None:
    found = critical_of(state(), "auto")
    assert {"first.weight", "first.bias", "table.weight", "router.weight", "last.weight", "large"} <= set(found)
    assert "body.weight" not in found, "most of the elements"
    parameters = [
        Candidate(name="a", numel=10, norm=1.0), Candidate(name="b", numel=10, norm=5.0),
        Candidate(name="r", numel=8, norm=0.1, kind="router"), Candidate(name="c", numel=72, norm=9.0),
    ]  # fmt: skip
    assert choose_critical(parameters, 0.2) == ("b", "r")
    assert choose_critical(parameters, 0.05) == ()


def test_patterns_mean_names_and_what_means_none_is_refused() -> None:
    assert critical_of(state(), ["*.weight"])[:2] == ("first.weight", "table.weight")
    assert critical_of(state(), ()) == ()
    with pytest.raises(ConfigError, match="matches no parameter"):
        critical_of(state(), ["tables.*"])


def test_a_watched_parameter_is_compared_whole_in_every_step() -> None:
    here = state()
    agreement = Agreement(here, 8)
    agreement.always(frozenset({here.names.index("table.weight")}))
    for step in range(8):
        before = agreement.fingerprint(step)[1]
        with torch.no_grad():
            here.model.table.weight[4, 7] += 1.0
        assert agreement.fingerprint(step)[1] != before
        assert any(name.startswith("table.weight") for name, _ in agreement.rows(step))
    rest = [name for step in range(8) for name, _ in agreement.rows(step) if not name.startswith("table")]
    blocks = {name: -(-part.numel() // BLOCK) for name, part in zip(here.names, here.params, strict=True)}
    assert all(rest.count(name) <= blocks[name] for name in rest), "the others still take turns, block by block"
    assert set(rest) == {name for name in here.names if name != "table.weight"}


def test_every_slice_of_a_watched_span_has_one_checker_and_no_other_has_any() -> None:
    ranges = [[(0, 64), (64, 128), (128, 200)], [(0, 50), (50, 50), (50, 90)]]
    found = []
    for me in range(3):
        checks = Checks(lambda: 0.0, seed=3)
        checks.always[0] = [(60, 70)]
        found += [(me, *each) for each in checks.due(7, ranges, me)]
    assert sorted(each[1:] for each in found) == [(0, 0), (0, 1)]
    assert all(me != reducer for me, _, reducer in found)


def test_a_share_of_one_checks_every_slice_and_nobody_checks_itself() -> None:
    ranges = [[(0, 64), (64, 128), (128, 200)], [(0, 50), (50, 50), (50, 90)]]
    found = [(me, *each) for me in range(3) for each in Checks(lambda: 1.0, seed=3).due(5, ranges, me)]
    assert sorted(each[1:] for each in found) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 2)]
    assert all(me != reducer for me, _, reducer in found)
    assert all(checker_of(3, 5, bucket, reducer, 3) == me for me, bucket, reducer in found)
    assert checker_of(3, 5, 0, 0, 1) == -1
    assert list(Checks(lambda: 1.0, seed=3).due(5, [[(0, 64)]], 0)) == []
    assert list(Checks(lambda: 1.0, seed=3).due(5, [], 0)) == []
