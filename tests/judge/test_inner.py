"""What a file reaches inside a class with ``getattr``: nested classes, and methods that create objects."""

from __future__ import annotations

import datetime as dt
import io
import sys
import zoneinfo
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests import forge, makers
from tests.release import needs_torch

import transload

pytestmark = needs_torch(2, 6)


class Outer:
    class Inner:
        def __init__(self) -> None:
            self.x = 1

        class Innermost:
            y = 2

    def __init__(self, value: int = 0) -> None:
        self.value = value

    @classmethod
    def make(cls, value: int) -> Outer:
        return cls(value)

    def __reduce__(self) -> Any:
        return Outer.make, (self.value,)


WHEN = dt.datetime(2024, 1, 2, 3, 4, tzinfo=zoneinfo.ZoneInfo("UTC"))
ZONED = [dt.datetime, zoneinfo.ZoneInfo, getattr(zoneinfo.ZoneInfo, "_unpickle")]  # noqa: B009 - not in the stubs
CASES: dict[str, tuple[Any, list[Any]]] = {
    "nested": (Outer.Inner(), [Outer, Outer.Inner]),
    "nested twice": (Outer.Inner.Innermost(), [Outer, Outer.Inner.Innermost]),
    "class method": (Outer(3), [Outer, Outer.make]),
    "time zone": (WHEN, ZONED),
    "in a state dict": ({"w": torch.ones(2), "when": WHEN}, ZONED),
}


@pytest.fixture(autouse=True)
def _restore_safe_globals() -> Iterator[None]:
    before = torch.serialization.get_safe_globals()
    sys.modules.setdefault(__name__, sys.modules[Outer.__module__])
    yield
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals(before)


def saved(name: str) -> bytes:
    return makers.saved(CASES[name][0])


@pytest.mark.parametrize("name", CASES)
def test_getattr_on_a_class_needs_trust(name: str) -> None:
    checkpoint = transload.inspect(saved(name))
    assert checkpoint.safety == "needs-trust"
    (evidence,) = (finding.evidence for finding in checkpoint.findings if finding.code == "needs-trust")
    last = CASES[name][1][-1]
    assert any(f"{last.__qualname__}: called, found inside a class" in line for line in evidence)
    if last is ZONED[-1]:
        return  # transload.load builds it without trust
    with pytest.raises(transload.UnsafeError, match="not allowed"):
        transload.load(saved(name))


@pytest.mark.parametrize("name", CASES)
def test_load_after_add_safe_globals_equals_torch(name: str) -> None:
    torch.serialization.add_safe_globals([getattr, *CASES[name][1]])
    expected = torch.load(io.BytesIO(saved(name)), weights_only=True)
    loaded = transload.load(saved(name))
    assert type(loaded) is type(expected)
    assert getattr(loaded, "__dict__", 0) == getattr(expected, "__dict__", 0)
    if name == "time zone":
        assert loaded == expected == WHEN


@pytest.mark.parametrize("name", ["nested", "nested twice", "class method"])
def test_allowing_getattr_alone_is_not_enough(name: str) -> None:
    """As in torch, what ``getattr`` returns must be allowed too."""
    torch.serialization.add_safe_globals([getattr, *CASES[name][1][:-1]])
    with pytest.raises(Exception, match=r"not in allowed|Trying to call|create new object"):
        torch.load(io.BytesIO(saved(name)), weights_only=True)
    with pytest.raises(transload.UnsafeError, match="which is not allowed"):
        transload.load(saved(name))


@pytest.mark.parametrize("name", ["nested", "nested twice", "class method", "time zone"])
def test_printed_lines_load_the_file(name: str) -> None:
    (fix,) = (finding.fix for finding in transload.inspect(saved(name)).findings if finding.code == "needs-trust")
    lines = [line for line in fix if not line.startswith(("$", "This extracts"))]
    for load in (torch.load, transload.load):
        code = "\n".join(lines).replace("torch.load", "load")
        exec(code, {"load": load, "path": io.BytesIO(saved(name))})  # noqa: S102 - the lines we tell users to paste


def getattr_of(module: str, name: str, *attributes: str) -> bytes:
    """``getattr(getattr(module.name, …), …)``."""
    body = forge.name(module, name)
    for attribute in attributes:
        body = b"cbuiltins\ngetattr\n" + body + forge.text(attribute) + b"\x86R"
    return body


@pytest.mark.parametrize(
    ("module", "name", "attributes"),
    [
        ("mymodel", "np", ("load",)),
        ("mymodel", "Net", ("__init__", "__globals__")),
        ("mymodel", "Net", ("forward", "call")),
        ("mymodel", "Net", ("__class__",)),
        ("mymodel", "Net", ("_os.system",)),
        ("builtins", "str", ("format",)),
        ("torch.nn.modules.module", "Module", ("apply",)),
        ("pathlib", "Path", ("write_text",)),
        ("zoneinfo", "ZoneInfo", ("from_file",)),
        ("pandas", "DataFrame", ("to_pickle",)),
        ("transformers", "AutoModel", ("from_pretrained",)),
        ("mymodel", "Net", ("A",) * 12),
    ],
)
def test_call_of_any_other_attribute_is_dangerous(module: str, name: str, attributes: tuple[str, ...]) -> None:
    data = forge.checkpoint(forge.pickled(getattr_of(module, name, *attributes) + b")R"))
    assert transload.inspect(data).safety == "dangerous"
