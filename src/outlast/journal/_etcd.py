"""A client of etcd's JSON gateway (`/v3`): conditional transactions and ranges, over several endpoints.

Role: carry requests. A member that does not answer in time, has no leader or cannot be reached is left for the next;
what was asked may then have happened or not, so callers ask for what may be done twice. It knows nothing of runs.
One connection at a time, for one thread at a time.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import itertools
import json
import ssl
import threading
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from outlast.errors import ConfigError, EnvironmentFault
from outlast.journal._etcd_tls import CertificateRefused, EtcdTls

__all__ = ["Access", "Etcd", "KeyValue", "Unreachable", "access_of", "check_reachable", "read_places"]

_ONE_TRY_S = 0.6  # for one member, at first: a healthy one answers in milliseconds
_PAUSE_S = 0.05  # when all have been tried
_UNAUTHENTICATED, _DENIED, _INVALID = 16, 7, 3  # gRPC's codes, as the gateway tells them
_OF_USERS = ("auth", "user name")  # in what is said under the last of these codes
_SCHEMES = {"etcd": False, "etcds": True}
ITSELF = "the request itself"  # where the fault is: no member takes it, most often because it is too large
_REACH_S = 10.0  # before anything is started


class Unreachable(OSError):
    """No member answered in time; whether what was asked has been done is not known. `refused`: what one said
    about this host's certificate since any has answered; "" if none did."""

    refused = ""


class KeyValue(NamedTuple):
    """`revision`: of the store, at the key's last change."""

    key: str
    value: bytes
    revision: int


class Access(NamedTuple):
    """Where the members are, and how to be let in."""

    places: tuple[tuple[str, int], ...]
    tls: EtcdTls | None = None
    user: str = ""
    password: str = ""


def read_places(text: str) -> tuple[tuple[tuple[str, int], ...], bool]:
    """`etcd://HOST:PORT,HOST:PORT` (`etcds://`: by TLS): (the members, whether by TLS). ConfigError."""
    if "@" in text:  # it is stored, shown and seen by who lists processes: not even told here
        raise ConfigError(
            "record = '…@…' has a user or a password in the address of etcd",
            remedy="OUTLAST_ETCD_USER and OUTLAST_ETCD_PASSWORD in the environment, and etcd://HOST:PORT",
        )
    scheme, _, rest = text.partition("://")
    places = []
    for part in rest.rstrip("/").split(",") if scheme in _SCHEMES else ():
        host, _, port = part.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            break
        places.append((host.removeprefix("[").removesuffix("]"), int(port)))
    else:
        if places:
            return tuple(places), _SCHEMES[scheme]
    raise ConfigError(
        f"record = {text!r} names no place for the record",
        remedy="sqlite, or etcd://HOST:PORT,HOST:PORT,HOST:PORT (etcds:// for TLS)",
    )


def access_of(record: str, environ: Mapping[str, str]) -> Access:
    """From the run's setting and this host's environment: OUTLAST_ETCD_USER, OUTLAST_ETCD_PASSWORD,
    OUTLAST_ETCD_CA, OUTLAST_ETCD_CERT and OUTLAST_ETCD_KEY (files). ConfigError."""
    places, by_tls = read_places(record)
    said = {key: environ.get(f"OUTLAST_ETCD_{key}", "") for key in ("USER", "PASSWORD", "CA", "CERT", "KEY")}
    if bool(said["USER"]) != bool(said["PASSWORD"]):
        raise ConfigError(
            "of etcd's user and password only one is there", remedy="OUTLAST_ETCD_USER and OUTLAST_ETCD_PASSWORD"
        )
    if not by_tls and (said["CA"] or said["CERT"] or said["KEY"]):
        raise ConfigError("certificates for etcd, and no TLS in its address", remedy="record = 'etcds://…'")
    return Access(places, EtcdTls(said) if by_tls else None, said["USER"], said["PASSWORD"])


