"""One job has one MTBF and one ETTR, whichever command is asked; and what its size and network change of them."""

from __future__ import annotations

import json
from itertools import pairwise, product
from typing import Any

import pytest

from outlast.cli import main
from outlast.plan._fleet import TOPOLOGIES, FleetLayout
from outlast.plan._planner import design_of
from outlast.plan.designs import job_from_options
from outlast.plan.system_table import system_rows
from outlast.plan.target_predicted import ACCELERATORS, PARAMETERS

JOBS = [
    (7e9, 64, "fat-tree"), (7e9, 1024, "rail"), (1.3e10, 512, "ring"), (7e10, 2048, "fat-tree"), (7e10, 4096, "tree"),
    (1.75e11, 8192, "rail"), (4.05e11, 16_384, "fat-tree"), (1.5e12, 10_000, "fat-tree"), (1.5e12, 32_768, "ring"),
    (1e13, 100_000, "fat-tree"),
]  # fmt: skip


def plan(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    assert main(["plan", *map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)  # type: ignore[no-any-return]


@pytest.mark.parametrize(("params", "accelerators", "topology"), JOBS)
def test_every_command_gives_one_clock_and_one_ettr(
    params: float, accelerators: int, topology: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = ("--params", params, "--accelerators", accelerators, "--topology", topology)
    whole = plan(capsys, *shape, "--days", 30, "--replications", 2)
    single = plan(capsys, "interval", *shape)
    table = plan(capsys, "system", "--params", params, "--nodes", accelerators // 8)
    (row,) = [r for r in table["rows"] if r["topology"] == topology]
    for name in ("mtbf_h", "ettr"):
        assert whole[name] == row[name] == single[name], name
    if (params, accelerators) == (PARAMETERS, ACCELERATORS):
        study = plan(capsys, "target-study", "--replications", 2)
        assert study["job"] == {name: whole[name] for name in ("mtbf_h", "ettr")}


def test_llama_3_fails_as_it_was_seen_to() -> None:
    """419 interruptions in 54 days: one each 3.09 h, on a network of the kind that it had."""
    job, _ = job_from_options(None)
    assert design_of(job).analytic.mtbf_h == pytest.approx(54 * 24 / 419, rel=1e-3)


def test_reliability_falls_with_parameters_nodes_and_steps() -> None:
    sizes, nodes = [1e9, 7e10, 4e11, 1.5e12], [16, 128, 1024, 8192]
    parts = ("r_compute", "r_communication", "r_synchronisation", "r", "mtbf_h")
    found = {(r.parameters, r.nodes, r.topology): r for r in system_rows(sizes, nodes, 100)}
    for topology in TOPOLOGIES:
        lines = [[found[n, m, topology] for m in nodes] for n in sizes]
        lines += [[found[n, m, topology] for n in sizes] for m in nodes]
        for line, part in product(lines, parts):
            values = [getattr(row, part) for row in line]
            assert all(b <= a * (1 + 1e-9) for a, b in pairwise(values)), (topology, part, values)
    often = [system_rows([4e11], [1024], steps, ("fat-tree",))[0].r for steps in (25, 50, 100, 200, 400)]
    assert often == sorted(often, reverse=True)
    assert often[0] > often[-1]


def test_a_network_that_routes_around_a_lost_link_fails_less() -> None:
    hours = {t: design_of(job_from_options(None, topology=t)[0]).analytic.mtbf_h for t in TOPOLOGIES}
    assert hours["rail"] > 1.05 * hours["fat-tree"]
    assert hours["ring"] == pytest.approx(hours["tree"], rel=1e-3)


def test_memory_in_use_is_all_that_a_small_model_changes() -> None:
    full = FleetLayout(parameters=4.05e11, accelerators=64)
    small = FleetLayout(parameters=1e8, accelerators=64)
    assert full.memory_share == 1.0
    assert small.memory_share == pytest.approx((1.6e9 + 20e9) / 80e9)


def test_a_job_file_s_own_shape_makes_its_classes(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "job.toml"
    path.write_text(
        'profile = "llama3"\nparameters = 7e10\naccelerators = 2048\ntopology = "rail"\ndays = 30.0\nspares = 0\n'
    )
    filed = plan(capsys, path, "--replications", 2)
    given = plan(
        capsys, "--params", 7e10, "--accelerators", 2048, "--topology", "rail", "--days", 30, "--replications", 2
    )
    assert filed["mtbf_h"] == pytest.approx(given["mtbf_h"], rel=1e-3)  # other spares


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--topology", "rails"], "did you mean 'rail'"),
        (["interval", "--params", "7e9", "--mtbf-hours", "3"], "both a job and --mtbf-hours"),
        (["interval", "--write-seconds", "3"], "--mtbf-hours is missing"),
        (["interval", "--mtbf-hours", "3"], "--write-seconds is missing"),
        (["system", "--profile", "lama3"], "did you mean 'llama3'"),
    ],
)
def test_what_is_no_job_is_refused(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *words]) == 2
    assert said in capsys.readouterr().err
