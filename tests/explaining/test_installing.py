"""Why torch cannot be installed: which of the reasons for a message of pip, uv or conda holds on a machine."""

from __future__ import annotations

import shutil
from collections import namedtuple
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

from tests.diagnose.machines import healthy, no_torch_run, with_facts, without_gpu
from tests.each import for_each

import transload
from transload.diagnose import tables
from transload.diagnose.report import judge_machine
from transload.explaining import Answer, MachineCheck
from transload.explaining.installing import Wanted, _meets, pip_release, wanted
from transload.machine import Machine

if TYPE_CHECKING:
    import pytest


def pip(requirement: str = "torch", versions: str = "none", before: str = "") -> str:
    first = f"ERROR: Could not find a version that satisfies the requirement {requirement} (from versions: {versions})"
    return f"{before}\n{first}\nERROR: No matching distribution found for {requirement}\n"


def index(name: str) -> str:
    return f"Looking in indexes: https://download.pytorch.org/whl/{name}"


def answer(text: str, machine: Machine) -> Answer:
    with mock.patch("transload.diagnose.doctor", return_value=judge_machine(no_torch_run(machine))):
        (only,) = transload.explain(text).answers
    return only


def reason(text: str, machine: Machine) -> MachineCheck:
    check = answer(text, machine).machine
    assert check is not None
    return check


def without_torch(machine: Machine, **facts: Any) -> Machine:
    return with_facts(machine, torch__installs=(), extensions=(), **facts)


LINUX = without_torch(without_gpu())
WINDOWS = without_torch(
    without_gpu(),
    platform__system="Windows",
    platform__machine="AMD64",
    platform__libc="",
    platform__package_manager="",
    python__executable="C:\\env\\Scripts\\python.exe",
)
MAC = with_facts(WINDOWS, platform__system="Darwin", platform__machine="x86_64", python__executable="/opt/bin/python3")
UV = "error: No solution found when resolving dependencies\n  cause: Because {} and you require {}, we can conclude"


class Expected(NamedTuple):
    """A message, a machine, and what the answer must contain: the title, the code, and a step of the fix."""

    name: str
    text: str
    machine: Machine
    title: str
    code: str
    fix: str


def on(machine: Machine, python: str, **facts: Any) -> Machine:
    return with_facts(machine, python__version=python, **facts)


