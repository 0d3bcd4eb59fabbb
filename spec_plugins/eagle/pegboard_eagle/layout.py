"""Which EAGLE a checkpoint holds, and what it takes. Torch-free.

The tensors tell: names of architectures in configs do not. `hidden_norm` is of EAGLE-3 alone, whose first
layer reads [embedding, feature]; EAGLE-1 (and EAGLE-2, which only drafts otherwise) has a plain decoder
layer behind `fc`. Every tensor has to be there, in its shape, and none beside: the core compares them with
`ModelShape.parameters`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pegboard.errors import CheckpointError
from pegboard.interfaces.checkpoint import CheckpointFacts
from pegboard.interfaces.drafter import DrafterFacts, DraftSlots
from pegboard.interfaces.model import AttentionShape, ModelShape, ParameterKind, ParameterShape
from pegboard_eagle.head_config import HeadConfig
from pegboard_eagle.options import EagleOptions

FIRST = "layers.0"
D2T, T2D = "d2t", "t2d"
CARRIES_NOTHING = "*.rotary_emb.inv_freq"


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """A head as its checkpoint has it.

    Attributes:
        shape: its layers. A row of the head takes the slot of the token that it embeds, so that the first
            token of a sequence has none.
        taps: the target's hidden states that make a feature, in the order of `fc`; of EAGLE-1 the one
            after the final norm.
        names: by the names used here, the checkpoint's: without `.weight`, without a prefix `model.`, and
            with `layers.0` for `midlayer`.
        reads_embedding: whether the first layer reads [embedding, feature] (EAGLE-3), not `fc` of them.
        norms_residual: whether the first layer's residual is the normed feature.
        feeds_normed: whether a normed state stands in for the next feature.
    """

    shape: ModelShape
    taps: tuple[int, ...]
    names: Mapping[str, str]
    reads_embedding: bool
    norms_residual: bool
    feeds_normed: bool


def describe(
    facts: CheckpointFacts | None, target: ModelShape, options: EagleOptions
) -> DrafterFacts:
    """The needs of a head.

    Raises:
        CheckpointError: the checkpoint holds none, or one that does not go with the target.
    """
    if facts is None:
        return DrafterFacts(shape="registry", maps_vocabulary=True)  # refused for want of a model
    layout = layout_of(facts, target, options)
    return DrafterFacts(
        shape=layout.shape,
        taps=layout.taps,
        maps_vocabulary=D2T in layout.names,
        quantizer=options.quantizer,
        slots=draft_slots(options),
        kept_a_block=layout.shape.hidden_size,
    )


def draft_slots(options: EagleOptions) -> DraftSlots:
    """The last known token's row stands in its own slot. Behind it: of a chain all nodes but the last; of
    a tree, the nodes that get children."""
    if options.top_k == 1:
        return DraftSlots(fixed=-1, a_node=1)
    return DraftSlots(fixed=options.top_k * (options.depth - 1), a_node=0)


def layout_of(facts: CheckpointFacts, target: ModelShape, options: EagleOptions) -> HeadLayout:
    """The layout of a head for a target.

    Raises:
        CheckpointError: as `describe`.
    """
    return _Reader(facts, target, options).layout()


class _Reader:
    """Reads one checkpoint's facts."""

    def __init__(self, facts: CheckpointFacts, target: ModelShape, options: EagleOptions) -> None:
        self.facts = facts
        self.target = target
        self.options = options
        self.names = {_canonical(name): name for name in facts.tensors}
        if len(self.names) < len(facts.tensors):
            raise self.error("two of its tensors stand for one, with and without `model.`")
        self.config = HeadConfig(facts.config, facts.path)

    def layout(self) -> HeadLayout:
        if f"{FIRST}.self_attn.q_proj.weight" not in self.names or "fc.weight" not in self.names:
            raise self.error(
                "has no tensors of an EAGLE head", "fc.weight and a layer: `midlayer` or `layers.0`"
            )
        is_third = f"{FIRST}.hidden_norm.weight" in self.names
        self._check_target()
        vocab_size = self._check_vocabulary(is_third=is_third)
        taps = self._third_taps() if is_third else (self.target.num_layers,)
        if not is_third and self.config.hidden_size != self.target.hidden_size:
            raise self.error(
                f"hidden_size: {self.config.hidden_size}, and EAGLE-1's states stand for the target's, of"
                f" {self.target.hidden_size}"
            )
        if not is_third and (wrong := self.config.of_third()):
            raise self.error(f"config.json says {wrong}, and its tensors are of EAGLE-1")
        heads, kv_heads, head_dim = self.config.heads()
        attention = AttentionShape(heads, kv_heads, head_dim, head_dim**-0.5, skipped=1)
        qk_norm = f"{FIRST}.self_attn.q_norm.weight" in self.names
        ignored = [self.names[name] for name in (D2T, T2D) if name in self.names]
        shape = ModelShape(
            architecture="EAGLE-3" if is_third else "EAGLE-1",
            vocab_size=vocab_size,
            hidden_size=self.config.hidden_size,
            intermediate_size=self.config.intermediate_size,
            # The head's own is nominal: 2048, whatever the target's.
            max_position=self.target.max_position,
            norm_eps=self.config.norm_eps,
            attention=(attention,) * self._num_layers(),
            rope=self.config.rope(head_dim),
            tied_embeddings=False,
            qk_norm=qk_norm,
            parameters=tuple(self._parameters(vocab_size, len(taps), is_third=is_third)),
            ignored=(CARRIES_NOTHING, *ignored),
        )
        return HeadLayout(
            shape=shape,
            taps=taps,
            names={
                name.removesuffix(".weight"): full.removesuffix(".weight")
                for name, full in self.names.items()
            },
            reads_embedding=is_third,
            norms_residual=self.config.norms_residual,
            feeds_normed=self.config.feeds_normed,
        )

    def error(self, problem: str, allowed: str = "") -> CheckpointError:
        return CheckpointError(self.facts.path, problem, allowed=allowed)

    def _num_layers(self) -> int:
        numbers = {
            int(name.split(".")[1])
            for name in self.names
            if name.startswith("layers.") and name.split(".")[1].isdecimal()
        }
        said = self.config.num_layers
        if numbers != set(range(said)):
            raise self.error(
                f"num_hidden_layers: {said}, and its tensors are of layers {sorted(numbers)}"
            )
        return said

    def _check_target(self) -> None:
        size = self.config.target_hidden_size
        if size is not None and size != self.target.hidden_size:
            raise self.error(
                f"is of a target of hidden size {size}, and this one's is {self.target.hidden_size}"
            )

    def _check_vocabulary(self, *, is_third: bool) -> int:
        """The size of the vocabulary that the head draws from. Maps are of whole numbers, which are no
        parameters to the core, so that their shapes are checked here."""
        vocab_size = self.target.vocab_size
        if not is_third and D2T in self.names:
            raise self.error("has d2t, the map of EAGLE-3, and layers of EAGLE-1")
        if D2T in self.names:
            said = self.config.draft_vocab_size
            if said is None:
                raise self.error("has d2t, and its config.json no draft_vocab_size")
            vocab_size = said
            self._check_map(D2T, vocab_size, ("int64", "int32"))
        if T2D in self.names:
            if D2T not in self.names:
                raise self.error("has t2d and no d2t")
            self._check_map(T2D, self.target.vocab_size, ("bool", "uint8"))
        if vocab_size != self.target.vocab_size and "lm_head.weight" not in self.names:
            raise self.error("has a vocabulary of its own and no lm_head.weight")
        return vocab_size

    def _check_map(self, name: str, size: int, dtypes: tuple[str, ...]) -> None:
        fact = self.facts.tensors[self.names[name]]
        if fact.shape != (size,) or fact.dtype not in dtypes:
            raise self.error(
                f"tensor {name} is {fact.dtype} {list(fact.shape)}", f"{dtypes[0]} [{size}]"
            )

    def _third_taps(self) -> tuple[int, ...]:
        num_layers, said = self.target.num_layers, self.options.taps
        if said == "auto":
            own = self.config.taps()
            said = (2, num_layers // 2, num_layers - 3) if own is None else own
        if wrong := [tap for tap in said if tap not in self.target.taps]:
            raise self.error(
                f"wants inputs of layers {wrong} of the target",
                f"-1 to {num_layers}; drafter.options.taps says them",
            )
        wide = self.facts.tensors[self.names["fc.weight"]].shape[-1]
        if wide != len(said) * self.target.hidden_size:
            raise self.error(
                f"fc.weight has {wide} inputs, and {len(said)} taps of the target"
                f" {len(said) * self.target.hidden_size}"
            )
        return said

    def _parameters(
        self, vocab_size: int, num_taps: int, *, is_third: bool
    ) -> Iterator[ParameterShape]:
        """The parameters, by the checkpoint's names. Those that a layout may lack are there if the
        checkpoint has them."""
        hidden, of_target = self.config.hidden_size, self.target.hidden_size
        fc_inputs = num_taps * of_target if is_third else hidden + of_target
        yield self._named("fc.weight", (hidden, fc_inputs), "linear")
        yield from self._optional("fc.bias", (hidden,), "bias")
        if is_third:
            for tap in range(num_taps) if self.config.norms_taps else ():
                yield self._named(f"fc_norm.{tap}.weight", (of_target,), "norm")
            if self.config.norms_before_fc:
                yield self._named("input_norm.weight", (fc_inputs,), "norm")
            yield self._named(f"{FIRST}.hidden_norm.weight", (hidden,), "norm")
            yield self._named("norm.weight", (hidden,), "norm")
        for layer in range(self._num_layers()):
            yield from self._layer(layer, is_third=is_third)
        yield from self._optional(
            "embed_tokens.weight", (self.target.vocab_size, hidden), "embedding"
        )
        if "embed_tokens.weight" not in self.names and hidden != of_target:
            raise self.error(
                f"hidden_size: {hidden}, and the target's embedding has {of_target}",
                "a head of the target's size, or one with embed_tokens.weight",
            )
        yield from self._optional("lm_head.weight", (vocab_size, hidden), "head")

    def _layer(self, layer: int, *, is_third: bool) -> Iterator[ParameterShape]:
        prefix, hidden = f"layers.{layer}", self.config.hidden_size
        heads, kv_heads, head_dim = self.config.heads()
        inner = self.config.intermediate_size
        inputs = 2 * hidden if is_third and not layer else hidden
        norm = f"{prefix}.input_layernorm.weight"
        if is_third or layer:
            yield self._named(norm, (hidden,), "norm")
        else:
            yield from self._optional(norm, (hidden,), "norm")
        sizes = {
            "self_attn.q_proj": (heads * head_dim, inputs),
            "self_attn.k_proj": (kv_heads * head_dim, inputs),
            "self_attn.v_proj": (kv_heads * head_dim, inputs),
            "self_attn.o_proj": (hidden, heads * head_dim),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        for name, size in sizes.items():
            yield self._named(f"{prefix}.{name}.weight", size, "linear")
            yield from self._optional(f"{prefix}.{name}.bias", size[:1], "bias")
        if f"{FIRST}.self_attn.q_norm.weight" in self.names:
            for name in ("q_norm", "k_norm"):
                yield self._named(f"{prefix}.self_attn.{name}.weight", (head_dim,), "norm")
        yield self._named(f"{prefix}.post_attention_layernorm.weight", (hidden,), "norm")

    def _named(self, name: str, shape: tuple[int, ...], kind: ParameterKind) -> ParameterShape:
        return ParameterShape(self.names.get(name, name), shape, kind)

    def _optional(
        self, name: str, shape: tuple[int, ...], kind: ParameterKind
    ) -> Iterator[ParameterShape]:
        if name in self.names:
            yield self._named(name, shape, kind)


def _canonical(name: str) -> str:
    name = name.removeprefix("model.")
    return f"{FIRST}.{name.removeprefix('midlayer.')}" if name.startswith("midlayer.") else name
