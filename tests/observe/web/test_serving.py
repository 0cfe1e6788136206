"""The page's server: what it answers, to whom, and that its figures are those of the terminal."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("starlette", reason="the extra serve is not installed")

from tests.observe.web import asking

from outlast.cli import main
from outlast.core import events as ev
from outlast.errors import ConfigError
from outlast.journal import Journal
from outlast.observe.web import Board, build_app, listen


def ask(app: Any, path: str, *, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    """With the headers of a browser on this host, but for those that are given; "-": without it."""
    given = {"host": "127.0.0.1:8642", **{key.replace("_", "-"): value for key, value in headers.items()}}
    return asking.ask(app, path, {key: value for key, value in given.items() if value != "-"}, method=method)


@pytest.fixture
def run_dir(tmp_path: Path, story: Any) -> Path:
    with Journal.create(tmp_path / "brave") as journal:
        journal.append_many(story.whole)
    return tmp_path / "brave"


@pytest.fixture
def board(run_dir: Path, story: Any) -> Board:
    board = Board([run_dir], clock=lambda _: story.start_s + 20.0)
    board.turn()
    return board


@pytest.fixture
def app(board: Board) -> Any:
    return build_app(board, follow=False)


def picture(app: Any) -> dict[str, Any]:
    status, _, body = ask(app, "/api/runs/brave/picture")
    assert status == 200
    answer: dict[str, Any] = json.loads(body)
    return answer


def samples(app: Any) -> dict[str, float]:
    """Name and labels, as they stand, to value."""
    lines = ask(app, "/metrics")[2].decode().splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}


def test_page_terminal_metrics_and_journal_say_the_same(
    app: Any, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["status", str(run_dir), "--json"])
    status = json.loads(capsys.readouterr().out)
    main(["why", str(run_dir), "--json"])
    why = json.loads(capsys.readouterr().out)
    page, metrics = picture(app), samples(app)
    head = page["head"]
    assert head["status"] == {name: status[name] for name in head["status"]}
    assert head["cost"] == why["cost"]
    assert (head["ettr"], head["headline"]) == (why["ettr"], why["headline"])
    assert page["story"]["downtime_s"] == why["downtime_s"]
    assert metrics['outlast_run_step{run="brave"}'] == status["step"] == 91
    assert metrics['outlast_loss{run="brave"}'] == status["loss"]
    assert metrics['outlast_ettr_ratio{run="brave"}'] == why["ettr"]
    assert metrics['outlast_wall_seconds{run="brave"}'] == why["cost"]["wall_s"]
    for use in ("productive", "recovery", "lost", "idle", "unexplained"):
        assert metrics[f'outlast_time_seconds{{run="brave",use="{use}"}}'] == why["cost"][f"{use}_s"]
    assert sum(v for k, v in metrics.items() if k.startswith("outlast_recoveries_total")) == status["num_recoveries"]
    told = [row["what"] for row in json.loads(ask(app, "/api/runs/brave/rows?show=story&first=0")[2])["rows"]]
    assert told == [row["what"] for row in why["timeline"]]


def test_a_journal_is_told_the_same_at_once_and_event_by_event(tmp_path: Path, story: Any, app: Any) -> None:
    with Journal.create(tmp_path / "slow" / "brave") as journal:
        board = Board([tmp_path / "slow" / "brave"], clock=lambda _: story.start_s + 20.0)
        for event in story.whole:
            journal.append(event)
            assert journal.flush()
            board.turn()
    board.turn()
    live, whole = picture(build_app(board, follow=False)), picture(app)
    for part in ("members", "curves", "marks", "story"):
        assert live[part] == whole[part], part
    assert {**live["head"], "status": None} == {**whole["head"], "status": None}


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil:8642", "[::2]", "", "-"])
def test_a_name_that_is_not_this_machine_s_is_refused_on_every_route(app: Any, host: str) -> None:
    for path in asking.places(app, run=["brave"], name=["app.js"], wish=["stop"]):
        for method in asking.METHODS:
            status, _, body = ask(app, path, method=method, host=host)
            assert status == 403
            assert b"brave" not in body


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1:8642", "[::1]:8642", "proxy.lan"])
def test_names_of_loopback_and_those_allowed_are_served(board: Board, host: str) -> None:
    assert ask(build_app(board, allowed_hosts=["proxy.lan"], follow=False), "/healthz", host=host)[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_nothing_can_be_changed(app: Any, method: str) -> None:
    assert ask(app, "/api/runs/brave/picture", method=method)[0] == 405


def test_another_site_s_page_cannot_read_and_a_link_to_the_page_works(app: Any) -> None:
    for path in asking.places(app, run=["brave"], name=["app.js"], wish=["stop"]):
        for site in ("cross-site", "same-site"):
            assert ask(app, path, sec_fetch_site=site, sec_fetch_mode="cors")[0] == 403
    assert ask(app, "/api/runs", sec_fetch_site="same-origin", sec_fetch_mode="cors")[0] == 200
    assert ask(app, "/", sec_fetch_site="cross-site", sec_fetch_mode="navigate")[0] == 200


def test_the_page_may_load_from_nowhere_else(app: Any) -> None:
    status, headers, body = ask(app, "/")
    assert status == 200
    assert "default-src 'none'" in headers["content-security-policy"]
    for name in re.findall(r'"(page/[\w.]+)"', body.decode()):
        assert ask(app, f"/{name}")[0] == 200
    files = Path(__file__).parents[3].joinpath("src/outlast/observe/web/page").iterdir()
    foreign = {f.name: re.findall(r"(?:https?:)?//(?!www\.w3\.org/2000/svg)[\w.]+\.\w+/", f.read_text()) for f in files}
    assert not any(foreign.values())


@pytest.mark.parametrize("path", ["/page/..%2f_app.py", "/page/_app.py", "/api/runs/no/picture", "/api/runs/no/stream"])
def test_what_is_not_there(app: Any, path: str) -> None:
    assert ask(app, path)[0] == 404


def test_rows_around_a_moment_and_wrong_questions(app: Any, story: Any) -> None:
    rows = json.loads(ask(app, "/api/runs/brave/rows?show=all&near=5&limit=4")[2])
    assert len(rows["rows"]) == 4
    assert any(abs(row["since_s"] - 5.0) < 0.1 for row in rows["rows"])
    assert json.loads(ask(app, "/api/runs/brave/rows?first=10000")[2])["rows"] == []
    assert ask(app, "/api/runs/brave/rows?first=x")[0] == 400
    assert "rows" in json.loads(ask(app, "/api/runs/brave/rows?show=nonsense")[2])


def test_a_run_that_is_not_there_yet_is_waited_for_and_not_ready(tmp_path: Path, story: Any) -> None:
    board = Board([tmp_path / "brave"], clock=lambda _: story.start_s + 1.0)
    app = build_app(board, follow=False)
    board.turn()
    assert list(picture(app)) == ["absent"]
    assert ask(app, "/ready")[0] == 503
    assert ask(app, "/healthz")[0] == 200
    with Journal.create(tmp_path / "brave") as journal:
        journal.append_many(story.started)
        assert journal.flush()
        board.turn()
        board.turn()
        assert picture(app)["head"]["status"]["run_id"] == "brave-otter"
        assert "absent" not in picture(app)
        assert ask(app, "/ready")[0] == 200


def test_a_damaged_journal_is_told(tmp_path: Path, run_dir: Path) -> None:
    (run_dir / "journal.db").write_bytes(b"no database at all" * 100)
    board = Board([run_dir])
    board.turn()
    assert picture(build_app(board, follow=False))["absent"]["trouble"]


def test_metrics_have_no_label_by_replica_and_read_as_prometheus_reads_them(app: Any, tmp_path: Path) -> None:
    text = ask(app, "/metrics")[2].decode()
    assert not re.search(r'"r\d+\.\d+"', text)
    labels = {label for line in text.splitlines() for label in re.findall(r'[{,](\w+)="', line)}
    assert not labels & {"rank", "replica", "host", "device", "agent"}
    counters = re.findall(r"^# TYPE (\S+) counter$", text, re.MULTILINE)
    assert counters
    assert all(name.endswith("_total") for name in counters)
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian: prometheus), so Prometheus's own reading was not tried")
    done = subprocess.run([promtool, "check", "metrics"], input=text, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_rules_are_prometheus_s_and_name_metrics_that_exist(app: Any) -> None:
    folder = Path(__file__).parents[3] / "docs" / "monitoring"
    text = ask(app, "/metrics")[2].decode()
    known = set(re.findall(r"^# TYPE (\S+) ", text, re.MULTILINE)) | {
        "outlast_checkpoint_timestamp_seconds", "outlast_recovery_downtime_seconds_bucket",
        "outlast_recovery_downtime_seconds_sum", "outlast_recovery_downtime_seconds_count",
    }  # fmt: skip
    for name in ("rules.yml", "dashboard.json"):
        used = set(re.findall(r"\boutlast_\w+", (folder / name).read_text()))
        assert used
        assert used <= known, (name, used - known)
    json.loads((folder / "dashboard.json").read_text())
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian: prometheus), so the rules were not read by it")
    done = subprocess.run([promtool, "check", "rules", str(folder / "rules.yml")], capture_output=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_reader_that_is_slow_finds_the_newest_and_one_that_goes_leaves_nothing(tmp_path: Path, story: Any) -> None:
    with Journal.create(tmp_path / "brave") as journal:
        board = Board([tmp_path / "brave"], clock=lambda _: story.start_s + 4.5)
        app = build_app(board, follow=False)
        journal.append_many([*story.started, *story.training])
        assert journal.flush()
        board.turn()
        asyncio.run(_slow_reader(app, board, journal, story))


async def _slow_reader(app: Any, board: Board, journal: Journal, story: Any) -> None:
    got: list[bytes] = []
    may_take, gone = asyncio.Semaphore(2), asyncio.Event()
    took = asyncio.Event()

    async def receive() -> dict[str, Any]:
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        await may_take.acquire()
        got.append(message.get("body", b""))
        took.set()

    scope = {
        "type": "http", "method": "GET", "path": "/api/runs/brave/stream", "raw_path": b"", "query_string": b"",
        "headers": [(b"host", b"localhost")], "http_version": "1.1", "scheme": "http",
    }  # fmt: skip
    stream = asyncio.create_task(app(scope, receive, send))
    while len(got) < 2:
        took.clear()
        await asyncio.wait_for(took.wait(), 10)
    assert b"event: head" in got[1]
    for event in [*story.killed, *story.coordinator_lost, *story.finished]:  # nobody takes anything meanwhile
        journal.append(event)
    assert journal.flush()
    board.turn()
    board.on_change()
    gone.set()
    await asyncio.wait_for(stream, 10)
    assert len(got) == 2


def test_labels_with_quotes_and_lines_stay_one_sample(tmp_path: Path, story: Any) -> None:
    odd = tmp_path / 'a "run"'
    started = msgspec.structs.replace(story.started[0], run_id='x"y\nz')
    with Journal.create(odd) as journal:
        journal.append_many([started, ev.Refused(at_s=story.start_s, reason='no "proof"\n', peer="p", count=3)])
    board = Board([odd], clock=lambda _: story.start_s)
    board.turn()
    lines = ask(build_app(board, follow=False), "/metrics")[2].decode().splitlines()
    assert all(re.fullmatch(r"# .*|\w+\{(\w+=\"(\\.|[^\"\\])*\",?)*\} \S+", line) for line in lines)
    assert any(r"x\"y\nz" in line for line in lines)


def test_hosts_ranks_and_alarms_are_shown(tmp_path: Path, story: Any) -> None:
    started = msgspec.structs.replace(story.started[0], config={"ranks": 2})
    at_s = story.start_s
    with Journal.create(tmp_path / "brave") as journal:
        journal.append_many([
            started,
            ev.AgentStarted(at_s=at_s, agent="h1:aa", pid=1, host="h1", address="10.0.0.1", slots=2),
            ev.AgentStarted(at_s=at_s, agent="h2:bb", pid=1, host="h2", address="10.0.0.2", slots=2),
            ev.ReplicaStarted(at_s=at_s, replica="r0.1", agent="h1:aa", pid=2),
            ev.DeviceFinding(
                at_s=at_s + 1, replica="", host="h2:bb", device="gpu0", source="readings", step=-1, microbatch=-1,
                evidence="xid.fatal: 79", action="fatal", remedy="test it",
            ),
            ev.AlarmWeighed(
                at_s=at_s + 1, host="h2:bb", alarm="fatal xid.fatal", evidence="xid.fatal: 79", chance=0.8,
                delay_s=600.0, action="move", costs={"wait": 4.0, "move": 0.5}, replicas=["r1.1"], successors=[],
            ),
            ev.AgentLost(at_s=at_s + 2, agent="h2:bb", cause="silent", replicas=[]),
        ])  # fmt: skip
    board = Board([tmp_path / "brave"], clock=lambda _: at_s + 3.0)
    board.turn()
    page = picture(build_app(board, follow=False))
    assert page["head"]["ranks"] == 2
    hosts = {host["agent"]: host for host in page["members"]["hosts"]}
    assert (hosts["h1:aa"]["host"], hosts["h1:aa"]["address"], hosts["h1:aa"]["slots"]) == ("h1", "10.0.0.1", 2)
    assert [member[0] for member in hosts["h1:aa"]["members"]] == ["r0.1"]
    assert (bool(hosts["h1:aa"]["lost"]), hosts["h2:bb"]["lost"]) == (False, "silent")
    kinds = [row["kind"] for row in page["story"]["device_rows"]]
    assert kinds == ["alarm_weighed", "device_finding"], "the newest first"
    assert page["story"]["alarms"].startswith("1 alarm weighed, 1 acted on")


@pytest.mark.parametrize("port", [-1, 65_536, 99_999_999])
def test_a_number_that_is_no_port_is_refused(port: int) -> None:
    with pytest.raises(ConfigError, match="is no port"):
        listen(port)
