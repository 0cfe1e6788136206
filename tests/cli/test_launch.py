"""What is written for engines: text that their own parsers take, with every word where it belongs."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from outlast.cli import main


def written(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["launch", *words]) == 0
    return capsys.readouterr().out


def test_a_batch_script_is_bash_and_asks_for_what_was_asked(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = written(
        capsys, "slurm", "--nodes", "3:5", "--slots", "8", "--spares", "1", "--gpus", "8", "--time", "2:00:00",
        "--options", "--checkpoint-dir /shared/ck", "train.py", "--lr", "1e-3", "--nodes", "its own",
    )  # fmt: skip
    for line in ("--nodes=3-5", "--gpus-per-node=8", "--time=2:00:00", "--requeue", "--no-kill", "--signal=TERM@60"):
        assert f"#SBATCH {line}\n" in text
    assert "--nnodes 3:5 --slots 8" in text
    assert '--replicas 23 --spares 1 --checkpoint-dir /shared/ck train.py --lr 1e-3 --nodes "its own"' in text
    bash = shutil.which("bash")
    assert bash is not None
    assert subprocess.run([bash, "-n"], input=text, text=True, check=False).returncode == 0


def test_manifests_name_each_other(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "jobset.json"
    written(
        capsys, "kubernetes", "--nodes", "2:4", "--slots", "2", "--name", "mine", "--image", "registry/it:1",
        "--out", str(out), "train.py",
    )  # fmt: skip
    secret, *_, jobset = json.loads(out.read_text())["items"]
    head, agents = jobset["spec"]["replicatedJobs"]
    assert (head["replicas"], agents["replicas"]) == (1, 3)
    assert secret["metadata"]["name"] == "mine-secret"
    pod: dict[str, Any] = agents["template"]["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert container["command"][container["command"].index("--join") + 1] == "mine-head-0-0.mine:29400"
    assert jobset["spec"]["network"]["subdomain"] == "mine"
    names = {entry["name"]: entry["valueFrom"] for entry in container["env"]}
    assert names["OUTLAST_SECRET"]["secretKeyRef"] == {"name": "mine-secret", "key": "secret"}
    assert not any("secret" in word.lower() for word in container["command"])
    assert pod["terminationGracePeriodSeconds"] == 60


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["slurm", "--nodes", "x", "train.py"], "nodes = 'x'"),
        (["slurm", "--nodes", "2", "--replicas", "9", "train.py"], "need more than 2 nodes with 1 slots"),
        (["slurm", "train.py", "it's"], "a quote in"),
        (["kubernetes", "--image", "i", "--name", "No_Name", "train.py"], "is no name for a job"),
    ],
)
def test_what_cannot_be_written_is_refused(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", *words]) == 2
    assert said in capsys.readouterr().err
