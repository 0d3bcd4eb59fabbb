"""`Drafter`: which tokens to guess.

A drafter that has a model of its own, or that wants hidden states, names in its manifest a torch-free
function `describe(facts, target_shape, options) -> DrafterFacts`; `facts` are those of `drafter.model`,
None where the config names none. So `pegboard check` and the memory ledger know what it takes, and its
blocks are set aside, before a weight is read. In the worker it makes that model through its context, by
`load_model` or `unit`, and by nothing else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from pegboard.errors import EngineError
from pegboard.interfaces.kernel import Kernel
from pegboard.interfaces.kv import KVGroup
from pegboard.interfaces.model import ModelShape
from pegboard.step import Drafts, Float32, Int32, RowAdmission

if TYPE_CHECKING:
    import torch

    from pegboard.interfaces.checkpoint import CheckpointFacts, CheckpointSource

VERSION = 1

MAX_CALL_S = 5.0
"""Longest that one call may take; `propose` may also take as long as the target's forward of the step,
since a model of its own reads a prompt in one call too. A drafter that takes longer is cut off, as one that
raises."""


@dataclass(frozen=True, slots=True)
class DraftSlots:
    """Slots past a row's last known token that a drafter's KV groups need to propose nodes.

    Attributes:
        fixed: slots whatever the number of nodes; may be negative.
        a_node: further slots for each node.
    """

    fixed: int = 0
    a_node: int = 1

    def past(self, num_nodes: int) -> int:
        """Slots past the last known token for so many nodes."""
        return max(0, self.fixed + self.a_node * num_nodes)


@dataclass(frozen=True, slots=True)
class DrafterFacts:
    """The answer of a drafter's `describe`.

    Attributes:
        shape: its own model: the shape of layers that it builds itself, `registry` for a model that a
            model plugin builds; None: it has none.
        taps: the target's hidden states that it wants, of `ModelShape.taps`.
        maps_vocabulary: whether it maps ids of its model to the target's. Without, a model of the
            registry has to have the target's tokens, by the tokenizers of the two. Where one has none,
            and for layers of one's own, the two vocabularies have to be of one size.
        quantizer: the quantizer of its model by name; `auto`: what the checkpoint says.
        slots: what its KV groups need to propose.
        kept_a_block: numbers in the activation dtype that it keeps beside each block of its first KV
            group, `DrafterContext.num_blocks` of them; they are counted with the block.
    """

    shape: ModelShape | Literal["registry"] | None = None
    taps: tuple[int, ...] = ()
    maps_vocabulary: bool = False
    quantizer: str = "auto"
    slots: DraftSlots = DraftSlots()
    kept_a_block: int = 0


@dataclass(frozen=True, slots=True)
class UnitTokens:
    """Tokens for a forward of a drafter's model, one row after the other.

    The i-th token of a row takes its slot `num_computed + i`. It sees the slots before `num_computed`
    and, of its row's tokens here, its ancestors and itself; without parents, all earlier ones. Of layers
    with `AttentionShape.skipped` the first slots stay empty, and `num_computed` is at least their number.

    Attributes:
        rows: int32 [R], of the step that is observed; none twice.
        offsets: int32 [R + 1]; tokens of `rows[i]` are `offsets[i]` to `offsets[i + 1]`.
        num_computed: int32 [R], slots of the row that hold what its tokens follow.
        token_ids: int64 [N], on the model's device.
        parents: int32 [N], index of the parent among the row's tokens here, which precedes it; -1: the
            last of the slots before. None: chains.
    """

    rows: Int32
    offsets: Int32
    num_computed: Int32
    token_ids: torch.Tensor
    parents: Int32 | None = None


class DraftUnit(ABC):
    """A drafter's own model in the worker. Its weights are loaded when the worker starts, after the
    drafter is made. What lies in its KV past the tokens that were observed is gone after the step."""

    @abstractmethod
    def forward(self, tokens: UnitTokens, hidden: torch.Tensor | None = None) -> torch.Tensor:
        """Runs tokens through the model; as often as one likes within `propose`, and in no other
        call.

        Args:
            tokens: of rows of the step, within the tokens that were observed and the slots that were
                set aside past them for the nodes asked for.
            hidden: [N, any size], what layers of one's own take beside the token ids.

        Returns:
            Hidden states [N, hidden_size]: of a model of the registry, after the final norm.

        Raises:
            EngineError: the rows have no such slots.
        """

    @abstractmethod
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [num_rows, vocab_size] of a model of the registry."""


