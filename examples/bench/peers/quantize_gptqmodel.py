"""Peer: GPTQModel's GPTQ, 4 bits in groups of 64, symmetric; else its own defaults.

Environment (the packages it asks for pull in CUDA; without them it runs on a CPU):
    pip install torch==2.13.0 transformers==5.24.0
    pip install --no-deps gptqmodel accelerate datasets device-smi defuser dill logbar \\
        ninja pyarrow pypcre threadpoolctl tokenicer torchao
"""
import os

from quantize_common import parse, texts


def main():
    args = parse(__doc__)
    os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")  # it takes one for two cores, and wants two
    from gptqmodel import GPTQModel, QuantizeConfig
    from transformers import AutoTokenizer

    config = QuantizeConfig(bits=4, group_size=64, sym=True)
    model = GPTQModel.load(args.model, config, device="cpu")
    model.quantize(texts(args, AutoTokenizer.from_pretrained(args.model)), batch_size=1)
    model.save(args.out)


if __name__ == "__main__":
    main()
