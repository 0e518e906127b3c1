"""Text where a checkpoint was expected: a server's answer, a pointer, a page, a script."""

from __future__ import annotations

import re
from collections.abc import Callable

from transload.read.foreign.kinds import Foreign, View, clean, listed, match

__all__ = ["as_text", "text"]

# A server's answer is a line or two; longer text is a document.
LONGEST_ANSWER = 512
# JSON is parsed only while it is short: an answer is, and a longer one is described by its first bytes.
LONGEST_JSON = 64 * 1024

_ASIDE = "Check the path: this is another kind of file."
_AGAIN = "Download it again from the direct link, and compare the size with the one the server lists."
_LOGIN = "The link wants a login: huggingface-cli login (or hf auth login), or pass a token, then download again."
_GONE = "The file is not at that address: check the repository, revision and file name."

# What a page or an answer says, and what it means. The first match counts.
_ANSWERS: tuple[tuple[str, str], ...] = (
    (r"google drive|drive\.google|virus scan", "Google Drive sends a page first: pip install gdown; gdown --fuzzy URL"),
    (r"dropbox", "End the Dropbox link in ?dl=1."),
    (
        r"access to (model|dataset|this)|gated|awaiting a review",
        "Accept the conditions on its page, then: hf auth login",
    ),
    (r"invalid (username|credentials)|unauthori[sz]ed|\bsign in\b|\blog ?in\b|authenticat|\b401\b", _LOGIN),
    (r"not found|nosuchkey|blobnotfound|does not exist|no such|\b404\b", _GONE),
    (r"denied|forbidden|expired|signature|\b403\b", "The link has expired or needs permission: ask for a fresh one."),
    (r"too many|rate limit|quota|\b429\b", "The server refuses for now: wait, then download again."),
    (r"just a moment|cloudflare|captcha", "The site lets only browsers in: open the link in one."),
    (r"huggingface|hugging face", "Use /resolve/ instead of /blob/ in the link, or: hf download REPOSITORY FILE"),
    (r"github", "Use the raw link, or the release's asset link."),
)


def as_text(head: bytes) -> str:
    """The bytes as text; empty if they are not.

    >>> as_text(b"Entry not found"), as_text(bytes(4))
    ('Entry not found', '')
    """
    encoding = "utf-16" if head.startswith((b"\xff\xfe", b"\xfe\xff")) else "utf-8-sig"
    if b"\0" in head and encoding != "utf-16":
        return ""
    try:
        found = head.decode(encoding)
    except UnicodeDecodeError as error:
        # The last character may have been cut in two by where the reading ended.
        if error.start < len(head) - 4:
            return ""
        found = head[: error.start].decode(encoding, "ignore")
    if encoding == "utf-16" and 2 * len(found.encode("latin-1", "ignore")) < len(found):
        return ""  # almost any bytes are some Chinese in UTF-16
    return "" if re.search(r"[\x00-\x08\x0e-\x1a\x1c-\x1f]", found) else found


def text(view: View) -> Foreign | None:
    """What a text is, if it is one."""
    found = as_text(view.head)
    if not found.strip():
        return None
    return next((foreign for look in _LOOKS if (foreign := look(view, found)) is not None), None)


def _advice(said: str, otherwise: str = _AGAIN) -> tuple[str, ...]:
    return (next((fix for pattern, fix in _ANSWERS if re.search(pattern, said, re.IGNORECASE)), otherwise),)


def _lfs(view: View, found: str) -> Foreign | None:
    if not found.startswith("version https://git-lfs.github.com/spec/"):
        return None
    size, oid = match(r"\nsize (\d{1,20})\s", found + "\n"), match(r"\noid (\S+)", found)
    of = f" for a file of {int(size):,} bytes" if size else ""
    fix = f"git lfs install && git lfs pull --include={view.file}"
    return Foreign("git-lfs", f"a Git LFS pointer{of}, not the file", (f"oid {oid}",) if oid else (), (fix,))


def _other_pointer(view: View, found: str) -> Foreign | None:
    for pattern, format_, title, fix in _POINTERS:
        if view.size <= LONGEST_ANSWER and re.search(pattern, found):
            return Foreign(format_, title, (clean(found),), (fix.format(file=view.file),))
    return None


_POINTERS = (
    (r"(?m)^outs:\s*\n- (md5|etag|hash):", "dvc", "a DVC pointer, not the file", "dvc pull {file}"),
    (r"^(\.\./)*(\.git)?/annex/objects/", "git-annex", "a git-annex pointer, not the file", "git annex get {file}"),
)


def _html(_view: View, found: str) -> Foreign | None:
    if not re.match(r"\s*(<!--.{0,500}?-->\s*)?(<!doctype html|<html|<head|<body)", found, re.IGNORECASE | re.DOTALL):
        return None
    title = match(r"<title[^>]{0,200}>(.{0,300}?)</title", found)
    shown = f"a web page (title: {title}), not a checkpoint" if title else "a web page, not a checkpoint"
    return Foreign("html", shown, (), _advice(title or found[:4000]))


