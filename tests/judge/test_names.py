"""Names: the known ways to hide a callable from a scanner, with their advisories.

Where a row names a real function, the file calls it, but no test loads the file.
"""

from __future__ import annotations

from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from typing import TYPE_CHECKING, Protocol

import pytest
import torch
import torch._weights_only_unpickler as weights_only
from tests import forge
from tests.each import each

import transload
from transload.checkpoint import Checkpoint, GlobalUse
from transload.judge.names import TORCH_DEFAULT, canonical, classify, is_dangerous, torch_spelling

if TYPE_CHECKING:
    from tests.judge.conftest import Alone


class InspectZip(Protocol):
    def __call__(self, body: bytes, storages: dict[str, bytes] | None = None, *, protocol: int = 2) -> Checkpoint: ...


def call(module: str, name: str) -> bytes:
    """GLOBAL, no arguments, REDUCE."""
    return forge.name(module, name) + b")R"


def use_of(checkpoint: Checkpoint, full_name: str) -> GlobalUse:
    return next(use for use in checkpoint.globals if use.full_name == full_name)


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="the table is for torch 2.13")
def test_torch_default_equals_torchs_allow_list(alone: Alone) -> None:
    """Names allowed by default, and those that ``import torch`` registers beside them."""
    assert set(alone.allowed) == TORCH_DEFAULT


@pytest.mark.skipif(not hasattr(weights_only, "NAME_MAPPING"), reason="this torch has no NAME_MAPPING")
def test_torch_spelling_matches_torchs_name_mapping() -> None:
    pairs = {*NAME_MAPPING, *((module, "anything") for module in IMPORT_MAPPING), ("torch.tensor", "x"), ("a.b", "c")}
    for module, name in pairs:
        renamed = weights_only.NAME_MAPPING.get((module, name))
        expected = renamed or (weights_only.IMPORT_MAPPING.get(module, module), name)
        assert torch_spelling(module, name) == ".".join(expected)


def test_only_names_on_torchs_allow_list_are_data() -> None:
    for full in TORCH_DEFAULT:
        module, _, name = full.rpartition(".")
        assert classify(module, name)[0] == "data", full
        assert classify(module, f"{name}.x")[0] != "data"
        assert classify(f"{module}.x", name)[0] != "data"
        assert classify(module, f"{name} ")[0] != "data"


