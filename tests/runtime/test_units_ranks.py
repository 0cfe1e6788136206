"""What the ranks of a replica say to each other, what their lead makes of it, and what is refused with several."""

from __future__ import annotations

import functools
import math
import os
import queue
import re
import secrets
import socket
import subprocess
import sys
import threading
from collections import deque
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import torch

from outlast.config import RunConfig
from outlast.core.phases import Phase
from outlast.core.policy import Culprit, GuardNote
from outlast.core.protocol import View, ViewId
from outlast.core.protocol import messages as m
from outlast.core.protocol.saves.commit import SaveId
from outlast.errors import CheckpointError, ConfigError, MembershipError, StepMisuse, ViewAbandoned
from outlast.runtime.checks.lane_checks import RankLook, note_of_ranks, rows_of_ranks, seen_by_ranks
from outlast.runtime.exchange.plane import print_of_slice
from outlast.runtime.exchange.shard_sums import ShardSums
from outlast.runtime.host._children import Exit
from outlast.runtime.host._replica_ranks import Rank, patience_s, suspect
from outlast.runtime.joining._feeds import Share
from outlast.runtime.joining.inflow import Inflow
from outlast.runtime.loop import _assembly
from outlast.runtime.loop._device_mesh import _meeting_place, mesh_of
from outlast.runtime.member._followed_lane import FollowedLane
from outlast.runtime.member._rank_reports import path_of
from outlast.runtime.member._sibling_lanes import SiblingLanes, what_has_come
from outlast.runtime.member._siblings import Siblings
from outlast.runtime.member.follower import FollowingRank
from outlast.runtime.member.sibling_saves import SiblingSaves
from outlast.runtime.settings.protect_records import Audit
from outlast.runtime.settings.rank_limits import check_protected, check_ranks, check_sharded
from outlast.runtime.training._microbatches import Microbatches
from outlast.runtime.training.metrics import Metrics
from outlast.runtime.training.samples import DataNews, Samples
from outlast.runtime.training.step_checks import StepChecks
from outlast.runtime.transport import rank_channel
from outlast.runtime.transport import rank_words as say
from outlast.runtime.transport import save_messages as wire
from outlast.runtime.transport.connections import PeersLost
from outlast.runtime.transport.endpoints import lane_address, lanes_address
from outlast.runtime.transport.rank_channel import RankPipe, call_lead, meet_ranks
from outlast.runtime.transport.rank_check_words import LeafPrinted, LookAgain
from outlast.runtime.transport.rank_path_words import LaneAnswers, LaneStalled, ProbeLane
from outlast.tensors import BLOCK, Layout, grid_of

SECRET = b"s" * 16


class Pipe:
    """The lead's end of a stream, with what has arrived."""

    def __init__(self, place: int, *words: Any) -> None:
        self.place, self.words, self.said = place, deque(words), list[Any]()
        self.left = self.over = False
        self.failed: say.RankFailed | None = None
        self.wakes_too = -1
        self.on_saves: Any = None
        self.on_has: Any = None

    def take(self) -> Any:
        return self.words.popleft() if self.words else None

    def send(self, word: Any) -> None:
        self.said.append(word)


MOURNS = """
import os, socket, sys, threading
from outlast.runtime.member._siblings import Siblings
from outlast.runtime.transport.frames import read_frame
from outlast.runtime.transport.rank_channel import RankPipe
ours, theirs = socket.socketpair()
def goes():  # it is asked, and its end comes in place of an answer
    read_frame(theirs)
    theirs.close()
threading.Thread(target=goes).start()
Siblings([RankPipe(ours, 1)], os.eventfd(0)).all_there()
print("it said that its script had raised")
threading.Event().wait(60)
"""


def siblings(*pipes: Pipe) -> Siblings:
    return Siblings(cast(Any, pipes), os.eventfd(1, os.EFD_NONBLOCK | os.EFD_CLOEXEC))


def test_ranks_meet_their_lead_and_hear_it_in_order() -> None:
    member = f"r0.{secrets.token_hex(4)}"
    ours, theirs = (SECRET, "ours", member), (SECRET, "theirs", member)
    found: dict[int, Any] = {}
    others = [threading.Thread(target=lambda p=p: found.update({p: call_lead(*ours, p, 60)})) for p in (1, 2)]
    for other in others:
        other.start()
    with pytest.raises(MembershipError, match="did not come"):  # another run's lead under the same names and secret
        meet_ranks(*theirs, 3, 0.0)
    pipes = meet_ranks(*ours, 3, 60)
    for other in others:
        other.join(60)
    assert [pipe.place for pipe in pipes] == [1, 2]
    for step in range(3):
        for pipe in pipes:
            pipe.send(say.BeginStep(step))
    assert [found[2].wait_for(say.BeginStep).step for _ in range(3)] == [0, 1, 2]
    with pytest.raises(MembershipError, match="the lead said BeginStep where OpenWorld was due"):
        found[1].wait_for(say.OpenWorld)
    lead = Siblings(pipes, pipes[0].wake_fd)
    assert lead.all_there()
    assert lead.all_there(but=2)
    for pipe in (*pipes, *found.values()):
        pipe.over = True  # the end of a stream is now no loss


