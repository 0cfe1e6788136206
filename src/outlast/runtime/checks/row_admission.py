"""Between the views and a robust rule: whether a view's rows may be trusted, the wait if not, and who lied.

A view is good enough if the hosts that may lie can spoil no more rows than the rule trims (protocol, 23). Every member
finds the same answer from the same plan; where it is `wait`, all stay in the view without computing, and carry out the
coordinator's orders (serve a joiner, switch to a larger view) in rounds of their own. Where a member's reduced slice is
not what its rows give, the step is held: every member looks for itself, all vote, and the view is left.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Protocol

from outlast.core.phases import Phase
from outlast.core.protocol import Header, Plan, View, plan_of, rows_touched
from outlast.core.protocol import messages as m
from outlast.errors import TrainingError, ViewAbandoned
from outlast.runtime.exchange.robust_rows import Robust
from outlast.runtime.joining.donor import Donor
from outlast.runtime.view.port import ViewPort
from outlast.runtime.view.rounds import HOLD, VOTE

__all__ = ["admit", "examine", "wait_for_rows"]

_REST_S = 1.0


class RowWitness(Protocol):
    """A plane that can tell whether a member reduced its slice to what the rows give."""

    def false(self, bucket: int, reducer: int) -> bool | None: ...


def admit(port: ViewPort, robust: Robust, view: View, plan: Plan) -> None:
    """After the roll call: may this view's members compute? Raises TrainingError where the policy is to stop."""
    member = port.member
    usual = plan_of(view.members, 0, robust.num_leaves, robust.num_rows).leaves
    hosts = member.hosts if port.env.config.fault_domain == "host" else {}
    rows = _most_of(hosts, (plan.leaves, usual), robust.num_leaves, robust.num_rows)
    found = robust.settings.admit(rows)
    with port.lock:
        member.held_back = found.action == "wait"
    told = m.Admitted(
        member=port.env.me,
        view=view.id,
        step=member.committed,
        action=found.action,
        tolerated=found.tolerated_hosts,
        most_rows=found.most_rows,
        trim_count=found.trim_count,
        lowered=found.lowered,
        reason=found.reason,
    )
    if view.members[0] == port.env.me or found.action == "stop":
        port.tell_coordinator([told])
    if found.action == "stop":
        raise TrainingError(
            f"view {view.id} is not good enough for the rule: {found.reason}",
            where=f"step {member.committed}",
            did="the run stops, as on_shortfall says",
            remedy=f"more replicas or spares ({found.hosts_needed} are needed), or on_shortfall = wait or lower",
        )


def _most_of(
    hosts: Mapping[str, str], plans: Sequence[Mapping[str, Sequence[int]]], num_leaves: int, num_rows: int
) -> dict[str, int]:
    """Rows that each host can spoil, in the worse of the plans."""
    worst: dict[str, int] = {}
    for leaves in plans:
        of_host: dict[str, set[int]] = {}
        for name, own in leaves.items():
            of_host.setdefault(hosts.get(name, name), set()).update(rows_touched(own, num_leaves, num_rows))
        for host, rows in of_host.items():
            worst[host] = max(worst.get(host, 0), len(rows))
    return worst


def wait_for_rows(port: ViewPort, donor: Donor) -> None:
    """One turn of waiting in a view that is held back: rest, or a round in which all carry out what all have heard."""
    mesh, member = port.mesh, port.member
    if mesh is None:
        raise ViewAbandoned("the view is closed")
    with port.lock:
        heard, turn, view, step = member.heard, member.carried_out, member.view, member.committed
    if heard == turn or view is None:
        mesh.rest(_REST_S)
        return
    agreed = min(port.on(HOLD, step, heard, Phase.ROLL_CALL, turn).values())
    with port.lock:
        due = member.carry_out(agreed)
    for order in due:
        donor.carry_out(order, view)


def examine(port: ViewPort, robust: Robust, plane: RowWitness, headers: Sequence[Header]) -> None:
    """Before the verdict: what the headers say of the rows and of the reducers.

    Raises TrainingError for more bad rows than the rule tolerates, ViewAbandoned when a reducer is accused.
    """
    with port.lock:
        _, plan = port.member.standing()
    robust.refuse_bad_rows((header.rows for header in headers), plan.leaves)
    accusations = sorted({(b, name, h.member) for h in headers for b, name in h.rows.accused})
    if accusations:
        _vote(port, plane, headers, *accusations[0])


def _vote(
    port: ViewPort, plane: RowWitness, headers: Sequence[Header], bucket: int, reducer: str, accuser: str
) -> None:
    mesh, step = port.mesh, headers[0].step
    assert mesh is not None
    members = [header.member for header in headers]
    me = port.env.me
    false = plane.false(bucket, members.index(reducer)) if me not in (reducer, accuser) else me == accuser
    mine = accuser if false is False else reducer
    votes = {me: mine}
    try:
        votes |= port.on(VOTE, step, mine, Phase.HEADER)
    finally:  # whoever has left meanwhile had every vote
        told = m.Accused(
            member=me,
            view=mesh.view.id,
            step=step,
            bucket=bucket,
            reducer=reducer,
            accuser=accuser,
            culprit=mine,
            members=tuple(members),
            at_s=time.monotonic(),
        )
        port.tell_coordinator([told])
    against = sum(vote == reducer for vote in votes.values())
    raise ViewAbandoned(
        f"{accuser} found the slice of bucket {bucket} that {reducer} reduced to be false; "
        f"{against} of {len(votes)} members say so too"
    )
