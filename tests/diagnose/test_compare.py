"""Many machines compared: what is found, what is not invented, and how it is told."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tests.diagnose.fleet import ODDITIES, document, node, other_driver, server, variable
from tests.diagnose.machines import bare, changed, refused
from tests.diagnose.rules.machine_rows import with_gpu
from tests.each import each

from transload.cli.main import main
from transload.diagnose.compare import FACTS, Comparison, compare, folded, report
from transload.diagnose.report import judge_machine
from transload.diagnose.saved import reports_in
from transload.machine import Machine, Unknown
from transload.render.lines import as_text

if TYPE_CHECKING:
    import pytest


def fleet(*odd: Machine, alike: int = 4) -> dict[str, Machine]:
    """Alike machines and then odd ones: gpu1, gpu2 …"""
    return {f"gpu{number}": machine for number, machine in enumerate([*[server()] * alike, *odd], 1)}


def compared(machines: dict[str, Machine]) -> Comparison:
    return compare({name: judge_machine(machine) for name, machine in machines.items()})


def shown(comparison: Comparison) -> dict[str, tuple[str, ...]]:
    return {
        each.fact: tuple(name for group in each.odd for name in group.nodes)
        for each in comparison.differences
        if not each.follows
    }


def first_line(comparison: Comparison) -> str:
    return " ".join(as_text(report(comparison)).partition("\n\n")[0].split())


def test_alike() -> None:
    found = compared(fleet())
    assert found.ok
    assert not found.differences
    assert not found.faults
    assert first_line(found) == "All 4 nodes are alike and healthy: 8 × NVIDIA H200"
    assert found.alike["NCCL"] == "2.27.5"


@each("fact", ODDITIES)
def test_an_oddity_is_found_and_nothing_is_invented(fact: str) -> None:
    assert shown(compared(fleet(node(fact)))) == {fact: ("gpu5",)}


def test_several_in_several_things() -> None:
    found = compared(fleet(node("NCCL", "driver"), node("NCCL"), alike=9))
    assert shown(found) == {"NCCL": ("gpu10", "gpu11"), "driver": ("gpu10",)}
    assert first_line(found) == (
        "gpu[10-11] differ from the other 9 in NCCL and driver; no failure was found that this explains"
    )
    hidden = {each.fact: each.follows for each in found.differences if each.follows}
    assert hidden == {"kernel module": "driver", "libcuda": "driver"}


def test_a_fact_that_follows_on_one_machine_is_shown_for_another() -> None:
    assert shown(compared(fleet(node("driver"), node("kernel module")))) == {
        "driver": ("gpu5",),
        "kernel module": ("gpu6",),
    }


def test_a_difference_explains_a_failure() -> None:
    broken = refused(other_driver(server()), 803)
    found = compared(fleet(broken, node("NCCL")))
    (fault,) = found.faults
    assert (fault.nodes, fault.because) == (("gpu5",), ("driver",))
    assert "; the difference in driver explains what is wrong on gpu5: " in first_line(found)
    assert found.without_cuda == ("gpu5",)


def test_a_fault_is_as_bad_as_on_the_machine_where_it_is_worst() -> None:
    lost = with_gpu(server(), code=15)
    (fault,) = compared(fleet(lost, refused(lost, 100))).faults
    assert (fault.code, fault.severity, fault.nodes) == ("H02", "error", ("gpu5", "gpu6"))


def test_a_difference_that_healthy_machines_share_explains_nothing() -> None:
    found = compared(fleet(refused(other_driver(server()), 803), other_driver(server())))
    assert [fault.because for fault in found.faults] == [()]
    assert "; no difference explains what is wrong on gpu5: " in first_line(found)


def test_all_have_the_same_problem() -> None:
    found = compared({f"gpu{number}": refused(server(), 803) for number in range(3)})
    assert first_line(found).startswith("All 3 nodes are alike, and have a problem: ")
    assert not found.ok


def test_two_machines_have_no_majority() -> None:
    found = compared(fleet(node("NCCL"), alike=1))
    (difference,) = found.differences
    assert (difference.usual, [group.nodes for group in difference.odd]) == (None, [("gpu1",), ("gpu2",)])
    assert first_line(found).startswith("The 2 nodes differ in NCCL; ")


def test_what_is_unknown_does_not_differ() -> None:
    unknown = changed(
        server(),
        torch_run__nccl="",
        driver__nvml__driver="",
        kernel__loaded=Unknown("not readable"),
        kernel__version="",
        kernel__flavour="",
        driver__nvml__gpus=tuple(replace(gpu, nvlinks=-1, ecc="") for gpu in server().driver.nvml.gpus),
    )
    assert shown(compared(fleet(unknown))) == {}


def test_a_machine_without_a_gpu_is_odd_in_that_alone() -> None:
    machine = changed(bare(), python=server().python, variables=server().variables, taken=server().taken)
    same = changed(machine, torch=server().torch, torch_run__version="2.13.0+cu130", torch_run__cuda="13.0")
    assert shown(compared(fleet(same))) == {"GPU model": ("gpu5",)}


def test_facts_of_cards_are_compared_between_the_same_cards() -> None:
    few = changed(server(4), driver__nvml__gpus=tuple(replace(gpu, nvlinks=4) for gpu in server(4).driver.nvml.gpus))
    assert shown(compared(fleet(few, few))) == {"GPUs": ("gpu5", "gpu6")}


def test_a_variable_that_each_machine_has_for_itself_is_only_noted() -> None:
    machines = [variable("NCCL_TOPO_FILE", f"/scratch/{number}.xml", server()) for number in range(5)]
    found = compared(fleet(*machines, alike=0))
    assert [(each.fact, each.level) for each in found.differences] == [("NCCL_TOPO_FILE", "note")]
    assert found.ok


def test_which_cards_a_rank_has_may_differ_but_not_how_many() -> None:
    given = partial(variable, "CUDA_VISIBLE_DEVICES")
    machines = [given(str(number), server()) for number in range(4)]
    assert shown(compared(fleet(*machines, alike=0))) == {}
    assert shown(compared(fleet(*machines, given("0,1", server()), alike=0))) == {"CUDA_VISIBLE_DEVICES": ("gpu5",)}


def test_reports_of_different_days_say_nothing_of_clocks() -> None:
    machines = [changed(server(), taken=f"2026-11-{day:02}T12:00:00Z") for day in range(1, 6)]
    assert shown(compared(fleet(*machines, alike=0))) == {}


def test_every_layer_that_a_fact_names_exists() -> None:
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
def test_names_are_folded(names: tuple[str, ...], text: str) -> None:
    assert folded(names) == text


# -- streams

RANK_0, RANK_1 = ("rank 0", 1), ("rank 1", None)


@each(
    ("text", "found"),
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
def test_reports_in_a_stream(text: str, found: list[tuple[str, object]]) -> None:
    told = [(name, each.get("schema") if isinstance(each, dict) else type(each)) for name, each in reports_in(text)]
    assert told == found


# -- the command


def write(path: Path, machine: Machine) -> None:
    path.write_text(json.dumps(document(machine)), encoding="utf-8")


def asked(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = main(["doctor", "--compare", *arguments])
    return code, capsys.readouterr().out


def test_files_and_their_exit_codes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("n1", "n2", "n3"):
        write(tmp_path / f"{name}.json", server())
    assert asked(capsys, ".")[0] == 0
    assert asked(capsys, "n*.json")[0] == 0  # as from a shell that leaves it alone
    write(tmp_path / "n4.json", node("Python"))
    code, text = asked(capsys, str(tmp_path))
    assert (code, text.partition(" in ")[0]) == (1, "n4 differs from the other 3")
    (tmp_path / "n5.json").touch()
    (tmp_path / "n6.json").write_text('{"schema": 1', encoding="utf-8")
    code, text = asked(capsys, ".", "gone.json", "--json")
    told = json.loads(text)
    assert (code, told["nodes"], told["silent"]) == (2, ["n1", "n2", "n3", "n4"], ["n5"])
    assert list(told["unreadable"]) == ["n6", "gone"]
    assert [each["fact"] for each in told["differences"]] == ["Python", "Python release"]
    empty = tmp_path / "empty"
    empty.mkdir()
    assert asked(capsys, str(empty))[0] == 2


def test_folders_name_the_machines_where_files_do_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, machine in enumerate([server(), server(), node("ECC")]):
        (tmp_path / str(number)).mkdir()
        write(tmp_path / str(number) / "stdout.log", machine)
    code, text = asked(capsys, str(tmp_path / "*" / "stdout.log"))
    assert (code, text.partition(" ")[0]) == (1, "2")


def test_cuda_can_be_required(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("n1", "n2"):
        write(tmp_path / f"{name}.json", bare())
    assert main(["doctor", "--compare", str(tmp_path)]) == 0
    assert main(["doctor", "--compare", str(tmp_path), "--require", "cuda"]) == 1
    assert "CUDA is required but not usable on n[1-2]" in capsys.readouterr().err


def test_a_file_that_cannot_be_read_does_not_replace_a_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    labelled = (f"gpu{number}: {json.dumps(document(server()))}" for number in (1, 2))
    (tmp_path / "all.txt").write_text("\n".join(labelled), encoding="utf-8")
    assert main(["doctor", "--json", "--compare", str(tmp_path / "all.txt"), str(tmp_path / "gpu2.json")]) == 2
    told = json.loads(capsys.readouterr().out)
    assert (told["nodes"], list(told["unreadable"])) == (["gpu1", "gpu2"], ["gpu2 (2)"])
