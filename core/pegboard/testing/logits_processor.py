"""Contract suite of `LogitsProcessor`.

    class TestMyProcessor(LogitsProcessorContract):
        params = ({"strength": 0.5}, {"strength": 2.0})   # validated parameters, at least two

        @pytest.fixture
        def make(self):
            return MyProcessor                            # called with a ProcessorContext

The suite knows no processor's meaning. It asserts that a row's logits depend on that row's parameters
and history alone, so that batches, drafts and preemptions cannot change a token; of a processor that
promises `keeps_state`, on the calls for that row alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pytest
from numpy.typing import NDArray

from pegboard.interfaces.logits_processor import LogitRow, LogitsProcessor, ProcessorContext

if TYPE_CHECKING:
    import torch

MakeProcessor = Callable[[ProcessorContext], LogitsProcessor]

NUM_PROMPT = 5


class LogitsProcessorContract:
    """The contract of every logits processor.

    Attributes:
        params: validated parameters to try, two or more that act differently.
        keeps_state: whether its manifest promises so: it sees no drafts and no preempted sequence.
        vocab_size, max_num_seqs, device: of the context.
    """

    params: ClassVar[Sequence[Mapping[str, Any]]]
    keeps_state: ClassVar[bool] = False
    vocab_size: ClassVar[int] = 517
    max_num_seqs: ClassVar[int] = 8
    device: ClassVar[str] = "cpu"

    @pytest.fixture
    def make(self) -> MakeProcessor:
        """The factory under test."""
        raise NotImplementedError("override the fixture `make`")

    def processor(self, make: MakeProcessor) -> LogitsProcessor:
        return make(ProcessorContext(self.vocab_size, self.max_num_seqs, self.device))

    def logits(self, num_rows: int, seed: int = 1) -> torch.Tensor:
        import torch

        generator = torch.Generator().manual_seed(seed)
        return torch.randn((num_rows, self.vocab_size), generator=generator).to(self.device)

    def row(self, row: int, length: int) -> LogitRow:
        """A row after `length` tokens of its history, which nobody may write to."""
        return LogitRow(row, length, NUM_PROMPT, self.history(row)[:length])

    def history(self, row: int) -> NDArray[np.int32]:
        random = np.random.default_rng(row)
        tokens = random.integers(0, self.vocab_size // 8, 24).astype(np.int32)
        tokens.flags.writeable = False
        return tokens

    def alone(
        self, make: MakeProcessor, row: int, length: int, params: Mapping[str, Any]
    ) -> torch.Tensor:
        """One row of logits after a new processor."""
        processor = self.processor(make)
        processor.admit(row, params)
        return self.called(processor, row, length)

    def called(self, processor: LogitsProcessor, row: int, length: int) -> torch.Tensor:
        """One row of logits after a call for it alone."""
        logits = self.logits(self.max_num_seqs)[row : row + 1]
        processor.apply(logits, [self.row(row, length)])
        return logits[0]

    def test_parameters_act(self, make: MakeProcessor) -> None:
        plain = self.logits(self.max_num_seqs)[3]
        first, second = (self.alone(make, 3, 12, params) for params in self.params[:2])
        assert not bool((first == plain).all()) and not bool((first == second).all())

    def test_rows_do_not_touch_each_other(self, make: MakeProcessor) -> None:
        import torch

        if self.keeps_state:
            pytest.skip("it is called with one row at a time")
        processor, logits = self.processor(make), self.logits(self.max_num_seqs)
        chosen = [6, 0, 3]
        for row in chosen:
            processor.admit(row, self.params[row % len(self.params)])
        batch = logits[chosen].clone()
        processor.apply(batch, [self.row(row, 7 + row) for row in chosen])
        for got, row in zip(batch, chosen, strict=True):
            expected = self.alone(make, row, 7 + row, self.params[row % len(self.params)])
            assert torch.equal(got, expected), f"row {row}"

    def test_drafts_leave_no_trace(self, make: MakeProcessor) -> None:
        import torch

        if self.keeps_state:
            pytest.skip("it is shown no drafts")
        for params in self.params:
            processor = self.processor(make)
            processor.admit(2, params)
            drafted = [self.row(2, length) for length in (8, 9, 10, 11)]
            processor.apply(self.logits(4), drafted)
            after = self.logits(self.max_num_seqs)[2:3]
            processor.apply(after, [self.row(2, 9)])
            assert torch.equal(after[0], self.alone(make, 2, 9, params))

    def test_a_preempted_sequence_goes_on_alike(self, make: MakeProcessor) -> None:
        import torch

        if self.keeps_state:
            pytest.skip("its rows are not preempted")
        for params in self.params:
            processor = self.processor(make)
            processor.admit(2, params)
            for length in range(NUM_PROMPT, 12):
                processor.apply(self.logits(1), [self.row(2, length)])
            processor.release(2)
            processor.admit(2, params)
            logits = self.logits(self.max_num_seqs)[2:3]
            processor.apply(logits, [self.row(2, 12)])
            assert torch.equal(logits[0], self.alone(make, 2, 12, params))

    def test_rows_in_turns_do_not_touch_each_other(self, make: MakeProcessor) -> None:
        import torch

        chosen, lengths = (6, 0, 3), range(NUM_PROMPT, 12)
        together = self.processor(make)
        for row in chosen:
            together.admit(row, self.params[row % len(self.params)])
        found = [[self.called(together, row, length) for row in chosen] for length in lengths]
        for column, row in enumerate(chosen):
            own = self.processor(make)
            own.admit(row, self.params[row % len(self.params)])
            for logits, length in zip(found, lengths, strict=True):
                assert torch.equal(logits[column], self.called(own, row, length)), f"row {row}"

    def test_a_row_forgets_its_former_sequence(self, make: MakeProcessor) -> None:
        import torch

        first, second = self.params[:2]
        processor = self.processor(make)
        processor.admit(1, first)
        processor.apply(self.logits(1), [self.row(1, 9)])
        processor.release(1)
        processor.admit(1, second)
        logits = self.logits(self.max_num_seqs)[1:2]
        processor.apply(logits, [self.row(1, 9)])
        assert torch.equal(logits[0], self.alone(make, 1, 9, second))

    def test_the_first_token_has_only_the_prompt_before_it(self, make: MakeProcessor) -> None:
        for params in self.params:
            logits = self.alone(make, 0, NUM_PROMPT, params)
            assert logits.shape == (self.vocab_size,) and not bool(logits.isnan().any())
