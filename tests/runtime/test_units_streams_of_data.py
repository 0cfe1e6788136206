"""Streams: every sample of a pass once, whoever computes, joins late, is asked again or goes on from a checkpoint."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

import outlast
from outlast.errors import ConfigError, LoopUnrepeatable, StepMisuse, TrainingError
from outlast.runtime.training.streams import StreamSamples, is_stream


class Shuffled(IterableDataset[torch.Tensor]):
    """Another order in each pass, drawn from torch's numbers; each sample with noise. `reads`: samples given so far."""

    def __init__(self, size: int, sizes: dict[int, int] | None = None) -> None:
        self.size, self.sizes, self.epoch, self.reads = size, sizes or {}, -1, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[torch.Tensor]:
        for index in torch.randperm(self.sizes.get(self.epoch, self.size)).tolist():
            self.reads += 1
            yield torch.tensor([float(self.epoch), float(index), random.random()])


def stream(size: int = 22, batch: int = 8, microbatches: int = 4, **more: Any) -> StreamSamples:
    source = more.pop("source", None)
    source = Shuffled(size) if source is None else source
    return StreamSamples(source, global_batch_size=batch, microbatches=microbatches, seed=3, **more)


def step_of(data: StreamSamples, step: int) -> list[tuple[float, ...]]:
    leaves = [leaf for leaf in range(data.num_leaves) if data.sizes(step)[leaf]]
    return [tuple(row) for leaf in leaves for row in data.fetch(step, leaf).tolist()]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("size", [8, 22, 24, 31])
def test_every_sample_of_a_pass_once(size: int, drop_last: bool) -> None:
    data, seen = stream(size, drop_last=drop_last), Counter[tuple[float, ...]]()
    per = size // 8 if drop_last else -(-size // 8)
    for step in range(3 * per):
        assert data.epoch_of(step) == step // per
        seen.update(row[:2] for row in step_of(data, step))
        assert max(data.sizes(step)) - min(data.sizes(step)) <= 1
    want = size // 8 * 8 if drop_last else size
    assert max(seen.values()) == 1
    assert Counter(epoch for epoch, _ in seen) == {float(epoch): want for epoch in range(3)}


def test_who_comes_late_or_is_asked_again_gets_the_same() -> None:
    """Passes of different lengths, so that nobody can know without reading where the third begins."""
    lengths = {0: 22, 1: 9, 2: 30}
    one = stream(source=Shuffled(12, lengths))
    want = {step: step_of(one, step) for step in range(9)}
    for step in (8, 3, 0, 6, 2, 8):
        assert step_of(one, step) == want[step]
    for start in range(1, 9):
        late = stream(source=Shuffled(12, lengths))
        number, began = one.place_of(start - 1)
        late.load_state_dict({"pass": number, "began": began, "step": start})
        late.take_up()
        assert late.state_dict() == {"pass": number, "began": began, "step": start}
        assert [step_of(late, step) for step in range(start, 9)] == [want[step] for step in range(start, 9)]
        assert late._stream._source.reads <= sum(len(want[step]) for step in range(began, 9))  # and no pass before


def test_who_follows_reads_along_and_nobody_waits_for_it() -> None:
    one, spare = stream(), stream()
    for step in range(7):
        want = step_of(one, step)
        spare.applied(step, one.place_of(step))
        before = spare._stream._source.reads
        assert step_of(spare, step) == want
        assert spare._stream._source.reads == before


def test_reading_leaves_the_random_state_alone() -> None:
    data = stream()
    torch.manual_seed(5)
    want = torch.rand(2)
    torch.manual_seed(5)
    data.sizes(4)
    assert torch.equal(torch.rand(2), want)


def test_samples_that_are_left_out_leave_the_others_where_they_are() -> None:
    data, whole = stream(), stream()
    bad = data.indices(1, 2)[0]
    want = step_of(whole, 1)
    data.leave_out([bad])
    assert data.sizes(1) == [2, 2, 1, 2]
    assert step_of(data, 1) == [row for i, row in enumerate(want) if i != 4]
    assert step_of(data, 2) == step_of(whole, 2)


@pytest.mark.parametrize("of_loader", [False, True])
def test_a_rank_whose_samples_are_all_left_out_has_these_to_go_through_the_model_with(of_loader: bool) -> None:
    """The ranks of a replica do so together; what comes of it counts nothing."""
    data = stream(source=loader(23) if of_loader else None)
    want = data.fetch(0, 1)
    data.leave_out(data.indices(0, 1))
    assert (data.sizes(0)[1], data.fetch(0, 1).shape) == (0, want.shape)


# --- loaders ---------------------------------------------------------------------------------------------------------
def loader(size: int = 22, batch: int = 2, **more: Any) -> DataLoader[Any]:
    return DataLoader(Shuffled(size), batch_size=batch, **more)


