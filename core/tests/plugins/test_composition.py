"""The composition is frozen, the same for the same config, and every worker can rebuild it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pegboard import errors
from pegboard.compose import prepare
from pegboard.config import Config
from pegboard.plugins.composition import from_json, to_json
from pegboard.plugins.discovery import discover
from pegboard.testing.tiny import write_tiny_model


def config_of(model: Path, **values: Any) -> Config:
    return Config.from_values({"model": str(model), "kv_cache": {"memory": "8MiB"}, **values})


def test_the_wire_form_brings_the_same_composition(tiny_model: Path) -> None:
    composition = prepare(config_of(tiny_model)).composition
    again = from_json(to_json(composition))
    assert again == composition
    assert again.digest == composition.digest


def test_the_digest_changes_with_what_was_chosen(tiny_model: Path) -> None:
    digests = {
        prepare(config_of(tiny_model, **values)).composition.digest
        for values in ({}, {"dtype": "float64"}, {"max_model_len": 100}, {"seed": 1})
    }
    assert len(digests) == 4


def test_auto_says_what_it_became_and_why(tiny_model: Path) -> None:
    decisions = {d.key: d for d in prepare(config_of(tiny_model)).composition.decisions}
    assert decisions["dtype"].value == "float32"
    backends = [offer.entry for offer in discover().offers("attention")]
    assert decisions["attention"].value in {backend.name for backend in backends}
    assert "context" in decisions["max_model_len"].why


def test_steps_are_short_where_the_size_of_a_chunk_changes_no_bit(tiny_model: Path) -> None:
    """And where it does, only on request, which `check` says."""
    fast: dict[str, Any] = {"attention": "torch"}
    for values in ({}, fast):
        composition = prepare(config_of(tiny_model, **values)).composition
        assert composition.max_step_ms == (200 if composition.numerics == "invariant" else None)
    assert composition.numerics == "fast"
    for wanted in (50, None):
        scheduler = {"max_step_ms": wanted}
        for values in ({}, fast):
            composition = prepare(config_of(tiny_model, scheduler=scheduler, **values)).composition
            assert composition.max_step_ms == wanted
            said = {decision.key: decision.why for decision in composition.decisions}
            warned = "changes bits" in said.get("scheduler.max_step_ms", "")
            assert warned == (wanted is not None and composition.numerics == "fast")


def test_max_model_len_is_lowered_when_open_and_refused_when_explicit(tiny_model: Path) -> None:
    small = {"kv_cache": {"memory": "40KiB"}}
    prepared = prepare(config_of(tiny_model, **small))
    length = prepared.composition.max_model_len
    assert 0 < length < 512
    assert prepared.composition.decisions[-1].value == str(length)
    with pytest.raises(errors.CompositionRefused, match=f"fix: max_model_len: {length}"):
        prepare(config_of(tiny_model, max_model_len=512, **small))
    assert prepare(config_of(tiny_model, max_model_len=length, **small)).ledger


def test_the_pool_never_exceeds_its_budget(tiny_model: Path) -> None:
    for kib in (40, 100, 1000, 8000):
        ledger = prepare(config_of(tiny_model, kv_cache={"memory": f"{kib}KiB"})).ledger
        kv = sum(n * size for n, size in zip(ledger.num_blocks, ledger.block_bytes, strict=True))
        assert kv <= ledger.kv_budget_bytes == kib * 1024


def test_window_layers_get_a_group_of_their_own_that_needs_less(tmp_path: Path) -> None:
    model = write_tiny_model(
        tmp_path / "qwen",
        "qwen2",
        num_hidden_layers=4,
        use_sliding_window=True,
        sliding_window=16,
        max_window_layers=2,
    )
    config = config_of(
        model, scheduler={"max_num_batched_tokens": 32}, kv_cache={"memory": "64MiB"}
    )
    composition = prepare(config).composition
    windows = {
        group.window: blocks
        for group, blocks in zip(composition.groups, composition.num_blocks, strict=True)
    }
    assert set(windows) == {None, 16}
    assert windows[16] < windows[None]


def test_a_missing_and_an_unknown_tensor_are_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model = write_tiny_model(tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.0.mlp.extra.weight"] = tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, model / "model.safetensors")
    with pytest.raises(errors.CompositionRefused) as caught:
        prepare(config_of(model))
    reasons = "\n".join(caught.value.reasons)
    assert "'model.layers.1.mlp.up_proj.weight' is missing" in reasons
    assert "'model.layers.0.mlp.extra.weight' is unknown" in reasons


def test_preparing_imports_no_torch(tiny_model: Path) -> None:
    code = (
        "import sys; from pegboard.compose import prepare; from pegboard.config import Config;"
        f"prepare(Config.from_values({{'model': {str(tiny_model)!r}}}));"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
