"""Running a program as ``python`` would, in this process: what ``transload run`` does."""

from __future__ import annotations

import atexit
import builtins
import io
import os
import sys
from types import ModuleType

from transload.patching import HOME, changes, devices, explained, install

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

    _Found = tuple[str, Any, Any, Any]  # __file__, __loader__, __spec__, and the code


def program_of(
    words: list[str],
    *,
    module: bool,
    device: str = "auto",
    pretend: bool = False,
    quiet: bool = False,
    strict: bool = False,
    report: Callable[[dict[str, Any]], bool] | None = None,
) -> Callable[[], int]:
    """A function that runs a script or a module with its arguments, and raises what the program raises.

    ``pretend`` tells the program that CUDA is available. At its end the changes are listed, unless ``quiet``. If there
    are any, ``strict`` changes the exit code 0 to 1. ``report`` writes them as JSON, and says whether it could.
    """
    path = words[0]
    if not module and path != "-" and not os.access(path, os.R_OK):
        from transload.errors import CannotReadError
        from transload.findings import quoted

        what, fix = "there is no such script", ""
        if os.path.exists(path):
            what, fix = "no permission to read it", f"Ask its owner, or: chmod u+r {quoted(path)}"
        elif path in ("python", "python3"):
            fix = "Leave it out: transload run SCRIPT."
        elif "." not in path and os.sep not in path:
            fix = f"To run a module, use -m: transload run -m {quoted(path)}."
        raise CannotReadError(what, where=path, fix=fix)

    def run() -> int:
        devices.pretending = pretend
        install(device, explain=False)
        ending = _Ending(words[0], quiet=quiet, strict=strict, report=report)
        atexit.register(ending.show)
        main = ModuleType("__main__")
        try:
            main.__file__, main.__loader__, main.__spec__, code = (_module if module else _script)(words)
            main.__package__ = getattr(main.__spec__, "parent", None)
            if sys.version_info < (3, 14):
                main.__annotations__ = {}
            # Only __main__ has the module itself as __builtins__.
            vars(main).update(__cached__=getattr(main.__spec__, "cached", None), __builtins__=builtins)
            sys.modules["__main__"] = main  # it stays for atexit functions
            exec(code, vars(main))  # noqa: S102 - running the program is the purpose
            ending.program_code = 0
        except SystemExit as leaving:
            devices.refused = leaving.code not in (None, 0) and _was_refused(leaving)
            ending.program_code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
            if ending.program_code or not ending.examined:
                raise
        except BaseException as error:
            devices.refused = _was_refused(error)
            sys.excepthook = explained(sys.excepthook)  # around the one the program may have set
            raise
        if ending.examined:  # what Python does when a program ends: until then there may be other changes
            import threading

            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
        return ending.code

    return run


def _was_refused(error: BaseException) -> bool:
    """Whether a program ended because there is no GPU: its message says so, or it had just asked for one."""
    if devices.pretending or not devices.asked:
        return False
    trace, near, module = error.__traceback__, False, ""
    while trace is not None:
        place = trace.tb_frame.f_code
        near |= any((place, trace.tb_lineno - back) in devices.asked for back in range(6))
        module = trace.tb_frame.f_globals.get("__name__", "").partition(".")[0]
        trace = trace.tb_next
    if module in ("torch", "transload"):  # it failed inside torch, where another answer would not help
        return False
    import re

    return near or bool(not isinstance(error, OSError) and re.search("(?i)cuda|gpu|nvidia|accelerator", str(error)))


class _Ending:
    """What happens when the program has ended."""

    def __init__(
        self,
        script: str,
        *,
        quiet: bool,
        strict: bool,
        report: Callable[[dict[str, Any]], bool] | None,
    ) -> None:
        self.examined = strict or report is not None
        self.program_code: int | None = None  # None: an exception has ended it
        self.code = 0
        self._process, self._folder = os.getpid(), ""
        self._script, self._quiet, self._strict, self._report = script, quiet, strict, report
        if self.examined:
            changes.collect()
            self._folder = os.path.join(os.getcwd(), "")

    def show(self) -> None:
        """List on stderr what was changed: results of a CPU must not be mistaken for those of a GPU."""
        if self._process != os.getpid():
            return
        changes.read_record()
        if self._report is not None and not self._report(self._to_dict()):
            self.code = 2
        lines = []
        if self._strict and changes.noted:
            self.code = self.code or 1
            lines.append("transload run --strict: the program does not run here as it is:")
            lines += [f"  {self._shown(place)}: {changes.sentence(change)}" for change, place in changes.noted.items()]
        elif not self._quiet and os.environ.get("LOCAL_RANK", "0") == "0":
            lines = _listed()
        if sys.stderr is not None:
            sys.stderr.write("".join(f"{line}\n" for line in lines))

    def _to_dict(self) -> dict[str, Any]:
        rows = [
            {"kind": kind, "what": what, "instead": instead, "where": self._shown(place)}
            for (kind, what, instead), place in changes.noted.items()
        ]
        return {"schema": 1, "path": self._script, "ok": not rows, "exit_code": self.program_code, "changes": rows}

    def _shown(self, place: str) -> str:
        return place.removeprefix(self._folder)


