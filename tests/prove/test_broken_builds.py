"""A broken build is caught: builds of outlast that are wrong on purpose, each a line of the source replaced, and what
the judge of `outlast prove run` must say of it after one struck run.

The judge is whole; what it judges is a copy of the package with one patch. A patch that no longer applies fails a test
of its own, so the list cannot rot unseen.
"""

from __future__ import annotations

import ast
import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

import outlast
from outlast.prove.script_campaign import Baseline, ScriptCampaign, ScriptResult
from outlast.prove.script_plan import Shape, planned, strikes_of
from outlast.prove.script_surroundings import cannot_be_struck

SOURCE = Path(str(outlast.__file__)).parent


class Form(NamedTuple):
    """How a run is struck."""

    schedule: str
    replicas: int
    keeps: bool


FORMS = {
    # one of two dies in step 100: the other one computes its share of that step, and goes on
    "member": Form("phase:backward:SIGKILL:r0.1:100", 2, False),
    # the only one dies in step 100, and another one goes on from a checkpoint
    "resumed": Form("phase:backward:SIGKILL:r0.1:100", 1, True),
    # the only one dies in step 100, and nothing was kept
    "lost": Form("phase:backward:SIGKILL:r0.1:100", 1, False),
    # the clock of the run jumps by 19 hours while it trains
    "clock": Form("4:clock:clock:0.9", 2, False),
    # the disk is full from the first seconds to the end, so no checkpoint can be written
    "full": Form("2:full~600:disk:0", 2, True),
}


class Broken(NamedTuple):
    """`old`: stands once in the package; `found`: a check that must fail."""

    name: str
    old: str
    new: str
    form: str
    found: str


BUILDS = (
    Broken("applies a step twice",
           "            for optimizer in self.state.optimizers:\n                optimizer.step()\n",
           "            for optimizer in self.state.optimizers:\n                optimizer.step()\n"
           "                if meta.step == 9:\n                    optimizer.step()\n", "member", "bits"),
    Broken("clips twice", "                flat.mul_(factor)\n",
           "                flat.mul_(factor).mul_(factor)\n", "member", "bits"),
    Broken("computes the first microbatch in place of each other one", "batch = self.samples.fetch(step, leaf)\n",
           "batch = self.samples.fetch(step, 0 if step == 101 else leaf)\n", "member", "data"),
    Broken("draws dropout by process",
           "return position_seed(self.seed, step, leaf, 2)",
           "import os\n\n        return position_seed(self.seed + os.getpid(), step, leaf, 2)", "member", "randomness"),
    Broken("orders samples by process",
           "        return position_seed(self.seed, step, leaf, 1), self.read_here(step, leaf)",
           "        import os\n\n        return position_seed(self.seed, step, leaf, 1), "
           "[(i + os.getpid()) % self.num_samples for i in self.read_here(step, leaf)]", "member", "data"),
    Broken("begins again without the moments", "{k: _placed(k, v, mine[name], group)",
           "{k: _placed(k, v * 0 if k == \"exp_avg\" else v, mine[name], group)", "resumed", "bits"),
    Broken("ends a step early after it resumed",
           "        self.replica.member.until = min(positive(\"until\", until), limit)\n",
           "        self.replica.member.until = min(positive(\"until\", until), limit)\n"
           "        if self.replica.env.me.endswith('.2'):\n            self.replica.member.until -= 1\n",
           "resumed", "end"),
    Broken("says 0 for a run that was lost", "            self._exit_code = ended\n",
           "            self._exit_code = 0\n", "lost", "end"),
    Broken("leaves a file behind",
           "    agent = Agent(sys.argv[1], dict(os.environ), sys.argv[2:])\n",
           "    import tempfile\n\n    tempfile.mkstemp(prefix='outlast-')\n"
           "    agent = Agent(sys.argv[1], dict(os.environ), sys.argv[2:])\n", "member", "left behind"),
    Broken("forgets a death",
           "            \"replica_exited\", replica=exited.member,",
           "            \"replica_exited\", replica=\"r0.0\" if exited.cause == \"finished\" else \"r0.7\",",
           "resumed", "journal: deaths"),
    Broken("blames another", "            \"replica_exited\", replica=exited.member,",
           "            \"replica_exited\", replica=exited.member if exited.cause == \"finished\" else \"r1.1\",",
           "member", "journal: blame"),
    Broken("counts the wall time from later on",
           "if running and now_s is not None else 0.0) - facts.start_s",
           "if running and now_s is not None else 0.0) - facts.start_s - 2.0", "member", "why: wall"),
    Broken("shows steps that nobody has committed",
           "            step=self._step,\n            until",
           "            step=(self._step or 0) + 3,\n            until", "member", "status: step"),
    Broken("counts a step as lost that was not",
           "_taken_back(rewinds, kept) + gone,", "_taken_back(rewinds, kept) + gone + 1,", "member", "why: lost steps"),
    Broken("reads the wall clock again for each event",
           "        return self._began_s + self._loop.time()",
           "        import time\n\n        return time.time()", "clock", "why: wall"),
    Broken("says 0 where the last steps are in no checkpoint",
           "code: dict[str, Any] = {\"exit_code\": Unsaved.exit_code}",
           "return actions", "full", "end"),
    Broken("tells of no downtime where training stopped",
           "self.journal(\"recovery\", **record | {\"downtime_s\": gap_s})",
           "self.journal(\"recovery\", **record | {\"downtime_s\": 0.0})", "resumed", "why: downtime"),
    Broken("prints another downtime than it was told", "                downtime_s=event.downtime_s,\n",
           "                downtime_s=event.downtime_s + 1.0,\n", "member", "why: downtime"),
    Broken("says that a death was noticed later than all went on",
           "\"detect_s\": max(0.0, noticed - fault.last_alive_s)",
           "\"detect_s\": 9.0 + max(0.0, noticed - fault.last_alive_s)", "member", "why: detection"),
    Broken("counts more microbatches as computed again than a step has",
           "max((f.recomputed for f in formed), default=0) if interrupted",
           "100 + max((f.recomputed for f in formed), default=0) if interrupted", "member", "why: recomputed"),
    Broken("tells people another downtime than programs", "f\"{format_s(story.downtime_s)} of downtime",
           "f\"{format_s(1.0 + story.downtime_s)} of downtime", "member", "why: text"),
    Broken("tells people another step than programs", "facts = [f\"step {_or_dash(state.step)}{age}\"",
           "facts = [f\"step {(state.step or 0) + 3}{age}\"", "member", "status: text"),
    Broken("calls a lost run finished", "        state=state.state,\n        headline",
           "        state=\"finished\",\n        headline", "lost", "why: state"),
)  # fmt: skip


