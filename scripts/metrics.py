"""Print the size of the package, the dependencies between its modules, and its cost at start; there are no limits.

    python scripts/metrics.py              counts in the sources, and the modules that a first load imports
    python scripts/metrics.py --timings    also CPU times relative to ``import torch``: medians of several rounds

- *import cycles*: strongly connected components of more than one module, counting every import in the sources, also
  those inside functions and those for typing only.
- *functions referenced once*: definitions by ``def`` whose name occurs exactly once as a name or an attribute, besides
  imports: in their own module if the name begins with an underscore, else anywhere in src. Magic methods are left out.
- *compiled*: Python finds the bytecode of all modules; *not compiled*: only that of torch. Neither writes bytecode.
"""

from __future__ import annotations

import argparse
import ast
import gc
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parent.parent
SRC = ROOT / "src"
SMALL = ROOT / "examples" / "model_cuda0.pt"
ROUNDS = 7

Graph = dict[str, set[str]]


def modules() -> dict[str, ast.Module]:
    """Every module of the package by its dotted name."""
    trees: dict[str, ast.Module] = {}
    for path in sorted(SRC.rglob("*.py")):
        parts = path.relative_to(SRC).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        trees[name] = ast.parse(path.read_text(encoding="utf-8"), str(path))
    return trees


@cache
def nodes_of(tree: ast.Module) -> list[ast.AST]:
    """The nodes of a module that are counted; cached, because walking the tree takes most of the time."""
    kinds = ast.Import, ast.ImportFrom, ast.Name, ast.Attribute, ast.FunctionDef, ast.AsyncFunctionDef
    return [node for node in ast.walk(tree) if isinstance(node, kinds)]


def lines() -> int:
    """The number of lines in all modules."""
    return sum(path.read_bytes().count(b"\n") for path in SRC.rglob("*.py"))


def imports(trees: dict[str, ast.Module]) -> Graph:
    """The modules that each module imports, anywhere in it."""
    graph: Graph = {}
    for name, tree in trees.items():
        imported: set[str] = set()
        for node in nodes_of(tree):
            if isinstance(node, ast.Import):
                imported.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                imported.update(dotted if dotted in trees else node.module for dotted in names)
        graph[name] = (imported & trees.keys()) - {name}
    return graph


def reachable(graph: Graph, start: str) -> set[str]:
    """The modules that a module imports, directly or indirectly."""
    seen: set[str] = set()
    pending = [start]
    while pending:
        new = graph[pending.pop()] - seen
        seen |= new
        pending += new
    return seen


def cycles(graph: Graph) -> list[set[str]]:
    """The sets of modules that import each other, directly or indirectly."""
    reach = {name: reachable(graph, name) for name in graph}
    found = {frozenset(other for other in reach[name] if name in reach[other]) for name in graph if name in reach[name]}
    return sorted(map(set, found), key=len)


def names_used(tree: ast.Module) -> Iterator[str]:
    """Every name and attribute in the code, as often as it occurs."""
    for node in nodes_of(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr


def referenced_once(trees: dict[str, ast.Module]) -> tuple[int, int]:
    """How many functions are referenced exactly once, and how many there are."""
    by_module = {name: Counter(names_used(tree)) for name, tree in trees.items()}
    everywhere = sum(by_module.values(), Counter())
    once = total = 0
    for name, tree in trees.items():
        for node in nodes_of(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("__"):
                total += 1
                once += (by_module[name] if node.name.startswith("_") else everywhere)[node.name] == 1
    return once, total


# -- measured in new processes ---------------------------------------------------------------------------------------

IMPORTED = """
import sys, transload
{load}
print(sum(name.partition(".")[0] == "transload" for name in sys.modules))
"""
LOAD = f"transload.load({str(SMALL)!r}, map_location='cpu')"
INSPECT = f"""
import sys
sys.argv = ["transload", "inspect", {str(SMALL)!r}, "--json"]
from transload.cli.main import main
sys.exit(main())
"""
FIRST_LOAD = f"""
import sys, time
began = time.process_time()
import torch
loaded = time.process_time()
import transload
{LOAD}
print(loaded - began, time.process_time() - loaded)
"""
CPU = """
import resource, subprocess, sys
subprocess.run([sys.executable, *sys.argv[1:]], check=True, stdout=subprocess.DEVNULL)
used = resource.getrusage(resource.RUSAGE_CHILDREN)  # os.times counts in hundredths of a second
print(used.ru_utime + used.ru_stime)
"""


def python(*arguments: str, bytecode: str = "", write: bool = False) -> str:
    """What a new interpreter prints. It reads bytecode from a folder; with ``write`` it also writes it there."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "TRANSLOAD"))}
    environ["PYTHONPATH"] = str(SRC)
    environ |= {"PYTHONPYCACHEPREFIX": bytecode} if bytecode else {}
    environ |= {} if write else {"PYTHONDONTWRITEBYTECODE": "1"}
    process = subprocess.run([sys.executable, *arguments], env=environ, check=True, stdout=subprocess.PIPE, text=True)
    return process.stdout


def has_torch() -> bool:
    """Whether torch is installed; it is not imported."""
    from importlib.util import find_spec

    return find_spec("torch") is not None


def imported_by_load() -> int:
    """How many modules of transload the first load of a small file imports."""
    return int(python("-c", IMPORTED.format(load=LOAD)))


def timings() -> Iterator[tuple[str, str]]:
    """CPU times of the first load, and of ``inspect --json`` as a process, relative to ``import torch``."""
    with tempfile.TemporaryDirectory() as folder:
        python("-c", "import torch", bytecode=folder, write=True)
        yield from shares("not compiled", folder)  # transload only: torch has its bytecode in both
        python("-c", FIRST_LOAD, bytecode=folder, write=True)
        python("-c", INSPECT, bytecode=folder, write=True)
        yield from shares("compiled", folder)


def shares(state: str, folder: str) -> Iterator[tuple[str, str]]:
    """The CPU times with the bytecode in a folder."""
    first, seconds, process = [], [], []
    for _ in range(ROUNDS):
        torch, load = map(float, python("-c", FIRST_LOAD, bytecode=folder).split())
        first.append(load / torch)
        seconds.append(load)
        inspect, whole = (float(python("-c", CPU, "-c", code, bytecode=folder)) for code in (INSPECT, "import torch"))
        process.append(inspect / whole)
    yield f"first load / import torch, {state}", f"{median(first):.1%} ({median(seconds) * 1000:.0f} ms)"
    yield f"inspect --json / import torch, processes, {state}", f"{median(process):.1%}"


def figures(*, timed: bool) -> Iterator[tuple[str, str]]:
    """Names and values, in the order of the table."""
    gc.disable()  # scanning the trees for garbage would take half of the time
    trees = modules()
    import_cycles = cycles(imports(trees))
    once, total = referenced_once(trees)
    yield "lines under src", f"{lines():,}"
    yield "modules", f"{len(trees):,}"
    yield "import cycles", f"{len(import_cycles)} (largest: {max(map(len, import_cycles), default=0)} modules)"
    yield "functions referenced once", f"{once:,} of {total:,}"
    if has_torch():
        yield "modules imported by a first load", str(imported_by_load())
        if timed:
            yield from timings()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--timings", action="store_true", help="also measure CPU times")
    rows = list(figures(timed=parser.parse_args().timings))
    width = max(len(name) for name, _ in rows)
    print("\n".join(f"{name:<{width}}  {value}" for name, value in rows))


if __name__ == "__main__":
    main()
