"""A member's saves, in this process: a real archive and state; the transport is a list, and the view is told."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from outlast.config import RunConfig
from outlast.core.protocol import View, ViewId
from outlast.core.protocol.saves.agreement import CANNOT
from outlast.core.protocol.saves.commit import SaveId
from outlast.errors import ViewAbandoned
from outlast.runtime.saving.member_saves import Saves
from outlast.runtime.settings.fault_points import Probe
from outlast.runtime.settings.save_settings import SaveSettings
from outlast.runtime.training.state import State
from outlast.runtime.transport import save_messages as wire


@dataclass
class Trained:
    """What saves ask of a member. `ended`: the newest view that is over."""

    view: View | None = None
    committed: int = 4
    stable: int = 4
    formed: bool = True
    until: int | None = None
    ended: int = 0

    def over(self, view: ViewId) -> bool:
        return view.n <= self.ended

    def enters(self, n: int, *members: str) -> View:
        self.view, self.stable = View(id=ViewId(2, n), members=members), 0
        return self.view


Made = Callable[..., tuple[Saves, Trained, list[Any]]]


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Made]:
    opened: list[tuple[Saves, int]] = []

    def make(every: int = 0, me: str = "r0.1") -> tuple[Saves, Trained, list[Any]]:
        model = nn.Linear(4, 3)
        state = State(model, [torch.optim.SGD(model.parameters(), lr=0.1)], [], {})
        engine: Any = SimpleNamespace(state=state, frozen=[], stopped="", stop_wanted="", restore_buffers=lambda: None)
        env: Any = SimpleNamespace(
            me=me, place=0, width=1, hold="", run_id="a-run", config=RunConfig(), probe=Probe(me, None),
            until="",
        )  # fmt: skip
        settings = SaveSettings(
            target=str(tmp_path / "saves"), every=every, keep_last=2, keep_every=0, drain_to="", num_slots=2, min_s=0.0
        )
        member, said, wake = Trained(), list[Any](), os.eventfd(0, os.EFD_NONBLOCK)
        saves = Saves(env, engine, member, settings, {}, send=said.extend, wake_fd=wake, verified=lambda: None)
        opened.append((saves, wake))
        saves.repeat()  # the coordinator is there
        return saves, member, said

    yield make
    for saves, wake in opened:
        saves.close()
        os.close(wake)


def ready(saves: Saves, view: View, committed: int) -> None:
    """The view's first step is next, and memory for its saves is made."""
    saves.told(wire.SaveBase(epoch=2, base=10))
    saves.enter(view, committed)
    assert saves._prepared is not None
    saves._prepared.result(30)


def taken(saves: Saves, view: View, committed: int, vote: int) -> None:
    """All headers said this vote, and the loop is at the step's boundary; returns when the part is on the disk."""
    saves.decided(view, committed, [vote] * len(view.members))
    saves.boundary()
    written = [flight.handle.durable for flight in saves._flights.values()]
    for future in written:
        _settled(future)


def _settled(future: Future[Any]) -> None:
    future.exception(30)


def kinds(said: list[Any]) -> list[type]:
    return [type(message) for message in said]


def test_a_part_is_promised_once_it_is_on_the_disk_and_its_step_is_stable(made: Made) -> None:
    saves, member, said = made()
    view = member.enters(1, "r0.1", "r1.1")
    assert saves.vote(3) == CANNOT, "before it is known where epochs begin"
    ready(saves, view, 4)
    assert saves.vote(3) == 0
    saves.told(wire.SaveNow(epoch=2, number=6, reason="asked"))
    assert saves.vote(3) == 6
    taken(saves, view, 4, 6)
    assert kinds(said) == [wire.SaveBegun]
    assert (said[0].save.epoch, said[0].save.n, said[0].save.step, said[0].writer) == (12, 1, 4, 0)
    saves.stable(view.id, 3)
    assert kinds(said) == [wire.SaveBegun], "a death may still take step 4 back"
    saves.stable(view.id, 4)
    saves.stable(view.id, 5)
    assert kinds(said) == [wire.SaveBegun, wire.SaveDone], "once"
    assert (said[1].asked, said[1].reason) == (6, "asked")
    assert saves.vote(4) == 0, "the request is answered"


