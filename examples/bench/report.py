"""Reports of benchmarks: the machine of a run, and its table in a page."""

from __future__ import annotations

import datetime
import json
import os
from pathlib import Path
from typing import Any


def circumstances() -> dict[str, Any]:
    """When and where a run begins: `date`, `cpu`, `load_before` (of the machine, processes)."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": _cpu_name(),
        "load_before": round(os.getloadavg()[0], 1),
    }


def write_table(page: Path, name: str, text: str) -> None:
    """Replaces what stands between the page's marks `<!-- NAME -->` and `<!-- /NAME -->`.

    Raises:
        ValueError: the page lacks one of them.
    """
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    content = page.read_text()
    before, after = content.index(begin), content.index(end)
    page.write_text(f"{content[:before]}{begin}\n{text}\n{content[after:]}")


def write_result(path: Path, result: dict[str, Any]) -> None:
    """Writes a run's JSON file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


def markdown(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return "unknown"
