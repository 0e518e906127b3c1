"""Rules about which torch the interpreter imports, if any."""

from __future__ import annotations

from dataclasses import replace

from tests.diagnose.machines import SITE, healthy, install, no_torch_run, with_facts, without_gpu
from tests.diagnose.rules.rule_helpers import alarms, cause, find
from tests.diagnose.rules.torch_machines import finding_of, unimportable, with_variables, without_torch
from tests.each import each

from transload.diagnose.report import chain, judge_machine
from transload.machine import Machine, Torch, Unknown

USER = "/home/user/.local/lib/python3.11/site-packages/torch"


def with_python(machine: Machine, **facts: object) -> Machine:
    return with_facts(machine, **{f"python__{name}": value for name, value in facts.items()})


def test_torch_is_not_installed() -> None:
    machine = with_python(without_torch(healthy()), others=("/usr/bin/python3: torch 2.8.0+cu128",))
    assert cause(machine) == "P01"
    finding = finding_of("P01", machine)
    assert "/opt/venv/bin/python (Python 3.11.7) has no torch" in finding.evidence
    assert "another Python has torch: /usr/bin/python3: torch 2.8.0+cu128" in finding.evidence
    assert any("/opt/venv/bin/python -m pip install torch==" in line for line in finding.fix)
    assert find("P01", healthy()) is None


def test_fix_installs_the_cpu_build_where_there_is_no_gpu() -> None:
    cpu = "$ /opt/venv/bin/python -m pip install torch --index-url https://download.pytorch.org/whl/cpu"
    machine = without_torch(without_gpu())
    assert finding_of("P01", machine).fix == (cpu,)
    plain = ("$ /opt/venv/bin/python -m pip install torch",)
    assert finding_of("P01", with_facts(machine, platform__system="Windows")).fix == plain  # PyPI has the CPU build
    assert finding_of("P01", with_facts(machine, hardware__pci=Unknown("not readable"))).fix == plain


@each(
    "torch",
    [
        Torch(installs=Unknown("not asked")),
        Torch(installs=(), shadow="/srv/torch.py"),
        Torch(installs=(), dangling=(f"{SITE}/torch-2.13.0.dist-info",)),
    ],
)
def test_torch_is_not_reported_missing_unless_it_is_known_to_be(torch: Torch) -> None:
    assert find("P01", with_facts(without_torch(healthy()), torch=torch)) is None


def test_interpreter_that_does_not_answer() -> None:
    machine = with_facts(no_torch_run(healthy()), torch=Torch(installs=Unknown("it does not exist")))
    machine = with_python(machine, problem="/opt/venv/bin/python does not exist")
    assert cause(machine) == "P09"
    assert find("P09", with_python(healthy(), problem="it took too long")) is None  # torch was imported


# -- another torch is imported


def test_file_of_the_user_is_imported_as_torch() -> None:
    shadow = {"torch__shadow": "/srv/torch.py", "torch__shadow_via": "the current directory"}
    machine = with_facts(unimportable(healthy(), "AttributeError: module 'torch' has no attribute 'cuda'"), **shadow)
    assert cause(machine) == "P03"
    assert finding_of("P03", machine).evidence[0] == "import torch finds /srv/torch.py, through the current directory"
    assert cause(with_facts(no_torch_run(healthy()), **shadow)) == "P03"
    assert find("P03", with_facts(healthy(), **shadow)) is None  # the real one was imported anyway


def test_fix_for_a_file_found_through_pythonpath_changes_the_variable() -> None:
    shadow = {"torch__shadow": "/srv/lib/torch.py", "torch__shadow_via": "PYTHONPATH"}
    machine = with_variables(with_facts(no_torch_run(healthy()), **shadow), PYTHONPATH="/srv/lib:/opt/x")
    fix = finding_of("P03", machine).fix
    assert "$ export PYTHONPATH=/opt/x" in fix
    assert not any("directory" in line and "another" in line for line in fix)
    assert "  ✗ environment variables" in str(judge_machine(machine))
    assert "PYTHONPATH=/srv/lib:/opt/x" in str(judge_machine(machine))
    hidden = with_facts(no_torch_run(healthy()), torch__shadow="/srv/torch.py", torch__shadow_via="sys.path")
    assert finding_of("P03", hidden).fix == ("Rename /srv/torch.py.",)


