"""`outlast ckpt`: look into checkpoints, check them, compare, convert, tidy up. Paths and URLs alike.

Role: the terminal over `outlast.checkpoint`. Never imports torch, but for DCP, whose format is torch's. Every command
prints JSON with `--json`. Exit codes: 0 fine, 1 `diff` found differences, 7 damage.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outlast.cli._ckpt_settings import settings_lines, settings_row
from outlast.cli._script_checks import checked_script

if TYPE_CHECKING:
    from outlast.checkpoint import Head
from outlast.cli._ckpt_parts import (
    adapter_of,
    check_format,
    chosen_tensors,
    has_metadata,
    local_folder,
    named_tensors,
    new_directory,
    newest_of,
    place_and_number,
    plain,
    print_json,
    print_table,
    progress_line,
    reader_of,
    size_text,
    store_at,
    wrong,
)

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

    store = store_at(place)
    with progress_line("generations", counts=True) as progress:
        good, bad = heads(store, progress=progress)
    rows = [_row(head) for head in good]
    rows += [{"generation": generation, "unreadable": reason} for generation, reason in bad.items()]
    rows.sort(key=lambda row: -row["generation"])
    if as_json:
        print_json(rows)
        return
    if not rows:
        print(f"{place}: no generation is published here")
    else:
        print_table(
            ["generation", "step", "view", "writers", "size", "certified", "created"], [_cells(row) for row in rows]
        )


def _row(head: Head) -> dict[str, Any]:
    return {
        "generation": head.generation, "step": head.step, "view": list(head.view), "num_writers": len(head.parts),
        "bytes": head.bytes, "certified": head.certified, "created_s": head.created_s, "run": head.run,
        **settings_row(head),
    }  # fmt: skip


def _cells(row: dict[str, Any]) -> list[str]:
    if "unreadable" in row:
        return [str(row["generation"]), f"unreadable: {plain(row['unreadable'])}", "", "", "", "", ""]
    import datetime

    made = datetime.datetime.fromtimestamp(row["created_s"], datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    view, certified = f"{row['view'][0]}.{row['view'][1]}", "yes" if row["certified"] else "no"
    size = size_text(row["bytes"])
    return [str(row["generation"]), str(row["step"]), view, str(row["num_writers"]), size, certified, made]


@app.command("show")
def show(place: Place, generation: Generation = None, names: Names = None, as_json: Json = False) -> None:
    """One generation: its head, and its tensors with dtype, shape and size."""
    with reader_of(place, generation) as reader:
        tensors: list[dict[str, Any]] = [
            {"name": spec.name, "dtype": spec.dtype, "shape": list(spec.shape), "bytes": spec.bytes,
             "num_pieces": len(reader.pieces[number])}
            for number in chosen_tensors(reader, names) for spec in [reader.tensors[number]]
        ]  # fmt: skip
        head = _row(reader.head)
    if as_json:
        print_json({**head, "tensors": tensors})
        return
    print_table(["generation", "step", "view", "writers", "size", "certified", "created"], [_cells(head)])
    print("".join(f"{plain(line)}\n" for line in settings_lines(head["settings"])))
    cells = [
        [plain(t["name"]), t["dtype"], "×".join(map(str, t["shape"])) or "scalar", size_text(t["bytes"])]
        for t in tensors
    ]
    print_table(["tensor", "dtype", "shape", "size"], cells)


@app.command("verify")
def verify_(
    place: Place,
    generation: Generation = None,
    everything: Annotated[bool, typer.Option("--all", help="Every generation, not only the newest.")] = False,
    as_json: Json = False,
) -> int:
    """Read every byte that a generation reaches; name each wrong one and the tensors it touches."""
    from outlast.checkpoint import verify

    place, number = place_and_number(place, generation)
    if everything and number is not None:
        raise wrong(f"--all and generation {number}", "one of them")
    store = store_at(place)
    newest = newest_of(store, number)  # where nothing is, nothing is right
    numbers = store.generations() if everything else [newest]
    reports = []
    for number in reversed(numbers):
        with progress_line(f"generation {number}") as progress:
            reports.append(verify(store, number, progress=progress))
    if as_json:
        print_json([{**r._asdict(), "problems": [p._asdict() for p in r.problems]} for r in reports])
    for report in [] if as_json else reports:
        wrongs = len(report.problems)
        state = f"{wrongs} problem{'s' * (wrongs != 1)}" if wrongs else "right"
        step = f", step {report.step}" if report.step >= 0 else ""  # a head that cannot be read does not say
        print(f"generation {report.generation}{step}: {state} ({size_text(report.bytes_read)} read)")
        for problem in report.problems:
            where = f" at {problem.offset}+{problem.bytes}" if problem.bytes else ""
            touched = ", ".join(map(plain, problem.tensors)) or "the whole generation"
            print(f"  {plain(problem.file)}{where}: {plain(problem.what)}\n    touches: {touched}")
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

    with reader_of(first) as a, reader_of(second) as b, progress_line("diff") as progress:
        found = diff(a, b, progress=progress)
        trees, values = a.tree != b.tree, values_that_differ(a.tree, b.tree)
        settings = changed(a.head.extra, b.head.extra)
    if as_json:
        beside = [value._asdict() for value in values]
        print_json({
            "tensors": [d._asdict() for d in found], "other_values_differ": trees, "values": beside,
            "settings": settings,
        })  # fmt: skip
        return 1 if found or trees else 0
    rows = []
    for d in found:
        share = f"{d.num_differing} of {d.num_elements}" if d.num_elements else ""
        rows.append([plain(d.name), d.kind, share, "" if d.max_abs is None else f"{d.max_abs:.6g}", d.detail])
    if rows:
        print_table(["tensor", "differs in", "elements", "largest |a-b|", ""], rows)
    if values:
        print_table(["value", "there", "here"], [[plain(v.path), plain(v.first), plain(v.second)] for v in values])
    elif trees:
        print("the order of what the states hold differs")
    if not rows and not trees:
        print("the same, to the bit")
    for name, (there, here) in settings.items():
        print(plain(f"setting {name}: {there} and {here}"))
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
        raise wrong(
            f"no option {script[0]}", "outlast ckpt resume-check --help; the script's own options follow its name"
        )
    path, module = (None, "".join(script[1:2])) if script[0] == "-m" else (script[0], None)
    checked_script(path, module, [], "outlast ckpt resume-check [OPTIONS] train.py ARGS…")
    with tempfile.TemporaryDirectory(prefix="outlast-resume-") as folder:
        place = pathlib.Path(keep or folder)
        with progress_line("runs", counts=True) as progress:
            found = resume_check(
                script, place, steps=steps, stop_at=stop_at, replicas=replicas, timeout_s=timeout, progress=progress
            )
    if as_json:
        print_json(found)
    elif found.same:
        listed = ", ".join(map(str, found.compared))
        print(f"the same, to the bit, after steps {listed}: stopped after {stop_at} and resumed on {replicas}")
    else:
        whose = "resuming changes it" if found.resumed else "two runs from the start differ already"
        more = f" (and {found.others} more)" if found.others else ""
        print(f"after step {found.step}, {plain(found.first)}{more} differs: {plain(found.how)}\n{whose}")
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
        check_format(format_)
        if strip_prefix is not None:
            raise wrong("--strip-prefix with dcp", "leave it out: DCP keeps the state as it is; safetensors has names")
    if not shard_gib > 0:
        raise wrong(f"--shard-gib {shard_gib:g} is no size", "more than 0")
    target = local_folder(target, "the directory to write,")
    new_directory(target)
    with reader_of(place, generation) as reader, progress_line(f"export to {format_}") as progress:
        numbers = chosen_tensors(reader, names)
        if format_ == "safetensors":
            write = adapter_of("_safetensors").export_safetensors
            part = names or strip_prefix is not None
            named = (
                named_tensors(reader, numbers, strip_prefix) if part else [(n, reader.tensors[n].name) for n in numbers]
            )
            files = write(reader, target, named, shard_bytes=int(shard_gib * (1 << 30)), progress=progress)
            numbers = [number for number, _ in named]
        else:
            files = adapter_of("_dcp").export_dcp(reader, target, numbers, progress=progress)
        done = {"generation": reader.head.generation, "format": format_, "files": files, "num_tensors": len(numbers)}
    if as_json:
        print_json(done)
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
        raise wrong(f"--step {step} is no step", "0 or more")
    source = local_folder(source, "the checkpoint to import,")
    store, nonce = open_store(place), secrets.token_hex(4)
    safetensors = adapter_of("_safetensors")
    read: Callable[..., int]
    with progress_line("import") as progress:
        if safetensors.is_safetensors(source):
            read = safetensors.import_safetensors
        elif has_metadata(source):
            read = adapter_of("_dcp").import_dcp
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
        print_json({"generation": number, "step": step})
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

    store = store_at(place)
    policy = Retention(keep_last=keep_last, keep_every=keep_every)
    # What a save that is under way refers to lies in one of the newest generations.
    live = occupants(place)
    protected = store.generations()[-_OF_LIVE_RUNS:] if live else []
    with progress_line("generations", counts=True) as progress:
        done = prune(store, policy, dry_run=dry_run, protected=protected, progress=progress)
    if live:
        note = f"run {live[0].run} saves here (process {live[0].pid}): its newest {_OF_LIVE_RUNS} generations stay"
        done = done._replace(note="; ".join(filter(None, [done.note, note])))
    if as_json:
        print_json({"dry_run": dry_run, **done._asdict()})
        return
    listed = ", ".join(map(str, done.generations)) or "none"
    what = f"would remove generations: {listed}" if dry_run else f"removed generations: {listed}"
    print(what + ("" if dry_run else f"; {done.files} files, {size_text(done.freed_bytes)} freed or kept for reuse"))
    if done.note:
        print(f"note: {plain(done.note)}")


# what the commands share
