"""Comparison of many machines: which differences are reported, which are not, and how."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tests.diagnose.fleet import ODDITIES, document, node, other_driver, server, variable
from tests.diagnose.machines import cuinit_fails, with_facts, without_gpu
from tests.diagnose.rules.rule_helpers import with_gpu
from tests.each import each

from transload.cli.main import main
from transload.diagnose.compare import FACTS, Comparison, compare, folded, report
from transload.diagnose.report import judge_machine
from transload.diagnose.saved import reports_in
from transload.machine import Machine, Unknown
from transload.render.lines import as_text

if TYPE_CHECKING:
    import pytest


def fleet(*differing: Machine, alike: int = 4) -> dict[str, Machine]:
    """Identical machines and then differing ones, named gpu1, gpu2 …"""
    return {f"gpu{number}": machine for number, machine in enumerate([*[server()] * alike, *differing], 1)}


def compare_machines(machines: dict[str, Machine]) -> Comparison:
    return compare({name: judge_machine(machine) for name, machine in machines.items()})


def reported(comparison: Comparison) -> dict[str, tuple[str, ...]]:
    return {
        difference.fact: tuple(name for group in difference.rare for name in group.nodes)
        for difference in comparison.differences
        if not difference.follows
    }


def first_line(comparison: Comparison) -> str:
    return " ".join(as_text(report(comparison)).partition("\n\n")[0].split())


def test_identical_machines_have_no_differences() -> None:
    comparison = compare_machines(fleet())
    assert comparison.ok
    assert not comparison.differences
    assert not comparison.faults
    assert first_line(comparison) == "All 4 nodes are alike and healthy: 8 × NVIDIA H200"
    assert comparison.alike["NCCL"] == "2.27.5"


@each("fact", ODDITIES)
def test_only_the_fact_that_differs_is_reported(fact: str) -> None:
    assert reported(compare_machines(fleet(node(fact)))) == {fact: ("gpu5",)}


def test_several_machines_differ_in_several_facts() -> None:
    comparison = compare_machines(fleet(node("NCCL", "driver"), node("NCCL"), alike=9))
    assert reported(comparison) == {"NCCL": ("gpu10", "gpu11"), "driver": ("gpu10",)}
    assert first_line(comparison) == (
        "gpu[10-11] differ from the other 9 in NCCL and driver; no failure was found that this explains"
    )
    consequences = {difference.fact: difference.follows for difference in comparison.differences if difference.follows}
    assert consequences == {"kernel module": "driver", "libcuda": "driver"}


def test_consequence_on_one_machine_is_still_reported_for_another() -> None:
    assert reported(compare_machines(fleet(node("driver"), node("kernel module")))) == {
        "driver": ("gpu5",),
        "kernel module": ("gpu6",),
    }


def test_difference_explains_a_fault() -> None:
    broken = cuinit_fails(other_driver(server()), 803)
    comparison = compare_machines(fleet(broken, node("NCCL")))
    (fault,) = comparison.faults
    assert (fault.nodes, fault.because) == (("gpu5",), ("driver",))
    assert "; the difference in driver explains what is wrong on gpu5: " in first_line(comparison)
    assert comparison.without_cuda == ("gpu5",)


def test_fault_has_the_worst_severity_of_its_machines() -> None:
    lost = with_gpu(server(), code=15)
    (fault,) = compare_machines(fleet(lost, cuinit_fails(lost, 100))).faults
    assert (fault.code, fault.severity, fault.nodes) == ("H02", "error", ("gpu5", "gpu6"))


def test_difference_shared_with_a_healthy_machine_explains_nothing() -> None:
    comparison = compare_machines(fleet(cuinit_fails(other_driver(server()), 803), other_driver(server())))
    assert [fault.because for fault in comparison.faults] == [()]
    assert "; no difference explains what is wrong on gpu5: " in first_line(comparison)


def test_same_fault_on_all_machines() -> None:
    comparison = compare_machines({f"gpu{number}": cuinit_fails(server(), 803) for number in range(3)})
    assert first_line(comparison).startswith("All 3 nodes are alike, and have a problem: ")
    assert not comparison.ok


def test_two_machines_have_no_majority() -> None:
    comparison = compare_machines(fleet(node("NCCL"), alike=1))
    (difference,) = comparison.differences
    assert (difference.usual, [group.nodes for group in difference.rare]) == (None, [("gpu1",), ("gpu2",)])
    assert first_line(comparison).startswith("The 2 nodes differ in NCCL; ")


def test_unknown_facts_are_not_differences() -> None:
    unknown = with_facts(
        server(),
        torch_run__nccl="",
        driver__nvml__driver="",
        kernel__loaded=Unknown("not readable"),
        kernel__version="",
        kernel__flavour="",
        driver__nvml__gpus=tuple(replace(gpu, nvlinks=-1, ecc="") for gpu in server().driver.nvml.gpus),
    )
    assert reported(compare_machines(fleet(unknown))) == {}


def test_machine_without_a_gpu_differs_only_in_gpu_model() -> None:
    machine = with_facts(without_gpu(), python=server().python, variables=server().variables, taken=server().taken)
    same_torch = with_facts(machine, torch=server().torch, torch_run__version="2.13.0+cu130", torch_run__cuda="13.0")
    assert reported(compare_machines(fleet(same_torch))) == {"GPU model": ("gpu5",)}


def test_gpu_facts_are_not_compared_if_the_gpu_count_differs() -> None:
    four_gpus = with_facts(
        server(4), driver__nvml__gpus=tuple(replace(gpu, nvlinks=4) for gpu in server(4).driver.nvml.gpus)
    )
    assert reported(compare_machines(fleet(four_gpus, four_gpus))) == {"GPUs": ("gpu5", "gpu6")}


def test_variable_with_a_different_value_on_every_machine_is_a_note() -> None:
    machines = [variable("NCCL_TOPO_FILE", f"/scratch/{number}.xml", server()) for number in range(5)]
    comparison = compare_machines(fleet(*machines, alike=0))
    assert [(difference.fact, difference.level) for difference in comparison.differences] == [
        ("NCCL_TOPO_FILE", "note")
    ]
    assert comparison.ok


def test_visible_devices_may_differ_but_not_their_number() -> None:
    with_devices = partial(variable, "CUDA_VISIBLE_DEVICES")
    machines = [with_devices(str(number), server()) for number in range(4)]
    assert reported(compare_machines(fleet(*machines, alike=0))) == {}
    assert reported(compare_machines(fleet(*machines, with_devices("0,1", server()), alike=0))) == {
        "CUDA_VISIBLE_DEVICES": ("gpu5",)
    }


def test_clocks_are_not_compared_between_reports_of_different_days() -> None:
    machines = [with_facts(server(), taken=f"2026-11-{day:02}T12:00:00Z") for day in range(1, 6)]
    assert reported(compare_machines(fleet(*machines, alike=0))) == {}


def test_layers_named_by_facts_exist() -> None:
    from transload.diagnose.case import LAYERS

    assert {layer for fact in FACTS for layer in fact.layers.split()} <= LAYERS.keys()


@each(
    ("names", "text"),
    [
        (("gpu09", "gpu10", "gpu11"), "gpu[09-11]"),
        (("gpu9", "gpu10"), "gpu[9-10]"),
        (("rack1-n3", "rack1-n5", "rack2-n3"), "rack1-n[3,5], rack2-n3"),
        (("n1.site4.org", "n2.site4.org"), "n[1-2].site4.org"),
        (("a", "b\x1b[31m"), r"a, b\x1b[31m"),
        (("x" + "9" * 30,), "x" + "9" * 30),
        ((), ""),
    ],
)
def test_node_names_are_folded(names: tuple[str, ...], text: str) -> None:
    assert folded(names) == text


# -- reports in a stream

RANK_0, RANK_1 = ("rank 0", 1), ("rank 1", None)


@each(
    ("text", "expected"),
    [
        ('{"schema": 1}{"schema": 2}\n\n{"a": 3}', [("", 1), ("", 2), ("", None)]),
        ('[{"schema": 1}, {"schema": 2}]', [("", 1), ("", 2)]),
        ('Welcome!\n{"schema": 1}\nbye', [("", 1)]),
        ('0: {\n1: {"schema": 2}\n0: "schema": 1}', [("rank 0", 1), ("rank 1", 2)]),
        ('[pod/doctor-x/main] {"schema": 1}\n', [("pod/doctor-x/main", 1)]),
        ('0: {"sche\n1: {"schema": 2}\n0: ma": 1}', [("rank 0", 1), ("rank 1", 2)]),  # srun cuts long lines
        ('[1,3]<stdout>: {"schema": 1}\n', [("rank 3", 1)]),
        ('[1,0]<stdout>:{"sche[1,1]<stdout>:{[1,0]<stdout>:ma": 1}\n[1,1]<stderr>:}[1,1]<stdout>:}', [RANK_0, RANK_1]),
        ('gpu1: {"schema": 1}\ngpu2: sh: transload: not found\n', [("gpu1", 1), ("gpu2", ValueError)]),
        ('{"schema": 1, "mach\n{"schema": 2}', [("", ValueError), ("", 2)]),
        ("", [("", ValueError)]),
        ("[" * 100_000, [("", ValueError)]),
    ],
)
def test_reports_in_a_stream_are_separated_and_named(text: str, expected: list[tuple[str, object]]) -> None:
    reports = [(name, read.get("schema") if isinstance(read, dict) else type(read)) for name, read in reports_in(text)]
    assert reports == expected


# -- command line


def write(path: Path, machine: Machine) -> None:
    path.write_text(json.dumps(document(machine)), encoding="utf-8")


def run_compare(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = main(["doctor", "--compare", *arguments])
    return code, capsys.readouterr().out


def test_exit_codes_for_files_and_folders(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("n1", "n2", "n3"):
        write(tmp_path / f"{name}.json", server())
    assert run_compare(capsys, ".")[0] == 0
    assert run_compare(capsys, "n*.json")[0] == 0  # a pattern that the shell has not expanded
    write(tmp_path / "n4.json", node("Python"))
    code, text = run_compare(capsys, str(tmp_path))
    assert (code, text.partition(" in ")[0]) == (1, "n4 differs from the other 3")
    (tmp_path / "n5.json").touch()
    (tmp_path / "n6.json").write_text('{"schema": 1', encoding="utf-8")
    code, text = run_compare(capsys, ".", "gone.json", "--json")
    result = json.loads(text)
    assert (code, result["nodes"], result["silent"]) == (2, ["n1", "n2", "n3", "n4"], ["n5"])
    assert list(result["unreadable"]) == ["n6", "gone"]
    assert [difference["fact"] for difference in result["differences"]] == ["Python", "Python release"]
    empty = tmp_path / "empty"
    empty.mkdir()
    assert run_compare(capsys, str(empty))[0] == 2


def test_machines_are_named_after_folders_if_file_names_are_equal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, machine in enumerate([server(), server(), node("ECC")]):
        (tmp_path / str(number)).mkdir()
        write(tmp_path / str(number) / "stdout.log", machine)
    code, text = run_compare(capsys, str(tmp_path / "*" / "stdout.log"))
    assert (code, text.partition(" ")[0]) == (1, "2")


def test_require_cuda_fails_if_cuda_is_not_usable(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("n1", "n2"):
        write(tmp_path / f"{name}.json", without_gpu())
    assert main(["doctor", "--compare", str(tmp_path)]) == 0
    assert main(["doctor", "--compare", str(tmp_path), "--require", "cuda"]) == 1
    assert "CUDA is required but not usable on n[1-2]" in capsys.readouterr().err


def test_unreadable_file_does_not_replace_the_report_of_the_same_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    labelled = (f"gpu{number}: {json.dumps(document(server()))}" for number in (1, 2))
    (tmp_path / "all.txt").write_text("\n".join(labelled), encoding="utf-8")
    assert main(["doctor", "--json", "--compare", str(tmp_path / "all.txt"), str(tmp_path / "gpu2.json")]) == 2
    result = json.loads(capsys.readouterr().out)
    assert (result["nodes"], list(result["unreadable"])) == (["gpu1", "gpu2"], ["gpu2 (2)"])
