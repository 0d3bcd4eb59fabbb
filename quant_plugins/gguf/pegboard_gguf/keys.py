"""Which keys of an architecture have to be acted on: those of GGUF's list, in `declared_keys.toml`."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib import resources
from typing import Any

from pegboard_gguf.metadata import Metadata

_HARMLESS = frozenset(
    {
        ".vocab_size",  # the embedding has as many rows as it has
        ".tensor_data_layout",  # an architecture's rows come in one order, which is undone
        ".rope.scaling.finetuned",  # how it was made
        ".pooling_type",  # of embeddings, which are no output here
        ".nextn_predict_layers",  # layers that only draft
        ".decoder_start_token_id",
    }
)
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    ".rope.scaling.attn_factor": (1.0,),
    ".rope.scaling.yarn_attn_factor": (1.0,),
    ".rope.scaling.yarn_ext_factor": (-1.0,),
    ".rope.scaling.yarn_beta_fast": (32.0,),
    ".rope.scaling.yarn_beta_slow": (1.0,),
    ".logit_scale": (1.0,),
    ".residual_scale": (1.0,),
    ".embedding_scale": (1.0,),
    ".expert_weights_scale": (1.0,),
}
"""Values that mean the same as no such key, beside 0, false and what is empty."""


def check_heeded(metadata: Metadata) -> None:
    """Raises CheckpointError where a key of GGUF's list was not read and has a value that is not
    neutral."""
    for key, value in metadata.unread():
        if key in _declared() and key not in _HARMLESS and not _is_neutral(key, value):
            allowed = ", ".join(["no such key", *map(str, _NEUTRAL.get(key, (0,)))])
            raise metadata.fault(key, f"is {value!r:.80}, which nothing acts on", allowed)


def undeclared(metadata: Metadata) -> dict[str, Any]:
    """Keys of the architecture that were not read and that GGUF's list does not have."""
    return {
        f"{metadata.architecture}{key}": value if isinstance(value, int | float | str) else True
        for key, value in metadata.unread()
        if key not in _declared()
    }


def _is_neutral(key: str, value: Any) -> bool:
    if isinstance(value, list):
        return all(_is_neutral(key, item) for item in value)
    return not value or value in _NEUTRAL.get(key, ())


@cache
def _declared() -> frozenset[str]:
    text = resources.files("pegboard_gguf").joinpath("declared_keys.toml").read_text("utf-8")
    return frozenset(tomllib.loads(text)["keys"])
