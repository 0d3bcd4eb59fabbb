"""Command line, prompts and output shared by all peer scripts.

Every peer runs the same thing: a batch of equally long prompts of token ids
drawn from the vocabulary with a fixed seed, greedy decoding, end-of-sequence
ignored.  A case is written BATCHxPROMPTxGENERATED, e.g. 8x128x64.

    python peer_X.py --model M --case 1x128x64 --case 8x128x64 --repeat 3
        one JSON line a case, medians over the repeats
    python peer_X.py --model M --case 1x128x64 --stdin
        a line {"ready": ...} once loaded, then for each line
        {"case": "1x128x64", "run": 5} on standard input one JSON line, until it
        closes: so that peers can take turns within one run
    python peer_X.py --model M --trace FILE [--prefix-cache]
        requests as they arrive: JSON lines of arrival_s, prompt_token_ids and
        max_tokens; one JSON line with times to the first and between tokens.
        With --stdin, FILE says no more than how long requests get, and each line
        {"trace": FILE} on standard input is answered by one
"""
import argparse
import json
import os
import random
import resource
import statistics
import sys
import time


class Case:
    def __init__(self, text):
        self.text = text
        self.batch, self.prompt_len, self.gen_len = (int(x) for x in text.split("x"))


def parse(description):
    ap = argparse.ArgumentParser(description=description)
    ap.add_argument("--model", required=True)
    ap.add_argument("--case", type=Case, action="append", default=[], help="BATCHxPROMPTxGENERATED")
    ap.add_argument("--repeat", type=int, default=3)
    ap.add_argument("--threads", type=int, default=os.cpu_count())
    ap.add_argument("--dtype", default="", help="where a peer has a choice")
    ap.add_argument("--prefix-cache", action="store_true", help="where a peer has one")
    ap.add_argument("--stdin", action="store_true", help="run what standard input asks for")
    ap.add_argument("--trace", help="JSON lines of arrival_s, prompt_token_ids, max_tokens")
    args = ap.parse_args()
    if not args.case and not args.trace:
        args.case = [Case("1x128x64")]
    args.requests = read_trace(args.trace) if args.trace else []
    args.max_batch = max([c.batch for c in args.case] or [64])
    lengths = [c.prompt_len + c.gen_len for c in args.case]
    lengths += [len(r["prompt_token_ids"]) + r["max_tokens"] for r in args.requests]
    args.max_len = max(lengths)
    return args


def read_trace(path):
    with open(path) as f:
        rows = [json.loads(line) for line in f if line.strip()]
    return sorted(rows, key=lambda r: r["arrival_s"])


def prompts(case, vocab, run):
    """Fresh prompts per run, so that no prefix cache can answer for a peer."""
    rng = random.Random(1234 + run)
    low = 100  # leaves the special tokens of common vocabularies out
    return [[rng.randrange(low, vocab) for _ in range(case.prompt_len)] for _ in range(case.batch)]


def pin_threads(n):
    """Must be called before numpy, torch or an OpenMP library is imported."""
    os.environ["OMP_NUM_THREADS"] = str(n)
    os.environ["MKL_NUM_THREADS"] = str(n)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["HF_HUB_OFFLINE"] = "1"


def now():
    """Wall clock and the processor time of this process.  With one thread the
    second is what the first would be on a quiet machine; with more threads it
    also counts the spinning at barriers."""
    return time.perf_counter(), time.process_time()


def peak_rss_mb():
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    kids = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return round(max(own, kids) / 1024, 1)


