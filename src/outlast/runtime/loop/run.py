"""A process's part in a run: `join`, `pause`, and `Run`, whose `protect` gives a `Training` (`session.py`).

    run = outlast.join()
    training = run.protect(model, optimizer, dataset, global_batch_size=64, microbatches=8, seed=0)

`protect` takes each thing by itself, or the record of its owner: `Data`, `Rules`, `Audit`, `Guards`, `Checkpoint`.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch

from outlast.core.policy import Guards
from outlast.core.protocol import View
from outlast.errors import ConfigError, StepMisuse
from outlast.runtime.checks.audits import chosen_audit
from outlast.runtime.checks.critical_parameters import critical_of
from outlast.runtime.host.environment import Environment
from outlast.runtime.loop._assembly import assemble, judge
from outlast.runtime.loop._device_mesh import mesh_of
from outlast.runtime.loop._ending import exit_by_code
from outlast.runtime.loop._following import FollowingTraining
from outlast.runtime.loop._iterators import trains_anew
from outlast.runtime.loop._plain import PlainTraining, plain_training
from outlast.runtime.loop._torchrun import take_over
from outlast.runtime.loop._whereabouts import Whereabouts
from outlast.runtime.loop.session import Training
from outlast.runtime.member.follower import FollowingRank
from outlast.runtime.saving.restore import other_names
from outlast.runtime.saving.unsaved import watch
from outlast.runtime.settings.protect_records import Aggregation, Audit, Data, Rules, Wanted
from outlast.runtime.settings.save_settings import Checkpoint, beginning_of, settings_of
from outlast.runtime.training.arguments import check_arguments, check_once, check_shares, listed
from outlast.runtime.training.own_generators import with_generators
from outlast.runtime.training.pipelined import stage_of
from outlast.runtime.training.run_facts import facts_of, prepare_process
from outlast.runtime.training.stages import meet_stages
from outlast.runtime.training.state import State
from outlast.runtime.training.streams import samples_of
from outlast.runtime.transport.progress_block import Progress

__all__ = ["Run", "join", "pause"]


def join() -> Run:
    """Become part of the run that started this process, or a fleet of one. `OUTLAST=off` makes a plain loop of it."""
    trains_anew()
    watch()
    sys.excepthook = exit_by_code(sys.excepthook)
    take_over(os.environ)
    env = Environment.read(os.environ)
    env.progress.alive()
    prepare_process(env)
    env.meet()
    return Run(env, plain=os.environ.get("OUTLAST", "on").lower() == "off")


def pause(seconds: float) -> None:
    """The loop's own code is about to be silent for up to `seconds` (a long evaluation, an upload): not a hang.

    Without it the limit is `outside_s`. Does nothing outside a run. Raises ConfigError for a negative number.
    """
    if not seconds >= 0:
        raise ConfigError(f"pause({seconds!r}) is no duration", remedy="give seconds, 0 or more")
    for progress in _active:
        progress.alive(ahead_s=seconds)


_active: list[Progress] = []  # the progress block of this process's run, once joined


class Run(Whereabouts):
    """This process's part in a run."""

    def __init__(self, env: Environment, plain: bool = False) -> None:
        self._training: Training | FollowingTraining | PlainTraining | None = None
        super().__init__(env, plain, self._view)
        _active[:] = [env.progress]

    def _view(self) -> View | None:
        training = self._training
        return None if training is None or isinstance(training, PlainTraining) else training.replica.view

    @property
    def is_writer(self) -> bool:
        """Whether this replica writes what only one should: the first member of the view.

        After the loop it is certain, and may wait: should the writer die before its script has ended, the next replica
        that asks is told True. So ask again there. Raises StepMisuse before a fleet's first step: there is no view yet.
        """
        training = self._training
        if self._env.place:  # of a replica of several ranks its lead writes
            return False
        if not self._alone and self._view() is None:
            raise StepMisuse(
                "run.is_writer is not known before the first step",
                where=f"replica {self._env.me}",
                remedy="read it in the loop or after it: if run.is_writer and log is None: log = SummaryWriter(…)",
            )
        return training is None or training.writes()

    def mesh(self, shard: int | None = None, tp: int | None = None, pipeline: int | None = None) -> Any:
        """Return this replica's `DeviceMesh`: its ranks, in a dimension named "shard" for `fully_shard(module,
        mesh=run.mesh())`. `tp`: how many ranks compute each microbatch together, in a dimension named "tp" for
        `parallelize_module`: `run.mesh(shard=2, tp=2)["tp"]`. `pipeline`: how many stages of a
        pipeline the ranks are, in a dimension named "pipeline" for torch's `PipelineStage`; not together with others.
        A dimension of one rank is left out, but for "pipeline" where it is asked for. `shard`: how many
        ranks the script expects there. Call it on every rank, before the model is sharded. Raises ConfigError if the
        replica has another number of ranks."""
        return mesh_of(self._env, shard, tp, pipeline)

    def protect(
        self,
        model: torch.nn.Module, optimizer: Any, dataset: Any, *, global_batch_size: int | None = None,
        microbatches: int | None = None, seed: int = 0, scheduler: Any = None, clip_norm: float | None = None,
        state: Mapping[str, Any] | None = None, collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int | None = None, shuffle: bool | None = None, drop_last: bool | None = None, sampler: Any = None,
        bad_samples: int | None = None,
        scaler: Any = None, bucket_mb: float = 4.0, aggregation: Aggregation | Rules = None, f: int | None = None,
        pre: str | Sequence[str] | None = None, rows: int | None = None, row_momentum: float | None = None,
        check_reducers: float | None = None, guards: Guards | str = "default",
        checkpoint: Checkpoint | Literal["auto", "off"] = "auto", audit: float | str | Audit = 0.0,
        audit_params: Sequence[str] | str | None = None, checks: Any = None,
    ) -> Training | FollowingTraining | PlainTraining:  # fmt: skip
        """Put the model's training under protection.

        `optimizer`, `scheduler`: one, or a list. `dataset`: also a stream (reference/loop), or an `outlast.Data` with
        all that belongs to it: `global_batch_size`; `microbatches`, units of work in a step, the same whoever computes
        them; `collate_fn`, `num_workers`, `shuffle`, `drop_last`, `sampler`; `bad_samples`, how many may be skipped
        because they cannot be read. `state`: what else the loop changes, by name, each with `state_dict` and
        `load_state_dict`, or a random generator; what is not given here cannot be joined or rewound.
        `clip_norm`: largest global gradient norm. `scaler`: a `GradScaler`. `aggregation`: a robust rule in place of
        the mean, or an `outlast.Rules`, with `f`, `pre`, `rows`, `row_momentum` and `check_reducers`. `guards`:
        "default", "full", "off", or an `outlast.Guards`. `checkpoint`: "auto" for where the run's configuration says,
        "off", or an `outlast.Checkpoint`. `audit`: share of microbatches that a second replica computes too, "auto"
        for the policy's choice, or an `outlast.Audit`, with `audit_params`. `checks`: "abft", patterns of module names,
        or an `outlast.ProductChecks`. What `outlast run` is told outranks all of these.

        Raises ConfigError for arguments that cannot work, each with what would.
        """
        data = Data.of(
            dataset, global_batch_size=global_batch_size, microbatches=microbatches, collate_fn=collate_fn,
            num_workers=num_workers, shuffle=shuffle, drop_last=drop_last, sampler=sampler, bad_samples=bad_samples,
        )  # fmt: skip
        rules = Rules.of(aggregation, f=f, pre=pre, rows=rows, row_momentum=row_momentum, check_reducers=check_reducers)
        wanted = Wanted(
            data=data, rules=rules, audit=Audit.of(audit, params=audit_params), guards=guards, checks=checks,
            keep=checkpoint, seed=seed, clip_norm=clip_norm, bucket_mb=bucket_mb,
        )  # fmt: skip
        check_once(self._training)
        return self._protected(model, listed(optimizer), listed(scheduler), state, scaler, wanted)

    def _protected(
        self,
        model: torch.nn.Module,
        optimizers: list[Any],
        schedulers: list[Any],
        state: Any,
        scaler: Any,
        wanted: Wanted,
    ) -> Training | FollowingTraining | PlainTraining:
        data, env, state = wanted.data, self._env, with_generators(state or {})
        check_arguments(
            model, optimizers, schedulers, state, seed=wanted.seed, clip_norm=wanted.clip_norm,
            num_workers=data.num_workers, bucket_mb=wanted.bucket_mb, collate_fn=data.collate_fn,
        )  # fmt: skip
        samples = samples_of(data, seed=wanted.seed)
        check_shares(env.config.replicas, samples.num_leaves // env.at_a_time)
        parts = State(model, optimizers, schedulers, {**state, **samples.parts()}).scaled_with(scaler)
        if env.stages > 1:
            parts.stages = meet_stages(env.place, env.width, stage_of(parts, other_names(model)))
        env.config = beginning_of(wanted.keep, env.config)
        keep, facts = settings_of(wanted.keep, env.config), facts_of(env.config, parts, samples, wanted.clip_norm)
        chosen, critical = chosen_audit(wanted.audit.share, env.config), critical_of(parts, wanted.audit.params)
        facts |= {"audit_params": ", ".join(critical), "audit": f"{chosen:g}" if isinstance(chosen, float) else chosen}
        wanted = dataclasses.replace(wanted, audit=Audit(chosen, params=critical))
        if self._plain:
            guards = judge(env, parts, samples, wanted)
            self._training = plain = plain_training(
                env, parts, samples, wanted.clip_norm, wanted.seed, keep, facts,
                reads_norm=guards is not None and guards.reads_norm,
            )  # fmt: skip
            return plain
        replica = assemble(env, parts, samples, facts, wanted, keep)
        if isinstance(replica, FollowingRank):
            self._training = following = FollowingTraining(replica)
            return following
        self._training = training = Training(replica, chosen, critical)
        return training
