"""Fixes as commands for this machine: its package manager, its Python tool, its shell, its kind of container.

Every function is pure and returns steps. Nothing is ever run; what needs root or a reboot says so.
"""

from __future__ import annotations

import ntpath
import posixpath
import re
import shlex
from collections.abc import Callable
from itertools import groupby
from operator import attrgetter
from typing import Any

from transload.diagnose import elf, tables
from transload.machine import Accelerator, Machine
from transload.steps import Step, Steps, fix_of

Names = tuple[str, ...]
_NAME = re.compile(r"\{([\w.]+)(?: ([^}]+))?\}")
_SYSTEMS = {"Windows": "Windows", "Darwin": "macOS"}


def steps(machine: Machine, name: str, /, **values: object) -> Steps:
    """A section of ``steps.md`` for this machine and user. The head of that file explains its syntax.

    >>> from transload.machine import Accelerator, Machine
    >>> [step.text for step in steps(Machine(), "H06")]
    ['sudo prime-select on-demand', 'sudo reboot']
    """

    def value(name: str, arguments: str | None = "") -> object:
        if name in values:
            return values[name]
        if name in _FUNCTIONS:
            return _FUNCTIONS[name](machine, *(arguments or "").split())
        return attrgetter(name)(machine)

    advice: list[Step | str] = []
    on_host, pages = False, tables.steps()
    here = f"{name} on {_SYSTEMS.get(machine.platform.system, '')}"  # a section of its own for that system
    for kind, text, condition in pages.get(here) or pages[name]:
        if condition and not value(condition):
            continue
        alone = _NAME.fullmatch(text) if kind == "sentence" else None
        if alone:
            part: Any = value(*alone.groups())
            advice += (part,) if isinstance(part, str | Step) else part
        else:
            filled = _NAME.sub(lambda match: str(value(match[1])), text)
            if kind == "host" and machine.surroundings.container and not on_host:
                advice.append("On the host, not in this container:")
            by_root = kind in ("root", "host")
            advice.append(sudo(machine, filled, host=kind == "host") if by_root else Step(kind, filled))
        on_host = kind == "host"
    return tuple(advice)


# -- the words of a command, quoted for the user's shell

_AS_IT_IS = re.compile(r"[\w./:\\=+-]+")  # what PowerShell and cmd read as it is
_QUOTES = re.compile("(['\u2018-\u201b])")  # each ends a string of PowerShell, and stands for itself if doubled
_EITHER = re.compile("\x01([^\x01-\x03]*)\x02([^\x01-\x03]*)\x03")


def on_windows(machine: Machine) -> bool:
    """Whether the machine runs Windows; WSL is Linux."""
    return machine.platform.system == "Windows"


def _in_windows_shell(machine: Machine) -> bool:
    """Whether the user's shell is PowerShell or cmd, and not Git's bash."""
    return on_windows(machine) and machine.platform.shell in ("", "powershell", "cmd")


def _either(machine: Machine, powershell: str, cmd: str) -> str:
    """The form for the shell of Windows that is used; both, for ``lines_of`` to separate, if that is unknown."""
    known = {"powershell": powershell, "cmd": cmd}.get(machine.platform.shell, "")
    return known or (cmd if powershell == cmd else f"\x01{powershell}\x02{cmd}\x03")


def quote(machine: Machine, text: str, *, program: bool = False) -> str:
    """A word of a command. PowerShell runs a quoted ``program`` only after its call operator."""
    if not _in_windows_shell(machine):
        return shlex.quote(text)
    if _AS_IT_IS.fullmatch(text):
        return text
    end = "\\" if text.endswith("\\") else ""  # C programs take a single backslash and the quote for a quote
    # cmd replaces %NAME% even in quotes, but at its prompt only if there is such a variable
    return _either(machine, f"{'& ' if program else ''}{_powershell(text + end)}", f'"{text}{end}"')


def _powershell(text: str) -> str:
    return "'{}'".format(_QUOTES.sub(r"\1\1", text))


