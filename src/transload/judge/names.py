"""What is known about the names that a checkpoint can make a loader import.

Three lists decide. ``TORCH_DEFAULT`` is what ``torch.load(weights_only=True)`` allows in torch 2.13; only these can be
in a file that is nothing but data, and only in calls that ``judge.safety`` accepts. ``_HARMLESS`` are common names
outside that list. Dangerous names run code, read files, or reach further names: by the rules here, and by the tables of
``judge.callables``. Everything else is unknown, and unknown is never safe.

A line that allows an unknown name is printed only for what may be a part of a model (``can_be_allowed``): a class of a
third-party module, and of the standard library, torch and numpy only what is known to be data. A name does not become
safe by beginning with ``torch.`` or ``numpy.``, since both packages contain functions that evaluate text.
"""

from __future__ import annotations

import sys
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from functools import cache

from transload.dtypes import ITEMSIZE, QUANTIZED, STORAGES
from transload.judge.ordinary import PURPOSES


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


def _each(groups: dict[str, str]) -> dict[str, str]:
    """Turn a table of names by description into one of descriptions by name."""
    return {name: said for said, names in groups.items() for name in names.split()}


_REBUILD = "torch._utils._rebuild_"
_NESTED = "torch.nested._internal.nested_tensor"
_STORAGES = [name for name, dtype in STORAGES.items() if dtype not in QUANTIZED and "Untyped" not in name]
_TENSORS = [name.replace("Storage", "Tensor") for name in _STORAGES if not name.startswith("Complex")]

