"""Which findings are causes, in which order, and which findings they mute."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tests import forks
from tests.diagnose.machines import cuda_fails, cuinit_fails, healthy, install, no_torch_run, with_facts, without_gpu
from tests.each import each

from transload.diagnose.case import LAYERS, Case, Match, Matches, Rule
from transload.diagnose.report import Diagnosis, judge_machine
from transload.diagnose.rules import BY_CODE
from transload.findings import Severity
from transload.machine import Torch, TorchRun
from transload.steps import Step

if TYPE_CHECKING:
    import pytest


def rule(code: str, layer: str, severity: Severity = "error", *, symptom: bool = False, likely: bool = False) -> Rule:
    def check(_: Case) -> Matches:
        yield (
            code,
            Match(
                (f"evidence of {code}",), (Step("title", f"title of {code}"), Step("command", f"fix {code}")), severity
            ),
        )

    return Rule(code, layer, check, symptom, likely)


def silent_rule(code: str, layer: str) -> Rule:
    return Rule(code, layer, lambda _: iter(()))


def codes(diagnosis: Diagnosis) -> list[str]:
    return [finding.code for finding in diagnosis.findings]


BROKEN = cuinit_fails(healthy(), 999)


def test_working_machine_without_findings_is_ok() -> None:
    diagnosis = judge_machine(healthy(), [silent_rule("K01", "kernel")])
    assert (diagnosis.status, diagnosis.cause, diagnosis.findings, diagnosis.muted) == ("ok", None, (), ())


def test_machine_without_a_gpu_and_without_errors_is_ok() -> None:
    diagnosis = judge_machine(without_gpu(), [rule("H01", "hardware", "note")])
    assert (diagnosis.status, diagnosis.cause) == ("no-gpu", None)
    assert codes(diagnosis) == ["H01"]
    assert diagnosis.ok


def test_first_broken_layer_is_the_cause_and_mutes_later_layers() -> None:
    diagnosis = judge_machine(BROKEN, [rule("X08", "driver"), rule("D01", "nodes"), rule("K01", "kernel")])
    assert diagnosis.status == "broken"
    assert diagnosis.cause is not None
    assert diagnosis.cause.code == "K01"
    assert [(muted.finding.code, muted.because) for muted in diagnosis.muted] == [("D01", "K01"), ("X08", "K01")]


def test_order_of_the_rules_decides_within_a_layer() -> None:
    assert codes(judge_machine(BROKEN, [rule("D02", "nodes"), rule("D01", "nodes")])) == ["D02"]


def test_faults_of_different_chains_are_all_reported_in_the_order_to_fix_them() -> None:
    rules = [rule("E01", "variables"), rule("K01", "kernel"), rule("T01", "build")]
    diagnosis = judge_machine(BROKEN, rules)
    assert codes(diagnosis) == ["T01", "K01", "E01"]
    assert diagnosis.muted == ()


@each("earlier", ["build", "kernel", "libraries"])
def test_mismatch_of_driver_and_build_is_muted_by_a_fault_in_either(earlier: str) -> None:
    diagnosis = judge_machine(BROKEN, [rule("Z01", earlier), rule("V01", "fit")])
    assert codes(diagnosis) == ["Z01"]
    assert diagnosis.muted[0].because == "Z01"


def test_hidden_gpu_does_not_mute_an_old_driver() -> None:
    assert codes(judge_machine(BROKEN, [rule("E01", "variables"), rule("V01", "fit")])) == ["E01", "V01"]


def test_symptom_is_muted_by_any_other_fault() -> None:
    symptom = rule("X08", "driver", symptom=True)
    assert codes(judge_machine(BROKEN, [symptom])) == ["X08"]
    for fault in (rule("T01", "build"), rule("E01", "variables"), rule("V01", "fit"), rule("S05", "run")):
        diagnosis = judge_machine(BROKEN, [symptom, fault])
        assert codes(diagnosis) == [fault.code]
        assert diagnosis.muted[0].because == fault.code


def test_symptom_is_attributed_to_a_cause_in_its_own_chain() -> None:
    symptom, build, stub = rule("X08", "driver", symptom=True), rule("T01", "build"), rule("U04", "libraries")
    assert judge_machine(BROKEN, [symptom, build, stub]).muted[0].because == "U04"
    assert judge_machine(BROKEN, [symptom, build, rule("E01", "variables")]).muted[0].because == "E01"


def test_hardware_fault_is_the_cause_if_torch_fails_with_a_working_driver() -> None:
    machine = cuda_fails(
        healthy(), available=True, error="RuntimeError: CUDA error: uncorrectable ECC error encountered"
    )
    assert codes(judge_machine(machine, [rule("H03", "hardware")])) == ["H03"]
    assert judge_machine(machine, [rule("H03", "hardware")]).status == "broken"


def test_repr_is_one_line() -> None:
    assert repr(judge_machine(BROKEN, [rule("K01", "kernel")])) == "<Diagnosis broken, cause=K01, 1 findings>"


def test_faults_of_extensions_are_not_muted() -> None:
    rules = [rule("K01", "kernel"), rule("P05", "extensions"), rule("A03", "extensions")]
    assert codes(judge_machine(BROKEN, rules)) == ["K01", "P05", "A03"]


def test_warnings_come_before_notes_and_only_degrade_the_status() -> None:
    diagnosis = judge_machine(healthy(), [rule("E05", "variables", "note"), rule("H03", "hardware", "warning")])
    assert diagnosis.status == "degraded"
    assert codes(diagnosis) == ["H03", "E05"]
    assert diagnosis.cause is not None


@each("layer", [layer for layer in LAYERS if layer != "extensions"])
def test_no_rule_overrules_a_working_torch(layer: str) -> None:
    diagnosis = judge_machine(healthy(), [rule("Z01", layer)])
    assert diagnosis.status == "ok"
    assert [finding.severity for finding in diagnosis.findings] == ["note"]


def test_no_machine_rule_overrules_a_working_driver() -> None:
    machine = no_torch_run(healthy())
    assert judge_machine(machine, [rule("K01", "kernel")]).status == "ok"
    assert judge_machine(machine, [rule("T01", "build")]).status == "broken"


def test_likely_cause_is_marked_as_probable() -> None:
    likely = rule("C11", "surroundings", likely=True)
    assert judge_machine(BROKEN, [likely]).findings[0].title == "probably: title of C11"


def test_cuda_usable_comes_from_torch_or_else_from_the_driver() -> None:
    assert judge_machine(healthy(), []).cuda_usable
    assert not judge_machine(cuda_fails(healthy()), []).cuda_usable
    assert judge_machine(no_torch_run(healthy()), []).cuda_usable
    assert not judge_machine(no_torch_run(healthy()), [rule("T01", "build")]).cuda_usable
    assert not judge_machine(no_torch_run(BROKEN), []).cuda_usable


def test_to_dict_has_the_documented_keys() -> None:
    data = judge_machine(BROKEN, [rule("K01", "kernel"), rule("D01", "nodes")]).to_dict()
    assert list(data) == ["schema", "status", "cuda_usable", "cause", "findings", "muted", "machine"]
    assert data["cause"]["code"] == "K01"
    assert data["muted"][0]["because"] == "K01"


def test_rule_that_raises_is_reported_and_the_others_still_run() -> None:
    def check(machine: Case) -> Matches:
        raise OverflowError(f"too large: {machine.taken}")

    bad = Rule("K99", "kernel", check)
    diagnosis = judge_machine(BROKEN, [bad, rule("D01", "nodes")])
    assert codes(diagnosis) == ["D01"]
    assert diagnosis.machine.problems == {"rule K99": "OverflowError: too large: "}
    assert "rule K99: OverflowError" in str(diagnosis)


def test_rule_that_other_rules_call_may_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(_: Case) -> Matches:
        raise OverflowError

    bad = Rule("C09", "surroundings", check)
    monkeypatch.setitem(BY_CODE, "C09", bad)
    cpu_build = with_facts(healthy(), torch=Torch(installs=(install("2.13.0+cpu", ""),)), torch_run=TorchRun())
    assert judge_machine(cpu_build, [bad]).machine.problems == {"rule C09": "OverflowError: "}


def test_pickled_diagnosis_can_be_printed_in_another_process(tmp_path: Path) -> None:
    path = tmp_path / "diagnosis.pkl"
    path.write_bytes(pickle.dumps(judge_machine(BROKEN)))
    program = "import pickle, sys; print(pickle.load(open(sys.argv[1], 'rb')))"
    command = [sys.executable, "-c", program, str(path)]
    environ = {**os.environ, "PYTHONPATH": str(forks.SOURCE), "PYTHONUTF8": "1"}
    process = subprocess.run(command, capture_output=True, encoding="utf-8", check=True, env=environ)
    assert "cuInit returned 999" in process.stdout
