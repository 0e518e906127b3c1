"""What the text of a TorchScript program shows: devices written into it, and operators that reach beyond tensors.

The text is never run and not compiled either. It is cut up as TorchScript's own lexer would, and where the two could
differ the rule is to see too much rather than too little.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from transload.findings import Problem
from transload.read.nodes import Call, Dict, Pickle, Set

__all__ = ["MAX_CODE", "OPERATORS", "bytecode_problems", "code_problems", "operators"]

MAX_CODE = 32 << 20
"""Source searched in one archive. Ten thousand operators are a megabyte; searching goes at five megabytes a second."""

OPERATORS: dict[str, str] = {
    # From the operator registry of torch 2.13: those that take a file name or start something elsewhere. With the first
    # two a program reads or writes any file, and does so inside torch.jit.load if it says so in a __setstate__.
    "aten::from_file": "reads or maps a file",
    "aten::save": "writes a file",
    "prim::PythonOp": "calls back into Python",
    "prim::rpc_async": "calls a function on another machine",
    "prim::rpc_remote": "calls a function on another machine",
    "prim::rpc_sync": "calls a function on another machine",
    # Registered by torchvision and torchaudio.
    "image::read_file": "reads a file",
    "image::write_file": "writes a file",
    "torchaudio::sox_effects_apply_effects_file": "reads a file",
    "torchaudio::sox_io_get_info": "reads a file",
    "torchaudio::sox_io_load_audio_file": "reads a file",
    "torchaudio::sox_io_save_audio_file": "writes a file",
}
_HIDDEN = "a module of operators under another name, which hides what is called"

_DEVICE = re.compile(r"""torch\s*\.\s*device\s*\(\s*["']([\w:]{1,40})["']""")
# Comments and strings, as torch/csrc/jit/frontend/lexer.h has them: no prefixes, a newline only inside triple quotes.
_QUOTED = re.compile(
    r"""#[^\n]*|"{3}(?:\\.|[^\\])*?"{3}|'{3}(?:\\.|[^\\])*?'{3}|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'""",
    re.DOTALL,
)
_DOTTED = re.compile(r"(?<![\w.])(?:torch|ops)\b(?:\s*\.\s*[A-Za-z_]\w*)*")


def code_problems(name: str, code: str) -> list[Problem]:
    """The devices and the far-reaching operators in one source file.

    >>> [problem.code for problem in code_problems("a.py", 'torch.save(x, "f"); torch.device("cuda:0")')]
    ['script-dangerous-op', 'script-device']
    """
    out: list[Problem] = []
    called = operators(code)
    if called:
        out.append(Problem("script-dangerous-op", name, _lines(called)))
    devices = Counter(_DEVICE.findall(code))
    if devices:
        shown = ", ".join(f'torch.device("{device}") {count}×' for device, count in devices.most_common(8))
        out.append(Problem("script-device", name, shown))
    return out


def operators(code: str) -> Counter[str]:
    """The operators of ``OPERATORS`` that a program names, and any trick to name one out of sight.

    The compiler takes ``torch.save``, ``ops.aten.save``, ``t = torch`` and then ``t.save``, ``(torch).save`` and
    ``getattr(torch, "save")`` alike. What torch itself writes always has a dot after ``torch`` and ``ops``.

    >>> operators("t = torch; t.save(x, name)")
    Counter({'torch': 1})
    """
    found: Counter[str] = Counter()
    for match in _DOTTED.finditer(_bare(code)):
        parts = [part.strip() for part in match[0].split(".")]
        symbol = _symbol(parts)
        if symbol in OPERATORS or symbol == parts[0]:
            found[symbol] += 1
    return found


def _symbol(parts: list[str]) -> str:
    """``torch.save`` and ``ops.aten.save`` as ``aten::save``; ``torch`` or ``ops`` where no operator is named."""
    if parts[0] == "torch" and len(parts) > 1:
        return f"aten::{parts[1]}"
    if parts[0] == "ops" and len(parts) > 2:
        return f"{parts[1]}::{parts[2]}"
    return parts[0]


def _bare(code: str) -> str:
    """Code without comments and strings; all of it if a quote is left over, since then strings may end elsewhere."""
    rest = _QUOTED.sub(" ", code)
    return (code if '"' in rest or "'" in rest else rest).replace("\\\n", " ")


def bytecode_problems(pickle: Pickle) -> list[Problem]:
    """The far-reaching operators named in the bytecode of a lite interpreter program."""
    called = Counter(word for word in _words(pickle.root) if word in OPERATORS)
    return [Problem("script-dangerous-op", pickle.name, _lines(called))] if called else []


def _words(root: object) -> Iterable[str]:
    """All texts in a graph of nodes."""
    stack, seen = [root], set()
    while stack:
        node = stack.pop()
        if type(node) is str:
            yield node
        elif id(node) not in seen and type(node) in (tuple, list, Dict, Set, Call):
            seen.add(id(node))
            stack += _inside(node)


def _inside(node: object) -> list[object]:
    if type(node) is Call:
        return [node.args, node.states, node.items, node.appended]
    if type(node) is Dict or type(node) is Set:
        return node.items
    return list(node) if isinstance(node, tuple | list) else []


def _lines(called: Counter[str]) -> str:
    return "\n".join(f"{name} {count}×: {OPERATORS.get(name, _HIDDEN)}" for name, count in called.most_common())
