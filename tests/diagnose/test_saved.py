"""A machine written as JSON and read back, and what may be wrong with such a file."""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.diagnose.machines import bare, healthy, in_container, in_slurm, in_wsl, refused
from tests.each import each

from transload.diagnose.saved import machine_from, machine_in, machine_of
from transload.errors import UsageError
from transload.machine import Experiment, Extension, Machine, Unknown


def saved(machine: Machine) -> str:
    return json.dumps({"schema": 1, "machine": machine.to_dict()})


FULL = Machine(
    problems={"x": "y"},
    extensions=(Extension("flash-attn", architectures=("sm_90",)),),
    driver=healthy().driver.__class__(experiments=(Experiment(("LD_LIBRARY_PATH",), healthy().driver.cuda),)),
)


@each(
    "machine",
    [
        Machine(),
        FULL,
        healthy(),
        bare(),
        in_container(healthy()),
        in_slurm(healthy()),
        in_wsl(healthy()),
        refused(healthy(), 999),
    ],
)
def test_what_is_written_is_read_back(machine: Machine) -> None:
    assert machine_in(saved(machine), "x") == machine


def test_another_version_may_know_more_or_less() -> None:
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


def test_what_was_not_found_out_stays_so() -> None:
    read = machine_from({"kernel": {"loaded": {"unknown": "/proc does not exist"}}})
    assert read.kernel.loaded == Unknown("/proc does not exist")


def test_a_value_too_deep_to_quote() -> None:
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(UsageError, match="recursion"):
        machine_of({"schema": 1, "machine": {"platform": {"system": deep}}}, "report.json")


@each(
    ("text", "words"),
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
def test_a_file_that_is_none_is_refused_with_the_place(text: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        machine_in(text, "report.json")
    assert caught.value.where == "report.json"
    assert words in caught.value.what


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def places(kind: Any, path: tuple[str, ...] = ()) -> Any:
    """The path of every field there is, classes inside tuples left out."""
    hints = get_type_hints(kind)
    for field in fields(kind):
        yield (*path, field.name)
        if is_dataclass(hints[field.name]):
            yield from places(hints[field.name], (*path, field.name))


@given(st.sampled_from(list(places(Machine))), JUNK)
def test_junk_anywhere_is_refused_or_read_but_never_a_crash(path: tuple[str, ...], junk: Any) -> None:
    data = healthy().to_dict()
    inside = data
    for step in path[:-1]:
        inside = inside[step]
    inside[path[-1]] = junk
    text = json.dumps({"schema": 1, "machine": data})
    told = ""
    try:
        machine_in(text, "x")
    except UsageError as error:
        told = error.what
    assert told == "" or f"machine.{'.'.join(path)}" in told or told.endswith("is not JSON")


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
def test_a_number_that_no_machine_has_is_refused(path: str, value: float) -> None:
    data = healthy().to_dict()
    place: Any = data
    *steps, last = path.split(".")
    for step in steps:
        place = place[int(step) if step.isdigit() else step]
    place[last] = value
    with pytest.raises(ValueError, match=f"machine.*{last} cannot be "):
        machine_from(data)


def test_what_is_longer_than_any_report_is_cut() -> None:
    data = healthy().to_dict()
    data["kernel"]["log"] = ["NVRM: x"] * 100_000
    data["driver"]["nvml"]["gpus"][0]["name"] = "A" * 5_000_000
    data["variables"]["values"] = {f"NAME{index}": "x" for index in range(100_000)}
    read = machine_from(data)
    assert read.kernel.log == ("NVRM: x",) * 20_000
    assert read.driver.nvml.gpus[0].name == "A" * 16_384
    assert len(read.variables.values) == 20_000
