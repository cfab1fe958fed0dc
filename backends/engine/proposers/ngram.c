/* N-gram lookup for all sequences of a batch in one call (see `ngram_native.py`).
 *
 * The caller owns all memory: the texts, their indexes, and the results. An index contains no
 * token. Its entries are ends in the text: the end e stands for the tokens before tokens[e]. Each
 * entry is checked against the text. Therefore collisions of hashes never change a draft.
 *
 * The index follows hash chains, as deflate does (RFC 1951). For the last token, the last pair and
 * the last four tokens before an end, a table has the latest end. For each end, the previous ends of
 * its token, its pair and its four tokens are next to each other.
 */

#include <math.h>
#include <stdint.h>
#include <string.h>

/* The definitions MAX_MATCHES, MAX_WALK, MAX_EVIDENCE, ORDERS, LONG_MATCH, MAX_TEXTS and
 * MAX_CATCH_UP come from `ngram_lookup.py`. The index of order n has the last 2^n tokens. */

#define MAX_FOUND (MAX_MATCHES * MAX_TEXTS)

_Static_assert(MAX_FOUND <= 32, "a set of matches has 32 bits");

/* A text and its index. The index has INDEX_HEADER + 3 * ORDERS * capacity numbers. The first two
 * are the next end to index, and the capacity in tokens, a power of two. All numbers start at 0. */
typedef struct {
    int32_t *index; /* NULL for no text */
    const int64_t *tokens;
    int64_t length;
} Text;

typedef struct {
    const double *weights; /* weight of a match by its missing length, [MAX_EVIDENCE + 1] */
    double child_chance;
    int64_t trees;
    uint64_t hash_keys[1 << (ORDERS - 1)];
} Rules;

typedef struct {
    int64_t tokens, evidence, agreement, branched;
} Summary;

/* The results of a batch: one summary per request, and one row per draft token. */
typedef struct {
    Summary *summaries;
    int64_t capacity; /* rows of the following arrays */
    int64_t *tokens, *parents;
    double *shares;
} Results;

#define INDEX_HEADER 2

/* Pointers into the memory of an index. */
typedef struct {
    const int64_t *tokens;
    const uint64_t *hash_keys;
    int32_t *next_end, *earlier, *tables;
    int64_t capacity;
    int shift; /* from a hash of 64 bits to a place in a table */
} Index;

typedef struct {
    const int64_t *continuation; /* the tokens after the match */
    int64_t period;              /* tokens up to the end of the text, which then repeat */
    int64_t length;
    double weight;
} Match;

/* A token that the tree may take next, with the matches that continue with it. */
typedef struct {
    double chance, weight, share;
    int64_t order, token, parent, depth;
    uint32_t matches;
} Candidate;

typedef struct {
    const Match *matches;
    Candidate candidates[MAX_FOUND]; /* their sets of matches are disjoint */
    int64_t num_candidates, order, branched;
} Tree;

static Index open_index(const Text *text, const uint64_t *hash_keys) {
    int64_t capacity = text->index[1];
    int32_t *arrays = text->index + INDEX_HEADER;
    return (Index){
        .tokens = text->tokens,
        .hash_keys = hash_keys,
        .next_end = text->index,
        .earlier = arrays,
        .tables = arrays + ORDERS * capacity,
        .capacity = capacity,
        .shift = __builtin_clzll(2 * (uint64_t)capacity) + 1,
    };
}

/* Return the entry of the 2^order tokens before `key`, which is 0 for new ones. At most half of a
 * table is in use, so the search always ends. */
static int32_t *entry(const Index *index, int order, const int64_t *key) {
    uint64_t mask = 2 * (uint64_t)index->capacity - 1, hash = 0;
    int32_t *table = index->tables + 2 * index->capacity * order;
    int64_t size = 1 << order;
    for (int64_t back = 0; back < size; back++)
        hash += index->hash_keys[back] * (uint64_t)key[-1 - back];
    for (uint64_t place = hash >> index->shift;; place = (place + 1) & mask) {
        int32_t end = table[place];
        if (!end)
            return &table[place];
        const int64_t *other = index->tokens + end;
        int64_t back = 1;
        while (back <= size && other[-back] == key[-back])
            back++;
        if (back > size)
            return &table[place];
    }
}

