"""What a recurrent state kept in bf16 changes: what is predicted, and on a GPU the time of a decode step.

    python benchmarks/half_states.py --out FILE         # error of the shipped models, a few minutes on a CPU
    python benchmarks/half_states.py --time --out FILE  # time at 1.3B with random weights, on a GPU

The error is that of decoding the shipped book token by token, several pieces of it at once, against the same with fp32
states: perplexity in parts of the pieces, since a rounded state may forget more and more.
"""

from __future__ import annotations

import argparse
import functools
import math
from pathlib import Path

import torch

from ccq import shipped
from ccq.files import write_json
from ccq.model import CCQConfig, CCQForCausalLM
from ccq.provenance import cpu, provenance

PIECES, LENGTH, PARTS = 4, 2048, 4
STATES = ("float32", "bfloat16")


@torch.inference_mode()
def decoded(name: str, state_dtype: str) -> dict:
    """Perplexity of each part, and the log-probabilities of all next tokens, by single steps."""
    from transformers import AutoTokenizer

    folder = Path(shipped.locate(name))
    model = CCQForCausalLM.from_pretrained(folder, state_dtype=state_dtype).eval()
    text = (shipped.HERE / "book.txt").read_text(encoding="utf-8")
    ids = torch.tensor(AutoTokenizer.from_pretrained(shipped.tokenizer_folder(folder))(text)["input_ids"])
    ids = ids[: len(ids) // PIECES * PIECES].view(PIECES, -1)[:, : LENGTH + 1]
    cache, losses, best = None, [], []
    for t in range(LENGTH):
        out = model(ids[:, t : t + 1], past_key_values=cache, use_cache=True)
        cache, logits = out.past_key_values, out.logits[:, -1].float()
        losses.append(torch.nn.functional.cross_entropy(logits, ids[:, t + 1], reduction="none"))
        best.append(logits.argmax(-1))
    assert cache is not None
    parts = [math.exp(x) for x in torch.stack(losses, 1).unflatten(1, (PARTS, -1)).mean((0, 2))]
    return {"state_bytes": cache.nbytes // PIECES, "perplexity": parts, "best": torch.stack(best)}


def errors() -> list[dict]:
    rows = []
    for name in shipped.names():
        full, half = (decoded(name, kind) for kind in STATES)
        same = (full.pop("best") == half.pop("best")).double().mean().item()
        rows += [{"model": name, "state_dtype": kind, "tokens": PIECES * LENGTH, **row, "same_best_token": share}
                 for kind, row, share in zip(STATES, (full, half), (1.0, same), strict=True)]  # fmt: skip
        print(rows[-2:], flush=True)
    return rows


def times() -> list[dict]:
    from ccq.bench.results import graph_time, tokens

    rows = []
    for system in ("ccq-gla", "ccq-gated-deltanet"):
        for kind in STATES:
            with torch.device("cuda"):
                model = CCQForCausalLM(CCQConfig.preset(f"{system}-1.3b", state_dtype=kind)).bfloat16().eval()
            prompt = tokens(model, 8, 512)
            with torch.no_grad():
                cache = model(prompt, use_cache=True, logits_to_keep=1).past_key_values
                last = prompt[:, -1].contiguous()
                decode = functools.partial(model.decode, last, cache.states, cache.rows)
                step = graph_time(decode, inner=2, repeats=20)
            rows.append({"system": system, "size": "1.3b", "B": 8, "state_dtype": kind, "step_ms": step,
                         "state_bytes": cache.nbytes // 8})  # fmt: skip
            print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="file to write")
    parser.add_argument("--time", action="store_true", help="of a step, on a GPU")
    arguments = parser.parse_args()
    rows = times() if arguments.time else errors()
    about = {} if arguments.time else {"cpu": cpu()}
    write_json(arguments.out, {**provenance(), **about, "rows": rows})


if __name__ == "__main__":
    main()
