"""Removes what identifies a person or a place: users and their homes, hosts, GPUs, serial numbers, addresses.

Everything here is pure except ``names_here``. The same thing is always replaced by the same word, and different things
by different words, so that a redacted machine is judged like the original. Ordinary words stay: a user name is replaced
as a component of a path or before an ``@``; a host name as a whole word, or, if it may be an ordinary word, only where
nothing but a host name can be. Neither is replaced if it is a common technical word.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

from transload.diagnose.host import Host
from transload.diagnose.tables import word_lists
from transload.frozen import Frozen, replace
from transload.machine import Machine
from transload.steps import step_of

T = TypeVar("T")  # a Diagnosis or a Machine


class Names(Frozen):
    """What is known about the user and the host, beyond the facts. ``homes`` are all paths to one home."""

    homes: tuple[str, ...] = ()
    users: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()


def names_here() -> Names:
    """The user of this process, and the host."""
    environ = os.environ
    homes = [environ.get("HOME", ""), environ.get("USERPROFILE", "")]
    users = [environ.get(name, "") for name in ("USER", "LOGNAME", "USERNAME", "SUDO_USER")]
    hosts = [environ.get(name, "") for name in ("HOSTNAME", "COMPUTERNAME", "SLURMD_NODENAME")]
    if hasattr(os, "uname"):
        hosts.append(os.uname().nodename)
    if hasattr(os, "getuid"):  # not with ``pwd``, which may ask a directory server over the network
        entry = rf"^([^:\n]*):[^:\n]*:{os.getuid()}:[^:\n]*:[^:\n]*:([^:\n]*)"
        for user, home in Host().findall(entry, "/etc/passwd"):
            homes.append(home)
            users.append(user)
    homes += [os.path.realpath(home) for home in homes if home]
    return Names(*(tuple(dict.fromkeys(filter(None, names))) for names in (homes, users, hosts)))


_NONE = Names()


def redacted(subject: T, names: Names = _NONE, *, runnable: bool = False) -> T:
    """A redacted diagnosis or machine.

    ``runnable`` is for the machine's owner: in fixes only the user's home is replaced, by ``~`` or ``$HOME``, so that
    commands still work; on Windows, whose shells do not agree on a name for it, not even that. Other paths and ids
    would not exist if they were replaced.

    >>> from transload.machine import Machine, Python
    >>> redacted(Machine(python=Python("/home/mary/venv/bin/python"))).python.executable
    '~/venv/bin/python'
    """
    machine: Any = getattr(subject, "machine", None) or subject
    redactor = _Redactor(machine, names)
    result: T = _mapped(subject, redactor.runnable if runnable else redactor.text)
    return result


def _mapped(value: Any, change: Callable[[str, str], str], field: str = "") -> Any:
    """The value with every text in it changed; ``change`` also gets the name of the innermost field or key."""
    if isinstance(value, str):
        return change(value, field)
    if isinstance(value, tuple):
        return tuple([_mapped(member, change, field) for member in value])
    if isinstance(value, dict):
        return {name: _mapped(member, change, name) for name, member in value.items()}
    if is_dataclass(value):
        names = (field.name for field in fields(value))
        return replace(value, **{name: _mapped(getattr(value, name), change, name) for name in names})  # type: ignore[type-var]
    return value


# -- what is replaced --------------------------------------------------------------------------------------------------

_NAME = r"[\w@+-](?:[\w.@+-]*[\w@+-])?"
_BEGIN = r"(?<![\w.~-])"  # a path does not begin inside a word
_END = r"(?![\w@+-]|\.\w)"  # nor does a name end inside one
_HOME = re.compile(
    rf"{_BEGIN}(?:/mnt/[a-z]/Users/[^/:\r\n]+?(?=/|$)|(?:/[\w.+-]+){{0,4}}?/(?:home|Users)/{_NAME})"
    r"|(?<![A-Za-z])[A-Za-z]:[\\/]+Users[\\/]+[^\\/:*?\"<>|\r\n]+?(?=[\\/\"']|$)",
    re.IGNORECASE,
)
_CARD = re.compile(r"(?<=GPU-|MIG-)[0-9A-Fa-f][0-9A-Fa-f-]*")
_UUID = re.compile(
    r"(?:(?<=pod)|(?<![0-9A-Za-z]))(?<!GPU-)(?<!MIG-)"
    r"[0-9A-Fa-f]{8}(?:[-_][0-9A-Fa-f]{4}){3}[-_][0-9A-Fa-f]{12}(?![0-9A-Za-z])"
)
_UNMARKED = re.compile(r"(?<![\w-])(\d*)(?!\d)([A-Fa-f-][0-9A-Fa-f-]{7,})")  # a UUID without its GPU-
_IPV4 = r"(?:\d{1,3}\.){3}\d{1,3}"
_SERIAL = re.compile(r"(?i)(\bserial(?:[ _](?:number|no\.?))?(?: is|[:=#])*\s*)(?=[0-9A-Za-z-]*\d)[0-9A-Za-z-]{5,}")
_Change = tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]
_CHANGES: tuple[_Change, ...] = (
    # a container id, a MAC address, a serial number, a login in a URL; an IP address, unless it may be a version
    (re.compile(r"(?<![0-9A-Za-z])[0-9a-f]{64}(?![0-9A-Za-z])"), "<id>"),
    (re.compile(r"(?<![0-9A-Fa-f:])(?:[0-9A-Fa-f]{2}:){5}[0-9A-Fa-f]{2}(?![0-9A-Fa-f:])"), "00:00:00:00:00:00"),
    (_SERIAL, r"\g<1>0"),
    (re.compile(r"(?<=://)[^/\s]+@"), ""),  # up to the last @: a password may contain others
    (re.compile(rf"(?<=://){_IPV4}|(?<=@){_IPV4}|(?<=://)\[[0-9A-Fa-f:.]+\]"), "192.0.2.1"),
)
# only from the start of a path: the search would be quadratic otherwise
_PATH = re.compile(r"(?<![^\s:;,'\"()<>=])[^\s:;,'\"()<>=/\\]*[/\\][^\s:;,'\"()<>]*")
_IPV6 = re.compile(r"(?=(?:[^:]*:){2})[0-9A-Fa-f:.]+")
_SITE = re.compile(r"(?<=://)[\w.-]+")
_SYSTEM = ("/usr/", "/lib", "/etc/", "/proc/", "/sys/", "/dev/", "/bin/", "/sbin/")
_QUOTED = re.compile(r"'([^'\"$`\\!]*)'")
_TILDE = re.compile(r"(?<![\w.~/-])~(?=[/:]|$)")
_SAFE = re.compile(r"[\w@%+=:,./~-]*")

_VISIBLE = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES")
_LONG_ID = 8  # shorter ids are replaced only if a variable has them: 'GPU-add' is not an id

# Homes that belong to no user, and names that are not secret or have another meaning on a machine.
_NOBODY = frozenset({"shared", "public", "default", "all users", "linuxbrew"})
_NO_HOME = re.compile(r"/(?:root|nonexistent|opt|tmp|var/empty|(?:usr|lib|etc|proc|sys|dev|bin|sbin)(?:/.*)?)")
_ABSOLUTE = re.compile(r"/|[A-Za-z]:")
_PLAIN = word_lists()["Names in paths that are no secret"]
_PUBLIC = re.compile(
    r"(?:[\w-]+\.)*(?:github|gitlab|githubusercontent|pypi|pythonhosted|pytorch|nvidia|huggingface|anaconda|conda|amd)"
    r"\.(?:com|org|co|io)"
)
_TECHNICAL = re.compile(r"(?:nvidia|cuda|torch|python|lib|sm_|compute_)[\w.]*|[\d.]+", re.IGNORECASE)
_SHORTEST = 3  # the fewest characters of a host name, and of a user name that is only the start of a word


class _Redactor:
    """The names on one machine, and their replacements."""

    def __init__(self, machine: Machine, names: Names) -> None:
        texts: dict[tuple[str, str], str] = {}
        _mapped(machine, lambda text, field: texts.setdefault((text, field), text))
        # the paths of the user's own home, and every other home with its replacement
        paths = (text for text, _ in texts if "/" in text or "\\" in text)
        homes = dict.fromkeys(match[0] for text in paths for match in _HOME.finditer(text))
        personal = [home for home in homes if _last(home).lower() not in _NOBODY]
        home = machine.variables.values.get("HOME") or ""
        foreign = _ABSOLUTE.match(home) and home not in names.homes  # facts from elsewhere
        own_homes = [home] if foreign else [home for home in names.homes if _ABSOLUTE.match(home)]
        if not own_homes:  # the user's packages show whose machine it is
            likely = _HOME.match(machine.python.user_site)
            own_homes = [likely[0]] if likely else personal[:1]
        stripped = (path.rstrip("/\\") for path in own_homes)
        own_homes = [home for home in stripped if home and not _NO_HOME.fullmatch(home)]
        others = (home for home in personal if home not in own_homes)
        self.others = {home: f"~user{place}" for place, home in enumerate(others, 2)}
        marks = ("''", "'\"'\"'")  # how PowerShell and bash write an apostrophe in quotes
        quoted = [home.replace("'", mark) for home in own_homes for mark in marks]
        self.home = _any_of([*own_homes, *quoted], before=_BEGIN, after=_END)
        self.windows = machine.platform.system == "Windows"

        users = (*names.users, *map(_last, own_homes), *map(_last, self.others))
        self.users = frozenset(name for name in users if name.lower() not in _PLAIN)
        long = (name for name in self.users if len(name) >= _SHORTEST)
        self.leading_user = _any_of(long, before=r"(?:\A|(?<=\A~))", after=r"(?=[-_.@+]|\Z)")
        spaced = [name for name in self.users if " " in name]
        self.names: tuple[_Change, ...] = (
            *_CHANGES,
            (_any_of(spaced, before=r"(?<=[/\\])", after=r"(?=[/\\:;'\"]|$)"), "user"),
            (_PATH, self._path),
            (_any_of(self.users, before=r"(?<=\bname=|\buser=)", after=r"(?![A-Za-z0-9])"), "user"),
            (_any_of(self.users, before=r"(?<![\w.-])", after="(?=@)"), "user"),
            (_hosts(names.hosts), "host"),
        )
        values = machine.variables.values
        self.short = {uuid for name in _VISIBLE for uuid in _CARD.findall(values.get(name, ""))}
        self.fakes: dict[str, Any] = {}
        for text, field in texts:  # in the order of the facts, so that redacting twice changes nothing
            self._ids(text, field)

    def runnable(self, text: str, field: str) -> str:
        """A text without names, except in a fix, which must still work."""
        if field != "fix":
            return self.text(text, field)
        kind = step_of(text).kind
        if kind == "copy" or (kind == "command" and self.windows):  # in a file, and in cmd, nothing expands a home
            return text
        return self._command(text) if kind == "command" else self.home.sub("~", text)

    def text(self, text: str, field: str) -> str:
        """A text without names. In a command the user's home becomes what a shell calls it, ``~`` or ``$HOME``."""
        if field in ("groups", "group"):
            return "user" if text in self.users else text
        if field.endswith(("_HOST", "_ADDR", "_IP")):
            text = re.sub(rf"\A{_IPV4}\Z", "192.0.2.1", text)
            text = "2001:db8::1" if _IPV6.fullmatch(text) else text
        if step_of(text).kind == "command" and not self.windows:
            text = self._command(text)
        text = _HOME.sub(lambda match: self.others.get(match[0], match[0]), self.home.sub("~", text))
        text = self._ids(text, field)
        for pattern, word in self.names:
            text = pattern.sub(word, text)
        if field == "origin":
            text = _SITE.sub(lambda site: site[0] if _PUBLIC.fullmatch(site[0]) else "host", text)
        return text

    def _command(self, line: str) -> str:
        words = re.split("('[^']*')", line)
        # Inside quotes that must stay, the shell expands nothing, so the home stays as it is.
        kept = (word.startswith("'") and not _QUOTED.fullmatch(word) for word in words)
        changed = (word if keep else self.home.sub("~", word) for word, keep in zip(words, kept, strict=True))
        line = "".join(_unquoted(match) if (match := _QUOTED.fullmatch(word)) else word for word in changed)
        return _TILDE.sub(lambda match: match[0] if line[match.start() - 1] == " " else "$HOME", line)

    def _ids(self, text: str, field: str) -> str:
        if "GPU-" in text or "MIG-" in text:
            text = _CARD.sub(self._id, text)
        if field not in _VISIBLE:
            return _UUID.sub(self._id, text) if "-" in text or "_" in text else text
        # The driver reads leading digits as an index, so they must stay.
        return _UNMARKED.sub(lambda match: match[1] + re.sub("[^-]", "a", match[2]), text)

    def _id(self, match: re.Match[str]) -> str:
        is_id = len(match[0]) >= _LONG_ID or match[0] in self.short
        return _fake(match[0], self.fakes) if is_id else match[0]

    def _path(self, match: re.Match[str]) -> str:
        if match[0].startswith(_SYSTEM):
            return match[0]
        return re.sub(r"[^/\\]+", self._component, match[0])

    def _component(self, match: re.Match[str]) -> str:
        """Redact part of a path: ``alice``, ``~alice``, ``alice-proj``; a name of two letters only as a whole."""
        if match[0] in self.users:
            return "user"
        return match[0] if match[0].lower() in _PLAIN else self.leading_user.sub("user", match[0])


