"""A run of `pegboard train-eagle`, from prompts to a head. Broken off anywhere, it goes on when it is begun
again: answers are kept shard by shard, the training by its checkpoint."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pegboard import Engine, SamplingParams
from pegboard.errors import ConfigError
from pegboard.interfaces.command import CommandContext
from pegboard.interfaces.drafter import DrafterContext
from pegboard.interfaces.model import ModelShape
from pegboard_eagle.training.acceptance import WAYS, Acceptance, measure, write_report
from pegboard_eagle.training.answers import Answer, Answers
from pegboard_eagle.training.export import export
from pegboard_eagle.training.head import Head
from pegboard_eagle.training.log import Log
from pegboard_eagle.training.prompts import Prompt, encoded
from pegboard_eagle.training.recording import Recorder, record
from pegboard_eagle.training.start import Start
from pegboard_eagle.training.state import RunState, digest
from pegboard_eagle.training.target import Target, head_shape, read_target, taps_of
from pegboard_eagle.training.trainer import Trainer, TrainOptions
from pegboard_eagle.training.vocabulary import Vocabulary, vocabulary

LOG, REPORT = "log.jsonl", "acceptance.json"
SHARD = 64
"""Answers that are written together."""
STEPS_A_LINE = 10
HELD_OUT_EVERY, MAX_HELD_OUT = 20, 80
CHECKPOINT_S = 60.0


@dataclass(frozen=True, slots=True)
class Job:
    """The arguments of a run.

    Attributes:
        config: of the target's engine: `model`, and what else was said.
        prompts, held_out: to learn from, and to try the head on; None: some of the former.
        out: folder of the head.
        max_tokens: of an answer.
        max_prompt_tokens: longer prompts are left out.
        temperature: of the answers.
        seed: of answers that are sampled, and of the order in which they are learnt.
        batch: answers that are written at once.
        draft_vocab: most tokens that the head draws.
        intermediate_size: of its MLP; None: the target's.
        report_tokens: of an answer that the head is tried on.
        train: how it is trained.
    """

    config: Mapping[str, Any]
    prompts: Sequence[Prompt]
    held_out: Sequence[Prompt] | None
    out: Path
    max_tokens: int
    max_prompt_tokens: int
    temperature: float
    seed: int
    batch: int
    draft_vocab: int
    intermediate_size: int | None
    report_tokens: int
    train: TrainOptions


def train_head(job: Job, context: CommandContext) -> list[Acceptance]:
    """Trains and writes a head.

    Returns:
        What came of drafting with it.

    Raises:
        UserError: something asked for cannot be done.
    """
    return _Run(job, context).run()


class _Run:
    """One run.

    Attributes:
        held_out: token ids of prompts that are not learnt from, by number.
        state: what the folder holds.
    """

    held_out: dict[int, tuple[int, ...]]
    state: RunState

    def __init__(self, job: Job, context: CommandContext) -> None:
        self.job = job
        self.context = context
        self.config = {
            **job.config,
            "max_model_len": job.max_prompt_tokens + max(job.max_tokens, job.report_tokens),
            "scheduler": {"max_num_seqs": job.batch},
        }

    def run(self) -> list[Acceptance]:
        target, answers = self._answers()
        words = vocabulary(target, self._shown(answers, "counting tokens"), self.job.draft_vocab)
        torch.manual_seed(self.job.seed)  # what the start leaves to chance
        shape = head_shape(target.shape, len(words.token_ids), self.job.intermediate_size)
        trainer = Trainer(
            Head(shape), answers, self.held_out, words, self.job.train, self.state.checkpoint
        )
        is_new = not trainer.load()
        if is_new:
            self._start(trainer.head, answers, words)
        self._train(trainer, answers, target.shape, is_new=is_new)
        params = SamplingParams(
            max_tokens=self.job.report_tokens, temperature=self.job.temperature, seed=self.job.seed
        )
        prompts = list(self.held_out.values())
        ways = self.context.progress(WAYS, "trying the head")
        found = [measure(self.config, self.job.out, prompts, params, way) for way in ways]
        about = {
            "held_out_prompts": len(prompts),
            "answers": sum(map(len, answers.lengths)),
            "tokens_of_answers": answers.num_tokens(),
            "share_of_tokens_in_draft_vocabulary": round(words.coverage, 4),
            "head": shape.as_dict(),
            "epochs": self.job.train.epochs,
            "steps": trainer.step,
        }
        write_report(self.job.out / REPORT, about, found, params)
        return found

    def _answers(self) -> tuple[Target, Answers]:
        """The target's matrices, and its answers: those that are missing are made."""
        job, recorders = self.job, list[Recorder]()

        def recorder(context: DrafterContext) -> Recorder:
            assert context.target_shape is not None
            shape = context.target_shape
            recorders.append(Recorder(context, taps_of(shape), shape.num_layers))
            return recorders[-1]

        with Engine(self.config, show_progress=True, drafter=recorder) as engine:
            torch.set_num_threads(engine.prepared.composition.num_threads)
            prompts = encoded(engine, [*job.prompts, *(job.held_out or ())], job.max_prompt_tokens)
            self.held_out = self._held_out(prompts)
            if len(self.held_out) in (0, len(prompts)):
                raise ConfigError(
                    "data",
                    f"{len(prompts)} prompts of at most {job.max_prompt_tokens} tokens, of which"
                    f" {len(self.held_out)} are held out",
                    allowed="some to learn from, and some to hold out",
                )
            fingerprint = engine.prepared.composition.target.facts.fingerprint
            self.state = RunState(job.out, self._of_answers(fingerprint, prompts), self._of_head())
            answers = Answers(self.state.answers)
            done = answers.done()
            missing = {number: ids for number, ids in prompts.items() if number not in done}
            self._record(engine, recorders[0], missing, answers)
            return read_target(recorders[0].context), answers

    def _held_out(self, prompts: dict[int, tuple[int, ...]]) -> dict[int, tuple[int, ...]]:
        """The prompts that are not learnt from: those of their own file, or every twentieth."""
        if self.job.held_out is not None:
            first = len(self.job.prompts)
            return {number: ids for number, ids in prompts.items() if number >= first}
        chosen = list(prompts)[::HELD_OUT_EVERY][:MAX_HELD_OUT]
        return {number: prompts[number] for number in chosen}

    def _of_answers(
        self, fingerprint: str, prompts: dict[int, tuple[int, ...]]
    ) -> dict[str, object]:
        """Everything that answers depend on."""
        return {
            "model": fingerprint,
            "settings": digest({**self.job.config, "threads": None}),
            "data": digest(list(prompts.items())),
            "max-tokens": self.job.max_tokens,
            "temperature": self.job.temperature,
            "seed": self.job.seed,
        }

    def _of_head(self) -> dict[str, object]:
        """Everything else that a head depends on."""
        return {
            "draft-vocab": self.job.draft_vocab,
            "intermediate-size": self.job.intermediate_size,
            "held-out": digest(sorted(self.held_out)),
            **self.job.train.identity(),
        }

    def _record(
        self,
        engine: Engine,
        recorder: Recorder,
        prompts: dict[int, tuple[int, ...]],
        answers: Answers,
    ) -> None:
        job, made = self.job, list[Answer]()
        params = SamplingParams(
            max_tokens=job.max_tokens, temperature=job.temperature, seed=job.seed
        )
        recorded = record(engine, recorder, prompts, params)
        for answer in self.context.progress(recorded, "answering prompts", len(prompts)):
            made.append(answer)
            if len(made) == SHARD:
                answers.add(made)
                made = []
        if made:
            answers.add(made)

    def _shown(self, answers: Answers, label: str) -> Iterator[list[Answer]]:
        """Shards without what is held out."""
        for shard in self.context.progress(answers, label, len(answers)):
            if kept := [answer for answer in shard if answer.prompt not in self.held_out]:
                yield kept

    def _start(self, head: Head, answers: Answers, words: Vocabulary) -> None:
        start = Start(head, words.embedding, words.rows)
        for shard in self._shown(answers, "closed-form start, taps"):
            start.show(shard)
        start.fit_taps()
        for shard in self._shown(answers, "closed-form start, tokens"):
            start.show_again(shard)
        start.fit()

    def _train(
        self, trainer: Trainer, answers: Answers, target: ModelShape, *, is_new: bool
    ) -> None:
        log = Log(self.job.out / LOG, trainer.step)
        held_out = [
            answer
            for shard in answers
            for answer in shard
            if answer.prompt in self.held_out and answer.num_new > 1
        ]

        def finish_epoch(epoch: int) -> None:
            reached = trainer.reached(held_out)
            log.write(trainer.step, epoch=epoch, reached=reached, tokens_a_step=1 + sum(reached))
            export(trainer.head, trainer.token_ids, target, taps_of(target), self.job.out)
            trainer.save()

        if is_new:
            finish_epoch(0)
        now = trainer.epoch
        saved = time.monotonic()
        losses = list[float]()
        remaining = trainer.num_steps - trainer.step
        batches = self.context.progress(trainer.batches(), "training", remaining)
        for epoch, batch in batches:
            if epoch > now:
                finish_epoch(epoch)
                now = epoch
            if time.monotonic() > saved + CHECKPOINT_S:
                trainer.save()  # never of an epoch's end before that is noted
                saved = time.monotonic()
            rate = trainer.rate()
            losses.append(trainer.train(batch))
            if trainer.step % STEPS_A_LINE == 0:
                loss = round(sum(losses) / len(losses), 4)
                log.write(trainer.step, epoch=epoch, loss=loss, learning_rate=rate)
                losses = []
        if remaining:
            finish_epoch(self.job.train.epochs)
