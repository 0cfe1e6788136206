"""Reading and writing what others read and write: safetensors and DCP, bounded memory, hostile files refused."""

from __future__ import annotations

import collections
import json
import os
import pathlib
import pickle
import tracemalloc
import warnings
import weakref
import zipfile
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from outlast.adapters import _dcp
from outlast.adapters._dcp import export_dcp, import_dcp, read_metadata
from outlast.adapters._safetensors import _CODES, export_safetensors, import_safetensors
from outlast.checkpoint import CheckpointEngine, LocalStore, Reader
from outlast.checkpoint._publish import read_head
from outlast.errors import ConfigError, Damage


def generation(path: pathlib.Path, tree: Any) -> Reader:
    engine = CheckpointEngine(str(path))
    handle = engine.save(4, tree)
    assert handle is not None
    number = engine.commit(handle)
    engine.close()
    return Reader(read_head(engine.store, number), [engine.store])


def load(path: pathlib.Path, number: int) -> Any:
    engine = CheckpointEngine(str(path))
    loaded = engine.load(generation=number)
    engine.close()
    assert loaded is not None
    return loaded


def training_state() -> dict[str, Any]:
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 5)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optim": optimizer.state_dict(), "step": 4, "history": [1, 2.5, "x"]}


def all_of(reader: Reader) -> list[tuple[int, str]]:
    return [(number, spec.name) for number, spec in enumerate(reader.tensors)]


NONCES = iter(range(1 << 30))

# safetensors


def test_safetensors_written_here_are_read_by_safetensors_and_back(tmp_path: pathlib.Path) -> None:
    tree = {
        "w": torch.randn(70, 30), "nested": [torch.arange(5), {"b": torch.randn(3).bfloat16()}], "lr": 0.1,
        "empty": torch.empty(0, 3), "flag": torch.tensor(True), "half": torch.randn(4, 4).t().half(),
    }  # fmt: skip
    with generation(tmp_path / "a", tree) as reader:
        files = export_safetensors(reader, str(tmp_path / "out"), all_of(reader), shard_bytes=1000)
    assert len(files) > 2
    merged = {k: v for f in files if f.endswith(".safetensors") for k, v in load_file(tmp_path / "out" / f).items()}
    assert torch.equal(merged["w"], tree["w"])
    assert torch.equal(merged["nested.1.b"], tree["nested"][1]["b"])
    assert torch.equal(merged["half"], tree["half"])
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(merged)
    store = LocalStore(str(tmp_path / "b"))
    number = import_safetensors(str(tmp_path / "out"), store, step=4, created_s=1.0, nonce="aa")
    again = load(tmp_path / "b", number)
    assert again.step == 4
    assert again.tree["lr"] == 0.1
    assert torch.equal(again.tree["nested"][1]["b"], tree["nested"][1]["b"])
    assert torch.equal(again.tree["empty"], tree["empty"])


@pytest.mark.parametrize("dtype", sorted(_CODES))
def test_every_dtype_of_the_format_goes_both_ways(tmp_path: pathlib.Path, dtype: str) -> None:
    noise = torch.randint(0, 2, (64,), dtype=torch.uint8)
    tensor = noise.view(getattr(torch, dtype)).clone()
    with generation(tmp_path / "a", {"x": tensor}) as reader:
        export_safetensors(reader, str(tmp_path / "out"), [(0, "x")])
    number = import_safetensors(
        str(tmp_path / "out" / "model.safetensors"), LocalStore(str(tmp_path / "b")), step=0, created_s=1.0, nonce="aa"
    )
    again = load(tmp_path / "b", number).tree["x"]
    assert again.dtype == tensor.dtype
    assert torch.equal(again.view(torch.uint8), noise)
    if dtype != "float8_e8m0fnu":
        assert load_file(tmp_path / "out" / "model.safetensors")["x"].dtype == tensor.dtype


