"""Drafters with a model of their own, made through nothing but their context.

`SecondModel` runs a second model of the registry, with KV groups of its own. `OneLayer` is a single
decoder layer over the target's last hidden states, embedding and head; it proposes chains, or trees.
Both note what they proposed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from pegboard.interfaces.checkpoint import CheckpointFacts
from pegboard.interfaces.drafter import (
    Drafter,
    DrafterContext,
    DrafterFacts,
    DraftSlots,
    Observation,
    UnitTokens,
)
from pegboard.interfaces.model import AttentionShape, ModelShape, ParameterShape
from pegboard.step import Drafts, Float32, Int32, RowAdmission

if TYPE_CHECKING:
    import torch

    from pegboard.models.layers import LayerBuilder

ROOT = -1


@dataclass(frozen=True, slots=True)
class Proposal:
    """Nodes, and the known tokens that they follow."""

    known: tuple[int, ...]
    token_ids: tuple[int, ...]
    parents: tuple[int, ...]


class _ModelDrafter(Drafter):
    """Keeps rows' tokens, and notes what is proposed."""

    def __init__(self, context: DrafterContext) -> None:
        self.context = context
        self.proposals: list[Proposal] = []
        self.rows: dict[int, list[int]] = {}

    def admit(self, admission: RowAdmission, block_tables: tuple[Int32, ...]) -> None:
        self.rows[admission.row] = admission.token_ids.tolist()

    def release(self, row: int, num_tokens: int) -> None:
        del self.rows[row]

    def propose(self, seen: Observation) -> tuple[Drafts, Float32]:
        for i, row in enumerate(seen.rows.tolist()):
            new = seen.next_token_ids[seen.next_offsets[i] : seen.next_offsets[i + 1]]
            self.rows[row] += new.tolist()
        nodes = self.guess(seen)
        for row, (token_ids, parents) in nodes.items():
            self.proposals.append(Proposal(tuple(self.rows[row]), tuple(token_ids), tuple(parents)))
        listed = [pair for pairs in nodes.values() for pair in zip(*pairs, strict=True)]
        drafts = Drafts(
            rows=np.array(list(nodes), np.int32),
            offsets=_starts([len(token_ids) for token_ids, _ in nodes.values()]),
            token_ids=np.array([token for token, _ in listed], np.int32),
            parents=np.array([parent for _, parent in listed], np.int32),
        )
        return drafts, np.full(len(listed), 0.5, np.float32)

    def guess(self, seen: Observation) -> dict[int, tuple[list[int], list[int]]]:
        """Row to tokens and parents of its nodes."""
        raise NotImplementedError

    def _tensor(self, token_ids: list[int]) -> torch.Tensor:
        import torch

        return torch.tensor(token_ids, dtype=torch.int64, device=self.context.device)


def describe_second_model(
    facts: CheckpointFacts | None, target: ModelShape, options: None
) -> DrafterFacts:
    """A model of the registry. The last node is not computed, so m nodes need m - 1 slots."""
    return DrafterFacts(shape="registry", slots=DraftSlots(fixed=-1, a_node=1))


class SecondModel(_ModelDrafter):
    """Proposes what a second model says, greedily."""

    manifest: ClassVar[dict[str, Any]] = {
        "describe": "pegboard.testing.model_drafters:describe_second_model",
        "promises": ["draft_model"],
    }

    def __init__(self, context: DrafterContext) -> None:
        super().__init__(context)
        assert context.model is not None
        self.unit = context.load_model(context.model)

    def guess(self, seen: Observation) -> dict[int, tuple[list[int], list[int]]]:
        starts = seen.positions[seen.offsets[:-1]]
        chunks = []
        for i, row in enumerate(seen.rows.tolist()):
            end = int(seen.positions[seen.offsets[i + 1] - 1]) + 1
            # The last token is not observed yet; it is computed again with the next observation.
            stop = len(self.rows[row]) if seen.propose[i] else end
            chunks.append(self.rows[row][int(starts[i]) : stop])
        offsets = _starts([len(chunk) for chunk in chunks])
        tokens = [token for chunk in chunks for token in chunk]
        hidden = self.unit.forward(UnitTokens(seen.rows, offsets, starts, self._tensor(tokens)))
        going = np.flatnonzero(seen.propose)
        guesses: dict[int, list[int]] = {int(row): [] for row in seen.rows[going]}
        last = hidden[self._tensor((offsets[1:][going] - 1).tolist())]
        depth = 0
        while len(going):
            best = self.unit.logits(last).argmax(dim=1)
            for row, token in zip(seen.rows[going].tolist(), best.tolist(), strict=True):
                guesses[row].append(token)
            depth += 1
            more = seen.propose[going] > depth
            going, newest = going[more], best[self._tensor(np.flatnonzero(more).tolist())]
            if len(going):
                rows = seen.rows[going]
                computed = [len(self.rows[row]) + depth - 1 for row in rows.tolist()]
                step = UnitTokens(
                    rows, _starts([1] * len(rows)), np.array(computed, np.int32), newest
                )
                last = self.unit.forward(step)
        return {row: (guess, list(range(ROOT, len(guess) - 1))) for row, guess in guesses.items()}


def describe_one_layer(
    facts: CheckpointFacts | None, target: ModelShape, options: None
) -> DrafterFacts:
    """One decoder layer in the target's sizes. Its slot t holds what follows from token t's hidden state
    and token t + 1, the first node's in that of the last known token: m nodes, of which at most m - 1 have
    children, need m - 2 slots."""
    if facts is None:
        return DrafterFacts()
    attention = target.attention[0]
    shape = ModelShape(
        architecture="OneLayer",
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=target.intermediate_size,
        max_position=target.max_position,
        norm_eps=target.norm_eps,
        attention=(
            AttentionShape(
                attention.num_heads, attention.num_kv_heads, attention.head_dim, attention.scale
            ),
        ),
        rope=target.rope,
        tied_embeddings=False,
        qk_norm=False,
        parameters=tuple(
            ParameterShape(name, fact.shape, "linear" if len(fact.shape) == 2 else "norm")
            for name, fact in facts.tensors.items()
        ),
    )
    return DrafterFacts(
        shape=shape, taps=(target.num_layers,), slots=DraftSlots(fixed=-2, a_node=1)
    )


