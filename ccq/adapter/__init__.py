"""Cleaning in a Hugging Face model that was trained without it, in place: the model as it is where lam = 0, and gates
to be learned from there.

    ccq.attach(model)                       gates in every linear-attention layer, lam = 0.01 at first
    ccq.save_adapter(model, folder)         gates and options, without the model
    ccq.load_adapter(model, folder)         both into a model that was loaded again; `ccq.load(folder)` loads it too
    ccq.detach(model)                       the model as it was
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ccq.adapter.layers import PACKED, AttachError, Cleaned, Family, cleaned, family_of
from ccq.files import check_free, read_json, whole_folder, write_json

__all__ = ["AttachError", "attach", "detach", "load_adapter", "save_adapter"]

CONFIG, WEIGHTS = "ccq_adapter.json", "ccq_adapter.safetensors"
FLAG = "ccq_adapter"  # in the model's config: what is attached; a folder of save_pretrained has it, and the gates


def attach(
    model: nn.Module,
    layers: Iterable[int] | None = None,
    gate_init: float = 0.01,
    normalize: str | None = None,
    step: str = "scaled",
    steps: int = 1,
    covariance_decay: str = "none",
) -> nn.Module:
    """Put a gate and the covariance of the keys into the linear-attention layers of a model, in place.

        q_clean = q - lam * Sigma_t q,    lam = sigmoid(W q + b), W = 0 and sigmoid(b) = gate_init at first

    Args:
        model: of transformers or flash-linear-attention; docs/attach.md has the kinds.
        layers: indices of layers; None: all that have a memory to read.
        gate_init: lam at first.
        normalize: "unit": unit q and k; "stats": unit keys in Sigma_t only. None: what leaves the model as it is with
            lam = 0, which is "unit" where its layers do that by themselves, and "stats" elsewhere.
        step: as in `clean_query`.
        steps: as in `clean_query`.
        covariance_decay: as in `CCQConfig`.

    Returns:
        The model. Gates are parameters `...cleaner.gate_weight` and `...cleaner.gate_bias`, in fp32.
    """
    from ccq.mixers import QueryCleaner
    from ccq.model.config import CCQConfig

    if attached(model):
        raise AttachError(f"{type(model).__name__} already has cleaning: ccq.detach(model) removes it")
    options: dict[str, Any] = {"gate_init": gate_init, "normalize": normalize}
    options |= {"step": step, "steps": steps, "covariance_decay": covariance_decay}
    known = find(model)
    chosen = sorted({int(layer) for layer in (known if layers is None else layers)})
    if missing := [layer for layer in chosen if layer not in known]:
        raise AttachError(f"layers: expected layers of {sorted(known)}, which can be cleaned, got {missing}")
    if not chosen:
        raise AttachError("layers: expected at least one, got none")
    made = []
    for index in chosen:
        layer, family = known[index]
        device = next(layer.parameters()).device
        if device.type == "meta":
            raise AttachError("expected weights on a device, got a model whose weights are offloaded or not loaded yet")
        if "forward" in vars(layer) and not hasattr(layer, "_hf_hook"):
            raise AttachError(f"{type(layer).__name__}: its forward was replaced by {layer.forward!r}: attach before")
        how = options | {"normalize": normalize or ("unit" if family.unit else "stats")}
        cleaner = QueryCleaner(CCQConfig(clean=True, **how), getattr(layer, family.heads), getattr(layer, family.size))
        if family.unit:
            cleaner.normalize = "none"  # q and k are unit when they come
        made.append((layer, cleaner.to(device).train(layer.training)))
    for layer, cleaner in made:  # all or none
        cls: Any = type(layer)
        become(layer, cleaned(cls))
        layer.cleaner = cleaner
    for module in around(model):
        module._ccq_told, module._ccq_inner = False, around(module)[1:]
        module._ccq_hook = module.register_forward_pre_hook(pass_packing_on, with_kwargs=True)
    flag(model, {"layers": chosen, **options})
    return model


def find(model: nn.Module) -> dict[int, tuple[Any, Family]]:
    """The layers of a model that can be cleaned, by index."""
    found: dict[int, tuple[Any, Family]] = {}
    for name, module in model.named_modules():
        family = family_of(type(module))
        if family is not None and hasattr(module, family.heads) and hasattr(module, family.size):
            if module.layer_idx in found:
                raise AttachError(f"{name}: expected layers with an index of their own, got {module.layer_idx} twice")
            found[module.layer_idx] = (module, family)
    if not found:
        import transformers

        kinds = sorted({type(module).__name__ for module in model.modules()})
        raise AttachError(
            f"{type(model).__name__} has no layer that ccq knows: expected one whose forward calls a gated delta "
            f"rule or a state space by transformers' or fla's names, as in transformers 5.22 (this is "
            f"{transformers.__version__}). Its modules: {', '.join(kinds)}"
        )
    return found


def become(layer: Any, cls: type[nn.Module]) -> None:
    """Change the class of a layer, so that copies of it and wrappers around it clean too, or no more."""
    hook = getattr(layer, "_hf_hook", None)  # of accelerate, which has bound the forward of the class as it was
    if hook is not None:
        from accelerate.hooks import add_hook_to_module, remove_hook_from_module

        remove_hook_from_module(layer)
        del layer.forward  # that of the class, bound
    layer.__class__ = cls
    if hook is not None:
        add_hook_to_module(layer, hook)


def attached(model: nn.Module) -> dict[int, Any]:
    """The layers that clean, by index."""
    return {module.layer_idx: module for module in model.modules() if isinstance(module, Cleaned)}


def around(model: nn.Module) -> list[Any]:
    """The models of transformers around layers that clean, the innermost last: they are asked for packed sequences."""
    from transformers import PreTrainedModel

    return [module for module in model.modules() if isinstance(module, PreTrainedModel) and attached(module)]


def pass_packing_on(module: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict] | None:
    """Before each model around: positions that start again mark packed sequences, which layers without positions get to
    know of as `seq_idx`. What one model is told and the next one inside it is not would be dropped in silence."""
    told = any(kwargs.get(name) is not None for name in PACKED)
    alone = not told and kwargs.get("attention_mask") is None
    if alone and (seq_idx := restarts(kwargs.get("position_ids"))) is not None:
        told, kwargs = True, {**kwargs, "seq_idx": seq_idx}
    if module._ccq_told and not told:
        raise AttachError(f"packed sequences: {type(module).__name__} does not receive them from its model")
    for inner in module._ccq_inner:
        inner._ccq_told = told
    return args, kwargs


def restarts(positions: Tensor | None) -> Tensor | None:
    """The number of the sequence that each token is of, [1, T], where positions start again; None: nowhere."""
    if positions is None or positions.shape[-1] < 2:
        return None
    # of several axes the first is that of time, which stands still within a picture
    rows, least = (positions, 1) if positions.ndim == 2 else (positions[0], 0)
    starts = rows.diff(dim=1) < least
    if not starts.any():
        return None
    if len(starts) != 1:
        raise AttachError(f"position_ids: expected a batch of 1, because positions restart; got {len(starts)}")
    return nn.functional.pad(starts.cumsum(1, dtype=torch.int32), (1, 0))


def flag(model: Any, options: dict[str, Any] | None) -> None:
    """Say in the config of this model what is attached. Another model may share the config: it gets one of its own."""
    if not hasattr(model, "config"):
        return
    copies: dict[int, Any] = {}
    copy.deepcopy(model.config, copies)
    for module in model.modules():
        config = vars(module).get("config")
        if id(config) in copies:
            module.config = copies[id(config)]
    if options is not None:
        setattr(model.config, FLAG, options)
    elif hasattr(model.config, FLAG):
        delattr(model.config, FLAG)


def detach(model: nn.Module) -> nn.Module:
    """Take the cleaning out of a model: it is as before `attach`, and its gates are gone."""
    found = attached(model)
    if not found:
        raise AttachError(f"{type(model).__name__} has no cleaning attached")
    for module in around(model):
        module._ccq_hook.remove()
        del module._ccq_hook, module._ccq_told, module._ccq_inner
    for layer in found.values():
        del layer.cleaner
        become(layer, layer.original)
    flag(model, None)
    return model


def gates_of(model: nn.Module) -> dict[str, Tensor]:
    found = {i: layer.cleaner for i, layer in attached(model).items()}  # or PEFT's wrapper, which has its attributes
    return {f"layers.{i}.{name}": getattr(x, name).detach() for i, x in found.items() for name in x.starts}


def save_adapter(model: Any, folder: str | Path) -> None:
    """Write the gates and what was asked of `attach` to a folder; the model itself stays where it came from."""
    from safetensors.torch import save_file

    import ccq

    if not attached(model):
        raise AttachError(f"{type(model).__name__} has no cleaning attached: there is nothing to save")
    base = getattr(model.config, "_name_or_path", None) or None
    told = {
        "base_model": str(Path(base).resolve()) if base and Path(base).is_dir() else base,
        "model_type": model.config.get_text_config().model_type,
        "ccq_version": ccq.__version__,
        **getattr(model.config, FLAG),
    }
    older = Path(folder, CONFIG).exists() and read_adapter(Path(folder))
    ours = older and (older["base_model"], older["model_type"]) == (told["base_model"], told["model_type"])
    check_free(Path(folder), None, ours=bool(ours), older="one with an older adapter of this model")
    with whole_folder(Path(folder), CONFIG) as writing:
        save_file({name: x.contiguous() for name, x in gates_of(model).items()}, writing / WEIGHTS)
        write_json(writing / CONFIG, told)


def load_adapter(model: Any, folder: str | Path) -> nn.Module:
    """Attach to a model what `save_adapter` wrote, or the gates in a folder of its `save_pretrained`."""
    folder = Path(folder)
    told = read_adapter(folder)
    kinds = [config.model_type for config in (model.config, model.config.get_text_config())]
    if told["model_type"] not in kinds:
        raise AttachError(f"{folder}: expected a model of {told['model_type']}, got {kinds[0]}")
    tensors = read_gates(folder)
    attach(model, **{name: told[name] for name in inspect.signature(attach).parameters if name in told})
    expected = gates_of(model)
    wrong = [name for name in expected if name not in tensors or tensors[name].shape != expected[name].shape]
    if wrong or len(tensors) != len(expected):
        detach(model)
        raise AttachError(f"{folder}: expected the gates of layers {told['layers']}, of this size; not so: {wrong}")
    with torch.no_grad():
        for name, x in expected.items():
            x.copy_(tensors[name])
    return model


def read_adapter(folder: Path) -> dict[str, Any]:
    """What is attached to the model of a folder; AttachError where nothing is."""
    if (folder / CONFIG).exists():
        return read_json(folder / CONFIG, AttachError, "an adapter")
    config = read_json(folder / "config.json", AttachError, f"an adapter ({CONFIG}), or a model with gates")
    if FLAG not in config:
        raise AttachError(f"{folder}: expected an adapter ({CONFIG}), or a model that was saved with gates")
    return {"model_type": config.get("text_config", config)["model_type"], **config[FLAG]}


def read_gates(folder: Path) -> dict[str, Tensor]:
    """The tensors of an adapter; in a whole model, those of its gates, under the same names."""
    from safetensors import safe_open

    tensors = {}
    for path in [folder / WEIGHTS] if (folder / WEIGHTS).exists() else sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 -- not a dict
                if path.name == WEIGHTS:
                    tensors[name] = file.get_tensor(name)
                elif found := re.search(r"\.(\d+)\.(?:[^\d]*\.)?cleaner\.(\w+)$", name):
                    tensors[f"layers.{found[1]}.{found[2]}"] = file.get_tensor(name)
    return tensors
