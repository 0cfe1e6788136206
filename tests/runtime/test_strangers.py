"""Strangers at every socket of a fleet that lives, forms views and loses members: they are counted, and that is all."""

from __future__ import annotations

import fcntl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.ports import free_ports

from outlast.core import events as ev
from outlast.observe import timeline
from outlast.prove._process_tree import of_run
from outlast.prove._strangers import Stranger
from outlast.runtime.settings.fault_points import Fault

pytestmark = pytest.mark.process

PEAK_KIB = {"coordinator": 96 << 10, "agent": 64 << 10, "replica": 640 << 10}
"""Resident memory that no process of these small fleets comes near, though strangers offer much more."""


SCRIPT = Path(__file__).with_name("sharded.py")
MUCH = 20 << 20  # bytes, for the memory that may not grow with them
PLACES = {"the coordinator's port", "r0.1's socket", "r1.1's socket"}
KINDS = {"tcp of the coordinator", "abstract unix of a replica", "tcp of the launcher",
         "tcp of a process beside the launcher"}  # fmt: skip
SAYS = {"tcp of the coordinator": 56, "abstract unix of a replica": 56, "tcp of the launcher": 256,
        "tcp of a process beside the launcher": 2048}  # fmt: skip
"""What a listener may say to one caller who has proved nothing, in bytes: the second greeting; a probe's answer; the
page's refusal of a caller who wants another host."""
MOST_BESIDE_KIB = 256 << 10


def peaks(run_dir: Path) -> dict[str, int]:
    """The most that each kind of process has held until now, in KiB."""
    found = dict.fromkeys(PEAK_KIB, 0)
    for pid in of_run(run_dir):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_text()
            status = Path(f"/proc/{pid}/status").read_text()
        except OSError:
            continue
        kind = (
            "coordinator"
            if "runtime.coordinator.server" in command
            else "agent"
            if "runtime.host.agent" in command
            else "replica"
        )
        peak = [line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")]
        found[kind] = max(found[kind], *map(int, peak)) if peak else found[kind]
    return found


def told(run: Any) -> list[str]:
    return [row.what for row in timeline(run.driven.events) if "stranger" in row.what]


def refused(run: Any) -> set[str]:
    """Where somebody was, as the run has told."""
    return {e.place for e in run.driven.events if isinstance(e, ev.Refused)}


def assert_only_counted(run: Any, stranger: Stranger, seen: dict[str, int]) -> None:
    assert {kind: kib for kind, kib in seen.items() if kib > PEAK_KIB[kind]} == {}
    assert len(told(run)) == 1, told(run)
    assert refused(run) >= PLACES
    assert stranger.told_secret == set()
    many = [e for e in run.driven.events if isinstance(e, ev.Refused)]
    assert len(many) < 200, "a flood of strangers became a flood of events"


def test_strangers_before_during_and_after_views_form(fleet: Callable[..., Any]) -> None:
    """One replica dies and comes back while everything that listens is spoken to without an end."""
    run = fleet(
        Fault(replica="r1.1", phase="scatter", action="SIGKILL", step=3), replicas=3, steps=60, gates=(3, 6, 9, 50)
    )  # fmt: skip
    with Stranger(run.driven.run_dir, run.driven.process.pid, 7, pause_s=0.02) as stranger:
        run.gate(3, "strangers had been at all of them", lambda: len(stranger.reached) >= 4 and refused(run) >= PLACES)
        run.gate(6, "it was served", lambda: run.served("r1.2"))
        run.gate(9, "it had caught up", lambda: run.caught_up("r1.2"))
        run.gate(50, "it was a member, and strangers had spoken to it", lambda: "r1.2" in run.driven.members
                 and stranger.reached["r1.2"] > 20 and len(stranger.counts) == 11
                 and stranger.sent_bytes > MUCH)  # fmt: skip
        seen = peaks(run.driven.run_dir)
        run.assert_unchanged(survivors={"r0.1", "r1.2", "r2.1"}, recoveries=1)
    assert_only_counted(run, stranger, seen)


def peak_kib(pid: int) -> int:
    rows = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(row.split()[1]) for row in rows if row.startswith("VmHWM"))


