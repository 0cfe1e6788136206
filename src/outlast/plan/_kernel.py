"""One block of replications of one job on a fleet in virtual time, the real policies deciding.

Every array is (replications,). Each round carries every replication to its own next event (a failure, a detection, the
end of a straggler, a machine's return to a shrunk or waiting job, a change of the fleet's rate) and handles it.
Invariant: between events all rates are constant, so each round is exact and the six accounts add up.
Where the interval is the run's own (`adaptive`), the end of each save is an event too: the belief of `RunRecords` and
the policy decide the next one, as the coordinator does when a save is published. Only a loss's recovery, which a run
counts into its first interval, is left out of it here. Where the number of spares is the run's own, it is asked for
after each event (`_spares.py`).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from outlast.core.policy import Belief, IntervalState, RunRecords

from ._compiled import Compiled, Policies, plan_belief, speed_of
from ._machines import Machines
from ._outcome import Outcome
from ._restarts import Restarts
from ._source import Floats, Ints, LossSource
from ._spares import HeldSpares

__all__ = ["Kernel"]

_NEVER = np.inf


class Kernel:
    """One block of replications."""

    def __init__(
        self, model: Compiled, policies: Policies, source: LossSource, rng: np.random.Generator, size: int
    ) -> None:
        job, levels = model.job, len(model.job.tiers)
        self.model, self.policies, self.source, self.rng, self.size = model, policies, source, rng, size
        self.wall = job.days * 86400
        self.now, self.position, self.trained, self.work = (np.zeros(size) for _ in range(4))
        self.saved, self.saved_index = np.zeros((levels, size)), np.zeros((levels, size))
        self.checkpoint, self.lost, self.recovery, self.degraded, self.idle = (np.zeros(size) for _ in range(5))
        self.down, self.restarts = np.zeros(size), Restarts(policies.restart, size)
        self.detect_at, self.corrupt_work, self.clean = np.full(size, _NEVER), np.zeros(size), np.zeros(size)
        self.slow_until, self.slow = np.full(size, _NEVER), np.ones(size)
        self.failures = np.zeros((len(model.classes), size), dtype=np.intp)
        self.rollbacks, self.planned, self.masked = (np.zeros(size, dtype=np.intp) for _ in range(3))
        self.machines = Machines(job, policies.vacancies, size)
        self.burst = job.burst_variance > 0
        self.window_end = np.full(size, job.burst_window_h * 3600 if self.burst else _NEVER)
        self.rate = self._draw_rate(size)
        self.prior = plan_belief(job, model.classes)
        self.exposure, self.adaptive = np.zeros(size), policies.interval.kind != "fixed"
        self.ends_process = model.ends_process
        self.any_slow = bool((model.slow_factor < 1).any())
        self.any_silent = bool(model.silent.any())
        self.all_noticed = bool((model.coverage == 1).all())
        self.mean_write_s = model.cycle.mean_write_s()
        self.interval, self.mark = np.zeros(size), np.full(size, _NEVER)
        self.lag_s = max(t.lag_s for t in job.tiers) + 1e-6  # beyond the instant, whichever way sums round
        records, own = RunRecords(size, policies.prior), policies.interval.kind == "adaptive"
        self.records = records if own or job.auto_spares else None
        self.saving = records if own else None  # where it decides the interval
        self.spares = HeldSpares(model, policies.spares, records, self.machines) if job.auto_spares else None
        self.redundant = bool(model.masked.any())
        self.interval_state = IntervalState(
            machines=float(job.num_nodes), write_s=max(self.mean_write_s, 1e-9), durable_s=job.tiers[0].lag_s
        )
        self._decide(np.arange(size))
        self._mark(np.arange(size), np.zeros(size))

    def _draw_rate(self, size: int) -> Floats:
        if not self.burst:
            return np.ones(size)
        shape = 1 / self.model.job.burst_variance
        return np.maximum(self.rng.gamma(shape, 1 / shape, size), 1e-12)

    def run(self, seed: int) -> Outcome:
        """Carry all replications to the end of the wall time."""
        while self.step():
            pass
        job = self.model.job
        accounts = (self.work, self.checkpoint, self.lost, self.recovery, self.degraded, self.idle)
        return Outcome(
            wall_s=self.wall,
            efficiency=job.efficiency * speed_of(job, self.policies.work) * (1 - self._audit_share()),
            classes=tuple(c.name for c in self.model.classes),
            accounts_s=np.stack(accounts),
            failures=self.failures,
            rollbacks=self.rollbacks,
            planned=self.planned,
            masked=self.masked,
            waits=self.machines.waits,
            interval_s=self.interval,
            spares=np.full(self.size, float(job.spares)) if self.spares is None else self.spares.held_s / self.wall,
            seed=seed,
        )

    def _audit_share(self) -> float:
        return self.model.audit_rate / (1 + self.model.audit_rate)

    def step(self) -> bool:
        """One round; false when every replication has reached the end."""
        scale = self.machines.running_share * self.rate if self.burst else self.machines.running_share
        until_failure, kinds = self.source.peek(np.maximum(scale, 1e-12), self.now)
        left = self.wall - self.now
        span = np.minimum(left, until_failure)
        if self.burst:
            span = np.minimum(span, self.window_end - self.now)
        if self.any_slow:
            span = np.minimum(span, self.slow_until - self.now)
        if self.any_silent:
            span = np.minimum(span, self.detect_at - self.now)
        if self.machines.missing:
            span = np.minimum(span, self.machines.next_back() - self.now)
        if self.saving is not None:
            saved = self.down + self.mark - self.position
            span = np.minimum(span, np.where(self.machines.waiting, _NEVER, saved))
        span = np.maximum(span, 0.0)
        self.source.advance(span * scale)
        self._advance(span)
        failed = (until_failure <= span) & (left > span)
        self._events(failed, kinds)
        if self.spares is not None:
            self.spares.weigh(self.now, self.exposure)
        return bool((self.now < self.wall).any())

    def _advance(self, span: Floats) -> None:
        """Let `span` seconds pass in which nothing changes: recovery first, then training, or idleness."""
        machines = self.machines
        if machines.missing:
            awake = np.where(machines.waiting, 0.0, span)
            self.idle += span - awake
            speed = self.slow * machines.work_share
        else:
            awake, speed = span, self.slow
        down = np.minimum(self.down, awake)
        self.down -= down
        self.recovery += down
        running = awake - down
        self.position += running
        trained, index = self.model.cycle.locate(self.position, self.interval)
        gained = np.maximum(trained - self.trained, 0.0)
        # never more training than time: the schedule's inversion rounds in the last bits
        gained = np.minimum(gained, running)
        self.trained = trained
        self.checkpoint += running - gained
        useful = gained if not (self.any_slow or machines.missing) else gained * speed
        self.work += useful
        if useful is not gained:
            self.degraded += gained - useful
        self._save(trained, index, speed)
        self.exposure += span * machines.running_share * machines.wanted
        self.now += span
        # the end is reached exactly, whatever the sums rounded to
        np.copyto(self.now, self.wall, where=self.wall - self.now < 1e-6)

    def _save(self, trained: Floats, index: list[Floats], speed: Floats) -> None:
        """Each tier's newest durable work; a tier with a lag is as far as its schedule was that long ago."""
        for level, tier in enumerate(self.model.job.tiers):
            done = index[level]
            if not (done > self.saved_index[level]).any():
                continue
            if tier.lag_s:
                done = self.model.cycle.locate(np.maximum(self.position - tier.lag_s, 0.0), self.interval)[1][level]
            newer = done > self.saved_index[level]
            at_write = self.work - speed * (trained - done * self.interval)
            np.copyto(self.saved[level], np.maximum(at_write, self.saved[level]), where=newer)
            np.copyto(self.saved_index[level], done, where=newer)

    def _events(self, failed: np.ndarray[tuple[int], np.dtype[np.bool_]], kinds: Ints) -> None:
        if self.machines.any_out:
            self._resume(self.machines.come_back(self.now))
            if self.machines.missing:
                self._give_up(*self.machines.give_up(self.now))
        if self.burst and len(rows := ((self.now >= self.window_end) & (self.now < self.wall)).nonzero()[0]):
            self.rate[rows] = self._draw_rate(len(rows))
            self.window_end[rows] += self.model.job.burst_window_h * 3600
        if self.any_slow and len(rows := (self.now >= self.slow_until).nonzero()[0]):
            self.slow[rows], self.slow_until[rows] = 1.0, _NEVER
        if self.any_silent and len(rows := ((self.now >= self.detect_at) & (self.now < self.wall)).nonzero()[0]):
            self._detected(rows)
        if self.saving is not None and len(
            rows := ((self.position >= self.mark - 1e-7) & (self.now < self.wall)).nonzero()[0]
        ):
            self._published(self.saving, rows)
        if len(rows := failed.nonzero()[0]):
            self._fail(rows, kinds[rows])

    def _resume(self, changed: tuple[Ints, Ints, Ints]) -> None:
        """(rows that stop waiting, rows that grow while running) pay a restart, or a reshape; rows that stop."""
        woken, grown, stopped = changed
        if len(woken) or len(grown):
            self.down[woken] = np.maximum(self.down[woken], self.model.recovery_s[0])
            self.down[grown] += self.model.job.reshape_s
        if len(stopped):
            self._plan_stop(stopped)

    def _give_up(self, shrunk: Ints, stopped: Ints) -> None:
        """(rows that shrink, rows that stop) after a wait."""
        self.down[shrunk] += self.model.job.reshape_s
        if len(stopped):
            self._plan_stop(stopped)

    def _fail(self, rows: Ints, kinds: Ints) -> None:
        model = self.model
        self.source.consume(rows, kinds)
        self.failures[kinds, rows] += 1
        repair_s = self.source.repair_s(rows, kinds)
        draw = self.rng.random(len(rows))
        planned = draw >= model.masked[kinds]
        planned &= draw < model.masked[kinds] + (1 - model.masked[kinds]) * model.planned[kinds]
        ends = np.where(planned | ~self.ends_process[kinds], 0.0, model.nodes[kinds])
        gone = self.restarts.unfilled(rows, np.minimum(ends, self.machines.running[rows]))
        masked = (draw < model.masked[kinds]) & ~self._alone(rows, kinds, repair_s + gone)
        plain = ~(masked | planned)
        if masked.any():
            hit = rows[masked]  # who goes while another's going is dealt with is dealt with in the view that follows
            self.down[hit] = np.maximum(self.down[hit], model.job.mask_stall_s)
            self.masked[rows[masked]] += 1
        if self.records is not None:
            here = np.minimum(model.nodes[kinds], self.machines.running[rows])
            self.records.died(rows[~planned], np.maximum(here, 1.0)[~planned])
        if self.spares is not None and len(again := ((ends > gone) & (repair_s <= 0)).nonzero()[0]):
            self.spares.restarted(rows[again], kinds[again], (ends - gone)[again])
        if self.any_slow:
            slow = plain & (model.slow_factor[kinds] < 1)
            if slow.any():
                self.slow[rows[slow]] = model.slow_factor[kinds[slow]]
                self.slow_until[rows[slow]] = self.now[rows[slow]] + model.slow_s[kinds[slow]]
                plain &= ~slow
        if self.any_silent:
            silent = plain & model.silent[kinds]
            if silent.any():
                self._corrupt(rows[silent])
                plain &= ~silent
        if planned.any():
            self._plan_stop(rows[planned])
        if plain.any():
            self._roll_back(rows[plain], model.severity[kinds[plain]])
            self.down[rows[plain]] = self._noticed_s(kinds[plain]) + model.recovery_s[model.severity[kinds[plain]]]
            self.down[rows[plain]] += self.restarts.delay_s(rows[plain], self.now[rows[plain]])
        self._take(rows, kinds, repair_s, gone, ~planned)

    def _alone(self, rows: Ints, kinds: Ints, out: Floats) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Whether it takes all machines that still run: what redundancy masks needs another that holds the state."""
        return (out > 0) & (self.machines.running[rows] <= self.model.nodes[kinds])

    def _noticed_s(self, kinds: Ints) -> Floats:
        model = self.model
        if self.all_noticed:
            return model.detection_s[kinds]
        seen = self.rng.random(len(kinds)) < model.coverage[kinds]
        return np.where(seen, model.detection_s[kinds], model.late_s[kinds])

    def _take(
        self, rows: Ints, kinds: Ints, repair_s: Floats, gone: Floats, died: np.ndarray[tuple[int], np.dtype[np.bool_]]
    ) -> None:
        num = np.where(repair_s > 0, self.model.nodes[kinds], gone)
        taken = num > 0
        if not taken.any():
            return
        rows = rows[taken]
        lost = self.machines.take(rows, num[taken], self.now[rows], repair_s[taken], gone[taken], died[taken])
        self.down[rows[lost.swapped]] += self.model.job.swap_s
        self._give_up(rows[lost.shrunk], rows[lost.stopped])

    def _corrupt(self, rows: Ints) -> None:
        fresh = rows[self.detect_at[rows] == _NEVER]
        self.detect_at[fresh] = self.now[fresh] + self.rng.exponential(self.model.audit_s, len(fresh))
        self.corrupt_work[fresh], self.clean[fresh] = self.work[fresh], self.saved[0, fresh]

    def _detected(self, rows: Ints) -> None:
        """An audit found the corruption: back to the newest state certified before it."""
        target = np.minimum(self.clean[rows], self.work[rows])
        self.lost[rows] += self.work[rows] - target
        self.work[rows] = target
        self.saved[:, rows] = np.minimum(self.saved[:, rows], target)
        self.detect_at[rows] = _NEVER
        self._lost_work(rows)
        self._restart(rows, np.zeros(len(rows)))
        self.down[rows] = self.model.recovery_s[0]

    def _plan_stop(self, rows: Ints) -> None:
        """Foretold in time: everything is saved, the job moves and restarts."""
        self.saved[:, rows] = self.work[rows]
        self.planned[rows] += 1
        if self.records is not None:
            self.records.began(rows, self.now[rows])
        self._restart(rows, np.zeros(len(rows)))
        self.down[rows] = np.maximum(self.down[rows], self.model.job.planned_stop_s)

    def _roll_back(self, rows: Ints, severity: Ints) -> None:
        target, index = self.saved[severity, rows], self.saved_index[severity, rows]
        self.lost[rows] += self.work[rows] - target
        self.work[rows] = target
        for level in range(1, len(self.saved)):
            hit = rows[severity == level]
            self.saved[:level, hit] = self.saved[level, hit]
        self._lost_work(rows)
        if self.any_silent:  # a state from before the corruption is clean
            clean = rows[self.work[rows] <= self.corrupt_work[rows]]
            self.detect_at[clean] = _NEVER
        self._restart(rows, index)

    def _restart(self, rows: Ints, index: Floats) -> None:
        """The schedule goes on from the recovered base index, with the interval that the policy decides now."""
        cycle = self.model.cycle
        first = index % cycle.every[-1]
        self._decide(rows)
        interval = self.interval[rows]
        self.position[rows] = cycle.start_of(first, interval)
        self.trained[rows] = first * interval
        for level, every in enumerate(cycle.every):
            self.saved_index[level, rows] = np.floor(first / every) * every
        self._mark(rows, first)

    def _lost_work(self, rows: Ints) -> None:
        self.rollbacks[rows] += 1
        if self.records is not None:
            self.records.rewound(rows, self.now[rows])

    def _mark(self, rows: Ints, index: Floats) -> None:
        """Where on the schedule the next save will be durable."""
        if self.saving is not None:
            self.mark[rows] = self.model.cycle.start_of(index + 1, self.interval[rows]) + self.lag_s

    def _published(self, records: RunRecords, rows: Ints) -> None:
        """A save is durable: what it cost is known, and the interval that runs since it began is decided anew."""
        cycle, index = self.model.cycle, self.saved_index[0, rows]
        nothing = np.zeros(len(rows))
        blocked_s = cycle.start_of(index, nothing) - cycle.start_of(index - 1, nothing)
        since = self.position[rows] - cycle.start_of(index, self.interval[rows])
        records.began(rows, self.now[rows] - since - blocked_s)
        records.saved(rows, self.mean_write_s, self.lag_s + self.model.job.tiers[0].write_s)
        first = index % cycle.every[-1]
        self._decide(rows)
        interval = self.interval[rows]
        self.position[rows] = cycle.start_of(first, interval) + since
        self.trained[rows] = first * interval + since
        for level, every in enumerate(cycle.every):
            self.saved_index[level, rows] = np.floor(first / every) * every
        self._mark(rows, first)

    def _belief(self, rows: Ints) -> Belief:
        """The controller's belief in these replications; plain floats where it is one, as at run time."""
        prior = self.prior
        if len(rows) == 1:
            seen: Any = self.failures[:, rows[0]].tolist()
            exposure: Any = float(self.exposure[rows[0]])
        else:
            seen, exposure = self.failures[:, rows], self.exposure[rows]
        return Belief(
            classes=prior.classes,
            alpha=tuple(a + n for a, n in zip(prior.alpha, seen, strict=True)),
            beta_s=prior.beta_s,
            shape=prior.shape,
            exposure_s=exposure,
        )

    def _decide(self, rows: Ints) -> None:
        if not self.adaptive and self.interval[0]:
            return
        if self.saving is not None:
            machines = self.machines.running[rows] if self.redundant else 0.0
            ends_s = np.inf if self.model.job.endless else self.wall
            state = self.saving.state(rows, self.now[rows], machines, ends_s)
            found = self.policies.interval.decide(self.saving.belief(rows, self.exposure[rows]), state)
            self.interval[rows] = np.minimum(found.interval_s, 2 * self.wall)
            return
        decision = self.policies.interval.decide(self._belief(rows), self.interval_state)
        self.interval[rows] = decision.interval_s
