"""The completion scripts and the man page: the shells that are installed run them."""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.each import each

from transload.cli.completion import PATHS, SHELLS, actions_of, name_of, options_of, script, takes_value
from transload.cli.main import COMMANDS, main

ROOT = Path(__file__).parent.parent.parent
FREE = {"A=B", "CODE", "D", "FORMAT", "KEY", "MODEL", "NAME", "PREFIX", "R", "REGEX", "SECONDS", "SIZE", "T", "WHAT"}
"""The names of values that are not completed: they are neither paths nor one of a few words."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with each script and some files."""
    for shell in SHELLS:
        (tmp_path / f"script.{shell}").write_text(script(shell), encoding="utf-8", newline="\n")
    (tmp_path / "model one.pt").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def output(shell: str, *words: str) -> str:
    """What a shell prints; the test is skipped if it is not installed."""
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"needs {shell}")
    done = subprocess.run([program, *words], capture_output=True, encoding="utf-8", timeout=120, check=False)
    assert done.stderr == ""
    return done.stdout


def section(shell: str, command: str) -> str:
    """The part of a script that is about the options of a command."""
    text = script(shell)
    if shell == "bash":
        return "\n".join(re.findall(rf"^ +{command}\) options=.*", text, re.MULTILINE))
    if shell == "fish":
        return "\n".join(re.findall(rf"^complete .*'__transload_is {command}'.*", text, re.MULTILINE))
    begin = f"\n        {command})\n" if shell == "zsh" else f"        '{command}' = [ordered]@{{\n"
    return text.split(begin)[1].split(" ;;\n" if shell == "zsh" else "        }\n")[0]


