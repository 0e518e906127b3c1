"""Ordinary checkpoints: the verdict and the prediction are compared with what torch does.

Every object of ``belongings`` is saved in every format, judged, and loaded by torch with ``weights_only=True`` in a
fresh process that has imported nothing but torch: as is, and after the lines that we print for users who trust the
file.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from tests import forks
from tests.each import each
from tests.quantized import working_engine
from tests.release import RELEASE, needs_torch
from tests.shared import once

import transload
from transload.checkpoint import Checkpoint
from transload.judge.problems import WITHOUT_CODE
from transload.judge.safety import safe_globals_lines

HERE = Path(__file__).parent

# Predictions have been compared with torch from this release on.
pytestmark = needs_torch(2, 11)


def load_belongings() -> ModuleType:
    sys.path.insert(0, str(HERE))
    try:
        return importlib.import_module("belongings")
    finally:
        sys.path.remove(str(HERE))


belongings = load_belongings()

FORMS: dict[str, dict[str, Any]] = {
    "zip": {},
    "legacy": {"_use_new_zipfile_serialization": False},
    "protocol 4": {"pickle_protocol": 4},
    "protocol 5": {"pickle_protocol": 5},
}
NEW = ("protocol 4", "protocol 5")

# The newer protocols have opcodes for these, so there is no name to trust.
PLAIN_IN_NEW = {"frozenset", "empty bytes"}

# From this release on torch refuses nested tensors, and writes the jagged ones without the class that needs trust.
REFUSES_NESTED = RELEASE >= (2, 15)

# torch cannot read back what it wrote.
TORCH_FAILS = {
    ("dtypes", "legacy"): "it asks an untyped storage for its type",
    ("storages", "legacy"): "the same",
    ("generator", "legacy"): "it uses the state before it has read the storage that holds it",
    ("nested", "legacy"): "the same with the sizes",
}
# Undefined behaviour: nested tensors may crash the process, so they are not tried.
UNDEFINED = {("nested", "legacy"), ("generator", "legacy")}
NOT_TRIED = ("nested", "legacy")

# No list of names makes weights_only=True load these.
NEVER_LOADS = {
    "defaultdict": "items",
    "deque": "items",
    "dictionary subclass": "items",
    "keyword arguments": "keyword arguments",
    "optimizer": "items",
}
NEVER_LOADS_LEGACY = {
    *(
        "classes and functions",
        "partial",
        "sequential",
        "user module",
        "user module with a partial",
        "transformer",
        "lstm",
    ),
    *("embedding and attention", "module list", "weight norm", "quantized module", "everything"),
}


class Case(NamedTuple):
    name: str
    form: str

    @property
    def file(self) -> str:
        return f"{self.name} {self.form}.pt".replace(" ", "_")


def never_loads(case: Case) -> bool:
    return case.name in NEVER_LOADS or (case.form == "legacy" and case.name in NEVER_LOADS_LEGACY)


ENGINE = working_engine()
NEED_ENGINE = {"quantized state dict", "quantized module"}
BELONGINGS = {
    name: make for name, make in (belongings.DATA | belongings.TRUST).items() if ENGINE or name not in NEED_ENGINE
}
DATA = [Case(name, form) for name in belongings.DATA if name in BELONGINGS for form in FORMS]
TRUST = [Case(name, form) for name in belongings.TRUST if name in BELONGINGS for form in FORMS]


def save_all(folder: Path) -> None:
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")  # torch warns about most of these
        if ENGINE:
            patch.setattr(torch.backends.quantized, "engine", ENGINE)
        for name, make in BELONGINGS.items():
            value = make()
            for form, options in FORMS.items():
                torch.save(value, folder / Case(name, form).file, **options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return once(tmp_path_factory, "ordinary", save_all)[0]


@pytest.fixture(scope="module")
def checkpoints(folder: Path) -> dict[str, Checkpoint]:
    return {path.name: transload.inspect(path) for path in folder.glob("*.pt")}


# Two processes, one for each half: what one half makes torch import must not help the other. They share one import of
# torch, which takes most of the time.
LOADER = """
import json, os, sys, warnings
warnings.simplefilter("ignore")
import torch
folder, engine, halves = *sys.argv[1:], json.load(sys.stdin)
reader, writer = os.pipe()
child = os.fork()
jobs = halves[0] if child else halves[1]
if engine:
    torch.backends.quantized.engine = engine
ours = torch.serialization.get_safe_globals()
out = {}
for key, (file, lines) in jobs.items():
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals(ours)
    try:
        exec("\\n".join(lines), {"__name__": "somewhere", "path": f"{folder}/{file}"})
        if not lines:
            torch.load(f"{folder}/{file}", weights_only=True)
        out[key] = ""
    except Exception as error:
        out[key] = f"{type(error).__name__}: {error}"
