"""Torch in a child process: a real one, and what may be imported in its place."""

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
from transload.machine import ChildAnswer, TorchRun, Unknown

TIMEOUT = 300.0

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
    """Run torch in this folder, with ``text`` as its ``torch.py`` if given."""
    if text is not None:
        (folder / "torch.py").write_text(text)
    host = Host(environ={**os.environ, **environ}, cwd=str(folder), python=sys.executable)
    with Child(question(host), TIMEOUT) as child:
        return torch_run(child.outcome())


def step_outcomes(result: TorchRun) -> list[tuple[str, bool]]:
    return [(step.name, step.ok) for step in result.steps]


# -- working torch -----------------------------------------------------------------------------------------------------


def test_installed_torch(tmp_path: Path) -> None:
    result = run(tmp_path)
    assert result.answer.state == "answered"
    assert (result.version, result.file) == (str(torch.__version__), torch.__file__)
    assert result.cuda == (torch.version.cuda or "")
    assert result.available is torch.cuda.is_available()
    assert result.count == torch.cuda.device_count()
    if not result.cuda:
        assert step_outcomes(result) == [("import", True), ("available", True), ("count", True), ("cpu", True)]
        assert (result.architectures, result.devices, result.libraries, result.cuda_works) == ((), (), (), False)
    assert list(tmp_path.iterdir()) == []


@each(("number", "release"), [(91900, "9.19.0"), (8907, "8.9.7"), (0, "")])
def test_cudnn_release(number: int, release: str) -> None:
    assert torch_run(Outcome("answered", ({"cudnn": number}, {"done": True}))).cudnn == release


def test_torch_that_computes(tmp_path: Path) -> None:
    result = run(tmp_path, WORKING)
    assert result.answer.state == "answered"
    assert (result.version, result.cuda, result.hip, result.cudnn) == ("2.13.0+cu130", "13.0", "", "9.19.0")
    assert (result.available, result.count) == (True, 2)
    assert result.architectures == ("sm_80", "sm_90")
    assert result.devices == ("NVIDIA H200 (9, 0)", "NVIDIA H200 (9, 1)")
    steps = ("import", "available", "count", "init", "kernel", "matmul", "convolution")
    assert step_outcomes(result) == [(name, True) for name in steps]
    assert result.cuda_works
    assert result.backends == ("xpu",)
    assert result.warnings == ()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["torch.py"]


def test_warnings_and_printed_lines(tmp_path: Path) -> None:
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
    result = run(tmp_path, text)
    assert result.warnings == ("CUDA initialization: no", "hello from a library", "[W] from C")
    assert result.available is False
    assert [step.error for step in result.steps if step.error] == ["RuntimeError: No CUDA GPUs are available"]
    assert step_outcomes(result) == [
        ("import", True),
        ("available", True),
        ("count", True),
        ("init", False),
        ("cpu", True),
    ]


def test_warning_filters_of_the_user_are_kept(tmp_path: Path) -> None:
    text = WORKING + "warnings.warn('old', UserWarning)\n"
    assert run(tmp_path, text, PYTHONWARNINGS="ignore").warnings == ()
    step = run(tmp_path, text, PYTHONWARNINGS="error").step("import")
    assert step
    assert step.error == "UserWarning: old"


def test_failing_kernel(tmp_path: Path) -> None:
    error = "CUDA error: no kernel image is available for execution on the device"
    result = run(
        tmp_path, f"{WORKING}\ndef zeros(*size, device): raise RuntimeError({error!r} + chr(10) + 'x' * 9000)\n"
    )
    step = result.step("kernel")
    assert step
    assert step.error.startswith(f"RuntimeError: {error}\nxxx")
    assert len(step.error) < 2100
    assert result.step("matmul") is None
    assert not result.cuda_works


def test_wrong_result(tmp_path: Path) -> None:
    result = run(tmp_path, f"{WORKING}\nnn.functional.conv2d = lambda *_: Tensor(float('nan'))\n")
    step = result.step("convolution")
    assert step
    assert step.error == "ArithmeticError: the result is nan, not 112896"


def test_convolution_is_not_run_on_a_rocm_build(tmp_path: Path) -> None:
    result = run(tmp_path, f"{WORKING}\nversion.cuda, version.hip = None, '6.4'\n")
    assert (result.hip, result.cuda_works, result.step("convolution")) == ("6.4", True, None)


