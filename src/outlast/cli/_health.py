"""`outlast health`: what is known of devices, and a test of one."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from outlast.health import DeviceTest, Diary

app = typer.Typer(add_completion=False, rich_markup_mode=None, suggest_commands=False)

DiaryOption = Annotated[
    Path | None, typer.Option("--diary", help="The diary's file; OUTLAST_DIARY, or ~/.local/state/outlast otherwise.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
DeviceArgument = Annotated[str, typer.Argument(help="A device's name in the diary, or a part that is only its.")]


@app.callback(invoke_without_command=True)
def health(context: typer.Context, diary: DiaryOption = None, as_json: JsonOption = False) -> None:
    """Find hardware that is wrong: what is suspected, tests of devices, and the diary of all of them."""
    if context.invoked_subcommand is None:
        _suspects(_open(diary), as_json)
    else:  # before the command's name they mean what they mean after it, where they are not given again
        given = ({"diary": diary} if diary else {}) | ({"as_json": True} if as_json else {})
        context.default_map = {context.invoked_subcommand: given}


def _suspects(book: Diary, as_json: bool) -> None:
    """Each suspect in a sentence, and what alarms were worth so far."""
    from outlast import health

    entries = _entries(book)
    said = [text for row in health.rank_devices(health.records_of(entries)) if (text := health.suspicion(row))]
    worth = health.foretold_of(entries)
    if as_json:
        _print({"diary": str(book.path), "suspects": said, "prediction": worth, "skipped": book.skipped})
        return
    if not entries:
        print(f"The diary {book.path} is empty: nothing is known of any device. outlast health --help")
        return
    for text in said or ["No device is suspected."]:
        print(text)
    print(f"\n{health.worth_of(worth)}")


@app.command()
def ls(diary: DiaryOption = None, as_json: JsonOption = False) -> int:
    """List devices, the most suspicious first, with rates and how sure they are."""
    from outlast import health

    book = _open(diary)
    rows = health.rank_devices(health.records_of(_entries(book)))
    if as_json:
        _print({"diary": str(book.path), "devices": rows, "skipped": book.skipped})
    elif not rows:
        print(f"The diary {book.path} is empty. outlast health learn RUN, or outlast health test, writes to it.")
    else:
        _table(rows)
    return 0


@app.command()
def show(device: DeviceArgument, diary: DiaryOption = None, as_json: JsonOption = False) -> int:
    """Show all that the diary has of one device."""
    from outlast import health

    book = _open(diary)
    entries = _entries(book)
    name = book.named(device, entries)
    mine = [entry for entry in entries if entry.device == name]
    if as_json:
        _print({"device": name, "record": health.records_of(mine)[0], "entries": mine})
        return 0
    from outlast.observe import table

    print(f"{name}: {health.records_of(mine)[0].state}\n")
    lines = [(_when(e.at_s), e.kind, f"{e.hours:.2f} h" if e.kind == "hours" else e.text, e.run) for e in mine]
    print(table(("WHEN", "KIND", "WHAT", "RUN"), lines))
    return 0


@app.command()
def note(
    device: DeviceArgument,
    text: Annotated[str, typer.Argument(help="What happened.")],
    repair: Annotated[bool, typer.Option("--repair", help="It was repaired; it is on probation from now on.")] = False,
    new: Annotated[bool, typer.Option("--new", help="The diary does not know this device yet.")] = False,
    diary: DiaryOption = None,
    as_json: JsonOption = False,
) -> int:
    """Write something down about a device."""
    return _write(diary, device, "repair" if repair else "note", text, new, as_json)


@app.command()
def retire(
    device: DeviceArgument,
    reason: Annotated[str, typer.Option("--reason", help="Why.")] = "",
    back: Annotated[bool, typer.Option("--back", help="It is used again, on probation.")] = False,
    diary: DiaryOption = None,
    as_json: JsonOption = False,
) -> int:
    """Take a device out of service in the diary, or back in."""
    return _write(diary, device, "returned" if back else "retired", reason, False, as_json)


@app.command()
def learn(
    run: Annotated[Path, typer.Argument(help="A run directory, or one that holds runs (the newest is taken).")],
    diary: DiaryOption = None,
    as_json: JsonOption = False,
) -> int:
    """Add what a run's journal tells about its devices to the diary. What was learned before is not added again."""
    import socket

    from outlast import health, observe

    book, found = _open(diary), observe.find_run(run)
    _entries(book)
    entries = health.remember_run(book, found.run_dir, socket.gethostname())
    counts = {kind: sum(e.kind == kind for e in entries) for kind in ("failure", "finding", "hours")}
    if as_json:
        _print({"run_dir": str(found.run_dir), "diary": str(book.path), "added": counts})
    elif not entries:
        print("nothing new")
    else:
        devices = len({e.device for e in entries if e.device})
        print(f"{counts['failure']} failures and {counts['finding']} findings of {devices} devices -> {book.path}")
    return 0


