"""Tokens as their readers get them, the text of byte-level vocabularies, and the events tokens are sent as: what
a front process does for every token of every stream.

    detokenizer = ByteText({17: "the", 226: b"\\xe2", ...}, look)     look(token) -> what stands in the table
    detokenizer.add(17) -> "the"
    take_plain(records, detokenizer, specials, NONE, tokens, ids, texts) -> 3    so many were plain, and are taken

    flow = Flow(detokenizer, specials, NONE, ids, texts, frames, reply, failed)
    pass_on(reader.read(messages), reader, gaps, now_ns)  -> what is left of the step for the general way

    frames = EventTemplate((b'data: {"token":{"id":', Placeholder.ID, b',"text":', Placeholder.TEXT, b"}}\\n\\n"))
    frames.write([Token(5, "a", 0, 1500)])  ->  b'data: {"token":{"id":5,"text":"a"}}\\n\\n'

A table holds each token's text, or its bytes where these are no whole characters; it is filled as tokens are
met and shared by all streams of a model. Bytes that are no UTF-8 become U+FFFD as Unicode recommends, which is
what the library tokenizers does with a whole answer.
"""

from enum import IntEnum

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.dict cimport PyDict_GetItem
from cpython.object cimport PyObject
from libc.math cimport isfinite
from libc.stdint cimport int64_t, uint8_t, uint32_t
from libc.string cimport memcpy
from libcpp cimport bool as flag
from libcpp.string cimport string
from libcpp.vector cimport vector

cdef extern from "Python.h":
    str PyUnicode_DecodeUTF8Stateful(const char* data, Py_ssize_t size, const char* errors, Py_ssize_t* used)
    const char* PyUnicode_AsUTF8AndSize(object text, Py_ssize_t* size) except NULL

cdef extern from "scratch.h" nogil:
    char* take_scratch(size_t size)

cdef extern from "token_text.h" nogil:
    const int WIDE_STORE
    char* put_integer(char* at, int64_t value)
    char* put_millis(char* at, int64_t us)
    char* put_number(char* at, double value)
    char* put_bytes(char* at, const void* data, size_t size)
    char* put_string(char* at, const uint8_t* data, size_t size)
    char* put_stripped(char* at, const uint8_t* data, size_t size)


class Placeholder(IntEnum):
    """The fields between the literal bytes of an event; see EventTemplate."""

    ID = 0
    NUMBER = 1
    TEXT = 2
    PREFILL = 3
    DECODE = 4
    LOGPROB = 5
    SPECIAL = 6


cdef class Token:
    """One token. `text` is what it completed: none while a character or a stop string may go on, more than its
    own after that. `us`, `ms`: since its request came, or since the token before. `finish`: codec.text.Finish.
    `logprob` and `best` where they were asked for."""

    cdef public int64_t id
    cdef public str text
    cdef public int64_t index
    cdef public int64_t us
    cdef public bint special
    cdef public object finish
    cdef public object logprob
    cdef public object best

    def __init__(
        self, int64_t id, str text not None, int64_t index, us, bint special=False, finish=0, logprob=None,
        best=(),
    ):
        self.id, self.text, self.index, self.us, self.special = id, text, index, int(us), special
        self.finish, self.logprob, self.best = finish, logprob, best

    @property
    def ms(self):
        """Milliseconds."""
        return self.us / 1000.0

    @property
    def first(self):
        """Whether it is the first of its sequence."""
        return self.index == 0

    def __repr__(self):
        return f"Token({self.id}, {self.text!r}, index={self.index}, us={self.us}, finish={self.finish!r})"


