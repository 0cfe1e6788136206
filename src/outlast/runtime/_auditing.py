"""Audits on this replica: commit to fingerprints, compute what others own, tell of it in the header.

What is audited and what follows is `core/protocol/_audits.py`'s; here the microbatches are computed. The loop sees an
audited microbatch as one more batch of the step. It leaves no trace: its loss, sums and buffers are as if it had not
been, and its random state is the microbatch's own. Nothing here runs with audit = 0.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from outlast.config import RunConfig
from outlast.core.phases import Phase
from outlast.core.protocol import Evidence, Exchange, Header, Said, View
from outlast.errors import ConfigError, StepMisuse, ViewAbandoned
from outlast.runtime._mesh import Prints
from outlast.runtime._plane import Reduction
from outlast.runtime._replica import Replica
from outlast.runtime._second_reduction import Checks, settle

__all__ = ["Auditing", "check_bitwise"]


def check_bitwise(share: float, config: RunConfig) -> None:
    """ConfigError for audits of gradients that need not be equal."""
    if share and not config.bitwise:
        raise ConfigError(
            f"audit={share:g} with bitwise = false would find only noise",
            remedy="audit=0, or bitwise = true and a loop that is deterministic",
        )


class Auditing:
    """One replica's part. `active`: a backward now belongs to an audit."""

    def __init__(self, replica: Replica, share: float) -> None:
        self._replica, self.share = replica, share
        self.active = False
        self._leaf, self._step = -1, -1
        self._said: Said | None = None
        engine, audits = replica.engine, replica.member.audits
        audits.share, audits.seed, audits.host = share, engine.seed, replica.env.agent
        audits.device = str(engine.layout.device)
        engine.sums.printing = share > 0.0
        engine.checks = Checks(lambda: audits.share, engine.seed)

    def computed(self, leaf: int) -> None:
        """A microbatch of my own is in my sums."""
        if self.share:
            self._replica.member.audits.computed(leaf, self._replica.engine.sums.print, beside=False)

    def commit(self, todo: Exchange) -> None:
        """All that I contribute is computed: say its fingerprints, before anybody can know which are audited."""
        mesh, plan = self._replica.mesh, self._replica.member.plan
        self._said = None
        if not self.share:
            return
        if mesh is None or plan is None:
            raise ViewAbandoned("the view is closed")
        self._said = {mesh.me: self._replica.member.audits.commitment(plan)}
        mesh.broadcast(Prints(todo.step, self._said[mesh.me]))

    def batches(self, todo: Exchange) -> Iterator[Any]:
        """What I owe in this step; each batch must see one backward. ViewAbandoned while others are waited for."""
        mesh, member = self._replica.mesh, self._replica.member
        if self._said is None:
            return
        if mesh is None or member.plan is None:
            raise ViewAbandoned("the view is closed")
        found = mesh.collect(Prints, todo.step, 0, Phase.HEADER)
        self._said |= {name: found[name].claims for name in mesh.peers}
        self._said = {name: self._said[name] for name in todo.view.members}
        owed = member.audits.owed(member.plan, self._said)
        if owed:
            extra = self._replica.engine.state.extra
            saved = {key: copy.deepcopy(part.state_dict()) for key, part in extra.items()}
            for leaf in owed:
                yield from self._one(todo.step, leaf)
            for key, values in saved.items():
                extra[key].load_state_dict(values)

    def _one(self, step: int, leaf: int) -> Iterator[Any]:
        replica, engine = self._replica, self._replica.engine
        replica.enter(Phase.AUDIT, leaf)
        self._step, self._leaf = step, leaf
        if engine.samples.sizes(step)[leaf] == 0:
            engine.begin(step, leaf, None, beside=True)
            self._end()
            return
        replica.enter(Phase.LOAD, leaf)
        batch = engine.prepare(step, leaf)
        self.active = True
        replica.enter(Phase.BODY, leaf)
        yield batch
        if self.active:
            raise StepMisuse(
                f"microbatch {leaf} of step {step} got no backward",
                remedy="call step.backward(loss) once for each batch",
            )

    def backward(self, loss: Tensor) -> None:
        """Fingerprint the gradient; it counts nowhere."""
        replica, engine = self._replica, self._replica.engine
        replica.enter(Phase.BACKWARD, self._leaf)
        engine.begin(self._step, self._leaf, None, beside=True)
        loss.backward()  # type: ignore[no-untyped-call]
        self._end()
        self.active = False
        replica.enter(Phase.BODY, self._leaf)

    def _end(self) -> None:
        sums = self._replica.engine.sums
        sums.end()
        self._replica.member.audits.computed(self._leaf, sums.print, beside=True)

    def evidence(self, found: Reduction) -> Evidence:
        """My part of the header."""
        false = sorted((*key, value) for key, value in found.false.items())
        if self._said is None:
            return Evidence(false=tuple(false))
        return self._replica.member.audits.evidence(sorted(found.unlike), false)

    def judge(self, headers: Sequence[Header]) -> None:
        """All headers are there. Raises ViewAbandoned, on every member alike, if a mismatch holds the step."""
        if self._said is not None:
            with self._replica.lock:
                self._replica.member.audit(headers, self._said)
        settle(self._replica, headers)

    def report(self, view: View) -> None:
        """After the commit: the state's certificate; and to the coordinator what was settled, if anything was."""
        replica, audits = self._replica, self._replica.member.audits
        meta = replica.engine.meta
        if self._said is None or meta is None:
            return
        finite = math.isfinite(meta.loss) and (meta.norm is None or math.isfinite(meta.norm))
        audits.passed(replica.member.committed, finite=finite, num_parts=len(replica.engine.state.params))
        if found := audits.reports(view):
            replica.link.send(found)
