"""Anybody's script under faults: two undisturbed runs to hold it against, then struck ones, each judged.

The undisturbed runs are one of a single replica and one of the whole fleet: what differs between them is the script's
own, and no fault is needed to show it. Built on the striker and the findings of `prove strikes`.
"""

from __future__ import annotations

import itertools
import json
import shutil
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from outlast.core import events as ev
from outlast.errors import ConfigError
from outlast.plan.replay_comparison import ReplayComparison
from outlast.prove._drive import Driven
from outlast.prove._leaks import LeakWatch
from outlast.prove._script_findings import (
    Witnessed,
    carried_over,
    microbatch_findings,
    script_findings,
    witnessed,
)
from outlast.prove._strike_campaign import run_watched
from outlast.prove.script_evidence import ScriptEvidence, evidence_of
from outlast.prove.script_plan import ScriptFleet, Shape, schedule_of
from outlast.prove.script_surroundings import ScriptSurroundings
from outlast.prove.strike_findings import Outcome, StrikeFinding, Undisturbed, Watched, judge
from outlast.prove.strike_plan import Setting, StruckFleet
from outlast.prove.striker import StrikeDone, StrikeRecord
from outlast.prove.trace_outcome import outcome_of
from outlast.runtime.settings.witness_files import VARIABLE

__all__ = ["Baseline", "ScriptCampaign", "ScriptResult", "StrikeRecord"]

_START_S = 600.0  # for a script of which nothing is known yet to load, and to make a step
_LEAST_HANG_S, _GAPS = 30.0, 10.0
_SAVES = 8  # in one run
_QUICK_S = 1.0


class Baseline(msgspec.Struct, frozen=True, kw_only=True):
    """What two undisturbed runs showed. `faults`: of the script itself; with any, nothing else can be judged."""

    shape: Shape
    undisturbed: Undisturbed
    alone: str
    fleet: str
    gap_s: float
    checkpoint_every: int
    fingerprint: str
    microbatches: int
    faults: list[StrikeFinding]

    @property
    def hang_s(self) -> float:
        """How long a struck run may do nothing."""
        return max(_LEAST_HANG_S, _GAPS * self.gap_s + self.shape.begin_s)


class ScriptResult(msgspec.Struct, frozen=True, kw_only=True):
    """One struck run. `findings`: what is wrong, with the bits, the end, the script; `numbers`: what `status` or `why`
    said that was not so; `notes`: what may be meant so. `folder`: what is kept of it."""

    number: int
    seed: int
    schedule: str
    outcome: Outcome
    findings: list[StrikeFinding]
    numbers: list[StrikeFinding]
    notes: list[str]
    done: list[StrikeDone]
    phases: list[str]  # of the faults from inside that were ordered
    agents: int
    exchange: str
    keeps: bool
    exit_code: int | None
    detail: str
    steps: int
    seconds: float
    longest_s: float
    downtimes_s: list[float]
    folder: str
    evidence: ScriptEvidence = ScriptEvidence()
    replayed: ReplayComparison | None = None  # of a trace's strikes


