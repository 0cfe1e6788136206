"""What the loops' conversion may get wrong, checked once it is made: conditions, clipping, divisions, loops around.

Each is `by hand`, by the line of the script as it was.
"""

from __future__ import annotations

import ast
from typing import Any

from outlast.convert._callers import calls_by_any_name, loops_around, repeats
from outlast.convert._facts import calls_in, names_in
from outlast.convert._loops import Loops

__all__ = ["say_doubts"]

_BARS = ("tqdm", "trange", "track", "iter", "islice", "cycle", "zip", "enumerate", "chain")

_ROUND = (
    "protect() is called once: a plain range() counts epochs, alone. For a number of steps one loop takes the place of "
    "all: for step in training.steps(until=…)"
)
_CARRIED = "a replica that joins begins with its first value: protect(state={…}) carries it"
_ALONE = (
    "one replica alone comes here, and what is remembered has to be equal on all: let every replica compute what "
    "decides (training.evaluate(…) shares it out, with one result), keep run.is_writer for printing and saving, and "
    "give protect(state={…}) what is remembered"
)


def say_doubts(made: Any, body: Any, loops: Loops) -> None:
    """Say them. `made`: the rewrite; `body`: the rewrite of the loops."""
    _Doubts(made, body, loops).say()


class _Doubts:
    def __init__(self, made: Any, body: Any, loops: Loops) -> None:
        self.made, self.body, self.loops, self.facts = made, body, loops, made.facts

    def say(self) -> None:
        self._conditions()
        self._around()
        self._swept()
        self._best()
        self._divided()
        for call in calls_in(self.facts.tree):
            if self.facts.is_call(call, "DistributedSampler"):
                for keyword in call.keywords:
                    if keyword.arg in ("seed", "drop_last"):
                        self._by_hand(call, ast.unparse(keyword), "give protect() seed=…, or the loader drop_last=…")

    def _by_hand(self, node: Any, what: str, why: str) -> None:
        self.made.say(node, "by hand", what.splitlines()[0], why)

    def _steps(self) -> list[ast.Call]:
        """Calls in the loop's turn that were left out for arguments of protect."""
        loops = self.loops
        region = loops.batches if loops.step_call is None else self.facts.function_of(loops.backward)
        nodes = [*ast.walk(loops.batches), *(ast.walk(region) if region is not loops.batches else ())]
        return [n for n in nodes if isinstance(n, ast.Call) and (self.made.gone(n) or n in self.body.normed)]

    def _ifs(self, node: ast.AST) -> list[ast.If]:
        found = []
        for outer in self.facts.within(node):
            if outer is self.loops.batches or isinstance(outer, ast.FunctionDef):
                break
            if isinstance(outer, ast.If):
                found.append(outer)
        return found

    def _conditions(self) -> None:
        """What stood under conditions is done at each step now."""
        taken = [c for c in self._steps() if self._is_step(c)]
        tests = self._ifs(taken[0]) if taken else []
        for call in self._steps():
            last = call.func.attr if isinstance(call.func, ast.Attribute) else ast.unparse(call.func)
            if last in ("step", "clip_grad_norm_") and self._ifs(call) != tests:
                self._by_hand(call, ast.unparse(call), "is done under another condition than the step: it has no place")
            if last == "clip_grad_norm_" and not self._whole(call):
                self._by_hand(call, ast.unparse(call), "clip_norm clips the gradient of the whole model")
        if len(tests) > 1:
            self._by_hand(tests[0], f"if {ast.unparse(tests[0].test)}", "one condition around the step is understood")
        for test in tests:
            both = any(isinstance(n, ast.And) for n in ast.walk(test.test))
            kept = [s for s in [*test.body, *test.orelse] if not self.made.gone(s)]
            if both or kept:
                self._by_hand(
                    kept[0] if kept else test,
                    f"if {ast.unparse(test.test)}: …",
                    "its turns are steps now: put what is left in it behind the loop over batches, without the test",
                )

    def _is_step(self, call: ast.Call) -> bool:
        owner = ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ""
        named = self.body.given
        return ast.unparse(call.func).endswith(".step") and (
            owner == self.body.optimizer or (owner == named.get("scaler") and bool(call.args))
        )

    def _whole(self, call: ast.Call) -> bool:
        given = call.args[0] if call.args else None
        if not (isinstance(given, ast.Call) and isinstance(given.func, ast.Attribute)):
            return False
        wrapped = {
            ast.unparse(c.args[0])
            for c in calls_in(self.facts.tree)
            if self.facts.is_call(c, "DistributedDataParallel", "DDP") and c.args
        }
        owner = ast.unparse(given.func.value).removesuffix(".module")
        return given.func.attr == "parameters" and owner in self.facts.models | wrapped

    def _around(self) -> None:
        """Where protect stands it is called once, and between epochs and batches is no other loop."""
        loops, facts = self.loops, self.facts
        place = loops.epochs or loops.batches
        for outer in loops_around(facts, place):
            self._by_hand(outer, ast.unparse(outer), _ROUND)
        for again in repeats(facts, facts.function_of(place)):
            self._by_hand(again, ast.unparse(again), "protect() is called once, and this may do it again")
        self._beside()
        if loops.epochs is not None:
            for inner in ast.walk(loops.epochs):
                if isinstance(inner, ast.For | ast.While) and inner not in (loops.epochs, loops.batches):
                    marks: list[Any] = [loops.batches, loops.passed]
                    if any(n is m for n in ast.walk(inner) for m in marks if m is not None):
                        self._by_hand(inner, ast.unparse(inner), "a loop between epochs and batches is not understood")
        names = {ast.unparse(n) for n in (loops.loader, loops.passed) if n is not None}
        for node in ast.walk(facts.tree):
            if not isinstance(node, ast.Assign) or ast.unparse(node.targets[0]) not in names:
                continue
            if facts.is_call(node.value, *_BARS):
                self._by_hand(node, ast.unparse(node), "put it around the loader in the loop's header")

    def _beside(self) -> None:
        """A function that takes steps now has no other call, which would give it something else."""
        loops, facts = self.loops, self.facts
        taking: list[tuple[Any, Any]] = [(loops.backward, loops.step_call)] if loops.step_call is not None else []
        taking += [(loops.batches, loops.epochs)] if loops.epochs is not None else []
        for trains, known in taking:
            function = facts.function_of(trains)
            if function is facts.function_of(known):
                continue
            understood = [c for c in facts.calls_of(function) if known is c or known in facts.within(c)]
            for call in calls_by_any_name(facts, function):
                if call not in understood:
                    why = f"{function.name} takes the steps of the loop that calls it, and here it is given none"
                    self._by_hand(call, ast.unparse(call), why)

    def _swept(self) -> None:
        """Behind the backward, what is done in the inner loop is done for each microbatch, and before the step."""
        if self.body.inner is None:
            return
        last, reads = self.body.inner
        rows = self.loops.batches.body
        at = rows.index(self.loops.body)
        for statement in rows[at + 1 : last + 1]:
            plain = isinstance(statement, ast.Expr | ast.Assign | ast.AugAssign | ast.AnnAssign)
            model = names_in(statement) & (self.facts.models | {self.body.optimizer})
            if not self.made.gone(statement) and (statement not in reads or not plain or model):
                self._by_hand(
                    statement,
                    ast.unparse(statement),
                    "what stands behind reads the batch, so this would be done for each microbatch, before the step: "
                    "put what reads the batch before the backward",
                )

    def _best(self) -> None:
        """`if acc > best: best = acc`."""
        for loop in (self.loops.batches, self.loops.epochs):
            for test in ast.walk(loop) if loop is not None else ():
                if not isinstance(test, ast.If) or self.made.gone(test):
                    continue
                stored = {n for s in test.body for n in names_in(s, ast.Store)}
                alone = any(self._by_writer(o) for o in self.facts.within(test))
                for name in sorted(stored & names_in(test.test)):
                    self._by_hand(test, f"{name} is remembered and decides", _ALONE if alone else _CARRIED)

    def _by_writer(self, outer: ast.AST) -> bool:
        """Whether one process alone went in there."""
        kinds = self.facts.kinds
        return isinstance(outer, ast.If) and any(
            self.facts.is_writer_test(part) or kinds.get(ast.unparse(part)) == "writer"
            for part in ast.walk(outer.test)
            if isinstance(part, ast.expr)
        )

    def _divided(self) -> None:
        """With accumulation the loss is divided by what is accumulated, once, and nothing is multiplied back."""
        if not self.body.accumulated:
            return
        if not self.body.divided:
            self._by_hand(
                self.loops.backward,
                "the accumulated loss is not divided by what is accumulated",
                "microbatches are averaged, where these are summed: multiply the loss",
            )
        item = f"{ast.unparse(self.loops.loss)}.item()"
        for node in ast.walk(self.loops.batches):
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult | ast.Div) and item in ast.unparse(node):
                self._by_hand(node, ast.unparse(node), "the loss is not divided by what is accumulated any more")
