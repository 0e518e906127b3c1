"""The verdict on a file: how names are used, what streams hide, and the lines printed for users who trust it."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import pytest
import torch
from tests import forge, makers
from tests.each import each
from tests.forge import name, text
from tests.release import needs_torch

import transload
from transload.checkpoint import Checkpoint, GlobalUse
from transload.formats.pickle_machine import run
from transload.formats.pickle_streams import run_all
from transload.judge.safety import MAX_DEPTH, judge_pickles, safe_globals_lines


class InspectZip(Protocol):
    def __call__(self, body: bytes, storages: dict[str, bytes] | None = None, *, protocol: int = 2) -> Checkpoint: ...


def getattr_of(owner: bytes, attribute: str) -> bytes:
    return name("builtins", "getattr") + owner + text(attribute) + b"\x86R"


CLASS = name("nobody", "Knows")
PAYLOAD = name("os", "getcwd") + b")R"


def evidence(checkpoint: Checkpoint) -> str:
    return "\n".join(line for finding in checkpoint.findings for line in finding.evidence)


# -- computed names ----------------------------------------------------------------------------------------------------

NEEDS_TRUST = {
    "an enumeration of Python 3.11": getattr_of(CLASS, "RED"),
    "a bound method": getattr_of(CLASS + b")R", "method"),
    "a call of a method of a class": getattr_of(CLASS, "method") + b")R",
    "a class in a class": getattr_of(CLASS, "Inner") + b")\x81",
    "a class in a class, with a state": getattr_of(CLASS, "Inner") + b")\x81}b",
    "a class in a class of the older format": b"(" + text("module") + getattr_of(CLASS, "Inner") + b"NNtQ)\x81",
    "a partial": name("functools", "partial") + CLASS + b"\x85R(" + CLASS + b")NNtb",
    "keyword arguments of protocol 2": name("functools", "partial")
    + getattr_of(CLASS, "__new__")
    + b"q\x01\x85R(h\x01"
    + CLASS
    + b"\x85}Ntb)R",
    "the type of None": name("builtins", "type") + b"N\x85R",
}
DANGEROUS = {
    "a chain": getattr_of(getattr_of(CLASS, "a"), "b"),
    "a call of a bound method": getattr_of(CLASS + b")R", "method") + b")R",
    "a double underscore": getattr_of(CLASS, "__globals__"),
    "a double underscore of an object": getattr_of(CLASS + b")R", "__class__"),
    "a computed name": name("builtins", "getattr") + CLASS + CLASS + b")R\x86R",
    "a default": name("builtins", "getattr") + CLASS + text("a") + b"N\x87R",
    "getattr of a number": name("builtins", "getattr") + b"K\x01" + text("a") + b"\x86R",
    "a state": getattr_of(CLASS, "a") + b"}b",
    "OBJ": b"(" + getattr_of(CLASS, "Inner") + b"o",
    "NEWOBJ of a chain": getattr_of(getattr_of(CLASS, "a"), "B") + b")\x81",
    "a call of a partial": name("functools", "partial") + CLASS + b"\x85R)R",
    "keyword arguments with another function in the state": name("functools", "partial")
    + getattr_of(CLASS, "__new__")
    + b"\x85R("
    + name("nobody", "evil")
    + CLASS
    + b"\x85}Ntb)R",
    "keyword arguments with another class": name("functools", "partial")
    + getattr_of(CLASS, "__new__")
    + b"q\x01\x85R(h\x01"
    + name("nobody", "Other")
    + b"\x85}Ntb)R",
    "EXT1": b"\x82\x01)R",
    "EXT2": b"\x83\x01\x00)R",
    "EXT4": b"\x84\x01\x00\x00\x00)R",
    "EXT, not called": b"\x82\x01",
    "EXT, built": b"\x82\x01}b",
    "a computed name of STACK_GLOBAL": CLASS + b")R" + text("x") + b"\x93",
    "a class created by type()": name("builtins", "type") + text("X") + b")}\x87R",
    "a replaced __class__": CLASS + b")RN}" + text("__class__") + CLASS + b"s\x86b",
}


@each("case", NEEDS_TRUST)
def test_ordinary_object_needs_trust_and_is_not_dangerous(case: str, inspect_zip: InspectZip) -> None:
    assert judge_pickles([run(NEEDS_TRUST[case] + b".")]).safety == "needs-trust"
    if "older format" not in case:
        checkpoint = inspect_zip(NEEDS_TRUST[case])
        assert checkpoint.safety == "needs-trust", evidence(checkpoint)


@each("case", DANGEROUS)
def test_computed_name_is_dangerous(case: str, inspect_zip: InspectZip) -> None:
    assert inspect_zip(DANGEROUS[case]).safety == "dangerous"


# -- streams -----------------------------------------------------------------------------------------------------------

STREAMS = {
    "broken after the call (GHSA-9gvj-pp9x-gcfr)": PAYLOAD + b"\xff",
    "no STOP": PAYLOAD,
    "in the second pickle": b"N." + PAYLOAD + b".",
    "popped (GHSA-mxhj-88fx-4pcv)": PAYLOAD + b"0N.",
    "behind the end of a frame (cpython#154848)": b"\x95\x02" + bytes(7) + b"\x8c\x0f" + PAYLOAD + b"0N.",
    "called by INST": b"(ios\ngetcwd\n.",
    "called by OBJ": b"(" + name("os", "getcwd") + b"o.",
    "called by NEWOBJ": name("os", "getcwd") + b")\x81.",
    "called by NEWOBJ_EX": name("os", "getcwd") + b")}\x92.",
    "not called (GHSA-q5qq-mvfm-j35x)": name("os.path", "join") + b".",
    "in a persistent id": b"(" + PAYLOAD + b"tQ.",
    "as a key": b"}" + PAYLOAD + b"Ns.",
    "in the memo only": PAYLOAD + b"q\x000N.",
}


@each("case", STREAMS)
def test_call_cannot_be_hidden_in_a_stream(case: str, archive_of: Callable[[bytes], bytes]) -> None:
    assert judge_pickles(run_all(STREAMS[case])).safety == "dangerous" or "frame" in case
    if "second pickle" not in case:  # torch.load reads one pickle there, and trailing bytes are reported
        assert transload.inspect(archive_of(b"\x80\x02" + STREAMS[case])).safety == "dangerous"
    bare = transload.inspect(b"\x80\x02" + STREAMS[case])
    assert bare.safety == "dangerous"


@each("position", range(5))
def test_call_in_any_of_the_five_legacy_pickles_is_dangerous(position: int) -> None:
    raw = makers.saved({"a": 1}, _use_new_zipfile_serialization=False)
    starts = [stream.start for stream in run_all(raw)]
    offset = starts[position] + 2  # after PROTO
    checkpoint = transload.inspect(raw[:offset] + PAYLOAD + b"0" + raw[offset:])
    assert checkpoint.safety == "dangerous"
    assert "os.getcwd" in [use.full_name for use in checkpoint.globals]


def test_truncation_after_a_call_does_not_hide_it() -> None:
    raw = b"\x80\x02" + PAYLOAD + b"0}" + (text("key") + text("value") + b"s") * 3 + b"."
    end_of_call = 2 + len(PAYLOAD)
    for cut in range(end_of_call, len(raw)):
        assert judge_pickles([run(raw[:cut])]).safety == "dangerous"


def test_every_use_is_counted() -> None:
    raw = CLASS + b"q\x00)R" + b"h\x00)R}b" + CLASS + b"0\x86."
    use = judge_pickles([run(raw, name="data.pkl")]).globals[0]
    assert (use.imported, use.called, use.built, use.stream) == (2, 2, 1, "data.pkl")


def test_no_pickles_is_data_only() -> None:
    assert judge_pickles([]).safety == "data-only"


# -- pickles inside pickles --------------------------------------------------------------------------------------------

INNER = b"\x80\x02" + name("nobody", "inside") + b")R."


def as_bytes(raw: bytes) -> bytes:
    """BINBYTES, as in protocol 3."""
    return b"B" + len(raw).to_bytes(4, "little") + raw


def as_text(raw: bytes) -> bytes:
    """``_codecs.encode(text, "latin1")``, as in protocol 2."""
    latin = raw.decode("latin-1").encode()
    return name("_codecs", "encode") + b"X" + len(latin).to_bytes(4, "little") + latin + text("latin1") + b"\x86R"


def loads(raw: bytes, module: str = "pickle", attribute: str = "loads") -> bytes:
    return name(module, attribute) + raw + b"\x85R"


def saved(**options: bool) -> bytes:
    """A torch checkpoint whose pickle uses a global."""
    return makers.saved(ValueError, **options)


NESTED = {
    "pickle.loads": (loads(as_bytes(INNER)), "nobody.inside"),
    "latin1": (loads(as_text(INNER)), "nobody.inside"),
    "_pickle": (loads(as_bytes(INNER), "_pickle"), "nobody.inside"),
    "cPickle": (loads(as_bytes(INNER), "cPickle"), "nobody.inside"),
    "dill": (loads(as_bytes(INNER), "dill"), "nobody.inside"),
    "a buffer": (loads(name("_io", "BytesIO") + as_bytes(INNER) + b"\x85R", "pickle", "load"), "nobody.inside"),
    "a buffer with a state": (
        loads(name("_io", "BytesIO") + b")R(" + as_bytes(INNER) + b"K\x00Ntb", "torch", "load"),
        "nobody.inside",
    ),
    "_load_from_bytes, zip": (loads(as_text(saved()), "torch.storage", "_load_from_bytes"), "builtins.ValueError"),
    "_load_from_bytes, legacy": (
        loads(as_text(saved(_use_new_zipfile_serialization=False)), "torch.storage", "_load_from_bytes"),
        "builtins.ValueError",
    ),
    "the second pickle": (loads(as_bytes(b"N." + INNER)), "nobody.inside"),
    "twice": (loads(as_bytes(b"\x80\x03" + loads(as_bytes(INNER)) + b".")), "nobody.inside"),
    "broken": (loads(as_bytes(INNER[:-1] + b"\xff")), "nobody.inside"),
}


@each("case", NESTED)
def test_names_inside_bytes_passed_to_a_loader_are_reported(case: str, inspect_zip: InspectZip) -> None:
    """GHSA-84r2-jw7c-4r5q and similar."""
    body, inside = NESTED[case]
    checkpoint = inspect_zip(body, protocol=3)
    assert checkpoint.safety == "dangerous"
    use = next(use for use in checkpoint.globals if use.full_name == inside)
    assert use.stream.startswith("data.pkl › nested")


def test_pickled_storage_is_dangerous(inspect_zip: InspectZip) -> None:
    """``pickle.dumps(storage)`` writes this; loading it calls torch.load with weights_only=False."""
    raw = pickle.dumps(torch.ones(2).untyped_storage(), 2)
    checkpoint = inspect_zip(raw[2:-1])
    assert checkpoint.safety == "dangerous"
    assert {use.stream for use in checkpoint.globals} == {"data.pkl", "data.pkl › nested"}


def test_bytes_not_passed_to_a_loader_are_data(inspect_zip: InspectZip) -> None:
    checkpoint = inspect_zip(as_text(INNER))
    assert checkpoint.safety == "data-only"
    assert [use.full_name for use in checkpoint.globals] == ["_codecs.encode"]


def nest(depth: int) -> bytes:
    raw = INNER
    for level in range(depth):
        raw = b"\x80\x03" + loads(as_bytes(raw), attribute=f"loads{level}") + b"."
    return raw


@pytest.mark.parametrize("depth", [MAX_DEPTH, MAX_DEPTH + 1, 50])
def test_nested_pickles_are_followed_down_to_max_depth(depth: int) -> None:
    judgement = judge_pickles([run(nest(depth), name="x")])
    names = {use.full_name for use in judgement.globals}
    assert ("nobody.inside" in names) == (depth <= MAX_DEPTH)
    reported = any("more nested pickles than are read" in line for f in judgement.findings for line in f.evidence)
    assert reported == (depth > MAX_DEPTH)
    assert judgement.safety == "dangerous"


def test_bytes_shared_by_many_calls_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A megabyte referenced a thousand times must not be read a thousand times."""
    from transload.formats import pickle_streams

    filler = b"\x80\x02" + b"N0" * 5000 + INNER[2:]
    latin = filler.decode("latin-1").encode()
    raw = b"\x80\x02X" + len(latin).to_bytes(4, "little") + latin + b"q\x00"
    loads_call = name("pickle", "loads") + name("_codecs", "encode") + b"h\x00" + text("latin1") + b"\x86R\x85R0"
    parsed = run(raw + loads_call * 300 + b".")
    sizes: list[int] = []
    real = pickle_streams.run_all

    def counting_run_all(data: bytes, name: str = "") -> object:
        sizes.append(len(data))
        return real(data, name)

    monkeypatch.setattr(pickle_streams, "run_all", counting_run_all)
    judgement = judge_pickles([parsed])
    assert "nobody.inside" in {use.full_name for use in judgement.globals}
    assert sizes == [len(filler)]


