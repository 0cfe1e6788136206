"""What a process of the simulated world is given in place of the world: time, paths, peers, and who watches.

Invariant: nothing here imports a process, so hosts, replicas and the oracle know each other by these interfaces only;
`_world.py` alone composes them. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Literal, NamedTuple, Protocol

from outlast.core.protocol import Coordinator, Header, Member, Node, RollEntry, Settings, View, ViewId
from outlast.core.protocol import messages as m
from outlast.core.protocol.saves.commit import PartReport, SaveId
from outlast.core.protocol.step.loop_copies import LoopCopies
from outlast.prove.adversary import _algebra as algebra
from outlast.prove.adversary._kernel import EventHeap, SimulatedProcess
from outlast.prove.adversary._network import Network
from outlast.prove.adversary._scenario import Scenario
from outlast.prove.adversary._variants import Variant

__all__ = [
    "Durable", "Fellow", "Observer", "Owner", "PublishedSave", "SimulatedStore", "Speaker", "Supervisor",
    "Surroundings", "ViewMesh",
]  # fmt: skip


class Durable:
    """The run's record: every write is conditional on the epoch that the writer claimed."""

    def __init__(self, fenced: bool) -> None:
        self.epoch, self.record, self.fenced = 0, None, fenced

    record: m.FleetRecord | None

    def claim(self) -> int:
        self.epoch += 1
        return self.epoch

    def write(self, epoch: int, record: m.FleetRecord) -> bool:
        if self.fenced and epoch != self.epoch:
            return False
        self.record = record
        return True


class PublishedSave(NamedTuple):
    """What was published of one save: parts, each with the state that its writer had."""

    save: SaveId
    parts: tuple[PartReport, ...]

    @property
    def step(self) -> int:
        return self.save.step

    @property
    def state(self) -> int:
        """The state, where all parts are of one."""
        return int(self.parts[0].digest)


class SimulatedStore:
    """Generations by number, and the newest one that may be read. What is older than it is refused."""

    def __init__(self) -> None:
        self.generations: list[PublishedSave] = []
        self.unread = 0  # so many steps are saved, and somebody could not read that

    def publish(self, save: SaveId, reports: tuple[PartReport, ...]) -> int | None:
        """The save's number, the same for the same save; None if a newer one is there."""
        for number, made in enumerate(self.generations):
            if made.save == save:
                return number
        if self.generations and (save.view, save.step) <= (self.generations[-1].save.view, self.generations[-1].step):
            return None
        self.generations.append(PublishedSave(save, reports))
        return len(self.generations) - 1


class Fellow(SimulatedProcess):
    """What others see of a replica: where it is, and where to send it something."""

    member: Member
    agent: Supervisor
    state: int
    out: list[int]
    sums: dict[Node, algebra.Gradient]  # others of its host read them, and what it shows of a reduced gradient
    shown: list[int]
    norm: int
    exit: Literal["signal", "finished", "exception"]
    busy: bool
    hung: bool
    progress_at: float
    lease_until_s: float

    @property
    def in_mesh(self) -> bool:
        """Whether it has connections to the members of a view."""
        raise NotImplementedError

    def from_peer(self, view: ViewId, source: str, key: Any, payload: Any) -> None:
        raise NotImplementedError

    def peer_lost(self, view: ViewId, peer: str) -> None:
        raise NotImplementedError

    def from_donor(self, serial: int, donor: str, kind: str, payload: Any) -> None:
        raise NotImplementedError


class ViewMesh(Protocol):
    """A replica's connections to the peers of one view."""

    view: View
    peers: list[str]
    expected: dict[Any, list[str]]

    def broadcast(self, key: Any, payload: Any) -> None: ...
    def send(self, to: str, key: Any, payload: Any) -> None: ...
    def whole(self, key: Any) -> bool: ...
    def heard(self, key: Any) -> AbstractSet[str]: ...
    def take(self, key: Any) -> dict[str, Any]: ...


