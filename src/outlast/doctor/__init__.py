"""Whether this host can train, asked before a run: each finding with what to do about it.

The room only looks: it changes no setting, and what it writes to try a disk or a store it takes away again. All but
`deep.py` is done without torch in a fraction of 200 ms. It must never refuse a host for what a run would survive:
such findings are warnings. Read first: `_finding.py`, then `_host.py`.
"""

from __future__ import annotations

from outlast.doctor._compare import compare
from outlast.doctor._finding import Finding, HostReport, report, verdict
from outlast.doctor._host import facts, quick
from outlast.doctor._settings import contradictions

__all__ = ["Finding", "HostReport", "compare", "contradictions", "facts", "quick", "report", "verdict"]
