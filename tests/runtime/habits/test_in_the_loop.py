"""Habits of other loops, in this process, protected and as the plain loop: each is told what to write instead."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import outlast
from outlast.errors import ConfigError, LoopUnrepeatable, StepMisuse

BOTH = pytest.mark.parametrize("plain", [False, True], ids=["protected", "off"])


@pytest.fixture(autouse=True)
def _here(training_here: None) -> Iterator[None]:
    return


class Case:
    """One training in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, plain: bool, **given: Any) -> None:
        if plain:
            monkeypatch.setenv("OUTLAST", "off")
        torch.manual_seed(4)
        self.model = given.pop("model", None) or nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))
        optimizer = given.pop("optimizer", torch.optim.AdamW)
        self.optimizer = optimizer(self.model.parameters(), lr=1e-2)
        scheduler = given.pop("scheduler", None)
        self.scheduler = scheduler(self.optimizer) if scheduler is not None else None
        data = list(torch.randn(24, 6, generator=torch.Generator().manual_seed(1)))
        sizes = {"global_batch_size": 8, "microbatches": 4}
        self.training = outlast.join().protect(
            self.model, self.optimizer, data, scheduler=self.scheduler, **(sizes | given)
        )

    def loss(self, batch: Tensor) -> Tensor:
        return self.model(batch).pow(2).mean()

    def train(
        self, inside: Callable[[Any, Tensor], None] | None = None, after: Callable[[Any], None] | None = None,
        until: int = 4,
    ) -> str:  # fmt: skip
        for step in self.training.steps(until=until):
            for batch in step:
                if inside is None:
                    step.backward(self.loss(batch))
                else:
                    inside(step, batch)
            if after is not None:
                after(step)
        return str(self.training.fingerprint())


def backward_and(case: Case, habit: Callable[[], object]) -> Callable[[Any, Tensor], None]:
    def inside(step: Any, batch: Tensor) -> None:
        step.backward(case.loss(batch))
        habit()

    return inside


def at(place: str, case: Case, habit: Callable[[], object]) -> dict[str, Any]:
    return {"after": lambda step: habit()} if place == "after" else {"inside": backward_and(case, habit)}


USES: dict[str, tuple[Callable[[Case], object], str, str]] = {
    "clip_grad_norm_": (
        lambda case: nn.utils.clip_grad_norm_(case.model.parameters(), 1.0), "clip_grad_norm_ used", "clip_norm=",
    ),
    "clip_grad_value_": (
        lambda case: nn.utils.clip_grad_value_(case.model.parameters(), 1.0), "clip_grad_value_ used", "clip_norm=",
    ),
    "optimizer.step": (lambda case: case.optimizer.step(), "step used", "leave optimizer.step() out"),
    "zeros": (lambda case: case.optimizer.zero_grad(set_to_none=False), "zero_grad used", "leave zero_grad() out"),
    "log": (lambda case: [p.grad.norm() for p in case.model.parameters()], "the loop used", "step.grad_norm"),
    "unscale_": (
        lambda case: (s := torch.amp.GradScaler("cpu"), s.scale(torch.ones(())), s.unscale_(case.optimizer)),
        "unscale_ used", "bfloat16 needs none",
    ),
}  # fmt: skip


