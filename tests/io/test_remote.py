"""Files and folders by URL, from servers on this machine that behave well, and from some that do not."""

from __future__ import annotations

import gc
import io
import json
import os
import random
import re
import subprocess
import sys
import time
import traceback
import tracemalloc
import warnings
import weakref
import zipfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.each import for_each
from tests.file_server import FileServer, Handler, serve
from tests.makers import codes, saved
from tests.release import RELEASE

import transload
from transload.cli.main import main
from transload.errors import (
    BrokenFileError,
    CannotReadError,
    ForbiddenFileError,
    MissingFileError,
    TransloadError,
    UsageError,
)
from transload.io import http, limits, remote
from transload.io.paths import open_source
from transload.io.remote import RemoteSource, hub_token, remote_folder
from transload.io.sources import is_url, shown
from transload.opening import engine

SECRET = "hush-hush"  # noqa: S105 - what must not be printed


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Retries are quick, and nothing of this machine's settings counts."""
    monkeypatch.setattr(http, "_PAUSE", 0.001)
    monkeypatch.setattr(http, "_TIMEOUT", 5.0)
    for name in [*os.environ]:
        if name.lower().endswith("_proxy") or name.startswith(("HF_", "HUGGING_FACE_", "AWS_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))


def weights(count: int = 12, size: int = 40_000) -> dict[str, torch.Tensor]:
    """A state dict of two megabytes."""
    generator = torch.Generator().manual_seed(0)
    return {f"layers.{index}.weight": torch.randn(size + index, generator=generator) for index in range(count)}


def as_safetensors(tensors: dict[str, torch.Tensor]) -> bytes:
    from safetensors.torch import save

    data: bytes = save(tensors)
    return data


def same(left: Any, right: Any) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


WEIGHTS = weights()
FILES = {"a.pt": saved(WEIGHTS), "a.safetensors": as_safetensors(WEIGHTS)}


@pytest.fixture
def server() -> Iterator[FileServer]:
    with serve(dict(FILES)) as server:
        yield server


@contextmanager
def fault(server: FileServer, fault: Callable[[Handler], bool]) -> Iterator[None]:
    """Let a function answer the requests that it returns true for."""
    server.fault = fault
    try:
        yield
    finally:
        server.fault = None


def answers(status: int, body: bytes = b"", **headers: str) -> Callable[[Handler], bool]:
    """Answer everything in one way."""

    def answer(handler: Handler) -> bool:
        handler.reply(status, body, {name.replace("_", "-"): value for name, value in headers.items()})
        return True

    return answer


# -- reading


@pytest.mark.parametrize("name", FILES)
def test_inspect_open_and_load(server: FileServer, name: str) -> None:
    url = f"{server.url}/{name}"
    checkpoint = transload.inspect(url)
    assert (checkpoint.path, checkpoint.ok, len(checkpoint.tensors)) == (url, True, len(WEIGHTS))
    assert len(server.log) == (2 if name == "a.pt" else 1)
    with transload.open(url) as handle:
        before, sent = len(server.log), server.sent
        assert torch.equal(handle["layers.5.weight"], WEIGHTS["layers.5.weight"])
        assert torch.equal(handle.slice("layers.7.weight")[10:20], WEIGHTS["layers.7.weight"][10:20])
    assert len(server.log) - before <= 4
    assert server.sent - sent < 200_000
    assert same(transload.load(url), WEIGHTS)
    assert same(transload.load(url, verify=True), WEIGHTS)
    facts = dict(checkpoint.facts)
    assert name != "a.pt" or facts["headers of records"].endswith("are compared with the directory when they are read")


def test_formats(server: FileServer, tmp_path: Path) -> None:
    """What is small, old, or no archive of torch at all."""
    import numpy as np

    small = {"w": torch.arange(3.0), "n": 7}
    array = io.BytesIO()
    np.savez(array, w=np.arange(20_000), v=np.arange(30_000))
    server.files |= {
        "small.pt": saved(small),
        "old.pt": saved(WEIGHTS, _use_new_zipfile_serialization=False),
        "a.npz": array.getvalue(),
        "empty.pt": b"",
        "page.pt": b"<!doctype html><html><body>Log in</body></html>",
    }
    assert transload.load(f"{server.url}/small.pt")["n"] == 7
    assert same(transload.load(f"{server.url}/old.pt"), WEIGHTS)
    assert torch.equal(transload.load(f"{server.url}/a.npz")["v"], torch.arange(30_000))
    assert transload.inspect(f"{server.url}/empty.pt").integrity == "not-a-checkpoint"
    page = transload.inspect(f"{server.url}/page.pt")
    assert page.integrity == "not-a-checkpoint"
    assert page.findings[0].title.startswith("a web page")
    target = tmp_path / "a.safetensors"
    assert transload.convert(f"{server.url}/a.pt", target).complete
    assert same(transload.load(target), WEIGHTS)
    assert transload.verify(f"{server.url}/a.pt").integrity == "whole"
    assert transload.rescue(f"{server.url}/a.pt", tmp_path / "b.pt").exit_code == 0
    assert same(transload.load(tmp_path / "b.pt"), WEIGHTS)
    check = transload.check(f"{server.url}/a.pt", "cpu")
    assert (check.ok, check.plan.how) == (True, "1 thread, over the network")


def test_check_says_with_how_many_threads_load_reads(server: FileServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """No more than there are requests, however many tensors; as from memory, if the first answer had everything."""
    fsspec = pytest.importorskip("fsspec")
    choices: list[str] = []

    def note(*arguments: Any) -> engine.Choice:
        choice = choose(*arguments)
        choices.append(choice.why)
        return choice

    choose = engine.choose
    monkeypatch.setattr(engine, "choose", note)
    monkeypatch.setattr(limits, "cores", lambda: 4)
    monkeypatch.setattr(engine, "huge_pages_pay", lambda _: False)
    many = saved(weights(200, 25_000))
    server.files["many.pt"] = many
    fsspec.filesystem("memory").pipe("/many.pt", many)

    def compare(case: tuple[str, bool, str]) -> None:
        url, server.ranges, expected = case
        choices.clear()
        check = transload.check(url, "cpu")
        transload.load(url)
        assert [check.plan.how, *choices] == [expected] * 3

    cases = [
        (f"{server.url}/a.pt", True, "1 thread, over the network"),
        (f"{server.url}/many.pt", True, "5 threads, over the network"),
        (f"{server.url}/a.pt", False, "1 thread"),
        (f"{server.url}/many.pt", False, "4 threads"),
        ("memory://many.pt", True, "1 thread, over the network"),
    ]
    for_each(cases, compare)


def test_long_reads_are_divided(server: FileServer) -> None:
    data = random.Random(0).randbytes(9 << 20)  # noqa: S311 - not a secret
    server.files["a.bin"] = data
    source = open_source(f"{server.url}/a.bin")
    assert isinstance(source, RemoteSource)
    assert source.read(0, source.size) == data
    assert len(server.log) == 4
    ranges = [(5 << 20, 10), (6 << 20, 20), ((6 << 20) + 50, 7), (len(data) - 3, 100), (-1, 5), (len(data), 1), (7, 0)]
    assert source.read_all(ranges) == [data[at : at + count] if at >= 0 else b"" for at, count in ranges]
    before = len(server.log)
    source.prepare([(2 << 20, 100), (3 << 20, 100)])
    assert source.read((3 << 20) + 50, 50) == data[(3 << 20) + 50 : (3 << 20) + 100]
    assert source.holds(2 << 20, 100)
    assert not source.holds(2 << 20, 101)
    assert len(server.log) == before + 2
    source.close()
    with pytest.raises(CannotReadError, match="it was closed"):
        source.read(1 << 20, 10)


def test_reads_that_follow_one_another_read_ahead(server: FileServer, tmp_path: Path) -> None:
    data = bytes(range(251)) * ((40 << 20) // 250)
    server.files["a.bin"] = data
    url = f"{server.url}/a.bin"
    with closing(open_source(url)) as source:
        server.log.clear()
        for offset in range(0, 40 << 20, 1 << 20):
            buffer = memoryview(bytearray(1 << 20))
            assert source.readinto(offset, buffer) == len(buffer)
            assert buffer == data[offset : offset + len(buffer)]
        assert len(server.log) <= 13  # pieces of 4 MiB, not 40
    with closing(open_source(url)) as source:  # as two threads do that each take the next record
        server.log.clear()
        for offset in [at << 20 for pair in range(0, 40, 4) for at in (pair, pair + 2, pair + 1, pair + 3)]:
            buffer = memoryview(bytearray(1 << 20))
            source.readinto(offset, buffer)
            assert buffer == data[offset : offset + len(buffer)]
        assert len(server.log) <= 16
    with closing(open_source(url)) as source:
        server.log.clear()
        for offset in (30 << 20, 10 << 20, 20 << 20, 5 << 20):  # these do not
            source.readinto(offset, memoryview(bytearray(1 << 20)))
        assert len(server.log) == 4
    before = len(server.log)
    transload.convert(f"{server.url}/a.pt", tmp_path / "a.safetensors")
    assert len(server.log) - before <= 6
    assert same(transload.load(tmp_path / "a.safetensors"), WEIGHTS)


def rotating(server: FileServer, files: int, size: int = 12 << 20) -> list[RemoteSource]:
    """Files of a folder, a piece of each of which was read in turn until their ends."""
    server.files |= {f"shards/{number}.bin": bytes([number]) * size for number in range(files)}
    folder, _ = remote_folder(f"{server.url}/shards/")
    sources = [folder.open(f"{number}.bin") for number in range(files)]
    for offset in range(0, size, 1 << 20):
        for number, source in enumerate(sources):
            buffer = memoryview(bytearray(1 << 20))
            assert source.readinto(offset, buffer) == len(buffer)
            assert buffer == bytes([number]) * len(buffer)
            assert sum(each.kept_ahead for each in sources if isinstance(each, RemoteSource)) <= remote._MOST_KEPT
    return [source for source in sources if isinstance(source, RemoteSource)]


def test_files_that_take_turns_are_read_once(server: FileServer) -> None:
    """As those of a sharded save do, since each tensor has a piece in all of them."""
    sources = rotating(server, 6)
    assert server.sent < 1.1 * 6 * (12 << 20)
    assert len(server.log) < 6 * 12
    sources[0].is_ahead()
    assert sources[0].kept_ahead == 0


def test_what_is_read_ahead_has_a_limit(server: FileServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where so many files take turns that it is not enough for each of them, they are read as asked for."""
    monkeypatch.setattr(remote, "_MOST_KEPT", 12 << 20)
    sources = rotating(server, 6)
    assert server.sent < 1.5 * 6 * (12 << 20)
    sources[-1].close()
    assert sources[-1].kept_ahead == 0


def test_an_error_ahead_is_told_where_the_bytes_are_needed(server: FileServer) -> None:
    data = bytes(range(251)) * ((16 << 20) // 250)
    server.files["a.bin"] = data

    def gone(handler: Handler) -> bool:
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", handler.headers.get("Range", ""))
        if match is None or int(match[2]) < 10 << 20:
            return False
        handler.reply(404)
        return True

    with closing(open_source(f"{server.url}/a.bin")) as source, fault(server, gone):
        for offset in range(0, 9 << 20, 1 << 20):
            buffer = memoryview(bytearray(1 << 20))
            source.readinto(offset, buffer)
            assert buffer == data[offset : offset + len(buffer)]
        with pytest.raises(CannotReadError):
            source.readinto(10 << 20, memoryview(bytearray(1 << 20)))


def test_element_counts_of_an_old_file_are_asked_for_together(server: FileServer) -> None:
    server.files["old.pt"] = saved(WEIGHTS, _use_new_zipfile_serialization=False)
    active: list[None] = []
    most = 0

    def slow(_: Handler) -> bool:
        nonlocal most
        active.append(None)
        most = max(most, len(active))
        time.sleep(0.05)
        active.pop()
        return False

    with fault(server, slow):
        assert len(transload.inspect(f"{server.url}/old.pt").tensors) == len(WEIGHTS)
    assert most > 3


def test_folders(server: FileServer, tmp_path: Path) -> None:
    """Shards by their index, and by their folder; DCP by its metadata."""
    from torch.distributed import checkpoint as dcp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is a single process
        writer = dcp.FileSystemWriter(tmp_path / "dcp")
        save = dcp.save_state_dict if RELEASE < (2, 3) else dcp.save
        save({"model": WEIGHTS, "step": 3}, storage_writer=writer, no_dist=True)
    transload.convert(saved(WEIGHTS), tmp_path / "model.safetensors", max_shard_size="700KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) == 3
    for file in (*tmp_path.glob("*/.*"), *tmp_path.glob("*/*"), *tmp_path.glob("*.*")):
        server.files[f"x/{file.relative_to(tmp_path).as_posix()}"] = file.read_bytes()
    index = f"{server.url}/x/model.safetensors.index.json"
    checkpoint = transload.inspect(index)
    assert (checkpoint.path, checkpoint.ok, len(server.log)) == (index, True, 4)
    assert same(transload.load(index), WEIGHTS)
    assert same(transload.load(f"{index}?download=true"), WEIGHTS)
    assert same(transload.load(f"{server.url}/x/"), WEIGHTS)
    server.log.clear()
    with transload.open(index) as handle:
        server.log.clear()
        assert torch.equal(handle["layers.5.weight"], WEIGHTS["layers.5.weight"])
    assert {path for path, _ in server.log} == {"/x/model-00002-of-00003.safetensors"}
    for url in (f"{server.url}/x/dcp/", f"{server.url}/x/dcp/.metadata"):
        loaded = transload.load(url)
        assert (loaded["step"], same(loaded["model"], WEIGHTS)) == (3, True)
    state = {"model": {name: torch.zeros_like(tensor) for name, tensor in WEIGHTS.items()}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load = dcp.load_state_dict if RELEASE < (2, 3) else dcp.load
        load(state, storage_reader=transload.CheckpointReader(f"{server.url}/x/dcp/"), no_dist=True)
    assert same(state["model"], WEIGHTS)
    with pytest.raises(CannotReadError, match="does not list"):
        transload.inspect(f"{server.url}/nothing/")
    del server.files["x/model-00003-of-00003.safetensors"]
    assert "shard-missing" in codes(transload.inspect(index))


def test_connections_end_with_what_uses_them(server: FileServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not when garbage is collected, which may be much later."""
    clients: list[weakref.ref[http.Client]] = []
    create = http.Client.__init__

    def note(client: http.Client) -> None:
        clients.append(weakref.ref(client))
        create(client)

    monkeypatch.setattr(http.Client, "__init__", note)
    server.files["x/model.safetensors"] = FILES["a.safetensors"]
    gc.collect()
    gc.disable()
    try:
        for url in (f"{server.url}/x/", f"{server.url}/a.pt"):
            transload.inspect(url)
            transload.load(url)
            with transload.open(url) as handle:
                handle["layers.1.weight"]
        assert len(clients) >= 6
        assert {client() for client in clients} == {None}
    finally:
        gc.enable()


def dcp_files(folder: Path) -> dict[str, bytes]:
    """The files of a DCP directory in a folder, one for each tensor."""
    from torch.distributed import checkpoint as dcp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is a single process
        writer = dcp.FileSystemWriter(folder / "dcp", single_file_per_rank=False)
        save = dcp.save_state_dict if RELEASE < (2, 3) else dcp.save
        save({"model": WEIGHTS, "step": 3}, storage_writer=writer, no_dist=True)
    return {file.name: file.read_bytes() for file in (folder / "dcp").iterdir()}


def described(path: str | Path) -> tuple[int, object, tuple[tuple[str, str], ...]]:
    """What a report says of the files of a checkpoint."""
    checkpoint = transload.inspect(path)
    return checkpoint.nbytes, checkpoint.parts, checkpoint.facts


def test_folders_are_described_as_on_a_disk(server: FileServer, tmp_path: Path) -> None:
    """Also those that a web server does not list, whose files the index names."""
    files = dcp_files(tmp_path)
    server.files |= {f"dcp/{name}": data for name, data in files.items()}
    nbytes, _, facts = local = described(tmp_path / "dcp")
    assert (nbytes, dict(facts)["rank files"]) == (sum(map(len, files.values())), "13")
    for url in (f"{server.url}/dcp/", f"{server.url}/dcp/.metadata"):
        assert described(url) == local
    assert transload.verify(f"{server.url}/dcp/").nbytes == nbytes
    for name in ("meta.pt", "common.pt"):
        server.files[f"dcp/{name}"] = saved({"epoch": 3, "extra": torch.ones(2)})
        (tmp_path / "dcp" / name).write_bytes(server.files[f"dcp/{name}"])
        for url in (f"{server.url}/dcp/", f"{server.url}/dcp/.metadata"):
            assert described(url) == described(tmp_path / "dcp") != local
            assert transload.load(url)["model"].keys() == WEIGHTS.keys()
        del server.files[f"dcp/{name}"]
        (tmp_path / "dcp" / name).unlink()
    (tmp_path / "dcp" / "__0_3.distcp").unlink()
    del server.files["dcp/__0_3.distcp"]
    assert described(f"{server.url}/dcp/") == described(tmp_path / "dcp") != local
    weights = {name: f"pytorch_model-{at % 2 + 1:05}-of-00002.bin" for at, name in enumerate(WEIGHTS)}
    shards = {
        file: saved({name: WEIGHTS[name] for name in weights if weights[name] == file}) for file in weights.values()
    }
    shards["pytorch_model.bin.index.json"] = json.dumps({"weight_map": weights}).encode()
    for folder in ("bin", "safetensors"):
        (tmp_path / folder).mkdir()
    transload.convert(saved(WEIGHTS), tmp_path / "safetensors" / "model.safetensors", max_shard_size="700KB")
    for name, data in shards.items():
        (tmp_path / "bin" / name).write_bytes(data)
    for folder in ("bin", "safetensors"):
        server.files |= {f"{folder}/{file.name}": file.read_bytes() for file in (tmp_path / folder).iterdir()}
        assert described(f"{server.url}/{folder}/") == described(tmp_path / folder)


def test_a_shard_stays_below_its_index(server: FileServer) -> None:
    index = {"weight_map": {"a": "http://127.0.0.1:1/b.safetensors", "b": "../a.safetensors", "c": "a b?c#d%41.pt"}}
    index["weight_map"]["d"] = "\ud800.pt"
    server.files["x/m.index.json"] = json.dumps(index).encode()
    checkpoint = transload.inspect(f"{server.url}/x/m.index.json?key=1")
    assert "shard-outside" in codes(checkpoint)
    paths = sorted(path for path, _ in server.log)
    assert paths[:2] == ["/x/%ED%A0%80.pt?key=1", "/x/a%20b%3Fc%23d%2541.pt?key=1"]
    assert all(path.startswith("/x/") for path in paths)


# -- servers


def test_a_server_without_ranges(server: FileServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.ranges = False
    assert same(transload.load(f"{server.url}/a.pt"), WEIGHTS)
    assert len(server.log) == 1

    def chunked(handler: Handler) -> bool:
        data = FILES["a.pt"]
        handler.send_response(200)
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        for at in range(0, len(data), 100_000):
            part = data[at : at + 100_000]
            handler.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
        handler.wfile.write(b"0\r\n\r\n")
        return True

    with fault(server, chunked):
        assert same(transload.load(f"{server.url}/a.pt"), WEIGHTS)
    monkeypatch.setattr(http, "memory", lambda: (2_000_000, 1_000_000))
    with pytest.raises(CannotReadError, match=r"only 500,000 may be kept.*\n.*knows no ranges"):
        transload.load(f"{server.url}/a.pt")
    with fault(server, chunked), pytest.raises(CannotReadError, match="longer than 500,000"):
        transload.load(f"{server.url}/a.pt")


def test_a_server_that_announces_more_than_it_sends_fills_no_memory(server: FileServer) -> None:
    def announce(handler: Handler) -> bool:
        handler.send_response(200)
        handler.send_header("Content-Length", str(200_000_000))
        handler.end_headers()
        handler.wfile.write(b"x" * 10)
        handler.hang_up()
        return True

    tracemalloc.start()
    try:
        with fault(server, announce), pytest.raises(CannotReadError, match="after 10 of 200,000,000 bytes"):
            transload.load(f"{server.url}/a.pt")
        assert tracemalloc.get_traced_memory()[1] < 50_000_000
    finally:
        tracemalloc.stop()


def test_statuses(server: FileServer) -> None:
    wrong = {"Content_Range": "bytes 5-9/10"}
    cases: list[tuple[str, Callable[[Handler], bool], type[Exception], str]] = [
        ("forbidden", answers(403), ForbiddenFileError, "may have expired"),
        ("unauthorized", answers(401), ForbiddenFileError, "Check that you may read it"),
        ("not found", answers(404), MissingFileError, "404 Not Found"),
        ("gone", answers(410), MissingFileError, "410 Gone"),
        ("teapot", answers(418), CannotReadError, "418"),
        ("no range", answers(416), CannotReadError, "416"),
        ("proxy", answers(407), CannotReadError, "https_proxy"),
        ("always busy", answers(503), CannotReadError, r"503 Service Unavailable \(6 tries\)"),
        ("busy for an hour", answers(429, Retry_After="3600"), CannotReadError, "wait for 3600 seconds"),
        ("encoded", answers(200, b"abc", Content_Encoding="gzip"), CannotReadError, r"encoded \(gzip\)"),
        ("another range", answers(206, b"abcde", **wrong), CannotReadError, "instead of the first"),
        ("no size", answers(206, b"abc", Content_Range="bytes 0-2/*"), CannotReadError, "how long the file is"),
        ("no range in it", answers(206, b"abc"), CannotReadError, "which range"),
        ("two lengths", answers(206, b"abc", Content_Range="bytes 0-9/10"), CannotReadError, "another length"),
        ("around", answers(302, Location="/a.pt"), CannotReadError, "more than 10 redirects"),
        ("to a file", answers(302, Location="file:///etc/passwd"), CannotReadError, "redirects to file://"),
    ]

    def check(case: tuple[str, Callable[[Handler], bool], type[Exception], str]) -> None:
        _, answer, kind, text = case
        with fault(server, answer), pytest.raises(kind, match=text) as caught:
            transload.load(f"{server.url}/a.pt?sig={SECRET}")
        assert SECRET not in str(caught.value)

    for_each(cases, check)


def test_what_is_not_http(monkeypatch: pytest.MonkeyPatch) -> None:
    """A port where nobody listens, a name that is not known, and a server of something else."""
    import socket
    import threading

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    start = time.monotonic()
    with pytest.raises(CannotReadError, match="the connection failed: Connection refused"):
        transload.load(f"http://127.0.0.1:{port}/a.pt")
    assert time.monotonic() - start < 2
    for url in ("http://", "http:///a.pt", "http://[::1/a.pt", "http://127.0.0.1:port/a.pt"):
        with pytest.raises(TransloadError, match="valid URL"):
            transload.load(url)
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def talk() -> None:
            for _ in range(http._TRIES + 1):
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(1000)
                    connection.sendall(b"220 mail.example.org ESMTP\r\n")

        threading.Thread(target=talk, daemon=True).start()
        with pytest.raises(CannotReadError, match="not valid HTTP"):
            transload.load(f"http://127.0.0.1:{listening.getsockname()[1]}/a.pt")
    monkeypatch.setattr(http, "_TIMEOUT", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(CannotReadError, match="did not answer"):
        transload.load(f"http://127.0.0.1:{silent.getsockname()[1]}/a.pt")


def test_a_server_that_sends_next_to_nothing(server: FileServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte comes before the socket gives up, so only the rate is wrong."""
    monkeypatch.setattr(http, "_TIMEOUT", 0.1)
    monkeypatch.setattr(http, "_TRIES", 2)

    def trickle(handler: Handler) -> bool:
        handler.send_response(200)
        handler.send_header("Content-Length", "1000")
        handler.end_headers()
        for _ in range(20):
            handler.wfile.write(b"x")
            time.sleep(0.02)
        return True

    start = time.monotonic()
    with fault(server, trickle), pytest.raises(CannotReadError, match="next to nothing"):
        transload.load(f"{server.url}/a.pt")
    assert time.monotonic() - start < 2


def test_a_file_that_changes(server: FileServer) -> None:
    url = f"{server.url}/a.pt"
    with transload.open(url) as handle:
        before = handle["layers.0.weight"]
        server.files["a.pt"] = saved(weights(12, 40_001))
        with pytest.raises(BrokenFileError, match="changed while it was read"):
            handle["layers.9.weight"]
        server.files["a.pt"] = FILES["a.pt"]
        assert torch.equal(before, WEIGHTS["layers.0.weight"])
        server.files["a.pt"] = FILES["a.pt"][:1_000_000]
        with pytest.raises(BrokenFileError, match="changed while it was read"):
            handle["layers.9.weight"]

    def other_tag(handler: Handler) -> bool:  # of the same size
        if len(server.log) > 2:
            handler.send_file(FILES["a.pt"], "other")
        return len(server.log) > 2

    server.files["a.pt"] = FILES["a.pt"]
    server.log.clear()
    with fault(server, other_tag), pytest.raises(BrokenFileError, match=r"/a\.pt: it was changed while it was read"):
        transload.load(url)


def test_an_answer_must_say_which_version_it_is_from(server: FileServer) -> None:
    """If the first did."""

    def without_tag(handler: Handler) -> bool:
        data, (begin, end) = FILES["a.pt"], map(int, handler.headers["Range"].removeprefix("bytes=").split("-"))
        if begin:
            span = {"Content-Range": f"bytes {begin}-{end}/{len(data)}"}
            handler.reply(206, bytes(end + 1 - begin), span)
        return begin > 0

    with fault(server, without_tag), pytest.raises(BrokenFileError, match="changed while it was read"):
        transload.load(f"{server.url}/a.pt")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    "reads",
    [
        transload.verify,
        lambda url: transload.verify(url, hashes=True),
        lambda url: transload.inspect(url, stats=True),
        lambda url: transload.diff(url, url.replace("//", "//me@")),
    ],
    ids=["verify", "verify hashes", "stats", "diff"],
)
def test_what_cannot_be_reached_is_not_called_damaged(
    server: FileServer, name: str, reads: Callable[[str], object]
) -> None:
    def forbid(handler: Handler) -> bool:
        begin, end = map(int, handler.headers["Range"].removeprefix("bytes=").split("-"))
        if begin <= 1_000_000 <= end:
            handler.reply(403)
        return begin <= 1_000_000 <= end

    with fault(server, forbid), pytest.raises(ForbiddenFileError):
        reads(f"{server.url}/{name}")


def no_answer(path: str) -> Callable[[Handler], bool]:
    """A server that is too busy for one of its files."""

    def answer(handler: Handler) -> bool:
        if handler.path.endswith(path):
            handler.reply(503)
        return handler.path.endswith(path)

    return answer


READERS: list[Callable[[str], object]] = [
    *(transload.inspect, transload.load, transload.open, transload.verify, transload.check),
    lambda url: transload.convert(url, "never.safetensors"),
]


@pytest.mark.parametrize("reads", READERS, ids=["inspect", "load", "open", "verify", "check", "convert"])
@pytest.mark.parametrize("name", ["model-00002-of-00003.safetensors", "model.safetensors.index.json"])
def test_a_file_of_several_that_cannot_be_reached_is_no_damage(
    server: FileServer, name: str, reads: Callable[[str], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is another checkpoint in the folder read instead."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(http, "_TRIES", 1)
    transload.convert(saved(WEIGHTS), tmp_path / "model.safetensors", max_shard_size="700KB")
    for file in tmp_path.iterdir():
        server.files[f"x/{file.name}"] = file.read_bytes()
    server.files["x/pytorch_model.bin"] = saved({"old": torch.ones(2)})
    with fault(server, no_answer(name)), pytest.raises(CannotReadError, match="503") as caught:
        reads(f"{server.url}/x/")
    assert type(caught.value) is CannotReadError


def test_a_configuration_that_cannot_be_reached_is_not_left_out(
    server: FileServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "_TRIES", 1)
    weights = {
        "base_model.model.q.lora_A.weight": torch.ones(2, 4),
        "base_model.model.q.lora_B.weight": torch.ones(4, 2),
    }
    server.files["lora/adapter_model.safetensors"] = as_safetensors(weights)
    url = f"{server.url}/lora/"
    assert transload.inspect(url).ok
    server.files["lora/adapter_config.json"] = b'{"peft_type": "LORA", "r": 2, "lora_alpha": 16}'
    assert "16" in str(transload.inspect(url).facts)
    with fault(server, no_answer("adapter_config.json")), pytest.raises(CannotReadError, match="503"):
        transload.inspect(url)


def test_another_step_is_not_read_when_the_last_one_cannot_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec = pytest.importorskip("fsspec")
    files = fsspec.filesystem("memory")
    for step in (10, 20):
        state = saved({"module": {"w": torch.full((3,), float(step))}, "ds_version": "0.14", "global_steps": step})
        files.pipe(f"/steps/global_step{step}/mp_rank_00_model_states.pt", state)
    files.pipe({"/steps/latest": b"global_step10", "/steps/zero_to_fp32.py": b"#"})
    real_cat = files.cat_file

    def cat(path: str, **named: Any) -> bytes:
        if path.endswith("latest"):
            raise OSError(5, "try again")
        data: bytes = real_cat(path, **named)
        return data

    try:
        with transload.open("memory://steps/") as handle:
            assert handle["module/w"].tolist() == [10.0] * 3
        monkeypatch.setattr(files, "cat_file", cat)
        with pytest.raises(CannotReadError, match=r"steps/latest: .*try again"):
            transload.open("memory://steps/")
    finally:
        files.rm("/steps", recursive=True)


def test_a_sparse_tensor_whose_indices_cannot_be_reached_is_not_called_right(
    server: FileServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "_TRIES", 1)
    indices = torch.zeros(1, 100_000, dtype=torch.int64)
    sparse = torch.sparse_coo_tensor(indices, torch.ones(100_000), (2,), check_invariants=False)
    server.files["s.pt"] = saved([torch.ones(200_000), sparse, torch.ones(200_000)])
    url = f"{server.url}/s.pt"
    assert transload.check(url).ok

    def break_off(handler: Handler) -> bool:
        begin, end = map(int, handler.headers["Range"].removeprefix("bytes=").split("-"))
        inside = begin > 500_000 and end < len(server.files["s.pt"]) - 500_000
        if inside:
            handler.reply(503)
        return inside

    with fault(server, break_off), pytest.raises(CannotReadError, match="503"):
        transload.check(url)


def test_a_model_is_not_said_to_misfit_a_file_that_cannot_be_reached(
    server: FileServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "_TRIES", 1)
    url = f"{server.url}/a.pt"
    asked: list[str] = []

    def second(handler: Handler) -> bool:
        asked.append(handler.path)
        if len(asked) > 2:
            handler.reply(503)
        return len(asked) > 2

    with fault(server, second), pytest.raises(CannotReadError, match="503"):
        transload.check(url, model=torch.nn.Linear(2, 2))


def test_no_connection_stays_open_after_an_error_of_a_folder(
    server: FileServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "_TRIES", 1)
    clients: list[weakref.ref[http.Client]] = []
    real_client = http.Client

    def client() -> http.Client:
        made = real_client()
        clients.append(weakref.ref(made))
        return made

    monkeypatch.setattr(remote, "Client", client)
    server.files["x/model.safetensors"] = FILES["a.safetensors"]
    gc.collect()
    gc.disable()
    try:
        with fault(server, no_answer("pytorch_model.bin")):
            for _ in range(2):
                with pytest.raises(CannotReadError, match="503") as caught:
                    transload.load(f"{server.url}/x/")
                del caught
        assert clients
        assert [made() for made in clients] == [None] * len(clients)
    finally:
        gc.enable()


def test_what_one_answer_forbids_is_not_absent_if_another_is_404(server: FileServer) -> None:
    def forbid(handler: Handler) -> bool:
        if handler.path.endswith("/model.safetensors"):
            handler.reply(403)
        return handler.path.endswith("/model.safetensors")

    server.files["x/model.safetensors"] = FILES["a.safetensors"]
    server.files["x/pytorch_model.bin"] = saved({"old": torch.ones(2)})
    with fault(server, forbid), pytest.raises(ForbiddenFileError):
        transload.load(f"{server.url}/x/")


def test_stores_may_forbid_what_does_not_exist(server: FileServer) -> None:
    def forbid(handler: Handler) -> bool:
        if handler.path[1:] not in server.files:
            handler.reply(403)
        return handler.path[1:] not in server.files

    server.files["x/model.safetensors"] = FILES["a.safetensors"]
    with fault(server, forbid):
        assert same(transload.load(f"{server.url}/x/"), WEIGHTS)
        with pytest.raises(ForbiddenFileError):
            transload.load(f"{server.url}/y/")


def test_a_folder_that_cannot_be_listed_at_first_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Or what is beside the checkpoint would not be verified."""
    fsspec = pytest.importorskip("fsspec")
    files = fsspec.filesystem("memory")
    files.pipe({"/folder/model.safetensors": FILES["a.safetensors"], "/folder/other.pt": FILES["a.pt"][:-500]})
    real_ls, asked = files.ls, []

    def ls(path: str, **named: Any) -> Any:
        asked.append(path)
        if len(asked) == 2:
            raise OSError(5, "try again")
        return real_ls(path, **named)

    try:
        assert main(["verify", "memory://folder/"]) == 1
        monkeypatch.setattr(files, "ls", ls)
        asked.append("")
        assert main(["verify", "memory://folder/"]) == 2
        assert "try again" in capsys.readouterr().err
    finally:
        files.rm("/folder", recursive=True)


@pytest.mark.parametrize(
    "url",
    [
        *("http://example..org/a.pt", "http://.org/a.pt", f"http://{'a' * 64}.org/a.pt", "http://me:se/cret@host/a.pt"),
        *("http://m\ud800:secret@host/a.pt", "hf://me/net/\udc80.pt", "hf://me/n\udc80t", "hf://me/net@\ud800/a.pt"),
    ],
    ids=[
        *("two dots", "a dot", "a long name", "a slash in the password"),
        *("a user", "a file of the Hub", "a repository", "a revision"),
    ],
)
def test_a_url_that_is_none_is_an_error_of_the_user(url: str) -> None:
    with pytest.raises(UsageError, match="not a valid URL") as caught:
        transload.load(url)
    assert "cret" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("url", ["https:/me:secret@host/a.pt", "http//me:secret@host/a.pt"])
@pytest.mark.parametrize("reads", READERS[:3], ids=["inspect", "load", "open"])
def test_no_traceback_shows_the_password_of_a_mistyped_url(url: str, reads: Callable[[str], object]) -> None:
    with pytest.raises(MissingFileError) as caught:
        reads(url)
    assert "secret" not in "".join(traceback.format_exception(caught.value))


def test_bytes_of_a_name_that_are_no_text_are_escaped(server: FileServer) -> None:
    with pytest.raises(MissingFileError):
        transload.load(f"{server.url}/\udcff.pt")
    assert server.log[-1][0] == "/%FF.pt"


# -- faults


@pytest.mark.parametrize("seed", range(6))
def test_faults(server: FileServer, seed: int) -> None:
    """Whatever a server does, a load gives the right tensors or a clear error."""
    chance = random.Random(seed)  # noqa: S311 - not a secret
    injected: list[str] = []

    def misbehave(handler: Handler) -> bool:
        if chance.random() > (0.3 if seed < 4 else 0.7):
            return False
        kind = chance.choice(["cut", "cut", "hang up", "503", "429", "500", "whole", "other range", "garbage", "short"])
        injected.append(kind)
        if kind == "cut":
            handler.cut = chance.randrange(1, 100_000)
            return False
        if kind == "hang up":
            handler.hang_up()
        elif kind in ("503", "429", "500"):
            handler.reply(int(kind), b"busy", {"Retry-After": "0"})
        elif kind == "whole":
            handler.ranges, handler.cut = False, 200_000
            return False
        elif kind == "other range":
            data = FILES[handler.path.lstrip("/")]
            handler.reply(206, data[7:1007], {"Content-Range": f"bytes 7-1006/{len(data)}"})
        elif kind == "garbage":
            handler.wfile.write(chance.randbytes(50))
            handler.hang_up()
        else:  # fewer bytes than it says
            handler.headers_too = {"Content-Length": "900000"}
            handler.close_connection = True
            return False
        return True

    right, errors = 0, []
    with fault(server, misbehave):
        for name in [*FILES] * 8:
            try:
                loaded = transload.load(f"{server.url}/{name}")
            except TransloadError as error:  # noqa: PERF203 - each load may fail
                errors.append(str(error))
            else:
                assert same(loaded, WEIGHTS)
                right += 1
    assert len(injected) >= 5
    assert right >= (8 if seed < 4 else 0)
    assert all(server.url in error for error in errors)


def test_a_read_goes_on_where_it_stopped(server: FileServer) -> None:
    sent: list[int] = []

    def cut(handler: Handler) -> bool:
        sent.append(int(re.findall(r"\d+", handler.headers["Range"])[0]))
        handler.cut = 300_000
        return False

    with fault(server, cut):
        assert same(transload.load(f"{server.url}/a.safetensors"), WEIGHTS)
    assert len(sent) > 4
    assert server.sent < len(FILES["a.safetensors"]) + 150_000  # nothing twice
    assert sent == sorted(set(sent))


# -- redirects and credentials


def test_redirects(server: FileServer) -> None:
    """They are followed once; what they lead to gets no password, and is asked for again when it expires."""
    url = server.url.replace("http://", f"http://me:{SECRET}@")
    signed: list[str] = []
    with serve(dict(FILES)) as storage:

        def redirect(handler: Handler) -> bool:
            assert handler.headers["Authorization"].startswith("Basic ")
            signed.append(f"{len(signed)}")
            handler.reply(302, b"", {"Location": f"{storage.url}/a.pt?X-Signature={SECRET}{len(signed)}"})
            return True

        def expire(handler: Handler) -> bool:
            assert "Authorization" not in handler.headers
            if len(storage.log) > 2 and handler.path.endswith(f"{SECRET}1"):
                handler.reply(403)
                return True
            return False

        storage.fault = expire
        with fault(server, redirect):
            assert same(transload.load(f"{url}/model"), WEIGHTS)
            assert len(signed) >= 2
            storage.fault = answers(403)
            with pytest.raises(ForbiddenFileError) as caught:
                transload.load(f"{url}/model")
    assert SECRET not in str(caught.value)
    assert "http://127" in str(caught.value)


def test_urls_in_messages() -> None:
    cases = [
        ("https://me:pw@host/a.pt?X-Amz-Signature=1#x", "https://host/a.pt"),
        ("s3://bucket/a@b.pt", "s3://bucket/a@b.pt"),
        ("s3://key:secret@bucket/a@b.pt", "s3://bucket/a@b.pt"),
        ("s3a://key:sec/ret@bucket/a.pt", "s3a://…"),
        ("gs:/key@bucket/a.pt", "gs:/bucket/a.pt"),
        ("hf://owner:secret@repo/net/a.pt", "hf://repo/net/a.pt"),
        ("abfs://container@account.dfs.core.windows.net/a.pt", "abfs://container@account.dfs.core.windows.net/a.pt"),
        ("abfss://me:secret@account/a.pt", "abfss://account/a.pt"),
        ("hf://owner/repo@refs/pr/1/a.pt", "hf://owner/repo@refs/pr/1/a.pt"),
        ("simplecache::https://me:pw@host/a.pt?sig=1", "simplecache::https://host/a.pt"),
        ("zip://a.pt::https://me:pw@host/a.zip", "zip://a.pt::https://host/a.zip"),
        ("zip://a.pt?x::https://me:pw@host/a.zip?x", "zip://a.pt::https://host/a.zip"),
        ("https://me:p@w@host:80/@a/b.pt?x", "https://host:80/@a/b.pt"),
        ("https://me:pw@[::1]:80/a@b.pt?x", "https://[::1]:80/a@b.pt"),
        ("https://host?sig=a@b", "https://host"),
        ("https://host/a.pt › data.pkl", "https://host/a.pt › data.pkl"),
        ("https://host/a › b.pt?sig=1", "https://host/a › b.pt"),
        # mistyped
        (" https://me:pw@host/a.pt?x", " https://host/a.pt"),
        ("'https://me:pw@host/a.pt?x", "'https://host/a.pt"),
        ("https:/me:pw@host/a.pt?x", "https:/host/a.pt"),
        ("https://https://me:pw@host/a.pt?x", "https://https://host/a.pt"),
        ("http:/http//me:pw@host/a.pt", "http:/http//host/a.pt"),
        ("://me:pw@host/a.pt", "://host/a.pt"),
        ("//server@ssl/share/a.pt", "//server@ssl/share/a.pt"),
        ("https:me:pw@host/a.pt?x", "https:host/a.pt"),
        ("https//me:pw@host/a.pt?x", "https//host/a.pt"),
        ("s3:/me:pw@host/a.pt?x", "s3:/host/a.pt"),
        ("models/https://me:pw@host/a.pt?x", "models/https://host/a.pt"),
        ("https://me:p/w@host/a.pt", "https://…"),
        ("https://me:p?w@host/a.pt", "https://…"),
        # files
        ("C:\\a?b@c", "C:\\a?b@c"),
        ("C:/a?b@c", "C:/a?b@c"),
        ("runs/a?b.pt", "runs/a?b.pt"),
        ("/runs/12:30@host/a#b?.pt", "/runs/12:30@host/a#b?.pt"),
        ("me@host:/data/a#1.pt", "me@host:/data/a#1.pt"),
        ("/runs:/a#1/model.safetensors.index.json", "/runs:/a#1/model.safetensors.index.json"),
        ("--out=C:/me@corp/a#1.pt", "--out=C:/me@corp/a#1.pt"),
        ("src/http.py#3", "src/http.py#3"),
    ]
    assert [shown(url) for url, _ in cases] == [text for _, text in cases]
    assert not is_url("runs/http://x")
    assert not is_url(b"http://x")
    assert not is_url(Path("a"))


def test_messages_of_any_length_are_cleaned_at_once() -> None:
    """Names in files get into them."""
    begin = time.monotonic()
    for text in ("@ " + "." * 100_000, "@" + "http:" * 20_000, "?" + "a://" * 30_000, "::ab:/" * 20_000 + "@"):
        TransloadError(text, where=text)
    assert time.monotonic() - begin < 2


def test_commands(server: FileServer, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"{server.url.replace('//', f'//me:{SECRET}@')}/a.pt?sig={SECRET}"
    assert main(["inspect", url]) == 0
    assert main(["inspect", "--json", url]) == 0
    assert main(["check", url, "--device", "cpu"]) == 0
    assert main(["verify", url]) == 0
    server.files.clear()
    for command in ("inspect", "check", "verify"):
        assert main([command, "--json", url]) == 2
    assert main(["convert", url, "b.npz"]) == 2
    assert main(["retag", url, "--to", "cpu"]) == 2
    out, err = capsys.readouterr()
    assert SECRET not in out + err
    assert "Traceback" not in out + err
    assert "Download it, and retag that" in err


def test_what_needs_a_file_here(server: FileServer) -> None:
    url = f"{server.url}/a.pt"
    with pytest.raises(UsageError, match="mmap=True needs a file on this machine"):
        transload.load(url, mmap=True)
    with pytest.raises(UsageError, match="not to URLs"):
        transload.save({}, "s3://bucket/a.pt")
    with pytest.raises(UsageError, match="not to URLs"):
        transload.convert(url, "s3://bucket/a.npz")
    with pytest.raises(UsageError, match="cannot be changed"):
        transload.retag(url, "cpu")
    assert not server.log


def test_proxies(server: FileServer, monkeypatch: pytest.MonkeyPatch) -> None:
    proxied: list[str] = []

    def forward(handler: Handler) -> bool:
        proxied.append(handler.headers["Proxy-Authorization"])
        assert handler.path == "http://model.example/a.pt"
        handler.send_file(FILES["a.pt"])
        return True

    monkeypatch.setenv("http_proxy", server.url.replace("//", "//me:pw@"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with fault(server, forward):
        assert same(transload.load("http://model.example/a.pt"), WEIGHTS)
    assert set(proxied) == {"Basic bWU6cHc="}
    count = len(proxied)
    assert same(transload.load(f"{server.url}/a.pt"), WEIGHTS)
    assert len(proxied) == count


# -- the Hub


def test_a_token_that_no_header_can_have_is_not_printed(server: FileServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    for token in (f"{SECRET}\nmore", f"{SECRET}\u20ac"):
        monkeypatch.setenv("HF_TOKEN", token)
        with pytest.raises(UsageError, match="Check HF_TOKEN") as caught:
            transload.inspect("hf://owner/repo/a.pt")
        assert SECRET not in str(caught.value)


def test_the_hub_is_not_asked_offline(server: FileServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(CannotReadError, match="HF_HUB_OFFLINE"):
        transload.inspect("hf://owner/repo/a.pt")
    assert server.log == []


def test_a_hub_that_is_no_url(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "127.0.0.1:80")
    with pytest.raises(UsageError, match="HF_ENDPOINT is not a URL\nBegin it with https://"):
        transload.inspect("hf://owner/repo/a.pt")


def test_hub(server: FileServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A repository is read at one commit, with the token of the user, which the storage does not get."""
    commit = "c" * 40
    index = {"weight_map": dict.fromkeys(WEIGHTS, "model-00001-of-00001.safetensors")}
    files = {"model.safetensors.index.json": json.dumps(index).encode(), "sub/a.pt": FILES["a.pt"]}
    files["model-00001-of-00001.safetensors"] = FILES["a.safetensors"]
    monkeypatch.setenv("HF_ENDPOINT", server.url + "/")
    asked: list[str] = []
    with serve(dict(files)) as storage:

        def hub(handler: Handler) -> bool:
            asked.append(handler.path)
            tree = re.fullmatch(r"/api/models/me/net/tree/[^/?]+(?:/(.*?))?(\?page=2)?", handler.path)
            link = re.fullmatch(r"(?:/datasets)?/me/net/resolve/([^/]+)/(.*)", handler.path)
            if handler.headers.get("Authorization") != f"Bearer {SECRET}":
                handler.reply(401, b"", {"X-Error-Message": "Access to model me/net is restricted."})
            elif tree:
                prefix = f"{tree[1]}/" if tree[1] else ""
                entries = [
                    {"type": "file", "path": name, "size": len(data)}
                    for name, data in files.items()
                    if name.startswith(prefix) and "/" not in name[len(prefix) :]
                ]
                entries += [] if prefix else [{"type": "directory", "path": "sub"}]
                half = (len(entries) + 1) // 2
                page = entries[half:] if tree[2] else entries[:half]
                more = {} if tree[2] else {"Link": f'<{server.url}{handler.path}?page=2>; rel="next"'}
                status = 200 if entries else 404
                handler.reply(status, json.dumps(page).encode(), more)
            elif link and link[2] in files:
                headers = {"X-Repo-Commit": commit, "Location": f"{storage.url}/{link[2]}"}
                handler.reply(302, b"", headers)
            else:
                handler.reply(404, b"", {"X-Error-Message": "Entry not found"})
            return True

        def refuse_tokens(handler: Handler) -> bool:
            if "Authorization" in handler.headers:
                handler.reply(400)
            return "Authorization" in handler.headers

        storage.fault = refuse_tokens
        with fault(server, hub):
            with pytest.raises(ForbiddenFileError, match=r"(?s)me/net is restricted.*HF_TOKEN"):
                transload.inspect("hf://me/net/sub/a.pt")
            monkeypatch.setenv("HF_TOKEN", SECRET)
            assert transload.inspect("hf://me/net/sub/a.pt").path == "hf://me/net/sub/a.pt"
            assert same(transload.load("hf://datasets/me/net/sub/a.pt"), WEIGHTS)
            assert "/datasets/me/net/resolve/main/sub/a.pt" in asked
            assert transload.inspect("hf://me/net@refs/pr/1/sub/a.pt").ok
            assert "/me/net/resolve/refs%2Fpr%2F1/sub/a.pt" in asked
            asked.clear()
            assert same(transload.load("hf://me/net"), WEIGHTS)
            pages = ["/api/models/me/net/tree/main", "/api/models/me/net/tree/main?page=2"]
            assert [path for path in asked if path.startswith("/api/")] == pages
            assert f"/me/net/resolve/{commit}/model-00001-of-00001.safetensors" in asked
            assert same(transload.load("hf://me/net/model.safetensors.index.json"), WEIGHTS)
            assert transload.inspect("hf://me/net/sub").ok
            with pytest.raises(MissingFileError, match=r"(?s)Entry not found.*owner/model/file"):
                transload.load("hf://me/net/b.pt")
            monkeypatch.delenv("HF_TOKEN")
            (tmp_path / "hub").mkdir()
            (tmp_path / "hub" / "token").write_text(f"{SECRET}\n")
            assert hub_token() == SECRET
            assert transload.inspect("hf://me/net/sub/a.pt").ok
    with pytest.raises(UsageError, match="owner"):
        transload.load("hf://gpt2")


def test_a_repository_is_listed_once(server: FileServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    whole = {"model.safetensors": FILES["a.safetensors"]}
    files = {"": whole, "/sub": whole, "/other": {"model": FILES["a.pt"]}}
    for folder, inside in files.items():
        entries = [{"type": "file", "path": name, "size": len(data)} for name, data in inside.items()]
        server.files[f"api/models/me/net/tree/main{folder}"] = json.dumps(entries).encode()
        server.files |= {f"me/net/resolve/main{folder}/{name}": data for name, data in inside.items()}
    commands: dict[str, Callable[[str], object]] = {
        "inspect": transload.inspect,
        "open": lambda url: transload.open(url).close(),
        "load": transload.load,
        "transload inspect": lambda url: main(["inspect", url]),
        "transload convert": lambda url: main(["convert", url, str(tmp_path / "a.pt"), "--force"]),
    }
    cases = [(name, url) for name in commands for url in ("hf://me/net", "hf://me/net/sub", "hf://me/net/other/model")]

    def listed(case: tuple[str, str]) -> None:
        name, url = case
        server.log.clear()
        commands[name](url)
        paths = [path for path, _ in server.log if path.startswith("/api/")]
        assert len(paths) == len({*paths}) == 1, paths

    for_each(cases, listed)
    server.log.clear()
    assert main(["verify", "hf://me/net"]) == 0
    assert sum(path.startswith("/api/") for path, _ in server.log) == 2


# -- hostile archives


def moved(data: bytes, record: str) -> bytes:
    """An archive in which the local header of a record puts its bytes 64 bytes further on than all other numbers."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        (info,) = [info for info in archive.infolist() if info.filename.endswith(f"/{record}")]
    at = info.header_offset
    extra = int.from_bytes(data[at + 28 : at + 30], "little")
    return data[: at + 28] + (extra + 64).to_bytes(2, "little") + data[at + 30 :]


def renamed(data: bytes, record: str) -> bytes:
    """An archive in which the local header of a record has another name."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        (info,) = [info for info in archive.infolist() if info.filename.endswith(f"/{record}")]
    at = info.header_offset + 30 + len(info.filename)
    return data[: at - 1] + b"X" + data[at:]


def named_longer(data: bytes, record: str) -> bytes:
    """An archive in which a bit of the length of a name was flipped, in the record's own header."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        (info,) = [info for info in archive.infolist() if info.filename.endswith(f"/{record}")]
    at = info.header_offset + 26
    return data[:at] + bytes([data[at] ^ 16]) + data[at + 1 :]


def test_a_header_that_is_at_hand_is_compared(server: FileServer) -> None:
    """As it is in a file here."""
    server.files["a.pt"] = named_longer(saved({"w": torch.arange(100.0), "v": torch.ones(3)}), "data/0")
    for f in (server.files["a.pt"], f"{server.url}/a.pt"):
        assert codes(transload.inspect(f)) == ["zip-names-differ"]
        with pytest.raises(BrokenFileError, match="two names"):
            transload.load(f)
        with transload.open(f) as handle:
            assert torch.equal(handle["v"], torch.ones(3))
            with pytest.raises(BrokenFileError, match="does not say where its record begins"):
                handle["w"]


@pytest.mark.parametrize("spoil", [moved, renamed])
def test_headers_that_disagree(server: FileServer, spoil: Callable[[bytes, str], bytes]) -> None:
    """What is not read when the directory is, is compared with it before a tensor is returned."""
    server.files["a.pt"] = spoil(FILES["a.pt"], "data/6")
    url = f"{server.url}/a.pt"
    assert codes(transload.inspect(url)) == []
    problems = codes(transload.inspect(server.files["a.pt"]))
    assert problems
    assert codes(transload.inspect(url, verify=True))[: len(problems)] == problems
    with pytest.raises(BrokenFileError, match="data/6: the record's own header"):
        transload.load(url)
    with transload.open(url) as handle:
        assert torch.equal(handle["layers.1.weight"], WEIGHTS["layers.1.weight"])
        for _ in range(2):
            with pytest.raises(BrokenFileError, match="data/6: the record's own header"):
                handle["layers.6.weight"]
            with pytest.raises(BrokenFileError, match="data/6: the record's own header"):
                handle.slice("layers.6.weight")[30_000:30_010]
        last = max(handle.checkpoint.storages, key=lambda storage: storage.offset or 0)
    assert transload.verify(url).integrity == "damaged"
    # The end of a storage whose header is not among the bytes that are kept of the end of the file.
    server.files["a.pt"] = spoil(FILES["a.pt"], f"data/{last.id}")
    with transload.open(url) as handle:
        server.log.clear()
        with pytest.raises(BrokenFileError, match=f"data/{last.id}: the record's own header"):
            handle.slice(f"layers.{last.id}.weight")[40_000:40_008]
        assert len(server.log) == 1


def test_archives_of_other_programs(server: FileServer) -> None:
    """Offsets follow from the directory in whatever zipfile writes, too."""
    original = zipfile.ZipFile(io.BytesIO(FILES["a.pt"]))
    for number, method in enumerate((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)):
        again = io.BytesIO()
        with zipfile.ZipFile(again, "w", method) as archive:
            for info in original.infolist():
                archive.writestr(info.filename, original.read(info))
        server.files["b.pt"] = again.getvalue()
        server.log.clear()
        assert same(transload.load(f"{server.url}/b.pt"), WEIGHTS)
        assert number or len(server.log) <= 4
    between = io.BytesIO()  # with bytes between the records, which only their headers tell
    with zipfile.ZipFile(between, "w") as archive:
        for info in original.infolist():
            archive.writestr(info.filename, original.read(info))
            archive.fp.write(b"\0" * 70_000)  # type: ignore[union-attr]
            archive.start_dir = archive.fp.tell()  # type: ignore[union-attr]
    server.files["c.pt"] = between.getvalue()
    assert same(transload.load(between.getvalue()), WEIGHTS)
    assert same(transload.load(f"{server.url}/c.pt"), WEIGHTS)


# -- other stores


def test_fsspec(monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec = pytest.importorskip("fsspec")
    files = fsspec.filesystem("memory")
    real_info = files.info
    for name, data in FILES.items():
        files.pipe(f"/bucket/{name}", data)
    index = {"weight_map": dict.fromkeys(WEIGHTS, "a.safetensors")}
    files.pipe("/bucket/sub/m.index.json", json.dumps(index).encode())
    files.pipe("/bucket/sub/a.safetensors", FILES["a.safetensors"])
    try:
        for name in FILES:
            assert same(transload.load(f"memory://bucket/{name}"), WEIGHTS)
        checkpoint = transload.inspect("memory://bucket/sub")
        assert (checkpoint.path, checkpoint.ok) == ("memory://bucket/sub", True)
        assert same(transload.load("memory://bucket/sub/m.index.json"), WEIGHTS)
        with transload.open("memory://bucket/a.pt") as handle:
            files.pipe("/bucket/a.pt", FILES["a.pt"][:500_000])
            with pytest.raises(TransloadError, match="of 160,"):
                handle["layers.9.weight"]
        asked: list[str] = []

        def info(path: str, **_: Any) -> Any:
            asked.append(path)
            return real_info(path)

        monkeypatch.setattr(files, "info", info)
        with transload.open("memory://bucket/sub/m.index.json") as handle:
            asked.clear()
            assert torch.equal(handle["layers.5.weight"], WEIGHTS["layers.5.weight"])
            assert not asked, "for each tensor, an answer of a store would have to be waited for"
        with pytest.raises(MissingFileError, match=r"memory://bucket/b.pt: there is no such file"):
            transload.load("memory://bucket/b.pt")
    finally:
        files.rm("/bucket", recursive=True)
    with pytest.raises(CannotReadError, match=r"nothing here opens nope://\n.*s3://"):
        transload.load("nope://bucket/a.pt")
    if not any(map(_has, ("obstore", "s3fs"))):
        with pytest.raises(CannotReadError, match=r"(?s)s3:// needs a library.*pip install 'transload\[remote\]'"):
            transload.load("s3://bucket/a.pt")


def _has(module: str) -> bool:
    from importlib.util import find_spec

    return find_spec(module) is not None


def test_local_files_do_not_import_it(tmp_path: Path) -> None:
    (tmp_path / "a.pt").write_bytes(FILES["a.pt"])
    code = """
import sys, transload
transload.inspect("a.pt"), transload.load("a.pt")
print(sorted(name for name in sys.modules if name in ("transload.io.remote", "transload.io.http", "http.client")))
"""
    ran = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "transload" not in ran.stdout
