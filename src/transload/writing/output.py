"""Write files and directories that appear completely or not at all, also when several belong together.

A ``Bundle`` writes every file under a hidden name in its directory, and renames all of them when the last is written.
Three things make that safe at any moment, even if the process is killed:

- The index of shards comes last. While shards of the same names are replaced, ``_OldShards`` keeps hard links to the
  old ones, and a temporary index refers to the links. Where hard links are impossible, the index is hidden meanwhile,
  so that it never refers to a mix of old and new shards.
- A ``AtomicFolder`` and the directory it replaces are exchanged in one step, where the system supports that.
- The next conversion to the same place removes what killed conversions left behind: hidden files and directories are
  locked as long as their writer lives.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

from transload.errors import TransloadError, UsageError
from transload.io import atomic
from transload.io.atomic import AtomicFile, cannot_write
from transload.io.sources import real_path

SHARD = re.compile(r"(.+)-[0-9]{5}-of-[0-9]{5}\.safetensors", re.DOTALL)
_LINK = re.compile(r"\.[0-9a-f]{8}\.(?:old|again)\.(.+)-[0-9]{5}-of-[0-9]{5}\.safetensors", re.DOTALL)
PART = re.compile(r"\.(?P<shard>(.+)-[0-9]{5}-of-[0-9]{5}\.safetensors)\.[0-9]+-[0-9a-f]{8}\.part", re.DOTALL)
_CHOOSE = "Choose another name, or overwrite it: --force (overwrite=True in Python)."


def file_identity(file: str | int) -> set[tuple[int, int]]:
    """The device and inode of a file, given by path or descriptor; empty if it does not exist."""
    with suppress(OSError, ValueError):
        status = os.stat(file)
        return {(status.st_dev, status.st_ino)}
    return set()


def begins_with(path: str, start: bytes) -> bool:
    """Whether there is a regular file that begins with ``start``; reading a pipe would block."""
    with suppress(OSError):
        if os.path.isfile(path):
            with open(path, "rb") as file:
                return file.read(len(start)) == start
    return False


def refuse_source(source: str, target: str) -> None:
    """Refuse a target that is the source, or lies in it if that is a folder: it would become a part of the source."""
    own, written = file_identity(source), real_path(target)
    if not own.isdisjoint(file_identity(written)):
        raise UsageError("the target is the source itself", where=target, fix="Choose another name.")
    while (parent := os.path.dirname(written)) != written:
        written = parent
        if not own.isdisjoint(file_identity(written)):
            what = f"the target lies in the source, the folder {source}"
            raise UsageError(what, where=target, fix="Choose a place outside of that folder.")


def refuse_existing(path: str, *, overwrite: bool) -> None:
    """Refuse to overwrite anything, except a regular file if ``overwrite`` is set."""
    if not os.path.lexists(path):
        return
    if not overwrite:
        raise UsageError("the file already exists", where=path, fix=_CHOOSE)
    if os.path.exists(path) and not os.path.isfile(path):
        raise UsageError("the target is not a regular file", where=path, fix="Choose another name.")


def index_name(dst: str) -> str:
    """The path of the index of shards."""
    return f"{dst.removesuffix('.index.json').removesuffix('.safetensors')}.safetensors.index.json"


def sibling_files(index: str, pattern: re.Pattern[str]) -> Iterator[tuple[str, re.Match[str]]]:
    """Files in the directory of an index that match a pattern, whose last group is the stem of the index."""
    folder, name = os.path.split(os.path.abspath(index))
    stem = name.removesuffix(".safetensors.index.json")
    with suppress(OSError):
        for each in os.listdir(folder):
            match = pattern.fullmatch(each)
            if match and match[match.re.groups] == stem:
                yield os.path.join(folder, each), match


def _unlink(paths: Iterable[str]) -> None:
    for path in paths:
        with suppress(OSError):
            os.unlink(path)


class Bundle:
    """Files that are being written: on exit all of them appear, or none if there was an error.

    ``sources`` are the identities of the files that are read: none is ever replaced.
    """

    def __init__(self, *, overwrite: bool, sources: set[tuple[int, int]] | None = None) -> None:
        self._overwrite = overwrite
        self._sources = sources or set()
        self._files: list[AtomicFile | AtomicFolder] = []
        self._index = ""
        self._removed: list[str] = []

    def __enter__(self) -> Any:  # typing.Self is newer than Python 3.10
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if kind is None:
            self._commit()
            return
        for file in self._files:
            file.discard()
        if isinstance(error, OSError) and not isinstance(error, TransloadError):
            raise cannot_write(error, self._files[-1].path if self._files else "") from error

    def add(self, path: str, *, is_index: bool = False) -> AtomicFile:
        """Start a file. The last one added is renamed last.

        An index refers to all others: to the old ones or to the new ones, never to both.
        """
        refuse_existing(path, overwrite=self._overwrite)
        self._refuse_source(path, path)
        self._files.append(file := AtomicFile(path))
        self._index = path if is_index else self._index
        return file

    def add_folder(self, path: str) -> AtomicFolder:
        """Start a directory."""
        if os.path.isdir(path):
            for name in (*os.listdir(path), *(_files_in(path) if _is_ours(path) else ())):
                self._refuse_source(os.path.join(path, name), path)
        self._files.append(folder := AtomicFolder(path, overwrite=self._overwrite))
        return folder

    def remove(self, path: str) -> None:
        """Remove a file once the others are in place: they replace it under other names."""
        self._refuse_source(path, path)
        self._removed.append(path)

    def _refuse_source(self, path: str, where: str) -> None:
        """Refuse to overwrite a source, even with ``overwrite``."""
        if not self._sources.isdisjoint(file_identity(path)):
            raise UsageError("the target is the source itself", where=where, fix="Choose another name.")

    @property
    def paths(self) -> list[str]:
        """The paths of all files, in order."""
        return [file.path for file in self._files]

    def _commit(self) -> None:
        existing = {path for path in self.paths if os.path.lexists(path)}
        shards = [path for path in self.paths if path in existing and path.endswith(".safetensors")]
        old = None
        done = committing = 0
        try:
            for file in self._files:
                if isinstance(file, AtomicFile):
                    os.fsync(file.descriptor)
            if shards and self._index and os.path.isfile(self._index):
                old = _OldShards(self._index, shards)
            committing = 1
            for file in self._files:
                file.commit()
                done += 1
        except BaseException as error:
            for file in self._files[done + committing :]:  # the one that failed discarded itself
                file.discard()
            _unlink(path for path in self.paths[:done] if path not in existing)
            if old is not None:
                with suppress(OSError):
                    old.restore(touched=done > 0)
            if isinstance(error, OSError) and not isinstance(error, TransloadError):
                raise cannot_write(error, self.paths[done]) from error
            raise
        if old is not None:
            old.forget()
        if self._index:  # the index no longer refers to links that a killed conversion left behind
            _unlink(path for path, _ in sibling_files(self._index, _LINK))
        _unlink(self._removed)


class _OldShards:
    """The shards of an index while new ones of the same names replace them.

    A temporary index refers to hard links of the old shards. Where hard links are impossible, the index is hidden, so
    that nobody mistakes a mix of old and new shards for one checkpoint.
    """

    def __init__(self, index: str, replaced: list[str]) -> None:
        self._index = index
        self._folder = os.path.dirname(os.path.abspath(index))
        self._links: dict[str, str] = {}
        self._hidden = ""
        self._text = b""
        try:
            self._link(replaced)
        except (OSError, ValueError):  # hard links are not supported, or the index is invalid
            self.forget()
            self._hidden = atomic.hidden_name(real_path(index))
            os.rename(real_path(index), self._hidden)
            atomic.flush_directory(os.path.dirname(self._hidden))
        except BaseException:
            self.forget()
            raise

    def _link(self, replaced: list[str]) -> None:
        from transload.formats.sets.sharded import MAX_INDEX

        with open(self._index, "rb") as file:
            self._text = file.read(MAX_INDEX)
        table = json.loads(self._text)
        shards = table.get("weight_map") if isinstance(table, dict) else None
        if not isinstance(shards, dict) or not all(isinstance(shard, str) for shard in shards.values()):
            raise ValueError("not an index")
        used, token = set(shards.values()), secrets.token_hex(4)
        renamed: dict[str, str] = {}
        for path in replaced:
            name = os.path.basename(path)
            if name in used:
                renamed[name] = f".{token}.old.{name}"  # loaders recognize the format by the suffix
                link = os.path.join(self._folder, renamed[name])
                os.link(real_path(path), link)
                self._links[path] = link
        if self._links:
            atomic.flush_directory(self._folder)
            linked = {tensor: renamed.get(shard, shard) for tensor, shard in shards.items()}
            self._write(json.dumps({**table, "weight_map": linked}, indent=2, ensure_ascii=False).encode() + b"\n")

    def _write(self, text: bytes) -> None:
        with AtomicFile(self._index) as file:
            file.write([text])

    def restore(self, *, touched: bool) -> None:
        """Put the old shards back; if that fails, the temporary index stays and refers to the links.

        A hidden index is not restored if it would refer to a mix of old and new shards.
        """
        for path, link in self._links.items() if touched else ():
            again = os.path.join(self._folder, os.path.basename(link).replace(".old.", ".again.", 1))
            os.link(link, again)
            os.replace(again, real_path(path))
            with suppress(FileNotFoundError):  # os.replace does nothing if both names are the same file
                os.unlink(again)
        if self._links:
            self._write(self._text)
        elif self._hidden and not touched:
            os.rename(self._hidden, real_path(self._index))
        self.forget()

    def forget(self) -> None:
        """Remove the links, or the hidden index."""
        _unlink([*self._links.values(), self._hidden])


# -- directories


_UNIVERSAL = r"\w+_universal/(?:(?:zero_pp_rank_0_)?mp_rank_00_model_states|zero/optimizer_state|zero/[^/]+/\w+)\.pt"
_FOLDERS = (
    ("index.json", re.compile(r"[0-9]{6,}\.bin")),
    (".metadata", re.compile(r"__0_0\.distcp")),
    ("latest_universal", re.compile(_UNIVERSAL)),
)
"""What a conversion writes into a directory: the index, and other files, which may be in directories below."""


def _files_in(folder: str) -> Iterator[str]:
    """What is in a directory and in those below, by relative path; of directories, those that are links or empty."""
    for parent, folders, files in os.walk(folder):
        links = [name for name in folders if os.path.islink(os.path.join(parent, name))]
        for name in (*files, *links, *(() if folders or files else (".",))):
            yield os.path.relpath(os.path.join(parent, name), folder).replace(os.sep, "/")


def _is_ours(folder: str) -> bool:
    """Whether a directory has only what a conversion writes."""
    return any(
        os.path.isfile(os.path.join(folder, index))
        and all(name == index or data.fullmatch(name) for name in _files_in(folder))
        for index, data in _FOLDERS
    )


class AtomicFolder:
    """A directory that appears when all of it is on disk. It replaces only one like those that conversions write."""

    def __init__(self, path: str, *, overwrite: bool) -> None:
        self.path = path.rstrip("/" + os.sep) or path
        self._target = real_path(self.path)
        self._overwrite = overwrite
        self._lock = -1
        try:
            # Remove what killed conversions left. If one was killed between two renames, restore the old directory.
            with suppress(FileNotFoundError):
                flags = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0)
                for left, match in atomic.abandoned(self._target, flags, r"(?P<old>\.old)?"):
                    if match["old"] and not os.path.lexists(self._target):
                        os.rename(left, self._target)
                    else:
                        _remove_folder(left)
            self._refuse_existing()
            self.hidden = atomic.hidden_name(self._target)
            os.mkdir(self.hidden)
        except OSError as error:
            raise cannot_write(error, path) from error
        with suppress(OSError):
            self._lock = os.open(self.hidden, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
            atomic.try_lock(self._lock)

    def _refuse_existing(self) -> None:
        if not os.path.lexists(self.path):
            return
        if not os.path.isdir(self.path):
            raise UsageError("the target is a file, not a directory", where=self.path, fix="Choose another name.")
        if os.listdir(self.path) and not (self._overwrite and _is_ours(self.path)):
            fix = _CHOOSE if _is_ours(self.path) else "Choose another name: transload replaces only what it writes."
            raise UsageError("the directory already exists and is not empty", where=self.path, fix=fix)

    def commit(self) -> None:
        """Move it into place, then remove the old directory."""
        old = f"{self.hidden}.old"
        try:
            self._refuse_existing()
            for parent, _, _ in os.walk(self.hidden):
                atomic.flush_directory(parent)
            if not os.path.isdir(self._target):
                os.rename(self.hidden, self._target)
            elif swap(self.hidden, self._target):
                old = self.hidden
            else:
                os.rename(self._target, old)
                os.rename(self.hidden, self._target)
        except BaseException:
            if os.path.isdir(old) and not os.path.lexists(self._target):
                os.rename(old, self._target)
            self.discard()
            raise
        atomic.flush_directory(os.path.dirname(self._target))
        self.hidden = old
        self.discard()

    def discard(self) -> None:
        """Remove it; after a commit, the old directory."""
        _remove_folder(self.hidden)
        with suppress(OSError):
            os.close(self._lock)
        self._lock = -1


def _remove_folder(folder: str) -> None:
    """Remove a directory, and what is in it; links are not followed."""
    with suppress(OSError):
        for entry in [*os.scandir(folder)]:
            if entry.is_dir(follow_symlinks=False):
                _remove_folder(entry.path)
            else:
                os.unlink(entry.path)
        os.rmdir(folder)


_AT_FDCWD = -100  # paths are relative to the working directory
_RENAME_EXCHANGE = 2  # of renameat2(2), in Linux since 3.15 and in glibc since 2.28


def swap(first: str, second: str) -> bool:
    """Exchange two paths atomically; return false, with nothing done, if the system does not support that."""
    if not sys.platform.startswith("linux"):
        return False
    with suppress(ImportError, OSError, AttributeError):  # no ctypes, or a libc without renameat2
        import ctypes

        rename = ctypes.CDLL(None).renameat2
        paths = [ctypes.c_char_p(os.fsencode(path)) for path in (first, second)]
        return not rename(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], ctypes.c_uint(_RENAME_EXCHANGE))
    return False
