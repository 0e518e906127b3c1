"""Every command on every file, text and machine that the tests know, and what each answered.

    python tests/golden/record.py                 compare with what is recorded, name what differs
    python tests/golden/record.py --update        record anew
    python tests/golden/record.py --full DIR      also write every output in full: run it in two checkouts, then diff -r

``answers.json`` holds the promises: for each case its exit code, a digest of its JSON without the prose, and a digest
of the files it wrote. ``words.json`` holds a digest of every word: the text, or the JSON with its prose. A change of
wording changes only the second.

Commands run in this process, in a folder of their own, and nothing they are asked depends on the host: files and texts
are given, machines are read from reports (``doctor --from``), and ``check`` judges a given machine. torch is not used.
``machines.jsonl.gz`` holds the machines: the first line is a whole one, the others are what differs from it.
``files.tar.gz`` holds damaged and hostile files that the tests forge. Both are inputs; nothing writes them again.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import hashlib
import io
import json
import os
import re
import shutil
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from tests.explaining.wordings import WORDINGS, sections  # noqa: E402 - the path is set before

from transload import check  # noqa: E402
from transload.cli.main import main  # noqa: E402
from transload.diagnose.rules import BY_CODE  # noqa: E402
from transload.diagnose.saved import machine_from  # noqa: E402

ANSWERS, WORDS = HERE / "answers.json", HERE / "words.json"

PROSE = {
    *("title", "evidence", "fix", "because", "what", "why", "notes", "purpose", "prediction", "warnings", "warning"),
    *("refusal", "reason", "absent", "cause", "wrong", "written_by.text", "error.where"),
}
"""Keys whose text is for people, some with the key above them. Lists keep their length."""

FULLY = (
    "h200/state",
    "h200/train",
    "h200/torchscript",
    "h200/mixed",
    "torch-releases/torch-2.13.0",
    "torch-releases/torch-1.0.0",
)
"""Fixtures that are asked everything; the others are asked the main questions."""
CHECKPOINTS = (".pt", ".pth", ".ckpt", ".pt2")

Table = dict[str, dict[str, str]]


class Outcome(NamedTuple):
    """What a command said and wrote."""

    exit: int
    stdout: str
    stderr: str = ""
    written: str = ""


class Case(NamedTuple):
    """A question: about which input, in which words, and how to ask it."""

    about: str
    ask: str
    run: Callable[[], Outcome]


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


# -- what an answer promises -----------------------------------------------------------------------------------------


def is_prose(above: str, key: str) -> bool:
    return key in PROSE or f"{above}.{key}" in PROSE


def without_prose(value: Any, above: str = "", key: str = "") -> Any:
    """The same with a mark for every text that is for people; that there is one, or none, stays."""
    if isinstance(value, dict):
        return {name: without_prose(item, key, name) for name, item in value.items()}
    if isinstance(value, list):
        return [without_prose(item, above, key) for item in value]
    return "…" if isinstance(value, str) and value and is_prose(above, key) else value


def answer_of(case: Case, outcome: Outcome) -> str:
    """The exit code and the digests of what may not change."""
    parts = [str(outcome.exit)]
    if "json" in case.ask.split() and outcome.stdout:
        kept = json.dumps(without_prose(json.loads(outcome.stdout)), sort_keys=True)
        parts.append(digest(kept.encode()))
    return " ".join([*parts, *filter(None, [outcome.written])])


def words_of(outcome: Outcome) -> str:
    return digest(f"{outcome.stdout}\0{outcome.stderr}".encode("utf-8", "surrogatepass"))


# -- the inputs ------------------------------------------------------------------------------------------------------


def fixtures() -> dict[str, Path]:
    """Every file under tests/data and the example; recipes and truths serve as files that are no checkpoints."""
    found = [path for path in sorted((ROOT / "tests" / "data").rglob("*")) if path.is_file()]
    named = {path.relative_to(ROOT / "tests" / "data").as_posix(): path for path in found}
    return {**named, "examples/model_cuda0.pt": ROOT / "examples" / "model_cuda0.pt"}


def damaged() -> dict[str, bytes]:
    """Fixtures of every format that were cut, zeroed, flipped, grown or shifted, at fixed places."""
    release = "torch-releases/torch-{}/state_dict_{}.pt"
    whole = {
        "zip": release.format("2.13.0-py3.11.7", "cuda0"),
        "stream": release.format("2.13.0-py3.11.7", "cuda0_other_format"),
        "old": release.format("1.6.0-py3.7.16", "cuda1"),
        "script": "h200/torchscript_cuda0.pt",
        "module": "h200/whole_custom_module_cuda0.pt",
        "export": "h200/export_cuda0.pt2",
    }
    made: dict[str, bytes] = {}
    for kind, name in whole.items():
        data = (ROOT / "tests" / "data" / name).read_bytes()
        for nth in (1, 4, 7):
            at = len(data) * nth // 8
            made[f"{kind}-cut-{nth}.pt"] = data[:at]
            made[f"{kind}-zeroed-{nth}.pt"] = data[:at] + bytes(64) + data[at + 64 :]
            made[f"{kind}-flipped-{nth}.pt"] = data[:at] + bytes([data[at] ^ 1 << nth]) + data[at + 1 :]
        made[f"{kind}-no-end.pt"] = data[:-22]
        made[f"{kind}-grown.pt"] = data + bytes(512)
        made[f"{kind}-doubled.pt"] = data + data
        made[f"{kind}-shifted.pt"] = b"HTTP/1.1 200 OK\r\n\r\n" + data
        made[f"{kind}-as-text.pt"] = data.replace(b"\n", b"\r\n")
    return made


def texts() -> dict[str, str]:
    """Every error text, log and unrelated text."""
    folder = ROOT / "tests" / "explaining"
    told = {f"{wording.code}, {wording.where}": wording.text for wording in WORDINGS}
    for name in ("logs.txt", "unrelated.txt"):
        told |= {f"{name}, {head}": text for head, text in sections(folder / name)}
    return told


def machines() -> dict[str, dict[str, Any]]:
    """Every machine by name, the whole one first."""
    lines = [json.loads(line) for line in gzip.decompress((HERE / "machines.jsonl.gz").read_bytes()).splitlines()]
    whole = lines[0]["machine"]
    return {line["name"]: changed(whole, line.get("set", {})) for line in lines}


def changed(machine: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """A machine with other values at some dotted places."""
    made: dict[str, Any] = json.loads(json.dumps(machine))
    for place, value in values.items():
        *above, last = place.split(".")
        held = made
        for key in above:
            held = held[key]
        held[last] = value
    return made


# -- the cases -------------------------------------------------------------------------------------------------------


def command(*arguments: str) -> Outcome:
    """Run a command here, and take away what it wrote into ``out``."""
    stdout, stderr = io.StringIO(), io.StringIO()
    out = Path("out")
    out.mkdir(exist_ok=True)
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        code = main(list(arguments))
    files = [path for path in sorted(out.rglob("*")) if path.is_file()]
    held = b"".join(
        path.as_posix().encode() + b"\0" + path.read_bytes() for path in files if ".rescue." not in path.name
    )
    if any(out.iterdir()):  # to remove a folder may take a disk some milliseconds
        shutil.rmtree(out)
    told = re.sub(r'"seconds": [\d.e-]+', '"seconds": 0', stdout.getvalue())
    return Outcome(code, told, stderr.getvalue(), digest(held) if held else "")


def asked(about: str, ask: str, *arguments: str) -> Case:
    return Case(about, ask, lambda: command(*arguments))


def checked(about: str, ask: str, path: str, device: str | None, machine: Any) -> Case:
    def run() -> Outcome:
        try:
            result = check(path, device, machine=machine)
        except Exception as error:  # noqa: BLE001 - whatever it raises is the answer
            return Outcome(2, "", f"{type(error).__name__}: {error}")
        told = json.dumps(result.to_dict()) if "json" in ask.split() else str(result)
        return Outcome(int(not result.ok), told)

    return Case(about, ask, run)


def file_cases(name: str, path: str, hosts: dict[str, Any]) -> Iterator[Case]:
    """Every question about a fixture."""
    yield asked(name, "inspect json", "inspect", path, "--json")
    yield asked(name, "verify hash json", "verify", path, "--hash", "--values", "--json")
    yield asked(name, "convert json", "convert", path, "out/new.safetensors", "--json")
    yield asked(name, "retag json", "retag", path, "--to", "cpu", "-o", "out/new.pt", "--json")
    yield checked(name, "check bare json", path, "auto", hosts["bare"])
    if not name.startswith(FULLY):
        return
    yield asked(name, "inspect", "inspect", path)
    yield asked(name, "inspect views", "inspect", path, "--tensors", "--globals", "--tree")
    yield asked(name, "inspect verify json", "inspect", path, "--verify", "--json")
    yield asked(name, "verify", "verify", path, "--hash")
    yield asked(name, "retag", "retag", path, "--to", "cuda:3", "--dry-run")
    yield asked(name, "convert", "convert", path, "out/new.npz")
    yield asked(name, "convert pt json", "convert", path, "out/new.pt", "--json")
    yield asked(name, "convert raw json", "convert", path, "out/raw/", "--json", "--dtype", "float16")
    yield asked(name, "convert parts json", "convert", path, "--list", "--json")
    yield asked(name, "rescue json", "rescue", path, "out/new.pt", "--json")
    yield asked(name, "rescue", "rescue", path, "--dry-run")
    yield checked(name, "check healthy json", path, "cuda:1", hosts["healthy"])
    yield checked(name, "check", path, None, hosts["healthy"])


def bad_file_cases(path: str) -> Iterator[Case]:
    """What is in a damaged or hostile file, and one more question, chosen by its name."""
    yield asked(path, "inspect json", "inspect", path, "--json")
    yield (
        asked(path, "rescue json", "rescue", path, "out/new.pt", "--json"),
        asked(path, "convert json", "convert", path, "out/new.safetensors", "--json"),
        asked(path, "verify json", "verify", path, "--json"),
        asked(path, "retag json", "retag", path, "--to", "cpu", "-o", "out/new.pt", "--json"),
        asked(path, "inspect", "inspect", path),
        asked(path, "rescue", "rescue", path, "--dry-run"),
    )[some(path, 6)]


def some(name: str, count: int) -> int:
    """A number below ``count`` that is always the same for a name."""
    return zlib.crc32(name.encode("utf-8", "surrogatepass")) % count


def fixture_cases() -> Iterator[Case]:
    known = machines()
    hosts = {name: machine_from(known[name]) for name in ("healthy", "bare")}
    for name, path in fixtures().items():
        there = Path("data", name)
        there.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, there)
        if path.suffix in CHECKPOINTS:
            yield from file_cases(name, there.as_posix(), hosts)
        else:
            yield from bad_file_cases(there.as_posix())


def bad_cases() -> Iterator[Case]:
    Path("damaged").mkdir()
    for name, data in damaged().items():
        Path("damaged", name).write_bytes(data)
    for name in sorted(map(Path.as_posix, Path("damaged").iterdir())) + forged():
        yield from bad_file_cases(name)


def anew(name: str, data: bytes) -> None:
    """Write a file in place of another. One that is overwritten is waited for: ext4 writes it to the disk."""
    Path(name).unlink(missing_ok=True)
    Path(name).write_bytes(data)


def text_cases() -> Iterator[Case]:
    for name, text in texts().items():
        anew("log.txt", text.encode())
        yield asked(name, "explain json", "explain", "log.txt", "--no-checks", "--json")
        if not some(name, 4):
            yield asked(name, "explain", "explain", "log.txt", "--no-checks")


def machine_cases() -> Iterator[Case]:
    for name, facts in machines().items():
        anew("machine.json", json.dumps({"schema": 1, "machine": facts}).encode())
        yield asked(name, "doctor json", "doctor", "--from", "machine.json", "--json")
        if not some(name, 4):
            yield asked(name, "doctor", "doctor", "--from", "machine.json", "--verbose")
    for code in BY_CODE:
        yield asked(f"cause {code}", "doctor explain", "doctor", "--explain", code)


PARTS: dict[str, Callable[[], Iterator[Case]]] = {
    "fixtures": fixture_cases,
    "bad files": bad_cases,
    "texts": text_cases,
    "machines": machine_cases,
}
"""Each begins in an empty folder."""


def forged() -> list[str]:
    """The names of the files and folders of the archive, which is unpacked here."""
    with tarfile.open(HERE / "files.tar.gz") as archive:
        for member in archive:
            held = archive.extractfile(member)
            assert held is not None
            Path(member.name).parent.mkdir(parents=True, exist_ok=True)
            Path(member.name).write_bytes(held.read())
    return sorted(path.as_posix() for path in Path("forged").iterdir())


# -- recording -------------------------------------------------------------------------------------------------------

OUTSIDE = ("TRANSLOAD_", "CUDA_", "NVIDIA_", "TORCH", "HIP_", "ROCR_", "LD_", "COLUMNS", "FORCE_COLOR", "TERM")


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """In an empty folder, with nothing in the environment that could change an answer."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(OUTSIDE)}
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, kept, clear=True):
        os.environ["NO_COLOR"] = "1"
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(before)


