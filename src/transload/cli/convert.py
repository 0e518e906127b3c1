"""``transload convert SRC DST``: write the tensors of a checkpoint in another format, without running any of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transload.cli.output import show, show_result, write
from transload.errors import UsageError

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

__all__ = ["add_arguments", "run"]

_EPILOG = """\
examples:
  transload convert model.pt model.safetensors
  transload convert run.ckpt model.safetensors --key state_dict --strip module.
  transload convert train.ckpt --list         what --key can choose
  transload convert model.pt out/model.safetensors --max-shard-size 5GB
  transload convert model.safetensors model.pt --dtype bfloat16
  transload convert whole_model.pt weights/   raw tensors and a JSON index

exit codes:
  0  every selected tensor is in DST, the rest there or in DST.leftovers.json
  1  DST was written, but something is in neither file: the report names it
  2  nothing was written
"""


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the options of ``convert``."""
    parser.epilog = _EPILOG
    parser.add_argument("path", metavar="SRC", help="a checkpoint of any format: a file or a directory")
    parser.add_argument("out", metavar="DST", nargs="?", help=".safetensors, .pt, .npz, or a directory/ of raw tensors")
    parser.add_argument(
        "--to", metavar="FORMAT", default="", help="torch, safetensors, npz or raw, if DST's name does not say"
    )
    parser.add_argument("--key", metavar="KEY", default="", help="convert only this part, such as model or state_dict")
    parser.add_argument("--list", action="store_true", help="show the parts that --key can choose")
    parser.add_argument("--strip", metavar="PREFIX", action="append", default=[], help="remove this from the names")
    parser.add_argument(
        "--dtype", metavar="D", default="", help="for floating-point tensors: float32, float16, bfloat16"
    )
    parser.add_argument("--allow-inf", action="store_true", help="let values too large for --dtype become infinite")
    parser.add_argument("--max-shard-size", metavar="SIZE", help="split safetensors into shards, such as 5GB")
    parser.add_argument("--force", action="store_true", help="overwrite DST")
    parser.add_argument("--no-verify", action="store_true", help="do not read DST back or check SRC's checksums")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--color", choices=("auto", "always", "never"), default="auto", help="when to use colours")


def run(arguments: Namespace) -> int:
    """Convert, or list, and return the exit code."""
    if arguments.list:
        return _list(arguments)
    if arguments.out is None:
        raise UsageError("DST is missing", fix="Say where to write: transload convert SRC DST; or add --list.")
    from transload.converting import convert

    result = convert(
        arguments.path,
        arguments.out,
        to=arguments.to,
        key=arguments.key,
        strip=arguments.strip,
        dtype=arguments.dtype,
        allow_inf=arguments.allow_inf,
        max_shard_size=arguments.max_shard_size,
        verify=not arguments.no_verify,
        overwrite=arguments.force,
        progress=not arguments.json,
    )
    from transload.converting import report

    show_result(result, report, arguments)
    return 0 if result.complete and not result.listed else 1


def _list(arguments: Namespace) -> int:
    from transload.converting import parts

    candidates = parts(arguments.path)
    if arguments.json:
        from transload.render.json import to_json

        table = {"schema": 1, "path": arguments.path, "parts": [part.to_dict() for part in candidates]}
        write(to_json([table], several=False))
    else:
        from transload.converting import listing

        show(listing(arguments.path, candidates), arguments.color)
    return 0