P07 = "Create an environment with Python "
ROWS: tuple[tuple[str, str, Machine, str, str, str], ...] = (
    ("too new", pip(), on(LINUX, "3.17.0"), "Python 3.17 is too new for torch", "P07", f"{P07}3.11 to 3.15"),
    ("too old", pip(), on(WINDOWS, "3.4.1"), "Python 3.4 is too old for torch", "P07", f"{P07}3.11 to 3.15"),
    ("32 bits", pip(), on(WINDOWS, "3.12.1", python__bits=32), "32-bit Python", "P08", "64-bit Python"),
    ("musl", pip(), on(LINUX, "3.12.1", platform__libc="musl 1.2"), "musl", "P08", "glibc 2.28"),
    ("armv7", pip(), on(LINUX, "3.12.1", platform__machine="armv7l"), "Linux on armv7l", "P08", "64-bit Arm"),
    ("i686", pip(), on(LINUX, "3.12.1", platform__machine="i686"), "Linux on i686", "P08", "x86-64"),
    ("PyPy", pip(), on(LINUX, "3.10.1", python__implementation="pypy"), "for pypy", "P07", P07),
    ("Arm", pip(), on(WINDOWS, "3.12.1", platform__machine="ARM64"), "Windows on Arm", "W02", "/whl/cpu"),
    ("Arm, 3.14", pip(), on(WINDOWS, "3.14.0", platform__machine="ARM64"), "Arm", "W02", f"{P07}3.11 to 3.13"),
    ("Intel Mac", pip(), on(MAC, "3.13.1"), "Intel Macs up to 2.2.2 only", "P07", f"{P07}3.8 to 3.12"),
    ("Intel Mac, 2.3", pip("torch>=2.3"), on(MAC, "3.12.1"), "no wheels for macos-x86_64", "", "pip install"),
    (
        "free-threaded",
        pip(),
        on(LINUX, "3.12.1", python__free_threaded=True),
        "Python 3.12t is free-threaded",
        "P07",
        P07,
    ),
    (
        "older release",
        pip("torch==1.4.0", "2.5.0, 2.15.0"),
        on(LINUX, "3.13.1"),
        "torch 1.4.0 has wheels for Python 3.5 to 3.8, and this is 3.13",
        "P07",
        f"{P07}3.5 to 3.8",
    ),
    (
        "newer release",
        pip("torch>=2.15", "2.14.1"),
        on(LINUX, "3.10.1"),
        "torch 2.15.0 has wheels for Python 3.11 to 3.15, and this is 3.10",
        "P07",
        f"{P07}3.11 to 3.15",
    ),
    (
        "2.5 on Windows",
        pip("torch==2.5.1", "2.6.0"),
        on(WINDOWS, "3.13.1"),
        "torch 2.5.1 has wheels for Python 3.9 to 3.12, and this is 3.13",
        "P07",
        f"{P07}3.9 to 3.12",
    ),
    (
        "no release",
        pip("torch==2.1.3", "2.1.2"),
        LINUX,
        "there is no torch 2.1.3",
        "",
        "Install one that exists",
    ),
    (
        "old glibc",
        pip("torch==2.9.0"),
        on(LINUX, "3.11.1", platform__libc="glibc 2.17"),
        "needs glibc 2.28",
        "P08",
        "glibc 2.28 or newer",
    ),
    (
        "without index",
        pip("torch==2.5.1+cu121", "2.5.1"),
        LINUX,
        "2.5.1+cu121 is not on PyPI",
        "",
        "pip install torch==2.5.1 --index-url https://download.pytorch.org/whl/cu121",
    ),
    (
        "no such build",
        pip("torch==2.1.0+cu130", "2.1.0"),
        LINUX,
        "there is no cu130 build of torch 2.1.0",
        "",
        "Install a build that exists:",
    ),
    (
        "old index",
        pip(before=index("cu118")),
        on(WINDOWS, "3.14.0"),
        "cu118 has no torch for Python 3.14",
        "",
        "Use the index for this machine:",
    ),
    (
        "CUDA on a Mac",
        pip(before=index("cu126")),
        on(with_facts(MAC, platform__machine="arm64"), "3.12.1"),
        "the index cu126 has no torch for Python 3.12 on macos-arm64",
        "",
        "pip install torch",
    ),
    (
        "torchvision",
        pip("torchvision==0.10.0", "0.17.0"),
        on(LINUX, "3.12.1"),
        "torchvision 0.10.0 is made for torch 1.9, which has wheels for Python 3.6 to 3.9",
        "P07",
        P07,
    ),
    (
        "torchaudio",
        pip("torchaudio==0.13.1", "2.2.0"),
        on(LINUX, "3.12.1"),
        "torchaudio 0.13.1 is made for torch 1.13, which has wheels for Python 3.7 to 3.11",
        "P07",
        P07,
    ),
    (
        "uv",
        UV.format("torch==2.4.0 has no wheels with a matching Python ABI tag (e.g., `cp313`)", "torch==2.4.0"),
        on(LINUX, "3.13.1"),
        "torch 2.4.0 has wheels for Python 3.8 to 3.12, and this is 3.13",
        "P07",
        P07,
    ),
    (
        "uv, local",
        UV.format("there is no version of torch==2.5.1+cu121", "torch==2.5.1+cu121"),
        LINUX,
        "2.5.1+cu121 is not on PyPI",
        "",
        "--index-url https://download.pytorch.org/whl/cu121",
    ),
    (
        "system",
        "torch-2.1.0-cp311-cp311-win_amd64.whl is not a supported wheel on this platform.",
        LINUX,
        "the wheel is for Windows, and this is Linux",
        "",
        "pip install",
    ),
    (
        "processor",
        "torch-2.1.0-cp311-cp311-manylinux2014_aarch64.whl is not a supported wheel on this platform.",
        LINUX,
        "the wheel is for aarch64 processors, and this machine has x86_64",
        "",
        "pip install",
    ),
    (
        "Python",
        "torch-2.5.1+cu121-cp310-cp310-linux_x86_64.whl is not a supported wheel on this platform.",
        LINUX,
        "the wheel is for Python 3.10, and this is 3.11",
        "",
        "pip install torch==2.5.1 --index-url https://download.pytorch.org/whl/cu121",
    ),
    (
        "GIL",
        "torch-2.9.0-cp314-cp314t-win_amd64.whl is not a supported wheel on this platform.",
        on(WINDOWS, "3.14.0"),
        "the wheel is for a free-threaded Python, and this Python has the GIL",
        "",
        "pip",
    ),
    (
        "glibc",
        "torch-2.9.0-cp311-cp311-manylinux_2_28_x86_64.whl is not a supported wheel on this platform.",
        with_facts(LINUX, platform__libc="glibc 2.17"),
        "needs glibc 2.28, and this system has glibc 2.17",
        "P08",
        "",
    ),
)
REASONS = tuple(Expected(*row) for row in ROWS)


