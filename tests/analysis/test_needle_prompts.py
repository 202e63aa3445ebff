"""Prompts as the paper describes them, and a control in which only the question is missing."""

from collections import Counter

import numpy as np
import pytest

from ccq.analysis import AnalysisError
from ccq.analysis.prompts import KINDS, NEAR, PLANTED, RARE, filler, make_prompts, tokenize


def cut(prompt, span):
    return prompt.text[span[0] : span[1]]


def test_the_pool_is_of_120_different_sentences():
    pool = filler()
    assert len(set(pool)) == len(pool) == 120
    assert all(sentence.endswith(".") and "{" not in sentence for sentence in pool)


def test_the_needle_stands_in_the_middle_and_is_asked_for_at_the_end():
    prompts = make_prompts(4)
    assert Counter(prompt.kind for prompt in prompts) == dict.fromkeys(KINDS, 4)
    for prompt in prompts:
        assert 0.45 < prompt.needle[0] / len(prompt.text) < 0.55
        assert cut(prompt, prompt.novel) == prompt.answer
        assert cut(prompt, prompt.needle) == KINDS[prompt.kind]["needle"].format(prompt.answer)
        assert prompt.text.count(prompt.answer) == 1
        assert cut(prompt, prompt.question) == KINDS[prompt.kind]["question"]
        assert prompt.question[1] == len(prompt.text)


def test_needle_and_control_are_the_same_things_in_other_roles():
    """Over the prompts of a kind each thing is once the needle and PLANTED times planted."""
    for variants in (3, 4, 8):
        prompts = make_prompts(variants, sentences=12)
        for kind in KINDS:
            asked = Counter(prompt.answer for prompt in prompts if prompt.kind == kind)
            planted = Counter(cut(prompt, span) for prompt in prompts if prompt.kind == kind for span in prompt.planted)
            assert set(asked.values()) == {1}
            assert planted == dict.fromkeys(asked, PLANTED)


def test_planted_things_stand_shortly_before_and_after_the_needle():
    """So that their position cannot be what they differ in."""
    for prompt in make_prompts(4):
        before, after = (span[0] / len(prompt.text) for span in prompt.planted)
        needle = prompt.needle[0] / len(prompt.text)
        assert 0.01 < needle - before < 0.05
        assert 0.01 < after - needle < 0.05
        assert all(cut(prompt, span) not in cut(prompt, prompt.needle) for span in prompt.planted)


def test_no_two_prompts_have_the_filler_in_one_order():
    prompts = make_prompts(8)
    assert len({prompt.text[:200] for prompt in prompts}) == len(prompts)
    for sentence in filler():
        assert all(sentence in prompt.text for prompt in prompts)


def test_groups_of_tokens_are_what_their_names_say(tokenizer):
    for prompt in make_prompts(3)[:5]:
        tokens = tokenize(prompt, tokenizer, bos=True)
        groups = tokens.groups
        assert tokens.ids[0] == tokenizer.bos_token_id
        assert not any(mask[0] for mask in groups.values())
        often = Counter(tokens.ids.tolist())
        rare = np.array([often[i] <= RARE for i in tokens.ids])

        def text(mask, ids=tokens.ids):
            return "".join(tokenizer.convert_ids_to_tokens(ids[mask])).strip()

        assert text(groups["needle"]) == cut(prompt, prompt.needle)
        assert text(tokens.question) == cut(prompt, prompt.question)
        assert np.array_equal(groups["unique"], groups["needle"] & rare)
        assert np.array_equal(groups["rare"], groups["distractor"] & rare)
        assert not (groups["novel"] & ~groups["unique"]).any()
        letters = iter("".join(cut(prompt, span) for span in prompt.planted).replace(" ", ""))
        assert all(letter in letters for letter in text(groups["planted"]).replace(" ", ""))  # in that order
        assert not (groups["planted"] & ~rare).any()
        at, around = np.flatnonzero(groups["needle"]), np.flatnonzero(groups["near"])
        assert groups["distractor"][around].all()
        assert at.min() - around.min() == around.max() - at.max() == NEAR
        everything = groups["needle"] | groups["distractor"] | groups["planted"] | tokens.question
        assert (~everything).sum() <= 1 + sum(span[1] - span[0] for span in prompt.planted)
        assert not (groups["distractor"] & (groups["needle"] | groups["planted"] | tokens.question)).any()
        assert groups["novel"].any()
        assert groups["planted"].any()


def test_a_token_that_is_not_rare_is_not_unique(tokenizer):
    prompt = make_prompts(3)[0]
    tokens = tokenize(prompt, tokenizer)
    kept = {tokenizer.decode([i]).strip() for i in tokens.ids[tokens.groups["unique"]]}
    assert kept.isdisjoint({"the", "of", "is", "secret", "password", "Please", "."})


@pytest.mark.parametrize(
    ("variants", "sentences", "named"), [(2, None, "variants"), (9, None, "9"), (3, 3, "sentences")]
)
def test_impossible_numbers_are_refused(variants, sentences, named):
    with pytest.raises(AnalysisError, match=named):
        make_prompts(variants, sentences)


def test_a_tokenizer_that_does_not_know_where_tokens_stand_is_refused():
    with pytest.raises(AnalysisError, match="tokenizer: expected a fast tokenizer"):
        tokenize(make_prompts(3)[0], None)
