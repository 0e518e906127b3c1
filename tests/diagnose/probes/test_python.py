"""The interpreter to examine: our own, another, or one that does not answer; its environment; which one is chosen."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import venv
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from tests.diagnose.probes.installs import shell_script, wheel, write_files
from tests.diagnose.trees import TreeHost
from tests.each import each

import transload
from transload.diagnose.host import Host
from transload.diagnose.probes import python as module
from transload.diagnose.probes.python import choose, environment, interpreter, likely, others, own_facts, python

SOURCE = Path(transload.__file__).parent.parent
LIB = "lib/python3.11/site-packages"
PROGRAM = """
import json, os, sys
sys.path.append({source!r})
from transload.diagnose.host import Host
from transload.diagnose.probes.python import ask_interpreter, python
found = python(Host(), deadline=60.0)
told = ask_interpreter(Host(), sys.executable, 60.0)
paths = [[entry.replace(os.sep, "/") for entry in path] for path in (found.path, told["path"])]
paths = [[entry for entry in path if entry != {source!r}.replace(os.sep, "/")] for path in paths]
print(json.dumps([*paths, found.user_site_enabled, told["user_site_enabled"], found.problem]))
"""


@pytest.fixture
def host(tmp_path: Path) -> TreeHost:
    write_files(tmp_path, {"/home/user/project/": ""})
    return TreeHost(
        root=str(tmp_path), environ={"HOME": "/home/user"}, python="/opt/bin/python", cwd="/home/user/project"
    )


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment without pip."""
    folder = tmp_path_factory.mktemp("environments") / "bare"
    venv.create(folder, with_pip=False, symlinks=os.name != "nt")
    return folder


# -- our own interpreter -----------------------------------------------------------------------------------------------


def start_command(how: str, folder: Path) -> list[str]:
    """A command that runs ``PROGRAM`` in one of the ways to start Python."""
    text = PROGRAM.format(source=str(SOURCE))
    if how.endswith("zipapp"):
        with zipfile.ZipFile(folder / "app.pyz", "w") as archive:
            archive.writestr("__main__.py", text)
        return [sys.executable, "app.pyz"]
    write_files(folder, {"program.py": text, "elsewhere/program.py": text, "extra/module.py": text})
    if how == "link":
        (folder / "link.py").symlink_to("elsewhere/program.py")
    return {
        "script": [sys.executable, str(folder / "program.py")],
        "link": [sys.executable, "link.py"],
        "module": [sys.executable, "-m", "program"],
        "module of the path": [sys.executable, "-m", "module"],
        "safe script": [sys.executable, "program.py"],
        "text": [sys.executable, "-c", text],
        "isolated": [sys.executable, "-I", "program.py"],
        "without site": [sys.executable, "-S", "program.py"],
        "without user site": [sys.executable, "-s", "program.py"],
        "without environment": [sys.executable, "-E", "program.py"],
    }[how]


@each(
    "how",
    [
        *("script", "link", "module", "module of the path", "text", "zipapp", "safe script", "safe zipapp"),
        *("isolated", "without site", "without user site", "without environment"),
    ],
)
def test_path_is_that_of_a_users_program_however_we_were_started(how: str, tmp_path: Path) -> None:
    write_files(tmp_path, {"extra/": "", "also/": ""})
    environ = {**os.environ, "PYTHONPATH": f"{tmp_path}/extra{os.pathsep}also", "PYTHONSAFEPATH": "1" * ("safe" in how)}
    command = start_command(how, tmp_path)
    process = subprocess.run(command, capture_output=True, cwd=tmp_path, env=environ, check=True, timeout=300)
    path, asked_path, enabled, asked_enabled, problem = json.loads(process.stdout)
    assert problem == ""
    assert path == asked_path
    assert enabled is asked_enabled
    here = tmp_path.as_posix()
    assert path[:2] == [f"{here}/extra", f"{here}/also"]
    assert not {here, f"{here}/elsewhere", f"{here}/app.pyz"} & set(path)


