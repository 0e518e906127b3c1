"""Names that reach a module through another module are judged by what they resolve to, without importing anything."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests import forge

import transload
from transload.checkpoint import GlobalUse
from transload.cli.main import main
from transload.judge.names import classify
from transload.judge.safety import safe_globals_lines

if TYPE_CHECKING:
    from tests.judge.conftest import Alone

HIDDEN = [
    *(("random", "_os.system"), ("argparse", "_os.system"), ("collections", "_sys.modules"), ("shutil", "os.system")),
    *(("torch._utils", "torch.load"), ("torch", "os.system"), ("logging", "sys.modules"), ("typing", "sys.modules")),
    *(("inspect", "builtins.eval"), ("os.path", "os.system"), ("posixpath", "genericpath.os.system")),
    *(("numpy._core._methods", "os.system"), ("torch.nn.modules.conv", "F.torch.load"), ("random", "_os")),
    *(("torch.utils.data.dataloader", "_utils.worker.os.system"), ("uuid", "platform._os.system")),
    *(("mymodel", "_os.system"), ("mymodel", "numpy.load"), ("mymodel", "io.open"), ("mymodel", "torch.hub.load")),
    *(("six.moves.builtins", "eval"), ("package.six.moves.cPickle", "loads")),
]
NESTED = [
    ("mymodel", "Outer.Inner"),
    ("mymodel", "Colour.RED"),
    ("mymodel", "_Net.Block.forward"),
    ("__main__", "A.B.C"),
]


@pytest.mark.parametrize(("module", "name"), HIDDEN)
def test_dangerous_name_reached_through_another_module_is_dangerous(module: str, name: str) -> None:
    assert classify(module, name)[0] == "dangerous"


def test_no_module_attribute_of_python_torch_or_numpy_hides_a_dangerous_name(alone: Alone) -> None:
    """Checks the modules that are really imported, under their real aliases."""
    assert alone.pairs > 1000
    assert alone.missed == []


@pytest.mark.parametrize(("module", "name"), NESTED)
def test_nested_class_is_unknown_and_can_be_allowed(module: str, name: str) -> None:
    assert classify(module, name)[0] == "unknown"
    assert safe_globals_lines([GlobalUse(module, name, "unknown", "")])[-2].startswith("with torch.serialization.safe")


@pytest.mark.parametrize("name", ["np.load", "net.block", "function.attribute", "_os.system", "F.relu"])
def test_no_safe_globals_lines_for_attributes_of_non_classes(name: str) -> None:
    assert safe_globals_lines([GlobalUse("mymodel", name, "unknown", "")]) == ()


def test_dotted_name_with_100_000_parts_is_dangerous() -> None:
    assert classify("random", "random." * 100_000 + "x")[0] == "dangerous"
    assert classify("mymodel", "A." * 100_000 + "x")[0] == "dangerous"


@pytest.mark.parametrize(("module", "name"), HIDDEN)
def test_hidden_module_is_reported_and_never_allowed_or_imported(
    module: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = forge.text(module) + forge.text(name) + b"\x93"  # STACK_GLOBAL
    (tmp_path / "x.pt").write_bytes(forge.checkpoint(forge.pickled(forge.dictionary({"w": body}), 4)))
    before = set(sys.modules)
    assert main(["inspect", str(tmp_path / "x.pt")]) == 1
    output = capsys.readouterr().out
    assert "dangerous" in output
    assert "safe_globals" not in output
    with pytest.raises(transload.TransloadError) as caught:
        transload.load(tmp_path / "x.pt")
    assert "safe_globals" not in str(caught.value)
    assert not {
        imported for imported in set(sys.modules) - before if imported.startswith(("six", "mymodel", "package"))
    }
