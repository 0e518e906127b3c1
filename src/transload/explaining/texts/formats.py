"""Texts of other formats and their loaders: safetensors, sharded and distributed checkpoints, programs."""

from __future__ import annotations

import re
from typing import Any

from transload.explaining.known import Known, Values

__all__ = ["TABLE"]

_KIND = "transload inspect FILE says what it is, and what loads it."
_AGAIN = "Compare its size with the original's, and download or copy it again."


def _safetensors(*words: str) -> tuple[str, ...]:
    """Of a file and of bytes; older releases print the name of the error in place of a sentence."""
    return tuple(f"Error while deserializing{of}: {each}" for each in words for of in (" header", ""))


def _folder(values: Values, _: str) -> dict[str, Any]:
    """torch 2.11 does not name it."""
    return {"values": {"folder": values.get("folder", "") or "to load"}}


def _dtype(values: Values, _: str) -> dict[str, Any]:
    unknown = re.search(r"unknown variant `(\w{1,40})`", values.get("why", ""))
    if unknown is None:
        return {}
    return {
        "values": {"dtype": unknown[1]},
        "cause": "The file holds tensors of the dtype {dtype}, which the installed safetensors does not know.",
        "fix": ("Use a newer one:", "$ pip install --upgrade safetensors"),
    }


