"""Buckets, through obstore and s3fs, of an S3 server on this machine.

Needs `pip install -r requirements/remote.txt`; skipped without.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.request import Request, urlopen

import pytest
import torch
from tests.io.test_remote import FILES, SECRET, WEIGHTS, dcp_files, described, same
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


def test_an_object_without_a_tag_that_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its date tells the versions apart."""
    import obstore
    from obstore.store import MemoryStore

    get = obstore.get

    def untagged(*arguments: Any, **options: Any) -> SimpleNamespace:
        result = get(*arguments, **options)
        return SimpleNamespace(meta={**result.meta, "e_tag": None}, bytes=result.bytes)

    monkeypatch.setattr(obstore, "get", untagged)
    store = MemoryStore()
    obstore.put(store, "a.pt", b"old")
    file = buckets.ObjectFile(store, "a.pt", "a.pt")
    buffer = bytearray(3)
    file.fill(0, [memoryview(buffer)])
    assert buffer == b"old"
    time.sleep(0.02)  # some clocks tick every 16 ms
    obstore.put(store, "a.pt", b"new")
    with pytest.raises(BrokenFileError, match="changed while it was read"):
        file.fill(0, [memoryview(buffer)])


def _read_all(handle: Any) -> None:
    handle["layers.9.weight"]
    handle._opened.check_unchanged()


@pytest.fixture(scope="module")
def folder(endpoint: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A DCP directory, which the bucket has, too."""
    base = tmp_path_factory.mktemp("dcp")
    for name, data in dcp_files(base).items():
        put(f"{endpoint}/bucket/dcp/{name}", data)
    return base / "dcp"


def test_dcp_is_described_as_on_a_disk(folder: Path) -> None:
    assert described("s3://bucket/dcp") == described(folder)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process(through: str) -> None:
    url = "s3://bucket/dir/a.pt"
    with transload.open(url) as handle:
        anew = in_a_fork(lambda: str(transload.load(url)["layers.9.weight"].shape))
        opened = in_a_fork(lambda: str(handle["layers.9.weight"].shape))
    folder = in_a_fork(lambda: transload.inspect("s3://bucket/sub").path)
    if through == "obstore":
        for said in (anew, opened, folder):
            assert said.startswith("CannotReadError: s3://bucket/")
            assert "forked" in said
            assert "spawn or forkserver" in said
    else:
        assert (anew, folder) == ("torch.Size([40009])", "s3://bucket/sub")
        assert opened.startswith(f"CannotReadError: {url}: it was opened before this process was forked\nOpen it again")


def in_a_fork(do: Callable[[], str]) -> str:
    """What a function returns, or the error that it raises, in a forked process, which is killed if it hangs."""
    out, into = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this process has threads
        child = os.fork()
    if not child:
        try:
            said = do()
        except BaseException as error:  # noqa: BLE001 - for the parent
            said = f"{type(error).__name__}: {error}"
        os.write(into, said.encode())
        os._exit(0)
    try:
        return os.read(out, 10_000).decode() if select.select([out], [], [], 15)[0] else "it hangs"
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(out)
        os.close(into)


def test_a_server_that_is_not_there(monkeypatch: pytest.MonkeyPatch, through: str) -> None:
    login = f"me:{SECRET}@"
    monkeypatch.setattr(buckets, "_RETRIES", 1)
    if through == "s3fs":
        login = ""  # it refuses one before it tries
        s3fs = pytest.importorskip("s3fs")
        monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
        monkeypatch.setattr(s3fs.S3FileSystem, "_cache", {})  # has the server above
        monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{login}127.0.0.1:9")
    with pytest.raises(CannotReadError) as caught:
        transload.load("s3://bucket/dir/a.pt")
    what = "s3://bucket/dir/a.pt: the endpoint http://127.0.0.1:9 does not answer"
    assert str(caught.value) == f"{what}\nCheck AWS_ENDPOINT_URL, the region and the connection."
    assert SECRET not in "".join(traceback.format_exception(caught.value))


def test_a_bucket_that_is_not_there(through: str) -> None:
    for url in ("s3://nobucket/a.pt", "s3://nobucket/run/"):
        with pytest.raises(CannotReadError, match=r"no such (bucket|file)") as caught:
            transload.inspect(url)
        assert "xml" not in str(caught.value), through


def test_an_endpoint_that_is_no_url(monkeypatch: pytest.MonkeyPatch, through: str) -> None:
    if through == "s3fs":
        pytest.skip("of obstore")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "localhost:9000")
    with pytest.raises(CannotReadError, match="AWS_ENDPOINT_URL is not a URL\nBegin it with https"):
        transload.load("s3://bucket/dir/a.pt")


@pytest.mark.parametrize(
    ("error", "what"),
    [
        (
            "performing PUT http://169.254.169.254/latest/api/token in 2s - ConnectError(",
            "no credentials.*\n.* AWS_SKIP",
        ),
        (
            "GET https://h:1/b in 2s - HTTP error: error sending request\nInvalidCertificate(",
            "https://h:1 is not trusted",
        ),
        ("GET https://h:1/b in 2s - HTTP error: error sending request", "https://h:1 breaks off.*\nCheck AWS_END"),
        ("GET REDACTED in 2s - HTTP error\nConnectError(", "the endpoint does not answer"),
    ],
)
def test_what_obstore_says(error: str, what: str) -> None:
    with pytest.raises(CannotReadError, match=what):
        buckets._refuse(ValueError(error), "s3://bucket/a.pt")


def test_credentials_of_a_profile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("boto3")
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "credentials").write_text(f"[work]\naws_access_key_id=me\naws_secret_access_key={SECRET}\n")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_PROFILE", "work")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    assert transload.inspect("s3://bucket/dir/a.pt").ok
