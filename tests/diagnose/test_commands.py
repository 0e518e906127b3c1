"""Every command that a fix prints is run, in an environment made for it.

pip runs in an environment of its own, with wheels made after the tables of builds in place of the indexes. Commands of
the shell run in bash below a folder that takes the place of the root directory. Programs that cannot run here are
replaced by stand-ins, which only take down how they were called: ``STAND_INS`` says how each may be. So no test runs
what is in ``STAND_INS``, nor the lines for shells in ``OTHER_SHELLS``. docs/tested-on.md names those that were run by
hand.
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

from transload.diagnose.fixes import wheel_platform
from transload.diagnose.rules import BY_CODE
from transload.diagnose.tables import INDEX, index_builds, numbers_of, releases

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="tests commands for Linux")

REAL = ("grep", "tail", "awk", "ls", "cat", "ps", "tee", "rm", "chmod", "uname", "sh")
"""Programs that run as they are, beside bash and pip."""

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
"""Programs that change a machine, or are not here, and how each is called, by its manual."""

OTHER_SHELLS = re.compile(
    r"(set -e|unsetenv|Remove-Item Env:)\s?\w+|Remove-Item -Recurse \"[^\"]+\""
    r"|set -gx \w+ \S+|setenv \w+ \S+|\$env:\w+ = \"[^\"]*\"",
    re.ASCII,
)
"""Lines for fish, csh and PowerShell."""

PIP = re.compile(r"\S*python -m pip ")
ROOT_FOLDERS = re.compile(r"(?<![\w.$~-])/(?=(?:etc|dev|usr|var|lib|opt|sys|proc|tmp|run|\.singularity\.d)(?:/|\b))")
FILES = re.compile(r"\.(?:conf|max|1|yaml|der)$|/cmdline$|/bin/python$|/dev/(?:nvidia(?!-caps)|dxg)")


# -- the shell ---------------------------------------------------------------------------------------------------------


def test_every_command_of_the_shell_runs(tmp_path: Path) -> None:
    forged, log = tmp_path / "bin", tmp_path / "log"
    commands = sorted({line for fix in fixes() for line in fix.commands if not PIP.match(line)})
    commands = [line for line in commands if not OTHER_SHELLS.fullmatch(line)]
    forged.mkdir()
    for name in REAL:
        (forged / name).symlink_to(shutil.which(name) or name)
    for name in STAND_INS:
        says = f"{name}: NVRM Xid nvidia libcuda.so.1 linux-modules-nvidia-$(uname -r)"
        write(forged / name, f'#!/bin/sh\nprintf "%s\\n" "{name} $*" >> {log}\necho "{says}"\n')
    write(forged / "sudo", '#!/bin/sh\nexec "$@"\n')
    script = []
    for number, line in enumerate(commands):
        root = tmp_path / str(number)
        here = ROOT_FOLDERS.sub(f"{root}/", line)
        assert not re.search(rf"(?<![\w.$~:/-])/(?!{str(root)[1:]}|\^D/|path/to/python)", here), here
        for path in re.findall(rf"{root}[^\s:'\"*\[]*", here):
            there = Path(path) if FILES.search(path) else Path(path, "x")
            write(there, f"nvidia vfio {root}/usr/local/cuda/lib64/stubs\n")
        write(root / "opt/venv/bin/python", f'#!/bin/sh\nexec {forged}/python "$@"\n')
        for installer in re.findall(r"\S+\.run\b", line):
            write(tmp_path / installer, '[ "$*" = --no-kernel-module ]\n')
        named = re.match(r"(?:export|unset) (\w+)", line)
        name = named[1] if named else "X"
        after = f'printf "%s\\n" "${{{name}-}}" > {root}/value'
        script.append(
            f"( set -eo pipefail; {name}=old\n{here}\n{after}\n) > {root}/out 2>&1"
            f" || {{ echo {number}; cat {root}/out; }}"
        )
    done = subprocess.run(
        [shutil.which("bash") or "bash", "-c", "\n".join(script)],
        env={"PATH": str(forged), "USER": "tester"},
        stdin=subprocess.DEVNULL,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    failed = [commands[int(line)] if line.isdecimal() else line for line in done.stdout.splitlines()]
    assert (failed, done.stderr) == ([], "")
    plain = re.sub(rf"{tmp_path}/\d+(?=/)", "", log.read_text())
    called = [line.partition(" ")[::2] for line in plain.splitlines()]
    assert [(name, how) for name, how in called if not re.fullmatch(STAND_INS[name], how)] == []
    assert {name for name, _ in called} == {*STAND_INS}
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


def test_every_cause_is_among_the_machines() -> None:
    fixes()
    assert {code for code, rule in BY_CODE.items() if rule.check} - FIRED == set()


def test_the_lines_for_other_shells_are_known() -> None:
    lines = {line for fix in fixes() for line in fix.commands if OTHER_SHELLS.fullmatch(line)}
    assert len(lines) >= 3


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


# -- pip ---------------------------------------------------------------------------------------------------------------

SCRIPT = Path(__file__).with_name("run_pip.py")
PYPI = {"nvidia-cudnn-cu12": "9.10.2.21", "bitsandbytes": "0.50.2", "typing-extensions": "4.15.0", "mkl": "2023.2.0"}
PYPI |= {"ninja": "1.13.2", "packaging": "26.3", "setuptools": "84.2.1", "wheel": "0.48.0"}
NAMES = ("torchvision", "torchaudio")
NAMED = ("2.4.0", "2.4.1", "2.9.0", "2.9.1", "2.10.0", "2.13.0")
"""Releases of torch that some command asks for; the newest are there as well."""


def test_every_command_of_pip_installs_what_it_names(tmp_path: Path) -> None:
    """What is then installed is the release and the build that the command names, with the packages of that build."""
    site = scratch(tmp_path / "venv")
    runs: dict[str, tuple[Fix, dict[str, object]]] = {}
    for fix in fixes():
        commands = [shlex.split(PIP.sub("", line)) for line in fix.commands if PIP.match(line)]
        if commands:
            told = [(words, {"PIP_FIND_LINKS": str(links(tmp_path, fix, words))}) for words in commands]
            before = found_before(fix)
            runs.setdefault(f"{told} {'torch' in before}", (fix, {"before": before, "commands": told}))
    (tmp_path / "runs").write_text(json.dumps([run for _, run in runs.values()]))
    settings = {
        "PIP_NO_INDEX": "1",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_COMPILE": "1",
        "HOME": str(tmp_path),
    }
    done = subprocess.run(
        [str(tmp_path / "venv/bin/python"), str(SCRIPT), str(site), str(tmp_path / "runs")],
        env={**settings, "PATH": os.defpath},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    wrong = []
    for (fix, _), (failed, versions) in zip(runs.values(), json.loads(done.stdout), strict=True):
        expected: dict[str, str] = {}
        for line in filter(PIP.match, fix.commands):
            expected |= installed(fix, shlex.split(PIP.sub("", line)))
        if failed or {name: versions.get(name) for name in expected} != expected:
            wrong.append((fix.code, fix.commands, failed, versions, expected))
    assert wrong == []
    assert len(runs) > 30


def found_before(fix: Fix) -> dict[str, tuple[str, str]]:
    """The packages in the environment when pip is called, with their versions and what is found in them."""
    first, whole = fix.machine.torch.first, fix.code in ("P05", "P06", "A03")  # torch itself is
    if any(line.startswith(".venv/") for line in fix.commands):  # a new one
        return {}
    found = {name: (version, "old") for name, version in fix.machine.python.packages.items() if name != "torch"}
    found |= {"torch": (first.version or "1.0", first.version if whole else "old")} if first else {}
    removed = " ".join(line for line in fix.commands if re.match("poetry remove|pdm remove", line)).split()
    return {name: held for name, held in found.items() if name not in removed}


def scratch(folder: Path) -> Path:
    """An environment with nothing but pip, which is borrowed from ours: to install it takes seconds."""
    venv.create(folder, symlinks=True)
    site = folder / "lib" / "python{}.{}".format(*sys.version_info) / "site-packages"
    pip = Path(pytest.importorskip("pip").__file__).parent
    for path in (pip, *pip.parent.glob("pip-*.dist-info")):
        (site / path.name).symlink_to(path)
    return site


def index_of(arguments: list[str]) -> str:
    """The last part of the index's address: ``cu130``, ``cpu``; ``pypi`` without one."""
    url = arguments[arguments.index("--index-url") + 1] if "--index-url" in arguments else ""
    assert not url or url.startswith((f"{INDEX}/", "https://pypi.jetson-ai-lab.io/")), url
    return url.removeprefix(f"{INDEX}/") if url.startswith(INDEX) else "jetson" if url else "pypi"


