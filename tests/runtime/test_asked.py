"""A run is asked for more and fewer replicas, to empty a host, and for another process, while it trains: same bits."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.conftest import PATIENCE_S

from outlast.cli import main
from outlast.core import events as ev
from outlast.observe import status
from outlast.prove.host_namespaces import HostNetwork, unavailable

pytestmark = [pytest.mark.process, pytest.mark.campaign, pytest.mark.timeout(300)]
GATES = range(3, 150, 3)


def members(run: Any, *names: str) -> None:
    """Training goes on a few steps at a time until these train: what is asked for takes effect between two steps."""
    run.step_on(f"{names} train", lambda: set(run.driven.members) == set(names))


def asked(run: Any) -> list[tuple[str, str, bool]]:
    return [(e.what, e.about, e.accepted) for e in run.driven.events if isinstance(e, ev.Asked)]


def test_numbers_hosts_and_processes_change_on_one_machine(fleet: Callable[..., Any], capsys: Any) -> None:
    run = fleet(replicas=2, steps=160, agents=2, gates=GATES)
    at = str(run.driven.run_dir)
    members(run, "r0.1", "r1.1")
    capsys.readouterr()
    assert main(["scale", at, "--replicas", "4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "accepted": True, "text": "4 replicas from now on (2 before)", "leaving": []
    }  # fmt: skip
    members(run, "r0.1", "r1.1", "r2.1", "r3.1")
    assert main(["drain", "a1", at]) == 0  # where r1 and r3 are
    members(run, "r0.1", "r1.2", "r2.1", "r3.2")
    assert {e.agent for e in run.driven.events if isinstance(e, ev.ReplicaStarted) and e.replica[3:] == "2"} == {"a0"}
    assert main(["drain", "a0", at]) == 2
    assert "only host" in capsys.readouterr().err
    assert main(["evict", "r2", at, "--now"]) == 0
    members(run, "r0.1", "r1.2", "r2.2", "r3.2")
    assert main(["scale", at, "--replicas", "1"]) == 0
    members(run, "r0.1")
    shown = status(run.driven.events)
    drained = {agent.name: agent.detail for agent in shown.agents}
    assert (shown.num_replicas, drained) == (1, {"a0": "", "a1": "drained: it gets no replica"})
    run.open_gates()
    run.assert_unchanged(survivors={"r0.1"}, recoveries=1)  # of the one that was killed
    assert asked(run) == [
        ("scale", "4", True), ("drain", "a1", True), ("drain", "a0", False), ("evict", "r2", True), ("scale", "1", True)
    ]  # fmt: skip
    newest = [e for e in run.driven.events if isinstance(e, ev.ProgressMade)][-1]
    assert newest.seconds.get("degraded", 0.0) == 0.0, "one replica of the one that it is to have"
    assert main(["scale", at, "--replicas", "2"]) == 2
    assert "the run is over" in capsys.readouterr().err


def test_a_host_is_emptied_from_another_one_and_a_new_coordinator_keeps_it_so(
    fleet: Callable[..., Any], tmp_path: Path
) -> None:
    reason = unavailable()
    if reason:
        pytest.skip(reason)
    with HostNetwork(2, [tmp_path]) as net:
        secret, endpoint = secrets.token_hex(32), f"{net.address(0)}:29400"
        clean = {key: value for key, value in os.environ.items() if not key.startswith("OUTLAST_")}
        told = clean | {"OUTLAST_SECRET": secret}
        run = fleet(
            prefix=net.entering(0), environ={"OUTLAST_SECRET": secret}, endpoint=endpoint, nnodes="2", slots=2,
            replicas=2, steps=160, gates=GATES,
        )  # fmt: skip
        words = ["agent", "--join", endpoint, "--host", "h1", "--slots", "2", "--run-dir", str(tmp_path / "h1")]
        with (tmp_path / "agent.log").open("wb") as log:
            agent = net.start(1, [sys.executable, "-m", "outlast", *words], told, log)

        def ask(*words: str, **environ: str) -> tuple[int, str]:
            command = [*net.entering(1), sys.executable, "-m", "outlast", *words, "--join", endpoint]
            done = subprocess.run(command, env=told | environ, capture_output=True, text=True, timeout=80)
            return done.returncode, done.stdout + done.stderr

        members(run, "r0.1", "r1.1")
        code, text = ask("drain", "h1", OUTLAST_SECRET="ab" * 32)
        assert (code, "it does not know this secret" in text) == (4, True), text
        code, text = ask("drain", "h1")
        assert (code, "r1.1 will leave it between two steps" in text) == (0, True), text
        run.until("it is in the journal", lambda: asked(run) == [("drain", "h1", True)])
        coordinator = [e for e in run.driven.events if isinstance(e, ev.CoordinatorStarted)][-1]
        run.strike(coordinator.pid)
        run.until("another took over", lambda: len(started(run)) == 2)
        members(run, "r0.1", "r1.2")
        assert ask("drain", "h1", "--undo")[0] == 0
        assert ask("scale", "--replicas", "3")[0] == 0
        members(run, "r0.1", "r1.2", "r2.1")
        [where] = [e.agent for e in run.driven.events if isinstance(e, ev.ReplicaStarted) and e.replica == "r2.1"]
        assert where.startswith("h1:")
        run.open_gates()
        run.assert_unchanged()
        assert agent.wait(PATIENCE_S) == 0


POLICY = """
from outlast.core.policy import SparesPolicy
own = SparesPolicy.decide
def decide(self, belief, state):
    found = own(self, belief, state)
    return type(found)(spares=7.0 if belief.alpha[0] >= 2.0 else 0.0)
SparesPolicy.decide = decide
"""


@pytest.mark.soak  # on a machine that is overloaded its steps may run out before the spare has come
def test_spares_are_held_as_the_policy_says_and_take_over(fleet: Callable[..., Any], tmp_path: Path) -> None:
    """A policy in place of outlast's own, which no run of seconds would move: seven from the second death on."""
    (tmp_path / "sitecustomize.py").write_text(POLICY)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    run = fleet(replicas=2, steps=160, spares="auto", gates=GATES, slots=3, environ={"PYTHONPATH": path})
    members(run, "r0.1", "r1.1")
    run.strike(run.pid("r1.1"))
    members(run, "r0.1", "r1.2")
    run.strike(run.pid("r1.2"))
    run.step_on("the spare has caught up", lambda: run.caught_up("r2.1"))
    run.strike(run.pid("r0.1"))
    run.step_on("it takes over", lambda: "r2.1" in run.driven.members)
    run.open_gates()
    run.assert_unchanged()
    [held] = [e for e in run.driven.events if isinstance(e, ev.SparesHeld)]
    assert (held.number, held.worth) == (1, 7), "one slot is left"
    assert held.reason.startswith("2 deaths so far")


def started(run: Any) -> list[ev.CoordinatorStarted]:
    return [e for e in run.driven.events if isinstance(e, ev.CoordinatorStarted)]
