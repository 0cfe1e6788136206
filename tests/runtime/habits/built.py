"""Small trainings of what people build: models, optimizers, data and loops: `python built.py NAME --out DIR`.

As in `loop.py`, each is a function of a `Bench`. What is compared at the end besides has all buffers in it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from loop import Bench, digest, main  # beside this file
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Subset, WeightedRandomSampler, random_split


def _adamw(bench: Bench, **given: Any) -> None:
    bench.optimizer = torch.optim.AdamW((p for p in bench.model.parameters() if p.requires_grad), lr=0.01, **given)


class Block(nn.Module):
    """Attention and a wide layer, both with dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.wide = nn.LayerNorm(width), nn.Sequential(nn.Linear(width, 2 * width), nn.GELU())
        self.mix, self.back, self.drop = nn.Linear(width, 3 * width), nn.Linear(2 * width, width), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.mix(self.norm(x)).chunk(3, dim=-1))
        seen = functional.scaled_dot_product_attention(q, k, v, dropout_p=0.1 if self.training else 0.0, is_causal=True)
        x = x + self.drop(seen.transpose(1, 2).flatten(2))
        return x + self.drop(self.back(self.wide(x)))


class Tiny(nn.Module):
    """Tokens of shape (batch, time) to their logits, by a table that is tied with the output. `kept`: checkpointed."""

    def __init__(self, kept: bool) -> None:
        super().__init__()
        self.table, self.blocks, self.kept = nn.Embedding(32, 16), nn.ModuleList([Block(16), Block(16)]), kept
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.kept else block(x)
        return self.head(x)


def gpt(bench: Bench, *, kept: bool = False) -> None:
    """Dropout, SDPA, tied weights, groups with and without decay, clipping, a LambdaLR."""
    model = bench.model = Tiny(kept)
    groups: list[list[nn.Parameter]] = [[], []]
    for param in model.parameters():
        groups[param.ndim >= 2].append(param)
    bench.optimizer = torch.optim.AdamW(
        [{"params": group, "weight_decay": 0.1 * n} for n, group in enumerate(groups)], lr=0.01
    )
    rates = torch.optim.lr_scheduler.LambdaLR(bench.optimizer, lambda n: min(1.0, (n + 1) / 10))
    bench.options |= {"scheduler": rates, "clip_norm": 0.5}
    bench.dataset = list(torch.randint(0, 32, (256, 9)))
    bench.loss = lambda batch: functional.cross_entropy(
        bench.model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()
    )
    bench.compared["rates"] = rates.get_last_lr


def gpt_in_bfloat16(bench: Bench) -> None:
    """The same under autocast, each block checkpointed."""
    gpt(bench, kept=True)
    loss = bench.loss

    def cast(batch: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss(batch)

    bench.loss = cast


def compiled(bench: Bench) -> None:
    """`torch.compile` of a function, of a module in place, and of a whole one, under autocast; without Inductor, which
    takes half a minute in each process."""
    gpt_in_bfloat16(bench)
    first, second = Block(16), Block(16)
    first.compile(backend="aot_eager")
    bench.model.blocks = nn.ModuleList([first, torch.compile(second, backend="aot_eager")])  # type: ignore[list-item]
    bench.model.kept = False  # type: ignore[assignment]
    _adamw(bench)
    bench.options.pop("scheduler"), bench.compared.pop("rates")
    inner = bench.loss
    scale = torch.compile(lambda loss: 2 * loss.float() + loss.float().square(), backend="aot_eager")
    bench.loss = lambda batch: scale(inner(batch))


class DropPath(nn.Module):
    """As of timm: a branch is left out for whole samples."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        return x * x.new_empty((x.shape[0], 1, 1, 1)).bernoulli_(0.8).div_(0.8)


class Net(nn.Module):
    """A residual block of images, and a buffer that counts its calls."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.conv = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, padding=1)
        self.first, self.second, self.drop = nn.BatchNorm2d(8), nn.BatchNorm2d(8), DropPath()
        self.head = nn.Linear(8, 4)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        x = self.first(self.stem(x)).relu()
        return self.head((x + self.drop(self.second(self.conv(x)))).relu().mean((2, 3)))


class Augmented(torch.utils.data.Dataset[Any]):
    """Images that are turned by torch's numbers and made darker by numpy's."""

    def __init__(self) -> None:
        self.images, self.labels = torch.randn(128, 3, 8, 8), torch.randint(0, 4, (128,))

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Any:
        image = self.images[index].flip(2) if torch.rand(()) < 0.5 else self.images[index]
        return image * np.float32(np.random.uniform(0.5, 1.0)), self.labels[index]


def images(bench: Bench) -> None:
    """BatchNorm, drop path, a buffer that is counted in forward, random augmentation in two workers."""
    bench.model, bench.dataset, bench.options["num_workers"] = Net(), Augmented(), 2
    bench.optimizer = torch.optim.SGD(bench.model.parameters(), lr=0.05, momentum=0.9, nesterov=True)


def images_converted(bench: Bench) -> None:
    """SyncBatchNorm, as of a script for several GPUs, and channels last."""
    images(bench)
    model = nn.SyncBatchNorm.convert_sync_batchnorm(Net()).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    bench.model, bench.options["num_workers"] = model, 0
    bench.optimizer = torch.optim.SGD(bench.model.parameters(), lr=0.05, momentum=0.9)
    loss = bench.loss
    bench.loss = lambda batch: loss((batch[0].to(memory_format=torch.channels_last), batch[1]))


class Lion(torch.optim.Optimizer):
    """An optimizer of one's own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.003})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    mean = self.state[param].setdefault("mean", torch.zeros_like(param))
                    param.sub_(torch.lerp(param.grad, mean, 0.9).sign_(), alpha=group["lr"])
                    mean.lerp_(param.grad, 0.01)


def optimizers(bench: Bench) -> None:
    """Muon, AdamW fused and foreach, and one of one's own: each has a layer."""
    layers = [nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4)]
    bench.model = nn.Sequential(*(part for layer in layers for part in (nn.ReLU(), layer)))
    bench.optimizer = [
        torch.optim.AdamW(layers[0].parameters(), lr=0.01, fused=True),
        torch.optim.Muon([layers[1].weight], lr=0.01),
        torch.optim.AdamW([*layers[2].parameters(), layers[1].bias], lr=0.01, foreach=True),
        Lion(layers[3].parameters()),
    ]


