"""An agent on another host than the coordinator's: it finds the run, proves the run's secret, and offers its slots.

What the replicas need to start (the script, the configuration) the coordinator tells it; the script itself lies at the
same path here, or the working directory does not matter to it. From then on it is an agent like any other
(`agent.py`). No torch.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from outlast.config import RunConfig, TlsFiles, decoded, encoded
from outlast.core.protocol import host_messages as hm
from outlast.errors import ConfigError, EnvironmentFault, MembershipError, WireRefusal
from outlast.journal import check_reachable
from outlast.runtime.host._notices import asking_to_end
from outlast.runtime.host.agent import Agent, host_of
from outlast.runtime.host.coordinator_finder import CoordinatorFinder
from outlast.runtime.host.probes import Probes
from outlast.runtime.transport.coordinator_place import keep_place
from outlast.runtime.transport.endpoints import data_address, shown
from outlast.runtime.transport.frames import HeartbeatReply, Link
from outlast.runtime.transport.tls import tls_of

__all__ = ["JoinOptions", "join_run", "read_secret"]

_TRY_S = 5.0  # for one connection
_PAUSE_S = (0.1, 2.0)  # between two tries: at first, at most
_LEFT = 128 + signal.SIGTERM  # the exit code of a host that was asked to leave
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(hm.Briefing | hm.Turned | HeartbeatReply)


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinOptions:
    """`endpoint`: the coordinator's, or the record of its run, etcd://…; `address`: of this host, "" for the one that
    reaches it; `folder`: for the logs of the replicas here, "" for one under `outlast-runs`; `wait_s`: for the
    coordinator to be there; `probes`: where an engine's are answered, "" for nowhere."""

    endpoint: str
    secret: bytes
    host: str
    address: str = ""
    slots: int = 1
    folder: str = ""
    wait_s: float = 600.0
    probes: str = ""
    tls: TlsFiles | None = None


def read_secret(file: Path | None, text: str | None) -> bytes | None:
    """The run's secret from a file that others cannot read, or from the environment; None if neither is there.
    ConfigError."""
    if file is not None:
        try:
            mode, text = file.stat().st_mode, file.read_text(encoding="ascii")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"no secret can be read from {file}: {error}", remedy="a file with 32 or more hexadecimal digits"
            ) from error
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise ConfigError(f"the secret in {file} can be read by others", remedy=f"chmod 600 {file}")
    if not text:
        return None
    try:
        secret = bytes.fromhex(text.strip())
    except ValueError:
        secret = b""
    if len(secret) < 16:
        where = str(file) if file is not None else "OUTLAST_SECRET"
        raise ConfigError(
            f"what {where} holds is no secret of a run", remedy="32 or more hexadecimal digits: openssl rand -hex 32"
        )
    return secret


def join_run(options: JoinOptions, say: Callable[[str], None]) -> int:
    """Join, and stay until the run ends; the exit code. Raises ConfigError, EnvironmentFault, MembershipError."""
    if not _NAME.fullmatch(options.host):
        raise ConfigError(f"{options.host!r} is no name for a host", remedy="letters, digits, dots and dashes: --host")
    finder = CoordinatorFinder(options.endpoint, options.secret, os.environ)
    ends = asking_to_end()
    for number in ends:  # until it is in the run: a container's first process has no other way to be asked
        signal.signal(number, _leave)
    name, probes = f"{options.host}:{secrets.token_hex(2)}", Probes(options.probes)
    link, peer, address, told = _connected(options, finder, name, say, probes)
    finder.close()
    if not isinstance(told, hm.Briefing):
        raise MembershipError(
            f"the run at {shown(*peer)} does not take this host: {getattr(told, 'reason', told)}",
            did="nothing was started",
            remedy=getattr(told, "remedy", "see the coordinator's log"),
        )
    environ, command = _prepared(options, told, address, peer)
    say(
        f"{options.host} ({address}, {options.slots or 'any number of'} slots) is in run {told.run_id} at "
        f"{shown(*peer)}; logs of its replicas in {environ['OUTLAST_RUN_DIR']}/logs"
    )
    agent = Agent(name, environ, command, link)
    agent.turned = probes.turned
    for number in ends:
        signal.signal(number, lambda *_: agent.ask("asked to leave"))
    return agent.run()


def _leave(*_: object) -> None:
    raise SystemExit(_LEFT)


