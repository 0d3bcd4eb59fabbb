"""Logprobs of a long prompt take about what the ledger says, not a vocabulary for each of its tokens."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from pegboard.testing.tiny import write_tiny_model

VOCAB_SIZE = 50_000
SCRIPT = """
import sys
from pegboard import Engine, SamplingParams

def status(name):
    lines = dict(line.split(":") for line in open("/proc/self/status"))
    return int(lines[name].split()[0]) // 1024

config = {"model": sys.argv[1], "prefix_cache": "none", "kv_cache": {"memory": "64MiB"}}
with Engine(config) as engine:
    def run(top):
        engine.submit([7] * 1500, SamplingParams(max_tokens=1, prompt_logprobs=top))
        while engine.has_work():
            engine.step()
    run(None)
    before = status("VmHWM")
    run(20)
    (line,) = [one for one in engine.prepared.ledger.entries if "logprobs" in one.name]
    print(status("VmHWM") - before, line.num_bytes // 2**20)
"""


def test_logprobs_of_a_long_prompt_take_little_more_than_the_ledger_says(tmp_path: Path) -> None:
    model = write_tiny_model(
        tmp_path, vocab_size=VOCAB_SIZE, num_hidden_layers=1, max_position_embeddings=2048
    )
    command = [sys.executable, "-c", SCRIPT, str(model)]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    taken, planned = map(int, run.stdout.split())
    assert 10 < planned < 50
    assert taken < planned + 60, "of 1,500 places all logits are 300 MB"