def test_a_rank_hears_of_a_views_end_while_its_lead_waits_for_it() -> None:
    """Out of the order of the lead's words, as the lead may be in a collective of the script: once for each view."""
    ours, theirs = (RankPipe(end, 1) for end in socket.socketpair())
    lead, over = Siblings([ours], os.eventfd(0, os.EFD_NONBLOCK)), set[ViewId]()
    lead.hear_of_end(over.__contains__)
    for n in (1, 2):
        view = View(id=ViewId(1, n), members=("r0.1", "r1.1"))
        lead.form(view, {}, ())
        lead.hear_of_end(over.__contains__)
        over.add(view.id)
        lead.hear_of_end(over.__contains__)
        lead.hear_of_end(over.__contains__)
        lead.begin_step(n)
        assert theirs.wait_for(say.FormLane).view == view
        assert theirs.wait_for(say.BeginStep).step == n
        assert theirs.view_over == view.id
    ours.over = theirs.over = True


def test_a_rank_that_does_not_come_is_named() -> None:
    with pytest.raises(MembershipError, match="rank 1, 2 of this replica did not come in 0 s"):
        meet_ranks(SECRET, "ours", f"r0.{secrets.token_hex(4)}", 3, 0.0)
    with pytest.raises(MembershipError, match="did not answer in 0 s"):
        call_lead(SECRET, "ours", f"r0.{secrets.token_hex(4)}", 1, 0.0)


