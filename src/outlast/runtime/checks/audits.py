"""Audits on this replica: commit to fingerprints, compute what others own, tell of it in the header.

What is audited and what follows is `core/protocol/step/audits.py`'s; here the microbatches are computed. The loop sees
an audited microbatch as one more batch of the step. It leaves no trace: its loss, sums and buffers are as if it had not
been, and its random state is the microbatch's own. Nothing here runs with audit = 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
from torch import Tensor

from outlast.config import RunConfig
from outlast.core.phases import Phase
from outlast.core.policy import audit_share
from outlast.core.protocol import Evidence, Exchange, Said, View
from outlast.errors import ConfigError, ViewAbandoned
from outlast.runtime.checks._audit_share import KEY, Vigilance
from outlast.runtime.checks._extra_batches import apart, prepare
from outlast.runtime.checks.checked_sums import watched
from outlast.runtime.checks.critical_parameters import watch
from outlast.runtime.checks.guards import Guarding
from outlast.runtime.exchange.plane import Reduction
from outlast.runtime.exchange.second_reduction import Checks
from outlast.runtime.training.engine import Engine
from outlast.runtime.training.losses import missing_backward
from outlast.runtime.transport.peer_messages import Prints
from outlast.runtime.view.port import ViewPort

__all__ = ["Auditing", "chosen_audit"]


def chosen_audit(audit: float | str, config: RunConfig) -> float | str:
    """A share, or "auto" with or without a budget: what the run was told, else what the script says. ConfigError for
    anything else, and for audits of gradients that need not be equal."""
    chosen = audit if config.audit == "script" else config.audit
    share = audit_share(chosen, config.replicas)
    if share and not config.bitwise:
        raise ConfigError(
            f"audit={chosen} with bitwise = false would find only noise",
            remedy="audit=0, or bitwise = true and a loop that is deterministic",
        )
    return chosen if isinstance(chosen, str) and chosen.startswith("auto") else share


class Auditing:
    """One replica's part. `active`: a backward now belongs to an audit."""

    def __init__(
        self,
        port: ViewPort,
        engine: Engine,
        guards: Guarding,
        step_s: Callable[[], float],
        audit: float | str,
        critical: Sequence[str] = (),
    ) -> None:
        self._port, self._engine, self._guards, self._step_s = port, engine, guards, step_s
        self._vigilance = Vigilance(audit, port.env.config.replicas) if isinstance(audit, str) else None
        share = self._vigilance.share if self._vigilance is not None else float(audit)
        self.active = False
        self._leaf, self._step = -1, -1
        self._said: Said | None = None
        audits = port.member.audits
        audits.seed, audits.host, audits.device = engine.seed, port.env.agent, port.device
        self.share = share
        if self._vigilance is not None:
            engine.step_checks.vigilance = engine.state.extra[KEY] = self._vigilance
        engine.checks = Checks(lambda: audits.share, engine.seed)
        watch(engine, guards, critical, engine.checks)

    @property
    def share(self) -> float:
        """Of microbatches that are computed twice in this step."""
        return self._port.member.audits.share

    @share.setter
    def share(self, share: float) -> None:
        self._port.member.audits.share = share
        self._engine.sums.printing = share > 0.0

    def computed(self, leaf: int) -> None:
        """A microbatch of my own is in my sums."""
        if self.share:
            self._port.member.audits.computed(leaf, self._engine.sums.print, beside=False)

    def commit(self, todo: Exchange) -> None:
        """All that I contribute is computed: say its fingerprints, before anybody can know which are audited."""
        mesh, plan = self._port.mesh, self._port.member.plan
        self._said = None
        if self._vigilance is not None:
            self.share = self._vigilance.share
        if not self.share:
            return
        if mesh is None or plan is None:
            raise ViewAbandoned("the view is closed")
        self._said = {mesh.me: self._port.member.audits.commitment(plan)}
        mesh.broadcast(Prints(todo.step, self._said[mesh.me]))

    def batches(self, todo: Exchange) -> Iterator[Any]:
        """What I owe in this step; each batch must see one backward. ViewAbandoned while others are waited for."""
        mesh, member = self._port.mesh, self._port.member
        if self._said is None:
            return
        if mesh is None:
            raise ViewAbandoned("the view is closed")
        with self._port.lock:
            _, plan = member.standing()
        found = mesh.collect(Prints, todo.step, 0, Phase.HEADER)
        self._said |= {name: found[name].said for name in mesh.peers}
        self._said = {name: self._said[name] for name in todo.view.members}
        owed = member.audits.owed(plan, self._said)
        if owed:
            with apart(self._engine, paused=False):
                for leaf in owed:
                    yield from self._one(todo.step, leaf)

    def _one(self, step: int, leaf: int) -> Iterator[Any]:
        port, engine = self._port, self._engine
        port.enter(Phase.AUDIT, leaf)
        self._step, self._leaf = step, leaf
        if engine.samples.sizes(step)[leaf] == 0:
            engine.begin(step, leaf, None, beside=True)
            self._end()
            return
        batch = prepare(port, engine, step, leaf, Phase.LOAD)
        self.active = True
        with watched(port, engine, step, leaf):
            yield batch
        if self.active:
            raise missing_backward(step, leaf)

    def backward(self, loss: Tensor) -> None:
        """Fingerprint the gradient; it counts nowhere."""
        port, engine = self._port, self._engine
        port.enter(Phase.BACKWARD, self._leaf)
        engine.begin(self._step, self._leaf, None, beside=True)
        engine.state.scaling.scaled(loss).backward()  # type: ignore[no-untyped-call]
        self._end()
        self.active = False
        port.enter(Phase.BODY, self._leaf)

    def _end(self) -> None:
        sums = self._engine.sums
        sums.end()
        self._port.member.audits.computed(self._leaf, sums.print, beside=True)

    def evidence(self, found: Reduction) -> Evidence:
        """My part of the header."""
        false = sorted((*key, value) for key, value in found.false.items())
        if self._said is None:
            return Evidence(false=tuple(false))
        audits = self._port.member.audits
        mine = audits.evidence(sorted(found.unlike), false)
        if self._vigilance is None:
            return mine
        news = self._vigilance.news(audits.incidents)
        return msgspec.structs.replace(mine, incidents=news, step_s=self._step_s())

    @property
    def said(self) -> Said | None:
        """What all members committed to in this step; None without audits."""
        return self._said

    def report(self, view: View) -> None:
        """After the commit: the state's certificate; and to the coordinator what was settled, if anything was."""
        port, audits = self._port, self._port.member.audits
        meta = self._engine.meta
        if self._said is None or meta is None:
            return
        finite = math.isfinite(meta.loss) and (meta.norm is None or math.isfinite(meta.norm))
        audits.passed(port.member.committed, finite=finite, num_parts=self._guards.agreement.num_parts)
        if found := audits.reports(view):
            port.tell_coordinator(found)
