"""Small trainings, each with one habit that a loop may have: `python loop.py NAME --out DIR`.

A habit is a function in `HABITS`: it gets a `Bench` (model, optimizer, and what it adds), and says what is done before
the inner loop, after it, and what is compared at the end. Each replica that reaches the end writes its fingerprint.
"""

from __future__ import annotations

import argparse
import copy
import fcntl
import hashlib
import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import outlast


class Bench:
    """What a habit may use and change. `before`, `inside`, `after`: of each step, called with the step."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.dataset: Any = [(x, y) for x, y in zip(torch.randn(256, 8), torch.randint(0, 4, (256,)), strict=True)]
        self.options: dict[str, Any] = {}
        self.compared: dict[str, Callable[[], Any]] = {}
        self.loss: Callable[[Any], Tensor] = lambda batch: nn.functional.cross_entropy(self.model(batch[0]), batch[1])
        self.before: Callable[[Any], None] = lambda step: None
        self.inside: Callable[[Any], None] = lambda step: None
        self.after: Callable[[Any], None] = lambda step: None
        self.protected: Callable[[Any], None] = lambda training: None
        self.iterate: Callable[[Any, int], Iterator[Any]] = lambda training, steps: training.steps(until=steps)
        self.run: Any = None
        self.training: Any = None
        self.batch: Any = None
        self.steps = 0
        self.gates: Path | None = None

    def rate(self, value: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = value


class Counter:
    """Registered state: a number that the loop counts up."""

    def __init__(self) -> None:
        self.n, self.best = 0, float("inf")

    def state_dict(self) -> dict[str, Any]:
        return {"n": self.n, "best": self.best}

    def load_state_dict(self, values: dict[str, Any]) -> None:
        self.n, self.best = values["n"], values["best"]


def plain(bench: Bench) -> None:
    """Nothing of its own."""


def rate_before(bench: Bench) -> None:
    """The learning rate is set by hand before the inner loop."""
    bench.before = lambda step: bench.rate(0.01 / (1 + step.number))


def rate_after(bench: Bench) -> None:
    """The learning rate for the next step is set by hand after the inner loop."""
    bench.after = lambda step: bench.rate(0.01 / (2 + step.number))


def rate_follows(bench: Bench) -> None:
    """The learning rate is multiplied in each step."""
    bench.after = lambda step: bench.rate(bench.optimizer.param_groups[0]["lr"] * 0.97)


def rate_inside(bench: Bench) -> None:
    """The learning rate is changed with every microbatch."""
    bench.inside = lambda step: bench.rate(bench.optimizer.param_groups[0]["lr"] * 0.99)


def scheduler_by_hand(bench: Bench) -> None:
    """A scheduler that `protect` is not given, stepped by the loop."""
    scheduler = torch.optim.lr_scheduler.OneCycleLR(bench.optimizer, 0.05, total_steps=100)
    bench.after = lambda step: scheduler.step()
    bench.compared["rates"] = scheduler.get_last_lr


def plateau_by_hand(bench: Bench) -> None:
    """A scheduler that reads the loss, stepped by the loop."""
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(bench.optimizer, patience=1, factor=0.9, threshold=0.3)
    bench.after = lambda step: scheduler.step(step.loss)
    bench.compared["best"] = lambda: scheduler.best


def plateau_of_ones_own(bench: Bench) -> None:
    """The same, written by hand, with what it remembers registered."""
    counter = Counter()

    def after(step: Any) -> None:
        counter.best, better = min(counter.best, step.loss), step.loss < counter.best
        bench.rate(bench.optimizer.param_groups[0]["lr"] * (1.0 if better else 0.9))

    bench.after, bench.options["state"] = after, {"plateau": counter}


def average(bench: Bench) -> None:
    """An average of the weights, registered and updated in the loop."""
    average = AveragedModel(bench.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    bench.after, bench.options["state"] = lambda step: average.update_parameters(bench.model), {"ema": average}
    bench.compared["average"] = lambda: digest(average.state_dict())


def average_by_writer(bench: Bench) -> None:
    """The same, updated by the one that writes, as rank 0 alone does it under DDP."""
    average(bench)
    update = bench.after
    bench.after = lambda step: update(step) if bench.run.is_writer else None


def average_unregistered(bench: Bench) -> None:
    """The same, updated on all, and nobody was told of it."""
    average(bench)
    del bench.options["state"]


def average_of_writer(bench: Bench) -> None:
    """The same, updated by the one that writes."""
    average_by_writer(bench)
    del bench.options["state"]


def _by_hand(bench: Bench, since: int = 0) -> dict[str, Tensor]:
    """An average of the weights as people write it, from a step on."""
    held = {name: param.detach().clone() for name, param in bench.model.named_parameters()}

    @torch.no_grad()
    def after(step: Any) -> None:
        if step.number >= since:
            for name, param in bench.model.named_parameters():
                held[name].lerp_(param, 0.01)

    bench.after = after
    return held


def average_by_hand(bench: Bench) -> None:
    """A dict of tensors that nobody was told of."""
    _by_hand(bench)


def average_by_hand_late(bench: Bench) -> None:
    """The same, which begins in step 5."""
    _by_hand(bench, since=5)


def average_made_anew(bench: Bench) -> None:
    """A list of tensors, each of which is replaced in each step by a new one."""
    held: list[list[Tensor]] = [[param.detach().clone() for param in bench.model.parameters()]]

    def after(step: Any) -> None:
        held[0] = [
            0.9 * mine + 0.1 * param.detach() for mine, param in zip(held[0], bench.model.parameters(), strict=True)
        ]

    bench.after = after


def average_of_a_copy(bench: Bench) -> None:
    """A second model, which follows the first."""
    second = copy.deepcopy(bench.model).requires_grad_(False)

    @torch.no_grad()
    def before(step: Any) -> None:
        for mine, param in zip(second.parameters(), bench.model.parameters(), strict=True):
            mine.mul_(0.99).add_(param, alpha=0.01)

    bench.before = before


def average_late(bench: Bench) -> None:
    """An AveragedModel that is made in step 5, and that nobody was told of."""
    held: list[AveragedModel] = []

    def after(step: Any) -> None:
        if step.number == 5:
            held.append(AveragedModel(bench.model))
        if held:
            held[0].update_parameters(bench.model)

    bench.after = after


def average_by_hand_registered(bench: Bench) -> None:
    """The dict of tensors, with an object around it that is registered and gives them as one flat tensor."""
    held = _by_hand(bench)

    class Flat:
        def state_dict(self) -> dict[str, Tensor]:
            return {"flat": torch.cat([tensor.flatten() for tensor in held.values()])}

        def load_state_dict(self, values: dict[str, Tensor]) -> None:
            parts = values["flat"].split([tensor.numel() for tensor in held.values()])
            for tensor, part in zip(held.values(), parts, strict=True):
                tensor.copy_(part.view_as(tensor))

    bench.options["state"] = {"ema": Flat()}
    bench.compared["average"] = lambda: digest(held)


def average_in_the_model(bench: Bench) -> None:
    """A second part of the model, frozen, which follows the first; its answers are learned from."""
    student, teacher = bench.model, copy.deepcopy(bench.model).requires_grad_(False)
    bench.model = nn.ModuleDict({"student": student, "teacher": teacher})

    @torch.no_grad()
    def after(step: Any) -> None:
        for mine, param in zip(teacher.parameters(), student.parameters(), strict=True):
            mine.lerp_(param, 0.05)

    def loss(batch: Any) -> Tensor:
        far = (student(batch[0]) - teacher(batch[0])).square().mean()
        return nn.functional.cross_entropy(student(batch[0]), batch[1]) + far

    bench.after, bench.loss = after, loss
    bench.compared["teacher"] = lambda: digest(teacher.state_dict())


def copies_kept(bench: Bench) -> None:
    """Copies of the weights, of the best step and of the step before, and how far they have moved: no averages."""
    kept: dict[str, list[Tensor]] = {"last": [p.detach().clone() for p in bench.model.parameters()]}
    total = [torch.zeros_like(p) for p in bench.model.parameters()]

    @torch.no_grad()
    def after(step: Any) -> None:
        for added, param, last in zip(total, bench.model.parameters(), kept["last"], strict=True):
            added.add_((param - last).abs())
        kept["last"] = [param.clone() for param in bench.model.parameters()]
        if step.number % 3 == 0:
            kept["best"] = [param.clone() for param in bench.model.parameters()]

    bench.after = after


class Copied:
    """Registered state that gives copies of what an average holds."""

    def __init__(self, held: AveragedModel) -> None:
        self.held = held

    def state_dict(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in self.held.state_dict().items()}

    def load_state_dict(self, values: dict[str, Tensor]) -> None:
        self.held.load_state_dict(values)


def average_by_copies(bench: Bench) -> None:
    """An average that is registered by something around it."""
    average(bench)
    bench.options["state"] = {"ema": Copied(bench.options["state"]["ema"])}


def teacher(bench: Bench) -> None:
    """An average that is updated before the inner loop, and used in it."""
    average = AveragedModel(bench.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    bench.before, bench.options["state"] = lambda step: average.update_parameters(bench.model), {"ema": average}
    loss = bench.loss
    bench.loss = lambda batch: loss(batch) + (average(batch[0]).detach() - bench.model(batch[0])).square().mean()
    bench.compared["average"] = lambda: digest(average.state_dict())


def counter(bench: Bench) -> None:
    """Something counted before and after the inner loop."""
    counter = Counter()

    def count(step: Any) -> None:
        counter.n += 1

    bench.before, bench.after, bench.options["state"] = count, count, {"counter": counter}
    bench.compared["n"] = lambda: counter.n


def clamped(bench: Bench) -> None:
    """Weights that the loop clamps between steps."""

    @torch.no_grad()
    def clamp(step: Any) -> None:
        for param in bench.model.parameters():
            param.clamp_(-0.2, 0.2)

    bench.after = clamp


def decayed_before(bench: Bench) -> None:
    """Weights that the loop makes smaller before each step: twice is another thing than once."""

    @torch.no_grad()
    def decay(step: Any) -> None:
        for param in bench.model.parameters():
            param.mul_(0.99)

    bench.before = decay


def frozen_then_thawed(bench: Bench) -> None:
    """Frozen after protect(), thawed in the loop once and for all."""
    bench.compared["frozen"] = lambda: [p.requires_grad for p in bench.model.parameters()]

    def before(step: Any) -> None:
        if step.number in (0, 4):
            bench.model[0].requires_grad_(step.number > 0)

    bench.before = before


def eval_mode(bench: Bench) -> None:
    """A part of the model is put into eval mode in the middle of the run."""
    bench.model = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.5), nn.Linear(32, 4))
    bench.optimizer = torch.optim.AdamW(bench.model.parameters(), lr=0.01)

    def after(step: Any) -> None:
        if step.number == 4:
            bench.model[1].eval()

    bench.after = after


def thawed(bench: Bench) -> None:
    """A parameter that did not train when protect() was called begins to."""
    bench.model[0].requires_grad_(False)
    bench.before = lambda step: bench.model[0].requires_grad_(step.number >= 2)


def group_added(bench: Bench) -> None:
    """A group is added to the optimizer in the loop."""
    head = bench.model[2]
    bench.optimizer = torch.optim.AdamW(bench.model[0].parameters(), lr=0.01)

    def before(step: Any) -> None:
        if step.number == 2 and len(bench.optimizer.param_groups) == 1:
            bench.optimizer.add_param_group({"params": list(head.parameters())})

    bench.before = before


def group_added_inside(bench: Bench) -> None:
    """The same amid a step."""
    group_added(bench)
    bench.before, bench.inside = bench.inside, bench.before


def average_by_hook(bench: Bench) -> None:
    """An average of the weights, registered and updated by a hook of the optimizer."""
    average = AveragedModel(bench.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    bench.optimizer.register_step_post_hook(lambda *_: average.update_parameters(bench.model))
    bench.options["state"] = {"ema": average}
    bench.compared["average"] = lambda: digest(average.state_dict())


def data_written(bench: Bench) -> None:
    """Weights that the loop clamps between steps, unseen."""

    def clamp(step: Any) -> None:
        for param in bench.model.parameters():
            param.data.clamp_(-0.2, 0.2)

    bench.after = clamp


class Counting(torch.optim.SGD):
    """Counts its steps where nobody sees it."""

    count = 0

    def step(self, closure: Any = None) -> None:
        self.count += 1
        for group in self.param_groups:
            for param in group["params"]:
                param.data.add_(param.grad, alpha=-group["lr"] / self.count)


def counting_optimizer(bench: Bench) -> None:
    """The optimizer keeps what it needs in an attribute."""
    bench.optimizer = Counting(bench.model.parameters(), lr=0.1)


class Drawing:
    """A dataset that adds noise from a generator of its own; `keep`: from torch's, but only when a sample is new."""

    def __init__(self, rows: Any, keep: bool) -> None:
        self.rows, self.keep, self.own = rows, keep, torch.Generator().manual_seed(0)
        self.kept: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        x, y = self.rows[index]
        if not self.keep:
            return x + torch.randn(8, generator=self.own), y
        if index not in self.kept:
            self.kept[index] = x + torch.randn(8), y
        return self.kept[index]


