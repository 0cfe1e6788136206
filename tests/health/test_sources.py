"""Readings: what is there is read, what is not is said once, and nothing that a sensor does holds anybody up."""

from __future__ import annotations

import http.server
import itertools
import json
import math
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from outlast.health.sources import (
    CloudNotices,
    Counters,
    KernelLog,
    Nvml,
    Reading,
    Recorded,
    Sampler,
    alarms_of,
    default_counters,
    read_kernel_lines,
)

PATIENCE_S = 20.0
KERNEL = [  # recorded lines
    ("6,1,2,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, GPU has fallen off the bus.", "xid.fatal", "0000:3b:00"),
    ("NVRM: Xid (PCI:0000:86:00): 63, pid='<unknown>', Row Remapper: New row marked", "xid.warning", "0000:86:00"),
    ("NVRM: Xid (PCI:0000:86:00): 31, pid=77, MMU Fault", "xid", "0000:86:00"),
    ("EDAC MC0: 1 CE memory read error on CPU_SrcID#0", "edac.line", "MC0"),
    ("EDAC MC1: 1 UE memory read error on CPU_SrcID#1", "memory.uncorrected", "MC1"),
    ("mce: [Hardware Error]: Machine check events logged", "mce", ""),
    ("Out of memory: Killed process 4242 (python) total-vm:1kB", "oom", "4242"),
    ("mlx5_core 0000:5e:00.0: health recovery flow aborted, device reset", "nic.reset", "mlx5_core"),
    ("EXT4-fs error (device sda1): ext4_find_entry:1455: inode #2", "fs.error", "sda1"),
    ("blk_update_request: I/O error, dev sdb, sector 123", "disk.error", "sdb"),
]


@pytest.mark.parametrize(("line", "name", "device"), KERNEL)
def test_kernel_lines_say_what_they_are_about(line: str, name: str, device: str) -> None:
    (found,) = read_kernel_lines(["usb 1-1: new device", line, ""], 7.0)
    assert (found.name, found.device, found.at_s) == (name, device, 7.0)


def test_the_kernel_log_is_read_from_its_end_on(tmp_path: Path) -> None:
    log = tmp_path / "kmsg"
    log.write_text(KERNEL[0][0] + "\n")
    source = KernelLog(log)
    assert source.read(0.0) == []
    with log.open("a") as file:
        file.write(KERNEL[1][0] + "\n" + KERNEL[6][0][:20])
    assert [r.name for r in source.read(1.0)] == ["xid.warning"]
    with log.open("a") as file:
        file.write(KERNEL[6][0][20:] + "\n")
    assert [r.name for r in source.read(2.0)] == ["oom"]


def test_numbers_in_files_and_files_without_numbers(tmp_path: Path) -> None:
    folder = tmp_path / "devices/system/edac/mc/mc0"
    folder.mkdir(parents=True)
    (folder / "ce_count").write_text("12\n")
    (folder / "ue_count").write_text("many\n")
    zone = tmp_path / "class/thermal/thermal_zone0"
    zone.mkdir(parents=True)
    (zone / "temp").write_text("45500\n")
    found = [reading for source in default_counters(tmp_path) for reading in source.read(1.0)]
    assert {(r.source, r.device, r.name, r.value) for r in found} == {
        ("edac", "mc0", "edac.ce", 12.0), ("edac", "mc0", "missing", None),
        ("thermal", "thermal_zone0", "thermal.c", 45.5),
        ("throttle", "", "missing", None), ("net", "", "missing", None), ("link", "", "missing", None),
    }  # fmt: skip


class NVMLError(Exception):
    pass


def library(**more: Any) -> Any:
    """A recorded twin of NVML's Python library: two devices, of which the second has fallen off the bus."""

    def handle(index: int) -> int:
        if index == 1:
            raise NVMLError("GPU is lost")
        return index

    def unsupported(*_: Any) -> Any:
        raise NVMLError("Not Supported")

    given = {
        "NVMLError": NVMLError, "nvmlInit": lambda: None, "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": handle, "nvmlDeviceGetUUID": lambda h: b"GPU-aa", "NVML_TEMPERATURE_GPU": 0,
        "nvmlDeviceGetTemperature": lambda h, k: 61, "nvmlDeviceGetPowerUsage": lambda h: 300_500,
        "NVML_AGGREGATE_ECC": 1, "nvmlDeviceGetTotalEccErrors": lambda h, kind, n: 3 + kind,
        "nvmlDeviceGetRemappedRows": lambda h: (2, 1, 0, 0),
        "nvmlDeviceGetCurrentClocksThrottleReasons": lambda h: 4, "nvmlDeviceGetPcieReplayCounter": unsupported,
    }  # fmt: skip
    return SimpleNamespace(**(given | more))


