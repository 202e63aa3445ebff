"""Models in Hugging Face's conventions; `import ccq` makes AutoConfig and AutoModelForCausalLM know them."""

from typing import TYPE_CHECKING

from ccq.late import lazily

__all__ = ["CCQCache", "CCQConfig", "CCQForCausalLM", "CCQModel", "presets"]

if TYPE_CHECKING:
    from ccq.model.cache import CCQCache
    from ccq.model.config import CCQConfig, presets
    from ccq.model.decoder import CCQForCausalLM, CCQModel
else:
    _PLACES = {"CCQCache": "cache", "CCQConfig": "config", "presets": "config"}
    __getattr__ = lazily(__name__, {name: f"ccq.model.{_PLACES.get(name, 'decoder')}" for name in __all__})
