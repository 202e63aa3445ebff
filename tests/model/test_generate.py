"""`generate` of transformers, with our cache and our graph, and `ccq generate`."""

from __future__ import annotations

import copy
import gc
import pickle
import threading

import pytest
import torch
from model_helpers import CLOSE, SYSTEMS, make_model, shared_model, tokens
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import (
    DynamicCache,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from ccq import cli
from ccq.model import CCQCache, CCQForCausalLM, graphs
from ccq.ops.choose import BackendFallbackWarning

each_system = pytest.mark.parametrize("system", SYSTEMS)
few_systems = pytest.mark.parametrize("system", ["transformer", "ccq-gated-deltanet"])


def greedy(model, ids, count):
    """The likeliest token, from the whole sequence each time."""
    for _ in range(count):
        ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)], 1)
    return ids


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


@pytest.fixture(params=["step by step", "as a graph"])
def way(request, monkeypatch):
    """Decoding without and with a graph, which on a CPU is all of it but the capture."""
    if request.param == "as a graph":
        monkeypatch.setattr(graphs, "DEVICES", {"cpu"})
    return request.param


@each_system
def test_greedy_is_the_argmax_loop(system, way):
    model, prompt = make_model(system), tokens(2, 9)
    got = model.generate(prompt, max_new_tokens=25, do_sample=False)
    assert torch.equal(got, greedy(model, prompt, 25))
    assert (model.decoding.graph is not None) == (way == "as a graph")


@each_system
def test_left_padded_prompts_generate_as_alone(system):
    model, ids = make_model(system), tokens(3, 10)
    mask = torch.ones_like(ids)
    mask[0, :6] = 0
    mask[1, :9] = 0
    got = model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False, pad_token_id=0)
    for row, start in enumerate((6, 9, 0)):
        assert torch.equal(got[row, start:], greedy(model, ids[row : row + 1, start:], 12)[0])