class Owner(Fellow):
    """A replica as its own parts see it: the auditor, the joiner, the script after the loop."""

    world: Surroundings
    mesh: ViewMesh | None
    copies: LoopCopies

    def say(self, *messages: Any) -> None:
        raise NotImplementedError

    def run(self) -> None:
        """The training thread looks again at what it waits for."""
        raise NotImplementedError

    def awaiting(self, *keys: Any) -> None:
        """The training thread waits for what peers send under these keys."""
        raise NotImplementedError

    def in_view(self) -> ViewMesh:
        """The mesh that is waited on. Raises ViewAbandoned if there is nothing to wait for."""
        raise NotImplementedError

    def state_told(self) -> tuple[int, int]:
        """My state's part of a header."""
        raise NotImplementedError

    def stable(self, view: View) -> None:
        """All members of the view have committed my steps."""
        raise NotImplementedError

    def save_vote(self, step: int) -> int:
        """My header's word on a save after the step."""
        raise NotImplementedError

    def occupy(self, seconds: float, then: Callable[..., None], *args: Any) -> None:
        raise NotImplementedError

    def occupy_beside(self, step: int, leaf: int) -> None:
        raise NotImplementedError

    def apply(self, outcome: algebra.Outcome) -> None:
        raise NotImplementedError

    def formed(self, view: View) -> None:
        raise NotImplementedError

    def close_view(self) -> None:
        raise NotImplementedError

    def leave_run(self) -> bool:
        raise NotImplementedError


class Speaker(Protocol):
    """A coordinator's process, as seen from outside."""

    name: str
    epoch: int
    machine: Coordinator

    def handle(self, event: m.Event) -> None: ...


class Supervisor(SimulatedProcess):
    """An agent, as a replica's start and end concern it."""

    def child_ended(self, name: str) -> None:
        raise NotImplementedError


class Observer(Protocol):
    """Who is told of everything that an invariant speaks of, and changes nothing."""

    def violated(self, invariant: str, what: str) -> None: ...
    def durable(self, coordinator: Speaker, record: m.FleetRecord) -> None: ...
    def told(self, replica: Fellow, message: object) -> None: ...
    def entered(self, replica: Fellow, view: View) -> None: ...
    def called(self, replica: Fellow, view: View, entries: Sequence[RollEntry]) -> None: ...
    def demoted(self, name: str) -> None: ...
    def let_go(self, name: str) -> None: ...
    def scattered(self, replica: Fellow, view: View) -> None: ...
    def diverged(self, replica: Fellow) -> None: ...
    def decided(self, replica: Fellow, view: View, step: int, headers: Sequence[Header]) -> None: ...
    def applied(self, replica: Fellow, how: str, step: int | None = None) -> None: ...
    def wrote(self, replica: Fellow) -> None: ...
    def killed(self, name: str) -> None: ...
    def evicted(self, name: str) -> None: ...
    def published(self, generation: PublishedSave) -> None: ...
    def resumed(self, replica: Fellow, step: int) -> None: ...
    def unreadable(self, replica: Fellow) -> None: ...
    def at_boundary(self, replica: Fellow, view: View, step: int, *, saves: bool) -> None: ...
    def last_save(self, view: View, step: int) -> None: ...
    def no_last_save(self, view: ViewId, step: int) -> None: ...
    def stops_with(self, save: SaveId) -> None: ...
    def begins(self, replica: Fellow, view: View, step: int) -> None: ...


class Surroundings(Protocol):
    """The world, as far as a process in it may use it."""

    kernel: EventHeap
    network: Network
    scenario: Scenario
    settings: Settings
    durable: Durable
    store: SimulatedStore
    variant: Variant
    trace: Any
    spoilt_states: set[int]  # that somebody's memory made, and what became of them

    @property
    def oracle(self) -> Observer: ...
    @property
    def replicas(self) -> Mapping[str, Fellow]: ...
    def note(self, text: str) -> None: ...
    def point(self, name: str, process: SimulatedProcess) -> None:
        """`process` passes a point at which a fault may have been put. Raises Ended if that was its end."""

    def serial(self) -> int: ...
    def listening(self, client: Any) -> SimulatedProcess | None: ...
    def start_replica(self, name: str, agent: Supervisor) -> None: ...
    def crash_replica(self, name: str) -> None: ...
    def replica_ended(self, replica: Any) -> None: ...
    def mesh_ends(self, name: str, view: ViewId, peers: list[str]) -> None: ...
    def reaches(self, name: str, peer: str) -> bool: ...
    def ended(self, coordinator: Any, finish: m.Finish) -> None: ...
