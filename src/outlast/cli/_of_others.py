"""Options of other launchers, and what `outlast run` has in their place: torchrun, srun, Accelerate, dlrover-run,
ft_launcher and deepspeed. Spelt with dashes; they spell some with underscores.
"""

from __future__ import annotations

__all__ = ["hint_for"]

_HOSTS = "--endpoint HOST:PORT --nnodes N here, and outlast agent --join HOST:PORT on each of the others"
_DOCTOR = "outlast doctor --reach HOST before the run; in it, links that are bad are spared by themselves"
_SLOW = "leave it out, shares follow speed; outlast drain HOST empties one by hand"
_LEARNED = "leave it out, limits are learned; floors for them are stall_floor_s and outside_s under [run] in --config"
_FEWEST = "OUTLAST_MIN_REPLICAS=N if fewer must not go on; else leave it out, one that holds the state is enough"
_DEVICES = "CUDA_VISIBLE_DEVICES=… in front of the command, and --replicas N"
_SETTINGS = "what its JSON said are arguments of protect() (docs: coming from DeepSpeed)"

_OF_OTHERS = {
    **dict.fromkeys(("nproc-per-node", "num-processes", "n", "np", "nprocs", "num-gpus", "ntasks", "gpus-per-node",
                     "num-accelerators"), "--replicas N"),
    **dict.fromkeys(("node-rank", "machine-rank"), "leave it out; the other hosts come in by outlast agent --join"),
    **dict.fromkeys(("num-machines", "num-nodes"), "--nnodes N"),
    **dict.fromkeys(("rdzv-endpoint", "master-addr"), "--endpoint HOST:PORT, for a run on several hosts"),
    **dict.fromkeys(("rdzv-backend", "rdzv-id", "rdzv-conf", "standalone", "rdzv-timeout", "no-local-rank", "use-env",
                     "local-addr", "start-method", "role", "virtual-local-rank", "save-at-breakpoint", "node-unit",
                     "elastic-training", "max-elastic-nodes", "enable-elastic-training"),
                    "leave it out, the coordinator is started with the run, and the replicas by outlast"),
    "max-restarts": "OUTLAST_MAX_RESTARTS=N, or max_restarts under [run] in --config",
    "monitor-interval": "leave it out, exits are noticed as they happen",
    "master-port": "--port",
    "main-process-port": "--port",
    **dict.fromkeys(("log-dir", "redirects", "tee", "r", "t", "local-ranks-filter", "enable-each-rank-log"),
                    "--run-dir DIR; every replica's output is in its logs/"),
    "module": "-m MODULE",
    **dict.fromkeys(("no-python", "run-path"), "leave it out; give a Python script, or -m MODULE"),
    "mixed-precision": "autocast in the loop",
    "config-file": "--config FILE",
    **dict.fromkeys(("min-nodes", "min-elastic-nodes"), _FEWEST),
    **dict.fromkeys(("hostfile", "launcher", "launcher-args", "ssh-port", "no-ssh", "include", "exclude"),
                    f"{_HOSTS}; of one host's devices: {_DEVICES}"),
    **dict.fromkeys(("network-check", "comm-perf-test"), _DOCTOR),
    **dict.fromkeys(("auto-config", "auto-tunning", "accelerator", "training-port"),
                    "leave it out; outlast doctor --quick says whether this host can train"),
    "kill-on-bad-exit": "leave it out; outlast launch slurm writes the file that starts a run",
    "local-rank": "leave it out; run.device is the device of this replica",
    "exclude-straggler": _SLOW,
    **dict.fromkeys(("deepspeed", "deepspeed-config", "deepspeed-config-file", "zero-stage", "autotuning"), _SETTINGS),
    **dict.fromkeys(("bind-cores-to-core", "bind-core-list", "numa-binding"), "taskset or numactl, and --threads N"),
}  # fmt: skip


def hint_for(option: str) -> str | None:
    """What another launcher's option is here; None for one that no launcher known here has."""
    name = option.lstrip("-").replace("_", "-")
    if name.startswith(("ft-", "fault-tol-")):
        return _LEARNED
    return _OF_OTHERS.get(name)
