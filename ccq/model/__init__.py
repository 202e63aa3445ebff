"""Models in Hugging Face's conventions. Importing this makes AutoConfig and AutoModelForCausalLM know them."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from ccq.model.cache import CCQCache
from ccq.model.config import CCQConfig, presets
from ccq.model.decoder import CCQForCausalLM, CCQModel

AutoConfig.register(CCQConfig.model_type, CCQConfig, exist_ok=True)
AutoModel.register(CCQConfig, CCQModel, exist_ok=True)
AutoModelForCausalLM.register(CCQConfig, CCQForCausalLM, exist_ok=True)

__all__ = ["CCQCache", "CCQConfig", "CCQForCausalLM", "CCQModel", "presets"]
