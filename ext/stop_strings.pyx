"""Stop strings: where an answer ends, however its characters are spread over tokens.

    table = StopTable(["END"])                           # once for a request
    stops = StopStrings(table)                           # once for a sequence of it
    stops.feed("the E")     -> "the "       the E may be the beginning of END: it is held back
    stops.feed("gg")        -> "Egg"
    stops.feed(" END!")     -> " "          and `stops.found` is "END"

The match that is complete first wins, of several that end together the longest: what is found depends on the text
only, never on its tokens. A table is the automaton of Aho and Corasick: building it is linear in the characters of the
stop strings, finding in those of the text. A node is a beginning of a stop string, 24 bytes.
"""

from cpython.unicode cimport PyUnicode_READ_CHAR
from libc.stdint cimport int32_t, uint32_t
from libcpp.vector cimport vector


cdef struct Node:
    uint32_t character      # that leads here from the node before
    int32_t depth           # characters of the beginning
    int32_t child, sibling  # the first child; the next child of the same node; 0 for none: nobody's child is the root
    int32_t fallback        # the longest beginning that this one ends with
    int32_t ends            # the longest stop string that this beginning ends with; 0 for none


cdef class StopTable:
    """The stop strings of one request, for all of its sequences: immutable."""

    cdef vector[Node] nodes

    def __init__(self, stops) -> None:
        cdef Node root
        root.character = 0
        root.depth = root.child = root.sibling = root.fallback = root.ends = 0
        self.nodes.push_back(root)
        for stop in stops:
            if not stop:
                raise ValueError("a stop string has no characters")
            self.insert(stop)
        self.link()

    def __len__(self) -> int:
        """Its nodes."""
        return <Py_ssize_t>self.nodes.size()

    cdef int insert(self, str stop) except -1:
        cdef int32_t at = 0, child
        cdef uint32_t character
        cdef Node made
        cdef Py_ssize_t i
        for i in range(len(stop)):
            character = PyUnicode_READ_CHAR(stop, i)
            child = self.child_of(at, character)
            if child == 0:
                child = <int32_t>self.nodes.size()
                made.character, made.depth = character, self.nodes[at].depth + 1
                made.child, made.sibling, made.fallback, made.ends = 0, self.nodes[at].child, 0, 0
                self.nodes.push_back(made)
                self.nodes[at].child = child
            at = child
        self.nodes[at].ends = at
        return 0

    cdef int link(self) except -1:
        """Fallbacks, nodes nearer to the root first."""
        cdef vector[int32_t] order
        cdef int32_t at, child, fallback
        cdef size_t i = 0
        order.push_back(0)
        while i < order.size():
            at = order[i]
            i += 1
            child = self.nodes[at].child
            while child:
                fallback = self.step(self.nodes[at].fallback, self.nodes[child].character) if at else 0
                self.nodes[child].fallback = fallback
                if self.nodes[child].ends == 0:
                    self.nodes[child].ends = self.nodes[fallback].ends
                order.push_back(child)
                child = self.nodes[child].sibling
        return 0

    cdef int32_t child_of(self, int32_t at, uint32_t character) noexcept nogil:
        cdef int32_t child = self.nodes[at].child
        while child and self.nodes[child].character != character:
            child = self.nodes[child].sibling
        return child

    cdef int32_t step(self, int32_t at, uint32_t character) noexcept nogil:
        """The longest beginning that the text ends with, now that this character follows it."""
        cdef int32_t child = self.child_of(at, character)
        while child == 0 and at:
            at = self.nodes[at].fallback
            child = self.child_of(at, character)
        return child


cdef class StopStrings:
    """The text of one sequence against a table. `include_stop` leaves the stop string in it. `held` is what was held back:
    the longest end of the text that a stop string begins with."""

    cdef StopTable table
    cdef int32_t at
    cdef bint includes
    cdef readonly str held
    cdef readonly object found      # the stop string, or None

    def __init__(self, StopTable table not None, *, bint include_stop=False) -> None:
        self.table, self.includes = table, include_stop
        self.at, self.held, self.found = 0, "", None

    def feed(self, str text not None) -> str:
        """Take `text` and return the part that may be passed on. After `found` is set nothing more may be fed."""
        cdef Py_ssize_t i, before = len(self.held), keep, begins
        cdef int32_t at = self.at, end
        whole = self.held + text if before else text
        for i in range(before, len(whole)):
            at = self.table.step(at, PyUnicode_READ_CHAR(whole, i))
            end = self.table.nodes[at].ends
            if end:
                begins = i + 1 - self.table.nodes[end].depth
                self.held, self.found = "", whole[begins : i + 1]
                return whole[: i + 1 if self.includes else begins]
        self.at = at
        keep = self.table.nodes[at].depth
        if keep == 0:
            self.held = ""
            return whole
        self.held = whole[len(whole) - keep :]
        return whole[: len(whole) - keep]

    def flush(self) -> str:
        """Return the text that was held back: no more comes."""
        held, self.held, self.at = self.held, "", 0
        return held