def test_our_own_interpreter_is_examined_without_a_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ask_interpreter", lambda *_: pytest.fail("a child was started"))
    facts = python(Host(), "as told")
    assert facts.executable == Path(sys.executable).as_posix()
    prefix = Path(sys.prefix).as_posix()
    assert (facts.version, facts.prefix, facts.why) == (sys.version.split()[0], prefix, "as told")
    assert (facts.implementation, facts.bits) == (sys.implementation.name, 64 if sys.maxsize > 2**32 else 32)


def test_changed_pythonpath_is_honoured(tmp_path: Path) -> None:
    facts = python(Host(environ={**os.environ, "PYTHONPATH": str(tmp_path)}), deadline=60.0)
    assert facts.path[0] == tmp_path.as_posix()


@pytest.mark.skipif(os.name == "nt", reason="variables of Windows are text")
def test_pythonpath_that_is_not_utf8(tmp_path: Path) -> None:
    odd = tmp_path / os.fsdecode(b"caf\xe9")
    facts = python(Host(environ={**os.environ, "PYTHONPATH": str(odd), "LC_ALL": "C"}), deadline=60.0)
    assert os.fsencode(facts.path[0]) == os.fsencode(odd)


# -- another interpreter -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", "bin/python", "bin/python3"])
@pytest.mark.skipif(os.name == "nt", reason="tests the POSIX layout of environments")
def test_environment_named_by_its_folder_or_its_interpreter(bare: Path, name: str) -> None:
    facts = python(Host(python=str(bare / name), cwd=str(bare)), deadline=60.0)
    assert facts.problem == ""
    assert (facts.prefix, facts.environment, facts.tool) == (str(bare), "venv", "pip")
    assert not facts.pip
    assert not facts.externally_managed
    assert facts.base_prefix == sys.base_prefix
    assert facts.path[-1].endswith("site-packages")


@pytest.mark.skipif(os.name == "nt", reason="tests the POSIX layout of environments")
def test_environment_named_relative_to_the_current_folder_home_or_path(bare: Path) -> None:
    host = Host(cwd=str(bare.parent), environ={**os.environ, "HOME": str(bare.parent), "PATH": f"{bare}/bin"})
    for name in ("bare", "bare/bin/python", "./bare", "~/bare", "python3"):
        assert python(replace(host, python=name), deadline=60.0).prefix == str(bare), name


@pytest.mark.skipif(os.name == "nt", reason="tests the POSIX layout of environments")
def test_files_in_the_current_folder_are_not_imported(bare: Path, tmp_path: Path) -> None:
    write_files(
        tmp_path, {f"{name}.py": "raise SystemExit('imported')" for name in ("json", "site", "os", "signal", "torch")}
    )
    assert python(Host(python=str(bare), cwd=str(tmp_path)), deadline=60.0).problem == ""


@pytest.mark.skipif(os.name == "nt", reason="needs a shell")
@each(
    ("text", "problem"),
    [
        ("exec sleep 60", "did not answer within 0.5 s"),
        ("sleep 60 & sleep 60", "did not answer within 0.5 s"),
        ("while :; do echo yes; done", "did not answer within 0.5 s"),
        ("echo 'Segmentation fault'; exit 3", "did not answer: exit status 3; it printed: Segmentation fault"),
        ("echo no such version; echo; echo try another; exit 127", "exit status 127; it printed: no such version"),
        ("printf '\\377\\376\\000'", "did not answer: exit status 0"),
        ("kill -9 $$", "did not answer: SIGKILL"),
        ("exit 0", "did not answer: exit status 0"),
        ("echo 'Fatal Python error: no encodings'; echo more; exit 1", "it printed: Fatal Python error: no encodings"),
        ("printf '\\036{\"done\": True}\\n'", "is not a Python interpreter: its answer cannot be understood"),
        ("printf '\\036[1]\\n'", "did not answer: exit status 0"),
    ],
)
def test_program_that_is_not_an_interpreter(tmp_path: Path, text: str, problem: str) -> None:
    program = shell_script(tmp_path / "python", text)
    facts = python(Host(python=str(program)), deadline=0.5 if "within" in problem else 60.0)
    assert facts.problem.startswith(str(program))
    assert problem in facts.problem
    assert (facts.executable, facts.path, facts.packages) == (str(program), (), {})


