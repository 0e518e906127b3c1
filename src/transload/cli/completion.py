"""Completion scripts for shells, made of what ``--help`` shows. They are static: no Python starts when TAB is pressed.

Where a value is a path, a script leaves it to the shell; any other value that is free is not completed.
"""

from __future__ import annotations

from argparse import Action, Namespace
from collections.abc import Callable, Iterable, Iterator

from transload.cli.main import COMMANDS, parser_of

GLOBAL = {"-h": "show the help", "--help": "show the help", "-V": "show the version", "--version": "show the version"}
"""What may stand in place of a command, besides ``help``."""

PATHS = {"FILE", "SRC", "DST", "A", "B", "TEXT", "SCRIPT", "COPY", "ADAPTER", "PATH", "DIR"}
PATHS |= {"OUT.html", "OUT.json", "OUT.sarif", "M.json"}
"""The names of values that are paths."""

_HEAD = "transload: made by 'transload completion {}'"


def run_completion(arguments: Namespace) -> int:
    """Print the script for a shell."""
    print(script(arguments.shell), end="")
    return 0


def script(shell: str) -> str:
    """The script for a shell."""
    return "".join(f"{line}\n" for line in SHELLS[shell]())


def actions_of(command: str) -> list[Action]:
    """The arguments of a command."""
    return parser_of(command)._actions  # noqa: SLF001 - argparse has no other way to list them


def options_of(command: str) -> list[Action]:
    """The options of a command."""
    return [action for action in actions_of(command) if action.option_strings]


def positionals_of(command: str) -> list[Action]:
    """The arguments of a command that are not options."""
    return [action for action in actions_of(command) if not action.option_strings]


def takes_value(option: Action) -> bool:
    """Whether an option has a value, or may have one."""
    return option.nargs != 0


def name_of(action: Action) -> str:
    """The name of a value in the help."""
    metavar = action.metavar[0] if isinstance(action.metavar, tuple) else action.metavar
    return metavar or action.dest


def is_path(action: Action) -> bool:
    """Whether a value is a path."""
    return not action.choices and name_of(action) in PATHS


def help_of(action: Action) -> str:
    """What the help says about an option."""
    return str(action.help)


def _choices(action: Action) -> str:
    return " ".join(action.choices or ())


# -- bash

_BASH = r"""
_transload() {
    local current=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD - 1]} command=${COMP_WORDS[1]}
    local options= words= paths=yes at
    COMPREPLY=()
    if ((COMP_CWORD == 1)); then
        COMPREPLY=($(compgen -W "@COMMANDS@ help @GLOBAL@" -- "$current"))
        return
    fi
    if [[ $current == = ]]; then # as readline splits --option=value
        current=
    elif [[ $before == = ]]; then
        before=${COMP_WORDS[COMP_CWORD - 2]}
    fi
    case "$command $before" in
@VALUES@
    esac
    case $command in
@OPTIONS@
        help) words="@COMMANDS@" paths= ;;
        *) return ;;
    esac
    if [[ $command == run ]]; then # the arguments of the program are its own
        for ((at = 2; at < COMP_CWORD; at++)); do
            case ${COMP_WORDS[at]} in
                @RUN@)
                    ((at++))
                    [[ ${COMP_WORDS[at]} == = ]] && ((at++)) ;;
                -*) ;;
                *) return ;;
            esac
        done
    fi
    if [[ $current == -* ]]; then
        COMPREPLY=($(compgen -W "$options" -- "$current"))
    elif [[ $words ]]; then
        COMPREPLY=($(compgen -W "$words" -- "$current"))
    fi
    if [[ ! $paths ]]; then
        compopt +o bashdefault +o default 2>/dev/null
    fi
}
complete -o bashdefault -o default -F _transload transload"""


