"""What is known about the names that a checkpoint can make a loader import.

The tables are in ``names.md``. ``data`` lists what ``torch.load(weights_only=True)`` allows in torch 2.13: a file that
is pure data contains only these names, and only in calls that ``judge.safety`` accepts. ``harmless`` lists common names
outside ``data``. Dangerous names run code, read files, or reach further names; the rules here and the tables of
``callables.md`` find them. Everything else is unknown, and unknown is never safe.

A line that allows an unknown name is printed only if the name may be part of a model (``can_be_allowed``): a class of a
third-party module; in the standard library, torch and numpy, only what is known to be data. A name is not safe just
because it begins with ``torch.`` or ``numpy.``: both packages contain functions that evaluate text.
"""

from __future__ import annotations

import sys
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING

from transload.nodes import PURPOSES
from transload.steps import tables

_TABLES = tables(__package__, "names")
_DATA = {".".join(key): text for key, text in PURPOSES.items()} | _TABLES["data"]
TORCH_DEFAULT = frozenset(_DATA)
PLAIN_VALUES = _TABLES["plain values"]
"""Values that training runs save with their weights: ``transload.load`` makes them, torch refuses them."""

ALSO_DATA = frozenset(_TABLES["also data"])
"""Names that torch refuses although they are data."""

PIECES = _TABLES["pieces"]
"""Names in distributed tensors, which only describe them."""

RECORDS = _TABLES["records"]
"""Classes that only hold values."""

SHADOWED = _TABLES["tensor attributes"].keys()
"""Attributes of a tensor that loading code uses, and that attributes from the file would shadow."""

_HARMLESS = PLAIN_VALUES | _TABLES["harmless"] | RECORDS
_LIBRARIES = _TABLES["libraries"] | _TABLES["model libraries"]
_VERBS, _CLASSES, _COMPUTES = (tuple(_TABLES[title]) for title in ("verbs", "classes", "computes"))
_ENDS = _TABLES["dangerous words"].keys()
_STDLIB_TESTS = tuple(
    f"test.{name}" for name in ("support", "libregrtest", "regrtest", "test_", "_test", "autotest", "pythoninfo")
)
# Modules that a name can reach through a module that imports them.
_MODULES = sys.stdlib_module_names | _TABLES["module aliases"].keys()
# Packages that follow PEP 8: a capitalized name is a class, not a module.
_KNOWN = sys.stdlib_module_names | {"torch", "numpy", "joblib", "pandas", "dill", "cloudpickle", "requests"}
_REACHES = "reaches another module through this one"
_MAX_NESTED = 100  # no class is nested this deep, but a file can contain a name with a hundred million dots


def canonical(module: str, name: str) -> tuple[str, str]:
    """The name that Python 3 imports: Python 2 spellings translated, ``torch.tensor`` as ``torch._tensor``.

    >>> canonical("__builtin__", "set"), canonical("copy_reg", "_reconstructor")
    (('builtins', 'set'), ('copyreg', '_reconstructor'))
    """
    if (module, name) in NAME_MAPPING:
        module, name = NAME_MAPPING[module, name]
    elif module in IMPORT_MAPPING:
        module = IMPORT_MAPPING[module]
    if module == "torch.tensor":
        module = "torch._tensor"
    return module, name


def torch_spelling(module: str, name: str) -> str:
    """The name that ``weights_only`` looks up: it translates fewer Python 2 names than Python does.

    >>> torch_spelling("__builtin__", "set"), torch_spelling("exceptions", "ValueError")
    ('builtins.set', 'exceptions.ValueError')
    """
    if (module, name) in NAME_MAPPING and (module in _TABLES["torch renames"] or name == "StandardError"):
        module, name = NAME_MAPPING[module, name]
    elif module in _TABLES["torch moves"]:
        module = IMPORT_MAPPING[module]
    return f"{module}.{name}"