def test_nvml_reads_each_device_and_a_lost_one_is_a_reading() -> None:
    found = {(r.device, r.name): r for r in Nvml(library()).read(1.0)}
    assert found["GPU-aa", "nvml.power.w"].value == 300.5
    assert found["GPU-aa", "nvml.ecc.uncorrected"].value == 4.0
    assert found["1", "missing"].text == "device 1: GPU is lost"
    assert ("GPU-aa", "nvml.pcie.replays") not in found


def test_nvml_tells_xids_and_adds_up_its_links() -> None:
    events = [SimpleNamespace(device=0, eventData=79), SimpleNamespace(device=0, eventData=31)]
    registered: list[Any] = []

    def wait(made: Any, timeout_ms: int) -> Any:
        assert timeout_ms == 0, "nobody waits for an event"
        if not events:
            raise NVMLError("Timeout")
        return events.pop(0)

    def errors(handle: int, link: int, counter: int) -> int:
        if link > 1:
            raise NVMLError("Invalid Argument")
        return 10 * link + counter

    source = Nvml(library(
        nvmlEventSetCreate=lambda: "set", nvmlEventTypeXidCriticalError=8, nvmlEventSetWait=wait,
        nvmlDeviceRegisterEvents=lambda *given: registered.append(given), nvmlDeviceGetNvLinkErrorCounter=errors,
    ))  # fmt: skip
    found = source.read(1.0)
    assert [(r.name, r.value) for r in found if r.name.startswith("xid")] == [("xid.fatal", 79.0), ("xid", 31.0)]
    assert {r.name: r.value for r in found}["nvml.nvlink.errors"] == 52.0
    source.read(2.0)
    assert len(registered) == 1, "once, and the device that is lost is none"
    assert [a.severity for a in alarms_of(found, {})] == ["fatal"]


def test_ports_and_file_systems_are_read_where_there_are_any_and_missed_where_not(tmp_path: Path) -> None:
    port = tmp_path / "class/infiniband/mlx5_0/ports/1/counters"
    port.mkdir(parents=True)
    (port / "link_downed").write_text("3\n")
    disk = tmp_path / "fs/ext4/sda1"
    disk.mkdir(parents=True)
    (disk / "errors_count").write_text("0\n")
    scsi = tmp_path / "block/sda/device"
    scsi.mkdir(parents=True)
    (scsi / "ioerr_cnt").write_text("0x1f\n")
    found = {(r.source, r.device, r.name): r.value for s in default_counters(tmp_path) for r in s.read(1.0)}
    assert found["disk", "sda", "disk.errors"] == 31.0
    assert found["infiniband", "mlx5_0", "ib.link_downed"] == 3.0
    assert found["ext4", "sda1", "fs.errors"] == 0.0
    assert not [key for key in found if key[0] == "md"]


class Metadata(http.server.BaseHTTPRequestHandler):
    """A cloud's endpoint: `answers` by (method, path) -> (status, text), or a function that answers."""

    answers: dict[tuple[str, str], Any] = {}  # noqa: RUF012

    def do_GET(self) -> None:
        self._answer("GET")

    def do_PUT(self) -> None:
        self._answer("PUT")

    def _answer(self, method: str) -> None:
        found = self.answers.get((method, self.path), (404, ""))
        status, text = found(self) if callable(found) else found
        data = text.encode()
        self.send_response(status)
        if status == 302:
            self.send_header("Location", text)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def endpoint() -> Iterator[Callable[[dict[tuple[str, str], Any]], str]]:
    """Starts a metadata endpoint on loopback with the answers given; returns its address."""
    servers = []

    def start(answers: dict[tuple[str, str], Any]) -> str:
        handler = type("Handler", (Metadata,), {"answers": answers})
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        server.daemon_threads = True
        server.handle_error = lambda *_: None  # type: ignore[method-assign]  # who asked has given up
        servers.append(server)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        return f"http://127.0.0.1:{server.server_address[1]}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def texts(readings: Iterable[Reading], name: str = "cloud.notice") -> list[str]:
    return [r.text for r in readings if r.name == name]


