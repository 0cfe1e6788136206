"""`train`: a run on the nodes of a Ray cluster. Ray places hosts; who is a member is decided in the run. Extra: `ray`.

A placement group reserves the nodes that the run begins with, one bundle a node. The first host is an actor around
`outlast run`, every other one an actor around `outlast agent`; what an actor has started ends with it. While the
cluster has more nodes than hosts, up to the most that was asked for, each gets one. A node that dies takes its host
along and the others train on; Ray moves the bundle to another node as soon as there is one, and a new host joins from
there. With the first host the run's record is lost: the run begins again, from its checkpoints. Not so where the record
is in an etcd: then the others go on, and an agent takes its place too. What one agent's process says of itself ends its
host, never the run of the others.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from outlast.adapters._ray_host import ASKED, HostActor
from outlast.errors import CheckpointError, ConfigError, EnvironmentFault, MembershipError, Unsaved
from outlast.journal import RunsInEtcd, Unreachable, access_of, read_places

__all__ = ["RayHosts", "train"]

_LOOK_S = 1.0  # between two looks at the cluster's nodes
_WAIT_S = 120.0  # of an agent for the first host, which is being started
_END_S = 60.0  # for all to end by themselves, once the run is over
_UNPLACED_S = 20.0  # until it is told that the cluster has no room
_PENDING_S = 60.0  # until it is not believed that a node has room, whatever was said: other jobs use it
_FAILED_TRIES = 5  # of a host: what is wrong with its machine is wrong the next time too
_PAUSE_S = 2.0  # before the second of them, twice as long before each further one
_LASTED_S = 600.0  # a process that ends after that did not fail because of what is wrong with its machine
_ASK_S = 5.0  # for the record's answer
_CANNOT, _AWAY = ConfigError.exit_code, MembershipError.exit_code
_OVER = frozenset({0, 1, _CANNOT, _AWAY, 5, 6, CheckpointError.exit_code, Unsaved.exit_code, ASKED})
"""Exit codes after which nothing is started again: it is done, or would end alike, or somebody wants it so."""


class RayHosts(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked of Ray. `nodes`: (to begin with, at most); `slots`: replicas that may run on one; `cpus`, `gpus`
    and `resources` of one; `replicas`: None for all slots of the first nodes, less the spares. ConfigError."""

    nodes: tuple[int, int] = (2, 2)
    slots: int = 1
    replicas: int | None = None
    spares: int = 0
    cpus: float = 1.0
    gpus: float = 0.0
    resources: dict[str, float] = {}

    def __post_init__(self) -> None:
        if not 1 <= self.nodes[0] <= self.nodes[1]:
            raise ConfigError(f"nodes = {self.nodes}", remedy="(to begin with, at most), such as (2, 4)")
        if self.slots < 1:
            raise ConfigError(f"slots = {self.slots}", remedy="replicas that may run on a node, 1 or more")

    @property
    def bundle(self) -> dict[str, float]:
        """What one node has to have, as Ray counts."""
        return {"CPU": self.cpus, **({"GPU": self.gpus} if self.gpus else {}), **self.resources}

    def run_words(self) -> list[str]:
        """The shape of the run, in options of `outlast run`."""
        replicas = self.replicas if self.replicas is not None else max(1, self.nodes[0] * self.slots - self.spares)
        return [
            "--nnodes", f"{self.nodes[0]}:{self.nodes[1]}", "--slots", str(self.slots), "--replicas", str(replicas),
            "--spares", str(self.spares),
        ]  # fmt: skip


