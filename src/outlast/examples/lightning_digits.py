"""Train a LightningModule on scikit-learn's digits, and survive: `outlast run --replicas 2 lightning_digits.py`.

Needs Lightning (`pip install 'outlast[lightning,examples]'`). The module, its loaders and the Trainer are as anywhere;
one argument of the Trainer is outlast's: `strategy=OutlastStrategy()`.
"""

from __future__ import annotations

from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, random_split

from outlast.adapters.lightning import OutlastStrategy
from outlast.examples._script import parse, write_result
from outlast.examples.data import digits

BATCH = 16


class Digits(lightning.LightningModule):
    """A small network with dropout and BatchNorm, a learning rate that follows the validation, and two metrics."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(64, 96), nn.BatchNorm1d(96), nn.ReLU(), nn.Dropout(0.1), nn.Linear(96, 10)
        )  # fmt: skip

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        logits = self.net(images)
        loss = nn.functional.cross_entropy(logits, labels)
        self.log("loss", loss)
        self.log("accuracy", (logits.argmax(1) == labels).float().mean(), on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        self.log("held_out_loss", nn.functional.cross_entropy(self.net(images), labels))

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "held_out_loss"}}


def loaders(samples: int = 1797) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Training and held-out digits, of the first `samples` ones."""
    data = torch.utils.data.Subset(digits(), range(samples))
    train, held_out = random_split(data, [0.8, 0.2], torch.Generator().manual_seed(1))
    return DataLoader(train, BATCH, shuffle=True), DataLoader(held_out, 64)


def main() -> None:
    args = parse(__doc__, steps=60)
    torch.manual_seed(args.seed)
    strategy = OutlastStrategy(protect={"seed": args.seed})
    trainer = lightning.Trainer(
        strategy=strategy, accelerator="auto", max_epochs=-1, max_steps=args.steps,
        accumulate_grad_batches=args.microbatches, gradient_clip_val=1.0, enable_progress_bar=False, logger=False,
        enable_checkpointing=False, log_every_n_steps=1,
    )  # fmt: skip
    trainer.fit(Digits(), *loaders())
    if trainer.is_global_zero:
        write_result(args.out, fingerprint=strategy.training.fingerprint(), losses={}, steps=args.steps)


if __name__ == "__main__":
    main()
