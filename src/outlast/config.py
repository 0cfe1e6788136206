"""The run's configuration and the origin of each value: command line > environment > file > default.

Role: one frozen record of everything a user can set for a run; unknown keys are errors that suggest the right one.
It reads the TOML file and the environment it is given, nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_type_hints

import msgspec

from outlast.config_checks import check_leases, check_one_width, check_vacancies
from outlast.errors import ConfigError, nearest

__all__ = ["Resolved", "RunConfig", "TlsFiles", "anchored", "decoded", "encoded", "in_json", "resolve"]


class TlsFiles(NamedTuple):
    """Where a host's certificate, its key and its authorities are, and the name that all certificates bear or ""."""

    cert: str
    key: str
    ca: str
    name: str = ""

    @classmethod
    def of(cls, said: Mapping[str, str]) -> TlsFiles | None:
        """None where nothing is said. ConfigError where one thing is said and another is missing."""
        found = cls(**{name: said.get(name, "") for name in cls._fields})
        missing = [f"tls_{name}" for name in ("cert", "key", "ca") if not getattr(found, name)]
        if not any(found):
            return None
        if missing:
            raise ConfigError(
                f"TLS is asked for, and {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not given",
                did="nothing is ever sent unencrypted instead",
                remedy="tls_cert, tls_key and tls_ca (--tls-cert FILE …, OUTLAST_TLS_CERT …), or none of them",
            )
        return found


class RunConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything a user can set for `outlast run`. In TOML: the table `[run]`; in the environment: `OUTLAST_<KEY>`."""

    replicas: int = 1
    """Full copies of the training state, one process each, or `ranks` of them."""
    ranks: int = 1
    """Processes of a replica, over which its state is spread (`run.mesh()`: FSDP2, tp, pipelines): 1, 2, 4 or 8."""
    spares: int | Literal["auto"] = 0
    """Replicas kept caught up beside the run, owning no microbatch. `auto`: none at first, then as many as the deaths
    so far and the time until a place is filled again ask for, within the hosts' slots."""
    agents: int = 1
    """Supervising processes on this machine; replicas are dealt to them in turn."""
    endpoint: str = ""
    """For a run on several hosts: the address and port of this machine, `HOST:PORT`, that the others reach it at. The
    coordinator listens there, and `outlast agent --join HOST:PORT` brings the other hosts in."""
    nnodes: str = "1"
    """Hosts of the run, `MIN` or `MIN:MAX`, this one among them: replicas are started once MIN are there, and beyond
    MAX none is taken."""
    slots: int = 0
    """Replicas that may run on this host; 0 is any number. Every agent that joins says its own."""
    tls_cert: str = ""
    """For TLS between hosts: this host's certificate, a PEM file, with those that lie between it and the authority.
    `tls_cert`, `tls_key` and `tls_ca` go together, and with `endpoint`; each host that joins names its own."""
    tls_key: str = ""
    """The key of `tls_cert`, a PEM file that nobody else can read, without a passphrase."""
    tls_ca: str = ""
    """The authorities that the other hosts' certificates are signed by, and their lists of revoked ones, a PEM file."""
    tls_name: str = ""
    """The name that every host's certificate has to bear, as a DNS name among its alternative ones. Empty: each has to
    be for the address that its host is called at."""
    record: str = "sqlite"
    """Where the coordinator's record is kept: `sqlite`, on the host that starts the run; or `etcd://HOST:PORT,…`, the
    members of an etcd (`etcds://`: by TLS), so that any host that has joined may go on with it."""
    record_lease_s: float = 1.0
    """With the record in etcd: a coordinator that has given no sign there for this long may be followed by another."""
    exchange: Literal["auto", "shm", "c10d", "hosts"] = "auto"
    """How gradients travel: `shm`, shared memory inside a host; `c10d` (Gloo, NCCL); `hosts`, in two levels: memory
    inside a host, c10d between hosts, one sum a host. `auto`: shm, or hosts where the run spans several. GPUs, robust
    rules, audits and replicas of several ranks take c10d in place of hosts."""
    lease_s: float = 600.0
    """A view that cannot hear its coordinator stops committing after this long. `inf` leaves it to a person."""
    heartbeat_s: float = 1.0
    """Period of the heartbeats between members, agents and the coordinator."""
    ack_s: float = 5.0
    """A member that does not acknowledge leaving a view within this long stays out of the next one."""
    outside_s: float = 1800.0
    """How long the script's own code may be silent before it counts as hung, in the loop's body or before `protect`; so
    may a joiner (`outlast.pause()` extends it)."""
    stall_floor_s: float = 0.5
    """No learned deadline is ever below this."""
    formation_s: float = 30.0
    """A view that has not formed by then is reported, and its silent members are examined."""
    host_silence_s: float = 5.0
    """A host of which nothing is heard for this long is given up, although nobody waits for it; one that others wait
    for is given up by a learned deadline, often within `stall_floor_s`."""
    speed_window_s: float = 10.0
    """Work follows speed: who computes more slowly for two times so long gets fewer microbatches, and is named. 0: all
    get as many."""
    group_timeout_s: float = 60.0
    """c10d's own timeout; met only on a silent network cut."""
    max_restarts: int = 16
    """Replacements of dead replicas over the whole run; beyond that it goes on shrinking."""
    on_vacancy: Literal["shrink", "wait", "stop", "auto"] = "shrink"
    """What to do where replicas are lost and no spare is there: go on with fewer, wait for others, save and stop, or
    (`auto`) what is worth most by what this run has seen of replacements."""
    min_replicas: int = 1
    """Fewer never begin or go on: they wait for others for `vacancy_wait_s`, then the run saves and stops."""
    vacancy_wait_s: float = 600.0
    """Waits for lost replicas end then: those left go on, or the run stops. Each coordinator counts its waits anew."""
    price: float = 0.0
    """For `on_vacancy = auto`: what a second of the run costs, of what one with all its replicas is worth. With half of
    them left a price above 0.5 makes it stop, unless others are expected soon."""
    restart_backoff_s: float = 1.0
    """Delay before a replacement starts, doubled each time the same slot dies within a minute, at most 60 s."""
    start_s: float = 600.0
    """How long to wait for the first replica to be ready before the run is given up; others may be late, and join."""
    threads: int = 1
    """Intra-op threads of each replica; part of the numerics signature. 0 leaves torch's default."""
    preload: bool = True
    """Fork replicas from a process that has loaded torch. `false` starts each by itself: for a script that sets what
    torch reads from the environment when it is loaded."""
    bitwise: bool = True
    """Refuse members whose numerics differ. `false` admits them, and every verdict then says so."""
    guards: Literal["script", "default", "full", "off"] = "script"
    """What is watched while training: what the script says, or for the whole run `default` (numbers that are not
    finite, equal parameters), `full` (also spikes and collapse, with a state to go back to) or `off`."""
    audit: float | str = "script"
    """Share of microbatches that a second replica computes too, from 0 to 1; `auto` lets outlast choose, `script` is
    what the script says."""
    port: int = 0
    """The coordinator's port on loopback; 0 takes a free one."""
    aggregation: str = "mean"
    """How rows become the step's gradient: `mean`, or a robust rule (`outlast rules` lists them)."""
    f: int = 0
    """How many rows may lie; the rule's condition on it is checked when the run starts."""
    pre: str = ""
    """Steps in front of the rule, e.g. `nnm`, or `clip,nnm`."""
    rows: int = 0
    """Fixed groups of microbatches that a rule sees; 0 is one a replica."""
    row_momentum: float = 0.0
    """Momentum kept for each row in front of the rule; 0 keeps none."""
    check_reducers: float = 0.0
    """Share of the reduced slices that a second member computes again before they are applied."""
    tolerated: int = -1
    """Replicas (or hosts) that may lie in any view; -1 is as many as the full membership allows."""
    on_shortfall: Literal["wait", "stop", "lower"] = "wait"
    """What to do in a view that tolerates fewer: wait for more replicas, stop, or go on with as many, be it none."""
    fault_domain: Literal["replica", "host"] = "replica"
    """What lies together: each replica for itself, or all replicas under one agent."""
    checkpoint_dir: str = ""
    """Where to keep checkpoints: a directory or a URL (`s3://`, `gs://`, `az://`, `file://`). Empty: where the script
    says, or nowhere."""
    checkpoint_every: int = 0
    """Steps between two saves; 0 lets outlast choose from what fails and what a save costs."""
    checkpoint_keep: int = 3
    """How many generations to keep (and as many certified ones)."""
    checkpoint_drain_to: str = ""
    """A farther place, usually an object store, that every generation is copied to in the background."""
    checkpoint_min_s: float = 10.0
    """A chosen interval is never shorter than this."""
    resume: str = "auto"
    """What a new run begins with: `auto` is the newest whole generation in `checkpoint_dir`, if there is one; `never`
    is step 0; anything else is a directory or URL to load from. A run that lost all replicas resumes by itself."""
    init_from: str = ""
    """Weights to begin step 0 with, by name, where there is nothing to resume: a checkpoint directory or URL (`@N`: its
    generation N), or a safetensors file or directory. Optimizers and schedules begin anew."""
    init_strict: bool = True
    """Every name of the model must be there, and no other. `false` takes those that fit, and says which do not."""
    device_test: bool = False
    """Each replica asks its device what the answers are known to before it joins, for about a second; one that is wrong
    does not join."""
    readings_s: float = 30.0
    """How often each agent reads its host's sensors, the kernel's log and the cloud's notices; 0 never does."""
    readings_from: str = ""
    """Play back readings that were kept (RUN/readings, or one file) in place of this host's own: for rehearsals."""
    on_alarm: Literal["act", "tell"] = "act"
    """What to do about an alarm of a host: what is expected to cost least (move its work to others between two steps,
    save, or nothing), or only say what that would have been."""
    fabric: str = ""
    """A file that says which links lie between the hosts (`outlast health links`): a bad link is then named as such.
    Without it each host is known by its own link."""
    stop_save_s: float = 20.0
    """How long a run that is asked to stop may take to save first; 0 stops at once."""

    @property
    def num_spares(self) -> int:
        """Spares that the run begins with."""
        return 0 if self.spares == "auto" else self.spares

    @property
    def hosts(self) -> tuple[int, int]:
        """(fewest to begin with, most). Raises ConfigError where `nnodes` says neither."""
        low, colon, high = self.nnodes.partition(":")
        numbers = [int(part) if part.isdigit() else 0 for part in ((low, high) if colon else (low, low))]
        if not 0 < numbers[0] <= numbers[1]:
            raise ConfigError(
                f"nnodes = {self.nnodes!r} is no number of hosts", remedy="MIN or MIN:MAX, such as 3 or 2:4"
            )
        return numbers[0], numbers[1]

    @property
    def tls(self) -> TlsFiles | None:
        """None where connections between hosts are not encrypted. Raises ConfigError where a file is missing."""
        return TlsFiles.of({name: getattr(self, f"tls_{name}") for name in TlsFiles._fields})

    @property
    def num_agents(self) -> int:
        """Agents that have to be there before the first replicas are started, on this host and on others."""
        return self._agents_of(self.hosts[0]) if self.endpoint else self.agents

    @property
    def most_agents(self) -> int:
        """Agents that the run takes, on this host and on others."""
        return self._agents_of(self.hosts[1]) if self.endpoint else self.agents

    def _agents_of(self, hosts: int) -> int:
        return self.agents + hosts - min(1, self.agents)


