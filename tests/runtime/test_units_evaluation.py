"""Evaluations: the same numbers whoever computed which batch, alone and in a view that changes under its members."""

from __future__ import annotations

import random
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import nn

import outlast
from outlast.core.protocol import Header, ViewId
from outlast.errors import ConfigError, LoopUnrepeatable, StepMisuse, ViewAbandoned
from outlast.runtime.member._siblings import Siblings
from outlast.runtime.member.shared_evaluation import SharedEvaluations
from outlast.runtime.training.evaluation import Evaluation
from outlast.runtime.transport.peer_messages import Extra, SumsReady

pytestmark = pytest.mark.usefixtures("training_here")
SAMPLES = 37


class Noisy(nn.Module):
    """Drops and normalises: what it gives depends on its mode and on random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def rows(size: int = SAMPLES) -> list[torch.Tensor]:
    return list(torch.randn(size, 6, generator=torch.Generator().manual_seed(1)))


def numbers(model: nn.Module) -> Any:
    def fn(batch: torch.Tensor) -> dict[str, Any]:
        out = model(batch)
        told = {"loss": out.pow(2).mean(), "draw": (torch.rand(()), 3.0)}
        return told | ({"rare": out.sum()} if bool((out > 0.9).any()) else {})

    return fn


def protect(**more: Any) -> tuple[Any, nn.Module]:
    torch.manual_seed(4)
    model = Noisy()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    given: dict[str, Any] = {"global_batch_size": 8, "microbatches": 4, "seed": 2} | more
    return outlast.join().protect(model, optimizer, rows(), **given), model


def train(training: Any, model: nn.Module, before: bool, after: bool) -> list[dict[str, float]]:
    found = []
    for step in training.steps(until=3):
        if before:
            found.append(training.evaluate(rows(), numbers(model)))
        for batch in step:
            step.backward(model(batch).pow(2).mean())
        if after:
            found += [training.evaluate(rows(), numbers(model), batch_size=5) for _ in range(2)]
    return found


@pytest.mark.parametrize("plain", [False, True])
def test_an_evaluation_changes_nothing(plain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if plain:
        monkeypatch.setenv("OUTLAST", "off")
    without, with_it = protect(), protect()
    train(*without, before=False, after=False)
    found = train(*with_it, before=True, after=True)
    assert with_it[0].fingerprint() == without[0].fingerprint()
    assert with_it[1].training
    for name, buffer in with_it[1].named_buffers():
        assert torch.equal(buffer, dict(without[1].named_buffers())[name]), name
    assert len(found) == 9
    assert found[1] == found[2]  # the same state, evaluated twice
    assert set(found[0]) >= {"loss", "draw"}


def test_random_numbers_after_an_evaluation_are_those_without() -> None:
    training, model = protect()
    torch.manual_seed(5)
    random.seed(5)
    before = training.evaluate(rows(), numbers(model))  # outside of the loop: all of it here
    drawn = torch.rand(3), random.random()
    torch.manual_seed(5)
    random.seed(5)
    assert torch.equal(torch.rand(3), drawn[0])
    assert random.random() == drawn[1]
    assert training.evaluate(rows(), numbers(model)) == before


def test_the_mean_counts_every_sample_once() -> None:
    training, _ = protect()
    data = rows()
    found = training.evaluate(data, lambda batch: {"sum": batch.sum(1).mean(), "n": (1.0, len(batch))}, batch_size=5)
    assert found["n"] == 1.0
    assert found["sum"] == pytest.approx(float(torch.stack(data).sum(1).mean()), abs=1e-6)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"dataset": iter(rows())}, "does not give samples by number"),
        ({"dataset": []}, "the dataset is empty"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"fn": 3}, "cannot be called"),
        ({"fn": lambda batch: 3.0}, "gave a float"),
        ({"fn": lambda batch: {"x": batch}}, r"a tensor of shape \(2, 6\)"),
    ],
)
def test_what_cannot_be_evaluated_is_told(given: dict[str, Any], told: str) -> None:
    training, model = protect()
    with pytest.raises((ConfigError, StepMisuse), match=told):
        training.evaluate(**({"dataset": rows(), "fn": numbers(model)} | given))


def test_inside_the_loop_over_batches_it_is_told_where_to_be() -> None:
    training, model = protect()
    step = next(iter(training.steps(until=1)))
    next(iter(step))
    with pytest.raises(StepMisuse, match="inside the loop over a step's batches"):
        training.evaluate(rows(), numbers(model))


# --- members of a view, without a network ----------------------------------------------------------------------------
class Wire:
    """What its members have said in the view that works; nobody hears a member that is gone."""

    def __init__(self) -> None:
        self.view = View(0, ())
        self.meshes: dict[str, Mesh] = {}


class View:
    def __init__(self, number: int, members: tuple[str, ...]) -> None:
        self.id, self.members = number, members


class Mesh:
    """As far as an evaluation knows it: broadcasts lie in boxes; a wait that nothing ends is an error of the test."""

    def __init__(self, wire: Wire, me: str, on_wait: Any) -> None:
        self.wire, self.me, self.on_wait = wire, me, on_wait
        self.peers = [name for name in wire.view.members if name != me]
        self.boxes: dict[Any, dict[str, Any]] = defaultdict(dict)

    def broadcast(self, message: Extra) -> None:
        for name in self.peers:
            self.wire.meshes[name].boxes[Extra, message.step, message.bucket][self.me] = message

    def rest(self, timeout_s: float) -> None:
        """Nothing to read: it lies there already."""

    def until(self, done: Any, suspects: list[str], phase: Any) -> None:
        while not done():
            self.on_wait()


class Member:
    """One member's side: `SharedEvaluations` in a view, driven by a generator of its own in this thread."""

    def __init__(self, wire: Wire, name: str, wanted: Evaluation) -> None:
        self.wire, self.env, self.wanted = (
            wire,
            type("Env", (), {"me": name, "at_a_time": 1, "tensor_parallel": 1})(),
            wanted,
        )
        self.member, self.lock, self.computed = self, _Lock(), []
        self.committed, self.formed_in = 7, -1
        self.on_formed: Any = lambda: None
        self.siblings = Siblings((), -1)
        self.engine = type("Engine", (), {"late": None, "evaluated": [], "restore_buffers": lambda self: None})()
        self.shared = SharedEvaluations(self, lambda: None)  # type: ignore[arg-type]
        self.interrupt: Any = lambda: None

    @property
    def mesh(self) -> Any:
        return self.wire.meshes.get(self.env.me)

    def resume(self) -> str:
        if self.formed_in != self.wire.view.id:
            self.formed_in = self.wire.view.id
            self.on_formed()
        return "compute"

    def standing(self) -> tuple[View, None]:
        return self.wire.view, None

    def over(self, view: int) -> bool:
        return view != self.wire.view.id

    def enter(self, phase: Any, microbatch: int = -1) -> None:
        self.interrupt()

    def abandon(self, reason: Exception) -> None:
        """The next `resume` forms the view that there is now."""