@each_system
def test_beams_equal_beams_without_a_cache(system):
    """Each step reorders every state; without a cache there is none to reorder."""
    model, prompt = shared_model(system), tokens(2, 6)
    settings = {"num_beams": 3, "num_return_sequences": 2, "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    cached = model.generate(prompt, return_dict_in_generate=True, output_scores=True, **settings)
    plain = model.generate(prompt, use_cache=False, return_dict_in_generate=True, output_scores=True, **settings)
    assert torch.equal(cached.sequences, plain.sequences)
    torch.testing.assert_close(cached.sequences_scores, plain.sequences_scores, rtol=0, atol=CLOSE)
    one = model.generate(prompt[1:], **settings)
    assert torch.equal(one, cached.sequences[2:])  # and a prompt does not depend on the others


@few_systems
def test_sampling_repeats_with_its_seed(system, way):
    model, prompt = make_model(system), tokens(2, 5)
    texts = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        texts.append(model.generate(prompt, max_new_tokens=20, do_sample=True, top_k=0))
    assert torch.equal(texts[0], texts[1])
    assert not torch.equal(texts[0], texts[2])


@few_systems
def test_generation_goes_on_from_a_cache(system, way):
    model, prompt = make_model(system), tokens(2, 9)
    first = model.generate(prompt, max_new_tokens=5, do_sample=False, return_dict_in_generate=True)
    cache = first.past_key_values
    assert isinstance(cache, CCQCache)
    assert cache.get_seq_length() == 13  # the last token was not read yet
    assert not model.decoding.holds(cache)
    kept = copy.deepcopy(cache)
    for again in (kept, cache):
        more = model.generate(first.sequences, past_key_values=again, max_new_tokens=5, do_sample=False)
        assert torch.equal(more, greedy(model, prompt, 10))


@few_systems
def test_stops_at_the_end_token(system, way):
    model, prompt = make_model(system), tokens(2, 9)
    free = model.generate(prompt, max_new_tokens=20, do_sample=False)
    end = free[0, 13].item()
    got = model.generate(prompt, max_new_tokens=20, do_sample=False, eos_token_id=end, pad_token_id=255)
    for row in range(2):
        text = free[row, 9:].tolist()
        stop = text.index(end) + 1 if end in text else len(text)
        assert got[row, 9 : 9 + stop].tolist() == text[:stop]
        assert set(got[row, 9 + stop :].tolist()) <= {255}


def test_chunks_of_a_long_prompt():
    model, prompt = shared_model("ccq-gla"), tokens(2, 21)
    got = model.generate(prompt, max_new_tokens=6, do_sample=False, prefill_chunk_size=8, past_key_values=CCQCache())
    assert torch.equal(got, greedy(model, prompt, 6))


@few_systems
def test_a_prompt_of_embeddings(system, way):
    model, prompt = make_model(system), tokens(2, 7)
    got = model.generate(inputs_embeds=model.model.embed_tokens(prompt), max_new_tokens=6, do_sample=False)
    assert torch.equal(got, greedy(model, prompt, 6)[:, 7:])


def test_a_larger_vocabulary():
    model, prompt = make_model("ccq-gla"), tokens(1, 7)
    before = model(prompt).logits
    model.resize_token_embeddings(300, mean_resizing=False)
    assert model.config.vocab_size == 300
    torch.testing.assert_close(model(prompt).logits[..., :256], before)
    model(torch.tensor([[299]]))  # is a token now


@few_systems
def test_prompts_that_cannot_be_continued(system):
    model = shared_model(system)
    with pytest.raises(ValueError, match="the prompt is empty"):
        model.generate(tokens(1, 0), max_new_tokens=2)
    for mask in (torch.tensor([[1, 1, 1], [1, 1, 0]]), torch.tensor([[1, 1, 1], [0, 0, 0]])):
        with pytest.raises(ValueError, match="pad on the left, and leave none empty"):
            model.generate(tokens(2, 3), attention_mask=mask, max_new_tokens=2, pad_token_id=0)
    with pytest.raises(ValueError, match="assisted generation is not supported with stateful models"):
        model.generate(tokens(1, 3), assistant_model=model, max_new_tokens=2)


# The graph, all of it but the capture.


@pytest.fixture
def cpu_graphs(monkeypatch):
    monkeypatch.setattr(graphs, "DEVICES", {"cpu"})


@each_system
def test_graph_steps_equal_plain_steps(system, cpu_graphs):
    model, ids = make_model(system), tokens(2, 40)
    plain = model(ids[:, :10]).past_key_values
    cache = copy.deepcopy(plain)
    before = [x.data_ptr() for x in torch.utils._pytree.tree_leaves(plain.states)]
    rounding = 1e-5 if system == "transformer" else 0  # attention over buffers of other sizes may sum in another order
    for t in range(10, 40):
        ref = model(ids[:, t : t + 1], past_key_values=plain).logits
        got = model(ids[:, t : t + 1], past_key_values=cache, graph_length=40).logits
        torch.testing.assert_close(got, ref, rtol=0, atol=rounding * ref.abs().max().item())
    assert model.decoding.holds(cache)
    assert cache.get_seq_length() == 40
    assert cache.lengths.tolist() == [40, 40]
    fixed = [x.data_ptr() for x in torch.utils._pytree.tree_leaves(model.decoding.graph.states)]
    model(ids[:, :1], past_key_values=cache, graph_length=40)
    assert [x.data_ptr() for x in torch.utils._pytree.tree_leaves(cache.states)] == fixed  # memory of the capture
    if system != "transformer":  # whose buffers grow
        assert [x.data_ptr() for x in torch.utils._pytree.tree_leaves(plain.states)] == before


def test_a_cache_that_outgrows_the_graph_leaves_it_its_memory(cpu_graphs, monkeypatch):
    """A graph reads the addresses it was captured with; the next cache is copied there."""
    monkeypatch.setattr(graphs, "ROOM", 8)
    model, ids = make_model("transformer"), tokens(1, 12)
    cache = model(ids[:, :4]).past_key_values
    model(ids[:, 4:5], past_key_values=cache, graph_length=8)
    captured = [x.data_ptr() for x in torch.utils._pytree.tree_leaves(model.decoding.graph.states)]
    for t in range(5, 12):
        grown = model(ids[:, t : t + 1], past_key_values=cache).logits
    torch.testing.assert_close(grown, model(ids).logits[:, -1:], rtol=0, atol=1e-5)
    other = model(ids[:, :4]).past_key_values
    got = model(ids[:, 4:5], past_key_values=other, graph_length=8).logits
    assert [x.data_ptr() for x in torch.utils._pytree.tree_leaves(model.decoding.graph.states)] == captured
    torch.testing.assert_close(got, model(ids[:, :5]).logits[:, -1:], rtol=0, atol=1e-5)


def test_one_graph_serves_many_calls(cpu_graphs):
    model, ids = make_model("transformer"), tokens(2, 20)
    model.generate(ids, max_new_tokens=3, do_sample=False)
    first = model.decoding.graph
    assert first.room == 256
    model.generate(ids, max_new_tokens=200, do_sample=False)
    assert model.decoding.graph is first
    model.generate(ids, max_new_tokens=256, do_sample=False)  # does not fit: another one
    second = model.decoding.graph
    assert second is not first
    model.generate(ids[:1], max_new_tokens=3, do_sample=False)  # another batch
    assert model.decoding.graph is not second
    linear = make_model("gla")
    linear.generate(ids, max_new_tokens=3, do_sample=False)
    first = linear.decoding.graph
    linear.generate(ids, max_new_tokens=300, do_sample=False)  # nothing grows
    assert linear.decoding.graph is first


def test_a_graph_that_is_full_makes_way_for_a_larger_one(cpu_graphs):
    model, ids = make_model("transformer"), tokens(1, 270)
    cache = model(ids[:, :250]).past_key_values
    rest = [model(ids[:, t : t + 1], past_key_values=cache, graph_length=1).logits for t in range(250, 270)]
    torch.testing.assert_close(torch.cat(rest, 1), model(ids).logits[:, 250:], rtol=0, atol=CLOSE)
    assert model.decoding.graph.room == 512


def test_nothing_stays_in_a_graph(cpu_graphs):
    """What the last generation left, NaN even, does not reach the next one."""
    model, prompt = make_model("transformer"), tokens(2, 5)
    ref = model.generate(prompt, max_new_tokens=9, do_sample=False)
    for x in torch.utils._pytree.tree_leaves(model.decoding.graph.states):
        x.fill_(float("nan") if x.is_floating_point() else 3)
    assert torch.equal(model.generate(prompt, max_new_tokens=9, do_sample=False), ref)


class Adapter(nn.Module):
    """As others put them where a Linear was: on or off by a flag that no weight says."""

    def __init__(self, base):
        super().__init__()
        self.base, self.more = base, nn.Linear(base.in_features, base.out_features, bias=False)
        self.on, self.active, self.scaling = True, ["first"], {"first": 2.0}

    def forward(self, x):
        return self.base(x) + self.scaling["first"] * self.more(x) if self.on else self.base(x)


@pytest.mark.parametrize("change", [{"on": False}, {"active": ["second"]}, {"scaling": {"first": 3.0}}], ids=str)
def test_a_graph_is_not_replayed_with_an_adapter_set_otherwise(cpu_graphs, change):
    model = make_model("ccq-gla")
    mlp = next(module for module in model.modules() if hasattr(module, "down_proj"))
    mlp.down_proj = Adapter(mlp.down_proj).to(model.dtype)
    ids = torch.tensor([[1, 2, 3]])
    model.generate(ids, max_new_tokens=4)
    first = model.decoding.graph
    model.generate(ids, max_new_tokens=4)
    assert model.decoding.graph is first
    for name, value in change.items():
        setattr(mlp.down_proj, name, value)
    model.generate(ids, max_new_tokens=4)
    assert model.decoding.graph is not first


def test_a_graph_is_kept_where_nothing_that_it_computes_is_set_otherwise(cpu_graphs):
    """Not by a class of the user's own, and not by a module that counts its calls or refers to itself."""

    class Mine(CCQForCausalLM):
        pass

    class Counted(Adapter):
        def forward(self, x):
            self.calls = getattr(self, "calls", 0) + 1
            self.seen = {"me": [self.__dict__]}
            return super().forward(x)

    model = Mine(make_model("ccq-gla").config).eval()
    mlp = next(module for module in model.modules() if hasattr(module, "down_proj"))
    mlp.down_proj = Counted(mlp.down_proj)
    graphs_seen = []
    for _ in range(3):
        model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4)
        graphs_seen.append(model.decoding.graph)
    assert graphs_seen[2] is graphs_seen[1]


