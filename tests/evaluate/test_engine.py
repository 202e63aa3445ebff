"""The engine against the plainest way to get the same: one request at a time, all logits, no cache."""

import copy

import numpy as np
import pytest
import torch
from toys import LeakyLM

from ccq.evaluate import engine as engines
from ccq.evaluate.engine import Engine
from ccq.evaluate.requests import Builder, RequestSet


def requests_of(kind="score", count=12, contexts=4, seed=0, longest=40, vocabulary=500, **fields):
    """Some contexts, each with continuations of several lengths."""
    rng = np.random.default_rng(seed)
    builder = Builder()
    heads = [rng.integers(1, vocabulary, rng.integers(20, longest)) for _ in range(contexts)]
    for number in range(count):
        head = heads[number % contexts]
        tail = rng.integers(1, vocabulary, 1 + number % 7)
        if kind == "score":
            builder.add(str(number), kind, np.concatenate([head, tail]), context=len(head), **fields)
        else:
            builder.add(str(number), kind, head, **fields)
    return builder.done("made-up", {})


@torch.no_grad()
def truth(model, asked):
    """{id: (log-likelihood, greedy)} by log_softmax over all logits of each request alone."""
    found = {}
    for request in asked.requests:
        ids = torch.from_numpy(asked.of(request).astype(np.int64))
        logits = model(ids[None]).logits[0].double().log_softmax(-1)
        first = max(1, request.context)
        picked = logits[first - 1 : -1].gather(1, ids[first:, None]).sum().item()
        found[request.id] = (picked, bool((logits[first - 1 : -1].argmax(-1) == ids[first:]).all()))
    return found


def answers(engine, asked):
    found = {request.id: row for request, row in engine.run(asked)}
    assert len(found) == len(asked.requests)
    return found


def test_ties_of_half_precision_decide_no_answer(model):
    half = copy.deepcopy(model).to(torch.bfloat16)
    asked = requests_of("argmax", count=4, positions=tuple(range(20)))
    got = answers(Engine(half, batch_size=1), asked)
    for request in asked.requests:
        hidden = half.base_model(torch.from_numpy(asked.of(request).astype(np.int64))[None]).last_hidden_state
        exact = hidden[0, :20].double() @ half.get_output_embeddings().weight.double().mT
        assert got[request.id]["tokens"] == exact.argmax(-1).tolist()


@pytest.mark.parametrize("batch_size", [None, 1, 5, "few sizes"])
def test_batched_equals_one_by_one(model, batch_size):
    asked = requests_of()
    few = batch_size == "few sizes"
    engine = Engine(model, batch_size=None if few else batch_size)
    engine.few_sizes = few
    assert engine.head is not None
    got = answers(engine, asked)
    for name, (expected, greedy) in truth(model, asked).items():
        assert -sum(got[name]["nll"]) == pytest.approx(expected, abs=1e-4)
        assert got[name]["greedy"] == greedy
        assert got[name]["seconds"] > 0


def test_on_a_gpu_batches_have_few_sizes(llama):
    """Powers of two, so that what is compiled for a size of a batch is compiled a few times."""
    asked = requests_of(count=37, contexts=9)
    engine = Engine(llama, batch_tokens=500)
    engine.few_sizes = True
    sizes = [len(batch) for batch in engine.batches(asked.requests)]
    assert sum(sizes) == 37
    assert all(size & (size - 1) == 0 for size in sizes)
    assert max(sizes) == 8  # of 500 // 40-odd


def test_greedy_is_noticed(model):
    """A continuation that the model itself would say, and the same with another last token."""
    head = torch.arange(5, 25)[None]
    with torch.no_grad():
        tail = model.generate(head, max_new_tokens=5, do_sample=False, pad_token_id=0, eos_token_id=None)[0].tolist()
    builder = Builder()
    builder.add("its own", "score", tail, context=20)
    builder.add("another", "score", [*tail[:-1], (tail[-1] + 1) % 600], context=20)
    got = answers(Engine(model), builder.done("x", {}))
    assert (got["its own"]["greedy"], got["another"]["greedy"]) == (True, False)


def test_segments_add_up(llama):
    whole, cut = requests_of(count=3), requests_of(count=3)
    for request in cut.requests:
        request.context, request.cuts = 0, (4, 9, request.length - 1)
    for request in whole.requests:
        request.context = 0
    one, parts = answers(Engine(llama), whole), answers(Engine(llama), cut)
    for name in one:
        assert [len(one[name]["nll"]), len(parts[name]["nll"])] == [1, 4]
        assert sum(parts[name]["nll"]) == pytest.approx(one[name]["nll"][0], rel=1e-5)
    request = cut.requests[0]
    prefix = RequestSet("x", {}, cut.of(request)[:4], [type(request)("p", "score", 0, 4)])
    assert answers(Engine(llama), prefix)["p"]["nll"][0] == pytest.approx(parts["0"]["nll"][0], rel=1e-5)


