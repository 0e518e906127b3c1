"""The guarantee of the pickle machine: it lists every name that any loader would request.

Three loaders are the oracles: CPython's C unpickler (over a file with ``peek``, which reads as ``pickle.loads`` does,
and over one without), its pure Python unpickler, and torch's ``weights_only`` unpickler. Each runs with lookups
replaced: requests are recorded and answered by inert stubs that accept anything, so nothing is imported and the loader
gets as far as it can.

``TRANSLOAD_FUZZ=100 pytest tests/formats/test_pickle_machine_soundness.py`` tries a hundred times as many streams,
different ones each time.
"""

from __future__ import annotations

import functools
import io
import os
import pickle
import pickletools
import struct
import sys
import warnings
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest
import torch._weights_only_unpickler as weights_only
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.each import each

from transload.formats.pickle_machine import run
from transload.formats.pickle_streams import run_all
from transload.formats.rare_opcodes import opcodes
from transload.nodes import Pickle

FUZZ = int(os.environ.get("TRANSLOAD_FUZZ", "1"))


def fuzz(examples: int) -> settings:
    slow = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    return settings(max_examples=examples * FUZZ, derandomize=FUZZ == 1, suppress_health_check=slow)


@pytest.fixture(scope="module", autouse=True)
def bounded_memory() -> Iterator[None]:
    """Limit the memory: the memo of the C unpickler is an array, and an index of 2**30 would take 16 GiB."""
    if sys.platform != "linux":
        pytest.skip("needs an enforced memory limit")
    import resource

    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (1 << 30), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


# -- the oracles -------------------------------------------------------------------------------------------------------


class Meta(type):
    """Lets a stub class accept items as well."""

    def __setitem__(cls, key: object, value: object) -> None: ...


class Stub(metaclass=Meta):
    """Stands for any class, function or object: accepts every call, state and item."""

    def __new__(cls, *_: object, **__: object) -> Any:
        return object.__new__(cls)

    def __init__(self, *_: object, **__: object) -> None: ...

    def __call__(self, *_: object, **__: object) -> Any:
        return Stub()

    def __setitem__(self, key: object, value: object) -> None: ...

    @staticmethod
    def __setstate__(*_: object) -> None: ...

    append = extend = add = __setstate__


COMPUTED = "computed by the file"


class TextStub(Stub):
    """Stands for a callable that returns text, such as ``str``, which STACK_GLOBAL accepts as a name."""

    def __new__(cls, *_: object, **__: object) -> Any:
        return COMPUTED


Names = set[tuple[str, str]]


class Outcome(NamedTuple):
    requested: Names
    end: int | None  # where the loader stopped reading; None after an error


Oracle = Callable[[bytes], Outcome]


class PeekFile(io.BytesIO):
    """``peek`` returns all remaining bytes, so that the C unpickler works on one buffer as in ``pickle.loads``."""

    def peek(self, _: int = 0) -> bytes:
        return self.getvalue()[self.tell() :]


def run_unpickler(unpickler: type[Any], file: io.BytesIO, stub: type[Stub]) -> Outcome:
    requested: Names = set()

    class Recorder(unpickler):
        def find_class(self, module: str, name: str) -> type[Stub]:
            requested.add((module, name))
            return stub

        def persistent_load(self, _: object) -> Any:
            return stub if stub is Stub else stub()

    return Outcome(requested, file.tell() if succeeds(Recorder(file, encoding="utf-8").load) else None)


def succeeds(load: Callable[[], object]) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            load()
        except Exception:  # noqa: BLE001 - loaders raise errors of many types
            return False
    return True


class AllNames(dict[str, Any]):
    """Replaces torch's table of allowed names, and contains every name."""

    def __contains__(self, _: object) -> bool:
        return True

    def __getitem__(self, _: str) -> type[Stub]:
        return Stub

    def values(self) -> Any:
        return self


