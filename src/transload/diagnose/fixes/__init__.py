"""What to do, for this machine: its package manager, its Python tool, its shell, its kind of container.

Every function is pure and returns lines: a command begins with ``$ ``, what belongs into a file with ``| ``, anything
else is a sentence. Nothing is ever run; what needs root or a reboot says so.
"""

from transload.diagnose.fixes.containers import give_gpu
from transload.diagnose.fixes.packages import install, uninstall, wheel, wheel_choice
from transload.diagnose.fixes.shell import drop_folder, set_variable, unset
from transload.diagnose.fixes.system import install_driver, modprobe_option, on_host, reboot, sudo, system_package

__all__ = [
    "drop_folder",
    "give_gpu",
    "install",
    "install_driver",
    "modprobe_option",
    "on_host",
    "reboot",
    "set_variable",
    "sudo",
    "system_package",
    "uninstall",
    "unset",
    "wheel",
    "wheel_choice",
]