def test_reason_that_holds_on_this_machine_is_named_with_its_fix() -> None:
    def check(expected: Expected) -> None:
        found = reason(expected.text, expected.machine)
        assert found.fits
        assert expected.title in found.title
        assert found.code == expected.code
        assert expected.fix in "\n".join(found.fix)
        assert "break-system-packages" not in "\n".join(found.fix)
        assert "--upgrade pip" not in "\n".join(found.fix)

    for_each(REASONS, check)


def test_general_reasons_are_left_out_where_one_is_known() -> None:
    known, unknown = answer(pip(), on(LINUX, "3.17.0")), answer(pip(), LINUX)
    assert known.machine is not None
    assert known.fix == known.machine.fix
    assert any("32-bit" in step for step in unknown.fix)


def test_machine_for_which_the_index_has_wheels_is_not_to_blame() -> None:
    clean = dict.fromkeys(("PIP_INDEX_URL", "PIP_FIND_LINKS", "PIP_NO_INDEX", "PIP_EXTRA_INDEX_URL"), "")
    texts = (
        pip(),
        pip("torch==2.9.0"),
        pip("torchvision==0.24.0"),
        pip(before=index("cu126")),
        pip("torch==2.9.0+cu126", before=index("cu126")),
        "torch-2.9.0-cp311-cp311-manylinux_2_28_x86_64.whl is not a supported wheel on this platform.",
    )

    def check(text: str) -> None:
        with mock.patch.dict("os.environ", clean):
            found = reason(text, LINUX)
        assert not found.fits
        assert "may come from another Python or index" in found.title

    for_each(texts, check)


def test_index_other_than_pypi_is_named() -> None:
    found = reason(pip(before="Looking in indexes: https://me:secret@mirror.example/simple"), LINUX)
    assert not found.fits
    assert "the index that was asked: https://…@mirror.example/simple" in found.evidence


def test_address_that_is_none_is_shown_as_it_is() -> None:
    found = reason(pip(before="Looking in indexes: http://[me:secret/simple"), LINUX)
    assert any("http://[" in line for line in found.evidence)


def test_old_list_of_links_has_every_build() -> None:
    links = "Looking in links: https://download.pytorch.org/whl/torch_stable.html"
    assert not reason(pip("torch==2.1.0+cu121", before=links), LINUX).fits
    other = reason(pip("torch==2.1.0+cu121", before=index("cu118")), LINUX)
    assert "is not on the index cu118, but on PyTorch's own index cu121" in other.title


def test_settings_of_pip_are_shown_without_passwords() -> None:
    with mock.patch.dict("os.environ", {"PIP_INDEX_URL": "https://me:secret@mirror.example/simple"}):
        found = reason(pip(), LINUX)
    assert "PIP_INDEX_URL=https://…@mirror.example/simple" in found.evidence
    assert "secret" not in str(found)


def test_message_of_uv_about_another_python_is_not_about_this_one() -> None:
    text = UV.format("torch==2.4.0 has no wheels with a matching Python ABI tag (e.g., `cp313`)", "torch==2.4.0")
    found = reason(text, on(LINUX, "3.11.7"))
    assert not found.fits
    assert "about the Python cp313, and the examined one is cp311" in found.title


def test_old_pip_is_to_blame_only_before_20_3(tmp_path: Path) -> None:
    """pip 20.2.4 says "from versions: none" with Python 3.10, and pip 20.3 installs torch there."""

    def found(release: str) -> MachineCheck:
        site = tmp_path / release
        (site / f"pip-{release}.dist-info").mkdir(parents=True)
        machine = on(LINUX, "3.10.1", python__path=(str(tmp_path / "absent"), str(site)))
        assert pip_release(machine) == release
        return reason(pip("torch==2.9.0"), machine)

    assert found("20.2.4").fits
    assert "pip install --upgrade pip" in found("20.2").fix[-1]
    assert not found("20.3.4").fits


def test_full_disk_names_the_folder_that_has_no_room() -> None:
    text = "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device"
    usage = namedtuple("usage", "total used free")  # noqa: PYI024

    def free(gigabytes: dict[str, int]) -> MachineCheck:
        def disk_usage(folder: str) -> Any:
            return usage(0, 0, gigabytes.get(folder, 100) << 30)

        with mock.patch.object(shutil, "disk_usage", disk_usage), mock.patch("tempfile.gettempdir", return_value="/t"):
            return reason(text, with_facts(LINUX, python__prefix="/env"))

    temporary, environment, neither = free({"/t": 1}), free({"/env": 1}), free({})
    assert temporary.fits
    assert "temporary files (TMPDIR)" in temporary.title
    assert "$ export TMPDIR=/env/tmp" in temporary.fix
    assert environment.fits
    assert "the environment" in environment.title
    assert "$ python -m pip cache purge" in environment.fix
    assert "whl/cpu" in environment.fix[-1]
    assert not neither.fits
    assert "there is room now" in neither.title