def test_a_layer_taken_out_after_generating_is_out(cpu_graphs):
    model = make_model("ccq-gla")
    ids = torch.tensor([[1, 2, 3]])
    model.generate(ids, max_new_tokens=4)
    del model.model.layers[1]
    assert model.generate(ids, max_new_tokens=4).shape == (1, 7)


def test_graph_follows_the_weights(cpu_graphs):
    model, prompt = make_model("ccq-gla"), tokens(1, 5)
    model.generate(prompt, max_new_tokens=3, do_sample=False)
    graph = model.decoding.graph
    with torch.no_grad():
        model.lm_head.weight.normal_()  # in place: the graph reads it
    assert torch.equal(model.generate(prompt, max_new_tokens=9, do_sample=False), greedy(model, prompt, 9))
    assert model.decoding.graph is graph
    model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))  # elsewhere: captured again
    assert torch.equal(model.generate(prompt, max_new_tokens=9, do_sample=False), greedy(model, prompt, 9))
    assert model.decoding.graph is not graph


def test_a_cache_that_leaves_its_graph_keeps_its_numbers(cpu_graphs):
    model, ids = make_model("ccq-gated-deltanet"), tokens(2, 30)
    full = model(ids).logits

    def decode(cache, begin, end):
        return torch.cat(
            [model(ids[:, t : t + 1], past_key_values=cache, graph_length=99).logits for t in range(begin, end)], 1
        )

    a, b = (model(ids[:, :10]).past_key_values for _ in range(2))
    got = [
        decode(a, 10, 15),
        decode(b, 10, 12),
        decode(a, 15, 20),
        decode(b, 12, 20),
    ]  # in turns: one graph, two caches
    torch.testing.assert_close(torch.cat([got[0], got[2]], 1), full[:, 10:20], rtol=0, atol=CLOSE)
    torch.testing.assert_close(torch.cat([got[1], got[3]], 1), full[:, 10:20], rtol=0, atol=CLOSE)
    b.reorder_cache(torch.tensor([1, 0]))
    swapped = model(ids[[1, 0], 20:21], past_key_values=b, graph_length=99).logits
    torch.testing.assert_close(swapped, full[[1, 0], 20:21], rtol=0, atol=CLOSE)
    piece = model(ids[:, 20:25], past_key_values=a).logits  # a piece, then single tokens again
    torch.testing.assert_close(torch.cat([piece, decode(a, 25, 30)], 1), full[:, 20:], rtol=0, atol=CLOSE)
    assert model.decoding.holds(a)
    assert not model.decoding.holds(b)
    model.decoding.release()
    assert not model.decoding.holds(a)
    del a
    gc.collect()


