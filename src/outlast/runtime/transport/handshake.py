"""Proves that both ends of a new connection know the run's secret, before either believes or decodes anything.

Role: the one handshake of all sockets of a run, as two machines that take and give bytes and touch no socket. Three
messages, of bounded size: the caller knocks (a random number, its claim, a proof that it knows the secret), the
listener replies (a random number of its own, a proof over both), the caller proves itself over both. A recorded
handshake is worthless, since the listener's number is fresh; a reflected one too, since each message is signed under
its own word and the listener's name. A knock alone can be replayed and is therefore only worth a place in the queue.

Over TLS each proof is also of the connection that it is made on (`bound`, what TLS has given to its two ends alone):
who has a certificate and sits in between cannot pass the proofs on from one connection to another.

The claim (role, name, what the connection is for) is decoded after the last proof only. Refusals have fixed texts:
they are counted by them, and strangers must not choose what is stored.
"""

from __future__ import annotations

import hmac
import secrets
from typing import Literal

import msgspec

from outlast.errors import WireRefusal
from outlast.runtime.transport.seal import Keys

__all__ = [
    "FOLLOWED", "OTHER_RUN", "TLS_WANTED", "WRONG_NAME", "Caller", "PeerClaim", "Doorkeeper", "Role", "WRONG_SECRET",
    "no_entry",
]  # fmt: skip

OTHER_RUN = "a process of another run under the same secret"
FOLLOWED = "a coordinator that says it has taken over, and has been followed"
"""Why somebody is refused who has proved that he knows the secret."""

TLS_WANTED, WRONG_NAME, WRONG_SECRET = 1, 2, 3
"""Why a listener lets somebody not in, as it says: see `no_entry`. Who is pushed out by a crowd hears nothing."""

_NO_ENTRY = {
    TLS_WANTED: ("its run has TLS, and this end has no certificates", "tls_cert, tls_key and tls_ca of this host"),
    WRONG_NAME: ("TLS: this host's certificate is refused there: it does not bear their tls_name", "one that bears it"),
    WRONG_SECRET: ("it does not know this secret", "the secret of this run: --secret-file, or OUTLAST_SECRET"),
}  # fmt: skip
_MAGIC = b"outlast3"
_NONCE, _MAC = 16, 32
_CLAIM = 256  # bytes of an encoded claim, at most
_HEAD = len(_MAGIC) + _NONCE + 2  # of a knock: the claim's length is its end
_REPLY = len(_MAGIC) + _NONCE + _MAC

Role = Literal["member", "agent", "launcher", "operator", "mesh", "feed", "rank", "coordinator"]


class PeerClaim(msgspec.Struct, frozen=True, array_like=True):
    """Who calls and why. `role`: to the coordinator "member", "agent", "launcher" or "operator"; to a member "mesh",
    for the view `number`, or "feed", for the attempt to serve `number`, or "coordinator", which has taken over in epoch
    `number[0]` and listens at `name`; to the lead of a replica "rank", number `number[0]`. `run`: the run that it
    belongs to, for one secret may serve several; "" of who has not been told."""

    role: Role
    name: str
    number: tuple[int, int] = (0, 0)
    run: str = ""


def _sign(secret: bytes, word: bytes, listener: str, *parts: bytes) -> bytes:
    """An HMAC over the parts, each with its length, so that no two lists of parts give the same bytes."""
    named = (_MAGIC, word, listener.encode(), *parts)
    return hmac.digest(secret, b"".join(len(part).to_bytes(4, "big") + part for part in named), "sha256")


def _keys(secret: bytes, listener: str, *both: bytes) -> tuple[bytes, bytes]:
    """For what the caller sends on this connection, and for what the listener does."""
    return _sign(secret, b"from the caller", listener, *both), _sign(secret, b"from the listener", listener, *both)


def _named(listener: str, bound: bytes) -> str:
    return f"{listener} over {bound.hex()}" if bound else listener


def no_entry(why: int) -> bytes:
    """Make the reply that is no proof, and says why there is none. Nobody has signed it: it is a hint, for people."""
    return _MAGIC + bytes(_NONCE) + bytes([why]) * _MAC


