"""What a schedule is: a small fleet, a network, and a list of faults, all drawn from one seed."""

from __future__ import annotations

import math
from random import Random
from typing import Literal

import msgspec

from outlast.core.policy import (
    AdmissionPolicy,
    DeadlinePolicy,
    DeadlineState,
    Durations,
    VacancyPolicy,
    most_rows_per_host,
)
from outlast.core.protocol import Settings
from outlast.prove.adversary._schedule_faults import THEMES, ScheduleFault, any_fault, cut_off_whole

__all__ = ["Scenario", "scenario_of"]


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """A fleet and what befalls it. Seconds are virtual."""

    seed: int  # of delays and durations
    num_replicas: int
    num_spares: int
    num_agents: int
    num_steps: int
    num_microbatches: int
    mean_delay_s: float
    tail: float
    compute_s: float
    optimizer_s: float
    snapshot_s: float
    lease_s: float
    faults: tuple[ScheduleFault, ...]
    stall_s: float = 0.25
    grace_s: float = 0.3  # how long a joiner waits for streams of who is in no view, and for what leaves a gap
    calm_after_s: float = 6.0  # no fault strikes or lasts later than this
    patience_s: float = 60.0  # then everything must be done within this
    audit: float = 0.0  # share of microbatches computed twice
    num_rows: int = 1  # more: a robust rule, whose reducers are checked
    rows_from: int = 1  # members that a view needs for it, or hosts
    rows_by_host: bool = False  # what a host's members compute counts together
    save_every: int = 0  # steps between two saves; 0: no checkpoints
    guarded: bool = False  # states are compared in every step
    auto_spares: bool = False  # how many spares there are is decided while it trains
    silence_s: float = 0.0  # a host of which nothing is heard for so long is given up; 0: the launcher sees its end
    on_vacancy: Literal["shrink", "wait", "stop", "auto"] = "shrink"  # what lost replicas make the others do
    min_replicas: int = 1
    vacancy_wait_s: float = 600.0
    price: float = 0.0
    record_lease_s: float = 0.0  # hosts share the record, and who gives no sign there for so long is followed; 0: one
    num_seats: int = 1  # hosts that may coordinate then
    two_levels: bool = False  # of the exchange, where a view's members are on several hosts, and some on one
    speeds_s: float = 0.0  # how often members are found to be of other speeds; 0: never
    stops: bool = False  # it is asked to stop, by a fault of that kind

    def admission(self) -> AdmissionPolicy:
        """Admits views under a robust rule: one member may lie, and as many rows are trimmed as the fullest of
        `rows_from` members (or hosts) owns."""
        trimmed = most_rows_per_host(self.num_rows, self.rows_from)
        return AdmissionPolicy(trim_count=trimmed, tolerated_hosts=1)

    def host_facts(self) -> dict[str, str]:
        """What a coordinator must know where rows count by host, as of `RowSettings.facts`."""
        if not self.rows_by_host:
            return {}
        return {"fault_domains": str(-(-self.num_rows // self.admission().trim_count))}

    def allowed_s(self, *, host: bool = False) -> float:
        """Silence that is allowed of a member that is waited for, or of a host. The scenario says the longest: virtual
        steps are too few to learn from."""
        policy = DeadlinePolicy(floor_s=self.stall_s)
        state = DeadlineState(awaited=not host, longest_s=self.silence_s if host else self.stall_s)
        return policy.decide(Durations(), state).allowed_s

    def settings(self) -> Settings:
        return Settings(
            num_replicas=self.num_replicas,
            num_spares=self.num_spares,
            auto_spares=self.auto_spares,
            num_agents=self.num_agents,
            ack_s=0.6,
            doubt_s=0.15,
            lease_s=self.lease_s,
            start_s=30.0,
            gather_s=0.2,
            formation_s=1.0,
            outside_s=3.0,
            vacancies=VacancyPolicy(kind=self.on_vacancy, patience_s=self.vacancy_wait_s, price=self.price),
            min_replicas=self.min_replicas,
            max_restarts=1000,
            backoff_s=0.05,
        )


def scenario_of(seed: int) -> Scenario:
    """The schedule of a seed. One in six has a theme: faults that together lead where single ones seldom do."""
    rng = Random(seed)
    theme = rng.choice(THEMES) if rng.random() < 0.16 else None
    long = theme is cut_off_whole
    num_steps = rng.randint(14, 22) if long else rng.randint(3, 6)
    compute_s = 0.1 if long else rng.choice((0.002, 0.01, 0.02))
    mean_s = rng.choice((0.0005, 0.002, 0.006))
    span_s = 0.3 + num_steps * (3 * compute_s + 6 * mean_s)
    faults = theme(rng) if theme is not None else ()
    wrong, guarded = _wrong(seed, span_s), False
    if not wrong:
        wrong, guarded = _spoilt(seed, span_s)
    num_faults = rng.randrange(3) if theme is not None else rng.choice((1, 1, 2, 2, 3, 3, 4, 5, 6))
    full = Scenario(
        seed=rng.getrandbits(32),
        num_replicas=rng.choice((1, 2, 2, 3, 3, 3, 4, 4, 5)),
        num_spares=rng.choice((1, 2)) if theme is not None else rng.choice((0, 0, 1, 1, 2)),
        num_agents=rng.choice((1, 1, 1, 2)),
        num_steps=num_steps,
        num_microbatches=rng.choice((5, 6, 7, 8)) if rng.random() < 0.3 else rng.choice((4, 5)),
        mean_delay_s=mean_s,
        tail=rng.choice((0.0, 0.02, 0.1)),
        compute_s=compute_s,
        optimizer_s=rng.choice((0.001, 0.01, 0.03)),
        snapshot_s=rng.choice((0.001, 0.02, 0.08)),
        lease_s=rng.choice((math.inf, math.inf, 0.4, 1.0)),
        grace_s=rng.choice((0.1, 0.3, 0.6)),
        faults=(*faults, *(any_fault(rng, span_s) for _ in range(num_faults)), *wrong),
        audit=1.0 if wrong else 0.0,
        guarded=guarded,
    )
    full = _with_rows(seed, full, span_s) if not wrong else full
    full = _with_two_levels(seed, _with_hosts(seed, _with_saves(seed, full), span_s))
    full = msgspec.structs.replace(full, faults=(*full.faults, *_alarms(seed, full, span_s)))
    full = _with_auto_spares(seed, full, span_s)
    full = _with_vacancies(seed, _with_speeds(seed, full, span_s), span_s)
    full = _with_shared_record(seed, full, span_s)
    last_s = max((fault.at + fault.lasts for fault in full.faults), default=0.0)
    return msgspec.structs.replace(full, calm_after_s=max(full.calm_after_s, last_s))


def _with_speeds(seed: int, full: Scenario, span_s: float) -> Scenario:
    """In one schedule of five members' speeds change, and work follows. Of its own seed."""
    rng = Random(seed ^ 0x5BEED)
    if rng.random() >= 0.2 or full.num_rows > 1:
        return full
    return msgspec.structs.replace(full, speeds_s=span_s * rng.choice((0.1, 0.2, 0.4)))


def _with_vacancies(seed: int, full: Scenario, span_s: float) -> Scenario:
    """In one of six lost replicas are waited for, for a short while or a long one, or the run stops for them. In some a
    stop or a departure waits for its save meanwhile, and in some no more. Of its own seed."""
    rng = Random(seed ^ 0x7AD0E8)
    if rng.random() >= 1 / 6:
        return full
    kind = rng.choice(("wait", "wait", "auto", "auto", "shrink", "stop"))
    least = rng.choice((1, 1, 2, full.num_replicas))
    draw = Random(seed ^ 0x5A7EA)
    awaited = tuple(
        ScheduleFault(kind="save awaited", who=draw.randrange(2), at=0.05 + span_s * draw.random())
        for _ in range(draw.choice((0, 0, 1, 3)))
    )
    waiting = msgspec.structs.replace(
        full,
        faults=(*full.faults, *awaited),
        on_vacancy=kind,
        min_replicas=min(least if kind != "shrink" else 2, full.num_replicas),
        vacancy_wait_s=rng.choice((0.05, 0.3, 1.0, 5.0)),
        price=rng.choice((0.0, 0.0, 0.7, 2.0)) if full.save_every else 0.0,
    )
    return _with_flips(seed, waiting, span_s) if kind in ("wait", "auto") else waiting


def _with_flips(seed: int, full: Scenario, span_s: float) -> Scenario:
    """In one of six of those that wait the state of one flips meanwhile, and states are compared in every step. Of its
    own seed."""
    rng = Random(seed ^ 0xF11B5)
    if rng.random() >= 1 / 6 or full.num_rows > 1:
        return full
    lost = ScheduleFault(kind="crash", who=rng.randrange(8), at=0.05 + span_s * rng.random())
    flips = [
        ScheduleFault(kind="state flip", who=rng.randrange(8), point="held", nth=rng.randint(1, 6))
        for _ in range(rng.choice((1, 1, 2)))
    ]
    return msgspec.structs.replace(
        full,
        faults=(*full.faults[: rng.choice((0, 0, 1, 3))], lost, *flips),
        num_replicas=max(full.num_replicas, rng.choice((3, 4))),
        num_spares=0,
        guarded=True,
    )


def _wrong(seed: int, span_s: float) -> tuple[ScheduleFault, ...]:
    """In one schedule of eight every microbatch is computed twice, and some replicas compute wrongly. Of its own seed:
    the other schedules are what they are."""
    rng = Random(seed ^ 0xA0D17)
    if rng.random() >= 0.125:
        return ()
    kinds = rng.choice((("flip",), ("flip",), ("broken",), ("flip", "flip"), ("flip", "broken")))
    return tuple(ScheduleFault(kind=kind, who=rng.randrange(8), at=0.05 + span_s * rng.random()) for kind in kinds)


def _spoilt(seed: int, span_s: float) -> tuple[tuple[ScheduleFault, ...], bool]:
    """In one more of eight sums change after they were made, slices are reduced wrongly and states flip, with audits
    and, of every two, with states that are compared in every step. Of its own seed."""
    rng = Random(seed ^ 0x5B017)
    if rng.random() >= 0.125:
        return (), False
    kinds = rng.choice((
        ("sum flip",), ("slice flip",), ("slice broken",), ("state flip",), ("state flip",),
        ("sum flip", "slice flip"), ("state flip", "sum flip"), ("state flip", "state flip"), ("flip", "slice flip"),
    ))  # fmt: skip
    guarded = rng.random() < 0.5
    return (
        tuple(ScheduleFault(kind=kind, who=rng.randrange(8), at=0.05 + span_s * rng.random()) for kind in kinds),
        guarded,
    )


def _with_rows(seed: int, full: Scenario, span_s: float) -> Scenario:
    """One in ten of the others has a robust rule in place of the mean, and perhaps somebody who reduces wrongly; in
    most of those a view that is too small must wait for more members. Of its own seed."""
    rng = Random(seed ^ 0x40A5)
    if rng.random() >= 0.1:
        return full
    kinds = rng.choice(((), ("slice flip",), ("slice flip",), ("slice broken",)))
    faults = [ScheduleFault(kind=kind, who=rng.randrange(8), at=0.05 + span_s * rng.random()) for kind in kinds]
    return msgspec.structs.replace(
        full,
        faults=(*full.faults, *faults),
        num_rows=rng.choice((2, 3)),
        rows_from=min(full.num_replicas, rng.choice((1, 2, 3, 3))),
    )


def _with_saves(seed: int, full: Scenario) -> Scenario:
    """One in eight keeps checkpoints; of these every other has faults where a save is taken or published, or loses all
    replicas at once, so that it begins again from the newest. Of its own seed."""
    rng = Random(seed ^ 0x5A7E5)
    if rng.random() >= 0.125:
        return full
    faults: list[ScheduleFault] = []
    for _ in range(rng.choice((0, 0, 1, 2))):
        point = rng.choice(("took", "took", "publish", "resume", "resume"))
        kind = "coordinator crash" if point == "publish" else rng.choice(("crash", "crash", "pause"))
        faults.append(
            ScheduleFault(kind=kind, who=-1, point=point, nth=rng.randint(1, 6), lasts=0.05 + 0.3 * rng.random())
        )
    if rng.random() < 0.5:
        at = 0.2 + 0.6 * rng.random()
        faults += [ScheduleFault(kind="crash", who=who, at=at + 0.02 * rng.random()) for who in range(8)]
    every = rng.choice((1, 1, 2))
    return _with_stop(seed, msgspec.structs.replace(full, faults=(*full.faults, *faults), save_every=every))


def _with_stop(seed: int, full: Scenario) -> Scenario:
    """One of four that keep checkpoints is asked to stop, which it does with a save. Of its own seed."""
    rng = Random(seed ^ 0x5709)
    if rng.random() >= 0.25:
        return full
    stop = ScheduleFault(kind="stop run", at=0.05 + 0.5 * rng.random())
    return msgspec.structs.replace(
        full, faults=(*full.faults, stop), stops=True, num_steps=max(full.num_steps, rng.randint(8, 14))
    )


def _with_hosts(seed: int, full: Scenario, span_s: float) -> Scenario:
    """One in ten runs on several hosts, which lose their power, hang, are cut off or do not reach each other; nobody is
    told. The coordinator is on none of them. Of its own seed."""
    rng = Random(seed ^ 0x40575)
    if rng.random() >= 0.1:
        return full
    long = rng.random() < 0.7  # a silence is over before the run is
    kinds = ("host off", "host off", "host cut", "host cut", "host cut", "host hang", "hosts parted")
    faults = [
        ScheduleFault(
            kind=rng.choice(kinds), who=rng.randrange(6), other=rng.randrange(1, 6),
            lasts=rng.choice((0.3, 1.5, 3.0)) * (0.5 + rng.random()),
            at=0.4 + rng.random() if long else 0.1 + span_s * rng.random(),
        )
        for _ in range(rng.choice((1, 1, 2, 3)))
    ]  # fmt: skip
    if rng.random() < 0.3:
        at = faults[0].at + 0.6 * (rng.random() - 0.5)
        faults.append(ScheduleFault(kind="coordinator crash", lasts=0.05 + 0.3 * rng.random(), at=max(0.05, at)))
    return msgspec.structs.replace(
        full,
        faults=(*full.faults[: rng.choice((0, 0, 1, 3))], *faults),
        num_agents=rng.choice((2, 2, 3)),
        num_spares=max(1, full.num_spares),
        num_replicas=rng.choice((1, 1, 2)) if long and full.num_rows == 1 else full.num_replicas,
        num_steps=rng.randint(10, 18) if long else full.num_steps,
        compute_s=0.03 if long else full.compute_s,
        lease_s=rng.choice((1.0, 2.0, 3.0)),
        silence_s=rng.choice((0.4, 0.6)),
    )


def _with_shared_record(seed: int, full: Scenario, span_s: float) -> Scenario:
    """One in sixteen has its record on several hosts, any of which may coordinate. The coordinator's hold on it is
    struck (`_record_faults.py`): it lives on, and another takes over. Of its own seed."""
    rng = Random(seed ^ 0x7EA66)
    if rng.random() >= 1 / 16:
        return full
    kinds = (
        "record asleep", "record asleep", "record cut", "record cut", "record cut up", "record cut down",
        "record stopped", "record slow", "record slow", "record clock", "coordinator pause",
    )  # fmt: skip
    faults = [
        ScheduleFault(kind=rng.choice(kinds), who=rng.randrange(3), other=rng.choice((0, 0, 0, 1)),
                      lasts=rng.choice((0.2, 0.6, 1.5)) * (0.5 + rng.random()), at=0.05 + 1.4 * rng.random())
        for _ in range(rng.choice((1, 2, 2, 3, 4)))
    ]  # fmt: skip
    return msgspec.structs.replace(
        full,
        faults=(*full.faults[: rng.choice((0, 1, 3, 6))], *faults),
        num_agents=max(full.num_agents, rng.choice((1, 2, 2, 3))),
        num_steps=max(full.num_steps, rng.randint(8, 14)),
        compute_s=max(full.compute_s, 0.03),
        lease_s=rng.choice((0.4, 1.0, 2.0)) if not full.silence_s else full.lease_s,
        record_lease_s=rng.choice((0.2, 0.3, 0.5)),
        num_seats=rng.choice((2, 2, 3)),
    )


def _with_two_levels(seed: int, full: Scenario) -> Scenario:
    """One in twenty without audits and robust rules exchanges in two levels, on several hosts. Of its own seed."""
    rng = Random(seed ^ 0x2EE1)
    if rng.random() >= 0.05 or full.audit or full.num_rows > 1:
        return full
    return msgspec.structs.replace(
        full,
        two_levels=True,
        num_agents=max(full.num_agents, rng.choice((2, 2, 3))),
        num_replicas=max(full.num_replicas, rng.choice((3, 3, 4))),
    )


def _with_auto_spares(seed: int, full: Scenario, span_s: float) -> Scenario:
    """In one of ten the policy asks for more spares, and for fewer, while it trains. Of its own seed."""
    rng = Random(seed ^ 0x59A2E)
    if rng.random() >= 0.1:
        return full
    said = [
        ScheduleFault(kind="spares", who=rng.randrange(3), at=0.05 + span_s * rng.random())
        for _ in range(rng.randint(1, 5))
    ]
    return msgspec.structs.replace(full, faults=(*full.faults, *said), auto_spares=True)


def _alarms(seed: int, full: Scenario, span_s: float) -> tuple[ScheduleFault, ...]:
    """In every other schedule with several hosts, alarms of some of them, so that their work moves. Of its own seed."""
    rng = Random(seed ^ 0xA1A26)
    if full.num_agents < 2 or full.silence_s or rng.random() < 0.5:
        return ()
    kinds = [rng.choice(("alarm", "alarm", "tested well", "tested badly")) for _ in range(rng.randint(0, 2))]
    return tuple(
        ScheduleFault(kind=kind, who=rng.randrange(8), at=0.05 + span_s * rng.random()) for kind in ("alarm", *kinds)
    )
