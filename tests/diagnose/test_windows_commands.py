"""Commands for Windows mean the same to PowerShell and to cmd, and cmd runs them.

There is no PowerShell where these tests run, so a parser of the part of its grammar that the commands use stands in for
it. On Windows, and under Wine, cmd itself runs one command of each form, with stand-ins for the programs.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from tests.diagnose.machines import cuinit_fails, healthy, with_facts
from tests.diagnose.translated import HOME, on_windows, translated
from tests.each import for_each

from transload.diagnose import fixes
from transload.diagnose.report import judge_machine
from transload.machine import Machine
from transload.steps import Step, Steps


@cache
def commands() -> dict[str, set[str]]:
    """All commands of all machines with Windows: for ``PowerShell`` and for ``cmd``. Both get those without a label."""
    found: dict[str, set[str]] = {"PowerShell": set(), "cmd": set()}
    for machine in (*translated(), *with_variables()):
        diagnosis = judge_machine(machine)
        for finding in (*diagnosis.findings, *(muted.finding for muted in diagnosis.muted)):
            shells: tuple[str, ...] = ("PowerShell", "cmd")
            for line in finding.fix:
                if line.startswith("$ "):
                    for shell in shells:
                        found[shell].add(line[2:])
                else:
                    named = re.fullmatch("In (PowerShell|cmd):", line)
                    shells = (named[1],) if named else ("PowerShell", "cmd")
    return found


def with_variables() -> list[Machine]:
    """Machines on which Windows keeps a variable that hides the GPU: for the user, and for the machine."""
    key = r"HKLM\SYSTEM\CurrentControlSet\Control\Session Manager\Environment"
    machine = with_facts(on_windows(cuinit_fails(healthy(), 100)), variables__values={"CUDA_VISIBLE_DEVICES": "-1"})
    return [
        with_facts(machine, variables__origins={"CUDA_VISIBLE_DEVICES": (place,)})
        for place in (r"HKCU\Environment", key)
    ]


# -- the words of a command, as each shell reads them

STRING = r"'(?:[^'\u2018-\u201b]|'')*'"
WORD = re.compile(rf"(?P<quoted>{STRING})|\"(?P<plain>[^\"$`]*)\"|(?P<bare>[\w./:\\=+-]+)")


def of_powershell(line: str) -> tuple[str, ...]:
    """What a command does in PowerShell: the words of a program's command line, or ``set``, the name and the value."""
    if setting := re.fullmatch(rf"\$env:(\w+) = ({STRING})", line):
        return "set", setting[1], unquoted(setting[2])
    if dropping := re.fullmatch(r"Remove-Item Env:(\w+)", line):
        return "set", dropping[1], ""
    if deleting := re.fullmatch(rf"Remove-Item -Recurse -LiteralPath ({STRING})", line):
        return "delete", unquoted(deleting[1])
    keeping = rf"\[Environment\]::SetEnvironmentVariable\('(\w+)', (\$null|{STRING}), '(User|Machine)'\)"
    if kept := re.fullmatch(keeping, line):
        return "keep", kept[3], kept[1], "" if kept[2] == "$null" else unquoted(kept[2])
    pruning = (
        rf"\$env:Path = \(\$env:Path -split ';' \| Where-Object {{ \$_\.TrimEnd\('\\'\) -ne ({STRING}) }}\) -join ';'"
    )
    if pruned := re.fullmatch(pruning, line):
        return "prune", unquoted(pruned[1])
    called, line = line.startswith("& '"), line.removeprefix("& ")
    words = [WORD.fullmatch(word) for word in re.findall(rf"(?:{STRING}|\"[^\"]*\"|[^\s'\"]+)+", line)]
    assert all(words), line
    assert called == line.startswith("'"), f"PowerShell would print this string: {line}"
    return tuple(
        unquoted(word["quoted"]) if word["quoted"] else word["plain"] or word["bare"] for word in words if word
    )


def unquoted(text: str) -> str:
    return text[1:-1].replace("''", "'")


def of_cmd(line: str) -> tuple[str, ...]:
    """What a command does in cmd, in the same form."""
    if pruning := re.fullmatch(r'set "PATH=%PATH:([^"]*);=%"', line):
        return "prune", pruning[1]
    if setting := re.fullmatch(r'set "(\w+)=([^"]*)"|set (\w+)=', line):
        return "set", setting[1] or setting[3], setting[2] or ""
    if deleting := re.fullmatch(r'(?:rmdir /s /q|del) "([^"]*)"', line):
        return "delete", deleting[1]
    whose = {"HKCU": "User", "HKLM": "Machine"}
    if dropping := re.fullmatch(
        r'reg delete "(HKCU|HKLM)\\[^"]+Environment" /v (\w+) /f|reg delete "(HKCU)\\Environment" /v (\w+) /f', line
    ):
        return "keep", whose[dropping[1] or dropping[3]], dropping[2] or dropping[4], ""
    if keeping := re.fullmatch(r'setx (\w+) "([^"]*)"( /M)?', line):
        return "keep", "Machine" if keeping[3] else "User", keeping[1], keeping[2]
    assert not re.search(r"[&|<>^]", re.sub(r'"[^"]*"', "", line)), line
    return tuple(quoted or bare for quoted, bare in re.findall(r'"([^"]*)"|(\S+)', line))