def drawing_dataset(bench: Bench) -> None:
    """Augmentation from a generator of the dataset's own."""
    bench.dataset = Drawing(bench.dataset, keep=False)


def drawing_workers(bench: Bench) -> None:
    """The same, with workers."""
    bench.dataset, bench.options["num_workers"] = Drawing(bench.dataset, keep=False), 1


def caching_dataset(bench: Bench) -> None:
    """Augmentation that is drawn once and kept."""
    bench.dataset = Drawing(bench.dataset, keep=True)


def caching_workers(bench: Bench) -> None:
    """The same, with workers."""
    bench.dataset, bench.options["num_workers"] = Drawing(bench.dataset, keep=True), 1


class Preparing(Drawing):
    """Draws what it keeps of a sample by its index, and something once, as it is first asked: no sample hangs on who
    asked before."""

    begun = False

    def __getitem__(self, index: int) -> Any:
        if not self.begun:
            self.begun = True
            random.random()
        if index not in self.kept:
            torch.manual_seed(index)
        return super().__getitem__(index)


def preparing_dataset(bench: Bench) -> None:
    """What is drawn once and kept follows from the index."""
    bench.dataset = Preparing(bench.dataset, keep=True)


def unregistered(bench: Bench) -> None:
    """A rate that follows from what the loop remembers, and nobody was told of."""
    seen: list[float] = []

    def after(step: Any) -> None:
        seen.append(step.loss)
        bench.rate(0.01 / len(seen))

    bench.after = after


