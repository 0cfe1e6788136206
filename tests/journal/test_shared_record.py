"""The record in a real etcd of three members: who has been followed writes nothing, and the story goes along."""

from __future__ import annotations

import contextlib
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.journal.etcd_members import Members, start_members
from tests.ports import free_ports

from outlast.cli._run import _check_record
from outlast.config import RunConfig, encoded, resolve
from outlast.core import events as ev
from outlast.core.protocol.host_messages import Briefing
from outlast.errors import ConfigError, EnvironmentFault
from outlast.journal import (
    Access,
    CoordinatorClaim,
    Journal,
    RunsInEtcd,
    SharedRecord,
    _etcd,
    _runs_in_etcd,
    access_of,
    check_reachable,
    read_places,
)
from outlast.journal._etcd import Etcd
from outlast.runtime.coordinator._election import TurnSeeker
from outlast.runtime.host.coordinator_finder import CoordinatorFinder
from outlast.runtime.host.joined import JoinOptions, _prepared

pytestmark = pytest.mark.process
SECRET = b"s" * 32
PATIENCE_S = 60.0  # with members that are well, and may wait for a processor
Open = Callable[..., tuple[Journal, SharedRecord]]


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Members]:
    with start_members(tmp_path_factory.mktemp("etcd")) as found:
        yield found


