"""Windows over long contexts: every token is seen, answers keep their places."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from data_pipeline.config import TokenizerConfig
from data_pipeline.tokenizer import Tokenizer, import_tokenizer
from eval.squad_data import SquadExample, read_squad
from eval.squad_windows import answer_positions, make_windows, tokenize_with_offsets, window_spans
from eval.tasks import TaskError


@pytest.fixture(scope="module")
def tokenizer(shared_data: Path) -> Tokenizer:
    return import_tokenizer(shared_data / "vocab" / "bert-base-uncased-vocab.txt", TokenizerConfig())


def example(question: str, context: str, answer: str = "", start: int = 0) -> SquadExample:
    answers, starts = ((answer,), (start,)) if answer else ((), ())
    return SquadExample(id="q", question=question, context=context, answers=answers, starts=starts)


def test_r36_every_context_token_lies_in_a_window() -> None:
    assert window_spans(157, 114, 64) == [(0, 114), (50, 157)]
    assert window_spans(114, 114, 64) == [(0, 114)] and window_spans(0, 114, 64) == [(0, 0)]
    for overlap in range(114):
        spans = window_spans(157, 114, overlap)
        assert spans[0][0] == 0 and spans[-1][1] == 157
        assert all(later[0] <= earlier[1] and later[0] > earlier[0] for earlier, later in pairwise(spans))
    for overlap in (114, 128, -1):
        with pytest.raises(TaskError, match=rf"overlap of {overlap} tokens does not fit windows with room for 114"):
            window_spans(157, 114, overlap)


def test_r36_answers_are_labelled_where_they_are_complete(tokenizer: Tokenizer) -> None:
    words = ["cat"] * 157
    words[120] = "oslo"
    context = " ".join(words)
    case = example(" ".join(["who"] * 11), context, "oslo", context.index("oslo"))
    windows = make_windows(tokenizer, [case], 128, 64)
    starts, ends = answer_positions(windows, [case])
    assert windows.first.tolist() == [0, 50] and windows.encoded.lengths.tolist() == [128, 121]
    assert (starts.tolist(), ends.tolist()) == ([0, 83], [0, 83])  # 11 + 2 + 120 - 50
    assert tokenizer.tokens[windows.encoded.ids[windows.encoded.offsets[1] + 83]] == "oslo"


def test_r37_an_overlong_question_leaves_room_for_context(tokenizer: Tokenizer) -> None:
    case = example("who " * 400, "the cat sat")
    windows = make_windows(tokenizer, [case], 128, 32)
    assert windows.question_tokens.tolist() == [64] and windows.encoded.lengths.tolist() == [70]
    with pytest.raises(TaskError, match="leaves no room for context"):
        make_windows(tokenizer, [case], 67, 32)


@pytest.mark.parametrize(
    ("context", "answer", "start"),
    [
        ("Line one\r\nLine two has gold.", "gold", 23),
        ("😀😀 won by Oslo", "Oslo", 10),
        ("In the 1960s, café life", "1960", 7),
    ],
)
def test_r37_offsets_point_into_the_untouched_text(tokenizer: Tokenizer, context: str, answer: str, start: int) -> None:
    case = example("who won?", context, answer, start)
    windows = make_windows(tokenizer, [case], 128, 0)
    starts, ends = answer_positions(windows, [case])
    shift = int(windows.question_tokens[0]) + 2
    tokens = windows.contexts[0]
    assert starts[0] > 0
    assert context[tokens.starts[starts[0] - shift] : tokens.ends[ends[0] - shift]] in (answer, "1960s")


def test_same_ids_as_the_whole_text_and_all_real_answers_found(shared_data: Path, tokenizer: Tokenizer) -> None:
    data = read_squad(shared_data / "xquad" / "xquad.en.json.gz").examples[:200]
    contexts = list(dict.fromkeys(case.context for case in data))
    ids, lengths = tokenizer.encode_flat(contexts)
    apart = tokenize_with_offsets(tokenizer, contexts)
    assert [len(tokens.ids) for tokens in apart] == lengths.tolist()
    assert np.array_equal(np.concatenate([tokens.ids for tokens in apart]), ids)
    windows = make_windows(tokenizer, data, 192, 64)
    starts, ends = answer_positions(windows, data)
    assert len(windows.example) > len(data)
    equal = 0
    for number, case in enumerate(data):
        mine = np.flatnonzero((windows.example == number) & (starts > 0))
        assert len(mine), case.id
        for window in mine:
            shift = windows.first[window] - windows.question_tokens[window] - 2
            tokens = windows.contexts[number]
            text = case.context[tokens.starts[starts[window] + shift] : tokens.ends[ends[window] + shift]]
            assert case.answers[0] in text
        equal += text == case.answers[0]
    assert equal >= 0.98 * len(data)
