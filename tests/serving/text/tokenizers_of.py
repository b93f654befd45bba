"""Small tokenizers of each kind there is, made on the spot: byte-level, byte fallback, pieces of words."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

TEXT = """In the beginning God created the heaven and the earth. Hello world, naïve café, 中文字符, ☃ 🎉🏽.
    def f(x): return x + 1\n\n\tone two three four five six seven eight nine ten, "quoted" (and more)!"""
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


@cache
def byte_level() -> Tokenizer:
    """As GPT-2's, Llama 3's and Qwen's."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=["<s>", "</s>"])
    made.train_from_iterator([TEXT] * 3, trainer)
    made.add_tokens([AddedToken("<tool>", special=False), AddedToken("größe", special=False)])
    made.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    return made


@cache
def byte_fallback() -> Tokenizer:
    """As Llama 2's and Mistral's: spaces are a character, unknown ones are bytes, the first space goes."""
    letters = sorted(set(TEXT.replace(" ", "▁")) - set("中字☃🎉🏽"))
    vocab = {token: i for i, token in enumerate(["<unk>", "<s>", "</s>", *BYTES, *letters])}
    merges = []
    for left, right in (("▁", "t"), ("h", "e"), ("▁t", "he"), ("o", "n"), ("▁", "▁"), ("e", "a"), ("r", "t")):
        merges.append((left, right))
        vocab.setdefault(left + right, len(vocab))
    made = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(steps)
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    return made


@cache
def metaspace() -> Tokenizer:
    """As T5's: pieces of words that begin with a space."""
    made = Tokenizer(models.Unigram())
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=120, special_tokens=["<unk>", "</s>"], unk_token="<unk>")
    made.train_from_iterator([TEXT] * 5, trainer)
    return made


ALL = {"byte_level": byte_level, "byte_fallback": byte_fallback, "metaspace": metaspace}


def save(tokenizer: Tokenizer, folder: Path) -> Path:
    """A model's folder with this tokenizer."""
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
