"""The run's record: written by the coordinator alone, read by everyone else. No torch.

Two SQLite files in the run directory: `journal.db` holds events, `record.db` the coordinator's claims and records
(docs/decisions/0020 says why two); a run over several hosts may keep its claims and records in etcd (`_shared.py`).
This room must never decide anything, never make a view record wait for an event, and never stop a run because an event
could not be written. Read `_journal.py` first, then `_record.py`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outlast.journal._etcd import Access, Unreachable, access_of, check_reachable, read_places
    from outlast.journal._files import holds_run
    from outlast.journal._filesystem import Mount, find_mount, is_network
    from outlast.journal._folds import code_digest, ends_digest, sealed, unsealed
    from outlast.journal._journal import Entry, Journal
    from outlast.journal._last_line import LastLine
    from outlast.journal._lock import RunLock, is_held, started_at_s
    from outlast.journal._renewed import RenewedFiles
    from outlast.journal._run_clock import keep_clock, run_now_s
    from outlast.journal._runs_in_etcd import RunsInEtcd
    from outlast.journal._salvage import Salvaged, salvage
    from outlast.journal._shared import SharedRecord
    from outlast.journal._turn import CoordinatorClaim, TurnSeen

_HOMES = {
    "Access": "_etcd", "CoordinatorClaim": "_turn", "Entry": "_journal", "Journal": "_journal",
    "LastLine": "_last_line", "Mount": "_filesystem", "RenewedFiles": "_renewed", "RunLock": "_lock",
    "RunsInEtcd": "_runs_in_etcd", "Salvaged": "_salvage", "SharedRecord": "_shared", "TurnSeen": "_turn",
    "Unreachable": "_etcd", "access_of": "_etcd", "check_reachable": "_etcd", "code_digest": "_folds",
    "ends_digest": "_folds", "find_mount": "_filesystem", "holds_run": "_files", "is_held": "_lock",
    "is_network": "_filesystem", "keep_clock": "_run_clock", "read_places": "_etcd", "run_now_s": "_run_clock",
    "salvage": "_salvage", "sealed": "_folds", "started_at_s": "_lock", "unsealed": "_folds",
}  # fmt: skip

__all__ = [
    "Access", "CoordinatorClaim", "Entry", "Journal", "LastLine", "Mount", "RenewedFiles", "RunLock", "RunsInEtcd",
    "Salvaged", "SharedRecord", "TurnSeen", "Unreachable", "access_of", "check_reachable", "code_digest", "ends_digest",
    "find_mount", "holds_run", "is_held", "is_network", "keep_clock", "read_places", "run_now_s", "salvage", "sealed",
    "started_at_s", "unsealed",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Loaded when first used: whoever reads a run's files needs no etcd, and seldom a damaged one; whoever asks about a
    mount needs no journal."""
    if name in _HOMES:
        return getattr(importlib.import_module(f"outlast.journal.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'outlast.journal' has no attribute {name!r}")
