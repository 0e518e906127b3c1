from __future__ import annotations

import multiprocessing.spawn
import os
import pickle
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tests import forks

import transload
from transload.patching import devices

if TYPE_CHECKING:
    import pytest


def test_preparation_data_passes_the_patch_to_a_spawned_child() -> None:
    assert "transload" not in multiprocessing.spawn.get_preparation_data("child")
    with transload.patch("cpu"):
        devices.warned.add("cuda to cpu")
        prepared = pickle.dumps(multiprocessing.spawn.get_preparation_data("child")["transload"])
    devices.warned.clear()
    assert devices.requested == ""
    before = list(sys.path)
    pickle.loads(prepared)  # as the child does, before anything else
    assert (devices.requested, devices.warned) == ("cpu", {"cuda to cpu"})
    assert sys.path == before
    transload.unpatch()
    assert "transload" not in multiprocessing.spawn.get_preparation_data("child")


def test_forkserver_gets_the_patch_through_its_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the ``repr`` of the path of the main module, which the server imports since Python 3.14."""
    prepared = {"init_main_from_path": "a 'b'.py"}
    monkeypatch.setattr(multiprocessing.spawn, "get_preparation_data", lambda _: prepared)
    with transload.patch("cpu"):
        path = multiprocessing.spawn.get_preparation_data("ignore")["init_main_from_path"]
        path_repr, pickled = repr(path), pickle.dumps(path)
    assert devices.requested == ""
    assert type(pickle.loads(pickled)) is str
    assert pickle.loads(pickled) == path == "a 'b'.py"
    assert devices.requested == ""
    assert eval(path_repr) == "a 'b'.py"  # noqa: S307
    assert devices.requested == "cpu"


def test_child_that_cannot_import_transload_starts_unpatched(monkeypatch: pytest.MonkeyPatch) -> None:
    with transload.patch():
        prepared = pickle.dumps(multiprocessing.spawn.get_preparation_data("child")["transload"])
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "transload.patching", None)
        pickle.loads(prepared)
    assert devices.requested == ""


SCRIPT = """\
import multiprocessing, sys
import torch

assert torch.ones(1).to("cuda:99").device.type != "meta"  # at the top, which a child runs again


class Noted:
    def __init__(self, number):
        self.number = number


def work(queue, noted):
    made = torch.zeros(1, device="cuda:99")
    loaded = torch.load(sys.argv[1])
    queue.put([noted.number, sys.argv[2], made.device.type, loaded["fc.weight"].device.type])


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return torch.full((1,), index).to("cuda:99").cpu()


if __name__ == "__main__":
    for number, method in enumerate(multiprocessing.get_all_start_methods()):
        context = multiprocessing.get_context(method)
        queue = context.Queue()
        child = context.Process(target=work, args=(queue, Noted(number)))
        child.start()
        print(method, *queue.get(timeout=300))
        child.join()
        assert child.exitcode == 0
    print(torch.cat(list(torch.utils.data.DataLoader(Data(), num_workers=1))).tolist())
"""


def test_patch_works_in_children_of_every_start_method(tmp_path: Path, data: Path) -> None:
    (tmp_path / "parent.py").write_text(SCRIPT, encoding="utf-8")
    weights = data / "h200" / "state_dict_cuda1.pt"
    env = {**os.environ, "PYTHONPATH": str(forks.SOURCE)}
    process = forks.run("-m", "transload", "run", "parent.py", weights, "word", cwd=tmp_path, env=env)
    assert process.returncode == 0, process.stderr
    *children, batch = process.stdout.splitlines()
    methods = multiprocessing.get_all_start_methods()
    assert children == [f"{method} {number} word cpu cpu" for number, method in enumerate(methods)]
    assert batch == "[[0], [1]]"
    assert process.stderr.count("LandingWarning") == 1
