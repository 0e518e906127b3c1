"""Files and folders by URL: what a source and a folder of them are, whatever they are read through.

``RemoteSource`` is a source over a ``RemoteFile``: it keeps what was read of the beginning, the end and the index, so
that many small reads cost few requests. ``RemoteFolder`` is a folder over a ``Store``. Stores of ``https://`` and
``hf://`` are here, those of buckets and of whatever fsspec opens in ``buckets``.
"""

from __future__ import annotations

import json
import os
import re
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from operator import itemgetter
from threading import Condition, Lock
from typing import Any, Literal, Protocol
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from transload.errors import BrokenFileError, CannotReadError, ForbiddenFileError, MissingFileError, UsageError
from transload.io.folder import MAX_ENTRIES, Entries, Folder, Listing
from transload.io.http import Client, HttpFile
from transload.io.pool import each
from transload.io.sources import Claim, Source, is_url, shown

_AHEAD = 64 << 10  # bytes read after those asked for: the next record of an archive, or the next pickle
_END = 128 << 10  # has the directory of 1,900 records
_KEPT = 1 << 20  # longer reads are not kept
_WINDOWS = 16
_PIECE = 4 << 20  # of a long read, whose pieces are read at the same time
_AT_ONCE = 16  # requests
_MOST_PREPARED = 64 << 20
_MOST_AHEAD = 64 << 20  # read at once where reads follow one another
_TURNS = 8  # reads of each of them, within which one that takes turns with the others is read again
_MOST_KEPT = 128 << 20  # of what was read ahead, for all files of a folder: a tensor may have a piece in each of them
_MOST_OPENED = 256  # files of a folder that are opened before they are needed: each has its beginning in memory
_SUFFIXES = (
    *(".safetensors", ".pt", ".pth", ".ckpt", ".bin", ".pkl", ".pickle", ".tar", ".pt2", ".ptl", ".mar", ".zip"),
    *(".gguf", ".npy", ".npz", ".json", ".distcp", ".metadata", ".gz", ".xz", ".zst", ".joblib", ".h5", ".onnx"),
)
"""How the names of files end. Whether anything else is a folder must be asked."""
_METADATA = ".metadata"
_DISTRIBUTED = (_METADATA, "meta.pt", "common.pt")  # and what Lightning and Megatron write beside it
_USUAL = (
    *(*_DISTRIBUTED, "model.safetensors.index.json", "pytorch_model.bin.index.json", "model.safetensors"),
    *("pytorch_model.bin", "adapter_model.safetensors", "diffusion_pytorch_model.safetensors.index.json"),
    *("diffusion_pytorch_model.safetensors", "consolidated.safetensors"),
)
"""What is looked for in a folder of a web server, which does not list it."""


class RemoteFile(Protocol):
    """A file elsewhere. ``beginning`` are its first bytes, as many as came with its size."""

    name: str
    size: int
    streams: int
    stamp: tuple[int, ...]
    beginning: bytes

    def fill(self, offset: int, views: Sequence[memoryview]) -> None:
        """Fill views, one after the other, with the bytes from ``offset`` on, or raise; called from several threads."""

    def is_changed(self) -> bool:
        """Whether it was changed since it was opened."""


class Store(Protocol):
    """Where files are; the key of a file is what the store knows it by."""

    lists: bool
    """Whether it can list what is in a folder."""

    def open(self, key: str) -> RemoteFile:
        """Open a file; ``MissingFileError`` if there is none."""

    def list(self, key: str, most: int) -> Entries:
        """What is in a folder, at most so many entries; ``CannotReadError`` if there is no such folder."""

    def join(self, key: str, name: str) -> str:
        """The key of something in a folder."""

    def shown(self, key: str) -> str:
        """The URL of a key, for messages."""


def together(tasks: Iterable[Callable[[], object]], streams: int = _AT_ONCE) -> None:
    """Do tasks that wait for a network, some at a time; raises the first error."""
    waiting = [*tasks]
    each(waiting, lambda: lambda task: task(), min(streams, _AT_ONCE, len(waiting)))


