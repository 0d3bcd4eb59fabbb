"""The flags that tutorials of other engines use: the keys that they set, or why they are refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pegboard.cli.speculative import EXAMPLE, drafter_of
from pegboard.config_text import parse_yaml


class _Typed:
    """The ways to type a flag.

    Attributes:
        name: the first; of two that switch a thing on and off, both, with a slash between.
        short: another one.
    """

    name: str
    short: str | None

    @property
    def names(self) -> tuple[str, ...]:
        """All ways to type it."""
        return (self.name,) if self.short is None else (self.name, self.short)

    @property
    def parameter(self) -> str:
        """Its argument of a command's function."""
        return self.name.partition("/")[0].lstrip("-").replace("-", "_")


def _as_it_is(value: Any, flag: str) -> Any:
    return value


@dataclass(frozen=True)
class Flag(_Typed):
    """A flag that stands for a key of the config.

    Attributes:
        name: as it is typed.
        key: the config's key that it sets.
        help: one line.
        read: (text, flag) -> the key's value.
        type: of the argument, for typer.
        short: a second way to type it.
    """

    name: str
    key: str
    help: str
    read: Callable[[Any, str], Any] = _as_it_is
    type: Any = str
    short: str | None = None

    @property
    def metavar(self) -> str | None:
        """The argument's name in the help; None: it takes none."""
        return {bool: None, list[str]: "VALUE..."}.get(self.type, "VALUE")


@dataclass(frozen=True)
class RefusedFlag(_Typed):
    """A flag of other engines that has no counterpart here: an error that says why.

    Attributes:
        name: as it is typed.
        why: the reason.
        fix: the way to do it here.
        type: of the argument; bool: it takes none.
        short: a second way to type it.
    """

    name: str
    why: str
    fix: str = "leave it out"
    type: Any = str
    short: str | None = None

    @property
    def parameter(self) -> str:
        """Its argument, which may have the name of another one."""
        return f"refused_{super().parameter}"


def _many(value: str, flag: str) -> Any:
    """A number that may be written `8k`, which is 8000, or `8K`, which is 8192."""
    match = _MANY.fullmatch(value)
    if match is None:
        return parse_yaml(value, flag)
    number = round(float(match[1]) * _MULTIPLES[match[2]], 6)
    return int(number) if number.is_integer() else number


def _length(value: str, flag: str) -> Any:
    return "auto" if value == "-1" else _many(value, flag)


def _seed(value: str, flag: str) -> Any:
    return "none" if value == "-1" else parse_yaml(value, flag)


def _one_or_more(value: list[str], flag: str) -> str | list[str]:
    return value[0] if len(value) == 1 else value


def _not(value: bool, flag: str) -> bool:
    return not value


def _dtype(value: str, flag: str) -> str:
    return {"half": "float16", "float": "float32"}.get(value, value)


def _generation_config(value: str, flag: str) -> str:
    return {"vllm": "none"}.get(value, value)


def _kv_encoding(value: str, flag: str) -> str:
    return {"fp8": "fp8_e4m3"}.get(value, value)


_MANY = re.compile(r"(\d+(?:\.\d+)?)([kKmMgG])")
_MULTIPLES = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}