class ScriptCampaign:
    """Folders of its runs are made under `base`. `script`: a path or `-m MODULE`, and its arguments; `settings`: the
    file that `outlast run --config` would be given."""

    def __init__(
        self,
        base: Path,
        script: Sequence[str],
        seed: int,
        shape: Shape,
        *,
        settings: Path | None = None,
        keep: bool = False,
    ) -> None:
        self.base, self.script, self.seed, self.shape, self.keep = base.absolute(), list(script), seed, shape, keep
        self._settings = _settings_of(settings)
        self._witnessed: tuple[Witnessed, Witnessed] | None = None
        self._baseline: Baseline | None = None
        self._leaks = LeakWatch()  # of the newest run

    # --- undisturbed -----------------------------------------------------------------------------------------------
    def baseline(self, watch: Callable[[str, StrikeRecord], None]) -> Baseline:
        """Run it twice, and hold the two against each other."""
        alone = self._undisturbed("alone", Shape(replicas=1, spares=0, ranks=self.shape.ranks), 0, watch)
        faults = _unfinished(alone, "a single replica")
        steps, every = _steps(alone), max(1, _steps(alone) // _SAVES)
        fleet = alone if faults else self._undisturbed("fleet", self.shape, every, watch)
        faults = faults or _unfinished(fleet, f"{self.shape.replicas} replicas")
        mine, theirs = witnessed(alone.folder), witnessed(fleet.folder)
        faults = faults or script_findings(mine, theirs) or _not_repeated(alone, fleet)
        first_s = min((c.at_s for c in fleet.commits), default=0.0) - fleet.record.started_s
        losses = {commit.step: commit.loss for commit in fleet.commits}
        shape = msgspec.structs.replace(self.shape, length_s=fleet.record.ended_s, begin_s=first_s, steps=steps)
        print_ = next((seen.fingerprint for seen in theirs.ends.values()), "")
        undisturbed = Undisturbed(fingerprint=print_, losses=losses, folder=str(fleet.folder.resolve()))
        self._witnessed = mine, theirs
        self._baseline = Baseline(
            shape=shape,
            undisturbed=undisturbed,
            alone=str(alone.folder),
            fleet=str(fleet.folder),
            gap_s=_gap(fleet),
            checkpoint_every=every,
            fingerprint=print_,
            faults=faults,
            microbatches=1 + max((c.microbatch for c in theirs.computed), default=-1),
        )
        return self._baseline

    def _undisturbed(self, name: str, shape: Shape, every: int, watch: Callable[[str, StrikeRecord], None]) -> Watched:
        fleet = ScriptFleet(
            number=-1,
            seed=self.seed,
            setting=Setting(dtype="script"),
            replicas=shape.replicas,
            spares=shape.spares,
            ranks=shape.ranks,
            agents=1,
            exchange="auto",
            keeps=every > 0,
            stranger=False,
            strikes=(),
        )
        return self._run(self._folder(f"undisturbed-{name}"), fleet, every, _START_S, lambda r: watch(name, r))

    # --- struck ----------------------------------------------------------------------------------------------------
    def attempt(self, fleet: ScriptFleet, watch: Callable[[StrikeRecord], None]) -> ScriptResult:
        """Strike it, and judge. Call `baseline` first."""
        assert self._baseline is not None
        assert self._witnessed is not None
        baseline = self._baseline
        folder = self._folder(f"struck-{fleet.seed}-{fleet.number}")
        seen = self._run(folder, fleet, baseline.checkpoint_every, baseline.hang_s, watch)
        told = witnessed(folder, baseline.shape.steps)
        number = 1 + max((one.microbatch for one in told.computed), default=-1)
        outcome, findings, numbers = _judged(seen._replace(microbatches=number), baseline)
        steps = {commit.step for commit in seen.commits}
        own = [*self._leaks.findings(), *microbatch_findings(told, baseline.shape.steps, steps)]
        own += script_findings(self._witnessed[1], told, struck=True)
        more, notes = carried_over(*self._witnessed, told)
        named = [f for f in (*own, *more) if (f.check, f.detail) not in {(g.check, g.detail) for g in findings}]
        findings += list({(f.check, f.detail): f for f in named}.values())
        result = ScriptResult(
            number=fleet.number,
            seed=fleet.seed,
            schedule=schedule_of(fleet),
            findings=findings,
            numbers=numbers,
            outcome="wrong" if findings else outcome,
            notes=[*notes, *_not_carried_out(fleet, seen)],
            done=seen.record.done,
            phases=[f"{fault.phase}:{fault.action}" for fault in fleet.faults],
            agents=fleet.agents,
            exchange=fleet.exchange,
            keeps=fleet.keeps,
            exit_code=seen.record.exit_code,
            detail=seen.end.detail if seen.end is not None else seen.record.output,
            steps=len(steps),
            seconds=seen.record.ended_s,
            longest_s=seen.record.longest_s,
            folder=str(folder),
            evidence=evidence_of(seen.record, seen.commits, seen.events, fleet.faults),
            replayed=outcome_of(fleet, self.shape, seen.record, seen.events),
            downtimes_s=[e.downtime_s for e in seen.events if isinstance(e, ev.Recovery) and e.downtime_s],
        )
        if findings or numbers or self.keep:
            (folder / "record.json").write_bytes(msgspec.json.format(msgspec.json.encode(seen.record), indent=1))
            return result
        shutil.rmtree(folder)
        return msgspec.structs.replace(result, folder="")

    def _run(
        self, folder: Path, fleet: ScriptFleet, every: int, hang_s: float, watch: Callable[[StrikeRecord], None]
    ) -> Watched:
        self._leaks = LeakWatch()

        saved = Path(self._baseline.fleet) / "checkpoints" if self._baseline is not None else folder
        saved_bytes = sum(path.stat().st_size for path in saved.rglob("*") if path.is_file())
        roles, num = {strike.roles[0] for strike in fleet.strikes}, self.shape.hosts if fleet.replicas > 1 else 0
        room = -(-(fleet.replicas + fleet.spares) // max(1, num - 1))  # also when a host is gone
        slots = self.shape.slots or room
        surroundings = ScriptSurroundings(folder, roles, saved_bytes, (num, slots if num else 0))

        def launch(place: Path, struck: StruckFleet) -> Driven:
            driven = self._launch(place, fleet, every, surroundings)
            self._leaks.launcher = driven.process.pid
            return driven

        def look(record: StrikeRecord) -> None:
            self._leaks.look()
            watch(record)

        with surroundings:
            return run_watched(folder, fleet, look, launch, hang_s, surroundings.around, surroundings.environ)

    def _launch(self, folder: Path, fleet: ScriptFleet, every: int, around: ScriptSurroundings) -> Driven:
        settings: dict[str, Any] = {
            "restart_backoff_s": 0.1, "heartbeat_s": 0.5, "formation_s": 10.0, "max_restarts": 64,
            **self._settings, "replicas": fleet.replicas, "ranks": fleet.ranks, "spares": fleet.spares,
            "agents": fleet.agents, "exchange": fleet.exchange, "resume": "never",
        }  # fmt: skip
        for key in [key for key in settings if key.startswith("checkpoint_")]:
            del settings[key]  # no struck run touches what somebody keeps
        if fleet.keeps:
            settings |= {"checkpoint_dir": str(around.checkpoints), "checkpoint_every": every}
            settings |= {"checkpoint_keep": 4 * _SAVES}
        config = folder / "run.toml"
        config.write_text("[run]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items()))
        environ = {"TMPDIR": str(folder / "tmp"), VARIABLE: str(folder.resolve()), **around.environ}
        options = ["--config", str(config), *around.options]
        driven = Driven(
            folder / "run", options, self.script, faults=fleet.faults, environ=environ, prefix=around.prefix
        )
        if around.hosts is not None:
            around.hosts.start_agents(environ)
        return driven

    def _folder(self, name: str) -> Path:
        """A new one: a fleet may be struck again."""
        names = itertools.chain([name], (f"{name}-{count}" for count in itertools.count(1)))
        return next(self.base / each for each in names if not (self.base / each).exists())


def _settings_of(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        found: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8")).get("run", {})
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}", remedy="a TOML file with a table [run]") from error
    return found


# --- judging ---------------------------------------------------------------------------------------------------------
def _judged(seen: Watched, baseline: Baseline) -> tuple[Outcome, list[StrikeFinding], list[StrikeFinding]]:
    """As `prove strikes` judges. Only who did all steps has an end that counts; what the script itself leaves in its
    temporary directory, as it does undisturbed, is its own."""
    steps = baseline.shape.steps
    seen.record.left[:] = [left for left in seen.record.left if _ours(left)]
    whole = [(who, end) for who, end in seen.ends if end["steps"] == steps]
    record = msgspec.structs.replace(seen.record, done=[*seen.record.done, *_inside(seen)])
    outcome, found = judge(seen._replace(ends=whole, record=record), baseline.undisturbed)
    numbers = [f for f in found if ":" in f.check or f.check in ("why", "status")]
    wrong = [f for f in found if f not in numbers]
    if baseline.gap_s > _QUICK_S:  # where a step takes seconds, none for seconds is no news
        numbers = [f for f in numbers if f.check != "status: state"]
    return outcome, wrong, numbers


def _not_carried_out(fleet: ScriptFleet, seen: Watched) -> list[str]:
    """That a run was struck less than its schedule says, so that it is not read as one that outlasted all of it."""
    late = len(fleet.strikes) - len(seen.record.done)
    return (
        [f"run {fleet.number}: {late} of {len(fleet.strikes)} strikes came too late, or nobody was there"]
        if late
        else []
    )


def _inside(seen: Watched) -> list[StrikeDone]:
    """Faults from inside, as if somebody had struck: whoever one was ordered for, under the process that it had."""
    found = []
    for fault in seen.fleet.faults if isinstance(seen.fleet, ScriptFleet) else ():
        for life in seen.record.lives:
            if life.name == fault.replica:
                kind = fault.action if fault.action == "SIGKILL" else "phase"
                done = StrikeDone(at_s=life.last_s, kind=kind, role="replica", pid=life.pid, name=life.name, state="")
                found.append(done)
    return found


def _ours(left: str) -> bool:
    path, temporary, _ = left.partition(" in its TMPDIR")
    return not temporary or Path(path).name.startswith("outlast")


def _steps(seen: Watched) -> int:
    return len({commit.step for commit in seen.commits})


def _gap(seen: Watched) -> float:
    """The longest time between two commits."""
    times = sorted(commit.at_s for commit in seen.commits)
    return max((after - before for before, after in itertools.pairwise(times)), default=0.0)


def _unfinished(seen: Watched, what: str) -> list[StrikeFinding]:
    """The script does not even end well where nothing happens to it."""
    record = seen.record
    if record.exit_code == 0 and seen.commits:
        return []
    if record.exit_code == 0:
        detail = "it trained nothing: no step was committed. It must train through outlast's protect() and steps()"
    else:
        words = (seen.end.detail if seen.end is not None else record.hung or record.output).strip()
        detail = f"exit code {record.exit_code}: {words[-1500:] or 'without a word'}"
    return [StrikeFinding(check="script", detail=f"undisturbed, with {what}: {detail}")]


def _not_repeated(alone: Watched, fleet: Watched) -> list[StrikeFinding]:
    """Bits that differ where no witness saw from what."""
    losses = [{commit.step: commit.loss for commit in seen.commits} for seen in (alone, fleet)]
    odd = sorted(step for step in losses[0].keys() | losses[1].keys() if losses[0].get(step) != losses[1].get(step))
    if odd:
        detail = f"step {odd[0]} of two undisturbed runs differs, and no witness saw from what"
        return [StrikeFinding(check="randomness", detail=detail)]
    return []
