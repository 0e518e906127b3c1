"""What the GitHub Action of ``action.yml`` does: inspect checkpoints, and write annotations or SARIF.

It is run from the checkout of the action, which needs no installation, in the repository that is checked. Its inputs
are the variables that ``main`` reads. The exit code is that of ``transload inspect``.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from glob import glob
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def main(env: dict[str, str]) -> int:
    """Inspect what the variables name, and return the exit code."""
    if sys.version_info < (3, 10):  # noqa: UP036 - the Python is that of the runner
        return fail("this Python is older than 3.10: use actions/setup-python before transload")
    sys.path.insert(0, str(ROOT / "src"))
    from transload.cli.main import main as transload
    from transload.judge.problems import rules
    from transload.render.sarif import document, is_sarif

    patterns = [line.strip() for line in env.get("TRANSLOAD_PATHS", "").splitlines() if line.strip()]
    try:
        files = matched(patterns) if patterns else tracked()
    except (OSError, subprocess.CalledProcessError):
        return fail("git cannot list the files: check out the repository first, or name the paths")
    for pattern in patterns:
        if not matched([pattern]):
            return fail(f"no file matches {pattern}")
    with tempfile.TemporaryDirectory() as folder:
        findings = Path(folder, "findings.sarif")
        words = ["inspect", "--refuse", env.get("TRANSLOAD_REFUSE", ""), "--sarif", str(findings)]
        words += ["--max-size", env["TRANSLOAD_MAX_SIZE"]] if env.get("TRANSLOAD_MAX_SIZE") else []
        words += ["--verify"] if env.get("TRANSLOAD_VERIFY") == "true" else []
        if files:
            code = transload([*words, "--", *files])
        else:
            print(command("notice", "git tracks no checkpoints: there is nothing to inspect"))
            findings.write_text("".join(document([], {}, rules())))
            code = 0
        if not findings.exists():
            return fail("the inputs of transload cannot be used: the log says why")
        log = json.loads(findings.read_text())
    sarif = env.get("TRANSLOAD_SARIF", "")
    if not sarif:
        print("".join(f"{line}\n" for line in workflow_commands(log["runs"][0])), end="")
        return code
    if env.get("TRANSLOAD_ACTION"):
        base = (env["GITHUB_SERVER_URL"], env["TRANSLOAD_ACTION"], "blob", env.get("TRANSLOAD_REF") or "HEAD")
        link(log["runs"][0]["tool"]["driver"], "/".join(base))
    try:
        if os.path.exists(sarif) and not is_sarif(Path(sarif).read_bytes()[:256]):
            return fail(f"{sarif} exists, and is not a report of transload: it is not overwritten")
        Path(sarif).write_text(json.dumps(log))
    except OSError as error:
        return fail(f"{sarif} cannot be written: {error.strerror}")
    if "GITHUB_OUTPUT" in env:
        with open(env["GITHUB_OUTPUT"], "a", encoding="utf-8") as file:
            file.write(f"sarif={sarif}\n")
    return code


def tracked() -> list[str]:
    """The checkpoints that git tracks, by the names that the hook of pre-commit has.

    Links are left out: they lead to files that are also tracked, or elsewhere.
    """
    (pattern,) = re.findall(r"^  files: (.+)$", (ROOT / ".pre-commit-hooks.yaml").read_text("utf-8"), re.MULTILINE)
    listing = ["git", "ls-files", "-z"]
    names = subprocess.run(listing, check=True, capture_output=True).stdout.split(b"\0")
    return [path for path in map(os.fsdecode, names) if re.search(pattern, path) and not os.path.islink(path)]


def matched(patterns: list[str]) -> list[str]:
    """The files and folders that the patterns name."""
    found = (path for pattern in patterns for path in sorted(glob(pattern, recursive=True)))
    return list(dict.fromkeys(found))


def workflow_commands(run: dict[str, Any]) -> Iterator[str]:
    """The commands that make GitHub show errors and warnings beside their files."""
    for result in (*run["invocations"][0]["toolExecutionNotifications"], *run["results"]):
        if result["level"] != "note":
            places = [place["physicalLocation"]["artifactLocation"]["uri"] for place in result.get("locations", ())]
            text = result["message"]["text"].replace("{{", "{").replace("}}", "}")  # as SARIF escapes them
            yield command(result["level"], text, *places[:1])


def command(level: str, text: str, uri: str = "") -> str:
    r"""A workflow command.

    >>> command("error", "50% is lost\nor more", "a%20b,c.pt")
    '::error file=a b%2Cc.pt::50%25 is lost%0Aor more'
    """
    from urllib.parse import unquote

    escapes = {"%": "%25", "\r": "%0D", "\n": "%0A"}
    text = "".join(escapes.get(character, character) for character in text)
    escapes.update({":": "%3A", ",": "%2C"})
    path = "".join(escapes.get(character, character) for character in unquote(uri))
    return f"::{level} file={path}::{text}" if path else f"::{level}::{text}"


def link(driver: dict[str, Any], base: str) -> None:
    """Add links to the manual of this release of the action."""
    driver["informationUri"] = base
    for rule in driver["rules"]:
        rule["helpUri"] = f"{base}/docs/findings.md#{rule['id']}"


def fail(text: str) -> int:
    """Say why nothing can be inspected."""
    print(command("error", text))
    return 2


if __name__ == "__main__":
    sys.exit(main(dict(os.environ)))
