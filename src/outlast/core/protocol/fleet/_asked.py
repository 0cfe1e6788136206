"""What people ask of a run while it trains: other numbers, a host without replicas, another process for a replica.

All of it is carried out by planned views, between two steps, so nothing is lost and no bit changes: shares never matter
to them. What would leave nobody with the state is refused. What was taken is part of the durable record before it is
answered, so a coordinator that takes over keeps to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from outlast.core.protocol import messages as m
from outlast.core.protocol import operator_messages as om
from outlast.core.protocol.fleet._vacancies import too_few
from outlast.core.protocol.fleet.roster import Peer, host_named_in
from outlast.core.protocol.fleet.state import FleetState

__all__ = ["Refusal", "ask_out", "check_state_stays", "drain", "evict", "recall", "scale", "slots_of_all", "too_many"]

Asked = om.ScaleAsked | om.DrainAsked | om.EvictAsked
_Done = tuple[str, list[str]]  # what follows, and who leaves


class Refusal(Exception):
    """Why nothing was done, and what helps."""

    def __init__(self, text: str, remedy: str) -> None:
        self.text, self.remedy = text, remedy


def scale(c: FleetState, now_s: float, asked: om.ScaleAsked) -> None:
    """From now on so many replicas train."""
    _answer(c, asked, "scale", str(asked.replicas), lambda: _scale(c, asked.replicas))


def drain(c: FleetState, now_s: float, asked: om.DrainAsked) -> None:
    """A host is emptied, or may be used again."""
    known = [name for name in _hosts(c) if asked.host in (name, _shown(c, name))]
    host = _shown(c, known[0]) if known else asked.host
    what = "undrain" if asked.undo else "drain"
    _answer(c, asked, what, host, lambda: _undrain(c, host) if asked.undo else _drain(c, host))


def evict(c: FleetState, now_s: float, asked: om.EvictAsked) -> None:
    """A replica goes, and another process takes its place."""
    _answer(c, asked, "evict", asked.replica, lambda: _evict(c, asked))


def recall(c: FleetState, record: m.FleetRecord) -> None:
    """What was asked of an earlier coordinator. Call it once the record's replicas are known again."""
    if record.wanted:
        c.want(record.wanted)
    if record.spares >= 0 and c.settings.auto_spares:
        c.hold(record.spares)
    c.roster.drained, c.roster.unpaid = set(record.drained), set(record.unpaid)
    for name in record.leaving:
        if c.roster.is_alive(name):
            c.roster.peers[name].leaving = c.leaving = True
            c.roster.asked_out.add(name)


def _answer(c: FleetState, asked: Asked, what: str, about: str, carry_out: Callable[[], _Done]) -> None:
    try:
        if c.over or c.ending is not None:
            raise Refusal("training is over, and the scripts are ending", "none needed")
        text, leaving = carry_out()
    except Refusal as no:
        c.journal("asked", what=what, about=about, accepted=False, text=no.text, replicas=[])
        c.tell([asked.asker], om.Answered(epoch=c.epoch, accepted=False, text=no.text, remedy=no.remedy))
        return
    c.journal("asked", what=what, about=about, accepted=True, text=text, replicas=leaving)
    c.persist()  # the driver writes down what was said before it
    c.tell([asked.asker], om.Answered(epoch=c.epoch, accepted=True, text=text, leaving=tuple(leaving)))


