"""Texts from below torch: nvidia-smi, the kernel's log, containers."""

from __future__ import annotations

from typing import Any

from transload.explaining.known import Known, Values

__all__ = ["TABLE"]

# What NVIDIA's container tool found on the host, and which causes that has there.
_ON_THE_HOST: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("driver not loaded", "the host's kernel has no NVIDIA driver loaded", ("K01", "K02", "K03", "K04")),
    ("load library failed", "the host has no library of NVIDIA's driver", ("K01", "U06", "H01")),
    ("no adapters were found", "WSL does not get the GPU from Windows", ("U08", "U11", "W01")),
    ("version mismatch", "the host's driver was updated, and the old one is still loaded", ("U01",)),
    ("unknown error", "the host's driver does not start", ("D01", "K11", "H02")),
    ("permission", "the tool may not open the host's device nodes", ("D03", "D06")),
)


def _host(values: Values, _: str) -> dict[str, Any]:
    """Whose fault it is stands in few words at the end."""
    why = values["why"].lower()
    found = next(((words, causes) for sign, words, causes in _ON_THE_HOST if sign in why), None)
    words, causes = found or ("the driver of the host does not answer", ("K01", "K02", "D01", "U01", "H02"))
    return {"values": {"host": words}, "causes": causes}


TABLE: tuple[Known, ...] = (
    Known(
        "smi-no-driver",
        ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.",),
        "The kernel has no NVIDIA driver loaded: it is not installed, was not built for the running kernel, was "
        "rejected by Secure Boot, or nouveau holds the card.",
        needs=("machine",),
        causes=("K01", "K02", "K03", "K04"),
    ),
    Known(
        "smi-mismatch",
        (
            "Failed to initialize NVML: Driver/library version mismatch",
            "RM has detected an NVML/RM version mismatch",
            "NVMLError_LibRmVersionMismatch",
        ),
        "The driver was updated, and the old one is still loaded in the kernel. In a container: its libraries are not "
        "of the host's version.",
        needs=("machine",),
        causes=("U01", "C10", "C07"),
    ),
    Known(
        "smi-unknown",
        ("Failed to initialize NVML: Unknown Error",),
        "The process may not open the device nodes: typical of a container that lost its GPU when the host's systemd "
        "was reloaded.",
        needs=("machine",),
        causes=("D04", "D05", "H02"),
    ),
    Known(
        "smi-permission",
        ("Failed to initialize NVML: Insufficient Permissions",),
        "The user may not open the device nodes.",
        needs=("machine",),
        causes=("D03", "D06"),
    ),
    Known(
        "smi-blocked",
        ("Failed to initialize NVML: GPU access blocked by the operating system",),
        "Windows does not let WSL use the GPU: its driver or WSL is too old for that, or the card is in TCC mode, "
        "which WSL cannot use.",
        (
            "On Windows: update NVIDIA's driver, then wsl --update and wsl --shutdown.",
            "A card of the data centre must be in WDDM or MCDM mode (nvidia-smi shows TCC):",
            "$ nvidia-smi -g 0 -dm 0",
        ),
        needs=("machine",),
        causes=("U08", "U09", "C10"),
    ),
    Known(
        "smi-missing",
        (
            "nvidia-smi: command not found",
            "nvidia-smi: not found",
            'exec: "nvidia-smi": executable file not found',
            "'nvidia-smi' is not recognized as an internal or external command",
        ),
        "There is no nvidia-smi here. It comes with the driver: none is installed, or the container was not given the "
        "GPU. Neither torch nor the CUDA toolkit brings it, and torch does not need it.",
        needs=("machine",),
        causes=("K01", "C01", "C03", "U06", "H01", "W01"),
    ),
    Known(
        "smi-no-devices",
        ("No devices were found",),
        "The kernel driver is loaded and drives no card: it does not start, or the driver is not for it.",
        needs=("machine",),
        causes=("H04", "H05", "K06", "K07", "K08", "K09"),
        context=r"nvidia|NVIDIA|NVRM",
    ),
    Known(
        "nvml-not-loaded",
        ("Driver Not Loaded", "NVMLError_DriverNotLoaded"),
        "NVML finds no loaded driver. Under WSL that is so even where CUDA works.",
        needs=("machine",),
        causes=("K01", "K02", "U12"),
        context=r"NVML|nvml",
    ),
    Known(
        "nvml-missing",
        ("NVML Shared Library Not Found", "NVMLError_LibraryNotFound"),
        "The library of NVML (libnvidia-ml.so.1) is not there: no driver is installed, a part of it is missing, or it "
        "is not passed on to this container.",
        needs=("machine",),
        causes=("U06", "K01", "C01", "H01"),
    ),
    Known(
        "off-the-bus",
        ("GPU has fallen off the bus", "Unable to determine the device handle for GPU {address:w} Unknown Error"),
        "A card no longer answers: power, heat, its seat, or the card itself.",
        needs=("machine",),
        causes=("H02",),
    ),
    Known(
        "card-does-not-start",
        ("RmInitAdapter failed!", "Cannot initialize GSP firmware RM", "unexpected WPR2 already up"),
        "The kernel driver knows the card and cannot start it.",
        needs=("machine",),
        causes=("H04", "H05"),
    ),
    Known(
        "secure-boot",
        (
            "could not insert 'nvidia': Key was rejected by service",
            "could not insert 'nvidia': Required key not available",
        ),
        "Secure Boot rejects the module of NVIDIA's driver, which is not signed with a key that the machine knows.",
        needs=("machine",),
        causes=("K03",),
    ),
    Known(
        "driver-too-new-for-card",
        ("is supported through the NVIDIA {branch:w} Legacy drivers", "NVIDIA driver will ignore this GPU"),
        "The driver is too new for the card, and ignores it.",
        needs=("machine",),
        causes=("K06",),
    ),
    Known(
        "open-module-cannot",
        ("is not supported by open nvidia.ko because it does not include the required GPU System Processor (GSP)",),
        "The open kernel module drives no card older than Turing.",
        needs=("machine",),
        causes=("K07",),
    ),
    Known(
        "open-module-needed",
        ("requires use of the NVIDIA open kernel modules",),
        "The card needs the open kernel module, and the proprietary one is installed.",
        needs=("machine",),
        causes=("K08",),
    ),
    Known(
        "driver-too-old-for-card",
        ("installed in this system is not supported by the NVIDIA {version:w} driver release",),
        "The driver {version} is too old for the card.",
        needs=("machine",),
        causes=("K09",),
    ),
    Known(
        "gsp-firmware",
        ("/gsp_{chip:w} failed with error -{number:d}",),
        "The driver's firmware file is missing for the loaded version.",
        needs=("machine",),
        causes=("K12",),
    ),
    Known(
        "docker-no-toolkit",
        (
            'could not select device driver "{name}" with capabilities: [[gpu]]',
            'could not select device driver "" with capabilities: [[gpu]]',
            "could not select device driver with capabilities: [[gpu]]",
            "unknown or invalid runtime name: nvidia",
            "Unknown runtime specified nvidia",
            'exec: "nvidia-container-runtime": executable file not found',
        ),
        "Docker does not know how to give a container a GPU: NVIDIA's container toolkit is not installed, or Docker "
        "was not told of it.",
        needs=("machine",),
        causes=("C02",),
    ),
    Known(
        "container-start",
        (
            "nvidia-container-cli: initialization error: {why:rest}",
            "nvidia-container-cli.real: initialization error: {why:rest}",
            "nvidia-container-cli: detection error: {why:rest}",
        ),
        "The container could not be given the GPU: {host}. The image is not at fault.",
        needs=("machine",),
        work=_host,
    ),
    Known(
        "container-asks-for-more",
        (
            "requirement error: unsatisfied condition: {condition}, please update your driver",
            "requirement error: unsatisfied condition: {condition:w}",
        ),
        "The image is made for {condition}, and the host's driver is older. The CUDA of the image must not be newer "
        "than what the driver knows; what is installed in the image besides does not matter.",
        (
            "Update the driver of the host, or take an image for an older CUDA.",
            "Where only the minor version differs, the image mostly runs without that test:",
            "$ docker run --gpus all -e NVIDIA_DISABLE_REQUIRE=1 IMAGE",
        ),
        needs=("machine",),
        causes=("V01",),
    ),
    Known(
        "container-has-driver",
        ("mount error: file creation failed: {path:w}: file exists",),
        "The image itself holds files of the NVIDIA driver, where those of the host are to be put: it was made from a "
        "container that had the GPU, or the driver was installed in it.",
        ("Delete libcuda.so*, libnvidia-*.so* and nvidia-smi in the image, and build it without the driver.",),
        causes=("C07",),
    ),
    Known(
        "cdi-missing",
        ("unresolvable CDI devices {device:w}",),
        "Podman or Docker finds no description of the device {device}: it was not generated on this host.",
        needs=("machine",),
        causes=("C06",),
    ),
    Known(
        "apptainer-no-nv",
        ("Could not find any nv files on this host!",),
        "Apptainer found no NVIDIA driver on the host to pass on.",
        needs=("machine",),
        causes=("C08", "K01", "H01"),
    ),
    Known(
        "wsl-symlink",
        ("libcuda.so.1 is not a symbolic link",),
        "ldconfig finds WSL's library of the driver to be a file, not a link. It is harmless, and hides nothing.",
        ("Nothing need be done.",),
        role="remark",
        causes=("U08",),
    ),
)