class Low(nn.Module):
    """A frozen layer and what is learned beside it, of rank 2."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.drop = base.requires_grad_(False), nn.Dropout(0.1)
        self.down = nn.Parameter(torch.randn(2, base.in_features) / 4)
        self.up = nn.Parameter(torch.zeros(base.out_features, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.drop(x) @ self.down.T @ self.up.T


def lora(bench: Bench) -> None:
    """LoRA by hand: frozen parameters, of which the optimizer is told nothing."""
    bench.model = nn.Sequential(Low(nn.Linear(8, 32)), nn.ReLU(), Low(nn.Linear(32, 4)))
    _adamw(bench)


def lora_of_peft(bench: Bench) -> None:
    """LoRA of the library for it."""
    import peft

    told = peft.LoraConfig(r=2, target_modules=["0", "2"], lora_dropout=0.1)
    bench.model = peft.get_peft_model(bench.model, told)
    _adamw(bench)


class Cube(torch.autograd.Function):
    """A function with a derivative of one's own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        return x**3 / 10

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return (grad * 0.3 * x * x).clamp(-1.0, 1.0)


class OfOnesOwn(nn.Module):
    """Uses it; one parameter gets no gradient, one no use."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.unused = nn.Linear(8, 32), nn.Linear(32, 4), nn.Parameter(torch.ones(3))
        self.fixed = nn.Parameter(torch.ones(32))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(Cube.apply(self.first(x)) * self.fixed.detach())  # type: ignore[no-untyped-call]


def functions_and_hooks(bench: Bench) -> None:
    """A Function of one's own, hooks of gradients, of modules and of the optimizer, parameters without gradients."""
    model = bench.model = OfOnesOwn()
    _adamw(bench)
    model.first.weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
    model.last.register_full_backward_hook(lambda module, grads, _: (grads[0] * 0.5,))

    def centre(optimizer: Any, *_: Any) -> None:
        for param in (model.first.weight, model.last.weight):
            param.grad.sub_(param.grad.mean(1, keepdim=True))  # type: ignore[union-attr]

    bench.optimizer.register_step_pre_hook(centre)


def double(bench: Bench, dtype: torch.dtype = torch.float64) -> None:
    """All in float64."""
    bench.model, loss = bench.model.to(dtype), bench.loss
    _adamw(bench)
    bench.loss = lambda batch: loss((batch[0].to(dtype), batch[1]))


def half(bench: Bench) -> None:
    """All in bfloat16."""
    double(bench, torch.bfloat16)


def subset(bench: Bench) -> None:
    """A part of a part of the data."""
    kept, _ = random_split(bench.dataset, [200, 56], torch.Generator().manual_seed(2))
    bench.dataset = Subset(kept, range(3, 200, 2))


def sampled(bench: Bench) -> None:
    """A sampler of torch's, with weights."""
    bench.options["sampler"] = WeightedRandomSampler([1.0 + n % 3 for n in range(256)], 256)


