"""The next token of every sequence of a batch, each by settings of its own, in one call.

    sampler = Sampler(vocab=3072, slots=32)
    sampler.begin(4, seed=7, do_sample=True, temperature=0.8, top_p=0.9)    # a sequence comes: its slot
    sampler.see(4, prompt)                                                  # for repetition_penalty
    sampler.draw(logits, slots, tokens)       # logits[i] is of slots[i]; tokens[i] is its token, or -1
    sampler.draw(logits, slots, tokens, masks)      # masks[slot]: of slots begun with masked=True, a bit a token
    sampler.logprobs(logits[0], token, 5)     # of the model's own distribution, without settings

What is drawn depends on the row of logits, the slot's settings and (seed, tokens drawn before), never on who
shares the batch. Order and meaning of the settings are those of transformers' processors: repetition, presence
and frequency penalties, temperature, top_k, top_p, min_p, typical_p; a mask comes before all of them. Of equal logits the
lower token is the heavier. The rows are as they were afterwards. Not thread-safe; draw() gives the interpreter's lock up.
"""

from libc.math cimport isfinite
from libc.stdint cimport int32_t, uint64_t
from libcpp cimport bool as flag
from libcpp.vector cimport vector

cdef extern from "sampling.h" nogil:
    cdef struct Sampling:
        uint64_t seed, step
        int32_t top_k
        float temperature, top_p, min_p, typical_p, repetition, presence, frequency
        flag draws, masked

    cdef cppclass History:
        void add(int32_t token, int32_t times) except +
        void clear()

    cdef cppclass Workspace:
        vector[float] allowed
        void fit(size_t vocab) except +

    int32_t draw_penalised(float* z, int vocab, const Sampling& s, const History& said, Workspace& work) except +
    int32_t draw_row(const float* z, int vocab, const Sampling& s, Workspace& work) except +
    int mask_words(int vocab)
    void apply_mask(const float* z, const int32_t* mask, int vocab, float* allowed)
    float largest(const float* z, int vocab)
    double log_sum_exp(const float* z, int vocab, float most)
    vector[int32_t] heaviest(const float* z, int vocab, int count) except +

TOKENS_MAX = 1 << 24


cdef double within(str name, double value, double low, double high, str allowed) except *:
    if not low <= value <= high:
        raise ValueError(f"{name}: given {value:g}, allowed: {allowed}")
    return value


