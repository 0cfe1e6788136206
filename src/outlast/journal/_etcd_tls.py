"""TLS to etcd: this host's files for it, and what it means when a member refuses them.

Role: what a new connection is made with. Files that were renewed are read again for the next connection; while they
are half renewed what was read before holds. Keys are read and never told.
"""

from __future__ import annotations

import contextlib
import os
import ssl
from collections.abc import Iterator, Mapping
from http.client import HTTPConnection
from pathlib import Path
from typing import NoReturn

from outlast.errors import ConfigError
from outlast.journal._renewed import RenewedFiles

__all__ = ["CertificateRefused", "EtcdTls"]

_REMEDY = "PEM files: OUTLAST_ETCD_CA, _CERT, _KEY"
_ABOUT_CERTIFICATES = ("CERTIFICATE", "UNKNOWN_CA")  # in alerts
_BROKEN = (ssl.SSLError, ConnectionError)


class CertificateRefused(OSError):
    """A member does not take this host's certificate, or wants one: of fixed wording."""


class EtcdTls:
    """`files`: CA, CERT and KEY, each "" where there is none; without CA the system's authorities. ConfigError."""

    def __init__(self, files: Mapping[str, str]) -> None:
        self._ca, self._cert, self._key = files["CA"], files["CERT"], files["KEY"]
        for name in self._names():
            if not Path(name).is_file():
                raise ConfigError(f"there is no certificate or key {name} for etcd", remedy=_REMEDY)
        if self._key and not self._cert:
            raise ConfigError("a key for etcd, and no certificate", remedy="OUTLAST_ETCD_CERT, too")
        self._mark = self._marked()
        self._made, self._renewed = self._read(), RenewedFiles()

    def context(self) -> ssl.SSLContext:
        """For a connection that is made now."""
        try:
            mark = self._marked()
            if mark != self._mark:
                self._made = self._read()
                self._mark = mark
            self._renewed.taken()
        except (OSError, ConfigError) as error:
            self._renewed.refused(error)
        return self._made

    @contextlib.contextmanager
    def telling(self, connection: HTTPConnection) -> Iterator[None]:
        """Have a member that breaks a connection off over this host's certificate say so. It says why after the
        handshake (TLS 1.3), when something may have been sent in vain. CertificateRefused, and what was raised."""
        try:
            yield
        except _BROKEN as error:
            if not (_of_certificates(error) or _of_certificates(_last_word(connection))):
                raise
            if self._cert:
                raise CertificateRefused("etcd refuses this host's certificate (OUTLAST_ETCD_CERT)") from error
            raise CertificateRefused("etcd wants a certificate of this host (OUTLAST_ETCD_CERT)") from error

    def _names(self) -> list[str]:
        return [name for name in (self._ca, self._cert, self._key) if name]

    def _marked(self) -> list[tuple[int, int, int]]:
        found = map(os.stat, self._names())
        return [(each.st_ino, each.st_mtime_ns, each.st_size) for each in found]

    def _read(self) -> ssl.SSLContext:
        try:
            context = ssl.create_default_context(cafile=self._ca or None)
            context.minimum_version = ssl.TLSVersion.TLSv1_2
            if self._cert:
                context.load_cert_chain(self._cert, self._key or None, password=self._with_passphrase)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"etcd's certificates cannot be used: {error}", remedy=_REMEDY) from error
        return context

    def _with_passphrase(self) -> NoReturn:
        raise ConfigError(
            f"the key in {self._key or self._cert} has a passphrase, and nobody is there to give it",
            remedy="openssl pkey -in …",
        )


def _last_word(connection: HTTPConnection) -> OSError | None:
    """What a member has said before it hung up, where writing has failed first."""
    try:
        if connection.sock is not None:
            connection.sock.recv(1)
    except OSError as error:
        return error
    return None


def _of_certificates(error: OSError | None) -> bool:
    """Whether this is a member's alert about this host's certificate."""
    reason = str(getattr(error, "reason", None) or "").replace(" ", "_").upper()
    return "ALERT" in reason and any(word in reason for word in _ABOUT_CERTIFICATES)