# -- broken and fake torch ---------------------------------------------------------------------------------------------


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
    ids=["library", "exit", "interrupt", "module", "str-raises", "syntax"],
)
def test_import_that_raises(tmp_path: Path, text: str, error: str) -> None:
    result = run(tmp_path, text)
    (step,) = result.steps
    assert result.answer.state == "answered"
    assert (step.name, step.ok) == ("import", False)
    assert step.error.startswith(error.split(" was", maxsplit=1)[0])
    assert result.available == Unknown(step.error)
    assert (result.version, result.count) == ("", -1)


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
def test_import_that_crashes(tmp_path: Path, text: str, detail: str) -> None:
    result = run(tmp_path, f"import os\n{text}\n")
    detail = detail.format(tmp_path / "torch.py")
    assert (result.answer.state, result.answer.detail) == ("crashed", detail)
    assert [(step.name, step.ok, step.error) for step in result.steps] == [("import", False, detail)]
    assert result.available == Unknown(detail)


@pytest.mark.parametrize(
    "text",
    ["time.sleep(600)", "threading.Event().wait()", "ctypes.PyDLL(None).pause()"],
    ids=["python", "library", "c"],
)
def test_import_that_hangs(tmp_path: Path, text: str) -> None:
    """The last case holds the GIL: no other Python thread runs."""
    (tmp_path / "torch.py").write_text(f"import ctypes, threading, time\nprint('hello', flush=True)\n{text}\n")
    host = Host(cwd=str(tmp_path))
    original = question(host)
    quick = replace(original, script=original.script.replace("EVERY = 1.0", "EVERY = 0.1"))
    assert quick != original
    with Child(quick, TIMEOUT) as child:
        while not any(b"torch.py" in line for line in child._frames) and not child.ended():
            time.sleep(0.01)
        child.end_by(time.monotonic() + 0.5)
        result = torch_run(child.outcome())
    assert result.answer.state == "hung"
    assert result.answer.detail.startswith(f"hung in import at {tmp_path}/torch.py:3 after ")
    assert result.answer.detail.endswith("it printed: hello")
    assert result.warnings == ("hello",)
    assert step_outcomes(result) == [("import", False)]


def test_crash_after_the_import(tmp_path: Path) -> None:
    result = run(tmp_path, f"{WORKING}\nimport os\ncuda.is_available = lambda: os.kill(os.getpid(), 11)\n")
    assert (result.version, result.cuda, result.architectures) == ("2.13.0+cu130", "13.0", ("sm_80", "sm_90"))
    assert step_outcomes(result) == [("import", True), ("available", False)]
    assert result.answer.detail.startswith("SIGSEGV in available at ")


@each("text", ["", "version = cuda = 7", "def __getattr__(name): raise SystemExit(name)"])
def test_file_of_the_user_named_torch(tmp_path: Path, text: str) -> None:
    result = run(tmp_path, text)
    assert result.answer.state == "answered"
    assert result.file == str(tmp_path / "torch.py")
    assert (result.version, result.cuda) == ("", "")
    assert step_outcomes(result) == [("import", True), ("available", False), ("cpu", False)]


def test_import_that_prints_garbage(tmp_path: Path) -> None:
    result = run(
        tmp_path, WORKING + "import os\nos.write(1, b'\\x1e{}\\n\\xff\\x1e[1]\\n' + os.urandom(200_000) + b'\\n')\n"
    )
    assert result.answer.state == "answered"
    assert result.cuda_works


@each("module", ["json", "warnings", "signal", "typing", "time", "enum"])
def test_shadowed_standard_library_module_does_not_break_the_probe(tmp_path: Path, module: str) -> None:
    (tmp_path / f"{module}.py").write_text("raise RuntimeError('shadowed')\n")
    result = run(tmp_path, "raise ImportError('of its own')")
    assert result.answer.state == "answered"
    assert step_outcomes(result) == [("import", False)]


def test_interpreter_that_does_not_exist(tmp_path: Path) -> None:
    host = Host(python=str(tmp_path / "python"))
    with Child(question(host), TIMEOUT) as child:
        result = torch_run(child.outcome())
    reason = f"could not be started: {tmp_path}/python does not exist"
    assert result == TorchRun(ChildAnswer("unasked", reason), available=Unknown(reason))


def test_program_that_is_not_an_interpreter(tmp_path: Path) -> None:
    (tmp_path / "python").write_text("#!/bin/sh\necho I am no Python >&2\nexit 2\n")
    (tmp_path / "python").chmod(0o755)
    host = Host(python=str(tmp_path / "python"))
    with Child(question(host), TIMEOUT) as child:
        result = torch_run(child.outcome())
    assert result.answer.state == "crashed"
    assert result.answer.detail == "exit status 2 at its start; it printed: I am no Python"