def train(
    command: Sequence[str],
    hosts: RayHosts | None = None,
    *,
    run_dir: str = "outlast-runs/ray",
    options: Sequence[str] = (),
    record: str = "sqlite",
    say: Callable[[str], None] | None = None,
) -> int:
    """Run `command` (a script and its arguments, or `-m MODULE`) to its end; the run's exit code. `options`: further
    ones of `outlast run`; `run_dir`: on each node, for logs, and on the first host's for the record; `record`: etcd://…
    for one that survives the first host; `say`: takes a line about a host that comes or goes, standard error by
    default. An exception (Ctrl-C) asks the run to save and end, and passes on then. Ray has to be initialised. Raises
    ConfigError, EnvironmentFault."""
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError as error:
        raise EnvironmentFault("Ray is not there", remedy="pip install 'outlast[ray]'") from error
    if not ray.is_initialized():
        raise ConfigError("Ray is not initialised", remedy="ray.init(), or ray.init(address='auto')")
    tell = say or (lambda text: print(f"outlast: {text}", file=sys.stderr, flush=True))
    if record != "sqlite":
        read_places(record)
    told = [*options, "--record", record, *command]
    placed = _Placed(ray, told, hosts or RayHosts(), str(Path(run_dir).resolve()), record, tell)
    try:
        return placed.run()
    except BaseException:
        placed.ask()
        raise
    finally:
        placed.end()


class _Host(msgspec.Struct, eq=False):
    """An actor. `bundle`: of the placement group, None on a node beyond these; `awaits`: what it is to answer next,
    None while it waits for the first host."""

    actor: Any
    awaits: Any
    bundle: int | None
    node: str = ""  # not known before it is placed
    begun: bool = False
    since_s: float = 0.0  # when it was asked for, or has begun

    @property
    def name(self) -> str:
        return f"{self.node[:12]}-{'x' if self.bundle is None else self.bundle}"


