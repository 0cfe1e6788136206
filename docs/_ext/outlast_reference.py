"""Directives that write reference pages from the source, so that they cannot fall behind it.

`{outlast-config}` the settings, `{outlast-errors}` the error tree, `{outlast-events}` the events, `{outlast-cli}` the
commands and their help. Each produces Markdown that MyST then reads. None imports torch.
"""

from __future__ import annotations

import ast
import inspect
import typing
from collections.abc import Callable
from typing import Any

import msgspec
from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

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
    """One definition a setting."""
    docs = field_docs(RunConfig)
    lines: list[str] = []
    for field in msgspec.structs.fields(RunConfig):
        lines += [f"`{field.name}`", f": {type_text(field.type)}, default `{toml(field.default)}`. {docs[field.name]}"]
        lines += [f"  In the environment: `OUTLAST_{field.name.upper()}`.", ""]
    return "\n".join(lines)


def errors_page() -> str:
    """The tree as it is drawn in the source, then one row an error."""
    tree = inspect.cleandoc((errors.__doc__ or "").partition("\n\n")[2].partition("\n\nRole:")[0])
    rows = ["```text", tree, "```", "", "| Code | Error | Exit code |", "|---|---|---|"]
    named = [getattr(errors, name) for name in errors.__all__]
    kinds = [kind for kind in named if isinstance(kind, type)]
    rows += [f"| `{kind.code}` | `{kind.__name__}` | {kind.exit_code} |" for kind in kinds]
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


class Generated(SphinxDirective):
    """Reads the Markdown that `page` returns as if it stood where the directive stands."""

    page: Callable[[], str]

    def run(self) -> list[nodes.Node]:
        text = type(self).page().splitlines()
        node = nodes.Element()
        self.state.nested_parse(StringList(text, source=f"<{self.name}>"), self.content_offset, node, match_titles=True)
        return list(node.children)


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the four directives."""
    for name, page in (
        ("config", config_page), ("errors", errors_page), ("events", events_page), ("cli", cli_page),
    ):  # fmt: skip
        app.add_directive(
            f"outlast-{name}", type(f"Generated{name.title()}", (Generated,), {"page": staticmethod(page)})
        )
    return {"parallel_read_safe": True}
