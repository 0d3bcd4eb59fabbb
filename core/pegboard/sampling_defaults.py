"""A checkpoint's sampling defaults, for fields that a request leaves out: its `generation_config.json`.

Followed is what `SamplingParams` has. Most of the rest has no effect, or a value that asks for none;
what is left is said in `check` and at the start, and not followed: it is a recommendation, which every
request may change, and no statement about the weights.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from pegboard.config_values import shown
from pegboard.errors import CheckpointError, RequestError
from pegboard.request import SamplingParams

_FOLLOWED = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""Keys of the file to fields of `SamplingParams`."""

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "diversity_penalty": (0,),
    "do_sample": (True, False),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "guidance_scale": (1,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "no_repeat_ngram_size": (0,),
    "num_beam_groups": (1,),
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "penalty_alpha": (0,),
    "remove_invalid_values": (False,),
    "sequence_bias": ({},),
    "token_healing": (False,),
    "typical_p": (1,),
}
"""Keys that change what is sampled, to the values, beside null and empty lists, that ask for nothing."""

_HARMLESS = {
    "_*",
    "assistant_confidence_threshold",
    "assistant_early_exit",
    "assistant_lookbehind",
    "bos_token_id",
    "cache_*",
    "chat_format",
    "compile_config",
    "continuous_batching_config",
    "custom_generate",
    "decoder_start_token_id",
    "disable_compile",
    "early_stopping",  # of beams
    "eos_token_id",  # see `CheckpointFacts.eos_token_ids`
    "is_assistant",
    "length_penalty",  # of beams
    "low_memory",
    "max_length",  # the model's own context ends a text
    "max_matching_ngram_size",
    "num_assistant_*",
    "output_*",
    "pad_token_id",
    "prefill_chunk_size",
    "prompt_lookup_num_tokens",
    "renormalize_logits",
    "return_dict_in_generate",
    "return_legacy_cache",
    "target_lookbehind",
    "transformers_version",
    "trust_remote_code",
    "use_cache",
    "use_mtp",
}
"""Patterns of keys without which the same tokens are sampled."""


@dataclass(frozen=True)
class SamplingDefaults:
    """Defaults for fields that a request leaves out.

    Attributes:
        values: fields of `SamplingParams` that the checkpoint sets.
        not_followed: `key=value` of what it recommends beside them.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    not_followed: tuple[str, ...] = ()

    def fill(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The fields that a request gives, and of these defaults what it leaves out."""
        filled = {**self.values, **given}
        if "max_tokens" not in given and "max_tokens" in filled:
            # A request that wants many has not asked for fewer.
            filled["max_tokens"] = max(filled["max_tokens"], given.get("min_tokens", 0))
        return filled

    def log(self, logger: logging.Logger) -> None:
        """Says what holds, and what is not followed; nothing where the checkpoint says nothing."""
        if self.values:
            values = ", ".join(f"{name}={value}" for name, value in self.values.items())
            logger.info("Default sampling parameters, by the checkpoint: %s", values)
        if self.not_followed:
            recommended = ", ".join(self.not_followed)
            logger.warning("the checkpoint's generation config is not followed in %s", recommended)


def sampling_defaults(generation: Mapping[str, Any], where: str) -> SamplingDefaults:
    """The defaults that a checkpoint's generation config asks for.

    `do_sample: false` is a temperature of 0, as it is to the library that writes these files.

    Args:
        generation: its keys and values; null is absence.
        where: the checkpoint, for errors.

    Raises:
        CheckpointError: a value that is followed is of a wrong type or out of range.
    """
    given = {key: value for key, value in generation.items() if value is not None}
    values = {name: given[key] for key, name in _FOLLOWED.items() if key in given}
    if given.get("do_sample") is False:
        values["temperature"] = 0.0
    top_k = values.get("top_k")
    if isinstance(top_k, float) and top_k.is_integer():
        values["top_k"] = top_k = int(top_k)
    if top_k == -1:  # another word for all
        values["top_k"] = 0
    _check(values, where)
    return SamplingDefaults(values, tuple(_not_followed(given)))


def _check(values: Mapping[str, Any], where: str) -> None:
    try:
        SamplingParams(**values).check()
    except RequestError as error:
        keys = {name: key for key, name in _FOLLOWED.items()}
        raise CheckpointError(
            f"{where}: generation config: {keys.get(error.param or '', error.param)}",
            error.was,
            allowed=error.allowed,
            fix="mend it, or leave it out with generation_config=none",
        ) from None


def _not_followed(given: Mapping[str, Any]) -> list[str]:
    return [
        f"{shown(key)[1:-1]}={shown(value)}"
        for key, value in sorted(given.items())
        if key not in _FOLLOWED
        and not any(fnmatchcase(key, pattern) for pattern in _HARMLESS)
        and value not in ([], *_NEUTRAL.get(key, ()))
    ]