# --- how many -------------------------------------------------------------------------------------------------------
def _scale(c: FleetState, wanted: int) -> _Done:
    before, spares = c.settings.num_replicas, c.settings.num_spares
    if wanted < 1:
        raise Refusal(f"{wanted} is no number of replicas", "a whole number from 1; outlast stop ends the run")
    if c.num_microbatches and wanted > c.num_microbatches:
        raise Refusal(
            f"{wanted} replicas cannot share the {c.num_microbatches} microbatches of a step",
            f"ask for at most {c.num_microbatches}",
        )
    if _robust(c) and wanted < c.began_with:
        raise Refusal(
            f"what the run's robust rule withstands needs the {c.began_with} replicas that it began with",
            f"ask for {c.began_with} or more; or end it with outlast stop, and start it anew with fewer",
        )
    if wanted + spares > c.settings.most_processes:
        raise Refusal(
            f"this run has memory for the snapshots of {c.settings.most_processes} replicas and spares at most",
            "start it anew with more replicas: it goes on from its newest checkpoint, to the same bits",
        )
    out = too_many(c, wanted)
    check_state_stays(c, out, "ask again once the others are members: outlast status shows them")
    c.want(wanted)
    c.roster.unpaid.update(f"r{index + spares}" for index in range(before, wanted))
    ask_out(c, out)
    names = [peer.name for peer in out]
    more = f"; {', '.join(names)} will leave between two steps" if names else ""
    slots = slots_of_all(c)
    if slots is not None and slots < wanted + spares:
        have, want = _many(slots, "process"), _many(wanted + spares, "process")
        more += f"; the hosts have slots for {have}, and {want} are wanted: the others wait for a host"
    return f"{_many(wanted, 'replica')} from now on ({before} before){more}", names


def too_many(c: FleetState, wanted: int) -> list[Peer]:
    """Whose slot is no more; and so many members that no more are left than train, the last slots first."""
    peers, last = c.roster.peers, wanted + c.settings.num_spares
    out = [p for p in peers.values() if p.alive and not p.leaving and c.roster.index_of(p.name) >= last]
    gone = {peer.name for peer in out}
    view = c.planned or c.view
    stay = [name for name in (view.members if view is not None else ()) if name in peers and name not in gone]
    stay = sorted((n for n in stay if peers[n].alive and not peers[n].leaving), key=c.roster.index_of)
    return [*out, *(peers[name] for name in stay[wanted:])]


def slots_of_all(c: FleetState) -> int | None:
    """Processes that the hosts have room for; None for any number."""
    return _slots_of(c, c.roster.agents - c.roster.drained_agents)


def _slots_of(c: FleetState, agents: Iterable[str]) -> int | None:
    slots = [c.roster.slots.get(agent, 0) for agent in agents]
    return None if 0 in slots else sum(max(0, number) for number in slots)


# --- where ----------------------------------------------------------------------------------------------------------
def _drain(c: FleetState, host: str) -> _Done:
    name = _host_called(c, host)
    if name in c.roster.drained:
        return f"host {host} is drained already", []
    here = {agent for agent in c.roster.agents | c.roster.lost_agents if host_named_in(agent) == name}
    others = c.roster.agents - here - c.roster.drained_agents
    if not others:
        raise Refusal(f"{host} is the only host that replicas may run on", "have another join first: outlast agent")
    if _robust(c):
        _check_rule_holds(c, here)
    out = [p for p in c.roster.peers.values() if p.agent in here and p.alive and not p.leaving]
    _check_enough_stay(c, out, "have replicas on other hosts first: outlast scale")
    c.roster.drained.add(name)
    ask_out(c, out)
    names = [peer.name for peer in out]
    gone = f"{', '.join(names)} will leave it between two steps" if names else "no replica was there"
    return f"host {host} gets no replica until it is given back; {gone}", names


def _check_rule_holds(c: FleetState, drained: set[str]) -> None:
    """A robust rule needs all replicas, and those on so many hosts that no host can spoil more rows than it trims: how
    many each has does not matter to it (`row_plans.host_shares`)."""
    agents = c.roster.load(drained)
    needed = int(c.facts.get("fault_domains", "0"))
    if len(agents) < needed:
        have = f"needs replicas on {needed} hosts, and {len(agents)} would be left"
        text = f"with fault_domain = host the run's robust rule {have}"
        raise Refusal(text, "have another join first: outlast agent")
    slots = _slots_of(c, agents)
    if slots is not None and slots < c.settings.num_replicas:
        have = f"the other hosts have slots for {slots} of the {_many(c.settings.num_replicas, 'replica')}"
        raise Refusal(f"{have} that the run's robust rule needs", "have another join first: outlast agent")


