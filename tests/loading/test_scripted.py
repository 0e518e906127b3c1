"""Loading programs: TorchScript archives and exported graphs, also those saved on an absent GPU."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.loading.equal import assert_same
from tests.loading.zoo import IGNORED_WARNINGS
from torch import nn

import transload
from transload.errors import LoadError
from transload.formats import read_source
from transload.io.paths import open_source
from transload.loading.trusted import load_program
from transload.opening import CheckpointFile

pytestmark = [
    *IGNORED_WARNINGS,
    # torch raises these itself when it exports or reads a program
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The given buffer is not writable"),
]

RELEASES = Path(__file__).parents[1] / "data" / "torch-releases"
H200 = Path(__file__).parents[1] / "data" / "h200"
SCRIPTS = sorted(RELEASES.glob("*/traced_cpu.pt"))
EXPORTED = H200 / "export_cuda0.pt2"


def all_to(device: str) -> Callable[[str], str]:
    return lambda _: device


def load(f: Path | bytes, device_of: Callable[[str], str] = str) -> Any:
    source = open_source(f)
    path = str(f) if isinstance(f, Path) else ""
    try:
        return load_program(CheckpointFile(read_source(source), lambda _: source, path), device_of)
    finally:
        source.close()


def devices(tensors: dict[str, torch.Tensor]) -> set[str]:
    return {str(tensor.device) for tensor in tensors.values()}


# -- TorchScript -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path", [path for path in SCRIPTS if "torch-1.0.0" not in str(path)], ids=lambda p: p.parent.name
)
def test_script_loads_as_with_torch(path: Path) -> None:
    assert_same(torch.jit.load(str(path)), load(path))
    assert_same(torch.jit.load(str(path)), load(path.read_bytes()))


def test_script_of_an_absent_gpu_loads_on_cpu() -> None:
    path = H200 / "torchscript_cuda0.pt"
    script = load(path, all_to("cpu"))
    assert_same(torch.jit.load(str(path), map_location="cpu"), script)
    assert devices(script.state_dict()) == {"cpu"}


def test_script_is_moved_to_the_chosen_device() -> None:
    buffer = io.BytesIO()
    torch.jit.save(torch.jit.script(nn.Linear(2, 2)), buffer)
    script = load(buffer.getvalue(), all_to("meta"))
    assert devices(script.state_dict()) == {"meta"}


def test_script_that_torch_cannot_read_is_a_short_load_error() -> None:
    with pytest.raises(LoadError, match=r"torch\.jit\.load cannot load this program") as caught:
        load(RELEASES / "torch-1.0.0-py2.7.18" / "traced_cpu.pt")
    assert len(str(caught.value).splitlines()) == 2
    assert torch.__version__ in caught.value.fix
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_missing_operators_are_reported_with_the_package_to_import() -> None:
    buffer = io.BytesIO()
    torch.jit.save(torch.jit.script(nn.ReLU()), buffer)
    call = b"torch.relu(input)"
    data = buffer.getvalue()
    assert b"torch.relu" in data or b"relu" in data
    foreign = _with_code_replaced(data, call, b"ops.torchvision.nms(input)")
    with pytest.raises(LoadError, match="torchvision") as caught:
        load(foreign)
    assert "import torchvision" in caught.value.fix


def _with_code_replaced(data: bytes, old: bytes, new: bytes) -> bytes:
    """The archive with some text of its code replaced."""
    import zipfile

    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as before, zipfile.ZipFile(buffer, "w") as after:
        for name in before.namelist():
            raw = before.read(name)
            after.writestr(name, raw.replace(old, new) if name.endswith(".py") else raw)
    return buffer.getvalue()


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


def test_exported_program_loads_as_with_torch(program: Path) -> None:
    assert_same(torch.export.load(program), load(program))
    assert_same(torch.export.load(program), load(program.read_bytes()))


def test_loaded_program_computes_the_same_as_with_torch(program: Path) -> None:
    loaded, x = load(program), torch.rand(4, 3)
    assert torch.equal(loaded.module()(x), torch.export.load(program).module()(x))


def test_exported_program_loads_under_another_suffix(program: Path, tmp_path: Path) -> None:
    renamed = tmp_path / "net.pt"
    renamed.write_bytes(program.read_bytes())
    assert_same(torch.export.load(program), load(renamed))


def test_exported_program_is_moved_completely(program: Path) -> None:
    moved = load(program, all_to("meta"))
    assert devices(moved.state_dict) == {"meta"}
    assert "device(type='cpu')" not in moved.graph_module.code
    if moved.example_inputs is not None:  # since torch 2.2
        assert {str(x.device) for x in moved.example_inputs[0]} == {"meta"}


def test_moved_program_equals_result_of_torch_move_to_device_pass(program: Path) -> None:
    passes = pytest.importorskip("torch.export.passes", reason="this torch has no pass that moves a program")
    expected = passes.move_to_device_pass(torch.export.load(program), "meta")
    expected.graph_module.recompile()  # the pass changes the graph but not the code
    moved = load(program, all_to("meta"))
    assert moved.graph_module.code.replace("device(type='meta')", "'meta'") == expected.graph_module.code
    assert {key: value.device for key, value in moved.state_dict.items()} == {
        key: value.device for key, value in expected.state_dict.items()
    }


def has_current_archive() -> bool:
    """Whether this torch reads and writes the archive format of the fixture."""
    return importlib.util.find_spec("torch.export.pt2_archive") is not None


@pytest.mark.skipif(not has_current_archive(), reason="this torch reads only older archives")
def test_program_of_an_absent_gpu_runs_on_cpu() -> None:
    loaded = load(EXPORTED, all_to("cpu"))
    assert devices(loaded.state_dict) == {"cpu"}
    inputs = [torch.rand(x.shape) for x in loaded.example_inputs[0]]
    script = torch.jit.load(str(H200 / "torchscript_cuda0.pt"), map_location="cpu").eval()
    torch.testing.assert_close(loaded.module()(*inputs), script(*inputs))


def test_program_that_torch_cannot_read_is_a_load_error(tmp_path: Path) -> None:
    import zipfile

    path = tmp_path / "broken.pt2"
    with zipfile.ZipFile(EXPORTED) as before, zipfile.ZipFile(path, "w") as after:
        for name in before.namelist():
            after.writestr(name, b"{}" if name.endswith(".json") else before.read(name))
    with pytest.raises(LoadError, match=r"torch\.export\.load cannot load this program"):
        load(path, all_to("cpu"))


def test_program_moved_to_cpu_and_saved_needs_no_gpu(data: Path, tmp_path: Path) -> None:
    """``retag`` recommends this for an exported program: ``torch.export.load`` then needs no GPU."""
    path, moved = data / "h200" / "export_cuda0.pt2", tmp_path / "moved.pt2"
    try:
        program = transload.load(path, "cpu", weights_only=False)
    except LoadError:
        pytest.skip("this torch cannot read the exported fixture")
    torch.export.save(program, moved)
    reloaded = torch.export.load(moved)
    assert {value.device.type for value in reloaded.state_dict.values()} == {"cpu"}
