"""Fleets struck from outside, one after the other, each judged beside an undisturbed run of the same setting."""

from __future__ import annotations

import json
import resource
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from outlast.errors import ProveError
from outlast.prove._drive import Driven
from outlast.prove._strike_acts import Surrounding
from outlast.prove.strike_findings import Outcome, StrikeFinding, Undisturbed, Watched, judge
from outlast.prove.strike_plan import MICROBATCHES, STEPS, Role, Setting, StruckFleet, fleet_of
from outlast.prove.striker import HANG_S, StrikeDone, Striker, StrikeRecord

__all__ = ["StrikeCampaign", "Struck", "run_watched"]


class Struck(msgspec.Struct, frozen=True, kw_only=True):
    """One fleet, and how it ended. `folder`: its logs, journal, commit log and record; "" if they were not kept."""

    fleet: StruckFleet
    outcome: Outcome
    findings: list[StrikeFinding]
    done: list[StrikeDone]
    exit_code: int | None
    detail: str
    steps: int
    seconds: float
    longest_s: float  # without a step, a strike or the end
    folder: str

    @property
    def again(self) -> str:
        """The command that strikes the same fleet again; the moments are the same, what they meet need not be."""
        return f"outlast prove strikes --seed {self.fleet.seed} --only {self.fleet.number}"


class StrikeCampaign:
    """Folders of its runs are made under `base`. ProveError if an undisturbed run does not end."""

    def __init__(self, base: Path, seed: int, keep: bool) -> None:
        self.base, self.seed, self.keep = base, seed, keep
        self._undisturbed: dict[str, Undisturbed] = {}

    def attempt(self, number: int, watch: Callable[[StruckFleet, StrikeRecord], None]) -> Struck:
        """The fleet of this number."""
        fleet = fleet_of(number, self.seed)
        wanted = self._wanted(fleet.setting)
        folder = self._folder(f"fleet-{self.seed}-{number}")
        seen = run_watched(folder, fleet, lambda record: watch(fleet, record))
        outcome, found = judge(seen, wanted)
        result = Struck(
            fleet=fleet,
            outcome=outcome,
            findings=found,
            done=seen.record.done,
            exit_code=seen.record.exit_code,
            detail=seen.end.detail if seen.end is not None else seen.record.output,
            steps=len({commit.step for commit in seen.commits}),
            seconds=seen.record.ended_s,
            longest_s=seen.record.longest_s,
            folder=str(folder) if found or self.keep else "",
        )
        if result.folder:
            (folder / "record.json").write_bytes(msgspec.json.format(msgspec.json.encode(seen.record), indent=1))
        else:
            shutil.rmtree(folder)
        return result

    def _folder(self, name: str) -> Path:
        """A new one: a fleet may be struck again."""
        folder, count = self.base / name, 1
        while folder.exists():
            folder, count = self.base / f"{name}-{count}", count + 1
        return folder

    def _wanted(self, setting: Setting) -> Undisturbed:
        """Made once for a setting, and found again by a campaign that is continued."""
        if setting.name not in self._undisturbed:
            path = self.base / f"undisturbed-{setting.name}.json"
            if not path.exists():
                self._make(setting, path)
            self._undisturbed[setting.name] = msgspec.json.decode(path.read_bytes(), type=Undisturbed)
        return self._undisturbed[setting.name]

    def _make(self, setting: Setting, path: Path) -> None:
        folder = self._folder(path.stem)
        alone = StruckFleet(
            number=-1,
            seed=self.seed,
            setting=setting,
            replicas=2 if setting.audit else 1,
            spares=0,
            agents=1,
            exchange="shm",
            keeps=True,
            stranger=False,
            strikes=(),
        )
        seen = run_watched(folder, alone, lambda _: None)
        losses = {commit.step: commit.loss for commit in seen.commits}
        if seen.record.exit_code != 0 or not seen.ends or len(losses) != STEPS:
            raise ProveError("an undisturbed run failed", remedy=f"logs under {folder / 'run' / 'logs'}")
        found = Undisturbed(fingerprint=seen.ends[0][1]["fingerprint"], losses=losses, folder=str(folder.resolve()))
        part = path.with_suffix(".part")
        part.write_bytes(msgspec.json.encode(found))
        part.rename(path)


def run_watched(
    folder: Path,
    fleet: StruckFleet,
    watch: Callable[[StrikeRecord], None],
    launch: Callable[[Path, StruckFleet], Driven] | None = None,
    hang_s: float = HANG_S,
    around: Mapping[Role, Surrounding] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Watched:
    """One fleet from its first process to its last. `launch`: how it is started, if not as `prove strikes` does;
    `around`, `environ`: as `Striker` has them."""
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))  # a SIGSEGV from us is nobody's bug to look into
    striker = Striker(folder, fleet, launch, hang_s, around, environ)
    record = striker.run(watch)
    ends = [(path.stem, json.loads(path.read_text())) for path in sorted((folder / "ends").glob("*.json"))]
    microbatches = 0 if launch else MICROBATCHES
    return Watched(fleet, record, striker.log.commits, striker.events, ends, folder, microbatches)
