"""What a run believes, from its journal: one record, folded from events, that everybody asks.

Role: the coordinator feeds it each event as it writes it, `outlast why` and `outlast plan --from-run` feed it the
journal; so all three believe the same, to the last digit, and a coordinator that takes over believes what the one
before it did. A fleet of one keeps no journal and tells it the same facts by name.
What loses work is the loss of a whole fleet; deaths of replicas that others outlast count by the small share that
redundancy does not mask. While the loss is out of its band, going back is likelier. Before anything was measured a save
is due at once: it measures what one costs. Pure: times are those of the events (seconds, one clock that never goes
back); it decides nothing itself (`_interval.py`, `_spares.py`).
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field, replace

import msgspec

from outlast.core import events as ev

from ._belief import Belief, ClassPrior
from ._hazard import Losses
from ._interval import IntervalPolicy, IntervalState
from ._record_state import MeanSeen, RecordState
from ._spares import REPLACED_S, SparesDecision, SparesPolicy, SparesState
from ._vacancies import Replacements
from .audits import audit_share, silent_belief
from .bands import Band

__all__ = ["Believed", "RunPrior", "RunRecord", "SaveDecision"]

_DAY_S = 86_400.0
_REWIND_S = 900.0  # mean time to a rewind while the loss is out of its band
_CALM = 16  # so many losses inside the band in a row end that
_RESHAPE_S, _RESTART_S = 0.5, 60.0  # what a change of the members, and a stop and a start, cost, before any was seen
_WRONG_KNOWN = 256  # newest wrong (step, culprit) that are told apart; the same one is found again within a few steps
_NO_DEATH = frozenset({"finished", "left"})
_NO_FAILURE = frozenset({"superseded", "view_changed"})  # a save that another one takes the place of


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPrior:
    """What a run is thought to be in for before it has shown anything; a simulated run begins with the same.

    replica: deaths of one replica; fleet_s: mean time between losses of the whole fleet; unmasked: share of replicas'
    deaths that survivors do not outlast.
    """

    replica: ClassPrior = field(default_factory=lambda: ClassPrior(rate=6.5 / 1000 / _DAY_S, weight=0.02))
    """6.5 failures per 1,000 node-days (arXiv 2410.21680), of machines in a data centre. A run may be on others, whose
    rate is a hundred times as high, so it weighs little: one death says more."""
    fleet_s: float = 7 * _DAY_S
    unmasked: float = 0.05

    def policy(self, min_s: float) -> IntervalPolicy:
        """The one that decides when a run saves."""
        return IntervalPolicy(kind="adaptive", min_s=min_s, max_s=max(_DAY_S, min_s), weights=(self.unmasked,))


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveDecision:
    """`interval_s` from one save's begin to the next (inf: none before the end), `mtbr_s` the mean time between losses
    that the hazard of now stands for, and why."""

    interval_s: float
    mtbr_s: float
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Believed:
    """All that a record says of one moment: what is believed of failures, and what the policies decide by it.

    death_rate_s: deaths a replica-second; mtbr_s: mean time between losses of work; interval_s: from one save to the
    next (inf: none before the end); num_spares; audit_share: of the microbatches, computed twice; reason: of the
    interval. exposed_s: replica-seconds watched; watched_s: seconds; num_deaths, num_losses: seen in them.
    """

    death_rate_s: float
    mtbr_s: float
    interval_s: float
    num_spares: int
    audit_share: float
    reason: str
    exposed_s: float
    watched_s: float
    num_deaths: int
    num_losses: int


class RunRecord:
    """Learns from a run how often it fails and what a save costs. `min_s`: never save more often; `prior`: what is
    thought before anything was seen."""

    def __init__(self, *, min_s: float = 10.0, num_replicas: int = 1, prior: RunPrior | None = None) -> None:
        self.prior = prior or RunPrior()
        self.num_replicas, self.num_deaths, self.num_losses = num_replicas, 0, 0
        self.num_spares = 0
        self.blocked_s = self.durable_s = self.step_s = 0.0
        self.begun = False
        self._min_s, self._machines, self._losses = min_s, num_replicas, Losses(prior_s=self.prior.fleet_s)
        self._replicas = Belief.from_priors({"replica": self.prior.replica})
        self._exposed_s = self._last_s = self._loss_s = 0.0
        self._failed_s: float | None = None
        self._measured, self._num_failed, self._ends_s = False, 0, math.inf
        self._band, self._outside = Band(), deque[bool](maxlen=_CALM)
        self._gone: dict[str, float] = {}
        self._replaced, self._reshaped = MeanSeen(), MeanSeen()
        self._started_s, self._restart_s = math.nan, _RESTART_S
        self._begun_s, self._audit, self._microbatches, self._audited = 0.0, "auto", 0, 0
        self._looked_at_s, self._num_wrong = 0.0, 0
        self._wrong = deque[tuple[int, str]](maxlen=_WRONG_KNOWN)

    # --- what is learnt ------------------------------------------------------------------------------------------
    def take(self, event: ev.AnyEvent) -> None:
        """The next event of the journal. Nothing counts before the first view has formed: there is nothing to lose."""
        at_s = event.at_s
        match event:
            case ev.RunStarted():
                self.num_replicas, self.num_spares = event.num_replicas, event.num_spares
                self._started_s = at_s
                self._min_s = float(event.config.get("checkpoint_min_s") or self._min_s)
                audit = event.config.get("audit")
                self._audit = audit if isinstance(audit, str) and audit.startswith("auto") else "auto"
            case ev.Asked() if event.accepted and event.what == "scale":
                self.num_replicas = int(event.about)
            case ev.SparesHeld():
                self.num_spares = event.number
            case ev.ViewFormed():
                self._formed(event)
            case ev.ViewInstalled():
                self.running(at_s, len(event.members))
                self._microbatches = event.num_microbatches or self._microbatches
            case ev.FleetGone() if self.begun:
                self.died(at_s, fleet=True)
            case ev.ReplicaExited() if event.cause not in _NO_DEATH and self.begun:
                self._gone[event.replica.partition(".")[0]] = at_s
                self.died(at_s, fleet=False)
            case ev.JoinerCaughtUp():
                self._filled(event.replica, at_s)
            case ev.ProgressMade():
                self._progress(event)
            case ev.VerdictReached(action="rewind") if self.begun:
                self.rewound(at_s)
            case ev.StateCertified() | ev.AuditMismatch():
                self._audits(event)
            case _:
                self._saving(event)

    def _formed(self, event: ev.ViewFormed) -> None:
        """The first view ends the start; each later one tells how long its members were in none."""
        if not self.begun:
            self.begin(event.at_s)
            self._restart_s = event.at_s - self._started_s if self._started_s <= event.at_s else _RESTART_S
        elif event.roll_call_s > 0:
            self._reshaped = self._reshaped.and_one(event.roll_call_s)

    def _audits(self, event: ev.StateCertified | ev.AuditMismatch) -> None:
        """What was computed twice, and what was found wrong by it."""
        if isinstance(event, ev.AuditMismatch):
            if event.culprit and (event.step, event.culprit) not in self._wrong:
                self._wrong.append((event.step, event.culprit))
                self._num_wrong += 1
        elif self._microbatches:
            more = max(0, event.audited - self._audited)
            self._looked_at_s += more * self.step_s * self._machines / self._microbatches
            self._audited = event.audited

    def _saving(self, event: ev.AnyEvent) -> None:
        match event:
            case ev.CheckpointBegan():
                self.began(event.at_s)
            case ev.CheckpointSaved():
                self.saved(event.blocked_s, event.durable_s)
            case ev.CheckpointFailed() if event.step >= 0 and event.cause not in _NO_FAILURE:
                self.failed()
            case _:
                pass

    def _filled(self, replica: str, at_s: float) -> None:
        gone_s = self._gone.pop(replica.partition(".")[0], None)
        if gone_s is not None:
            self._replaced = self._replaced.and_one(max(0.0, at_s - gone_s))

    def _progress(self, event: ev.ProgressMade) -> None:
        for _, value in event.losses:
            self.loss(value)
        self.step_s = event.step_s or self.step_s
        if event.until and event.committed >= 0 and self.step_s:
            self.ends(event.at_s + max(0, event.until - event.committed) * self.step_s)

    def begin(self, now_s: float) -> None:
        """Training begins."""
        self._exposed_s = self._last_s = self._loss_s = self._begun_s = now_s
        self.begun = True

    def running(self, now_s: float, machines: int) -> None:
        """So many replicas train from now on."""
        if self.begun:
            self._replicas = self._replicas.expose(max(0.0, now_s - self._exposed_s) * self._machines)
        self._exposed_s, self._machines = now_s, max(1, machines)

    def died(self, now_s: float, *, fleet: bool) -> None:
        """A replica died, or (`fleet`) the last one that held the state."""
        if fleet:
            self.rewound(now_s)
        else:
            self._replicas = self._replicas.observe("replica")
            self.num_deaths += 1
        self._failed_s = now_s

    def rewound(self, now_s: float) -> None:
        """Work was lost: all since the last save."""
        self._losses.observe(now_s - self._loss_s)
        self._loss_s = now_s
        self.num_losses += 1

    def loss(self, value: float) -> None:
        """A step's loss."""
        reading, self._band = self._band.read(value)
        self._outside.append(reading.finding in ("spike", "nonfinite"))

    def began(self, now_s: float) -> None:
        """A save was taken now."""
        self._last_s = now_s

    def saved(self, blocked_s: float, durable_s: float) -> None:
        """A save was published, and what it cost."""
        self.blocked_s, self.durable_s, self._measured, self._num_failed = blocked_s, durable_s, True, 0

    def ends(self, at_s: float) -> None:
        """When the loop will have done all its steps."""
        self._ends_s = at_s

    def failed(self) -> None:
        """A save came to nothing: the next one is tried later and later, but not later than it would be due."""
        self._num_failed += 1

    @property
    def since_s(self) -> float:
        """From when on work would be lost: the last save, or the loss after it, which took that work already."""
        return max(self._last_s, self._loss_s)

    # --- what is believed ----------------------------------------------------------------------------------------
    def belief(self, now_s: float) -> Belief:
        """The record as it is now: the rate of deaths a replica, and the record of lost work."""
        running_s = max(0.0, now_s - self._exposed_s) * self._machines if self.begun else 0.0
        return replace(self._replicas.expose(running_s), losses=self._losses)

    def state(self, now_s: float) -> IntervalState:
        """What the interval is decided in."""
        since_s, loss_s = (self.since_s, self._loss_s) if self.begun else (now_s, now_s)
        return IntervalState(
            machines=self._machines if self._machines > 1 else 0,
            write_s=self.blocked_s,
            durable_s=self.durable_s,
            age_s=max(1.0, since_s - loss_s),
            now_age_s=max(1.0, now_s - loss_s),
            extra=1.0 / _REWIND_S if any(self._outside) else 0.0,
            left_s=max(1.0, self._ends_s - since_s),
            measured=self._measured,
            num_failed=self._num_failed,
        )

    def policy(self) -> IntervalPolicy:
        """The one that decides when a run saves."""
        return self.prior.policy(self._min_s)

    def saving(self, now_s: float, policy: IntervalPolicy | None = None) -> SaveDecision:
        """The interval as of now, and why."""
        found = (policy or self.policy()).decide(self.belief(now_s), self.state(now_s))
        reasons = [
            f"a loss is expected every {found.mtbr_s:.3g} s",
            f"a save holds training up for {self.blocked_s:.3g} s",
        ]
        if self._failed_s is not None:
            reasons.append(f"the last failure was {now_s - self._failed_s:.3g} s ago")
        if any(self._outside):
            reasons.append("the loss is out of its band")
        if self._num_failed:
            reasons.append(f"the last {self._num_failed} came to nothing")
        elif not self._measured:
            reasons.append("the first save measures what one costs")
        if found.interval_s == math.inf:
            reasons.append(f"the loop ends in {self._ends_s - now_s:.3g} s, and saves then")
        return SaveDecision(interval_s=found.interval_s, mtbr_s=found.mtbr_s, reason="; ".join(reasons))

    def due_s(self, now_s: float) -> float:
        """Seconds from now to the next save; 0 or less: now. inf where the end of the loop comes first."""
        return self.since_s + self.saving(now_s).interval_s - now_s

    @property
    def replaced_s(self) -> float:
        """From a replica's death until its place is filled again: the mean of those seen, and one prior."""
        return self._replaced.mean_s(REPLACED_S)

    @property
    def restart_s(self) -> float:
        """From the run's begin until its first view had formed, or what that takes before it was seen."""
        return self._restart_s

    def replacements(self) -> Replacements:
        """What is believed of the replacement of a lost replica."""
        return Replacements(
            expected_s=self.replaced_s,
            reshape_s=self._reshaped.mean_s(_RESHAPE_S),
            restart_s=self._restart_s + self.durable_s,
        )

    def spares(self, now_s: float, policy: SparesPolicy | None = None) -> SparesDecision:
        """How many spares are worth holding as of now."""
        state = SparesState(
            wanted=float(self.num_replicas),
            repair_s=self.replaced_s,
            held=float(self.num_spares),
        )
        return (policy or SparesPolicy()).decide(self.belief(now_s), state)

    def spares_reason(self) -> str:
        """What `spares` was decided by."""
        return f"{self.num_deaths} deaths so far, and a place is filled again after {self.replaced_s:.3g} s"

    def audit_share(self) -> float:
        """The share of microbatches worth computing twice as of now, within the run's budget."""
        belief = silent_belief(self._num_wrong, self._looked_at_s)
        return audit_share(self._audit, self._machines, self.step_s or 1.0, belief)

    def believed(self, now_s: float) -> Believed:
        """Everything at once: what the coordinator, `outlast why` and `outlast plan --from-run` all show."""
        belief, save = self.belief(now_s), self.saving(now_s)
        return Believed(
            death_rate_s=belief.rate(0),
            mtbr_s=save.mtbr_s,
            interval_s=save.interval_s,
            num_spares=int(self.spares(now_s).spares),
            audit_share=self.audit_share(),
            reason=save.reason,
            exposed_s=belief.exposure_s,
            watched_s=max(0.0, now_s - self._begun_s) if self.begun else 0.0,
            num_deaths=self.num_deaths,
            num_losses=self.num_losses,
        )

    # --- what is kept --------------------------------------------------------------------------------------------
    def dump(self) -> bytes:
        """Return all that was learnt, for `load`; a few kilobytes, however long the run is."""
        learnt = {name.lstrip("_"): value for name, value in vars(self).items() if name not in ("prior", "_replicas")}
        learnt |= {"alpha": self._replicas.alpha, "exposure_s": self._replicas.exposure_s}
        learnt |= {"losses": self._losses.state(), "outside": tuple(self._outside), "wrong": tuple(self._wrong)}
        return msgspec.msgpack.encode(RecordState(**learnt))

    def load(self, data: bytes | msgspec.Raw) -> None:
        """Go on from what a record that was made with the same arguments has dumped. Raises msgspec.MsgspecError."""
        state = msgspec.msgpack.decode(data, type=RecordState)
        self._losses.restore(state.losses)
        self._replicas = replace(self._replicas, alpha=state.alpha, exposure_s=state.exposure_s)
        for name in set(state.__struct_fields__) - {"losses", "alpha", "exposure_s", "outside", "wrong"}:
            setattr(self, name if name in vars(self) else f"_{name}", getattr(state, name))
        self._outside = deque(state.outside, maxlen=_CALM)
        self._wrong = deque(state.wrong, maxlen=_WRONG_KNOWN)
