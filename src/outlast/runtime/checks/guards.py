"""The guards of one replica, beside its engine: what goes into the header, what a step's headers show, what is done.

Everything that steers training follows from headers and from `GuardState`, which is registered with the training state:
joiners, checkpoints and fingerprints hold it like anything else. Decisions are `core/policy`'s; who is told of them is
the course's business (`core/protocol/step/verdict.py`). A step that is not applied leaves parameters, optimizer,
schedules and buffers as they were.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from outlast.core.policy import (
    Culprit,
    GuardEvidence,
    GuardNote,
    Guards,
    GuardState,
    Ruling,
    agree,
    decide,
    fresh_state,
    is_nonfinite,
    is_spike,
    remember,
)
from outlast.core.policy.step_decisions import can_rewind
from outlast.core.protocol import Header
from outlast.core.protocol.step.verdict import PartRows
from outlast.runtime.checks._activations import Activations
from outlast.runtime.checks._certified_state import InMemory
from outlast.runtime.checks._state_rotation import Agreement
from outlast.runtime.checks.lane_checks import LaneChecks, note_of_ranks, rows_of_ranks
from outlast.runtime.training.engine import Engine
from outlast.runtime.training.step_checks import Meta, Unguarded

__all__ = ["KEY", "Guarding"]

KEY = "outlast.guards"


class Guarding(Unguarded):
    """Watches steps by the guards' policy. `policy` None: nothing is watched."""

    def __init__(self, engine: Engine, policy: Guards | None) -> None:
        self.engine, self.policy = engine, policy
        self.reads_norm = policy is not None and policy.reads_norm
        self.state: GuardState = fresh_state(policy or Guards())
        self.agreement = Agreement(engine.state, policy.agreement if policy else 0)
        self.certified = InMemory(KEY) if policy and policy.certify_every else None
        self.others = LaneChecks()  # of the replica's other ranks, where this one leads them
        self.activations = Activations(engine.state.model, policy) if policy and policy.collapse != "off" else None
        self._read: tuple[Sequence[Header], GuardEvidence] | None = None
        self.undecided = ""  # said by audits: see GuardEvidence
        if policy is not None:
            engine.state.extra[KEY] = self

    # --- part of the training state ------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        kept = self.certified.state_dict() if self.certified is not None else None
        return {"guards": msgspec.to_builtins(self.state), "certified": kept}

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        self.state = msgspec.convert(values["guards"], GuardState)
        if self.certified is not None and values["certified"] is not None:
            self.certified.load_state_dict(values["certified"], self.engine.state)
        self.engine.samples.leave_out(self.state.left_out)

    # --- before the exchange -------------------------------------------------------------------------------------
    def microbatch_begins(self) -> None:
        if self.activations is not None:
            self.activations.begin()

    def microbatch_ends(self) -> None:
        if self.activations is not None:
            self.activations.end()

    def note(self, step: int, others: Sequence[GuardNote] = ()) -> GuardNote:
        """My part of the header of this step. `others`: what the replica's other ranks would say."""
        full = 0
        if self.certified is not None and self._certifies(step):
            self.engine.restore_buffers()
            full = self.certified.fingerprint(self.engine.state)
        mine = GuardNote(full=full, collapsed=self.activations.take() if self.activations is not None else ())
        return note_of_ranks([mine, *others]) if others else mine

    def _certifies(self, step: int) -> bool:
        every = self.policy.certify_every if self.policy is not None else 0
        return every > 0 and step > 0 and step % every == 0 and self.state.num_bad == 0

    # --- headers to ruling ---------------------------------------------------------------------------------------
    def suspects(self, headers: Sequence[Header]) -> bool:
        """Whether members must look closer before this step can be decided: the same answer on all."""
        if self.policy is None:
            return False
        return bool(self._plain(headers).differing) or self.is_nonfinite(headers) or self.is_spike(headers)

    def is_nonfinite(self, headers: Sequence[Header]) -> bool:
        return self.policy is not None and self.policy.nonfinite != "off" and is_nonfinite(self._plain(headers))

    def is_spike(self, headers: Sequence[Header]) -> bool:
        return self.policy is not None and is_spike(self.policy, self.state, self._plain(headers))

    def _plain(self, headers: Sequence[Header]) -> GuardEvidence:
        """What the headers alone say; asked for several times a step."""
        if self._read is None or self._read[0] is not headers:
            self._read = headers, self._looked(headers, (), "")
        return self._read[1]

    def evidence(self, headers: Sequence[Header], culprits: Sequence[Culprit], part: str) -> GuardEvidence:
        """What the headers of a step say, and what members found when they looked closer."""
        return self._looked(headers, culprits, part) if culprits or part else self._plain(headers)

    def _looked(self, headers: Sequence[Header], culprits: Sequence[Culprit], part: str) -> GuardEvidence:
        step = headers[0].step
        losses = {leaf: loss for header in headers for leaf, loss, _ in header.losses}
        bad = tuple(sorted(leaf for leaf, loss in losses.items() if not math.isfinite(loss)))
        loss = self.engine.loss_of(headers)
        if self.engine.robust is not None:  # whose rule counts such rows against f; what it lets through is the norm's
            good = [loss for loss in losses.values() if math.isfinite(loss)]
            bad, loss = (), sum(sorted(good)) / max(1, len(good))
        norm = self.engine.norm_of(headers)
        differing, majority = agree({h.member: (h.state, h.guard.full) for h in headers})
        if bad and not culprits:
            culprits = [Culprit(microbatch=bad[0], samples=tuple(self.engine.samples.indices(step, bad[0])))]
        return GuardEvidence(
            step=step,
            num_members=len(headers),
            loss=loss,
            norm=None if self.engine.state.scaling.overflowed(norm) else norm,  # which the scale answers for
            bad_microbatches=bad,
            culprits=tuple(culprits),
            differing=differing,
            majority=majority,
            part=part,
            collapsed=tuple(row for header in headers for row in header.guard.collapsed),
            certified=self._certified_step,
            undecided=self.undecided,
        )

    @property
    def _certified_step(self) -> int:
        return self.certified.step if self.certified is not None else -1

    @property
    def can_rewind(self) -> bool:
        """Whether there is a state that every member would go back to: the same answer on all."""
        return self.policy is not None and can_rewind(self.policy, self.state, self._certified_step)

    def rows(self, step: int) -> PartRows:
        """One fingerprint for each tensor of the step's part of the state, to name what differs."""
        return rows_of_ranks([self.own_rows(step), *self.others.rows(step)]) if self.agreement.num_parts else ()

    def own_rows(self, step: int) -> PartRows:
        """As `rows`, of this rank's part."""
        return self.agreement.rows(step)

    def rule(self, headers: Sequence[Header], culprits: Sequence[Culprit], part: str) -> Ruling | None:
        """The verdict on the step; None without guards."""
        if self.policy is None:
            return None
        evidence = self.evidence(headers, culprits, part)
        return Ruling(verdict=decide(self.policy, self.state, evidence), evidence=evidence)

    # --- the outcome ---------------------------------------------------------------------------------------------
    def before(self, meta: Meta) -> bool:
        """Whether the optimizer takes this step; what is done instead is done here."""
        if self.policy is None or meta.ruling is None:
            return True
        verdict = meta.ruling.verdict
        if verdict.action == "rewind" and self.certified is not None:
            self.certified.restore(self.engine.state)
            self.engine.take_buffers()
        elif verdict.applies and self.certified is not None and self._certifies(meta.step):
            self.engine.restore_buffers()
            self.certified.keep(self.engine.state, meta.step)
        return verdict.applies

    def after(self, meta: Meta) -> None:
        """Remember the step."""
        if self.policy is None or meta.ruling is None:
            return
        ruling, old = meta.ruling, self.state
        self.state = remember(self.policy, old, ruling.evidence, ruling.verdict)
        if self.state.left_out != old.left_out:
            self.engine.samples.leave_out(self.state.left_out)

    @contextmanager
    def rates(self, step: int) -> Iterator[None]:
        """Lowered learning rates around the optimizers' step, if a verdict said so; schedules do not see them."""
        if self.policy is None or step >= self.state.rate_until:
            yield
            return
        groups = [group for optimizer in self.engine.state.optimizers for group in optimizer.param_groups]
        before = [group["lr"] for group in groups]
        for group in groups:
            group["lr"] = group["lr"] * self.policy.rate_factor
        yield
        for group, rate in zip(groups, before, strict=True):
            group["lr"] = rate
