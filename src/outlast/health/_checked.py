"""Sums that check themselves (ABFT): every matrix product of a step is held against the sums of its factors.

Role: a dispatch mode, entered around the computation of a microbatch, forward and backward. The operation itself is
torch's, untouched, so that results have the bits that they have without it; only what was computed wrongly is put in
order. It knows no replicas.

A doubt is cheap and a finding is proof. A sum that is off by more than rounding explains has the product computed
again. Other bits prove a fault, and the second product counts if it adds up. The same bits are held against the bound
that no rounding can exceed: what is within it was only doubted (and this kind of product is doubted later from then
on); what is not was computed wrongly twice, so this device cannot be used: DeviceFault.
Sums of parameters are taken once a step, of both sides: a parameter that changes in memory afterwards shows, and the
flipped bits follow from the sums.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from outlast.errors import DeviceFault
from outlast.health._check_refusals import refuse_compiled, refuse_unmatched
from outlast.health._checks import ProductChecks, SumFinding
from outlast.health._convolutions import CONVOLUTIONS, Convolution
from outlast.health._memory import WrongBits, repair, same_sums
from outlast.health._outputs import all_real, can_be_read, draws_at_random, name_of, tensors_of, where_unlike
from outlast.health._products import ATTENTION, PRODUCTS, Product
from outlast.tensors import Misfit, Sums, prepare_sums, product_misfit, sums_of, within_bound

__all__ = ["CheckedSums"]

_LOOSER = 2.0
_MAKERS: dict[Any, Any] = {**PRODUCTS, **CONVOLUTIONS}
_SpoilT = Callable[[str, Any], None]


class CheckedSums(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Checks the products of a computation by sums of their rows and columns. `strike`: called with each operation's
    name and output; tests put wrong bits in.

    `num_checked`, `num_doubted`, `num_unchecked`: products so far; `found`: what the owner has yet to report,
    `num_found`: how many it has.
    """

    def __init__(self, model: nn.Module, checks: ProductChecks) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        refuse_compiled(model)
        refuse_unmatched(model, checks)
        self.checks = checks
        self.found: list[SumFinding] = []
        self.num_checked = self.num_doubted = self.num_unchecked = self.num_found = 0
        self.strike: _SpoilT | None = None
        self.step = self.microbatch = -1
        self._names = {module: name for name, module in model.named_modules()}
        self._covered = {module: checks.covers(name) for module, name in self._names.items()}
        self._all = all(self._covered.values())
        self._storages = {p.untyped_storage().data_ptr(): name for name, p in model.named_parameters()}
        self._model = model
        self._stack: list[nn.Module] = []
        self._spans: list[tuple[int, int, nn.Module]] = []  # autograd's sequence numbers that a forward made
        self._starts: list[int] = []
        self._sums: dict[Any, Sums] = {}
        self._slack: dict[Any, float] = {}
        self._active = False
        self._warned = False
        self._hooks: list[RemovableHandle] = []
        prepare_sums()

    def _warn_of_compiled_functions(self) -> None:
        """Functions that the loop compiled run uncompiled under any dispatch mode: right, but perhaps in other bits."""
        dynamo = sys.modules.get("torch._dynamo.eval_frame")
        backends = getattr(dynamo, "cached_backends", {}).values()
        if not self._warned and any(backend is not None for backend in backends):  # None: torch's own `disable`
            self._warned = True
            print(
                "outlast: checks: this process has used torch.compile; compiled functions run uncompiled in checked "
                "microbatches, so that bits may differ from an unchecked run",
                file=sys.stderr,
                flush=True,
            )

    # --- around a microbatch -------------------------------------------------------------------------------------
    def at(self, step: int, microbatch: int) -> CheckedSums:
        """The microbatch that is computed next; parameters are those of a new step where `step` is."""
        if step != self.step:
            self._warn_of_compiled_functions()
            self._sums.clear()
            self._storages = {p.untyped_storage().data_ptr(): name for name, p in self._model.named_parameters()}
        self.step, self.microbatch = step, microbatch
        return self

    def __enter__(self) -> Any:
        """Begin; modules are hooked only for as long as this lasts, so that a copied or saved model has no hooks."""
        self._active = True
        self._hooks = [
            register_module_forward_pre_hook(self._begin),
            register_module_forward_hook(self._end, always_call=True),
        ]
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._active = False
        for hook in self._hooks:
            hook.remove()
        self._stack.clear()
        self._starts.clear()
        self._spans.clear()

    def _begin(self, module: nn.Module, args: Any) -> None:
        if self._active:
            self._stack.append(module)
            self._starts.append(_sequence())

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._active and self._stack and self._stack[-1] is module:
            self._stack.pop()
            self._spans.append((self._starts.pop(), _sequence(), module))

    def _owner(self) -> tuple[nn.Module | None, bool]:
        """(the module whose forward or backward this is, whether it is the backward)."""
        node = torch._C._current_autograd_node()
        if self._stack:  # also while a checkpoint's forward runs again inside the backward
            return self._stack[-1], False
        if node is None:
            return None, False
        number = node._sequence_nr()
        around = [
            (stop - start, -place) for place, (start, stop, _) in enumerate(self._spans) if start <= number < stop
        ]
        return (self._spans[-min(around)[1]][2] if around else None), True

    # --- an operation --------------------------------------------------------------------------------------------
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        make = _MAKERS.get(func)
        if make is None:
            if func in ATTENTION and self.checks.attention == "twice":
                return self._kernel(func, args, kwargs or {})
            return func(*args, **(kwargs or {}))
        out = self._compute(func, args, kwargs or {})
        if not self._all and not self._covered.get(self._owner()[0] or self._model, False):
            return out
        product = make(out, *args, **(kwargs or {})) if all_real(out) else None
        if product is None or not can_be_read(product):
            self.num_unchecked += 1
            return out
        self.num_checked += 1
        misfit = self._misfit(product)
        if misfit.deviations <= self.checks.deviations * self._slack.get(_kind(func, product), 1.0):
            return out
        self.num_doubted += 1
        return self._doubted(func, args, kwargs or {}, out, misfit)

    def _compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        out = func(*args, **kwargs)
        if self.strike is not None:
            for tensor in tensors_of(out):
                self.strike(name_of(func), tensor)
        return out

    def _misfit(self, product: Product | Convolution, fresh: bool = False) -> Misfit:
        if isinstance(product, Convolution):
            ignored = self.checks.threshold / self.checks.deviations
            return product.misfit(cut=_cut(product.parts[0].c), ignored=ignored) if product.parts else Misfit(0, 0, 0.0)
        if product.c.dim() == 3:
            return _worst(
                self._one(Product(product.a[i], product.b[i], product.c[i], None, product.alpha), fresh)
                for i in range(len(product.c))
            )
        return self._one(product, fresh)

    def _one(self, product: Product, fresh: bool) -> Misfit:
        sums = self._sums_of(product.b, product.c.dtype, fresh)
        return product_misfit(
            product.c,
            product.a,
            sums,
            bias=product.bias,
            alpha=product.alpha,
            beta=product.beta,
            cut=_cut(product.c),
            ignored=self.checks.threshold / self.checks.deviations,
        )

    def _sums_of(self, matrix: Tensor, dtype: torch.dtype, fresh: bool) -> Sums:
        """The sums of a matrix; a parameter's are kept from the step's first use of it, for both sides at once."""
        if fresh or matrix.untyped_storage().data_ptr() not in self._storages:
            return sums_of(matrix, dtype)
        key = _key(matrix, dtype)
        if key not in self._sums:
            self._sums[key] = sums_of(matrix, dtype, exact=True)
            self._sums[_key(matrix.t(), dtype)] = sums_of(matrix.t(), dtype, exact=True)
        return self._sums[key]

    # --- a product that does not add up --------------------------------------------------------------------------
    def _doubted(self, func: Any, args: Any, kwargs: Any, first: Any, misfit: Misfit) -> Any:
        repaired = self._repair(_MAKERS[func](first, *args, **kwargs))
        second, product, again = self._again(func, args, kwargs)
        wrong = where_unlike(first, second)
        limit = self.checks.deviations * self._slack.get(_kind(func, product), 1.0)
        if wrong.count and again.deviations <= limit:
            self._tell(func, repaired, wrong, misfit)
            return second
        if not wrong.count and self._is_possible(product, again):
            if repaired is None and limit < again.deviations < math.inf:
                self._slack[_kind(func, product)] = _LOOSER * max(1.0, again.deviations / self.checks.deviations)
            elif repaired is not None:  # its changed bits had no effect on this product
                self._tell(func, repaired, wrong, misfit)
            return second
        third, product, fits = self._again(func, args, kwargs)
        agreed = not where_unlike(second, third).count and self._is_possible(product, fits)
        if not (fits.deviations <= limit or agreed):
            raise self._fault(func, misfit)
        self._tell(func, repaired, where_unlike(first, third), misfit)
        return third

    def _again(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any, Misfit]:
        """(the output of the same operation, its product, how it fits sums that are taken anew)."""
        out = self._compute(func, args, kwargs)
        product = _MAKERS[func](out, *args, **kwargs)
        return out, product, self._misfit(product, fresh=True)

    def _is_possible(self, product: Product | Convolution, misfit: Misfit) -> bool:
        if isinstance(product, Convolution):
            return product.is_possible(cut=_cut(product.parts[0].c))
        pieces = range(len(product.c)) if product.c.dim() == 3 else [slice(None)]
        return all(self._piece_is_possible(product, piece) for piece in pieces)

    def _piece_is_possible(self, product: Product, piece: Any) -> bool:
        a, b, c = product.a[piece], product.b[piece], product.c[piece]
        return within_bound(
            c,
            a,
            b,
            torch.arange(len(c), device=c.device),
            bias=product.bias,
            alpha=product.alpha,
            beta=product.beta,
            cut=_cut(c),
        )

    def _repair(self, product: Product | Convolution | None) -> str | None:
        """Put a parameter's bits back that changed since its sums were taken; its name, None where none did.
        DeviceFault where it did and the bits cannot be told."""
        if (
            not isinstance(product, Product)
            or product.b.dim() != 2
            or product.b.untyped_storage().data_ptr() not in self._storages
        ):
            return None
        name, key = self._storages[product.b.untyped_storage().data_ptr()], _key(product.b, product.c.dtype)
        if key not in self._sums:
            return None
        sides = (product.b, product.b.t())
        before = self._sums[key], self._sums[_key(sides[1], product.c.dtype)]
        now = tuple(sums_of(side, product.c.dtype, exact=True) for side in sides)
        done = repair(product.b, before, (now[0], now[1]))
        if done and not all(
            same_sums(sums_of(side, product.c.dtype, exact=True), was) for side, was in zip(sides, before, strict=True)
        ):
            done = None  # what explained each row did not explain all of them
        if done is None:
            raise DeviceFault(
                f"parameter {name} changed in memory between two uses of it, and no single bit of a row explains how",
                where=f"step {self.step}, microbatch {self.microbatch}",
                did="nothing was computed with it",
                remedy="test the memory: outlast health test; retire the device if it happens again",
            )
        if not done:  # written through `.data`: these sums are of what was there before
            for side in sides:
                self._sums.pop(_key(side, product.c.dtype), None)
        return name if done else None

    def _kernel(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Attention that shows no product: twice, unless it draws random numbers."""
        out = func(*args, **kwargs)
        if self.strike is not None:
            self.strike(name_of(func), out[0])
        if draws_at_random(func, args, kwargs) or not (
            self._all or self._covered.get(self._owner()[0] or self._model, False)
        ):
            self.num_unchecked += 1
            return out
        self.num_checked += 1
        second = func(*args, **kwargs)
        wrong = where_unlike(out, second)
        if not wrong.count:
            return out
        self.num_doubted += 1
        third = func(*args, **kwargs)
        if not where_unlike(second, third).count or not where_unlike(out, third).count:
            self._tell(func, None, wrong, Misfit(0, 0, math.inf))
            return third
        raise self._fault(func, Misfit(0, 0, math.inf))

    def _tell(self, func: Any, repaired: str | None, wrong: WrongBits, misfit: Misfit) -> None:
        module, backward = self._owner()
        self.found.append(
            SumFinding(
                step=self.step,
                microbatch=self.microbatch,
                operation=name_of(func),
                backward=backward,
                module=repaired or (self._names.get(module, "") if module is not None else ""),
                action="repaired" if repaired else "recomputed",
                num_wrong=wrong.count,
                row=wrong.row,
                column=wrong.column,
                bits=wrong.bits,
                deviations=misfit.deviations if math.isfinite(misfit.deviations) else 1e300,
            )
        )

    def _fault(self, func: Any, misfit: Misfit) -> DeviceFault:
        module, backward = self._owner()
        name = self._names.get(module, "") if module is not None else ""
        return DeviceFault(
            f"{name_of(func)} in the {'backward' if backward else 'forward'} of {name or 'the model'} is wrong each "
            f"time it is computed ({misfit.deviations:.3g} deviations in row {misfit.row})",
            where=f"step {self.step}, microbatch {self.microbatch}",
            did="nothing was committed with it; this replica stops, and its work is done by others",
            remedy="test the device: outlast health test; and take it out of service if it fails",
        )


def _worst(misfits: Any) -> Misfit:
    return max(misfits, key=lambda m: m.deviations, default=Misfit(0, 0, 0.0))


def _key(matrix: Tensor, dtype: torch.dtype) -> Any:
    return matrix.data_ptr(), matrix._version, tuple(matrix.shape), matrix.stride(), dtype


def _kind(func: Any, product: Product | Convolution) -> Any:
    if isinstance(product, Convolution):
        return func, product.kind()
    return func, tuple(product.a.shape), tuple(product.b.shape), product.c.dtype


def _sequence() -> int:
    return int(torch._C._autograd._get_sequence_nr())


def _cut(c: Tensor) -> float:
    """Unit roundoff to which factors in float32 may be cut before they are multiplied."""
    if c.dtype != torch.float32 or torch.get_float32_matmul_precision() == "highest":
        return 0.0
    return 2.0**-8
