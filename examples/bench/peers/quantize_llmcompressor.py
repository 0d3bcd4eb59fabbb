"""Peer: llm-compressor's GPTQ, 4 bits in groups of 64, symmetric; else its own defaults.

Environment (the packages it asks for pull in CUDA; without them it runs on a CPU):
    pip install torch==2.13.0 transformers==5.24.0
    pip install --no-deps llmcompressor==0.14.0.1 compressed-tensors==0.19.0 accelerate \\
        auto-round datasets dill loguru nvidia-ml-py pyarrow
"""
from quantize_common import parse, texts


def main():
    args = parse(__doc__)
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(args.model, dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    weights = QuantizationArgs(num_bits=4, strategy="group", group_size=64, symmetric=True)
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    given = texts(args, tokenizer)
    oneshot(
        model=model,
        tokenizer=tokenizer,
        dataset=Dataset.from_list(given),
        recipe=GPTQModifier(config_groups={"group_0": scheme}, ignore=["lm_head"]),
        max_seq_length=args.length,
        num_calibration_samples=len(given),
        output_dir=args.out,
    )


if __name__ == "__main__":
    main()