def lines_of(advice: Steps) -> tuple[str, ...]:
    """The lines of a fix; commands that PowerShell and cmd need in different forms appear in both."""

    def in_form(step: Step | str, form: str) -> Step | str:
        if isinstance(step, str):
            return _EITHER.sub(form, step)
        return Step(step.kind, _EITHER.sub(form, step.text), step.condition)

    out: list[Step | str] = []
    stated = (step for step in advice if step)
    for is_command, group in groupby(stated, lambda step: isinstance(step, Step) and step.kind == "command"):
        part = tuple(group)
        powershell, cmd = ([in_form(step, form) for step in part] for form in (r"\1", r"\2"))
        both = ("In PowerShell:", *powershell, "In cmd:", *cmd)
        out += both if is_command and powershell != cmd else powershell
    return fix_of(tuple(out))


# -- as root: packages, kernel modules, a reboot


def command(text: str) -> Step:
    """A command for any user."""
    return Step("command", text)


def sudo(machine: Machine, text: str, *, host: bool = False) -> Step:
    """A command that needs root, as this user must type it; root in a container is not root on the host."""
    root = machine.platform.root and not (host and machine.surroundings.container)
    return command(text if root or on_windows(machine) else f"sudo {text}")


def reboot(machine: Machine) -> Step | str:
    """How to reboot the machine."""
    if machine.surroundings.wsl:
        return "Then, in Windows, run 'wsl --shutdown' and open the terminal again."
    if machine.platform.system in _SYSTEMS:
        return f"Then restart {'Windows' if on_windows(machine) else 'the Mac'}."
    return "Then reboot the host." if machine.surroundings.container else sudo(machine, "reboot")


def initramfs(machine: Machine) -> Step | str:
    """How to rebuild the initial RAM disk."""
    rebuild = tables.table("packages")["managers"].get(machine.platform.package_manager, {}).get("initramfs")
    return sudo(machine, rebuild) if rebuild else "Rebuild the initial RAM disk."


def install_package(machine: Machine, *words: str, again: bool = False, **more: str) -> Steps:
    """Install system packages under the name that this distribution has for them in ``packages.json``.

    ``more`` adds or replaces names by package manager, such as ``apt="libcuda1"``. With ``again``, packages that are
    installed are installed again, since some of their files are missing.
    """
    packages, manager = tables.table("packages"), machine.platform.package_manager
    names = {**packages["packages"].get(" ".join(words), {}), **more}
    install = packages["managers"].get(manager, {}).get("reinstall" if again else "install")
    if manager in names and install:
        return (sudo(machine, f"{install} {names[manager]}"),)
    return (f"Install your distribution's equivalent of the package {next(iter(names.values()), '')}.",)


def write_line(machine: Machine, *lines: str, file: str, host: bool = False) -> Step:
    """Write lines into a file that belongs to root, perhaps on the host of a container."""
    text = " ".join(map(shlex.quote, lines))
    write = f"echo {text}" if len(lines) == 1 else f"printf '%s\\n' {text}"
    return command(f"{write} | {sudo(machine, f'tee {file}', host=host).text}")


def reload_module(machine: Machine, module: str = "nvidia") -> Steps:
    """Unload a kernel module of the driver and load it again, on the host."""
    loaded = machine.kernel.modules
    users = ("nvidia_drm", "nvidia_modeset", "nvidia_uvm") if module == "nvidia" else ()  # which must be unloaded first
    unload = [name for name in (*users, module) if name in (*loaded, module) or not loaded]
    commands = [f"modprobe -r {' '.join(unload)}", f"modprobe {module}"]
    if module == "nvidia" and "nvidia-persistenced" in machine.kernel.daemons:
        commands = ["systemctl stop nvidia-persistenced", *commands, "systemctl start nvidia-persistenced"]
    return tuple(sudo(machine, text, host=True) for text in commands)


def modprobe_option(machine: Machine, line: str, file: str) -> Steps:
    """Set an option of a kernel module permanently. ``line`` is ``options MODULE name=value``."""
    write = write_line(machine, line, file=f"/etc/modprobe.d/{file}", host=True)
    return steps(machine, "An option of a module", write=write, reload=reload_module(machine, line.split()[1]))