TABLE: tuple[Known, ...] = (
    Known(
        "safetensors-map-location",
        ("Loading safetensors file with {how:w} map_location is not supported.",),
        "The file is of safetensors, and torch.load takes only one device for such a file, not a {how}.",
        ("Pass one device:", '| obj = torch.load(path, map_location="cpu")', "transload.load takes any of them."),
        torch="2.13 and later",
        needs=("file",),
    ),
    Known(
        "safetensors-not-installed",
        ("Attempting to load a safetensors file but safetensors is not installed.",),
        "The file is of safetensors, and torch.load needs the package of that name for it.",
        ("$ pip install safetensors", "transload.load reads it without."),
        torch="2.13 and later",
        needs=("file",),
    ),
    Known(
        "safetensors-header",
        _safetensors("header too large", "HeaderTooLarge", "header too small", "HeaderTooSmall")
        + _safetensors("invalid header length", "InvalidHeaderLength", "invalid UTF-8 in header", "InvalidHeader"),
        "The file is none of safetensors: its first eight bytes give no length of a header. It is a page of HTML, the "
        "pointer of Git LFS, a file of torch.save under a wrong name, or empty.",
        (_KIND, "A pointer of Git LFS:", "$ git lfs install && git lfs pull", f"Else: {_AGAIN[0].lower()}{_AGAIN[1:]}"),
        needs=("file",),
    ),
    Known(
        "safetensors-header-json",
        _safetensors("invalid JSON in header: {why:rest}", "InvalidHeaderDeserialization"),
        "The header of the file is not understood: it is damaged, or it names a dtype that the installed safetensors "
        "is too old for.",
        (_KIND, "If it is whole, use a newer safetensors:", "$ pip install --upgrade safetensors"),
        needs=("file",),
        work=_dtype,
    ),
    Known(
        "safetensors-incomplete",
        _safetensors("incomplete metadata, file not fully covered", "MetadataIncompleteBuffer"),
        "The file of safetensors is longer or shorter than its header says: most often a download was cut off.",
        (
            _AGAIN,
            "transload inspect FILE says which of its tensors are whole, and transload rescue FILE OUT saves them.",
        ),
        needs=("file",),
    ),
    Known(
        "safetensors-offsets",
        _safetensors("invalid offset for tensor `{name:w}`", "InvalidOffset")
        + _safetensors("invalid shape, data type, or offset for tensor", "TensorInvalidInfo"),
        "The header of the file contradicts itself: places, shapes and dtypes of its tensors do not agree. It is "
        "damaged, or was written by a faulty program.",
        (_AGAIN, _KIND),
        needs=("file",),
    ),
    Known(
        "safetensors-shared",
        ("Some tensors share memory, this will lead to duplicate memory on disk",),
        "Two names lead to one tensor (tied weights), and safetensors has no way to say so.",
        (
            "Of a model: safetensors.torch.save_model(model, path), which keeps one of the names.",
            "Of a file: transload convert FILE OUT.safetensors.",
        ),
    ),
    Known(
        "safetensors-strided",
        (
            "You are trying to save a non contiguous tensor: `{name:w}` which is not allowed.",
            "You are trying to save a non contiguous tensor",
        ),
        "A tensor is a view whose numbers do not lie one after the other, as safetensors stores them.",
        ("Save a copy of it: tensor.contiguous().",),
    ),
    Known(
        "distributed-missing-key",
        ("Missing key in checkpoint state_dict: {name:w}.",),
        "The distributed checkpoint has no tensor {name}: the model's names, or its configuration, are others than "
        "when it was saved.",
        (
            "transload inspect DIRECTORY lists the names it has.",
            "Ask only for those: leave others out of the state dict that is given to load.",
        ),
        torch="2.4 and later",
        needs=("file",),
    ),
    Known(
        "distributed-size",
        ("Size mismatch between saved {saved:o} and current: {current:o} for {name:w}",),
        "{name} has the size {saved} in the checkpoint and {current} in the model.",
        ("Build the model with the configuration it was trained with.",),
        torch="2.6 and later",
        needs=("file",),
    ),
    Known(
        "distributed-metadata",
        (
            "No such file or directory: '{folder}/.metadata'",
            "No such file or directory: PosixPath('{folder}/.metadata')",
            "AssertionError: metadata is None",
        ),
        "The directory {folder} is no distributed checkpoint, or its saving never finished: the file .metadata is "
        "written last.",
        ("Take the checkpoint before it.", "transload inspect DIRECTORY says what is in it."),
        needs=("file",),
        work=_folder,
    ),
    Known(
        "distributed-frame",
        ("CheckpointException ranks:dict_keys(", "Global metadata is not found. Falling back to rank local metadata."),
        "Ranks could not load a distributed checkpoint; what stands below, of each rank, says why.",
        role="frame",
    ),
    Known(
        "script-no-file",
        ("The provided filename {file:w} does not exist",),
        "There is no file {file}, seen from the folder in which the program runs.",
        ("Give the whole path.",),
        torch="1.7 and later",
    ),
    Known(
        "export-other-kind",
        (
            (
                "We ran into an error when deserializing the saved file. Please check the warnings above for possible "
                "errors."
            ),
            "Unable to load package. f must be a buffer or a file ending in .pt2.",
        ),
        "torch.export.load was given a file that is no exported program: it reads archives ending in .pt2 only.",
        ("A file of torch.save: torch.load(path). A TorchScript program: torch.jit.load(path).", _KIND),
        needs=("file",),
    ),
    Known(
        "export-no-zip",
        ("File is not a zip file", "There is no item named 'version' in the archive"),
        "torch.export.load was given a file that is no exported program, or one that was cut off.",
        (_KIND, _AGAIN),
        needs=("file",),
        context=r"torch[/\\]export[/\\]",
    ),
    Known(
        "export-version",
        ("Serialized schema version {saved:o} does not match our current schema version {current:o}.",),
        "The exported program is of version {saved} of its format, and this torch reads {current}: the format changes "
        "between releases.",
        ("Export it again with the torch that is to run it, or load it with the one that made it.",),
        needs=("file",),
    ),
    Known(
        "zero-files-missing",
        ("Expected {world:d} of '*_optim_states.pt' under '{folder}' but found {found:d} files",),
        "DeepSpeed wrote {world} files, one a rank, and {found} are in {folder}: a rank did not save, not all were "
        "copied, or files of another run lie between them.",
        (
            "Look for the others on the machines of those ranks, each of which has its own disk.",
            "transload inspect DIRECTORY says which are missing.",
        ),
        needs=("file",),
    ),
    Known(
        "transformers-no-lfs",
        ("You seem to have cloned a repository without having git-lfs installed.",),
        "The files of the repository are pointers of Git LFS, three lines of text each, in place of the weights.",
        ("$ git lfs install && git lfs pull",),
        needs=("file",),
    ),
    Known(
        "transformers-load",
        (
            "Unable to load weights from pytorch checkpoint file for '{model}' at '{file}'",
            "Unable to load weights from pytorch checkpoint file",
        ),
        "transformers could not load the file, and says nothing of why: it is damaged, of another kind, or a pointer "
        "of Git LFS. The error above it, if there is one, says more.",
        (_KIND, "Download it again; a clone of the repository needs git-lfs."),
        wrong="from_tf=True is only for files of TensorFlow, and hardly ever what is missing.",
        needs=("file",),
        role="frame",
    ),
    Known(
        "yolov5-in-yolov8",
        ("appears to be an Ultralytics YOLOv5 model originally trained with https://github.com/ultralytics/yolov5",),
        "The file holds a whole model of YOLOv5, whose code is in modules called models and utils of that repository; "
        "the package ultralytics does not have them.",
        ("Load it from a clone of https://github.com/ultralytics/yolov5, or train a model of the newer package.",),
        needs=("file",),
    ),
    Known(
        "safetensors-device",
        ("SafetensorError: device {device:w} is invalid",),
        "safetensors was asked to load onto {device}, which is no device that it knows.",
        ("Name one as torch does (cuda:0, mps), or:", '| state = safetensors.torch.load_file(path, device="cpu")'),
        needs=("file",),
    ),
    Known(
        "safetensors-no-tensor",
        ("File does not contain tensor {name:w}",),
        "There is no tensor {name} in the file. The file itself was read without error: the names are of another model "
        "or another version of its code, or the tensor is in another shard.",
        ("transload inspect FILE lists what is in it.",),
        needs=("file",),
    ),
    Known(
        "script-operator",
        ("Unknown builtin op: {package:w}::{operator:w}",),
        "The TorchScript program uses the operator {operator} of {package}, which nothing has told this torch of.",
        ("Import the package that has it, before torch.jit.load:", "| import {package}"),
        torch="1.0 and later",
        needs=("file",),
    ),
    Known(
        "load-folder",
        ("[Errno 21] Is a directory: '{folder}'",),
        "torch.load was given a folder ({folder}), and loads single files only. It may be a checkpoint in several "
        "files, of transformers, DeepSpeed or torch.distributed, or the folder that one is in.",
        ("transload inspect FOLDER says what it is, and what loads it.",),
        needs=("file",),
        context=r"torch[/\\]serialization\.py|torch\.load\(",
    ),
    Known(
        "transformers-no-weights",
        (
            "Error no file named {names} found in directory {folder:w}.",
            "Error no file named {names} found in directory {folder:w}",
        ),
        "transformers finds no weights in {folder}: it is another folder than the one that was saved, the save was "
        "interrupted, or only an adapter (LoRA) is in it.",
        (
            "Look what is there: transload inspect FOLDER.",
            "An adapter (adapter_model.safetensors) is loaded by peft, on top of its base model.",
        ),
        needs=("file",),
    ),
)