def test_a_lead_that_is_stopped_while_it_waits_goes_on_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was stopped for longer than its patience: meanwhile nobody could come in."""
    member, now_s, readable = f"r0.{secrets.token_hex(4)}", [0.0], rank_channel._readable
    found: list[Any] = []
    other = threading.Thread(target=lambda: found.append(call_lead(SECRET, "ours", member, 1, 60)))

    def stopped_at_first(fd: int, timeout_s: float) -> None:
        if not now_s[0]:
            now_s[0] = 1000.0
            other.start()
        else:
            readable(fd, timeout_s)

    monkeypatch.setattr(rank_channel, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    monkeypatch.setattr(rank_channel, "_readable", stopped_at_first)
    (pipe,) = meet_ranks(SECRET, "ours", member, 2, 60)
    other.join(60)
    pipe.over = found[0].over = True


def test_a_rank_that_is_stopped_while_it_calls_calls_again(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, lasts_s, (here, there) = [0.0], [1000.0], socket.socketpair()

    def reach(*_: Any) -> socket.socket:
        if not lasts_s:
            return here
        now_s[0] += lasts_s.pop()
        raise TimeoutError

    monkeypatch.setattr(rank_channel, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    monkeypatch.setattr(rank_channel, "reach", reach)
    call_lead(SECRET, "ours", "r0.1", 1, 20).over = True
    there.close()
    now_s, lasts_s = [0.0], [30.0] * 10
    with pytest.raises(MembershipError, match="did not answer in 60 s"):
        call_lead(SECRET, "ours", "r0.1", 1, 60)
    assert len(lasts_s) == 7, "a lead that does not answer is not called for ever"


def test_where_ranks_meet_is_reached_at_one_address_alone() -> None:
    pipe = Pipe(1)
    env = SimpleNamespace(config=SimpleNamespace(start_s=20.0), lead=None, pipes=[pipe])
    store = _meeting_place(cast(Any, env), 2)
    host, port = pipe.said[0].store.split(":")
    socket.create_connection((host, int(port)), 20).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", int(port)), 20)
    store.set("it", "works")
    assert store.get("it") == b"works"


def test_only_answers_to_the_newest_question_count() -> None:
    pipe = Pipe(1, say.LaneTaken(1), say.LaneBroken(1, ("r2.1",), "old"))
    lead = siblings(pipe)
    for _ in range(2):
        lead.ask(lambda number: say.TakeOutcome(number, 3, "r1.1"))
    pipe.words.append(say.LaneTaken(2))
    assert lead.gather(say.LaneTaken) == [say.LaneTaken(2)]
    lead.drop()
    pipe.words += [say.LaneTaken(2), say.LaneBroken(3, ("r2.1",), "gone")]
    with pytest.raises(PeersLost) as lost:
        lead.gather(say.LaneTaken)
    assert lost.value.suspects == ("r2.1",)


def test_a_wait_for_lanes_ends_with_the_view() -> None:
    def over() -> None:
        raise ViewAbandoned("a newer view")

    with pytest.raises(ViewAbandoned, match="a newer view"):
        siblings(Pipe(1)).gather(say.LaneTaken, over)


def test_a_wait_for_lanes_that_takes_too_long_is_told_again_and_again() -> None:
    pipe, now, told = Pipe(1), [0.0], list[float]()
    awake = os.eventfd(1, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    lead = Siblings(cast(Any, [pipe]), awake, told.append, lambda: 2.0, lambda: now[0])

    def wait() -> None:
        now[0] += 1.0
        if now[0] == 6.0:
            pipe.words.append(say.LaneTaken(0))

    assert lead.gather(say.LaneTaken, wait) == [say.LaneTaken(0)]
    assert told == [2.0, 4.0, 6.0]


def test_a_rank_that_has_left_its_loop_is_not_waited_for_to_print_what_it_computed() -> None:
    pipe = Pipe(1, say.LaneTaken(0), LeafPrinted(7))
    pipe.left = True
    lead = siblings(pipe)
    assert lead.printed() == [7], "it said so before it left"
    with pytest.raises(StepMisuse, match="rank 1 of the replica ended its loop while the lead trains on"):
        lead.printed()


def test_words_of_a_lane_s_paths_pass_by_the_others() -> None:
    member, answers = f"r0.{secrets.token_hex(4)}", queue.SimpleQueue[Any]()
    found: list[Any] = []
    other = threading.Thread(target=lambda: found.append(call_lead(SECRET, "ours", member, 1, 60)))
    other.start()
    (pipe,) = meet_ranks(SECRET, "ours", member, 2, 60)
    other.join(60)
    pipe.on_path = answers.put
    stalled = LaneStalled(ViewId(1, 2), int(Phase.SCATTERED), ("r1.1",), 2.0, 1.5)
    answered = LaneAnswers(ViewId(1, 2), ("r2.1",))
    for word in (stalled, answered):
        found[0].send(word)
        assert answers.get(timeout=60) == word
    assert pipe.take() is None, "no answer to anything"
    message = path_of("r0.1", 1, stalled)
    assert isinstance(message, m.Stalled)
    assert (message.member, message.view, message.missing) == ("r0.1", ViewId(1, 2), ("r1.1",))
    assert path_of("r0.1", 1, answered) == m.Rows(member="r0.1", view=ViewId(1, 2), reached=("r2.1",), place=1)
    found[0].wakes_too = os.eventfd(0)
    pipe.send(ProbeLane(ViewId(1, 2)))
    os.eventfd_read(found[0].wakes_too)
    assert found[0].to_probe == ViewId(1, 2)
    assert found[0].take() is None
    os.close(found[0].wakes_too)
    pipe.over = found[0].over = True


def test_a_lane_that_waits_pings_once_when_it_is_asked_to() -> None:
    lane, pinged = object.__new__(FollowedLane), list[str]()
    told = queue.SimpleQueue[Any]()
    lane.mesh = cast(Any, SimpleNamespace(ping=lambda: pinged.append("all"), answered={"r2.1"}))
    lane.pipe = cast(Any, SimpleNamespace(send=told.put, inbox=(), view_over=ViewId(1, 1), to_probe=ViewId(1, 1)))
    view = View(id=ViewId(1, 2), members=("r0.1", "r1.1", "r2.1"))
    assert not lane._over(view), "of the view before"
    lane.pipe.to_probe = view.id
    assert not lane._over(view)
    assert told.get(timeout=60) == LaneAnswers(view.id, ("r2.1",))
    assert not lane._over(view)
    assert pinged == ["all"]


def rank_at(place: int, phase: Phase, silent_s: float, allowed_s: float = math.inf) -> Rank:
    read = (phase, 3, -1, 100.0 - silent_s, allowed_s)
    key = f"r0.1.rank{place}" if place else "r0.1"
    return Rank("r0.1", cast(Any, None), cast(Any, SimpleNamespace(read=lambda: read)), cast(Any, None), key=key)


@pytest.mark.parametrize(
    ("ranks", "chosen", "deaf"),
    [
        ([(Phase.GATHERED, 9.0, 1.0), (Phase.MERGE, 9.0, 1.0)], 1, False),  # its lead waits for it
        ([(Phase.MERGE, 9.0, 1.0), (Phase.SCATTERED, 0.9, 1.0)], 0, False),
        ([(Phase.GATHERED, 9.0, 1.0), (Phase.SCATTERED, 0.9, 1.0)], 0, False),  # they wait for another replica
        ([(Phase.GATHERED, 9.0, 1.0), (Phase.SCATTERED, 9.0, 1.0)], 1, True),  # it would have said so
        ([(Phase.BACKWARD, 9.0, 1.0), (Phase.LOAD, 9.0)], 1, False),  # a slow disk is the loop's own matter
        ([(Phase.BACKWARD, 9.0, 1.0), (Phase.BACKWARD, 8.0, 2.0)], 1, False),
        ([(Phase.BODY, 9.0), (Phase.IDLE, 99.0)], 0, False),
        ([(Phase.GATHERED, 9.0, 1.0), (Phase.IDLE, 99.0)], 0, False),
        ([(Phase.BODY, 9.0), (Phase.COMMIT, 9.0, 1.0)], 1, False),
        ([(Phase.GATHERED, 9.0, 1.0)], 0, False),  # a lead is asked by its peers
    ],
)
def test_which_rank_a_silence_is_laid_to(ranks: list[Any], chosen: int, deaf: bool) -> None:
    found = [rank_at(place, *row) for place, row in enumerate(ranks)]
    assert suspect(found, 100.0, 60.0, 30.0) == (found[chosen], deaf)


def test_ranks_that_were_given_other_arguments_are_told_apart() -> None:
    lead = siblings(Pipe(1, say.RankReady("a", {"seed": "1"})), Pipe(2, say.RankReady("b", {"seed": "2"})))
    with pytest.raises(StepMisuse, match="differ in seed: 1 on the lead, 2 on rank 2"):
        lead.meet({"seed": "1"})


def test_a_rank_that_left_its_loop_is_not_waited_for() -> None:
    pipe = Pipe(1)
    pipe.left = True
    with pytest.raises(StepMisuse, match="rank 1 of the replica ended its loop"):
        siblings(pipe).gather(say.LaneTaken)


def test_what_a_collective_raises_where_a_rank_has_left_its_loop_is_told_as_that() -> None:
    torn, own = RuntimeError("Connection closed by peer"), StepMisuse("twice")
    lead = siblings(Pipe(1), Pipe(2))
    assert lead.told_as(torn) is torn
    assert lead.raised() is None
    cast(Any, lead.pipes[1]).left = True
    assert "rank 2 of the replica ended its loop while the lead trains on" in str(lead.told_as(torn))
    assert lead.told_as(own) is own
    cast(Any, lead.pipes[1]).failed = say.RankFailed(3, "ValueError", "at a line", 5)
    assert lead.raised() == say.RankFailed(3, "ValueError", "at a line", 5)


def following(*words: Any) -> FollowingRank:
    """A rank that is no lead, to which its lead has said this."""
    rank = object.__new__(FollowingRank)
    rank.pipe, rank.saves, rank.ended, rank._left = cast(Any, Pipe(0, *words)), None, None, False
    rank.env = cast(Any, SimpleNamespace(place=1, me="r0.1"))
    rank.engine = cast(Any, SimpleNamespace(begun=lambda step: None))
    rank.donor = rank.checks = cast(Any, SimpleNamespace(feed_whole=None, rows=None))
    return rank


@pytest.mark.parametrize("goes_on", [say.BeginStep(4), say.ComputeLeaf(3, 2), say.EvaluateBatches(1, (0,), 4)])
def test_a_rank_that_leaves_its_loop_alone_says_so(goes_on: Any) -> None:
    """Its script would meet the lead's in collectives that are not the same."""
    found = following(goes_on).broke()
    assert isinstance(found, StepMisuse)
    assert "the lead of this replica" in str(found)
    assert "rank 1 of r0.1" in str(found)


