"""Every command in a fix is run, in an environment made for it.

pip commands run in a scratch environment, with wheels built from the tables of builds in place of the indexes. Shell
commands run in bash, with a temporary folder in place of the root directory. Programs that cannot run in a test are
replaced by stand-ins that only log their arguments, which must match ``STAND_INS``. So no test runs the programs in
``STAND_INS``, nor the lines for the shells in ``OTHER_SHELLS``. docs/tested-on.md names those that were run by hand.
tests/diagnose/test_windows_commands.py tests the commands for Windows.
"""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
from tests.diagnose.commands import FIRED, Fix, fixes

from transload.diagnose.case import exists_on
from transload.diagnose.fixes import wheel_platform
from transload.diagnose.rules import BY_CODE
from transload.diagnose.tables import INDEX, index_builds, numbers_of, releases

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="tests commands for Linux")

REAL_PROGRAMS = ("grep", "tail", "awk", "ls", "cat", "ps", "tee", "rm", "chmod", "uname", "sh")
"""Programs that run unchanged, besides bash and pip."""

PACKAGES = r"( [\w.+=<>*-]+)+"
STAND_INS = {
    "akmods": "--force",
    "apk": f"add{PACKAGES}",
    "apptainer": "exec --nv IMAGE COMMAND",
    "apt": rf"update|install( --reinstall)?{PACKAGES}|(remove|purge) \S+|search --names-only [\w-]+",
    "ausearch": "-m avc -ts recent",
    "conda": rf"install -p \S+ -c conda-forge( --force-reinstall)?{PACKAGES}|(list|remove --force) -p \S+{PACKAGES}",
    "dkms": "autoinstall",
    "dmesg": "",
    "dnf": f"install{PACKAGES}",
    "docker": r"run( --(gpus|runtime|device|ipc)[= ]\S+| -v /\S+:/\S+)+ …",
    "journalctl": r"-u [\w-]+",
    "ldconfig": "",
    "modprobe": r"(-r )?nvidia\w*( nvidia\w*)*",
    "mokutil": r"--import \S+\.der",
    "mount": r"-o remount,dev /\S+",
    "nixos-rebuild": "switch",
    "nvidia-ctk": r"cdi generate --output=\S+|runtime configure --runtime=docker"
    "|system create-dev-char-symlinks --create-all",
    "lxc": "config device add CONTAINER gpu gpu",
    "nvidia-cuda-mps-control": "-d|",
    "nvidia-modprobe": "-u -c=0|-c 0",
    "nvidia-smi": r"|-L|-c 0|-mig 0|-r( -i \d+)?|mig -lgip|mig -cgi 0 -C|conf-compute -srs 1",
    "pacman": f"-S(yu)?{PACKAGES}",
    "pdm": f"(add|remove){PACKAGES}",
    "pixi": rf"add{PACKAGES}|remove{PACKAGES}|clean|install|list \w+",
    "podman": r"run --device nvidia\.com/gpu=all …",
    "poetry": rf"(add( --source [\w-]+)?|remove){PACKAGES}|source add --priority=explicit [\w-]+ https://\S+",
    "prime-select": "on-demand",
    "python": r"…|-m ensurepip|-m venv( --system-site-packages)? \.venv|-c import torch; torch\.cuda\.init\(\)",
    "python3": r"-c import platform; print\(platform\.machine\(\)\)",
    "reboot": "",
    "rocminfo": "",
    "runsc": "nvproxy list-supported-drivers",
    "setsebool": "-P container_use_devices on",
    "singularity": "exec --nv IMAGE COMMAND",
    "srun": "--gres=gpu:1 --pty bash",
    "systemctl": r"(stop|start|restart|edit|enable|enable --now)( [\w.-]+)+",
    "systemd-nspawn": r"(--(bind=|property=DeviceAllow=)/dev/[\w-]+( rw)? )+…",
    "transload": "doctor --(timeout 120|python /path/to/python)",
    "ubuntu-drivers": "install",
    "update-initramfs": "-u",
    "usermod": r"-aG \w+(,\w+)* tester",
    "uv": rf"pip (un)?install --python \S+{PACKAGES}( :all:)?{PACKAGES}( --index-url https://\S+)?"
    rf"|pip (un)?install --python \S+{PACKAGES}( --index-url https://\S+)?|add( --index [\w-]+=https://\S+)?{PACKAGES}",
    "wsl": r"--shutdown|--update|-l -v|--set-version DISTRIBUTION 2",
    "zypper": f"install{PACKAGES}",
}
"""Programs that change the machine or may not be installed, and the arguments that are valid by their manuals."""

