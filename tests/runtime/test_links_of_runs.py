"""A real fleet over network namespaces: the link that is shaped is named by the run's own exchanges within 30 steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.test_hosts import Hosts

from outlast.cli import main
from outlast.core import events as ev
from outlast.health import run_links
from outlast.prove.host_namespaces import HostNetwork, unavailable

pytestmark = [pytest.mark.process, pytest.mark.campaign, pytest.mark.timeout(300)]
SHAPED, FIRST, WITHIN = 2, 5, 30
# A step moves more than a megabyte over each link: 30 of them take four seconds or more, on any machine.
LOSSY = ("rate", "60mbit", "burst", "16kb", "latency", "2ms")
SLOW = ("rate", "20mbit", "burst", "16kb", "latency", "400ms")


@pytest.fixture
def network(tmp_path: Path) -> Iterator[HostNetwork]:
    reason = unavailable()
    if reason:
        pytest.skip(reason)
    with HostNetwork(4, [tmp_path]) as net:
        yield net


@pytest.mark.parametrize("shape", [LOSSY, SLOW], ids=["lossy", "slow"])
def test_a_shaped_link_is_named_within_30_steps(
    network: HostNetwork, tmp_path: Path, fleet: Callable[..., Any], shape: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Four hosts of one replica: the link of one is shaped between two steps, and every word that is judged was told at
    most 30 steps later."""
    on = Hosts(network, tmp_path, fleet, 1, replicas=4, steps=FIRST + WITHIN + 1, gates=(FIRST, FIRST + WITHIN))
    run = on.run
    run.gate(FIRST, "all were there", lambda: len(run.driven.members) == 4)
    network.shape(SHAPED, *shape)
    run.gate(FIRST + WITHIN, "30 steps were done", lambda: run.driven.step >= FIRST + WITHIN - 1)
    run.assert_unchanged(recoveries=0)
    found = run_links(_until(run.driven.events, FIRST + WITHIN))
    assert found.said, found
    assert found.said[0].startswith(f"h{SHAPED}: "), found
    assert main(["why", str(run.driven.run_dir)]) == 0
    assert f"- h{SHAPED}: " in capsys.readouterr().out.partition("\nLinks\n")[2]


@pytest.mark.soak
def test_a_link_that_stays_bad_is_avoided_and_no_bit_changes(
    network: HostNetwork, tmp_path: Path, fleet: Callable[..., Any]
) -> None:
    """After some looks of the coordinator a planned view has the member behind the link reduce nothing. The hundred
    steps between the gates take more than a minute while the link is shaped: the coordinator has looked by then."""
    on = Hosts(network, tmp_path, fleet, 1, replicas=4, steps=FIRST + 110, gates=(FIRST, FIRST + 100))
    run = on.run
    run.gate(FIRST, "all were there", lambda: len(run.driven.members) == 4)
    network.shape(SHAPED, "rate", "12mbit", "burst", "16kb", "latency", "400ms")

    def said() -> list[str]:
        return [e.text for e in run.driven.events if isinstance(e, ev.Notice) and "the link of" in e.text]

    run.until("it was avoided", lambda: bool(said()))
    network.unshape(SHAPED)
    run.gate(FIRST + 100, "it was mended", lambda: True)
    run.assert_unchanged(recoveries=0)
    # Shares of work may have followed speed as well, which is a planned view too.
    causes = [event.cause for event in run.driven.events if isinstance(event, ev.ViewInstalled)]
    assert causes[0] == "start", causes
    assert set(causes[1:]) == {"planned"}, causes
    assert said()[0].startswith(f"the link of h{SHAPED}:")
    assert "its replicas reduce nothing" in said()[0]


def _until(events: list[ev.AnyEvent], step: int) -> list[ev.AnyEvent]:
    """Without the words that members told later."""
    return [event for event in events if not isinstance(event, ev.StepAnatomy) or event.steps <= step]
