"""Run every command on every file, text and machine of the tests, and compare the results with the recorded ones.

    python tests/golden/record.py                 compare with the recorded results, list the differences
    python tests/golden/record.py --update        record anew
    python tests/golden/record.py --full DIR      also write every output in full: run it in two checkouts, then diff -r

``answers.json`` holds what must not change: for each case its exit code, a digest of its JSON without the prose, and a
digest of the files that it wrote. ``words.json`` holds a digest of the complete output: the text, or the JSON with its
prose. A change of wording changes only the second. ``texts`` holds some outputs in full, for people to read: each file
has a command and what it prints. To add one, write a file with only its first lines, and record it.

Commands run in this process, in a temporary folder, and no result depends on the host: files and texts are fixed,
machines are read from reports (``doctor --from``), and ``check`` judges a recorded machine. torch is not used.
``machines.jsonl.gz`` holds the machines: the first line is a complete one, the others hold what differs from it.
``files.tar.gz`` holds damaged and hostile files that the tests forge. Both are inputs; no code writes them.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import functools
import gzip
import hashlib
import io
import json
import os
import re
import shlex
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

from tests.explaining.wordings import WORDINGS, sections  # noqa: E402 - after the path is set

from transload import check  # noqa: E402
from transload.cli.main import main  # noqa: E402
from transload.diagnose.rules import BY_CODE  # noqa: E402
from transload.diagnose.saved import machine_from  # noqa: E402

ANSWERS, WORDS, TEXTS = HERE / "answers.json", HERE / "words.json", HERE / "texts"

PROSE = {
    *("title", "evidence", "fix", "because", "what", "why", "notes", "purpose", "prediction", "warnings", "warning"),
    *("refusal", "reason", "absent", "cause", "wrong", "written_by.text", "error.where"),
}
"""Keys whose text is for people, some with their parent key. Lists keep their length."""

FULLY_TESTED = (
    "h200/state",
    "h200/train",
    "h200/torchscript",
    "h200/mixed",
    "torch-releases/torch-2.13.0",
    "torch-releases/torch-1.0.0",
)
"""Fixtures with all cases; the others have the main ones."""
CHECKPOINTS = (".pt", ".pth", ".ckpt", ".pt2")

Table = dict[str, dict[str, str]]


class Outcome(NamedTuple):
    """What a command printed and wrote."""

    exit: int
    stdout: str
    stderr: str = ""
    written: str = ""


class Case(NamedTuple):
    """One command on one input: the name of the input, a label for the command, and a function that runs it."""

    subject: str
    label: str
    run: Callable[[], Outcome]


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


# -- what must not change in an answer -------------------------------------------------------------------------------


def is_prose(parent: str, key: str) -> bool:
    return key in PROSE or f"{parent}.{key}" in PROSE


def without_prose(value: Any, parent: str = "", key: str = "") -> Any:
    """The value with ``…`` for every text that is for people; whether there is a text still counts."""
    if isinstance(value, dict):
        return {name: without_prose(item, key, name) for name, item in value.items()}
    if isinstance(value, list):
        return [without_prose(item, parent, key) for item in value]
    return "…" if isinstance(value, str) and value and is_prose(parent, key) else value


def answer_of(case: Case, outcome: Outcome) -> str:
    """The exit code and the digests of what must not change."""
    parts = [str(outcome.exit)]
    if "json" in case.label.split() and outcome.stdout:
        stable = json.dumps(without_prose(json.loads(outcome.stdout)), sort_keys=True)
        parts.append(digest(stable.encode()))
    return " ".join([*parts, *filter(None, [outcome.written])])


def words_of(outcome: Outcome) -> str:
    return digest(f"{outcome.stdout}\0{outcome.stderr}".encode("utf-8", "surrogatepass"))


# -- the inputs ------------------------------------------------------------------------------------------------------


def fixtures() -> dict[str, Path]:
    """Every file under tests/data, and the example; some of them are not checkpoints: scripts, expected values.

    Rank files of all releases get the same answers: those of FSDP in one release are enough.
    """
    paths = [path for path in sorted((ROOT / "tests" / "data").rglob("*")) if path.is_file()]
    paths = [path for path in paths if "rank-files" not in path.parts or "torch-2.13-ranks-2/fsdp" in path.as_posix()]
    named = {path.relative_to(ROOT / "tests" / "data").as_posix(): path for path in paths}
    return {**named, "examples/model_cuda0.pt": ROOT / "examples" / "model_cuda0.pt"}


def damaged() -> dict[str, bytes]:
    """Fixtures of every format that are cut, zeroed, flipped, extended or shifted at fixed places."""
    release = "torch-releases/torch-{}/state_dict_{}.pt"
    originals = {
        "zip": release.format("2.13.0-py3.11.7", "cuda0"),
        "stream": release.format("2.13.0-py3.11.7", "cuda0_other_format"),
        "old": release.format("1.6.0-py3.7.16", "cuda1"),
        "script": "h200/torchscript_cuda0.pt",
        "module": "h200/whole_custom_module_cuda0.pt",
        "export": "h200/export_cuda0.pt2",
    }
    results: dict[str, bytes] = {}
    for kind, name in originals.items():
        data = (ROOT / "tests" / "data" / name).read_bytes()
        for nth in (1, 4, 7):
            at = len(data) * nth // 8
            results[f"{kind}-cut-{nth}.pt"] = data[:at]
            results[f"{kind}-zeroed-{nth}.pt"] = data[:at] + bytes(64) + data[at + 64 :]
            results[f"{kind}-flipped-{nth}.pt"] = data[:at] + bytes([data[at] ^ 1 << nth]) + data[at + 1 :]
        results[f"{kind}-no-end.pt"] = data[:-22]
        results[f"{kind}-grown.pt"] = data + bytes(512)
        results[f"{kind}-doubled.pt"] = data + data
        results[f"{kind}-shifted.pt"] = b"HTTP/1.1 200 OK\r\n\r\n" + data
        results[f"{kind}-as-text.pt"] = data.replace(b"\n", b"\r\n")
    return results


def texts() -> dict[str, str]:
    """Every error text, log and unrelated text."""
    folder = ROOT / "tests" / "explaining"
    results = {f"{wording.code}, {wording.where}": wording.text for wording in WORDINGS}
    for name in ("logs.txt", "unrelated.txt"):
        results |= {f"{name}, {head}": text for head, text in sections(folder / name)}
    return results


def machines() -> dict[str, dict[str, Any]]:
    """Every machine by name, the complete one first."""
    lines = [json.loads(line) for line in gzip.decompress((HERE / "machines.jsonl.gz").read_bytes()).splitlines()]
    complete = lines[0]["machine"]
    return {line["name"]: changed(complete, line.get("set", {})) for line in lines}


def changed(machine: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """A machine with other values at some dotted paths."""
    result: dict[str, Any] = json.loads(json.dumps(machine))
    for path, value in values.items():
        *parents, last = path.split(".")
        parent = result
        for key in parents:
            parent = parent[key]
        parent[last] = value
    return result


# -- the cases -------------------------------------------------------------------------------------------------------


def command(*arguments: str) -> Outcome:
    """Run a command in this process, and remove what it wrote to ``out``."""
    stdout, stderr = io.StringIO(), io.StringIO()
    out = Path("out")
    out.mkdir(exist_ok=True)
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        code = main(list(arguments))
    files = [path for path in sorted(out.rglob("*")) if path.is_file()]
    content = b"".join(
        path.as_posix().encode() + b"\0" + path.read_bytes() for path in files if ".rescue." not in path.name
    )
    if any(out.iterdir()):  # to remove a folder can take milliseconds
        shutil.rmtree(out)
    output = re.sub(r'"seconds": [\d.e-]+', '"seconds": 0', stdout.getvalue())
    return Outcome(code, output, stderr.getvalue(), digest(content) if content else "")


def command_case(subject: str, label: str, *arguments: str) -> Case:
    return Case(subject, label, lambda: command(*arguments))


def check_case(subject: str, label: str, path: str, device: str | None, machine: Any) -> Case:
    def run() -> Outcome:
        try:
            result = check(path, device, machine=machine)
        except Exception as error:  # noqa: BLE001 - the error is the answer
            return Outcome(2, "", f"{type(error).__name__}: {error}")
        output = json.dumps(result.to_dict()) if "json" in label.split() else str(result)
        return Outcome(int(not result.ok), output)

    return Case(subject, label, run)


def file_cases(name: str, path: str, hosts: dict[str, Any]) -> Iterator[Case]:
    """All cases of a fixture."""
    yield command_case(name, "inspect json", "inspect", path, "--json")
    yield command_case(name, "verify hash json", "verify", path, "--hash", "--values", "--json")
    yield command_case(name, "convert json", "convert", path, "out/new.safetensors", "--json")
    yield command_case(name, "retag json", "retag", path, "--to", "cpu", "-o", "out/new.pt", "--json")
    yield check_case(name, "check bare json", path, "auto", hosts["bare"])
    if not name.startswith(FULLY_TESTED):
        return
    yield command_case(name, "inspect", "inspect", path)
    yield command_case(name, "inspect views", "inspect", path, "--tensors", "--globals", "--tree")
    yield command_case(name, "inspect verify json", "inspect", path, "--verify", "--json")
    yield command_case(name, "verify", "verify", path, "--hash")
    yield command_case(name, "retag", "retag", path, "--to", "cuda:3", "--dry-run")
    yield command_case(name, "convert", "convert", path, "out/new.npz")
    yield command_case(name, "convert pt json", "convert", path, "out/new.pt", "--json")
    yield command_case(name, "convert raw json", "convert", path, "out/raw/", "--json", "--dtype", "float16")
    yield command_case(name, "convert parts json", "convert", path, "--list", "--json")
    yield command_case(name, "rescue json", "rescue", path, "out/new.pt", "--json")
    yield command_case(name, "rescue", "rescue", path, "--dry-run")
    yield check_case(name, "check healthy json", path, "cuda:1", hosts["healthy"])
    yield check_case(name, "check", path, None, hosts["healthy"])


def bad_file_cases(path: str) -> Iterator[Case]:
    """``inspect`` of a damaged or hostile file, and one more command, chosen by its name."""
    yield command_case(path, "inspect json", "inspect", path, "--json")
    yield (
        command_case(path, "rescue json", "rescue", path, "out/new.pt", "--json"),
        command_case(path, "convert json", "convert", path, "out/new.safetensors", "--json"),
        command_case(path, "verify json", "verify", path, "--json"),
        command_case(path, "retag json", "retag", path, "--to", "cpu", "-o", "out/new.pt", "--json"),
        command_case(path, "inspect", "inspect", path),
        command_case(path, "rescue", "rescue", path, "--dry-run"),
    )[stable_number(path, 6)]


def stable_number(name: str, count: int) -> int:
    """A number below ``count`` that depends only on the name."""
    return zlib.crc32(name.encode("utf-8", "surrogatepass")) % count


def fixture_cases() -> Iterator[Case]:
    known = machines()
    hosts = {name: machine_from(known[name]) for name in ("healthy", "bare")}
    for name, path in fixtures().items():
        copy = Path("data", name)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
        if path.suffix in CHECKPOINTS:
            yield from file_cases(name, copy.as_posix(), hosts)
        else:
            yield from bad_file_cases(copy.as_posix())


def bad_cases() -> Iterator[Case]:
    Path("damaged").mkdir()
    for name, data in damaged().items():
        Path("damaged", name).write_bytes(data)
    for name in sorted(map(Path.as_posix, Path("damaged").iterdir())) + forged():
        yield from bad_file_cases(name)


def replace_file(name: str, data: bytes) -> None:
    """Write a file after removing the old one: ext4 would write an overwritten file to the disk at once."""
    Path(name).unlink(missing_ok=True)
    Path(name).write_bytes(data)


def text_cases() -> Iterator[Case]:
    for name, text in texts().items():
        replace_file("log.txt", text.encode())
        yield command_case(name, "explain json", "explain", "log.txt", "--no-checks", "--json")
        if not stable_number(name, 4):
            yield command_case(name, "explain", "explain", "log.txt", "--no-checks")


def machine_cases() -> Iterator[Case]:
    for name, facts in machines().items():
        replace_file("machine.json", json.dumps({"schema": 1, "machine": facts}).encode())
        yield command_case(name, "doctor json", "doctor", "--from", "machine.json", "--json")
        if not stable_number(name, 4):
            yield command_case(name, "doctor", "doctor", "--from", "machine.json", "--verbose")
    for code in BY_CODE:
        yield command_case(f"cause {code}", "doctor explain", "doctor", "--explain", code)


PARTS: dict[str, Callable[[], Iterator[Case]]] = {
    "fixtures": fixture_cases,
    "bad files": bad_cases,
    "texts": text_cases,
    "machines": machine_cases,
}
"""Each starts in an empty folder."""


def forged() -> list[str]:
    """Unpack the archive into the current folder; return the names of its files and folders."""
    with tarfile.open(HERE / "files.tar.gz") as archive:
        for member in archive:
            content = archive.extractfile(member)
            assert content is not None
            Path(member.name).parent.mkdir(parents=True, exist_ok=True)
            Path(member.name).write_bytes(content.read())
    return sorted(path.as_posix() for path in Path("forged").iterdir())


# -- outputs in full -------------------------------------------------------------------------------------------------


def transcript(text: str) -> str:
    """The lines of a text that begin with ``#`` or ``$``; each command is followed by what it prints now.

    ``check`` judges the machine ``healthy``, or the one that a line ``# machine: …`` names.
    """
    lines: list[str] = []
    machine = "healthy"
    with isolated():
        Path("new").mkdir()
        for line in text.split("\n"):
            if line.startswith("# machine: "):
                machine = line.removeprefix("# machine: ")
            if line.startswith("#"):
                lines.append(line)
            elif line.startswith("$ transload "):
                outcome = transcribed(shlex.split(line)[2:], machine)
                output = f"{outcome.stdout}{outcome.stderr}".rstrip("\n")
                lines += [line, *output.split("\n"), f"exit {outcome.exit}"]
    return "".join(f"{line}\n" for line in lines)


def transcribed(arguments: list[str], machine: str) -> Outcome:
    """Run a command after writing the files that it names."""
    for argument in arguments:
        data = input_file(argument)
        if data is not None and not Path(argument).exists():
            Path(argument).parent.mkdir(parents=True, exist_ok=True)
            Path(argument).write_bytes(data)

    def check_recorded(path: str, device: Any, **_: object) -> Any:
        return check(path, device, machine=machine_from(all_machines()[machine]))

    with mock.patch("transload.diagnose.doctor"), mock.patch("transload.checking.check_here", check_recorded):
        return command(*arguments)


def input_file(path: str) -> bytes | None:
    """The bytes of an input: a fixture, a damaged or forged file, a machine. None if it is not an input."""
    folder, _, name = path.partition("/")
    if folder == "machines":
        return json.dumps({"schema": 1, "machine": all_machines()[name.removesuffix(".json")]}).encode()
    if folder == "forged":
        with tarfile.open(HERE / "files.tar.gz") as archive:
            content = archive.extractfile(path)
            assert content is not None
            return content.read()
    if folder == "damaged":
        return damaged()[name]
    return (ROOT / "tests" / path).read_bytes() if folder == "data" else None


all_machines = functools.cache(machines)


def text_difference(path: Path) -> str:
    """How what the commands of a file print now differs from the file; empty if it does not."""
    before = path.read_text(encoding="utf-8")
    now = transcript(before)
    name = path.relative_to(ROOT).as_posix()
    return "\n".join(difflib.unified_diff(before.splitlines(), now.splitlines(), name, "now", lineterm=""))


# -- recording -------------------------------------------------------------------------------------------------------

HOST_VARIABLES = ("TRANSLOAD_", "CUDA_", "NVIDIA_", "TORCH", "HIP_", "ROCR_", "LD_", "COLUMNS", "FORCE_COLOR", "TERM")


@contextlib.contextmanager
def isolated() -> Iterator[None]:
    """Work in an empty folder, without environment variables that could change an answer."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(HOST_VARIABLES)}
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, environ, clear=True):
        os.environ["NO_COLOR"] = "1"
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(before)


