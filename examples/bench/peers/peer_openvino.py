"""Peer: OpenVINO GenAI, its GGUF reader and its continuous batching pipeline.

Environment:
    pip install openvino-genai numpy
Model: a GGUF file (model-q8_0.gguf or model-q4_1.gguf of prepare_model.py), or
a folder with an OpenVINO model.
--dtype: comma list of
    dyn0 | dyn32   size of the groups of dynamic activation quantisation (the
                   peer's own default otherwise; dyn0 switches it off)
    kvf32 | kvu8   type of the cache
    llm            the stateful pipeline instead of continuous batching (batch 1)

The time to the first token is that of a run that stops after one token; decode
is the difference of two runs of the same length of prompt.
"""
import time

from peer_common import now, parse, pin_threads, run


def main():
    args = parse(__doc__)
    pin_threads(args.threads)
    import numpy as np
    import openvino as ov
    import openvino_genai as og

    flags = set(filter(None, args.dtype.split(",")))
    props = {"INFERENCE_NUM_THREADS": args.threads, "PERFORMANCE_HINT": "LATENCY",
             "INFERENCE_PRECISION_HINT": "f32"}
    if "dyn0" in flags:
        props["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = 0
    if "dyn32" in flags:
        props["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = 32
    if "kvf32" in flags:
        props["KV_CACHE_PRECISION"] = "f32"
    if "kvu8" in flags:
        props["KV_CACHE_PRECISION"] = "u8"
    t0 = time.perf_counter()
    if "llm" in flags:
        pipe = og.LLMPipeline(args.model, "CPU", **props)
    else:
        sched = og.SchedulerConfig()
        sched.max_num_seqs = args.max_batch
        sched.max_num_batched_tokens = max(512, args.max_batch)
        sched.enable_prefix_caching = args.prefix_cache
        sched.cache_size = 2
        try:
            pipe = og.ContinuousBatchingPipeline(args.model, sched, "CPU", props)
        except Exception:
            pipe = og.LLMPipeline(args.model, "CPU", scheduler_config=sched, **props)
    load_s = time.perf_counter() - t0
    stateful = isinstance(pipe, og.LLMPipeline)

    def timed(ids, gen_len):
        cfg = og.GenerationConfig()
        cfg.max_new_tokens = gen_len
        cfg.min_new_tokens = gen_len
        cfg.ignore_eos = True
        cfg.do_sample = False
        a = now()
        if stateful:
            out = pipe.generate(ov.Tensor(np.array(ids, dtype=np.int64)), cfg)
            toks = out.tokens[0]
        else:
            out = pipe.generate([ov.Tensor(np.array([p], dtype=np.int64)) for p in ids],
                                [cfg] * len(ids))
            toks = out[0].m_generation_ids[0]
        return a, now(), list(toks)[-gen_len:]

    def generate(ids, gen_len):
        """The first token's time is that of a run on other prompts (the same, reversed) that stops there."""
        a, b, _ = timed([p[::-1] for p in ids], 1)
        c, d, tokens = timed(ids, gen_len)
        return (c, (c[0] + b[0] - a[0], c[1] + b[1] - a[1]), d), tokens

    name = args.model.rstrip("/").rsplit("/", 1)[-1].rsplit(".", 1)[0].split("-")[-1]
    run(args, "openvino-genai", og.__version__, name + (":" + args.dtype if args.dtype else ""),
        load_s, 49152, generate)


if __name__ == "__main__":
    main()
