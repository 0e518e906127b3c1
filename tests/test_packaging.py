"""What is shipped: the zipapp, the version, the types, and the allowed imports between rooms."""

from __future__ import annotations

import ast
import json
import runpy
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import NamedTuple
from zipfile import ZipFile

import pytest

from transload._version import __version__
from transload.format import FORMATS

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "transload"

# What each room (subpackage) may import. Modules outside the rooms hold plain facts, which every room may import; they
# import only each other. Every room may display its own results with `render`. A new room must be listed here, and in
# docs/architecture.md, before its first import.
FACTS = {
    *("_version", "checkpoint", "contents", "credentials", "devices", "dtypes", "errors", "findings", "format"),
    *("frozen", "geometry", "machine", "nodes", "steps"),
}
FRONTS = {"__init__", "__main__", "cli"}
_FILES = {"io", "formats", "judge", "opening"}
ROOMS: dict[str, set[str]] = {
    "render": set(),
    "io": set(),
    "formats": {"io"},
    "judge": {"io", "formats"},
    "opening": {"io", "formats", "judge"},
    "diagnose": {"io"},
    "loading": _FILES,
    "saving": {"io", "formats"},
    "writing": {"io", "formats", "opening"},
    "retagging": _FILES,
    "converting": _FILES | {"writing"},
    "verifying": _FILES,
    "rescuing": _FILES | {"writing"},
    "comparing": _FILES,
    "checking": _FILES | {"diagnose", "loading"},
    "explaining": _FILES | {"diagnose", "loading", "checking"},
    "patching": _FILES | {"loading", "explaining"},
    "integrations": {"io", "loading", "saving", "patching"},
}

ALLOWED_ROOMS = {
    "loading": "torch",
    "saving": "torch",
    "opening": "numpy",
    "patching": "torch",
    "integrations": "fsspec",
}
# Programs that import torch in a child process, with the interpreter that is examined.
ALLOWED = {
    "transload.diagnose.probes.ask_torch": "torch",
    "transload.diagnose.probes.ask_store": "torch",
    "transload.io.buckets": "fsspec obstore",
    "transload.io.cuda_driver": "torch",
    "transload.writing.lora": "torch",
}
# A plugin is imported by the program that it is for.
PLUGINS = {"transload.integrations.pytest": "pytest"}


class Import(NamedTuple):
    module: str  # the full dotted name
    line: int
    deferred: bool  # inside a function: executed only when the function runs


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str) -> str:
    """``io`` for ``transload.io.sources``, and ``__init__`` for the package itself."""
    return module.split(".")[1] if "." in module else "__init__"


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}


def absolute(node: ast.ImportFrom, path: Path) -> str:
    if not node.level:
        return node.module or ""
    parts = path.relative_to(PACKAGE.parent).parts[: -node.level]
    return ".".join([*parts, node.module] if node.module else parts)


