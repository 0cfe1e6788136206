"""A script that goes on after its loop, in the ways that scripts do: `afterwards.py STEPS OUT WHAT…`.

Each WHAT is SLOT:DEED, what that replica does once training has ended: raise, exit, wait (until the test releases it),
early (it asks whether it writes before the last step only). `writer:wait`: whoever writes waits before it does.
Before a step N for which there is a file `loopN`, all wait until the test lets that go.
"""

from __future__ import annotations

import fcntl
import sys
from pathlib import Path

import torch

import outlast


def main() -> None:
    steps, out = int(sys.argv[1]), Path(sys.argv[2])
    deeds = dict(what.split(":") for what in sys.argv[3:])
    run = outlast.join()
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    data = [torch.randn(4) for _ in range(64)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    training = run.protect(model, optimizer, data, global_batch_size=16, microbatches=4)
    writes = False
    for step in training.steps(until=steps):
        if (out / f"loop{step.number}").exists():
            with (out / f"loop{step.number}").open() as gate:
                fcntl.flock(gate, fcntl.LOCK_SH)
        for batch in step:
            step.backward(model(batch).square().mean())
        writes = run.is_writer
    deed = deeds.get(run.name.partition(".")[0], "")
    (out / f"{run.name}.after").touch()
    if deed == "wait":
        with (out / "gate").open() as gate:
            fcntl.flock(gate, fcntl.LOCK_SH)
    elif deed == "raise":
        raise KeyError("no such metric")
    elif deed == "exit":
        sys.exit(3)
    if writes if deed == "early" else run.is_writer:
        if deeds.get("writer") == "wait":
            (out / f"{run.name}.writes").touch()
            with (out / "gate").open() as gate:
                fcntl.flock(gate, fcntl.LOCK_SH)
        (out / "result").write_text(f"{run.name} {training.fingerprint()}\n")
    print("the last line", flush=True)


if __name__ == "__main__":
    main()
