"""Machines saved as JSON and read back, and invalid files."""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.diagnose.machines import cuinit_fails, healthy, in_container, in_slurm, in_wsl, without_gpu
from tests.each import each

from transload.diagnose.saved import machine_from, machine_in, machine_of
from transload.errors import UsageError
from transload.machine import Experiment, ExtensionPackage, Machine, Unknown


def saved(machine: Machine) -> str:
    return json.dumps({"schema": 1, "machine": machine.to_dict()})


FULL = Machine(
    problems={"x": "y"},
    extensions=(ExtensionPackage("flash-attn", architectures=("sm_90",)),),
    driver=healthy().driver.__class__(experiments=(Experiment(("LD_LIBRARY_PATH",), healthy().driver.cuda),)),
)


@each(
    "machine",
    [
        Machine(),
        FULL,
        healthy(),
        without_gpu(),
        in_container(healthy()),
        in_slurm(healthy()),
        in_wsl(healthy()),
        cuinit_fails(healthy(), 999),
    ],
)
def test_saved_machine_is_read_back(machine: Machine) -> None:
    assert machine_in(saved(machine), "x") == machine


def test_unknown_fields_are_ignored_and_missing_fields_get_defaults() -> None:
    data = healthy().to_dict()
    data["weather"] = {"sun": True}
    data["kernel"]["mood"] = "good"
    data["driver"]["nvml"]["gpus"][0]["taste"] = 1
    del data["torch_run"]
    del data["kernel"]["daemons"]
    read = machine_from(data)
    assert read.torch_run == Machine().torch_run
    assert read.kernel.daemons == ()
    assert read.driver == healthy().driver


def test_unknown_value_is_read_back_with_its_reason() -> None:
    read = machine_from({"kernel": {"loaded": {"unknown": "/proc does not exist"}}})
    assert read.kernel.loaded == Unknown("/proc does not exist")


def test_too_deeply_nested_value_is_an_error() -> None:
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(UsageError, match="recursion"):
        machine_of({"schema": 1, "machine": {"platform": {"system": deep}}}, "report.json")


@each(
    ("text", "message"),
    [
        ("", "it is not JSON"),
        ("{", "it is not JSON"),
        ("[" * 100_000, "it is not JSON"),
        ("9" * 5000, "it is no"),
        ("[]", "it is not a report of transload doctor"),
        ("3", "it is not a report of transload doctor"),
        ('{"schema": 1}', "it is not a report of transload doctor"),
        ('{"schema": 1, "machine": []}', "it is not a report of transload doctor"),
        ('{"schema": 2, "machine": {}}', "its schema is 2"),
        ('{"machine": {}}', "its schema is None"),
        ('{"schema": 1, "machine": {"kernel": 3}}', "machine.kernel cannot be 3"),
        ('{"schema": 1, "machine": {"kernel": {"version": null}}}', "machine.kernel.version cannot be null"),
        ('{"schema": 1, "machine": {"platform": {"root": 1}}}', "machine.platform.root cannot be 1"),
        ('{"schema": 1, "machine": {"extensions": {}}}', "machine.extensions cannot be {}"),
        ('{"schema": 1, "machine": {"extensions": [{}]}}', "machine.extensions[0] cannot be {}"),
        ('{"schema": 1, "machine": {"problems": {"a": 1}}}', "machine.problems.a cannot be 1"),
        ('{"schema": 1, "machine": {"torch_run": {"answer": {"state": "fine"}}}}', 'state cannot be "fine"'),
    ],
)
def test_invalid_report_is_an_error_that_names_the_field(text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        machine_in(text, "report.json")
    assert caught.value.where == "report.json"
    assert message in caught.value.what


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def field_paths(kind: Any, path: tuple[str, ...] = ()) -> Any:
    """The path of every field, except those of classes inside tuples."""
    hints = get_type_hints(kind)
    for field in fields(kind):
        yield (*path, field.name)
        if is_dataclass(hints[field.name]):
            yield from field_paths(hints[field.name], (*path, field.name))


@given(st.sampled_from(list(field_paths(Machine))), JUNK)
def test_junk_in_any_field_is_read_or_a_usage_error(path: tuple[str, ...], junk: Any) -> None:
    data = healthy().to_dict()
    parent = data
    for step in path[:-1]:
        parent = parent[step]
    parent[path[-1]] = junk
    text = json.dumps({"schema": 1, "machine": data})
    message = ""
    try:
        machine_in(text, "x")
    except UsageError as error:
        message = error.what
    assert message == "" or f"machine.{'.'.join(path)}" in message or message.endswith("is not JSON")


@each(
    ("path", "value"),
    [
        ("driver.nvml.gpus.0.memory", 10**400),
        ("driver.nvml.count", -(2**63)),
        ("driver.cuda.answer.seconds", 10**400),
        ("driver.cuda.answer.seconds", float("inf")),
        ("platform.address_space", 2**63),
        ("driver.cuda.count", 10**11),
    ],
)
def test_number_out_of_range_is_an_error(path: str, value: float) -> None:
    data = healthy().to_dict()
    parent: Any = data
    *steps, last = path.split(".")
    for step in steps:
        parent = parent[int(step) if step.isdigit() else step]
    parent[last] = value
    with pytest.raises(ValueError, match=f"machine.*{last} cannot be "):
        machine_from(data)


def test_excessively_long_values_are_cut() -> None:
    data = healthy().to_dict()
    data["kernel"]["log"] = ["NVRM: x"] * 100_000
    data["driver"]["nvml"]["gpus"][0]["name"] = "A" * 5_000_000
    data["variables"]["values"] = {f"NAME{index}": "x" for index in range(100_000)}
    read = machine_from(data)
    assert read.kernel.log == ("NVRM: x",) * 20_000
    assert read.driver.nvml.gpus[0].name == "A" * 16_384
    assert len(read.variables.values) == 20_000