def builds(fix: Fix, index: str) -> dict[str, str]:
    """Release → build of the torch that an index has for the machine, by the tables; the newest last."""
    platform, python = wheel_platform(fix.machine), numbers_of(fix.machine.python.version) or (3, 11)
    found = {}
    for release in releases():
        for build in index_builds(release, "linux-aarch64" if index == "jetson" else platform):
            if build.supports_python(python) and (
                build.on_pypi if index in ("pypi", "jetson") else build.build == index
            ):
                found[release] = build.build
    return found


def installed(fix: Fix, arguments: list[str]) -> dict[str, str]:
    """What a command must have installed: the version of torch, and those of the packages that belong to it."""
    wanted = [word for word in arguments[1:] if re.match(r"torch(?:vision|audio)?\b", word)]
    if arguments[0] != "install" or not any(word.startswith("torch") for word in wanted):
        return {}
    known = builds(fix, index_of(arguments))
    exact = next((word.partition("==")[2] for word in wanted if word.startswith("torch==")), list(known)[-1])
    made = {"torch": f"{exact}+{known[exact]}"}
    return made | {name: f"{companion(exact)}+{known[exact]}" for name in NAMES if name in wanted}


def companion(release: str) -> str:
    """A version number for what belongs to a release of torch."""
    return f"0.{numbers_of(release)[0] * 100 + numbers_of(release)[1]}.{numbers_of(release)[2]}"


