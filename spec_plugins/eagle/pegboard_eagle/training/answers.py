"""The training data: answers of the target, and the hidden states it had while it wrote them, in shards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from pegboard.errors import ConfigError

MAX_STORED = float(torch.finfo(torch.float16).max)
PATTERN = "answers-*.safetensors"


@dataclass(frozen=True, slots=True)
class Answer:
    """A prompt, its answer, and the target's states of all tokens but the last, which it never read.

    Attributes:
        prompt: the prompt's number.
        token_ids: int32 [N + 1], of the prompt and the answer.
        num_prompt_tokens: how many of them are the prompt's.
        taps: float16 [N, number of taps * hidden_size], as `fc` reads them.
        features: float16 [N, hidden_size], after the final norm.
    """

    prompt: int
    token_ids: torch.Tensor
    num_prompt_tokens: int
    taps: torch.Tensor
    features: torch.Tensor

    @property
    def num_new(self) -> int:
        """Tokens of the answer."""
        return len(self.token_ids) - self.num_prompt_tokens


class Answers:
    """The shards in a folder, oldest first. A shard is written whole or not at all.

    Attributes:
        lengths: for each shard, its prompts' numbers and the tokens of their answers.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._paths = sorted(folder.glob(PATTERN))
        self.lengths = [_lengths(path) for path in self._paths]

    def __len__(self) -> int:
        return len(self._paths)

    def done(self) -> set[int]:
        """Numbers of the prompts that are answered."""
        return {prompt for shard in self.lengths for prompt in shard}

    def num_tokens(self) -> int:
        """Tokens of all answers."""
        return sum(sum(shard.values()) for shard in self.lengths)

    def add(self, answers: Sequence[Answer]) -> None:
        """Writes a shard."""
        counts = [[one.prompt, len(one.token_ids), one.num_prompt_tokens] for one in answers]
        path = self._folder / f"answers-{len(self):05d}.safetensors"
        tensors = {
            "counts": torch.tensor(counts),
            "token_ids": torch.cat([one.token_ids for one in answers]),
            "taps": torch.cat([one.taps for one in answers]),
            "features": torch.cat([one.features for one in answers]),
        }
        written = path.with_suffix(".part")
        save_file(tensors, written)
        written.replace(path)
        self._paths.append(path)
        self.lengths.append({one.prompt: one.num_new for one in answers})

    def shard(self, number: int) -> list[Answer]:
        """The answers of a shard."""
        tensors = load_file(self._paths[number])
        counts = tensors["counts"].tolist()
        token_ids = torch.split(tensors["token_ids"], [length for _, length, _ in counts])
        lengths = [length - 1 for _, length, _ in counts]
        return [
            Answer(prompt, ids, num_prompt, taps, features)
            for (prompt, _, num_prompt), ids, taps, features in zip(
                counts,
                token_ids,
                torch.split(tensors["taps"], lengths),
                torch.split(tensors["features"], lengths),
                strict=True,
            )
        ]

    def __iter__(self) -> Iterator[list[Answer]]:
        return map(self.shard, range(len(self)))


def stored(states: torch.Tensor) -> torch.Tensor:
    """States as float16; the few beyond it, of a text's first token, at its end."""
    return states.clamp(-MAX_STORED, MAX_STORED).to(torch.float16)


def _lengths(path: Path) -> dict[int, int]:
    """A shard's prompts, and the tokens of their answers."""
    try:
        with safe_open(path, "pt") as file:
            counts = file.get_tensor("counts").tolist()
        return {prompt: length - num_prompt for prompt, length, num_prompt in counts}
    except (OSError, SafetensorError, ValueError) as problem:
        raise ConfigError("out", f"{path} is damaged ({problem})", fix="delete it") from None