class ReadAheadMemory:
    """The memory for what was read ahead, which the files of a folder share."""

    def __init__(self) -> None:
        self.reads = 0
        """How often any of them was read."""
        self._users: list[RemoteSource] = []
        self._lock = Lock()

    def share(self, source: RemoteSource) -> int:
        """How much a file may read ahead. The more of them have bytes that nobody has read yet, the less."""
        with self._lock:
            self._users = [user for user in self._users if user is not source and user.is_ahead()]
            share = _MOST_KEPT // (len(self._users) + 1)
            left = _MOST_KEPT - sum(user.kept_ahead for user in self._users)
            if min(share, left) < _PIECE:
                for user in self._users:
                    if user.last_read < self.reads - _TURNS * len(self._users):
                        user.free_ahead()
                return 0
            self._users.append(source)
        return min(share, left)


class RemoteSource(Source):
    """A file elsewhere."""

    far = True
    gap = 512 << 10

    def __init__(self, file: RemoteFile, read_ahead: ReadAheadMemory | None = None) -> None:
        self.name, self.size = file.name, file.size
        self.streams, self.stamp = file.streams, file.stamp
        self._file: RemoteFile | None = file
        self._windows: tuple[tuple[int, bytes], ...] = ((0, file.beginning),)
        self._prepared: list[tuple[int, bytes]] = []
        self._ahead: tuple[int, bytes | bytearray] = 0, b""
        self.last_read = 0
        """After how many reads of the folder it was read last."""
        self._next, self._step = -1, 0  # where reads so far end, and how many bytes were last read ahead
        self._read_ahead = read_ahead or ReadAheadMemory()
        self._following = Lock()
        self._lock = Lock()
        self._checking = Condition()
        self._claims: list[Claim] = []
        self._ends: list[int] = []
        self._unchecked: set[int] = set()
        self._taken: set[int] = set()

    def _read(self, offset: int, count: int) -> bytes:
        end = offset + count
        if held := self._held(offset, count):
            self._check_rest(offset, end)
            return bytes(held[1][offset - held[0] : end - held[0]])
        begin = offset
        if count <= _KEPT:
            end = min(self.size, max(end, begin + _AHEAD))
            if end > self.size - _END:
                begin, end = min(begin, max(0, self.size - _END)), self.size
        new = bytearray(end - begin)
        self._fill(begin, memoryview(new))
        data = bytes(new)
        if len(data) <= _KEPT:
            with self._lock:
                self._windows = (*self._windows, (begin, data))[-_WINDOWS:]
        return data[offset - begin : offset - begin + count]

    def readinto(self, offset: int, buffer: memoryview, *, ahead: bool = True) -> int:
        """Fill a writable buffer from ``offset`` on; return the number of bytes read.

        With ``ahead``, and where reads follow one another, some 64 MiB are read at once. Several threads may each read
        the next record, so the first of them reads for all.
        """
        end = offset + len(buffer)
        if ahead and len(buffer) < _PIECE and 0 <= offset < end <= self.size:
            with self._following:
                self._read_ahead.reads += 1
                self.last_read = self._read_ahead.reads
                if not self.holds(offset, len(buffer)):
                    far = abs(offset - self._next)
                    self._step = 0 if far > _MOST_AHEAD else self._step
                    if far <= self.gap:
                        self._step = min(max(2 * self._step, _PIECE), _MOST_AHEAD)
                        self._keep_ahead(offset, min(self._step, self.size - offset))
                self._next = max(end, 0 if self._step == 0 else self._next)
        return super().readinto(offset, buffer)

    def _keep_ahead(self, offset: int, count: int) -> None:
        self.free_ahead()
        data = bytearray(min(count, self._read_ahead.share(self)))
        if not data:
            return
        with suppress(CannotReadError, BrokenFileError):  # whoever needs these bytes gets the error
            self._fill(offset, memoryview(data))
            self._ahead = offset, data

    @property
    def kept_ahead(self) -> int:
        """How many bytes are kept of what was read ahead."""
        return len(self._ahead[1])

    def is_ahead(self) -> bool:
        """Whether some of them were not read yet; frees the others."""
        begin, data = self._ahead
        if self._next >= begin + len(data):
            self.free_ahead()
        return self.kept_ahead > 0

    def free_ahead(self) -> None:
        """Free what was read ahead."""
        self._ahead = 0, b""

    def _fill(self, offset: int, buffer: memoryview) -> int:
        count = len(buffer)
        if held := self._held(offset, count):
            buffer[:] = memoryview(held[1])[offset - held[0] : offset - held[0] + count]
            self._check_rest(offset, offset + count)
            return count
        if count <= _PIECE:
            self._fetch(offset, buffer)
            return count

        pieces = range(0, count, _PIECE)
        together([partial(self._fetch, offset + at, buffer[at : at + _PIECE]) for at in pieces], self.streams)
        return count

    def read_all(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """What ``read`` returns for each of several ranges, which are read at the same time."""
        spans = self._read_spans(ranges)
        begins = [begin for begin, _ in spans]
        out: list[bytes] = []
        for offset, count in ranges:
            begin, data = spans[bisect_right(begins, offset) - 1] if spans else (0, b"")
            inside = 0 <= offset < self.size and count > 0
            out.append(bytes(data[offset - begin : offset - begin + count]) if inside else b"")
        return out

    def prepare(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Read small ranges that will be needed, at the same time, and keep them."""
        spans = self._read_spans([each for each in ranges if not self.holds(*each)])
        with self._lock:
            held = sorted([*self._prepared, *((begin, bytes(data)) for begin, data in spans)])
            if sum(len(data) for _, data in held) <= _MOST_PREPARED:
                self._prepared = held

    def _read_spans(self, ranges: Sequence[tuple[int, int]]) -> list[tuple[int, bytearray]]:
        """The bytes of ranges, in order, those that are close together as one."""
        spans: list[tuple[int, bytearray]] = []
        for offset, count in sorted(ranges):
            end = min(offset + count, self.size)
            if offset < 0 or offset >= end:
                continue
            if spans and end - spans[-1][0] <= _PIECE and offset <= spans[-1][0] + len(spans[-1][1]) + _AHEAD:
                spans[-1][1].extend(bytes(max(0, end - spans[-1][0] - len(spans[-1][1]))))
            else:
                spans.append((offset, bytearray(end - offset)))
        together([partial(self._fill, begin, memoryview(data)) for begin, data in spans], self.streams)
        return spans

    def _held(self, offset: int, count: int) -> tuple[int, bytes | bytearray] | None:
        """The bytes that are kept around a range, and where they begin."""
        at = bisect_right(self._prepared, offset, key=itemgetter(0)) - 1
        for start, data in (*self._windows, *self._prepared[max(0, at) : at + 1], self._ahead):
            if start <= offset and offset + count <= start + len(data):
                return start, data
        return None

    def holds(self, offset: int, count: int) -> bool:
        """Whether bytes can be read without a request."""
        return self._held(offset, count) is not None

    def expect(self, claims: Sequence[Claim]) -> None:
        """Check claims about bytes when bytes next to them are read."""
        with self._checking:
            self._claims = sorted([*self._claims, *claims], key=lambda claim: claim.end)
            self._ends = [claim.end for claim in self._claims]
            self._unchecked.update(claim.end for claim in claims)

    def _fetch(self, begin: int, buffer: memoryview) -> None:
        """Read from the file, together with the headers right before and between these bytes, and check all claims."""
        end = begin + len(buffer)
        near = self._take(begin, end, _AHEAD) if self._unchecked else []
        try:
            start = min([begin, *(claim.begin for claim in near)])
            before = memoryview(bytearray(begin - start))
            self._opened().fill(start, [before, buffer])
            for claim in near:
                at, stop = claim.begin - start, claim.end - start
                inside = buffer[max(0, at - len(before)) : max(0, stop - len(before))]
                self._check(claim, bytes(before[at:stop]) + bytes(inside))
        finally:
            self._release(near)
        self._check_rest(begin, end)

    def _check_rest(self, begin: int, end: int) -> None:
        """Check the claims about bytes that were read without what the claims are about."""
        while self._unchecked and (far := self._take(begin, end, wait=True)):
            try:
                headers = [bytearray(claim.end - claim.begin) for claim in far]
                for claim, header in zip(far, headers, strict=True):
                    self._opened().fill(claim.begin, [memoryview(header)])
                    self._check(claim, bytes(header))
            finally:
                self._release(far)

    def _take(self, begin: int, end: int, distance: int = sys.maxsize, *, wait: bool = False) -> list[Claim]:
        """The claims about bytes of a range, begun at most so far before it, that no thread has checked or taken.

        With ``wait``, wait for those that another thread has taken.
        """
        with self._checking:
            while True:
                first = max(0, bisect_right(self._ends, begin) - 1)
                touched = self._claims[first : bisect_left(self._ends, end)]
                left = [claim for claim in touched if claim.end in self._unchecked and claim.reach > begin]
                mine = [claim for claim in left if begin - claim.begin < distance and claim.end not in self._taken]
                if mine or not (wait and left):
                    self._taken.update(claim.end for claim in mine)
                    return mine
                self._checking.wait()

    def _release(self, claims: list[Claim]) -> None:
        if claims:
            with self._checking:
                self._taken.difference_update(claim.end for claim in claims)
                self._checking.notify_all()

    def _check(self, claim: Claim, header: bytes) -> None:
        claim.check(header, self.name)
        with self._checking:
            self._unchecked.discard(claim.end)

    def _opened(self) -> RemoteFile:
        if self._file is None:
            raise CannotReadError("it was closed", where=self.name, fix="Open it again to read.")
        return self._file

    def is_changed(self) -> bool:
        """Whether the file was changed since it was opened."""
        return self._file is not None and self._file.is_changed()

    def close(self) -> None:
        """Forget the file, and with it the connections."""
        self._file = None
        self.free_ahead()


class RemoteFolder(Folder):
    """A folder elsewhere."""

    def __init__(self, store: Store, key: str, usual: tuple[str, ...] = _USUAL) -> None:
        super().__init__(store.shown(key))
        self._usual = usual
        self._store = store
        self._key = key
        self._listings: dict[str, Entries] = {}
        self._opened: dict[str, RemoteSource | CannotReadError] = {}
        self._read_ahead = ReadAheadMemory()

    @property
    def title(self) -> str:
        """Its own name."""
        return self.name.rstrip("/").rpartition("/")[2]

    def list(self, below: str = "", most: int = MAX_ENTRIES) -> Listing:
        """List the folder, or one below it, sorted by name; ``CannotReadError`` if that fails."""
        known = self._listings.get(below)
        if known is None or (known[2] and len(known[0]) + len(known[1]) < most):
            key = self._join(below)
            files, folders, cut = self._store.list(key, most) if self._store.lists else (self._look(below), (), False)
            known = self._listings[below] = dict(sorted(files.items())), tuple(sorted(folders)), cut
        files, folders, cut = known
        # Kept without this folder, or connections would stay open until garbage is collected.
        return Listing(self, f"{below}/" if below else "", files, tuple(folders), cut=cut)

    def is_listed(self) -> bool:
        """Whether the store lists anything in it."""
        with suppress(CannotReadError):
            return self._store.lists and self.list().entries > 0
        return False

    def _look(self, below: str) -> dict[str, int]:
        """The files of the usual names that a folder has, if it cannot be listed."""
        prefix = f"{below}/" if below else ""
        self.prepare([prefix + name for name in self._usual])
        found = {name: self._opened[prefix + name] for name in self._usual}
        files = {name: source.size for name, source in found.items() if isinstance(source, RemoteSource)}
        errors = [error for error in found.values() if isinstance(error, CannotReadError)]
        if files and not any(isinstance(error, MissingFileError) for error in errors):
            errors = [error for error in errors if not isinstance(error, ForbiddenFileError)]  # nor does it exist
        for place, error in enumerate(errors):
            if not isinstance(error, MissingFileError):
                self._opened.clear()
                del found, error  # or it would refer to itself, and keep this folder with its connections
                raise errors.pop(place)
        if files or not self._usual:
            return files
        what = "a web server does not list what is in a folder, and none of the usual names is there"
        fix = "Name a file in it: the checkpoint, the index of its shards (….index.json), or .metadata."
        raise CannotReadError(what, where=self.path(below), fix=fix)

    def open(self, name: str, *, keep: bool = True) -> Source:  # noqa: ARG002 - it holds no descriptor
        """The source of a file; ``CannotReadError`` if it cannot be opened."""
        source = self._opened.pop(name, None) or self._source(name)
        if isinstance(source, CannotReadError):
            try:
                raise source
            finally:
                del source  # or it would refer to itself, and keep the folder with its connections
        return source

    def prepare(self, names: Iterable[str]) -> None:
        """Open files that will be needed, all at the same time."""

        def one(name: str) -> None:
            try:
                self._opened[name] = self._source(name)
            except CannotReadError as error:
                # Where it was raised refers to this folder: connections would stay open until garbage is collected.
                error.__cause__ = error.__context__ = None
                self._opened[name] = error.with_traceback(None)

        wanted = [name for name in names if name not in self._opened][:_MOST_OPENED]
        together([partial(one, name) for name in wanted])

    def kind(self, name: str) -> Literal["file", "folder", "link", "other", ""]:
        """What has this name: a file, a folder, or nothing."""
        folder, _, last = name.rpartition("/")
        if self._store.lists:
            with suppress(CannotReadError):
                listing = self.list(folder)
                if last in listing.files or last in listing.folders:
                    return "file" if last in listing.files else "folder"
                if not listing.cut:
                    return ""
        self.prepare([name])
        return "" if isinstance(self._opened[name], MissingFileError) else "file"  # other errors are raised by ``open``

    def leads_out(self, name: str) -> bool:  # noqa: ARG002
        """No: there are no links."""
        return False

    def path(self, name: str) -> str:
        """The URL of a file, for messages."""
        return self._store.shown(self._join(name))

    def _source(self, name: str) -> RemoteSource:
        return RemoteSource(self._store.open(self._join(name)), self._read_ahead)

    def _join(self, name: str) -> str:
        return self._store.join(self._key, name) if name else self._key


# -- stores


def _quoted(name: str) -> str:
    """A name for a URL. A lone surrogate, which an index in JSON may have, is no text, but leads to nothing either."""
    return quote(name, errors="surrogatepass")


class WebStore:
    """Files on web servers, which do not list them. A key is a URL."""

    lists = False

    def __init__(self) -> None:
        self._client = Client()

    def open(self, key: str) -> RemoteFile:
        """Open a file."""
        return HttpFile(key, self._client)

    def list(self, key: str, most: int) -> Entries:
        """Fail: there is no way to list a folder."""
        raise NotImplementedError(key, most)

    def join(self, key: str, name: str) -> str:
        """The URL of something in a folder, with the query of the folder, which may be a key to all of it."""
        at = urlsplit(key)
        return urlunsplit((at.scheme, at.netloc, f"{at.path.rstrip('/')}/{_quoted(name)}", at.query, ""))

    def shown(self, key: str) -> str:
        """The URL without passwords and signatures."""
        return shown(key)


_SURROGATE = re.compile("[\ud800-\udfff]")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_NEXT_PAGE = re.compile(r'<([^>]*)>;\s*rel="next"')
_REPOSITORY = re.compile(r"(?:(models|datasets|spaces)/)?([^/@]+/[^/@]+)(?:@(refs/[^/]+/[^/]+|[^/]+))?(?:/(.*))?")


class HubStore:
    """A repository of the Hugging Face Hub, or of another server with its interface. A key is a path in it.

    After the first file, all files are read at the commit that it was of.
    """

    lists = True

    def __init__(self, kind: str, repository: str, revision: str) -> None:
        self._client = Client()
        self._kind, self._repository = kind or "models", repository
        self._revision = self._commit = unquote(revision) or "main"
        self._server = (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
        if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):  # as huggingface_hub reads it
            fix = "Name a file on this machine, such as one in the cache of the Hub."
            raise CannotReadError("HF_HUB_OFFLINE forbids asking the Hub", where=f"hf://{repository}", fix=fix)
        if not is_url(self._server):
            raise UsageError("HF_ENDPOINT is not a URL", where=f"hf://{repository}", fix="Begin it with https://.")
        before = "" if self._kind == "models" else f"{self._kind}/"
        at = f"@{revision}" if revision else ""
        self._name = f"hf://{before}{repository}{at}"
        self._root = f"{self._server}/{before}{quote(repository)}/resolve"

    def open(self, key: str) -> RemoteFile:
        """Open a file."""
        url = f"{self._root}/{quote(self._commit, safe='')}/{_quoted(key)}"
        file = HttpFile(url, self._client, self.shown(key), hub_token())
        if _COMMIT.fullmatch(file.commit):
            self._commit = file.commit
        return file

    def list(self, key: str, most: int) -> Entries:
        """List a folder."""
        below = f"/{_quoted(key)}" if key else ""
        url = f"{self._server}/api/{self._kind}/{quote(self._repository)}/tree/{quote(self._commit, safe='')}{below}"
        files: dict[str, int] = {}
        folders: list[str] = []
        while url:
            page = HttpFile(url, self._client, self.shown(key), hub_token())
            entries: Any = None
            with suppress(ValueError, RecursionError):
                entries = json.loads(RemoteSource(page).read(0, page.size))
            if type(entries) is not list:
                raise CannotReadError("the server does not list it as the Hub does", where=self.shown(key))
            before = len(files) + len(folders)
            for entry in entries:
                path, size = (entry.get("path"), entry.get("size")) if type(entry) is dict else (None, 0)
                if type(path) is str and entry.get("type") != "file":
                    folders.append(path.rpartition("/")[2])
                elif type(path) is str:
                    files[path.rpartition("/")[2]] = size if type(size) is int and size >= 0 else 0
            more = _NEXT_PAGE.search(page.link)
            url = more[1] if more and more[1].startswith(f"{self._server}/") else ""
            if not before < len(files) + len(folders) < most:  # a page with nothing new would be the last, too
                return files, tuple(folders), bool(url)
        return files, tuple(folders), False

    def join(self, key: str, name: str) -> str:
        """The path of something in a folder."""
        return f"{key}/{name}" if key else name

    def shown(self, key: str) -> str:
        """The URL of a path."""
        return f"{self._name}/{key}" if key else self._name


def hub_token() -> str:
    """The token of the user: of the environment, or where ``hf auth login`` has put it."""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        if token := os.environ.get(name, "").strip():
            return token
    if os.environ.get("HF_HUB_DISABLE_IMPLICIT_TOKEN", "").lower() in ("1", "on", "yes", "true"):
        return ""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    home = os.environ.get("HF_HOME") or os.path.join(cache, "huggingface")
    try:
        with open(os.environ.get("HF_TOKEN_PATH") or os.path.join(home, "token"), encoding="utf-8") as file:
            return file.read(4096).strip()
    except (OSError, ValueError):
        return ""


def store_of(url: str) -> tuple[Store, str]:
    """The store of a URL, and its key there."""
    scheme, _, rest = url.partition("://")
    scheme = scheme.lower()
    if scheme in ("http", "https"):
        return WebStore(), url
    if scheme == "hf":
        if _SURROGATE.search(rest):  # bytes on a command line that are no text
            raise UsageError("this is not a valid URL", where=shown(url))
        match = _REPOSITORY.fullmatch(rest.rstrip("/"))
        if match is None:
            fix = "Name the owner, too: hf://owner/model/file."
            raise UsageError("this does not name a repository of the Hub", where=shown(url), fix=fix)
        return HubStore(match[1] or "", match[2], match[3] or ""), match[4] or ""
    from transload.io.buckets import bucket_store

    return bucket_store(url)


def open_url(url: str) -> Source:
    """The source of a file."""
    store, key = store_of(url)
    return RemoteSource(store.open(key))


def parent_of(url: str) -> str:
    """The URL of the folder that a file is in.

    >>> parent_of("https://host/runs/model.pt?key=a/b")
    'https://host/runs/?key=a/b'
    """
    path, query, tail = url.partition("?")
    return path.rpartition("/")[0] + "/" + query + tail


def remote_set(url: str) -> tuple[Folder, str] | None:
    """As ``remote_folder``; ``None`` if the URL leads to a single file.

    Names of files end in a known way; what anything else is must be asked. The folder keeps the answer.
    """
    name = shown(url).rpartition("/")[2]
    known = not name or name == _METADATA or name.endswith(".index.json")
    if not known and name.lower().endswith(_SUFFIXES):
        return None
    folder, index = remote_folder(url)
    return (folder, index) if known or folder.is_listed() else None


def remote_folder(url: str) -> tuple[RemoteFolder, str]:
    """The folder of a checkpoint of several files, and the name of its index if the URL is that."""
    name = shown(url).rpartition("/")[2]
    index = name if name.endswith(".index.json") else ""
    if index or name == _METADATA:
        url = parent_of(url)
    store, key = store_of(url)
    usual = () if index else _DISTRIBUTED if name == _METADATA else _USUAL
    return RemoteFolder(store, key.rstrip("/") if store.lists else key, usual), index
