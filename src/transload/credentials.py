"""Paths and messages without the credentials of URLs: what is shown ends up in logs."""

from __future__ import annotations

# Where a URL begins, after its scheme, which has two characters or more. A mistyped one has credentials, too:
# "http:/host", "https//host", "htp://host", and one with anything before it.
_BEGIN = r"(?<=[\w+.-]{2})://|^:?//+(?=[^/]*:[^/]*@)|https?(?::/*|[;.]?//+)|\b(?:s3a?|gs|hf|az|abfss?):/+"
_AGAIN = r"https?//+|[a-z][\w+.-]*:/+"  # a second scheme: https://https://host
_CONTAINER = r"\b(?:az|abfss?):/+$"  # abfs://container@account/path has no login, unless there is a colon in it
# What follows if there is no login: the name of a host or a bucket, and a port.
_HOST = r"(?:\[[^\]]*\]|[^/?#@:\[]*)(?::\d*)?(?:[/?#]|$)"
_CHAIN = r"::(?=[^/\\:]{2,}:/)"  # one URL may follow another, as in zip://a.pt::https://host/a.zip
_AFTER = "'\">)].,:;"  # what may follow a URL in a message


def without_credentials(path: str) -> str:
    """A path for messages: a URL in it loses its login, and everything from ``?`` on.

    >>> without_credentials("https://me:secret@host/a.pt?X-Amz-Signature=1f")
    'https://host/a.pt'
    """
    if not ("@" in path or "?" in path or "#" in path):
        return path
    import re

    return "::".join(map(_plain, re.split(_CHAIN, path)))


def text_without_credentials(text: str) -> str:
    """A message in which any word may be a path.

    >>> text_without_credentials("invalid choice: 'https://me:secret@host/a.pt?sig=1f'")
    "invalid choice: 'https://host/a.pt'"
    """
    if not ("@" in text or "?" in text or "#" in text):
        return text
    import re

    def cleaned(word: re.Match[str]) -> str:
        bare = word[0].rstrip(_AFTER)
        return without_credentials(bare) + word[0][len(bare) :]

    return re.sub(r"\S+", cleaned, text)


def _plain(url: str) -> str:
    """One URL without its login and its query; anything else as it is."""
    import re

    begin = re.search(_BEGIN, url, re.IGNORECASE)
    if begin is None:
        return url
    shown, rest = url[: begin.end()], url[begin.end() :]
    while again := re.match(_AGAIN, rest, re.IGNORECASE):
        shown, rest = shown + again[0], rest[again.end() :]
    login, at, _ = re.split("[/?#]", rest, maxsplit=1)[0].rpartition("@")
    rest = rest[len(login + at) :]
    if at and ":" not in login and re.search(_CONTAINER, shown, re.IGNORECASE):
        shown += login + at
    if "@" in rest and not re.match(_HOST, rest):
        rest = "…"  # with a slash or a question mark in a password, nobody knows where it ends
    return shown + re.split("[?#]", rest, maxsplit=1)[0]
