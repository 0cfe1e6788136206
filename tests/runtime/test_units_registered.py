"""What is registered is compared while nothing has happened yet: a replica that alone changes it is named at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from outlast.core.protocol import Header, ViewId
from outlast.errors import LoopUnrepeatable
from outlast.runtime.checks.loop_habits import compare_settings
from outlast.runtime.training.loop_state import LoopState
from outlast.runtime.training.state import State
from outlast.runtime.transport.peer_messages import SettingsSeen


class Best:
    """Registered: a number and a tensor."""

    def __init__(self) -> None:
        self.loss, self.weights = 9.0, torch.ones(3)

    def state_dict(self) -> dict[str, Any]:
        return {"loss": self.loss, "weights": self.weights}

    def load_state_dict(self, values: dict[str, Any]) -> None:
        self.loss, self.weights = values["loss"], values["weights"]


class Two:
    """What two replicas say to each other."""

    def __init__(self, step: int, *, compared: bool = False, **changes: Any) -> None:
        self.loops = {"r0.1": replica(), "r1.1": replica()}
        for key, value in changes.items():
            setattr(self.loops["r0.1"].state.extra["best"], key, value)
        for loop in self.loops.values():
            loop.begin(step)
        self.headers = [
            Header(member=name, step=step, view=ViewId(1, 1), heard=0, settings=loop.digest_of_all(compared=compared))
            for name, loop in self.loops.items()
        ]

    def everyone(self, mine: SettingsSeen, phase: Any) -> dict[str, SettingsSeen]:
        return {name: SettingsSeen(mine.step, loop.settings, loop.remembered) for name, loop in self.loops.items()}

    def compare(self) -> None:
        port: Any = self
        compare_settings(port, self.headers, self.loops["r1.1"])


def replica() -> LoopState:
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    return LoopState(State(model, [torch.optim.SGD(model.parameters(), lr=0.1)], [], {"best": Best()}))


@pytest.mark.parametrize("changes", [{"loss": 1.0}, {"weights": torch.zeros(3)}])
@pytest.mark.parametrize("step", [1, 2, 4, 1024])
def test_what_one_alone_has_changed_is_named(step: int, changes: dict[str, Any]) -> None:
    with pytest.raises(LoopUnrepeatable, match=f"different things of 'best', .* before step {step}: r0.1 ") as caught:
        Two(step, **changes).compare()
    assert "not only where run.is_writer holds" in caught.value.remedy


def test_it_is_looked_at_in_few_steps_and_where_whole_states_are_not_compared() -> None:
    Two(3, loss=1.0).compare()
    Two(4, compared=True, loss=1.0).compare()
    Two(4).compare()


def test_another_setting_comes_first() -> None:
    two = Two(1, loss=1.0)
    two.loops["r0.1"].state.optimizers[0].param_groups[0]["lr"] = 0.2
    two.loops["r0.1"].settings = two.loops["r0.1"].read()
    with pytest.raises(LoopUnrepeatable, match=r"replicas have set lr differently in step 1: r0.1 0.2, r1.1 0.1"):
        two.compare()


def test_settings_are_read_as_they_are_now() -> None:
    """What was found last is kept; of each kind of change it must not be what is told."""
    loop = replica()
    group = loop.state.optimizers[0].param_groups[0]
    told = [loop.read()]
    for key, value in [
        ("lr", 0.2),
        ("lr", 1),
        ("nesterov", 1),  # equal to True, and another one
        ("momentum", -0.0),
        ("lr", torch.tensor(0.3)),
        ("lr", torch.tensor(0.4)),
        ("betas", (0.9, 0.99)),
        ("note", object()),  # no setting: nothing else goes unseen for it
    ]:
        group[key] = value
        told.append(loop.read())
        assert told[-1] == LoopState(loop.state).read()
    group["lr"].fill_(0.5)  # in place
    told.append(loop.read())
    loop.state.params[0].requires_grad_(False)
    told.append(loop.read())
    loop.state.model.eval()
    told.append(loop.read())
    assert told[8] == told[7]
    assert len(set(told)) == len(told) - 1


def test_a_frozen_part_of_the_model_that_the_loop_writes_is_handed_on() -> None:
    """A teacher, which follows the weights: it is no parameter that trains, and a joiner's replay does not write it."""
    model = torch.nn.ModuleDict({"student": torch.nn.Linear(2, 1), "teacher": torch.nn.Linear(2, 1)})
    model["teacher"].requires_grad_(False)
    loop = LoopState(State(model, [torch.optim.SGD(model["student"].parameters(), lr=0.1)], [], {}))
    with torch.no_grad():
        model["teacher"].weight.fill_(3.0)
    assert set(loop.written()) == {"teacher.weight"}
    copied = loop.keep(0)
    with torch.no_grad():
        model["teacher"].weight.zero_()
    loop.load(copied, whole=False)
    assert model["teacher"].weight.tolist() == [[3.0, 3.0]]
