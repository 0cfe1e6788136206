"""A loop with a counter of its own that steers the loss and that nobody registered: resuming begins it anew."""

from __future__ import annotations

import sys

import torch

import outlast


class Counter:
    def __init__(self) -> None:
        self.value = 0

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


def main() -> None:
    run = outlast.join()
    torch.manual_seed(1)
    model = torch.nn.Linear(6, 3)
    counter = Counter()
    training = run.protect(
        model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(32, 6), global_batch_size=8, microbatches=2,
        state={"counter": counter} if "--registered" in sys.argv else None,
    )  # fmt: skip
    for step in training.steps(until=1000):
        for batch in step:
            step.backward(model(batch).square().mean() * (1 + counter.value))
        counter.value += 1


if __name__ == "__main__":
    main()