def test_graph_stays_out_of_copies_and_pickles(cpu_graphs):
    model, prompt = make_model("gla"), tokens(1, 5)
    ref = model.generate(prompt, max_new_tokens=3, do_sample=False)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert twin.decoding.graph is None
        assert torch.equal(twin.generate(prompt, max_new_tokens=3, do_sample=False), ref)


def test_what_a_graph_would_not_do_goes_without(cpu_graphs):
    model, prompt = make_model("ccq-gla"), tokens(1, 5)
    called = []
    hook = model.model.layers[0].mlp.register_forward_hook(lambda *_: called.append(1))
    model.generate(prompt, max_new_tokens=4, do_sample=False)
    assert len(called) == 4
    assert model.decoding.graph is None
    assert "has hooks" in graphs.refusal(model)
    hook.remove()
    assert graphs.refusal(model) is None
    model.model.layers[1].mixer.cleaner.intervention = torch.zeros_like
    assert "intervened" in graphs.refusal(model)
    model.generate(prompt, max_new_tokens=4, do_sample=False)
    assert model.decoding.graph is None
    model.model.layers[1].mixer.cleaner.intervention = None
    model.generate(prompt, max_new_tokens=4, do_sample=False, graph_length=0)  # the way to switch it off
    out = model.generate(
        prompt, max_new_tokens=4, do_sample=False, output_hidden_states=True, return_dict_in_generate=True
    )
    assert [len(states) for states in out.hidden_states] == [3] * 4
    cache = model(prompt).past_key_values
    assert model(prompt[:, :1], targets=prompt[:, :1], past_key_values=cache, graph_length=9).loss is not None
    assert model.decoding.graph is None


def test_a_capture_that_fails_says_so_once_and_decodes(cpu_graphs, monkeypatch):
    def broken(*_):
        raise RuntimeError("operation not permitted when stream is capturing")

    model, prompt = make_model("ccq-gla"), tokens(1, 5)
    monkeypatch.setattr(graphs, "capture", broken)
    with pytest.warns(BackendFallbackWarning, match="not permitted") as warned:
        got = model.generate(prompt, max_new_tokens=6, do_sample=False)
    assert len(warned) == 1
    assert torch.equal(got, greedy(model, prompt, 6))
    model.generate(prompt, max_new_tokens=6, do_sample=False)  # a warning here would be an error


