"""The manifests that Kubernetes reads: a Secret, budgets of disruptions, and a JobSet, or a TrainJob with its runtime.

Which exit code means what (`reference/errors`) decides what is tried again. A host that was asked to go, lost its
coordinator or was evicted is made anew by its own Job. What no second try would mend (bad arguments, the script's own
error) ends the whole set at once; an agent never does, for the others train on without it.
"""

from __future__ import annotations

import json
from typing import Any

from outlast.cli._launch_files import GRACE_S, EngineJob
from outlast.config import TlsFiles
from outlast.errors import ConfigError

__all__ = ["KubernetesJob", "kubernetes_manifests"]

_PORT, _PROBES = 29400, 29402
_USELESS = [2, 4, 5]  # bad arguments; not of this run; the script's own error
_LEAVING = [3, 143]  # no coordinator any more, which the next one's agents wait for; asked to go
_NOTICE = (  # to the process that the kubelet watches; then TERM comes again, and a second one changes nothing
    "import os, signal; os.kill(1, signal.SIGTERM)"
)
_BUDGET = "policy/v1"
_TLS = TlsFiles("/outlast-tls/tls.crt", "/outlast-tls/tls.key", "/outlast-tls/ca.crt")
"""The files of a Secret as cert-manager makes it, and `kubectl create secret tls` but for the authority."""
_KEY_MODE, _GROUP = 0o400, 1000  # an image's user has the key by this group: the kubelet lets it read the files
_ENDPOINT = f"[$(POD_IP)]:{_PORT}"  # the brackets of IPv6 change nothing around IPv4


class KubernetesJob(EngineJob, frozen=True, kw_only=True):
    """`tls_secret`: a Secret with tls.crt, tls.key and ca.crt for TLS between the pods, or ""; `tls_name`: the name
    that its certificate bears, as pods have addresses of their own."""

    tls_secret: str = ""
    tls_name: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if bool(self.tls_secret) != bool(self.tls_name):
            raise ConfigError(
                "of the Secret with certificates and the name that they bear only one is there",
                remedy="--tls-secret SECRET --tls-name NAME: pods have no addresses that a certificate could be for",
            )


def kubernetes_manifests(job: KubernetesJob, kind: str = "jobset") -> str:
    """One JSON list, which kubectl reads. `kind`: jobset (jobset.x-k8s.io/v1alpha2), or trainjob
    (trainer.kubeflow.org/v1alpha1). ConfigError."""
    if not job.image:
        raise ConfigError("no image with outlast and the script", remedy="--image REGISTRY/NAME:TAG")
    if kind not in ("jobset", "trainjob"):
        raise ConfigError(f"kind = {kind!r}", remedy="jobset or trainjob")
    secret = {
        "apiVersion": "v1", "kind": "Secret", "metadata": {"name": f"{job.name}-secret"}, "type": "Opaque",
        "stringData": {"secret": "replace this: openssl rand -hex 32"},
    }  # fmt: skip
    items = [secret, _budget(job, "head", 1)]
    if job.nodes[1] > 2:
        items.append(_budget(job, "agents", job.nodes[1] - 2))
    items += _trainjob(job) if kind == "trainjob" else [_jobset(job)]
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": items}, indent=2)


def _jobset(job: KubernetesJob) -> dict[str, Any]:
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": {"name": job.name},
        "spec": _jobset_spec(job),
    }  # fmt: skip


def _trainjob(job: KubernetesJob) -> list[dict[str, Any]]:
    """The runtime is this run's own, as its hosts have two parts to play."""
    api = "trainer.kubeflow.org/v1alpha1"
    runtime = {
        "apiVersion": api, "kind": "TrainingRuntime", "metadata": {"name": job.name},
        "spec": {"template": {"spec": _jobset_spec(job)}},
    }  # fmt: skip
    asked = {
        "apiVersion": api, "kind": "TrainJob", "metadata": {"name": job.name},
        "spec": {
            "runtimeRef": {"name": job.name, "kind": "TrainingRuntime", "apiGroup": "trainer.kubeflow.org"},
        },
    }  # fmt: skip
    return [runtime, asked]