def test_ranks_that_leave_their_loops_alike_go_on() -> None:
    assert following(say.LoopLeft()).broke() is None


def test_a_rank_whose_lead_has_left_the_loop_does_not_wait_for_a_step() -> None:
    for asks in (lambda: following(say.LoopLeft()).next_step(), lambda: next(following(say.LoopLeft()).batches(3))):
        with pytest.raises(StepMisuse, match="ended its loop, and this rank trains on"):
            asks()


def test_one_rank_has_nobody_to_tell() -> None:
    alone = siblings()
    alone.meet({"seed": "1"})
    assert alone.with_theirs((3, 7)) == (3, 7)
    assert not alone.some


def test_the_number_of_ranks() -> None:
    check_ranks(RunConfig(ranks=8))
    with pytest.raises(ConfigError, match="no power of two"):
        check_ranks(RunConfig(ranks=6))


@pytest.mark.parametrize(
    ("shard", "tp", "pipeline", "says"),
    [
        (2, None, None, r"run.mesh\(shard=2\) in a replica of 4 ranks"),
        (4, 2, None, r"run.mesh\(shard=4, tp=2\).*outlast run --ranks 8"),
        (None, 3, None, r"run.mesh\(tp=3\)"),
        (None, 0, None, r"run.mesh\(tp=0\)"),
        (None, None, 8, r"run.mesh\(pipeline=8\) in a replica of 4 ranks.*outlast run --ranks 8"),
        (None, None, 0, r"run.mesh\(pipeline=0\)"),
        (2, None, 2, r"run.mesh\(shard=2, pipeline=2\): a pipeline whose stages are spread.*pipeline=4"),
        (None, None, 2, r"run.mesh\(pipeline=2\): a pipeline whose stages are spread"),
    ],
)
def test_a_mesh_of_other_ranks_is_refused(shard: int | None, tp: int | None, pipeline: int | None, says: str) -> None:
    env = cast(Any, SimpleNamespace(width=4, tensor_parallel=1, stages=1))
    with pytest.raises(ConfigError) as caught:
        mesh_of(env, shard, tp, pipeline)
    assert re.search(says, str(caught.value), re.DOTALL)
    assert (env.tensor_parallel, env.stages) == (1, 1)


def test_what_looks_at_whole_tensors_is_refused_with_shards_on_one_rank_too() -> None:
    check_sharded(None)
    with pytest.raises(ConfigError, match="cannot be had with a model that is sharded"):
        check_sharded("abft")


