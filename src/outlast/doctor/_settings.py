"""Settings that contradict each other: deadlines that end before what they wait for. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from outlast.config import RunConfig
from outlast.doctor._finding import Finding, Level

__all__ = ["contradictions"]

_GRACE_S = 30.0
"""What Kubernetes and Slurm give a job between SIGTERM and SIGKILL unless they are told otherwise."""


class _Rule(NamedTuple):
    """`wrong`: whether settings contradict each other so; `what` and `remedy` may name them in braces."""

    level: Level
    wrong: Callable[[RunConfig], bool]
    what: str
    remedy: str


_RULES = (
    _Rule("error", lambda c: c.lease_s < 3 * c.heartbeat_s,
          "a lease of {lease_s:g} s ends before three heartbeats of {heartbeat_s:g} s have been missed: views stop "
          "committing while all is well", "lease_s of at least 3 x heartbeat_s; the default is 600"),
    _Rule("error", lambda c: c.formation_s <= c.ack_s,
          "a view must have formed within {formation_s:g} s, and a member may take {ack_s:g} s to acknowledge leaving "
          "the one before", "formation_s above ack_s; the defaults are 30 and 5"),
    _Rule("error", lambda c: c.outside_s < c.stall_floor_s,
          "the loop's own body may take {outside_s:g} s, less than the floor under all deadlines ({stall_floor_s:g} s)",
          "outside_s above the longest evaluation in the loop"),
    _Rule("warning", lambda c: c.ack_s < 2 * c.heartbeat_s,
          "a member has {ack_s:g} s to acknowledge, and news come with heartbeats each {heartbeat_s:g} s: one that is "
          "merely slow is left out", "ack_s of at least 2 x heartbeat_s"),
    _Rule("warning", lambda c: c.group_timeout_s < c.formation_s,
          "c10d gives up after {group_timeout_s:g} s while a view may take {formation_s:g} s to form",
          "group_timeout_s above formation_s"),
    _Rule("warning", lambda c: c.stop_save_s > _GRACE_S - 5,
          "a run that is asked to stop may save for {stop_save_s:g} s; Kubernetes and Slurm kill after 30 s unless "
          "told otherwise", "raise terminationGracePeriodSeconds (Slurm: --signal=TERM@120), or lower stop_save_s"),
    _Rule("warning", lambda c: math.isfinite(c.outside_s) and c.outside_s > c.lease_s and c.lease_s < 600,
          "the loop's body may take {outside_s:g} s, longer than the lease of {lease_s:g} s: if the coordinator is "
          "away then, the step after it is not committed", "lease_s above outside_s"),
    _Rule("warning", lambda c: bool(c.checkpoint_dir) and c.checkpoint_dir == c.checkpoint_drain_to,
          "checkpoints are drained to the place that they come from", "another checkpoint_drain_to"),
    _Rule("note", lambda c: c.replicas == 1 and not c.spares and not c.checkpoint_dir,
          "one replica, no spare and no checkpoint: nothing is tolerated, any fault ends the run",
          "--replicas 2, or --checkpoint-dir"),
    _Rule("note", lambda c: c.replicas > 1 and not c.checkpoint_dir,
          "no checkpoint: a fault that takes all replicas at once (this machine's power) loses all work",
          "--checkpoint-dir DIR"),
    _Rule("note", lambda c: c.max_restarts == 0 and c.replicas > 1,
          "dead replicas are not replaced (max_restarts = 0): each fault leaves the run smaller",
          "max_restarts above the number of faults you expect"),
)  # fmt: skip


def contradictions(config: RunConfig, environ: Mapping[str, str]) -> list[Finding]:
    """Findings about the settings and about variables that work against them; one `ok` where there is none."""
    found = [
        Finding(check="settings", level=rule.level, what=_filled(rule.what, config), remedy=rule.remedy)
        for rule in _RULES
        if rule.wrong(config)
    ]
    found += list(_of_environment(config, environ))
    return found or [Finding(check="settings", level="ok", what="no setting contradicts another")]


def _filled(text: str, config: RunConfig) -> str:
    return text.format(**{name: getattr(config, name) for name in RunConfig.__struct_fields__})


def _of_environment(config: RunConfig, environ: Mapping[str, str]) -> list[Finding]:
    found = []
    threads = environ.get("OMP_NUM_THREADS", "")
    if threads.isdigit() and config.threads and int(threads) != config.threads:
        found.append(
            Finding(
                check="environment",
                level="note",
                what=f"OMP_NUM_THREADS={threads}, and threads = {config.threads}: outlast's setting holds for torch",
                remedy="unset OMP_NUM_THREADS, or give --threads the same number",
            )
        )
    world = environ.get("WORLD_SIZE", "1")
    if world.isdigit() and int(world) > 1 and "OUTLAST_PARENT" not in environ:
        found.append(
            Finding(
                check="environment",
                level="error",
                what=f"WORLD_SIZE={world}: another launcher starts this script {world} times, as many runs",
                remedy="outlast run --replicas N train.py, not torchrun or accelerate launch",
            )
        )
    if environ.get("OUTLAST", "on").lower() == "off":
        found.append(
            Finding(
                check="environment",
                level="warning",
                what="OUTLAST=off makes a plain loop of every script",
                remedy="unset OUTLAST",
            )
        )
    return found
