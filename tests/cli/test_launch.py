"""What is written for engines: text that their own parsers take, with every word where it belongs."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outlast.cli import main
from outlast.runtime.transport.endpoints import read_host_port


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
        (["slurm", "--nodes", "0", "train.py"], "nodes = '0'"),
        (["slurm", "--nodes", "3:2", "train.py"], "nodes = '3:2'"),
        (["slurm", "--time", "tomorrow", "train.py"], "time = 'tomorrow'"),
        (["slurm", "--options", "--exchnge shm", "train.py"], "No such option '--exchnge'. Did you mean '--exchange'?"),
        (["slurm", "--options", "--guards all", "train.py"], "guards = 'all'"),
        (["slurm", "--options", "--nproc-per-node 8", "train.py"], "is another launcher's"),
        (["slurm", "--options", '--run-dir "x', "train.py"], "No closing quotation"),
        (["slurm", "--options", "--run-dir=x", "train.py"], "OUTLAST_JOB_FOLDER"),
        (["slurm", "--options", "--replicas=3", "train.py"], "--replicas in --options"),
        (["slurm", "--options", "--help", "train.py"], "--options '--help'"),
        (["slurm", "--options", "other.py", "train.py"], "hold a script"),
        (["kubernetes", "--image", "i", "--options", "-m x", "train.py"], "hold a script"),
        (["slurm", "train.py", "it's"], "a quote in"),
        (["slurm", "--tls-cert", "c", "train.py"], "tls_key and tls_ca are not given"),
        (["slurm", "--tls-cert", "it's", "--tls-key", "k", "--tls-ca", "a", "train.py"], "a quote in"),
        (["slurm", "--options", "--tls-cert c --tls-key k --tls-ca a", "train.py"], "to the first host alone"),
        (["kubernetes", "--image", "i", "--options", "--tls-cert=c", "train.py"], "to the first host alone"),
        (["kubernetes", "--image", "i", "--tls-secret", "s", "train.py"], "only one is there"),
        (["kubernetes", "--image", "i", "--name", "No_Name", "train.py"], "is no name for a job"),
    ],
)
def test_what_cannot_be_written_is_refused(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", *words]) == 2
    assert said in capsys.readouterr().err


def test_a_script_is_looked_at_where_it_is_here(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["launch", "slurm", "train.py"]) == 0
    assert capsys.readouterr().err == "outlast: train.py is not here; it must be where sbatch is called\n"
    Path("train.py").write_text("x = (\n")
    assert main(["launch", "slurm", "train.py"]) == 2
    assert "train.py, line 1: '(' was never closed" in capsys.readouterr().err
    for words in (["train.py"], ["-m", "train"]):
        Path("train.py").write_text("x = 1\n")
        assert main(["launch", "slurm", "--", *words]) == 0
        assert capsys.readouterr().err == ""


_STANDINS = {
    "srun": 'while [ "$1" != bash ]; do shift; done\nSTEP=$$ exec "$@"',
    "scontrol": 'case $1 in show) seq -f "n%g" 9999 ;; *) echo "$@" >> "$BASE/asked" ;; esac',
    "squeue": "echo RUNNING",
    "getent": 'printf "%s STREAM\\n" ::1 fe80::1 $ADDRESS',
    "interpreter": """
case "$3" in
status) printf '{"last_save": {\\n'; seq 99999 ;;
run)
  echo "$5" > "$BASE/endpoint"; env > "$BASE/told.run"
  kill -TERM $PPID $STEP  # a notice, and the end before the shells that wait have seen to it
  exit $CODE ;;
