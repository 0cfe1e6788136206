"""Who calls what trains: `protect` is called once, and a function that takes steps is called from the loop alone."""

from __future__ import annotations

import ast

import pytest

from outlast.convert import Conversion, convert

HEAD = """
import torch
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from mine import data, net, show


class Trainer:
    def __init__(self, net, loader):
        self.model = DDP(net)
        self.loader = loader
        self.optimizer = torch.optim.SGD(net.parameters(), 0.1)

    def one(self, x):
        loss = self.model(x).sum()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def run_epoch(self):
        self.model.train()
        for x in self.loader:
            self.one(x)

"""
ONCE = "    def train(self, n=0):\n        self.run_epoch()\n\n"
EPOCHS = "    def train(self, n=3):\n        for epoch in range(n):\n            self.run_epoch()\n\n"
MADE = "\nt = Trainer(net, DataLoader(data, batch_size=4))\n"
FUNCTION = (
    HEAD.partition("class")[0]
    + """
model = DDP(net)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
loader = DataLoader(data, batch_size=4)


def train():
    for x in loader:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()


"""
)


def by_hand(found: Conversion) -> str:
    return "; ".join(f"line {r.line}: {r.what}" for r in found.remarks if r.kind == "by hand")


@pytest.mark.parametrize(
    "calls",
    [
        "for epoch in range(10):\n    t.train(epoch)\n",
        "while True:\n    t.train()\n",
        "[t.train() for _ in range(10)]\n",
        "list(map(t.train, range(10)))\n",
        "show(lambda: t.train())\n",
        "def main(trainer):\n    trainer.train()\nfor seed in (1, 2):\n    main(t)\n",
        "def main(trainer):\n    trainer.train()\nmain(t)\nmain(t)\n",
        "t.train()\nt.train()\n",
        "class Later(Trainer):\n    def again(self):\n        while 1: super().train()\nLater(net, data).again()\n",
    ],
)
@pytest.mark.parametrize("method", [ONCE, EPOCHS])
def test_what_calls_protect_again_and_again_is_left_to_a_person(method: str, calls: str) -> None:
    """By any name of the object, and through any function."""
    found = convert(HEAD + method + MADE + calls)
    assert not found.complete, found.after
    ast.parse(found.after)


def test_what_trains_as_soon_as_it_is_made_is_made_once() -> None:
    made = HEAD.replace("\n\n    def one", "\n        self.train()\n\n    def one") + EPOCHS
    assert convert(f"{made}\nTrainer(net, DataLoader(data, batch_size=4))\n").complete
    assert not convert(f"{made}\nfor seed in (1, 2):\n    Trainer(net, DataLoader(data, batch_size=4))\n").complete


@pytest.mark.parametrize(
    "calls",
    ["[train() for _ in range(10)]", "x = {n: train() for n in 'ab'}", "list(map(train, range(10)))"],
)
def test_a_function_in_a_comprehension_trains_more_than_once(calls: str) -> None:
    assert convert(f"{FUNCTION}train()\n").complete
    found = convert(f"{FUNCTION}{calls}\n")
    assert not found.complete
    assert f"line {len(FUNCTION.splitlines()) + 1} does it again" in by_hand(found)


@pytest.mark.parametrize("method", [ONCE, EPOCHS])
def test_a_method_that_is_called_once_by_another_name_is_converted(method: str) -> None:
    """torch's own train() is another one, whatever the model is called there."""
    functions = "\ndef measure(m):\n    m.eval()\n    m.train()\ndef main(trainer):\n    trainer.train(3)\n"
    calls = "for _ in range(2):\n    measure(net)\n    net.train()\nmain(t)\n"
    found = convert(HEAD + method + functions + MADE + calls)
    assert found.complete, by_hand(found)


@pytest.mark.parametrize(
    "beside",
    ["t.run_epoch()\n", "for x in data:\n    t.one(x)\n"],
)
def test_a_function_that_takes_steps_has_no_other_call(beside: str) -> None:
    whole = HEAD + EPOCHS + MADE
    assert convert(whole + "t.train()\n").complete
    found = convert(whole + "t.train()\n" + beside)
    assert f"line {len((whole + beside).splitlines()) + 1}: {beside.split()[-1]}" in by_hand(found)


def test_a_method_that_is_empty_now_stays_for_who_calls_it() -> None:
    head = HEAD.replace("import torch\n", "import torch\nimport torch.distributed as dist\n")
    setup = "    def setup(self):\n        dist.init_process_group()\n\n"
    found = convert(head + setup + EPOCHS + MADE + "t.setup()\nt.train()\n")
    assert found.complete, by_hand(found)
    assert "    def setup(self):\n        pass\n" in found.after
    assert "\nt.setup()\n" in found.after
