from __future__ import annotations

from pathlib import Path

from tests.diagnose.cases import cases
from tests.diagnose.trees import tree_host

from transload.diagnose.probes.system import Mount, mount_of, mounts

TEXT = """\
27 1 0:25 /@ / rw,relatime shared:1 - btrfs /dev/nvme0n1p2 rw,subvol=/@
24 27 0:6 / /dev rw,nosuid shared:2 master:1 - devtmpfs udev rw,mode=755
25 24 0:23 / /dev/a\\040b rw,nodev - tmpfs tmpfs rw
26 27 0:24 / /devices rw - tmpfs tmpfs rw
30 24 0:99 / /dev ro,nodev - tmpfs over rw
garbage
1 2 3 / /dev
"""


def test_the_root_and_what_is_at_or_below_dev(tmp_path: Path) -> None:
    assert mounts(tree_host(tmp_path, {"/proc/self/mountinfo": TEXT})) == (
        Mount("/", "btrfs", ("rw", "relatime"), "rw,subvol=/@"),
        Mount("/dev", "devtmpfs", ("rw", "nosuid"), "rw,mode=755"),
        Mount("/dev/a b", "tmpfs", ("rw", "nodev"), "rw"),
        Mount("/dev", "tmpfs", ("ro", "nodev"), "rw"),
    )


@cases(
    ("path", "kind", "nodev"),
    [("/dev/nvidia0", "tmpfs", True), ("/devices", "btrfs", False), ("/", "btrfs", False), ("/dev/a b", "tmpfs", True)],
)
def test_the_deepest_and_last_is_the_one(tmp_path: Path, path: str, kind: str, *, nodev: bool) -> None:
    mount = mount_of(mounts(tree_host(tmp_path, {"/proc/self/mountinfo": TEXT})), path)
    assert mount is not None
    assert (mount.kind, "nodev" in mount.options) == (kind, nodev)


def test_none_where_nothing_can_be_read(tmp_path: Path) -> None:
    assert mount_of(mounts(tree_host(tmp_path, {})), "/dev") is None
