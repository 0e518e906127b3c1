"""Every torch on the path, by files alone: real wheels' layouts, broken ones, and what stands in their way."""

from __future__ import annotations

import os
import struct
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from tests.diagnose.probes.installs import VERSION, plant, wheel
from tests.diagnose.trees import TreeHost

from transload.diagnose.host import Host
from transload.diagnose.probes.python import build, python, torch
from transload.machine import Python, Torch, TorchInstall, Unknown

PREFIX = "/opt/venv"
SITE = f"{PREFIX}/lib/python3.11/site-packages"
USER = "/home/user/.local/lib/python3.11/site-packages"
CWD = "/home/user/project"
PYTHON = Python(f"{PREFIX}/bin/python", "3.11.7", prefix=PREFIX, base_prefix="/usr", path=("/usr/lib/python3.11", SITE))


@pytest.fixture
def host(tmp_path: Path) -> TreeHost:
    plant(tmp_path, {f"{CWD}/": "", "/usr/lib/python3.11/os.py": "", f"{SITE}/": ""})
    return TreeHost(root=str(tmp_path), python=PYTHON.executable, cwd=CWD)


def looked(host: TreeHost, *files: Mapping[str, str | bytes], path: tuple[str, ...] = PYTHON.path) -> Torch:
    for each in files:
        plant(Path(host.root), each)
    return torch(host, replace(PYTHON, path=path))


def only(found: Torch) -> TorchInstall:
    assert isinstance(found.installs, tuple)
    (one,) = found.installs
    return one


def test_a_wheel_as_pip_installs_it(host: TreeHost) -> None:
    found = looked(host, wheel(SITE))
    one = only(found)
    assert found == Torch(installs=(one,))
    assert (one.location, one.version, one.cuda, one.hip, one.xpu) == (f"{SITE}/torch", "2.15.0+cu132", "13.2", "", "")
    assert one.known
    assert not one.cpu_only
    assert one.dist_info == f"{SITE}/torch-2.15.0.dist-info"
    assert (one.dist_version, one.installer) == ("2.15.0", "pip")
    assert one.tags == ("cp311-cp311-manylinux_2_28_x86_64",)
    assert one.missing == one.unlisted == one.altered == one.replaced_by == ()
    assert one.installed > 0


def test_there_is_none(host: TreeHost) -> None:
    assert looked(host) == Torch(installs=())


def test_an_interpreter_that_could_not_be_asked_leaves_it_open(host: TreeHost) -> None:
    found = torch(host, Python(problem="it hangs"))
    assert found.installs == Unknown("it hangs")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("__version__ = '1.0.0'\ndebug = False\ncuda = '9.0.176'\n", ("1.0.0", "9.0.176", "", "")),
        ("__version__ = '1.13.1+cu117'\ndebug = False\ncuda = '11.7'\nhip = None\n", ("1.13.1+cu117", "11.7", "", "")),
        (VERSION.format(version="2.13.0+cpu", cuda=None, hip=None), ("2.13.0+cpu", "", "", "")),
        (VERSION.format(version="2.4.0+rocm6.1", cuda=None, hip="6.1.40091-a8dbc0c19"), None),
        ("__version__ = '2.8.0+xpu'\ncuda: Optional[str] = None\nxpu: Optional[str] = '20250101'\n", None),
        (
            "__version__ = u'2.5.0a0+872d972e41.nv24.08'\r\ncuda = \"12.6\"\r\n",
            ("2.5.0a0+872d972e41.nv24.08", "12.6", "", ""),
        ),
        ("\ufeff__version__='2.6.0'\ncuda: str | None='12.4'\n", ("2.6.0", "12.4", "", "")),
        ("__version__ = 'x'\ncuda = '1'\n__version__ = '2.6.0'\ncuda = None\n", ("2.6.0", "", "", "")),
    ],
)
def test_version_files_of_many_releases(host: TreeHost, text: str, expected: tuple[str, ...] | None) -> None:
    plant(Path(host.root), {f"{SITE}/torch/version.py": text})
    built = build(host, f"{SITE}/torch")
    assert not built.problem
    if expected:
        assert (built.version, built.cuda, built.hip, built.xpu) == expected
    else:
        assert built.hip == "6.1.40091-a8dbc0c19" or built.xpu == "20250101"


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "names no version"),
        (bytes(range(256)) * 100, "names no version"),
        (b"\xff\xfe" + "__version__ = '2.6.0'".encode("utf-16-le"), "names no version"),
        (b"__version__ = '2.15.0+cu1", "names no version"),
        (b"x = 1\n" * 100_000 + b"__version__ = '2.6.0'\ncuda = None\n", "names no version"),
        (b"__version__ = '2.6.0'\n", "does not say what it was built for"),
        (b"__version__ = '2.6.0'\ncuda = subprocess.run('nvcc')\n", "does not say what it was built for"),
        (None, "does not exist"),
    ],
)
def test_a_version_file_that_says_nothing(host: TreeHost, content: bytes | None, problem: str) -> None:
    plant(Path(host.root), wheel(SITE))
    file = Path(host.root) / f"{SITE[1:]}/torch/version.py"
    file.unlink() if content is None else file.write_bytes(content)
    one = only(looked(host))
    assert not one.known
    assert not one.cpu_only
    assert problem in one.problem
    assert "torch/version.py" in one.problem
    assert one.dist_version == "2.15.0"


