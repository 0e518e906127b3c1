"""The entry point: finds the command, runs it, and turns any exception into one message and an exit code.

0: all is well. 1: the thing examined has a problem. 2: the command could not do its job. Nothing is imported before the
command is known; ``--help`` and ``--version`` need no argument parser.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # importing typing takes longer than everything else in --version
if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from typing import Any, BinaryIO, NoReturn

    from transload.checkpoint import Checkpoint
    from transload.render.lines import Block

    Outcome = int | Callable[[], int]

COMMANDS: dict[str, str] = {
    "check": "say if a checkpoint loads here, and what torch.load would report",
    "completion": "print the completion script for a shell",
    "convert": "convert to safetensors, torch zip, npz, raw, DCP or universal",
    "diff": "say how two checkpoints differ: keys, shapes, dtypes, numbers",
    "doctor": "say why CUDA is unavailable: the cause, the evidence and the fix",
    "explain": "say what an error message means, and how to fix it",
    "inspect": "show what a checkpoint contains, and if it is safe and complete",
    "rescue": "recover what is left of a damaged checkpoint",
    "retag": "change device tags in place, so that torch.load works anywhere",
    "run": "run a Python program unchanged on the devices of this machine",
    "verify": "check that every byte of a checkpoint is as it was saved",
}
"""Each command and its line of help. ``help.md`` has the options, and the rest of what the help shows.

Commands are in ``commands`` and the modules below, and here if they must start quickly: ``run_x(arguments)`` returns
the exit code of the command ``x``, or a function that runs a program and returns its exit code. Only the module of the
requested command is imported.
"""

_MODULES = {"completion": "completion", "doctor": "doctor", "inspect": "main", "run": "main"}
_HELP_WIDTH = 80
_OWN_OUTPUT = ("completion", "run")  # whose output is a script, or that of the program
_USAGE = "usage: transload COMMAND [options]"


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code; ``argv`` defaults to ``sys.argv[1:]``.

    Exceptions and exits of a program that ``transload run`` has started are not handled here.
    """
    try:
        code = _dispatch(sys.argv[1:] if argv is None else argv)
        if sys.stdout is not None:
            sys.stdout.flush()  # now, while a closed pipe or a full disk can still be reported
        if argv is None and not callable(code):
            import gc

            gc.freeze()  # the process ends: its last collection would only examine every object
    except KeyboardInterrupt:
        return 130  # 128 + SIGINT, as shells report it
    except SystemExit as leaving:  # argparse exits after printing the help
        return leaving.code if isinstance(leaving.code, int) else 0
    except BrokenPipeError:
        _silence_stdout()
        return 141  # 128 + SIGPIPE
    except Exception as error:  # noqa: BLE001  the last resort
        from transload.cli.output import as_ours, is_out_of_memory, print_error
        from transload.errors import TransloadError

        ours = isinstance(error, TransloadError)
        if isinstance(error, OSError) and not (ours or is_out_of_memory(error)):  # reading raises TransloadError
            _silence_stdout()
            error = TransloadError(f"cannot write the result: {error.strerror or error}")
        print_error(error if isinstance(error, TransloadError) else as_ours(error))
        return 2
    return code() if callable(code) else code


def _silence_stdout() -> None:
    """Discard further output: the flush at interpreter exit must not fail again."""
    from contextlib import suppress

    with suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _dispatch(argv: list[str]) -> Outcome:
    if len(argv) > 1 and argv[0] == "help":
        argv = [argv[1], "--help"]
    if not argv or argv[0] in ("-h", "--help", "help"):
        width = max(map(len, COMMANDS))
        commands = "\n".join(f"  {name:<{width}}  {line}" for name, line in COMMANDS.items())
        print(_fitted(f"{_USAGE}\n\ncommands:\n{commands}\n\n{help_section('transload')}"), end="")
        return 0
    if argv[0] in ("-V", "--version"):
        from transload._version import __version__

        print(f"transload {__version__}")
        return 0
    command, *rest = argv
    arguments: Namespace | None = None
    try:
        _refuse_unknown(command)
        parser = parser_of(command, rest)
        # With an optional DST, options between SRC and DST need this.
        intermixed = command in ("convert", "rescue")
        arguments = parser.parse_intermixed_args(rest) if intermixed else parser.parse_args(rest)
        arguments.command = command
        name = _MODULES.get(command, "commands")
        module = __import__(f"transload.cli.{name}", fromlist=[name])  # importlib would have to be imported first
        if getattr(arguments, "html", None) is not None and getattr(arguments, "gather", None) is None:
            from transload.cli.output import refuse_page

            refuse_page(arguments.html, overwrite=arguments.force)  # before anything is done
        code: Outcome = getattr(module, f"run_{command}")(arguments)
    except Exception as error:
        from transload.errors import TransloadError

        # Programs get the error as JSON; people read it on stderr.
        as_json = getattr(arguments, "json", False) if arguments else command not in _OWN_OUTPUT and "--json" in rest
        if as_json in (True, "-") and isinstance(error, TransloadError):
            from transload.cli.output import write_json
            from transload.render.json import error_to_dict

            path = getattr(arguments, "path", None) or getattr(arguments, "src", None) or ""
            if command == "run" and arguments:
                path = arguments.words[0]
            write_json([error_to_dict(path, error)])
        raise
    return code