def test_a_second_thread_decodes_without_the_graph(cpu_graphs):
    model, prompt = make_model("gla"), tokens(1, 5)
    cache = model(prompt).past_key_values
    model(prompt[:, :1], past_key_values=cache, graph_length=50)
    results = []

    def other():
        with torch.no_grad():
            results.append(model.generate(prompt, max_new_tokens=5, do_sample=False))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert torch.equal(results[0], greedy(model, prompt, 5))
    assert model.decoding.holds(cache)


@pytest.mark.gpu
@pytest.mark.parametrize("system", SYSTEMS)
def test_captured_steps_equal_plain_steps(system):
    model, ids = make_model(system).cuda(), tokens(2, 60).cuda()
    plain = model(ids[:, :20]).past_key_values
    cache = copy.deepcopy(plain)
    for t in range(20, 60):
        ref = model(ids[:, t : t + 1], past_key_values=plain).logits
        got = model(ids[:, t : t + 1], past_key_values=cache, graph_length=60).logits
        torch.testing.assert_close(got, ref, rtol=0, atol=1e-3)
    assert model.decoding.holds(cache), graphs.refusal(model)
    text = model.generate(ids[:, :20], max_new_tokens=30, do_sample=False)
    assert torch.equal(text, model.generate(ids[:, :20], max_new_tokens=30, do_sample=False, graph_length=0))


# The command.


def save_tokenizer(folder, config_too=True):
    """One token a byte-like character, 256 of them."""
    tokenizer = Tokenizer(models.BPE({chr(32 + i): i for i in range(256)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    if config_too:
        PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    else:
        tokenizer.save(str(folder / "tokenizer.json"))


@pytest.mark.parametrize("config_too", [True, False])
def test_the_command_streams_what_generate_returns(tmp_path, capsys, config_too):
    model = make_model("ccq-gla")
    model.save_pretrained(tmp_path)
    save_tokenizer(tmp_path, config_too)
    assert cli.main(["generate", str(tmp_path), "--prompt", "Hello there", "--tokens", "12", "--device", "cpu"]) == 0
    out, err = capsys.readouterr()
    ids = torch.tensor([[ord(c) - 32 for c in "Hello there"]])
    text = "".join(chr(32 + i) for i in greedy(model, ids, 12)[0].tolist())
    assert out == text + "\n"
    assert err.strip().splitlines()[-1].startswith("12 tokens in ")


def test_the_command_takes_any_hugging_face_model(tmp_path, capsys):
    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
            bos_token_id=None, eos_token_id=None,
        )
    ).save_pretrained(tmp_path)  # fmt: skip
    save_tokenizer(tmp_path)
    arguments = [
        "generate",
        str(tmp_path),
        "--prompt",
        "Hello",
        "--tokens",
        "5",
        "--device",
        "cpu",
        "--temperature",
        "1",
    ]
    texts = []
    for seed in ("1", "1", "2"):
        assert cli.main([*arguments, "--seed", seed]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]
    assert all(text.startswith("Hello") for text in texts)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--prompt", " "], "--prompt: expected some text, got an empty prompt"),
        (["--prompt", "a", "--tokens", "0"], "--tokens: expected one whole number above 0, got '0'"),
        (["--prompt", "a", "--temperature", "-1"], "--temperature: expected a number that is not negative"),
        (["--prompt", "a", "--top-p", "0"], "--top-p: expected a number above 0"),
        ([], "the following arguments are required: --prompt"),
        (["--prompt", "a", "--device", "foo"], "--device: expected cpu, cuda or cuda:N, got 'foo'"),
        (["--prompt", "a", "--device", "cuda:99"], "--device: 'cuda:99' is not available: torch sees"),
    ],
)
def test_the_command_names_mistakes(arguments, words, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["generate", "nowhere", *arguments])
    assert stop.value.code == 2
    assert words in capsys.readouterr().err


def test_the_command_names_a_missing_folder(capsys):
    assert cli.main(["generate", "./nowhere", "--prompt", "a"]) == 1
    assert "ccq generate: ./nowhere does not exist: expected a folder" in capsys.readouterr().err