def test_a_dist_info_without_metadata(host: TreeHost) -> None:
    files = wheel(SITE)
    gone = [name for name in files if ".dist-info/" in name]
    one = only(
        looked(host, {name: text for name, text in files.items() if name not in gone}, {gone[1]: files[gone[1]]})
    )
    assert (one.known, one.dist_version, one.installer, one.missing) == (True, "2.15.0", "", ())


def test_garbage_for_metadata(host: TreeHost) -> None:
    files = wheel(SITE)
    noise = {name: bytes(range(256)) for name in files if ".dist-info/" in name}
    direct = {f"{SITE}/torch-2.15.0.dist-info/direct_url.json": b"[" * 100_000}
    one = only(looked(host, files, noise, direct))
    assert (one.version, one.dist_version, one.tags, one.missing) == ("2.15.0+cu132", "2.15.0", (), ())


def test_a_file_that_is_gone_or_cut_off(host: TreeHost) -> None:
    looked(host, wheel(SITE))
    lib = Path(host.root) / f"{SITE[1:]}/torch/lib"
    (lib / "libtorch_cuda.so").unlink()
    (lib / "libc10.so").write_bytes(b"\x7fELF")
    assert only(looked(host)).missing == ("lib/libc10.so: cut off after 4 of 100 bytes", "lib/libtorch_cuda.so: absent")


def elf(mapped: int, size: int) -> bytes:
    """An ELF file of a size, of which the loader maps so much."""
    head = struct.pack("<4sBB10xHHIQQQIHHHHHH", b"\x7fELF", 2, 1, 3, 62, 1, 0, 64, 0, 0, 64, 56, 1, 64, 0, 0)
    return (head + struct.pack("<IIQQQQQQ", 1, 5, 0, 0, 0, mapped, mapped, 4096)).ljust(size, b"\0")


@pytest.mark.parametrize(("mapped", "whole"), [(120, True), (150, True), (151, False), (200, False)])
def test_a_stripped_library_is_whole_and_a_cut_one_is_not(host: TreeHost, mapped: int, whole: bool) -> None:
    record = {f"{SITE}/torch-2.15.0.dist-info/RECORD": "torch/lib/libc10.so,sha256=x,200\n"}
    one = only(looked(host, wheel(SITE) | record | {f"{SITE}/torch/lib/libc10.so": elf(mapped, 150)}))
    said = ("lib/libc10.so: 150 bytes instead of 200",) if whole else ()
    assert one.altered == said
    assert one.missing == (() if whole else ("lib/libc10.so: cut off after 150 of 200 bytes",))


def test_a_library_that_record_does_not_know(host: TreeHost) -> None:
    one = only(looked(host, wheel(SITE) | {f"{SITE}/torch/lib/libcudnn.so.8": "", f"{SITE}/torch/lib/notes.txt": ""}))
    assert one.unlisted == ("lib/libcudnn.so.8",)


def test_a_library_of_torchs_own_tests_may_be_gone(host: TreeHost) -> None:
    record = {f"{SITE}/torch-2.15.0.dist-info/RECORD": "torch/lib/libtorchbind_test.so,sha256=x,200\n"}
    assert only(looked(host, wheel(SITE), record)).missing == ()


