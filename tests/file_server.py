"""An HTTP server on this machine for tests: ranges, latency, a log of requests, and faults on demand."""

from __future__ import annotations

import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit
from zlib import crc32

TLS = Path(__file__).parent / "tls"
"""Certificates for tests, with their keys: ``here.pem`` for this machine, ``elsewhere.pem`` for another, and one that
has expired; all signed by ``ca.pem``, whose key was thrown away."""
_PIECE = 1 << 18


class Handler(BaseHTTPRequestHandler):
    """Answers with the files of the server; ``server.fault`` may answer first, and say so by returning true."""

    protocol_version = "HTTP/1.1"
    server: FileServer
    cut = -1
    """After how many bytes of the body the connection breaks; never, if negative."""
    headers_too: dict[str, str]
    ranges = True

    def do_GET(self) -> None:
        server = self.server
        if server.latency:
            time.sleep(server.latency)
        with server.lock:
            server.log.append((self.path, dict(self.headers)))
        self.headers_too = {}
        self.cut, self.ranges = -1, server.ranges
        with suppress(ConnectionError):
            if server.fault is not None and server.fault(self):
                return
            name = unquote(urlsplit(self.path).path).lstrip("/")
            data = server.files.get(name)
            if data is None:
                self.reply(404, b"not here")
            else:
                self.send_file(data)

    def send_file(self, data: bytes, tag: str = "") -> None:
        """Answer with a file, or the range of it that is asked for."""
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")) if self.ranges else None
        tags = {"ETag": f'"{tag or crc32(data[: 1 << 20])}"'}
        if match is None:
            self.reply(200, data, tags)
            return
        begin, end = int(match[1]), min(int(match[2]) + 1, len(data))
        if begin >= len(data):
            self.reply(416, b"", {"Content-Range": f"bytes */{len(data)}"})
        else:
            self.reply(206, data[begin:end], {**tags, "Content-Range": f"bytes {begin}-{end - 1}/{len(data)}"})

    def reply(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        """Send an answer, as much of it as is not cut off."""
        sent = {"Content-Length": str(len(body)), **(headers or {}), **self.headers_too}
        self.send_response(status)
        for name, value in sent.items():
            if value:
                self.send_header(name, value)
        self.end_headers()
        is_cut = 0 <= self.cut < len(body)
        begun = time.monotonic()
        left = memoryview(body)[: self.cut if is_cut else len(body)]
        while left:
            with self.server.lock:
                self.server.sent += len(left[:_PIECE])
            self.wfile.write(left[:_PIECE])
            left = left[_PIECE:]
            if self.server.rate:
                time.sleep(max(0.0, begun + (len(body) - len(left)) / self.server.rate - time.monotonic()))
        if is_cut:
            self.hang_up()

    def hang_up(self) -> None:
        """Break the connection."""
        self.close_connection = True
        with suppress(OSError):
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


class FileServer(ThreadingHTTPServer):
    """Files by name. ``log`` has the path and headers of each request, ``sent`` counts the bytes of bodies.

    With a ``certificate``, the name of a file in ``tests/tls``, it speaks HTTPS.
    """

    request_queue_size = 128
    daemon_threads = True

    def __init__(self, files: dict[str, bytes], certificate: str = "") -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.connections = 0
        if certificate:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(TLS / certificate)
            # The handshake is left to the thread of the connection.
            self.socket = context.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)
        self.files = files
        self.log: list[tuple[str, dict[str, str]]] = []
        self.sent = 0
        self.latency = 0.0
        self.rate = 0.0  # bytes a second for each connection
        self.ranges = True
        self.fault: Callable[[Handler], bool] | None = None
        self.lock = threading.Lock()
        self.url = f"{'https' if certificate else 'http'}://127.0.0.1:{self.server_address[1]}"

    def process_request(self, request: Any, client_address: Any) -> None:
        """Count the connection, and serve it."""
        self.connections += 1
        super().process_request(request, client_address)

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing: clients hang up."""


@contextmanager
def serve(files: dict[str, bytes], certificate: str = "") -> Iterator[FileServer]:
    """A server of files, while the block runs."""
    server = FileServer(files, certificate)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
