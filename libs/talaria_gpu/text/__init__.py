"""Text to tokens and back: tokenizers, chat templates, incremental detokenising, stop strings. No torch.

Everything here is plain CPU work without I/O beyond reading a model directory; the instance's I/O process uses it.
"""

from talaria_gpu.text.byte_tokenizer import ByteTokenizer
from talaria_gpu.text.detokenize import ByteDetokenizer, Detokenizer, WindowDetokenizer
from talaria_gpu.text.hf_tokenizer import HfTokenizer
from talaria_gpu.text.messages import ChatMessage, normalise
from talaria_gpu.text.stop import StopStrings
from talaria_gpu.text.tokenizer import Tokenizer, load_tokenizer

__all__ = [
    "ByteDetokenizer",
    "ByteTokenizer",
    "ChatMessage",
    "Detokenizer",
    "HfTokenizer",
    "StopStrings",
    "Tokenizer",
    "WindowDetokenizer",
    "load_tokenizer",
    "normalise",
]
