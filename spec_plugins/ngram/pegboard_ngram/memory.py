"""The memory that the drafters hold, for the ledger: the most that any text can take."""

from __future__ import annotations

from pegboard.interfaces.workload import Workload
from pegboard_ngram.options import LookupOptions, NgramOptions, SuffixOptions

LISTED_TOKEN_BYTES = 48
"""Of a token in a list: the place, with room to grow, and the number."""

TABLE_ENTRY_BYTES = 96
"""Of an n-gram in a table that has just grown: key, hash and places."""

READING_TOKEN_BYTES = 128
"""Of a token while a row's text is read, one row at a time: the whole of it, and keys of n-grams."""

AUTOMATON_TOKEN_BYTES = 420
"""Of a token in a suffix automaton: two states, one of which branches."""


def estimate_ngram(workload: Workload) -> int:
    """Bytes of the tables of all rows."""
    options = workload.options
    assert isinstance(options, NgramOptions)
    num_tables = options.prompt_lookup_max - options.prompt_lookup_min + 1
    of_token = 2 * LISTED_TOKEN_BYTES + num_tables * TABLE_ENTRY_BYTES
    rows = workload.max_num_seqs * _num_searched(workload, options) * of_token
    return rows + workload.max_model_len * READING_TOKEN_BYTES


def estimate_suffix(workload: Workload) -> int:
    """Bytes of the automata of all rows, and of the recent outputs."""
    options = workload.options
    assert isinstance(options, SuffixOptions)
    of_row = _num_searched(workload, options) * AUTOMATON_TOKEN_BYTES
    if options.recent_tokens:  # its output too is kept, until it ends
        of_row += min(workload.max_model_len, options.recent_tokens) * LISTED_TOKEN_BYTES
    recent = options.recent_tokens * AUTOMATON_TOKEN_BYTES
    reading = workload.max_model_len * READING_TOKEN_BYTES
    return workload.max_num_seqs * of_row + recent + reading


def _num_searched(workload: Workload, options: LookupOptions) -> int:
    return min(workload.max_model_len, options.max_tokens)
