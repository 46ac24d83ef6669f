"""The KV cache or other state of a session, with the interface of a transformers cache."""

from __future__ import annotations

from typing import Any, SupportsIndex

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from ..errors import InputError
from ..interfaces.protocols import Session
from ..interfaces.state import State
from ..upstream.cache_names import CACHE_NAME

# Keys and values that the cross-attention graph computes from the encoder's output: `cross.0.key`, `cross.0.value`, ...
_CROSS = "cross."


class StateCache(DynamicCache):  # type: ignore[misc]  # transformers is untyped here
    """A session's state (KV cache) with the interface of a transformers cache.

    The keys and values stay in the runtime's memory. A caller can continue, reorder or crop the cache, and pass the cache to the
    next call of `generate`. `layers` returns copies of the keys and values. `fill` copies another cache into this cache. The class
    inherits from `DynamicCache`, because users' scripts check for `DynamicCache` and read `layers`.

    Args:
        session: The decoder's session, which creates the state at the first call.
        croppable: Whether tokens can be removed from the end of the session's states.

    Attributes:
        state: The session's state. It is `None` before the first call.
        constants: Decoder inputs that are the same in every step, such as the cross-attention keys and values of the encoder's
            output.
        last_feeds: The inputs of the last step.
        in_parts: Whether the caller runs the prompt in several parts. The first part of a row with left padding may then contain
            only padding.
    """

    def __init__(self, session: Session, *, croppable: bool = True) -> None:
        self.in_parts = False
        self.session = session
        self._croppable = croppable
        self.state: State | None = None
        self.constants: dict[str, torch.Tensor] = {}
        self.last_feeds: dict[str, torch.Tensor] = {}
        self._ones = torch.ones((0, 0), dtype=torch.int64)
        # DynamicCache's constructor would create layers.
        Cache.__init__(self, layers=[])

    def whole_mask(self, batch: int, total: int) -> torch.Tensor:
        """Return an all-ones mask `(batch, total)`.

        The mask is a view of a buffer that all steps share, because creating a new mask takes more time than all other Python code
        of a step.
        """
        rows, columns = self._ones.shape
        if rows != batch or columns < total:
            self._ones = torch.ones((batch, total + total // 2 + 64), dtype=torch.int64)
        return self._ones[:, :total]

    def run(self, feeds: dict[str, torch.Tensor]) -> torch.Tensor:
        """Run the decoder and return the logits of the new tokens. The keys and values of the new tokens are added to the state."""
        self.last_feeds = feeds
        return self.session.run(feeds, outputs=("logits",), state=self.state)["logits"]

    @property
    def layers(self) -> list[DynamicLayer]:
        """Copies of the cached keys and values. Each layer has `keys` and `values` of shape `(batch, heads, tokens, size)`.

        Raises:
            InputError: The backend stores keys and values in its own format, or the cache contains other tensors than keys and
                values.
        """
        tensors = self.state.read() if self.state is not None else {}
        others = sorted(name for name in tensors if name.partition(".")[2] not in ("key", "value"))
        if others:
            raise InputError(
                f"The cache contains the tensor {others[0]!r} in addition to keys and values, so its layers cannot be read as a "
                "DynamicCache.",
                fix="pass the cache object itself to the next call of the model, without reading its layers.",
            )
        numbers = sorted({int(name.partition(".")[0]) for name in tensors})
        return [_layer(tensors[f"{number}.key"], tensors[f"{number}.value"]) for number in numbers]

    @layers.setter
    def layers(self, layers: list[Any]) -> None:
        """Accept only the empty list that the constructor of transformers' `Cache` assigns."""
        assert not layers, "use `fill` to load keys and values"

    @property
    def self_attention_cache(self) -> DynamicCache:
        """Copy of the self-attention keys and values. transformers' `EncoderDecoderCache` has a property of the same name."""
        return self.to_dynamic()

    @property
    def cross_attention_cache(self) -> DynamicCache:
        """Cross-attention keys and values of the encoder's output. The cache is empty for models without an encoder."""
        cache = DynamicCache()
        numbers = sorted({int(name.split(".")[1]) for name in self.constants if name.startswith(_CROSS)})
        cache.layers = [
            _layer(self.constants[f"{_CROSS}{n}.key"], self.constants[f"{_CROSS}{n}.value"]) for n in numbers
        ]
        return cache

    def fill(self, cache: Cache) -> None:
        """Replace the state by the keys and values of another cache, such as a `DynamicCache` that a PyTorch model filled.

        Raises:
            InputError: The other cache belongs to another model, or it does not contain the keys and values of all tokens.
        """
        self.reset()
        layers = [layer for layer in cache.layers if getattr(layer, "keys", None) is not None and layer.keys.numel()]
        if not layers:
            return
        incomplete = next((layer for layer in layers if not _holds_all(layer)), None)
        if incomplete is not None:
            raise InputError(
                f"The cache passed as past_key_values has a layer of the class {type(incomplete).__name__}, which does not contain the "
                "keys and values of all tokens.",
                fix="pass past_key_values=transformers.DynamicCache().",
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
        """Replace the layers of another cache by copies of this cache's layers.

        If the runtime's state cannot be copied, the other cache gets one layer that refers to this cache.
        """
        readable = self._croppable and (self.state is None or self.state.readable)
        cache.layers = list(self.layers) if readable else [UncopiedStateLayer(self)]

    def to_dynamic(self) -> DynamicCache:
        """Return a copy of the cache as a `DynamicCache`. A PyTorch model can continue this copy."""
        cache = DynamicCache()
        cache.layers = list(self.layers)
        return cache

    @property
    def batch_size(self) -> int:
        """Number of rows of the cached batch, or -1 before the first call."""
        return getattr(self.state, "batch", -1)

    @property
    def is_croppable(self) -> bool:
        """Whether tokens can be removed from the end of the cache.

        Tokens can be removed from keys and values, but not from the state of a state-space model.
        """
        return self._croppable

    @property
    def is_joinable(self) -> bool:
        """Whether `join` can append the rows of another cache of the same model."""
        return (self.state if self.state is not None else self.session.new_state(1)).joinable

    @property
    def is_initialized(self) -> bool:
        """Whether the model was called with this cache at least once, so that the cache has a state."""
        return self.state is not None

    @property
    def is_linear(self) -> list[bool]:
        """Return `[False]`, as if the cache had one layer without linear attention.

        An exact list would need copies of all layers.
        """
        return [False]

    @property
    def is_compileable(self) -> bool:
        """Always False, because torch cannot compile code that uses this cache."""
        return False

    def get_seq_length(self, layer_idx: int = 0) -> int:  # transformers' signature
        """Return the number of cached tokens."""
        return self.state.length if self.state is not None else 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Return -1: the cache itself has no maximum length."""
        return -1

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Return the number of tokens after a call with `query_length` new tokens, and the position of the first token (0)."""
        return self.get_seq_length() + query_length, 0

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Reorder the rows: row `i` becomes the former row `beam_idx[i]` (`beam_idx: (batch,) int64`)."""
        if self.state is not None:
            self.state.reorder(beam_idx)
            self.constants = {name: tensor.index_select(0, beam_idx) for name, tensor in self.constants.items()}

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep only the rows `indices: (rows,) int64`."""
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times."""
        if self.state is not None and self.batch_size > 0:
            self.reorder_cache(torch.arange(self.batch_size).repeat_interleave(repeats))

    def join(self, other: StateCache) -> None:
        """Append the rows of another cache of the same model to this cache, and empty the other cache.

        The last tokens of all rows are in the last column. A row with fewer tokens starts with unused columns. The attention masks
        of later steps must be 0 in the unused columns.

        Raises:
            InputError: The runtime cannot join states, one of the caches is empty, the other cache belongs to another model, or one of
                the caches contains encoder outputs.
        """
        if self.state is None or other.state is None or self.constants or other.constants:
            raise InputError(
                "These two caches cannot be joined. Both caches must contain tokens, and neither may contain encoder outputs.",
                fix="run a prompt with each of the two caches first, and use a model without an encoder.",
            )
        self.state.join(other.state)
        other.reset()

    def drop(self, columns: int) -> None:
        """Remove the first `columns` columns of every row. The columns must be unused in all rows (see `join`).

        Raises:
            InputError: The cache is empty, the runtime cannot remove columns, or no column would remain.
        """
        if self.state is None:
            raise InputError(
                f"The first {columns} columns of the cache cannot be removed, because the cache is empty.",
                fix="run a prompt with this cache first.",
            )
        self.state.drop(columns)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove tokens from the end of the cache.

        Args:
            tokens_to_remove: Number of tokens as a negative integer, as in transformers.

        Raises:
            InputError: The number is positive, the cache contains fewer tokens, or tokens cannot be removed from the model's state.
                Older releases of transformers read a positive number as the number of tokens to keep.
        """
        if tokens_to_remove > 0:
            raise InputError(
                f"crop({tokens_to_remove}) is ambiguous: some releases of transformers keep the first {tokens_to_remove} tokens, other "
                "releases remove tokens.",
                fix="pass the number of tokens to remove as a negative number. To keep the first n tokens, call "
                "cache.crop(n - cache.get_seq_length()).",
            )
        if self.state is not None and tokens_to_remove:
            self.state.crop(self.state.length + tokens_to_remove)

    def reset(self) -> None:
        """Release the state and the encoder outputs."""
        self.state = None
        self.constants = {}

    def clone(self) -> StateCache:
        """Return an independent copy, for example to try several continuations of one prompt."""
        copy = StateCache(self.session, croppable=self._croppable)
        copy.state = self.state.clone() if self.state is not None else None
        copy.constants = dict(self.constants)
        return copy

    def __deepcopy__(self, memo: dict[int, Any]) -> StateCache:
        # Users of transformers deep-copy the cache of a prompt prefix that several prompts share.
        return self.clone()

    def __copy__(self) -> StateCache:
        return self.clone()

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        raise InputError(
            "A StateCache cannot be pickled, because its keys and values are in the memory of a runtime.",
            fix="pass past_key_values=transformers.DynamicCache(), which can be pickled, or run the prompt again in the other process.",
        )

    def __len__(self) -> int:
        # The number of layers is unknown without copying all layers, which would be slow.
        return 0

    def __repr__(self) -> str:
        return f"StateCache({self.get_seq_length()} tokens)"


class UncopiedStateLayer(CacheLayerMixin):  # type: ignore[misc]
    """A layer of a user's `DynamicCache` that refers to a session's state.

    The layer is used if the state cannot be copied into normal layers. It is then the only layer of the `DynamicCache`.

    Args:
        cache: The cache with the session's state.
    """

    is_initialized = True

    def __init__(self, cache: StateCache) -> None:
        self.cache = cache

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing, because the state already exists."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Always raise, because a PyTorch model cannot continue the session's state.

        Raises:
            InputError: Always.
        """
        raise InputError(
            "A PyTorch model cannot continue this cache, because its keys and values are in the memory of another runtime.",
            fix="pass a new transformers.DynamicCache() to the PyTorch model.",
        )

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of tokens after a call with `query_length` new tokens, and the position of the first token (0)."""
        return self.cache.get_mask_sizes(query_length)

    def get_seq_length(self) -> int:
        """Return the number of cached tokens."""
        return self.cache.get_seq_length()

    def get_max_length(self) -> int:
        """Return -1: the cache itself has no maximum length."""
        return -1

    def reset(self) -> None:
        """Release the state of the cache."""
        self.cache.reset()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Reorder the rows: row `i` becomes the former row `beam_idx[i]` (`beam_idx: (batch,) int64`)."""
        self.cache.reorder_cache(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep only the rows `indices: (rows,) int64`."""
        self.cache.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times."""
        self.cache.batch_repeat_interleave(repeats)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove tokens from the end of the cache, if the model's state allows this. See `StateCache.crop`."""
        self.cache.crop(tokens_to_remove)


def _holds_all(layer: Any) -> bool:
    """Return whether a cache layer contains the keys of all tokens.

    A sliding-window layer contains the keys of all tokens only until its window is full.
    """
    return type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) and layer.keys.shape[-2] == layer.get_seq_length()


def _layer(keys: torch.Tensor, values: torch.Tensor) -> DynamicLayer:
    layer = DynamicLayer()
    layer.lazy_initialization(keys, values)
    layer.keys, layer.values = keys, values
    return layer


def one_cache(past_key_values: Any, cache: Any) -> Any | None:
    """Return the KV cache of a call whose caller passes the cache as `past_key_values` or as `cache`.

    Raises:
        InputError: The caller passed both arguments.
    """
    if past_key_values is not None and cache is not None:
        raise InputError(
            "The call has two arguments for the KV cache: past_key_values and cache.", fix="pass only past_key_values."
        )
    return cache if past_key_values is None else past_key_values


def renamed(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `generate` with the KV cache under the argument name of the installed transformers release.

    Raises:
        InputError: The arguments contain both `past_key_values` and `cache`.
    """
    cache = one_cache(arguments.pop("past_key_values", None), arguments.pop("cache", None))
    return arguments if cache is None else {**arguments, CACHE_NAME: cache}


def is_theirs(cache: Any) -> bool:
    """Return whether the cache is a `DynamicCache` of transformers that contains keys and values, and not a `StateCache`."""
    return isinstance(cache, DynamicCache) and not isinstance(cache, StateCache)