def test_python_of_the_system_gets_an_environment() -> None:
    text = "error: externally-managed-environment\n\n× This environment is externally managed"
    managed = with_facts(LINUX, python__externally_managed=True, python__executable="/usr/bin/python3")
    found = reason(text, managed)
    assert found.fits
    assert "$ /usr/bin/python3 -m venv .venv" in found.fix
    assert not reason(text, LINUX).fits


PROXY = (
    "Retrying (Retry(total=0)) after connection broken by 'ProxyError('Cannot connect to proxy.', x)': /simple/torch/"
)


def test_proxy_of_this_process_is_shown_without_its_password(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy", "PIP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert "no variable of this process names a proxy" in reason(PROXY, LINUX).title
    monkeypatch.setenv("HTTPS_PROXY", "http://me:secret@proxy:3128")
    found = reason(PROXY, LINUX)
    assert found.fits
    (shown,) = found.evidence
    name, _, value = shown.partition("=")
    assert (name.upper(), value) == ("HTTPS_PROXY", "http://…@proxy:3128")  # Windows ignores case


def test_variable_that_names_missing_certificates_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = "Could not fetch URL https://pypi.org/simple/torch/: There was a problem confirming the ssl certificate: x"
    for name in ("PIP_CERT", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
    assert answer(text, LINUX).machine is None
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path))
    assert not reason(text, LINUX).fits
    monkeypatch.setenv("PIP_CERT", "/absent.pem")
    assert reason(text, LINUX).evidence == ("PIP_CERT=/absent.pem",)


def test_limit_of_paths_is_looked_up_on_windows() -> None:
    text = "ERROR: Could not install packages due to an OSError: [WinError 206] The filename is too long: 'C:\\\\a'"
    limited = with_facts(WINDOWS, platform__long_paths=False, python__prefix="C:\\Users\\me\\env")
    assert reason(text, limited).fits
    assert "has 15 characters" in reason(text, limited).evidence[0]
    assert any("LongPathsEnabled" in step for step in answer(text, limited).fix)
    assert not reason(text, with_facts(WINDOWS, platform__long_paths=True)).fits
    assert answer(text, LINUX).machine is None


def test_card_decides_which_torch_replaces_one_that_does_not_exist() -> None:
    found = reason(pip("torch==2.1.3"), without_torch(healthy()))
    assert "torch==2.15.0" in "\n".join(found.fix)
    assert "whl/cpu" not in "\n".join(found.fix)


def test_requirement_is_read_from_the_message() -> None:
    asked = wanted(
        "Could not find a version that satisfies the requirement torch==2.1.0+cu121 (from -r r.txt (line 3)) "
        "(from versions: 2.0.0, 2.1.0)",
        "Looking in indexes: https://pypi.org/simple, https://download.pytorch.org/whl/cu121 Collecting numpy",
    )
    indexes = ("https://pypi.org/simple", "https://download.pytorch.org/whl/cu121")
    assert asked == Wanted("torch", "==", "2.1.0", "cu121", indexes)


RELATIONS = {
    "": (True, True, True),
    "==2.8": (False, True, False),
    "==2.8.0": (False, True, False),
    "!=2.8.0": (True, False, True),
    ">=2.8": (False, True, True),
    ">2.8": (False, False, True),
    "<2.8": (True, False, False),
    "<=2.8": (True, True, False),
    "~=2.8": (False, True, True),
}


def test_relations_of_a_requirement_select_releases() -> None:
    def check(requirement: str) -> None:
        asked = wanted(f"the requirement torch{requirement} (", "")
        assert tuple(_meets(release, asked) for release in ("2.7.1", "2.8.0", "2.9.0")) == RELATIONS[requirement]

    for_each(RELATIONS, check)


def test_every_release_has_the_pythons_of_each_platform() -> None:
    for release in (*tables.earlier_releases(), *tables.releases()):
        pythons = tables.wheel_pythons(release, "linux-x86_64")
        assert pythons is not None
        assert pythons[0] < pythons[1]
    assert tables.wheel_pythons("2.3.0", "macos-x86_64") is None
    assert tables.wheel_pythons("2.5.1", "windows") == ((3, 9), (3, 12))
    assert tables.wheel_pythons("9.9.9", "windows") is None