@pytest.mark.timeout(300)
def test_strangers_at_every_listener_also_at_those_that_answer_everybody(fleet: Callable[..., Any]) -> None:
    """Kinds of listeners are found, not named: one that this test does not know fails it."""
    run = fleet(replicas=2, steps=60, gates=(3, 50), words=["--probes", "127.0.0.1:0", "--serve"])
    launcher = run.driven.process.pid
    with Stranger(run.driven.run_dir, launcher, 11, pause_s=0.02) as stranger:
        run.gate(3, "strangers had been at all kinds", lambda: set(stranger.struck) >= KINDS and refused(run) >= PLACES)
        run.gate(50, "strangers had said much to all of them", lambda: stranger.sent_bytes > MUCH
                 and min(stranger.struck.values()) > 100 and len(stranger.counts) == 11)  # fmt: skip
        beside = {pid: peak_kib(pid) for pid in (launcher, page_of(launcher))}
        seen = peaks(run.driven.run_dir)
        run.assert_unchanged(survivors={"r0.1", "r1.1"}, recoveries=0)
    assert set(stranger.struck) == KINDS
    assert [kib for kib in beside.values() if kib > MOST_BESIDE_KIB] == []
    assert_only_counted(run, stranger, seen)
    assert all(stranger.longest_reply[kind] <= most for kind, most in SAYS.items()), stranger.longest_reply


HELD = {"tcp of the launcher"}  # also the coordinator's port, before there is one and once it has ended

LATE = """
import fcntl, os, runpy, sys
if os.environ["OUTLAST_PLACE"] != "0":
    with open({gate!r}) as gate:
        fcntl.flock(gate, fcntl.LOCK_SH)
sys.argv[0] = {script!r}
runpy.run_path({script!r}, run_name="__main__")
"""


def test_strangers_where_the_ranks_of_a_replica_meet(fleet: Callable[..., Any], tmp_path: Path) -> None:
    """The lead waits for a rank that is late, and once it has come torch's listeners are there, which are spared."""
    gate, script = tmp_path / "late", tmp_path / "late.py"
    script.write_text(LATE.format(gate=str(gate), script=str(SCRIPT)))
    with gate.open("w") as late:
        fcntl.flock(late, fcntl.LOCK_EX)
        run = fleet(replicas=1, ranks=2, steps=6, script=[script], max_restarts=0)
        with Stranger(run.driven.run_dir, run.driven.process.pid, 13, pause_s=0.02) as stranger:
            run.until("strangers had been where they meet", lambda: stranger.struck["abstract unix of a replica"] > 200)
            assert run.driven.step == -1
            late.close()
            assert run.finish() == 0, run.logs()
    assert set(run.results()) == {"r0.1-0", "r0.1-1"}, run.logs()
    assert set(stranger.struck) - HELD == {"tcp of the coordinator", "abstract unix of a replica"}
    assert stranger.told_secret == set()


@pytest.mark.campaign
def test_strangers_at_the_ports_by_which_other_hosts_reach_replicas(fleet: Callable[..., Any]) -> None:
    [port] = free_ports(1)
    run = fleet(replicas=2, steps=20, gates=(3,), endpoint=f"127.0.0.1:{port}")
    kinds = {"tcp of the coordinator", "abstract unix of a replica", "tcp of a replica"}
    with Stranger(run.driven.run_dir, run.driven.process.pid, 17, pause_s=0.02) as stranger:
        run.gate(3, "strangers had been at all kinds", lambda: set(stranger.struck) >= kinds and refused(run) >= PLACES
                 and min(stranger.struck[kind] for kind in kinds) > 50)  # fmt: skip
        seen = peaks(run.driven.run_dir)
        run.assert_unchanged(survivors={"r0.1", "r1.1"}, recoveries=0)
    assert set(stranger.struck) - HELD == kinds
    assert_only_counted(run, stranger, seen)


def page_of(launcher: int) -> int:
    """The process of `--serve`: a child that writes to no log of the run."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    return next(int(pid) for pid in children if b"\0serve\0" in Path(f"/proc/{pid}/cmdline").read_bytes())


@pytest.mark.campaign
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in (1, 2, 3))])
def test_strangers_beside_many_deaths(fleet: Callable[..., Any], seed: int) -> None:
    run = fleet(
        Fault(replica="r1.1", phase="connect", action="SIGKILL", count=2),
        Fault(replica="r2.1", phase="roll_call", action="SIGKILL", count=2),
        Fault(replica="r3.1", phase="body", action="SIGKILL", step=9),
        Fault(replica="coordinator.1", phase="tell", action="SIGKILL", count=3),
        replicas=4, spares=1, steps=300, gates=(8, 290),
    )  # fmt: skip
    with Stranger(run.driven.run_dir, run.driven.process.pid, seed, pause_s=0.01) as stranger:
        seen: dict[str, int] = {}

        def look() -> bool:
            for kind, kib in peaks(run.driven.run_dir).items():
                seen[kind] = max(kib, seen.get(kind, 0))
            return bool(run.driven.step >= 250)

        run.gate(8, "strangers had been at who dies next", lambda: refused(run) >= PLACES)
        run.until("most was done", look)
        run.gate(290, "strangers had said much", lambda: stranger.sent_bytes > MUCH)
        run.assert_unchanged()
    assert_only_counted(run, stranger, seen)
