"""Runs on a real Ray cluster of several raylets, whose nodes die and are added; with the bits of one host."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.engines.followed import Followed
from tests.journal.etcd_members import start_members
from tests.runtime.conftest import PATIENCE_S, of_run

from outlast.core import events as ev
from outlast.errors import ConfigError

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="no Ray here: make cluster-env"),
]
SOON = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 4}
FEW = {"enable_worker_prestart": False, "prestart_worker_first_driver": False}
STORE_BYTES = 80 * 1024 * 1024


class Nodes:
    """A cluster whose head runs nothing; each node has one processor."""

    def __init__(self) -> None:
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        from ray.cluster_utils import Cluster

        head = {"num_cpus": 0, "include_dashboard": False, "include_log_monitor": False, "_system_config": SOON | FEW}
        self.cluster = Cluster(initialize_head=True, head_node_args=head | {"object_store_memory": STORE_BYTES})
        self.nodes: dict[str, Any] = {}

    def add(self) -> str:
        """The beginning of its name, which is that of its host's."""
        node = self.cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES)
        self.nodes[node.node_id[:12]] = node
        return str(node.node_id[:12])

    def lose(self, name: str) -> None:
        self.cluster.remove_node(self.nodes.pop(name), allow_graceful=False)


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    found = Nodes()
    try:
        yield found
    finally:
        found.cluster.shutdown()


class OnRay(Followed):
    """Two nodes to begin with, three at most, one replica on each."""

    def __init__(
        self, nodes: Nodes, base: Path, steps: int, gates: tuple[int, ...], *words: str, record: str = "sqlite"
    ) -> None:
        self.folder = base / "hosts"
        super().__init__(base, steps, gates, self._logs)
        driver = str(Path(__file__).with_name("on_ray.py"))
        command = [sys.executable, driver, nodes.cluster.address, str(self.folder), str(base / "run.toml"), record]
        clean = {key: value for key, value in os.environ.items() if not key.startswith("OUTLAST_")}
        self.begin(self.folder / "run-0", [*command, *self.script, *words], clean)

    def _logs(self) -> str:
        return "\n".join(f"{path}: {path.read_text()[-1500:]}" for path in self.folder.rglob("*.log"))

    def node_of(self, replica: str) -> str:
        return self.host_of(replica).partition("-")[0]

    def host_on(self, node: str) -> str:
        """The newest host there, if it has one."""
        found = [e.host for e in self.driven.events if isinstance(e, ev.AgentStarted) and e.host.startswith(node)]
        return found[-1] if found else ""


@pytest.mark.campaign
def test_a_node_dies_and_another_is_added(nodes: Nodes, tmp_path: Path) -> None:
    """The third node has a host beyond the placement group. With the bundle's node the run shrinks, and it grows."""
    names = {nodes.add() for _ in range(3)}
    run = OnRay(nodes, tmp_path, 60, (5, 6, 20, 30, 40, 50))
    try:
        run.gate(5, "all nodes trained", run.whole)
        assert {run.node_of(name) for name in run.driven.members} == names
        first = run.driven.events[0]
        dead = next(name for name in names if run.host_on(name).endswith("-1"))
        nodes.lose(dead)
        run.gate(6, "it was dead", lambda: True)
        run.until("the others train on", lambda: run.driven.step >= 18 and len(run.driven.members) == 2)
        assert any(isinstance(e, ev.AgentLost) for e in run.driven.events)
        fresh = nodes.add()
        run.until("the bundle has moved there", lambda: run.host_on(fresh).endswith("-1"))
        run.comes_back(run.host_on(fresh), 20)
        run.assert_unchanged(3)
        assert run.driven.events[0] == first  # one run, from its beginning to its end
    finally:
        run.close()


