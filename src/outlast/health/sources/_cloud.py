"""What a cloud announces about this host: it will be taken away, restarted, or maintained.

Three endpoints on the link-local address, each asked with a short deadline and no proxy; an answer is at most 64 KiB,
redirects are not followed. A host that is in no cloud learns that once and is asked again after an hour.
"""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from outlast.health.sources._readings import Reading

__all__ = ["CLOUDS", "Cloud", "CloudNotices"]

_MOST_BYTES = 64 * 1024
_ASK_AGAIN_S = 3600.0
_MOST_NOTICES = 64  # of one host in a day: whoever announces more announces nothing
_DAY_S = 86400.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Cloud:
    """How one cloud is asked. `notices(answer)`: what it announces, as texts; "" and 404 announce nothing. `token`:
    path and headers of a PUT whose answer goes into the header `token_as`."""

    name: str
    paths: tuple[str, ...]
    headers: tuple[tuple[str, str], ...]
    notices: Callable[[str, str], list[str]]
    token: tuple[str, tuple[tuple[str, str], ...], str] | None = None


def _aws(path: str, answer: str) -> list[str]:
    found = msgspec.json.decode(answer.encode(), type=dict[str, Any] | list[Any])
    if isinstance(found, dict) and "action" in found:
        return [f"spot instance: {found['action']} at {found.get('time', 'an unknown time')}"]
    if isinstance(found, dict) and "noticeTime" in found:
        return [f"rebalance recommended at {found['noticeTime']}"]
    rows = found if isinstance(found, list) else []
    return [
        f"maintenance: {row.get('Code', '?')}, not before {row.get('NotBefore', '?')}"
        for row in rows
        if isinstance(row, dict) and row.get("State") == "active"
    ]


def _gcp(path: str, answer: str) -> list[str]:
    said = answer.strip()
    if path.endswith("preempted"):
        return ["preempted"] if said == "TRUE" else []
    return [f"maintenance: {said}"] if said not in ("NONE", "") else []


def _azure(path: str, answer: str) -> list[str]:
    found = msgspec.json.decode(answer.encode(), type=dict[str, Any])
    rows = found.get("Events", [])
    return [
        f"{row.get('EventType', '?')} of {', '.join(map(str, row.get('Resources', [])))}, not before "
        f"{row.get('NotBefore') or 'now'}"
        for row in (rows if isinstance(rows, list) else [])
        if isinstance(row, dict)
    ]


CLOUDS = (
    Cloud(
        name="aws", headers=(), notices=_aws,
        paths=(
            "/latest/meta-data/spot/instance-action", "/latest/meta-data/events/recommendations/rebalance",
            "/latest/meta-data/events/maintenance/scheduled",
        ),
        token=("/latest/api/token", (("X-aws-ec2-metadata-token-ttl-seconds", "300"),), "X-aws-ec2-metadata-token"),
    ),
    Cloud(
        name="gcp", headers=(("Metadata-Flavor", "Google"),), notices=_gcp,
        paths=("/computeMetadata/v1/instance/preempted", "/computeMetadata/v1/instance/maintenance-event"),
    ),
    Cloud(
        name="azure", headers=(("Metadata", "true"),), notices=_azure,
        paths=("/metadata/scheduledevents?api-version=2020-07-01",),
    ),
)  # fmt: skip


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: Any, **more: Any) -> None:
        return None


class CloudNotices:
    """Finds out which cloud answers, then asks that one. Each notice is told once, and no more than a host can get."""

    name = "cloud"

    def __init__(
        self,
        base: str = "http://169.254.169.254",
        clouds: Sequence[Cloud] = CLOUDS,
        *,
        timeout_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._base, self._clouds, self._timeout_s, self._clock = base, list(clouds), timeout_s, clock
        self._mine: Cloud | None = None
        self._not_before_s = -1.0
        self._told: dict[str, float] = {}  # and when
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect())

    def read(self, now_s: float) -> list[Reading]:
        """New notices; one missing reading where no cloud answers."""
        if self._mine is None:
            if self._clock() < self._not_before_s:
                return []
            self._mine = next((cloud for cloud in self._clouds if self._answers(cloud)), None)
            if self._mine is None:
                self._not_before_s = self._clock() + _ASK_AGAIN_S
                return [self._reading(now_s, "missing", "no cloud's metadata answers")]
        found: list[Reading] = []
        told_lately = sum(self._clock() - at_s < _DAY_S for at_s in self._told.values())
        for path in self._mine.paths:
            for text in self._notices(self._mine, path, found, now_s):
                if text not in self._told and told_lately < _MOST_NOTICES:
                    self._told[text], told_lately = self._clock(), told_lately + 1
                    found.append(self._reading(now_s, "cloud.notice", text[:200]))
                elif text not in self._told:
                    why = f"{self._mine.name} has announced {_MOST_NOTICES} different things; more is not believed"
                    return [*found, self._reading(now_s, "implausible", why)]
        return found

    def _reading(self, now_s: float, name: str, text: str) -> Reading:
        return Reading(at_s=now_s, source=self.name, device="host", name=name, text=text)

    def _notices(self, cloud: Cloud, path: str, found: list[Reading], now_s: float) -> list[str]:
        try:
            answer = self._get(cloud, path)
            return cloud.notices(path, answer) if answer else []
        except (OSError, ValueError, msgspec.DecodeError, AttributeError, TypeError) as error:
            found.append(self._reading(now_s, "missing", f"{cloud.name} {path}: {error}"[:200]))
            return []

    def _answers(self, cloud: Cloud) -> bool:
        try:
            if cloud.token is not None:
                return bool(self._token(cloud))
            self._open(cloud.paths[0], cloud.headers)
        except (OSError, ValueError):
            return False
        return True

    def _token(self, cloud: Cloud) -> str:
        assert cloud.token is not None
        path, headers, _ = cloud.token
        return self._open(path, headers, method="PUT")

    def _get(self, cloud: Cloud, path: str) -> str:
        headers = cloud.headers
        if cloud.token is not None:
            headers = (*headers, (cloud.token[2], self._token(cloud)))
        try:
            return self._open(path, headers)
        except urllib.error.HTTPError as error:
            if error.code == 404:  # nothing is announced
                return ""
            raise

    def _open(self, path: str, headers: Sequence[tuple[str, str]], method: str = "GET") -> str:
        request = urllib.request.Request(self._base + path, headers=dict(headers), method=method)
        with self._opener.open(request, timeout=self._timeout_s) as answer:
            data = answer.read(_MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            raise ValueError(f"an answer of more than {_MOST_BYTES} bytes")
        text: str = data.decode("utf-8", "replace")
        return text
