"""The doctor's report: its first screen, the chain of layers, the list of facts, and output on any stream."""

from __future__ import annotations

import io
import re
from dataclasses import fields, replace
from functools import cache
from itertools import pairwise
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tests.diagnose.machines import (
    VERSION,
    cuda_fails,
    cuda_gpu,
    cuinit_fails,
    healthy,
    in_container,
    in_slurm,
    in_windows,
    in_wsl,
    install,
    no_torch_run,
    nvml_gpu,
    pci_gpu,
    with_facts,
    without_gpu,
)
from tests.each import each

from transload.diagnose import report as doctor_chain
from transload.diagnose.case import LAYERS
from transload.diagnose.redact import redacted
from transload.diagnose.report import Diagnosis, Muted, Status, facts, judge_machine, page, report, source_of
from transload.findings import Finding
from transload.machine import (
    Accelerator,
    ChildAnswer,
    ExtensionPackage,
    Hardware,
    Kernel,
    Library,
    Machine,
    Python,
    Resolved,
    Step,
    Torch,
    TorchLibraries,
    TorchRun,
    Unknown,
    Variables,
)
from transload.render.lines import Style, as_text, emit, layout, plain

if TYPE_CHECKING:
    import pytest

STUB = Finding(
    "U04",
    "error",
    "libcuda.so.1 is the toolkit's stub",
    ("libcuda.so.1 → /usr/local/cuda/lib64/stubs/libcuda.so, by LD_LIBRARY_PATH", "cuInit returned 34"),
    (
        f"$ export LD_LIBRARY_PATH={':'.join(f'/opt/a-long-name/{n}/lib' for n in range(8))}",
        "To make it permanent, change LD_LIBRARY_PATH where it is set: ~/.bashrc:12",
        "In a file:",
        "| deploy: {resources: {reservations: {devices: [{driver: nvidia, count: all, capabilities: [gpu]}]}}}",
    ),
)
BUILD = Finding("T01", "error", "torch was built without CUDA", ("torch/version.py says +cpu",), ("$ pip install",))
NODES = Finding("D01", "error", "a device node of the driver is missing", ("/dev/nvidia-uvm",))
CACHE = Finding("E11", "warning", "the cache cannot be written", ("~/.nv",), ("$ export CUDA_CACHE_PATH=/x",))
NOTE = Finding("H01", "note", "worth knowing", ("a fact",))

STUB_LIBRARY = Library("libcuda.so.1", "/c/stubs/libcuda.so.1", "/c/stubs/libcuda.so", "LD_LIBRARY_PATH", kind="stub")
STUBBED = with_facts(
    cuinit_fails(healthy(), 34), driver__libraries__cuda=(STUB_LIBRARY,), driver__cuda__library="/c/stubs/libcuda.so"
)


def diagnosed(machine: Machine, *findings: Finding, muted: tuple[Muted, ...] = (), status: str = "") -> Diagnosis:
    severities = [finding.severity for finding in findings]
    default = "broken" if "error" in severities else "degraded" if "warning" in severities else "ok"
    verdict: Any = status or default
    cause = findings[0] if verdict in ("broken", "degraded") else None
    return Diagnosis(verdict, cause, findings, muted, machine)


def lines_of(blocks: Any, style: Style = Style()) -> list[str]:  # noqa: B008  the class is frozen
    return [plain(line) for line in layout(blocks, style)]


def rendered(diagnosis: Diagnosis, width: int = 100, *, cut: bool = False) -> str:
    return "\n".join(lines_of(report(diagnosis), Style(width=width, cut=cut)))


def first_line(machine: Machine, *findings: Finding, status: str = "") -> str:
    return rendered(diagnosed(machine, *findings, status=status), 400).partition("\n")[0]


def chain_line(text: str, label: str) -> str:
    """The line of the chain with this label, including its mark."""
    (line,) = [line for line in text.splitlines() if line[4:].startswith(label)]
    return line


# -- the first screen -------------------------------------------------------------------------------------------------


def test_report_starts_with_cause_evidence_and_fix() -> None:
    lines = rendered(diagnosed(STUBBED, STUB)).splitlines()
    assert lines[0] == "CUDA does not work: libcuda.so.1 is the toolkit's stub  [U04]"
    assert lines[1:4] == [f"  {STUB.evidence[0]}", f"  {STUB.evidence[1]}", ""]
    assert lines[4] == "Fix"
    assert lines[5] == f"  {STUB.fix[0]}"
    assert len(lines) < 40


