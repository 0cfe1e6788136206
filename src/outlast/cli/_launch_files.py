"""What an engine is to start, and the batch script that Slurm reads. Pure text from a few numbers.

Placing processes on machines is the engine's; who is a member of the run is decided inside it. So a node that fails
ends nothing but its own processes, and one that is given back is an agent that joins.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

import msgspec

from outlast.config import TlsFiles
from outlast.errors import ConfigError

__all__ = ["GRACE_S", "EngineJob", "slurm_script"]

GRACE_S = 60  # between an engine's notice and the end: a save, and an orderly leave
_TIME = r"(?i)(\d+(:\d{1,2}){0,2}|\d+-\d+(:\d{1,2}){0,2}|UNLIMITED|INFINITE)?"
_TRIES = 100  # times that a job queues itself again


class EngineJob(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be started. `options`: of `outlast run`; `nodes`: (fewest to begin with, most); `slots`: replicas that
    may run on a node."""

    name: str
    nodes: tuple[int, int]
    slots: int
    command: tuple[str, ...]
    options: tuple[str, ...] = ()
    cpus: int = 0
    gpus: int = 0
    time: str = ""
    partition: str = ""
    image: str = ""
    python: str = "python"
    tls: TlsFiles | None = None
    """On the nodes; `{node}` in a path is the name of each."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?", self.name):
            raise ConfigError(
                f"{self.name!r} is no name for a job", remedy="up to 40 small letters, digits and dashes between them"
            )
        if not 1 <= self.nodes[0] <= self.nodes[1]:
            raise ConfigError(f"{self.nodes[0]} to {self.nodes[1]} nodes", remedy="--nodes MIN or MIN:MAX")
        if not re.fullmatch(_TIME, self.time):
            raise ConfigError(f"time = {self.time!r}", remedy="MINUTES, HOURS:MINUTES:SECONDS or DAYS-HOURS:MINUTES")
        for word in self.options:
            if word.startswith("--tls-"):
                raise ConfigError(
                    f"{word.partition('=')[0]} in --options is told to the first host alone",
                    remedy="TLS is an option of outlast launch itself, for all hosts: see its --help",
                )


def _joined(words: Sequence[str]) -> str:
    """Words as they stand in double quotes where they need any: around all of them stand single ones."""
    return " ".join(word if shlex.quote(word) == word else f'"{_ESCAPED.sub(_BACK, word)}"' for word in words)


_ESCAPED, _BACK = re.compile(r'(["\\\\$`])'), r"\\\1"


_SLURM = """\
#!/bin/bash
# Made by outlast launch slurm. The first node keeps the run's record and trains, the others join it.
# More nodes for a run that is there: sbatch --nodes=1 --export=ALL,OUTLAST_JOIN=FOLDER of the run's job, and this file.
{directives}
set -euo pipefail

# A folder that all nodes share. What a job that is queued again does lies beside what it did before.
export folder=${{OUTLAST_JOIN:-${{OUTLAST_JOB_FOLDER:-$PWD/outlast-runs/slurm-$SLURM_JOB_ID}}}}
export try=${{SLURM_RESTART_COUNT:-0}}
umask 077
mkdir -p "$folder"
if [ -z "${{OUTLAST_JOIN:-}}" ]; then
  [ -s "$folder/secret" ] || head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \\n' > "$folder/secret"
  first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
  echo "$first:$((20000 + SLURM_JOB_ID % 20000))" > "$folder/endpoint"
fi
export endpoint=$(cat "$folder/endpoint")

