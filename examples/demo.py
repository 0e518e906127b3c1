"""The demo: a checkpoint saved on a GPU, with plain torch.load, with transload.load, inspected; then this machine.

Usage: python examples/demo.py

It runs from the sources, installed or not. Without torch it shows what works without it. The exit code is 0 if
transload worked, even if the doctor finds a problem, and 1 if it failed.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import sys
import textwrap
import warnings
from collections import Counter
from contextlib import redirect_stdout
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "src"))

import transload  # noqa: E402
from transload.cli.main import main as command_line  # noqa: E402
from transload.render.lines import style_of  # noqa: E402

FILE = os.path.relpath(HERE / "model_cuda0.pt")
RECORD = os.path.relpath(HERE / "model_cuda0.json")  # by `transload verify model_cuda0.pt --write model_cuda0.json`
STYLE = style_of(sys.stdout)
INDENT = "    "
WIDTH = min(shutil.get_terminal_size().columns, 120) - len(INDENT)
MAX_LINES = 16  # of one report


def main() -> int:
    """Show every step; return 1 if transload failed in one."""
    heading(1, "A checkpoint saved on a GPU, with plain torch.load")
    torch = import_torch()
    if torch is None:
        heading(2, "transload, which reads it without torch")
        works = convert()
    else:
        say(f'>>> torch.load("{FILE}")  # torch {torch.__version__}', plain_load(torch))
        heading(2, "The same with transload.load")
        works = load(torch)

    heading(3, "What is in the file")
    works &= run("inspect", FILE, max_lines=11) == 0

    heading(4, "Does PyTorch work on this machine?")
    python = short_path(sys.executable)
    code = run("doctor", "--python", python)
    works &= code in (0, 1)
    if code == 1:
        say("", "The doctor found a problem on this machine, and exits with 1.")

    installed = Path(sys.executable).with_name("transload.exe" if os.name == "nt" else "transload")
    variable = "$env:PYTHONPATH = 'src';" if os.name == "nt" else "PYTHONPATH=src"
    program = short_path(str(installed)) if installed.exists() else f"{variable} {python} -m transload"
    print(f"\nNow your own file:  {program} inspect FILE" if works else "\ntransload failed above: that is a bug.")
    return int(not works)


def import_torch() -> Any:
    """Import torch; if that fails, print the error and return None."""
    # torch warns once if numpy is not installed; the demo does not use numpy.
    warnings.filterwarnings("ignore", "Failed to initialize NumPy")
    try:
        import torch
    except Exception as error:  # noqa: BLE001 - a broken torch may raise anything
        say(">>> import torch", summary(error))
        return None
    return torch


def plain_load(torch: Any) -> str:
    """The result of torch.load, as text."""
    try:
        state = torch.load(FILE)
    except Exception as error:  # noqa: BLE001 - the error is the result
        return summary(error)
    return f"It loads: {count_by_device(state)}."


def load(torch: Any) -> bool:
    """Load the file with transload, and compare every value with the record."""
    say(f'>>> state = transload.load("{FILE}")')
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", transload.LandingWarning)
        try:
            state = transload.load(FILE)
        except transload.TransloadError as error:
            say(summary(error))
            return False
    for warning in caught:
        say(f"{warning.category.__name__}: {warning.message}")
    record = json.loads(Path(RECORD).read_text("utf-8"))
    recorded = {tensor["name"]: tensor["sha256"] for tensor in record["files"][0]["tensors"]}
    wrong = {name for name, tensor in state.items() if recorded.get(name) != checksum(torch, tensor)}
    wrong |= recorded.keys() - state.keys()
    if wrong:
        say("", f"{count_by_device(state)}: the values differ from {RECORD} in {', '.join(sorted(wrong))}.")
        return False
    say("", mark(f"✓ {count_by_device(state)}; their values match {RECORD} (SHA-256)"))
    return True


def convert() -> bool:
    """Write the tensors to another format, and compare them with the record."""
    with TemporaryDirectory() as folder:
        target = str(Path(folder, "m.safetensors"))
        works = run("convert", FILE, target) == 0
        say("")
        return run("verify", target, "--against", RECORD) == 0 and works


def run(*arguments: str, max_lines: int = MAX_LINES) -> int:
    """Show a command of transload and its output, or the start of a long one; return the exit code."""
    print(INDENT + " ".join(("$ transload", *arguments)), flush=True)
    os.environ["COLUMNS"] = str(WIDTH)
    output = io.TextIOWrapper(io.BytesIO(), encoding=sys.stdout.encoding)
    with redirect_stdout(output):
        code = command_line([*arguments, "--color", "always" if STYLE.colour else "never"])
    output.seek(0)
    lines = output.read().rstrip().splitlines()
    shown = len(lines)
    if shown > max_lines:
        shown = max((number for number, line in enumerate(lines[: max_lines + 1]) if not line), default=max_lines)
        lines[shown:] = ["", f"[{len(lines) - shown - 1} more lines]"]
    print(textwrap.indent("\n".join(lines), INDENT), flush=True)
    return code


def checksum(torch: Any, tensor: Any) -> str:
    """The SHA-256 of the bytes of a tensor, without numpy."""
    return sha256(bytes(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).tolist())).hexdigest()


def count_by_device(state: dict[str, Any]) -> str:
    """The number of tensors on each device."""
    devices = Counter(str(tensor.device) for tensor in state.values())
    return ", ".join(f"{count} tensors on {device}" for device, count in devices.items())


def summary(error: Exception) -> str:
    """The name and the first line of an exception."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def short_path(program: str) -> str:
    """The path of a program, relative to the current folder if it is inside."""
    near = os.path.relpath(program)
    return program if near.startswith("..") else near


def heading(number: int, text: str) -> None:
    """Print the heading of a step."""
    line = f"{number}. {text}"
    print(f"\n\x1b[1m{line}\x1b[0m\n" if STYLE.colour else f"\n{line}\n", flush=True)


def mark(text: str) -> str:
    """The text in green, if the output has colours."""
    return f"\x1b[32m{text}\x1b[0m" if STYLE.colour else text


def say(*paragraphs: str) -> None:
    """Print indented text, with long lines wrapped."""
    for line in "\n".join(paragraphs).splitlines() or [""]:
        folded = textwrap.fill(line, WIDTH, break_on_hyphens=False)
        print(STYLE.text(textwrap.indent(folded, INDENT)), flush=True)


if __name__ == "__main__":
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `make demo | head` ends quietly
    sys.exit(main())
