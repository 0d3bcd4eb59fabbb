"""Arguments and calibration texts of the scripts that quantize with other tools."""
import argparse
from pathlib import Path


def parse(doc):
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a folder of float weights")
    parser.add_argument("--out", required=True, help="a new folder")
    parser.add_argument("--data", required=True, type=Path, help="a text file")
    parser.add_argument("--samples", type=int, default=64, help="texts that are cut from it")
    parser.add_argument("--length", type=int, default=512, help="tokens of each")
    return parser.parse_args()


def texts(args, tokenizer):
    """Token ids of the texts, as `pegboard quantize` cuts them."""
    ids = tokenizer(args.data.read_text(encoding="utf-8"), add_special_tokens=False)["input_ids"]
    ids = ids[: args.samples * args.length]
    cut = [ids[at : at + args.length] for at in range(0, len(ids), args.length)]
    return [{"input_ids": one, "attention_mask": [1] * len(one)} for one in cut]
