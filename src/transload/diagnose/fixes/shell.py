"""Variables of this shell, and where they come from."""

from __future__ import annotations

from posixpath import normpath
from shlex import quote
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transload.machine import Machine

__all__ = ["drop_folder", "set_variable", "unset"]

Lines = tuple[str, ...]


def unset(machine: Machine, *names: str) -> Lines:
    """Remove variables from this shell, and from where they come from.

    >>> from transload.machine import Machine, Platform
    >>> unset(Machine(platform=Platform(shell="fish")), "CUDA_VISIBLE_DEVICES")[0]
    '$ set -e CUDA_VISIBLE_DEVICES'
    """
    shell = machine.platform.shell
    if shell == "fish":
        command = "; ".join(f"set -e {name}" for name in names)
    elif shell in ("csh", "tcsh"):
        command = "; ".join(f"unsetenv {name}" for name in names)
    elif machine.platform.system == "Windows":
        command = "; ".join(f"Remove-Item Env:{name}" for name in names)
    else:
        command = f"unset {' '.join(names)}"
    return (f"$ {command}", *_where_set(machine, names))


def set_variable(machine: Machine, name: str, value: str) -> Lines:
    """Set a variable in this shell."""
    shell = machine.platform.shell
    if shell == "fish":
        return (f"$ set -gx {name} {quote(value)}", *_where_set(machine, (name,)))
    if shell in ("csh", "tcsh"):
        return (f"$ setenv {name} {quote(value)}", *_where_set(machine, (name,)))
    if machine.platform.system == "Windows":
        return (f'$ $env:{name} = "{value}"', *_where_set(machine, (name,)))
    return (f"$ export {name}={quote(value)}", *_where_set(machine, (name,)))


def drop_folder(machine: Machine, variable: str, folder: str) -> Lines:
    """A search path without one of its folders.

    >>> from transload.machine import Machine, Variables
    >>> drop_folder(Machine(variables=Variables({"LD_LIBRARY_PATH": "/a:/b"})), "LD_LIBRARY_PATH", "/b")[0]
    '$ export LD_LIBRARY_PATH=/a'
    """
    value = machine.variables.get(variable) or ""
    bad = normpath(folder)
    left = ":".join(each for each in value.split(":") if not _leads(each, bad))
    return set_variable(machine, variable, left) if left.strip(":") else unset(machine, variable)


def _leads(element: str, folder: str) -> bool:
    """Whether an element of a search path is the folder; a relative one, if the folder ends in it."""
    plain = normpath(element) if element else ""
    if plain.startswith(("/", "..")) or plain in ("", "."):
        return plain == folder
    return folder.endswith(f"/{plain}")


def _where_set(machine: Machine, names: Lines) -> Lines:
    """Where a change has to be made to last."""
    lines = tuple(
        f"To make it last, change {name} where it is set: {', '.join(machine.variables.origins[name])}"
        for name in names
        if machine.variables.origins.get(name)
    )
    if lines or not any(name in machine.variables.values for name in names):
        return lines
    around = machine.surroundings
    if around.service:
        return (f"To make it last, remove it from the unit: systemctl edit {around.service}",)
    if around.container:
        return ("To make it last, remove it from the image's ENV, the compose file, or the -e of the run command.",)
    return ("To make it last, remove it from what sets it: the shell's start files, the IDE, the launch script.",)
