"""The arguments of `protect`, as text: what the loop's function calls by some name, by its name where protect stands.

What cannot be named there is left to a person.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from outlast.convert._facts import calls_in, names_in
from outlast.convert._loops import Loops

__all__ = ["Arguments"]


_SEED_NO_WEIGHTS = ("random.seed", "numpy.random.seed", "torch.seed", "torch.initial_seed")


def _seeds_torch(called: str) -> bool:
    """Whether a call, by its full name, may seed what weights are drawn from: not a generator's own `manual_seed`, nor
    that of GPUs alone, nor another library's. A function of unknown name and make that speaks of seeds may."""
    if called.rpartition(".")[2].startswith("manual_seed"):
        return called in ("torch.manual_seed", "torch.random.manual_seed", "torch.default_generator.manual_seed")
    return "seed" in called.rpartition(".")[2] and called not in _SEED_NO_WEIGHTS


class Arguments:
    """Finds the arguments of one call of `protect`. `made`: the rewrite of the script; `given`: further arguments, as
    text in the loop's function."""

    def __init__(self, made: Any, loops: Loops, given: Mapping[str, str], optimizer: str, accumulated: str) -> None:
        self.made, self.loops, self.facts, self.edits = made, loops, made.facts, made.edits
        self.given, self.optimizer, self.accumulated = given, optimizer, accumulated

    def text(self, loader: ast.expr, loop: ast.For) -> str:
        """All of them; `loop` is what protect stands before."""
        scope = self.facts.function_of(loop)
        model = self._model(scope, loop)
        optimizer = self._in_scope(self.optimizer, scope, loop, "the optimizer")
        microbatches = str(self.made.processes)
        if self.accumulated:
            microbatches += f" * {self._in_scope(self.accumulated, scope, loop, 'the accumulation')}"
        self.made.say(
            loop,
            "check",
            f"microbatches={microbatches}",
            "a step's batch is so many of the loader's batches: "
            "torchrun's processes, times what was accumulated. At least as many as replicas",
        )
        self._ask_for_a_seed(loop)
        rows = [f"{key}={self._in_scope(value, scope, loop, key)}" for key, value in sorted(self.given.items())]
        loading = f"**of_loader({self.edits.segment(loader)}, microbatches={microbatches})"
        return ", ".join([model, optimizer, loading, *rows])

    def _ask_for_a_seed(self, loop: ast.For) -> None:
        """DDP and torchft give the first process's weights to the others; here each replica builds its own."""
        if not any(_seeds_torch(self.facts.dotted(call.func)) for call in calls_in(self.facts.tree)):
            why = "all replicas begin with the same weights, and none are sent: torch.manual_seed(…) before the model"
            self.made.say(loop, "check", "no seed is set", why)

    def _model(self, scope: Any, loop: ast.For) -> str:
        parameters = [] if isinstance(scope, ast.Module) else [a.arg for a in scope.args.args]
        known = {*names_in(scope), *names_in(scope, ast.Store), *parameters}
        found = sorted(name for name in self.facts.models if name in known or name.startswith("self."))
        if len(found) != 1:
            self._by_hand(
                loop,
                f"{len(found)} models are known here: what DistributedDataParallel was put around, or whose parameters "
                "are asked for",
                "name the model as the first argument of protect()",
            )
        return found[0] if found else "model"

    def _in_scope(self, text: str, scope: Any, loop: ast.For, what: str) -> str:
        """What a name in the loop's function is called where protect() stands."""
        loops, facts = self.loops, self.facts
        if not text:
            self._by_hand(loop, f"{what} was not found", "name it in protect()")
            return "optimizer"
        place = facts.function_of(loops.batches)
        if place is scope or text.startswith("self.") or isinstance(place, ast.Module):
            return text
        for call in facts.calls_of(place):
            given = facts.argument(call, place, text)
            if given is not None:
                return str(self.edits.segment(given))
        if any(a.arg == text for a in place.args.args):
            self._by_hand(loop, f"{text} of {place.name}", "name it in protect()")
        return text

    def _by_hand(self, node: Any, what: str, why: str) -> None:
        self.made.say(node, "by hand", what, why)