@BOTH
@pytest.mark.parametrize("name", USES)
@pytest.mark.parametrize("place", ["inside", "after"])
def test_whoever_uses_a_gradient_is_told_what_to_write(
    name: str, place: str, plain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first step, wherever it stands, and whoever wrote the function that did it."""
    habit, said, remedy = USES[name]
    case = Case(monkeypatch, plain)
    with pytest.raises(StepMisuse) as caught:
        case.train(**at(place, case, lambda: habit(case)))
    assert said in caught.value.message
    assert remedy in caught.value.remedy


@BOTH
def test_what_is_done_to_a_model_besides_changes_nothing(plain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluations move, copy and save models, look whether there are gradients, and take some of their own."""
    want = Case(monkeypatch, plain).train()
    case = Case(monkeypatch, plain)

    def harmless(*_: object) -> None:
        model = case.model
        model.to("cpu").float().eval().train()
        copy.deepcopy(model).zero_grad()
        torch.optim.swa_utils.AveragedModel(model).update_parameters(model)
        nn.utils.parameters_to_vector(model.parameters())
        assert [p.grad is None for p in model.parameters()] == [False] * 4
        x = torch.ones(2, 6, requires_grad=True)
        model(x).sum().backward()  # a map of what the output depends on: no step
        assert x.grad is not None
        assert "kept by outlast" in repr(next(model.parameters()).grad)
        model(x).sum().backward(create_graph=True)
        case.optimizer.zero_grad()
        model.zero_grad()

    assert case.train(after=harmless) == want
    assert Case(monkeypatch, plain).train(inside=None) == want
    case = Case(monkeypatch, plain)

    def inside(step: Any, batch: Tensor) -> None:
        case.optimizer.zero_grad()
        step.backward(case.loss(batch))
        case.optimizer.zero_grad()

    assert case.train(inside=inside) == want


@BOTH
@pytest.mark.parametrize("leave", [False, True])
def test_after_the_loop_the_model_is_the_script_s_again(
    plain: bool, leave: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(monkeypatch, plain)
    for step in case.training.steps(until=4):
        for batch in step:
            step.backward(case.loss(batch))
        if leave and step.number == 1:
            break
    assert [p.grad for p in case.model.parameters()] == [None] * 4
    case.loss(torch.ones(2, 6)).backward()
    assert float(nn.utils.clip_grad_norm_(case.model.parameters(), 1.0)) > 0
    case.optimizer.step()


@BOTH
@pytest.mark.parametrize(
    "make",
    [
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda n: 0.9**n),
        lambda o: torch.optim.lr_scheduler.SequentialLR(
            o, [torch.optim.lr_scheduler.ConstantLR(o), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)], [2]
        ),
        lambda o: torch.optim.lr_scheduler.ChainedScheduler([torch.optim.lr_scheduler.ExponentialLR(o, 0.9)]),
    ],
    ids=["LambdaLR", "SequentialLR", "ChainedScheduler"],
)
@pytest.mark.parametrize("place", ["inside", "after"])
def test_a_scheduler_that_is_given_is_not_stepped_by_the_loop(
    make: Callable[[Any], Any], place: str, plain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(monkeypatch, plain, scheduler=make)
    with pytest.raises(StepMisuse, match=f"called step\\(\\) of its {type(case.scheduler).__name__}") as caught:
        case.train(**at(place, case, lambda: case.scheduler.step()))
    assert "leave scheduler.step() out" in caught.value.remedy
    Case(monkeypatch, plain, scheduler=make).train()


@BOTH
@pytest.mark.parametrize("way", ["thawed", "added"])
def test_parameters_that_begin_to_train_are_refused_by_name(
    way: str, plain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plain loop would have added up its gradient from step to step, and ended well."""
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))
    model[0].requires_grad_(way != "thawed")

    def optimizer(params: Any, lr: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters() if way == "thawed" else model[2].parameters(), lr=lr)

    case = Case(monkeypatch, plain, model=model, optimizer=optimizer)

    def after(step: Any) -> None:
        if step.number == 1 and way == "thawed":
            model[0].requires_grad_(True)
        elif step.number == 1:
            case.optimizer.add_param_group({"params": list(model[0].parameters())})

    with pytest.raises(LoopUnrepeatable, match=r"0\.weight began to train in step 2"):
        case.train(after=after)


@BOTH
def test_a_gradient_scale_is_refused_and_a_weight_is_not(plain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    scaler = torch.amp.GradScaler("cpu")
    for scaled in (scaler.scale, lambda loss: scaler.scale(loss / 4), lambda loss: scaler.scale(loss) / 4):
        case = Case(monkeypatch, plain)
        with pytest.raises(StepMisuse, match="multiplied by a GradScaler") as caught:
            case.train(inside=lambda step, batch, case=case, scaled=scaled: step.backward(scaled(case.loss(batch))))
        assert "bfloat16" in caught.value.remedy
    for weight in (torch.tensor(0.5), 65536.0, torch.tensor(65536.0, requires_grad=True)):
        case = Case(monkeypatch, plain)
        case.train(
            inside=lambda step, batch, case=case, weight=weight: step.backward(weight * case.loss(batch) / 65536)
        )


@BOTH
def test_a_loss_divided_by_the_microbatches_is_warned_of_once(
    plain: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for divide, told in (
        (lambda case, batch: case.loss(batch) / 4, 1),
        (lambda case, batch: case.model(batch).pow(2).sum() / 4, 0),
        (lambda case, batch: case.loss(batch) / 3, 0),
    ):
        case = Case(monkeypatch, plain)
        case.train(inside=lambda step, batch, case=case, divide=divide: step.backward(divide(case, batch)))
        assert capsys.readouterr().err.count("divided by 4, the number of microbatches") == told


class Output(dict[str, Tensor]):
    """As of a model that returns more than its loss."""

    @property
    def loss(self) -> Tensor:
        return self["loss"]


@BOTH
@pytest.mark.parametrize(
    ("make", "said", "remedy"),
    [
        (lambda loss: None, "was given None", "0 * loss"),
        (lambda loss: (loss, loss), "given a tuple", "step.backward(a + b)"),
        (lambda loss: {"loss": loss}, "given a dict", 'output["loss"]'),
        (lambda loss: Output(loss=loss), "given a Output", "output.loss"),
        (lambda loss: loss.item(), "given a float", "without .item()"),
        (lambda loss: loss.expand(3), "has shape (3,)", "loss.mean()"),
        (lambda loss: loss.detach(), "depends on no parameter", "without .detach()"),
        (lambda loss: loss.to(torch.complex64), "is complex", "loss.real"),
    ],
    ids=["None", "tuple", "dict", "output", "float", "vector", "detached", "complex"],
)
def test_what_is_no_loss(
    make: Callable[[Tensor], Any], said: str, remedy: str, plain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(monkeypatch, plain)
    with pytest.raises(StepMisuse) as caught:
        case.train(inside=lambda step, batch: step.backward(make(case.loss(batch))))
    assert said in caught.value.message
    assert remedy in caught.value.remedy


@BOTH
def test_a_batch_is_left_out_by_a_loss_of_zero(plain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(monkeypatch, plain)
    with pytest.raises(StepMisuse, match="got no backward") as caught:
        case.train(inside=lambda step, batch: None)
    assert "0 * loss" in caught.value.remedy
    case = Case(monkeypatch, plain)
    case.train(inside=lambda step, batch: step.backward(0 * case.loss(batch)))


@BOTH
def test_two_backwards_of_one_batch_and_the_way_for_a_gan(plain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the remedy says gives each part the gradients of the two separate backwards."""
    case = Case(monkeypatch, plain)
    with pytest.raises(StepMisuse, match="twice for one batch") as caught:
        case.train(inside=lambda step, batch: [step.backward(case.loss(batch)) for _ in range(2)])
    assert "part.requires_grad_(False)" in caught.value.remedy

    model = nn.ModuleDict({"maker": nn.Linear(6, 6), "judge": nn.Linear(6, 1)})
    maker, judge, start = model["maker"], model["judge"], copy.deepcopy(model.state_dict())
    case = Case(monkeypatch, plain, model=model, optimizer=torch.optim.SGD, microbatches=1)
    seen: list[Tensor] = []

    def inside(step: Any, batch: Tensor) -> None:
        seen.append(batch)
        made = maker(batch)
        judged = judge(batch).mean() - judge(made.detach()).mean()
        judge.requires_grad_(False)
        fooled = judge(made).pow(2).mean()
        judge.requires_grad_(True)
        step.backward(judged + fooled)

    case.train(inside=inside, until=1)
    apart = nn.ModuleDict({"maker": nn.Linear(6, 6), "judge": nn.Linear(6, 1)})
    apart.load_state_dict(start)
    maker, judge = apart["maker"], apart["judge"]
    batch = seen[0]
    judged = judge(batch).mean() - judge(maker(batch).detach()).mean()
    of_judge = torch.autograd.grad(judged, list(judge.parameters()), allow_unused=True)
    of_maker = torch.autograd.grad(judge(maker(batch)).pow(2).mean(), list(maker.parameters()))
    for name, grad in zip(("judge.weight", "maker.weight", "maker.bias"), (of_judge[0], *of_maker), strict=False):
        want = start[name] - 1e-2 * grad
        torch.testing.assert_close(dict(model.named_parameters())[name].detach(), want)


@BOTH
def test_epochs_are_one_loop(plain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(monkeypatch, plain)
    case.train(until=3)
    with pytest.raises(StepMisuse, match="called twice") as caught:
        case.train(until=6)
    assert "steps(until=n * 3)" in caught.value.remedy
    assert "for epoch in training.epochs(n)" in caught.value.remedy


@BOTH
def test_a_step_that_is_left_open_is_told(plain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(monkeypatch, plain)
    with pytest.raises(StepMisuse, match="step 0 was left before its microbatches were done"):  # noqa: PT012
        for step in case.training.steps(until=2):
            for batch in step:
                step.backward(case.loss(batch))
                break


def embedded(sparse: bool) -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Embedding(10, 4, sparse=sparse), nn.Linear(4, 1))


@BOTH
def test_sparse_gradients_are_summed_up_as_dense_ones(plain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for sparse in (False, True):
        model = embedded(sparse)
        case = Case(monkeypatch, plain, model=model, optimizer=torch.optim.Adam)
        case.loss = lambda batch, model=model: model((batch * 3).long().abs() % 10).pow(2).mean()  # type: ignore[method-assign]
        results.append(case.train())
    assert plain or results[0] == results[1]


class Lion(torch.optim.Optimizer):
    """Takes what it needs from its gradients."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.data.add_(param.grad.sign(), alpha=-group["lr"])


@BOTH
@pytest.mark.parametrize(
    ("given", "said", "remedy"),
    [
        ({"optimizer": torch.optim.LBFGS}, "LBFGS.step needs 'closure'", "AdamW or SGD"),
        ({"optimizer": torch.optim.SparseAdam}, "SparseAdam takes sparse gradients only", "Adam or AdamW"),
        (
            {"scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau},
            "ReduceLROnPlateau.step needs 'metrics'", 'state={"plateau": scheduler}',
        ),
        (
            {"model": nn.Sequential(nn.Linear(6, 8), nn.LazyLinear(1)), "optimizer": None},
            "1.weight of the model has no shape yet", "model(example)",
        ),
        ({"model": nn.Linear(6, 1, dtype=torch.complex64)}, "weight is complex", "view_as_real"),
    ],
    ids=["LBFGS", "SparseAdam", "plateau", "lazy", "complex"],
)  # fmt: skip
def test_what_cannot_be_protected_is_told_by_protect(
    given: dict[str, Any], said: str, remedy: str, plain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if given.get("optimizer", True) is None:
        given = given | {"optimizer": lambda params, lr: torch.optim.SGD(list(params), lr)}
    with pytest.raises(ConfigError) as caught:
        Case(monkeypatch, plain, **given)
    assert said in caught.value.message
    assert remedy in caught.value.remedy


@BOTH
@pytest.mark.parametrize(
    ("given", "said", "remedy"),
    [
        ({"checks": "abtf"}, "checks='abtf' is no kind of check", "'abft'"),
        ({"checks": ["layers.*"]}, "no module's name matches 'layers.*'", "names such as 0, 1, 2"),
        ({"guards": "ful"}, "guards='ful' is no preset", "'full'"),
        ({"aggregation": "medain", "rows": 4}, "'medain'", "'median'"),
        ({"aggregation": "trimmed_mean", "rows": 4, "f": 3}, "tolerates at most f = 1, not 3", "f"),
    ],
    ids=["checks", "patterns", "guards", "rule", "too many"],
)  # fmt: skip
def test_what_only_the_protected_loop_uses_is_judged_by_both(
    given: dict[str, Any], said: str, remedy: str, plain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a script that was tried with OUTLAST=off does not end in its first protected minute."""
    with pytest.raises(ConfigError) as caught:
        Case(monkeypatch, plain, **given)
    assert said in caught.value.message
    assert remedy in caught.value.remedy


@BOTH
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, Lion, torch.optim.Adafactor, torch.optim.NAdam])
def test_other_optimizers_are_as_welcome_as_before(
    optimizer: Any, plain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Case(monkeypatch, plain, optimizer=optimizer).train() != Case(monkeypatch, plain).train()


DATA = list(range(64))


@pytest.mark.parametrize(
    ("data", "said", "remedy"),
    [
        (torch.utils.data.DataLoader(DATA, batch_size=16), "is a DataLoader", "pass loader.dataset; batch_size=16"),
        (torch.utils.data.RandomSampler(DATA), "a RandomSampler: a sampler gives numbers", "sampler="),
        ({"train": DATA, "test": DATA}, "keys 'train', 'test'", "dataset['train']"),
        (iter(DATA), "list_iterator that can be read once only", "IterableDataset"),
        (3, "int is no dataset", "__getitem__"),
    ],
    ids=["loader", "sampler", "dict", "iterator", "number"],
)
def test_what_gives_no_samples_by_number_is_told_what_would(data: Any, said: str, remedy: str) -> None:
    model = nn.Linear(1, 1)
    with pytest.raises(ConfigError) as caught:
        outlast.join().protect(
            model, torch.optim.SGD(model.parameters()), data, global_batch_size=8, microbatches=4
        )  # fmt: skip
    assert said in caught.value.message
    assert remedy in caught.value.remedy