def test_report_on_a_healthy_machine_is_short() -> None:
    lines = rendered(diagnosed(healthy())).splitlines()
    assert lines[0] == "CUDA works: torch 2.13.0+cu130 computed on NVIDIA H200"
    assert len(lines) < 20
    marks = {line[2] for line in lines if line.startswith("  ")}
    assert marks == {"✓"}


@each(
    ("machine", "findings", "status", "expected"),
    [
        (without_gpu(), (), "no-gpu", "No GPU in this machine; torch 2.13.0+cpu works on the CPU. Nothing to repair."),
        (
            no_torch_run(without_gpu()),
            (),
            "no-gpu",
            "No GPU in this machine; torch 2.13.0+cpu is installed. Nothing to",
        ),
        (Machine(), (), "no-gpu", "No GPU was found. Nothing to repair."),
        (no_torch_run(healthy()), (), "ok", "The CUDA driver works, on NVIDIA H200 (9.0), 140 GiB; torch was not run"),
        (healthy(), (CACHE,), "", "CUDA works, but there is a problem: the cache cannot be written  [E11]"),
        (without_gpu(), (CACHE,), "", "torch works, but there is a problem: the cache cannot be written"),
        (cuda_fails(healthy()), (BUILD,), "", "torch cannot use the GPU: torch was built without CUDA  [T01]"),
        (with_facts(healthy(), torch=Torch(()), torch_run=TorchRun()), (BUILD,), "", "torch does not work: "),
        (
            cuinit_fails(healthy(), 999),
            (replace(NODES, title="probably: a node"),),
            "",
            "CUDA does not work, probably: a",
        ),
        (
            with_facts(healthy(), torch_run=TorchRun(ChildAnswer("hung", "import"))),
            (BUILD,),
            "",
            "torch does not work: torch was built without CUDA",
        ),
        (
            with_facts(
                without_gpu(), accelerators=(Accelerator("mps", "Apple M2", usable=True),), torch_run__backends=("mps",)
            ),
            (),
            "ok",
            "torch 2.13.0+cpu works with mps, on Apple M2",
        ),
        (
            with_facts(without_gpu(), accelerators=(Accelerator("rocm", "Radeon", usable=True),)),
            (),
            "ok",
            "No NVIDIA GPU, but Radeon; no problem found with torch 2.13.0+cpu",
        ),
        (cuinit_fails(healthy(), 999), (), "ok", "No cause was found"),
    ],
)
def test_first_line_is_the_verdict(
    machine: Machine, findings: tuple[Finding, ...], status: Status, expected: str
) -> None:
    assert first_line(machine, *findings, status=status).startswith(expected)


def test_further_causes_are_numbered_then_warnings_notes_and_chain_follow() -> None:
    text = rendered(diagnosed(STUBBED, BUILD, STUB, CACHE, NOTE))
    assert text.startswith("CUDA does not work, for 2 reasons; the first: torch was built without CUDA  [T01]\n")
    positions = [
        text.index(part)
        for part in (
            "torch was built without CUDA  [T01]",
            "\nThen 2: libcuda.so.1 is the toolkit's stub  [U04]\n",
            "\n! the cache cannot be written  [E11]\n",
            "\n    $ export CUDA_CACHE_PATH=/x\n",
            "\n· worth knowing  [H01]\n",
            "\nFrom the card to torch\n",
            "transload doctor --explain T01 explains more",
        )
    ]
    assert positions == sorted(positions)


def test_long_evidence_is_cut_and_the_rest_is_counted() -> None:
    finding = replace(STUB, evidence=tuple(f"line {n}" for n in range(30)))
    text = rendered(diagnosed(STUBBED, finding))
    assert "line 7" in text
    assert "line 8" not in text
    assert "… and 22 more, in --json" in text


# -- the chain --------------------------------------------------------------------------------------------------------