def recorded(part: str, full: Path | None = None) -> tuple[Table, Table]:
    """What this code answers in one part, and in which words."""
    answers: Table = {}
    words: Table = {}
    with apart():
        for case in PARTS[part]():
            outcome = case.run()
            answers.setdefault(case.about, {})[case.ask] = answer_of(case, outcome)
            words.setdefault(case.about, {})[case.ask] = words_of(outcome)
            if full is not None:
                write_full(full / part.replace(" ", "-"), case, outcome)
    return answers, words


def write_full(folder: Path, case: Case, outcome: Outcome) -> None:
    """The output of one case as a file to compare."""
    path = folder / case.about.replace("/", "_").replace("\n", " ")[:120] / case.ask.replace(" ", "-")
    path.parent.mkdir(parents=True, exist_ok=True)
    told = outcome.stdout
    if "json" in case.ask.split() and told:
        told = json.dumps(json.loads(told), indent=1, sort_keys=True)
    ending = f"\n--- stderr\n{outcome.stderr}--- exit {outcome.exit} {outcome.written}\n"
    path.write_bytes((told + ending).encode("utf-8", "surrogatepass"))


def differences(before: Table, after: Table) -> list[str]:
    """One line for each case that is not as it was."""
    return [
        f"{about}: {ask}: was {then or 'not there'}, is {now or 'gone'}"
        for about in sorted(before.keys() | after.keys())
        for ask in sorted(before.get(about, {}).keys() | after.get(about, {}).keys())
        if (then := before.get(about, {}).get(ask)) != (now := after.get(about, {}).get(ask))
    ]


