"""Random generators of the script's own as parts of the training state: `protect(state={"rng": generator})`.

torch's, numpy's and Python's have a state, and not the two methods that registered state has; here they get them. What
is drawn from them, and when, is the loop's matter: between two steps, and on every replica alike.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["OwnGenerator", "with_generators"]

_KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


class OwnGenerator:
    """A generator with what is needed to register it."""

    def __init__(self, generator: Any) -> None:
        self.generator = generator

    def state_dict(self) -> dict[str, Tensor | str]:
        """Tensors and strings alone: numpy's have integers of 128 bits."""
        held = self.generator
        if isinstance(held, torch.Generator):
            return {"state": held.get_state()}
        if isinstance(held, random.Random):
            return {"state": json.dumps(held.getstate())}
        state = held.bit_generator.state if isinstance(held, np.random.Generator) else held.get_state(legacy=False)
        return {"state": json.dumps(state, default=_listed)}

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        held, state = self.generator, values["state"]
        if isinstance(held, torch.Generator):
            held.set_state(state)
        elif isinstance(held, random.Random):
            version, numbers, gauss = json.loads(state)
            held.setstate((version, tuple(numbers), gauss))
        elif isinstance(held, np.random.Generator):
            held.bit_generator.state = json.loads(state, object_hook=_array)
        else:
            held.set_state(json.loads(state, object_hook=_array))


def with_generators(state: Any) -> Any:
    """What `protect(state=...)` is given, with generators as parts that can be saved. What is no mapping is left."""
    if not isinstance(state, Mapping):
        return state
    return {name: OwnGenerator(part) if _is_generator(part) else part for name, part in state.items()}


def _is_generator(part: Any) -> bool:
    return isinstance(part, _KINDS) and not isinstance(part, random.SystemRandom)


def _listed(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return {"dtype": value.dtype.str, "array": value.tolist()}
    return value.item()


def _array(row: dict[str, Any]) -> Any:
    return np.array(row["array"], dtype=row["dtype"]) if row.keys() == {"dtype", "array"} else row
