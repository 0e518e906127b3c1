from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from tests.diagnose.cases import cases
from tests.diagnose.trees import (
    DEVICES,
    MOUNTS,
    NODES,
    Device,
    Link,
    Tree,
    TreeHost,
    container,
    plain_host,
    slurm,
    tree_host,
    wsl,
)

from transload.diagnose.probes.hardware import nodes
from transload.machine import Node, Nodes

if TYPE_CHECKING:
    import pytest


def test_the_nodes_of_a_driver_at_work(tmp_path: Path) -> None:
    found = nodes(plain_host(tmp_path))
    assert [node.path for node in found.found][:3] == ["/dev/nvidiactl", "/dev/nvidia0", "/dev/nvidia-uvm"]
    assert found.at("/dev/nvidiactl") == Node("/dev/nvidiactl", group="root", major=195, minor=255)
    assert found.at("/dev/nvidia-uvm") == Node("/dev/nvidia-uvm", group="root", major=238, minor=0)
    assert found.majors == {"nvidia": 195, "nvidiactl": 195, "nvidia-uvm": 238, "nvidia-caps": 241, "drm": 226}


def test_the_first_three_are_listed_when_nothing_is_there(tmp_path: Path) -> None:
    found = nodes(tree_host(tmp_path, {}))
    assert [(node.path, node.exists, node.error) for node in found.found] == [
        ("/dev/nvidiactl", False, "ENOENT"),
        ("/dev/nvidia0", False, "ENOENT"),
        ("/dev/nvidia-uvm", False, "ENOENT"),
    ]
    assert (found.majors, found.cgroup) == ({}, ())


@cases("error", ["EACCES", "EPERM", "ENXIO", "ENODEV", "EIO"])
def test_the_errno_of_opening_is_told(tmp_path: Path, error: str) -> None:
    found = nodes(plain_host(tmp_path, errors={"/dev/nvidiactl": error}))
    assert found.at("/dev/nvidiactl").error == error
    assert found.at("/dev/nvidia0").error == ""


def test_mode_and_group_are_told(tmp_path: Path) -> None:
    restricted = {"/dev/nvidia0": Device(195, 0, 0o660, gid=44, error="EACCES")}
    node = nodes(plain_host(tmp_path, nodes={**NODES, **restricted})).at("/dev/nvidia0")
    assert (node.mode, node.gid, node.group, node.error) == (0o660, 44, "video", "EACCES")


def test_a_capability_that_may_be_read_is_not_refused(tmp_path: Path) -> None:
    """The driver opens them for reading only, and makes them so; the probe opens everything for writing too."""
    found = nodes(plain_host(tmp_path))
    assert found.at("/dev/nvidia-caps/nvidia-cap1").error == "EACCES"
    assert found.at("/dev/nvidia-caps/nvidia-cap2").error == ""


def test_files_folders_and_links_in_place_of_nodes(tmp_path: Path) -> None:
    more: Tree = {
        "/dev/nvidiactl": "a file",
        "/dev/nvidia0/x": "in a folder",
        "/dev/nvidia-uvm": Link("/dev/gone"),
        "/dev/nvidia1": Link("../dev/nvidia1"),
    }
    found = nodes(plain_host(tmp_path, nodes={}, more=more))
    assert (found.at("/dev/nvidiactl").kind, found.at("/dev/nvidiactl").major) == ("file", 0)
    assert (found.at("/dev/nvidia0").kind, found.at("/dev/nvidia0").error) == ("directory", "EISDIR")
    assert (found.at("/dev/nvidia-uvm").kind, found.at("/dev/nvidia-uvm").error) == ("link", "ENOENT")
    assert found.at("/dev/nvidia1").kind == "link"


def test_a_link_to_a_node_is_that_node(tmp_path: Path) -> None:
    found = nodes(plain_host(tmp_path, nodes={}, more={"/dev/nvidia0": Link("char/a"), "/dev/char/a": Device(195, 0)}))
    assert (found.at("/dev/nvidia0").kind, found.at("/dev/nvidia0").major) == ("char", 195)


def test_null_in_place_of_a_node_shows_in_its_number(tmp_path: Path) -> None:
    found = nodes(plain_host(tmp_path, nodes={**NODES, "/dev/nvidia-uvm": Device(1, 3)}))
    assert (found.at("/dev/nvidia-uvm").major, found.majors["nvidia-uvm"]) == (1, 238)


