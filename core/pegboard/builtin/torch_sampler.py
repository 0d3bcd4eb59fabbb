"""The kernels `sample` and `probabilities` in plain torch: filters, Gumbel noise from Philox, argmax.

Noise is computed only for ids that can win: it is bounded, so an id whose logit lies further than
the bound below a score already seen cannot be the argmax.
"""

from __future__ import annotations

from dataclasses import fields

import torch

from pegboard.interfaces.kernel import (
    KernelContext,
    ProbabilitiesKernel,
    SampleKernel,
    SampleRows,
)

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

_MAX_NOISE = 23.0
"""Above 33 ln 2, the noise of the largest word."""

_NUM_PILOTS = 16
"""Likely ids whose noise is computed first, for a score that the winner must reach."""

_NOISE_CHUNK = 2**15
"""Ids whose noise is computed at a time: the words stay in the cache."""

_FIRST_PREFIX = 1024
"""Likely ids among which top_p looks for its prefix before it sorts the whole vocabulary."""


class TorchSample(SampleKernel):
    """`SampleKernel` as its contract says, with no sort of the vocabulary where a top-k suffices."""

    def __init__(self, context: KernelContext) -> None:
        self._device = torch.device(context.device)

    def self_test(self) -> None:
        """Compares Philox with a known answer (Random123's kat_vectors, digits of pi)."""
        counter = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
        words = [torch.tensor([w], device=self._device) for w in (*counter, 0xA4093822, 0x299F31D0)]
        first = int(philox(*words)[0])
        assert first == 0xD16CFE09, f"Philox4x32-10 yields {first:#x} for 0xd16cfe09"

    def sample(self, logits: torch.Tensor, rows: SampleRows) -> torch.Tensor:
        greedy = rows.temperature == 0
        if bool(greedy.all()):
            return _argmax(logits)
        tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
        tokens[greedy] = _argmax(logits[greedy])
        drawn = torch.nonzero(~greedy)[:, 0]
        if len(drawn):
            rows = _select(rows, drawn)
            scaled = logits[drawn] / rows.temperature[:, None]
            tokens[drawn] = _argmax_with_noise(_filtered(scaled, rows), rows)
        return tokens


class TorchProbabilities(ProbabilitiesKernel):
    """`ProbabilitiesKernel` by the filters of `TorchSample`."""

    def __init__(self, context: KernelContext) -> None:
        self._device = torch.device(context.device)

    def self_test(self) -> None:
        """Compares with the softmax of two ids that a filter keeps."""
        one, none = torch.ones(1, device=self._device), torch.zeros(1, device=self._device)
        rows = SampleRows(one, 2 * one.long(), one, none, *[one.long()] * 3)
        logits = torch.tensor([[0.0, 1.0, -1.0]], device=self._device)
        found = self.probabilities(logits, rows)[0].tolist()
        wanted = (0.2689414213699951, 0.7310585786300049, 0.0)
        close = all(abs(a - b) < 1e-9 for a, b in zip(found, wanted, strict=True))
        assert close, f"computed {found} for {wanted}"

    def probabilities(self, logits: torch.Tensor, rows: SampleRows) -> torch.Tensor:
        certain = (rows.temperature == 0) | (logits.amax(dim=1) == torch.inf)
        found = torch.zeros_like(logits, dtype=torch.float64)
        found.scatter_(1, _argmax(logits)[:, None], 1.0)
        drawn = torch.nonzero(~certain)[:, 0]
        if len(drawn):
            rows = _select(rows, drawn)
            scaled = logits[drawn] / rows.temperature[:, None]
            found[drawn] = torch.softmax(_filtered(scaled, rows).to(torch.float64), dim=1)
        return found


def philox(
    counter0: torch.Tensor,
    counter1: torch.Tensor,
    counter2: torch.Tensor,
    counter3: torch.Tensor,
    key0: torch.Tensor,
    key1: torch.Tensor,
) -> torch.Tensor:
    """First word of Philox4x32-10 (Salmon et al. 2011).

    All arguments and the result are int64 tensors of one shape, or that broadcast to one, holding
    unsigned 32-bit words. A product of two words wraps in int64; its halves are right all the same.
    Bits above a word's 32 may stay until the mask before the next product.
    """
    c0, c1, c2, c3 = counter0, counter1, counter2, counter3
    for _ in range(_ROUNDS):
        product0 = c0 * _MULTIPLIERS[0]
        product1 = c2 * _MULTIPLIERS[1]
        c0 = ((product1 >> 32) ^ c1 ^ key0) & _WORD
        c2 = ((product0 >> 32) ^ c3 ^ key1) & _WORD
        c1 = product1
        c3 = product0
        key0 = key0 + _WEYL[0]
        key1 = key1 + _WEYL[1]
    return c0


