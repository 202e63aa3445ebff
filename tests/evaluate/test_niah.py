"""S-NIAH: RULER's prompts and score, sized for each sample, the same on every machine."""

import hashlib
import random
import re

import pytest
import torch

from ccq.evaluate import EvaluationError, Options, evaluate, niah


def options_of(tmp_path, data, **more):
    more = {"lengths": (1024,), "limit": 4, "sizing": "full"} | more
    return Options(out=tmp_path, data=data, **more)


def written(asked, tokenizer):
    return [tokenizer.decode(asked.of(request)) for request in asked.requests]


def test_the_prompt_is_rulers(data, tokenizer, tmp_path):
    asked = niah.build(options_of(tmp_path, data, limit=1), tokenizer)
    one, two, three = written(asked, tokenizer)
    for text, kind, request in zip((one, two, three), ("number", "number", "uuid"), asked.requests, strict=True):
        answer = request.meta["answer"]
        head = f"A special magic {kind} is hidden within the following text. Make sure to memorize it. I will quiz you "
        assert text.startswith(f"{head}about the {kind} afterwards.\n")
        key = text.rpartition("number for " if kind == "number" else "uuid for ")[2].split(" ")[0]
        assert text.endswith(
            f"\nWhat is the special magic {kind} for {key} mentioned in the provided text? "
            f"The special magic {kind} for {key} mentioned in the provided text is"
        )
        assert text.count(f"One of the special magic {kind}s for {key} is: {answer}.") == 1
    noise = one.split("afterwards.\n")[1].split("\nWhat is")[0].split("\n")
    assert sorted(set(noise))[-1] == niah.NOISE
    assert len(set(noise)) == 2
    assert len(asked.requests[0].meta["answer"]) == 7
    assert asked.requests[2].meta["answer"][14] == "4"  # a random UUID says its version here


def test_every_sample_fills_its_length_and_none_exceeds_it(data, tokenizer, tmp_path):
    asked = niah.build(options_of(tmp_path, data, lengths=(1024, 2048), limit=6), tokenizer)
    for request in asked.requests:
        length = int(request.id.split("/")[1])
        assert 0.95 * length <= request.length + niah.ANSWER <= length
        assert request.max_new == 128
        assert request.stop == (tokenizer.eos_token_id,)


def drawn(task, length):
    return lambda number: niah.draw(task, length, number, 1, "all", niah.words())


@pytest.mark.parametrize(("task", "step"), [("niah_single_1", 5), ("niah_single_2", 500)])
def test_sizing_of_ruler_is_one_size_and_whole_steps_below_it(data, tokenizer, task, step):
    """RULER's generator: the size by bisection from one step on; a sample too long is drawn again, a step smaller."""
    haystack = niah.Haystack(niah.KNOWN[task]["haystack"], data)
    count = lambda text: len(tokenizer(text).input_ids)  # noqa: E731
    length = 2048
    sizer = niah.Sizer(task, length, "ruler", haystack, count, drawn(task, length))
    sizes = []
    for index in range(40):
        needle, size = sizer.sample(index)
        assert count(niah.render(task, haystack, size, needle)[0]) + 128 <= length
        assert (needle == drawn(task, length)(index)) == (size == sizer.start)
        sizes.append(size)
    assert {(sizer.start - size) % step for size in sizes} == {0}
    assert len(set(sizes)) > 1 or task == "niah_single_1"  # some essays are cut, so that not all prompts are full
    fits = niah.Sizer(task, length, "full", haystack, count, drawn(task, length))
    full = [fits.sample(index)[1] for index in range(40)]
    assert min(full) - 1 <= sizer.start <= max(full) + 1  # near a border that each needle puts elsewhere


@pytest.mark.parametrize(
    ("tokens", "start"),
    [
        (lambda first, size: 96 + 20 * size, 40),  # with 896 tokens of room
        (lambda first, size: 97 + 20 * size, 39),
        (lambda first, size: 20, 768),  # all fit: three times the 1024 / (20 / 5) that one step's tokens suggest
        (lambda first, size: 2000 if first else 20, 10),  # less than two steps are suggested: it looks at two
        (lambda first, size: 2000, 5),  # none fits: one step, and `sample` says so
    ],
)
def test_the_bisection_of_ruler_looks_from_one_step_to_three_times_what_its_tokens_suggest(tokens, start):
    asked = []

    def counted(needle, size):
        asked.append((needle, size))
        assert len(asked) <= 11, "no bisection"
        return tokens(needle == "size 0", size)

    sizer = object.__new__(niah.Sizer)
    sizer.length, sizer.room, sizer.step, sizer.drawn, sizer.tokens = 1024, 896, 5, lambda name: name, counted
    assert sizer._start_of_ruler() == start
    assert [needle for needle, _ in asked] == [f"size {i}" for i in range(len(asked))]  # each with its own
    assert asked[0][1] == min(size for _, size in asked) == 5


