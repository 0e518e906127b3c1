"""A folder with one checkpoint among other files: Hugging Face's models, most of all."""

from __future__ import annotations

from transload.checkpoint import Checkpoint, Part
from transload.formats.sets.merger import Merger
from transload.frozen import replace
from transload.io.folder import Listing

# The usual names of a model's weights, best first. Other files that look like checkpoints belong to the training.
_USUAL_NAMES = (
    *("model.safetensors", "pytorch_model.bin", "adapter_model.safetensors", "adapter_model.bin"),
    *("diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.bin", "pytorch_lora_weights.safetensors"),
    "consolidated.safetensors",
)
_SUFFIXES = (".safetensors", ".pt", ".pth", ".ckpt", ".bin", ".pt2", ".pth.tar", ".pkl")


def checkpoint_files(listing: Listing) -> list[str]:
    """The files that look like checkpoints."""
    return [name for name in listing.files if name.lower().endswith(_SUFFIXES)]


def matches(listing: Listing) -> bool:
    """Whether a file has a usual name, or is the only one that looks like a checkpoint."""
    return bool(_main(listing))


def _main(listing: Listing) -> str:
    files = checkpoint_files(listing)
    return next((name for name in _USUAL_NAMES if name in listing.files), files[0] if len(files) == 1 else "")


def read(merger: Merger) -> Checkpoint:
    """Read that file."""
    listing, name = merger.listing, _main(merger.listing)
    checkpoint = merger.open(name)
    if checkpoint is None:
        return Checkpoint(merger.path, "directory", 0, problems=merger.noted.problems())
    return replace(
        checkpoint,
        path=merger.path,
        storages=tuple(storage._replace(file=name) for storage in checkpoint.storages),
        parts=(Part(name, "weights", listing.files[name], role="member"), *checkpoint.parts),
        facts=(("read", f"{name}, of the {len(listing.files):,} files in the directory"), *checkpoint.facts),
    )
