"""The state as a tree: what one replica encodes, another becomes, bit for bit, and trains on alike."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from outlast.core.policy.guard_records import Guards, GuardState
from outlast.core.protocol import RollEntry, View, ViewId
from outlast.core.protocol.step.effects import TellFleet
from outlast.core.protocol.step.verdict import first_difference, same_states
from outlast.errors import ConfigError, Evicted, StateDiverged
from outlast.runtime.checks.state_comparison import Comparison, diverged, fingerprint_of, settled
from outlast.runtime.exchange.robust_rows import MEMORY
from outlast.runtime.training.frozen import Frozen, raw
from outlast.runtime.training.state import State, digest_of, empty_like_encoded
from outlast.runtime.training.warm_memory import Warm


class Best(NamedTuple):
    step: int
    loss: float
    note: str | None


class Extra:
    """What a loop may register: nested plain data and a tensor."""

    def __init__(self) -> None:
        self.value: dict[str, Any] = {"ema": torch.zeros(3), "best": (1, 2.5, None), "notes": ["a", {"b": b"c"}]}

    def state_dict(self) -> dict[str, Any]:
        return self.value

    def load_state_dict(self, value: dict[str, Any]) -> None:
        self.value = value


class Parts:
    """A model with buffers and a tied weight, two optimizers of several groups, a scheduler, registered state."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4), nn.Linear(4, 4, bias=False))
        self.model[3].weight = nn.Parameter(self.model[3].weight.detach().clone())
        first, rest = list(self.model[0].parameters()), list(self.model[1].parameters())
        self.adam = torch.optim.AdamW([{"params": first, "lr": 1e-2}, {"params": rest, "weight_decay": 0.0}])
        self.sgd = torch.optim.SGD([*self.model[2].parameters(), *self.model[3].parameters()], lr=0.1, momentum=0.9)
        self.rate = torch.optim.lr_scheduler.StepLR(self.adam, step_size=2)
        self.extra = Extra()
        self.state = State(self.model, [self.adam, self.sgd], [self.rate], {"extra": self.extra})

    def train(self, steps: int, seed: int) -> None:
        for step in range(steps):
            torch.manual_seed(seed + step)
            self.model(torch.randn(6, 4)).pow(2).sum().backward()
            for part in (self.adam, self.sgd, self.rate):
                part.step()
            self.extra.value["ema"] += 0.1
            for param in self.model.parameters():
                param.grad = None


