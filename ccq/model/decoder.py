"""One decoder for all systems: tokens -> embed -> [norm mixer (norm MLP)] x L -> norm -> logits -> loss.

B batch, N sequences (B of them, or packed ones), T tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils.generic import ModelOutput, can_return_tuple

from ccq.mixers import LayerState, Sequences, make_mixer
from ccq.mixers.linear import bare, few_rows, project, watched
from ccq.mixers.norms import RMSNorm, one_pass
from ccq.model import sampling
from ccq.model.cache import CCQCache
from ccq.model.config import CCQConfig
from ccq.model.graphs import Decoding
from ccq.model.loss import IGNORE, linear_cross_entropy
from ccq.model.packing import arrange, borders_of, decodes
from ccq.ops.choose import choose
from ccq.ops.precision import stats_dtype


@dataclass
class CausalLMOutput(ModelOutput):
    """What CCQForCausalLM returns; what was not asked for is None."""

    loss: Tensor | None = None  # mean over the tokens that were scored, or their sum over num_items_in_batch
    logits: Tensor | None = None  # [B, T, V], or of the positions that logits_to_keep asked for
    past_key_values: CCQCache | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    scored: Tensor | None = None  # how many tokens the loss is of


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Float[Tensor, "*B D"]) -> Float[Tensor, "*B D"]:
        how = choose("swiglu", few_rows(x, (self.gate_proj, self.up_proj)))
        if how == "triton":
            from ccq.mixers import kernels  # imports Triton

            return self.down_proj(kernels.swiglu(x, self.gate_proj.weight, self.up_proj.weight))
        gate, up = project(x, (self.gate_proj, self.up_proj))
        if how == "passes":
            from ccq.mixers.passes import swiglu  # imports Triton

            if bare(self.down_proj):
                return swiglu(gate, up, self.down_proj.weight)
            return self.down_proj(swiglu(gate, up))
        return self.down_proj(F.silu(gate) * up)


def add_norm(x: Float[Tensor, "*B D"], y: Float[Tensor, "*B D"] | None, norm: RMSNorm) -> tuple[Tensor, Tensor]:
    """x + y, and its norm: one pass over memory each way on a GPU, unless somebody waits for a call of the norm."""
    if one_pass("add_norm", x) and type(norm) is RMSNorm and not watched(norm):
        from ccq.mixers import passes  # imports Triton

        return passes.add_norm(x, y, norm.weight, norm.eps)
    x = x if y is None else x + y
    return x, norm(x)


class Block(GradientCheckpointingLayer):
    """x + mixer(norm(x)), then x + mlp(norm(x)) where the config has an MLP."""

    def __init__(self, config: CCQConfig, layer: int) -> None:
        super().__init__()
        self.mixer_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mixer = make_mixer(config, layer)
        if config.intermediate_size is not None:
            self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps)
            self.mlp = SwiGLU(config.hidden_size, config.intermediate_size)

    def forward(
        self, x: Float[Tensor, "B T D"], seqs: Sequences, state: LayerState | None = None, output_state: bool = False
    ) -> tuple[Float[Tensor, "B T D"], LayerState | None]:
        x, h = add_norm(x, None, self.mixer_norm)  # its backward adds the two gradients of x
        x, y, state = self.open(x, h, seqs, state, output_state)
        return x + y, state

    def open(
        self, x: Tensor, h: Tensor, seqs: Sequences, state: LayerState | None, output_state: bool
    ) -> tuple[Float[Tensor, "B T D"], Float[Tensor, "B T D"], LayerState | None]:
        """`forward` behind its first norm; x and y, not added yet, so that the next norm can add them."""
        y, state = self.mixer(h, seqs, state, output_state)
        return *self.rest(x, y), state

    def step(
        self, x: Float[Tensor, "B D"], y: Float[Tensor, "B D"] | None, state: LayerState, positions: Int[Tensor, " B"]
    ) -> tuple[Float[Tensor, "B D"], Float[Tensor, "B D"]]:
        """As `forward` for one token of x + y; x and y of the next block, so that its norm can add them."""
        x, h = add_norm(x, y, self.mixer_norm)
        return self.rest(x, self.mixer.step(h, state, positions))

    def rest(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """What follows the y of the mixer; x and y, not added yet."""
        if not hasattr(self, "mlp"):
            return x, y
        x, y = add_norm(x, y, self.mlp_norm)
        return x, self.mlp(y)


class CCQPreTrainedModel(PreTrainedModel):
    """What transformers needs to know."""

    config: CCQConfig
    config_class = CCQConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["Block"]
    _supports_sdpa = True
    _is_stateful = True  # the cache cannot be cropped: transformers then refuses assisted decoding
    # what the mixers keep in fp32 by themselves, once they have it
    _keep_in_fp32_modules_strict = [
        "gate_weight", "gate_bias", "lam_scale", "lambda_params", "current_key", "decay_logit", "A_log", "dt_bias",
        "mixer.D",
    ]  # fmt: skip

    def __init__(self, config: CCQConfig) -> None:
        config.check()  # values may have been assigned since it was made
        super().__init__(config)

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoModel") -> None:
        """Nothing: the config says where our classes are, and `save_pretrained` must not copy the files of ccq."""

    def _init_weights(self, module: nn.Module) -> None:
        # transformers does not come here with a module whose weights were loaded, and guards nn.init for the rest
        reset: Any = getattr(module, "reset_parameters", None)
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=self.config.initializer_range)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        elif reset is not None:
            reset()

    @classmethod
    def from_pretrained(cls, name: Any, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """As transformers has it, but half a model raises: a tensor that is missing, left over or of another shape."""
        asked = {key: kwargs.get(key, False) for key in ("output_loading_info", "ignore_mismatched_sizes")}
        try:
            loaded: Any = super().from_pretrained(name, *args, **kwargs | dict.fromkeys(asked, True))
        except Exception as error:
            if type(error).__name__ == "SafetensorError":  # safetensors raises it for a file that is cut off
                raise OSError(f"{name}: a file of tensors is damaged or cut off ({error})") from error
            raise
        model, info = loaded
        wrong = [f"missing {key}" for key in sorted(info["missing_keys"])]
        wrong += [f"unexpected {key}" for key in sorted(info["unexpected_keys"])]
        if not asked["ignore_mismatched_sizes"]:
            for key, got, expected in sorted(info["mismatched_keys"]):
                wrong.append(f"{key} expected {tuple(expected)}, got {tuple(got)}")
        if wrong:
            raise ValueError(f"{name}: the tensors are not those of its config: {'; '.join(wrong)}")
        return loaded if asked["output_loading_info"] else model


class CCQModel(CCQPreTrainedModel):
    """The decoder without its head."""

    _keys_to_ignore_on_load_unexpected = [r"^lm_head\."]  # of a CCQForCausalLM that is loaded without its head

    def __init__(self, config: CCQConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Int[Tensor, "B T"] | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: CCQCache | None = None,
        inputs_embeds: Float[Tensor, "B T D"] | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        cu_seqlens: Int[Tensor, " N1"] | None = None,
        output_attentions: bool | None = None,
        position_ids: Int[Tensor, "B T"] | None = None,
        **packed: Any,
    ) -> Any:
        """Hidden states [B, T, D] after the last norm; zero at padding.

        Args:
            attention_mask: [B, T], or [B, L] with the columns of the cache before: 0 at padding, on either side.
            past_key_values: what the tokens follow; it then holds them too.
            use_cache: whether to return a cache; by default as the config says, and not in training.
            cu_seqlens: borders of sequences packed into one row, each of which starts anew.
            output_attentions: refused: no mixer has them.
            position_ids, packed: packed sequences as other libraries tell them, in place of cu_seqlens: see borders_of.
        """
        tokens = input_ids if input_ids is not None else inputs_embeds
        cu_seqlens = borders_of(tokens, past_key_values, attention_mask, cu_seqlens, position_ids, **packed)
        if self.config.output_attentions if output_attentions is None else output_attentions:
            raise ValueError("output_attentions: expected False: linear attention has none, and softmax keeps none")
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        x = self.embed(input_ids, inputs_embeds)
        if use_cache is None and attention_mask is not None and torch.compiler.is_compiling():
            use_cache = past_key_values is not None  # what states hold depends on how much is padding
        cache = self.cache_for(past_key_values, use_cache)
        one = cache is not None and decodes(x, attention_mask, cu_seqlens, cache) and not output_hidden_states
        if one and not self.step_is_watched():
            assert cache is not None
            cache.make_room([layer.mixer for layer in self.blocks()])
            hidden = self.step(x[:, 0], cache.states, cache.rows)[:, None]
            cache.seen += 1
            return BaseModelOutputWithPast(hidden, cache)  # type: ignore[arg-type]

        layout = arrange(x, attention_mask, cu_seqlens, cache)
        x = layout.pack(x)
        states: list = cache.states if cache is not None and cache.states else [None] * len(self.layers)
        new_states: list = []
        hidden_states = []
        y, left_open = None, not (output_hidden_states or self.blocks_are_watched())
        for layer, state in zip(self.blocks(), states, strict=True):
            if output_hidden_states:
                hidden_states.append(layout.unpack(x))
            if x.shape[1] and left_open:
                x, h = add_norm(x, y, layer.mixer_norm)
                y = None  # x and y of before are in nobody's hands while the block works
                x, y, state = layer.open(x, h, layout.seqs, state, cache is not None)
            elif x.shape[1]:
                x, state = layer(x, layout.seqs, state, cache is not None)
            elif cache is not None and state is None:  # nothing but padding
                state = layer.mixer.new_state(layout.seqs.count, x.device, x.dtype)
            new_states.append(state)
        hidden = layout.unpack(add_norm(x, y, self.norm)[1] if x.shape[1] else x)
        hidden_states.append(hidden)
        if cache is not None:
            cache.follow(new_states, layout.lengths, layout.columns)
        seen: Any = tuple(hidden_states) if output_hidden_states else None
        return BaseModelOutputWithPast(hidden, cache, seen)  # type: ignore[arg-type]

    def blocks(self) -> list[Block]:
        return list(self.layers)  # type: ignore[arg-type]

    def blocks_are_watched(self) -> bool:
        """Whether somebody waits for a call of a block: hooks, FSDP, checkpointing, a compiler, one in its place."""

        def is_watched(block: nn.Module) -> bool:
            if type(block).forward is not Block.forward or block._compiled_call_impl is not None:
                return True
            return watched(block) or bool(block.gradient_checkpointing)

        return torch.compiler.is_compiling() or any(map(is_watched, self.layers))

    def step_is_watched(self) -> bool:
        """Whether somebody waits for a call of a module for which `step` stands in: hooks, FSDP, offloading."""
        stands_in = (m for block in self.blocks() for m in (block, *block.mixer.modules()) if hasattr(m, "step"))
        return any(map(watched, stands_in))

    def step(
        self, x: Float[Tensor, "B D"], states: list[LayerState], lengths: Int[Tensor, " B"]
    ) -> Float[Tensor, "B D"]:
        """One more token of each sequence, without autograd; states and lengths are changed in place."""
        y = None
        for layer, state in zip(self.blocks(), states, strict=True):
            x, y = layer.step(x, y, state, lengths)
        lengths.add_(1)
        return add_norm(x, y, self.norm)[1]

    def embed(self, ids: Tensor | None, embeds: Tensor | None) -> Float[Tensor, "B T D"]:
        """The tokens' embeddings, unless those are given."""
        if (ids is None) == (embeds is None):
            raise ValueError(f"input_ids, inputs_embeds: expected one of them, got {'none' if ids is None else 'both'}")
        name, given, axes = ("input_ids", ids, "[B, T]") if ids is not None else ("inputs_embeds", embeds, "[B, T, D]")
        assert given is not None
        if given.ndim != axes.count(",") + 1:
            raise ValueError(f"{name}: expected shape {axes}, got {tuple(given.shape)}")
        if 0 in given.shape:
            raise ValueError(f"{name}: expected at least 1 token, got shape {tuple(given.shape)}: the prompt is empty")
        if ids is None:
            return given
        if ids.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"input_ids: expected integers of 32 or 64 bits, got {ids.dtype}")
        if ids.device.type == "cpu" and not torch.compiler.is_compiling():  # on a GPU, looking would wait for it
            wrong = ((ids < 0) | (ids >= self.config.vocab_size)).nonzero()
            if len(wrong):
                row, column = wrong[0].tolist()
                got = f"got {ids[row, column].item()} at [{row}, {column}]"
                raise ValueError(f"input_ids: expected tokens from 0 to {self.config.vocab_size - 1}; {got}")
        return self.embed_tokens(ids)

    def cache_for(self, cache: CCQCache | None, use_cache: bool | None) -> CCQCache | None:
        if cache is None:
            wanted = self.config.use_cache and not self.training if use_cache is None else use_cache
            return CCQCache() if wanted else None
        if not isinstance(cache, CCQCache):
            raise TypeError(f"past_key_values: expected a CCQCache, got {type(cache).__name__}")
        cache.check_kinds([layer.mixer.state_kinds for layer in self.blocks()])
        return cache


