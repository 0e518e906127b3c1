"""Measure what a remote file costs: requests, bytes and time, at several latencies, against other ways to read it.

    python bench/remote.py [--json] [--repeat N] [--tensors N] [--latency MS…] [--rate MB]

A server on this machine, in a process of its own, answers each request after the latency, and counts requests and
bytes. Then it gives each connection ``--rate`` MB/s, and the file is four times as large. Contenders take turns; the
median time counts. Peers that are not installed are left out, with a note:
`huggingface_hub`, `fsspec[http]` with `torch.load`; `moto[server]` with `obstore`, `s3fs` and run:ai's streamer
(`runai-model-streamer`, `runai-model-streamer-s3`) for a bucket, whose server has no latency and is slow itself.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

ROOT = str(Path(__file__).resolve().parent.parent)
sys.path[0] = ROOT  # to import tests; and this folder has an `inspect`, like the standard library

MOVES = ("AWS_ACCESS_KEY_ID=me", "AWS_SECRET_ACCESS_KEY=me", "AWS_DEFAULT_REGION=us-east-1", "AWS_REGION=us-east-1")
REPOSITORY = "me/net"
Row = dict[str, Any]


def main() -> int:
    """Write the files, measure, print."""
    if sys.argv[1:2] == ["--serve"]:
        return serve_files(Path(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4]))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--repeat", type=int, default=3, help="turns for each contender (default 3)")
    parser.add_argument("--tensors", type=int, default=100, help="of 2 MiB each (default 100)")
    parser.add_argument("--latency", type=int, nargs="+", default=[0, 20, 100], help="milliseconds (default 0 20 100)")
    parser.add_argument("--rate", type=float, default=20, help="MB/s of a connection in the last part (default 20)")
    options = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_files(folder, options.tensors)
        for latency in options.latency:
            with server(folder, latency / 1000) as url:
                rows += over_http(url, latency, options.repeat)
        write_files(folder, 4 * options.tensors)
        with server(folder, 0.02, options.rate * 1e6) as url:
            rows += with_slow_connections(url, options.repeat)
        write_files(folder, options.tensors // 4)  # its server copies the file for each request
        rows += over_s3(folder, options.repeat)
    if options.json:
        print(json.dumps({"machine": platform.processor() or platform.machine(), "rows": rows}, indent=1))
        return 0
    for row in rows:
        seconds = f"{row['seconds']:8.3f} s" if row["seconds"] is not None else f"  {row['note']}"
        count = f"{row['requests']:5} requests {row['bytes'] / 2**20:9.2f} MiB" if row["requests"] is not None else ""
        print(f"{row['where']:12} {row['what']:24} {row['who']:34} {seconds} {count}")
    return 0


def write_files(folder: Path, count: int) -> None:
    """A state dict as a ``.pt`` and as a safetensors file."""
    import torch

    import transload

    state = {f"model.layers.{index}.weight": torch.randn(512, 1024) for index in range(count)}
    torch.save(state, folder / "a.pt")
    transload.convert(folder / "a.pt", folder / "model.safetensors", overwrite=True)


# -- HTTP


def serve_files(folder: Path, latency: float, rate: float) -> int:
    """The server: files by name and as the Hub has them, and what was asked for since the last question."""
    from tests.file_server import Handler, serve

    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    files |= {f"{REPOSITORY}/resolve/main/{name}": data for name, data in files.items()}
    with serve(files) as running:

        def count(handler: Handler) -> bool:
            if handler.path != "/count":
                return False
            time.sleep(0.05)  # until what is under way has been counted
            answer = {"requests": len(running.log) - 1, "bytes": running.sent}
            running.log.clear()
            running.sent = 0
            handler.reply(200, json.dumps(answer).encode())
            running.sent = 0
            return True

        running.latency, running.rate, running.fault = latency, rate, count
        print(running.url, flush=True)
        sys.stdin.read()
    return 0


@contextmanager
def server(folder: Path, latency: float, rate: float = 0.0) -> Iterator[str]:
    """The address of a server in a process of its own."""
    command = [sys.executable, __file__, "--serve", str(folder), str(latency), str(rate)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.stdin.close()


def over_http(url: str, latency: int, repeat: int) -> list[Row]:
    """What inspect, one tensor and a load cost."""
    import torch

    import transload

    pt, tensors, name = f"{url}/a.pt", f"{url}/model.safetensors", "model.layers.7.weight"

    def one(path: str) -> object:
        with transload.open(path, device="cpu") as handle:
            return handle[name]

    def metadata() -> object:
        from huggingface_hub import HfApi

        return HfApi(endpoint=url).parse_safetensors_file_metadata(REPOSITORY, "model.safetensors")

    def through_fsspec(**options: Any) -> object:
        import fsspec

        with fsspec.open(pt, "rb", **options) as file:
            return torch.load(file, weights_only=True, map_location="cpu")

    http = "aiohttp" if find_spec("fsspec") else "fsspec"
    jobs: list[tuple[str, str, str, Callable[[], object]]] = [
        ("inspect .pt", "transload", "", lambda: transload.inspect(pt)),
        ("inspect .safetensors", "transload", "", lambda: transload.inspect(tensors)),
        ("inspect .safetensors", "huggingface_hub", "huggingface_hub", metadata),
        ("one tensor of .pt", "transload", "", lambda: one(pt)),
        ("one tensor of .safetensors", "transload", "", lambda: one(tensors)),
        ("load .pt", "transload", "", lambda: transload.load(pt, "cpu")),
        ("load .safetensors", "transload", "", lambda: transload.load(tensors, "cpu")),
        ("load .pt", "fsspec + torch.load", http, through_fsspec),
        ("load .pt", "fsspec + torch.load, no cache", http, lambda: through_fsspec(cache_type="none")),
    ]

    def counted() -> tuple[int, int]:
        with urlopen(f"{url}/count") as answer:  # noqa: S310 - the server above
            count = json.load(answer)
        return count["requests"], count["bytes"]

    return measured(f"HTTP {latency} ms", jobs, repeat, counted)


def with_slow_connections(url: str, repeat: int) -> list[Row]:
    """Loading where each connection gets only so much: with more of them while that is faster, and with 16."""
    import transload
    from transload.opening import engine

    def load(most: int) -> object:
        engine._MOST_FAR, before = most, engine._MOST_FAR  # noqa: SLF001 - what is compared
        try:
            return transload.load(f"{url}/a.pt", "cpu")
        finally:
            engine._MOST_FAR = before  # noqa: SLF001 - the same

    jobs: list[tuple[str, str, str, Callable[[], object]]] = [
        ("load .pt", f"transload, {most} connections at most", "", partial(load, most)) for most in (64, 16)
    ]
    return measured("slow HTTP", jobs, repeat, None)


def measured(
    where: str,
    jobs: list[tuple[str, str, str, Callable[[], object]]],
    repeat: int,
    counted: Callable[[], tuple[int, int]] | None,
) -> list[Row]:
    """The median time of each job; jobs take turns. The first turn, which imports, does not count."""
    times: dict[int, list[float]] = {}
    counts: dict[int, tuple[int | None, int | None]] = {}
    notes: dict[int, str] = {}
    for turn in range(repeat + 1):
        for at, (_, _, needs, job) in enumerate(jobs):
            if needs and find_spec(needs) is None:
                notes[at] = f"{needs} is not installed"
                continue
            if counted is not None:
                counted()
            start = time.perf_counter()
            try:
                job()
            except Exception as error:  # noqa: BLE001 - a peer that fails is reported
                notes[at] = f"failed: {type(error).__name__}: {error}"[:100]
                continue
            if turn:
                times.setdefault(at, []).append(time.perf_counter() - start)
            counts[at] = counted() if counted is not None else (None, None)
    rows = []
    for at, (what, who, _, _) in enumerate(jobs):
        seconds = statistics.median(times[at]) if at in times else None
        requests, nbytes = counts.get(at, (None, None))
        row = {"where": where, "what": what, "who": who, "seconds": seconds, "requests": requests, "bytes": nbytes}
        rows.append({**row, "note": notes.get(at, "")})
    return rows


# -- a bucket


def over_s3(folder: Path, repeat: int) -> list[Row]:
    """Loading from an S3 server on this machine."""
    import transload

    if find_spec("moto") is None or find_spec("flask") is None or find_spec("obstore") is None:
        nothing = dict.fromkeys(("requests", "bytes", "seconds"))
        return [{**nothing, "where": "S3", "what": "", "who": "", "note": "moto[server] or obstore is not installed"}]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    endpoint, url = f"http://127.0.0.1:{port}", "s3://bucket/model.safetensors"
    os.environ |= dict(pair.split("=") for pair in MOVES)
    os.environ |= {"AWS_ENDPOINT_URL": endpoint, "RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": "0"}
    os.environ["AWS_EC2_METADATA_DISABLED"] = "true"
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            for _ in range(300):
                with suppress(OSError):
                    urlopen(endpoint, timeout=60).close()
                    break
                time.sleep(0.1)
            headers = {"Content-Type": "application/octet-stream"}
            for path, data in (("", None), ("/model.safetensors", (folder / "model.safetensors").read_bytes())):
                address = f"{endpoint}/bucket{path}"
                urlopen(Request(address, data, headers, method="PUT"), timeout=600).close()  # noqa: S310 - the same

            def streamed() -> object:
                from runai_model_streamer import SafetensorsStreamer

                with SafetensorsStreamer() as streamer:
                    streamer.stream_file(url)
                    return {name: tensor.clone() for name, tensor in streamer.get_tensors()}

            def through_s3fs() -> object:
                import fsspec
                from safetensors.torch import load

                with fsspec.open(url, "rb") as file:
                    return dict(load(file.read()))

            jobs: list[tuple[str, str, str, Callable[[], object]]] = [
                ("inspect .safetensors", "transload", "", lambda: transload.inspect(url)),
                ("load .safetensors", "transload", "", lambda: transload.load(url, "cpu")),
                ("load .safetensors", "run:ai streamer", "runai_model_streamer", streamed),
                ("load .safetensors", "s3fs + safetensors", "s3fs", through_s3fs),
            ]
            return measured("S3", jobs, repeat, None)
        finally:
            process.terminate()


if __name__ == "__main__":
    sys.exit(main())
