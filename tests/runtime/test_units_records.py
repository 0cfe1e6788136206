"""`protect`'s records by owner: they are the short forms put together, and are never given beside them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import outlast
from outlast.errors import ConfigError

pytestmark = pytest.mark.usefixtures("training_here")


def rows() -> list[torch.Tensor]:
    return list(torch.randn(22, 6, generator=torch.Generator().manual_seed(1)))


def protect(data: Any, **given: Any) -> tuple[outlast.Training, nn.Module]:
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))
    return outlast.join().protect(model, torch.optim.AdamW(model.parameters(), lr=1e-2), data, seed=2, **given), model


def bits(data: Any, **given: Any) -> tuple[str, list[float]]:
    training, model = protect(data, **given)
    losses = []
    for step in training.steps(until=4):
        for batch in step:
            step.backward(model(batch).pow(2).mean())
        losses.append(step.loss)
    return training.fingerprint(), losses


def test_records_are_the_short_forms_to_the_bit() -> None:
    """With values that all differ from the defaults: one that got lost on its way would show."""
    loading = {"global_batch_size": 8, "microbatches": 4, "shuffle": False, "drop_last": True}
    loading |= {"collate_fn": lambda parts: torch.stack(parts) * 2}
    by_name = bits(rows(), **loading, audit=0.5, audit_params=["0.*"], aggregation=None)
    assert bits(outlast.Data(rows(), **loading), audit=outlast.Audit(0.5, params=["0.*"])) == by_name
    assert bits(rows(), global_batch_size=8, microbatches=4) != by_name
    backwards = {"sampler": list(range(21, -1, -1))}
    assert bits(outlast.Data(rows(), **loading, **backwards)) == bits(rows(), **loading, **backwards) != by_name


def test_what_a_record_says_reaches_its_owner() -> None:
    """Each is refused by the owner, in the words in which the short form is."""
    data = {"global_batch_size": 8, "microbatches": 4}
    for record, short in (
        ({"aggregation": outlast.Rules(row_momentum=0.9)}, {"row_momentum": 0.9}),
        ({"aggregation": outlast.Rules(check_reducers=0.1)}, {"check_reducers": 0.1}),
        ({"aggregation": outlast.Rules("median", f=9, rows=4)}, {"aggregation": "median", "f": 9, "rows": 4}),
        ({"aggregation": outlast.Rules("median", f=1, rows=4, pre="nmn")},
         {"aggregation": "median", "f": 1, "rows": 4, "pre": "nmn"}),
        ({"audit": outlast.Audit(7)}, {"audit": 7}),
        ({"audit": outlast.Audit(0.1, params="9.*")}, {"audit": 0.1, "audit_params": "9.*"}),
    ):  # fmt: skip
        told = []
        for given in (record, short):
            with pytest.raises(ConfigError) as caught:
                protect(rows(), **data, **given)
            told.append((caught.value.message, caught.value.remedy))
        assert told[0] == told[1]
    with pytest.raises(ConfigError, match="num_workers=-1"):
        protect(outlast.Data(rows(), **data, num_workers=-1))
    with pytest.raises(ConfigError, match="microbatches=0 is not a positive whole number"):
        protect(outlast.Data(rows(), global_batch_size=8, microbatches=0))


DATA = outlast.Data(rows(), global_batch_size=8, microbatches=4)


@pytest.mark.parametrize(
    ("data", "given", "told", "remedy"),
    [
        (DATA, {"microbatches": 8}, r"microbatches: given beside outlast\.Data", "outlast.Data(…, microbatches=…)"),
        (DATA, {"shuffle": True, "num_workers": 0}, "num_workers, shuffle: given", "Data(…, num_workers"),
        (DATA, {"aggregation": outlast.Rules("median"), "f": 1}, r"f: given beside outlast\.Rules", "Rules(…, f=…)"),
        (DATA, {"audit": outlast.Audit(0.1), "audit_params": "auto"}, "audit_params: given", "Audit(…, params=…)"),
        (rows(), {}, "not told global_batch_size and microbatches", "outlast.Data(…, global_batch_size=N)"),
        (rows(), {"global_batch_size": 8}, "not told microbatches", "microbatches=N"),
    ],
)  # fmt: skip
def test_a_record_and_its_short_forms_do_not_mix(data: Any, given: dict[str, Any], told: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=told) as caught:
        protect(data, **given)
    assert remedy in caught.value.remedy


@pytest.mark.parametrize("given", [{"aggregation": outlast.Audit()}, {"audit": outlast.Rules()}, {"guards": DATA}])
def test_a_record_in_another_s_place_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        protect(DATA, **given)