DANGEROUS_NAMES = {
    "installs packages: CVE-2025-1716": ("pip", "main"),
    "installs packages: GHSA-655q-fx9r-782v": ("pip._internal.cli.main", "main"),
    "starts a process: CVE-2025-10157": ("asyncio.unix_events", "_UnixSubprocessTransport._start"),
    "looks up names: GHSA-vvpj-8cmc-gx39": ("pkgutil", "resolve_name"),
    "looks up names: picklescan#66": ("importlib", "import_module"),
    "looks up names: picklescan#74": ("operator", "attrgetter"),
    "looks up names: methodcaller": ("_operator", "methodcaller"),
    "runs a command: GHSA-g38g-8gr9-h9xp": ("_osx_support", "_read_output"),
    "runs a command: CVE-2026-56315": ("_aix_support", "_read_cmd_output"),
    "runs a command: GHSA-5hwf-rc88-82xm uuid": ("uuid", "_get_command_stdout"),
    "runs a command: imaplib": ("imaplib", "IMAP4_stream"),
    "runs a command: _pyrepl": ("_pyrepl.pager", "pipe_pager"),
    "runs a command: test": ("test.support.script_helper", "assert_python_ok"),
    "runs code in another interpreter: GHSA-6ggj-6f2q-f7mx": ("_interpreters", "run_string"),
    "runs code in another interpreter: older": ("_xxsubinterpreters", "run_string"),
    "runs code: numpy.f2py": ("numpy.f2py.crackfortran", "getlincoef"),
    "runs code: numpy.testing": ("numpy.testing._private.utils", "runstring"),
    "runs code: torch._dynamo": ("torch._dynamo.guards", "GuardBuilder.get"),
    "runs code: torch.fx": ("torch.fx.experimental.symbolic_shapes", "ShapeEnv.evaluate_guards_expression"),
    "runs code: torch.utils.bottleneck": ("torch.utils.bottleneck.__main__", "run_cprofile"),
    "runs code: torch.utils.collect_env": ("torch.utils.collect_env", "run"),
    "runs code: torch.jit": ("torch.jit.unsupported_tensor_ops", "execWrapper"),
    "runs code: torch._inductor": ("torch._inductor.codecache", "compile_file"),
    "runs code: idlelib": ("idlelib.run", "Executive.runcode"),
    "runs code: lib2to3": ("lib2to3.pgen2.grammar", "Grammar.loads"),
    "runs code: doctest": ("doctest", "debug_script"),
    "runs code: trace": ("trace", "Trace.run"),
    "runs code: profile": ("profile", "Profile.run"),
    "runs code: cProfile": ("cProfile", "runctx"),
    "runs code: timeit": ("timeit", "timeit"),
    "runs code: bdb": ("bdb", "Bdb.run"),
    "runs code: pdb": ("pdb", "run"),
    "runs code: code": ("code", "InteractiveInterpreter.runcode"),
    "runs code: venv": ("venv", "create"),
    "runs code: ensurepip": ("ensurepip", "_run_pip"),
    "a builtin: CVE-2026-22612": ("builtins", "print"),
    "a builtin: GHSA-h4rm-mm56-xf63": ("builtins", "eval"),
    "loads a pickle: GHSA-84r2-jw7c-4r5q": ("pickle", "loads"),
    "loads a pickle: _pickle": ("_pickle", "loads"),
    "loads a pickle: _load_from_bytes": ("torch.storage", "_load_from_bytes"),
    "loads a pickle: dill": ("dill._dill", "loads"),
    "loads a pickle: joblib": ("joblib", "load"),
    "loads a pickle: pandas": ("pandas", "read_pickle"),
    "loads a pickle: numpy": ("numpy", "load"),
    "loads a pickle: torch": ("torch", "load"),
    "loads a pickle: config": ("torch.utils._config_module", "ConfigModule.load_config"),
    "loads a pickle: datapipes": ("torch.utils.data.datapipes.utils.decoder", "basichandlers"),
    "opens a file or a connection: ssl": ("ssl", "get_server_certificate"),
    "opens a file or a connection: urllib": ("urllib.request", "urlopen"),
    "opens a file or a connection: io.FileIO": ("io", "FileIO"),
    "opens a file or a connection: logging": ("logging", "FileHandler"),
    "opens a file or a connection: pandas.read_csv": ("pandas", "read_csv"),
    "makes code: cloudpickle": ("cloudpickle.cloudpickle", "_builtin_type"),
    "makes code: CodeType": ("types", "CodeType"),
    "makes code: marshal": ("marshal", "loads"),
    "stand-in os": ("os", "getcwd"),
    "stand-in posix": ("posix", "getcwd"),
    "stand-in sysconfig": ("sysconfig", "get_platform"),
    "runs code: pytorch/pytorch#189445 exec": ("builtins", "exec"),
    "runs code: subprocess": ("subprocess", "check_output"),
}


@each("row", DANGEROUS_NAMES)
def test_call_of_a_name_on_the_never_list_is_dangerous(row: str, inspect_zip: InspectZip) -> None:
    checkpoint = inspect_zip(call(*DANGEROUS_NAMES[row]))
    assert checkpoint.safety == "dangerous"
    use = use_of(checkpoint, ".".join(DANGEROUS_NAMES[row]))
    assert (use.verdict, use.called) == ("dangerous", 1)


