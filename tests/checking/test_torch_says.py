"""The predicted messages of torch.load compared word for word with those of the installed torch."""

from __future__ import annotations

import json
import os
import pickle
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save as safetensors_of
from tests import forge, forks
from tests.each import for_each
from tests.makers import saved
from tests.release import RELEASE, needs_torch

import transload
from transload.checking.torch_says import InstalledTorch, Prediction, torch_says

DATA = Path(__file__).parent.parent / "data"
FILES = sorted(path for path in DATA.glob("*/**/*") if path.suffix in (".pt", ".pth", ".pt2", ".ckpt", ".py", ".json"))
TAGS = (
    *(
        "cpu",
        "meta",
        "cuda",
        "cuda:0",
        "cuda:1",
        "cuda:abc",
        "cuda:01",
        "cuda0",
        "cudax",
        "cuda:-1",
        "",
        "cpu:0",
        "gpu",
    ),
    *("mps", "mps:0", "mpsx", "xpu", "xpu:1", "hpu", "hpu:0", "mtia:0", "npu:0", "xla:0", "ipu", "privateuseone:0"),
)

# The child process has another __main__ than ours, so that it refuses what a user's script would refuse.
LOADER = """
import json, sys, warnings
import torch
def outcome(path):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            torch.load(path)
            said = ["loads", "", ""]
        except Exception as error:
            said = ["raises", type(error).__name__, str(error)]
    ours = ("TorchScript archive", "pickle protocol", "weights_only")
    return [*said, [str(w.message) for w in caught if any(word in str(w.message) for word in ours)]]
json.dump({path: outcome(path) for path in json.load(sys.stdin)}, sys.stdout)
"""


def torch_outcomes(paths: list[Path]) -> dict[str, list[object]]:
    """The outcome of torch.load for each file, in a separate process without a GPU."""
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    names = json.dumps([str(path) for path in paths])
    process = forks.run("-c", LOADER, stdin=names, env=env)
    assert process.returncode == 0, process.stderr
    outcomes: dict[str, list[object]] = json.loads(process.stdout)
    return outcomes


def predict(path: Path, torch_: InstalledTorch | None = None) -> Prediction:
    return torch_says(transload.inspect(path), torch_ or InstalledTorch(torch.__version__))


def check_prediction(path: Path, actual: list[object], *, exact: bool = True) -> None:
    prediction = predict(path)
    if prediction.exact:
        assert [prediction.outcome, prediction.error, prediction.text, list(prediction.warnings)] == actual
    else:
        assert not exact, f"the prediction is not exact: {prediction}"
        assert prediction.outcome in ("unknown", actual[0])


# -- fixtures ---------------------------------------------------------------------------------------------------------


def test_predictions_for_the_fixtures(outcomes: TorchOutcomes) -> None:
    for_each(FILES, lambda path: check_prediction(path, outcomes.by_path[str(path)], exact=RELEASE >= (2, 6)))


def test_fixtures_cover_every_outcome(outcomes: TorchOutcomes) -> None:
    errors = [str(outcomes.by_path[str(path)][1]) for path in FILES]
    for error in ("", "RuntimeError", *(["UnpicklingError"] if RELEASE >= (2, 6) else [])):
        assert errors.count(error) > 3, error


# -- forged files -----------------------------------------------------------------------------------------------------


def zipped(body: bytes, protocol: int = 2) -> bytes:
    return forge.checkpoint(forge.pickled(body, protocol))


def tensor_on(device: str) -> bytes:
    return zipped(forge.ordered({"w": forge.tensor(storage=forge.storage_id("0", 4, "FloatStorage", device))}))


def listing_of(first: bytes, second: bytes) -> bytes:
    return zipped(forge.list_of(first, second))


def call_of(module: str, attribute: str) -> bytes:
    return forge.call(forge.name(module, attribute))


def legacy_file(body: bytes, *keys: str) -> bytes:
    storages = forge.Legacy().storages[: len(keys)]
    return forge.legacy(object=forge.pickled(body), keys=forge.pickled(forge.list_of(*keys)), storages=storages)


GPU = forge.tensor(storage=forge.storage_id("0", 4, "FloatStorage", "cuda:3"))
LEGACY_MODULE = forge.tuple_of("module", forge.name("collections", "OrderedDict"), "a.py", "source") + b"Q"