class _Lock:
    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


class Counted(Evaluation):
    """Notes who computed which batch."""

    by: list[int]

    def compute(self, number: int) -> Any:
        self.by.append(number)
        return super().compute(number)


def wanted(model: nn.Module) -> Counted:
    data = rows()
    found = Counted(
        data, numbers(model), batch_size=3, collate=torch.utils.data.default_collate, model=model, seed=2
    )  # fmt: skip
    found.by = []
    return found


def install(wire: Wire, members: dict[str, Member], *names: str, on_wait: Any = None) -> None:
    """A view of these; whoever waits in it has the others go on, one after the other."""
    wire.view = View(wire.view.id + 1, names)
    wire.meshes = {}
    for name in names:
        wire.meshes[name] = Mesh(wire, name, on_wait or _stuck)


def _stuck() -> None:
    raise AssertionError("it waits for what nobody says")


def model_of() -> nn.Module:
    torch.manual_seed(4)
    return Noisy()


def test_members_share_the_batches_and_have_the_number_of_one_alone() -> None:
    model = model_of()
    want = wanted(model).here()
    wire, members = Wire(), {}
    members |= {name: Member(wire, name, wanted(model)) for name in ("a", "b", "c")}
    found: dict[str, Any] = {}

    def next_one() -> None:
        name = next((n for n in members if n not in started), None)
        assert name is not None, "it waits for what nobody says"
        begin(name)

    def begin(name: str) -> None:
        started.append(name)
        found[name] = members[name].shared.run(members[name].wanted)

    started: list[str] = []
    install(wire, members, "a", "b", "c", on_wait=next_one)
    begin("a")
    assert found == dict.fromkeys("abc", want)
    computed = [members[name].wanted.by for name in "abc"]
    assert sorted(number for part in computed for number in part) == list(range(13))
    assert [len(part) for part in computed] == [4, 4, 5]


