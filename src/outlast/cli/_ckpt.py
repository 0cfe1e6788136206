"""`outlast ckpt`: look into checkpoints, check them, compare, convert, tidy up. Paths and URLs alike.

Role: the terminal over `outlast.checkpoint`. Never imports torch, but for DCP, whose format is torch's. Every command
prints JSON with `--json`. Exit codes: 0 fine, 1 `diff` found differences, 7 damage.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outlast.cli._ckpt_settings import settings_lines, settings_row

if TYPE_CHECKING:
    from outlast.checkpoint import Head, Reader, Store
    from outlast.errors import ConfigError

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    suggest_commands=False,
    no_args_is_help=True,
    help="List, show, verify, compare, convert and prune checkpoints.",
)

_OF_LIVE_RUNS = 8  # generations; its saves in flight are far fewer

Place = Annotated[str, typer.Argument(help="A checkpoint directory or URL (file://, s3://, gs://, az://).")]
Generation = Annotated[int | None, typer.Option("--generation", "-g", help="Which one. Default: the newest.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Names = Annotated[list[str] | None, typer.Option("--names", "-n", help="Only tensors that match (* and ?).")]


@app.callback()
def _main() -> None:
    """List, show, verify, compare, convert and prune checkpoints."""


@app.command("ls")
def ls(place: Place, as_json: Json = False) -> None:
    """The generations of a checkpoint directory, newest first, with those that cannot be read."""
    from outlast.checkpoint import heads

    store = _store(place)
    with _progress("generations", counts=True) as progress:
        good, bad = heads(store, progress=progress)
    rows = [_row(head) for head in good]
    rows += [{"generation": generation, "unreadable": reason} for generation, reason in bad.items()]
    rows.sort(key=lambda row: -row["generation"])
    if as_json:
        _json(rows)
        return
    if not rows:
        print(f"{place}: no generation is published here")
    else:
        _table(["generation", "step", "view", "writers", "size", "certified", "created"], [_cells(row) for row in rows])


def _row(head: Head) -> dict[str, Any]:
    return {
        "generation": head.generation, "step": head.step, "view": list(head.view), "num_writers": len(head.parts),
        "bytes": head.bytes, "certified": head.certified, "created_s": head.created_s, "run": head.run,
        **settings_row(head),
    }  # fmt: skip


def _cells(row: dict[str, Any]) -> list[str]:
    if "unreadable" in row:
        return [str(row["generation"]), f"unreadable: {_plain(row['unreadable'])}", "", "", "", "", ""]
    import datetime

    made = datetime.datetime.fromtimestamp(row["created_s"], datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    view, certified = f"{row['view'][0]}.{row['view'][1]}", "yes" if row["certified"] else "no"
    size = _size(row["bytes"])
    return [str(row["generation"]), str(row["step"]), view, str(row["num_writers"]), size, certified, made]


@app.command("show")
def show(place: Place, generation: Generation = None, names: Names = None, as_json: Json = False) -> None:
    """One generation: its head, and its tensors with dtype, shape and size."""
    with _reader(place, generation) as reader:
        tensors: list[dict[str, Any]] = [
            {"name": spec.name, "dtype": spec.dtype, "shape": list(spec.shape), "bytes": spec.bytes,
             "num_pieces": len(reader.pieces[number])}
            for number in _chosen(reader, names) for spec in [reader.tensors[number]]
        ]  # fmt: skip
        head = _row(reader.head)
    if as_json:
        _json({**head, "tensors": tensors})
        return
    _table(["generation", "step", "view", "writers", "size", "certified", "created"], [_cells(head)])
    print("".join(f"{_plain(line)}\n" for line in settings_lines(head["settings"])))
    cells = [
        [_plain(t["name"]), t["dtype"], "×".join(map(str, t["shape"])) or "scalar", _size(t["bytes"])] for t in tensors
    ]
    _table(["tensor", "dtype", "shape", "size"], cells)


@app.command("verify")
def verify_(
    place: Place,
    generation: Generation = None,
    everything: Annotated[bool, typer.Option("--all", help="Every generation, not only the newest.")] = False,
    as_json: Json = False,
) -> int:
    """Read every byte that a generation reaches; name each wrong one and the tensors it touches."""
    from outlast.checkpoint import verify

    place, number = _at(place, generation)
    if everything and number is not None:
        raise _wrong(f"--all and generation {number}", "one of them")
    store = _store(place)
    newest = _newest(store, number)  # where nothing is, nothing is right
    numbers = store.generations() if everything else [newest]
    reports = []
    for number in reversed(numbers):
        with _progress(f"generation {number}") as progress:
            reports.append(verify(store, number, progress=progress))
    if as_json:
        _json([{**r._asdict(), "problems": [p._asdict() for p in r.problems]} for r in reports])
    for report in [] if as_json else reports:
        state = f"{len(report.problems)} problems" if report.problems else "right"
        print(f"generation {report.generation}, step {report.step}: {state} ({_size(report.bytes_read)} read)")
        for problem in report.problems:
            where = f" at {problem.offset}+{problem.bytes}" if problem.bytes else ""
            touched = ", ".join(map(_plain, problem.tensors)) or "the whole generation"
            print(f"  {_plain(problem.file)}{where}: {_plain(problem.what)}\n    touches: {touched}")
    return 7 if any(report.problems for report in reports) else 0


@app.command("diff")
def diff_(
    first: Annotated[str, typer.Argument(help="A directory or URL, with @N for generation N.")],
    second: Annotated[str, typer.Argument(help="Likewise.")],
    as_json: Json = False,
) -> int:
    """Which tensors differ between two generations, where first, and by how much."""
    from outlast.checkpoint.diff import diff
    from outlast.checkpoint.head_facts import changed
    from outlast.checkpoint.values import values_that_differ

    with _reader(first) as a, _reader(second) as b, _progress("diff") as progress:
        found = diff(a, b, progress=progress)
        trees, values = a.tree != b.tree, values_that_differ(a.tree, b.tree)
        settings = changed(a.head.extra, b.head.extra)
    if as_json:
        beside = [value._asdict() for value in values]
        _json({
            "tensors": [d._asdict() for d in found], "other_values_differ": trees, "values": beside,
            "settings": settings,
        })  # fmt: skip
        return 1 if found or trees else 0
    rows = []
    for d in found:
        share = f"{d.num_differing} of {d.num_elements}" if d.num_elements else ""
        rows.append([_plain(d.name), d.kind, share, "" if d.max_abs is None else f"{d.max_abs:.6g}", d.detail])
    if rows:
        _table(["tensor", "differs in", "elements", "largest |a-b|", ""], rows)
    if values:
        _table(["value", "there", "here"], [[_plain(v.path), _plain(v.first), _plain(v.second)] for v in values])
    elif trees:
        print("the order of what the states hold differs")
    if not rows and not trees:
        print("the same, to the bit")
    for name, (there, here) in settings.items():
        print(_plain(f"setting {name}: {there} and {here}"))
    return 1 if found or trees else 0


@app.command("resume-check", context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True})
def resume_check_(
    script: Annotated[list[str], typer.Argument(help="The training script (or -m MODULE) and its own arguments.")],
    steps: Annotated[int, typer.Option(help="How many steps the runs make.")] = 8,
    stop_at: Annotated[int, typer.Option(help="After how many of them the second run stops.")] = 4,
    replicas: Annotated[int, typer.Option(help="Resume on so many replicas.")] = 1,
    timeout: Annotated[float, typer.Option(help="Seconds that one run may take.")] = 600.0,
    keep: Annotated[str | None, typer.Option(help="A directory to keep the checkpoints of the runs in.")] = None,
    as_json: Json = False,
) -> int:
    """Prove that stopping and resuming a script equals never stopping, to the bit; else name what differs first."""
    import pathlib
    import tempfile

    from outlast.prove.resuming import resume_check

    if script[0].startswith("-") and script[0] != "-m":
        raise _wrong(
            f"no option {script[0]}", "outlast ckpt resume-check --help; the script's own options follow its name"
        )
    with tempfile.TemporaryDirectory(prefix="outlast-resume-") as folder:
        place = pathlib.Path(keep or folder)
        with _progress("runs", counts=True) as progress:
            found = resume_check(
                script, place, steps=steps, stop_at=stop_at, replicas=replicas, timeout_s=timeout, progress=progress
            )
    if as_json:
        _json(found)
    elif found.same:
        listed = ", ".join(map(str, found.compared))
        print(f"the same, to the bit, after steps {listed}: stopped after {stop_at} and resumed on {replicas}")
    else:
        whose = "resuming changes it" if found.resumed else "two runs from the start differ already"
        more = f" (and {found.others} more)" if found.others else ""
        print(f"after step {found.step}, {_plain(found.first)}{more} differs: {_plain(found.how)}\n{whose}")
        print("what the loop changes must be in protect(state=…); random numbers must come from torch, numpy or random")
    return 0 if found.same else 1


@app.command("export")
def export(
    place: Place,
    target: Annotated[str, typer.Argument(help="The directory to write.")],
    format_: Annotated[str, typer.Option("--format", "-f", help="safetensors or dcp.")] = "safetensors",
    generation: Generation = None,
    names: Names = None,
    strip_prefix: Annotated[
        str | None, typer.Option(help="safetensors: take this off the names; `model` for a model's own names.")
    ] = None,
    shard_gib: Annotated[float, typer.Option(help="safetensors: size at which a new file begins, in GiB.")] = 5.0,
    as_json: Json = False,
) -> None:
    """Write a generation, or some of its tensors, in another format. Memory stays at a tensor, however large."""
    if format_ != "safetensors":
        _known_format(format_)
        if strip_prefix is not None:
            raise _wrong("--strip-prefix with dcp", "leave it out: DCP keeps the state as it is; safetensors has names")
    if not shard_gib > 0:
        raise _wrong(f"--shard-gib {shard_gib:g} is no size", "more than 0")
    target = _local(target, "the directory to write,")
    _new_directory(target)
    with _reader(place, generation) as reader, _progress(f"export to {format_}") as progress:
        numbers = _chosen(reader, names)
        if format_ == "safetensors":
            write = _adapter("_safetensors").export_safetensors
            part = names or strip_prefix is not None
            named = _named(reader, numbers, strip_prefix) if part else [(n, reader.tensors[n].name) for n in numbers]
            files = write(reader, target, named, shard_bytes=int(shard_gib * (1 << 30)), progress=progress)
            numbers = [number for number, _ in named]
        else:
            files = _adapter("_dcp").export_dcp(reader, target, numbers, progress=progress)
        done = {"generation": reader.head.generation, "format": format_, "files": files, "num_tensors": len(numbers)}
    if as_json:
        _json(done)
    else:
        print(f"generation {done['generation']}: {len(numbers)} tensors as {format_} in {target} ({len(files)} files)")


@app.command("import")
def import_(
    source: Annotated[str, typer.Argument(help="A safetensors file, index or directory, or a DCP directory.")],
    place: Place,
    step: Annotated[int, typer.Option(help="The step that the generation is to say.")] = 0,
    as_json: Json = False,
) -> None:
    """Make a generation out of another format's checkpoint."""
    import secrets
    import time

    from outlast.checkpoint import open_store
    from outlast.errors import ConfigError, Damage

    if step < 0:
        raise _wrong(f"--step {step} is no step", "0 or more")
    source = _local(source, "the checkpoint to import,")
    store, nonce = open_store(place), secrets.token_hex(4)
    safetensors = _adapter("_safetensors")
    read: Callable[..., int]
    with _progress("import") as progress:
        if safetensors.is_safetensors(source):
            read = safetensors.import_safetensors
        elif _has_metadata(source):
            read = _adapter("_dcp").import_dcp
        else:
            raise ConfigError(
                f"{source} is neither a safetensors nor a DCP checkpoint",
                remedy="give a .safetensors file, a directory of them, or a directory with a .metadata",
            )
        try:
            number = read(source, store, step=step, created_s=time.time(), nonce=nonce, progress=progress)
        except Damage as error:  # of a file that is none of ours
            error.remedy = "nothing was imported; copy the source again, or write it anew where it comes from"
            raise
    if as_json:
        _json({"generation": number, "step": step})
    else:
        print(f"{source} is generation {number} of {place}")