cdef class Sampler:
    """Settings and histories by slot. `vocab` is how many logits a row has."""

    cdef readonly int vocab, slots
    cdef vector[Sampling] settings
    cdef vector[History] said
    cdef Workspace work

    def __init__(self, int vocab, int slots) -> None:
        if not 0 < vocab <= TOKENS_MAX or slots < 1:
            raise ValueError(f"vocab, slots: given {vocab}, {slots}, allowed: 1 to {TOKENS_MAX}, at least 1")
        self.vocab, self.slots = vocab, slots
        self.settings.resize(slots)
        self.said.resize(slots)
        self.work.fit(vocab)

    def begin(
        self, int slot, *, uint64_t seed=0, uint64_t step=0, bint do_sample=False, double temperature=1.0,
        int top_k=0, double top_p=1.0, double min_p=0.0, double typical_p=1.0, double repetition_penalty=1.0,
        double presence_penalty=0.0, double frequency_penalty=0.0, bint masked=False
    ) -> None:
        """A new sequence in a slot. `step` is how many tokens it has drawn before, where it goes on elsewhere. A
        `masked` one draws only tokens that its mask allows."""
        cdef Sampling* s = &self.settings[self._check(slot)]
        cdef float least = 1e-30
        within("temperature", temperature, least, 3.4e38, "more than 0")
        within("top_k", top_k, 0, TOKENS_MAX * 128.0, "0 (all) or more")
        within("top_p", top_p, least, 1, "more than 0, at most 1")
        within("min_p", min_p, 0, 1, "0 (all) to 1")
        within("typical_p", typical_p, least, 1, "more than 0, at most 1")
        within("repetition_penalty", repetition_penalty, least, 3.4e38, "more than 0")
        within("presence_penalty", presence_penalty, -100, 100, "-100 to 100")
        within("frequency_penalty", frequency_penalty, -100, 100, "-100 to 100")
        s.seed, s.step, s.draws, s.masked, s.top_k = seed, step, do_sample, masked, top_k
        s.temperature, s.top_p, s.min_p, s.typical_p = <float>temperature, <float>top_p, <float>min_p, <float>typical_p
        s.repetition, s.presence, s.frequency = (
            <float>repetition_penalty, <float>presence_penalty, <float>frequency_penalty
        )
        self.said[slot].clear()

    def see(self, int slot, const int32_t[::1] tokens, *, bint drawn=False) -> None:
        """Tokens that are there already: of the prompt, or `drawn` before the sequence came here. Only the
        repetition penalty knows those of the prompt."""
        cdef Py_ssize_t i
        self._check(slot)
        if not self._remembers(slot):
            return
        for i in range(tokens.shape[0]):
            if not 0 <= tokens[i] < self.vocab:
                raise ValueError(f"tokens[{i}]: given {tokens[i]}, allowed: 0 to {self.vocab - 1}")
            self.said[slot].add(tokens[i], drawn)

    def draw(
        self, float[:, ::1] logits, const int32_t[::1] slots, int32_t[::1] tokens, const int32_t[:, ::1] masks=None
    ) -> None:
        """Draw one token for each row. -1 where a row has a NaN or nothing to choose: that sequence has failed.
        `masks` [slots, ceil(vocab / 32)]: bit j % 32 of word j / 32 of a slot's row allows token j."""
        cdef Py_ssize_t i, rows = slots.shape[0]
        cdef int words = mask_words(self.vocab)
        cdef const int32_t* mask
        if masks is not None and (masks.shape[0] < self.slots or masks.shape[1] != words):
            raise ValueError(
                f"masks: given {masks.shape[0]} x {masks.shape[1]}, allowed: at least {self.slots} rows of {words}"
            )
        if logits.shape[0] < rows or tokens.shape[0] < rows or logits.shape[1] != self.vocab:
            raise ValueError(
                f"logits, tokens: given {logits.shape[0]} x {logits.shape[1]} and {tokens.shape[0]}, "
                f"allowed: at least {rows} rows of {self.vocab}"
            )
        for i in range(rows):
            if self.settings[self._check(slots[i])].masked:
                if masks is None:
                    raise ValueError(f"masks: given none, and slot {slots[i]} draws by one")
                self.work.allowed.resize(self.vocab)
        with nogil:
            for i in range(rows):
                mask = NULL
                if self.settings[slots[i]].masked:
                    mask = &masks[slots[i], 0]
                tokens[i] = self._draw(&logits[i, 0], slots[i], mask)

    def logprobs(self, const float[::1] row, int token, int best) -> tuple:
        """(log probability of the token, [(token, log probability)] of the `best` most probable), natural."""
        cdef double scale
        cdef float most
        if row.shape[0] != self.vocab or not 0 <= token < self.vocab or not 0 <= best <= 1000:
            raise ValueError(f"row, token, best: allowed: {self.vocab} logits, one of them, 0 to 1000")
        most = largest(&row[0], self.vocab)
        if not isfinite(most):
            raise ValueError("row: a NaN, or no finite logit")
        scale = log_sum_exp(&row[0], self.vocab, most)
        return row[token] - scale, [(k, row[k] - scale) for k in heaviest(&row[0], self.vocab, best)]

    cdef int _check(self, int slot) except -1:
        if not 0 <= slot < self.slots:
            raise ValueError(f"slot: given {slot}, allowed: 0 to {self.slots - 1}")
        return slot

    cdef bint _remembers(self, int slot) noexcept nogil:
        cdef Sampling* s = &self.settings[slot]
        return s.repetition != 1.0 or s.presence != 0.0 or s.frequency != 0.0

    cdef int32_t _draw(self, float* row, int slot, const int32_t* mask) except? -2 nogil:
        cdef Sampling* s = &self.settings[slot]
        cdef int32_t token
        if mask != NULL:
            apply_mask(row, mask, self.vocab, self.work.allowed.data())
            row = self.work.allowed.data()
        if not self._remembers(slot):
            token = draw_row(row, self.vocab, s[0], self.work)
        else:
            token = draw_penalised(row, self.vocab, s[0], self.said[slot], self.work)
            if token >= 0:
                self.said[slot].add(token, 1)
        s.step += 1
        return token
