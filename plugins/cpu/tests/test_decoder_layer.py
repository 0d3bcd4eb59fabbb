"""A decoder layer in one call: the bits of its operations one by one, and the tokens of the reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pegboard import Engine, SamplingParams
from pegboard.interfaces.kernel import KernelContext
from pegboard.testing.tiny import write_tiny_model
from pegboard_cpu.kernels import cpu_kernel

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny model of each family; those with biases or norms of q and k run one by one."""
    folder = tmp_path_factory.mktemp("models")
    return {family: write_tiny_model(folder / family, family) for family in FAMILIES}


@pytest.mark.parametrize("num_threads", [1, 2, 3, 4])
def test_a_layer_has_the_bits_of_its_operations(num_threads: int) -> None:
    cpu_kernel(KernelContext("decoder_layer", "float", "float32", "cpu", num_threads)).self_test()


def tokens(model: Path, **parts: Any) -> list[list[int]]:
    config = {"model": str(model), "max_model_len": 96, "threads": 2, **parts}
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    found: dict[str, list[int]] = {}
    with Engine(config) as engine:
        for length in (1, 7, 40):
            engine.submit(list(range(3, 3 + length)), params)
        while engine.has_work():
            for delta in engine.step():
                found.setdefault(delta.request_id, []).extend(delta.token_ids)
    return list(found.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_the_reference(models: dict[str, Path], family: str) -> None:
    ours = tokens(models[family], kernels="cpu", attention="cpu", dtype="float32")
    assert ours == tokens(models[family], kernels="torch", attention="torch", dtype="float64")


def kernels_of(model: Path, **parts: Any) -> dict[str, str]:
    with Engine({"model": str(model), "max_model_len": 64, **parts}) as engine:
        return {
            kernel.operation: kernel.part.name for kernel in engine.prepared.composition.kernels
        }


def test_it_runs_where_all_that_it_joins_is_ours(models: dict[str, Path]) -> None:
    assert kernels_of(models["llama"], kernels="cpu")["decoder_layer"] == "cpu"
    other = kernels_of(models["llama"], kernels={"linear": "cpu", "silu_mul": "torch"})
    assert "decoder_layer" not in other and other["silu_mul"] == "torch"
    assert "decoder_layer" not in kernels_of(models["llama"], kernels="cpu", attention="torch")


def test_over_another_attention_the_operations_run_one_by_one(models: dict[str, Path]) -> None:
    ours = tokens(models["llama"], kernels="cpu", attention="torch", dtype="float32")
    assert ours == tokens(models["llama"], kernels="torch", attention="torch", dtype="float64")
