"""A small transformer in the manner of Hugging Face: a config, a model that returns an output with its loss, batches as
dictionaries, a collator. It needs no transformers.

`--plant randomness`: the model adds noise from a generator of its own, which nobody seeds.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import outlast


@dataclass
class TinyConfig:
    vocab_size: int = 64
    hidden_size: int = 32
    num_hidden_layers: int = 2
    noise: bool = False


@dataclass
class CausalLMOutput:
    loss: Tensor
    logits: Tensor


class TinyForCausalLM(nn.Module):
    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        layer = [nn.TransformerEncoderLayer(config.hidden_size, 2, 64, 0.1, batch_first=True)
                 for _ in range(config.num_hidden_layers)]  # fmt: skip
        self.layers = nn.ModuleList(layer)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.generator = torch.Generator()
        if config.noise:
            self.generator.seed()

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> CausalLMOutput:
        hidden = self.embed_tokens(input_ids) * attention_mask.unsqueeze(-1)
        if self.config.noise:
            hidden = hidden + 0.01 * torch.randn(hidden.shape, generator=self.generator)
        causal = torch.nn.Transformer.generate_square_subsequent_mask(input_ids.size(1))
        for layer in self.layers:
            hidden = layer(hidden, src_mask=causal, is_causal=True)
        logits = self.lm_head(hidden)
        loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        return CausalLMOutput(loss, logits)


class DataCollatorForLanguageModeling:
    def __call__(self, features: list[dict[str, list[int]]]) -> dict[str, Tensor]:
        length = max(len(feature["input_ids"]) for feature in features)
        rows = [feature["input_ids"] + [0] * (length - len(feature["input_ids"])) for feature in features]
        mask = [[1] * len(f["input_ids"]) + [0] * (length - len(f["input_ids"])) for f in features]
        ids, attention = torch.tensor(rows), torch.tensor(mask)
        return {"input_ids": ids, "attention_mask": attention, "labels": ids.masked_fill(attention == 0, -100)}


def tokenized() -> list[dict[str, Any]]:
    return [{"input_ids": [(7 * i + 3 * j * j) % 64 for j in range(8 + i % 5)]} for i in range(256)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--max_steps", type=int, default=12)
    parser.add_argument("--plant", default="")
    args = parser.parse_args()
    run = outlast.join()
    torch.manual_seed(42)
    model = TinyForCausalLM(TinyConfig(noise=args.plant == "randomness"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))
    training = run.protect(
        model, optimizer, tokenized(), global_batch_size=16, microbatches=4, seed=42, scheduler=scheduler,
        collate_fn=DataCollatorForLanguageModeling(),
    )  # fmt: skip
    for step in training.steps(until=args.max_steps):
        for batch in step:
            step.backward(model(**batch).loss)


if __name__ == "__main__":
    main()