def test_a_file_of_hugging_faces_comes_as_a_flat_dict(tmp_path: pathlib.Path) -> None:
    tensors = {"a.weight": torch.randn(3, 4), "b": torch.arange(4)}
    save_file(tensors, tmp_path / "m.safetensors", metadata={"format": "pt"})
    number = import_safetensors(
        str(tmp_path / "m.safetensors"), LocalStore(str(tmp_path / "c")), step=0, created_s=1.0, nonce="aa"
    )
    tree = load(tmp_path / "c", number).tree
    assert tree.keys() == tensors.keys()
    assert all(torch.equal(tree[k], v) for k, v in tensors.items())


def test_a_dtype_that_safetensors_lacks_is_named(tmp_path: pathlib.Path) -> None:
    with (
        generation(tmp_path / "a", {"z": torch.randn(3, dtype=torch.complex128)}) as reader,
        pytest.raises(ConfigError, match="complex128"),
    ):
        export_safetensors(reader, str(tmp_path / "out"), [(0, "x")])


def header(entries: Any, body: bytes = b"\0" * 16) -> bytes:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text + body


HOSTILE = {
    "empty": b"",
    "length": (1 << 60).to_bytes(8, "little") + b"{}",
    "not json": header(b"nonsense"),
    "beyond": header({"a": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}}),
    "shape": header({"a": {"dtype": "F32", "shape": [5], "data_offsets": [0, 16]}}),
    "negative": header({"a": {"dtype": "F32", "shape": [-4], "data_offsets": [0, 16]}}),
    "overlap": header({"a": {"dtype": "U8", "shape": [16], "data_offsets": [0, 16]},
                       "b": {"dtype": "U8", "shape": [8], "data_offsets": [8, 16]}}),
    "hole": header({"a": {"dtype": "U8", "shape": [8], "data_offsets": [8, 16]}}),
    "rest": header({"a": {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]}}),
    "dtype": header({"a": {"dtype": "OS", "shape": [16], "data_offsets": [0, 16]}}),
    "more fields": header({"a": {"dtype": "U8", "shape": [16], "data_offsets": [0, 16], "x": 1}}),
}  # fmt: skip


@pytest.mark.parametrize("attack", HOSTILE)
def test_hostile_safetensors_are_refused(tmp_path: pathlib.Path, attack: str) -> None:
    (tmp_path / "m.safetensors").write_bytes(HOSTILE[attack])
    store = LocalStore(str(tmp_path / "c"))
    with pytest.raises(Damage):
        import_safetensors(str(tmp_path / "m.safetensors"), store, step=0, created_s=1.0, nonce="aa")
    assert store.generations() == []


