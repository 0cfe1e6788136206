"""A TCP connection under TLS 1.3 that behaves as a plain one does, and what its refusals mean.

Role: nobody above has to know of TLS. What would wait raises BlockingIOError, or waits as long as `settimeout` said; an
end without a goodbye is an end; everything else is a `TlsTrouble`, which says whose certificate is wrong, how, and
what to do about it. One thread may read while another writes: OpenSSL's object is used under a lock, and nobody waits
in it. It reads whole records (of 16 KiB at most) into what is asked for; who asks for less looks at `pending()` before
it polls.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from outlast.errors import WireRefusal

__all__ = ["NO_TLS", "TlsSocket", "TlsTrouble", "about_certificates", "counted", "meant", "refusals"]

NO_TLS = bytes((21, 3, 3, 0, 2, 2, 49))
"""What a listener without TLS says to a caller with it: a fatal alert, "access denied", which OpenSSL never sends."""
T = TypeVar("T")

_CERTIFICATE = {
    "expired": ("has expired", "a new one: tls_cert"),
    "early": ("is not valid yet", "see whether the clocks of both hosts are right"),
    "authority": ("is of another authority than tls_ca", "one authority for all hosts, or all of them in tls_ca"),
    "name": ("is for another name or address", "one for the address that is called, or the same tls_name everywhere"),
    "use": ("is not for this use", "extendedKeyUsage = serverAuth, clientAuth, or none"),
    "revoked": ("has been revoked", "a new one, with a key of its own: tls_cert, tls_key"),
    "unlisted": ("cannot be checked: tls_ca has no list of revoked ones that its authority signed", "one of each"),
    "old list": ("cannot be checked: the list of revoked ones in tls_ca is not valid now", "a new list"),
    "none": ("is missing", "tls_cert and tls_key there"),
    "other": ("is not accepted", "openssl verify -CAfile CA CERT"),
}  # fmt: skip
_FOUND = {9: "early", 10: "expired", 26: "use", 62: "name", 64: "name"}  # OpenSSL's numbers of findings
_FOUND |= {23: "revoked", 3: "unlisted", 8: "unlisted", 11: "old list", 12: "old list"}
_FOUND |= dict.fromkeys((2, 7, 18, 19, 20, 21), "authority")
_TOLD = {
    "CERTIFICATE_EXPIRED": "expired", "UNKNOWN_CA": "authority", "BAD_CERTIFICATE": "name",
    "UNSUPPORTED_CERTIFICATE": "use", "CERTIFICATE_REQUIRED": "none", "CERTIFICATE_UNKNOWN": "other",
    "CERTIFICATE_REVOKED": "revoked", "DECRYPT_ERROR": "other",
}  # fmt: skip
_CHANGED = ("DECRYPTION_FAILED_OR_BAD_RECORD_MAC", "BAD_RECORD_MAC")


class TlsTrouble(ConnectionError):
    """TLS ended this connection: `reason`, of fixed wording; `remedy`; `forged`: its bytes were changed on the way."""

    def __init__(self, reason: str, remedy: str = "", *, forged: bool = False) -> None:
        super().__init__(errno.ECONNABORTED, reason)
        self.reason, self.remedy, self.forged = reason, remedy, forged


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """Have what TLS refuses be refused as all else is."""
    try:
        yield
    except TlsTrouble as trouble:
        raise WireRefusal(trouble.reason, remedy=trouble.remedy) from trouble


def counted(refusal: WireRefusal) -> str:
    """The wording under which a refusal is counted, with what to do about it."""
    return f"{refusal.message} ({refusal.remedy})" if refusal.remedy else refusal.message


def about_certificates(reason: str) -> bool:
    """Whether this is why one of the run's own processes may have been refused, rather than a stranger."""
    return reason.startswith(("TLS: its certificate", "TLS: this host's certificate", "no TLS, which"))


def whose(kind: str, mine: bool) -> TlsTrouble:
    """What is wrong with this end's certificate, by the other's word, or with the other's, as found here."""
    what, remedy = _CERTIFICATE[kind]
    if mine:
        return TlsTrouble(f"TLS: this host's certificate is refused there: it {what}", remedy)
    return TlsTrouble(f"TLS: its certificate {what}", remedy)


def meant(error: ssl.SSLError) -> TlsTrouble:
    """What OpenSSL's word means here."""
    reason = error.reason or str(error)
    if isinstance(error, ssl.SSLCertVerificationError):
        return whose(_FOUND.get(error.verify_code, "other"), mine=False)
    if "PEER_DID_NOT_RETURN_A_CERTIFICATE" in reason:
        return whose("none", mine=False)
    if reason.endswith(_CHANGED):
        return TlsTrouble("TLS: bytes that were changed on their way", forged=True)
    _, alert, told = reason.replace(" ", "_").upper().rpartition("ALERT_")
    if alert and told in _TOLD:
        return whose(_TOLD[told], mine=True)
    if alert and told == "ACCESS_DENIED":
        return TlsTrouble(
            "its run has no TLS, and this end has", "tls_cert, tls_key and tls_ca on all hosts, or on none"
        )
    return TlsTrouble(
        "TLS: the other end does not speak it as an outlast run does", "see what listens, or calls, there"
    )


