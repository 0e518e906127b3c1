"""Running torch: whether driver, cards and packages are compatible with it, and what else goes wrong."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from transload.diagnose import fixes
from transload.diagnose.case import Card, Case, Lines, Match, is_nvidia_library, page_only, quoted, rule, rules
from transload.diagnose.tables import (
    INDEX,
    TEGRA,
    branch_of,
    build_of,
    covers,
    cuda_text,
    driver_floor,
    numbers_of,
    toolkit_driver,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transload.diagnose.tables import System
    from transload.machine import Extension, NvmlGpu

_TOO_OLD = re.compile(r"NVIDIA driver on your system is too old \(found version (\d+)\)")
_NO_KERNEL = r"no kernel image is available"
_NO_CODE = rf"{_NO_KERNEL}|not compatible with the current PyTorch|which is of (?:compute|cuda) capability"


# -- the driver


def _enough(driver: int, wheel: tuple[int, int]) -> bool:
    """Whether a driver runs what was built with a CUDA version: from 11 on the same major version suffices.

    >>> _enough(12000, (12, 8)), _enough(12080, (13, 0)), _enough(10010, (10, 2)), _enough(11040, (10, 2))
    (True, False, False, True)
    """
    if wheel[0] >= 11:
        return driver // 1000 >= wheel[0]
    return driver >= wheel[0] * 1000 + wheel[1] * 10


def _system(m: Case) -> System:
    """Whose driver it is: under WSL it is the Windows driver."""
    return "windows" if m.platform.system == "Windows" or m.surroundings.wsl else "linux"


@rule("V05", "fit", "another library replaces the driver's libcuda.so.1", likely=True)
def stand_in(m: Case) -> Match | None:
    """torch calls a driver too old although it is new enough."""
    told, wheel = _TOO_OLD.search(m.complaint(_TOO_OLD.pattern)), m.built_with
    if told is None or wheel is None or not _enough(int(told[1]), wheel) or m.computes:
        return None
    loaded = [path for path in m.torch_run.libraries if "/libcuda.so" in path] or [m.driver.cuda.library]
    preload = m.env("LD_PRELOAD") or " ".join(m.driver.libraries.preload)
    evidence = (
        f"torch calls a driver for CUDA {cuda_text(int(told[1]))} too old, but was built with CUDA {m.torch_cuda}",
        *(f"libcuda.so.1 is {path}" for path in loaded if path),
        f"preloaded: {preload}" if preload else "",
    )
    remove = ("Remove the library that is loaded instead of NVIDIA's libcuda.so.1.",)
    return Match(evidence, fixes.unset(m, "LD_PRELOAD") if preload else remove)


@rule("V01", "fit", "the driver is too old for this torch")
def too_old(m: Case) -> Match | None:
    """The driver supports only an older major version than torch was built with, and torch was not seen to work."""
    wheel = m.built_with
    if not m.driver_cuda or wheel is None or _enough(m.driver_cuda, wheel) or m.torch_run.cuda_works:
        return None
    floor = driver_floor(m.torch_cuda, _system(m))
    version = m.driver.nvml.driver or m.kernel.version
    needs = f", which needs driver {floor} or newer" if floor else ""
    evidence = (
        f"{f'driver {version}' if version else 'the driver'} supports CUDA up to {cuda_text(m.driver_cuda)}",
        f"torch {m.torch_version} was built with CUDA {m.torch_cuda}{needs}",
        quoted(m.complaint(_TOO_OLD.pattern)),
    )
    install = fixes.wheel(m)
    # if the card needs a newer driver anyway, or this torch has no code for it, there is only one solution
    if not floor or fixes.wheel_choice(m).needs_driver or _misfits(m):
        return Match(evidence, install)
    update = (f"Or update the driver to {floor} or newer:", *fixes.install_driver(m, at_least=branch_of(floor)))
    return Match(evidence, ("Either install a torch that works with this driver:", *install, *update))


@rule("V02", "fit", "the driver cannot compile this PTX")
def newer_ptx(m: Case) -> Match | None:
    """torch failed in this way; or it was not run, has only PTX for the card, and the driver is older."""
    told, cuda, (codes, proven) = m.complaint(r"unsupported toolchain"), m.built_with, _codes(m)
    if not told:
        if not m.torch_not_run or cuda is None or not proven:
            return None
        if not 0 < m.driver_cuda < cuda[0] * 1000 + cuda[1] * 10:
            return None
        compiled = [code for code in codes if code.startswith("sm_")]
        if any(covers(compiled, card.capability, cuda) for card in m.cards):
            return None
        if not any(covers(codes, card.capability, cuda) for card in m.cards):
            return None
    driver, torch = m.driver_cuda, m.torch_cuda
    wanted = toolkit_driver(torch, _system(m))
    known = (
        f"the driver supports CUDA up to {cuda_text(driver)}, torch was built with {torch}" if driver and torch else ""
    )
    update = f"Update the driver{f' to {wanted} or newer' if wanted else ''}:"
    fix = (update, *fixes.install_driver(m, at_least=branch_of(wanted)))
    return Match((quoted(told), known), fix, likely=not told)


@rule("V03", "fit", "the driver lacks a function that torch calls")
def missing_call(m: Case) -> Match | None:
    """torch failed in this way."""
    told = m.complaint(r"API call is not supported in the installed CUDA driver")
    if not told or not m.failed():
        return None
    wanted = toolkit_driver(m.torch_cuda, _system(m))
    return Match((quoted(told),), fixes.install_driver(m, at_least=branch_of(wanted)))


page_only("V04", "fit", "the driver no longer supports this Kepler card")


# -- the cards


def _misfits(m: Case) -> tuple[Card, ...]:
    """The cards that this torch has no code for, by its binaries or else the tables; none if unknown."""
    cuda, (known, _) = m.built_with, _codes(m)
    if cuda is None or not known or m.torch.shadow:
        return ()
    bad = tuple(card for card in m.cards if not covers(known, card.capability, cuda))
    # torch computes on its first card: whatever the lists say, there is code for that one
    return () if m.torch_run.cuda_works and m.cards and m.cards[0] in bad else bad


def _codes(m: Case) -> tuple[Lines, bool]:
    """What torch has code for: its kernels, else its own list, else what the tables say of that build."""
    told = tuple(m.torch_libraries.cubins or ()) or m.torch_libraries.architectures or m.torch_run.architectures
    if told:
        return told, True
    version = m.torch_version
    build = build_of(version, version.partition("+")[2], fixes.wheel_platform(m)) if numbers_of(version) else None
    return (build.archs, False) if build else ((), False)


def _numbers(code: str) -> tuple[int, int]:
    found = re.search(r"[0-9]{1,4}", code.partition("_")[2])
    number = int(found[0]) if found else 0
    return number // 10, number % 10


@rules(
    "fit",
    {
        "A05": "this torch has no code for the GPU of a Jetson",
        "A01": "the card is too new for this torch",
        "A02": "the card is too old for this torch",
    },
)
def no_code_for_card(m: Case) -> Iterator[tuple[str, Match]]:
    """Cards without code: an error, but a warning if torch works on another card. In between is too old as well."""
    bad, (codes, proven) = _misfits(m), _codes(m)
    if not bad:
        return
    spared = m.torch_run.cuda_works or (len(bad) < len(m.cards) and not m.complaint(_NO_KERNEL))
    listed = " ".join(sorted(set(codes), key=_numbers))
    source = "has code for" if proven else "should have code for"
    evidence = (*map(str, bad), f"torch {m.torch_version} {source} {listed}", quoted(m.complaint(_NO_CODE)))
    jetson = m.hardware.tegra or any(card.capability in TEGRA for card in bad)
    newer = any(card.capability > max(map(_numbers, codes)) for card in bad)
    sure = proven and all(card.sure for card in bad)
    fix = fixes.jetson_torch(m) if jetson else fixes.wheel(m)
    code = "A05" if jetson else "A01" if newer else "A02"
    yield code, Match(evidence, fix, severity="warning" if spared else "error", likely=not sure)


@rule("R02", "fit", "this torch has no code for the AMD card")
def other_gfx(m: Case) -> Match | None:
    """The chip is not in the list, nothing overrides its name, and torch was not seen to compute."""
    codes = m.torch_libraries.architectures or m.torch_run.architectures
    known = {code.partition(":")[0] for code in codes if code.startswith("gfx")}
    found = [other for other in m.accelerators if other.kind == "rocm" and other.detail.startswith("gfx")]
    chips = [other.detail for other in found if other.usable]
    override = m.env("HSA_OVERRIDE_GFX_VERSION")
    if not known or not chips or override or set(chips) & known or m.torch_run.cuda_works:
        return None
    near = {"gfx103": "10.3.0", "gfx110": "11.0.0"}.get(chips[0][:6], "")
    fix: Lines = ("Install a build of torch that supports this chip, or use the CPU.",)
    if near:
        set_near = fixes.set_variable(m, "HSA_OVERRIDE_GFX_VERSION", near)
        fix = ("Treat it as the closest supported chip:", *set_near)
    return Match((f"the card is {chips[0]}", f"torch has code for {' '.join(sorted(known))}"), fix)


# -- other packages: torch works without them, so these are warnings

_TRIO = ("torchvision", "torchaudio", "torchtext", "torchcodec")
_PIN = re.compile(r"==\s*(?P<version>\d[\w.]*)")
_BITSANDBYTES = re.compile(r"_cuda(?P<cuda>\d+)\w*\.(?:so|dll)$")
_OF_DRIVER = ("libcuda.so", "libnvidia-")
# Without dependencies: an installer that may change torch would replace the build that works.
_COMPILE = ("--no-deps", "--no-cache-dir", "--no-build-isolation", "--no-binary", ":all:")
_UNSTABLE = re.compile(r"dev|git|a\d|b\d|rc\d|nv\d")


def _named(extension: Extension) -> str:
    return f"{extension.package} {extension.version}".rstrip()


def _examined(m: Case) -> list[Extension]:
    """The packages whose examined library is one that this torch would load.

    bitsandbytes has a library for each CUDA version, and loads the one of torch's.
    """
    found = ((each, _BITSANDBYTES.search(each.library)) for each in m.extensions)
    ours = m.torch_cuda.replace(".", "")
    return [each for each, of in found if each.package != "bitsandbytes" or not of or of["cuda"] == ours]


@rule("P05", "extensions", "torchvision or torchaudio is built for another torch")
def companions(m: Case) -> Match | None:
    """The pinned release differs, or one is a CPU build and torch is not."""
    trio = [each for each in m.extensions if each.package in _TRIO]
    release = m.torch_version.partition("+")[0]
    lines = []
    for each in trio:
        pin = _PIN.search(each.wants_torch)
        wanted, installed = numbers_of(pin["version"]) if pin else (), numbers_of(release)
        # of development versions only major and minor numbers count
        unstable = pin and (_UNSTABLE.search(pin["version"]) or _UNSTABLE.search(release))
        length = 2 if unstable else min(len(wanted), len(installed))
        if pin and release and wanted[:length] != installed[:length]:
            lines.append(f"{_named(each)} needs torch {pin['version']}, and {release} is installed")
        elif each.local == "cpu" and m.torch_cuda and each.package == "torchvision":
            lines.append(f"{_named(each)} is a build without CUDA, and torch has CUDA {m.torch_cuda}")
    if not lines:
        return None
    return Match(tuple(lines), _with_torch(m, {each.package for each in trio}), severity="warning")


def _with_torch(m: Case, packages: set[str]) -> Lines:
    """Reinstall companions of torch, from the index of torch's own build."""
    release, _, build = m.torch_version.partition("+")
    index = f"{INDEX}/{build}" if re.fullmatch(r"cu\d+|cpu|xpu|rocm[\d.]+", build) else ""
    names = sorted(packages)
    return (*fixes.uninstall(m, *names), *fixes.install(m, f"torch=={release}", *names, index=index))


