"""Membership, steps and recovery as (state, event) -> (state, actions): no clock, no sockets, no tensors.

Must never do I/O or look at a clock. Read `types.py`, then `fleet/` (the coordinator), `step/` (a member) and `saves/`;
`tree.py` and `step/roll.py` are the arithmetic under them.
"""

from outlast.core.protocol import messages
from outlast.core.protocol.disputes import (
    AuditFinding,
    Certificate,
    Claim,
    Commitment,
    Evidence,
    Said,
    Stand,
    draw,
    draw_key,
    to_ask,
    truth_of,
)
from outlast.core.protocol.fleet.coordinator import Coordinator
from outlast.core.protocol.fleet.roster import Settings
from outlast.core.protocol.ledger import Ledger, Span, StepTime
from outlast.core.protocol.row_plans import RowsNote, owners_of, rows_spoilt, rows_touched
from outlast.core.protocol.step.audits import Audits
from outlast.core.protocol.step.member import Member, Merge
from outlast.core.protocol.step.roll import plan_of, resolve
from outlast.core.protocol.step.todo import Compute, Exchange, Follow, Form, HandOver, Leave, Todo, Wait
from outlast.core.protocol.tree import (
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
from outlast.core.protocol.types import FILE, Header, Order, RollEntry, ServeId, StepPlan, View, ViewId

__all__ = [
    "Audits", "Certificate", "Claim", "Commitment", "Compute", "Coordinator", "Evidence", "Exchange", "FILE",
    "AuditFinding", "Follow", "Form", "HandOver", "Header", "Leave", "Ledger", "Member", "Merge", "Node", "Order",
    "StepPlan", "RollEntry", "RowsNote", "Said", "ServeId", "Settings", "Span", "Stand", "StepTime", "Todo", "View",
    "ViewId", "Wait", "combine", "cover", "draw", "draw_key", "leaves_of", "merges", "messages", "owners_of",
    "parent", "partials", "plan_of", "resolve", "roots", "rows_spoilt", "rows_touched", "schedule", "shares", "split",
    "to_ask", "truth_of",
]  # fmt: skip