def smi(machine: Machine) -> str:
    """The name of nvidia-smi, with its folder if that may not be on PATH."""
    path = machine.driver.libraries.smi
    usual = path.startswith(("/usr/bin/", "/usr/local/bin/", "/bin/")) or "\\system32\\" in path.lower()
    return "nvidia-smi" if usual or not path else quote(machine, path, program=True)


def folder_of(machine: Machine, path: str) -> str:
    """The folder of a path of that machine."""
    return ntpath.dirname(path) if on_windows(machine) else posixpath.dirname(path)


def inside(machine: Machine, folder: str) -> str:
    """The folder with the separator that follows it in a path of that machine."""
    return f"{folder}\\" if on_windows(machine) else f"{folder}/"


def in_site_packages(folder: str) -> bool:
    """Whether a folder is one that installers write to."""
    return folder.endswith(("site-packages", "dist-packages"))


def delete(machine: Machine, *paths: str) -> Steps:
    """Delete the user's files or folders."""

    def line(path: str) -> str:
        if not _in_windows_shell(machine):
            return f"rm -r {shlex.quote(path)}"
        remove = "del" if path.endswith(".py") else "rmdir /s /q"
        return _either(machine, f"Remove-Item -Recurse -LiteralPath {_powershell(path)}", f'{remove} "{path}"')

    return tuple(command(line(path)) for path in paths)


# -- environment variables, and where they are set


_CSH = ("unsetenv {name}", "setenv {name} {quoted}")
_SHELLS = {"fish": ("set -e {name}", "set -gx {name} {quoted}"), "csh": _CSH, "tcsh": _CSH}
"""How shells other than bash unset a variable, and set one."""
_USER, _MACHINE = "HKCU\\Environment", "HKLM\\SYSTEM\\CurrentControlSet\\Control\\Session Manager\\Environment"


def unset(machine: Machine, *names: str) -> Steps:
    """Unset variables in this shell, and where they are set."""
    shell = _SHELLS.get(machine.platform.shell)
    unsets = ["; ".join(shell[0].format(name=name) for name in names) if shell else f"unset {' '.join(names)}"]
    if _in_windows_shell(machine):
        unsets = [_either(machine, f"Remove-Item Env:{name}", f"set {name}=") for name in names]
    return (*map(command, unsets), *_make_permanent(machine, names, "remove"))


def set_variable(machine: Machine, name: str, value: str) -> Steps:
    """Set a variable in this shell, and where it is set."""
    shell = _SHELLS.get(machine.platform.shell) or ("", "export {name}={quoted}")
    sets = shell[1].format(name=name, quoted=shlex.quote(value))
    if _in_windows_shell(machine):
        sets = _either(machine, f"$env:{name} = {_powershell(value)}", f'set "{name}={value}"')
    return (command(sets), *_make_permanent(machine, (name,), "change", value))


def drop_folder(machine: Machine, variable: str, folder: str) -> Steps:
    """Remove a folder from a search path."""
    if on_windows(machine) and variable.upper() == "PATH":
        # Its value here is that of the machine and of the user together, so it must not be set for good.
        kept = f"($env:Path -split ';' | Where-Object {{ $_.TrimEnd('\\') -ne {_powershell(folder)} }}) -join ';'"
        drop = _either(machine, f"$env:Path = {kept}", f'set "PATH=%PATH:{folder};=%"')
        return steps(machine, "A folder of PATH", drop=command(drop), folder=folder)
    rest = _separator(machine).join(path for path in elements(machine, variable) if not _leads_to(path, folder))
    return set_variable(machine, variable, rest) if rest.strip(":;") else unset(machine, variable)


def in_search_path(machine: Machine, variable: str, folder: str) -> bool:
    """Whether a folder is an element of a search path."""
    return any(_leads_to(element, folder) for element in elements(machine, variable))


def elements(machine: Machine, variable: str) -> Names:
    """The elements of a search path. The loader splits its own at semicolons, too."""
    separators = ":;" if variable.startswith("LD_") else _separator(machine)
    return elf.elements(machine.variables.values.get(variable) or "", separators)


