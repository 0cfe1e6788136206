"""From a roll call to a plan: who is ahead, who hands over, which microbatches are orphans and who computes them.

Pure: every member computes the same plan from the same roll (rule 5), so nobody is asked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from outlast.core.protocol.disputes import Claim, disputed, place, void
from outlast.core.protocol.row_plans import deal_orphans, host_shares, row_shares, rows_spoilt
from outlast.core.protocol.tree import Node, leaves_of, shares
from outlast.core.protocol.types import RollEntry, StepPlan
from outlast.core.protocol.work_shares import ranges_of

__all__ = ["plan_of", "resolve"]


def plan_of(
    members: Sequence[str],
    step: int,
    num_microbatches: int,
    num_rows: int = 1,
    work: Sequence[int] = (),
    hosts: Mapping[str, str] = {},
) -> StepPlan:
    """The plan of an undisturbed step: everybody computes its own range; of a robust rule's rows (> 1), whole ones.
    `work`: microbatches of each, as the view says (`work_shares.py`); `hosts`: where members are, if rows count by
    host."""
    if num_rows == 1:
        ranges = ranges_of(work, len(members), num_microbatches)
    elif hosts:
        ranges = host_shares([hosts.get(name, name) for name in members], num_microbatches, num_rows)
    else:
        ranges = row_shares(len(members), num_microbatches, num_rows)
    leaves = {m: tuple(range(lo, hi)) for m, (lo, hi) in zip(members, ranges, strict=True)}
    return StepPlan(step=step, donor=None, behind=(), stale=(), leaves=leaves, orphans=leaves)


def resolve(
    entries: Sequence[RollEntry],
    num_microbatches: int,
    num_rows: int = 1,
    work: Sequence[int] = (),
    hosts: Mapping[str, str] = {},
) -> StepPlan:
    """The plan for the view whose members said `entries`, in view order.

    The newest committed step is where the view goes on. Whoever is one behind takes the outcome from the first that
    keeps it; whoever is further behind is stale. Of the partial sums held at that step the largest count, each
    microbatch once (invariant: exactly once); what nobody holds is spread evenly over all members, or by whole rows;
    but who is late gets nothing to compute in this step, where others are not. Of a robust rule's rows nobody gets more
    than in an undisturbed step, as the view would wait for others, who never come if nobody is missing: rather than
    that, each computes its usual range, but for what it holds of that. `hosts`: where members are, if rows count by
    host; then no host gets more.
    """
    top = max(entry.committed for entry in entries)
    behind = tuple(e.member for e in entries if e.committed == top - 1)
    stale = tuple(e.member for e in entries if e.committed < top - 1)
    keepers = [e.member for e in entries if e.committed == top and e.keeps_output]
    if behind and not keepers:
        stale, behind = (*stale, *behind), ()
    donor = keepers[0] if behind else None
    members = [entry.member for entry in entries]
    claims = tuple(sorted({claim for entry in entries if entry.committed == top for claim in entry.audit.claims}))
    cases = disputed(claims)
    held = _hold_once([e for e in entries if e.committed == top], cases)
    kept = {member: leaves_of(nodes) for member, nodes in held.items()}
    able = [entry.member for entry in entries if not entry.late] or members  # with rows nobody is late
    none: dict[str, tuple[int, ...]] = dict.fromkeys(members, ())
    anew = none | plan_of(able, top, num_microbatches, num_rows, work if able == members else (), hosts).leaves
    if not kept and not cases:
        return StepPlan(step=top, donor=donor, behind=behind, stale=stale, leaves=anew, orphans=anew)
    have = {leaf for leaves in kept.values() for leaf in leaves}
    lost = [leaf for leaf in range(num_microbatches) if leaf not in have]
    dealt = zip(able, shares(len(able), len(lost)), strict=True)
    orphans = none | {name: tuple(lost[lo:hi]) for name, (lo, hi) in dealt}
    if num_rows > 1:
        orphans = none | deal_orphans(kept, able, lost, num_microbatches, num_rows, hosts)
    elif cases:
        orphans = place(orphans, cases)
    leaves = {m: tuple(sorted((*kept.get(m, ()), *orphans[m]))) for m in members}
    if num_rows > 1:
        most, usual = (_most_rows(own, num_microbatches, num_rows, hosts) for own in (leaves, anew))
        if most > usual:
            leaves, orphans = anew, {m: _unheld(own, held.get(m, ())) for m, own in anew.items()}
    return StepPlan(step=top, donor=donor, behind=behind, stale=stale, leaves=leaves, orphans=orphans, claims=claims)


def _unheld(own: Sequence[int], nodes: Sequence[Node]) -> tuple[int, ...]:
    """The microbatches of a range that no sum of that range alone has."""
    have = leaves_of(node for node in nodes if set(own).issuperset(range(*node)))
    return tuple(leaf for leaf in own if leaf not in have)


def _most_rows(
    leaves: Mapping[str, Sequence[int]], num_microbatches: int, num_rows: int, hosts: Mapping[str, str]
) -> int:
    """Rows that one member, or host, could spoil."""
    return max(rows_spoilt(hosts, [leaves], num_microbatches, num_rows).values())


def _hold_once(entries: Sequence[RollEntry], cases: Mapping[int, Sequence[Claim]]) -> dict[str, list[Node]]:
    """Partial sums that count: the largest first, ties to the earlier member; a sum inside a chosen one is dropped, and
    so is one with a disputed microbatch in it (25)."""
    offers = [
        (-(node[1] - node[0]), index, node)
        for index, entry in enumerate(entries)
        for node in entry.held
        if not void(node, entry.member, cases)
    ]
    chosen: dict[str, list[Node]] = {}
    taken: set[int] = set()
    for _, index, node in sorted(offers):
        span = range(*node)
        if taken.isdisjoint(span):  # nodes nest or are disjoint, so one shared leaf means the whole is inside
            taken.update(span)
            chosen.setdefault(entries[index].member, []).append(node)
    return chosen
