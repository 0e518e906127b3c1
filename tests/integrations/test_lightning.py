"""``transload.LightningCheckpointIO`` in a real ``Trainer`` and ``Fabric``, beside the plugin that is built in."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import transload
from transload.formats.torch_zip import RECORD
from transload.saving.background import Saving, background

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning gives advice by warnings
SOURCE = Path(transload.__file__).parent.parent
NAMES = ("lightning", "pytorch_lightning")


@pytest.fixture(params=NAMES)
def lightning(request: pytest.FixtureRequest) -> Any:
    """One of the two packages."""
    if find_spec(request.param) is None:
        pytest.skip(f"needs {request.param}: make test-integrations")
    return import_module(request.param)


@pytest.fixture(autouse=True)
def _finished() -> Iterator[None]:
    """No save of one test goes on in the next."""
    yield
    background.wait()
    background.take_unseen()


def assert_same(a: Any, b: Any) -> None:
    """Two values have the same types and the same numbers, to the last bit."""
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert list(a) == list(b)
        assert_same([*a.values()], [*b.values()])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for one, other in zip(a, b, strict=True):
            assert_same(one, other)
    else:
        assert (type(a), a) == (type(b), b)


def model_of(lightning: Any) -> Any:
    """A model whose training depends on all that a checkpoint must bring back."""

    class Net(lightning.LightningModule):
        def __init__(self, width: int = 4, name: str = "net") -> None:  # noqa: ARG002 - a hyperparameter
            super().__init__()
            self.save_hyperparameters()
            self.layers = torch.nn.Sequential(
                torch.nn.Linear(8, width), torch.nn.BatchNorm1d(width), torch.nn.Linear(width, 1)
            )

        def training_step(self, batch: Any, _: int) -> Any:
            loss = self.layers(batch[0]).square().mean()
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
            return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, 100)}

    torch.manual_seed(0)
    return Net()


def trainer_of(lightning: Any, folder: Path, plugins: list[Any], epochs: int = 2, **options: Any) -> Any:
    """A trainer that saves the best and the last checkpoint in a folder, and nothing else."""
    callbacks = import_module(f"{lightning.__name__}{'.pytorch' * (lightning.__name__ == 'lightning')}.callbacks")
    keep = callbacks.ModelCheckpoint(folder, monitor="loss", save_top_k=1, save_last=True)
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    options = {"callbacks": [keep], "accelerator": "cpu", "devices": 1, **quiet, **options}
    return lightning.Trainer(max_epochs=epochs, plugins=plugins, default_root_dir=folder, **options)


def fit(
    lightning: Any, folder: Path, plugins: list[Any], epochs: int = 2, resume: Path | None = None, **options: Any
) -> tuple[Any, dict[str, Any]]:
    """Train; the trainer, and the weights."""
    model = model_of(lightning)
    trainer = trainer_of(lightning, folder, plugins, epochs, **options)
    data = torch.utils.data.TensorDataset(torch.randn(32, 8, generator=torch.Generator().manual_seed(0)))
    trainer.fit(
        model, torch.utils.data.DataLoader(data, batch_size=8), ckpt_path=None if resume is None else str(resume)
    )
    return trainer, model.state_dict()


def contents(folder: Path) -> dict[str, Any]:
    """The checkpoints in a folder, as torch loads them, without the paths in them."""
    checkpoints = {path.name: torch.load(path, weights_only=True) for path in sorted(folder.glob("*.ckpt"))}
    for checkpoint in checkpoints.values():
        checkpoint["callbacks"] = {
            name: {key: value for key, value in state.items() if "path" not in key and "dir" not in key}
            for name, state in checkpoint["callbacks"].items()
        }
        for path in ("best_k_models",):
            for state in checkpoint["callbacks"].values():
                state[path] = [*state[path].values()]
    return checkpoints


def asynchronous(lightning: Any, plugin: Any) -> Any:
    """Lightning's own plugin for saves in the background, around ours."""
    home = f"{lightning.__name__}{'.pytorch' * (lightning.__name__ == 'lightning')}"
    return import_module(f"{home}.plugins.io").AsyncCheckpointIO(plugin)