_CHECKS: dict[str, tuple[float, float]] = {
    "readings_s": (0, 86400),
    "replicas": (1, 100_000), "ranks": (1, 8), "spares": (0, 100_000), "agents": (0, 1024), "slots": (0, 100_000),
    "lease_s": (1, float("inf")), "record_lease_s": (0.3, 600),
    "heartbeat_s": (0.05, 60), "ack_s": (0.05, 600), "outside_s": (0.1, float("inf")), "stall_floor_s": (0.05, 3600),
    "formation_s": (0.5, 3600), "group_timeout_s": (1, 86400), "max_restarts": (0, 1_000_000),
    "min_replicas": (1, 100_000), "vacancy_wait_s": (0, float("inf")), "price": (0, 1_000_000),
    "host_silence_s": (0.5, 3600), "speed_window_s": (0, 3600),
    "restart_backoff_s": (0, 3600), "start_s": (1, 86400), "threads": (0, 1024), "port": (0, 65535),
    "f": (0, 100_000), "rows": (0, 100_000), "row_momentum": (0, 0.999999), "check_reducers": (0, 1),
    "tolerated": (-1, 100_000),
    "checkpoint_every": (0, 1 << 40), "checkpoint_keep": (1, 1_000_000), "checkpoint_min_s": (0.05, 86400),
    "stop_save_s": (0, 3600),
}  # fmt: skip