@app.command("prune")
def prune_(
    place: Place,
    keep_last: Annotated[int, typer.Option(help="Keep the newest N.")] = 3,
    keep_every: Annotated[int, typer.Option(help="Keep every N-th for good (0: none).")] = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go, remove nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Remove old generations, and the files that none reaches any more. Certified ones make room only for such."""
    from outlast.checkpoint import Retention, prune
    from outlast.checkpoint.occupancy import occupants

    store = _store(place)
    policy = Retention(keep_last=keep_last, keep_every=keep_every)
    # What a save that is under way refers to lies in one of the newest generations.
    live = occupants(place)
    protected = store.generations()[-_OF_LIVE_RUNS:] if live else []
    with _progress("generations", counts=True) as progress:
        done = prune(store, policy, dry_run=dry_run, protected=protected, progress=progress)
    if live:
        note = f"run {live[0].run} saves here (process {live[0].pid}): its newest {_OF_LIVE_RUNS} generations stay"
        done = done._replace(note="; ".join(filter(None, [done.note, note])))
    if as_json:
        _json({"dry_run": dry_run, **done._asdict()})
        return
    listed = ", ".join(map(str, done.generations)) or "none"
    what = f"would remove generations: {listed}" if dry_run else f"removed generations: {listed}"
    print(what + ("" if dry_run else f"; {done.files} files, {_size(done.freed_bytes)} freed or kept for reuse"))
    if done.note:
        print(f"note: {_plain(done.note)}")


# what the commands share


def _store(place: str) -> Store:
    """An existing place: looking must never make a directory."""
    import os

    from outlast.checkpoint import open_store
    from outlast.checkpoint.occupancy import local_path
    from outlast.errors import ConfigError

    path = local_path(place)
    if path is not None and not os.path.isdir(path):
        raise ConfigError(f"{place} is no directory", remedy="give a checkpoint directory or a URL")
    return open_store(place)


def _local(place: str, what: str) -> str:
    """The directory or file that other formats are read from and written to: a path, or a file:// URL."""
    from outlast.checkpoint.occupancy import local_path

    path = local_path(place)
    if path is None:
        raise _wrong(
            f"{what} {place} is not on this machine", "a path or a file:// URL; copy it with the store's tools"
        )
    return path


def _newest(store: Store, generation: int | None) -> int:
    from outlast.errors import ConfigError

    numbers = store.generations()
    if not numbers or (generation is not None and generation not in numbers):
        there = ", ".join(map(str, numbers[-10:])) or "none"
        wanted = "no generation" if generation is None else f"no generation {generation}"
        raise ConfigError(f"{wanted} in {store.url}", remedy=f"there: {there}; `outlast ckpt ls` lists them")
    return numbers[-1] if generation is None else generation


@contextlib.contextmanager
def _reader(place: str, generation: int | None = None) -> Iterator[Reader]:
    from outlast.checkpoint import Reader
    from outlast.checkpoint.manifest import parse_head
    from outlast.checkpoint.store import generation_name

    place, generation = _at(place, generation)
    store = _store(place)
    number = _newest(store, generation)
    with store.in_use(number) as data:
        head = parse_head(data, file=generation_name(number), generation=number)
        with Reader(head, [store]) as reader:
            yield reader


def _at(text: str, generation: int | None) -> tuple[str, int | None]:
    """`PLACE@N` is generation N of PLACE, wherever a generation is meant."""
    import os

    place, at, number = text.rpartition("@")
    if not at or not number.isdigit() or os.path.isdir(text):
        return text, generation
    if generation not in (None, int(number)):
        raise _wrong(f"{text} and --generation {generation}", "one of them")
    return place, int(number)


def _wrong(what: str, remedy: str) -> ConfigError:
    from outlast.errors import ConfigError

    return ConfigError(what, remedy=remedy)


def _new_directory(target: str) -> None:
    """Files of two exports in one directory would be read as one."""
    import os

    if os.path.lexists(target) and (not os.path.isdir(target) or os.listdir(target)):
        raise _wrong(f"{target} is not an empty directory", "give a new one")


def _adapter(name: str) -> Any:
    """By name: the adapters stand beside the command line, each needs its own extra."""
    return importlib.import_module(f"outlast.adapters.{name}")


def _has_metadata(path: str) -> bool:
    import os

    return os.path.isfile(os.path.join(path, ".metadata"))


def _known_format(name: str) -> None:
    from outlast.errors import ConfigError, nearest

    if name != "dcp":
        raise ConfigError(f"no format {name!r}", remedy=nearest(name, ["safetensors", "dcp"], "safetensors or dcp"))


def _chosen(reader: Reader, patterns: list[str] | None) -> list[int]:
    """Numbers of the tensors that match; a pattern that none matches is a mistake."""
    from outlast.checkpoint.names import chosen

    return chosen([_plain(spec.name) for spec in reader.tensors], patterns)


def _named(reader: Reader, numbers: list[int], strip: str | None) -> list[tuple[int, str]]:
    """What a model's file is to hold of these tensors, under the names that the model itself has for them: without
    `strip`, with tied ones under each of their names, and without buffers that models leave out of files."""
    from outlast.checkpoint.names import MODEL, model_names

    names, known = {n: reader.tensors[n].name for n in numbers}, model_names(reader.tree)
    number_of = {name: n for n, name in names.items()}
    found = [(n, name) for n, name in names.items() if name not in known.transient] or list(names.items())
    found += [(number_of[name], other) for other, name in known.tied.items() if name in number_of]
    if strip is None:
        if found and all(name.startswith(MODEL) for _, name in found):
            print(f"note: names keep {MODEL!r}; with --strip-prefix model they are the model's own", file=sys.stderr)
        return found
    strip = strip.removesuffix(".") + "."
    if not any(name.startswith(strip) for _, name in found):
        raise _wrong(f"no name begins with {strip!r}", f"there are {', '.join(_plain(n) for _, n in found[:8])}")
    return [(n, name.removeprefix(strip)) for n, name in found]


def _json(value: Any) -> None:
    import msgspec

    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n")


def _plain(text: str) -> str:
    """Names come from files: nothing of them may steer the terminal."""
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError("unreachable")


def _table(header: list[str], rows: list[list[str]]) -> None:
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    for row in [header, *rows]:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


@contextlib.contextmanager
def _progress(label: str, *, counts: bool = False) -> Iterator[Callable[[int, int], None] | None]:
    """A bar on a terminal's standard error, of bytes or (`counts`) of things; nothing anywhere else."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TimeElapsedColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    of_bytes = (DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    of_things = (MofNCompleteColumn(), TimeElapsedColumn())
    columns = ("{task.description}", BarColumn(), *(of_things if counts else of_bytes))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(label, total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)
