"""The entry point: finds the command, runs it, and turns whatever escapes into one message and an exit code.

0: all is well. 1: the thing examined has a problem. 2: the command could not do its job. Beyond the table of commands
nothing is imported until it is known what is asked for; ``--help`` and ``--version`` need no argument parser.
"""

from __future__ import annotations

import os
import sys

from transload.cli import COMMANDS

TYPE_CHECKING = False  # typing costs more than all the rest of --version
if TYPE_CHECKING:
    from argparse import ArgumentParser
    from collections.abc import Callable
    from types import ModuleType
    from typing import Any

    Outcome = int | Callable[[], int]

_USAGE = "usage: transload COMMAND [options]"
_EXAMPLES = """\
examples:
  transload doctor                        why CUDA is unavailable, and the fix
  transload explain train.log             what the error in it means
  transload inspect model.pt              what is in it, and is it safe to load
  transload check model.pt                will it load here, on which device
  transload rescue broken.pt repaired.pt  recover what is left, as a new file
  transload retag model.pt --to cpu       plain torch.load(path) works anywhere
  transload convert model.pt out.npz      convert without torch
  transload run infer.py --fast           run a script on the devices here
  transload verify model.pt               compare every checksum

options:
  -h, --help     show this, or the help of a command
  -V, --version  show the version"""
_HELP_WIDTH = 80
_INTERRUPTED = 130  # 128 and the number of the signal, as shells report it
_PIPE_CLOSED = 141


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code; ``argv`` is ``sys.argv[1:]`` unless given.

    What a program does that a command has started, its exceptions and its exit, is not ours to tell.
    """
    argv = sys.argv[1:] if argv is None else argv
    try:
        code = _dispatch(argv)
        if sys.stdout is not None:
            sys.stdout.flush()  # here, where a closed pipe or a full disk can still be told
    except KeyboardInterrupt:
        return _INTERRUPTED
    except SystemExit as leaving:  # argparse leaves so, after its own message
        return leaving.code if isinstance(leaving.code, int) else 0
    except BrokenPipeError:
        _hush_stdout()
        return _PIPE_CLOSED
    except Exception as error:  # noqa: BLE001  the last resort
        from transload.cli.output import as_bug, complain
        from transload.errors import TransloadError

        if isinstance(error, OSError) and not isinstance(error, TransloadError):  # reading raises ours: it was writing
            _hush_stdout()
            error = TransloadError(f"cannot write the result: {error.strerror or error}")
        complain(error if isinstance(error, TransloadError) else as_bug(error))
        return 2
    return code() if callable(code) else code


def _hush_stdout() -> None:
    """Nobody reads stdout any more: the interpreter's own flush at exit must not complain of it."""
    from contextlib import suppress

    with suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _dispatch(argv: list[str]) -> Outcome:
    if len(argv) > 1 and argv[0] == "help":
        argv = [argv[1], "--help"]
    if not argv or argv[0] in ("-h", "--help", "help"):
        width = max(map(len, COMMANDS))
        commands = "\n".join(f"  {name:<{width}}  {line}" for name, line in COMMANDS.items())
        print(f"{_USAGE}\n\ncommands:\n{commands}\n\n{_EXAMPLES}")
        return 0
    if argv[0] in ("-V", "--version"):
        from transload._version import __version__

        print(f"transload {__version__}")
        return 0
    command, *rest = argv
    if command in COMMANDS:
        return _run(command, rest)

    from difflib import get_close_matches

    from transload.render.words import printable

    kind = "option" if command.startswith("-") else "command"
    near = get_close_matches(command, COMMANDS, 1)
    hint = f"did you mean 'transload {near[0]}'?" if near else "'transload --help' lists what there is"
    if command in ("load", "load_into", "open", "save"):
        hint = f"in Python it is transload.{command}(…), and 'transload check FILE' says whether a file loads here"
    elif os.path.exists(command):
        hint = f"did you mean 'transload inspect {printable(command)}'?"
    print(f"{_USAGE}\ntransload: there is no {kind} '{printable(command)}'; {hint}", file=sys.stderr)
    return 2


def _module_of(command: str) -> ModuleType:
    if command == "inspect":
        from transload.cli import files

        return files
    if command == "doctor":
        from transload.cli import doctor

        return doctor
    from transload.cli import commands

    return commands


def parser_of(command: str) -> ArgumentParser:
    """The parser of a command, with its options and those that all have."""
    from argparse import ArgumentParser, RawDescriptionHelpFormatter
    from functools import partial

    line = COMMANDS[command]
    loader: Any = sys.modules[__name__].__loader__  # as pkgutil does, which imports too much
    page = loader.get_data(os.path.join(os.path.dirname(__file__), "help.md")).decode()
    parser = ArgumentParser(
        prog=f"transload {command}",
        description=line[0].upper() + line[1:] + ".",
        epilog=page.partition(f"\n## {command}\n\n")[2].partition("\n\n## ")[0].rstrip("\n") + "\n",
        # Left to itself the formatter imports shutil to ask for the width, and with it every compressor Python has.
        formatter_class=partial(RawDescriptionHelpFormatter, width=_HELP_WIDTH),
        allow_abbrev=False,  # an abbreviation that works today may be ambiguous tomorrow
    )
    getattr(_module_of(command), f"{command}_arguments")(parser)
    if command != "run":  # which prints nothing of its own
        parser.add_argument("--json", action="store_true", help="print everything as JSON")
        parser.add_argument("--color", choices=("auto", "always", "never"), default="auto", help="when to use colours")
    return parser


def _run(command: str, rest: list[str]) -> Outcome:
    parser = parser_of(command)
    # Where DST may be left out, options may still stand between it and SRC.
    between = command in ("convert", "rescue")
    arguments = parser.parse_intermixed_args(rest) if between else parser.parse_args(rest)
    if path := getattr(arguments, "path", None):
        from transload.cli.output import finish_retag

        finish_retag(path)
    in_json = getattr(arguments, "json", False)
    if in_json:
        from transload.cli import output

        output.begun = False
    try:
        code: Outcome = getattr(_module_of(command), f"run_{command}")(arguments)
    except Exception as error:
        from transload.errors import TransloadError

        # An object for a program to read, unless the result is there already; people get theirs on stderr.
        if in_json and isinstance(error, TransloadError) and not output.begun:
            from transload.render.json import error_to_dict, to_json

            path = getattr(arguments, "path", None) or getattr(arguments, "src", None) or ""
            output.write(to_json([error_to_dict(path, error)], several=False))
        raise
    return code