def test_chain_marks_the_cause_and_its_consequences() -> None:
    text = rendered(diagnosed(STUBBED, STUB, muted=(Muted(NODES, "U04"),)))
    assert chain_line(text, "GPU ").startswith("  ✓ ")
    assert chain_line(text, "driver libraries").startswith("  ✗ ")
    assert chain_line(text, "driver libraries").endswith("/c/stubs/libcuda.so, a stub  [U04]")
    assert chain_line(text, "CUDA driver").startswith("  ✗ ")
    assert "cuInit returned 34 CUDA_ERROR_STUB_LIBRARY" in chain_line(text, "CUDA driver")
    assert chain_line(text, "compatibility").startswith("  – ")
    after = text.splitlines()[text.splitlines().index(chain_line(text, "device nodes")) + 1]
    assert after.strip() == "because of U04: a device node of the driver is missing  [D01]"


def test_chain_has_every_layer_in_order() -> None:
    assert sorted(doctor_chain.ORDER) == sorted(LAYERS)
    machine = with_facts(in_container(healthy()), extensions=(ExtensionPackage("flash-attn", "2.8.3"),))
    assert list(doctor_chain.chain(machine)) == list(doctor_chain.ORDER)


def test_chain_omits_layers_the_machine_does_not_have() -> None:
    assert doctor_chain.chain(without_gpu()).keys() == {"hardware", "variables", "python", "build", "run"}


def test_chain_of_windows_has_its_own_links_and_names() -> None:
    machine = in_windows(healthy(), model="TCC")
    assert list(doctor_chain.chain(machine)) == [
        *("hardware", "kernel", "libraries", "driver", "variables", "python", "build", "torch-libraries", "fit", "run")
    ]
    text = rendered(judge_machine(machine))
    assert chain_line(text, "display driver").endswith("581.80, TCC")
    assert "?" not in text


def test_chain_of_windows_says_what_the_card_has_instead_of_its_driver() -> None:
    machine = in_windows(cuinit_fails(healthy(), 100))

    def link(layer: str = "kernel", problem: int = 0, **facts: Any) -> tuple[str, str]:
        cards = tuple(replace(card, problem=problem) for card in machine.hardware.pci or ())
        return doctor_chain.chain(
            with_facts(machine, driver__nvml__gpus=(), hardware__pci=cards, kernel__loaded=False, **facts)
        )[layer]

    assert link(problem=43) == ("broken", "581.80, but the device manager shows code 43")
    assert link() == ("broken", "581.80, but it is not running")
    microsoft: dict[str, Any] = {"kernel__version": "", "kernel__provider": "Microsoft"}
    assert link(**microsoft) == ("broken", "not NVIDIA's, but that of Microsoft")
    assert link(**{**microsoft, "kernel__provider": ""}) == ("broken", "not installed")
    removed = {"hardware__unconfirmed": "cfgmgr32 lists no device", "driver__nvml__count": -1}
    assert link("hardware") == ("ok", "NVIDIA H200")
    state, words = doctor_chain.chain(with_facts(machine, **removed))["hardware"]
    assert state == "unknown"
    assert words.endswith("; it may have been removed: cfgmgr32 lists no device")


def test_facts_of_windows_name_its_sources_and_leave_out_what_it_lacks() -> None:
    text = as_text(facts(in_windows(healthy())))
    assert "from the registry, cfgmgr32" in text
    assert "not asked" not in text
    assert "container" not in text


def test_chain_shows_a_layer_known_only_from_a_finding() -> None:
    finding = Finding("K01", "error", "the driver is not installed")
    assert "[K01]" in chain_line(rendered(diagnosed(without_gpu(), finding)), "kernel driver")


def test_cuda_build_without_gpu_is_not_a_fault() -> None:
    """Nothing in the chain is marked as broken or unknown, unless torch fails on the CPU too."""
    error = "RuntimeError: Found no NVIDIA driver on your system"
    steps = (Step("import", ok=True), Step("init", ok=False, error=error), Step("cpu", ok=True))
    machine = with_facts(without_gpu(), torch=healthy().torch, torch_run__steps=steps, torch_run__cuda="13.0")
    text = rendered(judge_machine(machine))
    assert "works on the CPU" in chain_line(text, "running torch")
    assert not re.search("[✗?!]|Found no NVIDIA", text)
    broken = with_facts(machine, torch_run__steps=(*steps[:2], Step("cpu", ok=False, error="OSError: no")))
    assert "✗" in chain_line(rendered(judge_machine(broken)), "running torch")


def test_chain_has_no_cross_when_the_status_is_ok() -> None:
    assert "✗" not in rendered(diagnosed(cuinit_fails(healthy(), 100), status="ok"))


def test_warning_marks_its_layer() -> None:
    assert chain_line(rendered(diagnosed(healthy(), CACHE)), "environment variables").startswith("  ! ")


