"""The launcher, in this process: whole runs of it on a host that is not there, and what it makes of ends."""

from __future__ import annotations

import errno
import itertools
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from tests.runtime.virtual_host import Puppet, VirtualHost, VirtualRun

from outlast.config import resolve
from outlast.core import events as ev
from outlast.core.protocol import messages as m
from outlast.errors import EnvironmentFault
from outlast.journal import Journal, LastLine, RunLock
from outlast.runtime.host import launcher as room
from outlast.runtime.host._coordinator_ends import ended_code
from outlast.runtime.host._coordinator_line import CoordinatorLine
from outlast.runtime.host._later_starts import LaterStarts
from outlast.runtime.host.launcher import Launcher
from outlast.runtime.host.silence import BEAT_S
from outlast.runtime.transport.coordinator_place import CoordinatorPlace, keep_place
from outlast.runtime.transport.endpoints import read_host_port
from outlast.runtime.transport.save_messages import COORDINATOR_RECORD, SAVE_EPOCHS, SaveAsked


def ends_after(
    delay_s: float, code: int | None = None, by: int | None = None
) -> Callable[[VirtualRun, Puppet, int], None]:
    return lambda run, child, _: run.host.after(delay_s, lambda: child.end(code, by))


def finishes_after(delay_s: float) -> Callable[[VirtualRun, Puppet, int], None]:
    return lambda run, child, _: run.host.after(delay_s, lambda: run.finish(child))


@pytest.mark.parametrize(("over", "started"), [(True, ["a0"]), (False, ["a0", "a0.2"])])
def test_an_agent_that_ends_with_the_run_has_no_successor(tmp_path: Path, over: bool, started: list[str]) -> None:
    """The coordinator writes the end down, tells the agents, and ends: an agent may be the first to be gone."""

    def finishes(run: VirtualRun, child: Puppet, _: int) -> None:
        run.host.after(3.0, lambda: run.finish(child, after_s=1.0))

    def ends(run: VirtualRun, child: Puppet, number: int) -> None:
        if number == 1:
            run.host.after(3.5 if over else 2.5, lambda: child.end(0))

    run = VirtualRun(tmp_path, finishes, ends)
    assert run.goes() == 0
    assert [child.command[3] for child in run.agents] == started


@pytest.mark.parametrize(
    ("code", "moved", "started"),
    [(0, True, ["a0"]), (10, True, ["a0"]), (0, False, ["a0", "a0.2"]), (1, True, ["a0", "a0.2"])],
)
def test_where_the_record_is_out_of_reach_the_agent_says_that_the_run_is_over(
    tmp_path: Path, code: int, moved: bool, started: list[str]
) -> None:
    """It was told so by a coordinator on another host. The process here has a while to hear of it first."""

    def ends(run: VirtualRun, child: Puppet, number: int) -> None:
        if number == 1:
            run.host.after(2.0, lambda: child.end(code))

    def place() -> None:
        here = run.launcher.endpoint
        keep_place(tmp_path, "10.0.0.2:1" if moved else here, 2, "run")
        known = CoordinatorPlace(read_host_port(here), tmp_path, "run")
        run.launcher._line = CoordinatorLine(known, b"", "run", dial=run.calls.dial)

    run = VirtualRun(tmp_path, finishes_after(30.0), ends)
    run.launcher.ready = place
    assert run.goes() == (code if len(started) == 1 else 0)
    assert [child.command[3] for child in run.agents] == started
    assert run.host.passed_s == pytest.approx(12.1 if len(started) == 1 else 30.0, abs=0.3)


def test_where_the_record_is_out_of_reach_one_agent_s_word_is_passed_on_to_the_others(tmp_path: Path) -> None:
    """Another agent of this host had no connection when the end was told."""

    def ends(run: VirtualRun, child: Puppet, number: int) -> None:
        run.host.after(2.0 if number == 1 else 60.0, lambda: child.end(0))

    def place() -> None:
        keep_place(tmp_path, "10.0.0.2:1", 2, "run")
        known = CoordinatorPlace(read_host_port(run.launcher.endpoint), tmp_path, "run")
        run.launcher._line = CoordinatorLine(known, b"", "run", dial=run.calls.dial)

    run = VirtualRun(tmp_path, finishes_after(30.0), ends, agents=2)
    run.launcher.ready = place
    assert run.goes() == 0
    assert [child.sent for child in run.agents] == [[], [signal.SIGUSR1]]
    assert run.host.passed_s == pytest.approx(12.1, abs=0.3)


