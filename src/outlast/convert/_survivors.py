"""What of processes is still in the converted text: whatever is left over is said, by line, and nothing is complete.

Walks the result, not the list of what was rewritten: a habit that nobody thought of is found as well.
"""

from __future__ import annotations

import ast
import builtins
import difflib
import re
from typing import Any

from outlast.convert._facts import LOADERS, Facts, pairs_of
from outlast.convert._peers import followed, remedy_of

__all__ = ["say_survivors"]

_NO_GROUP = (
    "there is no process group, and torchrun's variables are not set: outlast starts the processes. Who writes is "
    "run.is_writer; share nothing out by ranks, for they come and go"
)
_TORCHFT = (
    "goes with torchft: outlast.join() and protect() take its place. The manager's current_step() is step.number, its "
    "num_participants() run.size, what it was told to save and load is protect()'s (docs: coming from torchft)"
)
_VARIABLES = re.compile(
    r"(LOCAL_|GROUP_|NODE_|ROLE_|GLOBAL_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|SLURM_.*|OMPI_.*|REPLICA_GROUP_ID"
    r"|NUM_REPLICA_GROUPS|TORCHFT_.*"
)
_RANKS = re.compile(
    r"(ddp_|global_|local_|node_|my_|dist_)?(rank|world_size)|gpu|gpus|gpu_id|world|nprocs|n_gpus?|ngpus_per_node|distributed"
)
_PROCESSES = ("Process", "spawn", "start_processes")
_HELPERS = re.compile(
    r".*(main_process|on_master|is_master|master_only|rank_zero|world_size|get_rank|local_rank|distributed|ddp"
    r"|dist_avail|reduce_(dict|tensor|mean|value|loss)|all_reduce|all_gather|sync_?batch_?norm|comm_hook|no_sync).*",
    re.IGNORECASE,
)
_PRINTS = ("print", "debug", "info", "warning", "write")


def say_survivors(made: Any, after: str) -> None:
    """Say `by hand` for each. `made`: the rewrite; `after`: the text that came of it."""
    try:
        facts = Facts(after, made.facts.aliases)
    except SyntaxError:
        return
    lines = _origins(made.source, after)
    said = {(r.line, r.kind) for r in made.remarks}
    unbound = _unbound(facts) - _unbound(made.facts)
    device = f"{made.names['run']}.device"
    pairs = [pair for node in ast.walk(facts.tree) if isinstance(node, ast.Assign) for pair in pairs_of(node)]
    devices = {ast.unparse(target) for target, value in pairs if ast.unparse(value) == device}
    for node in ast.walk(facts.tree):
        why = _doubt(made, facts, node, unbound, devices)
        line = lines[node.lineno - 1] if why else 0  # type: ignore[attr-defined]
        if why and (line, "by hand") not in said:
            said.add((line, "by hand"))
            made.say(line, "by hand", ast.unparse(node).splitlines()[0], why)


def _origins(before: str, after: str) -> list[int]:
    """The line of the script as it was for each line of the result."""
    was, now = ([line.strip() for line in text.split("\n")] for text in (before, after))
    found = [0] * len(now)
    for tag, first, last, start, end in difflib.SequenceMatcher(None, was, now, autojunk=False).get_opcodes():
        for i in range(start, end):
            found[i] = first + 1 + (i - start if tag == "equal" else min(i - start, max(0, last - first - 1)))
    return found


