"""The one schema of everything that can be set, and how a file, flags and `--set` become it.

A value that an interface takes is a name or `{name, options}`. `auto` is settled when the
composition is resolved; `none` switches a part off. Sizes are bytes, or texts such as `8MiB`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StrictBool, ValidationError, model_validator

from pegboard.config_text import explain, overlay, parse_set, read_yaml, unknown_key
from pegboard.config_values import (
    ApiKeys,
    AutoCount,
    AutoDepth,
    AutoDraftNodes,
    AutoThreads,
    Count,
    Host,
    Hosts,
    Kernels,
    MaxStep,
    Memory,
    Names,
    OptionalText,
    Place,
    Seed,
    ServedNames,
    Size,
    Table,
    Text,
    Texts,
    one_of,
    switch,
    whole,
)

DType = Literal["auto", "float32", "bfloat16", "float16", "float64"]
Device = Literal["auto", "cpu", "cuda"]
Numerics = Literal["auto", "invariant", "fast"]
GenerationConfig = Literal["auto", "none"]
Verification = Literal["exact", "rejection"]


class Section(BaseModel):
    """Part of the config: unknown keys are refused, values do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Choice(Section):
    """The implementation of an interface, by name, with its own options."""

    name: Text
    options: Table = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _accept_bare_name(cls, value: Any) -> Any:
        if value is None:
            return {"name": "none"}
        return {"name": value} if isinstance(value, (str, bool, int, float)) else value

    @property
    def is_named(self) -> bool:
        """Whether the config names an implementation, and does not leave it open or to the default."""
        return "name" in self.model_fields_set and self.name not in ("auto", "on")


class KVCacheConfig(Section):
    """KV memory.

    Attributes:
        allocator: who hands out blocks.
        block_size: tokens a block.
        memory: size of the pool: bytes, or a fraction of the device's memory (a float up to 1.0)
            of which weights and activations are taken first.
        encoding: how KV is stored.
        verify: compare checksums of a cached block's bytes at every hit; to look for a fault, since it
            is slow.
    """

    allocator: Choice = Choice(name="paged")
    block_size: AutoCount = "auto"
    memory: Memory = "auto"
    encoding: Text = "auto"
    verify: StrictBool = False


class SchedulerChoice(Choice):
    """The scheduler, and the limits of a step that hold for every one.

    Attributes:
        max_num_seqs: most sequences that run at once.
        max_num_batched_tokens: most tokens a step.
        max_step_ms: milliseconds that a step may take while a sequence decodes: prompts are then
            computed in smaller chunks, of 64 tokens at least. `auto` is 200, or none where numerics
            are fast; none: chunks are as large as a step allows.
    """

    name: Text = "fcfs"
    max_num_seqs: Count = 64
    max_num_batched_tokens: Count = 2048
    max_step_ms: MaxStep = "auto"


class DrafterChoice(Choice):
    """The drafter of speculative decoding; with `none`, its other settings are refused.

    Attributes:
        model: reference of the draft model, for a drafter that has one.
        num_speculative_tokens: most draft tokens a sequence and step. `auto` is what the drafter's manifest
            states.
        policy: who decides how many of them are verified.
        verification: `exact` never changes a token. `rejection`, for drafters that draw their guesses,
            keeps more of these, and of the answers only their distribution: the tokens are others than
            without a drafter, and a seed gives the same ones only with the same drafts.
    """

    name: Text = "none"
    model: OptionalText = None
    num_speculative_tokens: AutoDraftNodes = "auto"
    policy: Choice = Choice(name="auto")
    verification: Annotated[Verification, one_of(Verification)] = "exact"


class ExecutorChoice(Choice):
    """The executor, which says where the workers live, and the devices that the model is spread over.

    Attributes:
        depth: most steps in flight: with 2 the next step is planned and launched while one runs. `auto`
            is what the executor's manifest states, or 1 where a drafter is named.
    """

    name: Text = "local"
    tensor_parallel: Count = 1
    pipeline_parallel: Count = 1
    depth: AutoDepth = "auto"


