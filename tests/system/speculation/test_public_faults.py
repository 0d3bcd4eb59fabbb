"""Faults of speculative decoding that users of other engines have reported, each with its small input.

`POSED` says for each report which tests pose it: those of this file, or those that stand where the part at
fault is tested. `NOT_POSED` says why the others cannot be posed here. A report is named by its project
and number: vllm, sgl (SGLang), trt (TensorRT-LLM), lcpp (llama.cpp), hf (transformers) and so on.
"""

from __future__ import annotations

import ast
import gc
import json
import weakref
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from pegboard import Engine
from pegboard.interfaces.logits_processor import LogitRow, LogitsProcessor
from pegboard.interfaces.observer import Event, Observer, StepDone
from pegboard.request import SamplingParams
from pegboard.runner.runner import Runner
from pegboard.testing.invariance import Case, Traces, differences, run_case
from pegboard.testing.odd_drafters import ODD
from pegboard.testing.tiny import write_tiny_model

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
ENGINE, RUNNER = "core/tests/engine", "core/tests/runner"
NGRAM, SECOND, EAGLE = (f"spec_plugins/{name}/tests" for name in ("ngram", "draft_model", "eagle"))
PAIRS = "test_path_identity.py::test_pairs_of_ways_to_speculate"
PREFILL = "test_draft_kv.py::test_the_drafters_kv_of_known_tokens_is_that_of_a_prefill"
FORMULAS = f"{EAGLE}/test_arithmetic.py::test_chains_and_rows_are_those_of_the_formulas"
REFUSED = f"{EAGLE}/test_refused.py::test_a_wrong_head_refuses_to_start"
FLOOR = f"{EAGLE}/test_acceptance.py::test_a_trained_head_is_accepted"
BEST_NUMBER = (
    "core/tests/builtin/test_adaptive_policy.py::test_it_brings_what_the_best_fixed_number_brings"
)
REAL = "test_real_model.py::test_fifty_prompts"
WARM = "test_draft_kv.py::test_behind_a_warm_cache_the_same_is_guessed_and_accepted"
GRAMMAR = "test_a_grammar_bounds_each_node_by_its_own_path"

