"""One member's part in audits of a step: what it computed to which fingerprint, what it owes, what headers come to.

Before a step is decided every member has committed to the fingerprints of its microbatches; from these the audits are
drawn; seconds compute them and say so in their headers (protocol, 25). Claims that differ hold the step: the view is
left, the microbatch counts as an orphan of the next one, and those who spoke compute it again beside a third. All of
it is a function of what every member has, so all hold, go on or accuse alike. `disputes.py` has the arithmetic.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from outlast.core.protocol import messages as m
from outlast.core.protocol.disputes import (
    AuditFinding,
    Certificate,
    Claim,
    Commitment,
    Evidence,
    Incident,
    Stand,
    claims_in,
    committed,
    disputed,
    draw,
    draw_key,
    findings_of,
    leaf_name,
    leaves_in,
    to_ask,
    void,
)
from outlast.core.protocol.tree import Node
from outlast.core.protocol.types import Header, RollEntry, StepPlan, View, ViewId
from outlast.errors import ViewAbandoned

__all__ = ["Audits"]

_INCIDENTS = 64
_NAMES = 4  # microbatches named in a cause


class Audits:
    """`share`: of microbatches computed twice; 0: nothing of this happens. `host`, `device`: where this member runs."""

    def __init__(self, me: str) -> None:
        self.me, self.share, self.seed, self.host, self.device = me, 0.0, 0, "", ""
        self.ranks = 1  # of a replica
        self.hosts: dict[str, str] = {}
        self.devices: dict[str, str] = {}
        self.num_audited = 0  # microbatches of committed steps that were computed twice
        self.num_held = 0  # steps that a mismatch held
        self._mine: dict[int, tuple[int, int]] = {}  # leaf -> attempt, fingerprint: claims once somebody asks for them
        self._beside: dict[int, tuple[int, int]] = {}
        self._tries: dict[int, int] = {}
        self._known: set[Claim] = set()  # claims on disputed microbatches of this step
        self._unlike: set[str] = set()  # whose sums of this step were found changed
        self._pending: dict[ViewId, list[AuditFinding]] = {}  # by the view that found it, not by the one it is told in
        self.incidents: list[Incident] = []  # the newest of this process, whoever found them
        self.can_rewind = False  # there is a certified state that every member of the view would go back to
        self.undecided = ""  # why this step ends in going back to it
        self._said = b""
        self._drawn = 0
        self.certificate: Certificate | None = None
        self._base: int | None = None  # a rotation of the state's fingerprints began here

    @property
    def active(self) -> bool:
        return self.share > 0.0

    # --- this step -----------------------------------------------------------------------------------------------
    def clear(self) -> None:
        """A new step."""
        self._mine.clear()
        self._beside.clear()
        self._tries.clear()
        self._known.clear()
        self._unlike.clear()
        self.undecided = ""

    def computed(self, leaf: int, value: int, *, beside: bool) -> None:
        """I computed a microbatch, for my sums or beside them."""
        attempt = self._tries[leaf] = self._tries.get(leaf, 0) + 1
        (self._beside if beside else self._mine)[leaf] = attempt, value

    def commitment(self, plan: StepPlan) -> Commitment:
        """The fingerprints of everything that I contribute. Said before anybody can know what is audited."""
        mine = self._mine
        return committed((leaf, *mine[leaf]) for leaf in plan.leaves[self.me] if leaf in mine)

    def owed(self, plan: StepPlan, said: Mapping[str, Commitment]) -> tuple[int, ...]:
        """What I compute beside my share, all commitments being known (in view order): drawn, or disputed and not yet
        answered."""
        self._hear(said)
        drawn = draw(plan.leaves, self.hosts, self.share, draw_key(self.seed, plan.step, said.values()))
        self._drawn = sum(map(len, drawn.values()))
        if not (self._drawn or self._known or plan.claims):  # as in most steps
            return ()
        members = list(plan.leaves)
        wanted = {leaf for leaf in drawn[self.me] if leaf not in self._beside}
        for leaf, case in disputed(self._claims(plan)).items():
            spoken = max((claim.attempt for claim in case if claim.member == self.me), default=0)
            if self.me in to_ask(case, members, self.hosts) and self._tries.get(leaf, 0) <= spoken:
                wanted.add(leaf)
        return tuple(sorted(wanted.difference(plan.leaves[self.me])))

    def evidence(self, unlike: Sequence[str] = (), false: Sequence[tuple[int, str, int]] = ()) -> Evidence:
        """My part of the header."""
        claims = tuple(sorted(self._own(self._beside))) if self._beside else ()
        said = int.from_bytes(self._said[:8], "big")
        return Evidence(claims=claims, said=said, unlike=tuple(unlike), false=tuple(false))

    # --- the roll call -------------------------------------------------------------------------------------------
    def stand(self, plan: StepPlan | None, step: int) -> Stand:
        """My part of the roll: disputed claims of the step I am in, and my own newest words on them."""
        known = set(self._known) | set(plan.claims if plan is not None and plan.step == step else ())
        leaves = {claim.leaf for claim in known}
        own = {claim for table in (self._mine, self._beside) for claim in self._own(table) if claim.leaf in leaves}
        claims = tuple(sorted(known | own))
        return Stand(host=self.host, device=self.device, claims=claims, unlike=tuple(sorted(self._unlike)))

    def sound(self, entries: Sequence[RollEntry]) -> list[RollEntry]:
        """The roll without sums that somebody found changed in this step: the same on every member."""
        top = max(entry.committed for entry in entries)
        self._unlike = {name for entry in entries if entry.committed == top for name in entry.audit.unlike}
        return [msgspec.structs.replace(e, held=()) if e.member in self._unlike else e for e in entries]

    def drop_unsound(self) -> bool:
        """Whether my own sums are among them; my words on them are then not mine any more."""
        if self.me in self._unlike:
            self._mine.clear()
        return self.me in self._unlike

    def called(self, entries: Sequence[RollEntry]) -> None:
        """A new view: who runs where; what was said before is nobody's promise any more."""
        self.hosts |= {entry.member: entry.audit.host for entry in entries}
        self.devices |= {entry.member: entry.audit.device for entry in entries}
        self._said, self._drawn = b"", 0
        top = max(entry.committed for entry in entries)
        # For the next roll: who knew of a dispute may be gone by then, and others have left before they judged it.
        self._known.update(claim for entry in entries if entry.committed == top for claim in entry.audit.claims)
        self._base = None

    def keeps(self, node: Node, plan: StepPlan) -> bool:
        """Whether a sum that I hold still counts."""
        return not void(node, self.me, disputed(plan.claims))

    def _claims(self, plan: StepPlan) -> set[Claim]:
        return self._known | set(plan.claims)

    def _own(self, table: Mapping[int, tuple[int, int]]) -> Iterator[Claim]:
        return (Claim(leaf, self.me, attempt, value) for leaf, (attempt, value) in table.items())

    # --- the verdict ---------------------------------------------------------------------------------------------
    def judge(self, plan: StepPlan, view: View, said: Mapping[str, Commitment], headers: Sequence[Header]) -> None:
        """All headers are there. Returns if the step may be decided; raises ViewAbandoned, the same on every member,
        if it must not: then the view is left (`Member.lost`) and the next one settles it."""
        self.undecided = ""
        self._hear(headers)
        if not self._silent(plan, said, headers):
            self._settle(plan, view, said, headers)
        self.num_audited += self._drawn

    def _silent(self, plan: StepPlan, said: Mapping[str, Commitment], headers: Sequence[Header]) -> bool:
        """Whether nothing was said that could differ from anything: one word at most on each microbatch."""
        if self._known or plan.claims or len({header.audit.said for header in headers}) > 1:
            return False
        leaves = leaves_in(said.values())
        return len(set(leaves)) == len(leaves) and not any(h.audit.claims or h.audit.unlike for h in headers)

    def _settle(self, plan: StepPlan, view: View, said: Mapping[str, Commitment], headers: Sequence[Header]) -> None:
        findings = _equivocal(plan.step, headers)
        told = (claim for header in headers for claim in header.audit.claims)
        owners = {leaf: name for name in view.members for leaf in plan.leaves[name]}
        cases = disputed(claim for claim in (*self._claims(plan), *claims_in(said), *told) if claim.leaf in owners)
        again: list[int] = []
        for leaf, case in cases.items():
            asked = to_ask(case, view.members, self.hosts)
            rows = findings_of(plan.step, leaf, case) if not asked else ()
            if self.can_rewind and any(row.kind == "undecided" for row in rows):
                rows = tuple(msgspec.structs.replace(row, kind="rewound") for row in rows)
                name = leaf_name(leaf, self.ranks)
                self.undecided = f"{rows[0].culprit} differ in {name} of step {plan.step}, and no majority"
            elif asked or void((leaf, leaf + 1), owners[leaf], cases):
                again.append(leaf)
            findings += rows
        self._known = {claim for case in cases.values() for claim in case}
        unlike = sorted({name for header in headers for name in header.audit.unlike})
        self._unlike.update(unlike)
        findings += [_memory(plan.step, name, headers) for name in unlike]
        self._note(view.id, findings)
        accused = accused_of(findings, view.members)
        if again or accused or unlike:
            self.num_held += 1
            named = {leaf_name(leaf, self.ranks): cases[leaf] for leaf in again}
            raise ViewAbandoned(_cause(plan.step, named, accused, unlike))

    def hold(self, view: ViewId, findings: Iterable[AuditFinding]) -> None:
        """Something else than a microbatch was wrong, and the step is held; these are to be reported."""
        self.num_held += 1
        self._note(view, findings)

    def _note(self, view: ViewId, findings: Iterable[AuditFinding]) -> None:
        for finding in findings:
            pending = self._pending.setdefault(view, [])
            pending += [finding] if finding not in pending else []
            self.noticed(finding.step, finding.culprit)

    def noticed(self, step: int, who: str) -> None:
        """Something was computed wrongly, and nobody had said so."""
        if (step, who) not in self.incidents:
            self.incidents = [*self.incidents, (step, who)][-_INCIDENTS:]

    def reports(self) -> list[m.ToCoordinator]:
        """What was found since the last call, for the coordinator: under the view that found it. When a member comes to
        tell, the next view may have been installed for what others told; named with that one, it would have been found
        twice, and who was wrong once would be taken for broken."""
        pending, self._pending = self._pending, {}
        return [m.Audited(member=self.me, view=view, findings=self._placed(found)) for view, found in pending.items()]

    def _placed(self, found: Iterable[AuditFinding]) -> tuple[AuditFinding, ...]:
        return tuple(
            msgspec.structs.replace(
                f, host=self.hosts.get(f.culprit, ""), device=self.devices.get(f.culprit, ""), ranks=self.ranks
            )
            for f in found
        )

    def compared(self, step: int) -> None:
        """All members hold the same whole state after `step` steps."""
        self._certify(step, step)

    def passed(self, committed: int, *, finite: bool, num_parts: int) -> None:
        """A step was committed with these audits passed. Every step members compare one of `num_parts` parts of the
        state (17): once all have agreed, so had the state at which the round began. 0: they compare nothing."""
        if not finite or not num_parts:
            self._base = None
        elif self._base is None:
            self._base = committed
        elif committed - self._base >= num_parts:
            self._certify(self._base, committed)

    def _certify(self, step: int, base: int) -> None:
        self._base = base
        if self.active and (self.certificate is None or step >= self.certificate.step):
            share = self.share if len(self.hosts) > 1 else 0.0
            self.certificate = Certificate(step=step, share=share, audited=self.num_audited)

    def _hear(self, what: object) -> None:
        body = msgspec.msgpack.encode(what)
        self._said = hashlib.blake2b(self._said + body, digest_size=16).digest()