def test_segments_are_summed_in_fp64():
    request = engines.Request("p", "score", 0, 2**17)
    losses = torch.full((2**17 - 1,), 0.1)
    assert engines.segments(losses, request) == [pytest.approx(losses[0].item() * len(losses), rel=1e-12)]


def test_each_prompt_gets_as_many_new_tokens_as_it_asks_for(llama):
    asked = requests_of("generate", count=4, contexts=1)
    for request, many in zip(asked.requests, (2, 5, 2, 5), strict=True):
        request.max_new = many
    assert [len(answers(Engine(llama), asked)[str(n)]["tokens"]) for n in range(4)] == [2, 5, 2, 5]


def test_logits_are_built_some_positions_at_a_time(llama, monkeypatch):
    asked = requests_of(count=6)
    whole = answers(Engine(llama), asked)
    monkeypatch.setattr(engines, "LOGITS", 3 * 600)
    engine = Engine(llama)
    rows = []
    hook = engine.head.register_forward_hook(lambda *args: rows.append(args[-1].shape[0]))
    pieces = answers(engine, asked)
    hook.remove()
    assert max(rows) == 3
    for name in whole:
        assert pieces[name]["nll"] == pytest.approx(whole[name]["nll"], abs=1e-5)


def test_a_model_whose_logits_are_not_its_heads_is_asked_for_logits():
    scaled = LeakyLM(scale=0.5)
    engine = Engine(scaled)
    assert engine.head is None
    assert Engine(LeakyLM()).head is not None
    asked = requests_of(count=5)
    got = answers(engine, asked)
    for name, (expected, _) in truth(scaled, asked).items():
        assert -sum(got[name]["nll"]) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("length", [2, 63, 64, 65, 66, 129, 200])
