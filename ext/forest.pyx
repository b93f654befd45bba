"""Ensembles of trees evaluated as their libraries do, to the last bit, in a tenth to a hundredth of the libraries' time.

    forest = Forest(30, [0.0, 0.0], narrow=True, divisor=100)      # 30 features, two outputs that begin at 0
    forest.add(feature, threshold, left, right, missing_left, values)    # one tree, in the order of the sums
    out = np.empty((len(rows), 2))
    forest.predict(rows, out)                   # False: it does not take these rows

A row goes left at a split where its value is at most the threshold (`strict`: below it), and where it has none (NaN) as
`missing_left` says. An output begins at its base, the leaves' values are added one tree after the other, then it is divided
by `divisor` (0: not) and goes through a link. `narrow`: rows are compared as float32, into which float64 is rounded first;
`narrow_sums`: values, bases, sums and links are float32.

A forest that is full is used by any number of threads. predict() gives the interpreter's lock up.
"""

from libc.stdint cimport int32_t, int64_t, uint8_t
from libcpp cimport bool as flag
from libcpp.memory cimport unique_ptr
from libcpp.vector cimport vector

cdef extern from "forest_walk.h" namespace "forest" nogil:
    cdef const int64_t WIDTH_MAX, OUTPUTS_MAX
    cdef enum Link "forest::Link":
        LINK_IDENTITY "forest::IDENTITY"
        LINK_SIGMOID "forest::SIGMOID"
        LINK_SOFTMAX "forest::SOFTMAX"
        LINK_EXPONENTIAL "forest::EXPONENTIAL"
        LINK_BOUNDED_SIGMOID "forest::BOUNDED_SIGMOID"

    cdef struct Arrays:
        int64_t nodes
        const int32_t* feature
        const int32_t* left
        const int32_t* right
        const double* threshold
        const uint8_t* missing_left
        const double* values
        int64_t wide

    cdef struct Reading:
        flag takes_missing, takes_infinite, tiny_is_missing
        double tiny

    cdef cppclass Trees:
        void add(const Arrays& tree, int64_t output) except +
        size_t nodes()
        flag run(const void* rows, flag rows_are_double, long count, void* out, const Reading& how, int link) except +

    cdef cppclass Ensemble[T, Sum, Strict](Trees):
        pass

cdef extern from *:
    """
    template <class T, class Sum>
    static forest::Trees* make_forest(
        long width, const std::vector<double>& base, double divisor, double scale, bool base_last, bool strict
    ) {
        if (strict) return new forest::Ensemble<T, Sum, true>(width, base, divisor, scale, base_last);
        return new forest::Ensemble<T, Sum, false>(width, base, divisor, scale, base_last);
    }
    """
    Trees* make_float_float "make_forest<float, float>"(long, const vector[double]&, double, double, flag, flag) except +
    Trees* make_float_double "make_forest<float, double>"(long, const vector[double]&, double, double, flag, flag) except +
    Trees* make_double_double "make_forest<double, double>"(long, const vector[double]&, double, double, flag, flag) except +

IDENTITY, SIGMOID, SOFTMAX, EXPONENTIAL = (
    <int>LINK_IDENTITY, <int>LINK_SIGMOID, <int>LINK_SOFTMAX, <int>LINK_EXPONENTIAL
)
BOUNDED_SIGMOID = <int>LINK_BOUNDED_SIGMOID     # whose argument is at least -88.7