cdef class ByteText:
    """The detokenizer of one sequence: bytes of a character that is not whole yet are kept."""

    cdef dict table
    cdef object look
    cdef int held               # bytes
    cdef char[4] begun

    def __init__(self, dict table not None, look):
        self.table, self.look = table, look
        self.held = 0

    cpdef str add(self, token):
        """The text that this token completes."""
        cdef PyObject* found = PyDict_GetItem(self.table, token)
        if found == NULL:
            self.table[token] = self.look(token)
            found = PyDict_GetItem(self.table, token)
        value = <object>found
        if type(value) is str and self.held == 0:
            return <str>value
        return self.join(value)

    cdef str join(self, value):
        cdef Py_ssize_t size = 0
        cdef const char* data
        if type(value) is str:
            data = PyUnicode_AsUTF8AndSize(value, &size)
        else:
            data, size = PyBytes_AS_STRING(value), PyBytes_GET_SIZE(value)
        if self.held == 0:
            return self.decode(data, size)
        whole = self.begun[: self.held] + data[:size]
        return self.decode(PyBytes_AS_STRING(whole), PyBytes_GET_SIZE(whole))

    cdef str decode(self, const char* data, Py_ssize_t size):
        cdef Py_ssize_t used = 0
        text = PyUnicode_DecodeUTF8Stateful(data, size, "replace", &used)
        self.held = <int>(size - used)          # at most 3: more cannot begin a character
        memcpy(self.begun, data + used, self.held)
        return text

    def end(self):
        """Return the text that is left: no more tokens come."""
        cdef int held = self.held
        self.held = 0
        return PyUnicode_DecodeUTF8Stateful(self.begun, held, "replace", NULL)


def take_plain(
    list records not None, detokenizer, frozenset specials not None, none, list tokens not None, list ids not None,
    list texts not None,
):
    """Take records, (token, finish, us, extra) each, up to the first that ends its sequence, has no token or says
    more: a Token in `tokens`, its id in `ids`, its text in `texts`. How many it took. `none` is Finish.NONE."""
    cdef ByteText quick = detokenizer if type(detokenizer) is ByteText else None
    cdef Token made
    cdef tuple record
    cdef int taken = 0
    for record in records:
        token = record[0]
        if record[1] or record[3] or token < 0:
            break
        made = Token.__new__(Token)
        made.id = token
        made.text = quick.add(token) if quick is not None else detokenizer.add(token)
        made.index = len(ids)
        made.us = record[2]
        made.special = token in specials
        made.finish = none
        made.best = ()
        tokens.append(made)
        ids.append(token)
        texts.append(made.text)
        taken += 1
    return taken


cdef enum:
    PLACEHOLDER_BYTES = 32             # the longest of a number
    TEXT_GROWS = 6              # times, where every byte is escaped


cdef struct Part:
    int placeholder                    # -1: none after the literal
    string literal


cdef class EventTemplate:
    """The form of an event, and a writer of events. Holes:

    ID NUMBER        the token; its number in the sequence, from 1
    TEXT             its text as JSON: raw UTF-8, quotes, backslashes and control characters escaped
    PREFILL DECODE   milliseconds with three digits: the first token has PREFILL, the others DECODE, else null
    LOGPROB SPECIAL  a number or null; true or false

    `bare` leaves out a token that ends its sequence: that event is the caller's. `skip_empty` leaves out tokens
    without text, `strip` control characters but tabs and line ends. Threads may share one.
    """

    cdef vector[Part] parts
    cdef size_t literals        # bytes of an event that are no placeholder's
    cdef bint bare, skip_empty, strip

    def __init__(self, form, *, bint bare=False, bint skip_empty=False, bint strip=False):
        cdef Part part
        part.placeholder, part.literal = -1, string()
        for piece in form:
            if isinstance(piece, bytes):
                part.literal.append(PyBytes_AS_STRING(piece), PyBytes_GET_SIZE(piece))
                continue
            part.placeholder = Placeholder(piece)
            self.keep(part)
            part.placeholder, part.literal = -1, string()
        self.keep(part)
        self.bare, self.skip_empty, self.strip = bare, skip_empty, strip

    cdef void keep(self, const Part& part):
        self.parts.push_back(part)
        self.literals += part.literal.size() + PLACEHOLDER_BYTES

    def write(self, list tokens not None):
        """The events of these tokens, b"" for none."""
        cdef size_t bound = WIDE_STORE
        cdef Token token
        cdef Py_ssize_t size = 0
        cdef vector[char] large
        cdef char* start
        cdef char* at
        for token in tokens:
            PyUnicode_AsUTF8AndSize(token.text, &size)
            bound += self.literals + size * TEXT_GROWS * self.parts.size()
        start = take_scratch(bound)
        if start == NULL:
            large.resize(bound)
            start = large.data()
        at = start
        for token in tokens:
            if not ((self.bare and token.finish) or (self.skip_empty and not token.text)):
                at = self.put(at, token)
        return PyBytes_FromStringAndSize(start, at - start)

    cdef char* put(self, char* at, Token token) except NULL:
        cdef Part* part
        cdef size_t i
        for i in range(self.parts.size()):
            part = &self.parts[i]
            at = put_bytes(at, part.literal.data(), part.literal.size())
            if part.placeholder == 2:
                at = self.put_text(at, token.text)
            elif part.placeholder == 0:
                at = put_integer(at, token.id)
            elif part.placeholder == 1:
                at = put_integer(at, token.index + 1)
            elif part.placeholder == 3 or part.placeholder == 4:
                at = put_millis(at, token.us) if (token.index == 0) == (part.placeholder == 3) else put_bytes(at, b"null", 4)
            elif part.placeholder == 5:
                at = put_number(at, token.logprob) if token.logprob is not None else put_bytes(at, b"null", 4)
            elif part.placeholder == 6:
                at = put_bytes(at, b"true", 4) if token.special else put_bytes(at, b"false", 5)
        return at

    cdef char* put_text(self, char* at, str text) except NULL:
        cdef Py_ssize_t size = 0
        cdef const char* data = PyUnicode_AsUTF8AndSize(text, &size)
        if self.strip:
            return put_stripped(at, <const uint8_t*>data, size)
        return put_string(at, <const uint8_t*>data, size)


