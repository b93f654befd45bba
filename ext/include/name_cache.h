// Short ASCII names as Python strings made once: every request brings the same few.
//
// A string of the cache also knows its hash already, which the look-ups to come would compute. One
// slot a hash, the newest name stays; a flood of other names costs a miss each and no memory.
#pragma once
#include <Python.h>
#include <stdint.h>
#include <string.h>

static constexpr size_t NAME_BYTES = 32;        // longer ones are rare
static constexpr unsigned NAME_SLOTS = 512;

static inline unsigned slot_of_name(const uint8_t *name, size_t size)
{
    uint64_t mix = size;
    for (; size >= 8; name += 8, size -= 8) {
        uint64_t word;
        memcpy(&word, name, 8);
        mix = (mix ^ word) * 0x9e3779b97f4a7c15;
        mix ^= mix >> 32;
    }
    for (; size; name++, size--)
        mix = (mix ^ *name) * 0x9e3779b97f4a7c15;
    return (unsigned)(mix >> 40) % NAME_SLOTS;
}

static inline bool is_name(PyObject *text, const uint8_t *name, size_t size)
{
    return text && (size_t)PyUnicode_GET_LENGTH(text) == size
           && memcmp(PyUnicode_1BYTE_DATA(text), name, size) == 0;
}

// A new reference, or NULL with UnicodeDecodeError set. The caller holds the GIL.
static inline PyObject *make_name(const uint8_t *name, size_t size)
{
    static PyObject *slots[NAME_SLOTS];
    if (size > NAME_BYTES)
        return PyUnicode_DecodeUTF8((const char *)name, (Py_ssize_t)size, NULL);
    PyObject **slot = &slots[slot_of_name(name, size)];
    if (is_name(*slot, name, size)) {
        Py_INCREF(*slot);
        return *slot;
    }
    PyObject *made = PyUnicode_DecodeUTF8((const char *)name, (Py_ssize_t)size, NULL);
    if (made && PyUnicode_IS_ASCII(made)) {
        Py_INCREF(made);
        Py_XSETREF(*slot, made);
    }
    return made;
}
