"""What the drafter holds beside its head's weights and KV, for the ledger. Torch-free."""

from __future__ import annotations

from pegboard.interfaces.dtypes import ITEM_BYTES
from pegboard.interfaces.workload import Workload
from pegboard_eagle.options import EagleOptions

MAX_WAITING = 16
"""Tokens of a row that may wait to be computed."""

FEATURES_A_ROW = 3
"""The last token's, and those of the prompts of as many rows twice."""


def estimate(workload: Workload) -> int:
    """Bytes of the tapped states that wait, and of features. Those of blocks are counted there."""
    options = workload.options
    assert isinstance(options, EagleOptions)
    num_taps = 3 if options.taps == "auto" else len(options.taps)
    states_a_row = MAX_WAITING * num_taps + FEATURES_A_ROW
    size = workload.shape.hidden_size * ITEM_BYTES[workload.dtype]
    return workload.max_num_seqs * states_a_row * size