def _listed() -> list[str]:
    """The list without places."""
    kinds: dict[str, list[str]] = {}
    for change in changes.noted:
        kinds.setdefault("" if change[0] in ("device", "feature") else change[0], []).append(changes.text_of(change))
    lines = [f"transload run changed: {', '.join(kinds[''])}"] if "" in kinds else []
    if "answered" in kinds:
        lines.append(f"CUDA calls answered on behalf of the CPU: {', '.join(kinds['answered'])}")
    if "pretended" in kinds:
        lines.append(f"CUDA calls that pretended there is a GPU: {_joined(kinds['pretended'])}")
    if devices.refused:
        asked = _joined(devices.asked.values())
        lines.append(f"The program called {asked}, and there is no GPU. --pretend-cuda pretends that there is one.")
    return lines


def _joined(questions: Iterable[str]) -> str:
    return " and ".join(sorted(set(questions), reverse=True))


def _module(words: list[str]) -> _Found:
    import runpy

    _set_sys_path(os.getcwd())
    sys.argv = ["-m", *words[1:]]  # while its packages are imported
    try:
        # As pdb and trace do: it supports packages with a __main__, and has Python's messages for what cannot be run.
        _, spec, code = runpy._get_module_details(words[0], _NoModuleError)  # type: ignore[attr-defined]
    except _NoModuleError as error:
        from transload.credentials import text_without_credentials

        sys.exit(f"transload run: {text_without_credentials(str(error))}")
    sys.argv[0] = spec.origin
    return spec.origin, spec.loader, spec, code


class _NoModuleError(ImportError):
    """The module cannot be run as a program."""


def _script(words: list[str]) -> _Found:
    from importlib.machinery import BuiltinImporter, SourceFileLoader, SourcelessFileLoader

    sys.argv = list(words)
    if words[0] == "-":  # a program from stdin: like Python, read all of it before running it
        _set_sys_path("" if os.name != "nt" else os.getcwd())
        source = sys.stdin.buffer.read() if sys.stdin is not None else b""
        return "<stdin>", BuiltinImporter, None, compile(source, "<stdin>", "exec", dont_inherit=True)
    path = os.path.join(os.getcwd(), words[0])  # like Python, which normalises it on Windows only
    if os.name == "nt":
        path = os.path.abspath(path)
    packed = not os.path.isfile(path)  # a folder, or a zip archive, with a __main__.py
    if not packed:
        with open(path, "rb") as start:
            may_be_archive = start.read(2) in (b"PK", b"#!")
        if may_be_archive:
            from zipfile import is_zipfile

            packed = is_zipfile(path)
    if packed:
        from pkgutil import get_importer

        _set_sys_path(path)
        finder: Any = get_importer(path)
        spec = finder.find_spec("__main__") if finder is not None else None
        if spec is None:
            sys.exit(f"transload run: can't find '__main__' module in {path!r}")
        return spec.origin, spec.loader, spec, spec.loader.get_code("__main__")
    _set_sys_path(os.path.dirname(os.path.realpath(path)))
    if path.endswith(".pyc"):
        compiled = SourcelessFileLoader("__main__", path)
        return path, compiled, None, compiled.get_code("__main__")
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    return path, SourceFileLoader("__main__", path), None, code


def _set_sys_path(folder: str) -> None:
    """Put the program's folder first on ``sys.path``, and keep transload's there for later imports."""
    if not getattr(sys.flags, "safe_path", sys.flags.isolated):
        sys.path[:1] = [folder]
    if HOME not in sys.path:
        sys.path.append(HOME)
