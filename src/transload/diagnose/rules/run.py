"""Running torch: whether the driver, cards and packages are compatible with it, and what else goes wrong."""

from __future__ import annotations

import re

from transload.diagnose import fixes, tables
from transload.diagnose.case import Card, Case, Found, Lines, Match, is_nvidia_library, rules, torch_says
from transload.diagnose.tables import System
from transload.machine import Extension
from transload.render.words import plural

_TOO_OLD = re.compile(r"NVIDIA driver on your system is too old \(found version (\d+)\)")
_NO_KERNEL = r"no kernel image is available"
_NO_CODE = rf"{_NO_KERNEL}|not compatible with the current PyTorch|which is of (?:compute|cuda) capability"


# -- the driver


@rules("fit", "V05", "V01", "V02", "V03", likely=("V05",))
def driver_for_build(m: Case) -> Found:
    """The driver against the CUDA version that torch was built with."""
    wheel, driver, torch_cuda = m.built_with, m.driver_cuda, m.torch_cuda
    # under WSL it is the Windows driver
    system: System = "windows" if m.platform.system == "Windows" or m.surroundings.wsl else "linux"
    floor, shipped = tables.driver_floor(torch_cuda, system), tables.toolkit_driver(torch_cuda, system)
    complaint = m.complaint(_TOO_OLD.pattern)
    too_old = _TOO_OLD.search(complaint)

    if too_old and wheel and tables.driver_runs(int(too_old[1]), wheel) and not m.computes:  # it is new enough
        loaded = [path for path in m.torch_run.libraries if "/libcuda.so" in path] or [m.driver.cuda.library]
        preload = m.env("LD_PRELOAD") or " ".join(m.driver.libraries.preload)
        named = tables.cuda_text(int(too_old[1]))
        evidence: Lines = (
            f"torch calls a driver for CUDA {named} too old, but was built with CUDA {torch_cuda}",
            *(f"libcuda.so.1 is {path}" for path in loaded if path),
            f"preloaded: {preload}" if preload else "",
        )
        yield "V05", Match(evidence, fixes.unset(m, "LD_PRELOAD") if preload else None)

    if driver and wheel and not tables.driver_runs(driver, wheel) and not m.torch_run.cuda_works:
        version = m.driver.nvml.driver or m.kernel.version
        needs = f", which needs driver {floor} or newer" if floor else ""
        evidence = (
            f"{f'driver {version}' if version else 'the driver'} supports CUDA up to {tables.cuda_text(driver)}",
            f"torch {m.torch_version} was built with CUDA {torch_cuda}{needs}",
            torch_says(complaint),
        )
        fix = fixes.install_wheel(m)
        # if the card needs a newer driver anyway, or this torch has no code for it, there is only one solution
        if floor and not fixes.wheel_choice(m).needs_driver and not _misfits(m):
            update = fixes.install_driver(m, at_least=tables.branch_of(floor))
            fix = m.steps("V01", wheel=fix, floor=floor, update=update)
        yield "V01", Match(evidence, fix)

    if (ptx_complaint := m.complaint(r"unsupported toolchain")) or _only_newer_ptx(m):
        known = f"the driver supports CUDA up to {tables.cuda_text(driver)}, torch was built with {torch_cuda}"
        evidence = (torch_says(ptx_complaint), known if driver and torch_cuda else "")
        least = f" to {shipped} or newer" if shipped else ""
        fix = m.steps("V02", least=least, update=fixes.install_driver(m, at_least=tables.branch_of(shipped)))
        yield "V02", Match(evidence, fix, likely=not ptx_complaint)

    if (lacks := m.complaint(r"API call is not supported in the installed CUDA driver")) and m.failed():
        yield "V03", Match((torch_says(lacks),), fixes.install_driver(m, at_least=tables.branch_of(shipped)))


def _only_newer_ptx(m: Case) -> bool:
    """Whether torch was not run, has only PTX for the cards, and the driver is older than the PTX."""
    cuda, (codes, proven) = m.built_with, _codes(m)
    if not m.torch_not_run or not cuda or not proven:
        return False
    if not 0 < m.driver_cuda < cuda[0] * 1000 + cuda[1] * 10:
        return False
    compiled = [code for code in codes if code.startswith("sm_")]
    cards = [card.capability for card in m.cards]
    return any(tables.covers(codes, card, cuda) for card in cards) and not any(
        tables.covers(compiled, card, cuda) for card in cards
    )


