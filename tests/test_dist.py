"""What a release consists of: the wheel and the sdist, their metadata and types, and the recipe for conda."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
from email import message_from_bytes
from email.message import Message
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
from tests.test_docs import load_script

from transload._version import __version__
from transload.diagnose.rules import BY_CODE

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "transload"
RECIPE = ROOT / "packaging" / "conda" / "recipe.yaml"
BACKEND = pytest.mark.skipif(not find_spec("hatchling"), reason="hatchling is not installed")
PYRIGHT = shutil.which("pyright") or shutil.which("pyright", path=os.path.dirname(sys.executable))


def run(*command: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, check=False, capture_output=True, encoding="utf-8", timeout=300, **options)


def build(sources: Path, target: Path) -> dict[str, Path]:
    """The wheel and the sdist of some sources, by kind."""
    run(sys.executable, "-m", "hatchling", "build", "-d", target, cwd=sources).check_returncode()
    return {"sdist" if path.suffix == ".gz" else "wheel": path for path in target.iterdir()}


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return build(ROOT, tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def metadata(dist: dict[str, Path]) -> Message:
    with ZipFile(dist["wheel"]) as archive:
        return message_from_bytes(archive.read(f"transload-{__version__}.dist-info/METADATA"))


@BACKEND
def test_every_build_has_the_same_bytes_also_from_the_sdist(dist: dict[str, Path], tmp_path: Path) -> None:
    with tarfile.open(dist["sdist"]) as archive:
        safe: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        archive.extractall(tmp_path, **safe)  # noqa: S202 - our own archive
    sources = tmp_path / f"transload-{__version__}"
    for path in sources.rglob("*.py"):  # another time, and other permissions
        os.utime(path, (1_700_000_000, 1_700_000_000))
        path.chmod(0o600)
    again = build(sources, tmp_path / "again")
    assert {kind: path.name for kind, path in again.items()} == {kind: path.name for kind, path in dist.items()}
    assert [kind for kind, path in again.items() if path.read_bytes() != dist[kind].read_bytes()] == []


@BACKEND
def test_the_wheel_has_the_package_its_types_the_manual_and_what_shells_read(
    dist: dict[str, Path], tmp_path: Path
) -> None:
    with ZipFile(dist["wheel"]) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    sources = (path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    manual = {f"transload/manual/doctor/{code}.md" for code in (*BY_CODE, "README")} | {"transload/manual/findings.md"}
    share = {f"transload-{__version__}.data/data/share/{name}" for name in load_script("share").write(tmp_path)}
    assert names == {path.relative_to(PACKAGE.parent).as_posix() for path in sources} | manual | share
    assert "transload/py.typed" in names


@BACKEND
def test_metadata_has_the_version_and_needs_nothing(metadata: Message) -> None:
    assert (metadata["Name"], metadata["Version"]) == ("transload", __version__)
    needed = [str(line) for line in metadata.get_all("Requires-Dist", [])]
    assert [line for line in needed if "extra ==" not in line] == []


@BACKEND
def test_the_long_description_is_the_readme_without_relative_links(metadata: Message) -> None:
    text = metadata.get_payload()
    assert isinstance(text, str)
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert "](docs/" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"\]\((?!https?://)[^)]*\)", text) == []
    assert "transload doctor" in text


@BACKEND
def test_relative_links_and_images_of_the_readme_get_an_address() -> None:
    text = "[a\nb](docs/a.md#b), ![c](c.webp), [d](https://d/), [e](#e)\n\n    [f](f)\n\n`[g](g)`\n\n```\n[h](h)\n```\n"
    script = load_script("readme")
    done = script.with_addresses(text, "https://x/blob/", "https://x/raw/")
    assert done.startswith("[a\nb](https://x/blob/docs/a.md#b), ![c](https://x/raw/c.webp), [d](https://d/), [e](#e)\n")
    assert done[-36:] == text[-36:]
    assert script.with_addresses(text, "", "").startswith("a\nb, , [d](https://d/), [e](#e)\n")


@BACKEND
def test_an_installed_wheel_runs_as_command_and_as_module(dist: dict[str, Path], tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    venv.create(environment)
    folder = environment / ("Scripts" if os.name == "nt" else "bin")
    pip = ("-m", "pip", "--python", folder / "python", "install", "-q", "--no-index", dist["wheel"])
    if run(sys.executable, *pip).returncode:
        pytest.skip("this pip cannot install into another environment")
    outside = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    for command in ((folder / "transload",), (folder / "python", "-m", "transload")):
        done = run(*command, "--version", env=outside, cwd=tmp_path)
        assert (done.returncode, done.stdout, done.stderr) == (0, f"transload {__version__}\n", "")


@pytest.mark.skipif(not find_spec("twine"), reason="twine is not installed: make dist does")
@BACKEND
def test_twine_accepts_both(dist: dict[str, Path]) -> None:
    done = run(sys.executable, "-m", "twine", "check", "--strict", *dist.values())
    assert done.returncode == 0, done.stdout


@pytest.mark.skipif(not PYRIGHT, reason="pyright is not installed: make dist does")
def test_pyright_accepts_a_program_that_uses_the_public_names() -> None:
    done = run(str(PYRIGHT), "--pythonpath", sys.executable, ROOT / "tests" / "typed_project")
    if done.returncode not in (0, 1):  # it installs itself when it first runs
        pytest.skip(f"pyright cannot run: {(done.stderr or done.stdout).strip()[-200:]}")
    assert done.returncode == 0, done.stdout


def test_the_version_is_written_once() -> None:
    files = [*PACKAGE.rglob("*.py"), *(ROOT / "scripts").rglob("*.*"), ROOT / "pyproject.toml", ROOT / "properdocs.yml"]
    texts = {path.name: path.read_text(encoding="utf-8") for path in files if path.suffix != ".pyc"}
    assert [name for name, text in texts.items() if f'"{__version__}"' in text] == ["_version.py"]


def test_the_recipe_for_conda_agrees_with_the_project() -> None:
    recipe = RECIPE.read_text(encoding="utf-8").splitlines()
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for line, setting in (
        ('  python_min: "{}"', r'requires-python = ">=(.*)"'),
        ("    - hatchling {}", r'requires = \["hatchling(.*)"\]'),
        ("      - transload = {}", r'^transload = "(.*:main)"'),
        ("  summary: {}", r'description = "(.*)"'),
        ("  license: {}", r'^license = "(.*)"'),
    ):
        (value,) = re.findall(setting, project, re.MULTILINE)
        assert line.format(value) in recipe
    assert [line for line in recipe if line.startswith(f'  version: "{__version__}"')] != []
