"""What settings of a run do not go with each other: refused before anything is started, with what to write instead."""

from __future__ import annotations

from outlast.errors import ConfigError

__all__ = ["check_vacancies"]


def check_vacancies(replicas: int, ranks: int, min_replicas: int, on_vacancy: str) -> None:
    """What waiting for lost replicas does not go with."""
    if min_replicas > replicas:
        raise ConfigError(
            f"min_replicas = {min_replicas} of {replicas} replicas", remedy="at most as many as there are"
        )
    if ranks > 1 and (on_vacancy in ("wait", "auto") or min_replicas > 1):
        raise ConfigError(
            "replicas of several ranks do not wait for others yet",
            remedy="on_vacancy = shrink or stop, and min_replicas = 1",
        )