def _refuse_unknown(command: str) -> None:
    """Print the usage and raise an error, unless it is a command."""
    if command in COMMANDS:
        return
    from difflib import get_close_matches

    from transload.errors import UsageError
    from transload.findings import quoted
    from transload.render.words import printable

    kind = "option" if command.startswith("-") else "command"
    near = get_close_matches(command, COMMANDS, 1)
    hint = f"did you mean 'transload {near[0]}'?" if near else "see 'transload --help'"
    if command in ("load", "load_into", "open", "save"):
        hint = f"in Python it is transload.{command}(…), and 'transload check FILE' says whether a file loads here"
    elif os.path.exists(command):
        hint = f"did you mean 'transload inspect {printable(quoted(command))}'?"
    if sys.stderr is not None:
        print(_USAGE, file=sys.stderr)
    raise UsageError(f"there is no {kind} '{printable(command)}'; {hint}")


def help_section(section: str) -> str:
    """A section of ``help.md``."""
    loader: Any = sys.modules[__name__].__loader__  # what pkgutil does, which imports too much
    page: str = loader.get_data(os.path.join(os.path.dirname(__file__), "help.md")).decode()
    return page.partition(f"\n## {section}\n\n")[2].partition("\n\n## ")[0].rstrip("\n") + "\n"


def _help_width() -> int:
    """The width of help: that of the terminal, if that is narrower than the texts are written for."""
    if not getattr(sys.stdout, "isatty", bool)():
        return _HELP_WIDTH
    from transload.render.lines import style_of

    return min(style_of(sys.stdout).width, _HELP_WIDTH)


def _fitted(text: str) -> str:
    """A help text with its longer lines folded for a narrow terminal, except for commands, which are copied."""
    width = _help_width()
    if width == _HELP_WIDTH:
        return text
    from transload.render.lines import Prose, Style, layout, plain

    def block(line: str) -> Prose:
        text = line.lstrip()
        says = text.partition("  ")[2].lstrip()
        if not says and len(line) - len(text) != 2:  # no command
            says = text
        fits = len(line) <= width or not says
        return Prose(line, whole=True) if fits else Prose(says, lead=line.removesuffix(says))

    lines = layout(map(block, text.splitlines()), Style(width=width))
    return "".join(f"{plain(line)}\n" for line in lines)