class Caller:
    """The end that connects. Send `knock`, read `wanted` bytes, send what `prove` makes of them; then there are
    `keys`."""

    wanted = _REPLY

    def __init__(self, secret: bytes, listener: str, claim: PeerClaim, bound: bytes = b"") -> None:
        self.listener = listener
        self._secret, self._listener = secret, _named(listener, bound)
        self._claim, self._nonce = msgspec.msgpack.encode(claim), secrets.token_bytes(_NONCE)
        if len(self._claim) > _CLAIM:
            raise ValueError(f"the name {claim.name!r} is too long")
        said = _MAGIC + self._nonce + len(self._claim).to_bytes(2, "big") + self._claim
        self.knock = said + _sign(secret, b"knock", self._listener, self._nonce, self._claim)
        self.keys: Keys = (b"", b"")

    def prove(self, reply: bytes) -> bytes:
        """Check the listener's proof and make mine. WireRefusal if it does not know the secret."""
        nonce, proof = reply[len(_MAGIC) : -_MAC], reply[-_MAC:]
        if not reply.startswith(_MAGIC):
            raise WireRefusal(f"the other end is not {self.listener} of an outlast run of this version")
        if nonce == bytes(_NONCE) and proof[0] in _NO_ENTRY:
            reason, remedy = _NO_ENTRY[proof[0]]
            raise WireRefusal(reason, remedy=remedy)
        both = self._nonce, nonce, self._claim
        if not hmac.compare_digest(proof, _sign(self._secret, b"listener", self._listener, *both)):
            raise WireRefusal(f"{self.listener} does not know this run's secret")
        self.keys = _keys(self._secret, self._listener, *both)
        return _sign(self._secret, b"caller", self._listener, *both)


class Doorkeeper:
    """The end that listens. Read at most `most` bytes (what follows the proof is not ours), let it `hear` them and send
    what it returns, until `claim` is there, and `keys`. `knocked`: whoever made the knock knew the secret. `last_word`:
    what to send when it refuses."""

    def __init__(self, secret: bytes, listener: str, bound: bytes = b"") -> None:
        self._secret, self._listener = secret, _named(listener, bound)
        self._nonce = secrets.token_bytes(_NONCE)
        self._data = self._theirs = self._claim = b""
        self.most = _HEAD + _CLAIM + _MAC
        self.knocked = False
        self.last_word = b""  # to who is refused
        self.claim: PeerClaim | None = None
        self.keys: Keys = (b"", b"")

    def hear(self, data: bytes) -> bytes:
        """What came next; returns what to send. WireRefusal if it proves nothing."""
        self._data += data
        self.most -= len(data)
        if not self.knocked:
            return self._knock()
        if not self.most:
            self._prove()
        return b""

    def _knock(self) -> bytes:
        data = self._data
        length = int.from_bytes(data[_HEAD - 2 : _HEAD], "big") if len(data) >= _HEAD else 0
        size = _HEAD + length + _MAC
        if data[: len(_MAGIC)] != _MAGIC[: len(data)] or length > _CLAIM or len(data) > size:
            raise WireRefusal("bytes that are no greeting of an outlast run of this version")
        if len(data) < size:
            return b""
        self._theirs, self._claim = data[len(_MAGIC) : _HEAD - 2], data[_HEAD:-_MAC]
        if not self._signed(b"knock", data[-_MAC:], self._theirs, self._claim):
            self.last_word = no_entry(WRONG_SECRET)
            raise WireRefusal("a wrongly signed greeting: another run's secret, or another listener's")
        self.knocked, self.most, self._data = True, _MAC, b""
        both = self._theirs, self._nonce, self._claim
        return _MAGIC + self._nonce + _sign(self._secret, b"listener", self._listener, *both)

    def _prove(self) -> None:
        if not self._signed(b"caller", self._data, self._theirs, self._nonce, self._claim):
            raise WireRefusal("a wrongly signed proof: another run's secret, or a replay")
        theirs, mine = _keys(self._secret, self._listener, self._theirs, self._nonce, self._claim)
        self.keys = mine, theirs
        try:
            self.claim = msgspec.msgpack.decode(self._claim, type=PeerClaim)
        except msgspec.DecodeError as error:
            raise WireRefusal("a role that does not exist") from error

    def _signed(self, word: bytes, proof: bytes, *parts: bytes) -> bool:
        return hmac.compare_digest(proof, _sign(self._secret, word, self._listener, *parts))