def links(folder: Path, fix: Fix, arguments: list[str]) -> Path:
    """A folder of wheels in place of an index: of torch, all releases with all that belongs to them."""
    index = index_of(arguments)
    known = builds(fix, index)
    place = folder / "links" / f"{wheel_platform(fix.machine)}-{index}-{fix.machine.python.version}"
    if place.exists():
        return place
    place.mkdir(parents=True)
    for release, build in known.items():
        if release not in NAMED and release not in list(known)[-2:]:
            continue
        local = "" if index == "pypi" else f"+{build}"
        needs = [f"nvidia-cudnn-{build[:4]}"] if build.startswith("cu") else []
        wheel(place, "torch", f"{release}{local}", f"{release}+{build}", needs)
        for name in NAMES:
            wheel(place, name, f"{companion(release)}{local}", f"{companion(release)}+{build}", [f"torch=={release}"])
    for name, version in (*PYPI.items(), ("nvidia-cudnn-cu13", "9.20.0.48"), ("nvidia-cudnn-cu13", "9.21.0.0")):
        wheel(place, name, version, version, [])
    wheel(place, "nvidia-cudnn-cu11", "8.9.0", "8.9.0", [])
    for name in ("flash-attn", "xformers"):
        source(place, name)
        wheel(place, name, "9.0", "9.0", [])
    return place


def metadata(name: str, version: str, needs: list[str]) -> str:
    return "".join(
        (f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", *(f"Requires-Dist: {each}\n" for each in needs))
    )


def wheel(place: Path, name: str, version: str, text: str, needs: list[str]) -> None:
    module = name.replace("-", "_")
    info = f"{module}-{version}.dist-info"
    with zipfile.ZipFile(place / f"{module}-{version}-py3-none-any.whl", "w") as file:
        file.writestr(f"{module}/__init__.py", "")
        file.writestr(f"{module}/version.py", text)
        file.writestr(f"{info}/METADATA", metadata(name, version, needs))
        file.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        file.writestr(f"{info}/RECORD", "".join(f"{each},,\n" for each in (*file.namelist(), f"{info}/RECORD")))


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


def source(place: Path, name: str) -> None:
    """A source distribution that builds itself."""
    module = name.replace("-", "_")
    project = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    with tarfile.open(place / f"{module}-9.0.tar.gz", "w:gz") as archive:
        for path, text in (
            ("PKG-INFO", metadata(name, "9.0", [])),
            ("pyproject.toml", project),
            ("backend.py", BACKEND.format(module=module, name=name)),
        ):
            entry = tarfile.TarInfo(f"{module}-9.0/{path}")
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))
