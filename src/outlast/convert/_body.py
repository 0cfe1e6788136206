"""The loops themselves: epochs become `training.epochs(…)`, batches become steps with their microbatches.

What a loop's body did once a batch is done once a step, but for what reads the batch: that stays in the inner loop.
A statement that counts in the inner loop would count this replica's microbatches: it is left to a person.
"""

from __future__ import annotations

import ast
from typing import Any

from outlast.convert._arguments import Arguments
from outlast.convert._clipping import clipped
from outlast.convert._facts import names_in
from outlast.convert._loops import Loops

__all__ = ["LoopBody"]

_STEP_OF = ("optim", "opt")
_LEAVE = {
    "zero_grad": "gradients are cleared by outlast",
    "unscale_": "protect(scaler=…) does it",
    "update": "protect(scaler=…) does it",
}


class LoopBody:
    """Rewrites the body of a training loop. `made`: the rewrite of the whole script, which is given every edit and
    remark."""

    def __init__(self, made: Any, loops: Loops) -> None:
        self.made, self.loops, self.facts, self.edits = made, loops, made.facts, made.edits
        self.given: dict[str, str] = {}  # further arguments of protect
        self.optimizer = ""
        self.accumulated = ""
        self.normed: list[ast.Call] = []  # clipping whose result is used: the step's norm stands in its place
        self.divided = False  # by what is accumulated
        self.inner: tuple[int, set[ast.stmt]] | None = None  # the last of the inner loop, and what reads the batch
        self.span: tuple[int, int] | None = None  # the first and the last

    def rewrite(self) -> None:
        """All of it."""
        loops, facts = self.loops, self.facts
        place = facts.function_of(loops.backward)
        region: list[ast.stmt] = list(loops.batches.body)
        if loops.step_call is not None:
            region += place.body
        for statement in region:
            for node in ast.walk(statement):
                if isinstance(node, ast.Call):
                    self._habit(node)
                if isinstance(node, ast.Break | ast.Continue) and self._of_loop(node):
                    self._jump(node)
        self._divided(region)
        word = self.made.names["step"]
        step = f"self.{word}" if loops.step_call is not None else word
        self.made.put(
            loops.backward,
            f"{step}.backward({self.edits.segment(loops.loss)})",
            "its gradient goes into the step's sum, whichever replica computes it",
        )
        self._batch_loop()
        self._epoch_loop()
        self._kept()

    # --- what leaves the loop ------------------------------------------------------------------------------------
    def _habit(self, call: ast.Call) -> None:
        if not isinstance(call.func, ast.Attribute | ast.Name) or call is self.loops.backward:
            return
        last = self.facts.dotted(call.func).rpartition(".")[2]
        owner = ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ""
        alone = isinstance(self.facts.parents[call], ast.Expr)
        if last in ("clip_grad_norm_", "clip_grad_value_"):
            clipped(self, call, last, alone)
        elif last == "step" and alone:
            self._stepped(call, owner)
        elif last in _LEAVE and alone and (last != "update" or "scaler" in owner.lower()):
            self.made.drop(call, ast.unparse(call), _LEAVE[last])
            if last == "update":
                self.given["scaler"] = owner

    def _stepped(self, call: ast.Call, owner: str) -> None:
        low = owner.lower()
        if "scaler" in low and call.args:
            self.optimizer, self.given["scaler"] = ast.unparse(call.args[0]), owner
        elif "sched" in low or low.endswith("lr"):
            self.given["scheduler"] = owner
            if call.args or call.keywords:
                self._by_hand(
                    call,
                    f"{ast.unparse(call)}",
                    "a scheduler that needs a number is stepped in the loop, "
                    "behind `for batch in step`, with step.loss or step.metrics",
                )
                return
        elif self.optimizer and self.optimizer != owner:
            self._by_hand(
                call,
                f"{owner}.step()",
                "a second optimizer: protect(model, [first, second], …) steps both in each step",
            )
            return
        else:
            self.optimizer = owner
        why = "outlast takes the step when the loop over its batches ends"
        self.made.drop(call, ast.unparse(call), why if owner != self.given.get("scheduler") else "protect(scheduler=…)")
        for outer in self.facts.within(call):
            if outer is self.loops.batches or isinstance(outer, ast.FunctionDef):
                break
            if isinstance(outer, ast.If) and owner != self.given.get("scheduler"):
                self._accumulation(outer)

    def _accumulation(self, test: ast.If) -> None:
        mod = [n for n in ast.walk(test.test) if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Mod)]
        if not mod:
            self._by_hand(
                test,
                f"if {ast.unparse(test.test)}: … step()",
                "each step is taken; a step that should be left out has no place here",
            )
            return
        self.accumulated = ast.unparse(mod[0].right)
        self.made.say(
            test,
            "check",
            f"every {self.accumulated} batches one step",
            "now one step has so many microbatches for each process, and what enumerate() counts are steps",
        )

    def _divided(self, region: list[ast.stmt]) -> None:
        """`loss / steps` goes with the accumulation; any other division stays what it is."""
        loss = ast.unparse(self.loops.loss)
        for node in (n for statement in region for n in ast.walk(statement)) if self.accumulated else ():
            if isinstance(node, ast.AugAssign) and ast.unparse(node.target) == loss:
                left, by = loss, node.value if isinstance(node.op, ast.Div) else None
            elif isinstance(node, ast.Assign | ast.AnnAssign) and loss in names_in(node, ast.Store):
                value = node.value
                divides = isinstance(value, ast.BinOp) and isinstance(value.op, ast.Div)
                left = ast.unparse(value.left) if divides else ""  # type: ignore[union-attr]
                by = value.right if divides else None  # type: ignore[union-attr]
            else:
                continue
            if by is not None and ast.unparse(by) == self.accumulated and not self.divided:
                self.divided = True
                if left == loss:
                    self.made.drop(node, ast.unparse(node), "microbatches are averaged for you")
                else:
                    self.made.put(node.value, left, "microbatches are averaged for you")
            elif any(isinstance(n, ast.Div) for n in ast.walk(node)):
                self._by_hand(node, ast.unparse(node), f"is it the mean over {self.accumulated}? then leave it out")
        if isinstance(self.loops.loss, ast.BinOp) and isinstance(self.loops.loss.op, ast.Div):
            self._by_hand(
                self.loops.loss,
                ast.unparse(self.loops.loss),
                "microbatches are averaged for you: leave the division out",
            )

    def _of_loop(self, node: ast.AST) -> bool:
        loop = next((o for o in self.facts.within(node) if isinstance(o, ast.For | ast.While)), None)
        return loop is self.loops.batches

    def _jump(self, node: ast.stmt) -> None:
        what = "break" if isinstance(node, ast.Break) else "continue"
        remedy = "training.stop(reason) and go on: training then ends on all replicas after the same step"
        if what == "continue":
            remedy = "each batch has its backward; one that should not count: step.backward(0.0 * loss)"
        self._by_hand(node, what, remedy)

    def _by_hand(self, node: Any, what: str, why: str) -> None:
        self.made.say(node, "by hand", what, why)

    # --- loops ---------------------------------------------------------------------------------------------------
    def _batch_loop(self) -> None:
        loop, edits = self.loops.batches, self.edits
        header_target: Any = loop.target
        counter = self._counter(loop)
        if counter is None:
            return
        if counter:
            assert isinstance(loop.target, ast.Tuple)
            header_target = loop.target.elts[1]
        target = edits.segment(header_target)
        if loop.orelse:
            self._by_hand(loop, "for … else", "put it behind the loop")
        inner = names_in(header_target, ast.Store)
        first, last = self._inner(loop, inner)
        word = self.made.names["step"]
        edits.put(loop.target, word)
        over = self._looped_over()
        if counter:  # a replica that comes in amid an epoch counts like all others
            self._over(over)
            top = edits.first_of(loop.body[0])
            place = f"{word}.number" + (f" % len({over})" if self.loops.epochs is not None else "")
            edits.insert(top, f"{edits.indent_of(loop.body[0])}{counter.format(place)}")
        self.made.say(
            loop,
            "changed",
            "one turn is one step",
            "its microbatches, this replica's and those of the dead, are the turns of the loop in it",
        )
        pad = edits.indent_of(loop.body[0])
        target = target[1:-1] if target.startswith("(") and target.endswith(")") else target
        top = edits.first_of(loop.body[first])
        edits.insert(top, f"{pad}for {target} in {word}:")
        if self.loops.step_call is not None:
            edits.insert(top, f"{pad}    self.{word} = {word}")
        edits.deepen(top, loop.body[last].end_lineno or 0, 4)
        for statement in loop.body[last + 1 :]:
            self._loss_read(statement)

    def _counter(self, loop: ast.For) -> str | None:
        """The line that gives enumerate()'s number, with a place for the step's; "" without enumerate, None if it is
        not understood."""
        calls = [n for n in ast.walk(loop.iter) if isinstance(n, ast.Call) and self.facts.is_call(n, "enumerate")]
        if not calls:
            return ""
        pair = isinstance(loop.target, ast.Tuple) and len(loop.target.elts) == 2
        if calls != [loop.iter] or not pair:
            self._by_hand(loop, ast.unparse(loop.iter), "for number, batch in enumerate(…), with nothing around it")
            return None
        assert isinstance(loop.iter, ast.Call)
        assert isinstance(loop.target, ast.Tuple)
        starts = [*loop.iter.args[1:], *(k.value for k in loop.iter.keywords)]
        more = "".join(f" + {self.edits.segment(start)}" for start in starts)
        return f"{self.edits.segment(loop.target.elts[0])} = {{}}{more}"

    def _looped_over(self) -> str:
        """What the loop over batches goes over from now on."""
        loops, names = self.loops, self.made.names
        if loops.epochs is None:
            return f"{names['training']}.steps(until={names['training']}.steps_per_epoch)"
        if loops.through_self and self.facts.function_of(loops.epochs) is not self.facts.function_of(loops.batches):
            return f"self.{names['steps']}"
        return ast.unparse(loops.loader) if loops.passed is not None else str(names["steps"])

    def _over(self, text: str) -> None:
        """Write that in the loop's header, where a progress bar stays around it."""
        loop, loader = self.loops.batches, self.loops.loader
        if self._counter(loop):
            assert isinstance(loop.iter, ast.Call)
            inside = self.edits.segment(loop.iter.args[0])
            self.edits.put(loop.iter, inside.replace(self.edits.segment(loader), text, 1))
        elif ast.unparse(loader) != text:
            self.edits.put(loader, text)

    def _inner(self, loop: ast.For, inner: set[str]) -> tuple[int, int]:
        """Places in the body of the first and the last statement that belongs to a microbatch."""
        body, made = loop.body, self.made
        at = body.index(self.loops.body)
        first = next((i for i, s in enumerate(body) if names_in(s) & inner), at)
        for statement in body[first : at + 1]:
            inner = inner | names_in(statement, ast.Store)
        loss, last, reading = ast.unparse(self.loops.loss), at, set[ast.stmt]()
        for i in range(at + 1, len(body)):
            if body[i] not in made.dropped and self._reads(body[i], inner, loss):
                last = i
                reading.add(body[i])
                inner = inner | names_in(body[i], ast.Store)
        self.inner, self.span = (last, reading), (first, last)
        for statement in body[first : last + 1]:
            for node in ast.walk(statement):
                if not isinstance(node, ast.AugAssign) or node in made.dropped:
                    continue
                what = ast.unparse(node)
                if names_in(node.value) & inner:
                    made.say(
                        node,
                        "check",
                        what,
                        "adds up this replica's microbatches only; for the mean over the whole "
                        "batch: step.metric(name, value) here, step.metrics[name] behind the loop over batches",
                    )
                else:
                    self._by_hand(
                        node,
                        what,
                        "counts this replica's microbatches, which differ from replica to replica: "
                        "move it behind the loop over batches, or use step.number",
                    )
        return first, last

    @staticmethod
    def _reads(statement: ast.stmt, inner: set[str], loss: str) -> bool:
        """Whether it reads what belongs to a microbatch, other than the loss as a number."""
        reads = [n for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)]
        numbers = {
            id(n.func.value)
            for n in ast.walk(statement)
            if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and ast.unparse(n) == f"{loss}.item()"
        }
        return any(n.id in inner and id(n) not in numbers for n in reads)

    def _loss_read(self, statement: ast.stmt) -> None:
        for node in ast.walk(statement):
            if isinstance(node, ast.Call) and ast.unparse(node) == f"{ast.unparse(self.loops.loss)}.item()":
                self.made.put(
                    node, f"{self.made.names['step']}.loss", "the mean over the whole batch, the same on every replica"
                )

    def _epoch_loop(self) -> None:
        loops, edits, facts = self.loops, self.edits, self.facts
        loop = loops.epochs or loops.batches
        pad = edits.indent_of(loop)
        loader = loops.passed if loops.passed is not None else loops.loader
        run, training, steps = (self.made.names[word] for word in ("run", "training", "steps"))
        made = Arguments(self.made, loops, self.given, self.optimizer, self.accumulated).text(loader, loop)
        edits.insert(edits.first_of(loop), f"{pad}{training} = {run}.protect({made})")
        self.made.say(loop, "added", "run.protect(…)", "from here on the state is outlast's to keep")
        if loops.epochs is None:
            self._over(self._looped_over())
            return
        assert isinstance(loop.iter, ast.Call)
        bounds = loop.iter.args
        if len(bounds) > 2:
            self._by_hand(loop, ast.unparse(loop.iter), "epochs are counted one by one")
        end = edits.segment(bounds[-1 if len(bounds) < 3 else 1])
        offset = ""
        if len(bounds) == 2 and isinstance(bounds[0], ast.Constant):
            offset = edits.segment(bounds[0]) if bounds[0].value else ""
            end += f" - {offset}" if offset else ""
        elif len(bounds) == 2:
            self.made.say(
                loop,
                "check",
                f"range({ast.unparse(bounds[0])}, …)",
                "a run goes on by itself from where its "
                "checkpoints are (outlast run --checkpoint-dir DIR); what the script loaded is overwritten",
            )
        epoch = edits.segment(loop.target)
        edits.put(loop.iter, f"{training}.epochs({end})")
        edits.put(loop.target, steps)
        self.made.say(
            loop,
            "changed",
            f"for {epoch} in {ast.unparse(loop.iter)}",
            "an epoch gives its steps, those that are still to be done",
        )
        inside = " " * loop.body[0].col_offset
        top = edits.first_of(loop.body[0])
        edits.insert(top, f"{inside}{epoch} = {steps}.number" + (f" + {offset}" if offset else ""))
        if loops.through_self and facts.function_of(loop) is not facts.function_of(loops.batches):
            edits.insert(top, f"{inside}self.{steps} = {steps}")
        if loops.passed is not None:
            edits.put(loops.passed, steps)
        self._over(self._looped_over())

    def _kept(self) -> None:
        """What the loops remember from step to step, and a replica that joins has not."""
        seen: set[str] = set()
        for loop in (self.loops.batches, self.loops.epochs):
            before = (
                {
                    name
                    for s in ast.walk(self.facts.function_of(loop))
                    if isinstance(s, ast.Assign) and loop is not None and s.lineno < loop.lineno
                    for name in names_in(s, ast.Store)
                }
                if loop is not None
                else set()
            )
            for node in ast.walk(loop) if loop is not None else ():
                name, again = "", False
                if isinstance(node, ast.AugAssign):
                    name, again = ast.unparse(node.target), True
                elif isinstance(node, ast.Assign) and len(node.targets) == 1:
                    name = ast.unparse(node.targets[0])
                    again = name in names_in(node.value)
                if again and name not in seen and (name in before or "." in name):
                    seen.add(name)
                    self.made.say(
                        node,
                        "check",
                        f"{name} is carried from turn to turn",
                        "a replica that joins begins with "
                        "its first value: use step.number where it counts, and protect(state={…}) for what "
                        "decides something",
                    )
                called = node.value if isinstance(node, ast.Expr) and node not in self.made.dropped else None
                given = {ast.unparse(a) for a in called.args} if isinstance(called, ast.Call) else set()
                if given & self.facts.models and "ema" in ast.unparse(node).lower():
                    self.made.say(
                        node,
                        "check",
                        ast.unparse(node),
                        'an average of weights belongs to the state: protect(state={"ema": …})',
                    )
