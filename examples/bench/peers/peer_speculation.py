"""Peer: Pegboard with a drafter, or without; what `bench_spec.py` runs.

    python peer_speculation.py --config '{"drafter": {"name": "ngram"}}' --threads 2 --stdin

The config is a JSON object. A line on standard input, {"prompts": [TEXT, ...], "max_tokens": 128}, is answered by
one about the texts' answers, generated together, greedy. Decoding begins when all have their first token.
"""
import argparse
import json
import sys
import time
from collections import Counter

from peer_common import emit, now, peak_rss_mb, pin_threads


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=json.loads, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--stdin", action="store_true", required=True)
    options = parser.parse_args()
    pin_threads(options.threads)
    started = time.perf_counter()
    import pegboard
    from pegboard import Engine, SamplingParams
    from pegboard.interfaces.observer import Observer, StepDone

    class Steps(Observer):
        """Keeps what the steps were."""

        def __init__(self):
            self.done = []

        def observe(self, event):
            if isinstance(event, StepDone):
                self.done.append(event)

        def close(self):
            pass

    steps = Steps()
    engine = Engine({**options.config, "threads": options.threads}, observer=[steps])
    weights = sum(entry.num_bytes for entry in engine.prepared.ledger.entries if entry.name.startswith("weights"))

    def ids(text):
        max_bytes = engine.prepared.composition.max_model_len * engine.tokenizer.max_token_bytes
        chat = engine.tokenizer.render_chat([{"role": "user", "content": text}], max_bytes=max_bytes)
        return engine.tokenizer.encode(chat, special=False)

    def run(texts, max_tokens):
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        prompts = [ids(text) for text in texts]
        begin = now()
        requests = [engine.submit(prompt, params) for prompt in prompts]
        out = {request.request_id: [] for request in requests}
        first = None
        while engine.has_work():
            for delta in engine.step():
                out[delta.request_id] += delta.token_ids
            if first is None and all(out.values()):
                first, num_first = now(), sum(map(len, out.values()))
                steps.done.clear()
        end = now()
        tokens = list(out.values())
        return {
            "prefill_s": first[0] - begin[0], "decode_s": end[0] - first[0], "total_s": end[0] - begin[0],
            "cpu_prefill_s": first[1] - begin[1], "cpu_decode_s": end[1] - first[1],
            "cpu_total_s": end[1] - begin[1],
            "num_decoded": sum(map(len, tokens)) - num_first, "tokens": tokens, **told(steps.done),
        }

    run(["Hello."], 4)
    emit({"ready": True, "version": pegboard.__version__, "weights_bytes": weights,
          "load_s": round(time.perf_counter() - started, 3)})
    for line in sys.stdin:
        asked = json.loads(line)
        emit({**run(asked["prompts"], asked["max_tokens"]), "peak_rss_mb": peak_rss_mb()})
    engine.close()


def told(steps):
    """Counts of decoding steps; a row is a sequence in a step."""
    verified, tried, accepted = Counter(), Counter(), Counter()
    for drafts in (step.drafts for step in steps if step.drafts is not None):
        # Entry n of each is the number of drafts with a count of n.
        verified.update(dict(enumerate(drafts.verified)))
        for numbers, counts in ((drafts.tried, tried), (drafts.accepted, accepted)):
            for most, number in enumerate(numbers):
                counts.update(dict.fromkeys(range(most), number))
    num_rows = sum(step.num_sequences for step in steps)
    verified[0] = num_rows - sum(number for nodes, number in verified.items() if nodes)
    return {
        "num_steps": len(steps),
        "num_rows": num_rows,
        "drafting_s": sum(step.drafting_s for step in steps),
        "verified": dict(sorted(verified.items())),
        "tried_at": [tried[depth] for depth in range(len(tried))],
        "accepted_at": [accepted[depth] for depth in range(len(tried))],
    }


if __name__ == "__main__":
    main()
