"""What is found of a run's listening sockets: all of them, of any kind, and none of the script's or torch's."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from outlast.prove._listeners import Listening, listeners

NOBODY = 2**22 + 1  # the kernel gives no process this number

TREE = '''
import json, os, socket, subprocess, sys

LOOPBACK = {"tcp": (socket.AF_INET, ("127.0.0.1", 0)), "tcp6": (socket.AF_INET6, ("::1", 0)),
            "any": (socket.AF_INET6, ("::", 0))}


def opened(what, where):
    if what == "store":
        from outlast.runtime.exchange.c10d_plane import open_store
        store, address = open_store()
        return store, ["tcp", *address.split(":")]
    if what == "door":
        from outlast.runtime.transport.endpoints import listen_on
        sock = listen_on("127.0.0.1")
    elif what in LOOPBACK:
        family, address = LOOPBACK[what]
        sock = socket.socket(family)
        sock.bind(address)
        sock.listen(5)
    else:
        sock = socket.socket(socket.AF_UNIX)
        sock.bind(where)
        sock.listen(5)
    return sock, sock.getsockname()


def begin(name, spec):
    """A process of this tree: (its listeners, its children), until its input ends. Says where it listens."""
    kept = [opened(what, where) for what, where in spec["opens"]]
    quiet = socket.socket()
    quiet.bind(("127.0.0.1", 0))  # it does not listen
    children = []
    for log, child in spec.get("children", {}).items():
        out = open(os.path.join(sys.argv[1], "logs", log + ".log"), "w") if log != "page" else subprocess.DEVNULL
        said, says = os.pipe()
        children.append(subprocess.Popen([sys.executable, sys.argv[0], sys.argv[1], log, json.dumps(child), str(says)],
                                         stdin=subprocess.PIPE, stdout=out, pass_fds=[says]))
        os.close(says)
        with open(said) as stream:
            for line in stream:
                if line == "ready\\n":
                    break
    if spec.get("copy") and os.fork() == 0:  # as whoever starts a process has a copy of itself until the exec
        sys.stdin.read()
        os._exit(0)
    with open(int(sys.argv[4]), "w") as stream:
        stream.write("ready\\n")
    sys.stdin.read()
    for child in children:
        child.stdin.close()
        child.wait()


begin(sys.argv[2], json.loads(sys.argv[3]))
'''


def token_of(tmp_path: Path) -> str:
    """Abstract names are the machine's."""
    return f"{os.getpid()}-{tmp_path.name}"


def tree(tmp_path: Path, token: str) -> dict[str, Any]:
    """A fleet's processes by their logs: what each listens on, and who is below it."""
    rank = {"opens": [
        ["abstract", f"\0outlast/{token}/r0.1/x"], ["abstract", f"\0outlast/ranks/{token}"], ["door", ""],
        ["tcp", ""], ["abstract", f"\0{token}/of the script"], ["unix", str(tmp_path / "script")], ["store", ""],
    ], "children": {"worker": {"opens": [["tcp", ""]]}}}  # fmt: skip
    agent = {"opens": [["unix", str(tmp_path / "agent")]], "children": {"r0.1": rank}}
    return {
        "opens": [["any", ""]],
        "copy": True,
        "children": {
            "coordinator": {"opens": [["tcp", ""], ["tcp6", ""]]},
            "agent-a0.1": agent,
            "page": {"opens": [["tcp", ""], ["abstract", f"\0{token}/page"]]},
        },
    }


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[int]:
    (tmp_path / "logs").mkdir()
    (tmp_path / "tree.py").write_text(TREE)
    said, says = os.pipe()
    command = [sys.executable, str(tmp_path / "tree.py"), str(tmp_path), "launcher"]
    with subprocess.Popen(
        [*command, json.dumps(tree(tmp_path, token_of(tmp_path))), str(says)], stdin=subprocess.PIPE, pass_fds=[says]
    ) as process:
        os.close(says)
        with open(said) as stream:
            assert stream.readline() == "ready\n"
        yield process.pid


def test_each_listener_of_a_fleet_is_found_and_none_of_the_script_s_or_torch_s(launcher: int, tmp_path: Path) -> None:
    token, found = token_of(tmp_path), listeners(launcher, tmp_path)
    assert sorted((door.kind, door.name) for door in found) == [
        ("abstract unix of a process beside the launcher", "beside"),
        ("abstract unix of a replica", "r0.1"),
        ("abstract unix of a replica", "r0.1"),
        ("tcp of a process beside the launcher", "beside"),
        ("tcp of a replica", "r0.1"),
        ("tcp of the coordinator", "the coordinator"),
        ("tcp6 of the coordinator", "the coordinator"),
        ("tcp6 of the launcher", "launcher"),
        ("unix of an agent", "a0.1"),
    ]
    unix = {door.address for door in found if door.family == socket.AF_UNIX}
    assert unix == {
        f"\0outlast/{token}/r0.1/x", f"\0outlast/ranks/{token}", f"\0{token}/page", str(tmp_path / "agent"),
    }  # fmt: skip
    for door in found:
        assert_reached(door)


def assert_reached(door: Listening) -> None:
    with socket.socket(door.family) as sock:
        sock.connect(door.address)


def test_who_lost_its_parent_is_found_by_the_run_s_directory(launcher: int, tmp_path: Path) -> None:
    """An agent whose launcher was killed goes on for a while."""
    kinds = {door.kind for door in listeners(NOBODY, tmp_path)}
    assert kinds >= {"tcp of the coordinator", "unix of an agent", "abstract unix of a replica", "tcp of a replica"}