@app.command("test")
def ask(
    minutes: Annotated[float, typer.Option("--minutes", help="How long; one round is done in any case.")] = 0.0,
    device: Annotated[str, typer.Option("--device", help="cpu, cuda:0, …; auto is the first accelerator.")] = "auto",
    size: Annotated[int, typer.Option("--size", help="Side of the matrices.")] = 256,
    record: Annotated[bool, typer.Option("--record/--no-record", help="Write the result to the diary.")] = True,
    diary: DiaryOption = None,
    as_json: JsonOption = False,
) -> int:
    """Ask a device what the answers are known to, for some minutes. Exit code 4 if any answer was wrong."""
    import socket

    from outlast import health
    from outlast.errors import ConfigError, DeviceFault

    if not (0.0 <= minutes < float("inf")):
        raise ConfigError(f"--minutes {minutes:g} is no duration", remedy="0 or more")
    if size < 16 or size % 4:
        raise ConfigError(f"--size {size} is no side", remedy="a multiple of 4, 16 or more; 256 is the default")
    book = _open(diary)
    answers = health.Answers(book.path.with_name("answers.json"))
    shown = _progress(minutes) if minutes and not as_json else None
    found = health.ask_device(health.device_of(device), seconds=60 * minutes, size=size, answers=answers, told=shown)
    host = socket.gethostname()
    if record:
        text = f"{found.rounds} rounds, {found.num_wrong} wrong answers"
        text += f", first {found.wrong[0].case}: {found.wrong[0].kind}" if found.wrong else ""
        name = found.device if found.device.partition(":")[0] not in ("cpu", "cuda") else f"{host}/{found.device}"
        book.write("test", name, text, host=host, passed=found.passed)
    if as_json:
        _print(found)
    else:
        _tell(found)
    return 0 if found.passed else DeviceFault.exit_code


@app.command()
def links(
    fabric: Annotated[
        Path | None, typer.Argument(help="TOML: hosts and their addresses, paths and their links.")
    ] = None,
    me: Annotated[str, typer.Option("--me", help="Probe from this host: run it on every host.")] = "",
    out: Annotated[Path | None, typer.Option("--out", help="With --me: where to write the probes.")] = None,
    rounds: Annotated[int, typer.Option("--rounds", help="With --me: rounds of probes.")] = 50,
    count: Annotated[int, typer.Option("--count", help="With --me: datagrams to each host a round.")] = 20,
    wait: Annotated[float, typer.Option("--wait", help="With --me: seconds to wait for a round's last answers.")] = 0.5,
    patience: Annotated[float, typer.Option("--patience", help="With --me: seconds to wait for the others.")] = 30.0,
    read: Annotated[list[Path] | None, typer.Option("--read", help="Probes of a host; once for each.")] = None,
    run: Annotated[
        Path | None, typer.Option("--run", help="Judge by the exchanges of this run; FABRIC may be left out.")
    ] = None,
    as_json: JsonOption = False,
) -> int:
    """Probe the links between hosts, and name the bad ones. Without --me and --read: what probes could tell at all."""
    from outlast import health
    from outlast.cli._health_links import judge_run, print_links, probe_links
    from outlast.errors import ConfigError

    if run is not None:
        if me or read or out is not None:
            raise ConfigError("--run judges what a run has seen", remedy="without --me, --out and --read")
        return judge_run(run, fabric, as_json)
    if fabric is None:
        raise ConfigError("no fabric is named", remedy="outlast health links FABRIC.toml, or --run RUN")
    found = health.load_fabric(fabric)
    if me and read:
        raise ConfigError("--me probes, --read judges what was probed", remedy="one after the other")
    if me:
        return probe_links(found, me, out, rounds, count, wait, patience)
    if out is not None:
        raise ConfigError("--out is where --me writes", remedy="give --me, or leave --out out")
    probes, skipped = health.read_probes(read or [])
    report = health.link_report(found, probes)
    if as_json:
        _print(report)
    else:
        print_links(report, skipped)
    return 0


