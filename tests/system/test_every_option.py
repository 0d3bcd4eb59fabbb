"""Every option of a plugin of ours acts.

The config's walk (`test_every_setting`) shows of a plugin's options that they reach the composition. Here
each field of each options model that a manifest of this repository names has a second value that makes
another plan, or a test of its plugin that shows what it does. An option that stands in neither table
fails.
"""

from __future__ import annotations

import ast
import importlib
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pegboard import Config
from pegboard.compose import prepare
from pegboard.config_text import all_keys
from pegboard.testing.tiny import write_tiny_model

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data" / "quant"

PLANNED: dict[str, tuple[str, dict[str, Any], Any]] = {
    "quantizer.int8.activations": ("float", {}, "int8"),
    "quantizer.int8.group_size": ("float", {}, 32),
    "quantizer.int8.embedding": ("float", {}, True),
    "quantizer.w4.activations": ("float", {}, "int8"),
    "quantizer.w4.group_size": ("float", {}, 32),
    "quantizer.w4.embedding": ("float", {}, True),
    "quantizer.mixed.activations": ("ct-mixed", {}, "float"),
    "quantizer.awq.activations": ("awq-4b-g32", {}, "int8"),
    "quantizer.gptq.activations": ("gptq-4b-g32-sym", {}, "int8"),
    "quantizer.smoothquant.activations": ("ct-w8a8-int8-dynamic", {}, "float"),
    "quantizer.fp8.activations": ("ct-fp8-dynamic", {}, "float"),
    "quantizer.gguf.mode": ("gguf-q4_0/model.gguf", {"mode": "packed"}, "dequantize"),
    "quantizer.gguf.activations": ("gguf-q4_0/model.gguf", {"activations": "int8"}, "float"),
}
"""Option to a checkpoint, the options that a second value of it stands beside, and that value. With it
the plan takes other memory or other kernels."""

_PRIORITY = "plugins/schedulers/tests/test_priority.py"
_POLICIES = "plugins/schedulers/tests/test_policies.py"
_BOUNDS = "plugins/schedulers/tests/test_bounds.py"
_DRAFTS = "spec_plugins/ngram/tests/test_options.py"
_HEADS = "spec_plugins/eagle/tests/test_arithmetic.py"
_TREES = f"{_HEADS}::test_trees_are_those_of_eagle_2"
_DRAFT_MODEL = "spec_plugins/draft_model/tests/test_limits.py"
_EXECUTORS = "plugins/executors/tests/test_engine.py"

