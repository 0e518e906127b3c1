from __future__ import annotations

from pathlib import Path

from tests.diagnose.cases import cases
from tests.diagnose.trees import FOLDER, Link, Tree, tree_host

from transload.diagnose.probes.system import toolkit
from transload.machine import Toolkit

CUDA: Tree = {
    "/usr/local/cuda": Link("cuda-12"),
    "/usr/local/cuda-12": Link("/usr/local/cuda-12.4"),
    "/usr/local/cuda-12.4/bin/nvcc": b"\x7fELF",
}
JSON = '{\n  "cuda" : {\n    "name" : "CUDA SDK",\n    "version" : "12.4.1"\n  },\n  "cudart": {"version": "12.4.127"}}'
HEADER = "/* long */\n#define CUDA_VERSION 13000\n"


def test_none_is_no_fault(tmp_path: Path) -> None:
    assert toolkit(tree_host(tmp_path, {}, {"PATH": "/usr/bin"})) == Toolkit()


def test_the_usual_place_without_any_variable(tmp_path: Path) -> None:
    told = toolkit(tree_host(tmp_path, {**CUDA, "/usr/local/cuda-12.4/version.json": JSON}))
    assert told == Toolkit(
        "/usr/local/cuda/bin/nvcc",
        "12.4.1",
        folders=("/usr/local/cuda", "/usr/local/cuda-12", "/usr/local/cuda-12.4"),
    )


def test_the_path_goes_before_the_home(tmp_path: Path) -> None:
    tree = {**CUDA, "/opt/cuda/bin/nvcc": b"", "/opt/cuda/version.txt": "CUDA Version 10.2.89\n"}
    environ = {"PATH": ":relative:/opt/cuda/bin/:/usr/bin", "CUDA_HOME": "/usr/local/cuda"}
    told = toolkit(tree_host(tmp_path, tree, environ))
    assert (told.nvcc, told.version, told.home) == ("/opt/cuda/bin/nvcc", "10.2.89", "/usr/local/cuda")


@cases(
    ("nvcc", "tree", "version"),
    [
        ("/usr/bin/nvcc", {"/usr/bin/nvcc": b"\x7fELF", "/usr/include/cuda.h": HEADER}, "13.0"),
        (
            "/usr/bin/nvcc",
            {
                "/usr/bin/nvcc": '#!/bin/sh\nexec /usr/lib/nvidia-cuda-toolkit/bin/nvcc "$@"\n',
                "/usr/include/cuda.h": "#define CUDA_VERSION 12020\n",
            },
            "12.2",
        ),
        ("/c/bin/nvcc", {"/c/bin/nvcc": b"", "/c/targets/x86_64-linux/include/cuda.h": HEADER}, "13.0"),
        ("/u/cuda-11.8/bin/nvcc", {"/u/cuda-11.8/bin/nvcc": b"", "/u/cuda-11.8/version.json": b"\xff{"}, "11.8"),
        ("/c/bin/nvcc", {"/c/bin/nvcc": FOLDER, "/usr/include/cuda.h": HEADER}, ""),
        ("/c/bin/nvcc", {"/c/bin/nvcc": Link("nvcc")}, ""),
    ],
)
def test_the_version_by_the_files_around_it(tmp_path: Path, nvcc: str, tree: Tree, version: str) -> None:
    told = toolkit(tree_host(tmp_path, tree, {"PATH": nvcc.removesuffix("/nvcc")}))
    assert (told.nvcc, told.version) == (nvcc, version)


@cases("target", ["sbsa", "aarch64"])
def test_toolkits_for_arm_servers_and_for_jetson(tmp_path: Path, target: str) -> None:
    tree: Tree = {"/c/bin/nvcc": b"", f"/c/targets/{target}-linux/include/cuda.h": HEADER}
    host = tree_host(tmp_path, tree, {"PATH": "/c/bin"}, uname=("Linux", "6.8", "aarch64"))
    assert toolkit(host).version == "13.0"


def test_a_home_that_is_not_there_is_shown(tmp_path: Path) -> None:
    told = toolkit(tree_host(tmp_path, {}, {"CUDA_PATH": "/gone"}))
    assert told == Toolkit(home="/gone")