def test_sizing_of_ruler_refuses_a_length_that_one_step_exceeds(data, tokenizer):
    haystack = niah.Haystack("essay", data)
    sizer = niah.Sizer(
        "niah_single_2", 400, "ruler", haystack, lambda t: len(tokenizer(t).input_ids), drawn("niah_single_2", 400)
    )
    with pytest.raises(niah.EvaluationError, match="400 is too short for niah_single_2 by RULER: take --sizing full"):
        sizer.sample(0)


def test_sizing_of_ruler_draws_again_at_the_smallest_size_and_is_the_default(data):
    """RULER shrinks while there is more than a step to shrink by, and then draws needles until one fits."""
    haystack = niah.Haystack("noise", data)
    sizer = niah.Sizer("niah_single_1", 1024, "ruler", haystack, lambda text: 20, drawn("niah_single_1", 1024))
    sizes, too_long = [], iter([True, True, True, False])
    sizer.start = 8
    sizer.tokens = lambda needle, size: sizes.append(size) or (900 + next(too_long))
    sizer.room = 900
    assert sizer.sample(0)[1] == 3
    assert sizes == [8, 3, 3, 3]
    assert Options(out=None).sizing == "ruler"


@pytest.mark.parametrize("task", niah.TASKS)
def test_the_haystack_is_the_largest_that_fits(data, tokenizer, task):
    haystack = niah.Haystack(niah.KNOWN[task]["haystack"], data)
    count = lambda text: len(tokenizer(text).input_ids)  # noqa: E731
    sizer = niah.Sizer(task, 700, "full", haystack, count, drawn(task, 700))
    for index in range(5):
        needle, size = sizer.sample(index)
        lengths = [count(niah.render(task, haystack, n, needle)[0]) for n in (size, size + 1)]
        assert lengths[0] + 128 <= 700 < lengths[1] + 128


@pytest.mark.parametrize("guess", [1, 7, 40, 1000])
def test_search_finds_the_border_from_any_guess(guess):
    assert niah.largest(lambda n: 10 + 3 * n, 100, guess) == 30
    assert niah.largest(lambda n: 200 + n, 100, guess) == -1


def test_sizing_of_lm_eval_goes_in_its_steps(data, tokenizer, tmp_path):
    samples = {}
    for sizing in ("full", "lm-eval"):
        asked = niah.build(options_of(tmp_path / sizing, data, lengths=(4096,), sizing=sizing), tokenizer)
        samples[sizing] = {request.id: request for request in asked.requests}
        texts = written(asked, tokenizer)
    units = {text.count(niah.NOISE) for text in texts if niah.NOISE in text}
    assert all(n % 25 == 0 for n in units)
    assert all(samples["lm-eval"][name].length <= samples["full"][name].length for name in samples["full"])
    assert asked.notes[0].startswith("sized as lm-evaluation-harness")


def test_the_same_seed_gives_the_same_bytes_whatever_ran_before(data, tokenizer, tmp_path):
    random.seed(1)
    torch.manual_seed(1)
    first = niah.build(options_of(tmp_path / "a", data), tokenizer)
    random.seed(2)
    torch.manual_seed(2)
    niah.samples.cache_clear()
    niah.draw("niah_single_1", 1024, 9, 3, "all", niah.words())
    more = niah.build(options_of(tmp_path / "b", data, lengths=(512, 1024)), tokenizer)
    keys = {request.id: (more.key(request), request.meta) for request in more.requests}
    assert len({request.meta["group"] for request in first.requests}) == 3
    assert all(keys[request.id] == (first.key(request), request.meta) for request in first.requests)
    other = niah.build(options_of(tmp_path / "c", data, seed=43), tokenizer)
    assert {r.meta["answer"] for r in other.requests}.isdisjoint({r.meta["answer"] for r in first.requests})


def test_draws_are_pinned():
    """A change here changes every published sample: raise GENERATOR with it."""
    words = (("brave", "calm", "odd"), ("fox", "lamp"))
    drawn = [niah.draw(task, 4096, 7, 42, "all", words) for task in niah.TASKS]
    text = "|".join(f"{n.key} {n.value} {n.place}" for n in drawn)
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == PINNED, text