def test_a_folder_without_a_tokenizer_is_named(tmp_path, capsys):
    shared_model("gla").save_pretrained(tmp_path / "model")
    assert cli.main(["generate", str(tmp_path / "model"), "--prompt", "Once"]) == 1
    assert "model has no tokenizer" in capsys.readouterr().err


def test_chunks_of_a_long_prompt_without_a_cache_of_ones_own():
    model, prompt = shared_model("ccq-gla"), tokens(2, 21)
    got = model.generate(prompt, max_new_tokens=6, do_sample=False, prefill_chunk_size=8)
    assert torch.equal(got, greedy(model, prompt, 6))


def test_the_cache_of_another_library_is_named():
    with pytest.raises(TypeError, match="expected a CCQCache, got DynamicCache"):
        shared_model("ccq-gla").generate(tokens(1, 4), max_new_tokens=2, past_key_values=DynamicCache())


def test_a_forward_of_ones_own_keeps_a_model_out_of_graphs(cpu_graphs):
    model = make_model("gla")
    assert graphs.refusal(model) is None
    linear = model.model.layers[0].mlp.up_proj
    linear.forward = lambda x: x
    assert "a forward put into it" in graphs.refusal(model)


@few_systems
def test_what_is_hooked_to_a_block_runs_at_every_token(system):
    model, prompt = make_model(system), tokens(1, 9)
    steer = torch.randn(model.config.hidden_size)
    calls = []

    def hook(module, inputs, output):
        calls.append(1)
        return output[0] + steer, *output[1:]

    model.model.layers[0].register_forward_hook(hook)
    how = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    cached = model.generate(prompt, **how)
    assert len(calls) == 6
    assert torch.equal(cached, model.generate(prompt, use_cache=False, **how))


def test_strings_that_stop():
    import ccq

    model, tokenizer = ccq.load("ccq-gla-pico")
    prompt = tokenizer("It was a cold day", return_tensors="pt")
    whole = model.generate(**prompt, max_new_tokens=40, do_sample=False)
    stopped = model.generate(**prompt, max_new_tokens=40, do_sample=False, stop_strings=[" "], tokenizer=tokenizer)
    assert stopped.shape[1] < whole.shape[1]
    assert torch.equal(stopped, whole[:, : stopped.shape[1]])


def test_a_backward_hook_of_the_head_runs():
    model, ids, calls = make_model("ccq-gla"), tokens(2, 12), []
    model.lm_head.register_full_backward_hook(lambda *arguments: calls.append(1))
    with torch.enable_grad():
        model(ids, labels=ids).loss.backward()
    assert calls == [1]


def test_chunks_of_a_long_prompt_with_beams():
    model, prompt = shared_model("ccq-gla"), tokens(2, 21)
    settings = {"max_new_tokens": 6, "do_sample": False, "num_beams": 3}
    got = model.generate(prompt, **settings, prefill_chunk_size=8)
    assert torch.equal(got, model.generate(prompt, **settings))


class Around(nn.Module):
    """As adapters are: a module around the Linear that stood there, without a weight and a bias of its own."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


@pytest.mark.parametrize("system", ["transformer", "ccq-gla", "ccq-gated-deltanet", "ccq-mamba2"])
def test_adapters_in_the_place_of_all_linears(system, way):
    model, prompt = make_model(system), tokens(2, 9)
    ref = greedy(model, prompt, 9)
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear:
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, Around(module))
    assert torch.equal(model.generate(prompt, max_new_tokens=9, do_sample=False), ref)
    assert (model.decoding.graph is not None) == (way == "as a graph")


@pytest.mark.parametrize("tokens", ["7", "8"])
def test_the_command_says_how_many_positions_are_left(tmp_path, capsys, tokens):
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "n_positions": 12, "n_embd": 32, "n_layer": 1, "n_head": 2}
    GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None)).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    arguments = ["generate", str(tmp_path), "--prompt", "Hello", "--device", "cpu", "--tokens", tokens]
    if tokens == "7":
        assert cli.main(arguments) == 0
        return
    with pytest.raises(SystemExit):
        cli.main(arguments)
    expected = "positions for 12 tokens and the prompt has 5: expected at most 7, got 8"
    assert expected in capsys.readouterr().err.replace("\n", " ")
