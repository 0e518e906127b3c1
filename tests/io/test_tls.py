"""Files by https://, from servers on this machine with certificates of a test authority."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.file_server import TLS, FileServer, Handler, serve
from tests.makers import saved

import transload
from transload.errors import CannotReadError
from transload.io import http

WEIGHTS = {f"layers.{index}.weight": torch.arange(30_000.0) + index for index in range(20)}
FILES = {"a.pt": saved(WEIGHTS)}


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Only the authority of the tests is trusted, retries are quick, and nothing of this machine's settings counts."""
    for name in [*os.environ]:
        if name.lower().endswith("_proxy") or name.startswith("SSL_CERT"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("SSL_CERT_FILE", str(TLS / "ca.pem"))
    monkeypatch.setattr(http, "_PAUSE", 0.001)
    http._tls.cache_clear()
    yield
    http._tls.cache_clear()


@pytest.fixture
def server() -> Iterator[FileServer]:
    with serve(dict(FILES), "here.pem") as server:
        yield server


def is_whole(loaded: dict[str, torch.Tensor]) -> bool:
    return loaded.keys() == WEIGHTS.keys() and all(torch.equal(loaded[name], value) for name, value in WEIGHTS.items())


def test_inspect_open_load_and_convert(server: FileServer, tmp_path: Path) -> None:
    url = f"{server.url}/a.pt"
    assert transload.inspect(url).ok
    with transload.open(url) as handle:
        assert torch.equal(handle["layers.7.weight"], WEIGHTS["layers.7.weight"])
    assert is_whole(transload.load(url, verify=True))
    transload.convert(url, tmp_path / "a.safetensors")
    assert is_whole(transload.load(tmp_path / "a.safetensors"))


def test_connections_are_used_again(server: FileServer) -> None:
    with transload.open(f"{server.url}/a.pt") as handle:
        assert all(torch.equal(handle[name], value) for name, value in WEIGHTS.items())
    assert len(server.log) > 2
    assert server.connections < len(server.log)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_connections_are_not_used_in_a_forked_child(server: FileServer) -> None:
    """Both would continue one encrypted stream."""
    client, url = http.Client(), f"{server.url}/a.pt"

    def size() -> int:
        with client.get(url, {"Range": "bytes=0-9"}, url) as answer:
            return answer.read_into(memoryview(bytearray(20)))

    assert (size(), size(), server.connections) == (10, 10, 1)
    child = os.fork()
    if not child:
        with suppress(BaseException):
            os._exit(size())
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 10
    assert server.connections == 2
    assert (size(), server.connections) == (10, 2)
    client.close()


def test_certificate_without_a_known_authority_is_refused_at_once(
    server: FileServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(TLS / "elsewhere.pem"))
    with pytest.raises(CannotReadError, match="the certificate of the server is not trusted") as error:
        transload.inspect(f"{server.url}/a.pt")
    assert "SSL_CERT_FILE" in str(error.value)
    assert (server.connections, server.log) == (1, [])


@pytest.mark.parametrize(
    ("certificate", "why"), [("elsewhere.pem", "IP address mismatch"), ("expired.pem", "certificate has expired")]
)
def test_certificate_for_another_server_or_time_is_refused(certificate: str, why: str) -> None:
    with serve(dict(FILES), certificate) as server, pytest.raises(CannotReadError, match=why):
        transload.inspect(f"{server.url}/a.pt")
    assert server.log == []


def test_redirect_to_a_server_without_encryption_is_refused(server: FileServer) -> None:
    with serve(dict(FILES)) as plain:
        server.fault = redirect_to(plain)
        with pytest.raises(CannotReadError, match="redirects to http://, which is not safe"):
            transload.inspect(f"{server.url}/a.pt")
    assert plain.log == []


def test_redirect_to_another_server_gets_no_password(server: FileServer) -> None:
    with serve(dict(FILES), "here.pem") as other:
        server.fault = redirect_to(other)
        assert is_whole(transload.load(server.url.replace("//", "//me:pw@") + "/a.pt"))
    assert all("Authorization" in headers for _, headers in server.log)
    assert other.log
    assert not any("Authorization" in headers for _, headers in other.log)


def redirect_to(other: FileServer) -> Callable[[Handler], bool]:
    def answer(handler: Handler) -> bool:
        handler.reply(302, headers={"Location": f"{other.url}{handler.path}"})
        return True

    return answer


@pytest.mark.parametrize("how", ["closed", "garbage"])
def test_broken_connections_are_replaced(server: FileServer, how: str) -> None:
    """Without the end that TLS prescribes, and with bytes that are no TLS."""
    broken: list[int] = []

    def break_some(handler: Handler) -> bool:
        if len(server.log) % 3 or len(broken) >= 4:
            return False
        broken.append(len(server.log))
        handler.cut = 1000
        if how == "garbage":
            vars(handler)["hang_up"] = lambda: socket.socket.send(handler.connection, bytes(1000))
        return False

    server.fault = break_some
    with transload.open(f"{server.url}/a.pt") as handle:
        assert all(torch.equal(handle[name], value) for name, value in WEIGHTS.items())
    assert len(broken) == 4


@contextmanager
def proxy() -> Iterator[SimpleNamespace]:
    """A proxy that passes encrypted connections on; ``asked`` has the servers that it was asked for."""
    listening = socket.create_server(("127.0.0.1", 0))
    found = SimpleNamespace(url=f"http://127.0.0.1:{listening.getsockname()[1]}", asked=[])
    opened = [listening]

    def pump(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
        hang_up(source, target)

    def hang_up(*sockets: socket.socket) -> None:
        for each in sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def accept() -> None:
        with suppress(OSError):
            while True:
                client = listening.accept()[0]
                head = b""
                while b"\r\n\r\n" not in head:
                    head += client.recv(1 << 16)
                found.asked.append(head.split()[1].decode())
                host, _, port = found.asked[-1].rpartition(":")
                server = socket.create_connection((host, int(port)))
                opened.extend((client, server))
                client.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
                for pair in ((client, server), (server, client)):
                    threading.Thread(target=pump, args=pair, daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield found
    finally:
        hang_up(*opened)
        for each in opened:
            each.close()


def test_proxy_gets_only_encrypted_bytes(server: FileServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with proxy() as via:
        monkeypatch.setenv("https_proxy", via.url)
        assert is_whole(transload.load(f"{server.url}/a.pt"))
        assert set(via.asked) == {server.url.removeprefix("https://")}
    assert server.log
