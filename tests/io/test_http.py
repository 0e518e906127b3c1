"""Servers that keep a reader waiting, and readers that nobody waits for any more."""

from __future__ import annotations

import os
import signal
import socket
import ssl
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress

import pytest
import torch
from tests.file_server import TLS, FileServer, Handler, serve
from tests.makers import saved

import transload
from transload.errors import CannotReadError, DirectoryError, ForbiddenFileError, MissingFileError, UsageError
from transload.io import http, pool, remote

SECRET = "hush-hush"  # noqa: S105 - what must not be printed
STATE = {f"w{index}": torch.full((500_000,), float(index)) for index in range(8)}
DATA = saved(STATE)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "_PAUSE", 0.001)
    for name in [*os.environ]:
        if name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)


@pytest.fixture
def server() -> Iterator[FileServer]:
    with serve({"a.pt": DATA}) as server:
        yield server


def same(loaded: dict[str, torch.Tensor]) -> bool:
    return loaded.keys() == STATE.keys() and all(torch.equal(loaded[name], STATE[name]) for name in STATE)


# -- servers that send next to nothing

DRIPS = {
    "a header": (b"HTTP/1.1 200 OK\r\nX: ", b"a"),
    "interim answers": (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "the length of a chunk": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1;", b"a"),
    "the body": (b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n", b"a"),
}


@contextmanager
def dripping(begin: bytes, drop: bytes) -> Iterator[str]:
    """A server that sends a little every few milliseconds, for ever."""
    ended = threading.Event()

    def drip(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            connection.recv(4096)
            connection.sendall(begin)
            while not ended.wait(0.02):
                connection.sendall(drop)

    def listen(listening: socket.socket) -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=drip, args=(listening.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=listen, args=(listening,), daemon=True).start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/a.pt"
        ended.set()
        with suppress(OSError):  # Windows knows it only of connections, and ``close`` ends the wait there
            listening.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("part", DRIPS)
def test_every_part_of_an_answer_must_come_at_some_speed(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "_TIMEOUT", 0.2)
    monkeypatch.setattr(http, "_TRIES", 2)
    monkeypatch.setattr(http, "_SLOWEST", 1 << 16)
    start = time.monotonic()
    with dripping(*DRIPS[part]) as url, pytest.raises(CannotReadError, match="next to nothing"):
        transload.inspect(url)
    assert time.monotonic() - start < 5


def test_a_first_answer_that_breaks_off_is_not_asked_for_again(server: FileServer) -> None:
    asked: list[str] = []

    def halve(handler: Handler) -> bool:
        asked.append(handler.headers["Range"])
        begin, end = map(int, handler.headers["Range"][6:].split("-"))
        handler.cut = (end + 1 - begin) // 2
        return False

    server.fault = halve
    with pytest.raises(CannotReadError, match="closed the connection"):  # halves never end
        transload.inspect(f"{server.url}/a.pt")
    assert len({*asked}) == len(asked)
    asked.clear()
    server.fault = lambda handler: halve(handler) if not asked else False
    assert same(transload.load(f"{server.url}/a.pt"))
    assert int(asked[0].rpartition("-")[2]) + 1 == http.BEGINNING


@pytest.mark.parametrize("status", [102, 103, 199])
def test_hints_before_an_answer_are_skipped(status: int, server: FileServer) -> None:
    hint = b"HTTP/1.1 %d Hint\r\nLink: </a.css>; rel=preload\r\nContent-Length: 7\r\n\r\n" % status

    def answer(handler: Handler) -> bool:
        handler.wfile.write(hint * 2)
        return False

    server.fault = answer
    assert same(transload.load(f"{server.url}/a.pt", threads=1))
    assert server.connections < len(server.log)


def test_hints_without_end_are_an_error(server: FileServer) -> None:
    def answer(handler: Handler) -> bool:
        handler.wfile.write(b"HTTP/1.1 103 Early Hints\r\n\r\n" * 100)
        return False

    server.fault = answer
    with pytest.raises(CannotReadError, match="one hint after the other"):
        transload.load(f"{server.url}/a.pt")


def test_more_than_was_announced_is_not_taken_for_the_file(server: FileServer) -> None:
    """Without a length, the body ends with the connection."""

    def add(handler: Handler) -> bool:
        begin, end = map(int, handler.headers["Range"][6:].split("-"))
        handler.send_response(206)
        handler.send_header("Content-Range", f"bytes {begin}-{end}/{len(DATA)}")
        handler.send_header("Connection", "close")
        handler.end_headers()
        handler.wfile.write(DATA[begin : end + 1] + b"more" * 10_000)
        return True

    server.fault = add
    with closing(remote.open_url(f"{server.url}/a.pt")) as source:
        assert source.read(http.BEGINNING, 8) == DATA[http.BEGINNING :][:8]


def test_a_handshake_behind_a_proxy_may_take_longer_than_a_tick(monkeypatch: pytest.MonkeyPatch) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(TLS / "here.pem")
    monkeypatch.setenv("SSL_CERT_FILE", str(TLS / "ca.pem"))
    monkeypatch.setattr(http, "_tls", http._tls.__wrapped__)
    monkeypatch.setattr(http, "TICK", 0.05)
    monkeypatch.setattr(http, "_TRIES", 1)

    def answer(listening: socket.socket) -> None:
        connection, _ = listening.accept()
        with connection:
            connection.recv(4096)
            connection.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
            time.sleep(0.3)
            with suppress(OSError), context.wrap_socket(connection, server_side=True) as secure:
                secure.recv(4096)
                secure.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc")

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=answer, args=(listening,), daemon=True).start()
        monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{listening.getsockname()[1]}")
        with closing(remote.open_url("https://localhost:1/a.pt")) as source:
            assert source.read(0, 3) == b"abc"


# -- addresses


@pytest.mark.parametrize("target", ["http://[::bad/a.pt", "http://127.0.0.1:port/a.pt", "//[/"])
def test_a_redirect_to_what_is_no_url_is_an_error_about_the_server(target: str, server: FileServer) -> None:
    def redirect(handler: Handler) -> bool:
        handler.reply(302, b"", {"Location": target})
        return True

    server.fault = redirect
    with pytest.raises(CannotReadError, match="redirects to what is not a URL") as caught:
        transload.load(f"{server.url}/a.pt")
    assert f"{server.url}/a.pt" in str(caught.value)


def test_a_folder_without_a_slash_is_said_to_be_a_folder(server: FileServer) -> None:
    """Servers add the slash by a redirect, and then list the folder or forbid that; others know no such file."""
    pages = [(200, {"Content-Type": "text/html; charset=utf-8"}), (403, {}), (404, {})]
    for status, headers in pages:

        def answer(handler: Handler, status: int = status, headers: dict[str, str] = headers) -> bool:
            to_folder = handler.path.startswith("/my%20runs?")
            handler.reply(*((301, b"", {"Location": "/my%20runs/"}) if to_folder else (status, b"<html>", headers)))
            return True

        server.fault = answer
        with pytest.raises(DirectoryError, match="it is a folder") as caught:
            transload.load(f"{server.url}/my runs?key={SECRET}")
        assert caught.value.fix == f"Name a file in it, or end the URL with a slash: {server.url}/my runs/"
    server.fault = None
    with pytest.raises(MissingFileError) as missing:
        transload.load(f"{server.url}/runs")
    assert missing.value.fix == "Check the URL. The URL of a folder ends with a slash."


def test_a_file_at_a_url_that_gets_a_slash_is_read(server: FileServer) -> None:
    server.files["a/"] = server.files["a.pt"]

    def redirect(handler: Handler) -> bool:
        if handler.path == "/a":
            handler.reply(301, b"", {"Location": "/a/"})
        return handler.path == "/a"

    server.fault = redirect
    assert same(transload.load(f"{server.url}/a"))


def test_a_proxy_that_is_no_url_is_named_by_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", f"http://me:{SECRET}@127.0.0.1:bad")
    with pytest.raises(UsageError, match="Correct the variable http_proxy") as caught:
        transload.load("http://model.example/a.pt")
    assert SECRET not in str(caught.value)


def test_a_server_without_tls_is_not_a_broken_connection(server: FileServer) -> None:
    with pytest.raises(CannotReadError, match=r"does not answer in TLS\n.*http://"):
        transload.load(f"{server.url.replace('http', 'https')}/a.pt")


def test_all_that_are_asked_for_when_an_address_expires_are_asked_for_again(server: FileServer) -> None:
    """Several threads find it out at the same time, and each address serves only a few requests."""
    signed: list[int] = []
    used: Counter[str] = Counter()
    together = threading.Barrier(3)

    def fault(handler: Handler) -> bool:
        if handler.path == "/model":
            signed.append(1)
            handler.reply(302, b"", {"Location": f"/a.pt?signature={len(signed)}"})
            return True
        used[handler.path] += 1
        if used[handler.path] <= 4:
            return False
        with suppress(threading.BrokenBarrierError):
            together.wait(0.3)
        handler.reply(403)
        return True

    server.fault = fault
    assert same(transload.load(f"{server.url}/model", threads=6))
    assert len(signed) > 1


def test_an_address_that_replaces_an_expired_one_is_used_for_the_rest(server: FileServer) -> None:
    origins: list[int] = []

    def fault(handler: Handler) -> bool:
        if handler.path == "/model":
            origins.append(len(server.log))
            handler.reply(302, b"", {"Location": f"/a.pt?signature={len(origins)}"})
        elif handler.path.endswith("=1") and len(server.log) > 3:
            handler.reply(403)
        else:
            return False
        return True

    server.fault = fault
    assert same(transload.load(f"{server.url}/model", threads=1))
    assert len(origins) == 2
    assert len(server.log) > origins[-1] + 2


# -- what nobody needs any more


def hang(_: Handler) -> bool:
    """Send nothing, until the test ends."""
    end.wait(20)
    return True


def ask_to_wait(handler: Handler) -> bool:
    handler.reply(503, b"", {"Retry-After": "20"})
    return True


end = threading.Event()


@pytest.mark.skipif(sys.platform == "win32", reason="a signal to itself ends a process there")
@pytest.mark.parametrize("fault", [hang, ask_to_wait])
@pytest.mark.parametrize("read", [transload.load, transload.verify])
def test_ctrl_c_ends_a_read_from_a_server_that_does_not_answer(
    read: Callable[[str], object], fault: Callable[[Handler], bool], server: FileServer
) -> None:
    """Other threads end too: they look for it while they wait."""
    end.clear()
    later: list[float] = []

    def interrupt() -> None:
        later.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    def answer(handler: Handler) -> bool:
        if len(server.log) == 5:
            threading.Timer(0.3, interrupt).start()
        return len(server.log) > 4 and fault(handler)

    server.fault = answer
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            read(f"{server.url}/a.pt")
        assert time.monotonic() - later[0] < 5
    finally:
        signal.signal(signal.SIGINT, before)
        end.set()


def test_an_error_ends_what_other_threads_wait_for(server: FileServer) -> None:
    end.clear()

    def answer(handler: Handler) -> bool:
        if len(server.log) == 5:
            handler.reply(403)
            return True
        return len(server.log) > 5 and hang(handler)

    server.fault = answer
    start = time.monotonic()
    with pytest.raises(ForbiddenFileError):
        transload.load(f"{server.url}/a.pt")
    assert time.monotonic() - start < 5
    end.set()


def test_an_error_in_a_thread_ends_what_the_caller_waits_for(server: FileServer) -> None:
    end.clear()
    mine = threading.Event()

    def answer(handler: Handler) -> bool:
        mine.set()
        return hang(handler)

    def read() -> None:
        with closing(remote.open_url(f"{server.url}/a.pt")) as source:
            server.fault = answer
            source.read(len(DATA) // 2, 10)

    def fail() -> None:
        mine.wait(10)
        raise EOFError

    start = time.monotonic()
    with pytest.raises(EOFError):
        pool.ThreadPool().run([fail], read)
    assert time.monotonic() - start < 5
    assert not pool.has_failed()
    end.set()


@pytest.mark.parametrize("proxied", [False, True])
def test_an_error_in_a_thread_ends_a_handshake(monkeypatch: pytest.MonkeyPatch, *, proxied: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        if proxied:
            monkeypatch.setenv("https_proxy", f"http://{address}")

        def fail() -> None:
            with listening.accept()[0] as connection:
                connection.recv(1)
                raised.append(time.monotonic())
                connections.append(connection.dup())
            raise EOFError

        raised: list[float] = []
        connections: list[socket.socket] = []
        url = f"https://{'model.example' if proxied else address}/a.pt"
        with pytest.raises(EOFError):
            pool.ThreadPool().run([fail], lambda: remote.open_url(url).close())
        assert time.monotonic() - raised[0] < 5
        connections[0].close()


def test_a_pool_that_a_thread_of_another_made_fails_with_that() -> None:
    """A thread that waits in the inner pool ends when the outer one fails."""
    waits, seen = threading.Event(), []

    def wait() -> None:
        waits.set()
        until = time.monotonic() + 10
        while not pool.has_failed() and time.monotonic() < until:
            time.sleep(0.01)
        seen.append(pool.has_failed())

    def fail() -> None:
        waits.wait(10)
        raise EOFError

    with pytest.raises(EOFError):
        pool.ThreadPool().run([lambda: pool.ThreadPool().run([wait], lambda: None)], fail)
    assert seen == [True]
    assert not pool.has_failed()