class Relapse(NamedTuple):
    """Something that was mended, as it was before. `test`: the one that was written with the mending, which must fail
    of it again: no strike meets these often enough to be relied on."""

    name: str
    old: str
    new: str
    test: str


RELAPSES = (
    Relapse("closes a data file's descriptors once more when it is abandoned",
            "        while self._open:\n            with contextlib.suppress(OSError):\n"
            "                self._fs.close(self._open.pop())\n",
            "        for fd in self._open:\n            with contextlib.suppress(OSError):\n"
            "                self._fs.close(fd)\n",
            "tests/checkpoint/test_engine.py::test_whichever_call_fails_each_descriptor_is_closed_once"),
    Relapse("waits for a save that is heard of after its view",
            "        return save.view < state.view and not (later or pending)\n", "        return False\n",
            "tests/runtime/test_units_keeper.py::"
            "test_a_save_that_is_heard_of_when_its_view_has_ended_is_lost_with_it_and_asked_for_again"),
    Relapse("lets in who is left of another run", "        if claim.run != self.run:\n", "        if False:\n",
            "tests/runtime/test_units_hosts.py::test_who_is_left_of_another_run_is_refused_by_name"),
    Relapse("kills a rank's siblings before the one at fault can say why",
            "    return _SAY_WHY_S if how.code == MembershipError.exit_code else 0.0\n", "    return 0.0\n",
            "tests/runtime/test_units_ranks.py::"
            "test_who_ends_by_anothers_doing_leaves_that_one_the_time_to_say_why"),
    Relapse("leaves a rank whose sibling has ended to itself",
            "        for other in self.all():\n            other.swept = True\n"
            "            other.child.send(signal.SIGKILL)\n", "        return\n",
            "tests/runtime/test_units_ranks.py::"
            "test_who_ends_by_anothers_doing_leaves_that_one_the_time_to_say_why"),
    Relapse("closes a region's descriptor though another process's fork has it",
            "    if pid == os.getpid():\n        os.close(fd)\n", "    os.close(fd)\n",
            "tests/runtime/test_units_regions.py::test_a_fork_leaves_its_parents_numbers_alone"),
)  # fmt: skip