class CCQForCausalLM(CCQPreTrainedModel, GenerationMixin):
    """The decoder with its head: logits, loss, generate.

    >>> model = CCQForCausalLM(CCQConfig.preset("ccq-gla-tiny"))
    >>> model(torch.tensor([[1, 2, 3]])).logits.shape
    torch.Size([1, 3, 256])
    """

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # where the config ties them
    accepts_loss_kwargs = True  # transformers' Trainer then gives num_items_in_batch

    def __init__(self, config: CCQConfig) -> None:
        super().__init__(config)
        self.model = CCQModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.decoding = Decoding()
        self.post_init()
        self._keys_to_ignore_on_load_unexpected = set()  # transformers takes the model's, but this one has a head

    @can_return_tuple
    def forward(
        self,
        input_ids: Int[Tensor, "B T"] | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: CCQCache | None = None,
        inputs_embeds: Float[Tensor, "B T D"] | None = None,
        labels: Int[Tensor, "B T"] | None = None,
        targets: Int[Tensor, "B T"] | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        cu_seqlens: Int[Tensor, " N1"] | None = None,
        logits_to_keep: int | Int[Tensor, " P"] | None = None,
        graph_length: int | None = None,
        output_attentions: bool | None = None,
        num_items_in_batch: int | Tensor | None = None,
        position_ids: Int[Tensor, "B T"] | None = None,
        **packed: Any,
    ) -> Any:
        """Logits, or with labels or targets the loss.

        Args:
            labels: the tokens themselves: each predicts the next one of its sequence; -100 is not scored. They give
                logits too, except in training; `config.logits_with_loss` says otherwise.
            targets: instead of labels, for each token the one that it should predict; without logits.
            logits_to_keep: of the last so many positions, of these positions, or of all: 0.
            num_items_in_batch: divide the sum of the loss by it, not by the tokens that this call scores: then the
                losses of the parts of a batch add up to that of the whole.
            graph_length: decode single tokens through a CUDA graph, with room for sequences of that length.

        The others: see CCQModel.
        """
        tokens = input_ids if input_ids is not None else inputs_embeds
        cu_seqlens = borders_of(tokens, past_key_values, attention_mask, cu_seqlens, position_ids, **packed)
        scoring = labels is not None or targets is not None
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        if use_cache is None and scoring:
            use_cache = False
        logits = None
        if graph_length and not scoring and not output_hidden_states and cu_seqlens is None:
            logits = self.decoding.step(self, input_ids, attention_mask, past_key_values, graph_length)
        if logits is not None:
            return CausalLMOutput(logits=logits.clone(), past_key_values=past_key_values)

        out = self.model(input_ids, attention_mask, past_key_values, inputs_embeds, use_cache, output_hidden_states,
                         cu_seqlens, output_attentions, return_dict=True)  # fmt: skip
        hidden = out.last_hidden_state
        loss = scored = None
        if scoring:
            targets = self.targets(labels, targets, attention_mask, cu_seqlens, hidden.shape[:2])
            total, scored = self.cross_entropy(hidden.flatten(0, 1), targets.flatten())
            items = scored.clamp(min=1) if num_items_in_batch is None else num_items_in_batch
            loss = total / (items.to(total.device) if isinstance(items, Tensor) else items)
        if logits_to_keep is None:
            beside = not self.training if self.config.logits_with_loss is None else self.config.logits_with_loss
            logits_to_keep = 0 if not scoring or (labels is not None and beside) else None
        if logits_to_keep is not None:
            kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            logits = self.lm_head(hidden[:, kept])
        return CausalLMOutput(loss, logits, out.past_key_values, out.hidden_states, scored)

    def cross_entropy(
        self, hidden: Float[Tensor, "M D"], targets: Int[Tensor, " M"]
    ) -> tuple[Float[Tensor, ""], Int[Tensor, ""]]:
        """The sum over scored tokens, and their number; through the head itself where it is more than its weight."""
        if bare(self.lm_head) and self.lm_head.bias is None:
            return linear_cross_entropy(hidden, self.lm_head.weight, targets)
        logits = self.lm_head(hidden)
        high = logits.to(stats_dtype(logits.dtype))
        return F.cross_entropy(high, targets, ignore_index=IGNORE, reduction="sum"), (targets != IGNORE).sum()

    def targets(
        self,
        labels: Tensor | None,
        targets: Tensor | None,
        mask: Tensor | None,
        cu_seqlens: Tensor | None,
        shape: tuple,
    ) -> Int[Tensor, "B T"]:
        """The token that each position should predict; -100 at padding, before it, and at the end of a sequence."""
        if labels is not None and targets is not None:
            raise ValueError("labels, targets: expected one of them, got both")
        name, given = ("labels", labels) if labels is not None else ("targets", targets)
        assert given is not None
        if given.shape != shape:
            raise ValueError(f"{name}: expected shape {tuple(shape)}, that of the tokens, got {tuple(given.shape)}")
        given = given.long() if given.dtype == torch.int32 else given  # as the tokens may be
        padding = None if mask is None else mask[:, -shape[1] :] == 0
        given = given if padding is None else given.masked_fill(padding, IGNORE)
        if labels is None:
            return given
        targets = F.pad(given[:, 1:], (0, 1), value=IGNORE)
        targets = targets if padding is None else targets.masked_fill(padding, IGNORE)
        if cu_seqlens is not None:  # the last token of a sequence does not predict the first of the next
            last = cu_seqlens[1:].to(targets.device) - 1
            targets[:, last[last >= 0]] = IGNORE
        return targets

    def decode(
        self, tokens: Int[Tensor, " B"], states: list[LayerState], lengths: Int[Tensor, " B"]
    ) -> Float[Tensor, "B V"]:
        """The whole of a decode step, from tokens to logits, on fixed memory: what a CUDA graph captures."""
        return self.lm_head(self.model.step(self.model.embed_tokens(tokens), states, lengths))

    # What `generate` of transformers calls.

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # the first forward makes a CCQCache

    def prepare_inputs_for_generation(  # type: ignore[override]
        self,
        input_ids: Any,
        attention_mask: Any = None,
        inputs_embeds: Any = None,
        is_first_iteration: bool | None = False,
        **kwargs: Any,
    ) -> dict:
        if attention_mask is not None and is_first_iteration and not bool(attention_mask[:, -1].all()):
            raise ValueError(
                "attention_mask: expected every prompt to end in the last column: pad on the left, and leave none empty"
            )
        kwargs.pop("tokenizer", None)  # for stop_strings and token healing; transformers leaves it among the model's
        kwargs |= {"attention_mask": attention_mask, "inputs_embeds": inputs_embeds}
        kwargs["is_first_iteration"] = is_first_iteration
        return super().prepare_inputs_for_generation(input_ids, **kwargs)  # type: ignore[misc]

    def _prepare_position_ids_for_generation(self, inputs_tensor: Any, model_kwargs: dict) -> None:
        """None: the model counts them."""

    def _prefill(
        self, input_ids: Any, generation_config: Any, model_kwargs: dict, is_first_iteration: bool = True
    ) -> Any:
        if generation_config.prefill_chunk_size is not None and model_kwargs.get("past_key_values") is None:
            model_kwargs["past_key_values"] = CCQCache()  # transformers wants it before the first chunk
        return super()._prefill(input_ids, generation_config, model_kwargs, is_first_iteration)  # type: ignore[misc]

    def _sample(  # type: ignore[override]
        self, input_ids: Any, logits_processor: Any, stopping_criteria: Any, generation_config: Any, **arguments: Any
    ) -> Any:
        """Greedy decoding and sampling, through a CUDA graph and our own loop where there is CUDA."""
        arguments.pop("tokenizer", None)
        if arguments.get("position_ids") is None:
            arguments.pop("position_ids", None)
        if arguments.get("graph_length") is None:
            arguments["graph_length"] = generation_config.max_length
        given = (input_ids, logits_processor, stopping_criteria, generation_config)
        try:
            if sampling.applies(self, generation_config, arguments):
                return sampling.sample(self, *given, **arguments)
            return super()._sample(*given, **arguments)  # type: ignore[misc]
        finally:
            self.decoding.release()