class OwnLayers(Protocol):
    """Layers that a drafter builds itself."""

    def __call__(
        self, token_ids: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor | None
    ) -> torch.Tensor:
        """Hidden states [N, hidden_size] of token ids and positions, int64 [N], and what `forward` was
        given beside them."""


BuildLayers = Callable[[Any], OwnLayers]
"""Makes layers of one's own of a `models.layers.LayerBuilder`, which reads the tensors that their shape
names."""


def _no_worker(what: str) -> EngineError:
    return EngineError(f"a drafter's context was asked for {what}; allowed: in a worker")


@dataclass(frozen=True)
class DrafterContext:
    """The context of a drafter's factory. Its methods are the worker's; of a context that was made without
    one they raise EngineError.

    Attributes:
        num_speculative_tokens: most nodes a row.
        vocab_size: of the target.
        max_num_seqs: rows.
        max_model_len: most tokens a row.
        model: reference of the drafter's own model, as the config gives it.
        dtype: activation dtype of the target.
        device: `cpu` or `cuda`.
        num_threads: threads it may use on a CPU.
        target_shape: the target.
        facts: those of `model`; None: the config names none.
        groups: KV groups of the drafter's own model, in the order of their block tables.
        num_blocks: of each of them, block 0 included.
        shape: the drafter's own model; None: it has none. Of the same tokens the embeddings of two models
            may have different numbers of rows: what the target says may lie past the drafter's.
    """

    num_speculative_tokens: int
    vocab_size: int
    max_num_seqs: int
    max_model_len: int
    model: str | None = None
    dtype: str = "float32"
    device: str = "cpu"
    num_threads: int = 1
    target_shape: ModelShape | None = None
    facts: CheckpointFacts | None = None
    groups: tuple[KVGroup, ...] = ()
    num_blocks: tuple[int, ...] = ()
    shape: ModelShape | None = None

    def unit(
        self, shape: ModelShape, build: BuildLayers, source: CheckpointSource | None = None
    ) -> DraftUnit:
        """The unit of layers of one's own, of the shape that `describe` answered.

        Args:
            source: where their tensors are; None: in the checkpoint of `drafter.model`.

        Raises:
            InterfaceNotSatisfied: `describe` answered another shape, or the model is made already.
        """
        raise _no_worker("a model of its own")

    def load_model(self, ref: str, quantizer: str = "auto") -> DraftUnit:
        """The unit of `drafter.model`, as the model plugin builds it.

        Raises:
            InterfaceNotSatisfied: `describe` did not answer `registry`, the config names another model
                or quantizer, or the model is made already.
        """
        raise _no_worker("a model of its own")

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Rows of the target's embedding, int64 [N] -> [N, hidden_size], once weights are loaded."""
        raise _no_worker("the target's embedding")

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The target's head: [N, hidden_size] -> float32 [N, vocab_size], once weights are loaded."""
        raise _no_worker("the target's head")

    def kernel(self, operation: str, weight_format: str = "float") -> Kernel:
        """The worker's kernel of an operation on weights of a format.

        Raises:
            InterfaceNotSatisfied: no model of the worker needs one.
        """
        raise _no_worker("a kernel")