# -- lines printed for users who trust a file --------------------------------------------------------------------------


def use(module: str, attribute: str, spelling: str = "") -> GlobalUse:
    return GlobalUse(module, attribute, "unknown", "", spelling=spelling)


@each(
    "hostile",
    [
        ("os; import subprocess", "x"),
        ("a", "b])\nimport os\nprint(["),
        ("a b", "c"),
        ("", "x"),
        ("a", ""),
        ("a..b", "c"),
        ("a", "b'"),
        ("a", "<lambda>"),
    ],
)
def test_no_lines_are_printed_for_invalid_names(hostile: tuple[str, str]) -> None:
    """Users paste these lines into a shell."""
    assert safe_globals_lines([use("argparse", "Namespace"), use(*hostile)]) == ()


def test_equal_names_get_distinct_aliases() -> None:
    names = [("a", "Config"), ("b", "Config"), ("c", "torch"), ("d", "Outer.Inner"), ("e", "int"), ("builtins", "int")]
    lines = safe_globals_lines(use(*name) for name in names)
    assert lines == (
        "import torch",
        "from a import Config",
        "from b import Config as Config_",
        "from c import torch as torch_",
        "from d import Outer",
        "from e import int as int_",
        "# This trusts code that transload does not know, with any arguments: c.torch, e.int",
        "with torch.serialization.safe_globals([Config, Config_, torch_, Outer.Inner, int_, int]):",
        "    obj = torch.load(path)",
    )


