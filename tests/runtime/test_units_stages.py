"""A pipeline's stages: what is made of all of them together, and one schedule's call in the place of a loss."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B
from torch.nn import functional

from outlast.checkpoint import CheckpointEngine as Archive
from outlast.checkpoint._plan import plan
from outlast.checkpoint.state_tensors import OnRank, flatten
from outlast.errors import CheckpointError, ConfigError, LoopUnrepeatable, StepMisuse
from outlast.examples._fingerprint import state_fingerprint
from outlast.runtime.saving._initial_weights import begin_with
from outlast.runtime.settings.rank_limits import check_mean, check_staged
from outlast.runtime.training.evaluation import evaluation_of
from outlast.runtime.training.loop_state import LoopState
from outlast.runtime.training.pipelined import ScheduleCall, check_schedule, stage_of
from outlast.runtime.training.samples import Samples
from outlast.runtime.training.stages import StageParts, Stages, StageTensor
from outlast.runtime.training.state import State
from outlast.tensors import BLOCK, Layout, grid_of

SCRIPT = Path(__file__).with_name("staged.py")


def parts() -> list[State]:
    """Two stages of a model, each with an optimizer that has made a step."""
    torch.manual_seed(0)
    whole = nn.ModuleDict({"up": nn.Linear(5, 300), "down": nn.Linear(300, 400)})
    found = []
    for name in ("up", "down"):
        model = nn.ModuleDict({name: whole[name]})
        optimizer = torch.optim.AdamW(model.parameters())
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
        found.append(State(model, [optimizer], [], {}))
    return found


def staged(states: list[State]) -> list[Stages]:
    stages = [stage_of(state, {"tied": {}, "transient": []}) for state in states]
    for place, state in enumerate(states):
        state.stages = Stages(place, stages)
    return [cast(Stages, state.stages) for state in states]


def test_every_stage_describes_the_whole_and_gives_its_own() -> None:
    """To a checkpoint all ranks of all replicas say the same, and each byte is written once by who has it."""
    states = parts()
    staged(states)
    flats = [flatten(state.tree(spread=True), writer_of=lambda rank: (rank, rank + 2)) for state in states]
    assert flats[0].schema.digest == flats[1].schema.digest
    assert flats[0].specs == flats[1].specs
    names = {spec.name for spec in flats[0].specs}
    assert {"model.up.weight", "model.down.bias", "optimizers.0.state.down.weight.exp_avg"} <= names
    assert plan(flats[0].specs, flats[0].shards, 4) == plan(flats[1].specs, flats[1].shards, 4)
    written = [piece.tensor for layout in plan(flats[0].specs, flats[0].shards, 4) for piece in layout.pieces]
    assert set(written) == set(range(len(flats[0].specs)))
    for place, flat in enumerate(flats):
        for spec, shards, local in zip(flat.specs, flat.shards, flat.local, strict=True):
            if spec.name.startswith("extra."):
                continue
            mine = "up." in spec.name if place == 0 else "down." in spec.name
            assert bool(local) is mine, spec.name
            assert shards is not None
            assert shards[0].owners == ((0, 2) if "up." in spec.name else (1, 3))


def test_a_stage_takes_its_own_of_the_whole() -> None:
    states = parts()
    staged(states)
    tree = parts()[0].tree()
    other = parts()[1].tree()
    tree["model"] |= other["model"]
    tree["optimizers"][0]["state"] |= other["optimizers"][0]["state"]
    before = states[0].tree()["model"]["up.weight"].clone()
    with torch.no_grad():
        states[0].params[0].zero_()
    states[0].take_over(tree)
    assert torch.equal(states[0].tree()["model"]["up.weight"], before)
    assert len(states[0].optimizers[0].state) == 2


def test_blocks_are_numbered_as_in_the_whole() -> None:
    states = parts()
    stages = staged(states)
    whole = grid_of([tuple(p.shape) for state in states for p in state.params], 0, 1, BLOCK)
    assert [each.grid(BLOCK).num_blocks for each in stages] == [whole.num_blocks] * 2
    assert (*stages[0].grid(BLOCK).cells, *stages[1].grid(BLOCK).cells) == whole.cells
    blocks = [
        first + i
        for state, each in zip(states, stages, strict=True)
        for bucket in Layout(state.params, grid=each.grid(BLOCK)).buckets
        for lo, hi, first in bucket.runs
        for i in range(-(-(hi - lo) // BLOCK))
    ]
    assert sorted(blocks) == list(range(whole.num_blocks))
    assert stages[1].first == 2
    assert stages[0].schema == stages[1].schema


def stage(*names: str, groups: tuple[int, ...] = (1,), registered: str = "", buffer: bool = False) -> StageParts:
    held = tuple(StageTensor(name, (2,), "float32", buffer, None if buffer else (0, 0)) for name in names)
    return StageParts(held, names, groups, registered, {"tied": {}, "transient": []})


@pytest.mark.parametrize(
    ("stages", "says"),
    [
        ([stage("a"), stage("a")], "two stages of the pipeline have a tensor a"),
        ([stage("a"), stage("b", groups=(2,))], "groups on rank 1 are not those of rank 0"),
        ([stage("a"), stage("b", registered="x torch.float32[3]")], "not the same shape on every stage"),
        ([StageParts((), ("a",), (1,), "", {})], "a parameter that is not in the model of its stage"),
    ],
)
def test_stages_that_make_no_model_are_refused(stages: list[StageParts], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Stages(0, stages)


def test_a_constant_may_be_in_several_stages() -> None:
    both = [stage("a").held + stage("scale", buffer=True).held, stage("b").held + stage("scale", buffer=True).held]
    found = Stages(1, [StageParts(held, (held[0].name,), (1,), "", {"tied": {}, "transient": []}) for held in both])
    assert found.elsewhere == {"a"}


def test_an_optimizer_that_keeps_other_shapes_is_refused() -> None:
    states = parts()
    staged(states)
    states[0].optimizers[0].state[states[0].params[0]]["rows"] = torch.zeros(5)
    with pytest.raises(ConfigError, match=r"keeps rows of up\.weight in another shape"):
        states[0].tree(spread=True)


def test_what_a_pipeline_cannot_have_is_refused() -> None:
    nothing = {"scaler": False, "audits": False, "certified": False}
    check_staged([8, 8], 8, **nothing)
    check_mean(True)
    with pytest.raises(ConfigError, match="drop_last=True"):
        check_staged([8, 7], 8, **nothing)
    for key, says in (("scaler", "a gradient scaler"), ("audits", "audits"), ("certified", "certify states")):
        with pytest.raises(ConfigError, match=says):
            check_staged([8, 8], 8, **(nothing | {key: True}))
    with pytest.raises(ConfigError, match="robust rules"):
        check_mean(False)


class Schedule:
    """Makes gradients for all but the last parameter."""

    def __init__(self, state: State) -> None:
        self.state = state

    def step(self, x: Tensor, *, target: Any, losses: list[Tensor]) -> None:
        for param in self.state.params[:-1]:
            param.grad = torch.zeros_like(param)
        losses.append(x.sum())


def test_a_parameter_without_a_gradient_is_named() -> None:
    state = parts()[0]
    for param in state.params:
        param.grad = None
    call = ScheduleCall(state, contextlib.nullcontext, Schedule(state), [torch.ones(2)], {}, None)
    with pytest.raises(StepMisuse, match=r"up\.bias was given no gradient by the schedule"):
        call.backward()


class Drawing:
    """Draws as dropout does, and gives each parameter a gradient."""

    def __init__(self, state: State) -> None:
        self.state, self.drawn = state, torch.empty(0)

    def step(self, **_: Any) -> None:
        self.drawn = torch.rand(4)
        for param in self.state.params:
            param.grad = torch.zeros_like(param)


def test_stages_draw_apart_and_each_the_same_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "broadcast", lambda loss, rank: loss.fill_(2.5))
    states = parts()
    stages = staged(states)
    drawn = []
    for place in (0, 1, 0, 1):
        state = states[place]
        schedule = Drawing(state)
        stages[place].last = 2  # whoever is last has a loss of its own
        torch.manual_seed(5)
        call = ScheduleCall(state, contextlib.nullcontext, schedule, [], {}, None)
        call.backward()
        assert float(call.detach()) == 2.5
        drawn.append(schedule.drawn.tolist())
    assert drawn[:2] == drawn[2:]
    assert drawn[0] != drawn[1]


def test_schedules_that_do_not_fit_are_named() -> None:
    state = parts()[0]
    with pytest.raises(StepMisuse, match="was given a int"):
        check_schedule(state, 3, 2)
    made = object.__new__(ScheduleInterleaved1F1B)
    with pytest.raises(StepMisuse, match="was given a ScheduleInterleaved1F1B"):
        check_schedule(state, made, 2)


def test_what_changes_for_a_part_of_the_model_is_told() -> None:
    states = parts()
    staged(states)
    loop = LoopState(states[0])
    settings = loop.read()
    assert settings == LoopState(states[1]).read(), "ranks compare it"
    loop.write(settings)
    states[0].model.eval()
    loop.write(settings)
    assert states[0].model["up"].training  # type: ignore[index]
    states[0].params[0].requires_grad_(False)
    with pytest.raises(LoopUnrepeatable, match="require a gradient and others do not"):
        loop.read()


def test_an_evaluation_is_refused() -> None:
    states = parts()
    staged(states)
    samples = Samples(list(range(32)), global_batch_size=4, microbatches=4, seed=1)
    with pytest.raises(ConfigError, match="cannot be had with a pipeline"):
        evaluation_of(states[0], samples, [1.0], lambda batch: {}, None, None)


def test_weights_to_begin_with_may_hold_those_of_other_stages(tmp_path: Path) -> None:
    states = parts()
    staged(states)
    archive = Archive(str(tmp_path))
    tree = {"model": {**states[0].tree()["model"], **states[1].tree()["model"]}}
    archive.prepare(tree)
    handle = archive.save(1, tree)
    assert handle is not None
    archive.commit(handle)
    archive.close()
    model = states[1].model
    before = states[1].params[0].detach().clone()
    with torch.no_grad():
        states[1].params[0].zero_()
    with pytest.raises(CheckpointError, match=r"not wanted by the model: up\.weight"):
        begin_with(str(tmp_path), model, strict=True, timeout_s=30)
    begin_with(str(tmp_path), model, strict=True, timeout_s=30, elsewhere=states[1].elsewhere)
    assert torch.equal(states[1].params[0], before)


def test_stages_that_are_left_out_of_have_others_in_their_places() -> None:
    """Torch's stages take batches of one size."""
    fewer, samples = (
        Samples(list(range(32)), global_batch_size=8, microbatches=2, seed=1, shuffle=False) for _ in range(2)
    )
    samples.whole = True
    for each in (fewer, samples):
        each.leave_out([1, 6])
    assert (fewer.sizes(0), fewer.indices(0, 0)) == ([3, 3], [0, 2, 3])
    assert samples.sizes(0) == [4, 4]
    assert samples.indices(0, 0)[::2] == [0, 2]
    assert samples.indices(0, 0)[1] not in (1, 6)