def classify(module: str, name: str) -> tuple[str, str]:
    """Verdict and purpose of a canonical name: ``data``, ``harmless``, ``unknown`` or ``dangerous``.

    >>> classify("os", "getcwd")
    ('dangerous', 'reaches the operating system')
    """
    full = f"{module}.{name}"
    if full in _DATA and "." not in name:
        return "data", _DATA[full]
    if full in _HARMLESS and "." not in name:
        return "harmless", _HARMLESS[full]
    if danger := is_dangerous(module, name):
        return "dangerous", danger
    families = (text for prefix, text in _TABLES["families"].items() if full.startswith(prefix))
    return "unknown", _DATA.get(full) or next(families, "not known to transload")


def can_be_allowed(module: str, name: str) -> bool:
    """Whether to print a line that makes ``torch.load`` accept a name.

    Not for dangerous names, names that are reached through something other than a class, and functions of libraries; in
    the standard library, torch and numpy, only for names that are known to be data or part of a model. Packages have
    functions of the standard library under names of their own: ``six.exec_`` is ``exec``.

    >>> can_be_allowed("torch.nn.modules.linear", "Linear"), can_be_allowed("torch.hub", "load")
    (True, False)
    """
    full = f"{module}.{name}"
    if "." not in name and (full in _DATA or full in _HARMLESS):
        return True
    if not is_class_path(name) or is_dangerous(module, name):
        return False
    package, last = module.partition(".")[0], name.rpartition(".")[2]
    if _is_core(module):
        return module == "builtins" or _is_part(module, name)
    if package in sys.stdlib_module_names:  # a package that is named after a module, or what that module imports
        return _is_class(last) and not any(map(_is_class, module.split("."))) and bool(_own(full, (f"{package}.",)))
    if package in _LIBRARIES:
        return _is_class(last) or last[1:2].isupper() or _is_part(module, name)  # xLSTMBlock
    return not may_be_function(module, name) or _ENDS.isdisjoint(last.lower().split("_"))


def may_be_function(module: str, name: str) -> bool:
    """Whether a name of a package that is not known is not written like that of a class.

    >>> may_be_function("nets.blocks", "make"), may_be_function("nets.blocks", "Block"), may_be_function("math", "cos")
    (True, False, False)
    """
    in_known_package = _is_core(module) or module.partition(".")[0] in _LIBRARIES
    return not in_known_package and not _is_class(name.rpartition(".")[2])


def _is_core(module: str) -> bool:
    """Whether a module belongs to the standard library, to torch or to numpy."""
    package, dot, _ = module.partition(".")
    if package in ("torch", "numpy", "functorch"):
        return True
    return package in sys.stdlib_module_names and (not dot or package in _TABLES["standard library packages"])


def _is_part(module: str, name: str) -> bool:
    """Whether a name of a known package is a part of a model, or only computes."""
    full = f"{module}.{name}"
    last = name.rpartition(".")[2]
    if full in _TABLES["parts"]:
        return True
    if "." not in name and (own := _own(full, _COMPUTES)) and not own.rpartition(".")[2].startswith("_"):
        return full not in _TABLES["not computes"]
    if module.startswith("transformers.models.") and module.rpartition(".")[2].startswith("modeling_"):
        return not last.lstrip("_").startswith(_VERBS)
    words = last.lstrip("_").split("_") if last.startswith("_") else []
    if any(word[:1].islower() for word in words[1:]):  # a private function, such as _Dirichlet_backward
        return False
    return bool(_own(full, _CLASSES)) and _is_class(last) and not _dangerous_component(module, last)


def _own(full: str, prefixes: tuple[str, ...]) -> str:
    """What follows one of these prefixes in a name; empty if it leads through a module that is only imported there.

    >>> _own("torch.nn.modules.Linear", ("torch.nn.",)), _own("torch.nn.functional.math.cos", ("torch.nn.",))
    ('modules.Linear', '')
    """
    if not full.startswith(prefixes):
        return ""
    rest = next(full[len(prefix) :] for prefix in prefixes if full.startswith(prefix))
    return "" if any(part.lstrip("_") in _MODULES or part in _MODULES for part in rest.split(".")) else rest