PLUGINS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda _: transload.LightningCheckpointIO(),
    "background": lambda _: transload.LightningCheckpointIO(background=True),
    "in AsyncCheckpointIO": lambda lightning: asynchronous(lightning, transload.LightningCheckpointIO()),
}


@pytest.mark.parametrize("make", PLUGINS.values(), ids=PLUGINS)
def test_training_and_resuming_are_as_with_the_built_in_plugin(
    lightning: Any, make: Callable[[Any], Any], tmp_path: Path
) -> None:
    builtin, ours = tmp_path / "builtin", tmp_path / "ours"
    plugin = make(lightning)
    weights = fit(lightning, builtin, [])[1]
    trainer, again = fit(lightning, ours, [plugin])
    assert trainer.strategy.checkpoint_io is plugin
    assert_same(again, weights)
    assert_same(contents(ours), contents(builtin))
    assert len(contents(ours)) == 2
    assert all(RECORD.encode() in path.read_bytes() for path in ours.iterdir())

    weights = fit(lightning, tmp_path / "more", [], 4, builtin / "last.ckpt")[1]
    trainer, again = fit(lightning, tmp_path / "after", [make(lightning)], 4, ours / "last.ckpt")
    assert trainer.global_step == 16
    assert_same(again, weights)
    crossed = fit(lightning, tmp_path / "crossed", [], 4, ours / "last.ckpt")[1]
    assert_same(crossed, weights)


def test_what_fabric_saves_it_loads(lightning: Any, tmp_path: Path) -> None:
    if lightning.__name__ == "pytorch_lightning":
        lightning = pytest.importorskip("lightning_fabric")
    fabric = (getattr(lightning, "fabric", None) or lightning).Fabric(
        accelerator="cpu", devices=1, plugins=transload.LightningCheckpointIO()
    )
    layer = torch.nn.Linear(2, 2)
    model, optimizer = fabric.setup(layer, torch.optim.SGD(layer.parameters(), lr=0.1))
    path = tmp_path / "folder" / "state.ckpt"
    fabric.save(path, {"model": model, "optimizer": optimizer, "step": 3})
    expected = {name: value.clone() for name, value in layer.state_dict().items()}
    torch.nn.init.zeros_(layer.weight)
    state = {"model": model, "optimizer": optimizer, "step": 0}
    assert fabric.load(path, state) == {}
    assert state["step"] == 3
    assert_same(dict(layer.state_dict()), expected)


def test_a_checkpoint_from_a_gpu_resumes_here(lightning: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("torch.serialization.location_tag", lambda _: "cuda:0")
        expected = fit(lightning, tmp_path, [])[1]
    path = tmp_path / "last.ckpt"
    assert transload.inspect(path).storages[0].device == "cuda:0"
    trainer, weights = fit(lightning, tmp_path / "resumed", [transload.LightningCheckpointIO()], 2, path)
    assert trainer.global_step == 8
    assert_same(weights, expected)


DYING = """
import os, signal, sys
import lightning, torch, transload
from tests.integrations.test_lightning import fit
from pathlib import Path

path = Path(sys.argv[1])
trainer, _ = fit(lightning, path, [transload.LightningCheckpointIO()], 1)
trainer.save_checkpoint(path / "last.ckpt", storage_options={
    "progress": lambda done, total: done > total // 2 and os.kill(os.getpid(), signal.SIGKILL)
})
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
def test_the_old_checkpoint_survives_a_process_that_is_killed_while_it_saves(tmp_path: Path) -> None:
    if find_spec("lightning") is None:
        pytest.skip("needs lightning: make test-integrations")
    path = os.pathsep.join((str(SOURCE), str(SOURCE.parent)))
    environment = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, "-W", "ignore", "-c", DYING, str(tmp_path)]
    process = subprocess.run(command, env=environment, capture_output=True, timeout=300, check=False)
    assert process.returncode == -signal.SIGKILL, process.stderr.decode()
    assert torch.load(tmp_path / "last.ckpt")["global_step"] == 4
    assert [name for name in os.listdir(tmp_path) if name.endswith(".part")]


SHARDED = """
import sys
import lightning, torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard

class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 5)

    def configure_model(self):
        fully_shard(self.layer, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch, _):
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.1)

