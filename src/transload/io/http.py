"""Files on HTTP servers, by the standard library: ranges, over connections that stay open.

``HttpFile`` is a file. Its first request gets the beginning, and with it the size and what identifies this version of
the file; each answer after that must be of the same version. A read that is cut off goes on where it stopped; how often
and for how long is bounded. ``Client`` has the connections, follows redirects, and uses the proxies of the environment.
"""

from __future__ import annotations

import errno as numbers
import os
import random
import re
import socket
import ssl
import time
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache, partial
from http.client import HTTPConnection, HTTPException, HTTPMessage, HTTPResponse, HTTPSConnection, InvalidURL
from io import BufferedReader, RawIOBase
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar
from urllib.parse import SplitResult, quote, unquote, urljoin, urlsplit, urlunsplit
from zlib import crc32

from transload._version import __version__
from transload.errors import BrokenFileError, CannotReadError, UsageError
from transload.io.limits import memory
from transload.io.pool import TICK, has_failed
from transload.io.sources import shown

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

BEGINNING = 128 << 10
"""Bytes of the first request. They have the header of 1,400 tensors in a safetensors file, or the index of 1,200 in a
``.pt`` file."""
_TIMEOUT = 30.0  # seconds without a byte
_SLOWEST = 1 << 10  # bytes per second: a server that sends a byte every 29 seconds must not hold a load for ever
_TRIES = 6  # in a row without _PROGRESS bytes
_PROGRESS = 1 << 20
_PAUSE = 0.25  # seconds before the second try; doubled before each further one
_LONGEST_PAUSE = 60.0  # for which a server may ask
_REDIRECTS = 10
_HINTS = 10  # before an answer; a server must not send them for ever
_IDLE = 32  # connections kept for each server
_MOST_BODY = 64 << 10  # of an answer that nobody reads: with it, the connection can be used again
_PIECE = 1 << 20
_BUSY = (408, 425, 429, 500, 502, 503, 504)
_REDIRECTED = (301, 302, 303, 307, 308)
_EXPIRED = (400, 401, 403, 404, 410)  # what storage services answer when the signature of an address has expired
_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18}|\*)")
_NO_SUCH_HOST = {socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)}
_DOWNLOAD = "Download it, with curl -LO for example, and name the file."
_NETWORK_ERRORS = (OSError, HTTPException)
_UNKNOWN_MEMORY = 2 << 30  # what a body may take where the system does not say how much memory is left
_Read = TypeVar("_Read")


class _AgainError(Exception):
    """The request may succeed if it is repeated, after as many seconds as the server says."""

    def __init__(self, what: str, pause: float = 0.0) -> None:
        super().__init__(what)
        self.pause = pause


# -- requests


def _while_needed(connected: socket.socket, work: Callable[[], _Read]) -> _Read:
    """Do what waits for a socket, and can go on after ``TimeoutError``, as long as somebody needs it."""
    latest = time.monotonic() + _TIMEOUT
    connected.settimeout(min(TICK, _TIMEOUT))
    while True:
        if has_failed():
            raise _AgainError("nobody needs it any more")
        try:
            return work()
        except TimeoutError:
            if time.monotonic() >= latest:
                raise


class _Encrypted(ssl.SSLSocket):
    def do_handshake(self, block: bool = False) -> None:
        try:
            _while_needed(self, partial(super().do_handshake, block))
        except _AgainError:
            self.close()  # its base class does for other errors
            raise


class _AnswerBytes(RawIOBase):
    """The bytes of an answer, from its first line on, as long as they are needed and enough of them come."""

    def __init__(self, reader: BufferedReader, connected: socket.socket) -> None:
        self._reader = reader  # with it, the socket stays open
        self._socket = connected
        self._deadline = 0.0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        count = _while_needed(self._socket, partial(self._socket.recv_into, buffer))
        now = time.monotonic()
        self._deadline = (self._deadline or now + _TIMEOUT) + count / _SLOWEST
        if now > self._deadline:
            raise _AgainError("it sends next to nothing")
        return count

    def close(self) -> None:
        self._reader.close()
        super().close()