@rule("P06", "extensions", "a package was compiled against another torch")
def other_torch(m: Case) -> Match | None:
    """Symbols of torch, or libraries, that a package needs do not exist."""
    lines: list[str] = []
    packages = set()
    for each in _examined(m):
        name, missing = each.library or _named(each), [lib for lib in each.missing if not lib.startswith(_OF_DRIVER)]
        what = [f"{name} needs {symbol}, which torch does not define" for symbol in each.undefined[:2]]
        what += [f"{name} needs {lib}, which is not found anywhere" for lib in missing[:2]]
        lines += what
        packages |= {each.package} if what else set()
    if not packages:
        return None
    companions = packages & {*_TRIO}  # they have no source distribution
    others = sorted(packages - companions)
    fix = _with_torch(m, companions) if companions else ()
    if others:
        release = m.torch_version.partition("+")[0]
        cuda = f" and CUDA {m.torch_cuda}" if m.torch_cuda else ""
        wheels = f"Install wheels of {', '.join(others)} built for torch {release}{cuda}; or compile with that toolkit:"
        fix = (*fix, wheels, *fixes.install(m, *_COMPILE, *others, force=True))
    return Match(tuple(lines[:8]), fix, severity="warning")


@rule("A03", "extensions", "a package has no code for this card")
def no_code(m: Case) -> Match | None:
    """None of a package's architectures runs on any card of this process."""
    found, cuda = [card for card in m.cards if card.sure], m.built_with
    if not found or cuda is None:
        return None
    poor = [
        each
        for each in _examined(m)
        if each.architectures and not any(covers(each.architectures, card.capability, cuda) for card in found)
    ]
    if not poor:
        return None
    lines = (f"{_named(each)} has code for {' '.join(each.architectures)}" for each in poor)
    names = sorted({each.package for each in poor})
    wanted = ";".join(sorted({f"{a}.{b}" for a, b in (card.capability for card in m.cards)}))
    fix = (
        "Try the newest release:",
        *fixes.install(m, "--no-deps", "--upgrade", *names, force=True),
        "Or compile it for this card, with a CUDA toolkit of torch's version installed:",
        *fixes.set_variable(m, "TORCH_CUDA_ARCH_LIST", wanted),
        *fixes.install(m, *_COMPILE, *names, force=True),
    )
    return Match((*lines, *map(str, found)), fix, severity="warning")


