"""What a struck run has around its processes: a disk that fills up or hangs, a clock that jumps, hosts that go."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from outlast import journal
from outlast.cli import main
from outlast.prove import struck_clock, struck_disk, struck_hosts
from outlast.prove._process_tree import Running
from outlast.prove._strike_acts import LIMITS, carry_out
from outlast.prove.script_plan import KINDS, Shape, drawn, planned, read_schedule
from outlast.prove.script_surroundings import ScriptSurroundings
from outlast.prove.striker import Striker, StrikeRecord
from outlast.runtime.settings import run_clock
from outlast.runtime.settings.witness_files import StepWriter

SCRIPT = str(Path(__file__).parent / "scripts" / "nanogpt.py")
needs_disk = pytest.mark.skipif(bool(struck_disk.unavailable()), reason=struck_disk.unavailable())
needs_frozen = pytest.mark.skipif(bool(struck_disk.cannot_freeze()), reason=struck_disk.cannot_freeze())
needs_clock = pytest.mark.skipif(bool(struck_clock.unavailable()), reason=struck_clock.unavailable())


# --- a disk ----------------------------------------------------------------------------------------------------------
PLACE = "it's a disk"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[struck_disk.StruckDisk]:
    with struck_disk.StruckDisk(tmp_path / PLACE, 24 << 20) as disk:
        yield disk
    assert [path.name for path in tmp_path.iterdir() if path.name != "saved"] == [PLACE]
    assert not any((tmp_path / PLACE).iterdir()), "it was mounted for nobody but the run"


def write(disk: struck_disk.StruckDisk, name: str) -> str:
    """As the run would write a mebibyte; what the kernel says to it."""
    command = [*disk.entering, sys.executable, "-c", "import sys; open(sys.argv[1], 'wb').write(bytes(1 << 20))"]
    done = subprocess.run([*command, str(disk.place / name)], capture_output=True, text=True, timeout=60)
    return done.stderr.strip().rpartition("\n")[2]


@pytest.mark.process
@needs_disk
def test_a_disk_is_full_or_read_only_for_a_time_and_keeps_what_it_had(
    disk: struck_disk.StruckDisk, tmp_path: Path
) -> None:
    (tmp_path / PLACE / "outside").mkdir()
    assert write(disk, "before") == ""
    assert disk.strike("full", 0.0)
    assert "No space left" in write(disk, "full")
    assert disk.strike("readonly", 0.0)
    assert "Read-only" in write(disk, "readonly")
    assert not disk.strike("full", 0.0), "nothing can be written to a disk that is read-only"
    assert not disk.mend("full")
    assert disk.mend("readonly")
    assert disk.mend("full")
    assert write(disk, "after") == ""
    disk.save(Path(), tmp_path / "saved")
    assert {path.name for path in (tmp_path / "saved").iterdir()} >= {"before", "after"}
    assert (tmp_path / "saved" / "after").stat().st_size == 1 << 20
    (tmp_path / PLACE / "outside").rmdir()


@pytest.mark.process
@needs_frozen
def test_who_writes_to_a_frozen_disk_waits_in_the_kernel_until_it_thaws(disk: struck_disk.StruckDisk) -> None:
    assert disk.strike("frozen", 0.0)
    assert not disk.strike("full", 0.0), "whoever tried would hang as well"
    assert not disk.mend("full")
    told = "import sys; print('begin', flush=True); open(sys.argv[1], 'wb').write(bytes(1 << 20))"
    command = [*disk.entering, sys.executable, "-c", told, str(disk.place / "late")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "begin\n"
        child.kill()  # which does not reach it, unless it comes before the write: either way it is gone after the thaw
        assert disk.mend("frozen")
        child.wait()
    assert write(disk, "after") == ""
    assert disk.strike("frozen", 0.0), "and what is frozen when a run is over is thawed"


_FREEZES = """
import subprocess, sys
from pathlib import Path
from outlast.prove.struck_disk import StruckDisk
disk = StruckDisk(Path(sys.argv[1]) / "disk", 24 << 20).__enter__()
assert disk.strike("frozen", 0.0)
subprocess.Popen([*disk.entering, "sh", "-c", f"echo begins; echo late > '{disk.place}/file'; echo ends"])
sys.stdin.read()
"""


@pytest.mark.process
@needs_frozen
def test_a_disk_thaws_when_whoever_froze_it_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _FREEZES, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "begins\n"
        child.kill()
        assert child.stdout.readline() == "ends\n", "who wrote goes on"


@pytest.mark.process
@needs_disk
def test_a_run_has_a_disk_only_where_one_is_struck(tmp_path: Path) -> None:
    with ScriptSurroundings(tmp_path / "plain", {"replica"}, 0) as none:
        assert (none.prefix, none.environ, none.around) == ([], {}, {})
    with ScriptSurroundings(tmp_path / "own", {"disk"}, 0) as own:
        assert list(own.around) == ["disk"]
        inside = [*own.prefix, "sh", "-c", f"mkdir -p '{own.checkpoints}' && echo saved > '{own.checkpoints}/part'"]
        assert subprocess.run(inside).returncode == 0
        assert not own.checkpoints.exists()
    assert (tmp_path / "own" / "checkpoints" / "part").read_text() == "saved\n"


# --- a clock ---------------------------------------------------------------------------------------------------------
_READ = """
import ctypes, sys, time
libc = ctypes.CDLL(None, use_errno=True)
room = [ctypes.create_string_buffer(128) for _ in range(3)]  # zeroes are what each of them begins with
semaphore, condition, held = map(ctypes.byref, room)
libc.pthread_mutex_lock(held)
for _ in sys.stdin:
    took = []
    for wait in (
        lambda until: libc.sem_timedwait(semaphore, until),
        lambda until: libc.pthread_cond_timedwait(condition, held, until),
        lambda until: libc.pthread_mutex_timedlock(held, until),
    ):
        before = time.monotonic()  # and then the deadline: between the two this process may have no processor
        end = time.time() + 0.05
        until = (ctypes.c_long * 2)(int(end), int(end % 1 * 1e9))
        wait(until)
        took.append(time.monotonic() - before)
    print(time.time(), time.monotonic(), *took, flush=True)