# -- the cards


def _misfits(m: Case) -> tuple[Card, ...]:
    """The cards that this torch has no code for, by its binaries or else the tables; none if unknown."""
    cuda, (known, _) = m.built_with, _codes(m)
    if not cuda or not known or m.torch.shadow:
        return ()
    bad = tuple(card for card in m.cards if not tables.covers(known, card.capability, cuda))
    # torch computes on its first card, so it has code for that one, whatever the lists say
    return () if m.torch_run.cuda_works and m.cards and m.cards[0] in bad else bad


def _codes(m: Case) -> tuple[Lines, bool]:
    """The architectures torch has code for, and whether that is proven: by its binaries or its own list.

    Otherwise they are what the tables say about that build.
    """
    codes = tuple(m.torch_libraries.cubins or ()) or m.torch_libraries.architectures or m.torch_run.architectures
    if codes:
        return codes, True
    local = m.torch_version.partition("+")[2]
    build = tables.build_of(m.torch_version, fixes.wheel_platform(m), local) if local else None
    return build.archs if build else (), False


def _numbers(code: str) -> tuple[int, int]:
    found = re.search(r"[0-9]{1,4}", code.partition("_")[2])
    number = int(found[0]) if found else 0
    return number // 10, number % 10


@rules("fit", "A05", "A01", "A02", "R02")
def no_code_for_card(m: Case) -> Found:
    """Cards without code: an error, or a warning if torch works on another card."""
    bad, (codes, proven) = _misfits(m), _codes(m)
    if bad:
        spared = m.torch_run.cuda_works or (len(bad) < len(m.cards) and not m.complaint(_NO_KERNEL))
        listed = " ".join(sorted(dict.fromkeys(codes), key=_numbers))
        source = "has code for" if proven else "should have code for"
        evidence = (*map(str, bad), f"torch {m.torch_version} {source} {listed}", torch_says(m.complaint(_NO_CODE)))
        jetson = m.hardware.tegra or any(card.capability in tables.TEGRA for card in bad)
        newer = any(card.capability > max(map(_numbers, codes)) for card in bad)
        sure = proven and all(card.sure for card in bad)
        fix = fixes.jetson_torch(m) if jetson else fixes.install_wheel(m)
        code = "A05" if jetson else "A01" if newer else "A02"
        yield code, Match(evidence, fix, severity="warning" if spared else "error", likely=not sure)

    architectures = m.torch_libraries.architectures or m.torch_run.architectures
    known = {code.partition(":")[0] for code in architectures if code.startswith("gfx")}
    chips = [other.detail for other in m.usable("rocm") if other.detail.startswith("gfx")]
    override = "HSA_OVERRIDE_GFX_VERSION"
    if known and chips and not m.env(override) and not set(chips) & known and not m.torch_run.cuda_works:
        near = {"gfx103": "10.3.0", "gfx110": "11.0.0"}.get(chips[0][:6], "")
        fix = m.steps("R02 near", override=fixes.set_variable(m, override, near)) if near else m.steps("R02")
        yield "R02", Match((f"the card is {chips[0]}", f"torch has code for {' '.join(sorted(known))}"), fix)


# -- other packages: torch works without them, so these are warnings

_COMPANIONS = ("torchvision", "torchaudio", "torchtext", "torchcodec")
_OF_DRIVER = ("libcuda.so", "libnvidia-")
_PIN = re.compile(r"==\s*(?P<version>\d[\w.]*)")
_BITSANDBYTES = re.compile(r"bitsandbytes_cuda(?P<cuda>\d+)\w*\.(?:so|dll)$")
# Without dependencies: the installer might replace the torch build that works.
_COMPILE = ("--no-deps", "--no-cache-dir", "--no-build-isolation", "--no-binary", ":all:")
# What compiling needs, and environments of uv lack, as do those of venv since Python 3.12.
_COMPILE_WITH = ("--no-deps", "setuptools", "wheel", "packaging", "ninja")
_NEWEST = ("--no-deps", "--upgrade")
_UNSTABLE = re.compile(r"dev|git|a\d|b\d|rc\d|nv\d")


