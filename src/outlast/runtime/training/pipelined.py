"""One call of a pipeline's schedule in the place of a microbatch's loss.

torch's schedule makes the forwards and backwards of all its own microbatches in one call, so to a step it is what a
loss with its backward is: afterwards each parameter of this stage has the gradient of the microbatch, and the mean
loss, which only the last stage computes, is known on every rank. What is added up inside of the call torch adds, one
after the other and on the stage that has the parameter, so no number of replicas shows in it. Knows no steps and sums.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from outlast.core.position import position_seed
from outlast.errors import MembershipError, StepMisuse
from outlast.runtime.training.random_state import seed_everything
from outlast.runtime.training.stages import StageParts, StageTensor
from outlast.runtime.training.state import State, encoded_tree

__all__ = ["ScheduleCall", "check_schedule", "no_schedule", "stage_of"]


class ScheduleCall:
    """Stands where a loss stands: `backward`, then `detach`. `quiet`: hooks of gradients leave what comes in there
    alone; `inputs`, `keywords`: of the first stage and of every stage; `target`: of the last one."""

    def __init__(
        self,
        state: State,
        quiet: Callable[[], AbstractContextManager[None]],
        schedule: Any,
        inputs: Sequence[Any],
        keywords: Mapping[str, Any],
        target: Any,
    ) -> None:
        self._state, self._quiet, self._schedule = state, quiet, schedule
        self._inputs, self._keywords, self._target = inputs, keywords, target
        stages = state.stages
        self._place, self._last = (stages.place, stages.last) if stages is not None else (0, 0)
        self._loss: Tensor | None = None

    def backward(self) -> None:
        """All of the schedule. Raises StepMisuse if a parameter of this stage is left without a gradient,
        MembershipError if another rank is gone."""
        if self._place:  # stages that drew the same numbers would drop the same units
            seed_everything(position_seed(torch.initial_seed(), self._place, 0, 4))
        losses: list[Tensor] = []
        last = self._place == self._last
        with self._quiet():
            self._schedule.step(
                *(self._inputs if not self._place else ()),
                **({"target": self._target, "losses": losses} if last else {}),
                **self._keywords,
            )
        for name, param in zip(self._state.names, self._state.params, strict=True):
            if param.grad is None:
                raise StepMisuse(
                    f"{name} was given no gradient by the schedule",
                    did="the step was not committed",
                    remedy="a schedule with a loss_fn, and in each stage only parameters that every microbatch uses",
                )
        self._loss = self._told(losses)

    def _told(self, losses: Sequence[Tensor]) -> Tensor:
        """The mean loss, from the last stage to all of them."""
        loss = torch.zeros((), dtype=torch.float64)
        if losses:
            loss = torch.stack([each.detach().cpu() for each in losses]).mean().double()
        if not self._last:
            return loss
        from torch import distributed as dist

        try:
            dist.broadcast(loss, self._last)
        except RuntimeError as error:
            raise MembershipError(
                f"the ranks of this replica could not tell each other the loss ({error})",
                did="this replica ends",
                remedy="outlast why tells which of its ranks was lost first",
            ) from error
        return loss

    def detach(self) -> Tensor:
        """The mean loss over the schedule's microbatches, the same on every rank. After `backward`."""
        assert self._loss is not None
        return self._loss


def check_schedule(state: State, schedule: Any, ranks: int) -> None:
    """Raises StepMisuse where a schedule cannot stand for a microbatch."""
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle

    if not isinstance(schedule, PipelineScheduleSingle):
        raise StepMisuse(
            f"step.pipeline was given a {type(schedule).__name__}",
            did="nothing of this step was applied",
            remedy="ScheduleGPipe or Schedule1F1B, with one stage a rank: several stages a rank cannot be had yet",
        )
    if state.stages is None and ranks > 1:
        raise StepMisuse(
            "step.pipeline was called, and the ranks of this replica are no pipeline",
            did="nothing of this step was applied",
            remedy=f'mesh = run.mesh(pipeline={ranks}), and PipelineStage(…, group=mesh.get_group("pipeline"))',
        )


def stage_of(state: State, names: dict[str, Any]) -> StageParts:
    """What this rank has. `names`: as of `StageParts`."""
    tree = state.tree()
    trains = {
        state.name_of(p): (number, g)
        for number, optimizer in enumerate(state.optimizers)
        for g, group in enumerate(optimizer.param_groups)
        for p in group["params"]
        if p.requires_grad
    }
    held = tuple(
        StageTensor(name, tuple(t.shape), str(t.dtype).removeprefix("torch."), name in state.buffers, trains.get(name))
        for name, t in tree["model"].items()
    )
    groups = tuple(len(optimizer.param_groups) for optimizer in state.optimizers)
    _, registered = encoded_tree(tree["extra"])
    shapes = ", ".join(f"{name} {t.dtype}{list(t.shape)}" for name, t in registered.items())
    return StageParts(held, tuple(state.names), groups, shapes, names)


def no_schedule() -> StepMisuse:
    """The error for the backward of one stage alone."""
    return StepMisuse(
        "step.backward(loss) was called in a pipeline, where each rank has only a part of the model",
        did="nothing of this step was applied",
        remedy="step.pipeline(schedule, inputs, target=targets) on every rank",
    )