def _undrain(c: FleetState, host: str) -> _Done:
    name = _host_called(c, host)
    if name not in c.roster.drained:
        raise Refusal(f"host {host} is not drained", "outlast status shows which are")
    c.roster.drained.discard(name)
    c.roster.look()
    return f"host {host} may be used again", []


def _host_called(c: FleetState, host: str) -> str:
    """What its agents' names begin with: the launcher's own have a number there, beside the host's name."""
    found = [name for name in _hosts(c) if _shown(c, name) == host]
    if not found:
        shown = ", ".join(_shown(c, name) for name in _hosts(c)) or "none"
        raise Refusal(f"the run has no host {host}", f"its hosts are: {shown}")
    return found[0]


def _hosts(c: FleetState) -> list[str]:
    known = {host_named_in(agent) for agent in c.roster.agents | c.roster.lost_agents} | c.roster.drained
    return sorted(known)


def _shown(c: FleetState, name: str) -> str:
    return c.roster.host_names.get(name, name)


# --- who ------------------------------------------------------------------------------------------------------------
def _evict(c: FleetState, asked: om.EvictAsked) -> _Done:
    peer = c.roster.peers.get(asked.replica) or c.roster.peers.get(c.roster.living(asked.replica))
    if peer is None or not peer.alive:
        living = [p.name for p in c.roster.peers.values() if p.alive]
        raise Refusal(f"no replica {asked.replica} lives", f"those that do: {', '.join(living) or 'none'}")
    _check_enough_stay(c, [peer], "have another replica first: outlast scale")
    if asked.now:
        c.roster.asked_out.add(peer.name)  # should this coordinator die before its agent hears, it leaves all the same
        c.journal("suspected", replica=peer.name, evidence="it was asked for", decision="evict")
        c.kill(peer.name, "it was asked for (outlast evict --now)")
        return f"{peer.name} is killed, and another process takes its place", [peer.name]
    ask_out(c, [peer])
    return f"{peer.name} will leave between two steps, and another process takes its place", [peer.name]


def ask_out(c: FleetState, peers: Iterable[Peer]) -> None:
    """As if each had asked itself; who has yet to say hello is told then."""
    for peer in peers:
        peer.leaving = c.leaving = True
        c.roster.asked_out.add(peer.name)
        if peer.joined:
            c.dismiss(peer.name)


def check_state_stays(c: FleetState, out: Iterable[Peer], remedy: str) -> None:
    """Somebody who holds the state must be left, and not about to go, nor killed with its end not reported yet."""
    gone = {peer.name for peer in out}
    if gone.intersection(c.current) and not _num_holders_without(c, gone):
        raise Refusal(f"nobody but {', '.join(sorted(gone))} holds the training state", remedy)


def _check_enough_stay(c: FleetState, out: Iterable[Peer], remedy: str) -> None:
    """And as many as may go on: else these would wait for the replacements of those, and the run might stop."""
    check_state_stays(c, out, remedy)
    gone = {peer.name for peer in out}
    num, least = _num_holders_without(c, gone), c.settings.min_replicas
    if gone.intersection(c.current) and too_few(c, num):
        raise Refusal(f"{_many(num, 'replica')} would be left, and min_replicas asks for {least}", remedy)


def _num_holders_without(c: FleetState, gone: set[str]) -> int:
    peers, holders = c.roster.peers, {*c.roster.alive(c.current), *c.roster.having("ready")}
    return sum(name not in gone | c.killed and not peers[name].leaving for name in holders)


def _robust(c: FleetState) -> bool:
    return c.facts.get("aggregation", "mean") != "mean"


def _many(number: int, noun: str) -> str:
    plural = {"process": "processes"}.get(noun, noun + "s")
    return f"{number} {noun if number == 1 else plural}"
