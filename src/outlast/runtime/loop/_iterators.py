"""Iterators for the loop, and how a loop over one was left.

`break` and an exception on its way out both merely drop an iterator: at once if nobody else holds it, or when the
script is over (`for step in kept:`, a progress bar). What dropped it at once is read from the instruction; of anything
else the process's end tells what it was. Does not know what a step is.
"""

from __future__ import annotations

import dis
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Generic, Literal, TypeVar

from torch import Tensor

__all__ = ["Left", "WatchedLoop", "at_the_script_s_end", "how_left", "put_off", "trains_anew", "values_of"]

Left = Literal["break", "error", "unknown"]
T = TypeVar("T")


class WatchedLoop(Iterator[T], Generic[T]):
    """What `inner` yields. `given` is called before the loop's body has it, `returned` when the body is through;
    `dropped` when the loop is left from inside its body."""

    def __init__(
        self,
        inner: Iterator[T],
        given: Callable[[], None],
        returned: Callable[[], None],
        dropped: Callable[[Left], None],
    ) -> None:
        self._inner, self._given, self._returned, self._dropped = inner, given, returned, dropped
        self._inside = False

    def __next__(self) -> T:
        if self._inside:
            self._inside = False  # until there is another one: an end or an error in here is not the loop's
            self._returned()
        item = next(self._inner)
        self._given()
        self._inside = True
        return item

    def __del__(self, _is_over: Callable[[], bool] = sys.is_finalizing) -> None:
        if self._inside and not _is_over():  # when the interpreter clears up, nobody is left who could have dropped it
            self._dropped(how_left(sys._getframe(1)))


def how_left(frame: FrameType) -> Left:
    """Why `frame` dropped the iterator that it was looping over: `break` or `return`, or an exception on its way.

    The exception is not visible to the iterator; the instruction is: leaving a loop on purpose pops the iterator. Where
    another iterator or a variable held it, the instruction is of something else.
    """
    name = dis.opname[frame.f_code.co_code[frame.f_lasti]]
    if name in ("POP_TOP", "POP_ITER"):
        return "break"
    return "unknown" if name in ("YIELD_VALUE", "RESUME") else "error"


_at_the_end: list[Callable[[], None]] = []  # the process's: one hook for all, for none can be taken back
_hooked: list[int] = []


def at_the_script_s_end(function: Callable[[], None]) -> Callable[[], None]:
    """Call it when the script is over and threads can still be started, which `atexit` is too late for. What is
    returned takes that back."""
    if not _hooked:
        _hooked.append(1)
        # What `concurrent.futures` ends its own threads with; it was imported before, so this comes first.
        threading._register_atexit(_script_is_over)  # type: ignore[attr-defined]
    _at_the_end.append(function)
    return lambda: _at_the_end.remove(function) if function in _at_the_end else None


_put_off: list[tuple[Callable[[], None], Callable[[], object]]] = []


def put_off(function: Callable[[], None], forget: Callable[[], object]) -> None:
    """A training without others was left by an exception, which the script may yet end by. If the process trains anew
    it has not: `function` is called then, and `forget`, after which nothing of that training is kept."""
    _put_off.append((function, forget))


def trains_anew() -> None:
    """The script goes on to another training."""
    while _put_off:
        function, forget = _put_off.pop()
        function()
        forget()


def _script_is_over() -> None:
    while _at_the_end:
        _at_the_end.pop()()


def values_of(tensors: Iterable[Tensor]) -> list[tuple[int, int]]:
    """Something that is another one if a tensor was written to, or had its memory exchanged, since."""
    return [(tensor.data_ptr(), tensor._version) for tensor in tensors]