def _progress(minutes: float):  # type: ignore[no-untyped-def]
    """Says how far the test is, at most every ten seconds."""
    last = [0.0]

    def told(rounds: int, seconds: float) -> None:
        if seconds - last[0] >= 10:
            last[0] = seconds
            print(f"{seconds / 60:.1f} of {minutes:g} min, {rounds} rounds", file=sys.stderr, flush=True)

    return told


def _tell(found: DeviceTest) -> None:
    from outlast.observe import table

    asked = f"{found.num_asked} answers in {found.rounds} rounds, {found.seconds:.1f} s"
    if found.passed:
        new = (
            f"; {found.learned} of them were not known for a device of this kind, and are kept" if found.learned else ""
        )
        print(f"{found.device} ({found.device_kind}): all {asked} right{new}")
        bound = 1 - 0.05 ** (1 / max(found.num_asked, 1))
        print(f"With 95 % confidence fewer than {bound:.2g} of its answers are wrong.")
        return
    print(f"{found.device} ({found.device_kind}): {found.num_wrong} of {asked} WRONG\n")
    rows = [(w.case, str(w.round), w.kind, w.evidence) for w in found.wrong]
    print(table(("CASE", "ROUND", "KIND", "EVIDENCE"), rows))
    print(f"\nTake it out of service: outlast health retire {found.device!r}; test it again when it is cool.")


def _open(path: Path | None) -> Diary:
    from outlast import health

    return health.Diary(path or health.default_diary())


def _entries(book: Diary):  # type: ignore[no-untyped-def]
    """Everything in the diary; what had to be left out is said once."""
    entries = book.entries()
    if book.skipped:
        told = ", ".join(f"{count} {reason}" for reason, count in book.skipped.items())
        print(f"outlast: lines of {book.path} are left out: {told}", file=sys.stderr)
    return entries


def _write(diary: Path | None, device: str, kind: str, text: str, new: bool, as_json: bool) -> int:
    book = _open(diary)
    name = device if new else book.named(device, _entries(book))
    entry = book.write(kind, name, text)  # type: ignore[arg-type]
    if as_json:
        _print(entry)
    else:
        print(f"{name}: {kind}{f': {text}' if text else ''}")
    return 0


def _table(rows) -> None:  # type: ignore[no-untyped-def]
    from outlast.observe import table

    def rate(row) -> str:  # type: ignore[no-untyped-def]
        return "" if row.rate is None else f"{row.rate:.3g} ({row.rate_low:.2g} to {row.rate_high:.2g})"

    lines = [
        (
            r.device,
            r.state,
            f"{r.hours:.1f}",
            str(r.failures),
            str(r.findings),
            f"{r.tests_failed}/{r.tests}",
            rate(r),
            "" if r.lemon is None else f"{r.lemon:.0%}",
            "" if r.week is None else f"{r.week:.1%}",
            _when(r.last_at_s),
        )
        for r in rows
    ]
    heads = (
        "DEVICE",
        "STATE",
        "HOURS",
        "FAILURES",
        "FINDINGS",
        "TESTS FAILED",
        "PER 1,000 H (95 %)",
        "LEMON",
        "A WEEK",
        "LAST",
    )
    print(table(heads, lines))
    print("\nLEMON: probability that its rate is more than three times the fleet's.")
    print("A WEEK: probability that it fails within the next week of work, by how often and how lately it has.")


def _when(at_s: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M", time.gmtime(at_s))
    except (OverflowError, ValueError, OSError):
        return f"{at_s:g} s"


def _print(value: object) -> None:
    import msgspec

    print(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())
