"""The doctor's report: what is on the first screen, what follows, and what no stream may break."""

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
    bare,
    card,
    changed,
    cuda_gpu,
    dead,
    healthy,
    in_container,
    in_slurm,
    in_wsl,
    install,
    no_torch_run,
    nvml_gpu,
    refused,
)
from tests.each import each

from transload.diagnose import report as doctor_chain
from transload.diagnose.case import LAYERS
from transload.diagnose.redact import redacted
from transload.diagnose.report import Diagnosis, Muted, Status, facts, judge_machine, page, report, source_of
from transload.findings import Finding
from transload.machine import (
    Accelerator,
    Answer,
    Extension,
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
from transload.render.lines import Style, emit, layout, plain

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
ROOM = Finding("E11", "warning", "the cache cannot be written", ("~/.nv",), ("$ export CUDA_CACHE_PATH=/x",))
ASIDE = Finding("H01", "note", "worth knowing", ("a fact",))

STUB_LIBRARY = Library("libcuda.so.1", "/c/stubs/libcuda.so.1", "/c/stubs/libcuda.so", "LD_LIBRARY_PATH", kind="stub")
STUBBED = changed(
    refused(healthy(), 34), driver__libraries__cuda=(STUB_LIBRARY,), driver__cuda__library="/c/stubs/libcuda.so"
)


def diagnosed(machine: Machine, *found: Finding, muted: tuple[Muted, ...] = (), status: str = "") -> Diagnosis:
    severities = [finding.severity for finding in found]
    default = "broken" if "error" in severities else "degraded" if "warning" in severities else "ok"
    told: Any = status or default
    cause = found[0] if told in ("broken", "degraded") else None
    return Diagnosis(told, cause, found, muted, machine)


def lines_of(blocks: Any, style: Style = Style()) -> list[str]:  # noqa: B008  it is frozen
    return [plain(line) for line in layout(blocks, style)]


def shown(diagnosis: Diagnosis, width: int = 100, *, cut: bool = False) -> str:
    return "\n".join(lines_of(report(diagnosis), Style(width=width, cut=cut)))


def head(machine: Machine, *found: Finding, status: str = "") -> str:
    return shown(diagnosed(machine, *found, status=status), 400).partition("\n")[0]


def link(text: str, words: str) -> str:
    """The line of the chain that begins with these words, with its mark."""
    (line,) = [line for line in text.splitlines() if line[4:].startswith(words)]
    return line


# -- the first screen -------------------------------------------------------------------------------------------------


def test_the_cause_its_evidence_and_the_fix_come_first() -> None:
    lines = shown(diagnosed(STUBBED, STUB)).splitlines()
    assert lines[0] == "CUDA does not work: libcuda.so.1 is the toolkit's stub  [U04]"
    assert lines[1:4] == [f"  {STUB.evidence[0]}", f"  {STUB.evidence[1]}", ""]
    assert lines[4] == "Fix"
    assert lines[5] == f"  {STUB.fix[0]}"
    assert len(lines) < 40


def test_a_healthy_machine_is_told_in_a_few_lines() -> None:
    lines = shown(diagnosed(healthy())).splitlines()
    assert lines[0] == "CUDA works: torch 2.13.0+cu130 computed on NVIDIA H200"
    assert len(lines) < 20
    marks = {line[2] for line in lines if line.startswith("  ")}
    assert marks == {"✓"}


@each(
    ("machine", "found", "status", "words"),
    [
        (bare(), (), "no-gpu", "No GPU in this machine; torch 2.13.0+cpu works on the CPU. Nothing to repair."),
        (no_torch_run(bare()), (), "no-gpu", "No GPU in this machine; torch 2.13.0+cpu is installed. Nothing to"),
        (Machine(), (), "no-gpu", "No GPU was found. Nothing to repair."),
        (no_torch_run(healthy()), (), "ok", "The CUDA driver works, on NVIDIA H200 (9.0), 140 GiB; torch was not run"),
        (healthy(), (ROOM,), "", "CUDA works, but there is a problem: the cache cannot be written  [E11]"),
        (bare(), (ROOM,), "", "torch works, but there is a problem: the cache cannot be written"),
        (dead(healthy()), (BUILD,), "", "torch cannot use the GPU: torch was built without CUDA  [T01]"),
        (changed(healthy(), torch=Torch(()), torch_run=TorchRun()), (BUILD,), "", "torch does not work: "),
        (refused(healthy(), 999), (replace(NODES, title="probably: a node"),), "", "CUDA does not work, probably: a"),
        (
            changed(healthy(), torch_run=TorchRun(Answer("hung", "import"))),
            (BUILD,),
            "",
            "torch does not work: torch was built without CUDA",
        ),
        (
            changed(bare(), accelerators=(Accelerator("mps", "Apple M2", usable=True),), torch_run__backends=("mps",)),
            (),
            "ok",
            "torch 2.13.0+cpu works with mps, on Apple M2",
        ),
        (
            changed(bare(), accelerators=(Accelerator("rocm", "Radeon", usable=True),)),
            (),
            "ok",
            "No NVIDIA GPU, but Radeon; no problem found with torch 2.13.0+cpu",
        ),
        (refused(healthy(), 999), (), "ok", "No cause was found"),
    ],
)
def test_the_first_line_is_the_verdict(
    machine: Machine, found: tuple[Finding, ...], status: Status, words: str
) -> None:
    assert head(machine, *found, status=status).startswith(words)


def test_further_causes_are_numbered_and_the_rest_follows() -> None:
    text = shown(diagnosed(STUBBED, BUILD, STUB, ROOM, ASIDE))
    assert text.startswith("CUDA does not work, for 2 reasons; the first: torch was built without CUDA  [T01]\n")
    places = [
        text.index(words)
        for words in (
            "torch was built without CUDA  [T01]",
            "\nThen 2: libcuda.so.1 is the toolkit's stub  [U04]\n",
            "\n! the cache cannot be written  [E11]\n",
            "\n    $ export CUDA_CACHE_PATH=/x\n",
            "\n· worth knowing  [H01]\n",
            "\nFrom the card to torch\n",
            "transload doctor --explain T01 explains more",
        )
    ]
    assert places == sorted(places)


def test_long_evidence_is_cut_and_says_so() -> None:
    found = replace(STUB, evidence=tuple(f"line {n}" for n in range(30)))
    text = shown(diagnosed(STUBBED, found))
    assert "line 7" in text
    assert "line 8" not in text
    assert "… and 22 more, in --json" in text


# -- the chain --------------------------------------------------------------------------------------------------------


def test_the_cause_and_what_follows_stand_in_the_chain() -> None:
    text = shown(diagnosed(STUBBED, STUB, muted=(Muted(NODES, "U04"),)))
    assert link(text, "GPU ").startswith("  ✓ ")
    assert link(text, "driver libraries").startswith("  ✗ ")
    assert link(text, "driver libraries").endswith("/c/stubs/libcuda.so, a stub  [U04]")
    assert link(text, "CUDA driver").startswith("  ✗ ")
    assert "cuInit returned 34 CUDA_ERROR_STUB_LIBRARY" in link(text, "CUDA driver")
    assert link(text, "compatibility").startswith("  – ")
    after = text.splitlines()[text.splitlines().index(link(text, "device nodes")) + 1]
    assert after.strip() == "because of U04: a device node of the driver is missing  [D01]"


def test_the_chain_goes_from_the_card_upwards_and_knows_every_layer() -> None:
    assert sorted(doctor_chain.ORDER) == sorted(LAYERS)
    machine = changed(in_container(healthy()), extensions=(Extension("flash-attn", "2.8.3"),))
    assert list(doctor_chain.chain(machine)) == list(doctor_chain.ORDER)


def test_what_a_machine_does_not_have_is_not_in_its_chain() -> None:
    assert doctor_chain.chain(bare()).keys() == {"hardware", "variables", "python", "build", "run"}


def test_a_layer_that_only_a_finding_speaks_of_is_shown() -> None:
    found = Finding("K01", "error", "the driver is not installed")
    assert "[K01]" in link(shown(diagnosed(bare(), found)), "kernel driver")


def test_without_a_gpu_a_build_with_cuda_is_no_fault() -> None:
    """Nothing in the chain but marks that all is well, or that there is nothing to do."""
    error = "RuntimeError: Found no NVIDIA driver on your system"
    steps = (Step("import", ok=True), Step("init", ok=False, error=error), Step("cpu", ok=True))
    machine = changed(bare(), torch=healthy().torch, torch_run__steps=steps, torch_run__cuda="13.0")
    text = shown(judge_machine(machine))
    assert "works on the CPU" in link(text, "running torch")
    assert not re.search("[✗?!]|Found no NVIDIA", text)
    broken = changed(machine, torch_run__steps=(*steps[:2], Step("cpu", ok=False, error="OSError: no")))
    assert "✗" in link(shown(judge_machine(broken)), "running torch")


def test_a_failure_nobody_needs_is_no_cross() -> None:
    assert "✗" not in shown(diagnosed(refused(healthy(), 100), status="ok"))


def test_a_warning_marks_its_layer() -> None:
    assert link(shown(diagnosed(healthy(), ROOM)), "environment variables").startswith("  ! ")


UNREADABLE = Unknown("/sys does not exist")


@each(
    ("facts", "layer", "state", "words"),
    [
        ({"hardware": Hardware(pci=UNREADABLE), "driver": bare().driver}, "hardware", "unknown", "/sys does not exist"),
        (
            {"hardware": Hardware(pci=(card(0x2335),)), "kernel": Kernel(), "driver": bare().driver},
            "hardware",
            "ok",
            "GH100",
        ),
        ({"driver__nvml__gpus": (nvml_gpu(0), nvml_gpu(1))}, "hardware", "ok", "2 × NVIDIA H200 (9.0), 140 GiB"),
        ({"driver__nvml__gpus": (), "kernel__gpus": ()}, "hardware", "ok", "NVIDIA H200 (9.0), 140 GiB"),
        (
            {"kernel": Kernel(loaded=False, modules=("nouveau",)), "driver": bare().driver},
            "kernel",
            "broken",
            "nouveau is",
        ),
        ({"kernel": Kernel(), "driver": bare().driver}, "kernel", "unknown", "not asked"),
        ({"kernel": Kernel()}, "kernel", "ok", "not visible from here"),
        ({"nodes": bare().nodes, "driver": bare().driver}, "nodes", "broken", "/dev/nvidiactl: ENOENT"),
        ({"driver": bare().driver}, "libraries", "broken", "libcuda.so.1 is not found"),
        ({"driver": bare().driver}, "driver", "idle", "no library found"),
        ({"driver__cuda__answer": Answer("hung", "in cuInit")}, "driver", "broken", "no answer in time: in cuInit"),
        ({"driver__cuda__answer": Answer("crashed", "signal 6")}, "driver", "broken", "it crashed: signal 6"),
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
        ({"torch_run": TorchRun(Answer("crashed", "signal 11"))}, "run", "broken", "it crashed: signal 11"),
        (
            {"torch_run__steps": (Step("kernel", ok=False, error="no kernel image"),)},
            "run",
            "broken",
            "kernel: no kernel",
        ),
        ({"torch_run__steps": (Step("import", ok=True),)}, "run", "broken", "is_available() is False"),
    ],
)
def test_each_link_says_what_was_seen(facts: dict[str, Any], layer: str, state: str, words: str) -> None:
    seen, text = doctor_chain.chain(changed(healthy(), **facts))[layer]
    assert seen == state
    assert words in text


@each(
    ("machine", "words"),
    [(in_slurm(healthy()), "Slurm job"), (in_wsl(healthy()), "WSL 2"), (in_container(healthy(), "podman"), "podman")],
)
def test_surroundings_are_named(machine: Machine, words: str) -> None:
    assert words in doctor_chain.chain(machine)["surroundings"][1]


def test_what_could_not_be_found_out_is_said_at_the_end() -> None:
    machine = changed(refused(healthy(), 999), problems={"extensions": "ValueError: oh"})
    likely = diagnosed(machine, replace(STUB, title="probably: something"))
    end = shown(likely).splitlines()[-4:]
    assert end[1].startswith("Unknown  extensions: ValueError: oh; the kernel log: /dev/kmsg: operation not")
    assert "kernel's log" not in shown(diagnosed(machine, STUB))
    assert "Could not find out" not in shown(diagnosed(healthy()))


# -- streams ----------------------------------------------------------------------------------------------------------


@each("width", [40, 60, 80, 200])
def test_prose_fits_and_commands_stay_whole(width: int) -> None:
    diagnosis = diagnosed(STUBBED, BUILD, STUB, ROOM, ASIDE, muted=(Muted(NODES, "U04"),))
    lines = shown(diagnosis, width, cut=True).splitlines()
    copied = [line for line in lines if line.startswith(("  $ ", "  | "))]
    assert f"  {STUB.fix[0]}" in copied
    assert f"  {STUB.fix[3]}" in copied
    assert max(len(line) for line in lines if line not in copied) <= width
    assert not any(line == "" and after == "" for line, after in pairwise(lines))


def test_a_pipe_is_not_cut() -> None:
    machine = changed(healthy(), python__prefix="/" + "x" * 90)
    assert "/" + "x" * 90 in shown(diagnosed(machine), 40)


HOSTILE = "\x1b[2J\x1b]0;title\x07\u202eevil\n"


def test_nothing_of_a_machine_reaches_the_terminal_raw() -> None:
    machine = _poisoned(in_container(changed(healthy(), problems={"x": "y"}, extensions=(Extension("a"),))))
    found = Finding("U04", "error", HOSTILE, (HOSTILE,), (f"$ {HOSTILE}", HOSTILE))
    diagnosis = diagnosed(machine, found, muted=(Muted(replace(NODES, title=HOSTILE), "U04"),))
    for blocks in (report(diagnosis), facts(machine)):
        text = "\n".join(lines_of(blocks, Style(width=80, cut=True)))
        assert all(char.isprintable() or char == "\n" for char in text)
        assert "\\x1b[2J" in text


def _poisoned(value: Any) -> Any:
    """The value with something hostile in every text that is not one of a few words."""
    if isinstance(value, str):
        return value + HOSTILE
    if isinstance(value, tuple):
        return tuple(map(_poisoned, value))
    if isinstance(value, dict):
        return {name: _poisoned(each) for name, each in value.items()}
    if isinstance(value, Answer | Library):
        return value
    if hasattr(value, "__dataclass_fields__"):
        return replace(value, **{each.name: _poisoned(getattr(value, each.name)) for each in fields(value)})
    return value


def test_ascii_streams_get_ascii(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    emit(report(diagnosed(STUBBED, STUB, ROOM, muted=(Muted(NODES, "U04"),))), stream)
    stream.flush()
    assert isinstance(stream.buffer, io.BytesIO)
    text = stream.buffer.getvalue().decode("ascii")
    assert "  ok GPU" in text
    assert "  x  driver libraries" in text or "  x driver libraries" in text
    assert "  - compatibility" in text


def test_colour_tells_nothing_that_words_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    painted = io.StringIO()
    emit(report(diagnosed(STUBBED, STUB)), painted, "always")
    assert "\x1b[31mCUDA does not work: \x1b[0m\x1b[1mlibcuda.so.1" in painted.getvalue()
    assert "\x1b[31m✗ \x1b[0mdriver libraries" in painted.getvalue()
    assert re.sub(r"\x1b\[\d*m", "", painted.getvalue()) == shown(diagnosed(STUBBED, STUB)) + "\n"


def test_a_diagnosis_prints_itself_without_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/alice")
    found = replace(STUB, evidence=("in /home/alice/lib",))
    text = str(diagnosed(STUBBED, found))
    assert text == str(diagnosed(STUBBED, found))
    assert "  in ~/lib\n" in text
    assert "\x1b" not in text
    assert not text.endswith("\n")


# -- all facts, and pages ---------------------------------------------------------------------------------------------


def blocks_text(blocks: Any) -> str:
    return "\n".join(lines_of(blocks, Style(width=200)))


def test_verbose_shows_every_fact_with_its_source() -> None:
    text = re.sub("(?<=[^ \n])  +", "  ", blocks_text(facts(healthy())))
    for words in (
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
        assert words in text
    assert VERSION in text


def test_every_kind_of_fact_has_a_source() -> None:
    named = {"transload", "taken", "problems"}
    missing = [each.name for each in fields(Machine) if each.name not in named and not _sourced(each.name)]
    assert missing == []


def _sourced(section: str) -> bool:
    inside = {"driver": ("libraries", "nvml", "cuda", "experiments")}.get(section, ("anything",))
    return all(source_of(f"{section}.{name}") for name in inside)


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


def test_a_page_tells_all_and_breaks_no_command() -> None:
    lines = lines_of(page(PAGE), Style(width=60, cut=True))
    command = f"  $ {'x ' * 60}".rstrip()
    assert lines == [
        *("U04  a <stub>", "Layer: driver libraries.", "", "First paragraph of *it*, <so>.", "", "Second.", ""),
        *("Fix", "Do this:", "", command, "  | a line", "", "Then rest.", "", "What not to do", "It.", ""),
        *("Sources", "https://example.org/issue/1", "https://example.org/issue/2"),
    ]


def test_cards_of_one_kind_are_counted_and_cuda_names_them_last() -> None:
    machine = changed(healthy(), driver__nvml__gpus=(), kernel__gpus=(), driver__cuda__gpus=(cuda_gpu(), cuda_gpu(1)))
    assert doctor_chain.cards(machine) == "2 × NVIDIA H200 (9.0), 140 GiB"


# -- any machine at all -----------------------------------------------------------------------------------------------

WORDS = ["", "580.159.04", "13.0", "2.13.0+cu130", "sm_90", "nvidia", "GPU-6e1b1a3c", "/dev/nvidiactl", "EACCES", "0"]
SIMPLE: dict[Any, st.SearchStrategy[Any]] = {
    str: st.sampled_from(WORDS) | st.text(max_size=5),
    int: st.integers(0, 2000) | st.integers(0, 2**70),
    float: st.floats(0, 100),
    bool: st.booleans(),
    type(None): st.none(),
}


@cache
def anything(kind: Any) -> st.SearchStrategy[Any]:
    """Values of a type of ``transload.machine``."""
    origin, inside = get_origin(kind), get_args(kind)
    if kind in SIMPLE:
        return SIMPLE[kind]
    if origin is Literal:
        return st.sampled_from(inside)
    if origin in (Union, UnionType):
        return st.one_of(*map(anything, inside))
    if origin is tuple:
        return st.lists(anything(inside[0]), max_size=2).map(tuple)
    if origin is dict:
        return st.dictionaries(SIMPLE[str], anything(inside[1]), max_size=2)
    hints = get_type_hints(kind)
    return st.builds(kind, **{each.name: anything(hints[each.name]) for each in fields(kind)})


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # to shrink so large a thing takes minutes
)
@given(anything(Machine))
def test_any_machine_is_judged_and_shown(machine: Machine) -> None:
    judged = judge_machine(machine)
    assert judged.machine == machine  # no rule raised
    diagnosis = redacted(judged)
    for blocks in (report(diagnosis), facts(machine)):
        text = "".join(lines_of(blocks, Style(width=60, cut=True)))
        assert text.isprintable()
