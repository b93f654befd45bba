// The hurried reader of rows of numbers. number_run.h includes this twice, each time in a namespace
// of its own: once for any machine and once, with READ_DIGITS16 the vector verb and PLAIN_RUNS, for AVX2 and
// BMI2. So it has no include guard.
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

#ifdef PLAIN_RUNS
// Runs of numbers without exponents, each up to a comma within 32 bytes. Two numbers hang together by the place of that
// comma alone, so a processor works at several of them at once, if nothing else ties them and it guesses no branch wrong:
// all branches here are for what clients do not send. No comparison's result is kept, for compilers write those into
// a byte of a register whose other bytes are the number before (measured: that alone doubles the time).

// `whole` of the `digits` stand before the point; `at` is behind the sign.
struct Plain {
    const uint8_t *at;
    uint32_t negative, whole, digits;
};

// Whether the `length` bytes before a comma are a decimal or an integer.
static inline bool find_plain(const uint8_t *at, uint32_t length, Plain *f)
{
    uint32_t first = *at;
    if (first < '-')
        return false;
    f->negative = (first - '.') >> 31;      // '-' alone is below '.' now
    f->at = at += f->negative;
    length -= f->negative;
    uint32_t others = mark_others32(at);
    f->whole = _tzcnt_u32(others);
    f->digits = length - ((f->whole - length) >> 31);
    uint32_t most = *at == '0' ? 0 : 15;    // behind the first digit
    return !_blsr_u32(_bzhi_u32(others, length)) && (at[f->whole] | 2) == '.' && f->whole - 1 <= most &&
        length - f->whole != 1;
}

// The least that the first 16 digits must be, by digits and sign: of more digits 12 must count, and -0 is an integer
// that loses its sign.
struct LeastValues {
    uint64_t of[32][2];
    constexpr LeastValues() : of{}
    {
        for (int digits = 17; digits < 32; digits++)
            of[digits][0] = of[digits][1] = 100000000000u;
        of[1][1] = 1;
    }
};
static constexpr LeastValues LEAST;

// The value is the digits times 10**(whole - 16), with the sign. Four roundings and the digits behind the 16th are less than 2**17 units of the
// double: a float cannot see them unless the middle between two of them is as near.
static inline bool read_plain(const uint8_t *at, uint32_t length, float *out)
{
    Plain f;
    uint64_t bits;
    if (!find_plain(at, length, &f))
        return false;
    uint64_t value = read_decimal16(f.at, f.whole, f.digits);
    if (value < LEAST.of[f.digits][f.negative])
        return false;
    double real = (double)(int64_t)value * SCALES[f.whole][f.negative];
    memcpy(&bits, &real, sizeof bits);
    if ((bits & 0x1fffffff) - (0x10000000u - (1u << 17)) <= 1u << 18)
        return false;
    float rounded = (float)real;
    memcpy(out, &rounded, sizeof rounded);
    return true;
}

// Up to 15 digits with zeros behind them are a double exactly, so one division rounds once.
static inline bool read_plain(const uint8_t *at, uint32_t length, double *out)
{
    Plain f;
    uint64_t bits;
    double real;
    if (!find_plain(at, length, &f))
        return false;
    uint64_t value = read_decimal16(f.at, f.whole, f.digits);
    if (f.digits < 16) {
        if (value < LEAST.of[f.digits][f.negative])
            return false;
        real = (double)(int64_t)value / EXACT_TENS[16 - f.whole];
    } else {
        uint32_t more = f.digits - 16;
        if (more > 7 || value >= TENS[19 - more])
            return false;
        value = value * TENS[more] + value_of_digits8(load8(f.at + 17), more);
        real = decimal_to_double(value, (int64_t)f.whole - f.digits);
    }
    memcpy(&bits, &real, sizeof bits);
    bits |= (uint64_t)f.negative << 63;
    memcpy(out, &bits, sizeof bits);
    return true;
}

template <typename T>
static inline bool read_plain(const uint8_t *at, uint32_t length, T *out)
{
    return hurry_integer(at, out) == at + length;
}

// Reads such numbers, `room` at most, and returns how many; `*at` is left behind the comma of the last one, and behind
// one space.
template <typename T>
static inline int64_t read_plain_run(const uint8_t **at, const uint8_t *end, T *out, int64_t room)
{
    const uint8_t *next = *at;
    int64_t n = 0;
    for (; n < room && end - next >= HURRY_BYTES; n++) {
        uint32_t commas = mark_commas32(next);
        uint32_t length = _tzcnt_u32(commas);
        if (!commas || !read_plain(next, length, out + n))
            break;
        next += length + 1;
        if (*next == ' ') {
            next++;
            asm("" : "+r"(next));   // stays a branch, which is guessed: a sum would wait for the byte
        }
    }
    *at = next;
    return n;
}
#endif

// Reads up to `room` items; `*at` is left behind the last one and the spaces after it, or on the
// byte that shows the fault. `*count` items were stored, also when there is a fault.
template <typename T>
static JsonFault read_run(const uint8_t **at, const uint8_t *end, T *out, int64_t room, int64_t *count)
{
    const uint8_t *next = *at;
    int64_t n = 0;
    JsonFault fault = JSON_OK;
    while (n < room) {
#ifdef PLAIN_RUNS
        if constexpr (!std::is_same_v<T, bool>) {
            int64_t taken = read_plain_run(&next, end, out + n, room - n - 1);
            if (taken && *next <= ' ')
                next = skip_spaces(next, end);
            n += taken;
        }
#endif
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
