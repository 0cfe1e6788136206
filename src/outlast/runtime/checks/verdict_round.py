"""From complete headers to a verdict that every member of the view shares, and what follows where it is no outcome.

If the headers show reason to look closer, members tell each other once more what they found (`Found`), still before the
step is decided; so a death in between leaves nothing half done. A verdict that is an outcome rides in `Meta`; one that
is none (somebody must go, the run must stop) leaves the step undecided. Decides nothing itself: `core/policy` does.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from outlast.core.phases import Phase
from outlast.core.policy import Culprit, GuardEvidence, Ruling, decide, unreproduced
from outlast.core.protocol import Header, RollEntry
from outlast.core.protocol import messages as m
from outlast.errors import Evicted, GuardStop, StateDiverged, ViewAbandoned
from outlast.runtime.checks.guards import Guarding
from outlast.runtime.checks.state_comparison import first_difference
from outlast.runtime.transport.mesh import CloserLook, Parts
from outlast.runtime.view.port import ViewPort

__all__ = ["confer", "expel", "report"]


def confer(port: ViewPort, guards: Guarding, headers: Sequence[Header], findings: Sequence[Culprit]) -> Ruling | None:
    """The ruling on this step, the same on all members; `findings`: what I found when I looked closer. Raises
    ViewAbandoned where the step must be done again without somebody, and what ends this replica or the run (Evicted,
    GuardStop, StateDiverged)."""
    culprits: list[Culprit] = []
    part = ""
    if guards.suspects(headers):
        culprits, part = _look_closer(port, guards, headers, findings)
    ruling = guards.rule(headers, culprits, part)
    if ruling is not None and (ruling.evidence.differing or against_whom(ruling.evidence)):
        port.member.audits.noticed(ruling.evidence.step, ", ".join(against_whom(ruling.evidence)))
    if ruling is not None and ruling.verdict.before_decision:
        _refuse(port, ruling)
    return ruling


def _look_closer(
    port: ViewPort, guards: Guarding, headers: Sequence[Header], findings: Sequence[Culprit]
) -> tuple[list[Culprit], str]:
    """Everybody's findings in the view's order, and the name of what differs."""
    step, me = headers[0].step, port.env.me
    who = Culprit(replica=me, host=port.env.agent, device=port.device)
    differ = guards.evidence(headers, (), "").differing
    port.enter(Phase.HEADER)
    rows = guards.agreement.rows(step) if differ and guards.agreement.num_parts else ()
    mesh = port.mesh
    if mesh is None:
        raise ViewAbandoned("the view is closed")
    mine = CloserLook(step, tuple(findings) or ((who,) if differ else ()))
    mesh.broadcast(mine)
    if differ:  # both are said before either is waited for
        mesh.broadcast(Parts(step, rows))
    found = mesh.collect(CloserLook, step, 0, Phase.HEADER)
    everyone = {h.member: mine if h.member == me else found[h.member] for h in headers}
    part = ""
    if differ:
        told = mesh.collect(Parts, step, 0, Phase.HEADER)
        part, count = first_difference({h.member: rows if h.member == me else told[h.member].rows for h in headers})
        part += f" and {count - 1} more" if count > 1 else ""
    return [culprit for each in everyone.values() for culprit in each.culprits], part


def report(port: ViewPort, ruling: Ruling | None, against: Sequence[str] = ()) -> None:
    """Tell the coordinator; every member does, and the first counts. A step that was simply applied is not worth it."""
    if ruling is None or not ruling.verdict.evidence:
        return
    told = m.Judged(member=port.env.me, step=ruling.evidence.step, verdict=ruling.verdict, against=tuple(against))
    port.tell_coordinator([told])
    if port.env.coordinator is None:
        v = ruling.verdict
        print(f"outlast: step {told.step}: {v.action}: {v.evidence} ({v.remedy})", file=sys.stderr, flush=True)


def expel(
    port: ViewPort, guards: Guarding, step: int, differing: Sequence[RollEntry], num_members: int, part: str
) -> None:
    """In a roll call some members' states are not the majority's: if the guards replace such replicas, they must go.
    Raises ViewAbandoned on the others and Evicted on them, or returns."""
    if guards.policy is None or guards.policy.divergence != "replace" or not guards.policy.agreement:
        return
    culprits = tuple(Culprit(replica=e.member, host=e.audit.host, device=e.audit.device) for e in differing)
    evidence = GuardEvidence(
        step=step,
        num_members=num_members,
        loss=0.0,
        culprits=culprits,
        part=part,
        differing=tuple(e.member for e in differing),
        joined=tuple(e.member for e in differing if e.joined),
    )
    _refuse(port, Ruling(verdict=decide(guards.policy, guards.state, evidence), evidence=evidence))


def against_whom(evidence: GuardEvidence) -> tuple[str, ...]:
    """The members that a replacement is about."""
    if evidence.differing:
        return evidence.differing
    return tuple(dict.fromkeys(culprit.replica for culprit in unreproduced(evidence)))


def _refuse(port: ViewPort, ruling: Ruling) -> None:
    """The step is not decided: it is done again without who was wrong, or the run ends here."""
    verdict, evidence, me = ruling.verdict, ruling.evidence, port.env.me
    where = f"replica {me}, step {evidence.step}"
    if verdict.action == "stop":
        report(port, ruling)
        kind = StateDiverged if evidence.differing else GuardStop
        raise kind(verdict.evidence, where=where, did="nothing was committed", remedy=verdict.remedy)
    against = against_whom(evidence)
    report(port, ruling, against)
    if me in against:
        raise Evicted(verdict.evidence, where=where, did="the run goes on without it", remedy=verdict.remedy)
    with port.lock:
        answers = port.member.lost((), f"{', '.join(against)}: {verdict.evidence}", time.monotonic(), stale=against)
    port.tell_coordinator(answers)
    raise ViewAbandoned(f"{', '.join(against)} must go: {verdict.evidence}")
