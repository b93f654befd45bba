// The words for a fault of JSON text, as clients of RapidJSON know them.
#pragma once
#include "json_fault.h"

static inline const char *json_reason(int fault)
{
    switch (fault) {
    case JSON_EMPTY: return "The document is empty.";
    case JSON_INVALID_VALUE: return "Invalid value.";
    case JSON_MISSING_NAME: return "Missing a name for object member.";
    case JSON_MISSING_COLON: return "Missing a colon after a name of object member.";
    case JSON_MISSING_COMMA_OR_BRACE: return "Missing a comma or '}' after an object member.";
    case JSON_MISSING_COMMA_OR_BRACKET: return "Missing a comma or ']' after an array element.";
    case JSON_BAD_HEX: return "Incorrect hex digit after \\u escape in string.";
    case JSON_BAD_SURROGATE: return "The surrogate pair in string is invalid.";
    case JSON_BAD_ESCAPE: return "Invalid escape character in string.";
    case JSON_MISSING_QUOTE: return "Missing a closing quotation mark in string.";
    case JSON_NUMBER_TOO_BIG: return "Number too big to be stored in double.";
    case JSON_MISSING_FRACTION: return "Miss fraction part in number.";
    case JSON_MISSING_EXPONENT: return "Miss exponent in number.";
    case JSON_TOO_DEEP: return "Nesting too deep.";
    case JSON_TOO_MANY: return "Too many values.";
    default: return "Invalid value.";
    }
}
