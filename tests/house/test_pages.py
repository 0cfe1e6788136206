"""Pages that claim to be complete are: every work, every error code, every test that the taxonomy names."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from outlast import errors
from outlast.cli import COMMANDS
from outlast.cli._examples import EXAMPLES
from outlast.cli._of_others import hint_for

TOP = Path(__file__).resolve().parents[2]
DOCS = TOP / "docs"
CODES = {
    kind.code: kind
    for kind in (getattr(errors, name) for name in errors.__all__)
    if isinstance(kind, type) and issubclass(kind, errors.OutlastError)
}
NUM_WORKS = 83
LITERATURE = Path(__file__).with_name("literature.txt")
ALSO = ["A", "B", "C"]  # the chapter, the article, the study


def rows(page: Path) -> list[list[str]]:
    """Cells of the tables of a page, without heads and rules."""
    lines = [line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in cells if not set("".join(row)) <= {"-", " "}]


def test_every_work_has_a_line_that_says_what_is_done_of_it() -> None:
    found = [row for row in rows(DOCS / "explanation" / "literature.md") if row[0]]
    assert [row[0] for row in found] == [*map(str, range(1, NUM_WORKS + 1)), *ALSO]
    listed = dict(line.split(". ", 1) for line in LITERATURE.read_text(encoding="utf-8").splitlines())
    assert {row[0]: row[1] for row in found[:NUM_WORKS]} == listed, "the works are those of the reading list"
    for number, work, told in found:
        assert len(work) > 8, number
        assert told, number
        others = re.findall(r"\bAs (\d+)", told) + re.findall(r"\bas (\d+)\b", told)
        assert all(1 <= int(other) <= NUM_WORKS and other != number for other in others), number
    silent = [
        n for n, _, told in found if not re.search(r"\]\(|[Nn]ot (done|quantised)|\b[Aa]s \d|`|unpatched|device", told)
    ]
    assert silent == []


def test_what_the_literature_names_as_a_command_exists() -> None:
    text = (DOCS / "explanation" / "literature.md").read_text(encoding="utf-8")
    assert {name for name in re.findall(r"`outlast (\w+)", text) if name not in COMMANDS} == set()


@pytest.mark.parametrize("code", sorted(CODES))
def test_every_error_code_has_a_page(code: str) -> None:
    page = (DOCS / "reference" / "errors" / f"{code}.md").read_text(encoding="utf-8")
    assert page.startswith(f"# `{code}`\n")
    assert f"`outlast.errors.{CODES[code].__name__}`, exit code {CODES[code].exit_code}." in page
    assert "## What to do" in page


def test_no_page_is_of_a_code_that_is_none() -> None:
    assert {page.stem for page in (DOCS / "reference" / "errors").glob("*.md")} == set(CODES)


def test_tests_that_the_taxonomy_names_exist() -> None:
    text = (DOCS / "explanation" / "taxonomy.md").read_text(encoding="utf-8")
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", text)
    assert len(named) > 15
    for path, function in named:
        assert (TOP / path).is_file(), path
        if function:
            tree = ast.parse((TOP / path).read_text(encoding="utf-8"))
            assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, function


def test_every_kind_of_fault_says_who_notices_what_it_costs_and_what_proves_it() -> None:
    body = [row for row in rows(DOCS / "explanation" / "taxonomy.md") if len(row) == 4 and row[0] != "What happens"]
    assert len(body) >= 20
    assert [row[0] for row in body if not all(row)] == []


@pytest.mark.parametrize("name", ["config", "errors", "events", "cli"])
def test_what_the_reference_takes_from_the_source_is_what_the_source_says(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(DOCS / "_ext"))
    from outlast_reference import REFERENCE, written

    text = (REFERENCE / f"{name}.md").read_text(encoding="utf-8")
    assert text == written(name), "settings, errors, events or a command's help have changed: make reference"
    assert "```{outlast" not in text, "it can be read where it lies"
    assert "```text\n\n```" not in text, "a command whose help is drawn by rich: rich_markup_mode=None"


def test_the_pictures_of_the_tree_are_what_the_protocol_gives_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DOCS / "_ext"))
    from tree_picture import levels, picture

    for name, made in (("tree", picture), ("levels", levels)):
        drawn = (DOCS / "pictures" / f"{name}.svg").read_text(encoding="utf-8")
        assert drawn == made(), "python docs/_ext/tree_picture.py docs/pictures/tree.svg docs/pictures/levels.svg"


def test_the_picture_of_the_ladder_is_drawn_from_saves_and_removals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DOCS / "_ext"))
    from ladder_picture import bars

    from outlast.core import checkpoint_events as ck

    def saved(generation: int, at_s: float) -> ck.CheckpointSaved:
        return ck.CheckpointSaved(
            at_s=at_s, step=10 * generation, generation=generation, view=[1, 1], num_writers=1, state_bytes=1,
            written_bytes=1, blocked_s=0.0, copied_s=0.1, durable_s=0.2, reason="interval", url="file:///c",
        )  # fmt: skip

    def drained(generation: int, at_s: float) -> ck.CheckpointDrained:
        return ck.CheckpointDrained(at_s=at_s, generation=generation, url="file:///far", copied_bytes=1, seconds=0.1)

    pruned = ck.CheckpointPruned(at_s=5.1, generations=[0], freed_bytes=1, note="")
    events = [saved(0, 1.0), drained(0, 2.0), saved(1, 5.0), pruned, drained(1, 6.0), saved(2, 9.0)]
    assert set(bars(events)) == {
        ("memory", 0, 1.0, 5.0), ("memory", 10, 5.0, 9.0), ("memory", 20, 9.0, 9.0),
        ("disk", 0, 1.0, 5.1), ("disk", 10, 5.0, 9.0), ("disk", 20, 9.0, 9.0),
        ("object", 0, 2.0, 6.0), ("object", 10, 6.0, 9.0),
    }  # fmt: skip


PEERS = ("ddp", "torchft", "dlrover", "nvidia-resiliency-ext", "deepspeed")


@pytest.mark.parametrize("peer", PEERS)
def test_each_page_for_those_who_come_says_what_is_the_same_what_differs_and_what_is_missing(peer: str) -> None:
    page = DOCS / "explanation" / "coming-from" / f"{peer}.md"
    first, second = page.read_text(encoding="utf-8").split("## Your script")
    table = rows(page)[: first.count("\n|") - 1]
    heads = [row[0] for row in table if not any(row[1:])]
    assert heads == ["**the same**", "**differs**", "**missing**"]
    assert all(all(row) for row in table[1:] if row[0] not in heads), "each line says what both do"
    assert second.count("```python whole\n") == 1, "a whole script, which a test runs"
    assert "| outlast |" in second, "commands and names, one by one"
    assert f"coming-from/{peer}\n" in (DOCS / "explanation" / "coming-from.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("peer", PEERS)
def test_options_that_a_page_translates_are_answered_by_run_as_well(peer: str) -> None:
    text = (DOCS / "explanation" / "coming-from" / f"{peer}.md").read_text(encoding="utf-8")
    theirs = re.findall(r"^\| (.*?) \| ", text.split("| outlast |")[-1], re.MULTILINE)
    options = {option for cell in theirs for option in re.findall(r"(?<![\w-])--[\w-]+", cell)}
    assert {option for option in options - {"--nnodes"} if hint_for(option) is None} == set()


def test_every_command_s_help_has_examples() -> None:
    """In `cli/_examples.py`; that they name what exists is tested beside the command line."""
    assert set(COMMANDS) == {name.partition(" ")[0] for name in EXAMPLES}


def test_the_numbers_beside_peers_are_those_of_the_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TOP))
    from benchmarks._numbers_page import PAGE, RESULTS, page

    results = RESULTS.read_text(encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == page(results), "make numbers"
    with pytest.raises(ValueError, match="has no heading"):
        page(results.replace("## recovery", "## something else"))
    with pytest.raises(ValueError, match="has no table"):
        page(results.replace("Beside its peers in one run", "Elsewhere"))
