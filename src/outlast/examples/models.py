"""The examples' networks and losses: a small byte-level GPT and an MLP for 8 x 8 digits.

Initialisation draws from torch's global generator only: `torch.manual_seed(seed)` before the constructor fixes it.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from outlast.examples.data import CONTEXT, NUM_BYTES

__all__ = ["GPT", "DigitsMLP", "digits_loss", "next_byte_loss"]


class Block(nn.Module):
    """One pre-norm transformer block: causal attention, then a four-fold MLP. (batch, time, width) in and out."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        split = self.qkv(self.norm1(x)).view(batch, time, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(split[0], split[1], split[2], is_causal=True)
        x = x + self._drop(self.project(mixed.transpose(1, 2).reshape(batch, time, width)))
        return x + self._drop(self.down(functional.gelu(self.up(self.norm2(x)))))

    def _drop(self, x: Tensor) -> Tensor:
        return functional.dropout(x, self.dropout, self.training)


class GPT(nn.Module):
    """A byte-level GPT with tied embeddings. (batch, time) of int64 in; logits (batch, time, 256) out.

    The defaults have 0.36M parameters, which keeps a step of eight microbatches near 0.1 s on one core.
    """

    def __init__(self, width: int = 96, depth: int = 3, heads: int = 4, dropout: float = 0.1) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(NUM_BYTES, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, NUM_BYTES, bias=False)
        for table in (self.embed.weight, self.place.weight):
            nn.init.normal_(table, std=0.02)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.place.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def next_byte_loss(model: nn.Module, window: Tensor) -> Tensor:
    """Mean cross-entropy (nats a byte) of each byte given those before it. `window`: (batch, CONTEXT + 1) of int64."""
    logits = model(window[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1).float(), window[:, 1:].flatten())


class DigitsMLP(nn.Module):
    """Two hidden layers on 8 x 8 digits. (batch, 64) of float32 in; logits (batch, 10) out."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
        )

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.layers(images)
        return logits


def digits_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean cross-entropy of (images, labels)."""
    images, labels = batch
    return functional.cross_entropy(model(images), labels)