def run_torch_unpickler(data: bytes) -> Outcome:
    requested: Names = set()
    read_name = weights_only._read_global_instruction

    def record(readline: Callable[..., Any]) -> tuple[str, str]:
        name: tuple[str, str] = read_name(readline)
        requested.add(name)
        return name

    file = io.BytesIO(data)
    unpickler = weights_only.Unpickler(file, encoding="utf-8")
    unpickler.persistent_load = lambda _: Stub
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights_only, "_read_global_instruction", record)
        patch.setattr(weights_only, "_get_allowed_globals", AllNames)
        patch.setattr(weights_only, "_get_user_allowed_globals", AllNames)
        patch.setattr(weights_only, "_blocklisted_modules", [])
        loaded = succeeds(unpickler.load)
    return Outcome(requested, file.tell() if loaded else None)


def names_listed_by_torch(data: bytes) -> Names:
    """The names that ``get_unsafe_globals_in_checkpoint`` reports; it scans the stream without running it."""
    try:
        names = weights_only.get_globals_in_pkl(io.BytesIO(data))
    except Exception:  # noqa: BLE001 - it supports half of the opcodes
        return set()
    return {(name, "") for name in names}


PYTHON = pickle._Unpickler
ORACLES: dict[str, Oracle] = {
    "C": lambda data: run_unpickler(pickle.Unpickler, PeekFile(data), Stub),
    "Python": lambda data: run_unpickler(PYTHON, io.BytesIO(data), Stub),
    "C, calls return text": lambda data: run_unpickler(pickle.Unpickler, PeekFile(data), TextStub),
    "Python, calls return text": lambda data: run_unpickler(PYTHON, io.BytesIO(data), TextStub),
    "C without peek": lambda data: run_unpickler(pickle.Unpickler, io.BytesIO(data), Stub),
    **({"torch": run_torch_unpickler} if hasattr(weights_only, "_read_global_instruction") else {}),  # since torch 2.6
}


def listed_names(pickle: Pickle, oracle: str) -> Names:
    """The names that we list, as the oracle spells them: torch translates Python 2 names first."""
    if oracle != "torch":
        return set(pickle.globals)
    out = set()
    for module, name in pickle.globals:
        renamed = weights_only.NAME_MAPPING.get((module, name))
        out.add(renamed or (weights_only.IMPORT_MAPPING.get(module, module), name))
    return out


def check(data: bytes) -> None:
    for result in run_all(data):
        rest = data[result.start :]
        for name, oracle in ORACLES.items():
            if name == "C without peek" and result.ambiguous:
                continue  # it loses bytes where an opcode crosses the end of a frame, hence ambiguous
            outcome = oracle(rest)
            requested = {pair for pair in outcome.requested if COMPUTED not in pair}
            assert requested <= listed_names(result, name), f"{name} requests a name that is not listed"
            if outcome.end is not None:
                assert result.broken == "", f"{name} loads a stream that we call broken"
                assert result.ambiguous or outcome.end == result.end - result.start, f"{name} stops at another byte"
        if "torch" in ORACLES:
            dotted = {(".".join(pair), "") for pair in listed_names(result, "torch")}
            assert names_listed_by_torch(rest) <= dotted or result.broken


# -- generated streams of opcodes --------------------------------------------------------------------------------------

Op = tuple[str, str, Callable[[Random], bytes]]
"""What an opcode needs on the stack (top last), what it leaves there, and a function that writes it.

``s`` text, ``t`` tuple, ``l`` list, ``d`` dictionary, ``e`` set, ``g`` a class or an object made of one, ``b`` bytes,
``o`` anything; ``m`` is a MARK with anything above it, ``p`` one with pairs above it, ``f`` one with a class above
it. It may leave ``(`` a MARK, ``=`` what was there, ``2`` the same twice.
"""

