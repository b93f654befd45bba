# The request that is being started, and whose it is: noted by what calls its endpoint or its gRPC method, and found by
# Lifecycle.start, for which each attribute of an exchange costs 150 instructions. It lies in fast_path, which gives it out
# as a capsule. Both pointers are borrowed: who notes them keeps both alive, and takes them back when the call returns.

from cpython.object cimport PyObject

cdef extern from *:
    """
    #define STARTING_CAPSULE "fastserve._ext.fast_path._STARTING"
    typedef struct {
        PyObject *exchange;     /* NULL: none that is known to be anybody's */
        PyObject *account;
    } Starting;
    """
    ctypedef struct Starting:
        PyObject* exchange
        PyObject* account
    const char* STARTING_CAPSULE
