"""What `outlast prove run`, `gate` and `trace` say of a campaign: on the terminal, as a page, as an exit code."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outlast.plan.replay_comparison import ReplayComparison
    from outlast.prove.script_report import ProofReport

__all__ = ["exit_code", "print_report", "replayed_words", "write_page"]


def write_page(report: ProofReport, path: Path | None) -> None:
    """If somebody wants it."""
    if path is not None:
        from outlast.prove.script_page import page_of

        path.write_text(page_of(report), encoding="utf-8")


def exit_code(report: ProofReport, strict: bool) -> int:
    """0: all of it held; `strict`: and numbers were so, and useful time was what a plan makes of it."""
    untrue = report.numbers or any(each.replayed is not None and not each.replayed.within for each in report.results)
    return 8 if report.verdict != "held" or (strict and untrue) else 0


def print_report(report: ProofReport) -> None:
    """For a person."""
    for finding in report.script_faults:
        print(f"\nthe script itself: {finding.check}: {finding.detail}")
    if report.table:
        print(f"\n{'strike':14}{'target':26}{'number':>8}{'same bits':>12}{'fleet lost':>12}{'wrong':>8}")
    for row in report.table:
        print(
            f"{row.kind:14}{row.target:26}{row.strikes:8}{row.same_bits or '':>12}{row.fleet_lost or '':>12}"
            f"{row.wrong or '':>8}"
        )
    if report.runs:
        print(f"{'runs':40}{report.runs:8}{report.same_bits:12}{report.fleet_lost:12}{report.wrong:8}")
    if report.downtimes_s:
        middle, worst = report.downtimes_s[len(report.downtimes_s) // 2], report.downtimes_s[-1]
        print(f"\ndowntime of a fault: median {middle:.3f} s, longest {worst:.3f} s")
    for failure in report.failures:
        print(f"\nrun {failure.number} ended wrong:")
        for finding in failure.findings[:8]:
            print(f"  {finding.check}: {finding.detail}")
        shortest = " (the shortest schedule that still failed)" if failure.shrunk else ""
        print(f"  again{shortest}: {failure.command}\n  kept: {failure.folder}")
    for title, lines in (("numbers that were not so", report.numbers), ("worth a look", report.notes)):
        if lines:
            print(f"\n{title}:")
        for line in lines[:8]:
            print(f"  {line}")
    for result in report.results:
        if result.replayed is not None:
            print(f"\n{replayed_words(result.replayed)}")
    _print_untested(report)
    print(f"\nseed {report.seed}: {_VERDICTS[report.verdict]}")


def _print_untested(report: ProofReport) -> None:
    """Those of this command, by reason; of the others their number."""
    from outlast.prove.script_plan import KINDS, RANK_ALONE

    if not report.runs:
        return
    mine = [(what, why) for what, why in report.untested if what in (*KINDS, RANK_ALONE)]
    print()
    for reason in dict.fromkeys(why for _, why in mine):
        print(f"not tested: {', '.join(what for what, why in mine if why == reason)} ({reason})")
    others = len(report.untested) - len(mine)
    print(f"not tested: {others} kinds for which there are other commands, or none (outlast prove catalogue)")


def replayed_words(found: ReplayComparison) -> str:
    """The run's useful time beside the plan's, and what both rest on."""
    costs, held = found.costs, "within" if found.within else "NOT within"
    back = "none was seen" if costs.return_s is None else f"{costs.return_s:.2f} s ({costs.returns} seen)"
    shares = "".join(
        f"  {name:14}{100 * seen:8.1f} %{100 * found.predicted_shares.get(name, 0.0):8.1f} %\n"
        for name, seen in found.measured_shares.items()
    )
    return (
        f"useful time (ETTR): {100 * found.measured:.1f} % measured, {100 * found.predicted:.1f} % by outlast plan for "
        f"the same {found.outages} outages\nand this run's costs: {found.points:+.1f} points, "
        f"{100 * found.apart:+.1f} %; {held} {100 * found.bound:g} %\n"
        f"  {f'of {found.seconds:.1f} s':14}{'run':>8}{'plan':>10}\n{shares}"
        f"  costs: a loss {costs.stall_s:.2f} s ({costs.stalls} seen), a return {back}, who comes in "
        f"{costs.join_s:.2f} s ({costs.joins}), a save {costs.write_s:.3f} s ({costs.saves}); places empty "
        f"{100 * found.away:.1f} %"
    )


_VERDICTS = {
    "held": "every run ended with the same bits, or was truly lost",
    "script": "the script itself cannot be repeated: nothing was struck",
    "failed": "not every run ended as it should",
    "nothing": "no run was struck",
}