def _doubt(made: Any, facts: Facts, node: ast.AST, unbound: set[str], devices: set[str]) -> str:
    """Why this cannot stand so; "" if it can. `devices`: names of the replica's device, a rank's among them."""
    if isinstance(node, ast.Constant):
        outer = facts.parents.get(node)
        stored = isinstance(outer, ast.Subscript) and isinstance(outer.ctx, ast.Store)
        return _NO_GROUP if isinstance(node.value, str) and _VARIABLES.fullmatch(node.value) and not stored else ""
    if isinstance(node, ast.keyword):
        loads = node.arg in ("worker_init_fn", "generator", "batch_sampler")
        loads = loads and facts.is_call(facts.parents[node], *LOADERS)
        return f"outlast draws the batches, and {node.arg} is not asked" if loads else ""
    if not (isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load)):
        return ""
    full = facts.dotted(node)
    last = full.rpartition(".")[2] or (node.attr if isinstance(node, ast.Attribute) else "")
    owner = ast.unparse(node.value) if isinstance(node, ast.Attribute) else ""
    if owner == made.names["run"]:
        return ""
    if full.startswith("torchft.") or full in made.facts.managers:
        return "" if isinstance(facts.parents[node], ast.Attribute) and full.startswith("torchft.") else _TORCHFT
    if of_theirs := remedy_of(facts, followed(made.facts), node):
        return of_theirs
    if full.startswith("torch.distributed"):
        return "" if isinstance(facts.parents[node], ast.Attribute) else _NO_GROUP
    if last in _PROCESSES and "multiprocessing" in full:
        return "each replica would start processes of its own: outlast run starts them"
    if last in ("SyncBatchNorm", "convert_sync_batchnorm"):
        return "without a process group this is plain batch normalization, of one microbatch"
    if last == "sampler" and owner:
        return "the loader has all samples now, and no sampler of one process"
    if last == "join" and owner in made.facts.models:
        return _NO_GROUP
    if isinstance(node, ast.Name) and node.id in unbound:
        return "what gave it its value was left out: it has none now"
    kind = made.facts.kinds.get(ast.unparse(node), "")
    if kind == "local" or (ast.unparse(node) in devices and _RANKS.fullmatch(last)):
        return "" if _as_device(facts, node) else "it is run.device now, and no number"
    if kind or _RANKS.fullmatch(last):
        return _NO_GROUP
    called = isinstance(facts.parents[node], ast.Call) and facts.parents[node].func is node  # type: ignore[attr-defined]
    if _HELPERS.fullmatch(last) and (called or last in full.split(".")) and not _own(facts, last):
        return f"what it does cannot be seen from here. {_NO_GROUP}"
    return ""


def _own(facts: Facts, name: str) -> bool:
    """Whether the script itself says what it is."""
    nodes = list(ast.walk(facts.tree))
    return any(isinstance(n, ast.FunctionDef | ast.ClassDef) and n.name == name for n in nodes) or any(
        isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store) and n.id == name for n in nodes
    )


def _as_device(facts: Facts, node: ast.AST) -> bool:
    """Whether a device can stand where the number of one stood."""
    outer = facts.parents[node]
    if isinstance(outer, ast.keyword):
        return outer.arg in ("device", "map_location")
    if isinstance(outer, ast.Call) and node in outer.args:
        moved = isinstance(outer.func, ast.Attribute) and outer.func.attr in ("to", "cuda")
        return moved or (facts.dotted(outer.func) == "torch.device" and len(outer.args) == 1)
    shown = isinstance(outer, ast.FormattedValue) and "cuda:" not in ast.unparse(facts.parents[outer])
    return shown and facts.is_call(facts.parents.get(facts.parents[outer]), *_PRINTS)


def _unbound(facts: Facts) -> set[str]:
    """Names that are read where nothing gives them a value."""
    scopes = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef, ast.Module)
    bound: dict[ast.AST, set[str]] = {n: set() for n in ast.walk(facts.tree) if isinstance(n, scopes)}
    for node in ast.walk(facts.tree):
        holder = facts.tree if node is facts.tree else next(o for o in facts.within(node) if o in bound)
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            bound[holder].add(node.id)
        elif isinstance(node, ast.arg):
            bound[holder].add(node.arg)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound[holder].add(node.name)
        elif isinstance(node, ast.alias):
            bound[holder].add((node.asname or node.name).split(".")[0])
        elif isinstance(node, ast.ExceptHandler) and node.name:
            bound[holder].add(node.name)
    return {
        node.id
        for node in ast.walk(facts.tree)
        if isinstance(node, ast.Name)
        and isinstance(node.ctx, ast.Load)
        and not hasattr(builtins, node.id)
        and not any(node.id in bound.get(outer, ()) for outer in facts.within(node))
    }
