"""Which file system holds a path, and whether its locks can be trusted.

Role: SQLite's locks, its shared memory and `flock` are only sound where one kernel sees every opener. The kernel's
own table of mounts is read rather than the numbers of `statfs(2)`, because every FUSE file system, local or remote,
has the same number there but its own name here. Invariant: the functions are pure; only `check_local` reads the table.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import NamedTuple

from outlast.errors import EnvironmentFault

__all__ = ["Mount", "check_local", "find_mount", "is_network"]

_NETWORK = frozenset(
    {
        "9p",
        "acfs",
        "afs",
        "beegfs",
        "ceph",
        "cifs",
        "coda",
        "davfs",
        "davfs2",
        "dfs",
        "glusterfs",
        "gpfs",
        "juicefs",
        "lustre",
        "ncpfs",
        "nfs",
        "nfs4",
        "ocfs2",
        "orangefs",
        "panfs",
        "pvfs2",
        "smb2",
        "smb3",
        "smbfs",
        "vboxsf",
        "vmhgfs",
        "wekafs",
    }
)
_NETWORK_FUSE = frozenset(
    {
        "afp", "alluxio", "blobfuse", "blobfuse2", "ceph", "cephfs", "curlftpfs", "davfs", "davfs2", "gcsfuse",
        "geesefs", "glusterfs", "goofys", "juicefs", "lustre", "mfs", "moosefs", "mount-s3", "mountpoint-s3", "rclone",
        "s3fs", "seaweedfs", "smbnetfs", "sshfs", "vmhgfs-fuse",
    }
)  # fmt: skip


class Mount(NamedTuple):
    """One line of the mount table: where, which kind (`ext4`, `nfs4`, `fuse.sshfs`), and what is mounted."""

    point: str
    fstype: str
    source: str


def is_network(fstype: str) -> bool:
    """Whether several hosts may write to a file system of this kind, so that its locks cannot be trusted."""
    if fstype.startswith("fuse."):
        return fstype.removeprefix("fuse.") in _NETWORK_FUSE
    return fstype in _NETWORK


def find_mount(path: PurePosixPath, mountinfo: str) -> Mount | None:
    """The mount that holds `path` (absolute, without symbolic links), given the text of `/proc/self/mountinfo`.

    The deepest mount point wins, and of two on the same point the later, which hides the earlier.
    """
    best: Mount | None = None
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        fields, about = left.split(), right.split()
        if len(fields) < 5 or len(about) < 2:
            continue
        mount = Mount(_unescape(fields[4]), about[0], _unescape(about[1]))
        deeper = best is None or len(PurePosixPath(mount.point).parts) >= len(PurePosixPath(best.point).parts)
        if deeper and path.is_relative_to(mount.point):
            best = mount
    return best


def check_local(run_dir: Path, mountinfo: Path = Path("/proc/self/mountinfo")) -> None:
    """Raise EnvironmentFault if `run_dir` (which may not exist yet) lies on a network file system.

    Where the kernel shows no mount table nothing is known, and nothing is refused.
    """
    try:
        table = mountinfo.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return
    mount = find_mount(PurePosixPath(run_dir.resolve()), table)
    if mount is not None and is_network(mount.fstype):
        raise EnvironmentFault(
            f"the run directory {run_dir} lies on a network file system ({mount.fstype}, mounted on {mount.point})",
            did="refused: locks there do not keep a second writer out, and a view could be lost after it was told",
            remedy="give --run-dir a directory on a local disk; copy it to the share when the run has ended",
        )


def _unescape(field: str) -> str:
    """The mount table writes a space, tab, newline and backslash as three octal digits."""
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        field = field.replace(code, character)
    return field
