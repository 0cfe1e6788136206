"""The numerics signature and what else must be equal on all replicas of a run; and the process settings behind it."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import signal
from typing import Any

import torch

from outlast.config import RunConfig
from outlast.runtime.host.environment import Environment
from outlast.runtime.host.output import outlast_full_disks
from outlast.runtime.training.samples import Samples
from outlast.runtime.training.state import State

__all__ = ["device_name", "facts_of", "prepare_process", "warm_up"]


_SECRETS = ("OUTLAST_SECRET", "OUTLAST_ETCD_USER", "OUTLAST_ETCD_PASSWORD", "OUTLAST_ETCD_KEY")
"""Environment variables with secrets of the run and of its record: not for the script, nor for what it starts."""


def prepare_process(env: Environment) -> None:
    """Die with the agent but not with the log's disk, and use as many threads as the run's signature says."""
    if env.coordinator is not None:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
        for name in _SECRETS:
            os.environ.pop(name, None)
        outlast_full_disks()
    if env.config.threads:
        torch.set_num_threads(env.config.threads)


def facts_of(
    config: RunConfig, state: State, samples: Samples, clip_norm: float | None, aggregation: str = "mean"
) -> dict[str, str]:
    """Name -> value; members that differ in one are refused with the difference named (16)."""
    schema = "|".join(f"{n}:{tuple(p.shape)}:{p.dtype}" for n, p in zip(state.names, state.params, strict=True))
    schema, number = (schema, len(state.params)) if state.stages is None else state.stages.schema
    facts = {
        "microbatches": str(samples.num_leaves),
        "global_batch_size": str(samples.batch),
        "samples": str(samples.num_samples),
        "seed": str(samples.seed),
        "shuffle": str(samples.shuffle),
        "order": samples.order,
        "drop_last": str(samples.drop_last),
        "clip_norm": str(clip_norm),
        "aggregation": aggregation,
        "parameters": f"{number} ({hashlib.sha256(schema.encode()).hexdigest()[:12]})",
        "optimizers": ", ".join(type(o).__name__ for o in state.optimizers),
        "bitwise": str(config.bitwise),
    }
    facts |= {"bad_samples": str(samples.bad.allowed)} if samples.bad.allowed else {}
    facts |= {"scaler": "on"} if state.scaling.active else {}
    return facts | (_numerics(state) if config.bitwise else {})


def _numerics(state: State) -> dict[str, str]:
    device = state.params[0].device
    facts = {
        "torch": str(torch.__version__),
        "machine": platform.machine(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "device": device.type,
        "threads": str(torch.get_num_threads()),
        "deterministic": str(torch.are_deterministic_algorithms_enabled()),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "mkldnn": str(torch.backends.mkldnn.enabled),
    }
    if device.type == "cuda":
        facts |= _cuda(device)
    return facts


def device_name(device: torch.device) -> str:
    """What a person would look for: the device's kind, and which one it is."""
    if device.type != "cuda":
        return str(device)
    facts = torch.cuda.get_device_properties(device)
    return f"{device} {facts.name} {getattr(facts, 'uuid', '')}".strip()


def _cuda(device: Any) -> dict[str, str]:
    return {
        "gpu": torch.cuda.get_device_name(device),
        "cuda": str(torch.version.cuda),
        "cudnn_benchmark": str(torch.backends.cudnn.benchmark),
        "tf32": str(torch.backends.cuda.matmul.allow_tf32),
    }


def warm_up() -> None:
    """The first optimizer step of a process imports for a second, and its first backward finds everything cold: take
    that before anybody waits. It draws no random number."""
    parameter = torch.nn.Parameter(torch.zeros(8, 8))
    torch.nn.functional.linear(torch.zeros(2, 8), parameter).relu().sum().backward()  # type: ignore[no-untyped-call]
    torch.optim.AdamW([parameter]).step()