def recorded(part: str, full: Path | None = None) -> tuple[Table, Table]:
    """The answers of the current code for one part, and the digests of their words."""
    answers: Table = {}
    words: Table = {}
    with isolated():
        for case in PARTS[part]():
            outcome = case.run()
            answers.setdefault(case.subject, {})[case.label] = answer_of(case, outcome)
            words.setdefault(case.subject, {})[case.label] = words_of(outcome)
            if full is not None:
                write_full(full / part.replace(" ", "-"), case, outcome)
    return answers, words


def write_full(folder: Path, case: Case, outcome: Outcome) -> None:
    """Write the output of one case to a file, for comparison."""
    path = folder / case.subject.replace("/", "_").replace("\n", " ")[:120] / case.label.replace(" ", "-")
    path.parent.mkdir(parents=True, exist_ok=True)
    output = outcome.stdout
    if "json" in case.label.split() and output:
        output = json.dumps(json.loads(output), indent=1, sort_keys=True)
    ending = f"\n--- stderr\n{outcome.stderr}--- exit {outcome.exit} {outcome.written}\n"
    path.write_bytes((output + ending).encode("utf-8", "surrogatepass"))


def differences(before: Table, after: Table) -> list[str]:
    """One line for each case that has changed."""
    return [
        f"{subject}: {label}: was {then or 'not there'}, is {now or 'gone'}"
        for subject in sorted(before.keys() | after.keys())
        for label in sorted(before.get(subject, {}).keys() | after.get(subject, {}).keys())
        if (then := before.get(subject, {}).get(label)) != (now := after.get(subject, {}).get(label))
    ]


