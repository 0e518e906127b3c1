"""Every torch on the path, found by files alone: layouts of real wheels, broken ones, and files that shadow torch."""

from __future__ import annotations

import os
import struct
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from tests.diagnose.probes.installs import VERSION, wheel, write_files
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
    write_files(tmp_path, {f"{CWD}/": "", "/usr/lib/python3.11/os.py": "", f"{SITE}/": ""})
    return TreeHost(root=str(tmp_path), python=PYTHON.executable, cwd=CWD)


def probe(host: TreeHost, *files: Mapping[str, str | bytes], path: tuple[str, ...] = PYTHON.path) -> Torch:
    for group in files:
        write_files(Path(host.root), group)
    return torch(host, replace(PYTHON, path=path))


def only_install(facts: Torch) -> TorchInstall:
    assert isinstance(facts.installs, tuple)
    (install,) = facts.installs
    return install


def test_wheel_installed_by_pip(host: TreeHost) -> None:
    facts = probe(host, wheel(SITE))
    install = only_install(facts)
    assert facts == Torch(installs=(install,))
    assert (install.location, install.version, install.cuda, install.hip, install.xpu) == (
        f"{SITE}/torch",
        "2.15.0+cu132",
        "13.2",
        "",
        "",
    )
    assert install.known
    assert not install.cpu_only
    assert install.dist_info == f"{SITE}/torch-2.15.0.dist-info"
    assert (install.dist_version, install.installer) == ("2.15.0", "pip")
    assert install.tags == ("cp311-cp311-manylinux_2_28_x86_64",)
    assert install.missing == install.unlisted == install.altered == install.replaced_by == ()
    assert install.installed > 0


def test_no_torch(host: TreeHost) -> None:
    assert probe(host) == Torch(installs=())


def test_installs_are_unknown_where_the_interpreter_does_not_answer(host: TreeHost) -> None:
    facts = torch(host, Python(problem="it hangs"))
    assert facts.installs == Unknown("it hangs")


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
    write_files(Path(host.root), {f"{SITE}/torch/version.py": text})
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
def test_version_file_without_a_version_or_a_build(host: TreeHost, content: bytes | None, problem: str) -> None:
    write_files(Path(host.root), wheel(SITE))
    file = Path(host.root) / f"{SITE[1:]}/torch/version.py"
    file.unlink() if content is None else file.write_bytes(content)
    install = only_install(probe(host))
    assert not install.known
    assert not install.cpu_only
    assert problem in install.problem
    assert "torch/version.py" in install.problem
    assert install.dist_version == "2.15.0"


def test_dist_info_without_metadata(host: TreeHost) -> None:
    files = wheel(SITE)
    of_dist_info = [name for name in files if ".dist-info/" in name]
    install = only_install(
        probe(
            host,
            {name: text for name, text in files.items() if name not in of_dist_info},
            {of_dist_info[1]: files[of_dist_info[1]]},
        )
    )
    assert (install.known, install.dist_version, install.installer, install.missing) == (True, "2.15.0", "", ())


def test_garbage_in_the_dist_info(host: TreeHost) -> None:
    files = wheel(SITE)
    noise = {name: bytes(range(256)) for name in files if ".dist-info/" in name}
    direct = {f"{SITE}/torch-2.15.0.dist-info/direct_url.json": b"[" * 100_000}
    install = only_install(probe(host, files, noise, direct))
    assert (install.version, install.dist_version, install.tags, install.missing) == ("2.15.0+cu132", "2.15.0", (), ())


def test_missing_and_truncated_libraries(host: TreeHost) -> None:
    probe(host, wheel(SITE))
    lib = Path(host.root) / f"{SITE[1:]}/torch/lib"
    (lib / "libtorch_cuda.so").unlink()
    (lib / "libc10.so").write_bytes(b"\x7fELF")
    assert only_install(probe(host)).missing == (
        "lib/libc10.so: cut off after 4 of 100 bytes",
        "lib/libtorch_cuda.so: absent",
    )


def elf(mapped: int, size: int) -> bytes:
    """An ELF file of ``size`` bytes, of which the loader maps the first ``mapped``."""
    head = struct.pack("<4sBB10xHHIQQQIHHHHHH", b"\x7fELF", 2, 1, 3, 62, 1, 0, 64, 0, 0, 64, 56, 1, 64, 0, 0)
    return (head + struct.pack("<IIQQQQQQ", 1, 5, 0, 0, 0, mapped, mapped, 4096)).ljust(size, b"\0")


