"""Who may say what to the coordinator: a proven name speaks for itself alone.

Pure: from the role and name that the handshake proved, and a message, to a refusal or nothing. It does not know whether
what is said is true; a member that lies about itself is another matter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from outlast.core.protocol import host_messages as hm
from outlast.core.protocol import messages as m
from outlast.core.protocol import operator_messages as om
from outlast.errors import WireRefusal
from outlast.runtime.transport.frames import Heartbeat
from outlast.runtime.transport.save_messages import FROM_MEMBER, SaveAsked

__all__ = ["check_speaker"]

_MEMBER = (
    m.Hello, m.Left, m.Formed, m.Ready, m.Rejoin, m.Leaving, m.Done, m.Failed, m.Stalled, m.Rows, m.Whole, m.Admitted,
    m.Accused, m.Audited, m.Judged, m.DataNoted, hm.Awaited, *FROM_MEMBER,
)  # fmt: skip
_AGENT = (m.AgentHello, m.Spawned, hm.HostHere)
_OF_ITS_RANKS = (m.SpawnFailed, m.Unjoined, m.Exited, m.Examined, m.Continued)
_EITHER = (m.DeviceNoted,)
_LAUNCHER = (m.AgentContinued, m.AgentGone, m.Stop, SaveAsked)


def check_speaker(role: str, name: str, message: Any, agent_of: Callable[[str], str]) -> None:
    """WireRefusal unless `name` in this `role` may say this. `agent_of`: a member's agent, "" while unknown."""
    if isinstance(message, Heartbeat):
        allowed, about = role in ("member", "agent"), message.sender
    elif isinstance(message, _EITHER):
        allowed, about = role in ("member", "agent"), message.member
    elif isinstance(message, _MEMBER):
        allowed, about = role == "member", message.member
    elif isinstance(message, _AGENT):
        allowed, about = role == "agent", message.agent
    elif isinstance(message, om.ASKS):
        allowed, about = role == "operator", message.asker
    elif isinstance(message, _OF_ITS_RANKS):
        allowed, about = role == "agent", agent_of(message.member) or name
    else:
        allowed, about = role == "launcher" and isinstance(message, _LAUNCHER), name
    if not allowed:
        raise WireRefusal("a message that its sender's role may not send")
    if about != name:
        raise WireRefusal("a message in another's name")