def test_a_library_that_is_larger_is_not_cut_off(host: TreeHost) -> None:
    one = only(looked(host, wheel(SITE), {f"{SITE}/torch/lib/libc10.so": bytes(300)}))
    assert (one.missing, one.altered) == ((), ("lib/libc10.so: 300 bytes instead of 100",))


def test_an_install_without_its_compiled_half(host: TreeHost) -> None:
    files = {name: text for name, text in wheel(SITE).items() if "/_C" not in name and "/lib/" not in name[20:]}
    found = looked(host, files)
    assert found.shadow == ""
    assert only(found).missing[:2] == ("_C.cpython-311-x86_64-linux-gnu.so: absent", "lib/libc10.so: absent")


def test_files_without_a_dist_info(host: TreeHost) -> None:
    found = looked(host, {name: text for name, text in wheel(SITE).items() if ".dist-info" not in name})
    one = only(found)
    assert found.shadow == ""
    assert (one.version, one.dist_info, one.dist_version, one.installer, one.installed) == (
        "2.15.0+cu132",
        "",
        "",
        "",
        0,
    )


def test_user_site_comes_first(host: TreeHost) -> None:
    path = (*PYTHON.path[:1], USER, SITE)
    found = looked(host, wheel(SITE), wheel(USER, "2.8.0+cpu", None), path=path)
    assert isinstance(found.installs, tuple)
    assert [each.version for each in found.installs] == ["2.8.0+cpu", "2.15.0+cu132"]
    assert found.first is not None
    assert found.first.cpu_only


def test_the_same_folder_under_two_names_is_one(host: TreeHost) -> None:
    (Path(host.root) / f"{PREFIX[1:]}/link").symlink_to(SITE)
    assert (
        only(looked(host, wheel(SITE), path=(*PYTHON.path, f"{PREFIX}/link", SITE + "/"))).location == f"{SITE}/torch"
    )


@pytest.mark.parametrize("name", ["torch.py", "torch.pyc", "torch.so", "torch.cpython-311-x86_64-linux-gnu.so"])
def test_a_file_in_the_current_folder_shadows(host: TreeHost, name: str) -> None:
    found = looked(host, wheel(SITE), {f"{CWD}/{name}": ""})
    assert (found.shadow, found.shadow_kind, found.shadow_via) == (f"{CWD}/{name}", "file", "the current directory")
    assert only(found).version == "2.15.0+cu132"


@pytest.mark.parametrize(
    "name", ["torch/data.txt", "torch.txt", "torch.py/x", "torchvision.py", "torch/torch.py", "Torch.py"]
)
def test_what_does_not_shadow(host: TreeHost, name: str) -> None:
    assert looked(host, wheel(SITE), {f"{CWD}/{name}": ""}).shadow == ""


def test_a_package_of_that_name_shadows(host: TreeHost) -> None:
    files = {f"{CWD}/torch/__init__.py": "", f"{CWD}/torch/version.py": "__version__ = '0.1'\n"}
    found = looked(host, wheel(SITE), files)
    assert (found.shadow, found.shadow_kind) == (f"{CWD}/torch", "package")


@pytest.mark.parametrize("sign", ["csrc/x.cpp", "_C/__init__.pyi.in", "version.py"])
def test_the_source_tree_shadows(host: TreeHost, sign: str) -> None:
    text = VERSION.format(version="2.16.0a0+git1", cuda=None, hip=None)
    found = looked(host, wheel(SITE), {f"{CWD}/torch/__init__.py": "", f"{CWD}/torch/{sign}": text})
    assert (found.shadow, found.shadow_kind) == (f"{CWD}/torch", "source")


def test_a_source_tree_that_was_built_is_an_install(host: TreeHost) -> None:
    text = VERSION.format(version="2.16.0a0+git1", cuda="13.2", hip=None)
    tree = {f"{CWD}/torch/{name}": text for name in ("__init__.py", "version.py", "_C.cpython-311-x86_64-linux-gnu.so")}
    found = looked(host, wheel(SITE), tree, {f"{CWD}/torch.egg-info/PKG-INFO": "Name: torch\nVersion: 2.16.0a0+git1\n"})
    assert found.shadow == ""
    assert found.dangling == ()
    assert found.first is not None
    assert (found.first.location, found.first.dist_version) == (f"{CWD}/torch", "2.16.0a0+git1")


