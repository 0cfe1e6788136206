"""The record in a real etcd of three members: who has been followed writes nothing, and the story goes along."""

from __future__ import annotations

import secrets
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.journal.etcd_members import Members, start_members

from outlast.core import events as ev
from outlast.errors import ConfigError, EnvironmentFault
from outlast.journal import Access, CoordinatorClaim, Journal, SharedRecord, access_of, read_places
from outlast.journal._etcd import Etcd

pytestmark = pytest.mark.process
SECRET = b"s" * 32
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


def begin(journal: Journal, shared: SharedRecord, epoch: int, seat: str) -> bool:
    """Take the turn from whoever has it."""
    token = secrets.token_hex(4)
    mine = CoordinatorClaim(epoch=epoch, token=token, seat=seat, host=seat, address="h:1")
    won = shared.take(shared.look(5.0), mine, 5.0)
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
    assert first.look(5.0).end == 7


def test_of_two_who_claim_at_once_one_has_the_turn(opened: Open) -> None:
    pairs = [opened(name) for name in "abc"]
    seen = [shared.look(5.0) for _, shared in pairs]
    won = []
    for at, (_, shared) in zip(seen, pairs, strict=True):
        mine = CoordinatorClaim(epoch=1, token=secrets.token_hex(4), seat="x", host="x", address="h:1")
        won.append(shared.take(at, mine, 5.0))
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
    told, since = opened("b")[1].story(0, 5.0)
    notes = [event.text for event in told if isinstance(event, ev.Notice)]
    assert notes == ["before", *map(str, range(250))]
    often = [event.steps for event in told if isinstance(event, ev.StepAnatomy)]
    assert often == list(range(600 - 512, 600))
    assert shared.story(since, 5.0)[0] == []


def test_what_was_not_written_with_the_run_s_secret_is_not_believed(opened: Open, members: Members) -> None:
    journal, shared = opened("a")
    assert begin(journal, shared, 1, "a")
    assert journal.put(1, "fleet", b"true")
    _, stranger = opened("b", secret=b"x" * 32)
    with pytest.raises(EnvironmentFault, match="not written with this run's secret"):
        stranger.look(5.0)
    etcd = Etcd(members.access)
    place = next(row for row in etcd.range("/outlast/", 5.0)[0] if row.value.endswith(b"true"))
    etcd.put_if(place.key, place.value, {place.key: place.value[:-4] + b"lies"}, 5.0)
    etcd.close()
    with pytest.raises(EnvironmentFault, match="not written with this run's secret"):
        journal.get("fleet")


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
