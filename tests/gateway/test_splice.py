"""The join of the outputs of two workers at any position."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import example, given
from hypothesis import strategies as st

from draftgate.backends.types import Delta, FinishReason, TokenLogprob
from draftgate.gateway.dispatch.splice import Splice

TEXTS = ["", "a", "bc", " def"]


def text_of(tokens: list[int], begin: int, end: int) -> str:
    return "".join(TEXTS[token] for token in tokens[begin:end])


def deltas_of(tokens: list[int], cuts: list[int], end: int, *, ended: bool) -> list[Delta]:
    """Return deltas for the first tokens, with cuts at some positions."""
    places = sorted({0, end, *(cut for cut in cuts if cut < end)})
    found = []
    for begin, stop in pairwise(places):
        part = tuple(tokens[begin:stop])
        logprobs = tuple(
            TokenLogprob(token, -1.0 * place) for place, token in enumerate(part, begin)
        )
        reason = FinishReason.LENGTH if ended and stop == end else None
        found.append(Delta(0, part, text_of(tokens, begin, stop), logprobs, reason))
    return found


def joined(splice: Splice, rest: list[Delta]) -> list[Delta]:
    client: list[Delta] = []
    take = splice.continued(client.append)
    for delta in rest:
        take(delta)
    return client


outputs = st.lists(st.integers(0, 3), min_size=1, max_size=30)
places = st.lists(st.integers(0, 30), max_size=10)


@given(tokens=outputs, source=places, sink=places, stopped=st.integers(0, 30))
def test_join_loses_and_repeats_nothing(
    tokens: list[int], source: list[int], sink: list[int], stopped: int
) -> None:
    """The client's output equals the output of one worker, wherever deltas begin and wherever the
    source stops."""
    splice = Splice([0])
    whole = deltas_of(tokens, sink, len(tokens), ended=True)
    client = deltas_of(tokens, source, min(stopped, len(tokens) - 1), ended=False)
    for delta in client:
        splice.add_source(delta)
    read = 0
    while not splice.caught_up:
        splice.add_sink(whole[read])
        read += 1
    assert not splice.differs
    client += joined(splice, whole[read:])
    assert [token for delta in client for token in delta.token_ids] == tokens
    assert "".join(delta.text for delta in client) == text_of(tokens, 0, len(tokens))
    found = [one.logprob for delta in client for one in delta.logprobs]
    assert found == [-1.0 * place for place in range(len(tokens))]
    assert [delta.finish_reason for delta in client if delta.finish_reason] == [FinishReason.LENGTH]


@given(tokens=outputs, sink=places, wrong=st.integers(0, 29), what=st.integers(0, 2))
@example(tokens=[1, 0], sink=[1], wrong=1, what=2)
def test_every_difference_is_found(
    tokens: list[int], sink: list[int], wrong: int, what: int
) -> None:
    """One other token, text or log probability of the destination is noticed when the source has
    computed it too."""
    wrong %= len(tokens)
    splice = Splice([0])
    for delta in deltas_of(tokens, [], len(tokens), ended=False):
        splice.add_source(delta)
    start = changed_at = 0
    for delta in deltas_of(tokens, sink, len(tokens), ended=True):
        stop = start + len(delta.token_ids)
        changed = delta
        if start <= wrong < stop:
            changed_at, place = start, wrong - start
            ids, scores = list(delta.token_ids), list(delta.logprobs)
            ids[place] = ids[place] + 1 if what == 0 else ids[place]
            scores[place] = TokenLogprob(0, 1.0) if what == 1 else scores[place]
            text = f"?{delta.text}" if what == 2 else delta.text
            changed = delta._replace(token_ids=tuple(ids), logprobs=tuple(scores), text=text)
        splice.add_sink(changed)
        start = stop
    # Text after the last text of the source may be text that the source still holds back.
    assert splice.differs or (what == 2 and not text_of(tokens, changed_at, len(tokens)))


def test_a_choice_that_the_source_has_ended_is_dropped() -> None:
    """The destination's deltas for a choice that has ended on the source do not reach the
    client, and the output ends with the other choice."""
    splice, end = Splice([0, 1]), FinishReason.LENGTH
    splice.add_source(Delta(0, (1,), "a", finish_reason=end))
    splice.add_source(Delta(1, (2,), "b"))
    splice.add_sink(Delta(0, (1,), "a", finish_reason=end))
    assert not splice.caught_up
    splice.add_sink(Delta(1, (2,), "b"))
    assert splice.caught_up
    assert not splice.differs
    rest = joined(splice, [Delta(1, (3,), "c", finish_reason=end)])
    assert [delta for delta in rest if delta.token_ids] == [Delta(1, (3,), "c", finish_reason=end)]
