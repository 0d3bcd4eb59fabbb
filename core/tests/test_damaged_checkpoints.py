"""Any checkpoint's files are used, or refused by a UserError, soon and in little
memory."""

from __future__ import annotations

import json
import os
import resource
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pegboard import Config, Engine
from pegboard.errors import FactoryFailed, UserError
from pegboard.testing.tiny import FAMILIES, write_tiny_model

MAX_S = 10.0
MAX_GROWN_BYTES = 256 * 2**20

EDGES = [0, 1, 2, 7, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**63 - 1, 2**63, 2**64 - 1]

Change = Callable[[bytes], bytes]
"""Damages a file's content."""


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Family to a checkpoint that starts, to be damaged."""
    folder = tmp_path_factory.mktemp("whole")
    found = {
        family: write_tiny_model(folder / family, family, tokenizer=True) for family in FAMILIES
    }
    assert not any(map(refusal, found.values()))
    return found


@pytest.fixture(scope="module")
def whole(families: dict[str, Path]) -> Path:
    """One of them."""
    return families["llama"]


def refusal(path: Path) -> UserError | None:
    """The refusal of a checkpoint; None: it loads. Anything else that happens fails the test."""
    config = {
        "model": str(path),
        "threads": 1,
        "kv_cache": {"memory": "8MiB"},
        "scheduler": {"max_num_seqs": 2, "max_num_batched_tokens": 16},
    }
    with bounded():
        try:
            with Engine(Config.from_values(config)) as engine:
                if engine.tokenizer is not None:
                    assert engine.tokenizer.max_token_bytes > 0
                    engine.tokenizer.decode(engine.tokenizer.encode("the fox\x00 \u00e9"))
        except FactoryFailed:
            raise
        except UserError as error:
            assert "\n" not in str(error)
            assert len(str(error)) < 4000
            return error
    return None


@contextmanager
def bounded() -> Iterator[None]:
    """Fails where the body takes long or much memory."""
    started, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert time.monotonic() - started < MAX_S
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown * 1024 < MAX_GROWN_BYTES


@contextmanager
def copy_of(folder: Path) -> Iterator[Path]:
    """A copy to damage."""
    copy = folder.with_name("damaged")
    shutil.copytree(folder, copy)
    try:
        yield copy
    finally:
        shutil.rmtree(copy)


@st.composite
def changes(draw: st.DrawFn) -> Change:
    """One way to damage bytes: cut, overwritten, put in, taken out; more often near the start."""
    kind = draw(st.sampled_from(["cut", "overwrite", "number", "insert", "remove"]))
    place = draw(st.one_of(st.floats(0, 0.02), st.floats(0, 1)))
    some = draw(st.binary(min_size=1, max_size=12))
    number = draw(st.sampled_from(EDGES)).to_bytes(8, "little")
    size = draw(st.integers(1, 200))

    def change(content: bytes) -> bytes:
        at = int(place * len(content))
        before, after = content[:at], content[at:]
        return {
            "cut": before,
            "overwrite": before + some + after[len(some) :],
            "number": before + number + after[8:],
            "insert": before + some + after,
            "remove": before + after[size:],
        }[kind]

    return change


numbers = st.one_of(st.sampled_from(EDGES), st.integers(), st.sampled_from([-1, -7, 10**40]))
scalars = st.one_of(
    st.none(), st.booleans(), numbers, st.floats(), st.text(max_size=8), st.just("\ud800")
)
anything = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)

CONFIG_KEYS = [
    "architectures",
    "attention_bias",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "head_dim",
    "hidden_act",
    "hidden_size",
    "intermediate_size",
    "layer_types",
    "max_position_embeddings",
    "max_window_layers",
    "mlp_bias",
    "model_type",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "partial_rotary_factor",
    "quantization_config",
    "rms_norm_eps",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "sliding_window",
    "tie_word_embeddings",
    "torch_dtype",
    "use_sliding_window",
    "vocab_size",
]
ROPE_KEYS = [
    "rope_type",
    "type",
    "factor",
    "rope_theta",
    "low_freq_factor",
    "high_freq_factor",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "truncate",
    "mscale",
    "mscale_all_dim",
    "original_max_position_embeddings",
]
rope_values = st.one_of(
    st.sampled_from(["default", "linear", "llama3", "yarn", "dynamic"]), scalars
)
rope_sections = st.dictionaries(st.sampled_from(ROPE_KEYS), rope_values, max_size=6)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from(sorted(FAMILIES)),
    st.dictionaries(st.sampled_from(CONFIG_KEYS), anything, max_size=3),
    st.one_of(st.none(), rope_sections),
)
def test_values_of_a_models_config(
    families: dict[str, Path], family: str, values: dict[str, Any], rope: dict[str, Any] | None
) -> None:
    with copy_of(families[family]) as folder:
        config = json.loads((folder / "config.json").read_text()) | values
        if rope is not None:
            config["rope_parameters"] = rope
        (folder / "config.json").write_text(json.dumps(config))
        refusal(folder)


@pytest.mark.parametrize(
    "file", ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
)
@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(changes(), min_size=1, max_size=3))
def test_bytes_of_a_file(whole: Path, file: str, changed: list[Change]) -> None:
    with copy_of(whole) as folder:
        content = (folder / file).read_bytes()
        for change in changed:
            content = change(content)
        (folder / file).write_bytes(content)
        refusal(folder)


def _as_fifo(file: Path) -> None:
    os.mkfifo(file)


def _as_endless_device(file: Path) -> None:
    file.symlink_to("/dev/zero")


def _as_folder(file: Path) -> None:
    file.mkdir()


def _as_huge(file: Path) -> None:
    with file.open("wb") as opened:
        opened.truncate(2**30)  # takes no room on the disk


@pytest.mark.parametrize(
    ("put", "was"),
    [
        (_as_fifo, "a FIFO"),
        (_as_endless_device, "a device"),
        (_as_folder, "a folder"),
        (_as_huge, "MiB"),
    ],
)
@pytest.mark.parametrize(
    "file",
    [
        "config.json",
        "generation_config.json",
        "quantize_config.json",
        "quant_config.json",
        "hf_quant_config.json",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "chat_template.json",
        "model.safetensors",
        "model.safetensors.index.json",
    ],
)
def test_a_file_that_is_none_to_be_read(
    whole: Path, file: str, put: Callable[[Path], None], was: str
) -> None:
    if file == "model.safetensors" and put is _as_huge:
        was = "header"  # weights may be of any size
    with copy_of(whole) as folder:
        if file.endswith("index.json"):
            (folder / "model.safetensors").unlink()
        (folder / file).unlink(missing_ok=True)
        put(folder / file)
        error = refusal(folder)
        assert error is not None and file in str(error) and was in str(error), error


tensor_entries = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.one_of(st.sampled_from(["F32", "BF16", "I64", "F8_E4M3", "F4"]), scalars),
        "shape": st.one_of(st.lists(numbers, max_size=4), scalars),
        "data_offsets": st.one_of(st.lists(numbers, max_size=3), scalars),
        "more": scalars,
    },
)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0), st.one_of(tensor_entries, scalars), st.booleans())
def test_entries_of_a_safetensors_header(
    whole: Path, number: int, entry: Any, under_a_new_name: bool
) -> None:
    with copy_of(whole) as folder:
        file = folder / "model.safetensors"
        content = file.read_bytes()
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length])
        name = list(header)[number % len(header)]
        changed = header[name] | entry if isinstance(entry, dict) else entry
        header["model.new" if under_a_new_name else name] = changed
        text = json.dumps(header).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
        refusal(folder)


TOKENIZER_FILES = {
    "tokenizer_config.json": [
        "chat_template",
        "bos_token",
        "eos_token",
        "unk_token",
        "added_tokens_decoder",
        "extra_special_tokens",
    ],
    "special_tokens_map.json": ["bos_token", "pad_token", "additional_special_tokens"],
    "added_tokens.json": ["<tool>", "the", ""],
    "generation_config.json": ["eos_token_id", "temperature", "top_k", "do_sample", "num_beams"],
    "chat_template.json": ["chat_template"],
    "tokenizer.json": [
        "model",
        "added_tokens",
        "normalizer",
        "pre_tokenizer",
        "decoder",
        "post_processor",
    ],
}


FILES_ALWAYS = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


@pytest.mark.parametrize(
    "file",
    [
        pytest.param(file, marks=() if file in FILES_ALWAYS else pytest.mark.slow)
        for file in TOKENIZER_FILES
    ],
)
@settings(suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_values_of_the_files_beside_it(whole: Path, file: str, data: st.DataObject) -> None:
    values = data.draw(
        st.dictionaries(st.sampled_from(TOKENIZER_FILES[file]), anything, min_size=1)
    )
    with copy_of(whole) as folder:
        path = folder / file
        before = json.loads(path.read_text()) if path.is_file() else {}
        path.write_text(json.dumps(before | values))
        refusal(folder)
