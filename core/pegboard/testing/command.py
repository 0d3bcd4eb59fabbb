"""Contract suite of commands.

    class TestMyCommand(CommandContract):
        arguments = ("{model}", "--out", "{folder}/out.json")   # of a run that succeeds

        @pytest.fixture
        def make(self):
            return application              # the factory that the hook returns, called without arguments

A command that asks for calibrators sets `context` to a `TinyCommandContext` with its own.

`{model}` stands for the folder of a tiny model with a tokenizer, `{folder}` for an empty one. The
command runs as `pegboard <name>` runs it, with services of this module.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import pytest

from pegboard.errors import UserError
from pegboard.interfaces.command import CommandFactory
from pegboard.testing.command_context import TinyCommandContext
from pegboard.testing.tiny import write_tiny_model

NO_SUCH_OPTION = "--no-such-option"


class CommandContract:
    """The contract of every command.

    Attributes:
        arguments: of a run that succeeds.
        context: class of the services.
    """

    arguments: ClassVar[Sequence[str]]
    context: ClassVar[type[TinyCommandContext]] = TinyCommandContext

    @pytest.fixture
    def make(self) -> CommandFactory:
        """The factory under test."""
        raise NotImplementedError("override the fixture `make`")

    @pytest.fixture(scope="class")
    def model(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """The folder of a tiny model."""
        return write_tiny_model(tmp_path_factory.mktemp("tiny"), tokenizer=True)

    def run(
        self, make: CommandFactory, context: TinyCommandContext, arguments: Sequence[str]
    ) -> tuple[int, str]:
        """Status and standard output of one run, as `pegboard <name>` comes by them."""
        import typer

        command = typer.main.get_command(make())
        with contextlib.redirect_stdout(io.StringIO()) as output:
            status = command.main(
                args=list(arguments),
                prog_name="pegboard command",
                standalone_mode=False,
                obj=context,
            )
        return status if isinstance(status, int) else 0, output.getvalue()

    def usual(
        self, make: CommandFactory, context: TinyCommandContext, model: Path, folder: Path
    ) -> None:
        """A run with the suite's arguments, in a folder that is made for it."""
        folder.mkdir()
        places = {"{model}": str(model), "{folder}": str(folder)}
        arguments = list(self.arguments)
        for place, path in places.items():
            arguments = [argument.replace(place, path) for argument in arguments]
        status, _ = self.run(make, context, arguments)
        assert status == 0

    def test_it_runs_each_time_it_is_called(
        self, make: CommandFactory, model: Path, tmp_path: Path
    ) -> None:
        self.usual(make, self.context(), model, tmp_path / "first")
        self.usual(make, self.context(), model, tmp_path / "second")

    def test_help_says_how_it_is_used_and_does_nothing(self, make: CommandFactory) -> None:
        context = self.context()
        status, output = self.run(make, context, ["--help"])
        assert status == 0 and "Usage" in output
        assert context.asked == []

    def test_an_unknown_option_is_refused_by_name(self, make: CommandFactory) -> None:
        context = self.context()
        with pytest.raises(Exception, match=NO_SUCH_OPTION) as refusal:
            self.run(make, context, [NO_SUCH_OPTION])
        assert hasattr(refusal.value, "format_message"), "not an error of the command line"
        assert context.asked == []

    def test_models_are_closed_whatever_happens(
        self, make: CommandFactory, model: Path, tmp_path: Path
    ) -> None:
        context = self.context()
        self.usual(make, context, model, tmp_path / "well")
        assert context.all_closed
        if "forward" in context.asked:
            context = self.context(failing="forward")
            with pytest.raises(UserError):
                self.usual(make, context, model, tmp_path / "ill")
            assert context.all_closed

    def test_what_a_service_refuses_reaches_the_user(
        self, make: CommandFactory, model: Path, tmp_path: Path
    ) -> None:
        context = self.context()
        self.usual(make, context, model, tmp_path / "well")
        for service in dict.fromkeys(context.asked):
            refusing = self.context(failing=service)
            with pytest.raises(UserError, match=f"{service}: refused by the suite"):
                self.usual(make, refusing, model, tmp_path / service)
