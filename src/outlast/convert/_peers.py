"""What a script has of DLRover, nvidia-resiliency-ext, DeepSpeed, DCP and torch elastic, with what takes its place.

What their libraries made is followed by name: through assignments, annotations and calls of the script's own functions.
Only calls that do nothing for outlast's loop are taken out; the rest is told to a person.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from outlast.convert._edits import quoted_lines
from outlast.convert._facts import Facts

__all__ = ["flattened", "followed", "leave_calls_out", "remedy_of"]

_SAVES = "goes: outlast run --checkpoint-dir DIR saves beside training, and resumes when it is started again"
_ENGINE = (
    "goes: make the optimizer and the scheduler that its JSON names, and a DataLoader of "
    "train_micro_batch_size_per_gpu; then protect(model, optimizer, …, scheduler=…, clip_norm=…)"
)
_DCP = (
    "goes: outlast run --checkpoint-dir DIR saves beside training and resumes. Weights of a checkpoint of DCP that is "
    "there begin a run by outlast ckpt import DIR NEW and --init-from NEW; outlast ckpt export --format dcp writes one"
)
_ELASTIC = "goes: what a replica raised is in its log, and in outlast why"
_PEERS: dict[str, tuple[str, dict[str, str]]] = {  # by module: the page, and what takes the place of what
    "dlrover": ("coming from DLRover", {
        "ElasticTrainer": "goes: a step has the same microbatches, however many replicas there are",
        "prepare": "goes: protect() is given the optimizer, and steps the scheduler that is given by scheduler=…",
        "num_steps": "step.number, behind the loop over the step's batches",
        "ElasticDistributedSampler": "goes: which samples a step has follows from its number",
        "ElasticDataLoader": "torch's DataLoader in its place, with shuffle=… and no sampler",
    }),
    "nvidia_resiliency_ext": ("coming from nvidia-resiliency-ext", {
        "Wrapper": "goes with its arguments: the others finish the step, and nothing is called again",
        "CallWrapper": "goes: nothing is called again",
        "disable_hang_protection": "outlast.pause(seconds) between two steps",
        "Detector": "goes: outlast why and the page tell who is slow, and in what part of a step",
        "RankMonitorClient": "goes: the time that a step may take is learned",
    }),
    "deepspeed": ("coming from DeepSpeed", {
        "initialize": _ENGINE,
        "add_config_arguments": "goes: what the JSON said is said to protect()",
        "get_accelerator": "run.device is the device of this replica",
        "device": "run.device", "local_rank": "run.device is the device of this replica, and no number",
        "backward": "step.backward(loss), once in each turn of `for batch in step`",
        "step": "goes: outlast takes the step when the loop over the step's batches ends",
        "train_batch": "step.pipeline(schedule, inputs, target=…), with torch's PipelineStage",
    }),
    "torch.distributed.checkpoint": ("coming from DDP", {}),
    "torch.distributed.elastic": ("coming from DDP", {}),
}  # fmt: skip
_OTHERWISE = {"torch.distributed.checkpoint": _DCP, "torch.distributed.elastic": _ELASTIC}
_NOTHING = (
    "reset", "ping", "start_section", "end_section", "end_all_sections", "init_workload_monitoring", "send_heartbeat",
    "shutdown_workload_monitoring", "calculate_and_set_section_timeouts", "calculate_and_set_hb_timeouts",
)  # fmt: skip
_BLOCKS = ("step", "atomic")


def remedy_of(facts: Facts, made_by: Mapping[str, str], node: ast.Name | ast.Attribute) -> str:
    """What to do about a name of theirs, or an attribute of something that they made; "" for any other. `made_by`: as
    `followed` has it."""
    full = facts.dotted(node)
    peer = _peer(full)
    if peer and isinstance(facts.parents[node], ast.Attribute):
        return ""  # the whole name is told
    if not peer and isinstance(node, ast.Attribute):
        peer = made_by.get(ast.unparse(node.value), "")
    if not peer or _in_theirs(facts, node):
        return ""
    page, known = _PEERS[peer]
    last = full.rpartition(".")[2]
    saves = "heckpoint" in last or last in ("StorageType", "AsyncCallsQueue", "CheckpointManager")
    why = known.get(last) or _OTHERWISE.get(peer) or (_SAVES if saves else "goes")
    return f"{why} (docs: {page})"


def followed(facts: Facts) -> dict[str, str]:
    """What their libraries made, as text, by the module that it is of."""
    found: dict[str, str] = {}
    for node in ast.walk(facts.tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            first = node.targets[0].elts[0] if isinstance(node.targets[0], ast.Tuple) else node.targets[0]
            if not facts.dotted(node.value.func).endswith(("Loader", "Sampler", "add_config_arguments")):
                found |= _made(first, _peer(facts.dotted(node.value.func)))
        elif isinstance(node, ast.arg) and node.annotation is not None:
            named = next((_peer(facts.dotted(n)) for n in ast.walk(node.annotation) if _peer(facts.dotted(n))), "")
            found |= {node.arg: named} if named else {}
    for function in ast.walk(facts.tree):
        if isinstance(function, ast.FunctionDef):
            for call in facts.calls_of(function):
                for name in (a.arg for a in function.args.args):
                    given = facts.argument(call, function, name)
                    if given is not None and ast.unparse(given) in found:
                        found[name] = found[ast.unparse(given)]
    return found


def _made(target: ast.expr, peer: str) -> dict[str, str]:
    plain = isinstance(target, ast.Name | ast.Attribute) and ast.unparse(target) != "_"
    return {ast.unparse(target): peer} if peer and plain else {}


def _peer(full: str) -> str:
    return next((name for name in _PEERS if full == name or full.startswith(name + ".")), "")


def _in_theirs(facts: Facts, node: ast.AST) -> bool:
    """Whether it is an argument of a call of theirs, which is told already."""
    return any(
        isinstance(outer, ast.Call) and _peer(facts.dotted(outer.func)) and node not in ast.walk(outer.func)
        for outer in facts.within(node)
    )


def leave_calls_out(made: Any) -> None:
    """Take out calls that have nothing to do in outlast's loop, and torch elastic's `@record`. `made`: the rewrite."""
    facts: Facts = made.facts
    made_by = followed(facts)
    for node in ast.walk(facts.tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(facts.parents[node], ast.Expr)
            and _does_nothing(facts, made_by, node)
        ):
            made.drop(node, ast.unparse(node.func), "nothing takes its place")
        for decorator in node.decorator_list if isinstance(node, ast.FunctionDef) else ():
            if facts.dotted(decorator) == "torch.distributed.elastic.multiprocessing.errors.record":
                made.edits.drop(decorator)
                made.say(decorator, "removed", "@record", _ELASTIC)


def _does_nothing(facts: Facts, made_by: Mapping[str, str], call: ast.Call) -> bool:
    if isinstance(call.func, ast.Attribute) and ast.unparse(call.func.value) in made_by:
        return call.func.attr in _NOTHING
    return facts.dotted(call.func) == "deepspeed.init_distributed"


def flattened(source: str, facts: Facts) -> tuple[str, list[ast.With]]:
    """The text in which what stands in `with elastic_trainer.step():` and `with call_wrapper.atomic():` is moved out,
    the heads empty lines; and these blocks."""
    made_by = followed(facts)
    found = [n for n in ast.walk(facts.tree) if isinstance(n, ast.With) and _is_block(made_by, n)]
    lines, quoted = source.splitlines(keepends=True), quoted_lines(facts.tree)
    for block in found:
        by = block.body[0].col_offset - block.col_offset
        for line in range(block.lineno, (block.end_lineno or 0) + 1):
            if line < block.body[0].lineno and line <= (block.items[0].context_expr.end_lineno or 0):
                lines[line - 1] = "\n"
            elif line not in quoted and lines[line - 1][:by].strip() == "":
                lines[line - 1] = lines[line - 1][by:] or "\n"
    return "".join(lines), found


def _is_block(made_by: Mapping[str, str], block: ast.With) -> bool:
    call = block.items[0].context_expr
    if len(block.items) > 1 or block.items[0].optional_vars or not isinstance(call, ast.Call):
        return False
    method = call.func
    theirs = isinstance(method, ast.Attribute) and method.attr in _BLOCKS and ast.unparse(method.value) in made_by
    return theirs and block.body[0].lineno > (call.end_lineno or 0)
