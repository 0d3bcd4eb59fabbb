"""A decoder layer in one call: the bits of its operations one by one, and the tokens of the reference."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import pegboard_cpu.library
from pegboard import Engine, SamplingParams
from pegboard.interfaces.drafter import Drafter, Observation
from pegboard.interfaces.kernel import KernelContext
from pegboard.models.layers import JointLayers, LayerBuilder
from pegboard.step import Drafts, Float32, Int32, RowAdmission
from pegboard.testing.invariance import Case, Traces, differences, run_case
from pegboard.testing.tiny import write_tiny_model
from pegboard_cpu.kernels import cpu_kernel
from pegboard_cpu.library import LIBRARY

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
NUM_LAYERS = {"llama": 2, "mistral": 2, "qwen2": 0, "qwen3": 0}
"""Layers that are joined: qwen2 has biases, qwen3 norms of q and k."""

OURS = {"kernels": "cpu", "attention": "cpu", "dtype": "float32"}
LENGTHS = (1, 5, 64, 127, 128, 129, 147, 300)
"""Tokens of prompts, around the 128 that a layer takes at once."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny model of each family; those with biases or norms of q and k run one by one."""
    folder = tmp_path_factory.mktemp("models")
    return {family: write_tiny_model(folder / family, family) for family in FAMILIES}


@pytest.mark.parametrize("num_threads", [1, 2, 3, 4])
def test_a_layer_has_the_bits_of_its_operations(num_threads: int) -> None:
    cpu_kernel(KernelContext("decoder_layer", "float", "float32", "cpu", num_threads)).self_test()


MIXED_FORMATS = """
import sys
from tests.native_layers import Library, check_decoder_layer, pools
library = Library(sys.argv[1])
for pool in pools(library):
    check_decoder_layer(library, pool)
"""


def test_the_four_products_may_be_of_formats_of_their_own() -> None:
    library = Path(pegboard_cpu.library.__file__).with_name(LIBRARY)
    run = [sys.executable, "-c", MIXED_FORMATS, str(library)]
    done = subprocess.run(run, cwd=Path(__file__).parents[1], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


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
            kernel.operation: kernel.part.name
            for kernel in engine.prepared.composition.target.kernels
        }


def test_it_runs_where_all_that_it_joins_is_ours(models: dict[str, Path]) -> None:
    assert kernels_of(models["llama"], kernels="cpu")["decoder_layer"] == "cpu"
    other = kernels_of(models["llama"], kernels={"linear": "cpu", "silu_mul": "torch"})
    assert "decoder_layer" not in other and other["silu_mul"] == "torch"
    assert "decoder_layer" not in kernels_of(models["llama"], kernels="cpu", attention="torch")


def test_over_another_attention_the_operations_run_one_by_one(models: dict[str, Path]) -> None:
    ours = tokens(models["llama"], kernels="cpu", attention="torch", dtype="float32")
    assert ours == tokens(models["llama"], kernels="torch", attention="torch", dtype="float64")


@pytest.fixture
def joint_layers(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Numbers of the joint layers that have run."""
    have_run: set[int] = set()
    call = JointLayers.__call__

    def noted(
        layers: JointLayers, first: int, stop: int, hidden: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        have_run.update(range(first, stop))
        return call(layers, first, stop, hidden, residual)

    monkeypatch.setattr(JointLayers, "__call__", noted)
    return have_run


def nothing_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on, layers run one operation after another."""
    monkeypatch.setattr(LayerBuilder, "joint_layer", lambda *parts: None)


class Listener(Drafter):
    """Guesses nothing, and keeps the hidden states that it is shown."""

    taps = (0, 1)

    def __init__(self) -> None:
        self.heard: list[dict[int, torch.Tensor]] = []

    def admit(self, admission: RowAdmission, block_tables: tuple[Int32, ...]) -> None: ...

    def release(self, row: int, num_tokens: int) -> None: ...

    def propose(self, seen: Observation) -> tuple[Drafts, Float32]:
        self.heard.append({layer: hidden.clone() for layer, hidden in seen.taps.items()})
        none = np.empty(0, np.int32)
        drafts = Drafts(rows=none, offsets=np.zeros(1, np.int32), token_ids=none, parents=none)
        return drafts, np.empty(0, np.float32)


def traces(model: Path, encoding: str = "none") -> Traces:
    """Tokens and logprobs of prompts of all lengths, half of them sampled."""
    prompts = [[2 + (7 * i + n) % 500 for i in range(n)] for n in LENGTHS]
    params = [
        SamplingParams(temperature=float(i % 2), seed=i, max_tokens=6, logprobs=3, ignore_eos=True)
        for i in range(len(LENGTHS))
    ]
    config = {"model": str(model), "max_model_len": 320, "threads": 2, **OURS}
    config["kv_cache"] = {"encoding": encoding}
    return run_case(config, Case(batch=8, chunk=140), prompts, params)


@pytest.mark.parametrize("family", FAMILIES)
def test_joint_layers_run_and_change_no_bit(
    models: dict[str, Path],
    family: str,
    joint_layers: set[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    joint = traces(models[family])
    assert len(joint_layers) == NUM_LAYERS[family]
    joint_layers.clear()
    nothing_joined(monkeypatch)
    assert differences(traces(models[family]), joint) == []
    assert not joint_layers


@pytest.mark.parametrize("encoding", ["fp8_e4m3", "int8"])
def test_joint_layers_over_encoded_blocks_change_no_bit(
    models: dict[str, Path],
    encoding: str,
    joint_layers: set[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    joint = traces(models["llama"], encoding)
    assert len(joint_layers) == NUM_LAYERS["llama"]
    assert differences(traces(models["llama"]), joint)
    nothing_joined(monkeypatch)
    assert differences(traces(models["llama"], encoding), joint) == []


def listen(model: Path) -> list[dict[int, torch.Tensor]]:
    """Hidden states of a prompt of 147 tokens and what follows, step by step."""
    listener = Listener()
    drafter = {"name": "Listener", "num_speculative_tokens": 1}
    config = {"model": str(model), "max_model_len": 160, "drafter": drafter, **OURS}
    with Engine(config, drafter=listener) as engine:
        engine.submit(list(range(2, 149)), SamplingParams(temperature=0.0, max_tokens=4))
        while engine.has_work():
            engine.step()
    return listener.heard


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_hidden_states_that_a_drafter_sees_are_the_same(
    models: dict[str, Path],
    family: str,
    joint_layers: set[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    joint = listen(models[family])
    assert joint_layers
    nothing_joined(monkeypatch)
    plain = listen(models[family])
    assert len(plain[0][1]) == 147
    for mine, theirs in zip(joint, plain, strict=True):
        assert all(torch.equal(mine[layer], theirs[layer]) for layer in Listener.taps)
