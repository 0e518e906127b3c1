"""What is known of the names a checkpoint can ask a loader to import.

Three lists decide. ``TORCH_DEFAULT`` is what ``torch.load(weights_only=True)`` lets through in torch 2.13; only these
can be part of a file that is nothing but data, and only in the shapes ``judge.shapes`` allows. ``HARMLESS`` are widely
met names outside that list. The dangerous ones run code, read files, or reach further names. Everything else is
unknown, and unknown is never safe: a name that begins with ``torch.`` or ``numpy.`` earns no trust, since both packages
contain functions that evaluate text.
"""

from __future__ import annotations

import sys
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING

__all__ = ["TORCH_DEFAULT", "canonical", "classify", "is_class_path", "is_dangerous", "is_loader", "torch_spelling"]

_WIDTHS = ("BFloat16", "Byte", "Char", "Double", "Float", "Half", "Int", "Long", "Short")
_DTYPES = (
    *("bool", "float16", "float32", "float64", "bfloat16", "complex32", "complex64", "complex128"),
    *(f"uint{n}" for n in (1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 64)),
    *(f"int{n}" for n in (1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 64)),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
    *("bits8", "bits16", "bits1x8", "bits2x4", "bits4x2"),
    *("qint8", "qint32", "quint8", "quint4x2", "quint2x4"),
)
_SCHEMES = (
    "per_tensor_affine",
    "per_channel_affine",
    "per_tensor_symmetric",
    "per_channel_symmetric",
    "per_channel_affine_float_qparams",
)
_REBUILD = (
    *("tensor", "tensor_v2", "tensor_v3", "parameter", "parameter_with_state", "qtensor", "sparse_tensor"),
    *("nested_tensor", "meta_tensor_no_storage", "wrapper_subclass", "device_tensor_from_numpy"),
    "device_tensor_from_cpu_tensor",
)
_PLAIN_STORAGES = (*_WIDTHS, "Bool", "ComplexDouble", "ComplexFloat")
_QUANTIZED_STORAGES = ("QInt32", "QInt8", "QUInt2x4", "QUInt4x2", "QUInt8")

_DTYPE_NAMES = frozenset(f"torch.{name}" for name in _DTYPES)
_SCHEME_NAMES = frozenset(f"torch.{name}" for name in _SCHEMES)
_REBUILD_NAMES = frozenset(
    {*(f"torch._utils._rebuild_{name}" for name in _REBUILD), "torch._tensor._rebuild_from_type_v2"}
)
_STORAGE_NAMES = frozenset(
    {
        *(f"torch.{name}Storage" for name in (*_PLAIN_STORAGES, *_QUANTIZED_STORAGES)),
        *(f"torch.cuda.{name}Storage" for name in _PLAIN_STORAGES),
        "torch.storage.TypedStorage",
        "torch.storage.UntypedStorage",
    }
)
_TENSOR_CLASSES = frozenset(
    {
        "torch.Tensor",
        *(f"{where}.{name}Tensor" for where in ("torch", "torch.cuda") for name in (*_WIDTHS, "Bool")),
        *(f"{where}.{name}Tensor" for where in ("torch.sparse", "torch.cuda.sparse") for name in _WIDTHS),
    }
)

# torch/_weights_only_unpickler.py, _get_allowed_globals(), 2.13.0: 144 names, and four that `import torch` registers
# beside them.
TORCH_DEFAULT = frozenset(
    {
        "_codecs.encode",
        "builtins.bytearray",
        "builtins.complex",
        "builtins.set",
        "collections.Counter",
        "collections.OrderedDict",
        "torch.Size",
        "torch.device",
        "torch.nn.parameter.Parameter",
        "torch.serialization._get_layout",
        "torch.distributed._mesh_layout._FlatLayout",
        "torch.distributed._mesh_layout._MeshLayout",
        "torch.nested._internal.nested_tensor.NestedTensor",
        "torch.nested._internal.nested_tensor._rebuild_njt",
    }
    | _DTYPE_NAMES
    | _SCHEME_NAMES
    | _REBUILD_NAMES
    | _STORAGE_NAMES
    | _TENSOR_CLASSES
)

