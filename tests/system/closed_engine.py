"""`closed_engine.py SETTINGS`: an engine is opened, used and closed twice in a process of its own.

Prints as JSON the MiB that the process has in memory before, during and after the second time. A process
that has run other tests would give their memory back meanwhile.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys

import psutil

from pegboard import LLM, SamplingParams


def resident_mib() -> float:
    """The memory in use: the C library is asked to return what it only keeps for later."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return float(psutil.Process().memory_info().rss / 2**20)


def main() -> None:
    settings = json.loads(sys.argv[1])
    prompt, params = [504, 357, 282], SamplingParams(max_tokens=4, temperature=0.0)
    with LLM(**settings) as llm:
        first = llm.generate([prompt], params)[0].token_ids
    del llm
    before = resident_mib()
    with LLM(**settings) as llm:
        assert llm.generate([prompt], params)[0].token_ids == first
        loaded = resident_mib()
    print(json.dumps([before, loaded, resident_mib()]))


if __name__ == "__main__":
    main()