def parser_of(command: str, words: Sequence[str] = ()) -> ArgumentParser:
    """The parser of a command, with its options and those of all commands; its errors say what ``words`` may mean."""
    from argparse import ArgumentParser, RawDescriptionHelpFormatter
    from functools import partial

    class Parser(ArgumentParser):
        def format_help(self) -> str:
            self._unfold()
            return _fitted(super().format_help())

        def format_usage(self) -> str:
            self._unfold()
            return _fitted(super().format_usage())

        def _unfold(self) -> None:
            if _help_width() < _HELP_WIDTH:  # argparse would break words at hyphens
                self.formatter_class = partial(RawDescriptionHelpFormatter, width=sys.maxsize)

        def error(self, message: str) -> NoReturn:
            from difflib import get_close_matches

            from transload.errors import UsageError
            from transload.findings import quoted

            options = self._option_string_actions
            unknown = (word for word in words if word[:1] == "-" != word and word.partition("=")[0] not in options)
            word = next(unknown, "--")  # after which there are no options
            if word != "--" and os.path.lexists(word):
                message += f"; to name the file: {quoted(word)}"
            elif near := get_close_matches(word.partition("=")[0], options, 1, 0.7):
                message += f"; did you mean {near[0]}?"
            if sys.stderr is not None:
                self.print_usage(sys.stderr)
            raise UsageError(message)

    does = COMMANDS[command]
    options, _, epilog = help_section(command).partition("\n\n")
    parser = Parser(
        prog=f"transload {command}",
        description=does[0].upper() + does[1:] + ".",
        epilog=epilog,
        # Without a width the formatter imports shutil to ask for it, and with that every compression module.
        formatter_class=partial(RawDescriptionHelpFormatter, width=_HELP_WIDTH),
        allow_abbrev=False,  # an abbreviation that works today may be ambiguous tomorrow
    )
    for line in filter(None, options.split("\n")):
        call, _, text = line.removeprefix("- `").partition("`: ")
        parts = call.split()
        settings: dict[str, Any] = dict(part.split("=", 1) for part in parts if "=" in part)
        if "choices" in settings:
            settings["choices"] = settings["choices"].split(",")
        elif settings.get("action") == "append":
            settings["default"] = []
        elif call.startswith("-") and "metavar" not in settings:
            settings.setdefault("action", "store_true")
        if "type" in settings:
            settings["type"] = {"seconds": _seconds, "number": _number}[settings["type"]]
        parser.add_argument(*(part for part in parts if "=" not in part), **settings, help=text)
    if command not in _OWN_OUTPUT:
        parser.add_argument("--json", action="store_true", help="print everything as JSON")
        parser.add_argument("--html", metavar="OUT.html", help="also write a report for a browser")
        if "`--force`" not in options:
            parser.add_argument("--force", action="store_true", help="let --html replace an existing report")
        parser.add_argument("--color", choices=("auto", "always", "never"), default="auto", help="when to use colours")
    return parser


def _number(text: str, least: float = 0.0, what: str = "a number, at least 0") -> float:
    from argparse import ArgumentTypeError
    from contextlib import suppress

    with suppress(ValueError):
        if least <= float(text) < float("inf"):
            return float(text)
    raise ArgumentTypeError(f"expected {what}")


def _seconds(text: str) -> float:
    return _number(text, 5e-324, "a number of seconds above 0")


def run_run(arguments: Namespace) -> Callable[[], int]:
    """Find the program, and return a function that runs it."""
    from transload.patching import checked, devices
    from transload.patching.script import program_of

    words = arguments.words[1:] if arguments.words[0] == "--" else arguments.words
    how = {"pretend": arguments.pretend_cuda, "quiet": arguments.quiet, "strict": arguments.strict}
    how["report"] = _report_of_changes(arguments.json, overwrite=arguments.force) if arguments.json else None
    program = program_of(words, module=arguments.module, device=checked(arguments.device), **how)
    for path in arguments.prefetch or ():
        from transload.io.sources import is_url
        from transload.opening.prefetch import prefetch

        if is_url(path):
            from transload.errors import UsageError

            raise UsageError("--prefetch needs a file on this machine, not a URL", where=path)
        if not os.path.exists(path):
            from transload.errors import CannotReadError

            raise CannotReadError("there is no such file to prefetch", where=path)
        prefetch(path)

    def run() -> int:
        try:
            return program()
        except Exception as error:
            if error is not devices.refusal:
                raise
            from transload.cli.output import print_error

            print_error(devices.refusal)
            return 2

    return run


def _report_of_changes(out: str, *, overwrite: bool) -> Callable[[dict[str, Any]], bool]:
    """A function that writes the report of ``run --json``; false if it cannot, which it prints."""
    from transload.cli.output import print_error, refuse_page
    from transload.errors import TransloadError
    from transload.io.atomic import target_path
    from transload.render.json import to_json

    ranks, rank = os.environ.get("WORLD_SIZE", "1"), os.environ.get("RANK")
    if out != "-":
        if ranks != "1" and rank:  # each process of a launcher has its own report
            name, dot, kind = out.rpartition(".")
            out = f"{name}.rank{rank}.{kind}" if dot and os.sep not in kind else f"{out}.rank{rank}"
        out = os.path.join(os.getcwd(), target_path(out))  # the program may change the directory
        refuse_page(out, lambda start: start.startswith(b'{\n"schema": 1,\n"path": '), overwrite=overwrite)

    def report(document: dict[str, Any]) -> bool:
        text = "".join(to_json([document], several=False))
        try:
            if out != "-":
                from transload.io.atomic import AtomicFile

                with AtomicFile(out) as file:
                    file.write([text.encode()])
            elif sys.stdout is not None:  # on one line, the last
                sys.stdout.write(text.replace("\n", "") + "\n")
                sys.stdout.flush()
        except TransloadError as error:
            print_error(error)
            return False
        except OSError as error:
            print_error(TransloadError(f"cannot write the report: {error.strerror or error}"))
            return False
        return True

    return report


