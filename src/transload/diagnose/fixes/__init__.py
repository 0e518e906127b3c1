"""What to do, for this machine: its package manager, its Python tool, its shell, its kind of container.

Every function is pure and returns lines: a command begins with ``$ ``, what belongs into a file with ``| ``, anything
else is a sentence. Nothing is ever run; what needs root or a reboot says so.
"""

from transload.diagnose.fixes.containers import give_gpu, give_slurm
from transload.diagnose.fixes.driver import install_driver, wanted
from transload.diagnose.fixes.packages import bring, install, reinstall, uninstall, wheel, wheel_choice, wheel_platform
from transload.diagnose.fixes.shell import drop_folder, set_variable, unset
from transload.diagnose.fixes.system import (
    modprobe_option,
    on_host,
    reboot,
    reload_module,
    sudo,
    system_package,
    write_line,
)

__all__ = [
    "bring",
    "drop_folder",
    "give_gpu",
    "give_slurm",
    "install",
    "install_driver",
    "modprobe_option",
    "on_host",
    "reboot",
    "reinstall",
    "reload_module",
    "set_variable",
    "sudo",
    "system_package",
    "uninstall",
    "unset",
    "wanted",
    "wheel",
    "wheel_choice",
    "wheel_platform",
    "write_line",
]
