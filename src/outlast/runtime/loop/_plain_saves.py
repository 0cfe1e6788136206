"""Checkpoints of the plain loop (`OUTLAST=off`): the same engine and files, no protocol.

What it saves, the protected loop can resume from, and the other way round: with the sums, and so the bits, of the loop
that goes on, which is said (the fact `loop`).
Never raises into a step because a disk failed; the last save is waited for.
"""

from __future__ import annotations

import concurrent.futures
import sys
import time

import torch

from outlast.checkpoint import Handle
from outlast.checkpoint import save_events as ce
from outlast.checkpoint.patience import Patient
from outlast.checkpoint.room import give_back, make_room, tried
from outlast.core.policy import RunRecord
from outlast.errors import ConfigError, Unsaved
from outlast.runtime.host.environment import Environment
from outlast.runtime.saving.archives import archive_of, occupied
from outlast.runtime.saving.contents import no_checkpoint, place_and_number
from outlast.runtime.saving.restore import (
    DIFFERS,
    KEPT,
    asked_in,
    check_facts,
    kept_settings,
    nothing_left,
    restore,
    stopped_in,
    tree_of,
)
from outlast.runtime.saving.resume import newest_epoch, usable
from outlast.runtime.saving.unsaved import end_with
from outlast.runtime.settings.save_settings import SaveSettings
from outlast.runtime.training.state import State

__all__ = ["PlainSaves"]


class PlainSaves:
    """Saves and resumes where the loop runs without outlast's numerics. Raises ConfigError for a place of no known
    kind."""

    def __init__(self, env: Environment, state: State, settings: SaveSettings, facts: dict[str, str]) -> None:
        self._env, self._state, self._settings, self._facts = env, state, settings, facts
        wrong = tried(settings.target, state.size_bytes(), settings.timeout_s)
        if wrong:
            print(f"outlast: checkpoints: {wrong}", file=sys.stderr)
        self._newest, self._why_lost = -1, ""
        self.stopped = self.asked = ""  # why what was resumed had ended, or was to end: it stays so
        self._places = occupied(env, settings)
        self._archive = archive_of(env, settings, facts, on_event=self._on_event)
        store = Patient(self._archive.store, settings.timeout_s)
        self._epoch = 1 + newest_epoch(store)
        self._record = RunRecord(min_s=settings.min_s)
        self._record.begin(time.monotonic())
        self._handle: Handle | None = None
        self._last: concurrent.futures.Future[int] | None = None

    def resume(self, until: int) -> int | None:
        """The step to begin with, its state loaded; None to begin at step 0. Says so where that is `until` already.
        Raises CheckpointError, ConfigError."""
        wanted, config = self._env.config.resume, self._env.config
        if wanted == "never":
            return None
        loaded = usable(self._archive.load(), self._archive.store.url, config) if wanted == "auto" else None
        if wanted != "auto":
            place, number = place_and_number(wanted)
            source = archive_of(self._env, _at(self._settings, place), self._facts, on_event=self._on_event)
            loaded = usable(source.load(generation=number), place, config)
            source.close()
            if loaded is None:
                raise no_checkpoint(wanted)
        if loaded is None:
            return None
        warning = check_facts(loaded.tree["run"]["facts"], self._facts, bitwise=self._env.config.bitwise)
        for words, detail in ((DIFFERS, warning), (KEPT, kept_settings(self._state, loaded.tree))):
            if detail:
                print(f"outlast: {words} {detail}", file=sys.stderr)
        restore(self._state, loaded.tree)
        if wanted == "auto":
            self.stopped, self.asked = stopped_in(loaded.tree), asked_in(loaded.tree)
        step = int(loaded.tree["run"]["step"])
        if told := nothing_left(step, until, self.stopped):
            print(f"outlast: {told}", file=sys.stderr, flush=True)
        return step

    def boundary(self, step: int, *, last: bool, stopped: str = "", asked: str = "") -> None:
        """The step is done, and the loop's code that follows it. `stopped`: why it was the last; `asked`: why the next
        is to be."""
        now = time.monotonic()
        every = self._settings.every
        due = step % every == 0 if every else self._record.due_s(now) <= 0
        if not (due or last):
            return
        changing = [*(f"model.{name}" for name in self._state.buffers), "extra.*"]
        tree = tree_of(self._state, step, self._facts, stopped, asked)
        with torch.no_grad():
            self._handle = self._archive.save(step, tree, view=(self._epoch, 1), changing=changing, wait=last)
        if self._handle is not None:
            self._record.began(now)
            handle = self._handle
            self._last = self._archive.commit_later(handle)
            self._last.add_done_callback(lambda done: self._committed(handle, done))
        if last:
            self.end(step)

    def end(self, step: int) -> None:
        """The last step is done, and its save has begun or is not made: wait, and say so if it is in no checkpoint."""
        if self._last is not None:
            concurrent.futures.wait([self._last])
        self._archive.close()
        if self._newest < step:
            end_with(Unsaved.of(step, self._newest, self._archive.store.url, self._why_lost))
        for place in self._places:
            place.leave()

    def wait_copied(self) -> None:
        """Before the optimizer writes."""
        if self._handle is not None:
            self._handle.wait_copied()
            self._handle = None

    def _committed(self, handle: Handle, done: concurrent.futures.Future[int]) -> None:
        error = done.exception()
        if error is None:
            self._newest = max(self._newest, handle.save.step)
            self._record.saved(0.0, handle.durable_s)
        else:
            self._archive.settle(handle.save, None)  # if only its publication failed, the engine still counts on it
            give_back(self._archive.store, handle.save)
            self._record.failed()
            self._why_lost = str(error)
            print(f"outlast: the save of step {handle.save.step} failed, training goes on: {error}", file=sys.stderr)

    def _on_event(self, event: ce.CheckpointEvent) -> None:
        if isinstance(event, ce.SaveRetried) and event.full:
            make_room(self._archive)
        if isinstance(event, ce.Skipped | ce.SaveRetried | ce.SaveDelayed):
            print(f"outlast: checkpoints: {event}", file=sys.stderr)
        elif isinstance(event, ce.Neighbour):
            print(f"outlast: checkpoints: {event.detail}", file=sys.stderr)


def _at(settings: SaveSettings, place: str) -> SaveSettings:
    if not place:
        raise ConfigError("--resume names no place", remedy="auto, never, a directory or a URL")
    return SaveSettings(
        **{**{f: getattr(settings, f) for f in settings.__struct_fields__}, "target": place, "drain_to": ""}
    )