_INTERNAL = ("OUTLAST_AGENT", "OUTLAST_PARENT")  # what a rank is told, and near to a setting's name


def in_json(value: Any) -> Any:
    """A setting as JSON has it, which lacks infinity: a word that TOML and `decoded` read stands for it."""
    return "inf" if value == math.inf else value


def anchored(config: RunConfig) -> RunConfig:
    """Return the configuration with the places of its checkpoints made absolute, as seen from the working directory: a
    script may change that before it reads them."""
    named = (
        "checkpoint_dir", "checkpoint_drain_to", "init_from", "readings_from", "fabric", "tls_cert", "tls_key", "tls_ca"
    )  # fmt: skip
    places = {key: getattr(config, key) for key in named}
    if config.resume not in ("auto", "never"):
        places["resume"] = config.resume
    changed = {key: str(Path.cwd() / place) for key, place in places.items() if place and "://" not in place}
    return msgspec.structs.replace(config, **changed)


def encoded(config: RunConfig) -> str:
    """As JSON, for another process."""
    values = msgspec.structs.asdict(config)
    return msgspec.json.encode({key: in_json(value) for key, value in values.items()}).decode()


def decoded(text: str) -> RunConfig:
    """What `encoded` wrote. Raises msgspec.DecodeError."""
    return msgspec.json.decode(text, type=RunConfig, strict=False)


class Resolved(msgspec.Struct, frozen=True, kw_only=True):
    """A configuration with, for each key, where its value came from."""

    config: RunConfig
    origins: dict[str, str]


def resolve(*, cli: Mapping[str, Any], environ: Mapping[str, str], file: Path | None = None) -> Resolved:
    """Merge the layers. `cli` values of None count as not given.

    Raises ConfigError for an unreadable file, an unknown key, a value of the wrong type or out of range.
    """
    values = _from_file(file) if file else {}
    origins = dict.fromkeys(RunConfig.__struct_fields__, "default") | dict.fromkeys(values, f"file {file}")
    _refuse_misspelt(environ)
    for field in RunConfig.__struct_fields__:
        name = f"OUTLAST_{field.upper()}"
        if name in environ:
            values[field], origins[field] = environ[name], f"environment {name}"
    for key, value in cli.items():
        if value is not None:
            values[key], origins[key] = value, f"command line --{key.replace('_', '-')}"
    for key in values:
        if key not in origins:
            raise _unknown(key, str(file) if file else "the configuration")
    check_one_width(values.get("ranks"), origins["ranks"])
    try:
        config = msgspec.convert(values, RunConfig, strict=False)
    except msgspec.ValidationError as error:
        raise _invalid(error, values, origins) from error
    for key, (low, high) in _CHECKS.items():
        value = config.num_spares if key == "spares" else getattr(config, key)
        if not low <= value <= high:
            raise ConfigError(
                f"{key} = {value} (from {origins[key]}) is out of range", remedy=f"give a value from {low} to {high}"
            )
    _check_hosts(config)
    check_vacancies(config.replicas, config.min_replicas)
    return Resolved(config=config, origins=origins)


