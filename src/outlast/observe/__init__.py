"""What happened in a run, and what it cost: from the journal and core alone. No torch.

Everything but `_live.py` and `_find.py` is pure: events in, records or text out. This room must never write to a run,
and never know more than its journal says: terminal, page and metrics show the same record. Read `run_status.py` first.
`Live` loads rich when it is first used, so that `outlast status` stays instant.
"""

from outlast.observe._accounting import Accounting, accounting
from outlast.observe._curve import losses, plot, sparkline
from outlast.observe._export import JsonLines, MetricRow, MetricWriter, TensorBoardFile, WeightsAndBiases, rows_of
from outlast.observe._find import Found, find_run
from outlast.observe._history import History
from outlast.observe._incident import Incident, Price, incident, price_of
from outlast.observe._kept_history import read_history
from outlast.observe._live import Live
from outlast.observe._why import Advice, Why, at_length, remedy, why
from outlast.observe.page_reading import StateReading, read_state, read_story, sample_losses
from outlast.observe.plain_text import (
    render_accounting,
    render_people,
    render_run,
    render_status,
    render_timeline,
    render_why,
    table,
)  # fmt: skip
from outlast.observe.rounding import format_s
from outlast.observe.run_status import StatusFold, status
from outlast.observe.status_records import OVER, Process, ReplicaStatus, Status
from outlast.observe.timeline_rows import Row, row_of, timeline

__all__ = [
    "OVER", "Accounting", "Advice", "Found", "History", "Incident", "JsonLines", "Live", "MetricRow", "MetricWriter",
    "Price", "Process", "ReplicaStatus", "Row", "StateReading", "Status", "StatusFold", "TensorBoardFile",
    "WeightsAndBiases", "Why", "accounting", "at_length", "find_run", "format_s", "incident", "losses", "plot",
    "price_of", "read_history", "read_state", "read_story", "remedy", "render_accounting", "render_people",
    "render_run", "render_status", "render_timeline", "render_why", "row_of", "rows_of", "sample_losses", "sparkline",
    "status", "table", "timeline", "why",
]  # fmt: skip
