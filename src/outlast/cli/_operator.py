"""Asking a run for something while it trains: the coordinator is asked over its own port, with the run's secret.

On the machine that started the run nobody has to know where that is: the run's own processes do, and the kernel shows
what they were told to the user who runs them, and to the administrator. From anywhere else it takes the endpoint and
the secret, as `outlast agent` does.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec
import typer

from outlast.cli._asking import holder_of
from outlast.cli._tls_options import tls_given
from outlast.errors import ConfigError, EnvironmentFault, MembershipError, WireRefusal

if TYPE_CHECKING:
    from outlast.runtime.transport.frames import Link

__all__ = ["AT", "JSON", "SECRET", "ask", "ask_here"]

_ANSWER_S = 15.0  # a coordinator that died is replaced by then
_AGAIN_S = 0.1

AT = Annotated[str, typer.Option("--join", help="HOST:PORT of a run on other hosts, or its --record")]
SECRET = Annotated[
    Path | None, typer.Option("--secret-file", help="with --join: the run's secret; else OUTLAST_SECRET")
]
JSON = Annotated[bool, typer.Option("--json", help="The answer as JSON.")]


def ask(
    run: Path, at: str, secret_file: Path | None, asked: Callable[[str], Any], as_json: bool, tls: Sequence[str] = ()
) -> int:
    """Send what `asked(name of the asker)` makes, and print the answer. `tls`: the options about it, for a run on other
    hosts. Raises ConfigError for what is refused."""
    place = _elsewhere(at, secret_file, tls) if at else _here(run)
    answer = _answer(place, asked(f"operator:{secrets.token_hex(4)}"))
    if not answer.accepted:
        raise ConfigError(answer.text, did="nothing was changed", remedy=answer.remedy)
    if as_json:
        told = {"accepted": True, "text": answer.text, "leaving": list(answer.leaving)}
        print(msgspec.json.encode(told).decode())
    else:
        print(f"outlast: {answer.text}")
    return 0


def ask_here(run_dir: Path, asked: Callable[[str], Any]) -> str:
    """Ask a run of this machine; returns what to expect. Raises as `ask` does."""
    answer = _answer(_here(run_dir), asked(f"operator:{secrets.token_hex(4)}"))
    if not answer.accepted:
        raise ConfigError(answer.text, did="nothing was changed", remedy=answer.remedy)
    return str(answer.text)


class _Place(NamedTuple):
    address: tuple[str, int]
    secret: bytes
    run_id: str
    tls: Any  # files, or None


def _elsewhere(at: str, secret_file: Path | None, tls: Sequence[str]) -> _Place:
    from outlast.runtime.host.coordinator_finder import CoordinatorFinder
    from outlast.runtime.host.joined import read_secret

    secret = read_secret(secret_file, os.environ.get("OUTLAST_SECRET"))
    if secret is None:
        raise ConfigError(
            "no secret of the run", remedy="--secret-file FILE, or OUTLAST_SECRET; outlast run says where it is"
        )
    files = tls_given(*(tls or [""] * 4))
    with contextlib.closing(CoordinatorFinder(at, secret, os.environ)) as finder:
        return _Place(finder.within(_ANSWER_S), secret, "", files)


def _here(run: Path) -> _Place:
    """Where the run's coordinator is, from what the launcher told its children."""
    from outlast.config import decoded
    from outlast.observe import find_run
    from outlast.runtime.transport.coordinator_place import CoordinatorPlace
    from outlast.runtime.transport.endpoints import read_host_port

    run_dir = find_run(run).run_dir
    told = _told_children(holder_of(run_dir), run_dir)
    if told is None:
        raise EnvironmentFault(f"{run_dir} is only starting, or ending", remedy="ask again in a moment")
    moves = (run_dir / "coordinator").exists()  # the record is shared, and so the coordinator may be on another host
    first, run_id = read_host_port(told["OUTLAST_COORDINATOR"]), told["OUTLAST_RUN"]
    place = CoordinatorPlace(first, run_dir if moves else None, run_id)
    files = decoded(told["OUTLAST_CONFIG"]).tls
    return _Place(place.now(), bytes.fromhex(told["OUTLAST_SECRET"]), run_id, files)


def _told_children(launcher: int, run_dir: Path) -> dict[str, str] | None:
    """The environment of a process that this launcher has started for this run."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            parent = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[1]
            if int(parent) != launcher:
                continue
            rows = (entry / "environ").read_bytes().split(b"\0")
        except PermissionError as error:
            raise EnvironmentFault(
                f"process {launcher} is another user's", remedy="ask as the user who runs it"
            ) from error
        except (OSError, IndexError):
            continue
        told = dict(row.decode(errors="replace").partition("=")[::2] for row in rows)
        if told.get("OUTLAST_RUN_DIR") == str(run_dir.resolve()) and told.get("OUTLAST_SECRET"):
            return told
    return None


def _answer(place: _Place, message: Any) -> Any:
    from outlast.core.protocol import host_messages as hm
    from outlast.core.protocol import operator_messages as om
    from outlast.runtime.transport.endpoints import shown

    address = place.address
    decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(om.Answered | hm.Turned)
    try:
        link = _line(place, message.asker)
        try:
            link.send(message)
            answer = link.receive(decoder)
        finally:
            link.close()
    except (WireRefusal, ConnectionError) as error:
        if isinstance(error, WireRefusal) and error.remedy:
            told = f"the coordinator at {shown(*address)}: {error.message}"
            raise MembershipError(told, did="nothing was asked", remedy=error.remedy) from error
        raise MembershipError(
            f"the coordinator at {shown(*address)} let go of the connection: {error}",
            did="whether anything was changed is not known",
            remedy=f"{_again(message)}; a run that is over looks like this too",
        ) from error
    except OSError as error:
        raise EnvironmentFault(
            f"no answer from the coordinator at {shown(*address)}: {error}",
            did="whether anything was changed is not known",
            remedy=_again(message),
        ) from error
    if isinstance(answer, hm.Turned):
        raise MembershipError(answer.reason, did="nothing was changed", remedy="ask the run that is there now")
    return answer


def _line(place: _Place, asker: str) -> Link:
    """A connection to the coordinator. A crowd at its port lets go of a caller before anything was asked: it calls
    again, for as long as an answer may take."""
    from outlast.runtime.transport.frames import Link
    from outlast.runtime.transport.tls import tls_of

    tls, until_s, never = tls_of(place.tls), time.monotonic() + _ANSWER_S, threading.Event()
    while True:
        try:
            return Link(place.address, place.secret, "operator", asker, _ANSWER_S, place.run_id, tls)
        except ConnectionError as error:
            if isinstance(error, ConnectionRefusedError) or time.monotonic() >= until_s:
                raise
        never.wait(_AGAIN_S)


def _again(message: Any) -> str:
    """What to do where no answer came: an eviction asked for twice may be of two processes, all else is done once."""
    from outlast.core.protocol import operator_messages as om

    if isinstance(message, om.EvictAsked):
        return "look at outlast status before you ask again, for a second process may go then"
    return "ask again, which does no harm"