def _connected(
    options: JoinOptions, finder: CoordinatorFinder, name: str, say: Callable[[str], None], probes: Probes
) -> tuple[Link, tuple[str, int], str, Any]:
    """Once the coordinator is there: with its place, this host's address, and what it says to its offer. A wrong secret
    is not tried again, unless the coordinator may have moved from there."""
    until_s, pause_s, told = time.monotonic() + options.wait_s, _PAUSE_S[0], ""
    pause, tls = threading.Event(), tls_of(options.tls)
    while True:
        probes.turned("it waits for the coordinator")
        at = finder.told
        try:
            peer = finder.now()
            at = shown(*peer)
            link = Link(peer, options.secret, "agent", name, _TRY_S, tls=tls)
            address = data_address(options.address, peer, "--address")
            probes.turned("it waits for the coordinator")
            return link, peer, address, _offer(link, name, options, address)
        except WireRefusal as error:
            reason = error.message
            if not finder.asks:
                raise _unproved(at, reason, error.remedy) from error
        except ConnectionRefusedError:
            reason = "nobody listens there"
        except ConnectionError:  # its door is crowded, or it has just died and is followed by another
            reason = "it let go of the connection"
        except OSError as error:
            reason = error.strerror or str(error)
        if time.monotonic() + pause_s > until_s:
            raise EnvironmentFault(
                f"no coordinator at {at} in {options.wait_s:g} s: {reason}",
                did="nothing was started",
                remedy="start outlast run there with --endpoint and --nnodes, or give --wait more seconds",
            )
        if reason != told:
            say(f"waiting for the coordinator at {at}: {reason}")
            told = reason
        pause.wait(pause_s)
        pause_s = min(_PAUSE_S[1], 2 * pause_s)


def _offer(link: Link, name: str, options: JoinOptions, address: str) -> Any:
    """Offer this host; what the coordinator says to that. OSError if it is there no more."""
    offer = host_of(name, _offered(options, address))
    assert offer is not None
    try:
        link.send(msgspec.structs.replace(offer, sent_s=time.monotonic()))
        return link.receive(_decoder)
    except (OSError, WireRefusal, msgspec.DecodeError) as error:
        link.close()
        raise ConnectionError("no answer to the offer of this host") from error


def _unproved(at: str, reason: str, remedy: str = "") -> MembershipError:
    return MembershipError(
        f"{at}: {reason}",
        did="nothing was started",
        remedy=remedy or "the secret of this run: --secret-file, or OUTLAST_SECRET",
    )


def _offered(options: JoinOptions, address: str) -> dict[str, str]:
    return {
        "OUTLAST_ADDRESS": address,
        "OUTLAST_HOST": options.host,
        "OUTLAST_HOST_SLOTS": str(options.slots),
    }


def _with_own_files(config: RunConfig, tls: TlsFiles | None) -> RunConfig:
    """The run's settings, with where this host keeps its own certificate."""
    files = tls or TlsFiles("", "", "")
    return msgspec.structs.replace(config, **{f"tls_{name}": value for name, value in files._asdict().items()})


def _prepared(
    options: JoinOptions, told: hm.Briefing, address: str, peer: tuple[str, int]
) -> tuple[dict[str, str], list[str]]:
    """The environment and the command of replicas here."""
    folder = Path(options.folder or f"outlast-runs/{told.run_id}-{options.host}").resolve()
    try:
        (folder / "logs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EnvironmentFault(
            f"cannot make {folder}: {error.strerror}", remedy="give --run-dir a directory that can be written"
        ) from error
    if Path(told.folder).is_dir():
        os.chdir(told.folder)
    config = _with_own_files(decoded(told.config), options.tls)
    record = config.record
    if record != "sqlite":
        check_reachable(record, os.environ)
        keep_place(folder, shown(*peer), told.epoch, told.run_id)  # until this host's heir knows better
    script = told.command[1]
    if script != "-m" and not Path(script).is_file():
        raise EnvironmentFault(
            f"the run's script {script} is not here, seen from {Path.cwd()}",
            did="nothing was started",
            remedy=f"put it where the run was started ({told.folder}), or on a file system that all hosts share",
        )
    environ = {
        **{key: value for key, value in os.environ.items() if key != "OUTLAST_AGENT_OF"}, **_offered(options, address),
        "OUTLAST_RUN": told.run_id, "OUTLAST_RUN_DIR": str(folder), "OUTLAST_COORDINATOR": shown(*peer),
        "OUTLAST_SECRET": options.secret.hex(), "OUTLAST_CONFIG": encoded(config), "PYTHONHASHSEED": told.hash_seed,
        "OUTLAST_COMMAND": json.dumps(told.command), "OUTLAST_FOLDER": told.folder,
    }  # fmt: skip
    return environ, [sys.executable, *told.command[1:]]
