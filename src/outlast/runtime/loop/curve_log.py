"""One curve of a run's numbers, whoever writes it: `outlast.Log`.

Every replica gives it the same numbers, step by step, and keeps the newest; the one that writes puts them down. Who
takes its place writes again from the oldest step that it keeps, over what is there, so the curve has each step once,
and none is missing. A disk that fails costs rows until it works again, never the step. It keeps no number for a
checkpoint: what a resumed run computes again has the same bits.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from outlast.errors import ConfigError
from outlast.runtime.training.metrics import number_of

if TYPE_CHECKING:
    from outlast.runtime.loop.run import Run
    from outlast.runtime.loop.session import Step

__all__ = ["Log"]


class _Sink(Protocol):
    def put(self, step: int, values: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...


class Log:
    """Writes one curve of a run, each step once, whoever leads. `to`: a file of JSON lines; or a function that is given
    the first step it will be told of, and returns what has `add_scalar` (TensorBoard), `log(values, step=)` (Weights &
    Biases), or can be called with step and values. `keep`: how many of the newest rows each replica keeps. Raises
    ConfigError for what is neither."""

    def __init__(self, run: Run, to: str | os.PathLike[str] | Callable[[int], Any], *, keep: int = 1000) -> None:
        if not (callable(to) or isinstance(to, str | os.PathLike)):
            raise ConfigError(f"to={to!r} is no place for a log", remedy='a path such as "log.jsonl", or a function')
        if not isinstance(keep, int) or isinstance(keep, bool) or keep < 1:
            raise ConfigError(f"keep={keep!r} is no number of rows", remedy="keep=1 or more")
        self._run = run
        self._open: Callable[[int], _Sink] = (
            (lambda first: _Scalars(_guarded(to, first))) if callable(to) else lambda first: _Lines(Path(to), first)
        )
        self._rows: deque[tuple[int, dict[str, float]]] = deque(maxlen=keep)
        self._sink: _Sink | None = None
        self._failed = False
        self._home = os.getpid()

    def __call__(self, step: Step, values: Mapping[str, Any] | None = None, **named: Any) -> None:
        """Give a committed step's numbers, on every replica. Raises StepMisuse for what is no number."""
        row = {name: number_of(f"log: {name!r}", value) for name, value in {**(values or {}), **named}.items()}
        self._rows.append((step.number, row))
        if self._run.leads and os.getpid() == self._home:
            self._write()

    def _write(self) -> None:
        try:
            rows = [self._rows[-1]]
            if self._sink is None:
                self._sink, rows = self._open(self._rows[0][0]), list(self._rows)
            for number, row in rows:
                self._sink.put(number, row)
            self._failed = False
        except OSError as error:
            with suppress(OSError):
                self._drop()
            if not self._failed:
                print(f"outlast: the log is not written, training goes on: {error}", file=sys.stderr, flush=True)
            self._failed = True

    def _drop(self) -> None:
        sink, self._sink = self._sink, None
        if sink is not None:
            sink.close()

    def close(self) -> None:
        """After the loop: let go of the file. Should the writer have died at its last rows, another writes them now."""
        if self._rows and self._run.is_writer and self._sink is None:
            self._write()
        self._drop()

    def __enter__(self) -> Log:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is None:
            self.close()


class _Lines:
    """A file with an object a line: {"step": …, name: value}. Each is there when `put` returns, for who reads along."""

    def __init__(self, path: Path, first: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            os.ftruncate(self._fd, sum(map(len, _before(path, first))))
        except OSError:
            os.close(self._fd)
            raise

    def put(self, step: int, values: Mapping[str, float]) -> None:
        finite = {name: value if math.isfinite(value) else str(value) for name, value in values.items()}
        line = (json.dumps({"step": step, **finite}) + "\n").encode()
        while line:
            line = line[os.write(self._fd, line) :]

    def close(self) -> None:
        os.close(self._fd)


def _before(path: Path, first: int) -> Iterator[bytes]:
    """Whole lines of earlier steps, up to the first that is none."""
    with path.open("rb") as file:
        for line in file:
            try:
                step = json.loads(line)["step"]
            except (ValueError, KeyError, TypeError):
                return
            if not line.endswith(b"\n") or not isinstance(step, int) or step >= first:
                return
            yield line


class _Scalars:
    """What somebody else's package writes with."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer
        known = any(callable(getattr(writer, name, None)) for name in ("add_scalar", "log"))
        if not (known or callable(writer)):
            raise ConfigError(
                f"the log's function gave a {type(writer).__name__}",
                remedy="what has add_scalar(name, value, step) or log(values, step=step), or a function of both",
            )

    def put(self, step: int, values: Mapping[str, float]) -> None:
        if hasattr(self._writer, "add_scalar"):
            for name, value in values.items():
                _guarded(self._writer.add_scalar, name, value, step)
            _guarded(getattr(self._writer, "flush", lambda: None))
        elif hasattr(self._writer, "log"):
            _guarded(self._writer.log, dict(values), step=step)
        else:
            _guarded(self._writer, step, dict(values))

    def close(self) -> None:
        for name in ("close", "finish"):
            if callable(getattr(self._writer, name, None)):
                _guarded(getattr(self._writer, name))
                return


def _guarded(call: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """Call what is somebody else's: whatever it raises is a log that cannot be written, and no end of the training."""
    try:
        return call(*given, **named)
    except Exception as error:  # BLE001, a boundary: the next replica that leads would end by it too
        raise OSError(f"{type(error).__name__}: {error}") from error
