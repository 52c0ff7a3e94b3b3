"""Loading models: names to files, files to specs, weights and tokenizers. Start at `load_model` in loaded.py."""

from outrider.models.load.detokenizer import Detokenizer
from outrider.models.load.loaded import LoadedModel, load_model
from outrider.models.load.tokenizer import Tokenizer

__all__ = ["Detokenizer", "LoadedModel", "Tokenizer", "load_model"]