def needs(header: str, value: str, text: str) -> Any:
    return lambda request: (200, text) if request.headers.get(header) == value else (403, "")


AWS = {
    ("PUT", "/latest/api/token"): (200, "tok"),
    ("GET", "/latest/meta-data/spot/instance-action"): needs(
        "X-aws-ec2-metadata-token", "tok", '{"action": "terminate", "time": "2026-11-23T08:22:00Z"}'
    ),
    ("GET", "/latest/meta-data/events/maintenance/scheduled"): (
        200, '[{"Code": "system-reboot", "State": "active", "NotBefore": "tomorrow"}, {"State": "completed"}]',
    ),
}  # fmt: skip
GCP = {
    ("GET", "/computeMetadata/v1/instance/preempted"): needs("Metadata-Flavor", "Google", "TRUE"),
    ("GET", "/computeMetadata/v1/instance/maintenance-event"): (200, "MIGRATE_ON_HOST_MAINTENANCE\n"),
}
AZURE = {
    ("GET", "/metadata/scheduledevents?api-version=2020-07-01"): needs(
        "Metadata", "true", '{"Events": [{"EventType": "Preempt", "Resources": ["vm1"], "NotBefore": ""}]}'
    ),
}


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        (AWS, ["spot instance: terminate at 2026-11-23T08:22:00Z", "maintenance: system-reboot, not before tomorrow"]),
        (GCP, ["preempted", "maintenance: MIGRATE_ON_HOST_MAINTENANCE"]),
        (AZURE, ["Preempt of vm1, not before now"]),
    ],
    ids=["aws", "gcp", "azure"],
)
def test_clouds_announce_and_are_heard_once(
    answers: dict[tuple[str, str], Any], said: list[str], endpoint: Any
) -> None:
    source = CloudNotices(endpoint(answers), timeout_s=PATIENCE_S)
    assert texts(source.read(0.0)) == said
    assert source.read(1.0) == []


HOSTILE = {
    "no JSON": (200, "<html>"),
    "another shape": (200, "[[1, 2], null, 7]"),
    "a number": (200, "7"),
    "an error": (500, "x"),
    "too long": (200, "x" * 100_000),
    "elsewhere": (302, "http://127.0.0.1:1/steal"),
}


@pytest.mark.parametrize("answer", HOSTILE)
def test_a_metadata_endpoint_that_lies_announces_nothing(answer: str, endpoint: Any) -> None:
    for answers, path in ((AWS, "/latest/meta-data/spot/instance-action"), (AZURE, next(iter(AZURE))[1])):
        mine = {("PUT", "/latest/api/token"): (200, "tok"), ("GET", path): HOSTILE[answer]}
        assert texts(CloudNotices(endpoint(mine)).read(0.0)) == []
        assert answers


def test_an_endpoint_that_announces_ever_new_things_is_not_believed_for_long(endpoint: Any) -> None:
    """As one does that puts the time into its notice, or a thousand of them into an answer."""
    rows, looks = [0], []
    path = next(iter(AZURE))[1]

    def answer(request: Any) -> tuple[int, str]:
        rows[0] += 10
        events = [{"EventType": f"Preempt{number}", "Resources": []} for number in range(rows[0] - 10, rows[0])]
        return 200, json.dumps({"Events": events})

    source = CloudNotices(endpoint({("GET", path): answer}), timeout_s=PATIENCE_S)
    for _ in range(20):
        looks += source.read(0.0)
    assert len(texts(looks)) == 64
    assert {r.name for r in looks} == {"cloud.notice", "implausible"}
    said: list[str] = []
    sampled(Given("cloud", lambda now: looks), rounds=3, said=said)
    assert len(said) == 1
    assert "more is not believed" in said[0]


def test_no_cloud_is_said_once_and_asked_again_after_an_hour(endpoint: Any) -> None:
    now = [0.0]
    source = CloudNotices(endpoint({}), clock=lambda: now[0])
    assert [r.name for r in source.read(0.0)] == ["missing"]
    assert source.read(1.0) == []
    now[0] = 4000.0
    assert [r.name for r in source.read(2.0)] == ["missing"]


def test_an_endpoint_that_hangs_ends_at_its_deadline(endpoint: Any) -> None:
    gate = threading.Event()
    base = endpoint({("PUT", "/latest/api/token"): lambda request: (gate.wait(10), (200, ""))[1]})
    try:
        assert [r.name for r in CloudNotices(base, timeout_s=0.05).read(0.0)] == ["missing"]
    finally:
        gate.set()