# -- what goes wrong although the driver and the build are right

_BUSY = r"busy or unavailable"
_STICKY = r"device-side assert|illegal memory access|unspecified launch failure|misaligned address"
_ENOUGH = 1 << 30  # free bytes that are enough for a small tensor: a context takes half of it
_MODULE = re.compile(r"No module named '(?P<name>[\w.]+)'")
_WORK = ("kernel", "matmul", "convolution")
_STEPS = {
    "available": "torch.cuda.is_available() fails",
    "count": "torch.cuda.device_count() fails",
    "kernel": "the first kernel of torch fails",
    "matmul": "a matrix product fails on the GPU",
    "convolution": "a convolution fails on the GPU",
    "cpu": "torch cannot compute even on the CPU",
}


def _gpus(m: Case) -> tuple[NvmlGpu, ...]:
    """The cards of this process, as NVML sees them; all of them if CUDA did not say which."""
    given = {gpu.uuid for gpu in m.driver.cuda.gpus if gpu.uuid}
    known = tuple(gpu for gpu in m.driver.nvml.gpus if gpu.uuid in given)
    return known or m.driver.nvml.gpus


@rule("S06", "run", "the virtual GPU has no licence")
def unlicensed(m: Case) -> Match | None:
    """An error if torch fails; a warning if it still works."""
    found = [gpu for gpu in _gpus(m) if gpu.licence == "unlicensed"]
    if not found:
        return None
    lines = (f"{gpu.name} is a virtual GPU without a licence" for gpu in found)
    enter = "Enter the licence server or token in /etc/nvidia/gridd.conf, then (needs root):"
    told = m.complaint(rf"{_BUSY}|Grid license")
    fix = (enter, fixes.sudo(m, "systemctl restart nvidia-gridd"))
    return Match((*lines, quoted(told)), fix, severity="error" if told else "warning")


