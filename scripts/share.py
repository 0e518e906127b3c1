"""Write the man page and the completion scripts, as a package for a system has them.

Usage: ``python scripts/share.py DIR``. Wheels contain the same, made by ``scripts/hatch_build.py``.
"""

from __future__ import annotations

import sys
from argparse import Action
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

SHELLS = {
    "bash": "bash-completion/completions/transload",
    "fish": "fish/vendor_completions.d/transload.fish",
    "zsh": "zsh/site-functions/_transload",
}
"""Where each shell looks for completion scripts; PowerShell looks nowhere."""


def write(folder: Path) -> list[str]:
    """Write everything to a folder; return the names of the files."""
    if str(ROOT / "src") not in sys.path:
        sys.path.insert(0, str(ROOT / "src"))
    from transload.cli.completion import script

    files = {"man/man1/transload.1": "".join(f"{line}\n" for line in man_page())}
    files |= {name: script(shell) for shell, name in SHELLS.items()}
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", newline="\n")
    return sorted(files)


def man_page() -> Iterator[str]:
    """The lines of the man page: what ``--help`` and the help of each command show."""
    from transload._version import __version__
    from transload.cli.completion import options_of, positionals_of
    from transload.cli.main import COMMANDS, help_section, parser_of

    yield f'.TH TRANSLOAD 1 "" "transload {__version__}" "User Commands"'
    yield ".SH NAME"
    yield r"transload \- loads any PyTorch checkpoint on any machine, and explains why CUDA is unavailable"
    yield ".SH SYNOPSIS"
    yield r".B transload"
    yield r"\fICOMMAND\fR [\fIoptions\fR]"
    yield ".SH COMMANDS"
    for command, does in COMMANDS.items():
        yield from (".TP", rf"\fB{command}\fR", roff(does))
    yield from epilog(help_section("transload"))
    for command in COMMANDS:
        parser = parser_of(command)
        vars(parser)["color"] = False  # as Python 3.14 adds on a terminal
        usage = [line[len("usage: ") :] for line in parser.format_usage().rstrip().split("\n")]
        yield f'.SH "transload {command}"'
        yield roff(str(parser.description))
        yield from (".PP", ".nf", *map(roff, usage), ".fi")
        for action in (*positionals_of(command), *options_of(command)):
            yield from (".TP", heading(action), roff(str(action.help)))
        yield from epilog(str(parser.epilog or ""), ".SS")


def heading(action: Action) -> str:
    """An option, and the name of its value."""
    from transload.cli.completion import name_of, takes_value

    value = rf"\fI{roff(name_of(action))}\fR"
    if not action.option_strings:
        return value
    if action.choices:
        value = roff("{" + ",".join(action.choices) + "}")
    value = f" [{value}]" if action.nargs == "?" else f" {value} ..." if action.nargs == "+" else f" {value}"
    return ", ".join(rf"\fB{roff(name)}\fR" for name in action.option_strings) + (value if takes_value(action) else "")


def epilog(text: str, level: str = ".SH") -> Iterator[str]:
    """The sections below the options, such as examples; their lines are kept."""
    for section in text.strip().split("\n\n"):
        title, _, lines = section.partition("\n")
        name = title.rstrip(":")
        yield f'{level} "{name.upper() if level == ".SH" else name.capitalize()}"'
        yield from (".nf", *(roff(line.removeprefix("  ")) for line in lines.rstrip().split("\n")), ".fi")


def roff(text: str) -> str:
    r"""A line in which nothing is a request or an escape.

    >>> roff(".x --json \\n")
    '\\&.x \\-\\-json \\en'
    """
    text = text.replace("\\", r"\e").replace("-", r"\-")
    text = "".join(character if character.isascii() else rf"\[u{ord(character):04X}]" for character in text)
    return rf"\&{text}" if text.startswith((".", "'")) else text


def main() -> int:
    """Write to the folder on the command line."""
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    folder = Path(sys.argv[1])
    for name in write(folder):
        print(folder / name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