def _separator(machine: Machine) -> str:
    return ";" if on_windows(machine) else ":"


def _leads_to(element: str, folder: str) -> bool:
    """Whether an element of a search path names a folder; a relative one does if the folder's path ends with it."""
    if ":" in folder or "\\" in folder:  # of Windows
        return bool(element) and ntpath.normcase(ntpath.normpath(element)) == ntpath.normcase(ntpath.normpath(folder))
    plain, wanted = posixpath.normpath(element) if element else "", posixpath.normpath(folder)
    absolute = plain.startswith(("/", "..")) or plain in ("", ".")
    return plain == wanted if absolute else wanted.endswith(f"/{plain}")


def drop_library(machine: Machine, path: str, via: str) -> Steps:
    """Keep the loader from finding a library through a variable; no lines if it finds it in another way."""
    if via == "LD_LIBRARY_PATH":
        return drop_folder(machine, via, path.rpartition("/")[0])
    return unset(machine, via) if via == "LD_PRELOAD" else ()


def _make_permanent(machine: Machine, names: Names, verb: str, value: str | None = None) -> Steps:
    if on_windows(machine):
        return _in_registry(machine, names, verb, value)
    places = ((name, machine.variables.origins.get(name)) for name in names)
    set_in = [f"{name} where it is set: {', '.join(where)}" for name, where in places if where]
    if set_in or not any(name in machine.variables.values for name in names):
        return tuple(f"To make it permanent, change {place}" for place in set_in)
    around = machine.surroundings
    kind = "service" if around.service else "container" if around.container else "program"
    return steps(machine, f"Permanently: {kind}", verb=verb, service=shlex.quote(around.service))


def _in_registry(machine: Machine, names: Names, verb: str, value: str | None) -> Steps:
    """Remove variables, or set them to a value, where Windows keeps those of the user and of the machine."""
    of_user: list[Step] = []
    of_machine: list[Step] = []
    elsewhere: list[str] = []
    places = ((name, key) for name in names for key in machine.variables.origins.get(name, ()))
    for name, key in places:
        for whose, root, option, found in (("User", _USER, "", of_user), ("Machine", _MACHINE, " /M", of_machine)):
            if key.startswith(root[:4]):
                new = "$null" if value is None else _powershell(value)
                powershell = f"[Environment]::SetEnvironmentVariable('{name}', {new}, '{whose}')"
                cmd = f'reg delete "{root}" /v {name} /f' if value is None else f'setx {name} "{value}"{option}'
                found.append(command(_either(machine, powershell, cmd)))
        if not key.startswith(("HKCU", "HKLM")):
            elsewhere.append(key)
    if not (of_user or of_machine or elsewhere) and any(name in machine.variables.values for name in names):
        elsewhere = ["PowerShell's profile, the IDE, the launch script"]
    commands = {"of_user": tuple(of_user), "of_machine": tuple(of_machine)}
    return steps(machine, "Permanently: Windows", verb=verb, places=", ".join(elsewhere), **commands)


def start_with_gpu(machine: Machine, *, slurm: bool = False) -> Steps:
    """How to start this kind of container or job with a GPU; ``slurm`` if Slurm gave it none."""
    around = machine.surroundings
    kind = around.container if f"Start: {around.container}" in tables.steps() else "docker"
    inner = steps(machine, f"Start: {kind}")
    if slurm or (around.slurm and not around.kubernetes and not around.container):
        return steps(machine, "Start: slurm", inner=inner if around.container else ())
    return steps(machine, "Start: kubernetes") if around.kubernetes else inner


# -- NVIDIA's driver: which branch and flavour support the cards of this machine, and which packages contain it

_CURRENT = 580  # a branch that the distributions below are known to have, in both flavours
_FIRST_OPEN = 515
_DEBIAN = 535  # the lowest branch in Debian's own repository since Debian 12, with the proprietary module


def _chips(machine: Machine) -> list[tables.Chip]:
    """The known chips of the cards on the bus, except those that are passed through to a virtual machine."""
    chips = (tables.chip_of(card.device) for card in machine.hardware.gpus if card.driver != "vfio-pci")
    return [chip for chip in chips if chip]