OTHER_SHELLS = re.compile(
    r"(set -e|unsetenv) \w+|set -gx \w+ \S+|setenv \w+ \S+",
    re.ASCII,
)
"""Commands for fish and csh."""

PIP = re.compile(r"\S*python -m pip ")
ROOT_FOLDERS = re.compile(r"(?<![\w.$~-])/(?=(?:etc|dev|usr|var|lib|opt|sys|proc|tmp|run|\.singularity\.d)(?:/|\b))")
FILES = re.compile(r"\.(?:conf|max|1|yaml|der)$|/cmdline$|/bin/python$|/dev/(?:nvidia(?!-caps)|dxg)")


# -- shell commands ----------------------------------------------------------------------------------------------------


def test_every_shell_command_runs(tmp_path: Path) -> None:
    programs, log = tmp_path / "bin", tmp_path / "log"
    on_unix = [fix for fix in fixes() if fix.machine.platform.system != "Windows"]
    commands = sorted({line for fix in on_unix for line in fix.commands if not PIP.match(line)})
    commands = [line for line in commands if not OTHER_SHELLS.fullmatch(line)]
    programs.mkdir()
    for name in REAL_PROGRAMS:
        (programs / name).symlink_to(shutil.which(name) or name)
    for name in STAND_INS:
        output = f"{name}: NVRM Xid nvidia libcuda.so.1 linux-modules-nvidia-$(uname -r)"
        write(programs / name, f'#!/bin/sh\nprintf "%s\\n" "{name} $*" >> {log}\necho "{output}"\n')
    write(programs / "sudo", '#!/bin/sh\nexec "$@"\n')
    script = []
    for number, line in enumerate(commands):
        root = tmp_path / str(number)
        command = ROOT_FOLDERS.sub(f"{root}/", line)
        assert not re.search(rf"(?<![\w.$~:/-])/(?!{str(root)[1:]}|\^D/|path/to/python)", command), command
        for path in re.findall(rf"{root}[^\s:'\"*\[]*", command):
            file = Path(path) if FILES.search(path) else Path(path, "x")
            write(file, f"nvidia vfio {root}/usr/local/cuda/lib64/stubs\n")
        write(root / "opt/venv/bin/python", f'#!/bin/sh\nexec {programs}/python "$@"\n')
        for installer in re.findall(r"\S+\.run\b", line):
            write(tmp_path / installer, '[ "$*" = --no-kernel-module ]\n')
        assignment = re.match(r"(?:export|unset) (\w+)", line)
        name = assignment[1] if assignment else "X"
        after = f'printf "%s\\n" "${{{name}-}}" > {root}/value'
        script.append(
            f"( set -eo pipefail; {name}=old\n{command}\n{after}\n) > {root}/out 2>&1"
            f" || {{ echo {number}; cat {root}/out; }}"
        )
    process = subprocess.run(
        [shutil.which("bash") or "bash", "-c", "\n".join(script)],
        env={"PATH": str(programs), "USER": "tester"},
        stdin=subprocess.DEVNULL,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    failed = [commands[int(line)] if line.isdecimal() else line for line in process.stdout.splitlines()]
    assert (failed, process.stderr) == ([], "")
    calls = re.sub(rf"{tmp_path}/\d+(?=/)", "", log.read_text())
    parsed = [line.partition(" ")[::2] for line in calls.splitlines()]
    assert [(name, arguments) for name, arguments in parsed if not re.fullmatch(STAND_INS[name], arguments)] == []
    assert {name for name, _ in parsed} == {*STAND_INS}
    for number, line in enumerate(commands):
        root = tmp_path / str(number)
        value = (root / "value").read_text().replace(str(root), "")
        if line.startswith(("export ", "unset ")):
            assert value == f"{shlex.split(line)[1].partition('=')[2]}\n", line
        elif tee := re.fullmatch(r"echo (.*) \| (?:sudo )?tee (\S+)", line):
            assert Path(f"{root}{tee[2]}").read_text().replace(str(root), "") == f"{''.join(shlex.split(tee[1]))}\n", (
                line
            )
        elif removed := re.fullmatch(r"(?:sudo )?rm(?: -r)? (\S+)", line):
            assert not Path(f"{root}{removed[1]}").exists(), line


def test_every_rule_fires_on_some_machine() -> None:
    fixes()
    assert {code for code, rule in BY_CODE.items() if rule.check and exists_on("Linux", code)} - FIRED == set()


def test_some_commands_are_for_other_shells() -> None:
    lines = {line for fix in fixes() for line in fix.commands if OTHER_SHELLS.fullmatch(line)}
    assert len(lines) >= 2


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


# -- pip commands ------------------------------------------------------------------------------------------------------

RUN_PIP = Path(__file__).with_name("run_pip.py")
PYPI = {"nvidia-cudnn-cu12": "9.10.2.21", "bitsandbytes": "0.50.2", "typing-extensions": "4.15.0", "mkl": "2023.2.0"}
PYPI |= {"ninja": "1.13.2", "packaging": "26.3", "setuptools": "84.2.1", "wheel": "0.48.0"}
COMPANIONS = ("torchvision", "torchaudio")
PINNED = ("2.4.0", "2.4.1", "2.9.0", "2.9.1", "2.10.0", "2.13.0")
"""Releases of torch that some command requests; the two newest are available as well."""


def test_every_pip_command_installs_the_named_release_and_build(tmp_path: Path) -> None:
    """Afterwards torch has the release and the build that the command names, and its companions have the same build."""
    site = scratch_venv(tmp_path / "venv")
    runs: dict[str, tuple[Fix, dict[str, object]]] = {}
    for fix in fixes():
        commands = [shlex.split(PIP.sub("", line)) for line in fix.commands if PIP.match(line)]
        if commands:
            pip_commands = [
                (arguments, {"PIP_FIND_LINKS": str(wheel_folder(tmp_path, fix, arguments))}) for arguments in commands
            ]
            before = packages_before(fix)
            runs.setdefault(f"{pip_commands} {'torch' in before}", (fix, {"before": before, "commands": pip_commands}))
    (tmp_path / "runs").write_text(json.dumps([run for _, run in runs.values()]))
    settings = {
        "PIP_NO_INDEX": "1",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_COMPILE": "1",
        "HOME": str(tmp_path),
    }
    process = subprocess.run(
        [str(tmp_path / "venv/bin/python"), str(RUN_PIP), str(site), str(tmp_path / "runs")],
        env={**settings, "PATH": os.defpath},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    wrong = []
    for (fix, _), (failed, versions) in zip(runs.values(), json.loads(process.stdout), strict=True):
        expected: dict[str, str] = {}
        for line in filter(PIP.match, fix.commands):
            expected |= expected_versions(fix, shlex.split(PIP.sub("", line)))
        if failed or {name: versions.get(name) for name in expected} != expected:
            wrong.append((fix.code, fix.commands, failed, versions, expected))
    assert wrong == []
    assert len(runs) > 30


def packages_before(fix: Fix) -> dict[str, tuple[str, str]]:
    """The packages in the environment before pip runs, with their versions and the content of their version.py."""
    first, intact = fix.machine.torch.first, fix.code in ("P05", "P06", "A03")  # torch itself works
    if any(line.startswith(".venv/") for line in fix.commands):  # a new environment
        return {}
    packages = {name: (version, "old") for name, version in fix.machine.python.packages.items() if name != "torch"}
    packages |= {"torch": (first.version or "1.0", first.version if intact else "old")} if first else {}
    removed = " ".join(line for line in fix.commands if re.match("poetry remove|pdm remove", line)).split()
    return {name: package for name, package in packages.items() if name not in removed}


def scratch_venv(folder: Path) -> Path:
    """An environment with nothing but pip, linked from the current one because installing it takes seconds."""
    venv.create(folder, symlinks=True)
    site = folder / "lib" / "python{}.{}".format(*sys.version_info) / "site-packages"
    pip = Path(pytest.importorskip("pip").__file__).parent
    for path in (pip, *pip.parent.glob("pip-*.dist-info")):
        (site / path.name).symlink_to(path)
    return site


def index_of(arguments: list[str]) -> str:
    """The last part of the index URL (``cu130``, ``cpu``), ``jetson``, or ``pypi`` without an index."""
    url = arguments[arguments.index("--index-url") + 1] if "--index-url" in arguments else ""
    assert not url or url.startswith((f"{INDEX}/", "https://pypi.jetson-ai-lab.io/")), url
    return url.removeprefix(f"{INDEX}/") if url.startswith(INDEX) else "jetson" if url else "pypi"


def available_builds(fix: Fix, index: str) -> dict[str, str]:
    """Release → build of torch in an index for the machine, according to the tables; the newest last."""
    platform, python = wheel_platform(fix.machine), numbers_of(fix.machine.python.version) or (3, 11)
    by_release = {}
    for release in releases():
        for build in index_builds(release, "linux-aarch64" if index == "jetson" else platform):
            if build.supports_python(python) and (
                build.on_pypi if index in ("pypi", "jetson") else build.build == index
            ):
                by_release[release] = build.build
    return by_release


def expected_versions(fix: Fix, arguments: list[str]) -> dict[str, str]:
    """The versions that a command must install, of torch and its companions."""
    wanted = [word for word in arguments[1:] if re.match(r"torch(?:vision|audio)?\b", word)]
    if arguments[0] != "install" or not any(word.startswith("torch") for word in wanted):
        return {}
    by_release = available_builds(fix, index_of(arguments))
    release = next((word.partition("==")[2] for word in wanted if word.startswith("torch==")), list(by_release)[-1])
    torch = {"torch": f"{release}+{by_release[release]}"}
    return torch | {
        name: f"{companion_version(release)}+{by_release[release]}" for name in COMPANIONS if name in wanted
    }


def companion_version(release: str) -> str:
    """A version number for the companions of a release of torch."""
    return f"0.{numbers_of(release)[0] * 100 + numbers_of(release)[1]}.{numbers_of(release)[2]}"


def wheel_folder(root: Path, fix: Fix, arguments: list[str]) -> Path:
    """A folder of wheels in place of an index: releases of torch with their companions and dependencies."""
    index = index_of(arguments)
    by_release = available_builds(fix, index)
    folder = root / "links" / f"{wheel_platform(fix.machine)}-{index}-{fix.machine.python.version}"
    if folder.exists():
        return folder
    folder.mkdir(parents=True)
    for release, build in by_release.items():
        if release not in PINNED and release not in list(by_release)[-2:]:
            continue
        local = "" if index == "pypi" else f"+{build}"
        requires = [f"nvidia-cudnn-{build[:4]}"] if build.startswith("cu") else []
        add_wheel(folder, "torch", f"{release}{local}", f"{release}+{build}", requires)
        for name in COMPANIONS:
            add_wheel(
                folder,
                name,
                f"{companion_version(release)}{local}",
                f"{companion_version(release)}+{build}",
                [f"torch=={release}"],
            )
    for name, version in (*PYPI.items(), ("nvidia-cudnn-cu13", "9.20.0.48"), ("nvidia-cudnn-cu13", "9.21.0.0")):
        add_wheel(folder, name, version, version, [])
    add_wheel(folder, "nvidia-cudnn-cu11", "8.9.0", "8.9.0", [])
    for name in ("flash-attn", "xformers"):
        add_source(folder, name)
        add_wheel(folder, name, "9.0", "9.0", [])
    return folder


def metadata(name: str, version: str, requires: list[str]) -> str:
    return "".join(
        (
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
            *(f"Requires-Dist: {package}\n" for package in requires),
        )
    )


def add_wheel(folder: Path, name: str, version: str, text: str, requires: list[str]) -> None:
    module = name.replace("-", "_")
    info = f"{module}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{module}-{version}-py3-none-any.whl", "w") as file:
        file.writestr(f"{module}/__init__.py", "")
        file.writestr(f"{module}/version.py", text)
        file.writestr(f"{info}/METADATA", metadata(name, version, requires))
        file.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        file.writestr(f"{info}/RECORD", "".join(f"{path},,\n" for path in (*file.namelist(), f"{info}/RECORD")))


BACKEND = """
import ninja, packaging, setuptools, wheel, zipfile
def build_wheel(folder, settings=None, metadata=None):
    info = "{module}-9.0.dist-info"
    with zipfile.ZipFile(folder + "/{module}-9.0-py3-none-any.whl", "w") as file:
        file.writestr("{module}/version.py", "compiled")
        file.writestr(info + "/METADATA", "Metadata-Version: 2.1\\nName: {name}\\nVersion: 9.0\\n")
        file.writestr(info + "/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        file.writestr(info + "/RECORD", "".join(each + ",,\\n" for each in [*file.namelist(), info + "/RECORD"]))
    return "{module}-9.0-py3-none-any.whl"
"""


def add_source(folder: Path, name: str) -> None:
    """Add a source distribution with its own build backend."""
    module = name.replace("-", "_")
    project = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    with tarfile.open(folder / f"{module}-9.0.tar.gz", "w:gz") as archive:
        for path, text in (
            ("PKG-INFO", metadata(name, "9.0", [])),
            ("pyproject.toml", project),
            ("backend.py", BACKEND.format(module=module, name=name)),
        ):
            entry = tarfile.TarInfo(f"{module}-9.0/{path}")
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))
