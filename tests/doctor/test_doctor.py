"""What `outlast doctor` finds on hosts of many kinds, made up here file by file, and what it says of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from outlast.cli import main
from outlast.config import RunConfig
from outlast.doctor import Finding, HostReport, compare, contradictions, quick, report, verdict
from outlast.doctor import _disk as disk_module
from outlast.doctor import _host as host_module
from outlast.doctor._disk import look_at_disk
from outlast.doctor.deep import burn_in, look_at_store, model_of, repeats
from outlast.errors import ConfigError
from outlast.journal import Mount


@pytest.fixture(autouse=True)
def any_disk_is_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """How long a page takes on this machine just now is not what is tested."""
    monkeypatch.setattr(disk_module, "_SLOW_SYNC_S", float("inf"))


CALM = {"replicas": 2, "checkpoint_dir": "/ck"}


def outlast(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    code = main(["doctor", *args])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


@pytest.mark.parametrize(
    ("settings", "level", "words"),
    [
        ({"lease_s": 2.0}, "error", "a lease of 2 s ends before three heartbeats of 1 s"),
        ({"formation_s": 4.0}, "error", "must have formed within 4 s"),
        ({"outside_s": 0.2}, "error", "may take 0.2 s, less than the floor"),
        ({"ack_s": 1.5}, "warning", "has 1.5 s to acknowledge"),
        ({"group_timeout_s": 20.0}, "warning", "c10d gives up after 20 s"),
        ({"stop_save_s": 120.0}, "warning", "may save for 120 s"),
        ({"lease_s": 300.0}, "warning", "longer than the lease of 300 s"),
        ({"checkpoint_drain_to": "/ck"}, "warning", "drained to the place that they come from"),
        ({"replicas": 1, "checkpoint_dir": ""}, "note", "nothing is tolerated"),
        ({"checkpoint_dir": ""}, "note", "loses all work"),
        ({"max_restarts": 0}, "note", "not replaced"),
    ],
)
def test_settings_that_contradict_each_other(settings: dict[str, Any], level: str, words: str) -> None:
    config = msgspec.structs.replace(RunConfig(**CALM), **settings)
    (found,) = [finding for finding in contradictions(config, {}) if words in finding.what]
    assert found.level == level
    assert found.remedy


def test_the_defaults_contradict_nothing() -> None:
    assert [finding.level for finding in contradictions(RunConfig(**CALM), {})] == ["ok"]


@pytest.mark.parametrize(
    ("environ", "level"),
    [({"WORLD_SIZE": "4"}, "error"), ({"OUTLAST": "off"}, "warning"), ({"OMP_NUM_THREADS": "8"}, "note")],
)
def test_variables_that_work_against_a_run(environ: dict[str, str], level: str) -> None:
    assert [finding.level for finding in contradictions(RunConfig(**CALM), environ)] == [level]


HOST = {
    "/proc/meminfo": "MemTotal: 8388608 kB\nMemAvailable: 4194304 kB",
    "/sys/fs/cgroup/memory.max": "max",
    "/sys/fs/cgroup/cpu.max": "max 100000",
    "/sys/fs/cgroup/pids.max": "max",
    "/sys/devices/system/clocksource/clocksource0/current_clocksource": "tsc",
    "/sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never",
}


@pytest.mark.parametrize(
    ("changed", "check", "level", "words"),
    [
        ({}, "memory", "ok", "4.0 GiB available"),
        ({"/proc/meminfo": "MemAvailable: 524288 kB"}, "memory", "warning", "0.50 GiB"),
        ({"/sys/fs/cgroup/memory.max": str(2**30), "/sys/fs/cgroup/memory.current": str(2**29)}, "memory", "warning",
         "0.50 GiB"),
        ({"/sys/fs/cgroup/cpu.max": "50000 100000"}, "cores", "warning", "2 computing threads are asked of 0.5 cores"),
        ({"/sys/fs/cgroup/pids.max": "100"}, "limits", "warning", "100 processes"),
        ({"/sys/devices/system/clocksource/clocksource0/current_clocksource": "hpet"}, "clock", "warning", "hpet"),
        ({"/sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]"}, "huge pages", "note", "off"),
    ],
)  # fmt: skip
def test_what_the_kernel_tells(
    changed: dict[str, str], check: str, level: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = HOST | changed
    monkeypatch.setattr(host_module, "_lines", lambda path: files.get(path, "").splitlines())
    monkeypatch.setattr(host_module.os, "sched_getaffinity", lambda _: set(range(64)))
    found = [f for f in quick(RunConfig(**CALM), {}, places={}) if f.check == check and words in f.what]
    assert [finding.level for finding in found] == [level]
    assert bool(found[0].remedy) == (level != "ok")


def test_limits_that_would_end_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_module.resource, "getrlimit", lambda _: (64, 64))
    monkeypatch.setattr(host_module, "_can_pidfd", lambda: False)
    found = [finding for finding in quick(RunConfig(**CALM), {}, places={}) if finding.check == "limits"]
    assert [finding.level for finding in found] == ["error", "error"]
    assert "64 open files" in found[0].what


def test_a_loopback_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError(99, "Cannot assign requested address")

    monkeypatch.setattr(host_module.socket, "create_server", refuse)
    (found,) = [finding for finding in quick(RunConfig(**CALM), {}, places={}) if finding.check == "loopback"]
    assert found.level == "error"


def test_a_disk_is_tried_and_left_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "kept").write_bytes(b"x")
    found = list(look_at_disk("checkpoints", tmp_path / "not" / "yet"))
    assert verdict(found) in ("ok", "note")
    assert found[-1].figures["sync_s"] >= 0  # type: ignore[operator]
    assert os.listdir(tmp_path) == ["kept"]


@pytest.mark.parametrize(
    ("fstype", "name", "level"),
    [("nfs4", "run directory", "error"), ("nfs4", "checkpoints", "ok"), ("tmpfs", "checkpoints", "note")],
)
def test_file_systems(fstype: str, name: str, level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_module, "find_mount", lambda *_: Mount("/", fstype, "x"))
    monkeypatch.setattr(disk_module, "_takes_direct", lambda _: True)
    assert verdict(look_at_disk(name, tmp_path)) == level


def test_a_disk_that_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"")
    assert verdict(look_at_disk("checkpoints", tmp_path / "file")) == "error"

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk_module.os, "fdatasync", full)
    found = list(look_at_disk("checkpoints", tmp_path))
    assert (verdict(found), "No space left" in found[-1].what) == ("error", True)
    assert os.listdir(tmp_path) == ["file"]


def test_a_store_that_honours_conditional_puts_and_one_that_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("obstore")
    from outlast.checkpoint import ObjectStore

    (found,) = look_at_store("memory://")
    assert found.level == "ok"
    monkeypatch.setattr(ObjectStore, "publish", lambda *_: True)
    monkeypatch.setattr(ObjectStore, "read_head", lambda *_: b"two")
    (found,) = look_at_store("memory://")
    assert (found.level, "two coordinators" in found.what) == ("error", True)


MODELS = """
import os, torch
def steady():
    model = torch.nn.Linear(4, 2)
    return model, lambda: model(torch.randn(3, 4)).square().mean()
