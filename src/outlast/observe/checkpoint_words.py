"""Checkpoints in words: rows of the timeline, the line of the status, the remedies of saves that failed. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from outlast.core import events as ev
from outlast.observe.rounding import format_s, size
from outlast.observe.status_records import Status

__all__ = ["PLAIN_FAILURES", "describe", "last_save", "lost_remedy", "matters", "remedy_of"]

Level = Literal["info", "warning", "error"]

PLAIN_FAILURES = frozenset({"view_changed", "superseded"})
"""Saves that came to nothing because of what the journal tells anyway; the next one follows at once."""

_OF_SAVES = (ev.CheckpointBegan, ev.CheckpointSaved, ev.CheckpointFailed, ev.CheckpointInterval)
_SAVED_AT_A_STOP = "a run that is asked to stop then saves before it ends"


def describe(event: ev.AnyEvent) -> tuple[str, Level] | None:
    """The words of an event about checkpoints; None for any other."""
    match event:
        case ev.CheckpointSaved():
            sizes = f"{size(event.written_bytes)} of {size(event.state_bytes)} written"
            times = f"durable after {format_s(event.durable_s)}, training held up {format_s(event.blocked_s)}"
            why = f" ({event.reason})" if event.reason else ""
            return f"step {event.step} saved as generation {event.generation}: {sizes}, {times}{why}", "info"
        case ev.CheckpointFailed():
            what = f"the save of step {event.step} came to nothing" if event.step >= 0 else "checkpoints"
            level: Level = "info" if event.cause in PLAIN_FAILURES else "warning"
            return f"{what}: {event.reason} ({event.url}); training goes on, older generations stay", level
        case ev.CheckpointLoaded():
            read = ", ".join(f"{size(count)} from {tier}" for tier, count in sorted(event.bytes_read.items()))
            return f"{event.replica} begins with step {event.step} ({event.tier}: {read or 'nothing read'})", "info"
        case ev.CheckpointSkipped():
            which = f"generation {event.generation}" if event.generation >= 0 else "a place"
            place = event.file or event.url
            return f"{event.replica} passed over {which} ({event.tier}, {place}): {event.reason}", "warning"
        case ev.CheckpointDiffers():
            if event.kept:
                return f"the settings saved with step {event.step} hold, not the script's: {event.detail}", "warning"
            told = f"step {event.step} was saved with other settings, so bits may differ from then on: {event.detail}"
            return told, "warning"
        case ev.FleetGone():
            return f"every replica is gone at step {event.step} ({event.detail}); the run begins again", "error"
    return _describe_rest(event)


def _describe_rest(event: ev.AnyEvent) -> tuple[str, Level] | None:
    match event:
        case ev.CheckpointBegan():
            return f"the save of step {event.step} has begun" + (f" ({event.reason})" if event.reason else ""), "info"
        case ev.CheckpointDelayed():
            return f"{event.replica}: the save of step {event.step} is delayed: {event.reason}", "info"
        case ev.CheckpointRetried():
            return f"{event.replica} tries again to write its part (time {event.attempt}): {event.reason}", "warning"
        case ev.CheckpointPruned():
            gone = ", ".join(map(str, event.generations)) or "no generation"
            note = f"; {event.note}" if event.note else ""
            return f"{gone} removed, {size(event.freed_bytes)} freed{note}", "warning" if event.note else "info"
        case ev.CheckpointDrained():
            what = f"generation {event.generation} copied to {event.url}"
            return f"{what}: {size(event.copied_bytes)} in {format_s(event.seconds)}", "info"
        case ev.CheckpointInterval():
            if event.interval_s is None:
                return f"no save is due before the end of the loop: {event.reason}", "info"
            when = f"every {format_s(event.interval_s)}" if event.interval_s else "at once"
            return f"saves are due {when}: {event.reason}", "info"
    return None


def matters(event: ev.AnyEvent) -> bool:
    """Whether a reader who did not ask for everything wants to see it."""
    if isinstance(event, ev.CheckpointFailed):
        return event.cause not in PLAIN_FAILURES
    if isinstance(event, ev.CheckpointPruned):
        return bool(event.note)
    kinds = (ev.FleetGone, ev.CheckpointLoaded, ev.CheckpointSkipped, ev.CheckpointDiffers, ev.CheckpointRetried)
    return isinstance(event, kinds)


def last_save(state: Status) -> str:
    """One line for the status; empty if nothing was ever tried."""
    parts, saved, failed = [], state.last_save, state.failed_save
    if saved is not None:
        since = "ago" if (state.as_of_s or 0.0) > (state.updated_at_s or 0.0) else "before the last event"
        age = f", {format_s(state.save_age_s)} {since}" if state.save_age_s is not None else ""
        parts.append(f"last save: step {saved.step}, generation {saved.generation}{age} ({saved.url})")
    if failed is not None:
        parts.append(f"the newest try failed: {failed.reason}")
    return "; ".join(parts)


def remedy_of(event: ev.CheckpointFailed) -> tuple[str, str]:
    """(the cause's name, what to do about it)."""
    text = event.reason.lower()
    if "no space" in text or "quota" in text or "enospc" in text:
        return (
            "a full disk under the checkpoints",
            "free space there, or keep fewer (checkpoint_keep)",
        )
    if "permission" in text or "read-only" in text or "not a directory" in text:
        return "checkpoints that may not be written", "mend the directory's rights, or give another --checkpoint-dir"
    if event.cause == "diverged":
        return "replicas differ", "look for what gives one replica other tensors than the rest"
    return "saves that came to nothing", "see why: outlast why --all; and check the target: outlast ckpt verify"


def lost_remedy(events: Sequence[ev.AnyEvent]) -> tuple[str, str]:
    """(the cause's name, what to do) where a run was stopped with steps that no checkpoint holds."""
    settings = next((event.config for event in events if isinstance(event, ev.RunStarted)), {})
    kept = bool(settings.get("checkpoint_dir")) or any(isinstance(event, _OF_SAVES) for event in events)
    allowed = settings.get("stop_save_s")
    if not kept:
        and_time = ", and let a stop save first: stop_save_s is 0" if allowed == 0 else ""
        return "no checkpoints were kept", f"keep them: --checkpoint-dir DIR{and_time}; {_SAVED_AT_A_STOP}"
    name = "steps after the newest checkpoint"
    if allowed == 0:
        return name, f"let a stop save first: stop_save_s is 0; {_SAVED_AT_A_STOP}"
    told = f" (it was {allowed:g} s)" if isinstance(allowed, int | float) else ""
    took = max((event.durable_s for event in events if isinstance(event, ev.CheckpointSaved)), default=None)
    cost = f"; the slowest save took {format_s(took)}" if took is not None else ""
    return name, f"give a stop more time to save: raise stop_save_s{told}, and what the scheduler leaves it{cost}"
