// Ensembles of binary trees over rows of numbers, evaluated as the libraries that train them do, to the last bit.
//
//   rows -> a block of them, converted and looked through -> each tree over the whole block -> sums in the order of trees
//
// A small tree makes all its comparisons, for 16 rows at a time (8 of double): the leaves of a tree are bits, and a row that
// goes right at a split loses those on its left side; the lowest bit that is left is its leaf ("QuickScorer"). That has no
// branch and reads columns of the block. A large tree is walked, and so is one row: eight walks are under way at a time, since
// each waits for memory at every step, eight rows of one tree or eight trees of one row. A leaf leads to itself, so walks of
// different lengths need no branch either. Sums are added up one tree after the other: their last bit depends on it.
#pragma once
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <vector>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__)
#define FOR_EACH_ISA __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FOR_EACH_ISA
#endif

namespace forest {

constexpr int LANES = 8;           // walks at a time
constexpr long LEAVES_MAX = 64;    // of a small tree
constexpr long FEW_ROWS = 4;       // fewer are walked: comparisons of 16 rows would be for nothing
constexpr uint32_t SPLIT = 1u << 31, MISSING_RIGHT = 1u << 30, FEATURE = MISSING_RIGHT - 1;
constexpr size_t BLOCK_BYTES = 32768; // of rows: they stay in the first cache beside a tree
constexpr long BLOCK_ROWS = 128;
constexpr size_t MANY_NODES = 1 << 17; // more leave the caches before their next block: blocks of four times the rows
constexpr int64_t NODES_MAX = 1ll << 31, WIDTH_MAX = 1 << 24, OUTPUTS_MAX = 1 << 16;

enum Link : int { IDENTITY, SIGMOID, SOFTMAX, EXPONENTIAL, BOUNDED_SIGMOID };

// One tree as its library has it: children by their numbers, -1 for those of a leaf; values of `wide` numbers a node.
struct Arrays {
    int64_t nodes;
    const int32_t *feature, *left, *right;
    const double* threshold;
    const uint8_t* missing_left;
    const double* values;
    int64_t wide;
};

// How values of rows are read: whether some are refused, and those that count as 0 or as missing.
struct Reading {
    bool takes_missing, takes_infinite, tiny_is_missing;
    double tiny; // values of at most this size are 0, or missing; below 0: none are
};

struct Trees {
    virtual ~Trees() = default;
    virtual void add(const Arrays& tree, int64_t output) = 0;
    virtual size_t nodes() const = 0;
    // Whether the rows are taken; if not, `out` has no meaning.
    virtual bool run(const void* rows, bool rows_are_double, long count, void* out, const Reading& how, int link) const = 0;
};

template <class T> struct Node {
    T threshold;
    uint32_t left, feature; // `feature` with the flags
};

struct Tree {
    uint32_t root, output, wide, leaves, values; // `values`: the place of the first leaf's; of another output behind all leaves
    uint32_t cut, first_cuts, last_cuts; // of a small tree: those that have the first word of leaves, and the second
    bool is_small;
};

// The comparisons of a vector of rows, and the leaves as bits of a word as wide.
template <class T> struct Lanes;
template <> struct Lanes<float> {
    typedef float Numbers __attribute__((vector_size(64), aligned(4), may_alias));
    typedef int32_t Words __attribute__((vector_size(64)));
    typedef uint32_t Word;
    static constexpr int count = 16;
};
template <> struct Lanes<double> {
    typedef double Numbers __attribute__((vector_size(64), aligned(8), may_alias));
    typedef int64_t Words __attribute__((vector_size(64)));
    typedef uint64_t Word;
    static constexpr int count = 8;
};

// A split of a small tree. `kept`: the leaves that are not on its left side.
template <class T> struct Cut {
    T threshold;
    uint32_t feature;
    typename Lanes<T>::Word kept;
    bool missing_left;
};

template <class T, class Sum> struct Small {
    const Tree *from, *to;
    const Cut<T>* cuts;
    const Sum* values;
    const T* columns; // [feature][row], `stride` values from a feature to the next
    long stride;
    Sum* sums; // [output][row], `stride` values from an output to the next
};

template <class T, bool Strict, bool Missing>
[[gnu::always_inline]] inline void cut_leaves(const Cut<T>* cut, uint32_t many, const T* x, long stride, typename Lanes<T>::Word* out) {
    using L = Lanes<T>;
    typename L::Words live = ~typename L::Words{};
    for (; many; --many, ++cut) {
        const typename L::Numbers value = *reinterpret_cast<const typename L::Numbers*>(x + cut->feature * stride);
        typename L::Words left = Strict ? value < cut->threshold : value <= cut->threshold;
        if (Missing && cut->missing_left) left = Strict ? ~(value >= cut->threshold) : ~(value > cut->threshold);
        live &= left | typename L::Word(cut->kept);
    }
    __builtin_memcpy(out, &live, sizeof live);
}

template <class T, class Sum, bool Strict, bool Missing>
[[gnu::always_inline]] inline void sum_small_trees(const Small<T, Sum>& part) {
    using L = Lanes<T>;
    using Word = typename L::Word;
    for (const Tree* tree = part.from; tree != part.to; ++tree) {
        const Cut<T>* cuts = part.cuts + tree->cut;
        for (long first = 0; first < part.stride; first += L::count) {
            Word low[L::count], high[L::count];
            uint32_t leaf[L::count];
            const T* x = part.columns + first;
            cut_leaves<T, Strict, Missing>(cuts, tree->first_cuts, x, part.stride, low);
            if (tree->leaves > 8 * sizeof(Word)) { // the last leaf is on no left side, so the second word may have no cut
                cut_leaves<T, Strict, Missing>(cuts + tree->first_cuts, tree->last_cuts, x, part.stride, high);
                for (int i = 0; i < L::count; ++i) leaf[i] = __builtin_ctzll(low[i] | uint64_t(high[i]) << 32);
            } else {
                for (int i = 0; i < L::count; ++i) leaf[i] = __builtin_ctzll(low[i]);
            }
            const Sum* values = part.values + tree->values;
            Sum* sums = part.sums + tree->output * part.stride + first;
            for (uint32_t k = 0; k < tree->wide; ++k, values += tree->leaves, sums += part.stride)
                for (int i = 0; i < L::count; ++i) sums[i] += values[leaf[i]];
        }
    }
}

template <class T, class Sum> [[gnu::always_inline]] inline void sum_small(const Small<T, Sum>& part, bool strict, bool missing) {
    if (strict && missing) sum_small_trees<T, Sum, true, true>(part);
    else if (strict) sum_small_trees<T, Sum, true, false>(part);
    else if (missing) sum_small_trees<T, Sum, false, true>(part);
    else sum_small_trees<T, Sum, false, false>(part);
}

FOR_EACH_ISA static void sum_each(const Small<float, float>& part, bool strict, bool missing) { sum_small(part, strict, missing); }
FOR_EACH_ISA static void sum_each(const Small<float, double>& part, bool strict, bool missing) { sum_small(part, strict, missing); }
FOR_EACH_ISA static void sum_each(const Small<double, double>& part, bool strict, bool missing) { sum_small(part, strict, missing); }

// T: the type in which rows and thresholds are compared; Sum: of values and sums. Strict: left is below the threshold,
// otherwise at most the threshold.
template <class T, class Sum, bool Strict> struct Ensemble final : Trees {
    long width, outputs;
    std::vector<double> base;
    Sum divisor, scale;
    bool base_last; // behind the division, in double
    std::vector<Node<T>> split;
    std::vector<uint32_t> leaf; // by node: its place among the values
    std::vector<Sum> values;
    std::vector<Tree> trees;
    std::vector<Cut<T>> cuts;
    bool has_small = false, has_large = false;

    Ensemble(long width, const std::vector<double>& base, double divisor, double scale, bool base_last)
        : width(width), outputs(long(base.size())), base(base), divisor(Sum(divisor)), scale(Sum(scale)), base_last(base_last) {}

    size_t nodes() const override { return split.size(); }

    // The threshold in a narrower T, by which every value of T goes the same way: the next one below or above.
    static T narrowed(double threshold) {
        constexpr T infinity = std::numeric_limits<T>::infinity();
        const T near = T(threshold);
        if (!Strict && double(near) > threshold) return std::nextafter(near, -infinity);
        if (Strict && double(near) < threshold) return std::nextafter(near, infinity);
        return near;
    }

    void add(const Arrays& tree, int64_t output) override {
        if (tree.nodes < 1 || int64_t(split.size()) + tree.nodes > NODES_MAX) throw std::invalid_argument("nodes");
        if (tree.wide != 1 && tree.wide != outputs) throw std::invalid_argument("values");
        if (output < 0 || output + tree.wide > outputs) throw std::invalid_argument("output");
        if (values.size() + size_t(tree.nodes) * size_t(tree.wide) > NODES_MAX) throw std::invalid_argument("values");
        const uint32_t root = uint32_t(split.size());
        std::vector<int32_t> of; // the tree's own number of each node from `root` on: children behind their parents
        of.reserve(tree.nodes);
        of.push_back(0);
        for (size_t at = 0; at < of.size(); ++at) {
            const int32_t own = of[at];
            const int32_t left = tree.left[own], right = tree.right[own];
            if (left < 0) {
                split.push_back({T(0), uint32_t(root + at), 0});
                continue;
            }
            const int64_t feature = tree.feature[own];
            // Each node has one parent, so there are never more than the tree has.
            const bool fits = left < tree.nodes && right >= 0 && right < tree.nodes && int64_t(of.size()) + 2 <= tree.nodes;
            if (!fits || feature < 0 || feature >= width || tree.threshold[own] != tree.threshold[own]) {
                split.resize(root);
                throw std::invalid_argument("children, features, thresholds");
            }
            const uint32_t missing = tree.missing_left[own] ? 0 : MISSING_RIGHT;
            split.push_back({narrowed(tree.threshold[own]), uint32_t(root + of.size()), uint32_t(feature) | SPLIT | missing});
            of.push_back(left), of.push_back(right);
        }
        number_leaves(tree, of, root, uint32_t(output));
    }

    // Leaves from left to right: their values, and the cuts of a small tree.
    void number_leaves(const Arrays& tree, const std::vector<int32_t>& of, uint32_t root, uint32_t output) {
        const size_t many = of.size();
        std::vector<uint32_t> first(many), leaves(many, 1);
        for (size_t at = many; at-- > 0;)
            if (const Node<T>& node = split[root + at]; node.feature & SPLIT)
                leaves[at] = leaves[node.left - root] + leaves[node.left + 1 - root];
        const uint32_t wide = uint32_t(tree.wide), begin = uint32_t(values.size());
        values.resize(begin + size_t(leaves[0]) * wide);
        leaf.resize(root + many);
        for (size_t at = 0; at < many; ++at) {
            const Node<T>& node = split[root + at];
            if (node.feature & SPLIT) {
                first[node.left - root] = first[at];
                first[node.left + 1 - root] = first[at] + leaves[node.left - root];
                continue;
            }
            leaf[root + at] = begin + first[at];
            for (uint32_t k = 0; k < wide; ++k)
                values[leaf[root + at] + k * leaves[0]] = Sum(tree.values[int64_t(of[at]) * wide + k]);
        }
        Tree made = {root, output, wide, leaves[0], begin, uint32_t(cuts.size()), 0, 0, leaves[0] <= LEAVES_MAX};
        using Word = typename Lanes<T>::Word;
        constexpr uint32_t bits = 8 * sizeof(Word);
        for (uint32_t word = 0; made.is_small && word * bits < leaves[0]; ++word)
            for (size_t at = 0; at < many; ++at) {
                const Node<T>& node = split[root + at];
                if (!(node.feature & SPLIT)) continue;
                Word kept = ~Word(0);
                const uint32_t end = first[at] + leaves[node.left - root];
                for (uint32_t one = std::max(first[at], word * bits); one < std::min(end, (word + 1) * bits); ++one)
                    kept &= ~(Word(1) << (one % bits));
                if (kept == Word(~Word(0))) continue;
                cuts.push_back({node.threshold, node.feature & FEATURE, kept, !(node.feature & MISSING_RIGHT)});
                ++(word ? made.last_cuts : made.first_cuts);
            }
        (made.is_small ? has_small : has_large) = true;
        trees.push_back(made);
    }

    // LANES walks at a time, to their leaves.
    template <bool Missing> void walk(const T* const* row, uint32_t* at) const {
        const Node<T>* nodes = split.data();
        for (uint32_t live = SPLIT; live & SPLIT;) {
            live = 0;
#pragma GCC unroll 8
            for (int i = 0; i < LANES; ++i) {
                const Node<T> node = nodes[at[i]];
                const T x = row[i][node.feature & FEATURE];
                uint32_t right = Strict ? !(x < node.threshold) : !(x <= node.threshold);
                if (Missing) right = x != x ? (node.feature >> 30) & 1 : right;
                at[i] = node.left + (right & (node.feature >> 31));
                live |= node.feature;
            }
        }
    }

    void gather(const Tree& tree, uint32_t at, Sum* sums, long stride) const {
        const Sum* value = &values[leaf[at]];
        sums += tree.output * stride;
        for (uint32_t k = 0; k < tree.wide; ++k) sums[k * stride] += value[size_t(k) * tree.leaves];
    }

    // The trees from `from` on over a block of rows: groups of rows tree by tree, of what is left over groups of trees.
    template <bool Missing> void walk_trees(const Tree* from, const Tree* to, const T* block, long count, Sum* sums, long stride) const {
        const T* row[LANES];
        uint32_t at[LANES];
        const long whole = count - count % LANES;
        for (const Tree* tree = from; tree != to; ++tree)
            for (long first = 0; first < whole; first += LANES) {
                for (int i = 0; i < LANES; ++i) row[i] = block + (first + i) * width, at[i] = tree->root;
                walk<Missing>(row, at);
                for (int i = 0; i < LANES; ++i) gather(*tree, at[i], sums + first + i, stride);
            }
        for (long one = whole; one < count; ++one) {
            for (int i = 0; i < LANES; ++i) row[i] = block + one * width;
            for (const Tree* first = from; first < to; first += LANES) {
                const int some = int(std::min<long>(LANES, to - first));
                for (int i = 0; i < LANES; ++i) at[i] = first[std::min(i, some - 1)].root;
                walk<Missing>(row, at);
                for (int i = 0; i < some; ++i) gather(first[i], at[i], sums + one, stride);
            }
        }
    }

    // Room for a block of rows, in both orders, and for their sums.
    struct Space {
        std::vector<T> rows, columns;
        std::vector<Sum> sums;
    };

    // The sums of the rows of a block.
    void sum(Space& space, long count, long stride, bool missing) const {
        const T* block = space.rows.data();
        T* columns = space.columns.data();
        Sum* sums = space.sums.data();
        for (long k = 0; k < outputs; ++k) std::fill(sums + k * stride, sums + (k + 1) * stride, base_last ? Sum(0) : Sum(base[k]));
        const bool by_column = has_small && count >= FEW_ROWS;
        for (long i = 0; by_column && i < count; ++i)
            for (long k = 0; k < width; ++k) columns[k * stride + i] = block[i * width + k];
        const Tree *end = trees.data() + trees.size(), *to;
        for (const Tree* from = trees.data(); from != end; from = to) {
            const bool small = by_column && from->is_small;
            for (to = from; to != end && (by_column && to->is_small) == small;) ++to;
            if (small) sum_each({from, to, cuts.data(), values.data(), columns, stride, sums}, Strict, missing);
            else if (missing) walk_trees<true>(from, to, block, count, sums, stride);
            else walk_trees<false>(from, to, block, count, sums, stride);
        }
    }

    // Converts `count` values; what they have among them: 1 something infinite, 2 something missing.
    template <class From> static int read(const From* from, size_t count, T* to, const Reading& how) {
        constexpr T most = std::numeric_limits<T>::max();
        int infinite = 0, missing = 0;
        for (size_t i = 0; i < count; ++i) {
            const T x = T(from[i]);
            to[i] = x;
            infinite |= std::fabs(x) > most;
            missing |= x != x;
        }
        if (how.tiny >= 0) {
            const T instead = how.tiny_is_missing ? std::numeric_limits<T>::quiet_NaN() : T(0);
            for (size_t i = 0; i < count; ++i) to[i] = std::fabs(from[i]) <= how.tiny ? instead : to[i];
            missing |= how.tiny_is_missing;
        }
        return infinite | missing << 1;
    }

    bool run(const void* rows, bool rows_are_double, long count, void* out, const Reading& how, int link) const override {
        constexpr long lanes = Lanes<T>::count;
        const long fitting = std::clamp<long>(long(BLOCK_BYTES / sizeof(T)) / std::max(width, outputs), lanes, BLOCK_ROWS);
        const long most = std::min(count, split.size() > MANY_NODES ? 4 * fitting : fitting);
        const long room = (most + lanes - 1) / lanes * lanes;
        Space space;
        space.rows.resize(most * width);
        space.sums.resize(room * outputs);
        if (has_small && most >= FEW_ROWS) space.columns.resize(room * width);
        Sum* made = static_cast<Sum*>(out);
        for (long first = 0; first < count; first += most, made += most * outputs) {
            const long some = std::min(most, count - first), stride = (some + lanes - 1) / lanes * lanes;
            const size_t begin = size_t(first) * width, size = size_t(some) * width;
            const int has = rows_are_double ? read(static_cast<const double*>(rows) + begin, size, space.rows.data(), how)
                                            : read(static_cast<const float*>(rows) + begin, size, space.rows.data(), how);
            if (((has & 1) && !how.takes_infinite) || ((has & 2) && !how.takes_missing)) return false;
            sum(space, some, stride, has & 2);
            for (long i = 0; i < some; ++i) {
                for (long k = 0; k < outputs; ++k) made[i * outputs + k] = space.sums[k * stride + i];
                finish(made + i * outputs, link);
            }
        }
        return true;
    }

    void finish(Sum* sums, int link) const {
        if (divisor != 0)
            for (long k = 0; k < outputs; ++k) sums[k] /= divisor;
        if (base_last)
            for (long k = 0; k < outputs; ++k) sums[k] = Sum(double(sums[k]) + base[k]);
        if (link == SIGMOID)
            for (long k = 0; k < outputs; ++k) sums[k] = Sum(1) / (Sum(1) + std::exp(-scale * sums[k]));
        if (link == BOUNDED_SIGMOID) // XGBoost's
            for (long k = 0; k < outputs; ++k) sums[k] = Sum(1) / (std::exp(std::min(-sums[k], Sum(88.7f))) + Sum(1));
        if (link == EXPONENTIAL)
            for (long k = 0; k < outputs; ++k) sums[k] = std::exp(sums[k]);
        if (link == SOFTMAX) softmax(sums);
    }

    void softmax(Sum* sums) const {
        const Sum most = *std::max_element(sums, sums + outputs);
        double whole = 0;
        for (long k = 0; k < outputs; ++k) whole += sums[k] = std::exp(sums[k] - most);
        for (long k = 0; k < outputs; ++k) sums[k] /= Sum(whole);
    }
};

} // namespace forest