def test_the_shadow_is_only_what_comes_first(host: TreeHost) -> None:
    later = "/srv/lib"
    fake = {f"{later}/torch.py": ""}
    host = replace(host, environ={"PYTHONPATH": f"{later}:relative"})
    assert looked(host, wheel(SITE), fake, path=(*PYTHON.path, later)).shadow == ""
    first = looked(host, path=(later, *PYTHON.path))
    assert (first.shadow, first.shadow_via) == (f"{later}/torch.py", "PYTHONPATH")
    other = looked(replace(host, environ={}), path=(later, *PYTHON.path))
    assert other.shadow_via == "sys.path"


@pytest.mark.parametrize(("version", "seen"), [("3.10.13", True), ("3.11.7", False), ("3.15.0a1", False)])
def test_a_safe_path_leaves_the_current_folder_out(host: TreeHost, version: str, seen: bool) -> None:
    plant(Path(host.root), {f"{CWD}/torch.py": ""})
    found = torch(replace(host, environ={"PYTHONSAFEPATH": "1"}), replace(PYTHON, version=version))
    assert bool(found.shadow) is seen


def test_remains_without_init_come_last(host: TreeHost) -> None:
    plant(Path(host.root), wheel(SITE) | wheel(USER, "2.8.0+cu128", "12.8"))
    (Path(host.root) / f"{USER[1:]}/torch/__init__.py").unlink()
    for _ in range(2):
        found = looked(host, path=(USER, SITE))
        assert isinstance(found.installs, tuple)
        assert [each.version for each in found.installs] == ["2.15.0+cu132", "2.8.0+cu128"]
        assert found.installs[1].missing == ("__init__.py: absent",)
        assert found.shadow == ""
        (Path(host.root) / f"{USER[1:]}/torch-2.8.0.dist-info/RECORD").unlink(missing_ok=True)


def test_leftovers_of_an_interrupted_pip(host: TreeHost) -> None:
    names = ["~orch", "~-rch", "~~ch", "~orch-2.8.0.dist-info", "~umpy", "~orchvision", "~ch", "torch"]
    found = looked(host, {f"{SITE}/{name}/x": "" for name in names})
    assert found.leftovers == tuple(f"{SITE}/{name}" for name in ("~-rch", "~orch", "~orch-2.8.0.dist-info"))


def test_a_dist_info_whose_files_are_gone(host: TreeHost) -> None:
    files = {name: text for name, text in wheel(SITE).items() if "/torch/" not in name}
    found = looked(host, files)
    assert found.installs == ()
    assert found.dangling == (f"{SITE}/torch-2.15.0.dist-info",)


def test_an_editable_install_from_elsewhere_is_not_dangling(host: TreeHost) -> None:
    dist = f"{SITE}/torch-2.16.0a0.dist-info"
    found = looked(host, {f"{dist}/RECORD": "__editable__.torch-2.16.0a0.pth,sha256=x,80\n", f"{dist}/METADATA": ""})
    assert (found.installs, found.dangling) == ((), ())


def test_two_records_of_one_folder(host: TreeHost) -> None:
    old = {f"{SITE}/torch-2.8.0.dist-info/METADATA": "Name: torch\nVersion: 2.8.0\n"}
    found = looked(host, wheel(SITE), old)
    assert only(found).dist_version == "2.15.0"
    assert found.dangling == (f"{SITE}/torch-2.8.0.dist-info",)


def test_a_second_record_of_the_same_version_is_none_too_many(host: TreeHost) -> None:
    assert looked(host, wheel(SITE), {f"{SITE}/torch-2.15.0-py3.11.egg-info": "Version: 2.15.0\n"}).dangling == ()