def accused_of(findings: Iterable[AuditFinding], members: Sequence[str]) -> tuple[str, ...]:
    """Members that must go, or, where it cannot be told who, all who are in doubt: then nothing more is committed."""
    names: list[str] = []
    for finding in findings:
        if finding.kind in ("persistent", "equivocal", "undecided"):
            names += [name for name in finding.culprit.split(", ") if name in members or finding.kind == "undecided"]
    return tuple(dict.fromkeys(names))


def _equivocal(step: int, headers: Sequence[Header]) -> list[AuditFinding]:
    """Members that heard other things than most: they, or who told them, say different things to different members."""
    votes = Counter(header.audit.said for header in headers)
    if len(votes) == 1:
        return []
    (value, count), *_ = votes.most_common()
    total = len(headers)
    if 2 * count <= total:
        names = ", ".join(header.member for header in headers)
        return [AuditFinding(step=step, leaf=-1, culprit=names, kind="undecided", agreeing=count, asked=total)]
    return [
        AuditFinding(step=step, leaf=-1, culprit=header.member, kind="equivocal", agreeing=count, asked=total)
        for header in headers
        if header.audit.said != value
    ]


def _memory(step: int, name: str, headers: Sequence[Header]) -> AuditFinding:
    saw = sum(name in header.audit.unlike for header in headers)
    return AuditFinding(step=step, leaf=-1, culprit=name, kind="memory", agreeing=saw, asked=len(headers) - 1)


def _cause(step: int, again: Mapping[str, Sequence[Claim]], accused: Sequence[str], unlike: Sequence[str]) -> str:
    parts = []
    for what, case in list(again.items())[:_NAMES]:
        names = ", ".join(sorted({claim.member for claim in case}))
        parts.append(f"{what} of step {step} {'differ' if ' to ' in what else 'differs'} between {names}")
    if len(again) > _NAMES:
        parts.append(f"{len(again) - _NAMES} microbatches more")
    parts += [f"{name} is at fault" for name in accused]
    parts += [f"sums of {name} changed after it made them" for name in unlike]
    return "audit: " + "; ".join(parts)