class PluginsConfig(Section):
    """Which plugins are considered.

    Attributes:
        load: single-file plugins, by path.
        disable: plugins to leave out, by their own name or their distribution's.
        replace: who has what several plugins claim, by such a name. The keys: `interface.name` for a
            thing that several provide; `plugin.name` for the name of a plugin; `interface` for what
            `auto` takes where several have the same priority.
    """

    load: Texts = Field(default_factory=list)
    disable: Texts = Field(default_factory=list)
    replace: Names = Field(default_factory=dict)


class LimitsConfig(Section):
    """Limits on requests to the server. Each holds for one request. A request over a limit is refused
    before it costs anything; the answer names the setting.

    Attributes:
        body: most bytes of a body.
        values: most JSON values in it, at any depth.
        keys: most keys of its objects, at any depth.
        depth: most objects and lists inside one another.
        prompts: most prompts.
        n: most sequences a prompt.
        sequences: most sequences, prompts times n.
        messages: most messages of a chat.
        parts: most parts of a message's content.
        bytes_per_token: most bytes of a prompt or a chat for each token of the context. A text with
            more is not tokenized to learn whether it fits: hardly any does.
        name: most characters of a model, a user, a salt, or another text by which things are told apart.
        metadata: most entries of `metadata`.
        metadata_characters: most characters in all of them.
        stop: most stop texts.
        stop_characters: most characters of all stop texts.
        stop_token_ids: most ids that end a sequence.
        logit_bias: most biased ids.
        processors: most bytes, as JSON, of the parameters of logits processors.
        echo: most characters of the prompts that an answer repeats, for each of its choices. Of a prompt
            that it repeats as token ids (`return_token_ids`), each counts for eight.
        logprobs: most logprobs in an answer: of each token that one is shown for, its own and those
            of the most likely ones. The answer of a stream does not count, as it is not kept.
        queue: most sequences that wait, of all requests: while they do, others are answered with 503.
            A request of more by itself is refused with 400.
        queue_tokens: most tokens of the prompts of all sequences that wait; over it, as over `queue`.
            `auto`: four times what can run at once, and no less than 2**20.
    """

    body: Size = 8 * 2**20
    values: Count = 2**18
    keys: Count = 2**15
    depth: Count = 64
    prompts: Count = 128
    n: Count = 128
    sequences: Count = 512
    messages: Count = 2048
    parts: Count = 256
    bytes_per_token: Count = 16
    name: Count = 256
    metadata: Count = 16
    metadata_characters: Count = 16 * (64 + 512)
    stop: Count = 16
    stop_characters: Count = 8192
    stop_token_ids: Count = 1024
    logit_bias: Count = 1024
    processors: Size = 16 * 2**10
    echo: Count = 8 * 2**20
    logprobs: Count = 2**18
    queue: Count = 4096
    queue_tokens: AutoCount = "auto"

    def allowed(self, setting: str) -> str:
        """The allowed values, for the refusal of a request over a limit."""
        return f"at most {getattr(self, setting)} (server.limits.{setting})"


class ServerConfig(Section):
    """The HTTP server.

    Attributes:
        port: to listen on; 0 takes a free one.
        api_keys: keys that let clients in, each a text or `file:PATH`. None: those of the environment's
            PEGBOARD_API_KEY, and without these everybody may come in.
        admin_keys: keys for what concerns all clients, `/metrics` and `/reset_prefix_cache`; they let in
            wherever those of `api_keys` do. None: those of PEGBOARD_ADMIN_KEY, and without these
            nobody may where there are `api_keys`, and everybody where there are none. Without `api_keys`,
            admins alone need a key.
        allowed_hosts: names by which a server without `api_keys` may be called on a loopback address,
            beside localhost; what another page in a browser sends bears its name.
        keep_alive_s: seconds that a connection may rest between requests; 0: it is closed after each.
        max_connections: most connections at a time; the one idle longest gives way to a new one. auto:
            what the system's limit of open files leaves, at most 4096.
        served_model_name: the model's name, or several; auto, also among others, is `model`.
        log_requests: a log line for each request that was answered or refused.
        silence_s: seconds without a sign of life of the engine's process or of a worker, after which
            `/ready` and `/health` say so with 503. They send one every second.
        deadline_s: seconds after which a step hangs, or 20 times what the longest step took, if that is
            more. All open requests then end with an error, and the engine is dead; so it is when the
            silence lasts for this long, of a process that starts for 120 seconds at least.
        farewell_s: seconds for which `/ready` and `/health` still say why the engine is dead, before the
            server ends with status 1.
    """

    host: Host = "127.0.0.1"
    port: Annotated[int, whole(0, 65535)] = 8000
    api_keys: ApiKeys = None
    admin_keys: ApiKeys = None
    allowed_hosts: Hosts = Field(default_factory=list)
    # longer than common load balancers, so that they close first
    keep_alive_s: Annotated[int, whole(0, 86_400)] = 75
    max_connections: AutoCount = "auto"
    served_model_name: ServedNames = "auto"
    log_requests: StrictBool = True
    silence_s: Annotated[int, whole(2, 86_400)] = 10  # signs come every second
    deadline_s: Annotated[int, whole(1, 86_400)] = 30
    farewell_s: Annotated[int, whole(0, 86_400)] = 15
    limits: LimitsConfig = LimitsConfig()


