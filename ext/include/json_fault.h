// What can be wrong with a JSON body, as numbers that cross the GIL-free line.
//
// 1..31 are faults of the text itself (any reader of JSON reports them); 32.. are faults of a
// predict body that is good JSON. json_reason.h holds the words for the first group; the
// words for the second belong to the dialect.
#pragma once

enum JsonFault : int {
    JSON_OK = 0,

    JSON_EMPTY = 1,
    JSON_INVALID_VALUE,
    JSON_MISSING_NAME,
    JSON_MISSING_COLON,
    JSON_MISSING_COMMA_OR_BRACE,
    JSON_MISSING_COMMA_OR_BRACKET,
    JSON_BAD_HEX,
    JSON_BAD_SURROGATE,
    JSON_BAD_ESCAPE,
    JSON_MISSING_QUOTE,
    JSON_NUMBER_TOO_BIG,
    JSON_MISSING_FRACTION,
    JSON_MISSING_EXPONENT,
    JSON_TOO_DEEP,
    JSON_NO_MEMORY,
    JSON_TOO_MANY,

    BODY_NOT_OBJECT = 32,
    BODY_SIGNATURE_NOT_STRING,
    BODY_OTHER_SIGNATURE,
    BODY_NO_INPUTS,         // the signature itself has none
    BODY_BOTH_FORMATS,
    BODY_NO_FORMAT,
    BODY_ROWS_NOT_LIST,
    BODY_NO_ROWS,
    BODY_NOT_NAMED,         // a plain value where several inputs need names
    BODY_MIXED_ROWS,        // objects and plain values in one list of rows
    BODY_UNKNOWN_INPUT,
    BODY_MISSING_INPUT,
    BODY_RAGGED,
    BODY_WRONG_TYPE,
    BODY_UNSUPPORTED_DTYPE,
    BODY_BAD_BASE64,

    BODY_OTHER_FORM = 64,   // read_into only: good or bad, but not the form that read_into is for
};
