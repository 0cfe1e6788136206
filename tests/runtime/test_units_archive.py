"""The coordinator's archive: what it says of another run that publishes in the same place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from outlast.checkpoint import CheckpointEngine, heads
from outlast.runtime.coordinator._publisher import Archive
from outlast.runtime.settings.save_settings import SaveSettings


def test_the_coordinator_tells_of_another_run_and_its_heads_say_the_settings(tmp_path: Path) -> None:
    settings = SaveSettings(
        target=str(tmp_path), every=1, keep_last=9, keep_every=0, drain_to="", num_slots=2, min_s=1.0
    )
    said: list[tuple[str, dict[str, Any]]] = []
    archive = Archive(
        settings, "mine", lambda kind, fields: said.append((kind, fields)), lambda phase, step: None,
        {"config": '{"replicas":2}'},
    )  # fmt: skip
    writer, other = CheckpointEngine(str(tmp_path), run="mine"), CheckpointEngine(str(tmp_path), run="theirs")

    def publish(step: int) -> int:
        handle = writer.save(step, {"w": torch.full((100,), float(step))})
        assert handle is not None
        number = archive.publish(handle.save, [handle.durable.result()], certified=False)
        writer.settle(handle.save, number)
        return number

    assert [publish(0), publish(1)] == [0, 1]
    assert said == []
    handle = other.save(9, {"w": torch.ones(1)})
    assert handle is not None
    other.commit(handle)
    assert publish(2) == 3
    ((kind, fields),) = said
    assert (kind, fields["level"]) == ("notice", "warning")
    assert "run theirs published generation 2" in fields["text"]
    found = {head.run: head.extra for head in heads(archive._store)[0]}
    assert found == {"mine": {"config": '{"replicas":2}'}, "theirs": {}}
    for each in (writer, other):
        each.close()
    archive.close()
