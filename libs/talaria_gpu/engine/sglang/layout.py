"""One device buffer for all models: weights from 0, KV and recurrent states right above, at fixed addresses (3.5, D).

Regions of different models overlap; only the active model's bytes are valid. Whole storages move, with stride and
offset kept, so that tied weights and views stay what they are; tensors keep their identity, so that whoever holds one
follows. Done between loading and the making of attention backends and graphs, which capture addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from talaria_common.errors import EngineError
from talaria_gpu.staging.plan import Segment

ALIGN = 256
"""Bytes; every storage starts at a multiple of it, as allocators on devices do."""
POISON = 0xFF
"""Garbage byte: NaN as float32, float16 and bfloat16, so that what is computed from a stale byte shows."""


def tensors_of(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Every tensor that the module tree holds: parameters, buffers (non-persistent ones too) and plain attributes.

    MLA keeps its absorbed projections (w_kc, w_vc) as plain attributes.
    """
    for module in model.modules():
        yield from (t for t in module._parameters.values() if t is not None)
        yield from (t for t in module._buffers.values() if t is not None)
        yield from (t for t in list(vars(module).values()) if isinstance(t, torch.Tensor))


def attention_pool(pool: Any) -> Any:
    """The KV pool of the attention layers: a hybrid's is inside its pool."""
    return getattr(pool, "full_kv_pool", pool)


def kv_layers(pool: Any) -> list[torch.Tensor]:
    """The pool's tensors [rows, ...], layer by layer (K then V for MHA, one latent tensor for MLA)."""
    pool = attention_pool(pool)
    if hasattr(pool, "kv_buffer"):
        return list(pool.kv_buffer)
    return [tensor for pair in zip(pool.k_buffer, pool.v_buffer, strict=True) for tensor in pair]


def state_tensors(pool: Any) -> list[torch.Tensor]:
    """A hybrid's recurrent states [layers, slots, ...]: those of its convolutions, then the matrices; else none.

    Slot 0 is padding.
    """
    states = getattr(pool, "mamba_pool", None)
    if states is None:
        return []
    if states._slot_siblings:
        raise EngineError("this hybrid keeps side states that this adapter does not know")
    return [*states.mamba_cache.conv, states.mamba_cache.temporal]


