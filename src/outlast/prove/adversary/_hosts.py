"""What stands beside the replicas: coordinators, agents, and the launcher that starts them again.

A coordinator process runs the real `Coordinator` and carries out its actions one by one, so it can end or stop between
a durable write and the words that follow it. The launcher does not fail: it is the user's own shell.
"""

from __future__ import annotations

from collections import deque
from random import Random
from typing import Any

from outlast.core.phases import Phase
from outlast.core.protocol import host_messages as hm
from outlast.core.protocol import messages as m
from outlast.prove.adversary._kernel import SimulatedProcess
from outlast.prove.adversary._network import Dialled
from outlast.prove.adversary._saves import SaveWord, SimulatedKeeper
from outlast.prove.adversary._silence import BEAT_S, SilenceWatch
from outlast.prove.adversary._surroundings import Supervisor, Surroundings

__all__ = ["SimulatedAgent", "CoordinatorProcess", "Dialler"]


class CoordinatorProcess(SimulatedProcess):
    """One incarnation of the coordinator."""

    storing = False  # a record is on its way to where several hosts keep it, and nothing else is done meanwhile
    asleep = False  # with its machine, which stands still

    def __init__(self, world: Surroundings, serial: int, turn: tuple[int, m.FleetRecord | None] | None = None) -> None:
        super().__init__(world.kernel, f"c{serial}")
        self.world = world
        self.given_up = False  # the launcher has put another in its place
        self.epoch, record = turn or (world.durable.claim(), world.durable.record)
        self.machine = world.variant.coordinator(world.settings, self.epoch, record)
        self.links: dict[str, Dialled] = {}
        self.keeper = SimulatedKeeper(world, self, self, self._say) if world.scenario.save_every else None
        self._events: deque[m.Event] = deque()
        self._actions: deque[m.Action] = deque()
        self._timers: dict[str, int] = {}
        self.silence = SilenceWatch(world, self, record) if world.scenario.silence_s else None
        if self.silence is not None:
            self._look()
        if world.scenario.speeds_s:
            self.kernel.after(world.scenario.speeds_s, self, self._measure)

    def receive(self, link: Dialled, event: Any) -> None:
        """Words over a connection; a Hello makes it the one to answer on."""
        if link.broken and not link.late:
            return
        if self.silence is not None:
            self.silence.heard(link.client.name)
        if isinstance(event, float):
            self.beat(link, event)
            return
        if isinstance(event, (m.Hello, m.AgentHello)):
            name = event.member if isinstance(event, m.Hello) else event.agent
            if not link.broken:
                self.links[name] = link
        elif isinstance(event, SaveWord):
            if self.keeper is not None:
                self.keeper.received(link.client.name, event)
            return
        self.handle(event)
        if isinstance(event, m.Hello) and self.keeper is not None:
            self.keeper.greet(event.member)

    def beat(self, link: Dialled, sent_s: float) -> None:
        """Answer a heartbeat, if I still hold the epoch."""
        if self.world.durable.epoch == self.epoch or not self.world.durable.fenced:
            self.answer(link, sent_s)

    def answer(self, link: Dialled, sent_s: float) -> None:
        """Say to which heartbeat this is the answer."""
        self.world.network.down(link, link.client.heartbeat_answered, self.epoch, sent_s)  # type: ignore[attr-defined]

    def _look(self) -> None:
        """For hosts of which nothing is heard."""
        assert self.silence is not None
        self.kernel.after(BEAT_S, self, self._look)
        if not self.storing:
            self.silence.look()

    def _measure(self) -> None:
        """Members of the view have become of other speeds, up to calm."""
        world, view = self.world, self.machine.view
        if self.kernel.now > world.scenario.calm_after_s:
            return
        self.kernel.after(world.scenario.speeds_s, self, self._measure)
        draw = Random(f"{world.scenario.seed} {self.kernel.now}")
        if view is not None:
            self.handle(hm.SpeedsMeasured(leaf_s={name: draw.choice((1.0, 1.0, 2.0, 4.0)) for name in view.members}))

    def _say(self, name: str, word: SaveWord) -> None:
        link = self.links.get(name)
        if link is not None and not link.broken:
            self.world.network.down(link, link.client.told, word)  # type: ignore[attr-defined]

    def handle(self, event: m.Event) -> None:
        if self.world.trace is not None:
            self.world.note(f"{self.name} hears {str(event)[:200]}")
        self._events.append(event)
        self._go_on()

    def _go_on(self) -> None:
        if self.storing:
            return
        while (self._actions or self._events) and not self.ended:
            if not self._actions:
                event = self._events.popleft()
                self._actions.extend(self.world.variant.actions(self.machine.handle(self.kernel.now, event)))
            while self._actions:
                self._carry_out(self._actions.popleft())
                if self.ended or self.storing:
                    return
                if self.paused:
                    self.hold(self._go_on, (), first=True)
                    return
        if self.keeper is not None and not self.ended:
            self.keeper.look()

    def _carry_out(self, action: m.Action) -> None:
        world = self.world
        if world.trace is not None and not isinstance(action, m.Persist | m.JournalEntry):
            world.note(f"{self.name} {str(action)[:300]}")
        if isinstance(action, m.Tell):
            message = action.message
            demotes = isinstance(message, m.Rejoin)
            lets_go = isinstance(message, m.Close) and message.reason == m.DEPARTED
            for name in action.to:
                if demotes:
                    world.oracle.demoted(name)
                elif lets_go:
                    world.oracle.let_go(name)
                link = self.links.get(name)
                if link is not None and not link.broken:
                    world.network.down(link, link.client.told, message)  # type: ignore[attr-defined]
            world.point("tell", self)
        elif isinstance(action, m.Persist):
            self._persist(action.record)
        elif isinstance(action, m.SetTimer):
            token = self._timers[action.name] = self._timers.get(action.name, 0) + 1
            if action.after_s < 1e6:
                self.kernel.after(action.after_s, self, self._timer, action.name, token)
        elif isinstance(action, m.JournalEntry):
            if action.fields.get("action") == "stop" and action.kind == "vacancy_decided":
                self.kernel.after(world.network.delay(), self, self.handle, m.Stop(reason="too few", exit_code=4))
        elif isinstance(action, m.Finish):
            world.ended(self, action)

    def _persist(self, record: m.FleetRecord) -> None:
        if self.world.durable.write(self.epoch, record):
            self.world.oracle.durable(self, record)
            self.world.point("persist", self)
        else:
            self.followed()

    def followed(self) -> None:
        """A write was refused: nothing of what was about to be said or heard counts any more."""
        self._actions.clear()
        self._events.clear()
        self._events.append(m.Superseded())

    def _timer(self, name: str, token: int) -> None:
        if self._timers.get(name) == token:
            self.handle(m.Timer(name=name))


