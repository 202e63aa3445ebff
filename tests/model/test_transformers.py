"""At home in transformers: Auto classes with and without `import ccq`, packing and names as others have them."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from model_helpers import CLOSE, make_model, shared_model, tokens
from torch import nn
from torch.export import Dim, export
from transformers import DataCollatorWithFlattening

from ccq.mixers import attention
from ccq.model import CCQConfig

few_systems = pytest.mark.parametrize("system", ["transformer", "ccq-gla", "ccq-mamba2"])

REMOTE = """
import sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("model", trust_remote_code=True).eval()
model.save_pretrained("again")
again = AutoModelForCausalLM.from_pretrained("again", trust_remote_code=True).eval()
ids = torch.arange(9)[None]
with torch.no_grad():
    torch.save([model(ids).logits, again(ids).logits], "logits.pt")
"""
PLAIN = """
import sys, torch
if sys.argv[1] == "first":
    import ccq
    assert "transformers" not in sys.modules
    import transformers
else:
    import transformers
    transformers.AutoModelForCausalLM
    import ccq
assert "ccq.model.decoder" not in sys.modules
config = transformers.AutoConfig.from_pretrained("model")
model = transformers.AutoModelForCausalLM.from_pretrained("model").eval()
assert type(config).__name__ == "CCQConfig" and type(model).__module__ == "ccq.model.decoder", type(model)
assert type(transformers.AutoModel.from_config(config)).__name__ == "CCQModel"
with torch.no_grad():
    torch.save([model(torch.arange(9)[None]).logits], "logits.pt")
