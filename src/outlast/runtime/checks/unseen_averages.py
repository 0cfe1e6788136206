"""Does the loop keep an average of the weights that nobody was told of? Whoever joins would not have it, and no step
would show that: the run would end well, and what it saves would be another average (41).

Looked for among all that lives, after each of the first steps, then after steps 4, 8, 16 and so on; what could become
one is watched in between, by its version alone, so that one which begins late is looked at when it does. An
`AveragedModel` is known by what it counts, what is written by hand by how it moves (`_averages_by_hand.py`). No method
of torch is replaced. Of what is spread over ranks each looks at its own part. Not found: by hand, what is made anew
between two such looks, until the next; windows of the last few weights; what moves less than its numbers' rounding.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.optim.swa_utils import AveragedModel
from torch.utils.hooks import RemovableHandle

from outlast.errors import LoopUnrepeatable
from outlast.runtime.checks._averages_by_hand import LEAST, Look, Values, average_of, nearest, sampled
from outlast.runtime.training.state import State
from outlast.tensors import fingerprint, local

__all__ = ["UnseenAverages"]

_FIRST = 3  # steps, each of which is looked at
_MOST = 4096  # tensors of one shape that are looked at
_WATCHED = 8  # tensors, from one step to the next, by their values; all by their versions
_REMEDY = (
    'protect(..., state={"ema": ema}){how}, and update it on every replica, not only where run.is_writer holds; or '
    "training.after_step(…)"
)
_BY_HAND = ", with an object that has state_dict and load_state_dict (an AveragedModel, a copy of the model)"


class UnseenAverages:
    """Asked after each step. `last`, `first`: whether this member is that of the view; `asked`: how often the loop has
    asked whether it writes."""

    def __init__(
        self, state: State, last: Callable[[], bool], first: Callable[[], bool], asked: Callable[[], int]
    ) -> None:
        self._state, self._last, self._first, self._asked = state, last, first, asked
        self._steps = 0
        self._looks = 0  # more of them, one after each step
        self._models: list[tuple[weakref.ref[AveragedModel], int]] = []  # and versions of what they count with
        self._by_hand = _ByHand(state)
        self._asked_before = 0
        self._joined = False
        self._made: RemovableHandle | None = register_module_module_registration_hook(_Notices(weakref.ref(self)))

    def joined(self) -> None:
        """This replica came in by replaying: what it is fed holds registered averages as they were, step by step, which
        look like those of a loop. It looks for none that is written by hand; who was there from the start did."""
        self._joined = True
        self._by_hand.forget()

    def applied(self) -> None:
        """A step was applied. Raises LoopUnrepeatable for an average that was updated since the last one, unless
        because this is the one that writes: that is told."""
        self._steps += 1
        asked, self._asked_before = self._asked_before, self._asked()
        if self._made is None:
            return
        models = [found for where, version in self._models if (found := where()) and _version(found) != version]
        watched = bool(models) or (not self._joined and self._by_hand.stirred())
        due = self._steps <= _FIRST or self._steps.bit_count() == 1
        self._looks = 2 if due or watched else max(0, self._looks - 1)
        if not (self._last() or self._first()):
            self._models, self._looks = [], 0
            self._by_hand.forget()
            return
        what = "updates an AveragedModel" if any(not self._known(found) for found in models) else ""
        if not what and self._looks:
            averages, tensors = _alive()
            self._models = [(weakref.ref(held), _version(held)) for held in averages if not self._known(held)]
            name = "" if self._joined else self._by_hand.look(tensors)
            what = f"keeps an average of {name}, written by hand," if name else ""
        if what:
            self._found(what, alone=self._first() and asked != self._asked_before)

    def made(self, average: AveragedModel) -> None:
        """The script makes one, which has counted nothing so far."""
        self._models.append((weakref.ref(average), 0))

    def _found(self, what: str, *, alone: bool) -> None:
        said = f"the loop {what} that is not registered"
        remedy = _REMEDY.replace("{how}", _BY_HAND if "by hand" in what else "")
        if self._last() and not alone:
            raise LoopUnrepeatable(
                f"{said}: a replica that joins would not have it, nor would a run that goes on from a checkpoint",
                did="it was found before any fault",
                remedy=remedy,
            )
        self.over()
        print(f"outlast: {said}: who writes after this replica would not have it. {remedy}", file=sys.stderr)

    def over(self) -> None:
        """Nothing more is looked for."""
        if self._made is not None:
            self._made.remove()
            self._made = None

    def _known(self, average: AveragedModel) -> bool:
        """Whether the state holds what it counts and what it averages, itself or by a copy."""
        held = [local(tensor) for tensor in self._state.encoded()[1].values()]
        memory = {_place(tensor) for tensor in held}
        wanted = [average.n_averaged, *map(local, average.module.parameters())]
        loose = [tensor for tensor in wanted if _place(tensor) not in memory]
        if not loose:
            return True
        prints = {fingerprint(tensor) for tensor in held}
        return all(fingerprint(tensor.detach()) in prints for tensor in loose)


class _Notices:
    """The hook, which keeps nothing alive."""

    def __init__(self, where: weakref.ref[UnseenAverages]) -> None:
        self._where = where

    def __call__(self, module: nn.Module, name: str, submodule: nn.Module | None) -> None:
        found = self._where()
        if found is not None and isinstance(module, AveragedModel):
            found.made(module)


class _ByHand:
    """Tensors of parameters' shapes that are no part of the state, from one step to the next."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._before: dict[int, tuple[weakref.ref[Tensor], int, Look]] = {}
        self._quiet: list[tuple[weakref.ref[Tensor], int, Look]] = []  # those that stood still, some of them
        self._params: list[dict[torch.Size, tuple[list[str], Values, float]]] = []  # of each look, the newest last

    def stirred(self) -> bool:
        """Whether one that had been left alone so far was written to, through `.data` as well, or is gone."""
        versions = [(found := where()) is None or found._version != version for where, version, _ in self._quiet]
        if not any(versions) and not any(_moved(w(), v, look) for w, v, look in self._quiet[:_WATCHED]):
            return False
        self._quiet.clear()
        return True

    def forget(self) -> None:
        """Another member looks."""
        self._before, self._quiet, self._params = {}, [], []

    def look(self, alive: Iterable[Tensor]) -> str:
        """The parameter of which one is an average, by two looks after steps that follow each other; "" for none."""
        self._params = [*self._params[-_FIRST:], shapes := self._by_shape()]
        known = {local(tensor).untyped_storage().data_ptr() for tensor in self._state.encoded()[1].values()}
        before, self._before, quiet, found = self._before, {}, [], ""
        gone = [look for where, _, look in before.values() if where() is None]
        likely = [tensor for tensor in alive if _could_be(tensor, shapes, known)]
        many = Counter(tensor.shape for tensor in likely)
        for tensor in [tensor for tensor in likely if many[tensor.shape] <= _MOST]:  # else a data set, as a rule
            mine = weakref.ref(tensor), tensor._version, sampled(tensor)
            self._before[id(tensor)] = mine
            where, _, was = before.get(id(tensor), mine)
            if where() is not tensor or was is mine[2]:
                origin = nearest(mine[2], [row for row in gone if len(row.values) == len(mine[2].values)])
            else:
                origin = was
                if _same(was, mine[2]):
                    quiet.append(mine)
                    continue
            name = self._average(tensor, origin, mine[2]) if origin is not None else ""
            if name and (not found or self._state.names.index(name) < self._state.names.index(found)):
                found = name  # the first of the model's, whatever order the collector knows them in
        self._quiet = sorted(quiet, key=lambda row: -len(row[2].values))
        return found

    def _by_shape(self) -> dict[torch.Size, tuple[list[str], Values, float]]:
        rows: dict[torch.Size, list[tuple[str, Look]]] = {}
        for name, param in zip(self._state.names, map(local, self._state.params), strict=True):
            if param.numel() >= LEAST and param.is_floating_point() and type(param) in (Tensor, nn.Parameter):
                rows.setdefault(param.shape, []).append((name, sampled(param)))
        return {
            shape: ([name for name, _ in found], np.stack([look.values for _, look in found]), found[0][1].eps)
            for shape, found in rows.items()
        }

    def _average(self, tensor: Tensor, was: Look, look: Look) -> str:
        """The name of the parameter that it is an average of."""
        known = [at[tensor.shape] for at in self._params if tensor.shape in at]
        copies = np.concatenate([values for _, values, _ in known])
        moves = known[-1][1] - known[-2][1] if len(known) > 1 else np.zeros_like(known[-1][1])
        for names, values, eps in known[-2:]:
            index = average_of(was, look, values, eps, copies, moves)
            if index >= 0 and not self._may_be_registered(tensor):
                return names[index]
        return ""

    def _may_be_registered(self, tensor: Tensor) -> bool:
        """Whether something registered gives copies that are large enough to hold it in another form."""
        one, other = ({n: local(t) for n, t in self._state.encoded()[1].items()} for _ in range(2))
        extra = [name for name in one if name.startswith("/extra/") and not name.startswith("/extra/outlast.")]
        copied = [name for name in extra if name not in other or _place(one[name]) != _place(other[name])]
        return any(one[name].numel() >= tensor.numel() for name in copied)