def test_a_recurrent_model_reads_long_windows_in_pieces(length):
    model = LeakyLM()
    engine = Engine(model, chunk=64)
    assert engine.recurrent
    rng = np.random.default_rng(length)
    builder = Builder()
    builder.add("long", "score", rng.integers(0, 600, length), cuts=(1 + length // 2,) if length > 2 else ())
    builder.add("shorter", "score", rng.integers(0, 600, 1 + length // 2), context=1)
    asked = builder.done("x", {})
    expected = truth(model, asked)
    model.base_model.longest = 0
    got = answers(engine, asked)
    assert model.base_model.longest <= 64
    for name in got:
        assert -sum(got[name]["nll"]) == pytest.approx(expected[name][0], abs=1e-3)
        assert got[name]["greedy"] == expected[name][1]


def test_long_windows_that_go_in_pieces_share_a_batch(llama, monkeypatch):
    """What bounds a batch is what is run at once: a piece of each window where the cache does not grow."""
    builder = Builder()
    for number, size in enumerate((300, 300, 300, 200, 20)):
        builder.add(str(number), "score", np.random.default_rng(number).integers(0, 400, size))
    asked = builder.done("x", {})
    states, called = Engine.states, []
    monkeypatch.setattr(
        Engine, "states", lambda self, ids, *a, **b: called.append(ids.shape) or states(self, ids, *a, **b)
    )
    for model, rows in ((LeakyLM(), [4, 4, 4, 4, 4, 1]), (llama, [1, 1, 1, 1, 1])):
        called.clear()
        got = answers(Engine(model, batch_tokens=256, chunk=64), asked)
        assert [shape[0] for shape in called] == rows
        assert rows[0] == 1 or max(shape.numel() for shape in called) == 256
        for name, (expected, _) in truth(model, asked).items():
            assert -sum(got[name]["nll"]) == pytest.approx(expected, abs=2e-3)


def test_a_cache_that_does_not_carry_on_is_not_trusted(model):
    assert not Engine(LeakyLM(forgets=True)).recurrent
    assert not Engine(model).recurrent  # keys and values grow


@pytest.mark.parametrize("name", ["ccq-gla-tiny", "ccq-gated-deltanet-tiny"])
def test_our_own_models_go_in_pieces(name):
    from ccq.model import CCQConfig, CCQForCausalLM

    torch.manual_seed(0)
    model = CCQForCausalLM(CCQConfig.preset(name)).eval()
    assert Engine(model).recurrent
    asked = requests_of(count=8, longest=90, vocabulary=256)
    got = answers(Engine(model, chunk=32), asked)
    for name, (expected, _) in truth(model, asked).items():
        assert -sum(got[name]["nll"]) == pytest.approx(expected, abs=1e-4)


def test_generation_equals_one_by_one(model):
    asked = requests_of("generate", count=9, contexts=9, max_new=6, stop=(0,))
    got = answers(Engine(model), asked)
    alone = answers(Engine(model, batch_size=1), asked)
    for request in asked.requests:
        ids = torch.from_numpy(asked.of(request).astype(np.int64))
        said = []
        with torch.no_grad():
            for _ in range(6):  # no cache
                said.append(
                    model(torch.cat([ids, torch.tensor(said, dtype=torch.long)])[None]).logits[0, -1].argmax().item()
                )
                if said[-1] == 0:
                    break
        expected = [token for token in said if token != 0]
        assert got[request.id]["tokens"] == alone[request.id]["tokens"] == expected


def test_our_own_models_generate_prompts_of_any_lengths_together(monkeypatch):
    from ccq.model import CCQConfig, CCQForCausalLM

    torch.manual_seed(0)
    model = CCQForCausalLM(CCQConfig.preset("ccq-gla-tiny", initializer_range=0.5)).eval()
    asked = requests_of("generate", count=11, contexts=11, longest=90, vocabulary=256, max_new=6)
    batches, generate = [], model.generate
    monkeypatch.setattr(model, "generate", lambda *a, **b: batches.append(len(a[0])) or generate(*a, **b))
    engine = Engine(model)
    assert engine.pads
    together = answers(engine, asked)
    assert batches == [11]
    alone = answers(Engine(model, batch_size=1), asked)
    assert [together[n]["tokens"] for n in alone] == [alone[n]["tokens"] for n in alone]
    assert len({tuple(row["tokens"]) for row in alone.values()}) > 6, "prompts that matter"
    monkeypatch.setattr(type(model.model), "forward", ignoring_masks(type(model.model).forward))
    assert not Engine(model).pads, "a model whose padding counts is not trusted with any"


def ignoring_masks(forward):
    return lambda self, ids, attention_mask=None, **rest: forward(self, ids, **rest)


def test_stop_tokens_end_it_but_not_before_the_least(llama):
    free = answers(Engine(llama), requests_of("generate", count=3, max_new=8))
    first, third = free["0"]["tokens"][0], free["0"]["tokens"][2]
    stopped = answers(Engine(llama), requests_of("generate", count=3, max_new=8, stop=(third,)))
    assert stopped["0"]["tokens"] == free["0"]["tokens"][: free["0"]["tokens"].index(third)]
    at_once = answers(Engine(llama), requests_of("generate", count=3, max_new=8, stop=(first,)))
    assert at_once["0"]["tokens"] == []
    one = answers(Engine(llama), requests_of("generate", count=3, max_new=8, stop=(first,), min_new=1))
    assert len(one["0"]["tokens"]) >= 1
    assert one["0"]["tokens"][0] != first


def test_what_a_model_says_by_itself_does_not_depend_on_its_generation_config(llama):
    """... nor is that config changed: penalties and tokens that it must not say are its authors' taste."""
    asked = requests_of("generate", count=3, max_new=8)
    plain = answers(Engine(llama), asked)
    own = llama.generation_config
    try:
        llama.generation_config = copy.deepcopy(own)
        llama.generation_config.update(
            repetition_penalty=3.0, suppress_tokens=[plain["0"]["tokens"][0]], eos_token_id=plain["1"]["tokens"][0]
        )
        mine = llama.generation_config
        again = answers(Engine(llama), asked)
        assert llama.generation_config is mine
    finally:
        llama.generation_config = own
    assert {n: row["tokens"] for n, row in again.items()} == {n: row["tokens"] for n, row in plain.items()}


def test_argmax_at_positions(model):
    asked = requests_of("argmax", count=5, contexts=5, positions=(0, 3, 11))
    got = answers(Engine(model), asked)
    for request in asked.requests:
        ids = torch.from_numpy(asked.of(request).astype(np.int64))
        with torch.no_grad():
            expected = model(ids[None]).logits[0, [0, 3, 11]].argmax(-1).tolist()
        assert got[request.id]["tokens"] == expected


def test_requests_survive_their_file(tmp_path):
    asked = requests_of(cuts=(3, 5))
    asked.requests[0].meta = {"answers": ["ä"], "n": 1}
    asked.save(tmp_path / "x.npz")
    again = RequestSet.load(tmp_path / "x.npz")
    assert again.requests == asked.requests
    assert again.hash() == asked.hash()
    assert np.array_equal(again.tokens, asked.tokens)
    again.requests[0].context += 1
    assert again.hash() != asked.hash()