POSED: dict[str, tuple[str, ...]] = {
    # A request's parameters.
    "vllm 18902": (PAIRS, "test_path_identity.py::test_each_feature_matters"),
    "vllm 42744": (PAIRS,),
    "vllm 38467": (PAIRS,),
    "vllm 9834": (
        PAIRS,
        "test_path_identity.py::test_every_field_of_a_request_is_among_the_features",
    ),
    "sgl 10617": (PAIRS,),
    "sgl 11555": (PAIRS,),
    "sgl 22049": (PAIRS,),
    "sgl 28180": (PAIRS,),
    "sgl 26330": (PAIRS, f"{RUNNER}/test_speculation.py::test_a_wrong_guess_cannot_fail_a_request"),
    "hf 40976": (f"{SECOND}/test_alone.py::test_it_says_what_its_model_says_alone",),
    # Grammars.
    "vllm 9423": (GRAMMAR,),
    "vllm 11484": (GRAMMAR,),
    "vllm 27969": (GRAMMAR,),
    "vllm 36138": (GRAMMAR,),
    "sgl 9187": (GRAMMAR,),
    "sgl 21723": (GRAMMAR,),
    "trt 7878": (GRAMMAR,),
    # Logprobs and hidden states.
    "trt 12547": (PAIRS,),
    "sgl 21589": (PAIRS, f"{RUNNER}/test_runner.py::test_only_rows_that_asked_get_logprobs"),
    "sgl 26163": (PREFILL, f"{RUNNER}/test_runner.py::test_taps_are_the_inputs_of_layers"),
    # Acceptance that collapsed.
    "vllm 14464": (FORMULAS,),
    "vllm 14649": (PREFILL,),
    "vllm 38111": (FORMULAS, REFUSED),
    "sgl 21272": (FORMULAS, REFUSED),
    "vllm 26191": (FLOOR,),
    "sgl 24795": (FLOOR,),
    "lcpp 23544": (FLOOR,),
    "lcpp 25908": (f"{NGRAM}/test_options.py::test_a_draft_ends_below_min_confidence",),
    "lcpp 3919": (f"{SECOND}/test_limits.py::test_min_confidence_ends_a_guess",),
    "lcpp 23636": (f"{SECOND}/test_limits.py::test_guesses_end_where_its_context_does",),
    "lcpp 27572": (PREFILL,),
    "mlxcel 994": (PREFILL,),
    # Wrong texts.
    "trt 3456": (PAIRS, f"{RUNNER}/test_runner.py::test_rows_of_a_batch_do_not_meet"),
    "trt 11125": ("test_real_model.py::test_fifty_prompts_with_a_trained_head",),
    "trt 8285": (REAL,),
    "vllm 41758": (REAL,),
    "hf 30413": (
        f"{RUNNER}/test_speculation.py::test_drafts_do_not_change_tokens_or_logprobs",
        PAIRS,
    ),
    "mlx-lm 1109": (
        "test_draft_kv.py::test_trees_read_nothing_of_the_targets_that_is_not_written",
    ),
    "vllm 32312": (
        PAIRS,
        "core/pegboard/testing/attention.py::test_only_the_rows_own_blocks_are_written",
    ),
    "vllm 16883": (f"{NGRAM}/test_engine.py::test_steps_are_saved_where_a_text_repeats_itself",),
    # Prefix caches, KV and leaks.
    "vllm 41838": (
        WARM,
        f"{ENGINE}/test_flight.py::test_nothing_is_named_before_the_step_that_wrote_it_is_committed",
    ),
    "vllm 33270": (
        "test_with_a_cache_and_a_drafter_the_last_full_block_is_a_hit",
        f"{ENGINE}/public_faults/test_wrong_outputs.py::test_windows_and_drafts_have_hits_and_say_so",
    ),
    "vllm 44986": ("test_with_a_cache_and_a_drafter_the_last_full_block_is_a_hit",),
    "vllm 18668": (
        "tests/system/test_draft_metrics.py"
        "::test_draft_tokens_are_those_that_were_verified_and_not_the_depths_tried",
    ),
    "sglang-jax 1147": ("test_leaks.py::test_nothing_is_left_behind",),
    "sgl 2711": ("test_leaks.py::test_nothing_is_left_behind", PAIRS),
    "lcpp 11354": ("test_a_drafters_model_is_freed_with_the_engine",),
    "tgi 98": (
        "test_requests_that_end_at_the_last_slot_of_the_pool_and_the_context",
        f"{ENGINE}/test_speculation.py::test_drafts_take_no_block_that_another_row_needs",
    ),
    # Limits and shapes.
    "vllm 24662": ("test_a_prompt_beyond_the_heads_own_maximum_is_drafted_for",),
    "lcpp 22554": (f"{SECOND}/test_limits.py::test_guesses_end_where_its_context_does",),
    "lcpp 18039": (PREFILL,),
    "trt 10325": (
        f"{RUNNER}/test_speculation.py::test_trees_are_reported_with_their_parents",
        PAIRS,
    ),
    "vllm 29109": (FORMULAS,),
    "hf 46936": (
        "core/tests/plugins/test_drafter_models.py::test_other_tokens_are_refused_by_their_texts",
    ),
    "trt 8910": (PAIRS, f"{SECOND}/test_limits.py::test_its_quantizer_is_its_own"),
    "vllm 4934": (PAIRS,),
    # What was slow.
    "vllm 9565": ("tests/system/test_draft_metrics.py::test_a_server_counts_what_the_deltas_say",),
    "vllm 17984": (BEST_NUMBER,),
    "vllm 19254": (BEST_NUMBER, f"{NGRAM}/test_options.py::test_a_draft_ends_below_min_confidence"),
    "vllm 49548": (BEST_NUMBER,),
    "lcpp 10664": (BEST_NUMBER,),
    "vllm 52258": (
        "test_request_field.py::test_each_request_has_its_own_number_and_no_token_changes",
    ),
}

NOT_POSED: dict[str, str] = {
    "vllm 17504": "no step is captured as a graph, so none can be missed",
    "vllm 46971": "no KV is offloaded to slower memory",
    "vllm 20284": "there are no adapters yet",
    "vllm 49027": "a drafter runs in one worker, and no other rank decides with it",
}

REPORTS = """
vllm 18902 42744 38467 9834 9423 11484 27969 36138 14464 14649 38111 26191 17504 41758 32312 16883 41838
vllm 33270 44986 46971 18668 24662 29109 20284 49027 4934 9565 17984 19254 49548 52258
sgl 10617 11555 22049 28180 26330 9187 21723 21589 26163 21272 24795 2711
trt 7878 12547 3456 11125 8285 10325 8910
lcpp 23544 25908 3919 23636 27572 11354 22554 18039 10664
hf 40976 30413 46936
mlx-lm 1109
mlxcel 994
sglang-jax 1147
tgi 98
"""


