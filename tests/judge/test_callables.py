"""No safe_globals line is printed for names that run code, open files or reach other names; model classes get one."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from tests import forge, forks
from tests.each import each
from tests.release import RELEASE

import transload
from transload.checkpoint import GlobalUse
from transload.judge.names import can_be_allowed, classify
from transload.judge.safety import safe_globals_lines

ROOT = Path(__file__).parent.parent.parent

DANGEROUS = [
    ("six", "exec_"),
    *(("torch.fx.graph_module", "_exec_with_source"), ("torch.fx.graph_module", "reduce_graph_module")),
    *(("_frozen_importlib", "__import__"), ("_frozen_importlib_external", "FileLoader")),
    *(("torch.ops", "load_library"), ("torch.classes", "load_library"), ("torch._ops", "_Ops.load_library")),
    *(("torch.testing._internal.common_utils", "shell"), ("unittest.mock", "_importer"), ("unittest.mock", "patch")),
    *(("torch.distributed.distributed_c10d", "_tensor_to_object"), ("torch.distributed", "recv_object_list")),
    *(
        ("numpy._core", "_ufunc_reconstruct"),
        ("typing", "ForwardRef"),
        ("torch.nested._internal.ops", "ForwardRef"),
        ("pathlib", "Path.write_text"),
    ),
    *(("torch.utils.benchmark", "Timer"), ("zipfile", "ZipFile"), ("tarfile", "open"), ("logging.config", "listen")),
    *(("dataclasses", "make_dataclass"), ("collections", "namedtuple"), ("site", "main")),
    *(("yaml", "unsafe_load"), ("yaml", "load"), ("sympy", "sympify"), ("sympy.parsing.sympy_parser", "parse_expr")),
    *(("math", "__loader__"), ("math", "__loader__.load_module"), ("math.__loader__", "load_module")),
    *(("mymodel", "__loader__"), ("mymodel.nets", "__builtins__"), ("torch.nn.functional", "__getattribute__")),
    *(("math", "__spec__"), ("collections.abc", "sys"), ("torch.nn.functional.torch", "load")),
    *(("pandas", "eval"), ("PIL.Image", "open"), ("jsonpickle", "decode"), ("mymodel", "yaml.unsafe_load")),
]
NOT_ALLOWABLE = [
    *(("torch", "vmap"), ("torch.some.thing", "evaluate"), ("torch", "Tensor.backward"), ("operator", "itemgetter")),
    *(("torch.nn.modules.module", "Module.apply"), ("torch.nn.functional", "torch"), ("torch.nn.functional", "math")),
    *(("torch.nn.functional", "handle_torch_function"), ("torch.nn.functional", "boolean_dispatch")),
    *(("numpy", "vectorize"), ("numpy", "frompyfunc"), ("itertools", "starmap"), ("inspect", "getsource")),
    *(("transformers.models.bert.modeling_bert", "load_tf_weights_in_bert"), ("torchvision.models", "get_model")),
    *(("torch.fx.graph_module", "reduce_package_graph_module"), ("torch.jit._script", "unpackage_script_module")),
    *(
        ("torch.nn.functional.math", "cos"),
        ("torch.optim.sgd.torch", "Tensor"),
        ("torch.nn.functional", "_verify_spatial_size"),
    ),
    *(("torchvision.transforms.functional", "Image.open"), ("torch.distributed.fsdp.api.dist", "TCPStore")),
    *(("argparse._os", "PathLike"), ("argparse._os", "path"), ("torch.distributions.dirichlet", "_Dirichlet_backward")),
    *(("transformers.models.bert.modeling_bert.os", "getcwd"), ("math", "Foo.bar"), ("enum.sys", "Foo")),
    *(("backports.tarfile", "bltn_open"), ("somepkg.compat", "my_exec"), ("somepkg", "safe_eval")),
    *(("somepkg", "_os_system"), ("somepkg", "Tools.open"), ("six", "get_unbound_function")),
    *(("timm", "create_model"), ("transformers.dynamic_module_utils", "get_class_from_dynamic_module")),
]
ALLOWABLE = [
    *(("torch.nn.modules.linear", "Linear"), ("torch.optim.adamw", "AdamW"), ("torch.optim.lr_scheduler", "StepLR")),
    *(
        ("torch.nn.functional", "relu"),
        ("torch.nn.init", "xavier_uniform_"),
        ("torch._C._nn", "gelu"),
        ("torch", "relu"),
    ),
    *(("torch.ao.nn.quantized.dynamic.modules.linear", "Linear"), ("torch.distributions.normal", "Normal")),
    *(("functools", "partial"), ("typing", "Any"), ("math", "cos"), ("builtins", "len"), ("builtins", "ValueError")),
    *(("zoneinfo", "ZoneInfo"), ("numpy", "float64"), ("numpy.random._pickle", "__randomstate_ctor")),
    *(("numpy.random", "__RandomState_ctor"), ("torch.nn.utils.parametrizations", "_SpectralNorm")),
    *(("mypackage.__main__", "Net"), ("torch.nn.quantized.dynamic.modules.linear", "Linear")),
    *(
        ("omegaconf.dictconfig", "DictConfig"),
        ("torchvision.models.resnet", "ResNet"),
        ("timm.layers.activations", "gelu"),
    ),
    *(
        ("ultralytics.nn.modules.head", "v10Detect"),
        ("mymodel", "Net"),
        ("mymodel", "schedule"),
        ("__main__", "Net.Block"),
    ),
    *(("transformers.models.xlstm.modeling_xlstm", "xLSTMBlock"), ("transformers.models.x.configuration_x", "xConfig")),
    *(("transformers.models.llama.modeling_llama", "rotate_half"), ("torch._C._fft", "fft_fftn")),
    *(("code.models", "Net"), ("profile.config", "Config"), ("types.nets", "Net"), ("test.models", "Net")),
]


@each(("module", "name"), DANGEROUS)
def test_name_that_runs_code_or_opens_files_is_dangerous(module: str, name: str) -> None:
    assert classify(module, name)[0] == "dangerous"


@each(("module", "name"), [*DANGEROUS, *NOT_ALLOWABLE])
def test_no_safe_globals_line_for_names_that_cannot_be_allowed(module: str, name: str) -> None:
    assert not can_be_allowed(module, name)
    body = forge.text(module) + forge.text(name) + b"\x93"  # STACK_GLOBAL
    data = forge.checkpoint(forge.pickled(forge.dictionary({"w": body}), 4))
    fix_lines = [line for finding in transload.inspect(data).findings for line in finding.fix]
    assert not any("safe_globals" in line for line in fix_lines)
    with pytest.raises(transload.TransloadError) as caught:
        transload.load(data)
    assert "safe_globals" not in str(caught.value)


@each(("module", "name"), NOT_ALLOWABLE)
def test_name_that_cannot_be_allowed_is_unknown_and_the_fix_says_so(module: str, name: str) -> None:
    assert classify(module, name)[0] == "unknown"
    data = forge.checkpoint(forge.pickled(forge.name(module, name)))
    (fix,) = (finding.fix for finding in transload.inspect(data).findings if finding.code == "needs-trust")
    assert fix[0].startswith(f"There is no line to allow {module}.{name}")


@each(("module", "name"), ALLOWABLE)
def test_safe_globals_lines_exist_for_names_that_models_use(module: str, name: str) -> None:
    assert classify(module, name)[0] in ("unknown", "harmless")
    assert safe_globals_lines([GlobalUse(module, name, "unknown", "")])


def test_lines_say_which_function_of_an_unknown_package_they_trust() -> None:
    uses = [GlobalUse("nets", name, "unknown", "") for name in ("Block", "make_block")]
    assert [line for line in safe_globals_lines(uses) if line.startswith("#")] == [
        "# This trusts code that transload does not know, with any arguments: nets.make_block"
    ]
    assert not any(line.startswith("#") for line in safe_globals_lines(uses[:1]))


# Checks the modules that `import torch` imports, and some with many functions.
CHECK_SCRIPT = """
import json, runpy, sys, warnings
warnings.simplefilter("ignore")
import torch, torch.utils.data, torch.distributed, torch.fx, numpy
import argparse, logging.config, random, shutil, sqlite3, tarfile, unittest.mock, uuid, xml.etree.ElementTree, zipfile
from transload.judge import names
from transload.judge.names import can_be_allowed
script = runpy.run_path(sys.argv[1])
found = list(script["callables"]({*sys.stdlib_module_names, "torch", "numpy"}, can_be_allowed))
single = {*names._TABLES["parts"], *names.TORCH_DEFAULT, *names._HARMLESS}
prefixes = {*names._CLASSES, *names._COMPUTES, *single}
escapes = {".".join(each[:2]) for each in script["escapes"](sorted(prefixes), can_be_allowed)}
json.dump([len(found), [each[:3] for each in found if each.why], sorted(escapes - single)], sys.stdout)
"""


@pytest.mark.skipif(RELEASE != (2, 13), reason="the table is for torch 2.13")
def test_no_allowable_callable_runs_code_or_opens_files() -> None:
    """``scripts/callables.py --check`` does the same for every module."""
    env = {**os.environ, "PYTHONPATH": str(forks.SOURCE)}
    process = forks.run("-c", CHECK_SCRIPT, ROOT / "scripts" / "callables.py", env=env)
    assert process.returncode == 0, process.stderr
    allowed, wrong, escapes = json.loads(process.stdout)
    assert allowed > 500
    assert wrong == []
    assert [name for name in escapes if not name.startswith("torch._utils._rebuild_")] == []