def _jobset_spec(job: KubernetesJob) -> dict[str, Any]:
    first = f"{job.name}-head-0-0.{job.name}"
    run = [
        *_literal(job.python), "-m", "outlast", "run", "--endpoint", _ENDPOINT,
        "--nnodes", f"{job.nodes[0]}:{job.nodes[1]}", "--slots", str(job.slots), "--host", "head",
        "--probes", str(_PROBES), "--run-dir", "/outlast/run", *_literal(*job.options, *job.command),
    ]  # fmt: skip
    agent = [
        *_literal(job.python), "-m", "outlast", "agent", "--join", f"{first}:{_PORT}", "--address", "$(POD_IP)",
        "--host", "$(POD_NAME)", "--slots", str(job.slots), "--probes", str(_PROBES), "--run-dir", "/outlast/agent",
    ]  # fmt: skip
    jobs = [_replicated("head", 1, job, run)]
    if job.nodes[1] > 1:
        jobs.append(_replicated("agents", job.nodes[1] - 1, job, agent))
    rule = {
        "name": "useless-to-try-again", "action": "FailJobSet", "targetReplicatedJobs": ["head"],
        "onJobFailureReasons": ["PodFailurePolicy"],
    }  # fmt: skip
    return {
        "network": {"enableDNSHostnames": True, "subdomain": job.name, "publishNotReadyAddresses": True},
        "successPolicy": {"operator": "All", "targetReplicatedJobs": ["head"]},
        "failurePolicy": {"maxRestarts": 3, "rules": [rule]},
        "replicatedJobs": jobs,
    }


def _literal(*words: str) -> list[str]:
    """As they are when the kubelet has put in its variables: of a container's command it takes $$ for $."""
    return [word.replace("$", "$$") for word in words]


def _budget(job: KubernetesJob, part: str, least: int) -> dict[str, Any]:
    """At most one host at a time is evicted, and never the one with the run's record. A Job's pods have a budget by the
    least number only."""
    labels = {"jobset.sigs.k8s.io/jobset-name": job.name, "jobset.sigs.k8s.io/replicatedjob-name": part}
    return {
        "apiVersion": _BUDGET, "kind": "PodDisruptionBudget", "metadata": {"name": f"{job.name}-{part}"},
        "spec": {"minAvailable": least, "selector": {"matchLabels": labels}},
    }  # fmt: skip


def _replicated(part: str, number: int, job: KubernetesJob, command: list[str]) -> dict[str, Any]:
    """A Job a host, so that one is made anew by itself."""
    volumes: list[dict[str, Any]] = [{"name": "outlast", "emptyDir": {}}]
    more: dict[str, Any] = {}
    if job.tls_secret:
        more["securityContext"] = {"fsGroup": _GROUP}
        volumes.append({"name": "tls", "secret": {"secretName": job.tls_secret, "defaultMode": _KEY_MODE}})
    pod = {
        "restartPolicy": "Never", "terminationGracePeriodSeconds": GRACE_S,
        "containers": [_container(part, job, command)], "volumes": volumes, **more,
    }  # fmt: skip
    rules: list[dict[str, Any]] = [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "Ignore", "onExitCodes": {"operator": "In", "values": _LEAVING}},
    ]
    if part == "head":
        rules = [{"action": "FailJob", "onExitCodes": {"operator": "In", "values": _USELESS}}, rules[0]]
    spec = {
        "parallelism": 1, "completions": 1, "completionMode": "Indexed", "backoffLimit": 0 if part == "head" else 1000,
        "podFailurePolicy": {"rules": rules}, "template": {"spec": pod},
    }  # fmt: skip
    return {"name": part, "replicas": number, "template": {"spec": spec}}


def _container(part: str, job: KubernetesJob, command: list[str]) -> dict[str, Any]:
    limits = {"cpu": str(job.cpus)} if job.cpus else {}
    limits |= {"nvidia.com/gpu": str(job.gpus)} if job.gpus else {}
    ports = [{"name": "probes", "containerPort": _PROBES}]
    tls = _TLS._replace(name=job.tls_name)._asdict() if job.tls_secret else {}
    mounts: list[dict[str, Any]] = [{"name": "outlast", "mountPath": "/outlast"}]
    if job.tls_secret:
        mounts.append({"name": "tls", "mountPath": "/outlast-tls", "readOnly": True})
    return {
        "name": "outlast", "image": job.image, "command": command,
        "env": [
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
            {"name": "OUTLAST_SECRET", "valueFrom": {"secretKeyRef": {"name": f"{job.name}-secret", "key": "secret"}}},
            *({"name": f"OUTLAST_TLS_{part.upper()}", "value": value} for part, value in tls.items()),
        ],
        "ports": [*ports, {"name": "run", "containerPort": _PORT}] if part == "head" else ports,
        "resources": {"limits": limits, "requests": limits} if limits else {},
        "startupProbe": _probe("/healthz", 60), "livenessProbe": _probe("/healthz", 6),
        "readinessProbe": _probe("/ready", 2),
        "lifecycle": {"preStop": {"exec": {"command": [job.python, "-c", _NOTICE]}}},
        "volumeMounts": mounts,
    }  # fmt: skip


def _probe(path: str, tries: int) -> dict[str, Any]:
    return {
        "httpGet": {"path": path, "port": _PROBES}, "periodSeconds": 5, "timeoutSeconds": 5, "failureThreshold": tries,
    }  # fmt: skip
