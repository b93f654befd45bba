"""Tensors, requests and responses of Triton's Python API, as far as every request of a model goes: from a lease's
slab to the request that execute() sees, and from its response to the slab of the answer.

    codec.read(reply, offset, nbytes, lent)      a request over the slab; nothing of it is an array yet
    reply.send(response, True)                  its tensors straight from the model's arrays into a slab of the answer

The classes are bases: backends/triton_api and workers/requests.py have the rest, which seldom runs. Only workers
come here; numpy is theirs.

A tensor that arrives is lent: it is where it came in until the model looks, and then an array of the model's own.
"""

from cpython.buffer cimport PyBUF_READ, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer, Py_buffer
from cpython.memoryview cimport PyMemoryView_FromMemory, PyMemoryView_FromObject
from cpython.object cimport PyObject
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from copying cimport copy_one
from slab_writing cimport *
from slot_verbs cimport Arena, arena_attach, slab_holds, slab_allocate, slab_release, worker_owner

from numpy import empty, ndarray

cdef extern from "Python.h":
    Py_ssize_t Py_REFCNT(PyObject*)
    PyObject* PyList_GET_ITEM(list, Py_ssize_t)

cdef enum:
    MOST_PIECES = 16            # of a response that is written by the short way
    NO_ROOM = 8                 # Kind.RESOURCE_EXHAUSTED, what a lease without a slab for its answer ends with
    STRING = 13                 # Triton's numbers of types that are not simply numbers
    BF16 = 14

KINDS = {}                      # numpy's types -> Triton's numbers; filled by backends/triton_api/tensor.py
cdef dict kinds = KINDS


cdef class RequestCodecBase


cdef class SlabTensor:
    """A tensor of a slab, or of an array. A subclass has `_adapt` and `_refuse`."""

    cdef readonly object _name
    cdef readonly int _kind             # Triton's number of its type
    cdef readonly bint _lent
    cdef object array                   # None: nobody has asked for one, it is in the slab
    cdef const uint8_t* at
    cdef Py_ssize_t nbytes
    cdef tuple axes
    cdef RequestCodecBase codec

    def __init__(self, name, numpy_array) -> None:
        kind = kinds.get(numpy_array.dtype) if type(numpy_array) is ndarray else None
        if kind is None:
            numpy_array, kind = self._adapt(name, numpy_array)
        self._name, self.array, self._kind, self._lent = name, numpy_array, kind, False

    def _hold(self, name, array, int kind, bint lent) -> None:
        """What made_of() says, in place of __init__."""
        self._name, self.array, self._kind, self._lent = name, array, kind, lent

    def name(self):
        """The tensor's name."""
        return self._name

    def triton_dtype(self) -> int:
        """The number of its datatype."""
        return self._kind

    def shape(self) -> list:
        """Its full shape."""
        return list(self.axes if self.array is None else self.array.shape)

    def as_numpy(self):
        """The array, the same at every call. Raises TritonModelException for BF16, which numpy has not."""
        if self._kind == BF16:
            self._refuse()
        return self.own() if self._lent else self.array

    def _own(self):
        """The array whatever its type, the model's to write into."""
        return self.own() if self._lent else self.array

    @property
    def raw(self):
        """The array whatever its type, to be read only: BF16 as its bits in uint16."""
        if self.array is None:
            self.array = self.codec.view(self)
        return self.array

    cdef object own(self):
        """A copy, once. Large ones are made without the GIL: another thread may have been quicker."""
        if self.array is None:
            copy = empty(self.axes, self.codec.dtypes[self._kind])
            self.copy_to(copy)
        else:
            copy = self.array.copy()
        if self._lent:
            self.array, self._lent, self.codec = copy, False, None
        return self.array

    cdef int copy_to(self, array) except -1:
        cdef Py_buffer room
        PyObject_GetBuffer(array, &room, PyBUF_WRITABLE)
        try:
            copy_one(<uint8_t*>room.buf, self.at, self.nbytes)
        finally:
            PyBuffer_Release(&room)
        return 0


cdef class Outputs:
    """A response. A subclass has `_read_error`, `_read_parameters` and `_refuse`."""

    cdef readonly list _tensors
    cdef readonly object _error
    cdef readonly dict _parameters      # None: no

    def __init__(self, output_tensors=(), error=None, parameters=None) -> None:
        self._tensors = list(output_tensors or ())
        self._parameters = self._read_parameters(parameters) if parameters else None
        for tensor in self._tensors:
            if not isinstance(tensor, SlabTensor):
                self._refuse(tensor)
        self._error = None if error is None else self._read_error(error)

    def output_tensors(self) -> list:
        """The outputs; empty for an error."""
        return self._tensors

    def has_error(self) -> bool:
        """Whether it is an error."""
        return self._error is not None

    def error(self):
        """The error, None for an answer."""
        return self._error