def clipped_by_hand(bench: Bench) -> None:
    """Gradients are clipped where a plain loop does it."""
    bench.after = lambda step: nn.utils.clip_grad_norm_(bench.model.parameters(), 1.0)


def scheduler_twice(bench: Bench) -> None:
    """A scheduler that `protect` is given, and that the loop steps as well."""
    scheduler = torch.optim.lr_scheduler.StepLR(bench.optimizer, 3)
    bench.options["scheduler"], bench.after = scheduler, lambda step: scheduler.step()


def scaled(bench: Bench) -> None:
    """A loss that is multiplied for half precision, without the step that divides it again."""
    scaler, loss = torch.amp.GradScaler("cpu"), bench.loss
    bench.loss = lambda batch: scaler.scale(loss(batch))


def adversaries(bench: Bench) -> None:
    """Two models with an optimizer each, trained against each other as one sum; an average of one of them."""
    maker, judge = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    bench.model = nn.ModuleDict({"maker": maker, "judge": judge})
    bench.optimizer = [torch.optim.Adam(maker.parameters(), 0.01), torch.optim.SGD(judge.parameters(), 0.05, 0.9)]
    average = AveragedModel(maker, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    rates = [torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5) for optimizer in bench.optimizer]
    bench.options |= {"state": {"average": average}, "scheduler": rates[0], "clip_norm": 1.0}

    def loss(batch: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            made = maker(torch.randn_like(batch[0]))
            judged = judge(made.detach()).mean() - judge(batch[0]).mean()
            judge.requires_grad_(False)
            fooled = -judge(made).mean()
            judge.requires_grad_(True)
        return judged.float() + fooled.float()

    def after(step: Any) -> None:
        rates[1].step()
        average.update_parameters(maker)

    bench.loss, bench.after = loss, after
    bench.compared["average"] = lambda: digest(average.state_dict())
    bench.compared["rates"] = lambda: [rate.get_last_lr() for rate in rates]


def in_turns(bench: Bench) -> None:
    """Two models with an optimizer each, one of them trained in each step."""
    maker, judge = nn.Linear(8, 8), nn.Linear(8, 1)
    bench.model = nn.ModuleDict({"maker": maker, "judge": judge})
    bench.optimizer = [torch.optim.Adam(maker.parameters(), 0.01), torch.optim.Adam(judge.parameters(), 0.01)]

    def before(step: Any) -> None:
        maker.requires_grad_(step.number % 2 == 0)
        judge.requires_grad_(step.number % 2 == 1)

    def loss(batch: Any) -> Tensor:
        x = batch[0].requires_grad_()
        (slope,) = torch.autograd.grad(judge(x).sum(), x, create_graph=True)
        return judge(maker(batch[0])).mean() - judge(batch[0]).mean() + (slope.norm(dim=1) - 1).square().mean()

    bench.before, bench.loss = before, loss


class Free(torch.optim.Optimizer):
    """Keeps two points a parameter, and shows one of them: as of schedule-free optimizers, which `eval` and `train`."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "k": 0, "training": True})

    @torch.no_grad()
    def _show(self, weight: float, training: bool) -> None:
        for group in self.param_groups:
            if group["training"] != training:
                group["training"] = training
                for param in group["params"]:
                    if "z" in self.state[param]:
                        param.lerp_(self.state[param]["z"], weight)

    def eval(self) -> None:
        self._show(1 - 1 / 0.9, False)

    def train(self) -> None:
        self._show(1 - 0.9, True)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            assert group["training"]
            group["k"] += 1
            for param in group["params"]:
                z = self.state[param].setdefault("z", param.clone())
                param.lerp_(z, 1 / group["k"])
                param.sub_(param.grad, alpha=group["lr"] * (0.9 * (1 - 1 / group["k"]) - 1) * -1)
                z.sub_(param.grad, alpha=group["lr"])


def schedule_free(bench: Bench) -> None:
    """An optimizer that is put into eval mode after each step and back before the next."""
    bench.optimizer = Free(bench.model.parameters(), 0.05)
    bench.before, bench.after = lambda step: bench.optimizer.train(), lambda step: bench.optimizer.eval()


def plateau_in_state(bench: Bench) -> None:
    """A scheduler that reads the loss, registered."""
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(bench.optimizer, patience=1, factor=0.9, threshold=0.3)
    bench.after, bench.options["state"] = lambda step: scheduler.step(step.loss), {"plateau": scheduler}
    bench.compared["best"] = lambda: scheduler.best


def thawed_in_stages(bench: Bench) -> None:
    """One layer after the other is thawed, from the head down, each with a group and a rate of its own."""
    layers = [bench.model[2], bench.model[0]]
    bench.optimizer = torch.optim.AdamW([{"params": list(layer.parameters()), "lr": 0.01} for layer in layers])

    def before(step: Any) -> None:
        for n, layer in enumerate(layers):
            layer.requires_grad_(step.number >= 5 * n)
            bench.optimizer.param_groups[n]["lr"] = 0.01 / (1 + max(0, step.number - 5 * n))

    bench.before = before


def hook_that_counts(bench: Bench) -> None:
    """A hook of the optimizer that changes the rate by what it has counted."""
    seen: list[int] = []

    def hook(optimizer: Any, *_: Any) -> None:
        seen.append(1)
        with torch.no_grad():
            bench.model[2].bias.mul_(1 - 0.1 / len(seen))

    bench.optimizer.register_step_post_hook(hook)


def hook_that_drifts(bench: Bench) -> None:
    """A hook of the optimizer that needs nothing: it decays weights by what the groups say."""

    @torch.no_grad()
    def hook(optimizer: Any, *_: Any) -> None:
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.mul_(1 - 0.1 * group["lr"])

    bench.optimizer.register_step_post_hook(hook)


class Switching(torch.optim.Optimizer):
    """Steps one group after the other, and remembers which is next, in a group if it is `told` to."""

    def __init__(self, groups: Any, told: bool) -> None:
        super().__init__(groups, {"lr": 0.05})
        self.turns = self.param_groups[0] if told else {}
        self.turns["turn"] = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        group = self.param_groups[self.turns["turn"] % len(self.param_groups)]
        self.turns["turn"] += 1
        for param in group["params"]:
            param.sub_(param.grad, alpha=group["lr"])


def group_at_a_time(bench: Bench) -> None:
    """An optimizer that steps a group at a time."""
    bench.optimizer = Switching([{"params": list(bench.model[i].parameters())} for i in (0, 2)], told=True)


def group_at_a_time_unseen(bench: Bench) -> None:
    """The same, where it counts in an attribute."""
    bench.optimizer = Switching([{"params": list(bench.model[i].parameters())} for i in (0, 2)], told=False)


def weighted_by_count(bench: Bench) -> None:
    """A weight of the loss that follows from what the loop counts, and nobody was told of."""
    seen: list[int] = []
    bench.after = lambda step: seen.append(1)
    loss = bench.loss
    bench.loss = lambda batch: loss(batch) * (1 + 0.1 * len(seen))


def drawn_between(bench: Bench) -> None:
    """A strength that is drawn anew before each step and after it, from the generators that everybody has."""
    drawn = [1.0, 1.0]

    def before(step: Any) -> None:
        drawn[0] = random.random() + float(torch.rand(()))

    def after(step: Any) -> None:
        drawn[1] = float(np.random.rand())

    loss = bench.loss
    bench.before, bench.after, bench.loss = before, after, lambda batch: loss(batch) * drawn[0]
    bench.compared["drawn"] = lambda: drawn


def drawn_from_ones_own(bench: Bench, *, registered: bool = True) -> None:
    """The same, from generators of the loop's own, which are registered."""
    own: dict[str, Any] = {"torch": torch.Generator(), "numpy": np.random.default_rng(6), "python": random.Random(7)}
    drawn = [1.0]

    def draw(step: Any) -> None:
        drawn[0] = float(torch.rand((), generator=own["torch"])) + own["numpy"].random() + own["python"].gauss(2.0, 0.1)

    loss = bench.loss
    bench.before, bench.after, bench.loss = draw, draw, lambda batch: loss(batch) * drawn[0]
    bench.options["state"] = own if registered else {}
    bench.compared["drawn"] = lambda: drawn[0]


def drawn_unregistered(bench: Bench) -> None:
    """The same, and nobody was told of them."""
    drawn_from_ones_own(bench, registered=False)


def read_before(bench: Bench, *, weights: bool = True) -> None:
    """What the lines before the inner loop read weighs the loss, and is added up after it: a number of a generator's, a
    rate and a count that the lines after the step before had set, weights that these wrote, an average of them."""
    own, tally, read = torch.Generator(), Counter(), [1.0]
    average = AveragedModel(bench.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(bench.optimizer, 0.9)
    out: Any = bench.model[2]  # type: ignore[index]

    def before(step: Any) -> None:
        read[0] = 1.0 + float(torch.rand((), generator=own)) + 30.0 * bench.optimizer.param_groups[0]["lr"]
        read[0] += 0.01 * tally.n + float(next(average.parameters()).detach().abs().mean())
        read[0] += float(out.bias.detach().abs().sum()) if weights else 0.0

    def after(step: Any) -> None:
        torch.rand(3, generator=own)
        tally.n += 1
        tally.best = read[0] if step.number == 0 else tally.best + read[0]
        scheduler.step()
        average.update_parameters(bench.model)
        with torch.no_grad():
            out.bias.mul_(0.5)

    loss = bench.loss
    bench.before, bench.after, bench.loss = before, after, lambda batch: loss(batch) * read[0]
    bench.options["state"] = {"own": own, "tally": tally, "average": average}
    bench.compared |= {"read": lambda: read[0], "tally": lambda: [tally.n, tally.best]}


def read_before_but_weights(bench: Bench) -> None:
    """The same without the weights: who joins and has replayed nothing finds them a step later (decision 0184)."""
    read_before(bench, weights=False)


def average_that_follows(bench: Bench) -> None:
    """An average of the weights, registered and updated after each step by whoever takes the step."""
    average = AveragedModel(bench.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    bench.protected = lambda training: training.after_step(lambda: average.update_parameters(bench.model))
    bench.options["state"] = {"average": average}
    bench.compared["average"] = lambda: digest(average.state_dict())


def measured(bench: Bench) -> None:
    """Numbers beside the loss, of which some batches have none."""
    found: dict[int, dict[str, float]] = {}

    def inside(step: Any) -> None:
        with torch.no_grad():
            x, y = bench.batch
            step.metric("accuracy", (bench.model(x).argmax(1) == y).float().mean())
            if bool((y == 0).any()):
                step.metric("zeros", bench.model(x)[y == 0].sum(), weight=int((y == 0).sum()))

    def after(step: Any) -> None:
        found.clear()
        found[step.number] = dict(step.metrics)

    bench.inside, bench.after = inside, after
    bench.compared["metrics"] = lambda: found


def stopped_by_one(bench: Bench) -> None:
    """Who writes ends training for all, five steps before its end."""
    done: list[int] = []

    def after(step: Any) -> None:
        done[:] = [step.number]
        if bench.run.is_writer and step.number == bench.steps - 6:
            bench.training.stop("it is good enough")

    bench.after = after
    bench.compared["last"] = lambda: [done, bench.training.stopped]


def evaluates(bench: Bench) -> None:
    """Two evaluations a step, before and after the inner loop; the better losses are counted."""
    held_out = [(x, y) for x, y in zip(torch.randn(90, 8), torch.randint(0, 4, (90,)), strict=True)]
    counter, found = Counter(), dict[str, Any]()

    def fn(batch: Any) -> dict[str, Any]:
        if bench.gates is not None and bench.training.engine.loop.step == 5:
            pass_gate(bench.gates, 1005)
        out = bench.model(batch[0])
        return {"loss": nn.functional.cross_entropy(out, batch[1]), "hits": (out.argmax(1) == batch[1]).float().mean()}

    def before(step: Any) -> None:
        found["before"] = bench.training.evaluate(held_out, fn, batch_size=4)
        bench.rate(0.01 / (1 + found["before"]["loss"]))

    def after(step: Any) -> None:
        found["after"] = bench.training.evaluate(held_out, fn, batch_size=7)
        counter.n, counter.best = counter.n + (found["after"]["loss"] < counter.best), found["after"]["loss"]

    bench.before, bench.after, bench.options["state"] = before, after, {"counter": counter}
    bench.compared["found"] = lambda: [found, counter.n]


class Stream(torch.utils.data.IterableDataset[Any]):
    """Samples in an order of its own in each pass, with noise; passes get longer."""

    def __init__(self, rows: Any) -> None:
        self.rows, self.epoch = rows, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        for index in torch.randperm(60 + 9 * self.epoch).tolist():
            x, y = self.rows[index]
            yield x + 0.1 * torch.randn(8), y


def streams(bench: Bench) -> None:
    """Samples that come in an order of their own, in passes of different lengths."""
    bench.dataset, passes = Stream(bench.dataset), list[int]()
    bench.after = lambda step: passes.append(step.epoch)
    bench.compared["pass"] = lambda: passes[-1]


def streams_by_loader(bench: Bench) -> None:
    """The same, as batches of a loader with a worker."""
    streams(bench)
    bench.dataset = torch.utils.data.DataLoader(bench.dataset, batch_size=2, num_workers=1)


HABITS = {
    f.__name__: f
    for f in (
        plain, rate_before, rate_after, rate_follows, rate_inside, scheduler_by_hand, plateau_by_hand,
        plateau_of_ones_own, average, average_by_hook, teacher, counter, clamped, decayed_before, frozen_then_thawed,
        eval_mode,
        unregistered, thawed, group_added, group_added_inside, data_written, counting_optimizer, drawing_dataset,
        drawing_workers, caching_dataset, caching_workers, preparing_dataset,
        clipped_by_hand, scheduler_twice, scaled, adversaries, in_turns, schedule_free,
        plateau_in_state, thawed_in_stages, hook_that_counts, hook_that_drifts, group_at_a_time, group_at_a_time_unseen,
        weighted_by_count, average_that_follows, measured, stopped_by_one, evaluates, streams,
        streams_by_loader, average_by_writer, drawn_between, drawn_from_ones_own, drawn_unregistered,
        read_before, read_before_but_weights,
        average_unregistered, average_of_writer, average_by_copies, average_by_hand, average_by_hand_late,
        average_made_anew, average_of_a_copy, average_late, average_by_hand_registered, average_in_the_model,
        copies_kept,
    )
}  # fmt: skip


def digest(tensors: dict[str, Tensor]) -> str:
    sha = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        sha.update(name.encode() + tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def pass_gate(gates: Path | None, step: int) -> None:
    """Wait while the test holds the gate before this step."""
    if gates is not None and (gates / str(step)).exists():
        with (gates / str(step)).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH)


def main(habits: dict[str, Callable[[Bench], None]], given: list[str] | None = None) -> None:
    """`given`: arguments in place of the command line's."""
    parser = argparse.ArgumentParser()
    parser.add_argument("habit", choices=habits)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--gates", type=Path)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(given)
    run, bench = outlast.join(), Bench()
    bench.run, bench.steps, bench.gates = run, args.steps, args.gates
    habits[args.habit](bench)
    training = run.protect(
        bench.model, bench.optimizer, bench.dataset, global_batch_size=16, microbatches=args.microbatches, seed=1,
        **bench.options,
    )  # fmt: skip
    bench.training = training
    bench.protected(training)
    for step in bench.iterate(training, args.steps):
        pass_gate(args.gates, step.number)
        bench.before(step)
        for batch in step:
            bench.batch = batch
            step.backward(bench.loss(batch))
            bench.inside(step)
        bench.after(step)
    found = {"fingerprint": training.fingerprint()} | {name: found() for name, found in bench.compared.items()}
    part = args.out / f"{run.name}.{os.getpid()}.part"
    part.write_text(json.dumps(found))
    part.rename(args.out / f"{run.name}.json")


if __name__ == "__main__":
    main(HABITS)