@each("shell", SHELLS)
def test_every_command_and_every_option_is_in_each_script(shell: str) -> None:
    for command in COMMANDS:
        text = section(shell, command)
        names = [name for option in options_of(command) for name in option.option_strings]
        if shell == "fish":
            names = [f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in names]
        missing = [name for name in names if not re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", text)]
        assert names, command
        assert missing == [], command


@each("shell", SHELLS)
def test_command_prints_the_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    printed = capsys.readouterr().out
    assert printed == script(shell)
    assert "@" not in printed.replace("[@]", "").replace('"$@"', "").replace("@{", "").replace("@(", "")
    assert printed.isascii()


def test_kind_of_every_value_is_known() -> None:
    actions = [action for command in COMMANDS for action in actions_of(command)]
    free = {name_of(action) for action in actions if takes_value(action) and not action.choices} - PATHS
    assert free == FREE


BASH = r"""
source script.bash
complete -p transload >/dev/null || exit 1
while read -r line; do
    COMP_WORDS=($line); [[ $line == *_ ]] && COMP_WORDS[-1]=''
    COMP_CWORD=$((${#COMP_WORDS[@]} - 1)) COMPREPLY=()
    _transload
    echo "${COMPREPLY[*]}"
done
"""
COMPLETED = {
    "transload ins": "inspect",
    "transload --": "--help --version",
    "transload inspect --s": "--stats --sarif",
    "transload inspect --color _": "auto always never",
    "transload inspect --color = al": "always",
    "transload inspect --color =": "auto always never",
    "transload rescue --fill z": "zeros",
    "transload retag --o": "--out",
    "transload completion _": " ".join(SHELLS),
    "transload help di": "diff",
    "transload inspect mo": "",  # left to the shell, which knows files
    "transload run --d": "--device",
    "transload run --device cpu --q": "--quiet",
    "transload run --device = cpu --q": "--quiet",
    "transload run train.py --d": "",  # of the program
    "transload nothing --x": "",
}


def test_bash_completes(folder: Path) -> None:
    program = shutil.which("bash")
    if program is None:
        pytest.skip("needs bash")
    version = subprocess.run([program, "-c", "echo ${BASH_VERSINFO[0]}"], capture_output=True, text=True, check=True)
    if int(version.stdout) < 4:
        pytest.skip("COMP_WORDS[-1] of the test needs bash 4.3")
    (folder / "complete.sh").write_text(BASH, encoding="utf-8", newline="\n")
    lines = "".join(f"{line}\n" for line in COMPLETED)
    command = [program, "--norc", "complete.sh"]
    done = subprocess.run(command, input=lines, capture_output=True, encoding="utf-8", timeout=120, check=False)
    replies = dict(zip(COMPLETED, done.stdout.split("\n"), strict=False))
    assert {line: " ".join(sorted(reply.split())) for line, reply in replies.items()} == {
        line: " ".join(sorted(reply.split())) for line, reply in COMPLETED.items()
    }


def test_fish_completes(folder: Path) -> None:  # noqa: ARG001
    lines = {
        "transload ins": ["inspect"],
        "transload inspect --ht": ["--html"],
        "transload inspect --color a": ["always", "auto"],
        "transload completion ": [*sorted(SHELLS)],
        "transload inspect mod": ["model one.pt"],
        "transload convert --key mod": [],
        "transload help ch": ["check"],
    }
    asked = "; ".join(f"echo '>'; complete -C '{line}'" for line in lines)
    found = output("fish", "--no-config", "-c", f"source script.fish; {asked}").split(">\n")[1:]
    replies = [sorted(re.sub(r"\\ ", " ", row.split("\t")[0]) for row in part.splitlines()) for part in found]
    assert dict(zip(lines, replies, strict=True)) == lines


def test_zsh_reads_the_words_that_are_meant(folder: Path) -> None:  # noqa: ARG001
    stand_ins = 'compdef() { :; }; _describe() { :; }; _arguments() { print -rl -- "$@"; }'
    ask = f"{stand_ins}; source script.zsh; words=(transload $1 ''); CURRENT=3; _transload"
    for command in COMMANDS:
        printed = output("zsh", "-f", "-c", ask, "zsh", command).splitlines()
        for option in options_of(command):
            spec = [line for line in printed if re.search(rf"(^|\)|\*){option.option_strings[-1]}=?\[", line)]
            assert len(spec) == 1, (command, option)
            assert str(option.help).replace("[", r"\[").replace("]", r"\]") in spec[0]


STRING = re.compile(r"'(?:[^'\u2018-\u201b]|'')*'")


def test_powershell_can_parse_the_script(folder: Path) -> None:  # noqa: ARG001
    text = script("powershell")
    depth = []
    for character in STRING.sub("''", text.partition("\n")[2]):  # without the comment
        if character in "({[":
            depth.append(character)
        elif character in ")}]":
            assert depth.pop() + character in ("()", "{}", "[]")
    assert depth == []
    for table in re.findall(r"@\{\n(.*?)\n +\}", text, re.DOTALL):
        keys = [key.lower() for key in re.findall(rf"^ +({STRING.pattern}) = ", table, re.MULTILINE)]
        assert keys
        assert len(keys) == len(set(keys))  # two keys that differ only in case are an error
    if shutil.which("pwsh"):
        ask = "$null = [ScriptBlock]::Create((Get-Content -Raw -LiteralPath script.powershell)); 'parsed'"
        assert output("pwsh", "-NoProfile", "-Command", ask).strip() == "parsed"


# -- what packages contain


def test_share_has_the_man_page_and_the_scripts(tmp_path: Path) -> None:
    share = runpy.run_path(str(ROOT / "scripts" / "share.py"))
    names = share["write"](tmp_path)
    assert names == sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file())
    for shell, name in share["SHELLS"].items():
        assert (tmp_path / name).read_text(encoding="utf-8") == script(shell)


def test_man_page_names_every_command_and_option_and_is_clean(tmp_path: Path) -> None:
    runpy.run_path(str(ROOT / "scripts" / "share.py"))["write"](tmp_path)
    page = tmp_path / "man" / "man1" / "transload.1"
    sections = dict(
        re.findall(r'^\.SH "?(.+?)"?\n(.*?)(?=^\.SH|\Z)', page.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    )
    assert {"NAME", "SYNOPSIS", "COMMANDS", "EXAMPLES", "OPTIONS"} < sections.keys()
    for command, does in COMMANDS.items():
        assert does.replace("-", r"\-") in sections["COMMANDS"]
        for option in options_of(command):
            for name in option.option_strings:
                bold = name.replace("-", r"\-")
                assert rf"\fB{bold}\fR" in sections[f"transload {command}"], (command, name)
    assert output("groff", "-man", "-ww", "-Tutf8", str(page)).count("TRANSLOAD(1)") >= 2