def _xml(_view: View, found: str) -> Foreign | None:
    if not re.match(r"\s*<(\?xml|[A-Za-z][\w:.-]*[\s/>])", found):
        return None
    root = match(r"<([A-Za-z][\w:.-]{0,80})", found)
    code, message = match(r"<Code>(.{0,500}?)</Code>", found), match(r"<Message>(.{0,2000}?)</Message>", found)
    if not code and not message:
        title = f"an XML document (root element {root or 'unknown'}), not a checkpoint"
        return Foreign("xml", title, (), _advice(root))
    said = ": ".join(part for part in (code, message) if part)
    return Foreign("xml-error", f"a storage server's error ({said}), not a checkpoint", (), _advice(said))


def _json(view: View, found: str) -> Foreign | None:
    if not re.match(r'\s*(\{\s*["}]|\[)', found):
        return None
    parsed = _parsed(view, found)
    keys = [str(key) for key in parsed]
    said = _error_in(parsed)
    if said:
        return Foreign("json-error", f"a server's error in JSON ({said}), not a checkpoint", (), _advice(said))
    if "weight_map" in parsed or '"weight_map"' in found:
        return Foreign("index-json", "the index of a sharded checkpoint; the tensors are in other files")
    if "nbformat" in parsed:
        return Foreign("notebook", "a Jupyter notebook, not a checkpoint", (), (_ASIDE,))
    details = (f"keys: {listed(keys, 8)}",) if keys else ()
    if "model_type" in parsed or "architectures" in parsed:
        return Foreign("json", "a model's configuration (config.json), not its weights", details, _WEIGHTS)
    return Foreign("json", "a JSON document, not a checkpoint", details) if keys or view.size > LONGEST_JSON else None


_WEIGHTS = ("The weights lie beside it: model.safetensors or pytorch_model.bin.",)


def _parsed(view: View, found: str) -> dict[str, object]:
    """The document, if it is a short object."""
    import json

    if view.size > LONGEST_JSON:
        return {}
    try:
        parsed = json.loads(found)
    except (ValueError, RecursionError):
        return {}
    return parsed if isinstance(parsed, dict) else {}


def _error_in(parsed: dict[str, object]) -> str:
    """What a server's JSON says went wrong, in any of the usual places."""
    for key in ("error", "errors", "message", "detail", "error_description", "Message", "msg"):
        value = parsed.get(key)
        if isinstance(value, list) and value:
            value = value[0]
        if isinstance(value, dict):
            value = value.get("message") or value.get("status") or value.get("code")
        if isinstance(value, str) and value.strip():
            return clean(value)
    return ""


def _answer(view: View, found: str) -> Foreign | None:
    """A line or two, as servers send."""
    if not view.whole or view.size > LONGEST_ANSWER or found.strip().count("\n") > 2:
        return None
    said = clean(found)
    title = f'{view.size:,} bytes of text, probably a server\'s answer: "{said}"'
    return Foreign("text-answer", title, (), _advice(said))


def _source(_view: View, found: str) -> Foreign | None:
    if found.startswith("#!"):
        return Foreign("script", f"a script ({_first_line(found, 80)}), not a checkpoint", (), (_ASIDE,))
    lines = re.findall(r"(?m)^(?:import [\w.]+|from [\w.]+ import |def \w+\(|class \w+[(:]|@\w+)", found)
    if len(lines) >= 2:  # one such line may be prose
        return Foreign("python", "Python source, not a checkpoint", (clean(lines[0]),), (_ASIDE,))
    return None


def _yaml(_view: View, found: str) -> Foreign | None:
    lines = [line for line in found.splitlines()[:200] if line.strip() and not line.lstrip().startswith("#")]
    shaped = sum(bool(re.match(r"\s*(- )?[\w.\"'-]+:(\s|$)|\s*- |---", line)) for line in lines)
    if len(lines) < 3 or shaped < 0.8 * len(lines):  # most lines are keys or items
        return None
    return Foreign("yaml", "a YAML document (a configuration?), not a checkpoint", (clean(lines[0]),), _WEIGHTS)


def _plain(_view: View, found: str) -> Foreign:
    begins = f"it begins: {_first_line(found)}"
    return Foreign("text", "a text file, not a checkpoint", (begins,), _advice(found[:1000]))


def _first_line(found: str, limit: int = 160) -> str:
    return clean(found.strip().split("\n", 1)[0], limit)


_LOOKS: tuple[Callable[[View, str], Foreign | None], ...] = (
    _lfs,
    _other_pointer,
    _html,
    _xml,
    _json,
    _source,
    _answer,
    _yaml,
    _plain,
)