class Region:
    """One model's place in the buffer.

    Args:
        name: of the model, for messages.
        model: loaded and post-processed.
        pool: its KV pool.
        page_size: rows per page; page 0 is the padding page, which must read as zero.
        buffer: uint8, on the device.
        make_image: gives host memory of a size in bytes; it is filled with the weights, and is `image` then.

    Raises:
        EngineError: weights and KV do not fit; the message shows the arithmetic.
    """

    def __init__(
        self,
        name: str,
        model: torch.nn.Module,
        pool: Any,
        page_size: int,
        buffer: torch.Tensor,
        *,
        make_image: Callable[[int], torch.Tensor],
    ) -> None:
        self._buffer, self._model, self._pool, self._page_size = buffer, model, pool, page_size
        storages = self._storages()
        self.weight_bytes = sum(_up(s.nbytes()) for s in storages)
        layers, states = kv_layers(pool), state_tensors(pool)
        self.rows = layers[0].shape[0]
        self.kv_bytes_per_token = sum(layer[0].nbytes for layer in layers)
        self.state_bytes = sum(_up(state.nbytes) for state in states)
        self.end = self.weight_bytes + sum(_up(layer.nbytes) for layer in layers) + self.state_bytes
        self._check_fit(name)
        image = make_image(self.weight_bytes)
        self._move_weights(storages, image)
        self.segments: tuple[Segment, ...] = ()
        """The KV tensors as staging sees them, ascending."""
        self._kv: list[torch.Tensor] = []
        self._states: list[torch.Tensor] = []
        self._move_states(states, self._move_kv(layers))
        self.open_kv()
        self.home = self.addresses()

    def _storages(self) -> list[torch.UntypedStorage]:
        """The distinct storages of the weights on the buffer's device, in the order of the module tree."""
        found: dict[int, torch.UntypedStorage] = {}
        for tensor in tensors_of(self._model):
            storage = tensor.untyped_storage()
            if tensor.device == self._buffer.device and storage.nbytes():
                found.setdefault(storage.data_ptr(), storage)
        return list(found.values())

    def _check_fit(self, name: str) -> None:
        size = self._buffer.numel()
        if self.end <= size:
            return
        mib = 1 << 20
        raise EngineError(
            f"{name} does not fit the device buffer: {self.weight_bytes} B weights + {self.rows} KV rows x "
            f"{self.kv_bytes_per_token} B + {self.state_bytes} B recurrent states = {self.end} B "
            f"({self.end / mib:.1f} MiB), but the buffer has {size} B "
            f"({size / mib:.1f} MiB). Set buffer_mib to at least {-(-self.end // mib)}, or kv_tokens lower"
        )

    @property
    def gap(self) -> tuple[int, int]:
        """[from, to) of the buffer above everything of this model."""
        return self.end, self._buffer.numel()

    def _move_weights(self, storages: list[torch.UntypedStorage], image: torch.Tensor) -> None:
        base_of: dict[int, int] = {}
        base = 0
        for storage in storages:
            raw = torch.empty(0, dtype=torch.uint8, device=self._buffer.device).set_(storage, 0, (storage.nbytes(),))
            self._buffer[base : base + storage.nbytes()].copy_(raw)
            base_of[storage.data_ptr()] = base
            base += _up(storage.nbytes())
        for tensor in tensors_of(self._model):
            moved = base_of.get(tensor.untyped_storage().data_ptr())
            if moved is not None:  # None: moved already, for it hangs in two modules
                tensor.data = self._view(tensor, moved + tensor.storage_offset() * tensor.element_size())
        image.copy_(self._buffer[: self.weight_bytes])

    def _move_kv(self, layers: list[torch.Tensor]) -> int:
        base = self.weight_bytes
        for layer in layers:
            if not layer.is_contiguous():
                raise EngineError("a KV pool tensor is not contiguous: this adapter cannot place it")
            layer.data = self._view(layer, base)
            row_bytes = layer[0].nbytes
            self._kv.append(self._buffer[base : base + self.rows * row_bytes].view(self.rows, row_bytes))
            self.segments += (Segment(base, row_bytes * self._page_size),)
            base += _up(self.rows * row_bytes)
        pool = attention_pool(self._pool)
        latent = hasattr(pool, "kv_buffer")
        tables = {"k_data_ptrs": layers[0::2], "v_data_ptrs": layers[1::2]} if not latent else {}
        tables["data_ptrs"] = layers if latent else layers[0::2] + layers[1::2]
        for attribute, tensors in tables.items():
            table = getattr(pool, attribute, None)
            if table is not None:  # in place: others hold these tables
                table.copy_(torch.tensor([t.data_ptr() for t in tensors], dtype=torch.uint64))
        return base

    def _move_states(self, states: list[torch.Tensor], base: int) -> None:
        for state in states:
            if not state.is_contiguous():
                raise EngineError("a recurrent state tensor is not contiguous: this adapter cannot place it")
            state.data = self._view(state, base)
            slots = self._buffer[base : base + state.nbytes].view(*state.shape[:2], -1)
            self._states.append(slots)
            base += _up(state.nbytes)
        if states:  # a table of addresses that it makes once, perhaps already
            vars(self._pool.mamba_pool).pop("_conv_slot_desc", None)

    def _view(self, like: torch.Tensor, base: int) -> torch.Tensor:
        """A tensor over the buffer at byte `base` with `like`'s type, size and stride."""
        if base % like.element_size():
            raise EngineError(f"a {like.dtype} tensor cannot start at byte {base}")
        view = torch.empty(0, dtype=like.dtype, device=self._buffer.device)
        return view.set_(self._buffer.untyped_storage(), base // like.element_size(), like.size(), like.stride())

    def addresses(self) -> tuple[int, ...]:
        """Where every weight, KV and state tensor of the model is now; equal to `home`, or something moved."""
        held = (*tensors_of(self._model), *kv_layers(self._pool), *state_tensors(self._pool))
        return tuple(t.data_ptr() for t in held)

    def release(self) -> None:
        """Let go of the buffer, whoever still holds the model: its tensors become empty."""
        nothing = torch.empty(0, dtype=torch.uint8, device=self._buffer.device)
        for tensor in (*tensors_of(self._model), *kv_layers(self._pool), *state_tensors(self._pool)):
            tensor.data = nothing.view(tensor.dtype)
        self._kv.clear()
        self._states.clear()

    def poison(self) -> None:
        """Overwrite all that is not the model's weights with garbage: whatever is read there unwritten shows."""
        self._buffer[self.weight_bytes :].fill_(POISON)

    def poison_pages(self, pages: torch.Tensor) -> None:
        """The same for pages that are free again."""
        rows = (pages.view(-1, 1) * self._page_size + torch.arange(self._page_size, device=pages.device)).flatten()
        for layer in self._kv:
            layer[rows] = POISON

    def open_kv(self) -> None:
        """Zero the padding page and the padding state, which idle rows of a batch read and write."""
        for layer in self._kv:
            layer[: self._page_size].zero_()
        for state in self._states:
            state[:, 0].zero_()


def _up(size: int) -> int:
    return -(-size // ALIGN) * ALIGN
