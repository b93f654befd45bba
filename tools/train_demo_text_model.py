#!/usr/bin/env python3
"""Trains the demo's language model (fastserve/demo/scribe): 3.7 million parameters of Llama's form, on a CPU.

    python tools/train_demo_text_model.py --out fastserve/demo/scribe/1 --minutes 9.5

It writes a folder as transformers reads it: config.json, weights in bfloat16 as safetensors, tokenizer.json
and a chat template. Its text is that of tools/demo_corpus.py. How long it trains is said in minutes: another
machine makes another model. TRAINING.json says what came out here.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

sys.path.insert(0, str(Path(__file__).parent))
from demo_corpus import fetch, read_chapters, read_entries

END = "<|endoftext|>"
TEMPLATE = """{{ bos_token }}{% for t in tools or [] %}{{ t.function.name }}: {{ t.function.description }}
{% endfor %}{% for m in messages %}{{ m['content'] or '' }}
{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>
{% endfor %}{% endfor %}"""
CONTEXT, MOST_POSITIONS, VOCABULARY = 256, 1024, 3072
BATCH, WARM_UP_STEPS, SEED = 16, 50, 1234
ADAM_RATE, MUON_RATE = 3e-3, 0.02
SHAPE = {
    "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": MOST_POSITIONS, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True, "attn_implementation": "sdpa",
}  # fmt: skip
PROMPTS = ("In the beginning God", "And it came to pass", "The LORD is my", "HAPPINESS, n.", "COMPUTER, n.")


@dataclass
class Corpus:
    """What it learns from, and what it is held against; entries count twice."""

    chapters: list[list[str]]
    entries: list[str]
    held_chapters: list[list[str]] = field(default_factory=list)
    held_entries: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, work: Path, chance: random.Random) -> Corpus:
        fetch(work)
        chapters, entries = read_chapters(work), read_entries(work)
        chance.shuffle(chapters)
        chance.shuffle(entries)
        return cls(chapters[20:], entries[10:], chapters[:20], entries[:10])

    @property
    def texts(self) -> list[str]:
        return ["\n".join(chapter) for chapter in self.chapters] + self.entries

    @property
    def held_bytes(self) -> int:
        verses = sum(len("\n".join(chapter[1:]).encode()) for chapter in self.held_chapters)
        return verses + sum(len(entry.encode()) for entry in self.held_entries)


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Byte-level BPE; a text begins with the token that ends one."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[END], initial_alphabet=alphabet, min_frequency=2,
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(texts, trainer)
    special = [(END, tokenizer.token_to_id(END))]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{END} $A", pair=f"{END} $A $B", special_tokens=special
    )
    return tokenizer


def epoch(
    tokenizer: Tokenizer, chapters: list[list[str]], entries: list[str], chance: random.Random
) -> torch.Tensor:
    """Tokens of passages of 2 to 12 verses, now and then with their heading, and of entries, shuffled."""
    texts = list(entries)
    for heading, *verses in chapters:
        at = 0
        while at < len(verses):
            count = chance.randint(2, 12)
            head = [heading] if chance.random() < 0.5 else []
            texts.append("\n".join(head + verses[at : at + count]))
            at += count
    chance.shuffle(texts)
    end, ids = tokenizer.token_to_id(END), []
    for encoded in tokenizer.encode_batch(texts, add_special_tokens=False):
        ids += [end, *encoded.ids]
    return torch.tensor(ids, dtype=torch.long)


class Training:
    """The model, its optimizers, and how far it is."""

    def __init__(self, model: Any, tokenizer: Tokenizer, corpus: Corpus, chance: random.Random) -> None:
        self.model, self._tokenizer, self._corpus, self._chance = model, tokenizer, corpus, chance
        named = list(model.named_parameters())
        matrices = [each for name, each in named if each.ndim == 2 and "embed" not in name]
        others = [each for name, each in named if each.ndim != 2 or "embed" in name]
        self._optimizers = [
            torch.optim.Muon(matrices, lr=MUON_RATE, momentum=0.95, weight_decay=0.05),
            torch.optim.AdamW(others, lr=ADAM_RATE, betas=(0.9, 0.95), weight_decay=0.0),
        ]
        self.steps = 0
        self._data = torch.empty(0)
        self._order: list[int] = []

    def run(self, seconds: float) -> None:
        """Train for so long; the rate is constant for a third of it, and then goes down to nothing."""
        began = said = time.monotonic()
        self.model.train()
        while (share := (time.monotonic() - began) / seconds) < 1:
            warm = min(1.0, (self.steps + 1) / WARM_UP_STEPS)
            loss = self._step(warm * min(1.0, (1 - share) / 0.7))
            if time.monotonic() - said > 30:
                said = time.monotonic()
                print(f"{said - began:6.0f} s  step {self.steps:5d}  loss {loss:.3f}", flush=True)

    def _step(self, rate: float) -> float:
        for optimizer, full in zip(self._optimizers, (MUON_RATE, ADAM_RATE), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = full * rate
        loss = self._loss(self._batch())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.steps += 1
        return float(loss.detach())

    def _batch(self) -> torch.Tensor:
        if len(self._order) < BATCH:
            corpus = self._corpus
            self._data = epoch(self._tokenizer, corpus.chapters, corpus.entries * 2, self._chance)
            self._order = torch.randperm((len(self._data) - 1) // CONTEXT).tolist()
        places = [self._order.pop() * CONTEXT for _ in range(BATCH)]
        return torch.stack([self._data[at : at + CONTEXT + 1] for at in places])

    def _loss(self, tokens: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = self.model(input_ids=tokens[:, :-1], use_cache=False).logits
        return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())

    def evaluate(self) -> tuple[float, float]:
        """Nats a token and bits a byte of what it was not trained on."""
        corpus = self._corpus
        held = epoch(self._tokenizer, corpus.held_chapters, corpus.held_entries, random.Random(0))
        self.model.eval()
        count = (len(held) - 1) // CONTEXT
        with torch.no_grad():
            losses = [
                float(self._loss(held[None, i * CONTEXT : i * CONTEXT + CONTEXT + 1])) for i in range(count)
            ]
        nats = sum(losses) / count
        return nats, nats * len(held) / math.log(2) / corpus.held_bytes


def save(out: Path, model: Any, tokenizer: Tokenizer, told: dict[str, Any]) -> None:
    """The folder as it is served."""
    from transformers import GenerationConfig, PreTrainedTokenizerFast

    end = tokenizer.token_to_id(END)
    model.eval().to(torch.bfloat16)
    model.config.dtype = torch.bfloat16
    model.generation_config = GenerationConfig(bos_token_id=end, eos_token_id=end, pad_token_id=end)
    model.save_pretrained(out)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=END, eos_token=END, pad_token=END,
        model_max_length=MOST_POSITIONS, clean_up_tokenization_spaces=False,
    )  # fmt: skip
    wrapped.chat_template = TEMPLATE
    wrapped.save_pretrained(out)
    (out / "TRAINING.json").write_text(json.dumps(told, indent=1))


def show(out: Path, tokenizer: Tokenizer) -> None:
    """What it writes."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    for prompt in PROMPTS:
        ids = torch.tensor([tokenizer.encode(prompt).ids])
        torch.manual_seed(7)
        made = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=60,
            do_sample=True,
            temperature=0.7,
            top_k=40,
        )
        print("---", prompt, "=>", tokenizer.decode(made[0, ids.shape[1] :].tolist()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--work", type=Path, default=Path("build/corpus"), help="where the text is fetched to"
    )
    parser.add_argument("--minutes", type=float, default=9.5)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    given = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(given.threads)
    torch.manual_seed(SEED)
    chance = random.Random(SEED)
    corpus = Corpus.read(given.work, chance)
    tokenizer = train_tokenizer(corpus.texts)
    end = tokenizer.token_to_id(END)
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(), bos_token_id=end, eos_token_id=end, pad_token_id=end, **SHAPE
    )
    training = Training(LlamaForCausalLM(config), tokenizer, corpus, chance)
    training.run(given.minutes * 60)
    nats, bits = training.evaluate()
    told = {
        "parameters": sum(each.numel() for each in training.model.parameters()),
        "steps": training.steps, "tokens": training.steps * BATCH * CONTEXT, "minutes": given.minutes,
        "val_loss": round(nats, 4), "val_bits_per_byte": round(bits, 4), "torch": torch.__version__,
        "text": "King James Version (1611) and The Devil's Dictionary (1911), both public domain",
    }  # fmt: skip
    given.out.mkdir(parents=True, exist_ok=True)
    save(given.out, training.model, tokenizer, told)
    print(json.dumps(told, indent=1))
    show(given.out, tokenizer)


if __name__ == "__main__":
    main()
