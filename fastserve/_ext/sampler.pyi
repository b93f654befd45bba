from typing_extensions import Buffer

TOKENS_MAX: int

class Sampler:
    vocab: int
    slots: int
    def __init__(self, vocab: int, slots: int) -> None: ...
    def begin(
        self,
        slot: int,
        *,
        seed: int = 0,
        step: int = 0,
        do_sample: bool = False,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        typical_p: float = 1.0,
        repetition_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        masked: bool = False,
    ) -> None: ...
    def see(self, slot: int, tokens: Buffer, *, drawn: bool = False) -> None: ...
    def draw(self, logits: Buffer, slots: Buffer, tokens: Buffer, masks: Buffer | None = None) -> None: ...
    def logprobs(self, row: Buffer, token: int, best: int) -> tuple[float, list[tuple[int, float]]]: ...