# --- a step at once ------------------------------------------------------------------------------

cdef class Flow:
    """One sequence's way from a step's records to its reply, where nothing is said of a token but what `frames` say:
    text, event and write without a turn of anybody's. While it is not `open`, and for what is not plain (an end,
    logprobs), records take the general way, which has to have passed on whatever came before."""

    cdef object detokenizer, none, reply, failed
    cdef frozenset specials
    cdef list ids, texts
    cdef EventTemplate frames
    cdef bytes written                  # and not yet sent
    cdef public bint open
    cdef readonly int64_t taken_ns      # when something was last taken

    def __init__(self, detokenizer, frozenset specials not None, none, list ids not None, list texts not None,
                 EventTemplate frames not None, reply, failed):
        self.detokenizer, self.specials, self.none, self.ids, self.texts = detokenizer, specials, none, ids, texts
        self.frames, self.reply, self.failed = frames, reply, failed

    cpdef bint take(self, list records, int64_t now_ns) except -1:
        """Pass these on. False, with none of them taken, where they are for the general way."""
        taken = self.write(records, now_ns)
        if taken:
            self.send()
        return taken

    cdef bint write(self, list records, int64_t now_ns) except -1:
        """The same, but for `send`, to which there may be no turn of the loop."""
        cdef list tokens = []
        if not (self.open and are_plain(records)):
            return False
        try:
            if not self.reply.ready:
                return False
            self.taken_ns = now_ns
            take_plain(records, self.detokenizer, self.specials, self.none, tokens, self.ids, self.texts)
            self.written = self.frames.write(tokens)
        except Exception as fault:
            self.fail(fault)
        return True

    cdef int send(self) except -1:
        written, self.written = self.written, None
        try:
            if written:
                self.reply.send(written)
        except Exception as fault:
            self.fail(fault)
        return 0

    cdef int fail(self, fault) except -1:
        """Its own reader's trouble, and nobody else's of the step."""
        self.open = False
        self.failed(fault)
        return 0


cdef bint are_plain(list records) except -1:
    cdef tuple record
    for record in records:
        if record[1] or record[3] or record[0] < 0:
            return False
    return True


cdef class Flowing:
    """The state of a run where its records arrive; a base class. `held`: tokens of its prompt and its answer."""

    cdef public Flow flow
    cdef public uint32_t slot
    cdef public int64_t held
    cdef public bint begun, ended


def pass_on(list steps not None, reader, list gaps not None, int64_t now_ns):
    """Of a step's (run, records), as TokenReader.read tells them, pass on those that flow, and tell the reader so.
    Returns the others. `gaps` gets the microseconds before each token that was passed on.

    Everything is written before anything is sent: a client on this machine wakes with what it is sent, and takes the
    core and its caches."""
    cdef list left = [], flowing = [], records
    cdef tuple entry, record
    cdef Flowing run
    cdef Flow flow
    for entry in steps:
        run, records = <Flowing?>entry[0], entry[1]
        # A first token is not counted as the others are.
        if run.flow is None or not run.begun or run.ended or records is None or not run.flow.write(records, now_ns):
            left.append(entry)
            continue
        flowing.append(run.flow)
        run.held += len(records)
        reader.taken(run.slot, len(records))
        for record in records:
            gaps.append(record[2])
    for flow in flowing:
        flow.send()
    return left