@pytest.mark.parametrize("name", ["__editable___torch_2_16_0a0_finder.py", "_torch_editable.py"])
def test_an_editable_install(host: TreeHost, name: str) -> None:
    source, dist = "/home/user/pytorch/torch", f"{SITE}/torch-2.16.0a0.dist-info"
    mapping = f"MAPPING = {{'functorch': '/x', 'torch': '{source}{'/__init__.py' * name.startswith('_t')}'}}\n"
    text = VERSION.format(version="2.16.0a0+git1", cuda="13.2", hip=None)
    files = {f"{source}/__init__.py": "", f"{source}/version.py": text, f"{SITE}/{name}": mapping}
    direct = '{"url": "https://user:s@cret@example.org/pytorch", "dir_info": {"editable": true}}'
    found = looked(host, files, {f"{dist}/direct_url.json": direct, f"{dist}/METADATA": "Version: 2.16.0a0\n"})
    one = only(found)
    assert (one.location, one.cuda, one.dist_info) == (source, "13.2", dist)
    assert one.origin == "https://example.org/pytorch"
    assert found.dangling == ()


def test_a_conda_build(host: TreeHost) -> None:
    files = {name: text for name, text in wheel(SITE, "2.5.1", "12.6").items() if "RECORD" not in name}
    files[f"{SITE}/torch-2.5.1.dist-info/INSTALLER"] = "conda"
    names = ("pytorch-2.5.1-cuda126_mkl_py311h1234_300.json", "pytorch-mutex-1.0-cuda.json", "history")
    one = only(looked(host, files, {f"{PREFIX}/conda-meta/{name}": "{}" for name in names}))
    assert (one.installer, one.conda_build) == ("conda", "cuda126_mkl_py311h1234_300")


def test_what_pip_installed_over_conda_is_not_condas(host: TreeHost) -> None:
    one = only(looked(host, wheel(SITE), {f"{PREFIX}/conda-meta/pytorch-2.5.1-cpu_generic_py311_0.json": "{}"}))
    assert (one.installer, one.conda_build) == ("pip", "")


def package(name: str, needs: str, when: float, *, asked: bool) -> tuple[dict[str, str | bytes], str, float]:
    folder = f"{SITE}/{name}-8.3.dist-info"
    files: dict[str, str | bytes] = {f"{folder}/METADATA": f"Name: {name}\nVersion: 8.3\nRequires-Dist: {needs}\n\n"}
    return files | ({f"{folder}/REQUESTED": ""} if asked else {}), folder, when


@pytest.mark.parametrize("torch_asked", [False, True])
def test_what_brought_it_here(host: TreeHost, torch_asked: bool) -> None:
    torch_info = f"{SITE}/torch-2.15.0.dist-info"
    others = [
        package("accelerate", "torch>=2.0.0", 30, asked=False),
        package("ultralytics", "torch>=1.8.0,!=2.4.0; python_version > '3'", 40, asked=True),
        package("torchmetrics", "torch-fidelity", 10, asked=True),
        package("optional", "torch; extra == 'all'", 10, asked=True),
        package("long_ago", "torch", -7200, asked=True),
    ]
    files = [each[0] for each in others]
    looked(host, wheel(SITE), *files)
    root = Path(host.root)
    if not torch_asked:
        (root / torch_info[1:] / "REQUESTED").unlink()
    for _, folder, when in (*others, ({}, torch_info, 0.0)):
        os.utime(root / folder[1:], (1_700_000_000 + when,) * 2)
    assert only(looked(host)).replaced_by == (() if torch_asked else ("ultralytics 8.3", "accelerate 8.3"))


def test_places_that_cannot_be_read_are_passed_over(host: TreeHost) -> None:
    path = ("/nowhere", "/usr/lib/python3.11/os.py", "/usr/lib/\udcff", "", "relative", *PYTHON.path)
    assert only(looked(host, wheel(SITE), path=path)).version == "2.15.0+cu132"


def test_the_torch_that_is_installed_here(tmp_path: Path) -> None:
    real = pytest.importorskip("torch")
    host = Host(cwd=str(tmp_path))
    found = torch(host, python(host))
    assert found.first is not None
    assert found.first.location == str(Path(real.__file__).parent)
    assert found.first.version == real.__version__
    assert found.first.cuda == (real.version.cuda or "")
    assert found.first.missing == found.first.altered == found.first.unlisted == ()
    assert found.shadow == ""
    assert found.first.tags[0].startswith(f"cp{sys.version_info[0]}{sys.version_info[1]}-")
