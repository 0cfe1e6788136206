"""Which fleet, and which faults in it: a seeded sample over phase, bucket, action, type, size and exchange. Pure.

Every phase of `core/phases` that a run passes has its scene: what must happen besides, so that the fault is met. A
campaign of as many trials as there are scenes, or more, visits each.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import msgspec

from outlast.core.phases import Phase
from outlast.runtime.settings.fault_points import Fault

__all__ = ["MICROBATCHES", "SCENES", "STEPS", "Gate", "Trial", "trial_of"]

STEPS, MICROBATCHES = 11, 8
_BUCKETS = 3
_PER_BUCKET = frozenset({Phase.SCATTER, Phase.REDUCE, Phase.GATHER, Phase.GATHERED})
_OWN_THREAD = ("SIGKILL", "SIGSTOP", "raise", "hang", "exit")
_SUDDEN = ("SIGKILL", "exit")


class Gate(msgspec.Struct, frozen=True, kw_only=True):
    """Training waits before `step` until `replica` has been served, has caught up, has exited."""

    step: int
    what: str
    replica: str


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One fleet. `loses`: how many processes its faults end at least; `fails`: how many saves they undo at least."""

    number: int
    phase: str
    action: str
    bucket: int | None
    dtype: str
    replicas: int
    spares: int
    agents: int
    exchange: str
    faults: tuple[Fault, ...]
    gates: tuple[Gate, ...] = ()
    loses: int = 1
    fails: int = 0
    restarts: int = 0
    checkpoint_every: int = 0  # 0: none are kept
    audit: float = 0.0  # share of the microbatches that are computed twice


class _Draw:
    """What one trial is drawn from."""

    def __init__(self, number: int, seed: int, phase: Phase) -> None:
        self.rng = random.Random(f"{seed}/{number}")
        self.number, self.phase = number, phase
        self.dtype = self.rng.choice(("float32", "bfloat16"))
        self.bucket = self.rng.randrange(_BUCKETS) if phase in _PER_BUCKET else None
        self.exchange = "c10d" if self.rng.random() < 0.15 else "shm"

    def size(self, least: int) -> int:
        return self.rng.randint(least, 8)

    def others(self, replicas: int, num: int) -> list[str]:
        return self.rng.sample([f"r{index}" for index in range(replicas)], num)

    def trial(self, faults: Sequence[Fault], replicas: int, **more: object) -> Trial:
        struck = next(f for f in reversed(faults) if f.phase == self.phase.name.lower())
        fields = {"spares": 0, "agents": 1, "exchange": self.exchange, "dtype": self.dtype} | more
        return msgspec.convert(
            {
                "number": self.number,
                "phase": struck.phase,
                "action": struck.action,
                "bucket": self.bucket,
                "faults": [msgspec.to_builtins(fault) for fault in faults],
                "replicas": replicas,
                **fields,
            },
            Trial,
        )


def _fault(replica: str, phase: Phase | str, action: str, **where: object) -> Fault:
    name = phase.name.lower() if isinstance(phase, Phase) else phase
    return msgspec.convert({"replica": replica, "phase": name, "action": action, **where}, Fault)


# --- scenes ----------------------------------------------------------------------------------------------------------
def _in_a_step(d: _Draw) -> Trial:
    """One of two and more fails in the middle of a step; a fleet of one has a spare that goes on."""
    replicas, step = d.size(1), d.rng.randint(5, STEPS - 2)
    victim = d.others(replicas, 1)[0] + ".1"
    where = {} if d.bucket is None else {"bucket": d.bucket}
    # A fleet of one has no peers that miss it, and its spare nobody who hands over: there it must die.
    action = d.rng.choice(_OWN_THREAD if replicas > 1 else _SUDDEN)
    if action == "hang" and d.phase in (Phase.LOAD, Phase.BODY):
        action = "SIGSTOP"
    fault = _fault(victim, d.phase, action, step=step, **where)
    if replicas > 1:
        return d.trial([fault], replicas)
    return d.trial(
        [fault], 1, spares=1, exchange="shm", gates=[_gate(1, "served", "r1.1"), _gate(3, "caught up", "r1.1")]
    )


def _waiting(d: _Draw) -> Trial:
    """Only who is early waits for slices, so the fault is for the first few times that somebody does."""
    replicas = d.size(2)
    fault = _fault(d.others(replicas, 1)[0], d.phase, d.rng.choice(_OWN_THREAD), count=d.rng.randint(2, 5))
    return d.trial([fault], replicas)


