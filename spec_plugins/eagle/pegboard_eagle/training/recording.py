"""The target answers the prompts; a drafter that proposes nothing keeps the states that it sees."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from pegboard import Engine, SamplingParams
from pegboard.errors import EngineError
from pegboard.interfaces.drafter import Drafter, DrafterContext, Observation
from pegboard.step import Drafts, Float32, Int32, RowAdmission
from pegboard_eagle.training.answers import Answer, stored

_NONE = np.zeros(0, np.int32)
_NOTHING = Drafts(rows=_NONE, offsets=np.zeros(1, np.int32), token_ids=_NONE, parents=_NONE)


@dataclass(slots=True)
class _Row:
    """A row's sequence: its prompt, and the states of its tokens so far, in order."""

    prompt: Int32
    is_taken: bool = False
    taps: list[torch.Tensor] = field(default_factory=list)
    features: list[torch.Tensor] = field(default_factory=list)


class Recorder(Drafter):
    """Keeps the taps of what the target computes. A preempted sequence is computed, and kept, anew.

    Args:
        taps: of the target, in the order of the head's `fc`.
        last: the tap after its final norm.
    """

    def __init__(self, context: DrafterContext, taps: Sequence[int], last: int) -> None:
        self.context = context
        self.taps = tuple({*taps, last})
        self._of_head = tuple(taps)
        self._last = last
        self._rows: dict[int, _Row] = {}
        self._released: dict[bytes, _Row] = {}

    def admit(self, admission: RowAdmission, block_tables: tuple[Int32, ...]) -> None:
        prompt = admission.token_ids[: admission.num_prompt_tokens].copy()
        self._rows[admission.row] = _Row(prompt)
        self._released.pop(prompt.tobytes(), None)

    def release(self, row: int, num_tokens: int) -> None:
        kept = self._rows.pop(row)
        if not kept.is_taken:
            self._released[kept.prompt.tobytes()] = kept

    def propose(self, seen: Observation) -> tuple[Drafts, Float32]:
        taps = stored(torch.cat([seen.taps[tap] for tap in self._of_head], dim=1))
        features = stored(seen.taps[self._last])
        counts = np.diff(seen.offsets).tolist()
        for row, of_taps, of_features in zip(
            seen.rows.tolist(),
            torch.split(taps, counts),
            torch.split(features, counts),
            strict=True,
        ):
            self._rows[row].taps.append(of_taps)
            self._rows[row].features.append(of_features)
        return _NOTHING, np.zeros(0, np.float32)

    def take(self, prompt: Int32) -> tuple[torch.Tensor, torch.Tensor]:
        """Taps and features of a sequence that has ended, whether or not its row is given back."""
        key = prompt.tobytes()
        running = (row for row in self._rows.values() if row.prompt.tobytes() == key)
        kept = self._released.pop(key, None) or next(running)
        kept.is_taken = True
        return torch.cat(kept.taps), torch.cat(kept.features)


def record(
    engine: Engine,
    recorder: Recorder,
    prompts: Mapping[int, Sequence[int]],
    params: SamplingParams,
) -> Iterator[Answer]:
    """Answers prompts, no two of which are the same.

    Args:
        engine: its drafter is the recorder.
        prompts: token ids by the prompts' numbers.

    Raises:
        EngineError: an answer was not made, or its states are not all there.
    """
    outputs: dict[str, list[int]] = {}
    numbers: dict[str, int] = {}
    for number, token_ids in prompts.items():
        request = engine.submit(token_ids, params, prefix_cache="off")
        numbers[request.request_id] = number
        outputs[request.request_id] = []
    while engine.has_work():
        for delta in engine.step():
            number = numbers[delta.request_id]
            outputs[delta.request_id] += delta.token_ids
            if delta.finish_reason == "error":
                raise EngineError(f"prompt {number}: {delta.error}")
            if delta.finish_reason is not None:
                prompt = np.asarray(prompts[number], np.int32)
                output = outputs.pop(delta.request_id)
                yield _answer(number, prompt, output, *recorder.take(prompt))
    if engine.core.cut_off:
        raise EngineError(f"the recorder was cut off: {engine.core.cut_off}")


def _answer(
    number: int,
    prompt: Int32,
    output: Sequence[int],
    taps: torch.Tensor,
    features: torch.Tensor,
) -> Answer:
    token_ids = torch.from_numpy(np.concatenate((prompt, np.asarray(output, np.int32))))
    if len(taps) < len(token_ids) - 1:
        raise EngineError(f"prompt {number}: {len(taps)} states of {len(token_ids)} tokens")
    num_states = len(token_ids) - 1
    return Answer(number, token_ids, len(prompt), taps[:num_states], features[:num_states])
