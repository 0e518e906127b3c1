"""Names that reach a module through another one that has imported it: judged by where they end, without an import."""

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
def test_a_name_that_passes_through_a_module_is_judged_by_where_it_ends(module: str, name: str) -> None:
    assert classify(module, name)[0] == "dangerous"


def test_every_module_that_a_module_of_python_torch_or_numpy_has(alone: Alone) -> None:
    """The real ones, under the names they have there."""
    assert alone.pairs > 1000
    assert alone.missed == []


@pytest.mark.parametrize(("module", "name"), NESTED)
def test_a_class_in_a_class_is_a_matter_of_trust_and_can_be_allowed(module: str, name: str) -> None:
    assert classify(module, name)[0] == "unknown"
    assert safe_globals_lines([GlobalUse(module, name, "unknown", "")])[-2].startswith("with torch.serialization.safe")


@pytest.mark.parametrize("name", ["np.load", "net.block", "function.attribute", "_os.system", "F.relu"])
def test_no_line_allows_what_is_reached_through_no_class(name: str) -> None:
    assert safe_globals_lines([GlobalUse("mymodel", name, "unknown", "")]) == ()


def test_a_name_that_never_ends() -> None:
    assert classify("random", "random." * 100_000 + "x")[0] == "dangerous"
    assert classify("mymodel", "A." * 100_000 + "x")[0] == "dangerous"


@pytest.mark.parametrize(("module", "name"), HIDDEN)
def test_inspect_and_load_say_so_and_print_no_line_that_allows_it(
    module: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = forge.text(module) + forge.text(name) + b"\x93"  # STACK_GLOBAL
    (tmp_path / "x.pt").write_bytes(forge.checkpoint(forge.pickled(forge.dictionary({"w": body}), 4)))
    before = set(sys.modules)
    assert main(["inspect", str(tmp_path / "x.pt")]) == 1
    shown = capsys.readouterr().out
    assert "dangerous" in shown
    assert "safe_globals" not in shown
    with pytest.raises(transload.TransloadError) as caught:
        transload.load(tmp_path / "x.pt")
    assert "safe_globals" not in str(caught.value)
    assert not {each for each in set(sys.modules) - before if each.startswith(("six", "mymodel", "package"))}