def test_powershell_and_cmd_read_the_same_words() -> None:
    found = commands()
    assert {of_powershell(line) for line in found["PowerShell"]} == {of_cmd(line) for line in found["cmd"]}
    assert len(found["cmd"]) > 100
    assert {of_powershell(line)[0] for line in found["PowerShell"]} >= {"set", "keep", "delete", "nvidia-smi", "conda"}
    programs = {of_powershell(line)[0] for line in found["PowerShell"] if "python" in of_powershell(line)[0]}
    assert rf"{HOME}\my env\Scripts\python.exe" in programs


def windows_in(shell: str) -> Machine:
    return with_facts(on_windows(healthy()), platform__shell=shell)


def texts(steps: Steps) -> list[str]:
    return [step.text for step in steps if isinstance(step, Step) and step.kind == "command"]


PYTHON = {
    r"C:\Python313\python.exe": (r"C:\Python313\python.exe", r"C:\Python313\python.exe"),
    r"C:\Program Files\Python\python.exe": (
        r"& 'C:\Program Files\Python\python.exe'",
        r'"C:\Program Files\Python\python.exe"',
    ),
    r"C:\O'Neil\python.exe": (r"& 'C:\O''Neil\python.exe'", '"C:\\O\'Neil\\python.exe"'),
    "C:\\O\u2019Neil\\python.exe": ("& 'C:\\O\u2019\u2019Neil\\python.exe'", '"C:\\O\u2019Neil\\python.exe"'),
    r"C:\a&b\python.exe": (r"& 'C:\a&b\python.exe'", r'"C:\a&b\python.exe"'),
    r"C:\100%\$x`n\python.exe": (r"& 'C:\100%\$x`n\python.exe'", r'"C:\100%\$x`n\python.exe"'),
    r"C:\Jörg\python.exe": (r"C:\Jörg\python.exe", r"C:\Jörg\python.exe"),
}


def test_the_path_of_python_is_quoted_for_each_shell() -> None:
    def check(path: str) -> None:
        for shell, mark, word in zip(("powershell", "cmd"), "'\"", PYTHON[path], strict=True):
            machine = with_facts(windows_in(shell), python__executable=path)
            assert texts(fixes.install(machine, "mkl<2024.1")) == [f"{word} -m pip install {mark}mkl<2024.1{mark}"]

    for_each(PYTHON, check)


def test_a_folder_that_ends_with_a_backslash_does_not_swallow_the_quote() -> None:
    machine = with_facts(windows_in("cmd"), python__prefix="D:\\my env\\", python__tool="conda")
    assert texts(fixes.conda(machine, "cuda", action="List")) == ['conda list -p "D:\\my env\\\\" cuda']


def test_variables_are_changed_in_the_terminal_and_where_windows_keeps_them() -> None:
    keys = {"A": (r"HKCU\Environment",), "B": (r"HKLM\SYSTEM\CurrentControlSet\Control\Session Manager\Environment",)}
    by_shell = {
        shell: with_facts(windows_in(shell), variables__origins=keys, variables__values={"A": "1", "B": "1", "C": "1"})
        for shell in ("powershell", "cmd")
    }
    assert fixes.lines_of(fixes.unset(by_shell["powershell"], "A")) == (
        "$ Remove-Item Env:A",
        "Permanently, for programs that are started afterwards:",
        "$ [Environment]::SetEnvironmentVariable('A', $null, 'User')",
    )
    assert texts(fixes.unset(by_shell["cmd"], "A", "C")) == [
        "set A=",
        "set C=",
        r'reg delete "HKCU\Environment" /v A /f',
    ]
    assert texts(fixes.set_variable(by_shell["powershell"], "B", "it's 5 %")) == [
        "$env:B = 'it''s 5 %'",
        "[Environment]::SetEnvironmentVariable('B', 'it''s 5 %', 'Machine')",
    ]
    assert texts(fixes.set_variable(by_shell["cmd"], "B", "a b")) == ['set "B=a b"', 'setx B "a b" /M']
    said = fixes.lines_of(fixes.set_variable(by_shell["cmd"], "B", "a b"))
    assert any("as administrator" in line for line in said)
    assert "PowerShell's profile" in fixes.lines_of(fixes.unset(by_shell["cmd"], "C"))[-1]


def test_a_folder_is_removed_from_path_without_writing_the_whole_path() -> None:
    folder = r"C:\Program Files\NVIDIA\bin"
    for shell, expected in (
        (
            "powershell",
            f"$env:Path = ($env:Path -split ';' | Where-Object {{ $_.TrimEnd('\\') -ne '{folder}' }}) -join ';'",
        ),
        ("cmd", f'set "PATH=%PATH:{folder};=%"'),
    ):
        assert texts(fixes.drop_folder(windows_in(shell), "PATH", folder)) == [expected]


