"""Configs that are right, and the messages of those that are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pegboard.config import Choice, Config, load_config
from pegboard.errors import ConfigError, ConfigMistakes

ALIASES = ", ".join(f"&a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 30))
ALIASES = f"model: [&a0 [x], {ALIASES}]"
"""A line that stands for 9 ** 29 values."""


def refusal(**values: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        Config.from_values({"model": "m", **values})
    return str(caught.value)


def test_defaults_are_those_of_the_documented_schema() -> None:
    config = Config(model="m")
    assert config.scheduler.name == "fcfs"
    assert (config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens) == (64, 2048)
    assert config.scheduler.max_step_ms == "auto"
    assert config.kv_cache.allocator.name == "paged"
    assert config.prefix_cache.name == config.attention.name == config.quantizer.name == "auto"
    assert config.drafter.name == config.kv_transfer.name == "none"
    assert (config.revision, config.seed, config.server.api_keys) == (None, None, None)
    assert (config.server.host, config.server.port) == ("127.0.0.1", 8000)
    limits = config.server.limits
    assert (limits.body, limits.prompts, limits.n, limits.stop) == (8 * 1024**2, 128, 128, 16)


def test_an_interface_takes_a_name_or_a_name_with_options() -> None:
    assert Config(model="m", attention="torch") == Config(model="m", attention={"name": "torch"})
    config = Config(model="m", scheduler={"name": "wfq", "options": {"max_wait": 3}})
    assert config.scheduler.options == {"max_wait": 3}
    assert Config(model="m", observers=["log"]).observers == [Choice(name="log")]


def test_settings_beside_the_name_keep_the_default_name() -> None:
    assert Config(model="m", scheduler={"max_num_seqs": 3}).scheduler.name == "fcfs"
    assert Config(model="m", executor={"tensor_parallel": 2}).executor.name == "local"


@pytest.mark.parametrize(("text", "name"), [("on", "on"), ("off", "none"), ("true", "on")])
def test_yaml_switches_are_accepted_for_the_prefix_cache(text: str, name: str) -> None:
    assert load_config(None, {"model": "m"}, [f"prefix_cache={text}"]).prefix_cache.name == name


@pytest.mark.parametrize(
    ("said", "bytes_or_fraction"),
    [
        ("2GiB", 2 * 1024**3),
        ("500 MB", 500 * 1000**2),
        ("1.5kib", 1536),
        (4096, 4096),
        (0.9, 0.9),
        ("0.25", 0.25),
        (1, 1.0),
        ("auto", "auto"),
    ],
)
def test_kv_memory_is_a_size_or_a_fraction(said: Any, bytes_or_fraction: Any) -> None:
    memory = Config(model="m", kv_cache={"memory": said}).kv_cache.memory
    assert memory == bytes_or_fraction
    assert type(memory) is type(bytes_or_fraction)


@pytest.mark.parametrize("said", [90, 0, -1, 1.5, "2 gigs", "", True, None, "nan", "inf", "-inf"])
def test_kv_memory_that_is_neither_is_refused(said: Any) -> None:
    assert refusal(kv_cache={"memory": said}).startswith("kv_cache.memory: ")


@pytest.mark.parametrize("said", [1, "yes", None, "slowly"])
def test_verify_is_true_or_false(said: Any) -> None:
    assert Config(model="m", kv_cache={"verify": True}).kv_cache.verify is True
    assert refusal(kv_cache={"verify": said}).startswith("kv_cache.verify: ")


def test_a_config_survives_being_written_and_read() -> None:
    config = Config(
        model="m", seed=2**64 - 1, kv_cache={"memory": 1}, kernels={"linear": "fast"},
        drafter={"name": "ngram", "num_speculative_tokens": 3}, server={"api_keys": "k"},
    )  # fmt: skip
    assert Config.model_validate_json(config.model_dump_json()) == config
    assert Config(**Config(model="m").model_dump()) == Config(model="m")


def test_none_in_python_is_none_in_yaml() -> None:
    assert Config(model="m", seed=None, drafter=None, revision=None) == Config(
        model="m", seed="none", drafter="none", revision="none"
    )


def test_a_path_object_is_a_model() -> None:
    assert Config(model=Path("/models/x")).model == "/models/x"


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ({"modle": 1}, ["modle: unknown key; allowed: model, ", "fix: did you mean 'model'?"]),
        (
            {"kv_cache": {"blok_size": 1}},
            [
                "kv_cache.blok_size: unknown key; allowed: allocator, block_size, memory, encoding",
                "did you mean 'kv_cache.block_size'?",
            ],
        ),
        ({"max_num_seqs": 8}, ["max_num_seqs: unknown", "did you mean 'scheduler.max_num_seqs'?"]),
        ({"observers": [{"name": "log", "optoins": {}}]}, ["'observers[0].options'"]),
        ({"drafter": {"name": "x", "policy": {"nme": "y"}}}, ["drafter.policy.nme: unknown key"]),
        ({"kv_cache": {3: 4}}, ["kv_cache.3: unknown key"]),
        ({"zzz": 1}, ["zzz: unknown key"]),
    ],
)
def test_unknown_key_is_refused_with_its_path_and_the_nearest(
    values: dict[str, Any], parts: list[str]
) -> None:
    line = refusal(**values)
    for part in parts:
        assert part in line


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model: " + "[" * 5000, "nested too deeply"),
        ("model: &a [*a]", "model: "),
        (ALIASES, "model: [['x'], [["),
    ],
    ids=["deep", "in itself", "of aliases"],
)
def test_yaml_without_end_is_refused_in_one_short_line(
    tmp_path: Path, text: str, said: str
) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert said in str(caught.value)
    assert len(str(caught.value)) < 300


def test_a_key_like_no_other_suggests_nothing() -> None:
    assert "fix:" not in refusal(zzz=1)


@pytest.mark.parametrize(
    ("values", "line"),
    [
        (
            {"numerics": "invarient"},
            "numerics: 'invarient'; allowed: auto, invariant, fast; fix: did you mean 'invariant'?",
        ),
        ({"threads": 0}, "threads: 0; allowed: auto, or a whole number, 1 to 1024"),
        ({"threads": True}, "threads: True; allowed: auto, or a whole number, 1 to 1024"),
        ({"max_model_len": 10**400}, "allowed: auto, or a whole number, 1 to 2147483647"),
        ({"max_model_len": "4k"}, "max_model_len: '4k'; allowed: auto, or a whole number"),
        ({"scheduler": {"max_step_ms": 0}}, "max_step_ms: 0; allowed: auto, none, or whole millisec"),
        ({"seed": -1}, "seed: -1; allowed: none, or a whole number, 0 to 2**64 - 1"),
        ({"seed": 2**64}, f"seed: {2**64}; allowed"),
        ({"revision": 12345}, "revision: 12345; allowed: a text; fix: in quotes: \"12345\""),
        ({"scheduler": {"max_num_seqs": 1.5}}, "scheduler.max_num_seqs: 1.5; allowed"),
        ({"server": {"host": "a..b"}}, "server.host: 'a..b'; allowed: a host's name or address"),
        ({"server": {"host": "a\0"}}, "server.host: 'a\\x00'; allowed: a host's name or address"),
        ({"server": {"port": 70000}}, "server.port: 70000; allowed: a whole number, 0 to 65535"),
        ({"server": {"limits": {"body": "8 MeB"}}}, "server.limits.body: '8 MeB'; allowed: a size"),
        ({"kv_cache": [1]}, "kv_cache: [1]; allowed: a mapping of allocator"),
        ({"observers": "log"}, "observers: 'log'; allowed: a list"),
        ({"plugins": {"load": "x.py"}}, "plugins.load: 'x.py'; allowed: a list of texts"),
        ({"kernels": {"linear": 3}}, "kernels: 3; allowed: a text"),
        ({"attention": {"name": "t", "options": [1]}}, "attention.options: [1]; allowed: a mapping"),
        ({"executor": {"data_parallel": 2}}, "executor.data_parallel: unknown key"),
        ({"drafter": {"name": "e", "verification": "exac"}}, "did you mean 'exact'?"),
    ],
)  # fmt: skip
def test_wrong_value_is_refused_with_its_path_and_what_is_allowed(
    values: dict[str, Any], line: str
) -> None:
    assert line in refusal(**values)


def test_a_model_is_needed() -> None:
    with pytest.raises(ConfigError, match=r"^model: missing; fix: --set model="):
        Config()


def test_a_misspelt_model_is_one_mistake() -> None:
    with pytest.raises(ConfigError, match=r"^modle: unknown key"):
        Config(modle="m")


def test_every_mistake_is_reported() -> None:
    with pytest.raises(ConfigMistakes) as caught:
        Config(model="m", threads=0, server={"port": "x"})
    assert [reason.partition(":")[0] for reason in caught.value.reasons] == [
        "threads",
        "server.port",
    ]


def test_a_wrong_api_key_is_not_shown() -> None:
    assert "secret" not in refusal(server={"api_keys": {"key": "secret"}})


def test_validating_in_pydantics_way_gives_the_same_errors() -> None:
    with pytest.raises(ConfigError, match=r"^modle: unknown key"):
        Config.model_validate({"modle": "m"})


def test_a_config_does_not_change() -> None:
    with pytest.raises(Exception, match="frozen"):
        Config(model="m").model = "n"


class TestLoading:
    def test_file_then_flags_then_sets(self, tmp_path: Path) -> None:
        path = tmp_path / "c.yaml"
        path.write_text("model: file\nscheduler: {max_num_seqs: 1, max_num_batched_tokens: 11}\n")
        flags = {"scheduler": {"max_num_seqs": 2, "options": {"a": 2}}, "seed": 2}
        config = load_config(path, flags, ["scheduler.max_num_seqs=3", "seed=3"])
        assert config.model == "file"
        assert config.scheduler.max_num_batched_tokens == 11
        assert config.scheduler.options == {"a": 2}
        assert (config.scheduler.max_num_seqs, config.seed) == (3, 3)

    def test_settings_over_a_bare_name_keep_it(self, tmp_path: Path) -> None:
        path = tmp_path / "c.yaml"
        path.write_text("model: m\ndrafter: ngram\n")
        drafter = load_config(path, sets=["drafter.num_speculative_tokens=5"]).drafter
        assert (drafter.name, drafter.num_speculative_tokens) == ("ngram", 5)

    def test_a_set_value_is_yaml(self) -> None:
        sets = ["model=m", "observers=[log, {name: metrics}]", "scheduler.options={a: [1, 2]}"]
        config = load_config(None, {}, sets)
        assert [observer.name for observer in config.observers] == ["log", "metrics"]
        assert config.scheduler.options == {"a": [1, 2]}

    def test_a_set_value_may_hold_an_equals_sign(self) -> None:
        assert load_config(None, {}, ["model=a=b"]).model == "a=b"

    @pytest.mark.parametrize("text", ["model", "=x", "a..b=1", ".a=1", ""])
    def test_a_set_without_key_or_value_is_refused(self, text: str) -> None:
        with pytest.raises(ConfigError, match=r"^--set: .*allowed: key=value"):
            load_config(None, {"model": "m"}, [text])

    def test_a_set_value_that_is_not_yaml_is_refused(self) -> None:
        with pytest.raises(ConfigError, match=r"^scheduler.options: not YAML: line 1"):
            load_config(None, {"model": "m"}, ["scheduler.options={a"])

    @pytest.mark.parametrize(
        ("content", "said"),
        [
            (b"model: [", "not YAML: line 1, column"),
            (b"- model", r"\['model'\]; allowed: a mapping"),
            (b"model: a\nmodel: b\n", "not YAML: line 2, column 1: the key 'model' stands twice"),
            (b"model: \xff\xfe\n", "cannot be read"),
            (b"model: !!python/object:os.system x", "not YAML: .*constructor"),
        ],
    )
    def test_a_file_that_is_no_config_is_refused(
        self, tmp_path: Path, content: bytes, said: str
    ) -> None:
        path = tmp_path / "c.yaml"
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=said) as caught:
            load_config(path)
        assert caught.value.thing == str(path)

    def test_a_missing_file_and_a_folder_are_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="no such file"):
            load_config(tmp_path / "none.yaml")
        with pytest.raises(ConfigError, match="cannot be read"):
            load_config(tmp_path)

    def test_an_empty_file_lacks_a_model(self, tmp_path: Path) -> None:
        (tmp_path / "c.yaml").write_text("")
        with pytest.raises(ConfigError, match=r"^model: missing"):
            load_config(tmp_path / "c.yaml")

    def test_a_number_as_key_is_unknown(self, tmp_path: Path) -> None:
        (tmp_path / "c.yaml").write_text("model: m\n1: 2\n")
        with pytest.raises(ConfigError, match=r"^1: unknown key"):
            load_config(tmp_path / "c.yaml")


@pytest.mark.parametrize(
    "path",
    sorted((Path(__file__).parents[2] / "examples" / "configs").glob("*.yaml")),
    ids=lambda path: path.name,
)
def test_example_configs_follow_the_schema(path: Path) -> None:
    assert load_config(path).model