"""


@pytest.mark.parametrize(("code", "argument"), [(REMOTE, ""), (PLAIN, "first"), (PLAIN, "last")])
def test_auto_classes_load_a_saved_model(tmp_path, code, argument):
    model = shared_model("ccq-gla")
    model.save_pretrained(tmp_path / "model")
    env = os.environ | {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", code, argument]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with torch.no_grad():
        ref = model(torch.arange(9)[None]).logits
    for logits in torch.load(tmp_path / "logits.pt"):
        torch.testing.assert_close(logits, ref, rtol=0, atol=CLOSE)
    for folder in ("model", "again") if code == REMOTE else ("model",):
        told = json.loads((tmp_path / folder / "config.json").read_text())["auto_map"]
        assert told["AutoModelForCausalLM"] == "modeling_ccq.CCQForCausalLM"
        assert [path.name for path in (tmp_path / folder).glob("*.py")] == ["modeling_ccq.py"]  # and no copy of ours


def packed_rows(rows):
    """What transformers makes of rows, in each way that it has."""
    features = [{"input_ids": row} for row in rows]
    batch = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)(features)
    position_ids, seq_idx = batch.pop("position_ids"), batch.pop("seq_idx")
    flash = {name: batch.pop(name) for name in list(batch) if name.startswith(("cu_seq", "max_length"))}
    ways = {"position_ids": {"position_ids": position_ids}, "seq_idx": {"seq_idx": seq_idx}, "flash": flash}
    return batch, ways | {"all": {"position_ids": position_ids, "seq_idx": seq_idx, **flash}}


@few_systems
@pytest.mark.parametrize("way", ["position_ids", "seq_idx", "flash", "all"])
def test_packed_as_others_do_it_equals_separate(system, way):
    model = shared_model(system)
    rows = [tokens(1, n)[0].tolist() for n in (5, 1, 9)]
    batch, ways = packed_rows(rows)
    with torch.no_grad():
        out = model(**batch, **ways[way])
        alone = [model(torch.tensor([row])).logits for row in rows]
        losses = [model(torch.tensor([row]), labels=torch.tensor([row])) for row in rows]
    torch.testing.assert_close(out.logits, torch.cat(alone, 1), rtol=0, atol=CLOSE)
    total, scored = sum(x.loss * x.scored for x in losses), sum(x.scored for x in losses)
    torch.testing.assert_close(out.loss, total / scored, rtol=0, atol=CLOSE)
    assert out.scored == scored == 12


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"position_ids": [[0, 1, 3, 4, 5, 6]]}, "position_ids: expected 0, 1, 2, ... in each sequence"),
        ({"position_ids": [[0, 1, 2, 3, 4]]}, r"position_ids: expected shape \[1, 6\], got \[1, 5\]"),
        (
            {"position_ids": [[0, 1, 2, 0, 1, 2]], "seq_idx": [[0, 0, 1, 1, 1, 1]]},
            "position_ids: expected the sequences",
        ),
        ({"cu_seqlens": [0, 2, 6], "cu_seq_lens_q": [0, 3, 6]}, "cu_seq_lens_q: expected the sequences of cu_seqlens"),
        ({"seq_idx": [0, 0, 1, 1, 1, 1]}, r"seq_idx: expected shape \[1, T\]"),
    ],
)
def test_what_cannot_be_honoured_is_refused(given, words):
    with pytest.raises(ValueError, match=words):
        shared_model("ccq-gla")(tokens(1, 6), **{name: torch.tensor(value) for name, value in given.items()})


def test_positions_that_restart_in_a_batch_are_refused():
    with pytest.raises(ValueError, match="restarting only in a batch of 1"):
        shared_model("ccq-gla")(tokens(2, 4), position_ids=torch.tensor([[0, 1, 0, 1], [0, 1, 2, 3]]))


def test_positions_that_say_what_the_mask_says_change_nothing():
    model, ids = shared_model("transformer"), tokens(2, 6)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    with torch.no_grad():
        ref = model(ids, attention_mask=mask).logits
        for positions in (mask.cumsum(1) - 1, torch.arange(6)[None]):
            assert torch.equal(model(ids, attention_mask=mask, position_ids=positions).logits, ref)
        out = model(ids[:1, :4], position_ids=torch.arange(4)[None])
        more = model(ids[:1, 4:], past_key_values=out.past_key_values, position_ids=torch.tensor([[4, 5]])).logits
    torch.testing.assert_close(more, model(ids[:1]).logits[:, 4:], rtol=0, atol=CLOSE)


@pytest.mark.parametrize(
    ("system", "heads", "key_heads", "size", "kind"),
    [
        ("transformer", 4, 2, 16, "full_attention"),
        ("ccq-gla", 2, 2, 16, "linear_attention"),
        ("mamba2", 8, 1, 16, "linear_attention"),
    ],
)
def test_names_that_others_ask_for(system, heads, key_heads, size, kind):
    config = shared_model(system).config
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (heads, key_heads, size)
    assert config.layer_types == [kind] * config.num_hidden_layers
    assert CCQConfig.preset("gla-mqar").layer_types == ["conv", "linear_attention"]


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own, in the loss
@pytest.mark.filterwarnings("ignore:`torch.jit.*deprecated:DeprecationWarning")
@few_systems
def test_a_mask_does_not_break_the_graph(system):
    """And what is compiled with one mask is right for others."""
    model, ids = make_model(system), tokens(2, 17)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    for padding in (slice(None, 5), slice(-5, None), slice(0)):  # left, right, none
        mask = torch.ones_like(ids)
        mask[0, padding] = 0
        with torch.no_grad():
            ref = model(ids, attention_mask=mask, labels=ids)
            got = compiled(ids, attention_mask=mask, labels=ids)
        torch.testing.assert_close(got.logits, ref.logits, rtol=0, atol=CLOSE)
        torch.testing.assert_close(got.loss, ref.loss, rtol=0, atol=CLOSE)


def test_a_padded_batch_takes_no_mask_of_all_tokens(monkeypatch):
    masks = []
    whole = attention.dot_product
    monkeypatch.setattr(
        attention, "dot_product", lambda *x, mask=None, **how: masks.append(mask) or whole(*x, mask=mask, **how)
    )
    model, ids = make_model("transformer"), tokens(3, 8)
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    with torch.no_grad():
        logits = model(ids, attention_mask=mask).logits
        alone = model(ids[1:2, 5:]).logits
    torch.testing.assert_close(logits[1:2, 5:], alone, rtol=0, atol=CLOSE)
    assert masks
    assert all(mask is None for mask in masks)


@pytest.mark.parametrize(
    ("system", "dim"),  # Dim.DYNAMIC refuses what Dim.AUTO would make a constant
    [*((system, Dim.DYNAMIC) for system in ("transformer", "ccq-gla", "gated-deltanet", "mesa-2")),
     ("ccq-gla", Dim.AUTO)],
    ids=str,
)  # fmt: skip
def test_a_model_is_exported_for_any_length(system, dim):
    class Logits(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = make_model(system)

        def forward(self, ids):
            return self.model(ids, use_cache=False).logits

    model, ids = Logits(), tokens(2, 40)
    program = export(model, (tokens(2, 17),), dynamic_shapes={"ids": {1: dim}}, strict=False)
    with torch.no_grad():
        torch.testing.assert_close(program.module()(ids), model(ids), rtol=0, atol=CLOSE)