class _Placed:
    """The hosts of one call of `train`. Bundle 0 is the first host's."""

    def __init__(
        self, ray: Any, command: list[str], asked: RayHosts, folder: str, record: str, say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._ray, self._command, self._asked, self._folder, self._say = ray, command, asked, folder, say
        self._clock = clock
        self._record = record if record != "sqlite" else ""  # by which agents find whoever coordinates
        self._outlived = False  # the first host is lost, and the run goes on
        self._secret = secrets.token_hex(32)
        self._group: Any = None
        self._hosts: list[_Host] = []
        self._refused: set[str] = set()  # nodes whose host has ended for good
        self._tried: Counter[str] = Counter()  # how often the host of a node has failed
        self._later: dict[str, float] = {}  # nodes that get nothing before this time
        self._endpoint = ""  # of the first host, "" while it is not placed
        self._tries = self._failed = self._number = 0
        self._over: int | None = None

    def run(self) -> int:
        """To the end of the first host's process, if nothing is to follow it; else to that of the run's last."""
        first = self._asked.nodes[0]
        self._group = self._ray.util.placement_group([self._asked.bundle] * first, strategy="STRICT_SPREAD")
        if not self._group.wait(_UNPLACED_S):
            self._say(f"the cluster has no {first} nodes with {self._asked.bundle} each that are free: it waits")
        for bundle in range(first):
            self._place(bundle)
        while self._over is None:
            # The first host is among them, or a process of the run that outlives it.
            asked = [host.awaits for host in self._hosts if host.awaits is not None]
            done, _ = self._ray.wait(asked, timeout=_LOOK_S)
            for host in [host for host in self._hosts if host.awaits in done]:
                self._hear(host)
            if self._over is None:
                self._begin_agents()
                self._give_up_pending()
                self._grow()
        return self._over

    def ask(self) -> None:
        """Ask the run to save and end: the first host, from which the others hear of it, or else all of them."""
        for host in self._hosts:
            if host.begun and (self._outlived or self._is_first(host)):
                host.actor.ask.remote()

    def end(self) -> None:
        """What does not end by itself ends with its actor."""
        last, of_ray = [host.awaits for host in self._hosts if host.begun], self._ray.exceptions.RayError
        try:
            with contextlib.suppress(of_ray):
                if last:
                    self._ray.wait(last, num_returns=len(last), timeout=_END_S)
        finally:
            for host in self._hosts:
                self._kill(host)
            with contextlib.suppress(of_ray):
                if self._group is not None:
                    self._ray.util.remove_placement_group(self._group)

    # --- placing -------------------------------------------------------------------------------------------------
    def _place(self, bundle: int | None, node: str = "") -> None:
        by = self._ray.util.scheduling_strategies
        if bundle is None:
            strategy = by.NodeAffinitySchedulingStrategy(node, soft=False)
        else:
            strategy = by.PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
        asked = self._asked
        kind = self._ray.remote(HostActor).options(
            num_cpus=asked.cpus, num_gpus=asked.gpus, resources=asked.resources or None,
            scheduling_strategy=strategy, max_concurrency=3, max_restarts=0,
        )  # fmt: skip
        actor = kind.remote()
        self._hosts.append(_Host(actor, actor.where.remote(), bundle, node, since_s=self._clock()))

    def _grow(self) -> None:
        """A host for each node that has none, while the run takes more and nothing else waits for a node."""
        taken = {host.node for host in self._hosts} | self._refused
        if not self._endpoint or "" in taken or len(self._hosts) >= self._asked.nodes[1]:
            return
        free = _free(self._ray)
        for node in self._ray.nodes():
            if len(self._hosts) >= self._asked.nodes[1]:
                return
            name = node["NodeID"]
            has = free.get(name, node["Resources"])
            fits = all(has.get(kind, 0.0) >= amount for kind, amount in self._asked.bundle.items())
            if node["Alive"] and fits and name not in taken and self._clock() >= self._later.get(name, 0.0):
                self._place(None, name)

    def _give_up_pending(self) -> None:
        """Nodes beyond the placement group that have no room after all: others may have, and these later."""
        now_s = self._clock()
        for host in [host for host in self._hosts if host.bundle is None and not host.begun]:
            if host.awaits is not None and now_s - host.since_s > _PENDING_S:
                self._hosts.remove(host)
                self._kill(host)
                if host.node not in self._later:
                    self._say(f"{_on(host.node)} there is no room for a host now; it is tried again every two minutes")
                self._later[host.node] = now_s + _PENDING_S

    def _begin_agents(self) -> None:
        """On nodes that have a host's actor, once it is known where the first host listens."""
        for host in self._hosts:
            ready = host.awaits is None and self._clock() >= self._later.get(host.node, 0.0)
            if self._endpoint and ready and not host.begun and not self._is_first(host):
                where = ["--host", host.name, "--run-dir", f"{self._folder}/{host.name}-{self._tries}"]
                shape = ["--slots", str(self._asked.slots), "--wait", str(_WAIT_S)]
                self._begin(host, ["agent", "--join", self._record or self._endpoint, *where, *shape])

    def _is_first(self, host: _Host) -> bool:
        return host.bundle == 0 and not self._outlived

    def _begin(self, host: _Host, words: list[str]) -> None:
        host.begun, host.since_s, self._number = True, self._clock(), self._number + 1
        host.awaits = host.actor.run.remote(words, self._secret, f"{self._folder}/{host.name}.{self._number}.log")

    # --- what happens to them ------------------------------------------------------------------------------------
    def _hear(self, host: _Host) -> None:
        """It is placed; or its process has ended; or it is lost with its node."""
        if host not in self._hosts:  # it went with the run that has just been lost
            return
        try:
            told = self._ray.get(host.awaits)
        except self._ray.exceptions.RayTaskError as error:  # no folder there that can be written, or the like
            self._say(f"{_on(host.node)} nothing can be started: {error.cause}")
            self._ended(host, _CANNOT)
            return
        except self._ray.exceptions.RayError as error:
            self._say(f"{_on(host.node)} the host is lost: {type(error).__name__}")
            self._ended(host, None)
            return
        if host.begun:
            self._ended(host, told)
            return
        host.awaits, (host.node, endpoint) = None, told
        if self._is_first(host):
            self._endpoint = endpoint
            where = ["--host", host.name, "--run-dir", f"{self._folder}/run-{self._tries}"]
            self._begin(host, ["run", "--endpoint", endpoint, *where, *self._asked.run_words(), *self._command])

    def _ended(self, host: _Host, code: int | None) -> None:
        """`code`: None where it is not known how."""
        self._hosts.remove(host)
        self._kill(host)
        if self._is_first(host) and (host.begun or code is not None):
            self._first_ended(host, code)
        elif self._outlived and host.begun and self._run_ended(code):
            return
        elif (code is None or self._once_more(host, code)) and host.bundle is not None:
            self._place(host.bundle)  # also where Ray had placed it on a node that was dead already

    def _once_more(self, host: _Host, code: int) -> bool:
        """Whether its node gets a host again, after a pause. Also where it was turned away: the host that it follows
        may not be given up yet."""
        lasted = self._clock() - host.since_s >= _LASTED_S
        self._tried[host.node] = tries = 1 if lasted else self._tried[host.node] + 1
        if (code in _OVER and code != _AWAY) or tries >= _FAILED_TRIES:
            self._refused.add(host.node)
            if code:
                self._say(f"{_on(host.node)} the host {_ended_by(code)}, and is not started again")
            return False
        pause_s = _PAUSE_S * 2 ** (tries - 1)
        self._later[host.node] = self._clock() + pause_s
        self._say(f"{_on(host.node)} the host {_ended_by(code)}, and is started again in {pause_s:g} s")
        return True

    def _first_ended(self, host: _Host, code: int | None) -> None:
        lasted = code is None or (host.begun and self._clock() - host.since_s >= _LASTED_S)
        self._failed = (0 if lasted else self._failed) + (code is not None)
        if code in _OVER or self._failed >= _FAILED_TRIES:
            self._over = code
            return
        ends = self._ends()
        if ends and ends[0] is not None:
            self._over = ends[0]
        elif ends != [] and any(host.begun for host in self._hosts):
            self._say(f"the first host {_ended_by(code)}, and the others go on by the run's record")
            self._outlived = True
            self._place(0)
        else:
            lost = ", and the run's record with it" if code is None and not self._record else ""
            self._begin_again(f"the first host {_ended_by(code)}{lost}")

    def _run_ended(self, code: int | None) -> bool:
        """Whether the run that outlives its first host is over, or begins again because nobody of it is left."""
        finished = code in (0, Unsaved.exit_code)
        ends = self._ends() if not finished else []
        if finished or (ends and ends[0] is not None):
            self._over = ends[0] if ends else code
        elif any(host.begun for host in self._hosts):
            return False
        else:
            self._failed += code is not None
            if code in _OVER or self._failed >= _FAILED_TRIES:
                self._over = code
            else:
                self._begin_again(f"the run's last host {_ended_by(code)}")
        return True

    def _ends(self) -> list[int | None] | None:
        """By the record that hosts share: nothing where no host has coordinated yet, else the run's exit code, None
        while it is not over. None where it cannot be asked from here: the hosts' environment may let them."""
        if not self._record:
            return []
        try:
            access = access_of(self._record, os.environ)
            with contextlib.closing(RunsInEtcd(access, bytes.fromhex(self._secret))) as runs:
                return runs.ends(_ASK_S)
        except (Unreachable, EnvironmentFault, ConfigError):
            return None

    def _begin_again(self, why: str) -> None:
        self._say(f"{why}: the run begins again, from its checkpoints")
        self._outlived, self._endpoint, self._tries = False, "", self._tries + 1
        self._secret = secrets.token_hex(32)  # what the earlier try has left in the record is not this one's
        left, self._hosts = self._hosts, []
        for gone in (self._refused, self._tried, self._later):
            gone.clear()
        for host in left:
            self._kill(host)
        for bundle in range(self._asked.nodes[0]):
            self._place(bundle)

    def _kill(self, host: _Host) -> None:
        with contextlib.suppress(self._ray.exceptions.RayError):
            self._ray.kill(host.actor)


def _free(ray: Any) -> dict[str, dict[str, float]]:
    """What other jobs leave of each node, by its id, as of a moment ago. Ray's public functions tell it of the cluster
    alone; where a version has no other, or it is not answered (through Ray Client it never is), nothing is known, and
    what a node has in all has to do."""
    told = getattr(getattr(getattr(ray, "_private", None), "state", None), "available_resources_per_node", None)
    try:
        return dict(told()) if told is not None else {}
    except ray.exceptions.RayError:
        return {}


def _on(node: str) -> str:
    return f"node {node[:12] or '(not known yet)'}:"


def _ended_by(code: int | None) -> str:
    if code is None:
        return "is lost"
    return f"was killed by signal {-code}" if code < 0 else f"has ended with code {code}"
