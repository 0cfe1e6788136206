"""What a campaign on a script shows: the shortest schedule of a failure, the page, JUnit XML, and the catalogue."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest

from outlast.cli import main
from outlast.cli._campaign_file import campaign_file
from outlast.core import events as ev
from outlast.prove._commit_log import Commit
from outlast.prove.catalogue import CATALOGUE
from outlast.prove.schedule_shrinking import shrink
from outlast.prove.script_campaign import Baseline, ScriptResult
from outlast.prove.script_evidence import ScriptEvidence, Survived, evidence_of
from outlast.prove.script_figures import foreseen_of, moments_grid, phases_grid, spreads_of
from outlast.prove.script_page import junit_of, page_of
from outlast.prove.script_plan import KINDS, PHASES, ScriptFleet, Shape, drawn, planned, read_schedule, schedule_of
from outlast.prove.script_report import ProofReport, proof_of
from outlast.prove.strike_findings import StrikeFinding, Undisturbed
from outlast.prove.striker import StrikeDone, StrikeRecord
from outlast.runtime.settings.fault_points import Fault

CHROMIUM = shutil.which("chromium")
DOCS = Path(__file__).resolve().parents[2] / "docs"


# --- the shortest schedule -------------------------------------------------------------------------------------------
def fleet(schedule: str) -> ScriptFleet:
    return planned(0, 1, Shape(), schedule, 1, "shm", True)


LONG = (
    "phase:backward:SIGKILL:r0.1:4,1:kill:replica:0.1,2:segv:spare:0.2,0.5:pause~1:agent:0.3,"
    "1.5:term:replica:0.4,3:bus:replica:0.5,1:abort:spare:0.6"
)


def holding(*needed: str) -> Callable[[ScriptFleet], bool]:
    """Fails if all these kinds are there."""

    def fails(each: ScriptFleet) -> bool:
        kinds = {strike.named for strike in each.strikes} | ({"phase"} if each.faults else set())
        return {*needed} <= kinds

    return fails


@pytest.mark.parametrize(
    ("needed", "shortest"),
    [
        (("bus",), "8:bus:replica:0.5"),
        (("segv", "bus"), "3:segv:spare:0.2,5:bus:replica:0.5"),
        (("phase",), "phase:backward:SIGKILL:r0.1:4"),
        (("phase", "abort"), "phase:backward:SIGKILL:r0.1:4,9:abort:spare:0.6"),
        ((), ""),
    ],
)
def test_what_is_left_fails_by_itself_and_at_the_same_moments(needed: tuple[str, ...], shortest: str) -> None:
    assert schedule_of(shrink(fleet(LONG), holding(*needed), 40)) == shortest


def test_no_more_runs_are_spent_than_were_given_and_what_is_told_has_failed() -> None:
    for most in range(8):
        tried: list[str] = []

        def fails(each: ScriptFleet, tried: list[str] = tried) -> bool:
            tried.append(schedule_of(each))
            return holding("segv", "bus")(each)

        least = shrink(fleet(LONG), fails, most)
        assert len(tried) <= most
        assert holding("segv", "bus")(least)


# --- the report ------------------------------------------------------------------------------------------------------
def result(number: int, outcome: Any = "same bits", **changes: Any) -> ScriptResult:
    schedule = schedule_of(drawn(number, 3, Shape(), list(KINDS)))
    done = [StrikeDone(at_s=1.0, kind="SIGSTOP, SIGCONT", role="replica", pid=7, name="r0.1", state="R")]
    done.append(StrikeDone(at_s=2.0, kind="SIGKILL", role="agent", pid=8, name="a0", state="S"))
    fields: dict[str, Any] = {
        "number": number, "seed": 3, "schedule": schedule, "outcome": outcome, "findings": [], "numbers": [],
        "notes": [], "done": done, "phases": ["backward:SIGKILL"], "agents": 1, "exchange": "shm", "keeps": True,
        "exit_code": 0, "detail": "", "steps": 100, "seconds": 20.0, "longest_s": 1.5, "downtimes_s": [0.02, 0.6],
        "folder": "",
        "evidence": ScriptEvidence(
            moments=["training", "in a recovery"], met=[number % 2 == 0],
            survived=[
                Survived(cause="crash", detect_s=0.02, downtime_s=0.5 + number, lost_steps=0),
                Survived(cause="hang", detect_s=0.6, downtime_s=1.0, lost_steps=2),
            ],
            accounts_s={"wall_s": 20.0 + number, "productive_s": 15.0, "idle_s": 3.0, "lost_s": 0.3},
        ),
    }  # fmt: skip
    return ScriptResult(**(fields | changes))


def report(*results: ScriptResult, faults: list[StrikeFinding] | None = None, **more: Any) -> ProofReport:
    baseline = Baseline(
        shape=Shape(), undisturbed=Undisturbed(fingerprint="f", losses={}, folder=""), alone="", fleet="", gap_s=0.1,
        checkpoint_every=9, fingerprint="f00d", microbatches=8, faults=faults or [],
    )  # fmt: skip
    return proof_of(
        ["train.py", "--name", "a b"], 3, baseline, results, [("phase", "left out")], more.get("shrunk", {})
    )


WRONG = StrikeFinding(check="bits", detail="r1.1 committed step 3 with another loss <b>&</b> \x07")


def test_a_campaign_is_counted() -> None:
    found = report(result(0), result(1, "fleet lost"))
    assert (found.verdict, found.runs, found.same_bits, found.fleet_lost, found.strikes) == ("held", 2, 1, 1, 6)
    rows = {(row.kind, row.target): (row.strikes, row.same_bits, row.fleet_lost) for row in found.table}
    assert rows == {
        ("pause", "replica"): (2, 1, 1), ("kill", "agent"): (2, 1, 1), ("phase", "backward, SIGKILL"): (2, 1, 1)
    }  # fmt: skip
    untested = dict(found.untested)
    assert "kill" not in untested
    assert untested["segv"].startswith("no strike of it was drawn")
    assert untested["driver stuck in state D"].startswith("no device can be made to do so from software")
    assert "outlast prove corruption" in untested["flipped bit in a parameter"]
    assert report().verdict == "nothing"
    assert report(faults=[WRONG]).verdict == "script"


def test_a_failure_has_the_command_that_strikes_the_same_way_again() -> None:
    wrong = result(1, "wrong", findings=[WRONG])
    (failure,) = report(result(0), wrong).failures
    words = shlex.split(failure.command)
    assert read_schedule(words[words.index("--schedule") + 1]) == read_schedule(wrong.schedule)
    assert failure.command.endswith("train.py --name 'a b'")
    least = result(1, "wrong", findings=[WRONG], schedule="1:kill:replica:0.5")
    (failure,) = report(wrong, shrunk={1: least}).failures
    assert failure.shrunk
    assert "--schedule 1:kill:replica:0.5 " in failure.command


class _Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def test_the_page_needs_nothing_else_and_tells_what_was_and_was_not_tested() -> None:
    found = report(result(0), result(1, "wrong", findings=[WRONG], notes=["losses (value) of r0.2 differs"]))
    text = page_of(found)
    page = _Page(text)
    assert not [tag for tag, attrs in page.tags if attrs.keys() & {"src", "href"}], "it loads nothing"
    shown = " ".join(page.words)
    for part in (
        "Something did not hold.", "What was tested, and how often", "What was not tested, and why", "pause",
        "<b>&</b>", found.failures[0].command, "losses (value)", "Downtime of each fault", "Predicted beside observed",
        "Strikes from outside, by what the run was doing", "Faults from inside, by the phase of a step",
        "in a recovery", "How long, by cause", "a fault in the phase load",
    ):  # fmt: skip
        assert part in shown
    assert "<b>&</b>" not in text, "what others said is told as text"
    record = text.partition("id='record'>")[2].partition("</script>")[0]
    assert msgspec.convert(json.loads(record), ProofReport) == found


@pytest.mark.parametrize(
    ("found", "word"),
    [
        (report(result(0)), "It held."),
        (report(faults=[WRONG]), "cannot be repeated"),
        (report(), "Nothing was shown."),
    ],
)
def test_a_page_of_every_verdict(found: ProofReport, word: str) -> None:
    assert word in page_of(found)


def test_a_build_server_reads_the_cases() -> None:
    found = report(
        result(0), result(1, "wrong", findings=[WRONG], numbers=[StrikeFinding(check="status: age", detail="x")])
    )
    suite = ElementTree.fromstring(junit_of(found, strict=False))
    assert (suite.get("tests"), suite.get("failures")) == ("4", "1")
    failed = [case for case in suite if case.find("failure") is not None]
    assert [str(case.get("name")).startswith("run 1: ") for case in failed] == [True]
    text = failed[0].find("failure")
    assert text is not None
    assert "again: outlast prove run --schedule" in str(text.text)
    assert ElementTree.fromstring(junit_of(found, strict=True)).get("failures") == "2"
    for other in (report(faults=[WRONG]), report()):
        assert ElementTree.fromstring(junit_of(other, strict=False)).get("failures") == "1"


def test_files_that_cannot_be_written_are_refused_before_anything_runs(tmp_path: Path) -> None:
    script = str(Path(__file__).parent / "scripts" / "cnn.py")
    assert main(["prove", "run", "--report", str(tmp_path), script]) == 2
    assert main(["prove", "gate", "--junit", str(tmp_path / "none" / "x.xml"), script]) == 2


# --- what the runs say together ---------------------------------------------------------------------------------------
def test_strikes_are_counted_by_what_the_run_was_doing_and_faults_by_phase() -> None:
    results = [result(0), result(1), result(2)]
    moments = moments_grid(results)
    assert moments.rows == ["kill", "pause"]
    counts = dict(zip(moments.columns, moments.counts[1], strict=True))
    assert (counts["training"], sum(counts.values())) == (3, 3)
    assert moments.counts[0][moments.columns.index("in a recovery")] == 3
    phases = phases_grid(results)
    at = phases.columns.index("backward")
    assert phases.counts[phases.rows.index("SIGKILL")][at] == 2, "one of three was never met"
    assert "backward" not in phases.empty
    assert "load" in phases.empty
    assert ("a fault in the phase load", "none was met there") in report(*results).untested
    old = msgspec.convert({**msgspec.to_builtins(result(0)), "evidence": {}}, ScriptResult)
    assert phases_grid([old]).empty == phases.columns, "a file of an earlier outlast has no evidence"


def test_times_are_told_by_cause() -> None:
    rows = {(row.what, row.cause): row for row in spreads_of([result(0), result(1), result(2)])}
    still = rows["training stood still for", "crash"]
    assert (still.count, still.least_s, still.middle_s, still.longest_s) == (3, 0.5, 1.5, 2.5)
    assert rows["noticed after", "hang"].most_of_95_s == 0.6


def test_useful_time_is_foretold_from_other_runs_than_it_is_held_against() -> None:
    found = foreseen_of([result(0), result(1)])
    assert found is not None
    assert (found.learnt_from, found.held_against) == (1, 1)
    # one run with number 0 taught 0.5 s a crash, 1 s a hang, 3 s of beginning, and 0.3 s beside 15 of work
    assert found.predicted == pytest.approx(15.0 / (15.0 + 3.0 + 0.3 + 1.5))
    assert found.observed == pytest.approx(15.0 / 21.0)
    other = result(
        1, evidence=msgspec.structs.replace(result(1).evidence, accounts_s={"wall_s": 90.0, "productive_s": 15.0})
    )
    again = foreseen_of([result(0), other])
    assert again is not None
    assert (again.predicted, again.observed) == (found.predicted, pytest.approx(1 / 6)), "it is not fitted to it"
    assert foreseen_of([result(0), result(2)]) is None


def test_what_a_run_was_doing_is_read_off_its_commits_and_its_journal() -> None:
    commits = [Commit(1002.0 + 0.1 * step, step, "0x1p0", "r0.1") for step in range(20)]  # from 2 s to 3.9 s
    told = {
        "replica": "r0.1",
        "noticed_by": "a0",
        "microbatches_recomputed": 0,
        "lost_steps": 0,
        "step": 3,
        "view": [1, 1],
    }
    events = [
        msgspec.convert(
            {"kind": "checkpoint_began", "at_s": 102.5, "step": 5, "view": [1, 1], "reason": ""}, ev.CheckpointBegan
        ),
        msgspec.convert(
            {"kind": "recovery", "at_s": 103.4, "cause": "crash", "detect_s": 0.1, "downtime_s": 0.3, **told},
            ev.Recovery,
        ),
        msgspec.convert(
            {
                "kind": "replica_exited",
                "at_s": 103.2,
                "replica": "r0.1",
                "cause": "signal",
                "detail": "",
                "noticed_by": "a0",
            },
            ev.ReplicaExited,
        ),
    ]
    at = {
        1.0: "before the first step",
        2.3: "training",
        2.7: "in a save",
        3.3: "in a recovery",
        5.0: "after the last step",
    }
    done = [StrikeDone(at_s=at_s, kind="SIGKILL", role="replica", pid=7, name="r0.1", state="S") for at_s in at]
    record = StrikeRecord(started_s=1000.0, unix_s=100.0, done=done, why={"cost": {"wall_s": 6.0}})
    faults = [Fault(replica="r0.1", phase="backward", action="SIGKILL", step=step) for step in (20, 25)]
    found = evidence_of(record, commits, events, faults)
    assert list(found.moments) == list(at.values())
    assert found.met == [True, False]
    assert [(each.cause, each.downtime_s) for each in found.survived] == [("crash", 0.3)]
    assert found.accounts_s == {"wall_s": 6.0}


def test_every_phase_is_struck_in_every_way_after_a_while() -> None:
    faults = [fault for number in range(60) for fault in drawn(number, 9, Shape(), ["phase"]).faults]
    met = {(fault.phase, fault.action) for fault in faults}
    assert {phase for phase, _ in met} == {phase.name.lower() for phase in PHASES}
    assert len(met) >= 4 * len(PHASES) - 2, "but for those that are silent where a loop may be silent"


# --- in a browser ----------------------------------------------------------------------------------------------------
@pytest.mark.process
@pytest.mark.skipif(CHROMIUM is None, reason="no browser: Debian's chromium is not installed")
def test_a_browser_shows_all_of_the_page_and_nothing_runs_over_its_edge(tmp_path: Path) -> None:
    """The page runs no script, so a script that measures it is put behind it here."""
    more = result(2, evidence=msgspec.structs.replace(result(2).evidence, moments=["training", "training"]))
    found = report(result(0), result(1, "wrong", findings=[WRONG], notes=["losses (value) of r0.2 differs"]), more)
    measure = (
        "<script>document.body.dataset.wide=document.documentElement.scrollWidth-innerWidth;"
        "document.body.dataset.shown=[...document.querySelectorAll('h2')].every(h=>h.offsetHeight>0);"
        "document.body.dataset.bars=document.querySelectorAll('rect').length;"
        "document.body.dataset.heat=new Set([...document.querySelectorAll('.grid td[style]')]"
        ".map(c=>getComputedStyle(c).backgroundColor)).size</script>"
    )
    page = tmp_path / "proof.html"
    page.write_text(page_of(found).replace("</body>", f"{measure}</body>"), encoding="utf-8")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--window-size=500,900", "--no-first-run"]
    command = [str(CHROMIUM), *flags, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", page.as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    (body,) = [dict(attrs) for tag, attrs in _Page(shown).tags if tag == "body"]
    assert int(str(body["data-wide"])) <= 0, "wide tables scroll in themselves"
    assert body["data-shown"] == "true"
    assert int(str(body["data-bars"])) >= 2
    assert int(str(body["data-heat"])) >= 2, "the cells of the grids have the colours of their counts"


# --- the catalogue ---------------------------------------------------------------------------------------------------
def test_the_catalogue_is_whole_and_true(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(CATALOGUE) >= 40
    assert len({kind.name for kind in CATALOGUE}) == len(CATALOGUE)
    assert {kind.kind for kind in CATALOGUE} == {"crash", "omission", "Byzantine"}
    for kind in CATALOGUE:
        assert (DOCS / f"{kind.page}.md").is_file(), kind
        assert bool(kind.by) != bool(kind.why_not), kind
    assert {kind.by.rpartition("run --faults ")[2] for kind in CATALOGUE if "run --faults" in kind.by} == set(KINDS)
    of_ranks = [kind.by.rpartition("--faults ")[2] for kind in CATALOGUE if "--ranks 2" in kind.by]
    assert all("rank" in KINDS[name].roles for name in of_ranks)
    assert sorted(of_ranks) == ["kill", "pause", "stop"]
    lies = {kind.by.rpartition(" ")[2] for kind in CATALOGUE if "--attacks" in kind.by}
    from outlast.prove.attacks import ATTACKS

    assert lies == set(ATTACKS)
    assert main(["prove", "catalogue", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in told["kinds"]] == [kind.name for kind in CATALOGUE]
    assert main(["prove", "catalogue", "--class", "omission"]) == 0
    shown = capsys.readouterr().out
    assert "paused replica (omission, software)" in shown
    assert "killed replica" not in shown
    assert main(["prove", "catalogue", "--class", "fail-stop"]) == 2


@pytest.mark.parametrize("command", sorted({kind.by for kind in CATALOGUE if kind.by}))
def test_what_injects_a_fault_is_a_command_that_exists(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = command.split()
    assert main([*words[1:3], "--help"]) == 0
    told = capsys.readouterr().out
    assert all(word in told for word in words[3:] if word.startswith("--"))


# --- a campaign that goes on -----------------------------------------------------------------------------------------
def test_a_file_of_results_gives_them_back(tmp_path: Path) -> None:
    found = [result(0), result(1, "wrong", findings=[WRONG])]
    for seed, known in ((3, []), (-1, found)):
        with campaign_file(tmp_path / "results", ScriptResult, lambda result: result.seed, seed) as file:
            assert (file.seed, file.found) == (3, known)
            for one in found[len(known) :]:
                file.add(one)
