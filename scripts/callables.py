"""Write the table of callables that run code, open files or reach further names: ``src/transload/judge/callables.md``.

    python scripts/callables.py            add the names of this Python, torch and numpy to the table, and print counts
    python scripts/callables.py --check    print the counts, and fail if a callable with a reason gets an allow line

Every module of the standard library, of torch and of numpy that can be imported here is imported. Each name in it that
can be called is examined: functions, classes, methods of classes, also those that the module only imports. A callable
is listed, with a reason, if it is one of the sinks below, or if its bytecode, or that of a Python function that it
calls, refers to a sink. That is a guess on the safe side, not a proof: a callable that is not listed is not trusted
because of that, see ``judge.names``.

The table has the last component of each name, once for each package. Names are added and never removed, so that a
table written with several releases has the names of all. Imports print and warn: run this in a scratch directory.
"""

from __future__ import annotations

import argparse
import builtins
import contextlib
import dis
import functools
import importlib
import inspect
import io
import os
import pkgutil
import signal
import sys
import textwrap
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
TABLE = ROOT / "src" / "transload" / "judge" / "callables.md"
KINDS = {
    "code": "runs code, or imports what it is given",
    "files": "opens, reads or writes files",
    "names": "reaches further names",
}
PACKAGES = ("stdlib", "torch", "numpy")

# Modules with side effects when imported, and tests, which classify() recognises by their package.
SKIPPED = ("__main__", "antigravity", "idlelib", "test", "this", "turtledemo", "torch.utils.bottleneck.__main__")
TESTS = frozenset({"test", "tests", "__main__", "gen_pyi"})
TIMEOUT = 30

# -- sinks: modules whose functions all count, single functions, and attributes of any object

CODE_MODULES = """
    _pickle code codeop ctypes imp importlib importlib._bootstrap importlib._bootstrap_external importlib.machinery
    importlib.util marshal pickle pkgutil pty runpy subprocess zipimport _posixsubprocess"""
FILE_MODULES = """
    _io bz2 dbm fileinput glob gzip http.client io linecache lzma mmap shelve shutil socket sqlite3 ssl tarfile tempfile
    urllib.request zipfile"""
IN_MEMORY = """
    BufferedIOBase BufferedReader BufferedWriter BytesIO IOBase RawIOBase StringIO TextIOBase TextIOWrapper
    UnsupportedOperation _BufferedIOBase _IOBase _RawIOBase _TextIOBase text_encoding"""
HARMLESS_OS = """
    PathLike WEXITSTATUS cpu_count fsdecode fsencode fspath get_terminal_size getcwd getenv getpid getppid strerror
    register_at_fork sched_getaffinity urandom"""
SINGLE = {
    "code": """
        builtins.__import__ builtins.compile builtins.eval builtins.exec numpy.load torch.jit.load torch.load
        torch._C.import_ir_module torch._C.import_ir_module_from_buffer torch._C.PyTorchFileReader""",
    "files": """
        builtins.breakpoint builtins.input builtins.open numpy.fromfile numpy.genfromtxt numpy.loadtxt numpy.memmap
        numpy.save numpy.savetxt numpy.savez numpy.savez_compressed torch.from_file torch.save
        torch._C.PyTorchFileWriter""",
    "names": "builtins.globals",
}
ATTRIBUTES = {
    "code": "LoadLibrary _load_from_bytes exec_module lambdify load_dynamic load_library load_module parse_expr "
    "sympify",
    "files": "mkdir open read_bytes read_text rmdir rmtree unlink write_bytes write_text",
    "names": "__globals__ __subclasses__ f_builtins",
}
IMPORTERS = frozenset({"import_module", "__import__", "find_spec"})  # harmless if the name of the module is a constant
# Methods of a class that loading an object can call.
LOAD_METHODS = (
    "__new__ __init__ __post_init__ __setstate__ __del__ __setattr__ __setitem__ __hash__ __eq__ append extend"
)

Chain = tuple[str, ...]


class Found(NamedTuple):
    """A callable name, with the reasons why it is dangerous."""

    module: str
    name: str
    kind: str
    why: frozenset[str]


class _TooLongError(Exception):
    pass


def _import(name: str) -> types.ModuleType | None:
    def stop(*_: object) -> None:
        raise _TooLongError

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(TIMEOUT)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            return importlib.import_module(name)
    except BaseException:  # noqa: BLE001 - modules for another system, or that exit
        return None
    finally:
        signal.alarm(0)


