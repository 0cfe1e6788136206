"""One replication by itself: the same rounds as the batch, in plain numbers where arrays of one would cost most.

Role: a single run of a fleet of a million machines, where an array operation's fixed cost is all the cost. Invariant:
bit for bit what `Kernel` gives at size one (a test holds them equal); what happens seldom is inherited from it.
"""

from __future__ import annotations

import numpy as np

from ._compiled import Compiled, Policies
from ._kernel import Kernel
from ._source import Floats, Ints, LossSource

__all__ = ["Single"]

_NOT_FAILED = np.zeros(1, dtype=np.bool_)


class Single(Kernel):
    """A block of one replication; the state arrays are (1,), as everywhere."""

    def __init__(
        self, model: Compiled, policies: Policies, source: LossSource, rng: np.random.Generator, size: int
    ) -> None:
        super().__init__(model, policies, source, rng, size)
        self._row = np.zeros(1, dtype=np.intp)
        masked, planned = model.masked.tolist(), model.planned.tolist()
        self._masked = masked
        self._masked_or_planned = [m + (1 - m) * p for m, p in zip(masked, planned, strict=True)]
        self._slow_factor, self._is_silent = model.slow_factor.tolist(), model.silent.tolist()
        self._nodes, self._ends_process = model.nodes.tolist(), model.ends_process.tolist()
        self._severity, self._recovery_s = model.severity.tolist(), model.recovery_s.tolist()

    def step(self) -> bool:
        """One round; false at the end."""
        machines, now = self.machines, self.now.item()
        scale = machines.running_share.item() * (self.rate.item() if self.burst else 1.0)
        peeked, kinds = self.source.peek(np.array([max(scale, 1e-12)]), self.now)
        until_failure, left = peeked.item(), self.wall - now
        span = min(
            left, until_failure, self.window_end.item() - now, self.slow_until.item() - now, self.detect_at.item() - now
        )
        if machines.missing:
            span = min(span, machines.next_back().item() - now)
        span = max(span, 0.0)
        self.source.advance(np.array([span * scale]))
        now = self._pass(span)
        back = min(machines.soonest.item(), machines.patience_ends.item())
        due = min(back, self.window_end.item(), self.slow_until.item(), self.detect_at.item())
        if due <= now:
            self._events(_NOT_FAILED, kinds)
        if until_failure <= span < left:
            self._fail(self._row, kinds)
        return now < self.wall

    def _pass(self, span: float) -> float:
        """`_advance` in plain numbers; the time after it."""
        machines = self.machines
        awake, speed = span, self.slow.item()
        if machines.missing:
            awake = 0.0 if machines.waiting.item() else span
            self.idle[0] += span - awake
            speed *= machines.work_share.item()
        behind = self.down.item()
        down = min(behind, awake)
        if down:
            self.down[0] = behind - down
            self.recovery[0] += down
        running = awake - down
        if running:
            self._train(running, speed)
        self.exposure[0] += span * machines.running_share.item() * machines.wanted
        now = float(self.now.item() + span)
        if self.wall - now < 1e-6:
            now = self.wall
        self.now[0] = now
        return now

    def _train(self, running: float, speed: float) -> None:
        self.position[0] = position = self.position.item() + running
        trained, index = self.model.cycle.locate_one(position, self.interval.item())
        gained = min(max(trained - self.trained.item(), 0.0), running)
        self.trained[0] = trained
        self.checkpoint[0] += running - gained
        useful = gained
        if self.any_slow or self.machines.missing:
            useful = gained * speed
            self.degraded[0] += gained - useful
        self.work[0] = work = self.work.item() + useful
        self._save_one(position, trained, index, work, speed)

    def _save_one(self, position: float, trained: float, index: list[float], work: float, speed: float) -> None:
        interval = self.interval.item()
        for level, tier in enumerate(self.model.job.tiers):
            done, before = index[level], self.saved_index[level, 0]
            if done <= before:
                continue
            if tier.lag_s:
                done = self.model.cycle.locate_one(max(position - tier.lag_s, 0.0), interval)[1][level]
                if done <= before:
                    continue
            at_write = work - speed * (trained - done * interval)
            self.saved[level, 0] = max(at_write, self.saved[level, 0])
            self.saved_index[level, 0] = done

    def _fail(self, rows: Ints, kinds: Ints) -> None:
        kind = kinds.item()
        self.source.consume(rows, kinds)
        self.failures[kind, 0] += 1
        repair_s = self.source.repair_s(rows, kinds)
        draw = self.rng.random()
        planned, running = self._masked[kind] <= draw < self._masked_or_planned[kind], self.machines.running.item()
        ends = 0.0 if planned or not self._ends_process[kind] else self._nodes[kind]
        gone = self.restarts.unfilled_one(min(ends, running))
        alone = (gone or repair_s.item() > 0) and running <= self._nodes[kind]
        if draw < self._masked[kind] and not alone:
            self.down[0] = max(self.down.item(), self.model.job.mask_stall_s)
            self.masked[0] += 1
        elif planned:
            self._plan_stop(rows)
        elif self._slow_factor[kind] < 1:
            self.slow[0] = self._slow_factor[kind]
            self.slow_until[0] = self.now[0] + self.model.slow_s[kind]
        elif self._is_silent[kind]:
            self._corrupt(rows)
        else:
            level = self._severity[kind]
            self._back_to(level)
            noticed_s = self.model.detection_s[kind] if self.all_noticed else self._noticed_s(kinds).item()
            self.down[0] = noticed_s + self._recovery_s[level]
            self.down[0] += self.restarts.delay_s(rows, self.now).item()
        if gone or repair_s.item() > 0:
            self._take_one(rows, kinds, repair_s, np.array([gone]))

    def _take_one(self, rows: Ints, kinds: Ints, repair_s: Floats, gone: Floats) -> None:
        num = self.model.nodes[kinds] if repair_s.item() > 0 else gone
        lost = self.machines.take(rows, num, self.now, repair_s, gone)
        if lost.swapped.item():
            self.down[0] += self.model.job.swap_s
        self._give_up(rows[lost.shrunk], rows[lost.stopped])

    def _back_to(self, level: int) -> None:
        """`_roll_back` in plain numbers."""
        target = self.saved[level, 0].item()
        index = self.saved_index[level, 0].item()
        self.lost[0] += self.work.item() - target
        self.work[0] = target
        self.saved[:level, 0] = target
        self.rollbacks[0] += 1
        if self.any_silent and target <= self.corrupt_work.item():
            self.detect_at[0] = np.inf
        self._from(index)

    def _restart(self, rows: Ints, index: Floats) -> None:
        self._from(index.item())

    def _from(self, index: float) -> None:
        """`_restart` in plain numbers."""
        cycle = self.model.cycle
        first = index % cycle.every[-1]
        self._decide(self._row)
        interval = self.interval.item()
        self.position[0] = cycle.start_of_one(first, interval)
        self.trained[0] = first * interval
        for level, every in enumerate(cycle.every):
            self.saved_index[level, 0] = first // every * every