def test_one_on_a_rank_is_no_tensor_of_another() -> None:
    there = OnRank(1, (3,), torch.float32, None)
    here = OnRank(0, (3,), torch.float32, torch.arange(3.0))
    flat = flatten({"a": there, "b": here})
    assert [local != [] for local in flat.local] == [False, True]


def by_hand(steps: int) -> str:
    """The same model in a loop of its own: the schedule's microbatches one after the other, leaves in the tree's
    order."""
    sys.path.insert(0, str(SCRIPT.parent))
    try:
        from staged import Layers, data
    finally:
        sys.path.pop(0)
    torch.manual_seed(3)
    model = Layers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
    samples = data()
    for number in range(steps):
        start, leaves = number % 2 * 32, []
        for leaf in range(4):
            batch = samples[start + leaf * 8 : start + leaf * 8 + 8]
            inputs, targets = torch.stack([x for x, _ in batch]), torch.stack([y for _, y in batch])
            for x, y in zip(inputs.chunk(4), targets.chunk(4), strict=True):
                functional.cross_entropy(model(x), y).backward()
            leaves.append([cast(Tensor, p.grad) / 4 for p in model.parameters()])
            model.zero_grad()
        for param, a, b, c, d in zip(model.parameters(), *leaves, strict=True):
            param.grad = ((a + b) + (c + d)) * (1 / 4)
        optimizer.step()
        scheduler.step()
        model.zero_grad()
    return state_fingerprint(model, optimizer)


def alone(out: Path, **environ: str) -> dict[str, Any]:
    """By one process, which has the whole model as its one stage."""
    out.mkdir()
    how = json.dumps({"shuffle": False})
    words = ["--stages", "1", "--kind", "1f1b", "--steps", "5", "--out", str(out), "--how", how]
    subprocess.run([sys.executable, SCRIPT, *words], check=True, timeout=100, env=os.environ | environ)
    (file,) = out.glob("*.json")
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def test_one_process_has_the_bits_of_a_loop_by_hand(tmp_path: Path) -> None:
    """Stages do not show in them: `test_ranks_pipeline.py`. The plain loop adds microbatches up one after the other."""
    found, plain = alone(tmp_path / "on"), alone(tmp_path / "off", OUTLAST="off")
    assert list(plain["losses"].values()) == pytest.approx(list(found["losses"].values()), rel=1e-4)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    want = by_hand(5)
    torch.set_num_threads(threads)
    assert found["fingerprint"] == want
