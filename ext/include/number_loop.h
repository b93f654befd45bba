// The hurried reader of rows of numbers. number_run.h includes this twice, each time in a namespace
// of its own: once for any machine and once, with READ_DIGITS16 the vector verb, for AVX2 and BMI2.
// So it has no include guard.
//
// A hurried verb gets a number's first byte and HURRY_BYTES readable bytes behind it, and returns the
// byte behind the number, or null when it is not sure: then the careful reader decides.

// Digits, and where the decimal point fell: value * 10**power.
struct Decimal {
    uint64_t value;
    int power;
};

// "0." and "7." are by far the most common beginnings and cost a guess that comes true.
static inline const uint8_t *hurry_whole(const uint8_t *at, Decimal *d)
{
    if ((uint8_t)(*at - '0') < 10 && (uint8_t)(at[1] - '0') >= 10) {
        d->value = *at - '0';
        return at + 1;
    }
    int count = count_digits8(load8(at));
    if (count == 0 || count == 8 || *at == '0')
        return nullptr;
    d->value = value_of_digits8(load8(at), count);
    return at + count;
}

// Behind the point: up to 16 digits at once, then up to 7 more while 64 bits hold them all.
static inline const uint8_t *hurry_fraction(const uint8_t *at, Decimal *d)
{
    uint64_t value;
    int count = READ_DIGITS16(at, &value);
    if (count == 0)
        return nullptr;
    if (count < 16) {
        if (d->value >= TENS[19 - count])
            return nullptr;
        d->value = d->value * TENS[count] + value;
        d->power = -count;
        return at + count;
    }
    uint64_t word = load8(at + 16);
    int more = count_digits8(word);
    if (more == 8 || d->value >= 1000)
        return nullptr;
    value += d->value * TENS[16];
    if (value >= TENS[19 - more])
        return nullptr;
    d->value = value * TENS[more] + value_of_digits8(word, more);
    d->power = -16 - more;
    return at + 16 + more;
}

static inline const uint8_t *hurry_exponent(const uint8_t *at, Decimal *d)
{
    bool negative = at[1] == '-';
    at += 1 + (negative || at[1] == '+');
    uint64_t word = load8(at);
    int count = count_digits8(word);
    if (count == 0 || count > 4)
        return nullptr;
    int size = (int)value_of_digits8(word, count);
    d->power += negative ? -size : size;
    return at + count;
}

// Both below are right or not sure. Up to 2**53 and 10**22 are doubles exactly, so one division
// rounds once; past 2**53 the quotient is off by at most 2 units, which a float cannot see unless
// it lies that close to the middle between two of them. That is the first question, for its answer
// can be guessed; whether 16 or 17 digits exceed 2**53 cannot, so doubles of that length are not
// even asked (both measured: a quarter of the time of long numbers).
static inline bool nearest_of(const Decimal &d, double *out)
{
    if (d.value < TENS[15] && d.power <= 0 && d.power >= -22)
        *out = (double)(int64_t)d.value / EXACT_TENS[-d.power];
    else
        *out = decimal_to_double(d.value, d.power);
    return !isinf(*out);
}

static inline bool nearest_of(const Decimal &d, float *out)
{
    double value;
    uint64_t bits;
    if (d.power <= 0 && d.power >= -22 && !(d.value >> 63)) {
        value = (double)(int64_t)d.value / EXACT_TENS[-d.power];
        memcpy(&bits, &value, sizeof bits);
        if (((bits & 0x1fffffff) - 0x10000000u + 4) > 8 || d.value <= (uint64_t)1 << 53) {
            *out = (float)value;
            return true;
        }
    }
    value = decimal_to_double(d.value, d.power);
    *out = (float)value;
    return !isinf(value);
}

// A number up to its exponent. Null too for -0, an integer that loses its sign.
static inline const uint8_t *hurry_decimal(const uint8_t *at, Decimal *d)
{
#ifdef READ_DECIMAL16
    bool no_point;
    int whole;
    int length = at[1] == '.' ? 0 : READ_DECIMAL16(at, &d->value, &whole, &no_point);
    if (length) {
        d->power = whole - length + !no_point;
        bool bad = whole == 0 || (*at == '0' && whole > 1) || (no_point ? d->value == 0 : d->power == 0);
        return bad ? nullptr : at + length;
    }
#endif
    at = hurry_whole(at, d);
    if (!at || *at == '.')
        return at ? hurry_fraction(at + 1, d) : nullptr;
    return d->value ? at : nullptr;
}

template <typename T>
static inline const uint8_t *hurry_real(const uint8_t *at, T *out)
{
    typedef std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t> Bits;
    Decimal d = {0, 0};
    T value;
    Bits bits;
    bool negative = *at == '-';     // signs are a coin toss in real data: no branch on them
    at = hurry_decimal(at + negative, &d);
    if (!at)
        return nullptr;
    if ((*at | 0x20) == 'e') {
        at = hurry_exponent(at, &d);
        if (!at)
            return nullptr;
    }
    if (!nearest_of(d, &value))
        return nullptr;
    memcpy(&bits, &value, sizeof bits);
    bits |= (Bits)negative << (8 * sizeof bits - 1);
    memcpy(out, &bits, sizeof bits);
    return at;
}

template <typename T>
static inline const uint8_t *hurry_integer(const uint8_t *at, T *out)
{
    typedef std::conditional_t<(sizeof(T) < 4), int32_t, T> Taken;
    bool negative = *at == '-';
    at += negative;
    uint64_t word = load8(at), value;
    int count = count_digits8(word);
    if (count < 8)
        value = value_of_digits8(word, count);
    else
        count = READ_DIGITS16(at, &value);
    if (count == 0 || count == 16 || (*at == '0' && count > 1))
        return nullptr;
    at += count;
    if (*at == '.' || (*at | 0x20) == 'e' || value > (uint64_t)std::numeric_limits<Taken>::max() ||
        (negative && std::is_unsigned_v<Taken>))
        return nullptr;
    T stored = (T)(negative ? 0 - value : value);
    memcpy(out, &stored, sizeof stored);
    return at;
}

template <typename T>
static inline const uint8_t *hurry_item(const uint8_t *at, T *out)
{
    if constexpr (std::is_same_v<T, bool>)
        return nullptr;
    else if constexpr (std::is_floating_point_v<T>)
        return hurry_real(at, out);
    else
        return hurry_integer(at, out);
}

// Reads up to `room` items; `*at` is left behind the last one and the spaces after it, or on the
// byte that shows the fault. `*count` items were stored, also when there is a fault.
template <typename T>
static JsonFault read_run(const uint8_t **at, const uint8_t *end, T *out, int64_t room, int64_t *count)
{
    const uint8_t *next = *at;
    int64_t n = 0;
    JsonFault fault = JSON_OK;
    while (n < room) {
        const uint8_t *past = end - next >= HURRY_BYTES ? hurry_item(next, out + n) : nullptr;
        if (!past) {
            past = next;
            fault = read_item(&past, end, out + n);
        }
        *at = past;
        if (fault)
            break;
        n++;
        if (past != end && *past != ',')
            *at = past = skip_spaces(past, end);
        if (past == end || *past != ',')
            break;
        next = past + 1;
        if (next != end && *next == ' ')
            next++;
        if (next == end || *next <= ' ')
            next = skip_spaces(next, end);
    }
    *count = n;
    return fault;
}