PINNED = "40f5d1b013fd6301"


def test_fewer_samples_are_the_first_of_more(data, tokenizer, tmp_path):
    few = niah.build(options_of(tmp_path, data, limit=2), tokenizer)
    more = niah.build(options_of(tmp_path, data, limit=4), tokenizer)
    keys = {request.id: more.key(request) for request in more.requests}
    assert all(few.key(request) == keys[request.id] for request in few.requests)


def test_draws_are_uniform():
    words = (tuple("abcdefgh"), tuple("uvwxyz"))
    drawn = [niah.draw("niah_single_2", 1024, i, 0, "all", words) for i in range(4000)]
    places = [sum(needle.place == depth for needle in drawn) for depth in niah.DEPTHS]
    assert len(niah.DEPTHS) == 40
    assert (niah.DEPTHS[0], niah.DEPTHS[1], niah.DEPTHS[-1]) == (0, 3, 100)
    assert sum((n - 100) ** 2 / 100 for n in places) < 80  # chi-square with 39 degrees: 80 is p = 1e-4
    assert min(int(needle.value) for needle in drawn) >= 10**6
    assert max(int(needle.value) for needle in drawn) < 10**7


def test_odd_keys_and_values_are_those_that_training_never_holds(monkeypatch):
    monkeypatch.setattr(niah, "is_training_key", lambda key: key.startswith("a"))
    monkeypatch.setattr(niah, "is_training_value", lambda value: int(value) % 3 > 0)
    words = (("a", "b"), ("x", "y", "z"))
    drawn = [niah.draw("niah_single_1", 1024, i, 0, "odd", words) for i in range(50)]
    assert {needle.key for needle in drawn} == {"b-x", "b-y", "b-z"}
    assert {int(needle.value) % 3 for needle in drawn} == {0}


def test_odd_is_the_half_that_training_leaves():
    from ccq.data.needles import is_training_key, is_training_value

    for task in niah.TASKS:
        drawn = [niah.draw(task, 1024, i, 0, "odd", niah.words()) for i in range(30)]
        assert not any(is_training_key(needle.key) or is_training_value(needle.value) for needle in drawn)


def test_the_needle_lies_at_its_depth(data):
    noise, essay = niah.Haystack("noise", data), niah.Haystack("essay", data)
    for share, before in ((0.0, 0), (0.35, 3), (0.99, 9)):  # never after the last unit, as in RULER
        text, depth = noise.context(10, "NEEDLE", int(share * 2**64))
        assert (text.split("\n").index("NEEDLE"), depth) == (before, 10 * before)
    sentences = essay.sentences(300)
    assert len(sentences) > 20
    for place in niah.DEPTHS:
        text, depth = essay.context(300, "NEEDLE", place)
        assert depth == place
        head, tail = text.split("NEEDLE")
        at = int(len(sentences) * (place / 100))
        assert (head.strip(), tail.strip()) == (" ".join(sentences[:at]), " ".join(sentences[at:]))
    places = {niah.draw("niah_single_1", 1024, i, 0, "all", (("a",), ("b",))).place * 10 >> 64 for i in range(100)}
    assert places == set(range(10))


@pytest.mark.parametrize(
    ("output", "score"),
    [
        (": 1234567.", 1),
        ("1234567", 1),
        ("x1234567y", 1),
        ("\n\n1234567", 1),
        ("123456", 0),
        ("1 234 567", 0),
        ("", 0),
        ("1234\x01567", 0),
    ],
)
def test_score_of_numbers(output, score):
    assert niah.match(output, "1234567") == score


def test_score_ignores_case_of_uuids():
    assert niah.match("IT IS ABCDEF12-0000-4000-8000-00000000000A", "abcdef12-0000-4000-8000-00000000000a") == 1


class Oracle:
    """Answers by looking the needle up in the prompt (right), or with its digits turned round (wrong)."""

    def __init__(self, tokenizer, right):
        self.tokenizer, self.right = tokenizer, right

    def answers(self, asked):
        for request in asked.requests:
            text = self.tokenizer.decode(asked.of(request))
            value = text.partition(" is: ")[2].partition(". ")[0].partition(".\n")[0].rstrip(".")
            value = value if self.right else value[::-1] + "0"
            yield {"tokens": self.tokenizer(f" {value.upper()}, of course").input_ids}