def run_inspect(arguments: Namespace) -> int:
    """Inspect all files, show the results, and return the worst exit code."""
    from stat import S_ISFIFO

    from transload.cli.output import expand_patterns, for_each
    from transload.opening import inspect

    lists = {"tensors": arguments.tensors, "names": arguments.globals, "structure": arguments.tree}
    lists["stats"] = arguments.stats

    def report(checkpoint: Checkpoint) -> Iterator[Block]:
        from transload.render.checkpoint import report

        return report(checkpoint, **lists)

    def several(read: Sequence[Checkpoint], total: int) -> Iterator[Block]:
        from transload.render.checkpoint import files
        from transload.render.lines import BLANK

        yield from files(read, total)
        for checkpoint in read if any(lists.values()) else ():
            yield BLANK
            yield from report(checkpoint)

    def examine(path: str) -> Checkpoint:
        f: str | BinaryIO = path
        # The shell's <(command).
        piped = path.startswith("/dev/fd/") and os.path.exists(path) and S_ISFIFO(os.stat(path).st_mode)
        if path == "-" or piped:
            import io

            from transload.errors import CannotReadError

            if not piped and sys.stdin is None:
                raise CannotReadError("standard input is closed", where=path)

            class Piped(io.BytesIO):
                name = "<pipe>" if piped else "<stdin>"

            if piped:
                with open(path, "rb") as stream:
                    f = Piped(stream.read())
            else:
                f = sys.stdin.buffer if sys.stdin.seekable() else Piped(sys.stdin.buffer.read())
        return judged(inspect(f, verify=arguments.verify, stats=arguments.stats))

    judged = _policy(arguments)
    paths = [*expand_patterns(arguments.paths)]
    shown = (report, several) if arguments.sarif != "-" else (_nothing, _nothing)
    if arguments.html is None and arguments.sarif is None:
        return for_each(arguments, paths, examine, *shown)[2]
    from transload.cli.output import print_error, refuse_page, write_file
    from transload.errors import TransloadError
    from transload.judge.problems import rules
    from transload.render.html_report import page
    from transload.render.sarif import document, is_sarif, left_out

    if arguments.sarif not in (None, "-"):
        refuse_page(arguments.sarif, is_sarif, overwrite=arguments.force)  # before anything is read

    def write(read: Sequence[Checkpoint], errors: Mapping[str, TransloadError], code: int) -> tuple[int, list[Block]]:
        written: list[Block] = []
        if arguments.html and read:
            code, written = write_file(arguments.html, page(read, len(paths)), arguments, code)
        if arguments.sarif and (cut := left_out(read)):
            print_error(TransloadError(cut, where=arguments.sarif))
        if arguments.sarif == "-" and sys.stdout is not None:
            sys.stdout.writelines(document(read, errors, rules()))
        elif arguments.sarif not in (None, "-"):
            pieces = document(read, errors, rules())
            code, more = write_file(arguments.sarif, pieces, arguments, code, is_sarif)
            written += more
        return code, written if arguments.sarif != "-" else []

    return for_each(arguments, paths, examine, *shown, write=write)[2]


def _policy(arguments: Namespace) -> Callable[[Checkpoint], Checkpoint]:
    """What ``--refuse``, ``--max-size`` and ``--sarif`` add to a checkpoint."""
    if arguments.refuse is None and not (arguments.max_size or arguments.sarif):
        return lambda checkpoint: checkpoint
    from transload.errors import UsageError
    from transload.judge.policy import DEFAULT, judged_by, kinds_in
    from transload.writing.plan import size_of

    if arguments.sarif == "-" and arguments.json:
        raise UsageError("--json and --sarif - both write to stdout", fix="Name a file: --sarif OUT.sarif")
    refuse = DEFAULT if arguments.refuse is None else kinds_in(arguments.refuse)
    limit = size_of(arguments.max_size)
    return lambda checkpoint: judged_by(checkpoint, refuse, limit)


def _nothing(*_: object) -> Iterator[Block]:
    """No report: stdout is for another output."""
    return iter(())
