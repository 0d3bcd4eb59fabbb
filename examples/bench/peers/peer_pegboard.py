"""Peer: Pegboard itself, its engine in this process.

Environment: the repository's own.
Model: the folder hf-f32 that prepare_model.py writes, or a GGUF file.
--dtype: float32 (default), float64, bfloat16. Add ",torch" for the built-in kernels and attention,
",unlimited" for steps of any length while others decode.
"""
import time

from peer_common import now, parse, pin_threads, run


def main():
    args = parse(__doc__)
    pin_threads(args.threads)
    t0 = time.perf_counter()
    import pegboard
    from pegboard import Engine, SamplingParams

    flags = args.dtype.split(",")
    kind = flags[0] or "float32"
    parts = {"kernels": "torch", "attention": "torch"} if "torch" in flags else {}
    limit = {"max_step_ms": "none"} if "unlimited" in flags else {}
    engine = Engine({
        "model": args.model, "dtype": kind, "threads": args.threads, "max_model_len": args.max_len,
        "prefix_cache": "on" if args.prefix_cache else "none",
        "scheduler": {"max_num_seqs": args.max_batch, **limit}, **parts,
    })
    load_s = time.perf_counter() - t0

    def params(max_tokens):
        return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)

    def generate(ids, gen_len):
        a, b = now(), None
        requests = [engine.submit(p, params(gen_len)) for p in ids]
        out = {r.request_id: [] for r in requests}
        without = len(ids)
        while engine.has_work():
            for delta in engine.step():
                without -= not out[delta.request_id]
                out[delta.request_id] += delta.token_ids
            if b is None and not without:
                b = now()
        return (a, b, now()), out[requests[0].request_id]

    def start():
        def submit(number, ids, max_tokens):
            engine.submit(ids, params(max_tokens), request_id=str(number))

        def step():
            return {int(d.request_id): len(d.token_ids) for d in engine.step() if d.token_ids}

        return submit, step

    composition = engine.prepared.composition
    # bench_ab.py runs this with older checkouts too, whose composition is of one model.
    target = getattr(composition, "target", composition)
    vocab = target.shape.vocab_size
    run(args, "pegboard", pegboard.__version__, kind, load_s, vocab, generate, start)


if __name__ == "__main__":
    main()
