"""The coordinator's watch of links: losses count at once, lateness when it lasts, and only while it is news."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from outlast.core.protocol import host_messages as hm
from outlast.core.step_parts import PairWait, StepParts
from outlast.runtime.coordinator._link_watch import LinkWatch

HOSTS = 4
AGENTS = {"r0.1": "a0", "r1.1": "h1:aa", "r2.1": "h2:bb", "r3.1": "h3:cc"}


class Watched:
    """A watch, the sums of four members, and what it tells."""

    def __init__(self, agents: dict[str, str] | None = None) -> None:
        self.told: list[set[str]] = []
        self.looks = self.rounds = 0
        self.sums: dict[tuple[str, str], PairWait] = {}
        self.watch = LinkWatch(lambda name: (agents or AGENTS).get(name, ""), self.tell, self.start)

    def tell(self, found: hm.LinksJudged) -> None:
        self.told.append(set(found.agents))

    def start(self, work: Callable[[], Any], then: Callable[[Any], None]) -> None:
        self.looks += 1
        then(work())

    def round(self, at_s: float, bad: str = "", kind: str = "resent") -> None:
        """Everybody tells: fifty steps on, a tenth of what went to or came from `bad` was lost, or came late."""
        self.rounds += 1
        for here in AGENTS:
            waits = {}
            for there in AGENTS.keys() - {here}:
                before = self.sums.get((here, there), PairWait())
                spoilt = 10 * (bad in (here, there) if kind == "resent" else bad == there)
                resent, late = (spoilt, 0) if kind == "resent" else (0, 4 * spoilt)
                waits[there] = self.sums[here, there] = PairWait(
                    exchanges=before.exchanges + 50,
                    segments=before.segments + 100,
                    resent=before.resent + resent,
                    late=before.late + late,
                )
            word = StepParts(steps=50 * self.rounds, seconds={"compute": 1.0 * self.rounds}, waits=waits)
            self.watch.heard(here, word, at_s)


def test_a_link_that_loses_is_told_once_and_again_when_it_is_well_for_long() -> None:
    seen = Watched()
    for number, bad in enumerate(("", "", "r2.1", "r2.1", "r2.1")):
        seen.round(12.0 * number, bad)
    assert seen.told == [{"h2:bb"}]
    seen.round(400.0)
    assert seen.told == [{"h2:bb"}], "what it is spared may be why it is well"
    seen.round(1100.0)
    seen.round(1200.0)
    assert seen.told == [{"h2:bb"}, set()]


def test_what_was_lost_before_anybody_watched_is_no_news() -> None:
    seen = Watched()
    for number in range(5):
        seen.round(12.0 * number, "r2.1")
    again = Watched()  # another coordinator's, of the same members, whose link is well by now
    again.sums, again.rounds = seen.sums, seen.rounds
    for number in range(20):
        again.round(100.0 + 12.0 * number)
    assert (len(seen.told), again.told, again.looks) == (1, [], 0)


def test_lateness_has_to_last() -> None:
    seen = Watched()
    for number, bad in enumerate(("", "", "r2.1", "r2.1", "", "r2.1", "r2.1", "r2.1", "r2.1")):
        assert seen.told == []
        seen.round(12.0 * number, bad, "late")
    assert seen.told == [{"h2:bb"}]


def test_nothing_is_judged_where_nothing_is_lost_or_late_and_on_one_host() -> None:
    calm, alone = Watched(), Watched(dict.fromkeys(AGENTS, "a0") | {"r3.1": "a1"})
    for number in range(5):
        calm.round(12.0 * number)
        alone.round(12.0 * number, "r2.1")
    assert (calm.looks, calm.told, alone.looks, alone.told) == (0, [], 0, [])


@pytest.mark.parametrize("kind", ["resent", "late"])
def test_the_link_of_the_host_that_started_the_run_is_that_of_all_its_agents(kind: str) -> None:
    seen = Watched(AGENTS | {"r3.1": "a1"})
    for number in range(6):
        seen.round(12.0 * number, "r0.1", kind)
    assert seen.told == [{"a0", "a1"}]


def test_words_that_go_back_and_members_that_nobody_knows_are_no_harm() -> None:
    seen = Watched(AGENTS | {"r1.1": ""})
    for number in range(5):
        seen.round(12.0 * number, "r2.1")
    seen.rounds = 0
    seen.sums.clear()
    seen.round(100.0, "r2.1")
    assert seen.told == [{"h2:bb"}]


@pytest.mark.parametrize("num", [8, 32, 100])
@pytest.mark.parametrize("kind", ["resent", "late"])
def test_of_a_large_fleet_too_in_which_each_speaks_seldom_and_of_some(num: int, kind: str) -> None:
    agents = {f"r{n}.1": f"h{n}:aa" for n in range(num)}
    told: list[set[str]] = []
    watch = LinkWatch(agents.__getitem__, lambda found: told.append(set(found.agents)), lambda work, then: then(work()))
    period = max(10, num)
    for second in range(8 * period):
        for n in range(num):
            if (second + n) % period == 0:
                seconds = second + 10
                waits = {}
                for peer in ((n + step) % num for step in range(1, min(num, 17))):
                    bad = (peer == 3 or n == 3) if kind == "resent" else peer == 3
                    counts = {"resent": seconds * bad // 2} if kind == "resent" else {"late": seconds * 2 * bad}
                    waits[f"r{peer}.1"] = PairWait(exchanges=5 * seconds, segments=5 * seconds, **counts)
                watch.heard(f"r{n}.1", StepParts(steps=5 * seconds, seconds={"compute": 1.0}, waits=waits), second)
    assert told == [{"h3:aa"}]