UNREADABLE = Unknown("/sys does not exist")


@each(
    ("changes", "layer", "state", "expected"),
    [
        (
            {"hardware": Hardware(pci=UNREADABLE), "driver": without_gpu().driver},
            "hardware",
            "unknown",
            "/sys does not exist",
        ),
        (
            {"hardware": Hardware(pci=(pci_gpu(0x2335),)), "kernel": Kernel(), "driver": without_gpu().driver},
            "hardware",
            "ok",
            "GH100",
        ),
        ({"driver__nvml__gpus": (nvml_gpu(0), nvml_gpu(1))}, "hardware", "ok", "2 × NVIDIA H200 (9.0), 140 GiB"),
        ({"driver__nvml__gpus": (), "kernel__gpus": ()}, "hardware", "ok", "NVIDIA H200 (9.0), 140 GiB"),
        (
            {"kernel": Kernel(loaded=False, modules=("nouveau",)), "driver": without_gpu().driver},
            "kernel",
            "broken",
            "nouveau is",
        ),
        ({"kernel": Kernel(), "driver": without_gpu().driver}, "kernel", "unknown", "not asked"),
        ({"kernel": Kernel()}, "kernel", "ok", "not visible from here"),
        ({"nodes": without_gpu().nodes, "driver": without_gpu().driver}, "nodes", "broken", "/dev/nvidiactl: ENOENT"),
        ({"driver": without_gpu().driver}, "libraries", "broken", "libcuda.so.1 is not found"),
        ({"driver": without_gpu().driver}, "driver", "idle", "no library found"),
        (
            {"driver__cuda__answer": ChildAnswer("hung", "in cuInit")},
            "driver",
            "broken",
            "no answer in time: in cuInit",
        ),
        ({"driver__cuda__answer": ChildAnswer("crashed", "signal 6")}, "driver", "broken", "it crashed: signal 6"),
        ({"driver__cuda__count": 0, "driver__cuda__gpus": ()}, "driver", "broken", "no GPU for this process"),
        (
            {"variables": Variables({"CUDA_VISIBLE_DEVICES": "7", "HOME": "~"})},
            "variables",
            "ok",
            "CUDA_VISIBLE_DEVICES=7",
        ),
        ({"python": Python(problem="it does not start")}, "python", "unknown", "it does not start"),
        ({"torch": Torch(shadow="/x/torch.py")}, "build", "broken", "/x/torch.py is imported instead"),
        ({"torch": Torch(())}, "build", "broken", "torch is not installed"),
        ({"torch": Torch((replace(install(), cuda="", hip="6.4"),))}, "build", "ok", "for ROCm 6.4"),
        ({"torch": Torch((replace(install(), known=False, problem="garbage"),))}, "build", "ok", "garbage"),
        (
            {"torch_libraries": TorchLibraries(needed=(Resolved("libcudnn.so.9"),))},
            "torch-libraries",
            "broken",
            "not found: libcudnn.so.9",
        ),
        ({"torch_libraries": TorchLibraries()}, "torch-libraries", "unknown", "not asked"),
        ({"driver__cuda__init": 999}, "fit", "idle", "not checked"),
        ({"torch_run": TorchRun()}, "run", "idle", "not run"),
        ({"torch_run": TorchRun(ChildAnswer("crashed", "signal 11"))}, "run", "broken", "it crashed: signal 11"),
        (
            {"torch_run__steps": (Step("kernel", ok=False, error="no kernel image"),)},
            "run",
            "broken",
            "kernel: no kernel",
        ),
        ({"torch_run__steps": (Step("import", ok=True),)}, "run", "broken", "is_available() is False"),
    ],
)
def test_chain_shows_state_and_facts_of_each_layer(
    changes: dict[str, Any], layer: str, state: str, expected: str
) -> None:
    actual, text = doctor_chain.chain(with_facts(healthy(), **changes))[layer]
    assert actual == state
    assert expected in text


@each(
    ("machine", "expected"),
    [(in_slurm(healthy()), "Slurm job"), (in_wsl(healthy()), "WSL 2"), (in_container(healthy(), "podman"), "podman")],
)
def test_chain_names_slurm_wsl_and_containers(machine: Machine, expected: str) -> None:
    assert expected in doctor_chain.chain(machine)["surroundings"][1]


