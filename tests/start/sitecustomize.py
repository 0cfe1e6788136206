"""Every Python process of the tests starts with this: no garbage is looked for while it imports, and none as it ends.

Importing torch and making an optimizer makes half a million objects and drops next to none. To look through them again
and again takes a quarter of a replica's start, and to look through them as it ends takes a second. From the first
collection until the end everything is as it always is, and in a process that is forked from its first moment: what was
imported is loaded.
"""

import atexit
import gc
import os

_MOST = 700_000  # objects; more than the imports of a replica make
_as_ever = gc.get_threshold()


def _first(_phase: str, _about: dict[str, int]) -> None:
    _go_on()


def _go_on() -> None:
    if _first in gc.callbacks:
        gc.callbacks.remove(_first)
        gc.set_threshold(*_as_ever)


gc.callbacks.append(_first)
gc.set_threshold(_MOST, *_as_ever[1:])
os.register_at_fork(after_in_child=_go_on)
atexit.register(gc.freeze)  # registered first, it runs when all others have