def _unquoted(match: re.Match[str]) -> str:
    """A quoted word of a command, quoted so that the shell still expands the home in it."""
    inside = match[1]
    if not _TILDE.search(inside):
        return match[0]
    return inside if _SAFE.fullmatch(inside) else f'"{_TILDE.sub("$HOME", inside)}"'


def _fake(text: str, digits: dict[str, Any]) -> str:
    """A replacement for an id or its prefix. Two replacements share a prefix where the originals do.

    CUDA_VISIBLE_DEVICES may name a card by a prefix. ``known`` is the tree of the digits so far.

    >>> known = {}
    >>> [_fake(text, known) for text in ("6e1b-70", "6e1b-7f", "6e1", "6E1", "f00", "6e1b7")]
    ['aaaa-aa', 'aaaa-ab', 'aaa', 'aAa', 'baa', 'aaaaa']
    """
    out = ""
    for char in text:
        if char in "-_":  # the driver ignores them
            out += char
            continue
        digit = char.lower()
        digits.setdefault(digit, {})
        fake = "abcdef0123456789"[list(digits).index(digit)]
        out += fake.upper() if char.isupper() else fake
        digits = digits[digit]
    return out


def _last(path: str) -> str:
    return re.split(r"[/\\]", path)[-1]


def _hosts(names: tuple[str, ...]) -> re.Pattern[str]:
    """Match host names; one that may be a word, such as ``desktop``, only where nothing but a host name can be."""
    short = (form for name in names for form in (name, name.partition(".")[0]) if len(form) >= _SHORTEST)
    forms = {form for form in short if form.lower() not in _PLAIN and not _TECHNICAL.fullmatch(form)}
    words = {form for form in forms if form.isalpha()}
    domains = {domain for name in names if "." in (domain := name.partition(".")[2])}
    alone = r"(?<![\w.-])"
    patterns = (
        _any_of(forms - words, before=alone, after=r"(?:\.[A-Za-z][\w-]*)*(?![\w-])"),
        _any_of(domains, before=rf"{alone}(?:[\w-]+\.)+", after=r"(?![\w-])"),
        _any_of(words, before=r"(?:(?<=@)|(?<=//)|(?<=\\\\))", after=r"(?![\w-])"),
        _any_of(words, before=alone, after=r"(?=:\d{2,5}(?![\d:])|:/(?!/)| kernel:)"),
    )
    return re.compile("|".join(pattern.pattern for pattern in patterns))


def _any_of(words: Iterable[str], *, before: str, after: str) -> re.Pattern[str]:
    """Match any of the words, the longest first; nothing if there are none."""
    choices = "|".join(map(re.escape, sorted(set(words), key=len, reverse=True)))
    return re.compile(f"{before}(?:{choices}){after}" if choices else r"(?!)")
