"""Keys of any model, caught while it runs: nothing of a layer is kept once it has been looked at.

    projection   what the key projection puts out: the paper's way. Separate, fused with q and v, grouped heads.
    read         what scores or state see: after norm, RoPE, convolution, activation, feature map, unit length

Hugging Face's attention layers hand their q and k to a function that `AttentionInterface` looks up; ours hand them to
their `QueryCleaner`, or turn them themselves (softmax attention).

T tokens, H query heads, Hk key heads, K head size. One sequence at a time.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ccq.analysis import AnalysisError
from ccq.mixers import Attention, Mamba2, QueryCleaner
from ccq.mixers.attention import rotate
from ccq.pretrained import most_tokens

SEPARATE = ("k_proj", "key_proj", "wk", "key")  # the last only beside a "query": RWKV's is something else
# projections of q, k and v together, by the type of the model: what they are called, and where the keys are
#   parts: [ q of all heads | k of all | v of all ]         heads: for each key head [ its q's | k | v ]
FUSED = {
    "gpt2": ("c_attn", "parts"), "phi3": ("qkv_proj", "parts"), "mpt": ("Wqkv", "parts"),
    **dict.fromkeys(("gpt_neox", "bloom", "falcon", "persimmon"), ("query_key_value", "heads")),
}  # fmt: skip
POINTS = {
    "projection": "at the key projection",
    "read": "where scores or state read them",
    "operator": "as read, against the operator's own Sigma at the question",
}


@dataclass(frozen=True)
class Projection:
    """The module of a layer that makes keys."""

    layer: int
    name: str
    module: nn.Module
    parent: nn.Module  # the attention or mixer that it belongs to
    size: int  # K
    layout: str  # "separate", "mamba2" or as in FUSED

    def keys(self, output: Float[Tensor, "T D"]) -> Float[Tensor, "T Hk K"]:
        """The keys in what the module puts out."""
        if isinstance(self.parent, Mamba2):
            begin = 2 * self.parent.inner
            return output[:, begin : begin + self.parent.key_width].unflatten(-1, (-1, self.size))
        heads = output.unflatten(-1, (-1, self.size))
        if self.layout == "separate":
            return heads
        queries = query_heads(self.parent)
        keys = (heads.shape[1] - queries) // 2
        if keys < 1 or queries % keys or 2 * keys + queries != heads.shape[1]:
            raise AnalysisError(f"{self.name}: expected q, k and v of {queries} heads, got {heads.shape[1]} heads")
        if self.layout == "parts":
            return heads[:, queries : queries + keys]
        return heads.unflatten(1, (keys, -1))[:, :, -2]


@dataclass(frozen=True)
class Read:
    """What one layer reads with and from."""

    layer: int
    q: Float[Tensor, "T H K"]  # before any cleaning
    k: Float[Tensor, "T Hk K"]
    lam: Float[Tensor, "T H"] | None = None
    cleaner: QueryCleaner | None = None
    log_decay: Float[Tensor, "1 T Hk"] | None = None  # of its covariance


def layer_of(name: str) -> int:
    """The index of the layer that a module of this name is in.

    >>> layer_of("model.layers.12.mixer.cleaner")
    12
    """
    numbers = re.findall(r"\.(\d+)(?=\.)", f".{name}")
    return int(numbers[-1]) if numbers else 0


def find_projections(model: nn.Module, needed: bool = True) -> list[Projection]:
    """The key projections of a model in the order of its layers; AnalysisError where there are none but `needed`."""
    found = []
    fused, where = FUSED.get(getattr(text_config(model), "model_type", ""), ("", ""))
    for name, module in model.named_modules():
        parent_name, _, last = name.rpartition(".")
        parent = model.get_submodule(parent_name)
        if isinstance(parent, Mamba2) and last == "in_proj":
            layout = "mamba2"
        elif last in SEPARATE and (last != "key" or hasattr(parent, "query")):
            layout = "separate"
        elif fused and last == fused:
            layout = where
        else:
            continue
        found.append(Projection(layer_of(name), name, module, parent, head_size(model, parent), layout))
    if needed and not found:
        names = sorted({re.sub(r"\.\d+(?=\.|$)", ".*", name) for name, _ in model.named_modules() if name})
        raise AnalysisError(
            f"{type(model).__name__} has no key projection that ccq knows (a module called {', '.join(SEPARATE)}; "
            f"or q, k and v together, of {', '.join(FUSED)}). Its modules: {', '.join(names)}"
        )
    return sorted(found, key=lambda projection: projection.layer)


def head_size(model: nn.Module, parent: nn.Module) -> int:
    if isinstance(parent, Mamba2):
        return parent.state_size
    config = text_config(model)
    own = number(parent, "head_dim", "head_size", "key_size", "size")  # a layer may differ from its model's config
    return own or number(config, "head_dim", "key_size") or config.hidden_size // config.num_attention_heads


def query_heads(parent: nn.Module) -> int:
    names = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads")
    if found := number(parent, *names) or number(getattr(parent, "config", None), *names):
        return found
    raise AnalysisError(f"{type(parent).__name__} does not say how many heads it has, so its keys cannot be found")


def number(holder: Any, *names: str) -> int | None:
    """The first of these attributes that is one."""
    return next((x for name in names if isinstance(x := getattr(holder, name, None), int)), None)


def text_config(model: Any) -> Any:
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


@contextlib.contextmanager
def watch(
    model: nn.Module,
    project: Callable[[Projection, Tensor], None] | None = None,
    read: Callable[[Read], None] | None = None,
) -> Iterator[list[Projection]]:
    """Call `project` with the keys [T, Hk, K] of each layer, and `read` with what it reads, while the model runs.

    The calls come layer by layer, as the model computes them; whoever is called reduces what it gets.
    """
    cleaners = [(name, module) for name, module in model.named_modules() if isinstance(module, QueryCleaner)]
    projections = find_projections(model, needed=project is not None or not cleaners)
    with contextlib.ExitStack() as stack:
        for projection in projections:
            if project is not None:
                hook = functools.partial(_projected, projection, project)
                stack.callback(projection.module.register_forward_hook(hook).remove)
            if read is not None and isinstance(projection.parent, Attention):
                turned = functools.partial(_turned, projection, read)
                stack.callback(projection.parent.register_forward_hook(turned).remove)
        if read is not None:
            for name, cleaner in cleaners:  # those of `ccq.attach` too, whatever the layer calls its projections
                seen = functools.partial(_cleaned, layer_of(name), read)
                stack.callback(cleaner.register_forward_hook(seen, with_kwargs=True).remove)
            stack.callback(_watch_attention({id(projection.parent): projection for projection in projections}, read))
        yield projections


def _projected(projection: Projection, project: Callable, module: nn.Module, args: tuple, output: Any) -> None:
    output = output[0] if isinstance(output, tuple) else output
    project(projection, projection.keys(_one(output)))


def _cleaned(layer: int, read: Callable, cleaner: Any, args: tuple, kwargs: dict, output: tuple) -> None:
    names = ("raw", "q", "k", "seqs", "state", "output_state", "g")  # of QueryCleaner.forward
    raw, q, k, *_, g = (kwargs.get(name, args[i] if i < len(args) else None) for i, name in enumerate(names))
    q, k = cleaner.prepare(q, k)
    lam = _one(cleaner.gate(raw)) if cleaner.clean else None
    read(Read(layer, _one(q), _one(k), lam, cleaner, cleaner.log_decay(k, g)))


def _turned(projection: Projection, read: Callable, mixer: Any, args: tuple, output: Any) -> None:
    q, k, _ = mixer.project(args[0])
    q, k = (rotate(x, None, x.shape[1], mixer.theta) for x in (q, k))
    read(Read(projection.layer, _one(q), _one(k)))


def _watch_attention(parents: dict[int, Projection], read: Callable) -> Callable[[], None]:
    """Watch the function that transformers' attention layers give q and k [1, H, T, K] to; what ends that."""
    try:
        interface: Any = importlib.import_module("transformers.modeling_utils").AttentionInterface
    except ModuleNotFoundError:  # then nothing here is made of its layers
        return lambda: None
    look_up = interface.get_interface

    def watched_look_up(self, *args, **kwargs):
        function = look_up(self, *args, **kwargs)

        def watched(module, query, key, *rest, **options):
            projection = parents.get(id(module))
            if projection is not None:
                read(Read(projection.layer, _one(query).transpose(0, 1), _one(key).transpose(0, 1)))
            return function(module, query, key, *rest, **options)

        return watched

    interface.get_interface = watched_look_up
    return functools.partial(setattr, interface, "get_interface", look_up)


def _one(x: Tensor) -> Tensor:
    """The only sequence of a batch."""
    if x.shape[0] != 1:
        raise AnalysisError(f"expected one sequence at a time, got a batch of {x.shape[0]}")
    return x[0].detach()


@torch.no_grad()
def run(model: Any, ids: Any) -> None:
    """One prompt through the body of a model: no logits of the vocabulary, no cache."""
    limit = most_tokens(model)
    if limit is not None and len(ids) > limit:  # on a GPU it would fail for good
        raise AnalysisError(f"a prompt has {len(ids)} tokens, the model takes {limit}: give fewer --sentences")
    tokens = torch.as_tensor(ids, device=next(model.parameters()).device)[None]
    getattr(model, "base_model", model)(tokens, use_cache=False)
