"""The tokenizer that `pegboard quantize` writes of a GGUF file, against transformers on the folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer

from pegboard.testing.tiny import CHAT_TEMPLATE
from pegboard.tokenizer import load_tokenizer
from pegboard_gguf.describe import describe
from pegboard_quant.output import Output

TEXTS = ["The capital of France is", " two  spaces\n\n1234 don't", "Grüße 日本😀", "", "a<|end|>b"]
CORPUS = ["The quick brown fox jumps over the lazy dog, and don't you mind 1234. " * 9]


def write_gguf(path: Path, **settings: Any) -> Path:
    """A file with one tensor and a trained byte-level tokenizer."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    special = ["<|begin|>", "<|end|>", "<|user|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    trained.train_from_iterator(CORPUS, trainer)
    vocabulary = trained.get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(special) + [1] * (len(tokens) - len(special)))
    merges = [token for token in tokens[len(special) :] if len(token) > 1]
    writer.add_token_merges([f"{merge[0]} {merge[1]}" for merge in merges if len(merge) == 2])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template(CHAT_TEMPLATE)
    for key, value in settings.items():
        writer.add_bool(f"tokenizer.ggml.{key}", value)
    writer.add_tensor("token_embd.weight", np.zeros((len(tokens), 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    "settings",
    [
        {"add_bos_token": True},
        {"add_bos_token": False},
        {"add_bos_token": True, "add_eos_token": True},
        {"add_bos_token": False, "add_eos_token": True},
        {},
    ],
    ids=str,
)
def test_a_written_folder_reads_texts_as_its_source_does(
    tmp_path: Path, settings: dict[str, bool]
) -> None:
    facts = describe(write_gguf(tmp_path / "model.gguf", **settings))
    folder = tmp_path / "out"
    folder.mkdir()
    output = Output(folder, facts, 1)
    output.write_shard(0, {"model.norm.weight": torch.ones(32)})
    output.finish({"quant_method": "gptq"})
    theirs: Any = AutoTokenizer.from_pretrained(folder)
    ours = load_tokenizer(facts.tokenizer, where="here")
    first = [0] if settings.get("add_bos_token") else []
    last = [1] if settings.get("add_eos_token") else []
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == [*first, *ours.encode(text, special=False), *last]
        assert theirs.encode(text) == ids
        assert theirs.encode(text, add_special_tokens=False) == ours.encode(text, special=False)
        assert theirs.decode(ids, skip_special_tokens=True) == ours.decode(ids)
    assert (theirs.bos_token, theirs.eos_token) == ("<|begin|>", "<|end|>")
    assert theirs.chat_template == CHAT_TEMPLATE
    the, dog = (theirs.encode(text, add_special_tokens=False) for text in ("The", "dog"))
    pair = [*first, *the, *last, *first, *dog, *last]
    assert theirs("The", "dog")["input_ids"] == pair
