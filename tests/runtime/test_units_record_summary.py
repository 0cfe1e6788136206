"""What a coordinator takes over of a long journal: a summary and the newest entries, to the bits of reading all."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.test_record import REAL, story
from tests.runtime.test_units_server import Office, played

from outlast.config import RunConfig
from outlast.core import events as ev
from outlast.core.policy import RunRecord
from outlast.core.protocol import View, ViewId
from outlast.core.protocol import messages as m
from outlast.journal import CoordinatorClaim, Journal, sealed, unsealed
from outlast.runtime.coordinator import _record_summary
from outlast.runtime.coordinator._bookkeeping import Bookkeeping, ToldProgress
from outlast.runtime.coordinator._election import TurnSeeker
from outlast.runtime.coordinator._record_summary import SUMMARY, JournalFold, KnownSaves, RecordSummary
from outlast.runtime.transport.save_messages import COORDINATOR_RECORD

CONFIG = RunConfig(replicas=8)


def rich_story(seed: int) -> list[ev.AnyEvent]:
    """A drawn run in which also places are filled, views form, audits find something and losses leave their band."""
    rng, found = random.Random(seed), story(seed)
    for at in range(len(found), 3, -1):
        at_s, step = found[at - 1].at_s, rng.randrange(50)
        extra: list[ev.AnyEvent] = [
            ev.JoinerCaughtUp(at_s=at_s + rng.random(), replica=f"r{rng.randrange(8)}.2", step=step, seconds=1.0),
            ev.ViewFormed(at_s=at_s, epoch=1, n=at, step=step, roll_call_s=rng.random()),
            ev.ViewInstalled(
                at_s=at_s, epoch=1, n=at, members=["a"] * rng.randrange(1, 9), cause="", planned=False,
                num_microbatches=8,
            ),
            ev.AuditMismatch(
                at_s=at_s, step=step, microbatch=1, culprit=f"r{rng.randrange(3)}.0", host="h", device="d",
                verdict="persistent", evidence="", confidence=1.0, remedy="",
            ),
            ev.StateCertified(at_s=at_s, step=step, share=0.9, audited=rng.randrange(10**6)),
            ev.CheckpointFailed(at_s=at_s, step=step, cause="publish_failed", reason="", url=""),
            ev.SparesHeld(at_s=at_s, number=rng.randrange(4), worth=1, reason="", replicas=[]),
            ev.ProgressMade(
                at_s=at_s, view=[1, at], stable=step, losses=[(step, rng.choice([2.0, 900.0]))], step_s=rng.random(),
                until=10**6, first=step, committed=step + 1, committed_at_s=at_s,
            ),
        ]  # fmt: skip
        found.insert(at, rng.choice(extra))
    return found


STORIES = {**{f"drawn {seed}": rich_story(seed) for seed in range(6)}, **REAL}


def folded(events: Iterable[ev.AnyEvent], fold: JournalFold | None = None) -> JournalFold:
    fold = fold or JournalFold(CONFIG)
    for event in events:
        fold.take(event)
    return fold


def assert_same(one: JournalFold, other: JournalFold, at_s: float) -> None:
    """All that they say, and all that they hold."""
    for now_s in (at_s, at_s + 1234.5):
        assert one.record.believed(now_s) == other.record.believed(now_s)
        assert one.record.due_s(now_s) == other.record.due_s(now_s)
        assert one.record.state(now_s) == other.record.state(now_s)
    assert one.record.replacements() == other.record.replacements()
    assert one.record.spares_reason() == other.record.spares_reason()
    assert repr(vars(one.record)) == repr(vars(other.record)), "floats to the last digit, and NaN beside NaN"
    assert (list(one.begun), list(one.published)) == (list(other.begun), list(other.published))
    assert one.progress == other.progress
    assert one.dump() == other.dump()


@settings(max_examples=60, deadline=None)
@given(which=st.sampled_from(sorted(STORIES)), cuts=st.lists(st.floats(0, 1), min_size=1, max_size=3))
def test_a_fold_that_was_kept_and_the_rest_are_all(which: str, cuts: list[float]) -> None:
    """However often one coordinator follows another."""
    events = STORIES[which]
    places = [0, *sorted(int(cut * len(events)) for cut in cuts), len(events)]
    fold = JournalFold(CONFIG)
    for begin, end in itertools.pairwise(places):
        fold = folded(events[begin:end], fold.copy())
    assert_same(fold, folded(events), events[-1].at_s)


def test_of_saves_the_newest_and_the_furthest_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_record_summary, "_KNOWN", 3)
    saves = KnownSaves()
    steps = (1, 9, 2, 3, 9, 4, 5)  # after step 9 the run went back
    for number, step in enumerate(steps):
        saves.add(((1, number), step))
        again = KnownSaves()
        again.load(list(saves))
        assert vars(again) == vars(saves)
        assert list(again) == list(saves)
    assert list(saves) == [((1, 1), 9), ((1, 4), 9), ((1, 5), 4), ((1, 6), 5)]
    assert ((1, 1), 9) in saves
    assert ((1, 0), 1) not in saves


def test_what_is_kept_of_a_run_does_not_grow_with_it() -> None:
    fold, sizes = JournalFold(CONFIG), []
    for seed in range(40):
        folded(rich_story(seed), fold)
        sizes.append(len(fold.dump()))
    assert max(sizes) < 20_000
    assert sizes[-1] < 1.1 * sizes[20], "counts are longer numbers"


def test_who_was_found_wrong_again_at_the_same_step_counts_once() -> None:
    records = [RunRecord(), RunRecord()]
    for times, record in enumerate(records, 1):
        record.begin(0.0)
        for _ in range(times):
            record.take(
                ev.AuditMismatch(
                    at_s=1.0, step=4, microbatch=1, culprit="r1.0", host="h", device="d", verdict="persistent",
                    evidence="", confidence=1.0, remedy="",
                )
            )  # fmt: skip
    assert records[0].dump() == records[1].dump()


# --- beside a journal ------------------------------------------------------------------------------------------------
@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[ev.AnyEvent]:
    """What was folded; a summary is written every 10 entries."""
    seen: list[ev.AnyEvent] = []
    own = JournalFold.take

    def take(self: JournalFold, event: ev.AnyEvent) -> None:
        seen.append(event)
        own(self, event)

    monkeypatch.setattr(JournalFold, "take", take)
    monkeypatch.setattr(_record_summary, "_EVERY", 10)
    return seen


def filled(folder: Path, events: list[ev.AnyEvent]) -> Journal:
    journal = Journal.create(folder)
    journal.append_many(events)
    assert journal.flush()
    return journal


def test_a_takeover_reads_what_came_after_the_summary(tmp_path: Path, taken: list[ev.AnyEvent]) -> None:
    events = rich_story(1)
    with filled(tmp_path, events[:100]) as journal:
        RecordSummary(journal, journal.claim(""), CONFIG).follow()
        assert taken == events[:100]
        journal.append_many(events[100:130])
        assert journal.flush()
        taken.clear()
        summary = RecordSummary(journal, journal.claim(""), CONFIG)
        assert taken == events[100:130]
        assert_same(summary.taken(), folded(events[:130]), events[129].at_s)
        summary.follow()
        taken.clear()
        assert_same(RecordSummary(journal, journal.claim(""), CONFIG).taken(), summary.taken(), events[129].at_s)
        assert taken == []


def test_it_is_written_now_and_then_and_not_by_who_may_have_been_followed(
    tmp_path: Path, taken: list[ev.AnyEvent], monkeypatch: pytest.MonkeyPatch
) -> None:
    events, held = rich_story(2), [False]
    monkeypatch.setattr(Journal, "held", property(lambda self: held[0]))
    with filled(tmp_path, events[:9]) as journal:
        old = RecordSummary(journal, journal.claim(""), CONFIG)
        old.follow()
        held[0] = True
        old.follow()
        assert journal.get_here(SUMMARY) is None, "nine are few"
        journal.append(events[9])
        assert journal.flush()
        held[0] = False
        old.follow()
        assert journal.get_here(SUMMARY) is None
        held[0] = True
        new = RecordSummary(journal, journal.claim(""), CONFIG)
        old.follow()
        assert journal.get_here(SUMMARY) is None, "another has claimed"
        new.follow()
        written = journal.get_here(SUMMARY)
        assert written is not None
        journal.append_many(events[10:40])
        assert journal.flush()
        old.follow()
        assert journal.get_here(SUMMARY) == written
        new.follow()
        assert journal.get_here(SUMMARY) != written


def resealed(data: bytes, **changed: Any) -> bytes:
    """The same with other fields, and sound."""
    body = unsealed(_record_summary._MAGIC, data)
    assert body is not None
    stored = msgspec.structs.replace(msgspec.msgpack.decode(body, type=_record_summary._Stored), **changed)
    return sealed(_record_summary._MAGIC, msgspec.msgpack.encode(stored))


STRANGE: dict[str, Callable[[bytes], bytes]] = {
    "nothing": lambda data: b"",
    "garbage": lambda data: b"\xff" * 100,
    "torn": lambda data: data[:-7],
    "longer": lambda data: data + b"x",
    "one bit": lambda data: data[:-9] + bytes([data[-9] ^ 1]) + data[-8:],
    "another format": lambda data: data.replace(b"summary 1", b"summary 2"),
    "other code": lambda data: resealed(data, code=b"other"),
    "ahead": lambda data: resealed(data, seq=1000, ends=b""),
    "far ahead": lambda data: resealed(data, seq=2**62),
    "before the first": lambda data: resealed(data, seq=0, ends=b""),
    "another place": lambda data: resealed(data, seq=17),
    "other settings": lambda data: resealed(data, settings=(1.0, 2)),
    "another fold": lambda data: resealed(data, fold=msgspec.Raw(msgspec.msgpack.encode({"record": 1}))),
}


@pytest.mark.parametrize("kind", STRANGE)
def test_a_summary_that_cannot_be_relied_on_is_passed_over(kind: str, tmp_path: Path, taken: list[ev.AnyEvent]) -> None:
    events = rich_story(3)[:60]
    with filled(tmp_path, events) as journal:
        epoch = journal.claim("")
        RecordSummary(journal, epoch, CONFIG).follow()
        data = journal.get_here(SUMMARY)
        assert data is not None
        journal.put_here(epoch, SUMMARY, STRANGE[kind](data))
        taken.clear()
        summary = RecordSummary(journal, epoch, CONFIG)
        assert taken == events, "all is read"
        assert_same(summary.taken(), folded(events), events[-1].at_s)
        summary.follow()
        taken.clear()
        RecordSummary(journal, epoch, CONFIG)
        assert taken == [], "and a sound one is written"


def test_the_summary_of_another_journal_is_passed_over(tmp_path: Path, taken: list[ev.AnyEvent]) -> None:
    """Say one that was put back from a copy: it may have other entries by the same numbers."""
    first, second = rich_story(4)[:60], rich_story(5)[:60]
    with filled(tmp_path / "a", first) as one, filled(tmp_path / "b", second) as other:
        RecordSummary(one, one.claim(""), CONFIG).follow()
        data = one.get_here(SUMMARY)
        assert data is not None
        assert other.put_here(other.claim(""), SUMMARY, data)
        taken.clear()
        assert_same(RecordSummary(other, 1, CONFIG).taken(), folded(second), second[-1].at_s)
        assert taken[:60] == second, "all is read"


def test_a_disk_that_refuses_the_summary_ends_nothing(
    tmp_path: Path, taken: list[ev.AnyEvent], monkeypatch: pytest.MonkeyPatch
) -> None:
    with filled(tmp_path, rich_story(1)[:40]) as journal:
        summary = RecordSummary(journal, journal.claim(""), CONFIG)
        journal._record._connection.execute("PRAGMA query_only = 1")
        summary.follow()
        journal._record._connection.execute("PRAGMA query_only = 0")
        assert journal.get_here(SUMMARY) is None
        summary.follow()
        assert journal.get_here(SUMMARY) is not None


# --- through the coordinator -----------------------------------------------------------------------------------------
def started(folder: Path) -> None:
    """A run that a coordinator had, with the record of a view."""
    view = View(id=ViewId(1, 1), members=("r0.1", "r1.1"), start=True)
    record = m.FleetRecord(view=view, placement={"r0.1": "a0", "r1.1": "a0"})
    with Journal.create(folder) as journal:
        assert journal.put(journal.claim(""), COORDINATOR_RECORD, msgspec.msgpack.encode(record))


def test_a_coordinator_leaves_a_summary_and_its_successor_reads_the_rest(
    tmp_path: Path, taken: list[ev.AnyEvent], monkeypatch: pytest.MonkeyPatch
) -> None:
    started(tmp_path)
    told = [event for event in rich_story(1) if not isinstance(event, ev.RunStarted)]
    decoded: list[int] = []
    own = Journal._entry

    def entry(self: Journal, seq: int, body: str) -> Any:
        decoded.append(seq)
        return own(self, seq, body)

    async def first() -> None:
        office = Office(tmp_path)
        for event in told:
            office.server.write(**msgspec.to_builtins(event))
            assert office.journal.flush()
        summary = office.server.keeper.summary
        while (stored := office.journal.get_here(SUMMARY)) is None or summary._seq - summary._kept >= 10:
            await asyncio.sleep(0)
        assert stored
        office.close()

    async def second() -> None:
        with Journal.open_reader(tmp_path) as reader:
            rare = len(reader.events(kinds=[kind for kind in ev.AnyEvent.__args__ if kind is not ev.ProgressMade]))
            last = reader.last_seq
        monkeypatch.setattr(Journal, "_entry", entry)
        taken.clear()
        office = Office(tmp_path)
        assert len(taken) < 20
        assert sum(seq <= last for seq in decoded) < 2 * rare + 40
        decoded.clear()
        with Journal.open_reader(tmp_path) as reader:
            whole = JournalFold(RunConfig(replicas=2))
            for one in reader.events():
                if one.seq <= last:
                    whole.take(one.event)
            newest = reader.newest(ev.ProgressMade)[0].event
        assert isinstance(newest, ev.ProgressMade)
        server = office.server
        assert repr(vars(server.keeper._beliefs.record)) == repr(vars(whole.record))
        assert list(server.keeper._story._saved) == list(whole.published)
        assert server.books._beat.view == tuple(newest.view)
        assert (
            server.books._next_loss
            == max(step for e in told if isinstance(e, ev.ProgressMade) for step, _ in e.losses) + 1
        )
        office.close()

    played(first)
    played(second)


def test_progress_is_recalled_as_it_was_told_entry_by_entry() -> None:
    told = ToldProgress()
    assert Bookkeeping(told, print, 1.0, 0.0)._ledger.committed == 0
    for event in (
        ev.ProgressMade(
            at_s=1.0, view=[1, 2], stable=3, losses=[(3, 1.0), (4, 1.0)], step_s=0.5, until=9, first=3, committed=5,
            committed_at_s=100.0,
        ),
        ev.ProgressMade(at_s=2.0, view=[2, 3], stable=4, losses=[], step_s=0.25, until=9),
    ):  # fmt: skip
        told = told.after(event)
    books = Bookkeeping(told, print, 1.0, 40.0)
    assert (books._ledger.committed, books._ledger.until_s) == (5, 60.0)
    assert books._next_loss == 5
    assert (books._beat.view, books._beat.stable, books._beat.step_s) == ((2, 3), 4, 0.25)


def test_a_host_that_waits_for_its_turn_keeps_a_summary_of_its_own_journal(
    tmp_path: Path, taken: list[ev.AnyEvent]
) -> None:
    """What an earlier turn of the host wrote is not copied once more."""
    events, at = rich_story(2), [0]
    parts = [events[:30], events[30:60], events[60:65]]

    def tell(since: int, within_s: float) -> tuple[list[ev.AnyEvent], int]:
        at[0] += 1
        return parts[at[0] - 1], at[0]

    with filled(tmp_path, events[:12]) as journal:
        shared = SimpleNamespace(lease_s=1.0, story=tell, junk="")
        summary = RecordSummary(journal, journal.epoch_here, CONFIG)
        mine = CoordinatorClaim(epoch=0, token="", seat="b", host="b", address="h:2")
        seeker = TurnSeeker(
            cast(Any, shared), journal, mine, run="R", may_begin=False, alive=lambda: None, follow=summary.follow
        )
        for _ in parts:
            seeker._keep_up()
            assert journal.flush()
        assert [entry.event for entry in journal.events()] == events[:65]
        assert taken in (events[:60], events[:65]), (
            "each once; those told last may be on the disk already as they are read"
        )
        taken.clear()
        assert_same(RecordSummary(journal, journal.claim(""), CONFIG).taken(), folded(events[:65]), 1.8e9)
        assert len(taken) < 20 + 65