def family(machine: Machine) -> str:
    """The family that this Linux distribution belongs to, as ``packages.json`` names it; ``other`` if it is unknown."""
    names = (machine.platform.distribution, *machine.platform.distribution_like)
    drivers = tables.table("packages")["driver"].items()
    return next((family for name in names for family, like in drivers if name in like.split()), "other")


def driver_for_cards(machine: Machine, exactly: int = 0) -> tuple[int, int, bool | None, Names, Names]:
    """The driver for the cards of this machine; if no driver supports all of them, for the newest ones.

    Returns the branch to install (``exactly``, else the last that supports these cards, 0 if newer ones do), the first
    that does, whether to use its open kernel module (``None``: either), and the generations of these and other cards.
    """
    chips = _chips(machine)
    cards = [(tables.generation(chip.generation), tables.branches(chip.capability)[0]) for chip in chips]
    newest, first = max(cards, key=lambda card: (card[1], not card[0].last_branch), default=(None, 0))
    apart = {"impossible", "required"}
    dropped = {card for card, _ in cards if 0 < card.last_branch < first}
    dropped |= {card for card, _ in cards if newest and {card.open_module, newest.open_module} == apart}
    kept = {card for card, _ in cards} - dropped
    branch = exactly or min((card.last_branch for card in kept if card.last_branch), default=0)
    flavours = {card.open_module for card in kept}
    # the loaded module shows the flavour that an unknown card needs
    open_module = None if flavours else {"open": True, "proprietary": False}.get(machine.kernel.flavour)
    if "impossible" in flavours or 0 < branch < _FIRST_OPEN:
        open_module = False
    elif "required" in flavours:
        open_module = True
    kept_names, dropped_names = (tuple(sorted(card.name for card in group)) for group in (kept, dropped))
    return branch, first, open_module, kept_names, dropped_names


def install_driver(machine: Machine, *, at_least: int = 0, exactly: int = 0) -> Steps:
    """Install NVIDIA's driver for the cards of this machine: a branch from ``at_least`` on, or ``exactly`` this one."""
    branch, first, open_module, *generations = driver_for_cards(machine, exactly)
    kept, dropped = map(" and ".join, generations)
    least, closed = max(at_least, first), open_module is False
    which = f" of branch {branch}" if branch else f" of branch {least} or newer" if least else ""
    if open_module is not None and not on_windows(machine):
        which += f" with the {'open' if open_module else 'proprietary'} kernel module"
    if machine.surroundings.wsl or on_windows(machine):
        name = "The driver of WSL" if machine.surroundings.wsl else "The driver of Windows"
        return steps(machine, name, which=which if at_least or exactly else "")
    if 0 < branch < at_least:
        return steps(machine, "The last driver", last=branch, cards=kept or "this card", wanted=at_least)
    if machine.surroundings.container:
        return steps(machine, "The driver of the host", which=which)
    # With the distribution's package manager; a sentence if no command is known.
    plain, system = not at_least and not open_module, family(machine)
    how = {  # if it is not the package of the newest branch
        "ubuntu": "recommended" if plain and not branch else "",
        "debian": "legacy" if 0 < branch < _FIRST_OPEN else "own" if plain and first <= _DEBIAN else "",
        "fedora": "legacy" if branch in (390, 470) else "held" if branch else "",
        "rhel": "held" if branch else "",
        "arch": "legacy" if branch in (390, 470, 580) else "held" if branch or closed else "",
        "suse": "470" if branch == 470 else "held" if least > _CURRENT or 0 < branch < _CURRENT else "",
        "nixos": "legacy" if branch in (470, 535) else "held" if branch else "",
    }
    name, dashed = f"Driver: {system} {how.get(system, '')}".rstrip(), f"-{branch}" if branch else ""
    number = branch or max(least, _CURRENT)
    values = {"which": which, "branch": branch, "dashed": dashed, "number": number}
    packages = steps(machine, name, **values, closed=closed, opened=not closed)
    return steps(machine, "The driver", kept=kept, dropped=dropped, packages=packages)