class Words(nn.Module):
    """A table with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(16, 8, sparse=True), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.table((x[:, 0] * 3).long() % 16))


def sparse_and_skipped(bench: Bench) -> None:
    """Sparse gradients; batches that the loop leaves out by a loss of zero."""
    bench.model, loss = Words(), bench.loss
    _adamw(bench)
    bench.loss = lambda batch: loss(batch) * (0 if batch[1][0] == 0 else 1)


def epochs(bench: Bench) -> None:
    """A loop of epochs around the loop of steps, with a rate that is set at the start of each."""
    bench.dataset = bench.dataset[:96]

    def iterate(training: Any, steps: int) -> Iterator[Any]:
        for epoch in training.epochs(steps // 6):
            bench.rate(0.01 / (1 + epoch.number))
            yield from epoch

    bench.iterate = iterate


def in_a_bar(bench: Bench) -> None:
    """The iterator is kept in a variable, and within another one, as of a progress bar."""

    kept: list[Any] = []

    def bar(steps: Any) -> Iterator[Any]:
        yield from steps

    def iterate(training: Any, steps: int) -> Iterator[Any]:
        kept.append(training.steps(until=steps))
        kept.append(bar(kept[0]))
        return iter(kept[1])

    bench.iterate = iterate


def language(bench: Bench) -> None:
    """A Llama of transformers from its config, and their collator, which pads."""
    from tokenizers import Tokenizer, models
    from transformers import DataCollatorForLanguageModeling, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = {"[PAD]": 0, **{f"w{n}": n for n in range(1, 32)}}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, "[PAD]")), pad_token="[PAD]"
    )  # fmt: skip
    bench.model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, attention_dropout=0.1,
        )
    )  # fmt: skip
    _adamw(bench)
    rows = torch.randint(1, 32, (128, 12)).tolist()
    bench.dataset = [{"input_ids": row[: 6 + n % 7]} for n, row in enumerate(rows)]
    bench.options["collate_fn"] = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    bench.loss = lambda batch: bench.model(**batch).loss


def under_hydra(bench: Bench) -> None:
    """The script is a job of hydra, which gives each process a directory of its own."""
    assert Path.cwd().name == str(os.getpid())


def reentrant(bench: Bench) -> None:
    """The older kind of checkpointing, of a layer that is used twice."""
    shared = nn.Linear(8, 8)
    bench.model = nn.ModuleDict({"shared": shared, "head": nn.Linear(8, 4)})
    _adamw(bench)

    def loss(batch: Any) -> Tensor:
        x = batch[0].requires_grad_()
        for _ in range(2):
            x = checkpoint(shared, x, use_reentrant=True)
        return functional.cross_entropy(bench.model["head"](x), batch[1])

    bench.loss = loss


def twice(bench: Bench) -> None:
    """A loss of two parts, given as they are."""
    loss = bench.loss
    bench.loss = lambda batch: (loss(batch), loss(batch))  # type: ignore[assignment, return-value]


def closure(bench: Bench) -> None:
    """An optimizer that calls for the loss again."""
    bench.optimizer = torch.optim.LBFGS(bench.model.parameters())


def lazy(bench: Bench) -> None:
    """A layer that has no shape before it is used."""
    bench.model = nn.Sequential(nn.LazyLinear(4))
    bench.optimizer = torch.optim.SGD(list(bench.model.parameters()), lr=0.1)


def loader(bench: Bench) -> None:
    """A loader, as of the plain loop, in place of its dataset."""
    bench.dataset = torch.utils.data.DataLoader(bench.dataset, batch_size=16, shuffle=True)


HABITS = {
    f.__name__: f
    for f in (
        gpt, gpt_in_bfloat16, compiled, images, images_converted, optimizers, lora, lora_of_peft,
        functions_and_hooks, double, half, subset, sampled, sparse_and_skipped, epochs, in_a_bar, language,
        under_hydra, reentrant, twice, closure, lazy, loader,
    )
}  # fmt: skip


def _with_buffers(habit: Any) -> Any:
    def build(bench: Bench) -> None:
        habit(bench)
        bench.compared["state"] = lambda: digest(bench.model.state_dict())

    return build


HABITS_WITH_BUFFERS = {name: _with_buffers(habit) for name, habit in HABITS.items()}


def _as_a_job() -> None:
    import hydra

    given = sys.argv[1:]
    folder = Path(given[given.index("--out") + 1]).absolute().parent / "hydra" / str(os.getpid())
    sys.argv[1:] = ["hydra.job.chdir=true", f"hydra.run.dir={folder}"]

    @hydra.main(version_base=None, config_path=None)
    def job(_: Any) -> None:
        main(HABITS_WITH_BUFFERS, given)

    job()


if __name__ == "__main__":
    if under_hydra.__name__ in sys.argv[1:2]:
        _as_a_job()
    else:
        main(HABITS_WITH_BUFFERS)
