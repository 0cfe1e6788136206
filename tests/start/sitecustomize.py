"""Every Python process of the tests starts with this: no garbage is looked for while it imports.

Importing torch and making an optimizer makes half a million objects and drops next to none, and looking through them
again and again takes over a quarter of a replica's start. From the first collection on everything is as it always is.
"""

import gc

_MOST = 700_000  # objects; more than the imports of a replica make
_as_ever = gc.get_threshold()


def _first(_phase: str, _about: dict[str, int]) -> None:
    gc.callbacks.remove(_first)
    gc.set_threshold(*_as_ever)


gc.callbacks.append(_first)
gc.set_threshold(_MOST, *_as_ever[1:])