def test_a_folder_of_pythonpath_is_found_whatever_its_case_and_separators() -> None:
    values = {"PYTHONPATH": r"c:/My Env/LIB;D:\other"}
    machine = with_facts(windows_in("cmd"), variables__values=values)
    assert fixes.in_search_path(machine, "PYTHONPATH", "C:\\my env\\lib")
    assert texts(fixes.drop_folder(machine, "PYTHONPATH", "C:\\my env\\lib"))[0] == r'set "PYTHONPATH=D:\other"'


def test_both_forms_are_shown_if_the_shell_is_unknown_and_one_if_they_agree() -> None:
    assert fixes.lines_of(
        fixes.uninstall(with_facts(windows_in(""), python__executable=r"C:\py\python.exe"), "torch")
    ) == (r"$ C:\py\python.exe -m pip uninstall -y torch",)
    assert fixes.lines_of(
        fixes.uninstall(with_facts(windows_in(""), python__executable=r"C:\a b\python.exe"), "torch")
    ) == (
        "In PowerShell:",
        r"$ & 'C:\a b\python.exe' -m pip uninstall -y torch",
        "In cmd:",
        r'$ "C:\a b\python.exe" -m pip uninstall -y torch',
    )
    git = with_facts(windows_in("bash"), python__executable=r"C:\a b\python.exe")
    assert texts(fixes.uninstall(git, "torch")) == [r"'C:\a b\python.exe' -m pip uninstall -y torch"]


# -- run by cmd

PROGRAMS = ("conda", "uv", "poetry", "pdm", "pixi", "py", "nvidia-smi", "transload", "wevtutil")
LOG = "import json, os, sys; print(json.dumps(sys.argv[1:]))"


@pytest.mark.skipif(sys.platform != "win32", reason="needs cmd, of Windows or of Wine")
def test_cmd_runs_one_command_of_each_form(tmp_path: Path) -> None:
    """Each word that a program gets is the one that the parser above read."""
    home, base = tmp_path / HOME.rpartition("\\")[2], Path(sys.base_prefix)
    for folder in (home / "my env", tmp_path / ".venv"):  # with copies of this Python
        (folder / "Scripts").mkdir(parents=True)
        for path in (*base.glob("*.dll"), base / "python.exe"):
            (folder / "Scripts" / path.name).write_bytes(path.read_bytes())  # shutil uses a function that Wine lacks
        (folder / "pyvenv.cfg").write_text(f"home = {base}\n")
    modules, programs = tmp_path / "modules", tmp_path / "programs"
    for folder in (modules, programs):
        folder.mkdir()
    for name in ("pip", "ensurepip", "venv"):
        (modules / f"{name}.py").write_text(LOG)
    (modules / "logged.py").write_text(LOG)
    for name in PROGRAMS:
        (programs / f"{name}.bat").write_text(f'@"{sys.executable}" -m logged %*\r\n')
    environ = {**os.environ, "PYTHONPATH": str(modules), "PYTHONUTF8": "1", "X": "old"}
    environ["PATH"] = f"{programs};{environ['PATH']}"
    forms = {re.sub(r"(?: [\w./:=+-]+)+(?= |$)", " …", line): line for line in sorted(commands()["cmd"])}
    skipped = ("reg ", "setx ", "where.exe", "python ")  # they change the machine, or run a program that is not here
    wrong = []
    for line in forms.values():
        words = of_cmd(line)
        here = line.replace(HOME, str(home))
        if line.startswith(skipped):
            continue
        if words[0] == "set":
            here += f"& set {words[1]}"
        if words[0] == "prune":
            here += "& set PATH"
        if words[0] == "delete":
            Path(words[1].replace(HOME, str(home))).mkdir(parents=True)
        search = {"PATH": f"C:\\first;{words[1]};D:\\last"} if words[0] == "prune" else {}
        done = subprocess.run(  # noqa: S602
            here,
            shell=True,
            env={**environ, **search},
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
        )
        said = done.stdout.decode("utf-8", "replace").strip()
        if words[0] == "set":
            right = (f"{words[1]}={words[2]}" in said) if words[2] else f"{words[1]}=" not in said
        elif words[0] == "prune":
            right = "PATH=C:\\first;D:\\last" in said
        elif words[0] == "delete":
            right = not Path(words[1].replace(HOME, str(home))).exists()
        else:
            rest = words[3:] if words[1:2] == ("-m",) else words[1:]
            expected = [word.replace(HOME, str(home)) for word in rest]
            given = json.loads(said) if said.startswith("[") else []
            in_batch = [word.replace("%", "") for word in expected]  # in which Wine's cmd drops a percent sign
            right = given == expected or (given == in_batch and words[0] in PROGRAMS)
        if not right:
            wrong.append((here, said, done.stderr.decode("utf-8", "replace")[-300:]))
    assert not wrong, "\n".join(map(repr, wrong))
    assert len(forms) > 12
