"""What a coordinator's machine is set to: from the run's configuration and from what its process inherits."""

from __future__ import annotations

import socket
from collections.abc import Mapping

from outlast.config import RunConfig
from outlast.core.policy import VacancyPolicy
from outlast.core.protocol import Settings
from outlast.runtime.coordinator._alarm_memory import agents_of_note, taught

__all__ = ["settings_of"]


def settings_of(config: RunConfig, environ: Mapping[str, str]) -> Settings:
    """The machine's settings."""
    return Settings(
        num_replicas=config.replicas,
        num_spares=config.num_spares,
        auto_spares=config.spares == "auto",
        num_slots=0 if config.endpoint else config.slots,
        num_agents=config.num_agents,
        ack_s=config.ack_s,
        lease_s=config.lease_s,
        start_s=config.start_s,
        formation_s=config.formation_s,
        outside_s=config.outside_s,
        max_restarts=config.max_restarts,
        backoff_s=config.restart_backoff_s,
        vacancies=VacancyPolicy(kind=config.on_vacancy, patience_s=config.vacancy_wait_s, price=config.price),
        min_replicas=config.min_replicas,
        on_alarm=config.on_alarm,
        by_speed=config.ranks == 1,
        alarm_kinds=taught(environ),
        **agents_of_note(environ, socket.gethostname()),
        most_processes=int(environ.get("OUTLAST_MOST_PROCESSES", 1 << 30)),
    )