def read(path: Path) -> dict[str, Table]:
    held: dict[str, Table] = json.loads(path.read_text(encoding="utf-8"))
    return held


def store(path: Path, tables: dict[str, Table]) -> None:
    """One line for each input, so that a change of it is a change of one line."""
    parts = []
    for part, table in tables.items():
        lines = ",\n".join(f"{json.dumps(about)}: {json.dumps(asks)}" for about, asks in table.items())
        parts.append(f"{json.dumps(part)}: {{\n{lines}\n}}")
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")


def run() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--update", action="store_true", help="record anew")
    parser.add_argument("--full", metavar="DIR", type=Path, help="write every output in full")
    options = parser.parse_args()
    full = options.full.absolute() if options.full else None
    made = {part: recorded(part, full) for part in PARTS}
    found: list[str] = []
    for place, path in enumerate((ANSWERS, WORDS)):
        tables = {part: both[place] for part, both in made.items()}
        if options.update:
            store(path, tables)
        else:
            before = read(path)
            found += [f"{path.stem}: {line}" for part in PARTS for line in differences(before[part], tables[part])]
    count = sum(len(asks) for answers, _ in made.values() for asks in answers.values())
    print("\n".join([*found, f"{count} cases, {len(found)} differences"]))  # noqa: T201
    return int(bool(found))


if __name__ == "__main__":
    raise SystemExit(run())