@cache
def _functions(file: Path) -> frozenset[str]:
    tree = ast.parse(file.read_text())
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def test_every_report_is_posed_or_the_reason_said() -> None:
    lines = [line.split() for line in REPORTS.split("\n") if line]
    reports = [f"{project} {number}" for project, *numbers in lines for number in numbers]
    assert sorted([*POSED, *NOT_POSED]) == sorted(reports)


@pytest.mark.parametrize("report", POSED)
def test_what_is_named_exists(report: str) -> None:
    for test in POSED[report]:
        path, _, name = test.rpartition("::")
        file = (ROOT if "/" in path else HERE) / path if path else Path(__file__)
        if "spec_plugins" in path and not file.is_file():
            pytest.skip(f"{path} is another distribution's, which is not here")
        assert name in _functions(file), test


PROMPTS = [tuple(2 + (5 * i + n * n) % 500 for i in range(n)) for n in (3, 11, 17, 1)]


def config(model: Path, **more: Any) -> dict[str, Any]:
    return {
        "model": str(model),
        "max_model_len": 48,
        "dtype": "float64",
        "attention": "torch",
        "kv_cache": {"block_size": 4},
        "prefix_cache": "none",
        "threads": 1,
        **more,
    }


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "m", dtype="float64", tokenizer=True)


def outputs_of(traces: Traces) -> dict[tuple[tuple[int, ...], int], tuple[int, ...]]:
    return {(PROMPTS[number], index): one.tokens for (number, index), one in traces.items()}


class Counts(Observer):
    """Counts drafts and hits."""

    def __init__(self) -> None:
        self.num_tried = self.num_accepted = self.num_hits = 0

    def observe(self, event: Event) -> None:
        if isinstance(event, StepDone):
            self.num_tried += event.num_tried
            self.num_accepted += event.num_accepted
            self.num_hits += event.num_prefix_hits

    def close(self) -> None: ...


CLOSES, EOS = 31, 1


class Grammar(LogitsProcessor):
    """Anything until the first even token; then up to five tokens, each larger than the one before and
    below 400, `CLOSES`, and nothing but the end. A matcher as they are: a text that the grammar does not
    have makes it raise."""

    manifest: ClassVar = {"name": "grammar"}

    def admit(self, row: int, params: Mapping[str, Any]) -> None: ...

    def release(self, row: int) -> None: ...

    def apply(self, logits: torch.Tensor, rows: Sequence[LogitRow]) -> None:
        for i, row in enumerate(rows):
            allowed = self._allowed(row.history[row.num_prompt_tokens :].tolist())
            if allowed is not None:
                banned = torch.ones(logits.shape[1], dtype=torch.bool)
                banned[allowed] = False
                logits[i, banned] = -torch.inf

    def _allowed(self, output: list[int]) -> list[int] | None:
        opened = next((at for at, token in enumerate(output) if token % 2 == 0), None)
        if opened is None:
            return None
        allowed = list(range(40, 400))
        for token in output[opened + 1 :]:
            if token not in allowed:
                raise ValueError(f"token {token} does not go on with the text")
            ends = token in (CLOSES, EOS)
            allowed = [EOS] if ends else [CLOSES, *range(token + 1, 400)]
        return allowed if len(output) - opened <= 5 or allowed == [EOS] else [CLOSES]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("drafter", ODD)
