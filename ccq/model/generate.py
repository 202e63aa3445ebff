"""`ccq generate MODEL --prompt ...`: text from our checkpoints, or from any causal model in Hugging Face's layout."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, TextStreamer

from ccq.shipped import locate


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="ccq generate", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a shipped model, folder of a checkpoint with its tokenizer, or a name on the Hub",
    )
    parser.add_argument("--prompt", required=True, help="the text to go on from")
    parser.add_argument("--tokens", type=int, default=100, help="how many to add at most (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: the likeliest token each time (default)")
    parser.add_argument("--top-p", type=float, default=1.0, help="sample among the likeliest tokens of this weight")
    parser.add_argument("--seed", type=int, default=0, help="of sampling (default: %(default)s)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="(here: %(default)s)")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto")
    arguments = parser.parse_args(argv)
    for name, wrong, what in (
        ("prompt", not arguments.prompt.strip(), "some text to go on from, got an empty prompt"),
        ("tokens", arguments.tokens < 1, f"a positive number, got {arguments.tokens}"),
        ("temperature", arguments.temperature < 0, f"a number that is not negative, got {arguments.temperature}"),
        ("top-p", not 0 < arguments.top_p <= 1, f"a number above 0 and up to 1, got {arguments.top_p}"),
    ):
        if wrong:
            parser.error(f"--{name}: expected {what}")

    from ccq.doctor import check_cpu_bf16
    from ccq.evaluate import check_device
    from ccq.evaluate.errors import EvaluationError

    try:
        check_device(arguments.device)
        check_cpu_bf16(arguments.device, arguments.dtype)
    except (EvaluationError, ValueError) as error:
        parser.error(str(error))
    tokenizer, model = load(arguments.model, arguments.device, arguments.dtype)
    ids = tokenizer(arguments.prompt, return_tensors="pt").input_ids.to(arguments.device)
    if ids.shape[1] == 0:
        parser.error("--prompt: expected some text to go on from; the tokenizer makes no token of it")
    settings: dict[str, Any] = {"do_sample": arguments.temperature > 0}
    if settings["do_sample"]:
        torch.manual_seed(arguments.seed)
        settings |= {"temperature": arguments.temperature, "top_p": arguments.top_p, "top_k": 0}
    end = model.generation_config.eos_token_id
    end = tokenizer.eos_token_id if end is None else end
    padding = (
        tokenizer.pad_token_id if tokenizer.pad_token_id is not None else (end[0] if isinstance(end, list) else end)
    )

    print(arguments.prompt, end="", flush=True)
    begin = time.perf_counter()
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=arguments.tokens,
        eos_token_id=end,
        pad_token_id=padding if padding is not None else 0,
        streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
        **settings,
    )
    seconds = time.perf_counter() - begin
    added = output.shape[1] - ids.shape[1]
    print(f"{added} tokens in {seconds:.1f} s on {arguments.device}: {added / seconds:.0f} a second", file=sys.stderr)
    return 0


def load(name: str, device: str, dtype: str) -> tuple[Any, Any]:
    """The tokenizer and the model that ship under that name, lie in that folder, or have that name on the Hub."""
    folder = Path(name).expanduser()
    if not folder.is_dir() and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise FileNotFoundError(f"{name}: there is no such folder")
    given, name = name, locate(name)
    if dtype == "auto" and device == "cpu":
        dtype = "float32"  # checkpoints are bf16, to be small, and CPUs are slow in it where they can compute it at all
    folder = Path(name).expanduser()
    if (folder / "tokenizer.json").exists() and not (folder / "tokenizer_config.json").exists():
        tokenizer: Any = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    elif folder.is_dir() and not any(folder.glob("*token*")) and not any(folder.glob("vocab*")):
        raise FileNotFoundError(f"{given}: there is no tokenizer in this folder; a model of recall reads no text")
    else:
        try:
            tokenizer = AutoTokenizer.from_pretrained(name)
        except (OSError, ValueError) as error:
            if folder.is_dir():
                raise
            line = (str(error).strip() or "?").splitlines()[0]
            raise FileNotFoundError(
                f"there is no folder {given}, and no such model was found on the Hub ({line})"
            ) from error
    model: Any = AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
    return tokenizer, model.to(device).eval()
