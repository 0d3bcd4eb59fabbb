"""The config of a head: flat as of a Llama, or in the layout of speculators. Torch-free.

Numbers are the head's own: a rotary base that its config does not say is 10000, whatever the target's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pegboard.errors import CheckpointError
from pegboard.interfaces.model import RopeShape

DEFAULT_THETA = 10000.0
DEFAULT_EPS = 1e-6

OF_SPECULATORS = "speculators_model_type"
LAYER = "transformer_layer_config"
AUX = "eagle_aux_hidden_state_layer_ids"
FLAGS_OF_THIRD = ("norm_before_residual", "norm_before_fc", "fc_norm")


class HeadConfig:
    """Values of a head's `config.json`, checked as they are read."""

    def __init__(self, config: Mapping[str, Any], path: str) -> None:
        self._top = config
        self._path = path
        self._is_speculators = OF_SPECULATORS in config
        self._layer = self._section(config, LAYER) if self._is_speculators else config
        if (
            config.get("hidden_act", "silu") != "silu"
            or self._layer.get("hidden_act", "silu") != "silu"
        ):
            raise self._wrong("hidden_act", self._layer.get("hidden_act"), "silu")
        eagle = self._section(config, "eagle_config")
        if eagle.get("use_aux_hidden_state", True) is not True:
            raise self._wrong("eagle_config.use_aux_hidden_state", False, "true")
        self._eagle = eagle

    @property
    def hidden_size(self) -> int:
        return self._size("hidden_size")

    @property
    def intermediate_size(self) -> int:
        return self._size("intermediate_size")

    @property
    def num_layers(self) -> int:
        return self._size("num_hidden_layers", 1)

    @property
    def norm_eps(self) -> float:
        return self._number(self._layer, "rms_norm_eps", DEFAULT_EPS)

    @property
    def target_hidden_size(self) -> int | None:
        return self._optional("target_hidden_size")

    @property
    def draft_vocab_size(self) -> int | None:
        return self._optional("draft_vocab_size")

    @property
    def norms_residual(self) -> bool:
        return self._flag("norm_before_residual")

    @property
    def norms_before_fc(self) -> bool:
        return self._flag("norm_before_fc")

    @property
    def norms_taps(self) -> bool:
        return self._flag("fc_norm")

    @property
    def feeds_normed(self) -> bool:
        """`norm_output` has two meanings: of speculators, that the normed state is fed back; elsewhere,
        where it is true unless said, that the norm stands before the head."""
        if self._is_speculators:
            return self._flag("norm_output")
        if self._top.get("norm_output") not in (None, True):
            raise self._wrong("norm_output", self._top["norm_output"], "true")
        return False

    def of_third(self) -> str:
        """A key that only EAGLE-3 has a use for, and that is set; "": none."""
        return next((key for key in FLAGS_OF_THIRD if self._flag(key)), "")

    def heads(self) -> tuple[int, int, int]:
        """Query heads, KV heads, and elements a head."""
        heads = self._size("num_attention_heads")
        kv_heads = self._size("num_key_value_heads", heads)
        if heads % kv_heads:
            raise self._wrong("num_key_value_heads", kv_heads, f"a divisor of {heads}")
        head_dim = self._size("head_dim", self.hidden_size // heads)
        if head_dim % 2:
            raise self._wrong("head_dim", head_dim, "an even number")
        return heads, kv_heads, head_dim

    def taps(self) -> tuple[int, ...] | None:
        """The target's layers whose inputs it reads; None: it does not say. Those of speculators are
        inputs; elsewhere they name outputs, as the trainers count."""
        said = self._eagle.get(AUX, self._top.get(AUX))
        if said is None:
            return None
        if not isinstance(said, list) or not all(type(layer) is int for layer in said):
            raise self._wrong(AUX, said, "a list of layers")
        return tuple(layer + (not self._is_speculators) for layer in said)

    def rope(self, head_dim: int) -> RopeShape:
        """The rotary embedding."""
        sections = [self._section(self._layer, key) for key in ("rope_parameters", "rope_scaling")]
        section = next((one for one in sections if one), {})
        theta = self._number(self._layer, "rope_theta", DEFAULT_THETA)
        theta = self._number(section, "rope_theta", theta)
        rule = section.get("rope_type", section.get("type", "default"))
        if rule == "default":
            return RopeShape(theta, head_dim)
        needed = {
            "linear": ("factor",),
            "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
        }
        if rule not in needed:
            raise self._wrong("rope_type", rule, f"default, {', '.join(needed)}")
        original = section.get("original_max_position_embeddings")
        if original is None:
            original = self._size("max_position_embeddings", 2048)
        scaling = {"rope_type": rule, "original_max_position_embeddings": original}
        scaling |= {key: self._number(section, key) for key in needed[rule]}
        return RopeShape(theta, head_dim, scaling)

    def _section(self, values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
        section = values.get(key)
        if section is None:
            return {}
        if not isinstance(section, Mapping):
            raise self._wrong(key, section, "an object")
        return section

    def _size(self, key: str, default: int | None = None) -> int:
        value = self._layer.get(key)
        value = default if value is None else value
        if type(value) is not int or value < 1:
            raise self._wrong(key, value, "a whole number from 1 on")
        return value

    def _optional(self, key: str) -> int | None:
        value = self._top.get(key)
        if value is None:
            return None
        if type(value) is not int or value < 1:
            raise self._wrong(key, value, "a whole number from 1 on")
        return value

    def _number(self, values: Mapping[str, Any], key: str, default: float | None = None) -> float:
        value = values.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
            raise self._wrong(key, value, "a positive number")
        return float(value)

    def _flag(self, key: str) -> bool:
        value = self._eagle.get(key, self._top.get(key))
        if value not in (None, True, False):
            raise self._wrong(key, value, "true, false")
        return value is True

    def _wrong(self, key: str, value: object, allowed: str) -> CheckpointError:
        return CheckpointError(f"{self._path}: config.json", f"{key}: {value!r}", allowed=allowed)