SHOWN = {
    "drafter.draft_model.min_confidence": f"{_DRAFT_MODEL}::test_min_confidence_ends_a_guess",
    "drafter.draft_model.quantizer": f"{_DRAFT_MODEL}::test_its_quantizer_is_its_own",
    "drafter.draft_model.sampling": (
        "spec_plugins/draft_model/tests/test_alone.py::test_greedy_guesses_are_the_likeliest_tokens"
    ),
    "drafter.eagle.depth": _TREES,
    "drafter.eagle.min_confidence": (
        f"{_HEADS}::test_nodes_are_proposed_as_long_as_their_path_is_likely"
    ),
    "drafter.eagle.quantizer": "spec_plugins/eagle/tests/test_refused.py::test_the_quantizer_is_the_heads",
    "drafter.eagle.sampled": f"{_HEADS}::test_drawn_chains_have_the_noise_of_the_targets_tokens",
    "drafter.eagle.taps": "spec_plugins/eagle/tests/test_refused.py::test_taps_are_what_the_option_says",
    "drafter.eagle.top_k": _TREES,
    "drafter.ngram.max_tokens": f"{_DRAFTS}::test_the_older_half_is_forgotten_beyond_max_tokens",
    "drafter.ngram.min_confidence": f"{_DRAFTS}::test_a_draft_ends_below_min_confidence",
    "drafter.ngram.prompt_lookup_max": f"{_DRAFTS}::test_prompt_lookup_max_and_min_bound_a_match",
    "drafter.ngram.prompt_lookup_min": f"{_DRAFTS}::test_prompt_lookup_max_and_min_bound_a_match",
    "drafter.suffix.max_tokens": f"{_DRAFTS}::test_the_older_half_is_forgotten_beyond_max_tokens",
    "drafter.suffix.min_confidence": f"{_DRAFTS}::test_a_draft_ends_below_min_confidence",
    "drafter.suffix.min_match": f"{_DRAFTS}::test_min_match_bounds_a_match",
    "drafter.suffix.recent_tokens": f"{_DRAFTS}::test_recent_tokens_lets_rows_see_outputs",
    "executor.processes.address": f"{_EXECUTORS}::test_what_cannot_be_started_is_said",
    "executor.processes.launch": f"{_EXECUTORS}::test_what_cannot_be_started_is_said",
    "observer.metrics.vllm_names": (
        "core/tests/builtin/test_observers.py"
        "::test_errors_are_counted_by_kind_and_the_other_names_can_be_left_out"
    ),
    "prefix_cache.trie.eviction": (
        "plugins/prefix_cache/tests/test_eviction.py::test_blocks_of_the_least_important_go_first"
    ),
    "scheduler.fair.weights": (
        f"{_POLICIES}::test_a_tenant_of_twice_the_weight_gets_twice_the_service"
    ),
    "scheduler.fair.input_weight": f"{_POLICIES}::test_prompt_and_output_count_by_their_weights",
    "scheduler.fair.output_weight": f"{_POLICIES}::test_prompt_and_output_count_by_their_weights",
    "scheduler.prefix_aware.window": (
        f"{_POLICIES}::test_a_long_queue_is_asked_of_within_a_window_and_once"
    ),
    "scheduler.prefix_aware.max_overtakes": (
        f"{_BOUNDS}::test_prefix_aware_overtakes_a_bounded_number_of_times"
    ),
    "scheduler.priority.max_wait": f"{_PRIORITY}::test_waiting_raises_a_class",
    "scheduler.shortest.max_wait": (
        f"{_POLICIES}::test_who_waited_too_long_goes_before_shorter_ones"
    ),
    "scheduler.shortest_first.max_wait": (
        "examples/my_plugin/tests/test_shortest_first.py"
        "::test_short_prompts_run_first_unless_others_waited_too_long"
    ),
}
"""Option that no plan shows to the test that shows what it does. Its module names the option."""


def options() -> Iterator[str]:
    """`interface.name.option` of every manifest in the repository."""
    folders = (
        "core/pegboard/builtin",
        "plugins/*/*",
        "quant_plugins/*/*",
        "spec_plugins/*/*",
        "examples/*/*",
    )
    for pattern in folders:
        for file in ROOT.glob(f"{pattern}/plugin.toml"):
            for entry in tomllib.loads(file.read_text()).get("provides", ()):
                if "options" in entry:
                    module, _, name = entry["options"].partition(":")
                    model = getattr(importlib.import_module(module), name)
                    yield from all_keys(model, f"{entry['interface']}.{entry['name']}.")


def test_every_option_is_walked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "my_plugin"))
    walked = [*PLANNED, *SHOWN]
    assert sorted(options()) == sorted(walked)


@pytest.fixture(scope="module")
def floats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(
        tmp_path_factory.mktemp("floats") / "m", hidden_size=128, intermediate_size=192
    )


def plan(model: Path, quantizer: str, options: dict[str, Any]) -> tuple[Any, bytes]:
    """The kernels of a model's weights, and the ledger."""
    config = {
        "model": str(model),
        "max_model_len": 64,
        "kv_cache": {"memory": "1MiB"},
        "quantizer": {"name": quantizer, "options": options},
    }
    prepared = prepare(Config.from_values(config))
    kernels = [
        (choice.operation, choice.format, choice.part.name)
        for choice in prepared.composition.target.kernels
    ]
    return kernels, msgspec.json.encode(prepared.ledger)


@pytest.mark.parametrize("option", PLANNED)
def test_a_second_value_makes_another_plan(floats: Path, option: str) -> None:
    _, quantizer, name = option.split(".")
    checkpoint, beside, second = PLANNED[option]
    model = floats if checkpoint == "float" else DATA / checkpoint
    assert plan(model, quantizer, beside) != plan(model, quantizer, beside | {name: second})


@pytest.mark.parametrize("option", SHOWN)
def test_the_test_that_shows_an_option_exists(option: str) -> None:
    file, name = SHOWN[option].split("::")
    source = (ROOT / file).read_text()
    tests = {node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
    assert name in tests and option.rpartition(".")[2] in source