@pytest.mark.campaign
@pytest.mark.soak
@pytest.mark.timeout(300)  # two runs, on hosts whose processes take a while to be there
def test_the_first_host_s_node_dies(nodes: Nodes, tmp_path: Path) -> None:
    """The record is gone with it: the run begins again where it has saved, with another node for the first bundle."""
    names = {nodes.add() for _ in range(4)}
    words = ("--checkpoint", f'{{"dir": "{tmp_path / "ck"}", "every": 10}}')
    run = OnRay(nodes, tmp_path, 80, (5, 25, 40, 45), *words)
    try:
        run.gate(5, "all nodes trained", run.whole)
        run.gate(25, "it had saved", lambda: any(isinstance(e, ev.CheckpointSaved) for e in run.driven.events))
        run.until("it trains on", lambda: run.driven.step >= 38)
        nodes.lose(next(name for name in names if run.host_on(name).endswith("-0")))
        run.driven.follow(run.folder / "run-1")
        run.gate(40, "another run began", lambda: any(isinstance(e, ev.RunStarted) for e in run.driven.events))
        run.gate(45, "all nodes trained again", run.whole)
        run.assert_unchanged(3)
        begun = next(e for e in run.driven.events if isinstance(e, ev.ProgressMade) and e.losses).losses[0][0]
        assert begun >= 10
    finally:
        run.close()


@pytest.mark.campaign
@pytest.mark.soak
@pytest.mark.timeout(300)
def test_with_the_record_in_etcd_the_first_host_s_node_may_die(nodes: Nodes, tmp_path: Path) -> None:
    """The others go on, and in its bundle there is an agent like any other."""
    names = {nodes.add() for _ in range(4)}
    with start_members(tmp_path / "etcd") as members:
        run = OnRay(nodes, tmp_path, 60, (5, 6, 20, 30, 40, 50), record=members.record)
        try:
            run.gate(5, "all nodes trained", run.whole)
            first, second = (next(n for n in names if run.host_on(n).endswith(end)) for end in ("-0", "-1"))
            nodes.lose(first)
            run.driven.follow(run.folder / f"{run.host_on(second)}-0")
            lost = lambda: [e.agent for e in run.driven.events if isinstance(e, ev.AgentLost)]  # noqa: E731
            run.gate(6, "another host's coordinator gave it up", lambda: lost() == ["a0"])
            there = lambda: [n for n in names - {first} if run.host_on(n).endswith("-0")]  # noqa: E731
            run.until("its bundle has moved", lambda: bool(there()))
            run.comes_back(run.host_on(there()[0]), 20)
            run.assert_unchanged(3)
        finally:
            run.close()


@pytest.mark.campaign
@pytest.mark.soak
def test_a_driver_that_is_interrupted_has_the_run_saved(nodes: Nodes, tmp_path: Path) -> None:
    """The run ends in order, and no process of it is left."""
    for _ in range(2):
        nodes.add()
    words = ("--checkpoint", f'{{"dir": "{tmp_path / "ck"}", "every": 1000}}')
    run = OnRay(nodes, tmp_path, 60, (5, 20), *words)
    try:
        run.gate(5, "both nodes trained", lambda: len(run.driven.members) == 2)
        run.until("they train", lambda: run.driven.step >= 18)
        run.driven.process.send_signal(signal.SIGINT)
        saves = lambda: [e.reason for e in run.driven.events if isinstance(e, ev.CheckpointInterval)]  # noqa: E731
        run.gate(20, "the run was asked", lambda: any("asked to stop" in reason for reason in saves()))
        assert run.driven.process.wait(PATIENCE_S) != 0
        run.driven.poll()
        assert any(isinstance(e, ev.CheckpointSaved) for e in run.driven.events), run.logs()
        assert [e.exit_code for e in run.driven.events if isinstance(e, ev.RunEnded)] == [143]
        assert of_run(run.driven.run_dir) == []
    finally:
        run.close()


def test_without_a_cluster_it_says_so() -> None:
    from outlast.adapters.ray import RayHosts, train

    with pytest.raises(ConfigError, match="not initialised"):
        train(["train.py"])
    for wrong in ({"nodes": (3, 2)}, {"nodes": (0, 2)}, {"slots": 0}):
        with pytest.raises(ConfigError):
            RayHosts(**wrong)