@pytest.fixture
def opened(tmp_path: Path, members: Members) -> Iterator[Open]:
    """A journal in a folder of its own, and the record that it shares."""
    run, journals = secrets.token_hex(4), []

    def make(name: str, lease_s: float = 30.0, secret: bytes = SECRET) -> tuple[Journal, SharedRecord]:
        journal = Journal.create(tmp_path / name)
        journals.append(journal)
        return journal, journal.sharing(members.access, run, secret, lease_s)

    yield make
    for journal in journals:
        journal.close()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passwords, which etcd hashes at length, take a busy machine more than a member is given at first, and who was
    added is not added again."""
    monkeypatch.setattr(_etcd, "_ONE_TRY_S", 20.0)


def begin(journal: Journal, shared: SharedRecord, epoch: int, seat: str) -> bool:
    """Take the turn from whoever has it."""
    token = secrets.token_hex(4)
    mine = CoordinatorClaim(epoch=epoch, token=token, seat=seat, host=seat, address="h:1")
    won = shared.take(shared.look(PATIENCE_S), mine, PATIENCE_S)
    if won:
        journal.share(shared)
    return won


def note(text: str) -> ev.Notice:
    return ev.Notice(at_s=1.0, level="info", text=text)


def test_a_coordinator_that_was_followed_writes_nothing(opened: Open) -> None:
    (old, first), (new, second) = opened("a"), opened("b")
    assert begin(old, first, 1, "a")
    assert old.put(old.claim(), "fleet", b"one")
    assert old.held
    assert begin(new, second, 2, "b")
    assert not old.put(1, "fleet", b"late")
    assert not old.held
    assert old.epoch == 2
    assert new.get("fleet") == b"one"
    assert new.put(new.claim(), "fleet", b"two")
    assert old.get("fleet") == b"two"
    assert not old.tell_end(0)
    assert new.tell_end(7)
    assert first.look(PATIENCE_S).end == 7


def test_of_two_who_claim_at_once_one_has_the_turn(opened: Open) -> None:
    pairs = [opened(name) for name in "abc"]
    seen = [shared.look(PATIENCE_S) for _, shared in pairs]
    won = []
    for at, (_, shared) in zip(seen, pairs, strict=True):
        mine = CoordinatorClaim(epoch=1, token=secrets.token_hex(4), seat="x", host="x", address="h:1")
        won.append(shared.take(at, mine, PATIENCE_S))
    assert won == [True, False, False]


def test_the_story_is_whole_and_in_order_and_what_repeats_is_bounded(opened: Open) -> None:
    journal, shared = opened("a")
    journal.append(note("before"))
    journal.flush()
    assert begin(journal, shared, 1, "a")
    for number in range(250):
        journal.append(note(str(number)))
    for number in range(600):
        journal.append(ev.StepAnatomy(at_s=1.0, replica="r", steps=number, seconds={}))
    assert journal.tell_end(0, 20.0)
    told, since = opened("b")[1].story(0, PATIENCE_S)
    notes = [event.text for event in told if isinstance(event, ev.Notice)]
    assert notes == ["before", *map(str, range(250))]
    often = [event.steps for event in told if isinstance(event, ev.StepAnatomy)]
    assert often == list(range(600 - 512, 600))
    assert shared.story(since, PATIENCE_S)[0] == []


def test_what_was_not_written_with_the_run_s_secret_is_not_believed(opened: Open, members: Members) -> None:
    journal, shared = opened("a")
    assert begin(journal, shared, 1, "a")
    assert journal.put(1, "fleet", b"true")
    _, stranger = opened("b", secret=b"x" * 32)
    with pytest.raises(EnvironmentFault, match="not written with this run's secret"):
        stranger.look(PATIENCE_S)
    etcd = Etcd(members.access)
    place = next(row for row in etcd.range("/outlast/", PATIENCE_S)[0] if row.value.endswith(b"true"))
    etcd.put_if(place.key, place.value, {place.key: place.value[:-4] + b"lies"}, PATIENCE_S)
    etcd.close()
    with pytest.raises(EnvironmentFault, match="not written with this run's secret"):
        journal.get("fleet")


def test_a_put_that_a_member_carries_out_late_puts_no_older_record_back(opened: Open, members: Members) -> None:
    journal, shared = opened("a")
    assert begin(journal, shared, 1, "a")
    asked: list[dict[str, Any]] = []
    once = shared._etcd._once

    def spied(what: str, body: dict[str, Any], limit_s: float) -> dict[str, Any]:
        if what == "kv/txn":
            asked.append(dict(body))
        return once(what, body, limit_s)

    shared._etcd._once = spied  # type: ignore[method-assign]
    assert journal.put(1, "fleet", b"one")
    assert journal.put(1, "fleet", b"two")
    assert journal.put(1, "fleet", b"two")
    etcd = Etcd(members.access)
    for late in asked:  # each of them, as a member that was stopped would
        assert not etcd._ask("kv/txn", late, PATIENCE_S).get("succeeded") or late is asked[-1]
        assert journal.get("fleet") == b"two"
    etcd.close()
    assert journal.held
    assert journal.put(1, "fleet", b"three")
    assert journal.get("fleet") == b"three"


def test_a_put_that_finds_another_s_late_one_done_is_tried_again(opened: Open, members: Members) -> None:
    journal, shared = opened("a")
    assert begin(journal, shared, 1, "a")
    place, ranged, etcd = shared._prefix + "records/fleet", shared._etcd.range, Etcd(members.access)

    def slipped(prefix: str, within_s: float, **more: Any) -> Any:
        found = ranged(prefix, within_s, **more)
        shared._etcd.range = ranged  # type: ignore[method-assign]
        etcd.put_if(shared._turn.claim_key, shared._raw, {place: b"late"}, PATIENCE_S)
        return found

    shared._etcd.range = slipped  # type: ignore[method-assign]
    assert journal.put(1, "fleet", b"new")
    assert journal.get("fleet") == b"new"
    etcd.close()


def test_events_that_are_stored_twice_and_out_of_order_are_told_once_in_order(opened: Open, members: Members) -> None:
    journal, shared = opened("a")
    assert begin(journal, shared, 1, "a")
    _, follower = opened("b")
    etcd, told, since = Etcd(members.access), [], 0
    for number in range(3):
        journal.append_many([note(f"{number}a"), note(f"{number}b")])
        assert journal.put(1, "fleet", str(number).encode())
        rows = etcd.range(shared._prefix + "story/", PATIENCE_S)[0]
        etcd.put_if(
            shared._turn.claim_key, shared._raw, {rows[0].key: rows[0].value}, PATIENCE_S
        )  # a copy, carried out late
        found, since = follower.story(since, PATIENCE_S)
        told += [event.text for event in found if isinstance(event, ev.Notice)]
    etcd.close()
    assert told == ["0a", "0b", "1a", "1b", "2a", "2b"]


def test_what_strangers_put_beside_the_story_and_the_sign_of_life_is_passed_over(
    opened: Open, members: Members, tmp_path: Path
) -> None:
    journal, shared = opened("a")
    assert begin(journal, shared, 1, "a")
    other, follower = opened("b")
    mine = CoordinatorClaim(epoch=0, token="", seat="b", host="b", address="h:2")
    seeker = TurnSeeker(follower, other, mine, run="R", may_begin=False, alive=lambda: None)
    etcd, beats = Etcd(members.access), shared._turn.beat_key
    old = etcd.range(beats, PATIENCE_S, whole=False)[0][0].value
    assert follower.look(PATIENCE_S).beat == 0
    etcd.put_if(shared._turn.claim_key, shared._raw, shared._turn.beat(shared._my_claim(), 3), PATIENCE_S)
    assert not seeker._due(follower.look(PATIENCE_S), 1.0, 1.0)
    junk = {shared._prefix + "story/00000009-x": b"junk", shared._prefix + "story/z": b"", beats: b"7"}
    etcd.put_if(shared._turn.claim_key, shared._raw, junk, PATIENCE_S)
    assert follower.look(PATIENCE_S).beat == -1
    for at_s, stored in ((10.0, b"8"), (20.0, old), (29.9, b"")):  # neither is a sign of life
        etcd.put_if(shared._turn.claim_key, shared._raw, {beats: stored}, PATIENCE_S)
        assert not seeker._due(follower.look(PATIENCE_S), at_s, at_s)
    assert seeker._due(follower.look(PATIENCE_S), 31.2, 31.2)
    etcd.close()
    for text in ("one", "two"):
        journal.append(note(text))
        assert journal.put(1, "fleet", text.encode())
        seeker._keep_up()
    assert other.flush()
    texts = [entry.event.text for entry in other.events(kinds=[ev.Notice]) if isinstance(entry.event, ev.Notice)]
    assert len(texts) == 3
    assert (texts[0], texts[2]) == ("one", "two")
    assert "was not written by this run" in texts[1]


def test_events_that_are_too_many_or_too_large_for_etcd_do_not_end_the_turn(opened: Open) -> None:
    journal, shared = opened("a")
    assert begin(journal, shared, 1, "a")
    journal.append_many(note(f"{number} " + "x" * 100_000) for number in range(40))  # 4 MB, in batches of 100
    journal.append_many([note("y" * 2_000_000), note("last")])  # one that no member takes
    assert journal.put(1, "fleet", b"one")
    assert journal.tell_end(0, PATIENCE_S)
    assert journal.held
    told = [event.text for event in opened("b")[1].story(0, PATIENCE_S)[0] if isinstance(event, ev.Notice)]
    assert [text.partition(" ")[0] for text in told] == [*map(str, range(40)), "last"]
    with pytest.raises(EnvironmentFault, match="does not take what is asked") as refused:
        journal.put(1, "fleet", b"z" * 2_000_000)
    assert "PASSWORD" not in str(refused.value)


def test_a_secret_finds_the_run_of_its_own_that_lives(
    tmp_path: Path, members: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Among those of others, one that is over, and one that was left without an end."""
    monkeypatch.setattr(_runs_in_etcd, "_TELL_APART_S", 1.0)
    mine, found = secrets.token_bytes(32), {}
    with contextlib.ExitStack() as stack:

        def run(host: str, secret: bytes = mine) -> SharedRecord:
            journal = Journal.create(tmp_path / host)
            stack.callback(journal.close)
            found[host] = journal.sharing(members.access, secrets.token_hex(4), secret, 0.6)
            assert begin(journal, found[host], 1, host)
            return found[host]

        def asked() -> str:
            end = time.monotonic() + PATIENCE_S
            while (claim := runs.coordinator(PATIENCE_S)) is None:
                assert time.monotonic() < end
            return claim.host

        def asked_again_and_again() -> None:
            """On a busy machine one that lives may give no sign for as long as it takes to tell runs apart."""
            while True:
                asked()

        runs = RunsInEtcd(members.access, mine)
        stack.callback(runs.close)
        run("another's", SECRET)
        assert runs.ends(PATIENCE_S) == []
        assert run("over").end(5, PATIENCE_S)
        assert runs.ends(PATIENCE_S) == [5]
        assert runs.coordinator(PATIENCE_S) is None
        run("left").close()
        assert asked() == "left"  # whoever calls there finds out
        assert sorted(runs.ends(PATIENCE_S), key=str) == [5, None]
        run("living")
        assert asked() == "living"
        assert CoordinatorFinder(members.record, mine, {}).within(30.0) == ("h", 1)
        run("second")
        with pytest.raises(ConfigError, match="both go on"):
            asked_again_and_again()


