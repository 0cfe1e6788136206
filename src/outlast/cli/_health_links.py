"""`outlast health links`: probes between hosts, and which link of a fabric explains what they lost."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outlast.health import Fabric, LinkReport

__all__ = ["judge_run", "print_links", "probe_links"]


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


def judge_run(run: Path, fabric_file: Path | None, as_json: bool) -> int:
    """What a run's own exchanges say of its links: what TCP had to send again, and headers that came late."""
    import msgspec

    from outlast import health, observe
    from outlast.cli._runs import open_run

    with open_run(run) as (reader, _):
        events = observe.read_story(reader)
    fabric = health.load_fabric(fabric_file) if fabric_file is not None else health.fabric_of_run(events)
    pairs = health.pairs_of_run(events, fabric)
    reports = {kind: health.link_report(fabric, rows, round_trips=False) for kind, rows in pairs.items()}
    if as_json:
        print(msgspec.json.format(msgspec.json.encode({"pairs": pairs, "reports": reports}), indent=2).decode())
        return 0
    named = [text for report in reports.values() for text in report.bad]
    for text in named:
        print(text)
    loss, late = reports["loss"], reports["late"]
    if not loss.sent and not late.sent:
        print("The members of this run have said nothing of pairs of these hosts.")
        return 0
    if not named:
        print(f"No link is bad: {loss.sent:,} segments and {late.sent:,} headers between hosts.")
    if loss.sent:
        print(f"Elsewhere {loss.background:.3%} of segments are sent again on a link, of {loss.sent:,} sent.")
    if late.sent:
        print(f"Elsewhere {late.background:.3%} of headers come late by a link, of {late.sent:,}.")
    for group in (loss if loss.sent else late).ambiguous:
        print(f"Not to be told apart by these pairs: {', '.join(group)}.")
    return 0
