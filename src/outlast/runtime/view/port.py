"""The member, as checks, saves, joins and the exchange may use it: never the whole of it.

`ViewPort` is what they get in place of the driver, so that no feature knows who drives it, and a test may give them
anything that answers. Nothing here decides or keeps anything.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any, Protocol, TypeVar

from outlast.core.phases import Phase
from outlast.core.protocol import Member
from outlast.runtime.host.environment import Environment
from outlast.runtime.transport.mesh import Mesh
from outlast.runtime.view.rounds import Channel

__all__ = ["Bench", "CoordinatorLink", "ViewPort"]

T = TypeVar("T")
Said = TypeVar("Said")


class CoordinatorLink(Protocol):
    """Words to the coordinator, best effort; `wake_fd` becomes readable when it has said something."""

    wake_fd: int

    def send(self, messages: Iterable[Any]) -> None: ...


class Bench(Protocol):
    """A process that computes microbatches."""

    env: Environment
    device: str

    def enter(self, phase: Phase, microbatch: int = -1, bucket: int = -1) -> None:
        """Publish where this member is, and pass the fault point."""


class ViewPort(Bench, Protocol):
    """One member in its view. `lock`: held while `member` is asked or told, for the link's thread uses it too."""

    member: Member
    lock: threading.RLock

    @property
    def mesh(self) -> Mesh | None:
        """The connections of the view that works or forms; None between views."""

    def everyone(self, mine: T, phase: Phase) -> dict[str, T]:
        """Say a message to all, and return everybody's of its kind and step, mine among them, in the view's order.
        Raises ViewAbandoned if the view ends first."""

    def on(self, channel: Channel[Said], step: int, mine: Said, phase: Phase, turn: int = 0) -> dict[str, Said]:
        """As `everyone`, of what has no message of its own; `turn` tells repeated rounds of a step apart."""

    def tell_coordinator(self, messages: Iterable[Any]) -> None: ...
