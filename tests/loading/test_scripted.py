"""Programs land on what is here: TorchScript archives and exported graphs, also those of an absent GPU."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.loading.equal import same
from tests.loading.zoo import QUIET
from torch import nn

import transload
from transload.errors import LoadError
from transload.formats import read_source
from transload.io.sources import open_source
from transload.loading.trusted import load_program
from transload.tensors import Piece

pytestmark = [
    *QUIET,
    # torch's own, when it exports or reads a program
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The given buffer is not writable"),
]

RELEASES = Path(__file__).parents[1] / "data" / "torch-releases"
H200 = Path(__file__).parents[1] / "data" / "h200"
SCRIPTS = sorted(RELEASES.glob("*/traced_cpu.pt"))
EXPORTED = H200 / "export_cuda0.pt2"


def everything_to(device: str) -> Callable[[str], str]:
    return lambda _: device


def load(f: Path | bytes, device_of: Callable[[str], str] = str) -> Any:
    source = open_source(f)
    path = str(f) if isinstance(f, Path) else ""
    try:
        return load_program(Piece(read_source(source), lambda _: source, path), device_of)
    finally:
        source.close()


def devices(held: dict[str, torch.Tensor]) -> set[str]:
    return {str(tensor.device) for tensor in held.values()}


# -- TorchScript -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path", [path for path in SCRIPTS if "torch-1.0.0" not in str(path)], ids=lambda p: p.parent.name
)
def test_a_script_is_what_torch_makes_of_it(path: Path) -> None:
    same(torch.jit.load(str(path)), load(path))
    same(torch.jit.load(str(path)), load(path.read_bytes()))


def test_a_script_of_an_absent_gpu_lands_on_the_cpu() -> None:
    path = H200 / "torchscript_cuda0.pt"
    made = load(path, everything_to("cpu"))
    same(torch.jit.load(str(path), map_location="cpu"), made)
    assert devices(made.state_dict()) == {"cpu"}


def test_a_script_of_several_devices_lands_on_the_one_that_is_no_cpu() -> None:
    held = io.BytesIO()
    torch.jit.save(torch.jit.script(nn.Linear(2, 2)), held)
    made = load(held.getvalue(), everything_to("meta"))
    assert devices(made.state_dict()) == {"meta"}


def test_a_script_that_torch_cannot_read_is_told_in_a_line() -> None:
    with pytest.raises(LoadError, match=r"torch\.jit\.load cannot load this program") as caught:
        load(RELEASES / "torch-1.0.0-py2.7.18" / "traced_cpu.pt")
    assert len(str(caught.value).splitlines()) == 2
    assert torch.__version__ in caught.value.fix
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_operators_that_are_missing_are_named() -> None:
    held = io.BytesIO()
    torch.jit.save(torch.jit.script(nn.ReLU()), held)
    name = b"torch.relu(input)"
    data = held.getvalue()
    assert b"torch.relu" in data or b"relu" in data
    foreign = _replaced(data, name, b"ops.torchvision.nms(input)")
    with pytest.raises(LoadError, match="torchvision") as caught:
        load(foreign)
    assert "import torchvision" in caught.value.fix


def _replaced(data: bytes, old: bytes, new: bytes) -> bytes:
    """The archive with a text replaced in its code."""
    import zipfile

    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as before, zipfile.ZipFile(out, "w") as after:
        for name in before.namelist():
            raw = before.read(name)
            after.writestr(name, raw.replace(old, new) if name.endswith(".py") else raw)
    return out.getvalue()


# -- torch.export ------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 2)
        self.register_buffer("scale", torch.rand(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x) * self.scale + torch.ones(2, device=x.device)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("export") / "net.pt2"
    torch.default_generator.manual_seed(0)
    torch.export.save(torch.export.export(Net(), (torch.rand(4, 3),)), path)
    return path


def test_an_exported_program_is_what_torch_makes_of_it(program: Path) -> None:
    same(torch.export.load(program), load(program))
    same(torch.export.load(program), load(program.read_bytes()))


def test_it_runs_and_gives_the_same(program: Path) -> None:
    made, x = load(program), torch.rand(4, 3)
    assert torch.equal(made.module()(x), torch.export.load(program).module()(x))


def test_a_name_that_is_not_that_of_a_program_is_no_matter(program: Path, tmp_path: Path) -> None:
    other = tmp_path / "net.pt"
    other.write_bytes(program.read_bytes())
    same(torch.export.load(program), load(other))


def test_it_can_be_moved_whole(program: Path) -> None:
    made = load(program, everything_to("meta"))
    assert devices(made.state_dict) == {"meta"}
    assert "device(type='cpu')" not in made.graph_module.code
    if made.example_inputs is not None:  # since torch 2.2
        assert {str(x.device) for x in made.example_inputs[0]} == {"meta"}


def test_moving_is_what_torchs_own_pass_does(program: Path) -> None:
    passes = pytest.importorskip("torch.export.passes", reason="this torch has no pass that moves a program")
    moved = passes.move_to_device_pass(torch.export.load(program), "meta")
    moved.graph_module.recompile()  # it changes the graph, and leaves the code
    made = load(program, everything_to("meta"))
    assert made.graph_module.code.replace("device(type='meta')", "'meta'") == moved.graph_module.code
    assert {key: value.device for key, value in made.state_dict.items()} == {
        key: value.device for key, value in moved.state_dict.items()
    }


def current_archive() -> bool:
    """Whether this torch writes and reads programs as the fixture was written."""
    return importlib.util.find_spec("torch.export.pt2_archive") is not None


@pytest.mark.skipif(not current_archive(), reason="this torch reads only older archives")
def test_a_program_of_an_absent_gpu_runs_on_the_cpu() -> None:
    made = load(EXPORTED, everything_to("cpu"))
    assert devices(made.state_dict) == {"cpu"}
    inputs = [torch.rand(x.shape) for x in made.example_inputs[0]]
    script = torch.jit.load(str(H200 / "torchscript_cuda0.pt"), map_location="cpu").eval()
    torch.testing.assert_close(made.module()(*inputs), script(*inputs))


def test_a_program_that_torch_cannot_read_is_told_in_a_line(tmp_path: Path) -> None:
    import zipfile

    path = tmp_path / "broken.pt2"
    with zipfile.ZipFile(EXPORTED) as before, zipfile.ZipFile(path, "w") as after:
        for name in before.namelist():
            after.writestr(name, b"{}" if name.endswith(".json") else before.read(name))
    with pytest.raises(LoadError, match=r"torch\.export\.load cannot load this program"):
        load(path, everything_to("cpu"))


def test_an_exported_program_moved_for_good(data: Path, tmp_path: Path) -> None:
    """What ``retag`` advises for one: torch's own loader then needs no GPU."""
    path, moved = data / "h200" / "export_cuda0.pt2", tmp_path / "moved.pt2"
    try:
        program = transload.load(path, "cpu", weights_only=False)
    except LoadError:
        pytest.skip("this torch cannot read what that release exported")
    torch.export.save(program, moved)
    again = torch.export.load(moved)
    assert {value.device.type for value in again.state_dict.values()} == {"cpu"}