def imports_in(node: ast.AST, path: Path, *, deferred: bool = False) -> Iterator[Import]:
    """Every import that can run; those under TYPE_CHECKING never do."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(alias.name, child.lineno, deferred) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            base = absolute(child, path)
            # `from transload import render` names a module after `import`; `from transload.errors import X` does not.
            names = [f"{base}.{alias.name}" for alias in child.names] if base == "transload" else [base]
            yield from (Import(name, child.lineno, deferred) for name in names)
        elif is_type_checking(child):
            assert isinstance(child, ast.If)
            for other in child.orelse:
                yield from imports_in(ast.Module([other], []), path, deferred=deferred)
        elif not isinstance(child, ast.expr):  # most nodes are expressions, which contain no imports
            inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            yield from imports_in(child, path, deferred=deferred or inside)


@pytest.fixture(scope="module")
def modules() -> dict[Path, ast.Module]:
    """The syntax tree of every module that is shipped."""
    return {path: ast.parse(path.read_text(encoding="utf-8"), str(path)) for path in sorted(PACKAGE.rglob("*.py"))}


@pytest.fixture(scope="module")
def imports(modules: dict[Path, ast.Module]) -> list[tuple[str, Import]]:
    """Every import of every module, with the name of the module first."""
    return [(name_of(path), imported) for path, tree in modules.items() for imported in imports_in(tree, path)]


# The names of formats that modules outside ``formats`` may contain: for anything else they ask ``traits``.
NAMED = {
    "checking": {"safetensors"},  # the package
    "contents": {"sharded"},  # a kind of tensor
    "loading": {"pickle"},  # a member of a tar archive
    "rescuing": {"sharded"},  # a kind of tensor
    "writing": {"safetensors", "npz", "npy", "gguf", "dcp", "sharded"},  # what convert writes, or not; several inputs
}


def test_only_formats_know_the_names_of_formats(modules: dict[Path, ast.Module]) -> None:
    named: dict[str, set[str]] = {}
    for path, tree in modules.items():
        if (room := room_of(name_of(path))) not in ("format", "formats", "diagnose"):
            strings = {str(node.value) for node in ast.walk(tree) if isinstance(node, ast.Constant)}
            named.setdefault(room, set()).update(strings & FORMATS.keys())
    assert {room: names for room, names in named.items() if names} == NAMED


def test_only_allowed_packages_are_imported_and_only_inside_functions(
    imports: list[tuple[str, Import]],
) -> None:
    offenders = []
    for module, imported in imports:
        package = imported.module.partition(".")[0]
        allowed = (ALLOWED_ROOMS.get(room_of(module)) or ALLOWED.get(module, "")).split()
        is_foreign = package != "transload" and package not in sys.stdlib_module_names
        if is_foreign and not (package in allowed and imported.deferred) and package != PLUGINS.get(module):
            offenders.append((module, imported))
    assert offenders == []


def test_rooms_import_only_what_they_are_allowed_to(
    modules: dict[Path, ast.Module], imports: list[tuple[str, Import]]
) -> None:
    known = {*FACTS, *FRONTS, *ROOMS}
    new = {room_of(name_of(path)) for path in modules} - known
    assert not new, f"state what each of {new} may import, in {Path(__file__).name}"
    offenders = []
    for module, imported in imports:
        room, other = room_of(module), room_of(imported.module)
        ours = imported.module.partition(".")[0] == "transload" and other != room
        allowed = other in {*FACTS, "render"} or other in ROOMS.get(room, set()) or room in FRONTS
        if ours and not allowed:
            offenders.append((module, imported))
    assert offenders == []


def test_named_tuples_and_replace_are_those_of_frozen(modules: dict[Path, ast.Module]) -> None:
    slow = {("typing", "NamedTuple"), ("dataclasses", "replace")}
    offenders = [
        (path.name, node.lineno)
        for path, tree in modules.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and path.name != "frozen.py"
        if any((node.module, alias.name) in slow for alias in node.names)
    ]
    assert offenders == []


def test_rooms_import_only_the_front_of_another_room(modules: dict[Path, ast.Module]) -> None:
    """From a room's ``__init__`` that is its ``__all__``; what its other modules define is imported from them."""
    fronts = {f"transload.{room}": front_of(modules[PACKAGE / room / "__init__.py"]) for room in ROOMS}
    assert fronts["transload.loading"] == {"load"}
    others = [
        f"{name_of(path)} imports {node.module}.{alias.name}"
        for path, tree in modules.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module in fronts and room_of(name_of(path)) != room_of(node.module)
        for alias in node.names
        if alias.name not in fronts[node.module] | {each.stem for each in (PACKAGE / room_of(node.module)).iterdir()}
    ]
    assert not others


def front_of(tree: ast.Module) -> set[str]:
    """The names in ``__all__``."""
    assigned = [node for node in tree.body if isinstance(node, ast.Assign | ast.AugAssign)]
    lists = [node.value for node in assigned if ast.unparse(node).startswith("__all__")]
    return {name for value in lists for name in ast.literal_eval(value)}


def test_no_import_cycles(modules: dict[Path, ast.Module]) -> None:
    """Direct or indirect, also inside functions and for types only."""
    metrics = runpy.run_path(str(ROOT / "scripts" / "metrics.py"))
    cycles = metrics["cycles"]
    assert cycles(metrics["imports"]({name_of(path): tree for path, tree in modules.items()})) == []
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [{"a", "b", "c"}]


