"""The head of a converted script: its imports, and `run = outlast.join()`, which stands in it once.

A script that was converted in part has both already; it is gone on with, and joins no second time.
"""

from __future__ import annotations

import ast
from typing import Any

from outlast.convert._edits import Edits
from outlast.convert._facts import Facts, calls_in, names_in
from outlast.errors import ConfigError

__all__ = ["add_join", "joined_as", "without_unused_imports"]


def joined_as(facts: Facts, name: str) -> str:
    """What the script calls the run that it joins; "" if it joins none. Raises ConfigError where it joins otherwise
    than once, outside of functions, by a name of its own."""
    joins = [call for call in calls_in(facts.tree) if facts.dotted(call.func) == "outlast.join"]
    if not joins:
        return ""
    statement = facts.parents[joins[0]]
    target = statement.targets[0] if isinstance(statement, ast.Assign) and len(statement.targets) == 1 else None
    if len(joins) == 1 and statement in facts.tree.body and isinstance(target, ast.Name):
        stored = [n for n in ast.walk(facts.tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
        given = [n.arg for n in ast.walk(facts.tree) if isinstance(n, ast.arg)]
        if [*(n.id for n in stored), *given].count(target.id) == 1:
            return target.id
    raise ConfigError(
        f"{name}, line {joins[-1].lineno}: outlast.join() is called already, and not in the one way that is understood",
        remedy="write `run = outlast.join()` once, behind the imports, and name nothing else `run`",
    )


def add_join(made: Any, joined: str, *needed: str) -> None:
    """Import what is needed and is not there, and join if that is not done. `made`: the rewrite."""
    imports = [n for n in made.facts.tree.body if isinstance(n, ast.Import | ast.ImportFrom)]
    last = max((n.end_lineno or n.lineno for n in imports), default=0)
    there = {ast.unparse(node) for node in imports}
    lines = [text for text in needed if text not in there and not (joined and text == "import outlast")]
    if joined:
        for text in lines:
            made.edits.insert(last + 1, text)
            made.say(max(last, 1), "added", text, "what a loader was told is given to protect()")
        return
    for text in ("", *lines, "", f"{made.names['run']} = outlast.join()"):
        made.edits.insert(last + 1, text)
    made.say(max(last, 1), "added", "run = outlast.join()", "the process becomes a replica of the run")


def without_unused_imports(before: str, after: str) -> str:
    """Leave out imports of what only the removed lines used."""
    was, now = ast.parse(before), ast.parse(after)
    read_before, read_now = (names_in(tree) for tree in (was, now))
    edits = Edits(after)
    edits.keep_strings(now)
    for node in now.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            bound = [(a.asname or a.name).split(".")[0] for a in node.names]
            kept = [a for a, b in zip(node.names, bound, strict=True) if b in read_now or b not in read_before]
            if not kept:
                edits.drop(node)
            elif len(kept) < len(node.names):
                node.names = kept
                text = ast.unparse(node)
                edits.put(node, text)
    return edits.text()
