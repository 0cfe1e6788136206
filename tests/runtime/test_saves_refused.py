"""Places that refuse in the middle of a run: training goes on, it is said, and saving goes on when they serve again."""

from __future__ import annotations

import io
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.checkpoint.s3 import Proxy, new_place, proxied, serving
from tests.runtime.generations import assert_generations, began, failed, position, strike

from outlast.checkpoint import heads, open_store
from outlast.core import events as ev
from outlast.core.phases import Phase
from outlast.observe import Live

pytestmark = [pytest.mark.process, pytest.mark.campaign]


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    pytest.importorskip("moto.server", reason="needs moto[server]")
    with serving() as port, proxied(port) as server:
        yield server


@pytest.fixture
def url(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> str:
    place, environ = new_place(proxy)
    for key, value in environ.items():
        monkeypatch.setenv(key, value)
    return place


def steps_in(place: str) -> list[int]:
    return sorted(head.step for head in heads(open_store(place))[0])


def said(run: Any) -> str:
    """What the terminal shows of this journal."""
    text = io.StringIO()
    live = Live(run.driven.run_dir, stream=text)
    live.poll()
    live.close()
    return text.getvalue()


def writes(part: str, fault: str) -> Callable[[str, str], str]:
    """A server on which what has `part` in its name can be read but not written."""
    return lambda method, path: fault if method in {"PUT", "POST"} and part in path else "ok"


@pytest.mark.soak  # two minutes, and more where the machine is busy: the client's own retries are waited for
@pytest.mark.timeout(600)
def test_an_s3_server_that_fails_cuts_and_stalls(fleet: Callable[..., Any], proxy: Proxy, url: str) -> None:
    """Steps 8 and 12 are lost to it, 16 waits until it answers; then all processes die, and S3 has what they need."""
    # Two may be in flight: one writer gives step 8 up while the other still tries, and step 12 is not to wait for it.
    checkpoint = {"dir": url, "every": 4, "num_slots": 3}
    run = fleet(replicas=2, steps=20, gates=(5, 9, 13, 17), checkpoint=checkpoint)
    run.until("step 4 was saved", lambda: [e.step for e in run.saved()] == [4])
    proxy.fault = writes("/data/", "500")
    run.gate(5, "the server fails", lambda: True)
    run.until("the save of step 8 failed", lambda: [e.step for e in failed(run)] == [8])
    proxy.fault = writes("/manifests/", "cut")
    run.gate(9, "training had gone on", lambda: run.driven.step >= 8)
    run.until("the save of step 12 failed", lambda: [e.step for e in failed(run)] == [8, 12])
    assert steps_in(url) == [4], "the previous generation stays"
    proxy.fault = lambda method, path: "stall"
    run.gate(13, "training had gone on", lambda: run.driven.step >= 12)
    run.until("the save of step 16 was under way", lambda: 16 in began(run) and run.driven.step >= 16)
    assert [e.step for e in run.saved()] == [4]
    proxy.fault = lambda method, path: "ok"
    proxy.released.set()
    run.until("step 16 was saved", lambda: [e.step for e in run.saved()] == [4, 16])
    assert [(e.step, e.cause) for e in failed(run)] == [(8, "writer_failed"), (12, "publish_failed")]
    for step in (8, 12):
        assert f"the save of step {step} came to nothing" in said(run)
    assert url in said(run)
    run.kill_whole()
    again = fleet(replicas=3, steps=20, checkpoint_dir=url, checkpoint_every=4)
    again.assert_unchanged(survivors={"r0.1", "r1.1", "r2.1"}, recoveries=0)
    loaded = [e for e in again.driven.events if isinstance(e, ev.CheckpointLoaded)]
    assert [(e.step, e.tier) for e in loaded] == [(16, "object")] * 3
    assert assert_generations(url) == [4, 16, 20]


@pytest.mark.parametrize("resume", ["auto", pytest.param("never", marks=pytest.mark.soak)])
def test_every_replica_dies_while_the_store_is_away(
    fleet: Callable[..., Any], proxy: Proxy, url: str, resume: str
) -> None:
    """The host's memory has the state: the run goes on from there, and saves when the store is back."""
    run = fleet(replicas=2, steps=12, gates=(5, 9), checkpoint_dir=url, checkpoint_every=4, resume=resume)
    run.until("step 4 was saved", lambda: [e.step for e in run.saved()] == [4])
    proxy.fault = lambda method, path: "cut"
    for name in ("r0.1", "r1.1"):
        run.strike(run.pid(name))
    run.gate(5, "they were gone", lambda: run.exited("r0.1") and run.exited("r1.1"))
    loaded = lambda: [e for e in run.driven.events if isinstance(e, ev.CheckpointLoaded)]  # noqa: E731
    run.until("both had begun again", lambda: len(loaded()) == 2)
    assert [(e.step, e.tier) for e in loaded()] == [(4, "memory")] * 2
    proxy.fault = lambda method, path: "ok"
    run.gate(9, "the store is back", lambda: run.driven.step >= 8)
    run.assert_unchanged(survivors={"r0.2", "r1.2"}, recoveries=2, may_lose=True)
    assert run.saved()[-1].step == 12
    assert assert_generations(url) == [e.step for e in run.saved()]


def test_what_all_had_promised_is_published_in_the_next_view(fleet: Callable[..., Any], proxy: Proxy, url: str) -> None:
    """The store takes its time over the generation's name; meanwhile a writer dies and the view changes."""
    arrived, go_on = threading.Event(), threading.Event()

    def slow(method: str, path: str) -> str:
        if method == "PUT" and "/manifests/" in path:
            arrived.set()
            go_on.wait(50)
        return "ok"

    proxy.fault = slow
    run = fleet(replicas=3, steps=12, gates=(5, 9), checkpoint_dir=url, checkpoint_every=4, max_restarts=0)
    run.until("the name of step 4 was on its way", arrived.is_set)
    run.strike(run.pid("r1.1"))
    run.gate(5, "it was gone", lambda: run.exited("r1.1"))
    run.until("the view had changed", lambda: run.driven.members == ["r0.1", "r2.1"])
    assert run.saved() == []
    go_on.set()
    run.gate(9, "step 4 was saved", lambda: any(e.step == 4 for e in run.saved()))
    run.assert_unchanged(survivors={"r0.1", "r2.1"}, recoveries=1)
    assert failed(run) == []
    assert [e.num_writers for e in run.saved()] == [3, *[2] * (len(run.saved()) - 1)]
    change = position(run, ev.ViewInstalled, members=["r0.1", "r2.1"])
    assert position(run, ev.CheckpointBegan, step=4) < change < position(run, ev.CheckpointSaved, step=4)
    assert assert_generations(url) == [e.step for e in run.saved()]


@pytest.fixture
def own_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system whose rights can be taken away also from root."""
    place = tmp_path / "disk"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(place)], capture_output=True).returncode:
        pytest.skip("this process may not mount a file system")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_permission_lost_midway_and_given_back(fleet: Callable[..., Any], own_disk: Path) -> None:
    place = own_disk / "c"
    run = fleet(replicas=2, steps=16, gates=(5, 9), checkpoint_dir=str(place), checkpoint_every=4)
    run.until("step 4 was saved", lambda: [e.step for e in run.saved()] == [4])
    remount = ["mount", "-o", "remount,ro", str(own_disk)]  # refused as long as somebody has a file there to write to
    run.gate(5, "the disk may only be read", lambda: subprocess.run(remount, capture_output=True).returncode == 0)
    run.until("the save of step 8 failed", lambda: [e.step for e in failed(run)] == [8])
    assert steps_in(str(place)) == [4]
    assert "Read-only file system" in said(run)
    subprocess.run(["mount", "-o", "remount,rw", str(own_disk)], check=True)
    run.gate(9, "training had gone on", lambda: run.driven.step >= 8)
    run.assert_unchanged(survivors={"r0.1", "r1.1"}, recoveries=0)
    assert [e.step for e in run.saved()][-1] == 16
    assert assert_generations(place) == [e.step for e in run.saved()]


def test_a_write_that_never_returns_costs_its_save_and_holds_nobody_up(
    fleet: Callable[..., Any], tmp_path: Path
) -> None:
    """r1's disk hangs in its second save. Its memory stays taken, so no more is saved; the run ends all the same."""
    place = tmp_path / "c"
    checkpoint = {"dir": str(place), "every": 2, "timeout_s": 8.0}  # which the other's disk, a busy one, keeps to
    run = fleet(
        strike("r1", Phase.SAVE_WRITTEN, 2, "hang"), replicas=2, steps=12, gates=(7,), checkpoint=checkpoint,
        max_restarts=0,
    )  # fmt: skip
    run.gate(7, "a save was given up", lambda: failed(run) != [])
    run.assert_unchanged(
        survivors={"r0.1", "r1.1"}, recoveries=0, code=10
    )  # UNSAVED: the last step is in no checkpoint
    lost = failed(run)[0]
    assert lost.cause == "writer_failed"
    assert "has not returned for 8 s" in lost.reason
    assert lost.step not in assert_generations(place)
    delayed = [e for e in run.driven.events if isinstance(e, ev.CheckpointDelayed)]
    assert {e.replica for e in delayed} == {"r1.1"}
    assert f"the write of step {lost.step} to {place} has not returned" in delayed[0].reason
    assert assert_generations(place) == [e.step for e in run.saved()]
    assert "has not returned" in said(run)


def test_a_publication_that_never_returns_is_told_and_the_run_ends(fleet: Callable[..., Any], tmp_path: Path) -> None:
    place = tmp_path / "c"
    run = fleet(
        strike("coordinator.1", Phase.PUBLISH_BEGAN, 2, "hang"), replicas=2, steps=12, gates=(3, 7),
        checkpoint={"dir": str(place), "every": 2, "timeout_s": 8.0},
    )  # fmt: skip
    run.gate(3, "the first was published", lambda: run.saved() != [])  # or a later one would be, in its place
    run.gate(7, "a publication was given up", lambda: failed(run) != [])
    run.assert_unchanged(
        survivors={"r0.1", "r1.1"}, recoveries=0, code=10
    )  # UNSAVED: the last step is in no checkpoint
    assert {e.cause for e in failed(run)} <= {"publish_failed", "superseded"}
    assert "the store has not answered for 8 s" in failed(run)[0].reason
    assert assert_generations(place) == [e.step for e in run.saved()]
    assert len(run.saved()) == 1