def _named(extension: Extension) -> str:
    return f"{extension.package} {extension.version}".rstrip()


@rules("extensions", "P05", "P06", "A03")
def other_packages(m: Case) -> Found:
    """Packages that were built for another torch, another CUDA or other cards."""
    release, _, build = m.torch_version.partition("+")
    cuda = m.built_with

    # the pinned release differs, or the package is a CPU build and torch is not
    companions = [each for each in m.extensions if each.package in _COMPANIONS]
    lines = []
    for each in companions:
        pin = _PIN.search(each.wants_torch)
        wanted, installed = tables.numbers_of(pin["version"]) if pin else (), tables.numbers_of(release)
        # only major and minor numbers of development versions count
        unstable = pin and (_UNSTABLE.search(pin["version"]) or _UNSTABLE.search(release))
        length = 2 if unstable else min(len(wanted), len(installed))
        if pin and release and wanted[:length] != installed[:length]:
            lines.append(f"{_named(each)} needs torch {pin['version']}, and {release} is installed")
        elif each.local == "cpu" and m.torch_cuda and each.package == "torchvision":
            lines.append(f"{_named(each)} is a build without CUDA, and torch has CUDA {m.torch_cuda}")

    def with_torch(packages: set[str]) -> Lines:
        """Reinstall companions of torch, from the index of torch's own build."""
        index = f"{tables.INDEX}/{build}" if re.fullmatch(r"cu\d+|cpu|xpu|rocm[\d.]+", build) else ""
        names = sorted(packages)
        return (*fixes.uninstall(m, *names), *fixes.install(m, f"torch=={release}", *names, index=index))

    def compiled(purpose: str, packages: list[str], *first: str) -> Lines:
        """Compile those that can be, which needs the toolkit that torch was built with."""
        names = [name for name in packages if name in tables.table("packages")["with_sources"].split()]
        here = m.toolkit.version
        found = f", and {m.toolkit.nvcc} is of {here}" if here else ", and no nvcc was found"
        needs = f" (that needs the toolkit of CUDA {m.torch_cuda}{found})" if m.torch_cuda else ""
        words = f"Or compile {', '.join(names)}{purpose}{'' if here and here.startswith(m.torch_cuda) else needs}:"
        commands = (*fixes.install(m, *_COMPILE_WITH), *fixes.install(m, *_COMPILE, *names, force=True))
        return (words, *first, *dict.fromkeys(commands)) if names else ()

    if lines:
        yield "P05", Match(tuple(lines), with_torch({each.package for each in companions}), severity="warning")

    # symbols of torch, or libraries, that a package needs do not exist
    libraries = ((each, _BITSANDBYTES.search(each.library)) for each in m.extensions)
    # bitsandbytes has a library for each CUDA version, and loads one of torch's major version
    ours = m.torch_cuda.partition(".")[0] or "no CUDA"
    examined = [each for each, of in libraries if not of or of["cuda"].startswith(ours)]
    lines, packages = [], set()
    for each in examined:
        name, missing = each.library or _named(each), [lib for lib in each.missing if not lib.startswith(_OF_DRIVER)]
        what = [f"{name} needs {symbol}, which torch does not define" for symbol in each.undefined[:2]]
        what += [f"{name} needs {lib}, which is not found anywhere" for lib in missing[:2]]
        lines += what
        packages |= {each.package} if what else set()
    if packages:
        fix = with_torch(packages & {*_COMPANIONS}) if packages & {*_COMPANIONS} else ()
        if "bitsandbytes" in packages:
            fix = (*fix, "Install a bitsandbytes that knows this CUDA:", *fixes.install(m, *_NEWEST, "bitsandbytes"))
        if others := sorted(packages - {*_COMPANIONS, "bitsandbytes"}):
            fits = f"built for torch {release}{f' and CUDA {m.torch_cuda}' if m.torch_cuda else ''}"
            fix = (*fix, f"Install wheels of {', '.join(others)} {fits}.", *compiled("", others))
        yield "P06", Match(tuple(lines[:8]), fix, severity="warning")

    # none of a package's architectures runs on any card of this process
    cards = [card for card in m.cards if card.sure]
    with_code = ((each, each.architectures) for each in examined if each.architectures)
    poor = [each for each, codes in with_code if not any(tables.covers(codes, card.capability, cuda) for card in cards)]
    if cards and cuda and poor:
        has = (f"{_named(each)} has code for {' '.join(each.architectures)}" for each in poor)
        names = sorted({each.package for each in poor})
        levels = ";".join(sorted({"{}.{}".format(*card.capability) for card in m.cards}))
        only = fixes.set_variable(m, "TORCH_CUDA_ARCH_LIST", levels)
        newest = fixes.install(m, *_NEWEST, *names, force=True)
        fix = ("Try the newest release:", *newest, *compiled(" for this card", names, *only))
        yield "A03", Match((*has, *map(str, cards)), fix, severity="warning")