@rule("S05", "run", "the card's compute mode excludes this process")
def reserved(m: Case) -> Match | None:
    """torch was refused and the mode explains it; or it was not run, and no card is usable."""
    gpus, told = _gpus(m), m.complaint(_BUSY)
    closed = [gpu for gpu in gpus if gpu.compute_mode == "prohibited"]
    taken = [gpu for gpu in gpus if gpu.compute_mode.startswith("exclusive") and gpu.processes]
    by_cuda = [gpu.name for gpu in m.driver.cuda.gpus if gpu.compute_mode == 2]
    none_left = len(closed) + len(taken) == len(gpus) and bool(closed or taken)
    if not (closed or taken or by_cuda) or not (told or (m.torch_not_run and none_left)):
        return None
    mode = [f"{gpu.name} is in compute mode {gpu.compute_mode}" for gpu in (*closed, *taken)]
    mode = mode or [f"{name} is in compute mode prohibited" for name in by_cuda]
    users = (f"in use by {process}" for gpu in taken for process in gpu.processes)
    wait = "Wait for the other process, or end it. Or let several share the card (needs root):" if taken else ""
    fix = (wait, fixes.sudo(m, "nvidia-smi -c 0"))
    return Match((quoted(told), *mode, *users), fix, likely=not told and not closed)