"""


@pytest.mark.process
@needs_clock
def test_a_clock_jumps_for_those_who_live_by_it_and_no_deadline_moves(tmp_path: Path) -> None:
    clock = struck_clock.StruckClock(tmp_path / "clock")
    command = [sys.executable, "-c", _READ]
    pipe = subprocess.PIPE
    apart = run_clock.apart_s({})
    with subprocess.Popen(command, env=os.environ | clock.environ, stdin=pipe, stdout=pipe, text=True) as child:
        for pick, shift_s in ((None, 0.0), (0.0, -86400.0), (0.75, 43200.0), (0.5, 0.0)):
            if pick is not None:
                assert clock.strike("clock", pick)
            assert child.stdin is not None
            assert child.stdout is not None
            child.stdin.write("\n")
            child.stdin.flush()
            wall, monotonic, *took = map(float, child.stdout.readline().split())
            assert wall - monotonic - apart == pytest.approx(shift_s, abs=5.0)
            assert len(took) == 3
            assert min(took) > 0.04, "no wait of 50 ms is over at once, wherever the wall clock is"
        child.stdin.close()
    assert abs(run_clock.apart_s({}) - apart) < 5.0, "nobody else's clock jumped"


@pytest.mark.process
@needs_clock
def test_who_looks_at_a_run_whose_clock_was_set_sees_it_as_old_as_it_is(tmp_path: Path) -> None:
    journal.keep_clock(tmp_path, run_clock.apart_s({}))
    clock = struck_clock.StruckClock(tmp_path / "clock.d")
    clock.strike("clock", 0.9)
    code = (
        "import sys, time; from pathlib import Path; from outlast.journal import run_now_s; "
        "print(time.time(), run_now_s(Path(sys.argv[1])))"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    told = subprocess.run(command, env=os.environ | clock.environ, capture_output=True, text=True, check=True).stdout
    wall, run = map(float, told.split())
    assert wall - run > 60_000.0
    assert run == pytest.approx(journal.run_now_s(tmp_path), abs=30.0)
    (tmp_path / "clock").write_text("-1e9 another-boot/1\n")
    assert journal.run_now_s(tmp_path) == pytest.approx(journal.run_now_s(tmp_path / "none"), abs=5.0)


def test_what_a_run_tells_is_counted_from_one_reading_of_the_wall_clock() -> None:
    assert run_clock.apart_s({run_clock.VARIABLE: "12.5"}) == 12.5
    assert run_clock.apart_s({run_clock.VARIABLE: "soon"}) == pytest.approx(run_clock.apart_s({}), abs=60.0)


# --- schedules -------------------------------------------------------------------------------------------------------
def test_whose_disk_is_struck_keeps_checkpoints_on_it() -> None:
    fleets = [drawn(number, 5, Shape(), ["full", "readonly", "frozen", "clock", "kill"]) for number in range(60)]
    struck = [fleet for fleet in fleets if "disk" in {strike.roles[0] for strike in fleet.strikes}]
    assert struck
    assert all(fleet.keeps for fleet in struck)
    assert {s.named for f in fleets for s in f.strikes} == {"full", "readonly", "frozen", "clock", "kill"}
    lasting = [strike for fleet in fleets for strike in fleet.strikes if KINDS[strike.named].lasts]
    assert all(strike.continue_s is not None for strike in lasting)
    (strike,), _ = read_schedule("1:frozen~2:disk:0")
    assert (strike.roles, strike.continue_s, strike.named) == (("disk",), 2.0, "frozen")


def test_what_this_machine_cannot_is_refused_by_name_and_told_of_otherwise(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from outlast.cli._prove_run import _untested
    from outlast.prove import script_surroundings

    monkeypatch.setattr(script_surroundings.struck_clock, "unavailable", lambda: "no compiler")
    assert main(["prove", "run", "--faults", "kill,clock", SCRIPT]) == 3
    assert "clock cannot be put into this run: no compiler" in capsys.readouterr().err
    assert main(["prove", "run", "--schedule", "1:clock:clock:0.3", SCRIPT]) == 3
    assert ("clock", "cannot be put into this run: no compiler") in _untested(["kill"], {"clock": "no compiler"}, 1)


# --- hosts -----------------------------------------------------------------------------------------------------------
class Network:
    """In place of namespaces: what was done, in order."""

    def __init__(self, num: int, shared: object = ()) -> None:
        self.did: list[tuple[object, ...]] = []

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *_: object) -> None:
        self.did.append(("gone",))

    def address(self, host: int) -> str:
        return f"10.77.0.{host + 1}"

    def entering(self, host: int) -> list[str]:
        return ["on", str(host)]

    def start(self, host: int, command: Sequence[str], environ: Mapping[str, str], out: object) -> Agent:
        self.did.append(("start", host, environ["OUTLAST_SECRET"], environ.get("TOLD")))
        return Agent()

    def processes(self, host: int) -> list[int]:
        return [41] if host == 2 else []

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *told: self.did.append((name, *told))


class Agent:
    pid, ended = 7, False

    def poll(self) -> int | None:
        return 0 if self.ended else None

    def wait(self, seconds: float) -> int:
        if self.ended:
            return 0
        raise subprocess.TimeoutExpired("agent", seconds)


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[struck_hosts.StruckHosts]:
    monkeypatch.setattr(struck_hosts, "HostNetwork", Network)
    monkeypatch.setattr(struck_hosts, "_ENDED_S", 0.0)
    with struck_hosts.StruckHosts(tmp_path, 4, 2) as hosts:
        hosts.start_agents({"TOLD": "x"})
        yield hosts


def did(hosts: struck_hosts.StruckHosts) -> list[tuple[object, ...]]:
    found = [*cast(Any, hosts)._net.did]
    cast(Any, hosts)._net.did.clear()
    return found


def test_hosts_go_and_come_back_and_the_first_one_stays(hosts: struck_hosts.StruckHosts) -> None:
    secret = hosts.environ["OUTLAST_SECRET"]
    assert did(hosts) == [("start", host, secret, "x") for host in (1, 2, 3)]
    assert {hosts.picked(pick) for pick in (0.0, 0.2, 0.5, 0.999)} == {1, 2, 3}
    assert hosts.strike("power", 0.999) == "h3"
    assert hosts.strike("cable", 0.999) == "", "it is down already"
    assert hosts.strike("path", 0.0) == "h1"
    assert hosts.strike("path", 0.5) == "", "the same pair from its other end"
    assert hosts.strike("slowlink", 0.5) == "h2"
    assert did(hosts)[:2] == [("power_off", 3), ("part", 1, 2)]
    for agent in cast(Any, hosts)._agents.values():
        agent.ended = True
    hosts.look()
    assert did(hosts) == [], "while a host is down nobody is there to start an agent"
    assert hosts.mend("power", "h3")
    assert did(hosts) == [("mend", 3)]
    hosts.look()
    assert did(hosts) == [("start", 3, secret, "x")]
    assert hosts.mend("slowlink", "h2")
    assert hosts.mend("path", "h1")
    assert did(hosts) == [("unshape", 2), ("join", 1, 2)]
    assert hosts.strike("hang", 0.999) == "h3"
    assert hosts.mend("hang", "h3")
    assert did(hosts) == [("signal_all", 3, signal.SIGSTOP), ("signal_all", 3, signal.SIGCONT)]


def test_an_agent_that_outlives_its_run_is_told_of_unless_its_host_was_struck(hosts: struck_hosts.StruckHosts) -> None:
    hosts.strike("cable", 0.0)
    cast(Any, hosts)._agents[2].ended = True
    assert hosts.over() == ["process 41 on host h2", "the agent of host h3, process 7"]
    assert [each for each in did(hosts) if each[0] == "signal_all"] == [
        ("signal_all", h, signal.SIGKILL) for h in (1, 2, 3)
    ]


def test_hosts_are_struck_only_where_there_are_some(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prove", "run", "--faults", "power", SCRIPT]) == 3
    assert "--hosts 3 puts it on three" in capsys.readouterr().err
    assert main(["prove", "run", "--hosts", "2", SCRIPT]) == 2
    assert main(["prove", "run", "--hosts", "3", "--replicas", "1", SCRIPT]) == 2
    fleets = [drawn(number, 5, Shape(hosts=3), ["power", "kill"]) for number in range(20)]
    assert {fleet.exchange for fleet in fleets} == {"auto"}
    assert {fleet.agents for fleet in fleets} == {1}


# --- less room than is needed ----------------------------------------------------------------------------------------
@pytest.mark.process
@pytest.mark.parametrize("name", ["FILESIZE", "CPUTIME", "DESCRIPTORS"])
def test_a_limit_ends_who_goes_on(name: str, tmp_path: Path) -> None:
    """Each child says that it is there before its limit is lowered, and then needs what it has no more."""
    needs = {
        "FILESIZE": "open(sys.argv[1], 'wb').write(bytes(1 << 16))",
        "CPUTIME": "sys.exit(1)",  # the kernel's part takes a second: what it was told is looked at
        "DESCRIPTORS": "[open(sys.argv[1], 'wb') for _ in range(9)] and None",
    }
    code = f"import sys; print('here', flush=True); sys.stdin.readline(); held = {needs[name]}"
    command = [sys.executable, "-c", code, str(tmp_path / "file")]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "here\n"
        born = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[19]
        assert name in LIMITS
        before = resource.prlimit(child.pid, LIMITS[name])
        assert carry_out(Running(pid=child.pid, name="r0.1", born=born), name)
        assert resource.prlimit(child.pid, LIMITS[name]) < before or before[0] == resource.RLIM_INFINITY
        assert 0 < resource.prlimit(child.pid, LIMITS[name])[1] <= 4096
        child.communicate("\n", timeout=60)
    assert child.returncode != 0


def test_a_line_that_a_witness_could_not_write_whole_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    writer = StepWriter(tmp_path, "r0.1")
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:5]))
    with pytest.raises(OSError, match="cut short"):
        writer.committed(0, 1.0)


# --- a strike on what is no process ----------------------------------------------------------------------------------
class Stubborn:
    """Cannot be struck at once, nor mended at once."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def strike(self, kind: str, pick: float) -> str:
        self.told.append(f"strike {kind} {pick}")
        return "disk" if len(self.told) > 1 else ""

    def mend(self, kind: str, name: str) -> bool:
        self.told.append(f"mend {kind}")
        return self.told.count(f"mend {kind}") > 1


def test_what_cannot_be_struck_or_mended_now_is_tried_again(tmp_path: Path) -> None:
    fleet = planned(0, 1, Shape(), "0:readonly~0:disk:0", 1, "shm", True)
    what = Stubborn()
    striker = Striker(tmp_path, fleet, around={"disk": what})
    striker.record = StrikeRecord(started_s=0.0, unix_s=0.0)
    (strike,) = fleet.strikes
    driven = None
    assert not striker._strike(driven, strike)  # type: ignore[arg-type]
    assert striker._strike(driven, strike)  # type: ignore[arg-type]
    striker._continue()
    assert striker.record.done[0].continued_s is None
    striker._continue()
    striker._continue()
    assert what.told == ["strike readonly 0.0", "strike readonly 0.0", "mend readonly", "mend readonly"]
    (done,) = striker.record.done
    assert (done.kind, done.role, done.pid) == ("readonly", "disk", 0)
    striker._to_end.append((1e9, lambda: what.mend("full", "disk"), done))
    striker._undo_all()
    assert what.told[-1] == "mend full", "what would last longer than the run ends with it"
    assert not striker._to_end
    assert done.continued_s is not None
