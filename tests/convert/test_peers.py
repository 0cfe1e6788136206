"""Scripts of DLRover, nvidia-resiliency-ext, DeepSpeed and DCP: each of their calls goes, or is named with a remedy."""

from __future__ import annotations

import ast

import pytest
from tests.convert.scripts import IMPORTS, LOOP

from outlast.convert import Conversion, convert


def trained(imports: str, before: str, first: str = "pass", last: str = "pass") -> Conversion:
    return convert(f"{imports}\n{IMPORTS}\n{before}\n{LOOP.format(first=first, last=last)}", processes=2)


def by_hand(found: Conversion) -> dict[str, str]:
    return {remark.what: remark.why for remark in found.remarks if remark.kind == "by hand"}


def removed(found: Conversion) -> set[str]:
    return {remark.what for remark in found.remarks if remark.kind == "removed"}


DLROVER = """
import torch
from dlrover.trainer.torch.elastic.dataloader import ElasticDataLoader
from dlrover.trainer.torch.elastic.sampler import ElasticDistributedSampler
from dlrover.trainer.torch.elastic.trainer import ElasticTrainer
from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer, StorageType
from torch.nn.parallel import DistributedDataParallel as DDP

def train_epoch(model, optimizer, loader, elastic_trainer, checkpointer):
    for x in loader:
        with elastic_trainer.step(True):
            optimizer.zero_grad()
            loss = model(x).sum()
            loss.backward()
            optimizer.step()
            step = elastic_trainer.num_steps
            checkpointer.save_checkpoint(step, {}, storage_type=StorageType.MEMORY)

loader = ElasticDataLoader(data, batch_size=4, sampler=ElasticDistributedSampler(data))
model = DDP(torch.nn.Linear(2, 2))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
checkpointer = DdpCheckpointer("ckpt")
elastic_trainer = ElasticTrainer(model, dataloader=loader)
for epoch in range(3):
    elastic_trainer.reset()
    train_epoch(model, optimizer, loader, elastic_trainer, checkpointer)
"""


def test_dlrover_s_step_is_moved_out_of_its_block_and_the_rest_of_it_is_named() -> None:
    found = convert(DLROVER, processes=2)
    told = by_hand(found)
    assert removed(found) >= {"with elastic_trainer.step(True):", "elastic_trainer.reset"}
    assert "--checkpoint-dir" in told["DdpCheckpointer"]
    assert "--checkpoint-dir" in told["checkpointer.save_checkpoint"]
    assert "DataLoader" in told["ElasticDataLoader"]
    assert told["elastic_trainer.num_steps"].startswith("step.number")
    assert "same microbatches" in told["ElasticTrainer"]
    assert not any("cannot be seen" in why or "process group" in why for why in told.values())
    function = next(n for n in ast.parse(found.after).body if isinstance(n, ast.FunctionDef))
    assert not [n for n in ast.walk(function) if isinstance(n, ast.With)]
    steps = function.body[0]
    assert isinstance(steps, ast.For)
    assert [type(part) for part in steps.body] == [ast.For, ast.Assign, ast.Expr], "what reads no batch is done once"


def test_lines_of_remarks_are_those_of_the_script_where_a_block_is_moved_out() -> None:
    found = convert(DLROVER, processes=2)
    lines = DLROVER.split("\n")
    named = {r.what: r.line for r in found.remarks}
    for what in ("with elastic_trainer.step(True):", "elastic_trainer.num_steps", "checkpointer.save_checkpoint"):
        assert what in lines[named[what] - 1], what


def test_a_script_with_resiliency_s_client_is_never_complete_and_its_sections_go() -> None:
    imports = "import nvidia_resiliency_ext.fault_tolerance as ft"
    found = trained(
        imports,
        "client = ft.RankMonitorClient()\nclient.init_workload_monitoring()",
        "client.start_section('step')",
        "client.end_section('step')",
    )
    assert by_hand(found).keys() == {"ft.RankMonitorClient"}
    assert removed(found) >= {"client.init_workload_monitoring", "client.start_section", "client.end_section"}
    assert "section" not in found.after