def write_one_layer(folder: Path, target: Path) -> Path:
    """Writes a model for `OneLayer`: the first layer of a tiny target again, behind a product that mixes
    embedding and hidden state.

    Args:
        folder: made where it does not exist.
        target: a folder of `tiny.write_tiny_model`.

    Returns:
        The folder.
    """
    import torch
    from safetensors.torch import load_file, save_file

    tensors = load_file(target / "model.safetensors")
    size = json.loads((target / "config.json").read_text())["hidden_size"]
    own = {name: one for name, one in tensors.items() if name.startswith("model.layers.0.")}
    noise = torch.randn(
        (size, 2 * size), generator=torch.Generator().manual_seed(2), dtype=torch.float64
    )
    own["fc.weight"] = (noise / (2 * size) ** 0.5).to(tensors["model.norm.weight"].dtype)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(own, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"architectures": ["OneLayer"]}))
    return folder


class _Layer:
    """x = fc([embedding of the next token, hidden state]), then one decoder layer."""

    def __init__(self, builder: LayerBuilder, context: DrafterContext) -> None:
        prefix = "model.layers.0"
        self.context = context
        self.head_dim = builder.shape.attention[0].head_dim
        self.fc = builder.linear("fc")
        self.input_norm = builder.norm(f"{prefix}.input_layernorm")
        self.qkv = builder.linears([f"{prefix}.self_attn.{part}_proj" for part in "qkv"])
        self.attention = builder.attention_layer(0, builder.rotary())
        self.o = builder.linear(f"{prefix}.self_attn.o_proj")
        self.norm = builder.norm(f"{prefix}.post_attention_layernorm")
        self.gate_up = builder.linears([f"{prefix}.mlp.{part}_proj" for part in ("gate", "up")])
        self.activation = builder.silu_mul()
        self.down = builder.linear(f"{prefix}.mlp.down_proj")

    def __call__(
        self, token_ids: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor | None
    ) -> torch.Tensor:
        import torch

        assert hidden is not None
        x = self.fc(torch.cat((self.context.embed(token_ids), hidden), dim=1))
        q, k, v = (part.view(len(x), -1, self.head_dim) for part in self.qkv(self.input_norm(x)))
        x = x + self.o(self.attention(q, k, v))
        gate, up = self.gate_up(self.norm(x))
        return x + self.down(self.activation.silu_mul(gate, up))


class OneLayer(_ModelDrafter):
    """Proposes by one layer over the target's states; `width` children a node, in the order of depth."""

    manifest: ClassVar[dict[str, Any]] = {
        "describe": "pegboard.testing.model_drafters:describe_one_layer",
        "promises": ["draft_model"],
    }
    width: ClassVar[int] = 1

    def __init__(self, context: DrafterContext) -> None:
        super().__init__(context)
        assert context.target_shape is not None
        shape = describe_one_layer(context.facts, context.target_shape, None).shape
        assert isinstance(shape, ModelShape)
        self.unit = context.unit(shape, lambda builder: _Layer(builder, context))
        self.tap = context.target_shape.num_layers

    def guess(self, seen: Observation) -> dict[int, tuple[list[int], list[int]]]:
        ends = seen.positions[seen.offsets[1:] - 1] + 1
        starts = seen.positions[seen.offsets[:-1]]
        following = [
            token
            for row, start, end in zip(seen.rows.tolist(), starts, ends, strict=True)
            for token in self.rows[row][start + 1 : end + 1]
        ]
        tokens = UnitTokens(seen.rows, seen.offsets, starts, self._tensor(following))
        states = self.unit.forward(tokens, seen.taps[self.tap])
        return {
            int(seen.rows[i]): self._tree(
                int(seen.rows[i]),
                int(ends[i]),
                int(seen.propose[i]),
                states[seen.offsets[i + 1] - 1],
            )
            for i in np.flatnonzero(seen.propose)
        }

    def _tree(
        self, row: int, end: int, num_nodes: int, root: torch.Tensor
    ) -> tuple[list[int], list[int]]:
        """Tokens and parents of a row's nodes; a level is run with those before it."""
        import torch

        token_ids: list[int] = []
        parents: list[int] = []
        frontier, states = [ROOT], {ROOT: root}
        while True:
            first = len(token_ids)
            for node in frontier:
                best = self.context.logits(states[node][None])[0].topk(self.width).indices
                for token in best.tolist()[: num_nodes - len(token_ids)]:
                    token_ids.append(token)
                    parents.append(node)
            if len(token_ids) == num_nodes:
                return token_ids, parents
            frontier = list(range(first, len(token_ids)))
            tokens = UnitTokens(
                np.array([row], np.int32),
                _starts([len(token_ids)]),
                np.array([end], np.int32),
                self._tensor(token_ids),
                np.array(parents, np.int32),
            )
            hidden = torch.stack([states[parent] for parent in parents])
            states |= dict(enumerate(self.unit.forward(tokens, hidden)))


class Branching(OneLayer):
    """Trees of two children a node."""

    manifest: ClassVar[dict[str, Any]] = OneLayer.manifest
    width = 2


def _starts(counts: list[int]) -> Int32:
    return np.array([0, *np.cumsum(counts).tolist()], np.int32)
