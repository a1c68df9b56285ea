"""The one decoder-only transformer: target, and autoregressive drafter.

Axes: B batch, T query length, N query heads, G key/value heads, R = N/G, H head size, D model width, F
feed-forward width, V vocabulary, L layers. Activations are feature-major, x [D, B, T], and weights are
[out..., in...], so that every projection is W[n, k] @ X[k, BT]: with few columns CPUs then read weights in
the order they lie in memory (2.5 times faster at T = 4 than X @ W), and accelerators do not care.

What distinguishes the dialects is chosen when a module is built (which function, which parameter), so a
layer's code has no branches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from drafters import attention, rope
from drafters.attention import Memory, View
from drafters.compilation import run_once
from drafters.kv_cache import KVCache
from drafters.products import SAVED, padded, padded_length, product
from drafters.shapes import LayerKind, TransformerShape

Params = dict[str, Any]
Keep = Literal["everything", "products", "inputs"]
Attend = Callable[..., tuple[jax.Array, Memory]]


def rms_norm(x: jax.Array, weight: jax.Array, epsilon: float, axis: int = 0) -> jax.Array:
    """Root-mean-square norm over `axis`; weight has that axis's size. Computed in fp32."""
    x32 = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=axis, keepdims=True) + epsilon)
    spread = [1] * x.ndim
    spread[axis] = -1
    return (x32 * scale * weight.astype(jnp.float32).reshape(spread)).astype(x.dtype)


def _skip(x: jax.Array, _: Any) -> jax.Array:
    return x


def _add_bias(x: jax.Array, bias: nnx.Param) -> jax.Array:
    """Adds bias [n...] to x [n..., B, T]."""
    return x + bias[...][..., None, None].astype(x.dtype)


def _gelu_tanh(x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x, approximate=True)


_ACTIVATIONS = {"silu": jax.nn.silu, "gelu_tanh": _gelu_tanh}


class _Drawn:
    """Makes random parameters of one dtype; absent ones are None."""

    def __init__(self, dtype: Any, rngs: nnx.Rngs):
        self.dtype, self.rngs = jnp.dtype(dtype), rngs

    def normal(self, *size: int, fan_in: int, gain: float = 1.0) -> nnx.Param:
        drawn = jax.random.normal(self.rngs.params(), size, jnp.float32) * (gain * fan_in**-0.5)
        return nnx.Param(drawn.astype(self.dtype))

    def full(self, *size: int, value: float, wanted: bool = True) -> Any:
        return nnx.Param(jnp.full(size, value, self.dtype)) if wanted else nnx.data(None)

    def stacked(self, shape: TransformerShape) -> Block:
        """All L blocks as one with a leading axis."""
        keys = jax.random.split(self.rngs.params(), shape.num_layers)
        return nnx.vmap(lambda key: Block(shape, _Drawn(self.dtype, nnx.Rngs(key))))(keys)


class _Described:
    """Makes ShapeDtypeStructs in the places of the parameters; drawing under `eval_shape` takes seconds.

    Args:
      dtype: theirs.
      lead: axes before each parameter's own.
    """

    def __init__(self, dtype: Any, lead: tuple[int, ...] = ()):
        self.dtype, self.lead = jnp.dtype(dtype), lead

    def normal(self, *size: int, fan_in: int, gain: float = 1.0) -> nnx.Param:
        return nnx.Param(jax.ShapeDtypeStruct((*self.lead, *size), self.dtype))

    def full(self, *size: int, value: float, wanted: bool = True) -> Any:
        return self.normal(*size, fan_in=1) if wanted else nnx.data(None)

    def stacked(self, shape: TransformerShape) -> Block:
        """As `_Drawn.stacked`."""
        return Block(shape, _Described(self.dtype, (shape.num_layers,)))


_Builder = _Drawn | _Described


