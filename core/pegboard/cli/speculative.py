"""`--speculative-config '{...}'` as vLLM's tutorials write it: the settings of `drafter` that it means."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pegboard.config import DrafterChoice
from pegboard.config_values import nearest, shown
from pegboard.errors import ConfigError

EXAMPLE = """'{"method": "ngram", "num_speculative_tokens": 4}'"""

_SETTINGS = tuple(key for key in DrafterChoice.model_fields if key != "name")
"""Keys of `drafter`, which may be written here too."""


@dataclass(frozen=True)
class Method:
    """A method of that flag.

    Attributes:
        drafter: the drafter's name.
        options: other keys of the flag, and the drafter's options that they set.
        alike: keys of which one that is left out is as the other.
    """

    drafter: str
    options: Mapping[str, str] = field(default_factory=dict)
    alike: tuple[str, ...] = ()


_LOOKUP = ("prompt_lookup_min", "prompt_lookup_max")

METHODS: dict[str, Method] = {
    "ngram": Method("ngram", {key: key for key in _LOOKUP}, alike=_LOOKUP),
    "suffix": Method("suffix", {"suffix_decoding_min_token_prob": "min_confidence"}),
    "draft_model": Method(
        "draft_model", {"quantization": "quantizer", "draft_sample_method": "sampling"}
    ),
    "eagle": Method("eagle"),
    "eagle3": Method("eagle"),
}
"""What each method is here. Another is the name of a drafter."""

_NO_HEAD = "heads of that kind are not supported"
REFUSED_METHODS: dict[str, str] = {
    "medusa": _NO_HEAD,
    "mlp_speculator": _NO_HEAD,
    "mtp": "a checkpoint's own layers for further tokens are not read",
    "dflash": _NO_HEAD,
    "dspark": _NO_HEAD,
    "ngram_gpu": "texts are searched on the host; there it is 'ngram'",
    "custom_class": "a drafter of one's own is a plugin",
    "extract_hidden_states": "it guesses nothing",
}
"""Methods of vLLM's that have no counterpart."""

WORDS: dict[str, dict[str, str]] = {
    "draft_sample_method": {"greedy": "greedy", "probabilistic": "noise"},
}
"""Of a key that takes words, what each is here."""

HOLDS: dict[str, Any] = {
    "draft_tensor_parallel_size": 1,
    "use_heterogeneous_vocab": False,
    "parallel_drafting": False,
    "enable_adaptive_verification": False,
}
"""Keys that say what holds in any case, and how; no other value is accepted."""

_BY_POLICY = "'policy' decides for the batch"
_EXACT = "a draft is kept where the target says the same; 'verification' is the other way"
REFUSED_KEYS: dict[str, str] = {
    "tensor_parallel_size": "it is 'draft_tensor_parallel_size'",
    "revision": "name a folder that holds it",
    "code_revision": "code that comes with a checkpoint is never run",
    "max_model_len": "drafts end where the drafter's model ends",
    "kv_cache_dtype": "the drafter's KV is stored as the target's: --kv-cache-dtype",
    "attention_backend": "the key 'attention' is for both models",
    "moe_backend": "mixtures of experts are not supported",
    "enforce_eager": "there is no graph capture to switch off",
    "draft_load_config": "the files of the checkpoint say it",
    "disable_by_batch_size": _BY_POLICY,
    "num_speculative_tokens_per_batch_size": _BY_POLICY,
    "rejection_sample_method": _EXACT,
    "acceptance_method": _EXACT,
    "suffix_decoding_max_cached_requests": 'tokens are counted: "options": {"recent_tokens": N}',
    "suffix_decoding_max_tree_depth": "a match may have any length",
    "suffix_decoding_max_spec_factor": "a draft ends with its probability:"
    " 'suffix_decoding_min_token_prob'",
}
"""Keys of vLLM's that have no counterpart, or another one."""


