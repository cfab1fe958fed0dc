/* N-gram lookup for all sequences of a batch in one call (see `ngram_native.py`).
 *
 * The caller owns all memory: the texts, their indexes, and the results. An index contains no
 * token. Its entries are ends in the text: the end e stands for the tokens before tokens[e]. Each
 * entry is checked against the text. Therefore collisions of hashes never change a draft.
 *
 * The index follows hash chains, as deflate does (RFC 1951). For each pair of tokens, and for each
 * single token, a table has the latest end. For each end, the previous ends of its token and of its
 * pair are next to each other.
 */

#include <math.h>
#include <stdint.h>
#include <string.h>

/* The definitions MAX_MATCHES, MAX_EVIDENCE, LONG_MATCH and MAX_TEXTS come from `ngram_lookup.py`. */

#define MAX_FOUND (MAX_MATCHES * MAX_TEXTS)

_Static_assert(MAX_FOUND <= 32, "a set of matches has 32 bits");

/* A text and its index. The index has INDEX_HEADER + 6 * capacity numbers. The first two are the
 * next end to index, and the capacity in tokens, a power of two. All numbers start at 0. */
typedef struct {
    int32_t *index; /* NULL for no text */
    const int64_t *tokens;
    int64_t length;
} Text;

typedef struct {
    const double *weights; /* weight of a match by its missing length, [MAX_EVIDENCE + 1] */
    double child_chance;
    int64_t trees;
    uint64_t hash_keys[2];
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
    int32_t *next_end, *earlier, *pairs, *singles;
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
        .pairs = arrays + 2 * capacity,
        .singles = arrays + 4 * capacity,
        .capacity = capacity,
        .shift = __builtin_clzll(2 * (uint64_t)capacity) + 1,
    };
}

/* Return the entry of a pair, which is 0 for a new pair. At most half of a table is in use, so the
 * search always ends. */
static int32_t *pair_entry(const Index *index, int64_t first, int64_t second) {
    uint64_t mask = 2 * (uint64_t)index->capacity - 1;
    uint64_t hash = index->hash_keys[0] * (uint64_t)first + index->hash_keys[1] * (uint64_t)second;
    for (uint64_t place = hash >> index->shift;; place = (place + 1) & mask) {
        int32_t end = index->pairs[place];
        if (!end || (index->tokens[end - 1] == second && index->tokens[end - 2] == first))
            return &index->pairs[place];
    }
}

static int32_t *single_entry(const Index *index, int64_t token) {
    uint64_t mask = 2 * (uint64_t)index->capacity - 1;
    uint64_t hash = index->hash_keys[1] * (uint64_t)token;
    for (uint64_t place = hash >> index->shift;; place = (place + 1) & mask) {
        int32_t end = index->singles[place];
        if (!end || index->tokens[end - 1] == token)
            return &index->singles[place];
    }
}

/* Index all ends before the last token, which has no continuation yet. */
static void catch_up(const Index *index, int64_t length) {
    const int64_t *tokens = index->tokens;
    int64_t end = *index->next_end;
    if (end > length) { /* the text became shorter, so its index starts again */
        memset(index->earlier, 0, 6 * (size_t)index->capacity * sizeof(int32_t));
        end = 0;
    }
    if (end < 1)
        end = 1;
    for (; end < length; end++) {
        int32_t *single = single_entry(index, tokens[end - 1]);
        index->earlier[2 * end] = *single;
        *single = (int32_t)end;
        if (end > 1) {
            int32_t *pair = pair_entry(index, tokens[end - 2], tokens[end - 1]);
            index->earlier[2 * end + 1] = *pair;
            *pair = (int32_t)end;
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

/* Add the matches of the end of `text` in another text or itself, and return their new number. */
static int find_matches(
    const Text *searched, const Text *text, const Rules *rules, Match *found, int count
) {
    if (!searched->index || searched->length < 1 || searched->length > searched->index[1])
        return count;
    Index index = open_index(searched, rules->hash_keys);
    catch_up(&index, searched->length);
    const int64_t *last = text->tokens + text->length - 1;
    int64_t end = text->length > 1 ? *pair_entry(&index, last[-1], last[0]) : 0;
    int of_pair = end > 0;
    if (!end)
        end = *single_entry(&index, last[0]);
    for (int some = 0; end && some < MAX_MATCHES; some++, end = index.earlier[2 * end + of_pair]) {
        Match match = {
            .continuation = searched->tokens + end,
            .period = searched->length - end,
            .length = match_length(&index, end, text),
        };
        insert_match(found, count++, match);
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
 * A request has `num_texts` texts: its own, and others to search after a short match in its own.
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
        int num_found = 0;
        results->summaries[request] = (Summary){0};
        if (max_tokens[request] < 1 || own->length < 1)
            continue;
        num_found = find_matches(own, own, rules, found, 0);
        if (!num_found || found[0].length < LONG_MATCH)
            for (int64_t other = 1; other < num_texts; other++)
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
