"""The files that engines read: a batch script for Slurm, manifests for Kubernetes. Pure text from a few numbers.

Placing processes on machines is the engine's; who is a member of the run is decided inside it. So a node that fails
ends nothing but its own processes, and one that is given back is an agent that joins.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from typing import Any

import msgspec

from outlast.errors import ConfigError

__all__ = ["EngineJob", "kubernetes_manifests", "slurm_script"]

_GRACE_S = 60  # between an engine's notice and the end: a save, and an orderly leave


class EngineJob(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be started. `options`: of `outlast run`; `nodes`: (fewest to begin with, most); `slots`: replicas that
    may run on a node."""

    name: str
    nodes: tuple[int, int]
    slots: int
    command: tuple[str, ...]
    options: tuple[str, ...] = ()
    cpus: int = 0
    gpus: int = 0
    time: str = ""
    partition: str = ""
    image: str = ""
    python: str = "python"

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?", self.name):
            raise ConfigError(
                f"{self.name!r} is no name for a job", remedy="up to 40 small letters, digits and dashes between them"
            )
        if not 1 <= self.nodes[0] <= self.nodes[1]:
            raise ConfigError(f"{self.nodes[0]} to {self.nodes[1]} nodes", remedy="--nodes MIN or MIN:MAX")


def _joined(words: Sequence[str]) -> str:
    """Words as they stand in double quotes where they need any: around all of them stand single ones."""
    return " ".join(word if shlex.quote(word) == word else f'"{_ESCAPED.sub(_BACK, word)}"' for word in words)


_ESCAPED, _BACK = re.compile(r'(["\\\\$`])'), r"\\\1"


_SLURM = """\
#!/bin/bash
# Made by outlast launch slurm. The first node keeps the run's record and trains, the others join it.
{directives}
set -euo pipefail

# A folder that all nodes share. After a requeue it is another one, and the run resumes from its checkpoints.
folder=${{OUTLAST_JOB_FOLDER:-$PWD/outlast-runs/slurm-$SLURM_JOB_ID-${{SLURM_RESTART_COUNT:-0}}}}
umask 077
mkdir -p "$folder"
[ -s "$folder/secret" ] || head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \\n' > "$folder/secret"
head_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export folder head_node port=$((20000 + SLURM_JOB_ID % 20000))

# --no-kill: a node that fails takes nobody with it; --kill-on-bad-exit=0: nor does a task that ends.
exec srun --no-kill --kill-on-bad-exit=0 --wait=0 bash -c '
if [ "$SLURM_NODEID" = 0 ]; then
  address=$(getent ahosts "$head_node" | cut -d " " -f 1 | grep -v "^127\\.\\|^::1$" | head -n 1)
  exec {python} -m outlast run --endpoint "${{address:-$head_node}}:$port" --nnodes {nnodes} --slots {slots} \\
    --secret-file "$folder/secret" --run-dir "$folder/run" {options} {command}
fi
exec {python} -m outlast agent --join "$head_node:$port" --secret-file "$folder/secret" --slots {slots} \\
  --host "$SLURMD_NODENAME" --run-dir "$folder/$SLURMD_NODENAME"
'
"""


def slurm_script(job: EngineJob) -> str:
    """For sbatch. What is quoted for the shell inside stands between single quotes, which the words may not hold."""
    directives = [
        f"--job-name={job.name}", f"--nodes={job.nodes[0]}-{job.nodes[1]}", "--ntasks-per-node=1",
        *([f"--cpus-per-task={job.cpus}"] if job.cpus else []), *([f"--gpus-per-node={job.gpus}"] if job.gpus else []),
        *([f"--time={job.time}"] if job.time else []), *([f"--partition={job.partition}"] if job.partition else []),
        f"--signal=TERM@{_GRACE_S}", "--requeue", "--no-kill", "--open-mode=append",
    ]  # fmt: skip
    words = (*job.options, *job.command, job.python)
    for word in words:
        if "'" in word:
            raise ConfigError(f"a quote in {word!r}", remedy="put it into the script, or into run.toml with --config")
    return _SLURM.format(
        directives="\n".join(f"#SBATCH {line}" for line in directives),
        python=_joined([job.python]),
        nnodes=f"{job.nodes[0]}:{job.nodes[1]}",
        slots=job.slots,
        options=_joined(job.options),
        command=_joined(job.command),
    )


def kubernetes_manifests(job: EngineJob) -> str:
    """A Secret to be filled, and a JobSet (jobset.x-k8s.io/v1alpha2), as one JSON list, which kubectl reads."""
    if not job.image:
        raise ConfigError("no image with outlast and the script", remedy="--image REGISTRY/NAME:TAG")
    head = f"{job.name}-head-0-0.{job.name}"
    run = [
        job.python, "-m", "outlast", "run", "--endpoint", "$(POD_IP):29400",
        "--nnodes", f"{job.nodes[0]}:{job.nodes[1]}", "--slots", str(job.slots), "--host", "head",
        "--run-dir", "/outlast/run", *job.options, *job.command,
    ]  # fmt: skip
    agent = [
        job.python, "-m", "outlast", "agent", "--join", f"{head}:29400", "--address", "$(POD_IP)",
        "--host", "$(POD_NAME)", "--slots", str(job.slots), "--run-dir", "/outlast/agent",
    ]  # fmt: skip
    jobs = [_replicated("head", 1, job, run)]
    if job.nodes[1] > 1:
        jobs.append(_replicated("agents", job.nodes[1] - 1, job, agent))
    told = "replace this: openssl rand -hex 32"
    secret = {
        "apiVersion": "v1", "kind": "Secret", "metadata": {"name": f"{job.name}-secret"}, "type": "Opaque",
        "stringData": {"secret": told},
    }  # fmt: skip
    jobset = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": {"name": job.name},
        "spec": {
            "network": {"enableDNSHostnames": True, "subdomain": job.name},
            "successPolicy": {"operator": "All", "targetReplicatedJobs": ["head"]},
            "failurePolicy": {"maxRestarts": 3},
            "replicatedJobs": jobs,
        },
    }  # fmt: skip
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": [secret, jobset]}, indent=2)


def _replicated(name: str, number: int, job: EngineJob, command: list[str]) -> dict[str, Any]:
    """A Job a host, so that one is made anew by itself. What is not of this run (4), or has bad arguments (2), is not
    tried again."""
    limits = {"cpu": str(job.cpus)} if job.cpus else {}
    limits |= {"nvidia.com/gpu": str(job.gpus)} if job.gpus else {}
    container = {
        "name": "outlast", "image": job.image, "command": command,
        "env": [
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
            {"name": "OUTLAST_SECRET", "valueFrom": {"secretKeyRef": {"name": f"{job.name}-secret", "key": "secret"}}},
        ],
        "ports": [{"containerPort": 29400}] if name == "head" else [],
        "resources": {"limits": limits, "requests": limits} if limits else {},
        "volumeMounts": [{"name": "outlast", "mountPath": "/outlast"}],
    }  # fmt: skip
    pod = {
        "restartPolicy": "Never", "terminationGracePeriodSeconds": _GRACE_S, "containers": [container],
        "volumes": [{"name": "outlast", "emptyDir": {}}],
    }  # fmt: skip
    refused = {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [2, 4]}}
    spec = {
        "parallelism": 1, "completions": 1, "backoffLimit": 0 if name == "head" else 1000,
        "podFailurePolicy": {"rules": [refused]}, "template": {"spec": pod},
    }  # fmt: skip
    return {"name": name, "replicas": number, "template": {"spec": spec}}