# -- what goes wrong although the driver and the build are right

_BUSY = r"busy or unavailable"
_STICKY = r"device-side assert|illegal memory access|unspecified launch failure|misaligned address"
_ENOUGH = 1 << 30  # free bytes that suffice for a small tensor: a context takes half of them
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


@rules("run", "S06", "S05", "X06", "X05", "X07")
def not_allowed_to_work(m: Case) -> Found:
    """What prevents even small operations on the card."""
    # the cards of this process, as NVML sees them; all of them if CUDA did not say which
    given = {gpu.uuid for gpu in m.driver.cuda.gpus if gpu.uuid}
    gpus = [gpu for gpu in m.driver.nvml.gpus if gpu.uuid in given] or m.driver.nvml.gpus
    step, worked = m.failed("init", *_WORK), m.failed(*_WORK)
    error = step.error if step else ""

    if found := [gpu for gpu in gpus if gpu.licence == "unlicensed"]:
        lines = (f"{gpu.name} is a virtual GPU without a licence" for gpu in found)
        complaint = m.complaint(rf"{_BUSY}|Grid license")
        yield "S06", Match((*lines, torch_says(complaint)), severity="error" if complaint else "warning")

    # torch was refused and the mode explains it; or it was not run, and no card is usable
    complaint = m.complaint(_BUSY)
    closed = [gpu for gpu in gpus if gpu.compute_mode == "prohibited"]
    taken = [gpu for gpu in gpus if gpu.compute_mode.startswith("exclusive") and gpu.processes]
    mode = [f"{gpu.name} is in compute mode {gpu.compute_mode}" for gpu in (*closed, *taken)]
    none_left = mode and len(mode) == len(gpus) and m.torch_not_run
    mode = mode or [f"{gpu.name} is in compute mode prohibited" for gpu in m.driver.cuda.gpus if gpu.compute_mode == 2]
    if mode and (complaint or none_left):
        users = (f"in use by {process}" for gpu in taken for process in gpu.processes)
        likely = not complaint and not closed
        yield "S05", Match((torch_says(complaint), *mode, *users), m.steps("S05", taken=taken), likely=likely)

    if "out of memory" in error.lower():  # for a small tensor; only likely if the card seems to have some
        known, limit = [gpu for gpu in gpus if gpu.free >= 0], m.platform.address_space
        if limit and known and min(gpu.free for gpu in known) > _ENOUGH:
            evidence: Lines = (f"ulimit -v is {limit >> 30} GB", torch_says(error))
            yield "X06", Match(evidence, m.steps("X06 limit"))
        else:
            free = (f"{gpu.name} has {gpu.free >> 20} MB free of {gpu.memory >> 20}" for gpu in known)
            holders = [f"{process} is using {gpu.name}" for gpu in gpus for process in gpu.processes]
            full = any(gpu.free < _ENOUGH for gpu in known)
            yield "X06", Match((torch_says(error), *free, *holders[:6]), likely=not full)

    if step and re.search(_STICKY, error):
        yield "X05", Match((f"in the step {step.name}", torch_says(error)))

    by_name: dict[str, list[str]] = {}
    for path in m.torch_run.libraries:
        name = path.rpartition("/")[2]
        if is_nvidia_library(name):
            by_name.setdefault(name.partition(".so")[0], []).append(path)
    double = [path for paths in by_name.values() if len(set(paths)) > 1 for path in paths]
    if double and not m.computes:  # an error only if torch fails
        evidence = (*(f"loaded: {path}" for path in double[:6]), torch_says(worked.error if worked else ""))
        yield "X07", Match(evidence, severity="error" if worked else "note", likely=bool(worked))


