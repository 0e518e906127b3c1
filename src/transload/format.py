"""What the rest of transload must know about each format; how it is read is in ``formats``.

Nothing else asks for the name of a format, so that a new one needs a record here and a reader.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

from transload.frozen import NamedTuple

SAVE_AGAIN = "Load it with transload.load and save it again."


class Format(NamedTuple):
    """A format.

    ``container`` is what its one pickled object is in, if it has one: an archive of ``torch.save``, the same unpacked
    into a folder, the older stream or tar archive, or nothing (``bare``). ``named`` formats have only tensors and their
    names, except that the tensor of a ``nameless`` one has none. ``tagged`` is whether tensors are tagged with devices,
    ``mapped`` whether torch could map the file. A ``program`` has code; ``runs`` is the module of torch that loads it,
    if ``load`` does that with a trusted file. ``several`` files make up one checkpoint: those of ``ranks``, or shards;
    ``composed`` is whether they form one object, of tensors and ``Contents.values``; ``weights`` is the key in it that
    ``convert`` writes unless asked for more, empty if that is all of it.

    ``rescued`` and ``extracted`` are whether ``rescue`` accepts it, and whether to advise ``convert`` if its pickle
    needs trust. ``suffix`` is that of its files, ``metadata`` what the header has besides tensors.

    ``torch_load`` is what plain ``torch.load`` does with it, unless that depends on the file; ``other_loader`` fails,
    too, if the file is damaged. ``instead`` is what to do if ``load`` refuses it; ``retag`` why it cannot be retagged,
    and what to do, which is empty if that depends on its files.
    """

    name: str
    words: str
    container: Literal["", "zip", "stream", "tar", "folder", "bare"] = ""
    tagged: bool = True
    mapped: bool = False
    named: bool = False
    nameless: bool = False
    program: bool = False
    compiled: bool = False
    runs: Literal["", "torch.jit", "torch.export"] = ""
    several: bool = False
    ranks: bool = False
    composed: bool = False
    weights: str = ""
    rescued: bool = False
    extracted: bool = False
    suffix: str = ".pt"
    metadata: Literal["", "text", "values"] = ""
    torch_load: str = ""
    other_loader: str = ""
    instead: str = ""
    retag: tuple[str, str] = ("", "")

    @property
    def by_torch_save(self) -> bool:
        """Whether ``torch.save`` wrote it."""
        return self.container in ("zip", "stream", "tar", "folder")


_NO_DEVICE = ("this format carries no device", "There is nothing to change: transload.load reads it.")
_NUMPY = "fails: read it with numpy.load(path), or with transload.load"

_program = partial(Format, program=True)
_named = partial(Format, tagged=False, named=True, retag=_NO_DEVICE)
_several = partial(Format, several=True, rescued=True)

_ALL = (
    Format("torch-zip", "torch.save zip archive", "zip", mapped=True, rescued=True, extracted=True),
    Format("torch-legacy", "torch.save legacy stream", "stream", rescued=True, extracted=True),
    Format(
        "torch-tar",
        "torch.save tar archive (torch 0.1.1 to 0.1.9)",
        "tar",
        extracted=True,
        torch_load="refuses this format unless weights_only=False; do that only if you trust the file",
        retag=("it has the tar format of torch 0.1", SAVE_AGAIN),
    ),
    Format(
        "torch-directory",
        "unpacked torch.save archive",
        "folder",
        extracted=True,
        torch_load="fails on a directory: {rescue} packs it into a file",
        retag=("it is an unpacked archive", "Pack it into a file first, and retag that.\n$ {rescue}"),
    ),
    _program(
        "torchscript",
        "TorchScript program",
        runs="torch.jit",
        rescued=True,
        extracted=True,
        torch_load="fails: this is a program, load it with torch.jit.load(path, map_location='cpu')",
        instead="Run it with torch.jit.load(path, map_location='cpu'), or pass weights_only=False.",
        retag=(
            "it is a TorchScript program: its code names devices, too",
            "Move it with torch: torch.jit.load(path, map_location='cpu').save(other)",
        ),
    ),
    _program(
        "torch-export",
        "torch.export program",
        runs="torch.export",
        rescued=True,
        torch_load="fails: this is a program, load it with torch.export.load(path)",
        instead="Load it with torch.export.load(path), which needs the devices it names; or pass weights_only=False, "
        "which moves it to those that exist.",
        retag=(
            "it is a torch.export program: its graph names devices, too",
            "Move it like this: torch.export.save(transload.load(path, weights_only=False), other)",
        ),
    ),
    _program(
        "aotinductor",
        "AOTInductor package",
        compiled=True,
        torch_load="fails: this is compiled code, load it with torch._inductor.aoti_load_package(path)",
        instead="Load it with torch._inductor.aoti_load_package(path).",
        retag=("it is a compiled AOTInductor package, for one kind of device", "Compile it for the other device."),
    ),
    _program(
        "torch-package",
        "torch.package archive",
        torch_load="fails: this is a package of code, open it with torch.package.PackageImporter(path)",
        instead="Open it with torch.package.PackageImporter(path).",
        retag=("it is a torch.package archive, with code that may name devices", "Export the package again."),
    ),
    _named(
        "safetensors",
        "safetensors",
        mapped=True,
        rescued=True,
        suffix=".safetensors",
        metadata="text",
        torch_load="loads it only from torch 2.13 on, if its name ends in .safetensors; "
        "otherwise use safetensors.torch.load_file(path)",
        other_loader="safetensors.torch.load_file(path)",
        retag=("a safetensors file carries no device", "There is nothing to change: it loads anywhere."),
    ),
    _named(
        "gguf",
        "GGUF",
        mapped=True,
        torch_load="fails, with an error that does not say why: it is a file of llama.cpp, and transload.load reads "
        "what is not quantized",
        metadata="values",
        other_loader="transload.load",
    ),
    _named("npz", "numpy archive", torch_load=_NUMPY),
    _named("npy", "numpy array", nameless=True, torch_load=_NUMPY),
    _several(
        "sharded",
        "sharded checkpoint",
        tagged=False,
        torch_load="loads only one shard at a time: the index lists which file has which tensors",
        retag=("it is a checkpoint of several files", ""),
    ),
    _several(
        "dcp",
        "torch.distributed.checkpoint directory",
        composed=True,
        torch_load="fails on a directory: use transload.load or torch.distributed.checkpoint.load, or convert it to a "
        "file: transload convert DIR NEW.pt",
        retag=("torch.distributed.checkpoint names no device to load to", "There is nothing to change."),
    ),
    _several(
        "deepspeed",
        "DeepSpeed checkpoint directory",
        ranks=True,
        composed=True,
        weights="module",
        torch_load="fails on a directory: use transload.load, or convert it to a file: transload convert DIR NEW.pt, "
        "or python -m deepspeed.utils.zero_to_fp32 DIR OUT",
        retag=("it is a directory of several files", ""),
    ),
    _several(
        "rank-files",
        "folder of rank files",
        ranks=True,
        composed=True,
        weights="model",
        torch_load="fails on a directory, and a file has only the pieces of a rank: use transload.load, or convert it "
        "to a file: transload convert DIR NEW.pt",
        retag=("it is a directory of several files", ""),
    ),
    _several(
        "megatron",
        "Megatron checkpoint directory",
        ranks=True,
        composed=True,
        weights="model",
        torch_load="fails on a directory: use transload.load, or convert it to a file: transload convert DIR NEW.pt",
        retag=("it is a directory of several files", ""),
    ),
    Format(
        "directory", "directory", torch_load="fails on a directory", retag=("it is a directory", "Name a file in it.")
    ),
    Format("pickle", "plain pickle", "bare", extracted=True),
)

FORMATS: dict[str, Format] = {format_.name: format_ for format_ in _ALL}
"""The formats of checkpoints, by name. For any other file, ``format`` is what it is (``html``, ``gzip`` …)."""


def format_of(name: str) -> Format:
    """The format with a name; for a file that is not a checkpoint, one without properties."""
    return FORMATS.get(name) or Format(name, name, retag=(f"files of the format {name} cannot be retagged", SAVE_AGAIN))