class Dialler(SimulatedProcess):
    """A process that keeps a connection to the coordinator. Subclasses say hello and are told."""

    def __init__(self, world: Surroundings, name: str) -> None:
        super().__init__(world.kernel, name)
        self.world = world
        self.link: Dialled | None = None

    def dial(self) -> None:
        server = self.world.listening(self)
        if self.link is not None:
            return
        if server is None:
            self.kernel.after(0.02 + 0.03 * self.kernel.rng.random(), self, self.dial)
            return
        self.link = self.world.network.dial(self, server)
        self.greet()

    def greet(self) -> None:
        self.say(self.greeting())

    def greeting(self) -> m.ToCoordinator:
        raise NotImplementedError

    def say(self, *messages: Any) -> None:
        """What cannot be said is lost; the next hello says it again."""
        if self.link is not None:
            for message in messages:
                self.world.network.up(self.link, self.link.server.receive, message)  # type: ignore[attr-defined]

    def hung_up(self, link: Dialled) -> None:
        """The coordinator has ended this connection."""
        if self.link is link:
            self.hang_up()

    def hang_up(self, late: bool = False) -> None:
        """The connection is gone; dial again soon."""
        link, self.link = self.link, None
        if link is not None:
            link.broken, link.late = True, late
            self.kernel.after(0.005 + 0.03 * self.kernel.rng.random(), self, self.dial)


