"""Which run of an etcd is meant by who knows the run's secret, and no coordinator of it.

Role: a run's keys lie under `/outlast/RUN/`, and its claim is signed with its secret. So the secret finds the run,
whatever else is there: other runs, and what is left of earlier ones under the same secret. It reads, and believes
nothing that is not signed.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping

from outlast.errors import ConfigError, EnvironmentFault
from outlast.journal._etcd import Access, Etcd
from outlast.journal._turn import CoordinatorClaim, Seals, SharedTurn, TurnSeen

__all__ = ["RunsInEtcd"]

_ALL, _END = b"/outlast/", b"/outlast0"
_AFTER_A_FOLDER = b"0"  # the byte that follows the slash
_TELL_APART_S = 3.0  # a run that lives gives several signs in this time


class RunsInEtcd:
    """The runs under this secret."""

    def __init__(self, access: Access, secret: bytes) -> None:
        self._etcd, self._seals = Etcd(access), Seals(secret)
        self._signs: dict[str, tuple[str, int]] = {}
        self._since_s, self._several = 0.0, False

    def coordinator(self, within_s: float) -> CoordinatorClaim | None:
        """The claim of the one run that is not over; None where there is none, or where several were left without an
        end and it is not known yet which of them lives: ask again. Raises Unreachable; EnvironmentFault where etcd
        refuses; ConfigError where several live."""
        going = {run: seen for run, seen in self._claimed(within_s).items() if seen.end is None}
        if len(going) <= 1:
            return next((seen.claim for seen in going.values()), None)
        signs = {run: (seen.claim.token, seen.beat) for run, seen in going.items() if seen.claim is not None}
        now_s = time.monotonic()
        if not self._signs:
            self._signs, self._since_s = signs, now_s
        if now_s - self._since_s < _TELL_APART_S:
            return None
        living = [run for run, sign in signs.items() if self._signs.get(run) != sign]
        self._signs, self._since_s = signs, now_s  # a run that lived then may not live the next time
        before, self._several = self._several, len(living) > 1
        if self._several and not before:  # one may have ended since the signs were taken, and the other followed it
            return None
        if self._several:
            raise ConfigError(
                f"{' and '.join(sorted(living))} are runs with the same secret, and both go on",
                did="nothing was started",
                remedy="--join HOST:PORT of the one, or a secret for each",
            )
        return going[living[0]].claim if living else None

    def ends(self, within_s: float) -> list[int | None]:
        """The exit code of each run that was ever coordinated, None while it is not over. Raises Unreachable;
        EnvironmentFault where etcd refuses."""
        return [seen.end for seen in self._claimed(within_s).values()]

    def _claimed(self, within_s: float) -> Mapping[str, TurnSeen]:
        """By number. From run to run: what is stored of each may be a great deal."""
        found, at = dict[str, TurnSeen](), _ALL
        while (key := self._etcd.first_key(at, _END, within_s)) is not None:
            name = key.removeprefix(_ALL).partition(b"/")[0]
            run, at = name.decode(errors="replace"), _ALL + name + _AFTER_A_FOLDER
            with contextlib.suppress(EnvironmentFault):  # another secret's
                seen = SharedTurn(self._etcd, f"/outlast/{run}/", self._seals).look(within_s)
                if seen.claim is not None:
                    found[run] = seen
        return found

    def close(self) -> None:
        self._etcd.close()
