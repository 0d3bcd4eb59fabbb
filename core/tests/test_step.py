"""The two messages cross the wire whole."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from pegboard.step import (
    GroupUpdate,
    Logprobs,
    RowAdmission,
    RowRelease,
    StepBatch,
    StepResult,
    decode,
    encode,
)


def ints(*values: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array(values, dtype=np.int32)


def floats(*values: float) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.array(values, dtype=np.float32)


BATCH = StepBatch(
    step_id=41,
    fence=40,
    released=(RowRelease(7, 90),),
    admitted=(
        RowAdmission(
            row=2,
            token_ids=ints(5, 6, 7),
            num_prompt_tokens=2,
            seed=2**64 - 1,
            index=3,
            temperature=0.7,
            top_k=40,
            top_p=0.9,
            min_p=0.05,
            num_logprobs=5,
            num_prompt_logprobs=0,
            processors={"logit_bias": {"logit_bias": {11: -1.5}}, "mine": {"words": ["a", None]}},
            num_cached=2,
            tenant="a",
            salt="ü",
            speculative=3,
        ),
    ),
    groups=(
        GroupUpdate(
            group=0,
            encoding="none",
            rows=ints(2, 2),
            entries=ints(0, 1),
            blocks=ints(14, 9),
            copy_from=ints(),
            copy_to=ints(),
        ),
        GroupUpdate(
            group=1,
            encoding="int8",
            rows=ints(),
            entries=ints(),
            blocks=ints(),
            copy_from=ints(3),
            copy_to=ints(8),
        ),
    ),
    rows=ints(2, 4),
    num_computed=ints(0, 17),
    num_tokens=ints(3, 1),
    sample=np.array([True, False]),
    verify=ints(0, 4),
    propose=ints(6, 0),
    pending=np.array([False, True]),
    drafter_trial=3,
    num_resets=2,
)

LOGPROBS = Logprobs(
    offsets=ints(0, 1, 1),
    token_ids=ints(9),
    logprobs=floats(-0.25),
    ranks=ints(1),
    top_ids=np.array([[9, 4]], dtype=np.int32),
    top_logprobs=np.array([[-0.25, -2.5]], dtype=np.float32),
)

RESULT = StepResult(
    step_id=41,
    offsets=ints(0, 1, 4),
    token_ids=ints(9, 1, 2, 3),
    num_accepted=ints(0, 2),
    num_tried=ints(0, 3),
    num_drafts=ints(2, 3),
    confidences=floats(0.5, 0.25, 1.0, 0.125, 0.0),
    parents=ints(-1, 0, -1, -1, 1),
    logprobs=LOGPROBS,
    prompt_logprobs=LOGPROBS,
    failed={4: "logits processor 'mine' failed: ValueError: no"},
    drafter_failed="ValueError: no (mine.py:7 in propose)",
    forward_s=0.5,
    sampling_s=0.25,
    drafting_s=0.125,
)


def assert_same(got: Any, want: Any) -> None:
    """Equal in type, dtype, shape and value, all the way down."""
    assert type(got) is type(want)
    if isinstance(want, np.ndarray):
        assert got.dtype == want.dtype and got.shape == want.shape
        assert np.array_equal(got, want)
    elif isinstance(want, msgspec.Struct):
        for name in want.__struct_fields__:
            assert_same(getattr(got, name), getattr(want, name))
    elif isinstance(want, tuple):
        assert len(got) == len(want)
        for one, other in zip(got, want, strict=True):
            assert_same(one, other)
    else:
        assert got == want


def test_a_batch_survives_the_wire() -> None:
    assert_same(decode(encode(BATCH), StepBatch), BATCH)


def test_a_result_survives_the_wire() -> None:
    assert_same(decode(encode(RESULT), StepResult), RESULT)


def test_absent_parts_stay_absent() -> None:
    bare = msgspec.structs.replace(RESULT, parents=None, logprobs=None, prompt_logprobs=None)
    assert_same(decode(encode(bare), StepResult), bare)


def test_arrays_that_are_not_contiguous_survive() -> None:
    every_other = np.arange(8, dtype=np.int32)[::2]
    batch = msgspec.structs.replace(BATCH, rows=every_other)
    assert decode(encode(batch), StepBatch).rows.tolist() == [0, 2, 4, 6]


def damaged(**changes: Any) -> bytes:
    fields = msgspec.msgpack.decode(encode(RESULT))
    return msgspec.msgpack.encode({**fields, **changes})


@pytest.mark.parametrize(
    "data",
    [
        b"",
        encode(RESULT)[:-3],
        encode(BATCH),
        damaged(step_id="41"),
        damaged(token_ids=["|O", [1], b"12345678"]),
        damaged(token_ids=["<i4", [3], b"1234"]),
        damaged(token_ids="tokens"),
        damaged(offsets=None),
    ],
    ids=["empty", "cut", "other message", "type", "objects", "too short", "text", "missing"],
)
def test_damaged_bytes_are_refused(data: bytes) -> None:
    with pytest.raises((msgspec.ValidationError, msgspec.DecodeError)):
        decode(data, StepResult)
