"""Rehearsals by two processes that share a model, without a fleet: `python shard_rehearsals.py PLACE FILE`, each
optimizer after the other. Prints, as JSON, in which steps each was rehearsed, what was found, and whether all bits are
those of steps without a rehearsal. Where there is room: "memory"; "disk"; "mixed" (copies on one, and the disk on the
other); "one" (the other has none)."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from sharded_rehearsed import OPTIMIZERS, built  # beside this file
from torch import Tensor
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

from outlast.errors import LoopUnrepeatable
from outlast.runtime.checks import rehearsal
from outlast.runtime.checks._laid_aside import tensors_in
from outlast.runtime.checks.ranks_together import AllRanks
from outlast.runtime.training.state import State
from outlast.tensors import local

TRIED: dict[str, tuple[tuple[str, ...], tuple[int, ...]]] = {  # (where there is room, along "tp")
    "adamw": (("memory", "disk"), (1, 2)),
    "foreach": (("memory", "disk"), (1,)),
    "each": (("memory",), (1,)),
    "momentum": (("memory", "disk"), (1, 2)),
    "muon": (("memory", "disk"), (1,)),
    "normed": (("memory", "disk", "mixed", "one"), (1,)),
    "counting": (("memory", "disk", "one"), (1, 2)),
    "counting on one": (("mixed",), (1,)),
}


def trained(run: Any, name: str, folder: Path | None, tp: int) -> tuple[list[Tensor], list[bool], str]:
    """(parameters and state after some steps, in which of them there was a rehearsal, what it found)."""
    model = built(run, tp)
    made = OPTIMIZERS[name](model)
    optimizers = made if isinstance(made, list) else [made]
    looks = rehearsal.Rehearsal(State(model, optimizers, [], {}), lambda: True, folder, AllRanks(2))
    draw, looked, found = torch.Generator().manual_seed(7), list[bool](), ""
    for step in range(4):
        inputs, targets = torch.randn(8, 24, generator=draw), torch.randint(0, 3, (8,), generator=draw)
        model.zero_grad()
        functional.cross_entropy(model(inputs), targets).backward()
        if folder is not None:
            looks.replay()
            looked.append(bool(looks._expected))
        for optimizer in optimizers:
            optimizer.step()
        if folder is not None:
            try:
                looks.compare(step)
            except LoopUnrepeatable as error:
                found = found or str(error)
            folder = folder if looks.applied() else None
    held = [list(row.values()) for optimizer in optimizers for row in optimizer.state.values()]
    return [local(t.detach()).clone() for t in tensors_in([list(model.parameters()), held])], looked, found


def set_room(room: str, place: int, scratch: Path) -> Path:
    """Where this rank lays aside what it has no memory for."""
    rehearsal._SHARE = 0.0 if room in ("disk", "one") or (room == "mixed" and place) else 0.25
    return Path("/dev/shm") if room == "one" and place else Path(tempfile.mkdtemp(dir=scratch))


def main() -> None:
    place, file = int(sys.argv[1]), Path(sys.argv[2])
    dist.init_process_group("gloo", store=dist.FileStore(str(file), 2), rank=place, world_size=2)
    meshes = {name: init_device_mesh("cpu", (2,), mesh_dim_names=(name,)) for name in ("shard", "tp")}
    run = SimpleNamespace(mesh=lambda tp=1: meshes["tp" if tp > 1 else "shard"])
    result: dict[str, Any] = {}
    for name, (rooms, widths) in TRIED.items():
        for tp in widths:
            plain, _, _ = trained(run, name, None, tp)
            for room in rooms:
                looked_at, looked, found = trained(run, name, set_room(room, place, file.parent), tp)
                alike = len(plain) == len(looked_at) and all(map(torch.equal, plain, looked_at))
                result[f"{name}, tp={tp}, {room}"] = {"looked": looked, "found": found, "alike": alike}
    print(json.dumps(result), flush=True)
    os._exit(0)  # the group goes with its processes


if __name__ == "__main__":
    main()
