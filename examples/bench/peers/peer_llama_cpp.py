"""Peer: llama.cpp through the low-level interface of llama-cpp-python.

Environment (builds from source, needs cmake and a C++ compiler):
    CMAKE_ARGS="-DGGML_NATIVE=ON -DMTMD_BUILD=OFF -DLLAVA_BUILD=OFF" pip install llama-cpp-python==0.3.36
Model: model-f32.gguf, model-q8_0.gguf or model-q4_1.gguf of prepare_model.py.
--dtype repack|norepack: whether weights may be laid out anew at load (default
repack); kv16 (default) and kv32 choose the cache's type: e.g. repack,kv32.

The loop is llama_decode() over one batch with a row per sequence, and argmax
over the logits in numpy.
"""
import time

from peer_common import now, parse, pin_threads, run


def main():
    args = parse(__doc__)
    pin_threads(args.threads)
    import ctypes
    import numpy as np
    import llama_cpp as lc

    flags = set(filter(None, args.dtype.split(",")))

    @lc.llama_log_callback
    def quiet(level, text, user):
        return None

    lc.llama_log_set(quiet, None)
    lc.llama_backend_init()
    t0 = time.perf_counter()
    mp = lc.llama_model_default_params()
    mp.n_gpu_layers = 0
    if hasattr(mp, "use_extra_bufts"):
        mp.use_extra_bufts = "norepack" not in flags
    model = lc.llama_model_load_from_file(args.model.encode(), mp)
    if not model:
        raise SystemExit("the model did not load")
    per_seq = args.max_len + 8
    cp = lc.llama_context_default_params()
    cp.n_ctx = (args.max_batch * per_seq + 255) // 256 * 256
    cp.n_seq_max = args.max_batch
    cp.n_batch = max(512, args.max_batch)
    cp.n_ubatch = 512
    cp.n_threads = cp.n_threads_batch = args.threads
    if hasattr(cp, "kv_unified"):
        cp.kv_unified = args.max_batch == 1
        if not cp.kv_unified:
            cp.n_ctx = args.max_batch * ((per_seq + 255) // 256 * 256)
    if "kv32" in flags:
        cp.type_k = cp.type_v = 0
    ctx = lc.llama_init_from_model(model, cp)
    if not ctx:
        raise SystemExit("no context")
    load_s = time.perf_counter() - t0
    vocab = lc.llama_vocab_n_tokens(lc.llama_model_get_vocab(model))
    batch = lc.llama_batch_init(cp.n_batch, 0, 1)

    def decode(rows):
        """rows: (token, pos, seq, wants_logits)"""
        batch.n_tokens = len(rows)
        for i, (tok, pos, seq, want) in enumerate(rows):
            batch.token[i] = tok
            batch.pos[i] = pos
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = seq
            batch.logits[i] = want
        rc = lc.llama_decode(ctx, batch)
        if rc:
            raise RuntimeError(f"llama_decode: {rc}")

    def argmax_rows(indices):
        out = []
        for i in indices:
            p = lc.llama_get_logits_ith(ctx, i)
            out.append(int(np.ctypeslib.as_array(
                ctypes.cast(p, ctypes.POINTER(ctypes.c_float)), (vocab,)).argmax()))
        return out

    def generate(ids, gen_len):
        lc.llama_memory_clear(lc.llama_get_memory(ctx), True)
        n = len(ids[0])
        a = now()
        last = [0] * len(ids)
        rows = []

        def flush():
            decode(rows)
            want = [(i, r[2]) for i, r in enumerate(rows) if r[3]]
            for (i, s), t in zip(want, argmax_rows([w[0] for w in want])):
                last[s] = t
            rows.clear()

        for s, seq in enumerate(ids):
            for pos, tok in enumerate(seq):
                rows.append((tok, pos, s, int(pos == n - 1)))
                if len(rows) == cp.n_batch:
                    flush()
        if rows:
            flush()
        b = now()
        first = [last[0]]
        for step in range(gen_len - 1):
            decode([(t, n + step, s, 1) for s, t in enumerate(last)])
            last = argmax_rows(range(len(last)))
            first.append(last[0])
        c = now()
        return (a, b, c), first

    name = args.model.rsplit("/", 1)[-1].rsplit(".", 1)[0].split("-")[-1]
    run(args, "llama.cpp", "llama-cpp-python-" + lc.__version__,
        name + (":" + args.dtype if args.dtype else ""), load_s, vocab, generate)


if __name__ == "__main__":
    main()
