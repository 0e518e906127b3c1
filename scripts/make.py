"""What make does, also on machines without it.

Usage: python scripts/make.py demo           # as make demo
       python scripts/make.py test           # as make test; on Windows, the tests that make sense there
       python scripts/make.py test-integrations
                                             # as make test-integrations
       python scripts/make.py install KIND   # demo, suite, test, bench, docs or dist: into .venv, unless that is done

It needs only Python 3.10 or newer and pip. Everything is installed into .venv (test-integrations: .venv-integrations),
and nothing outside this folder is touched. VENV names another environment, REQUIREMENTS another file than
requirements/test.txt, JOBS a number of processes.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
from hashlib import sha256
from pathlib import Path
from threading import Thread

ROOT = Path(__file__).resolve().parent.parent
INTEGRATIONS = sys.argv[1:] == ["test-integrations"]
VENV = ROOT / os.environ.get("VENV", ".venv-integrations" if INTEGRATIONS else ".venv")
REQUIREMENTS = os.environ.get("REQUIREMENTS", f"requirements/{'integrations' if INTEGRATIONS else 'test'}.txt")
WINDOWS = os.name == "nt"
PYTHON = VENV / ("Scripts/python.exe" if WINDOWS else "bin/python")
JOBS = os.environ.get(
    "JOBS", "3"
)  # tests wait for one another and for what hangs: one more than two cores have use for

INPUTS = {
    "venv": [],
    "demo": ["requirements/test.txt", "pyproject.toml", "src/transload/_version.py"],
    "suite": ["requirements/suite.txt", "pyproject.toml", "src/transload/_version.py"],
    "test": ["requirements/suite.txt", REQUIREMENTS, "pyproject.toml", "src/transload/_version.py"],
    "bench": ["requirements/bench.txt"],
    "docs": ["requirements/docs.txt"],
    "dist": ["requirements/dist.txt"],
}
"""The files that each kind of installation is made from."""

ON_WINDOWS = ["formats", "judge", "io", "opening", "loading", "saving", "writing", "retagging", "converting"]
ON_WINDOWS += ["verifying", "rescuing", "cli", "render", "explaining", "diagnose"]
"""The tests that make sense there."""


def main(arguments: list[str]) -> int:
    """Run one of the commands; return its exit code."""
    os.chdir(ROOT)
    # The tests start hundreds of processes that import transload, and each would compile it again.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    try:
        if arguments == ["demo"]:
            return demo()
        if arguments == ["test"]:
            return test()
        if arguments == ["test-integrations"]:
            install("test")
            return pytest("tests/integrations", "tests/test_blocks.py", "-k", "integrations")
        if arguments[:1] == ["install"] and arguments[1:] and set(arguments[1:]) <= INPUTS.keys():
            for kind in arguments[1:]:
                install(kind)
            return 0
    except subprocess.CalledProcessError as error:
        return error.returncode
    except KeyboardInterrupt:
        return 130
    sys.exit(__doc__)


# -- installation


def stamp(kind: str) -> Path:
    """The file that says that an installation is done.

    It is named after a checksum of what that was made from, so that neither the times a checkout gives to files nor a
    wrong clock can make it look done, and a renamed folder or another Python changes it.
    """
    made_from = [str(ROOT).encode(), sys.version.encode(), *(Path(name).read_bytes() for name in INPUTS[kind])]
    return VENV / f".done-{kind}-{sha256(b'|'.join(made_from)).hexdigest()[:16]}"


def install(kind: str) -> None:
    """Install what is needed into the environment, unless that is done."""
    done = stamp(kind)
    if done.exists():
        return
    if kind == "venv":
        create_environment()
    else:
        install("venv")
    if kind == "demo":
        if not has_torch(PYTHON):
            install_cpu_torch()
        pip("-e", ".", quiet=True)
    elif kind == "suite":
        pip("--no-compile", "-r", "requirements/suite.txt", "-e", ".")  # of thousands of modules the tests import some
    elif kind == "test":
        if not stamp("suite").exists():
            pip("-e", ".")
        pip("--no-compile", "-r", REQUIREMENTS)
    elif kind != "venv":
        pip("-r", f"requirements/{kind}.txt")
    for old in VENV.glob(f".done-{kind}-*"):
        old.unlink()
    done.touch()


def create_environment() -> None:
    """Create the environment. Some systems ship Python without ensurepip; then the pip outside fills it."""
    if any(VENV.glob(".done-venv-*")):
        shutil.rmtree(VENV)
    create: list[str | Path] = [sys.executable, "-m", "venv"]
    if not subprocess.run([*create, VENV], check=False, capture_output=True).returncode:
        return
    outside: list[str | Path] = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        PYTHON,
        "install",
        "-q",
        "--disable-pip-version-check",
        "pip",
    ]
    for command in ([*create, "--without-pip", VENV], outside):
        if subprocess.run(command, check=False).returncode:
            if WINDOWS:
                sys.exit(f"make: '{sys.executable}' has no pip, and cannot make a virtual environment with one.")
            sys.exit(
                f"make: '{sys.executable}' cannot make a virtual environment. Debian and Ubuntu keep that part of\n"
                "Python in the package python3-venv; or name another interpreter: make PYTHON=/path/to/python3"
            )


def install_cpu_torch() -> None:
    """Install the torch of the tests in a build without CUDA: on Linux that of PyPI brings several GB of it."""
    (torch,) = (line for line in Path("requirements/test.txt").read_text("utf-8").split() if line.startswith("torch=="))
    index = ["--extra-index-url", "https://download.pytorch.org/whl/cpu"]
    build = "+cpu" if sys.platform == "linux" else ""
    pip("--no-compile", "--retries", "1", "--timeout", "15", *index, torch + build, quiet=True)


def pip(*arguments: str, quiet: bool = False) -> None:
    """Install something; if ``quiet``, show only errors."""
    options = ["--disable-pip-version-check", "--no-input", "-qq" if quiet else "-q"]
    run(PYTHON, "-m", "pip", *options, "install", *arguments, quiet=quiet)


def has_torch(python: str | Path) -> bool:
    """Whether a Python has torch; it is not imported."""
    if python == sys.executable:
        return importlib.util.find_spec("torch") is not None
    find = "import sys, importlib.util; sys.exit(not importlib.util.find_spec('torch'))"
    return not subprocess.run([python, "-c", find], check=False).returncode


def run(*command: str | Path, quiet: bool = False) -> None:
    """Show a command unless ``quiet``, and run it; ``CalledProcessError`` if it fails."""
    words = [os.path.relpath(word) if isinstance(word, Path) else word for word in command]
    if not quiet:
        print(shlex.join(words), flush=True)
    subprocess.run(command, check=True)


# -- the commands


def demo() -> int:
    """Run the demo with the torch of this Python, from the sources, or else with one in the environment.

    Where none can be installed, the demo shows what works without it.
    """
    python: str | Path = sys.executable
    if not has_torch(python):
        try:
            if not stamp("demo").exists() and not stamp("test").exists():
                size = "a CPU build of torch (some 200 MB)"
                print(f"{python} has no torch: installing transload and {size} into {VENV.name} ...", flush=True)
                install("demo")
            python = PYTHON
        except subprocess.CalledProcessError:
            print("That failed: the demo goes on without torch.", flush=True)
    return subprocess.run([python, "examples/demo.py"], check=False).returncode


def test() -> int:
    """Check style and types, and run every test.

    Types are checked and lines counted while torch is installed and the tests run, and shown after them.
    """
    install("suite")
    run(PYTHON, "-m", "ruff", "check", ".")
    run(PYTHON, "-m", "ruff", "format", "--check", ".")
    checks = Checks()
    checks.start()
    codes = []
    try:
        install("test")
        if not Path("tests/__pycache__").exists():
            # Each process would compile all tests, and hypothesis would look for constants in all sources.
            first = ["-m", "pytest", "-q", "-k", "test_any_bytes_are_read_to_an_end"]
            subprocess.run([PYTHON, *first], check=False, capture_output=True)
        drivers = ["/dev/nvidiactl", "/dev/dxg", os.path.expandvars(r"${SYSTEMROOT}\System32\nvcuda.dll")]
        if any(map(os.path.exists, drivers)):
            codes.append(pytest("--gpu", "tests/gpu"))
        codes.append(pytest("-n", JOBS, *suite()))
    except subprocess.CalledProcessError as error:
        codes.append(error.returncode)
    checks.join()
    print(checks.text, end="")
    return int(any(codes) or checks.failed)


def pytest(*arguments: str) -> int:
    """Run tests; return the exit code."""
    print("pytest -q", *arguments, flush=True)
    return subprocess.run([PYTHON, "-m", "pytest", "-q", *arguments], check=False).returncode


def suite() -> list[str]:
    """The folders of tests for this system; none for all."""
    return [f"tests/{name}" for name in ON_WINDOWS] if WINDOWS else []


class Checks(Thread):
    """mypy and the metrics, in the background."""

    text = ""
    failed = False

    def run(self) -> None:
        """Run both."""
        print("mypy --strict &", flush=True)
        for arguments in (["-m", "mypy", "--strict"], ["scripts/metrics.py"]):
            done = subprocess.run(
                [PYTHON, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8", check=False
            )
            self.text += done.stdout
            self.failed |= "mypy" in arguments and done.returncode != 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
