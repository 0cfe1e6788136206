"""What audits found, as the coordinator takes it: written down once, who repeats a wrong answer is evicted.

It judges nothing: members reached the same findings from the same headers. Where they found no majority, the run ends,
because whatever it did next could be built on a wrong gradient (protocol, 25).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from outlast.core.protocol import _change
from outlast.core.protocol import _messages as m
from outlast.core.protocol._claims import Finding

if TYPE_CHECKING:
    from outlast.core.protocol._coordinator import Coordinator

__all__ = ["audited"]

_REMEDIES = {
    "transient": "none needed; a device that does this again should be taken out",
    "persistent": "take the device out of service and test it; the run goes on without it",
    "gone": "it left before it could be asked again; watch its device",
    "undecided": "start again from the last certified state with another device, or three replicas or more",
    "equivocal": "take the device out of service and test its memory and network; the run goes on without it",
    "memory": "test the memory of its host; its share of the step was computed again",
}


def audited(c: Coordinator, now_s: float, message: m.Audited) -> None:
    """One member's findings; every member of its view sends the same."""
    peer = c.roster.peers.get(message.member)
    if peer is None or not peer.alive:
        return
    for finding in message.findings:
        key = (finding.step, finding.leaf, finding.culprit, finding.kind)
        if key not in c.reports.audits:
            c.reports.audits.add(key)
            _write(c, finding)
        if finding.kind == "undecided":
            c.finish("failed", 5, finding.step, _words(finding) + "; nothing was done with it")
        elif finding.kind in ("persistent", "equivocal") and finding.culprit in c.current:
            _evict(c, finding)


def _evict(c: Coordinator, finding: Finding) -> None:
    if c.awaiting or not c.roster.is_alive(finding.culprit):
        return  # after a restart: it is found again in the view that follows
    _change.begin(c, f"audit: {finding.culprit} is at fault")
    c.condemn(finding.culprit, _words(finding))


def _write(c: Coordinator, finding: Finding) -> None:
    c.journal(
        "audit_mismatch", step=finding.step, microbatch=finding.leaf, culprit=finding.culprit, host=finding.host,
        device=finding.device, verdict=finding.kind, evidence=_words(finding),
        confidence=finding.agreeing / max(finding.asked, 1), remedy=_REMEDIES[finding.kind],
    )  # fmt: skip


def _words(f: Finding) -> str:
    where = f"microbatch {f.leaf} of step {f.step}"
    if f.kind == "undecided":
        return f"{f.culprit} differ in {where if f.leaf >= 0 else f'step {f.step}'} and there is no majority"
    if f.kind == "equivocal":
        return f"in step {f.step} {f.culprit} heard other headers than {f.agreeing} of {f.asked} members"
    if f.kind == "memory":
        return f"sums of {f.culprit} in step {f.step} were not what it had fingerprinted, as read by {f.agreeing}"
    again = {"transient": ", but not when asked again", "persistent": ", repeatedly", "gone": ""}[f.kind]
    return f"{f.culprit} got another gradient for {where} than {f.agreeing} of {f.asked} replicas{again}"
