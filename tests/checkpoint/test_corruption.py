"""Every wrong byte is found, named and survived by falling back; a hostile manifest costs nothing."""

from __future__ import annotations

import os
import pathlib
import shutil
from collections.abc import Callable

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outlast.checkpoint import CheckpointEngine, LoadedState, LocalStore, Retention, verify
from outlast.checkpoint.manifest import Chunk, Head, Part, PartRef, TensorSpec, digest, parse_head, parse_part, seal
from outlast.errors import CheckpointError, Damage

CHUNK = 8192


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outlast.checkpoint._writer.CHUNK_BYTES", CHUNK)


def state_of(step: int) -> dict[str, object]:
    generator = torch.Generator().manual_seed(step)
    return {
        "same": torch.arange(4000, dtype=torch.int32),
        "w": torch.randn(6000, generator=generator),
        "b": torch.full((3,), step, dtype=torch.bfloat16),
        "step": step,
    }


def equal(loaded: LoadedState) -> bool:
    want = state_of(loaded.step)
    same = all(torch.equal(loaded.tree[k], want[k]) for k in ("same", "w", "b"))  # type: ignore[arg-type]
    return same and loaded.tree["step"] == loaded.step


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Three generations; with small chunks, so that the last refers to files of the first."""
    where = tmp_path_factory.mktemp("pristine") / "ckpt"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("outlast.checkpoint._writer.CHUNK_BYTES", CHUNK)
        engine = CheckpointEngine(str(where), retention=Retention(keep_last=5))
        for step in range(3):
            handle = engine.save(step, state_of(step))
            assert handle is not None
            engine.commit(handle)
        engine.close()
    return where


@pytest.fixture
def damaged(pristine: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    shutil.copytree(pristine, tmp_path / "ckpt")
    return tmp_path / "ckpt"


def reached(where: pathlib.Path, generation: int) -> list[pathlib.Path]:
    store = LocalStore(str(where))
    head = parse_head(store.read_head(generation), file="head")
    files = [where / "manifests" / f"g{generation:010d}.json"]
    for ref in head.parts:
        part = parse_part((where / "data" / ref.name).read_bytes(), ref, num_writers=len(head.parts))
        files += [where / "data" / ref.name, *(where / "data" / f.name for f in part.files)]
    return files


def load(where: pathlib.Path) -> LoadedState | None:
    engine = CheckpointEngine(str(where))
    try:
        return engine.load()
    finally:
        engine.close()


def survives(where: pathlib.Path, *, file: str) -> LoadedState:
    """The damage is found, named, and an older generation (or the same from sound bytes) comes back right."""
    problems = verify(LocalStore(str(where)), 2).problems
    assert [p.file for p in problems if p.file == file], problems
    loaded = load(where)
    assert loaded is not None
    assert loaded.step < 2
    assert equal(loaded)
    assert any(file in s.file for s in loaded.skipped)
    return loaded


@settings(max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_flipped_bit_of_any_file_that_is_reached(pristine: pathlib.Path, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(reached(pristine, 2)))
    original = path.read_bytes()
    at = data.draw(st.integers(0, len(original) - 1))
    wrong = bytearray(original)
    wrong[at] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(wrong)
    try:
        problems = verify(LocalStore(str(pristine)), 2).problems
        in_chunks_of_2 = bool(problems)
        loaded = load(pristine)
        assert loaded is not None
        assert equal(loaded), "a loader that returns wrong tensors once has failed"
        assert (loaded.step < 2) == in_chunks_of_2
        older = all(verify(LocalStore(str(pristine)), g).problems == [] for g in (0, 1))
        assert in_chunks_of_2 or not older, "the byte belongs to some generation, and that one must notice"
    finally:
        path.write_bytes(original)


def _truncate(path: pathlib.Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def _lengthen(path: pathlib.Path) -> None:
    path.write_bytes(path.read_bytes() + bytes(4096))


def _empty(path: pathlib.Path) -> None:
    path.write_bytes(b"")


def _link_away(path: pathlib.Path) -> None:
    other = path.with_suffix(".elsewhere")
    path.rename(other)
    path.symlink_to(other)


@pytest.mark.parametrize("harm", [_truncate, _lengthen, _empty, pathlib.Path.unlink, _link_away])
@pytest.mark.parametrize("kind", ["head", "part", "data"])
def test_files_cut_short_lengthened_emptied_missing_or_linked(
    damaged: pathlib.Path, kind: str, harm: Callable[[pathlib.Path], None]
) -> None:
    head, part, *data = reached(damaged, 2)
    path = {"head": head, "part": part, "data": data[-1]}[kind]
    harm(path)
    if kind == "head" and not path.exists():
        loaded = load(damaged)  # a generation without a head was never published
        assert loaded is not None
        assert loaded.step == 1
        return
    survives(damaged, file=path.name)


@pytest.mark.parametrize("kind", ["head", "part", "data"])
def test_an_old_file_under_a_new_name(damaged: pathlib.Path, kind: str) -> None:
    new, old = reached(damaged, 2), reached(damaged, 1)
    index = {"head": 0, "part": 1, "data": -1}[kind]
    target, source = new[index], old[index]
    if kind == "data":
        source_bytes = (source.read_bytes() * 9)[: target.stat().st_size]
        target.write_bytes(source_bytes)
    else:
        shutil.copy(source, target)
    survives(damaged, file=target.name)


@pytest.mark.parametrize("harm", ["swap", "duplicate"])
def test_reordered_and_duplicated_chunks(damaged: pathlib.Path, harm: str) -> None:
    path = reached(damaged, 2)[-1]
    data = path.read_bytes()
    assert len(data) >= 2 * CHUNK
    first, second, rest = data[:CHUNK], data[CHUNK : 2 * CHUNK], data[2 * CHUNK :]
    path.write_bytes((second + first if harm == "swap" else first + first) + rest)
    problems = verify(LocalStore(str(damaged)), 2).problems
    assert {name for p in problems for name in p.tensors} <= {"same", "w", "b"}
    assert all(p.tensors for p in problems)
    survives(damaged, file=path.name)


def test_a_manifest_from_the_future_says_so(damaged: pathlib.Path) -> None:
    path = reached(damaged, 2)[0]
    head = parse_head(path.read_bytes(), file="head")
    path.write_bytes(seal(msgspec.structs.replace(head, format=9)))
    loaded = survives(damaged, file=path.name)
    assert "a newer outlast" in loaded.skipped[0].reason


def test_when_nothing_serves_it_says_what_was_tried(damaged: pathlib.Path) -> None:
    for path in (damaged / "data").iterdir():
        path.write_bytes(b"x")
    with pytest.raises(CheckpointError, match="no generation of 3 could be loaded"):
        load(damaged)


def test_the_farther_tier_mends_the_nearer_one(damaged: pathlib.Path, pristine: pathlib.Path) -> None:
    path = reached(damaged, 2)[-1]
    path.write_bytes(bytes(path.stat().st_size))
    engine = CheckpointEngine(str(damaged), drain_to=str(pristine))
    loaded = engine.load()
    engine.close()
    assert loaded is not None
    assert (loaded.step, equal(loaded)) == (2, True)
    assert {s.file for s in loaded.skipped} == {path.name}


# hostile manifests


def forged(where: pathlib.Path, change: Callable[[Part], Part]) -> LoadedState | None:
    """Generation 2's part, changed and correctly sealed and referred to: only its content can give it away."""
    head_path, part_path, *_ = reached(where, 2)
    head = parse_head(head_path.read_bytes(), file="head")
    part = change(parse_part(part_path.read_bytes(), head.parts[0], num_writers=1))
    data = seal(part)
    part_path.write_bytes(data)
    ref = PartRef(writer=0, name=part_path.name, bytes=len(data), digest=digest(data))
    head_path.write_bytes(seal(msgspec.structs.replace(head, parts=[ref], bytes=part.stream_bytes)))
    return load(where)


