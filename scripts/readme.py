"""The long description of wheels and sdists: README.md without links that lead nowhere outside of the repository.

The build backend calls it, with its settings in pyproject.toml. A relative link or image gets the address there before
it. Without one, a link becomes its text, and an image is left out.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"(!?)\[([^\[\]]*)\]\((?![a-z]+:|#)([^()\s]+)\)")
_CODE = re.compile(r"(^```.*?^```|^(?: {4}[^\n]*\n)+|`[^`]*`)", re.MULTILINE | re.DOTALL)


class Readme(MetadataHookInterface):
    """What hatchling calls."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the long description."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        links, images = (str(self.config[name]).format(**metadata) for name in ("links", "images"))
        metadata["readme"] = {"content-type": "text/markdown", "text": with_addresses(text, links, images)}


def with_addresses(text: str, links: str, images: str) -> str:
    """A page of Markdown whose relative links and images begin with these addresses; code is left as it is."""

    def absolute(link: re.Match[str]) -> str:
        mark, words, target = link.groups()
        start = images if mark else links
        return f"{mark}[{words}]({start}{target})" if start else "" if mark else words

    parts = _CODE.split(text)
    parts[::2] = (_LINK.sub(absolute, part) for part in parts[::2])
    return "".join(parts)
