"""What audits found, as the coordinator takes it: written down once, who repeats a wrong answer is evicted.

It judges nothing: members reached the same findings from the same headers. Where they found no majority, the run ends,
because whatever it did next could be built on a wrong gradient (protocol, 25).
"""

from __future__ import annotations

import msgspec

from outlast.core.protocol import messages as m
from outlast.core.protocol.disputes import AuditFinding, leaf_name
from outlast.core.protocol.fleet import change as _change
from outlast.core.protocol.fleet.reports import AuditKey
from outlast.core.protocol.fleet.state import FleetState
from outlast.core.protocol.slices import bucket_name
from outlast.core.protocol.types import ViewId

__all__ = ["audited"]

_IN_A_ROW = 3  # steps with wrong sums or reductions of one replica, after which it is evicted

_REMEDIES = {
    "transient": "none needed; a device that does this again should be taken out",
    "persistent": "take the device out of service and test it; the run goes on without it",
    "gone": "it left before it could be asked again; watch its device",
    "undecided": "start again from the last certified state with another device, or three replicas or more",
    "rewound": "with three replicas or more it could be told which one is wrong; test the devices of both",
    "equivocal": "take the device out of service and test its memory and network; the run goes on without it",
    "memory": "test the memory of its host; its share of the step was computed again",
}


def audited(c: FleetState, now_s: float, message: m.Audited) -> None:
    """One member's findings; every member of its view sends the same."""
    peer = c.roster.peers.get(message.member)
    if peer is None or not peer.alive:
        return
    for told in message.findings:
        finding = _repeated(c, told, message.view)
        if _key(finding) not in c.reports.audits:
            c.reports.audits[_key(finding)] = message.view
            _write(c, finding)
        if finding.kind == "undecided":
            c.finish("failed", 5, finding.step, _words(finding) + "; nothing was done with it")
        elif finding.kind in ("persistent", "equivocal") and finding.culprit in c.current:
            _evict(c, finding)


def _key(f: AuditFinding) -> AuditKey:
    return f.step, f.leaf, f.bucket, f.culprit, f.kind


def _repeated(c: FleetState, f: AuditFinding, view: ViewId) -> AuditFinding:
    """Sums or reductions that are wrong again when the step is done again, in another view, or in several steps in a
    row, are no accident."""
    if f.leaf >= 0 or f.kind not in ("memory", "transient"):
        return f
    steps = {step for step, leaf, _, culprit, _ in c.reports.audits if leaf < 0 and culprit == f.culprit}
    in_a_row = steps.issuperset(range(f.step - _IN_A_ROW + 1, f.step))
    again = c.reports.audits.get(_key(f), view) != view
    return msgspec.structs.replace(f, kind="persistent") if again or in_a_row else f


def _evict(c: FleetState, finding: AuditFinding) -> None:
    if c.awaiting or not c.roster.is_alive(finding.culprit):
        return  # after a restart: it is found again in the view that follows
    _change.begin(c, f"audit: {finding.culprit} is at fault")
    c.condemn(finding.culprit, _words(finding))


def _write(c: FleetState, finding: AuditFinding) -> None:
    c.journal(
        "audit_mismatch",
        step=finding.step,
        microbatch=finding.leaf * finding.ranks if finding.leaf >= 0 else finding.leaf,
        culprit=finding.culprit,
        host=finding.host,
        device=finding.device,
        verdict=finding.kind,
        evidence=_words(finding),
        confidence=finding.agreeing / max(finding.asked, 1),
        remedy=_REMEDIES[finding.kind],
        bucket=finding.bucket,
    )


def _words(f: AuditFinding) -> str:
    where = f"a slice of bucket {bucket_name(f.bucket)}" if f.bucket >= 0 else leaf_name(f.leaf, f.ranks)
    where += f" of step {f.step}"
    if f.kind in ("undecided", "rewound"):
        where = where if max(f.leaf, f.bucket) >= 0 else f"step {f.step}"
        then = "; the run went back to the last certified state" if f.kind == "rewound" else ""
        return f"{f.culprit} differ in {where} and there is no majority{then}"
    if f.kind == "equivocal":
        return f"in step {f.step} {f.culprit} heard other headers than {f.agreeing} of {f.asked} members"
    again = {"transient": ", but not when asked again", "persistent": ", repeatedly"}.get(f.kind, "")
    if f.kind == "memory" and f.bucket >= 0:
        return f"{f.culprit} gathered other bits for {where} than {f.agreeing} replicas hold"
    if max(f.leaf, f.bucket) < 0:
        return (
            f"sums of {f.culprit} in step {f.step} were not what it had fingerprinted, as read by {f.agreeing}{again}"
        )
    if f.bucket >= 0:
        return f"{f.culprit} reduced {where} to something else than {f.agreeing} of {f.asked} replicas{again}"
    return f"{f.culprit} got another gradient for {where} than {f.agreeing} of {f.asked} replicas{again}"
