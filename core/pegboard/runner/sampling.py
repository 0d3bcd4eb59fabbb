"""From hidden states to tokens: logits, processors, the choice of a token; logprobs on the way."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from pegboard.interfaces.kernel import SampleRows
from pegboard.interfaces.model import Model
from pegboard.runner.inputs import StepInputs
from pegboard.runner.logprobs import logprobs_of
from pegboard.runner.processor_chain import Processed, ProcessorChain
from pegboard.runner.rows import Rows
from pegboard.runner.token_choice import TokenChoice
from pegboard.runner.verification import Accepted
from pegboard.step import Bool, Int64, Logprobs

_IMPOSSIBLE = "no token can be sampled: the logits are all -inf, or one of them is NaN"


@dataclass(frozen=True, slots=True)
class Sampled:
    """The token at each of L logit rows: where drafts are verified exactly, the target's own.

    Attributes:
        token_ids: int64 [L].
        usable: bool [L], False where a processor failed, or no token is possible.
        failed: row to a line, for rows whose request ends.
        raw_logits: float32 [W, vocab_size], unprocessed, of the logit rows that want logprobs.
        raw_index: int64 [L], where a logit row's are; void for others.
    """

    token_ids: Int64
    usable: Bool
    failed: dict[int, str]
    raw_logits: torch.Tensor
    raw_index: Int64


@dataclass(frozen=True, slots=True)
class Sampler:
    """Samples after the tokens that a step's inputs name."""

    model: Model
    choice: TokenChoice
    processors: ProcessorChain
    rows: Rows
    vocab_size: int

    def sample(self, hidden: torch.Tensor, inputs: StepInputs) -> Sampled:
        """hidden: [num_tokens, hidden_size], the step's final hidden states."""
        device = hidden.device
        at = inputs.logit_tokens
        # A step of unfinished prompts has none; kernels need not bear empty ones.
        logits = hidden.new_zeros((0, 1))
        if len(at):
            # Where all tokens are sampled after, as in a step of decodes, there is nothing to pick.
            picked = hidden if len(at) == len(hidden) else hidden[torch.from_numpy(at).to(device)]
            logits = self.model.logits(picked)
        wants = self.rows.num_logprobs[inputs.rows[inputs.logit_owner]] >= 0
        raw = logits[:0]
        if wants.any():
            raw = logits[torch.from_numpy(np.flatnonzero(wants)).to(device)]
        processed = self.processors.apply(logits, inputs)
        tokens = np.zeros(0, dtype=np.int64)
        if len(at):
            _refuse_impossible(logits, inputs, processed)
            tokens = self.choice.draw(logits, self._parameters(inputs, device), inputs)
        return Sampled(
            token_ids=tokens,
            usable=processed.usable,
            failed=processed.failed,
            raw_logits=raw,
            raw_index=np.cumsum(wants) - 1,
        )

    def logprobs(self, inputs: StepInputs, sampled: Sampled, accepted: Accepted) -> Logprobs | None:
        """Logprobs of the committed tokens, for rows that asked; None when none did."""
        if not len(sampled.raw_logits):
            return None
        num_top = self.rows.num_logprobs[inputs.rows]
        counts = np.where(num_top >= 0, accepted.num_committed, 0)
        if not counts.any():
            return None
        wanted = np.arange(accepted.token_ids.shape[1]) < counts[:, None]
        at = torch.from_numpy(sampled.raw_index[accepted.logit_rows[wanted]])
        raw = sampled.raw_logits
        return logprobs_of(
            lambda places: raw[at[places].to(raw.device)],
            accepted.token_ids[wanted].astype(np.int64),
            counts,
            int(num_top[counts > 0].max()),
            raw.shape[1],
        )

    def prompt_logprobs(self, hidden: torch.Tensor, inputs: StepInputs) -> Logprobs | None:
        """Logprobs of the prompt tokens that this step's chunks predict; None when none are asked.

        The token at position p + 1 is predicted from the logits at p.
        """
        if (self.rows.num_prompt_logprobs[inputs.rows] < 0).all():
            return None
        rows = inputs.rows[inputs.owner]
        num_top = self.rows.num_prompt_logprobs[rows]
        following = inputs.num_computed[inputs.owner] + inputs.local + 1
        wanted = (num_top >= 0) & (inputs.local < inputs.num_chunk[inputs.owner])
        wanted &= following < self.rows.num_prompt[rows]
        at = np.flatnonzero(wanted)
        if not len(at):
            return None
        places_of = torch.from_numpy(at)
        return logprobs_of(
            lambda places: self.model.logits(hidden[places_of[places].to(hidden.device)]),
            self.rows.token_ids[rows[at], following[at]].astype(np.int64),
            np.bincount(inputs.owner[at], minlength=len(inputs.rows)),
            int(num_top[at].max()),
            self.vocab_size,
        )

    def _parameters(self, inputs: StepInputs, device: torch.device) -> SampleRows:
        table = self.rows
        rows = inputs.rows[inputs.logit_owner]
        positions = inputs.positions[inputs.logit_tokens] + 1

        def tensor(values: NDArray[np.generic]) -> torch.Tensor:
            return torch.from_numpy(values).to(device)

        return SampleRows(
            temperature=tensor(table.temperature[rows]),
            top_k=tensor(table.top_k[rows]),
            top_p=tensor(table.top_p[rows]),
            min_p=tensor(table.min_p[rows]),
            seed=tensor(table.seed[rows].view(np.int64)),
            position=tensor(positions),
            index=tensor(table.index[rows]),
        )


def _refuse_impossible(logits: torch.Tensor, inputs: StepInputs, processed: Processed) -> None:
    """Takes out logit rows from which nothing can be sampled. One NaN makes the maximum NaN."""
    possible = logits.amax(dim=1) > -torch.inf
    if bool(possible.all()):
        return
    impossible = ~possible
    logits[impossible] = 0.0
    rows = inputs.rows[inputs.logit_owner]
    for at in np.flatnonzero(impossible.cpu().numpy()):
        processed.usable[at] = False
        if not inputs.logit_nodes[at]:
            processed.failed.setdefault(int(rows[at]), _IMPOSSIBLE)
