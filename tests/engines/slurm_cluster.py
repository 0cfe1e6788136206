"""Slurm's own daemons on hosts that are network namespaces: munged and slurmctld on the first, a slurmd on each.

Everything that they write is in one folder, everything that runs is a child of this process and ends with it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from outlast.prove.host_namespaces import HostNetwork, unavailable

_TOOLS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "srun", "squeue", "sinfo")
_PATIENCE_S = 85.0
_CONF = """\
ClusterName=outlast
SlurmctldHost={here}({head})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={base}/munge/socket,cred_expire=5
CryptoType=crypto/munge
StateSaveLocation={base}/state
SlurmdSpoolDir={base}/spool-%n
SlurmctldPidFile={base}/slurmctld.pid
SlurmdPidFile={base}/slurmd-%n.pid
SlurmctldLogFile={base}/slurmctld.log
SlurmdLogFile={base}/slurmd-%n.log
SlurmctldPort=26817
SlurmdPort=26818
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2,sched_min_interval=100000,batch_sched_delay=0,requeue_delay=1
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=1
SlurmdTimeout={silent_s}
SlurmctldTimeout=30
InactiveLimit=0
KillWait={kill_wait_s}
MinJobAge=300
Waittime=0
MessageTimeout=5
UnkillableStepTimeout=60
NodeName=n[0-{last}] CPUs=8 RealMemory=1000 State=UNKNOWN
PartitionName=low Nodes=ALL Default=YES State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime={grace_s}
PartitionName=high Nodes=ALL State=UP PriorityTier=10 PreemptMode=OFF
"""


def missing() -> str:
    """Why there can be no cluster here; "" if there can."""
    absent = [tool for tool in _TOOLS if shutil.which(tool) is None]
    return f"{', '.join(absent)} missing: make cluster-env installs it" if absent else unavailable()


class SlurmCluster:
    """`num` nodes, n0 upwards. A context manager."""

    def __init__(self, num: int, base: Path, *, silent_s: int = 10, kill_wait_s: int = 30, grace_s: int = 30) -> None:
        self.base, self.num = base / "slurm", num
        self.base.mkdir(mode=0o755)
        self.net = HostNetwork(num, [base])
        self.nodes: list[subprocess.Popen[bytes]] = []
        last = num - 1
        conf = _CONF.format(
            here=socket.gethostname(),
            head=self.net.address(0),
            base=self.base,
            last=last,
            silent_s=silent_s,
            kill_wait_s=kill_wait_s,
            grace_s=grace_s,
        )
        (self.base / "slurm.conf").write_text(conf)
        (self.base / "cgroup.conf").write_text("CgroupAutomount=no\nCgroupPlugin=cgroup/v1\n")
        known = "".join(f"{self.net.address(host)} n{host}\n" for host in range(num))
        for host in range(num):
            own = f"127.0.0.1 localhost\n{known}{self.net.address(host)} {socket.gethostname()}\n"
            (self.base / f"hosts-{host}").write_text(own)

    def __enter__(self) -> SlurmCluster:
        self.net.__enter__()
        try:
            self._start()
        except BaseException:
            self.net.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.net.__exit__()

    @property
    def environ(self) -> dict[str, str]:
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("OUTLAST_", "SLURM_"))}
        return clean | {"SLURM_CONF": str(self.base / "slurm.conf")}

    def _start(self) -> None:
        munge = self.base / "munge"
        munge.mkdir(mode=0o755)
        (munge / "key").write_bytes(secrets.token_bytes(128))
        (munge / "key").chmod(0o600)
        for host in range(self.num):
            own = str(self.base / f"hosts-{host}")
            assert self.net.start(host, ["mount", "--bind", own, "/etc/hosts"]).wait() == 0
        words = [f"--{key}={munge / value}" for key, value in _MUNGE.items()]
        self.munged = self.daemon(0, "munged", ["munged", "--foreground", "--force", *words])
        self.until("munged answers", lambda: (munge / "socket").exists())
        (self.base / "state").mkdir()
        self.daemon(0, "slurmctld", ["slurmctld", "-D"])
        self.until("slurmctld answers", lambda: self.run("scontrol", "ping", check=False).returncode == 0)
        self.nodes = [self.node(host) for host in range(self.num)]
        self.until("all nodes are idle", lambda: set(self.states()) == {"idle"})

    def node(self, host: int) -> subprocess.Popen[bytes]:
        """Start the daemon of this node."""
        return self.daemon(host, f"slurmd-n{host}", ["slurmd", "-D", "-N", f"n{host}"])

    def daemon(self, host: int, name: str, command: list[str]) -> subprocess.Popen[bytes]:
        with (self.base / f"{name}.out").open("ab") as out:
            return self.net.start(host, command, self.environ, out)

    def run(self, *command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """One of Slurm's commands, on the first node."""
        done = subprocess.run(
            [*self.net.entering(0), *command], env=self.environ, capture_output=True, text=True, timeout=60
        )
        if check and done.returncode:
            raise AssertionError(f"{' '.join(command)}: {done.stdout}{done.stderr}")
        return done

    def states(self) -> list[str]:
        """Of the nodes in their order, without the marks of a node that does not answer."""
        found = self.run("sinfo", "-h", "-N", "-p", "low", "-o", "%N %T", check=False).stdout.split("\n")
        return [line.split()[1].rstrip("*~#$@+") for line in found if line]

    def job(self, number: str) -> str:
        """The state of this job."""
        return self.run("squeue", "-h", "-t", "all", "-j", number, "-o", "%T", check=False).stdout.strip()

    def until(self, what: str, test: Callable[[], bool], patience_s: float = _PATIENCE_S) -> None:
        end = time.monotonic() + patience_s
        while not test():
            if time.monotonic() > end:
                raise AssertionError(f"{what}: not within {patience_s:g} s\n{self.logs()}")
            with contextlib.suppress(subprocess.TimeoutExpired):
                raise AssertionError(f"munged has ended with {self.munged.wait(0.1)}\n{self.logs()}")

    def logs(self) -> str:
        found = [self.base / "slurmctld.out", *self.base.parent.glob("*.out")]
        return "\n".join(f"== {path.name}\n{path.read_text(errors='replace')[-2500:]}" for path in sorted(found))


_MUNGE = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