def test_incomplete_torch_in_site_packages_is_not_called_a_file_of_the_user() -> None:
    for kind in ("package", "source"):
        facts = {"torch__shadow": f"{SITE}/torch", "torch__shadow_kind": kind, "torch__shadow_via": "sys.path"}
        machine = with_facts(unimportable(healthy(), "ModuleNotFoundError: No module named 'torch._C'"), **facts)
        finding = finding_of("P03", with_facts(machine, torch__installs=()))
        assert finding.title == "the installed torch is incomplete"
        assert finding.fix[0] == f"$ rm -r {SITE}/torch"
        assert any("-m pip install torch==" in line for line in finding.fix)


def test_fix_in_the_source_tree_is_to_leave_it() -> None:
    machine = with_facts(no_torch_run(healthy()), torch__shadow="/src/pytorch/torch", torch__shadow_kind="source")
    assert "source tree" in finding_of("P03", machine).fix[0]


def two_installs(first: str, second: str) -> Machine:
    ahead = replace(
        install(first, "" if "cpu" in first else "13.0"), location=USER, dist_version=first.partition("+")[0]
    )
    behind = install(second, "" if "cpu" in second else "13.0")
    return with_facts(no_torch_run(healthy()), torch=Torch(installs=(ahead, behind)))


def test_cpu_build_in_the_user_site_hides_the_environments_torch() -> None:
    machine = two_installs("2.9.0+cpu", "2.13.0+cu130")
    assert cause(machine) == "P02"
    assert finding_of("P02", machine).fix[0] == "$ export PYTHONNOUSERSITE=1"
    assert f"it hides {SITE}/torch: torch 2.13.0+cu130" in finding_of("P02", machine).evidence


def test_fix_for_a_torch_put_first_by_pythonpath_changes_the_variable() -> None:
    machine = with_variables(two_installs("2.9.0+cpu", "2.13.0+cu130"), PYTHONPATH=f"/a:{USER.removesuffix('/torch')}")
    machine = with_facts(machine, python__user_site="")
    assert finding_of("P02", machine).fix[0] == "$ export PYTHONPATH=/a"
    assert chain(machine)["variables"][1].startswith("PYTHONPATH=")


@each("machine", [two_installs("2.12.0+cu130", "2.13.0+cu130"), two_installs("2.12.0+cu130", "2.13.0+cpu")])
def test_two_installs_alone_are_a_note(machine: Machine) -> None:
    finding = finding_of("P02", machine, "note")
    assert finding.title == "there are two installations of torch on the path"
    assert (
        finding.fix[0]
        == f"Python imports {USER}: torch 2.12.0+cu130. If that is the one you want, there is nothing to do."
    )
    assert finding.fix[1:3] == ("To import the other one:", "$ export PYTHONNOUSERSITE=1")
    assert alarms(machine) == []


def test_cpu_build_may_come_first_where_there_is_no_gpu() -> None:
    machine = with_facts(without_gpu(), torch=two_installs("2.9.0+cpu", "2.13.0+cu130").torch)
    assert alarms(machine) == []


# -- files of two versions


def test_two_versions_in_one_folder() -> None:
    mixed = (replace(install("2.15.0+cu132", "13.2"), dist_version="2.13.0"),)
    broken = with_facts(unimportable(healthy(), "ImportError: cannot import name 'x'"), torch__installs=mixed)
    assert cause(broken) == "P04"
    assert finding_of("P04", broken).evidence[0] == "torch/version.py says 2.15.0+cu132, but its metadata says 2.13.0"
    finding_of("P04", with_facts(healthy(), torch__installs=mixed), "warning")


