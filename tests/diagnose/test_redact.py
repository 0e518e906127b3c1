"""What a redacted report keeps and what it must not: names go, words and verdicts stay."""

from __future__ import annotations

import json
import re
from dataclasses import replace

from hypothesis import assume, example, given
from hypothesis import strategies as st
from tests.diagnose.machines import UUID, bare, changed, dead, healthy, in_container, in_slurm, in_wsl, install, refused
from tests.each import each

from transload.diagnose.redact import Names, names_here, redacted
from transload.diagnose.report import judge_machine
from transload.diagnose.rules.process import visible_devices
from transload.findings import Finding
from transload.machine import Machine, Node, Torch, Variables

ALICE = Names(homes=("/home/alice",), users=("alice",), hosts=("quill.example.org",))
OTHER = "GPU-77aa0000-0000-4000-8000-00000000000b"


def said(text: str, names: Names = ALICE, machine: Machine | None = None) -> str:
    """The text as it stands in a redacted machine."""
    around = replace(machine or Machine(), taken=text)
    return redacted(around, names).taken


def at_home(user: str, machine: Machine) -> Machine:
    """The machine, used by somebody from a home of their own."""
    home = f"/home/{user}"
    values = {**machine.variables.values, "HOME": home, "LD_LIBRARY_PATH": f"{home}/lib:/scratch/{user}/cuda/lib64"}
    venv = f"{home}/venv"
    torch = replace(install(), location=f"{venv}/lib/python3.11/site-packages/torch")
    return changed(
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


CPU_BUILD = changed(
    dead(healthy(), error="AssertionError: Torch not compiled with CUDA enabled"),
    torch=Torch(installs=(replace(install(), version="2.13.0+cpu", cuda=""),)),
)
MACHINES = {
    "healthy": healthy(),
    "bare": bare(),
    "cpu build": CPU_BUILD,
    "container": in_container(healthy()),
    "slurm": in_slurm(healthy()),
    "wsl": in_wsl(healthy()),
    **{f"cuInit {code}": refused(healthy(), code) for code in (3, 34, 100, 101, 802, 803, 999)},
    "no permission": changed(
        refused(healthy(), 100),
        nodes__found=(
            Node("/dev/nvidiactl", mode=0o600, gid=44, group="video", error="EACCES"),
            Node("/dev/nvidia0", major=195),
            Node("/dev/nvidia-uvm", major=238),
        ),
    ),
}


# -- words ------------------------------------------------------------------------------------------------------------


@each(
    ("text", "shown"),
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
def test_names_go(text: str, shown: str) -> None:
    assert said(text) == shown


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
def test_words_stay(text: str) -> None:
    assert said(text) == text


@each("name", ["root", "ubuntu", "cuda", "torch", "user", "lib", "docker"])
def test_a_name_that_is_a_word_of_machines_is_none(name: str) -> None:
    text = f"{name}-cause of {name}: /opt/{name}/lib/{name}, {name}@x, {name}.service"
    assert said(text, Names(users=(name,), hosts=(name,))) == text


def test_root_keeps_its_home() -> None:
    text = "/root/venv/bin/python, /home/bob/x"
    assert said(text, Names(homes=("/root",), users=("root",))) == "/root/venv/bin/python, ~user2/x"


def test_a_home_may_be_anywhere() -> None:
    names = Names(homes=("/u/dept/alice", "/gpfs/users/alice"), users=("alice",))
    assert said("/u/dept/alice/x /gpfs/users/alice/x /u/dept/bob", names) == "~/x ~/x /u/dept/bob"


def test_a_host_that_may_not_be_a_word_goes_wherever_it_stands() -> None:
    names = Names(hosts=("node17.cluster.corp.com",))
    assert said("on node17, node18.cluster.corp.com", names) == "on host, host"


def test_an_address_of_the_newer_kind_is_known_by_its_field() -> None:
    machine = changed(healthy(), variables=Variables({"KUBERNETES_SERVICE_HOST": "fd00:10::1"}))
    assert redacted(machine).variables.values == {"KUBERNETES_SERVICE_HOST": "2001:db8::1"}


@each(
    ("origin", "shown"),
    [
        ("git+ssh://git@gitlab.corp.example.com/alice/torch.git", "git+ssh://host/user/torch.git"),
        ("https://alice:s@cr@t@gitlab.corp.example.com/torch.whl", "https://host/torch.whl"),
        ("https://download.pytorch.org/whl/torch.whl", "https://download.pytorch.org/whl/torch.whl"),
    ],
)
def test_where_a_company_keeps_its_packages_is_its_own(origin: str, shown: str) -> None:
    machine = changed(healthy(), torch__installs=(replace(install(), origin=origin),))
    first = redacted(machine, ALICE).torch.first
    assert first is not None
    assert first.origin == shown


def test_groups_and_addresses_are_known_by_their_field() -> None:
    values = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "CUDA_VERSION": "12.8.1.0"}
    machine = changed(healthy(), platform__groups=("alice", "video"), variables=Variables(values))
    out = redacted(machine, ALICE)
    assert out.platform.groups == ("user", "video")
    assert out.variables.values == {"KUBERNETES_SERVICE_HOST": "192.0.2.1", "CUDA_VERSION": "12.8.1.0"}


def test_whose_machine_from_elsewhere_it_is_stands_in_its_facts() -> None:
    machine = changed(Machine(), python__user_site="/home/bob/.local", python__executable="/home/carol/bin/python")
    out = redacted(machine)
    assert (out.python.user_site, out.python.executable) == ("~/.local", "~user2/bin/python")


def test_a_machine_from_elsewhere_is_not_taken_for_ones_own() -> None:
    machine = changed(Machine(), variables=Variables({"HOME": "/home/bob"}))
    assert said("/home/bob/x /home/alice/x", ALICE, machine) == "~/x ~user2/x"


@each(
    ("command", "shown"),
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
def test_a_command_still_works_where_it_is_pasted(command: str, shown: str) -> None:
    assert said(command) == shown


def test_findings_are_redacted_with_the_machine() -> None:
    found = Finding("U04", "error", "in /home/alice", ("see /home/alice/x",), ("$ rm /home/alice/x",))
    diagnosis = replace(judge_machine(at_home("alice", healthy())), cause=found, findings=(found,))
    out = redacted(diagnosis, ALICE)
    assert out.cause == out.findings[0] == Finding("U04", "error", "in ~", ("see ~/x",), ("$ rm ~/x",))


@each(
    ("line", "shown"),
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
def test_commands_for_the_owner_still_work(line: str, shown: str) -> None:
    found = Finding("U04", "error", "in /scratch/alice", ("see /scratch/alice/x",), (line,))
    diagnosis = replace(judge_machine(at_home("alice", healthy())), cause=found, findings=(found,))
    out = redacted(diagnosis, ALICE, runnable=True)
    assert out.cause == Finding("U04", "error", "in /scratch/user", ("see /scratch/user/x",), (shown,))
    assert "/scratch/alice" not in json.dumps(redacted(diagnosis, ALICE).to_dict())


@each("unit", ["A", "a.", "1", "a@", "/a", "a/", "-", "serial ", "GPU-", "'", "~", "/mnt/c/Users", ":"])
def test_long_texts_take_no_longer_than_they_must(unit: str) -> None:
    text = unit * (200_000 // len(unit))  # with anything quadratic this would take minutes
    said(text)
    said(f"$ {text}")


def test_who_runs_the_tests_is_found_out() -> None:
    names = names_here()
    assert all(names.homes)
    assert all(names.users)
    assert names.hosts


# -- ids --------------------------------------------------------------------------------------------------------------


def with_cards(value: str) -> Machine:
    machine = healthy()
    first, second = (replace(machine.driver.nvml.gpus[0], index=n, uuid=u) for n, u in enumerate((UUID, OTHER)))
    return changed(
        machine,
        driver__nvml__gpus=(first, second),
        driver__cuda__gpus=(replace(machine.driver.cuda.gpus[0], uuid=UUID),),
        variables=Variables({"CUDA_VISIBLE_DEVICES": value}),
        kernel__log=(f"NVRM: GPU at PCI:0000:17:00: {UUID}",),
    )


def chosen(machine: Machine) -> object:
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
def test_ids_are_faked_and_choose_the_same_card(value: str) -> None:
    machine = with_cards(value)
    out = redacted(machine, ALICE)
    assert chosen(out) == chosen(machine)
    text = json.dumps(out.to_dict()).lower().replace("-", "")
    assert UUID[4:12] not in text
    assert OTHER[4:12] not in text
    assert redacted(out, ALICE) == out


def test_one_card_has_one_fake_id_everywhere() -> None:
    out = redacted(with_cards(UUID), ALICE)
    (first, second), (own,) = out.driver.nvml.gpus, out.driver.cuda.gpus
    assert first.uuid == own.uuid == out.variables.values.get("CUDA_VISIBLE_DEVICES") != second.uuid
    assert isinstance(out.kernel.log, tuple)
    assert first.uuid in out.kernel.log[0]
    assert re.fullmatch(r"GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", first.uuid)


# -- everything -------------------------------------------------------------------------------------------------------

ASCII = st.characters(codec="ascii")  # of all characters hypothesis would first make a table
USERS = st.from_regex(r"[a-z][a-z0-9_.-]{2,11}[a-z0-9]", fullmatch=True, alphabet=ASCII)
HOSTS = st.from_regex(r"[a-z][a-z0-9-]{2,11}[a-z0-9](\.[a-z]{2,8}){0,2}", fullmatch=True, alphabet=ASCII)


@given(USERS, HOSTS, st.sampled_from(sorted(MACHINES)))
def test_no_name_remains_and_twice_is_once(user: str, host: str, kind: str) -> None:
    machine = MACHINES[kind]
    plain = json.dumps(machine.to_dict())
    short = host.partition(".")[0]
    assume(user not in plain and short not in plain and short not in user and user not in host)
    assume(not {user, short} & {"host", "user", "venv", "scratch", "bashrc"} and "192" not in short)
    names = Names((f"/home/{user}",), (user,), (host,))
    full = changed(
        at_home(user, machine), kernel__log=(f"Nov 15 {host} kernel: NVRM", f"{short} kernel: {user}@{host}")
    )
    out = redacted(full, names)
    text = json.dumps(out.to_dict())
    assert user not in text
    assert short not in text
    assert redacted(out, names) == out
    assert redacted(out) == out


@each("kind", MACHINES)
def test_a_redacted_machine_is_judged_as_the_true_one(kind: str) -> None:
    machine = at_home("alice", MACHINES[kind])
    true, told = judge_machine(machine), judge_machine(redacted(machine, ALICE))
    assert told.status == true.status
    assert [finding.code for finding in told.findings] == [finding.code for finding in true.findings]
    assert [muted.finding.code for muted in told.muted] == [muted.finding.code for muted in true.muted]
