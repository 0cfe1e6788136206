"""A tiny Llama from its configuration, trained by Hugging Face's Trainer in a run: evaluations, saves, callbacks."""

from __future__ import annotations

import argparse
import fcntl
import json
import os
from pathlib import Path
from typing import Any

import torch
from transformers import EarlyStoppingCallback, LlamaConfig, LlamaForCausalLM, TrainerCallback, TrainingArguments

import outlast
from outlast.adapters.huggingface import OutlastTrainer


class Gates(TrainerCallback):  # type: ignore[misc]
    """Waits while a test holds the gate before a step."""

    def __init__(self, gates: Path | None) -> None:
        self.gates = gates

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.gates is not None and (self.gates / str(state.global_step)).exists():
            with (self.gates / str(state.global_step)).open() as file:
                fcntl.flock(file, fcntl.LOCK_SH)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=18)
    parser.add_argument("--gates", type=Path)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    told = parser.parse_args()
    run = outlast.join()
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=64, num_key_value_heads=2, **sizes))
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 64, (60, 12), generator=draw)
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    args = TrainingArguments(
        output_dir=str(told.out / "model"), per_device_train_batch_size=2, gradient_accumulation_steps=4,
        max_steps=told.steps, logging_steps=2, eval_strategy="steps", eval_steps=3, save_strategy="steps", save_steps=6,
        metric_for_best_model="eval_loss", greater_is_better=False, report_to=[], learning_rate=1e-3, use_cpu=True,
        disable_tqdm=True, per_device_eval_batch_size=3, bf16=told.bf16,
    )  # fmt: skip
    trainer = OutlastTrainer(
        model=model, args=args, train_dataset=rows[:50], eval_dataset=rows[50:], run=run,
        callbacks=[Gates(told.gates), EarlyStoppingCallback(early_stopping_patience=4)],
    )  # fmt: skip
    trainer.train()
    trainer.save_model(str(told.out / "final"))
    losses = [row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row]
    found = {
        "fingerprint": trainer.training.fingerprint(), "steps": trainer.state.global_step, "eval_loss": losses[-1],
        "best": trainer.state.best_metric,
    }  # fmt: skip
    part = told.out / f"{run.name}.{os.getpid()}.part"
    part.write_text(json.dumps(found))
    part.rename(told.out / f"{run.name}.json")


if __name__ == "__main__":
    main()
