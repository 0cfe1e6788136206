"""From what a script gave `protect` and what the run was told to one replica, ready to train."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import msgspec
import torch

from outlast.core.policy import Guards
from outlast.core.protocol import messages as m
from outlast.errors import ConfigError
from outlast.runtime.checks.checked_sums import admit_device, checked_sums
from outlast.runtime.checks.guards import Guarding
from outlast.runtime.exchange.robust_rows import Robust, arrange
from outlast.runtime.exchange.rule_settings import row_settings
from outlast.runtime.exchange.shard_sums import ShardSums, sharded
from outlast.runtime.exchange.slots import Memory
from outlast.runtime.faults.flips import ordered
from outlast.runtime.host.environment import Environment
from outlast.runtime.member.driver import Replica
from outlast.runtime.member.follower import FollowingRank
from outlast.runtime.member.link import SoloLink
from outlast.runtime.member.sibling_saves import FollowingMember, SiblingSaves
from outlast.runtime.saving.member_saves import Saves
from outlast.runtime.settings.protect_records import Audit, Wanted
from outlast.runtime.settings.rank_limits import check_mean, check_protected, check_sharded, check_staged
from outlast.runtime.settings.save_settings import SaveSettings
from outlast.runtime.training.engine import Engine
from outlast.runtime.training.samples import Samples
from outlast.runtime.training.state import State
from outlast.runtime.training.witness import Witness
from outlast.runtime.transport.rank_words import SavesSay
from outlast.tensors import BLOCK, Grid, is_shard

__all__ = ["assemble", "judge"]


def judge(env: Environment, parts: State, samples: Samples, wanted: Wanted) -> Guards | None:
    """ConfigError for what `assemble` would refuse, where nothing is made of it: a plain loop does without all of this,
    and a mistake in it is told all the same. There is no fleet to count rows by (one a replica is usual): it is taken
    to be as large as it may be. Returns the guards that a fleet would have."""
    guards = Guards.of(wanted.guards if env.config.guards == "script" else env.config.guards)
    if any(map(is_shard, parts.params)):
        check_sharded(wanted.checks)
    _check_audit(samples, wanted.audit.share)
    largest = msgspec.structs.replace(env.config, replicas=max(2, samples.num_leaves))
    rows = row_settings(largest, parts.names, samples.num_leaves, **wanted.rules.arguments())
    parts.scaling.check(rows is not None)
    checked_sums(parts.model, wanted.checks)
    return guards


def _check_audit(samples: Samples, share: float | str) -> None:
    if samples.bad.allowed and share:
        raise ConfigError(
            "bad_samples= with audits: a sample that one replica can read and another cannot would look like a device "
            "that computes wrongly",
            remedy="one of both",
        )


def assemble(
    env: Environment,
    parts: State,
    samples: Samples,
    facts: dict[str, str],
    wanted: Wanted,
    keep: SaveSettings | None,
) -> Replica | FollowingRank:
    """`facts`: what all members must share, so far; `keep`: how to save, if at all."""
    robust, checks, bucket_mb = wanted.rules.arguments(), wanted.checks, wanted.bucket_mb
    microbatches, samples.doubted = samples.num_leaves, env.config.bitwise
    policy = Guards.of(wanted.guards if env.config.guards == "script" else env.config.guards)
    device = parts.params[0].device
    check_protected(env.width, env.at_a_time, microbatches, samples.shortest(), checks=checks, device=device.type)
    grid = _grid_of_stages(parts, samples, facts, policy)
    shards = ShardSums(env.place // env.together, env.at_a_time)
    if sharded(list(zip(parts.names, parts.params, strict=True)), shards.width, env.tensor_parallel):
        shards.attach(parts.model)
        check_sharded(checks)
    samples.watch(env.config.outside_s)
    samples.never_empty = env.width > 1
    _check_audit(samples, wanted.audit.share)
    bucket_bytes = int(bucket_mb * (1 << 20))
    layout, rows = arrange(env.config, parts, samples, bucket_bytes, shards, sums_device(env), grid, **robust)
    parts.scaling.check(rows is not None)
    check_mean(rows is None or parts.stages is None)
    admit_device(env.config.device_test or env.probation, device, env.me)
    shared = env.exchange == "shm" or (env.exchange == "hosts" and in_two_levels(env, rows, facts))
    shared = shared and layout.device.type == "cpu"
    memory = Memory(layout, microbatches + 2, shared=shared, alone=env.coordinator is None)
    engine = Engine(parts, samples, layout, memory, wanted.clip_norm, wanted.seed, rows, shards)
    engine.step_checks.guards = guarding = Guarding(engine, policy)
    engine.checked = checked_sums(parts.model, checks)
    ordered(env.probe.me, engine)
    engine.witness = Witness.of(os.environ, env.me, parts, env.place)
    facts = facts | {"aggregation": rows.settings.describe() if rows is not None else "mean", "guards": str(policy)}
    facts |= {"loop": "protected", "bucket_mb": f"{bucket_mb:g}"}  # norms are summed bucket by bucket
    facts |= {"tensor_parallel": str(env.tensor_parallel)} if env.width > 1 else {}  # part of the arithmetic
    facts |= {"stages": str(env.stages)} if env.stages > 1 else {}
    facts |= rows.settings.facts() if rows is not None else {}
    facts |= {"checkpoints": msgspec.json.encode(keep).decode()} if keep is not None else {}
    if env.place:
        return _following(env, engine, facts, guarding, keep, wanted.audit)
    return _leading(env, engine, facts, guarding, keep)


def _grid_of_stages(parts: State, samples: Samples, facts: Mapping[str, str], policy: Guards | None) -> Grid | None:
    """Where the blocks of a pipeline's stage are; None without one. ConfigError for what a pipeline cannot have yet."""
    if parts.stages is None:
        return None
    check_staged(
        samples.shortest(), samples.batch // samples.num_leaves,
        scaler=parts.scaling.active, audits=facts["audit"] != "0" or bool(facts["audit_params"]),
        certified=policy is not None and policy.certify_every > 0,
    )  # fmt: skip
    samples.whole = True
    return parts.stages.grid(BLOCK)