/* Index at most `most` ends before the last token, which has no continuation yet. */
static void catch_up(const Index *index, int64_t length, int64_t most) {
    int64_t end = *index->next_end;
    if (end > length) { /* the text became shorter, so its index starts again */
        memset(index->earlier, 0, 3 * ORDERS * (size_t)index->capacity * sizeof(int32_t));
        end = 0;
    }
    if (end < 1)
        end = 1;
    int64_t last = most < length - end ? end + most : length;
    for (; end < last; end++) {
        int32_t *earlier = index->earlier + ORDERS * end;
        for (int order = 0; order < ORDERS && end >> order; order++) {
            int32_t *latest = entry(index, order, index->tokens + end);
            earlier[order] = *latest;
            *latest = (int32_t)end;
        }
    }
    *index->next_end = (int32_t)end;
}

/* Return the number of tokens before `end` that equal those at the end of a text. */
static int64_t match_length(const Index *index, int64_t end, const Text *text) {
    int64_t most = end < text->length ? end : text->length;
    if (most > MAX_EVIDENCE)
        most = MAX_EVIDENCE;
    const int64_t *one = index->tokens + end - 1, *other = text->tokens + text->length - 1;
    int64_t length = 0;
    while (length < most && one[-length] == other[-length])
        length++;
    return length;
}

/* Insert a match after all matches of at least its length. */
static void insert_match(Match *found, int count, Match match) {
    for (; count && found[count - 1].length < match.length; count--)
        found[count] = found[count - 1];
    found[count] = match;
}

/* Set the latest end of the last 2^order tokens of a text for each order, from the pair on. Return
 * the highest order with a match. A longer match exists only if each shorter one does, so a text
 * without a match costs two searches. Without a pair, use the last token, which other texts
 * (`is_other`) have too often. */
static int latest_ends(const Index *index, const Text *text, int is_other, int32_t *ends) {
    const int64_t *key = text->tokens + text->length;
    int order = 1;
    for (; order < ORDERS && text->length >> order; order++)
        if (!(ends[order] = *entry(index, order, key)))
            break;
    if (order > 1)
        return order - 1;
    ends[0] = is_other ? 0 : *entry(index, 0, key);
    return ends[0] ? 0 : -1;
}

/* Add the matches of the end of `text` in another text or itself, and return their new number.
 *
 * The matches of a higher order come first. A lower order adds its shorter matches. */
static int find_matches(
    const Text *searched, const Text *text, const Rules *rules, Match *found, int count
) {
    if (!searched->index || searched->length < 1 || searched->length > searched->index[1])
        return count;
    Index index = open_index(searched, rules->hash_keys);
    int is_other = searched != text;
    catch_up(&index, searched->length, is_other ? MAX_CATCH_UP : searched->length);
    int32_t ends[ORDERS];
    int highest = latest_ends(&index, text, is_other, ends);
    int64_t longer = MAX_EVIDENCE + 1;
    int most = count + MAX_MATCHES;
    for (int order = highest; order >= (highest > 0); order--) {
        int32_t end = ends[order];
        for (int walked = 0; end && walked < MAX_WALK && count < most; walked++) {
            Match match = {
                .continuation = searched->tokens + end,
                .period = searched->length - end,
                .length = match_length(&index, end, text),
            };
            if (match.length < longer)
                insert_match(found, count++, match);
            end = index.earlier[ORDERS * end + order];
        }
        longer = 1 << order;
    }
    return count;
}

static int64_t token_at(const Match *match, int64_t depth) {
    return match->continuation[depth < match->period ? depth : depth % match->period];
}

