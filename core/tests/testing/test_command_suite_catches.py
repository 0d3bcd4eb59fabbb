"""The suite of commands holds for a small command, and fails on faulty ones."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

from pegboard.cli.command_context import EngineCommandContext
from pegboard.errors import UserError
from pegboard.interfaces.command import CommandContext, CommandFactory
from pegboard.testing.command import CommandContract
from pegboard.testing.command_context import TinyCommandContext
from pegboard.testing.tiny import write_tiny_model

Scored = Callable[[CommandContext, str, str], float]


def score(services: CommandContext, model: str, text: str) -> float:
    """The mean log-probability of a text's tokens after its first."""
    token_ids = services.tokenizer(model).encode(text)
    loaded = services.load_model(model)
    try:
        logits, _ = loaded.forward(token_ids)
    finally:
        loaded.close()
    logprobs = logits[:-1].log_softmax(-1)
    return float(logprobs[range(len(token_ids) - 1), token_ids[1:]].mean())


def command(scored: Scored = score) -> CommandFactory:
    """A command that writes the score of each text into a file."""

    def application() -> typer.Typer:
        app = typer.Typer()

        @app.command()
        def run(ctx: typer.Context, model: str, texts: list[str], out: Path) -> None:
            """Scores texts."""
            lines = [
                f"{scored(ctx.obj, model, text)} {text}\n"
                for text in ctx.obj.progress(texts, "Scoring")
            ]
            out.write_text("".join(lines))

        return app

    return application


class Suite(CommandContract):
    arguments = ("{model}", "the dog", "a fox", "{folder}/scores.txt")


class TestScore(Suite):
    @pytest.fixture
    def make(self) -> CommandFactory:
        return command()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), tokenizer=True)


def leaving(services: CommandContext, model: str, text: str) -> float:
    """Leaves its model open."""
    token_ids = services.tokenizer(model).encode(text)
    return float(services.load_model(model).forward(token_ids)[0].sum())


def careless(services: CommandContext, model: str, text: str) -> float:
    """Closes its model when all goes well."""
    loaded = services.load_model(model)
    logits, _ = loaded.forward([1, 2])
    loaded.close()
    return float(logits.sum())


def silent(services: CommandContext, model: str, text: str) -> float:
    """Takes a mistake for an answer."""
    with contextlib.suppress(UserError):
        return score(services, model, text)
    return 0.0


def ending(services: CommandContext, model: str, text: str) -> float:
    """Ends the process in its own way."""
    try:
        return score(services, model, text)
    except UserError as mistake:
        sys.exit(str(mistake))


@pytest.mark.parametrize(
    ("scored", "test"),
    [
        (leaving, Suite().test_models_are_closed_whatever_happens),
        (careless, Suite().test_models_are_closed_whatever_happens),
        (silent, Suite().test_what_a_service_refuses_reaches_the_user),
        (ending, Suite().test_what_a_service_refuses_reaches_the_user),
    ],
)
def test_a_command_that_misuses_its_services_is_caught(
    scored: Scored, test: Any, model: Path, tmp_path: Path
) -> None:
    with pytest.raises((AssertionError, SystemExit, pytest.fail.Exception)):
        test(command(scored), model, tmp_path)


def once() -> CommandFactory:
    """Hands out one application, which is used up."""
    applications = [command()()]
    return lambda: applications.pop()


def test_a_factory_that_works_once_is_caught(model: Path, tmp_path: Path) -> None:
    with pytest.raises(IndexError):
        Suite().test_it_runs_each_time_it_is_called(once(), model, tmp_path)


def lenient() -> typer.Typer:
    """Takes whatever it does not know."""
    app = typer.Typer()

    @app.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
    def run(ctx: typer.Context) -> None:
        pass

    return app


def silent_about_itself() -> typer.Typer:
    """Has no help."""
    app = typer.Typer(add_help_option=False)
    app.command(add_help_option=False)(lambda: None)
    return app


def test_a_faulty_command_line_is_caught() -> None:
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        Suite().test_an_unknown_option_is_refused_by_name(lenient)
    with pytest.raises(Exception, match="No such option: --help"):
        Suite().test_help_says_how_it_is_used_and_does_nothing(silent_about_itself)


def test_the_suites_services_answer_as_the_engines_do(model: Path) -> None:
    suites, engines = TinyCommandContext(), EngineCommandContext()
    texts = ["the quick brown fox", "日本語 and emoji 😀"]
    for text in texts:
        token_ids = engines.tokenizer(str(model)).encode(text)
        tokenizer = suites.tokenizer(str(model))
        assert tokenizer.encode(text) == token_ids
        assert tokenizer.decode(token_ids) == engines.tokenizer(str(model)).decode(token_ids)
        one, other = suites.load_model(str(model)), engines.load_model(str(model))
        (logits, hidden), (expected, tapped) = (
            loaded.forward(token_ids, taps=(0, 1)) for loaded in (one, other)
        )
        other.close()
        assert logits.dtype == expected.dtype
        torch.testing.assert_close(logits, expected, atol=1e-3, rtol=0)
        for layer in (0, 1):
            torch.testing.assert_close(hidden[layer], tapped[layer], atol=1e-3, rtol=0)
    composition = suites.resolve({"model": str(model)}).composition
    assert composition == engines.resolve({"model": str(model)}).composition
    for services in (suites, engines):
        with pytest.raises(UserError):
            services.load_model(str(model / "nowhere"))
        assert list(services.progress("abc", "counting")) == list("abc")
