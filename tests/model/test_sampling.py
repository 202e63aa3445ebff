"""Our loop of greedy decoding and sampling against that of transformers: the same tokens, and the same calls."""

from __future__ import annotations

import pytest
import torch
from model_helpers import make_model, shared_model, tokens
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from ccq.model import CCQCache, graphs, sampling


class Seen(list):
    """What a streamer, a processor and a criterion were called with, in order."""

    def put(self, value):
        self.append(("put", value.tolist()))

    def end(self):
        self.append(("end",))


class Watch(LogitsProcessor):
    """Forbids the token before the last one, and draws from the random generator, as a stateful processor may."""

    def __init__(self, seen):
        self.seen = seen

    def __call__(self, input_ids, scores):
        self.seen.append(("process", input_ids.tolist(), scores.sum().item()))
        torch.rand(1)
        return scores.scatter_(1, input_ids[:, -2:-1], -float("inf"))  # in place: it may


class Rows(StoppingCriteria):
    """Ends row r when it has 3 r + 12 tokens."""

    def __init__(self, seen):
        self.seen = seen

    def __call__(self, input_ids, scores, **_):
        self.seen.append(("criterion", input_ids.shape[1], scores))
        return 3 * torch.arange(input_ids.shape[0]) + 12 <= input_ids.shape[1]


def both_ways(monkeypatch, model, prompt, watched=False, **settings):
    """`generate` by our loop and by that of transformers: tokens, what was called, and the generator afterwards."""
    results = []
    monkeypatch.setattr(graphs, "DEVICES", {prompt.device.type})
    for ours in (True, False):
        taken, seen = [], Seen()
        with monkeypatch.context() as patch:
            if ours:
                sample = sampling.sample
                patch.setattr(sampling, "sample", lambda *a, f=sample, n=taken, **k: n.append(1) or f(*a, **k))
            else:
                patch.setattr(sampling, "applies", lambda *_: False)
            options = dict(settings)
            if watched:
                options["logits_processor"] = LogitsProcessorList([Watch(seen)])
                options["stopping_criteria"] = StoppingCriteriaList([Rows(seen)])
                options["streamer"] = seen if prompt.shape[0] == 1 else None
            torch.manual_seed(5)
            out = model.generate(prompt, **options)
        assert bool(taken) == ours
        results.append((out, list(seen), torch.rand(3)))
    (out, seen, after), (ref, ref_seen, ref_after) = results
    assert type(out) is type(ref)
    assert seen == ref_seen
    assert torch.equal(after, ref_after), "another amount was drawn from the random generator"
    return out, ref


WAYS = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "top_k": 0},
    "top-k, top-p": {"do_sample": True, "temperature": 1.7, "top_k": 20, "top_p": 0.9},
    "penalties": {"do_sample": False, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "min_new_tokens": 4},
}


@pytest.mark.parametrize("system", ["ccq-gated-deltanet", "transformer"])
@pytest.mark.parametrize("way", WAYS)
def test_the_tokens_of_transformers(system, way, monkeypatch):
    """Without an end, with an end that each row meets at another step or never, and with one that all meet at once."""
    model, prompt = shared_model(system), tokens(3, 9)
    settings = {"max_new_tokens": 14, "pad_token_id": 255, **WAYS[way]}
    free, ref = both_ways(monkeypatch, model, prompt, **settings)
    assert torch.equal(free, ref)
    lengths = set()
    for end in ([free[0, 12].item(), free[1, 15].item()], free[:, 14].tolist(), free[:, 9].tolist(), 254):
        got, ref = both_ways(monkeypatch, model, prompt, eos_token_id=end, **settings)
        assert torch.equal(got, ref)
        lengths.add(got.shape[1])
    assert len(lengths) > 1, "no end was met early: the test shows nothing"


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("do_sample", [False, True])
def test_processors_criteria_and_streamers_are_called_alike(rows, do_sample, monkeypatch):
    model, prompt = shared_model("ccq-gla"), tokens(rows, 5)
    for longest in (6, 50):  # the length ends it, or the criterion
        got, ref = both_ways(monkeypatch, model, prompt, watched=True, do_sample=do_sample, max_new_tokens=longest)
        assert torch.equal(got, ref)
        assert got.shape[1] == min(5 + longest, 3 * (rows - 1) + 12)


def test_left_padded_prompts(monkeypatch):
    prompt = tokens(2, 9)
    mask = torch.ones_like(prompt)
    mask[0, :4] = 0
    settings = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    got, ref = both_ways(monkeypatch, shared_model("ccq-gla"), prompt, **settings)
    assert torch.equal(got, ref)


@pytest.mark.parametrize(
    "unusual",
    [
        {"return_dict_in_generate": True, "output_scores": True, "output_logits": True},
        {"use_cache": False},
        {"prefill_chunk_size": 4, "past_key_values": CCQCache},
        {"past_key_values": CCQCache},
        {"graph_length": 0},
    ],
    ids=lambda unusual: " ".join(unusual),
)
def test_the_unusual_is_left_to_transformers(unusual, monkeypatch):
    monkeypatch.setattr(graphs, "DEVICES", {"cpu"})
    monkeypatch.setattr(sampling, "sample", None)  # would raise
    given = {name: CCQCache() if value is CCQCache else value for name, value in unusual.items()}
    shared_model("ccq-gla").generate(tokens(2, 9), max_new_tokens=5, do_sample=False, **given)


def test_a_step_is_launched_before_the_host_asks(monkeypatch):
    """The order that makes it faster, and that the last step, whose length the host knows, launches none in vain."""
    order = []
    for place, name in ((sampling, "step"), (sampling.HostCopy, "receive")):
        original = getattr(place, name)
        monkeypatch.setattr(place, name, lambda *a, f=original, n=name: order.append(n) or f(*a))
    monkeypatch.setattr(graphs, "DEVICES", {"cpu"})
    make_model("ccq-gla").generate(tokens(1, 5), max_new_tokens=3, do_sample=False)
    assert order == ["step", "receive", "step", "receive", "receive"]


def test_a_default_device_changes_nothing(monkeypatch):
    """What the host reads lies on the host."""
    monkeypatch.setattr(graphs, "DEVICES", {"cpu"})
    model, prompt = make_model("ccq-gla"), tokens(1, 5)
    expected = model.generate(prompt, max_new_tokens=3, do_sample=False)
    with torch.device("meta"):
        assert torch.equal(model.generate(prompt, max_new_tokens=3, do_sample=False), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("do_sample", [False, True])
def test_the_tokens_of_transformers_on_a_gpu(do_sample, monkeypatch):
    """bf16, the captured graph, ends that rows meet at different steps, and a streamer."""
    model, prompt = make_model("ccq-gated-deltanet").cuda().bfloat16(), tokens(4, 20).cuda()
    settings = {"max_new_tokens": 60, "do_sample": do_sample, "pad_token_id": 255}
    free, ref = both_ways(monkeypatch, model, prompt, **settings)
    assert torch.equal(free, ref)
    ends = [free[row, 30 + 5 * row].item() for row in range(4)]
    for end in (ends, ends[:1]):
        got, ref = both_ways(monkeypatch, model, prompt, eos_token_id=end, **settings)
        assert torch.equal(got, ref)
    seen = Seen()
    out = model.generate(prompt[:1], streamer=seen, **settings)
    assert [token for _, (token, *_) in seen[1:-1]] == out[0, 20:].tolist()
