"""Needle documents: what is asked for was told, and training and tests have nothing in common."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ccq.data import DataError, needles
from ccq.data.needles import (
    FORMS,
    WORDS_IN_COMMON,
    Mixed,
    Needles,
    is_training_key,
    is_training_value,
    runs_of_words,
)  # fmt: skip
from ccq.data.sources import Piece, Position
from ccq.evaluate import niah

HAYSTACK = " ".join(
    f"This is sentence {n} of a text about nothing! Was it long (or short?) Who knows." for n in range(100)
)


def made(count=150, first=0, **options):
    return [Needles(0.1, **options).document(n, HAYSTACK) for n in range(first, first + count)]


def test_training_and_test_keys_are_disjoint_halves():
    adjectives, nouns = needles.words()
    assert (len(adjectives), len(nouns)) == (len(set(adjectives)), len(set(nouns)))
    pairs = [f"{a}-{n}" for a in adjectives[::9] for n in nouns[::60]]
    training = sum(map(is_training_key, pairs))
    assert abs(training / len(pairs) - 0.5) < 4 * 0.5 / len(pairs) ** 0.5
    used = {key for document in made(400) for key in document.keys}
    assert len(used) > 900
    assert all(map(is_training_key, used))
    tests = {pair for pair in pairs if not is_training_key(pair)}
    assert not used & tests
    assert all(key.split("-")[0] in " ".join(adjectives) for key in used)


def test_values_never_repeat_and_are_of_the_training_half():
    for seed in (0, 1):
        documents = made(400, seed=seed)
        values = [value for document in documents for value in document.values]
        assert len(set(values)) == len(values)
        assert all(map(is_training_value, values))
        numbers = [v for v in values if v.isdigit()]
        assert all(len(v) == 7 and v[0] != "0" for v in numbers)
        uuid = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
        assert all(re.fullmatch(uuid, v) for v in values if not v.isdigit())
        assert 0.65 < len(numbers) / len(values) < 0.85
    assert sum(is_training_value(str(v)) for v in range(1_000_000, 1_100_000)) == 50_000  # exactly one of each two


def test_all_numbers_of_a_seed_are_dealt_out_once(monkeypatch):
    monkeypatch.setattr(needles, "NUMBERS", 2000)
    source = Needles(0.1, seed=3)
    values = [v for n in range(1000 // needles.MOST) for v in source.numbers(n, needles.MOST)]
    assert sorted(values) == sorted(str(v) for v in range(1_000_000, 1_002_000) if is_training_value(str(v)))
    with pytest.raises(AssertionError, match="would repeat"):
        source.numbers(250, 1)
    kinds = [{v.isdigit() for d in made(100, seed=3, first=first) for v in d.values} for first in (150, 250)]
    assert kinds == [{True, False}, {False}], "once all are used, documents have uuids"


def test_each_needle_is_told_once_and_asked_once_after_it():
    seen = set()
    for document in made():
        seen.add((document.form, len(document.keys)))
        told, asked = 0, 0
        for key, value in zip(document.keys, document.values, strict=True):
            places = [m.start() for m in re.finditer(re.escape(value), document.text)]
            assert len(places) == 2, "in the needle and in the answer"
            needle = FORMS[document.form]["needle"]
            kind = "number" if value.isdigit() else "uuid"
            sentence = needle.format(kind=kind, key=key, value=value)
            assert document.text.count(sentence) == 1
            told = max(told, document.text.index(sentence))
            question = FORMS[document.form]["question"].format(kind=kind, key=key, value=value)
            assert document.text.count(question) == 1
            asked = document.text.index(question) if not asked else min(asked, document.text.index(question))
            assert question.rstrip(".").endswith(value)
        assert told < asked
    assert {form for form, _ in seen} == set(FORMS)
    assert {count for _, count in seen} == {1, 2, 3, 4}


def test_the_form_is_rulers():
    """Its template, and what its generator replaces where one answer is asked for, written out here again."""
    template = (
        "Some special magic {type_needle_v} are hidden within the following text. Make sure to memorize it. "
        "I will quiz you about the {type_needle_v} afterwards.\n{context}\n"
        "What are all the special magic {type_needle_v} for {query} mentioned in the provided text? "
        "The special magic {type_needle_v} for {query} mentioned in the provided text are"
    )
    template = template.replace("Some", "A").replace("are all", "is").replace("are", "is")
    document = next(d for d in made(forms=("ruler",)) if len(d.keys) == 1 and d.values[0].isdigit())
    key, value = document.keys[0], document.values[0]
    context = document.text.split("\n", 1)[1].rsplit("\nWhat", 1)[0]
    expected = template.format(type_needle_v="number", context=context, query=key)
    assert document.text == f"{expected} {value}."
    assert f"One of the special magic numbers for {key} is: {value}." in context


def test_a_form_can_be_held_out():
    for document in made(forms=("note", "register")):
        assert document.form != "ruler"
        assert "special magic" not in document.text
    for bad, message in ((("rular",), "unknown form 'rular'. Did you mean 'ruler'"), ((), "at least one form")):
        with pytest.raises(DataError, match=message):
            Needles(0.1, forms=bad)


def test_haystacks_are_whole_sentences_of_the_text():
    lengths = []
    for document in made(length=(400, 4000)):
        text = document.text
        for key, value in zip(document.keys, document.values, strict=True):
            kind = "number" if value.isdigit() else "uuid"
            for part in (FORMS[document.form]["needle"], FORMS[document.form]["question"]):
                text = text.replace(part.format(kind=kind, key=key, value=value), "")
        text = text.removeprefix(FORMS[document.form]["preface"].format(kind=kind))
        text = " ".join(text.split())
        assert text in HAYSTACK
        assert text.startswith(("This is", "Was it", "Who knows"))
        assert text[-1] in ".!)"
        lengths.append(len(text))
    assert min(lengths) > 200
    assert max(lengths) <= 4000


def test_depths_are_spread():
    depths = []
    for document in made(forms=("note",)):
        if len(document.keys) == 1:
            context = document.text.rsplit("\nQuestion", 1)[0]
            depths.append(context.index("Please note") / len(context))
    assert len(depths) > 20
    assert min(depths) < 0.1
    assert max(depths) > 0.9


def test_the_noise_sentence_and_excluded_texts_are_refused(tmp_path):
    noise = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n" * 50
    assert Needles(0.1).document(0, noise) is None
    essay = " ".join(f"word{n}" for n in range(12)) + " and the thirteenth"
    (tmp_path / "essays.json").write_text(json.dumps({"text": essay}))
    source = Needles(0.2, exclude=(tmp_path / "essays.json",), length=(500, 5000))
    excluded = frozenset(runs_of_words(essay))
    for words, refused in ((essay.upper().replace(" ", ",\n"), True), (" ".join(essay.split()[:-3]), False)):
        text = HAYSTACK[:2000] + f" He wrote: {words}. " + HAYSTACK[:2000]
        documents = [p for p, _ in source.mix([piece(0, text)] * 40) if p.needle]
        assert documents
        assert all(excluded.isdisjoint(runs_of_words(d.text)) for d in documents)
        assert any("word5" in d.text.lower() for d in documents) is not refused
    assert source.describe()["exclude"] == ["essays.json"]
    sentence = f"{' '.join(essay.split()[-WORDS_IN_COMMON:])}. "  # the last run of words of an excluded text counts too
    assert source.document(0, sentence * 40) is not None
    assert source.document(0, sentence * 40, excluded) is None


def piece(n, text, last=True):
    return Piece(f"d{n}", text, last, Position(0, n + 1), n)


@given(st.lists(st.integers(10, 6000), min_size=5, max_size=40), st.sampled_from([0.01, 0.05, 0.3]))
def test_the_share_is_met_and_mixing_goes_on_from_every_mark(lengths, share):
    pieces = [piece(n, HAYSTACK[:length], last=n % 4 != 1 or n + 1 == len(lengths)) for n, length in enumerate(lengths)]
    source = Needles(share, length=(200, 1000))
    result = list(source.mix(pieces))
    assert [p for p, _ in result if not p.needle] == pieces
    text = sum(len(p.text) for p, _ in result if not p.needle)
    needle = sum(len(p.text) for p, _ in result if p.needle)
    assert result[-1][1] == Mixed(sum(p.needle for p, _ in result), text, needle)
    assert needle <= share / (1 - share) * text + 3000  # the last document may go over
    if min(lengths) > 400:
        assert needle >= share / (1 - share) * text
    for at, (_, mark) in enumerate(result):
        if mark is not None and at % 3 == 0:
            done = sum(not p.needle for p, _ in result[: at + 1])
            assert list(source.mix(pieces[done:], mark)) == result[at + 1 :]


def test_the_share_is_met_where_no_sentence_is_as_short_as_asked_for():
    text = ". ".join("so much " * 60 for _ in range(40)) + "."
    result = [p for p, _ in Needles(0.4, length=(100, 300)).mix([piece(n, text) for n in range(5)])]
    assert 0.4 <= sum(len(p.text) for p in result if p.needle) / sum(len(p.text) for p in result) < 0.42


def test_what_is_trained_on_and_what_is_asked_have_nothing_in_common():
    """Keys, values and any 13 words of a haystack, as the suite draws them for `--keys odd`."""
    documents = made(300)
    drawn = [
        niah.draw(task, length, i, 42, "odd", niah.words())
        for task in niah.TASKS for length in (1024, 4096) for i in range(100)
    ]  # fmt: skip
    assert not {key for d in documents for key in d.keys} & {needle.key for needle in drawn}
    assert not {value for d in documents for value in d.values} & {needle.value for needle in drawn}
    noise = niah.Haystack("noise", None).context(20, "", 0)[0]
    assert all(runs_of_words(noise).isdisjoint(runs_of_words(d.text)) for d in documents)


def test_needle_documents_lie_between_documents():
    pieces = [piece(0, HAYSTACK, last=False), piece(0, "and its end."), piece(1, "short"), piece(2, HAYSTACK)]
    result = list(Needles(0.3).mix(pieces))
    assert [(p.needle, p.last) for p, _ in result][:3] == [(False, False), (False, True), (True, True)]
    marks = [mark for _, mark in result]
    assert marks[0] is None
    assert marks[1] is None, "the needle documents made of it come first"


def test_errors_name_the_argument():
    for share in (0, 1, -0.1):
        with pytest.raises(DataError, match="share must lie between 0 and 1"):
            Needles(share)
    with pytest.raises(DataError, match="length must go up"):
        Needles(0.1, length=(500, 400))


def test_documents_are_pinned():
    """A change here changes what models are trained on."""
    document = Needles(0.1, length=(200, 300)).document(5, HAYSTACK)
    assert document.text.splitlines() == [
        "Who knows. This is sentence 21 of a text about nothing! Was it long (or short?) Please note that the code of "
        "the concerned-scheme is 4891659. Please note that the code of the discreet-assistance is 7803272. Who knows. "
        "This is sentence 22 of a text about nothing! Please note that the code of the loving-gasoline is 1319562. "
        "Was it long (or short?) Who knows.",
        "Question: What is the code of the loving-gasoline?",
        "Answer: 1319562.",
        "Question: What is the code of the concerned-scheme?",
        "Answer: 4891659.",
        "Question: What is the code of the discreet-assistance?",
        "Answer: 7803272.",
    ]
