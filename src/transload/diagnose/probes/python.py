"""The interpreter to examine: what it is, where it takes packages from, and what manages it.

Our own is looked at in place; another is asked in a child process.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from transload.diagnose.host import Host
from transload.diagnose.probes import interview
from transload.diagnose.probes.distributions import distributions, version
from transload.diagnose.probes.environment import environment
from transload.diagnose.probes.interpreters import in_folder, on_path, others, usual
from transload.machine import Python

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["choose", "python"]

_DEADLINE = 5.0  # seconds; an interpreter on a cold network disk takes two

_RELEVANT = (
    *("torch", "pytorch", "nvidia-", "cuda-", "triton", "tensorflow", "tensorrt", "jax", "cupy", "onnxruntime"),
    *("flash-attn", "flashinfer", "xformers", "bitsandbytes", "vllm", "sglang", "sgl-kernel", "apex", "deepspeed"),
    *("transformer-engine", "mamba-ssm", "causal-conv1d", "sageattention", "auto-gptq", "gptqmodel", "autoawq"),
    *("exllama", "detectron2", "mmcv", "faiss", "natten", "spconv", "intel-extension-for-pytorch", "numpy", "rocm"),
)  # how the names begin


def choose(host: Host) -> tuple[Host, str]:
    """The host with the interpreter to examine where the user named none, and why it is that one.

    Ours where it has a torch; else the first of the usual ones that has. For transload may live in an environment of
    its own, as pipx and uvx make them; then ours is not examined even where no torch is found at all.
    """
    path = interview.own()["path"]
    if any(host.exists(f"{entry}/torch/{name}") for entry in path for name in ("__init__.py", "version.py")):
        return host, ""
    found = [each for each in usual(host) if each.prefix != sys.prefix]
    best = next((each for each in found if each.torch(host)), None)
    if best:
        return replace(host, python=best.executable), f"transload's own environment has no torch; {best.how} has one"
    if found and environment(host, sys.prefix, sys.base_prefix).private:
        why = f"transload has an environment of its own, and no torch was found; this is the one of {found[0].how}"
        return replace(host, python=found[0].executable), why
    return host, "no environment with a torch was found; this is transload's own"


def python(host: Host, why: str = "", deadline: float = _DEADLINE) -> Python:
    """The interpreter that ``host.python`` names: by its path, that of an environment's folder, or its name on PATH."""
    executable = _executable(host)
    ours = _is_own(host, executable)
    told = interview.own() if ours else _absent(host, executable) or interview.asked(host, executable, deadline)
    if isinstance(told, str):
        return Python(executable or host.python, why=why, problem=told)
    return _described(host, _made(host, executable, told), host.named(told["stdlib"]), why)


def _executable(host: Host) -> str:
    """The path that the user means; empty for a folder that holds no interpreter."""
    name = host.python
    if name.startswith("~/"):
        name = host.environ.get("HOME", "~") + name[1:]
    if name and not os.path.isabs(name):
        here = os.path.normpath(f"{host.cwd}/{name}")
        name = here if os.sep in name or host.exists(here) else on_path(host, name) or name
    if not os.path.isabs(name) or not host.folder(name):
        return name
    usual_place = f"{name.rstrip('/')}/bin/python"
    return in_folder(host, name) or (usual_place if host.link(usual_place) else "")


def _absent(host: Host, executable: str) -> str:
    """Why there is nothing to ask; empty where there is something."""
    if not executable:
        return f"{host.python} holds no Python: there is no bin/python in it" if host.python else "no Python was named"
    if not os.path.isabs(executable):
        return f"{executable} is neither in the current folder nor on PATH"
    target = host.target(executable)
    if host.exists(executable):
        return ""
    return f"{executable if target == executable else f'{executable} leads to {target}, which'} is not there"


def _is_own(host: Host, executable: str) -> bool:
    """Whether it is the interpreter we run in, and we were started as a program of the user's would be."""
    flags = sys.flags
    plain = not (flags.ignore_environment or flags.no_site) and all(
        bool(getattr(flags, flag, 0)) == bool(os.environ.get(name))
        for flag, name in (("no_user_site", "PYTHONNOUSERSITE"), ("safe_path", "PYTHONSAFEPATH"))
    )
    return plain and host.root == "/" and _concerning(host.environ) == _concerning(os.environ) and _ours(executable)


def _ours(executable: str) -> bool:
    """Whether it is our own by another name: ``bin/python3`` for ``bin/python``. A link from elsewhere is another."""
    ours = sys.executable or ""
    pairs = ((executable, ours), (os.path.dirname(executable), os.path.dirname(ours)))
    return executable == ours or all(os.path.realpath(one) == os.path.realpath(other) for one, other in pairs)


def _concerning(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that decide what an interpreter is."""
    return {name: value for name, value in environ.items() if name == "HOME" or name.startswith("PYTHON")}


def _made(host: Host, executable: str, told: interview.Told) -> Python:
    return Python(
        executable=host.named(told["executable"]) or executable,
        version=told["version"],
        implementation=told["implementation"],
        bits=told["bits"],
        free_threaded=told["free_threaded"],
        prefix=host.named(told["prefix"]),
        base_prefix=host.named(told["base_prefix"]),
        path=tuple(host.named(os.path.join(host.cwd, entry)) for entry in told["path"]),
        user_site=host.named(told["user_site"]),
        user_site_enabled=told["user_site_enabled"],
    )


def _described(host: Host, bare: Python, stdlib: str, why: str) -> Python:
    """The interpreter with what its files say."""
    kind, tool = environment(host, bare.prefix, bare.base_prefix)
    managed = bare.prefix == bare.base_prefix and host.exists(f"{stdlib}/EXTERNALLY-MANAGED")
    return replace(
        bare,
        environment=kind,
        tool=tool,
        project=host.exists(f"{os.path.dirname(bare.prefix)}/{tool}.lock"),
        pip=any(host.exists(f"{entry}/pip/__main__.py") for entry in bare.path),
        externally_managed=managed,
        why=why,
        others=others(host, bare.prefix, bare.path),
        packages=_packages(host, bare.path),
    )


def _packages(host: Host, path: tuple[str, ...]) -> dict[str, str]:
    """What matters to torch and CUDA; of two the first on the path counts, as it does for an import."""
    found: dict[str, str] = {}
    for entry in path:
        for each in distributions(entry, host.names(entry) or ()):
            if each.name.startswith(_RELEVANT) and each.name not in found:
                found[each.name] = each.version or version(host, each)
    return dict(sorted(found.items()))
