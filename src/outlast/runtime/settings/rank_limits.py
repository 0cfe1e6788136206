"""What replicas of several ranks do not do yet, each refused by name before anything is trained."""

from __future__ import annotations

from collections.abc import Mapping

from outlast.config import RunConfig
from outlast.core.policy import Guards
from outlast.errors import ConfigError

__all__ = ["check_protected", "check_ranks", "check_sharded"]


def check_ranks(config: RunConfig) -> None:
    """ConfigError for a number of ranks that cannot be, and for what a run with ranks is told and cannot do."""
    if config.ranks == 1:
        return
    if config.ranks & (config.ranks - 1):
        raise ConfigError(
            f"--ranks {config.ranks} is no power of two: the ranks' microbatches would be no subtree of the sum",
            remedy="--ranks 2, 4 or 8",
        )
    refused = {
        "a robust rule (aggregation)": config.aggregation != "mean",
        "audit": config.audit not in ("script", "0", "0.0", 0, 0.0),
        "guards = full": config.guards == "full",
    }
    _refuse(config.ranks, refused)


def check_protected(
    width: int,
    microbatches: int,
    sizes: list[int],
    *,
    robust: Mapping[str, object],
    audits: bool,
    critical: bool,
    checks: object,
    policy: Guards | None,
    device: str,
) -> None:
    """ConfigError for what the script gives `protect` and a replica of `width` ranks cannot do. `sizes`: of an epoch's
    last microbatches; `policy`: the guards."""
    if width == 1:
        return
    if microbatches % width:
        raise ConfigError(
            f"{microbatches} microbatches cannot be dealt to {width} ranks: each computes one at a time",
            remedy=f"microbatches={-(-microbatches // width) * width}",
        )
    if not all(sizes):
        raise ConfigError(
            "the last batch of an epoch has fewer samples than microbatches, and every rank needs one",
            remedy="drop_last=True",
        )
    refused = {
        "a robust rule (aggregation, rows, f)": any(value is not None for value in robust.values()),
        "audit": audits,
        "audit_params": critical,
        "checks": checks is not None,
        "guards that go back to a certified state, or watch activations": policy is not None
        and (policy.certify_every > 0 or policy.collapse != "off"),
        f"training on {device}": device != "cpu",
    }
    _refuse(width, refused)


def check_sharded(*, audits: bool, critical: bool, checks: object) -> None:
    """ConfigError for what looks at gradients, moments or products as whole tensors, and finds shards."""
    refused = {"audit": audits, "audit_params": critical, "checks": checks is not None}
    for what, given in refused.items():
        if given:
            raise ConfigError(
                f"{what} cannot be had with a model that is sharded (fully_shard) yet",
                did="nothing was trained",
                remedy="leave it out, or leave out fully_shard: replicas of one rank hold the whole model anyway",
            )


def _refuse(width: int, refused: Mapping[str, bool]) -> None:
    for what, given in refused.items():
        if given:
            raise ConfigError(
                f"{what} cannot be had with replicas of {width} ranks yet",
                did="nothing was started",
                remedy="leave it out, or --ranks 1",
            )
