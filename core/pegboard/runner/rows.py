"""The worker's tables: everything it keeps of the sequences that own a row."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pegboard.errors import EngineError
from pegboard.interfaces.kv import KVGroup
from pegboard.runner.drafts import DraftTable, widen
from pegboard.step import Bool, Float32, GroupUpdate, Int32, Int64, RowAdmission


class Rows:
    """Tables indexed by row; a step's arrays are read from them at once, without a loop.

    Attributes:
        token_ids: int32 [max_num_seqs, width], prompt and output.
        num_known: int64 [max_num_seqs], tokens in it.
        sampled_in: int64 [max_num_seqs], the step that made the last of them; -1: none, it was known.
        num_prompt: int64 [max_num_seqs], how many of them are the prompt.
        seed: uint64 [max_num_seqs].
        index: int64 [max_num_seqs], the sequence's number in its request.
        temperature, top_p, min_p: float32 [max_num_seqs].
        top_k: int64 [max_num_seqs].
        num_cached: int64 [max_num_seqs], tokens whose KV a cache or a fork served.
        num_logprobs, num_prompt_logprobs: int64 [max_num_seqs]; -1: none.
        block_tables: for each KV group int32 [max_num_seqs, width], blocks by table entry.
        drafts: the nodes to verify next.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        vocab_size: int,
        groups: Sequence[KVGroup],
        *,
        keeps_trees: bool,
    ) -> None:
        """
        Args:
            keeps_trees: see `DraftTable`.
        """
        self._groups = groups
        self.token_ids: Int32 = np.zeros((max_num_seqs, max_model_len), dtype=np.int32)
        self.num_known: Int64 = np.zeros(max_num_seqs, dtype=np.int64)
        self.sampled_in: Int64 = np.full(max_num_seqs, -1, dtype=np.int64)
        self.num_prompt: Int64 = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_cached: Int64 = np.zeros(max_num_seqs, dtype=np.int64)
        self.seed: NDArray[np.uint64] = np.zeros(max_num_seqs, dtype=np.uint64)
        self.index: Int64 = np.zeros(max_num_seqs, dtype=np.int64)
        self.temperature: Float32 = np.zeros(max_num_seqs, dtype=np.float32)
        self.top_k: Int64 = np.zeros(max_num_seqs, dtype=np.int64)
        self.top_p: Float32 = np.zeros(max_num_seqs, dtype=np.float32)
        self.min_p: Float32 = np.zeros(max_num_seqs, dtype=np.float32)
        self.num_logprobs: Int64 = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_prompt_logprobs: Int64 = np.zeros(max_num_seqs, dtype=np.int64)
        self.block_tables: list[Int32] = [
            np.zeros((max_num_seqs, -(-max_model_len // group.block_size)), dtype=np.int32)
            for group in groups
        ]
        self.drafts = DraftTable(max_num_seqs, vocab_size, keeps_trees=keeps_trees)

    def admit(self, admission: RowAdmission) -> None:
        """A sequence takes a row; what the row held is void."""
        row = admission.row
        num_tokens = len(admission.token_ids)
        self.token_ids = widen(self.token_ids, num_tokens)
        self.token_ids[row, :num_tokens] = admission.token_ids
        self.num_known[row] = num_tokens
        self.sampled_in[row] = -1
        self.num_prompt[row] = admission.num_prompt_tokens
        self.num_cached[row] = admission.num_cached
        self.seed[row] = admission.seed
        self.index[row] = admission.index
        self.temperature[row] = admission.temperature
        self.top_k[row] = admission.top_k
        self.top_p[row] = admission.top_p
        self.min_p[row] = admission.min_p
        self.num_logprobs[row] = admission.num_logprobs
        self.num_prompt_logprobs[row] = admission.num_prompt_logprobs
        self.drafts.counts[row] = 0

    def release(self, row: int) -> None:
        """A row is given back."""
        self.num_known[row] = 0
        self.drafts.counts[row] = 0

    def update_tables(self, update: GroupUpdate) -> None:
        """Sets entries of a group's block tables."""
        if not len(update.entries):
            return
        table = widen(self.block_tables[update.group], int(update.entries.max()) + 1)
        table[update.rows, update.entries] = update.blocks
        self.block_tables[update.group] = table

    def check_encoding(self, update: GroupUpdate) -> None:
        """Raises EngineError when the update is for blocks of another encoding."""
        own = self._groups[update.group].encoding
        if update.encoding != own:
            raise EngineError(
                f"KV group {update.group}: the host's encoding is {update.encoding!r}, "
                f"this worker's {own!r}"
            )

    def tables(self, groups: range, rows: Int32, num_slots: int) -> tuple[Int32, ...]:
        """Block tables of some groups: of each int32 [R, enough for so many slots], for rows int32 [R]."""
        return tuple(
            self.block_tables[group][rows, : -(-num_slots // self._groups[group].block_size)]
            for group in groups
        )

    def slots(self, group: int, rows: Int32, tokens: Int64) -> Int64:
        """Slots of tokens of rows in a group's blocks: block * block_size + offset.

        rows: int32 [N]; tokens: int64 [N], their numbers in the row -> int64 [N].
        """
        block_size = self._groups[group].block_size
        blocks = self.block_tables[group][rows, tokens // block_size].astype(np.int64)
        return blocks * block_size + tokens % block_size

    def commit(self, rows: Int32, token_ids: Int32, lengths: Int64, step_id: int) -> None:
        """Appends a step's tokens: `lengths[i]` of those in `token_ids[i]`, [num_rows, width], to row i."""
        known = self.num_known[rows]
        self.token_ids = widen(self.token_ids, int((known + lengths).max(initial=0)))
        committed: Bool = np.arange(token_ids.shape[1]) < lengths[:, None]
        i, j = np.nonzero(committed)
        self.token_ids[rows[i], known[i] + j] = token_ids[i, j]
        self.num_known[rows] = known + lengths
        self.sampled_in[rows[lengths > 0]] = step_id