def test_lines_allow_names_as_the_file_spells_them() -> None:
    lines = safe_globals_lines(
        [
            use("numpy.core.multiarray", "scalar"),
            use("builtins", "ValueError", "exceptions.ValueError"),
            use("builtins", "frozenset", "__builtin__.frozenset"),
            use("torch._tensor", "_rebuild_from_type", "torch.tensor._rebuild_from_type"),
            use("torch.tensor", "_rebuild_from_type"),
            use("builtins", "Ellipsis"),
        ]
    )
    entries = (
        '(scalar, "numpy.core.multiarray.scalar")',
        '(ValueError, "exceptions.ValueError")',
        "frozenset",
        '(_rebuild_from_type, "torch.tensor._rebuild_from_type")',
        '(Ellipsis, "builtins.Ellipsis")',
    )
    assert lines == (
        "import torch",
        "from numpy._core.multiarray import scalar",
        "from torch._tensor import _rebuild_from_type",
        f"with torch.serialization.safe_globals([{', '.join(entries)}]):",
        "    obj = torch.load(path)",
    )


def test_dangerous_file_gets_no_safe_globals_lines(inspect_zip: InspectZip) -> None:
    checkpoint = inspect_zip(PAYLOAD + b"0" + CLASS)
    assert [finding.fix for finding in checkpoint.findings if finding.code == "needs-trust"] == [()]
    assert not any("safe_globals" in line for finding in checkpoint.findings for line in finding.fix)


