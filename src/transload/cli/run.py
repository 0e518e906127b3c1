"""``transload run SCRIPT [ARGS…]``: run a program unchanged on the devices of this machine."""

from __future__ import annotations

from argparse import PARSER

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Callable

__all__ = ["add_arguments", "run"]

_EPILOG = """\
examples:
  transload run infer.py --weights model.pt   load onto the devices here
  transload run -m package.train --epochs 3   as python -m
  transload run --device cpu infer.py         the CPU for absent GPUs
  transload run - < infer.py                  the program from stdin
  torchrun --nproc-per-node 2 -m transload run train.py

exit codes:
  those of the program
  2  there is no such script
"""


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the options of ``run``; what follows the script is the script's."""
    parser.epilog = _EPILOG
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is the name of a module or a package")
    parser.add_argument("--device", metavar="D", default="auto", help="what to use instead of missing devices")
    parser.add_argument("words", metavar="SCRIPT", nargs=PARSER, help="a Python program (- is stdin) and its arguments")


def run(arguments: Namespace) -> Callable[[], int]:
    """Look for the program; return what runs it."""
    from transload.patching import checked
    from transload.patching.script import program_of

    words = arguments.words[1:] if arguments.words[0] == "--" else arguments.words
    return program_of(words, module=arguments.module, device=checked(arguments.device))
