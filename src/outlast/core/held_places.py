"""How many places a run held over its time: people scale it, and its policy chooses spares.

Role: what was paid for, from the run's events; the month's report and an incident's cost both ask here. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable

from outlast.core import events as ev

__all__ = ["mean_places"]


def mean_places(events: Iterable[ev.AnyEvent], wall_s: float) -> float:
    """Return how many replicas and spares the run was to have, the mean over `wall_s` seconds from its begin: each
    number counts for as long as it held. 0 where no event says when the run began."""
    replicas = spares = 0
    began_s: float | None = None
    held: list[tuple[float, int]] = []  # seconds from the begin, and what was held from then on
    for event in events:
        if isinstance(event, ev.RunStarted) and began_s is None:
            replicas, spares, began_s = event.num_replicas, event.num_spares, event.at_s
        elif isinstance(event, ev.Asked) and event.accepted and event.what == "scale":
            replicas = int(event.about)
        elif isinstance(event, ev.SparesHeld):
            spares = event.number
        else:
            continue
        since_s = min(max(0.0, event.at_s - (began_s or event.at_s)), max(0.0, wall_s))
        held.append((since_s, replicas + spares))
    if not held:
        return 0.0
    first = held[0][1]  # sums of what differs from it: a run that never changed held exactly this many
    ends_s = [since_s for since_s, _ in held[1:]] + [wall_s]
    more = sum((many - first) * max(0.0, end_s - since_s) for (since_s, many), end_s in zip(held, ends_s, strict=True))
    return first + more / wall_s if wall_s > 0 else float(held[-1][1])
