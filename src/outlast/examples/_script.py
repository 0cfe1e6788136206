"""What every example's command line shares: its options, and the result file that comparisons read."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["parse", "write_result"]


def parse(
    what: str | None,
    argv: Sequence[str] | None = None,
    *,
    steps: int,
    dtypes: bool = False,
    precisions: Sequence[str] = (),
    stages: int = 0,
) -> argparse.Namespace:
    """--steps, --seed, --microbatches, --out and, where the example has them, --dtype (as a `torch.dtype`),
    --precision and --stages."""
    parser = argparse.ArgumentParser(description=what, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--steps", type=_positive, default=steps, help="train until this many steps are committed")
    parser.add_argument("--seed", type=int, default=0, help="fixes initialisation, data order and dropout")
    parser.add_argument("--microbatches", type=_positive, default=8, help="per step; replicas share them")
    parser.add_argument("--out", type=Path, help="write fingerprint, losses and steps to this JSON file")
    if dtypes:
        parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the parameters")
    if precisions:
        parser.add_argument("--precision", choices=precisions, default=precisions[0], help="what is computed in")
    if stages:
        parser.add_argument("--stages", type=_positive, default=stages, help="of the pipeline: one a rank")
    args = parser.parse_args(argv)
    args.dtype = getattr(torch, args.dtype) if dtypes else torch.float32
    return args


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a positive whole number")
    return value


def write_result(path: Path | None, *, fingerprint: str, losses: Mapping[int, float], steps: int) -> None:
    """Publish the result with one rename, so that a reader never sees half of it. Without a path: nothing.

    `losses` by step number; a step that this process did not see (it joined later) is null in the file.
    """
    if path is None:
        return
    result = {"fingerprint": fingerprint, "steps": steps, "losses": [losses.get(number) for number in range(steps)]}
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_text(json.dumps(result, indent=1) + "\n")
    part.replace(path)
