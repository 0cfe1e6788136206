"""What the documentation shows is true: examples run, commands exist, links lead somewhere, the pages build."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import outlast
from outlast.cli import COMMANDS

TOP = Path(__file__).resolve().parents[2]
PAGES = [
    TOP / "README.md",
    TOP / "CHANGELOG.md",
    *sorted(p for p in (TOP / "docs").rglob("*.md") if "_build" not in p.parts),
]
ENVIRON = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TOP / "src"), os.environ.get("PYTHONPATH", "")])}
BLOCK = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)


def name(path: Path) -> str:
    return str(path.relative_to(TOP))


def blocks(path: Path, info: str) -> list[tuple[str, str]]:
    """(place, text) of each fenced block whose info string is `info`."""
    text = path.read_text(encoding="utf-8")
    found = (match for match in BLOCK.finditer(text) if match["info"].strip() == info)
    return [(f"{name(path)}:{text[: match.start()].count(chr(10)) + 1}", match["body"]) for match in found]


RUNNABLE = [block for page in PAGES for block in blocks(page, "python run")]
TYPED = [
    (place, line.removeprefix("$ ").split("#")[0].split())
    for page in PAGES
    for place, body in blocks(page, "console")
    for line in body.splitlines()
    if line.startswith("$ ")
]


FORKED = """
import json, os, sys
import torch

torch.optim.SGD([torch.zeros(())], lr=0.1)  # loads as much again as torch itself
failed = 0
for place, folder, code in json.load(sys.stdin):
    if os.fork() == 0:
        os.chdir(folder)
        exec(compile(code, place, "exec"), {"__name__": "__main__"})
        break  # and it ends as any program does
    failed += os.wait()[1] != 0
else:
    sys.exit(failed)
