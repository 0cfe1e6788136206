"""The examples' data, all of it already on the machine: Python's own help text, and scikit-learn's digits.

Both are map-style datasets: an index gives an item, the same on every replica, and nothing else does.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

__all__ = ["CONTEXT", "NUM_BYTES", "HelpText", "digits"]

NUM_BYTES = 256
CONTEXT = 64


class HelpText(Dataset[Tensor]):
    """Windows of CONTEXT + 1 consecutive bytes (int64) of the English text in `pydoc_data.topics`, half overlapping."""

    def __init__(self) -> None:
        from pydoc_data.topics import topics

        text = "\n".join(topics[name] for name in sorted(topics)).encode()
        self._bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def __len__(self) -> int:
        return (len(self._bytes) - CONTEXT - 1) // (CONTEXT // 2)

    def __getitem__(self, index: int) -> Tensor:
        start = index * (CONTEXT // 2)
        return self._bytes[start : start + CONTEXT + 1].long()


def digits() -> Dataset[tuple[Tensor, ...]]:
    """The 1,797 digits of scikit-learn as (64 floats in 0..1, label)."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return TensorDataset(torch.from_numpy(images).float() / 16, torch.from_numpy(labels).long())
