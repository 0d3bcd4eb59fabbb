"""Describes the Llama family from a checkpoint's config. Torch-free.

Llama, Mistral, Qwen2 and Qwen3 are one decoder: grouped-query attention with rotary embedding, a
gated MLP, RMSNorm before each. They differ in biases, window, norms of q and k, and in the defaults of
missing config keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pegboard.interfaces.model import AttentionShape, ModelShape, ParameterShape
from pegboard.models.config_values import ConfigValues
from pegboard.models.rope_shape import rope_shape, scaled_max_position

_MAX_HEADS = 2**16
_MAX_LAYERS = 2**12
"""Far more than any model has. The description of a model takes an object a layer."""


@dataclass(frozen=True, slots=True)
class _Family:
    """The differences of a family.

    Attributes:
        max_position: `max_position_embeddings` of a config without it.
        biases: which of its linear layers have one.
        windows: (config, num_layers) -> window of each layer.
        num_kv_heads: `num_key_value_heads` of a config without it; None: as many as query heads.
        head_dim: `head_dim` of a config without it; None: hidden size over heads.
        qk_norm: q and k are normalised per head.
    """

    max_position: int
    biases: Callable[[ConfigValues], _Biases]
    windows: Callable[[ConfigValues, int], tuple[int | None, ...]]
    num_kv_heads: int | None = None
    head_dim: int | None = None
    qk_norm: bool = False


@dataclass(frozen=True, slots=True)
class _Biases:
    """Whether q, k and v, the attention's output and the MLP's linear layers have biases."""

    qkv: bool = False
    output: bool = False
    mlp: bool = False


@dataclass(frozen=True, slots=True)
class _Sizes:
    hidden: int
    intermediate: int
    vocab: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int


def describe(config: Mapping[str, Any]) -> ModelShape:
    """The shape of a model of the Llama family.

    Args:
        config: `config.json`'s keys, in the current spelling or the older one.

    Raises:
        CheckpointError: another architecture, a key that is missing or wrong, or a feature that is
            not supported; one line, naming the key.
    """
    values = ConfigValues(config)
    architecture, family = _family(values)
    sizes = _sizes(values, family)
    if (activation := values.text("hidden_act", "silu")) != "silu":
        raise values.error("hidden_act", f"{activation!r}", allowed="silu")
    max_position = values.size("max_position_embeddings", family.max_position)
    rope = rope_shape(values, sizes.head_dim, max_position)
    tied = values.flag("tie_word_embeddings", default=False)
    return ModelShape(
        architecture=architecture,
        vocab_size=sizes.vocab,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.intermediate,
        max_position=scaled_max_position(rope, max_position),
        norm_eps=values.number("rms_norm_eps", 1e-6),
        attention=tuple(
            AttentionShape(
                num_heads=sizes.num_heads,
                num_kv_heads=sizes.num_kv_heads,
                head_dim=sizes.head_dim,
                scale=sizes.head_dim**-0.5,
                window=window,
            )
            for window in family.windows(values, sizes.num_layers)
        ),
        rope=rope,
        tied_embeddings=tied,
        qk_norm=family.qk_norm,
        parameters=tuple(
            _parameters(sizes, family.biases(values), qk_norm=family.qk_norm, tied=tied)
        ),
        ignored=("*.rotary_emb.inv_freq", *(["lm_head.weight"] if tied else [])),
        tensor_parallel=_splits(sizes),
    )


def _family(values: ConfigValues) -> tuple[str, _Family]:
    names = values.texts("architectures")
    for name in names:
        if name in _FAMILIES:
            return name, _FAMILIES[name]
    raise values.error("architectures", ", ".join(names) or "empty", allowed=", ".join(_FAMILIES))


def _sizes(values: ConfigValues, family: _Family) -> _Sizes:
    hidden = values.size("hidden_size")
    num_heads = values.size("num_attention_heads", maximum=_MAX_HEADS)
    absent = None if values.is_null("num_key_value_heads") else family.num_kv_heads
    num_kv_heads = values.size("num_key_value_heads", absent or num_heads)
    if num_heads % num_kv_heads:
        raise values.error(
            "num_key_value_heads", f"{num_kv_heads}", allowed=f"a divisor of {num_heads} heads"
        )
    head_dim = values.size("head_dim", family.head_dim or max(hidden // num_heads, 1))
    if head_dim % 2:
        raise values.error("head_dim", f"{head_dim}", allowed="an even number, to be rotated")
    return _Sizes(
        hidden=hidden,
        intermediate=values.size("intermediate_size"),
        vocab=values.size("vocab_size"),
        num_layers=values.size("num_hidden_layers", maximum=_MAX_LAYERS),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
    )


def _no_windows(values: ConfigValues, num_layers: int) -> tuple[int | None, ...]:
    """No layer has one; libraries differ over a config that asks for one all the same."""
    if not values.flag("use_sliding_window", default=True):
        values.without_effect("sliding_window", "max_window_layers")
    if "layer_types" in values:
        return _layer_windows(values, num_layers, None)
    return (None,) * num_layers


def _mistral_windows(values: ConfigValues, num_layers: int) -> tuple[int | None, ...]:
    """The window is in every layer, or in those where `layer_types` says so."""
    window = None if values.is_null("sliding_window") else values.size("sliding_window", 4096)
    if window is not None and not values.flag("use_sliding_window", default=True):
        raise values.error(
            "use_sliding_window",
            f"false, beside sliding_window {window}",
            fix="sliding_window: null",
        )
    if "layer_types" in values:
        return _layer_windows(values, num_layers, window)
    return (window,) * num_layers


def _qwen_windows(values: ConfigValues, num_layers: int) -> tuple[int | None, ...]:
    """`layer_types` says which layers have the window; else those from `max_window_layers` on."""
    window: int | None = None
    if values.flag("use_sliding_window", default=False) and not values.is_null("sliding_window"):
        window = values.size("sliding_window", 4096)
    values.without_effect("sliding_window", "max_window_layers")
    if "layer_types" in values:
        return _layer_windows(values, num_layers, window)
    first = values.size("max_window_layers", 28, minimum=0)
    return tuple(window if layer >= first else None for layer in range(num_layers))


def _layer_windows(
    values: ConfigValues, num_layers: int, window: int | None
) -> tuple[int | None, ...]:
    """The window of each layer, as `layer_types` says."""
    types = values.texts("layer_types")
    allowed = {"full_attention": None, "sliding_attention": window}
    if len(types) != num_layers or not set(types) <= set(allowed):
        raise values.error(
            "layer_types",
            f"{len(types)} entries of {', '.join(sorted(set(types)))}",
            allowed=f"{num_layers} entries of {', '.join(allowed)}",
        )
    if "sliding_attention" in types and window is None:
        raise values.error(
            "layer_types",
            "sliding_attention, and no window",
            fix="say sliding_window, and use_sliding_window: true where the family knows it",
        )
    return tuple(allowed[kind] for kind in types)


def _parameters(
    sizes: _Sizes, biases: _Biases, *, qk_norm: bool, tied: bool
) -> Iterator[ParameterShape]:
    """All parameters in the order in which the decoder is built."""
    hidden, inner = sizes.hidden, sizes.intermediate
    yield ParameterShape("model.embed_tokens.weight", (sizes.vocab, hidden), "embedding", 0)
    for layer in range(sizes.num_layers):
        prefix = f"model.layers.{layer}."
        yield _norm(prefix + "input_layernorm", hidden)
        yield from _attention_parameters(prefix + "self_attn.", sizes, biases, qk_norm=qk_norm)
        yield _norm(prefix + "post_attention_layernorm", hidden)
        yield from _column_split(prefix + "mlp.gate_proj", inner, hidden, biases.mlp)
        yield from _column_split(prefix + "mlp.up_proj", inner, hidden, biases.mlp)
        yield from _row_split(prefix + "mlp.down_proj", hidden, inner, biases.mlp)
    yield _norm("model.norm", hidden)
    if not tied:
        yield ParameterShape("lm_head.weight", (sizes.vocab, hidden), "head", 0)


def _attention_parameters(
    prefix: str, sizes: _Sizes, biases: _Biases, *, qk_norm: bool
) -> Iterator[ParameterShape]:
    q_size, kv_size = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
    yield from _column_split(prefix + "q_proj", q_size, sizes.hidden, biases.qkv)
    yield from _column_split(prefix + "k_proj", kv_size, sizes.hidden, biases.qkv)
    yield from _column_split(prefix + "v_proj", kv_size, sizes.hidden, biases.qkv)
    if qk_norm:
        yield _norm(prefix + "q_norm", sizes.head_dim)
        yield _norm(prefix + "k_norm", sizes.head_dim)
    yield from _row_split(prefix + "o_proj", sizes.hidden, q_size, biases.output)


def _norm(name: str, size: int) -> ParameterShape:
    return ParameterShape(f"{name}.weight", (size,), "norm")


def _column_split(name: str, outs: int, ins: int, bias: bool) -> Iterator[ParameterShape]:
    """A linear layer whose outputs are split, and its bias with them."""
    yield ParameterShape(f"{name}.weight", (outs, ins), "linear", 0)
    if bias:
        yield ParameterShape(f"{name}.bias", (outs,), "bias", 0)


def _row_split(name: str, outs: int, ins: int, bias: bool) -> Iterator[ParameterShape]:
    """A linear layer whose inputs are split; its bias is added once, to the sum."""
    yield ParameterShape(f"{name}.weight", (outs, ins), "linear", 1)
    if bias:
        yield ParameterShape(f"{name}.bias", (outs,), "bias")


def _splits(sizes: _Sizes) -> tuple[int, ...]:
    """Numbers of devices that every split axis divides by."""
    axes = (sizes.num_kv_heads, sizes.intermediate, sizes.vocab)
    return tuple(n for n in range(1, sizes.num_kv_heads + 1) if not any(a % n for a in axes))


def _llama_biases(values: ConfigValues) -> _Biases:
    attention = values.flag("attention_bias", default=False)
    return _Biases(attention, attention, values.flag("mlp_bias", default=False))


def _mistral_biases(values: ConfigValues) -> _Biases:
    return _Biases()


def _qwen2_biases(values: ConfigValues) -> _Biases:
    values.without_effect("attention_bias")  # the tensors have it or are refused
    return _Biases(qkv=True)


def _qwen3_biases(values: ConfigValues) -> _Biases:
    attention = values.flag("attention_bias", default=False)
    return _Biases(attention, attention)


_FAMILIES: dict[str, _Family] = {
    "LlamaForCausalLM": _Family(2048, _llama_biases, _no_windows),
    "MistralForCausalLM": _Family(131072, _mistral_biases, _mistral_windows, num_kv_heads=8),
    "Qwen2ForCausalLM": _Family(32768, _qwen2_biases, _qwen_windows, num_kv_heads=32),
    "Qwen3ForCausalLM": _Family(
        32768, _qwen3_biases, _qwen_windows, num_kv_heads=32, head_dim=128, qk_norm=True
    ),
}