FORGED: dict[str, bytes] = {
    **{f"tag {tag}": tensor_on(tag) for tag in TAGS},
    "a user-defined name": zipped(call_of("models.net", "Net")),
    "a name of Python 2": zipped(call_of("__builtin__", "getattr")),
    "a built-in": zipped(call_of("builtins", "getattr")),
    "a blocked module": zipped(forge.DANGEROUS),
    "a blocked module, as Python 2 spells it": zipped(call_of("posix", "getcwd")),
    "a dotted name": zipped(forge.name("torch", "Tensor.cpu")),
    "numpy": zipped(call_of("numpy.core.multiarray", "_reconstruct")),
    "a distributed tensor": zipped(forge.name("torch.distributed.tensor", "DTensor")),
    "a ragged size": zipped(forge.name("torch._dynamo.decorators", "_DimRange")),
    "the name comes first": listing_of(call_of("models.net", "Net"), GPU),
    "the device comes first": listing_of(GPU, call_of("models.net", "Net")),
    "the opcode comes first": listing_of(b"T\x01\0\0\0a", GPU),
    "the opcode comes last": listing_of(GPU, b"T\x01\0\0\0a"),
    "protocol 3": zipped(forge.ordered(), 3),
    "protocol 4": zipped(b"\x95" + bytes(8) + forge.ordered(), 4),
    "bytes of protocol 3": zipped(b"C\x01a", 3),
    "an opcode in a compressed pickle": forge.checkpoint(forge.pickled(b"C\x01a", 3), method=8),
    "a missing record": forge.checkpoint(forge.pickled(forge.ordered({"w": forge.tensor("9")}))),
    "a stream": forge.legacy(),
    "a stream on a GPU": legacy_file(
        forge.ordered({"w": forge.tensor(storage=forge.storage_id("0", 4, "FloatStorage", "cuda:0", None))}), "0"
    ),
    "a stream with a name": legacy_file(call_of("models", "Net")),
    "a stream with a module": legacy_file(LEGACY_MODULE),
    "a stream with an opcode": legacy_file(b"I1\n"),
    "a tar archive": forge.tar(),
    "a plain pickle": pickle.dumps({"a": 1}, 2),
    "a plain pickle with a name": pickle.dumps(SimpleNamespace(a=1), 2),
    "a plain pickle of protocol 5": pickle.dumps({"a": 1}, 5),
    **{
        f"a plain pickle of a tensor, protocol {protocol}": pickle.dumps({"a": torch.ones(3)}, protocol)
        for protocol in (1, 2, 5)
    },
    "a plain pickle of a tensor on a GPU": pickle.dumps({"a": torch.ones(3)}, 2).replace(b"cpu", b"hpu"),
    "an empty file": b"",
    "a web page": b"<!DOCTYPE html><html></html>",
    "a git-lfs pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
    "a JSON file": b'{"a": 1}\n',
    "a gzip file": b"\x1f\x8b\x08\x00" + bytes(20),
}
# The stream breaks before the part in question, or the outcome depends on another part of torch.
NOT_EXACT = frozenset({"a missing record", "a ragged size", *([] if RELEASE >= (2, 11) else ["tag cudax"])})


# Sizes of archives without a directory: torch reads back from the end in steps, and in some raises OSError.
CUT = (4096, 4097, 8188, 8189, 8190, 69583, 69584, 75000)


@dataclass(frozen=True)
class TorchOutcomes:
    """Files, and the outcomes of torch.load for them and the fixtures, all from one process to import torch once."""

    paths: dict[str, Path]
    by_path: dict[str, list[object]]

    def __getitem__(self, title: str) -> tuple[Path, list[object]]:
        return self.paths[title], self.by_path[str(self.paths[title])]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> TorchOutcomes:
    folder = tmp_path_factory.mktemp("made")
    weights = safetensors_of({"a": torch.ones(300)})
    data = saved(torch.zeros(20_000))
    files = {f"{index}.pt": content for index, content in enumerate(FORGED.values())} | {
        "no end.pt": forge.checkpoint()[:-30],
        **{f"{size}.pt": data[:size] for size in CUT},
        "whole.safetensors": weights,
        "renamed.pt": weights,
        "cut in its header.safetensors": weights[:60],
        "cut.safetensors": weights[:700],
    }
    for name, content in files.items():
        (folder / name).write_bytes(content)
    (folder / "folder").mkdir()
    paths = {name: folder / name for name in (*files, "folder")}
    paths |= {title: folder / f"{index}.pt" for index, title in enumerate(FORGED)}
    return TorchOutcomes(paths, torch_outcomes([*FILES, *paths.values()]))


