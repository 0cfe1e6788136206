"""Names: patterns that match nothing, models' own names in exports, tied ones, and values named by `diff`."""

from __future__ import annotations

import json
import pathlib
import pickle
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.runtime.test_init_from import Net, train

from outlast.checkpoint import CheckpointEngine
from outlast.checkpoint.values import values_that_differ
from outlast.cli import main
from outlast.errors import ConfigError

pytestmark = pytest.mark.usefixtures("training_here")


def save(path: pathlib.Path, *trees: Any) -> CheckpointEngine:
    engine = CheckpointEngine(str(path))
    for step, tree in enumerate(trees):
        handle = engine.save(step, tree)
        assert handle is not None
        engine.commit(handle)
    return engine


def run(capsys: pytest.CaptureFixture[str], *args: object, code: int = 0) -> Any:
    capsys.readouterr()
    assert main(["ckpt", *map(str, args)]) == code
    return capsys.readouterr()


@pytest.mark.parametrize("into", [False, True])
def test_a_pattern_that_matches_nothing_is_told_with_what_is_near(
    tmp_path: pathlib.Path, into: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = {"model": {"head.weight": torch.ones(2), "head.bias": torch.ones(1)}}
    engine = save(tmp_path / "c", tree)
    with pytest.raises(ConfigError, match=r"(?s)no tensor matches 'model.head.wieght'.*mean 'model.head.weight'"):
        engine.load(names=["model.head.bias", "model.head.wieght"], into=tree if into else None)
    loaded = engine.load(names=["model.head.b*"])
    assert loaded is not None
    assert list(loaded.tensors) == ["model.head.bias"]
    engine.close()
    for words in (["export", tmp_path / "c", tmp_path / "out"], ["show", tmp_path / "c"]):
        assert "did you mean 'model.head.bias'" in run(capsys, *words, "--names", "model.head.bais*", code=2).err


def test_diff_names_values_by_their_path(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    def tree(lr: float, **more: Any) -> Any:
        return {"w": torch.ones(3), "optimizers": [{"groups": [{"lr": lr, "betas": (0.9, 0.99)}]}], **more}

    save(tmp_path / "c", tree(0.1), tree(0.05, count=7), tree(0.05, count=7)).close()
    told = run(capsys, "diff", f"{tmp_path}/c@0", f"{tmp_path}/c@1", code=1).out
    assert "optimizers.0.groups.0.lr  0.1       0.05" in told
    found = json.loads(run(capsys, "diff", f"{tmp_path}/c@0", f"{tmp_path}/c@1", "--json", code=1).out)
    assert found["values"][1] == {"path": "count", "first": "(absent)", "second": "7"}
    assert "to the bit" in run(capsys, "diff", f"{tmp_path}/c@1", f"{tmp_path}/c@2").out


def test_values_of_every_kind_are_told_apart() -> None:
    import struct

    def bits(value: float) -> Any:
        return {"f": struct.pack(">d", value).hex()}

    a = {"d": [["x", {"l": [1, None, bits(0.0)]}], ["t", {"T": 3}], [{"b": ""}, "text"]]}
    b = {"d": [["x", {"l": [True, None, bits(-0.0)]}], ["t", {"T": 4}], [{"b": ""}, "texts"]]}
    assert [(d.path, d.first, d.second) for d in values_that_differ(a, b)] == [
        ("x.0", "1", "true"), ("x.2", "0.0", "-0.0"), ('{"b":""}', '"text"', '"texts"'),
    ]  # fmt: skip


@pytest.mark.parametrize("off", [False, True])
def test_an_export_has_the_model_s_own_names_tied_ones_among_them(
    tmp_path: pathlib.Path, off: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if off:
        monkeypatch.setenv("OUTLAST", "off")
    model, place = Net(1), tmp_path / "run"
    train(model, 3, dir=str(place), every=3)
    run(capsys, "export", place, tmp_path / "out", "--names", "model.*", "--strip-prefix", "model")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert tensors.keys() == model.state_dict().keys()
    fresh = Net(2)
    fresh.load_state_dict(tensors, strict=True)
    assert all(torch.equal(value, fresh.state_dict()[name]) for name, value in model.state_dict().items())
    kept = run(capsys, "export", place, tmp_path / "kept", "--names", "model.*")
    assert "--strip-prefix model" in kept.err
    assert "model.again.weight" in load_file(tmp_path / "kept" / "model.safetensors")


def test_a_prefix_that_no_name_has_and_one_for_dcp_are_refused(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path / "c", {"w": torch.ones(1)}).close()
    assert (
        "begins with 'modle.'"
        in run(capsys, "export", tmp_path / "c", tmp_path / "o", "--strip-prefix", "modle", code=2).err
    )
    words = ["export", tmp_path / "c", tmp_path / "p", "--strip-prefix", "w", "--format", "dcp"]
    assert "with dcp" in run(capsys, *words, code=2).err


def test_what_is_wrong_with_a_source_does_not_send_to_verify(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(3))
    (tmp_path / "m.safetensors").write_bytes(b"x" * 30)
    for source in ("dcp", "m.safetensors"):
        told = run(capsys, "import", tmp_path / source, tmp_path / "c", code=7).err
        assert "ckpt verify" not in told
        assert "nothing was imported" in told
