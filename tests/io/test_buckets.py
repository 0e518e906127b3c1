"""Buckets, through obstore and s3fs, of an S3 server on this machine.

Needs `pip install -r requirements/remote.txt`; skipped without.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
import torch
from tests.io.test_remote import FILES, SECRET, WEIGHTS, same
from tests.makers import codes

import transload
from transload.cli.main import main
from transload.errors import BrokenFileError, CannotReadError, MissingFileError
from transload.io import buckets

pytest.importorskip("obstore")
pytest.importorskip("moto.server")


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    """The server, with a bucket."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(600):
            with suppress(OSError):
                urlopen(url, timeout=60).close()
                break
            time.sleep(0.1)
        put(f"{url}/bucket", b"")
        for name, data in FILES.items():
            put(f"{url}/bucket/dir/{name}", data)
        index = {"weight_map": dict.fromkeys(WEIGHTS, "a.safetensors")}
        put(f"{url}/bucket/sub/m.index.json", json.dumps(index).encode())
        put(f"{url}/bucket/sub/a.safetensors", FILES["a.safetensors"])
        put(f"{url}/bucket/empty.pt", b"")
        yield url
    finally:
        server.terminate()
        server.wait()


def put(url: str, data: bytes) -> None:
    headers = {"Content-Type": "application/octet-stream"}  # moto takes urllib's own for a form
    urlopen(Request(url, data or None, headers, method="PUT"), timeout=60).close()  # noqa: S310 - the server above


@pytest.fixture(autouse=True, params=["obstore", "s3fs"])
def through(request: pytest.FixtureRequest, endpoint: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    for name in [*os.environ]:
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "me")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("HOME", str(tmp_path))
    library = str(request.param)
    if library == "s3fs":
        pytest.importorskip("s3fs")
        monkeypatch.setattr(buckets, "_BUCKETS", ())
    return library


@pytest.mark.parametrize("name", FILES)
def test_files(name: str) -> None:
    url = f"s3://bucket/dir/{name}"
    checkpoint = transload.inspect(url)
    assert (checkpoint.path, checkpoint.ok, len(checkpoint.tensors)) == (url, True, len(WEIGHTS))
    with transload.open(url) as handle:
        assert torch.equal(handle.slice("layers.7.weight")[10:20], WEIGHTS["layers.7.weight"][10:20])
    assert same(transload.load(url), WEIGHTS)


def test_folders_and_what_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = transload.inspect("s3://bucket/sub")
    assert (checkpoint.path, checkpoint.ok, codes(checkpoint)) == ("s3://bucket/sub", True, [])
    assert same(transload.load("s3://bucket/sub/m.index.json"), WEIGHTS)
    assert transload.inspect("s3://bucket/empty.pt").integrity == "not-a-checkpoint"
    for url in ("s3://bucket/dir/b.pt", "s3://bucket/nothing", "s3://bucket/nothing/"):
        with pytest.raises(MissingFileError) as caught:
            transload.load(url)
        assert str(caught.value).startswith(url.rstrip("/"))
    assert main(["inspect", "s3://no-such-bucket/a.pt"]) == 2
    assert main(["inspect", "s3://bucket/dir/a.pt"]) == 0
    out, err = capsys.readouterr()
    assert SECRET not in out + err
    assert "Traceback" not in out + err


def test_an_object_that_changes() -> None:
    import obstore
    from obstore.store import from_url

    store = from_url("s3://bucket", client_options={"allow_http": True})
    obstore.put(store, "b.pt", FILES["a.pt"])
    with transload.open("s3://bucket/b.pt") as handle:
        data = bytearray(FILES["a.pt"])
        data[1_000_000] ^= 1  # of the same size
        obstore.put(store, "b.pt", bytes(data))
        with pytest.raises(BrokenFileError, match="changed while it was read"):
            _read_all(handle)


def _read_all(handle: Any) -> None:
    handle["layers.9.weight"]
    handle._opened.check_unchanged()


def test_a_server_that_is_not_there(monkeypatch: pytest.MonkeyPatch, through: str) -> None:
    if through == "s3fs":
        pytest.skip("it tries for a minute")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setattr(buckets, "_RETRIES", 1)
    with pytest.raises(CannotReadError, match=r"^s3://bucket/dir/a\.pt: "):
        transload.load("s3://bucket/dir/a.pt")


def test_credentials_of_a_profile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("boto3")
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "credentials").write_text(f"[work]\naws_access_key_id=me\naws_secret_access_key={SECRET}\n")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_PROFILE", "work")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    assert transload.inspect("s3://bucket/dir/a.pt").ok