@pytest.mark.parametrize(("mapped", "intact"), [(120, True), (150, True), (151, False), (200, False)])
def test_stripped_library_is_intact_and_a_truncated_one_is_not(host: TreeHost, mapped: int, intact: bool) -> None:
    record = {f"{SITE}/torch-2.15.0.dist-info/RECORD": "torch/lib/libc10.so,sha256=x,200\n"}
    install = only_install(probe(host, wheel(SITE) | record | {f"{SITE}/torch/lib/libc10.so": elf(mapped, 150)}))
    altered = ("lib/libc10.so: 150 bytes instead of 200",) if intact else ()
    assert install.altered == altered
    assert install.missing == (() if intact else ("lib/libc10.so: cut off after 150 of 200 bytes",))


def test_library_that_record_does_not_list(host: TreeHost) -> None:
    install = only_install(
        probe(host, wheel(SITE) | {f"{SITE}/torch/lib/libcudnn.so.8": "", f"{SITE}/torch/lib/notes.txt": ""})
    )
    assert install.unlisted == ("lib/libcudnn.so.8",)


def test_library_of_torchs_tests_may_be_missing(host: TreeHost) -> None:
    record = {f"{SITE}/torch-2.15.0.dist-info/RECORD": "torch/lib/libtorchbind_test.so,sha256=x,200\n"}
    assert only_install(probe(host, wheel(SITE), record)).missing == ()


def test_larger_library_is_altered_but_not_truncated(host: TreeHost) -> None:
    install = only_install(probe(host, wheel(SITE), {f"{SITE}/torch/lib/libc10.so": bytes(300)}))
    assert (install.missing, install.altered) == ((), ("lib/libc10.so: 300 bytes instead of 100",))


def test_install_without_compiled_files(host: TreeHost) -> None:
    files = {name: text for name, text in wheel(SITE).items() if "/_C" not in name and "/lib/" not in name[20:]}
    facts = probe(host, files)
    assert facts.shadow == ""
    assert only_install(facts).missing[:2] == ("_C.cpython-311-x86_64-linux-gnu.so: absent", "lib/libc10.so: absent")


def test_install_without_a_dist_info(host: TreeHost) -> None:
    facts = probe(host, {name: text for name, text in wheel(SITE).items() if ".dist-info" not in name})
    install = only_install(facts)
    assert facts.shadow == ""
    assert (install.version, install.dist_info, install.dist_version, install.installer, install.installed) == (
        "2.15.0+cu132",
        "",
        "",
        "",
        0,
    )


def test_user_site_comes_first(host: TreeHost) -> None:
    path = (*PYTHON.path[:1], USER, SITE)
    facts = probe(host, wheel(SITE), wheel(USER, "2.8.0+cpu", None), path=path)
    assert isinstance(facts.installs, tuple)
    assert [install.version for install in facts.installs] == ["2.8.0+cpu", "2.15.0+cu132"]
    assert facts.first is not None
    assert facts.first.cpu_only


def test_folder_with_two_names_counts_once(host: TreeHost) -> None:
    (Path(host.root) / f"{PREFIX[1:]}/link").symlink_to(SITE)
    assert (
        only_install(probe(host, wheel(SITE), path=(*PYTHON.path, f"{PREFIX}/link", SITE + "/"))).location
        == f"{SITE}/torch"
    )


@pytest.mark.parametrize("name", ["torch.py", "torch.pyc", "torch.so", "torch.cpython-311-x86_64-linux-gnu.so"])
def test_file_in_the_current_folder_shadows_torch(host: TreeHost, name: str) -> None:
    facts = probe(host, wheel(SITE), {f"{CWD}/{name}": ""})
    assert (facts.shadow, facts.shadow_kind, facts.shadow_via) == (f"{CWD}/{name}", "file", "the current directory")
    assert only_install(facts).version == "2.15.0+cu132"


@pytest.mark.parametrize(
    "name", ["torch/data.txt", "torch.txt", "torch.py/x", "torchvision.py", "torch/torch.py", "Torch.py"]
)
def test_files_that_do_not_shadow_torch(host: TreeHost, name: str) -> None:
    assert probe(host, wheel(SITE), {f"{CWD}/{name}": ""}).shadow == ""


def test_package_named_torch_shadows_torch(host: TreeHost) -> None:
    files = {f"{CWD}/torch/__init__.py": "", f"{CWD}/torch/version.py": "__version__ = '0.1'\n"}
    facts = probe(host, wheel(SITE), files)
    assert (facts.shadow, facts.shadow_kind) == (f"{CWD}/torch", "package")


