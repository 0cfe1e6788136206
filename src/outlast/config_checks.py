"""What settings of a run do not go with each other: refused before anything is started, with what to write instead."""

from __future__ import annotations

from outlast.errors import ConfigError

__all__ = ["check_leases", "check_one_width", "check_vacancies"]


def check_leases(record: str, lease_s: float, record_lease_s: float, heartbeat_s: float) -> None:
    """With the record in etcd a heartbeat is answered once the claim was confirmed after it came (decision 0174)."""
    least_s = record_lease_s + 2.0 * heartbeat_s
    if record != "sqlite" and lease_s < least_s:
        raise ConfigError(
            f"lease_s = {lease_s:g} would be over before the coordinator has answered, with record_lease_s = "
            f"{record_lease_s:g} and heartbeat_s = {heartbeat_s:g}",
            remedy=f"lease_s of {least_s:g} or more, or a shorter record_lease_s",
        )


def check_one_width(ranks: object, origin: str) -> None:
    """Several numbers of ranks, one for each replica, are understood, and cannot be had yet."""
    if "," in str(ranks):
        raise ConfigError(
            f"ranks = {ranks} (from {origin}): the replicas of a run cannot have different numbers of ranks yet",
            remedy="one number for all: the ranks of a replica may be more than its host has processors, as it is "
            "given fewer microbatches where it is slower, and the bits are the same with any number",
        )


def check_vacancies(replicas: int, min_replicas: int) -> None:
    """What waiting for lost replicas does not go with."""
    if min_replicas > replicas:
        raise ConfigError(
            f"min_replicas = {min_replicas} of {replicas} replicas", remedy="at most as many as there are"
        )
