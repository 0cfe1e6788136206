"""Faults of hosts in a row, drawn by a seed: after each of them the run is whole again, and the bits are those of one.

`make campaign-hosts` strikes 300 times; here it is a tenth of that. OUTLAST_HOST_FAULTS and OUTLAST_HOST_SEED set how
often and which. A table at the end says what was struck, and how long no step was committed.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.conftest import PATIENCE_S
from tests.runtime.test_hosts import Hosts

from outlast.config import RunConfig
from outlast.core import events as ev
from outlast.prove import struck_clock
from outlast.prove.host_namespaces import HostNetwork, unavailable
from outlast.prove.struck_clock import StruckClock

pytestmark = [pytest.mark.process, pytest.mark.campaign]
NUM_FAULTS, SEED = int(os.environ.get("OUTLAST_HOST_FAULTS", "30")), int(os.environ.get("OUTLAST_HOST_SEED", "1"))
A_FLEET = 5
EACH, FIRST, PACE = 45, 10, 5  # steps from a fault to the next, to the first gate after it, and to each other one
SLOW = ("rate", "100mbit", "burst", "64kb", "latency", "2s")  # the exchange takes ten times as long


class Struck(Hosts):
    """Three replicas on three hosts with wall clocks of their own. The coordinator is on one of them, or `apart`, on a
    host 0 that trains nothing."""

    def __init__(self, net: HostNetwork, base: Path, fleet: Callable[..., Any], *, apart: bool, **shape: Any) -> None:
        self.clocks: dict[int, StruckClock] = {}
        if not struck_clock.unavailable():
            self.clocks = {host: StruckClock(base / f"clock{host}") for host in range(1, net.num)}
        super().__init__(net, base, fleet, 1, replicas=3, agents=0 if apart else 1, **shape)
        self.others = tuple(range(1, net.num))
        self.replaced: list[subprocess.Popen[bytes]] = []

    def agent(self, host: int, to: str = "", **environ: str) -> Any:
        return super().agent(host, to, **environ, **(self.clocks[host].environ if self.clocks else {}))

    def anew(self, host: int) -> None:
        """Its agent is started once more."""
        self.replaced.append(self.agents[host])
        self.agents[host] = self.agent(host)

    def living(self) -> set[str]:
        found: set[str] = self.run.living()
        return found

    def outside(self) -> set[str]:
        return self.living().difference(self.run.driven.members)

    def at_gates(self) -> bool:
        """All that train have done every step that they may do."""
        return bool(self.run.all_wait())

    def whole(self) -> bool:
        return len(self.living()) == 3 and not self.outside() and self.at_gates()

    def pace(self, what: str) -> None:
        """Until it is whole, some steps for each order of the coordinator's: orders are carried out between two steps,
        and members that ran on would be at the next fault before who joins has been served."""
        self.given = 0
        self.run.until(what, self._whole_or_in_need)
        while not self.whole():
            self.given = self.orders()
            self.run.open_gate()
            self.run.until(what, self._whole_or_in_need)

    def _whole_or_in_need(self) -> bool:
        return self.whole() or (self.at_gates() and self.orders() > self.given)

    def orders(self) -> int:
        return sum(isinstance(e, ev.JoinerServed | ev.ViewInstalled) for e in self.run.driven.events)

    def without(self, *hosts: int) -> Callable[[], bool]:
        """Whether the members that these have now are given up."""
        theirs = [name for host in hosts for name in self.on(host) if name in self.run.driven.members]
        assert len(theirs) == len(hosts)
        return lambda: all(map(self.run.exited, theirs))


@dataclass(frozen=True)
class Blow:
    """`seen`: what has come of it before it is `healed`. `loses`: replicas, at least and at most."""

    seen: Callable[[], bool]
    healed: Callable[[], Any] = lambda: None
    loses: tuple[int, int] = (1, 1)


NOBODY = (0, 0)


def power(on: Struck, host: int, *others: int) -> Blow:
    hosts = (host, *others)
    seen = on.without(*hosts)
    for each in hosts:
        on.net.power_off(each)

    def back() -> None:
        for each in hosts:
            on.net.mend(each)
            on.anew(each)

    return Blow(seen, back, (len(hosts), len(hosts)))


def two_at_once(on: Struck, host: int) -> Blow:
    """All that train but one."""
    return power(on, host, next(other for other in on.others if other != host))


def cable(on: Struck, host: int) -> Blow:
    seen = on.without(host)
    on.net.cut(host)
    return Blow(seen, lambda: on.net.mend(host))


def flapping(on: Struck, host: int) -> Blow:
    """Down and up, faster than anybody notices, and then down."""
    for _ in range(5):
        on.net.cut(host)
        on.net.mend(host)
    return cable(on, host)


def is_not_heard(on: Struck, host: int) -> Blow:
    seen = on.without(host)
    on.net.mute(host)
    return Blow(seen, lambda: on.net.unmute(host))


def does_not_hear(on: Struck, host: int) -> Blow:
    seen = on.without(host)
    on.net.mute(host, others=True)
    return Blow(seen, lambda: on.net.unmute(host, others=True))


def one_path(on: Struck, host: int) -> Blow:
    """Between two hosts, and no other. One of the two goes."""
    other = next(other for other in on.others if other != host)
    there = [on.without(host), on.without(other)]
    on.net.part(host, other)
    return Blow(lambda: any(gone() for gone in there), lambda: on.net.join(host, other))


def coordinator_in_the_minority(on: Struck, host: int) -> Blow:
    """Its host, which trains, is cut off from the two others, which have each other."""
    seen = on.without(*on.others)
    on.net.cut(0)
    return Blow(seen, lambda: on.net.mend(0), (2, 2))


def coordinator_cut_off(on: Struck, host: int) -> Blow:
    """No host reaches it, and all reach each other: steps go on without it."""
    on.net.cut(0)
    return Blow(on.at_gates, lambda: on.net.mend(0), NOBODY)


def coordinator_cut_off_for_long(on: Struck, host: int) -> Blow:
    """For longer than any host may be silent while the others are heard."""
    end_s = time.monotonic() + 1.5 * RunConfig().host_silence_s
    on.net.cut(0)
    return Blow(lambda: on.at_gates() and time.monotonic() > end_s, lambda: on.net.mend(0), NOBODY)


def hang(on: Struck, host: int) -> Blow:
    seen = on.without(host)
    on.net.signal_all(host, signal.SIGSTOP)
    return Blow(seen, lambda: on.net.signal_all(host, signal.SIGCONT))


def agent_killed(on: Struck, host: int) -> Blow:
    seen = on.without(host)
    on.agents[host].kill()
    on.agents[host].wait()
    return Blow(seen, lambda: on.anew(host))


def agent_stopped(on: Struck, host: int) -> Blow:
    on.agents[host].send_signal(signal.SIGSTOP)
    return Blow(on.at_gates, lambda: on.agents[host].send_signal(signal.SIGCONT), NOBODY)


def old_ones_alive(on: Struck, host: int) -> Blow:
    """Cut off, and started anew under its name while what it had still runs; then the path is back."""
    seen = on.without(host)
    on.net.cut(host)

    def back() -> None:
        on.anew(host)
        on.net.mend(host)

    return Blow(seen, back)


def clock(on: Struck, host: int) -> Blow:
    """By most of a day, both ways, and back."""
    for pick in (0.1, 0.9, 0.5):
        on.clocks[host].strike("clock", pick)
    return Blow(on.at_gates, loses=NOBODY)


def slow_link(on: Struck, host: int) -> Blow:
    on.net.shape(host, *SLOW)
    return Blow(on.at_gates, lambda: on.net.unshape(host), NOBODY)


ANYWHERE = [
    power, two_at_once, cable, flapping, is_not_heard, does_not_hear, one_path, hang, agent_killed, agent_stopped,
    old_ones_alive, *([] if struck_clock.unavailable() else [clock]), slow_link,
]  # fmt: skip
KINDS = {
    False: [*ANYWHERE, coordinator_in_the_minority],
    True: [*ANYWHERE, coordinator_cut_off, coordinator_cut_off_for_long],
}


def _strike(on: Struck, kind: Callable[[Struck, int], Blow], first: int, draw: random.Random, what: str) -> list[Any]:
    """Before this step and after it, at whichever moment; whole again before the next fault: (replicas lost, seconds
    without a commit)."""
    run, host = on.run, draw.choice(on.others)
    what = f"{what}, {kind.__name__} of host {host}"
    while min(run.gates) < first:
        run.open_gate()
    run.gate(first, f"before {what} all were there", on.whole)
    run.until(f"before {what} all had waited", on.at_gates)
    exits, recoveries = len(run.exits()), len(run.driven.recoveries())
    if draw.random() < 0.5:
        blow = kind(on, host)
        run.gate(first + 1, what, lambda: True)
    else:
        run.gate(first + 1, what, lambda: True)
        blow = kind(on, host)
    run.until(f"{what}: it was seen", blow.seen)
    blow.healed()
    run.until(f"{what}: all were started", lambda: len(on.living()) == 3)
    on.pace(f"{what}: all were there again")
    lost = len(run.exits()) - exits
    assert blow.loses[0] <= lost <= blow.loses[1], f"{what}: {lost} replicas were lost\n{run.logs()}"
    return [lost, max((e.downtime_s for e in run.driven.recoveries()[recoveries:]), default=0.0)]


@pytest.fixture
def struck(tmp_path: Path, fleet: Callable[..., Any]) -> Iterator[Callable[..., Struck]]:
    reason = unavailable()
    if reason:
        pytest.skip(reason)
    with ExitStack() as stack:

        def start(*, apart: bool, **shape: Any) -> Struck:
            net = stack.enter_context(HostNetwork(4 if apart else 3, [tmp_path]))
            return Struck(net, tmp_path, fleet, apart=apart, **shape)

        yield start


SOAKS = 1, 3
"""Fleets whose kinds of faults others of the first six have as well, on the same hosts: CI strikes with each kind."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "number",
    [pytest.param(n, marks=[pytest.mark.soak] if n in SOAKS else []) for n in range(-(-NUM_FAULTS // A_FLEET))],
)
def test_hosts_fail_in_a_row(number: int, struck: Callable[..., Struck], record_property: Callable[..., None]) -> None:
    """Each kind once before any comes again, by turns with the coordinator on a host that trains, and on one that does
    not; two fleets in float32, two in bfloat16."""
    apart, nth = bool(number % 2), number // 2
    every = KINDS[apart]
    draw = random.Random(SEED * 1000 + number)
    kinds = [every[(nth * A_FLEET + index) % len(every)] for index in range(A_FLEET)][: NUM_FAULTS - number * A_FLEET]
    draw.shuffle(kinds)
    firsts = [EACH * (index + 1) for index in range(len(kinds))]
    end = EACH * (len(kinds) + 1)
    gates = [first + after for first in firsts for after in (0, 1, *range(FIRST, EACH, PACE))]
    on = struck(apart=apart, steps=end, gates=gates, dtype=("float32", "bfloat16")[nth % 2])
    for index, (kind, first) in enumerate(zip(kinds, firsts, strict=True)):
        what = f"fault {index} of fleet {number} of seed {SEED}"
        record_property("host fault", [kind.__name__, *_strike(on, kind, first, draw, what)])
    on.run.open_gates()
    on.end()
    for agent in (*on.agents.values(), *on.replaced):  # of two of one name the first may have come back by itself
        agent.wait(PATIENCE_S)
    on.run.assert_unchanged()
    assert len(on.run.results()) == 3