def check_reachable(record: str, environ: Mapping[str, str], within_s: float = _REACH_S) -> None:
    """Whether this host gets an answer there, before anything is started. ConfigError, EnvironmentFault."""
    etcd = Etcd(access_of(record, environ))
    try:
        etcd.range("/outlast/", within_s, whole=False)  # one key: there may be a million others
    except Unreachable as error:
        raise EnvironmentFault(
            f"the record at {record} cannot be reached from this host: {error}",
            did=f"nothing was started; it was tried for {within_s:g} s",
            remedy="a certificate that etcd takes: OUTLAST_ETCD_CERT and OUTLAST_ETCD_KEY, files on this host"
            if error.refused
            else "see whether etcd runs there, has a majority and lets this host in (etcds:// for TLS)",
        ) from error
    finally:
        etcd.close()


class Etcd:
    """Asks etcd for conditional transactions and ranges. Raises Unreachable where no member has answered in time; what
    was asked may then have happened all the same."""

    def __init__(self, access: Access) -> None:
        self._access, self._mutex = access, threading.Lock()
        self._at = itertools.cycle(access.places)
        self._place = next(self._at)
        self._connection: http.client.HTTPConnection | None = None
        self._token = ""
        self._fault = self._refusal = ""
        self._try_s: dict[str, float] = {}  # for one member, by what is asked

    def put_if(
        self,
        key: str,
        value: bytes | None,
        puts: Mapping[str, bytes],
        within_s: float,
        unchanged: tuple[str, int] | None = None,
    ) -> bool:
        """Store all of `puts` if `key` has this value (None: is not there) and the key in `unchanged` was changed last
        at this revision (0: is not there); whether it was so. Raises Unreachable."""
        compare: dict[str, Any] = {"key": _text(key), "result": "EQUAL"}
        compare |= {"target": "VALUE", "value": _text(value)} if value is not None else {"target": "VERSION"}
        compares = [compare]
        if unchanged is not None:
            place, at = unchanged
            compares.append({"key": _text(place), "result": "EQUAL", "target": "MOD", "mod_revision": str(at)})
        success = [{"request_put": {"key": _text(k), "value": _text(v)}} for k, v in puts.items()]
        told = self._ask("kv/txn", {"compare": compares, "success": success}, within_s)
        return bool(told.get("succeeded"))

    def range(
        self, prefix: str, within_s: float, *, since: int = 0, limit: int = 0, whole: bool = True
    ) -> tuple[list[KeyValue], int]:
        """All keys that begin with `prefix` (`whole` false: the key of this name) and were changed at revision `since`
        or later, in the order of these changes, and the store's revision. Raises Unreachable."""
        asked: dict[str, Any] = {"key": _text(prefix)}
        if whole:
            asked["range_end"] = _text(prefix[:-1] + chr(ord(prefix[-1]) + 1))
        if since:
            asked["min_mod_revision"] = str(since)
        asked |= {"limit": str(limit), "sort_target": "MOD", "sort_order": "ASCEND"}
        told = self._ask("kv/range", asked, within_s)
        rows = [
            KeyValue(
                _bytes(row["key"]).decode(errors="replace"), _bytes(row.get("value", "")), int(row["mod_revision"])
            )
            for row in told.get("kvs", ())
        ]
        return rows, int(told.get("header", {}).get("revision", 0))

    def first_key(self, since: bytes, before: bytes, within_s: float) -> bytes | None:
        """The first key that is not before the one and is before the other. Raises Unreachable."""
        asked = {"key": _text(since), "range_end": _text(before), "limit": "1", "keys_only": True}
        rows = self._ask("kv/range", asked, within_s).get("kvs", ())
        return _bytes(rows[0]["key"]) if rows else None

    def close(self) -> None:
        self._drop()

    # --- asking --------------------------------------------------------------------------------------------------
    def _ask(self, what: str, body: Mapping[str, Any], within_s: float) -> dict[str, Any]:
        """From member to member until one answers. EnvironmentFault for what no other would answer otherwise.
        When all were asked in vain each is given twice the time, also by whoever asks this next: a large request, or
        members that are slow, may take more than one that is stopped is waited for."""
        until_s, tries = time.monotonic() + within_s, 0
        pause = threading.Event()
        with self._mutex:
            while True:
                begun_s, try_s = time.monotonic(), self._try_s.get(what, _ONE_TRY_S)
                left_s = until_s - begun_s
                if left_s <= 0:
                    raise self._unreachable()
                try:
                    answer = self._once(what, body, min(try_s, left_s))
                except (OSError, http.client.HTTPException, ValueError) as error:
                    self._fault = f"{self._place[0]}:{self._place[1]}: {error or type(error).__name__}"
                    if isinstance(error, CertificateRefused):  # the next try may be broken off without a word
                        self._refusal = str(error)
                    self._drop()
                    self._place, tries = next(self._at), tries + 1
                    if tries % len(self._access.places) == 0:
                        self._try_s[what] = max(_ONE_TRY_S, min(2 * try_s, within_s))
                        pause.wait(min(_PAUSE_S, max(0.0, until_s - time.monotonic())))
                else:
                    self._refusal = ""
                    self._try_s[what] = max(_ONE_TRY_S, 2 * (time.monotonic() - begun_s))
                    return answer

    def _unreachable(self) -> Unreachable:
        why = self._fault or "no time"
        if self._refusal not in why:  # the time was up in the middle of a later try
            why = f"{self._refusal}, and then {why}"
        fault = Unreachable(f"no member of etcd answers: {why}")
        fault.refused = self._refusal
        return fault

    def _once(self, what: str, body: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
        if self._access.user and not self._token:
            said = {"name": self._access.user, "password": self._access.password}
            self._token = str(self._post("auth/authenticate", said, limit_s)["token"])
        return self._post(what, body, limit_s)

    def _post(self, what: str, body: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
        connection = self._connected(limit_s)
        headers = {"Content-Type": "application/json"} | ({"Authorization": self._token} if self._token else {})
        with self._access.tls.telling(connection) if self._access.tls is not None else contextlib.nullcontext():
            connection.request("POST", f"/v3/{what}", json.dumps(body), headers)
            answer = connection.getresponse()
            told = json.loads(answer.read())
        if not isinstance(told, dict):
            raise ValueError("an answer that is not etcd's")
        if answer.status != 200:
            self._refused(what, told)
        return told

    def _refused(self, what: str, told: Mapping[str, Any]) -> None:
        text, code = str(told.get("message") or told.get("error") or told), told.get("code")
        if code == _UNAUTHENTICATED and self._token:  # it is forgotten when members restart
            self._token = ""
            raise ValueError(text)
        if code == _INVALID and not any(word in text for word in _OF_USERS):
            raise EnvironmentFault(
                f"etcd does not take what is asked of it ({what}): {text}",
                where=ITSELF,
                did="nothing was written",
                remedy="see what etcd's --max-request-bytes is (1.5 MiB where nothing is said), and its version",
            )
        if code in (_UNAUTHENTICATED, _DENIED, _INVALID):
            user = f"user {self._access.user!r}" if self._access.user else "no user"
            raise EnvironmentFault(
                f"etcd refuses the run's record ({what}, {user}): {text}",
                did="nothing was written",
                remedy="OUTLAST_ETCD_USER and OUTLAST_ETCD_PASSWORD of a user who may read and write /outlast/",
            )
        raise ValueError(text)  # no leader, a time-out of its own, too many requests: another member, or again

    def _connected(self, limit_s: float) -> http.client.HTTPConnection:
        if self._connection is None:
            host, port = self._place
            tls = self._access.tls
            self._connection = (
                http.client.HTTPSConnection(host, port, timeout=limit_s, context=tls.context())
                if tls is not None
                else http.client.HTTPConnection(host, port, timeout=limit_s)
            )
            try:
                self._connection.connect()
            except ssl.SSLCertVerificationError as error:
                raise _distrusted(host, port, error) from error
        if self._connection.sock is not None:
            self._connection.sock.settimeout(limit_s)
        return self._connection

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _distrusted(host: str, port: int, error: ssl.SSLCertVerificationError) -> EnvironmentFault:
    return EnvironmentFault(
        f"etcd at {host}:{port} shows a certificate that is not trusted: {error.verify_message}",
        did="nothing was told to it",
        remedy="OUTLAST_ETCD_CA: the authority that signed it, for this name",
    )


def _text(data: str | bytes) -> str:
    return base64.b64encode(data.encode() if isinstance(data, str) else data).decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text)