def hand_over(donor: Parts, joiner: Parts, cuts: int = 3) -> None:
    """As a join does it: shares of the bytes, received into empty tensors."""
    plain, tensors = donor.state.encoded()
    values = list(tensors.values())
    total = sum(t.numel() * t.element_size() for t in values)
    edges = [total * i // cuts for i in range(cuts + 1)]
    pieces = []
    for lo, hi in itertools.pairwise(edges):
        frozen = Frozen(values, lo, hi, set(), Warm())
        frozen.wait()
        pieces.append(frozen.buffer)
    data, received = torch.cat(pieces), empty_like_encoded(plain)
    at = 0
    for tensor in received.values():
        view = raw(tensor)
        view.copy_(data[at : at + view.numel()])
        at += view.numel()
    assert at == total
    joiner.state.load(plain, received)


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_joiner_becomes_the_donor_and_goes_on_alike(steps: int) -> None:
    """0: optimizer state does not exist yet."""
    donor, joiner = Parts(1), Parts(2)
    donor.train(steps, 10)
    assert joiner.state.fingerprint() != donor.state.fingerprint()
    hand_over(donor, joiner)
    assert joiner.state.fingerprint() == donor.state.fingerprint()
    assert digest_of(joiner.state) == digest_of(donor.state)
    assert joiner.state.encoded()[0] == donor.state.encoded()[0]
    assert joiner.extra.value["best"] == (1, 2.5, None)
    for each in (donor, joiner):
        each.train(3, 77)
    assert joiner.state.fingerprint() == donor.state.fingerprint()
    assert joiner.rate.get_last_lr() == donor.rate.get_last_lr()


def test_who_waits_compares_what_no_loop_changes() -> None:
    """The loop of one may have gone further than another's, between two steps."""

    def told(change: Any = lambda parts: None) -> int:
        parts = Parts(1)
        parts.train(2, 0)
        with torch.no_grad():
            change(parts)
        state = parts.state
        return fingerprint_of(settled(tuple(state.parts()), {*state.names, *state.buffers}))

    memory = Extra()
    memory.value = {"momentum": [torch.ones(3)]}
    base = told()
    assert base != 0
    assert told(lambda p: p.model[2].weight[0, 0].add_(1)) != base
    assert told(lambda p: p.model[1].running_mean[1].add_(1)) != base
    assert told(lambda p: p.adam.state[p.model[0].weight]["exp_avg"][0].add_(1)) != base
    assert told(lambda p: p.state.extra.update({MEMORY: memory})) != base
    assert told(lambda p: p.extra.value["ema"].add_(1)) == base
    assert told(lambda p: p.adam.param_groups[0].update(lr=0.2)) == base
    assert fingerprint_of(()) == 0, "where it cannot be told"
    assert settled((("/model/w", 1), ("/model/average.w", 2)), {"w"}) == (("/model/w", 1),), "a loop averages by itself"


def test_a_joiner_with_more_state_forgets_it() -> None:
    donor, joiner = Parts(1), Parts(1)
    joiner.train(2, 5)
    hand_over(donor, joiner)
    assert not joiner.adam.state
    assert joiner.state.fingerprint() == donor.state.fingerprint()


def test_every_part_counts_and_is_named() -> None:
    base = Parts(1)
    base.train(2, 0)
    rows = tuple(base.state.parts())

    def changed(change: Any) -> str:
        other = Parts(1)
        other.train(2, 0)
        with torch.no_grad():
            change(other)
        assert other.state.fingerprint() != base.state.fingerprint()
        return first_difference({"a": rows, "b": tuple(other.state.parts())})[0]

    assert changed(lambda p: p.model[2].weight[0, 0].add_(1)) == "2.weight"
    assert changed(lambda p: p.model[1].running_mean[1].add_(1)) == "1.running_mean"
    assert "exp_avg" in changed(lambda p: p.adam.state[p.model[0].weight]["exp_avg"][0].add_(1))
    assert "extra/ema" in changed(lambda p: p.extra.value["ema"].add_(1))
    assert changed(lambda p: p.sgd.param_groups[0].update(lr=0.2)) == "optimizers/1/groups/0/lr"
    assert changed(lambda p: p.rate.step()).startswith(("optimizers/", "schedulers/"))


def test_what_cannot_be_stored_without_pickle_is_named() -> None:
    parts = Parts(1)
    parts.extra.value["model"] = nn.Linear(1, 1)
    with pytest.raises(ConfigError, match="extra/extra/model is a Linear"):
        parts.state.encoded()


def test_a_tuple_with_names_is_stored_as_a_tuple() -> None:
    parts = Parts(1)
    before = parts.state.fingerprint()
    parts.extra.value["best"] = Best(*parts.extra.value["best"])
    assert parts.state.fingerprint() == before


def test_an_optimizer_without_parameters_to_train_is_refused() -> None:
    model = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(ConfigError, match="no parameter that requires a gradient"):
        State(model, [torch.optim.SGD(model.parameters(), lr=0.1)], [], {})


def test_half_precision_and_scalars_keep_their_bits() -> None:
    tensors = [torch.randn(3).bfloat16(), torch.tensor(float("nan")), torch.tensor(-0.0), torch.arange(4)]
    frozen = Frozen(tensors, 0, sum(t.numel() * t.element_size() for t in tensors), {1}, Warm())
    frozen.wait()
    assert torch.equal(frozen.buffer, torch.cat([raw(t) for t in tensors]))


@pytest.mark.parametrize("prints", [(7, 7, 0), (0, 0, 0), (7, 0, 0)])
def test_who_does_not_tell_its_fingerprint_is_compared_with_nobody(prints: tuple[int, ...]) -> None:
    """At a `break` only who broke out knows that no step follows; who joins just then has told nothing."""
    entries = [
        RollEntry(
            member=f"r{i}", view=ViewId(1, 2), committed=5, held=(), keeps_output=True, fingerprint=told, outcome=0
        )
        for i, told in enumerate(prints)
    ]
    nobody: Any = None
    assert list(same_states(nobody, nobody, nobody, entries)) == []


@pytest.mark.parametrize(
    ("prints", "differing"),
    [
        ({"a": 1, "b": 2, "j": 1}, ()),
        ({"a": 1, "b": 1, "c": 2, "j": 2}, ("c", "j")),
        ({"a": 1, "b": 1, "j": 2}, ("j",)),
        ({"a": 1, "b": 1, "c": 2, "j": 1}, ("c",)),
        ({"a": 1, "j": 2, "k": 2}, ()),
    ],
    ids=["copy of one of two", "copy of one of three", "wrong copy", "right copy", "copies of nobody"],
)
def test_a_copy_speaks_for_nobody(prints: dict[str, int], differing: tuple[str, ...]) -> None:
    """A replica whose memory had failed fed a joiner; when a third one died both were a majority, and the last replica
    that was right was sent away."""
    entries = [
        RollEntry(
            member=name, view=ViewId(1, 2), committed=5, held=(), keeps_output=True, fingerprint=told, outcome=0,
            copied=name in "jk",
        )
        for name, told in prints.items()
    ]  # fmt: skip
    seat: Any = SimpleNamespace(me=next(iter(differing), "a"))
    guards: Any = SimpleNamespace(policy=Guards(divergence="replace", agreement=1), state=GuardState())
    found: Any = SimpleNamespace(
        view=View(id=ViewId(1, 2), members=tuple(prints)), parts=lambda: [("0.weight", 1)], diverged=diverged
    )
    course = same_states(seat, guards, found, entries, 5)
    next(course)
    words: dict[str, Any] = {"parts": {name: [("0.weight", value)] for name, value in prints.items()}}
    if differing:
        told = course.send(words)
        assert isinstance(told, TellFleet)
        assert [judged.against for judged in told.messages] == [differing]
    with pytest.raises(Evicted if differing else StateDiverged):
        course.send(words)


@pytest.mark.parametrize("capturable", [False, True])
def test_a_joiner_s_moments_lie_where_its_parameters_do(capturable: bool) -> None:
    """What arrives lies in the host's memory; here the joiner's own device is one that holds no bytes."""
    states = []
    for device in ("cpu", "meta"):
        model = nn.Linear(3, 2).to(device)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        states.append(State(model, [optimizer], [], {}))
    donor, joiner = states
    donor.optimizers[0].param_groups[0]["capturable"] = capturable
    for param in donor.params:
        moments = {key: torch.ones_like(param.detach()) for key in ("exp_avg", "exp_avg_sq")}
        donor.optimizers[0].state[param] = {"step": torch.tensor(3.0), **moments}
    plain, tensors = donor.encoded()
    joiner.load(plain, {name: tensor.clone() for name, tensor in tensors.items()})
    for param in joiner.params:
        kept = {key: value.device.type for key, value in joiner.optimizers[0].state[param].items()}
        assert kept == {"step": "meta" if capturable else "cpu", "exp_avg": "meta", "exp_avg_sq": "meta"}


@pytest.mark.parametrize("numel", [8, 3 << 20])
def test_a_comparison_reads_all_of_the_state_beside_the_step_or_at_once(numel: int) -> None:
    model = nn.Linear(1, numel)
    state = State(model, [torch.optim.AdamW(model.parameters())], [], {"extra": Extra()})
    first = Comparison((), state, lambda name: name.startswith("/extra")).told()
    assert first == (-1, state.fingerprint())
    with torch.no_grad():
        model.bias[numel - 1] += 1.0
    assert Comparison((), state, lambda name: False).told() == (-1, state.fingerprint()) != first


def test_what_only_an_optimizer_holds_is_in_the_fingerprint() -> None:
    model, other = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    state = State(model, [torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)], [], {})
    before = digest_of(state)
    with torch.no_grad():
        other.weight.add_(1.0)
    assert digest_of(state) != before