def _could_be(held: Tensor, shapes: Iterable[torch.Size], known: set[int]) -> bool:
    if held.shape not in shapes or not held.is_floating_point():
        return False
    if held.layout != torch.strided or held.is_meta or held.is_inference() or held.grad_fn is not None:
        return False
    storage = held.untyped_storage()
    return storage.nbytes() >= held.numel() * held.element_size() and storage.data_ptr() not in known


def _alive() -> tuple[list[AveragedModel], list[Tensor]]:
    kinds: dict[type, int] = {Tensor: 2, nn.Parameter: 2}
    found: tuple[list[Any], list[Any], list[Any]] = [], [], []
    for held in gc.get_objects():
        kind = kinds.get(type(held))
        if kind is None:
            kind = kinds[type(held)] = int(issubclass(type(held), AveragedModel))  # isinstance would load modules
        if kind:
            found[kind].append(held)
    return found[1], found[2]


def _moved(tensor: Tensor | None, version: int, look: Look) -> bool:
    return tensor is None or tensor._version != version or not _same(sampled(tensor), look)


def _same(one: Look, other: Look) -> bool:
    return np.array_equal(one.values, other.values, equal_nan=True)


def _version(average: AveragedModel) -> int:
    return average.n_averaged._version


def _place(tensor: Tensor) -> tuple[str, int]:
    return str(tensor.device), tensor.data_ptr()
