"""cuDNN is a small library that opens its parts at run time, by name: they may come from another release.

It asks for the exact release first (``libcudnn_ops.so.9.20.0``), then for ``libcudnn_ops.so.9.20``, then for
``libcudnn_ops.so.9``, each time through the whole search of the loader. NVIDIA's wheels have only the last; so whatever
LD_LIBRARY_PATH holds comes before it, as long as cuDNN has a DT_RUNPATH, which it had in 9.1 to 9.20.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from transload.diagnose.elf import Elf, contents
from transload.diagnose.loader import Found, Loader, Object

__all__ = ["strangers"]

_BY_CUDNN = {8: ("ops_infer", "ops_train", "cnn_infer", "cnn_train", "adv_infer", "adv_train")}
_BY_CUDNN_9 = ("graph", "ops", "cnn", "adv", "ext")
_BY_GRAPH = ("heuristic", "engines_precompiled", "engines_runtime_compiled", "engines_tensor_ir")
_CONSTANTS = 1 << 25


def strangers(loader: Loader, cudnn: Object, release: str) -> Iterator[tuple[str, Found]]:
    """The parts that ``cudnn``, of the release ``9.20.0``, would take from elsewhere and of another release."""
    number = re.match(r"[0-9]{1,4}", release)
    major = int(number[0]) if number else 0
    for part in _BY_CUDNN.get(major, _BY_CUDNN_9):
        yield from _stranger(loader, cudnn, cudnn, part, release)
    graph = loader.examine(f"{_folder(cudnn.path)}/libcudnn_graph.so.{major}")
    if isinstance(graph, Elf):
        asker = Object(f"{_folder(cudnn.path)}/libcudnn_graph.so.{major}", graph)
        for part in _BY_GRAPH:
            yield from _stranger(loader, cudnn, asker, part, release)


def _stranger(loader: Loader, cudnn: Object, asker: Object, part: str, release: str) -> Iterator[tuple[str, Found]]:
    for name in _names(part, release):
        found = next(loader.search(name, asker), None)
        if found is None:
            continue
        own = _folder(loader.host.target(found.path)) == _folder(loader.host.target(cudnn.path))
        same = loader.host.target(found.path).endswith(f".so.{release}")
        if not own and not same and _mentions(asker, part):
            yield name, found
        return


def _names(part: str, release: str) -> Iterator[str]:
    """As they are asked for: ``libcudnn_ops.so.9.20.0``, ``libcudnn_ops.so.9.20``, ``libcudnn_ops.so.9``."""
    numbers = release.split(".")
    for length in range(len(numbers), 0, -1):
        yield f"libcudnn_{part}.so.{'.'.join(numbers[:length])}"


def _mentions(asker: Object, part: str) -> bool:
    """Whether that release knows the part at all: a newer one on the system may have more of them."""
    constants = contents(asker.elf, ".rodata", _CONSTANTS) or b""
    return re.search(rf"cudnn_{part}\b".encode(), constants) is not None


def _folder(path: str) -> str:
    return path.rpartition("/")[0]
