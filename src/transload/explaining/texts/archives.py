"""Texts about the file as an archive: cut off, damaged, or of another kind."""

from __future__ import annotations

from transload.explaining.known import Known

__all__ = ["AGAIN", "KIND", "LOADING", "TABLE"]

LOADING = (
    r"torch[/\\]serialization\.py|torch[/\\]_weights_only_unpickler\.py|torch\.load\(|PyTorchFileReader|"
    r"PytorchStreamReader|torch[/\\]jit[/\\]_serialization\.py|pickle_module|unpickler\.load"
)
"""Around words that many programs print: a checkpoint was being loaded."""

_LAST = (
    r'torch[/\\](?:serialization|_weights_only_unpickler)\.py"?[^\n]*\n(?:(?!  File )[ \t][^\n]*\n)*(?:\w+\.)*{error}\b'
)
"""The last frame before such an error is in torch's own loading."""
AGAIN = (
    "Compare its size with the original's, and download or copy it again.",
    "If there is no other copy: transload inspect FILE shows what is whole, and transload rescue FILE OUT saves it.",
)
KIND = "transload inspect FILE says what it is, and what loads it."
_ROOM = (
    "Make room, and save again.",
    "transload.save writes beside the old file and renames: a save that fails leaves the last one whole.",
)
_NOT_DAMAGED = (
    "Newer releases of torch add that the file is likely corrupted: it need not be. It only lacks a record that "
    "another kind of file has."
)