/* Add the children of a token: the different next tokens of its matches. */
static void push_children(
    Tree *tree, uint32_t matches, int64_t parent, int64_t depth, double chance
) {
    Candidate *children = tree->candidates + tree->num_candidates;
    int64_t count = 0;
    double total = 0.0;
    for (; matches; matches &= matches - 1) {
        int place = __builtin_ctz(matches);
        const Match *match = &tree->matches[place];
        int64_t token = token_at(match, depth), child = 0;
        while (child < count && children[child].token != token)
            child++;
        if (child == count)
            children[count++] = (Candidate){
                .order = tree->order++, .token = token, .parent = parent, .depth = depth
            };
        children[child].weight += match->weight;
        children[child].matches |= 1u << place;
        total += match->weight;
    }
    for (int64_t child = 0; child < count; child++) {
        children[child].share = count == 1 ? 1.0 : children[child].weight / total;
        children[child].chance = chance * children[child].share;
    }
    tree->num_candidates += count;
    tree->branched |= count > 1;
}

/* Remove and return the likeliest candidate, and the earliest of equally likely ones. */
static Candidate pop_best(Tree *tree) {
    int64_t best = 0;
    for (int64_t place = 1; place < tree->num_candidates; place++) {
        const Candidate *one = &tree->candidates[place], *other = &tree->candidates[best];
        if (one->chance > other->chance ||
            (one->chance == other->chance && one->order < other->order))
            best = place;
    }
    Candidate found = tree->candidates[best];
    tree->candidates[best] = tree->candidates[--tree->num_candidates];
    return found;
}

/* Write the tree of the likeliest tokens, and return whether it has branches. */
static int64_t write_tree(
    const Match *matches, int count, const Rules *rules, int64_t max_tokens,
    int64_t *tokens, int64_t *parents, double *shares
) {
    Tree tree = {.matches = matches};
    uint32_t all = rules->trees ? (uint32_t)((1ull << count) - 1) : 1u;
    push_children(&tree, all, -1, 0, 1.0);
    for (int64_t row = 0; row < max_tokens; row++) {
        Candidate best = pop_best(&tree);
        tokens[row] = best.token;
        parents[row] = best.parent;
        shares[row] = best.share;
        if (best.depth + 1 < max_tokens)
            push_children(
                &tree, best.matches, row, best.depth + 1, best.chance * rules->child_chance
            );
    }
    return tree.branched;
}

/* Set the weights, and return the weighted share of matches that continue like the longest. */
static int64_t weigh(Match *matches, int count, const Rules *rules) {
    double agreeing = 0.0, total = 0.0;
    for (int place = 0; place < count; place++) {
        matches[place].weight = rules->weights[matches[0].length - matches[place].length];
        total += matches[place].weight;
        if (matches[place].continuation[0] == matches[0].continuation[0])
            agreeing += matches[place].weight;
    }
    return count > 1 ? llrint(PER_MILLE * agreeing / total) : 0;
}

/* Draft for a batch, and return the rows that its drafts need.
 *
 * A request has `num_texts` texts: its own, and others to search, in order, until a match is long.
 * Drafts beyond the capacity of the results are not written. The caller then calls again with
 * larger results. */
int64_t ngram_drafts(
    const Rules *rules, const Text *texts, int64_t num_texts, const int64_t *max_tokens,
    int64_t count, const Results *results
) {
    int64_t rows = 0;
    for (int64_t request = 0; request < count; request++) {
        const Text *own = texts + request * num_texts;
        Match found[MAX_FOUND];
        results->summaries[request] = (Summary){0};
        if (max_tokens[request] < 1 || own->length < 1)
            continue;
        int num_found = find_matches(own, own, rules, found, 0);
        for (int64_t other = 1; other < num_texts; other++)
            if (!num_found || found[0].length < LONG_MATCH)
                num_found = find_matches(&own[other], own, rules, found, num_found);
        if (!num_found)
            continue;
        int64_t row = rows;
        if (__builtin_add_overflow(rows, max_tokens[request], &rows))
            return INT64_MAX;
        if (rows > results->capacity)
            continue;
        Summary *summary = &results->summaries[request];
        summary->tokens = max_tokens[request];
        summary->evidence = found[0].length;
        summary->agreement = weigh(found, num_found, rules);
        summary->branched = write_tree(
            found, num_found, rules, max_tokens[request],
            results->tokens + row, results->parents + row, results->shares + row
        );
    }
    return rows;
}