"""


@pytest.mark.process
@pytest.mark.timeout(330)
def test_examples_marked_to_run_do_run(tmp_path: Path) -> None:
    """Each in a fork of one process, so that torch is loaded once."""
    given = []
    for number, (place, code) in enumerate(RUNNABLE):
        (tmp_path / str(number)).mkdir()
        given.append((place, str(tmp_path / str(number)), code))
    done = subprocess.run(
        [sys.executable, "-c", FORKED], input=json.dumps(given), capture_output=True, text=True, timeout=300,
        check=False, env=ENVIRON,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_python_examples_parse(page: Path) -> None:
    for info in ("python", "python run", "python whole"):
        for place, code in blocks(page, info):
            assert compile(code, place, "exec")


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_examples_use_names_that_exist(page: Path) -> None:
    for info in ("python", "python run", "python whole"):
        for place, code in blocks(page, info):
            for node in ast.walk(ast.parse(code)):
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "outlast":
                    assert node.attr in outlast.__all__, f"{place}: outlast.{node.attr}"


def test_there_are_examples_that_run() -> None:
    assert RUNNABLE


@pytest.mark.parametrize(("place", "words"), TYPED, ids=[f"{place} {' '.join(words[:2])}" for place, words in TYPED])
def test_commands_that_pages_show_exist(place: str, words: list[str]) -> None:
    if words[0] == "outlast":
        assert words[1] in COMMANDS, place
    elif words[0] == "make":
        assert re.search(rf"^{re.escape(words[1])}:", (TOP / "Makefile").read_text(encoding="utf-8"), re.MULTILINE), (
            place
        )


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_to_files_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", BLOCK.sub("", page.read_text(encoding="utf-8")))
    local = [target for target in targets if "://" not in target]
    assert [target for target in local if not (page.parent / target).exists()] == []


def test_as_many_samples_as_strike_every_phase_once_are_told() -> None:
    from outlast.prove._trials import SCENES

    page = (TOP / "docs" / "how-to" / "debug.md").read_text(encoding="utf-8")
    assert re.findall(r"`--samples (\d+)` every phase is struck", page) == [str(len(SCENES))]


def built(pages: Path, out: Path, *options: str) -> Path:
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", "-d", str(out / "trees")]
    command += ["-c", str(TOP / "docs"), *options, str(pages), str(out / "html")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=ENVIRON)
    assert done.returncode == 0, done.stderr
    return out / "html"


@pytest.mark.process
@pytest.mark.timeout(330)  # of one core's work: a guard, on a machine that has others to do
def test_the_documentation_builds_without_a_warning(tmp_path: Path) -> None:
    """All pages in the plainest theme: their own takes three times as long, and warns of nothing else. One in that."""
    pytest.importorskip("sphinx")
    assert (built(TOP / "docs", tmp_path, "-D", "html_theme=basic") / "reference" / "config.html").is_file()
    one = tmp_path / "one"
    one.mkdir()
    (one / "index.md").write_text("# A page\n\n```python\nimport outlast\n```\n")
    assert "furo" in (built(one, one) / "index.html").read_text()


def test_the_page_about_the_loop_names_every_argument_and_method() -> None:
    page = (TOP / "docs" / "reference" / "loop.md").read_text(encoding="utf-8")
    told = set(re.findall(r"[`.](\w+)", page)) | set(re.findall(r"(\w+)=", page))
    wanted: set[str] = set()
    for path in (TOP / "src" / "outlast" / "runtime").rglob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and node.name in {"Run", "Training", "Step", "Checkpoint"}:
                wanted |= _named_by(node)
    assert {"global_batch_size", "clip_norm", "backward", "keep_last", "is_writer"} <= wanted
    assert wanted <= told, sorted(wanted - told)


def _named_by(node: ast.ClassDef) -> set[str]:
    """Public methods and fields of a class, and the arguments of `protect`."""
    methods = [item for item in node.body if isinstance(item, ast.FunctionDef) and not item.name.startswith("_")]
    fields = [
        item.target.id for item in node.body if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    ]
    arguments = [arg.arg for item in methods if item.name == "protect" for arg in item.args.kwonlyargs]
    return {item.name for item in methods} | {name for name in fields if not name.startswith("_")} | set(arguments)


def test_the_page_of_a_step_names_what_there_is() -> None:
    """A gradient passes ten files at most."""
    page = (TOP / "docs" / "explanation" / "step.md").read_text(encoding="utf-8")
    passed = re.findall(r"^\| `([\w/]+\.py)` \|", page, re.MULTILINE)
    assert passed[0] == "runtime/loop/_step.py"
    assert 5 < len(passed) <= 10


@pytest.mark.parametrize("title", ["step.md", "where-to-change.md"])
def test_files_of_a_page_exist_and_have_the_functions_that_it_names(title: str) -> None:
    page = (TOP / "docs" / "explanation" / title).read_text(encoding="utf-8")
    source = TOP / "src" / "outlast"
    for text in (" ".join(part.split()) for part in re.split(r"\n(?:\n|- )", page)):
        files = [file for file in re.findall(r"`([\w/]+\.py)`", text) if "/" in file]
        lost = [file for file in files if not ((source / file).is_file() or (TOP / file).is_file())]
        lone = [file for file in re.findall(r"`(\w+\.py)`", text) if not list(source.rglob(file))]
        assert lost + lone == [], text
        code = "".join((source / file).read_text(encoding="utf-8") for file in files if (source / file).is_file())
        named = re.findall(r"(?<!\[)`(?:[A-Z]\w+\.)?(_?[a-z][a-z_]+)`", text) if text.count("`") > 2 and files else []
        assert [word for word in named if f"def {word}(" not in code] == [], text


def test_every_rule_that_code_cites_is_written_down() -> None:
    """As in "(protocol, 14)" and "rules 41, 42": numbers of headings in docs/explanation/rules.md."""
    page = (TOP / "docs" / "explanation" / "rules.md").read_text(encoding="utf-8")
    written = set(re.findall(r"^### (\d+)\. ", page, re.MULTILINE))
    cited = re.compile(r"(?:\(protocol, (?:rules? )?|\brules? )(\d+(?:(?:, | and )\d+)*)")
    found = {
        f"{name(path)}: {number}"
        for folder in ("src", "tests", "benchmarks")
        for path in (TOP / folder).rglob("*.py")
        for numbers in cited.findall(path.read_text(encoding="utf-8"))
        for number in re.findall(r"\d+", numbers)
        if number not in written
    }
    assert not found
    assert len(written) == 40
