"""What is known of the names a checkpoint can ask a loader to import.

Three lists decide. ``TORCH_DEFAULT`` is what ``torch.load(weights_only=True)`` lets through in torch 2.13; only these
can be part of a file that is nothing but data, and only in the shapes that ``judge.safety`` allows. ``_HARMLESS`` are
common names outside that list. The dangerous ones run code, read files, or reach further names. Everything else is
unknown, and unknown is never safe: a name that begins with ``torch.`` or ``numpy.`` earns no trust, since both packages
contain functions that evaluate text.
"""

from __future__ import annotations

import sys
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING

from transload.dtypes import ITEMSIZE, QUANTIZED, STORAGES


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


def _each(groups: dict[str, str]) -> dict[str, str]:
    """A table by name, in order, from one by what is said of the names."""
    return {name: said for said, names in groups.items() for name in names.split()}


_REBUILD = "torch._utils._rebuild_"
_NESTED = "torch.nested._internal.nested_tensor"
_STORAGES = [name for name, dtype in STORAGES.items() if dtype not in QUANTIZED and "Untyped" not in name]
_TENSORS = [name.replace("Storage", "Tensor") for name in _STORAGES if not name.startswith("Complex")]

# torch/_weights_only_unpickler.py, _get_allowed_globals(), 2.13.0: 144 names, and four that `import torch` registers
# beside them.
_DATA = _each(
    {
        "bytes, written as text": "_codecs.encode",
        "a byte array": "builtins.bytearray",
        "a complex number": "builtins.complex",
        "a set": "builtins.set",
        "an ordered dictionary, as state_dict() returns": "collections.OrderedDict",
        "a dictionary of counts": "collections.Counter",
        "a shape": "torch.Size",
        "a device; map_location does not move it": "torch.device",
        "a parameter": "torch.nn.parameter.Parameter",
        "the layout of a sparse tensor": "torch.serialization._get_layout",
        "how a distributed tensor lies on its devices": "torch.distributed._mesh_layout._FlatLayout "
        "torch.distributed._mesh_layout._MeshLayout",
        "a nested (jagged) tensor": f"{_NESTED}.NestedTensor",
        "rebuilds a nested (jagged) tensor": f"{_NESTED}._rebuild_njt",
        "rebuilds a tensor": f"{_REBUILD}tensor {_REBUILD}tensor_v2 {_REBUILD}tensor_v3 {_REBUILD}parameter "
        f"{_REBUILD}parameter_with_state {_REBUILD}qtensor {_REBUILD}sparse_tensor {_REBUILD}nested_tensor "
        f"{_REBUILD}meta_tensor_no_storage {_REBUILD}wrapper_subclass {_REBUILD}device_tensor_from_numpy "
        f"{_REBUILD}device_tensor_from_cpu_tensor torch._tensor._rebuild_from_type_v2",
        "a quantisation scheme": "torch.per_tensor_affine torch.per_channel_affine torch.per_tensor_symmetric "
        "torch.per_channel_symmetric torch.per_channel_affine_float_qparams",
        "a dtype": " ".join(f"torch.{name}" for name in ITEMSIZE if name != "bcomplex32"),  # which is newer
        "the dtype of a storage": " ".join(
            [
                *(f"torch.{name}" for name in STORAGES if "Untyped" not in name),
                *(f"torch.cuda.{name}" for name in _STORAGES),
                "torch.storage.TypedStorage torch.storage.UntypedStorage",
            ]
        ),
        "a tensor class": " ".join(
            [
                "torch.Tensor",
                *(f"{module}.{name}" for module in ("torch", "torch.cuda") for name in _TENSORS),
                *(f"torch{cuda}.sparse.{name}" for cuda in ("", ".cuda") for name in _TENSORS if name != "BoolTensor"),
            ]
        ),
    }
)
TORCH_DEFAULT = frozenset(_DATA)

