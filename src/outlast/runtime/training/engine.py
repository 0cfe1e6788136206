"""The tensors of one replica: gradients in, one outcome a step out, applied to the state.

An outcome (raw reduced gradient, scaled at most by the recorded clip factor, and `Meta`) fully determines what a step
does to the state, whoever applies it: a member after its exchange, one who was behind, a joiner that replays. It does
not know views; `member/step.py` decides when.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import msgspec
import torch
import xxhash
from torch import Tensor

from outlast.core.phases import Phase
from outlast.core.policy import Ruling
from outlast.core.protocol import Header, combine
from outlast.runtime.exchange.slots import OUTCOME
from outlast.runtime.training._microbatches import Microbatches
from outlast.runtime.training.frozen import Frozen, OutcomeShare, raw
from outlast.runtime.training.loop_state import Lived
from outlast.runtime.training.metrics import reduced
from outlast.runtime.training.step_checks import Meta
from outlast.tensors import like, reshard

__all__ = ["Engine"]

_SLACK = 1 << 20  # slices are whole blocks: somebody's share is larger than the others'


class Engine(Microbatches):
    """Computes gradients and outcomes for a member, and applies them. `clip_norm`: None, or the largest global gradient
    norm applied. `shards`: which rank of its replica this process is. A leaf is what all its ranks compute at a time:
    one microbatch each."""

    # --- a step --------------------------------------------------------------------------------------------------

    def conclude(self, headers: Sequence[Header], buffers: tuple[bytes, ...], ruling: Ruling | None) -> Meta:
        """The outcome that follows from the headers, the same on every member; scales `out` if the norm is clipped."""
        first = headers[0]
        used = bytearray(len(first.used))
        for header in headers:
            for i, byte in enumerate(header.used):
                used[i] |= byte
        read = ruling.evidence if ruling is not None else None
        norm = self.norm_of(headers)
        overflow = self.state.scaling.overflowed(norm)
        norm = norm if read is None or overflow else read.norm
        # A rule's evidence has the loss of good rows only.
        loss = read.loss if read is not None and self.robust is None else self.loss_of(headers)
        applies, vigilance = ruling is None or ruling.verdict.applies, self.step_checks.vigilance
        meta = Meta(
            step=first.step,
            loss=loss,
            norm=norm,
            used=bytes(used),
            buffers=buffers if applies and not overflow else (),
            overflow=overflow,
            output=sum(h.output for h in headers) & ((1 << 64) - 1),
            ruling=ruling,
            observed=vigilance.observed(headers) if vigilance is not None else None,
            settings=self.loop.settings,
            probes=self._probes(headers) if self.robust is None else (),
            metrics=reduced(headers, self.samples.num_leaves),
            stop=next((h.stop for h in headers if h.stop), ""),
            evaluated=tuple(self.evaluated),
            stream=self.samples.place_of(first.step),
            bad=tuple(sorted({sample: text for h in headers for sample, text in sorted(h.bad)}.items())),
        )
        self.clip(meta)
        return meta

    def _probes(self, headers: Sequence[Header]) -> tuple[tuple[int, float], ...]:
        rows = sorted((leaf, loss) for header in headers for leaf, loss, weight in header.losses if weight)
        return tuple(dict.fromkeys((rows[0], rows[-1]))) if rows else ()

    def norm_of(self, headers: Sequence[Header]) -> float | None:
        """The norm of the whole gradient before it is clipped; None if nobody asked for it."""
        parts = [part for header in headers for part in header.norms]
        return math.sqrt(combine(parts, (0, self.layout.num_blocks))) if parts else None

    def loss_of(self, headers: Sequence[Header]) -> float:
        """The step's loss."""
        rows = {leaf: (loss, weight) for header in headers for leaf, loss, weight in header.losses}
        number = self.samples.num_leaves
        sums = [(i, i + 1, rows.get(i, (0.0, 0.0))[0] * rows.get(i, (0.0, 0.0))[1]) for i in range(number)]
        weights = [(i, i + 1, rows.get(i, (0.0, 0.0))[1]) for i in range(number)]
        root = (0, number)
        total = combine(weights, root)
        return combine(sums, root) / total if total else math.nan

    def clip(self, meta: Meta) -> None:
        """Scale `out` if the step is applied and the whole gradient's norm is too large."""
        applies = not meta.overflow and (meta.ruling is None or meta.ruling.verdict.applies)
        if self.clip_norm is None or meta.norm is None or not applies:
            return
        factor = self.clip_norm / (meta.norm + 1e-6)
        if factor < 1.0:
            for flat in self.out:
                flat.mul_(factor)
            self._differs()

    def _differs(self) -> None:
        """What came straight to the device is not, or not any more, what is applied."""
        if self.staging is not None:
            self.staging.straight.forget()

    def apply(self, meta: Meta, enter: Callable[[Phase], None]) -> None:
        """One optimizer step with the outcome in `out`. An exception in here must end the process (rule 12)."""
        for frozen in self.frozen:
            frozen.wait()
        self.frozen.clear()
        if self.sharded:
            reshard(self.state.model)
        checks = self.step_checks
        if checks.guards.before(meta) and not meta.overflow:
            self._optimize(meta, enter)
        else:
            self._differs()
            enter(Phase.OPTIMIZER)
        for data, start in zip(meta.buffers, self._start_buffers, strict=bool(meta.buffers)):
            raw(start).copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        self.restore_buffers()
        checks.guards.after(meta)
        self.state.scaling.applied(meta.overflow)
        for follow in self.after_step:
            follow()
        self.stop_after(meta.step + 1, meta.stop)
        self.samples.applied(meta.step, meta.stream)
        self.samples.bad.applied(meta.bad)
        self.opening.applied(meta.step, meta.evaluated)
        if checks.vigilance is not None and meta.observed is not None:
            checks.vigilance.apply(meta.observed)
        self.sums.clear()
        self.losses.clear()
        self.metrics.clear()
        self.meta = meta
        self.loop.committed()
        if checks.averages is not None and not meta.overflow:
            checks.averages.applied()
        if checks.rehearsal is not None and not meta.overflow and not checks.rehearsal.applied():
            checks.rehearsal = None
        checks.tries = False

    def stop_after(self, steps: int, reason: str) -> None:
        """Training ends, or had ended, after so many steps, if there is a reason."""
        if reason:
            self.stopped = reason
            self.on_stop(steps)

    def given(self, step: int) -> None:
        """The loop is about to be given this step. Where its outcome waits here, become what all loops were by then: on
        their way to the inner loop they may draw from what is registered."""
        if self.late is not None and self.late.step == step and self._lived is not None:
            if self._settled:  # its own lines, and the step, are in the snapshot that was loaded
                self.loop.shelve()
            self.loop.load_given(self._lived, self.late.settings)
        self.loop.given(step)

    def begun(self, step: int) -> None:
        """The inner loop of this step begins (or goes on): what the loop made of the state until here belongs to it."""
        if self.step_checks.rehearsal is not None:
            self.step_checks.rehearsal.begun(step, self.loop.written())
        self.loop.begin(step)

    # --- who came in by replaying ----------------------------------------------------------------------------------
    def hold(self, meta: Meta, lived: Lived | None) -> None:
        """The outcome that `out` now holds waits for this process's loop, or for the next outcome."""
        self.late, self._lived, self._settled = meta, lived, b""

    def rewound(self) -> Meta | None:
        """Become, but for the optimizer's step, what all loops were when the outcome that waits was computed; None if
        it was not left unapplied, or came without what their loops had made of the state."""
        if self.late is None or self._settled or self._lived is None:
            return None
        self.loop.load(self._lived, whole=True)
        self.loop.write(self.late.settings)
        return self.late

    def live(self, enter: Callable[[Phase], None]) -> None:
        """Apply what `hold` left, with the loop where all loops were when it was decided."""
        self._replay(enter, whole=True)

    def settle(self, enter: Callable[[Phase], None]) -> None:
        """Apply what `hold` left, as the loop will not go through its step: a newer one follows."""
        self._replay(enter, whole=False)

    def _replay(self, enter: Callable[[Phase], None], *, whole: bool) -> None:
        late, self.late = self.late, None
        if late is None:
            return
        self.loop.unshelve()
        if not self._settled:
            self.loop.load(self._lived, whole=whole)
            self.loop.write(late.settings)
            self.apply(late, enter)
        elif whole:
            self.loop.load(self._lived, whole=True)
            self.loop.write(self._settled)
        self._lived = None

    def told(self, *, joined: bool) -> bytes:
        """The newest outcome beside the gradient, for a member that is behind; `joined`: it came in by replaying."""
        kept = self.loop.kept if joined else None
        if kept is not None and (self.newest is None or kept.step != self.newest.step):
            kept = None
        lived = (kept.plain, kept.data.numpy().tobytes()) if kept is not None else (b"", b"")
        return msgspec.msgpack.encode((msgspec.msgpack.encode(self.newest), *lived))

    def heard(self, told: bytes, *, joined: bool) -> Meta:
        """What `told` gave: held, until it is applied. `joined`: this replica came in by replaying, else its loop has
        begun the step. Whoever gave it may die next; then this one hands it on, with what the loops had made."""
        text, plain, data = msgspec.msgpack.decode(told, type=tuple[bytes, bytes, bytes])
        meta = msgspec.msgpack.decode(text, type=Meta)
        flat = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else raw(torch.empty(0))
        lived = Lived(meta.step, plain, flat) if plain else None
        if lived is not None or joined:
            self.loop.kept = lived
        else:
            self.loop.keep(meta.step)
        self.hold(meta, lived)
        return meta

    @property
    def newest(self) -> Meta | None:
        """What describes the outcome that `out` holds; None before the first."""
        return self.late or self.meta

    def _optimize(self, meta: Meta, enter: Callable[[Phase], None]) -> None:
        staging = self.staging
        grads = self.layout.views(self.out if staging is None else staging.back(self.out))
        for index, param in enumerate(self.state.params):
            bit = self.sums.first + index
            if meta.used[bit >> 3] >> (bit & 7) & 1:
                grad = grads[index].to(device=param.device, dtype=param.dtype)
                param.grad = like(grad, param) if self.sharded else grad
            else:
                param.grad = None
        enter(Phase.OPTIMIZER)
        rehearsal = self.step_checks.rehearsal
        with self.step_checks.guards.rates(meta.step):
            if rehearsal is not None:
                rehearsal.replay()
            for optimizer in self.state.optimizers:
                optimizer.step()
            if rehearsal is not None:
                rehearsal.compare(meta.step)
        if staging is not None:
            staging.settle()  # whoever is next writes `out`
        for scheduler in self.state.schedulers:
            scheduler.step()
        for param in self.state.params:
            param.grad = None
        if self.robust is not None:
            self.robust.applied(self.out)

    def outcome(self) -> int:
        """Digest of the newest outcome; 0 before the first."""
        meta = self.newest
        if meta is None:
            return 0
        action = meta.ruling.verdict.action if meta.ruling is not None else "apply"
        text = msgspec.msgpack.encode((meta.step, meta.loss, meta.norm, meta.output, action))
        return xxhash.xxh3_64_intdigest(text)

    def fingerprint(self) -> int:
        """A 64-bit fingerprint of the whole state as it is between two steps (buffers as the step starts)."""
        self.restore_buffers()
        return self.state.fingerprint()

    def parts(self) -> list[tuple[str, int]]:
        """As `fingerprint`, one for each tensor by its name."""
        self.restore_buffers()
        return self.state.parts()

    @property
    def incoming(self) -> list[Tensor]:
        """Where an outcome that is received is written, bucket by bucket, before it is applied."""
        return self.out if self.robust is None else [*self.out, *self.robust.memory.incoming()]

    # --- joining -------------------------------------------------------------------------------------------------
    def freeze(self, index: int, count: int) -> tuple[Frozen, int, int, int, bytes]:
        """My share of the state as it is now: (copy in progress, lo, hi, total, plain data)."""
        self.restore_buffers()
        plain, tensors = self.state.encoded()
        values = list(tensors.values())
        total = sum(t.numel() * t.element_size() for t in values)
        lo, hi = total * index // count, total * (index + 1) // count
        loose = {i for i, name in enumerate(tensors) if self.moving(name)}
        frozen = Frozen(values, lo, hi, loose, self.warm)
        self.frozen.append(frozen)
        return frozen, lo, hi, total, plain

    def moving(self, name: str) -> bool:
        """Whether a step may write this tensor of the state before its optimizers do."""
        return name.startswith("/extra") or name.removeprefix("/model/") in self.state.buffers

    def expect_joiners(self, index: int, num_donors: int) -> None:
        """Have memory ready for my share of the state, and of two outcomes, when so many serve of whom I am number
        `index`; and the slices that are mine when there is one more. 0: nobody may come."""
        whole = (self.state.size_bytes(), self.layout.total_bytes, self.layout.total_bytes) if num_donors else ()
        soon: list[Tensor] = []
        if num_donors and self.memory.region is not None:
            flats = zip(self.layout.buckets, self.memory.flats(OUTCOME), strict=True)
            soon = [flat[slice(*bucket.slices(num_donors + 1)[index])] for bucket, flat in flats]
        self.warm.prepare([-(-size // num_donors) + _SLACK for size in whole], soon)

    def thaw(self, plain: bytes, tensors: dict[str, Tensor], meta: Meta | None, given: bytes = b"") -> None:
        """Become the state that a snapshot holds; `meta`: of the step after which it was taken, if the donors' loops
        had not gone on, and `given`: what these had found as they were given it (`_as_given.py`)."""
        for frozen in self.frozen:
            frozen.wait()
        self.frozen.clear()
        self.state.load(plain, tensors)
        self.took()
        if self.step_checks.averages is not None:
            self.step_checks.averages.joined()
        if meta is not None:
            self.stop_after(meta.step + 1, meta.stop)
            self.meta = self.late = meta
            self.loop.write(meta.settings, but_groups=True)
            self._lived, self._settled = self.loop.keep(meta.step, given), self.loop.read()

    def took(self) -> None:
        """The state was loaded: nothing of before counts."""
        self.samples.take_up()
        self.take_buffers()
        self.sums.clear()
        self.losses.clear()
        self.metrics.clear()
        self.loop.taken_up()
        self.late = None

    def take_buffers(self) -> None:
        """The next step starts from the module buffers as they are now."""
        for buffer, start in zip(self._buffers, self._start_buffers, strict=True):
            start.copy_(buffer)

    def portion(
        self, meta: Meta, slices: Sequence[tuple[int, int, int]], whole: bool
    ) -> tuple[OutcomeShare, list[Tensor]]:
        """Slices of the outcome in `out`, copied, for a joiner. With a robust rule the outcome must be applied."""
        wanted = [(b, 0, flat.numel()) for b, flat in enumerate(self.out)] if whole else slices
        flats = self.out
        if self.robust is not None:  # the rows' momentum, as further buckets
            flats, wanted = [*self.out, *self.robust.memory.committed()], self.robust.memory.beside(wanted)
        payload = self.warm.copies([flats[b][lo:hi] for b, lo, hi in wanted if hi > lo])
        kept = tuple(part for part in wanted if part[2] > part[1])
        return OutcomeShare(meta.step, msgspec.msgpack.encode(meta), kept, whole), payload
