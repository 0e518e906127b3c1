"""Redacted reports: names are removed; other words and the diagnosis stay."""

from __future__ import annotations

import json
import re
from dataclasses import replace

from hypothesis import assume, example, given
from hypothesis import strategies as st
from tests.diagnose.machines import (
    UUID,
    cuda_fails,
    cuinit_fails,
    healthy,
    in_container,
    in_slurm,
    in_wsl,
    install,
    with_facts,
    without_gpu,
)
from tests.each import each

from transload.diagnose.redact import Names, names_here, redacted
from transload.diagnose.report import judge_machine
from transload.diagnose.rules.process import visible_devices
from transload.findings import Finding
from transload.machine import Machine, Node, Platform, Torch, Variables

ALICE = Names(homes=("/home/alice",), users=("alice",), hosts=("quill.example.org",))
OTHER = "GPU-77aa0000-0000-4000-8000-00000000000b"


def redact_text(text: str, names: Names = ALICE, machine: Machine | None = None) -> str:
    """The text after redaction as part of a machine."""
    with_text = replace(machine or Machine(), taken=text)
    return redacted(with_text, names).taken


def at_home(user: str, machine: Machine) -> Machine:
    """The machine as ``user`` sees it, with files in their home."""
    home = f"/home/{user}"
    values = {**machine.variables.values, "HOME": home, "LD_LIBRARY_PATH": f"{home}/lib:/scratch/{user}/cuda/lib64"}
    venv = f"{home}/venv"
    torch = replace(install(), location=f"{venv}/lib/python3.11/site-packages/torch")
    return with_facts(
        machine,
        variables=Variables(values, {"LD_LIBRARY_PATH": (f"{home}/.bashrc:12",)}),
        python__executable=f"{venv}/bin/python",
        python__prefix=venv,
        python__user_site=f"{home}/.local/lib/python3.11/site-packages",
        platform__groups=(user, "video"),
        torch__installs=(replace(torch, version=machine.torch.first.version, cuda=machine.torch.first.cuda),)
        if machine.torch.first
        else machine.torch.installs,
    )


CPU_BUILD = with_facts(
    cuda_fails(healthy(), error="AssertionError: Torch not compiled with CUDA enabled"),
    torch=Torch(installs=(replace(install(), version="2.13.0+cpu", cuda=""),)),
)
MACHINES = {
    "healthy": healthy(),
    "bare": without_gpu(),
    "cpu build": CPU_BUILD,
    "container": in_container(healthy()),
    "slurm": in_slurm(healthy()),
    "wsl": in_wsl(healthy()),
    **{f"cuInit {code}": cuinit_fails(healthy(), code) for code in (3, 34, 100, 101, 802, 803, 999)},
    "no permission": with_facts(
        cuinit_fails(healthy(), 100),
        nodes__found=(
            Node("/dev/nvidiactl", mode=0o600, gid=44, group="video", error="EACCES"),
            Node("/dev/nvidia0", major=195),
            Node("/dev/nvidia-uvm", major=238),
        ),
    ),
}


# -- texts ------------------------------------------------------------------------------------------------------------


@each(
    ("text", "expected"),
    [
        ("/home/alice/venv/bin/python", "~/venv/bin/python"),
        ("in /home/alice.", "in ~."),
        ("/home/alice", "~"),
        ("/home/alice/.bashrc:12", "~/.bashrc:12"),
        ("/a:/home/alice/lib:/home/alice", "/a:~/lib:~"),
        ("/home/alice2/x and /home/bob/x", "~user2/x and ~user3/x"),
        ("/gpfs/home/bob/x", "~user2/x"),
        ("/Users/bob/x", "~user2/x"),
        (r"C:\Users\Bob Smith\AppData\torch", r"~user2\AppData\torch"),
        ("/mnt/c/Users/Bob Smith/x", "~user2/x"),
        ("/scratch/alice/env and ~/x/alice", "/scratch/user/env and ~/x/user"),
        ("alice@quill: ok", "user@host: ok"),
        ("on quill.example.org, pen.example.org", "on host, host"),
        ("//quill/share, quill:22, quill:/export", "//host/share, host:22, host:/export"),
        ("Nov 15 quill kernel: NVRM: Xid 79, name=alice_train", "Nov 15 host kernel: NVRM: Xid 79, name=user_train"),
        ("~alice/x /scratch/alice-proj /tmp/alice_torch", "~user/x /scratch/user-proj /tmp/user_torch"),
        ("https://alice:secret@10.0.0.7/simple", "https://192.0.2.1/simple"),
        ("https://alice:s@cr@t@10.0.0.7/simple", "https://192.0.2.1/simple"),
        ("NVRM: GPU Board Serial Number: 1324420019135", "NVRM: GPU Board Serial Number: 0"),
        ("eth0 3c:ec:ef:01:02:03", "eth0 00:00:00:00:00:00"),
        (f"/docker/{'0f' * 32}", "/docker/<id>"),
    ],
)
def test_names_are_replaced(text: str, expected: str) -> None:
    assert redact_text(text) == expected


