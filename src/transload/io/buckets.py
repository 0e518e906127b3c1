"""Files in buckets, by obstore, and whatever else fsspec opens. Both find the user's credentials themselves."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn
from zlib import crc32

from transload.credentials import text_without_credentials
from transload.errors import BrokenFileError, CannotReadError, MissingFileError
from transload.io.folder import Entries
from transload.io.pool import aside
from transload.io.sources import shown

_BEGINNING = 128 << 10
_ADDRESS = re.compile(r"\bhttps?://[^\s\"]+")
# What obstore and botocore say if nobody answers. If only TLS fails, obstore says Connect, but not ConnectError.
_UNANSWERED = re.compile(r"\bConnectError\(|\bkind: Timeout,|\bendpoint URL: ")
# Asked for the credentials of the machine's role, if there are no others.
_ROLES = ("http://169.254.169.254", "http://metadata.google.internal")


_BUCKETS = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "adl")  # what obstore opens
_RETRIES = 6
_INSTALL = "$ pip install 'transload[remote]'"


def bucket_store(url: str) -> tuple[ObjectStore | FsspecStore, str]:
    """The store of a URL, and its key there."""
    scheme, _, rest = url.partition("://")
    bucket, _, key = rest.partition("/")
    if scheme.lower() in _BUCKETS and importlib.util.find_spec("obstore") is not None:
        return ObjectStore(f"{scheme}://{bucket}"), key.rstrip("/")
    return FsspecStore.of(url)


# -- obstore

_users: set[int] = set()  # this process, once it has used obstore, and those that had when they forked it


def _check_process(where: str) -> None:
    """Raise an error in a forked process where a request would wait for ever.

    obstore starts its threads with the first request. They are not in forked processes, where new stores use them, too:
    https://github.com/developmentseed/obstore/pull/441
    """
    _users.add(os.getpid())
    if len(_users) > 1:
        what = "buckets cannot be read here: this process was forked from one that had already read some"
        fix = (
            "Start it with spawn or forkserver (DataLoader: multiprocessing_context), or read none before it is forked."
        )
        raise CannotReadError(what, where=where, fix=fix)


class ObjectFile:
    """An object in a bucket."""

    streams = 64

    def __init__(self, store: Any, key: str, name: str) -> None:
        import obstore

        self._get, self._store, self._key, self.name = obstore.get, store, key, name
        self._tag = ""
        self.beginning = b""
        try:
            meta, data = self._read(0, _BEGINNING)
            self.beginning = bytes(data)
        except BrokenFileError:  # of an empty object, there is no range
            meta = self._try(obstore.head, store, key)
            if meta["size"]:
                raise
        self.size: int = meta["size"]
        self._tag = meta["e_tag"] or ""
        self._version = _version(meta)
        self.stamp: tuple[int, ...] = (self.size, crc32(f"{self._tag} {meta['last_modified']}".encode()))

    def fill(self, offset: int, views: Sequence[memoryview]) -> None:
        """Fill views with the bytes from ``offset`` on."""
        count = sum(map(len, views))
        meta, data = self._read(offset, offset + count)
        if len(data) != count or _version(meta) != self._version:
            self._changed()
        for view in views:
            view[:] = data[: len(view)]
            data = data[len(view) :]

    def _read(self, begin: int, end: int) -> tuple[Any, memoryview]:
        options: dict[str, Any] = {"range": (begin, end)}
        if self._tag:
            options["if_match"] = self._tag
        result = self._try(self._get, self._store, self._key, options=options)
        return result.meta, memoryview(self._try(result.bytes))

    def _try(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        _check_process(self.name)
        try:
            return aside(partial(function, *arguments, **named))
        except Exception as error:  # noqa: BLE001 - also its own, which derive from Exception alone
            if type(error).__name__ == "PreconditionError" or "416 Range" in str(error):
                self._changed()
            _refuse(error, self.name)

    def _changed(self) -> NoReturn:
        raise BrokenFileError("it was changed while it was read", where=self.name, fix="Read it again.")

    def is_changed(self) -> bool:
        """False: every answer was of the version that was opened."""
        return False


def _version(meta: Any) -> tuple[int, object]:
    """What identifies the version of an object: its size, and its tag, or else its date."""
    return meta["size"], meta["e_tag"] or meta["last_modified"]


class ObjectStore:
    """A bucket of S3, Google Cloud Storage or Azure."""

    lists = True

    def __init__(self, root: str) -> None:
        from datetime import timedelta

        from obstore.store import from_url

        self._name = shown(root)
        endpoints = {name: value for name in _ENDPOINTS if (value := os.environ.get(name))}
        for name, value in endpoints.items():
            if root.startswith("s3") and name.startswith("AWS_") and "://" not in value:  # obstore would panic
                fix = "Begin it with https:// or http://."
                raise CannotReadError(f"{name} is not a URL", where=self._name, fix=fix)
        plain = any(value.startswith("http://") for value in endpoints.values())
        client = {"connect_timeout": "10 seconds", "timeout": "2 minutes", **({"allow_http": True} if plain else {})}
        retries = {"max_retries": _RETRIES, "retry_timeout": timedelta(minutes=1)}
        try:
            how = {"client_options": client, "retry_config": retries, **_profile(root)}
            self._store: Any = from_url(root, **how)
        except Exception as error:  # noqa: BLE001 - also its own, which derive from Exception alone
            _refuse(error, self._name)

    def open(self, key: str) -> ObjectFile:
        """Open an object."""
        return ObjectFile(self._store, key, self.shown(key))

    def list(self, key: str, most: int) -> Entries:
        """List what begins with a key and a slash."""
        import obstore

        _check_process(self.shown(key))
        try:
            result = aside(partial(obstore.list_with_delimiter, self._store, key or None))
        except Exception as error:  # noqa: BLE001 - also its own, which derive from Exception alone
            _refuse(error, self.shown(key))
        folders = tuple(path.rstrip("/").rpartition("/")[2] for path in result["common_prefixes"])
        files = {each["path"].rpartition("/")[2]: each["size"] for each in result["objects"][:most]}
        if not files and not folders and key:
            raise MissingFileError("there is no such file or folder", where=self.shown(key), fix="Check the URL.")
        return files, folders[:most], len(result["objects"]) + len(folders) > most

    def join(self, key: str, name: str) -> str:
        """The key of something in a folder."""
        return f"{key}/{name}" if key else name

    def shown(self, key: str) -> str:
        """The URL of a key."""
        return f"{self._name}/{key}" if key else self._name


_ENDPOINTS = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT", "AZURE_STORAGE_ENDPOINT")


def _profile(root: str) -> dict[str, Any]:
    """Credentials of a profile, for which boto3 is needed: obstore itself knows the environment, and roles."""
    folder = os.path.join(os.path.expanduser("~"), ".aws")
    files = (os.environ.get(f"AWS_{name}_FILE", "") for name in ("SHARED_CREDENTIALS", "CONFIG"))
    profiles = any(map(os.path.exists, (*files, os.path.join(folder, "credentials"), os.path.join(folder, "config"))))
    signed = os.environ.get("AWS_ACCESS_KEY_ID") or os.environ.get("AWS_SKIP_SIGNATURE", "").lower() in ("1", "true")
    if not root.startswith("s3") or signed or not profiles or importlib.util.find_spec("boto3") is None:
        return {}
    from obstore.auth.boto3 import Boto3CredentialProvider

    return {"credential_provider": Boto3CredentialProvider()}


# -- fsspec


class FsspecFile:
    """A file of a file system of fsspec."""

    def __init__(self, files: Any, key: str, name: str) -> None:
        self._files, self._key, self.name = files, key, name
        self.streams = 16 if getattr(files, "async_impl", False) else 1
        _forget(files, key)
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
        _forget(self._files, self._key)
        return _stamp(self._call(self._files.info, self._key)) != self.stamp

    def _get(self, begin: int, end: int) -> bytes:
        data: bytes = self._call(self._files.cat_file, self._key, start=begin, end=end)
        if len(data) != end - begin:
            what = f"{len(data):,} of {end - begin:,} bytes were sent"
            raise BrokenFileError(what, where=self.name, fix="It was changed while it was read. Read it again.")
        return data

    def _call(self, function: Any, *arguments: Any, **named: Any) -> Any:
        try:
            return aside(partial(function, *arguments, **named))
        except Exception as error:  # noqa: BLE001 - libraries raise what they like
            _refuse(error, self.name)


def _forget(files: Any, key: str) -> None:
    """Forget what was listed before: file systems of fsspec live, and remember, as long as the program."""
    for path in (key.rpartition("/")[0], key):
        with suppress(Exception):
            files.invalidate_cache(path)


def _stamp(info: dict[str, Any]) -> tuple[int, ...]:
    """What a write changes, as far as the store says it."""
    names = ("size", "ETag", "etag", "LastModified", "last_modified", "mtime", "created", "md5Hash", "generation")
    return tuple(crc32(str(info.get(name)).encode()) for name in names)


def _refuse(error: Exception, where: str) -> NoReturn:
    """Raise our error for that of a library, without the signatures and passwords that may be in it."""
    import errno

    if isinstance(error, CannotReadError):
        raise error

    text = str(error)
    clean = text_without_credentials(text)
    said = clean.strip().partition("\n")[0][:300] or type(error).__name__
    number, fix = getattr(error, "errno", None), ""
    address = "/".join(shown(match[0]).split("/")[:3]) if (match := _ADDRESS.search(text)) else ""
    if isinstance(error, FileNotFoundError):
        said, number, fix = "there is no such file", errno.ENOENT, "Check the URL."
    elif isinstance(error, PermissionError):
        number, fix = errno.EACCES, "Check the credentials, and that they may read it."
    elif "NoSuchBucket" in text:
        said, number, fix = "there is no such bucket", errno.ENOENT, "Check the URL, and the endpoint."
    elif text.startswith("Protocol not known"):
        said = f"nothing here opens {where.partition('://')[0]}://"
        fix = "URLs begin with https://, http://, hf://, s3://, gs://, az://, or what fsspec opens."
    elif address in _ROLES:
        said = "there are no credentials for it, and this machine has no role"
        names = {"s": "AWS", "g": "GOOGLE", "a": "AZURE"}.get(where[:1], "…")
        fix = f"Set them in the environment; if the bucket is public, {names}_SKIP_SIGNATURE=true."
    elif "InvalidCertificate" in text:
        said = f"the certificate of {address or 'the endpoint'} is not trusted here"
        fix = "Set SSL_CERT_FILE to the certificates of your organization."
    elif (silent := _UNANSWERED.search(text)) or "error sending request" in text:
        said = f"the endpoint {address}".rstrip() + (" does not answer" if silent else " breaks off the connection")
        fix = f"Check {'AWS_ENDPOINT_URL, the region and ' if where.startswith('s3') else ''}the connection."
    elif "not fork-safe" in text:  # what fsspec says where it reads asynchronously; it opens a file anew in any process
        said, fix = "it was opened before this process was forked", "Open it again in this process."
    # A traceback shows the cause, too.
    raise CannotReadError(said, where=where, fix=fix, errno=number) from None if clean != text else error


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
            scheme = url.partition("://")[0].lower()
            what = f"{scheme}:// needs a library that is not installed"
            fix = _INSTALL if scheme in _BUCKETS or "fsspec" in str(error) else f"{error}."
            raise CannotReadError(what, where=shown(url), fix=fix) from error
        except Exception as error:  # noqa: BLE001 - libraries raise what they like
            _refuse(error, shown(url))
        key = key.rstrip("/")
        return cls(files, shown(url).rstrip("/"), key), key

    def open(self, key: str) -> FsspecFile:
        """Open a file."""
        return FsspecFile(self._files, key, self.shown(key))

    def list(self, key: str, most: int) -> Entries:
        """List a folder."""
        _forget(self._files, key)
        try:
            entries: list[dict[str, Any]] = aside(partial(self._files.ls, key, detail=True))
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