class Attention(nnx.Module):
    """Grouped-query attention. `qkv` holds, per group, R query heads, one key and one value head."""

    def __init__(self, shape: TransformerShape, make: _Builder):
        groups, per_group = shape.num_kv_heads, shape.queries_per_group
        head, width = shape.head_dim, shape.width
        self.scale = shape.query_scale or head**-0.5
        self.qkv = make.normal(groups, per_group + 2, head, width, fan_in=width)
        self.qkv_bias = make.full(groups, per_group + 2, head, value=0, wanted=shape.qkv_bias)
        unit = 1 - shape.norm_offset
        self.query_norm = make.full(head, value=unit, wanted=shape.qk_norm)
        self.key_norm = make.full(head, value=unit, wanted=shape.qk_norm)
        gain = (2 * shape.num_layers) ** -0.5
        self.out = make.normal(
            width, groups, per_group, head, fan_in=shape.num_heads * head, gain=gain
        )
        self.out_bias = make.full(width, value=0, wanted=shape.output_bias)
        self._bias_qkv = _add_bias if shape.qkv_bias else _skip
        self._bias_out = _add_bias if shape.output_bias else _skip
        self._norm_heads = _norm_queries_and_keys if shape.qk_norm else _skip
        self.epsilon, self.offset = shape.norm_epsilon, shape.norm_offset

    def __call__(
        self, x: jax.Array, view: View, memory: Memory, attend: Attend
    ) -> tuple[jax.Array, Memory]:
        """x [D, B, T] -> [D, B, T], and the layer's memory."""
        heads = product(self.qkv[...], x)
        heads = self._bias_qkv(heads, self.qkv_bias)
        turned = rope.rotate(self._norm_heads(heads[:, :-1], self), view.cos, view.sin)
        q, k, v = turned[:, :-1] * self.scale, turned[:, -1], heads[:, -1]
        mixed, memory = attend(q, k, v, view, memory)
        # One contracted axis, not three: XLA would order three anew and copy the weight at every step.
        weight = self.out[...].reshape(x.shape[0], -1)
        out = product(weight, mixed.reshape(-1, *x.shape[1:]))
        return self._bias_out(out, self.out_bias), memory


def _norm_queries_and_keys(heads: jax.Array, module: Attention) -> jax.Array:
    """Norms heads [G, R + 1, H, B, T] over H: R query heads by one weight, the key head by another."""
    norm = functools.partial(rms_norm, epsilon=module.epsilon, axis=2)
    q = norm(heads[:, :-1], module.query_norm[...] + module.offset)
    k = norm(heads[:, -1:], module.key_norm[...] + module.offset)
    return jnp.concatenate((q, k), axis=1)


class Mlp(nnx.Module):
    """Gated MLP; gate and up projection are one product."""

    def __init__(self, shape: TransformerShape, make: _Builder):
        width, hidden = shape.width, shape.mlp_width
        self.gate_up = make.normal(hidden, 2, width, fan_in=width)
        self.gate_up_bias = make.full(hidden, 2, value=0, wanted=shape.mlp_bias)
        gain = (2 * shape.num_layers) ** -0.5
        self.down = make.normal(width, hidden, fan_in=hidden, gain=gain)
        self.down_bias = make.full(width, value=0, wanted=shape.mlp_bias)
        self._bias = _add_bias if shape.mlp_bias else _skip
        self._activate = _ACTIVATIONS[shape.activation]

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [D, B, T] -> [D, B, T]."""
        gate_up = product(self.gate_up[...], x)
        gate_up = self._bias(gate_up, self.gate_up_bias)
        hidden = self._activate(gate_up[:, 0]) * gate_up[:, 1]
        out = product(self.down[...], hidden)
        return self._bias(out, self.down_bias)


def _norm(module: Any, x: jax.Array, weight: nnx.Param) -> jax.Array:
    return rms_norm(x, weight[...] + module.offset, module.epsilon)


def _no_norm(module: Any, x: jax.Array, weight: None) -> jax.Array:
    return x


class Block(nnx.Module):
    """One layer: x + attention(norm x), then x + mlp(norm x); Gemma norms both outputs as well."""

    def __init__(self, shape: TransformerShape, make: _Builder):
        norm = functools.partial(make.full, shape.width, value=1 - shape.norm_offset)
        self.attention_norm = norm()
        self.attention = Attention(shape, make)
        self.attention_post_norm = norm(wanted=shape.post_norms)
        self.mlp_norm = norm()
        self.mlp = Mlp(shape, make)
        self.mlp_post_norm = norm(wanted=shape.post_norms)
        self.epsilon, self.offset = shape.norm_epsilon, shape.norm_offset
        self._after = _norm if shape.post_norms else _no_norm

    def __call__(
        self, x: jax.Array, view: View, memory: Memory, attend: Attend
    ) -> tuple[jax.Array, Memory]:
        """x [D, B, T] -> [D, B, T], and the layer's memory."""
        with jax.named_scope("attention"):
            mixed, memory = self.attention(
                _norm(self, x, self.attention_norm), view, memory, attend
            )
            x = x + self._after(self, mixed, self.attention_post_norm)
        with jax.named_scope("mlp"):
            mixed = self.mlp(_norm(self, x, self.mlp_norm))
            x = x + self._after(self, mixed, self.mlp_post_norm)
        return x, memory


