"""What transformers does by itself with the same weights: tokens per second."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.cache_utils import DynamicCache


class Rivals:
    """Greedy, to the last token: nothing ends early."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: str, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.device = torch.device(device)
        self.model = (
            AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True).eval().to(device)
        )
        logging.getLogger("transformers").setLevel(logging.ERROR)
        logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)

    def generate(self, prompts: list[list[int]], new: int) -> float:
        """One after another."""
        start = self.clock()
        for prompt in prompts:
            ids = torch.tensor([prompt], device=self.device)
            settings = {"do_sample": False, "max_new_tokens": new, "min_new_tokens": new, "pad_token_id": 0}
            made = self.model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
            assert made.shape[1] == len(prompt) + new
        return len(prompts) * new / (self.clock() - start)

    @torch.inference_mode()
    def forward(self, prompts: list[list[int]], new: int) -> float:
        """All of them as one batch, as long as each other."""
        start, ids = self.clock(), torch.tensor(prompts, device=self.device)
        cache = DynamicCache(config=self.model.config)
        for _ in range(new):
            logits = self.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
            ids = logits[:, -1].argmax(-1, keepdim=True)
            ids.tolist()  # whoever streams has to read each token
        return len(prompts) * new / (self.clock() - start)

    def batching(self, prompts: list[list[int]], new: int) -> float:
        """Its own continuous batching."""
        config = GenerationConfig(do_sample=False, max_new_tokens=new, eos_token_id=-1, pad_token_id=0)
        start = self.clock()
        made = self.model.generate_batch(inputs=prompts, generation_config=config, progress_bar=False)
        took = self.clock() - start
        assert sum(len(one.generated_tokens) for one in made.values()) == len(prompts) * new
        return len(prompts) * new / took