def _ended() -> ConnectionResetError:
    """As a plain connection's end is: who calls tries again."""
    return ConnectionResetError(errno.ECONNRESET, "the connection ended")


def _awaited(blocked: BlockingIOError) -> int:
    """What a call that would wait waits for: its own, and not what another thread's on the same connection does."""
    return select.POLLOUT if isinstance(blocked.__cause__, ssl.SSLWantWriteError) else select.POLLIN


class TlsSocket(ssl.SSLSocket):
    """Made by `Tls` (`tls.py`) of a connected socket that does not block."""

    mutex: Any = threading.Lock()  # another for each, once it is made
    wants = select.POLLIN
    """What the handshake waits for."""
    _patience_s: float | None = 0.0
    _heard = False

    def settimeout(self, value: float | None) -> None:
        """See socket.settimeout; the kernel's socket itself never waits."""
        self._patience_s = value
        super().settimeout(0.0)

    def setblocking(self, flag: bool) -> None:
        self.settimeout(None if flag else 0.0)

    # --- the handshake -------------------------------------------------------------------------------------------
    def greet(self) -> bool:
        """Go on with the handshake, never waiting; whether it is done. TlsTrouble, OSError."""
        kept_s = self._patience_s
        try:
            self._locked(self.do_handshake)
        except BlockingIOError as blocked:
            self.wants = _awaited(blocked)
            return False
        finally:
            self._patience_s = kept_s  # which ssl.SSLSocket sets to what the kernel's socket has
        return True

    def greet_within(self, seconds: float) -> None:
        """The whole handshake. TlsTrouble, OSError (TimeoutError)."""
        until_s = time.monotonic() + seconds
        while not self.greet():
            self._wait(until_s, self.wants)

    def bound(self) -> bytes:
        """What both ends of this connection know, and no other connection has: a handshake that signs it cannot be
        passed on by somebody in between who has a certificate."""
        bound = self.get_channel_binding("tls-unique")
        assert bound
        return bound

    def bears(self, name: str) -> bool:
        """Whether the other's certificate has this name."""
        names: Any = (self.getpeercert() or {}).get("subjectAltName", ())
        return any(kind == "DNS" and value.lower() == name.lower() for kind, value in names)

    # --- bytes ---------------------------------------------------------------------------------------------------
    def recv(self, buflen: int = 1024, flags: int = 0) -> bytes:
        data = self._patiently(lambda: super(TlsSocket, self).recv(buflen, flags))
        self._heard = True
        return data

    def recv_into(self, buffer: Any, nbytes: int | None = None, flags: int = 0) -> int:
        received = self._patiently(lambda: super(TlsSocket, self).recv_into(buffer, nbytes, flags))
        self._heard = True
        return received

    def recvmsg(self, bufsize: int, *_: Any) -> Any:  # type: ignore[override]
        """No descriptors come over a network."""
        return self.recv(bufsize), [], 0, None

    def send(self, data: Any, flags: int = 0) -> int:
        return self._patiently(lambda: self._sent(data, flags))

    def sendall(self, data: Any, flags: int = 0) -> None:
        """One thread at a time."""
        until_s = self._until()
        with memoryview(data) as view, view.cast("B") as rest:
            at = 0
            while at < len(rest):
                at += self._patiently(lambda at=at: self._sent(rest[at:], flags), until_s)  # type: ignore[misc]

    def _sent(self, data: Any, flags: int) -> int:
        try:
            return super().send(data, flags)
        except (ConnectionError, ssl.SSLEOFError, ssl.SSLSyscallError):
            if not self._heard:  # before it takes me it may have said why it does not, and hung up
                with contextlib.suppress(ssl.SSLWantReadError):
                    self.read(1)
            raise

    def _patiently(self, act: Callable[[], T], until_s: float | None = None) -> T:
        until_s = self._until() if until_s is None else until_s
        while True:
            try:
                return self._locked(act)
            except BlockingIOError as blocked:
                if self._patience_s == 0.0:
                    raise
                self._wait(until_s, _awaited(blocked))

    def _until(self) -> float:
        return math.inf if self._patience_s is None else time.monotonic() + self._patience_s

    def _locked(self, act: Callable[[], T]) -> T:
        try:
            with self.mutex:
                return act()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as waits:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN)) from waits
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError, ssl.SSLSyscallError) as error:
            raise _ended() from error
        except ssl.SSLError as error:
            raise meant(error) from error
        except OSError as error:
            if error.errno == errno.ENOTCONN:  # it was reset before TLS had it
                raise _ended() from error
            raise

    def _wait(self, until_s: float, events: int) -> None:
        poll, left_s, fd = select.poll(), until_s - time.monotonic(), self.fileno()
        if fd < 0:  # another thread has closed it meanwhile
            raise _ended()
        poll.register(fd, events)
        if left_s <= 0 or not poll.poll(None if left_s == math.inf else 1000.0 * left_s):
            raise TimeoutError("timed out")

    # --- the end -------------------------------------------------------------------------------------------------
    def shutdown(self, how: int) -> None:
        """The kernel's alone: what another thread still reads is not taken for plain bytes."""
        socket.socket.shutdown(self, how)

    def _real_close(self) -> None:
        with self.mutex:
            super()._real_close()  # type: ignore[misc]