MODULES = ["os", "m1", "m2", "a.b", "__builtin__", "copy_reg", "ünï", "exceptions", "itertools", "UserDict"]
ATTRIBUTES = ["getcwd", "n1", "n2", "A.b", "reduce", "xrange", "ö", "OSError", "izip", "UserDict"]
TEXTS = [*MODULES, *ATTRIBUTES, "", "\ud800", "x" * 300]


def just(code: str) -> Callable[[Random], bytes]:
    return lambda _: code.encode("latin-1")


def packed(code: str, form: str, values: Sequence[float]) -> Callable[[Random], bytes]:
    return lambda rng: code.encode("latin-1") + struct.pack(form, rng.choice(values))


def counted(code: str, width: int, values: Sequence[bytes]) -> Callable[[Random], bytes]:
    return lambda rng: sized(code, width, rng.choice([value for value in values if len(value) < 256**width]))


def sized(code: str, width: int, value: bytes, length: int | None = None) -> bytes:
    stated = len(value) if length is None else length % 256**width
    return code.encode("latin-1") + stated.to_bytes(width, "little") + value


def lines(code: str, *values: Sequence[bytes]) -> Callable[[Random], bytes]:
    return lambda rng: code.encode() + b"".join(rng.choice(value) + b"\n" for value in values)


def encoded(names: list[str], codec: str = "utf-8") -> list[bytes]:
    return [name.encode(codec, "surrogatepass") for name in names]


# Opcodes as a pickler could write them.
GOOD: list[Op] = [
    *(("", "o", just(code)) for code in "N\x88\x89"),
    *(("", kind, just(code)) for code, kind in [(")", "t"), ("]", "l"), ("}", "d"), ("\x8f", "e")]),
    *[("", "(", just("("))] * 2,
    *(("m", kind, just(code)) for code, kind in [("t", "t"), ("l", "l"), ("\x91", "o"), ("1", "")]),
    ("p", "d", just("d")),
    ("o", "", just("0")),
    ("m", "", just("0")),
    *(("o" * count, "t", just(code)) for code, count in [("\x85", 1), ("\x86", 2), ("\x87", 3)]),
    ("lo", "l", just("a")),
    ("lm", "l", just("e")),
    ("em", "e", just("\x90")),
    ("doo", "d", just("s")),
    ("dp", "d", just("u")),
    ("go", "g", just("a")),
    ("gm", "g", just("e")),
    ("goo", "g", just("s")),
    ("gp", "g", just("u")),
    ("o", "2", just("2")),
    *[("gt", "g", just(code)) for code in "RRR\x81"],
    ("gtd", "g", just("\x92")),
    ("go", "g", just("b")),
    ("f", "g", just("o")),
    ("o", "g", just("Q")),
    *[("ss", "g", just("\x93"))] * 4,
    ("o", "=", just("\x94")),
    ("b", "=", just("\x98")),
    ("", "", packed("\x80", "B", range(6))),
    ("", "o", packed("K", "B", range(256))),
    ("", "o", packed("M", "<H", range(65536))),
    ("", "o", packed("J", "<i", range(-9, 9))),
    ("", "o", packed("G", ">d", [0.0, 1.5, float("nan")])),
    ("o", "=", packed("q", "B", [*range(6), 255])),
    ("o", "=", packed("r", "<I", [*range(6), 255, 256, 70_000])),
    ("o", "=", lines("p", [b"0", b"1", b"2", b"255", b"300"])),
    *[("", "?", just("h"))] * 4,
    ("", "s", counted("U", 1, encoded(TEXTS[:-2]))),
    ("", "s", counted("T", 4, encoded(TEXTS[:-2]))),
    *[("", "s", counted(code, width, encoded(TEXTS))) for code, width in [("X", 4), ("\x8c", 1), ("\x8d", 8)]],
    *[("", "b", counted(code, width, encoded(TEXTS))) for code, width in [("C", 1), ("B", 4), ("\x8e", 8)]],
    ("", "b", counted("\x96", 8, encoded(TEXTS))),
    ("", "o", counted("\x8a", 1, [b"", b"\x80", b"\xff" * 9])),
    ("", "o", counted("\x8b", 4, [b"", b"\x80", b"\xff" * 5000])),
    *[("", "g", lines("c", encoded(MODULES), encoded(ATTRIBUTES)))] * 4,
    ("m", "g", lines("i", [b"m1", b"m2"], [b"n1", b"n2"])),
    ("", "o", lines("I", [b"0", b"-5", b"00", b"01", b"0x10", b"123456789012345678901234567890"])),
    ("", "o", lines("L", [b"0L", b"-5L", b"7", b"0x10"])),
    ("", "o", lines("F", [b"0", b"-1.5", b"nan", b"1e99"])),
    ("", "s", lines("S", [rb"'os'", rb'"n1"', rb"'\x6fs'", rb"'\q'", rb"''", rb"'\157s'", rb"'\'\\\n'"])),
    ("", "s", lines("V", [*encoded(MODULES, "raw-unicode-escape"), rb"\u006fs", b"\xff"])),
    ("", "o", lines("P", [b"0", b"x"])),
]  # fmt: skip

