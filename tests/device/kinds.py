"""Cases of what people train with, beside the plain loop: compilers, fewer bits, optimizers, checks, rules, sensors."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from held import Held  # beside this file

TRIMMED = {"aggregation": "trimmed_mean", "f": 1, "rows": 4, "check_reducers": 1.0}


class Kinds(Held):
    """Each returns what it has shown, and raises AssertionError if it has not."""

    def spare(self) -> str:
        from outlast.runtime.settings.fault_points import Fault

        fault = Fault(replica="r1", phase="gathered", step=6, action="SIGKILL")
        run = self.fleet(fault, replicas=2, spares=1, steps=10, gates=(1, 4))
        self.held_at_gates(
            run,
            (1, "the spare was served", lambda: run.served("r2.1")),
            (4, "it had caught up", lambda: run.caught_up("r2.1")),
        )
        self.same(run, {"r0.1", "r2.1"}, 10)
        told = [(event.lost_steps, event.downtime_s) for event in run.driven.recoveries()]
        assert len(told) == 1, told
        assert told[0][0] == 0, told
        return (
            f"a spare took the place of a killed replica after {told[0][1]:.3f} s, and no step was lost or done again"
        )

    def compiled(self) -> str:
        self.replaced("--compiled")
        return "a compiled model: a killed replica was replaced by a process that compiled it too, with the same bits"

    def fp16(self) -> str:
        self.replaced("--fp16")
        known = self.alone(26, "--fp16")
        assert known["overflows"] >= 3, known
        return f"float16 under a scale: {known['overflows']} steps overflowed, one replica was replaced, the same bits"

    def fused(self) -> str:
        self.replaced("--optimizer", "fused")
        return "fused AdamW: its moments were handed to a replacement, the same bits"

    def capturable(self) -> str:
        self.replaced("--optimizer", "capturable")
        return "AdamW with its count of steps on the device: handed to a replacement, the same bits"

    def products(self) -> str:
        from outlast.core import events as ev
        from outlast.runtime.faults.flips import Flip

        flips = [
            Flip(replica="r0", target="product", step=3, bit=13, parameter=1),
            Flip(replica="r1", target="product", step=4, bit=13, parameter=-1, times=0, persistent=True),
        ]
        run = self.fleet(replicas=3, steps=8, flips=flips, options=("--checks", "abft"))
        self.same(run, {"r0.1", "r2.1"}, 8)
        seen = [e for e in run.driven.events if isinstance(e, ev.DeviceFinding) and e.source == "checks"]
        assert [(e.replica, e.step, e.action) for e in seen] == [("r0.1", 3, "recomputed")], seen
        assert any("is wrong each time" in e.detail for e in run.exits()), run.logs()
        return "a flipped bit of a product was found and put right; a device that is wrong each time cost its replica"

    def rules(self) -> str:
        from outlast.core import events as ev
        from outlast.runtime.faults.liars import Lie

        rule = ("--rule", json.dumps(TRIMMED))
        lie = Lie(replicas=("r2.1",), attack="lying_reducer", first_step=2)
        run = self.fleet(replicas=4, steps=5, options=rule, lies=[lie], max_restarts=1)
        self.same(run, {"r0.1", "r1.1", "r2.2", "r3.1"}, 5, *rule)
        accused = [(e.replica, e.step, e.decision) for e in run.driven.events if isinstance(e, ev.ReducerAccused)]
        assert accused == [("r2.1", 2, "evict")], accused
        run = self.fleet(
            replicas=4, steps=5, options=rule, lies=[Lie(replicas=("r1",), attack="nan", first_step=2)],
        )  # fmt: skip
        found = self.ended(run, {"r0.1", "r1.1", "r2.1", "r3.1"})
        assert len({each["fingerprint"] for each in found.values()}) == 1, found
        assert all(math.isfinite(float(loss)) for each in found.values() for loss in each["losses"].values()), found
        lied = "trimmed mean: who lied about a slice was named and replaced, the bits true"
        return f"{lied}; rows of NaN left nothing that is not finite, and all agreed"

    def readings(self) -> str:
        import torch

        run = self.fleet(replicas=2, steps=6, gates=(3,), readings_s=0.2)
        kept = Path(run.driven.run_dir) / "readings" / "a0.jsonl"

        def rows() -> list[dict[str, Any]]:
            lines = kept.read_text().splitlines() if kept.exists() else []
            return [row for row in map(json.loads, lines[:-1]) if row["source"] == "nvml"]

        self.held_at_gates(run, (3, "the device was read", lambda: len(rows()) > 3))
        self.same(run, {"r0.1", "r1.1"}, 6)
        uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
        seen = {row["name"]: row.get("value") for row in rows() if row["device"] == uuid}
        assert 5 < seen["nvml.temperature.c"] < 100, seen
        assert 5 < seen["nvml.power.w"] < 2000, seen
        lacking = sorted(row.get("text", "") for row in rows() if row["name"] == "missing")
        told = ", ".join(f"{name.removeprefix('nvml.')} {value:g}" for name, value in sorted(seen.items()))
        return f"NVML was read beside the run: {told}" + (
            f"; not: {'; '.join(sorted(set(lacking)))}" if lacking else ""
        )