@pytest.mark.skipif(os.name == "nt", reason="needs POSIX file modes")
@each(("content", "mode"), [(b"\x00garbage", 0o755), (b"text", 0o644), (b"#!/nowhere/sh\n", 0o755)])
def test_program_that_cannot_be_started(tmp_path: Path, content: bytes, mode: int) -> None:
    program = tmp_path / "python"
    program.write_bytes(content)
    program.chmod(mode)
    assert f"{program} could not be started: " in python(Host(python=str(program))).problem


def test_interpreter_that_does_not_exist(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "python3.9")
    host = Host(cwd=str(tmp_path), environ={"PATH": ""})
    assert python(replace(host, python=f"{tmp_path}/no")).problem == f"{tmp_path}/no does not exist"
    assert python(replace(host, python="no")).problem == "no is neither in the current folder nor on PATH"
    gone = f"leads to {tmp_path}/python3.9, which does not exist"
    assert python(replace(host, python="./link")).problem == f"{tmp_path}/link {gone}"
    assert python(replace(host, python=str(tmp_path))).problem.startswith(f"{tmp_path} contains no Python")
    assert python(replace(host, python="")).problem == "no Python was named"


def test_environment_whose_interpreter_was_removed(tmp_path: Path) -> None:
    write_files(tmp_path, layout("venv"))
    (tmp_path / "venv/bin/python").unlink()
    (tmp_path / "venv/bin/python").symlink_to("/nowhere/python3.9")
    facts = python(Host(python=f"{tmp_path}/venv"))
    assert facts.problem == f"{tmp_path}/venv/bin/python leads to /nowhere/python3.9, which does not exist"


def test_interpreter_with_an_empty_sys_executable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "")
    facts = python(Host(python=""))
    assert (facts.problem, facts.prefix) == ("", Path(sys.prefix).as_posix())


ANSWER = {
    "executable": "",
    "version": "2.7.18",
    "implementation": "cpython",
    "bits": 32,
    "machine": "",
    "free_threaded": True,
    "prefix": "/usr",
    "base_prefix": "/usr",
    "stdlib": "/usr/lib/python2.7",
    "user_site": "/u",
    "user_site_enabled": True,
    "path": ["/usr/lib/python2.7", "relative"],
    "done": True,
}


@pytest.mark.skipif(os.name == "nt", reason="needs a shell")
@pytest.mark.skipif(sys.platform == "win32", reason="Windows does not delete a current directory")
def test_our_own_interpreter_in_a_deleted_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    assert own_facts()["path"] == sys.path[1:]
    assert python(Host()).problem == ""


@pytest.mark.skipif(os.name == "nt", reason="needs a shell")
def test_answer_is_read_from_between_other_output(host: TreeHost) -> None:
    root = Path(host.root)
    shell_script(root / "opt/bin/python", f"echo noise; printf 'more\\036%s\\n' {shlex.quote(repr(ANSWER))}; sleep 60")
    write_files(root, {"/usr/lib/python2.7/EXTERNALLY-MANAGED": "", "/usr/lib/python2.7/pip/__main__.py": ""})
    write_files(root, {"/home/user/project/relative/torch-1.4.0-py2.7.egg-info": ""})
    facts = python(host)
    assert facts.problem == ""
    assert (facts.executable, facts.version, facts.bits) == ("/opt/bin/python", "2.7.18", 32)
    assert (facts.free_threaded, facts.user_site, facts.user_site_enabled) == (True, "/u", True)
    assert facts.path == ("/usr/lib/python2.7", "/home/user/project/relative")
    assert (facts.environment, facts.pip, facts.externally_managed) == ("system", True, True)
    assert facts.packages == {"torch": "1.4.0"}