cdef class Forest:
    """Trees and how their values become outputs. `base` has the first value of each output.

    `base_last`: outputs begin at 0, and the base is added in float64 behind the division. `tiny`: values of at most that size are read as 0, with `tiny_is_missing` as missing; below 0: none are. `scale` is
    what a sigmoid multiplies its argument with. Raises ValueError.
    """

    cdef readonly long width, outputs
    cdef readonly bint narrow, narrow_sums
    cdef public bint takes_missing, takes_infinite
    cdef double tiny
    cdef bint tiny_is_missing
    cdef unique_ptr[Trees] trees

    def __init__(
        self, long width, base, *, bint narrow=False, bint narrow_sums=False, bint strict=False, double divisor=0.0,
        bint base_last=False, double scale=1.0, double tiny=-1.0, bint tiny_is_missing=False
    ) -> None:
        cdef vector[double] first = base
        if not 0 < width <= WIDTH_MAX or not 0 < <int64_t>first.size() <= OUTPUTS_MAX:
            raise ValueError(f"width, base: given {width}, {first.size()} values, allowed: from 1")
        if narrow_sums and not narrow:
            raise ValueError("narrow_sums: allowed: of narrow rows")
        self.width, self.outputs, self.narrow, self.narrow_sums = width, first.size(), narrow, narrow_sums
        self.takes_missing = self.takes_infinite = True
        self.tiny, self.tiny_is_missing = tiny, tiny_is_missing
        if narrow_sums:
            self.trees.reset(make_float_float(width, first, divisor, scale, base_last, strict))
        elif narrow:
            self.trees.reset(make_float_double(width, first, divisor, scale, base_last, strict))
        else:
            self.trees.reset(make_double_double(width, first, divisor, scale, base_last, strict))

    @property
    def nodes(self) -> int:
        """How many nodes its trees have."""
        return self.trees.get().nodes()

    def add(
        self, const int32_t[::1] feature, const double[::1] threshold, const int32_t[::1] left, const int32_t[::1] right,
        const uint8_t[::1] missing_left, const double[:, ::1] values, *, int64_t output=0
    ) -> None:
        """Add a tree. Node 0 is its root; children are numbers of nodes, and a leaf's left one is below 0. `values`
        [nodes, outputs], or [nodes, 1]: those of the one `output`. Raises ValueError for arrays that are no tree of the
        forest's features."""
        cdef Arrays tree
        cdef Py_ssize_t nodes = feature.shape[0]
        for other in (threshold.shape[0], left.shape[0], right.shape[0], missing_left.shape[0], values.shape[0]):
            if other != nodes:
                raise ValueError(f"arrays of a tree: given {nodes} and {other} nodes, allowed: as many")
        if nodes < 1 or values.shape[1] < 1:
            raise ValueError("arrays of a tree: given no node or no value, allowed: from 1")
        tree.nodes, tree.wide = nodes, values.shape[1]
        tree.feature, tree.threshold, tree.left, tree.right = &feature[0], &threshold[0], &left[0], &right[0]
        tree.missing_left, tree.values = &missing_left[0], &values[0, 0]
        self.trees.get().add(tree, output)

    def predict(self, rows, out, int link=0) -> bool:
        """Write the outputs of rows [n, width], float32 or float64, to `out` [n, outputs] of the sums' type. False where
        some value is missing or infinite, and the forest does not take that: `out` has no meaning then. Raises
        ValueError, BufferError."""
        if not LINK_IDENTITY <= link <= LINK_BOUNDED_SIGMOID:
            raise ValueError(f"link: given {link}, allowed: {LINK_IDENTITY} to {LINK_BOUNDED_SIGMOID}")
        if not self.trees.get().nodes():
            raise ValueError("the forest has no tree")
        cdef const float[:, ::1] narrow_rows
        cdef const double[:, ::1] wide_rows
        cdef float[:, ::1] narrow_out
        cdef double[:, ::1] wide_out
        cdef const void* source = NULL
        cdef void* target = NULL
        cdef bint is_double = memoryview(rows).format == "d"
        cdef long count
        if is_double:
            wide_rows = rows
            count, width = wide_rows.shape[0], wide_rows.shape[1]
            if count and width:
                source = &wide_rows[0, 0]
        else:
            narrow_rows = rows
            count, width = narrow_rows.shape[0], narrow_rows.shape[1]
            if count and width:
                source = &narrow_rows[0, 0]
        if self.narrow_sums:
            narrow_out = out
            given, outputs = narrow_out.shape[0], narrow_out.shape[1]
            if given and outputs:
                target = &narrow_out[0, 0]
        else:
            wide_out = out
            given, outputs = wide_out.shape[0], wide_out.shape[1]
            if given and outputs:
                target = &wide_out[0, 0]
        if width != self.width or outputs != self.outputs or given != count:
            raise ValueError(
                f"rows, out: given {count} x {width} and {given} x {outputs}, allowed: n x {self.width} and "
                f"n x {self.outputs}"
            )
        if not count:
            return True
        cdef Reading how
        how.takes_missing, how.takes_infinite = self.takes_missing, self.takes_infinite
        how.tiny, how.tiny_is_missing = self.tiny, self.tiny_is_missing
        cdef const Trees* trees = self.trees.get()
        cdef flag taken
        with nogil:
            taken = (<Trees*>trees).run(source, is_double, count, target, how, link)
        return taken
