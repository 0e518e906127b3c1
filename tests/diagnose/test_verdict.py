"""Which findings are causes, in which order, and what is muted because of them."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tests import forks
from tests.diagnose.machines import bare, changed, dead, healthy, install, no_torch_run, refused
from tests.each import each

from transload.diagnose.case import LAYERS, Case, Found, Match, Rule
from transload.diagnose.report import Diagnosis, judge_machine
from transload.diagnose.rules import BY_CODE
from transload.findings import Severity
from transload.machine import Torch, TorchRun

if TYPE_CHECKING:
    import pytest


def row(code: str, layer: str, severity: Severity = "error", *, symptom: bool = False, likely: bool = False) -> Rule:
    def check(_: Case) -> Found:
        yield code, Match((f"evidence of {code}",), (f"= title of {code}", f"$ fix {code}"), severity)

    return Rule(code, layer, check, symptom, likely)


def silent(code: str, layer: str) -> Rule:
    return Rule(code, layer, lambda _: iter(()))


def codes(diagnosis: Diagnosis) -> list[str]:
    return [finding.code for finding in diagnosis.findings]


BROKEN = refused(healthy(), 999)


def test_nothing_found_on_a_machine_that_works_is_ok() -> None:
    diagnosis = judge_machine(healthy(), [silent("K01", "kernel")])
    assert (diagnosis.status, diagnosis.cause, diagnosis.findings, diagnosis.muted) == ("ok", None, (), ())


def test_no_accelerator_and_nothing_wrong_is_no_fault() -> None:
    diagnosis = judge_machine(bare(), [row("H01", "hardware", "note")])
    assert (diagnosis.status, diagnosis.cause) == ("no-gpu", None)
    assert codes(diagnosis) == ["H01"]
    assert diagnosis.ok


def test_the_first_broken_layer_is_the_cause_and_the_later_ones_follow_from_it() -> None:
    diagnosis = judge_machine(BROKEN, [row("X08", "driver"), row("D01", "nodes"), row("K01", "kernel")])
    assert diagnosis.status == "broken"
    assert diagnosis.cause is not None
    assert diagnosis.cause.code == "K01"
    assert [(muted.finding.code, muted.because) for muted in diagnosis.muted] == [("D01", "K01"), ("X08", "K01")]


def test_in_a_layer_the_order_of_the_table_decides() -> None:
    assert codes(judge_machine(BROKEN, [row("D02", "nodes"), row("D01", "nodes")])) == ["D02"]


def test_faults_of_different_chains_are_both_told_in_the_order_to_fix_them() -> None:
    rows = [row("E01", "variables"), row("K01", "kernel"), row("T01", "build")]
    diagnosis = judge_machine(BROKEN, rows)
    assert codes(diagnosis) == ["T01", "K01", "E01"]
    assert diagnosis.muted == ()


@each("earlier", ["build", "kernel", "libraries"])
def test_whether_driver_and_build_fit_cannot_be_told_before_both_are_there(earlier: str) -> None:
    diagnosis = judge_machine(BROKEN, [row("Z01", earlier), row("V01", "fit")])
    assert codes(diagnosis) == ["Z01"]
    assert diagnosis.muted[0].because == "Z01"


def test_a_hidden_card_does_not_excuse_an_old_driver() -> None:
    assert codes(judge_machine(BROKEN, [row("E01", "variables"), row("V01", "fit")])) == ["E01", "V01"]


def test_a_symptom_is_muted_by_any_fault_but_stands_where_there_is_none() -> None:
    symptom = row("X08", "driver", symptom=True)
    assert codes(judge_machine(BROKEN, [symptom])) == ["X08"]
    for fault in (row("T01", "build"), row("E01", "variables"), row("V01", "fit"), row("S05", "run")):
        diagnosis = judge_machine(BROKEN, [symptom, fault])
        assert codes(diagnosis) == [fault.code]
        assert diagnosis.muted[0].because == fault.code


def test_a_symptom_follows_from_a_cause_of_its_own_chain_where_there_is_one() -> None:
    symptom, build, stub = row("X08", "driver", symptom=True), row("T01", "build"), row("U04", "libraries")
    assert judge_machine(BROKEN, [symptom, build, stub]).muted[0].because == "U04"
    assert judge_machine(BROKEN, [symptom, build, row("E01", "variables")]).muted[0].because == "E01"


def test_a_driver_at_work_does_not_settle_what_torch_died_of() -> None:
    machine = dead(healthy(), available=True, error="RuntimeError: CUDA error: uncorrectable ECC error encountered")
    assert codes(judge_machine(machine, [row("H03", "hardware")])) == ["H03"]
    assert judge_machine(machine, [row("H03", "hardware")]).status == "broken"


def test_it_shows_itself_in_a_line() -> None:
    assert repr(judge_machine(BROKEN, [row("K01", "kernel")])) == "<Diagnosis broken, cause=K01, 1 findings>"


def test_packages_beside_torch_are_judged_each_for_itself() -> None:
    rows = [row("K01", "kernel"), row("P05", "extensions"), row("A03", "extensions")]
    assert codes(judge_machine(BROKEN, rows)) == ["K01", "P05", "A03"]


def test_warnings_come_before_notes_and_only_degrade() -> None:
    diagnosis = judge_machine(healthy(), [row("E05", "variables", "note"), row("H03", "hardware", "warning")])
    assert diagnosis.status == "degraded"
    assert codes(diagnosis) == ["H03", "E05"]
    assert diagnosis.cause is not None


@each("layer", [layer for layer in LAYERS if layer != "extensions"])
def test_no_rule_overrules_torch_at_work(layer: str) -> None:
    diagnosis = judge_machine(healthy(), [row("Z01", layer)])
    assert diagnosis.status == "ok"
    assert [finding.severity for finding in diagnosis.findings] == ["note"]


def test_no_rule_about_the_machine_overrules_a_driver_at_work() -> None:
    machine = no_torch_run(healthy())
    assert judge_machine(machine, [row("K01", "kernel")]).status == "ok"
    assert judge_machine(machine, [row("T01", "build")]).status == "broken"


def test_what_is_only_likely_says_so() -> None:
    likely = row("C11", "surroundings", likely=True)
    assert judge_machine(BROKEN, [likely]).findings[0].title == "probably: title of C11"


def test_whether_cuda_is_usable_is_torchs_word_or_else_the_drivers() -> None:
    assert judge_machine(healthy(), []).cuda_usable
    assert not judge_machine(dead(healthy()), []).cuda_usable
    assert judge_machine(no_torch_run(healthy()), []).cuda_usable
    assert not judge_machine(no_torch_run(healthy()), [row("T01", "build")]).cuda_usable
    assert not judge_machine(no_torch_run(BROKEN), []).cuda_usable


def test_as_data_it_has_the_promised_keys() -> None:
    data = judge_machine(BROKEN, [row("K01", "kernel"), row("D01", "nodes")]).to_dict()
    assert list(data) == ["schema", "status", "cuda_usable", "cause", "findings", "muted", "machine"]
    assert data["cause"]["code"] == "K01"
    assert data["muted"][0]["because"] == "K01"


def test_a_row_that_raises_is_named_and_the_others_are_heard() -> None:
    def check(machine: Case) -> Found:
        raise OverflowError(f"too large: {machine.taken}")

    bad = Rule("K99", "kernel", check)
    diagnosis = judge_machine(BROKEN, [bad, row("D01", "nodes")])
    assert codes(diagnosis) == ["D01"]
    assert diagnosis.machine.problems == {"rule K99": "OverflowError: too large: "}
    assert "rule K99: OverflowError" in str(diagnosis)


def test_a_row_that_others_ask_may_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(_: Case) -> Found:
        raise OverflowError

    bad = Rule("C09", "surroundings", check)
    monkeypatch.setitem(BY_CODE, "C09", bad)
    cpu_build = changed(healthy(), torch=Torch(installs=(install("2.13.0+cpu", ""),)), torch_run=TorchRun())
    assert judge_machine(cpu_build, [bad]).machine.problems == {"rule C09": "OverflowError: "}


def test_a_pickled_diagnosis_prints_itself_in_another_process(tmp_path: Path) -> None:
    path = tmp_path / "diagnosis.pkl"
    path.write_bytes(pickle.dumps(judge_machine(BROKEN)))
    program = "import pickle, sys; print(pickle.load(open(sys.argv[1], 'rb')))"
    command = [sys.executable, "-c", program, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={"PYTHONPATH": str(forks.SOURCE)})
    assert "cuInit returned 999" in done.stdout
