# pyright: strict
"""A program with every public function, as a project that checks its types would call it; it is not run.

`make test` checks it with mypy, and tests/test_dist.py with pyright.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from typing_extensions import assert_type

import transload
from transload import Checkpoint, Conversion, Diagnosis, Finding, TransloadError


def examine_machine() -> str:
    diagnosis = transload.doctor()
    assert_type(diagnosis, Diagnosis)
    assert_type(diagnosis.ok, bool)
    assert_type(diagnosis.to_dict(), dict[str, Any])
    if diagnosis.cause is None:
        return diagnosis.status
    assert_type(diagnosis.cause, Finding)
    return f"{diagnosis.cause.code}: {diagnosis.cause.title}"


def explain_text(text: str) -> list[str]:
    explanation = transload.explain(text)
    assert_type(explanation, transload.Explanation)
    assert_type(explanation.known, bool)
    return [str(answer) for answer in explanation.answers]


def examine_file(path: str) -> dict[str, tuple[int, ...]]:
    checkpoint = transload.inspect(path)
    assert_type(checkpoint, Checkpoint)
    assert_type(checkpoint.tensors, tuple[transload.Tensor, ...])
    assert_type(checkpoint.to_html(), str)
    for finding in checkpoint.findings:
        assert_type(finding.fix, tuple[str, ...])
    return {tensor.name: tensor.shape for tensor in checkpoint.tensors}


def compare_files(a: str, b: str) -> bool:
    verification = transload.verify(a, hashes=True)
    assert_type(verification, transload.Verification)
    assert_type(verification.sha256, str)
    difference = transload.diff(a, b)
    assert_type(difference, transload.Diff)
    return difference.same


def change_file(path: str) -> Conversion:
    retag = transload.retag(path, "cpu")
    assert_type(retag.changed, bool)
    rescue = transload.rescue(path, "rescued.pt")
    assert_type(rescue, transload.Rescue)
    return transload.convert(path, "weights.safetensors", key="model", dtype="bfloat16", progress=True)


def load_file(path: str) -> Any:
    check = transload.check(path, "cuda:0")
    assert_type(check, transload.Check)
    assert_type(check.plan, transload.Plan)
    compatibility = transload.is_cuda_compatible(path)
    assert_type(compatibility, transload.Compatibility)
    prefetch = transload.prefetch(path)
    assert_type(prefetch, transload.Prefetch)
    prefetch.cancel()
    try:
        return transload.load(path, map_location=["cuda:0", "cpu"])
    except TransloadError as error:
        assert_type(error.where, str)
        raise SystemExit(str(error)) from error


def load_parts(path: str, model: Any) -> list[str]:
    with transload.open(path) as handle:
        names = list(handle)
        assert_type(handle[names[0]], Tensor)
        assert_type(handle.slice(names[0])[:2], Tensor)
    with transload.patch():
        loaded = transload.load_into(model, path)
    transload.save(model.state_dict(), path)
    transload.save_async(model.state_dict(), path)
    return names + loaded.missing_keys