def run(args, peer, version, dtype, load_s, vocab, generate, start=None):
    """Runs what the command line asks for.

    generate(ids, gen_len) -> ((start, first token, last token), ids of the first
    sequence), each mark a now().  start() -> (submit, step) for traces:
    submit(number, ids, max_tokens), step() -> {number: new tokens}.
    """
    about = {"peer": peer, "version": version, "dtype": dtype, "threads": args.threads,
             "prefix_cache": args.prefix_cache, "load_s": round(load_s, 3)}
    if args.trace and start is None:
        raise SystemExit(f"{peer} has no loop that takes requests as they arrive")
    if args.trace and not args.stdin:
        emit({**about, **replay(args.requests, *start()), "peak_rss_mb": peak_rss_mb()})
        return
    generate(prompts(Case("1x8x2"), vocab, 99), 2)
    if args.stdin:
        emit({"ready": True, **about})
        for line in sys.stdin:
            asked = json.loads(line)
            if "trace" in asked:
                emit({**about, **replay(read_trace(asked["trace"]), *start())})
                continue
            emit({**about, **one_run(Case(asked["case"]), vocab, asked["run"], generate)})
        return
    for case in args.case:
        runs = [one_run(case, vocab, i, generate) for i in range(args.repeat)]
        emit({**about, **medians(case, runs)})


def one_run(case, vocab, number, generate):
    (a, b, c), tokens = generate(prompts(case, vocab, number), case.gen_len)
    return {"case": case.text, "run": number,
            "prefill_s": b[0] - a[0], "decode_s": c[0] - b[0], "total_s": c[0] - a[0],
            "cpu_prefill_s": b[1] - a[1], "cpu_decode_s": c[1] - b[1], "cpu_total_s": c[1] - a[1],
            "tokens": [int(t) for t in tokens or []], "peak_rss_mb": peak_rss_mb()}


def medians(case, runs):
    """Decode covers gen_len - 1 steps."""
    med = {k: statistics.median(r[k] for r in runs) for k in runs[0] if k.endswith("_s")}
    decode = med["decode_s"]
    return {
        "case": case.text, "repeat": len(runs), **{k: round(v, 5) for k, v in med.items()},
        "tokens_per_s_total": round(case.batch * case.gen_len / med["total_s"], 2),
        "tokens_per_s_decode": round(case.batch * (case.gen_len - 1) / decode, 2) if decode > 0 else None,
        "tokens_per_s_prefill": round(case.batch * case.prompt_len / med["prefill_s"], 1),
        "best_prefill_s": round(min(r["prefill_s"] for r in runs), 5),
        "best_decode_s": round(min(r["decode_s"] for r in runs), 5),
        "peak_rss_mb": runs[-1]["peak_rss_mb"], "first_tokens": runs[0]["tokens"][:8],
    }


def replay(requests, submit, step):
    """Submits each request at its time and steps until all have their tokens."""
    waiting = list(enumerate(requests))
    marks = {i: [] for i in range(len(requests))}
    missing = {i: r["max_tokens"] for i, r in enumerate(requests)}
    begin = time.perf_counter()
    while missing:
        at = time.perf_counter() - begin
        while waiting and waiting[0][1]["arrival_s"] <= at:
            i, r = waiting.pop(0)
            submit(i, r["prompt_token_ids"], r["max_tokens"])
        if len(waiting) == len(missing):
            time.sleep(max(0.0, waiting[0][1]["arrival_s"] - at))
            continue
        for i, count in step().items():
            marks[i] += [time.perf_counter() - begin] * count
            missing[i] -= count
            if missing[i] <= 0:
                del missing[i]
    first = [marks[i][0] - r["arrival_s"] for i, r in enumerate(requests)]
    between = [b - a for times in marks.values() for a, b in zip(times, times[1:])]
    total = max(times[-1] for times in marks.values())
    return {"requests": len(requests), "total_s": round(total, 4),
            "tokens_per_s": round(sum(map(len, marks.values())) / total, 2),
            "ttft_mean_s": round(statistics.mean(first), 5), **quantiles("ttft", first), **quantiles("itl", between)}


def quantiles(name, values):
    ordered = sorted(values) or [0.0]

    def at(q):
        return round(ordered[min(len(ordered) - 1, int(q * len(ordered)))], 5)

    return {f"{name}_p50_s": at(0.5), f"{name}_p90_s": at(0.9), f"{name}_p99_s": at(0.99)}


def emit(line):
    print(json.dumps(line), flush=True)
