"""Texts about files of older formats, and about how a file is opened and saved."""

from __future__ import annotations

from typing import Any

from transload.explaining.known import Known, Values
from transload.explaining.texts.archives import AGAIN, KIND, LOADING

__all__ = ["TABLE"]


def _sizes(values: Values, _: str) -> dict[str, Any]:
    """In torch up to 2.14 the two numbers stand behind one another, with nothing between."""
    if values.get("want"):
        return {"values": {"numbers": f"{values['have']} where {values['want']} were expected"}}
    return {
        "values": {"numbers": "another number than expected"},
        "wrong": "The %ld are a slip of torch's: the two numbers behind them ({digits}) are the expected and the found "
        "one, run together.",
    }


TABLE: tuple[Known, ...] = (
    Known(
        "legacy-cut-off",
        (
            "unexpected EOF, expected {missing:d} more bytes. The file might be corrupted.",
            "unexpected EOF. The file might be corrupted.",
        ),
        "The file is cut off, inside the bytes of a tensor. All tensors before are whole.",
        AGAIN,
        torch="1.0 and later",
        needs=("file",),
    ),
    Known(
        "legacy-wrong-size",
        (
            "storage has wrong byte size: expected {want:d} got {have:d}",
            "storage has wrong byte size: expected %ld got %ld{digits:d}",
            "storage has wrong size: expected {want:d} got {have:d}",
        ),
        "A tensor's bytes in the file are not as many as its shape needs ({numbers}): the file is damaged. Usual ways "
        "to it are a broken download, and several processes that saved to one path at the same time.",
        ("Let only one rank save.", *AGAIN),
        torch="1.0 and later",
        needs=("file",),
        work=_sizes,
    ),
    Known(
        "record-wrong-size",
        ("record size ({have:d} bytes) does not match expected size ({want:d} bytes",),
        "A tensor's record holds {have} bytes, and its shape needs {want}: the file is damaged, or was changed.",
        AGAIN,
        torch="2.10 and later; older ones read foreign memory instead",
        needs=("file",),
    ),
    Known(
        "mmap-not-plain",
        ("Trying to resize storage that is not resizable",),
        "With mmap=True the bytes of a record are used as they lie in the file, and here they are fewer than the "
        "tensor needs: the record is compressed, or cut off.",
        ("Load it without mmap=True.", "If that fails too, the file is damaged. " + AGAIN[1]),
        needs=("file",),
        context=LOADING,
        unless=r"collate\.py|default_collate",
    ),
    Known(
        "magic-number",
        ("Invalid magic number; corrupt file?",),
        "The file is a pickle, and none that torch.save wrote: of pickle.dump, joblib, or a program that saves by "
        "itself.",
        ("Load it with what wrote it, if you trust its author: loading a pickle can run code.", KIND),
        wrong="It need not be corrupt: a plain pickle gives the same message.",
        torch="1.0 and later",
        needs=("file",),
    ),
    Known(
        "legacy-protocol",
        ("RuntimeError: Invalid protocol version: {version:d}",),
        "The second number in the file is not what torch.save writes there: its beginning is damaged.",
        AGAIN,
        torch="1.0 and later",
        needs=("file",),
    ),
    Known(
        "mmap-legacy",
        ("mmap can only be used with files saved with `torch.save(",),
        "The file is of the old format of torch.save, which cannot be mapped.",
        (
            "Load it without mmap=True, or once, and save it again as a zip:",
            "| torch.save(torch.load(old), new)",
        ),
        torch="2.1 and later",
        needs=("file",),
    ),
    Known(
        "mmap-no-path",
        (
            "f must be a file path in order to use the mmap argument",
            "f must be a string filename in order to use mmap argument",
        ),
        "mmap=True needs a path, and torch.load was given an open file.",
        ("Pass the path, or leave mmap out.",),
        torch="2.1 and later",
    ),
    Known(
        "tar-format",
        ("Cannot use ``weights_only=True`` with files saved in the legacy .tar format.",),
        "torch takes the file for one of its oldest format, a tar, which weights_only does not read. It takes any tar "
        "for that, and also a file full of zeros, for which space was reserved and never written.",
        (
            "transload inspect FILE says which of the three it is.",
            "A file of torch.save: transload.load(path) reads it without running anything in it.",
            "With torch alone: weights_only=False, only if you trust its author.",
        ),
        torch="2.6 and later",
        needs=("file",),
    ),
    Known(
        "tar-of-something",
        ("filename 'storages' not found",),
        "torch took the file for its oldest format, a tar, and it is none: it is full of zeros (space was reserved for "
        "it and never written), or a tar of other files.",
        (KIND, "A tar of files: unpack it, and load what is in it.", *AGAIN),
        needs=("file",),
    ),
    Known(
        "script-in-load",
        ("Cannot use ``weights_only=True`` with TorchScript archives passed to ``torch.load``.",),
        "The file is a TorchScript program, not an object of torch.save.",
        ("Load it as what it is, if you trust its author, since it is code:", "| model = torch.jit.load(path)"),
        wrong="weights_only=False is not needed for it: torch.jit.load is the loader of such files.",
        torch="2.6 and later",
        needs=("file",),
    ),
    Known(
        "script-in-load-warning",
        ("'torch.load' received a zip file that looks like a TorchScript archive dispatching to 'torch.jit.load'",),
        "The file is a TorchScript program, and torch.load hands it on. It is no fault.",
        ("Call torch.jit.load(path) to silence it.",),
        torch="1.5 and later",
        role="remark",
    ),
    Known(
        "zip-for-old-torch",
        ("{name:w} is a zip archive (did you mean to use torch.jit.load()?)",),
        "The file is of the zip format, which this torch (before 1.6) does not read; or the file was opened, and not "
        "at its beginning, when torch.load got it.",
        (
            "Load it with torch 1.6 or newer. For an old one, save it again in the old format:",
            "| torch.save(obj, path, _use_new_zipfile_serialization=False)",
        ),
        wrong="torch.jit.load reads TorchScript programs only; a file of torch.save is none.",
        torch="1.1 and later",
        needs=("file",),
    ),
    Known(
        "not-seekable",
        ("You can only torch.load from a file that is seekable.",),
        "torch.load was given a stream that cannot go back, such as a download or a pipe.",
        ("| obj = torch.load(io.BytesIO(stream.read()))",),
        torch="1.0 and later",
    ),
    Known(
        "byte-order",
        ("Unknown endianness type: {order:w}",),
        "The record of the byte order in the file says '{order}', and only 'little' and 'big' exist: it is damaged.",
        AGAIN,
        torch="2.1 and later",
        needs=("file",),
    ),
    Known(
        "byte-order-default",
        ("The default load endianness for checkpoints without a byteorder mark on big endian machines was changed",),
        "The machine is big-endian, and the file does not say what it is. torch takes it for little-endian, which it "
        "is unless it was saved on such a machine by an old torch.",
        ("If so: torch.serialization.set_default_load_endianness(torch.serialization.LoadEndianness.BIG).",),
        torch="2.1 and later",
        role="remark",
    ),
    Known(
        "save-two-dtypes",
        ("Cannot save multiple tensors or storages that view the same data as different types",),
        "Two of the tensors to be saved are views of the same bytes with different dtypes, and the format has one "
        "dtype for a storage.",
        ("Save a copy of one of them: tensor.clone().",),
        torch="1.11 and later",
    ),
)
