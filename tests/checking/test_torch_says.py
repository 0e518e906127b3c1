"""What we say torch.load says, held against what it says: word for word, by the torch that is installed here."""

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
from tests.release import RELEASE

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

# The module of the child is not __main__ of ours, so that it refuses what a script of a user's would.
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


def told(paths: list[Path]) -> dict[str, list[object]]:
    """What torch does with each file, in a process of its own, without a GPU."""
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    names = json.dumps([str(path) for path in paths])
    done = forks.run("-c", LOADER, stdin=names, env=env)
    assert done.returncode == 0, done.stderr
    answer: dict[str, list[object]] = json.loads(done.stdout)
    return answer


def foretold(path: Path, torch_: InstalledTorch | None = None) -> Prediction:
    return torch_says(transload.inspect(path), torch_ or InstalledTorch(torch.__version__))


def agrees(path: Path, truth: list[object], *, exact: bool = True) -> None:
    said = foretold(path)
    if said.exact:
        assert [said.outcome, said.error, said.text, list(said.warnings)] == truth
    else:
        assert not exact, f"nothing certain is said: {said}"
        assert said.outcome in ("unknown", truth[0])


# -- the fixtures -----------------------------------------------------------------------------------------------------


def test_fixtures(tried: Tried) -> None:
    for_each(FILES, lambda path: agrees(path, tried.truth[str(path)], exact=RELEASE >= (2, 6)))


def test_the_fixtures_show_every_outcome(tried: Tried) -> None:
    errors = [str(tried.truth[str(path)][1]) for path in FILES]
    for error in ("", "RuntimeError", *(["UnpicklingError"] if RELEASE >= (2, 6) else [])):
        assert errors.count(error) > 3, error


# -- files made for it ------------------------------------------------------------------------------------------------


def zipped(body: bytes, protocol: int = 2) -> bytes:
    return forge.checkpoint(forge.pickled(body, protocol))


def on(device: str) -> bytes:
    return zipped(forge.ordered({"w": forge.tensor(storage=forge.storage_id("0", 4, "FloatStorage", device))}))


def before(first: bytes, second: bytes) -> bytes:
    return zipped(forge.listing(first, second))


def named(module: str, attribute: str) -> bytes:
    return forge.call(forge.name(module, attribute))


def streamed(body: bytes, *keys: str) -> bytes:
    held = forge.Legacy().storages[: len(keys)]
    return forge.legacy(object=forge.pickled(body), keys=forge.pickled(forge.listing(*keys)), storages=held)


GPU = forge.tensor(storage=forge.storage_id("0", 4, "FloatStorage", "cuda:3"))
LEGACY_MODULE = forge.tuple_of("module", forge.name("collections", "OrderedDict"), "a.py", "source") + b"Q"

MADE: dict[str, bytes] = {
    **{f"tag {tag}": on(tag) for tag in TAGS},
    "a name of somebody's": zipped(named("models.net", "Net")),
    "a name of Python 2": zipped(named("__builtin__", "getattr")),
    "a built-in": zipped(named("builtins", "getattr")),
    "a blocked module": zipped(forge.DANGEROUS),
    "a blocked module, as Python 2 spells it": zipped(named("posix", "getcwd")),
    "a dotted name": zipped(forge.name("torch", "Tensor.cpu")),
    "numpy": zipped(named("numpy.core.multiarray", "_reconstruct")),
    "a distributed tensor": zipped(forge.name("torch.distributed.tensor", "DTensor")),
    "a ragged size": zipped(forge.name("torch._dynamo.decorators", "_DimRange")),
    "the name comes first": before(named("models.net", "Net"), GPU),
    "the device comes first": before(GPU, named("models.net", "Net")),
    "the opcode comes first": before(b"T\x01\0\0\0a", GPU),
    "the opcode comes last": before(GPU, b"T\x01\0\0\0a"),
    "protocol 3": zipped(forge.ordered(), 3),
    "protocol 4": zipped(b"\x95" + bytes(8) + forge.ordered(), 4),
    "bytes of protocol 3": zipped(b"C\x01a", 3),
    "an opcode in a compressed pickle": forge.checkpoint(forge.pickled(b"C\x01a", 3), method=8),
    "a missing record": forge.checkpoint(forge.pickled(forge.ordered({"w": forge.tensor("9")}))),
    "a stream": forge.legacy(),
    "a stream on a GPU": streamed(
        forge.ordered({"w": forge.tensor(storage=forge.storage_id("0", 4, "FloatStorage", "cuda:0", None))}), "0"
    ),
    "a stream with a name": streamed(named("models", "Net")),
    "a stream with a module": streamed(LEGACY_MODULE),
    "a stream with an opcode": streamed(b"I1\n"),
    "a tar archive": forge.tar(),
    "a plain pickle": pickle.dumps({"a": 1}, 2),
    "a plain pickle with a name": pickle.dumps(SimpleNamespace(a=1), 2),
    "a plain pickle of today": pickle.dumps({"a": 1}, 5),
    **{f"a plain pickle of a tensor, protocol {each}": pickle.dumps({"a": torch.ones(3)}, each) for each in (1, 2, 5)},
    "a plain pickle of a tensor on a GPU": pickle.dumps({"a": torch.ones(3)}, 2).replace(b"cpu", b"hpu"),
    "an empty file": b"",
    "a web page": b"<!DOCTYPE html><html></html>",
    "a pointer of git": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
    "a list": b'{"a": 1}\n',
    "a gzip file": b"\x1f\x8b\x08\x00" + bytes(20),
}
# The stream breaks before the thing in question, or the answer hangs on another part of torch.
UNSURE = frozenset({"a missing record", "a ragged size", *([] if RELEASE >= (2, 11) else ["tag cudax"])})