def with_tensors(part: Part, tensors: list[TensorSpec]) -> Part:
    return msgspec.structs.replace(part, tensors=tensors, schema=digest(msgspec.json.encode(tensors)))


def first_tensor(part: Part, **changes: object) -> Part:
    assert part.tensors is not None
    return with_tensors(part, [msgspec.structs.replace(part.tensors[0], **changes), *part.tensors[1:]])


def file_name(part: Part, name: str) -> Part:
    return msgspec.structs.replace(part, files=[msgspec.structs.replace(part.files[0], name=name), *part.files[1:]])


HOSTILE: dict[str, Callable[[Part], Part]] = {
    "outside": lambda p: file_name(p, "../../../etc/passwd.bin"),
    "absolute": lambda p: file_name(p, "/etc/hostname.bin"),
    "hidden": lambda p: file_name(p, ".hidden.bin"),
    "nul": lambda p: file_name(p, "a\0b.bin"),
    "long": lambda p: file_name(p, "a" * 300 + ".bin"),
    "huge": lambda p: first_tensor(p, shape=(1 << 40, 1 << 10)),
    "overflow": lambda p: first_tensor(p, shape=(1 << 62, 1 << 62)),
    "negative": lambda p: first_tensor(p, shape=(-4000,)),
    "many dimensions": lambda p: first_tensor(p, shape=(1,) * 1000),
    "dtype": lambda p: first_tensor(p, dtype="__class__"),
    "same name": lambda p: first_tensor(p, name="w"),
    "wider": lambda p: first_tensor(p, dtype="complex128"),
    "chunk beyond": lambda p: msgspec.structs.replace(
        p, chunks=[Chunk(0, 1 << 50, c.bytes, c.digest) for c in p.chunks]
    ),
    "chunk huge": lambda p: msgspec.structs.replace(
        p, chunks=[Chunk(0, 0, 1 << 60, "0" * 32)], stream_bytes=1 << 60
    ),
    "chunk before": lambda p: msgspec.structs.replace(p, chunks=[Chunk(0, -4096, c.bytes, c.digest) for c in p.chunks]),
    "stream longer": lambda p: msgspec.structs.replace(p, stream_bytes=p.stream_bytes + 1),
    "no pieces": lambda p: msgspec.structs.replace(p, pieces=[]),
    "twice": lambda p: msgspec.structs.replace(p, pieces=[p.pieces[0], *p.pieces]),
    "piece elsewhere": lambda p: msgspec.structs.replace(
        p, pieces=[msgspec.structs.replace(p.pieces[0], offset=(1 << 30,)), *p.pieces[1:]]
    ),
    "tensor number": lambda p: msgspec.structs.replace(
        p, pieces=[msgspec.structs.replace(p.pieces[0], tensor=99), *p.pieces[1:]]
    ),
    "tree tag": lambda p: msgspec.structs.replace(p, tree={"os.system": ["true"]}),
    "tree index": lambda p: msgspec.structs.replace(p, tree={"T": 99}),
    "tree nonsense": lambda p: msgspec.structs.replace(p, tree={"d": [[{"l": []}, 1]]}),
    "tree float": lambda p: msgspec.structs.replace(p, tree={"f": "zz"}),
    "tree deep": lambda p: msgspec.structs.replace(p, tree=_deep(450)),
    "quantised": lambda p: msgspec.structs.replace(p, tree={"q": ["qint8", 0, {"f": "x"}, "y"]}),
}  # fmt: skip


