"""A client's words never pose as another API key's."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pegboard.server.caller import Caller

callers = st.builds(Caller, st.none() | st.integers(0, 120))
texts = st.text(alphabet="01:9a", max_size=4) | st.text(max_size=5) | st.none()


@given(callers, texts, callers, texts)
def test_two_share_a_salt_or_a_tenant_when_key_and_text_are_the_same(
    one: Caller, first: str | None, other: Caller, second: str | None
) -> None:
    same = one == other and (first or "") == (second or "")
    assert (one.namespaced(first) == other.namespaced(second)) == same


def test_without_keys_and_texts_all_are_one() -> None:
    assert Caller().namespaced(None) == Caller().namespaced("") == ""
