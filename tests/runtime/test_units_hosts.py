"""What the coordinator's process makes of hosts: silence, twins, clocks. And endpoints, on one machine and between."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.runtime.far_members import SECRET, Far

from outlast.config import resolve
from outlast.core.protocol import StepTime, ViewId
from outlast.core.protocol import messages as m
from outlast.core.protocol.host_messages import Awaited, HostHere
from outlast.errors import ConfigError, WireRefusal
from outlast.prove.host_namespaces import shared_in
from outlast.runtime.coordinator._hosts import Hosts
from outlast.runtime.host._replica_ranks import Rank, free_number
from outlast.runtime.host.joined import read_secret
from outlast.runtime.transport import endpoints
from outlast.runtime.transport.calls import reach
from outlast.runtime.transport.connections import Listener, PeersLost
from outlast.runtime.transport.frames import Heartbeat
from outlast.runtime.transport.handshake import OTHER_RUN, PeerClaim


def here(agent: str = "h1:aa", **more: Any) -> HostHere:
    told: dict[str, Any] = {"agent": agent, "host": agent.partition(":")[0], "place": "there", "pid": 7} | more
    return HostHere(**told)


def known(*agents: str, beats: int = 20) -> Hosts:
    """Hosts whose agents have beaten regularly until second 10."""
    hosts = Hosts(8, 0.5, 5.0, "here", lambda member: {"r1.1": "h1:aa", "r2.1": "h2:aa"}.get(member, ""))
    for agent in agents or ("h1:aa",):
        assert hosts.take(here(agent), 10.0 - beats * 0.2) == (None, None)
    for beat in range(1, beats + 1):
        at_s = 10.0 - (beats - beat) * 0.2
        hosts.look(at_s)
        for agent in agents or ("h1:aa",):
            hosts.heard(agent, Heartbeat(sender=agent, sent_s=at_s), at_s)
    return hosts


def looks(
    hosts: Hosts, upto_s: float, begin_s: float = 10.0, beats: tuple[str, ...] = (), crowded: bool = False
) -> list[tuple[float, str]]:
    """(when, whose silence) while somebody looks ten times a second, and these agents beat as often."""
    found = []
    for tick in range(1, round((upto_s - begin_s) * 10) + 1):
        at_s = begin_s + tick / 10
        for agent in beats:
            hosts.heard(agent, Heartbeat(sender=agent, sent_s=0.0), at_s)
        found += [(round(at_s, 1), silent.agent) for silent in hosts.look(at_s, (), crowded)]
    return found


def waits(for_whom: str) -> m.Stalled:
    return m.Stalled(member="r0.1", view=ViewId(1, 1), phase=3, missing=(for_whom,), waited_s=0.5, deadline_s=0.5)


def test_silence_ends_patience_soon_where_somebody_waits_and_late_where_nobody_does() -> None:
    assert looks(known(), 20.0) == [(15.1, "h1:aa")]
    hosts = known("h1:aa", "h2:aa")
    hosts.heard("h2:aa", waits("r1.1"), 10.1)
    assert looks(hosts, 12.0) == [(10.7, "h1:aa")]


def test_who_is_awaited_before_any_deadline_is_known_is_given_up_as_soon() -> None:
    hosts = known("h1:aa", "h2:aa")
    hosts.heard("h2:aa", Awaited(member="r2.1", missing=("r1.1",)), 10.1)
    assert looks(hosts, 12.0) == [(10.7, "h1:aa")]


def test_who_holds_up_the_end_of_a_view_is_awaited_by_the_coordinator_itself() -> None:
    """Of two hosts that lose their power at once, a member may have waited for one only."""
    hosts = known("h1:aa", "h2:aa")
    assert hosts.look(10.1, ("r2.1",)) == []
    assert looks(hosts, 12.0) == [(10.7, "h2:aa")]


def test_who_hears_of_nobody_is_cut_off_itself() -> None:
    """For a while no host is given up; then all are. When one is heard again, the others have time for it too."""
    hosts = known("h1:aa", "h2:aa", "h3:aa")
    assert looks(hosts, 69.9) == []
    assert looks(hosts, 70.2, 69.9) == [(70.1, "h1:aa"), (70.1, "h2:aa"), (70.1, "h3:aa")]
    hosts = known("h1:aa", "h2:aa", "h3:aa")
    assert looks(hosts, 30.0) == []
    found = looks(hosts, 31.0, 30.0, ("h1:aa",)) + looks(hosts, 36.0, 31.0, ("h1:aa", "h2:aa"))
    assert found == [(35.2, "h3:aa")]


@pytest.mark.parametrize("pause_s", [0.9, 1.2, 2.0])
def test_who_fell_silent_before_the_others_did_is_not_excused_with_them(pause_s: float) -> None:
    """The path to the one that lives carries a word so seldom that each pause looks like being cut off."""
    hosts = Hosts(8, 0.5, 5.0, "here", lambda member: {"r1.1": "h1:aa", "r2.1": "h2:aa"}.get(member, ""))
    for agent in ("h1:aa", "h2:aa"):
        assert hosts.take(here(agent), 0.0) == (None, None)
    for beat in range(1, 40):
        for agent in ("h1:aa", "h2:aa")[int(beat > 10) :]:
            hosts.heard(agent, Heartbeat(sender=agent, sent_s=0.0), beat * pause_s)
        hosts.heard("h2:aa", waits("r1.1"), beat * pause_s)
        found = looks(hosts, (beat + 1) * pause_s - 0.1, beat * pause_s)
        if found:
            break
    assert [agent for _, agent in found] == ["h1:aa"]
    assert found[0][0] - 10 * pause_s < 5.0 + 2 * pause_s


def test_who_comes_in_place_of_hosts_that_are_silent_is_taken() -> None:
    """All of them have lost their power, and this process takes itself for cut off; so does it amid those who come."""
    hosts = Hosts(2, 0.5, 5.0, "here", lambda member: "")
    for agent in ("h1:aa", "h2:aa"):
        assert hosts.take(here(agent), 10.0) == (None, None)
    assert looks(hosts, 20.0) == []
    assert hosts.take(here("h3:aa"), 20.0) == (None, None)
    assert looks(hosts, 21.0, 20.0, ("h3:aa",)) == []
    assert hosts.take(here("h4:aa"), 21.0) == (None, None)
    _, refused = hosts.take(here("h5:aa"), 21.0)
    assert refused is not None
    assert looks(hosts, 30.0, 21.0, ("h3:aa", "h4:aa")) == [(25.2, "h1:aa"), (25.2, "h2:aa")]


def test_connections_that_end_are_no_sign_of_being_cut_off() -> None:
    hosts = known("h1:aa", "h2:aa")
    for agent in ("h1:aa", "h2:aa"):
        hosts.hung_up(agent)
    assert {agent for _, agent in looks(hosts, 12.0)} == {"h1:aa", "h2:aa"}


def test_a_host_that_is_often_silent_is_given_longer() -> None:
    hosts = known()
    hosts.look(10.7)
    hosts.heard("h1:aa", Heartbeat(sender="h1:aa", sent_s=0.0), 10.8)
    hosts.look(10.9)
    hosts.heard("h1:aa", waits("r1.1"), 10.9)
    assert looks(hosts, 20.0, 10.9) == [(13.4, "h1:aa")]  # three times 0.8 s


def test_its_replicas_speak_for_a_host_whose_agent_is_stopped() -> None:
    hosts = known()
    for second in range(11, 30):
        hosts.heard("r1.1", Heartbeat(sender="r1.1", sent_s=0.0), float(second))
        assert looks(hosts, second + 1.0, float(second)) == []
    hosts.hung_up("r1.1")
    assert looks(hosts, 40.0, 30.0)


def test_a_replica_that_goes_on_without_its_agent_can_be_silent_too() -> None:
    hosts = known()
    assert looks(hosts, 30.0) == [(15.1, "h1:aa")]
    hosts.heard("h1:aa", Heartbeat(sender="h1:aa", sent_s=0.0), 30.0)
    assert looks(hosts, 60.0, 30.0) == [], "an agent that was given up has to offer itself anew"
    hosts.heard("r1.1", Heartbeat(sender="r1.1", sent_s=0.0), 60.0)
    assert [agent for _, agent in looks(hosts, 90.0, 60.0)] == ["h1:aa"]


def test_who_looks_after_a_pause_of_its_own_blames_nobody() -> None:
    hosts = known()
    assert hosts.look(100.0) == []
    assert looks(hosts, 110.0, 100.0) == [(105.1, "h1:aa")]


def recalled(at_s: float, floor_s: float = 0.5) -> Hosts:
    """One host lives, another was an earlier coordinator's; this one's port opens 3 s after it was recalled."""
    hosts = Hosts(8, floor_s, 5.0, "here", lambda member: {"r1.1": "h1:aa", "r2.1": "h2:aa"}.get(member, ""))
    hosts.recall(here("h1:aa"), at_s - 3.0)
    assert looks(hosts, at_s, at_s - 3.0) == []
    hosts.opened(at_s)
    assert hosts.take(here("h2:aa"), at_s) == (None, None)
    hosts.heard("h2:aa", waits("r1.1"), at_s)
    return hosts


def test_a_host_has_time_to_turn_to_who_has_taken_over_from_when_it_can() -> None:
    assert looks(recalled(10.0), 13.0, beats=("h2:aa",)) == [(12.1, "h1:aa")]
    assert looks(recalled(10.0, floor_s=1.5), 14.0, beats=("h2:aa",)) == [(13.1, "h1:aa")]
    hosts = recalled(10.0)
    assert looks(hosts, 11.0, beats=("h2:aa",)) == []
    hosts.look(11.8)  # 0.8 s in which nobody could be heard, but for 0.25 s
    assert looks(hosts, 13.5, 11.8, ("h2:aa",)) == [(12.6, "h1:aa")]


def test_connections_that_all_end_are_word_enough() -> None:
    hosts = known()
    hosts.heard("r1.1", Heartbeat(sender="r1.1", sent_s=0.0), 10.0)
    hosts.hung_up("h1:aa")
    assert looks(hosts, 10.5) == []
    hosts.hung_up("r1.1")
    [silent] = hosts.look(10.6)
    assert "all its connections have ended" in silent.why


def test_who_has_to_call_anew_is_given_longer_while_callers_do_not_come_in() -> None:
    """The coordinator was stopped, so all hung up, and strangers crowd its door: those that live call all the while."""
    hosts = known("h1:aa", "h2:aa")
    hosts.hung_up("h1:aa")
    assert looks(hosts, 14.9, beats=("h2:aa",), crowded=True) == []
    assert looks(hosts, 15.2, 14.9, ("h2:aa",), crowded=True) == [(15.1, "h1:aa")], "no longer than a silent one"
    hosts = known("h1:aa", "h2:aa")
    hosts.hung_up("h1:aa")
    assert looks(hosts, 12.0, beats=("h2:aa",), crowded=True) == []
    assert looks(hosts, 13.0, 12.0, ("h2:aa",)) == [(12.6, "h1:aa")], "the crowd has gone, and he has not come"
    assert looks(recalled(10.0), 14.9, beats=("h2:aa",), crowded=True) == []


def test_a_host_comes_twice_or_anew_or_as_one_too_many() -> None:
    hosts = known()
    _, refused = hosts.take(here("h1:bb", pid=9), 10.1)
    assert refused is not None
    assert "already here" in refused[0]
    hosts.hung_up("h1:aa")
    over, refused = hosts.take(here("h1:bb", pid=9), 10.1)
    assert (refused, over and over.agent) == (None, "h1:aa")
    small = Hosts(1, 0.5, 5.0, "here", lambda member: "")
    assert small.take(here(), 0.0) == (None, None)
    _, refused = small.take(here("h2:aa"), 0.1)
    assert refused is not None
    assert "has its 1 hosts" in refused[0]


def test_a_host_that_offers_itself_again_is_heard_of_by_that() -> None:
    """Its offer and its next word are two messages: who looks in between must not take it for silent again."""
    hosts = known()
    assert looks(hosts, 20.0) == [(15.1, "h1:aa")]
    assert hosts.take(here(), 20.0) == (None, None)
    assert hosts.processes("h1:aa") == ["h1:aa"]
    assert looks(hosts, 24.0, 20.0) == []
    assert looks(hosts, 30.0, 24.0) == [(25.1, "h1:aa")]  # it is watched


def test_the_launchers_own_hosts_always_have_room_and_their_names() -> None:
    hosts = Hosts(3, 0.5, 5.0, "here", lambda member: "", ["head-a0", "head-a1"])
    _, refused = hosts.take(here("head-a1:ff"), 0.0)
    assert refused is not None
    assert "that started the run" in refused[0]
    assert hosts.take(here("h1:aa"), 0.0) == (None, None)
    _, refused = hosts.take(here("h2:aa"), 0.0)  # the rest of the room is kept
    assert refused is not None
    for name, host in (("a0", "head-a0"), ("a1", "head-a1")):
        assert hosts.take(here(name, host=host), 0.0) == (None, None)
    over, refused = hosts.take(here("a0.2", host="head-a0"), 0.1)  # the launcher knows that the other one is dead
    assert (over and over.agent, refused) == ("a0", None)


def test_times_of_another_clock_become_those_of_this_one() -> None:
    hosts = known()  # beats were sent as they came: the same second on both clocks
    hosts.take(here("h2:aa", place="elsewhere", sent_s=1000.0), 10.0)
    for delay in (0.3, 0.002, 0.1):
        hosts.heard("h2:aa", Heartbeat(sender="h2:aa", sent_s=1001.0), 11.0 + delay)
    step = StepTime(step=4, end_s=1005.0, took_s=0.25)
    gone = m.Exited(member="r2.1", cause="signal", last_alive_s=1004.0, noticed_at_s=1004.5, steps=(step,))
    told = hosts.heard("h2:aa", gone, 15.0)
    assert (told.last_alive_s, told.noticed_at_s, told.steps[0].end_s) == pytest.approx((14.0, 14.5, 15.0))
    assert told.steps[0].took_s == 0.25
    beat = hosts.heard("r2.1", Heartbeat(sender="r2.1", sent_s=1006.0, steps=(step,)), 16.0)
    assert beat.sent_s == 1006.0  # goes back to where it came from
    assert beat.steps[0].end_s == pytest.approx(15.0)
    formed = hosts.heard("r2.1", m.Formed(member="r2.1", view=ViewId(1, 1), step=4, formed_at_s=1006.0), 16.0)
    assert (formed.left_at_s, formed.formed_at_s) == (0.0, pytest.approx(16.0))  # 0 is no time
    assert hosts.heard("r0.1", gone, 16.0) is gone


# --- endpoints ----------------------------------------------------------------------------------------------------
def test_endpoints_are_read_as_people_write_them() -> None:
    assert endpoints.read_host_port("head-node:29400") == ("head-node", 29400)
    assert endpoints.read_host_port("[fd00::1]:80") == ("fd00::1", 80)
    assert endpoints.shown("fd00::1", 80) == "[fd00::1]:80"
    for wrong in ("head", "head:", ":80", "head:port", "fd00::1:80", "head:70000"):
        with pytest.raises(ConfigError, match="is not HOST:PORT"):
            endpoints.read_host_port(wrong)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"nnodes": "3"}, "no address at which the others reach this one"),
        ({"nnodes": "3:2", "endpoint": "10.0.0.1:80"}, "is no number of hosts"),
        ({"endpoint": "10.0.0.1:80", "exchange": "shm"}, "does not reach other hosts"),
        ({"agents": 0}, "starts no replica"),
        ({"endpoint": "10.0.0.1:80", "port": 80}, "both say where to listen"),
    ],
)
def test_what_several_hosts_need_is_said_before_anything_starts(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        resolve(cli=given, environ={})


def test_hosts_and_agents_are_counted() -> None:
    config = resolve(cli={"endpoint": "10.0.0.1:80", "nnodes": "3:5"}, environ={}).config
    assert (config.num_agents, config.hosts) == (3, (3, 5))
    assert msgspec.structs.replace(config, agents=0).num_agents == 3
    assert msgspec.structs.replace(config, agents=2).num_agents == 4
    assert [msgspec.structs.replace(config, agents=n).most_agents for n in (0, 1, 2)] == [5, 5, 6]
    assert resolve(cli={"agents": 2}, environ={}).config.most_agents == 2


def test_secrets_that_others_can_read_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("ab" * 32)
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="can be read by others"):
        read_secret(file, None)
    file.chmod(0o600)
    assert read_secret(file, None) == bytes.fromhex("ab" * 32)
    assert read_secret(None, None) is None
    for wrong in ("ab" * 8, "not hexadecimal"):
        with pytest.raises(ConfigError, match="no secret of a run"):
            read_secret(None, wrong)


def test_a_view_forms_over_the_network_and_strangers_reach_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    far = Far(monkeypatch)
    host, port = far.addresses["r0.1"].split(" ")[2:]
    strangers = []
    for data in (b"", b"\0\0\0\5hello", os.urandom(300), b"GET / HTTP/1.1\r\n\r\n"):
        strangers.append(socket.create_connection((host, int(port)), timeout=20))
        strangers[-1].sendall(data)
    with pytest.raises((WireRefusal, ConnectionError)):
        reach(far.addresses["r0.1"], b"o" * 32, "r0.1", PeerClaim("mesh", "r1.1", (1, 1)), 20)
    meshes = far.formed()
    assert meshes[0].conns["r1.1"].sock.family == socket.AF_INET
    assert far.listeners[0].refused
    for mesh in meshes:
        mesh.close()
    for stranger in strangers:
        stranger.close()
    far.close()


def test_who_does_not_listen_any_more_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    far = Far(monkeypatch)
    far.listeners[0].close()
    with pytest.raises(PeersLost) as lost:
        far.mesh(1).form()
    assert lost.value.suspects == ("r0.1",)
    far.listeners[1].close()


def test_on_one_machine_the_network_is_not_used() -> None:
    listener = Listener("near", "r0.1", SECRET, network="127.0.0.1")
    assert len(listener.address.split(" ")) == 4
    with reach(listener.address, SECRET, "r0.1", PeerClaim("feed", "r1.1", (1, 1), "near"), 20) as sock:
        assert sock.family == socket.AF_UNIX
    listener.close()


@pytest.mark.parametrize("role", ["mesh", "feed"])
def test_who_is_left_of_another_run_is_refused_by_name(role: Any) -> None:
    """Under the same secret, at the same address, as a member of the same name."""
    listener = Listener("new", "r0.1", SECRET, network="127.0.0.1")
    for run in ("old", ""):
        with reach(listener.address, SECRET, "r0.1", PeerClaim(role, "r1.1", (1, 1), run), 20) as sock:
            assert sock.recv(1) == b""
    assert listener.refused == {OTHER_RUN: (2, "r1.1 of run old")}
    assert not list(listener.mesh.take()) + list(listener.feeds.take())
    listener.close()


def test_replicas_of_one_machine_have_devices_of_their_own(tmp_path: Path) -> None:
    """However slots were dealt to hosts, and whoever comes in a dead one's place."""
    leads = [Rank(f"r{slot}.1", Any, Any, tmp_path, number=number) for slot, number in ((2, 0), (7, 1), (9, 3))]  # type: ignore[arg-type]
    assert (free_number(leads), free_number(leads[1:]), free_number([])) == (2, 0, 0)


def test_hosts_on_one_machine_see_a_checkout_that_lies_in_a_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    monkeypatch.chdir(checkout)
    monkeypatch.setattr(sys, "prefix", str(checkout / "venv"))
    assert shared_in(tmp_path, [tmp_path / "run"]) == [checkout, checkout / "venv", tmp_path / "run"]
    assert shared_in(checkout) == [checkout / "venv"]  # all of the temporary folder would be nobody's own