def test_what_the_script_asks_for_is_refused_too() -> None:
    good: dict[str, Any] = {
        "checks": None, "device": "cpu",
    }  # fmt: skip
    check_protected(2, 2, 8, [2] * 8, **good)
    with pytest.raises(ConfigError, match="9 microbatches cannot be dealt to 2 ranks"):
        check_protected(2, 2, 9, [2] * 9, **good)
    with pytest.raises(ConfigError, match="every rank needs one"):
        check_protected(2, 2, 8, [1] * 7 + [0], **good)
    check_protected(2, 1, 9, [2] * 9, **good)  # which compute each microbatch together
    wrong = {"checks": "abft", "device": "cuda"}
    for key, value in wrong.items():
        check_protected(1, 1, 8, [1] * 8, **good | {key: value})
        with pytest.raises(ConfigError, match="cannot be had with replicas of 2 ranks yet"):
            check_protected(2, 2, 8, [1] * 8, **good | {key: value})


def test_the_end_of_a_replica_is_that_of_the_rank_that_failed_first() -> None:
    def rank(signal: int | None, code: int | None, swept: bool = False) -> Rank:
        began = cast(Any, SimpleNamespace(changes=1))
        made = Rank("r0.1", cast(Any, SimpleNamespace()), began, cast(Any, None), swept=swept)
        made.how = Exit(signal=signal, code=code)
        return made

    lost = MembershipError.exit_code
    for lead, sibling, first in (
        (rank(None, lost), rank(9, None), 1),  # killed from outside; its lead ended as the stream did
        (rank(9, None), rank(None, lost), 0),
        (rank(None, 1), rank(9, None), 1),  # a collective of the lead's script raised
        (rank(None, 1), rank(9, None, swept=True), 0),  # the agent killed the other
        (rank(None, lost), rank(9, None, swept=True), 0),
        (rank(None, 0), rank(None, 0), 0),
    ):
        lead.siblings = [sibling]
        assert lead.first_to_fail() is (lead, sibling)[first]
        assert lead.all() == []


def test_ranks_that_all_raise_are_there() -> None:
    """The thread that reads a rank's words asks the others before it tells what that one raised: none waits for
    another that does the same."""
    member, failed = f"r0.{secrets.token_hex(4)}", list[int]()
    found: dict[int, Any] = {}
    others = [
        threading.Thread(target=lambda p=p: found.update({p: call_lead(SECRET, "r", member, p, 60)})) for p in (1, 2)
    ]
    for other in others:
        other.start()
    pipes = meet_ranks(SECRET, "r", member, 3, 60)
    for other in others:
        other.join(60)
    lead, both, told = Siblings(pipes, pipes[0].wake_fd), threading.Barrier(2), threading.Semaphore(0)

    def heard(place: int) -> None:
        both.wait(60)  # each has heard of a failure before either asks
        failed.extend([place] if lead.all_there(but=place) else [])
        told.release()

    for pipe in pipes:
        pipe.on_failed = lambda _, place=pipe.place: heard(place)
    for rank in found.values():
        rank.send(say.RankFailed(0, "ValueError", "at a line", 5))
    assert all(told.acquire(timeout=60) for _ in pipes)
    assert sorted(failed) == [1, 2]
    assert lead.all_there(), "who has raised is there as well"
    for pipe in (*pipes, *found.values()):
        pipe.over = True