agent) env > "$BASE/told.agent" ;;
esac""",
}


@pytest.fixture
def job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., int]:
    """The batch script by itself, between programs that say what Slurm's would: the exit code of a job whose run ends
    with `CODE` as the notice comes."""
    for name, text in _STANDINS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    script = tmp_path / "job.sh"

    def start(*words: str, **told: str) -> int:
        written(capsys, "slurm", "--python", str(tmp_path / "interpreter"), "--out", str(script), *words, "train.py")
        environ = {
            "PATH": f"{tmp_path}:{os.environ['PATH']}", "BASE": str(tmp_path),
            "OUTLAST_JOB_FOLDER": str(tmp_path / "job"),
            "SLURM_JOB_ID": "7", "SLURM_NODEID": "0", "SLURM_JOB_NODELIST": "n[1-9999]", "SLURMD_NODENAME": "n1",
            "ADDRESS": "10.0.0.1", **told,
        }  # fmt: skip
        return subprocess.run(["/bin/bash", str(script)], env=environ, timeout=60, check=False).returncode

    return start


@pytest.mark.parametrize(
    ("code", "restarts", "again"),
    [(143, 0, True), (1, 99, True), (143, 100, False), (0, 0, False), (2, 0, False), (4, 0, False), (5, 0, False)],
)
def test_a_job_is_queued_again_only_where_that_helps(
    code: int, restarts: int, again: bool, job: Callable[..., int], tmp_path: Path
) -> None:
    """The job's exit code is the run's, also where the notice comes as the run ends."""
    assert job(CODE=str(code), SLURM_RESTART_COUNT=str(restarts)) == code
    asked = tmp_path / "asked"
    assert (asked.read_text() if asked.exists() else "") == ("requeue 7\n" if again else "")


@pytest.mark.parametrize(
    ("address", "endpoint"),
    [("10.0.0.1", "10.0.0.1:20007"), ("2001:db8::5 10.0.0.1", "[2001:db8::5]:20007"), ("", "n1:20007")],
)
def test_the_first_node_s_address_is_one_that_others_reach(
    address: str, endpoint: str, job: Callable[..., int], tmp_path: Path
) -> None:
    assert job(CODE="0", ADDRESS=address) == 0
    assert (tmp_path / "endpoint").read_text().strip() == endpoint
    assert read_host_port(endpoint)[1] == 20007


@pytest.mark.parametrize("told", [{}, {"SLURM_NODEID": "1"}], ids=["run", "agent"])
@pytest.mark.parametrize("name", ["", "runs.test"])
def test_each_node_is_told_of_its_own_certificates(
    name: str, told: dict[str, str], job: Callable[..., int], tmp_path: Path
) -> None:
    cert, key, ca = "/etc/some where/{node}.pem", "/etc/{node}$x`y`.key", "/etc/ca.pem"
    words = ["--tls-cert", cert, "--tls-key", key, "--tls-ca", ca, *(["--tls-name", name] if name else [])]
    ended = tmp_path / "job" / "0.code"
    ended.parent.mkdir()
    ended.write_text("0")  # the first node's, which is not asked here
    assert job(*words, CODE="0", **told) == 0
    lines = (tmp_path / ("told.agent" if told else "told.run")).read_text().splitlines()
    found = dict(line.split("=", 1) for line in lines if line.startswith("OUTLAST_TLS_"))
    wanted = {"CERT": "/etc/some where/n1.pem", "KEY": "/etc/n1$x`y`.key", "CA": ca} | ({"NAME": name} if name else {})
    assert found == {f"OUTLAST_TLS_{part}": value for part, value in wanted.items()}


@pytest.mark.parametrize("address", ["10.0.0.1", "fd00:10:244::1:7"])
def test_the_kubelet_leaves_the_words_of_a_command_as_they_are(
    address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It puts a variable in for $(NAME), and $ for $$."""
    words = ["kubernetes", "--image", "i", "--options", "--run-dir '/r/$(POD_NAME)'", "train.py", "--to", "$$x$(HOME)"]
    *_, jobset = json.loads(written(capsys, *words))["items"]
    head = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    known = {"POD_IP": address, "POD_NAME": "pod", "HOME": "/root"}

    def kubelet(word: str) -> str:
        return re.sub(r"\$\$|\$\((\w+)\)", lambda at: known[at[1]] if at[1] else "$", word)

    command = [kubelet(word) for word in head["containers"][0]["command"]]
    assert command[-3:] == ["train.py", "--to", "$$x$(HOME)"]
    assert "/r/$(POD_NAME)" in command
    assert read_host_port(command[command.index("--endpoint") + 1]) == (address, 29400)
