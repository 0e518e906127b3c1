"""Fixes for a machine: the right package manager, package and shell."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.diagnose.machines import healthy, in_container, in_slurm, in_wsl, pci_gpu, with_facts
from tests.diagnose.machines import install as installed
from tests.each import each

from transload.diagnose import fixes
from transload.diagnose.tables import steps as sections
from transload.machine import Machine, NvmlGpu, Surroundings
from transload.steps import Step, Steps, fix_of


def commands(fix: Steps) -> list[str]:
    return [step.text for step in fix if isinstance(step, Step) and step.kind == "command"]


def machine_on(distribution: str, manager: str, like: tuple[str, ...] = ()) -> Machine:
    return with_facts(
        healthy(),
        platform__distribution=distribution,
        platform__distribution_like=like,
        platform__package_manager=manager,
    )


H200, BLACKWELL, PASCAL, KEPLER, ADA = 0x2335, 0x2B85, 0x1B80, 0x128B, 0x2684
ROCKY = machine_on("rocky", "dnf", ("rhel", "centos", "fedora"))
SUSE = machine_on("opensuse-leap", "zypper", ("suse", "opensuse"))
ARCH, FEDORA, DEBIAN = machine_on("arch", "pacman"), machine_on("fedora", "dnf"), machine_on("debian", "apt")
NIXOS = machine_on("nixos", "nix")


def with_pci_devices(machine: Machine, *devices: int, flavour: str = "") -> Machine:
    """The machine with other GPUs on its PCI bus."""
    cards = tuple(pci_gpu(device, address=f"0000:{bus:02x}:00.0") for bus, device in enumerate(devices, 1))
    return with_facts(machine, hardware__pci=cards, kernel__flavour=flavour)


@each(
    ("machine", "expected"),
    [
        (machine_on("ubuntu", "apt"), "sudo apt install nvidia-driver-580-open"),
        (machine_on("linuxmint", "apt", ("ubuntu", "debian")), "sudo apt install nvidia-driver-580-open"),
        (DEBIAN, "sudo apt install nvidia-open"),
        (ROCKY, "sudo dnf install nvidia-open"),
        (machine_on("amzn", "dnf", ("fedora",)), "sudo dnf install nvidia-open"),
        (machine_on("ol", "dnf", ("fedora",)), "sudo dnf install nvidia-open"),
        (FEDORA, "sudo dnf install akmod-nvidia xorg-x11-drv-nvidia-cuda"),
        (ARCH, "sudo pacman -Syu nvidia-open nvidia-utils"),
        (SUSE, "sudo zypper install nvidia-open-driver-G06-signed-kmp-default nvidia-compute-utils-G06"),
        (NIXOS, "sudo nixos-rebuild switch"),
    ],
)
@each("minimum", [525, 570, 580])
def test_current_driver_of_the_distribution_meets_a_minimum_branch(
    machine: Machine, expected: str, minimum: int
) -> None:
    steps = fixes.install_driver(machine, at_least=minimum)
    assert expected in commands(steps)
    assert commands(steps)[-1] == "sudo reboot"
    assert not any("legacy" in line or "570" in line for line in fix_of(steps))


@each(
    ("machine", "expected"),
    [
        (healthy(), "$ sudo apt install nvidia-driver-580"),
        (DEBIAN, "$ sudo apt install linux-headers-$(uname -r) nvidia-driver firmware-misc-nonfree"),
        (ARCH, "From the AUR: nvidia-580xx-dkms and nvidia-580xx-utils"),
        (SUSE, "$ sudo zypper install nvidia-driver-G06-kmp-default nvidia-compute-utils-G06"),
    ],
)
def test_gpu_before_turing_gets_its_last_branch_without_the_open_module(machine: Machine, expected: str) -> None:
    lines = fix_of(fixes.install_driver(with_pci_devices(machine, PASCAL)))
    assert expected in lines
    assert not any("-open" in line for line in lines)


@each("machine", [healthy(), DEBIAN, ROCKY, FEDORA, ARCH, SUSE, NIXOS, machine_on("plan9", "")])
@each("options", [{}, {"at_least": 525}, {"at_least": 580}, {"exactly": 580}])
def test_no_distribution_gets_the_open_module_for_a_gpu_before_turing(
    machine: Machine, options: dict[str, int]
) -> None:
    lines = " ".join(fix_of(fixes.install_driver(with_pci_devices(machine, PASCAL, flavour="open"), **options)))
    assert "nvidia-open" not in lines
    assert "-open" not in lines
    assert "open = true" not in lines


def test_kepler_alone_gets_branch_470() -> None:
    assert "sudo apt install nvidia-driver-470" in commands(fixes.install_driver(with_pci_devices(healthy(), KEPLER)))
    packages = "akmod-nvidia-470xx xorg-x11-drv-nvidia-470xx-cuda"
    assert f"sudo dnf install {packages}" in commands(fixes.install_driver(with_pci_devices(FEDORA, KEPLER)))
    assert any("legacy_470" in line for line in fix_of(fixes.install_driver(with_pci_devices(NIXOS, KEPLER))))


@each(
    ("devices", "generations"),
    [
        ((ADA, KEPLER), "Ada and Kepler"),
        ((KEPLER, ADA), "Ada and Kepler"),
        ((PASCAL, BLACKWELL), "Blackwell and Pascal"),
    ],
)
def test_driver_for_the_newer_gpus_is_chosen_if_none_supports_all(devices: tuple[int, ...], generations: str) -> None:
    lines = fix_of(fixes.install_driver(with_pci_devices(healthy(), *devices)))
    assert generations in lines[0]
    assert not any("nvidia-driver-470" in line for line in lines)


def test_gpus_of_two_generations_share_a_driver_that_supports_both() -> None:
    assert "sudo apt install nvidia-driver-580" in commands(
        fixes.install_driver(with_pci_devices(healthy(), ADA, PASCAL))
    )


def test_nvidia_smi_has_its_full_path_under_wsl() -> None:
    assert fixes.smi(healthy()) == "nvidia-smi"
    assert fixes.smi(in_wsl(healthy())) == "/usr/lib/wsl/lib/nvidia-smi"


def test_minimum_above_the_last_branch_of_the_gpu_has_no_commands() -> None:
    (line,) = fix_of(fixes.install_driver(with_pci_devices(healthy(), KEPLER), at_least=580))
    assert line.startswith("Branch 470 is the last driver for Kepler")


def test_loaded_module_decides_the_flavour_for_an_unknown_gpu() -> None:
    for flavour, package in (("open", "nvidia-driver-580-open"), ("proprietary", "nvidia-driver-580")):
        lines = commands(fixes.install_driver(with_pci_devices(healthy(), flavour=flavour), at_least=580))
        assert f"sudo apt install {package}" in lines


def test_fedora_gets_no_package_for_an_older_branch() -> None:
    steps = fixes.install_driver(FEDORA, exactly=570)
    assert commands(steps) == ["sudo reboot"]
    assert "branch 570" in fix_of(steps)[0]


def test_ubuntu_chooses_the_driver_if_no_branch_is_given() -> None:
    assert commands(fixes.install_driver(healthy())) == [
        "sudo apt install ubuntu-drivers-common",
        "sudo ubuntu-drivers install",
        "sudo reboot",
    ]


def test_no_driver_is_installed_in_wsl_or_in_a_container() -> None:
    assert commands(fixes.install_driver(in_wsl(healthy()), at_least=580)) == []
    inside = fixes.install_driver(in_container(healthy()), at_least=580)
    assert commands(inside) == []
    assert fix_of(inside)[0].startswith("On the host")
    assert "branch 580 or newer" in fix_of(inside)[1]


@each(
    ("machine", "command"),
    [
        (machine_on("kali", "apt", ("debian",)), "sudo apt install --reinstall libcuda1"),
        (FEDORA, "sudo dnf reinstall libcuda1"),
        (SUSE, "sudo zypper install --force libcuda1"),
        (ARCH, "sudo pacman -S libcuda1"),
    ],
)
def test_package_is_reinstalled(machine: Machine, command: str) -> None:
    names = dict.fromkeys(("apt", "dnf", "zypper", "pacman"), "libcuda1")
    assert commands(fixes.install_package(machine, again=True, **names)) == [command]


def test_family_of_a_distribution() -> None:
    assert [
        fixes.family(machine)
        for machine in (machine_on("kali", "apt", ("debian",)), ROCKY, FEDORA, machine_on("void", ""))
    ] == [*("debian", "rhel", "fedora", "other")]


def test_unknown_distribution_gets_advice_without_an_install_command() -> None:
    steps = fixes.install_driver(with_pci_devices(machine_on("plan9", ""), BLACKWELL), exactly=580)
    assert commands(steps) == ["sudo reboot"]
    assert "580" in fix_of(steps)[0]
    assert "open kernel module" in fix_of(steps)[0]


def test_every_section_of_the_steps_table_is_used() -> None:
    folder = Path(fixes.__file__).parent
    code = "".join(path.read_text(encoding="utf-8") for path in (*folder.glob("rules/*.py"), Path(fixes.__file__)))
    composed = tuple(f"{part}: " for part in ("Driver", "Start", "Permanently", "Install", "Remove", "List"))
    composed += ("N01 ", "R01", "T07 ", "U09 ", "X12 ", "CUDA_VISIBLE_DEVICES")  # the code composes these names
    names = {name.partition(" on ")[0] for name in sections()}
    assert [name for name in names if f'"{name}"' not in code and not name.startswith(composed)] == []


def test_steps_on_the_host_of_a_container_are_marked_and_use_sudo() -> None:
    inside = with_facts(in_container(healthy()), platform__root=True)
    to_host = "On the host, not in this container:"
    assert fix_of(fixes.steps(inside, "D06"))[1:] == (
        to_host,
        "$ sudo ausearch -m avc -ts recent",
        "$ sudo setsebool -P container_use_devices on",
    )
    assert fix_of(fixes.steps(inside, "H04"))[0] == to_host
    assert to_host not in fix_of(fixes.steps(healthy(), "H04"))
    assert commands(fixes.steps(inside, "D02", path="/dev/nvidia0", make="nvidia-modprobe"))[0] == "rm -r /dev/nvidia0"


def test_step_is_omitted_if_its_condition_is_false() -> None:
    assert len(fixes.steps(healthy(), "M01")) == 5
    assert len(fixes.steps(in_container(healthy()), "M01")) == 8
    assert commands(fixes.steps(healthy(), "X06", smi="smi")) == ["smi"]


def test_write_line_quotes_and_uses_sudo_unless_root() -> None:
    line = fixes.write_line(healthy(), "/opt/my lib", file="/etc/ld.so.conf.d/a.conf")
    assert line.text == "echo '/opt/my lib' | sudo tee /etc/ld.so.conf.d/a.conf"
    inside = with_facts(in_container(healthy()), platform__root=True)
    assert fixes.write_line(inside, "a", "b", file="/f").text == "printf '%s\\n' a b | tee /f"
    assert fixes.write_line(inside, "a", "b", file="/f", host=True).text == "printf '%s\\n' a b | sudo tee /f"


def test_root_needs_no_sudo() -> None:
    assert fixes.sudo(with_facts(healthy(), platform__root=True), "modprobe nvidia").text == "modprobe nvidia"


# -- Python packages


def with_gpu(capability: tuple[int, int], cuda: int, driver: str, device: int = 0x2684) -> Machine:
    gpu = NvmlGpu(0, name="a card", capability=capability)
    return with_facts(
        healthy(),
        hardware__pci=(pci_gpu(device),),
        driver__nvml__gpus=(gpu,),
        driver__nvml__driver=driver,
        driver__nvml__cuda=cuda,
        driver__cuda__gpus=(),
        driver__cuda__version=cuda,
    )


def test_old_gpu_with_a_new_driver_gets_a_build_with_code_for_it() -> None:
    lines = commands(fixes.install_wheel(with_gpu((6, 1), 13000, "580.65.06")))
    assert lines[0] == "/opt/venv/bin/python -m pip uninstall -y torch nvidia-cudnn-cu13"
    assert lines[1].endswith("--index-url https://download.pytorch.org/whl/cu126")


def test_gpu_bound_to_vfio_is_ignored() -> None:
    unknown = with_facts(with_gpu((8, 9), 13000, "580.65.06"), driver__nvml__gpus=())
    both = with_facts(unknown, hardware__pci=(pci_gpu(ADA), pci_gpu(KEPLER, "vfio-pci", address="0000:02:00.0")))
    assert fixes.wheel_choice(both) == fixes.wheel_choice(unknown)


def test_only_official_builds_get_an_index_url() -> None:
    for build, official in (("cu126", True), ("computecanada", False)):
        machine = with_facts(healthy(), torch__installs=(installed(f"2.13.0+{build}"),))
        lines = fix_of(fixes.reinstall(machine, gpu=None))
        assert any(f"/whl/{build}" in line for line in lines) is official


def test_new_gpu_gets_the_driver_it_needs() -> None:
    driver_without_gpu = with_facts(with_gpu((12, 0), 12040, "550.54.15", 0x2B85), driver__nvml__gpus=())
    lines = commands(fixes.install_wheel(driver_without_gpu))
    assert lines[:2] == ["sudo apt update", "sudo apt install nvidia-driver-580-open"]
    assert lines[-1].endswith("-m pip install torch==2.13.0")


def test_ada_gpu_with_a_new_driver_gets_the_default_build() -> None:
    (_, line) = commands(fixes.install_wheel(with_gpu((8, 9), 13020, "595.71.05")))
    assert "--index-url" not in line


def test_driver_for_cuda_12_gets_a_cuda_12_build() -> None:
    choice = fixes.wheel_choice(with_gpu((8, 9), 12080, "570.124.06"))
    assert choice.build.startswith("cu12")


def test_torchvision_is_replaced_together_with_torch() -> None:
    machine = with_facts(healthy(), python__packages={"torch": "2.13.0", "torchvision": "0.28.0"})
    assert all("torchvision" in line for line in commands(fixes.install_wheel(machine)))


def test_installed_release_is_kept_if_it_has_a_suitable_build() -> None:
    old = replace(healthy().torch, installs=(installed("2.4.1+cpu", ""),))
    steps = fixes.install_wheel(replace(healthy(), torch=old))
    assert commands(steps)[-1].endswith("-m pip install torch==2.4.1")
    assert any("2.15.0" in line for line in fix_of(steps))
    unfit = with_gpu((12, 0), 13000, "580.65.06", 0x2B85)  # no build of torch 2.4 has code for it
    assert "torch==2.4.1" not in commands(fixes.install_wheel(replace(unfit, torch=old)))[-1]


def test_cuda_packages_of_the_old_torch_are_removed_with_it() -> None:
    packages = {"torch": "2.13.0", "nvidia-cudnn-cu13": "9", "nvidia-cudnn-cu12": "9", "nvidia-nccl-cu13": "2"}
    machine = with_facts(with_gpu((8, 9), 12040, "550.54.14"), python__packages=packages)
    remove, install = commands(fixes.install_wheel(machine))
    assert remove.endswith("pip uninstall -y torch nvidia-cudnn-cu13 nvidia-nccl-cu13")
    assert install.endswith("/cu126")
    poetry = with_facts(healthy(), python__tool="poetry", python__packages={"torch": "2.13.0", "nvidia-nccl-cu12": "2"})
    assert commands(fixes.install_wheel(poetry))[0] == "poetry remove torch"


def test_guessed_build_is_called_likely() -> None:
    unknown = with_facts(with_gpu((8, 9), 0, ""), kernel__version="", driver__nvml__driver="")
    likely = "Why this build (likely, but not certain, to work): "
    assert any(line.startswith(likely) for line in fix_of(fixes.install_wheel(unknown)))
    assert any(line.startswith("Why this build: ") for line in fix_of(fixes.install_wheel(healthy())))


def test_missing_pip_is_installed_once_before_it_is_used() -> None:
    lines = commands(fixes.install_wheel(with_facts(healthy(), python__pip=False)))
    assert [line.split(" -m ")[1].split()[:2] for line in lines] == [
        ["ensurepip"],
        ["pip", "uninstall"],
        ["pip", "install"],
    ]


@each(
    ("tool", "start"),
    [
        ("pip", "/opt/venv/bin/python -m pip install "),
        ("uv", "uv pip install --python /opt/venv/bin/python "),
        ("poetry", "poetry add "),
    ],
)
def test_packages_are_installed_with_the_tool_of_the_environment(tool: str, start: str) -> None:
    (line,) = commands(fixes.install(with_facts(healthy(), python__tool=tool), "einops"))
    assert line == f"{start}einops"


def test_conda_package_is_used_unless_torch_came_from_pip() -> None:
    conda = with_facts(healthy(), python__tool="conda", python__prefix="/opt/conda/envs/my env")
    without_torch = replace(conda, torch=replace(conda.torch, installs=()))
    (line,) = commands(fixes.install_wheel(without_torch))
    assert line.startswith("conda install -p '/opt/conda/envs/my env' -c conda-forge pytorch-gpu")
    assert "-m pip install" in commands(fixes.install_wheel(conda))[-1]


def conda_machine(tool: str = "conda") -> Machine:
    """A machine with a torch installed by conda."""
    conda = with_facts(healthy(), python__tool=tool, python__prefix="/opt/conda/envs/x")
    conda_torch = replace(installed("2.13.0"), installer="conda", conda_build="cuda130_py311")
    return replace(conda, torch=replace(conda.torch, installs=(conda_torch,)))


def test_conda_packages_are_removed_and_installed_with_conda() -> None:
    where = "-p /opt/conda/envs/x"
    assert commands(fixes.uninstall(conda_machine(), "torch", "torchvision")) == [
        f"conda remove --force {where} pytorch torchvision"
    ]
    assert commands(fixes.install(conda_machine(), "--no-deps", "nvidia-cudnn-cu13==9.20.0.48", force=True)) == [
        f"conda install {where} -c conda-forge --force-reinstall cudnn"
    ]
    assert commands(fixes.install(conda_machine(), "torch==2.13.0", "torchvision")) == [
        f"conda install {where} -c conda-forge pytorch=2.13.0 torchvision"
    ]
    assert commands(fixes.install_wheel(conda_machine(), "2.13.0")) == [
        f'conda install {where} -c conda-forge --force-reinstall "pytorch=2.13.0"'
    ]
    assert commands(fixes.uninstall(conda_machine("pixi"), "torch")) == ["pixi remove pytorch"]


def test_packages_not_in_conda_are_installed_with_pip() -> None:
    assert "-m pip install" in commands(fixes.install(conda_machine(), "mmcv"))[0]
    rocm = commands(fixes.install(conda_machine(), "torch", index="https://download.pytorch.org/whl/rocm7.2"))
    assert "-m pip install" in rocm[0]
    assert fixes.reinstall_conda_libraries(healthy(), "libcudnn.so.9") == ()


def test_uv_and_pdm_projects_record_new_packages() -> None:
    machine = with_facts(with_gpu((6, 1), 13000, "580.65.06"), python__tool="uv", python__project=True)
    (line,) = commands(fixes.install_wheel(machine))
    assert line == "uv add --index pytorch-cu126=https://download.pytorch.org/whl/cu126 torch==2.13.0"
    assert commands(fixes.install(machine, "einops")) == ["uv add einops"]
    assert commands(fixes.install(with_facts(machine, python__tool="pdm"), "einops")) == ["pdm add einops"]


def test_poetry_adds_the_index_as_a_source() -> None:
    machine = with_facts(with_gpu((6, 1), 13000, "580.65.06"), python__tool="poetry")
    add, install = commands(fixes.install_wheel(machine))
    assert add.endswith("pytorch-cu126 https://download.pytorch.org/whl/cu126")
    assert "--source pytorch-cu126" in install


def test_externally_managed_python_gets_a_virtual_environment() -> None:
    machine = with_facts(healthy(), python__externally_managed=True, python__executable="/usr/bin/python3")
    create, install = commands(fixes.install(machine, "torch"))
    assert create == "/usr/bin/python3 -m venv .venv"
    assert install == ".venv/bin/python -m pip install torch"


def test_path_with_spaces_is_quoted() -> None:
    machine = with_facts(healthy(), python__executable="/home/a b/bin/python")
    assert commands(fixes.install(machine, "torch>=2"))[0] == "'/home/a b/bin/python' -m pip install 'torch>=2'"


# -- shells


@each(
    ("shell", "line"),
    [("bash", "unset A B"), ("", "unset A B"), ("fish", "set -e A; set -e B"), ("tcsh", "unsetenv A; unsetenv B")],
)
def test_unset_uses_the_syntax_of_the_shell(shell: str, line: str) -> None:
    assert commands(fixes.unset(with_facts(healthy(), platform__shell=shell), "A", "B"))[0] == line


def test_permanent_change_names_the_place_where_the_variable_is_set() -> None:
    machine = with_facts(healthy(), variables__values={"A": "1"}, variables__origins={"A": ("/etc/environment:3",)})
    assert any("/etc/environment:3" in line for line in fix_of(fixes.unset(machine, "A")))
    service = with_facts(machine, variables__origins={}, surroundings=Surroundings(service="train.service"))
    assert (
        fix_of(fixes.unset(service, "A"))[1]
        == "To make it permanent, remove it in the unit: systemctl edit train.service"
    )
    escaped = with_facts(service, surroundings=Surroundings(service=r"a\x2db.service"))
    assert fix_of(fixes.set_variable(escaped, "A", "2"))[1] == (
        r"To make it permanent, change it in the unit: systemctl edit 'a\x2db.service'"
    )


def test_drop_folder_keeps_the_rest_of_the_search_path() -> None:
    machine = with_facts(healthy(), variables__values={"LD_LIBRARY_PATH": "/a:/cuda/stubs/:/b c"})
    assert commands(fixes.drop_folder(machine, "LD_LIBRARY_PATH", "/cuda/stubs"))[0] == (
        "export LD_LIBRARY_PATH='/a:/b c'"
    )
    other = with_facts(
        healthy(), variables__values={"LD_LIBRARY_PATH": "/cuda/stubs;/b"}
    )  # the loader also splits at ;
    assert commands(fixes.drop_folder(other, "LD_LIBRARY_PATH", "/cuda/stubs"))[0] == "export LD_LIBRARY_PATH=/b"
    alone = with_facts(healthy(), variables__values={"LD_LIBRARY_PATH": "/cuda/stubs"})
    assert commands(fixes.drop_folder(alone, "LD_LIBRARY_PATH", "/cuda/stubs"))[0] == "unset LD_LIBRARY_PATH"


def test_drop_folder_recognizes_other_spellings_of_the_folder() -> None:
    for value in ("libs/shim:/x", "./libs/shim/:/x", "/home/me/libs//shim:/x"):
        machine = with_facts(healthy(), variables__values={"LD_LIBRARY_PATH": value})
        line = commands(fixes.drop_folder(machine, "LD_LIBRARY_PATH", "/home/me/libs/shim"))[0]
        assert line == "export LD_LIBRARY_PATH=/x"


# -- kernel modules


def test_dependent_modules_are_unloaded_first() -> None:
    lines = commands(fixes.modprobe_option(healthy(), "options nvidia NVreg_X=1", "x.conf"))
    assert lines[0] == "echo 'options nvidia NVreg_X=1' | sudo tee /etc/modprobe.d/x.conf"
    assert "sudo modprobe -r nvidia_modeset nvidia_uvm nvidia" in lines
    alone = commands(fixes.modprobe_option(healthy(), "options nvidia_uvm a=1", "x.conf"))
    assert alone[1:] == ["sudo modprobe -r nvidia_uvm", "sudo modprobe nvidia_uvm"]


# -- containers and jobs


@each(
    ("machine", "text"),
    [
        (in_container(healthy()), "docker run --gpus all"),
        (in_container(healthy(), "podman"), "--device nvidia.com/gpu=all"),
        (in_container(healthy(), "apptainer"), "apptainer exec --nv"),
        (in_container(healthy(), "singularity"), "singularity exec --nv"),
        (in_container(healthy(), "nspawn"), "systemd-nspawn --bind=/dev/nvidiactl"),
        (in_container(healthy(), "lxc"), "lxc config device add"),
        (in_slurm(healthy()), "--gres=gpu:1"),
        (
            with_facts(healthy(), surroundings=Surroundings(kubernetes=True, container="containerd")),
            "nvidia.com/gpu: 1",
        ),
    ],
)
def test_start_with_gpu_for_each_kind_of_container_and_job(machine: Machine, text: str) -> None:
    assert any(text in line for line in fix_of(fixes.start_with_gpu(machine)))