_HARMLESS = _each(
    {
        "parsed command-line arguments": "argparse.Namespace",
        "a dictionary": "builtins.dict",
        "a number": "builtins.float builtins.int",
        "a frozen set": "builtins.frozenset",
        "a list": "builtins.list",
        "a plain object": "builtins.object",
        "a range of numbers": "builtins.range",
        "a slice": "builtins.slice",
        "text": "builtins.str",
        "a tuple": "builtins.tuple",
        "bytes": "builtins.bytes",
        "true or false": "builtins.bool",
        "the constant ...": "builtins.Ellipsis",
        "a constant": "builtins.NotImplemented",
        "a dictionary with a default": "collections.defaultdict",
        "a queue": "collections.deque",
        "makes an object of a class named beside it": "copyreg.__newobj__ copyreg._reconstructor",
        "a date": "datetime.date",
        "a date and time": "datetime.datetime",
        "a time of day": "datetime.time",
        "a span of time": "datetime.timedelta",
        "a time zone": "datetime.timezone",
        "a decimal number": "decimal.Decimal",
        "a fraction": "fractions.Fraction",
        "the type of a numpy array": "numpy.dtype",
        "a numpy array": "numpy.ndarray",
        "rebuilds a numpy array": "numpy._core.multiarray._reconstruct numpy._core.numeric._frombuffer "
        "numpy.core.multiarray._reconstruct numpy.core.numeric._frombuffer",
        "a numpy number": "numpy._core.multiarray.scalar numpy.core.multiarray.scalar",
        "a file path": "pathlib.Path pathlib.PosixPath pathlib.PurePosixPath pathlib.PureWindowsPath "
        "pathlib.WindowsPath pathlib._local.PosixPath pathlib._local.WindowsPath",
        "a random number generator": "torch._C.Generator",
        "the bounds of a size, in a nested (jagged) tensor": "torch._dynamo.decorators._DimRange",
        "the torch release that saved the file": "torch.torch_version.TorchVersion",
        "an object with named values": "types.SimpleNamespace",
        "the parts of an address": "urllib.parse.ParseResult urllib.parse.SplitResult",
        "an identifier": "uuid.UUID",
    }
)

# The first prefix that matches says what kind of thing an unknown name is.
_FAMILIES = _each(
    {
        "something defined in the script that saved the file; it must exist under the same name to be loaded": (
            "__main__. __mp_main__."
        ),
        "a type of the TorchScript program in this file": "__torch__.",
        "part of a TorchScript module": "torch.jit",
        "a class of torch.nn: the file holds a whole module, not only its weights": "torch.nn.",
        "a class of torch.optim: the file holds a whole optimizer or scheduler": "torch.optim.",
        "the index of a distributed checkpoint": "torch.distributed.checkpoint.",
        "a distributed tensor or its mesh": "torch.distributed",
        "a traced graph": "torch.fx",
        "something of torch that torch.load refuses by default": "torch.",
        "a quantized tensor of torchao": "torchao.",
        "a class of torchvision: the file holds a whole module": "torchvision.",
        "something of numpy": "numpy.",
        "a class of Lightning": "pytorch_lightning. lightning. lightning_fabric.",
        "a configuration of OmegaConf": "omegaconf.",
        "a class of transformers": "transformers.",
        "a class of DeepSpeed": "deepspeed.",
        "a class of Megatron": "megatron.",
        "a class of timm: the file holds a whole module": "timm.",
        "a class of ultralytics: the file holds a whole model": "ultralytics.",
        "an enumeration": "enum.",
    }
)

