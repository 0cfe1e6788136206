"""The conversion: reads facts and loops, collects edits and remarks. See the package for what it promises."""

from __future__ import annotations

import ast
import difflib
from dataclasses import dataclass
from typing import Any, Literal

from outlast.convert._body import LoopBody
from outlast.convert._doubts import say_doubts
from outlast.convert._edits import Edits
from outlast.convert._facts import Facts, calls_in, names_in, shuffle_of
from outlast.convert._loops import OWN_LOOP, Loops, Unclear, find_loops
from outlast.convert._remembered import say_remembered
from outlast.convert._survivors import say_survivors
from outlast.errors import ConfigError

__all__ = ["Conversion", "Remark", "convert"]

Kind = Literal["changed", "removed", "added", "check", "by hand"]
_GONE = ("init_process_group", "destroy_process_group", "barrier", "set_device", "set_epoch")
_COLLECTIVES = (
    "all_reduce",
    "reduce",
    "all_gather",
    "gather",
    "broadcast",
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "reduce_scatter",
    "new_group",
    "no_sync",
    "spawn",
)


@dataclass(frozen=True, kw_only=True)
class Remark:
    """One thing about one line of the script as it was. `by hand`: the conversion is not complete without it."""

    line: int
    kind: Kind
    what: str
    why: str


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """A script before and after, and what was done and why."""

    name: str
    before: str
    after: str
    remarks: tuple[Remark, ...]

    @property
    def complete(self) -> bool:
        """Whether nothing is left to be done by hand."""
        return not any(remark.kind == "by hand" for remark in self.remarks)

    def diff(self) -> str:
        """What was changed, as a unified diff; "" if nothing was."""
        before, after = (text.splitlines(keepends=True) for text in (self.before, self.after))
        return "".join(difflib.unified_diff(before, after, f"a/{self.name}", f"b/{self.name}"))


def convert(source: str, name: str = "train.py", *, processes: int = 8) -> Conversion:
    """Convert a script that trains with torchrun and DDP. `processes`: how many torchrun started, which is how many
    microbatches a step has. Raises ConfigError for text that is no Python, and for a script that is converted."""
    try:
        facts = Facts(source)
    except SyntaxError as error:
        raise ConfigError(f"{name}, line {error.lineno}: {error.msg}", remedy="mend the script first") from error
    if any(isinstance(n, ast.Attribute) and n.attr == "protect" for n in ast.walk(facts.tree)) and "outlast" in source:
        raise ConfigError(f"{name} calls outlast's protect() already", remedy="nothing: outlast run " + name)
    made = _Rewrite(source, facts, processes)
    after = made.run()
    remarks = sorted(set(made.remarks), key=lambda r: (r.line, r.kind, r.what))
    return Conversion(name=name, before=source, after=after, remarks=tuple(remarks))