_PURPOSES: dict[str, str] = {
    "_codecs.encode": "bytes, written as text",
    "builtins.bytearray": "a byte array",
    "builtins.complex": "a complex number",
    "builtins.set": "a set",
    "collections.OrderedDict": "an ordered dictionary, as state_dict() returns",
    "collections.Counter": "a dictionary of counts",
    "torch.Size": "a shape",
    "torch.device": "a device; map_location does not move it",
    "torch.nn.parameter.Parameter": "a parameter",
    "torch.serialization._get_layout": "the layout of a sparse tensor",
    "torch.distributed._mesh_layout._FlatLayout": "how a distributed tensor lies on its devices",
    "torch.distributed._mesh_layout._MeshLayout": "how a distributed tensor lies on its devices",
    "torch.nested._internal.nested_tensor.NestedTensor": "a nested (jagged) tensor",
    "torch.nested._internal.nested_tensor._rebuild_njt": "rebuilds a nested (jagged) tensor",
}

_HARMLESS: dict[str, str] = {
    "argparse.Namespace": "parsed command-line arguments",
    "builtins.dict": "a dictionary",
    "builtins.float": "a number",
    "builtins.frozenset": "a frozen set",
    "builtins.int": "a number",
    "builtins.list": "a list",
    "builtins.object": "a plain object",
    "builtins.range": "a range of numbers",
    "builtins.slice": "a slice",
    "builtins.str": "text",
    "builtins.tuple": "a tuple",
    "builtins.bytes": "bytes",
    "builtins.bool": "true or false",
    "builtins.Ellipsis": "the constant ...",
    "builtins.NotImplemented": "a constant",
    "collections.defaultdict": "a dictionary with a default",
    "collections.deque": "a queue",
    "copyreg.__newobj__": "makes an object of a class named beside it",
    "copyreg._reconstructor": "makes an object of a class named beside it",
    "datetime.date": "a date",
    "datetime.datetime": "a date and time",
    "datetime.time": "a time of day",
    "datetime.timedelta": "a span of time",
    "datetime.timezone": "a time zone",
    "decimal.Decimal": "a decimal number",
    "fractions.Fraction": "a fraction",
    "numpy.dtype": "the type of a numpy array",
    "numpy.ndarray": "a numpy array",
    "numpy._core.multiarray._reconstruct": "rebuilds a numpy array",
    "numpy._core.multiarray.scalar": "a numpy number",
    "numpy._core.numeric._frombuffer": "rebuilds a numpy array",
    "numpy.core.multiarray._reconstruct": "rebuilds a numpy array",
    "numpy.core.multiarray.scalar": "a numpy number",
    "numpy.core.numeric._frombuffer": "rebuilds a numpy array",
    "pathlib.Path": "a file path",
    "pathlib.PosixPath": "a file path",
    "pathlib.PurePosixPath": "a file path",
    "pathlib.PureWindowsPath": "a file path",
    "pathlib.WindowsPath": "a file path",
    "pathlib._local.PosixPath": "a file path",
    "pathlib._local.WindowsPath": "a file path",
    "torch._C.Generator": "a random number generator",
    "torch._dynamo.decorators._DimRange": "the bounds of a size, in a nested (jagged) tensor",
    "torch.torch_version.TorchVersion": "the torch release that saved the file",
    "types.SimpleNamespace": "an object with named values",
    "urllib.parse.ParseResult": "the parts of an address",
    "urllib.parse.SplitResult": "the parts of an address",
    "uuid.UUID": "an identifier",
}

