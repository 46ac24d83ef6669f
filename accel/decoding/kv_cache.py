"""A session's state as transformers sees a cache."""

from __future__ import annotations

from typing import Any, SupportsIndex

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from ..errors import InputError
from ..interfaces.protocols import Session
from ..interfaces.state import State
from ..upstream.cache_names import CACHE_NAME

# What the graph in front of the decoder makes of the encoder's answer: `cross.0.key`, `cross.0.value`, ...
_CROSS = "cross."


class StateCache(DynamicCache):  # type: ignore[misc]  # transformers is untyped here
    """A session's state as a transformers cache. It is a `DynamicCache` because scripts test for one and read its `layers`.

    Keys and values stay where the runtime has them: the cache can be continued, reordered, cropped and passed to the next
    `generate`. `layers` copies them out, and `fill` copies another cache in.

    Args:
        session: The decoder's session; it makes the state at the first call.
        croppable: Whether tokens can be taken out of its states.

    Attributes:
        state: The session's state; `None` before the first call.
        constants: The same inputs of every step: what the decoder reads of the encoder's answer.
        last_feeds: The inputs of the last step.
        in_parts: Whether a prompt is read in parts: a row that is padded on the left may have no token in the first part.
    """

    def __init__(self, session: Session, *, croppable: bool = True) -> None:
        self.in_parts = False
        self.session = session
        self._croppable = croppable
        self.state: State | None = None
        self.constants: dict[str, torch.Tensor] = {}
        self.last_feeds: dict[str, torch.Tensor] = {}
        self._ones = torch.ones((0, 0), dtype=torch.int64)
        # Not DynamicCache's constructor, which makes layers.
        Cache.__init__(self, layers=[])

    def whole_mask(self, batch: int, total: int) -> torch.Tensor:
        """A mask `(batch, total)` of ones. Making a new one at each step would cost more than the rest of the step."""
        rows, columns = self._ones.shape
        if rows != batch or columns < total:
            self._ones = torch.ones((batch, total + total // 2 + 64), dtype=torch.int64)
        return self._ones[:, :total]

    def run(self, feeds: dict[str, torch.Tensor]) -> torch.Tensor:
        """Run the decoder: the logits of new tokens, whose keys and values are in the state from then on."""
        self.last_feeds = feeds
        return self.session.run(feeds, outputs=("logits",), state=self.state)["logits"]

    @property
    def layers(self) -> list[DynamicLayer]:
        """Copies of the keys and values, a layer each with `keys` and `values: (batch, heads, tokens, size)`.

        Raises:
            InputError: The backend keeps them in a form of its own, or the model keeps something else.
        """
        held = self.state.read() if self.state is not None else {}
        odd = sorted(name for name in held if name.partition(".")[2] not in ("key", "value"))
        if odd:
            raise InputError(
                f"The model keeps {odd[0]}, which is neither keys nor values.", fix="leave it to the model."
            )
        numbers = sorted({int(name.partition(".")[0]) for name in held})
        return [_layer(held[f"{number}.key"], held[f"{number}.value"]) for number in numbers]

    @layers.setter
    def layers(self, layers: list[Any]) -> None:
        """transformers' own constructor sets an empty list."""
        assert not layers, "a state is filled by `fill`"

    @property
    def self_attention_cache(self) -> DynamicCache:
        """A copy of the keys and values of the decoder's own tokens, as an `EncoderDecoderCache` names it."""
        return self.to_dynamic()

    @property
    def cross_attention_cache(self) -> DynamicCache:
        """The keys and values of the encoder's answer; empty where there is no encoder."""
        made = DynamicCache()
        numbers = sorted({int(name.split(".")[1]) for name in self.constants if name.startswith(_CROSS)})
        made.layers = [
            _layer(self.constants[f"{_CROSS}{n}.key"], self.constants[f"{_CROSS}{n}.value"]) for n in numbers
        ]
        return made

    def fill(self, cache: Cache) -> None:
        """Hold the keys and values of another cache, such as a `DynamicCache` that PyTorch filled.

        Raises:
            InputError: It is not of this model, or of another kind than keys and values.
        """
        self.reset()
        layers = [layer for layer in cache.layers if getattr(layer, "keys", None) is not None and layer.keys.numel()]
        if not layers:
            return
        odd = next((layer for layer in layers if not _holds_all(layer)), None)
        if odd is not None:
            raise InputError(
                f"The cache has a {type(odd).__name__}, which keeps other tokens than all.",
                fix="pass a DynamicCache().",
            )
        rows, _, length, _ = layers[0].keys.shape
        state = self.session.new_state(int(rows))
        pairs = enumerate((layer.keys.detach(), layer.values.detach()) for layer in layers)
        values = {
            f"{n}.{kind}": tensor for n, pair in pairs for kind, tensor in zip(("key", "value"), pair, strict=True)
        }
        state.load(values, int(length))
        self.state = state

    def write_to(self, cache: Cache) -> None:
        """Replace the keys and values of another cache by copies; by a reference to this cache where they cannot be copied."""
        readable = self._croppable and (self.state is None or self.state.readable)
        cache.layers = list(self.layers) if readable else [HeldLayer(self)]

    def to_dynamic(self) -> DynamicCache:
        """A copy that a PyTorch model continues."""
        made = DynamicCache()
        made.layers = list(self.layers)
        return made

    @property
    def batch_size(self) -> int:
        """Rows held, -1 before the first call."""
        return getattr(self.state, "batch", -1)

    @property
    def is_croppable(self) -> bool:
        """Whether tokens can be taken out: out of keys and values, but not out of the state of a state-space model."""
        return self._croppable

    @property
    def is_joinable(self) -> bool:
        """Whether rows of another cache of the model can join (`join`), while others stay."""
        return (self.state if self.state is not None else self.session.new_state(1)).joinable

    @property
    def is_initialized(self) -> bool:
        """Whether a call was made."""
        return self.state is not None

    @property
    def is_linear(self) -> list[bool]:
        """One layer that counts tokens; the real layers would have to be copied for the answer."""
        return [False]

    @property
    def is_compileable(self) -> bool:
        """Whether torch can compile over it: no."""
        return False

    def get_seq_length(self, layer_idx: int = 0) -> int:  # transformers' signature
        """Tokens held."""
        return self.state.length if self.state is not None else 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """No limit of its own."""
        return -1

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Tokens after the next call, and the first one's position."""
        return self.get_seq_length() + query_length, 0

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row `i` becomes row `beam_idx[i]` (`beam_idx: (batch,) int64`)."""
        if self.state is not None:
            self.state.reorder(beam_idx)
            self.constants = {name: tensor.index_select(0, beam_idx) for name, tensor in self.constants.items()}

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these rows: `indices: (rows,) int64`."""
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times."""
        if self.state is not None and self.batch_size > 0:
            self.reorder_cache(torch.arange(self.batch_size).repeat_interleave(repeats))

    def join(self, other: StateCache) -> None:
        """Add the rows of another cache of the model after these rows, and empty that cache.

        The last token of every row is in the last column. A row with fewer tokens begins with columns that the masks of later steps
        have to hide.

        Raises:
            InputError: The runtime's states cannot be joined, a cache of another model, an empty cache, or one with an encoder's answer.
        """
        if self.state is None or other.state is None or self.constants or other.constants:
            raise InputError(
                "Rows join rows that hold tokens, and no encoder's answer.",
                fix="run a prompt of a decoder through both caches first.",
            )
        self.state.join(other.state)
        other.reset()

    def drop(self, columns: int) -> None:
        """Forget the first columns of every row, which all masks hid; see `join`.

        Raises:
            InputError: The runtime's states cannot be joined, or no column would be left.
        """
        if self.state is None:
            raise InputError("An empty cache has no columns.", fix="run a prompt first.")
        self.state.drop(columns)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens, given as a negative number as in transformers.

        Raises:
            InputError: A positive number, which transformers once took for how many to keep; more tokens than there are; or a
                model whose state no token can be taken out of.
        """
        if tokens_to_remove > 0:
            raise InputError(
                f"crop({tokens_to_remove}) can be read as tokens to keep or to remove.",
                fix="pass how many to remove as a negative number; to keep some: cache.crop(keep - cache.get_seq_length()).",
            )
        if self.state is not None and tokens_to_remove:
            self.state.crop(self.state.length + tokens_to_remove)

    def reset(self) -> None:
        """Forget everything."""
        self.state = None
        self.constants = {}

    def clone(self) -> StateCache:
        """An independent copy, for trying several continuations of one prompt."""
        copy = StateCache(self.session, croppable=self._croppable)
        copy.state = self.state.clone() if self.state is not None else None
        copy.constants = dict(self.constants)
        return copy

    def __deepcopy__(self, memo: dict[int, Any]) -> StateCache:
        # Users of transformers copy the cache of a common prefix.
        return self.clone()

    def __copy__(self) -> StateCache:
        return self.clone()

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        raise InputError(
            "A StateCache holds keys and values in the memory of a runtime, which cannot be pickled.",
            fix="pass a transformers DynamicCache as past_key_values, which can; or read the prompt again in the other process.",
        )

    def __len__(self) -> int:
        # Counting the layers would copy them.
        return 0

    def __repr__(self) -> str:
        return f"StateCache({self.get_seq_length()} tokens)"


class HeldLayer(CacheLayerMixin):  # type: ignore[misc]
    """The one layer of a user's `DynamicCache` that stands for a state which cannot be copied into it.

    Args:
        cache: Holds the state.
    """

    is_initialized = True

    def __init__(self, cache: StateCache) -> None:
        self.cache = cache

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: the state exists."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Raise: a PyTorch model cannot continue the state.

        Raises:
            InputError: Always.
        """
        raise InputError(
            "The cache holds states of a runtime, which PyTorch's model cannot read.",
            fix="pass that model an empty cache.",
        )

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Tokens after the next call, and the first one's position."""
        return self.cache.get_mask_sizes(query_length)

    def get_seq_length(self) -> int:
        """Tokens held."""
        return self.cache.get_seq_length()

    def get_max_length(self) -> int:
        """No limit of its own."""
        return -1

    def reset(self) -> None:
        """Forget everything."""
        self.cache.reset()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row `i` becomes row `beam_idx[i]` (`beam_idx: (batch,) int64`)."""
        self.cache.reorder_cache(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these rows: `indices: (rows,) int64`."""
        self.cache.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times."""
        self.cache.batch_repeat_interleave(repeats)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens, where the model can."""
        self.cache.crop(tokens_to_remove)


def _holds_all(layer: Any) -> bool:
    """Whether a layer has the keys of all tokens; a layer with a window does until the window is full."""
    return type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) and layer.keys.shape[-2] == layer.get_seq_length()


def _layer(keys: torch.Tensor, values: torch.Tensor) -> DynamicLayer:
    layer = DynamicLayer()
    layer.lazy_initialization(keys, values)
    layer.keys, layer.values = keys, values
    return layer


def one_cache(past_key_values: Any, cache: Any) -> Any | None:
    """The cache of a call that takes it by both names.

    Raises:
        InputError: Both were given.
    """
    if past_key_values is not None and cache is not None:
        raise InputError(
            "The cache was given twice, as past_key_values and as cache.", fix="pass it by one of the two names."
        )
    return cache if past_key_values is None else past_key_values


def renamed(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `generate` with the cache by the name that the installed transformers has for it.

    Raises:
        InputError: The cache came by both names.
    """
    cache = one_cache(arguments.pop("past_key_values", None), arguments.pop("cache", None))
    return arguments if cache is None else {**arguments, CACHE_NAME: cache}


def is_theirs(cache: Any) -> bool:
    """Whether a cache is a `DynamicCache` that holds its keys and values itself, as PyTorch models fill them."""
    return isinstance(cache, DynamicCache) and not isinstance(cache, StateCache)