@pytest.mark.parametrize("sign", ["csrc/x.cpp", "_C/__init__.pyi.in", "version.py"])
def test_source_tree_shadows_torch(host: TreeHost, sign: str) -> None:
    text = VERSION.format(version="2.16.0a0+git1", cuda=None, hip=None)
    facts = probe(host, wheel(SITE), {f"{CWD}/torch/__init__.py": "", f"{CWD}/torch/{sign}": text})
    assert (facts.shadow, facts.shadow_kind) == (f"{CWD}/torch", "source")


def test_built_source_tree_is_an_install(host: TreeHost) -> None:
    text = VERSION.format(version="2.16.0a0+git1", cuda="13.2", hip=None)
    tree = {f"{CWD}/torch/{name}": text for name in ("__init__.py", "version.py", "_C.cpython-311-x86_64-linux-gnu.so")}
    facts = probe(host, wheel(SITE), tree, {f"{CWD}/torch.egg-info/PKG-INFO": "Name: torch\nVersion: 2.16.0a0+git1\n"})
    assert facts.shadow == ""
    assert facts.dangling == ()
    assert facts.first is not None
    assert (facts.first.location, facts.first.dist_version) == (f"{CWD}/torch", "2.16.0a0+git1")


def test_file_shadows_torch_only_where_it_comes_first(host: TreeHost) -> None:
    later = "/srv/lib"
    fake = {f"{later}/torch.py": ""}
    host = replace(host, environ={"PYTHONPATH": f"{later}:relative"})
    assert probe(host, wheel(SITE), fake, path=(*PYTHON.path, later)).shadow == ""
    first = probe(host, path=(later, *PYTHON.path))
    assert (first.shadow, first.shadow_via) == (f"{later}/torch.py", "PYTHONPATH")
    other = probe(replace(host, environ={}), path=(later, *PYTHON.path))
    assert other.shadow_via == "sys.path"


@pytest.mark.parametrize(("version", "shadowed"), [("3.10.13", True), ("3.11.7", False), ("3.15.0a1", False)])
def test_safe_path_excludes_the_current_folder_since_python_3_11(host: TreeHost, version: str, shadowed: bool) -> None:
    write_files(Path(host.root), {f"{CWD}/torch.py": ""})
    facts = torch(replace(host, environ={"PYTHONSAFEPATH": "1"}), replace(PYTHON, version=version))
    assert bool(facts.shadow) is shadowed


def test_install_without_init_comes_last(host: TreeHost) -> None:
    write_files(Path(host.root), wheel(SITE) | wheel(USER, "2.8.0+cu128", "12.8"))
    (Path(host.root) / f"{USER[1:]}/torch/__init__.py").unlink()
    for _ in range(2):
        facts = probe(host, path=(USER, SITE))
        assert isinstance(facts.installs, tuple)
        assert [install.version for install in facts.installs] == ["2.15.0+cu132", "2.8.0+cu128"]
        assert facts.installs[1].missing == ("__init__.py: absent",)
        assert facts.shadow == ""
        (Path(host.root) / f"{USER[1:]}/torch-2.8.0.dist-info/RECORD").unlink(missing_ok=True)


def test_leftovers_of_an_interrupted_pip(host: TreeHost) -> None:
    names = ["~orch", "~-rch", "~~ch", "~orch-2.8.0.dist-info", "~umpy", "~orchvision", "~ch", "torch"]
    facts = probe(host, {f"{SITE}/{name}/x": "" for name in names})
    assert facts.leftovers == tuple(f"{SITE}/{name}" for name in ("~-rch", "~orch", "~orch-2.8.0.dist-info"))


def test_dist_info_without_its_files_is_dangling(host: TreeHost) -> None:
    files = {name: text for name, text in wheel(SITE).items() if "/torch/" not in name}
    facts = probe(host, files)
    assert facts.installs == ()
    assert facts.dangling == (f"{SITE}/torch-2.15.0.dist-info",)


def test_dist_info_of_an_editable_install_is_not_dangling(host: TreeHost) -> None:
    dist = f"{SITE}/torch-2.16.0a0.dist-info"
    facts = probe(host, {f"{dist}/RECORD": "__editable__.torch-2.16.0a0.pth,sha256=x,80\n", f"{dist}/METADATA": ""})
    assert (facts.installs, facts.dangling) == ((), ())


def test_second_dist_info_of_another_version_is_dangling(host: TreeHost) -> None:
    old = {f"{SITE}/torch-2.8.0.dist-info/METADATA": "Name: torch\nVersion: 2.8.0\n"}
    facts = probe(host, wheel(SITE), old)
    assert only_install(facts).dist_version == "2.15.0"
    assert facts.dangling == (f"{SITE}/torch-2.8.0.dist-info",)


def test_egg_info_of_the_same_version_is_not_dangling(host: TreeHost) -> None:
    assert probe(host, wheel(SITE), {f"{SITE}/torch-2.15.0-py3.11.egg-info": "Version: 2.15.0\n"}).dangling == ()