def _run_unrolled(
    layers: nnx.List,
    kinds: Sequence[LayerKind],
    x: jax.Array,
    views: dict[LayerKind, View],
    memory: Sequence[Memory],
    attend: Attend,
) -> tuple[jax.Array, tuple[Memory, ...]]:
    """Applies blocks one after the other; memory holds one entry per layer."""
    kept = []
    for i, (block, kind, slot) in enumerate(zip(layers, kinds, memory, strict=True)):
        with jax.named_scope(f"layer_{i}"):
            x, slot = _run_block(*nnx.split(block), x, views[kind], slot, attend)
        kept.append(slot)
    return x, tuple(kept)


@functools.partial(jax.jit, static_argnames=("graphdef", "attend"))
def _run_block(
    graphdef: Any, params: Any, x: jax.Array, view: View, memory: Memory, attend: Attend
) -> tuple[jax.Array, Memory]:
    """One block. Layers of equal shapes are traced once: XLA inlines the call, Python need not repeat it."""
    return nnx.merge(graphdef, params)(x, view, memory, attend)


def _run_scanned(
    layers: Block,
    kinds: Sequence[LayerKind],
    x: jax.Array,
    views: dict[LayerKind, View],
    memory: Sequence[Memory],
    attend: Attend,
    keep: Callable[[Callable], Callable] = lambda body: body,
) -> tuple[jax.Array, tuple[Memory, ...]]:
    """Applies one block whose parameters have a leading layer axis; compiles a single body.

    Args:
      keep: decides what of a layer is kept for the backward pass; everything by default.
    """
    graphdef, stacked = nnx.split(layers)
    used = sorted(set(kinds))
    table = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(views[kind] for kind in used))
    which = jnp.asarray([used.index(kind) for kind in kinds])

    @keep
    def body(x, layer):
        params, kind = layer
        view = jax.tree.map(lambda leaf: leaf[kind], table) if len(used) > 1 else views[used[0]]
        x, _ = nnx.merge(graphdef, params)(x, view, None, attend)
        return x, None

    x, _ = jax.lax.scan(body, x, (stacked, which))
    return x, tuple(memory)


_PRODUCTS = jax.checkpoint_policies.save_only_these_names(SAVED)
_SCANNED = {
    "everything": _run_scanned,
    "products": functools.partial(
        _run_scanned, keep=functools.partial(jax.checkpoint, policy=_PRODUCTS)
    ),
    "inputs": functools.partial(_run_scanned, keep=jax.checkpoint),
}