def test_an_index_cannot_point_outside(tmp_path: pathlib.Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    for name in ("../../x.safetensors", "/etc/x.safetensors", "a/b.safetensors", ".x.safetensors", "passwd"):
        index.write_text(json.dumps({"weight_map": {"a": name}}))
        with pytest.raises(Damage, match="no plain file name"):
            import_safetensors(str(tmp_path), LocalStore(str(tmp_path / "c")), step=0, created_s=1.0, nonce="aa")


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_safetensors_file_never_crashes_the_import(tmp_path: pathlib.Path, data: st.DataObject) -> None:
    save_file({"a": torch.arange(8.0), "b": torch.arange(3)}, tmp_path / "m.safetensors")
    content = bytearray((tmp_path / "m.safetensors").read_bytes())
    end = 8 + int.from_bytes(content[:8], "little")
    content[data.draw(st.integers(0, end - 1))] ^= 1 << data.draw(st.integers(0, 7))
    (tmp_path / "m.safetensors").write_bytes(content)
    nonce = f"n{next(NONCES)}"
    try:
        import_safetensors(
            str(tmp_path / "m.safetensors"), LocalStore(str(tmp_path / "c")), step=0, created_s=1.0, nonce=nonce
        )
    except (Damage, ConfigError):
        return


# DCP


def test_a_dcp_checkpoint_is_imported_whole(tmp_path: pathlib.Path) -> None:
    state = training_state()
    dcp.save(state, checkpoint_id=tmp_path / "dcp")
    store = LocalStore(str(tmp_path / "c"))
    number = import_dcp(str(tmp_path / "dcp"), store, step=4, created_s=1.0, nonce="aa")
    tree = load(tmp_path / "c", number).tree
    assert (tree["step"], tree["history"]) == (4, [1, 2.5, "x"])
    for name, tensor in state["model"].items():
        assert torch.equal(tree["model"][name], tensor)
    assert torch.equal(tree["optim"]["state"]["0"]["exp_avg"], state["optim"]["state"][0]["exp_avg"])
    assert tree["optim"]["param_groups"][0]["betas"] == (0.9, 0.999)


def test_what_is_exported_dcp_loads(tmp_path: pathlib.Path) -> None:
    state = training_state()
    with generation(tmp_path / "c", {**state, "array": torch.arange(5).numpy()}) as reader:
        export_dcp(reader, str(tmp_path / "dcp"), range(len(reader.tensors)))
    target = {"model": {k: torch.zeros_like(v) for k, v in state["model"].items()}, "step": 0}
    dcp.load(target, checkpoint_id=tmp_path / "dcp")
    assert target["step"] == 4
    assert all(torch.equal(target["model"][k], v) for k, v in state["model"].items())
    store = LocalStore(str(tmp_path / "again"))
    tree = load(tmp_path / "again", import_dcp(str(tmp_path / "dcp"), store, step=4, created_s=1.0, nonce="aa")).tree
    assert torch.equal(tree["optim"]["state"]["1"]["exp_avg_sq"], state["optim"]["state"][1]["exp_avg_sq"])
    assert tree["array"].tolist() == [0, 1, 2, 3, 4]


def test_some_tensors_are_exported_by_themselves(tmp_path: pathlib.Path) -> None:
    with generation(tmp_path / "c", training_state()) as reader:
        numbers = [reader.names["model.0.weight"]]
        want = reader.read_tensor(numbers[0])
        export_dcp(reader, str(tmp_path / "dcp"), numbers)
    target = {"model.0.weight": torch.zeros(7, 5)}
    dcp.load(target, checkpoint_id=tmp_path / "dcp")
    assert target["model.0.weight"].numpy().tobytes() == bytes(want)


def test_exporting_holds_no_more_than_a_tensor(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """24 tensors of a mebibyte: what Python holds stays at a few of them, and DCP is handed one at a time."""
    state = {f"w{n}": torch.full((1 << 18,), float(n)) for n in range(24)}
    with generation(tmp_path / "c", state) as reader:
        numbers = list(range(24))
        tracemalloc.start()
        try:
            export_safetensors(reader, str(tmp_path / "st"), all_of(reader))
            assert tracemalloc.get_traced_memory()[1] < 8 << 20
        finally:
            tracemalloc.stop()
        handed: list[weakref.ref[torch.Tensor]] = []
        most, made = 0, _dcp.fresh

        def counted(*args: Any) -> dict[int, torch.Tensor]:
            nonlocal most
            found = made(*args)
            handed.extend(weakref.ref(tensor) for tensor in found.values())
            most = max(most, sum(ref() is not None for ref in handed))
            return found

        monkeypatch.setattr(_dcp, "fresh", counted)
        export_dcp(reader, str(tmp_path / "dcp"), numbers)
    assert len(handed) == 24
    assert most <= 2


class Evil:
    def __init__(self, target: str) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return (os.mkdir, (self.target,))


def evil_metadata(path: pathlib.Path, payload: Any) -> None:
    path.mkdir(exist_ok=True)
    (path / ".metadata").write_bytes(payload if isinstance(payload, bytes) else pickle.dumps(payload))


def test_a_pickle_that_would_run_code_is_refused(tmp_path: pathlib.Path) -> None:
    for payload in (
        Evil(str(tmp_path / "harm")), {"x": Evil(str(tmp_path / "harm"))}, b"", b"junk", 7,
        collections.Counter(a=1), b"\x80\x04cbuiltins\neval\n.",
    ):  # fmt: skip
        evil_metadata(tmp_path / "dcp", payload)
        with pytest.raises(Damage):
            read_metadata(str(tmp_path / "dcp"))
    assert not (tmp_path / "harm").exists()


def tampered(tmp_path: pathlib.Path, change: Any) -> pathlib.Path:
    dcp.save({"w": torch.arange(12.0).view(3, 4), "o": {"k": [1]}}, checkpoint_id=tmp_path / "dcp")
    metadata = read_metadata(str(tmp_path / "dcp"))
    change(metadata)
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(metadata))
    return tmp_path / "dcp"


def _path(text: str) -> Any:
    def change(metadata: Any) -> None:
        for info in metadata.storage_data.values():
            info.relative_path = text

    return change


def _length(number: int) -> Any:
    def change(metadata: Any) -> None:
        for info in metadata.storage_data.values():
            info.length = number

    return change


def _size(*shape: int) -> Any:
    def change(metadata: Any) -> None:
        metadata.state_dict_metadata["w"].size = torch.Size(shape)
        metadata.state_dict_metadata["w"].chunks[0].sizes = torch.Size(shape)

    return change


def _nowhere(metadata: Any) -> None:
    metadata.storage_data.clear()


def _paths(metadata: Any) -> None:
    metadata.planner_data["w"] = ("o",)


@pytest.mark.parametrize(
    "change",
    [_path("../secret"), _path("/etc/passwd"), _length(1 << 60), _length(-1), _size(1 << 40, 1 << 10), _size(4, 4),
     _nowhere, _paths],
)  # fmt: skip
def test_hostile_metadata_is_refused_without_allocating(tmp_path: pathlib.Path, change: Any) -> None:
    path = tampered(tmp_path, change)
    store = LocalStore(str(tmp_path / "c"))
    with pytest.raises(Damage):
        import_dcp(str(path), store, step=0, created_s=1.0, nonce="aa")
    assert store.generations() == []


def test_a_compressed_item_is_refused(tmp_path: pathlib.Path) -> None:
    """torch writes its archives stored; a compressed one may unpack to any size."""
    path = tampered(tmp_path, lambda metadata: None)
    metadata = read_metadata(str(path))
    (index, info), *_ = [(i, s) for i, s in metadata.storage_data.items() if i.fqn == "w"]
    data = (path / info.relative_path).read_bytes()[info.offset : info.offset + info.length]
    (tmp_path / "in.zip").write_bytes(data)
    with (
        zipfile.ZipFile(tmp_path / "in.zip") as source,
        zipfile.ZipFile(path / "bomb", "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for entry in source.infolist():
            packed.writestr(entry.filename, source.read(entry))
    size = (path / "bomb").stat().st_size
    info.relative_path, info.offset, info.length = "bomb", 0, size
    metadata.storage_data[index] = info
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(Damage, match="compressed"):
        import_dcp(str(path), LocalStore(str(tmp_path / "c")), step=0, created_s=1.0, nonce="aa")


def test_a_flipped_bit_of_a_tensor_is_refused(tmp_path: pathlib.Path) -> None:
    """torch looks at none of the sums that it writes: the wrong tensor would be loaded, and get a right digest here."""
    tensor = torch.arange(1.0, 501.0)
    dcp.save({"w": tensor}, checkpoint_id=tmp_path / "dcp")
    (file,) = (tmp_path / "dcp").glob("*.distcp")
    data = bytearray(file.read_bytes())
    data[data.index(tensor.numpy().tobytes()) + 1000] ^= 4
    file.write_bytes(data)
    store = LocalStore(str(tmp_path / "c"))
    with pytest.raises(Damage, match=r"'w' cannot be read: Bad CRC-32"):
        import_dcp(str(tmp_path / "dcp"), store, step=0, created_s=1.0, nonce="aa")
    assert store.generations() == []


def test_what_was_saved_without_sums_is_imported(tmp_path: pathlib.Path) -> None:
    state, before = training_state(), torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        dcp.save(state, checkpoint_id=tmp_path / "dcp")
    finally:
        torch.serialization.set_crc32_options(before)
    store = LocalStore(str(tmp_path / "c"))
    tree = load(tmp_path / "c", import_dcp(str(tmp_path / "dcp"), store, step=4, created_s=1.0, nonce="aa")).tree
    assert all(torch.equal(tree["model"][name], tensor) for name, tensor in state["model"].items())


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