def sums_device(env: Environment) -> torch.device | None:
    """Return where gradients are summed, if not where they come from: in the host's memory, where members share it."""
    return torch.device("cpu") if env.exchange == "shm" and env.coordinator is not None else None


def in_two_levels(env: Environment, rows: Robust | None, facts: Mapping[str, str]) -> bool:
    """Whether members of a host add their sums before these travel: not where it counts whose each one is."""
    return rows is None and env.width == 1 and facts["audit"] == "0" and not facts["audit_params"]


def _following(
    env: Environment, engine: Engine, facts: dict[str, str], guarding: Guarding, keep: SaveSettings | None, audit: Audit
) -> FollowingRank:
    """A rank that is not its replica's lead."""
    follower = FollowingRank(env, engine, facts, guarding, audit.share, audit.params)
    engine.samples.tell = lambda news: follower.pipe.send(m.DataNoted(member=env.me, **asdict(news)))
    _disguise(follower, env, engine)
    if keep is not None:
        _follow_saves(follower, keep)
    follower.ready()
    return follower


def _leading(
    env: Environment, engine: Engine, facts: dict[str, str], guarding: Guarding, keep: SaveSettings | None
) -> Replica:
    """A replica's lead, or all of it."""
    replica = Replica(env, engine, facts, guarding)
    engine.samples.tell = lambda news: replica.link.send([m.DataNoted(member=env.me, **asdict(news))])
    _disguise(replica, env, engine)
    if keep is not None:
        _attach(replica, keep)
    return replica


def _disguise(rank: Replica | FollowingRank, env: Environment, engine: Engine) -> None:
    """Have it lie, if tests order it."""
    if env.lies:
        from outlast.runtime.faults.liars import lying

        rank.disguise = lambda plane: lying(env.lies, env.me, plane, engine, env.place)


def _attach(replica: Replica, settings: SaveSettings) -> None:
    """Give a replica its part in the run's checkpoints. Raises ConfigError for a place of no known kind."""
    link = replica.link
    certified = replica.guards.certified
    alone = isinstance(link, SoloLink)
    facts = {key: value for key, value in replica.facts.items() if key != "checkpoints"}
    replica.saves = Saves(
        replica.env,
        replica.engine,
        replica.member,
        settings,
        facts,
        send=None if alone else link.send,
        wake_fd=link.wake_fd,
        verified=lambda: certified.step if certified is not None else None,
    )
    replica.saves.wakes = link
    if replica.siblings.some:
        replica.saves.others = SiblingSaves(replica.siblings, link.send)
    if not isinstance(link, SoloLink):
        link.on_save, link.repeat = replica.saves.told, replica.saves.repeat


def _follow_saves(follower: FollowingRank, settings: SaveSettings) -> None:
    """Give a rank that is not its replica's lead its own part in them."""
    pipe = follower.pipe
    facts = {key: value for key, value in follower.facts.items() if key != "checkpoints"}
    saves = follower.saves = Saves(
        follower.env,
        follower.engine,
        FollowingMember(follower),
        settings,
        facts,
        send=lambda messages: pipe.send(SavesSay(tuple(messages))),
        wake_fd=pipe.wake_fd,
        verified=lambda: None,
    )

    def heard(word: Any) -> None:
        if word.message is not None:
            saves.told(word.message)
        elif again := saves.repeat():
            pipe.send(SavesSay(tuple(again)))

    pipe.on_saves = heard
