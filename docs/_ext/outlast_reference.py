"""Write the parts of the reference pages that follow from the source: `make reference`.

Settings, the error tree, events, and the commands' help stand in docs/reference/*.md between two marks, as Markdown
that can be read where it lies. A test holds the pages to the source. Nothing here imports torch or Sphinx.
"""

from __future__ import annotations

import ast
import inspect
import os
import typing
from pathlib import Path
from typing import Any

import msgspec

from outlast import errors
from outlast.cli import COMMANDS, command_of
from outlast.config import RunConfig
from outlast.core import events


def field_docs(cls: type) -> dict[str, str]:
    """The string under each annotated field of a class, as torchtitan-style configurations have it."""
    docs: dict[str, str] = {}
    body = ast.parse(inspect.getsource(cls)).body[0]
    assert isinstance(body, ast.ClassDef)
    previous: ast.stmt | None = None
    for node in body.body:
        is_text = (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        )
        if is_text and isinstance(previous, ast.AnnAssign) and isinstance(previous.target, ast.Name):
            docs[previous.target.id] = inspect.cleandoc(node.value.value)  # type: ignore[attr-defined]
        previous = node
    return docs


def type_text(kind: Any) -> str:
    """A type as a reader would write it."""
    if typing.get_origin(kind) is typing.Literal:
        return " or ".join(f"`{value!r}`" for value in typing.get_args(kind))
    return f"`{kind.__name__ if isinstance(kind, type) and not typing.get_args(kind) else kind}`"


def toml(value: object) -> str:
    """A default as TOML has it."""
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else f"{value:g}" if isinstance(value, float) else str(value)


def config_page() -> str:
    """One point a setting. In the environment each has its own name in capitals, after `OUTLAST_`."""
    docs = field_docs(RunConfig)
    return "\n".join(
        f"- **`{field.name}`** ({type_text(field.type)}, default `{toml(field.default)}`): "
        + " ".join(docs[field.name].split())
        for field in msgspec.structs.fields(RunConfig)
    )


def errors_page() -> str:
    """The tree as it is drawn in the source, then one row an error."""
    tree = inspect.cleandoc((errors.__doc__ or "").partition("\n\n")[2].partition("\n\nRole:")[0])
    rows = ["```text", tree, "```", "", "| Code | Error | Exit code |", "|---|---|---|"]
    named = [getattr(errors, name) for name in errors.__all__]
    kinds = [kind for kind in named if isinstance(kind, type)]
    rows += [f"| [`{kind.code}`](errors/{kind.code}.md) | `{kind.__name__}` | {kind.exit_code} |" for kind in kinds]
    return "\n".join(rows)


def events_page() -> str:
    """One section an event: its kind, its meaning, its fields."""
    lines: list[str] = []
    base = {field.name for field in msgspec.structs.fields(events.Event)}
    for kind in typing.get_args(events.AnyEvent):
        lines += [f"### `{kind.__struct_config__.tag}`", ""]
        own = kind.__dict__.get("__doc__")
        lines += [inspect.cleandoc(own), ""] if own else []
        fields = [field for field in msgspec.structs.fields(kind) if field.name not in base]
        lines += [f"- `{field.name}`: {type_text(field.type)}" for field in fields] + [""]
    return "\n".join(lines)


def cli_page() -> str:
    """Each command's own help."""
    lines: list[str] = []
    for name, (_, summary) in COMMANDS.items():
        command = command_of(name)
        lines += [f"## `outlast {name}`", "", summary, "", *_help(command, f"outlast {name}", None)]
    return "\n".join(lines)


def _help(command: Any, path: str, parent: Any) -> list[str]:
    import click

    context = click.Context(command, info_name=path, parent=parent, terminal_width=96, max_content_width=96)
    lines = ["```text", command.get_help(context), "```", ""]
    for name, child in getattr(command, "commands", {}).items():
        lines += [f"### `{path} {name}`", "", *_help(child, name, context)]
    return lines


REFERENCE = Path(__file__).resolve().parents[1] / "reference"
PAGES = {"config": config_page, "errors": errors_page, "events": events_page, "cli": cli_page}
BEGIN, END = "<!-- from the source: make reference -->\n", "<!-- the end of what make reference writes -->\n"


def written(name: str) -> str:
    """The page `name` as it should stand. ValueError where it lacks the marks."""
    before, begin, rest = (REFERENCE / f"{name}.md").read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{name}.md lacks the marks between which the source is told")
    return f"{before}{BEGIN}\n{PAGES[name]().strip()}\n\n{END}{after}"


def main() -> None:
    """Write all of them."""
    for name in PAGES:
        (REFERENCE / f"{name}.md").write_text(written(name), encoding="utf-8")


if __name__ == "__main__":
    os.environ.pop("COLUMNS", None)
    main()
