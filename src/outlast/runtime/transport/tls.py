"""TLS between the hosts of a run, under the run's own handshake: certificates, and the connections made with them.

Role: both ends show a certificate (TLS 1.3, nothing older), and check the other's: signed by an authority of `tls_ca`,
valid now, and for the right name: the caller, that the listener's is for the address it has called, or `tls_name`; the
listener, that the caller's has `tls_name`, where there is one. Where `tls_ca` holds lists of revoked certificates, none
is taken that is in its authority's, or whose authority has no list there that is valid now. Files that were renewed are
read again, at most once a second and on a thread of its own, since a file system may hang and a connection is made
where nothing may wait; connections that exist stay. Keys are read and never told.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import ssl
import stat
import threading
import time
from typing import NamedTuple, NoReturn

from outlast.checkpoint.threads import begin
from outlast.config import TlsFiles
from outlast.errors import ConfigError
from outlast.journal import RenewedFiles
from outlast.runtime.transport.tls_socket import TlsSocket, meant

__all__ = ["Tls", "tls_of"]

_LOOK_S = 1.0  # between two looks at the files, while there are connections


class _Contexts(NamedTuple):
    calling: ssl.SSLContext
    answering: ssl.SSLContext
    mark: tuple[tuple[int, int, int], ...]


class Tls:
    """Makes TLS connections. `name`: what certificates of the run bear, or ""."""

    def __init__(self, files: TlsFiles) -> None:
        """Raises ConfigError where the files cannot be used."""
        self._files, self.name = files, files.name
        self._now = self._read()
        self._looked_s, self._looking = time.monotonic(), False
        self._renewed = RenewedFiles()

    def calling(self, sock: socket.socket, host: str) -> TlsSocket:
        """Take over a connection to this host; `greet` next. OSError: it is over."""
        made = _wrapped(self._fresh().calling, sock, self.name or host.partition("%")[0])
        made.wants = select.POLLOUT  # it speaks first
        return made

    def answering(self, sock: socket.socket) -> TlsSocket:
        """Take over a connection that somebody has made; `greet` next. OSError: it is over."""
        return _wrapped(self._fresh().answering, sock, None)

    def check_own(self, host: str) -> None:
        """Raise ConfigError where this host's certificate would not be taken by this host itself, at this address."""
        here, there = ssl.MemoryBIO(), ssl.MemoryBIO()
        caller = self._now.calling.wrap_bio(there, here, server_hostname=self.name or host)
        listener = self._now.answering.wrap_bio(here, there, server_side=True)
        try:
            for end in (caller, listener, caller, listener):
                with contextlib.suppress(ssl.SSLWantReadError):
                    end.do_handshake()
        except ssl.SSLError as error:
            trouble = meant(error)
            raise ConfigError(
                f"the certificate in {self._files.cert} would be refused by this host itself, at {self.name or host}: "
                f"it {trouble.reason.removeprefix('TLS: its certificate ')}",
                did="nothing was started",
                remedy=trouble.remedy,
            ) from error

    # --- files ---------------------------------------------------------------------------------------------------
    def _fresh(self) -> _Contexts:
        if not self._looking and time.monotonic() - self._looked_s >= _LOOK_S:
            self._looking = True
            try:
                begin(threading.Thread(target=self._look, name="outlast-certificates", daemon=True))
            except (RuntimeError, MemoryError):
                # no thread is to be had: what was read holds, and a later connection tries again
                self._looked_s, self._looking = time.monotonic(), False
        return self._now

    def _look(self) -> None:
        try:
            if _mark(self._files) != self._now.mark:
                self._now = self._read()
            self._renewed.taken()
        except (OSError, ConfigError) as error:  # half renewed: what was there holds until it is whole
            self._renewed.refused(error)
        finally:
            self._looked_s, self._looking = time.monotonic(), False

    def _read(self) -> _Contexts:
        files = self._files
        for name in (files.cert, files.key, files.ca):
            _check_readable(name)
        if _read_by_others(os.stat(files.key)):
            raise ConfigError(f"the key in {files.key} can be read by others", remedy=f"chmod 600 {files.key}")
        mark = _mark(files)
        return _Contexts(_context(files, calling=True), _context(files, calling=False), mark)


def tls_of(files: TlsFiles | None) -> Tls | None:
    """None for none."""
    return Tls(files) if files is not None else None


def _wrapped(context: ssl.SSLContext, sock: socket.socket, name: str | None) -> TlsSocket:
    sock.setblocking(False)
    made = context.wrap_socket(
        sock, server_side=name is None, server_hostname=name, do_handshake_on_connect=False, suppress_ragged_eofs=True
    )
    assert isinstance(made, TlsSocket)
    made.mutex = threading.Lock()
    return made


def _read_by_others(key: os.stat_result) -> bool:
    """A group may read root's: a key that is mounted in a container reaches another user in no other way, and with a
    group for such users (`fsGroup`) it lies there so for root, too."""
    lent = stat.S_IRGRP if key.st_uid == 0 else 0
    return bool(key.st_mode & (stat.S_IRWXG | stat.S_IRWXO) & ~lent)


def _mark(files: TlsFiles) -> tuple[tuple[int, int, int], ...]:
    found = [os.stat(name) for name in (files.cert, files.key, files.ca)]
    return tuple((each.st_ino, each.st_mtime_ns, each.st_size) for each in found)


def _context(files: TlsFiles, *, calling: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT if calling else ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = calling
    context.verify_mode = ssl.CERT_REQUIRED
    context.sslsocket_class = TlsSocket
    if not calling:
        context.num_tickets = 0  # no connection goes on from another's keys
    try:
        context.load_verify_locations(cafile=files.ca)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"tls_ca {files.ca} holds no certificate: {error}", remedy="a PEM file") from error
    if context.cert_store_stats()["crl"]:
        context.verify_flags |= ssl.VerifyFlags.VERIFY_CRL_CHECK_LEAF
    try:
        context.load_cert_chain(files.cert, files.key, password=lambda: _with_passphrase(files.key))
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"tls_cert {files.cert} and tls_key {files.key} do not go together: {error}",
            remedy="a certificate and its own key, PEM files",
        ) from error
    return context


def _with_passphrase(key: str) -> NoReturn:
    raise ConfigError(f"the key in {key} has a passphrase, and nobody is there to give it", remedy="openssl pkey -in …")


def _check_readable(name: str) -> None:
    try:
        with open(name, "rb") as file:
            file.read(1)
    except OSError as error:
        raise ConfigError(
            f"no certificate or key can be read from {name}: {error.strerror}",
            remedy="PEM files: tls_cert, tls_key, tls_ca",
        ) from error
