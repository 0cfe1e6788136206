"""What exchanges say of links: since when one is bad, whose lateness is its own, and what `why` makes of it."""

from __future__ import annotations

import json
import time
from pathlib import Path

import msgspec
import pytest
from tests.health.test_link_probes import leaves

from outlast.cli import main
from outlast.core import events as ev
from outlast.core.step_parts import PairWait
from outlast.health import DiaryEntry, learn_run, records_of, run_links, suspicion
from outlast.journal import Journal

HOSTS, PERIOD_S, BEGAN_S = 6, 10.0, 1_000.0


def a_run(
    bad: str = "",
    *,
    kind: str = "resent",
    turned: int = 0,
    words: int = 8,
    slow: str = "",
    agents: str = "h{}:aa",
    config: dict[str, str] | None = None,
) -> list[ev.AnyEvent]:
    """Six hosts of one replica; from word `turned` on a tenth of what crosses `bad` is `kind`, `resent` or `late`. All
    others see the headers of `slow` late, whose replica computes longer."""
    paths = leaves({f"h{n}": "" for n in range(HOSTS)})
    events: list[ev.AnyEvent] = [
        ev.RunStarted(
            at_s=BEGAN_S, run_id="x", command=[], num_replicas=HOSTS, num_spares=0, signature={}, config=config or {}
        )
    ]  # fmt: skip
    for n in range(HOSTS):
        agent, joined = agents.format(n), ":" in agents
        host, address = (f"h{n}", f"10.0.0.{n}") if joined else ("", "")
        events.append(ev.AgentStarted(at_s=BEGAN_S, agent=agent, pid=1, host=host, address=address))
        events.append(ev.ReplicaStarted(at_s=BEGAN_S, replica=f"r{n}.1", agent=agent, pid=1))
    for number in range(1, words + 1):
        for here in range(HOSTS):
            waits = {}
            for there in set(range(HOSTS)) - {here}:
                crossed = bad in paths[f"h{min(here, there)}>h{max(here, there)}"]
                spoilt = 10 * max(0, number - turned) * crossed
                late = 100 * number * (slow == f"r{there}.1") + spoilt * (kind == "late")
                waits[f"r{there}.1"] = PairWait(
                    exchanges=100 * number, late=late, segments=100 * number, resent=spoilt * (kind == "resent")
                )
            seconds = {"compute": (0.5 if slow == f"r{here}.1" else 0.1) * number}
            events.append(ev.StepAnatomy(
                at_s=BEGAN_S + PERIOD_S * number, replica=f"r{here}.1", steps=number, seconds=seconds, waits=waits,
            ))  # fmt: skip
    return events


@pytest.mark.parametrize(("kind", "told"), [("resent", "loss"), ("late", "late")])
@pytest.mark.parametrize("turned", [0, 3])
def test_since_when_a_link_is_bad_is_said_as_near_as_the_words_allow(kind: str, told: str, turned: int) -> None:
    (text,) = run_links(a_run("h3-l1", kind=kind, turned=turned)).said
    at = time.strftime("since %H:%M:%S UTC", time.gmtime(BEGAN_S + PERIOD_S * turned))
    assert text.startswith("h3: ")
    assert f"% {told} (95 %" in text
    share = ", 10.00% of all that crossed it from then on"
    assert (at + share if turned else "in this run") in text


def test_the_lateness_of_a_host_that_computes_longer_is_no_links() -> None:
    found = run_links(a_run(slow="r2.1"))
    assert (found.said, found.slow) == ([], ["h2"])
    (text,) = run_links(a_run("h2-l1", slow="r2.1")).said
    assert text.startswith("h2: ")
    assert "loss" in text


def test_agents_of_one_machine_have_no_link_between_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    with Journal.create(run) as journal:
        journal.append_many(a_run("h3-l1", kind="late", agents="a{}"))
    assert main(["health", "links", "--run", str(run)]) == 2
    assert "crossed no link" in capsys.readouterr().err
    assert main(["why", str(run)]) == 0
    assert "\nLinks\n" not in capsys.readouterr().out


