"""Perplexity by length: exact where it is known, windows that see nothing of each other, documents resampled."""

import itertools
import json
import math
import subprocess
import sys
import types
import zipfile

import numpy as np
import pytest
import torch
from toys import Bigram, LeakyLM

from ccq.evaluate import EvaluationError, Options, evaluate, length
from ccq.evaluate.engine import Engine


class Letters:
    """One token a letter, 'a' is 1; 0 ends a text."""

    eos_token_id = 0
    special_tokens_map = {"eos_token": "0"}

    def __call__(self, text, **_):
        return types.SimpleNamespace(input_ids=[ord(letter) - 96 for letter in text])

    def get_vocab(self):
        return {chr(96 + number): number for number in range(6)}


def write_corpora(folder, texts):
    for file in length.CORPORA.values():
        rows = [{"id": str(number), "text": text} for number, text in enumerate(texts)]
        (folder / f"{file}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def table():
    rng = torch.Generator().manual_seed(0)
    return torch.rand(6, 6, generator=rng, dtype=torch.float64).softmax(-1)


def test_perplexity_of_known_probabilities_is_exact(table, tmp_path):
    texts = ["abcdeabcabcdd", "eedcbaab", "ababcdcdeeab"]
    result = evaluate(
        Bigram(table.double()),
        Letters(),
        "length",
        Options(out=tmp_path / "out", data=write_corpora(tmp_path, texts), lengths=(4, 7, 35)),
    )
    stream = [ord(x) - 96 if x != "|" else 0 for x in "|".join(texts)]
    assert len(stream) == 35
    for size in (4, 7, 35):
        windows = [stream[at : at + size] for at in range(0, len(stream) - size + 1, size)]
        losses = [-math.log(table[a, b]) for window in windows for a, b in itertools.pairwise(window)]
        assert len(losses) == len(windows) * (size - 1)
        score = result["scores"][f"qasper/{size}"]
        assert score["value"] == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-6)
        assert (score["windows"], score["documents"], score["few"]) == (len(windows), 3, True)
        assert score["interval"][0] <= score["value"] <= score["interval"][1]
    positions = result["scores"]["qasper/35"]["loss_by_position"]
    assert positions == [{"from": 0, "loss": pytest.approx(sum(losses) / 34), "tokens": 34}]


def test_a_window_sees_nothing_before_it(tmp_path):
    """Other text in the first window changes its own loss and no other's."""
    model, rows = LeakyLM(vocabulary=10), []
    for number, first in enumerate(("abcdeabcde", "eeeeeddddd")):
        data = tmp_path / str(number)
        data.mkdir()
        options = Options(out=data / "out", data=write_corpora(data, [first + "abcabcabcabcabc"]), lengths=(5,))
        evaluate(model, Letters(), "length", options)
        lines = (data / "out" / "length.jsonl").read_text().splitlines()
        rows.append([row["score"] for row in map(json.loads, lines) if row["group"] == "qmsum/5"])
    assert rows[0][0] != pytest.approx(rows[1][0], rel=1e-3)
    assert rows[0][2:] == pytest.approx(rows[1][2:], rel=1e-6)


def test_same_tokens_are_scored_at_every_length(tmp_path, monkeypatch):
    monkeypatch.setattr(length, "SCORED", 4)
    data = write_corpora(tmp_path, ["abcdeabcdeabcdeab", "ccddee"])
    asked = length.build(Options(out=tmp_path, data=data, lengths=(6, 8, 12), tasks=("pg19",)), Letters())
    same = [request for request in asked.requests if "/same/" in request.id]
    assert [request.id for request in same] == [f"pg19/same/{n}/{w}" for w in (0, 1) for n in (6, 8, 12)]
    for request in same:
        window, n = int(request.id.split("/")[-1]), int(request.id.split("/")[2])
        assert request.end == 12 * (window + 1)
        assert (request.length, request.length - request.context) == (n, 4)
        assert sum(tokens for _, tokens, _ in request.meta["segments"]) == 4


def test_segments_part_documents_and_blocks(monkeypatch):
    monkeypatch.setattr(length, "BLOCK", 5)
    owner = np.array([0] * 7 + [1] * 8)
    request = length.window("x", 100, 0, 15, owner, blocks=True)
    assert request.cuts == (5, 7, 10)
    assert request.meta["segments"] == [[0, 4, 0], [0, 2, 1], [1, 3, 1], [1, 5, 2]]
    assert (request.begin, request.end) == (100, 115)
    request = length.window("x", 100, 0, 15, owner, scored=8)  # a document begins with the first scored token
    assert (request.context, request.cuts, request.meta["segments"]) == (7, (), [[1, 8, 1]])


