"""`CheckpointSource`: where tensors, config and tokenizer come from.

A source's manifest entry names the files it reads (`files = ["*.safetensors"]`) and a torch-free
function `describe(path) -> CheckpointFacts`, which reads headers only. The worker then opens the
source by its factory and reads tensors by the names of the facts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

VERSION = 1


@dataclass(frozen=True, slots=True)
class TensorFact:
    """A stored tensor.

    Attributes:
        shape: its logical shape (of the weights, not of packed bytes).
        dtype: element type of `CheckpointSource.read` (`float32`, `bfloat16`, `uint8`, ...).
        format: `plain`, or the block format that the bytes are in (`Q4_1`), which a quantizer reads.
        num_bytes: stored size.
    """

    shape: tuple[int, ...]
    dtype: str
    format: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token that other files than the tokenizer's own name; it is never split into pieces.

    Attributes:
        content: its text.
        token_id: its id, where the file says it.
        special: left out of what is shown.
        lstrip, rstrip: it takes the spaces before, after it.
        single_word: found between word boundaries alone.
        normalized: looked for in the text as the tokenizer has normalized it.
        overrides: it replaces a token of the same text in the tokenizer's own file.
    """

    content: str
    token_id: int | None = None
    special: bool = True
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool = False
    overrides: bool = False


@dataclass(frozen=True, slots=True)
class TokenizerFacts:
    """The checkpoint's facts of its tokenizer.

    Attributes:
        file: path of a `tokenizer.json`; None: the checkpoint has none.
        chat_template: jinja2 source; None: none.
        special_tokens: `bos_token`, `eos_token`, ... to their texts, as templates use them.
        add_bos: whether a plain prompt is begun with the bos token by rule of the checkpoint;
            None: what the tokenizer file's own post-processor does.
        add_eos: whether it is ended with the eos token; counts where `add_bos` is not None.
        added_tokens: tokens that the tokenizer's file may lack, in the order in which they are added.
        eos_token_id: the id of `eos_token`, where other files than the tokenizer's name it.
    """

    file: str | None
    chat_template: str | None = None
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    add_bos: bool | None = None
    eos_token_id: int | None = None
    add_eos: bool = False
    added_tokens: tuple[AddedToken, ...] = ()


@dataclass(frozen=True, slots=True)
class CheckpointFacts:
    """A checkpoint read without its weights.

    Attributes:
        source: name of the source that described it.
        path: absolute path of the folder or file.
        fingerprint: hex digest that changes when config, headers or files change; KV of one fingerprint
            is never used under another.
        config: the model's config in Hugging Face's keys (`architectures`, `hidden_size`, ...).
        tensors: by name, in Hugging Face's names.
        quantization: the method that the checkpoint says its weights are in; None: plain.
        quantization_config: the method's own settings.
        eos_token_ids: ids that end a sequence.
        tokenizer: its files and texts.
        eos_sources: where each of `eos_token_ids` was found: a file or key to its ids.
        generation: how the checkpoint wants to be sampled, in the keys of Hugging Face's
            `generation_config.json`. `pegboard check` shows the keys that are not followed.
    """

    source: str
    path: str
    fingerprint: str
    config: Mapping[str, Any]
    tensors: Mapping[str, TensorFact]
    quantization: str | None
    quantization_config: Mapping[str, Any]
    eos_token_ids: tuple[int, ...]
    tokenizer: TokenizerFacts
    eos_sources: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    generation: Mapping[str, Any] = field(default_factory=dict)


class CheckpointSource(ABC):
    """An open checkpoint on a worker. Its factory takes the `CheckpointFacts`."""

    @abstractmethod
    def read(self, name: str, rows: slice | None = None) -> torch.Tensor:
        """A stored tensor on the CPU, of the fact's dtype; block formats as uint8 [rows, bytes].

        Args:
            name: a key of `CheckpointFacts.tensors`.
            rows: part of the first axis; None: all.

        The tensor may be a view of a mapped file: it must not be written to, and is valid until
        `close`.

        Raises:
            CheckpointError: no such tensor, or its bytes are damaged.
        """

    @abstractmethod
    def close(self) -> None:
        """Releases files and maps. Idempotent."""
