"""Object stores: an S3 server (moto) behind a proxy that fails, stalls and cuts connections."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.checkpoint.s3 import Proxy, new_place, proxied, serving

from outlast.checkpoint import CheckpointEngine, ObjectStore, Retention, heads, open_store, verify
from outlast.checkpoint import save_events as events
from outlast.cli import main
from outlast.errors import CheckpointError, ConfigError, Damage

pytest.importorskip("moto.server", reason="needs moto[server]")


@pytest.fixture(scope="module")
def upstream() -> Iterator[int]:
    with serving() as port:
        yield port


@pytest.fixture
def proxy(upstream: int) -> Iterator[Proxy]:
    with proxied(upstream) as server:
        yield server


@pytest.fixture
def url(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> str:
    place, environ = new_place(proxy)
    for key, value in environ.items():
        monkeypatch.setenv(key, value)
    return place


def state(value: float, num: int = 300_000) -> dict[str, Any]:
    return {"w": torch.full((num,), value), "step": value}


def quick(url: str, **more: Any) -> ObjectStore:
    return ObjectStore(url, timeout_s=1.0, connect_timeout_s=1.0, max_retries=1, retry_timeout_s=2.0, **more)


def commit(engine: CheckpointEngine, step: int, value: float | None = None) -> int:
    handle = engine.save(step, state(step if value is None else value))
    assert handle is not None
    return engine.commit(handle)


def test_save_load_verify_and_prune_on_s3(url: str) -> None:
    engine = CheckpointEngine(url, retention=Retention(keep_last=2))
    for step in range(3):
        commit(engine, step)
    loaded = engine.load()
    assert loaded is not None
    assert (loaded.step, loaded.tier) == (2, "object")
    assert torch.equal(loaded.tree["w"], state(2)["w"])
    assert engine.store.generations() == [1, 2]
    assert verify(engine.store, 2).problems == []
    assert {n.split("-")[2] for n in engine.store.names()} == {"s1", "s2"}
    engine.close()


def test_every_command_takes_a_url(url: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = CheckpointEngine(url)
    for step in range(3):
        commit(engine, step)
    engine.close()

    def said(*args: str, code: int = 0) -> Any:
        assert main(["ckpt", *args, "--json"]) == code
        return json.loads(capsys.readouterr().out)

    for form in ("safetensors", "dcp"):
        assert said("export", f"{url}@1", f"file://{tmp_path}/{form}", "--format", form)["generation"] == 1
        assert said("import", f"file://{tmp_path}/{form}", f"{url}/{form}", "--step", "5")["generation"] == 0
        same = {"tensors": [], "values": [], "other_values_differ": False, "settings": {}}
        assert said("diff", f"{url}@1", f"{url}/{form}") == same
    assert [row["generation"] for row in said("ls", url)] == [2, 1, 0]
    assert said("show", url)["tensors"][0]["shape"] == [300_000]
    assert [report["problems"] for report in said("verify", url, "--all")] == [[], [], []]
    assert said("diff", f"{url}@0", url, code=1)["tensors"][0]["max_abs"] == 2.0
    assert said("prune", url, "--keep-last", "1")["generations"] == [0, 1]
    assert [row["generation"] for row in said("ls", url)] == [2]
    for args in (["export", url, "s3://other/place"], ["import", "s3://other/place", url]):
        assert "is not on this machine" in said(*args, code=2)["error"]["message"]


def test_publication_is_exclusive_by_conditional_put(url: str) -> None:
    first, second = open_store(url), open_store(url)
    assert first.publish(7, b"one") is True
    assert second.publish(7, b"two") is False
    assert second.read_head(7) == b"one"


def test_a_reader_holds_its_generation(url: str) -> None:
    engine = CheckpointEngine(url, retention=Retention(keep_last=1))
    commit(engine, 0)
    with open_store(url).in_use(0):
        commit(engine, 1)
        assert engine.store.generations() == [0, 1]
    engine.prune()
    assert engine.store.generations() == [1]
    engine.close()


def test_what_is_missing_is_damage_and_what_is_refused_is_an_os_error(url: str, proxy: Proxy) -> None:
    store = quick(url)
    with pytest.raises(Damage, match="missing"):
        store.read_part("nothing.json", 100)
    assert store.size("nothing.bin") is None
    proxy.fault = lambda method, path: "500"
    with pytest.raises(OSError, match="runs/a"):
        store.generations()


@pytest.mark.parametrize("fault", ["500", "stall", "cut"])
def test_a_server_that_fails_costs_the_save_and_nothing_else(url: str, proxy: Proxy, fault: str) -> None:
    log: list[Any] = []
    engine = CheckpointEngine(quick(url), on_event=log.append, num_retries=1, retry_s=0.01)
    assert commit(engine, 1) == 0
    proxy.fault = lambda method, path: fault if method in {"PUT", "POST"} else "ok"
    handle = engine.save(2, state(2.0))
    assert handle is not None
    handle.wait_copied()  # the step goes on
    with pytest.raises(CheckpointError, match="could not write step 2"):
        handle.durable.result(60)
    proxy.fault = lambda method, path: "ok"
    proxy.released.set()
    assert [type(e) for e in log].count(events.SaveFailed) == 1
    loaded = engine.load()
    assert loaded is not None
    assert loaded.step == 1
    assert commit(engine, 3) == 1
    engine.close()


def test_a_passing_fault_is_retried(url: str, proxy: Proxy) -> None:
    engine = CheckpointEngine(ObjectStore(url, timeout_s=5.0, max_retries=3), num_retries=2, retry_s=0.01)
    seen: list[str] = []

    def flaky(method: str, path: str) -> str:
        seen.append(path)
        return "500" if len(seen) % 3 == 1 else "ok"

    proxy.fault = flaky
    assert commit(engine, 1) == 0
    proxy.fault = lambda method, path: "ok"
    assert verify(engine.store, 0).problems == []
    engine.close()


def test_a_stalled_far_tier_does_not_hold_the_near_one_up(url: str, proxy: Proxy, tmp_path: pathlib.Path) -> None:
    log: list[Any] = []
    engine = CheckpointEngine(
        str(tmp_path), drain_to=quick(url), retention=Retention(keep_last=1), on_event=log.append, num_retries=0
    )
    proxy.fault = lambda method, path: "stall"
    for step in range(4):
        commit(engine, step)
    assert engine.store.generations()[-1] == 3
    assert len(engine.store.generations()) <= 2, "local disk does not fill while the far tier hangs"
    proxy.fault = lambda method, path: "ok"
    proxy.released.set()
    engine.close()
    good, bad = heads(open_store(url))
    assert bad == {}
    assert [h.generation for h in good] == [3], "the newest is drained as soon as the far tier answers"
    assert [e.generation for e in log if isinstance(e, events.Drained)][-1] == 3


def test_a_far_tier_that_is_down_is_told_and_nothing_else(url: str, proxy: Proxy, tmp_path: pathlib.Path) -> None:
    log: list[Any] = []
    engine = CheckpointEngine(str(tmp_path), drain_to=quick(url), on_event=log.append, num_retries=0)
    proxy.fault = lambda method, path: "cut"
    commit(engine, 1)
    engine.close()
    (failed,) = [e for e in log if isinstance(e, events.DrainFailed)]
    assert failed.generation == 0
    assert url in failed.reason


def test_large_files_go_up_in_parts(url: str, proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outlast.checkpoint._objects._BUFFER_BYTES", 5 << 20)
    engine = CheckpointEngine(url)
    handle = engine.save(1, {"w": torch.arange(1_800_000, dtype=torch.float32)})
    assert handle is not None
    engine.commit(handle)
    assert any("partNumber=2" in path for _, path in proxy.requests)
    assert verify(engine.store, 0).problems == []
    engine.close()


def test_draining_to_s3_and_loading_from_there(url: str, tmp_path: pathlib.Path) -> None:
    engine = CheckpointEngine(str(tmp_path / "near"), drain_to=url)
    commit(engine, 1)
    engine.close()
    elsewhere = CheckpointEngine(str(tmp_path / "other host"), drain_to=url)
    loaded = elsewhere.load()
    assert loaded is not None
    assert (loaded.step, loaded.tier) == (1, "object")
    assert torch.equal(loaded.tree["w"], state(1)["w"])
    elsewhere.close()


def test_an_unknown_scheme_says_what_is_known() -> None:
    with pytest.raises(ConfigError, match="ftp") as raised:
        open_store("ftp://host/x")
    assert "s3://" in raised.value.remedy


def test_two_live_runs_on_one_prefix_see_each_other_and_one_alone_reads_nothing_for_it(url: str, proxy: Proxy) -> None:
    """No lock refuses the second one; each is told at its next publication, once, and what was published stays."""
    told: dict[str, list[str]] = {"one": [], "two": []}

    def run(name: str) -> CheckpointEngine:
        def note(event: events.CheckpointEvent) -> None:
            if isinstance(event, events.Neighbour):
                told[name].append(event.detail)

        return CheckpointEngine(url, run=name, retention=Retention(keep_last=9), on_event=note)

    one, two = run("one"), run("two")
    commit(one, 0)
    commit(one, 1)
    commit(two, 5)  # a run that goes on where another was: no neighbour
    assert told == {"one": [], "two": []}
    commit(one, 2)
    assert told["two"] == []
    (text,) = told["one"]
    assert text.startswith(f"another run saves at {url}, too: run two published generation 2.")
    commit(two, 6)
    commit(one, 3)
    assert [len(found) for found in told.values()] == [1, 1], "once, not after each save"
    assert verify(open_store(url), 5).problems == []
    one.close()
    two.close()


def test_an_import_into_a_live_run_s_place_is_no_other_run(url: str) -> None:
    found: list[events.CheckpointEvent] = []
    one, other = CheckpointEngine(url, run="one", on_event=found.append), CheckpointEngine(url, run="import-abc")
    commit(one, 0)
    commit(other, 1)
    commit(one, 2)
    assert not any(isinstance(event, events.Neighbour) for event in found)
    one.close()
    other.close()