@pytest.mark.parametrize("dies_after", [0, 1, 3])
def test_a_member_that_dies_costs_what_it_had_not_told(dies_after: int) -> None:
    """b dies in the middle of its range; a waits for it, c has not begun."""
    model = model_of()
    want = wanted(model).here()
    wire, members = Wire(), {}
    members |= {name: Member(wire, name, wanted(model)) for name in ("a", "b", "c")}
    found: dict[str, Any] = {}
    started = ["a"]

    def die() -> None:
        if len(members["b"].wanted.by) == dies_after:
            raise KeyboardInterrupt

    def next_one() -> None:
        if "b" not in started:
            started.append("b")
            members["b"].interrupt = die
            with pytest.raises(KeyboardInterrupt):
                members["b"].shared.run(members["b"].wanted)
            install(wire, members, "a", "c", on_wait=next_one)
            raise ViewAbandoned("b is gone")
        assert "c" not in started, "it waits for what nobody says"
        started.append("c")
        found["c"] = members["c"].shared.run(members["c"].wanted)

    install(wire, members, "a", "b", "c", on_wait=next_one)
    found["a"] = members["a"].shared.run(members["a"].wanted)
    assert found == dict.fromkeys("ac", want)
    again = [number for name in "ac" for number in members[name].wanted.by]
    assert sorted(again) == sorted(set(range(13)) - set(members["b"].wanted.by[:dies_after]))


def test_who_has_left_serves_who_is_still_inside_in_the_next_view() -> None:
    """a has everything and went on; c's last words reached only a."""
    model = model_of()
    want = wanted(model).here()
    wire, members = Wire(), {}
    members |= {name: Member(wire, name, wanted(model)) for name in ("a", "b", "c")}
    order: list[str] = []

    def next_one() -> None:
        if not order:
            order.append("c")
            _only_tells(members["c"], wire, "a")
        elif order == ["c"]:
            order.append("b")
            _only_tells(members["b"], wire, "a")
        else:
            _stuck()

    install(wire, members, "a", "b", "c", on_wait=next_one)
    assert members["a"].shared.run(members["a"].wanted) == want
    lost = Member(wire, "b", wanted(model))  # as b would be, had it heard nobody
    members["b"] = lost
    install(wire, members, "a", "b")
    members["a"].resume()  # inside the next step, where it forms the view
    assert lost.shared.run(lost.wanted) == want
    assert lost.wanted.by == []


def _only_tells(member: Member, wire: Wire, to: str) -> None:
    """Its part of the evaluation reaches one other, and then it stands still."""
    others = {name: mesh for name, mesh in wire.meshes.items() if name not in (to, member.env.me)}
    for name in others:
        wire.meshes[name] = Mesh(wire, name, _stuck)
    own, wire.meshes[member.env.me].on_wait = wire.meshes[member.env.me], _stand_still
    with pytest.raises(InterruptedError):
        member.shared.run(member.wanted)
    own.on_wait = _stuck
    wire.meshes |= others


def _stand_still() -> None:
    raise InterruptedError


def test_a_replica_that_does_not_evaluate_is_named_and_not_waited_for() -> None:
    model = model_of()
    wire, members = Wire(), {}
    members |= {name: Member(wire, name, wanted(model)) for name in ("a", "b")}
    install(wire, members, "a", "b")
    wire.meshes["a"].boxes[SumsReady, 7, 0]["b"] = "its sums of the next step"
    with pytest.raises(StepMisuse, match="b went on in step 7 without taking part") as caught:
        members["a"].shared.run(members["a"].wanted)
    assert "run.is_writer" in caught.value.remedy


def test_replicas_that_evaluate_different_things_are_told() -> None:
    model = model_of()
    wire, members = Wire(), {}
    members |= {name: Member(wire, name, wanted(model)) for name in ("a", "b")}
    members["b"].wanted.num_batches = 5
    install(wire, members, "a", "b", on_wait=lambda: members["b"].shared.run(members["b"].wanted))
    with pytest.raises(StepMisuse, match="evaluate different things at step 7"):
        members["a"].shared.run(members["a"].wanted)


def test_who_joins_takes_what_was_evaluated_before_the_step_from_its_outcome() -> None:
    """Its state is newer already."""
    member = Member(Wire(), "a", wanted(model_of()))
    member.engine.late = type("Meta", (), {"step": 6, "evaluated": ((("loss", 0.5),),)})()
    member.shared.given()
    assert member.shared.run(member.wanted) == {"loss": 0.5}
    with pytest.raises(LoopUnrepeatable, match="evaluates before the inner loop of step 6"):
        member.shared.run(member.wanted)
    assert Header(member="a", step=0, view=ViewId(1, 1), heard=0).metrics == ()