@pytest.mark.skipif(os.name == "nt", reason="needs a shell")
def test_environment_of_a_project_is_recognized_by_its_lock_file(host: TreeHost) -> None:
    answer = shlex.quote(repr({**ANSWER, "prefix": "/app/.venv"}))
    shell_script(Path(host.root) / "opt/bin/python", f"printf '\\036%s\\n' {answer}")
    write_files(Path(host.root), {"/app/.venv/pyvenv.cfg": f"{CONFIG}uv = 0.9.2\n"})
    assert (python(host).tool, python(host).project) == ("uv", False)
    write_files(Path(host.root), {"/app/uv.lock": ""})
    assert (python(host).tool, python(host).project) == ("uv", True)


@pytest.mark.skipif(os.name == "nt", reason="needs a shell")
def test_environment_of_an_externally_managed_python_is_not_externally_managed(host: TreeHost) -> None:
    answer = shlex.quote(repr({**ANSWER, "prefix": "/opt/venv"}))
    shell_script(Path(host.root) / "opt/bin/python", f"printf '\\036%s\\n' {answer}")
    write_files(Path(host.root), {"/usr/lib/python2.7/EXTERNALLY-MANAGED": ""})
    facts = python(host)
    assert (facts.prefix, facts.externally_managed) == ("/opt/venv", False)


@pytest.mark.parametrize("change", [{"path": [1]}, {"path": "x"}, {"bits": "64"}, {"prefix": None}, {"stdlib": 1}])
@pytest.mark.skipif(os.name == "nt", reason="needs a shell")
def test_answer_with_values_of_the_wrong_types(host: TreeHost, change: dict[str, object]) -> None:
    shell_script(Path(host.root) / "opt/bin/python", f"printf '\\036%s\\n' {shlex.quote(repr({**ANSWER, **change}))}")
    assert "cannot be understood" in python(host).problem


def test_only_relevant_packages_are_listed_and_the_first_copy_of_each(tmp_path: Path) -> None:
    first = ("nvidia_cudnn_cu13-9.26.0.51.dist-info/", "torch-2.1.0+cpu.dist-info/", "requests-2.0.dist-info/")
    second = ("Flash_Attn-2.8.dist-info/", "torch-2.8.0.dist-info/", "~orch-2.7.0.dist-info/", "numpy-2.4.6.dist-info/")
    unnamed = {"b/triton.egg-info/PKG-INFO": "Metadata-Version: 2.1\nVersion: 3.9\n\nVersion: 4\n"}
    write_files(tmp_path, {f"a/{name}": "" for name in first} | {f"b/{name}": "" for name in second} | unnamed)
    path = os.pathsep.join((f"{tmp_path}/a", f"{tmp_path}/b"))
    facts = python(Host(environ={**os.environ, "PYTHONPATH": path}), deadline=60.0)
    ours = {"torch": "2.1.0+cpu", "nvidia-cudnn-cu13": "9.26.0.51", "flash-attn": "2.8", "triton": "3.9"}
    assert facts.packages.items() >= {**ours, "numpy": "2.4.6"}.items()
    assert "requests" not in facts.packages


# -- environments and tools --------------------------------------------------------------------------------------------

CONFIG = "home = /usr/bin\nversion = 3.11.7\n"


