"""Hosts that fall silent as they must not be treated: each variant takes silence for more, or for less, than it is."""

from __future__ import annotations

from typing import ClassVar

from outlast.core.protocol import Coordinator
from outlast.core.protocol import host_messages as hm
from outlast.core.protocol import messages as m
from outlast.core.protocol.fleet.state import FleetState
from outlast.prove.adversary._variants import Variant, WithCoordinator

__all__ = ["HOSTS_BROKEN"]


def _taken_for_dead(c: FleetState, now_s: float, silent: hm.HostSilent) -> None:
    Coordinator.rules[m.AgentGone](c, now_s, m.AgentGone(agent=silent.agent, cause=silent.why))


class _Undertaker(Coordinator):
    rules: ClassVar = {**Coordinator.rules, hm.HostSilent: _taken_for_dead}


class SilenceIsDeath(WithCoordinator):
    """Whose host is not heard of is taken for dead, as if its agent's end had been seen."""

    wrong = _Undertaker


def _without_lease(c: FleetState, now_s: float, silent: hm.HostSilent) -> None:
    Coordinator.rules[hm.HostSilent](c, now_s, silent)
    if c.change is not None:
        c.change.lease_out = True


class _Hasty(Coordinator):
    rules: ClassVar = {**Coordinator.rules, hm.HostSilent: _without_lease}


class SilentLeaseOver(WithCoordinator):
    """The lease of a silent host is taken to be over at once."""

    wrong = _Hasty


def _still_used(c: FleetState, now_s: float, silent: hm.HostSilent) -> None:
    Coordinator.rules[hm.HostSilent](c, now_s, silent)
    c.roster.agents.add(silent.agent)
    c.roster.lost_agents.discard(silent.agent)


class _Unmoved(Coordinator):
    rules: ClassVar = {**Coordinator.rules, hm.HostSilent: _still_used}


class SilentHostsUsed(WithCoordinator):
    """Replicas are placed on hosts of which nothing is heard."""

    wrong = _Unmoved


class HostsNotRecalled(Variant):
    """A coordinator that takes over counts the silence of those hosts alone that it has heard of itself."""

    recalls_hosts = False


def _awaited_on(c: FleetState, now_s: float, silent: hm.HostSilent) -> None:
    if not c.awaiting:
        Coordinator.rules[hm.HostSilent](c, now_s, silent)


class _Loyal(Coordinator):
    rules: ClassVar = {**Coordinator.rules, hm.HostSilent: _awaited_on}


class SilentAwaited(WithCoordinator):
    """A coordinator that was restarted waits for members of hosts that are gone."""

    wrong = _Loyal


HOSTS_BROKEN: dict[str, tuple[type[Variant], int]] = {
    "silence-is-death": (SilenceIsDeath, 2000),
    "silent-lease-over": (SilentLeaseOver, 2000),
    "silent-hosts-used": (SilentHostsUsed, 2000),
    "hosts-not-recalled": (HostsNotRecalled, 2000),
    "silent-awaited": (SilentAwaited, 2000),
}
