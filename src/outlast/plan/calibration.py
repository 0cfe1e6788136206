"""What outlast's own work costs on a machine, measured: from journals to a file, from the file into a job.

Role: every duration that a plan otherwise assumes (save, load, detection, stall of the survivors, join, process start,
restart of a lost fleet) and the share of deaths that survivors outlast, each with how often it was seen and its spread.
Invariant: a cost that no journal showed stays out of the file and keeps the plan's assumption, which is said. Times are
the events' own: each is a difference of one clock. It reads and writes one JSON file.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from scipy import special

from outlast.core import events as ev
from outlast.errors import ConfigError, EnvironmentFault

from ._model import Job, Tier
from .answers import Answer, Table
from .number_words import duration, share, significant

__all__ = ["Calibration", "Cost", "Counted", "applied", "calibrate", "calibration_answer", "load", "write"]

_FORMAT = "outlast-calibration/1"
_PLANNED = frozenset({"finished", "left"})


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """A duration: how often seen, its mean with a 95 % interval, standard deviation, and the 95th percentile. Seen once
    it has neither interval nor deviation."""

    n: int
    mean_s: float
    low_s: float | None
    high_s: float | None
    sd_s: float | None
    p95_s: float


class Counted(msgspec.Struct, frozen=True, kw_only=True):
    """`k` of `n`, with the 95 % interval of Jeffreys' posterior."""

    k: int
    n: int
    mean: float
    low: float
    high: float


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """The file. costs, shares: by name; `sizes`: bytes of a state, and of it written by one writer in one save."""

    format: str = _FORMAT
    runs: int
    faults: int
    costs: dict[str, Cost]
    shares: dict[str, Counted]
    sizes: dict[str, float] = {}
    machine: dict[str, str] = {}


_MEANING = {
    "save_blocked": "a save holds training up",
    "save_copied": "until its snapshot is taken",
    "save_durable": "until it is durable",
    "load": "reading a checkpoint",
    "detect": "from a death to its notice",
    "roll_call": "forming a view",
    "stall": "no step is committed when a death is outlasted",
    "join": "a joiner catches up",
    "start": "from a death until its place is filled",
    "restart": "from the loss of all to the first view again",
    "step": "a step",
}


def _cost(values: Sequence[float]) -> Cost:
    x = np.asarray(values, dtype=np.float64)
    mean, p95 = float(x.mean()), float(np.quantile(x, 0.95))
    if len(x) == 1:
        return Cost(n=1, mean_s=mean, low_s=None, high_s=None, sd_s=None, p95_s=p95)
    sd = float(x.std(ddof=1))
    half = float(special.stdtrit(len(x) - 1, 0.975)) * sd / len(x) ** 0.5
    return Cost(n=len(x), mean_s=mean, low_s=max(0.0, mean - half), high_s=mean + half, sd_s=sd, p95_s=p95)


def _share(k: int, n: int) -> Counted:
    low, high = (float(special.betaincinv(k + 0.5, n - k + 0.5, p)) for p in (0.025, 0.975))
    return Counted(k=k, n=n, mean=(k + 0.5) / (n + 1), low=low, high=high)


class _Gathered:
    """What one or more journals show."""

    def __init__(self) -> None:
        self.values: dict[str, list[float]] = {}
        self.sizes: dict[str, list[float]] = {}
        self.outlasted = self.lost = 0
        self._gone: dict[str, float] = {}
        self._lost_s: float | None = None

    def add(self, name: str, value: float) -> None:
        if value >= 0:
            self.values.setdefault(name, []).append(value)

    def begin(self) -> None:
        """Another journal."""
        self._gone, self._lost_s = {}, None

    def take(self, event: ev.AnyEvent) -> None:
        match event:
            case ev.CheckpointSaved():
                self._saved(event)
            case ev.CheckpointLoaded():
                self.add("load", event.seconds)
            case ev.Recovery():
                self._recovered(event)
            case ev.ViewFormed():
                self.add("roll_call", event.roll_call_s)
                if self._lost_s is not None:
                    self.add("restart", event.at_s - self._lost_s)
                    self._lost_s = None
            case ev.FleetGone():
                self.lost += 1
                self._lost_s = event.at_s
            case ev.ReplicaExited() if event.cause not in _PLANNED:
                self._gone[event.replica.partition(".")[0]] = event.at_s
            case ev.JoinerCaughtUp():
                self.add("join", event.seconds)
                gone_s = self._gone.pop(event.replica.partition(".")[0], None)
                if gone_s is not None:
                    self.add("start", event.at_s - gone_s)
            case ev.ProgressMade() if event.step_s:
                self.add("step", event.step_s)
            case _:
                pass

    def _saved(self, event: ev.CheckpointSaved) -> None:
        self.add("save_blocked", event.blocked_s)
        self.add("save_copied", event.copied_s)
        self.add("save_durable", event.durable_s)
        for name, size in (("state_bytes", event.state_bytes), ("written_bytes", event.written_bytes)):
            self.sizes.setdefault(name, []).append(size / (event.num_writers if name == "written_bytes" else 1))

    def _recovered(self, event: ev.Recovery) -> None:
        self.add("detect", event.detect_s)
        if event.lost_steps == 0:
            self.outlasted += 1
            self.add("stall", event.downtime_s)