@each("row", DANGEROUS_NAMES)
def test_name_on_the_never_list_is_dangerous_even_if_not_called(row: str, inspect_zip: InspectZip) -> None:
    module, name = DANGEROUS_NAMES[row]
    assert inspect_zip(forge.name(module, name)).safety == "dangerous"


UNKNOWN = {
    "unlisted module": ("nobody_knows", "this"),
    "unlisted torch name": ("torch.some.thing", "evaluate"),
    "unlisted numpy name": ("numpy.some.thing", "evaluate"),
    "dotted": ("collections", "OrderedDict.fromkeys"),
    "dotted torch": ("torch", "nn.parameter.Parameter"),
    "a foreign storage": ("nobody_knows", "FloatStorage"),
    "torch.tensor": ("torch.tensor", "_rebuild_from_type_v2"),
    "a space": ("collections ", "OrderedDict"),
    "another case": ("collections", "ordereddict"),
    "no module": ("", "OrderedDict"),
    "no name": ("collections", ""),
}


@each("row", UNKNOWN)
def test_unlisted_name_needs_trust(row: str, inspect_zip: InspectZip) -> None:
    module, name = UNKNOWN[row]
    assert inspect_zip(forge.name(module, name)).safety == "needs-trust"
    # A tensor that is rebuilt without arguments is broken as well.
    assert inspect_zip(call(module, name)).safety in ("needs-trust", "unknown")


@each("row", [*DANGEROUS_NAMES, *UNKNOWN])
def test_bare_pickle_is_never_data(row: str) -> None:
    module, name = {**DANGEROUS_NAMES, **UNKNOWN}[row]
    for raw in (call(module, name) + b".", b"\x80\x02" + call(module, name) + b"."):
        assert transload.inspect(raw).safety in ("unknown", "dangerous")


CHANGES = {
    "a class": b"ccollections\nOrderedDict\n}Vitems\ncnobody\nknows\nsb",
    "slots": b"ccollections\nOrderedDict\nN}Vitems\nNs\x86b",
    "a function": b"ctorch._utils\n_rebuild_tensor_v2\n}b",
    "an item": b"cnobody\nTABLE\nK\x01K\x02s",
    "appended": b"cnobody\nTABLE\nK\x01a",
    "a class of the older format": b"(Vmodule\ncnobody\nNet\nVnet.py\nVsource\ntQ}b",
    "by memo": b"ccollections\nOrderedDict\nq\x000h\x00}b",
}


@each("trick", CHANGES)
def test_changing_a_global_is_dangerous(trick: str, inspect_zip: InspectZip) -> None:
    """modelscan#330, #85."""
    checkpoint = inspect_zip(CHANGES[trick])
    assert checkpoint.safety == "dangerous"
    assert any("itself, for the whole process" in line for f in checkpoint.findings for line in f.evidence)


@pytest.mark.parametrize(
    "name",
    ["OrderedDict.__init__.__globals__", "OrderedDict.__reduce_ex__", "OrderedDict.__class__.__base__.__subclasses__"],
)
def test_dunder_path_through_an_object_is_dangerous(name: str, inspect_zip: InspectZip) -> None:
    """GHSA-5j3x-jp52-966f: also without a call."""
    body = b"\x8c\x0bcollections" + b"\x8c" + bytes([len(name)]) + name.encode() + b"\x93"
    assert inspect_zip(body, protocol=4).safety == "dangerous"


@each("name", ["os", "os.getcwd", "sys.modules", "subprocess.check_output", "builtins"])
def test_module_reached_through_another_module_is_dangerous(name: str, inspect_zip: InspectZip) -> None:
    """``torch.serialization.os`` is ``os``."""
    assert inspect_zip(f"ctorch.serialization\n{name}\n".encode(), protocol=4).safety == "dangerous"