@pytest.mark.parametrize("name", ["__editable___torch_2_16_0a0_finder.py", "_torch_editable.py"])
def test_editable_install(host: TreeHost, name: str) -> None:
    source, dist = "/home/user/pytorch/torch", f"{SITE}/torch-2.16.0a0.dist-info"
    mapping = f"MAPPING = {{'functorch': '/x', 'torch': '{source}{'/__init__.py' * name.startswith('_t')}'}}\n"
    text = VERSION.format(version="2.16.0a0+git1", cuda="13.2", hip=None)
    files = {f"{source}/__init__.py": "", f"{source}/version.py": text, f"{SITE}/{name}": mapping}
    direct = '{"url": "https://user:s@cret@example.org/pytorch", "dir_info": {"editable": true}}'
    facts = probe(host, files, {f"{dist}/direct_url.json": direct, f"{dist}/METADATA": "Version: 2.16.0a0\n"})
    install = only_install(facts)
    assert (install.location, install.cuda, install.dist_info) == (source, "13.2", dist)
    assert install.origin == "https://example.org/pytorch"
    assert facts.dangling == ()


def test_conda_build(host: TreeHost) -> None:
    files = {name: text for name, text in wheel(SITE, "2.5.1", "12.6").items() if "RECORD" not in name}
    files[f"{SITE}/torch-2.5.1.dist-info/INSTALLER"] = "conda"
    names = ("pytorch-2.5.1-cuda126_mkl_py311h1234_300.json", "pytorch-mutex-1.0-cuda.json", "history")
    install = only_install(probe(host, files, {f"{PREFIX}/conda-meta/{name}": "{}" for name in names}))
    assert (install.installer, install.conda_build) == ("conda", "cuda126_mkl_py311h1234_300")


def test_install_by_pip_over_conda_is_not_a_conda_build(host: TreeHost) -> None:
    install = only_install(
        probe(host, wheel(SITE), {f"{PREFIX}/conda-meta/pytorch-2.5.1-cpu_generic_py311_0.json": "{}"})
    )
    assert (install.installer, install.conda_build) == ("pip", "")


def package(name: str, needs: str, when: float, *, requested: bool) -> tuple[dict[str, str | bytes], str, float]:
    folder = f"{SITE}/{name}-8.3.dist-info"
    files: dict[str, str | bytes] = {f"{folder}/METADATA": f"Name: {name}\nVersion: 8.3\nRequires-Dist: {needs}\n\n"}
    return files | ({f"{folder}/REQUESTED": ""} if requested else {}), folder, when


@pytest.mark.parametrize("torch_requested", [False, True])
def test_packages_that_brought_in_torch(host: TreeHost, torch_requested: bool) -> None:
    torch_info = f"{SITE}/torch-2.15.0.dist-info"
    others = [
        package("accelerate", "torch>=2.0.0", 30, requested=False),
        package("ultralytics", "torch>=1.8.0,!=2.4.0; python_version > '3'", 40, requested=True),
        package("torchmetrics", "torch-fidelity", 10, requested=True),
        package("optional", "torch; extra == 'all'", 10, requested=True),
        package("long_ago", "torch", -7200, requested=True),
    ]
    files = [other[0] for other in others]
    probe(host, wheel(SITE), *files)
    root = Path(host.root)
    if not torch_requested:
        (root / torch_info[1:] / "REQUESTED").unlink()
    for _, folder, when in (*others, ({}, torch_info, 0.0)):
        os.utime(root / folder[1:], (1_700_000_000 + when,) * 2)
    assert only_install(probe(host)).replaced_by == (() if torch_requested else ("ultralytics 8.3", "accelerate 8.3"))


def test_unreadable_path_entries_are_skipped(host: TreeHost) -> None:
    path = ("/nowhere", "/usr/lib/python3.11/os.py", "/usr/lib/\udcff", "", "relative", *PYTHON.path)
    assert only_install(probe(host, wheel(SITE), path=path)).version == "2.15.0+cu132"


def test_installed_torch(tmp_path: Path) -> None:
    real = pytest.importorskip("torch")
    host = Host(cwd=str(tmp_path))
    facts = torch(host, python(host))
    assert facts.first is not None
    assert facts.first.location == Path(real.__file__).parent.as_posix()
    assert facts.first.version == real.__version__
    assert facts.first.cuda == (real.version.cuda or "")
    assert facts.first.missing == facts.first.altered == facts.first.unlisted == ()
    assert facts.shadow == ""
    assert facts.first.tags[0].startswith(f"cp{sys.version_info[0]}{sys.version_info[1]}-")
