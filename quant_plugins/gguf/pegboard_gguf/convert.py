"""A GGUF file's header and metadata, converted to facts and a `tokenizer.json`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pegboard.errors import CheckpointError
from pegboard.interfaces.checkpoint import CheckpointFacts, TokenizerFacts
from pegboard_gguf.header import Header, read_header
from pegboard_gguf.keys import check_heeded, undeclared
from pegboard_gguf.metadata import Metadata
from pegboard_gguf.translate import ROPE_FACTORS, model_config, tensor_facts
from pegboard_gguf.vocabulary import Vocabulary

_SAMPLING_REALS = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}
_TOP_K = "general.sampling.top_k"
_SAMPLING_NEUTRAL = {
    "general.sampling.sequence": ("",),
    "general.sampling.xtc_probability": (0,),
    "general.sampling.penalty_last_n": (-1,),
    "general.sampling.mirostat": (0,),
}
"""Keys that are not followed, to the values that ask for no change."""

MAX_ROPE_FACTORS = 2**16
"""Half a head's size; more than any model has."""


def convert(path: Path, digest: str) -> tuple[CheckpointFacts, str | None]:
    """Facts, without the tokenizer's file, and that file's text; None: the file has no tokenizer.

    Args:
        path: one GGUF file.
        digest: of its content.

    Raises:
        CheckpointError, TokenizerError: it cannot be used.
    """
    header = read_header(path)
    metadata = Metadata(path, header.metadata)
    config = model_config(metadata, header.tensors, _rope_factors(path, header))
    check_heeded(metadata)
    config |= undeclared(metadata)
    tensors = tensor_facts(header.tensors)
    formats = sorted({fact.format for fact in tensors.values()} - {"plain"})
    vocabulary = Vocabulary(metadata) if "tokenizer.ggml.model" in metadata else None
    eos_token_ids = () if vocabulary is None else vocabulary.eos_token_ids
    if eos_token_ids:
        config["eos_token_id"] = list(eos_token_ids)
    facts = CheckpointFacts(
        source="gguf",
        path=str(path),
        fingerprint=digest,
        config=config,
        tensors=tensors,
        quantization="gguf" if formats else None,
        quantization_config={"formats": formats} if formats else {},
        eos_token_ids=eos_token_ids,
        tokenizer=_tokenizer_facts(metadata, vocabulary),
        eos_sources={} if vocabulary is None else vocabulary.eos_sources,
        generation=_generation(metadata),
    )
    return facts, None if vocabulary is None else vocabulary.to_json()


def _rope_factors(path: Path, header: Header) -> NDArray[np.float32] | None:
    tensor = header.tensors.get(ROPE_FACTORS)
    if tensor is None:
        return None
    if tensor.type != "F32" or math.prod(tensor.shape) > MAX_ROPE_FACTORS:
        was = f"is {tensor.type} of shape {tensor.shape}"
        raise CheckpointError(
            f"{path}: {ROPE_FACTORS}", was, allowed=f"F32, {MAX_ROPE_FACTORS} at most"
        )
    return np.fromfile(path, "<f4", tensor.num_bytes // 4, offset=tensor.offset)


def _tokenizer_facts(metadata: Metadata, vocabulary: Vocabulary | None) -> TokenizerFacts:
    if vocabulary is None:
        return TokenizerFacts(file=None)
    return TokenizerFacts(
        file=None,
        chat_template=metadata.text("tokenizer.chat_template", "") or None,
        special_tokens=vocabulary.special_tokens,
        add_bos=vocabulary.add_bos,
        eos_token_id=vocabulary.eos_token_id,
        add_eos=vocabulary.add_eos,
    )


def _generation(metadata: Metadata) -> dict[str, Any]:
    """The file's sampling defaults; keys without a counterpart keep their names."""
    real = {key: name for key, name in _SAMPLING_REALS.items() if key in metadata}
    said: dict[str, Any] = {name: metadata.real(key) for key, name in real.items()}
    if _TOP_K in metadata:
        said["top_k"] = max(0, metadata.whole(_TOP_K))  # negative, or 0: all
    for key, neutral in _SAMPLING_NEUTRAL.items():
        if key in metadata and metadata.value(key) not in neutral:
            said[key] = metadata.value(key)
    return said
