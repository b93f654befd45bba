"""A folder's weights in transformers' own code, run over plans: backends.text.model.Model on torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from fastserve.backends.device_faults import is_out_of_memory
from fastserve.backends.text.model import Plan
from fastserve.backends.text_torch import attention
from fastserve.backends.text_torch.cache import RowCache
from fastserve.backends.text_torch.fused import fuse
from fastserve.backends.text_torch.landing import Landing


class TorchModel:
    """The cache belongs to it. `model` is transformers', or fused.FusedModel, which takes its place."""

    def __init__(self, model: Any, cache: RowCache) -> None:
        self.cache = cache
        with torch.inference_mode():
            self._fused = fuse(model, cache.data.shape[-2])
        self._model: Any = model if self._fused is None else None
        self._device = cache.data.device
        self._states: torch.Tensor | None = None
        self._landing = Landing(self._device)
        # Four axes: transformers takes it for a mask that is finished. Attention here does not look at it.
        self._no_mask = torch.zeros(1, 1, 1, 1, device=self._device)

    def forward(self, plan: Plan) -> np.ndarray:
        """Logits of what the plan wants. Raises MemoryError when torch has none."""
        try:
            with torch.inference_mode():
                return self._forward(plan)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # here, where no traceback holds the step's tensors any longer
        raise MemoryError("torch has no memory for this step")

    def states(self) -> np.ndarray:
        """Hidden states of what the last plan wanted pooled."""
        states, self._states = self._states, None
        assert states is not None
        return self._landing.bring(states.float())

    def close(self) -> None:
        """Drops weights and cache."""
        del self._model, self._fused, self.cache
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _forward(self, plan: Plan) -> np.ndarray:
        ragged = attention.Ragged(plan, self.cache)
        tokens, wanted = torch.from_numpy(plan.tokens).to(self._device), None
        if plan.chunks:
            wanted = torch.from_numpy(plan.wanted).to(self._device)
        pooled = None if plan.pooled is None else torch.from_numpy(plan.pooled).to(self._device)
        logits, self._states = (self._fused or self._run_plain)(
            tokens, ragged.positions, wanted, pooled, ragged
        )
        return self._landing.bring(logits.float().contiguous())

    def _run_plain(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        wanted: torch.Tensor | None,
        pooled: torch.Tensor | None,
        ragged: attention.Ragged,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        made = self._model(
            input_ids=tokens[None],
            position_ids=positions[None],
            attention_mask=self._no_mask,
            use_cache=False,
            logits_to_keep=0 if wanted is None else wanted,
            output_hidden_states=pooled is not None,
            ragged=ragged,
        )
        return made.logits[0], None if pooled is None else made.hidden_states[-1][0, pooled]