def applied(build: Broken | Relapse) -> tuple[Path, str]:
    """(the file, as the patch makes it), wherever in the package its lines stand. ValueError where not exactly once."""
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(SOURCE.rglob("*.py"))}
    found = [path for path, text in texts.items() if build.old in text]
    if len(found) != 1 or texts[found[0]].count(build.old) != 1:
        raise ValueError(f"{build.name}: its lines stand in {[path.name for path in found]}")
    return found[0].relative_to(SOURCE), texts[found[0]].replace(build.old, build.new)


def broken_copy(build: Broken | Relapse, place: Path) -> Path:
    """What goes in front of the path that Python imports from."""
    shutil.copytree(SOURCE, place / "outlast")  # with what was compiled, which the times of files keep valid
    path, text = applied(build)
    (place / "outlast" / path).write_text(text, encoding="utf-8")
    return place


SCRIPT = [str(Path(__file__).parent / "scripts" / "nanogpt.py"), "--max-iters", "240"]


@pytest.mark.parametrize("build", [*BUILDS, *RELAPSES], ids=lambda build: build.name)
def test_a_patch_applies_and_what_it_makes_is_python(build: Broken | Relapse) -> None:
    ast.parse(applied(build)[1])


def test_there_are_twenty_and_they_break_different_things() -> None:
    assert len(BUILDS) >= 23
    assert len({build.name for build in BUILDS}) == len(BUILDS)
    assert len({build.found for build in BUILDS}) >= 12


class Judge:
    """Undisturbed runs of the whole build, made once for each number of replicas; struck runs of any."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self._made: dict[int, tuple[ScriptCampaign, Baseline]] = {}

    def strike(self, form: str) -> ScriptResult:
        schedule, replicas, keeps = FORMS[form]
        campaign, baseline = self._made[replicas]
        fleet = planned(0, 1, baseline.shape, schedule, 1, "shm", keeps)
        return campaign.attempt(fleet, lambda record: None)

    def prepare(self, form: str) -> None:
        replicas = FORMS[form].replicas
        if replicas not in self._made:
            campaign = ScriptCampaign(self.base / str(replicas), SCRIPT, 1, Shape(replicas=replicas, spares=0))
            campaign.base.mkdir(parents=True)
            baseline = campaign.baseline(lambda name, record: None)
            assert not baseline.faults, baseline.faults
            self._made[replicas] = campaign, baseline


def needed(form: str) -> None:
    """Skips what this machine cannot strike with."""
    for kind in strikes_of(FORMS[form].schedule):
        if reason := cannot_be_struck(kind):
            pytest.skip(reason)


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Judge:
    return Judge(tmp_path_factory.mktemp("judge"))


@pytest.mark.soak
@pytest.mark.campaign
@pytest.mark.process
@pytest.mark.timeout(300)
@pytest.mark.parametrize("form", FORMS)
def test_the_whole_build_is_not_accused(form: str, judge: Judge) -> None:
    judge.prepare(form)
    needed(form)
    result = judge.strike(form)
    assert result.outcome == ("fleet lost" if form == "lost" else "same bits"), result.findings
    assert result.findings == []


@pytest.mark.soak
@pytest.mark.campaign
@pytest.mark.process
@pytest.mark.timeout(300)
@pytest.mark.parametrize("build", BUILDS, ids=lambda build: build.name)
def test_a_broken_build_is_caught(build: Broken, judge: Judge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needed(build.form)
    judge.prepare(build.form)
    broken = broken_copy(build, tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(broken), os.environ.get("PYTHONPATH", "")]))
    result = judge.strike(build.form)
    checks = {finding.check for finding in (*result.findings, *result.numbers)}
    assert build.found in checks, (result.findings, result.numbers)


@pytest.mark.soak
@pytest.mark.campaign
@pytest.mark.process
@pytest.mark.timeout(300)
@pytest.mark.parametrize("build", RELAPSES, ids=lambda build: build.name)
def test_a_relapse_is_caught_by_the_test_that_was_written_when_it_was_mended(build: Relapse, tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(broken_copy(build, tmp_path)), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", build.test]
    with subprocess.Popen(
        command,
        cwd=root,
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as inner:
        try:
            said, _ = inner.communicate(timeout=240)
        finally:  # a relapse may make its test hang: nothing that it started is left
            with contextlib.suppress(ProcessLookupError):
                os.killpg(inner.pid, signal.SIGKILL)
    assert inner.returncode == 1, said[-3000:]
    assert f"FAILED {build.test}" in said, said[-3000:]
