"""Paths and messages without the credentials of URLs: what is shown ends up in logs."""

from __future__ import annotations

# Where a URL begins in a path: at the colon of its scheme, which has two characters or more, unlike a drive. A mistyped
# one has credentials, too: "http:/host", "https//host", and one with anything before it.
_SCHEME = r"(?:(?<=[^/\\:]{2}):/+|https?(?::|[;./]{2})/*)"
# What follows it if there is no login: the name of a host or a bucket, and a port.
_HOST = r"(?:\[[^\]]*\]|[^/?#@:\[]*)(?::\d*)?(?:[/?#]|::|$)"


def without_credentials(path: str) -> str:
    """A path for messages: a URL in it loses its login, and everything from ``?`` on.

    >>> without_credentials("https://me:secret@host/a.pt?X-Amz-Signature=1f")
    'https://host/a.pt'
    """
    if not ("@" in path or "?" in path or "#" in path):
        return path
    import re

    whole, arrow, place = path.partition(" › ")  # a place in a file, whose name may be anything
    whole = re.sub(rf"({_SCHEME})[^/?#]*@", r"\1", whole, flags=re.IGNORECASE)
    # With a slash or a question mark in a password, nobody knows where it ends.
    whole = re.sub(rf"({_SCHEME})(?!{_HOST}).*@.*", r"\1…", whole, flags=re.IGNORECASE | re.DOTALL)
    begin = re.search(_SCHEME, whole, re.IGNORECASE)
    if begin is not None:
        query = r"[?#].*?(?=::[^/\\:]{2,}:/|$)"  # one URL may follow another, as in zip://a.pt::https://host/a.zip
        whole = whole[: begin.end()] + re.sub(query, "", whole[begin.end() :], flags=re.DOTALL)
    return f"{whole}{arrow}{place}"


def text_without_credentials(text: str) -> str:
    """A message in which any word may be a path.

    >>> text_without_credentials("invalid choice: 'https://me:secret@host/a.pt?sig=1f'")
    "invalid choice: 'https://host/a.pt'"
    """
    if not ("@" in text or "?" in text or "#" in text):
        return text
    import re

    return re.sub(r"[^\s'\"<>]*[^\s'\"<>.,:;)]", lambda word: without_credentials(word[0]), text)