# --no-kill: a node that fails takes nobody with it; --kill-on-bad-exit=0: nor does a task that ends.
code=0
srun --no-kill --kill-on-bad-exit=0 --wait=0 bash -c '{tls}
if [ "$SLURM_NODEID" = 0 ] && [ -z "${{OUTLAST_JOIN:-}}" ]; then
  # Slurm gives its notice to every process of the job, outlast stop only to the run.
  trap ": > \\"$folder/$try.noticed\\"" TERM
  node=${{endpoint%:*}} port=${{endpoint##*:}}
  address=$(getent ahosts "$node" | cut -d " " -f 1 | grep -v "^127\\.\\|^::1$\\|^fe80:" | head -n 1)
  address=${{address:-$node}}
  case "$address" in *:*) address="[$address]" ;; esac
  # In a shell that waits for nothing else: a notice ends no wait of it, so the code is that of the run.
  (
    trap : TERM
    code=0
    {python} -m outlast run --endpoint "$address:$port" --nnodes {nnodes} --slots {slots} \\
      --host "$SLURMD_NODENAME" --secret-file "$folder/secret" --run-dir "$folder/run-$try" {options} {command} ||
      code=$?
    echo $code > "$folder/$try.code"
  ) &
  while wait $!; kill -0 $! 2> /dev/null; do :; done
  exit $(cat "$folder/$try.code")
fi
exec {python} -m outlast agent --join "$endpoint" --secret-file "$folder/secret" --slots {slots} \\
  --host "$SLURMD_NODENAME" --run-dir "$folder/$SLURMD_NODENAME-$SLURM_JOB_ID-$try"
' || code=$?
# Of srun that is the worst of all tasks, those of lost nodes too; the job's is the run's.
[ -n "${{OUTLAST_JOIN:-}}" ] || code=$(cat "$folder/$try.code" 2> /dev/null || echo $code)

# After a notice (a preemption, the end of its time) the job is queued again, if it has saved something to go on from;
# not where it is done, or would end alike (bad arguments, membership, the script's own error), nor for ever.
case $code in 0|2|4|5) again= ;; *) again=1 ;; esac
if [ -z "${{OUTLAST_JOIN:-}}" ] && [ -n "$again" ] && [ -e "$folder/$try.noticed" ] && [ "$try" -lt {tries} ] &&
  [ "$(squeue -h -j "$SLURM_JOB_ID" -o %T)" = RUNNING ] &&
  {python} -m outlast status --json "$folder/run-$try" | grep '"last_save": {{' > /dev/null; then
  echo "outlast: queued again after Slurm's notice"
  scontrol requeue "$SLURM_JOB_ID"
fi
exit $code
"""


def slurm_script(job: EngineJob) -> str:
    """For sbatch. What is quoted for the shell inside stands between single quotes, which the words may not hold."""
    directives = [
        f"--job-name={job.name}", f"--nodes={job.nodes[0]}-{job.nodes[1]}", "--ntasks-per-node=1",
        *([f"--cpus-per-task={job.cpus}"] if job.cpus else []), *([f"--gpus-per-node={job.gpus}"] if job.gpus else []),
        *([f"--time={job.time}"] if job.time else []), *([f"--partition={job.partition}"] if job.partition else []),
        f"--signal=TERM@{GRACE_S}", "--requeue", "--no-kill", "--open-mode=append",
    ]  # fmt: skip
    if any(word.partition("=")[0] == "--run-dir" for word in job.options):
        raise ConfigError("--run-dir in --options", remedy="OUTLAST_JOB_FOLDER in the job's environment says where")
    words = (*job.options, *job.command, job.python, *(job.tls or ()))
    for word in words:
        if "'" in word:
            raise ConfigError(f"a quote in {word!r}", remedy="put it into the script, or into run.toml with --config")
    return _SLURM.format(
        directives="\n".join(f"#SBATCH {line}" for line in directives),
        python=_joined([job.python]),
        nnodes=f"{job.nodes[0]}:{job.nodes[1]}",
        slots=job.slots,
        tries=_TRIES,
        tls="".join(_exported(part, value) for part, value in (job.tls._asdict() if job.tls else {}).items()),
        options=_joined(job.options),
        command=_joined(job.command),
    )


def _exported(part: str, value: str) -> str:
    """One of the variables that tell a host of its certificates. Braces are quoted, and so is what replaces them."""
    said = _joined([value]).replace("{node}", "$SLURMD_NODENAME")
    return f"\nexport OUTLAST_TLS_{part.upper()}={said}" if value else ""