@each(
    "text",
    [
        "alice-cause malice alice_data alicex",
        "/usr/lib/alice/libcuda.so.1",
        "the quill-pen and squill",
        "with no program and no quill on the GPU, quill.service",
        "/root/venv, /opt/venv, /usr/local/cuda-13.0/lib64",
        "/home/linuxbrew/.linuxbrew and /Users/Shared/x",
        "libcurand 10.3.9.90, cudnn 9.20.0.48, driver 580.159.04",
        "0000:17:00.0 at 12:34:56",
        "GPU-accelerated, GPU-add, MIG-enabled",
        "sha256:abcdef",
        "a serial device; serially",
    ],
)
def test_words_that_resemble_names_are_kept(text: str) -> None:
    assert redact_text(text) == text


@each("name", ["root", "ubuntu", "cuda", "torch", "user", "lib", "docker"])
def test_name_that_is_a_technical_word_is_kept(name: str) -> None:
    text = f"{name}-cause of {name}: /opt/{name}/lib/{name}, {name}@x, {name}.service"
    assert redact_text(text, Names(users=(name,), hosts=(name,))) == text


def test_home_of_root_is_kept() -> None:
    text = "/root/venv/bin/python, /home/bob/x"
    assert redact_text(text, Names(homes=("/root",), users=("root",))) == "/root/venv/bin/python, ~user2/x"


def test_homes_in_unusual_folders_are_replaced() -> None:
    names = Names(homes=("/u/dept/alice", "/gpfs/users/alice"), users=("alice",))
    assert redact_text("/u/dept/alice/x /gpfs/users/alice/x /u/dept/bob", names) == "~/x ~/x /u/dept/bob"


def test_host_name_that_is_not_a_word_is_replaced_everywhere() -> None:
    names = Names(hosts=("node17.cluster.corp.com",))
    assert redact_text("on node17, node18.cluster.corp.com", names) == "on host, host"


def test_ipv6_address_is_recognized_by_its_field() -> None:
    machine = with_facts(healthy(), variables=Variables({"KUBERNETES_SERVICE_HOST": "fd00:10::1"}))
    assert redacted(machine).variables.values == {"KUBERNETES_SERVICE_HOST": "2001:db8::1"}


@each(
    ("origin", "expected"),
    [
        ("git+ssh://git@gitlab.corp.example.com/alice/torch.git", "git+ssh://host/user/torch.git"),
        ("https://alice:s@cr@t@gitlab.corp.example.com/torch.whl", "https://host/torch.whl"),
        ("https://download.pytorch.org/whl/torch.whl", "https://download.pytorch.org/whl/torch.whl"),
    ],
)
def test_private_origin_of_a_package_is_replaced(origin: str, expected: str) -> None:
    machine = with_facts(healthy(), torch__installs=(replace(install(), origin=origin),))
    first = redacted(machine, ALICE).torch.first
    assert first is not None
    assert first.origin == expected


def test_groups_and_addresses_are_recognized_by_their_field() -> None:
    values = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "CUDA_VERSION": "12.8.1.0"}
    machine = with_facts(healthy(), platform__groups=("alice", "video"), variables=Variables(values))
    out = redacted(machine, ALICE)
    assert out.platform.groups == ("user", "video")
    assert out.variables.values == {"KUBERNETES_SERVICE_HOST": "192.0.2.1", "CUDA_VERSION": "12.8.1.0"}


def test_home_of_the_user_is_derived_from_the_facts_of_the_machine() -> None:
    machine = with_facts(Machine(), python__user_site="/home/bob/.local", python__executable="/home/carol/bin/python")
    out = redacted(machine)
    assert (out.python.user_site, out.python.executable) == ("~/.local", "~user2/bin/python")


def test_home_variable_of_the_machine_wins_over_the_local_home() -> None:
    machine = with_facts(Machine(), variables=Variables({"HOME": "/home/bob"}))
    assert redact_text("/home/bob/x /home/alice/x", ALICE, machine) == "~/x ~user2/x"