def read(path: Path) -> dict[str, Table]:
    tables: dict[str, Table] = json.loads(path.read_text(encoding="utf-8"))
    return tables


def store(path: Path, tables: dict[str, Table]) -> None:
    """Write one line for each input, so that a changed input is one changed line."""
    parts = []
    for part, table in tables.items():
        lines = ",\n".join(f"{json.dumps(subject)}: {json.dumps(labels)}" for subject, labels in table.items())
        parts.append(f"{json.dumps(part)}: {{\n{lines}\n}}")
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")


def run() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--update", action="store_true", help="record anew")
    parser.add_argument("--full", metavar="DIR", type=Path, help="write every output in full")
    options = parser.parse_args()
    full = options.full.absolute() if options.full else None
    results = {part: recorded(part, full) for part in PARTS}
    changes: list[str] = []
    for index, path in enumerate((ANSWERS, WORDS)):
        tables = {part: both[index] for part, both in results.items()}
        if options.update:
            store(path, tables)
        else:
            before = read(path)
            changes += [f"{path.stem}: {line}" for part in PARTS for line in differences(before[part], tables[part])]
    for path in sorted(TEXTS.iterdir()):
        if options.update:
            path.write_text(transcript(path.read_text(encoding="utf-8")), encoding="utf-8")
        elif difference := text_difference(path):
            changes.append(difference)
    count = sum(len(labels) for answers, _ in results.values() for labels in answers.values())
    print("\n".join([*changes, f"{count} cases, {len(changes)} differences"]))  # noqa: T201
    return int(bool(changes))


if __name__ == "__main__":
    raise SystemExit(run())
