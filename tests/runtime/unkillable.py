"""`outlast` on a machine where the coordinator cannot be killed, as when it waits for a disk that does not answer."""

from __future__ import annotations

import signal
import sys

from outlast.cli import main
from outlast.runtime.host._children import Child
from outlast.runtime.host.silence import kernel_state

_send = Child.send


def send(self: Child, number: signal.Signals) -> None:
    if number != signal.SIGKILL or kernel_state(self.pid)[0] != "T":
        _send(self, number)


if __name__ == "__main__":
    Child.send = send  # type: ignore[method-assign]
    sys.exit(main(sys.argv[1:]))
