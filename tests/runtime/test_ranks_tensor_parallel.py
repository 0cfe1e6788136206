"""Tensor parallelism inside replicas: bits of its own, equal over replicas, and whatever is killed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outlast.core import events as ev
from outlast.prove._process_tree import of_run
from outlast.runtime.settings.fault_points import Fault

pytestmark = [pytest.mark.process, pytest.mark.campaign]
SCRIPT = Path(__file__).with_name("tensor_parallel.py")


def ended(run: Any, survivors: set[str], ranks: int) -> dict[str, dict[str, Any]]:
    """What each rank of each survivor found, when the run had ended well."""
    assert run.finish() == 0, run.logs()
    assert of_run(run.driven.run_dir) == []
    results: dict[str, dict[str, Any]] = run.results()
    assert set(results) == {f"{name}-{place}" for name in survivors for place in range(ranks)}, run.logs()
    return results


def test_replicas_have_one_fingerprint_whoever_dies(fleet: Callable[..., Any]) -> None:
    """Two ranks compute each microbatch together, and audits find the same in both replicas. One rank is killed,
    and with it its replica."""
    want = ended(fleet(replicas=1, ranks=2, steps=6, script=[SCRIPT], max_restarts=0), {"r0.1"}, 2)["r0.1-0"]
    run = fleet(
        Fault(replica="r1/1.1", phase="merge", step=2, action="SIGKILL"),
        replicas=2, ranks=2, steps=6, script=[SCRIPT], max_restarts=0, audit="1.0",
    )  # fmt: skip
    for name, found in ended(run, {"r0.1"}, 2).items():
        assert found == want, f"{name}\n{run.logs()}"
    assert [recovery.lost_steps for recovery in run.driven.recoveries()] == [0]
    assert [event for event in run.driven.events if isinstance(event, ev.AuditMismatch)] == []


def test_who_joins_and_who_goes_on_have_it_too(fleet: Callable[..., Any], tmp_path: Path) -> None:
    """Rows over two ranks, and tensor parallelism over two: four ranks a replica. A replica joins lane by lane; another
    run goes on from what they saved, by tensor parallelism alone, to the bits of the arithmetic's degree."""
    keep = {"checkpoint_dir": str(tmp_path / "kept"), "checkpoint_every": 100}
    run = fleet(
        Fault(replica="r1/3.1", phase="reduce", step=2, bucket=1, action="SIGKILL"),
        replicas=2, ranks=4, steps=14, script=[SCRIPT, "--shard", "2"], gates=(4, 8, 12), **keep,
    )  # fmt: skip
    run.gate(4, "a new replica was served", lambda: run.served("r1.2"))
    run.gate(8, "it had caught up", lambda: run.caught_up("r1.2"))
    run.gate(12, "it trained again", lambda: len(run.driven.members) == 2)
    results = ended(run, {"r0.1", "r1.2"}, 4)
    assert len({found["fingerprint"] for found in results.values()}) == 1, run.logs()
    later = ended(fleet(replicas=1, ranks=2, steps=16, script=[SCRIPT], **keep), {"r0.1"}, 2)
    whole = ended(fleet(replicas=1, ranks=2, steps=16, script=[SCRIPT]), {"r0.1"}, 2)
    assert {found["fingerprint"] for found in later.values()} == {whole["r0.1-0"]["fingerprint"]}
    assert later["r0.1-0"]["losses"].items() <= whole["r0.1-0"]["losses"].items()


def test_norms_and_dropout_may_be_cut_by_the_sequence(fleet: Callable[..., Any]) -> None:
    """Two ranks with a part of each sequence, and rows over two pairs of them: the same bits, also when a rank dies as
    it computes, and in whoever joins."""
    script = [SCRIPT, "--sequence"]
    want = ended(fleet(replicas=1, ranks=2, steps=14, script=script, max_restarts=0), {"r0.1"}, 2)["r0.1-0"]
    run = fleet(
        Fault(replica="r1/3.1", phase="merge", step=2, action="SIGKILL"),
        replicas=2, ranks=4, steps=14, script=[*script, "--shard", "2"], gates=(4, 8, 12),
    )  # fmt: skip
    run.gate(4, "a new replica was served", lambda: run.served("r1.2"))
    run.gate(8, "it had caught up", lambda: run.caught_up("r1.2"))
    run.gate(12, "it trained again", lambda: len(run.driven.members) == 2)
    results = ended(run, {"r0.1", "r1.2"}, 4)
    assert {found["fingerprint"] for found in results.values()} == {want["fingerprint"]}, run.logs()
    assert results["r0.1-3"] == want
    assert [recovery.lost_steps for recovery in run.driven.recoveries()] == [0]


def test_a_row_is_of_all_ranks_of_tensor_parallelism_too(fleet: Callable[..., Any]) -> None:
    rule = {"aggregation": "krum_all_honest", "f": 1, "rows": 3, "microbatches": 6, "global_batch_size": 24}
    script = [SCRIPT, "--rule", json.dumps(rule)]
    want = ended(fleet(replicas=1, ranks=2, steps=4, script=script, tolerated=0), {"r0.1"}, 2)["r0.1-0"]
    for found in ended(fleet(replicas=3, ranks=2, steps=4, script=script), {"r0.1", "r1.1", "r2.1"}, 2).values():
        assert found == want
