"""How long a server takes from its command to its first 200 from /ready, beside `import torch`.

The first start converts the checkpoint into the cache; what counts is every later one.

    python examples/bench/bench_start.py
    python examples/bench/bench_start.py --config my.yaml --starts 9
"""

from __future__ import annotations

import argparse
import json
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from report import circumstances, markdown, write_table

HERE = Path(__file__).parent
QUICKSTART = HERE.parent / "configs" / "quickstart.yaml"


def main() -> None:
    options, about = _options(), circumstances()
    starts = measure(options.config, options.starts)
    result = {
        **about,
        "config": options.config.name,
        **starts,
        "median_beyond_import_s": statistics.median(beyond_import(starts)),
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    write_table(HERE / "README.md", "bench_start", table(result))


def measure(config: Path, num_starts: int) -> dict[str, list[float]]:
    """Seconds of `import torch` and of a server until it is ready, in turns; one start before them, which
    fills the caches, does not count."""
    imports, starts = [], []
    seconds_to_ready(config)
    for number in range(num_starts):
        imports.append(seconds_to_import_torch())
        starts.append(seconds_to_ready(config))
        print(f"{number}: {starts[-1]:.2f} s, import torch {imports[-1]:.2f} s", file=sys.stderr)
    return {"import_torch_s": imports, "ready_s": starts}


def beyond_import(starts: dict[str, list[float]]) -> list[float]:
    """Of what `measure` returns, seconds of each start beyond the import beside it."""
    pairs = zip(starts["ready_s"], starts["import_torch_s"], strict=True)
    return [ready - torch for ready, torch in pairs]


def table(result: dict[str, Any]) -> str:
    """The Markdown table of a result."""
    ready, torch = (statistics.median(result[key]) for key in ("ready_s", "import_torch_s"))
    rows = [[f"{ready:.2f}", f"{torch:.2f}", f"{result['median_beyond_import_s']:.2f}"]]
    below = (
        f"Seconds, medians of {len(result['ready_s'])} starts of `{result['config']}`;"
        f" {result['cpu']}; load of the machine before it: {result['load_before']}."
        " Data: `results/start.json`."
    )
    return f"{markdown(['ready', 'import torch', 'ready beyond it'], rows)}\n\n{below}"


def seconds_to_import_torch() -> float:
    """Of a new interpreter that imports torch and ends."""
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return time.perf_counter() - begin


def seconds_to_ready(config: Path) -> float:
    """Of a server, from its command to its first good answer; it is stopped afterwards."""
    port = _free_port()
    begin = time.perf_counter()
    program = Path(sys.executable).with_name("serve")
    command: list[str | Path] = [program, "--config", config, "--port", str(port)]
    server = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        while not _is_ready(port):
            if server.poll() is not None:
                raise SystemExit(f"the server ended with status {server.returncode}")
            time.sleep(0.005)
        return time.perf_counter() - begin
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait()


def _is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--config", type=Path, default=QUICKSTART)
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "start.json")
    return parser.parse_args()


if __name__ == "__main__":
    main()