@pytest.mark.parametrize(
    ("prefix", "files", "expected"),
    [
        ("/opt/venv", {"/opt/venv/pyvenv.cfg": CONFIG}, ("venv", "pip")),
        ("/opt/venv", {"/opt/venv/pyvenv.cfg": f"{CONFIG}uv = 0.9.2\n"}, ("venv", "uv")),
        ("/opt/venv", {"/opt/venv/pyvenv.cfg": b"\xff\0\n=\n"}, ("venv", "pip")),
        ("/opt/virtualenv", {}, ("venv", "pip")),
        ("/app/.venv", {"/app/.venv/pyvenv.cfg": CONFIG, "/app/uv.lock": ""}, ("venv", "uv")),
        ("/app/.venv", {"/app/.venv/pyvenv.cfg": f"{CONFIG}uv = 1\n", "/app/poetry.lock": ""}, ("venv", "poetry")),
        ("/app/.venv", {"/app/pyproject.toml": "[project]\n[tool.pdm.scripts]\n"}, ("venv", "pdm")),
        ("/opt/venv", {"/home/user/project/poetry.lock": ""}, ("venv", "poetry")),
        ("/opt/venv", {"/home/user/project/uv.lock": ""}, ("venv", "pip")),
        ("/opt/venv", {"/home/user/project/pyproject.toml": "[tool.poetry]\nname = 'x'\n"}, ("venv", "poetry")),
        ("/home/user/.cache/pypoetry/virtualenvs/x-py3.11", {}, ("venv", "poetry")),
        ("/home/user/.local/pipx/venvs/x", {"/home/user/.local/pipx/venvs/x/pipx_metadata.json": ""}, ("pipx", "pip")),
        (
            "/home/user/.local/share/uv/tools/transload",
            {"/home/user/.local/share/uv/tools/transload/pyvenv.cfg": f"{CONFIG}uv = 1\n"},
            ("uv-tool", "uv"),
        ),
        ("/home/user/.cache/uv/archive-v0/Xyz", {}, ("uv-tool", "pip")),
        ("/opt/conda", {"/opt/conda/conda-meta/history": ""}, ("conda", "conda")),
        ("/app/.pixi/envs/default", {"/app/.pixi/envs/default/conda-meta/history": ""}, ("pixi", "pixi")),
    ],
)
def test_kinds_of_environments(
    host: TreeHost, prefix: str, files: dict[str, str | bytes], expected: tuple[str, str]
) -> None:
    write_files(Path(host.root), files)
    assert environment(host, prefix, "/usr") == expected


@pytest.mark.parametrize(
    ("prefix", "expected"),
    [
        ("/usr", ("system", "pip")),
        ("/home/user/.pyenv/versions/3.11.7", ("pyenv", "pip")),
        ("/home/user/.local/share/uv/python/cpython-3.12.1-linux-x86_64-gnu", ("system", "uv")),
        ("/nix/store/abc-python3-3.11.7", ("nix", "pip")),
    ],
)
def test_kinds_of_interpreters_without_an_environment(host: TreeHost, prefix: str, expected: tuple[str, str]) -> None:
    assert environment(host, prefix, prefix) == expected


# -- other interpreters ------------------------------------------------------------------------------------------------


def layout(prefix: str, version: str = "", cuda: str | None = None) -> dict[str, str | bytes]:
    """The files of a virtual environment, with torch if a version is given."""
    torch = wheel(f"{prefix}/{LIB}", version, cuda) if version else {}
    return torch | {f"{prefix}/bin/python": "", f"{prefix}/pyvenv.cfg": CONFIG, f"{prefix}/{LIB}/": ""}