def test_the_wrapper_of_a_function_is_named_once_with_all_its_arguments() -> None:
    script = IMPORTS + (
        "import nvidia_resiliency_ext.inprocess as inprocess\n\n"
        "@inprocess.Wrapper(rank_assignment=inprocess.rank_assignment.ActivateAllRanks(),\n"
        "                   health_check=inprocess.health_check.CudaHealthCheck())\n"
        "def main(call_wrapper: inprocess.CallWrapper):\n"
        + LOOP.format(first="call_wrapper.ping()", last="with call_wrapper.atomic():\n            print(1)").replace(
            "\n", "\n    "
        )
    )
    found = convert(script, processes=2)
    assert by_hand(found).keys() == {"inprocess.Wrapper", "inprocess.CallWrapper"}
    assert removed(found) >= {"call_wrapper.ping", "with call_wrapper.atomic():"}
    assert "print(1)" in found.after


def test_what_deepspeed_s_engine_did_is_named_call_by_call() -> None:
    found = convert(
        "import argparse\nimport deepspeed\n\n"
        "parser = deepspeed.add_config_arguments(argparse.ArgumentParser())\nargs = parser.parse_args()\n"
        "deepspeed.init_distributed()\n"
        "engine, _, loader, _ = deepspeed.initialize(args=args, model=net, training_data=data)\n"
        "_, state = engine.load_checkpoint('ckpt')\n"
        "for x in loader:\n    loss = engine(x.to(engine.local_rank))\n    engine.backward(loss)\n    engine.step()\n"
        "engine.save_checkpoint('ckpt')\n",
        processes=2,
    )
    told = by_hand(found)
    assert "protect(model, optimizer, …, scheduler=…, clip_norm=…)" in told["deepspeed.initialize"]
    assert "--checkpoint-dir" in told["engine.load_checkpoint"]
    assert "--checkpoint-dir" in told["engine.save_checkpoint"]
    assert "run.device" in told["engine.local_rank"]
    assert "step.backward" in told["engine.backward(loss)"]
    assert "parser.parse_args" not in told, "the parser is the script's own"
    assert "deepspeed.init_distributed" in removed(found)


def test_what_dcp_saved_is_read_by_init_from_and_record_goes() -> None:
    imports = (
        "import torch.distributed.checkpoint as dcp\n"
        "from torch.distributed.elastic.multiprocessing.errors import record"
    )
    found = trained(imports, "@record\ndef begun():\n    dcp.load({}, checkpoint_id='c')\n\nbegun()")
    told = by_hand(found)
    assert told.keys() == {"dcp.load"}
    assert "--init-from" in told["dcp.load"]
    assert "--format dcp" in told["dcp.load"]
    assert "record" not in found.after
    assert "@record" in removed(found)


def test_torchdata_s_loader_is_one_of_torch_s() -> None:
    script = (IMPORTS + LOOP.format(first="pass", last="pass")).replace(
        "from torch.utils.data import DataLoader",
        "from torch.utils.data import DistributedSampler\nfrom torchdata.stateful_dataloader import StatefulDataLoader",
    )
    script = script.replace(
        "DataLoader(data, batch_size=4, shuffle=True)",
        "StatefulDataLoader(data, batch_size=4, sampler=DistributedSampler(data))",
    )
    found = convert(script, processes=2)
    assert found.complete, by_hand(found)
    assert "StatefulDataLoader(data, batch_size=4, shuffle=True)" in found.after


@pytest.mark.parametrize("method", ["reset", "ping"])
def test_methods_of_the_script_s_own_objects_stay(method: str) -> None:
    found = trained("import mine", f"client = mine.Client()\nclient.{method}()")
    assert f"client.{method}()" in found.after
    assert found.complete, by_hand(found)