def _dangerous_component(module: str, last: str) -> str:
    """Why a name of the standard library, torch or numpy with this last component is dangerous; empty if it is not."""
    package = module.partition(".")[0]
    return tables(__package__, "callables")[package if package in ("torch", "numpy") else "stdlib"].get(last, "")


def is_dangerous(module: str, name: str) -> str:
    """Why a name is dangerous; empty if it is not.

    >>> is_dangerous("torch.testing", "assert_close"), is_dangerous("numpy", "fromfile")
    ('', 'opens files')
    """
    if danger := is_listed(module, name):
        return danger
    last = name.rpartition(".")[2]
    if _is_core(module):
        full = f"{module}.{name}"
        allowed = _is_part(module, name) or full in _TABLES["packaged programs"] or full in _HARMLESS or full in _DATA
        return "" if allowed else _dangerous_component(module, last)
    library = module.partition(".")[0] in _TABLES["libraries"]
    return "reads, runs or fetches what it is given" if library and last.lstrip("_").startswith(_VERBS) else ""


def is_listed(module: str, name: str) -> str:
    """Why a name is dangerous by the rules of this module alone; empty if it is not.

    A name that leads through another module is judged by what it leads to, as far as that is known: ``random`` imports
    ``os`` as ``_os``. A pickler writes dots only for names that are nested in a class.
    """
    if danger := _listed(module, name):
        return danger
    parts = name.split(".")
    if ".six.moves." in f".{module}." or len(parts) > _MAX_NESTED:  # six.moves has modules of the standard library
        return _REACHES
    never = [at for at, part in enumerate(parts) if {part, part.lstrip("_")} & _TABLES["never attributes"].keys()]
    modules = sorted({*never, *(at for at, part in enumerate(parts[:-1]) if not _is_class(part))})
    full = f"{module}.{name}"
    if not modules or (not never and (full in _DATA or full in _HARMLESS)):
        return ""
    for at in modules:
        alias, rest = parts[at].lstrip("_"), ".".join(parts[at + 1 :])
        if alias in _KNOWN and rest and (danger := _listed(alias, rest)):
            return danger
        if alias in _LIBRARIES and rest and not _is_class(parts[-1]):
            return _REACHES
    return _REACHES if never or module.partition(".")[0] in _KNOWN else ""


def _listed(module: str, name: str) -> str:
    """Why a name is dangerous without looking through modules; empty if it is not."""
    full = f"{module}.{name}"
    if full in _TABLES["dangerous names"] or full in _TABLES["packaged programs"]:
        return _TABLES["dangerous names"].get(full, "")
    package, dot, _ = module.partition(".")
    if package == "test":
        listed = not dot or module.startswith(_STDLIB_TESTS)
    else:
        listed = package in _TABLES["dangerous packages"] and not (dot and package in _TABLES["single files"])
    if listed:
        return _TABLES["dangerous packages"][package]
    plain = name in _TABLES["plain builtins"] or name.endswith(("Error", "Exception", "Warning"))
    if module == "builtins" and not plain:
        return "a built-in function"
    # math.__loader__ imports modules: every module has such attributes, also those that only compute.
    inner = [part for part in module.split(".")[1:] if part not in ("__main__", "__init__")]
    if any(part.startswith("__") and part.endswith("__") for part in (*inner, *name.split("."))):
        return "reaches into the internals of an object"
    return next((danger for prefix, danger in _TABLES["dangerous prefixes"].items() if full.startswith(prefix)), "")


def _is_class(part: str) -> bool:
    """Whether a name looks like that of a class."""
    return part.lstrip("_")[:1].isupper() and part not in _TABLES["capital modules"]


def is_class_path(name: str) -> bool:
    """Whether a name is at the top level of its module or nested in classes: only classes precede its last dot.

    >>> is_class_path("Net"), is_class_path("Net.Block"), is_class_path("_os.system")
    (True, True, False)
    """
    return all(map(_is_class, name.split(".")[:-1]))