# -- Python packages, with the tool of the examined environment, and which torch to install

_COMPANIONS = ("torchvision", "torchaudio")
CONDAS = ("conda", "pixi")


def wheel_choice(machine: Machine, torch: str = "") -> tables.WheelChoice:
    """The torch build for the driver, the cards, the Python and the platform of this machine."""
    reported = set(machine.capabilities.values())
    return tables.choose_wheel(
        driver=machine.driver.nvml.driver or machine.kernel.version,
        driver_cuda=max(machine.driver.cuda.version, 0) or max(machine.driver.nvml.cuda, 0),
        capabilities=tuple(sorted(reported or {chip.capability for chip in _chips(machine) if chip.capability})),
        platform=wheel_platform(machine),
        python=tables.numbers_of(machine.python.version)[:2] or (3, 12),
        free_threaded=machine.python.free_threaded,
        torch=torch,
        driver_sees_cards=bool(reported),
    )


def install_wheel(machine: Machine, torch: str = "", *, driver: bool = True) -> Steps:
    """Install the torch build for the driver and the cards, with the tool of this environment.

    Its release is ``torch``, else the installed one if that has a suitable build. Without ``driver`` another finding
    says how to install the driver that it may need.
    """
    (tool, project), first, newest = _tools(machine), machine.torch.first, wheel_choice(machine)
    installed = first.version.partition("+")[0] if first else ""
    choice = wheel_choice(machine, torch)
    if not torch and installed in tables.releases():  # other packages were made for the installed release
        kept = wheel_choice(machine, installed)
        if kept.torch_version and (newest.needs_driver or not kept.needs_driver):
            choice = kept
    if not choice.torch_version:
        return (choice.reason,)
    cuda = f"{choice.build[2:-1]}.{choice.build[-1]}"  # 12.6 for cu126
    companions = [name for name in _COMPANIONS if name in machine.python.packages]
    wanted, source = (f"torch=={choice.torch_version}", *companions), f"pytorch-{choice.build}"
    likely = " (likely, but not certain, to work)" if choice.how_sure == "guess" else ""
    why = f"Why this build{likely}: {choice.reason}"
    if tool in CONDAS and first and installed == choice.torch_version and _major(first.cuda) == _major(cuda):
        # conda's torch is the right one; without force conda keeps a broken package that meets the request
        lines, why = conda(machine, f'"pytorch={choice.torch_version}"', *companions, force=True), ""
    elif tool in CONDAS:
        lines = conda(machine, "pytorch-gpu", f'"cuda-version={cuda}"', *companions)
        why = f"Why CUDA {cuda}, judged by PyTorch's wheels{likely}: {choice.reason}"
    elif tool == "poetry" and choice.index_url:
        add = f"source add --priority=explicit {source} {choice.index_url}"
        lines = tuple(command(f"poetry {text}") for text in (add, f"add --source {source} {' '.join(wanted)}"))
    elif project == "uv":
        index = f" --index {source}={choice.index_url}" if choice.index_url else ""
        lines = (command(f"uv add{index} {' '.join(wanted)}"),)
    else:
        # NVIDIA's packages for another CUDA version put files into the same folders; a project's tool removes them
        matches = ((name, re.fullmatch(r"nvidia-.+-cu(\d+)", name)) for name in machine.python.packages)
        others = sorted(name for name, of in matches if of and of[1] != _major(cuda) and not project)
        present = (*(() if machine.torch.installs == () else ("torch",)), *companions, *others)
        remove = uninstall(machine, *present) if present else ()
        lines = tuple(dict.fromkeys((*remove, *install(machine, *wanted, index=choice.index_url))))
    update: Steps = ()
    if choice.needs_driver and driver:
        branch, older = int(_major(choice.needs_driver)), choice.direction == "older"
        update = install_driver(machine, at_least=0 if older else branch, exactly=branch if older else 0)
    keeps = installed == choice.torch_version != newest.torch_version and tool not in CONDAS
    better = "" if choice.needs_driver or newest.needs_driver else f"{newest.torch_version} {newest.build}"
    words = {"why": why, "better": better if keeps else "", "later": choice.needs_driver and not driver}
    return steps(machine, "A build of torch", update=update, install=lines, **words)


