"""Which devices are lemons, and how sure that is: each device's record, and a frailty model over all of them. No torch.

Few devices make most failures. Each device's rate is a draw from a Gamma distribution whose mean and spread are
unknown too; the posterior mixes over them (`outlast.core.reliability.hierarchical_rates`), so that one failure of a
device that is new does not make it a lemon, and three of one that others outlive without do.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from outlast.health._diary import DiaryEntry

__all__ = ["DeviceRecord", "rank_devices", "records_of", "suspicion"]

FAILING = frozenset({"failure", "finding"})


class DeviceRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A device in the diary. `state`: "retired" is not to be used, "probation" came back from repair or retirement and
    has not worked a hundred hours since. Rates per 1,000 hours are the posterior mean and its 95 % interval. `lemon`:
    the probability that its rate is more than three times the fleet's. `week`: that of a failure or finding within a
    week of work from now on (`core.policy.DeviceHazard`: how often, how lately, how old). None without hours of work.
    """

    device: str
    host: str
    state: str
    hours: float
    failures: int
    findings: int
    tests: int
    tests_failed: int
    last_at_s: float
    last: str
    rate: float | None = None
    rate_low: float | None = None
    rate_high: float | None = None
    lemon: float | None = None
    week: float | None = None
    failed_at_s: list[float] = []
    failed_after_h: list[float] = []  # the same in hours of work


_PROBATION_H = 100.0
_EXCITE, _DECAY_S = 0.2, 3 * 86400.0  # what was likeliest on InfiniteHBD's record; see decision 0113
_WEEK_S = 7 * 86400.0


def records_of(entries: Sequence[DiaryEntry]) -> list[DeviceRecord]:
    """One record a device, in order of first appearance."""
    devices: dict[str, list[DiaryEntry]] = {}
    for entry in entries:
        if entry.kind not in ("learned", "alarm"):
            devices.setdefault(entry.device, []).append(entry)
    return [_record(device, rows, _worked_in(device, entries, rows)) for device, rows in devices.items()]


def _worked_in(device: str, entries: Sequence[DiaryEntry], rows: Sequence[DiaryEntry]) -> Sequence[DiaryEntry]:
    """What decides whether a device's probation is over: its own entries, and the hours of what it is made of (a host's
    agent by its slots)."""
    if not any(entry.kind in ("returned", "repair") for entry in rows):
        return rows
    return [e for e in entries if e.device == device or (e.kind == "hours" and e.device.startswith(f"{device}/"))]


def _record(device: str, rows: Sequence[DiaryEntry], worked: Sequence[DiaryEntry]) -> DeviceRecord:
    if device.endswith("/link"):  # it works no hours, so no probation ends: what was found before a repair is over
        mended = max((at for at, e in enumerate(rows) if e.kind in ("repair", "returned")), default=-1)
        found = {entry.run: entry for entry in rows[mended + 1 :] if entry.kind == "finding"}  # one a run
        rows = [
            *(entry for entry in rows if entry.kind not in FAILING | {"repair", "returned"}),
            *found.values(),
        ] or rows
        worked = rows
    state, since = "in service", 0.0
    for entry in worked:
        if entry.kind == "retired":
            state = "retired"
        elif entry.kind in ("returned", "repair") and state != "probation":
            state, since = "probation", 0.0
        elif entry.kind == "hours":
            since += max(entry.hours, 0.0)
            if state == "probation" and since >= _PROBATION_H:
                state = "in service"
    count = {kind: sum(entry.kind == kind for entry in rows) for kind in ("failure", "finding", "test")}
    last = next((entry for entry in reversed(rows) if entry.kind != "hours"), rows[-1])
    return DeviceRecord(
        device=device,
        host=next((entry.host for entry in reversed(rows) if entry.host), ""),
        state=state,
        hours=sum(max(entry.hours, 0.0) for entry in rows if entry.kind == "hours"),
        failures=count["failure"],
        findings=count["finding"],
        tests=count["test"],
        tests_failed=sum(entry.kind == "test" and entry.passed is False for entry in rows),
        last_at_s=max(entry.at_s for entry in rows),
        last=f"{last.kind}: {last.text}" if last.text else last.kind,
        failed_at_s=[entry.at_s for entry in rows if entry.kind in FAILING],
        failed_after_h=[_worked_before(rows, entry.at_s) for entry in rows if entry.kind in FAILING],
    )


def _worked_before(rows: Sequence[DiaryEntry], at_s: float) -> float:
    """Hours of work before a moment: an entry of h hours stands for the h hours that ended with it."""
    worked = [(entry.at_s, max(entry.hours, 0.0)) for entry in rows if entry.kind == "hours"]
    return sum(min(max(hours - (end_s - at_s) / 3600, 0.0), hours) for end_s, hours in worked)


def rank_devices(records: Sequence[DeviceRecord]) -> list[DeviceRecord]:
    """Worst first: by the probability of being a lemon, then by rate. Devices of unknown hours come last."""
    known = [record for record in records if record.hours > 0]
    if known:
        from outlast.core.policy import DeviceHazard, DeviceHistory, learn_ages
        from outlast.core.reliability import hierarchical_rates

        found = hierarchical_rates([r.failures + r.findings for r in known], [r.hours for r in known])
        prior = DeviceHazard(
            mean_rate=max(float(found.mean), 1e-9) / 3600, shape=float(found.shape), excite=_EXCITE, decay_s=_DECAY_S
        )
        courses = [
            DeviceHistory(observed_s=3600 * r.hours, failed_s=[3600 * h for h in r.failed_after_h]) for r in known
        ]
        hazard = learn_ages(courses, prior)
        now_s = max(record.last_at_s for record in records)
        known = [
            msgspec.structs.replace(
                record,
                rate=float(found.unit_mean[i]) * 1e3,
                rate_low=float(found.unit_low[i]) * 1e3,
                rate_high=float(found.unit_high[i]) * 1e3,
                lemon=float(found.lemons[i]),
                week=hazard.chance(record.failed_at_s, now_s, 3600 * record.hours, _WEEK_S),
            )
            for i, record in enumerate(known)
        ]
        known.sort(key=lambda r: (-(r.lemon or 0.0), -(r.rate or 0.0), r.device))
    rest = [record for record in records if record.hours <= 0]
    return known + sorted(rest, key=lambda r: (-(r.failures + r.findings), r.device))


def suspicion(record: DeviceRecord) -> str:
    """What is suspected of a device, on what evidence, and what to do, in a sentence; "" if nothing is."""
    told = [
        f"{number} {name}{'s' if number > 1 else ''}"
        for number, name in (
            (record.failures, "failure"),
            (record.findings, "finding"),
            (record.tests_failed, "failed test"),
        )
        if number
    ]
    if record.device.endswith("/link"):  # of a host: it works no hours, and no device is tested for it
        times = f"{record.findings} runs, the last time as" if record.findings > 1 else "a run:"
        bad = record.findings and record.state == "in service"
        return f"The link of {record.host} was bad in {times} {record.last.partition(': ')[2]}." if bad else ""
    if record.state == "retired":
        return f"{record.device} is out of service ({record.last})."
    if not told or (record.tests_failed == 0 and (record.lemon or 0.0) < 0.5):
        return ""
    sure = f"; it fails more than three times as often as others with {record.lemon:.0%}" if record.lemon else ""
    what = "is broken" if record.tests_failed else "may be a lemon"
    hours = f" in {record.hours:.0f} hours" if record.hours else ""
    return f"{record.device} {what}: {', '.join(told)}{hours}{sure}. Test it: outlast health test; else retire it."