# First match wins. Where a name is unknown, this still says what kind of thing it is.
_FAMILIES: tuple[tuple[str, str], ...] = (
    (
        "__main__.",
        "something defined in the script that saved the file; it must exist under the same name to be loaded",
    ),
    (
        "__mp_main__.",
        "something defined in the script that saved the file; it must exist under the same name to be loaded",
    ),
    ("__torch__.", "a type of the TorchScript program in this file"),
    ("torch.jit", "part of a TorchScript module"),
    ("torch.nn.", "a class of torch.nn: the file holds a whole module, not only its weights"),
    ("torch.optim.", "a class of torch.optim: the file holds a whole optimizer or scheduler"),
    ("torch.distributed.checkpoint.", "the index of a distributed checkpoint"),
    ("torch.distributed", "a distributed tensor or its mesh"),
    ("torch.fx", "a traced graph"),
    ("torch.", "something of torch that torch.load refuses by default"),
    ("torchao.", "a quantized tensor of torchao"),
    ("torchvision.", "a class of torchvision: the file holds a whole module"),
    ("numpy.", "something of numpy"),
    ("pytorch_lightning.", "a class of Lightning"),
    ("lightning.", "a class of Lightning"),
    ("lightning_fabric.", "a class of Lightning"),
    ("omegaconf.", "a configuration of OmegaConf"),
    ("transformers.", "a class of transformers"),
    ("deepspeed.", "a class of DeepSpeed"),
    ("megatron.", "a class of Megatron"),
    ("timm.", "a class of timm: the file holds a whole module"),
    ("ultralytics.", "a class of ultralytics: the file holds a whole model"),
    ("enum.", "an enumeration"),
)