def test_no_fix_suggests_weights_only_false_for_a_dangerous_file(inspect_zip: InspectZip) -> None:
    checkpoint = inspect_zip(PAYLOAD)
    assert not any("weights_only=False" in line for finding in checkpoint.findings for line in finding.fix)


def test_dangerous_file_shows_no_line_that_allows_names() -> None:
    partial = forge.call(forge.name("functools", "partial"), forge.name("models.net", "Net"))
    for body in (
        forge.call(forge.name("builtins", "type"), "A", (), forge.dictionary({})),
        partial + b")R",
        forge.list_of(forge.name("models.net", "Net"), forge.DANGEROUS),
    ):
        checkpoint = transload.inspect(forge.checkpoint(forge.pickled(body)))
        assert checkpoint.safety == "dangerous"
        lines = [line for finding in checkpoint.findings for line in finding.fix]
        assert not any("safe_globals" in line or "weights_only=False" in line for line in lines), lines


def test_torchao_must_be_imported_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torchao", raising=False)
    tensor = forge.name("torchao.quantization", "Int8Tensor")
    for body, first in ((tensor, True), (forge.list_of(tensor, forge.name("nets", "Net")), False)):
        with pytest.raises(transload.UnsafeError) as raised:
            transload.load(forge.checkpoint(forge.pickled(body)))
        assert raised.value.fix.startswith("Import torchao first: it allows its own classes.") == first


@needs_torch(2, 6)
def test_tensor_subclass_of_the_tests_of_torch_needs_trust(tmp_path: Path) -> None:
    two_tensor = pytest.importorskip("torch.testing._internal.two_tensor")
    torch.save(two_tensor.TwoTensor(torch.ones(2), torch.ones(2)), tmp_path / "a.pt")
    checkpoint = transload.inspect(tmp_path / "a.pt")
    assert checkpoint.safety == "needs-trust"
    assert any("safe_globals([TwoTensor])" in line for finding in checkpoint.findings for line in finding.fix)
    hostile = forge.checkpoint(forge.pickled(forge.call(forge.name("torch.testing._internal.two_tensor", "func"))))
    assert transload.inspect(hostile).safety == "dangerous"
