"""Peer: llama.cpp through the server interface of xllamacpp (prebuilt wheel,
AVX2 with repacking; nothing to compile).

Environment:
    pip install xllamacpp
Model: model-f32.gguf, model-q8_0.gguf or model-q4_1.gguf of prepare_model.py.
--dtype norepack keeps the file's own weight layout.

The call goes through the server's completion handler in the same process, with
one slot per sequence and no socket; its queue and JSON work count in.  The time
to the first token is that of a run that stops after one token.
"""
import time

from peer_common import now, parse, pin_threads, run


def main():
    args = parse(__doc__)
    pin_threads(args.threads)
    import xllamacpp as xl

    t0 = time.perf_counter()
    p = xl.CommonParams()
    p.model.path = args.model
    p.n_parallel = args.max_batch
    p.n_ctx = args.max_batch * ((args.max_len + 8 + 255) // 256 * 256)
    p.n_batch = max(512, args.max_batch)
    p.n_ubatch = 512
    p.cpuparams.n_threads = args.threads
    p.cpuparams_batch.n_threads = args.threads
    p.cache_prompt = args.prefix_cache
    p.cache_ram_mib = 0
    p.warmup = False
    p.verbosity = -1
    p.no_extra_bufts = "norepack" in args.dtype
    p.kv_unified = False
    server = xl.Server(p)
    load_s = time.perf_counter() - t0

    def timed(ids, gen_len):
        req = {"prompt": ids if len(ids) > 1 else ids[0], "n_predict": gen_len, "temperature": 0.0,
               "top_k": 1, "samplers": ["top_k"], "ignore_eos": True,
               "cache_prompt": args.prefix_cache, "return_tokens": True}
        a = now()
        out = server.handle_completions(req)
        b = now()
        return a, b, (out if isinstance(out, list) else [out])[0]

    def generate(ids, gen_len):
        """The first token's time is that of a run on other prompts (the same, reversed) that stops there."""
        a, b, _ = timed([q[::-1] for q in ids], 1)
        c, d, out = timed(ids, gen_len)
        tokens = None
        if isinstance(out, dict):
            tokens = out.get("tokens") or out.get("choices", [{}])[0].get("tokens")
            n = (out.get("usage") or {}).get("completion_tokens", out.get("tokens_predicted"))
            if n is not None and n not in (gen_len, gen_len * len(ids)):
                raise SystemExit(f"stopped early: {n} tokens")
        return (c, (c[0] + b[0] - a[0], c[1] + b[1] - a[1]), d), tokens

    name = args.model.rsplit("/", 1)[-1].rsplit(".", 1)[0].split("-")[-1]
    run(args, "llama.cpp", "xllamacpp-" + xl.__version__,
        name + (":" + args.dtype if args.dtype else ""), load_s, 49152, generate)


if __name__ == "__main__":
    main()