@pytest.mark.parametrize("right", [True, False])
def test_an_oracle_scores_100_and_a_wrong_one_0(data, tokenizer, tmp_path, right):
    options = options_of(tmp_path, data, limit=8)
    asked = niah.build(options, tokenizer)
    _, scores = niah.metrics(asked, list(Oracle(tokenizer, right).answers(asked)), options, tokenizer)
    assert {score["value"] for score in scores.values()} == {100.0 if right else 0.0}
    for score in scores.values():
        low, high = score["interval"]
        assert (low < 90 and high > 99.9) if right else (low == 0 and high > 10)
        assert sum(part["n"] for part in score["by_depth"].values()) == 8


def test_another_suite_before_changes_nothing(llama, tokenizer, data, tmp_path):
    alone = evaluate(llama, tokenizer, "niah", options_of(tmp_path / "a", data, limit=1, lengths=(512,)))
    evaluate(llama, tokenizer, "length", Options(out=tmp_path / "b", data=data, lengths=(64,), limit=2))
    after = evaluate(llama, tokenizer, "niah", options_of(tmp_path / "b", data, limit=1, lengths=(512,)))
    assert alone["samples"] == after["samples"]
    assert alone["scores"] == after["scores"]
    assert (tmp_path / "a" / "niah.jsonl").read_text() == (tmp_path / "b" / "niah.jsonl").read_text()


def test_a_length_without_room_is_refused(data, tokenizer, tmp_path):
    with pytest.raises(EvaluationError, match=r"--lengths: 160 is too short for niah_single_1: .* in all"):
        niah.build(options_of(tmp_path, data, lengths=(160,)), tokenizer)


def test_a_longer_answer_takes_its_room_from_the_haystack(data, tokenizer, tmp_path):
    def built(tokens):
        return niah.build(options_of(tmp_path, data, limit=3, answer_tokens=tokens), tokenizer)

    plain, short, long = built(None), built(24), built(400)
    assert [len(long.of(r)) for r in long.requests] < [len(plain.of(r)) for r in plain.requests]
    assert all(len(long.of(r)) + r.max_new <= 1024 for r in long.requests)
    assert long.longest() <= 1024
    assert [short.of(r).tolist() for r in short.requests] == [plain.of(r).tolist() for r in plain.requests]
    assert "400 tokens of answer instead of RULER's 128" in long.notes
    for asked in (plain, short, long):
        least = min(len(asked.of(r)) + r.max_new for r in asked.requests)
        assert f"fills {100 * least / 1024:.1f}% of its length" in asked.notes[0]


def test_keys_that_training_may_hold_are_noted(data, tokenizer, tmp_path):
    for keys, said in (("all", "also those that needle documents"), ("odd", "only those that training data")):
        options = options_of(tmp_path, data, lengths=(512,), limit=1, tasks=("niah_single_1",), keys=keys)
        assert any(said in note for note in niah.build(options, tokenizer).notes)


def test_what_samples_are_made_of_is_in_the_settings(data, tokenizer, tmp_path):
    made_of = niah.build(options_of(tmp_path, data, limit=1), tokenizer).settings["made_of"]
    assert made_of.keys() == {"generator", "words", "nltk", "punkt_tab", "essays"}


def test_a_book_for_haystack_is_read_word_by_word_and_named(tokenizer, tmp_path):
    """The needle stands between sentences of the shipped book, whose words are otherwise as they are."""
    from ccq.shipped import book

    told = options_of(tmp_path, None, tasks=("niah_book",), lengths=(1500,), limit=3, keys="odd", answer_tokens=5)
    asked = niah.build(told, tokenizer)
    words = " ".join(book()["stories"]).split()
    assert len(asked.requests) == 3
    for request in asked.requests:
        assert request.max_new == 5
        assert request.length <= 1500 - niah.ANSWER
        text = tokenizer.decode(asked.of(request))
        context = text.split("afterwards.\n")[1].split("\nWhat is")[0]
        before, needle, after = re.split(r"(One of the special magic numbers for [a-z-]+ is: \d{7}\.)", context)
        assert request.meta["answer"] in needle
        assert (before + after).split() == words[: len((before + after).split())]
        assert not before or before.rstrip()[-1] in ".!?”’"
    assert "niah_book" not in niah.TASKS
    assert any("Dubliners" in note for note in asked.notes)
    assert any("5 tokens of answer instead of RULER's 128" in note for note in asked.notes)


def test_essays_may_be_a_row_each(tmp_path):
    """As the Hub has them."""
    (tmp_path / "PaulGrahamEssays.jsonl").write_text('{"text": "One."}\n{"text": "Two."}\n')
    assert niah.essays(tmp_path) == "One. Two."