# -- symptoms: reported as they were seen, and only if no rule explains them


def _lines(error: str) -> Lines:
    return tuple(line.strip() for line in error.splitlines() if line.strip())[:4]


@rules("run", "X11", "X10", "X09", "X12", "X13", symptom=True)
def symptoms(m: Case) -> Found:
    """How the torch child ended, its first step that failed, and what could not be asked at all."""
    run, cuda, lib = m.torch_run, m.driver.cuda, m.libcuda
    state, step, start = run.answer.state, m.failed(), m.failed("init")

    if state in ("hung", "crashed"):
        hung, detail = state == "hung", run.answer.detail or state
        title = f"= torch {'hangs' if hung else 'crashes'}{f' in {step.name}' if step else ''}"
        if cuda.answer.state == "crashed" and step and step.name != "import":
            # torch is not the reason, so reinstalling it does not help
            where = f"libcuda.so.1 is {lib.path}{f', found through {lib.via}' if lib.via else ''}" if lib else ""
            fix = m.steps("X11 driver")
            if lib and (drop := fixes.drop_library(m, lib.path, lib.via)):
                fix = m.steps("X11 library", path=lib.path, drop=drop)
            yield "X11", Match((detail, f"also without torch: {m.answer}", where), (title, *fix))
        else:
            fix = m.steps("X11 hung" if hung else "X11", waits=" at " in detail)
            yield "X11", Match((detail,), (title, *fix), likely=hung)
    elif m.import_error:
        module = _MODULE.search(m.import_error)
        name = module["name"].partition(".")[0] if module else "torch"
        fix = m.reinstall if name == "torch" else fixes.install(m, name.replace("_", "-"))
        yield "X10", Match(_lines(m.import_error), fix)

    error = start.error if start else ""
    if m.imported and (run.available is False or start) and cuda.works and m.torch_cuda:
        other = [path for path in run.libraries if "/libcuda.so" in path and cuda.library not in ("", path)]
        names = [name for name in ("LD_LIBRARY_PATH", "LD_PRELOAD") if m.env(name)]
        unset = fixes.unset(m, *names) if names else ()
        evidence: Lines = (
            f"the driver starts and finds {plural(cuda.count, 'GPU')}",
            torch_says(error if start else m.complaint(r"CUDA")),
            *(f"torch loaded {path}, but the driver's library is {cuda.library}" for path in other),
        )
        yield "X09", Match(evidence, m.steps("X09", unset=unset, python=m.python.executable or "python"))
    elif run.hip and run.available is False and m.usable("rocm"):
        yield "X09", Match(("/dev/kfd has a GPU", torch_says(error)), m.steps("X09 rocm"))

    work = m.failed(*_STEPS)  # after the import, on a machine whose driver works, or on the CPU
    if work and state not in ("hung", "crashed"):
        wrong = work.name in _WORK and "the result is" in work.error
        fix = m.steps("X12 wrong") if wrong else m.steps("X12", what=_STEPS[work.name])
        yield "X12", Match(_lines(work.error), fix)

    # a child could not be started: an error if there is a GPU and it is unknown whether it works; else a warning
    not_asked = cuda.answer.detail or m.problems.get("cuda", "")
    not_run = run.answer.detail or m.problems.get("torch run", "")
    driver = m.driver_unasked and m.hardware.present and not m.works
    torch = m.torch_not_run and bool(not_run) and not (m.python.problem or m.torch.shadow)
    if driver or torch:
        evidence = (
            f"the CUDA driver was not asked: {not_asked}" if driver else "",
            f"torch was not run: {not_run}" if torch else "",
        )
        said = " ".join(evidence).lower()
        how = "X13 limit" if re.search("temporarily unavailable|memory|thread", said) else "X13"
        how = "X13 forbidden" if re.search("permission|not permitted", said) else how
        title = "" if driver else "= torch could not be run, so whether it works is unknown"
        yield "X13", Match(evidence, (title, *m.steps(how)), "error" if driver else "warning")
