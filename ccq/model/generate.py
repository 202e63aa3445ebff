"""`ccq generate MODEL --prompt ...`: generate text with our models or any causal model of Hugging Face."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any

from ccq.cli import add_run_options
from ccq.names import positive


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="ccq generate", description=(__doc__ or "").splitlines()[0])
    where = "a shipped model, a run, a from_pretrained folder with a tokenizer, or a name on the Hub"
    parser.add_argument("model", metavar="MODEL", help=where)
    parser.add_argument("--prompt", required=True, help="the text to continue")
    parser.add_argument("--tokens", type=positive, default=100, help="generate at most so many (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 (default): greedy decoding")
    parser.add_argument("--top-p", type=float, default=1.0, help="nucleus sampling (default: %(default)s, all tokens)")
    parser.add_argument("--seed", type=int, default=0, help="seed of sampling (default: %(default)s)")
    add_run_options(parser)
    arguments = parser.parse_args(argv)
    for name, wrong, what in (
        ("prompt", not arguments.prompt.strip(), "some text, got an empty prompt"),
        ("temperature", arguments.temperature < 0, f"a number that is not negative, got {arguments.temperature}"),
        ("top-p", not 0 < arguments.top_p <= 1, f"a number above 0 and up to 1, got {arguments.top_p}"),
    ):
        if wrong:
            parser.error(f"--{name}: expected {what}")

    import torch  # late: `--help` needs none of this
    from transformers import TextStreamer

    from ccq.doctor import runnable
    from ccq.pretrained import load, most_tokens

    device, dtype = runnable(parser, arguments.device, arguments.dtype)
    model, tokenizer = load(arguments.model, device=device, dtype=dtype)
    ids = tokenizer(arguments.prompt, return_tensors="pt").input_ids.to(device)
    if ids.shape[1] == 0:
        parser.error("--prompt: expected some text; the tokenizer makes no token of it")
    most = most_tokens(model)
    if most is not None and ids.shape[1] + arguments.tokens > most:
        parser.error(
            f"--tokens: the model has learned positions for {most} tokens and the prompt has {ids.shape[1]}: "
            f"expected at most {max(0, most - ids.shape[1])}, got {arguments.tokens}"
        )
    settings: dict[str, Any] = {"do_sample": arguments.temperature > 0}
    if settings["do_sample"]:
        torch.manual_seed(arguments.seed)
        settings |= {"temperature": arguments.temperature, "top_p": arguments.top_p, "top_k": 0}
    end = model.generation_config.eos_token_id
    end = tokenizer.eos_token_id if end is None else end
    known = (tokenizer.pad_token_id, end[0] if isinstance(end, list) else end, 0)
    settings |= {"eos_token_id": end, "pad_token_id": next(token for token in known if token is not None)}
    settings["streamer"] = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)

    print(arguments.prompt, end="", flush=True)
    begin = time.perf_counter()
    mask = torch.ones_like(ids)
    output = model.generate(ids, attention_mask=mask, max_new_tokens=arguments.tokens, **settings)
    seconds = time.perf_counter() - begin
    added = output.shape[1] - ids.shape[1]
    print(f"{added} tokens in {seconds:.1f} s on {device}: {added / seconds:.0f} a second", file=sys.stderr)
    return 0