@pytest.mark.parametrize(("stuck", "code"), [(True, 143), (False, 0)])
def test_an_agent_that_is_stuck_after_a_good_end_is_ended_in_time_and_told_by_the_code(
    tmp_path: Path, stuck: bool, code: int
) -> None:
    """The writer exports still as the notice comes, again and again: half an export is no success."""

    def exports(run: VirtualRun, child: Puppet, _: int) -> None:
        child.obeys = {signal.SIGKILL}
        for delay_s in (100.0, 106.0, 109.0):
            run.host.after(delay_s, lambda: run.struck(signal.SIGTERM))
        if not stuck:
            run.host.after(109.5, lambda: child.end(0))

    run = VirtualRun(tmp_path, finishes_after(3.0), exports)
    assert run.goes() == code
    [agent] = run.agents
    assert agent.sent == [signal.SIGUSR1, *[signal.SIGTERM] * 3, *([signal.SIGKILL] if stuck else [])]
    assert run.host.passed_s < 110.5


def test_an_end_that_found_no_room_in_the_journal_is_in_the_record(tmp_path: Path) -> None:
    """On a full disk: of a coordinator that ended by itself, with the run's code. One that was killed is replaced."""
    with Journal.create(tmp_path / "run") as journal:
        epoch = journal.claim("coordinator")
        assert ended_code(tmp_path / "run", 0) is None
        journal.put(epoch, COORDINATOR_RECORD, msgspec.msgpack.encode(m.FleetRecord(outcome="failed", exit_code=6)))
    assert [ended_code(tmp_path / "run", code) for code in (6, 1, None)] == [6, None, None]


