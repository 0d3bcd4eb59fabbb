"""The bodies of both kinds of completion read a client's word on drafts."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from pegboard.config import LimitsConfig
from pegboard.server.protocol import ChatBody, CompletionBody, GenerationBody

BODIES: list[tuple[type[GenerationBody], dict[str, Any]]] = [
    (CompletionBody, {"prompt": "Hi"}),
    (ChatBody, {"messages": [{"role": "user", "content": "Hi"}]}),
]


@pytest.mark.parametrize(("kind", "rest"), BODIES)
def test_a_word_on_drafts_is_read(kind: type[GenerationBody], rest: dict[str, Any]) -> None:
    def most(**fields: Any) -> int | None:
        return kind.model_validate({**rest, **fields}, context=LimitsConfig()).speculative

    assert most() is None
    assert most(speculative="off") == most(speculative=False) == 0
    assert most(speculative={"num_speculative_tokens": 3}) == 3
    for word in (True, 3, {"num_speculative_tokens": -1}, {"max": 3}):
        with pytest.raises(ValidationError, match="speculative"):
            most(speculative=word)