def test_a_part_that_was_not_promised_lapses_with_its_view(made: Made) -> None:
    """Its members may have taken the step back; one that was promised waits for the coordinator's word."""
    saves, member, said = made(every=4)
    view = member.enters(1, "r0.1", "r1.1")
    ready(saves, view, 4)
    taken(saves, view, 4, saves.vote(3))
    after = member.enters(2, "r0.1")
    saves.stable(after.id, 5)
    assert kinds(said) == [wire.SaveBegun]
    assert saves.repeat() == []
    member.committed = 5
    saves.enter(after, 5)
    assert saves._prepared is not None
    saves._prepared.result(30)
    taken(saves, after, 5, 1)
    saves.stable(after.id, 5)
    assert kinds(said) == [wire.SaveBegun, wire.SaveBegun, wire.SaveDone]
    member.enters(3, "r0.1")
    saves.stable(ViewId(2, 3), 6)
    assert saves.repeat() == [said[-1]], "said again to a coordinator that may have missed it"
    saves.told(wire.SaveSettled(epoch=2, save=said[-1].save, generation=0))
    assert saves.repeat() == []


def test_nobody_saves_what_one_of_them_cannot(made: Made) -> None:
    saves, member, said = made(every=4)
    view = member.enters(1, "r0.1", "r1.1")
    ready(saves, view, 4)
    saves.decided(view, 4, [saves.vote(3), CANNOT])
    saves.boundary()
    assert said == []
    assert saves.vote(4) > 0, "it is still wanted"


def test_the_end_waits_for_the_last_save_and_leaves_with_the_view(made: Made) -> None:
    saves, member, said = made()
    view = member.enters(1, "r0.1", "r1.1")
    ready(saves, view, 4)
    saves.last()
    assert [(type(message), message.reason) for message in said] == [(wire.SaveBegun, "the loop ended")]
    saves.last()
    assert len(said) == 1, "this very step was tried in this view"
    member.ended = 1
    with pytest.raises(ViewAbandoned):
        saves.settle_last(view.id, lambda: member.over(view.id))


@pytest.mark.parametrize("refused", [False, True])
def test_the_run_stops_with_a_save_on_all_members_or_on_none(
    made: Made, monkeypatch: pytest.MonkeyPatch, refused: bool
) -> None:
    """A part may be refused, or fail, before it is looked whether the run stops: who went on alone would be waited for
    by all who did not. Once the coordinator has given the save up, all go on, to take another."""
    saves, member, said = made()
    view = member.enters(1, "r0.1", "r1.1")
    ready(saves, view, 4)
    saves.told(wire.SaveNow(epoch=2, number=7, reason="stop"))

    def refuses(*_: Any, **__: Any) -> Any:
        raise OSError("read-only")

    if refused:
        monkeypatch.setattr(saves.archive, "save", refuses)
    saves.decided(view, 4, [7, 7])
    saves.boundary()
    assert kinds(said) == [wire.SaveLost if refused else wire.SaveBegun]
    assert saves.stopping(view, 4)
    member.ended = 1
    with pytest.raises(ViewAbandoned):
        saves.await_stop(view, 4, lambda: member.over(view.id))
    member.ended = 0
    saves.told(wire.SaveSettled(epoch=2, save=SaveId(epoch=12, n=1, step=4), generation=None))
    saves.await_stop(view, 4, lambda: member.over(view.id))
    saves.told(wire.SaveSettled(epoch=2, save=SaveId(epoch=12, n=1, step=3), generation=None))
    saves.told(wire.SaveSettled(epoch=2, save=SaveId(epoch=12, n=0, step=2), generation=None))
    saves.await_stop(view, 4, lambda: member.over(view.id))  # whatever else has come to nothing meanwhile
    assert saves.stopping(view, 4), "whoever hears that it came to nothing before it looks does as the others"
