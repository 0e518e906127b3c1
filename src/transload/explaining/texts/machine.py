"""Texts from below torch: nvidia-smi, the kernel's log, containers."""

from __future__ import annotations

from transload.explaining.known import Known

__all__ = ["TABLE"]

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
        ("Failed to initialize NVML: Driver/library version mismatch",),
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
        ),
        "Docker does not know how to give a container a GPU: NVIDIA's container toolkit is not installed, or Docker "
        "was not told of it.",
        needs=("machine",),
        causes=("C02",),
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