def _major(version: str) -> str:
    return version.partition(".")[0]


def install_torch(machine: Machine, *, gpu: bool | None, force: bool = False) -> Steps:
    """Install torch where there is none; ``gpu`` is whether there is one of NVIDIA, ``None`` if that is unknown."""
    if gpu:
        return install_wheel(machine)
    platform = wheel_platform(machine)
    newest = next(release for release in reversed(tables.releases()) if tables.index_builds(release, platform))
    if newest != tables.releases()[-1]:  # it was compiled for the numpy of its time
        return install(machine, f"torch=={newest}", "numpy<2", force=force)
    default = tables.build_of(newest, platform)
    with_cuda = gpu is False and default is not None and bool(default.cuda)
    return install(machine, "torch", index=f"{tables.INDEX}/cpu" if with_cuda else "", force=force)


def install_for(machine: Machine, gpu: Accelerator) -> Steps:
    """Install torch for a GPU that is not NVIDIA's; nothing if PyTorch has no build for it on this system."""
    platform = wheel_platform(machine)
    names = [build.build for release in tables.releases() for build in tables.index_builds(release, platform)]
    builds = [name for name in names if name.startswith(gpu.kind)]
    return install(machine, "torch", index=f"{tables.INDEX}/{builds[-1]}") if builds else ()


def reinstall(machine: Machine, *, gpu: bool | None) -> Steps:
    """Install torch again, with everything it needs: the same release, in the build for this machine."""
    first = machine.torch.first
    folder = folder_of(machine, first.location) if first else ""
    on_path = folder and in_search_path(machine, "PYTHONPATH", folder)
    if on_path and not in_site_packages(folder):
        others = len(machine.torch.installs or ()) > 1
        here = () if others else install_torch(machine, gpu=gpu)
        return steps(machine, "PYTHONPATH", drop=drop_folder(machine, "PYTHONPATH", folder), install=here)
    release, _, build = (first.version if first else "").partition("+")
    if release not in tables.releases():
        return install_torch(machine, gpu=gpu, force=True)
    if gpu:
        return install_wheel(machine, release if wheel_choice(machine, release).torch_version else "")
    default = tables.build_of(release, wheel_platform(machine))
    if gpu is False and first and first.cuda and default and default.cuda:  # the CPU build is enough
        companions = [name for name in _COMPANIONS if name in machine.python.packages]
        return install(machine, f"torch=={release}", *companions, index=f"{tables.INDEX}/cpu", force=True)
    elsewhere = default is None or default.build != build
    index = f"{tables.INDEX}/{build}" if elsewhere and tables.BUILD.fullmatch(build) else ""
    return install(machine, f"torch=={release}", index=index, force=True)


_JETSON = "https://pypi.jetson-ai-lab.io"
_JETSON_INDEXES = {36: f"{_JETSON}/jp6/cu126/+simple/", 38: f"{_JETSON}/sbsa/cu130/+simple/"}


def jetson_torch(machine: Machine) -> Steps:
    """Install the torch that NVIDIA builds for a Jetson, from the index for its release of Jetson Linux."""
    release = re.search(r"\bR(\d{2})\b", machine.hardware.tegra)
    index = _JETSON_INDEXES.get(int(release[1]) if release else 0)
    if index is None:
        return (f"Install the torch that NVIDIA builds for this board's JetPack: {_JETSON}",)
    return install(machine, "torch", index=index, force=True)


def _by_tool(machine: Machine, action: str, tool: str, *names: str, force: bool = False, **values: object) -> Steps:
    """The section of ``steps.md`` for an action with a tool for Python packages."""
    python = machine.python
    executable = python.executable or "python"
    values |= {"python": quote(machine, executable, program=True), "interpreter": quote(machine, executable)}
    values |= {"no_pip": not python.pip, "names": " ".join(names)}
    values["prefix"] = f" -p {quote(machine, python.prefix)}" if python.prefix else ""
    values["again"] = " --force-reinstall" if force and tool != "uv" else " --reinstall" if force else ""
    return steps(machine, f"{action}: {tool}", **values)