if __name__ == "__main__":
    torch.manual_seed(0)
    model = Net()
    data = torch.utils.data.TensorDataset(torch.ones(8, 8))
    trainer = lightning.Trainer(
        strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo"),
        devices=2, accelerator="cpu", max_steps=2, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=sys.argv[1],
    )
    trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=2))
    trainer.save_checkpoint(f"{sys.argv[1]}/sharded.ckpt")
    full = {name: value.full_tensor() for name, value in model.state_dict().items()}
    if trainer.global_rank == 0:
        torch.save(full, f"{sys.argv[1]}/full.pt")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs gloo")
def test_sharded_checkpoints_of_lightning_are_read_without_its_plugin(tmp_path: Path) -> None:
    if find_spec("lightning") is None:
        pytest.skip("needs lightning: make test-integrations")
    script = tmp_path / "sharded.py"
    script.write_text(SHARDED, encoding="utf-8")
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", str(script), str(tmp_path)]
    process = subprocess.run(command, env=environment, capture_output=True, timeout=300, check=False)
    assert process.returncode == 0, process.stderr.decode()
    expected = torch.load(tmp_path / "full.pt")
    path = tmp_path / "sharded.ckpt"
    assert_same(dict(transload.load(path)["state_dict"]), expected)
    model = torch.nn.ModuleDict({"layer": torch.nn.Linear(8, 5)})
    transload.load_into(model, path)
    assert_same(dict(model.state_dict()), expected)
    assert transload.LightningCheckpointIO().load_checkpoint(path)["global_step"] == 2


# -- the plugin alone: without Lightning, too


def test_errors_are_those_of_save_and_load(tmp_path: Path) -> None:
    plugin = transload.LightningCheckpointIO()
    with pytest.raises(FileNotFoundError):
        plugin.load_checkpoint(tmp_path / "absent.ckpt")
    plugin.save_checkpoint({"hook": len}, tmp_path / "a.ckpt")
    with pytest.raises(transload.UnsafeError):
        plugin.load_checkpoint(tmp_path / "a.ckpt", weights_only=None)
    assert plugin.load_checkpoint(tmp_path / "a.ckpt", weights_only=False) == {"hook": len}
    trusting = transload.LightningCheckpointIO(weights_only=False)
    assert trusting.load_checkpoint(tmp_path / "a.ckpt") == {"hook": len}
    with pytest.raises(transload.UnsafeError):
        trusting.load_checkpoint(tmp_path / "a.ckpt", weights_only=True)
    with pytest.raises(transload.UsageError, match="storage_options"):
        plugin.save_checkpoint({}, tmp_path / "b.ckpt", storage_options=3)
    (tmp_path / "file").touch()
    with pytest.raises(transload.CannotWriteError):
        plugin.save_checkpoint({}, tmp_path / "file" / "b.ckpt")


def test_storage_options_are_options_of_save(tmp_path: Path) -> None:
    value = {"part": torch.zeros(100_000)[:4]}
    plugin = transload.LightningCheckpointIO()
    plugin.save_checkpoint(value, tmp_path / "new" / "a.ckpt", storage_options={"compact": True, "origin": {"run": 7}})
    assert (tmp_path / "new" / "a.ckpt").stat().st_size < 10_000
    assert b'"run": 7' in (tmp_path / "new" / "a.ckpt").read_bytes()