def test_a_loader_s_batches_are_microbatches() -> None:
    data = stream(source=loader())
    plain = stream(source=loader())
    assert data.sizes(0) == [2, 2, 2, 2]
    assert data.sizes(2) == [2, 2, 2, 0]
    seen = Counter(row[1] for step in range(3) for row in step_of(data, step))
    assert seen == Counter(float(i) for i in range(22))
    late = stream(source=loader())
    late.load_state_dict({"pass": 1, "began": 3, "step": 4})
    late.take_up()
    assert step_of(late, 4) == step_of(plain, 4)
    assert data.order == "stream of batches"


@pytest.mark.process
def test_a_loader_with_workers_gives_the_same_to_all() -> None:
    one, other = stream(source=loader(num_workers=1)), stream(source=loader(num_workers=1))
    want = [step_of(one, step) for step in range(3)]
    other.load_state_dict({"pass": 0, "began": 0, "step": 2})
    other.take_up()
    assert step_of(other, 2) == want[2]


# --- in a training ---------------------------------------------------------------------------------------------------
def train(until: int, **more: Any) -> Any:
    torch.manual_seed(4)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    given: dict[str, Any] = {"global_batch_size": 8, "microbatches": 4, "seed": 2} | more
    source = given.pop("source", None)
    source = Shuffled(22) if source is None else source
    training = outlast.join().protect(model, optimizer, source, **given)
    training.epochs_seen = []
    for step in training.steps(until=until):
        for batch in step:
            step.backward(model(batch).pow(2).mean())
        training.epochs_seen.append(step.epoch)
    return training


@pytest.mark.usefixtures("training_here")
@pytest.mark.parametrize("plain", [False, True])
def test_a_training_on_a_stream_goes_on_from_a_checkpoint(
    plain: bool, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if plain:
        monkeypatch.setenv("OUTLAST", "off")
    whole = train(9, checkpoint="off")
    assert whole.epochs_seen == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    keep = outlast.Checkpoint(dir=str(tmp_path / "ckpt"), every=1)
    train(5, checkpoint=keep)
    rest = train(9, checkpoint=keep)
    assert rest.epochs_seen == [1, 2, 2, 2]
    assert rest.fingerprint() == whole.fingerprint()


@pytest.mark.usefixtures("training_here")
def test_a_training_on_a_loader() -> None:
    assert train(7, source=loader()).fingerprint() == train(7, source=loader()).fingerprint()


@pytest.mark.usefixtures("training_here")
def test_a_stream_that_does_not_begin_twice_alike_is_found_in_the_first_step() -> None:
    class Changing(IterableDataset[torch.Tensor]):
        counter = itertools.count()

        def __iter__(self) -> Iterator[torch.Tensor]:
            for _ in range(40):
                yield torch.full((3,), float(next(self.counter)))

    with pytest.raises(LoopUnrepeatable, match="does not begin the same when it is read twice"):
        train(2, source=Changing())


@pytest.mark.usefixtures("training_here")
def test_a_stream_has_no_number_of_steps() -> None:
    training = train(1)
    for ask in (lambda: training.steps_per_epoch, lambda: training.epochs(2)):
        with pytest.raises(StepMisuse, match="a stream has no known length") as caught:
            ask()
        assert "step.epoch" in caught.value.remedy
    with pytest.raises(StepMisuse, match="called twice"):
        next(training.steps(until=3))


@pytest.mark.parametrize(
    ("given", "reason", "remedy"),
    [
        ({"source": (x for x in range(9))}, "generator that can be read once only", "IterableDataset"),
        ({"num_workers": 2}, "num_workers=2 with a stream", "DataLoader"),
        ({"batch": 9}, "not a multiple", "global_batch_size=12"),
        ({"source": DataLoader(Shuffled(9), batch_size=None)}, "no batch_size", "batch_size"),
        ({"source": DataLoader(Shuffled(9), batch_size=3)}, "4 of 3 samples are 12", "global_batch_size=12"),
        ({"source": DataLoader(Shuffled(9), batch_size=2), "collate_fn": list}, "makes batches itself", "leave"),
    ],
)
def test_a_stream_that_cannot_work_is_refused(given: dict[str, Any], reason: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        stream(**given)
    assert reason in caught.value.message
    assert remedy in caught.value.remedy


def test_a_stream_shorter_than_a_step_is_told() -> None:
    assert stream(5, microbatches=4).sizes(0) == [2, 1, 1, 1]
    for data in (stream(5, drop_last=True), stream(0)):
        with pytest.raises(ConfigError, match="the stream ended after"):
            data.sizes(0)
    odd = stream(source=DataLoader(Shuffled(9), batch_size=2, collate_fn=lambda rows: object()))
    with pytest.raises(TrainingError, match="how many samples are in it cannot be told"):
        odd.sizes(0)


def test_what_is_a_stream() -> None:
    assert is_stream(Shuffled(3))
    assert is_stream(loader())
    assert is_stream(iter([1]))
    assert not is_stream([1, 2])
    assert not is_stream(DataLoader([1, 2], batch_size=1))
    assert not is_stream(torch.utils.data.RandomSampler([1, 2]))
    assert not is_stream({"train": 1})
