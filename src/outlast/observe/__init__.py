"""What happened in a run, and what it cost: from the journal and core alone. No torch.

Everything but `_live.py` and `_find.py` is pure: events in, records or text out. This room must never write to a run,
and never know more than its journal says: terminal, page and metrics show the same record. Read `run_status.py` first.
Names load their module when they are first used, and `Live` loads rich, so that `outlast status` stays instant.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outlast.observe._accounting import Accounting, accounting
    from outlast.observe._curve import losses, plot, sparkline
    from outlast.observe._cycles import UsefulTime
    from outlast.observe._export import JsonLines, MetricRow, MetricWriter, TensorBoardFile, WeightsAndBiases, rows_of
    from outlast.observe._find import Found, find_run
    from outlast.observe._history import History
    from outlast.observe._incident import Incident, Price, incident, price_of
    from outlast.observe._kept_history import read_history
    from outlast.observe._live import Live
    from outlast.observe._why import Advice, Why, at_length, remedy, why
    from outlast.observe.plain_text import (
        render_accounting,
        render_losses,
        render_people,
        render_run,
        render_status,
        render_timeline,
        render_why,
        table,
    )
    from outlast.observe.rounding import format_s
    from outlast.observe.run_status import StatusFold, status
    from outlast.observe.state_reading import StateReading, read_state, sample_losses
    from outlast.observe.status_records import OVER, Process, ReplicaStatus, Status
    from outlast.observe.story_reading import read_story
    from outlast.observe.timeline_rows import Row, row_of, timeline

_HOMES = {
    "Accounting": "_accounting", "Advice": "_why", "Found": "_find", "History": "_history", "Incident": "_incident",
    "JsonLines": "_export", "Live": "_live", "MetricRow": "_export", "MetricWriter": "_export",
    "OVER": "status_records", "Price": "_incident", "Process": "status_records", "ReplicaStatus": "status_records",
    "Row": "timeline_rows", "StateReading": "state_reading", "Status": "status_records", "StatusFold": "run_status",
    "TensorBoardFile": "_export", "UsefulTime": "_cycles", "WeightsAndBiases": "_export", "Why": "_why",
    "accounting": "_accounting", "at_length": "_why", "find_run": "_find", "format_s": "rounding",
    "incident": "_incident", "losses": "_curve", "plot": "_curve", "price_of": "_incident",
    "read_history": "_kept_history", "read_state": "state_reading", "read_story": "story_reading", "remedy": "_why",
    "render_accounting": "plain_text", "render_losses": "plain_text", "render_people": "plain_text",
    "render_run": "plain_text", "render_status": "plain_text", "render_timeline": "plain_text",
    "render_why": "plain_text", "row_of": "timeline_rows", "rows_of": "_export", "sample_losses": "state_reading",
    "sparkline": "_curve", "status": "run_status", "table": "plain_text", "timeline": "timeline_rows", "why": "_why",
}  # fmt: skip

__all__ = [
    "OVER", "Accounting", "Advice", "Found", "History", "Incident", "JsonLines", "Live", "MetricRow", "MetricWriter",
    "Price", "Process", "ReplicaStatus", "Row", "StateReading", "Status", "StatusFold", "TensorBoardFile",
    "UsefulTime", "WeightsAndBiases", "Why", "accounting", "at_length", "find_run", "format_s", "incident", "losses",
    "plot", "price_of", "read_history", "read_state", "read_story", "remedy", "render_accounting", "render_losses",
    "render_people", "render_run", "render_status", "render_timeline", "render_why", "row_of", "rows_of",
    "sample_losses", "sparkline", "status", "table", "timeline", "why",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Loaded when first used: to import all of this room takes longer than a status does to be read."""
    if name in _HOMES:
        return getattr(importlib.import_module(f"outlast.observe.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'outlast.observe' has no attribute {name!r}")
