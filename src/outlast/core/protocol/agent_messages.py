"""What agents and the launcher tell the coordinator of the processes that they start and watch."""

from __future__ import annotations

from typing import Literal

import msgspec

from outlast.core.protocol.ledger import StepTime

__all__ = [
    "AgentContinued",
    "AgentGone",
    "AgentHello",
    "Cause",
    "Continued",
    "Examined",
    "Exited",
    "SpawnFailed",
    "Spawned",
    "Stop",
    "Unjoined",
]


Cause = Literal["signal", "exit", "exception", "evicted", "left", "finished", "agent_lost"]


class AgentHello(msgspec.Struct, frozen=True, kw_only=True, repr_omit_defaults=True, tag=True):
    """An agent (re)connects. `members`: alive under it, or about to be started. `number`: of this greeting among those
    of its process; a late copy of an earlier one would call members dead that started since."""

    agent: str
    pid: int
    members: tuple[str, ...] = ()
    epoch: int = 0  # highest epoch seen
    number: int = 0


class AgentGone(msgspec.Struct, frozen=True, kw_only=True, repr_omit_defaults=True, tag=True):
    """The launcher saw the agent's exit; its ranks died with it. `exits`: what their progress blocks say."""

    agent: str
    cause: str = ""
    exits: tuple[Exited, ...] = ()


class Spawned(msgspec.Struct, frozen=True, kw_only=True, repr_omit_defaults=True, tag=True):
    member: str
    agent: str
    pid: int


class SpawnFailed(msgspec.Struct, frozen=True, kw_only=True, repr_omit_defaults=True, tag=True):
    member: str
    error: str


class Unjoined(msgspec.Struct, frozen=True, kw_only=True, repr_omit_defaults=True, tag=True):
    """The replica's process has run for so long without `outlast.join()`."""

    member: str
    for_s: float


class Exited(msgspec.Struct, frozen=True, kw_only=True, repr_omit_defaults=True, tag=True):
    """The agent saw the member's exit (pidfd). Certain."""

    member: str
    cause: Cause
    detail: str = ""
    last_alive_s: float = 0.0  # its last sign of life, host's monotonic clock
    noticed_at_s: float = 0.0
    joined: bool = True  # it had reached protect()
    code: int | None = None  # exit code; None for a signal
    committed: int = 0  # steps, as its progress block has it: newer than its last heartbeat
    steps: tuple[StepTime, ...] = ()  # its newest, likewise


class Continued(msgspec.Struct, frozen=True, kw_only=True, repr_omit_defaults=True, tag=True):
    """The agent found a member stopped for so long that somebody would have missed it, and has continued it, once."""

    member: str
    for_s: float


class AgentContinued(msgspec.Struct, frozen=True, kw_only=True, repr_omit_defaults=True, tag=True):
    """The launcher found an agent stopped, and has continued it. Its members were well meanwhile."""

    agent: str
    for_s: float


class Examined(msgspec.Struct, frozen=True, kw_only=True, repr_omit_defaults=True, tag=True):
    """What an agent finds when it looks at a suspect: evidence for `core/policy`. Sent when asked (Examine), and
    unasked when a member is silent for longer than it may be: in a view of one nobody else would notice."""

    member: str
    state: str  # the kernel's letter: R S D T t Z, or X for gone
    traced: bool
    phase: int
    silent_s: float  # since its progress block changed
    cpu_advanced: bool  # since the previous look, or since the silence began
    allowed_s: float  # its own deadline for the phase; inf if none was learned
    deaf: bool = False  # a rank that is not its replica's lead, and does not even say that it waits
    full: bool = False  # it waits to be connected, and has no descriptor left with which it could be
    place: int = 0  # of the rank in its replica that this was seen of


class Stop(msgspec.Struct, frozen=True, kw_only=True, repr_omit_defaults=True, tag=True):
    """Both ways. Launcher: the user wants the run to end, with this code. Coordinator to agents: kill everything; the
    run ends with this code."""

    reason: str = ""
    exit_code: int = 0
    epoch: int = 0