def test_unknown_facts_are_listed_at_the_end() -> None:
    machine = with_facts(cuinit_fails(healthy(), 999), problems={"extensions": "ValueError: oh"})
    uncertain = diagnosed(machine, replace(STUB, title="probably: something"))
    end = rendered(uncertain).splitlines()[-4:]
    assert end[1].startswith("Unknown  extensions: ValueError: oh; the kernel log: /dev/kmsg: operation not")
    assert "the kernel log" not in rendered(diagnosed(machine, STUB))
    assert "Unknown  " not in rendered(diagnosed(healthy()))


# -- streams ----------------------------------------------------------------------------------------------------------


@each("width", [40, 60, 80, 200])
def test_prose_is_wrapped_and_commands_are_not(width: int) -> None:
    diagnosis = diagnosed(STUBBED, BUILD, STUB, CACHE, NOTE, muted=(Muted(NODES, "U04"),))
    lines = rendered(diagnosis, width, cut=True).splitlines()
    commands = [line for line in lines if line.startswith(("  $ ", "  | "))]
    assert f"  {STUB.fix[0]}" in commands
    assert f"  {STUB.fix[3]}" in commands
    assert max(len(line) for line in lines if line not in commands) <= width
    assert not any(line == "" and after == "" for line, after in pairwise(lines))


def test_output_to_a_pipe_is_not_cut() -> None:
    machine = with_facts(healthy(), python__prefix="/" + "x" * 90)
    assert "/" + "x" * 90 in rendered(diagnosed(machine), 40)


HOSTILE = "\x1b[2J\x1b]0;title\x07\u202eevil\n"


def test_control_characters_in_facts_and_findings_are_escaped() -> None:
    machine = _poisoned(in_container(with_facts(healthy(), problems={"x": "y"}, extensions=(ExtensionPackage("a"),))))
    finding = Finding("U04", "error", HOSTILE, (HOSTILE,), (f"$ {HOSTILE}", HOSTILE))
    diagnosis = diagnosed(machine, finding, muted=(Muted(replace(NODES, title=HOSTILE), "U04"),))
    for blocks in (report(diagnosis), facts(machine)):
        text = "\n".join(lines_of(blocks, Style(width=80, cut=True)))
        assert all(char.isprintable() or char == "\n" for char in text)
        assert "\\x1b[2J" in text


def _poisoned(value: Any) -> Any:
    """The value with control characters appended to every string, except in ``ChildAnswer`` and ``Library``."""
    if isinstance(value, str):
        return value + HOSTILE
    if isinstance(value, tuple):
        return tuple(map(_poisoned, value))
    if isinstance(value, dict):
        return {name: _poisoned(item) for name, item in value.items()}
    if isinstance(value, ChildAnswer | Library):
        return value
    if hasattr(value, "__dataclass_fields__"):
        return replace(value, **{field.name: _poisoned(getattr(value, field.name)) for field in fields(value)})
    return value