@pytest.mark.process
def test_a_lead_whose_rank_is_gone_does_not_say_that_its_script_raised() -> None:
    """A collective of the script fails when another rank is killed, perhaps before the stream to that one ends."""
    done = subprocess.run([sys.executable, "-c", MOURNS], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (MembershipError.exit_code, "", "")


def test_ranks_that_begin_with_different_states_are_told_apart() -> None:
    view = View(id=ViewId(1, 1), members=("r0.1",), start=True)
    for step, right in ((4, True), (3, False)):
        pipe = Pipe(1)
        begun = siblings(pipe).begin_run(view)
        assert pipe.said == [say.BeginRun(1, view)]
        pipe.words.append(say.RunBegun(1, step))
        if right:
            begun(4)
        else:
            with pytest.raises(CheckpointError, match="rank 1 of the replica has loaded step 3, and its lead step 4"):
                begun(4)


def test_of_what_the_coordinator_says_of_saves_the_other_ranks_hear_what_becomes_of_them() -> None:
    pipe, sent = Pipe(1), list[Any]()
    lead = siblings(pipe)
    saves = SiblingSaves(lead, sent.extend)
    save = SaveId(epoch=1, n=1, step=4)
    base, settled = wire.SaveBase(epoch=1, base=3), wire.SaveSettled(epoch=1, save=save, generation=7)
    for message in (base, wire.SaveNow(epoch=1, number=2, reason="asked"), settled, None):
        saves.said(message)
    assert pipe.said == [say.SavesHear(base), say.SavesHear(settled), say.SavesHear(None)]
    lost = wire.SaveLost(member="r0.1", save=save, writer=1, reason="full")
    pipe.on_saves(say.SavesSay((lost,)))
    assert sent == [lost]
    assert saves.ready
    lead.can_save = False
    assert not saves.ready


def test_a_joining_lead_counts_what_its_other_ranks_have_of_this_serving() -> None:
    pipes = [Pipe(1), Pipe(2)]
    lanes = SiblingLanes(siblings(*pipes))
    lanes.serve((4, 1))
    assert [pipe.said for pipe in pipes] == [[say.ServedAs((4, 1))]] * 2
    for pipe, serve, committed, until in (
        (pipes[0], (4, 1), 7, 9), (pipes[1], (3, 1), 7, 99), (pipes[1], (4, 1), -1, 0), (pipes[1], (4, 1), 7, 8),
    ):  # fmt: skip
        assert not lanes.whole((4, 1))
        assert not lanes.has(7)
        pipe.on_has(say.LaneHas(serve, committed, until))
    assert lanes.whole((4, 1))
    assert not lanes.whole((5, 1))
    assert set(lanes.steps()) == {7}
    assert [lanes.has(step) for step in (7, 8)] == [True, False]
    lanes.over()
    assert not lanes.has(7)
    assert [pipe.said[-1] for pipe in pipes] == [say.JoinedView()] * 2


def test_a_joining_lead_waits_for_what_its_lanes_were_sent_until_the_view_is_over() -> None:
    view = View(id=ViewId(1, 3), members=("r0.1", "r1.2"), start=False)
    for ended in (False, True):
        pipe = Pipe(1)
        lanes = SiblingLanes(siblings(pipe))
        lanes.drain(view, switched=True)
        assert pipe.said == [say.DrainLane(1, view, True)]
        if not ended:
            pipe.words.append(say.LaneDrained(1))
        lanes.drained(view, functools.partial(bool, ended))
        assert pipe.said[1:] == ([say.DropLane(2)] if ended else [])


@pytest.mark.parametrize(
    ("rows", "committed"),
    [([(7, 0, 50), (7, 50, 90)], -1), ([(7, 50, 100), (7, 0, 50)], 7), ([(7, 0, 50), (8, 50, 100)], -2)],
)
def test_what_has_come_of_a_state(rows: list[tuple[int, int, int]], committed: int) -> None:
    """Not all of it; all of it; all of it, of two steps."""
    inflow = object.__new__(Inflow)
    inflow.serving, inflow.loaded, inflow.steps = (4, 1), False, {}
    shares = [Share(step, lo, hi, 100, b"plain" if not lo else b"") for step, lo, hi in rows]
    inflow.shares = [((4, 1), share, memoryview(b"")) for share in shares]
    inflow.shares.append(((3, 1), Share(1, 0, 100, 100, b"of a serving that was called off"), memoryview(b"")))
    assert what_has_come(inflow).committed == committed


def test_the_address_of_a_replica_is_that_of_all_its_ranks() -> None:
    address = lanes_address(["a b 1", "c", "d"])
    assert [lane_address(address, place) for place in range(4)] == ["a b 1", "c", "d", ""]
    assert lane_address(lanes_address(["alone"]), 0) == "alone"
    assert lane_address("", 0) == ""


class Lane:
    """What a lane's plane is asked, in order. `over_at`: the bucket at which its view ends."""

    def __init__(self, over_at: int = -1) -> None:
        self.asked, self.over_at, self.task = list[Any](), over_at, cast(Any, None)

    def begin(self, task: Any) -> None:
        self.asked.append("begin")
        self.task = task

    def offer(self, bucket: int) -> None:
        if bucket == self.over_at:
            raise ViewAbandoned("over")
        self.asked.append(bucket)

    def finish(self) -> str:
        return "found"


def followed(plane: Lane) -> tuple[Any, list[Phase]]:
    """A rank that is no lead, in a view of two replicas, which holds one sum and makes another."""
    lane, entered = object.__new__(FollowedLane), list[Phase]()
    lane.env = cast(Any, SimpleNamespace(me="r1.1"))
    lane.mesh = cast(Any, SimpleNamespace(view=View(id=ViewId(1, 1), members=("r0.1", "r1.1"))))
    lane.plane, lane._begun, lane._compares = cast(Any, plane), None, False
    sums = SimpleNamespace(slots={(2, 4): 7}, after=lambda: {(2, 4): 5})
    lane.engine = cast(Any, SimpleNamespace(
        sums=sums, num_leaves=4, scale=lambda step: 0.25, layout=SimpleNamespace(buckets=[0, 1, 2]),
        loop=SimpleNamespace(check=lambda: None), checks=None, step_checks=StepChecks(),
    ))  # fmt: skip
    lane.clock = cast(Any, SimpleNamespace(enter=lambda phase, step, leaf: entered.append(phase)))
    return lane, entered


TASK = say.LaneTask(3, (((0, 2),), ((2, 4),)), True)


def test_a_rank_exchanges_under_the_last_backward_and_offers_nothing_twice() -> None:
    plane = Lane()
    lane, entered = followed(plane)
    assert lane.announcer(say.ComputeLeaf(3, 2)) is None
    announce = lane.announcer(say.ComputeLeaf(3, 3, TASK))
    for bucket in range(3):
        announce(bucket)
    assert plane.asked == ["begin", 0, 1, 2]
    assert (plane.task.slots, plane.task.nodes) == ((5,), TASK.nodes), "where the sum will lie"
    assert entered == [Phase.BACKWARD] * 3, "in which a rank may wait for others"
    assert lane._reduced(say.ReduceLane(1, TASK)) == "found"
    assert plane.asked == ["begin", 0, 1, 2]
    assert lane._reduced(say.ReduceLane(2, TASK)) == "found"  # nothing began under a backward
    assert plane.asked == ["begin", 0, 1, 2] * 2
    assert plane.task.slots == (7,)


def test_an_exchange_that_began_in_a_view_that_ended_begins_anew() -> None:
    plane, next_one = Lane(over_at=1), Lane()
    lane, _ = followed(plane)
    announce = lane.announcer(say.ComputeLeaf(3, 3, TASK))
    for bucket in range(3):
        announce(bucket)  # a hook never raises
    assert plane.asked == ["begin", 0]
    lane.plane = next_one
    assert lane._reduced(say.ReduceLane(1, TASK)) == "found"
    assert next_one.asked == ["begin", 0, 1, 2]


@pytest.mark.parametrize(
    "asked", [say.GiveOutcome(5, 3, ("r0.1",)), LookAgain(5, ((0, "r0.1"),)), say.ReduceLane(5, TASK)]
)
def test_a_peer_that_dies_while_a_rank_waits_for_it_breaks_the_lane_and_ends_no_replica(asked: Any) -> None:
    """Every replica that is left would have failed in the same step, which is taken for the script's fault."""

    def lost(*_: Any) -> Any:
        raise PeersLost(("r0.1",))

    lane, _ = followed(cast(Any, SimpleNamespace(begin=lost, look_again=lost, give=lost, close=lambda: None)))
    lane.pipe, lane.mesh.close, lane.enter = Pipe(0), lambda: None, lambda phase: None
    lane.clock.interrupted, lane.engine.told = lambda: None, lambda joined: b""
    acts = {say.GiveOutcome: lane._give, LookAgain: lane._look_again, say.ReduceLane: lane._reduce}
    acts[type(asked)](asked)
    (told,) = lane.pipe.said
    assert isinstance(told, say.LaneBroken)
    assert (told.number, told.suspects, lane.plane) == (5, ("r0.1",), None)


def test_what_goes_wrong_with_the_data_of_another_rank_is_told_by_its_lead() -> None:
    member, found, heard = f"r0.{secrets.token_hex(4)}", list[Any](), threading.Event()
    other = threading.Thread(target=lambda: found.append(call_lead(SECRET, "ours", member, 1, 60)))
    other.start()
    (pipe,) = meet_ranks(SECRET, "ours", member, 2, 60)
    other.join(60)
    noted: list[Any] = []

    def on_noted(word: Any) -> None:
        noted.append(word)
        heard.set()

    pipe.on_noted = on_noted
    engine, env = SimpleNamespace(samples=SimpleNamespace(tell=None)), SimpleNamespace(me="r0.1", lies="")
    made = SimpleNamespace(pipe=found[0], ready=lambda: None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_assembly, "FollowingRank", lambda *given: made)
        _assembly._following(cast(Any, env), cast(Any, engine), {}, cast(Any, None), None, Audit())
    engine.samples.tell(DataNews(what="hung", step=3, text="worker 0 hangs at sample 7", microbatch=5, samples=(7,)))
    assert heard.wait(60)
    assert noted == [
        m.DataNoted(member="r0.1", what="hung", step=3, text="worker 0 hangs at sample 7", microbatch=5, samples=(7,))
    ]
    assert pipe.take() is None, "it is no part of the order of the others"
    for each in (pipe, found[0]):
        each.over = True


def test_words_survive_the_wire() -> None:
    said = say.LaneReduced(
        number=1, fingerprint=2**64 - 1, norms=((0, 2, 1.5),), used=b"\x01", losses=((3, 0.5, 4.0),),
        metrics=((3, "correct", 1.0, 4.0),), state=7, settings=2**64 - 2,
    )  # fmt: skip
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(said), type=say.LaneReduced) == said