def test_a_record_that_cannot_be_reached_is_told_before_anything_starts(members: Members) -> None:
    check_reachable(members.record, {})
    [port] = free_ports(1)
    with pytest.raises(EnvironmentFault, match=f"127.0.0.1:{port} cannot be reached from this host") as fault:
        check_reachable(f"etcd://127.0.0.1:{port}", {}, 0.2)
    assert "etcds:// for TLS" in fault.value.remedy


def test_who_is_not_let_in_is_told_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patient: None
) -> None:
    with start_members(tmp_path) as closed:
        etcd, everything = Etcd(closed.access), {"key": "AA==", "range_end": "AA=="}
        for name, role in (("root", "root"), ("out", "any")):
            etcd._ask("auth/user/add", {"name": name, "password": "pw"}, PATIENCE_S)
            etcd._ask("auth/role/add", {"name": role}, PATIENCE_S)
            etcd._ask("auth/user/grant", {"user": name, "role": role}, PATIENCE_S)
        etcd._ask("auth/role/grant", {"name": "any", "perm": {"permType": "READWRITE", **everything}}, PATIENCE_S)
        etcd._ask("auth/enable", {}, PATIENCE_S)
        etcd.close()
        wrong = {"OUTLAST_ETCD_USER": "out", "OUTLAST_ETCD_PASSWORD": "hunter2"}
        for environ in ({}, wrong):
            with pytest.raises(EnvironmentFault, match="refuses the run's record") as refused:
                check_reachable(closed.record, environ)
            assert "OUTLAST_ETCD_PASSWORD" in refused.value.remedy
            assert "hunter2" not in str(refused.value)
        for name, value in wrong.items():
            monkeypatch.setenv(name, value)
        config = RunConfig(record=closed.record)
        with pytest.raises(EnvironmentFault, match="refuses the run's record"):
            _check_record(config)
        options = JoinOptions(endpoint="h:1", secret=SECRET, host="h1", folder=str(tmp_path / "joined"))
        told = Briefing(
            epoch=1,
            run_id="r",
            command=("python", "train.py"),
            folder="/nowhere",
            config=encoded(config),
            hash_seed="0",
        )
        with pytest.raises(EnvironmentFault, match="refuses the run's record"):
            _prepared(options, told, "h1", ("h", 1))
        check_reachable(closed.record, wrong | {"OUTLAST_ETCD_PASSWORD": "pw"})


