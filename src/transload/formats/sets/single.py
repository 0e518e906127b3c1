"""A folder with one checkpoint among other files: Hugging Face's models, most of all."""

from __future__ import annotations

from contextlib import closing

from transload.checkpoint import Checkpoint, Part
from transload.errors import CannotReadError
from transload.formats.sets.merger import Merger
from transload.frozen import replace
from transload.io.folder import Listing
from transload.io.sources import refuse_fault

# The usual names of a model's weights, best first. Other files that look like checkpoints belong to the training.
_USUAL_NAMES = (
    *("model.safetensors", "pytorch_model.bin", "adapter_model.safetensors", "adapter_model.bin"),
    *("diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.bin", "pytorch_lora_weights.safetensors"),
    "consolidated.safetensors",
)
RAW_TENSORS = "transload-raw"
"""What the index of a folder of raw tensors, which ``convert`` writes, says that it is."""
_SUFFIXES = (".safetensors", ".pt", ".pth", ".ckpt", ".bin", ".pt2", ".pth.tar", ".pkl")


def checkpoint_files(listing: Listing) -> list[str]:
    """The files that look like checkpoints."""
    return [name for name in listing.files if name.lower().endswith(_SUFFIXES)]


def is_raw(listing: Listing) -> bool:
    """Whether a folder holds raw tensors, each in a file that does not say what is in it."""
    return "index.json" in listing.files and f'"{RAW_TENSORS}"' in listing.text("index.json")


def matches(listing: Listing) -> bool:
    """Whether a file has a usual name, or is the only one that looks like a checkpoint."""
    return bool(_main(listing))


def _main(listing: Listing) -> str:
    files = checkpoint_files(listing)
    only = files[0] if len(files) == 1 and not is_raw(listing) else ""
    return next((name for name in _USUAL_NAMES if name in listing.files), only)


def read(merger: Merger) -> Checkpoint:
    """Read that file."""
    listing, name = merger.listing, _main(merger.listing)
    checkpoint = merger.open(name)
    if checkpoint is None:
        return Checkpoint(merger.path, "directory", 0, problems=merger.noted.problems())
    facts = [("read", f"{name}, of the {len(listing.files):,} files in the directory")]
    flavour = checkpoint.flavour
    if name.startswith("adapter_"):
        from transload.formats.adapters import CONFIG, facts_of, pieces_of, read_config

        try:
            with closing(listing.folder.open(listing.prefix + CONFIG)) as source:
                config = read_config(source)
        except CannotReadError as error:
            refuse_fault(error, listing.folder.name)
            config = {}
        if kind := str(config.get("peft_type") or "")[:40]:
            flavour = f"{'LoRA' if kind == 'LORA' else kind} adapter"
            facts += facts_of(pieces_of((tensor.name, tensor) for tensor in checkpoint.tensors), config)
    return replace(
        checkpoint,
        path=merger.path,
        flavour=flavour,
        storages=tuple(storage._replace(file=name) for storage in checkpoint.storages),
        parts=(Part(name, "weights", listing.files[name], role="member"), *checkpoint.parts),
        facts=(*facts, *checkpoint.facts),
    )
