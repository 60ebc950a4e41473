"""nupunkt's sentence splitter with its decisions remembered by the word before a full stop.

nupunkt (https://github.com/alea-institute/nupunkt) remembers each decision by the word before the full stop and the word after
it. Few such pairs come twice, so most of its time goes into decisions. Nearly all of them follow from the first word alone:
after `house.` a sentence always ends, whatever comes next. Those are remembered here by that word.

This knows the rules of nupunkt 0.8.0 from inside; `sentences.py` leaves other versions to their own code.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

from nupunkt import PunktSentenceTokenizer
from nupunkt.core.tokens import _check_is_initial, _derived
from nupunkt.tokenizers.sentence_tokenizer import _CLOSING_CHARS, _FP_BREAK, _FP_NONE, Context

_REMEMBERED = 65536


class RememberingPunkt(PunktSentenceTokenizer):
    """The sentences of `PunktSentenceTokenizer`, found in a third of the time; tests compare the two.

    RememberingPunkt(nupunkt.load("default").parameters).tokenize("Mr. Bennet left. He was late.")
    """

    def _context_decider(
        self, first_memo: dict[str, int], context_memo: dict[Context, bool]
    ) -> Callable[[Context], bool]:
        """`(word, what follows it) -> whether the sentence ends`; nupunkt asks for it once."""
        decide = super()._context_decider(first_memo, context_memo)
        by_word = self._by_word
        known: dict[str, bool | None] = {}

        def ends_sentence(context: Context) -> bool:
            word, after = context
            try:
                answer = known[word]
            except KeyError:
                if len(known) >= _REMEMBERED:
                    known.clear()
                answer = known[word] = by_word(word)
            # Where the next chunk is glued on, or dots follow, the word may be cut into other tokens.
            if answer is None or not after[:1].isspace() or after.lstrip()[:1] == ".":
                return decide(context)
            return answer

        return ends_sentence

    def _by_word(self, word: str) -> bool | None:
        """The decision for a word with its end mark, before white space and any next word; None: the next word matters.

        These are the branches of `_strings_contain_sentbreak` and `_second_pass_outcome` that do not look at the next token.
        """
        if any(map(str.isspace, word)):
            return None
        tokens = [token for token in self._lang_vars.word_tokenize(word) if not _CLOSING_CHARS.issuperset(token)]
        outcomes = [self._first_pass_outcome(token) for token in tokens]
        if not outcomes or any(outcomes[:-1]) or (word[-1] in "!?" and outcomes[-1] != _FP_BREAK):
            return None
        if outcomes[-1] != _FP_BREAK:
            return False if outcomes[-1] == _FP_NONE else None
        period_final, kind, *_ = _derived(tokens[-1])
        if not period_final:
            return True
        kind = kind[:-1] if kind.endswith(".") and len(kind) > 1 else kind
        if kind == "##number##" or _check_is_initial(tokens[-1]) or kind in self._first_words:
            return None
        return True

    @cached_property
    def _first_words(self) -> frozenset[str]:
        """Words that, before some others, never end a sentence."""
        return frozenset(first for first, _ in self._params.collocations)