def test_other_interpreters_are_found_by_their_files_alone(host: TreeHost) -> None:
    project, home = "/home/user/project", "/home/user"
    kernel = json.dumps({"argv": ["/opt/kernel/bin/python", "-m", "ipykernel_launcher"]})
    files = {
        **layout("/opt/active", "2.8.0+cu128", "12.8"),
        **layout(f"{project}/.venv", "2.9.0+cpu"),
        **layout("/opt/empty"),
        **layout("/opt/kernel", "2.7.1+cu126", "12.6"),
        **layout("/opt/env", "2.6.0"),
        **wheel("/usr/lib/python3/dist-packages", "1.13.1", None),
        **wheel(f"{home}/.pyenv/versions/3.12.1/lib/python3.12/site-packages", "2.5.1", "12.4"),
        f"{home}/.pyenv/versions/3.12.1/bin/python": "",
        "/usr/bin/python3.11": "",
        f"{home}/.local/share/jupyter/kernels/k/kernel.json": kernel,
        f"{home}/.local/share/jupyter/kernels/bad/kernel.json": b"\xff{",
        f"{home}/.local/share/jupyter/kernels/odd/kernel.json": '{"argv": [7]}',
        f"{home}/.local/share/jupyter/kernels/no-path/kernel.json": '{"argv": ["/a\\u0000b/bin/python"]}',
        f"{home}/.conda/environments.txt": "/opt/env\nnonsense\n/nowhere\n",
    }
    write_files(Path(host.root), files)
    (Path(host.root) / "usr/bin/python3").symlink_to("python3.11")
    environ = {**host.environ, "VIRTUAL_ENV": "/opt/active", "PATH": "/opt/empty/bin::/usr/bin:/nowhere:/usr/bin"}
    host = replace(host, environ=environ)
    assert tuple(others(host, "/opt/examined", ())) == (
        "/opt/active/bin/python: torch 2.8.0+cu128",
        f"{project}/.venv/bin/python: torch 2.9.0+cpu",
        "/usr/bin/python3: torch 1.13.1",
        "/opt/kernel/bin/python: torch 2.7.1+cu126",
        "/opt/env/bin/python: torch 2.6.0",
        f"{home}/.pyenv/versions/3.12.1/bin/python: torch 2.5.1",
    )
    assert "/opt/active/bin/python: torch 2.8.0+cu128" not in others(host, "/opt/active", ())
    assert "/opt/env/bin/python: torch 2.6.0" not in others(host, "/opt/x", (f"/opt/env/{LIB}",))


def test_torch_in_the_user_site_counts_for_the_system_but_not_for_an_environment(host: TreeHost) -> None:
    write_files(Path(host.root), wheel("/home/user/.local/lib/python3.11/site-packages") | layout("/opt/venv"))
    write_files(Path(host.root), {"/usr/bin/python3.11": "", "/usr/lib/python3.11/os.py": ""})
    (Path(host.root) / "opt/venv/bin/python").unlink()
    (Path(host.root) / "opt/venv/bin/python").symlink_to("/usr/bin/python3.11")
    system, inside = interpreter(host, "/usr/bin/python3.11"), interpreter(host, "/opt/venv/bin/python")
    assert system == ("/usr/bin/python3.11", "/usr", "/home/user/.local/lib/python3.11/site-packages/torch")
    assert inside == ("/opt/venv/bin/python", "/opt/venv", "")
    alone = interpreter(replace(host, environ={**host.environ, "PYTHONNOUSERSITE": "1"}), "/usr/bin/python3.11")
    assert alone == ("/usr/bin/python3.11", "/usr", "")


def test_environment_with_system_site_packages(host: TreeHost) -> None:
    write_files(Path(host.root), layout("/opt/venv") | wheel("/usr/lib/python3.11/site-packages"))
    write_files(Path(host.root), {"/opt/venv/pyvenv.cfg": f"{CONFIG}include-system-site-packages = true\n"})
    inside = interpreter(host, "/opt/venv/bin/python")
    assert inside == ("/opt/venv/bin/python", "/opt/venv", "/usr/lib/python3.11/site-packages/torch")
    write_files(Path(host.root), {"/opt/venv/pyvenv.cfg": f"{CONFIG}include-system-site-packages = false\n"})
    assert interpreter(host, "/opt/venv/bin/python") == ("/opt/venv/bin/python", "/opt/venv", "")


def prefixes(host: TreeHost) -> list[str]:
    interpreters = (interpreter(host, path) for path, _ in likely(host))
    return [entry[1] for entry in interpreters if entry]