class Config(Section):
    """Everything that can be set; see the module.

    Attributes:
        model: a folder, a file, a hub id, or `pkg://package/file`.
        tokenizer: a folder or file to take the tokenizer from instead of the model's.
        revision: branch, tag or commit of a hub model.
        chat_template: path of a jinja2 file to use instead of the model's; none: chats are refused.
        generation_config: `auto`: the checkpoint's generation config fills what a request leaves
            out; `none`: it is not heeded.
        dtype: of activations and unquantized weights.
        threads: threads on a CPU.
        max_model_len: most tokens a sequence, prompt and output together.
        seed: from which seeds of requests without one are drawn.
        numerics: `invariant` accepts only kernels whose rows do not depend on the batch.
        kernels: a plugin's name, or an operation's name to a kernel's name.
    """

    model: Place
    tokenizer: Place = "auto"
    revision: OptionalText = None
    chat_template: Place = "auto"
    generation_config: Annotated[GenerationConfig, one_of(GenerationConfig)] = "auto"
    dtype: Annotated[DType, one_of(DType)] = "auto"
    device: Annotated[Device, one_of(Device)] = "auto"
    threads: AutoThreads = "auto"
    max_model_len: AutoCount = "auto"
    seed: Seed = None
    numerics: Annotated[Numerics, one_of(Numerics)] = "auto"
    kv_cache: KVCacheConfig = KVCacheConfig()
    prefix_cache: Annotated[Choice, switch] = Choice(name="auto")
    scheduler: SchedulerChoice = SchedulerChoice()
    attention: Choice = Choice(name="auto")
    quantizer: Choice = Choice(name="auto")
    kernels: Kernels = "auto"
    drafter: DrafterChoice = DrafterChoice()
    logits_processors: list[Choice] = Field(default_factory=list)
    executor: ExecutorChoice = ExecutorChoice()
    kv_transfer: Choice = Choice(name="none")
    observers: list[Choice] = Field(default_factory=list)
    plugins: PluginsConfig = PluginsConfig()
    server: ServerConfig = ServerConfig()

    def __init__(self, **values: Any) -> None:
        """Raises ConfigError, or ConfigMistakes when several values are wrong."""
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise explain(error, type(self)) from None

    @property
    def served_names(self) -> tuple[str, ...]:
        """All names of the model, at least one; metrics and reports show the first."""
        named = self.server.served_model_name
        listed = [named] if isinstance(named, str) else named
        return tuple(dict.fromkeys(self.model if name == "auto" else name for name in listed))

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> Self:
        """The config of a nested mapping.

        Raises:
            ConfigError: with the whole path of what is wrong, and the nearest known key.
        """
        for key in values:
            if not isinstance(key, str):
                raise unknown_key((str(key),), cls)
        return cls(**values)


def load_config(
    path: Path | None = None,
    values: Mapping[str, Any] | None = None,
    sets: Sequence[str] = (),
) -> Config:
    """The config of a file, with nested values (flags) over it, and `a.b=value` texts over both.

    Raises:
        ConfigError: the file cannot be read, a text is not `key=value`, or a value is refused.
    """
    layers = [read_yaml(path) if path is not None else {}, values or {}, *map(parse_set, sets)]
    merged: dict[str, Any] = {}
    for layer in layers:
        merged = overlay(merged, layer)
    return Config.from_values(merged)