TABLE: tuple[Known, ...] = (
    Known(
        "archive-cut-off",
        (
            "PytorchStreamReader failed reading zip archive: failed finding central directory",
            "failed finding central directory",
        ),
        "The end of the file is missing: the archive's directory stands there. A download or a copy stopped, the disk "
        "ran full, or the program was killed while it saved.",
        AGAIN,
        torch="1.6 and later",
        needs=("file",),
    ),
    Known(
        "archive-cut-off-small",
        ("[Errno 22] Invalid argument", "negative seek value {place:d}"),
        "The file is most likely cut off: in a small archive without its directory torch searches backwards beyond "
        "the beginning, and the operating system refuses that.",
        AGAIN,
        torch="1.6 and later",
        needs=("file",),
        context=_LAST.format(error="(?:OSError|ValueError)"),
    ),
    Known(
        "archive-directory-damaged",
        ("PytorchStreamReader failed reading zip archive: invalid header or archive is corrupted",),
        "The archive's directory is damaged; a transfer that changes line ends (FTP in text mode, git without "
        "attributes) does that.",
        ("Transfer it again, in binary mode.", *AGAIN),
        torch="1.6 and later",
        needs=("file",),
    ),
    Known(
        "archive-none",
        ("PytorchStreamReader failed reading zip archive: not a ZIP archive",),
        "The file is not a zip archive, and torch.jit.load reads nothing else: it is a file of the old format of "
        "torch.save, or no checkpoint at all.",
        ("For a file of torch.save use torch.load.", KIND),
        torch="1.6 and later",
        needs=("file",),
    ),
    Known(
        "archive-record-damaged",
        (
            "PytorchStreamReader failed reading file {record:w}: invalid header or archive is corrupted",
            "PytorchStreamReader failed reading file {record:w}: decompression failed",
            "PytorchStreamReader failed reading file {record:w}: CRC-32 check failed",
        ),
        "The record {record} of the archive is damaged. The others may be whole.",
        AGAIN,
        torch="1.6 and later",
        needs=("file",),
    ),
    Known(
        "archive-read-failed",
        ("PytorchStreamReader failed reading file {record:w}: file read failed",),
        "The bytes of the record {record} could not be read: the file became shorter, or its disk failed.",
        AGAIN,
        torch="1.6 and later",
        needs=("file",),
    ),
    Known(
        "archive-other-kind",
        (
            "PytorchStreamReader failed locating file data.pkl: file not found",
            "[enforce fail at inline_container.cc:{line:d}] . file not found: {root:w}/data.pkl",
        ),
        "It is a zip archive, and none of torch.save: an exported program (.pt2), a package of torch.package, a model "
        "for mobiles, or an archive of something else.",
        (KIND, "An exported program: torch.export.load(path).", "A package: torch.package.PackageImporter(path)."),
        wrong=_NOT_DAMAGED,
        torch="1.6 and later",
        needs=("file",),
    ),
    Known(
        "archive-not-script",
        (
            "PytorchStreamReader failed locating file constants.pkl: file not found",
            "[enforce fail at inline_container.cc:{line:d}] . file not found: {root:w}/constants.pkl",
        ),
        "torch.jit.load was given a file that holds no TorchScript program: most likely one of torch.save, with a "
        "state dict or a whole module.",
        ("Load it with torch.load(path).", KIND),
        wrong=_NOT_DAMAGED,
        torch="1.6 and later",
        needs=("file",),
    ),
    Known(
        "archive-no-version",
        (
            'Expected hasRecord("version") to be true, but got false.',
            "[enforce fail at inline_container.cc:{line:d}] . file not found: {root:w}/version",
        ),
        "The archive has no record 'version' where torch looks for it: it was packed again by another program, which "
        "changed the order or the names of the folders, or it is no archive of torch's.",
        ("Take the original file, which must not be unpacked and packed again.", KIND),
        torch="1.6 and later",
        needs=("file",),
    ),
    Known(
        "archive-record-lost",
        (
            "PytorchStreamReader failed locating file {record:w}: file not found",
            "[enforce fail at inline_container.cc:{line:d}] . file not found: {record:w}",
        ),
        "The object in the file needs the record {record}, and the archive does not have it: it is lost, or the file "
        "is of the format of torch 1.4, which named records otherwise.",
        AGAIN,
        torch="1.6 and later",
        needs=("file",),
    ),
    Known(
        "archive-no-folder",
        ("file in archive is not in a subdirectory: {record:w}",),
        "The archive's records lie in no folder ('{record}'), and those of torch.save always do: it is a file of numpy "
        "(.npz) or another zip, or one that was packed again without the folder.",
        (
            "A file of numpy: numpy.load(path).",
            "One that was unpacked: take the original, or transload rescue FOLDER OUT.",
            KIND,
        ),
        torch="1.6 and later",
        needs=("file",),
    ),
    Known(
        "script-too-new",
        (
            (
                "Attempted to read a PyTorch file with version {version:d}, but the maximum supported version for "
                "reading is {most:d}"
            ),
        ),
        "The file is of version {version} of the format, and this torch reads up to {most}: it was made by a newer "
        "one.",
        ("Install a newer torch, or save it again with an older one.",),
        torch="1.4 and later",
        needs=("file",),
    ),
    Known(
        "script-too-old",
        (
            (
                "Attempted to read a PyTorch file with version {version:d}, but the minimum supported version for "
                "reading is {least:d}"
            ),
        ),
        "The TorchScript program is of version {version} of the format, and this torch reads {least} and later.",
        ("Export it again with a newer torch; an old torch still loads it.",),
        torch="1.4 and later",
        needs=("file",),
    ),
    Known(
        "write-failed",
        (
            "PytorchStreamWriter failed writing file {record:w}: file write failed",
            "PytorchStreamWriter failed writing file {record:w}: {why:w}",
        ),
        "The checkpoint could not be written whole: the disk or the quota is full. What is on the disk now is broken.",
        _ROOM,
        torch="1.6 and later",
    ),
    Known(
        "write-no-room",
        ("[Errno 28] No space left on device", "basic_ios::clear: iostream error"),
        "The checkpoint could not be written whole: the disk or the quota is full. What is on the disk now is broken.",
        _ROOM,
        context=r"torch[/\\]serialization\.py|torch\.save\(|safetensors",
    ),
    Known(
        "write-no-folder",
        ("Parent directory {folder} does not exist.",),
        "torch.save was to write into the folder {folder}, which is not there. It makes no folders.",
        ("Make it first:", "| os.makedirs(os.path.dirname(path), exist_ok=True)"),
        torch="1.12 and later",
    ),
    Known(
        "write-after-failure",
        ("unexpected pos {have:d} vs {want:d}",),
        "An earlier write to the same file had failed, most likely because the disk or the quota is full; this is "
        "what the archive says when it is closed. The file on the disk is broken.",
        _ROOM,
        torch="1.6 and later",
    ),
    Known(
        "miniz",
        (
            (
                "This is an internal miniz error. If you are seeing this error, there is a high likelihood that your "
                "checkpoint file is corrupted."
            ),
        ),
        "torch could not read the file as an archive of its own; what stands before this sentence says what failed.",
        (KIND,),
        wrong="The file need not be corrupted: the sentence is put behind every such error, also where it is only of "
        "another kind.",
        torch="2.11 and later",
        needs=("file",),
        role="frame",
    ),
)
