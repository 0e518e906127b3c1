"""Measure a Lightning Trainer's checkpoints: its built-in plugin against ``transload.LightningCheckpointIO``.

    python bench/lightning.py [--megabytes N] [--repeat N] [--folder DIR] [--json]

Each plugin runs in its own process, in turn. A process trains a model for one step with Adam, and then saves and loads
its checkpoint as the Trainer does: ``trainer.save_checkpoint``, and what ``ckpt_path=`` calls to read it. ``saved`` is
the time until the training could go on, ``on disk`` until the file is complete and flushed; transload flushes by
itself, and the file of the others is flushed after the save. ``loaded`` reads it from the page cache. The peak is the
largest resident size during the save, minus that right before it. Needs lightning and torch.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile

from save import WATCH

PROGRAM = """
import logging, os, sys, threading, time, warnings
logging.disable(logging.WARNING)
warnings.simplefilter("ignore")
import lightning, torch
import transload
from lightning.pytorch.plugins.io import AsyncCheckpointIO

megabytes, repeat, folder, plugin = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
plugins = {
    "built in": lambda: [],
    "AsyncCheckpointIO": lambda: [AsyncCheckpointIO()],
    "transload": lambda: [transload.LightningCheckpointIO()],
    "transload, background": lambda: [transload.LightningCheckpointIO(background=True)],
}[plugin]()
LAYERS = 16
width = int((megabytes * 1e6 / 12 / LAYERS) ** 0.5)  # with Adam, a weight has twelve bytes in the checkpoint

class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(LAYERS)))

    def training_step(self, batch, _):
        return self.layers(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())

trainer = lightning.Trainer(
    max_steps=1, accelerator="cpu", devices=1, plugins=plugins, logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False,
)
model = Net()
trainer.fit(model, torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(1, width))))
path = os.path.join(folder, "last.ckpt")
plugin = trainer.strategy.checkpoint_io
for _ in range(1 + repeat):
    os.sync()
    watch = Watch()
    watch.start()
    begun = time.perf_counter()
    trainer.save_checkpoint(path)
    saved = time.perf_counter() - begun
    plugin.teardown()
    if "transload" not in sys.argv[4]:
        descriptor = os.open(path, os.O_RDWR)
        os.fsync(descriptor)
        os.close(descriptor)
    on_disk = time.perf_counter() - begun
    watch.over.set()
    watch.join()
    begun = time.perf_counter()
    checkpoint = trainer.strategy.load_checkpoint(path, weights_only=True)
    loaded = time.perf_counter() - begun
    for name, value in model.state_dict().items():
        assert torch.equal(checkpoint["state_dict"][name], value)
    del checkpoint
    print("run", saved, on_disk, loaded, watch.peak - watch.before, os.path.getsize(path), flush=True)
"""

PLUGINS = ("built in", "transload", "AsyncCheckpointIO", "transload, background")
COLUMNS = ("saved", "on disk", "loaded", "peak", "size")


def main() -> int:
    """Measure, and print the table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--megabytes", type=int, default=1000, help="size of the checkpoint (default 1000)")
    parser.add_argument("--repeat", type=int, default=2, help="saves in each process (default 2)")
    parser.add_argument("--rounds", type=int, default=2, help="processes of each plugin (default 2)")
    parser.add_argument("--folder", default=None, help="where to write (default: the directory for temporary files)")
    options = parser.parse_args()
    runs: dict[str, list[list[float]]] = {name: [] for name in PLUGINS}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for _ in range(options.rounds):
            for name in PLUGINS:
                arguments = [str(options.megabytes), str(options.repeat), folder, name]
                command = [sys.executable, "-c", WATCH + PROGRAM, *arguments]
                out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
                lines = [line for line in out if line.startswith("run ")][1:]  # the first save makes the file
                runs[name] += [[float(word) for word in line.split()[1:]] for line in lines]
    rows = {
        name: dict(zip(COLUMNS, map(statistics.median, zip(*values, strict=True)), strict=True))
        for name, values in runs.items()
    }
    show(rows, as_json=options.json)
    return 0


def show(rows: dict[str, dict[str, float]], *, as_json: bool) -> None:
    """Print the medians, and the ratios to the built-in plugin."""
    base = rows[PLUGINS[0]]
    if as_json:
        print(json.dumps({"schema": 1, "rows": rows}))
        return
    print(f"{platform.machine()}, {os.cpu_count()} processors, Python {platform.python_version()}")
    print(f"a checkpoint of {base['size'] / 1e6:.0f} MB; the ratio is the time of the built-in plugin to this one")
    for name, row in rows.items():
        times = "".join(
            f"  {column} {row[column]:6.2f} s ({base[column] / row[column]:5.2f})"
            for column in ("saved", "on disk", "loaded")
        )
        print(f"  {name:22}{times}  peak {row['peak'] / 1e6:6.0f} MB")


if __name__ == "__main__":
    sys.exit(main())
