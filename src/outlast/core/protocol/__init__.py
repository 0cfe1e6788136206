"""Membership, steps and recovery as (state, event) -> (state, actions): no clock, no sockets, no tensors.

Must never do I/O or look at a clock. Read `_types.py`, `_coordinator.py`, `_member.py`, in this order; `_tree.py` and
`_roll.py` are the arithmetic under them.
"""

from outlast.core.protocol import _messages as messages
from outlast.core.protocol._audits import Audits
from outlast.core.protocol._claims import (
    Certificate,
    Claim,
    Commitment,
    Evidence,
    Finding,
    Said,
    Stand,
    draw,
    draw_key,
    to_ask,
    truth_of,
)
from outlast.core.protocol._coordinator import Coordinator
from outlast.core.protocol._ledger import Ledger, Span, StepTime
from outlast.core.protocol._member import (
    Compute,
    Exchange,
    Follow,
    Form,
    HandOver,
    Leave,
    Member,
    Merge,
    Todo,
    Wait,
)
from outlast.core.protocol._roll import plan_of, resolve
from outlast.core.protocol._roster import Settings
from outlast.core.protocol._row_plans import RowsNote, owners_of, rows_touched
from outlast.core.protocol._tree import (
    Node,
    combine,
    cover,
    leaves_of,
    merges,
    parent,
    partials,
    roots,
    schedule,
    shares,
    split,
)
from outlast.core.protocol._types import FILE, Header, Order, Plan, RollEntry, ServeId, View, ViewId

__all__ = [
    "Audits", "Certificate", "Claim", "Commitment", "Compute", "Coordinator", "Evidence", "Exchange", "FILE", "Finding",
    "Follow", "Form", "HandOver", "Header", "Leave", "Ledger", "Member", "Merge", "Node", "Order", "Plan", "RollEntry",
    "RowsNote", "Said", "ServeId", "Settings", "Span", "Stand", "StepTime", "Todo", "View", "ViewId", "Wait", "combine",
    "cover", "draw", "draw_key", "leaves_of", "merges", "messages", "owners_of", "parent", "partials", "plan_of",
    "resolve", "roots", "rows_touched", "schedule", "shares", "split", "to_ask", "truth_of",
]  # fmt: skip
