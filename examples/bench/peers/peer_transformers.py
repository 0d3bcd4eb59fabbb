"""Peer: transformers (eager, float32) on torch.

Environment:
    pip install torch==2.13.0 transformers safetensors
Model: the folder hf-f32 that prepare_model.py writes.
--dtype: float32 (default), bfloat16, or int8 (torch's dynamic quantisation of
the linear layers).
"""
import time

from peer_common import now, parse, pin_threads, run


def main():
    args = parse(__doc__)
    pin_threads(args.threads)
    import torch
    import transformers
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(args.threads)
    kind = args.dtype or "float32"
    t0 = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(
        args.model, dtype=torch.bfloat16 if kind == "bfloat16" else torch.float32)
    model.eval()
    if kind == "int8":
        model = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, torch.qint8)
    load_s = time.perf_counter() - t0

    def generate(ids, gen_len):
        """Greedy loop over model(); no generation helper, so its own overhead
        (logits processors, stopping checks) does not count against the peer."""
        x = torch.tensor(ids)
        out = []
        a = now()
        r = model(x, use_cache=True, logits_to_keep=1)
        nxt = r.logits[:, -1].argmax(-1, keepdim=True)
        out.append(nxt)
        b = now()
        cache = r.past_key_values
        for _ in range(gen_len - 1):
            r = model(nxt, past_key_values=cache, use_cache=True, logits_to_keep=1)
            nxt = r.logits[:, -1].argmax(-1, keepdim=True)
            out.append(nxt)
        c = now()
        return (a, b, c), torch.cat(out, 1)[0].tolist()

    def start():
        """One sequence after the other: the library's own loop takes a batch that is known before."""
        queue = []

        def submit(number, ids, max_tokens):
            queue.append([number, torch.tensor([ids]), max_tokens, None])

        def step():
            number, x, missing, cache = head = queue[0]
            r = model(x, past_key_values=cache, use_cache=True, logits_to_keep=1)
            head[1:] = r.logits[:, -1].argmax(-1, keepdim=True), missing - 1, r.past_key_values
            if missing == 1:
                queue.pop(0)
            return {number: 1}

        return submit, step

    with torch.inference_mode():
        run(args, "transformers", transformers.__version__ + "+torch" + torch.__version__,
            kind, load_s, model.config.vocab_size, generate, start)


if __name__ == "__main__":
    main()