class Transformer(nnx.Module):
    """Embedding, L blocks, norm, head.

    Args:
      shape: its shape.
      make: makes the initial parameters.
      scan: blocks are one block with a leading layer axis, run by a scan (training); otherwise a list of
        blocks, unrolled (decoding: a scan slices weights and caches, 1.4 times slower on CPU).
      keep: what a scanned layer keeps for the backward pass. "everything"; "products" with weights and
        what attention gives, the rest is computed again; "inputs" of the layer alone, a third more flops.
    """

    def __init__(
        self,
        shape: TransformerShape,
        *,
        make: _Builder,
        scan: bool = False,
        keep: Keep = "inputs",
    ):
        self.shape = shape
        width = shape.width
        self.embedding = make.normal(shape.vocab_size, width, fan_in=width)
        if scan:
            self.layers = make.stacked(shape)
        else:
            self.layers = nnx.List([Block(shape, make) for _ in range(shape.num_layers)])
        self.norm = make.full(width, value=1 - shape.norm_offset)
        self.head = (
            nnx.data(None)
            if shape.tied_head
            else make.normal(shape.logits_size, width, fan_in=width)
        )
        self._run: Callable[..., Any] = _SCANNED[keep] if scan else _run_unrolled
        self._head_of = _tied_head if shape.tied_head else _own_head

    def embed(self, tokens: jax.Array, dtype: jnp.dtype | None = None) -> jax.Array:
        """tokens i32[B, T] -> [D, B, T] in `dtype` (that of the parameters by default)."""
        rows = self.embedding[...][tokens].astype(dtype or self.embedding.dtype)
        return jnp.moveaxis(rows, -1, 0) * self.shape.embedding_scale

    def views(self, positions: jax.Array, start: jax.Array, allowed: Any, keys: jax.Array) -> dict:
        """What each kind of layer sees: positions i32[B, T], key positions i32[B or 1, S]."""
        shape = self.shape
        views = {}
        for kind in set(shape.layer_kinds()):
            local = kind == "local"
            position = shape.local_rope if local and shape.local_rope else shape.rope
            mask = attention.visible(positions, keys, shape.window if local else 0) & allowed
            cos, sin = rope.tables(position, shape.head_dim, positions)
            views[kind] = View(cos, sin, mask, start)
        return views

    def hidden(
        self,
        tokens: jax.Array,
        segments: jax.Array | None = None,
        positions: jax.Array | None = None,
        dtype: jnp.dtype | None = None,
    ) -> jax.Array:
        """Final hidden states [D, B, T] without a cache.

        Args:
          tokens: i32[B, T].
          segments: i32[B, T], tokens attend only to their own segment; all one by default.
          positions: i32[B, T], 0.. within each segment.
          dtype: of the activations.
        """
        batch, length = tokens.shape
        order = jnp.broadcast_to(jnp.arange(length), (batch, length))
        allowed = True if segments is None else segments[:, :, None] == segments[:, None, :]
        positions = order if positions is None else positions
        views = self.views(positions, jnp.zeros((batch,), jnp.int32), allowed, positions)
        return self._apply(self.embed(tokens, dtype), views, (None,) * self.shape.num_layers)[0]

    def step(self, tokens: jax.Array, cache: KVCache) -> tuple[jax.Array, KVCache]:
        """Appends tokens i32[B, T] to every row of the cache: hidden states [D, B, T] and the cache.

        The returned length counts all T tokens; the caller lowers it for rows that committed fewer. The
        cache needs room for length + max(T, SMALLEST_WRITE).
        """
        start, (batch, length) = cache.length, tokens.shape
        tokens = padded(tokens, padded_length(batch, length))
        positions = start[:, None] + jnp.arange(tokens.shape[1])[None]
        slots = jnp.arange(cache.capacity)[None]
        views = {
            kind: view._replace(mask=view.mask[:, :length])
            for kind, view in self.views(positions, start, True, slots).items()
        }
        memory = tuple(zip(cache.k, cache.v, strict=True))
        x, memory = self._apply(self.embed(tokens), views, memory, attend=attention.attend_cached)
        k, v = zip(*memory, strict=True)
        return x[:, :, :length], KVCache(k, v, start + length)

    def _apply(
        self,
        x: jax.Array,
        views: dict,
        memory: Sequence[Memory],
        attend: Attend = attention.attend_packed,
    ) -> tuple[jax.Array, tuple[Memory, ...]]:
        x, kept = self._run(self.layers, self.shape.layer_kinds(), x, views, memory, attend)
        weight = self.norm[...] + self.shape.norm_offset
        return rms_norm(x, weight, self.shape.norm_epsilon), kept

    def logits(self, x: jax.Array) -> jax.Array:
        """Hidden states [D, ...] -> logits f32[V or draft vocabulary, ...]."""
        head, columns = self._head_of(self).astype(x.dtype), x.reshape(x.shape[0], -1)
        count = columns.shape[1]
        columns = padded(columns, padded_length(1, count))
        logits = jnp.einsum("vd,dc->vc", head, columns, preferred_element_type=jnp.float32)
        return logits[:, :count].reshape(-1, *x.shape[1:])

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Logits f32[B, T, V] of tokens i32[B, T], without a cache."""
        return jnp.moveaxis(self.logits(self.hidden(tokens)), 0, -1)


def _tied_head(model: Transformer) -> jax.Array:
    return model.embedding[...]


def _own_head(model: Transformer) -> jax.Array:
    assert model.head is not None
    return model.head[...]


def params_of(model: nnx.Module) -> Params:
    """The parameters as a plain nested dict with string keys, e.g. params["layers"]["0"]["mlp"]["down"]."""
    return _with_keys(nnx.to_pure_dict(nnx.state(model, nnx.Param)), str)


def _with_keys(tree: Params, rename: Callable[[Any], Any]) -> Params:
    return {
        rename(key): _with_keys(value, rename) if isinstance(value, dict) else value
        for key, value in tree.items()
    }


def _as_index(key: str) -> int | str:
    return int(key) if key.isdigit() else key


@functools.lru_cache(maxsize=64)
def _described(shape: TransformerShape, dtype: Any, scan: bool, keep: Keep) -> Any:
    """The static half of a model of this shape (a hashable GraphDef) and its abstract state."""
    return nnx.split(Transformer(shape, make=_Described(dtype), scan=scan, keep=keep))


def abstract_params(
    shape: TransformerShape, dtype: Any = jnp.float32, scan: bool = False
) -> Params:
    """ShapeDtypeStructs in the places of the parameters, nothing allocated."""
    _, state = _described(shape, jnp.dtype(dtype), scan, "inputs")
    return _with_keys(nnx.to_pure_dict(state), str)


def with_params(
    shape: TransformerShape, params: Params, scan: bool = False, keep: Keep = "inputs"
) -> Transformer:
    """A model of this shape on these parameters; their dtypes are kept."""
    graphdef, state = _described(shape, jnp.dtype(jnp.float32), scan, keep)
    state = nnx.clone(state)
    nnx.replace_by_pure_dict(state, _with_keys(params, _as_index))
    return nnx.merge(graphdef, state)


def init_params(
    shape: TransformerShape,
    seed: int,
    dtype: Any = jnp.float32,
    scan: bool = False,
    shardings: Any = None,
) -> Params:
    """Random initial parameters: scaled normal projections, unit norms, zero biases.

    Args:
      shape, seed, dtype, scan: of the model.
      shardings: NamedShardings in the places of the parameters; the default device without.
    """

    def draw(seed):
        rngs = nnx.Rngs(jax.random.key(seed))
        return params_of(Transformer(shape, make=_Drawn(dtype, rngs), scan=scan))

    return jax.jit(draw, out_shardings=shardings, compiler_options=run_once())(seed)


def stack_layers(params: Params) -> Params:
    """Per-layer parameters -> the tree of a scanned model, leaves of `layers` being [L, ...]."""
    layers = params["layers"]
    ordered = [layers[str(i)] for i in range(len(layers))]
    return {**params, "layers": jax.tree.map(lambda *leaves: jnp.stack(leaves), *ordered)}


def unstack_layers(params: Params) -> Params:
    """The inverse of `stack_layers`."""
    stacked = params["layers"]
    depth = jax.tree.leaves(stacked)[0].shape[0]
    layers = {str(i): jax.tree.map(lambda leaf, i=i: leaf[i], stacked) for i in range(depth)}
    return {**params, "layers": layers}