def test_the_end_is_told_with_what_a_slow_disk_takes_to_keep_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was up to a second before the end that a stopwatch saw, where each wait for the disk took a fifth."""
    host = VirtualHost()

    class Slow(LastLine):
        def __init__(self, run_dir: Path) -> None:
            super().__init__(run_dir)
            host.pass_s(0.4)

        def __exit__(self, *error: Any) -> None:
            super().__exit__(*error)
            host.pass_s(0.4)

    Journal.create(tmp_path / "run").close()
    launcher = Launcher(resolve(cli={}, environ={}), ["true"], tmp_path / "run", system=host)
    launcher._exit_code = 5
    monkeypatch.setattr(room, "LastLine", Slow)
    launcher._end(RunLock.take(tmp_path / "run"))
    with Journal.open_reader(tmp_path / "run") as reader:
        (end,) = reader.events(kinds=[ev.RunEnded])
    assert end.event == ev.RunEnded(at_s=launcher._apart_s + host.now_s(), exit_code=5)


# --- whole runs, in a time that jumps -------------------------------------------------------------------------------
def test_a_run_goes_from_nothing_to_its_end(tmp_path: Path) -> None:
    run = VirtualRun(tmp_path, finishes_after(30.0), agents=2)
    assert run.goes() == 0
    assert [child.command[3:] for child in run.agents] == [["a0", "python", "train.py"], ["a1", "python", "train.py"]]
    assert [child.sent for child in run.agents] == [[signal.SIGUSR1]] * 2, "scripts may take their time"
    assert run.all_have_ended()
    assert [type(event) for event in run.told()] == [ev.RunStarted, ev.RunFinished, ev.RunEnded]
    assert list(dict.fromkeys(run.out)) == ["", "there is no coordinator"]
    assert run.calls.heard == []


def test_a_coordinator_that_dies_again_and_again_is_given_up(tmp_path: Path) -> None:
    run = VirtualRun(tmp_path, ends_after(0.3, by=signal.SIGSEGV))
    assert run.goes() == 3
    assert len(run.coordinators) == 9
    [agent] = run.agents
    assert agent.sent == [signal.SIGTERM]
    *_, finished, ended = run.told()
    assert "could not be kept alive: 9 ended, the last because it ended by SIGSEGV" in finished.detail
    assert (finished.outcome, finished.exit_code, ended.exit_code) == ("failed", 3, 3)
    assert run.all_have_ended()
    taken = [json.loads(child.environ.get("OUTLAST_TAKEOVER", "[]")) for child in run.coordinators]
    assert [len(rows) for rows in taken] == list(range(9)), "each is told of those that nobody has written down"
    assert taken[8][7]["detect_s"] <= BEAT_S + 1e-6, "of a difference of two times"


def test_one_that_lives_for_a_minute_is_replaced_for_as_long_as_the_run_lasts(tmp_path: Path) -> None:
    def lives(run: VirtualRun, child: Puppet, number: int) -> None:
        (finishes_after(1.0) if number == 20 else ends_after(61.0, code=1))(run, child, number)

    run = VirtualRun(tmp_path, lives)
    assert run.goes() == 0
    assert len(run.coordinators) == 20


def test_a_coordinator_that_is_stopped_is_killed_and_replaced_when_it_has_ended(tmp_path: Path) -> None:
    def stops(run: VirtualRun, child: Puppet, number: int) -> None:
        if number == 2:
            finishes_after(1.0)(run, child, number)
        else:
            run.host.after(5.0, lambda: run.host.states.update({child.pid: "T"}))

    run = VirtualRun(tmp_path, stops)
    assert run.goes() == 0
    first, second = run.coordinators
    assert first.sent == [signal.SIGKILL]
    [row] = json.loads(second.environ["OUTLAST_TAKEOVER"])
    assert row["detail"].startswith("it was stopped;")
    assert 0.0 < row["detect_s"] < 2.0
    assert second.environ["OUTLAST_LISTEN_FD"] == first.environ["OUTLAST_LISTEN_FD"]


def test_one_that_not_even_a_kill_ends_is_left_behind_and_killed_again_at_the_end(tmp_path: Path) -> None:
    def stops(run: VirtualRun, child: Puppet, number: int) -> None:
        if number == 2:
            finishes_after(1.0)(run, child, number)
            run.host.after(0.9, lambda: run.coordinators[0].obeys.add(signal.SIGKILL))
        else:
            child.obeys.clear()
            run.host.after(5.0, lambda: run.host.states.update({child.pid: "T"}))

    run = VirtualRun(tmp_path, stops)
    assert run.goes() == 0
    assert run.coordinators[0].sent == [signal.SIGKILL] * 2
    assert run.all_have_ended()


def test_a_coordinator_that_sleeps_longer_than_it_may_is_one_that_hangs(tmp_path: Path) -> None:
    """It gives no sign, and is not stopped."""

    def hangs(run: VirtualRun, child: Puppet, number: int) -> None:
        if number == 2:
            finishes_after(1.0)(run, child, number)
        else:
            run.host.after(5.0, lambda: run.silent.add(child.pid))

    run = VirtualRun(tmp_path, hangs, formation_s=4.0)
    assert run.goes() == 0
    [row] = json.loads(run.coordinators[1].environ["OUTLAST_TAKEOVER"])
    assert row["detail"].startswith("it hung;")
    assert 4.0 < row["detect_s"] < 5.0


def test_a_stopped_agent_is_continued(tmp_path: Path) -> None:
    def stops(run: VirtualRun, child: Puppet, _: int) -> None:
        run.host.after(5.0, lambda: run.host.states.update({child.pid: "T"}))
        run.host.after(8.0, lambda: run.host.states.pop(child.pid))

    run = VirtualRun(tmp_path, finishes_after(10.0), stops)
    assert run.goes() == 0
    [agent] = run.agents
    assert set(agent.sent[:-1]) == {signal.SIGCONT}
    [[said]] = run.calls.heard  # once, however often it was continued
    assert said.agent == "a0"
    assert 0.0 < said.for_s < 3.0


def test_an_agent_that_dies_has_a_successor_and_every_coordinator_hears_of_it(tmp_path: Path) -> None:
    def dies(run: VirtualRun, child: Puppet, number: int) -> None:
        if number == 1:
            run.host.after(2.0, lambda: child.end(by=signal.SIGKILL))

    def lives(run: VirtualRun, child: Puppet, number: int) -> None:
        (finishes_after(3.0) if number == 2 else ends_after(5.0, by=signal.SIGKILL))(run, child, number)

    run = VirtualRun(tmp_path, lives, dies)
    assert run.goes() == 0
    assert [child.command[3] for child in run.agents] == ["a0", "a0.2"]
    gone = m.AgentGone(agent="a0", cause="SIGKILL")
    assert run.calls.heard == [[gone], [gone]], "on each connection once"


def test_who_listens_to_nobody_is_told_when_it_does(tmp_path: Path) -> None:
    def dies(run: VirtualRun, child: Puppet, number: int) -> None:
        if number == 1:
            run.calls.deaf = True
            run.host.after(2.0, lambda: child.end(code=1))
            run.host.after(6.0, lambda: setattr(run.calls, "deaf", False))

    run = VirtualRun(tmp_path, finishes_after(10.0), dies)
    assert run.goes() == 0
    assert run.calls.heard == [[m.AgentGone(agent="a0", cause="exit code 1")]]


@pytest.mark.parametrize(
    ("number", "reason", "code"),
    [(signal.SIGTERM, "terminated", 143), (signal.SIGINT, "interrupt", 130), (signal.SIGHUP, "hangup", 129)],
)
def test_a_signal_stops_the_run_in_order(tmp_path: Path, number: signal.Signals, reason: str, code: int) -> None:
    def obeys(run: VirtualRun, child: Puppet, _: int) -> None:
        run.host.after(3.0, lambda: run.struck(number))
        run.host.after(4.0, lambda: run.finish(child, code))

    run = VirtualRun(tmp_path, obeys)
    if number == signal.SIGHUP:
        signal.signal(number, signal.SIG_DFL)  # under nohup it is ignored
    before = signal.getsignal(number)
    assert run.goes() == code
    assert run.calls.all(m.Stop) == [m.Stop(reason=reason, exit_code=code)]
    assert [child.sent for child in run.agents] == [[signal.SIGTERM]]
    assert run.host.passed_s < 5.0
    assert signal.getsignal(number) is before


@pytest.mark.parametrize(("keeps", "by_s"), [(False, 8.0), (True, 38.0)])
def test_who_does_not_stop_when_it_was_asked_is_killed(tmp_path: Path, keeps: bool, by_s: float) -> None:
    """The coordinator first, for which a save may take its time; then the agents, however often they are asked."""

    def never(run: VirtualRun, child: Puppet, _: int) -> None:
        if keeps:
            lock_fd = os.dup(child.passed("OUTLAST_LOCK_FD"))
            with Journal.open_writer(run.launcher.run_dir, lock_fd=lock_fd) as own:
                own.put(own.claim("coordinator"), SAVE_EPOCHS, b"0")
        run.host.after(3.0, lambda: run.struck(signal.SIGTERM))
        run.host.after(6.0, lambda: run.struck(signal.SIGTERM))

    run = VirtualRun(tmp_path, never, lambda run, child, _: child.obeys.remove(signal.SIGTERM), stop_save_s=30.0)
    assert run.goes() == 143
    [coordinator], [agent] = run.coordinators, run.agents
    assert coordinator.sent == [signal.SIGKILL]
    assert by_s < run.host.passed_s - 10.0 < by_s + 1.0
    assert agent.sent == [signal.SIGTERM, signal.SIGKILL]
    *_, finished, _ = run.told()
    assert (finished.outcome, finished.exit_code) == ("stopped", 143)
    assert "had ended before it could end the run" in finished.detail


@pytest.mark.parametrize(("keeps", "late"), [(True, False), (True, True), (False, False)])
def test_a_coordinator_that_dies_before_the_last_save_is_followed_while_there_is_time(
    tmp_path: Path, keeps: bool, late: bool
) -> None:
    """The run ended at once, and all since its newest checkpoint was lost. Its successor is told to stop as well."""

    def dies(run: VirtualRun, child: Puppet, number: int) -> None:
        if number > 1:
            run.host.after(2.0, lambda: run.finish(child, 143))
            return
        if keeps:
            lock_fd = os.dup(child.passed("OUTLAST_LOCK_FD"))
            with Journal.open_writer(run.launcher.run_dir, lock_fd=lock_fd) as own:
                own.put(own.claim("coordinator"), SAVE_EPOCHS, b"0")
        run.host.after(3.0, lambda: run.struck(signal.SIGTERM))
        run.host.after(31.0 if late else 4.0, lambda: child.end(by=signal.SIGKILL))

    run = VirtualRun(tmp_path, dies, stop_save_s=25.0)
    assert run.goes() == 143
    followed = keeps and not late
    assert len(run.coordinators) == 1 + followed
    assert run.calls.all(m.Stop) == [m.Stop(reason="terminated", exit_code=143)] * (1 + followed)
    assert run.all_have_ended()


def test_a_second_ctrl_c_kills_everything_at_once(tmp_path: Path) -> None:
    def never(run: VirtualRun, child: Puppet, _: int) -> None:
        for delay_s in (3.0, 3.5):
            run.host.after(delay_s, lambda: run.struck(signal.SIGINT))

    run = VirtualRun(tmp_path, never, lambda run, child, _: child.obeys.remove(signal.SIGTERM), agents=2)
    assert run.goes() == 130
    assert [child.sent for child in run.host.children] == [[signal.SIGKILL]] * 3
    assert run.host.passed_s < 4.0


def test_an_engine_that_repeats_its_notice_kills_nobody(tmp_path: Path) -> None:
    def obeys(run: VirtualRun, child: Puppet, _: int) -> None:
        for delay_s in (3.0, 3.5, 4.0):
            run.host.after(delay_s, lambda: run.struck(signal.SIGTERM))
        run.host.after(5.0, lambda: run.finish(child, 143))

    run = VirtualRun(tmp_path, obeys)
    assert run.goes() == 143
    assert run.coordinators[0].sent == []


def test_sigusr1_asks_for_a_save(tmp_path: Path) -> None:
    def finishes(run: VirtualRun, child: Puppet, _: int) -> None:
        run.host.after(3.0, lambda: run.struck(signal.SIGUSR1))
        finishes_after(5.0)(run, child, 1)

    run = VirtualRun(tmp_path, finishes)
    assert run.goes() == 0
    assert run.calls.heard == [[SaveAsked(reason="a save was asked for")]]


def test_what_is_raised_by_who_watches_ends_all_processes_and_says_itself(tmp_path: Path) -> None:
    run, said = VirtualRun(tmp_path, agents=2), list[int]()

    def broken(why_out: str) -> None:
        raise ValueError("a bug")

    run.launcher.watch, run.launcher.ended = broken, said.append
    with pytest.raises(ValueError, match="a bug"):
        run.goes()
    assert run.all_have_ended()
    assert said == []


# --- a host that has no room for a process --------------------------------------------------------------------------
def dies_in_a_full_host(until_s: float) -> Callable[[VirtualRun, Puppet, int], None]:
    """The first is killed, as by the kernel that is short of memory, and no other can be started for a while."""

    def dies(run: VirtualRun, child: Puppet, number: int) -> None:
        if number == 1:
            run.host.after(2.0, lambda: setattr(run.host, "full_until_s", until_s))
            run.host.after(2.0, lambda: child.end(by=signal.SIGKILL))

    return dies


def assert_tried_after_pauses(refused: list[tuple[float, int]]) -> None:
    """Until the seventh second, and a start that failed has kept no descriptor."""
    assert len(refused) >= 4
    assert all(later - sooner >= 1.0 for (sooner, _), (later, _) in itertools.pairwise(refused))
    held = [number for _, number in refused[1:]]
    assert held[-1] - held[0] < len(held) - 1, "each would have kept one or more; others of this process come and go"


def test_a_coordinator_that_cannot_be_followed_at_once_is_followed_later(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    dies = dies_in_a_full_host(7.0)

    def lives(run: VirtualRun, child: Puppet, number: int) -> None:
        (finishes_after(3.0) if number == 2 else dies)(run, child, number)

    run = VirtualRun(tmp_path, lives)
    assert run.goes() == 0
    assert_tried_after_pauses(run.host.refused)
    assert (len(run.coordinators), len(run.agents)) == (2, 1), "who lives is left alone"
    assert capfd.readouterr().err.count("the coordinator's successor cannot be started: Resource temporarily") == 1
    assert run.all_have_ended()


def test_an_agent_that_cannot_be_followed_at_once_is_followed_later(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = VirtualRun(tmp_path, finishes_after(12.0), dies_in_a_full_host(7.0), agents=2)
    assert run.goes() == 0
    assert_tried_after_pauses(run.host.refused)
    assert [child.command[3] for child in run.agents] == ["a0", "a1", "a0.2"]
    assert capfd.readouterr().err.count("agent a0.2 cannot be started: Resource temporarily unavailable") == 1
    assert run.calls.heard == [[m.AgentGone(agent="a0", cause="SIGKILL")]], "its death is told at once"
    assert run.all_have_ended()


def test_a_start_that_fails_for_minutes_is_told_each_minute_and_no_more_once_it_has_worked(
    capfd: pytest.CaptureFixture[str],
) -> None:
    now_s, tries = [0.0], list[float]()

    def begin() -> None:
        tries.append(now_s[0])
        if now_s[0] < 150.0:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    system: Any = SimpleNamespace(now_s=lambda: now_s[0])
    later = LaterStarts(system)
    later.start("agent a0.2", begin)
    for now_s[0] in range(1, 300):
        later.turn()
    said = [line.partition("cannot be started")[2].partition(";")[0] for line in capfd.readouterr().err.splitlines()]
    why = ": Resource temporarily unavailable"
    assert said == [why, f", for 60 s now{why}", f", for 120 s now{why}"]
    assert (len(tries), tries[-1]) == (151, 150.0)


@pytest.mark.parametrize("over", [False, True])
def test_a_journal_for_which_there_is_no_descriptor_just_now_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, over: bool
) -> None:
    """Whether the run is over is then not known. A successor of a coordinator that had ended it ends it again."""
    whole = Journal.open_reader

    def ends(run: VirtualRun, child: Puppet, number: int) -> None:
        def without_descriptors() -> None:
            monkeypatch.setattr(Journal, "open_reader", short)
            run.host.after(4.0, lambda: monkeypatch.setattr(Journal, "open_reader", whole))
            if over:
                run.finish(child)
            else:
                child.end(by=signal.SIGKILL)

        if number == 1:
            run.host.after(2.0, without_descriptors)
        elif over:
            run.host.after(5.0, lambda: child.end(0))
        else:
            run.host.after(5.0, lambda: run.finish(child))

    def short(run_dir: Path) -> Journal:
        raise EnvironmentFault(f"{run_dir}/journal.db cannot be read")

    def dies(run: VirtualRun, child: Puppet, number: int) -> None:
        if number == 1 and not over:
            run.host.after(3.0, lambda: child.end(by=signal.SIGKILL))

    run = VirtualRun(tmp_path, ends, dies)
    assert run.goes() == 0
    assert (len(run.coordinators), len(run.agents)) == ((2, 1) if over else (2, 2))
    assert run.host.passed_s < 9.0


def test_a_run_that_ends_meanwhile_starts_no_agent_any_more(tmp_path: Path) -> None:
    run = VirtualRun(tmp_path, finishes_after(5.0), dies_in_a_full_host(1000.0), agents=2)
    assert run.goes() == 0
    assert run.host.passed_s < 6.0


def test_a_run_that_is_to_stop_while_there_is_no_room_for_a_coordinator_stops(tmp_path: Path) -> None:
    run = VirtualRun(tmp_path, dies_in_a_full_host(1000.0))
    run.launcher.ready = lambda: run.host.after(5.0, lambda: run.struck(signal.SIGTERM))
    assert run.goes() == 143
    assert [child.sent for child in run.agents] == [[signal.SIGTERM]]
    assert run.host.passed_s < 6.0
    *_, finished, _ = run.told()
    assert (finished.outcome, finished.exit_code) == ("stopped", 143)


@pytest.mark.parametrize("born", [0, 1])
def test_a_run_for_which_there_is_no_room_does_not_begin(tmp_path: Path, born: int) -> None:
    def fills(run: VirtualRun, child: Puppet, _: int) -> None:
        run.host.full_until_s = 1000.0

    run = VirtualRun(tmp_path, fills)
    run.host.full_until_s = 0.0 if born else 1000.0
    with pytest.raises(BlockingIOError):
        run.goes()
    assert len(run.host.children) == born
    assert run.all_have_ended()