FLAGS: tuple[Flag, ...] = (
    Flag("--tokenizer", "tokenizer", "Folder or file of another tokenizer."),
    Flag("--revision", "revision", "Branch, tag or commit of a hub model."),
    Flag("--chat-template", "chat_template", "File of another chat template; none: no chats."),
    Flag(
        "--generation-config",
        "generation_config",
        "auto: the checkpoint's sampling defaults hold; none.",
        _generation_config,
    ),
    Flag("--dtype", "dtype", "auto, float32, bfloat16, float16 or float64.", _dtype),
    Flag("--seed", "seed", "Seed of requests that have none; -1: none.", _seed),
    Flag("--device", "device", "auto, cpu or cuda."),
    Flag("--max-model-len", "max_model_len", "Most tokens a sequence; 8k, 8K, auto.", _length),
    Flag("--block-size", "kv_cache.block_size", "Tokens a KV block.", parse_yaml),
    Flag("--gpu-memory-utilization", "kv_cache.memory", "Fraction of memory to use.", parse_yaml),
    Flag("--kv-cache-dtype", "kv_cache.encoding", "How KV is stored.", _kv_encoding),
    Flag("--quantization", "quantizer", "The quantizer; auto: the checkpoint's.", short="-q"),
    Flag(
        "--enable-prefix-caching/--no-enable-prefix-caching",
        "prefix_cache",
        "Reuse the KV of common beginnings.",
        type=bool,
    ),
    Flag("--max-num-seqs", "scheduler.max_num_seqs", "Most sequences at once.", parse_yaml),
    Flag(
        "--max-num-batched-tokens",
        "scheduler.max_num_batched_tokens",
        "Most tokens a step.",
        _many,
    ),
    Flag("--speculative-config", "drafter", f"As JSON: {EXAMPLE}.", drafter_of, short="-sc"),
    Flag(
        "--tensor-parallel-size",
        "executor.tensor_parallel",
        "Devices a layer.",
        parse_yaml,
        short="-tp",
    ),
    Flag(
        "--pipeline-parallel-size",
        "executor.pipeline_parallel",
        "Stages of layers.",
        parse_yaml,
        short="-pp",
    ),
    Flag("--host", "server.host", "Address to listen on."),
    Flag("--port", "server.port", "Port to listen on; 0: a free one.", parse_yaml),
    Flag(
        "--api-key",
        "server.api_keys",
        "Keys of which clients must send one, or file:PATH.",
        type=list[str],
    ),
    Flag(
        "--served-model-name",
        "server.served_model_name",
        "The model's names; the first is shown.",
        _one_or_more,
        list[str],
    ),
    Flag(
        "--enable-log-requests/--no-enable-log-requests",
        "server.log_requests",
        "A log line for each request.",
        type=bool,
    ),
    Flag("--disable-log-requests", "server.log_requests", "No line for each request.", _not, bool),
)
"""The flags that tutorials use, and the keys that they set."""

REFUSED_FLAGS: tuple[RefusedFlag, ...] = (
    RefusedFlag("--model", "the model is no flag", "serve MODEL"),
    RefusedFlag(
        "--trust-remote-code",
        "code that comes with a checkpoint is never run",
        "an architecture of its own is a plugin",
        bool,
    ),
    RefusedFlag("--enforce-eager", "there is no graph capture to switch off", type=bool),
    RefusedFlag(
        "--enable-chunked-prefill", "the scheduler decides on chunks", "scheduler: fcfs", bool
    ),
    RefusedFlag("--no-enable-chunked-prefill", "prompts are computed in chunks", type=bool),
    RefusedFlag("--enable-lora", "adapters are not supported", type=bool),
    RefusedFlag("--lora-modules", "adapters are not supported", type=list[str]),
    RefusedFlag("--enable-auto-tool-choice", "calls of tools are left in the text", type=bool),
    RefusedFlag("--tool-call-parser", "calls of tools are left in the text"),
    RefusedFlag("--reasoning-parser", "reasoning is left in the text"),
    RefusedFlag(
        "--data-parallel-size",
        "a server runs one engine, without replicas",
        "start several servers behind a load balancer",
        short="-dp",
    ),
    RefusedFlag("--enable-expert-parallel", "mixtures of experts are not supported", type=bool),
    RefusedFlag("--swap-space", "a preempted sequence is computed anew, not swapped"),
    RefusedFlag("--cpu-offload-gb", "weights are not offloaded"),
    RefusedFlag("--load-format", "the files of the checkpoint say it"),
    RefusedFlag("--tokenizer-mode", "there is one kind of tokenizer"),
    RefusedFlag("--distributed-executor-backend", "a key says it", "--set executor.name=..."),
    RefusedFlag("--kv-transfer-config", "a key says it", "--set kv_transfer=..."),
    RefusedFlag("--speculative-model", "one flag says it all", "--speculative-config '{...}'"),
    RefusedFlag("--num-speculative-tokens", "one flag says it all", "--speculative-config '{...}'"),
    RefusedFlag(
        "--ngram-prompt-lookup-max", "one flag says it all", "--speculative-config '{...}'"
    ),
    RefusedFlag(
        "--ngram-prompt-lookup-min", "one flag says it all", "--speculative-config '{...}'"
    ),
    RefusedFlag("--rope-scaling", "the checkpoint says it", "set it in its config.json"),
    RefusedFlag("--hf-overrides", "the checkpoint says it", "set it in its config.json"),
    RefusedFlag("--download-dir", "the hub's own cache is used", "HF_HOME=FOLDER serve ..."),
    RefusedFlag("--uds", "the server listens on a host and port", "--host and --port"),
    RefusedFlag("--ssl-keyfile", "the server speaks plain HTTP", "a proxy in front of it"),
    RefusedFlag("--ssl-certfile", "the server speaks plain HTTP", "a proxy in front of it"),
    RefusedFlag("--shutdown-timeout", "open answers have 30 s, until a second signal"),
    RefusedFlag("--disable-log-stats", "an idle server logs none", type=bool),
)
"""Flags of the same tutorials that would be without effect here."""
