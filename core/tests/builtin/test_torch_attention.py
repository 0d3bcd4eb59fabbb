"""Long prompts and large batches, which the backend cuts into tiles, equal dense attention."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from pegboard.builtin import torch_attention
from pegboard.builtin.torch_attention import TorchAttention
from pegboard.builtin.torch_attention_layout import layout
from pegboard.errors import ConfigError
from pegboard.interfaces.attention import AttentionBatch, AttentionContext
from pegboard.interfaces.kv import KVGroup
from pegboard.interfaces.model import AttentionShape
from pegboard.testing.attention_reference import ReferenceRotary

HEADS, KV_HEADS, HEAD_DIM = 6, 2, 24


@pytest.mark.parametrize("tile_elements", [1, 2**11, 2**22])
@pytest.mark.parametrize("window", [None, 1, 50, 200])
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_a_mixed_step_equals_dense_attention(
    monkeypatch: pytest.MonkeyPatch, block_size: int, window: int | None, tile_elements: int
) -> None:
    monkeypatch.setattr(torch_attention, "TILE_ELEMENTS", tile_elements)
    # Tokens in KV and tokens of the step: prefills of several tiles, spans of one length, decodes.
    computed = [0, 260, 17, 300, 5, 0, 1, 64]
    lengths = [333, 129, 5, 5, 5, 1, 1, 1]
    generator = torch.Generator().manual_seed(block_size)
    totals = [c + n for c, n in zip(computed, lengths, strict=True)]
    group = KVGroup((0,), KV_HEADS, HEAD_DIM, block_size, window, "none", "float64")
    width = -(-max(totals) // block_size)
    num_blocks = 1 + sum(-(-total // block_size) for total in totals)
    order = (torch.randperm(num_blocks - 1, generator=generator) + 1).tolist()
    table = torch.full((len(totals), width), num_blocks - 1, dtype=torch.int32)
    for row, total in enumerate(totals):
        for entry in range(-(-total // block_size)):
            table[row, entry] = order.pop()

    def random(num_heads: int, size: int) -> torch.Tensor:
        return torch.randn(size, num_heads, HEAD_DIM, generator=generator, dtype=torch.float64)

    keys = [random(KV_HEADS, total) for total in totals]
    values = [random(KV_HEADS, total) for total in totals]
    queries = [random(HEADS, length) for length in lengths]
    kv = {
        spec.name: torch.full((num_blocks, *spec.shape), 1e6, dtype=torch.float64)
        for spec in layout(group)
    }
    for row, past in enumerate(computed):
        at = np.arange(past)
        blocks = table[row].numpy()[at // block_size].astype(np.int64)
        slots = torch.from_numpy(blocks * block_size + at % block_size)
        kv["k"].flatten(0, 1)[slots] = keys[row][:past]
        kv["v"].flatten(0, 1)[slots] = values[row][:past]

    backend = TorchAttention(
        AttentionContext(
            layers=(AttentionShape(HEADS, KV_HEADS, HEAD_DIM, scale=0.3, window=window),),
            groups=(group,),
            max_num_seqs=len(totals),
            dtype="float64",
            device="cpu",
            num_threads=1,
            rotary=ReferenceRotary(),
        )
    )
    backend.bind([kv])
    backend.prepare(
        AttentionBatch(
            positions=torch.cat(
                [torch.arange(c, t) for c, t in zip(computed, totals, strict=True)]
            ),
            query_starts=torch.tensor(np.cumsum([0, *lengths])),
            num_computed=torch.tensor(computed),
            block_tables=(table,),
        )
    )
    k, v = (
        torch.cat([x[past:] for x, past in zip(xs, computed, strict=True)]) for xs in (keys, values)
    )
    got = backend.forward(0, torch.cat(queries), k, v, None)

    for row, past in enumerate(computed):
        query, key = torch.arange(past, totals[row])[:, None], torch.arange(totals[row])
        mask = key <= query if window is None else (key <= query) & (key > query - window)
        want = scaled_dot_product_attention(
            queries[row].transpose(0, 1)[None],
            keys[row].transpose(0, 1)[None],
            values[row].transpose(0, 1)[None],
            attn_mask=mask,
            scale=0.3,
            enable_gqa=True,
        )[0].transpose(0, 1)
        first = sum(lengths[:row])
        torch.testing.assert_close(got[first : first + lengths[row]], want)


def test_an_encoding_that_it_lacks_is_refused() -> None:
    allowed = "none, fp8_e4m3, int8"
    with pytest.raises(ConfigError, match=rf"kv_cache\.encoding: 'int4'.*allowed: {allowed}"):
        layout(KVGroup((0,), KV_HEADS, HEAD_DIM, 16, None, "int4", "float32"))


def test_a_block_in_codes_has_a_byte_a_number_and_four_a_head() -> None:
    for encoding in ("fp8_e4m3", "int8"):
        specs = layout(KVGroup((0,), KV_HEADS, HEAD_DIM, 16, None, encoding, "float32"))
        bytes_of = {"int8": 1, "uint8": 1, "float32": 4}
        total = sum(np.prod(spec.shape) * bytes_of[spec.dtype] for spec in specs)
        assert total == 2 * 16 * KV_HEADS * (HEAD_DIM + 4)
