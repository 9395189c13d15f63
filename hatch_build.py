"""The README as a package index shows it: nothing on that page stands beside the repository's files.

Relative links and pictures get the address that `[project.urls]` gives as `Repository`. As long as there is none, a
link is its text, and a picture its description.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?://|#)([^)\s]+)\)")


def for_index(text: str, repository: str = "", version: str = "") -> str:
    def address(found: re.Match[str]) -> str:
        picture, shown, target = found.groups()
        if not repository:
            return f"*{shown}*" if picture else shown
        return f"{picture}[{shown}]({repository}/{'raw' if picture else 'blob'}/v{version}/{target})"

    fenced = re.split(r"(```.*?```)", text, flags=re.S)  # what is code stays as it is
    return "".join(part if part.startswith("```") else _LINK.sub(address, part) for part in fenced)


class Readme(MetadataHookInterface):
    def update(self, metadata: dict[str, Any]) -> None:
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        urls = metadata.get("urls", {})
        shown = for_index(text, urls.get("Repository", "").rstrip("/"), metadata["version"])
        metadata["readme"] = {"content-type": "text/markdown", "text": shown}