def _walk(name: str) -> Iterator[str]:
    """Import a module and all modules below it; yield those that cannot be imported."""
    module = _import(name)
    if module is None:
        yield name
        return
    for info in pkgutil.iter_modules(getattr(module, "__path__", ()), f"{name}."):
        if TESTS.isdisjoint(info.name.split(".")) and not info.name.startswith(SKIPPED):
            yield from _walk(info.name)


def package_of(module: str) -> str:
    """The package whose part of the table a module belongs to."""
    package = module.partition(".")[0]
    return package if package in PACKAGES else "stdlib"


# -- why a callable is dangerous


class Sinks:
    """Objects that run code, open files or reach further names, by identity."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[object, str]] = {}
        for kind, text in (("code", CODE_MODULES), ("files", FILE_MODULES)):
            for name in text.split():
                self._module(name, kind)
        for name in ("os", "posix", "nt"):
            for attr, value in vars(sys.modules.get(name, builtins)).items():
                if name in sys.modules and inspect.isroutine(value) and not attr.startswith("_"):
                    runs = attr.startswith(("exec", "fork", "popen", "posix_spawn", "spawn", "startfile", "system"))
                    if attr not in HARMLESS_OS.split():
                        self._add(value, "code" if runs else "files")
        for kind, text in SINGLE.items():
            for full in text.split():
                module, _, name = full.rpartition(".")
                self._add(getattr(sys.modules.get(module), name, None), kind)

    def _module(self, name: str, kind: str) -> None:
        for attr, obj in vars(sys.modules[name]).items() if name in sys.modules else ():
            home = getattr(obj, "__module__", name)
            own = home == name or home == name.partition(".")[0] or str(home).startswith(("_frozen", f"_{name}"))
            plain = isinstance(obj, type) and issubclass(obj, BaseException | tuple | int)
            if callable(obj) and own and not plain and attr not in IN_MEMORY.split() and not attr.startswith("__"):
                self._add(obj, kind)

    def _add(self, obj: object, kind: str) -> None:
        if obj is not None:
            self._known.setdefault(id(obj), (obj, kind))

    def kind(self, obj: object) -> str:
        """The reason why an object is dangerous; empty if it is not."""
        entry = self._known.get(id(obj))
        return entry[1] if entry and entry[0] is obj else ""


def _function(obj: Any) -> types.FunctionType | None:
    """The Python function behind a callable."""
    for _ in range(10):
        if isinstance(obj, staticmethod | classmethod | types.MethodType):
            obj = obj.__func__
        elif isinstance(obj, functools.partial):
            obj = obj.func
        elif isinstance(obj, types.FunctionType) and "__wrapped__" in vars(obj):
            obj = vars(obj)["__wrapped__"]
    return obj if isinstance(obj, types.FunctionType) else None


@functools.cache
def _chains(code: types.CodeType) -> tuple[Chain, ...]:
    """What a function refers to: ``("global", "os", "system")``, ``("import", "os", "path")``, ``("attribute", …)``."""
    out: list[Chain] = []
    chain: list[str] = []
    imported: dict[str, Chain] = {}
    for step in dis.get_instructions(code):
        if step.opname in ("CACHE", "PRECALL", "PUSH_NULL"):
            continue
        name = str(step.argval)
        if step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            chain = [*(chain or ["attribute"]), name]
            if chain[0] != "attribute":
                continue
        if chain:
            fixed = chain[-1] in IMPORTERS and step.opname == "LOAD_CONST" and isinstance(step.argval, str)
            out += [] if fixed else [tuple(chain)]
            chain = []
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            chain = ["global", name]
        elif step.opname == "IMPORT_NAME":
            chain = ["import", name]
        elif step.opname == "IMPORT_FROM":
            module = next((earlier for earlier in reversed(out) if earlier[0] == "import"), ("import", ""))
            out.append((*module[:2], name))
        elif step.opname.startswith("STORE_") and out and out[-1][0] == "import":
            imported[name] = out[-1]
        elif step.opname in ("LOAD_FAST", "LOAD_DEREF") and name in imported:
            chain = [*imported[name]]
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            out += _chains(inner)
    return tuple(dict.fromkeys(out))


def _resolved(chain: Chain, namespace: dict[str, Any]) -> Iterator[Any]:
    """The objects along a chain, as long as they are attributes of modules and classes."""
    kind, first, *rest = chain
    if kind == "attribute":
        return
    obj = namespace.get(first, getattr(builtins, first, None)) if kind == "global" else sys.modules.get(first)
    yield obj
    for name in rest:
        if isinstance(obj, types.ModuleType):
            obj = vars(obj).get(name)
        elif isinstance(obj, type):
            obj = inspect.getattr_static(obj, name, None)
        else:
            return
        yield obj


class Reasons:
    """Determines why a callable is dangerous."""

    def __init__(self) -> None:
        self._sinks = Sinks()
        self._attributes = {name: kind for kind, names in ATTRIBUTES.items() for name in names.split()}
        self._direct: dict[types.FunctionType, tuple[frozenset[str], list[types.FunctionType]]] = {}

    def _of_bytecode(self, function: types.FunctionType) -> tuple[frozenset[str], list[types.FunctionType]]:
        if function not in self._direct:
            why: set[str] = set()
            callees = []
            for chain in _chains(function.__code__):
                why |= {self._attributes[name] for name in chain[1:] if name in self._attributes and len(chain) > 1}
                for obj in _resolved(chain, function.__globals__):
                    why.add(self._sinks.kind(obj))
                    inner = _function(obj)
                    if inner is not None:
                        callees.append(inner)
            self._direct[function] = frozenset(why - {""}), callees
        return self._direct[function]

    def of(self, obj: Any) -> frozenset[str]:
        """Why a function or class is dangerous: its own reasons or, if a function has none, those of its callees."""
        if isinstance(obj, type):
            parts = [inspect.getattr_static(obj, name, None) for name in LOAD_METHODS.split()]
            inherited = (frozenset({self._sinks.kind(base)} - {""}) for base in obj.__mro__)
            functions = (_function(part) for part in parts)
            return frozenset().union(*inherited, *(self.of(function) for function in functions if function is not None))
        reasons = frozenset({self._sinks.kind(obj)} - {""})
        function = _function(obj)
        if reasons or function is None:
            return reasons
        why, callees = self._of_bytecode(function)
        return why or frozenset().union(*(self._of_bytecode(callee)[0] for callee in callees))


def callables(roots: Iterable[str], selects: Callable[[str, str], bool] | None = None) -> Iterator[Found]:
    """Every callable in the imported modules, and every module among their attributes.

    ``selects`` chooses some of them, by module and name.
    """
    packages, reasons = set(roots), Reasons()
    for module, value in sorted(sys.modules.items()):
        if module.partition(".")[0] not in packages or not isinstance(value, types.ModuleType):
            continue
        for name, kind, obj in _members(module, value):
            if selects is None or selects(module, name):
                why = frozenset({"names"}) if kind == "module" else reasons.of(obj)
                yield Found(module, name, kind, why)


def _members(module: str, namespace: types.ModuleType) -> Iterator[tuple[str, str, Any]]:
    for name, obj in list(vars(namespace).items()):
        if isinstance(obj, types.ModuleType):
            yield name, "module", obj
        elif isinstance(obj, type):
            yield name, "class", obj
            for inner, part in list(vars(obj).items()) if obj.__module__ == module else ():
                method = _function(part)
                if method is not None and inner not in LOAD_METHODS.split():
                    yield f"{name}.{inner}", "method", method
        elif inspect.isroutine(obj) or isinstance(obj, functools.partial):
            yield name, "function", obj


# -- what an allowed name reaches

SPECIAL = ("__class__", "__dict__", "__getattribute__", "__init__", "__loader__", "__reduce_ex__", "__spec__")


def escapes(prefixes: Iterable[str], selects: Callable[[str, str], bool]) -> Iterator[tuple[str, str, object]]:
    """Every selected name below these prefixes that leads out of its module, of the modules that are imported.

    Either it belongs to a module that its own only imports, and is not selected as a name of that, or it is a module, a
    loader, an internal of an object, or a private function. A name may be split anywhere: a file can say
    ``torch.nn.functional`` and ``math.cos``, and torch says ``torch.nn.functional.math.cos``.
    """
    known = tuple(prefixes)
    seen: set[tuple[str, str, str]] = set()
    for module, value in sorted(sys.modules.items()):
        prefix = next((prefix for prefix in known if f"{module}.".startswith(prefix) or prefix.startswith(module)), "")
        if not prefix or not isinstance(value, types.ModuleType):
            continue
        for name in sorted({*vars(value), *SPECIAL}):
            obj = inspect.getattr_static(value, name, None)
            if selects(module, name) and _leads_out(name, obj):
                yield module, name, obj
            if isinstance(obj, types.ModuleType):
                # What another module sees under that name, below this prefix, makes no difference.
                place = (prefix, name, obj.__name__)
                own = obj.__name__ == f"{module}.{name}" or place in seen
                seen.add(place)
            else:
                own = not isinstance(obj, type) or obj.__module__ != module
            for inner in [] if own else sorted({*vars(obj), *SPECIAL}):
                found = inspect.getattr_static(obj, inner, None)
                foreign = isinstance(obj, types.ModuleType) and not selects(obj.__name__, inner)
                for first, last in ((module, f"{name}.{inner}"), (f"{module}.{name}", inner)):
                    if selects(first, last) and (foreign or _leads_out(inner, found)):
                        yield first, last, found


def _leads_out(name: str, obj: object) -> bool:
    """Whether an object reaches others than those of its module, or is not meant to be reached by name."""
    special = name.startswith("__") and name.endswith("__")
    private = name.startswith("_") and inspect.isroutine(obj)
    return special or private or isinstance(obj, types.ModuleType) or hasattr(obj, "exec_module")


# -- the table


def write(table: dict[str, dict[str, set[str]]], releases: str) -> None:
    """Write the table: each word with the first of its reasons."""
    lines = [
        "# Names that run code, open files or reach further names, by package, reason and their last component",
        "",
        f"Written by scripts/callables.py, last with {releases}.",
    ]
    for package in PACKAGES:
        lines += ["", f"## {package}", ""]
        known: set[str] = set()
        for kind, description in KINDS.items():
            line = f"- {description}: {' '.join(sorted(table[kind][package] - known))}"
            lines += textwrap.wrap(line, 120, subsequent_indent="  ", break_on_hyphens=False)
            known |= table[kind][package]
    TABLE.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> int:
    """Import all modules, write the table, and print the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    sys.argv = sys.argv[:1]
    warnings.simplefilter("ignore")
    roots = sorted({*sys.stdlib_module_names, "torch", "numpy", "functorch"} - set(SKIPPED))
    missing = [name for root in roots for name in _walk(root)]
    results = list(callables(roots))

    sys.path.insert(0, str(ROOT / "src"))
    from transload import steps
    from transload.judge import names

    if not check:
        written = steps.tables("transload.judge", "callables")
        table = {
            kind: {item: {word for word, why in written[item].items() if why == description} for item in PACKAGES}
            for kind, description in KINDS.items()
        }
        for item in results:
            last = item.name.rpartition(".")[2]
            if item.kind != "module" and not last.startswith("__") and not names.is_listed(item.module, item.name):
                for kind in item.why:
                    table[kind][package_of(item.module)].add(last)
        numpy, torch = (sys.modules[name].__version__ for name in ("numpy", "torch"))
        write(table, f"Python {sys.version.partition(' ')[0]}, torch {torch} and numpy {numpy}")
        steps.tables.cache_clear()
    counts = Counter((package_of(item.module), item.kind) for item in results)
    verdicts: Counter[tuple[str, str, str]] = Counter()
    wrong = []
    for item in results:
        if item.why:
            verdict = names.classify(item.module, item.name)[0]
            allowed = verdict != "dangerous" and names.can_be_allowed(item.module, item.name)
            kind = "module" if item.kind == "module" else "callable"
            verdicts[package_of(item.module), kind, "with an allow line" if allowed else verdict] += 1
            wrong += [f"{item.module}.{item.name} ({', '.join(sorted(item.why))})"] if allowed else []
    print(f"{len(results)} names in {len(sys.modules)} modules; {len(missing)} modules cannot be imported here")
    for package in PACKAGES:
        kinds = ", ".join(f"{counts[package, kind]} {kind}" for kind in ("function", "class", "method", "module"))
        print(f"{package}: {kinds}")
        for kind, reason in (("callable", "run code, open files or reach names"), ("module", "modules in modules")):
            words = [
                f"{count} {description}"
                for (*group, description), count in sorted(verdicts.items())
                if group == [package, kind]
            ]
            print(f"  {reason}: {', '.join(words)}")
    print("\n".join(["with an allow line though there is a reason:", *wrong]) if wrong else "none gets an allow line")
    sys.stdout.flush()
    os._exit(1 if wrong else 0)  # do not wait for threads and hooks of imported modules


if __name__ == "__main__":
    main()
