"""Costs from journals into a file, and from the file into a plan; the three tables of the target study."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from outlast.cli import main
from outlast.core import events as ev
from outlast.journal import Journal
from outlast.plan.calibration import applied, calibrate, load, write
from outlast.plan.designs import job_from_options
from outlast.plan.target_predicted import predicted
from outlast.plan.target_study import target_answer

REAL: dict[str, list[ev.AnyEvent]] = msgspec.json.decode(
    gzip.decompress((Path(__file__).parents[1] / "core" / "real_journals.json.gz").read_bytes()),
    type=dict[str, list[ev.AnyEvent]],
)


def recovery(at_s: float, detect_s: float, downtime_s: float, lost: int = 0) -> ev.Recovery:
    return ev.Recovery(
        at_s=at_s, cause="signal", replica="r1.1", noticed_by="a0", detect_s=detect_s, downtime_s=downtime_s,
        microbatches_recomputed=1, lost_steps=lost, step=3, view=[1, 2],
    )  # fmt: skip


def story(seed: int, num: int) -> tuple[list[ev.AnyEvent], dict[str, float]]:
    """Deaths, joins and restarts with costs that are known."""
    rng, told, true = np.random.default_rng(seed), list[ev.AnyEvent](), {"detect": 0.02, "stall": 0.3, "start": 4.0}
    at_s = 1e9
    for k in range(num):
        at_s += 100
        told.append(ev.ReplicaExited(at_s=at_s, replica=f"r1.{k}", cause="signal", detail="", noticed_by="a0"))
        told.append(recovery(at_s + 1, *(float(rng.gamma(4, true[n] / 4)) for n in ("detect", "stall"))))
        joined_s = at_s + float(rng.gamma(4, true["start"] / 4))
        told.append(ev.JoinerCaughtUp(at_s=joined_s, replica=f"r1.{k + 1}", step=5, seconds=0.5))
    told += [
        ev.FleetGone(at_s=at_s + 200, step=9, detail=""),
        ev.ViewFormed(at_s=at_s + 207, epoch=1, n=9, step=9, roll_call_s=0.1),
    ]
    return told, true


def test_costs_are_those_that_were_put_in_and_their_intervals_honest() -> None:
    inside, trials = 0, 60
    for seed in range(trials):
        told, true = story(seed, 30)
        found = calibrate([told])
        assert found.costs["restart"].mean_s == pytest.approx(7.0)
        assert (found.shares["outlasted"].k, found.shares["outlasted"].n) == (30, 31)
        assert calibrate([told], meant_losses=1).shares["outlasted"].n == 30
        inside += sum(found.costs[n].low_s <= value <= found.costs[n].high_s for n, value in true.items())
    assert 0.90 < inside / (3 * trials) < 0.99


def test_real_journals_give_costs_and_the_file_holds_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = []
    for name, events in REAL.items():
        with Journal.create(tmp_path / name) as journal:
            journal.append_many(events)
        runs.append(str(tmp_path / name))
    out = tmp_path / "costs.json"
    assert main(["calibrate", *runs, "--out", str(out), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {"save_blocked", "detect", "stall", "join", "start", "step", "roll_call", "restart"} <= set(told["costs"])
    assert load(str(out)).costs["stall"].mean_s == told["costs"]["stall"]["mean_s"]
    shape = ["plan", "--accelerators", "512", "--params", "7e9", "--days", "5", "--replications", "4", "--json"]
    plans = []
    for more in ([], ["--calibration", str(out)]):
        assert main([*shape, *more]) == 0
        plans.append(json.loads(capsys.readouterr().out))
    plain, with_costs = plans
    assert plain["mtbf_h"] == with_costs["mtbf_h"], "costs are not rates"
    assert plain["ettr"] != with_costs["ettr"]
    assert any("are assumed" in note for note in plain["notes"])
    assert any("Measured by outlast in 8 runs" in note for note in with_costs["notes"])
    assert main(["calibrate", *runs]) == 0
    assert "no step is committed when a death is outlasted" in capsys.readouterr().out


def test_costs_scale_with_the_bytes_of_a_device() -> None:
    told, _ = story(1, 9)
    told.append(
        ev.CheckpointSaved(
            at_s=2e9, step=1, generation=1, view=[1, 1], num_writers=2, state_bytes=10**9, written_bytes=2 * 10**9,
            blocked_s=0.2, copied_s=0.1, durable_s=3.0, reason="", url="",
        )
    )  # fmt: skip
    job, _ = job_from_options(None, params=1e12, accelerators=8000)
    costed, notes = applied(job, calibrate([told]))
    assert costed.tiers[0].write_s == pytest.approx(0.2 * 2.0)  # 2 GB a device, 1 GB was measured
    assert costed.tiers[0].lag_s == pytest.approx(6.0)
    assert costed.tiers[0].recovery_s == pytest.approx(7.0)
    assert costed.mask_stall_s == calibrate([told]).costs["stall"].mean_s
    assert "reading a checkpoint" in notes[-1]


OTHER = '{"format": "x/9", "runs": 1, "faults": 0, "costs": {}, "shares": {}}'


@pytest.mark.parametrize(("content", "said"), [("{", "is no calibration"), (OTHER, "x/9")])
def test_what_is_no_calibration_is_refused(
    content: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "c.json").write_text(content)
    assert main(["plan", "--calibration", str(tmp_path / "c.json")]) == 2
    assert said in capsys.readouterr().err
    assert main(["plan", "--calibration", str(tmp_path / "none.json")]) == 2
    assert "cannot read" in capsys.readouterr().err


def test_calibrate_says_what_it_lacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate"]) == 2
    assert "--measure" in capsys.readouterr().err
    with Journal.create(tmp_path / "run") as journal:
        journal.append_many(list(next(iter(REAL.values())))[:1])
    assert main(["calibrate", str(tmp_path / "run")]) == 2
    assert "show no cost" in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    from outlast.errors import EnvironmentFault

    with pytest.raises(EnvironmentFault, match="cannot write"):
        write(calibrate([story(1, 2)[0]]), str(tmp_path / "no" / "file.json"))


def test_the_prediction_is_of_outlast_and_says_what_it_rests_on() -> None:
    rows, clocks, notes = predicted(draws=40)
    assert [r.name for r in rows] == [
        "baseline",
        "+ redundant gradients",
        "+ adaptive checkpointing",
        "+ Byzantine tolerance",
    ]
    assert all(r.mtbr_95_h[0] < r.mtbr_h < r.mtbr_95_h[1] for r in rows)
    assert all(r.efficiency_95[0] < r.efficiency < r.efficiency_95[1] for r in rows)
    assert rows[0].mtbr_h == pytest.approx(clocks["mtbf_h"], rel=0.02), "nothing is masked"
    assert rows[1].mtbr_h > 3 * rows[0].mtbr_h
    assert rows[2].efficiency > rows[1].efficiency
    assert rows[3].mtbr_h > rows[2].mtbr_h
    assert any("Costs are assumed" in note for note in notes)
    told, _ = story(1, 200)
    costed, same, _ = predicted(calibrate([told]), draws=40)
    assert same == clocks, "the job is the same"
    assert costed[1].mtbr_h != rows[1].mtbr_h, "the share that is outlasted was counted"


def test_the_study_shows_measured_fleets_beside_their_prediction(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row: dict[str, Any] = {
        "name": "baseline", "faults": 12, "mtbr_s": 60.0, "predicted_mtbr_s": None, "ettr": 0.8, "predicted_ettr": 0.79
    }  # fmt: skip
    path = tmp_path / "fleets.json"
    path.write_text(json.dumps({"rows": [row]}))
    answer = target_answer(20, measured=str(path))
    assert answer.data["measured"] == [row]
    assert answer.data["constants"] > answer.data["values"]
    assert "3. Measured" in answer.text()
    path.write_text("[]")
    assert main(["plan", "target-study", "--measured", str(path)]) == 2
    assert "holds no measured fleets" in capsys.readouterr().err