# The lists below only choose the word "dangerous" over "unknown"; neither is ever safe. A whole package is listed by
# its first component, a single function in full.
_DANGEROUS_PACKAGES: dict[str, str] = {
    **dict.fromkeys(("os", "posix", "nt", "posixpath", "ntpath", "commands", "popen2"), "reaches the operating system"),
    **dict.fromkeys(("subprocess", "_posixsubprocess", "_winapi", "pty", "multiprocessing"), "starts processes"),
    **dict.fromkeys(("sys", "gc", "signal", "atexit", "site"), "changes or searches the running interpreter"),
    **dict.fromkeys(
        ("importlib", "imp", "runpy", "pkgutil", "zipimport", "_imp", "modulefinder"), "imports or runs modules"
    ),
    **dict.fromkeys(("code", "codeop", "pdb", "bdb", "cmd", "doctest", "timeit", "trace"), "runs Python source"),
    **dict.fromkeys(("profile", "cProfile", "pstats", "idlelib", "lib2to3", "_pyrepl", "test"), "runs Python source"),
    **dict.fromkeys(("threading", "_thread", "py_compile", "compileall"), "runs what it is given"),
    **dict.fromkeys(("_interpreters", "_xxsubinterpreters", "concurrent", "asyncio", "sched"), "runs what it is given"),
    **dict.fromkeys(("pip", "ensurepip", "venv", "setuptools", "distutils", "pkg_resources"), "installs packages"),
    **dict.fromkeys(
        ("pickle", "_pickle", "cPickle", "marshal", "dill", "cloudpickle", "shelve"), "loads another pickle"
    ),
    **dict.fromkeys(("ctypes", "_ctypes", "cffi", "_cffi_backend"), "reaches raw memory and native code"),
    **dict.fromkeys(
        ("socket", "_socket", "ssl", "_ssl", "urllib", "urllib2", "http", "httplib"), "talks to the network"
    ),
    **dict.fromkeys(
        ("ftplib", "smtplib", "poplib", "imaplib", "nntplib", "telnetlib", "xmlrpc"), "talks to the network"
    ),
    **dict.fromkeys(("requests", "aiohttp", "httpx", "webbrowser", "socketserver", "select"), "talks to the network"),
    **dict.fromkeys(
        ("shutil", "tempfile", "glob", "fileinput", "linecache", "sqlite3", "dbm"), "reads or writes files"
    ),
    **dict.fromkeys(
        ("_osx_support", "_aix_support", "platform", "sysconfig", "ctypes.util"), "runs commands of the system"
    ),
    **dict.fromkeys(("pydoc", "pyclbr", "antigravity", "turtle", "tkinter", "this"), "imports or runs modules"),
}
_DANGEROUS_NAMES: dict[str, str] = {
    "builtins.getattr": "reaches any attribute by name",
    "codecs.open": "opens files",
    "copyreg.__reduce_ex__": "calls what it is given",
    "functools.reduce": "calls what it is given",
    "io.FileIO": "opens files",
    "io.open": "opens files",
    "io.open_code": "opens files",
    "_io.FileIO": "opens files",
    "_io.open": "opens files",
    "joblib.load": "loads another pickle",
    "joblib.numpy_pickle.load": "loads another pickle",
    "logging.FileHandler": "opens files",
    "multiprocessing.reduction.ForkingPickler.loads": "loads another pickle",
    "logging.config.dictConfig": "imports and calls what it is given",
    "logging.config.fileConfig": "runs Python source",
    "numpy.load": "loads another pickle",
    "numpy.fromfile": "opens files",
    "numpy.memmap": "opens files",
    "numpy.save": "writes files",
    "numpy.lib.npyio.load": "loads another pickle",
    "numpy.testing._private.utils.runstring": "runs Python source",
    "operator.attrgetter": "reaches any attribute by name",
    "operator.methodcaller": "calls any method by name",
    "operator.call": "calls what it is given",
    "_operator.attrgetter": "reaches any attribute by name",
    "_operator.methodcaller": "calls any method by name",
    "_operator.call": "calls what it is given",
    "pandas.read_pickle": "loads another pickle",
    "pandas.io.pickle.read_pickle": "loads another pickle",
    "torch.load": "loads another checkpoint",
    "torch.serialization.load": "loads another checkpoint",
    "torch.save": "writes files",
    "torch.serialization.save": "writes files",
    "torch.storage._load_from_bytes": "loads another checkpoint, held inside this one, with every check off",
    "torch.jit.load": "loads a program",
    "torch.compile": "compiles what it is given",
    "torch.from_file": "opens files",
    "types.CodeType": "makes code",
    "types.FunctionType": "makes functions out of code",
    "types.LambdaType": "makes functions out of code",
    "types.MethodType": "binds functions to objects",
    "types.ModuleType": "makes modules",
    "uuid._get_command_stdout": "runs commands of the system",
    "weakref.finalize": "calls what it is given",
}
_DANGEROUS_PREFIXES: tuple[tuple[str, str], ...] = (
    ("numpy.f2py.", "runs Python source"),
    ("numpy.testing.", "runs what it is given"),
    ("numpy.distutils.", "runs commands of the system"),
    ("torch._dynamo.", "compiles or evaluates source"),
    ("torch._inductor.", "compiles or evaluates source"),
    ("torch._jit_internal.", "compiles or evaluates source"),
    ("torch.fx.experimental.symbolic_shapes.", "evaluates source"),
    ("torch.hub.", "downloads and runs code"),
    ("torch.jit.unsupported_tensor_ops.", "evaluates source"),
    ("torch.utils._config_module.", "loads another pickle"),
    ("torch.utils.bottleneck.", "runs Python source"),
    ("torch.utils.collect_env.", "runs commands of the system"),
    ("torch.utils.cpp_extension.", "compiles and loads native code"),
    ("torch.utils.data.datapipes.", "loads or opens what it is given"),
    ("torch.distributed.elastic.", "starts processes"),
    ("torch.distributed.rpc.", "calls functions on other machines"),
    ("torch.multiprocessing.", "starts processes"),
    ("torch.package.", "loads code from a package"),
    ("joblib.externals.", "loads another pickle"),
)