# The tables below only choose the word "dangerous" over "unknown"; neither is ever safe. A whole package is listed by
# its first component, a single function in full, a part of a package by its prefix.
_DANGEROUS_PACKAGES = _each(
    {
        "reaches the operating system": "os posix nt posixpath ntpath commands popen2",
        "starts processes": "subprocess _posixsubprocess _winapi pty multiprocessing",
        "changes or searches the running interpreter": "sys gc signal atexit site",
        "imports or runs modules": "importlib imp runpy pkgutil zipimport _imp modulefinder pydoc pyclbr antigravity "
        "turtle tkinter this",
        "runs Python source": "code codeop pdb bdb cmd doctest timeit trace profile cProfile pstats idlelib lib2to3 "
        "_pyrepl test",
        "runs what it is given": "threading _thread py_compile compileall _interpreters _xxsubinterpreters concurrent "
        "asyncio sched",
        "installs packages": "pip ensurepip venv setuptools distutils pkg_resources",
        "loads another pickle": "pickle _pickle cPickle marshal dill cloudpickle shelve",
        "reaches raw memory and native code": "ctypes _ctypes cffi _cffi_backend",
        "talks to the network": "socket _socket ssl _ssl urllib urllib2 http httplib ftplib smtplib poplib imaplib "
        "nntplib telnetlib xmlrpc requests aiohttp httpx webbrowser socketserver select",
        "reads or writes files": "shutil tempfile glob fileinput linecache sqlite3 dbm",
        "runs commands of the system": "_osx_support _aix_support platform sysconfig",
    }
)
_DANGEROUS_NAMES = _each(
    {
        "reaches any attribute by name": "builtins.getattr operator.attrgetter _operator.attrgetter",
        "calls any method by name": "operator.methodcaller _operator.methodcaller",
        "calls what it is given": "copyreg.__reduce_ex__ functools.reduce operator.call _operator.call "
        "weakref.finalize",
        "opens files": "codecs.open io.FileIO io.open io.open_code _io.FileIO _io.open logging.FileHandler "
        "numpy.fromfile numpy.memmap torch.from_file",
        "writes files": "numpy.save torch.save torch.serialization.save",
        "loads another pickle": "joblib.load joblib.numpy_pickle.load numpy.load numpy.lib.npyio.load "
        "pandas.read_pickle pandas.io.pickle.read_pickle multiprocessing.reduction.ForkingPickler.loads",
        "loads another checkpoint": "torch.load torch.serialization.load",
        "loads another checkpoint, held inside this one, with every check off": "torch.storage._load_from_bytes",
        "loads a program": "torch.jit.load",
        "compiles what it is given": "torch.compile",
        "imports and calls what it is given": "logging.config.dictConfig",
        "runs Python source": "logging.config.fileConfig numpy.testing._private.utils.runstring",
        "makes code": "types.CodeType",
        "makes functions out of code": "types.FunctionType types.LambdaType",
        "binds functions to objects": "types.MethodType",
        "makes modules": "types.ModuleType",
        "runs commands of the system": "uuid._get_command_stdout",
    }
)
_DANGEROUS_PREFIXES = _each(
    {
        "runs Python source": "numpy.f2py. torch.utils.bottleneck.",
        "runs what it is given": "numpy.testing.",
        "runs commands of the system": "numpy.distutils. torch.utils.collect_env.",
        "compiles or evaluates source": "torch._dynamo. torch._inductor. torch._jit_internal.",
        "evaluates source": "torch.fx.experimental.symbolic_shapes. torch.jit.unsupported_tensor_ops.",
        "downloads and runs code": "torch.hub.",
        "loads another pickle": "torch.utils._config_module. joblib.externals.",
        "compiles and loads native code": "torch.utils.cpp_extension.",
        "loads or opens what it is given": "torch.utils.data.datapipes.",
        "starts processes": "torch.distributed.elastic. torch.multiprocessing.",
        "calls functions on other machines": "torch.distributed.rpc.",
        "loads code from a package": "torch.package.",
    }
)

# Built-in types, and functions that only look at what they are given.
_PLAIN_BUILTINS = _names(
    "Ellipsis NotImplemented bool bytearray bytes complex dict float frozenset int list object range set slice str "
    "tuple type abs all any bin callable chr divmod enumerate hash hex isinstance issubclass len max min oct ord pow "
    "repr reversed round sorted sum zip KeyboardInterrupt StopIteration SystemExit"
)

# Modules that are never the name of a class or function. Found as an attribute of another module, which imported them
# for itself, they are reached all the same: `torch.serialization.os`.
_NEVER_ATTRIBUTES = _names(
    "os posix nt sys subprocess builtins __builtins__ importlib pty socket shutil ctypes runpy pickle cPickle _pickle "
    "marshal multiprocessing imp pkgutil webbrowser urllib requests tempfile codeop pdb"
)

