"""Runs that a real Slurm starts on its nodes, takes nodes from and gives nodes to; with the bits of one host."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.engines.followed import Followed
from tests.engines.slurm_cluster import SlurmCluster, missing

from outlast.cli import main
from outlast.core import events as ev

pytestmark = [pytest.mark.process, pytest.mark.campaign]


class Job(Followed):
    """Three nodes of a cluster of five train, one replica on each."""

    def __init__(self, on: SlurmCluster, base: Path, steps: int, gates: tuple[int, ...], *words: str) -> None:
        super().__init__(base, steps, gates, on.logs)
        self.on, self.folder, self.script_file = on, base / "job", str(base / "job.sh")
        asked = ["--nodes", "3:5", "--replicas", "3", "--cpus", "8", "--partition", "low", "--python", sys.executable]
        asked += ["--options", f"--config {base / 'run.toml'}", "--out", self.script_file]
        assert main(["launch", "slurm", *asked, *self.script, *words]) == 0
        options = ["-W", "-N", "3", "-w", "n0,n1,n2", "-D", str(base), "-o", str(base / "job.out")]
        told = on.environ | {"OUTLAST_JOB_FOLDER": str(self.folder)}
        self.begin(self.folder / "run-0", [*on.net.entering(0), "sbatch", *options, self.script_file], told)
        self.until("the job was there", lambda: "1" in on.run("squeue", "-h", "-o", "%i").stdout.split())

    def more(self, node: str) -> None:
        """Another job, of this one node, joins the run."""
        told = f"--export=ALL,OUTLAST_JOIN={self.folder}"
        out = str(self.base / f"more-{node}.out")
        self.on.run("sbatch", "-N", "1", "-w", node, told, "-o", out, "-D", str(self.base), self.script_file)

    def lost(self) -> list[str]:
        """Hosts that were given up."""
        agents = {e.agent: e.host for e in self.driven.events if isinstance(e, ev.AgentStarted)}
        return [agents[e.agent] for e in self.driven.events if isinstance(e, ev.AgentLost)]


@pytest.fixture
def submit(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    reason = missing()
    if reason:
        pytest.skip(reason)
    jobs: list[Job] = []
    tmp_path.chmod(0o755)
    with SlurmCluster(5, tmp_path, silent_s=8) as on:

        def start(*words: str, steps: int, gates: tuple[int, ...]) -> Job:
            jobs.append(Job(on, tmp_path, steps, gates, *words))
            return jobs[-1]

        yield start
        for job in jobs:
            job.close()


def test_a_node_goes_down_and_is_given_back(submit: Callable[..., Job]) -> None:
    """The others train on; the node joins again, by a job of its own, once Slurm has it back."""
    job = submit(steps=80, gates=(5, 6, 20, 30, 40, 50))
    job.gate(5, "all nodes trained", job.whole)
    assert {job.host_of(name) for name in job.driven.members} == {"n0", "n1", "n2"}
    job.on.net.power_off(2)
    job.gate(6, "it was off", lambda: True)
    job.until("the host was given up", lambda: job.lost() == ["n2"])
    job.until("Slurm had noticed", lambda: job.on.states()[2] == "down")
    job.on.net.mend(2)
    job.on.node(2)
    job.until("the node was back", lambda: job.on.states()[2] == "idle")
    job.more("n2")
    job.comes_back("n2", 20)
    job.assert_unchanged(3)
    assert not list(job.base.glob("job/*.noticed"))


@pytest.mark.soak
def test_a_drained_node_is_taken_from_the_job(submit: Callable[..., Job]) -> None:
    """Draining a node touches nothing that runs there; taking it from the job ends the host, and another takes part."""
    job = submit(steps=80, gates=(5, 6, 20, 30, 40, 50))
    job.gate(5, "all nodes trained", job.whole)
    job.on.run("scontrol", "update", "nodename=n2", "state=drain", "reason=test")
    assert job.on.states()[2] == "draining"
    job.gate(6, "it drained", lambda: True)
    job.until("nobody was lost for it", lambda: job.driven.step >= 18)
    assert job.lost() == []
    job.on.run("scontrol", "update", "jobid=1", "nodelist=n0,n1")
    job.until("the host was given up", lambda: job.lost() == ["n2"])
    job.more("n3")
    job.comes_back("n3", 20)
    assert job.on.states()[2] == "drained"
    job.on.run("scontrol", "update", "nodename=n2", "state=resume")
    job.until("the node was given back", lambda: job.on.states()[2] == "idle")
    job.assert_unchanged(3)


@pytest.mark.soak
@pytest.mark.parametrize("how", ["preempted", "requeued"])
def test_a_job_that_is_queued_again_goes_on(how: str, submit: Callable[..., Job], tmp_path: Path) -> None:
    """Preempted, with a notice to every process: it saves. By an operator's word, with none: from its last save."""
    words = ("--checkpoint", f'{{"dir": "{tmp_path / "ck"}", "every": 10}}')
    job = submit(*words, steps=80, gates=(5, 25, 40, 45))
    job.gate(5, "all nodes trained", job.whole)
    job.gate(25, "it had saved", lambda: any(isinstance(e, ev.CheckpointSaved) for e in job.driven.events))
    job.until("it trains on", lambda: job.driven.step >= 38)
    if how == "preempted":
        (tmp_path / "other.sh").write_text("#!/bin/bash\nsleep 1\n")
        asked = ["-p", "high", "-N", "5", "--exclusive", "-o", str(tmp_path / "other.out")]
        job.on.run("sbatch", *asked, str(tmp_path / "other.sh"))
        job.gate(40, "it was told", lambda: (job.folder / "0.noticed").exists())
        job.until("it saved and ended", lambda: any(isinstance(e, ev.RunEnded) for e in job.driven.events))
        ended = next(e for e in job.driven.events if isinstance(e, ev.RunEnded))
        assert ended.exit_code == 143, job.logs()
    else:
        job.on.run("scontrol", "requeue", "1")
        job.gate(40, "it was ended", lambda: job.on.job("1") == "PENDING")
    job.driven.follow(job.folder / "run-1")
    job.gate(45, "all nodes trained again", job.whole)
    job.until("they said so", lambda: job.driven.step >= 45)
    begun = next(e for e in job.driven.events if isinstance(e, ev.ProgressMade) and e.losses).losses[0][0]
    assert begun >= 38 if how == "preempted" else begun >= 10, job.logs()
    job.assert_unchanged(3)