def _gate(step: int, what: str, replica: str) -> dict[str, object]:
    return {"step": step, "what": what, "replica": replica}


def _in_a_change(d: _Draw) -> Trial:
    """A second one fails while the first one's death is dealt with."""
    replicas, step = d.size(3), d.rng.randint(2, STEPS - 2)
    if d.phase is Phase.RECOMPUTE:
        replicas = 3  # in larger fleets the dead one's share is too small for everybody to get a part of it
    first, second = d.others(replicas, 2)
    action = d.rng.choice(_OWN_THREAD if d.phase is not Phase.LEAVE else ("SIGKILL", "SIGSTOP", "exit"))
    faults = [_fault(first, "backward", "SIGKILL", step=step), _fault(second, d.phase, action, step=step)]
    return d.trial(faults, replicas, loses=2)


def _in_a_hand_over(d: _Draw) -> Trial:
    """Only r0 hears the last header of a step; who gives, or one who takes, fails as the outcome is handed over."""
    replicas, step = d.size(4), d.rng.randint(2, STEPS - 3)
    last = f"r{replicas - 1}"
    faults = [_fault(last, "header", "mute", step=step, peer=f"r{index}.1") for index in range(1, replicas - 1)]
    faults.append(_fault(last, "verdict", "SIGKILL", step=step))
    giving = d.phase is Phase.HAND_OVER_SEND
    action = d.rng.choice(_SUDDEN if giving else ("SIGKILL", "SIGSTOP", "raise", "exit"))
    faults.append(_fault("r0" if giving else "r1", d.phase, action, step=step + giving))
    return d.trial(faults, replicas, loses=2)


def _at_the_end(d: _Draw) -> Trial:
    replicas = d.size(2)
    return d.trial([_fault(d.others(replicas, 1)[0], d.phase, d.rng.choice(_SUDDEN), step=STEPS)], replicas)


def _leaving(d: _Draw) -> Trial:
    """Asked to go, and dead at the door."""
    replicas = d.size(2)
    victim = d.others(replicas, 1)[0]
    faults = [_fault(victim, "body", "SIGTERM", step=3), _fault(victim, d.phase, d.rng.choice(_SUDDEN))]
    return d.trial(faults, replicas)


def _joining(d: _Draw) -> Trial:
    """The first process of the spare's slot fails as it joins; the second catches up, and a member dies."""
    replicas = d.size(1)
    spare, action = f"r{replicas}", d.rng.choice(("SIGKILL", "SIGSTOP", "raise", "exit"))
    faults = [_fault(f"{spare}.1", d.phase, action), _fault("r0.1", "gather", "SIGKILL", step=STEPS - 2)]
    gates = [
        _gate(1, "served", f"{spare}.1"), _gate(3, "exited", f"{spare}.1"), _gate(4, "served", f"{spare}.2"),
        _gate(6, "caught up", f"{spare}.2"),
    ]  # fmt: skip
    return d.trial(faults, replicas, spares=1, exchange="shm", gates=gates, loses=2, restarts=2)


def _serving(d: _Draw) -> Trial:
    """A donor fails as it serves; another donor must be left."""
    replicas = d.size(2)
    victim = d.others(replicas, 1)[0]
    action = d.rng.choice(("SIGKILL", "SIGSTOP", "raise", "exit"))
    gates = [_gate(1, "served", f"r{replicas}.1"), _gate(5, "exited", f"{victim}.1")]
    return d.trial([_fault(f"{victim}.1", d.phase, action)], replicas, spares=1, exchange="shm", gates=gates)


def _coordinating(d: _Draw) -> Trial:
    """The coordinator fails as it writes or tells what follows from a death."""
    replicas = d.size(2)
    action = d.rng.choice(("SIGKILL", "SIGSTOP", "raise", "exit"))
    where = {"step": 2} if d.phase is Phase.PERSIST else {"count": d.rng.randint(2, 3)}
    death = _fault(d.others(replicas, 1)[0], "backward", "SIGKILL", step=3)
    return d.trial([death, _fault("coordinator.1", d.phase, action, **where)], replicas, loses=2)