def test_pyenv_shims_are_resolved(host: TreeHost) -> None:
    pyenv = "/home/user/.pyenv"
    write_files(Path(host.root), {f"{pyenv}/shims/python3": "#!/bin/sh\n", f"{pyenv}/version": "3.11.7\n"})
    write_files(Path(host.root), {f"{pyenv}/versions/{v}/bin/python3": "" for v in ("3.11.7", "3.12.1", "3.13.0")})
    host = replace(host, environ={"PATH": f"{pyenv}/shims"})
    assert prefixes(host) == [f"{pyenv}/versions/3.11.7"]
    write_files(Path(host.root), {"/home/user/project/.python-version": "3.12.1\n"})
    assert prefixes(host) == [f"{pyenv}/versions/3.12.1"]
    chosen = replace(host, environ={**host.environ, "PYENV_VERSION": "3.13.0:3.12.1"})
    assert prefixes(chosen) == [f"{pyenv}/versions/3.13.0"]


def test_no_interpreters_without_home_path_and_current_folder() -> None:
    host = TreeHost(root="/nowhere-at-all", cwd="")
    assert prefixes(host) == []
    assert not tuple(others(host, "", ("", "/x")))


# -- the interpreter chosen --------------------------------------------------------------------------------------------


def set_own_path(monkeypatch: pytest.MonkeyPatch, *path: str) -> None:
    monkeypatch.setattr(module, "own_facts", lambda: {"path": list(path)})


def test_our_own_interpreter_is_chosen_if_it_has_torch(host: TreeHost, monkeypatch: pytest.MonkeyPatch) -> None:
    write_files(Path(host.root), wheel("/opt/ours") | layout("/opt/active", "2.8.0"))
    set_own_path(monkeypatch, "/opt/ours")
    assert choose(replace(host, environ={"VIRTUAL_ENV": "/opt/active"}))[0].python == host.python


@pytest.mark.parametrize(
    ("environ", "expected", "how"),
    [
        ({"VIRTUAL_ENV": "/opt/a", "CONDA_PREFIX": "/opt/b", "PATH": "/opt/d/bin"}, "/opt/a/bin/python", "VIRTUAL_ENV"),
        ({"VIRTUAL_ENV": "/opt/no", "CONDA_PREFIX": "/opt/b"}, "/opt/b/bin/python", "CONDA_PREFIX"),
        ({"VIRTUAL_ENV": "/opt/no", "PATH": "/opt/d/bin"}, "/home/user/project/.venv/bin/python", "./.venv"),
    ],
)
def test_first_usual_environment_with_torch_is_chosen_otherwise(
    host: TreeHost, monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], expected: str, how: str
) -> None:
    set_own_path(monkeypatch, "/opt/ours")
    for prefix in ("/opt/a", "/opt/b", "/home/user/project/.venv", "/opt/d"):
        write_files(Path(host.root), layout(prefix, "2.8.0"))
    write_files(Path(host.root), layout("/opt/no"))
    chosen, why = choose(replace(host, environ=environ))
    assert (chosen.python, why) == (expected, f"transload's own environment has no torch; {how} has one")


def test_python_on_path_is_chosen_last(host: TreeHost, monkeypatch: pytest.MonkeyPatch) -> None:
    set_own_path(monkeypatch)
    write_files(Path(host.root), layout("/opt/d", "2.8.0"))
    chosen, why = choose(replace(host, environ={"PATH": "/nowhere:/opt/d/bin"}))
    assert (chosen.python, why.split("; ")[1]) == ("/opt/d/bin/python", "python on PATH has one")


def test_without_any_torch_our_own_is_chosen_unless_it_is_a_pipx_environment(
    host: TreeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_own_path(monkeypatch)
    write_files(Path(host.root), layout("/opt/a"))
    prefix = "/home/user/.local/pipx/venvs/transload"
    monkeypatch.setattr(sys, "prefix", prefix)
    host = replace(host, environ={"VIRTUAL_ENV": prefix, "PATH": "/opt/a/bin"})
    assert choose(host)[0].python == host.python
    write_files(Path(host.root), layout(prefix) | {f"{prefix}/pipx_metadata.json": "{}"})
    chosen, why = choose(host)
    assert chosen.python == "/opt/a/bin/python"
    assert "python on PATH" in why
