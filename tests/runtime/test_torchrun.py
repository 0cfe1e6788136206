"""A script that torchrun has started: outlast takes its processes over, on one host and on several."""

from __future__ import annotations

import ast
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.conftest import SCRIPT, undisturbed
from torch.distributed import TCPStore

from outlast.core import events as ev
from outlast.errors import ConfigError
from outlast.journal import Journal
from outlast.prove.host_namespaces import HostNetwork, unavailable
from outlast.runtime.loop import _interpreter, _torchrun
from outlast.runtime.transport.endpoints import handed_on, listen_on, read_host_port

STEPS = 8
TOLD = {
    "RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4",
    "GROUP_WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500",
    "TORCHELASTIC_USE_AGENT_STORE": "False", "PATH": "/bin", "OUTLAST_SECRET": "ab" * 32,
}  # fmt: skip
SEVERAL = {"LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "2"}


def taken_over(monkeypatch: pytest.MonkeyPatch, **environ: str) -> tuple[list[str], dict[str, str]]:
    """(what the process turns into, its environment)."""
    found: list[Any] = []
    monkeypatch.setattr(_torchrun.os, "execve", lambda *words: found.append(words))
    monkeypatch.setattr(_torchrun.socket, "gethostname", lambda: "node")
    monkeypatch.setattr(sys, "argv", ["train.py", "--lr", "1"])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    _torchrun.take_over(TOLD | environ)
    [(_, words, told)] = found
    return words[3:], told


def test_the_first_worker_of_a_host_becomes_the_run_or_an_agent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words, told = taken_over(monkeypatch)
    assert words == ["run", "--replicas", "4", "train.py", "--lr", "1"]
    assert {name for name in told if not name.startswith("PYTHON")} == {"PATH", "OUTLAST_SECRET"}
    assert "takes the place of" in capsys.readouterr().err
    words, _ = taken_over(monkeypatch, **SEVERAL, OUTLAST_SPARES="1")
    assert words == [
        "run", "--endpoint", "10.0.0.1:29500", "--nnodes", "2", "--slots", "2", "--host", "node.0",
        "--replicas", "3", "train.py", "--lr", "1",
    ]  # fmt: skip
    words, _ = taken_over(monkeypatch, OUTLAST_SPARES="auto")
    assert words == ["run", "--replicas", "4", "train.py", "--lr", "1"]
    words, _ = taken_over(monkeypatch, **SEVERAL, OUTLAST_RANKS="2")
    assert words[5:7] == ["--slots", "1"]  # of a replica, with both its ranks
    words, _ = taken_over(monkeypatch, **SEVERAL, RANK="2", GROUP_RANK="1", OUTLAST_ENDPOINT="head:1")
    assert words == ["agent", "--join", "head:1", "--host", "node.1", "--slots", "2"]
    with pytest.raises(SystemExit) as end:
        _torchrun.take_over(TOLD | {"LOCAL_RANK": "1", "RANK": "1"})
    assert end.value.code == 0


@pytest.mark.parametrize("where", [{}, SEVERAL])
@pytest.mark.parametrize(("ranks", "says"), [("two", "OUTLAST_RANKS"), ("4,2", "different numbers of ranks")])
def test_a_number_of_ranks_that_is_none_is_told(where: dict[str, str], ranks: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        _torchrun.take_over(TOLD | where | {"OUTLAST_RANKS": ranks})


_SHOWN = """
import os, sys
from outlast.runtime.loop import _torchrun
_torchrun.os.execve = lambda path, words, told: print({k: v for k, v in told.items() if k.startswith("PYTHON")})
_torchrun.take_over(eval(sys.argv[1]))
"""


def test_the_interpreter_s_options_are_passed_on_by_their_variables() -> None:
    """Or are named, where no variable stands for them."""
    options = ["-u", "-B", "-W", "error::ResourceWarning", "-X", "utf8", "-X", "faulthandler", "-X", "tracemalloc=5"]
    options += ["-d", "-W", "ignore:a, b:UserWarning"]
    command = [sys.executable, *options, "-b", "-q", "-X", "mine=1", "-c", _SHOWN, repr(TOLD)]
    clean = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON") or key == "PYTHONPATH"}
    done = subprocess.run(command, env=clean, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    told = ast.literal_eval(done.stdout)
    assert told == {
        "PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONUTF8": "1", "PYTHONFAULTHANDLER": "1",
        "PYTHONDEBUG": "1",
        "PYTHONTRACEMALLOC": "5", "PYTHONWARNINGS": told["PYTHONWARNINGS"],
    }  # fmt: skip
    warned = told["PYTHONWARNINGS"].split(",")
    assert "error::ResourceWarning" in warned
    assert not any(option.startswith("ignore:a") for option in warned), "the variable has no way to say it"
    assert "without python's -b, -q, -X mine, -W 'ignore:a, b:UserWarning'" in done.stderr


def test_an_interpreter_without_site_is_named() -> None:
    """Torch is not found by one, so what tells is asked alone."""
    shown = f"exec(open({_interpreter.__file__!r}).read()); print(interpreter_options())"
    command = [sys.executable, "-S", "-c", shown]
    clean = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    done = subprocess.run(command, env=clean, capture_output=True, text=True, timeout=60, check=True)
    assert ast.literal_eval(done.stdout) == ({}, ["-S"])


def test_the_port_that_the_other_hosts_are_told_is_never_let_go() -> None:
    """It is the very socket that the run listens at: between the two nobody else can take it."""
    found: list[socket.socket] = []
    master = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    place = _torchrun._Place(
        rank=0, local_rank=0, host=0, num_workers=4, num_local=2, num_hosts=2, restart="0"
    )  # fmt: skip
    endpoint = _torchrun._told(place, "127.0.0.1", master.port, found)
    assert master.get("outlast/endpoint/0").decode() == endpoint
    [sock] = found
    host, port = read_host_port(endpoint)
    with pytest.raises(OSError, match="in use"):
        listen_on(host, port)
    taken = handed_on(str(os.dup(sock.fileno())), host, port)
    assert taken is not None
    sock.close()
    with taken, socket.create_connection((host, port)), taken.accept()[0]:
        assert not taken.get_inheritable()
        assert handed_on(str(taken.fileno()), host, port + 1) is None, "not this one"
        assert taken.fileno() >= 0
    assert handed_on("", host, port) is None
    assert handed_on("nine", host, port) is None


@pytest.mark.parametrize(
    ("environ", "text"),
    [
        (SEVERAL | {"OUTLAST_SECRET": ""}, "no secret of the run"),
        ({"OUTLAST_RANKS": "8"}, "4 workers are no replicas of 8 ranks"),
        (SEVERAL | {"OUTLAST_SECRET": "ab" * 32, "OUTLAST_RANKS": "4"}, "workers on a host are no replicas of 4 ranks"),
        ({"GROUP_RANK": "x"}, "not whole"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_started(environ: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigError, match=text) as refused:
        _torchrun.take_over(TOLD | environ)
    assert refused.value.remedy


@pytest.mark.parametrize(
    "environ", [{"WORLD_SIZE": "1"}, {"OUTLAST_MEMBER": "r0.1"}, {"OUTLAST": "off"}, {"ACCELERATE_X": "1"}]
)
def test_other_processes_are_left_as_they_are(environ: dict[str, str]) -> None:
    _torchrun.take_over(TOLD | environ)
    _torchrun.take_over({})


# --- with torchrun itself -------------------------------------------------------------------------------------------
def _clean() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if not key.startswith("OUTLAST_")}


def _torchrun_command(out: Path, *options: str) -> list[str]:
    script = [str(SCRIPT), "--steps", str(STEPS), "--out", str(out)]
    return [sys.executable, "-m", "torch.distributed.run", "--max-restarts", "0", *options, *script]


def _assert_results(out: Path, names: set[str]) -> None:
    found = {path.stem: json.loads(path.read_text()) for path in out.glob("*.json")}
    assert set(found) == names
    assert all(one == undisturbed(STEPS, 8, "float32") for one in found.values())


def _journal(folder: Path) -> list[ev.AnyEvent]:
    [run_dir] = (folder / "outlast-runs").glob("2*")
    with Journal.open_reader(run_dir) as journal:
        return [entry.event for entry in journal.events()]


@pytest.mark.process
@pytest.mark.campaign
def test_workers_of_one_host_are_as_many_replicas(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    command = _torchrun_command(tmp_path / "out", "--standalone", "--nproc-per-node", "3")
    done = subprocess.run(command, cwd=tmp_path, env=_clean(), capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stderr.count("takes the place of") == 1
    _assert_results(tmp_path / "out", {"r0.1", "r1.1", "r2.1"})


@pytest.mark.process
@pytest.mark.campaign
def test_workers_of_two_hosts_are_one_run(tmp_path: Path) -> None:
    reason = unavailable()
    if reason:
        pytest.skip(reason)
    (tmp_path / "out").mkdir()
    with HostNetwork(2, [tmp_path]) as net:
        started = []
        for host in (0, 1):
            folder = tmp_path / f"node{host}"
            folder.mkdir()
            meet = ["--nnodes", "2", "--nproc-per-node", "2", "--node-rank", str(host)]
            meet += ["--master-addr", net.address(0), "--master-port", "29500"]
            command = ["sh", "-c", 'cd "$0" && exec "$@"', str(folder), *_torchrun_command(tmp_path / "out", *meet)]
            with (folder / "log").open("wb") as log:
                started.append(net.start(host, command, _clean() | {"OUTLAST_SECRET": "cd" * 32}, log))
        ends = [each.wait(100) for each in started]
    logs = "\n".join((tmp_path / f"node{host}" / "log").read_text()[-3000:] for host in (0, 1))
    assert ends == [0, 0], logs
    _assert_results(tmp_path / "out", {"r0.1", "r1.1", "r2.1", "r3.1"})
    hosts = [e.host.rpartition(".")[2] for e in _journal(tmp_path / "node0") if isinstance(e, ev.AgentStarted)]
    assert sorted(hosts) == ["0", "1"]