def wavering():
    model = torch.nn.Linear(4, 2)
    factor = int.from_bytes(os.urandom(4), "little") / 7
    return model, lambda: model(torch.ones(3, 4)).square().mean() * factor
def nothing():
    return 3
"""


def test_whether_this_model_gives_the_same_bits(tmp_path: Path) -> None:
    path = tmp_path / "models.py"
    path.write_text(MODELS)
    assert verdict(repeats(model_of(f"{path}:steady"), "steady")) == "ok"
    (found,) = [finding for finding in repeats(model_of(f"{path}:wavering"), "it") if finding.level == "error"]
    assert "the loss" in found.what
    assert "weight" in found.what
    for wrong in (f"{path}:nothing", f"{path}:absent", "absent.py:steady", "no_such_module:f", "steady", f"{path}:"):
        with pytest.raises(ConfigError):
            list(repeats(model_of(wrong), wrong))


def of_host(host: str, **facts: str) -> HostReport:
    return report(host, [Finding(check="memory", level="ok", what="fine")], {"torch": "2.13", **facts}, 0.1)


def test_hosts_of_a_fleet_side_by_side() -> None:
    same = [of_host("a"), of_host("b")]
    assert [finding.level for finding in compare(same)] == ["ok"]
    other = of_host("c", torch="2.9", kernel="6")
    found = compare([*same, other])
    assert {finding.check: finding.level for finding in found} == {"torch": "error", "kernel": "note"}
    assert "2.13 on a, b; 2.9 on c" in "".join(finding.what for finding in found)
    ill = report("d", [Finding(check="clock", level="warning", what="hpet", remedy="tsc")], {"torch": "2.13"}, 0.1)
    assert [finding.check for finding in compare([*same, ill])] == ["d: clock"]


def test_the_command_s_exit_codes_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = outlast(capsys, "--quick", "--json", "--run-dir", str(tmp_path), "--checkpoint-dir", str(tmp_path))
    document = json.loads(out)
    assert code == (3 if document["verdict"] == "error" else 0)
    assert {"versions", "memory", "checkpoints", "loopback"} <= {finding["check"] for finding in document["findings"]}
    (tmp_path / "config.toml").write_text("[run]\nack_s = 1.5\nreplicas = 2\n")
    args = ("--quick", "--config", str(tmp_path / "config.toml"), "--run-dir", str(tmp_path))
    assert outlast(capsys, *args)[0] == 0
    assert outlast(capsys, *args, "--strict")[0] == 3
    (tmp_path / "config.toml").write_text("[run]\nlease_s = 1\n")
    code, out, _ = outlast(capsys, *args)
    assert (code, "a run would fail here" in out) == (3, True)


def test_reports_of_hosts_are_compared_by_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(msgspec.json.encode(of_host(name, python=name)))
    code, out, _ = outlast(capsys, "--compare", str(tmp_path / "a"), "--compare", str(tmp_path / "b"))
    assert (code, "python differs: a on a; b on b" in out) == (3, True)
    (tmp_path / "a").write_text("no report")
    code, _, err = outlast(capsys, "--compare", str(tmp_path / "a"))
    assert (code, "is no report" in err) == (2, True)
    assert outlast(capsys, "--quick", "--model", "x.py:f")[0] == 2


@pytest.mark.process
@pytest.mark.parametrize("args", [["doctor", "--quick"], ["--help"], ["doctor", "--help"]])
def test_torch_is_not_loaded(args: list[str], tmp_path: Path) -> None:
    code = f"import sys; from outlast.cli import main; main({args!r}); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_burn_in_says_what_it_can_have_found(capsys: pytest.CaptureFixture[str]) -> None:
    told: list[str] = []
    (found,) = burn_in(0.001, lambda device, seconds: told.append(device))
    assert found.level == "ok"
    assert told
    assert set(told) == {"cpu"}
    assert found.figures["least_rate_an_answer"] == pytest.approx(3 / int(found.figures["answers"]))
    assert float(found.figures["deaths_a_day_after"]) < float(found.figures["deaths_a_day_now"])


@pytest.mark.parametrize(
    "args",
    [["--burn-in", "0"], ["--burn-in", "-1"], ["--burn-in", "inf"], ["--quick", "--burn-in", "1"],
     ["--model", "absent.py:make"], ["--reach", "nowhere"]],
)  # fmt: skip
def test_what_cannot_be_is_refused_before_anything_is_looked_at(
    args: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All devices were asked first, which takes minutes."""
    asked: list[str] = []
    monkeypatch.setattr("outlast.doctor.deep.look_at_devices", lambda: asked.append("devices") or [])
    assert main(["doctor", *args]) == 2
    assert "[CONFIG]" in capsys.readouterr().err
    assert not asked
