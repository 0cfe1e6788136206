"""The conversion: reads facts and loops, collects edits and remarks. See the package for what it promises."""

from __future__ import annotations

import ast
import difflib
from dataclasses import dataclass
from typing import Any, Literal

from outlast.convert._body import LoopBody
from outlast.convert._by_hand import outermost_loop, say_loops
from outlast.convert._doubts import say_doubts
from outlast.convert._edits import Edits
from outlast.convert._facts import LOADERS, Facts, calls_in, pairs_of, shuffle_of
from outlast.convert._joining import add_join, joined_as, without_unused_imports
from outlast.convert._loops import OWN_LOOP, Loops, Unclear, find_loops
from outlast.convert._own_saves import say_own_saves
from outlast.convert._peers import flattened, followed, leave_calls_out
from outlast.convert._remembered import say_remembered
from outlast.convert._survivors import say_survivors
from outlast.errors import ConfigError

__all__ = ["Conversion", "Remark", "convert"]

Kind = Literal["changed", "removed", "added", "check", "by hand"]
_GONE = ("init_process_group", "destroy_process_group", "barrier", "set_device", "set_epoch")
_COLLECTIVES = (
    "all_reduce", "reduce", "all_gather", "gather", "broadcast", "all_gather_object", "broadcast_object_list",
    "gather_object", "reduce_scatter", "new_group", "no_sync", "spawn",
)  # fmt: skip


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
    microbatches a step has. Raises ConfigError for text that is no Python, and for a script that is converted, or that
    joins a run in a way that is not understood."""
    try:
        facts = Facts(source)
    except SyntaxError as error:
        line = f", line {error.lineno}" if error.lineno else ""
        raise ConfigError(f"{name}{line}: {error.msg}", remedy="mend the script first") from error
    if any(isinstance(n, ast.Attribute) and n.attr == "protect" for n in ast.walk(facts.tree)) and "outlast" in source:
        raise ConfigError(f"{name} calls outlast's protect() already", remedy="nothing: outlast run " + name)
    text, blocks = flattened(source, facts)
    made = _Rewrite(text, Facts(text) if blocks else facts, processes, joined_as(facts, name))
    for block in blocks:
        what = f"with {ast.unparse(block.items[0])}:"
        made.say(block, "removed", what, "what stood in it moved out: a step is committed, or it is not")
        made.edits.drop_lines(block.lineno, block.items[0].context_expr.end_lineno or block.lineno)
    after = made.run()
    after = source if after == text else after
    remarks = sorted(set(made.remarks), key=lambda r: (r.line, r.kind, r.what))
    return Conversion(name=name, before=source, after=after, remarks=tuple(remarks))


class _Rewrite:
    def __init__(self, source: str, facts: Facts, processes: int, joined: str) -> None:
        """`joined`: what the script calls the run that it joins already, "" if none."""
        self.source, self.facts, self.processes, self.joined = source, facts, processes, joined
        self.edits = Edits(source)
        self.remarks: list[Remark] = []
        self.dropped: set[ast.AST] = set()
        self.replaced: set[ast.AST] = set()  # expressions that the new text does not have
        self.edits.keep_strings(facts.tree)
        used = {n.id for n in ast.walk(facts.tree) if isinstance(n, ast.Name)}
        used |= {n.arg for n in ast.walk(facts.tree) if isinstance(n, ast.arg)}
        used |= {
            n.attr for n in ast.walk(facts.tree) if isinstance(n, ast.Attribute) and ast.unparse(n.value) == "self"
        }
        self.names = {word: _unused(word, used) for word in ("run", "training", "steps", "step")}
        self.names["run"] = joined or self.names["run"]

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
            return self._all_but_loops()
        self._processes()
        self._loaders()
        body = LoopBody(self, loops)
        body.rewrite()
        self._ranks(loops.epochs or loops.batches)
        self._lengths(loops, body.accumulated)
        add_join(self, self.joined, "import outlast", "from outlast.adapters.loaders import of_loader")
        after = self._applied()
        if after != self.source:
            say_own_saves(self)
            say_doubts(self, body, loops)
            say_remembered(self, body, loops)
            say_survivors(self, after)
        return after

    def _all_but_loops(self) -> str:
        """Loops that are not understood stay as they are, and each line of them that has to change is told."""
        self._processes()
        self._loaders()
        self._ranks(outermost_loop(self.facts))
        add_join(self, self.joined, "import outlast")
        say_loops(self)
        say_own_saves(self)
        after = self._applied()
        say_survivors(self, after)
        return after

    def _applied(self) -> str:
        """The text with all edits; as it was if that could not be read, which is never handed out."""
        self._empty_blocks()
        for statement in self.dropped:
            self.edits.drop(statement)
        try:
            after = without_unused_imports(self.source, self.edits.text())
            ast.parse(after)
        except SyntaxError as error:
            self.say(1, "by hand", f"the script is laid out in a way that is not understood ({error.msg})", OWN_LOOP)
            self.remarks = [remark for remark in self.remarks if remark.kind == "by hand"]
            return self.source
        return after

    # --- processes -----------------------------------------------------------------------------------------------
    def _processes(self) -> None:
        facts = self.facts
        leave_calls_out(self)
        for call in calls_in(facts.tree):
            last = facts.dotted(call.func).rpartition(".")[2]
            alone = isinstance(facts.parents[call], ast.Expr)
            if last in _GONE and alone and self._of_processes(call, last):
                self.drop(call, ast.unparse(call.func), "replicas find each other, and data and devices are shared out")
            elif (
                facts.is_call(call, "DistributedDataParallel", "DDP") or facts.dotted(call.func) == "torchft.Optimizer"
            ):
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
            if isinstance(node, ast.Attribute) and node.attr == "module" and ast.unparse(node.value) in facts.wrapped:
                self.put(node, ast.unparse(node.value), "nothing is wrapped around the model")

    def _of_processes(self, call: ast.Call, last: str) -> bool:
        """Whether it is torch's, or a sampler's; a method of the script's own may be called the same."""
        if last == "set_epoch":
            return isinstance(call.func, ast.Attribute) and "sampler" in ast.unparse(call.func.value).lower()
        return str(self.facts.dotted(call.func)).startswith(("torch.distributed", "torch.cuda"))

    def _unwrap(self, call: ast.Call) -> None:
        name = self.facts.dotted(call.func).rpartition(".")[2]
        why = f"protect() is given the {'optimizer' if name == 'Optimizer' else 'model'} itself"
        of_torchft = self.facts.dotted(call.func).startswith("torchft.")  # its first argument is the manager
        statement, inner = self.facts.statement_of(call), next(iter(call.args[of_torchft:]), None)
        if not (isinstance(statement, ast.Assign) and statement.value is call and inner is not None):
            self.say(call, "by hand", f"{name} inside an expression", why)
        elif ast.unparse(statement.targets[0]) == ast.unparse(inner):
            self.drop(call, name, why)
        else:
            self.put(call, self.edits.segment(inner), why)

    def _loaders(self) -> None:
        facts = self.facts
        for name in facts.samplers:
            for node in ast.walk(facts.tree):
                if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
                    self.drop(node, f"{name} = DistributedSampler", "samples are shared out by outlast")
        for call in calls_in(facts.tree):
            if not facts.is_call(call, *LOADERS):
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
    def _ranks(self, training: Any) -> None:
        """`training`: the outermost loop, None if there is none that is known."""
        facts = self.facts
        theirs = followed(facts)  # whose local_rank is told with the rest of them
        first = training.lineno if training is not None else 0
        scope = facts.function_of(training) if training is not None else facts.tree
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
            asked = isinstance(node, ast.Attribute) and node.attr in ("rank", "local_rank", "world_size")
            if not kind and asked and ast.unparse(node.value) not in (self.joined, *theirs):  # type: ignore[attr-defined]
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
        """Ranks and sizes go, the local one becomes the device; what else stands in `rank, other = …` stays."""
        device = "the device of this replica; the processor where there is no GPU"
        alone = "known to outlast alone, and another one from view to view"
        pairs = [(t, v, self.facts.kinds.get(ast.unparse(t), "")) for t, v in pairs_of(node)]
        kept = [pair for pair in pairs if pair[2] not in ("rank", "world", "writer")]
        if not any(kind for *_, kind in pairs):
            return
        if not kept:
            self.drop(node, self.edits.segment(node.targets[0]), alone)
        elif not isinstance(node.targets[0], ast.Tuple | ast.List):
            self.put(node.value, f"{self.names['run']}.device", device)
        else:
            targets = [self.edits.segment(target) for target, *_ in kept]
            values = [f"{self.names['run']}.device" if k == "local" else self.edits.segment(v) for _, v, k in kept]
            self.put(node, f"{', '.join(targets)} = {', '.join(values)}", f"{alone}; {device}")
            self.replaced |= {value for _, value, kind in pairs if kind}

    def _lengths(self, loops: Loops, accumulated: str) -> None:
        """`len(loader)` was the number of batches of one process."""
        names = {ast.unparse(n) for n in (loops.loader, loops.passed) if n is not None}
        inside = self.facts.function_of(loops.batches)
        short = {
            ast.unparse(keyword.value)
            for call in calls_in(self.facts.tree)
            if self.facts.is_call(call, *LOADERS)
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
        out = self.dropped | self.replaced
        return node in out or any(outer in out for outer in self.facts.within(node))

    # --- the rest ------------------------------------------------------------------------------------------------
    def _empty_blocks(self) -> None:
        """A block whose statements are all gone goes, too, and a function with its calls; a method stays, empty."""
        again = True
        while again:
            again = False
            for node in ast.walk(self.facts.tree):
                body = getattr(node, "body", None)
                if node in self.dropped or not isinstance(node, ast.If | ast.FunctionDef | ast.With) or not body:
                    continue
                rest = [s for s in body if s not in self.dropped and not _is_docstring(s)]
                method = isinstance(node, ast.FunctionDef) and isinstance(self.facts.parents[node], ast.ClassDef)
                if rest or getattr(node, "orelse", None) or method:
                    continue  # who calls a method, by which name of its object, is not known for certain
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


def _unused(word: str, used: set[str]) -> str:
    return next(name for name in (word, f"the_{word}", f"outlast_{word}", f"outlast_{word}_") if name not in used)