def conda(machine: Machine, *names: str, action: str = "Install", force: bool = False) -> Steps:
    """Install packages from conda-forge, or do something else with them."""
    return _by_tool(machine, action, "pixi" if machine.python.tool == "pixi" else "conda", *names, force=force)


def _conda_names(requirements: Names) -> Names:
    """The names of PyPI's packages on conda-forge; nothing if one of them may not exist there."""
    packages = tables.table("packages")["conda_forge"]
    parts = [text.partition("==") for text in requirements if text not in ("--no-deps", "--upgrade")]
    if not all(name in packages for name, _, _ in parts):
        return ()
    # NVIDIA's packages have other version numbers there
    pinned = ("torch", *_COMPANIONS)
    return tuple(packages[name] + (f"={ver}" if ver and name in pinned else "") for name, _, ver in parts)


def install(machine: Machine, *requirements: str, index: str = "", force: bool = False) -> Steps:
    """Install Python packages into the examined environment."""
    tool, project = _tools(machine)
    if tool in CONDAS and not re.search(r"rocm|xpu|simple", index) and (names := _conda_names(requirements)):
        return conda(machine, *names, force=force)
    wanted = [*(quote(machine, text) for text in requirements), *(("--index-url", index) if index else ())]
    plain = not any(text.startswith("-") for text in wanted)  # options of pip, which a project's tool lacks
    if project and plain and not force:
        return (command(f"{project} add {' '.join(wanted)}"),)
    tool = "uv" if tool == "uv" else "system" if machine.python.externally_managed else "pip"
    shared = " --system-site-packages" if "--no-deps" in requirements else ""  # which has torch
    undoing = project if index and tool != "system" else ""
    return _by_tool(machine, "Install", tool, *wanted, force=force, shared=shared, undoing=undoing)


def reinstall_conda_libraries(machine: Machine, *libraries: str) -> Steps:
    """Reinstall the conda-forge packages that contain some libraries; nothing outside of conda."""
    packages = tables.table("packages")["conda_forge_libraries"].items()
    names = sorted({package for name in libraries for start, package in packages if name.startswith(start)})
    return conda(machine, *names, force=True) if names and _tools(machine)[0] in CONDAS else ()


def uninstall(machine: Machine, *packages: str) -> Steps:
    """Remove Python packages from the examined environment."""
    tool, project = _tools(machine)
    if machine.python.externally_managed:
        return ()
    if tool in CONDAS and (names := _conda_names(packages)):
        return conda(machine, *names, action="Remove")
    if project and project != "uv":
        return (command(f"{project} remove {' '.join(packages)}"),)
    return _by_tool(machine, "Remove", "uv" if tool == "uv" else "pip", *packages)


def _tools(machine: Machine) -> tuple[str, str]:
    """The tool to install torch with: the one that installed it, else the environment's own.

    The second is the same tool if it locks the packages of a project, and so undoes what others install; else empty.
    """
    tool, first = machine.python.tool, machine.torch.first
    if tool in CONDAS and first and first.installer in ("pip", "uv"):
        tool = first.installer
    return tool, tool if tool in ("poetry", "pdm") or (tool == "uv" and machine.python.project) else ""


def wheel_platform(machine: Machine) -> tables.Platform:
    """The platform of the wheels for this machine."""
    system, arm = machine.platform.system, machine.platform.machine in ("aarch64", "arm64")
    if system == "Darwin":
        return "macos-arm64" if arm else "macos-x86_64"
    return "windows" if system == "Windows" else "linux-aarch64" if arm else "linux-x86_64"


_FUNCTIONS: dict[str, Callable[..., Steps | Step | str]] = {
    function.__name__: function
    for function in (
        *(reboot, initramfs, install_driver, start_with_gpu, smi, unset, set_variable),
        *(install, uninstall, install_wheel, jetson_torch, install_package),
    )
}
"""The functions that a section of ``steps.md`` may name."""
