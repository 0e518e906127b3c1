"""Torch in a child: a true one, and what may be found in its place."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.each import each

from transload.diagnose.children import Child, Outcome
from transload.diagnose.host import Host
from transload.diagnose.probes.python import question, torch_run
from transload.machine import Answer, TorchRun, Unknown

LONG = 60.0

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals")

WORKING = '''
"""A torch that computes, as far as can be seen from outside."""
import types, warnings
__version__ = "2.13.0+cu130"
version = types.SimpleNamespace(cuda="13.0", hip=None)
_C = types.SimpleNamespace(_cuda_getArchFlags=lambda: "sm_80 sm_90")
class Tensor:
    def __init__(self, value): self.value = value
    def __add__(self, other): return Tensor(1)
    def __matmul__(self, other): return Tensor(2 * 64 ** 3)
    def sum(self): return self
    def item(self): return self.value
def zeros(*size, device): return Tensor(0)
def ones(*size, device): return Tensor(1)
def _properties(index): return types.SimpleNamespace(name="NVIDIA H200", major=9, minor=index)
cuda = types.SimpleNamespace(is_available=lambda: True, device_count=lambda: 2, init=lambda: None)
cuda.get_device_properties = _properties
nn = types.SimpleNamespace(functional=types.SimpleNamespace(conv2d=lambda *_: Tensor(8 * 14 * 14 * 72)))
backends = types.SimpleNamespace(cudnn=types.SimpleNamespace(version=lambda: 91900))
xpu = types.SimpleNamespace(is_available=lambda: True)
'''


def run(folder: Path, text: str | None = None, **environ: str) -> TorchRun:
    """The run where the user stands in a folder that holds a ``torch.py``."""
    if text is not None:
        (folder / "torch.py").write_text(text)
    host = Host(environ={**os.environ, **environ}, cwd=str(folder), python=sys.executable)
    with Child(question(host), LONG) as child:
        return torch_run(child.outcome())


def names(told: TorchRun) -> list[tuple[str, bool]]:
    return [(step.name, step.ok) for step in told.steps]


# -- torch at work -----------------------------------------------------------------------------------------------------


def test_the_torch_that_is_installed(tmp_path: Path) -> None:
    told = run(tmp_path)
    assert told.answer.state == "answered"
    assert (told.version, told.file) == (str(torch.__version__), torch.__file__)
    assert told.cuda == (torch.version.cuda or "")
    assert told.available is torch.cuda.is_available()
    assert told.count == torch.cuda.device_count()
    if not told.cuda:
        assert names(told) == [("import", True), ("available", True), ("count", True), ("cpu", True)]
        assert (told.architectures, told.devices, told.libraries, told.cuda_works) == ((), (), (), False)
    assert list(tmp_path.iterdir()) == []


@each(("number", "release"), [(91900, "9.19.0"), (8907, "8.9.7"), (0, "")])
def test_the_release_of_cudnn(number: int, release: str) -> None:
    assert torch_run(Outcome("answered", ({"cudnn": number}, {"done": True}))).cudnn == release


def test_a_torch_that_computes(tmp_path: Path) -> None:
    told = run(tmp_path, WORKING)
    assert told.answer.state == "answered"
    assert (told.version, told.cuda, told.hip, told.cudnn) == ("2.13.0+cu130", "13.0", "", "9.19.0")
    assert (told.available, told.count) == (True, 2)
    assert told.architectures == ("sm_80", "sm_90")
    assert told.devices == ("NVIDIA H200 (9, 0)", "NVIDIA H200 (9, 1)")
    steps = ("import", "available", "count", "init", "kernel", "matmul", "convolution")
    assert names(told) == [(name, True) for name in steps]
    assert told.cuda_works
    assert told.backends == ("xpu",)
    assert told.warnings == ()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["torch.py"]


def test_warnings_and_what_is_printed(tmp_path: Path) -> None:
    text = (
        WORKING
        + """
import os, sys
print("hello from a library")
def is_available():
    warnings.warn("CUDA initialization: no", stacklevel=2)
    os.write(2, b"[W] from C\\n")
    return False
