"""Makes `getting-started.ipynb` of `getting-started.md`, so that they cannot differ: `python docs/notebook.py`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def notebook(markdown: str) -> dict[str, Any]:
    """A cell for each block of Python, and one for each stretch of text between them."""
    text = re.sub(r" The same as a notebook:\n\[getting-started.ipynb\]\(getting-started.ipynb\)\.", "", markdown)
    cells = []
    for i, part in enumerate(re.split(r"```python\n(.*?)```", text, flags=re.S)):
        if not part.strip():
            continue
        cell: dict[str, Any] = {"cell_type": "code" if i % 2 else "markdown", "id": f"cell-{i}", "metadata": {}}
        if i % 2:
            cell |= {"execution_count": None, "outputs": []}
        cells.append({**cell, "source": part.strip().splitlines(keepends=True)})
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}


if __name__ == "__main__":
    made = notebook((HERE / "getting-started.md").read_text(encoding="utf-8"))
    (HERE / "getting-started.ipynb").write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