def test_who_ends_by_anothers_doing_leaves_that_one_the_time_to_say_why() -> None:
    assert patience_s(Exit(signal=None, code=MembershipError.exit_code)) > 0.5
    assert patience_s(Exit(signal=9, code=None)) == patience_s(Exit(signal=None, code=1)) == 0.0
    sent: list[tuple[int, int]] = []
    ranks = [
        Rank("r0.1", cast(Any, SimpleNamespace(send=lambda number, place=place: sent.append((place, number)))),
             cast(Any, None), cast(Any, None))
        for place in range(3)
    ]  # fmt: skip
    lead, ended, living = ranks
    lead.siblings, lead.how, ended.how = [ended, living], Exit(signal=None, code=4), Exit(signal=None, code=1)
    lead.sweep()
    assert sent == [(2, 9)]
    assert [rank.swept for rank in ranks] == [False, False, True]


def test_what_ranks_saw_is_told_of_whose_microbatch_it_was() -> None:
    """The sum of all ranks is not finite in the rows of one; another one made it so, or nobody saw who."""
    mine = RankLook(Culprit(replica="r0.1", microbatch=4, samples=(1, 2), reproduced=True, parameter="w"), hit=False)
    other = RankLook(Culprit(replica="r0.1", microbatch=5, samples=(7,), sure=True, operation="log"), hit=True)
    (found,) = seen_by_ranks([mine, other])
    assert (found.microbatch, found.samples, found.operation, found.parameter) == (5, (7,), "log", "w")
    assert found.reproduced
    (nobody,) = seen_by_ranks([mine, mine])
    assert (nobody.microbatch, nobody.samples, nobody.parameter, nobody.reproduced) == (-1, (), "w", True)
    assert seen_by_ranks([mine]) == [mine.culprit]


