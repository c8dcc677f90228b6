"""Whatever is done to a pool, in whatever order, it is what a dict of lists would be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule, run_state_machine_as_test
from support_block_pool import refused
from support_naive_pool import WatchedPool, inside

from fuel_core.contracts.errors import (
    BadBlockIndexError,
    BadSpliceRangeError,
    InvalidRequestError,
    OffsetNotBlockAlignedError,
    PrefixNotFullyFilledError,
    PrefixTargetNotEmptyError,
    SessionNotResidentError,
    UnknownPrefixError,
    UnknownSessionError,
)
from fuel_core.kv import Evicted, EvictReport, Fidelity, PrefixId, SessionHandle, StateKind

who = place = st.integers(0, 99)


class PoolMachine(WatchedPool):
    """Every call, right and wrong, beside the naive model, which says what is wrong with it."""

    @initialize(num_blocks=st.integers(1, 20), block_size=st.integers(1, 4), tokens=st.integers(0, 12))
    def start(self, num_blocks: int, block_size: int, tokens: int) -> None:
        self.begin(num_blocks, block_size)
        self.open(tokens)
        self.register_prefix(0, 0, 0)
        self.fork(0)

    # -- sessions ------------------------------------------------------------------------------

    @rule(tokens=st.integers(0, 12))
    def open(self, tokens: int) -> None:
        session = self.pool.open()
        assert session not in self.model.slots
        assert session not in self.closed
        self.model.slots[session], self.model.filled[session] = [], 0
        self._append(session, tokens)

    @rule(left=st.integers(0, 1))
    def exhaust(self, left: int) -> None:
        """So that what needs a block is often short of one."""
        self.open(max(0, self.model.free() - left) * self.model.size)

    @rule(who=who, tokens=st.integers(-1, 12))
    def append(self, who: int, tokens: int) -> None:
        self._append(self.session(who), tokens)

    def _append(self, session: SessionHandle, tokens: int) -> None:
        model, wrong = self.model, [self.unknown(session), tokens < 0 and InvalidRequestError]
        tail_is_shared = False
        if not any(wrong):
            tail = model.slots[session][-1:] if tokens and model.is_partial(session) else []
            wrong.append(model.lacks(tail) and SessionNotResidentError)
            tail_is_shared = any(model.references()[slot] > 1 for slot in tail if isinstance(slot, int))

        def ask() -> int:
            return self.pool.blocks_required_for(session, tokens)

        def call() -> None:
            self.pool.append(session, tokens)

        if self.is_refused("append", call, *wrong):
            assert self.is_refused("blocks_required_for", ask, *wrong)
            return
        filled = model.filled[session]
        need = model.blocks_of(filled + tokens) - model.blocks_of(filled)
        assert ask() == need + tail_is_shared
        assert self.pool.blocks_required(filled, tokens) == need
        if not self.is_short("append", call, need):
            call()
            self.adopt(session, need)
            model.filled[session] += tokens

    @rule(who=who, place=place)
    def truncate(self, who: int, place: int) -> None:
        session, model = self.session(who), self.model
        tokens = inside(place, model.filled.get(session, 0) + 1)
        too_many = tokens < 0 or tokens > model.filled.get(session, tokens)

        def call() -> None:
            self.pool.truncate(session, tokens)

        if not self.is_refused("truncate", call, self.unknown(session), too_many and InvalidRequestError):
            call()
            del model.slots[session][model.blocks_of(tokens) :]
            model.filled[session] = tokens

    @rule(who=who)
    def discard(self, who: int) -> None:
        session = self.session(who)
        if not self.is_refused("discard", lambda: self.pool.discard(session), self.unknown(session)):
            self.pool.discard(session)
            del self.model.slots[session], self.model.filled[session]
            self.closed.append(session)

    # -- eviction ------------------------------------------------------------------------------

    @rule(who=who)
    def evict(self, who: int) -> None:
        self._evict(self.session(who))

    @rule(tokens=st.integers(1, 12))
    def evict_what_is_new(self, tokens: int) -> None:
        self.open(tokens)
        self._evict(list(self.model.slots)[-1])

    def _evict(self, session: SessionHandle) -> None:

        def call() -> EvictReport:
            return self.pool.evict(session)

        if not self.is_refused("evict", call, self.unknown(session)):
            self.detach(session, range(len(self.model.slots[session])), call())

    @rule(who=who, places=st.lists(place, max_size=3))
    def evict_blocks(self, who: int, places: list[int]) -> None:
        session = self.session(who)
        indices = [inside(place, self.length(session)) for place in places]
        slots = self.model.slots.get(session, [])
        bad = len(set(indices)) < len(indices) or any(i not in range(len(slots)) for i in indices)

        def call() -> EvictReport:
            return self.pool.evict_blocks(session, indices)

        if not self.is_refused("evict_blocks", call, self.unknown(session), bad and BadBlockIndexError):
            self.detach(session, indices, call())

    @rule(who=who, a=place, b=place)
    def evict_range(self, who: int, a: int, b: int) -> None:
        session = self.session(who)
        start, end = self.range_of(session, a, b)
        bad = not 0 <= start <= end <= self.length(session)

        def call() -> EvictReport:
            return self.pool.evict_range(session, start, end)

        if not self.is_refused("evict_range", call, self.unknown(session), bad and BadBlockIndexError):
            self.detach(session, range(start, end), call())

    def detach(self, session: SessionHandle, named: Any, report: EvictReport) -> None:
        slots, references, handle = self.model.slots[session], self.model.references(), report.handle
        resident = {i: block for i in named if isinstance(block := slots[i], int)}
        alone = [i for i, block in resident.items() if references[block] == 1]
        assert (report.freed, report.still_shared) == (len(alone), len(resident) - len(alone))
        assert (handle.session, list(handle.slots)) == (session, sorted(alone))
        assert (handle.covers, handle.fidelity) == ((StateKind.KV_BLOCKS,), Fidelity.LOSSY)
        for i in alone:
            slots[i] = handle
        self.model.handles.append(handle)
        self.seen["detached"] += bool(alone)
        self.seen["kept since shared"] += bool(report.still_shared)

    @rule(who=who, which=place)
    def restore(self, who: int, which: int) -> None:
        handles = [*self.model.handles, self.foreign]
        self._restore(self.session(who), handles[which % len(handles)])

    @rule(which=place)
    def restore_what_is_missing(self, which: int) -> None:
        good = [slot for slots in self.model.slots.values() for slot in slots if isinstance(slot, Evicted)]
        if good:
            handle = good[which % len(good)]
            self._restore(handle.session, handle)

    def _restore(self, session: SessionHandle, handle: Evicted) -> None:
        model = self.model
        bad = handle in [*model.spent, self.foreign] or handle.session != session

        def call() -> list[tuple[int, int]]:
            return self.pool.restore(session, handle)

        if self.is_refused("restore", call, self.unknown(session), bad and InvalidRequestError):
            return
        missing = [i for i, slot in enumerate(model.slots[session]) if slot is handle]
        if self.is_short("restore", call, len(missing)):
            return
        pairs = call()
        assert [slot for slot, _ in pairs] == missing
        assert not {block for _, block in pairs} & set(model.references())
        for slot, block in pairs:
            model.slots[session][slot] = block
        model.spent.append(handle)
        self.seen["put back"] += bool(pairs)

    # -- sharing -------------------------------------------------------------------------------

    @rule(a=who, b=who, c=place, d=place)
    def splice(self, a: int, b: int, c: int, d: int) -> None:
        src = self.session(a)
        self._splice(src, self.session(b), *self.range_of(src, c, d))

    @rule(who=who)
    def fork(self, who: int) -> None:
        src = self.session(who)
        self.open(0)
        self._splice(src, list(self.model.slots)[-1], 0, self.length(src))

    def _splice(self, src: SessionHandle, dst: SessionHandle, start: int, end: int) -> None:
        model = self.model
        wrong = [self.unknown(src, dst)]
        if not any(wrong):
            exists = 0 <= start <= end <= len(model.slots[src])
            wrong.append(not exists and BadSpliceRangeError)
            wrong.append(exists and model.lacks(model.slots[src][start:end]) and SessionNotResidentError)
            wrong.append(model.is_partial(dst) and OffsetNotBlockAlignedError)

        def call() -> None:
            self.pool.splice(src, dst, start, end)

        if not self.is_refused("splice", call, *wrong):
            call()
            carried = [i for i in range(model.filled[src]) if start <= i // model.size < end]
            model.slots[dst] += model.slots[src][start:end]
            model.filled[dst] += len(carried)

    @rule(who=who, place=place)
    def cow_break(self, who: int, place: int) -> None:
        session = self.session(who)
        self._cow_break(session, inside(place, self.length(session)))

    @rule(who=who)
    def cow_break_a_share(self, who: int) -> None:
        references = self.model.references()
        shared = [
            (session, i)
            for session, slots in self.model.slots.items()
            for i, slot in enumerate(slots)
            if isinstance(slot, int) and references[slot] > 1
        ]
        if shared:
            self._cow_break(*shared[who % len(shared)])

    def _cow_break(self, session: SessionHandle, slot: int) -> None:
        model = self.model
        wrong = [self.unknown(session)]
        if not any(wrong):
            exists = 0 <= slot < len(model.slots[session])
            wrong.append(not exists and BadBlockIndexError)
            wrong.append(exists and model.lacks([model.slots[session][slot]]) and SessionNotResidentError)

        def call() -> tuple[int, int] | None:
            return self.pool.cow_break(session, slot)

        if self.is_refused("cow_break", call, *wrong):
            return
        old = model.slots[session][slot]
        assert isinstance(old, int)
        if model.references()[old] == 1:
            assert call() is None
        elif not self.is_short("cow_break", call, 1):
            pair = call()
            assert pair is not None
            assert pair[0] == old
            assert pair[1] not in model.references()
            model.slots[session][slot] = pair[1]
            self.seen["broken"] += 1

    # -- prefixes ------------------------------------------------------------------------------

    @rule(who=who, place=place, more=st.sampled_from([0, 0, 0, 1]))
    def register_prefix(self, who: int, place: int, more: int) -> None:
        donor, model = self.session(who), self.model
        blocks = inside(place, self.length(donor)) + 1
        tokens = blocks * model.size + more
        wrong = [self.unknown(donor)]
        if not any(wrong):
            sizes = [n * model.size for n in range(1, len(model.slots[donor]) + 1)]
            whole = tokens in sizes and tokens <= model.filled[donor]
            wrong.append(not whole and PrefixNotFullyFilledError)
            wrong.append(whole and model.lacks(model.slots[donor][:blocks]) and SessionNotResidentError)

        def call() -> PrefixId:
            return self.pool.register_prefix(donor, tokens)

        if not self.is_refused("register_prefix", call, *wrong):
            prefix = call()
            assert prefix not in [*model.prefixes, *self.released]
            held = model.slots[donor][: model.blocks_of(tokens)]
            model.prefixes[prefix] = [block for block in held if isinstance(block, int)]

    @rule(who=who)
    def release_prefix(self, who: int) -> None:
        prefix = self.prefix(who)

        def call() -> None:
            self.pool.release_prefix(prefix)

        if not self.is_refused("release_prefix", call, self.unknown_prefix(prefix)):
            call()
            del self.model.prefixes[prefix]
            self.released.append(prefix)

    @rule(a=who, b=who, is_new=st.booleans())
    def splice_prefix_from(self, a: int, b: int, is_new: bool) -> None:
        if is_new:
            self.open(0)
        model, prefix = self.model, self.prefix(a)
        dst = list(model.slots)[-1] if is_new else self.session(b)
        wrong = [self.unknown_prefix(prefix), self.unknown(dst)]
        wrong.append(model.filled.get(dst, 0) > 0 and PrefixTargetNotEmptyError)

        def call() -> int:
            return self.pool.splice_prefix_from(prefix, dst)

        if not self.is_refused("splice_prefix_from", call, *wrong):
            assert call() == len(model.prefixes[prefix]) * model.size
            model.slots[dst] += model.prefixes[prefix]
            model.filled[dst] = len(model.prefixes[prefix]) * model.size

    @rule(a=who, b=who)
    def alloc_shifted_prefix_slots(self, a: int, b: int) -> None:
        model, prefix, dst = self.model, self.prefix(a), self.session(b)
        wrong = [self.unknown_prefix(prefix), self.unknown(dst)]
        if not any(wrong):
            wrong.append(model.is_partial(dst) and OffsetNotBlockAlignedError)

        def call() -> tuple[int, list[tuple[int, int]]]:
            return self.pool.alloc_shifted_prefix_slots(prefix, dst)

        if self.is_refused("alloc_shifted_prefix_slots", call, *wrong):
            return
        source = model.prefixes[prefix]
        if not self.is_short("alloc_shifted_prefix_slots", call, len(source)):
            offset, pairs = call()
            self.adopt(dst, len(source))
            assert offset == model.filled[dst]
            assert pairs == list(zip(source, model.slots[dst][-len(source) :], strict=True))
            model.filled[dst] += len(source) * model.size

    # -- questions -----------------------------------------------------------------------------

    @rule(who=st.integers(90, 99), block=st.sampled_from([-1, 0]))
    def ask_about_what_is_not_there(self, who: int, block: int) -> None:
        questions: list[Callable[[SessionHandle], object]] = [
            self.pool.filled_tokens,
            self.pool.session_blocks,
            self.pool.session_block_table,
            lambda session: self.pool.resident_block(session, 0),
        ]
        for question in questions:
            with refused(self.pool, UnknownSessionError):
                question(self.session(who))
        with refused(self.pool, UnknownPrefixError):
            self.pool.prefix_blocks(self.prefix(who))
        with refused(self.pool, BadBlockIndexError):
            self.pool.block_refcount(block or self.model.total)


CALLS = (
    "append",
    "truncate",
    "discard",
    "evict",
    "evict_blocks",
    "evict_range",
    "restore",
    "splice",
    "cow_break",
    "register_prefix",
    "release_prefix",
    "splice_prefix_from",
    "alloc_shifted_prefix_slots",
)
ALLOCATING = ("append", "restore", "cow_break", "alloc_shifted_prefix_slots")


DUE = [
    *(f"{call}: {end}" for call in CALLS for end in ("served", "refused")),
    *(f"{call}: out of blocks" for call in ALLOCATING),
    *("detached", "kept since shared", "put back", "broken"),
]
"""What must have happened, or the machine has shown nothing."""


def test_the_pool_is_the_naive_model_after_any_sequence_of_right_and_wrong_calls() -> None:
    PoolMachine.seen.clear()
    runs = 0
    # One run may by chance miss an end that is rare.
    while runs < 3 and not all(PoolMachine.seen[end] for end in DUE):
        run_state_machine_as_test(
            PoolMachine,
            settings=settings(
                max_examples=100,
                stateful_step_count=40,
                deadline=None,
                suppress_health_check=[HealthCheck.too_slow],
            ),
        )
        runs += 1
    assert [end for end in DUE if not PoolMachine.seen[end]] == []