class _Response(HTTPResponse):
    def __init__(self, sock: socket.socket, *arguments: Any, **options: Any) -> None:
        super().__init__(sock, *arguments, **options)
        self.fp = BufferedReader(_AnswerBytes(self.fp, sock))

    def begin(self) -> None:
        """Read the status and the headers; skip those of hints that come first, such as 103 Early Hints."""
        for _ in range(_HINTS):
            super().begin()
            if not 101 < self.status < 200:
                return
            self.headers = None  # type: ignore[assignment] # or the next call would do nothing
        raise _AgainError("it sends one hint after the other")


class Answer:
    """The answer to a request: its status, headers and body."""

    def __init__(self, response: HTTPResponse, url: str, first: HTTPMessage) -> None:
        self._response = response
        self.status = response.status
        self.headers = response.headers
        self.url = url
        """Where it came from, after redirects."""
        self.first = first
        """The headers of the first answer, which may be a redirect."""
        self.left = -1 if response.chunked or response.length is None else response.length
        """How many bytes of the body are still to be read; -1 if the server does not say it."""

    def read_into(self, view: memoryview) -> int:
        """Read what one call of the system gives, straight from the socket into place; 0 at the end of the body."""
        if self.left < 0:
            data = self._response.read1(min(len(view), _PIECE))  # which understands chunks
            count = len(data)
            view[:count] = data
        else:
            view = view[: self.left]
            count = self._response.fp.readinto1(view) if len(view) else 0
            self.left -= count
        return count

    def is_read(self) -> bool:
        """Whether the body was read to its end, so that the connection can be used again; reads what is left of it."""
        if self.status >= 300:
            with suppress(_AgainError, *_NETWORK_ERRORS):
                buffer, most = memoryview(bytearray(4096)), _MOST_BODY
                while most > 0 and (count := self.read_into(buffer)):
                    most -= count
        return self.left == 0 or (self.left < 0 and self._response.isclosed())


class Client:
    """Connections to servers, kept for the next request. May be used from several threads, and after a fork."""

    def __init__(self) -> None:
        self._idle: dict[tuple[int, str], list[HTTPConnection]] = {}

    def close(self) -> None:
        """Close the connections that are not in use."""
        for connections in self._idle.values():
            while connections:
                connections.pop().close()

    __del__ = close

    @contextmanager
    def get(self, url: str, headers: Mapping[str, str], owner: str) -> Iterator[Answer]:
        """The answer to a GET request, after redirects. Only the server of ``owner`` gets ``Authorization``."""
        headers, start = dict(headers), urlsplit(owner)
        first: HTTPMessage | None = None
        for _ in range(_REDIRECTS):
            try:
                at = _parts(url)
            except ValueError:
                raise CannotReadError("the server redirects to what is not a URL", where=shown(owner)) from None
            if at.scheme not in ("http", "https") or (start.scheme == "https" != at.scheme):
                raise CannotReadError(f"the server redirects to {at.scheme}://, which is not safe", where=shown(owner))
            if at[:2] != start[:2]:
                headers.pop("Authorization", None)
            connection, response = self._request(url, headers)
            done = False
            try:
                answer = Answer(response, url, response.headers if first is None else first)
                first = answer.first
                target = response.headers.get("Location", "")
                redirected = response.status in _REDIRECTED and target
                if redirected:
                    target = quote(target, safe="/%:@!$&'()*+,;=~?#[]")
                    with suppress(ValueError):  # refused in the next turn
                        target = urljoin(url, target)
                    url = target
                else:
                    yield answer
                done = answer.is_read()
            finally:
                response.close()
                idle = self._idle.setdefault((os.getpid(), "//".join(at[:2])), [])
                if done and not response.will_close and len(idle) < _IDLE:
                    idle.append(connection)
                else:
                    connection.close()
            if not redirected:
                return
        raise CannotReadError(f"more than {_REDIRECTS} redirects", where=shown(owner))

    def _request(self, url: str, headers: Mapping[str, str]) -> tuple[HTTPConnection, HTTPResponse]:
        """Send a request over a connection that is kept, or a new one."""
        at = urlsplit(url)
        target = urlunsplit(("", "", at.path or "/", at.query, ""))
        idle = self._idle.get((os.getpid(), "//".join(at[:2])), [])
        while True:
            try:
                connection, used = idle.pop(), True
            except IndexError:
                connection, used = _connection(at.scheme, at.hostname or "", at.port), False
            proxied = getattr(connection, "transload_proxied", None)
            try:
                if not used:
                    connection.response_class = _Response  # also of a proxy's answer
                    connection.connect()
                more = {} if proxied is None else proxied
                path = (
                    target if proxied is None else urlunsplit((at.scheme, at.netloc.rpartition("@")[2], *at[2:4], ""))
                )
                connection.request("GET", path, headers={**headers, **more})
                return connection, connection.getresponse()
            except BaseException as error:
                connection.close()
                # A server closes a connection that was not used for a while; that says nothing about the next.
                if not (used and isinstance(error, _NETWORK_ERRORS) and not isinstance(error, TimeoutError)):
                    raise


