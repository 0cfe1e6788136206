"""After the last step: the scripts of the last view's members go on, and one of them writes (protocol, 43).

The run is finished when all their processes have ended and one that was entitled to write has ended well. A writer that
dies is followed by the next member, and the last of them by a spare that is ready, which forms a view of its own and
goes through the end of training itself. A member is told that it is not the writer only once somebody's script has
ended, so whoever has ended well did all that a writer would have done. The end of a script with an error is its
author's: it is not followed by another, and decides the run's exit code if it was the writer's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import msgspec

from outlast.core.protocol import messages as m
from outlast.core.protocol.fleet._beginning import begin_again
from outlast.core.protocol.fleet.state import FleetState
from outlast.core.protocol.fleet.views import install
from outlast.core.protocol.types import View

if TYPE_CHECKING:
    from outlast.core.protocol.fleet.roster import Peer

__all__ = ["begin", "exited", "greet", "progress"]

_UNBORN = "it was still starting when training ended"  # no fault of anybody's
UNWRITTEN = 6  # exit code of a replica that would have to write, and whose script had decided earlier that it need not


def begin(c: FleetState, steps: int) -> None:
    """All members of the view passed the closing barrier. Who is not of the view has nothing left to do, unless it is
    a spare that holds the state: it waits, should all of them die."""
    assert c.view is not None
    c.set_views(c.view, None)
    c.reports.recoveries(c.latest())
    _note(c, m.Ending(steps=steps, writer=c.view.members[0]))  # durable before anybody is sent home for it
    for peer in [p for p in c.roster.peers.values() if p.alive and p.name not in c.current]:
        if peer.status == "ready" and not peer.leaving:
            continue
        if peer.joined:
            c.tell([peer.name], m.Close(epoch=c.epoch, reason="finished"))
        elif peer.name not in c.unheard:  # who has yet to greet this coordinator is told then
            c.roster.mark(peer.name, "condemned")
            c.kill(peer.name, _UNBORN)
    progress(c)


def _note(c: FleetState, ending: m.Ending) -> None:
    if c.ending is None or c.ending.writer != ending.writer:
        c.journal("training_ended", steps=ending.steps, writer=ending.writer)
    c.ending = ending
    c.persist()


def _tell(c: FleetState, *names: str) -> None:
    assert c.view is not None
    assert c.ending is not None
    c.tell(c.roster.alive(names or c.view.members), _message(c, c.ending))


def _message(c: FleetState, ending: m.Ending) -> m.Ended:
    return m.Ended(epoch=c.epoch, writer=ending.writer, settled=ending.ends.get(ending.writer) in ("well", "badly"))


def greet(c: FleetState, peer: Peer, hello: m.Hello) -> None:
    """A member came back, or a replica that is none. If that one holds the state, as a spare or because it was about to
    come into the view, it waits like a spare that is ready: should all members die, nobody else has what was trained.
    """
    if peer.name in c.current:
        _tell(c, peer.name)
    elif hello.state in ("ready", "member") and not peer.leaving:
        c.roster.mark(peer.name, "ready")
    else:
        c.tell([peer.name], m.Close(epoch=c.epoch, reason="finished"))


def exited(c: FleetState, exited: m.Exited) -> bool:
    """A process has ended, as a member or not. Told again by its agent it is no news. Whether it died."""
    ending, name = c.ending, exited.member
    assert ending is not None
    if name in c.current and name not in ending.ends:
        _note(c, msgspec.structs.replace(ending, ends=ending.ends | {name: _how(exited)}))
    return exited.cause not in ("left", "finished", "exception") and exited.detail != _UNBORN


def _how(exited: m.Exited) -> Literal["well", "badly", "death"]:
    if exited.cause == "exception" and exited.code != UNWRITTEN:
        return "badly"
    return "well" if exited.cause in ("finished", "left") else "death"


def progress(c: FleetState) -> None:
    """Do what is next: another writer, its end told, the end of the run."""
    ending, view = c.ending, c.view
    assert ending is not None
    assert view is not None
    if ending.ends.get(ending.writer) == "death":
        following = _successor(ending, view.members)
        if not following:
            _lost(c, ending)
            return
        c.reports.recoveries(c.latest())
        ending = msgspec.structs.replace(ending, writer=following)
        _note(c, ending)
    told = _message(c, ending)
    if told != c.told_ended:
        c.told_ended = told
        _tell(c)
    written = ending.ends.get(ending.writer) == "well"  # then nobody waits for those that are cut off
    if all(name in ending.ends or (written and c.roster.peers[name].agent in c.silent) for name in view.members):
        _finish(c, ending)


def _successor(ending: m.Ending, members: tuple[str, ...]) -> str:
    """Who has ended well has done all that a writer does; else the next that lives; else who ended badly."""
    order: tuple[Any, ...] = ("well", None, "badly")
    return next((name for how in order for name in members if ending.ends.get(name) == how), "")


def _lost(c: FleetState, ending: m.Ending) -> None:
    """Nobody is left who could write: a spare, or from a checkpoint if there are any, else what was trained is gone."""
    assert c.view is not None
    if c.unheard:
        return  # after a restart: somebody may still say that it holds the state, and be further than who has said so
    c.ending = c.told_ended = None
    members, why = c.view.members, f"{ending.writer} died after the last step, before its script had ended"
    spares = [name for name in c.roster.having("ready") if not c.roster.peers[name].leaving]
    if spares:
        # all of them: who was on its way into the view may be a step ahead of the others, and the roll call tells
        install(c, View(id=c.next_id(), members=tuple(spares), saved=c.saved), why)
        return
    if begin_again(c, members, why):
        c.done.clear()
        return
    detail = f"training ended after {ending.steps} steps, but {why}, and no replica is left that holds the state"
    c.finish("failed", 6, ending.steps, detail)


def _finish(c: FleetState, ending: m.Ending) -> None:
    if ending.ends[ending.writer] == "well":
        bad = [name for name, how in ending.ends.items() if how == "badly"]
        told = f"the script of {', '.join(bad)}, which did not write, ended with an error after it" if bad else ""
        c.finish("finished", 0, ending.steps, told)
        return
    words = c.failures.words.get(ending.writer, "")
    c.finish(
        "failed",
        c.failures.codes.get(ending.writer, 5),
        ending.steps,
        f"training ended after {ending.steps} steps, but the script of {ending.writer} failed after it:\n{words}",
    )
