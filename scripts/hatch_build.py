"""Add the man page and the completion scripts to wheels: pip puts them into ``share`` of the environment."""

from __future__ import annotations

import runpy
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class Share(BuildHookInterface[Any]):
    """A hook of the build backend."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Write the files, and say where the wheel has them."""
        if version == "editable":
            return
        self.folder = tempfile.TemporaryDirectory()
        share = runpy.run_path(str(Path(self.root, "scripts", "share.py")))
        for name in share["write"](Path(self.folder.name)):
            build_data["shared_data"][str(Path(self.folder.name, name))] = f"share/{name}"

    def finalize(self, *_: object) -> None:
        """Remove them."""
        if hasattr(self, "folder"):
            self.folder.cleanup()
