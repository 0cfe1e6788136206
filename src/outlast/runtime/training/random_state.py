"""The global random generators of a process: seeded by position, and put back where others count on them.

Does not know what is drawn, nor for which position: callers say (protocol, 16).
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["random_state_kept", "seed_everything"]


def seed_everything(seed: int) -> None:
    """torch (all devices in use), `random`, and numpy if the program uses it.

    Not `torch.manual_seed`: where no GPU has been used yet it keeps a formatted stack of every call for later (three
    milliseconds each, and memory for ever).
    """
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed & 0xFFFFFFFF)


@contextmanager
def random_state_kept() -> Iterator[None]:
    """What is drawn in here nobody misses afterwards: replicas that draw more or less go on alike."""
    numpy = sys.modules.get("numpy")
    states = random.getstate(), torch.get_rng_state(), numpy.random.get_state() if numpy is not None else None
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        random.setstate(states[0])
        torch.set_rng_state(states[1])
        if numpy is not None:
            numpy.random.set_state(states[2])
        if devices:
            torch.cuda.set_rng_state_all(devices)