def test_files_and_folders_are_removed_and_absent_ones_ignored(tmp_path: Path) -> None:
    plugin = transload.LightningCheckpointIO()
    (tmp_path / "folder" / "inner").mkdir(parents=True)
    (tmp_path / "file").touch()
    for name in ("file", "folder", "absent"):
        plugin.remove_checkpoint(tmp_path / name)
    assert not list(tmp_path.iterdir())


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Saves in the background wait until this is set."""
    event = threading.Event()
    write = Saving.run

    def run(saving: Any) -> None:
        assert event.wait(60)
        write(saving)

    monkeypatch.setattr(Saving, "run", run)
    yield event
    event.set()
    background.wait()


def test_in_the_background_an_old_checkpoint_stays_until_the_new_one_is_there(
    tmp_path: Path, gate: threading.Event
) -> None:
    plugin = transload.LightningCheckpointIO(background=True)
    old, new = tmp_path / "old.ckpt", tmp_path / "new.ckpt"
    transload.save({"step": 1}, old)
    tensor = torch.ones(3)
    plugin.save_checkpoint({"weight": tensor}, new)
    tensor.zero_()
    plugin.remove_checkpoint(old)
    assert old.exists()
    assert not new.exists()
    assert pickle.loads(pickle.dumps(plugin)).background  # as ddp_spawn does
    gate.set()
    plugin.teardown()
    assert not old.exists()
    assert plugin.load_checkpoint(new)["weight"].tolist() == [1, 1, 1]


def test_in_the_background_a_load_waits_for_the_save(tmp_path: Path, gate: threading.Event) -> None:
    plugin = transload.LightningCheckpointIO(background=True)
    plugin.save_checkpoint({"step": 1}, tmp_path / "a.ckpt")
    threading.Timer(0.1, gate.set).start()
    assert plugin.load_checkpoint(tmp_path / "a.ckpt") == {"step": 1}


def test_in_the_background_a_failed_save_is_raised_and_keeps_the_old_checkpoint(
    tmp_path: Path, gate: threading.Event
) -> None:
    plugin = transload.LightningCheckpointIO(background=True)
    transload.save({"step": 1}, tmp_path / "old.ckpt")
    plugin.save_checkpoint({"step": 2}, tmp_path / "new" / "a.ckpt")
    plugin.remove_checkpoint(tmp_path / "old.ckpt")
    shutil.rmtree(tmp_path / "new")
    gate.set()
    with pytest.raises(transload.CannotWriteError):
        plugin.teardown()
    background.wait()
    assert transload.load(tmp_path / "old.ckpt") == {"step": 1}
    plugin.teardown()


def test_processes_that_a_strategy_starts_wait_for_each_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parent reads the file as soon as the child has sent its path."""
    plugin = pickle.loads(pickle.dumps(transload.LightningCheckpointIO(background=True)))
    submitted: list[Any] = []
    monkeypatch.setattr(background, "submit", lambda *_: submitted.append(_))
    monkeypatch.setattr(multiprocessing, "parent_process", object)
    plugin.save_checkpoint({"step": 1}, tmp_path / "a.ckpt")
    assert submitted == []
    assert transload.load(tmp_path / "a.ckpt") == {"step": 1}


def test_what_fsspec_opens_is_saved_whole_loaded_and_removed() -> None:
    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")
    plugin, url = transload.LightningCheckpointIO(background=True), "memory://runs/a.ckpt"
    plugin.save_checkpoint({"weight": torch.ones(3)}, url)
    assert plugin.load_checkpoint(url)["weight"].tolist() == [1, 1, 1]

    def fail(*_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        plugin.save_checkpoint({"weight": torch.zeros(3)}, url, storage_options={"progress": fail})
    assert plugin.load_checkpoint(url)["weight"].tolist() == [1, 1, 1]
    plugin.remove_checkpoint(url)
    plugin.remove_checkpoint(url)
    assert not memory.exists("/runs/a.ckpt")
