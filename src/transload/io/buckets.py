"""Files in buckets, by obstore, and whatever else fsspec opens. Both find the user's credentials themselves."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NoReturn
from zlib import crc32

from transload.errors import BrokenFileError, CannotReadError
from transload.io.folder import Entries
from transload.io.sources import shown

_BEGINNING = 128 << 10
_SECRETS = re.compile(r"\?\S+|//[^/@\s]+@")


def bucket_store(url: str) -> tuple[FsspecStore, str]:
    """The store of a URL, and its key there."""
    return FsspecStore.of(url)


class FsspecFile:
    """A file of a file system of fsspec."""

    def __init__(self, files: Any, key: str, name: str) -> None:
        self._files, self._key, self.name = files, key, name
        self.streams = 16 if getattr(files, "async_impl", False) else 1
        info = self._call(files.info, key)
        if info.get("type", "file") != "file":
            raise CannotReadError("this is a folder", where=name, fix="Add a slash at its end.")
        size = info.get("size")
        if type(size) is not int:
            raise CannotReadError("the store does not say how long it is", where=name, fix="Download it first.")
        self.size, self.stamp = size, _stamp(info)
        self.beginning: bytes = self._get(0, min(size, _BEGINNING)) if size else b""

    def fill(self, offset: int, views: Sequence[memoryview]) -> None:
        """Fill views with the bytes from ``offset`` on."""
        data = memoryview(self._get(offset, offset + sum(map(len, views))))
        for view in views:
            view[:] = data[: len(view)]
            data = data[len(view) :]

    def is_changed(self) -> bool:
        """Whether the store describes it in another way than when it was opened."""
        with suppress(Exception):
            self._files.invalidate_cache(self._files._parent(self._key))  # noqa: SLF001 - not every one has it
        return _stamp(self._call(self._files.info, self._key)) != self.stamp

    def _get(self, begin: int, end: int) -> bytes:
        data: bytes = self._call(self._files.cat_file, self._key, start=begin, end=end)
        if len(data) != end - begin:
            what = f"{len(data):,} of {end - begin:,} bytes were sent"
            raise BrokenFileError(what, where=self.name, fix="It was changed while it was read. Read it again.")
        return data

    def _call(self, function: Any, *arguments: Any, **named: Any) -> Any:
        try:
            return function(*arguments, **named)
        except Exception as error:  # noqa: BLE001 - libraries raise what they like
            _refuse(error, self.name)


def _stamp(info: dict[str, Any]) -> tuple[int, ...]:
    """What a write changes, as far as the store says it."""
    names = ("size", "ETag", "etag", "LastModified", "last_modified", "mtime", "created", "md5Hash", "generation")
    return tuple(crc32(str(info.get(name)).encode()) for name in names)


def _refuse(error: Exception, where: str) -> NoReturn:
    """Raise our error for that of a library, without the signatures and passwords that may be in it."""
    import errno

    said = _SECRETS.sub("…", str(error)).strip().partition("\n")[0][:300] or type(error).__name__
    number, fix = getattr(error, "errno", None), ""
    if isinstance(error, FileNotFoundError):
        said, number, fix = "there is no such file", errno.ENOENT, "Check the URL."
    elif isinstance(error, PermissionError):
        number, fix = errno.EACCES, "Check the credentials, and that they may read it."
    raise CannotReadError(said, where=where, fix=fix, errno=number) from error


class FsspecStore:
    """A file system of fsspec."""

    lists = True

    def __init__(self, files: Any, root: str, key: str) -> None:
        self._files, self._name, self._root = files, root, key

    @classmethod
    def of(cls, url: str) -> tuple[FsspecStore, str]:
        """The store and the key of a URL."""
        try:
            from fsspec.core import url_to_fs

            files, key = url_to_fs(url)
        except ImportError as error:
            scheme = url.partition("://")[0]
            what = f"{scheme}:// needs a library that is not installed: {error}"
            raise CannotReadError(what, where=shown(url), fix="$ pip install 'transload[remote]'") from error
        except Exception as error:  # noqa: BLE001 - libraries raise what they like
            _refuse(error, shown(url))
        key = key.rstrip("/")
        return cls(files, shown(url).rstrip("/"), key), key

    def open(self, key: str) -> FsspecFile:
        """Open a file."""
        return FsspecFile(self._files, key, self.shown(key))

    def list(self, key: str, most: int) -> Entries:
        """List a folder."""
        try:
            entries: list[dict[str, Any]] = self._files.ls(key, detail=True)
        except Exception as error:  # noqa: BLE001 - libraries raise what they like
            _refuse(error, self.shown(key))
        files: dict[str, int] = {}
        folders: list[str] = []
        for entry in entries[:most]:
            name = str(entry["name"]).rstrip("/")
            if name in (key, f"/{key}"):
                if entry.get("type") == "file":
                    raise CannotReadError("this is not a folder", where=self.shown(key))
            elif entry.get("type") != "file":
                folders.append(name.rpartition("/")[2])
            else:
                files[name.rpartition("/")[2]] = int(entry.get("size") or 0)
        return files, tuple(folders), len(entries) > most

    def join(self, key: str, name: str) -> str:
        """The key of something in a folder."""
        return f"{key}/{name}"

    def shown(self, key: str) -> str:
        """The URL of a key."""
        return self._name + key.removeprefix(self._root)
