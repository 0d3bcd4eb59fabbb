"""The worker: its model units, its rows, and the step that runs over them."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from pegboard.errors import EngineError
from pegboard.interfaces.executor import Worker
from pegboard.runner.drafting import starts
from pegboard.runner.inputs import StepInputs, build_inputs
from pegboard.runner.model_unit import ModelUnit
from pegboard.runner.parts import Loaded, WorkerParts, use_threads
from pegboard.runner.verification import Accepted, accept, moves
from pegboard.step import GroupUpdate, Int32, Int64, StepBatch, StepResult


class Runner(Worker):
    """Runs steps on one device. What it holds is freed when it is closed."""

    def __init__(self, parts: WorkerParts) -> None:
        self._parts: WorkerParts | None = parts
        self._loaded: Loaded | None = None

    def start(self) -> None:
        """Loads weights, allocates KV.

        Raises:
            CheckpointError: a weight cannot be loaded.
        """
        if self._parts is None:
            raise EngineError("the worker was closed")
        self._loaded = Loaded(self._parts)

    @torch.inference_mode()
    def execute(self, batch: StepBatch) -> StepResult:
        """Runs one step: rows, forward, sampling, verification, drafts.

        Raises:
            EngineError: host and worker disagree.
        """
        on = self._running()
        use_threads(on.num_threads)
        times = [time.perf_counter()]
        _update_rows(on, batch)
        inputs = build_inputs(on.rows, batch)
        hidden, tapped = _forward(on, inputs, on.drafter.taps(batch))
        times.append(time.perf_counter())

        prompt_logprobs = on.sampler.prompt_logprobs(hidden, inputs)
        sampled = on.sampler.sample(hidden, inputs)
        accepted = accept(inputs, sampled.token_ids, sampled.usable)
        logprobs = on.sampler.logprobs(inputs, sampled, accepted)
        _compact(on, inputs, accepted)
        for row in sampled.failed:
            on.drafter.release(row, int(on.rows.num_known[row]))
        # A row that failed gets a token too, for nobody: the host may have planned its next step.
        lengths = np.maximum(accepted.num_committed, batch.sample)
        on.rows.commit(batch.rows, accepted.token_ids, lengths, batch.step_id)
        times.append(time.perf_counter())

        on.drafter.redraft(batch, inputs, accepted, tapped, forward_s=times[1] - times[0])
        times.append(time.perf_counter())
        forward_s, sampling_s, drafting_s = (end - start for start, end in pairwise(times))
        return StepResult(
            step_id=batch.step_id,
            offsets=starts(accepted.num_committed),
            token_ids=accepted.committed(),
            num_accepted=accepted.num_accepted.astype(np.int32),
            num_tried=accepted.num_tried.astype(np.int32),
            num_drafts=on.rows.drafts.counts[batch.rows],
            confidences=on.rows.drafts.confidences_of(batch.rows),
            parents=on.rows.drafts.parents_of(batch.rows),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            failed=sampled.failed,
            drafter_failed=on.drafter.take_failure(),
            forward_s=forward_s,
            sampling_s=sampling_s,
            drafting_s=drafting_s,
        )

    def call(self, method: str, *arguments: Any) -> Any:
        """Answers `memory`: bytes by ledger entry, as far as the worker knows them; and
        `block_checksums` of a group and its blocks.

        Raises:
            EngineError: any other question.
        """
        on = self._running()
        match method, *arguments:
            case ["memory"]:
                return {"kv": on.units.num_kv_bytes()}
            case ["block_checksums", int(group), blocks]:
                unit, own = on.units.owner(group)
                return unit.checksums(own, blocks)
        raise EngineError(
            f"worker: unknown question {method!r}; allowed: memory, block_checksums of group and blocks"
        )

    def close(self) -> None:
        if self._parts is not None:
            for unit in self._parts.units:
                unit.source.close()
        self._loaded = None
        self._parts = None
        torch.cuda.empty_cache()

    def _running(self) -> Loaded:
        if self._loaded is None:
            raise EngineError("the worker is not running")
        return self._loaded


def _update_rows(on: Loaded, batch: StepBatch) -> None:
    """Releases, admissions, blocks: in this order, as the batch says."""
    on.drafter.begin(batch.drafter_trial, batch.num_resets)
    for release in batch.released:
        on.drafter.release(release.row, release.num_tokens)
        on.processors.release(release.row)
        on.rows.release(release.row)
    for admission in batch.admitted:
        on.rows.admit(admission)
        on.processors.admit(admission.row, admission.processors)
    for update in batch.groups:
        on.rows.check_encoding(update)
        _copy_blocks(on, update)
        on.rows.update_tables(update)
    for admission in batch.admitted:
        on.drafter.admit(admission)


def _copy_blocks(on: Loaded, update: GroupUpdate) -> None:
    if len(update.copy_from):
        unit, own = on.units.owner(update.group)
        source, target = (_index(unit, blocks) for blocks in (update.copy_from, update.copy_to))
        unit.parts.attention.copy_blocks(own, source, target)


def _forward(
    on: Loaded, inputs: StepInputs, taps: tuple[int, ...]
) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
    """Final hidden states [num_tokens, hidden_size], and the tapped ones by layer."""
    target = on.units.target
    most = int((inputs.num_computed + np.diff(inputs.starts)).max(initial=0))
    batch = target.batch(
        inputs.positions,
        inputs.starts,
        inputs.num_computed,
        on.rows.tables(on.units.numbers(target), inputs.rows, most),
        inputs.ancestors,
    )
    return target.forward(_index(target, inputs.token_ids), batch, taps)


def _compact(on: Loaded, inputs: StepInputs, accepted: Accepted) -> None:
    """Moves the target's KV of accepted tree nodes right behind the known tokens. A drafter computes
    its own of them."""
    if inputs.ancestors is None or not accepted.num_accepted.any():
        return
    row, source, target = moves(inputs, accepted)
    if not len(row):
        return
    rows = inputs.rows[row]
    unit = on.units.target
    for own, group in enumerate(on.units.numbers(unit)):
        from_slots, to_slots = (
            _index(unit, on.rows.slots(group, rows, entries)) for entries in (source, target)
        )
        unit.parts.attention.move_slots(own, from_slots, to_slots)


def _index(unit: ModelUnit, values: Int64 | Int32) -> torch.Tensor:
    """Integers as an int64 tensor on the unit's device."""
    return torch.from_numpy(values.astype(np.int64)).to(unit.device)