def init(): raise RuntimeError("No CUDA GPUs are available")
cuda.is_available, cuda.init = is_available, init
sys.stdout.flush()
"""
    )
    told = run(tmp_path, text)
    assert told.warnings == ("CUDA initialization: no", "hello from a library", "[W] from C")
    assert told.available is False
    assert [step.error for step in told.steps if step.error] == ["RuntimeError: No CUDA GPUs are available"]
    assert names(told) == [("import", True), ("available", True), ("count", True), ("init", False), ("cpu", True)]


def test_the_filters_of_the_user_are_kept(tmp_path: Path) -> None:
    text = WORKING + "warnings.warn('old', UserWarning)\n"
    assert run(tmp_path, text, PYTHONWARNINGS="ignore").warnings == ()
    step = run(tmp_path, text, PYTHONWARNINGS="error").step("import")
    assert step
    assert step.error == "UserWarning: old"


def test_a_kernel_that_fails(tmp_path: Path) -> None:
    error = "CUDA error: no kernel image is available for execution on the device"
    told = run(tmp_path, f"{WORKING}\ndef zeros(*size, device): raise RuntimeError({error!r} + chr(10) + 'x' * 9000)\n")
    step = told.step("kernel")
    assert step
    assert step.error.startswith(f"RuntimeError: {error}\nxxx")
    assert len(step.error) < 2100
    assert told.step("matmul") is None
    assert not told.cuda_works


def test_a_result_that_is_wrong(tmp_path: Path) -> None:
    told = run(tmp_path, f"{WORKING}\nnn.functional.conv2d = lambda *_: Tensor(float('nan'))\n")
    step = told.step("convolution")
    assert step
    assert step.error == "ArithmeticError: the result is nan, not 112896"


def test_a_build_for_rocm_is_not_made_to_compile(tmp_path: Path) -> None:
    told = run(tmp_path, f"{WORKING}\nversion.cuda, version.hip = None, '6.4'\n")
    assert (told.hip, told.cuda_works, told.step("convolution")) == ("6.4", True, None)


# -- what else may be there --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (
            "raise ImportError('libcudnn.so.9: cannot open shared object file: No such file or directory')",
            "ImportError: libcudnn.so.9: cannot open shared object file: No such file or directory",
        ),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("class E(Exception):\n  def __str__(self): 1 / 0\nraise E", "E: (str() raised ZeroDivisionError)"),
        ("(", "SyntaxError: '(' was never closed (torch.py, line 1)"),
    ],
    ids=["library", "exit", "interrupt", "module", "nasty", "syntax"],
)
def test_an_import_that_raises(tmp_path: Path, text: str, error: str) -> None:
    told = run(tmp_path, text)
    (step,) = told.steps
    assert told.answer.state == "answered"
    assert (step.name, step.ok) == ("import", False)
    assert step.error.startswith(error.split(" was", maxsplit=1)[0])
    assert told.available == Unknown(step.error)
    assert (told.version, told.count) == ("", -1)


@pytest.mark.parametrize(
    ("text", "detail"),
    [
        ("os._exit(3)", "exit status 3 in import"),
        ("os.kill(os.getpid(), 9)", "SIGKILL in import"),
        (
            "os.write(2, b'terminate called'); os.kill(os.getpid(), 11)",
            "SIGSEGV in import at {}:2; it printed: terminate called",
        ),
    ],
    ids=["exit", "kill", "segfault"],
)
def test_an_import_that_crashes(tmp_path: Path, text: str, detail: str) -> None:
    told = run(tmp_path, f"import os\n{text}\n")
    detail = detail.format(tmp_path / "torch.py")
    assert (told.answer.state, told.answer.detail) == ("crashed", detail)
    assert [(step.name, step.ok, step.error) for step in told.steps] == [("import", False, detail)]
    assert told.available == Unknown(detail)


@pytest.mark.parametrize(
    "text",
    ["time.sleep(600)", "threading.Event().wait()", "ctypes.PyDLL(None).pause()"],
    ids=["python", "library", "c"],
)
def test_an_import_that_hangs(tmp_path: Path, text: str) -> None:
    """The last one holds the interpreter's lock: no other thread of Python runs."""
    (tmp_path / "torch.py").write_text(f"import ctypes, threading, time\nprint('hello', flush=True)\n{text}\n")
    host = Host(cwd=str(tmp_path))
    asked = question(host)
    quick = replace(asked, script=asked.script.replace("EVERY = 1.0", "EVERY = 0.1"))
    assert quick != asked
    with Child(quick, LONG) as child:
        while not any(b"torch.py" in line for line in child._frames) and not child.ended():
            time.sleep(0.01)
        child.end_by(time.monotonic() + 0.5)
        told = torch_run(child.outcome())
    assert told.answer.state == "hung"
    assert told.answer.detail.startswith(f"hung in import at {tmp_path}/torch.py:3 after ")
    assert told.answer.detail.endswith("it printed: hello")
    assert told.warnings == ("hello",)
    assert names(told) == [("import", False)]


def test_a_crash_after_the_import(tmp_path: Path) -> None:
    told = run(tmp_path, f"{WORKING}\nimport os\ncuda.is_available = lambda: os.kill(os.getpid(), 11)\n")
    assert (told.version, told.cuda, told.architectures) == ("2.13.0+cu130", "13.0", ("sm_80", "sm_90"))
    assert names(told) == [("import", True), ("available", False)]
    assert told.answer.detail.startswith("SIGSEGV in available at ")


@each("text", ["", "version = cuda = 7", "def __getattr__(name): raise SystemExit(name)"])
def test_a_file_of_the_users_called_torch(tmp_path: Path, text: str) -> None:
    told = run(tmp_path, text)
    assert told.answer.state == "answered"
    assert told.file == str(tmp_path / "torch.py")
    assert (told.version, told.cuda) == ("", "")
    assert names(told) == [("import", True), ("available", False), ("cpu", False)]


def test_an_import_that_prints_garbage(tmp_path: Path) -> None:
    told = run(
        tmp_path, WORKING + "import os\nos.write(1, b'\\x1e{}\\n\\xff\\x1e[1]\\n' + os.urandom(200_000) + b'\\n')\n"
    )
    assert told.answer.state == "answered"
    assert told.cuda_works


@each("module", ["json", "warnings", "signal", "typing", "time", "enum"])
def test_a_shadow_of_the_standard_library_harms_only_torch(tmp_path: Path, module: str) -> None:
    (tmp_path / f"{module}.py").write_text("raise RuntimeError('shadowed')\n")
    told = run(tmp_path, "raise ImportError('of its own')")
    assert told.answer.state == "answered"
    assert names(told) == [("import", False)]


def test_an_interpreter_that_is_not_there(tmp_path: Path) -> None:
    host = Host(python=str(tmp_path / "python"))
    with Child(question(host), LONG) as child:
        told = torch_run(child.outcome())
    words = f"could not be started: {tmp_path}/python does not exist"
    assert told == TorchRun(Answer("unasked", words), available=Unknown(words))


def test_an_interpreter_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "python").write_text("#!/bin/sh\necho I am no Python >&2\nexit 2\n")
    (tmp_path / "python").chmod(0o755)
    host = Host(python=str(tmp_path / "python"))
    with Child(question(host), LONG) as child:
        told = torch_run(child.outcome())
    assert told.answer.state == "crashed"
    assert told.answer.detail == "exit status 2 at its start; it printed: I am no Python"