@cache
def _tls() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.sslsocket_class = _Encrypted
    return context


def _connection(scheme: str, host: str, port: int | None) -> HTTPConnection:
    """A new connection, through the proxy that the environment names, if any."""
    if not host:
        raise InvalidURL("there is no host in it")
    proxy = _proxy(scheme, f"{host}:{port}" if port else host)
    if proxy is None:
        if scheme == "http":
            return HTTPConnection(host, port, timeout=_TIMEOUT)
        return HTTPSConnection(host, port, timeout=_TIMEOUT, context=_tls())
    try:
        via = _parts(proxy if "://" in proxy else f"http://{proxy}")
    except ValueError:
        fix = f"Correct the variable {scheme}_proxy, or name the server in no_proxy."
        raise UsageError("the proxy is not a valid URL", where=host, fix=fix) from None
    more = {"Proxy-Authorization": _basic(via.username, via.password)} if via.username else {}
    if scheme == "https":
        secure = HTTPSConnection(via.hostname or "", via.port or 8080, timeout=_TIMEOUT, context=_tls())
        secure.set_tunnel(host, port or 443, more)
        return secure
    connection = HTTPConnection(via.hostname or "", via.port or 8080, timeout=_TIMEOUT)
    vars(connection)["transload_proxied"] = more
    return connection


def _parts(url: str) -> SplitResult:
    """The parts of a URL; ``ValueError`` if it is none."""
    at = urlsplit(url)
    at.port  # noqa: B018 - which raises if it is no number
    return at


def _proxy(scheme: str, host: str) -> str | None:
    if not any(name.lower().endswith("_proxy") for name in os.environ):
        return None
    from urllib.request import getproxies_environment, proxy_bypass_environment  # type: ignore[attr-defined]

    proxies: dict[str, str] = getproxies_environment()
    return None if proxy_bypass_environment(host, proxies) else proxies.get(scheme)


def _basic(user: str | None, password: str | None) -> str:
    pair = f"{unquote(user or '')}:{unquote(password or '')}".encode()
    return f"Basic {b64encode(pair).decode()}"


# -- files


