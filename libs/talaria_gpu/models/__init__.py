"""Model directories: given ones are checked, recipes make theirs once in a cache.

`prepare` is the only way in. It imports torch only when a recipe has something to make. `reference` holds the token
equality check against Hugging Face transformers that tests and canaries use.
"""

from talaria_gpu.models.prepare import ModelPreparationError, default_cache_dir, prepare

__all__ = ["ModelPreparationError", "default_cache_dir", "prepare"]