class Given:
    """A source whose readings a test decides on."""

    def __init__(self, name: str, read: Callable[[float], Iterable[Reading]]) -> None:
        self.name, self._read = name, read
        self.done = threading.Event()

    def read(self, now_s: float) -> Iterable[Reading]:
        try:
            return self._read(now_s)
        finally:
            self.done.set()


def sampled(*sources: Given, rounds: int = 1, clock: Any = None, said: list[str] | None = None) -> list[Reading]:
    """What a sampler collects from sources that answer."""
    sampler = Sampler(
        sources, clock=clock or (lambda: 0.0), wall=lambda: 5.0, say=(said if said is not None else []).append
    )
    sampler.start()
    found: list[Reading] = []
    for _ in range(rounds):
        for source in sources:
            source.done.clear()
        sampler.ask()
        for source in sources:
            assert source.done.wait(10)
        while sampler._busy:
            found += sampler.collect()
    sampler.close()
    return found


def reading(name: str, value: float | None, **more: Any) -> Reading:
    return Reading(**({"at_s": 1.0, "source": "s", "device": "d", "name": name, "value": value} | more))


def test_absurd_values_are_none_and_said_once() -> None:
    said: list[str] = []
    values = [math.nan, math.inf, -5.0, 2.0**70]
    source = Given("s", lambda now: [reading("edac.ce", value) for value in values] + [reading("thermal.c", 1e6)])
    found = sampled(source, rounds=3, said=said)
    assert {(r.name, r.value) for r in found} == {("implausible", None)}
    assert len(found) == 15
    assert len(said) == 1


def test_a_source_that_raises_is_a_missing_reading_said_once() -> None:
    said: list[str] = []

    def broken(now: float) -> Iterable[Reading]:
        raise RuntimeError("driver/library version mismatch")

    found = sampled(Given("nvml", broken), Given("s", lambda now: [reading("edac.ce", 1.0)]), rounds=2, said=said)
    assert sorted((r.source, r.name) for r in found) == [("nvml", "missing")] * 2 + [("s", "edac.ce")] * 2
    assert len(said) == 1


def test_half_the_sensors_gone_and_a_clock_that_jumps_leave_the_other_half(tmp_path: Path) -> None:
    said: list[str] = []

    def gone(now: float) -> Iterable[Reading]:
        raise FileNotFoundError(2, "No such file or directory", "/sys/gone")

    lost = [Given(f"lost{number}", gone) for number in range(5)]
    there = [
        Given(f"there{number}", lambda now, number=number: [reading("edac.ce", 1.0, source=f"there{number}")])
        for number in range(5)
    ]
    clock = itertools.chain([0.0, 1e9, -1e9, 5.0], itertools.repeat(6.0))
    found = sampled(*lost, *there, rounds=3, said=said, clock=lambda: next(clock))
    assert [r.name for r in found].count("edac.ce") == 15
    assert sorted(text.partition(":")[0] for text in said if "No such file" in text) == [
        f"readings of lost{number}" for number in range(5)
    ]
    assert len(said) == 5


def test_without_nvml_that_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)
    with pytest.raises(ImportError):
        Nvml().read(0.0)


def test_a_source_that_no_thread_is_to_be_had_for_is_told_as_silent(refuse: set[str]) -> None:
    """The agent that reads its host goes on, and so do its replicas."""
    refuse.add("outlast-lone")
    now, said = [0.0], list[str]()
    lone = Given("lone", lambda _: [reading("edac.ce", 1.0)])
    sampler = Sampler([lone], interval_s=10, clock=lambda: now[0], wall=lambda: 1.0, say=said.append)
    sampler.start()
    sampler.ask()
    now[0] = 40.0
    assert [(r.source, r.name) for r in sampler.collect()] == [("lone", "missing")]
    assert len(said) == 1
    sampler.close()


def test_a_source_that_hangs_hurts_itself_alone_and_that_is_a_reading() -> None:
    gate, now, said = threading.Event(), [0.0], []
    hangs = Given("hangs", lambda _: (gate.wait(30) and []) or [])
    works = Given("works", lambda _: [reading("edac.ce", 1.0)])
    sampler = Sampler([hangs, works], interval_s=10, clock=lambda: now[0], wall=lambda: 1.0, say=said.append)
    sampler.start()
    try:
        found: list[Reading] = []
        for _ in range(5):
            works.done.clear()
            sampler.ask()
            assert works.done.wait(10)
            while "works" in sampler._busy:
                found += sampler.collect()
            now[0] += 10
        found += sampler.collect()
        assert [r.name for r in found if r.source == "s"] == ["edac.ce"] * 5
        assert [(r.source, r.name) for r in found if r.source != "s"] == [("hangs", "missing")]
        assert len(said) == 1
    finally:
        gate.set()
        sampler.close()