@each(
    ("version", "metadata"),
    [
        ("2.13.0+cu130", "2.13.0"),
        ("2.13.0+cu130", "2.13.0+cu130"),
        ("2.6.0a0+ecf3bae40a.nv25.01", "2.6.0a0+ecf3bae40a.nv25.1"),
        ("2.9.0.dev20250801+cu128", "2.9.0.dev20250801+cu128"),
        ("2.5.1.post303", "2.5.1"),
        ("2.13.0+cu130", ""),
        ("nonsense", "2.13.0"),
    ],
)
def test_spellings_of_one_version_are_equal(version: str, metadata: str) -> None:
    same = (replace(install(version), dist_version=metadata),)
    assert find("P04", with_facts(healthy(), torch__installs=same)) is None


def test_unlisted_files_explain_a_failing_import_unless_a_cuda_library_is_missing() -> None:
    unlisted = (replace(install(), unlisted=("lib/libtorch_cuda_old.so",)),)
    error = "ImportError: undefined symbol: _ZN3c105ErrorC2E"
    broken = with_facts(unimportable(healthy(), error), torch__installs=unlisted)
    assert cause(broken) == "P04"
    assert finding_of("P04", broken).title.startswith("probably: ")
    error = "ImportError: libcudnn.so.9: cannot open shared object file: No such file or directory"
    assert find("P04", with_facts(unimportable(healthy(), error), torch__installs=unlisted)) is None
    assert find("P04", with_facts(healthy(), torch__installs=unlisted)) is None


def test_leftovers_of_pip_are_a_note() -> None:
    machine = with_facts(healthy(), torch__leftovers=(f"{SITE}/~orch",))
    finding_of("P04", machine, "note")
    assert alarms(machine) == []


# -- no wheel for this Python or system


@each(
    "facts",
    [
        {"version": "3.6.9"},
        {"version": "3.11.7", "implementation": "pypy"},
        {"version": "3.12.1", "free_threaded": True},
        {"version": "3.30.0"},
    ],
)
def test_no_release_has_a_wheel_for_this_python(facts: dict[str, object]) -> None:
    machine = with_python(without_torch(healthy()), **facts)
    assert cause(machine) == "P07"
    # a Python newer than the table may have wheels by now
    assert finding_of("P07", machine).title.startswith("probably: ") == (facts["version"] == "3.30.0")
    assert find("P07", with_python(healthy(), **facts)) is None


@each(
    "facts",
    [{"version": "3.8.1"}, {"version": "3.14.0", "free_threaded": True}, {"version": "3.15.0"}, {"version": ""}],
)
def test_some_release_has_a_wheel_for_this_python(facts: dict[str, object]) -> None:
    assert find("P07", with_python(without_torch(healthy()), **facts)) is None


def test_system_on_which_no_torch_wheel_runs() -> None:
    bits = with_python(without_torch(healthy()), bits=32)
    musl = with_facts(without_torch(healthy()), platform__libc="musl 1.2", platform__distribution="alpine")
    assert (cause(bits), cause(musl)) == ("P08", "P08")
    assert find("P08", with_facts(healthy(), platform__libc="musl 1.2")) is None  # built from source
    error = "ImportError: /lib64/libc.so.6: version `GLIBC_2.28' not found (required by …/libtorch_cpu.so)"
    assert cause(with_facts(unimportable(healthy(), error), platform__libc="glibc 2.17")) == "P08"
    needs = ("GLIBC_2.28 of libc.so.6, needed by libtorch_cpu.so",)
    assert cause(with_facts(no_torch_run(healthy()), torch_libraries__unresolved=needs)) == "P08"


def test_old_glibc_matters_only_if_no_old_release_supports_this_python() -> None:
    old = with_facts(without_torch(healthy()), platform__libc="glibc 2.17")
    assert find("P08", old) is None  # torch 2.6 has a wheel for Python 3.11
    finding_of("P08", with_python(old, version="3.14.0"))
    assert find("P08", with_facts(with_python(old, version="3.14.0"), platform__libc="glibc 2.28")) is None
