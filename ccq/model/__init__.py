"""Models in Hugging Face's conventions. Importing this makes AutoConfig and AutoModelForCausalLM know them."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ccq.model.cache import CCQCache
from ccq.model.config import CCQConfig, presets
from ccq.model.decoder import CCQForCausalLM, CCQModel

AutoConfig.register(CCQConfig.model_type, CCQConfig, exist_ok=True)
AutoModel.register(CCQConfig, CCQModel, exist_ok=True)
AutoModelForCausalLM.register(CCQConfig, CCQForCausalLM, exist_ok=True)
# `register` leaves this out; Trainer shifts the labels that it smooths only for class names that stand here
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[CCQConfig.model_type] = CCQForCausalLM.__name__

__all__ = ["CCQCache", "CCQConfig", "CCQForCausalLM", "CCQModel", "presets"]
