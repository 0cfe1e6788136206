"""The run's record: written by the coordinator alone, read by everyone else. No torch.

Two SQLite files in the run directory: `journal.db` holds events, `record.db` the coordinator's claims and records
(docs/decisions/0020 says why two); a run over several hosts may keep its claims and records in etcd (`_shared.py`).
This room must never decide anything, never make a view record wait for an event, and never stop a run because an event
could not be written. Read `_journal.py` first, then `_record.py`.
"""

from outlast.journal._etcd import Access, Unreachable, access_of, check_reachable, read_places
from outlast.journal._files import holds_run
from outlast.journal._filesystem import Mount, find_mount, is_network
from outlast.journal._journal import Entry, Journal
from outlast.journal._last_line import LastLine
from outlast.journal._lock import RunLock, is_held, started_at_s
from outlast.journal._run_clock import keep_clock, run_now_s
from outlast.journal._shared import SharedRecord
from outlast.journal._turn import CoordinatorClaim, TurnSeen

__all__ = [
    "Access", "CoordinatorClaim", "Entry", "Journal", "LastLine", "Mount", "RunLock", "SharedRecord", "TurnSeen",
    "Unreachable", "access_of", "check_reachable", "find_mount", "holds_run", "is_held", "is_network", "keep_clock",
    "read_places", "run_now_s", "started_at_s",
]  # fmt: skip