cdef class WholeRequest:
    """A request. Its subclass has an __init__ for those that a model makes; those of the server have none."""

    cdef public object _request_id, _correlation_id, _timeout_us, _priority, _flags, _model, _version
    cdef public object _parameters      # None: no
    cdef public list _outputs
    cdef public dict _inputs
    cdef public object _reply           # None: it is the model's own

    def __cinit__(self, *args, **kwargs):
        self._request_id = ""
        self._correlation_id = self._timeout_us = self._priority = self._flags = 0

    def inputs(self) -> list:
        """The input tensors, in the model's order."""
        return list(self._inputs.values())

    def input_by_name(self, name):
        """The input of that name, None when the request has none."""
        return self._inputs.get(name)

    def request_id(self):
        """The caller's own id, "" for none."""
        return self._request_id

    def correlation_id(self):
        """The sequence it belongs to, 0 for none."""
        return self._correlation_id

    def flags(self):
        """REQUEST_SEQUENCE_START and _END."""
        return self._flags

    def requested_output_names(self) -> set:
        """The wanted outputs; all the model has, where the caller named none."""
        return set(self._outputs)


def get_input_tensor_by_name(inference_request, name):
    """The request's input of that name, None when it has none."""
    if isinstance(inference_request, WholeRequest):
        return (<WholeRequest>inference_request)._inputs.get(name)
    return inference_request.input_by_name(name)


cdef class SlotRun:
    """A slot that runs here. It counts one for execute() and one for each reply that has not ended; a subclass has
    `_keep`, for arrays over a lease's slab that somebody still looks at."""

    cdef readonly object ring
    cdef readonly RequestCodecBase codec
    cdef readonly uint32_t slot
    cdef Py_ssize_t open
    cdef readonly list lent             # (row, what is lent from its slab)

    def __init__(self, ring, RequestCodecBase codec not None, uint32_t slot, Py_ssize_t leases) -> None:
        self.ring, self.codec, self.slot, self.open, self.lent = ring, codec, slot, 1 + leases, []

    def settle(self) -> None:
        """One of those counted is done; the last one publishes the batch."""
        self.open -= 1
        if self.open == 0:
            self.keep_what_is_seen()
            self.ring.publish(self.slot)

    cdef int keep_what_is_seen(self) except -1:
        for row, lent in self.lent:
            held = find_held(lent)
            if held is not None:
                self._keep(row, held)
        self.lent.clear()
        return 0


cdef list find_held(list lent):
    """The arrays over a slab that something besides this list refers to; None for none."""
    cdef list held = None
    cdef Py_ssize_t i
    for i in range(len(lent)):
        if Py_REFCNT(PyList_GET_ITEM(lent, i)) == 1:
            continue
        one = lent[i]
        if isinstance(one, SlabTensor):
            if not (<SlabTensor>one)._lent:
                continue
            one = one.raw
        if held is None:
            held = []
        held.append(one)
    return held


cdef class OneReply:
    """The way back of one request of a batch. A subclass says what seldom happens: `_send_part`, `_packed`, `_twice`,
    `_closed`, `_silent`, `_abandon`."""

    cdef object __weakref__
    cdef readonly SlotRun _batch
    cdef readonly uint32_t _row
    cdef readonly bint decoupled, ended
    cdef public int64_t _sent           # answers, or parts
    cdef int busy                       # threads that are about to answer: the lease is not given up under them
    cdef public list wanted             # outputs that go back

    cpdef send(self, response, bint final):
        """Blocks while the reader of parts is behind. Raises TritonModelException for a second answer where
        there is one, and for tensors that cannot travel."""
        if not self.hold():
            self._closed()
        try:
            if self.decoupled:
                self._send_part(response, final)
            elif response is not None:
                if self._sent or self.busy > 1:
                    self._twice()
                self.answer(response)
            if final:
                self.end()
        finally:
            self.let_go()

    cpdef bint hold(self) noexcept:
        """Until `let_go` the lease stays this request's, whatever other threads do. False: it has ended."""
        if not self.ended:
            self.busy += 1
        return not self.ended

    cpdef let_go(self):
        """The last one ends what was to end meanwhile."""
        self.busy -= 1
        if self.ended and self.busy == 0:
            self.close()

    cdef int answer(self, Outputs response) except -1:
        cdef RequestCodecBase codec = self._batch.codec
        cdef uint64_t offset = 0, nbytes = 0
        if response._error is None and response._parameters is None and codec.write(self, response, &offset, &nbytes):
            self.answer_slab(0, offset, nbytes)
            return 0
        status, packed = self._packed(response)
        self._answer_slab(status, packed)
        return 0

    def _answer_slab(self, uint32_t status, tuple packed) -> None:
        """Answer with these outputs and this note."""
        self._sent = 1
        offset, nbytes = self._batch.codec.put(*packed)
        self.answer_slab(status, offset, nbytes)

    cdef int answer_slab(self, uint32_t status, uint64_t offset, uint64_t nbytes) except -1:
        if offset == 0:
            status, nbytes = status or NO_ROOM, 0
        self._batch.ring.answer_lease(self._batch.slot, self._row, status, offset, nbytes)
        return 0

    cpdef end(self):
        """Nothing more comes."""
        if not self.ended:
            self.ended = True
            if self.busy == 0:
                self.close()

    cdef int close(self) except -1:
        try:
            if not self.decoupled and not self._sent:
                self._silent()
        finally:
            self._batch.settle()
        return 0

    def __del__(self):
        if not self.ended and self._batch is not None:      # the model let go of request and sender without a final word
            self._abandon()


