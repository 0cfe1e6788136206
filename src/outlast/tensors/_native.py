"""The compiled path: C of this package made into a shared object once, kept in the user's cache.

Role: turn a program, or a file, into a library, off the caller's path, and have the work of a program shared out by
torch's own threads: others would stand behind these, which OpenMP keeps spinning after each of torch's operations. What
is computed has the bits of its eager counterpart, so a caller may meet either path at any time: `library()` answers
None until the object is there.

Invariants: nothing is compiled unless asked (`build`), nothing is loaded that another user could have written, an
object is published by one rename under a name made of everything that went into it. Not here: what the functions mean
(`_kernels.c`), and the rules (`_rules.py`).
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import functools
import hashlib
import importlib.resources
import os
import shutil
import stat
import subprocess
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

from outlast.tensors._program import Op, Program

__all__ = [
    "ALONE", "COORDINATE", "GRAM", "MIXED", "Task", "build", "cache_folder", "emit", "forget", "library",
    "run",
]  # fmt: skip

FLAGS = ("-O3", "-march=native", "-std=gnu11", "-fPIC", "-shared", "-ffp-contract=off", "-fno-math-errno",
         "-fno-trapping-math")  # fmt: skip
COMPILE_TIMEOUT_S = 120.0
MAX_ROWS = 64  # beyond it a program is longer than a compiler unrolls well

Source = Program | str
"""What is compiled: a program, in `_kernels.c`, or a file of this package by its name."""

_loaded: dict[Source, ctypes.CDLL | None] = {}
_lock = threading.Lock()


class Task(ctypes.Structure):
    """One call's work: `struct task` of `_kernels.c`."""

    _fields_ = (
        *((name, ctypes.c_long) for name in ("next", "num_columns", "what", "bad", "failed")),
        ("rows", ctypes.c_void_p), ("num_rows", ctypes.c_long), ("num_data", ctypes.c_long),
        ("left", ctypes.c_void_p), ("right", ctypes.c_void_p), ("num_sums", ctypes.c_long),
        *((name, ctypes.c_void_p) for name in ("start", "index", "weight", "equal")), ("num_mixed", ctypes.c_long),
        ("out", ctypes.c_void_p), ("grams", ctypes.c_void_p),
    )  # fmt: skip


COORDINATE, MIXED, ALONE, GRAM = range(4)  # what a task does
_FUNCTIONS: dict[str, list[Any]] = {  # the result's type, then the arguments'
    "work": [None, ctypes.c_void_p],
    "add_all": [ctypes.c_uint64, *[ctypes.c_void_p] * 4, ctypes.c_long, ctypes.c_int],
    "reduce": [ctypes.c_uint64, ctypes.c_void_p],
    "add_blocks": [None, *[ctypes.c_void_p] * 2, *[ctypes.c_long] * 2, ctypes.c_uint64, ctypes.c_void_p],
    "weigh": [None, *[ctypes.c_void_p] * 3, ctypes.c_long, *[ctypes.c_void_p] * 2],
    "check_product": [ctypes.c_long, *[ctypes.c_void_p] * 8, ctypes.c_long, *[ctypes.c_void_p] * 2],
}


def emit(program: Program) -> str:
    """The C of one program: a loop over columns whose body is the program, one line an operation."""
    rows = "\n".join(f"    const float *restrict x{i} = x[{i}];" for i in range(program.num_rows))
    body = "\n".join(f"        {_line(place, op)}" for place, op in enumerate(program.ops))
    result = f"v{program.result}" if program.result_narrow else f"(float)v{program.result}"
    return (
        "static void program(const float *const *x, long n, float *restrict out, int *bad)\n{\n"
        f"{rows}\n    int any = 0;\n    for (long l = 0; l < n; l++) {{\n{body}\n"
        f"        any |= (v{program.high} > FLT_MAX) | (v{program.low} < -FLT_MAX);\n"
        f"        out[l] = {result};\n    }}\n    *bad |= any;\n}}\n"
    )


def _line(place: int, op: Op) -> str:
    a, b, c, d = (*(f"v{arg}" for arg in op.args), *[""] * 4)[:4]
    constant = float(op.const).hex()
    if op.kind == "row":
        read = f"x{int(op.const)}[l]"
        return f"const float v{place} = {read} < INFINITY ? {read} : INFINITY;"
    if op.kind in ("min", "max"):
        return f"const float v{place} = {a} {'<' if op.kind == 'min' else '>'} {b} ? {a} : {b};"
    value = {
        "wide": f"(double){a}",
        "const": constant,
        "add": f"{a} + {b}",
        "sub": f"{a} - {b}",
        "div": f"{a} / {constant}",
        "pick": f"{a} < {b} ? {c} : {d}",
    }[op.kind]
    return f"const double v{place} = {value};"


def cache_folder() -> Path:
    """Where shared objects are kept: $XDG_CACHE_HOME or ~/.cache, then outlast/kernels."""
    root = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(root) / "outlast" / "kernels"