def test_nodev_is_told_of_the_mount_a_node_lies_on(tmp_path: Path) -> None:
    mounts = MOUNTS + "90 24 0:99 / /dev/nvidiactl rw,nosuid,nodev - tmpfs tmpfs rw\n"
    found = nodes(plain_host(tmp_path, more={"/proc/self/mountinfo": mounts}, errors={"/dev/nvidiactl": "EACCES"}))
    assert (found.at("/dev/nvidiactl").nodev, found.at("/dev/nvidiactl").error) == (True, "EACCES")
    assert not found.at("/dev/nvidia0").nodev


def test_drivers_before_550_have_one_name_for_both(tmp_path: Path) -> None:
    old = DEVICES.replace("195 nvidia\n195 nvidiactl\n", "195 nvidia-frontend\n")
    majors = nodes(plain_host(tmp_path, more={"/proc/devices": old})).majors
    assert (majors["nvidia"], majors["nvidiactl"]) == (195, 195)


@cases(
    ("cgroup", "folder"),
    [("5:devices:/docker/1\n", "/docker/1"), ("5:cpu,devices:/\n", ""), ("5:devices:/elsewhere\n", "")],
)
def test_the_rules_of_a_cgroup_of_version_1(tmp_path: Path, cgroup: str, folder: str) -> None:
    rules = {f"/sys/fs/cgroup/devices{folder}/devices.list": "c 1:3 rwm\nc 195:* rw\n", "/proc/self/cgroup": cgroup}
    assert nodes(container(tmp_path, more=rules)).cgroup == ("c 1:3 rwm", "c 195:* rw")


def test_nodes_of_others_are_listed(tmp_path: Path) -> None:
    more = {
        "/dev/kfd": Device(234, 0, 0o660, gid=992, error="EACCES"),
        "/dev/dri/renderD128": Device(226, 128),
        "/dev/dri/card0": Device(226, 0),
        "/dev/nvhost-gpu": Device(506, 1),
        "/dev/accel/accel0": Device(261, 0),
    }
    found = nodes(plain_host(tmp_path, card=None, more=more))
    assert [node.path for node in found.found][3:] == [
        "/dev/kfd",
        "/dev/nvhost-gpu",
        "/dev/dri/renderD128",
        "/dev/accel/accel0",
    ]
    assert (found.at("/dev/kfd").error, found.at("/dev/kfd").group) == ("EACCES", "render")


def test_containers_jobs_and_wsl(tmp_path: Path) -> None:
    assert not nodes(container(tmp_path / "none", gpu=False)).at("/dev/nvidia0").exists
    assert nodes(slurm(tmp_path / "job", gpus="")).at("/dev/nvidia0").error == "EPERM"
    assert nodes(wsl(tmp_path / "wsl")).at("/dev/dxg").exists


def test_nobody_waits_for_a_driver_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening waits for the other end of a pipe, as it would for a driver that hangs; what comes before is known."""
    monkeypatch.setattr("transload.diagnose.probes.hardware.PATIENCE", 1.0)

    class Hanging(TreeHost):
        def open_error(self, path: str) -> str:
            if path == "/dev/nvidia0":
                os.close(os.open(self.at("/pipe"), os.O_RDONLY))
            return super().open_error(path)

    host = plain_host(tmp_path, errors={"/dev/nvidia-uvm": "EPERM"})
    os.mkfifo(tmp_path / "pipe")
    hanging = Hanging(*(getattr(host, name) for name in host.__dataclass_fields__))
    found = nodes(hanging)
    assert found.at("/dev/nvidia-uvm").error == "EPERM"
    assert found.at("/dev/nvidia0").error == ""


def test_other_systems_have_none(tmp_path: Path) -> None:
    assert nodes(tree_host(tmp_path, {}, uname=("Windows", "10", "AMD64"))) == Nodes()


def test_garbage_in_devices_and_groups(tmp_path: Path) -> None:
    more = {"/proc/devices": b"\xff\n999999999999 nvidia\nx nvidia\n", "/etc/group": b"\xff:x\nroot:x:\xb2:\n" * 9}
    found = nodes(plain_host(tmp_path, more=more))
    assert (found.majors, found.at("/dev/nvidia0").group) == ({}, "")