if not child:
    with open(writer, "w") as pipe:
        json.dump(out, pipe)
    os._exit(0)
os.close(writer)
with open(reader) as pipe:
    out |= json.load(pipe)
json.dump(out, sys.stdout)
"""


def lines_for(checkpoint: Checkpoint) -> tuple[str, ...]:
    """The lines that allow the names, without the alternative that runs no code."""
    fix = next((finding.fix for finding in checkpoint.findings if finding.code == "needs-trust"), ())
    return fix[: fix.index(WITHOUT_CODE)] if WITHOUT_CODE in fix else fix


@pytest.fixture(scope="module")
def torch_errors(
    folder: Path, checkpoints: dict[str, Checkpoint], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """The error of torch for each file, empty if it loads; under ``name!`` after our lines have been run."""
    if not forks.FORKS:
        pytest.skip("needs os.fork")
    plain: dict[str, tuple[str, tuple[str, ...]]] = {
        file: (file, ()) for file in checkpoints if file != Case(*NOT_TRIED).file
    }
    marked = {}
    for case in TRUST:
        checkpoint = checkpoints[case.file]
        lines = lines_for(checkpoint)
        if never_loads(case):  # the lines that would be printed
            lines = safe_globals_lines([use for use in checkpoint.globals if use.verdict in ("unknown", "harmless")])
        marked[f"{case.file}!"] = (case.file, lines)

    def query(_: Path) -> Any:
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])}
        process = forks.run("-c", LOADER, folder, ENGINE, stdin=json.dumps([plain, marked]), env=env)
        assert process.returncode == 0, process.stderr
        return json.loads(process.stdout)

    errors: dict[str, str] = once(tmp_path_factory, "loaded", query)[1]
    assert set(errors) == {*plain, *marked}
    return errors


def case_id(case: Case) -> str:
    return f"{case.name}-{case.form}"


@each("case", DATA, ids=case_id)
def test_file_that_torch_loads_is_data_only(
    case: Case, checkpoints: dict[str, Checkpoint], torch_errors: dict[str, str]
) -> None:
    checkpoint = checkpoints[case.file]
    assert checkpoint.safety == "data-only"
    assert checkpoint.ok or case in TORCH_FAILS
    if case.form in NEW:
        assert "Unsupported operand 149" in torch_errors[case.file]  # FRAME; prediction says so
    elif case in TORCH_FAILS:
        assert case in UNDEFINED or torch_errors[case.file] != ""
    elif case.name == "nested" and REFUSES_NESTED:
        assert "Unsupported global" in torch_errors[case.file]
    else:
        assert torch_errors[case.file] == ""


@each("case", TRUST, ids=case_id)
def test_file_that_torch_refuses_needs_trust_and_is_not_dangerous(
    case: Case, checkpoints: dict[str, Checkpoint], torch_errors: dict[str, str]
) -> None:
    plain = (case.form in NEW and case.name in PLAIN_IN_NEW) or (case.name == "jagged" and REFUSES_NESTED)
    checkpoint = checkpoints[case.file]
    assert checkpoint.safety == ("data-only" if plain else "needs-trust"), [f.evidence for f in checkpoint.findings]
    assert torch_errors[case.file] != ""


@each("case", [case for case in TRUST if case.form in ("zip", "legacy")], ids=case_id)
def test_printed_lines_make_torch_load_the_file(
    case: Case, checkpoints: dict[str, Checkpoint], torch_errors: dict[str, str]
) -> None:
    lines = lines_for(checkpoints[case.file])
    if case.name == "jagged" and REFUSES_NESTED:
        pytest.skip("judged data-only: no lines are printed")
    if never_loads(case):
        assert torch_errors[f"{case.file}!"] != ""
        assert lines[0].startswith("Allowing the names is not enough")
    elif case.name == "distributed":
        assert lines[0].startswith("From torch 2.6 on, import torch.distributed.tensor first")
    else:
        assert lines[0] == "import torch"
        assert case in UNDEFINED or (torch_errors[f"{case.file}!"] == "") is (case not in TORCH_FAILS), lines


@each("case", [case for case in (*DATA, *TRUST) if case != NOT_TRIED], ids=case_id)
def test_prediction_matches_torch(case: Case, checkpoints: dict[str, Checkpoint], torch_errors: dict[str, str]) -> None:
    prediction = checkpoints[case.file].prediction
    loads = prediction.startswith("torch.load loads it") and not (
        REFUSES_NESTED and "from 2.15 on it refuses" in prediction
    )
    assert loads == (torch_errors[case.file] == ""), prediction
