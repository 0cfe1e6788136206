"""Times that are over: what a rule had asked to be reminded of."""

from __future__ import annotations

from outlast.core.protocol import messages as m
from outlast.core.protocol.fleet import _agents, _alarms, _beginning, _hosts, _silence
from outlast.core.protocol.fleet import change as _change
from outlast.core.protocol.fleet.state import Change, FleetState

__all__ = ["timer"]


def timer(c: FleetState, now_s: float, over: m.Timer) -> None:
    """The time that a rule asked for is over."""
    kind, _, view = over.name.partition(":")
    if kind == "host":
        _hosts.overdue(c, now_s, view)
        return
    change = c.change
    if kind in ("ack", "lease", "doubt"):
        if change is not None and str(change.upto) == view:
            _change_timer(c, kind, change)
    elif kind == "probe":
        _silence.probed(c, over.name)
    elif kind == "form":
        _form_overdue(c, view)
    elif kind == "raised":
        _agents.lingering(c, view)
    elif kind == "outlook":
        _alarms.weigh(c, now_s, view)
    elif kind == "vacancy":
        pass  # whether to wait on is asked anew after every event (`_planned`)
    elif kind == "start":
        _beginning.overdue(c)
    elif kind == "gather":
        _beginning.gathered(c)


def _change_timer(c: FleetState, kind: str, change: Change) -> None:
    if kind == "ack":
        change.expired = True
        c.timer(f"lease:{change.upto}", c.settings.lease_s * (1.0 + c.settings.clock_margin))
    elif kind == "lease":
        change.lease_out = True
    elif change.doubtful:
        change.doubtful = False
        _silence.cut(c, _change.unexplained(c, change), "its connection to a peer ended though both live")


def _form_overdue(c: FleetState, which: str) -> None:
    newest = c.planned or c.view
    if newest is None or c.change is not None or str(newest.id) != which:
        return
    late = c.planned_unformed if c.planned is not None else c.unformed
    if (c.planned is not None and not c.planned_entered) or c.probing == newest.id:
        # The step before it still runs; or its paths are being probed, which will say who is at fault.
        c.timer(f"form:{which}", c.settings.formation_s)
    elif late:
        _change.begin(c, f"view {newest.id} did not form: {', '.join(sorted(late)[:5])} late")
