"""The two messages between host and worker: `StepBatch` down, `StepResult` up.

Both are frozen and made of numpy arrays and plain values, so that the same two cross a function
call, a pipe or a network. On the wire (`encode`, `decode`) an array is msgpack of dtype, shape and
bytes.

A *row* is an index into the worker's tables that a sequence owns from its admission to its release.
Arrays described as `[R]` have one entry for each scheduled row, in the order of `StepBatch.rows`.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Float32 = NDArray[np.float32]
Bool = NDArray[np.bool_]


Numbers = TypeVar("Numbers", bound=np.generic)


def read_only(array: NDArray[Numbers]) -> NDArray[Numbers]:
    """A view of an array for those who may look and not touch: writing to it raises."""
    view = array.view()
    view.flags.writeable = False
    return view


def copy_plain(value: Any) -> Any:
    """A copy of values such as JSON has, at a tenth of what `deepcopy` costs for the largest."""
    if isinstance(value, dict):
        return {key: copy_plain(inner) for key, inner in value.items()}
    if value is None or isinstance(value, str | int | float):
        return value
    return [copy_plain(inner) for inner in value] if type(value) is list else deepcopy(value)


class RowAdmission(msgspec.Struct, frozen=True, kw_only=True):
    """A sequence takes a row; the row's former content is void.

    Attributes:
        row: the row.
        token_ids: int32 [num_tokens], all known tokens: the prompt, and after a preemption the
            output so far. Read-only.
        num_prompt_tokens: how many of them are the prompt.
        seed: key of the sampling noise, unsigned 64 bit.
        index: n, the sequence's number within its request; part of the noise counter.
        temperature, top_k, top_p, min_p: as in `SamplingParams`.
        num_logprobs: -1: none; else the chosen token's and this many most likely ones.
        num_prompt_logprobs: the same for prompt tokens.
        processors: logits processor's name to its validated parameters; only those that act.
        num_cached: tokens whose KV a cache or a fork served.
        tenant, salt: as `tenant` and `cache_salt` of the request. What a drafter keeps beyond a sequence
            is for rows of the same two.
        keeps: whether a drafter may keep anything of the row beyond it; not for requests whose prefixes
            are not cached.
        speculative: most draft nodes that the row is ever asked for; 0: none, and the drafter observes
            it all the same; None: the config's number.
    """

    row: int
    token_ids: Int32
    num_prompt_tokens: int
    seed: int
    index: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    num_logprobs: int = -1
    num_prompt_logprobs: int = -1
    processors: dict[str, dict[str, Any]] = {}
    num_cached: int = 0
    tenant: str = ""
    salt: str = ""
    keeps: bool = True
    speculative: int | None = None


class RowRelease(msgspec.Struct, frozen=True):
    """A row is given back. Its first `num_tokens` tokens are final; anything later never was, such as
    what a step in flight still made of it."""

    row: int
    num_tokens: int


class GroupUpdate(msgspec.Struct, frozen=True, kw_only=True):
    """Changes to the block tables and blocks of one KV group, applied before the forward.

    Copies run first, in order, then table entries are set. An encoded block is data and scales, one
    unit: `encoding` says which, and a worker refuses one that is not its own.

    Attributes:
        group: index of the KV group.
        encoding: the group's encoding, `none` for plain dtype.
        rows: int32 [U], whose table changes.
        entries: int32 [U], of that table.
        blocks: int32 [U], the one now there. Block 0 is never a sequence's: padding writes go there.
        copy_from, copy_to: int32 [C], blocks to copy.
    """

    group: int
    encoding: str
    rows: Int32
    entries: Int32
    blocks: Int32
    copy_from: Int32
    copy_to: Int32


class Drafts(msgspec.Struct, frozen=True, kw_only=True):
    """Draft nodes that a drafter proposes for the next step.

    Nodes of a row are in an order in which every prefix is connected: a parent precedes its
    children.

    Attributes:
        rows: int32 [D], the rows that get drafts.
        offsets: int32 [D + 1]; nodes of `rows[i]` are `offsets[i]` to `offsets[i + 1]`.
        token_ids: int32 [N].
        parents: int32 [N], index of the parent within the row's nodes; -1: the last known token.
    """

    rows: Int32
    offsets: Int32
    token_ids: Int32
    parents: Int32


class StepBatch(msgspec.Struct, frozen=True, kw_only=True):
    """One step's work. Released rows first, then admissions, group updates, then the forward.

    Attributes:
        step_id: counts up by one.
        fence: the newest step whose result the host has committed; what older steps referenced may
            be reused.
        released: rows given back since the last step.
        admitted: rows taken.
        groups: changes of block tables; a group without changes may be left out.
        rows: int32 [R], the rows that compute in this step; none twice.
        num_computed: int32 [R], tokens of the row whose KV is in place once the steps before this one
            are done; the chunk starts here.
        num_tokens: int32 [R], tokens to compute, draft nodes not counted; at least 1.
        sample: bool [R], whether the chunk ends at the row's last known token, so that a token is
            sampled after it.
        verify: int32 [R], use the first so many draft nodes that the row holds; 0: none.
        propose: int32 [R], at most so many draft nodes for the next step; 0: none, but the drafter
            still observes.
        pending: bool [R], whether the row's last token is one the host does not know yet: the step in
            flight before this one makes it, and the worker's row has it then. A row that failed there
            gets a token all the same, of which nobody hears.
        drafter_trial: how often the host tried a drafter again that had erred. Once it has, the worker
            does not call it before this has changed, and then only for rows admitted from there on.
        num_resets: how often the prefix cache was reset. When this has changed, the drafter forgets what it
            keeps beyond rows.
    """

    step_id: int
    fence: int
    released: tuple[RowRelease, ...]
    admitted: tuple[RowAdmission, ...]
    groups: tuple[GroupUpdate, ...]
    rows: Int32
    num_computed: Int32
    num_tokens: Int32
    sample: Bool
    verify: Int32
    propose: Int32
    pending: Bool
    drafter_trial: int = 0
    num_resets: int = 0


class Logprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Logprobs of positions, ragged over the batch's rows.

    Attributes:
        offsets: int32 [R + 1]; entries of row i are `offsets[i]` to `offsets[i + 1]`.
        token_ids: int32 [L], the token at each position.
        logprobs: float32 [L], of the model's distribution, before processors and temperature.
        ranks: int32 [L], 1 for the most likely.
        top_ids: int32 [L, K], best first, K the most that any row asked for.
        top_logprobs: float32 [L, K].
    """

    offsets: Int32
    token_ids: Int32
    logprobs: Float32
    ranks: Int32
    top_ids: Int32
    top_logprobs: Float32


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of one step.

    Attributes:
        step_id: of the batch.
        offsets: int32 [R + 1]; committed tokens of row i are `offsets[i]` to `offsets[i + 1]`;
            none for a row that did not sample.
        token_ids: int32 [T], committed tokens: the accepted draft nodes, then one more.
        num_accepted: int32 [R], accepted draft nodes.
        num_tried: int32 [R], depths at which a draft node was compared.
        num_drafts: int32 [R], draft nodes that the row holds for the next step.
        confidences: float32 [sum of num_drafts], the drafter's probability of each node.
        parents: int32 [sum of num_drafts] for trees, as in `Drafts`; None when all are chains.
        logprobs: of the committed tokens, for rows that asked.
        prompt_logprobs: of the prompt tokens that this step's chunk predicts (position p + 1 from
            the logits at p), for rows that asked.
        failed: row to a line, for rows whose logits processor failed, or whose logits allow no
            token: their request ends.
        drafter_failed: what the drafter did wrong, for which the worker has cut it off in this step; "":
            nothing.
        forward_s, sampling_s, drafting_s: seconds spent.
    """

    step_id: int
    offsets: Int32
    token_ids: Int32
    num_accepted: Int32
    num_tried: Int32
    num_drafts: Int32
    confidences: Float32
    parents: Int32 | None = None
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    failed: dict[int, str] = {}
    drafter_failed: str = ""
    forward_s: float = 0.0
    sampling_s: float = 0.0
    drafting_s: float = 0.0


Message = TypeVar("Message", StepBatch, StepResult)


def encode(message: StepBatch | StepResult) -> bytes:
    """The wire form: msgpack, an array as [dtype, shape, bytes]."""
    return _encoder.encode(message)


def decode(data: bytes, kind: type[Message]) -> Message:
    """The message of a wire form.

    Raises:
        msgspec.ValidationError: the bytes are not such a message.
    """
    return msgspec.msgpack.decode(data, type=kind, dec_hook=_decode_array)


def _encode_array(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return [value.dtype.str, list(value.shape), np.ascontiguousarray(value).data]
    raise TypeError(f"{type(value).__name__} cannot be part of a message")


def _decode_array(kind: type, value: Any) -> Any:
    if getattr(kind, "__origin__", kind) is not np.ndarray:
        raise TypeError(f"{kind} cannot be part of a message")
    dtype, shape, data = value
    if np.dtype(dtype).hasobject:
        raise ValueError("an array of objects cannot be part of a message")
    return np.frombuffer(data, dtype=dtype).reshape(shape)


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_array)
