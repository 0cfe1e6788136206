"""The process that ranks are forked from: loads torch, then turns into the user's script once for each request.

It starts no thread, touches no device and reads no data before a fork; a rank differs from `python train.py ARGS…` in
having loaded sooner what it would load anyway. The agent's end, and why, are in `_nursery.py`.
"""

from __future__ import annotations

import builtins
import ctypes
import gc
import importlib
import importlib.machinery
import importlib.util
import io
import linecache
import os
import runpy
import signal
import socket
import sys
import threading
import types
import zipfile

import msgspec

__all__ = ["main"]

_PR_SET_PDEATHSIG = 1
_MOST_BYTES = 1 << 20  # of a request


def main() -> None:
    """Entry: the script and its arguments, as `python` would have them."""
    command = sys.argv[1:]
    agent = os.getppid()
    with socket.socket(fileno=int(os.environ.pop("OUTLAST_NURSERY_FD"))) as sock:
        _set_path(command)
        _load()
        source = _source(command)
        alone = threading.active_count() == 1  # else a lock may be held that nobody gives back in a fork
        sock.send(b"ready")
        while True:
            request, fds, _, _ = socket.recv_fds(sock, _MOST_BYTES, 3)
            if not request:
                return
            pid = _fork(agent)
            if pid == 0:
                break
            sock.send(str(max(pid, 0)).encode())
            for fd in fds:
                os.close(fd)
    _become(msgspec.msgpack.decode(request, type=dict[str, str]), *fds)
    if not alone or _lost_its_device():
        os.execv(sys.executable, [sys.executable, *command])
    _run(command, source)


def _set_path(command: list[str]) -> None:
    """`python train.py` finds modules beside the script first, `python -m` in the working directory, `python app.zip`
    in the file. What stands there now is where this file lies."""
    if not sys.flags.safe_path:
        script = os.path.realpath(command[0])
        archive = command[0] != "-m" and zipfile.is_zipfile(script)
        sys.path[0] = os.getcwd() if command[0] == "-m" else command[0] if archive else os.path.dirname(script)


def _load() -> None:
    """Everything that a training script needs of torch and of us. Whatever is wrong with it, the script's own start
    shows it better. No garbage is looked for meanwhile, nor at the end: next to none is made, and to look through half
    a million objects again and again takes a third of this time. Nothing is freed, so ranks find no holes to write to
    between what they share."""
    looked_for = gc.isenabled()
    gc.disable()
    importlib.import_module("outlast").join  # noqa: B018  lazy: looking it up loads it
    import torch
    import torch.distributed
    import torch.utils.data

    torch.optim.SGD([torch.zeros(())], lr=0.1)  # loads as much again as torch itself
    gc.freeze()  # no rank looks through it either
    if looked_for:
        gc.enable()


def _lost_its_device() -> bool:
    """Whether something asked the driver for devices while it was loaded: no child forked later can use them."""
    torch = sys.modules["torch"]
    kinds = ("cuda", "xpu", "mtia", torch._C._get_privateuse1_backend_name())
    return any(getattr(getattr(torch, kind, None), "_is_in_bad_fork", bool)() for kind in kinds)


def _fork(agent: int) -> int:
    """Numbers as of `os.fork`, -1 where it fails. The process between ends at once, so that the rank is the agent's
    child; all of them end with who made them until then."""
    read, write = os.pipe()
    try:
        between = os.fork()
    except OSError:
        os.close(read)
        os.close(write)
        return -1
    if between == 0:
        nursery, me = os.getppid(), os.getpid()
        _end_with_parent(nursery)
        try:
            rank = os.fork()
        except OSError:
            os._exit(1)
        if rank:
            os.write(write, str(rank).encode())
            os._exit(0)
        os.close(read)
        os.close(write)
        while os.getppid() == me:
            os.sched_yield()
        _end_with_parent(agent)
        return 0
    os.close(write)
    os.waitpid(between, 0)
    with os.fdopen(read, "rb") as pipe:
        return int(pipe.read() or b"-1")


def _end_with_parent(parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def _become(environ: dict[str, str], log_fd: int, progress_fd: int, go_fd: int) -> None:
    """A session of its own, its output in its log, its own environment and random numbers; and the agent's word."""
    os.setsid()
    if not os.read(go_fd, 1):
        os._exit(1)
    for fd in (1, 2):
        os.dup2(log_fd, fd)
    os.close(log_fd)
    os.close(go_fd)
    os.environ.update(environ, OUTLAST_PROGRESS_FD=str(progress_fd))
    if "numpy.random" in sys.modules:  # `random` does so itself
        sys.modules["numpy.random"].seed()
    importlib.invalidate_caches()


def _source(command: list[str]) -> bytes | None:
    """Return the script as it is now, so that a replica that is started later runs what the first ones ran, whatever
    was saved over it since. None where `python` itself has to find the script (a module, an archive, a compiled one)
    or cannot read it; then each replica looks for itself."""
    if command[0] == "-m" or command[0].endswith(".pyc") or zipfile.is_zipfile(command[0]):
        return None
    path = os.path.abspath(command[0])
    try:
        with io.open_code(path) as file:
            source = file.read()
        lines = importlib.util.decode_source(source).splitlines(keepends=True)
    except (OSError, SyntaxError, ValueError):
        return None
    # Tracebacks show the lines that run. An entry without a time is never looked up in the file again.
    linecache.cache[path] = (len(source), None, lines, path)
    return source


def _run(command: list[str], source: bytes | None) -> None:
    """As `python` runs it; its errors are told without the frames of this module."""
    sys.orig_argv[1:] = command
    script = types.ModuleType("__main__")
    script.__builtins__ = builtins  # type: ignore[attr-defined]
    sys.modules["__main__"] = script
    try:
        if command[0] == "-m":
            sys.argv = command[1:]
            runpy._run_module_as_main(command[1])  # type: ignore[attr-defined]  # what `python -m` itself calls
            return
        sys.argv = command
        if zipfile.is_zipfile(command[0]):
            runpy._run_module_as_main("__main__", False)  # type: ignore[attr-defined]
            return
        path = os.path.abspath(command[0])
        script.__file__ = path
        exec(_code(path, script, source), script.__dict__)
    except Exception as error:  # noqa: BLE001  told as Python tells it
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        importlib.import_module("outlast.runtime.host.launcher_words").add_hint(error)
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        sys.exit(1)


def _code(path: str, script: types.ModuleType, source: bytes | None) -> types.CodeType:
    if path.endswith(".pyc"):
        script.__loader__ = loader = importlib.machinery.SourcelessFileLoader("__main__", path)
        code = loader.get_code("__main__")
        assert code is not None
        return code
    script.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    if source is None:
        with io.open_code(path) as file:  # a script that is run is not kept compiled
            source = file.read()
    return compile(source, path, "exec", dont_inherit=True)


if __name__ == "__main__":
    main()
