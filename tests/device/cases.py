"""Try on one device what the tests show on processors.

    tests/device/run                     the first CUDA device; a few minutes
    tests/device/run --device cpu        a rehearsal, without one
    tests/device/run --only joins,audits --json

Several replicas share the device. Each case is a run of its own, held against one process alone on the same device: it
is proved if all who reach the end have the same bits, and the run's record tells what was to happen. The exit code is
1 if a case failed. `speed` and `copies` measure and prove nothing. What this machine has not what it needs for is told
as not tried, with the reason.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from held import QUIET  # beside this file
from kinds import Kinds
from speed import Speed


class Device(Kinds, Speed):
    """The cases, on one kind of device. Each returns what it has shown, and raises AssertionError if it has not."""

    # --- the cases -----------------------------------------------------------------------------------------------
    def bits(self) -> str:
        self.same(self.fleet(replicas=3, steps=6), {"r0.1", "r1.1", "r2.1"}, 6)
        return "three replicas end with the bits of one process"

    def deaths(self) -> str:
        from outlast.runtime.settings.fault_points import Fault

        faults = [
            Fault(replica="r1", phase="backward", step=2, action="SIGKILL"),
            Fault(replica="r2", phase="gathered", step=4, action="SIGKILL"),
        ]
        self.same(self.fleet(*faults, replicas=3, steps=6), {"r0.1"}, 6)
        return "two of three killed, in the backward and in the exchange: the same step finished, the same bits"

    def straight(self) -> str:
        from outlast.runtime.settings.fault_points import Fault

        steps, unclipped, counts = 10, ("--clip", "1e9"), list[str]()
        for way in ((), ("--thread-copies",)):
            fault = Fault(replica="r2", phase="gathered", step=5, action="SIGKILL")
            run = self.fleet(fault, replicas=3, steps=steps, options=(*unclipped, *way))
            want = self.alone(steps, *unclipped)
            for name, found in self.ended(run, {"r0.1", "r1.1"}).items():
                assert found["fingerprint"] == want["fingerprint"], f"{name} has other bits\n{run.logs()}"
                least = found["buckets"] * (steps - 3) if self.device == "cuda" and not way else 0
                assert bool(found["straight"]) == bool(least), f"{name} had {found['straight']} buckets straight"
                assert found["straight"] >= least, f"{name} had {found['straight']} buckets straight, not {least}"
                counts.append(f"{found['straight']} of {found['buckets'] * steps}")
        return f"buckets that the device read where they lay, and where threads copy: {', '.join(counts)}; same bits"

    def joins(self) -> str:
        self.replaced()
        return "a killed replica was started again, fed by the other one, and ended with its bits"

    def checkpoints(self) -> str:
        keep = {"checkpoint_dir": str(self.base / "kept"), "checkpoint_every": 2}
        self.ended(self.fleet(replicas=2, steps=5, **keep), {"r0.1", "r1.1"})
        self.same(self.fleet(replicas=3, steps=8, **keep), {"r0.1", "r1.1", "r2.1"}, 8)
        return "saved by two replicas, gone on from by three: the bits of a run that never stopped"

    def guards(self) -> str:
        from outlast.core import events as ev
        from outlast.runtime.faults.flips import Flip

        flip = Flip(replica="r1.1", target="parameter", step=4, parameter="up.weight", element=7, bit=12)
        options = ("--bad", "40", "--guards", "full")
        run = self.fleet(replicas=3, steps=8, options=options, flips=[flip])
        self.same(run, {"r0.1", "r2.1"}, 8, *options)
        seen = [e for e in run.driven.events if isinstance(e, ev.VerdictReached)]
        assert any(e.samples == [40] and e.action == "skip_batch" for e in seen), seen
        assert any(e.replica == "r1.1" and e.action == "replace" and e.step == 4 for e in seen), seen
        return "a NaN in a sample was named and skipped; a flipped bit of a parameter cost its replica alone"

    def audits(self) -> str:
        from outlast.core import events as ev
        from outlast.runtime.faults.flips import Flip

        flips = [
            Flip(replica="r1", step=2, microbatch=2, parameter="down.weight", element=100, bit=3),
            Flip(replica="r2", target="reducer", step=4, parameter=-1, bit=4),
        ]
        run = self.fleet(replicas=3, steps=6, flips=flips, audit="1.0")
        self.same(run, {"r0.1", "r1.1", "r2.1"}, 6)
        seen = [(e.culprit, e.verdict, e.step) for e in run.driven.events if isinstance(e, ev.AuditMismatch)]
        assert seen == [("r1.1", "transient", 2), ("r2.1", "transient", 4)], seen
        return "a flipped bit of a gradient, and of a reduced slice, were found before they were applied, and named"

    def nccl(self) -> str:
        run = self.fleet(replicas=2, steps=6, exchange="c10d")
        self.same(run, {"r0.1", "r1.1"}, 6)
        return "two replicas on two devices exchange over NCCL: the bits of one process"


CASES = (
    "bits", "deaths", "straight", "joins", "checkpoints", "guards", "audits", "spare", "compiled", "fp16", "fused",
    "capturable", "products", "rules", "readings", "speed", "copies", "nccl", "shards",
)  # fmt: skip


def tried(device: Device, name: str) -> dict[str, Any]:
    """One case: whether it was proved, and what it has shown."""
    from outlast.errors import OutlastError

    began_s = time.monotonic()
    try:
        what, how = getattr(device, name)(), "measured" if name in ("speed", "copies") else "proved"
    except (
        AssertionError,
        OSError,
        RuntimeError,
        LookupError,
        OutlastError,
    ) as error:  # told, and the next case tried: somebody has ten minutes with this device
        what, how = f"{type(error).__name__}: {error}", "failed"
    return {"case": name, "result": how, "what": what, "seconds": round(time.monotonic() - began_s, 1)}


def about(device: str) -> dict[str, str]:
    """What it was tried on."""
    import torch

    import outlast

    found = {
        "device": device,
        "machine": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "outlast": outlast.__version__,
    }
    if device == "cuda":
        found |= {"name": torch.cuda.get_device_name(0), "cuda": str(torch.version.cuda)}
        found |= {"devices": str(torch.cuda.device_count())}
    return found


def absent(name: str, device: str, facts: dict[str, str]) -> str:
    """Why a case cannot be tried here; "" if it can."""
    if name == "nccl" and (device != "cuda" or int(facts["devices"]) < 2):
        return "NCCL takes one replica a device, and there are not two"
    if name == "shards":
        return "replicas of several ranks are refused on GPUs yet, and NCCL takes one rank a device"
    if name == "capturable" and device != "cuda":
        return "an optimizer that CUDA graphs can capture is for CUDA"
    if name == "readings" and (device != "cuda" or importlib.util.find_spec("pynvml") is None):
        return "NVML is read on CUDA devices, where nvidia-ml-py is installed"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", default=",".join(CASES), help=f"of {', '.join(CASES)}")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    wanted = args.only.split(",")
    if unknown := sorted(set(wanted) - set(CASES)):
        parser.error(f"no case {unknown[0]!r}: they are {', '.join(CASES)}")
    os.environ |= QUIET
    import torch

    if args.device == "cuda" and not torch.cuda.is_available():
        print("torch finds no CUDA device here; --device cpu rehearses the same without one", file=sys.stderr)
        return 2
    facts, rows = about(args.device), list[dict[str, Any]]()
    say: Callable[[str], None] = (lambda line: None) if args.json else (lambda line: print(line, flush=True))
    say("on " + ", ".join(f"{key} {value}" for key, value in facts.items()))
    with tempfile.TemporaryDirectory(prefix="outlast-device-") as base:
        device = Device(args.device, Path(base))
        for name in wanted:
            why = absent(name, args.device, facts)
            row = {"case": name, "result": "not tried", "what": why} if why else tried(device, name)
            rows.append(row)
            say(f"{row['result']:>9}  {name:<12}{row['what']}")
    if args.json:
        print(json.dumps({"on": facts, "cases": rows}, indent=1))
    return int(any(row["result"] == "failed" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
