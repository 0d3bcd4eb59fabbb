"""The training loop, which goes on from its last checkpoint."""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from pegboard.errors import ConfigError
from pegboard_eagle.training.answers import Answer, Answers
from pegboard_eagle.training.columns import Columns, columns
from pegboard_eagle.training.head import Head
from pegboard_eagle.training.loss import LossOptions, hits_of, loss_of
from pegboard_eagle.training.vocabulary import Vocabulary

POOL = 4
"""Shards that are in memory at once: batches are drawn from them together."""

LEAST_RATE = 0.05
"""Of the learning rate, at the end."""

REACHED_BATCH = 8
"""Answers that acceptance is counted on at once."""

Step = tuple[tuple[int, ...], list[int]]
"""A pool's shards, and the places of a batch's answers in it."""

BETAS, WEIGHT_DECAY, MAX_NORM = (0.9, 0.95), 0.01, 0.5


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """How the head is trained.

    Attributes:
        epochs: times that each answer is seen.
        batch_size: tokens of answers a step, about.
        learning_rate: the highest; it rises over the first steps and then falls as a cosine.
        warm_up: steps over which it rises.
        seed: of the order of the answers.
        loss: what is minimized.
        in_bfloat16: products are of bfloat16; the weights that are trained never are.
    """

    epochs: int
    batch_size: int
    learning_rate: float
    warm_up: int
    seed: int
    loss: LossOptions
    in_bfloat16: bool

    def identity(self) -> dict[str, object]:
        """Everything that a head depends on, but for rounding."""
        values = asdict(self)
        del values["in_bfloat16"]
        return values


