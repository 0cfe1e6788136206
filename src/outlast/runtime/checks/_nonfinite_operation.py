"""Which operation made a number that is not finite: every operation of a microbatch is looked at, forward and backward.

A dispatch mode, so it costs several times the computation: used only on a microbatch that already failed. The first
operation with finite tensors in and a non-finite one out is the one named; an infinity that was asked for by a constant
(attention masks) is not, nor what only makes memory (`new_empty`: it holds whatever lay there) or looks at it otherwise
(a view). Knows no replicas and no steps.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from outlast.tensors import local

__all__ = ["OperationWatch", "bad_rows", "float_tensors"]

_OURS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
_NO_MODULE = "the loop itself"
_MAKES_MEMORY = frozenset(
    {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided", "resize_", "set_"}
)


class OperationWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context manager around the computation. Afterwards `operation`, `module`, `where` ("" if nothing was found)
    and `rows`: (row, of how many) along the first dimension of what came out."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operation = self.module = self.where = ""
        self.rows: list[tuple[int, int]] = []
        self._names = {module: name or type(module).__name__ for name, module in model.named_modules()}
        self._stack: list[nn.Module] = []
        self._spans: list[tuple[int, int, str]] = []  # autograd's sequence numbers that a module's forward made
        self._starts: list[int] = []
        self._handles: list[RemovableHandle] = []

    @classmethod
    def over(cls, model: nn.Module) -> OperationWatch:
        """A watch over `model`; over a compiled one only gradients are looked at, by who uses it."""
        compiled = any(type(m).__name__ == "OptimizedModule" for m in model.modules())
        return _Blind(model) if compiled else cls(model)

    def __enter__(self) -> Any:
        for module in self._names:
            self._handles.append(module.register_forward_pre_hook(self._begin))
            self._handles.append(module.register_forward_hook(self._end, always_call=True))
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._stack.clear()

    def _begin(self, module: nn.Module, args: Any) -> None:
        self._stack.append(module)
        self._starts.append(_sequence())

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._stack and self._stack[-1] is module:
            self._stack.pop()
            self._spans.append((self._starts.pop(), _sequence(), self._names[module]))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        fresh = not self.operation and _computes(func) and _finite_inputs(args, kwargs)
        out = func(*args, **kwargs)
        if fresh:
            for tensor in float_tensors(out):
                if not bool(torch.isfinite(tensor.detach()).all()):
                    self._found(func, tensor)
                    break
        return out

    def _found(self, func: Any, tensor: Tensor) -> None:
        node = torch._C._current_autograd_node()
        if node is not None:
            self.operation = f"{node.name()} (backward)"
            self.module = self._made_in(node)
        else:
            self.operation = str(func)
            self.module = self._names[self._stack[-1]] if self._stack else _NO_MODULE
            self.where = _user_line()
        if tensor.dim():
            self.rows = [(row, len(tensor)) for row in bad_rows(tensor)]

    def _made_in(self, node: Any) -> str:
        number = node._sequence_nr()
        around = [(stop - start, name) for start, stop, name in self._spans if start <= number < stop]
        return min(around)[1] if around else _NO_MODULE


class _Blind(OperationWatch):  # type: ignore[no-untyped-call]
    """Sees nothing."""

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: Any) -> None:
        return None


def _sequence() -> int:
    return int(torch._C._autograd._get_sequence_nr())


def _computes(func: Any) -> bool:
    """Whether an operation computes values: not one that only makes memory or shows the same memory as a view."""
    if func._schema.name.rpartition("::")[2].lstrip("_") in _MAKES_MEMORY:
        return False
    returned = [value.alias_info for value in func._schema.returns]
    return any(alias is None or alias.is_write for alias in returned)


def _finite_inputs(args: Any, kwargs: Any) -> bool:
    """Whether there are tensors among them, all of them finite, and no constant that is not."""
    tensors = list(float_tensors((args, kwargs)))
    if not tensors or any(isinstance(v, float) and not math.isfinite(v) for v in _flat((args, kwargs))):
        return False
    return all(bool(torch.isfinite(tensor.detach()).all()) for tensor in tensors)


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            yield from _flat(item)
    else:
        yield value


def float_tensors(value: Any) -> Iterator[Tensor]:
    """Those in nested lists, tuples and dicts; of what is spread over ranks the part that lies here."""
    return (local(v) for v in _flat(value) if isinstance(v, Tensor) and v.is_floating_point())


def bad_rows(tensor: Tensor) -> list[int]:
    """Along the first dimension of a floating-point tensor: where something is not finite."""
    if not tensor.numel():
        return []
    return [int(row) for row in (~torch.isfinite(tensor.detach().reshape(len(tensor), -1)).all(dim=1)).nonzero()]


def _user_line() -> str:
    """file:line of the innermost frame that is neither torch's nor ours."""
    for frame in reversed(traceback.extract_stack()):
        if not frame.filename.startswith((*_OURS, "<")):
            return f"{Path(frame.filename).name}:{frame.lineno}"
    return ""