# Modules that are never the name of a class or function. Found as an attribute of another module, which imported them
# for itself, they are reached all the same: `torch.serialization.os`.
_NEVER_ATTRIBUTES = frozenset(
    {
        *("os", "posix", "nt", "sys", "subprocess", "builtins", "__builtins__", "importlib", "pty", "socket", "shutil"),
        *("ctypes", "runpy", "pickle", "cPickle", "_pickle", "marshal", "multiprocessing", "imp"),
        *("pkgutil", "webbrowser"),
        *("urllib", "requests", "tempfile", "codeop", "pdb"),
    }
)

# Single files of the standard library: somebody's own package may have the same name, and then has modules inside.
_SINGLE_FILES = frozenset(
    {
        *("bdb", "cmd", "code", "codeop", "commands", "doctest", "fileinput", "gc", "glob", "imp", "linecache", "pdb"),
        *("platform", "profile", "pstats", "runpy", "sched", "select", "shelve", "shutil", "signal", "site", "socket"),
        *("socketserver", "tempfile", "this", "timeit", "trace", "turtle"),
    }
)
_STDLIB_TESTS = (
    "test.support",
    "test.libregrtest",
    "test.regrtest",
    "test.test_",
    "test._test",
    "test.autotest",
    "test.pythoninfo",
)

_BUILTIN_TYPES = frozenset(name for name in _HARMLESS if name.startswith("builtins.")) | {
    *("builtins.bytearray", "builtins.complex", "builtins.set", "builtins.type"),
    # functions that only look at what they are given
    *(
        f"builtins.{name}"
        for name in ("abs", "all", "any", "bin", "callable", "chr", "divmod", "enumerate", "hash", "hex")
    ),
    *(f"builtins.{name}" for name in ("isinstance", "issubclass", "len", "max", "min", "oct", "ord", "pow", "repr")),
    *(f"builtins.{name}" for name in ("reversed", "round", "sorted", "sum", "zip")),
}