def _check_hosts(config: RunConfig) -> None:
    """What several hosts need, and what does not go with them."""
    most = config.hosts[1]
    if config.endpoint and config.exchange == "shm":
        raise ConfigError("exchange = 'shm' does not reach other hosts", remedy="leave it out, or take hosts or c10d")
    if config.endpoint and config.port:
        raise ConfigError("port and endpoint both say where to listen", remedy="give the port in --endpoint HOST:PORT")
    if not config.endpoint and most > 1:
        raise ConfigError(
            f"{config.nnodes} hosts, and no address at which the others reach this one",
            remedy="--endpoint HOST:PORT, an address of this machine and a free port",
        )
    if "@" in config.record:  # not even told here: the rest may be a password
        raise ConfigError(
            "record has a user or a password in its address",
            remedy="OUTLAST_ETCD_USER and OUTLAST_ETCD_PASSWORD in the environment, and etcd://HOST:PORT",
        )
    if config.record != "sqlite" and not config.record.startswith(("etcd://", "etcds://")):
        raise ConfigError(
            f"record = {config.record!r} is no place for a record",
            remedy="sqlite, or etcd://HOST:PORT,HOST:PORT,HOST:PORT (etcds:// for TLS)",
        )
    check_leases(config.record, config.lease_s, config.record_lease_s, config.heartbeat_s)
    if not config.endpoint and config.record != "sqlite":
        raise ConfigError(
            f"record = {config.record!r}, and no other hosts that could go on with it",
            remedy="leave it out, or --endpoint HOST:PORT and --nnodes",
        )
    if config.tls and not config.endpoint:
        raise ConfigError(
            "certificates for TLS, and no other hosts: nothing leaves this machine",
            remedy="leave tls_cert, tls_key and tls_ca out (unset OUTLAST_TLS_CERT …), or --endpoint HOST:PORT",
        )
    if not config.endpoint and not config.agents:
        raise ConfigError(
            "agents = 0 starts no replica on this host", remedy="at least 1, or --endpoint and other hosts"
        )


def _invalid(error: msgspec.ValidationError, values: Mapping[str, Any], origins: Mapping[str, str]) -> ConfigError:
    """msgspec says what is wrong and at which key; the reader also needs the value, who gave it, and what would do."""
    what, _, key = str(error).partition(" - at `$.")
    key = key.rstrip("`").partition("[")[0]
    if key not in origins:
        return ConfigError(f"the run's configuration is invalid: {error}", remedy="outlast run --help has the settings")
    wanted = get_args(get_type_hints(RunConfig)[key])
    choices = [choice for choice in wanted if isinstance(choice, str)]
    words = [str(word) for kind in wanted for word in get_args(kind)]
    other = f"a number, or {words[0]}" if words else f"the default is {getattr(RunConfig(), key)!r}"
    remedy = nearest(values[key], choices, None if choices else other, both=True)
    return ConfigError(f"{key} = {values[key]!r} (from {origins[key]}) is invalid: {what}", remedy=remedy)


def _unknown(key: str, where: str) -> ConfigError:
    keys = RunConfig.__struct_fields__
    remedy = nearest(key, keys, "the keys are " + ", ".join(keys))
    return ConfigError(f"unknown key {key!r} in {where}", remedy=remedy)


def _refuse_misspelt(environ: Mapping[str, str]) -> None:
    """Variables that look like a setting's and are none's. Others may use the prefix for their own."""
    names = [f"OUTLAST_{key.upper()}" for key in RunConfig.__struct_fields__]
    for name in sorted(name for name in environ if name.startswith("OUTLAST_") and name not in (*names, *_INTERNAL)):
        if remedy := nearest(name, names, "", cutoff=0.85):
            raise ConfigError(f"{name} in the environment sets nothing", remedy=remedy)


def _from_file(file: Path) -> dict[str, Any]:
    import tomllib  # most runs have no file, and a look at a host or a run has none

    try:
        table = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}", remedy="give a readable TOML file") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not TOML: {error}", remedy="see outlast config show for the keys") from error
    for name in table:
        if name != "run":
            raise ConfigError(f"unknown table [{name}] in {file}", remedy="the run's settings stand under [run]")
    run = table.get("run", {})
    if not isinstance(run, dict):
        raise ConfigError(f"run in {file} is no table", remedy="the run's settings stand in one table, under [run]")
    for key in run:
        if key not in RunConfig.__struct_fields__:
            raise _unknown(key, str(file))
    return dict(run)
