"""A disk of a run's own for its checkpoints, that fills up, can only be read, or hangs, as it is told from outside.

It is a file system in a file, or in memory where the kernel has no loop devices (then it cannot hang), mounted in a
mount namespace that the run is started in: nobody else's files are touched, and with the last process the mount is
gone. A hang is a frozen file system: whoever writes to it waits in the kernel's state D, where no signal reaches it.
Who freezes it holds a pipe of ours, and thaws it when we end, however we do. It needs root and util-linux.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from outlast.errors import EnvironmentFault

__all__ = ["StruckDisk", "cannot_freeze", "unavailable"]

_TOOLS = ("mount", "nsenter", "unshare")
_TRIAL = "mount --make-rprivate / && mount -t tmpfs tmpfs /mnt"
_FREEZE_TRIAL = (
    "mount --make-rprivate / && truncate -s 16M i && mkfs.ext4 -q i && mkdir m && mount -o loop i m && "
    "fsfreeze --freeze m && fsfreeze --unfreeze m && umount m"
)
_HOLD = "echo ready; exec cat"  # until its input ends, that is, until whoever holds the other end is gone
_FILLER = "filler"


def unavailable() -> str:
    """Why there can be no such disk here; "" if there can."""
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} missing (util-linux)"
    if os.geteuid() != 0:
        return "mount namespaces need root here"
    tried = subprocess.run(["unshare", "--mount", "sh", "-ec", _TRIAL], capture_output=True)
    return "" if tried.returncode == 0 else f"no mount namespaces: {tried.stderr.decode().strip()[-200:]}"


@functools.cache
def cannot_freeze() -> str:
    """Why no disk can hang here; "" if one can: it was tried, as a container may have loop devices in name alone."""
    reason = unavailable()
    if reason:
        return reason
    missing = [tool for tool in ("mkfs.ext4", "fsfreeze", "losetup") if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} missing (e2fsprogs, util-linux)"
    with tempfile.TemporaryDirectory(prefix="outlast-disk-") as place:
        tried = subprocess.run(["unshare", "--mount", "sh", "-ec", _FREEZE_TRIAL], cwd=place, capture_output=True)
    return "" if tried.returncode == 0 else f"no loop devices: {tried.stderr.decode().strip()[-200:]}"


class StruckDisk:
    """`place`: where it is mounted, for those inside. A context manager; `save` takes what is on it before it goes."""

    def __init__(self, place: Path, size_bytes: int) -> None:
        self.place, self._size_bytes = place.absolute(), size_bytes
        self._image = self.place.with_suffix(".img")
        self._freezes = not cannot_freeze()
        self._holder: subprocess.Popen[bytes] | None = None
        self._freezer: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> StruckDisk:
        self.place.mkdir(parents=True)
        image, place = shlex.quote(str(self._image)), shlex.quote(str(self.place))
        if self._freezes:
            with self._image.open("wb") as file:
                file.truncate(max(self._size_bytes, 16 << 20))
            mount = f"mkfs.ext4 -q -m 0 {image} && mount -o loop {image} {place}"
        else:
            mount = f"mount -t tmpfs -o size={self._size_bytes} tmpfs {place}"
        self._holder = subprocess.Popen(
            ["unshare", "--mount", "sh", "-ec", f"mount --make-rprivate /\n{mount}\n{_HOLD}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._holder.stdout is not None
        if self._holder.stdout.readline() != b"ready\n":
            _, said = self._holder.communicate()
            raise EnvironmentFault(
                f"no disk of {self._size_bytes} bytes could be mounted: {said.decode().strip()[-300:]}",
                remedy="--faults without full, readonly and frozen",
            )
        return self

    def __exit__(self, *_: object) -> None:
        self.mend("frozen")
        if self._holder is not None:
            self._holder.communicate()  # its input ends, and it does
        self._image.unlink(missing_ok=True)

    # --- for the run ---------------------------------------------------------------------------------------------
    @property
    def entering(self) -> list[str]:
        """What to put before a command to have it run where the disk is, in the folder that this process has."""
        return [*self._inside, "sh", "-c", 'cd "$0" && exec "$@"', os.getcwd()]

    @property
    def _inside(self) -> list[str]:
        assert self._holder is not None
        return ["nsenter", f"--mount=/proc/{self._holder.pid}/ns/mnt"]

    @property
    def _seen(self) -> Path:
        """Its root, as this process reaches it."""
        assert self._holder is not None
        return Path(f"/proc/{self._holder.pid}/root{self.place}")

    def save(self, part: Path, to: Path) -> None:
        """Copy a folder on it, if it is there."""
        self.mend("frozen")
        if (self._seen / part).is_dir():
            shutil.copytree(self._seen / part, to, dirs_exist_ok=True)

    # --- strikes -------------------------------------------------------------------------------------------------
    def strike(self, kind: str, pick: float) -> str:
        """`disk`, if it is so from now on. A disk that is being written to cannot be made read-only at once, and to one
        that hangs nothing else can be done, or whoever did it would hang as well."""
        if self._freezer is not None:
            return ""
        acts = {
            "full": self._fill,
            "readonly": lambda: self._do("mount", "-o", "remount,ro", str(self.place)),
            "frozen": self._freeze,
        }
        return "disk" if acts[kind]() else ""

    def mend(self, kind: str, name: str = "disk") -> bool:
        """As it was before; False if that has to wait for another strike's end."""
        if kind == "frozen":
            if self._freezer is not None:
                self._freezer.communicate()
                self._freezer = None
            return True
        if self._freezer is not None:
            return False
        if kind == "readonly":
            return self._do("mount", "-o", "remount,rw", str(self.place))
        with contextlib.suppress(OSError):  # read-only meanwhile
            (self._seen / _FILLER).unlink(missing_ok=True)
            return True
        return False

    def _fill(self) -> bool:
        """Take all the room that there is, in blocks that get smaller until not one byte is left."""
        try:
            with (self._seen / _FILLER).open("ab", buffering=0) as file:
                block = 1 << 24
                while block:
                    try:
                        os.posix_fallocate(file.fileno(), file.seek(0, os.SEEK_END), block)
                    except OSError:
                        block >>= 1
        except OSError:  # read-only meanwhile
            return False
        return True

    def _freeze(self) -> bool:
        if not self._freezes:
            return False
        place = shlex.quote(str(self.place))
        script = f"fsfreeze --freeze {place}\n{_HOLD.replace('exec ', '')}\nfsfreeze --unfreeze {place}"
        self._freezer = subprocess.Popen(
            [*self._inside, "sh", "-ec", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._freezer.stdout is not None
        if self._freezer.stdout.readline() == b"ready\n":
            return True
        self._freezer.communicate()
        self._freezer = None
        return False

    def _do(self, *command: str) -> bool:
        return subprocess.run([*self._inside, *command], capture_output=True).returncode == 0