def test_a_grammar_bounds_each_node_by_its_own_path(
    model: Path, drafter: str, depth: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Its gate opens within a draft, it refuses nodes, and it ends within one. That a guess is wrong is not
    worth a line of the log."""
    params = [
        SamplingParams(
            max_tokens=20,
            temperature=float(i % 2),
            seed=i,
            logprobs=1,
            n=1 + i % 2,
            processors={"grammar": {}},
        )
        for i in range(len(PROMPTS))
    ]
    expected = run_case(config(model), Case(batch=6), PROMPTS, params, logits_processor=Grammar())
    ends = [one.finish_reason for one in expected.values()]
    assert ends.count("stop") == len(ends)
    drafting = {"drafter": {"num_speculative_tokens": 6}, "executor": {"depth": depth}}
    counts = Counts()
    got = run_case(
        config(model, **drafting),
        Case(batch=6),
        PROMPTS,
        params,
        logits_processor=Grammar(),
        drafter=ODD[drafter](outputs_of(expected), 1),
        observer=counts,
    )
    assert differences(expected, got, tolerance=1e-5) == []
    assert counts.num_tried > 3
    assert not [record for record in caplog.records if "grammar" in record.getMessage()]


@pytest.mark.parametrize("drafter", ["draft model", "eagle chain"])
@pytest.mark.parametrize("block_size", [4, 16])
def test_with_a_cache_and_a_drafter_the_last_full_block_is_a_hit(
    model: Path, model_drafters: dict[str, Any], drafter: str, block_size: int
) -> None:
    """Also where a prompt has just one full block."""
    name = model_drafters[drafter]["name"]
    pytest.importorskip("pegboard_prefix_cache")
    pytest.importorskip(f"pegboard_{name}")
    drafting = {
        "drafter": {**model_drafters[drafter], "num_speculative_tokens": 3},
        "prefix_cache": "trie",
        "kv_cache": {"block_size": block_size},
    }
    prompt, params = PROMPTS[2], SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    counts = Counts()
    case = Case(batch=1, arrivals=1)
    got = run_case(config(model, **drafting), case, [prompt] * 3, [params] * 3, observer=counts)
    assert len({trace.tokens for trace in got.values()}) == 1
    assert counts.num_hits == 2 * 16
    assert counts.num_tried > 0


def test_a_drafters_model_is_freed_with_the_engine(
    model: Path, model_drafters: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("pegboard_draft_model")
    workers: list[Runner] = []
    start = Runner.start

    def started(worker: Runner) -> None:
        start(worker)
        workers.append(worker)

    monkeypatch.setattr(Runner, "start", started)
    drafting = {"drafter": {**model_drafters["draft model"], "num_speculative_tokens": 3}}
    with Engine(config(model, **drafting)) as engine:
        engine.submit(PROMPTS[0], SamplingParams(max_tokens=4))
        while engine.has_work():
            engine.step()
        on = workers.pop()._loaded
        assert on is not None
        unit = on.units.by_name["draft"]
        watched: list[Any] = [weakref.ref(unit), weakref.ref(unit.layers), weakref.ref(on.drafter)]
        del on, unit
    del engine
    gc.collect()
    assert [one() for one in watched] == [None] * 3


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("drafter", ["right", "oracle", "draft model", "eagle tree"])
def test_requests_that_end_at_the_last_slot_of_the_pool_and_the_context(
    model: Path, model_drafters: dict[str, Any], drafter: str, depth: int
) -> None:
    """The pool holds one longest sequence, and not a block more than is asked for it at the start."""
    length = 48
    prompts = [PROMPTS[2], PROMPTS[1]]
    params = [SamplingParams(temperature=0.0, ignore_eos=True)] * 2
    expected = run_case(config(model), Case(batch=2), prompts, params)
    assert [one.finish_reason for one in expected.values()] == ["length"] * 2
    drafting: dict[str, Any] = {"num_speculative_tokens": 6}
    objects: dict[str, Any] = {}
    layers = 2
    if drafter in ODD:
        outputs = {(prompts[i], index): one.tokens for (i, index), one in expected.items()}
        objects["drafter"] = ODD[drafter](outputs, 1)
    else:
        pytest.importorskip(f"pegboard_{model_drafters[drafter]['name']}")
        drafting |= model_drafters[drafter]
        layers = 3
    settings = {"drafter": drafting, "executor": {"depth": depth}}
    num_slots = length + 4 * (4 if drafter in model_drafters else 1)
    case = Case(batch=2, pool=2 * 24 * 8 * layers * num_slots, settings=settings)
    got = run_case(config(model), case, prompts, params, **objects)
    assert differences(expected, got, tolerance=1e-5) == []


def test_a_prompt_beyond_the_heads_own_maximum_is_drafted_for(
    model: Path, model_drafters: dict[str, Any], tmp_path: Path
) -> None:
    pytest.importorskip("pegboard_eagle")
    head, written = tmp_path / "head", Path(model_drafters["eagle chain"]["model"])
    head.mkdir()
    (head / "model.safetensors").write_bytes((written / "model.safetensors").read_bytes())
    said = json.loads((written / "config.json").read_text()) | {"max_position_embeddings": 8}
    (head / "config.json").write_text(json.dumps(said))
    params = [SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)]
    expected = run_case(config(model), Case(batch=1), [PROMPTS[2]], params)
    drafting = {"drafter": {"name": "eagle", "model": str(head), "num_speculative_tokens": 3}}
    counts = Counts()
    got = run_case(config(model, **drafting), Case(batch=1), [PROMPTS[2]], params, observer=counts)
    assert differences(expected, got, tolerance=1e-5) == []
    assert counts.num_tried > 3
