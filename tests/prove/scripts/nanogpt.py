"""A character-level GPT, trained in nanoGPT's manner: one file, its own schedule, an average of the weights.

`--plant peaks`: in its place the largest that each weight has been is kept in the loop, by hand, and told to nobody, so
a replica that joins begins anew. An average that is told to nobody is named in the first steps.
"""

from __future__ import annotations

import argparse
import math
import pydoc_data.topics

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import swa_utils

import outlast

BLOCK, WIDTH = 16, 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unsqueeze(1) for part in self.c_attn(self.ln_1(x)).split(WIDTH, dim=2))
        x = x + self.c_proj(functional.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, WIDTH), nn.Embedding(BLOCK, WIDTH)
        self.h = nn.ModuleList([Block(), Block()])
        self.lm_head = nn.Linear(WIDTH, vocab, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1)))
        for block in self.h:
            x = block(x)
        return functional.cross_entropy(self.lm_head(x).flatten(0, 1), targets.flatten())


class Text(torch.utils.data.Dataset):
    def __init__(self) -> None:
        text = pydoc_data.topics.topics["assignment"]
        self.chars = sorted(set(text))
        self.ids = torch.tensor([self.chars.index(c) for c in text])

    def __len__(self) -> int:
        return len(self.ids) - BLOCK - 1

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.ids[i : i + BLOCK], self.ids[i + 1 : i + 1 + BLOCK]


class Peaks:
    """The largest that each of a model's parameters has been."""

    def __init__(self, model: nn.Module) -> None:
        self.params = [p.detach().clone() for p in model.parameters()]

    def update_parameters(self, model: nn.Module) -> None:
        torch._foreach_maximum_(self.params, [p.detach() for p in model.parameters()])

    def state_dict(self) -> dict[str, list[Tensor]]:
        return {"params": self.params}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--max-iters", type=int, default=12)
    parser.add_argument("--plant", default="")
    args = parser.parse_args()
    run = outlast.join()
    torch.manual_seed(1337)
    data = Text()
    model = GPT(len(data.chars))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    kept = Peaks(model) if args.plant == "peaks" else swa_utils.AveragedModel(model)
    state = {} if args.plant == "peaks" else {"ema": kept}
    training = run.protect(
        model, optimizer, data, global_batch_size=16, microbatches=4, seed=1337, clip_norm=1.0, state=state
    )
    best = math.inf
    for step in training.steps(until=args.max_iters):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * 0.5 * (1 + math.cos(math.pi * step.number / args.max_iters))
        for x, y in step:
            step.backward(model(x, y))
        kept.update_parameters(model)
        best = min(best, step.loss)


if __name__ == "__main__":
    main()