def test_a_password_in_the_address_is_refused_and_not_told() -> None:
    for wrong in ("etcd://root:hunter2@a:1", "etcd://a:1,root:hunter2@b:2", "http://root:hunter2@a:1"):
        for refuse in (read_places, lambda text: resolve(cli={"endpoint": "10.0.0.1:80", "record": text}, environ={})):
            with pytest.raises(ConfigError, match="user or a password") as refused:
                refuse(wrong)
            assert "hunter2" not in str(refused.value)
            assert "OUTLAST_ETCD_PASSWORD" in refused.value.remedy


def test_while_no_majority_answers_nothing_is_told_and_nothing_is_lost(opened: Open, members: Members) -> None:
    journal, shared = opened("a", lease_s=0.6)
    assert begin(journal, shared, 1, "a")
    members.signal(0, signal.SIGSTOP)  # one of three: the others go on
    assert journal.put(1, "fleet", b"one")
    members.signal(1, signal.SIGSTOP)
    stored: list[bool] = []
    writer = threading.Thread(target=lambda: stored.append(journal.put(1, "fleet", b"two")))
    writer.start()
    writer.join(1.0)
    assert stored == []
    assert not journal.held
    for index in (0, 1):
        members.signal(index, signal.SIGCONT)
    writer.join()
    assert stored == [True]
    assert journal.get("fleet") == b"two"


def test_places_are_read_and_misspelt_ones_refused(tmp_path: Path) -> None:
    assert read_places("etcd://a:1,[fd00::1]:2/") == ((("a", 1), ("fd00::1", 2)), False)
    assert read_places("etcds://a:1") == ((("a", 1),), True)
    for wrong in ("etcd://", "etcd://a", "etcd://a:0", "http://a:1", "etcd://a:1,,b:2"):
        with pytest.raises(ConfigError, match="names no place"):
            read_places(wrong)
    with pytest.raises(ConfigError, match="only one is there"):
        access_of("etcd://a:1", {"OUTLAST_ETCD_USER": "u"})
    with pytest.raises(ConfigError, match="no TLS in its address"):
        access_of("etcd://a:1", {"OUTLAST_ETCD_CA": str(tmp_path)})
    with pytest.raises(ConfigError, match="there is no certificate"):
        access_of("etcds://a:1", {"OUTLAST_ETCD_CA": str(tmp_path / "none.pem")})
    assert access_of("etcd://a:1", {"OUTLAST_ETCD_USER": "u", "OUTLAST_ETCD_PASSWORD": "p"}) == Access(
        (("a", 1),), None, "u", "p"
    )
