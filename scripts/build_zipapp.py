"""Pack transload into one file that any Python 3.10 or newer runs without an installation.

Usage: ``python scripts/build_zipapp.py dist/transload.pyz``.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import zipapp
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "transload"
DOCS = ROOT / "docs"

# The __main__ that zipapp generates drops what main() returns: every exit code would be 0. The version is checked
# before the import, because an older Python stops at our syntax with a traceback.
MAIN = """\
import sys

if sys.version_info < (3, 10):
    sys.exit("transload needs Python 3.10 or newer, and this is Python %d.%d" % sys.version_info[:2])

from transload.cli.main import main

sys.exit(main())
"""

# One date for every member, so that the same sources give the same archive, and a source dated before 1980, the first
# year of zip (as in an unpacked image or a reproducible build), does not stop the build.
MEMBER_TIME = 1_600_000_000


def build(target: Path) -> None:
    """Write the archive to ``target``, and create its folder if necessary."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        stage = Path(folder)
        shutil.copytree(PACKAGE, stage / "transload", ignore=shutil.ignore_patterns("__pycache__"))
        manual = stage / "transload" / "manual"
        shutil.copytree(DOCS / "doctor", manual / "doctor")
        shutil.copy(DOCS / "findings.md", manual)
        (stage / "__main__.py").write_text(MAIN, encoding="utf-8")
        for path in [stage, *stage.rglob("*")]:
            os.utime(path, (MEMBER_TIME, MEMBER_TIME))
        zipapp.create_archive(stage, target, interpreter="/usr/bin/env python3", compressed=True)
    target.chmod(0o755)  # zipapp makes it executable for its owner only


def main() -> int:
    """Build the archive named on the command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("target", type=Path, help="the file to write")
    target: Path = parser.parse_args().target
    build(target)
    print(f"{target}: {target.stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
