"""A training in which a peer dies while one replica is inside its last backward of the step, and that one goes on only
when it has been told the next view: what it then offers belongs to a view that is over."""

from __future__ import annotations

import os
import signal
import sys
import threading

import torch

import outlast

STEP = 2


def main() -> None:
    run = outlast.join()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    training = run.protect(model, optimizer, torch.randn(256, 16), global_batch_size=16, microbatches=4, seed=0)
    member, seen = training.replica.member, 0

    def await_the_next_view(grad: torch.Tensor) -> torch.Tensor:
        while member.view.members != (run.name,):
            threading.Event().wait(0.001)
        return grad

    for step in training.steps(until=5):
        for mine, x in enumerate(step, 1):
            loss = model(x).square().mean()
            if step.number == STEP and run.name == "r1.1":
                os.kill(os.getpid(), signal.SIGKILL)
            if step.number == STEP and run.name == "r0.1" and mine == 2 and len(sys.argv) > 1:
                loss.register_hook(await_the_next_view)
                seen += 1
            step.backward(loss)
    print(f"{run.name} waited {seen} times, fingerprint {training.fingerprint()}", flush=True)


if __name__ == "__main__":
    main()
