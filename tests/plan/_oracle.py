"""The same model in SimPy, written from the words of the documentation and not from the simulator: the oracle of tests.

One replication at a time. Given failures (time, severity, repair seconds) it must produce the simulator's accounts to
the last microsecond; given a generator it draws its own and must agree in distribution.
"""

from __future__ import annotations

from collections.abc import Iterator

import simpy

from outlast.plan._model import Job


class Oracle:
    """Training, writing, recovering as a SimPy process that failures interrupt; machines come back by themselves."""

    def __init__(self, job: Job, interval_s: float, failures: Iterator[tuple[float, int, float]]) -> None:
        self.env, self.job, self.interval = simpy.Environment(), job, interval_s
        self.accounts = dict.fromkeys(("productive", "checkpoint", "lost", "recovery", "degraded", "idle"), 0.0)
        self.work, self.index = 0.0, 0
        self.saved = [(0.0, 0)] * len(job.tiers)
        self.running, self.spares = job.num_nodes, job.spares
        self.rollbacks = 0
        self.woken = self.env.event()
        self.main = self.env.process(self.train())
        self.env.process(self.fail(failures))
        self.recover_s = 0.0

    def run(self) -> dict[str, float]:
        self.env.run(until=self.job.days * 86400)
        self.settle()
        self.accounts["productive"] = self.work
        return self.accounts

    def fail(self, failures: Iterator[tuple[float, int, float]]):  # type: ignore[no-untyped-def]
        for at, severity, repair_s in failures:
            yield self.env.timeout(max(0.0, at - self.env.now))
            if repair_s > 0:
                self.env.process(self.repair(repair_s))
                if self.spares:
                    self.spares -= 1
                else:
                    self.running -= 1
            self.main.interrupt(severity)

    def repair(self, seconds: float):  # type: ignore[no-untyped-def]
        yield self.env.timeout(seconds)
        if self.running < self.job.num_nodes:
            self.running += 1
            if self.running == self.job.num_nodes and not self.woken.triggered:
                self.woken.succeed()
        else:
            self.spares += 1

    def settle(self) -> None:
        """Book the phase in progress up to now."""
        spent = self.env.now - self.since
        self.since = self.env.now
        if self.phase == "train":
            self.work += spent
        else:
            self.accounts[self.phase] += spent

    def spend(self, phase: str, seconds: float):  # type: ignore[no-untyped-def]
        self.phase, self.since = phase, self.env.now
        yield self.env.timeout(seconds)
        self.settle()

    def train(self):  # type: ignore[no-untyped-def]
        self.since, self.phase, recovering = 0.0, "train", False
        while True:
            try:
                if recovering:
                    if self.running < self.job.num_nodes:
                        self.phase, self.since = "idle", self.env.now
                        self.woken = self.env.event()
                        yield self.woken
                        self.settle()
                        self.recover_s = max(self.recover_s, self.job.tiers[0].recovery_s)
                    start = self.env.now
                    yield from self.spend("recovery", self.recover_s)
                    del start
                    recovering = False
                yield from self.spend("train", self.interval)
                self.index += 1
                for level, tier in enumerate(self.job.tiers):
                    if self.index % tier.every == 0:
                        at = (self.work, self.index)
                        yield from self.spend("checkpoint", tier.write_s)
                        self.saved[level] = at
            except simpy.Interrupt as struck:
                self.settle()
                self.roll_back(int(struck.cause))
                recovering = True

    def roll_back(self, severity: int) -> None:
        work, index = self.saved[severity]
        self.accounts["lost"] += self.work - work
        self.work, self.rollbacks = work, self.rollbacks + 1
        self.index = index % self.job.tiers[-1].every
        for level, tier in enumerate(self.job.tiers):
            if level < severity:
                self.saved[level] = (work, self.index)
            else:
                self.saved[level] = (self.saved[level][0], self.index // tier.every * tier.every)
        item = next(c for c in self.job.classes if c.severity == severity)
        self.recover_s = item.detection_s + self.job.tiers[severity].recovery_s
