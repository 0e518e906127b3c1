"""What kind of environment an interpreter lives in, and which tool installs packages there: by files alone."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from transload.diagnose.probes.interpreters import config

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transload.diagnose.host import Host

__all__ = ["Environment", "environment"]

_LOCKS = (("uv.lock", "uv"), ("poetry.lock", "poetry"), ("pdm.lock", "pdm"))
_TABLE = re.compile(r"(?m)^\[tool\.(poetry|pdm)\b")
_ONE_TOOL = re.compile(r"/uv/(?:tools|archive-v\d+)/")  # of `uv tool install` and `uvx`


class Environment(NamedTuple):
    """``kind``: ``venv``, ``conda``, ``pixi``, ``pipx``, ``uv-tool``, ``pyenv``, ``nix``, ``system``; and its tool."""

    kind: str
    tool: str

    @property
    def private(self) -> bool:
        """Whether it was made for one program alone, which in ours is transload."""
        return self.kind in ("pipx", "uv-tool")


def environment(host: Host, prefix: str, base_prefix: str) -> Environment:
    """The environment of an interpreter with these prefixes, for a user who stands in ``host.cwd``."""
    if host.folder(f"{prefix}/conda-meta"):
        return Environment("pixi", "pixi") if "/.pixi/envs/" in f"{prefix}/" else Environment("conda", "conda")
    settings = config(host, prefix)
    if settings or prefix != base_prefix:
        return Environment(_kind(host, prefix), next(_tools(host, prefix, settings)))
    if prefix.startswith("/nix/store/"):
        return Environment("nix", "pip")
    root = host.environ.get("PYENV_ROOT") or "/.pyenv"
    if f"{root.rstrip('/')}/versions/" in f"{prefix}/":
        return Environment("pyenv", "pip")
    return Environment("system", "uv" if "/uv/python/" in prefix else "pip")


def _kind(host: Host, prefix: str) -> str:
    if host.exists(f"{prefix}/pipx_metadata.json"):
        return "pipx"
    return "uv-tool" if _ONE_TOOL.search(f"{prefix}/") or host.exists(f"{prefix}/uv-receipt.toml") else "venv"


def _tools(host: Host, prefix: str, settings: dict[str, str]) -> Iterator[str]:
    """What may manage a virtual environment, the surest sign first: the project around it, its maker, its place."""
    project, _, name = prefix.rpartition("/")
    if name in (".venv", "venv"):
        yield from _project(host, project)
    if "uv" in settings:
        yield "uv"
    if "/pypoetry/virtualenvs/" in prefix:
        yield "poetry"
    yield from (tool for tool in _project(host, host.cwd) if tool != "uv")  # uv keeps to the project's own .venv
    yield "pip"


def _project(host: Host, folder: str) -> Iterator[str]:
    yield from (tool for lock, tool in _LOCKS if host.exists(f"{folder}/{lock}"))
    yield from _TABLE.findall(host.text(f"{folder}/pyproject.toml") or "")