def _bash() -> Iterator[str]:
    values: dict[str, list[str]] = {}
    options = []
    for command in COMMANDS:
        for option in options_of(command):
            if takes_value(option):
                done = "return" if is_path(option) else "compopt +o bashdefault +o default 2>/dev/null; return"
                chosen = f'COMPREPLY=($(compgen -W "{_choices(option)}" -- "$current")); return'
                before = (f'"{command} {name}"' for name in option.option_strings)
                values.setdefault(chosen if option.choices else done, []).extend(before)
        names = " ".join(name for option in options_of(command) for name in option.option_strings)
        positionals = positionals_of(command)
        words = "".join(map(_choices, positionals))
        paths = "" if any(map(is_path, positionals)) else " paths="
        options.append(f'        {command}) options="{names}" words="{words}"{paths} ;;')
    cases = (f"        {' | '.join(names)})\n            {words} ;;" for words, names in values.items())
    run = (name for option in options_of("run") if takes_value(option) for name in option.option_strings)
    yield f"# {_HEAD.format('bash')}"
    yield _filled(
        _BASH,
        COMMANDS=" ".join(COMMANDS),
        GLOBAL=" ".join(GLOBAL),
        VALUES="\n".join(cases),
        OPTIONS="\n".join(options),
        RUN=" | ".join(run),
    )


def _filled(template: str, **parts: str) -> str:
    for name, part in parts.items():
        template = template.replace(f"@{name}@", part)
    return template.removeprefix("\n")


# -- zsh

_ZSH = r"""
_transload() {
    local -a _transload_commands
    _transload_commands=(
@COMMANDS@
    )
    if ((CURRENT == 2)); then
        _describe -t commands command _transload_commands
        _arguments @GLOBAL@
        return
    fi
    local command=$words[2]
    shift words
    ((CURRENT--))
    case $command in
        help)
            _describe -t commands command _transload_commands ;;
@CASES@
    esac
}
if [[ $funcstack[1] == _transload ]]; then # found in fpath
    _transload "$@"
else
    compdef _transload transload
fi"""


def _zsh() -> Iterator[str]:
    cases = []
    for command in COMMANDS:
        specs = [spec for option in options_of(command) for spec in _zsh_option(option)]
        for number, positional in enumerate(positionals_of(command), 1):
            place = f"{number}:" if positional.nargs is None else f"{number}::" if positional.nargs == "?" else "*:"
            action = "_files" if is_path(positional) else f"({_choices(positional)})"
            specs.append(_quoted(f"{place}{_colons(name_of(positional))}:{action}"))
        last = " -A '-*'" if command == "run" else ""  # the options of the program are its own
        lines = " \\\n                ".join(specs)
        cases.append(f"        {command})\n            _arguments -S{last} \\\n                {lines} ;;")
    yield "#compdef transload"
    yield f"# {_HEAD.format('zsh')}"
    yield _filled(
        _ZSH,
        COMMANDS="\n".join(f"        {_quoted(f'{name}:{_colons(does)}')}" for name, does in COMMANDS.items()),
        GLOBAL=" ".join(_quoted(f"{name}[{text}]") for name, text in GLOBAL.items()),
        CASES="\n".join(cases),
    )


def _zsh_option(option: Action) -> Iterator[str]:
    repeated = type(option).__name__ == "_AppendAction" or option.nargs == "+"
    others = [] if repeated else option.option_strings
    exclusive = f"({' '.join(others)})" if len(others) > 1 else "*" if repeated else ""
    text = help_of(option).replace("[", r"\[").replace("]", r"\]")
    value = ""
    if takes_value(option):
        action = f"({_choices(option)})" if option.choices else "_files" if is_path(option) else ""
        value = f":{':' if option.nargs == '?' else ''}{_colons(name_of(option))}:{action or ' '}"
    for name in option.option_strings:
        joined = "=" if value and name.startswith("--") else ""
        yield _quoted(f"{exclusive}{name}{joined}[{text}]{value}")


def _colons(text: str) -> str:
    return text.replace("\\", r"\\").replace(":", r"\:")


def _quoted(text: str) -> str:
    """A word for zsh, in single quotes."""
    return "'" + text.replace("'", "'\\''") + "'"


# -- fish

_FISH = r"""
function __transload_starts
    test (count (commandline -opc)) -eq 1
end
function __transload_is
    set -l words (commandline -opc)
    test (count $words) -gt 1; and contains -- $words[2] $argv
end
complete -c transload -n __transload_starts -f"""