class _Rewrite:
    def __init__(self, source: str, facts: Facts, processes: int) -> None:
        self.source, self.facts, self.processes = source, facts, processes
        self.edits = Edits(source)
        self.remarks: list[Remark] = []
        self.dropped: set[ast.AST] = set()
        self.edits.keep_strings(facts.tree)
        used = {n.id for n in ast.walk(facts.tree) if isinstance(n, ast.Name)}
        used |= {n.arg for n in ast.walk(facts.tree) if isinstance(n, ast.arg)}
        used |= {
            n.attr for n in ast.walk(facts.tree) if isinstance(n, ast.Attribute) and ast.unparse(n.value) == "self"
        }
        self.names = {word: _unused(word, used) for word in ("run", "training", "steps", "step")}

    def say(self, node: Any, kind: Kind, what: str, why: str) -> None:
        self.remarks.append(Remark(line=node if isinstance(node, int) else node.lineno, kind=kind, what=what, why=why))

    def drop(self, node: Any, what: str, why: str) -> None:
        """Leave the statement out that this stands in."""
        statement = self.facts.statement_of(node)
        if self._shares_line(statement):
            self.say(statement, "by hand", what, f"{why}; it stands in one line with other statements")
        elif statement not in self.dropped:
            self.dropped.add(statement)
            self.say(statement, "removed", what, why)

    def _shares_line(self, statement: Any) -> bool:
        lines = {statement.lineno, statement.end_lineno}
        others = {*ast.walk(statement), *self.facts.within(statement)}
        beside = any(
            isinstance(n, ast.stmt) and n not in others and lines & {n.lineno, n.end_lineno or 0}
            for n in ast.walk(self.facts.tree)
        )
        return beside or any(
            isinstance(n, ast.stmt) and n.lineno == statement.lineno for n in self.facts.within(statement)
        )

    def put(self, node: Any, text: str, why: str) -> None:
        """Replace an expression."""
        self.say(node, "changed", f"{self.edits.segment(node)} → {text}", why)
        self.edits.put(node, text)

    def run(self) -> str:
        try:
            loops = find_loops(self.facts)
        except Unclear as unclear:
            self.say(unclear.line, "by hand", unclear.what, unclear.remedy)
            self._explain_only()
            return self.source
        self._processes(loops)
        self._loaders()
        body = LoopBody(self, loops)
        body.rewrite()
        self._ranks(loops)
        self._lengths(loops, body.accumulated)
        self._join()
        self._empty_blocks()
        for statement in self.dropped:
            self.edits.drop(statement)
        after = self.edits.text()
        try:
            after = _without_unused_imports(self.source, after)
            ast.parse(after)
        except SyntaxError as error:  # what cannot be read is never handed out
            self.say(1, "by hand", f"the script is laid out in a way that is not understood ({error.msg})", OWN_LOOP)
            self.remarks = [remark for remark in self.remarks if remark.kind == "by hand"]
            return self.source
        say_doubts(self, body, loops)
        say_remembered(self, body, loops)
        say_survivors(self, after)
        return after

    def _explain_only(self) -> None:
        """Nothing is changed; what stands in the way is told all the same."""
        for call in calls_in(self.facts.tree):
            if self.facts.is_call(call, *_GONE[:3]):
                self.say(call, "by hand", ast.unparse(call.func), "goes: outlast.join() takes its place, once")
            elif self.facts.is_call(call, "DistributedDataParallel", "DDP"):
                self.say(call, "by hand", "DistributedDataParallel", "goes: give the model itself to protect()")
            elif self.facts.is_call(call, "clip_grad_norm_", "clip_grad_value_"):
                self.say(call, "by hand", ast.unparse(call.func), "goes: protect(clip_norm=…)")
            elif self.facts.is_call(call, "GradScaler"):
                self.say(call, "by hand", "GradScaler", "protect(scaler=scaler), and no scale, unscale_, step, update")

    # --- processes -----------------------------------------------------------------------------------------------
    def _processes(self, loops: Loops) -> None:
        facts = self.facts
        for call in calls_in(facts.tree):
            last = facts.dotted(call.func).rpartition(".")[2]
            alone = isinstance(facts.parents[call], ast.Expr)
            if last in _GONE and alone and self._of_processes(call, last):
                self.drop(call, ast.unparse(call.func), "replicas find each other, and data and devices are shared out")
            elif facts.is_call(call, "DistributedDataParallel", "DDP"):
                self._unwrap(call)
            elif last in _COLLECTIVES and facts.dotted(call.func).startswith(("torch.distributed", "torch.multiproc")):
                self.say(
                    call,
                    "by hand",
                    f"{ast.unparse(call.func)}(…)",
                    "there is no process group. A number averaged "
                    "over the batch: step.metric(name, value) in the loop over batches, step.metrics after it; an "
                    "evaluation shared by all: training.evaluate(…); processes: outlast run starts them",
                )
            elif last == "no_sync":
                self.say(call, "by hand", "no_sync()", "gradients of all microbatches are summed for you: leave it out")
        for node in ast.walk(facts.tree):
            if isinstance(node, ast.Attribute) and node.attr == "module" and ast.unparse(node.value) in facts.models:
                self.put(node, ast.unparse(node.value), "nothing is wrapped around the model")

    def _of_processes(self, call: ast.Call, last: str) -> bool:
        """Whether it is torch's, or a sampler's; a method of the script's own may be called the same."""
        if last == "set_epoch":
            return isinstance(call.func, ast.Attribute) and "sampler" in ast.unparse(call.func.value).lower()
        return str(self.facts.dotted(call.func)).startswith(("torch.distributed", "torch.cuda"))

    def _unwrap(self, call: ast.Call) -> None:
        statement, inner = self.facts.statement_of(call), call.args[0] if call.args else None
        if not (isinstance(statement, ast.Assign) and statement.value is call and inner is not None):
            self.say(call, "by hand", "DistributedDataParallel inside an expression", "give protect() the model itself")
        elif ast.unparse(statement.targets[0]) == ast.unparse(inner):
            self.drop(call, "DistributedDataParallel", "protect() is given the model itself")
        else:
            self.put(call, self.edits.segment(inner), "protect() is given the model itself")

    def _loaders(self) -> None:
        facts = self.facts
        for name in facts.samplers:
            for node in ast.walk(facts.tree):
                if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
                    self.drop(node, f"{name} = DistributedSampler", "samples are shared out by outlast")
        for call in calls_in(facts.tree):
            if not facts.is_call(call, "DataLoader"):
                continue
            sampler = next((k for k in call.keywords if k.arg == "sampler"), None)
            if sampler is None:
                continue
            if facts.is_call(sampler.value, "DistributedSampler"):
                assert isinstance(sampler.value, ast.Call)
                order = shuffle_of(sampler.value)
            elif ast.unparse(sampler.value) in facts.samplers:
                order = facts.samplers[ast.unparse(sampler.value)]
            else:
                continue
            kept = [self.edits.segment(a) for a in call.args]
            kept += [self.edits.segment(k) for k in call.keywords if k.arg not in ("sampler", "shuffle")]
            self.put(
                call,
                f"{self.edits.segment(call.func)}({', '.join([*kept, f'shuffle={order}'])})",
                "samples are shared out by outlast; the loader's batch is one microbatch",
            )

    # --- ranks ---------------------------------------------------------------------------------------------------
    def _ranks(self, loops: Loops) -> None:
        facts = self.facts
        first = (loops.epochs or loops.batches).lineno
        scope = facts.function_of(loops.epochs or loops.batches)
        for node in list(ast.walk(facts.tree)):
            if isinstance(node, ast.Assign) and node not in self.dropped:
                self._rank_assigned(node)
        for node in ast.walk(facts.tree):
            if isinstance(node, ast.JoinedStr) and self._is_device(node) and not self.gone(node):
                self.put(node, f"{self.names['run']}.device", "the device of this replica")
        for node in ast.walk(facts.tree):
            named = isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load)
            writer = named and facts.kinds.get(ast.unparse(node)) == "writer"
            if not (writer or facts.is_writer_test(node)) or self.gone(node):
                continue
            early = node.lineno < first and facts.function_of(node) in (scope, facts.tree)  # type: ignore[attr-defined]
            if isinstance(node, ast.Compare) and isinstance(facts.parents.get(node), ast.Assign):
                continue
            unlike = isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.NotEq)
            if early:
                self.say(
                    node,
                    "by hand",
                    f"{ast.unparse(node)} before the first step",
                    "who writes is known from the "
                    "first step on: move this into the loop or behind it, or let every replica do it",
                )
            self.put(
                node,
                f"{'not ' * unlike}{self.names['run']}.is_writer",
                "one replica writes, and another one if it dies",
            )
        for node in ast.walk(facts.tree):
            kind = facts.kinds.get(ast.unparse(node), "") if isinstance(node, ast.Name | ast.Attribute) else ""
            if not kind and isinstance(node, ast.Attribute) and node.attr in ("rank", "local_rank", "world_size"):
                kind = "rank"  # of arguments, which a launcher gave
            read = kind in ("rank", "world") and isinstance(node.ctx, ast.Load)  # type: ignore[attr-defined]
            if read and not self.gone(node) and not any(facts.is_writer_test(n) for n in facts.within(node)):
                self.say(
                    node,
                    "by hand",
                    f"{ast.unparse(node)} is used",
                    "ranks come and go: share nothing out by them. "
                    "In the loop run.rank and run.size are those of the moment, and run.name is this replica's own",
                )

    def _is_device(self, text: ast.JoinedStr) -> bool:
        """Whether it is `f"cuda:{local_rank}"`, and nothing more."""
        if len(text.values) != 2 or not isinstance(text.values[1], ast.FormattedValue):
            return False
        number = text.values[1].value
        head = text.values[0]
        return isinstance(head, ast.Constant) and head.value == "cuda:" and self.facts.rank_kind(number) == "local"

    def _rank_assigned(self, node: ast.Assign) -> None:
        name = ast.unparse(node.targets[0])
        kind = self.facts.kinds.get(name, "")
        if kind == "local":
            self.put(
                node.value,
                f"{self.names['run']}.device",
                "the device of this replica; the processor where there is no GPU",
            )
        elif kind in ("rank", "world", "writer"):
            self.drop(node, name, "known to outlast alone, and another one from view to view")

    def _lengths(self, loops: Loops, accumulated: str) -> None:
        """`len(loader)` was the number of batches of one process."""
        names = {ast.unparse(n) for n in (loops.loader, loops.passed) if n is not None}
        inside = self.facts.function_of(loops.batches)
        short = {
            ast.unparse(keyword.value)
            for call in calls_in(self.facts.tree)
            if self.facts.is_call(call, "DataLoader")
            for keyword in call.keywords
            if keyword.arg == "drop_last"
        }
        for call in calls_in(self.facts.tree):
            if self.facts.is_call(call, "len") and call.args and ast.unparse(call.args[0]) in names:
                here = loops.passed is not None and self.facts.function_of(call) is inside
                if here or self.gone(call):
                    continue
                if len(short) > 1 or short - {"True", "False"}:
                    self.say(call, "by hand", ast.unparse(call), "training.steps_per_epoch, behind protect()")
                    continue
                share = f"({self.processes} * {accumulated})" if accumulated else str(self.processes)
                length = self.edits.segment(call)
                self.put(
                    call,
                    f"{length} // {share}" if short == {"True"} else f"-(-{length} // {share})",
                    "the loader has all batches now, and not those of one process of torchrun",
                )

    def gone(self, node: ast.AST) -> bool:
        return node in self.dropped or any(outer in self.dropped for outer in self.facts.within(node))

    # --- the rest ------------------------------------------------------------------------------------------------
    def _join(self) -> None:
        imports = [n for n in self.facts.tree.body if isinstance(n, ast.Import | ast.ImportFrom)]
        last = max((n.end_lineno or n.lineno for n in imports), default=0)
        for text in (
            "",
            "import outlast",
            "from outlast.adapters.loaders import of_loader",
            "",
            f"{self.names['run']} = outlast.join()",
        ):
            self.edits.insert(last + 1, text)
        self.say(max(last, 1), "added", "run = outlast.join()", "the process becomes a replica of the run")

    def _empty_blocks(self) -> None:
        """A block whose statements are all gone goes, too, and a function with its calls."""
        again = True
        while again:
            again = False
            for node in ast.walk(self.facts.tree):
                body = getattr(node, "body", None)
                if node in self.dropped or not isinstance(node, ast.If | ast.FunctionDef | ast.With) or not body:
                    continue
                rest = [s for s in body if s not in self.dropped and not _is_docstring(s)]
                if rest or getattr(node, "orelse", None):
                    continue
                again = True
                self.drop(node, ast.unparse(node).splitlines()[0], "nothing is left in it")
                for call in self.facts.calls_of(node) if isinstance(node, ast.FunctionDef) else []:
                    if isinstance(self.facts.parents[call], ast.Expr):
                        self.drop(call, ast.unparse(call), "nothing is left in it")
        for node in ast.walk(self.facts.tree):
            blocks = ast.If | ast.For | ast.While | ast.With | ast.Try | ast.ExceptHandler | ast.FunctionDef
            if isinstance(node, blocks) and not self.gone(node):
                for block in (node.body, getattr(node, "orelse", []), getattr(node, "finalbody", [])):
                    if block and all(s in self.dropped for s in block):
                        self.edits.insert(block[0].lineno, self.edits.indent_of(block[0]) + "pass")


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _without_unused_imports(before: str, after: str) -> str:
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


def _unused(word: str, used: set[str]) -> str:
    return next(name for name in (word, f"the_{word}", f"outlast_{word}", f"outlast_{word}_") if name not in used)