def canonical(module: str, name: str) -> tuple[str, str]:
    """The name a Python 3 loader ends up at: Python 2 spellings translated, ``torch.tensor`` as ``torch._tensor``.

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
    """The name ``weights_only`` looks up: it translates fewer of Python 2's names than Python does.

    >>> torch_spelling("__builtin__", "set"), torch_spelling("exceptions", "ValueError")
    ('builtins.set', 'exceptions.ValueError')
    """
    if (module, name) in NAME_MAPPING and (module in _TORCH_RENAMES or name == "StandardError"):
        module, name = NAME_MAPPING[module, name]
    elif module in _TORCH_MOVES:
        module = IMPORT_MAPPING[module]
    return f"{module}.{name}"


# torch/_utils.py, IMPORT_MAPPING and NAME_MAPPING, 2.13.0
_TORCH_RENAMES = frozenset({"__builtin__", "itertools", "UserDict", "UserList", "UserString"})
_TORCH_MOVES = frozenset(
    {
        *("__builtin__", "copy_reg", "Queue", "repr", "_abcoll", "UserDict", "UserList", "UserString", "whichdb"),
        *("StringIO", "cStringIO"),
    }
)


def is_dangerous(module: str, name: str) -> str:
    """Why a name is on the list that nothing excuses, or an empty text."""
    return _listed(module, name) or _reached(module, name.split("."))


def _listed(module: str, name: str) -> str:
    """Why a name is dangerous as it stands."""
    full = f"{module}.{name}"
    parts = name.split(".")
    if full in _DANGEROUS_NAMES:
        return _DANGEROUS_NAMES[full]
    if _is_dangerous_package(module):
        return _DANGEROUS_PACKAGES[module.partition(".")[0]]
    if module == "builtins" and full not in _BUILTIN_TYPES and not _is_exception(name):
        return "a built-in function"
    if any(part.startswith("__") and part.endswith("__") for part in parts) and len(parts) > 1:
        return "walks through the inside of an object"
    return next((why for prefix, why in _DANGEROUS_PREFIXES if full.startswith(prefix)), "")


def _reached(module: str, parts: list[str]) -> str:
    """Why a name that passes through a module is dangerous: because of where it ends, as far as that can be told.

    ``random`` has the module ``os`` as ``_os``. A pickler writes dots for what is in a class, and for nothing else.
    """
    if ".six.moves." in f".{module}." or len(parts) > _MAX_NESTED:  # six.moves has modules of the standard library
        return _REACHES
    never = [at for at, part in enumerate(parts) if not _NEVER_ATTRIBUTES.isdisjoint((part, part.lstrip("_")))]
    modules = sorted({*never, *(at for at, part in enumerate(parts[:-1]) if not _is_class(part))})
    if not modules or (not never and f"{module}.{'.'.join(parts)}" in {*TORCH_DEFAULT, *_HARMLESS}):
        return ""
    aliases = ((parts[at].lstrip("_"), ".".join(parts[at + 1 :])) for at in modules)
    ends = next((why for alias, rest in aliases if alias in _KNOWN and rest and (why := _listed(alias, rest))), "")
    return ends or (_REACHES if never or module.partition(".")[0] in _KNOWN else "")


_REACHES = "reaches another module through this one"
_MAX_NESTED = 100  # no class is inside so many others, and a file can have a name of a hundred million dots
_KNOWN = sys.stdlib_module_names | {"torch", "numpy", "joblib", "pandas", "dill", "cloudpickle", "requests"}
"""Packages of which it is known that their classes are written as classes are, and their modules as modules."""

_CAPITAL_MODULES = frozenset({"ET", "F", "N", "NX", "T", "TF", "_C", "_Reduction", "_VF"})
"""Modules with capital letters, and names under which others have modules: a class is hardly called so."""


def _is_class(part: str) -> bool:
    """Whether something has the name of a class."""
    return part.lstrip("_")[:1].isupper() and part not in _CAPITAL_MODULES


def is_class_path(name: str) -> bool:
    """Whether a name is that of something in a module, or in a class there: then all before its last dot are classes.

    >>> is_class_path("Net"), is_class_path("Net.Block"), is_class_path("_os.system")
    (True, True, False)
    """
    return all(map(_is_class, name.split(".")[:-1]))


def _is_dangerous_package(module: str) -> bool:
    package, dot, _ = module.partition(".")
    if package == "test":
        return not dot or module.startswith(_STDLIB_TESTS)
    return package in _DANGEROUS_PACKAGES and not (dot and package in _SINGLE_FILES)


def is_loader(module: str, name: str) -> bool:
    """Whether a name loads another pickle or checkpoint, out of bytes that may stand in this one."""
    return is_dangerous(module, name).startswith("loads another")


def _is_exception(name: str) -> bool:
    return name.endswith(("Error", "Exception", "Warning")) or name in (
        "KeyboardInterrupt",
        "StopIteration",
        "SystemExit",
    )


def classify(module: str, name: str) -> tuple[str, str]:
    """Verdict and purpose of a canonical name: ``data``, ``harmless``, ``unknown`` or ``dangerous``.

    >>> classify("os", "getcwd")
    ('dangerous', 'reaches the operating system')
    """
    full = f"{module}.{name}"
    if full in TORCH_DEFAULT and "." not in name:
        return "data", purpose_of(full)
    if full in _HARMLESS and "." not in name:
        return "harmless", _HARMLESS[full]
    if danger := is_dangerous(module, name):
        return "dangerous", danger
    return "unknown", purpose_of(full)


def purpose_of(full: str) -> str:
    """What a name is for, in a phrase."""
    if full in _PURPOSES:
        return _PURPOSES[full]
    for names, text in (
        (_DTYPE_NAMES, "a dtype"),
        (_SCHEME_NAMES, "a quantisation scheme"),
        (_REBUILD_NAMES, "rebuilds a tensor"),
        (_STORAGE_NAMES, "the dtype of a storage"),
        (_TENSOR_CLASSES, "a tensor class"),
    ):
        if full in names:
            return text
    return next((text for prefix, text in _FAMILIES if full.startswith(prefix)), "not known to transload")
