"""The settings of an engine: frozen, validated once, shared by all executors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self, final

from jaxserve.core.errors import InvalidConfigError
from jaxserve.core.options import RESTORES
from jaxserve.core.page_layout import PageLayout, page_layout

# Sizes of mixed steps double from the first number of tokens on. Below it there are sizes between
# powers of two, if the largest step has at least the second number.
_COARSE_TOKENS, _FINE_TOKENS = 256, 128
# Maximum number of pages that a mixed step copies from the host; it takes memory for all of them.
_MAX_INCOMING_PAGES = 64
# Maximum number of pages that one plan copies to the host: this number, times that of a sequence's
# page tables, or a share of a larger pool. They take device memory until they are copied.
_OUTGOING_PAGES = 64
_OUTGOING_SHARE = 64
# The same for pages from the host. The other sequences of the step wait for them.
_INCOMING_PAGES = 64
_INCOMING_SHARE = 256
# Steps of a device group that may be submitted, or planned, and not read at a time.
_STEPS_AHEAD = 3
# Tokens that a kernel computes together: a part of a tile takes as long as a whole one.
_TILE = 8


def _ladder(largest: int, *, smallest: int, ratio: int = 4) -> tuple[int, ...]:
    """Return increasing sizes that end in `largest`, each about `ratio` times the previous one.

    The first is at least `smallest`, if `largest` is. There are few sizes, because every one is an
    executable to compile and keep.
    """
    sizes = [largest]
    while sizes[-1] // ratio >= smallest:
        sizes.append(sizes[-1] // ratio)
    return tuple(reversed(sizes))


@final
@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The sizes that executables are compiled for."""

    page_size: int = 32  # tokens per page
    num_pages: int  # pages of the pool, including the null page (page 0)
    max_slots: int = 32  # maximum number of sequences that run at once
    max_context: int = 2048  # maximum number of tokens of a sequence, prompt and output together
    # Maximum number of tokens of a mixed step (prefill chunks and decode rows).
    max_step_tokens: int = 512
    max_decode_iterations: int = 8  # maximum number of iterations of an on-device decode loop
    # Maximum number of tokens that a decode loop proposes in an iteration, of all rows together
    # (with stages, of a micro-batch); 0 for a runtime that does not speculate.
    num_proposed: int = 0
    # A draft model makes the proposals, equally many for each row; else they are looked up.
    drafts: bool = False
    token_buckets: tuple[int, ...] = ()  # compiled sizes of a mixed step; empty for default sizes
    # Compiled sizes of the decode window; empty for default sizes.
    slot_buckets: tuple[int, ...] = ()
    # Compiled sizes of the sampling head of a mixed step; empty for default sizes.
    head_buckets: tuple[int, ...] = ()
    # Sizes of the sampling head with masks, in addition to `head_buckets`.
    masked_head_buckets: tuple[int, ...] = ()
    # Implementation of paged attention, or several separated by commas; None for the platform's
    # choice.
    attention: str | None = None
    # Kernels of products and norms that give a row the same bits in any batch, and attention whose
    # bits do not depend on chunks; None for the platform's choice.
    row_kernels: str | None = None
    # Decode loops are recorded in CUDA graphs; None if a test of such a loop passes.
    graph_loops: bool | None = None
    num_host_pages: int = 0  # pages of host memory for KV that leaves the device
    # Dtype of the pages, see `RuntimeOptions`; None for the model's dtype.
    kv_dtype: str | None = None
    restore: str = "on_admission"  # when pages are copied back from the host, see `RuntimeOptions`
    # Maximum number of pages that one plan copies from the host while sequences run; None for a
    # share of the pool.
    incoming_pages: int | None = None
    # The model is an encoder-decoder: the encoder computes a prompt in one step, and it fills whole
    # pages.
    has_encoder: bool = False
    # The model keeps a state of each sequence in its slot, with or without pages. Pages alone do
    # not continue a sequence then: without snapshots of states none are kept or shared.
    has_slot_state: bool = False
    num_snapshots: int = 0  # maximum number of states that are kept beside those in slots
    num_host_snapshots: int = 0  # maximum number of those that are kept on the host
    # The window of each layer with keys and values, if layers with equal windows share page tables
    # (`PageLayout`); empty if one table serves all layers.
    layer_windows: tuple[int | None, ...] = ()
    max_adapters: int = 0  # maximum number of adapters; 0 for steps without adapters
    # What a request that pools gets: its prompt's "last" hidden state, the "mean" of all, or the
    # logits of the model's "labels" for the last one.
    pooling: str = "last"

    def __post_init__(self) -> None:
        for name in ("page_size", "max_slots", "max_context", "max_decode_iterations"):
            if getattr(self, name) < 1:
                raise InvalidConfigError(
                    f"{name}={getattr(self, name)} is not allowed; pass at least 1"
                )
        if self.num_pages < 2:
            raise InvalidConfigError(
                f"num_pages={self.num_pages} is too small; the pool needs the null page and at "
                "least one more, so pass more kv_memory"
            )
        if self.page_layout.is_grouped and (
            self.num_incoming_pages or self.drafts or self.has_encoder or self.has_slot_state
        ):
            raise InvalidConfigError(
                f"layer_windows={self.layer_windows} is not allowed with pages that come layer by "
                "layer, a draft model, an encoder or states in slots; omit it"
            )
        if self.num_host_pages < 0:
            raise InvalidConfigError(
                f"num_host_pages={self.num_host_pages} is not allowed; pass at least 0"
            )
        if self.has_slot_state and self.num_incoming_pages:
            raise InvalidConfigError(
                f"restore={self.restore!r} is not allowed for a model with states in slots, whose "
                "pages do not come layer by layer; pass 'on_admission' or 'prefetch'"
            )
        if self.num_host_snapshots and not self.num_snapshots:
            raise InvalidConfigError(
                f"num_host_snapshots={self.num_host_snapshots} is not allowed without "
                "num_snapshots, from which states go to the host; pass 0"
            )
        if self.num_snapshots and not self.has_slot_state:
            raise InvalidConfigError(
                f"num_snapshots={self.num_snapshots} is not allowed for a model without states in "
                "slots; pass 0"
            )
        if self.restore not in RESTORES:
            raise InvalidConfigError(f"restore={self.restore!r} is unknown; pass one of {RESTORES}")
        if self.max_step_tokens < self.max_slots:
            raise InvalidConfigError(
                f"max_step_tokens={self.max_step_tokens} is less than max_slots={self.max_slots}, "
                "but a step must be able to decode every slot; raise it or lower max_slots"
            )
        defaults = {
            "token_buckets": _ladder(self.max_step_tokens, smallest=64, ratio=2),
            "slot_buckets": tuple(
                sorted({1, *_ladder(self.max_slots, smallest=4), -(-self.max_slots // 2)})
            ),
            "head_buckets": _ladder(self.max_slots, smallest=4, ratio=8),
        }
        largest = (self.max_step_tokens, self.max_slots, self.max_slots)
        for (name, ladder), top in zip(defaults.items(), largest, strict=True):
            sizes = getattr(self, name) or ladder
            object.__setattr__(self, name, sizes)
            if list(sizes) != sorted(set(sizes)) or sizes[0] < 1 or sizes[-1] != top:
                raise InvalidConfigError(
                    f"{name}={sizes} is not allowed; pass increasing sizes that end with {top}"
                )

    @property
    def coarse_token_buckets(self) -> tuple[int, ...]:
        """The sizes in `token_buckets` that are compiled first, and that all mixed steps have.

        Steps that score prompts, or copy pages from the host, have only these.
        """
        coarse = _ladder(self.max_step_tokens, smallest=64, ratio=2)
        return tuple(size for size in self.token_buckets if size in coarse)

    def num_proposed_beside(self, num_rows: int) -> int:
        """Return how many tokens a decode loop over `num_rows` rows proposes in an iteration, or 0.

        Rows and proposals fill whole tiles of tokens if they can. With twice as many rows as
        proposals, even correct proposals add at most half the tokens, so that loops with more rows
        propose none.
        """
        if num_rows > 2 * self.num_proposed:
            return 0
        if self.drafts:
            return self.num_proposed // num_rows * num_rows
        num_in_tiles = self.num_proposed - (num_rows + self.num_proposed) % _TILE
        return num_in_tiles if num_in_tiles > 0 else self.num_proposed

    @property
    def proposes_on_host(self) -> bool:
        """Whether mixed steps have proposals, as rows of their own; a state has only one row."""
        return self.num_proposed > 0 and not self.has_slot_state

    @property
    def speculating_buckets(self) -> tuple[int, ...]:
        """Compiled sizes of the decode windows that speculate, in every variant; may be empty.

        Proposals are computed for few rows, and replace padding, so that all of these sizes are
        compiled also for variants that otherwise have few.
        """
        return tuple(size for size in self.slot_buckets if self.num_proposed_beside(size))

    def without_proposals(self) -> Self:
        """Return the sizes of an engine that never speculates, as a group for prompts."""
        return replace(self, num_proposed=0, drafts=False)

    @property
    def page_layout(self) -> PageLayout:
        return page_layout(self.layer_windows)

    @property
    def answer_stride(self) -> int:
        """The most positions that plans are ahead of an answer's tokens that were read."""
        return _STEPS_AHEAD * self.max_decode_iterations * (1 + self.num_proposed)

    @property
    def prompt_stride(self) -> int:
        """The same while a prompt is computed, which a plan can be ahead of by its own rows."""
        return max(self.max_step_tokens, self.answer_stride)

    @property
    def max_pages_per_table(self) -> int:
        return -(-self.max_context // self.page_size)

    @property
    def max_pages_per_sequence(self) -> int:
        """The most pages that a sequence holds at once."""
        return self.page_layout.most_pages(self.max_context, self.page_size, self.prompt_stride)

    @property
    def admission_buckets(self) -> tuple[int, ...]:
        """Compiled sizes of the tokens that sequences bring to their slots in one call."""
        return _ladder(self.max_context, smallest=256)

    @property
    def prefetches(self) -> bool:
        """Whether pages of waiting sequences are copied back from the host before admission."""
        return self.restore in ("prefetch", "both")

    @property
    def num_incoming_pages(self) -> int:
        """Return how many pages a mixed step copies from the host layer by layer at most, or 0."""
        if self.restore not in ("per_layer", "both"):
            return 0
        return min(_MAX_INCOMING_PAGES, self.max_pages_per_sequence)

    @property
    def max_pages_out(self) -> int:
        """Return the maximum number of pages that one plan copies to the host."""
        return max(_OUTGOING_PAGES * self.page_layout.num_tables, self.num_pages // _OUTGOING_SHARE)

    @property
    def max_pages_in(self) -> int:
        """Maximum number of pages that one plan copies from the host while sequences run."""
        return self.incoming_pages or max(
            _INCOMING_PAGES * self.page_layout.num_tables, self.num_pages // _INCOMING_SHARE
        )

    @property
    def pool_tokens(self) -> int:
        """The tokens that fit in the pool if every page table has all of them."""
        return (self.num_pages - 1) // self.page_layout.num_tables * self.page_size

    @property
    def max_length(self) -> int:
        """Maximum number of tokens of a sequence that fit in the context and in the pool."""
        if not self.page_layout.is_grouped:
            return min(self.max_context, (self.num_pages - 1) * self.page_size)
        return self.page_layout.most_tokens(
            self.num_pages - 1, self.page_size, self.prompt_stride, self.max_context
        )

    @property
    def max_prompt_tokens(self) -> int:
        """Return the maximum number of prompt tokens, which leave room for one output token.

        An encoder's prompt must also fit in a step, and a start token follows its pages.
        """
        if not self.has_encoder:
            return self.max_length - 1
        in_pages = (self.max_length - 2) // self.page_size * self.page_size
        return min(self.max_step_tokens, in_pages)


def fine_token_buckets(max_step_tokens: int) -> tuple[int, ...]:
    """Return 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024, ... up to `max_step_tokens`.

    Steps of less than 128 tokens have only powers of two.
    """
    powers = [2**i for i in range(4, max_step_tokens.bit_length())]
    most = _COARSE_TOKENS if max_step_tokens >= _FINE_TOKENS else 0
    sizes = {*powers, *(power * 3 // 2 for power in powers if power < most)}
    return tuple(sorted({*(size for size in sizes if size < max_step_tokens), max_step_tokens}))


def fine_slot_buckets(max_slots: int) -> tuple[int, ...]:
    """Return 1, 4, 8, 12, 16, 24, 32, 48, 64, ... up to `max_slots`.

    In a bucket over 8, less than a third of the slots is empty.
    """
    powers = [2**i for i in range(2, max_slots.bit_length())]
    between = [power * 3 // 2 for power in powers if power >= 8]
    return tuple(sorted({1, *powers, *(size for size in between if size < max_slots), max_slots}))


def bucket(size: int, buckets: tuple[int, ...]) -> int:
    """Return the smallest of `buckets` (increasing) >= `size`, or raise InvalidConfigError."""
    for candidate in buckets:
        if size <= candidate:
            return candidate
    raise InvalidConfigError(f"size {size} is not allowed; the largest bucket is {buckets[-1]}")
