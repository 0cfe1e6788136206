"""Audits on this replica: commit to fingerprints, compute what others own, tell of it in the header.

What is audited and what follows is `core/protocol/step/audits.py`'s; here the microbatches are computed. The loop sees
an audited microbatch as one more batch of the step. It leaves no trace: its loss, sums and buffers are as if it had not
been, and its random state is the microbatch's own. Nothing here runs with audit = 0.
The ranks of a replica audit together: a fingerprint is of the replica, the sum of its ranks' (`lane_checks.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec
from torch import Tensor

from outlast.config import RunConfig
from outlast.core.phases import Phase
from outlast.core.policy import audit_share
from outlast.core.protocol import Evidence
from outlast.errors import ConfigError
from outlast.runtime.checks._audit_share import KEY, Vigilance
from outlast.runtime.checks._extra_batches import apart, prepare
from outlast.runtime.checks.checked_sums import watched
from outlast.runtime.checks.critical_parameters import watch
from outlast.runtime.checks.guards import Guarding
from outlast.runtime.exchange.plane import Reduction
from outlast.runtime.exchange.second_reduction import Checks
from outlast.runtime.training.engine import Engine
from outlast.runtime.training.losses import missing_backward
from outlast.runtime.view.port import Bench, ViewPort
from outlast.tensors import combine

__all__ = ["Auditing", "FollowedAudits", "chosen_audit"]


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


class _Auditor:
    """Computes microbatches that others own. `active`: a backward now belongs to an audit."""

    def __init__(self, bench: Bench, engine: Engine, printed: Callable[[int, int], None]) -> None:
        self._bench, self._engine, self._printed = bench, engine, printed
        self.active = False
        self._leaf, self._step = -1, -1

    def _one(self, step: int, leaf: int) -> Iterator[Any]:
        """One of them, to see one backward; `printed` is told of its fingerprint."""
        bench, engine = self._bench, self._engine
        bench.enter(Phase.AUDIT, leaf)
        self._step, self._leaf = step, leaf
        if engine.is_empty(step, leaf):
            engine.begin(step, leaf, None, beside=True)
            self._end()
            return
        batch = prepare(bench, engine, step, leaf, Phase.LOAD)
        self._awaited = self.active = True
        yield batch
        self.active = False
        if self._awaited:
            raise missing_backward(step, leaf)

    def backward(self, loss: Tensor) -> None:
        """Fingerprint the gradient; it counts nowhere."""
        bench, engine = self._bench, self._engine
        bench.enter(Phase.BACKWARD, self._leaf)
        engine.begin(self._step, self._leaf, None, beside=True)
        engine.state.scaling.scaled(loss).backward()  # type: ignore[no-untyped-call]
        self._awaited = False
        self._end()
        bench.enter(Phase.BODY, self._leaf)

    def _end(self) -> None:
        self._engine.sums.end()
        self._printed(self._leaf, self._engine.sums.print)


class FollowedAudits(_Auditor):
    """The part of a rank that is not its replica's lead. `say`: to the lead."""

    def __init__(
        self,
        bench: Bench,
        engine: Engine,
        guards: Guarding,
        say: Callable[[int], None],
        audit: float | str,
        critical: Sequence[str],
    ) -> None:
        super().__init__(bench, engine, lambda leaf, value: say(value))
        vigilance = Vigilance(audit, bench.env.config.replicas) if isinstance(audit, str) else None
        if vigilance is not None:
            engine.step_checks.vigilance = engine.state.extra[KEY] = vigilance
        share: Callable[[], float] = lambda: vigilance.share if vigilance is not None else float(audit)  # noqa: E731
        engine.checks = Checks(share, engine.seed)
        watch(engine, guards, critical, engine.checks)

    def follow(self, step: int, leaf: int) -> Iterator[Any]:
        """My microbatch of a leaf that the lead of my replica audits."""
        with apart(self._engine, paused=False):
            yield from self._one(step, leaf)


class Auditing(_Auditor):
    """One replica's part."""

    def __init__(
        self,
        port: ViewPort,
        engine: Engine,
        guards: Guarding,
        step_s: Callable[[], float],
        audit: float | str,
        critical: Sequence[str] = (),
    ) -> None:
        super().__init__(port, engine, lambda leaf, value: self._computed(leaf, value, beside=True))
        self._port, self._guards, self._step_s = port, guards, step_s
        self._vigilance = Vigilance(audit, port.env.config.replicas) if isinstance(audit, str) else None
        share = self._vigilance.share if self._vigilance is not None else float(audit)
        self._drawn = False  # audits are, in this step
        audits = port.member.audits
        audits.seed, audits.host, audits.device = engine.seed, port.env.agent, port.device
        audits.ranks = engine.shards.width
        self.share = share
        if self._vigilance is not None:
            engine.step_checks.vigilance = engine.state.extra[KEY] = self._vigilance
        engine.checks = Checks(lambda: audits.share, engine.seed)
        watch(engine, guards, critical, engine.checks)

    @property
    def share(self) -> float:
        """The share of microbatches that are computed twice in this step, 0.0 to 1.0."""
        return self._port.member.audits.share

    @share.setter
    def share(self, share: float) -> None:
        self._port.member.audits.share = share
        self._engine.sums.printing = share > 0.0

    def computed(self, leaf: int) -> None:
        """A microbatch of my own is in my sums."""
        if self.share:
            self._computed(leaf, self._engine.sums.print, beside=False)

    def _computed(self, leaf: int, value: int, *, beside: bool) -> None:
        """`value`: in this rank's rows. The others' are waited for, so no lock is held when this is called."""
        whole = combine([value, *self._guards.others.printed()])
        with self._port.lock:
            self._port.member.audits.computed(leaf, whole, beside=beside)

    def begin(self) -> None:
        """All that I contribute is computed; from here on this step's share is fixed."""
        if self._vigilance is not None:
            self.share = self._vigilance.share
        self._drawn = bool(self.share)

    def batches(self, step: int, owed: Iterable[int]) -> Iterator[Any]:
        """The microbatches that I owe in this step; each batch must see one backward."""
        with apart(self._engine, paused=False):
            for leaf in owed:
                self._guards.others.audit(step, leaf)
                with watched(self._port, self._engine, step, leaf):
                    yield from self._one(step, leaf)

    def evidence(self, found: Reduction) -> Evidence:
        """My part of the header."""
        false = sorted((*key, value) for key, value in found.false.items())
        if not self._drawn:
            return Evidence(false=tuple(false))
        audits = self._port.member.audits
        mine = audits.evidence(sorted(found.unlike), false)
        if self._vigilance is None:
            return mine
        news = self._vigilance.news(audits.incidents)
        return msgspec.structs.replace(mine, incidents=news, step_s=self._step_s())

    def report(self) -> None:
        """After the commit: the state's certificate; and to the coordinator what was settled, if anything was."""
        port, audits = self._port, self._port.member.audits
        meta = self._engine.meta
        if not self._drawn or meta is None:
            return
        finite = math.isfinite(meta.loss) and (meta.norm is None or math.isfinite(meta.norm))
        audits.passed(port.member.committed, finite=finite, num_parts=self._guards.agreement.num_parts)
        if found := audits.reports():
            port.tell_coordinator(found)