def test_documents_are_what_is_resampled(tmp_path, table):
    """One document is all noise: the interval must be that of few documents, not of many windows."""
    data = write_corpora(tmp_path, ["ab" * 200, "ab" * 200, "ecdb" * 100])
    options = Options(out=tmp_path / "out", data=data, lengths=(8,), tasks=("code",))
    score = evaluate(Bigram(table), Letters(), "length", options)["scores"]["code/8"]
    assert score["documents"] == 2  # equal texts are one
    low, high = score["interval"]
    texts = ["ab" * 200, "ecdb" * 100]
    stream = [ord(x) - 96 if x != "|" else 0 for x in "|".join(texts)]
    losses: list[list[float]] = [[], []]
    for at in range(len(stream) // 8 * 8):
        if at % 8:
            losses[at > 400].append(-math.log(table[stream[at - 1], stream[at]]))
    alone = [math.exp(sum(mine) / len(mine)) for mine in losses]  # a quarter of the draws is one document twice
    assert [low, high] == pytest.approx(sorted(alone), rel=1e-6)


def test_a_point_of_few_documents_is_marked(tmp_path, table):
    """Many windows of one book are one draw from the books there are."""
    for number, few in ((5, True), (6, False)):
        folder = tmp_path / str(number)
        folder.mkdir()
        data = write_corpora(folder, ["abcde"[at:] + "ab" * 60 for at in range(5)] + ["cc" * 60] * (number - 5))
        options = Options(out=folder / "out", data=data, lengths=(8,), tasks=("code",))
        score = evaluate(Bigram(table), Letters(), "length", options)["scores"]["code/8"]
        assert (score["windows"] >= 20, score["documents"], score["few"]) == (True, number, few)


def test_the_hub_gives_all_corpora_it_has_and_the_result_names_the_other(tmp_path, table, monkeypatch):
    class Stream(list):
        def take(self, count):
            return self[:count]

    def load_dataset(name, split, streaming=False):
        return Stream([{"content": "abc" * 9}]) if streaming else {"text": ["cde" * 9]}

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    monkeypatch.setattr(length.sources, "longbench_archive", lambda task: [{"context": "ab" * 9}])
    result = evaluate(Bigram(table), Letters(), "length", Options(out=tmp_path, lengths=(8,)))
    assert result["scores"].keys() == {f"{name}/8" for name in length.CORPORA if name != "elife"}
    assert result["notes"] == ["left out, not on the Hub (give it with --data DIR): elife"]
    with pytest.raises(EvaluationError, match="elife is not on the Hub in this form: give it with --data DIR"):
        evaluate(Bigram(table), Letters(), "length", Options(out=tmp_path, lengths=(8,), tasks=("elife",)))


def test_lines_of_longbench_end_where_json_lines_do(tmp_path, monkeypatch):
    rows = [{"context": "one\u2028two\u0085three"}, {"context": "four"}]
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as archive:
        archive.writestr("data/qasper.jsonl", "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    hub = types.SimpleNamespace(hf_hub_download=lambda *_, **__: tmp_path / "data.zip")
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    assert length.sources.longbench_archive("qasper") == rows


def test_no_window_is_refused(tmp_path):
    data = write_corpora(tmp_path, ["abc"])
    with pytest.raises(EvaluationError, match="no corpus has a window of 64 tokens"):
        length.build(Options(out=tmp_path, data=data, lengths=(64,)), Letters())


PROBE = """
import resource, sys
import numpy as np
import torch
from ccq.evaluate.engine import Engine
from ccq.evaluate.requests import Builder
from ccq.model import CCQConfig, CCQForCausalLM

torch.manual_seed(0)
model = CCQForCausalLM(CCQConfig.preset(sys.argv[1])).eval()
builder = Builder()
builder.add("x", "score", np.random.default_rng(0).integers(0, model.config.vocab_size, 20_480))
(answer,) = Engine(model).run(builder.done("x", {}))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)  # GiB, on Linux
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ccq-gla-nano", "transformer-nano"])
def test_20k_tokens_at_nano_fit_in_2_gb(name):
    done = subprocess.run([sys.executable, "-c", PROBE, name], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 2e9 / 2**30


def test_memory_is_flat_in_length():
    """A recurrent model is never called with more than a piece, however long the window."""
    model = LeakyLM()
    engine = Engine(model, chunk=32)
    for size in (64, 640):
        model.base_model.longest = 0
        request = length.window("x", 0, 0, size, np.zeros(size, int))
        asked = types.SimpleNamespace(requests=[request], of=lambda r, n=size: np.arange(n) % 600)
        list(engine.run(asked))
        assert model.base_model.longest == 32


def test_a_limit_reads_no_further_than_its_windows_and_asks_the_same(tmp_path):
    data = write_corpora(tmp_path, ["abcde" * 8, "edcba" * 8, "aabbc" * 8])
    asked = {
        limit: length.build(Options(tmp_path, data=data, lengths=(8, 32), limit=limit, tasks=("pg19",)), Letters())
        for limit in (None, 2)
    }
    assert len(asked[2].tokens) == 64 < len(asked[None].tokens)
    assert {r.id: asked[2].key(r) for r in asked[2].requests}.items() <= {
        r.id: asked[None].key(r) for r in asked[None].requests
    }.items()
