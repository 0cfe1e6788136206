"""Tensors that are laid aside while something is tried on them, and are then, byte for byte, what they were.

Where a device's memory has no room for a copy the host's has; where that has none, a file in a folder on a disk.
"""

from __future__ import annotations

import copy
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import IO, Any

import torch
from torch import Tensor

from outlast.errors import EnvironmentFault
from outlast.journal import find_mount
from outlast.runtime.training.free_memory import free_bytes
from outlast.tensors import local

__all__ = ["LaidAside", "shared", "tensors_in"]

_DISK_SHARE = 0.5  # of what is free
_CPU = torch.device("cpu")


class LaidAside:
    """`with LaidAside(tensors, share, folder):` what they are before is what they are after. `share`: of the host's
    free memory that may be used; `at_once`: processes that do the same now, in the same folder. Raises OSError where
    neither memory nor disk has room; nothing is changed then. What cannot be read again ends the process by an
    EnvironmentFault: the state is lost here."""

    def __init__(self, tensors: Iterable[Tensor], share: float, folder: Path, at_once: int = 1) -> None:
        self._tensors = [local(tensor.detach()) for tensor in tensors]
        self._held: list[Tensor] = []
        self._file: IO[bytes] | None = None
        needed = sum(tensor.numel() * tensor.element_size() for tensor in self._tensors)
        on_device = any(tensor.device != _CPU for tensor in self._tensors)
        if on_device and needed < share * free_bytes(_CPU):
            self._held = [tensor.to(_CPU, copy=True) for tensor in self._tensors]
            return
        if _in_memory(folder) or needed * at_once > _DISK_SHARE * shutil.disk_usage(folder).free:
            raise OSError(f"no room to lay {needed} bytes aside, in {folder} neither")
        self._file = tempfile.TemporaryFile(dir=folder, prefix="laid-aside-")  # noqa: SIM115, closed at the end
        try:
            for tensor in self._tensors:
                self._file.write(_bytes_of(tensor.cpu()).numpy().data)
            self._file.seek(0)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> None:
        pass

    def __exit__(self, *raised: object) -> None:
        with torch.no_grad():
            for index, tensor in enumerate(self._tensors):
                tensor.copy_(self._held[index] if self._file is None else _read(self._file, tensor))
        self.forget()

    def forget(self) -> None:
        """Nothing is put back: nothing was tried, or all is where it was."""
        self._held.clear()
        if self._file is not None:
            self._file.close()


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _read(file: IO[bytes], tensor: Tensor) -> Tensor:
    """The next one of the file, as a tensor like this one."""
    raw = torch.empty(tensor.numel() * tensor.element_size(), dtype=torch.uint8)
    into = raw.numpy().data
    try:
        while into:
            num = file.readinto(into)  # type: ignore[attr-defined]
            if not num:
                raise OSError("it ends too early")
            into = into[num:]
    except OSError as error:
        raise EnvironmentFault(
            f"parameters that were laid aside in a file cannot be read again: {error}",
            did="this process ends; what others hold, and the newest checkpoint, are untouched",
            remedy="look at the disk under the run's folder; bitwise = false does without the rehearsal",
        ) from error
    return raw.view(tensor.dtype).reshape(tensor.shape)


def _in_memory(folder: Path) -> bool:
    mount = find_mount(PurePosixPath(folder.resolve()), Path("/proc/self/mountinfo").read_text(encoding="utf-8"))
    return mount is not None and mount.fstype in ("tmpfs", "ramfs")


def tensors_in(value: Any) -> list[Tensor]:
    """Each once, in lists, tuples and dicts however deep."""
    return list({id(tensor): tensor for tensor in _walk(value)}.values())


def _walk(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _walk(item)


def shared(value: Any) -> Any:
    """The same tensors in containers of their own; a copy of what else there is."""
    if isinstance(value, Tensor):
        return value
    if type(value) in (list, tuple):
        return type(value)(shared(item) for item in value)
    if type(value) is dict:
        return {key: shared(item) for key, item in value.items()}
    return copy.deepcopy(value)
