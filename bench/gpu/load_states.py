"""Checkpoints of a real GPU, loaded by plain ``transload.load``: with the card, with it hidden, with absent tags.

Usage, on a machine with an NVIDIA GPU and a CUDA build of torch:

    python bench/gpu/load_states.py

Every result is compared with what ``torch.load`` gives when it is told the right ``map_location``: structure, bytes,
sharing and devices. Prints each file and state; exits 1 where one is wrong.
"""

from __future__ import annotations

import os
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # noqa: PTH100, PTH120
sys.path[:1] = [ROOT, f"{ROOT}/src"]

import warnings
from pathlib import Path

FILES = Path(ROOT) / "tests" / "data" / "h200"
WHOLE = ("whole_",)  # pickled modules: only for those who trust them
GONE = ("whole_custom",)  # a module whose class was in the script that saved it
PROGRAMS = ("aoti_", "export_", "torchscript_")
STATES = {"visible": None, "hidden": ""}


def main() -> int:
    """Start one process a state: what is visible is decided once, when CUDA starts."""
    if len(sys.argv) > 1:
        return state(sys.argv[1])
    worst = 0
    for name, value in STATES.items():
        environ = {**os.environ, **({} if value is None else {"CUDA_VISIBLE_DEVICES": value})}
        worst |= subprocess.run([sys.executable, __file__, name], env=environ, check=False).returncode
    return worst


def state(name: str) -> int:
    """Load every file in this state."""
    import torch

    print(f"{name}: torch {torch.__version__}, {torch.cuda.device_count()} GPU")
    results = [loaded(path) for path in sorted(FILES.iterdir()) if path.suffix in (".pt", ".pth", ".ckpt")]
    wrong = [told for told in results if told]
    print(f"{name}: {len(results) - len(wrong)} of {len(results)} right")
    return int(bool(wrong))


def loaded(path: Path) -> str:
    """What is wrong with the loading of one file; empty where nothing is."""
    import torch
    from tests.loading.equal import same

    import transload

    if path.name.startswith(PROGRAMS):
        return program(path)
    if path.name.startswith(GONE):
        return refused(path)
    trusted = path.name.startswith(WHOLE)
    here = "cuda:0" if torch.cuda.is_available() else "cpu"
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            ours = transload.load(path, weights_only=not trusted)
            theirs = torch.load(
                path, map_location=lambda storage, tag: moved(storage, tag, here), weights_only=not trusted
            )
            same(theirs, ours)
        except Exception as error:  # noqa: BLE001  a table of what went wrong is the purpose
            print(f"  {path.name:<32} WRONG {type(error).__name__}: {str(error)[:200]}")
            return path.name
    landings = [each for each in told if each.category.__name__ == "LandingWarning"]
    tags = {use.device for use in transload.inspect(path).devices}
    surprised = any(tag not in ("cpu", here) for tag in tags)
    if len(landings) != int(surprised):
        print(f"  {path.name:<32} WRONG {len(landings)} warnings, tags {sorted(tags)}")
        return path.name
    print(f"  {path.name:<32} right, {', '.join(sorted(tags))} → {here if surprised else 'where it was'}")
    return ""


def moved(storage: object, tag: str, here: str) -> object:
    """What ``auto`` should do, told to torch as a function: the CPU stays, everything else goes to the one device."""
    if tag == "cpu" or here == "cpu":
        return storage
    return storage.cuda(0)  # type: ignore[attr-defined]


def refused(path: Path) -> str:
    """A file that cannot be loaded, and must be refused in our words."""
    import transload

    try:
        transload.load(path, weights_only=False)
    except transload.LoadError as error:
        print(f"  {path.name:<32} right, refused: {error.what}")
        return ""
    print(f"  {path.name:<32} WRONG: it was not refused")
    return path.name


def program(path: Path) -> str:
    """A program is refused unless it is trusted, and then lands where there is room."""
    import transload

    try:
        transload.load(path)
    except RuntimeError:
        pass
    else:
        print(f"  {path.name:<32} WRONG: it was not refused")
        return path.name
    if path.name.startswith("torchscript_"):
        module = transload.load(path, weights_only=False)
        devices = {str(parameter.device) for parameter in module.parameters()}
        print(f"  {path.name:<32} right, refused; trusted it lands on {', '.join(sorted(devices))}")
    return ""


if __name__ == "__main__":
    sys.exit(main())
