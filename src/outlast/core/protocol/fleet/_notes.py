"""Events that the coordinator writes down. From alarms and tests of a host's devices more may follow (`_alarms`)."""

from __future__ import annotations

from outlast.core.protocol import messages as m
from outlast.core.protocol.fleet import _alarms
from outlast.core.protocol.fleet.state import FleetState

__all__ = ["data_noted", "noted", "resumed", "save_published", "unjoined"]


def resumed(c: FleetState, now_s: float, _: m.Resumed) -> None:
    """A step was committed in a view whose faults are not reported yet."""
    c.reports.resumed()


def save_published(c: FleetState, now_s: float, said: m.SavePublished) -> None:
    """A checkpoint was published, which a spare may be behind once nobody else is left. Durable: the next coordinator
    has to know of it, too."""
    if said.step != c.saved:
        c.saved = said.step
        c.persist()


def noted(c: FleetState, now_s: float, note: m.DeviceNoted) -> None:
    """What was found out about a device, by a member or an agent, is written down."""
    peer = c.roster.peers.get(note.member)
    replica, host = (note.member, peer.agent) if peer is not None else ("", note.member)
    c.journal(
        "device_finding",
        replica=replica,
        host=host,
        device=note.device,
        source=note.source,
        step=note.step,
        microbatch=note.microbatch,
        evidence=note.evidence,
        action=note.action,
        remedy=note.remedy,
    )
    if peer is None:
        _alarms.heard(c, now_s, note)


def data_noted(c: FleetState, now_s: float, note: m.DataNoted) -> None:
    """Something about the data is written down: what all members say, once."""
    key = (note.step, f"data {note.what}", "")
    if note.what == "skipped":
        if key in c.roster.judged:
            return
        c.roster.judged.add(key)
    peer = c.roster.peers.get(note.member)
    alone = note.what != "skipped"
    c.journal(
        "data_trouble",
        what=note.what,
        replica=note.member if alone else "",
        host=peer.agent if alone and peer is not None else "",
        step=note.step,
        microbatch=note.microbatch,
        samples=list(note.samples),
        text=note.text,
        total=note.total,
        allowed=note.allowed,
    )


def unjoined(c: FleetState, now_s: float, told: m.Unjoined) -> None:
    if c.unjoined or any(peer.joined for peer in c.roster.peers.values()):
        return  # told already, or the script does join, and this replica is slow
    c.unjoined = True
    text = (
        f"{told.member} has run for {told.for_s:.0f} s without outlast.join(), which makes it part of this run. A "
        "script that never calls it (a Trainer's, say) trains the whole job in every replica: stop it, and take "
        "outlast.adapters.huggingface.OutlastTrainer, Lightning's Trainer(strategy=OutlastStrategy()), or "
        "outlast.join() and protect() in a loop of its own"
    )
    c.journal("notice", level="warning", text=text)
