"""Words that only somebody with Linux can use: on Windows and macOS the doctor must not say them."""

from __future__ import annotations

import re

OF_LINUX = re.compile(
    r"libcuda|libnvidia|\blib\w+\.so|/dev/|/proc/|/etc/|/sys/|/usr/|/opt/|/lib/|docker|podman|nvidia-container|modprobe"
    r"|\bapt\b|\bdnf\b|\bpacman\b|\bsudo\b|as root|needs root|kernel module|kernel log|ldconfig|LD_[A-Z]|initramfs"
    r"|RAM disk|systemctl|systemd|dmesg|ulimit|\bgrep\b|\bexport \w+=|(?<!{)\bunset \w|SELinux|nouveau"
    r"|your distribution|\brm -|undefined symbol|shared object|\bELF\b|\bfork\b|glibc|musl|RUNPATH|~/|/bin/activate"
    r"|journalctl|\bldd\b|cgroup|udev|chmod|chown"
)
