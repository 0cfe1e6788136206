"""`outlast health links`: probes between hosts, and which link of a fabric explains what they lost."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from outlast.core import events as ev

if TYPE_CHECKING:
    from outlast.health import Fabric, LinkReport

__all__ = ["judge_run", "links_said", "print_links", "probe_links"]


def probe_links(
    fabric: Fabric, me: str, out: Path | None, rounds: int, count: int, wait_s: float, patience_s: float
) -> int:
    """Probe for so many rounds, a line a pair and round; exit code 3 if a host never answered."""
    import msgspec

    from outlast.errors import ConfigError, EnvironmentFault
    from outlast.health import LinkProbe

    if rounds < 1 or count < 1 or not (0 < patience_s < float("inf") and 0 < wait_s < float("inf")):
        told = f"--rounds {rounds} --count {count} --wait {wait_s:g} --patience {patience_s:g}"
        raise ConfigError(f"{told} cannot be", remedy="1 or more rounds and datagrams, and times above zero")
    probe = LinkProbe(fabric, me, count=count, wait_s=wait_s)
    try:
        silent = probe.start(patience_s)
        for host in silent:
            print(f"outlast: {host} has not answered for {patience_s:g} s; its probes count as lost", file=sys.stderr)
        file = out.open("wb") if out is not None else sys.stdout.buffer
        for _ in range(rounds):
            file.write(b"".join(msgspec.json.encode(pair) + b"\n" for pair in probe.round()))
            file.flush()
        if out is not None:
            file.close()
        probe.finish(patience_s)
    except OSError as error:
        raise EnvironmentFault(f"the probes cannot be written: {error.strerror}", remedy="another --out") from error
    finally:
        probe.close()
    return 3 if silent else 0


def print_links(report: LinkReport, skipped: int) -> None:
    """The verdict, and what these probes cannot tell."""
    if skipped:
        print(f"outlast: {skipped} lines are left out: cut short, or no probes", file=sys.stderr)
    for text in report.bad or ([f"No link is bad: {report.sent:,} probes."] if report.sent else []):
        print(text)
    if report.sent:
        print(f"Elsewhere {report.background:.3%} of crossings are lost or late, after {report.rounds} rounds.")
    for group in report.ambiguous:
        print(f"Not to be told apart by these pairs: {', '.join(group)}.")
    if report.unseen:
        print(f"On no probed path, so not judged: {', '.join(report.unseen)}.")


def links_said(events: Sequence[ev.AnyEvent]) -> list[str]:
    """What `why` says of links: those that the run's own exchanges name. The fabric is the one that the run was told;
    without it, or where its file is not here, each host is known by its own link."""
    from outlast.errors import ConfigError

    if not any(wait.resent or wait.late for word in _words(events) for wait in word.waits.values()):
        return []
    from outlast import health

    told = next((str(e.config.get("fabric") or "") for e in events if isinstance(e, ev.RunStarted)), "")
    with contextlib.suppress(ConfigError):  # of one host
        with contextlib.suppress(ConfigError):  # another place than the one that the run was started on
            return health.run_links(events, health.load_fabric(Path(told)) if told else None).said
        return health.run_links(events).said
    return []


def _words(events: Sequence[ev.AnyEvent]) -> Iterator[ev.StepAnatomy]:
    return (event for event in events if isinstance(event, ev.StepAnatomy))


def judge_run(run: Path, fabric_file: Path | None, as_json: bool) -> int:
    """What a run's own exchanges say of its links: what TCP had to send again, and headers that came late."""
    import msgspec

    from outlast import health, observe
    from outlast.cli._runs import open_run

    with open_run(run) as (reader, _):
        events = observe.read_story(reader)
    found = health.run_links(events, health.load_fabric(fabric_file) if fabric_file is not None else None)
    if as_json:
        told = {
            "pairs": found.pairs,
            "reports": found.reports,
            "slow": found.slow,
            "said": found.said,
            "apart": found.apart,
        }
        print(msgspec.json.format(msgspec.json.encode(told), indent=2).decode())
        return 0
    loss, late = found.reports["loss"], found.reports["late"]
    for text in [*loss.bad, *late.bad, *found.apart]:
        print(text)
    for host in found.slow:
        print(f"Headers of {host} are not judged: its replica computes longer than others, and is late for that.")
    if not loss.sent and not late.sent:
        print("The members of this run have said nothing of pairs of these hosts.")
        return 0
    if not found.said:
        print(f"No link is bad: {loss.sent:,} segments and {late.sent:,} headers between hosts.")
    if loss.sent:
        print(f"Elsewhere {loss.background:.3%} of segments are sent again on a link, of {loss.sent:,} sent.")
    if late.sent:
        print(f"Elsewhere {late.background:.3%} of headers come late by a link, of {late.sent:,}.")
    for group in (loss if loss.sent else late).ambiguous:
        print(f"Not to be told apart by these pairs: {', '.join(group)}.")
    return 0