def test_a_wall_clock_that_jumps_changes_labels_only() -> None:
    walls = iter([1e9, -5.0, 4e12, 4e12])
    source = Given("s", lambda now: [reading("edac.ce", 1.0, at_s=now)])
    sampler = Sampler([source], clock=lambda: 0.0, wall=lambda: next(walls), say=lambda text: None)
    sampler.start()
    found: list[Reading] = []
    for _ in range(3):
        source.done.clear()
        sampler.ask()
        assert source.done.wait(10)
        while sampler._busy:
            found += sampler.collect()
    sampler.close()
    assert [r.at_s for r in found] == [1e9, -5.0, 4e12]


def test_alarms_follow_from_rises_and_events_and_a_reset_counter_is_none() -> None:
    before: dict[tuple[str, str, str], float] = {}
    assert alarms_of([reading("edac.ue", 5.0), reading("edac.ce", 500.0)], before) == []
    (alarm,) = alarms_of([reading("edac.ue", 6.0), reading("edac.ce", 550.0)], before)
    assert (alarm.severity, alarm.evidence) == ("fatal", "edac.ue rose by 1 to 6")
    assert alarms_of([reading("edac.ue", 0.0)], before) == []
    assert [a.severity for a in alarms_of([reading("edac.ue", 1.0)], before)] == ["fatal"]
    events = [reading("xid.fatal", 79.0, text="fell off"), reading("cloud.notice", None), reading("xid", 31.0)]
    assert [a.severity for a in alarms_of(events, before)] == ["fatal", "notice"]
    assert alarms_of([reading("missing", None), reading("nvml.temperature.c", 70.0)], before) == []


def test_a_recording_is_played_back_in_batches_of_one_time(tmp_path: Path) -> None:
    rows = [reading("edac.ce", float(i), at_s=float(i // 2)) for i in range(5)]
    (tmp_path / "twin.jsonl").write_bytes(b"\n".join(map(msgspec.json.encode, rows)) + b'\n{"at_s": 3, "cut')
    late = Recorded(tmp_path / "late.jsonl")
    with pytest.raises(OSError, match="No such file"):
        late.read(0.0)
    (tmp_path / "late.jsonl").touch()
    assert list(late.read(0.0)) == []
    (tmp_path / "late.jsonl").write_bytes(msgspec.json.encode(rows[0]))
    assert len(list(late.read(0.0))) == 1, "a recording may appear while it is waited for"
    twin = Recorded(tmp_path / "twin.jsonl")
    played = [list(twin.read(0.0)) for _ in range(4)]
    marked = [msgspec.structs.replace(row, recorded=True) for row in rows]
    assert played == [marked[:2], marked[2:4], marked[4:], []]
    before: dict[tuple[str, str, str], float] = {}
    alarms_of([msgspec.structs.replace(marked[0], name="edac.ue")], before)
    (alarm,) = alarms_of([msgspec.structs.replace(marked[4], name="edac.ue")], before)
    assert alarm.evidence.endswith("(recorded)")


def test_a_recording_that_is_replaced_is_played_from_its_beginning(tmp_path: Path) -> None:
    for number in (1.0, 2.0):
        (tmp_path / "next").write_bytes(msgspec.json.encode(reading("edac.ce", number)))
        (tmp_path / "next").rename(tmp_path / "twin.jsonl")
        if number == 1.0:
            twin = Recorded(tmp_path / "twin.jsonl")
        assert [[row.value for row in twin.read(0.0)] for _ in range(2)] == [[number], []]


def test_counters_leave_out_what_they_are_told(tmp_path: Path) -> None:
    for card in ("lo", "eth0"):
        (tmp_path / card).mkdir()
        (tmp_path / card / "carrier_changes").write_text("3")
    source = Counters("link", tmp_path, [("*/carrier_changes", "net.carrier_changes")], leave_out=("lo",))
    assert [(r.device, r.value) for r in source.read(0.0)] == [("eth0", 3.0)]
