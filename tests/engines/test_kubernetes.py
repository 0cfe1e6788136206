"""What is written for Kubernetes, against the published schemas; and the agent under what those files let happen."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.ports import free_ports

from outlast.cli import main
from outlast.cli._tls_options import tls_given
from outlast.config import TlsFiles, resolve
from outlast.core import events as ev
from outlast.errors import ConfigError, EnvironmentFault
from outlast.runtime.host.probes import Probes, answer

Written = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def written(capsys: pytest.CaptureFixture[str]) -> Written:
    def write(*words: str) -> list[dict[str, Any]]:
        assert main(["launch", "kubernetes", "--image", "registry/it:1", *words, "train.py"]) == 0
        found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["items"]
        return found

    return write


def lost(ours: Any, theirs: Any, at: str = "") -> list[str]:
    """What of ours a model that knows the published words alone has not kept."""
    if isinstance(ours, dict):
        kept = theirs if isinstance(theirs, dict) else {}
        return [each for key in ours for each in lost(ours[key], kept.get(key), f"{at}.{key}")]
    if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        return [each for index, one in enumerate(ours) for each in lost(one, theirs[index], f"{at}[{index}]")]
    return [] if ours == theirs else [f"{at}: {ours!r}, {theirs!r}"]


@pytest.mark.parametrize("tls", [(), ("--tls-secret", "certs", "--tls-name", "runs.test")], ids=["plain", "tls"])
@pytest.mark.parametrize("nodes", ["1", "2", "2:8"])
@pytest.mark.parametrize("kind", ["jobset", "trainjob"])
def test_every_word_is_one_that_the_published_schemas_know(
    kind: str, nodes: str, tls: tuple[str, ...], written: Written
) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="no schemas of Kubernetes: make cluster-env")
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="no schemas of JobSet: make cluster-env")
    words = ["--nodes", nodes, "--gpus", "8", "--cpus", "32", "--kind", kind, "--name", "mine", *tls]
    items = written(*words)
    known = {
        "JobSet": models.JobsetV1alpha2JobSet, "TrainJob": models.TrainerV1alpha1TrainJob,
        "TrainingRuntime": models.TrainerV1alpha1TrainingRuntime,
    }  # fmt: skip
    kinds = [item["kind"] for item in items]
    assert kinds[-1] == ("JobSet" if kind == "jobset" else "TrainJob")
    jobs = []
    for item in items:
        if item["kind"] not in known:
            validate.validate(item, "1.34", strict=True)
            continue
        assert lost(item, known[item["kind"]].from_dict(item).to_dict()) == []
        spec = item["spec"]["template"]["spec"] if item["kind"] == "TrainingRuntime" else item["spec"]
        jobs += spec.get("replicatedJobs", [])
    assert [job["name"] for job in jobs] == (["head"] if nodes == "1" else ["head", "agents"])
    for job in jobs:
        whole = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "j"}, "spec": job["template"]["spec"]}
        validate.validate(whole, "1.34", strict=True)
        pod = job["template"]["spec"]["template"]["spec"]
        assert [each["name"] for each in pod["volumes"]] == (["outlast", "tls"] if tls else ["outlast"])
        spoilt = json.loads(json.dumps(whole).replace("livenessProbe", "livelinessProbe"))
        with pytest.raises(validate.ValidationError):
            validate.validate(spoilt, "1.34", strict=True)


def test_every_pod_has_the_certificates_and_is_told_where(written: Written) -> None:
    *_, jobset = written("--nodes", "3", "--tls-secret", "certs", "--tls-name", "runs.test")
    for job in jobset["spec"]["replicatedJobs"]:
        pod = job["template"]["spec"]["template"]["spec"]
        [container] = pod["containers"]
        [volume] = [each for each in pod["volumes"] if each["name"] == "tls"]
        assert volume["secret"] == {"secretName": "certs", "defaultMode": 0o400}
        assert pod["securityContext"]["fsGroup"]
        [mount] = [each for each in container["volumeMounts"] if each["name"] == "tls"]
        said = {each["name"]: each["value"] for each in container["env"] if "value" in each}
        assert tls_given("", "", "", "") is None
        with pytest.MonkeyPatch.context() as patch:
            for name, value in said.items():
                patch.setenv(name, value)
            at = Path(mount["mountPath"])
            files = TlsFiles(str(at / "tls.crt"), str(at / "tls.key"), str(at / "ca.crt"), "runs.test")
            assert tls_given("", "", "", "") == files  # outlast agent, and operators' commands
            assert resolve(cli={"endpoint": "10.0.0.1:1"}, environ=os.environ).config.tls == files  # outlast run


def test_what_is_tried_again_and_what_may_be_evicted(written: Written) -> None:
    """No exit of an agent's ends the set; what no second try would mend does, where it is the run's own."""
    *_, head_budget, agents_budget, jobset = written("--nodes", "2:5", "--name", "mine")
    assert (head_budget["spec"]["minAvailable"], agents_budget["spec"]["minAvailable"]) == (1, 3)
    head, agents = jobset["spec"]["replicatedJobs"]
    labels = agents_budget["spec"]["selector"]["matchLabels"]
    assert labels["jobset.sigs.k8s.io/replicatedjob-name"] == agents["name"]
    rules = [rule for job in (agents,) for rule in job["template"]["spec"]["podFailurePolicy"]["rules"]]
    assert {rule["action"] for rule in rules} == {"Ignore"}
    [fatal] = [r for r in head["template"]["spec"]["podFailurePolicy"]["rules"] if r["action"] == "FailJob"]
    assert fatal["onExitCodes"]["values"] == [ConfigError.exit_code, 4, 5]
    [rule] = jobset["spec"]["failurePolicy"]["rules"]
    assert (rule["action"], rule["targetReplicatedJobs"]) == ("FailJobSet", ["head"])


# --- probes ---------------------------------------------------------------------------------------------------------
def asked(port: int, path: str = "/ready", host: str = "127.0.0.1") -> tuple[int, str]:
    """As a kubelet asks."""
    connection = http.client.HTTPConnection(host, port, timeout=10)
    try:
        connection.request("GET", path)
        reply = connection.getresponse()
        return reply.status, reply.read().decode().strip()
    finally:
        connection.close()


def test_a_loop_that_does_not_turn_is_not_well() -> None:
    assert answer("/healthz", 0.1, "not yet") == (200, "ok")
    assert answer("/ready", 0.1, "not yet") == (503, "not yet")
    assert answer("/ready", 0.1, "") == (200, "ready")
    assert answer("/ready", 60.0, "")[0] == answer("/healthz", 60.0, "")[0] == 503
    assert answer("/secret", 0.1, "")[0] == 404


def test_strangers_at_the_probes_keep_nobody_from_an_answer() -> None:
    """More of them than there is room for, who say nothing, or nonsense without an end."""
    probes = Probes("127.0.0.1:0")
    probes.turned()
    silent = [socket.create_connection(("127.0.0.1", probes.port)) for _ in range(40)]
    for data in (os.urandom(5000), b"POST /ready HTTP/1.1\r\n\r\n", b"\r\n\r\n", b"GET\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", probes.port), timeout=20) as stranger:
            stranger.sendall(data)
            with contextlib.suppress(ConnectionError):
                assert stranger.recv(100) == b""
    assert asked(probes.port) == (200, "ready")
    for sock in silent:
        sock.close()
    with pytest.raises(EnvironmentFault, match="cannot be answered"):
        Probes(f"127.0.0.1:{probes.port}")
    with pytest.raises(ConfigError):
        Probes("nowhere")


# --- the agent ------------------------------------------------------------------------------------------------------
@pytest.mark.process
@pytest.mark.parametrize("hang_up", [signal.SIG_DFL, signal.SIG_IGN])
def test_an_agent_that_waits_for_the_run_goes_when_it_is_asked(hang_up: signal.Handlers) -> None:
    """As a container's first process it has no other way: the kernel keeps from it what it does not ask for. Under
    nohup, which has them ignored, a terminal that is closed asks nothing."""
    with socket.socket() as held, contextlib.ExitStack() as stack:
        held.bind(("127.0.0.1", 0))  # and nobody listens
        words = ["agent", "--join", f"127.0.0.1:{held.getsockname()[1]}", "--host", "pod"]
        environ = {"PATH": os.environ["PATH"], "OUTLAST_SECRET": secrets.token_hex(32)}
        command = [sys.executable, "-m", "outlast", *words]
        inherited = signal.signal(signal.SIGHUP, hang_up)
        agent = stack.enter_context(subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True))
        signal.signal(signal.SIGHUP, inherited)
        stack.callback(agent.kill)
        assert agent.stderr is not None
        assert "waiting for the coordinator" in agent.stderr.readline()
        ignored = int(re.search(r"SigIgn:\s*(\w+)", Path(f"/proc/{agent.pid}/status").read_text())[1], 16)  # type: ignore[index]
        assert bool(ignored >> (signal.SIGHUP - 1) & 1) == (hang_up is signal.SIG_IGN)
        agent.send_signal(signal.SIGTERM if hang_up is signal.SIG_IGN else signal.SIGHUP)
        assert agent.wait(60) == 143
        assert agent.stderr.read() == ""


@pytest.mark.process
@pytest.mark.campaign
def test_an_agent_is_ended_restarted_in_place_and_comes_back_at_another_address(
    tmp_path: Path, fleet: Callable[..., Any]
) -> None:
    """Its probes tell how it is. Asked to go it goes (143), twice or not; killed and started again under its name at
    another address it is a host of the run as before."""
    secret, (port, *probes) = secrets.token_hex(32), free_ports(3)
    clean = {key: value for key, value in os.environ.items() if not key.startswith("OUTLAST_")}
    started: list[subprocess.Popen[bytes]] = []

    def agent(address: str) -> subprocess.Popen[bytes]:
        words = ["agent", "--join", f"127.0.0.1:{port}", "--host", "pod", "--address", address]
        words += ["--probes", f"127.0.0.1:{probes[1]}", "--run-dir", str(tmp_path / "pod")]
        with (tmp_path / "agent.log").open("ab") as log:
            command = [sys.executable, "-m", "outlast", *words]
            started.append(subprocess.Popen(command, env=clean | {"OUTLAST_SECRET": secret}, stdout=log, stderr=log))
        return started[-1]

    def answers(which: int, path: str, wanted: int) -> Callable[[], bool]:
        def test() -> bool:
            try:
                return asked(probes[which], path)[0] == wanted
            except OSError:
                return False

        return test

    first = agent("127.0.0.2")
    end = time.monotonic() + 60
    while not answers(1, "/ready", 503)():  # it lives and waits: there is no run yet
        assert time.monotonic() < end
    assert asked(probes[1], "/healthz")[0] == 200
    run = fleet(
        environ={"OUTLAST_SECRET": secret}, endpoint=f"127.0.0.1:{port}", nnodes="2", slots=1, replicas=2, steps=70,
        gates=(5, 6, 7, 20, 30, 40, 50), words=["--probes", f"127.0.0.1:{probes[0]}"],
    )  # fmt: skip
    try:
        run.until("both hosts are ready", lambda: answers(0, "/ready", 200)() and answers(1, "/ready", 200)())
        run.gate(5, "both train", lambda: len(run.driven.members) == 2)
        gone = run.pid("r1.1")
        first.kill()  # in place: the container alone, the pod and its name stay
        assert first.wait(30) == -signal.SIGKILL
        run.gate(6, "it was gone", lambda: run.exited("r1.1"))
        second = agent("127.0.0.3")
        run.gate(7, "it is ready again", answers(1, "/ready", 200))
        run.gate(20, "its replica was started", lambda: run.started("r1.2") and run.pid("r1.2") != gone)
        run.gate(30, "it was served", lambda: run.served("r1.2"))
        run.gate(40, "it had caught up", lambda: run.caught_up("r1.2"))
        run.until("it was a member", lambda: set(run.driven.members) == {"r0.1", "r1.2"})
        for _ in range(3):  # a preStop hook's, and then the kubelet's own
            second.send_signal(signal.SIGTERM)
        run.gate(50, "it trains no more", lambda: run.driven.members == ["r0.1"])
        assert second.wait(60) == 143
        run.assert_unchanged()
    finally:
        for process in started:
            process.kill()
            process.wait()
    addresses = [e.address for e in run.driven.events if isinstance(e, ev.AgentStarted) and e.host == "pod"]
    assert addresses == ["127.0.0.2", "127.0.0.3"]
