"""Run pip commands one after the other, each in a fork of one process, because importing pip takes most of the time.

Started by the interpreter of a scratch environment, with a file of runs: the packages installed before, and the
commands.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

WARM_UP = ["install", "--quiet", "--dry-run", "--find-links", ".", "pip"]
"""Makes pip import all its modules. Before Python 3.11 it would also cache the list of installed packages."""


def reset(site: Path, before: dict[str, tuple[str, str]]) -> None:
    """Reset ``site`` to pip and the packages ``before``: their version, and the content of their version.py."""
    for path in site.iterdir():
        if not path.name.startswith("pip"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for name, (version, text) in before.items():
        module = name.replace("-", "_")
        info = site / f"{module}-{version}.dist-info"
        for path, content in (
            (site / module / "__init__.py", ""),
            (site / module / "version.py", text),
            (info / "METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"),
            (info / "INSTALLER", "pip\n"),
            (
                info / "RECORD",
                (
                    f"{module}/__init__.py,,\n{module}/version.py,,\n{info.name}/METADATA,,\n"
                    f"{info.name}/INSTALLER,,\n{info.name}/RECORD,,\n"
                ),
            ),
        ):
            path.parent.mkdir(exist_ok=True)
            path.write_text(content)


def run(arguments: list[str], environ: dict[str, str], log: str) -> int:
    pid = os.fork()
    if not pid:
        code = 99
        try:
            os.environ.update(environ)
            file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(file, 1)
            os.dup2(file, 2)
            code = pip(arguments)
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def pip(arguments: list[str]) -> int:
    from pip._internal.cli.main import main  # not when pytest imports this module to look for doctests

    return main(arguments)


if __name__ == "__main__":
    if sys.version_info >= (3, 11):
        pip(WARM_UP)
    site, results = Path(sys.argv[1]), []
    for case in json.loads(Path(sys.argv[2]).read_text()):
        reset(site, case["before"])
        failed = ""
        for arguments, environ in case["commands"]:
            if run(arguments, environ, sys.argv[2] + ".out"):
                failed = failed or f"{arguments}: {Path(sys.argv[2] + '.out').read_text()}"
        versions = {path.parent.name: path.read_text() for path in site.glob("*/version.py")}
        results.append([failed, versions])
    sys.stdout.write(json.dumps(results))