@rule("X06", "run", "the GPU's memory is full")
def no_memory(m: Case) -> Match | None:
    """There was no memory for a small tensor; only likely if the card seems to have some."""
    step = m.failed("init", *_WORK)
    if step is None or "out of memory" not in step.error.lower():
        return None
    known = [gpu for gpu in _gpus(m) if gpu.free >= 0]
    limit = m.platform.address_space
    if limit and known and min(gpu.free for gpu in known) > _ENOUGH:
        why = "CUDA reserves more address space than there is memory. Lift the limit in the shell or the job:"
        evidence = (f"ulimit -v is {limit >> 30} GB", quoted(step.error))
        return Match(evidence, (why, "$ ulimit -v unlimited"), "a limit on the address space leaves CUDA no room")
    free = (f"{gpu.name} has {gpu.free >> 20} MB free of {gpu.memory >> 20}" for gpu in known)
    users = [f"{process} is using {gpu.name}" for gpu in _gpus(m) for process in gpu.processes]
    fix = ("End the processes that hold the card's memory, or use another card:", "$ nvidia-smi")
    full = any(gpu.free < _ENOUGH for gpu in known)
    return Match((quoted(step.error), *free, *users[:6]), fix, likely=not full)


@rule("X05", "run", "a kernel crashes on the GPU")
def dead_kernel(m: Case) -> Match | None:
    """Our own small operations failed in this way."""
    step = m.failed("init", *_WORK)
    if step is None or not re.search(_STICKY, step.error):
        return None
    fix = (
        "No program causes this. Look for Xid errors (needs root), then reboot or reset the card:",
        fixes.sudo(m, "dmesg | grep -i xid"),
        fixes.reboot(m),
    )
    return Match((f"in the step {step.name}", quoted(step.error)), fix, "a trivial kernel crashes on the GPU")


@rule("X07", "run", "two versions of a CUDA library are loaded in one process")
def two_versions(m: Case) -> Match | None:
    """torch alone loaded two versions of one library; an error only if it fails."""
    by_name: dict[str, list[str]] = {}
    for path in m.torch_run.libraries:
        name = path.rpartition("/")[2]
        if is_nvidia_library(name):
            by_name.setdefault(name.partition(".so")[0], []).append(path)
    double = [path for paths in by_name.values() if len(set(paths)) > 1 for path in paths]
    if not double or m.computes:
        return None
    step = m.failed(*_WORK)
    evidence = (*(f"loaded: {path}" for path in double[:6]), quoted(step.error if step else ""))
    fix = ("Remove CUDA directories from LD_LIBRARY_PATH, and uninstall packages that bring another CUDA version.",)
    return Match(evidence, fix, likely=True) if step else Match(evidence, fix, severity="note")


page_only("X01", "run", "CUDA is used in a forked process")
page_only("S08", "run", "the memory of a GH200 or GB200 seems wrong")
page_only("S09", "run", "several GPUs fail together, but each works alone")


# -- symptoms: reported as they were seen, and only if no rule explains them


def _lines(error: str) -> Lines:
    return tuple(line.strip() for line in error.splitlines() if line.strip())[:4]


@rule("X11", "run", "torch hangs or crashes", symptom=True)
def no_return(m: Case) -> Match | None:
    """The torch child hung or crashed."""
    answer, step = m.torch_run.answer, m.failed()
    hung = answer.state == "hung"
    if not hung and answer.state != "crashed":
        return None
    title = f"torch {'hangs' if hung else 'crashes'}{f' in {step.name}' if step else ''}"
    told = answer.detail or answer.state
    lib = m.libcuda
    if m.driver.cuda.answer.state == "crashed" and step and step.name != "import":
        # torch is not the reason, so reinstalling it does not help
        where = f"libcuda.so.1 is {lib.path}{f', found through {lib.via}' if lib.via else ''}" if lib else ""
        evidence = (told, f"also without torch: {m.answer}", where)
        again = "The driver's library crashes, not torch: reinstall the driver, or remove the library that replaces it."
        drop = fixes.drop_library(m, lib.path, lib.via) if lib else ()
        if lib and drop:
            return Match(evidence, (f"{lib.path} crashes, not torch. Remove it:", *drop), title)
        return Match(evidence, (again,), title)
    slow = ("Give it more time, in case it is only slow:", "$ transload doctor --timeout 120")
    return Match((told,), slow if hung else m.reinstall, title, likely=hung)