def _supervising(d: _Draw) -> Trial:
    """One of two agents fails as it starts a rank, or kills one that was stopped."""
    replicas = d.size(3)
    action = d.rng.choice(("SIGKILL", "raise", "exit"))
    killing = d.phase is Phase.KILL
    faults = [
        _fault("r1.1", "backward", "SIGSTOP" if killing else "SIGKILL", step=3),
        _fault("a1.1", d.phase, action, count=1 if killing else 1 + replicas // 2),
    ]
    gates = [] if killing else [_gate(5, "started", "r1.3")]
    return d.trial(faults, replicas, agents=2, gates=gates, restarts=0 if killing else 16)


def _saving(d: _Draw) -> Trial:
    """A writer fails in the middle of a save. What is raised on a thread of the save's own costs the save alone."""
    replicas = d.size(2)
    victim = d.others(replicas, 1)[0] + ".1"
    action = d.rng.choice(("SIGKILL", "SIGSTOP", "raise", "exit"))
    fault = _fault(victim, d.phase, action, count=d.rng.randint(1, 2))
    mild = action == "raise" and d.phase is not Phase.SAVE_BEGAN
    return d.trial([fault], replicas, exchange="shm", checkpoint_every=3, loses=0 if mild else 1, fails=int(mild))


def _publishing(d: _Draw) -> Trial:
    """The coordinator fails just before a generation has its name, or just after; an error costs it that save."""
    action = d.rng.choice(("SIGKILL", "SIGSTOP", "raise", "exit"))
    fault = _fault("coordinator.1", d.phase, action, count=d.rng.randint(1, 2))
    mild = action == "raise"
    return d.trial([fault], d.size(1), exchange="shm", checkpoint_every=3, loses=0 if mild else 1, fails=int(mild))


def _auditing(d: _Draw) -> Trial:
    """A second fails as it computes another's microbatch."""
    replicas = d.size(2)
    victim = d.others(replicas, 1)[0] + ".1"
    fault = _fault(victim, d.phase, d.rng.choice(_OWN_THREAD), step=d.rng.randint(5, STEPS - 2))
    return d.trial([fault], replicas, audit=1.0)


_STEP = (
    Phase.LOAD, Phase.BODY, Phase.BACKWARD, Phase.MERGE, Phase.SCATTER, Phase.REDUCE, Phase.GATHER, Phase.GATHERED,
    Phase.HEADER, Phase.VERDICT, Phase.OPTIMIZER, Phase.COMMIT,
)  # fmt: skip
SCENES: dict[Phase, Callable[[_Draw], Trial]] = {
    **dict.fromkeys(_STEP, _in_a_step),
    Phase.SCATTERED: _waiting,
    Phase.AUDIT: _auditing,
    **dict.fromkeys((Phase.LEAVE, Phase.CONNECT, Phase.ROLL_CALL, Phase.RECOMPUTE), _in_a_change),
    **dict.fromkeys((Phase.HAND_OVER_SEND, Phase.HAND_OVER_RECEIVE), _in_a_hand_over),
    Phase.FINAL: _at_the_end,
    Phase.DEPART: _leaving,
    **dict.fromkeys(
        (Phase.JOIN_HELLO, Phase.JOIN_SCHEMA, Phase.JOIN_SNAPSHOT, Phase.JOIN_REPLAY, Phase.JOIN_READY), _joining
    ),
    **dict.fromkeys((Phase.SERVE_SNAPSHOT, Phase.SERVE_STREAM), _serving),
    **dict.fromkeys((Phase.PERSIST, Phase.TELL), _coordinating),
    **dict.fromkeys((Phase.SPAWN, Phase.KILL), _supervising),
    **dict.fromkeys(
        (
            Phase.SAVE_BEGAN,
            Phase.SAVE_SEALED,
            Phase.SAVE_WRITTEN,
            Phase.SAVE_DATA_DURABLE,
            Phase.SAVE_PART_WRITTEN,
            Phase.SAVE_PART_DURABLE,
        ),
        _saving,
    ),
    **dict.fromkeys((Phase.PUBLISH_BEGAN, Phase.PUBLISH_DONE), _publishing),
}


def trial_of(number: int, seed: int) -> Trial:
    """Trial `number` of the campaign `seed`. Phases come in an order drawn by the seed, each once a round."""
    turn, place = divmod(number, len(SCENES))
    order = list(SCENES)
    random.Random(f"{seed}/order/{turn}").shuffle(order)
    phase = order[place]
    return SCENES[phase](_Draw(number, seed, phase))