@dataclass(frozen=True)
class Tried:
    """Files, and what torch did with them and with the fixtures, by path: all in one process, which costs the most."""

    paths: dict[str, Path]
    truth: dict[str, list[object]]

    def __getitem__(self, title: str) -> tuple[Path, list[object]]:
        return self.paths[title], self.truth[str(self.paths[title])]


@pytest.fixture(scope="module")
def tried(tmp_path_factory: pytest.TempPathFactory) -> Tried:
    folder = tmp_path_factory.mktemp("made")
    weights = safetensors_of({"a": torch.ones(300)})
    files = {f"{place}.pt": content for place, content in enumerate(MADE.values())} | {
        "no end.pt": forge.checkpoint()[:-30],
        "whole.safetensors": weights,
        "renamed.pt": weights,
        "cut in its header.safetensors": weights[:60],
        "cut.safetensors": weights[:700],
    }
    for name, content in files.items():
        (folder / name).write_bytes(content)
    (folder / "folder").mkdir()
    paths = {name: folder / name for name in (*files, "folder")}
    paths |= {title: folder / f"{place}.pt" for place, title in enumerate(MADE)}
    return Tried(paths, told([*FILES, *paths.values()]))


def test_made(tried: Tried) -> None:
    for_each(MADE, lambda title: agrees(*tried[title], exact=RELEASE >= (2, 6) and title not in UNSURE))


def test_directories_and_safetensors(tried: Tried) -> None:
    agrees(*tried["whole.safetensors"], exact=RELEASE >= (2, 13))
    agrees(*tried["renamed.pt"], exact=False)  # its first byte may be an opcode
    agrees(*tried["folder"])