@rule("X10", "run", "torch cannot be imported", symptom=True)
def no_import(m: Case) -> Match | None:
    """The import raised."""
    if not m.import_error or m.torch_run.answer.state in ("hung", "crashed"):
        return None
    module = _MODULE.search(m.import_error)
    name = module["name"].partition(".")[0] if module else "torch"
    fix = m.reinstall if name == "torch" else fixes.install(m, name.replace("_", "-"))
    return Match(_lines(m.import_error), fix)


@rule("X09", "run", "torch sees no GPU although the driver has one", symptom=True)
def unseen(m: Case) -> Match | None:
    """The driver works, torch has CUDA, and is_available() is False or its start failed."""
    run, cuda, step = m.torch_run, m.driver.cuda, m.failed("init")
    error = step.error if step else ""
    if not (m.imported and (run.available is False or step) and cuda.works and m.torch_cuda):
        usable = any(other.kind == "rocm" and other.usable for other in m.accelerators)
        if not (usable and run.hip and run.available is False):
            return None
        title = "torch sees no GPU although ROCm has one"
        return Match(("/dev/kfd has a GPU", quoted(error)), ("$ rocminfo",), title)
    other = [path for path in run.libraries if "/libcuda.so" in path and cuda.library not in ("", path)]
    names = [name for name in ("LD_LIBRARY_PATH", "LD_PRELOAD") if m.env(name)]
    without = "Try without the variables that change the loader's search path:"
    unset = (without, *fixes.unset(m, *names)) if names else ()
    python = m.python.executable or "python"
    evidence = (
        f"the driver starts and finds {cuda.count} GPU{'' if cuda.count == 1 else 's'}",
        quoted(error if step else m.complaint(r"CUDA")),
        *(f"torch loaded {path}, but the driver's library is {cuda.library}" for path in other),
    )
    compare = f"$ LD_DEBUG=libs {python} -c 'import torch; torch.cuda.init()' 2>&1 | grep libcuda"
    return Match(evidence, (*unset, compare))


@rule("X12", "run", "torch fails on the GPU", symptom=True)
def fails_at_work(m: Case) -> Match | None:
    """A step after the import failed, on a machine whose driver works, or on the CPU."""
    step = m.failed(*_STEPS)
    if step is None or m.torch_run.answer.state in ("hung", "crashed"):
        return None
    if step.name in _WORK and "the result is" in step.error:
        fix = ("A card that computes wrong results is broken: test its memory, or replace it.",)
        return Match(_lines(step.error), fix, "the GPU computes wrong results")
    return Match(_lines(step.error), m.reinstall, _STEPS[step.name])


@rule("X13", "run", "the machine could not be examined", symptom=True)
def unexamined(m: Case) -> Match | None:
    """A child could not be started: an error if there is a GPU and it is unknown whether it works; else a warning."""
    not_asked = m.driver.cuda.answer.detail or m.problems.get("cuda", "")
    not_run = m.torch_run.answer.detail or m.problems.get("torch run", "")
    driver = m.driver_unasked and m.hardware.present and not m.works
    torch = m.torch_not_run and bool(not_run) and not m.python.problem
    if not (driver or torch):
        return None
    evidence = (
        f"the CUDA driver was not asked: {not_asked}" if driver else "",
        f"torch was not run: {not_run}" if torch else "",
    )
    said = " ".join(evidence).lower()
    fix: Lines = ("Repair what is described above, and run it again.",)
    if "permission" in said or "not permitted" in said:
        fix = ("Run it as a user who may execute that interpreter.",)
    elif any(word in said for word in ("temporarily unavailable", "memory", "thread")):
        fix = (
            "No more processes can be started. Check the limits, and end processes that are not needed:",
            "$ ulimit -u",
            "$ cat /sys/fs/cgroup/pids.max",
        )
    title = "" if driver else "torch could not be run, so whether it works is unknown"
    return Match(evidence, fix, title, "error" if driver else "warning")


page_only("N03", "run", "a program says that torch cannot use the GPU")
