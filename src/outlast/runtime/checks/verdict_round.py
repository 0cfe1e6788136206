"""From complete headers to a verdict that every member of the view shares, and what follows where it is no outcome.

If the headers show reason to look closer, members tell each other once more what they found (`Found`), still before the
step is decided; so a death in between leaves nothing half done. A verdict that is an outcome rides in `Meta`; one that
is none (somebody must go, the run must stop) leaves the step undecided. Decides nothing itself: `core/policy` does.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from outlast.core.phases import Phase
from outlast.core.policy import Culprit, GuardEvidence, Ruling, decide, unreproduced
from outlast.core.protocol import Header, RollEntry
from outlast.core.protocol import messages as m
from outlast.errors import Evicted, GuardStop, StateDiverged, ViewAbandoned
from outlast.runtime.checks.state_comparison import first_difference
from outlast.runtime.transport.mesh import Found, Mesh, Parts

if TYPE_CHECKING:
    from outlast.runtime.member.driver import Replica

__all__ = ["confer", "expel", "report"]


def confer(replica: Replica, mesh: Mesh, headers: Sequence[Header]) -> Ruling | None:
    """The ruling on this step, the same on all members. Raises ViewAbandoned where the step must be done again without
    somebody, and what ends this replica or the run (Evicted, GuardStop, StateDiverged)."""
    guards = replica.engine.guards
    culprits: list[Culprit] = []
    part = ""
    if guards.suspects(headers):
        culprits, part = _look_closer(replica, mesh, headers)
    ruling = guards.rule(headers, culprits, part)
    if ruling is not None and (ruling.evidence.differing or against_whom(ruling.evidence)):
        replica.member.audits.noticed(ruling.evidence.step, ", ".join(against_whom(ruling.evidence)))
    if ruling is not None and ruling.verdict.before_decision:
        _refuse(replica, ruling)
    return ruling


def _look_closer(replica: Replica, mesh: Mesh, headers: Sequence[Header]) -> tuple[list[Culprit], str]:
    """Everybody's findings in the view's order, and the name of what differs."""
    engine, step, me = replica.engine, headers[0].step, replica.env.me
    who = Culprit(replica=me, host=replica.env.agent, device=replica.device)
    differ = engine.guards.evidence(headers, (), "").differing
    mine = Found(step, tuple(replica.findings) or ((who,) if differ else ()))
    replica.findings = []
    replica.enter(Phase.HEADER)
    mesh.broadcast(mine)
    rows = engine.guards.agreement.rows(step) if differ and engine.guards.agreement.num_parts else ()
    if differ:
        mesh.broadcast(Parts(step, rows))
    found = mesh.collect(Found, step, 0, Phase.HEADER)
    everyone = {h.member: mine if h.member == me else found[h.member] for h in headers}
    part = ""
    if differ:
        told = mesh.collect(Parts, step, 0, Phase.HEADER)
        part, count = first_difference({h.member: rows if h.member == me else told[h.member].rows for h in headers})
        part += f" and {count - 1} more" if count > 1 else ""
    return [culprit for each in everyone.values() for culprit in each.culprits], part


def report(replica: Replica, ruling: Ruling | None, against: Sequence[str] = ()) -> None:
    """Tell the coordinator; every member does, and the first counts. A step that was simply applied is not worth it."""
    if ruling is None or not ruling.verdict.evidence:
        return
    told = m.Judged(
        member=replica.env.me, step=ruling.evidence.step, verdict=ruling.verdict, against=tuple(against)
    )  # fmt: skip
    replica.link.send([told])
    if replica.env.coordinator is None:
        v = ruling.verdict
        print(f"outlast: step {told.step}: {v.action}: {v.evidence} ({v.remedy})", file=sys.stderr, flush=True)


def expel(replica: Replica, step: int, differing: Sequence[RollEntry], num_members: int, part: str) -> None:
    """In a roll call some members' states are not the majority's: if the guards replace such replicas, they must go.
    Raises ViewAbandoned on the others and Evicted on them, or returns."""
    guards = replica.engine.guards
    if guards.policy is None or guards.policy.divergence != "replace" or not guards.policy.agreement:
        return
    culprits = tuple(Culprit(replica=e.member, host=e.audit.host, device=e.audit.device) for e in differing)
    evidence = GuardEvidence(
        step=step, num_members=num_members, loss=0.0, culprits=culprits, part=part,
        differing=tuple(e.member for e in differing), joined=tuple(e.member for e in differing if e.joined),
    )  # fmt: skip
    _refuse(replica, Ruling(verdict=decide(guards.policy, guards.state, evidence), evidence=evidence))


def against_whom(evidence: GuardEvidence) -> tuple[str, ...]:
    """The members that a replacement is about."""
    if evidence.differing:
        return evidence.differing
    return tuple(dict.fromkeys(culprit.replica for culprit in unreproduced(evidence)))


def _refuse(replica: Replica, ruling: Ruling) -> None:
    """The step is not decided: it is done again without who was wrong, or the run ends here."""
    verdict, evidence, me = ruling.verdict, ruling.evidence, replica.env.me
    where = f"replica {me}, step {evidence.step}"
    if verdict.action == "stop":
        report(replica, ruling)
        kind = StateDiverged if evidence.differing else GuardStop
        raise kind(verdict.evidence, where=where, did="nothing was committed", remedy=verdict.remedy)
    against = against_whom(evidence)
    report(replica, ruling, against)
    if me in against:
        raise Evicted(verdict.evidence, where=where, did="the run goes on without it", remedy=verdict.remedy)
    with replica.lock:
        answers = replica.member.lost((), f"{', '.join(against)}: {verdict.evidence}", time.monotonic(), stale=against)
    replica.link.send(answers)
    raise ViewAbandoned(f"{', '.join(against)} must go: {verdict.evidence}")