PYTHON_2_NAMES = {
    ("__builtin__", "eval"): "builtins.eval",
    ("__builtin__", "apply"): "builtins.apply",
    ("__builtin__", "reduce"): "functools.reduce",
    ("commands", "getoutput"): "subprocess.getoutput",
    ("cPickle", "loads"): "pickle.loads",
    ("itertools", "imap"): "builtins.map",
    ("urllib2", "urlopen"): "urllib.request.urlopen",
}


@each("spelling", PYTHON_2_NAMES, ids=".".join)
@each("protocol", [0, 2, 4])
def test_python_2_name_is_judged_by_its_python_3_name(
    spelling: tuple[str, str], protocol: int, inspect_zip: InspectZip
) -> None:
    checkpoint = inspect_zip(call(*spelling), protocol=protocol)
    assert checkpoint.safety == "dangerous"
    assert use_of(checkpoint, PYTHON_2_NAMES[spelling]).spelling == ".".join(spelling)


@pytest.mark.parametrize("spelling", [("__builtin__", "set"), ("UserDict", "OrderedDict"), ("UserString", "Counter")])
def test_python_2_name_is_not_translated_from_protocol_3_on(spelling: tuple[str, str], inspect_zip: InspectZip) -> None:
    """A module named ``UserDict`` today is not the one of Python 2, and is not trusted."""
    assert inspect_zip(call(*spelling), protocol=2).safety == "data-only"
    checkpoint = inspect_zip(call(*spelling), protocol=3)
    assert checkpoint.safety != "data-only"
    assert use_of(checkpoint, ".".join(spelling)).verdict in ("unknown", "dangerous")


def test_canonical_matches_the_name_mapping_of_pickle() -> None:
    for module, name in NAME_MAPPING:
        assert canonical(module, name) == NAME_MAPPING[module, name]
    for module, moved in IMPORT_MAPPING.items():
        assert canonical(module, "anything") == (moved, "anything")


def test_storage_class_of_an_unknown_module_needs_trust(inspect_zip: InspectZip) -> None:
    """torch takes any name with "Storage" in it for a storage type, and imports nothing."""
    pid = b"(Vstorage\ncnobody_knows\nFloatStorage\nV0\nVcpu\nK\x01tQ"
    body = b"ctorch._utils\n_rebuild_tensor_v2\n(" + pid + b"K\x00K\x01\x85K\x01\x85\x89ccollections\nOrderedDict\n)RtR"
    checkpoint = inspect_zip(body, {"0": bytes(4)})
    assert checkpoint.safety == "needs-trust"
    assert use_of(checkpoint, "nobody_knows.FloatStorage").verdict == "unknown"


@each(
    "name",
    [
        "eval",
        "exec",
        "compile",
        "open",
        "__import__",
        "getattr",
        "setattr",
        "delattr",
        "vars",
        "globals",
        "locals",
        "input",
        "map",
        "filter",
        "breakpoint",
    ],
)
def test_builtins_that_run_code_or_reach_names_are_dangerous(name: str) -> None:
    assert is_dangerous("builtins", name)


@each(
    ("module", "name"),
    [
        ("code.models", "Net"),
        ("test.models", "Net"),
        ("profile.config", "Config"),
        ("trace.nets", "Net"),
        ("commands.train", "Options"),
        ("my.os", "Net"),
        ("my.subprocess.pickle", "Net"),
        ("ossature", "Net"),
        ("torch.nn.modules.linear", "Linear"),
        ("builtins", "len"),
        ("builtins", "ValueError"),
        ("urllib.parse", "ParseResult"),
        ("types", "SimpleNamespace"),
    ],
)
def test_harmless_name_that_resembles_a_dangerous_one_is_not_dangerous(module: str, name: str) -> None:
    assert classify(module, name)[0] in ("unknown", "harmless")


@each("row", [row for row in DANGEROUS_NAMES if row.startswith("loads a pickle") and "datapipes" not in row])
def test_loaders_are_reported_as_loaders(row: str) -> None:
    assert is_dangerous(*DANGEROUS_NAMES[row]).startswith("loads another")