NUMBERS = [
    *(b"", b" 1", b"1 ", b"+1", b"-1", b"010", b"08", b"0b1", b"0o7", b"1_0", b"1L", b"L", b"1.5", b"1e999", b"x"),
    *(b"00001", b"1\x00z", b"\x001"),
    *(b" " * 4400 + b"1", b"9" * 4301, b"0x" + b"f" * 4400, b"1" + b"_1" * 2200, b"0" * 4301),
]  # fmt: skip
NAMES = [b"", b"\xff", b"a\x00b", b"\xed\xa0\x80", b" os ", b"os\r", b"os"]
LENGTHS = [0, 1, 2, 5, 9, 30, 100, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1]
COUNTED = {"U": 1, "T": 4, "X": 4, "\x8c": 1, "\x8d": 8, "C": 1, "B": 4, "\x8e": 8, "\x96": 8, "\x8a": 1, "\x8b": 4}


def wrong_length(rng: Random) -> bytes:
    """An opcode with a wrong length."""
    code = rng.choice(list(COUNTED))
    return sized(code, COUNTED[code], rng.choice(encoded(TEXTS)), rng.choice(LENGTHS))


# Opcodes that no pickler writes: some loaders accept them, some do not.
ODD: list[Op] = [
    ("", "o", wrong_length),
    *[("", "o", counted(code, width, NAMES)) for code, width in COUNTED.items()],
    *[("", "o", lines(code, NUMBERS)) for code in "ILFg"],
    ("o", "=", lines("p", NUMBERS)),
    ("", "g", lines("c", NAMES, NAMES)),
    ("", "g", lines("i", NAMES, NAMES)),
    ("", "s", lines("S", [rb"'\x6'", rb"'", rb"'a", b"'\xff'", b"'\\'", rb"'\777'", b"'a'b"])),
    ("", "s", lines("V", [rb"\u00", rb"\U00110000"])),
    ("", "o", lines("P", NAMES)),
    ("", "", packed("\x80", "B", [6, 255])),
    *[("", "", packed("\x95", "<Q", LENGTHS))] * 3,
    ("", "o", packed("j", "<I", [0, 7, 2**31, 2**32 - 1])),
    ("o", "=", packed("r", "<I", [2**31, 2**32 - 1])),
    ("", "g", packed("\x82", "B", [0, 1])),
    ("", "g", packed("\x83", "<H", [0, 1])),
    ("", "g", packed("\x84", "<i", [-1, 0, 1])),
    ("", "o", just("\x97")),
    ("o", "", just(".")),
    *[(needs, "o", just(code)) for code in "\x93RboaseuQ\x81\x92" for needs in ("o", "oo")],
    *[("", "o", just(code)) for code in "0123dlotbRQ\x91\x90\x93\x94\x98\xff"],
]

