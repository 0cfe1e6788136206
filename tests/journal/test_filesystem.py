"""Where a run directory may lie."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

import pytest

from outlast.errors import EnvironmentFault
from outlast.journal import find_mount, is_network
from outlast.journal._filesystem import check_local

TABLE = """\
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
30 22 0:26 / /home rw,nosuid shared:2 master:3 - nfs4 server:/export/home rw,vers=4.2
31 22 0:27 / /home/local rw - xfs /dev/vdb rw
32 22 0:28 / /mnt/with\\040space rw - fuse.sshfs user@host:/data rw
33 22 0:29 / /mnt/disk rw - fuse.ntfs-3g /dev/sdc1 rw
34 22 0:30 / /data rw - cifs //server/share rw
35 22 0:31 / /data rw - tmpfs tmpfs rw
36 22 0:32 / /win rw - 9p C:\\134 rw
a line of another shape
"""


@pytest.mark.parametrize(
    ("path", "fstype", "network"),
    [
        ("/var/run1", "ext4", False),
        ("/home/me/run", "nfs4", True),
        ("/home/local/run", "xfs", False),
        ("/home/localised/run", "nfs4", True),
        ("/mnt/with space/run", "fuse.sshfs", True),
        ("/mnt/disk/run", "fuse.ntfs-3g", False),
        ("/data/run", "tmpfs", False),  # mounted over the share
        ("/win/run", "9p", True),
    ],
)
def test_the_mount_of_a_path_and_whether_it_is_shared(path: str, fstype: str, network: bool) -> None:
    mount = find_mount(PurePosixPath(path), TABLE)
    assert mount is not None
    assert mount.fstype == fstype
    assert is_network(mount.fstype) is network


def test_a_run_directory_on_a_network_file_system_is_refused(tmp_path: Path) -> None:
    table = tmp_path / "mountinfo"
    table.write_text(f"22 1 254:0 / / rw - ext4 /dev/vda rw\n30 22 0:26 / {tmp_path.resolve()} rw - nfs host:/x rw\n")
    with pytest.raises(EnvironmentFault, match="network file system") as caught:
        check_local(tmp_path / "runs" / "new", table)
    assert "local disk" in caught.value.remedy


def test_without_a_mount_table_nothing_is_refused(tmp_path: Path) -> None:
    check_local(tmp_path, tmp_path / "absent")
    assert find_mount(PurePosixPath("/x"), "") is None
