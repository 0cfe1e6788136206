"""SHA-256 over a model's parameters and its optimizer's state, by name.

Role: one number that two runs share only if their training states are bitwise equal. It does not order by memory, by
device or by insertion: only by name. Not meant for the hot path: it copies every tensor to the host and hashes all.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["state_fingerprint"]


def state_fingerprint(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Hex SHA-256 over each parameter by name, then each tensor of optimizer state by (parameter name, key).

    Each tensor contributes its label, dtype, shape and raw bytes (little-endian, row-major), so renaming, retyping and
    reshaping all show. `Training.fingerprint` gives the same number for the same state. State that is not a tensor, or
    that the optimizer has not created yet, contributes nothing.
    """
    digest = hashlib.sha256()
    for label, tensor in _named_tensors(model, optimizer):
        digest.update(f"{label}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _named_tensors(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    parameters = sorted(model.named_parameters())
    yield from parameters
    for name, parameter in parameters:
        for key, value in sorted(optimizer.state.get(parameter, {}).items()):
            if isinstance(value, torch.Tensor):
                yield f"{name}.{key}", value
