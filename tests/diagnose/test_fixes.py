"""Fixes for this machine: the right tool, the right package, the right shell."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.diagnose.machines import card, changed, healthy, in_container, in_slurm, in_wsl

from transload.diagnose import fixes
from transload.machine import Machine, NvmlGpu, Surroundings


def commands(lines: tuple[str, ...]) -> list[str]:
    return [line[2:] for line in lines if line.startswith("$ ")]


def on(distribution: str, manager: str, like: tuple[str, ...] = ()) -> Machine:
    return changed(
        healthy(),
        platform__distribution=distribution,
        platform__distribution_like=like,
        platform__package_manager=manager,
    )


@pytest.mark.parametrize(
    ("machine", "expected"),
    [
        (on("ubuntu", "apt"), "sudo apt install nvidia-driver-580-open"),
        (on("linuxmint", "apt", ("ubuntu", "debian")), "sudo apt install nvidia-driver-580-open"),
        (on("debian", "apt"), "sudo apt install nvidia-open-580"),
        (on("rocky", "dnf", ("rhel", "centos", "fedora")), "sudo dnf install nvidia-open-580"),
        (on("fedora", "dnf"), "sudo dnf install akmod-nvidia-580xx xorg-x11-drv-nvidia-580xx-cuda"),
        (
            on("opensuse-leap", "zypper", ("suse", "opensuse")),
            "sudo zypper install nvidia-open-driver-G06-signed-kmp-default nvidia-compute-utils-G06",
        ),
    ],
)
def test_a_driver_is_installed_by_the_distributions_own_packages_and_then_the_machine_is_rebooted(
    machine: Machine, expected: str
) -> None:
    lines = commands(fixes.install_driver(machine, 580))
    assert expected in lines
    assert lines[-1] == "sudo reboot"


def test_the_flavour_of_the_kernel_module_is_heeded() -> None:
    assert "sudo apt install nvidia-driver-580" in commands(fixes.install_driver(healthy(), 580, open_module=False))
    assert "sudo apt install nvidia-driver-580-open" in commands(fixes.install_driver(healthy(), 580, open_module=True))


def test_no_branch_named_leaves_the_choice_to_the_distribution() -> None:
    assert commands(fixes.install_driver(healthy())) == ["sudo ubuntu-drivers install", "sudo reboot"]


def test_nobody_is_told_to_install_a_linux_driver_in_wsl_or_any_driver_in_a_container() -> None:
    assert commands(fixes.install_driver(in_wsl(healthy()), 580)) == []
    inside = fixes.install_driver(in_container(healthy()), 580)
    assert commands(inside) == []
    assert inside[0].startswith("On the host")


def test_an_unknown_distribution_gets_words_and_no_invented_command() -> None:
    lines = fixes.install_driver(on("plan9", ""), 580, open_module=True)
    assert commands(lines) == ["sudo reboot"]
    assert "580" in lines[0]
    assert "open kernel module" in lines[0]


def test_root_needs_no_sudo() -> None:
    assert fixes.sudo(changed(healthy(), platform__root=True), "modprobe nvidia") == "$ modprobe nvidia"


# -- Python


def with_card(capability: tuple[int, int], cuda: int, driver: str, device: int = 0x2684) -> Machine:
    gpu = NvmlGpu(0, name="a card", capability=capability)
    return changed(
        healthy(),
        hardware__pci=(card(device),),
        driver__nvml__gpus=(gpu,),
        driver__nvml__driver=driver,
        driver__nvml__cuda=cuda,
        driver__cuda__gpus=(),
        driver__cuda__version=cuda,
    )


def test_an_old_card_with_a_new_driver_gets_the_build_that_still_has_code_for_it() -> None:
    lines = commands(fixes.wheel(with_card((6, 1), 13000, "580.65.06")))
    assert lines[0] == "/opt/venv/bin/python -m pip uninstall -y torch"
    assert lines[1].endswith("--index-url https://download.pytorch.org/whl/cu126")


def test_a_new_card_with_an_old_driver_is_told_the_driver_it_needs() -> None:
    blind = changed(with_card((12, 0), 12040, "550.54.15", 0x2B85), driver__nvml__gpus=())
    lines = commands(fixes.wheel(blind))
    assert lines[:2] == ["sudo apt update", "sudo apt install nvidia-driver-570-open"]
    assert lines[-1].endswith("/cu128")


def test_an_ordinary_card_with_a_new_driver_takes_the_default_build() -> None:
    (_, line) = commands(fixes.wheel(with_card((8, 9), 13020, "595.71.05")))
    assert "--index-url" not in line


def test_a_driver_of_cuda_12_never_gets_a_build_of_cuda_13() -> None:
    choice = fixes.wheel_choice(with_card((8, 9), 12080, "570.124.06"))
    assert choice.build.startswith("cu12")


def test_what_is_installed_beside_torch_is_replaced_with_it() -> None:
    machine = changed(healthy(), python__packages={"torch": "2.13.0", "torchvision": "0.28.0"})
    assert all("torchvision" in line for line in commands(fixes.wheel(machine)))


@pytest.mark.parametrize(
    ("tool", "start"),
    [
        ("pip", "/opt/venv/bin/python -m pip install "),
        ("uv", "uv pip install --python /opt/venv/bin/python "),
        ("poetry", "poetry add "),
    ],
)
def test_packages_are_installed_with_the_tool_of_the_environment(tool: str, start: str) -> None:
    (line,) = commands(fixes.install(changed(healthy(), python__tool=tool), "einops"))
    assert line == f"{start}einops"


def test_conda_gets_its_own_package_unless_torch_came_from_pip() -> None:
    conda = changed(healthy(), python__tool="conda", python__prefix="/opt/conda/envs/my env")
    by_conda = replace(conda, torch=replace(conda.torch, installs=()))
    (line,) = commands(fixes.wheel(by_conda))
    assert line.startswith("conda install -p '/opt/conda/envs/my env' -c conda-forge pytorch-gpu")
    assert "-m pip install" in commands(fixes.wheel(conda))[-1]


def test_poetry_names_the_index_as_a_source() -> None:
    machine = changed(with_card((6, 1), 13000, "580.65.06"), python__tool="poetry")
    add, take = commands(fixes.wheel(machine))
    assert add.endswith("pytorch-cu126 https://download.pytorch.org/whl/cu126")
    assert "--source pytorch-cu126" in take


def test_a_python_that_belongs_to_the_system_is_left_alone() -> None:
    machine = changed(healthy(), python__externally_managed=True, python__executable="/usr/bin/python3")
    make, install = commands(fixes.install(machine, "torch"))
    assert make == "/usr/bin/python3 -m venv .venv"
    assert install == ".venv/bin/python -m pip install torch"


def test_a_path_with_blanks_is_quoted() -> None:
    machine = changed(healthy(), python__executable="/home/a b/bin/python")
    assert commands(fixes.install(machine, "torch>=2"))[0] == "'/home/a b/bin/python' -m pip install 'torch>=2'"


# -- the shell


@pytest.mark.parametrize(
    ("shell", "line"),
    [("bash", "unset A B"), ("", "unset A B"), ("fish", "set -e A; set -e B"), ("tcsh", "unsetenv A; unsetenv B")],
)
def test_variables_are_removed_in_the_words_of_the_shell(shell: str, line: str) -> None:
    assert commands(fixes.unset(changed(healthy(), platform__shell=shell), "A", "B"))[0] == line


def test_a_change_that_shall_last_is_made_where_the_variable_is_set() -> None:
    machine = changed(healthy(), variables__values={"A": "1"}, variables__origins={"A": ("/etc/environment:3",)})
    assert any("/etc/environment:3" in line for line in fixes.unset(machine, "A"))
    service = changed(machine, variables__origins={}, surroundings=Surroundings(service="train.service"))
    assert any("systemctl edit train.service" in line for line in fixes.unset(service, "A"))


def test_a_folder_is_taken_out_of_a_search_path_and_the_rest_stays() -> None:
    machine = changed(healthy(), variables__values={"LD_LIBRARY_PATH": "/a:/cuda/stubs/:/b c"})
    assert commands(fixes.drop_folder(machine, "LD_LIBRARY_PATH", "/cuda/stubs"))[0] == (
        "export LD_LIBRARY_PATH='/a:/b c'"
    )
    alone = changed(healthy(), variables__values={"LD_LIBRARY_PATH": "/cuda/stubs"})
    assert commands(fixes.drop_folder(alone, "LD_LIBRARY_PATH", "/cuda/stubs"))[0] == "unset LD_LIBRARY_PATH"


# -- containers


@pytest.mark.parametrize(
    ("machine", "words"),
    [
        (in_container(healthy()), "docker run --gpus all"),
        (in_container(healthy(), "podman"), "--device nvidia.com/gpu=all"),
        (in_container(healthy(), "apptainer"), "exec --nv"),
        (in_container(healthy(), "lxc"), "lxc config device add"),
        (in_slurm(healthy()), "--gres=gpu:1"),
        (changed(healthy(), surroundings=Surroundings(kubernetes=True, container="containerd")), "nvidia.com/gpu: 1"),
    ],
)
def test_each_kind_of_container_and_job_is_given_a_gpu_in_its_own_way(machine: Machine, words: str) -> None:
    assert any(words in line for line in fixes.give_gpu(machine))
