"""Memory freed by a step is there for the next one."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

_CHILD = """
import resource, sys, torch
from outlast.runtime.loop._allocator import keep_freed_memory
print(keep_freed_memory() if sys.argv[1] == "keep" else False)
faults = []
for _ in range(12):
    tensors = [torch.zeros(1 << 20) for _ in range(8)]
    del tensors
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
print(faults[-1] - faults[1])
"""


def _run(mode: str, **environ: str) -> tuple[str, int]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("MALLOC_", "GLIBC_TUNABLES"))}
    run = subprocess.run(
        [sys.executable, "-c", _CHILD, mode],
        env=clean | environ,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    took, faults = run.stdout.split()
    return took, int(faults)


@pytest.mark.skipif(
    not hasattr(os, "confstr") or "glibc" not in (os.confstr("CS_GNU_LIBC_VERSION") or ""), reason="glibc"
)
def test_freed_memory_is_kept() -> None:
    took, faults = _run("keep")
    assert took == "True"
    assert faults < 8192  # 10 rounds of 8 tensors of 1,024 pages each are 81,920


def test_a_user_who_set_the_allocator_is_left_alone() -> None:
    assert _run("keep", MALLOC_ARENA_MAX="2")[0] == "False"