PUSH = {
    "s": b"X\x02\x00\x00\x00m3",
    "t": b")",
    "l": b"]",
    "d": b"}",
    "e": b"\x8f",
    "g": b"cm4\nn4\n",
    "b": b"C\x01x",
    "o": b"N",
}
PUSH |= {"m": b"(", "p": b"(", "f": b"(" + PUSH["g"]}


class Assembler:
    """Appends opcodes, each after the operands that it lacks."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        self.out = bytearray()
        self.stack: list[str] = []
        self.memo: list[tuple[int, str]] = []

    def operands(self, needs: str) -> int | None:
        """The position on the stack where the operands begin, or ``None`` if they are not there."""
        at = len(self.stack)
        for kind in reversed(needs):
            above = at
            while kind in "mpf" and at and self.stack[at - 1] != "(":
                at -= 1
            inside = self.stack[at:above]
            at -= 1
            if at < 0 or (kind == "p" and len(inside) % 2) or (kind == "f" and inside[:1] != ["g"]):
                return None
            if kind not in "mpf" and (self.stack[at] == "(" or kind not in ("o", self.stack[at])):
                return None
        return at

    def add(self, op: Op) -> None:
        needs, leaves, write = op
        if self.operands(needs) is None:
            for kind in needs:
                self.out += PUSH[kind]
                self.stack += {"m": "(", "p": "(", "f": "(g"}.get(kind, kind)
        at = self.operands(needs)
        taken = self.stack[at:]
        del self.stack[at:]
        code = write(self.rng)
        if leaves == "=":
            self.remember(code, taken)
        elif leaves == "?":
            code, leaves = self.get()
        self.out += code
        self.stack += {"=": taken, "2": taken * 2}.get(leaves, list(leaves))

    def remember(self, code: bytes, taken: list[str]) -> None:
        index = {b"q": lambda: code[1], b"r": lambda: code[1] + 256 * code[2], b"\x94": lambda: len(dict(self.memo))}
        if code[:1] in index and taken[0] != "(":
            self.memo.append((index[code[:1]](), taken[0]))

    def get(self) -> tuple[bytes, str]:
        if not self.memo:
            return b"N", "o"
        index, kind = self.rng.choice(self.memo)
        forms = [b"j" + struct.pack("<I", index), b"g%d\n" % index, *([b"h" + bytes([index])] if index < 256 else [])]
        return self.rng.choice(forms), kind


def one_pickle(rng: Random) -> bytes:
    assembler = Assembler(rng)
    oddity = rng.choice([0, 0, 3, 20])
    for _ in range(rng.randrange(40)):
        assembler.add(rng.choice(ODD if rng.randrange(100) < oddity else GOOD))
    if assembler.stack[-1:] in ([], ["("]):
        assembler.out += b"N"
    if rng.randrange(12) == 0:  # in a frame as in protocol 4, sometimes of a wrong length
        length = len(assembler.out) + rng.choice([1, 1, 1, 0, 2, -3])
        return b"\x80\x04" + sized("\x95", 8, b"", max(length, 0)) + assembler.out + b"."
    return bytes(assembler.out) + b"."


def stream(rng: Random) -> bytes:
    """One to three pickles, sometimes truncated."""
    out = b"".join(one_pickle(rng) for _ in range(rng.choice([1, 1, 1, 2, 3])))
    return out[: -rng.randrange(1, 12)] if rng.randrange(8) == 0 else out


@fuzz(600)
@given(st.randoms(use_true_random=False))
def test_no_name_is_missed_in_any_stream_of_opcodes(rng: Random) -> None:
    check(stream(rng))


def test_generator_covers_every_opcode_and_makes_streams_that_load() -> None:
    """The test above proves nothing about opcodes that are never generated, or if no loader gets far."""
    streams = [stream(Random(seed)) for seed in range(300)]  # noqa: S311 - streams, not secrets
    covered = {code for data in streams for result in run_all(data) for _, code in opcodes(data, result.start)}
    assert {ord(opcode.code) for opcode in pickletools.opcodes} <= covered
    assert len(pickletools.opcodes) == 68
    outcomes = {name: [oracle(data) for data in streams] for name, oracle in ORACLES.items()}
    minimums = {"C": 100, "Python": 100, "C without peek": 100, "torch": 10}
    for name, minimum in minimums.items():
        if name not in ORACLES:
            continue
        assert sum(outcome.end is not None for outcome in outcomes[name]) > minimum, name
        assert sum(len(outcome.requested) for outcome in outcomes[name]) > 3 * minimum, name


# -- real pickles, damaged ---------------------------------------------------------------------------------------------


@functools.cache
def seeds() -> list[bytes]:
    """The pickles of real checkpoints of every format, and a small one in every protocol."""
    out = []
    for path in sorted((Path(__file__).parent.parent / "data" / "torch-releases").glob("*/*")):
        if path.suffix not in (".pt", ".ckpt"):
            continue
        raw = path.read_bytes()
        if raw[:4] == b"PK\3\4":
            with zipfile.ZipFile(io.BytesIO(raw)) as archive:
                out += [archive.read(name) for name in archive.namelist() if name.endswith(".pkl")]
        else:
            pickles = [result for result in run_all(raw) if not result.broken]
            out += [raw[result.start : result.end] for result in pickles]
            out.append(raw[: pickles[-1].end])
    out += [pickle.dumps({"a": [1.5, {2}, b"x", OSError], "b": "text"}, protocol) for protocol in range(6)]
    return sorted(set(out), key=len)


EDITS: list[Callable[[Random, bytes, int, int], bytes]] = [
    lambda rng, data, at, _: data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :],
    lambda rng, data, at, _: data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :],
    lambda rng, data, at, _: (
        data[:at] + bytes([rng.choice(pickletools.opcodes).code.encode("latin-1")[0]]) + data[at + 1 :]
    ),
    lambda _, data, at, __: data[: at + 1],
    lambda _, data, at, end: data[:at] + data[end:],
    lambda _, data, at, end: data[:end] + data[at:end] + data[end:],
    lambda rng, data, at, _: data[:at] + rng.randbytes(rng.randrange(9)) + data[at:],
    lambda rng, data, at, _: data[:at] + tail(rng, rng.choice(seeds())),
    lambda rng, data, at, _: data[:at] + tail(rng, rng.choice(seeds()))[:60] + data[at:],
]


def tail(rng: Random, data: bytes) -> bytes:
    return data[rng.randrange(len(data)) :]


def damaged(rng: Random) -> bytes:
    data = rng.choice(seeds())
    for _ in range(rng.randrange(1, 6)):
        at = rng.randrange(len(data))
        data = rng.choice(EDITS)(rng, data, at, min(len(data), at + rng.randrange(1, 40))) or data
    return data


@fuzz(250)
@given(st.randoms(use_true_random=False))
def test_no_name_is_missed_in_a_damaged_checkpoint(rng: Random) -> None:
    check(damaged(rng))


@fuzz(150)
@given(st.randoms(use_true_random=False))
def test_no_name_is_missed_in_a_checkpoint_with_inserted_opcodes(rng: Random) -> None:
    data = rng.choice(seeds())
    at = rng.choice([start for start, _ in opcodes(data)])
    check(data[:at] + one_pickle(rng)[:-1] + data[at:])


@each("index", range(len(seeds())))
def test_no_name_is_missed_in_a_real_checkpoint(index: int) -> None:
    data = seeds()[index]
    check(data)
    assert run(data).broken == ""
    assert ORACLES["C"](data).requested == set(run(data).globals)