class HttpFile:
    """A file on a server. ``token`` is sent to the server itself, not to one that it redirects to.

    ``beginning`` is what the first request got. If the server knows no ranges, that is the whole file.
    """

    streams = 64

    def __init__(self, url: str, client: Client, name: str = "", token: str = "") -> None:
        self.name = name or shown(url)
        self._client = client
        self._headers = {"User-Agent": f"transload/{__version__}", "Accept-Encoding": "identity", "Accept": "*/*"}
        try:
            at = _parts(url)
            host = at.netloc.rpartition("@")[2].encode("idna").decode()
            escaped = {"safe": "/%:@!$&'()*+,;=~?", "errors": "surrogateescape"}
            path, query = quote(at.path, **escaped), quote(at.query, **escaped)
            login = _basic(at.username, at.password) if at.username else ""
        except ValueError:  # which quotes a part of it, perhaps of a password
            raise UsageError("this is not a valid URL", where=self.name) from None
        self._url = self._direct = urlunsplit((at.scheme.lower(), host, path, query, ""))
        if not (token.isascii() and token.isprintable()):
            fix = "Check HF_TOKEN, or log in again with `hf auth login`."
            raise UsageError("the token has characters that no token has", where=self.name, fix=fix)
        if token:
            self._headers["Authorization"] = f"Bearer {token}"
        elif login:
            self._headers["Authorization"] = login
        self._version = "", ""
        self.size = -1
        self.commit = ""
        """The commit of the Hub that it is from."""
        self.link = ""
        """Where the next page of a list is."""
        self.beginning = self._open()
        self.stamp: tuple[int, ...] = (self.size, crc32("".join(self._version).encode()))

    def is_changed(self) -> bool:
        """False: every answer was compared with the first."""
        return False

    def fill(self, offset: int, views: Sequence[memoryview]) -> None:
        """Fill views, one after the other, with the bytes from ``offset`` on, all of which the file has."""
        end = offset + sum(map(len, views))
        waiting = [view for view in reversed(views) if len(view)]

        def read() -> int:
            nonlocal offset
            begin = offset
            headers = {**self._headers, "Range": f"bytes={begin}-{end - 1}"}
            address = self._direct
            with self._client.get(address, headers, self._url) as answer:
                self._check(answer, begin, end, address)
                while waiting:
                    count = answer.read_into(waiting[-1])
                    if not count:
                        raise _AgainError(f"it closed the connection after {offset - begin:,} of {end - begin:,} bytes")
                    offset += count
                    view = waiting.pop()[count:]
                    if len(view):
                        waiting.append(view)
            return offset

        self._patiently(read, lambda: offset)

    def _open(self) -> bytes:
        """Get the beginning, the size and the version; all of the file, if the server knows no ranges."""
        data = bytearray()

        def read() -> bytes:
            data.clear()
            headers = {**self._headers, "Range": f"bytes=0-{BEGINNING - 1}"}
            with self._client.get(self._direct, headers, self._url) as answer:
                self.commit = answer.first.get("X-Repo-Commit", "")
                self.link = answer.headers.get("Link", "")
                if answer.status == 416 and answer.headers.get("Content-Range", "").endswith("*/0"):
                    self.size = 0
                    return b""
                self._refuse_folder(answer)
                if answer.status not in (200, 206):
                    self._refuse(answer)
                self._refuse_encoded(answer)
                if answer.status == 200:
                    self._read_whole(answer, data)
                    self.size = len(data)
                else:
                    begin, end, size = self._range(answer)
                    if begin or end != min(BEGINNING, size):
                        what = f"the server sent bytes {begin} to {end} instead of the first"
                        raise CannotReadError(what, where=self.name, fix=_DOWNLOAD)
                    self._read_some(answer, data, end)
                    self.size = size
                self._version = _version(answer)
                self._direct = answer.url
            return bytes(data)

        return self._patiently(read, lambda: len(data))

    def _read_some(self, answer: Answer, data: bytearray, most: int) -> None:
        """Read what a body has, at least a byte: if the connection breaks, ``fill`` gets the rest when it is needed."""
        buffer = memoryview(bytearray(most))
        try:
            while left := most - len(data):
                count = answer.read_into(buffer[:left])
                if not count:
                    break
                data += buffer[:count]
        except (_AgainError, *_NETWORK_ERRORS):
            if not data:
                raise
        if not data:
            raise _AgainError(f"it closed the connection after 0 of {most:,} bytes")

    def _read_whole(self, answer: Answer, data: bytearray) -> None:
        """Read all of a body, as far as there is memory for it."""
        _, free = memory()
        most = (free if free >= 0 else _UNKNOWN_MEMORY) // 2
        fix = f"{_DOWNLOAD} The server knows no ranges, so all of it would have to be in memory."
        nbytes = answer.left
        if nbytes > most:
            what = f"it is {nbytes:,} bytes long, and only {most:,} may be kept in memory"
            raise CannotReadError(what, where=self.name, fix=fix)
        buffer = memoryview(bytearray(_PIECE))
        while count := answer.read_into(buffer):
            data += buffer[:count]
            if len(data) > most:
                what = f"it is longer than {most:,} bytes, which is what may be kept in memory"
                raise CannotReadError(what, where=self.name, fix=fix)
        if len(data) < nbytes:
            raise _AgainError(f"it closed the connection after {len(data):,} of {nbytes:,} bytes")

    def _check(self, answer: Answer, begin: int, end: int, address: str) -> None:
        """Raise unless an answer has these bytes, of the version that was opened.

        ``address`` is what the request went to: several threads may find that it has expired.
        """
        if answer.status == 206:
            self._refuse_encoded(answer)
            first, last, size = self._range(answer)
            if size != self.size or self._is_other(_version(answer)):
                self._changed()
            if (first, last) != (begin, end):
                raise _AgainError(f"it sent bytes {first} to {last} instead of {begin} to {end}")
            if address == self._url:
                self._direct = answer.url
        elif answer.status == 200:
            if self._is_other(_version(answer)):
                self._changed()
            raise _AgainError("it sent the whole file instead of a range")
        elif answer.status == 416:
            self._changed()
        elif answer.status in _EXPIRED and address != self._url:  # ask for another address
            if self._direct == address:
                self._direct = self._url
            raise _AgainError(f"it answered {answer.status}, after a redirect")
        else:
            self._refuse(answer)

    def _is_other(self, version: tuple[str, str]) -> bool:
        """Whether it is not the version that was opened, as far as the server tells versions apart."""
        pairs = [*zip(self._version, version, strict=True)]
        return next((old != new for old, new in pairs if old and new), any(self._version))

    def _changed(self) -> NoReturn:
        fix = "Read it again. If it was not changed: several servers behind one address have different copies."
        raise BrokenFileError("it was changed while it was read", where=self.name, fix=fix)

    def _range(self, answer: Answer) -> tuple[int, int, int]:
        """The range that an answer has, and the size of the file."""
        match = _RANGE.fullmatch(answer.headers.get("Content-Range", "").strip())
        if match is None or match[3] == "*":
            what = "the server does not say which range it sent, or how long the file is"
            raise CannotReadError(what, where=self.name, fix=_DOWNLOAD)
        begin, last, size = map(int, match.groups())
        if not begin <= last < size or answer.left not in (-1, last + 1 - begin):
            raise CannotReadError("the server announces another length than it sends", where=self.name, fix=_DOWNLOAD)
        return begin, last + 1, size

    def _refuse_folder(self, answer: Answer) -> None:
        """Refuse what the server knows as a folder: it has added a slash to the URL, and sent a page or an error."""
        asked, path = (unquote(urlsplit(url).path) for url in (self._url, answer.url))
        page = answer.headers.get("Content-Type", "").lower().startswith("text/html")
        if path == f"{asked}/" and (page or answer.status not in (200, 206)):
            fix = f"Name a file in it, or end the URL with a slash: {self.name}/"
            raise CannotReadError("the server says that it is a folder", where=self.name, fix=fix, errno=numbers.EISDIR)

    def _refuse_encoded(self, answer: Answer) -> None:
        encoding = answer.headers.get("Content-Encoding", "identity").strip().lower()
        if encoding not in ("", "identity"):
            what = f"the server sends it encoded ({encoding[:40]}), although that was not asked for"
            raise CannotReadError(what, where=self.name, fix="Download it with curl --compressed, and name the file.")

    def _refuse(self, answer: Answer) -> NoReturn:
        """Raise the error for a status."""
        status, headers = answer.status, answer.headers
        if status in _BUSY:
            raise _AgainError(f"it answered {status} {_phrase(status)}", _seconds(headers.get("Retry-After", "")))
        said = headers.get("X-Error-Message", "")  # the Hub's
        said = f": {said[:300]}" if said.isprintable() and said else ""
        what, fix, number = f"the server answered {status} {_phrase(status)}{said}", "", None
        if status in (401, 403):
            number, fix = numbers.EACCES, "Check that you may read it. If the URL is signed, it may have expired."
            if "Authorization" in self._headers:
                fix = "Check that the token or password is right, and may read it."
            if self.name.startswith("hf://"):
                fix = "Log in with `hf auth login`, or set HF_TOKEN, with an account that may read it."
        elif status in (404, 410):
            number, fix = numbers.ENOENT, "Check the URL."
            if "." not in self.name.rpartition("/")[2]:
                fix += " The URL of a folder ends with a slash."
            if self.name.startswith("hf://"):
                fix = "Check the name: hf://owner/model/file, hf://datasets/owner/name/file."
        elif status == 407:
            fix = "Put the name and password of the proxy into https_proxy: http://user:password@host:port."
        elif status == 416:
            fix = _DOWNLOAD
        raise CannotReadError(what, where=self.name, fix=fix, errno=number)

    def _patiently(self, read: Callable[[], _Read], position: Callable[[], int]) -> _Read:
        """Call a function until it succeeds: again after an error of the network, unless that is useless."""
        tries, reached = 0, position()
        while True:
            try:
                return read()
            except (InvalidURL, UnicodeError):  # noqa: PERF203 - the point of the loop
                raise UsageError("this is not a valid URL, or the proxy's is not", where=self.name) from None
            except (_AgainError, *_NETWORK_ERRORS) as error:
                if isinstance(error, CannotReadError):
                    raise
                progress = position() - reached
                tries, reached = (1, position()) if progress >= _PROGRESS else (tries + 1, reached)
                pause = _PAUSE * 2 ** (tries - 1) * random.uniform(0.5, 1)  # noqa: S311 - not a secret
                asked = error.pause if isinstance(error, _AgainError) else 0.0
                pause, begun = max(pause, asked), time.monotonic()
                over = has_failed() or tries >= _TRIES or asked > _LONGEST_PAUSE or self._is_hopeless(error)
                while not over and time.monotonic() < begun + pause:
                    time.sleep(min(TICK, pause))
                    over = has_failed()
                if over:
                    raise self._failed(error, tries, asked) from error

    def _is_hopeless(self, error: Exception) -> bool:
        """Whether an error will not go away: the address is wrong, or nobody is there."""
        if isinstance(error, ssl.SSLCertVerificationError):
            return True
        if isinstance(error, ssl.SSLError):
            return self.size < 0
        if isinstance(error, socket.gaierror):
            return error.errno in _NO_SUCH_HOST
        return self.size < 0 and isinstance(error, ConnectionRefusedError)

    def _failed(self, error: Exception, tries: int, asked: float) -> CannotReadError:
        what, fix = str(error) or type(error).__name__, "Check the connection, and try again."
        if isinstance(error, ssl.SSLCertVerificationError):
            what = f"the certificate of the server is not trusted: {error.verify_message}"
            fix = "If your organization has its own certificates, name their file: SSL_CERT_FILE=ca.pem."
        elif isinstance(error, ssl.SSLError) and error.reason == "WRONG_VERSION_NUMBER":
            what, fix = "the server does not answer in TLS", "Check the port; perhaps the URL begins with http://."
        elif isinstance(error, socket.gaierror):
            what, fix = "no such server: its name is not known", "Check the URL, and the connection."
        elif isinstance(error, TimeoutError):
            what = f"the server did not answer for {_TIMEOUT:.0f} seconds"
        elif isinstance(error, OSError):
            what = f"the connection failed: {error.strerror or what}"
        elif isinstance(error, HTTPException):
            what = f"the answer is not valid HTTP ({type(error).__name__})"
        else:
            what = f"the server fails: {what}"
        if asked > _LONGEST_PAUSE:
            fix = f"It asks to wait for {asked:.0f} seconds."
        elif tries > 1:
            what += f" ({tries} tries)"
        return CannotReadError(what, where=self.name, fix=fix)


def _version(answer: Answer) -> tuple[str, str]:
    """What identifies the version of a file that an answer is from: its tag, or else its date."""
    headers = answer.headers
    return headers.get("ETag", "").removeprefix("W/"), headers.get("Last-Modified", "")


def _seconds(text: str) -> float:
    """How long to wait, by the header ``Retry-After``: a number of seconds, or a date."""
    if text.strip().isdecimal():
        return float(text[:9])
    from email.utils import parsedate_to_datetime

    with suppress(ValueError, TypeError):
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    return 0.0


def _phrase(status: int) -> str:
    from http import HTTPStatus

    with suppress(ValueError):
        return HTTPStatus(status).phrase
    return ""
