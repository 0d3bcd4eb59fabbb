"""The ends of a text: every id that the checkpoint names, and stop texts that are one token."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from pegboard import LLM, SamplingParams
from pegboard.builtin.safetensors_describe import describe
from pegboard.compose import prepare
from pegboard.config import Config
from pegboard.testing.tiny import write_tiny_model

EOS, IM_START = 1, 2
"""Of the tiny tokenizer: what it calls eos, and another special token."""


def force(token_id: int) -> dict[int, float]:
    """A bias by which the token is sampled wherever it may be."""
    return {token_id: 1e4}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """A model whose generation config names another id than its tokenizer."""
    folder = write_tiny_model(
        tmp_path_factory.mktemp("model") / "m", tokenizer=True, eos_token_id=9
    )
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    with LLM(folder, show_progress=False, threads=1, max_model_len=64) as llm:
        yield llm


@pytest.mark.parametrize("token_id", [7, 8, 9, EOS])
def test_every_id_that_the_checkpoint_names_ends_a_text(llm: LLM, token_id: int) -> None:
    params = SamplingParams(max_tokens=4, temperature=0.0, logit_bias=force(token_id))
    (result,) = llm.generate([[5, 6]], params)
    assert (result.finish_reason, result.token_ids) == ("stop", (token_id,))
    assert result.outputs[0].stop_reason is None


def test_ids_are_found_wherever_they_are_named(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "m", tokenizer=True, eos_token_id=[9, 4])
    assert describe(folder).eos_token_ids == (9, 4)
    prepared = prepare(Config.from_values({"model": str(folder)}))
    assert prepared.composition.target.facts.eos_token_ids == (9, 4, EOS)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 9}))
    facts = prepare(Config.from_values({"model": str(folder)})).composition.target.facts
    assert facts.eos_token_ids == (9, 4, EOS)
    assert dict(facts.eos_sources) == {
        "generation_config.json": (9,),
        "config.json": (9, 4),
        "the tokenizer's eos_token": (EOS,),
    }


@pytest.mark.parametrize(("text", "token_id"), [("<|im_start|>", IM_START), ("<|im_end|>", EOS)])
def test_a_stop_text_that_is_one_special_token_counts_as_its_id(
    llm: LLM, text: str, token_id: int
) -> None:
    params = SamplingParams(
        max_tokens=4,
        temperature=0.0,
        stop=("zzz", text),
        logit_bias=force(token_id),
        ignore_eos=True,
    )
    (result,) = llm.generate([[5, 6]], params)
    assert (result.finish_reason, result.text) == ("stop", "")
    assert result.token_ids == (token_id,) and result.outputs[0].stop_reason == text


def test_before_the_least_number_of_tokens_it_is_not_sampled(llm: LLM) -> None:
    params = SamplingParams(
        max_tokens=6, min_tokens=3, stop=("<|im_start|>",), logit_bias=force(IM_START)
    )
    (result,) = llm.generate([[5, 6]], params)
    assert result.token_ids.index(IM_START) == 3 and result.finish_reason == "stop"


def test_other_stop_texts_are_looked_for_in_the_text(llm: LLM) -> None:
    spelled = llm.tokenizer.encode("the<|im_start|>dog")
    assert IM_START in spelled
    for stop in ("<|im_start|>x", "<|im_", "im_start"):
        params = SamplingParams(
            max_tokens=2, temperature=0.0, stop=(stop,), logit_bias=force(IM_START)
        )
        (result,) = llm.generate([[5, 6]], params)
        assert result.finish_reason == "length"
    assert re.fullmatch(r"<\|im_start\|>", llm.tokenizer.token(IM_START))
