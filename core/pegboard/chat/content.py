"""The form in which a template reads a message's content: one text, or a list of parts.

Templates of models that see images read `message.content[0].text`, others read `message.content` as one
text. Most read only one of the two and silently drop the other. A known text is rendered in both forms
to find out which one the template keeps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pegboard.chat.template import ChatTemplate
from pegboard.errors import RequestError, TokenizerError

Message = Mapping[str, Any]

_MARKER = "Zebra7Quartz"
_NEVER_SHOWN = "Umbra3Onyx"
"""The value of a key that no template reads: a template that shows it prints the list itself."""


@dataclass(frozen=True)
class ContentForms:
    """The forms of content that a template keeps, by role; a role that it was not tried with is as the
    user's.

    Attributes:
        text: roles whose content may be one text.
        parts: roles whose content may be a list of `{"type": "text", "text": ...}`.
    """

    text: frozenset[str]
    parts: frozenset[str]

    def shape(self, message: Message) -> Message:
        """The message with its content in a form that the template keeps: as it is where it can
        be. Several texts of a list stand on lines of their own in the one text."""
        content, role = message.get("content"), message.get("role")
        takes_text, takes_parts = self._has(self.text, role), self._has(self.parts, role)
        if isinstance(content, str) and not takes_text:
            return {**message, "content": [_part(content)]}
        if isinstance(content, list) and not takes_parts and all(map(_is_text, content)):
            return {**message, "content": "\n".join(part["text"] for part in content)}
        return message

    def _has(self, roles: frozenset[str], role: Any) -> bool:
        known = isinstance(role, str) and (role in self.text or role in self.parts)
        return (role if known else "user") in roles


def find_forms(template: ChatTemplate, where: str) -> ContentForms:
    """Renders short conversations, and sees in which form a known text is kept.

    A template that refuses all of them in both forms is taken to read one text: it refuses chats
    itself, with its own words.

    Raises:
        TokenizerError: it renders them, and leaves the user's text out each time.
    """
    user = {form: _outcomes(template, _conversations("user", form)) for form in ("text", "parts")}
    if not any(True in outcomes for outcomes in user.values()):
        if any(False in outcomes for outcomes in user.values()):
            raise TokenizerError(
                f"{where}: chat template",
                "leaves out what a user says, as one text and as a list of parts",
                fix="give another with chat_template, or none: chat_template=none",
            )
        user = {"text": {True}, "parts": set()}
    kept = {form: {"user"} if True in outcomes else set() for form, outcomes in user.items()}
    for role in ("system", "assistant"):
        for form in ("text", "parts"):
            if True in _outcomes(template, _conversations(role, form)):
                kept[form].add(role)
    return ContentForms(text=frozenset(kept["text"]), parts=frozenset(kept["parts"]))


def _conversations(role: str, form: str) -> Iterator[Sequence[Message]]:
    """Conversations in which a message of the role holds the marker, all contents in one form."""
    tried = {
        "user": (("user",), ("system", "user")),
        "system": (("system", "user"),),
        "assistant": (("user", "assistant", "user"), ("system", "user", "assistant", "user")),
    }
    for roles in tried[role]:
        at = len(roles) - 1 - roles[::-1].index(role)
        texts = [_MARKER if index == at else "Hello" for index in range(len(roles))]
        yield [
            {
                "role": one,
                "content": text if form == "text" else [_part(text) | {"probe": _NEVER_SHOWN}],
            }
            for one, text in zip(roles, texts, strict=True)
        ]


def _outcomes(template: ChatTemplate, conversations: Iterator[Sequence[Message]]) -> set[bool]:
    """Whether the marker was kept, of each conversation that the template does not refuse."""
    outcomes = set()
    for messages in conversations:
        try:
            text = template.render(messages, tools=None, add_generation_prompt=True)
        except RequestError:
            continue
        folded = text.casefold()
        outcomes.add(_MARKER.casefold() in folded and _NEVER_SHOWN.casefold() not in folded)
    return outcomes


def _part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _is_text(part: Any) -> bool:
    return (
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
    )
