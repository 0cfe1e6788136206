"""What a host has and how it answers, without torch: versions, clock, memory, limits, disks, loopback.

Role: the quick checks. Each reads a file of the kernel or does one small thing, with a deadline where it could wait.
A file that is not there (another kernel, a container) is no finding: what is unknown is not guessed at.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from outlast.config import RunConfig
from outlast.doctor._disk import look_at_disk
from outlast.doctor._finding import Finding, Level
from outlast.doctor._settings import contradictions
from outlast.errors import EnvironmentFault

__all__ = ["facts", "quick"]

_GIB = 2**30
_STA_UNSYNC = 0x40
_OLDEST_SANE_S = 1_700_000_000
_SLOW_CLOCKS = frozenset({"hpet", "acpi_pm", "jiffies"})
_LOOPBACK_S = 2.0


def quick(config: RunConfig, environ: Mapping[str, str], *, places: Mapping[str, Path]) -> list[Finding]:
    """All that can be known in a moment. `places`: directories to look at, by what they are for."""
    findings = [*_versions(), *_clock(), *_memory(), *_cores(config), *_limits(config), *_pages(), *_loopback()]
    for name, place in places.items():
        findings += look_at_disk(name, place)
    return [*findings, *_compiler(), *contradictions(config, environ)]


def facts() -> dict[str, str]:
    """What the hosts of a fleet must agree on for their numbers to be equal, or their processes to meet."""
    from outlast import __version__
    from outlast.runtime.settings.versions import installed

    flags = next((line for line in _lines("/proc/cpuinfo") if line.startswith("flags")), "").split()
    widest = next((name for name in ("avx512f", "avx2", "avx") if name in flags), "")
    versions = {name: version or "missing" for name, version in installed().items()}
    return {
        "outlast": __version__,
        "python": platform.python_version(),
        **versions,
        "machine": platform.machine(),
        "vectors": widest,
        "byteorder": sys.byteorder,
        "kernel": platform.release(),
    }


def _versions() -> Iterator[Finding]:
    from outlast.runtime.settings.versions import check_versions, installed

    try:
        check_versions()
    except EnvironmentFault as error:
        yield Finding(check="versions", level="error", what=error.message, remedy=error.remedy)
        return
    told = ", ".join(f"{name} {version}" for name, version in installed().items())
    yield Finding(check="versions", level="ok", what=f"Python {platform.python_version()}, {told}")


def _clock() -> Iterator[Finding]:
    if time.time() < _OLDEST_SANE_S:
        yield Finding(
            check="clock",
            level="error",
            what="the clock is years behind",
            remedy="set it (timedatectl, chrony): checkpoints and journals are dated by it",
        )
    source = "".join(_lines("/sys/devices/system/clocksource/clocksource0/current_clocksource"))
    if source in _SLOW_CLOCKS:
        yield Finding(
            check="clock",
            level="warning",
            what=f"the kernel keeps time by {source}: each look costs microseconds",
            remedy="boot with clocksource=tsc, or see dmesg why tsc was given up",
        )
    unsynced = _is_unsynchronised()
    if unsynced:
        yield Finding(
            check="clock",
            level="note",
            what="nothing keeps this clock in step with others (NTP)",
            remedy="run chrony or systemd-timesyncd: journals of several hosts are read side by side",
        )
    elif source not in _SLOW_CLOCKS:
        yield Finding(
            check="clock",
            level="ok",
            what=f"in step with others, kept by {source or 'an unknown source'}"
            if unsynced is False
            else f"kept by {source or 'an unknown source'}",
        )


class _Timex(ctypes.Structure):
    """As much of `struct timex` as is asked for, and room for the rest."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_long * 32),
    )


def _is_unsynchronised() -> bool | None:
    """What the kernel says of its clock; None where it may not be asked."""
    state = _Timex()
    try:
        code = ctypes.CDLL(None).adjtimex(ctypes.byref(state))
    except (OSError, AttributeError):
        return None
    return None if code < 0 else bool(state.status & _STA_UNSYNC)


def _memory() -> Iterator[Finding]:
    sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in _lines("/proc/meminfo") if line.endswith("kB")}
    free = sizes.get("MemAvailable", 0)
    limit = _cgroup_number("memory.max")
    used = _cgroup_number("memory.current") or 0
    room = free if limit is None else min(free or limit, max(0, limit - used))
    figures: dict[str, float | int | str] = {"available_bytes": room}
    if room and room < _GIB:
        yield Finding(
            check="memory",
            level="warning",
            what=f"{room / _GIB:.2f} GiB of memory are left",
            remedy="end what else runs here, or give the container more",
            figures=figures,
        )
    elif room:
        of = " of this container's" if limit is not None and limit - used <= free else ""
        yield Finding(check="memory", level="ok", what=f"{room / _GIB:.1f} GiB available{of}", figures=figures)
    try:
        shm = shutil.disk_usage("/dev/shm")
    except OSError:
        return
    if shm.free < _GIB // 4:
        yield Finding(
            check="shared memory",
            level="warning",
            what=f"/dev/shm has {shm.free / 2**20:.0f} MiB free (Docker's default is 64): loaders with workers "
            "fail there; outlast's own exchange does not use it",
            remedy="docker run --shm-size=8g, Kubernetes: an emptyDir of medium Memory at /dev/shm",
        )
    else:
        yield Finding(check="shared memory", level="ok", what=f"/dev/shm has {shm.free / _GIB:.1f} GiB free")