def calibrate(
    journals: Iterable[Iterable[ev.AnyEvent]], machine: dict[str, str] | None = None, *, meant_losses: int = 0
) -> Calibration:
    """The costs that these runs show. ConfigError where they show none. `meant_losses`: of all replicas at once, on
    purpose; they say nothing of what survivors outlast."""
    seen, runs = _Gathered(), 0
    for journal in journals:
        seen.begin()
        runs += 1
        for event in journal:
            seen.take(event)
    if not seen.values:
        raise ConfigError("the journals show no cost", remedy="name runs that trained, or give --measure")
    faults, lost = seen.outlasted + seen.lost, max(0, seen.lost - meant_losses)
    return Calibration(
        runs=runs,
        faults=faults,
        costs={name: _cost(seen.values[name]) for name in _MEANING if name in seen.values},
        shares={"outlasted": _share(seen.outlasted, seen.outlasted + lost)} if seen.outlasted + lost else {},
        sizes={name: float(np.mean(values)) for name, values in seen.sizes.items()},
        machine=machine or {},
    )


def write(calibration: Calibration, path: str) -> None:
    """The file; EnvironmentFault where it cannot be written."""
    try:
        Path(path).write_bytes(msgspec.json.format(msgspec.json.encode(calibration), indent=1) + b"\n")
    except OSError as error:
        raise EnvironmentFault(
            f"cannot write {path}: {error.strerror}", remedy="choose a folder that exists and is writable"
        ) from None


def load(path: str) -> Calibration:
    """A file that `write` made; ConfigError for anything else."""
    try:
        found = msgspec.json.decode(Path(path).read_bytes(), type=Calibration)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", remedy="`outlast calibrate` writes one") from None
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"{path} is no calibration: {error}", remedy="`outlast calibrate` writes one") from None
    if found.format != _FORMAT:
        raise ConfigError(f"{path} has format {found.format!r}", remedy=f"this version reads {_FORMAT}")
    return found


def _mean(calibration: Calibration, name: str, otherwise: float) -> float:
    return calibration.costs[name].mean_s if name in calibration.costs else otherwise


def applied(job: Job, calibration: Calibration) -> tuple[Job, list[str]]:
    """The job with measured costs in place of assumed ones, and what was taken and what stays assumed.

    What grows with the state (a save, a load) is scaled by the bytes of one device; the rest is taken as it is.
    """
    near = job.tiers[0]
    own = calibration.sizes.get("written_bytes", 0.0)
    factor = 16.0 * job.parameters / job.accelerators / own if own else 1.0
    start_s = _mean(calibration, "restart", _mean(calibration, "start", near.recovery_s))
    load_s = _mean(calibration, "load", 0.0)
    measured = {"restart", "start"} & set(calibration.costs)
    recover_s = start_s + load_s * max(0.0, factor - 1) if measured else near.recovery_s
    first = Tier(
        name=near.name,
        write_s=_mean(calibration, "save_blocked", near.write_s / factor) * factor,
        lag_s=_mean(calibration, "save_durable", near.lag_s / factor) * factor,
        recovery_s=recover_s,
    )
    detect_s = _mean(calibration, "detect", -1.0)
    classes = tuple(msgspec.structs.replace(c, detection_s=detect_s) if detect_s >= 0 else c for c in job.classes)
    job = msgspec.structs.replace(
        job,
        classes=classes,
        tiers=(first, *job.tiers[1:]),
        mask_stall_s=_mean(calibration, "stall", job.mask_stall_s),
    )
    taken = [f"{_MEANING[name]} {duration(c.mean_s)} (n = {c.n})" for name, c in calibration.costs.items()]
    assumed = [_MEANING[name] for name in _MEANING if name not in calibration.costs]
    notes = [f"Measured by outlast in {calibration.runs} runs: {', '.join(taken)}."]
    if own:
        notes.append(f"Saves and loads are scaled by bytes a device: {factor:.3g} times those measured.")
    return job, notes + ([f"Not measured, so as assumed: {', '.join(assumed)}."] if assumed else [])


def calibration_answer(calibration: Calibration, title: str) -> Answer:
    """The file's content for a reader."""
    costs = tuple(
        (
            _MEANING.get(name, name),
            str(c.n),
            duration(c.mean_s),
            "unknown" if c.low_s is None or c.high_s is None else f"{duration(c.low_s)} to {duration(c.high_s)}",
            duration(c.p95_s),
        )
        for name, c in calibration.costs.items()
    )
    tables = [Table(title="", columns=("cost", "seen", "mean", "95 % of the mean", "95th percentile"), rows=costs)]
    rows = tuple(
        (name, f"{s.k} of {s.n}", share(s.mean), f"{share(s.low)} to {share(s.high)}")
        for name, s in calibration.shares.items()
    )
    if rows:
        tables.append(Table(title="Shares", columns=("share", "seen", "estimate", "95 %"), rows=rows))
    missing = [_MEANING[name] for name in _MEANING if name not in calibration.costs]
    notes = [f"Not seen: {', '.join(missing)}. A plan keeps its assumptions of these."] if missing else []
    if calibration.sizes:
        notes.append(f"Bytes: {', '.join(f'{k} {significant(v)}' for k, v in calibration.sizes.items())}.")
    data: dict[str, Any] = msgspec.to_builtins(calibration)
    return Answer(title=title, tables=tuple(tables), data=data, notes=tuple(notes))
