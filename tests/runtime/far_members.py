"""Two members on one machine that meet over the network, as members of two hosts do."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence

import pytest

from outlast.core.protocol import View, ViewId
from outlast.runtime.settings.fault_points import Probe
from outlast.runtime.transport.connections import Listener
from outlast.runtime.transport.mesh import Mesh
from outlast.runtime.transport.tls import Tls

SECRET = b"s" * 32
MEMBERS = ("r0.1", "r1.1")


class Far:
    """Each takes the other for another machine's. `tls`: what each of them has, in their order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tls: Sequence[Tls | None] = (None, None)) -> None:
        self.listeners = [
            Listener("far", name, SECRET, network="127.0.0.1", tls=its) for name, its in zip(MEMBERS, tls, strict=True)
        ]
        monkeypatch.setattr("outlast.runtime.transport.endpoints.place_here", lambda: "elsewhere")
        self.addresses = {each.me: each.address for each in self.listeners}

    def mesh(self, index: int) -> Mesh:
        return Mesh(
            self.listeners[index], View(id=ViewId(1, 1), members=MEMBERS), self.addresses, None,
            wake_fd=os.eventfd(0, os.EFD_NONBLOCK), abandoned=lambda: False, patience=lambda phase: 30.0,
            on_stall=lambda *_: None, probe=Probe(MEMBERS[index], None),
        )  # fmt: skip

    def formed(self) -> list[Mesh]:
        """Both members' ends of a view."""
        meshes = [self.mesh(index) for index in (0, 1)]
        other = threading.Thread(target=meshes[1].form)
        other.start()
        meshes[0].form()
        other.join(30)
        return meshes

    def close(self) -> None:
        for each in self.listeners:
            each.close()