def _cores(config: RunConfig) -> Iterator[Finding]:
    cores = float(len(os.sched_getaffinity(0)))
    quota = "".join(_lines("/sys/fs/cgroup/cpu.max")).split()
    if len(quota) == 2 and quota[0].isdigit() and quota[1].isdigit():
        cores = min(cores, int(quota[0]) / int(quota[1]))
    wanted = (config.replicas + config.num_spares) * max(1, config.threads)
    figures: dict[str, float | int | str] = {"cores": cores, "threads_wanted": wanted}
    if wanted > cores:
        yield Finding(
            check="cores",
            level="warning",
            what=f"{wanted} computing threads are asked of {cores:g} cores",
            remedy="fewer --replicas or --threads; fleets that share cores slow each other",
            figures=figures,
        )
    else:
        yield Finding(check="cores", level="ok", what=f"{cores:g} cores for {wanted} threads", figures=figures)


def _limits(config: RunConfig) -> Iterator[Finding]:
    people = config.replicas + config.num_spares
    files, need = resource.getrlimit(resource.RLIMIT_NOFILE)[0], 256 + 8 * people
    if 0 <= files < need:
        yield Finding(
            check="limits",
            level="error",
            what=f"{files} open files are allowed, {need} are needed",
            remedy=f"ulimit -n {max(4096, need)} (systemd: LimitNOFILE=)",
        )
    pids = _cgroup_number("pids.max")
    if pids is not None and pids < 64 * people:
        yield Finding(
            check="limits",
            level="warning",
            what=f"this container may have {pids} processes and threads",
            remedy=f"allow {64 * people} or more (docker: --pids-limit)",
        )
    if not hasattr(os, "pidfd_open") or not _can_pidfd():
        yield Finding(
            check="limits",
            level="error",
            what="this kernel has no pidfd: exits would not be noticed",
            remedy="Linux 5.3 or newer, and a sandbox that lets pidfd_open through",
        )
    elif files >= need or files < 0:
        yield Finding(check="limits", level="ok", what=f"{files if files >= 0 else 'unlimited'} open files allowed")


def _can_pidfd() -> bool:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:
        return False
    return True


def _pages() -> Iterator[Finding]:
    folder = "/sys/kernel/mm/transparent_hugepage"
    chosen = {name: "".join(_lines(f"{folder}/{name}")) for name in ("enabled", "shmem_enabled")}
    if "[never]" in chosen["enabled"]:
        yield Finding(
            check="huge pages",
            level="note",
            what="transparent huge pages are off: large arrays fault page by page",
            remedy=f"echo madvise > {folder}/enabled",
        )
    elif chosen["enabled"]:
        used = {name: text[text.find("[") + 1 : text.find("]")] for name, text in chosen.items() if "[" in text}
        told = ", ".join(f"{name}: {value}" for name, value in used.items())
        yield Finding(check="huge pages", level="ok", what=told)


def _loopback() -> Iterator[Finding]:
    """A round trip over TCP on 127.0.0.1, as coordinator, agents and replicas talk, and a socket of the file system."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(_LOOPBACK_S)
            with socket.create_connection(server.getsockname(), _LOOPBACK_S) as there:
                here, _ = server.accept()
                with here:
                    here.settimeout(_LOOPBACK_S)
                    begin = time.perf_counter()
                    there.sendall(b"?")
                    here.recv(1)
                    here.sendall(b"!")
                    there.recv(1)
                    took_s = time.perf_counter() - begin
        with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.bind(f"{folder}/s")
    except OSError as error:
        yield Finding(
            check="loopback",
            level="error",
            what=f"127.0.0.1 or a local socket does not answer: {error}",
            remedy="bring the interface up (ip link set lo up), or let the sandbox have it",
        )
        return
    level: Level = "warning" if took_s > 0.01 else "ok"
    yield Finding(
        check="loopback",
        level=level,
        what=f"a round trip took {took_s * 1e6:.0f} µs",
        remedy="something else uses the cores: see the load" if level != "ok" else "",
        figures={"round_trip_s": took_s},
    )


def _compiler() -> Iterator[Finding]:
    if shutil.which("cc") or shutil.which("gcc") or shutil.which("clang"):
        yield Finding(check="compiler", level="ok", what="a C compiler is there for the fast path of sums and rules")
    else:
        yield Finding(
            check="compiler",
            level="note",
            what="no C compiler: sums and robust rules take their torch path, with the same bits, more slowly",
            remedy="install gcc, where steps are short or a rule is used",
        )


def _cgroup_number(name: str) -> int | None:
    text = "".join(_lines(f"/sys/fs/cgroup/{name}"))
    return int(text) if text.isdigit() else None


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
