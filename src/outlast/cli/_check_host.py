"""What `outlast doctor` does. Loads no typer, see `_plain_words.py`."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from outlast.cli._runs import DEFAULT_RUNS
from outlast.errors import ConfigError, EnvironmentFault

if TYPE_CHECKING:
    from outlast.config import RunConfig
    from outlast.doctor import Finding, HostReport

__all__ = ["check_host"]

_MARKS = {"ok": "ok", "note": "note", "warning": "!", "error": "!!"}


def check_host(
    *,
    quick: bool = False,
    config: Path | None = None,
    replicas: int | None = None,
    run_dir: Path = Path(DEFAULT_RUNS),
    checkpoint_dir: str | None = None,
    model: str | None = None,
    burn_in: float | None = None,
    answer: str | None = None,
    seconds: float = 600.0,
    reach: Sequence[str] | None = None,
    compare: Sequence[Path] | None = None,
    strict: bool = False,
    as_json: bool = False,
) -> int:
    """Print what was found of this host, or of the reports in `compare`; answer others with `answer`."""
    from outlast import doctor as room
    from outlast.config import resolve

    begin = time.perf_counter()
    _possible(quick, model, burn_in, reach or ())
    if compare:
        told = room.report("fleet", room.compare([_read(path) for path in compare]), {}, 0.0)
        return _tell(told, as_json, strict)
    if answer is not None:
        return _answer(answer, seconds)
    given = {"replicas": replicas, "checkpoint_dir": checkpoint_dir}
    settings = resolve(cli=given, environ=os.environ, file=config).config
    places = {"run directory": run_dir}
    if settings.checkpoint_dir and "://" not in settings.checkpoint_dir:
        places["checkpoints"] = Path(settings.checkpoint_dir)
    findings = room.quick(settings, os.environ, places=places)
    if not quick:
        findings += _deep(settings, model)
    for address in reach or ():
        from outlast.doctor.network import look_at_host

        findings += look_at_host(address)
    if burn_in is not None:
        findings += _burnt_in(burn_in)
    facts = room.facts()
    return _tell(room.report(socket.gethostname(), findings, facts, time.perf_counter() - begin), as_json, strict)


def _possible(quick: bool, model: str | None, burn_in: float | None, reach: Sequence[str]) -> None:
    """ConfigError for what cannot be done, before anything is."""
    if quick and (model is not None or burn_in is not None):
        raise ConfigError("--quick tries no model and no device", remedy="leave --quick, or --model and --burn-in, out")
    if burn_in is not None and not 0 < burn_in < float("inf"):
        raise ConfigError(f"--burn-in {burn_in:g} is no time", remedy="minutes, above 0; new devices want hours")
    if reach:
        from outlast.runtime.transport.endpoints import read_host_port

        for address in reach:
            read_host_port(address, "the host to reach")


def _deep(settings: RunConfig, model: str | None) -> list[Finding]:
    from outlast.doctor.deep import look_at_devices, look_at_store, model_of, repeats
    from outlast.runtime.settings.versions import check_versions

    findings: list[Finding] = []
    for url in (settings.checkpoint_dir, settings.checkpoint_drain_to):
        if "://" in url and not url.startswith("file://"):
            findings += look_at_store(url)
    try:
        check_versions()
    except EnvironmentFault:
        return findings  # the quick checks have said so
    make = model_of(model) if model is not None else None
    print("outlast: asking devices what the answers are known to; --quick leaves that out", file=sys.stderr, flush=True)
    findings += look_at_devices()
    return findings + (list(repeats(make, str(model))) if make is not None else [])


def _answer(address: str, seconds: float) -> int:
    """Until the time is over, or a key is pressed."""
    import threading

    from outlast.doctor.network import Answering

    if not 0 < seconds < float("inf"):
        raise ConfigError(f"--for {seconds:g} is no time", remedy="seconds, above 0")
    answering = Answering(address)
    print(f"outlast: answering at {answering.address} for {seconds:g} s; elsewhere: outlast doctor --reach "
          f"{answering.address}", file=sys.stderr, flush=True)  # fmt: skip
    try:
        threading.Event().wait(seconds)
    except KeyboardInterrupt:
        pass
    finally:
        answering.close()
    print(f"outlast: {answering.num_callers} calls were answered", file=sys.stderr)
    return 0


def _burnt_in(minutes: float) -> list[Finding]:
    from outlast.doctor.deep import burn_in

    last = [0.0]

    def told(device: str, seconds: float) -> None:
        if seconds - last[0] >= 10 or seconds < last[0]:
            last[0] = seconds
            print(f"outlast: burn-in of {device}: {seconds / 60:.1f} min", file=sys.stderr, flush=True)

    return list(burn_in(minutes, told))


def _tell(report: HostReport, as_json: bool, strict: bool) -> int:
    if as_json:
        import msgspec

        print(msgspec.json.format(msgspec.json.encode(report), indent=2).decode())
    else:
        for finding in report.findings:
            print(f"{_MARKS[finding.level]:<5} {finding.check}: {finding.what}")
            if finding.remedy:
                print(f"      remedy: {finding.remedy}")
        bad = sum(finding.level in ("error", "warning") for finding in report.findings)
        said = {"error": "a run would fail here", "warning": "a run can start, and would be the worse for this"}
        print(f"\n{report.host}: {said.get(report.verdict, 'ready')}" + (f" ({bad} to mend)" if bad else ""))
    return 3 if report.verdict == "error" or (strict and report.verdict == "warning") else 0


def _read(path: Path) -> HostReport:
    import msgspec

    from outlast.doctor import HostReport

    try:
        return msgspec.json.decode(path.read_bytes(), type=HostReport)
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror}", remedy="outlast doctor --json > HOST.json on each"
        ) from error
    except msgspec.MsgspecError as error:
        raise ConfigError(
            f"{path} is no report: {error}", remedy="outlast doctor --json > HOST.json on each"
        ) from error