class SimulatedAgent(Dialler, Supervisor):
    """Starts, watches, examines and kills the replicas of its host. It never starts the same incarnation twice."""

    def __init__(self, world: Surroundings, name: str) -> None:
        super().__init__(world, name)
        self.known: dict[str, str] = {}  # member -> pending, alive or gone
        self.epoch = self.greetings = 0
        self.dial()
        self._look()
        if world.scenario.silence_s:
            self._beat()

    def _beat(self) -> None:
        self.say(self.kernel.now)
        self.kernel.after(BEAT_S, self, self._beat)

    def heartbeat_answered(self, link: Dialled, epoch: int, sent_at_s: float) -> None:
        """An agent has no lease."""

    def greet(self) -> None:
        """That somebody is not listed says that it has ended, not that it ended well."""
        ended = [self._exit_of(name) for name, state in self.known.items() if state == "gone"]
        self.say(*[exited for exited in ended if exited.cause == "finished"])
        super().greet()

    def greeting(self) -> m.AgentHello:
        listed = tuple(name for name, state in self.known.items() if state != "gone")
        self.greetings += 1
        return m.AgentHello(agent=self.name, pid=1, members=listed, epoch=self.epoch, number=self.greetings)

    def told(self, link: Dialled, message: Any) -> None:
        if link.broken or message.epoch < self.epoch:
            return
        self.epoch = message.epoch
        if isinstance(message, m.Spawn):
            self._spawn(message)
        elif isinstance(message, m.Kill):
            self.world.oracle.killed(message.member)
            if self.known.get(message.member) == "pending":
                self._gone(message.member)
            self.world.crash_replica(message.member)
        elif isinstance(message, m.Examine):
            self._examine(message.member)
        elif isinstance(message, m.Stop):
            for name in list(self.known):
                self.world.crash_replica(name)

    def _spawn(self, message: m.Spawn) -> None:
        state = self.known.get(message.member)
        if state == "gone":
            self.say(self._exit_of(message.member))
        elif state is None:
            self.known[message.member] = "pending"
            start_s = message.after_s + 0.02 + 0.1 * self.kernel.rng.random()
            self.kernel.after(start_s, self, self._start, message.member)

    def _start(self, name: str) -> None:
        if self.known[name] == "pending":
            self.known[name] = "alive"
            self.world.start_replica(name, self)
            self.say(m.Spawned(member=name, agent=self.name, pid=2))

    def child_ended(self, name: str) -> None:
        """The pidfd became readable."""
        if self.known.get(name) != "gone":
            self._gone(name)

    def _gone(self, name: str) -> None:
        self.known[name] = "gone"
        self.say(self._exit_of(name))

    def _exit_of(self, name: str) -> m.Exited:
        replica = self.world.replicas.get(name)
        return m.Exited(member=name, cause=replica.exit if replica is not None else "signal", joined=True)

    def _look(self) -> None:
        """Whoever is silent for longer than it may be is reported unasked."""
        self.kernel.after(self.world.scenario.stall_s, self, self._look)
        for name, state in self.known.items():
            replica = self.world.replicas.get(name) if state == "alive" else None
            if (
                replica is not None
                and replica.busy | replica.paused
                and self.kernel.now - replica.progress_at > self.world.scenario.allowed_s()
            ):
                self._examine(name)

    def _examine(self, name: str) -> None:
        replica = self.world.replicas.get(name)
        if replica is None or replica.ended:
            return
        silent_s = self.kernel.now - replica.progress_at
        computing = replica.busy and not replica.hung
        self.say(
            m.Examined(
                member=name,
                state="T" if replica.paused else "R" if computing else "S",
                traced=False,
                phase=Phase.BACKWARD if replica.busy else Phase.SCATTERED if replica.in_mesh else Phase.CONNECT,
                silent_s=silent_s,
                cpu_advanced=computing,
                allowed_s=self.world.scenario.allowed_s(),
            )
        )
