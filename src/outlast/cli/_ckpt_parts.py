"""What the commands of `outlast ckpt` share: places and generations as they are given, and tables as they are shown."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outlast.checkpoint import Reader, Store
    from outlast.errors import ConfigError
__all__ = [
    "adapter_of",
    "check_format",
    "chosen_tensors",
    "has_metadata",
    "local_folder",
    "named_tensors",
    "new_directory",
    "newest_of",
    "place_and_number",
    "plain",
    "print_json",
    "print_table",
    "progress_line",
    "reader_of",
    "size_text",
    "store_at",
    "wrong",
]


def store_at(place: str) -> Store:
    """An existing place: looking must never make a directory."""
    import os

    from outlast.checkpoint import open_store
    from outlast.checkpoint.occupancy import local_path
    from outlast.errors import ConfigError

    path = local_path(place)
    if path is not None and not os.path.isdir(path):
        raise ConfigError(f"{place} is no directory", remedy="give a checkpoint directory or a URL")
    return open_store(place)


def local_folder(place: str, what: str) -> str:
    """The directory or file that other formats are read from and written to: a path, or a file:// URL."""
    from outlast.checkpoint.occupancy import local_path

    path = local_path(place)
    if path is None:
        raise wrong(f"{what} {place} is not on this machine", "a path or a file:// URL; copy it with the store's tools")
    return path


def newest_of(store: Store, generation: int | None) -> int:
    from outlast.errors import ConfigError

    numbers = store.generations()
    if not numbers or (generation is not None and generation not in numbers):
        there = ", ".join(map(str, numbers[-10:])) or "none"
        wanted = "no generation" if generation is None else f"no generation {generation}"
        raise ConfigError(f"{wanted} in {store.url}", remedy=f"there: {there}; `outlast ckpt ls` lists them")
    return numbers[-1] if generation is None else generation


@contextlib.contextmanager
def reader_of(place: str, generation: int | None = None) -> Iterator[Reader]:
    from outlast.checkpoint import Reader
    from outlast.checkpoint.manifest import parse_head
    from outlast.checkpoint.store import generation_name

    place, generation = place_and_number(place, generation)
    store = store_at(place)
    number = newest_of(store, generation)
    with store.in_use(number) as data:
        head = parse_head(data, file=generation_name(number), generation=number)
        with Reader(head, [store]) as reader:
            yield reader


def place_and_number(text: str, generation: int | None) -> tuple[str, int | None]:
    """`PLACE@N` is generation N of PLACE, wherever a generation is meant."""
    import os

    place, at, number = text.rpartition("@")
    if not at or not number.isdigit() or os.path.isdir(text):
        return text, generation
    if generation not in (None, int(number)):
        raise wrong(f"{text} and --generation {generation}", "one of them")
    return place, int(number)


def wrong(what: str, remedy: str) -> ConfigError:
    from outlast.errors import ConfigError

    return ConfigError(what, remedy=remedy)


def new_directory(target: str) -> None:
    """Files of two exports in one directory would be read as one."""
    import os

    if os.path.lexists(target) and (not os.path.isdir(target) or os.listdir(target)):
        raise wrong(f"{target} is not an empty directory", "give a new one")


def adapter_of(name: str) -> Any:
    """By name: the adapters stand beside the command line, each needs its own extra."""
    return importlib.import_module(f"outlast.adapters.{name}")


def has_metadata(path: str) -> bool:
    import os

    return os.path.isfile(os.path.join(path, ".metadata"))


def check_format(name: str) -> None:
    from outlast.errors import ConfigError, nearest

    if name != "dcp":
        raise ConfigError(f"no format {name!r}", remedy=nearest(name, ["safetensors", "dcp"], "safetensors or dcp"))


def chosen_tensors(reader: Reader, patterns: list[str] | None) -> list[int]:
    """Numbers of the tensors that match; a pattern that none matches is a mistake."""
    from outlast.checkpoint.names import chosen

    return chosen([plain(spec.name) for spec in reader.tensors], patterns)


def named_tensors(reader: Reader, numbers: list[int], strip: str | None) -> list[tuple[int, str]]:
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
        raise wrong(f"no name begins with {strip!r}", f"there are {', '.join(plain(n) for _, n in found[:8])}")
    return [(n, name.removeprefix(strip)) for n, name in found]


def print_json(value: Any) -> None:
    import msgspec

    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n")


def plain(text: str) -> str:
    """Names come from files: nothing of them may steer the terminal."""
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)


def size_text(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError("unreachable")


def print_table(header: list[str], rows: list[list[str]]) -> None:
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    for row in [header, *rows]:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


@contextlib.contextmanager
def progress_line(label: str, *, counts: bool = False) -> Iterator[Callable[[int, int], None] | None]:
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