def library(source: Source) -> ctypes.CDLL | None:
    """The compiled source if it is loaded or lies in the cache, else None. Never compiles, never waits for one."""
    with contextlib.suppress(KeyError):  # one look: `forget` may come at any time
        return _loaded[source]
    with _lock:
        if source not in _loaded:
            path = _object_path(source)
            _loaded[source] = _load(path) if path is not None and _trusted(path) else None
        return _loaded[source]


def _load(path: Path) -> ctypes.CDLL | None:
    try:
        found = ctypes.CDLL(str(path))
    except OSError:  # damaged, or on a file system that forbids execution
        return None
    for name, (result, *arguments) in _FUNCTIONS.items():
        if hasattr(found, name):
            function = getattr(found, name)
            function.restype, function.argtypes = result, arguments
    return found


def build(source: Source) -> bool:
    """Compile the source unless its object is in the cache; True when it can be used now. Takes about a second.

    False without a compiler or a folder to keep the object in: the eager path then stands, with the same results.
    """
    path = _object_path(source)
    if path is None:
        return False
    if not _trusted(path):
        try:
            _compile(source, path)
        except (OSError, subprocess.SubprocessError):
            return False
    forget(source)
    return library(source) is not None


def forget(source: Source | None = None) -> None:
    """Drop what is remembered about one source, or all of them, so that the next call looks in the cache again."""
    with _lock:
        if source is None:
            _loaded.clear()
        else:
            _loaded.pop(source, None)


@functools.cache
def _compiler() -> tuple[str, str] | None:
    """The system's C compiler and all that decides what it makes: its version, and the processor it tunes for."""
    path = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if path is None:
        return None
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S)
        processor = [
            line for line in Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines() if "flags" in line
        ]
    except (OSError, subprocess.SubprocessError):
        return None
    return (path, done.stdout + "".join(processor)) if done.returncode == 0 else None


@functools.cache
def _file(name: str) -> str:
    return importlib.resources.files("outlast.tensors").joinpath(name).read_text()


@functools.cache
def _text(source: Source) -> str:
    return _file(source) if isinstance(source, str) else _file("_kernels.c").replace("@PROGRAM@", emit(source))


@functools.cache
def _object_path(source: Source) -> Path | None:
    compiler = _compiler()
    if compiler is None or (isinstance(source, Program) and source.num_rows > MAX_ROWS):
        return None
    key = hashlib.sha256("\0".join([_text(source), *compiler, *FLAGS]).encode()).hexdigest()[:32]
    return cache_folder() / f"{key}.so"


def _trusted(path: Path) -> bool:
    """Ours alone: a regular file of this user in a folder of this user, neither writable by anyone else."""
    try:
        file, folder = path.lstat(), path.parent.lstat()
    except OSError:
        return False
    owned = file.st_uid == os.getuid() == folder.st_uid
    return owned and stat.S_ISREG(file.st_mode) and not (file.st_mode | folder.st_mode) & 0o022


def _compile(source: Source, path: Path) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    compiler = _compiler()
    assert compiler is not None
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        text, made = Path(folder) / "kernels.c", Path(folder) / "kernels.so"
        text.write_text(_text(source))
        command = [compiler[0], *FLAGS, str(text), "-o", str(made), "-lm"]
        subprocess.run(command, check=True, capture_output=True, timeout=COMPILE_TIMEOUT_S)
        made.chmod(0o500)
        made.replace(path)


def run(native: ctypes.CDLL, task: Task, num_blocks: int, threads: int) -> None:
    """Do a task in at most `threads` threads, torch's where it has them. MemoryError when there is none for it."""
    address, parallel = ctypes.addressof(task), _team() if threads > 1 and num_blocks > 1 else None
    if parallel is not None:
        parallel(native.work, address, threads, 0)
    else:
        others = [_pool(threads).submit(native.work, address) for _ in range(min(threads, num_blocks) - 1)]
        try:
            native.work(address)
        finally:  # whatever interrupts this: they write to memory that is let go afterwards
            concurrent.futures.wait(others)
    if task.failed:
        raise MemoryError("the rules' compiled path could not have a few megabytes of memory")


@functools.cache
def _team() -> Callable[..., None] | None:
    """OpenMP's entry to the threads that torch runs its operations in; None where there is none, or none to trust.

    A process whose parent had threads when it was forked may have inherited a team without its threads: who asks it
    waits for ever. (Not so a run's replica: its parent forks it before it has any.)
    """
    parallel = getattr(ctypes.CDLL(None), "GOMP_parallel", None)
    if parallel is None or _forked_with_threads:
        return None
    parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    parallel.restype = None
    return cast(Callable[..., None], parallel)


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=threads - 1, thread_name_prefix="outlast-rules")


_forked_with_threads = False


def _before_fork() -> None:
    global _had_threads
    try:
        _had_threads = len(os.listdir("/proc/self/task")) > 1
    except OSError:
        _had_threads = True


def _after_fork() -> None:
    global _forked_with_threads
    _forked_with_threads = _had_threads
    _team.cache_clear()
    _pool.cache_clear()


_had_threads = False
os.register_at_fork(before=_before_fork, after_in_child=_after_fork)
