"""What replicas of several ranks do not do yet, each refused by name before anything is trained."""

from __future__ import annotations

from collections.abc import Mapping

from outlast.config import RunConfig
from outlast.errors import ConfigError

__all__ = ["check_mean", "check_protected", "check_ranks", "check_sharded", "check_staged"]


def check_ranks(config: RunConfig) -> None:
    """ConfigError for a number of ranks that cannot be."""
    if config.ranks == 1:
        return
    if config.ranks & (config.ranks - 1):
        raise ConfigError(
            f"--ranks {config.ranks} is no power of two: the ranks' microbatches would be no subtree of the sum",
            remedy="--ranks 2, 4 or 8",
        )


def check_protected(
    width: int,
    at_a_time: int,
    microbatches: int,
    sizes: list[int],
    *,
    checks: object,
    device: str,
) -> None:
    """ConfigError for what the script gives `protect` and a replica of `width` ranks cannot do. `sizes`: of an epoch's
    last microbatches; `at_a_time`: microbatches that it computes at a time."""
    if width == 1:
        return
    if microbatches % at_a_time:
        raise ConfigError(
            f"{microbatches} microbatches cannot be dealt to {at_a_time} ranks: each computes one at a time",
            remedy=f"microbatches={-(-microbatches // at_a_time) * at_a_time}",
        )
    if not all(sizes):
        raise ConfigError(
            "the last batch of an epoch has fewer samples than microbatches, and every rank needs one",
            remedy="drop_last=True",
        )
    refused = {
        "checks": checks is not None,
        f"training on {device}": device != "cpu",
    }
    _refuse(width, refused)


def check_sharded(checks: object) -> None:
    """ConfigError for what looks at products as whole tensors, and finds shards."""
    if checks is not None:
        raise ConfigError(
            "checks cannot be had with a model that is sharded (fully_shard) yet",
            did="nothing was trained",
            remedy="leave it out, or leave out fully_shard: replicas of one rank hold the whole model anyway",
        )


def check_staged(sizes: list[int], size: int, *, scaler: bool, audits: bool, certified: bool) -> None:
    """ConfigError for what a replica that is a pipeline cannot do. `sizes`: of an epoch's last microbatches; `size`: of
    all others."""
    if {*sizes} != {size}:
        raise ConfigError(
            "the last batch of an epoch is short, and a pipeline's stages expect microbatches of one size",
            remedy="drop_last=True",
        )
    refused = {"a gradient scaler": scaler, "audits": audits, "guards that certify states": certified}
    for what in (what for what, given in refused.items() if given):
        raise _not_staged(what)


def check_mean(mean: bool) -> None:
    """ConfigError for a pipeline with a robust rule."""
    if not mean:
        raise _not_staged("robust rules")


def _not_staged(what: str) -> ConfigError:
    return ConfigError(
        f"{what} cannot be had with a pipeline (run.mesh(pipeline=…)) yet", did="nothing was trained",
        remedy="leave it out, or shard the replica by fully_shard instead",
    )  # fmt: skip


def _refuse(width: int, refused: Mapping[str, bool]) -> None:
    for what, given in refused.items():
        if given:
            raise ConfigError(
                f"{what} cannot be had with replicas of {width} ranks yet",
                did="nothing was started",
                remedy="leave it out, or --ranks 1",
            )