def _noise(
    token_ids: torch.Tensor, seed: torch.Tensor, position: torch.Tensor, index: torch.Tensor
) -> torch.Tensor:
    """float32 Gumbel noise of token ids; int64 arguments that broadcast to one shape."""
    zero = torch.zeros_like(seed)
    word = philox(token_ids, position, index, zero, seed & _WORD, (seed >> 32) & _WORD)
    uniform = (word.to(torch.float64) + 0.5) * 2.0**-32
    return -torch.log(-torch.log(uniform)).to(torch.float32)


def _argmax_with_noise(scaled: torch.Tensor, rows: SampleRows) -> torch.Tensor:
    """argmax of scaled + noise, ties to the lower id; scaled: float32 [num_rows, vocab_size]."""
    pilots = torch.topk(scaled, min(_NUM_PILOTS, scaled.shape[1])).indices
    noise = _noise(pilots, rows.seed[:, None], rows.position[:, None], rows.index[:, None])
    reached = (scaled.gather(1, pilots) + noise).amax(dim=1, keepdim=True)
    candidates = torch.nonzero(scaled + _MAX_NOISE >= reached)
    # Where all logits are -inf nothing reaches anything: the lowest id, as argmax says.
    scores = torch.full_like(scaled, -torch.inf)
    for first in range(0, len(candidates), _NOISE_CHUNK):
        owner, ids = candidates[first : first + _NOISE_CHUNK].unbind(dim=1)
        noise = _noise(ids, rows.seed[owner], rows.position[owner], rows.index[owner])
        scores[owner, ids] = scaled[owner, ids] + noise
    return _argmax(scores)


def _argmax(scores: torch.Tensor) -> torch.Tensor:
    """argmax of each row, ties to the lower id."""
    if scores.device.type == "cpu":
        # numpy's is vectorized, torch's is not
        return torch.from_numpy(scores.numpy().argmax(axis=-1))
    return scores.argmax(dim=-1)


def _filtered(scaled: torch.Tensor, rows: SampleRows) -> torch.Tensor:
    """`scaled` with -inf where top_k, top_p or min_p drops an id; may be `scaled` itself."""
    vocab_size = scaled.shape[1]
    kept = torch.where(rows.top_k == 0, vocab_size, rows.top_k.clamp(max=vocab_size))
    prefixed = torch.nonzero(rows.top_p < 1)[:, 0]
    if len(prefixed):
        lengths = _prefix_lengths(scaled[prefixed], kept[prefixed], rows.top_p[prefixed])
        kept[prefixed] = torch.minimum(kept[prefixed], lengths)
    cut = torch.nonzero(kept < vocab_size)[:, 0]
    if len(cut):
        scaled = scaled.index_copy(0, cut, _keep_largest(scaled[cut], kept[cut]))
    if bool((rows.min_p > 0).any()):
        floor = scaled.amax(dim=1) + torch.log(rows.min_p.to(torch.float64)).to(torch.float32)
        scaled = scaled.masked_fill(scaled < floor[:, None], -torch.inf)
    return scaled


def _prefix_lengths(scaled: torch.Tensor, kept: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Length of the shortest prefix, in descending order, of the `kept` largest entries of each row
    whose share of their probability reaches top_p; int64 [num_rows]. In float64."""
    vocab_size = scaled.shape[1]
    peak = scaled.amax(dim=1, keepdim=True).to(torch.float64)
    # A running sum adds each row in one order, independent of the rows beside it.
    whole = torch.exp(scaled.to(torch.float64) - peak).cumsum(dim=1)[:, -1]
    uncut = kept == vocab_size
    width = min(vocab_size, max(_FIRST_PREFIX, int(kept.masked_fill(uncut, 0).amax())))
    while True:
        largest = torch.topk(scaled, width).values.to(torch.float64)
        mass = torch.exp(largest - peak).cumsum(dim=1)
        share = mass.gather(1, kept.clamp(max=width)[:, None] - 1)[:, 0]
        wanted = top_p.to(torch.float64) * torch.where(uncut, whole, share)
        if width == vocab_size or bool((mass[:, -1] >= wanted).all()):
            return (mass < wanted[:, None]).sum(dim=1) + 1
        width = vocab_size


def _keep_largest(scaled: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """`scaled` with -inf past the `kept` largest entries of each row; equal ones by lower id."""
    last = torch.topk(scaled, int(kept.amax())).values.gather(1, kept[:, None] - 1)
    surplus = (scaled >= last).sum(dim=1) - kept
    if not bool((surplus > 0).any()):
        return scaled.masked_fill(scaled < last, -torch.inf)
    tied = scaled == last
    dropped = tied & (tied.cumsum(dim=1) > (tied.sum(dim=1) - surplus)[:, None])
    return scaled.masked_fill(dropped | (scaled < last), -torch.inf)


def _select(rows: SampleRows, index: torch.Tensor) -> SampleRows:
    """The parameters of some rows."""
    return SampleRows(*(getattr(rows, field.name)[index] for field in fields(SampleRows)))