def test_predictions_for_the_forged_files(outcomes: TorchOutcomes) -> None:
    for_each(
        FORGED, lambda title: check_prediction(*outcomes[title], exact=RELEASE >= (2, 6) and title not in NOT_EXACT)
    )


def test_predictions_for_directories_and_safetensors(outcomes: TorchOutcomes) -> None:
    check_prediction(*outcomes["whole.safetensors"], exact=RELEASE >= (2, 13))
    check_prediction(*outcomes["renamed.pt"], exact=False)  # its first byte may be an opcode
    check_prediction(*outcomes["folder"])


def test_prediction_without_the_safetensors_package(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    prediction = predict(path, InstalledTorch("2.13.0", absent={"safetensors"}))
    assert prediction.text.startswith("Attempting to load a safetensors file but safetensors is not installed. ")


@pytest.mark.skipif(RELEASE < (2, 6), reason="older releases know one of the variables")
def test_prediction_with_both_weights_only_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, names = tmp_path / "model.pt", ("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD")
    torch.save({}, path)
    for name in names:
        monkeypatch.setenv(name, "1")
    with pytest.raises(RuntimeError) as raised:
        torch.load(path)
    prediction = predict(path, InstalledTorch(torch.__version__, environ=dict.fromkeys(names, "1")))
    assert (prediction.exact, prediction.error, prediction.text) == (True, "RuntimeError", str(raised.value))


# -- a real GPU -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recorded:
    name: str
    outcome: str
    error: str = ""
    text: str = ""


def recorded_on_gpu() -> Iterator[Recorded]:
    """Outcomes of ``torch.load(path)`` recorded with torch 2.11.0+cu130 on a machine with one H200."""
    text = (DATA / "h200" / "errors.txt").read_text(encoding="utf-8")
    for block in re.split(r"^(?=OK |ERR )", text, flags=re.MULTILINE):
        head, _, rest = block.partition("\n")
        match = re.fullmatch(r"(OK|ERR) +(\S+) \{\} ?\w*", head)
        if match is None or not (DATA / "h200" / match[2]).exists():
            continue
        if match[1] == "OK":
            yield Recorded(match[2], "loads")
        else:
            error, _, message = rest.partition(" : ")
            lines = [line.removeprefix("    ") for line in message.rstrip("\n").split("\n")]
            yield Recorded(match[2], "raises", error.split()[-1], "\n".join(lines))


@pytest.mark.parametrize("recorded", list(recorded_on_gpu()), ids=lambda recorded: recorded.name)
def test_predictions_equal_messages_recorded_on_a_real_gpu(recorded: Recorded) -> None:
    prediction = predict(DATA / "h200" / recorded.name, InstalledTorch("2.11.0+cu130", {"cuda": 1}))
    assert prediction.exact
    assert (prediction.outcome, prediction.error, prediction.text) == (recorded.outcome, recorded.error, recorded.text)


def test_recorded_messages_cover_the_gpu_fixtures() -> None:
    names = {recorded.name for recorded in recorded_on_gpu()}
    assert {"state_dict_cuda0.pt", "state_dict_cuda1.pt", "whole_module_cuda0.pt", "aoti_cuda0.pt2"} <= names
    assert len(names) >= 10


def test_prediction_for_a_compressed_joblib_file(tmp_path: Path) -> None:
    joblib = pytest.importorskip("joblib")
    paths = [tmp_path / f"{kind}.joblib" for kind in ("zlib", "gzip", "bz2", "lzma", "xz")]
    for path in paths:
        joblib.dump({"a": [1.0]}, path, compress=(path.stem, 3))
    actual = torch_outcomes(paths)
    known = {path: RELEASE >= (2, 6) and path.stem != "lzma" for path in paths}  # it begins with an opcode
    for_each(paths, lambda path: check_prediction(path, actual[str(path)], exact=known[path]))


@needs_torch(2, 6)
def test_nested_tensors_are_refused_from_2_15_on(tmp_path: Path) -> None:
    rows = [torch.ones(2, 3), torch.ones(4, 3)]
    paths = {kind: tmp_path / f"{kind}.pt" for kind in ("jagged", "strided")}
    for kind, path in paths.items():
        torch.save({"n": torch.nested.nested_tensor(rows, layout=getattr(torch, kind))}, path)
    actual = torch_outcomes([*paths.values()])
    known = RELEASE == (2, 13) or RELEASE >= (2, 15)
    for_each([*paths.values()], lambda path: check_prediction(path, actual[str(path)], exact=known))
    for kind, name in (
        ("jagged", "nested._internal.nested_tensor._rebuild_njt"),
        ("strided", "_utils._rebuild_nested_tensor"),
    ):
        prediction = predict(paths[kind], InstalledTorch("2.15.0+cpu"))
        assert (prediction.outcome, prediction.exact) == ("raises", True)
        assert f"GLOBAL torch.{name} was not an allowed" in prediction.text
    assert predict(paths["strided"], InstalledTorch("2.13.0+cpu")).outcome == "loads"


# -- other releases and settings --------------------------------------------------------------------------------------


def test_predicted_message_depends_on_the_release() -> None:
    net = DATA / "h200" / "whole_custom_module_cuda0.pt"
    assert "add_safe_globals([Net])" in predict(net, InstalledTorch("2.6.0")).text
    assert "add_safe_globals([__main__.Net])" in predict(net, InstalledTorch("2.7.0")).text
    package = DATA / "h200" / "aoti_cuda0.pt2"
    assert predict(package, InstalledTorch("2.10.0")).text.endswith("data.pkl: file not found")
    assert predict(package, InstalledTorch("2.11.0")).text.endswith("modified after saving.")


def test_prediction_before_2_6_is_without_weights_only() -> None:
    weights, net = DATA / "h200" / "state_dict_cuda0.pt", DATA / "h200" / "whole_custom_module_cuda0.pt"
    prediction = predict(weights, InstalledTorch("2.5.1"))
    assert prediction.exact
    assert prediction.text.startswith("Attempting to deserialize object on a CUDA device")
    assert prediction.warnings[0].startswith("You are using `torch.load` with `weights_only=False`")
    assert predict(weights, InstalledTorch("2.3.1")).warnings == ()
    assert not predict(net, InstalledTorch("2.5.1", {"cuda": 1})).exact


def test_deeply_nested_persistent_id_is_abbreviated(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    nested = b")" + b"\x85" * 100_000
    path.write_bytes(forge.checkpoint(forge.pickled(forge.tuple_of(nested, "a", "b", "c", 1) + b"Q")))
    assert "but got (<tuple>)" in predict(path, InstalledTorch("2.9.0")).text


def test_missing_package_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(FORGED["a user-defined name"])
    prediction = predict(path, InstalledTorch("2.5.1", absent={"models"}))
    assert (prediction.error, prediction.text, prediction.exact) == (
        "ModuleNotFoundError",
        "No module named 'models'",
        True,
    )


@pytest.mark.parametrize(
    ("variable", "version", "weights_only"),
    [
        ("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "2.3.0", True),
        ("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "2.13.0", False),
        ("", "2.13.0", True),
        ("", "2.5.0", False),
    ],
)
def test_weights_only_default_depends_on_variables_and_release(variable: str, version: str, weights_only: bool) -> None:
    assert InstalledTorch(version, environ={variable: "TRUE"}).weights_only == weights_only


@pytest.mark.parametrize("version", ["", "1.13.1", "2.16.0", "3.0", "unknown"])
def test_nothing_is_predicted_for_unsupported_releases(version: str) -> None:
    prediction = predict(DATA / "h200" / "state_dict_cuda0.pt", InstalledTorch(version))
    assert (prediction.outcome, prediction.exact) == ("unknown", False)


def test_uncertain_devices_make_the_prediction_inexact() -> None:
    prediction = predict(DATA / "h200" / "state_dict_cuda0.pt", InstalledTorch("2.13.0+cu130", sure=False))
    assert (prediction.outcome, prediction.exact) == ("raises", False)


# -- damage -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["no end.pt", *(f"{size}.pt" for size in CUT)])
def test_prediction_for_an_archive_without_its_end(name: str, outcomes: TorchOutcomes) -> None:
    path, actual = outcomes[name]
    prediction = predict(path)
    assert [prediction.outcome, prediction.error, prediction.text] == actual[:3]


@pytest.mark.skipif(RELEASE < (2, 13), reason="this torch cannot load safetensors")
@pytest.mark.parametrize("name", ["cut in its header.safetensors", "cut.safetensors"])
def test_prediction_for_a_truncated_safetensors_file(name: str, outcomes: TorchOutcomes) -> None:
    path, actual = outcomes[name]
    prediction = predict(path)
    assert (prediction.outcome, prediction.error) == (actual[0], actual[1]) == ("raises", "SafetensorError")
    assert prediction.text == actual[2]