def test_ranks_say_one_thing_to_guards_and_of_each_tensor() -> None:
    dead = (("up", "dead"),)
    said = note_of_ranks([GuardNote(full=5, collapsed=dead), GuardNote(full=7, collapsed=dead)])
    assert said == GuardNote(full=12, collapsed=(("up", "dead"),))
    assert note_of_ranks([GuardNote(), GuardNote()]) == GuardNote()
    assert rows_of_ranks([(("w", 1), ("b", 2)), (("w", 4),)]) == (("w", 5), ("b", 2))


def test_who_has_none_but_samples_that_are_left_out_takes_others() -> None:
    """All ranks go through the model together; what it computes counts nothing. As many: BatchNorm refuses one."""
    samples = Samples(list(range(32)), global_batch_size=8, microbatches=4, seed=1, shuffle=False)
    samples.leave_out([2, 3])
    assert samples.sizes(0) == [2, 0, 2, 2]
    assert samples.indices(0, 1) == []
    samples.never_empty = True
    others = samples.indices(0, 1)
    assert len(others) == 2
    assert not {2, 3} & set(others)
    assert samples.sizes(0) == [2, 0, 2, 2]


@pytest.mark.parametrize("left_out", [[0], [0, 1, 2, 3]])
def test_what_stands_in_for_left_out_samples_leaves_nothing(
    left_out: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in one process, which has no such microbatch go through the model: no gradient, loss, metric or buffer."""
    found = object.__new__(Microbatches)
    found.samples = Samples(list(range(32)), global_batch_size=4, microbatches=4, seed=1, shuffle=False)
    found.samples.leave_out(left_out)
    found.state = cast(Any, SimpleNamespace(stages=None))
    found.shards, found.robust, found.witness, found.step_checks = ShardSums(0, 2), None, None, StepChecks()
    found.sums = cast(Any, SimpleNamespace(begin=lambda *_: None, end=lambda: None, used=bytearray(1)))
    found.losses, found.metrics, found.stop_wanted = {}, Metrics(), ""
    found._start_buffers, found._buffers = [torch.tensor([7.0])], [torch.tensor([9.0])]
    given = torch.tensor([float("inf"), -1.0])
    monkeypatch.setattr(torch.distributed, "all_to_all_single", lambda received, given, group: received.copy_(given))
    out = torch.empty(1)

    found.begin(0, 0, None)
    found.shards(out, given, SimpleNamespace(size=lambda: 2), None)
    found.sums.used[0] = 1
    found.end(0, 0, float("nan"))
    found.metrics.put(0, "correct", 1.0, 1.0)

    assert given.view(torch.int32).tolist() == [0, 0], "zero, and not below it"
    assert (out.item(), found.losses) == (0.0, {0: (0.0, 0.0)})
    assert found.end_buffers == (torch.tensor([7.0]).numpy().tobytes(),)
    said = found.evidence([0], {}, 0)
    assert (said["metrics"], said["used"]) == ((), bytes([int(len(left_out) < 4)]))


def test_what_lies_between_the_blocks_of_shards_is_in_no_fingerprint() -> None:
    """Parameters begin on cache lines: a slice has gaps, where a sum's memory may hold what it likes."""
    params = [torch.zeros(3, 5), torch.zeros(7)]
    layout = Layout(params, 1 << 20, grid=grid_of([(3, 5), (7,)], 0, 1, BLOCK))
    (bucket,) = layout.buckets
    values = torch.arange(bucket.numel, dtype=torch.float32)
    other = values.clone()
    other[7] = -1.0  # seven elements, and a gap
    assert bucket.params[0][2] == 7
    assert print_of_slice(bucket, other, 0) == print_of_slice(bucket, values, 0)
    other[6] = -1.0
    assert print_of_slice(bucket, other, 0) != print_of_slice(bucket, values, 0)
    assert [bucket.place(lo) for lo, _, _ in bucket.stretches(0, bucket.numel)] == list(range(bucket.num_blocks))