# torch/_weights_only_unpickler.py, _get_allowed_globals(), 2.13.0: 144 names, and four that `import torch` adds.
_DATA = {".".join(key): said for key, said in PURPOSES.items()} | _each(
    {
        "bytes, written as text": "_codecs.encode",
        "a byte array": "builtins.bytearray",
        "a complex number": "builtins.complex",
        "a set": "builtins.set",
        "a dictionary of counts": "collections.Counter",
        "a shape": "torch.Size",
        "a device; map_location does not move it": "torch.device",
        "a parameter": "torch.nn.parameter.Parameter",
        "the layout of a sparse tensor": "torch.serialization._get_layout",
        "how a distributed tensor is divided among devices": "torch.distributed._mesh_layout._FlatLayout "
        "torch.distributed._mesh_layout._MeshLayout",
        "a nested (jagged) tensor": f"{_NESTED}.NestedTensor",
        "rebuilds a nested (jagged) tensor": f"{_NESTED}._rebuild_njt",
        "rebuilds a tensor": f"{_REBUILD}tensor {_REBUILD}tensor_v3 "
        f"{_REBUILD}parameter_with_state {_REBUILD}qtensor {_REBUILD}sparse_tensor {_REBUILD}nested_tensor "
        f"{_REBUILD}meta_tensor_no_storage {_REBUILD}wrapper_subclass {_REBUILD}device_tensor_from_numpy "
        f"{_REBUILD}device_tensor_from_cpu_tensor torch._tensor._rebuild_from_type_v2",
        "a quantisation scheme": "torch.per_tensor_affine torch.per_channel_affine torch.per_tensor_symmetric "
        "torch.per_channel_symmetric torch.per_channel_affine_float_qparams",
        "a dtype": " ".join(f"torch.{name}" for name in ITEMSIZE if name != "bcomplex32"),  # which is newer
        "the dtype of a storage": " ".join(
            [
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

PLAIN_VALUES = _each(
    {
        "parsed command-line arguments": "argparse.Namespace",
        "a range of numbers": "builtins.range",
        "a slice": "builtins.slice",
        "a queue": "collections.deque",
        "a dictionary of several": "collections.ChainMap",
        "a dictionary, list or text in an object": "collections.UserDict collections.UserList collections.UserString",
        "a date": "datetime.date",
        "a date and time": "datetime.datetime",
        "a time of day": "datetime.time",
        "a span of time": "datetime.timedelta",
        "a time zone": "datetime.timezone zoneinfo.ZoneInfo zoneinfo.ZoneInfo._unpickle",
        "a decimal number": "decimal.Decimal",
        "a fraction": "fractions.Fraction",
        "the type of a numpy array": "numpy.dtype",
        "a numpy array": "numpy.ndarray",
        "rebuilds a numpy array": "numpy._core.multiarray._reconstruct numpy._core.numeric._frombuffer "
        "numpy.core.multiarray._reconstruct numpy.core.numeric._frombuffer",
        "a numpy number": "numpy._core.multiarray.scalar numpy.core.multiarray.scalar",
        "a file path": " ".join(
            f"{module}.{name}"
            for module in ("pathlib", "pathlib._local")  # where Python 3.13 has them
            for name in ("Path", "PosixPath", "PurePosixPath", "PureWindowsPath", "WindowsPath")
        ),
        "an object with named values": "types.SimpleNamespace",
        "an identifier": "uuid.UUID",
    }
)
"""Values that training runs save with their weights: ``transload.load`` makes them, torch refuses them."""

ALSO_DATA = frozenset(
    {
        "torch._tensor._rebuild_from_type",
        "torch._utils._rebuild_sparse_csr_tensor",
        "torch._utils._rebuild_xla_tensor",
        "torch._utils._rebuild_mlc_tensor",
        "torch.torch_version.TorchVersion",
        "collections.defaultdict",
        *(
            f"builtins.{name}"
            for name in ("bytes", "frozenset", "bool", "dict", "float", "int", "list", "str", "tuple")
        ),
    }
)
"""What torch refuses without need: today's functions under older names, and values for which later protocols of pickle
need no name. The plain classes are default factories of a ``defaultdict``."""

_HARMLESS = PLAIN_VALUES | _each(
    {
        "a dictionary": "builtins.dict",
        "a number": "builtins.float builtins.int",
        "a frozen set": "builtins.frozenset",
        "a list": "builtins.list",
        "a plain object": "builtins.object",
        "text": "builtins.str",
        "a tuple": "builtins.tuple",
        "bytes": "builtins.bytes",
        "true or false": "builtins.bool",
        "the constant ...": "builtins.Ellipsis",
        "a constant": "builtins.NotImplemented",
        "a dictionary with a default": "collections.defaultdict",
        "makes an object of a class named beside it": "copyreg.__newobj__ copyreg._reconstructor",
        "a random number generator": "torch._C.Generator",
        "the bounds of a size, in a nested (jagged) tensor": "torch._dynamo.decorators._DimRange",
        "the torch release that saved the file": "torch.torch_version.TorchVersion",
        "the parts of an address": "urllib.parse.ParseResult urllib.parse.SplitResult",
    }
)

# The first prefix that matches describes an unknown name.
_FAMILIES = _each(
    {
        "something defined in the script that saved the file; it must exist under the same name to be loaded": (
            "__main__. __mp_main__."
        ),
        "a type of the TorchScript program in this file": "__torch__.",
        "part of a TorchScript module": "torch.jit",
        "a class of torch.nn: the file contains a whole module, not only its weights": "torch.nn.",
        "a class of torch.optim: the file contains a whole optimizer or scheduler": "torch.optim.",
        "the index of a distributed checkpoint": "torch.distributed.checkpoint.",
        "a distributed tensor or its mesh": "torch.distributed",
        "a traced graph": "torch.fx",
        "something of torch that torch.load refuses by default": "torch.",
        "a quantized tensor of torchao": "torchao.",
        "a class of torchvision: the file contains a whole module": "torchvision.",
        "something of numpy": "numpy.",
        "a class of Lightning": "pytorch_lightning. lightning. lightning_fabric.",
        "a configuration of OmegaConf": "omegaconf.",
        "a class of transformers": "transformers.",
        "a class of DeepSpeed": "deepspeed.",
        "a class of Megatron": "megatron.",
        "a class of timm: the file contains a whole module": "timm.",
        "a class of ultralytics: the file contains a whole model": "ultralytics.",
        "an enumeration": "enum.",
        "a dictionary with attributes": "addict. box. easydict. ml_collections. munch. yacs.",
    }
)

# These tables only distinguish "dangerous" from "unknown"; neither is ever safe. A whole package is listed by its first
# component, a single function in full, a part of a package by its prefix.
_DANGEROUS_PACKAGES = _each(
    {
        "reaches the operating system": "os posix nt posixpath ntpath commands popen2",
        "starts processes": "subprocess _posixsubprocess _winapi pty multiprocessing execnet paramiko pexpect plumbum "
        "ptyprocess",
        "changes or searches the running interpreter": "sys gc signal atexit site",
        "imports or runs modules": "importlib _frozen_importlib _frozen_importlib_external imp runpy pkgutil zipimport "
        "_imp modulefinder pydoc pyclbr antigravity turtle turtledemo tkinter _tkinter this zipapp",
        "runs Python source": "code codeop pdb bdb cmd doctest timeit trace profile cProfile pstats idlelib lib2to3 "
        "_pyrepl rlcompleter test unittest _testcapi _testinternalcapi _testmultiphase",
        "runs what it is given": "threading _thread py_compile compileall _interpreters _xxsubinterpreters "
        "_xxinterpchannels _interpchannels concurrent asyncio _asyncio asyncore asynchat sched",
        "installs packages": "pip ensurepip venv setuptools distutils pkg_resources",
        "loads another pickle": "pickle _pickle cPickle marshal dill cloudpickle jsonpickle shelve",
        "reaches raw memory and native code": "ctypes _ctypes cffi _cffi_backend",
        "talks to the network": "socket _socket ssl _ssl urllib urllib2 http httplib ftplib smtplib poplib imaplib "
        "nntplib telnetlib xmlrpc requests aiohttp httpx webbrowser socketserver select smtpd wsgiref",
        "reads or writes files": "shutil tempfile glob fileinput linecache sqlite3 _sqlite3 dbm _dbm _gdbm zipfile "
        "tarfile gzip bz2 _bz2 lzma _lzma mailbox mmap _pyio genericpath fcntl nis spwd msilib winreg _winreg msvcrt "
        "_posixshmem",
        "runs commands of the system": "_osx_support _aix_support _bootsubprocess platform sysconfig pipes mailcap cgi "
        "cgitb webbrowser",
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
        "makes classes": "collections.namedtuple dataclasses.make_dataclass enum._simple_enum types.new_class",
        "makes modules": "types.ModuleType",
        "runs commands of the system": "uuid._get_command_stdout",
    }
)
_DANGEROUS_PREFIXES = _each(
    {
        "runs Python source": "numpy.f2py. torch.utils.bottleneck.",
        "runs what it is given": "numpy.testing.",
        "runs commands of the system": "numpy.distutils. torch.utils.collect_env.",
        "compiles or evaluates source": "torch._dynamo. torch._inductor. torch._jit_internal. torch._functorch.",
        "evaluates source": "torch.fx.experimental. torch.jit.unsupported_tensor_ops. torch.utils.benchmark.",
        "runs Python source that the file holds": "torch.fx.graph_module. torch.fx._lazy_graph_module. "
        "torch.fx._graph_pickler. torch.fx.GraphModule torch.fx.graph.",
        "runs what it is given, or commands of the system": "torch.testing._internal. torch._numpy.testing.",
        "downloads and runs code": "torch.hub.",
        "loads another pickle": "torch.utils._config_module. joblib.externals.",
        "compiles and loads native code": "torch.utils.cpp_extension.",
        "loads or opens what it is given": "torch.utils.data.datapipes.",
        "starts processes": "torch.distributed.elastic. torch.multiprocessing.",
        "calls functions on other machines": "torch.distributed.rpc.",
        "loads code from a package": "torch.package.",
    }
)

# Built-in types, and functions without side effects.
_PLAIN_BUILTINS = _names(
    "Ellipsis NotImplemented bool bytearray bytes complex dict float frozenset int list object range set slice str "
    "tuple type abs all any bin callable chr divmod enumerate hash hex isinstance issubclass len max min oct ord pow "
    "repr reversed round sorted sum zip KeyboardInterrupt StopIteration SystemExit"
)

# Modules that no class or function is named after. They can be reached as attributes of modules that import them:
# `torch.serialization.os`.
_NEVER_ATTRIBUTES = _names(
    "os posix nt sys subprocess builtins __builtins__ importlib pty socket shutil ctypes runpy pickle cPickle _pickle "
    "marshal multiprocessing imp pkgutil webbrowser urllib requests tempfile codeop pdb"
)

# Modules of the standard library that are single files: a dotted name below one belongs to another package.
_SINGLE_FILES = _names(
    "bdb cmd code codeop commands doctest fileinput gc glob imp linecache pdb platform profile pstats runpy sched "
    "select shelve shutil signal site socket socketserver tempfile this timeit trace turtle"
)
_STDLIB_TESTS = tuple(
    f"test.{name}" for name in ("support", "libregrtest", "regrtest", "test_", "_test", "autotest", "pythoninfo")
)

# What torch.package writes for programs in a package. They run code of the package, whose verdict is "code" anyway.
_OF_PACKAGES = _names("torch.fx.graph_module.reduce_package_graph_module torch.jit._script.unpackage_script_module")

# Packages of the standard library: a dotted name below any other of its modules belongs to another package.
_STDLIB_PACKAGES = _names(
    "asyncio collections compression concurrent ctypes curses dbm distutils email encodings ensurepip html http "
    "idlelib importlib json lib2to3 logging msilib multiprocessing os pathlib pydoc_data re sqlite3 string "
    "sysconfig tkinter tomllib turtledemo unittest urllib venv wsgiref xml xmlrpc zipfile zoneinfo _pyrepl"
)

# Libraries whose functions are not part of models. Their classes may be part of a configuration.
_LIBRARIES = _names(
    "IPython PIL _pytest absl accelerate asteval bokeh boto3 botocore bs4 celery cv2 Cython dask datasets "
    "diffusers docker docutils dotenv fabric fire flask fsspec git google gradio h5py huggingface_hub hydra "
    "hypothesis imageio invoke ipykernel jax jinja2 joblib keras lightning lightning_fabric lxml mako matplotlib "
    "mlflow mpmath msgpack nbformat networkx nltk numba numexpr omegaconf onnx onnxruntime optuna orjson paddle "
    "pandas peft plotly polars psutil py pyarrow pydantic pytest pytorch_lightning ray rich ruamel safetensors "
    "scipy seaborn sh simplejson skimage sklearn spacy sqlalchemy stable_baselines3 statsmodels streamlit sympy "
    "tables tensorboard tensorflow timm tokenizers torchaudio torchvision tornado tqdm traitlets transformers "
    "triton typer ultralytics wandb werkzeug wheel xarray xgboost yaml zarr zmq"
)
# Those of them that define models: the names of their functions are not suspicious.
_MODEL_LIBRARIES = _names(
    "accelerate datasets diffusers lightning lightning_fabric peft pytorch_lightning stable_baselines3 timm "
    "torchaudio torchvision transformers ultralytics"
)
# How the names of functions begin that read, run or fetch something.
_VERBS = (
    *("call", "check_output", "compile", "construct", "cython_inline", "decode", "download", "dump", "eval", "exec"),
    *("fetch", "from_file", "full_load", "getoutput", "hf_hub", "import", "inline", "install", "lambdify", "load"),
    *("open", "parse_expr", "popen", "query", "read", "render", "run", "safe_load", "save", "shell", "snapshot"),
    *("spawn", "sympify", "system", "to_", "unsafe_", "urlopen", "write"),
)

# Modules of torch and numpy with classes that are part of models, optimizers or data.
_CLASSES = (
    *("torch.nn.", "torch.optim.", "torch.ao.", "torch.quantization.", "torch.distributions.", "torch.nested."),
    *("torch.distributed.tensor.", "torch.distributed._tensor.", "torch.distributed.device_mesh."),
    *("torch.distributed._mesh_layout.", "torch.distributed._shard.sharded_tensor.", "torch.distributed.fsdp."),
    *("torch.distributed._shard.metadata.", "torch.distributed._shard.sharding_spec."),
    *("torch.distributed.checkpoint.metadata.", "torch.distributed.algorithms.", "torch.distributed._composable."),
    *("torch.utils.data.dataset.", "torch.utils.data.sampler.", "torch.utils.hooks.", "torch.amp.grad_scaler."),
    *("torch.cuda.amp.grad_scaler.", "torch.storage.", "torch.masked.", "torch.sparse.", "torch._subclasses."),
    *("torch.distributed._functional_collectives.", "torch.fx.immutable_collections.", "torch.utils._python_dispatch."),
    *("ipaddress.", "enum.", "numpy.dtypes.", "numpy.ma.core.", "numpy.random."),
)
# Functions that only compute.
_COMPUTES = (
    *("math.", "numpy.random._pickle.", "torch.nn.functional.", "torch.nn.init.", "torch._C._VariableFunctions."),
    *("torch._C._fft.", "torch._C._linalg.", "torch._C._nn.", "torch._C._special.", "torch._utils._rebuild_"),
    *("torch._tensor._rebuild_from_type", "timm.layers.activations.", "torchvision.ops.", "torchvision.transforms."),
    *("transformers.activations.", "transformers.modeling_rope_utils.", "ultralytics.nn.modules."),
)
_NOT_COMPUTES = _names(
    "torch.nn.functional.boolean_dispatch torch.nn.functional.handle_torch_function torch.nn.functional._overload "
    "torch.nn.functional._add_docstr torch.nn.functional._jit_unused torch.nn.init._make_deprecate"
)
# Modules that these import, which can be reached through them.
_MODULES = sys.stdlib_module_names | _names("torch np grad _VF _Reduction")
# Single names of either kind.
_PARTS = _names(
    "_io.BytesIO _io.StringIO io.BytesIO io.StringIO array.array array._array_reconstructor functools.partial "
    "logging.getLogger random.Random re._compile re.RegexFlag statistics.NormalDist string.Template types.GenericAlias "
    "types.MappingProxyType types.NoneType typing.Any typing.Optional typing.Union uuid.SafeUUID "
    "zoneinfo.ZoneInfo zoneinfo.ZoneInfo._unpickle zoneinfo._czoneinfo.ZoneInfo "
    "torch.nn.backends.thnn._get_thnn_function_backend torch.Generator torch.dtype torch.layout "
    "torch.memory_format torch.contiguous_format torch.channels_last torch.channels_last_3d torch.preserve_format "
    "torch.torch_version.TorchVersion torch.ScriptObject torch._C._VariableFunctionsClass "
    "torchvision.models.optical_flow.raft._pass_through_h"
)
_TORCH_FUNCTIONS = _names(
    "abs celu clamp cos dropout elu erf exp gelu hardshrink identity leaky_relu log log1p log_softmax maximum "
    "mean minimum mish neg prelu reciprocal relu relu_ rrelu rsqrt selu sigmoid sign silu sin softmax softplus "
    "softsign sqrt square sum tan tanh"
)
_NUMPY_SCALARS = _names(
    "bool_ bool float16 float32 float64 float128 longdouble int8 int16 int32 int64 uint8 uint16 uint32 uint64 "
    "longlong ulonglong intc uintc intp uintp complex64 complex128 complex256 clongdouble str_ bytes_ object_ "
    "void datetime64 timedelta64 number integer floating generic"
)

# Packages that follow PEP 8: a capitalized name is a class, not a module.
_KNOWN = sys.stdlib_module_names | _names("torch numpy joblib pandas dill cloudpickle requests")
# Capitalized names of modules, and aliases under which modules are imported.
_CAPITAL_MODULES = _names("ET F FPGM_pruner N NX T TF _C _Reduction _VF")
_REACHES = "reaches another module through this one"
_MAX_NESTED = 100  # classes are not nested so deep, and a file can have a name of a hundred million dots

# torch/_utils.py, IMPORT_MAPPING and NAME_MAPPING, 2.13.0
_TORCH_RENAMES = _names("__builtin__ itertools UserDict UserList UserString")
_TORCH_MOVES = _names("__builtin__ copy_reg Queue repr _abcoll UserDict UserList UserString whichdb StringIO cStringIO")


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


def can_be_allowed(module: str, name: str) -> bool:
    """Whether to print a line that makes ``torch.load`` accept a name.

    Not for what is dangerous, for what is reached through something that is not a class, or for functions of libraries.
    In the standard library, torch and numpy only for what is known to be data or a part of a model.

    >>> can_be_allowed("torch.nn.modules.linear", "Linear"), can_be_allowed("torch.hub", "load")
    (True, False)
    """
    full = f"{module}.{name}"
    if "." not in name and (full in _DATA or full in _HARMLESS):
        return True
    if not is_class_path(name) or is_dangerous(module, name):
        return False
    if _is_own(module):
        return module == "builtins" or _is_part(module, name)
    if module.partition(".")[0] in _LIBRARIES:
        last = name.rpartition(".")[2]
        return _is_class(last) or last[1:2].isupper() or _is_part(module, name)  # xLSTMBlock
    return True


def _is_own(module: str) -> bool:
    """Whether a module belongs to the standard library, to torch or to numpy."""
    package, dot, _ = module.partition(".")
    if package in ("torch", "numpy", "functorch"):
        return True
    return package in sys.stdlib_module_names and (not dot or package in _STDLIB_PACKAGES)


def _is_part(module: str, name: str) -> bool:
    """Whether a name of a known package is a part of a model, or only computes."""
    full = f"{module}.{name}"
    last = name.rpartition(".")[2]
    if full in _PARTS or (full.startswith(_COMPUTES) and full not in _NOT_COMPUTES and last not in _MODULES):
        return True
    if module.startswith("transformers.models.") and ".modeling_" in module:
        return not last.lstrip("_").startswith(_VERBS)
    if module in ("torch", "numpy"):
        return name in (_TORCH_FUNCTIONS if module == "torch" else _NUMPY_SCALARS)
    return full.startswith(_CLASSES) and _is_class(last) and not _word(module, last)


def _word(module: str, last: str) -> str:
    package = module.partition(".")[0]
    return known_words(package if package in ("torch", "numpy") else "stdlib").get(last, "")


@cache
def known_words(package: str) -> dict[str, str]:
    """The table of ``judge.callables``: why a name of the package with this last component is dangerous."""
    from transload.judge.callables import WORDS

    return _each(WORDS[package])


def is_dangerous(module: str, name: str) -> str:
    """Why a name is dangerous; empty if it is not.

    >>> is_dangerous("torch.testing", "assert_close"), is_dangerous("numpy", "fromfile")
    ('', 'opens files')
    """
    if danger := is_listed(module, name):
        return danger
    last = name.rpartition(".")[2]
    if _is_own(module):
        full = f"{module}.{name}"
        known = _is_part(module, name) or full in _OF_PACKAGES or full in _HARMLESS or full in _DATA
        return "" if known else _word(module, last)
    library = module.partition(".")[0] in _LIBRARIES - _MODEL_LIBRARIES
    return "reads, runs or fetches what it is given" if library and last.lstrip("_").startswith(_VERBS) else ""


def is_listed(module: str, name: str) -> str:
    """Why a name is dangerous by the rules of this module alone; empty if it is not.

    A name that leads through a module is judged by what it ends at, as far as that is known: ``random`` imports ``os``
    as ``_os``. A pickler writes dots only for what is nested in a class.
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
        if alias in _LIBRARIES and rest and not _is_class(parts[-1]):
            return _REACHES
    return _REACHES if never or module.partition(".")[0] in _KNOWN else ""


def _listed(module: str, name: str) -> str:
    """Why a name is dangerous without looking through modules; empty if it is not."""
    full = f"{module}.{name}"
    if full in _DANGEROUS_NAMES or full in _OF_PACKAGES:
        return _DANGEROUS_NAMES.get(full, "")
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
    """Whether a name looks like that of a class."""
    return part.lstrip("_")[:1].isupper() and part not in _CAPITAL_MODULES


def is_class_path(name: str) -> bool:
    """Whether a name is that of something in a module, or nested in classes: all before its last dot are classes.

    >>> is_class_path("Net"), is_class_path("Net.Block"), is_class_path("_os.system")
    (True, True, False)
    """
    return all(map(_is_class, name.split(".")[:-1]))
