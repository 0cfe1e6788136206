"""What a state may hold: every dtype, zero-sized, strided, tied, quantised, arrays, containers, scalars to the bit."""

from __future__ import annotations

import collections
import math
import pathlib
import struct
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.checkpoint import CheckpointEngine, LoadedState
from outlast.checkpoint.manifest import DTYPE_BYTES
from outlast.checkpoint.state_tensors import flatten, raw, unflatten
from outlast.errors import ConfigError, Damage

Node = collections.namedtuple("Node", "a b")


def round_trip(tmp_path: pathlib.Path, tree: Any, into: Any = None) -> LoadedState:
    engine = CheckpointEngine(str(tmp_path / "ckpt"))
    handle = engine.save(1, tree)
    assert handle is not None
    handle.wait_copied()
    engine.commit(handle)
    loaded = engine.load(into=into)
    engine.close()
    assert loaded is not None
    return loaded


def bits(tensor: torch.Tensor) -> bytes:
    return raw(tensor).reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def filled(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Every bit pattern, NaNs included."""
    count = math.prod(shape) * dtype.itemsize
    noise = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(count))
    if dtype == torch.bool:
        noise &= 1
    return noise.view(dtype).view(shape)


DTYPES = sorted({str(v).removeprefix("torch.") for v in vars(torch).values() if isinstance(v, torch.dtype)})
QUANTISED = {"qint8": 1, "quint8": 1, "qint32": 1, "quint4x2": 2, "quint2x4": 4}
"""Elements in one of the dtype's items."""


def all_bytes(tensor: torch.Tensor) -> bytes:
    """Of the storage: of packed types torch can tell little else."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy().tobytes()


def quantised(name: str, *shape: int, kind: str = "tensor") -> torch.Tensor:
    """Every bit pattern, with one scale, with one for each of the last dimension, or with zero points in floats."""
    dtype, random = getattr(torch, name), torch.Generator().manual_seed(3)
    scales = torch.rand(shape[-1] if shape else 1, generator=random, dtype=torch.float64)
    if kind == "tensor":
        made = torch._empty_affine_quantized(shape, scale=0.1, zero_point=3, dtype=dtype)
    else:
        zeros = torch.arange(shape[-1]) if kind == "channels" else torch.rand(shape[-1], generator=random)
        scales = scales if kind == "channels" else scales.float()
        made = torch._empty_per_channel_affine_quantized(
            shape, scales=scales, zero_points=zeros, axis=len(shape) - 1, dtype=dtype
        )
    storage = torch.empty(0, dtype=torch.uint8).set_(made.untyped_storage())
    storage.copy_(torch.randint(0, 256, storage.shape, dtype=torch.uint8, generator=random))
    return made


def told(tensor: torch.Tensor) -> tuple[Any, ...]:
    """All there is of a tensor."""
    plain = (tensor.dtype, tensor.shape)
    if not tensor.is_quantized:
        return (*plain, bits(tensor))
    if tensor.qscheme() == torch.per_tensor_affine:
        return (*plain, all_bytes(tensor), tensor.q_scale(), tensor.q_zero_point())
    parts = (tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points())
    scheme = (tensor.qscheme(), tensor.q_per_channel_axis())
    return (*plain, all_bytes(tensor), *scheme, *[(part.dtype, bits(part)) for part in parts])


SHAPES = [(6, 8), (5, 7), (3, 2, 5), (7,), (1,), (), (0, 3), (3, 0)]


def every_kind(name: str) -> dict[str, torch.Tensor]:
    if name not in QUANTISED:
        return {str(shape): filled(getattr(torch, name), *shape) for shape in SHAPES}
    return {
        f"{kind} {shape}": quantised(name, *shape, kind=kind)
        for shape in SHAPES for kind in ("tensor", "channels", "floats") if shape or kind == "tensor"
    }  # fmt: skip


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", DTYPES)
def test_tensors_of_every_dtype_that_torch_has_come_back_to_the_bit(tmp_path: pathlib.Path, name: str) -> None:
    """Of each torch makes tensors, so of none is it said that it cannot be kept."""
    dtype = getattr(torch, name)
    if name not in QUANTISED:
        assert DTYPE_BYTES[name] == dtype.itemsize
    tree = every_kind(name)
    loaded = round_trip(tmp_path, {"of": tree, "itself": dtype}).tree
    assert loaded["itself"] == dtype
    assert list(loaded["of"]) == list(tree)
    for kind, tensor in tree.items():
        assert told(loaded["of"][kind]) == told(tensor), kind
    for kind, tensor in every_kind(name).items():
        assert told(tree[kind]) == told(tensor), f"saving has changed {kind}"


def strided() -> dict[str, torch.Tensor]:
    base = torch.randn(12, 10, 4)
    pair = torch.randn(5, 7, dtype=torch.complex64)
    return {
        "transposed": base.transpose(0, 2),
        "stepped": base[::3, 1::2],
        "expanded": torch.randn(1, 5).expand(4, 5),
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "conjugated": pair.conj(),
        "negated": pair.conj().imag,
        "parameter": torch.nn.Parameter(torch.randn(3)),
        "view": base[2:5],
    }


def test_strided_conjugated_and_viewed_tensors(tmp_path: pathlib.Path) -> None:
    tree = strided()
    loaded = round_trip(tmp_path, tree).tree
    for name, tensor in tree.items():
        assert torch.equal(loaded[name], tensor), name


def test_loading_in_place_into_strided_tensors(tmp_path: pathlib.Path) -> None:
    tree = {name: tensor for name, tensor in strided().items() if name != "expanded"}
    want = {name: tensor.detach().clone() for name, tensor in tree.items()}
    into = {name: torch.zeros_like(tensor) for name, tensor in tree.items()}
    into["stepped"] = torch.zeros(12, 10, 4)[::3, 1::2]
    into["conjugated"] = torch.zeros(5, 7, dtype=torch.complex64).conj()
    loaded = round_trip(tmp_path, tree, into).tree
    for name in tree:
        assert loaded[name] is into[name]
        assert torch.equal(into[name], want[name]), name


def test_tied_tensors_are_kept_once_and_stay_tied(tmp_path: pathlib.Path) -> None:
    shared = torch.randn(100, 100)
    loaded = round_trip(tmp_path, {"a": shared, "b": [shared, shared.view(100, 100)], "other": shared[:50]})
    assert loaded.tree["a"] is loaded.tree["b"][0] is loaded.tree["b"][1]
    assert torch.equal(loaded.tree["other"], shared[:50])
    assert set(loaded.tensors) == {"a", "other"}


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_quantised_tensors(tmp_path: pathlib.Path) -> None:
    values = torch.randn(4, 6)
    tree = {
        "tensor": torch.quantize_per_tensor(values, 0.1, 3, torch.quint8),
        "channel": torch.quantize_per_channel(values, torch.rand(4), torch.zeros(4), 0, torch.qint8),
    }
    loaded = round_trip(tmp_path, tree).tree
    for name in tree:
        assert torch.equal(loaded[name].int_repr(), tree[name].int_repr())
        assert torch.equal(loaded[name].dequantize(), tree[name].dequantize())


def test_packed_values_are_in_memory_of_their_own_when_the_save_has_begun(tmp_path: pathlib.Path) -> None:
    tensor = quantised("quint4x2", 5, 7)
    state = flatten({"w": tensor})
    before = bits(state.tensors[0])
    torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).zero_()
    assert bits(state.tensors[0]) == before
    assert (state.specs[0].dtype, state.specs[0].shape) == ("uint8", (5, 4))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("bad", ["view", "scales", "axis"])
def test_quantised_tensors_that_say_nothing_sure_are_refused_by_name(bad: str) -> None:
    """torch itself makes them."""
    scales, axis = torch.ones(2 if bad == "scales" else 3), 9 if bad == "axis" else 0
    tensor = torch._empty_per_channel_affine_quantized(
        (3, 5), scales=scales, zero_points=torch.zeros_like(scales), axis=axis, dtype=torch.quint4x2
    )
    if bad == "view":
        tensor = tensor.view(15)
    with pytest.raises(ConfigError, match=r"torch\.quint4x2 at 'deep\.w'") as raised:
        flatten({"deep": {"w": tensor}})
    assert raised.value.remedy


NONSENSE: dict[str, Any] = {
    "more columns than bytes": ("qp", [9, ["quint4x2", 0, {"f": "0x1p0"}, 0]]),
    "fewer": ("qp", [6, ["quint4x2", 0, {"f": "0x1p0"}, 0]]),
    "a bomb": ("qp", [1 << 60, ["quint2x4", 0, {"f": "0x1p0"}, 0]]),
    "negative": ("qp", [-8, ["quint4x2", 0, {"f": "0x1p0"}, 0]]),
    "columns of no number": ("qp", ["8", ["quint4x2", 0, {"f": "0x1p0"}, 0]]),
    "another packing": ("qp", [8, ["quint2x4", 0, {"f": "0x1p0"}, 0]]),
    "no packed type": ("qp", [4, ["quint8", 0, {"f": "0x1p0"}, 0]]),
    "packed without columns": ("q", ["quint4x2", 0, {"f": "0x1p0"}, 0]),
    "other integers": ("q", ["qint8", 0, {"f": "0x1p0"}, 0]),
    "a zero point beyond 64 bits": ("q", ["quint8", 0, {"f": "0x1p0"}, 1 << 70]),
    "an axis outside": ("q", ["quint8", 0, 1, 1, 9]),
    "scales for others": ("q", ["quint8", 0, 1, 1, 1]),
    "of floats": ("q", ["qint8", 1, {"f": "0x1p0"}, 0]),
    "packed floats": ("qp", [3, ["quint4x2", 1, {"f": "0x1p0"}, 0]]),
    "too few": ("q", ["quint8", 0]),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", NONSENSE)
def test_a_manifest_that_makes_no_quantised_tensor_is_damage(name: str) -> None:
    tag, payload = NONSENSE[name]
    parts = [torch.zeros((3, 4), dtype=torch.uint8), torch.ones(3)]
    with pytest.raises(Damage, match="its tree holds something that is no state"):
        unflatten({tag: payload}, lambda i: parts[i], file="x")


def test_arrays_sizes_dtypes_and_the_states_of_torchs_own_objects(tmp_path: pathlib.Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 5, 5])
    tree = {
        "model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict(),
        "rng": torch.get_rng_state(), "numpy": np.random.default_rng(3).bit_generator.state,
        "legacy": np.random.RandomState(3).get_state(), "array": np.arange(6.0).reshape(2, 3).T,
        "number": np.float32(1.5), "size": torch.Size([2, 3]), "dtype": torch.bfloat16, "device": torch.device("cpu"),
    }  # fmt: skip
    loaded = round_trip(tmp_path, tree).tree
    assert isinstance(loaded["model"], collections.OrderedDict)
    assert isinstance(loaded["scheduler"]["milestones"], collections.Counter)
    assert loaded["scheduler"]["milestones"] == scheduler.milestones
    assert loaded["numpy"] == tree["numpy"]
    assert np.array_equal(loaded["array"], tree["array"])
    assert isinstance(loaded["number"], np.float32)
    assert (loaded["size"], loaded["dtype"], loaded["device"]) == (tree["size"], tree["dtype"], tree["device"])
    fresh = torch.optim.AdamW(model.parameters())
    fresh.load_state_dict(loaded["optimizer"])
    assert torch.equal(fresh.state_dict()["state"][0]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"])


scalars = (
    st.none() | st.booleans() | st.integers() | st.floats(width=64) | st.complex_numbers() | st.binary(max_size=20)
    | st.text(st.characters(exclude_categories=()), max_size=12)
)  # fmt: skip
keys = st.integers() | st.text(max_size=5) | st.booleans() | st.tuples(st.integers(), st.text(max_size=3)) | st.floats()
trees = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4) | st.lists(inner, max_size=4).map(tuple) | st.dictionaries(keys, inner, max_size=4)
        | st.dictionaries(st.text(), inner, max_size=3).map(collections.OrderedDict)
        | st.frozensets(st.integers() | st.text(max_size=3), max_size=3)
    ),
    max_leaves=20,
)  # fmt: skip


def identical(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b)
    if isinstance(a, complex):
        return identical(a.real, b.real) and identical(a.imag, b.imag)
    if isinstance(a, dict):
        pairs = zip(a.items(), b.items(), strict=True)
        return len(a) == len(b) and all(identical(k, m) and identical(v, w) for (k, v), (m, w) in pairs)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(identical(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


@settings(max_examples=300)
@given(tree=trees)
def test_containers_and_scalars_are_kept_in_type_and_bit(tree: Any) -> None:
    import msgspec

    state = flatten(tree)
    node = msgspec.json.decode(msgspec.json.encode(state.tree))
    assert identical(unflatten(node, lambda i: state.tensors[i], file="x"), tree)


class Odd:
    pass


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        ({"a": {"b": Odd()}}, "at 'a.b'"),
        ({"n": Node(1, 2)}, "Node at 'n'"),
        ({"m": torch.empty(3, device="meta")}, "meta tensor at 'm'"),
        ({"s": torch.eye(3).to_sparse()}, "sparse"),
        ({Odd(): 1}, "key of type Odd"),
        ({"o": np.array([Odd()])}, "numpy.ndarray at 'o'"),
    ],
)
def test_what_cannot_be_kept_is_named(tree: Any, said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        flatten(tree)
    assert said in str(raised.value)
    assert raised.value.remedy


def test_a_state_that_contains_itself_is_refused() -> None:
    tree: dict[str, Any] = {}
    tree["self"] = tree
    with pytest.raises(ConfigError, match="contains itself"):
        flatten(tree)


def test_names_that_collide_stay_apart(tmp_path: pathlib.Path) -> None:
    tree = {"a": {"b": torch.ones(2)}, "a.b": torch.zeros(2)}
    loaded = round_trip(tmp_path, tree)
    assert sorted(loaded.tensors) == ["a.b", "a.b#2"]
    assert torch.equal(loaded.tree["a.b"], torch.zeros(2))
    assert torch.equal(loaded.tree["a"]["b"], torch.ones(2))


# the same state, save after save

A, B = torch.zeros(3), torch.zeros(3)
FIRST: dict[str, Any] = {
    "model": {"a": A, 7: B, "deep": [{"c": torch.zeros(2, 2)}, (1, 2.0)]},
    "optim": collections.OrderedDict([("lr", 0.1), ("step", 4), ("name", "x"), ("none", None), (b"k", True)]),
    "empty": {},
}


def changed(*path: Any, to: Any) -> dict[str, Any]:
    """`FIRST` with something else at one place."""

    def at(value: Any, rest: tuple[Any, ...]) -> Any:
        if not rest:
            return to
        items = list(value.items()) if isinstance(value, dict) else list(enumerate(value))
        new = [(k, at(v, rest[1:]) if k == rest[0] else v) for k, v in items]
        return type(value)(new) if isinstance(value, dict) else type(value)(v for _, v in new)

    made: dict[str, Any] = at(FIRST, path)
    return made


SECOND: dict[str, Any] = {
    "the same": FIRST,
    "other tensors": changed("model", "a", to=torch.ones(3)),
    "a parameter": changed("model", "a", to=torch.nn.Parameter(torch.ones(3))),
    "another shape": changed("model", "a", to=torch.ones(1, 3)),
    "another dtype": changed("model", "a", to=torch.ones(3, dtype=torch.int32)),
    "one in two places": changed("model", "a", to=B),
    "two views of one": changed("model", "a", to=B.view(3)),
    "a number for a tensor": changed("model", "a", to=1),
    "an array for a tensor": changed("model", "a", to=np.zeros(3, np.float32)),
    "a tensor for a number": changed("optim", "lr", to=torch.zeros(3)),
    "another float": changed("optim", "lr", to=0.2),
    "a negative zero": changed("model", "deep", 1, 1, to=-0.0),
    "a NaN": changed("optim", "lr", to=struct.unpack(">d", bytes.fromhex("7ff8000000000123"))[0]),
    "a float for an int": changed("optim", "step", to=4.0),
    "a bool for an int": changed("model", "deep", 1, 0, to=True),
    "a huge int": changed("optim", "step", to=1 << 80),
    "a surrogate": changed("optim", "name", to="\ud800"),
    "another container": changed("model", "deep", 1, to=[1, 2.0]),
    "longer": changed("model", "deep", 1, to=(1, 2.0, 3)),
    "a set": changed("empty", to=set()),
    "a plain dict": changed("optim", to=dict(FIRST["optim"])),
    "another key": changed("model", to={"b": A, 7: B, "deep": FIRST["model"]["deep"]}),
    "an equal key of another type": changed("model", to={"a": A, 7.0: B, "deep": FIRST["model"]["deep"]}),
    "another order": changed("model", to={7: B, "a": A, "deep": FIRST["model"]["deep"]}),
}


@pytest.mark.parametrize("name", SECOND)
def test_a_state_that_is_recognised_is_flattened_as_one_that_is_not(name: str) -> None:
    schema = flatten(FIRST).schema
    assert schema.outline is not None
    assert schema.outline.of_again(FIRST) is not None
    for tree in (SECOND[name], SECOND["another float"], SECOND[name], FIRST):
        seen, full = flatten(tree, like=schema), flatten(tree)
        assert (seen.tree, seen.specs, seen.shards) == (full.tree, full.specs, full.shards)
        assert repr(seen.tree) == repr(full.tree)  # True is not 1
        assert [bits(t) for t in seen.tensors] == [bits(t) for t in full.tensors]
        assert [[h.box for h in held] for held in seen.local] == [[h.box for h in held] for held in full.local]
        assert all(a.values is t for (a,), t in zip(seen.local, seen.tensors, strict=True))
        schema = seen.schema


def test_what_is_no_tensor_is_refused_the_second_time_too() -> None:
    schema = flatten(FIRST).schema
    for bad in (torch.zeros(3, device="meta"), torch.zeros(3).to_sparse(), object(), Node(1, 2)):
        with pytest.raises(ConfigError):
            flatten(changed("model", "a", to=bad), like=schema)