def test_import_finder_finds_every_form_of_import() -> None:
    """The tests above cannot fail on imports that the finder misses, so this lists what it must find."""
    package = PACKAGE / "formats"
    source = """
import torch, os.path
from ..cli import main
from transload import render
from . import nodes
if TYPE_CHECKING:
    import numpy
else:
    import zlib
try:
    import msgpack
except ImportError:
    pass
class Reader:
    import struct
    def read(self):
        from numpy.linalg import norm
"""
    results = list(imports_in(ast.parse(source), package / "invented.py"))
    assert [(imported.module, imported.deferred) for imported in results] == [
        ("torch", False),
        ("os.path", False),
        ("transload.cli", False),
        ("transload.render", False),
        ("transload.formats", False),
        ("zlib", False),
        ("msgpack", False),
        ("struct", False),
        ("numpy.linalg", True),
    ]


def test_py_typed_is_shipped() -> None:
    assert (PACKAGE / "py.typed").is_file()


def test_every_function_is_annotated(modules: dict[Path, ast.Module]) -> None:
    """mypy checks this too, but an ignore in its settings must not break the promise of py.typed."""
    unannotated = [
        f"{path}:{node.lineno}: {node.name}"
        for path, tree in modules.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.returns is None
    ]
    assert unannotated == []


def test_metadata_and_source_agree_on_the_version() -> None:
    try:
        installed = metadata.version("transload")
    except metadata.PackageNotFoundError:
        pytest.skip("transload is importable but not installed")
    assert installed == __version__


def test_changelog_has_an_entry_for_the_version() -> None:
    assert f"## [{__version__}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def build_zipapp(target: Path) -> Path:
    script = ROOT / "scripts" / "build_zipapp.py"
    subprocess.run([sys.executable, script, target], check=True, capture_output=True, timeout=300)
    return target


@pytest.fixture(scope="module")
def zipapp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_zipapp(tmp_path_factory.mktemp("dist") / "transload.pyz")


def run_zipapp(zipapp: Path, *args: str | Path) -> subprocess.CompletedProcess[str]:
    # -I -S: neither the environment, nor this folder, nor site-packages can provide a module.
    command = [sys.executable, "-I", "-S", zipapp, *args]
    return subprocess.run(command, check=False, capture_output=True, encoding="utf-8", timeout=300)


def test_zipapp_runs_by_itself(zipapp: Path) -> None:
    process = run_zipapp(zipapp, "--version")
    assert (process.returncode, process.stderr) == (0, "")
    assert __version__ in process.stdout


def test_zipapp_reads_a_checkpoint(zipapp: Path) -> None:
    process = run_zipapp(zipapp, "inspect", ROOT / "examples" / "model_cuda0.pt")
    assert (process.returncode, process.stderr) == (0, "")
    assert "cuda:0" in process.stdout


def test_zipapp_examines_a_machine(zipapp: Path) -> None:
    process = run_zipapp(zipapp, "doctor", "--no-torch", "--json")
    assert process.returncode in (0, 1), process.stderr
    assert json.loads(process.stdout)["machine"]["python"]["version"]
    assert run_zipapp(zipapp, "doctor", "--explain", "U04").stdout.startswith("U04 ")


def test_zipapp_explains_an_error(zipapp: Path, tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text("RuntimeError: Invalid magic number; corrupt file?\n", encoding="utf-8")
    process = run_zipapp(zipapp, "explain", "--no-checks", "--json", log)
    assert json.loads(process.stdout)["known"], process.stderr


def test_zipapp_contains_all_data_files(zipapp: Path) -> None:
    paths = (path for kind in ("*.json", "*.md", "*.css", "*.js") for path in PACKAGE.rglob(kind))
    data = {path.relative_to(PACKAGE.parent).as_posix() for path in paths}
    assert data
    with ZipFile(zipapp) as archive:
        assert data <= set(archive.namelist())


def test_zipapp_returns_the_exit_code(zipapp: Path, tmp_path: Path) -> None:
    assert run_zipapp(zipapp, "inspect", tmp_path / "absent.pt").returncode == 2


def test_zipapp_is_executable_and_its_build_reproducible(zipapp: Path, tmp_path: Path) -> None:
    content = zipapp.read_bytes()
    assert content.startswith(b"#!/usr/bin/env python3\n")
    assert build_zipapp(tmp_path / "again" / "transload.pyz").read_bytes() == content