@each(
    ("command", "expected"),
    [
        ("$ /home/alice/v/bin/python -m pip install x", "$ ~/v/bin/python -m pip install x"),
        ("$ '/home/alice/my env/bin/python' -m pip", '$ "$HOME/my env/bin/python" -m pip'),
        ("$ export LD_LIBRARY_PATH=/a:/home/alice/lib", "$ export LD_LIBRARY_PATH=/a:$HOME/lib"),
        ("$ export X='/a b:/home/alice/lib'", '$ export X="/a b:$HOME/lib"'),
        ("$ export X='~/lib' '~/a b'", '$ export X=$HOME/lib "$HOME/a b"'),
        ("$ '~/v/bin/python' -m pip", "$ ~/v/bin/python -m pip"),
        ("$ echo 'options nvidia x=1' | sudo tee /etc/x", "$ echo 'options nvidia x=1' | sudo tee /etc/x"),
    ],
)
def test_redacted_command_still_works_in_a_shell(command: str, expected: str) -> None:
    assert redact_text(command) == expected


def test_findings_are_redacted_with_the_machine() -> None:
    finding = Finding("U04", "error", "in /home/alice", ("see /home/alice/x",), ("$ rm /home/alice/x",))
    diagnosis = replace(judge_machine(at_home("alice", healthy())), cause=finding, findings=(finding,))
    out = redacted(diagnosis, ALICE)
    assert out.cause == out.findings[0] == Finding("U04", "error", "in ~", ("see ~/x",), ("$ rm ~/x",))


@each(
    ("line", "expected"),
    [
        ("$ /scratch/alice/venv/bin/python -m pip", "$ /scratch/alice/venv/bin/python -m pip"),
        ("$ export LD_LIBRARY_PATH=/gpfs/alice/mpi:/home/alice/x", "$ export LD_LIBRARY_PATH=/gpfs/alice/mpi:$HOME/x"),
        (f"$ CUDA_VISIBLE_DEVICES={UUID} python", f"$ CUDA_VISIBLE_DEVICES={UUID} python"),
        ("$ /home/bob/venv/bin/python", "$ /home/bob/venv/bin/python"),
        ("$ export X='/home/alice/a:/opt/$LIB' Y='b c'", "$ export X='/home/alice/a:/opt/$LIB' Y='b c'"),
        ("Take /scratch/alice/x and /home/alice/x away.", "Take /scratch/alice/x and ~/x away."),
        ("| Environment=X=/home/alice/x", "| Environment=X=/home/alice/x"),
    ],
)
def test_runnable_commands_keep_names_that_they_need(line: str, expected: str) -> None:
    finding = Finding("U04", "error", "in /scratch/alice", ("see /scratch/alice/x",), (line,))
    diagnosis = replace(judge_machine(at_home("alice", healthy())), cause=finding, findings=(finding,))
    out = redacted(diagnosis, ALICE, runnable=True)
    assert out.cause == Finding("U04", "error", "in /scratch/user", ("see /scratch/user/x",), (expected,))
    assert "/scratch/alice" not in json.dumps(redacted(diagnosis, ALICE).to_dict())


