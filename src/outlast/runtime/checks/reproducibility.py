"""In the first step: is a microbatch's gradient a function of the microbatch (protocol, 16)?

In the first view the first member computes microbatch 0 twice and the second member once more, beside the real one;
every parameter's gradient is fingerprinted and thrown away. What differs is named before anything is trained with it.
Who is alone does the first member's part, after the step's own microbatches: what it draws from a generator of its own
it would not draw again when it goes on from a checkpoint. The loop sees these batches as extra iterations of step 0;
losses, sums, buffers, random state and registered state are as if they had not been. Not done with bitwise = false.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from outlast.core.phases import Phase
from outlast.core.protocol.step.verdict import PartRows, first_difference
from outlast.errors import StateDiverged
from outlast.runtime.checks._extra_batches import apart, gradients, prepare
from outlast.runtime.training.engine import Engine
from outlast.runtime.training.losses import missing_backward, second_backward
from outlast.runtime.training.samples import batch_digest, unlike_samples
from outlast.runtime.transport.peer_messages import Parts
from outlast.runtime.view.port import ViewPort
from outlast.tensors import fingerprint

__all__ = ["Repeat"]

_CHECK = -2  # the "step" under which these fingerprints travel
_SAMPLES = "the samples"


class Repeat:
    """One replica's part in the check. `active`: a backward now belongs to it."""

    def __init__(self, port: ViewPort, engine: Engine) -> None:
        self._port, self._engine = port, engine
        self._rows: list[PartRows] = []
        self._wanted = 0  # rows, once the batch under way has seen its backward
        self._samples = _SAMPLES, 0
        self.active = False
        self._pending = False

    def rounds(self, *, alone: bool) -> int:
        """How often this replica computes microbatch 0 for the check. `alone`: as who has nobody to compare with."""
        member, config = self._port.member, self._port.env.config
        view = member.view
        if view is None or not view.start or not member.formed or member.committed or not config.bitwise:
            return 0
        if (len(view.members) == 1) is not alone:
            return 0
        self._pending = not alone
        return dict(zip(view.members, (2, 1), strict=False)).get(member.me, 0)

    def batches(self, rounds: int) -> Iterator[Any]:
        """The extra batches; each must see one backward."""
        engine, port = self._engine, self._port
        self.active = True
        with apart(engine, paused=True):
            if rounds == 1:  # who has fetched them at another place before gets the same
                engine.samples.fetch_otherwise(0, 0)
            for number in range(rounds):
                batch = prepare(port, engine, 0, 0, Phase.LOAD)
                self._samples, self._wanted = (_SAMPLES, batch_digest(batch)), number + 1
                yield batch
                if len(self._rows) != self._wanted:
                    raise missing_backward(0, 0)
        self.active = False
        if rounds and self._pending and port.mesh is not None:
            port.mesh.broadcast(Parts(_CHECK, self._rows[0]))
        self._compare({f"{port.env.me}, time {i + 1}": rows for i, rows in enumerate(self._rows)})

    def backward(self, loss: Tensor) -> None:
        """Fingerprint the gradients and forget them."""
        engine = self._engine
        if len(self._rows) == self._wanted:
            raise second_backward()
        grads = zip(engine.state.names, gradients(engine, loss), strict=True)
        rows = tuple((name, 0 if grad is None else fingerprint(grad)) for name, grad in grads)
        self._rows.append((self._samples, *rows))

    def conclude(self) -> None:
        """Before the first exchange: compare the two members. ViewAbandoned if the view ends; it is not repeated."""
        mesh, pending = self._port.mesh, self._pending
        self._pending = False
        if not pending or mesh is None or not mesh.view.start:
            return
        names = [name for name in mesh.view.members[:2] if name != mesh.me]
        found = mesh.collect(Parts, _CHECK, 0, Phase.HEADER, names)
        rows = {name: found[name].rows for name in names}
        if self._rows:
            rows[mesh.me] = self._rows[0]
        self._compare(rows)

    def _compare(self, rows: dict[str, PartRows]) -> None:
        if len(set(rows.values())) > 1:
            name, count = first_difference(rows)
            if name == _SAMPLES:
                indices = self._engine.samples.indices(0, 0)
                raise unlike_samples(0, 0, indices, f"whoever fetches them, and after whatever ({'; '.join(rows)})")
            more = f" and of {count - 1} more" if count > 1 else ""
            raise StateDiverged(
                f"the gradient of {name}{more} differs between computations of one microbatch ({'; '.join(rows)})",
                where="before the first step",
                did="nothing was trained with it",
                remedy="torch.use_deterministic_algorithms(True) names the operation; draw random numbers from torch, "
                "numpy or random, which are seeded by position; or allow it with bitwise = false (OUTLAST_BITWISE)",
            )