def drafter_of(value: str, flag: str) -> dict[str, Any]:
    """The settings of `drafter` that a `--speculative-config` means.

    Raises:
        ConfigError: it is not JSON, or a method or key of it has no effect here.
    """
    given = _read(value, flag)
    name = _method(given, flag)
    if name == "ngram" and given.get("model") in _NGRAM_MODELS:
        del given["model"]
    method = METHODS.get(name, Method(name))
    settings: dict[str, Any] = {"name": method.drafter}
    options: dict[str, Any] = {}
    for key, wanted in given.items():
        if key in _SETTINGS:
            settings[key] = wanted
        elif key in method.options:
            options[key] = _word(key, wanted, flag)
        elif key not in HOLDS:
            raise _unknown(key, name, [*_SETTINGS, *method.options, *HOLDS], flag)
        elif type(wanted) is not type(HOLDS[key]) or wanted != HOLDS[key]:
            raise ConfigError(
                f"{flag} {key}", shown(wanted), allowed=json.dumps(HOLDS[key]), fix="leave it out"
            )
    if options:
        settings["options"] = _options(options, settings.get("options", {}), method, flag)
    return settings


_NGRAM_MODELS = ("ngram", "[ngram]")
"""Models that stand for the method."""


def _read(value: str, flag: str) -> dict[str, Any]:
    """The keys that say something: null is absence."""
    try:
        given = json.loads(value, object_pairs_hook=lambda pairs: _once(pairs, flag))
    except (json.JSONDecodeError, RecursionError) as error:
        raise ConfigError(flag, f"not JSON: {error}", allowed=EXAMPLE) from error
    if not isinstance(given, dict):
        raise ConfigError(flag, shown(given), allowed=EXAMPLE)
    return {key: wanted for key, wanted in given.items() if wanted is not None}


def _once(pairs: Sequence[tuple[str, Any]], flag: str) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    for key in keys:
        if keys.count(key) > 1:
            raise ConfigError(f"{flag} {key}", "stands twice", fix="leave out one of the two")
    return dict(pairs)


def _method(given: dict[str, Any], flag: str) -> str:
    """Takes the method out of the keys; where none is named, the model's name tells it, as in vLLM."""
    if "method" in given and "name" in given:
        raise ConfigError(f"{flag} name", "stands beside method", fix="leave out one of the two")
    method, model = given.pop("method", given.pop("name", None)), given.get("model")
    if method is None:
        if not isinstance(model, str):
            was = "neither method nor model, of which a method could be inferred"
            raise ConfigError(flag, was, allowed=EXAMPLE)
        if model in _NGRAM_MODELS:
            return "ngram"
        of_heads = any(part in model.lower() for part in ("eagle-", "eagle3"))
        return "eagle" if of_heads else "draft_model"
    if not isinstance(method, str):
        raise ConfigError(f"{flag} method", shown(method), allowed=", ".join(METHODS))
    refused = "mtp" if method.endswith("_mtp") else method
    if refused in REFUSED_METHODS:
        raise ConfigError(
            f"{flag} method",
            f"{shown(method)}: {REFUSED_METHODS[refused]}",
            allowed=", ".join(METHODS),
        )
    return "ngram" if method in _NGRAM_MODELS else method


def _word(key: str, wanted: Any, flag: str) -> Any:
    words = WORDS.get(key)
    if words is None:
        return wanted
    if not isinstance(wanted, str) or wanted not in words:
        raise ConfigError(f"{flag} {key}", shown(wanted), allowed=", ".join(words))
    return words[wanted]


def _options(wanted: dict[str, Any], beside: Any, method: Method, flag: str) -> dict[str, Any]:
    """The drafter's options: those of keys, and those that were written as such."""
    if not isinstance(beside, dict):
        raise ConfigError(f"{flag} options", shown(beside), allowed="an object")
    said = [key for key in method.alike if key in wanted]
    for key in method.alike if said else ():
        wanted.setdefault(key, wanted[said[0]])
    options = {method.options[key]: value for key, value in wanted.items()}
    if twice := sorted(options.keys() & beside.keys()):
        raise ConfigError(f"{flag} options", f"{twice[0]} stands beside them", fix="say it once")
    return options | beside


def _unknown(key: str, method: str, known: Sequence[str], flag: str) -> ConfigError:
    thing, allowed = f"{flag} {key}", ", ".join(["method", *known])
    if key in REFUSED_KEYS:
        return ConfigError(thing, f"not a key here: {REFUSED_KEYS[key]}", allowed=allowed)
    of_others = [name for name, other in METHODS.items() if key in other.options]
    if of_others:
        was = f"no key of method {method!r}, but of {', '.join(of_others)}"
        return ConfigError(thing, was, allowed=allowed)
    meant = nearest(key, ["method", *known])
    fix = f"did you mean {meant!r}?" if meant else "a drafter's own go into 'options'"
    return ConfigError(thing, "unknown key", allowed=allowed, fix=fix)
