"""The page pool: against a naive one that does each thing the slow, obvious way, and rule by rule."""

import collections
import copy
import itertools
import pickle
import random
import sys
import tracemalloc
from typing import Any, cast

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import stateful
from hypothesis import strategies as st

from jax_paged_attn import PagePool, PageTable, PoolExhausted, copy_pages, paged_attention, reference, testing

NONE = (-1, -1)  # no copy


class NaivePool:
    """What a PagePool has to do, with lists that are searched through; page ids and all.

    A token without an id is a negative number of its own. Where pages run out, it makes some up.
    """

    def __init__(self, num_pages, page_size):
        self.size = page_size
        self.num_pages = num_pages
        self.empty = list(range(num_pages))[::-1]
        self.cached = []
        self.seqs = {}  # (tokens, pages) by id
        self.contents = {}  # of pages that can be found: their tokens and all before
        self.counts = collections.Counter()

    def refs(self, page):
        return sum(page in pages for _, pages in self.seqs.values())

    def used(self):
        return {page for _, pages in self.seqs.values() for page in pages}

    def find(self, tokens):
        found = []
        for end in range(self.size, len(tokens) + 1, self.size):
            holders = [page for page, content in self.contents.items() if content == tuple(tokens[:end])]
            if not holders:
                break
            found.append(holders[0])
        return found

    def take(self):
        if self.empty:
            return self.empty.pop()
        if self.cached:
            page = self.cached.pop(0)
            del self.contents[page]
            self.counts["evictions"] += 1
            return page
        return self.num_pages + len(self.used())

    def allocate(self, seq_id, tokens):
        found = self.find(tokens)
        for page in found:
            if page in self.cached:
                self.cached.remove(page)
        held = len(found) * self.size
        self.seqs[seq_id] = (tokens[:held], found)
        if all(token >= 0 for token in tokens):
            self.counts["looked_up"] += len(tokens)
            self.counts["hit"] += held - (held == len(tokens) != 0)
        return self.append({seq_id: tokens[held:]})[0]

    def append(self, new_tokens):
        copies = []
        for seq_id, new in new_tokens.items():
            tokens, pages = self.seqs[seq_id]
            copies.append(NONE)
            if not new or len(tokens) % self.size == 0:
                continue
            last = pages[-1]
            if self.refs(last) > 1:
                pages[-1] = self.take()
                copies[-1] = (last, pages[-1])
                self.counts["copies"] += 1
            else:
                self.contents.pop(last, None)
        for seq_id, new in new_tokens.items():
            tokens, pages = self.seqs[seq_id]
            while len(pages) * self.size < len(tokens) + len(new):
                pages.append(self.take())
        slots = []
        for seq_id, new in new_tokens.items():
            tokens, pages = self.seqs[seq_id]
            for token in new:
                slots.append(pages[len(tokens) // self.size] * self.size + len(tokens) % self.size)
                tokens.append(token)
        for seq_id, new in new_tokens.items():
            tokens, pages = self.seqs[seq_id]
            for index in range((len(tokens) - len(new)) // self.size, len(tokens) // self.size):
                self.identify(pages[index], tuple(tokens[: (index + 1) * self.size]))
        self.counts["peak"] = max(self.counts["peak"], len(self.used()))
        return slots, copies

    def identify(self, page, content):
        if min(content) < 0:
            return
        for older in [p for p in self.cached if self.contents[p] == content]:
            self.cached.remove(older)
            del self.contents[older]
            self.empty.append(older)
        self.contents[page] = content

    def fork(self, seq_id, child_id, length):
        tokens, pages = self.seqs[seq_id]
        self.seqs[child_id] = (tokens[:length], pages[: -(-length // self.size)])

    def truncate(self, seq_id, length):
        tokens, pages = self.seqs[seq_id]
        if length < len(tokens):
            for page in pages[length // self.size :]:
                if self.refs(page) == 1:
                    self.contents.pop(page, None)
            del tokens[length:]
            self.release(seq_id, -(-length // self.size))

    def free(self, seq_id):
        self.release(seq_id, 0)
        del self.seqs[seq_id]

    def release(self, seq_id, kept):
        pages = self.seqs[seq_id][1]
        while len(pages) > kept:
            page = pages.pop()
            if self.refs(page):
                continue
            if list(self.contents.values()).count(self.contents.get(page)) == 1:
                self.cached.append(page)
            else:
                self.contents.pop(page, None)
                self.empty.append(page)


TOKENS = st.lists(st.integers(0, 1), max_size=9)
SHUFFLES = st.randoms(use_true_random=False)
INDEX = st.integers(0, 10**6)


class PoolMachine(stateful.RuleBasedStateMachine):
    """Random operations on a pool, on the naive one, and on what a device would hold."""

    steps = 0

    @stateful.initialize(num_pages=st.integers(1, 40), page_size=st.integers(1, 4))
    def start(self, num_pages, page_size):
        self.pool = PagePool(num_pages, page_size)
        self.naive = NaivePool(num_pages, page_size)
        # A key depends on all tokens before its own, so each slot holds them all.
        self.cache = np.full((num_pages, page_size), None)
        self.unnamed = itertools.count(-1, -1)
        self.num_sequences = 0  # ids are given in order, and never twice

    def pick(self, index):
        seq_ids = list(self.naive.seqs)
        return seq_ids[index % len(seq_ids)]

    def has_sequences(self):
        return bool(self.naive.seqs)

    def attempt(self, do, expect):
        """Do it on the pool, or see it refused, as the naive pool says; the result, or None."""
        before = copy.deepcopy(self.naive)
        expected = expect(self.naive)
        needed = len(self.naive.used()) - len(before.used())
        free = before.num_pages - len(before.used())
        if needed <= free:
            return do(), expected
        self.naive = before
        with pytest.raises(PoolExhausted) as refused:
            do()
        assert (refused.value.needed, refused.value.free) == (needed, free)
        return None

    def write(self, appended, new_tokens, copies):
        """What the device does after an append to the sequences of `new_tokens`."""
        for source, target in copies:
            if (source, target) != NONE:
                self.cache[target] = self.cache[source]
        slots = iter(appended)
        for seq_id, new in new_tokens.items():
            tokens = self.naive.seqs[seq_id][0]
            for position in range(len(tokens) - len(new), len(tokens)):
                page, offset = divmod(next(slots), self.naive.size)
                assert self.naive.refs(page) == 1, "a shared page is written"
                self.cache[page, offset] = tuple(tokens[: position + 1])

    def allocate(self, tokens, arguments):
        seq_id = self.num_sequences
        done = self.attempt(
            lambda: self.pool.allocate(**arguments), lambda naive: naive.allocate(seq_id, list(tokens))
        )
        if done is not None:
            allocation, slots = done
            found = len(tokens) - len(slots)
            whole = 0 < len(tokens) == found
            assert allocation.seq_id == seq_id
            assert allocation.num_cached_tokens == found - whole
            assert allocation.slots.tolist() == slots + [-1] * whole
            self.write(slots, {seq_id: tokens[found:]}, [])
            self.num_sequences += 1

    @stateful.rule(tokens=TOKENS)
    def allocate_named(self, tokens):
        found = len(self.naive.find(tokens)) * self.naive.size
        assert self.pool.num_cached_tokens(tokens) == max(0, min(found, len(tokens) - 1))
        self.allocate(tokens, {"tokens": tokens})

    @stateful.precondition(has_sequences)
    @stateful.rule(index=INDEX, length=st.integers(0, 12), more=TOKENS)
    def allocate_what_begins_like_another(self, index, length, more):
        tokens = [token for token in self.naive.seqs[self.pick(index)][0][:length] if token >= 0]
        self.allocate(tokens + more, {"tokens": tokens + more})

    @stateful.rule(num_tokens=st.integers(0, 9))
    def allocate_unnamed(self, num_tokens):
        self.allocate(list(itertools.islice(self.unnamed, num_tokens)), {"num_tokens": num_tokens})

    def append(self, do, new_tokens):
        done = self.attempt(do, lambda naive: naive.append(new_tokens))
        if done is not None:
            appended, (slots, copies) = done
            self.write(slots, new_tokens, copies)
            return appended, slots, copies
        return None

    @stateful.precondition(has_sequences)
    @stateful.rule(index=INDEX, tokens=TOKENS, named=st.booleans())
    def append_to_one(self, index, tokens, named):
        seq_id = self.pick(index)
        if named:
            done = self.append(lambda: self.pool.append(seq_id, tokens), {seq_id: tokens})
        else:
            tokens = list(itertools.islice(self.unnamed, len(tokens)))
            done = self.append(lambda: self.pool.append(seq_id, num_tokens=len(tokens)), {seq_id: tokens})
        if done is not None:
            appended, slots, copies = done
            assert appended.slots.tolist() == slots
            assert list(map(tuple, appended.copies)) == copies

    @stateful.precondition(has_sequences)
    @stateful.rule(
        order=SHUFFLES,
        counts=st.one_of(st.just(1), st.lists(st.integers(0, 3), min_size=1)),
        tokens=st.one_of(st.none(), st.integers(0, 2**90 - 1)),  # one bit each
        empty_rows=st.integers(0, 2),
    )
    def append_to_many(self, order, counts, tokens, empty_rows):
        seq_ids = list(self.naive.seqs)
        rows = order.sample(seq_ids, order.randint(1, len(seq_ids))) + [-1] * empty_rows
        order.shuffle(rows)
        each = [1] * len(rows) if counts == 1 else list(itertools.islice(itertools.cycle(counts), len(rows)))
        ids = None if tokens is None else [tokens >> i & 1 for i in range(sum(each))]
        feed = self.unnamed if ids is None else iter(ids)
        by_row = [[next(feed) for _ in range(count)] for count in each]
        new_tokens = {row: new for row, new in zip(rows, by_row, strict=True) if row != -1}
        num_tokens = 1 if counts == 1 else each
        done = self.append(lambda: self.pool.append_batch(rows, ids, num_tokens=num_tokens), new_tokens)
        if done is not None:
            appended, slots, copies = done
            slots, copies = iter(slots), iter(copies)
            row_of_token = [row for row, count in zip(rows, each, strict=True) for _ in range(count)]
            assert appended.slots.tolist() == [-1 if row == -1 else next(slots) for row in row_of_token]
            assert list(map(tuple, appended.copies)) == [NONE if row == -1 else next(copies) for row in rows]

    @stateful.precondition(has_sequences)
    @stateful.rule(index=INDEX, cut=INDEX, children=st.integers(1, 3))
    def fork(self, index, cut, children):
        seq_id = self.pick(index)
        num_tokens = len(self.naive.seqs[seq_id][0])
        kept = num_tokens - cut % (num_tokens + 1)
        for _ in range(children):
            child_id = self.pool.fork(seq_id) if cut == 0 else self.pool.fork(seq_id, kept)
            assert child_id == self.num_sequences
            self.num_sequences += 1
            self.naive.fork(seq_id, child_id, kept)

    @stateful.precondition(has_sequences)
    @stateful.rule(index=INDEX, cut=INDEX)
    def truncate(self, index, cut):
        seq_id = self.pick(index)
        num_tokens = len(self.naive.seqs[seq_id][0])
        kept = num_tokens - cut % (num_tokens + 1)
        self.pool.truncate(seq_id, kept)
        self.naive.truncate(seq_id, kept)

    @stateful.precondition(has_sequences)
    @stateful.rule(index=INDEX)
    def free(self, index):
        seq_id = self.pick(index)
        self.pool.free(seq_id)
        self.naive.free(seq_id)
        with pytest.raises(ValueError, match=r"^seq_id: expected the id of a live sequence, got \d+$"):
            self.pool.free(seq_id)

    @stateful.precondition(has_sequences)
    @stateful.rule(order=SHUFFLES)
    def free_half(self, order):
        seq_ids = list(self.naive.seqs)
        for seq_id in order.sample(seq_ids, (len(seq_ids) + 1) // 2):
            self.pool.free(seq_id)
            self.naive.free(seq_id)

    @stateful.invariant()
    def pages_are_counted(self):
        type(self).steps += 1
        naive = self.naive
        assert self.pool.ref_counts().tolist() == [naive.refs(page) for page in range(naive.num_pages)]
        used, counts = naive.used(), naive.counts
        assert not used & {*naive.empty, *naive.cached}
        assert len(used) + len(naive.empty) + len(naive.cached) == naive.num_pages
        stats = self.pool.stats()
        assert (stats.num_pages, stats.num_used_pages) == (naive.num_pages, len(used))
        assert stats.num_free_pages == naive.num_pages - len(used)
        assert stats.num_cached_pages == len(naive.cached)
        assert stats.num_shared_pages == sum(naive.refs(page) > 1 for page in used)
        assert stats.num_seqs == len(naive.seqs)
        assert stats.peak_used_pages == counts["peak"]
        assert (stats.num_looked_up_tokens, stats.num_hit_tokens) == (counts["looked_up"], counts["hit"])
        assert (stats.num_copies, stats.num_evictions) == (counts["copies"], counts["evictions"])

    @stateful.invariant()
    def tables_lead_to_every_token(self):
        seqs = {**self.naive.seqs, -1: ([], [])}
        rows = list(seqs)
        random.Random(self.steps).shuffle(rows)
        tables, lens = self.pool.block_tables(rows), self.pool.kv_lens(rows)
        indptr, indices, last_page_len = self.pool.csr(rows)
        size = self.naive.size
        for row, seq_id in enumerate(rows):
            tokens, pages = seqs[seq_id]
            assert lens[row] == len(tokens)
            assert tables[row].tolist() == pages + [-1] * (tables.shape[1] - len(pages))
            assert indices[indptr[row] : indptr[row + 1]].tolist() == pages
            assert last_page_len[row] == len(tokens) - max(len(pages) - 1, 0) * size
            for position in range(len(tokens)):
                page, offset = tables[row, position // size], position % size
                assert self.cache[page, offset] == tuple(tokens[: position + 1])

    def teardown(self):
        """Where no page holds anything any more, nothing is remembered either."""
        for seq_id in self.naive.seqs:
            self.pool.free(seq_id)
        slots = self.pool.allocate(num_tokens=self.naive.num_pages * self.naive.size).slots
        assert sorted(slots) == list(range(len(slots)))
        assert not self.pool._root.children


def test_random_operations_agree_with_a_naive_pool():
    PoolMachine.steps = 0
    stateful.run_state_machine_as_test(
        PoolMachine, settings=hypothesis.settings(max_examples=800, stateful_step_count=50)
    )
    assert PoolMachine.steps >= 20_000


# Sharing


def test_beginnings_are_shared_page_by_page():
    pool = PagePool(num_pages=8, page_size=2)
    first = pool.allocate([1, 2, 3, 4, 5])
    second = pool.allocate([1, 2, 3, 4, 6])
    third = pool.allocate([1, 2, 3])
    assert [a.num_cached_tokens for a in (first, second, third)] == [0, 4, 2]
    assert [pool.pages(a.seq_id).tolist() for a in (first, second, third)] == [[0, 1, 2], [0, 1, 3], [0, 4]]
    assert second.slots.tolist() == [6]


def test_the_last_token_is_never_among_the_cached_ones():
    pool = PagePool(num_pages=4, page_size=2)
    pool.allocate([1, 2, 3, 4])
    assert pool.num_cached_tokens([1, 2, 3, 4]) == 3
    again = pool.allocate([1, 2, 3, 4])
    assert (again.num_cached_tokens, again.slots.tolist()) == (3, [-1])
    assert pool.num_used_pages == 2


@pytest.mark.parametrize(
    "other",
    [
        [9, 2, 3, 4, 5],  # the second page holds the same tokens, after others
        [3, 4, 3, 4, 5],
        [1 + 2**32, 2, 3, 4, 5],
        [1 + 2**62, 2, 3, 4, 5],
        [2, 1, 3, 4, 5],
    ],
)
def test_a_page_is_its_tokens_and_all_before_them(other):
    pool = PagePool(num_pages=8, page_size=2)
    pool.allocate([1, 2, 3, 4, 5])
    assert pool.num_cached_tokens(other) == 0
    assert pool.num_cached_tokens(np.array([1, 2, 3, 4, 5], np.uint8)) == 4


def test_appended_tokens_are_found_too():
    pool = PagePool(num_pages=8, page_size=2)
    seq_id = pool.allocate([1]).seq_id
    for token in (2, 3, 4):
        pool.append(seq_id, [token])
    pool.append_batch([-1, seq_id], [0, 5])
    assert pool.num_cached_tokens([1, 2, 3, 4, 5, 6]) == 4


def test_tokens_without_ids_end_what_can_be_found():
    pool = PagePool(num_pages=8, page_size=2)
    seq_id = pool.allocate([1, 2, 3]).seq_id
    pool.append(seq_id, num_tokens=1)
    pool.append(seq_id, [5, 6])
    pool.append_batch([pool.allocate(num_tokens=1).seq_id])
    assert pool.num_cached_tokens([1, 2, 3, 4, 5, 6, 7]) == 2


def test_freed_pages_are_revived_until_they_are_needed():
    pool = PagePool(num_pages=4, page_size=2)
    pool.free(pool.allocate([1, 2, 3, 4, 5]).seq_id)
    assert (pool.num_free_pages, pool.stats().num_cached_pages) == (4, 2)
    pool.free(pool.allocate(num_tokens=5).seq_id)
    # Three pages were needed: two held nothing, and the end of a beginning goes before its start.
    assert (pool.stats().num_cached_pages, pool.stats().num_evictions) == (1, 1)
    again = pool.allocate([1, 2, 3, 4, 5])
    assert again.num_cached_tokens == 2
    assert pool.stats().num_cached_pages == 0


def test_the_longest_unused_pages_are_evicted_first():
    pool = PagePool(num_pages=3, page_size=1)
    for token in (1, 2, 3):
        pool.free(pool.allocate([token]).seq_id)
    pool.free(pool.allocate([1]).seq_id)  # used again: now the oldest is 2
    pool.allocate([4])
    assert [pool.num_cached_tokens([token, 9]) for token in (1, 2, 3)] == [1, 0, 1]


def test_one_content_is_cached_once():
    pool = PagePool(num_pages=4, page_size=1)
    twins = [pool.allocate(num_tokens=0).seq_id for _ in range(3)]
    for seq_id in twins[:2]:
        pool.append(seq_id, [7])  # the same content twice: it came by appending, not by allocating
    assert pool.num_used_pages == 2
    for seq_id in twins[:2]:
        pool.free(seq_id)
    assert pool.stats().num_cached_pages == 1
    pool.append(twins[2], [7])
    assert pool.stats().num_cached_pages == 0
    assert pool.num_cached_tokens([7, 8]) == 1


def test_what_truncation_takes_away_is_not_found():
    pool = PagePool(num_pages=8, page_size=2)
    seq_id = pool.allocate([1, 2, 3, 4, 5, 6]).seq_id
    other = pool.fork(seq_id, 4)
    pool.truncate(seq_id, 3)
    # The fork holds the second page, so its tokens have been written; nothing holds the third.
    assert pool.num_cached_tokens([1, 2, 3, 4, 5, 6, 7]) == 4
    pool.free(other)
    pool.truncate(seq_id, 3)  # takes nothing away
    assert pool.num_cached_tokens([1, 2, 3, 4, 5]) == 4
    pool.truncate(seq_id, 2)
    pool.free(seq_id)
    assert pool.num_cached_tokens([1, 2, 3, 4, 5]) == 2
    assert pool.stats().num_cached_pages == 1


def test_rewritten_pages_are_found_by_what_they_hold_now():
    pool = PagePool(num_pages=8, page_size=2)
    seq_id = pool.allocate([1, 2, 3, 4, 5, 6]).seq_id
    three: Any = np.uint8(3)
    pool.truncate(seq_id, three)
    pool.append(seq_id, [9, 5])
    assert pool.num_cached_tokens([1, 2, 3, 4, 5, 6, 7]) == 2
    assert pool.num_cached_tokens([1, 2, 3, 9, 5]) == 4


# Forks


def test_all_but_the_last_holder_copy_a_page():
    pool = PagePool(num_pages=8, page_size=4)
    parent = pool.allocate([1, 2]).seq_id
    children = [pool.fork(parent), pool.fork(parent, 1)]
    assert pool.ref_counts()[0] == 3
    slots, copies = pool.append_batch([children[0], parent, children[1]], [5, 6, 7])
    assert copies.tolist() == [[0, 1], [0, 2], [-1, -1]]
    assert slots.tolist() == [1 * 4 + 2, 2 * 4 + 2, 0 * 4 + 1]
    assert pool.stats().num_copies == 2
    assert pool.append(parent, [8]).copies.tolist() == [[-1, -1]]


def test_whole_pages_are_shared_without_copies():
    pool = PagePool(num_pages=8, page_size=2)
    parent = pool.allocate([1, 2, 3, 4]).seq_id
    child = pool.fork(parent)
    slots, copies = pool.append_batch([child, parent], [5, 6])
    assert (copies == -1).all()
    assert slots.tolist() == [4, 6]
    assert pool.stats().num_shared_pages == 2


def test_a_copy_needs_a_free_page():
    pool = PagePool(num_pages=1, page_size=4)
    parent = pool.allocate([1]).seq_id
    child = pool.fork(parent)
    with pytest.raises(PoolExhausted, match=r"1 pages needed, 0 free"):
        pool.append(child, [2])
    pool.free(parent)
    assert pool.append(child, [2]).slots.tolist() == [1]


def test_forked_sequences_attend_to_their_own_tokens():
    """On device arrays: copies, writes by slot and attention over the pool's tables, against dense caches."""
    page_size, num_kv_heads, head_dim = 4, 2, 16
    rng = np.random.default_rng(0)
    pool = PagePool(num_pages=12, page_size=page_size, free_order=rng.permutation(12))
    k_pages, v_pages = (jnp.full((12, num_kv_heads, page_size, head_dim), jnp.nan) for _ in range(2))
    k_all, v_all = rng.standard_normal((2, 100, num_kv_heads, head_dim)).astype(np.float32)  # by token id

    def write(pages, slots, values):
        keep = slots >= 0
        return pages.at[slots[keep] // page_size, :, slots[keep] % page_size].set(values[keep])

    copy_in_place = jax.jit(copy_pages, donate_argnums=(0, 1))

    def step(slots, copies, tokens):
        nonlocal k_pages, v_pages
        k_pages, v_pages = copy_in_place(k_pages, v_pages, *copies.T)
        k_pages, v_pages = write(k_pages, slots, k_all[tokens]), write(v_pages, slots, v_all[tokens])

    prompt = [5, 6, 7, 8, 9, 10]
    first = pool.allocate(prompt)
    step(first.slots, np.full((1, 2), -1), prompt)
    second = pool.allocate([*prompt[:4], 11, 12])
    assert second.num_cached_tokens == 4
    step(second.slots, np.full((1, 2), -1), [11, 12])
    child = pool.fork(first.seq_id)
    histories = {first.seq_id: list(prompt), second.seq_id: [*prompt[:4], 11, 12], child: list(prompt)}
    for new in ([20, 21, 22], [30, 31, 32], [40, 41, 42]):
        rows = [child, second.seq_id, first.seq_id]
        appended = pool.append_batch(rows, new)
        step(*appended, new)
        for row, token in zip(rows, new, strict=True):
            histories[row].append(token)

    rows = [second.seq_id, -1, child, first.seq_id]
    q = jnp.asarray(rng.standard_normal((4, 4, head_dim)), jnp.float32)
    out = paged_attention(q, k_pages, v_pages, pool.page_table(rows))
    for row, seq_id in enumerate(rows):
        tokens = histories.get(seq_id, [])
        k, v = (jnp.asarray(x[tokens].swapaxes(0, 1)) for x in (k_all, v_all))
        expected = reference.decode_attention(q[row], k, v, len(tokens)) if tokens else jnp.zeros_like(q[row])
        testing.assert_close(out[row], expected)


# Order


def test_pages_are_handed_out_in_the_order_given_and_the_last_freed_first():
    pool = PagePool(num_pages=5, page_size=1, free_order=[3, 1, 4, 0, 2])
    first = pool.allocate(num_tokens=3).seq_id
    assert pool.pages(first).tolist() == [3, 1, 4]
    pool.free(first)
    assert pool.pages(pool.allocate(num_tokens=5).seq_id).tolist() == [3, 1, 4, 0, 2]


# Tables


def test_the_width_kept_doubles_and_stays():
    pool = PagePool(num_pages=64, page_size=1)
    seq_id = pool.allocate(num_tokens=8).seq_id
    assert pool.block_tables([seq_id]).shape == (1, 8)
    pool.append(seq_id, num_tokens=9)
    assert pool.block_tables([seq_id]).shape == (1, 32)
    pool.free(seq_id)
    assert pool.block_tables([-1, -1]).tolist() == [[-1] * 32] * 2
    assert pool.block_tables([]).shape == (0, 32)


@pytest.mark.parametrize("width", [3, 5, 8, 100])
def test_a_width_given_is_kept_to(width):
    pool = PagePool(num_pages=8, page_size=2)
    seq_ids = [pool.allocate(num_tokens=n).seq_id for n in (5, 0, 2)]
    tables = pool.block_tables([seq_ids[2], -1, seq_ids[0], seq_ids[1]], width=width)
    assert tables.dtype == np.int32
    assert tables.tolist() == [row + [-1] * (width - len(row)) for row in ([3], [], [0, 1, 2], [])]


def test_compressed_rows():
    pool = PagePool(num_pages=8, page_size=2)
    seq_ids = [pool.allocate(num_tokens=n).seq_id for n in (5, 0, 4)]
    rows = [seq_ids[2], -1, seq_ids[0], seq_ids[1]]
    expected = [0, 2, 2, 5, 5], [3, 4, 0, 1, 2], [2, 0, 1, 0]
    csr = pool.csr(rows)
    assert all(array.dtype == np.int32 for array in csr)
    assert tuple(array.tolist() for array in csr) == expected
    assert pool.csr(rows, num_entries=7)[1].tolist() == [*expected[1], -1, -1]
    table = PageTable.from_csr(*csr, page_size=2, validate_values=True)
    assert table.kv_lens.tolist() == pool.kv_lens(rows).tolist() == [4, 0, 5, 0]
    assert pool.page_table(rows, width=3).row_starts.tolist() == [0, 3, 6, 9]


def test_tables_given_out_do_not_change_later():
    pool = PagePool(num_pages=8, page_size=1)
    seq_id = pool.allocate([1, 2]).seq_id
    results = [pool.block_tables([seq_id]), pool.kv_lens([seq_id]), pool.pages(seq_id), pool.ref_counts()]
    results += pool.csr([seq_id])
    before = copy.deepcopy(results)
    pool.append(seq_id, [3])
    pool.free(seq_id)
    for array, old in zip(results, before, strict=True):
        np.testing.assert_array_equal(array, old)


# Errors


def test_an_exhausted_pool_says_what_is_needed():
    pool = PagePool(num_pages=4, page_size=2)
    seq_ids = [pool.allocate(num_tokens=2).seq_id for _ in range(3)]
    with pytest.raises(PoolExhausted, match=r"^the pool is exhausted: 3 pages needed, 1 free$") as refused:
        pool.append_batch(seq_ids)
    assert (refused.value.needed, refused.value.free) == (3, 1)
    copied = pickle.loads(pickle.dumps(refused.value))
    assert (str(copied), copied.needed) == (str(refused.value), 3)
    with pytest.raises(PoolExhausted, match=r"1073741824 pages needed, 1 free"):
        pool.allocate(num_tokens=2**31 - 1)
    assert pool.kv_lens(seq_ids).tolist() == [2, 2, 2]
    assert pool.append_batch(seq_ids[:1]).slots.tolist() == [6]


def test_pages_to_revive_are_not_free_for_anything_else():
    pool = PagePool(num_pages=2, page_size=1)
    pool.free(pool.allocate([1, 2]).seq_id)
    with pytest.raises(PoolExhausted, match=r"3 pages needed, 2 free"):
        pool.allocate([1, 2, 3])
    assert pool.num_cached_tokens([1, 2, 3]) == 2


ERRORS = [
    ("num_pages", lambda pool, a, b: PagePool(0, 4)),
    ("num_pages", lambda pool, a, b: PagePool(2**29, 4)),
    ("page_size", lambda pool, a, b: PagePool(4, cast(Any, 2.0))),
    ("free_order", lambda pool, a, b: PagePool(3, 4, free_order=[0, 1])),
    ("free_order", lambda pool, a, b: PagePool(3, 4, free_order=[0, 1, 1])),
    ("free_order", lambda pool, a, b: PagePool(3, 4, free_order=[[0, 1, 2]])),
    ("free_order", lambda pool, a, b: PagePool(3, 4, free_order=[0.0, 1.0, 2.0])),
    ("tokens", lambda pool, a, b: pool.allocate()),
    ("tokens", lambda pool, a, b: pool.allocate([1], num_tokens=1)),
    ("tokens", lambda pool, a, b: pool.allocate(3)),
    ("tokens", lambda pool, a, b: pool.allocate([[3]])),
    ("tokens", lambda pool, a, b: pool.allocate([1.0])),
    ("tokens", lambda pool, a, b: pool.allocate([True])),
    ("tokens", lambda pool, a, b: pool.allocate("abc")),
    ("tokens", lambda pool, a, b: pool.allocate([1, -1])),
    ("tokens", lambda pool, a, b: pool.allocate(np.array([2**63], np.uint64))),
    ("num_tokens", lambda pool, a, b: pool.allocate(num_tokens=-1)),
    ("num_tokens", lambda pool, a, b: pool.allocate(num_tokens=2**31)),
    ("num_tokens", lambda pool, a, b: pool.allocate(num_tokens=1.0)),
    ("tokens", lambda pool, a, b: pool.num_cached_tokens(None)),
    ("seq_id", lambda pool, a, b: pool.append(7, [1])),
    ("seq_id", lambda pool, a, b: pool.append(-1, [1])),
    ("seq_id", lambda pool, a, b: pool.append(True, [1])),
    ("seq_id", lambda pool, a, b: pool.append([a], [1])),
    ("tokens", lambda pool, a, b: pool.append(a)),
    ("tokens", lambda pool, a, b: pool.append(a, 1)),
    ("seq_ids", lambda pool, a, b: pool.append_batch([a, a])),
    ("seq_ids", lambda pool, a, b: pool.append_batch([a, 7])),
    ("seq_ids", lambda pool, a, b: pool.append_batch([a, -2])),
    ("seq_ids", lambda pool, a, b: pool.append_batch(a)),
    ("tokens", lambda pool, a, b: pool.append_batch([a, b], [1])),
    ("tokens", lambda pool, a, b: pool.append_batch([a, b], [[1], [2]])),
    ("tokens", lambda pool, a, b: pool.append_batch([a, b], [1, -2])),
    ("num_tokens", lambda pool, a, b: pool.append_batch([a, b], num_tokens=[1])),
    ("num_tokens", lambda pool, a, b: pool.append_batch([a, b], num_tokens=[1, -1])),
    ("num_tokens", lambda pool, a, b: pool.append_batch([a, b], num_tokens=[1, 2**31])),
    ("num_tokens", lambda pool, a, b: pool.append_batch([a, b], num_tokens=1.0)),
    ("seq_id", lambda pool, a, b: pool.fork(7)),
    ("num_tokens", lambda pool, a, b: pool.fork(a, 6)),
    ("num_tokens", lambda pool, a, b: pool.fork(a, -1)),
    ("seq_id", lambda pool, a, b: pool.truncate(7, 0)),
    ("num_tokens", lambda pool, a, b: pool.truncate(a, 6)),
    ("num_tokens", lambda pool, a, b: pool.truncate(a, None)),
    ("seq_id", lambda pool, a, b: pool.free(7)),
    ("seq_id", lambda pool, a, b: pool.pages(7)),
    ("seq_ids", lambda pool, a, b: pool.kv_lens([7])),
    ("seq_ids", lambda pool, a, b: pool.block_tables([[a]])),
    ("width", lambda pool, a, b: pool.block_tables([a, b], width=2)),
    ("width", lambda pool, a, b: pool.page_table([a, b], width=3.0)),
    ("seq_ids", lambda pool, a, b: pool.csr([0.0])),
    ("num_entries", lambda pool, a, b: pool.csr([a, b], num_entries=3)),
]


@pytest.mark.parametrize(("name", "call"), ERRORS)
def test_wrong_use_is_named_and_changes_nothing(name, call):
    pool = PagePool(num_pages=8, page_size=2)
    a, b = pool.allocate([1, 2, 3, 4, 5]).seq_id, pool.allocate([1]).seq_id
    before = pool.stats(), pool.block_tables([a, b]).tolist(), pool.kv_lens([a, b]).tolist()
    with pytest.raises(ValueError, match=f"^{name}: expected .*, got "):
        call(pool, a, b)
    assert before == (pool.stats(), pool.block_tables([a, b]).tolist(), pool.kv_lens([a, b]).tolist())
    assert pool.allocate([]).seq_id == 2


def test_counters():
    pool = PagePool(num_pages=6, page_size=2)
    seq_id = pool.allocate([1, 2, 3, 4, 5]).seq_id
    pool.allocate([1, 2, 9])
    pool.append(pool.fork(seq_id), [6])
    pool.free(seq_id)
    stats = pool.stats()
    assert stats.num_pages == 6
    assert (stats.num_used_pages, stats.num_free_pages, stats.peak_used_pages) == (4, 2, 5)
    assert (stats.num_cached_pages, stats.num_shared_pages, stats.num_seqs) == (0, 1, 2)
    assert (stats.num_looked_up_tokens, stats.num_hit_tokens) == (8, 2)
    assert (stats.num_copies, stats.num_evictions) == (1, 0)


# Costs


def cost(do):
    """Calls of functions, Python's and C's, and the most memory in use on the way."""
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        do()
    finally:
        sys.setprofile(before)
    tracemalloc.start()
    do()
    memory = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return calls, memory


@pytest.mark.parametrize("operation", ["append", "append_batch", "copy_on_write", "truncate", "lookup"])
def test_the_cost_of_a_token_depends_neither_on_its_sequence_nor_on_the_pool(operation):
    costs = []
    for num_pages, length in ((64, 3), (2**16, 10**5 + 3)):
        pool = PagePool(num_pages, 16)
        seq_ids = [pool.allocate(np.arange(length) * 4 + i).seq_id for i in range(2)]
        pool.free(pool.allocate(np.arange(length // 2)).seq_id)
        children = [pool.fork(seq_ids[1]) for _ in range(3)]

        def step(pool=pool, a=seq_ids[0], children=children, length=length):
            if operation == "append":
                pool.append(a, [7])
            elif operation == "append_batch":
                pool.append_batch([-1, a, children[0]], [7, 8, 9])
            elif operation == "copy_on_write":
                assert pool.append(children.pop(), [7]).copies[0, 0] >= 0
            elif operation == "truncate":
                pool.truncate(a, length - 1)
                pool.append(a, [7])
            else:
                pool.num_cached_tokens([9, 8])
                pool.num_free_pages  # noqa: B018

        step()
        costs.append(cost(step))
    (calls, memory), (more_calls, more_memory) = costs
    assert more_calls == calls
    assert more_memory < memory + 1000


def test_many_tokens_cost_no_more_than_one_by_one():
    """Whole sequences: a number of calls that grows with the pages, as new pages do."""

    def life(length):
        pool = PagePool(num_pages=4 * length, page_size=4)
        tokens = np.arange(length)

        def run():
            seq_id = pool.allocate(tokens).seq_id
            child = pool.fork(seq_id)
            for token in range(length // 4):
                pool.append_batch([seq_id, child], [token, -~token])
            pool.truncate(child, length // 2)
            pool.free(seq_id)
            pool.free(child)

        run()
        return cost(run)[0]

    lives = [life(length) for length in (250, 500, 1000, 2000)]
    for half, whole in itertools.pairwise(lives):
        assert whole < 2.1 * half


def test_what_makes_no_sense_changes_nothing():
    pool = PagePool(num_pages=4, page_size=4)
    seq_id = pool.allocate(num_tokens=2).seq_id
    duration: Any = np.timedelta64(seq_id, "s")  # to numpy an integer
    with pytest.raises(ValueError, match="seq_id: expected the id of a live sequence"):
        pool.free(duration)
    assert pool.kv_lens([seq_id]).tolist() == [2]
    for read in (
        lambda: pool.block_tables([seq_id], width=2**62),
        lambda: pool.csr([seq_id], num_entries=2**62),
    ):
        with pytest.raises(ValueError, match=r"^(width|num_entries): expected an int in"):
            read()