def _deep(depth: int) -> object:
    node: object = 1
    for _ in range(depth):
        node = {"l": [node]}
    return node


@pytest.mark.parametrize("attack", HOSTILE)
def test_hostile_manifests_are_refused_and_survived(damaged: pathlib.Path, attack: str) -> None:
    loaded = forged(damaged, HOSTILE[attack])
    assert loaded is not None
    assert loaded.step == 1, "the forged generation must not serve"
    assert equal(loaded)
    assert loaded.skipped


ABSURD: dict[str, dict[str, str]] = {
    "no JSON": {"config": "rm -rf /"},
    "no table": {"facts": "[1, 2]"},
    "nested": {"config": '{"a": {"b": 1}}'},
    "deep": {"checkpoint": '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}"},
    "endless number": {"config": '{"a": ' + "9" * 100_000 + "}"},
    "beyond floats": {"config": '{"a": 1e999}'},
    "half a character": {"config": '{"a": "\\ud800"}'},
    "too long": {"note": "x" * (1 << 20)},
    "too many": {str(n): "x" for n in range(300_000)},
}


@pytest.mark.parametrize("attack", ABSURD)
def test_settings_that_nobody_would_write_are_refused(damaged: pathlib.Path, attack: str) -> None:
    head_path, *_ = reached(damaged, 2)
    head = parse_head(head_path.read_bytes(), file="head")
    head_path.write_bytes(seal(msgspec.structs.replace(head, extra=ABSURD[attack])))
    loaded = load(damaged)
    assert loaded is not None
    assert loaded.step == 1, "the forged generation must not serve"
    assert equal(loaded)


def test_other_keys_and_a_head_without_any_are_read(damaged: pathlib.Path) -> None:
    head_path, *_ = reached(damaged, 2)
    head = parse_head(head_path.read_bytes(), file="head")
    assert head.extra == {}, "an older outlast wrote such"
    head_path.write_bytes(seal(msgspec.structs.replace(head, extra={"plugin": "not JSON", "config": '{"new": null}'})))
    loaded = load(damaged)
    assert loaded is not None
    assert (loaded.step, loaded.extra["plugin"]) == (2, "not JSON")


def test_a_bomb_that_shares_one_chunk_is_refused_without_allocating(damaged: pathlib.Path) -> None:
    """One real chunk, referred to two hundred thousand times: 1.6 GB claimed from 8 KiB on disk."""
    repeats = 200_000

    def bomb(part: Part) -> Part:
        chunk = part.chunks[0]
        stream = chunk.bytes * repeats
        spec = TensorSpec("same", "complex128", (stream // 16,))
        piece = msgspec.structs.replace(part.pieces[0], tensor=0, shape=spec.shape)
        small = msgspec.structs.replace(part, chunks=[chunk] * repeats, stream_bytes=stream, pieces=[piece], tree=1)
        return with_tensors(small, [spec])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.sysconf", lambda name: 1000)  # a machine of one megabyte
        loaded = forged(damaged, bomb)
    assert loaded is not None
    assert loaded.step == 1
    assert any("this machine has" in s.reason for s in loaded.skipped)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=200)
@given(value=json_values, junk=st.binary(max_size=40), how=st.sampled_from(["json", "sealed", "bytes"]))
def test_no_junk_passes_for_a_head_or_crashes_the_parser(value: object, junk: bytes, how: str) -> None:
    body = msgspec.json.encode({"format": 1, "x": value}).removeprefix(b"{") + b"\n"
    sealed = b'{"xxh3_128":"' + digest(body).encode() + b'",\n' + body
    data = {"json": msgspec.json.encode(value), "sealed": sealed, "bytes": junk}[how]
    with pytest.raises(Damage):
        parse_head(data, file="x")
    ref = PartRef(writer=0, name="x.json", bytes=len(data), digest=digest(data))
    with pytest.raises(Damage):
        parse_part(data, ref, num_writers=1)


@settings(max_examples=150)
@given(field=st.sampled_from(list(Head.__struct_fields__)), value=json_values)
def test_a_head_with_any_field_replaced_is_refused_or_still_sane(field: str, value: object) -> None:
    head = Head(
        format=1, generation=3, step=3, view=(1, 1), save="s", run="", certified=False, created_s=1.0, bytes=10,
        parts=[PartRef(writer=0, name="a.json", bytes=10, digest="0" * 32)],
    )  # fmt: skip
    document = msgspec.json.decode(seal(head))
    document[field] = value
    body = msgspec.json.encode({k: v for k, v in document.items() if k != "xxh3_128"}).removeprefix(b"{") + b"\n"
    try:
        parsed = parse_head(b'{"xxh3_128":"' + digest(body).encode() + b'",\n' + body, file="x", generation=3)
    except Damage:
        return
    assert parsed.generation == 3
    assert parsed.step >= -1
    assert len(parsed.parts) == 1