# Single files of the standard library: somebody's own package may have the same name, and then has modules inside.
_SINGLE_FILES = _names(
    "bdb cmd code codeop commands doctest fileinput gc glob imp linecache pdb platform profile pstats runpy sched "
    "select shelve shutil signal site socket socketserver tempfile this timeit trace turtle"
)
_STDLIB_TESTS = tuple(
    f"test.{name}" for name in ("support", "libregrtest", "regrtest", "test_", "_test", "autotest", "pythoninfo")
)

# Packages of which it is known that their classes are written as classes are, and their modules as modules.
_KNOWN = sys.stdlib_module_names | _names("torch numpy joblib pandas dill cloudpickle requests")
# Modules with capital letters, and names under which others have modules: a class is hardly called so.
_CAPITAL_MODULES = _names("ET F N NX T TF _C _Reduction _VF")
_REACHES = "reaches another module through this one"
_MAX_NESTED = 100  # no class is inside so many others, and a file can have a name of a hundred million dots

# torch/_utils.py, IMPORT_MAPPING and NAME_MAPPING, 2.13.0
_TORCH_RENAMES = _names("__builtin__ itertools UserDict UserList UserString")
_TORCH_MOVES = _names("__builtin__ copy_reg Queue repr _abcoll UserDict UserList UserString whichdb StringIO cStringIO")


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
    family = next((said for prefix, said in _FAMILIES.items() if full.startswith(prefix)), "not known to transload")
    return "unknown", _DATA.get(full, family)


def is_dangerous(module: str, name: str) -> str:
    """Why a name is on the list that nothing excuses, or an empty text.

    A name that passes through a module is judged by where it ends, as far as that can be told: ``random`` has the
    module ``os`` as ``_os``. A pickler writes dots for what is in a class, and for nothing else.
    """
    if danger := _listed(module, name):
        return danger
    parts = name.split(".")
    if ".six.moves." in f".{module}." or len(parts) > _MAX_NESTED:  # six.moves has modules of the standard library
        return _REACHES
    never = [at for at, part in enumerate(parts) if not _NEVER_ATTRIBUTES.isdisjoint((part, part.lstrip("_")))]
    modules = sorted({*never, *(at for at, part in enumerate(parts[:-1]) if not _is_class(part))})
    full = f"{module}.{name}"
    if not modules or (not never and (full in _DATA or full in _HARMLESS)):
        return ""
    for at in modules:
        alias, rest = parts[at].lstrip("_"), ".".join(parts[at + 1 :])
        if alias in _KNOWN and rest and (danger := _listed(alias, rest)):
            return danger
    return _REACHES if never or module.partition(".")[0] in _KNOWN else ""


def _listed(module: str, name: str) -> str:
    """Why a name is dangerous as it stands."""
    full = f"{module}.{name}"
    if full in _DANGEROUS_NAMES:
        return _DANGEROUS_NAMES[full]
    package, dot, _ = module.partition(".")
    if package == "test":
        listed = not dot or module.startswith(_STDLIB_TESTS)
    else:
        listed = package in _DANGEROUS_PACKAGES and not (dot and package in _SINGLE_FILES)
    if listed:
        return _DANGEROUS_PACKAGES[package]
    if module == "builtins" and name not in _PLAIN_BUILTINS and not name.endswith(("Error", "Exception", "Warning")):
        return "a built-in function"
    if "." in name and any(part.startswith("__") and part.endswith("__") for part in name.split(".")):
        return "walks through the inside of an object"
    return next((danger for prefix, danger in _DANGEROUS_PREFIXES.items() if full.startswith(prefix)), "")


def _is_class(part: str) -> bool:
    """Whether something has the name of a class."""
    return part.lstrip("_")[:1].isupper() and part not in _CAPITAL_MODULES


def is_class_path(name: str) -> bool:
    """Whether a name is that of something in a module, or in a class there: then all before its last dot are classes.

    >>> is_class_path("Net"), is_class_path("Net.Block"), is_class_path("_os.system")
    (True, True, False)
    """
    return all(map(_is_class, name.split(".")[:-1]))