def _fish() -> Iterator[str]:
    yield f"# {_HEAD.format('fish')}"
    yield _FISH.removeprefix("\n")
    for names, text in ((("-h", "--help"), GLOBAL["-h"]), (("-V", "--version"), GLOBAL["-V"])):
        yield f"complete -c transload -n __transload_starts {_fish_names(names)} -d {_fish_quoted(text)}"
    for command, does in {**COMMANDS, "help": "show the help of a command"}.items():
        yield f"complete -c transload -n __transload_starts -a {command} -d {_fish_quoted(does)}"
    yield f"complete -c transload -n '__transload_is help' -f -a '{' '.join(COMMANDS)}'"
    for command in COMMANDS:
        start = f"complete -c transload -n '__transload_is {command}'"
        if not any(map(is_path, positionals_of(command))):
            yield f"{start} -f"
        for positional in positionals_of(command):
            if positional.choices:
                yield f"{start} -a '{_choices(positional)}'"
        for option in options_of(command):
            value = ""
            if takes_value(option):
                value = f" -x -a '{_choices(option)}'" if option.choices else " -r -F" if is_path(option) else " -x"
            yield f"{start} {_fish_names(option.option_strings)}{value} -d {_fish_quoted(help_of(option))}"


def _fish_names(names: Iterable[str]) -> str:
    return " ".join(f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in names)


def _fish_quoted(text: str) -> str:
    """A word for fish, in single quotes."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


# -- PowerShell

_POWERSHELL = r"""
Register-ArgumentCompleter -Native -CommandName transload -ScriptBlock {
    param($wordToComplete, $commandAst, $cursorPosition)
    $commands = [ordered]@{
@COMMANDS@
    }
    $options = @{
@OPTIONS@
    }
    $values = @{
@VALUES@
    }
    $words = @($commandAst.CommandElements | Where-Object { $_.Extent.EndOffset -lt $cursorPosition } |
        ForEach-Object { $_.Extent.Text })
    $command = if ($words.Count -gt 1) { $words[1] } else { '' }
    $found = [ordered]@{}
    if ($words.Count -lt 2) {
        $found = $commands
    } elseif ($values.ContainsKey("$command $($words[-1])")) {
        foreach ($value in $values["$command $($words[-1])"]) { $found[$value] = $value }
    } elseif ($wordToComplete.StartsWith('-') -and $options.ContainsKey($command)) {
        $found = $options[$command]
    } elseif ($values.ContainsKey($command)) {
        foreach ($value in $values[$command]) { $found[$value] = $value }
    }
    foreach ($name in $found.Keys) {
        if ($name.StartsWith($wordToComplete, [StringComparison]::Ordinal)) {
            [System.Management.Automation.CompletionResult]::new($name, $name, 'ParameterValue', $found[$name])
        }
    }
}"""


def _powershell() -> Iterator[str]:
    def table(pairs: Iterable[tuple[str, str]], indent: str) -> str:
        return "\n".join(f"{indent}{_powershell_quoted(name)} = {_powershell_quoted(text)}" for name, text in pairs)

    options, values = [], {"help": list(COMMANDS)}
    for command in COMMANDS:
        pairs = [(name, help_of(option)) for option in options_of(command) for name in option.option_strings]
        options.append(f"        '{command}' = [ordered]@{{\n{table(pairs, ' ' * 12)}\n        }}")
        for action in actions_of(command):
            if action.choices:
                for name in action.option_strings or [""]:
                    values[f"{command} {name}".rstrip()] = list(action.choices)
    rows = (f"        '{name}' = @({', '.join(map(_powershell_quoted, words))})" for name, words in values.items())
    top = {**COMMANDS, "help": "show the help of a command", **GLOBAL}
    yield f"# {_HEAD.format('powershell')}"
    yield _filled(
        _POWERSHELL,
        COMMANDS=table(top.items(), " " * 8),
        OPTIONS="\n".join(options),
        VALUES="\n".join(rows),
    )


def _powershell_quoted(text: str) -> str:
    """A string for PowerShell, in single quotes."""
    return "'" + text.replace("'", "''") + "'"


SHELLS: dict[str, Callable[[], Iterator[str]]] = {"bash": _bash, "zsh": _zsh, "fish": _fish, "powershell": _powershell}
"""The emitter for each shell."""