def test_without_safetensors(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    said = foretold(path, InstalledTorch("2.13.0", absent={"safetensors"}))
    assert said.text.startswith("Attempting to load a safetensors file but safetensors is not installed. ")


@pytest.mark.skipif(RELEASE < (2, 6), reason="older releases know one of the variables")
def test_both_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, names = tmp_path / "model.pt", ("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD")
    torch.save({}, path)
    for name in names:
        monkeypatch.setenv(name, "1")
    with pytest.raises(RuntimeError) as raised:
        torch.load(path)
    said = foretold(path, InstalledTorch(torch.__version__, environ=dict.fromkeys(names, "1")))
    assert (said.exact, said.error, said.text) == (True, "RuntimeError", str(raised.value))


# -- a real GPU -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Seen:
    name: str
    outcome: str
    error: str = ""
    text: str = ""


def seen_on_gpu() -> Iterator[Seen]:
    """What torch 2.11.0+cu130 said on a machine with one H200 to ``torch.load(path)``."""
    text = (DATA / "h200" / "errors.txt").read_text(encoding="utf-8")
    for block in re.split(r"^(?=OK |ERR )", text, flags=re.MULTILINE):
        head, _, rest = block.partition("\n")
        found = re.fullmatch(r"(OK|ERR) +(\S+) \{\} ?\w*", head)
        if found is None or not (DATA / "h200" / found[2]).exists():
            continue
        if found[1] == "OK":
            yield Seen(found[2], "loads")
        else:
            error, _, words = rest.partition(" : ")
            lines = [line.removeprefix("    ") for line in words.rstrip("\n").split("\n")]
            yield Seen(found[2], "raises", error.split()[-1], "\n".join(lines))


@pytest.mark.parametrize("seen", list(seen_on_gpu()), ids=lambda seen: seen.name)
def test_messages_recorded_with_a_real_gpu(seen: Seen) -> None:
    said = foretold(DATA / "h200" / seen.name, InstalledTorch("2.11.0+cu130", {"cuda": 1}))
    assert said.exact
    assert (said.outcome, said.error, said.text) == (seen.outcome, seen.error, seen.text)


def test_the_gpu_has_seen_every_file() -> None:
    names = {seen.name for seen in seen_on_gpu()}
    assert {"state_dict_cuda0.pt", "state_dict_cuda1.pt", "whole_module_cuda0.pt", "aoti_cuda0.pt2"} <= names
    assert len(names) >= 10


# -- other releases and settings --------------------------------------------------------------------------------------


def test_the_words_of_each_release() -> None:
    net = DATA / "h200" / "whole_custom_module_cuda0.pt"
    assert "add_safe_globals([Net])" in foretold(net, InstalledTorch("2.6.0")).text
    assert "add_safe_globals([__main__.Net])" in foretold(net, InstalledTorch("2.7.0")).text
    package = DATA / "h200" / "aoti_cuda0.pt2"
    assert foretold(package, InstalledTorch("2.10.0")).text.endswith("data.pkl: file not found")
    assert foretold(package, InstalledTorch("2.11.0")).text.endswith("modified after saving.")


def test_before_two_six_the_file_is_run() -> None:
    weights, net = DATA / "h200" / "state_dict_cuda0.pt", DATA / "h200" / "whole_custom_module_cuda0.pt"
    said = foretold(weights, InstalledTorch("2.5.1"))
    assert said.exact
    assert said.text.startswith("Attempting to deserialize object on a CUDA device")
    assert said.warnings[0].startswith("You are using `torch.load` with `weights_only=False`")
    assert foretold(weights, InstalledTorch("2.3.1")).warnings == ()
    assert not foretold(net, InstalledTorch("2.5.1", {"cuda": 1})).exact


def test_an_id_that_cannot_be_printed(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    nested = b")" + b"\x85" * 100_000
    path.write_bytes(forge.checkpoint(forge.pickled(forge.tuple_of(nested, "a", "b", "c", 1) + b"Q")))
    assert "but got (<tuple>)" in foretold(path, InstalledTorch("2.9.0")).text


def test_a_package_that_is_not_installed_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(MADE["a name of somebody's"])
    said = foretold(path, InstalledTorch("2.5.1", absent={"models"}))
    assert (said.error, said.text, said.exact) == ("ModuleNotFoundError", "No module named 'models'", True)


@pytest.mark.parametrize(
    ("variable", "version", "weights_only"),
    [
        ("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "2.3.0", True),
        ("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "2.13.0", False),
        ("", "2.13.0", True),
        ("", "2.5.0", False),
    ],
)
def test_the_environment_decides(variable: str, version: str, weights_only: bool) -> None:
    assert InstalledTorch(version, environ={variable: "TRUE"}).weights_only == weights_only


@pytest.mark.parametrize("version", ["", "1.13.1", "2.16.0", "3.0", "unknown"])
def test_nothing_is_predicted_for_other_releases(version: str) -> None:
    said = foretold(DATA / "h200" / "state_dict_cuda0.pt", InstalledTorch(version))
    assert (said.outcome, said.exact) == ("unknown", False)


def test_uncertain_devices_make_no_certain_words() -> None:
    said = foretold(DATA / "h200" / "state_dict_cuda0.pt", InstalledTorch("2.13.0+cu130", sure=False))
    assert (said.outcome, said.exact) == ("raises", False)


# -- damage -----------------------------------------------------------------------------------------------------------


def test_an_archive_without_its_end(tried: Tried) -> None:
    path, truth = tried["no end.pt"]
    said = foretold(path)
    assert [said.outcome, said.error, said.text] == truth[:3]


@pytest.mark.skipif(RELEASE < (2, 13), reason="this torch cannot load safetensors")
@pytest.mark.parametrize("name", ["cut in its header.safetensors", "cut.safetensors"])
def test_a_cut_safetensors_file(name: str, tried: Tried) -> None:
    path, truth = tried[name]
    said = foretold(path)
    assert (said.outcome, said.error) == (truth[0], truth[1]) == ("raises", "SafetensorError")
    assert said.text == truth[2]