def test_why_names_the_link_by_the_fabric_that_the_run_was_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hosts = {f"h{n}": f"10.0.0.{n}:7700" for n in range(HOSTS)}
    text = "[hosts]\n" + "".join(f'{name} = "{address}"\n' for name, address in hosts.items()) + "[paths]\n"
    text += "".join(f'"{pair}" = {json.dumps(links)}\n' for pair, links in leaves(hosts).items())
    (tmp_path / "fabric.toml").write_text(text)
    for told, link in ((str(tmp_path / "fabric.toml"), "l1-s"), (str(tmp_path / "elsewhere.toml"), "h2")):
        with Journal.create(tmp_path / link) as journal:
            journal.append_many(a_run("l1-s", turned=4, config={"fabric": told}))
        assert main(["why", str(tmp_path / link)]) == 0
        assert f"\nLinks\n- {link}" in capsys.readouterr().out
        assert main(["why", "--json", str(tmp_path / link)]) == 0
        assert json.loads(capsys.readouterr().out)["links"][0].startswith(link)


def test_the_diary_remembers_a_link_that_was_bad_until_it_is_mended() -> None:
    ended = ev.RunFinished(at_s=2_000.0, outcome="finished", steps=8, detail="", exit_code=0, seconds={})
    events = list(enumerate([*a_run("h3-l1"), ended], 1))
    assert not [e for e in learn_run(events[:-1], "h0", []) if e.kind == "finding"], "while it runs"
    (found,) = [e for e in learn_run(events, "h0", []) if e.kind == "finding"]
    assert (found.device, found.host) == ("h3/link", "h3")
    again = msgspec.structs.replace(found, run="y")
    (record,) = records_of([found, found])  # learned twice
    text = "h3: 10.00% loss (95 % 9.36% to 10.64%) in this run, confidence 100.0%."
    assert suspicion(record) == f"The link of h3 was bad in a run: {text}"
    assert suspicion(records_of([found, again])[0]) == f"The link of h3 was bad in 2 runs, the last time as {text}"
    mended = DiaryEntry(at_s=3_000.0, device="h3/link", kind="repair", text="another cable")
    assert suspicion(records_of([found, mended])[0]) == ""
    assert "bad in a run" in suspicion(records_of([found, mended, again])[0]), "bad again"
    assert learn_run(events, "h0", learn_run(events, "h0", [])) == []


def test_one_pair_that_loses_names_no_link() -> None:
    """What TCP loses comes in bursts: between two hosts alone it may be the link of either, or neither."""
    events = a_run()
    for place, event in enumerate(events):
        if isinstance(event, ev.StepAnatomy) and event.replica == "r0.1":
            lost = PairWait(exchanges=800, segments=800, resent=90)
            events[place] = msgspec.structs.replace(event, waits={**event.waits, "r2.1": lost})
    found = run_links(events)
    assert found.said == []
    assert found.apart == ["h0 to h2: 11.25% loss in this run, and on no other pair: no link can be named for it"]


@pytest.mark.parametrize("claimed", [800, 10**5, 10**9])
@pytest.mark.parametrize("clean", [{1, 2, 3, 4, 5}, {2, 3, 4, 5}, {2}])
def test_one_member_that_says_too_well_of_others_has_nobody_named(claimed: int, clean: set[int]) -> None:
    """Everybody loses an ordinary one in a hundred, and one speaks of links on which nothing is ever lost."""
    events = a_run()
    for place, event in enumerate(events):
        if isinstance(event, ev.StepAnatomy):
            lost = {name: msgspec.structs.replace(w, resent=w.segments // 100) for name, w in event.waits.items()}
            if event.replica == "r0.1":
                lost |= {f"r{n}.1": PairWait(exchanges=800, segments=claimed) for n in clean}
            events[place] = msgspec.structs.replace(event, waits=lost)
    assert run_links(events).said == []


def test_a_liar_hides_no_bad_link_by_naming_others() -> None:
    events = a_run("h3-l1")
    for place, event in enumerate(events):
        if isinstance(event, ev.StepAnatomy) and event.replica == "r0.1":
            waits = event.waits | {"r4.1": PairWait(exchanges=800, segments=10**9)}
            events[place] = msgspec.structs.replace(event, waits=waits)
    (text,) = run_links(events).said
    assert text.startswith("h3: ")
