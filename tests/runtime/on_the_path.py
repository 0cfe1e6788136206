"""Somebody on the path between two hosts: passes on what a caller and a listener say, but strikes some frames.

`on_the_path.py HOST:PORT OWN_PORT STRUCK`: each handshake is passed on as it is. Of the first four connections with
frames enough, the second frame of the caller's is changed, sent twice, sent after the third, or said to be longer than
it is. What was done is a line of the file STRUCK once the listener has hung up.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import sys
import threading
from collections.abc import Iterator

from outlast.runtime.transport import handshake
from outlast.runtime.transport.seal import CODE_BYTES, LENGTH_CODE_BYTES

HOW = ("changed", "repeated", "reordered", "lengthened")


def exactly(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = sock.recv(size - len(data))
        if not more:
            raise ConnectionError("the caller ended")
        data += more
    return data


def frames(caller: socket.socket) -> Iterator[bytes]:
    while True:
        head = exactly(caller, 4)
        yield head + exactly(caller, LENGTH_CODE_BYTES + int.from_bytes(head, "big") + CODE_BYTES)


def struck(how: str, sent: bytes, following: Iterator[bytes]) -> bytes:
    if how == "changed":
        return sent[:-1] + bytes([sent[-1] ^ 1])
    if how == "lengthened":
        return (int.from_bytes(sent[:4], "big") + (1 << 20)).to_bytes(4, "big") + sent[4:]
    return sent + sent if how == "repeated" else next(following) + sent


def back(listener: socket.socket, caller: socket.socket, ended: threading.Event) -> None:
    """What the listener says, to its end."""
    with contextlib.suppress(OSError):
        while data := listener.recv(1 << 16):
            caller.sendall(data)
    ended.set()
    with contextlib.suppress(OSError):
        caller.shutdown(socket.SHUT_RDWR)


class Path:
    """`to`: the listener. `file`: for what was done."""

    def __init__(self, to: tuple[str, int], file: str) -> None:
        self.to, self.file = to, file
        self._left, self._lock = list(HOW), threading.Lock()

    def carry(self, caller: socket.socket) -> None:
        """One connection, to its end."""
        ended = threading.Event()
        with caller, socket.create_connection(self.to) as listener:
            threading.Thread(target=back, args=(listener, caller, ended), daemon=True).start()
            with contextlib.suppress(OSError):
                self._forth(caller, listener, ended)

    def _forth(self, caller: socket.socket, listener: socket.socket, ended: threading.Event) -> None:
        knock = exactly(caller, handshake._HEAD)
        claim = int.from_bytes(knock[-2:], "big")
        listener.sendall(knock + exactly(caller, claim + handshake._MAC))
        listener.sendall(exactly(caller, handshake._MAC))
        said = frames(caller)
        for number in itertools.count():
            frame = next(said)
            if number == 1 and self._strike(frame, said, listener, ended):
                return
            listener.sendall(frame)

    def _strike(
        self, frame: bytes, following: Iterator[bytes], listener: socket.socket, ended: threading.Event
    ) -> bool:
        """Do what is left to be done, and see that the listener hangs up."""
        with self._lock:
            if not self._left:
                return False
            how = self._left.pop()
        try:
            listener.sendall(struck(how, frame, following))
        except OSError:  # the caller ended before it had said enough
            self._left.append(how)
            raise
        ended.wait()
        with self._lock, open(self.file, "a") as file:
            file.write(how + "\n")
        return True


def main() -> None:
    host, port = sys.argv[1].rsplit(":", 1)
    path = Path((host, int(port)), sys.argv[3])
    with socket.create_server(("127.0.0.1", int(sys.argv[2]))) as server:
        while True:
            threading.Thread(target=path.carry, args=(server.accept()[0],), daemon=True).start()


if __name__ == "__main__":
    main()