class Trainer:
    """Trains a head on answers.

    Args:
        left_out: numbers of prompts whose answers are not learnt from.
        checkpoint: where it is kept how far the training is.

    Attributes:
        step: steps that are done.
    """

    def __init__(
        self,
        head: Head,
        answers: Answers,
        left_out: Collection[int],
        vocabulary: Vocabulary,
        options: TrainOptions,
        checkpoint: Path,
    ) -> None:
        self.head = head
        self.step = 0
        self._answers = answers
        # For each shard the answers to learn from, a column for each token but the first.
        self._usable = [
            {prompt: n - 1 for prompt, n in shard.items() if prompt not in left_out and n > 1}
            for shard in answers.lengths
        ]
        self._vocabulary = vocabulary
        self._rows = vocabulary.rows.bfloat16() if options.in_bfloat16 else vocabulary.rows
        self._options = options
        self._checkpoint = checkpoint
        self._optimizer = torch.optim.AdamW(
            head.parameters(),
            lr=options.learning_rate,
            betas=BETAS,
            weight_decay=WEIGHT_DECAY,
            fused=True,
        )

    @cached_property
    def num_steps(self) -> int:
        return sum(len(self._plan(epoch)) for epoch in range(self._options.epochs))

    @property
    def epoch(self) -> int:
        """The epoch of the next step."""
        return next((epoch for epoch, _ in self._steps()), self._options.epochs)

    @property
    def token_ids(self) -> torch.Tensor:
        """int64 [draft vocabulary], the target's ids."""
        return self._vocabulary.token_ids

    def batches(self) -> Iterator[tuple[int, list[Answer]]]:
        """From the step that is next on: its epoch, and the answers of a batch."""
        held: tuple[int, ...] = ()
        pool: list[Answer] = []
        for epoch, (shards, batch) in self._steps():
            if shards != held:
                held, pool = shards, self._pool(shards)
            yield epoch, [pool[place] for place in batch]

    def train(self, batch: Sequence[Answer]) -> float:
        """One step; its loss.

        Raises:
            ConfigError: the loss is no number any more.
        """
        rate = self.rate()
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        made = self.columns(batch)
        with torch.autocast("cpu", torch.bfloat16, enabled=self._options.in_bfloat16):
            loss = loss_of(self.head, made, self._rows, self._options.loss)
        self._optimizer.zero_grad(set_to_none=True)
        if loss.requires_grad:
            torch.autograd.backward(loss)
            torch.nn.utils.clip_grad_norm_(self.head.parameters(), MAX_NORM)
            self._optimizer.step()
        self.step += 1
        value = loss.item()
        if not math.isfinite(value):
            raise ConfigError(
                "learning-rate",
                f"{self._options.learning_rate}: the loss of step {self.step} is {value}",
                fix="a smaller one, and delete the folder's training.safetensors",
            )
        return value

    def reached(self, answers: Sequence[Answer]) -> list[float]:
        """Share of columns at which a chain of guesses is right up to each position."""
        sums = [[0, 0] for _ in range(self._options.loss.num_steps)]
        for first in range(0, len(answers), REACHED_BATCH):
            made = self.columns(answers[first : first + REACHED_BATCH])
            with torch.autocast("cpu", torch.bfloat16, enabled=self._options.in_bfloat16):
                hits = hits_of(self.head, made, len(sums))
            for total, (valid, right) in zip(sums, hits, strict=True):
                total[0] += valid
                total[1] += right
        return [round(right / max(valid, 1), 4) for valid, right in sums]

    def columns(self, batch: Sequence[Answer]) -> Columns:
        return columns(batch, self._vocabulary.embedding, self._vocabulary.draft_ids)

    def rate(self) -> float:
        """The learning rate of the next step."""
        options = self._options
        rising = min(1.0, (self.step + 1) / max(options.warm_up, 1))
        part = self.step / max(self.num_steps, 1)
        falling = LEAST_RATE + (1 - LEAST_RATE) * (1 + math.cos(math.pi * part)) / 2
        return options.learning_rate * rising * falling

    def save(self) -> None:
        """Writes the checkpoint."""
        tensors = {f"head.{name}": one for name, one in self.head.state_dict().items()}
        for name, parameter in self.head.named_parameters():
            for key in ("exp_avg", "exp_avg_sq"):
                state = self._optimizer.state.get(parameter, {})
                if key in state:
                    tensors[f"{key}.{name}"] = state[key]
        written = self._checkpoint.with_suffix(".part")
        save_file(tensors, written, metadata={"step": str(self.step)})
        written.replace(self._checkpoint)

    def load(self) -> bool:
        """Goes on from the checkpoint, if there is one.

        Raises:
            ConfigError: it is damaged.
        """
        if not self._checkpoint.exists():
            return False
        try:
            with safe_open(self._checkpoint, "pt") as file:
                step = int(file.metadata()["step"])
            tensors = load_file(self._checkpoint)
            self.head.load_state_dict(_under(tensors, "head."))
            averages, squares = _under(tensors, "exp_avg."), _under(tensors, "exp_avg_sq.")
            for name, parameter in self.head.named_parameters():
                if name in averages:
                    self._optimizer.state[parameter] = {
                        "step": torch.tensor(float(step)),
                        "exp_avg": averages[name],
                        "exp_avg_sq": squares[name],
                    }
        except (OSError, SafetensorError, ValueError, KeyError, RuntimeError) as problem:
            raise ConfigError(
                "out", f"{self._checkpoint} is damaged ({problem})", fix="delete it"
            ) from None
        self.step = step
        return True

    def _steps(self) -> Iterator[tuple[int, Step]]:
        """From the step that is next on: epochs and batches."""
        steps = (
            (epoch, step) for epoch in range(self._options.epochs) for step in self._plan(epoch)
        )
        return islice(steps, self.step, None)

    def _plan(self, epoch: int) -> list[Step]:
        """The steps of an epoch. Answers of a batch are about equally long: they are padded to the
        longest."""
        chance = random.Random(f"{self._options.seed} {epoch}")
        order = list(range(len(self._usable)))
        chance.shuffle(order)
        plan = []
        for first in range(0, len(order), POOL):
            shards = tuple(order[first : first + POOL])
            lengths = [n for shard in shards for n in self._usable[shard].values()]
            places = list(range(len(lengths)))
            chance.shuffle(places)
            places.sort(key=lengths.__getitem__)
            batches: list[list[int]] = []
            for place in places:
                if (
                    not batches
                    or (len(batches[-1]) + 1) * lengths[place] > self._options.batch_size
                ):
                    batches.append([])
                batches[-1].append(place)
            chance.shuffle(batches)
            plan += [(shards, batch) for batch in batches]
        return plan

    def _pool(self, shards: Sequence[int]) -> list[Answer]:
        return [
            answer
            for shard in shards
            for answer in self._answers.shard(shard)
            if answer.prompt in self._usable[shard]
        ]


def _under(tensors: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {
        name.removeprefix(prefix): one for name, one in tensors.items() if name.startswith(prefix)
    }