cdef class Asked:
    """One request of a batch. `lent` is what lies in its input slab, of every time it was read."""

    cdef readonly object request
    cdef readonly OneReply reply
    cdef readonly uint32_t rows
    cdef readonly uint64_t offset, nbytes
    cdef readonly list lent


cdef class RequestCodecBase:
    """Reads the requests of a worker's slots, and writes what they are answered with. A subclass says what seldom
    happens: `read_strings`, `read_note`, `fit`, `pack`, `put`, and what becomes of a request that cannot be read
    (`unreadable`) or answered (`unwritable`), or was before (`answered_twice`)."""

    cdef Arena arena
    cdef uint32_t owner
    cdef object readable, types
    cdef readonly tuple dtypes          # numpy's, by Triton's numbers
    cdef tuple kinds, codes             # Triton's numbers by dtype codes, and the way back
    cdef list names, declared
    cdef dict numbers
    cdef dict odd_in, odd_out           # tensors whose model sees another shape than clients do
    cdef frozenset optional
    cdef object model, version

    def __init__(self, memory, *, int worker, tuple types, tuple tables, tuple model, tuple names, dict numbers,
                 frozenset optional, dict odd_in, dict odd_out) -> None:
        """`types`: of requests and tensors. `tables`: numpy's types by Triton's numbers, these by dtype codes, and
        dtype codes by them. `names`: of the inputs, and of the outputs that are declared; `numbers` those of all."""
        cdef const uint8_t[::1] seen = memory
        if not arena_attach(&self.arena, <uint8_t*>&seen[0], seen.shape[0]) or not self.arena.slabs.pages:
            raise ValueError("this memory holds no arena with slabs of this version")
        self.readable = PyMemoryView_FromObject(memory).toreadonly()
        self.owner = worker_owner(&self.arena, worker)
        self.types, (self.dtypes, self.kinds, self.codes), (self.model, self.version) = types, tables, model
        (self.names, self.declared), self.numbers, self.optional = names, numbers, optional
        self.odd_in, self.odd_out = odd_in, odd_out

    # --- in ---

    def read_all(self, SlotRun batch not None, list leases not None, reply_type, bint decoupled) -> list:
        """What is asked in these leases of a slot, (row, rows, offset, bytes) each; those that cannot be read are
        answered."""
        cdef Asked one
        cdef list found = []
        for row, rows, offset, nbytes in leases:
            one = Asked.__new__(Asked)
            one.reply, one.lent = <OneReply?>reply_type.__new__(reply_type), []
            one.reply._batch, one.reply._row, one.reply.decoupled = batch, row, decoupled
            one.rows, one.offset, one.nbytes = rows, offset, nbytes
            try:
                one.request = self.read(one.reply, offset, nbytes, one.lent)
            except (ValueError, LookupError):
                self.unreadable(one.reply)
                continue
            batch.lent.append((row, one.lent))
            found.append(one)
        return found

    cpdef read(self, OneReply reply, uint64_t offset, uint64_t nbytes, list lent):
        """The request of a lease; `lent` gets what of it is lent. Raises ValueError, LookupError for a slab that does
        not hold the tensors it claims to."""
        cdef TensorsHead head
        cdef uint64_t note_at
        cdef uint32_t note_bytes
        cdef WholeRequest request
        if not slab_holds(&self.arena.slabs, offset, nbytes):
            raise ValueError("not the bytes of a leased slab")
        cdef const uint8_t* slab = self.arena.slabs.base + offset
        if tensors_head(slab, nbytes, &head) or tensors_note(slab, nbytes, &head, &note_at, &note_bytes):
            raise ValueError("this slab holds no tensors")
        request_type, tensor_type = <tuple>self.types
        request = <WholeRequest?>request_type.__new__(request_type)
        names, reply.wanted = self.names, self.declared
        if note_bytes:
            extra = self.read_note((<const char*>slab)[note_at : note_at + note_bytes], request, reply)
            if extra:
                names = self.names + extra
        request._model, request._version, request._reply = self.model, self.version, reply
        request._outputs = reply.wanted
        request._inputs = self.read_tensors(slab, nbytes, head.count, names, tensor_type, lent)
        return request

    cdef dict read_tensors(self, const uint8_t* slab, uint64_t nbytes, uint32_t count, list names, tensor_type, list lent):
        cdef TensorEntry entry
        cdef SlabTensor tensor
        cdef uint32_t i
        cdef dict inputs = {}
        for i in range(count):
            if tensors_entry(slab, nbytes, i, &entry):
                raise ValueError("this slab's table of tensors is damaged")
            if entry.number >= len(names):
                raise IndexError("no such input")
            tensor = <SlabTensor?>tensor_type.__new__(tensor_type)
            tensor._name = name = names[entry.number]
            tensor._kind, tensor.axes = self.kinds[entry.code], shape_of(&entry)
            if entry.code == DT_BYTES:
                bytes_of = PyMemoryView_FromMemory(<char*>slab + entry.offset, entry.bytes, PyBUF_READ)
                tensor.array = self.read_strings(bytes_of, tensor.axes)
            else:
                tensor.at, tensor.nbytes, tensor.codec, tensor._lent = slab + entry.offset, entry.bytes, self, True
                lent.append(tensor)
            if name in self.odd_in:
                tensor.array = self.fit(tensor.raw, self.odd_in[name], lent)
            inputs[name] = tensor
        return inputs

    cdef object view(self, SlabTensor tensor):
        """A read-only array over its slab."""
        at = <uint64_t>(tensor.at - self.arena.base)
        return ndarray(tensor.axes, self.dtypes[tensor._kind], self.readable, at)

    # --- out ---

    def answer_all(self, responses not None, list replies not None) -> None:
        """One response to each, None for one that comes some other way."""
        cdef OneReply reply
        for response, each in zip(responses, replies):
            reply = <OneReply?>each
            if response is None:
                continue
            if reply.ended:
                self.answered_twice()
                continue
            try:
                reply.send(response, True)
            except Exception as error:      # a text or a parameter that cannot travel is its own caller's fault alone
                self.unwritable(reply, error)

    cdef bint write(self, OneReply reply, Outputs response, uint64_t* offset, uint64_t* nbytes) except -1:
        """A slab with a response that is nothing but numbers in declared outputs; offset 0: no room. False, and no
        trace, for any other."""
        cdef Piece[MOST_PIECES] pieces
        cdef Py_ssize_t count = 0, i
        cdef uint64_t at
        cdef int taken
        try:
            for output in response._tensors:
                if count == MOST_PIECES:        # here: names are the model's, and may do anything when they are compared
                    return False
                taken = self.take(&pieces[count], reply.wanted, <SlabTensor?>output)
                if taken < 0:
                    return False
                count += taken
            at = tensors_body_at(count)
            for i in range(count):
                at = place_piece(&pieces[i], at)
            reply._sent = 1
            nbytes[0], offset[0] = at, slab_allocate(&self.arena.slabs, at, self.owner)
            if offset[0]:
                write_pieces(pieces, count, self.arena.slabs.base + offset[0], at, b"")
        finally:
            for i in range(count):
                PyBuffer_Release(&pieces[i].view)
        return True

    cdef int take(self, Piece* piece, list wanted, SlabTensor output):
        """1: the piece is this output; 0: it does not travel; -1: it is not so simple."""
        name, kind = output._name, output._kind
        if wanted is not self.declared and name in self.optional and name not in wanted:
            return 0
        number = self.numbers.get(name)
        if number is None or kind == STRING or name in self.odd_out:
            return -1
        begin_piece(piece, number, self.codes[kind])
        try:
            if output.array is None:
                take_memory(piece, output.at, output.nbytes, output.axes)
            else:
                take_buffer(piece, output.array, None)
        except (ValueError, BufferError):       # not contiguous, or too many axes
            return -1
        return 1