@dataclass(frozen=True, slots=True)
class Observation:
    """The results of one execute, for every row that computed and did not fail, prefill chunks included.
    Its arrays are read-only.

    Attributes:
        rows: int32 [R].
        offsets: int32 [R + 1]; entries of a row in the arrays below.
        token_ids: int32 [N], tokens whose hidden states were computed and kept: prompt chunks and
            accepted nodes.
        positions: int32 [N], of these tokens in their sequences.
        taps: each of the drafter's taps to its hidden states [N, hidden_size].
        next_offsets: int32 [R + 1]; entries of a row in `next_token_ids`.
        next_token_ids: int32 [T], tokens committed in this execute.
        propose: int32 [R], most nodes to propose for each row.
        num_cached: int32 [R], tokens of the row that a cache or a fork served; they are not observed, and
            their KV is there. Where the drafter was cut off while they were computed, what it would have
            written is not: its guesses may then be worse.
        block_tables: for each of the drafter's KV groups int32 [R, width], blocks by table entry.
    """

    rows: Int32
    offsets: Int32
    token_ids: Int32
    positions: Int32
    taps: dict[int, torch.Tensor]
    next_offsets: Int32
    next_token_ids: Int32
    propose: Int32
    num_cached: Int32
    block_tables: tuple[Int32, ...] = ()


class Drafter(ABC):
    """Guesses ahead, on the worker. It keeps no state that a rejected token could spoil.

    Requests do not depend on it. When a method raises, takes longer than `MAX_CALL_S`, or proposes what
    cannot be used, the drafter is cut off, and no method is called. After a pause, `release` is called
    for the rows that it had, whether or not their sequences still run, and it begins anew with those
    that are admitted from then on; other rows are not shown to it. A row whose request failed in a step
    is given back before that step is shown, and is not in it.
    """

    taps: tuple[int, ...] = ()
    """Hidden states that it wants, of `ModelShape.taps`. Read once, before weights load: others than the
    model's are refused. Where the manifest names `describe`, that says it."""

    @abstractmethod
    def admit(self, admission: RowAdmission, block_tables: tuple[Int32, ...]) -> None:
        """A sequence took a row: its known tokens, and the seed and parameters that a drafter which
        samples shares its noise by. Tokens that a cache served bring no taps. Where `keeps` is false,
        nothing of the row may be kept beyond it.

        block_tables: for each of the drafter's KV groups int32 [width], the row's blocks.
        """

    @abstractmethod
    def release(self, row: int, num_tokens: int) -> None:
        """The row is given back. Its first `num_tokens` tokens are final; later ones never were."""

    def forget(self) -> None:  # noqa: B027 - most drafters keep nothing
        """The prefix cache was reset: what is kept beyond rows is void, and nothing of the rows that are
        there now may be kept."""

    @abstractmethod
    def propose(self, seen: Observation) -> tuple[Drafts, Float32]:
        """Draft nodes for the next step, and the drafter's probability of each node.

        Nodes are proposed for rows in `seen`, each row once, at most `seen.propose` of them; tokens are
        the target's; probabilities are from 0 to 1. A step may verify the first of a row's nodes alone, so
        the likeliest paths stand first. Where the attention backend has no `query_mask`, of a
        tree only the path of first children is kept."""


class SampledDrafter(Drafter):
    """A drafter that draws its tokens at random, and says from what. Manifest promise: `probabilities`."""

    @abstractmethod
    def propose_sampled(self, seen: Observation) -> tuple[Drafts, torch.Tensor]:
        """As `propose`, in its place where drafts are verified by rejection (`drafter.verification`):
        chains, and the distributions that their tokens were drawn from.

        A token is kept with the probability p / q, so that answers have the target's distribution p
        only where the token was really drawn from q. No check can tell; therefore
        - each token is drawn from the distribution answered for it, given the tokens before it. One that
          is no draw has the probability 1.
        - how many nodes a row gets depends on nothing that this call draws for it: leaving out unlikely
          guesses would make the likely ones too frequent.
        - the draws have nothing in common with Philox words of the row's seed whose counter ends in 1:
          those are the core's coins. The noise of the operation `sample` may be used.

        Returns:
            The nodes, and float32 [N, vocab_size] on the target's device, a row for each of them: 0 or
            more, in all 1, and more than 0 at the node's token. The core copies it.
        """
