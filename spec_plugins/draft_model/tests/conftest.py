"""Models, and runs whose guesses are noted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from pegboard import SamplingParams
from pegboard.interfaces.drafter import DrafterContext, Observation, UnitTokens
from pegboard.step import Drafts, Float32, Int32, RowAdmission
from pegboard.testing.invariance import Case, Traces, differences, run_case
from pegboard.testing.tiny import write_tiny_model
from pegboard_draft_model import drafter as module
from pegboard_draft_model.drafter import DraftModel
from pegboard_draft_model.options import DraftModelOptions

NUM_NODES = 4


@dataclass(frozen=True, slots=True)
class Guess:
    """A chain that was proposed, and what it follows."""

    known: tuple[int, ...]
    token_ids: tuple[int, ...]
    confidences: tuple[float, ...]
    admission: RowAdmission


class Noting(DraftModel):
    """Notes its guesses, and the passes of its model."""

    def __init__(self, context: DrafterContext, options: DraftModelOptions) -> None:
        super().__init__(context, options)
        self.num_nodes = context.num_speculative_tokens
        self.guesses: list[Guess] = []
        self.num_passes = 0
        self._texts: dict[int, list[int]] = {}
        self._admissions: dict[int, RowAdmission] = {}
        forward = self._unit.forward

        def counted(tokens: UnitTokens, hidden: torch.Tensor | None = None) -> torch.Tensor:
            self.num_passes += 1
            return forward(tokens, hidden)

        self._unit.forward = counted  # type: ignore[method-assign]

    def admit(self, admission: RowAdmission, block_tables: tuple[Int32, ...]) -> None:
        self._texts[admission.row] = admission.token_ids.tolist()
        self._admissions[admission.row] = admission
        super().admit(admission, block_tables)

    def propose(self, seen: Observation) -> tuple[Drafts, Float32]:
        for i, row in enumerate(seen.rows.tolist()):
            new = seen.next_token_ids[seen.next_offsets[i] : seen.next_offsets[i + 1]]
            self._texts[row] += new.tolist()
        drafts, confidences = super().propose(seen)
        for i, row in enumerate(drafts.rows.tolist()):
            part = slice(drafts.offsets[i], drafts.offsets[i + 1])
            assert drafts.parents[part].tolist() == list(range(-1, part.stop - part.start - 1))
            known, guessed = tuple(self._texts[row]), tuple(drafts.token_ids[part].tolist())
            sure = tuple(confidences[part].tolist())
            self.guesses.append(Guess(known, guessed, sure, self._admissions[row]))
        return drafts, confidences


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("target") / "m", dtype="float64")


@pytest.fixture(scope="session")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of other sizes than the target."""
    folder = tmp_path_factory.mktemp("draft") / "m"
    sizes: dict[str, Any] = {"hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2}
    return write_tiny_model(folder, dtype="float64", seed=3, num_hidden_layers=3, **sizes)


@pytest.fixture(scope="session")
def run(target: Path) -> Callable[..., tuple[Traces, Noting]]:
    """(draft model, case, prompts, params, options, changes of the config, objects) -> the outcome, which
    is that without a drafter, and the drafter."""
    plain: dict[str, Traces] = {}

    def run(
        draft: Path,
        case: Case,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        options: Mapping[str, Any] = {"min_confidence": 0.0},
        settings: Mapping[str, Any] = {},
        **objects: Any,
    ) -> tuple[Traces, Noting]:
        made: list[Noting] = []

        def make(context: DrafterContext, options: DraftModelOptions) -> Noting:
            made.append(Noting(context, options))
            return made[-1]

        base: dict[str, Any] = {
            "model": str(target),
            "dtype": "float64",
            "max_model_len": 64,
            "prefix_cache": "none",
            "kv_cache": {"block_size": 4},
            **settings,
        }
        key = repr((base, prompts, params))
        if key not in plain:
            plain[key] = run_case(base, Case(batch=4), prompts, params)
        base["drafter"] = {
            "name": "draft_model",
            "model": str(draft),
            "num_speculative_tokens": NUM_NODES,
            "options": options,
        }
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(module, "DraftModel", make)
            got = run_case(base, case, prompts, params, **objects)
        assert differences(plain[key], got, 1e-5) == []
        return got, made[0]

    return run
