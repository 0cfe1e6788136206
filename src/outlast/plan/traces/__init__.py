"""Failure logs: read, validated, fitted, tested, generated anew.

For: knowing how a fleet really fails. It must never drop a row in silence, nor give a figure without its interval.
Read first: `_mapping.py` (how columns are read), then `_fit.py` and `_generate.py`.
"""

from ._fit import FleetFit, Statistics, fit_trace, fleet_intervals, node_rate, statistics
from ._generate import Check, generate, generate_poisson, predictive_check, to_csv
from ._mapping import PRESETS, Mapping, load_mapping, preset
from ._read import JournalReader, read_trace, rows_wanted, trace_from_events, trace_from_journal
from ._records import Failure, Trace, TraceProblem

__all__ = [
    "PRESETS", "Check", "Failure", "FleetFit", "JournalReader", "Mapping", "TraceProblem", "Statistics", "Trace",
    "fit_trace", "fleet_intervals", "generate", "generate_poisson", "load_mapping", "node_rate", "predictive_check",
    "preset", "read_trace", "rows_wanted", "statistics", "to_csv", "trace_from_events", "trace_from_journal",
]  # fmt: skip
