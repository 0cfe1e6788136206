"""Between the views and a robust rule: whether a view's rows may be trusted, and the wait if not.

A view is good enough if the hosts that may lie can spoil no more rows than the rule trims (protocol, 23). Every member
finds the same answer from the same plan; where it is `wait`, all stay in the view without computing, and carry out the
coordinator's orders (serve a joiner, switch to a larger view) in rounds of their own. Who lied about a reduced slice is
voted on in the step (`core/protocol/step/verdict.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from outlast.core.protocol import RollEntry, StepPlan, View, rows_spoilt
from outlast.core.protocol import messages as m
from outlast.core.protocol.step.forming import take_orders
from outlast.core.protocol.step.verdict import PartRows, StepEvidence, StepGuards
from outlast.errors import TrainingError, ViewAbandoned
from outlast.runtime.checks.state_comparison import diverged, fingerprint_of
from outlast.runtime.exchange.robust_rows import Robust
from outlast.runtime.joining.donor import Donor
from outlast.runtime.view.courses import Acts, carry_out, seat_of
from outlast.runtime.view.port import ViewPort

__all__ = ["admit", "wait_for_more"]

_REST_S = 1.0


def admit(port: ViewPort, robust: Robust, view: View, plan: StepPlan) -> None:
    """After the roll call: may this view's members compute? Raises TrainingError where the policy is to stop. A view
    that the coordinator holds is not asked about: nothing is computed in it."""
    member = port.member
    if view.held:
        with port.lock:
            member.held_back = True
        return
    usual = member.usual_plan(view).leaves
    rows = rows_spoilt(member.places(), (plan.leaves, usual), robust.num_leaves, robust.num_rows)
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


def wait_for_more(
    port: ViewPort,
    donor: Donor,
    guards: StepGuards,
    entries: Sequence[RollEntry],
    settled: Callable[[], PartRows],
) -> None:
    """One turn of waiting in a view that is held back, for its rows or by the coordinator: rest, or a round in which
    all carry out what all have heard. `entries`: of its roll; `settled`: fingerprints of what no loop changes, none
    where that cannot be told. Raises ViewAbandoned, and what differing states end in."""
    mesh, member = port.mesh, port.member
    if mesh is None or member.view is None:
        raise ViewAbandoned("the view is closed")
    rest: Acts = {"rest": lambda _: mesh.rest(_REST_S)}
    found = StepEvidence(view=member.view, parts=settled, diverged=diverged, entries=entries)
    course = take_orders(seat_of(port), guards, found, lambda: fingerprint_of(settled()), donor.carry_out)
    carry_out(port, course, rest)