def test_ascii_streams_get_ascii(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    emit(report(diagnosed(STUBBED, STUB, CACHE, muted=(Muted(NODES, "U04"),))), stream)
    stream.flush()
    assert isinstance(stream.buffer, io.BytesIO)
    text = stream.buffer.getvalue().decode("ascii")
    assert "  ok GPU" in text
    assert "  x  driver libraries" in text or "  x driver libraries" in text
    assert "  - compatibility" in text


def test_colour_does_not_change_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    stream = io.StringIO()
    emit(report(diagnosed(STUBBED, STUB)), stream, "always")
    assert "\x1b[31mCUDA does not work: \x1b[0m\x1b[1mlibcuda.so.1" in stream.getvalue()
    assert "\x1b[31m✗ \x1b[0mdriver libraries" in stream.getvalue()
    assert re.sub(r"\x1b\[\d*m", "", stream.getvalue()) == rendered(diagnosed(STUBBED, STUB)) + "\n"


def test_str_of_a_diagnosis_is_redacted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/alice")
    finding = replace(STUB, evidence=("in /home/alice/lib",))
    text = str(diagnosed(STUBBED, finding))
    assert text == str(diagnosed(STUBBED, finding))
    assert "  in ~/lib\n" in text
    assert "\x1b" not in text
    assert not text.endswith("\n")


# -- facts and pages --------------------------------------------------------------------------------------------------


def blocks_text(blocks: Any) -> str:
    return "\n".join(lines_of(blocks, Style(width=200)))


def test_facts_are_listed_with_their_sources() -> None:
    text = re.sub("(?<=[^ \n])  +", "  ", blocks_text(facts(healthy())))
    for expected in (
        "\nkernel driver\n",
        "  from /proc/driver/nvidia/gpus\n    gpus[0]  address 0000:17:00.0; model NVIDIA H200; minor 0; firmware 580",
        "    version  580.159.04\n",
        "  from /dev/kmsg, /var/log\n    log  ? /dev/kmsg: operation not permitted\n",
        "    cuda.init  0\n",
        "    installs[0]  location /opt/venv/lib/python3.11/site-packages/torch; version 2.13.0+cu130; cuda 13.0;",
        "capability 9, 0;",
        "; vendor 0x10de; device 0x2335; kind 0x030200; driver nvidia;",
        "    found[0]  path /dev/nvidiactl; major 195; minor 255\n",
    ):
        assert expected in text
    assert VERSION in text


def test_every_kind_of_fact_has_a_source() -> None:
    exempt = {"transload", "taken", "problems"}
    missing = [field.name for field in fields(Machine) if field.name not in exempt and not _has_source(field.name)]
    assert missing == []


def _has_source(section: str) -> bool:
    names = {"driver": ("libraries", "nvml", "cuda", "experiments")}.get(section, ("anything",))
    return all(source_of(f"{section}.{name}") for name in names)


PAGE = f"""# U04: a `<stub>`

Layer: driver libraries.

First
paragraph of \\*it\\*, &lt;so>.

Second.

## Fix

Do this:

    $ {"x " * 60}
    | a line

Then [rest](README.md).

## What not to do

It.

## Sources

- <https://example.org/issue/1>
- <https://example.org/issue/2>

[All causes](README.md)
"""


def test_page_is_rendered_without_breaking_commands() -> None:
    lines = lines_of(page(PAGE), Style(width=60, cut=True))
    command = f"  $ {'x ' * 60}".rstrip()
    assert lines == [
        *("U04  a <stub>", "Layer: driver libraries.", "", "First paragraph of *it*, <so>.", "", "Second.", ""),
        *("Fix", "Do this:", "", command, "  | a line", "", "Then rest.", "", "What not to do", "It.", ""),
        *("Sources", "https://example.org/issue/1", "https://example.org/issue/2"),
    ]


def test_equal_cards_are_counted_from_cuda_if_nvml_and_kernel_list_none() -> None:
    machine = with_facts(
        healthy(), driver__nvml__gpus=(), kernel__gpus=(), driver__cuda__gpus=(cuda_gpu(), cuda_gpu(1))
    )
    assert doctor_chain.cards(machine) == "2 × NVIDIA H200 (9.0), 140 GiB"


# -- arbitrary machines -----------------------------------------------------------------------------------------------

WORDS = ["", "580.159.04", "13.0", "2.13.0+cu130", "sm_90", "nvidia", "GPU-6e1b1a3c", "/dev/nvidiactl", "EACCES", "0"]
SIMPLE: dict[Any, st.SearchStrategy[Any]] = {
    str: st.sampled_from(WORDS) | st.text(max_size=5),
    int: st.integers(0, 2000) | st.integers(0, 2**70),
    float: st.floats(0, 100),
    bool: st.booleans(),
    type(None): st.none(),
}


@cache
def values_of(kind: Any) -> st.SearchStrategy[Any]:
    """Values of a type of ``transload.machine``."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind in SIMPLE:
        return SIMPLE[kind]
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin in (Union, UnionType):
        return st.one_of(*map(values_of, arguments))
    if origin is tuple:
        return st.lists(values_of(arguments[0]), max_size=2).map(tuple)
    if origin is dict:
        return st.dictionaries(SIMPLE[str], values_of(arguments[1]), max_size=2)
    hints = get_type_hints(kind)
    return st.builds(kind, **{field.name: values_of(hints[field.name]) for field in fields(kind)})


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # shrinking a value this large takes minutes
)
@given(values_of(Machine))
def test_any_machine_can_be_judged_and_rendered(machine: Machine) -> None:
    judged = judge_machine(machine)
    assert judged.machine == machine  # no rule raised
    diagnosis = redacted(judged)
    for blocks in (report(diagnosis), facts(machine)):
        text = "".join(lines_of(blocks, Style(width=60, cut=True)))
        assert text.isprintable()