@each("unit", ["A", "a.", "1", "a@", "/a", "a/", "-", "serial ", "GPU-", "'", "~", "/mnt/c/Users", ":"])
def test_long_texts_are_redacted_in_linear_time(unit: str) -> None:
    text = unit * (200_000 // len(unit))  # with a quadratic algorithm this would take minutes
    redact_text(text)
    redact_text(f"$ {text}")


def test_names_here_finds_homes_users_and_hosts() -> None:
    names = names_here()
    assert all(names.homes)
    assert all(names.users)
    assert names.hosts


# -- GPU UUIDs --------------------------------------------------------------------------------------------------------


def with_two_gpus(value: str) -> Machine:
    machine = healthy()
    first, second = (replace(machine.driver.nvml.gpus[0], index=n, uuid=u) for n, u in enumerate((UUID, OTHER)))
    return with_facts(
        machine,
        driver__nvml__gpus=(first, second),
        driver__cuda__gpus=(replace(machine.driver.cuda.gpus[0], uuid=UUID),),
        variables=Variables({"CUDA_VISIBLE_DEVICES": value}),
        kernel__log=(f"NVRM: GPU at PCI:0000:17:00: {UUID}",),
    )


def selected_gpus(machine: Machine) -> object:
    visible = visible_devices(
        machine.variables.values["CUDA_VISIBLE_DEVICES"], tuple(gpu.uuid for gpu in machine.driver.nvml.gpus)
    )
    return visible.indices, visible.why, visible.error


DIGITS = st.sampled_from("0123456789abcdefABCDEF")


@given(
    st.lists(
        st.one_of(
            st.tuples(st.sampled_from([UUID, OTHER]), st.integers(4, 40)).map(lambda pair: pair[0][: pair[1]]),
            st.sampled_from([UUID.upper(), f"GPU-{OTHER[4:].replace('-', '')}", f"{UUID}x", "0", "7", "9" * 20, ""]),
            st.sampled_from([UUID[4:], UUID[4:].replace("-", ""), OTHER[4:], OTHER[4:].replace("-", "")]),
            st.text(DIGITS, min_size=1, max_size=12).map("GPU-{}".format),
        ),
        min_size=1,
        max_size=3,
    ).map(",".join)
)
@example("GPU-6")
@example("GPU-deadbeef")
@example(f"MIG-GPU-{UUID[4:]}/1/0")
def test_fake_uuids_select_the_same_gpu(value: str) -> None:
    machine = with_two_gpus(value)
    out = redacted(machine, ALICE)
    assert selected_gpus(out) == selected_gpus(machine)
    text = json.dumps(out.to_dict()).lower().replace("-", "")
    assert UUID[4:12] not in text
    assert OTHER[4:12] not in text
    assert redacted(out, ALICE) == out


def test_a_gpu_has_the_same_fake_uuid_everywhere() -> None:
    out = redacted(with_two_gpus(UUID), ALICE)
    (first, second), (own,) = out.driver.nvml.gpus, out.driver.cuda.gpus
    assert first.uuid == own.uuid == out.variables.values.get("CUDA_VISIBLE_DEVICES") != second.uuid
    assert isinstance(out.kernel.log, tuple)
    assert first.uuid in out.kernel.log[0]
    assert re.fullmatch(r"GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", first.uuid)


# -- complete machines ------------------------------------------------------------------------------------------------

ASCII = st.characters(codec="ascii")  # for all characters hypothesis would first build a table
USERS = st.from_regex(r"[a-z][a-z0-9_.-]{2,11}[a-z0-9]", fullmatch=True, alphabet=ASCII)
HOSTS = st.from_regex(r"[a-z][a-z0-9-]{2,11}[a-z0-9](\.[a-z]{2,8}){0,2}", fullmatch=True, alphabet=ASCII)


@given(USERS, HOSTS, st.sampled_from(sorted(MACHINES)))
def test_no_name_remains_and_redaction_is_idempotent(user: str, host: str, kind: str) -> None:
    machine = MACHINES[kind]
    plain = json.dumps(machine.to_dict())
    short = host.partition(".")[0]
    assume(user not in plain and short not in plain and short not in user and user not in host)
    assume(not {user, short} & {"host", "user", "venv", "scratch", "bashrc"} and "192" not in short)
    names = Names((f"/home/{user}",), (user,), (host,))
    named_machine = with_facts(
        at_home(user, machine), kernel__log=(f"Nov 15 {host} kernel: NVRM", f"{short} kernel: {user}@{host}")
    )
    out = redacted(named_machine, names)
    text = json.dumps(out.to_dict())
    assert user not in text
    assert short not in text
    assert redacted(out, names) == out
    assert redacted(out) == out


@each("kind", MACHINES)
def test_redacted_machine_gets_the_same_diagnosis(kind: str) -> None:
    machine = at_home("alice", MACHINES[kind])
    original, result = judge_machine(machine), judge_machine(redacted(machine, ALICE))
    assert result.status == original.status
    assert [finding.code for finding in result.findings] == [finding.code for finding in original.findings]
    assert [muted.finding.code for muted in result.muted] == [muted.finding.code for muted in original.muted]


@each("shell", ["powershell", "cmd", "", "bash"])
@each("user", ["mary", "mary anne", "Jo O'Neil & Co"])
def test_commands_for_windows_keep_the_home_that_no_shell_expands_and_reports_lose_it(shell: str, user: str) -> None:
    home = f"C:\\Users\\{user}"
    machine = with_facts(
        CPU_BUILD,
        platform=Platform("Windows", "AMD64", shell=shell),
        python__executable=f"{home}\\env\\Scripts\\python.exe",
        python__prefix=f"{home}\\env",
    )
    diagnosis, names = judge_machine(machine), Names((home,), (user,))
    for_owner = redacted(diagnosis, names, runnable=True)
    assert diagnosis.cause
    assert for_owner.cause
    assert for_owner.cause.fix == diagnosis.cause.fix
    assert any("python.exe" in line for line in for_owner.cause.fix)
    text = json.dumps(redacted(diagnosis, names).to_dict())
    assert not re.search("mary|Neil", text)
